"""Data: corpora, tokenizers, rows of text, synthetic tasks."""

from headwater_lab.data.base import Batch, Data, Evaluation
from headwater_lab.data.prepared import PreparedSettings
from headwater_lab.data.synthetic import (
    ArithmeticSettings,
    HopSettings,
    InductionSettings,
    NgramSettings,
    RecallSettings,
)
from headwater_lab.data.text import TextSettings

__all__ = [
    "ArithmeticSettings",
    "Batch",
    "Data",
    "Evaluation",
    "HopSettings",
    "InductionSettings",
    "NgramSettings",
    "PreparedSettings",
    "RecallSettings",
    "TextSettings",
]
