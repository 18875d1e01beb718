"""Hugging Face datasets in a folder: checks of the paths in their files."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from headwater.models.load import read_text, reading
from headwater.util.errors import HeadwaterError, shown

# Where a dataset lists its files: in the head of its card, or in a separate file.
CARD, LIST = "README.md", ".huggingface.yaml"


def check_card(folder: Path) -> None:
    """Raise `HeadwaterError` if a dataset lists files outside its folder."""
    for name in (CARD, LIST):
        file = folder / name
        if not file.exists():
            continue
        text = read_text(file)
        if name == CARD:
            text = text.split("\n---", 1)[0].removeprefix("---") if text.startswith("---") else ""
        with reading(repr(str(file)), "correct or remove it"):
            content = yaml.safe_load(text)
        for path in _list_strings(content.get("configs") if isinstance(content, dict) else None):
            pure = PurePosixPath(path.replace("\\", "/"))
            if pure.is_absolute() or ".." in pure.parts or "::" in path or "://" in path:
                raise HeadwaterError(f"{str(file)!r} names {shown(path)}, which is outside its folder; correct it.")


def download_folders(name: str) -> list[Path]:
    """List the folders to which a dataset on the hub is downloaded and unpacked."""
    from datasets import config

    hub = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset")
    return [hub, Path(config.HF_DATASETS_CACHE), Path(config.DOWNLOADED_DATASETS_PATH)]


def _list_strings(content: Any) -> Iterator[str]:
    """List all texts in a value."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for inner in content.values() if isinstance(content, dict) else content:
            yield from _list_strings(inner)
