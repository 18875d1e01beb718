"""The linear layers of all models: plain `nn.Linear`, which quantizers recognize, run by the fastest kernel."""

from collections.abc import Iterator

from torch import Tensor, nn

from headwater.config.capabilities import Map, find_replacement
from headwater.config.text import HeadwaterConfig
from headwater.kernels.autotune import get_choices
from headwater.kernels.fused_linear import choose_linear
from headwater.mechanisms.named import owner_of


def make_map(
    config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int, bias: bool = False
) -> nn.Module | None:
    """Make a linear layer d_in -> d_out, or a mechanism's replacement; None if d_out is 0."""
    if d_out == 0:
        return None
    replacement: nn.Module | None = find_replacement(config, "build_linear", layer, name, d_in, d_out)
    return replacement or nn.Linear(d_in, d_out, bias=bias)


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x): x [..., d_in] -> [..., d_out]; while a model generates, a plain `nn.Linear` runs its fastest kernel."""
    choices = get_choices()
    if choices is None or type(layer) is not nn.Linear or type(x) is not Tensor:
        return layer(x)
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):  # accelerate's hooks replace it
        return layer(x)
    key = layer, x.shape, x.dtype
    if key not in choices.forms:
        choices.forms[key] = choose_linear(choices, layer, x)
    form = choices.forms[key]
    return layer(x) if form is None else form(layer, x)


def model_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """List the model's own linear layers, by qualified name: all except those inside mechanisms."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and owner_of(model, f"{name}.weight")[0] is None:
            yield name, module
