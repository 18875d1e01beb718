"""The rows of tokens, or the images, for an inspection."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from headwater.config.layers import layer_config
from headwater.config.vision import HeadwaterVisionConfig
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator
from headwater_lab.data.images import ImageData
from headwater_lab.training.trained_models import Trained, build_data, sample_rows
from headwater_lab.util.model_kinds import AnyModel

ROWS, LEAST = 16, 4  # default and minimum rows of text
IMAGES = 64  # default number of held-out images
PERIOD = 50  # number of random tokens in an induction row before they repeat
REPEATED = 8  # number of induction rows
# Maximum number of one layer's attention weights to hold at a time.
WEIGHTS = 2**26


@dataclass(frozen=True)
class Sample:
    """Rows of equal length, or images: the model's inputs, the tokens of each, and its rows and columns of patches."""

    inputs: dict[str, Tensor]
    length: int
    patches: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return len(next(iter(self.inputs.values())))

    def iterate_batches(self, model: AnyModel) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs in batches for which the attention weights of one layer fit in memory."""
        heads = max(layer_config(model.config, layer).num_attention_heads for layer in model.config.kinds.values())
        size = max(1, WEIGHTS // (heads * self.length**2))
        for start in range(0, self.rows, size):
            yield {name: tensor[start : start + size] for name, tensor in self.inputs.items()}


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
        ids = sample_rows(trained, text, rows, context)
        return Sample({"input_ids": ids}, ids.shape[1])
    data = build_data(trained.history)
    if data is None:
        raise HeadwaterError(
            f"{trained.source!r} does not record its training data; pass a similar text with --text FILE, or "
            f"--scalars to see only its scalars."
        )
    batch = next(data.batches(seed=0, batch_size=rows, start=0))
    inputs = {name: tensor[:, :context] for name, tensor in batch.items() if name != "shift_labels"}
    return Sample(inputs, inputs["input_ids"].shape[1])


def sample_images(trained: Trained, count: int | None) -> Sample:
    """Return held-out images of the model's training data, always the same.

    Raises `HeadwaterError` if there is nothing to read.
    """
    count = IMAGES if count is None else count
    if count < 1:
        raise HeadwaterError(f"--rows must be at least 1 image, not {count}.")
    data = build_data(trained.history)
    if not isinstance(data, ImageData):
        raise HeadwaterError(
            f"{trained.source!r} does not record its training data; pass --scalars to see only its scalars."
        )
    config = cast("HeadwaterVisionConfig", trained.model.config)
    order = torch.randperm(len(data.held_out.labels), generator=generator("inspect", "images"))
    pixels = data.held_out_images(order[:count].tolist())["pixel_values"].to(trained.model.dtype)
    grid = config.grid_of(*pixels.shape[2:])
    if grid[0] * grid[1] < 2:
        raise HeadwaterError("Images of one patch have no attention to look at; pass --scalars to see only scalars.")
    return Sample({"pixel_values": pixels}, config.first_patch + grid[0] * grid[1], grid)


def repeat_random_tokens(model: HeadwaterForCausalLM) -> tuple[Sample, int]:
    """Return rows of different random tokens, repeated once, and the length of the repetition."""
    config = model.config
    period = min(PERIOD, config.max_position_embeddings // 2, config.vocab_size)
    if period < 1:
        raise HeadwaterError("A model with one position cannot repeat tokens; use --scalars to see only its scalars.")
    draw = generator("inspect", "induction")
    ids = torch.stack([torch.randperm(config.vocab_size, generator=draw)[:period] for _ in range(REPEATED)])
    return Sample({"input_ids": ids.repeat(1, 2)}, 2 * period), period
