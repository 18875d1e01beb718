"""Convert models of transformers' families to headwater's and back, with the same logits.

A family is two tables, used in both directions: one maps the fields of its config to ours, the other its tensors
to ours. Some of our fields have one value in the whole family (`fixed`), and headwater supports
some of its fields at only one value (`required`). A config is written with these tables and read back: any
difference is something that the family cannot express.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    NanoChatForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.load import (
    CONFIG,
    build_model,
    check_finite,
    config_from,
    model_type,
    read_config,
    read_weights,
    reading,
    weight_files,
)
from headwater.models.pretrained import HeadwaterPreTrainedModel
from headwater.models.quantization import check_full_precision
from headwater.plugins.outside import trust_names_in
from headwater.plugins.registry import Registry
from headwater.util.errors import HeadwaterError, either, sentence
from headwater.util.files import local
from headwater.util.hub import check_reachable

# A buffer in old checkpoints of GPT-2 that no current model has.
_OLD_BUFFER = ".attn.masked_bias"


@dataclass(frozen=True)
class Link:
    """One of the family's modules and our modules that correspond to it; `{}` is the layer.

    form: how its weight differs from ours, which follow one another in it.
        transposed: its matrix is [in, out], as in Conv1D.
        interleaved: the rows of our modules alternate head by head, [H, modules, d].
        backwards: RoPE rotates its heads the other way, which equals ours with the two halves of each head exchanged.
        convolution: its weight is a convolution's, [out, C, h, w], and ours a matrix.
        parameter: it is a parameter [1, n, D], not a module, and ours is an embedding's weight.
    """

    theirs: str
    ours: tuple[str, ...]
    form: Literal["", "transposed", "interleaved", "backwards", "convolution", "parameter"] = ""

    def split_tensor(self, tensor: Tensor, config: HeadwaterConfig) -> tuple[Tensor, ...]:
        """Split the family's weight or bias into one for each of our modules."""
        match self.form, tensor.ndim:
            case "interleaved", _:
                by_head = tensor.unflatten(0, (config.num_attention_heads, len(self.ours), -1)).unbind(1)
                return tuple(x.flatten(0, 1) for x in by_head)
            case "backwards", _:
                tensor = exchange_halves(tensor, config)
            case "parameter", _:
                tensor = tensor.flatten(0, 1)
            case "convolution", 4:
                tensor = tensor.flatten(1)
            case "transposed", 2:
                tensor = tensor.mT
        return tensor.chunk(len(self.ours))

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
    """One family of transformers.

    model: its causal language model, or its image classifier.
    fields: field of our config -> field of its config.
    fixed: fields of our config that are the same in the whole family, unless `read_more` sets them; fields in neither
        table have our defaults.
    required: fields of its config without a counterpart in ours, with the value at which both agree.
    windowed: further fields of its config that a sliding window needs.
    partial_rope: whether RoPE may apply to only a part of each head.
    rope_types: the kinds of RoPE that both compute alike; None: all.
    read_more: its config -> fields of ours without a counterpart in its config. write_more: our config -> fields of
    its. links: its modules.
    ours: our model.
    """

    model: type[PreTrainedModel]
    fields: dict[str, str]
    links: tuple[Link, ...]
    fixed: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    windowed: dict[str, Any] = field(default_factory=dict)
    partial_rope: bool = False
    rope_types: tuple[str, ...] | None = None
    read_more: Callable[[PreTrainedConfig], dict[str, Any]] | None = None
    write_more: Callable[[HeadwaterConfig], dict[str, Any]] | None = None
    ours: type[HeadwaterPreTrainedModel] = HeadwaterForCausalLM

    @property
    def name(self) -> str:
        return self.model.config_class.model_type

    def list_links(self, layers: int) -> Iterator[Link]:
        """The links of a model, expanded for each layer."""
        for link in self.links:
            for layer in range(layers if "{}" in link.theirs else 1):
                yield replace(
                    link, theirs=link.theirs.format(layer), ours=tuple(name.format(layer) for name in link.ours)
                )

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
        values |= {} if self.read_more is None else self.read_more(config)
        if "rope_parameters" in values:
            values["rope_parameters"] = self._read_rope(values["rope_parameters"] or {})
        values = {name: value for name, value in values.items() if value is not None}
        try:
            return self.ours.config_class(**self.fixed | values, dtype=config.dtype)
        except (HeadwaterError, StrictDataclassError, TypeError) as error:
            raise HeadwaterError(f"This {self.name} model is not supported: {sentence(error)}") from error

    def _read_window(self, config: PreTrainedConfig) -> dict[str, Any]:
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        if len(set(kinds)) > 1 and not _has_kinds(type(config)):
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
        for name in (name for name in config.field_names() if name not in _BESIDE | unread):
            value, family_value = _make_comparable(config, name), _make_comparable(restored, name)
            if value != family_value:
                difference = f"{json.dumps(value)}, only {json.dumps(family_value)}"
                if isinstance(value, dict):
                    family_value = family_value or {}
                    keys = value | family_value
                    difference = " and ".join(key for key in keys if value.get(key) != family_value.get(key))
                raise HeadwaterError(
                    f"A {self.name} model cannot have {name} {difference}; change it, choose another family, or run "
                    "headwater export without --family."
                )
        return written

    def _write_fields(self, config: HeadwaterConfig) -> PreTrainedConfig:
        values = self.required | {source: getattr(config, name) for name, source in self.fields.items()}
        if self.partial_rope:  # the family's own default rotates another fraction
            values["rope_parameters"] = {"partial_rotary_factor": 1.0} | (config.rope_parameters or {})
        make = self.model.config_class
        if config.sliding_window is not None:
            values |= self.windowed
            if config.sliding_layers is not None and _has_kinds(make):
                values["layer_types"] = _layer_types(config)
        values |= {} if self.write_more is None else self.write_more(config)
        if not hasattr(make, "head_dim") and config.head_dim == config.hidden_size / config.num_attention_heads:
            values.pop("head_dim", None)  # read if present, but the family's config class does not declare it
        return make(**copy.deepcopy(values), dtype=config.dtype)

    def read_tensors(self, tensors: dict[str, Tensor], config: HeadwaterConfig) -> dict[str, Tensor]:
        """Copy the family's tensors under our names; `config` is ours. Raises `HeadwaterError` for an unknown one."""
        links = {link.theirs: link for link in self.list_links(config.num_hidden_layers)}
        converted = {}
        for name, tensor in tensors.items():
            module, _, kind = (name, "", "weight") if name in links else name.rpartition(".")
            if module not in links:
                raise HeadwaterError(
                    f"This model has a tensor {name!r}, which a plain {self.name} model does not have; merge or "
                    f"remove what was added to it."
                )
            link = links[module]
            for target, piece in zip(link.ours, link.split_tensor(tensor, config), strict=True):
                converted[f"{target}.{kind}"] = _copy_tensor(piece)
        return converted

    def write_tensors(self, tensors: dict[str, Tensor], config: HeadwaterConfig) -> dict[str, Tensor]:
        """Copy our tensors under the family's names."""
        written = {}
        for link in self.list_links(config.num_hidden_layers):
            for kind in ("weight", "bias"):
                stored = [tensors[name] for name in (f"{module}.{kind}" for module in link.ours) if name in tensors]
                if stored:
                    name = link.theirs if link.form == "parameter" else f"{link.theirs}.{kind}"
                    written[name] = _copy_tensor(link.join_tensors(stored, config))
        return written


