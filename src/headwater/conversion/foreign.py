"""Checkpoints of the papers' own code, read into headwater models.

    tokenformer   github.com/Haiyang-W/TokenFormer: GPT-NeoX's layout with parameter tokens
    resformer     github.com/Zcchill/Value-Residual-Learning: Llama as transformers names it, and mixing fixed in code
    kv-shifting   arXiv 2411.19574, appendix F, a listing: `K` and `V` of the attention in a Llama-like model; and
                  Baichuan-M1, a model of the same company with the same convolution
    nanochat      github.com/karpathy/nanochat: value embeddings, the embedding in every layer, windows

Sizes come from the tensors, other settings from keywords, else from a config in the same folder, else from the paper.
docs/checkpoints.md lists every name with its source and how certain it is.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from headwater.config.text import HeadwaterConfig
from headwater.conversion.family import exchange_halves
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.load import CONFIG, PICKLED, WEIGHTS, check_finite, list_shards, read_text, read_weights, reading
from headwater.models.weights import check_dtypes, list_dtypes, strip_wrappers
from headwater.plugins.mechanisms import as_mapping
from headwater.util.errors import HeadwaterError, nearest, shown

Tensors = dict[str, Tensor]

# Fields that keywords may set; the rest of a config is derived.
FIELDS = HeadwaterConfig.__annotations__.keys() - {"layer_types"}
EMBEDDING = "model.embed_tokens.weight"
NEOX_EMBEDDING = "sequential.0.word_embeddings.weight"


@dataclass(frozen=True)
class Layout:
    """Layout of one kind of checkpoint.

    embedding: the name of the token embedding.
    normalize: renames, splits and joins tensors, so that each is one of the model's.
    fields: (tensors, settings from keywords and a config) -> the fields of a `HeadwaterConfig`.
    source: (name in the headwater model, its config) -> the name in the checkpoint; None without one.
    pattern: of names that only this layout has; None if it cannot be recognized.
    convert: (name in the headwater model, tensor of the checkpoint, config) -> the model's tensor.
    """

    embedding: str
    normalize: Callable[[Tensors], Tensors]
    fields: Callable[[Tensors, dict[str, Any]], dict[str, Any]]
    source: Callable[[str, HeadwaterConfig], str | None]
    pattern: str | None = None
    convert: Callable[[str, Tensor, HeadwaterConfig], Tensor] = lambda name, tensor, config: tensor


def read_foreign(path: str | Path, layout: str | None = None, **config: Any) -> HeadwaterForCausalLM:
    """Read a checkpoint of a paper's own code as a model, in the precision of its embedding and in eval mode.

    path: a file of tensors (.safetensors, .pt, .bin, .pth), or a folder with one, or with its shards and their index.
        Nothing in it is executed.
    layout: a name in `LAYOUTS`, such as "tokenformer" or "kv-shifting"; recognized from the tensors' names if None. A
        ResFormer's tensors have Llama's names, so its layout must be given.
    config: fields of `HeadwaterConfig` that override the checkpoint's. Only the `mechanisms` named here are used,
        and options that are left out come from the checkpoint: `mechanisms={"pattention": {"score": "gelu_l2_norm"}}`.

    Raises `HeadwaterError` with one sentence that names the first tensor that is missing, unknown or of a wrong shape,
    or what else to change.
    """
    path = _find_newest(Path(path))
    for name in config:
        if name not in FIELDS:
            raise HeadwaterError(f"HeadwaterConfig has no field {name!r}; {nearest(name, FIELDS)}")
    requested = as_mapping(config.pop("mechanisms", None))
    if not isinstance(requested, dict | None):
        raise HeadwaterError(f"mechanisms must map names to options, or list names, not {shown(requested)}.")
    tensors = _read_tensors(path)
    reader = _choose_layout(layout, tensors, path)
    with reading(f"The checkpoint {str(path)!r}"):
        tensors = reader.normalize(tensors)
    settings = _read_settings(path) | config
    with reading(f"The checkpoint {str(path)!r}", "correct its config, or the fields that were passed"):
        fields = reader.fields(tensors, settings)
        mechanisms = fields.pop("mechanisms")
        if requested is not None:
            mechanisms = {name: mechanisms.get(name, {}) | (options or {}) for name, options in requested.items()}
        # Build the model in the checkpoint's precision, so that constants such as τ are no less precise than in the
        # authors' code.
        model: HeadwaterForCausalLM = HeadwaterForCausalLM._from_config(
            HeadwaterConfig(**(fields | config), mechanisms=mechanisms), dtype=tensors[reader.embedding].dtype
        )
        return _fill_model(model, tensors, reader).eval()


def _choose_layout(layout: str | None, tensors: Tensors, path: Path) -> Layout:
    if layout in LAYOUTS:
        return LAYOUTS[layout]
    if layout is not None:
        raise HeadwaterError(f"There is no layout {layout!r}; {nearest(layout, LAYOUTS)}")
    for candidate in LAYOUTS.values():
        if candidate.pattern is not None and any(re.search(candidate.pattern, name) for name in tensors):
            return candidate
    raise HeadwaterError(
        f"The tensors of {str(path)!r} match no layout that can be recognized by names. If it is a Hugging Face "
        "model, name its folder, with its config.json; if not, read it with headwater retrofit --layout (layout=), "
        f"one of {', '.join(LAYOUTS)} (a ResFormer looks like any Llama)."
    )


def _fill_model(model: HeadwaterForCausalLM, tensors: Tensors, layout: Layout) -> HeadwaterForCausalLM:
    """Copy the tensors into the model. Raises `HeadwaterError` if names or shapes do not match."""
    state = model.state_dict()
    sources = {name: source for name in state if (source := layout.source(name, model.config)) is not None}
    names = {*sources.values()}
    for source in sources.values():
        _take_tensor(tensors, source)
    if model.config.tie_word_embeddings:
        names.add("lm_head.weight")  # a checkpoint may contain the tied head
    for name in tensors:
        if name not in names:
            raise HeadwaterError(
                f"The checkpoint has a tensor {name!r} that is not part of this layout; remove it if the function "
                f"does not need it, or add the config it belongs to."
            )
    for name, source in sources.items():
        tensor = layout.convert(name, tensors[source], model.config)
        if tensor.shape != state[name].shape:
            raise HeadwaterError(
                f"Tensor {source!r} has the shape {list(tensors[source].shape)}, which does not match "
                f"{list(state[name].shape)} of {name}; check the sizes in the config and the keywords."
            )
        state[name].copy_(tensor)
    return model


def _take_tensor(tensors: Tensors, name: str) -> Tensor:
    if name not in tensors:
        raise HeadwaterError(f"The checkpoint has no tensor {name!r}; use an intact checkpoint of this layout.")
    return tensors[name]


def _matrix_shape(tensors: Tensors, name: str) -> tuple[int, int]:
    shape = _take_tensor(tensors, name).shape
    if len(shape) != 2:
        raise HeadwaterError(f"Tensor {name!r} has the shape {list(shape)} but should be a matrix; check the file.")
    return shape[0], shape[1]


def _count_layers(tensors: Tensors, pattern: str) -> int:
    numbers = [int(match[1]) for name in tensors if (match := re.match(pattern, name))]
    if not numbers:
        raise HeadwaterError("The checkpoint has no layers with this layout's names; choose another layout.")
    return max(numbers) + 1


def _count_heads(settings: dict[str, Any], width: int, known_heads: Mapping[int, int]) -> int:
    """Find the number of query heads in a config, else in the authors' own configs of this width."""
    heads = settings.get("num_attention_heads", known_heads.get(width))
    if heads is None:
        raise HeadwaterError(
            f"The tensors do not show how many heads there are at width {width}; pass num_attention_heads, or add "
            f"the model's config to its folder."
        )
    return heads


