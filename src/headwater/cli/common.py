"""What all commands share: where they print, options they have in common."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headwater.errors import HeadwaterError
from headwater.terminal import Terminal

# Tables need this much; a narrower terminal wraps lines rather than losing figures.
out = Terminal(width=max(120, Terminal().width))
err = Terminal(stderr=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="dotted.key=value, over the recipe's own.", show_default=False)
]
MechanismOptions = Annotated[
    list[str] | None,
    typer.Option("--mechanism", help='NAME, or "NAME={option: value}"; may be given again.', show_default=False),
]
Positive = Annotated[int, typer.Option(min=1)]


def tell(line: str) -> None:
    """Say something beside the result."""
    err.print(line, soft_wrap=True)


def progress_bars() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[info]}", markup=False),
        TimeRemainingColumn(),
        console=err,
    )


def quiet() -> None:
    """Our own progress bars say enough."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def mechanisms_of(given: list[str]) -> dict[str, dict[str, Any]]:
    """name or name={options}, as YAML. Raises `HeadwaterError`."""
    import yaml

    from headwater.registry import resolve

    found: dict[str, dict[str, Any]] = {}
    for text in given:
        name, _, options = text.partition("=")
        if name in found:
            raise HeadwaterError(f"--mechanism {name} is given twice; give it once, with all its options.")
        try:
            found[name] = yaml.safe_load(options) or {}
        except yaml.YAMLError as error:
            raise HeadwaterError(
                f'The options of --mechanism {name} are not YAML; write it as "{name}={{key: value}}".'
            ) from error
        if not isinstance(found[name], dict):
            raise HeadwaterError(f'The options of --mechanism {name} are a mapping: "{name}={{key: value}}".')
        resolve(name).options(found[name])
    return found


def check_device(name: str) -> None:
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise HeadwaterError(f"PyTorch cannot use the device {name!r} here; leave out --device for the CPU.") from error
