"""`headwater new`: packages that extend headwater."""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import Annotated

import typer

from headwater.util.errors import HeadwaterError, shown
from headwater.util.layout import PACKAGES, package_folder
from headwater_lab.cli.common import check_writable, out

new = typer.Typer(help="Write a small package that extends headwater.", no_args_is_help=True)
# Templates, and the files made from them.
FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "mechanism.py.txt": "@NAME@.py",
    "test_mechanism.py.txt": "tests/test_@NAME@.py",
}


@new.callback()
def _group() -> None:
    """Write a small package that extends headwater."""


@new.command("mechanism", epilog="Example: headwater new mechanism value_shift")
def new_mechanism(
    name: Annotated[
        str, typer.Argument(help="Name of the mechanism and its module: lower-case letters, digits and _.")
    ],
    out_folder: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="The new folder; default: NAME.", show_default=False)
    ] = None,
) -> None:
    """Write a package with a mechanism in one file, its equation in plain Python, contract tests and an entry point."""
    folder = write_mechanism(name, out_folder or Path(name))
    quick = f'python -m pytest -k "llama-{name} and equal"'
    out.print(f"written to {folder}; try it with: cd {folder} && {quick}", soft_wrap=True)


def write_mechanism(name: str, folder: Path) -> Path:
    """Write a mechanism package into a new folder, and return the folder.

    Raises `HeadwaterError` for a name that is invalid or taken, and if the folder is not empty.
    """
    from headwater.plugins.registry import MECHANISMS
    from headwater.util.files import check_free, staged

    if not name.isidentifier() or not name.isascii() or name != name.lower() or keyword.iskeyword(name):
        raise HeadwaterError(f"{shown(name)} is not a module name; use lower-case letters, digits and _.")
    if name in MECHANISMS.names:
        raise HeadwaterError(f"There is already a mechanism named {name!r}; choose another name.")
    if name in (*PACKAGES, "torch", "transformers", "test", "tests"):
        raise HeadwaterError(f"The module {name!r} would hide an existing one; choose another name.")
    check_free(folder)
    check_writable(folder, folder=True)
    words = {
        "@NAME@": name,
        "@CLASS@": "".join(word.capitalize() for word in name.split("_")),
        "@PROJECT@": f"headwater-{name.strip('_').replace('_', '-')}",
    }
    with staged(folder.absolute(), 2**16) as beside:
        for template, file in FILES.items():
            text = (package_folder(__name__) / "templates" / "mechanism" / template).read_text(encoding="utf-8")
            for mark, word in words.items():
                text, file = text.replace(mark, word), file.replace(mark, word)
            (beside / file).parent.mkdir(exist_ok=True)
            (beside / file).write_text(text, encoding="utf-8")
    return folder
