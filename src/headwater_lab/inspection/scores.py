"""Measures of attention weights and hidden states. Pure functions of tensors.

Weights a [B, H, T, S] are attention's, T = S; taps [window, H] are the weights with which a head's values were mixed
over earlier tokens, V'_s = Σ_i taps[i]·V_{s-i}.
"""

import torch
from torch import Tensor


def token_similarity(x: Tensor) -> Tensor:
    """Mean cosine between different tokens of a row, x [B, T, D] -> [B]: over-smoothing, arXiv 2410.17897.

    From Σ_{s≠t} u_s·u_t = ‖Σ_t u_t‖² - Σ_t ‖u_t‖² with unit vectors u; a zero vector is similar to no other.
    """
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    tokens = x.shape[1]
    return (unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))) / (tokens * (tokens - 1))


def attention_entropy(a: Tensor) -> Tensor:
    """-Σ_s a_s·ln a_s in nats: [B, H, T, S] -> [B, H, T]."""
    return torch.special.entr(a).sum(-1)


def effective_weights(a: Tensor, taps: Tensor, since: Tensor) -> Tensor:
    """The weights with which a head reads the projected values, before mixing: [B, H, T, S] -> same.

        e_{t,j} = Σ_i taps[i]·a_{t,j+i}

    They need not add up to 1, and may be negative if a tap is.
    since: [B, S], the number of earlier tokens of its document; a tap that reaches further back reads zero.
    """
    taps = taps.to(a)
    result = a * taps[0, :, None, None]
    for back in range(1, min(len(taps), a.shape[-1])):
        inside = (since[:, back:] >= back)[:, None, None]
        result[..., :-back] += taps[back, :, None, None] * a[..., back:] * inside
    return result


def compose_taps(taps: Tensor, later_taps: Tensor) -> Tensor:
    """Combine the taps of two successive windows: [m, H], [n, H] -> [m + n - 1, H]."""
    result = taps.new_zeros(len(taps) + len(later_taps) - 1, taps.shape[1])
    for back, tap in enumerate(taps):
        result[back : back + len(later_taps)] += tap * later_taps
    return result


def previous_attention(a: Tensor, since: Tensor) -> tuple[Tensor, Tensor]:
    """Sum attention to the previous token over the tokens that have one, and count them: [H], [].

    since: [B, T], the number of earlier tokens of its document.
    """
    has = since[:, 1:] >= 1
    return (a.diagonal(offset=-1, dim1=-2, dim2=-1) * has[:, None]).sum((0, 2), dtype=torch.float64), has.sum()


def induction_attention(a: Tensor, period: int) -> Tensor:
    """Mean attention from t to t - period + 1, over the rows' second half: [B, H, T, S] -> [H].

    Rows are `period` random tokens, twice; the successor of token t's earlier occurrence is at t - period + 1.
    The prefix-matching score of Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    return a.diagonal(offset=1 - period, dim1=-2, dim2=-1)[..., 1:].mean((0, 2), dtype=torch.float64)
