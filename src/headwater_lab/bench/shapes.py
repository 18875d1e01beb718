"""Sizes and results of benchmarks, for functions and commands. Importing this does not import torch."""

from dataclasses import asdict, dataclass, field
from typing import Any

from headwater.util.errors import HeadwaterError

# Channels of a head.
HEAD_DIM = 64


def set_minimum(least: int, default: int) -> Any:
    """Declare a field with a minimum, which the command line checks."""
    return field(default=default, metadata={"min": least})


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's result: rows of text by column, below a title, and notes on them.

    is_whole: False after SIGINT or SIGTERM, with what was measured until then.
    """

    title: str
    rows: list[dict[str, str]]
    notes: str = ""
    is_whole: bool = True


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the timed models.

    width: Width of the model, a multiple of 64, since heads have 64 channels.
    """

    layers: int = set_minimum(1, 12)
    width: int = set_minimum(64, 768)
    vocab_size: int = set_minimum(1, 50304)

    def __post_init__(self) -> None:
        if self.width % HEAD_DIM:
            raise HeadwaterError(
                f"width must be a multiple of {HEAD_DIM}, not {self.width}, since heads have {HEAD_DIM} channels."
            )

    def config(self, tokens: int) -> dict[str, Any]:
        """Make a config's sizes, for rows of this many tokens."""
        return dict(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            intermediate_size=-(-8 * self.width // 3 // 64) * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // HEAD_DIM,
            max_position_embeddings=tokens,
        )

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class StepShape(ModelShape):
    """Sizes of training steps.

    context: Tokens per row.
    """

    layers: int = set_minimum(1, 8)
    width: int = set_minimum(64, 256)
    vocab_size: int = set_minimum(1, 512)
    context: int = set_minimum(1, 256)
    batch_size: int = set_minimum(1, 8)


@dataclass(frozen=True)
class DecodeShape(ModelShape):
    """Sizes of generation.

    context: Prompt tokens.
    tokens: Tokens to generate.
    turns: Runs of each model.
    """

    context: int = set_minimum(1, 512)
    batch_size: int = set_minimum(1, 1)
    tokens: int = set_minimum(3, 48)
    turns: int = set_minimum(2, 5)
