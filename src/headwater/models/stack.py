"""The depth loop: runs the blocks and carries what later layers read."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from headwater.config.plan import EMBEDDING, LayerPlan, Source, SourceKind

# Keyword arguments of the blocks with a sliding window (True) and without (False).
BlockArguments = dict[bool, dict[str, Any]]
# The dimension of the new tokens, by kind of source. None: the tensor covers all tokens or none.
TOKENS: dict[SourceKind, int | None] = {
    "raw": 2,
    "local": 2,
    "bank": None,
    "probabilities": 2,
    "stream": 1,
    "shared": None,
}


class LastTokens(NamedTuple):
    """Restriction to the last `tokens` tokens from block `first_layer` on, with these `arguments` instead."""

    first_layer: int
    tokens: int
    arguments: BlockArguments

    def select_tokens(self, source: Source, tensor: Tensor) -> Tensor:
        """Select the part of a carried tensor that belongs to these tokens."""
        dim = TOKENS[source.kind]
        return tensor if dim is None else tensor.narrow(dim, tensor.shape[dim] - self.tokens, self.tokens)


def run_blocks(
    blocks: Iterable[Any],
    last_reader: dict[Source, int],
    x: Tensor,
    shared: dict[Source, Tensor],
    arguments: BlockArguments,
    last_tokens: LastTokens | None = None,
) -> Tensor:
    """Run `Block`s in order: x [B, T, D] -> [B, T, D], or of fewer tokens, with `last_tokens`.

    last_reader: see `last_readers`. shared: tensors from mechanisms for all blocks.
    """
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
    """Find the layer after which each carried tensor is dropped."""
    return {source: plan.index for plan in plans for source in plan.reads}
