"""A family of transformers' models: two tables that convert to headwater's models and back, with the same logits.

One table maps the fields of its config to ours, the other its modules to ours. Some of our fields have one value in the
whole family (`fixed`), and headwater supports some of its fields at only one value (`required`). A config is written
with these tables and read back: any difference is something that the family cannot express.
"""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headwater.config.text import HeadwaterConfig
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.pretrained import HeadwaterPreTrainedModel
from headwater.util.errors import HeadwaterError, either, sentence

LAYER = "model.layers.{}."
# Fields of initialization and serving, which do not change a model's function.
UNCOMPARED = {
    "layer_types",
    "materialise",
    "scaled_residual_init",
    "embedding_range",
    "linear_init",
    "initializer_seed",
}


@dataclass(frozen=True)
class Link:
    """Link of one module of the family, the source, to the modules of ours that it contains; `{}` is the layer.

    form: how the source's weight differs from a concatenation of ours.
        transposed: its matrix is [in, out], as in Conv1D.
        interleaved: the rows of our modules alternate head by head, [H, modules, d].
        backwards: RoPE rotates its heads the other way, which equals ours with the two halves of each head exchanged.
        convolution: its weight is a convolution's, [out, C, h, w], and ours a matrix.
        parameter: it is a parameter [1, n, D], not a module, and ours is an embedding's weight.
    """

    source: str
    targets: tuple[str, ...]
    form: Literal["", "transposed", "interleaved", "backwards", "convolution", "parameter"] = ""

    def split_tensor(self, tensor: Tensor, config: HeadwaterConfig) -> tuple[Tensor, ...]:
        """Split the family's weight or bias into one for each of our modules."""
        match self.form, tensor.ndim:
            case "interleaved", _:
                by_head = tensor.unflatten(0, (config.num_attention_heads, len(self.targets), -1)).unbind(1)
                return tuple(x.flatten(0, 1) for x in by_head)
            case "backwards", _:
                tensor = exchange_halves(tensor, config)
            case "parameter", _:
                tensor = tensor.flatten(0, 1)
            case "convolution", 4:
                tensor = tensor.flatten(1)
            case "transposed", 2:
                tensor = tensor.mT
        return tensor.chunk(len(self.targets))

    def join_tensors(self, tensors: list[Tensor], config: HeadwaterConfig) -> Tensor:
        """Join the weights or biases of our modules into the family's."""
        tensor = torch.cat(tensors)
        match self.form, tensor.ndim:
            case "interleaved", _:
                heads = (config.num_attention_heads, -1)
                return torch.stack([x.unflatten(0, heads) for x in tensors], dim=1).flatten(0, 2)
            case "backwards", _:
                return exchange_halves(tensor, config)
            case "parameter", _:
                return tensor[None]
            case "convolution", 2:
                return tensor.unflatten(1, (config.num_channels, *config.patch_shape))
            case "transposed", 2:
                return tensor.mT
        return tensor


