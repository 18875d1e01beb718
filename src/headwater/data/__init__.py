"""Data: corpora, tokenizers, rows of text, synthetic tasks."""

from headwater.data.base import Batch, Data, Evaluation
from headwater.data.prepared import PreparedSettings
from headwater.data.synthetic import (
    ArithmeticSettings,
    HopSettings,
    InductionSettings,
    NgramSettings,
    RecallSettings,
)
from headwater.data.text import TextSettings

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