def from_transformers(source: str | Path | PreTrainedModel, family: str | None = None) -> Any:
    """Convert a model of one of `FAMILIES` to headwater's, with the same logits.

    source: a checkpoint's folder or its name on the Hugging Face hub (its dtype is kept, none of its code is run), or
        a model, which is not changed.
    family: the name of its `Family`, "package.module:NAME" for an external one; default: its model_type.

    Raises `HeadwaterError` for an unknown family, a missing checkpoint, tensors that do not match its config, and
    features of the family that headwater does not support.
    """
    trust_names_in(family)
    model = source if isinstance(source, PreTrainedModel) else load_transformers(source, family)
    chosen_family = find_family(family or model.config.model_type)
    if not isinstance(model, chosen_family.model):
        raise HeadwaterError(_other_head(type(model).__name__, chosen_family))
    config = chosen_family.read_config(model.config)
    tensors = chosen_family.read_tensors(untied_state_dict(model), config)
    return assemble_model(chosen_family.ours, config, tensors, model)


def to_transformers(model: HeadwaterPreTrainedModel, family: str) -> PreTrainedModel:
    """Convert the model to the family `family`, with the same logits; it is not changed.

    Raises `HeadwaterError` for an unknown family and, naming the first, for a field of the model's config that the
    family cannot express, such as its mechanisms.
    """
    trust_names_in(family)
    chosen = find_family(family)
    if not isinstance(model, chosen.ours):
        raise HeadwaterError(
            f"A {type(model).__name__} has no {chosen.name} format; choose a family of the same kind of model."
        )
    config = chosen.write_config(model.config)
    tensors = chosen.write_tensors(untied_state_dict(model), model.config)
    converted = assemble_model(chosen.model, config, tensors, model)
    # Save under the family's checkpoint names, which can differ from its module names.
    vars(converted).pop("_weight_conversions", None)
    return converted