@dataclass(frozen=True)
class Family:
    """Family of transformers' models.

    model: its causal language model, or its image classifier. headwater_model: ours.
    fields: field of our config -> field of its config.
    fixed: fields of our config that are the same in the whole family, unless `read_extra` sets them; fields in neither
        table have our defaults.
    required: fields of its config without a counterpart in ours, with the value at which both agree.
    windowed: further fields of its config that a sliding window needs.
    partial_rope: whether RoPE may apply to only a part of each head.
    rope_types: the kinds of RoPE for which both compute the same; None: all.
    read_extra: its config -> fields of ours without a counterpart in its config. write_extra: our config -> fields of
    its. links: its modules.
    """

    model: type[PreTrainedModel]
    fields: dict[str, str]
    links: tuple[Link, ...]
    fixed: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    windowed: dict[str, Any] = field(default_factory=dict)
    partial_rope: bool = False
    rope_types: tuple[str, ...] | None = None
    read_extra: Callable[[PreTrainedConfig], dict[str, Any]] = lambda config: {}
    write_extra: Callable[[HeadwaterConfig], dict[str, Any]] = lambda config: {}
    headwater_model: type[HeadwaterPreTrainedModel] = HeadwaterForCausalLM

    @property
    def name(self) -> str:
        return self.model.config_class.model_type

    def list_links(self, layers: int) -> Iterator[Link]:
        """List the links of a model, expanded for each layer."""
        for link in self.links:
            for layer in range(layers if "{}" in link.source else 1):
                targets = tuple(name.format(layer) for name in link.targets)
                yield replace(link, source=link.source.format(layer), targets=targets)

    def read_config(self, config: PreTrainedConfig) -> HeadwaterConfig:
        """Convert the family's config to ours. Raises `HeadwaterError` for features that headwater does not have."""
        if getattr(config, "quantization_config", None) is not None:
            raise HeadwaterError(
                "This model is quantized, but headwater has no quantized linear layers; use the unquantized model."
            )
        for name, value in self.required.items():
            if getattr(config, name, None) not in (value, None):
                raise HeadwaterError(
                    f"A {self.name} model with {name}={getattr(config, name)} is not supported; use one with "
                    f"{name}={value}."
                )
        values = {name: getattr(config, source, None) for name, source in self.fields.items()}
        if "sliding_window" in values:
            values |= self._read_window(config)
        values |= self.read_extra(config)
        if "rope_parameters" in values:
            values["rope_parameters"] = self._read_rope(values["rope_parameters"] or {})
        values = {name: value for name, value in values.items() if value is not None}
        try:
            return self.headwater_model.config_class(**self.fixed | values, dtype=config.dtype)
        except (HeadwaterError, StrictDataclassError, TypeError) as error:
            raise HeadwaterError(f"This {self.name} model is not supported: {sentence(error)}") from error

    def _read_window(self, config: PreTrainedConfig) -> dict[str, Any]:
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        if len(set(kinds)) > 1 and not _has_layer_types(type(config)):
            raise HeadwaterError(
                f"A {self.name} model has a sliding window in all layers or in none, whatever its layer_types say; "
                "remove layer_types."
            )
        layers = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        if config.sliding_window is None or not layers:
            return {"sliding_window": None}
        return {"sliding_layers": layers if len(layers) < len(kinds) else None}

    def _read_rope(self, parameters: dict[str, Any]) -> dict[str, Any]:
        if any(isinstance(value, dict) for value in parameters.values()):
            raise HeadwaterError(
                f"This {self.name} model's rope_parameters differ between layers; use one whose layers all share them."
            )
        if self.rope_types is not None and parameters.get("rope_type", "default") not in self.rope_types:
            raise HeadwaterError(
                f"A {self.name} model norms queries and keys after RoPE, which with rope_type "
                f"{parameters['rope_type']!r} is not what headwater computes; use one with {either(self.rope_types)}."
            )
        # "type" is the old name of "rope_type" and is kept next to it.
        rope = {name: value for name, value in parameters.items() if name != "type" and value is not None}
        if not self.partial_rope and rope.pop("partial_rotary_factor", 1.0) != 1.0:
            raise HeadwaterError(
                f"A {self.name} model applies RoPE to whole heads, whatever its rope_parameters say; remove "
                f"partial_rotary_factor from them."
            )
        return rope

    def write_config(self, config: HeadwaterConfig) -> PreTrainedConfig:
        """Convert our config to the family's. Raises `HeadwaterError` naming the first field that it cannot express."""
        try:
            written = self._write_fields(config)
            restored = self.read_config(written)
        except (HeadwaterError, StrictDataclassError, ValueError, TypeError) as error:
            raise HeadwaterError(
                f"The model's config cannot be written in the {self.name} format: {sentence(error)}"
            ) from error
        unread = {"norm_bias", "final_norm_bias"} if config.norm == "rms_norm" else set()
        for name in (name for name in config.field_names() if name not in UNCOMPARED | unread):
            value, restored_value = _make_comparable(config, name), _make_comparable(restored, name)
            if value != restored_value:
                difference = f"{json.dumps(value)}, only {json.dumps(restored_value)}"
                if isinstance(value, dict):
                    restored_value = restored_value or {}
                    keys = value | restored_value
                    difference = " and ".join(key for key in keys if value.get(key) != restored_value.get(key))
                raise HeadwaterError(
                    f"A {self.name} model cannot have {name} {difference}; change it, choose another family, or run "
                    "headwater export without --family."
                )
        return written

    def _write_fields(self, config: HeadwaterConfig) -> PreTrainedConfig:
        values = self.required | {source: getattr(config, name) for name, source in self.fields.items()}
        if self.partial_rope:  # the family's own default rotates another fraction
            values["rope_parameters"] = {"partial_rotary_factor": 1.0} | (config.rope_parameters or {})
        config_class = self.model.config_class
        if config.sliding_window is not None:
            values |= self.windowed
            if config.sliding_layers is not None and _has_layer_types(config_class):
                values["layer_types"] = list_layer_types(config)
        values |= self.write_extra(config)
        if not hasattr(config_class, "head_dim") and config.head_dim == config.hidden_size / config.num_attention_heads:
            values.pop("head_dim", None)  # read if present, but the family's config class does not declare it
        return config_class(**copy.deepcopy(values), dtype=config.dtype)

    def read_tensors(self, tensors: dict[str, Tensor], config: HeadwaterConfig) -> dict[str, Tensor]:
        """Copy the family's tensors under our names; `config` is ours. Raises `HeadwaterError` for an unknown one."""
        links = {link.source: link for link in self.list_links(config.num_hidden_layers)}
        converted = {}
        for name, tensor in tensors.items():
            module, _, suffix = (name, "", "weight") if name in links else name.rpartition(".")
            if module not in links:
                raise HeadwaterError(
                    f"This model has a tensor {name!r}, which a plain {self.name} model does not have; merge or "
                    f"remove what was added to it."
                )
            link = links[module]
            for target, split in zip(link.targets, link.split_tensor(tensor, config), strict=True):
                converted[f"{target}.{suffix}"] = _copy_tensor(split)
        return converted

    def write_tensors(self, tensors: dict[str, Tensor], config: HeadwaterConfig) -> dict[str, Tensor]:
        """Copy our tensors under the family's names."""
        written = {}
        for link in self.list_links(config.num_hidden_layers):
            for suffix in ("weight", "bias"):
                names = [f"{target}.{suffix}" for target in link.targets]
                if stored := [tensors[name] for name in names if name in tensors]:
                    name = link.source if link.form == "parameter" else f"{link.source}.{suffix}"
                    written[name] = _copy_tensor(link.join_tensors(stored, config))
        return written


def _copy_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def exchange_halves(tensor: Tensor, config: HeadwaterConfig) -> Tensor:
    """Move the second half of each head before the first, in rows of heads [heads·d, …]."""
    return tensor.unflatten(0, (-1, config.head_dim)).roll(config.head_dim // 2, 1).flatten(0, 1)


def _has_layer_types(config_class: type[PreTrainedConfig]) -> bool:
    """Whether layers of models with such a config may differ in whether they have a sliding window."""
    return any("layer_types" in vars(kind).get("__annotations__", ()) for kind in config_class.__mro__)


def list_layer_types(config: HeadwaterConfig) -> list[str]:
    layers = range(config.num_hidden_layers)
    return ["sliding_attention" if config.slides(layer) else "full_attention" for layer in layers]


def _make_comparable(config: HeadwaterConfig, name: str) -> Any:
    value = getattr(config, name)
    return {"partial_rotary_factor": 1.0} | value if name == "rope_parameters" and value else value


def same_names(*names: str) -> dict[str, str]:
    """Map fields or modules to ours of the same name."""
    return {name: name for name in names}


def link_modules(names: dict[str, str]) -> tuple[Link, ...]:
    """Link modules that correspond one to one."""
    return tuple(Link(source, (target,)) for source, target in names.items())
