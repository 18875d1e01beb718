"""The depth loop: runs the blocks and carries what later layers read."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from headwater.config.plan import EMBEDDING, Kind, LayerPlan, Source
from headwater.config.text import HeadwaterConfig
from headwater.nn.block import Block

# The keyword arguments of blocks: of those with a sliding window (True), and of the others.
BlockArguments = dict[bool, dict[str, Any]]
# By kind of source, the dimension of the new tokens; None: it has all tokens or none.
TOKENS: dict[Kind, int | None] = {"raw": 2, "local": 2, "bank": None, "probabilities": 2, "stream": 1, "shared": None}


class LastTokens(NamedTuple):
    """Restriction to the last `tokens` tokens from block `first_layer` on, with these `arguments` instead."""

    first_layer: int
    tokens: int
    arguments: BlockArguments

    def select_tokens(self, source: Source, tensor: Tensor) -> Tensor:
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
        self, x: Tensor, shared: dict[Source, Tensor], arguments: BlockArguments, last_tokens: LastTokens | None = None
    ) -> Tensor:
        """x [B, T, D] -> [B, T, D], or of fewer tokens, with `last_tokens`.

        shared: tensors from mechanisms for all blocks.
        """
        return run_blocks(cast(Iterable[Block], self), self.last_reader, x, shared, arguments, last_tokens)


def run_blocks(
    blocks: Iterable[Block],
    last_reader: dict[Source, int],
    x: Tensor,
    shared: dict[Source, Tensor],
    arguments: BlockArguments,
    last_tokens: LastTokens | None = None,
) -> Tensor:
    """`Stack.forward`, for blocks that another package may hold. last_reader: see `last_readers`."""
    carried = {source: tensor for source, tensor in {EMBEDDING: x, **shared}.items() if source in last_reader}
    for block in blocks:
        if last_tokens is not None and block.plan.index == last_tokens.first_layer:
            x, arguments = x[:, -last_tokens.tokens :], last_tokens.arguments
            carried = {source: last_tokens.select_tokens(source, tensor) for source, tensor in carried.items()}
        x, *exports = block(x, *(carried[source] for source in block.plan.reads), **arguments[block.slides])
        carried.update(zip(block.plan.exports, exports, strict=True))
        carried = {source: tensor for source, tensor in carried.items() if last_reader[source] > block.plan.index}
    return x


def last_readers(plans: Iterable[LayerPlan]) -> dict[Source, int]:
    """The layer after which each carried tensor is dropped."""
    return {source: plan.index for plan in plans for source in plan.reads}
