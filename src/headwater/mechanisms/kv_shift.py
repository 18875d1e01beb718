"""KV shifting attention: keys and values from the previous token. arXiv 2411.19574, section 3, equations 4-5.

    K'_t = α1·K_t + α2·K_{t-1}        V'_t = β1·V_t + β2·V_{t-1}        K_{-1} = V_{-1} = 0

α, β are free scalars per key/value head; α1, β1 start uniform in [0, 1), α2 = 1 - α1, β2 = 1 - β1, and nothing
constrains them afterwards. The shift comes before RoPE and before the cache.

Departures: "previous token" is the previous token of the same document (the paper has one document a row), and the
cache keeps the raw last token beside the shifted history. The paper's inference listing keeps the shifted one, which
makes the first decoded token wrong.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from headwater.mechanisms.base import KV, Local, Mechanism
from headwater.plan import LayerPlan

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class KVShift(Mechanism):
    """Learnable mix of each key and value with those of the token before.

    Parameters: `alpha` and `beta`, each [2, K]: row 0 weighs the current token, row 1 the previous one.
    In a layer without values there is no `beta`.

    Options: none yet.
    """

    @strict
    @dataclass
    class Options:
        pass

    window = 2

    def __init__(self, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> None:
        super().__init__(options, config, plan)
        self.alpha = self.scalars(self.window, plan.kv_heads)
        self.beta = self.scalars(self.window, plan.kv_heads) if plan.owns_v else None

    @classmethod
    def plan(cls, options: dict[str, Any], plans: list[LayerPlan]) -> list[LayerPlan]:
        return [plan.acting(cls.name(), tail=cls.window - 1) if plan.kv_heads else plan for plan in plans]

    def start(self, parameter: str, generator: torch.Generator) -> Tensor:
        current = torch.rand(getattr(self, parameter).shape[1], generator=generator)
        return torch.stack((current, 1 - current))

    def local(self, q: Tensor, kv: KV, context: Local) -> tuple[Tensor, KV]:
        length = kv.k.shape[2]
        # With a cache the raw tokens before this call stand in front, and the first of them are cut off again.
        k, v = kv if context.tail is None else context.tail.with_tail(kv, self.window - 1)
        k = shift(k, self.alpha, context.reach, length)
        v = None if v is None or self.beta is None else shift(v, self.beta, context.reach, length)
        return q, KV(k, v)


def shift(x: Tensor, weight: Tensor, reach: Tensor | None = None, length: int | None = None) -> Tensor:
    """y_t = weight[0]·x_t + weight[1]·x_{t-1}, per head, with x_{-1} = 0.

    x: [B, K, T' , d]; weight: [2, K]; y: the last `length` positions, [B, K, T, d], default all.
    reach: [B, T]; where it is 0 the previous token belongs to another document and counts as zero.
    """
    length = x.shape[2] if length is None else length
    if x.shape[2] == length and reach is None and not torch.compiler.is_compiling():
        return _Shift.apply(x, weight)
    current = x[:, :, -length:]
    previous = nn.functional.pad(x, (0, 0, 1, 0))[:, :, -length - 1 : -1]
    w0, w1 = weight[:, :, None, None]
    if reach is not None:
        w1 = w1 * (reach >= 1)[:, None, :, None]
    return (w0 * current + w1 * previous).to(x.dtype)


class _Shift(torch.autograd.Function):
    """The same for whole rows without the padded copy and its graph: two passes forward, two back."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        w0, w1 = weight[:, :, None, None]
        y = x * w0
        y[:, :, 1:].addcmul_(x[:, :, :-1], w1)
        return y.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (g,) = grads
        x, weight = ctx.saved_tensors
        w0, w1 = weight[:, :, None, None]
        gx = gw = None
        if ctx.needs_input_grad[0]:
            gx = g * w0
            gx[:, :, :-1].addcmul_(g[:, :, 1:], w1)
            gx = gx.to(x.dtype)
        if ctx.needs_input_grad[1]:
            gw = torch.stack(
                [
                    (g * x).sum((0, 2, 3), dtype=weight.dtype),
                    (g[:, :, 1:] * x[:, :, :-1]).sum((0, 2, 3), dtype=weight.dtype),
                ]
            )
        return gx, gw
