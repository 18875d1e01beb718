"""The depth loop: runs the blocks and carries what later layers read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from headwater.nn.block import Block
from headwater.plan import LayerPlan, Source

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig

EMBEDDING = Source("stream", "x", -1)
OfKind = dict[bool, dict[str, Any]]


class Stack(nn.ModuleList):
    """The blocks of a model, in order."""

    def __init__(self, config: HeadwaterConfig) -> None:
        plans = config.layer_plans
        super().__init__(Block(config, plan) for plan in plans)
        self.last_reader = last_readers(plans)

    def __getitem__(self, index):
        """A slice is a plain ModuleList: only the whole stack can carry tensors between its blocks."""
        return nn.ModuleList(list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def forward(self, x: Tensor, shared: dict[Source, Tensor], of_kind: OfKind | None = None, **kwargs: Any) -> Tensor:
        """x [B, T, D] -> [B, T, D]. shared: tensors from mechanisms for all blocks. kwargs: passed to every block.

        of_kind: what else is passed to blocks with a sliding window (True), and to the others.
        """
        return run(cast(Iterable[Block], self), self.last_reader, x, shared, of_kind, **kwargs)


def run(
    blocks: Iterable[Block],
    last_reader: dict[Source, int],
    x: Tensor,
    shared: dict[Source, Tensor],
    of_kind: OfKind | None = None,
    **kwargs: Any,
) -> Tensor:
    """As `Stack.forward`, for blocks that another package holds. last_reader: see `last_readers`."""
    carried = {source: t for source, t in {EMBEDDING: x, **shared}.items() if source in last_reader}
    for block in blocks:
        own = kwargs if of_kind is None else kwargs | of_kind[block.slides]
        x, *exports = block(x, *(carried[source] for source in block.plan.reads), **own)
        carried.update(zip(block.plan.exports, exports, strict=True))
        carried = {source: t for source, t in carried.items() if last_reader[source] > block.plan.index}
    return x


def last_readers(plans: Iterable[LayerPlan]) -> dict[Source, int]:
    """The layer after which each carried tensor is dropped."""
    return {source: plan.index for plan in plans for source in plan.reads}
