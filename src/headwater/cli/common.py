"""What all commands share: where they print, options they have in common."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headwater.errors import HeadwaterError

# Tables need this much; a narrower terminal wraps lines rather than losing figures.
out = Console(width=max(120, Console().width))
err = Console(stderr=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="dotted.key=value, over the recipe's own.", show_default=False)
]
Positive = Annotated[int, typer.Option(min=1)]


def progress_bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[info]}"),
        TimeRemainingColumn(),
        console=err,
    )


def quiet() -> None:
    """Our own progress bars say enough."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def check_device(name: str) -> None:
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise HeadwaterError(f"PyTorch cannot use the device {name!r} here; leave out --device for the CPU.") from error
