"""Quiet loading, checks of outputs, and results that are tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging

from headwater.util.errors import HeadwaterError
from headwater_lab.api.observer import Observer
from headwater_lab.data.base import Data
from headwater_lab.training.checkpoints import FOLDER
from headwater_lab.training.trained_models import measure_model
from headwater_lab.util.model_kinds import AnyModel

if TYPE_CHECKING:
    from pandas import DataFrame

PathLike = str | Path


def check_outside(folder: Path, source: str | Path, around: bool = False) -> None:
    """Raise `HeadwaterError` for an output folder that is the source, contains it or is inside it.

    around: it may contain the source.
    """
    if not Path(source).is_dir():
        return
    target, origin = (Path(os.path.realpath(path)) for path in (folder, source))
    run_folder = origin.parent.parent if origin.parent.name == FOLDER else origin
    if target == origin or (target in origin.parents and not around) or run_folder in (target, *target.parents):
        raise HeadwaterError(
            f"--out {str(folder)!r} is the source, contains it, or is inside it; choose another folder."
        )


def measure_held_out(label: str, model: AnyModel, data: Data, watch: Observer) -> dict[str, float]:
    """Measure a model on the held-out data, and report progress under the name `label`."""
    batches = count(1)
    return measure_model(model, data, lambda: watch.show(label, next(batches), unit="batch"))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars for weights, and restore the caller's setting afterwards."""
    shows, hub_shows = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()
            if not hub_shows:
                disable_progress_bars()


class Result:
    """The result of a function: rows, shown as a table in notebooks."""

    def table(self) -> list[dict[str, Any]]:
        """Return the rows, as dicts by column name."""
        raise NotImplementedError

    def to_pandas(self) -> DataFrame:
        """Return the rows as a DataFrame with numbers, not text."""
        import pandas

        return pandas.DataFrame(self._list_numbers())

    def _list_numbers(self) -> list[dict[str, Any]]:
        """List the rows of the DataFrame."""
        return self.table()

    def _repr_html_(self) -> str:
        rows = self.table()
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = ["".join(f"<th>{escape(name)}</th>" for name in names)]
        lines += ["".join(f"<td>{escape(str(row.get(name, '')))}</td>" for name in names) for row in rows]
        return "\n".join(["<table>", *(f"<tr>{line}</tr>" for line in lines), "</table>"])
