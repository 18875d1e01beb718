"""What the functions share: quiet loading, and results that are tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging

if TYPE_CHECKING:
    from pandas import DataFrame

PathLike = str | Path


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars for weights; afterwards they are as the caller had them."""
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
    """What a function returns: rows that are shown as a table in notebooks."""

    def table(self) -> list[dict[str, Any]]:
        """The rows, as dicts by column name."""
        raise NotImplementedError

    def to_pandas(self) -> DataFrame:
        """The rows as a DataFrame, in which numbers are numbers."""
        import pandas

        return pandas.DataFrame(self._numbers())

    def _numbers(self) -> list[dict[str, Any]]:
        """The rows of the DataFrame."""
        return self.table()

    def _repr_html_(self) -> str:
        rows = self.table()
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = ["".join(f"<th>{escape(name)}</th>" for name in names)]
        lines += ["".join(f"<td>{escape(str(row.get(name, '')))}</td>" for name in names) for row in rows]
        return "\n".join(["<table>", *(f"<tr>{line}</tr>" for line in lines), "</table>"])
