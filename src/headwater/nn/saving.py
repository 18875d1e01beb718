"""Forms of a block's elementwise parts that leave autograd less to keep.

Of what lies between the maps of a feed-forward, act(a) · b, autograd keeps as written a, b, act(a), and for the map
after it the product. Here it keeps a and b. The product is not kept for that map either: it is told from the other
tensors that the map saves, and made again when the map asks for it.

Under autocast each map casts what it reads to a copy of its own, which it keeps; here maps share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers import activations

from headwater.nn.linear import Linear
from headwater.scratch import scratch

# Each is (x, out) -> out, or (gradient, x, out) -> out; `out` may be the gradient.
_OPS = torch.ops.aten
_silu: Callable[..., Tensor] = _OPS.silu.out
_gelu: Callable[..., Tensor] = _OPS.gelu.out
_FORWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda x, out: _silu(x, out=out),
    "erf": lambda x, out: _gelu(x, approximate="none", out=out),
    "tanh": lambda x, out: _gelu(x, approximate="tanh", out=out),
}
_BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "silu": lambda g, x, out: _OPS.silu_backward.grad_input(g, x, grad_input=out),
    "erf": lambda g, x, out: _OPS.gelu_backward.grad_input(g, x, approximate="none", grad_input=out),
    "tanh": lambda g, x, out: _OPS.gelu_backward.grad_input(g, x, approximate="tanh", grad_input=out),
}
# Of transformers' classes, which function each is. Whether a forward pass takes one kernel or, as in GPT-2's own code,
# several, is left as it is: the backward pass takes one.
_KINDS: dict[type, str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "erf",
    activations.GELUTanh: "tanh",
    activations.NewGELUActivation: "tanh",
    activations.AccurateGELUActivation: "tanh",
}
_ONE_KERNEL = (nn.SiLU, activations.SiLUActivation)

# The hooks around the present code, and whether there may be more. Without these two all runs as written.
_outer: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_allowed: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: False)


def activated(act: nn.Module, a: Tensor, b: Tensor | None, map_: nn.Module) -> Tensor:
    """map_(act(a) · b), or map_(act(a)) without b; a, b: [..., F].

    Values are those of this line as written, gradients up to rounding; twice differentiated it cannot be, unless `act`
    is none of SiLU and the GELUs, under `torch.compile`, functorch and forward-mode autograd: then it runs as written.
    """
    if not _applies(act, a, b):
        return map_(act(a) if b is None else act(a) * b)
    h = _Activated.apply(act, a, b)
    if h.grad_fn is None:
        return map_(h)
    with _without(h):
        return map_(h)


def _applies(act: nn.Module, a: Tensor, b: Tensor | None) -> bool:
    return (
        torch.is_grad_enabled()
        and type(act) in _KINDS
        and type(a) is Tensor
        and a.is_floating_point()
        and (b is None or (type(b) is Tensor and b.shape == a.shape and b.dtype == a.dtype and b.device == a.device))
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _outer is not None
        and _allowed()
    )


class _Activated(torch.autograd.Function):
    """act(a) · b, keeping a and b. `made` is what was made again for the map after it, until the gradient is here."""

    @staticmethod
    def forward(ctx, act: nn.Module, a: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, *(() if b is None else (b,)))
        ctx.kind, ctx.made = _KINDS[type(act)], None
        if b is None:
            return act(a)
        if isinstance(act, _ONE_KERNEL):
            return _FORWARD[ctx.kind](a, scratch(1, a.shape, a.dtype, a)[0]) * b
        return act(a) * b

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), made = grads, ctx.made
        ctx.made = None
        if made is None:
            made = _made(ctx.kind, *ctx.saved_tensors)
        a, b, y = made
        if b is None:
            return None, _BACKWARD[ctx.kind](g, a, torch.empty_like(a)), None
        ga = g * b
        return None, _BACKWARD[ctx.kind](ga, a, ga), y.mul_(g)


def _made(kind: str, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """a, b and act(a), in memory of its own."""
    return a, b, _FORWARD[kind](a, torch.empty_like(a))


@dataclass
class _Again:
    """Stands for the product among what the map after it saved; `shape` and `stride` are as it saw it."""

    node: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self) -> Tensor:
        # Unpacked once for both: activation checkpointing gives each saved tensor back one time only.
        # Whatever needs a graph gets the one that the saved tensor had: autograd sees to that.
        with torch.no_grad():
            if self.node.made is None:
                self.node.made = _made(self.node.kind, *self.node.saved_tensors)
            _, b, y = self.node.made
            return (y if b is None else y * b).as_strided(self.shape, self.stride)


def _without(h: Tensor) -> AbstractContextManager[None]:
    """Inside, autograd saves for h a note how to make it again; all else as it would be saved outside."""
    assert _outer is not None
    node, outer = h.grad_fn, _outer(True)
    # Not h itself, which the hooks would keep alive; where they run it is.
    identity = _identity(h)

    def pack(x: Tensor) -> Any:
        if type(x) is Tensor and _identity(x) == identity:
            return _Again(node, x.shape, x.stride())
        return x if outer is None else outer[0](x)

    def unpack(x: Any) -> Tensor:
        if isinstance(x, _Again):
            return x()
        return x if outer is None else outer[1](x)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _identity(x: Tensor) -> tuple[Any, ...]:
    """The same for a reshaped tensor, another for a part of it, a cast, and after a change in place."""
    return x.untyped_storage()._cdata, x.numel(), x.dtype, x._version


def shared_cast(x: Tensor, *readers: nn.Module | None) -> Iterator[Tensor]:
    """x, once for each of the maps that read it; under autocast, if all are plain, as they would cast it."""
    kind = x.device.type
    if (
        torch.is_grad_enabled()
        and kind != "meta"
        and torch.is_autocast_enabled(kind)
        and x.dtype == torch.float32
        and type(x) is Tensor
        and all(type(reader) is Linear for reader in readers)
        and not torch.compiler.is_compiling()
    ):
        return iter(_Cast.apply(x, torch.get_autocast_dtype(kind), len(readers)))
    return repeat(x, len(readers))


class _Cast(torch.autograd.Function):
    """x in another dtype, several times the same memory; their gradients are added up in the dtype of x."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
        ctx.dtype = x.dtype
        y = x.to(dtype)
        return tuple(y.detach() for _ in range(count))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        first, *rest = grads
        total = first.to(ctx.dtype)
        for g in rest:
            total += g
        return total, None, None
