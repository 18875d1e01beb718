"""Which activations a block keeps for the backward pass, and which it computes again: `gradient_checkpointing`.

true        keeps only the block's input
attention   and what attention kernels return, whose cost grows with the square of the context
half        and the result of every second matmul
0 < x < 1   this share of what a compiled block would keep: chosen by the compiler, so not made here
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from headwater.kernels import varlen
from headwater.models.kinds import AnyModel

# By name: PyTorch registers some when they are first used.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn",
    varlen.FORWARD,
    "flex_attention",
}
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"}


def recompute_activations(model: AnyModel, what: bool | str | float) -> None:
    """Make the model's blocks compute activations again in the backward pass. what: see the module."""
    if not what or budget_of(what) is not None:
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if isinstance(what, str):
        arguments["context_fn"] = partial(contexts, what)
    older: Any = model.gradient_checkpointing_enable  # the only name in transformers 5.17
    getattr(model, "activation_checkpointing_enable", older)(arguments)


def budget_of(what: bool | str | float) -> float | None:
    """The share to keep, if `what` is one."""
    return what if isinstance(what, float) else None


def contexts(what: str) -> tuple[Any, Any]:
    """The contexts of a block's forward pass and of its repetition."""
    matmuls: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        keep = operation.name() in ATTENTION
        if what == "half" and operation.name() in MATMULS:
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
