"""The activation of a feed-forward, act(a) · b, which stores only a and b for the backward pass.

In the plain form autograd stores a, b and act(a), and the next linear layer stores the product. Here the product
is recognized among the tensors that layer saves, and recomputed when the layer asks for it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import activations

from headwater.kernels import can_fuse

_OPS = torch.ops.aten
# Forward: (x) -> y. Backward: (gradient of y, x, out) -> gradient of x; `out` may be the gradient of y.
_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "erf": functional.gelu,
    "tanh": partial(functional.gelu, approximate="tanh"),
}
_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "silu": _OPS.silu_backward.grad_input,
    "erf": _OPS.gelu_backward.grad_input,
    "tanh": partial(_OPS.gelu_backward.grad_input, approximate="tanh"),
}
# The function that each of transformers' classes computes. The forward pass calls the class itself, which launches one
# kernel, or several in GPT-2's code. The backward pass always launches one.
_KINDS: dict[type, str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "erf",
    activations.GELUTanh: "tanh",
    activations.NewGELUActivation: "tanh",
    activations.AccurateGELUActivation: "tanh",
}

# PyTorch's private access to the current saved-tensor hooks, and whether hooks are allowed. Without it: plain form.
_outer: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_allowed: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: False)


def apply_activation(act: nn.Module, a: Tensor, b: Tensor | None, map_: Callable[[Tensor], Tensor]) -> Tensor:
    """map_(act(a) · b), or map_(act(a)) without b; a, b: [..., F].

    Values equal the plain form's bit for bit, gradients up to rounding. Activations other than SiLU and the GELUs use
    the plain form.
    """
    alike = b is None or (b.shape == a.shape and b.dtype == a.dtype and b.device == a.device)
    is_supported = type(act) in _KINDS and a.is_floating_point() and _outer is not None
    if not (alike and is_supported and can_fuse(a, b) and _allowed()):
        return map_(act(a) if b is None else act(a) * b)
    h = _Activated.apply(act, a, b)
    with _skip_saving(h):
        return map_(h)


class _Activated(torch.autograd.Function):
    """act(a) · b. `ctx.recomputed` holds what the next layer's backward pass recomputed, for this one's."""

    @staticmethod
    def forward(ctx, act: nn.Module, a: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, *(() if b is None else (b,)))
        ctx.kind, ctx.recomputed = _KINDS[type(act)], None
        return act(a) if b is None else act(a) * b

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), recomputed = grads, ctx.recomputed
        ctx.recomputed = None
        if recomputed is None:
            recomputed = _recompute_activation(ctx.kind, *ctx.saved_tensors)
        a, b, y = recomputed
        if b is None:
            return None, _BACKWARD[ctx.kind](g, a, grad_input=torch.empty_like(a)), None
        ga = g * b
        return None, _BACKWARD[ctx.kind](ga, a, grad_input=ga), y.mul_(g)


def _recompute_activation(kind: str, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return a, b and act(a), the last in fresh memory."""
    return a, b, _FORWARD[kind](a)


@dataclass
class _Recomputed:
    """A placeholder for the product among the tensors that the next layer saves; with its `shape` and `stride`."""

    node: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self) -> Tensor:
        # Unpack the saved tensors once for both backward passes: activation checkpointing returns each only once.
        # No graph is needed: autograd attaches the saved tensor's own.
        with torch.no_grad():
            if self.node.recomputed is None:
                self.node.recomputed = _recompute_activation(self.node.kind, *self.node.saved_tensors)
            _, b, y = self.node.recomputed
            return (y if b is None else y * b).as_strided(self.shape, self.stride)


def _skip_saving(h: Tensor) -> AbstractContextManager[None]:
    """Let autograd save how to recompute h instead of h inside, and all other tensors as usual."""
    assert _outer is not None
    node, outer = h.grad_fn, _outer(True)
    # Keep an identity and not h itself, which the hooks would keep alive.
    identity = _identify_tensor(h)

    def pack(x: Tensor) -> Any:
        if type(x) is Tensor and _identify_tensor(x) == identity:
            return _Recomputed(node, x.shape, x.stride())
        return x if outer is None else outer[0](x)

    def unpack(x: Any) -> Tensor:
        if isinstance(x, _Recomputed):
            return x()
        return x if outer is None else outer[1](x)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _identify_tensor(x: Tensor) -> tuple[Any, ...]:
    """Return a key that a reshaped tensor shares, but a slice, a cast or a tensor changed in place does not."""
    return x.untyped_storage()._cdata, x.numel(), x.dtype, x._version
