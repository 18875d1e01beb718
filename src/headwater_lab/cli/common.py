"""What all commands share: consoles and common options."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.util.errors import HeadwaterError, shown, unusable
from headwater.util.files import absence, check_local
from headwater.util.terminal import Terminal

if TYPE_CHECKING:
    from headwater_lab.recipe.schema import Recipe

# Tables need this much; a narrower terminal wraps lines rather than losing figures.
out = Terminal(width=max(120, Terminal().width))
err = Terminal(stderr=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Override a field of the recipe: dotted.key=value.", show_default=False)
]
MechanismOptions = Annotated[
    list[str] | None,
    typer.Option("--mechanism", help='NAME, or "NAME={option: value}"; repeatable.', show_default=False),
]
Positive = Annotated[int, typer.Option(min=1)]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …; auto is a GPU if there is one.")]
# Options that count bytes and tokens of a corpus, and so need large numbers.
BYTES = ("max_bytes",)
# What may begin with an address without being a path.
FREE_TEXT = ("prompt", "stop", "separator")
# What --help groups commands by.
TRAIN, USE, MAKE, LOOK = "Train and compare", "Use a model", "Change a trained model", "Plan and inspect"


def tell_runs(recipe: Recipe, parts: int | None = None) -> None:
    """How many runs a comparison takes that runs until it is decided. parts: arms at a size; default: all."""
    from headwater_lab.comparison.trials import count_runs

    section = recipe.compare
    if section is not None and section.sequential:
        fewest, most = count_runs(section, parts)
        tell(
            f"{recipe.name}: {fewest} to {most} runs, with {section.min_seeds} to {section.max_seeds} seeds per arm, "
            "until decided"
        )


def tell(line: str) -> None:
    """Print a message on stderr, apart from the result."""
    err.print(line, soft_wrap=True)


def tell_model(folder: Path, model: Path | None = None) -> None:
    """Print where a command has written, and how transformers loads the model. model: its folder, if not `folder`."""
    from headwater_lab.training.checkpoints import how_to_load

    out.print(f"written to {folder}\n{how_to_load(model or folder)}", soft_wrap=True, markup=False, highlight=False)


def refuse_unread(options: dict[str, object], reader: object, reader_name: str) -> None:
    """Raise `HeadwaterError` for an option that is given without the one that makes the command read it.

    options: values by option, None if not given. reader, reader_name: the option that they belong to.
    """
    for name, value in options.items():
        if value is not None and not reader:
            raise HeadwaterError(f"{name} has no effect without {reader_name}; add that, or leave it out.")


def quiet() -> None:
    """headwater shows its own progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def mechanisms_of(given: list[str]) -> dict[str, dict[str, Any]]:
    """name or name={options}, as YAML. Raises `HeadwaterError`."""
    from headwater.config.options import parse_options
    from headwater.plugins.outside import trust_names_in
    from headwater.plugins.registry import resolve
    from headwater_lab.recipe.overrides import plain

    found: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, options = text.partition("=")
        if equals and not options.strip():
            raise HeadwaterError(f'--mechanism {name}= has no options; write {name}, or "{name}={{key: value}}".')
        if name in found:
            raise HeadwaterError(f"--mechanism {name} is given twice; give it once, with all its options.")
        found[name] = plain(options, f"The options of --mechanism {name}", whole=True) if equals else {}
        if not isinstance(found[name], dict):
            raise HeadwaterError(f'The options of --mechanism {name} are a mapping: "{name}={{key: value}}".')
        trust_names_in({name: found[name]})
        parse_options(resolve(name), found[name])
    return found


def device_of(name: str) -> str:
    """The device that an option names; "auto" is a GPU if there is one. Raises `HeadwaterError`."""
    import torch

    from headwater.cost.hardware import usable_device

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return usable_device(name)


