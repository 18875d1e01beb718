"""Reproduce the papers' tables and figures at an affordable scale, and judge each claim by its interval.

table.py     a table as data: tables/PAPER/TABLE.yaml     places.py   which run is which arm of it
work.py      what it trains, and training it              price.py    what that costs
measures.py  what its cells contain                       claims.py   whether the paper's claims hold
computing.py tables that need no training                 result.py   the table beside the paper's, the page
kept.py      finished runs in one file                    theory.py   theorems of the KV shifting paper as code
"""

from typing import TYPE_CHECKING

from headwater import lazy
from headwater.papers.table import SCALES, table, tables

if TYPE_CHECKING:
    from headwater.compare.prices import slug
    from headwater.papers.kept import keep, recorded, restore
    from headwater.papers.result import Reproduction, computed, reproduction, terminal, write
    from headwater.papers.work import Work, check_not_begun_otherwise, prepare, train, train_until_decided

__all__ = [
    "SCALES",
    "Reproduction",
    "Work",
    "check_not_begun_otherwise",
    "computed",
    "keep",
    "prepare",
    "recorded",
    "reproduction",
    "restore",
    "slug",
    "table",
    "tables",
    "terminal",
    "train",
    "train_until_decided",
    "write",
]
__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "headwater.compare.prices": ["slug"],
        "headwater.papers.result": ["Reproduction", "computed", "reproduction", "terminal", "write"],
        "headwater.papers.kept": ["keep", "recorded", "restore"],
        "headwater.papers.work": ["Work", "check_not_begun_otherwise", "prepare", "train", "train_until_decided"],
    },
)  # fmt: skip
