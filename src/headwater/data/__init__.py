"""Data: corpora, tokenizers, rows of text, synthetic tasks."""

from headwater.data.base import Batch, Data, Evaluation
from headwater.data.prepared import PreparedSettings
from headwater.data.synthetic import InductionSettings
from headwater.data.text import TextSettings

__all__ = ["Batch", "Data", "Evaluation", "InductionSettings", "PreparedSettings", "TextSettings"]
