"""Shards and gradients of parameters."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_shard(parameter: Tensor) -> Tensor:
    """Return this process's shard of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def list_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """List the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
