"""Consoles, devices and checks of outputs for all commands."""

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError
from headwater.util.files import explain_absence
from headwater.util.versions import describe_untested
from headwater_lab.util.terminal import Terminal

stdout, stderr = Terminal(), Terminal(stderr=True)
if not (stdout.is_terminal or os.environ.get("COLUMNS")):
    stdout.width = max(120, stdout.width)  # for tables in files and pipes


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into names and overrides, key=value."""
    return [text for text in arguments if "=" not in text], [text for text in arguments if "=" in text]


def say(*texts: Any) -> None:
    """Print tables of the result, or lines."""
    for text in texts:
        stdout.print(text)


def print_result(content: Any, renderables: Iterable[Any], as_json: bool, indent: int | None = None) -> None:
    """Print a result: its content as JSON and nothing else, or its tables and lines."""
    if as_json:
        print(json.dumps(content, indent=indent, ensure_ascii=False), flush=True)
    else:
        say(*renderables)


def tell(line: str) -> None:
    """Print a message on stderr, apart from the result."""
    stderr.print(line)


def tell_model(folder: Path, model: Path | None = None) -> None:
    """Print where a command has written, and how transformers loads the model. model: its folder, if not `folder`."""
    from headwater_lab.training.saving import how_to_load

    say(f"written to {folder}\n{how_to_load(model or folder)}")


def quiet() -> None:
    """Turn off transformers' progress bars and warnings, since headwater shows its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def warn_untested() -> None:
    """Name on stderr the packages that are newer than what was tested; of a run's processes only the first does so."""
    is_first = all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    if is_first and (untested := describe_untested()):
        tell(untested)


def mechanisms_of(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read mechanisms, each name or name={options} in YAML. Raises `HeadwaterError`."""
    from headwater.config.options import parse_options
    from headwater.plugins.mechanisms import resolve
    from headwater.plugins.trust import trust_names_in
    from headwater_lab.recipe.overrides import read_yaml

    mechanisms: dict[str, dict[str, Any]] = {}
    for text in arguments:
        name, equals, options = text.partition("=")
        if equals and not options.strip():
            raise HeadwaterError(f'Mechanism {name}= has no options; write {name}, or "{name}={{key: value}}".')
        if name in mechanisms:
            raise HeadwaterError(f"Mechanism {name} is given twice; give it once, with all its options.")
        mechanisms[name] = read_yaml(options, f"The options of mechanism {name}", single=True) if equals else {}
        if not isinstance(mechanisms[name], dict):
            raise HeadwaterError(f'The options of mechanism {name} are a mapping: "{name}={{key: value}}".')
        trust_names_in({name: mechanisms[name]})
        parse_options(resolve(name), mechanisms[name])
    return mechanisms


def device_of(name: str) -> str:
    """Find the device that an option names; "auto" is a GPU if there is one. Raises `HeadwaterError`."""
    import torch

    from headwater_lab.util.machine import usable_device

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    usable_device(name)
    if torch.device(name).type == "cuda" and torch.device(name).index is not None:
        torch.cuda.set_device(name)  # events, synchronization and peak memory refer to the current device
    return name


def new_folder(folder: Path | None, source: str | Path, suffix: str, may_exist: bool = False) -> Path:
    """Choose the folder of a new model: `folder`, or one next to the source with this suffix.

    Raises `HeadwaterError` before any work if it exists, or cannot be written.
    """
    from headwater.util.files import check_free
    from headwater_lab.api.common import check_outside
    from headwater_lab.training.checkpoints import FOLDER

    source = Path(source)
    if folder is None:
        run_folder = source if source.name and ".." not in source.parts else Path(os.path.realpath(source))
        run_folder = run_folder.parent.parent if run_folder.parent.name == FOLDER else run_folder
        folder = Path(run_folder.parent if run_folder.exists() else ".") / f"{run_folder.name}-{suffix}"
    check_outside(folder, source)
    if not may_exist:
        check_free(folder)
    check_writable(folder, folder=True)
    return folder


def check_writable(target: Path, folder: bool = False) -> None:
    """Raise `HeadwaterError` if a file or folder cannot be written, before there is work to lose.

    An existing folder gets additional files. A file's folder must exist; a folder's parents are created.
    `outputs.check_replaceable` decides whether a file is replaced.
    """
    problem = f"{str(target)!r} cannot be written"
    parent = target if folder else target.absolute().parent
    if (parent / "SHA256SUMS").is_file():
        raise HeadwaterError(
            f"{problem}: {str(parent)!r} is a checkpoint, to which no files can be added; choose another folder."
        )
    if folder:
        above = next(path for path in (target.absolute(), *target.absolute().parents) if os.path.lexists(path))
        if not above.is_dir():
            raise HeadwaterError(f"{problem}: {explain_absence(above, 'folder')}; choose another --out.")
    else:
        above = target.absolute().parent
        if not above.is_dir():
            raise HeadwaterError(f"{explain_absence(target.parent, 'folder')} for {target.name!r}; create it first.")
    try:
        # Try to write: permissions do not reveal read-only disks, and do not apply to the superuser.
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise HeadwaterError(f"{problem} in {str(above)!r}: {error.strerror}; choose another folder.") from error
