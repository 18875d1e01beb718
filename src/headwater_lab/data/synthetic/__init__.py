"""Synthetic tasks: endless streams of rows, nothing stored; one file per task, described in docs/tasks.md."""

from headwater_lab.data.synthetic.arithmetic import ArithmeticData, ArithmeticSettings
from headwater_lab.data.synthetic.base import SyntheticData, SyntheticSettings
from headwater_lab.data.synthetic.hop import HopData, HopSettings
from headwater_lab.data.synthetic.induction import InductionData, InductionSettings
from headwater_lab.data.synthetic.ngram import NgramData, NgramSettings
from headwater_lab.data.synthetic.recall import RecallData, RecallSettings

__all__ = [
    "ArithmeticData",
    "ArithmeticSettings",
    "HopData",
    "HopSettings",
    "InductionData",
    "InductionSettings",
    "NgramData",
    "NgramSettings",
    "RecallData",
    "RecallSettings",
    "SyntheticData",
    "SyntheticSettings",
    "every_task",
]


def every_task() -> list[InductionSettings | NgramSettings | HopSettings | RecallSettings | ArithmeticSettings]:
    """All tasks with their defaults, induction in its three forms."""
    return [
        InductionSettings(),
        InductionSettings(variant="periodic"),
        InductionSettings(variant="scattered"),
        NgramSettings(),
        HopSettings(),
        RecallSettings(),
        ArithmeticSettings(),
    ]
