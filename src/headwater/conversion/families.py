"""Families of transformers' models that headwater converts. A further one is a `Family` in `FAMILIES`."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

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
from headwater.conversion.family import LAYER, Family, Link, link_modules, list_layer_types, same_names
from headwater.conversion.images import DEIT, VIT
from headwater.plugins.registry import Registry
from headwater.util.errors import HeadwaterError

# Types of models that are not supported -> what to do instead.
UNSUPPORTED = {
    "baichuan_m1": "read it with --layout kv-shifting, or in Python with read_foreign.",
    "gemma3": (
        "only Gemma 3's text model is supported: save the language_model and lm_head as a Gemma3ForCausalLM, and "
        "convert that."
    ),
}

_SIZES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"
_TOKENS = "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"
_COMMON_FIELDS = same_names(*_SIZES, *_TOKENS, "tie_word_embeddings", "initializer_range", "use_cache")

# GPT-2 and GPT-NeoX: LayerNorm, a plain feed-forward, one map for queries, keys and values, as many heads of each.
_LAYER_NORM = dict(feed_forward="plain", norm="layer_norm", mlp_bias=True)
_QKV = tuple(f"{LAYER}self_attn.{letter}_proj" for letter in "qkv")

_GPT2 = Family(
    model=GPT2LMHeadModel,
    fields=_COMMON_FIELDS
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
        *link_modules(
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
    fields=_COMMON_FIELDS
    | same_names("hidden_act", "attention_dropout", "rope_parameters")
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
        *link_modules(
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
    fields=_COMMON_FIELDS
    | same_names("num_key_value_heads", "head_dim", "hidden_act", "attention_dropout", "rope_parameters", "mlp_bias")
    | dict(norm_eps="rms_norm_eps", qkv_bias="attention_bias", output_bias="attention_bias"),
    required=dict(pretraining_tp=1),
    links=link_modules(
        same_names(
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
        *link_modules(
            same_names("model.embed_tokens", f"{LAYER}self_attn.v_proj", f"{LAYER}self_attn.o_proj", "lm_head")
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


def _read_gemma2(config: PreTrainedConfig) -> dict[str, Any]:
    scalar = config.query_pre_attn_scalar
    return {"attention_scale": None if scalar == config.head_dim else scalar**-0.5}


def _write_gemma2(config: HeadwaterConfig) -> dict[str, Any]:
    scale = config.attention_scale
    scalar = config.head_dim if scale is None else round(scale**-2)
    return {"query_pre_attn_scalar": scalar, "layer_types": list_layer_types(config)}


def _read_gemma3(config: PreTrainedConfig) -> dict[str, Any]:
    rope = {kind: config.rope_parameters[kind] for kind in sorted(set(config.layer_types))}
    values = _read_gemma2(config) | {"rope_parameters": next(iter(rope.values()))}
    if len(rope) > 1 and config.sliding_window is not None and rope["sliding_attention"] != rope["full_attention"]:
        values["sliding_fields"] = {"rope_parameters": rope["sliding_attention"]}
    return values


def _write_gemma3(config: HeadwaterConfig) -> dict[str, Any]:
    sliding = (config.sliding_fields or {}).get("rope_parameters", config.rope_parameters)
    rope = {"full_attention": config.rope_parameters, "sliding_attention": sliding}
    return _write_gemma2(config) | {"rope_parameters": rope}


_GEMMA_NORMS = {
    f"{LAYER}post_attention_layernorm": f"{LAYER}attention_output_norm",
    f"{LAYER}pre_feedforward_layernorm": f"{LAYER}post_attention_layernorm",
    f"{LAYER}post_feedforward_layernorm": f"{LAYER}feed_forward_output_norm",
}
_GEMMA2 = _vary_family(
    _GEMMA,
    Gemma2ForCausalLM,
    same_names("sliding_window")
    | dict(
        hidden_act="hidden_activation",
        attention_softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
    ),
    dict(output_norms=True),
    required=_GEMMA.required,
    read_extra=_read_gemma2,
    write_extra=_write_gemma2,
    links=(
        *(link for link in _LLAMA.links if "post_attention_layernorm" not in link.source),
        *link_modules(_GEMMA_NORMS),
    ),
)
_QK_NORMS = link_modules(same_names(f"{LAYER}self_attn.q_norm", f"{LAYER}self_attn.k_norm"))
# attn_logit_softcapping is in Gemma 3's config, but none of its modules reads it.
_GEMMA3 = _vary_family(
    _GEMMA2,
    Gemma3ForCausalLM,
    {},
    dict(attention_softcap=None, qk_norm=True),
    required=_GEMMA.required,
    read_extra=_read_gemma3,
    write_extra=_write_gemma3,
    links=_GEMMA2.links + _QK_NORMS,
)

_WINDOW = same_names("sliding_window")
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
    for family in (_GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GPT_NEOX, _NANOCHAT, _GEMMA, _GEMMA2, _GEMMA3, VIT, DEIT)
}
_REGISTRY = Registry("family of models", "headwater.families", {}, "Family")
_REGISTRY.added = FAMILIES


def find_family(name: str) -> Family:
    """Find the family that a user or a file names. Raises `HeadwaterError` unless it is known, installed or trusted."""
    if not isinstance(name, str) or not (":" in name or name in _REGISTRY.names):
        advice = UNSUPPORTED.get(str(name)) or f"known names: {', '.join(sorted(_REGISTRY.names))}."
        raise HeadwaterError(f"Models of type {name!r} cannot be converted; {advice}")
    return _REGISTRY.resolve(name)


def find_fitting_family(config: HeadwaterConfig, preferred: str | None = None) -> str | None:
    """Find the name of a family that expresses this config, if possible the preferred one; None if there is none."""
    for name in sorted(FAMILIES, key=lambda name: name != preferred):
        if type(config) is FAMILIES[name].headwater_model.config_class:
            with suppress(HeadwaterError):
                FAMILIES[name].write_config(config)
                return name
    return None