# TokenFormer

# Θ by the names of the authors' code. Its "softmax" is the exponential over its L1 norm, times n.
SCORES = {"l2_norm_gelu": "l2_norm_gelu", "gelu_l2_norm": "gelu_l2_norm", "softmax": "exp_l1_norm"}
PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "proj"}
PAIRS = {
    "query_pairs": "attention.query",
    "key_pairs": "attention.key",
    "value_pairs": "attention.value",
    "output_pairs": "attention.proj",
    "ffn_pairs": "mlp",
}
# Number of heads for each width in the authors' configs.
TOKENFORMER_HEADS = {768: 12, 1024: 16, 1280: 16, 1536: 16}


def _tokenformer_fields(tensors: Tensors, settings: dict[str, Any]) -> dict[str, Any]:
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    vocabulary, width = _matrix_shape(tensors, NEOX_EMBEDDING)
    # Module 0 is the embedding, module 1 transposes it, then come the blocks.
    depth = _count_layers(tensors, r"sequential\.(\d+)\.attention\.") - 2
    _refuse_settings(settings, pos_emb="rotary", use_mup=False)
    score = settings.get("norm_activation_type", "l2_norm_gelu")
    if score not in SCORES:
        raise HeadwaterError(f"There is no norm_activation_type {score!r}; {nearest(str(score), SCORES)}")
    pairs = {
        option: _matrix_shape(tensors, f"sequential.2.{module}.key_param_tokens")[0] for option, module in PAIRS.items()
    }
    window = settings.get("sliding_window_width")
    return dict(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=_count_heads(settings, width, TOKENFORMER_HEADS),
        max_position_embeddings=settings.get("max_position_embeddings", 2048),
        norm="layer_norm",
        norm_eps=float(settings.get("layernorm_epsilon", 1e-5)),
        norm_weight="sequential.2.input_layernorm.weight" in tensors,
        norm_bias="sequential.2.input_layernorm.bias" in tensors,
        final_norm_weight=f"sequential.{depth + 3}.norm.weight" in tensors,
        final_norm_bias=f"sequential.{depth + 3}.norm.bias" in tensors,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(settings.get("rotary_emb_base", 10_000)),
            "partial_rotary_factor": float(settings.get("rotary_pct", 0.25)),
        },
        # flash-attn's window does not count the current token.
        sliding_window=None if window is None else window + 1,
        tie_word_embeddings=f"sequential.{depth + 4}.final_linear.weight" not in tensors,
        embedding_range=0.02,
        mechanisms={"pattention": {"score": SCORES[score], **pairs}},
    )


