"""The rows of tokens for an inspection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.config.layers import layer_config
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator
from headwater_lab.training.models import Trained, data_of, sample_rows

ROWS, LEAST = 16, 4  # rows by default, and at least
PERIOD = 50  # random tokens of an induction row, before they repeat
REPEATED = 8  # induction rows
# Maximum attention weights of one layer to hold at a time.
WEIGHTS = 2**26


@dataclass(frozen=True)
class Sample:
    """Rows of equal length, and the text of each.

    inputs: of the model, [rows, T] each. texts: their names; text_of: [rows], which one.
    """

    inputs: dict[str, Tensor]
    texts: list[str]
    text_of: Tensor
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def length(self) -> int:
        """T, tokens in a row."""
        return self.inputs["input_ids"].shape[1]

    def batches(self, size: int) -> Iterator[tuple[dict[str, Tensor], int]]:
        """Up to `size` rows at a time, and the number of the first."""
        for first in range(0, len(self.text_of), size):
            yield {name: tensor[first : first + size] for name, tensor in self.inputs.items()}, first

    def words(self, row: int, place: int, before: int = 24, after: int = 10) -> tuple[str, str, str]:
        """A token as text, with some characters before and after it. Without a tokenizer, numbers."""
        ids = self.inputs["input_ids"][row].tolist()
        parts = ids[max(0, place - before) : place], [ids[place]], ids[place + 1 : place + 1 + after]
        if self.tokenizer is None:
            left, token, right = (" ".join(map(str, part)) for part in parts)
        else:
            left, token, right = (self.tokenizer.decode(part) for part in parts)
        return left[-before:], token, right[:after]


def sample(trained: Trained, texts: Sequence[Path], rows: int | None, context: int | None) -> Sample:
    """Rows of each text; without a text, of the model's latest training data, with document boundaries.

    With one text, or none, each row counts as a separate text. Raises `HeadwaterError`.
    """
    rows = ROWS if rows is None else rows
    if rows < LEAST:
        raise HeadwaterError(f"--rows must be at least {LEAST}, not {rows}.")
    if context is not None and context < 16:
        raise HeadwaterError(f"--context must be at least 16 tokens, not {context}.")
    if texts:
        found = [sample_rows(trained, text, rows, context) for text in texts]
        shortest = min(ids.shape[1] for ids in found)
        inputs = {"input_ids": torch.cat([ids[:, :shortest] for ids in found])}
        names = [text.name for text in texts]
        text_of = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(ids) for ids in found]))
    else:
        data = data_of(trained.history)
        if data is None:
            raise HeadwaterError(
                f"{trained.source!r} does not record its training data; pass a similar text with --text FILE, or "
                f"--scalars to see only its scalars."
            )
        batch = next(data.batches(seed=0, batch_size=rows, start=0))
        inputs = {name: tensor[:, :context] for name, tensor in batch.items() if name != "shift_labels"}
    tokenizer = trained.tokenizer
    if len(texts) < 2:
        text_of = torch.arange(len(inputs["input_ids"]))
        names = [_row_name(row, ids.tolist(), tokenizer) for row, ids in enumerate(inputs["input_ids"])]
    return Sample(inputs, names, text_of, tokenizer)


def _row_name(row: int, ids: list[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A row's number and how it begins."""
    begins = "" if tokenizer is None else " ".join(tokenizer.decode(ids[:64], skip_special_tokens=True).split())
    return f"{row}: {begins[:14]}" if begins else f"row {row}"


def repeated(model: HeadwaterForCausalLM) -> tuple[Sample, int]:
    """Rows of different random tokens, repeated once, and the length of the repetition."""
    config = model.config
    period = min(PERIOD, config.max_position_embeddings // 2, config.vocab_size)
    if period < 1:
        raise HeadwaterError("A model with one position cannot repeat tokens; use --scalars to see only its scalars.")
    draw = generator("inspect", "induction")
    ids = torch.stack([torch.randperm(config.vocab_size, generator=draw)[:period] for _ in range(REPEATED)])
    return Sample({"input_ids": ids.repeat(1, 2)}, ["random tokens"], torch.zeros(REPEATED, dtype=torch.long)), period


def batch_size(model: HeadwaterForCausalLM, length: int) -> int:
    """The number of rows of this length whose attention weights in one layer fit in memory."""
    heads = max(layer_config(model.config, layer).num_attention_heads for layer in model.config.kinds.values())
    return max(1, WEIGHTS // (heads * length**2))
