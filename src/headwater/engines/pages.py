"""The layout of one block of a server's cache, computed from the plan. Pure Python.

A block has room for `block_size` tokens of one sequence: first the keys of each layer that stores any, then the values,
each head separately; then the raw tokens of mechanisms that look back. `materialise` is for engines with a cache of
their own and does not affect this layout.

A block keeps the last `length` + `spare` raw tokens written to it. A sequence that continues in another block, or from
a shared prefix, finds them at the end of the block before. A sequence whose last tokens are taken back (speculation)
finds the tokens before those, as long as no more than `spare` are taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from headwater.config.capabilities import KeepsState, LimitsKernels
from headwater.config.layers import layer_config
from headwater.config.plan import LayerPlan, Stage
from headwater.config.planner import plan_layers
from headwater.config.rope import FOLLOW_LENGTH
from headwater.cost.counts import ID, tail_widths
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig

# Stages inside the attention kernel, where a server's kernel runs instead.
INSIDE_KERNEL = Stage.ATTENDED_KV, Stage.ADDED_KEY_VALUES, Stage.ATTENTION_WEIGHTS
# Keys, values and raw tokens of any type begin at multiples of this many bytes, as FlashAttention reads them.
ALIGNED = 16


class Store(NamedTuple):
    """The keys or values of one layer: `heads` heads of `width` numbers a token, from byte `offset` of a block on."""

    heads: int
    width: int
    offset: int


@dataclass(frozen=True)
class Page:
    """One block of the cache.

    config, plans: the model. block_size: tokens. element: bytes of a number. spare: how many tokens may be taken back.
    least: minimum size in bytes, so that the blocks of several processes have equal sizes.
    """

    config: HeadwaterConfig
    plans: tuple[LayerPlan, ...]
    block_size: int
    element: int = 4
    spare: int = 0
    least: int = 0

    @cached_property
    def stores(self) -> dict[tuple[int, str], Store]:
        """The stores by layer and "k" or "v"."""
        stores: dict[tuple[int, str], Store] = {}
        offset = 0
        for kind in ("k", "v"):
            for plan in self.plans:
                if heads := len(plan.k_heads if kind == "k" else plan.v_heads):
                    width = layer_config(self.config, plan.index).head_dim
                    stores[plan.index, kind] = Store(heads, width, offset)
                    offset += heads * width * self.block_size * self.element
        return stores

    @cached_property
    def rooms(self) -> dict[int, range]:
        """The bytes of a block for the raw tokens of each layer that has some."""
        rooms, offset = {}, self.history
        for plan in self.plans:
            numbers = tail_widths(self.config, plan)
            size = 0
            for kind, length, _ in plan.tails:
                pieces = len(plan.inputs) if kind == "input" else 1  # attention's inputs are kept separately
                size += pieces * self.tail_bytes(length, numbers[kind] // pieces, ID if kind == "id" else self.element)
            if size:
                rooms[plan.index] = range(offset, offset + size)
                offset += size
        return rooms

    def tail_slots(self, length: int) -> int:
        """Count the raw tokens that a block keeps for a mechanism that looks `length` tokens back."""
        return length + self.spare

    def tail_bytes(self, length: int, numbers: int, element: int) -> int:
        """Bytes of the raw tokens of one tail, of this many numbers each."""
        return -(-self.tail_slots(length) * numbers * element // ALIGNED) * ALIGNED

    @cached_property
    def history(self) -> int:
        """Bytes of keys and values in a block."""
        return sum(store.heads * store.width for store in self.stores.values()) * self.block_size * self.element

    @cached_property
    def size(self) -> int:
        """Bytes of a block."""
        size = max(self.least, self.history + sum(map(len, self.rooms.values())))
        return -(-size // ALIGNED) * ALIGNED


def check_servable(config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` if a server with paged attention cannot run this model exactly."""
    if not config.is_causal:
        raise HeadwaterError("A server generates text, and this is an image model; use headwater predict.")
    for name, options in config.mechanisms.items():
        mechanism = resolve(name)
        if isinstance(mechanism, LimitsKernels) and mechanism.list_kernels(options) is not None:
            raise HeadwaterError(
                f"Mechanism {name!r} with its options needs masks or attention weights, which a server's attention "
                "kernels do not provide; serve this model with headwater serve, without --engine."
            )
        if isinstance(mechanism, KeepsState):
            raise HeadwaterError(
                f"Mechanism {name!r} keeps a state in the cache, and a server's cache has raw tokens only; serve this "
                "model with headwater serve, without --engine."
            )
    _check_stages(plan_layers(config))
    layers = [layer_config(config, layer) for layer in range(config.num_hidden_layers)]
    kinds = {(layer.rope_parameters or {}).get("rope_type") for layer in layers if layer.position == "rope"}
    for kind in sorted(kinds & {*FOLLOW_LENGTH}):
        raise HeadwaterError(
            f"The frequencies of rope_type {kind!r} follow the longest sequence of a call, but a server batches many "
            "requests into one call; serve this model with headwater serve, without --engine."
        )


def _check_stages(plans: Sequence[LayerPlan]) -> None:
    """Raise `HeadwaterError` if a mechanism acts between the cache and what heads read."""
    for plan in plans:
        for stage in INSIDE_KERNEL:
            expands = plan.latent_heads and stage is Stage.ATTENDED_KV  # by one mechanism, as `gathering` does it
            acting = plan.at(stage)[1 if expands else 0 :]
            if acting:
                raise HeadwaterError(
                    f"Mechanism {acting[0]!r} acts at the stage {stage.value!r}, between the cache and what heads "
                    "read, which a server's attention kernel does alone; serve this model with headwater serve, "
                    "without --engine."
                )
