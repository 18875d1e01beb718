"""The depth loop: runs the blocks and carries what later layers read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor, nn

from headwater.config.plan import EMBEDDING, Kind, LayerPlan, Source
from headwater.nn.block import Block

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig

OfKind = dict[bool, dict[str, Any]]
# By kind of source, the dimension of the new tokens; None: it has all tokens or none.
TOKENS: dict[Kind, int | None] = {"raw": 2, "local": 2, "bank": None, "probabilities": 2, "stream": 1, "shared": None}


class Last(NamedTuple):
    """From block `first` on, only the last `tokens` tokens, with these `kwargs` and `of_kind` instead."""

    first: int
    tokens: int
    kwargs: dict[str, Any]
    of_kind: OfKind | None

    def of(self, source: Source, tensor: Tensor) -> Tensor:
        """The part of a carried tensor that belongs to these tokens."""
        dim = TOKENS[source.kind]
        return tensor if dim is None else tensor.narrow(dim, tensor.shape[dim] - self.tokens, self.tokens)


class Stack(nn.ModuleList):
    """The blocks of a model, in order."""

    def __init__(self, config: HeadwaterConfig, plans: Sequence[LayerPlan]) -> None:
        super().__init__(Block(config, plan) for plan in plans)
        self.last_reader = last_readers(plans)

    def __getitem__(self, index):
        """A slice is a plain ModuleList: only the whole stack can carry tensors between its blocks."""
        return nn.ModuleList(list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def forward(
        self,
        x: Tensor,
        shared: dict[Source, Tensor],
        of_kind: OfKind | None = None,
        last: Last | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """x [B, T, D] -> [B, T, D], or of fewer tokens, with `last`.

        shared: tensors from mechanisms for all blocks. kwargs: passed to every block. of_kind: what else is passed to
        blocks with a sliding window (True), and to the others.
        """
        return run(cast(Iterable[Block], self), self.last_reader, x, shared, of_kind, last, **kwargs)


def run(
    blocks: Iterable[Block],
    last_reader: dict[Source, int],
    x: Tensor,
    shared: dict[Source, Tensor],
    of_kind: OfKind | None = None,
    last: Last | None = None,
    /,
    **kwargs: Any,
) -> Tensor:
    """As `Stack.forward`, for blocks that another package holds. last_reader: see `last_readers`."""
    carried = {source: t for source, t in {EMBEDDING: x, **shared}.items() if source in last_reader}
    for block in blocks:
        if last is not None and block.plan.index == last.first:
            x, kwargs, of_kind = x[:, -last.tokens :], last.kwargs, last.of_kind
            carried = {source: last.of(source, tensor) for source, tensor in carried.items()}
        own = kwargs if of_kind is None else kwargs | of_kind[block.slides]
        x, *exports = block(x, *(carried[source] for source in block.plan.reads), **own)
        carried.update(zip(block.plan.exports, exports, strict=True))
        carried = {source: t for source, t in carried.items() if last_reader[source] > block.plan.index}
    return x


def last_readers(plans: Iterable[LayerPlan]) -> dict[Source, int]:
    """The layer after which each carried tensor is dropped."""
    return {source: plan.index for plan in plans for source in plan.reads}