def assemble_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, tensors: dict[str, Tensor], like: PreTrainedModel
) -> Any:
    """Build a model of class `kind` with these `tensors`, and the device, mode and generation config of `like`.

    The model may use the memory of the tensors. Raises `HeadwaterError` if they do not match the config.
    """
    model, mismatches = kind.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=like.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    _check_tensors(mismatches, "The model")
    model.name_or_path = model.config.name_or_path = ""  # transformers writes "None" there
    if like.can_generate():
        model.generation_config = copy.deepcopy(like.generation_config)
    return model.to(like.device).train(like.training)


def find_family(name: str) -> Family:
    """Find the family that a user or a file names. Raises `HeadwaterError` unless it is known, installed or trusted."""
    if not isinstance(name, str) or not (":" in name or name in _REGISTRY.names):
        advice = _OTHER_WAYS.get(str(name)) or f"known names: {', '.join(sorted(_REGISTRY.names))}."
        raise HeadwaterError(f"Models of type {name!r} cannot be converted; {advice}")
    return _REGISTRY.resolve(name)


def find_fitting_family(config: HeadwaterConfig, preferred: str | None = None) -> str | None:
    """Find the name of a family that expresses this config, if possible the preferred one; None if there is none."""
    for name in sorted(FAMILIES, key=lambda name: name != preferred):
        if type(config) is FAMILIES[name].ours.config_class:
            with suppress(HeadwaterError):
                FAMILIES[name].write_config(config)
                return name
    return None


def _of_checkpoint(family: str | None, kind: str, config: dict[str, Any]) -> Family:
    """The family of a checkpoint: the requested one, otherwise the one for `kind`, the type in its config.json."""
    if family and kind not in _OTHER_WAYS:
        return find_family(family)
    found_family = find_family(kind)
    # Image models only: a text model without its head fails on missing weights, and a tied head needs none of its own.
    saved = config.get("architectures")
    if found_family.ours is not HeadwaterForCausalLM and saved and found_family.model.__name__ not in saved:
        raise HeadwaterError(_other_head(str(saved[0]), found_family))
    return found_family


def _other_head(name: str, family: Family) -> str:
    lacking = "language-model head" if family.ours is HeadwaterForCausalLM else "classifier of the class token alone"
    return f"A {name} has no {lacking}; use a {family.model.__name__}."


# How to read a model that is not one of `FAMILIES`.
_OTHER_WAYS = {
    "baichuan_m1": "read it with --layout kv-shifting, or in Python with read_foreign.",
    "gemma3": (
        "only Gemma 3's text model is supported: save the language_model and lm_head as a Gemma3ForCausalLM, and "
        "convert that."
    ),
}


def load_transformers(source: str | Path, family: str | None = None) -> PreTrainedModel:
    """Load a checkpoint of one of `FAMILIES` as transformers' own model, with every tensor checked.

    family: as in `from_transformers`. Weights are read only after its config has been converted without
    error. Raises `HeadwaterError` as `from_transformers` does.
    """
    trust_names_in(family)
    name, folder = str(source), local(source)
    try:
        if folder.is_dir():
            chosen_family, family_config, _ = _configs_in(folder, family)
            tensors = read_weights(weight_files(folder, pickled=True))
            model, mismatches = build_model(chosen_family.model, family_config, tensors, folder)
        else:
            check_reachable("model", name)
            with reading("it", "use an intact checkpoint"):
                saved_config = PreTrainedConfig.get_config_dict(name)[0]
                chosen_family = _of_checkpoint(family, saved_config.get("model_type", "none"), saved_config)
                family_config = chosen_family.model.config_class.from_pretrained(name)
                chosen_family.read_config(family_config)
                model, mismatches = chosen_family.model.from_pretrained(
                    name,
                    config=family_config,
                    dtype="auto",
                    weights_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # mismatches are reported below
                )
    except HeadwaterError as error:
        raise HeadwaterError(f"{name!r} cannot be loaded: {error}") from error
    _check_tensors(mismatches, repr(name))
    check_finite(untied_state_dict(model), repr(name))
    return model


