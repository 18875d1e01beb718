"""The rows of tokens for an inspection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.config.layers import layer_config
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator
from headwater_lab.training.trained_models import Trained, build_data, sample_rows

ROWS, LEAST = 16, 4  # rows by default, and at least
PERIOD = 50  # random tokens of an induction row, before they repeat
REPEATED = 8  # induction rows
# Maximum attention weights of one layer to hold at a time.
WEIGHTS = 2**26


@dataclass(frozen=True)
class Sample:
    """Rows of equal length: the model's inputs, [rows, T] each."""

    inputs: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def rows(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def length(self) -> int:
        """T, tokens in a row."""
        return self.inputs["input_ids"].shape[1]

    def batches(self, size: int) -> Iterator[tuple[dict[str, Tensor], int]]:
        """Up to `size` rows at a time, and the number of the first."""
        for start in range(0, self.rows, size):
            yield {name: tensor[start : start + size] for name, tensor in self.inputs.items()}, start

    def words(self, row: int, position: int, lead: int = 24, trail: int = 10) -> tuple[str, str, str]:
        """A token as text, with some characters before and after it. Without a tokenizer, numbers."""
        ids = self.inputs["input_ids"][row].tolist()
        contexts = ids[max(0, position - lead) : position], [ids[position]], ids[position + 1 : position + 1 + trail]
        if self.tokenizer is None:
            text_before, token, text_after = (" ".join(map(str, ids)) for ids in contexts)
        else:
            text_before, token, text_after = (self.tokenizer.decode(ids) for ids in contexts)
        return text_before[-lead:], token, text_after[:trail]


def sample_tokens(trained: Trained, text: Path | None, rows: int | None, context: int | None) -> Sample:
    """Rows of a text; by default of the model's latest training data, with document boundaries.

    Raises `HeadwaterError`.
    """
    rows = ROWS if rows is None else rows
    if rows < LEAST:
        raise HeadwaterError(f"--rows must be at least {LEAST}, not {rows}.")
    if context is not None and context < 16:
        raise HeadwaterError(f"--context must be at least 16 tokens, not {context}.")
    if text is not None:
        return Sample({"input_ids": sample_rows(trained, text, rows, context)}, trained.tokenizer)
    data = build_data(trained.history)
    if data is None:
        raise HeadwaterError(
            f"{trained.source!r} does not record its training data; pass a similar text with --text FILE, or "
            f"--scalars to see only its scalars."
        )
    batch = next(data.batches(seed=0, batch_size=rows, start=0))
    inputs = {name: tensor[:, :context] for name, tensor in batch.items() if name != "shift_labels"}
    return Sample(inputs, trained.tokenizer)


def repeat_random_tokens(model: HeadwaterForCausalLM) -> tuple[Sample, int]:
    """Rows of different random tokens, repeated once, and the length of the repetition."""
    config = model.config
    period = min(PERIOD, config.max_position_embeddings // 2, config.vocab_size)
    if period < 1:
        raise HeadwaterError("A model with one position cannot repeat tokens; use --scalars to see only its scalars.")
    draw = generator("inspect", "induction")
    ids = torch.stack([torch.randperm(config.vocab_size, generator=draw)[:period] for _ in range(REPEATED)])
    return Sample({"input_ids": ids.repeat(1, 2)}), period


def choose_batch_size(model: HeadwaterForCausalLM, length: int) -> int:
    """The number of rows of this length whose attention weights in one layer fit in memory."""
    heads = max(layer_config(model.config, layer).num_attention_heads for layer in model.config.kinds.values())
    return max(1, WEIGHTS // (heads * length**2))
