"""Positions: rotary (arXiv 2104.09864; the scaled kinds are transformers' own) and ALiBi (arXiv 2108.12409)."""

import math

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headwater.config.rope import FOLLOW_LENGTH
from headwater.config.text import HeadwaterConfig
from headwater.kernels import can_fuse
from headwater.kernels.rotary import Rotate
from headwater.mechanisms.fp32 import KeepsPrecision


class RotaryEmbedding(KeepsPrecision):
    """The angles of each position: position_ids [B or 1, T] -> (cos, sin), each [B or 1, T, r]; r: rotated channels.

    Channel i is paired with channel i + r/2, so each angle occurs twice, as in transformers' models.

    The frequencies are 1 / base^(2i/r) by default; for other types transformers' functions compute them from
    `config.rope_parameters`. Those of "dynamic" and "longrope" change with the length of the sequence: each row, and
    each document in it, has the frequencies for its own length. They stay in fp32 in half precision; in an fp64 model
    all is fp64.
    """

    inv_freq: Tensor
    long_inv_freq: Tensor

    def __init__(self, config: HeadwaterConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.follows_length = self.rope_type in FOLLOW_LENGTH
        for name, value in self.constants().items():
            self.register_buffer(name, value, persistent=False)

    def compute_frequencies(
        self, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> tuple[Tensor, float]:
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config)
        r = self.config.rotary_dim
        exponents = torch.arange(0, r, 2, dtype=dtype, device=device) / r
        return 1.0 / self.config.rope_parameters["rope_theta"] ** exponents, 1.0

    def constants(self) -> dict[str, Tensor]:
        frequencies, self.attention_scaling = self.compute_frequencies()
        if self.rope_type != "longrope":
            return {"inv_freq": frequencies}
        beyond = self.config.rope_parameters["original_max_position_embeddings"] + 1
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](self.config, seq_len=beyond)
        return {"inv_freq": frequencies, "long_inv_freq": long}

    def find_span(self, lengths: Tensor) -> Tensor:
        """Find the quantity that determines the frequencies: sequences of equal span share them. lengths: in tokens."""
        if self.rope_type == "longrope":
            return lengths > self.config.rope_parameters["original_max_position_embeddings"]
        return lengths.clamp(min=self.config.max_position_embeddings)

    def frequencies_for(self, lengths: Tensor) -> Tensor:
        """Compute the frequencies in sequences of these lengths: [B, T] -> [B, T, r/2]."""
        span = self.find_span(lengths)[..., None]
        if self.rope_type == "longrope":
            return torch.where(span, self.long_inv_freq.to(span.device), self.inv_freq.to(span.device))
        return ROPE_INIT_FUNCTIONS["dynamic"](self.config, span.device, seq_len=span)[0]

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq.to(x.device)
        if self.follows_length:
            inv_freq = self.frequencies_for(document_lengths(position_ids))
        elif x.dtype == torch.float64 and self.rope_type == "default":
            inv_freq = self.compute_frequencies(torch.float64, x.device)[0]  # not the buffer, which is in fp32
        angles = position_ids[..., None].to(torch.promote_types(x.dtype, torch.float32)) * inv_freq
        cos = (angles.cos() * self.attention_scaling).to(x.dtype)
        sin = (angles.sin() * self.attention_scaling).to(x.dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def document_lengths(position_ids: Tensor) -> Tensor:
    """Find the length of each token's document: 1 + its last position. position_ids: [B, T] -> [B, T]."""
    document = (position_ids == 0).cumsum(-1)
    last_position = position_ids.new_zeros(position_ids.shape[0], position_ids.shape[1] + 1)
    return last_position.scatter_reduce(1, document, position_ids, "amax").gather(1, document) + 1


def for_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape the output of `RotaryEmbedding`, [B or 1, T, r], for all heads, as `rotate` takes it: [B or 1, 1, T, r].

    The first half of sin is negated, so that `x·cos + roll(x, r/2)·sin` is the rotation.
    """
    low, high = sin.chunk(2, dim=-1)
    return cos.unsqueeze(1), torch.cat((-low, high), dim=-1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first cos.shape[-1] channels of x [B, H, T, d]; cos and sin as `for_heads` gives them."""
    if can_fuse(x, cos, sin):
        return Rotate.apply(x, cos, sin)
    r = cos.shape[-1]
    rotated = x if r == x.shape[-1] else x[..., :r]
    if torch.compiler.is_compiling():
        # In the layout of projections, of which some heads are a view to the compiler.
        rotated, cos, sin = (y.transpose(1, 2) for y in (rotated, cos, sin))
        rotated = (rotated * cos + rotated.roll(r // 2, -1) * sin).transpose(1, 2)
    else:  # not addcmul, which rounds differently: models converted from other families must agree bit for bit
        rotated = (rotated * cos).add_(rotated.roll(r // 2, -1).mul_(sin))
    return rotated if r == x.shape[-1] else torch.cat((rotated, x[..., r:]), dim=-1)


def alibi_slopes(heads: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
    """Compute the decrease of each head's scores per token of distance, [heads]: 2^(-8/heads), 2^(-16/heads), …, 2^-8.

    If the number of heads is not a power of two: the slopes of the next lower power, then every other slope of the next
    higher power, as in the paper's code. They are computed on the device: copying numbers there would wait for it.
    """
    power = 2 ** math.floor(math.log2(heads))
    head = torch.arange(heads, dtype=dtype, device=device)
    return torch.exp2(torch.where(head < power, head + 1, head - power + 0.5) * (-8 / power))