def config_of(folder: Path) -> HeadwaterConfig:
    """Return the config of a headwater model or one of any of `FAMILIES` as ours, without reading its weights.

    Raises `HeadwaterError` as `from_transformers` does.
    """
    if model_type(folder) in (HeadwaterConfig.model_type, HeadwaterVisionConfig.model_type):
        return read_config(folder)
    try:
        return _configs_in(folder)[2]
    except HeadwaterError as error:
        raise HeadwaterError(f"{str(folder)!r} cannot be loaded: {error}") from error


def _configs_in(folder: Path, family: str | None = None) -> tuple[Family, PreTrainedConfig, HeadwaterConfig]:
    """Return the family of a checkpoint's folder, its config, and the config converted to ours."""
    kind = model_type(folder)
    if kind is None:
        raise HeadwaterError(f"it is not a checkpoint: it has no {CONFIG} that says what model it is.")
    chosen_family = _of_checkpoint(family, kind, PreTrainedConfig.get_config_dict(folder)[0])
    family_config = config_from(chosen_family.model.config_class, folder)
    return chosen_family, family_config, chosen_family.read_config(family_config)


def _check_tensors(mismatches: dict[str, Iterable[Any]], owner: str) -> None:
    """Raise `HeadwaterError` naming the first tensor that does not match the config of `owner`."""
    for kind, problem in (
        ("mismatched_keys", "has a different shape than its config requires"),
        ("missing_keys", "is missing"),
        ("unexpected_keys", "is not part of the model it describes"),
    ):
        names = sorted(str(entry if isinstance(entry, str) else entry[0]) for entry in mismatches.get(kind) or ())
        names = [name for name in names if not name.endswith(_OLD_BUFFER)]
        if names:
            raise HeadwaterError(
                f"{owner} does not match its config: {names[0]!r} {problem}; use a complete checkpoint with its own "
                f"config."
            )


