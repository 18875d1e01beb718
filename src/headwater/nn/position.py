"""Positions: rotary (arXiv 2104.09864; the scaled kinds are transformers' own) and ALiBi (arXiv 2108.12409)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from headwater.kernels import applies
from headwater.kernels.rotary import fused_rotate
from headwater.precision import KeepsPrecision

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class RotaryEmbedding(KeepsPrecision):
    """The angles of each position: position_ids [B or 1, T] -> (cos, sin), each [B or 1, T, r]; r: rotated channels.

    Channel i is paired with channel i + r/2, so each angle occurs twice, as in transformers' models.

    The frequencies are 1 / base^(2i/r) by default; for "linear", "dynamic", "yarn", "longrope" and "llama3"
    transformers' functions compute them from `config.rope_parameters`. They stay in fp32 when the model is cast to
    half precision; in an fp64 model everything is fp64 (in transformers' models angles are fp32 even then).
    """

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: HeadwaterConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        # `dynamic_rope_update` reads and writes these names when the frequencies change with the length.
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        inv_freq, self.attention_scaling = self.frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def frequencies(
        self, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> tuple[Tensor, float]:
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config)
        r = self.config.rotary_dim
        exponents = torch.arange(0, r, 2, dtype=dtype, device=device) / r
        return 1.0 / self.config.rope_parameters["rope_theta"] ** exponents, 1.0

    def constants(self) -> dict[str, Tensor]:
        frequencies, self.attention_scaling = self.frequencies()
        return {"inv_freq": frequencies, "original_inv_freq": frequencies}

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq.to(x.device)
        if x.dtype == torch.float64 and self.rope_type == "default":
            inv_freq = self.frequencies(torch.float64, x.device)[0]  # the buffer is rounded to fp32
        angles = position_ids[..., None].to(torch.promote_types(x.dtype, torch.float32)) * inv_freq
        cos = (angles.cos() * self.attention_scaling).to(x.dtype)
        sin = (angles.sin() * self.attention_scaling).to(x.dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def for_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The output of `RotaryEmbedding`, [B or 1, T, r], as `rotate` takes it for all heads: [B or 1, 1, T, r].

    The first half of sin is negated, so that `x·cos + roll(x, r/2)·sin` is the rotation.
    """
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(1), torch.cat((-first, second), dim=-1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first cos.shape[-1] channels of x [B, H, T, d]; cos and sin as `for_heads` gives them."""
    if applies(x, cos, sin):
        return fused_rotate(x, cos, sin)
    r = cos.shape[-1]
    rotated = x if r == x.shape[-1] else x[..., :r]
    if torch.compiler.is_compiling():
        rotated = rotated * cos + rotated.roll(r // 2, -1) * sin
    else:  # not addcmul, which rounds differently: models converted from other families must agree bit for bit
        rotated = (rotated * cos).add_(rotated.roll(r // 2, -1).mul_(sin))
    return rotated if r == x.shape[-1] else torch.cat((rotated, x[..., r:]), dim=-1)


def alibi_slopes(heads: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
    """How much each head's scores decrease per token of distance, [heads]: 2^(-8/heads), 2^(-16/heads), …, 2^-8.

    If the number of heads is not a power of two: the slopes of the next lower power, then every other slope of the next
    higher power, as in the paper's code. They are computed on the device: copying numbers there would wait for it.
    """
    power = 2 ** math.floor(math.log2(heads))
    head = torch.arange(heads, dtype=dtype, device=device)
    return torch.exp2(torch.where(head < power, head + 1, head - power + 0.5) * (-8 / power))
