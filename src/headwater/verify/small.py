"""A small random model of any model type of transformers, from its own default config made small.

Fields are known by their names, which most configs share; what one type needs beside is in `OWN`. Lists with an entry
for each layer keep one of each combination, so a hybrid stays one.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headwater.errors import HeadwaterError, first_line

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS, VOCABULARY = 4, 97

# The first pattern that matches a field's whole name says how large it is at most: a number, or what of the default.
_TWO, _ONE = (lambda given: min(given, 2)), (lambda given: min(given, 1))
SIZES: list[tuple[str, Any]] = [
    (r"(encoder_|decoder_)?(vocab_size|unpadded_vocab_size|vocab_size_per_layer_input)", VOCABULARY),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_decoder_layers|num_blocks", LAYERS),
    (r"depth", 1),
    (r"(swa_)?num_key_value_heads|kv_n_heads|num_kv_heads|num_global_key_value_heads", 2),
    (r"(swa_|encoder_|decoder_)?(num_)?attention_heads|n_heads?|num_heads|mamba_n_heads|linear_num_heads", 4),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"qk_(rope|nope)_head_dim", 4),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"(\w+_)?head_dim|dim_head|d_kv|kv_channels|attention_head_dim", 8),
    (r"rotary_dim", 4),
    (r"(kv|q|o)_lora_rank|hc_lowrank|laurel_rank|gated_norm_rank", 16),
    # With few heads, many pairs of tokens score exactly 0 after the ReLU, and which of them are the top k is chance.
    (r"index(er)?_n_heads|index_topk", 8),
    (r"hidden_size_per_layer_input|ple_embed_dim", 8),
    (r"mamba_d_ssm|mamba_intermediate_size", 64),
    (r"\w*intermediate_size(_mlp)?|(expert_)?ffn_hidden_size|\w*ffn_dim|\w*hidden_dim", 48),
    (r"dff|d_ff|dim_ff|n_inner|mlp_dim", 48),
    (r"hidden_size|hidden_size_global|backbone_hidden_size|out_hidden_size|d_model|n_embd|vision_output_dim", 32),
    (r"embedding_size|embedding_dim|emb_dim|lru_width|embed_dim|input_size", 32),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts|zero_expert_num", _TWO),
    (r"n_group|num_expert_group", _TWO),
    (r"topk_group", 1),
    (r"\w*sliding_window(_size)?|attention_window_size|attention_chunk_size|local_attention\w*|window_size", 6),
    (r"mamba_d_state|state_size|ssm_state_size|d_rel", 8),
    (r"mamba_n_groups|n_groups|o_groups|mamba_ngroups", _TWO),
    (r"(mamba_)?chunk_size", 4),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r"attn_layer_period|layer_group_size|global_attn_every_n_layers|full_attention_interval", _TWO),
    (r"_?sliding_window_pattern|no_rope_layer_interval|n_layers_per_attn_res_block", _TWO),
    (r"num_kv_shared_layers|max_window_layers", _TWO),
    (r"attn_layer_offset|first_k_dense_replace|num_dense_layers|num_nextn_predict_layers", _ONE),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"ngram_vocab_size_base|encoder_hash_byte_group_vocab", 97),
    (r"split_ngram_parts", 2),
]
_MAMBA_HYBRID = ["linear_attention", "hybrid"] * 2
_SLIDING = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HYBRID = ["linear_attention", "full_attention"] * 2
_CONVOLUTIONS = ["conv", "full_attention", "conv", "full_attention"]
# What configs of single types need beside, also within others; None leaves a field to the config itself.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},
    "cohere_compass_text": {"layer_types": _SLIDING, "rope_parameters": dict.fromkeys(_SLIDING, _ROPE)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "q_lora_rank": None},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_head": 16},
    "gemma3n_text": {
        "layer_types": _SLIDING,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_text": {"layer_types": _SLIDING, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"layer_types": _SLIDING, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "attention_layers": None},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "lfm2": {"layer_types": _CONVOLUTIONS, "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": 8},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"layers_block_type": _MAMBA_HYBRID},
}


def small_config(model_type: str) -> PreTrainedConfig:
    """A small config of a model type.

    Raises `HeadwaterError` for a type that is no causal language model of transformers, or whose fields contradict each
    other when it is small, and whatever its config raises.
    """
    if model_type not in TYPES:
        near = difflib.get_close_matches(model_type, TYPES, 1)
        advice = f"; did you mean {near[0]!r}?" if near else "."
        raise HeadwaterError(f"transformers has no type of causal language model {model_type!r}{advice}")
    made = CONFIG_MAPPING[model_type]
    default = made()
    config = made(**_shrunk(default))
    check_layers(config.get_text_config(decoder=True), default.get_text_config(decoder=True))
    for one in (config, config.get_text_config(decoder=True)):
        if hasattr(one, "is_decoder"):
            one.is_decoder = True
        for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
            given = getattr(one, name, None)
            if given is not None and not (isinstance(given, int) and 0 <= given < VOCABULARY):
                setattr(one, name, token)
    return config


def check_layers(small: PreTrainedConfig, default: PreTrainedConfig) -> None:
    """Raise `HeadwaterError` for a small config whose fields about layers no longer fit its number of layers.

    Checked are counts and numbers of layers, and lists with an entry for each layer or with numbers of layers, also
    those that follow from other fields: whatever fits the layers of the default config fits those of the small one.
    """
    before, after = (_field(config, "num_hidden_layers") for config in (default, small))
    for name in sorted({*vars(default), *_properties(default)}):
        value, now = _field(default, name), _field(small, name)
        if _is_count(now) and now < 0 <= (value if _is_count(value) else -1):
            raise HeadwaterError(f"{small.model_type} has no small config that makes sense: {name} would be {now}.")
        elif "layer" in name and _is_count(before) and _is_count(after) and not _fits(value, now, before, after):
            raise HeadwaterError(
                f"{small.model_type} has no small config that makes sense: {name} would be {now} with {after} layers."
            )


def _fits(value: Any, now: Any, before: int, after: int) -> bool:
    """Whether a field fits `after` layers, if its default fits those `before`."""
    if _is_count(value) and _is_count(now):
        return now <= after or value > before
    if isinstance(value, list | tuple) and isinstance(now, list | tuple):
        if len(value) == before != len({*map(str, value)}):
            return len(now) == after
        numbers = all(map(_is_count, [*value, *now])) and all(0 <= one < before for one in value)
        return not numbers or all(0 <= one < after for one in now)
    return True


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _properties(config: PreTrainedConfig) -> list[str]:
    return [name for name in dir(type(config)) if isinstance(getattr(type(config), name, None), property)]


def small_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A small random fp32 model of a type. Its parameters are perturbed: ones and zeros would hide mistakes."""
    config = small_config(model_type)
    torch.manual_seed(seed)
    return perturbed(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)