def untied_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's tensors, a tied one once. Raises `HeadwaterError` if they are quantized."""
    check_full_precision(model)
    tied = set(model.all_tied_weights_keys)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _copy_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def exchange_halves(tensor: Tensor, config: HeadwaterConfig) -> Tensor:
    """Move the second half of each head before the first, in rows of heads [heads·d, …]."""
    return tensor.unflatten(0, (-1, config.head_dim)).roll(config.head_dim // 2, 1).flatten(0, 1)


def _has_kinds(config: type[PreTrainedConfig]) -> bool:
    """Whether layers of such models may differ in whether they have a sliding window."""
    return any("layer_types" in vars(kind).get("__annotations__", ()) for kind in config.__mro__)


def _layer_types(config: HeadwaterConfig) -> list[str]:
    layers = range(config.num_hidden_layers)
    return ["sliding_attention" if config.slides(layer) else "full_attention" for layer in layers]


# Fields of initialization and serving, which do not change a model's function.
_BESIDE = {"layer_types", "materialise", "scaled_residual_init", "embedding_range", "linear_init", "initializer_seed"}


def _make_comparable(config: HeadwaterConfig, name: str) -> Any:
    value = getattr(config, name)
    return {"partial_rotary_factor": 1.0} | value if name == "rope_parameters" and value else value


# Families


def map_same(*names: str) -> dict[str, str]:
    """Map fields or modules that have the same name in both."""
    return {name: name for name in names}


def link_plain(names: dict[str, str]) -> tuple[Link, ...]:
    """Link modules that correspond one to one."""
    return tuple(Link(source, (target,)) for source, target in names.items())


_SIZES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"
_TOKENS = "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"
_EVERYWHERE = map_same(*_SIZES, *_TOKENS, "tie_word_embeddings", "initializer_range", "use_cache")

# GPT-2 and GPT-NeoX: LayerNorm, a plain feed-forward, one map for queries, keys and values, as many heads of each.
_LAYER_NORM = dict(feed_forward="plain", norm="layer_norm", mlp_bias=True)
LAYER = "model.layers.{}."
_QKV = tuple(f"{LAYER}self_attn.{letter}_proj" for letter in "qkv")

_GPT2 = Family(
    model=GPT2LMHeadModel,
    fields=_EVERYWHERE
    | dict(
        intermediate_size="n_inner",
        hidden_act="activation_function",
        norm_eps="layer_norm_epsilon",
        embedding_dropout="embd_pdrop",
        attention_dropout="attn_pdrop",
        residual_dropout="resid_pdrop",
    ),
    fixed=_LAYER_NORM | dict(position="learned", qkv_bias=True, output_bias=True),
    # `reorder_and_upcast_attn` affects only the precision of the scores.
    required=dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    links=(
        *link_plain(
            {
                "transformer.wte": "model.embed_tokens",
                "transformer.wpe": "model.embed_positions",
                "transformer.h.{}.ln_1": f"{LAYER}input_layernorm",
                "transformer.h.{}.ln_2": f"{LAYER}post_attention_layernorm",
                "transformer.ln_f": "model.norm",
                "lm_head": "lm_head",
            }
        ),
        Link("transformer.h.{}.attn.c_attn", _QKV, "transposed"),
        Link("transformer.h.{}.attn.c_proj", (f"{LAYER}self_attn.o_proj",), "transposed"),
        Link("transformer.h.{}.mlp.c_fc", (f"{LAYER}mlp.up_proj",), "transposed"),
        Link("transformer.h.{}.mlp.c_proj", (f"{LAYER}mlp.down_proj",), "transposed"),
    ),
)

_GPT_NEOX = Family(
    model=GPTNeoXForCausalLM,
    fields=_EVERYWHERE
    | map_same("hidden_act", "attention_dropout", "rope_parameters")
    | dict(
        norm_eps="layer_norm_eps",
        parallel_residual="use_parallel_residual",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        embedding_dropout="hidden_dropout",
        residual_dropout="hidden_dropout",
    ),
    fixed=_LAYER_NORM,
    partial_rope=True,
    links=(
        *link_plain(
            {
                "gpt_neox.embed_in": "model.embed_tokens",
                "gpt_neox.layers.{}.input_layernorm": f"{LAYER}input_layernorm",
                "gpt_neox.layers.{}.post_attention_layernorm": f"{LAYER}post_attention_layernorm",
                "gpt_neox.layers.{}.attention.dense": f"{LAYER}self_attn.o_proj",
                "gpt_neox.layers.{}.mlp.dense_h_to_4h": f"{LAYER}mlp.up_proj",
                "gpt_neox.layers.{}.mlp.dense_4h_to_h": f"{LAYER}mlp.down_proj",
                "gpt_neox.final_layer_norm": "model.norm",
                "lm_head": "lm_head",
            }
        ),
        Link("gpt_neox.layers.{}.attention.query_key_value", _QKV, "interleaved"),
    ),
)

# Llama-like families: our defaults (RMSNorm, gated feed-forward, RoPE over whole heads) and the same module names.
_LLAMA = Family(
    model=LlamaForCausalLM,
    fields=_EVERYWHERE
    | map_same("num_key_value_heads", "head_dim", "hidden_act", "attention_dropout", "rope_parameters", "mlp_bias")
    | dict(norm_eps="rms_norm_eps", qkv_bias="attention_bias", output_bias="attention_bias"),
    required=dict(pretraining_tp=1),
    links=link_plain(
        map_same(
            "model.embed_tokens",
            f"{LAYER}input_layernorm",
            *_QKV,
            f"{LAYER}self_attn.o_proj",
            f"{LAYER}post_attention_layernorm",
            *(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")),
            "model.norm",
            "lm_head",
        )
    ),
)


def _vary_family(
    base: Family, model: type[PreTrainedModel], fields: dict[str, str], fixed: dict[str, Any], **changes: Any
) -> Family:
    """Return `base` with other fields and fixed ones; a field added to one of the tables is removed from the other."""
    return replace(
        base,
        model=model,
        fields={name: source for name, source in (base.fields | fields).items() if name not in fixed},
        fixed={name: value for name, value in (base.fixed | fixed).items() if name not in fields},
        **{"required": {}} | changes,
    )


# nanochat in transformers: norms without weights, including those of the embedding, queries and keys. Queries and
# keys are normed after RoPE there, which gives the same result, because rotation preserves their norm.
_NANOCHAT = _vary_family(
    _LLAMA,
    NanoChatForCausalLM,
    dict(logit_softcap="final_logit_softcapping"),
    dict(feed_forward="plain", mlp_bias=False, norm_weight=False, embedding_norm=True, qk_norm=True),
    rope_types=("default", "linear", "dynamic", "llama3"),
    links=(
        *link_plain(
            map_same("model.embed_tokens", f"{LAYER}self_attn.v_proj", f"{LAYER}self_attn.o_proj", "lm_head")
            | {f"{LAYER}mlp.fc1": f"{LAYER}mlp.up_proj", f"{LAYER}mlp.fc2": f"{LAYER}mlp.down_proj"}
        ),
        *(Link(name, (name,), "backwards") for name in _QKV[:2]),
    ),
)

# Gemma's dense families: norm weights are offsets from one, and the embedding is multiplied by √D.
_GEMMA = _vary_family(
    _LLAMA,
    GemmaForCausalLM,
    {},
    dict(mlp_bias=False, unit_offset_norm=True, embedding_scale="width"),
    required=dict(use_bidirectional_attention=False),
)


def _gemma2_fields(config: PreTrainedConfig) -> dict[str, Any]:
    scalar = config.query_pre_attn_scalar
    return {"attention_scale": None if scalar == config.head_dim else scalar**-0.5}


def _gemma2_written(config: HeadwaterConfig) -> dict[str, Any]:
    scale = config.attention_scale
    scalar = config.head_dim if scale is None else round(scale**-2)
    return {"query_pre_attn_scalar": scalar, "layer_types": _layer_types(config)}


def _gemma3_fields(config: PreTrainedConfig) -> dict[str, Any]:
    rope = {kind: config.rope_parameters[kind] for kind in sorted(set(config.layer_types))}
    values = _gemma2_fields(config) | {"rope_parameters": next(iter(rope.values()))}
    if len(rope) > 1 and config.sliding_window is not None and rope["sliding_attention"] != rope["full_attention"]:
        values["sliding_fields"] = {"rope_parameters": rope["sliding_attention"]}
    return values


def _gemma3_written(config: HeadwaterConfig) -> dict[str, Any]:
    sliding = (config.sliding_fields or {}).get("rope_parameters", config.rope_parameters)
    rope = {"full_attention": config.rope_parameters, "sliding_attention": sliding}
    return _gemma2_written(config) | {"rope_parameters": rope}


_GEMMA_NORMS = {
    f"{LAYER}post_attention_layernorm": f"{LAYER}attention_output_norm",
    f"{LAYER}pre_feedforward_layernorm": f"{LAYER}post_attention_layernorm",
    f"{LAYER}post_feedforward_layernorm": f"{LAYER}feed_forward_output_norm",
}
_GEMMA2 = _vary_family(
    _GEMMA,
    Gemma2ForCausalLM,
    map_same("sliding_window")
    | dict(
        hidden_act="hidden_activation",
        attention_softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
    ),
    dict(output_norms=True),
    required=_GEMMA.required,
    read_more=_gemma2_fields,
    write_more=_gemma2_written,
    links=(
        *(link for link in _LLAMA.links if "post_attention_layernorm" not in link.theirs),
        *link_plain(_GEMMA_NORMS),
    ),
)
_QK_NORMS = link_plain(map_same(f"{LAYER}self_attn.q_norm", f"{LAYER}self_attn.k_norm"))
# attn_logit_softcapping is in Gemma 3's config, but none of its modules reads it.
_GEMMA3 = _vary_family(
    _GEMMA2,
    Gemma3ForCausalLM,
    {},
    dict(attention_softcap=None, qk_norm=True),
    required=_GEMMA.required,
    read_more=_gemma3_fields,
    write_more=_gemma3_written,
    links=_GEMMA2.links + _QK_NORMS,
)

_WINDOW = map_same("sliding_window")
_WINDOWED = dict(use_sliding_window=True, max_window_layers=0)
_NO_BIASES = dict(qkv_bias=False, output_bias=False, mlp_bias=False)
_MISTRAL = _vary_family(_LLAMA, MistralForCausalLM, _WINDOW, _NO_BIASES)
_QWEN2 = _vary_family(_MISTRAL, Qwen2ForCausalLM, {}, dict(qkv_bias=True), windowed=_WINDOWED)
_QWEN3 = _vary_family(
    _LLAMA,
    Qwen3ForCausalLM,
    _WINDOW,
    dict(mlp_bias=False, qk_norm=True),
    windowed=_WINDOWED,
    links=_LLAMA.links + _QK_NORMS,
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (_GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GPT_NEOX, _NANOCHAT, _GEMMA, _GEMMA2, _GEMMA3)
}
_REGISTRY = Registry("family of models", "headwater.families", {}, "Family")
_REGISTRY.added = FAMILIES