def _refuse_settings(settings: dict[str, Any], **only: Any) -> None:
    """Raise `HeadwaterError` if a config has another value than the supported one."""
    for name, value in only.items():
        if settings.get(name, value) != value:
            raise HeadwaterError(f"The checkpoint's config has {name} {settings[name]!r}; only {value!r} is supported.")


def _tokenformer_source(name: str, config: HeadwaterConfig) -> str | None:
    depth = config.num_hidden_layers
    if name.endswith("scale.tau"):  # √n, or n for the exponential: the value in a new model
        return None
    if name == "lm_head.weight":
        return None if config.tie_word_embeddings else f"sequential.{depth + 4}.final_linear.weight"
    if name == EMBEDDING:
        return NEOX_EMBEDDING
    name = name.replace("model.norm.", f"sequential.{depth + 3}.norm.")
    name = re.sub(r"^model\.layers\.(\d+)\.", lambda layer: f"sequential.{int(layer[1]) + 2}.", name)
    name = re.sub(r"self_attn\.(\w+)\.", lambda match: f"attention.{PROJECTIONS[match[1]]}.", name)
    return re.sub(r"\.(key|value)$", r".\1_param_tokens", name)


# Llama's layout: ResFormer and KV shifting

RESFORMER_HEADS = {512: 8}


