"""Options that functions and commands share. Importing this does not import torch."""

from collections.abc import Sequence
from typing import TypedDict


class PlanSettings(TypedDict, total=False):
    """Options of `lab.plan` and `headwater plan`, which pass them to `headwater.cost.estimate_model`.

    context: Tokens per row; repeatable (in Python, a number or a list). Default: the first model's own.
    batch: Rows per batch and device, or sequences to generate at a time. Default: the first recipe's, or 1.
    tokens: Training budget in tokens, e.g. 300B or 2e10. Default: the first recipe's.
    images: Training budget in images, for image models, e.g. 384M.
    hardware: A device, e.g. H100, or this to measure the current machine.
    devices: Number of training devices. Default: the first recipe's, or 1.
    mfu: Assumed share of the peak that training reaches. Default: 0.4.
    precision: 64-true, 32-true, bf16-mixed, bf16-stream or bf16-true. Default: the first recipe's, or bf16-mixed.
    """

    context: Sequence[int] | int | None
    batch: int | None
    tokens: str | float | None
    images: str | float | None
    hardware: str | None
    devices: int | None
    mfu: float | None
    precision: str | None
