"""Quiet loading, checks of outputs, and results that are tables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import chain, count
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging

from headwater.config.text import HeadwaterConfig
from headwater.conversion.families import find_fitting_family
from headwater.conversion.latent import expand_config
from headwater.util.errors import HeadwaterError
from headwater_lab.api.observer import Observer
from headwater_lab.data.base import Data
from headwater_lab.training.checkpoints import FOLDER
from headwater_lab.training.records import Event
from headwater_lab.training.saving import how_to_load
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


def describe_written(folder: Path, config: HeadwaterConfig, history: Sequence[Event]) -> list[str]:
    """Write lines about a new model: how it is loaded, and exported for other engines if they can run it."""
    lines = [f"written to {folder}", how_to_load(folder)]
    source = next((event.details["family"] for event in history if "family" in event.details), None)
    if (family := find_fitting_family(expand_config(config), source)) is not None:
        command = f"headwater export {shlex.quote(str(folder))} --family {family} --out NEW"
        form = "with no part of headwater" if not config.mechanisms else "whose cache is smaller only in headwater"
        lines.append(f"It is a plain {family} model, {form}: `{command}` writes it for engines without headwater.")
    return lines


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
    """The result of a function: rows of numbers, shown as a table in notebooks."""

    def table(self) -> list[dict[str, Any]]:
        """Return the rows, as dicts by column name: numbers, or None where there is none."""
        raise NotImplementedError

    def text_table(self) -> list[dict[str, str]]:
        """Return the rows as text, rounded and without empty columns, as notebooks show them."""
        rows = self.table()
        names = [name for name in dict.fromkeys(chain(*rows)) if any(row.get(name) is not None for row in rows)]
        return [{name.replace("_", " "): _write_cell(row.get(name)) for name in names} for row in rows]

    def to_pandas(self) -> DataFrame:
        """Return the rows as a DataFrame, with NaN where there is no number."""
        return make_frame(self.table())

    def _repr_html_(self) -> str:
        return write_html(repr(self).partition("\n")[0], self.text_table())


def make_frame(rows: list[dict[str, Any]]) -> DataFrame:
    """Make a DataFrame of rows, with NaN instead of None, so that columns of numbers have numeric types."""
    import pandas

    return pandas.DataFrame([{name: nan if cell is None else cell for name, cell in row.items()} for row in rows])


def write_html(title: str, rows: list[dict[str, str]], note: str = "") -> str:
    """Write a table of texts as HTML without colors, so that the notebook's theme applies."""
    above, below = (f"<p>{escape(text)}</p>" if text else "" for text in (title, note))
    if not rows:
        return above + below
    names = list(dict.fromkeys(chain(*rows)))
    lines = ["".join(f"<th>{escape(name)}</th>" for name in names)]
    lines += ["".join(f"<td>{escape(row.get(name, ''))}</td>" for name in names) for row in rows]
    head, *body = (f"<tr>{line}</tr>" for line in lines)
    table = ["<table>", f"<thead>{head}</thead>", "<tbody>", *body, "</tbody>", "</table>"]
    return "\n".join([above, *table, below])


def _write_cell(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return "" if cell is None else str(cell)