def _drop_rope_buffers(tensors: Tensors) -> Tensors:
    """Remove old buffers of RoPE from the tensors."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _llama_fields(
    tensors: Tensors, settings: dict[str, Any], theta: float, head_dim: int | None = None, layer: int = 0
) -> dict[str, Any]:
    """Make the fields of a Llama from the shapes in this layer. head_dim: None if the tensors do not show it."""
    prefix = f"model.layers.{layer}"
    vocabulary, width = _matrix_shape(tensors, EMBEDDING)
    queries, keys = (_matrix_shape(tensors, f"{prefix}.self_attn.{letter}_proj.weight")[0] for letter in "qk")
    if head_dim is None:
        head_dim = settings.get("head_dim") or queries // _count_heads(settings, width, RESFORMER_HEADS)
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", float(settings.get("rope_theta", theta)))
    return dict(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=_matrix_shape(tensors, f"{prefix}.mlp.up_proj.weight")[0],
        num_hidden_layers=_count_layers(tensors, r"model\.layers\.(\d+)\."),
        num_attention_heads=max(1, queries // head_dim),
        num_key_value_heads=max(1, keys // head_dim),
        head_dim=head_dim,
        max_position_embeddings=settings.get("max_position_embeddings", 2048),
        hidden_act=settings.get("hidden_act", "silu"),
        norm_eps=float(settings.get("rms_norm_eps", 1e-5)),
        rope_parameters=rope,
        qkv_bias=f"{prefix}.self_attn.q_proj.bias" in tensors,
        output_bias=f"{prefix}.self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{prefix}.mlp.up_proj.bias" in tensors,
        tie_word_embeddings=bool(settings.get("tie_word_embeddings")) or "lm_head.weight" not in tensors,
    )


def _resformer_fields(tensors: Tensors, settings: dict[str, Any]) -> dict[str, Any]:
    fields = _llama_fields(tensors, settings, 10_000.0)
    # The tensors reveal only this form: layers after the first have no values of their own.
    values = [name for name in tensors if name.endswith("self_attn.v_proj.weight")]
    mechanisms: dict[str, Any] = {"value_residual": {"mode": "identity"}}
    if len(values) == 1 and fields["num_hidden_layers"] > 1:
        mechanisms = {"svformer": {}}
    return fields | dict(mechanisms=mechanisms)


def _llama_source(name: str, config: HeadwaterConfig) -> str | None:
    return None if name == "lm_head.weight" and config.tie_word_embeddings else name


def _normalize_shift(tensors: Tensors) -> Tensors:
    """Rename the tensors of Baichuan-M1's code to the names that the listing has in a Llama.

    There `conv_k` and `conv_v` [1, 1, K, 1, window] are the taps, `W_pack` stacks queries, keys and values, and the
    output head's rows are normalized to length 1 when it is used.
    """
    normalized, is_baichuan = {}, any(name.endswith("self_attn.conv_k") for name in tensors)
    for name, tensor in _drop_rope_buffers(tensors).items():
        if re.search(r"self_attn\.conv_[kv]$", name) and tensor.ndim == 5:
            normalized[re.sub(r"conv_([kv])$", lambda letter: letter[1].upper(), name)] = tensor[0, 0, :, 0]
        elif name.endswith("self_attn.W_pack.weight") and tensor.ndim == 2:
            width = tensor.shape[1]
            for letter, rows in zip("qkv", tensor.tensor_split([width, (len(tensor) + width) // 2]), strict=True):
                normalized[name.replace("W_pack", f"{letter}_proj")] = rows
        elif name == "lm_head.weight" and is_baichuan:
            normalized[name] = torch.nn.functional.normalize(tensor, dim=-1)
        else:
            normalized[name] = tensor
    return normalized


def _shift_fields(tensors: Tensors, settings: dict[str, Any]) -> dict[str, Any]:
    depth = _count_layers(tensors, r"model\.layers\.(\d+)\.")
    sliding = sorted(set(settings.get("sliding_window_layers") or ()))
    full_layer = next((layer for layer in range(depth) if layer not in sliding), 0)
    if sliding and settings.get("sliding_window") is None:
        raise HeadwaterError("The config names sliding_window_layers without a sliding_window; pass sliding_window.")
    options, head_dim = _shift_options(tensors, full_layer)
    fields = _llama_fields(tensors, settings, 100_000.0, head_dim, full_layer)
    fields["mechanisms"] = {"kv_shift": options}
    if sliding:
        fields["sliding_window"] = settings["sliding_window"]
    if 0 < len(sliding) < depth:
        _, head_dim = _shift_options(tensors, sliding[0])
        sliding_fields = _llama_fields(tensors, settings, 100_000.0, head_dim, sliding[0])
        differing = {name: sliding_fields[name] for name in HEAD_FIELDS if sliding_fields[name] != fields[name]}
        fields |= dict(sliding_layers=sliding, sliding_fields=differing or None)
    return fields


HEAD_FIELDS = "num_attention_heads", "num_key_value_heads", "head_dim"


def _shift_options(tensors: Tensors, layer: int) -> tuple[dict[str, Any], int]:
    """Find the options of the shift and the width of a head from the shapes of a layer's taps."""
    taps = {letter: tensors.get(f"model.layers.{layer}.self_attn.{letter}") for letter in "KV"}
    shapes = {letter: tensor.shape for letter, tensor in taps.items() if tensor is not None}
    if not shapes or any(len(shape) != 2 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise HeadwaterError(
            "In KV shifting, K and V of a layer must both be [key/value heads, window], or one must be missing, not "
            f"{ ({letter: list(shape) for letter, shape in shapes.items()}) }."
        )
    heads, window = next(iter(shapes.values()))
    head_dim = _matrix_shape(tensors, f"model.layers.{layer}.self_attn.k_proj.weight")[0] // heads
    return {"keys": "K" in shapes, "values": "V" in shapes, "window": window}, head_dim


def _shift_source(name: str, config: HeadwaterConfig) -> str | None:
    name = name.replace("mechanisms.kv_shift.alpha", "K").replace("mechanisms.kv_shift.beta", "V")
    return _llama_source(name, config)


def _shift_convert(name: str, tensor: Tensor, config: HeadwaterConfig) -> Tensor:
    # The listing's last column weighs the current token; our first row does.
    return tensor.flip(1).T if ".kv_shift." in name else tensor


# nanochat

NANOCHAT_EMBEDDING = "transformer.wte.weight"
VALUE_TABLE = r"value_embeds\.(\d+)\.weight"
VALUE_GATE = r"transformer\.h\.\d+\.attn\.ve_gate\.weight"


class Version(NamedTuple):
    """Properties of a version of nanochat's code that cannot be read from its tensors.

    scale: of the value embeddings' gate. score_scale: factor on the scores, in addition to 1/√d. short_window: the
    context -> how many earlier tokens a short window has.
    """

    scale: float
    theta: float
    score_scale: float
    short_window: Callable[[int], int]


# Keyed by the number of channels that the gate of value embeddings reads; 0 if there is no gate.
VERSIONS = dict.fromkeys((0, 32), Version(2.0, 10_000.0, 1.0, lambda context: context // 2)) | {
    12: Version(3.0, 100_000.0, 1.15**2, lambda context: -(-context // 3 // 128) * 128)
}
# Versions with a smeared embedding.
LATEST = Version(3.0, 100_000.0, 1.2**2, lambda context: -(-context // 4 // 128) * 128)


def _normalize_nanochat(tensors: Tensors) -> Tensors:
    """Join each layer's scalars, x_0's before the stream's, and cast the embedding to the precision of the head."""
    normalized = dict(tensors)
    if "resid_lambdas" in normalized and "x0_lambdas" in normalized:
        stream, embedding = normalized.pop("resid_lambdas"), normalized.pop("x0_lambdas")
        normalized |= {f"lambdas.{i}": torch.stack(pair) for i, pair in enumerate(zip(embedding, stream, strict=True))}
    if "lm_head.weight" in normalized:
        dtype = normalized["lm_head.weight"].dtype
        tables = [name for name in normalized if name == NANOCHAT_EMBEDDING or name.startswith("value_embeds.")]
        normalized |= {name: normalized[name].to(dtype) for name in tables}
    return normalized


def _nanochat_fields(tensors: Tensors, settings: dict[str, Any]) -> dict[str, Any]:
    rows, width = _matrix_shape(tensors, NANOCHAT_EMBEDDING)
    value_layers, channels = _find_value_embeddings(tensors)
    version = LATEST if "smear_gate.weight" in tensors else VERSIONS[channels]
    mechanisms: dict[str, Any] = {"embedding_residual": {}} if "lambdas.0" in tensors else {}
    if value_layers:
        mechanisms["value_embedding"] = {"layers": value_layers, "channels": channels, "scale": version.scale}
    if "smear_gate.weight" in tensors:
        mechanisms |= {"smear": {"channels": tensors["smear_gate.weight"].shape[-1]}, "backout": {}}
    depth = _count_layers(tensors, r"transformer\.h\.(\d+)\.")
    heads = settings.get("num_attention_heads", settings.get("n_head")) or max(1, width // 128)
    head_dim = width // heads
    context = settings.get("sequence_len", settings.get("max_position_embeddings", 2048))
    pattern = str(settings.get("window_pattern", "L")).upper()
    short = [layer for layer in range(depth - 1) if pattern[layer % len(pattern)] == "S"]
    return dict(
        vocab_size=settings.get("vocab_size", rows),
        hidden_size=width,
        intermediate_size=_matrix_shape(tensors, "transformer.h.0.mlp.c_fc.weight")[0],
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=max(1, _matrix_shape(tensors, "transformer.h.0.attn.c_k.weight")[0] // head_dim),
        head_dim=head_dim,
        max_position_embeddings=context,
        feed_forward="plain",
        hidden_act="relu2",
        norm_eps=torch.finfo(torch.float32).eps,
        norm_weight=False,
        embedding_norm=True,
        qk_norm=True,
        rope_parameters={"rope_type": "default", "rope_theta": version.theta},
        attention_scale=None if version.score_scale == 1 else version.score_scale * head_dim**-0.5,
        # nanochat's windows do not count the current token.
        sliding_window=version.short_window(context) + 1 if short else None,
        sliding_layers=short or None,
        logit_softcap=15.0,
        mechanisms=mechanisms,
    )


def _find_value_embeddings(tensors: Tensors) -> tuple[list[int], int]:
    """Find the layers with value embeddings, and how many channels their gates read; 0 if there are none."""
    layers = sorted(int(match[1]) for name in tensors if (match := re.fullmatch(VALUE_TABLE, name)))
    gates = {tensor.shape[-1] for name, tensor in tensors.items() if re.fullmatch(VALUE_GATE, name)}
    if len(gates) > 1 or not gates <= VERSIONS.keys() or bool(layers) != bool(gates):
        raise HeadwaterError(
            f"The gates of the value embeddings read {sorted(gates)} channels, but nanochat's read 32 or, in later "
            "versions, 12; use a checkpoint from its master branch."
        )
    return layers, max(gates, default=0)


def _nanochat_source(name: str, config: HeadwaterConfig) -> str | None:
    if name == EMBEDDING:
        return NANOCHAT_EMBEDDING
    layer, _, inner = name.removeprefix("model.layers.").partition(".")
    return NANOCHAT_NAMES[inner].format(layer) if inner in NANOCHAT_NAMES else name


def _nanochat_convert(name: str, tensor: Tensor, config: HeadwaterConfig) -> Tensor:
    if name.endswith((EMBEDDING, "lm_head.weight", "value_embedding.table.weight")):
        return tensor[: config.vocab_size]  # the rest pads the vocabulary
    return exchange_halves(tensor, config) if name.endswith(("q_proj.weight", "k_proj.weight")) else tensor


# Our name within a layer -> nanochat's; `{}` is the layer.
NANOCHAT_NAMES = {
    "mechanisms.smear.gate.weight": "smear_gate.weight",
    "mechanisms.smear.strength": "smear_lambda",
    "mechanisms.backout.strength": "backout_lambda",
    "mechanisms.embedding_residual.lambdas": "lambdas.{}",
    "self_attn.mechanisms.value_embedding.table.weight": "value_embeds.{}.weight",
    "self_attn.mechanisms.value_embedding.gate.weight": "transformer.h.{}.attn.ve_gate.weight",
    "self_attn.q_proj.weight": "transformer.h.{}.attn.c_q.weight",
    "self_attn.k_proj.weight": "transformer.h.{}.attn.c_k.weight",
    "self_attn.v_proj.weight": "transformer.h.{}.attn.c_v.weight",
    "self_attn.o_proj.weight": "transformer.h.{}.attn.c_proj.weight",
    "mlp.up_proj.weight": "transformer.h.{}.mlp.c_fc.weight",
    "mlp.down_proj.weight": "transformer.h.{}.mlp.c_proj.weight",
}


LAYOUTS = {
    "tokenformer": Layout(
        NEOX_EMBEDDING, _drop_rope_buffers, _tokenformer_fields, _tokenformer_source, r"\.key_param_tokens$"
    ),
    "resformer": Layout(EMBEDDING, _drop_rope_buffers, _resformer_fields, _llama_source),
    "kv-shifting": Layout(
        EMBEDDING, _normalize_shift, _shift_fields, _shift_source, r"\.self_attn\.([KV]|conv_[kv])$", _shift_convert
    ),
    "nanochat": Layout(
        NANOCHAT_EMBEDDING,
        _normalize_nanochat,
        _nanochat_fields,
        _nanochat_source,
        r"^transformer\.h\.\d+\.attn\.c_q\.weight$",
        _nanochat_convert,
    ),
}


# Files


def _find_newest(path: Path) -> Path:
    """Find the newest model_NNNNNN.pt if the path is a folder of nanochat's; return any other path unchanged."""
    steps = sorted(path.glob("model_*.pt"), key=lambda file: (len(file.name), file.name)) if path.is_dir() else []
    return steps[-1] if steps and _meta_file(steps[-1]).is_file() else path


def _meta_file(file: Path) -> Path:
    """Name the file of settings that nanochat writes next to a checkpoint."""
    return file.with_name(f"meta_{file.stem.removeprefix('model_')}.json")


def _read_tensors(path: Path) -> Tensors:
    """Read all tensors of a file or folder by name, without the path elements that wrappers add."""
    tensors = strip_wrappers(read_weights(_find_files(path)), repr(str(path)))
    if not tensors:
        raise HeadwaterError(f"There are no tensors in {str(path)!r}; name a checkpoint.")
    check_dtypes(list_dtypes(tensors), repr(str(path)), torch.nn.Module())
    check_finite(tensors, repr(str(path)))
    return tensors


def _find_files(path: Path) -> list[Path]:
    """Find the files that hold the tensors of a checkpoint."""
    if path.is_file():
        return [path]
    for index in (f"{WEIGHTS}.index.json", f"{PICKLED}.index.json"):
        if (path / index).is_file():
            return list_shards(path / index)
    for endings in ((".safetensors",), (".bin", ".pt", ".pth")):
        files = sorted(file for file in path.glob("*") if file.suffix in endings and file.is_file())
        if len(files) > 1:
            raise HeadwaterError(
                f"{str(path)!r} has several files of tensors and no index; name one, such as {files[0].name!r}."
            )
        if files:
            return files
    raise HeadwaterError(f"There is no file of tensors at {str(path)!r}; name one, or a folder that contains one.")


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the configs of a checkpoint: config.json, or the YAML files of GPT-NeoX, merged."""
    folder = path if path.is_dir() else path.parent
    files = [file for file in (folder / CONFIG, _meta_file(path)) if file.is_file()]
    files = files or sorted(file for directory in (folder, folder / "configs") for file in directory.glob("*.y*ml"))
    settings: dict[str, Any] = {}
    for file in files:
        with reading(f"The config {str(file)!r}", "correct or remove it"):
            text = read_text(file)
            content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        if not isinstance(content, dict):
            raise HeadwaterError(f"The config {str(file)!r} is not a mapping; correct or remove it.")
        settings |= content.get("model_config", content)
    return settings
