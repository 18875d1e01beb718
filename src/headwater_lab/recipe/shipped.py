"""The recipes that come with headwater."""

from __future__ import annotations

from pathlib import Path

from headwater.util.layout import package_folder


def recipes_folder() -> Path:
    """The folder of the shipped recipes: in the installed package, or at the root of a checkout."""
    package = package_folder(__name__)
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes by name: the path below their folder, without .yaml."""
    folder = recipes_folder()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