def recipe_of(argument: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by its path, or by the name of a shipped one. Raises `HeadwaterError`."""
    from headwater_lab.recipe.schema import find_recipe, load_recipe

    return load_recipe(find_recipe(argument), overrides)


def check_outside(folder: Path, source: str | Path, around: bool = False) -> None:
    """Raise `HeadwaterError` for an output folder that is, holds or is in the source, a checkpoint or a run.

    around: it may hold the source.
    """
    from headwater_lab.training.checkpoints import FOLDER

    if not Path(source).is_dir():
        return
    target, given = (Path(os.path.realpath(path)) for path in (folder, source))
    whole = given.parent.parent if given.parent.name == FOLDER else given
    if target == given or (target in given.parents and not around) or whole in (target, *target.parents):
        raise HeadwaterError(f"--out {str(folder)!r} is, holds, or is in the source; choose another folder.")


def new_folder(folder: Path | None, source: str | Path, suffix: str, may_exist: bool = False) -> Path:
    """The folder of a new model: `folder`, or one next to the source with this suffix.

    Raises `HeadwaterError` before any work if it exists, or cannot be written.
    """
    from headwater.util.files import check_free
    from headwater_lab.training.checkpoints import FOLDER

    source = Path(source)
    if folder is None:
        whole = source if source.name and ".." not in source.parts else Path(os.path.realpath(source))
        whole = whole.parent.parent if whole.parent.name == FOLDER else whole
        folder = Path(whole.parent if whole.exists() else ".") / f"{whole.name}-{suffix}"
    check_outside(folder, source)
    if not may_exist:
        check_free(folder)
    check_writable(folder, folder=True)
    return folder


def check_writable(target: Path, folder: bool = False) -> None:
    """Raise `HeadwaterError` if a file or folder cannot be written, before there is work to lose.

    An existing folder gets additional files. A file's folder must exist; a folder's parents are created. Whether a file
    is replaced, `outputs.check_replaceable` says.
    """
    what = f"{str(target)!r} cannot be written"
    parent = target if folder else target.absolute().parent
    if (parent / "SHA256SUMS").is_file():
        raise HeadwaterError(
            f"{what}: {str(parent)!r} is a checkpoint, which takes no more files; choose another folder."
        )
    if folder:
        above = next(path for path in (target.absolute(), *target.absolute().parents) if os.path.lexists(path))
        if not above.is_dir():
            raise HeadwaterError(f"{what}: {absence(above, 'folder')}; choose another --out.")
    else:
        above = target.absolute().parent
        if not above.is_dir():
            raise HeadwaterError(f"{absence(target.parent, 'folder')} for {target.name!r}; create it first.")
    try:
        # Permissions do not show read-only disks, and mean nothing for the superuser.
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise HeadwaterError(f"{what} in {str(above)!r}: {error.strerror}; choose another place.") from error


def guarded(command: Any) -> Any:
    """A command group that rejects option values which no command can use.

    A number that is not finite or beyond 64 bits passes through every range that Typer checks, and an empty path is
    the working directory.
    """
    for parameter in command.params:
        parameter.process_value = functools.partial(_checked, parameter, parameter.process_value)
    for below in getattr(command, "commands", {}).values():
        guarded(below)
    return command


# Benchmarks that read what was trained elsewhere.
OF_FOLDERS = ("prices", "verdicts")


def trusting(command: Any) -> Any:
    """A command with the option --trust; of a group, those commands in it that read folders."""
    below = getattr(command, "commands", {})
    for name in OF_FOLDERS:
        if name in below:
            trusting(below[name])
    if not below:
        command.params.append(_trust_option())
    return command


def _trust(names: list[str] | None) -> None:
    from headwater.plugins.outside import trust

    trust(names or ())


def _has_only_trust(
    trust: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            callback=_trust,
            expose_value=False,
            help="Let files name this code (package.module, or package.module:Class) or data (a path); repeatable.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """A command from which the others take the option."""


@functools.cache
def _trust_option() -> Any:
    """The option itself, which takes effect when it is parsed and is not passed to the command."""
    alone = typer.Typer(add_completion=False)
    alone.command()(_has_only_trust)
    return next(option for option in typer.main.get_command(alone).params if option.name == "trust")


def _checked(parameter: Any, process: Callable[[Any, Any], Any], context: Any, given: Any) -> Any:
    value = process(context, given)
    name = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.name.upper()
    if (found := unusable(value)) is not None:
        raise HeadwaterError(f"{name}: {found[1]}.")
    if isinstance(value, int) and abs(value) >= 2**31 and parameter.name not in BYTES:
        raise HeadwaterError(f"{name}: {value:,} is too large; choose a smaller value.")
    for text in (raw for raw in (given if isinstance(given, list | tuple) else [given]) if isinstance(raw, str)):
        if parameter.name not in FREE_TEXT:
            check_local(text, name)
    for raw, one in zip(*([x] if not isinstance(x, list | tuple) else x for x in (given, value)), strict=False):
        if isinstance(one, Path) and raw == "":
            raise HeadwaterError(f"{name} is empty; give a path, such as . for this folder.")
        if name == "--out" and isinstance(one, Path) and not str(one).isprintable():
            # Also bytes that are not UTF-8, which some libraries cannot write.
            raise HeadwaterError(f"{name} {shown(str(one))} has characters that cannot be displayed; rename it.")
    return value
