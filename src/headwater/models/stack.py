"""The depth loop: runs the blocks and carries what later layers read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from headwater.nn.block import Block
from headwater.plan import EMBEDDING, LayerPlan, Source

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class Stack(nn.ModuleList):
    """The blocks of a model, in order."""

    def __init__(self, config: HeadwaterConfig) -> None:
        plans = config.layer_plans
        super().__init__(Block(config, plan) for plan in plans)
        self.last_reader = last_readers(plans)

    def __getitem__(self, index):
        """A slice is a plain ModuleList: only the whole stack can carry tensors between its blocks."""
        return nn.ModuleList(list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def forward(self, x: Tensor, shared: dict[Source, Tensor], **kwargs: Any) -> Tensor:
        """x [B, T, D] -> [B, T, D]. shared: tensors from mechanisms for all blocks. kwargs: passed to every block."""
        return run(cast(Iterable[Block], self), self.last_reader, x, shared, **kwargs)


def run(
    blocks: Iterable[Block], last_reader: dict[Source, int], x: Tensor, shared: dict[Source, Tensor], **kwargs: Any
) -> Tensor:
    """As `Stack.forward`, for blocks that another package holds. last_reader: see `last_readers`."""
    carried = {source: t for source, t in {EMBEDDING: x, **shared}.items() if source in last_reader}
    for block in blocks:
        x, *exports = block(x, *(carried[source] for source in block.plan.reads), **kwargs)
        carried.update(zip(block.plan.exports, exports, strict=True))
        carried = {source: t for source, t in carried.items() if last_reader[source] > block.plan.index}
    return x


def last_readers(plans: Iterable[LayerPlan]) -> dict[Source, int]:
    """The layer after which each carried tensor is dropped."""
    return {source: plan.index for plan in plans for source in plan.reads}
