"""Which attention kernel a run uses."""

from __future__ import annotations

import torch

from headwater import kernels
from headwater.config.layers import layer_config
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.kernels.varlen import FROM, VARLEN, find_refusal
from headwater.models.kinds import AnyModel
from headwater.nn.attention_kernel import supported_kernels
from headwater.util.errors import HeadwaterError, sentence
from headwater_lab.recipe.schema import Training


def attention_of(config: HeadwaterConfig, training: Training, device: torch.device, context: int) -> str | None:
    """The kernel that the recipe names; else varlen if packed rows of `context` tokens are faster with it; else None.

    Not decided by timing, since a run's bits depend on it. Raises `HeadwaterError` if varlen is named and cannot run.
    """
    found = kernel_for(config, training, device.type, context)
    if found == VARLEN and training.attn_implementation is None and device.type == "cuda":
        return VARLEN if torch.cuda.get_device_capability(device) >= (8, 0) else None  # FlashAttention needs Ampere
    return found


def kernel_for(config: HeadwaterConfig, training: Training, device: str, context: int) -> str | None:
    """The same for a kind of device, whose capability suffices."""
    if isinstance(config, HeadwaterVisionConfig):
        if training.attn_implementation == VARLEN:
            raise HeadwaterError(f"training.attn_implementation: {VARLEN} is for rows of documents; leave it out.")
        return training.attn_implementation
    dtype = {"32-true": torch.float32, "64-true": torch.float64}.get(training.precision, torch.bfloat16)
    widths = [layer_config(config, layer).head_dim for layer in config.kinds.values()]
    reasons = [find_refusal(torch.device(device), dtype, config.attention_dropout, width or 0) for width in widths]
    reason = next((reason for reason in reasons if reason is not None), None)
    if training.attn_implementation == VARLEN and reason is not None:
        raise HeadwaterError(f"training.attn_implementation: {VARLEN} {reason}; leave it out.")
    possible, _ = supported_kernels(config)
    cannot = reason is not None or (possible is not None and VARLEN not in possible)
    if training.attn_implementation is not None or cannot or kernels.are_disabled():
        return training.attn_implementation
    return VARLEN if device != "cpu" or context >= FROM else None


def set_attention(model: AnyModel, name: str) -> None:
    """Raise `HeadwaterError` if the kernel is not installed, or does not support the model."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise HeadwaterError(f"training.attn_implementation: {sentence(error)}") from error
