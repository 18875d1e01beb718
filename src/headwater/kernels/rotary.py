"""Rotary embedding that does not save x for the backward pass: the gradient of a rotation is the inverse rotation."""

import torch
from torch import Tensor


class Rotate(torch.autograd.Function):
    """`nn.position.rotate`: x [B, H, T, d]; cos and sin [B or 1, 1, T, r] as `nn.position.for_heads` gives them."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_channels(x, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_channels(grads[0], cos, sin, -1.0), None, None


def _rotate_channels(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    r = cos.shape[-1]
    half = r // 2
    y = torch.empty_like(x)
    torch.mul(x[..., :r], cos, out=y[..., :r])
    y[..., :half].addcmul_(x[..., half:r], sin[..., :half], value=direction)
    y[..., half:r].addcmul_(x[..., :half], sin[..., half:], value=direction)
    if r < x.shape[-1]:
        y[..., r:] = x[..., r:]
    return y
