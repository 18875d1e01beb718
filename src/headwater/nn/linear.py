"""The linear layers of all models: plain `nn.Linear`, which quantizers recognize, run by the fastest kernel.

Layers with the same input, such as queries, keys and values, may run as one product. The parameters stay separate.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwater.config.capabilities import Map, build_replacement
from headwater.config.text import HeadwaterConfig
from headwater.kernels import are_ordinary, can_fuse_traced
from headwater.kernels.autotune import get_choices
from headwater.kernels.fused_linear import choose_linear
from headwater.nn.stages import find_owner
from headwater.util.precision import CastingLinear


def make_map(
    config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int, bias: bool = False
) -> nn.Module | None:
    """Make a linear layer d_in -> d_out, or a mechanism's replacement; None if d_out is 0."""
    if d_out == 0:
        return None
    replacement = build_replacement(config, layer, name, d_in, d_out)
    return replacement or nn.Linear(d_in, d_out, bias=bias)


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x): x [..., d_in] -> [..., d_out]; while a model generates, a plain `nn.Linear` runs its fastest kernel."""
    choices = get_choices()
    if choices is None or type(x) is not Tensor or not _is_plain(layer):
        return layer(x)
    key = layer, x.shape, x.dtype
    if key not in choices.forms:
        choices.forms[key] = choose_linear(choices, layer, x)
    form = choices.forms[key]
    return layer(x) if form is None else form(layer, x)


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is a linear layer whose call computes nothing else: accelerate's hooks replace `forward`."""
    hooks = getattr(layer, "_forward_hooks", None) or getattr(layer, "_forward_pre_hooks", None)
    return type(layer) in (nn.Linear, CastingLinear) and not hooks and "forward" not in vars(layer)


class JoinsLinears(nn.Module):
    """A module with linear layers of the same input, which may run as one product.

    joins: whether compiled training multiplies by the joined weights, which the compiler joins where it casts them.
    joined: the memory of the layers' weights and biases (`join_linears`), for calls that record no gradients.
    """

    joins = False
    joined: tuple[Tensor, Tensor | None] | None = None

    def list_joinable(self) -> Sequence[nn.Module | None]:
        """List the layers, with None for a missing one."""
        raise NotImplementedError

    def apply_joined(self, x: Tensor) -> list[Tensor | None] | None:
        """Apply the layers to x [..., d_in] in one product: [..., d_out] of each; None: run them separately."""
        layers = self.list_joinable()
        present = [layer for layer in layers if layer is not None]
        y = self._multiply(present, x)
        if y is None:
            return None
        outputs = iter(y.split([layer.out_features for layer in present], dim=-1))
        return [None if layer is None else next(outputs) for layer in layers]

    def _multiply(self, layers: list[nn.Module], x: Tensor) -> Tensor | None:
        if self.joined is not None and not torch.is_grad_enabled():
            return linear(x, *(None if tensor is None else tensor.to(x.dtype) for tensor in self.joined))
        if self.joins and can_fuse_traced() and type(x) is Tensor and _can_join(layers):
            return linear(x, *_concatenate(layers, x))
        return None


def _can_join(layers: list[nn.Module]) -> TypeGuard[list[nn.Linear]]:
    """Whether all are plain and alike: no hooks, adapters, quantized or sharded weights; all or none are frozen."""
    kinds = set()
    for layer in layers:
        if not _is_plain(layer) or layer._backward_hooks or layer._backward_pre_hooks:
            return False
        weight, bias = layer.weight, layer.bias
        if not are_ordinary(weight, bias):
            return False
        kinds.add((weight.dtype, weight.device, weight.requires_grad, bias is None))
    return len(layers) > 1 and len(kinds) == 1


def _concatenate(layers: list[nn.Linear], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Copy weights and biases into one tensor each, in the dtype of x, or that to which autocast would cast them."""
    device, dtype = x.device.type, x.dtype
    if dtype is torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    biases = [layer.bias.to(dtype) for layer in layers if layer.bias is not None]
    return torch.cat([layer.weight.to(dtype) for layer in layers]), torch.cat(biases) if biases else None


@contextmanager
def join_linears(model: nn.Module) -> Iterator[None]:
    """Multiply once by weights with the same input, in all calls inside that record no gradients.

    The weights move into adjacent memory and stay there, as the same parameters; nothing is stored twice. Nothing
    inside may replace a parameter.
    """
    modules = [module for module in model.modules() if isinstance(module, JoinsLinears)]
    try:
        for module in modules:
            layers = [layer for layer in module.list_joinable() if layer is not None]
            if _can_join(layers):
                biases = [layer.bias for layer in layers if layer.bias is not None]
                module.joined = _move_together([layer.weight for layer in layers]), _move_together(biases)
        yield
    finally:
        for module in modules:
            vars(module).pop("joined", None)


def _move_together(parameters: Sequence[Tensor]) -> Tensor | None:
    """Move parameters into adjacent memory, unless they are there already, and return all of it; None for none."""
    if not parameters:
        return None
    first = parameters[0].data
    ends = accumulate((parameter.numel() for parameter in parameters), initial=first.storage_offset())
    if all(
        parameter.is_contiguous()
        and parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and parameter.storage_offset() == end
        for parameter, end in zip(parameters, ends, strict=False)
    ):
        return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, memory in zip(parameters, joined.split([*map(len, parameters)]), strict=True):
        parameter.data = memory
    return joined


def model_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """List the model's own linear layers, by qualified name: all except those inside mechanisms."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and find_owner(model, f"{name}.weight")[0] is None:
            yield name, module