def open_type(model_type: str, seed: int = 0) -> PreTrainedModel:
    """`small_model`, for a name that a user gives.

    Raises `HeadwaterError` for a type without a small model, and says why.
    """
    try:
        return small_model(model_type, seed)
    except HeadwaterError:
        raise
    except Exception as error:
        raise HeadwaterError(
            f"No small model of type {model_type!r} can be made from its default config ({first_line(error)}); save "
            f"one of your own with save_pretrained, and give its folder with --model."
        ) from error


def perturbed(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))
    return model.eval()


def _shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config that change, with those of the configs in it."""
    # Other attributes follow from these.
    given = {key: _field(default, key) for key in type(default).__dataclass_fields__}
    layers = next((given[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in given), None)
    # One entry for each layer, but for lists of the layers' numbers.
    lists = {
        key: value
        for key, value in given.items()
        if isinstance(value, list) and layers and len(value) == layers > len({str(one) for one in value})
    }
    kept = _kept(list(lists.values()), layers) if layers and lists else []
    made: dict[str, Any] = {key: [value[one] for one in kept] for key, value in lists.items()}
    for key, value in given.items():
        if isinstance(value, PreTrainedConfig):
            made[key] = _shrunk(value)
        elif isinstance(value, int) and not isinstance(value, bool) and key not in made:
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), None)
            if size is not None and value > 0:
                made[key] = min(value, size) if isinstance(size, int) else size(value)
                if kept and "layers" in key and size == LAYERS:
                    made[key] = len(kept)
                if re.search("kv.*heads|key_value_heads", key):  # as many as queries, where the default has
                    queries = key.replace("key_value", "attention").replace("kv_heads", "attention_heads")
                    made[key] = 4 if value == given.get(queries) else made[key]
    own = OWN.get(default.model_type, {})
    return {key: value for key, value in (made | own).items() if value is not None}


def _field(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # of a config whose layers differ in it
        return vars(config).get(name)


def _kept(lists: list[list[Any]], layers: int) -> list[int]:
    """The numbers of the layers to keep: the first of each kind, the last layer, and others up to `LAYERS`."""
    kinds = [str([one[number] for one in lists]) for number in range(layers)]
    first = {kinds.index(kind) for kind in kinds}
    if len(first) > layers // 2:  # a number of its own for each layer
        first = set(range(0, layers, max(1, math.ceil(layers / LAYERS))))
    kept = sorted(first | {layers - 1})
    for number in range(layers):
        if len(kept) >= LAYERS:
            break
        if number not in kept:
            kept = sorted([*kept, number])
    return kept
