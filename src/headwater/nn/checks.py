"""Checks of numbers that may be on another device, or unknown because code is traced."""

import torch
from torch import Tensor

from headwater.util.errors import HeadwaterError


def must_wait(tensor: Tensor) -> bool:
    """Whether the host would wait for the numbers of a tensor: they are on another device, or unknown (fake)."""
    return tensor.device.type != "cpu" or type(tensor) is not Tensor


def is_replayed(past: int | Tensor, length: int) -> bool:
    """Whether this is one token after those in a static cache: it may be replayed, so checks read no values."""
    return isinstance(past, Tensor) and length == 1


def refuse_where(wrong: Tensor, sentence: str) -> None:
    """Raise `HeadwaterError` if anything is `wrong`; compiled code, which cannot branch on it, asserts."""
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), sentence)
    elif not wrong.is_meta and bool(wrong.any()):
        raise HeadwaterError(sentence)


def require_all(right: Tensor, sentence: str) -> None:
    """Raise `HeadwaterError` unless all are true. A GPU fails later; compiled code does not check."""
    if torch.compiler.is_compiling() or right.is_meta:
        return
    try:
        torch._assert_async(right.all(), sentence)
    except RuntimeError as error:
        raise HeadwaterError(sentence) from error
