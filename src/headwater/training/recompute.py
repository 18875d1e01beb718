"""Which activations a block keeps for the backward pass, and which are computed again: `gradient_checkpointing`.

    true        nothing but the block's input is kept
    attention   what the attention kernels return is kept: their cost grows with the square of the context
    matmuls     and what matmuls return: what is computed again costs little
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from headwater.models.causal_lm import HeadwaterForCausalLM

# By name: PyTorch registers some when they are first used. Those with .out write to memory that is used again.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn",
    "flex_attention",
}
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"}
KEPT = {"attention": ATTENTION, "matmuls": ATTENTION | MATMULS}


def recompute_activations(model: HeadwaterForCausalLM, what: bool | str) -> None:
    """Make the model's blocks compute activations again in the backward pass. what: see the module."""
    if not what:
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if isinstance(what, str):
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, what))
    older: Any = model.gradient_checkpointing_enable  # the only name in transformers 5.17
    getattr(model, "activation_checkpointing_enable", older)(arguments)


def _policy(what: str, context: object, operation: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name() in KEPT[what] else CheckpointPolicy.PREFER_RECOMPUTE
