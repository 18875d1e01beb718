"""Random transforms with a generator of their own.

torchvision's transforms draw from PyTorch's global generator, which the training step draws from too, in another
thread. Inside `drawing_from`, this thread's draws come from a given generator instead, with the numbers that the global
one would have given under the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Functions of PyTorch that take `generator=`, by the name under which torchvision calls them.
_TAKE_GENERATOR = {
    getattr(owner, name)
    for owner, names in (
        (torch, ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson")),
        (torch, ("_sample_dirichlet", "_standard_gamma")),
        (Tensor, ("uniform_", "normal_", "random_", "exponential_", "bernoulli_", "bernoulli", "multinomial")),
    )
    for name in names
}
_LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
# Would take numbers from the global generator unnoticed.
_REFUSED = {torch.randint_like, torch.dropout, torch.nn.functional.dropout}


class drawing_from(TorchFunctionMode):
    """Within it, PyTorch's random functions draw from `generator`, in this thread only."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _LIKE:
            like = args[0]
            given = {"dtype": like.dtype, "device": like.device} | kwargs
            return _LIKE[func](like.shape, generator=self.generator, **given)
        if func in _TAKE_GENERATOR and kwargs.get("generator") is None:
            kwargs["generator"] = self.generator
        assert func not in _REFUSED, f"{func} draws from the global generator"
        return func(*args, **kwargs)
