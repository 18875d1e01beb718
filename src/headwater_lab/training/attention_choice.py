"""Choose the attention kernel of a run."""

import torch

from headwater import kernels
from headwater.config.layers import layer_config
from headwater.config.text import HeadwaterConfig
from headwater.kernels.varlen import FROM, HALF, VARLEN, find_refusal
from headwater.nn.attention_kernel import supported_kernels
from headwater.nn.documents import FLASH3
from headwater.util.errors import HeadwaterError, sentence
from headwater_lab.recipe.training_section import Training
from headwater_lab.util.model_kinds import AnyModel, is_of_images


def choose_attention(config: HeadwaterConfig, training: Training, device: torch.device, context: int) -> str | None:
    """Choose the recipe's kernel, else varlen if packed rows of `context` tokens are faster with it, else None.

    It is not chosen by timing, because a run's bits depend on it. A GPU that this machine lacks can run varlen. Raises
    `HeadwaterError` if varlen, FlashAttention 3 or FlexAttention is named and cannot run.
    """
    kernel, refusal = training.attn_implementation, _refuse_varlen(config, training, device)
    reasons = {VARLEN: refusal, FLASH3: _refuse_flash3(config, training, device)}
    if device.type == "cpu":
        reasons["flex_attention"] = "cannot train on a CPU"
    reason = reasons.get(kernel or "")
    if reason is not None:
        raise HeadwaterError(f"training.attn_implementation: {kernel} {reason}; leave it out.")
    if kernel is not None or refusal is not None or kernels.are_disabled():
        return kernel
    possible, _ = supported_kernels(config)
    if possible is not None and VARLEN not in possible:
        return None
    if device.type == "cuda" and torch.cuda.is_available():
        return VARLEN if torch.cuda.get_device_capability(device) >= (8, 0) else None  # FlashAttention needs Ampere
    return VARLEN if device.type != "cpu" or context >= FROM else None


def _refuse_varlen(config: HeadwaterConfig, training: Training, device: torch.device) -> str | None:
    """Explain why varlen cannot compute the attention of a model; None if it can."""
    if is_of_images(config):
        return "is for rows of documents"
    widths = [layer_config(config, layer).head_dim or 0 for layer in config.kinds.values()]
    dtype, dropout = training.precision.compute, config.attention_dropout
    refusals = (find_refusal(device, dtype, dropout, width) for width in widths)
    return next((refusal for refusal in refusals if refusal is not None), None)


def _refuse_flash3(config: HeadwaterConfig, training: Training, device: torch.device) -> str | None:
    """Explain why FlashAttention 3 cannot compute the attention of a model; None if it can."""
    if device.type != "cuda" or (torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] != 9):
        return "runs on GPUs of compute capability 9 only, such as the H100"
    if training.precision.compute not in HALF:
        return "takes bfloat16 and float16 only (training.precision=bf16-mixed)"
    return "has no dropout" if config.attention_dropout > 0 else None


def set_attention(model: AnyModel, name: str) -> None:
    """Set a model's kernel. Raises `HeadwaterError` if it is not installed, or does not support the model."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise HeadwaterError(f"training.attn_implementation: {sentence(error)}") from error
