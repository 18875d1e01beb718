"""What each table costs at each scale, precomputed because `--list` shows all and each takes seconds.

`costs.json` has the costs, with a digest of the files that determine them. If these have changed, the cost is computed
again; a test checks that the code still finds the same. `python -m headwater.papers.costs` rewrites the file.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.papers.table import SCALES, ScaleName, file_of, table, tables
from headwater.shipped import recipes_folder

if TYPE_CHECKING:
    from headwater.papers.work import Work

FILE = Path(__file__).with_name("costs.json")


@dataclass(frozen=True)
class TableCost:
    """Runs of one table, and their hours on the hardware of its scale. of: digest of its files."""

    runs: int
    hours: float
    of: str


def known(name: str, scale: ScaleName) -> TableCost | None:
    """The cost of a table at a scale; None if it is not known for the current files."""
    found = _read().get(f"{name} {scale}")
    return found if found is not None and found.of == _digest(name, scale) else None


def worked_out(work: Work) -> TableCost:
    """The same, computed from the plans of the models."""
    from headwater.papers.price import price

    hours = price(work.trained, work.scale).hours
    return TableCost(sum(len(place.seeds) for place in work.trained), hours, _digest(work.name, work.scale))


def trained() -> list[tuple[str, ScaleName]]:
    """Every table with every scale that it trains at."""
    return [
        (name, scale)
        for name, of in tables().items()
        for scale in SCALES
        if not of.computed and not of.scales[scale].nothing
    ]


def all_worked_out() -> dict[str, TableCost]:
    """The costs of `trained`, by "PAPER/TABLE SCALE"."""
    from headwater.papers.work import prepare

    return {f"{name} {scale}": worked_out(prepare(name, scale, Path())) for name, scale in trained()}


@functools.cache
def _read() -> dict[str, TableCost]:
    return {name: TableCost(**one) for name, one in json.loads(FILE.read_text()).items()}


def _digest(name: str, scale: ScaleName) -> str:
    folder = recipes_folder()
    files = [file_of(name), *(folder / recipe for recipe in table(name).scales[scale].recipes)]
    return hashlib.sha256(b"\0".join(map(Path.read_bytes, files))).hexdigest()[:16]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: asdict(one) for name, one in all_worked_out().items()}, indent=1) + "\n")
