"""Quantizers on headwater's models: modules that they must skip, and an error for those they wrongly skip."""

from importlib import import_module
from typing import Any

from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from headwater.mechanisms.contract import Mechanism
from headwater.util.errors import HeadwaterError

# Qualified names of the weights of linear layers, and of the parameters that replace them in mechanisms.
MAPS = r"re:(.*\.)?([a-z]+_proj\.weight|([a-z]+_proj|mlp)\.(frozen_)?(key|value))"
# Pattern, in transformers' syntax, for the modules that mechanisms add to the model. Quantizers skip them: their linear
# layers, such as gates, are small, and kernels for quantized weights do not support all of their
# sizes.
BESIDE = r".*\bmechanisms"


def torchao_config(weights: Any) -> Any:
    """Make a torchao config that quantizes all linear layers of a headwater model's blocks, and Pattention's pairs.

    weights: a weight-only config, such as `torchao.quantization.Int8WeightOnlyConfig()`. Pattention dequantizes its
        pairs, one module at a time, so a config for activations has no effect on it.

    Use it as `from_pretrained(quantization_config=TorchAoConfig(torchao_config(weights)))`, or for a loaded model as
    `torchao.quantize_(model, torchao_config(weights), filter_fn=None)`. The output head, the embedding and the
    maps of mechanisms are not quantized. Raises `HeadwaterError` if torchao is missing.
    """
    try:  # not `import torchao`, because transformers requires every package that exported code imports
        torchao = import_module("torchao.quantization")
    except ImportError as error:
        raise HeadwaterError(f"This needs torchao: pip install torchao ({error}).") from error
    return torchao.FqnToConfig({MAPS: weights})


def check_quantized(model: nn.Module, quantizer: HfQuantizer | None) -> None:
    """Raise `HeadwaterError` if `quantizer` has skipped all linear layers, or their replacements in mechanisms."""
    settings = getattr(quantizer, "quantization_config", None)
    if quantizer is None or getattr(settings, "dequantize", False):
        return
    spared = getattr(quantizer, "modules_to_not_convert", None) or []
    skipped = {
        name: parameter
        for name, parameter in _find_matrices(model, spared).items()
        if not quantizer.param_needs_quantization(model, name)
    }
    if skipped:
        size = sum(parameter.numel() * parameter.element_size() for parameter in skipped.values())
        raise HeadwaterError(
            f"This quantization_config reaches linear layers only and would leave {len(skipped)} matrices of "
            f"{size / 2**20:,.1f} MiB in full precision ({next(iter(skipped))}, …). For torchao, pass "
            "TorchAoConfig(headwater.models.quantization.torchao_config(…)); or list the modules in "
            "modules_to_not_convert to skip them."
        )
    projections = _find_projections(model, spared)
    if projections and all(
        _is_full(module) and not quantizer.param_needs_quantization(model, f"{name}.weight")
        for name, module in projections.items()
    ):
        raise HeadwaterError(
            f"This quantization_config ({type(settings).__name__}) has quantized none of the {len(projections)} "
            "linear layers of the blocks; use another one, such as a BitsAndBytesConfig."
        )


def _find_matrices(model: nn.Module, spared: list[str]) -> dict[str, nn.Parameter]:
    """Find the parameters with which mechanisms replace linear layers, by name, except in `spared` modules."""
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, Mechanism) and "mechanisms" not in path.split(".") and parameter.ndim == 2
        if all(should_convert_module(name_or_path, spared) for name_or_path in (path, f"{path}.{name}"))
    }


def _find_projections(model: nn.Module, spared: list[str]) -> dict[str, nn.Module]:
    """Find the linear layers of the blocks, or a quantizer's replacements of them, except in `spared` modules."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith("_proj") and not isinstance(module, Mechanism) and should_convert_module(name, spared)
    }


def check_full_precision(model: nn.Module) -> None:
    """Raise `HeadwaterError` if a quantizer has changed a model's weights, for functions that read them as numbers."""
    changed = any(isinstance(layer, nn.Linear) and not _is_full(layer) for layer in model.modules())
    if changed or getattr(model, "hf_quantizer", None) is not None:
        raise HeadwaterError(
            "This model is quantized, and this needs the weights as they were trained; load the model without a "
            "quantization_config, or use the checkpoint that was quantized."
        )


def _is_full(layer: nn.Module) -> bool:
    """Whether a layer is a linear layer that no quantizer has changed."""
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    weight = tensors.get("weight")
    return (
        type(layer) is nn.Linear
        and tensors.keys() <= {"weight", "bias"}
        and type(weight) in (Tensor, nn.Parameter)
        and weight.is_floating_point()
        and weight.element_size() > 1
    )
