"""The plan of a layer as plain data, `LayerPlan`: what the layer projects, stores, exports and reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, get_args

from headwater.util.errors import HeadwaterError, check_known

SourceKind = Literal["raw", "local", "bank", "probabilities", "stream", "shared"]
Part = Literal["q", "k", "v"]
# What the cache can keep raw: queries, keys or values; tensors as wide as the residual stream; each of attention's
# inputs; the inputs of the feed-forward's activation; token ids.
TailPart = Literal["q", "k", "v", "x", "input", "gate", "up", "id"]
# An index that selects some of a tensor's heads. None selects all of them in order.
Heads = slice | list[int] | None


class Stage(Enum):
    """Stages at which a mechanism may act, in the order of the forward pass; a value is its method of `Mechanism`."""

    EMBEDDING = "transform_embedding"
    RESIDUAL = "update_residual"
    BLOCK_INPUT = "transform_block_input"
    ATTENTION_INPUTS = "split_attention_inputs"
    ATTENTION_INPUT = "transform_attention_input"
    PROJECTIONS = "transform_projections"
    QKV = "transform_qkv"
    ATTENDED_KV = "transform_attended_kv"
    ADDED_KEY_VALUES = "add_key_values"
    ATTENTION_WEIGHTS = "transform_attention_weights"
    HEAD_OUTPUTS = "transform_head_outputs"
    ATTENTION_OUTPUT = "transform_attention_output"
    FEED_FORWARD_INPUT = "transform_feed_forward_input"
    FEED_FORWARD_HIDDEN = "transform_feed_forward_hidden"
    FEED_FORWARD_OUTPUT = "transform_feed_forward_output"
    BLOCK_OUTPUT = "transform_block_output"

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Stage:
        """The stage of a method, such as `Mechanism.transform_qkv`. Raises `HeadwaterError` for any other method."""
        stages = {stage.value: stage for stage in cls}
        name = getattr(method, "__name__", str(method))
        check_known("There is no stage", name, stages)
        return stages[name]


# Stages inside attention. The others belong to the block around it.
ATTENTION_STAGES = (
    Stage.PROJECTIONS,
    Stage.QKV,
    Stage.ATTENDED_KV,
    Stage.ADDED_KEY_VALUES,
    Stage.ATTENTION_WEIGHTS,
    Stage.HEAD_OUTPUTS,
)
BLOCK_STAGES = tuple(stage for stage in Stage if stage not in ATTENTION_STAGES)


class Source(NamedTuple):
    """A tensor of an earlier layer that a later layer reads. d head width, T new tokens, S all tokens.

    kind: "raw"           part q, k or v as projected, [B, heads, T, d];
          "local"         v after the mechanisms, [B, heads, T, d];
          "bank"          k or v as attended to, the whole history, [B, heads, S, d];
          "probabilities" the attention weights, part "a", [B, H, T, S];
          "stream"        a block's output, part "x", [B, T, D]; layer -1 is the embedding;
          "shared"        what the mechanism named by `part` gives to all layers; layer -1.
    """

    kind: SourceKind
    part: str
    layer: int


# The embedding, after layer 0's mechanisms at `Stage.EMBEDDING` if it has any.
EMBEDDING = Source("stream", "x", -1)

# The tensors that a layer computes itself, in this order. raw: as projected. local: the call's tokens after
# `Stage.QKV`. bank: what heads attend to, cached tokens included.
LAYER_TENSORS: tuple[tuple[str, str], ...] = (
    ("raw", "q"),
    ("raw", "k"),
    ("raw", "v"),
    ("local", "v"),
    ("bank", "k"),
    ("bank", "v"),
    ("probabilities", "a"),
)


class Cost(NamedTuple):
    """Cost that a mechanism, or a module in place of a linear layer, adds to a layer.

    parameters: trainable numbers.
    flops: matmul FLOPs of the forward pass per token, 2 per multiply-add; elementwise operations are not counted.
    saved: numbers per token that autograd keeps for the backward pass.
    unread_parameters: parameters that a token does not read, in tables from which it reads only a few rows.
    """

    parameters: int = 0
    flops: int = 0
    saved: int = 0
    unread_parameters: int = 0


class Attends(NamedTuple):
    """The layers whose keys and whose values one head attends to."""

    k: int
    v: int


class HeadGroup(NamedTuple):
    """Consecutive key/value heads, `size` from `first` on, that attend to layers k and v, in one call of the kernel.

    k_heads, v_heads: indices of the group's heads among those that these layers store; None for all.
    """

    first: int
    size: int
    k: int
    v: int
    k_heads: Heads = None
    v_heads: Heads = None


@dataclass(frozen=True)
class LayerPlan:
    """Plan of layer `index`: what it projects, stores and reads.

    attends: for each of the model's K key/value heads, whose keys and values it attends to.
    value_part: which of this layer's tensors heads read as its values: its values, its keys, or, in a layer that caches
        a latent, the positions of the tokens.
    latent_heads: width of the latent that the layer caches, in heads; 0: it caches keys and values. See
        `caching_latent`.
    k_heads, v_heads: the heads whose keys and values this layer projects and stores: those that are attended to, here
        or in a later layer.
    groups: `attends` as calls of the kernel.
    tails: (part, tokens, mechanism): raw queries, keys, values ("q", "k", "v"), tokens as wide as the stream ("x"),
        each of attention's inputs ("input"), what goes into the feed-forward's activation ("gate", "up"), or tokens'
        ids ("id", int64), kept next to the cache for a mechanism that looks back.
    reads: tensors of earlier layers this layer needs, in the order they are passed.
    exports: tensors of this layer that later layers read, in the order they are returned.
    acts: (stage, mechanism) in order of application.
    all_layers: the plans of all layers of the model, without this field; empty while the plans are built.
    """

    index: int
    attends: tuple[Attends, ...]
    value_part: Literal["k", "v", "position"] = "v"
    latent_heads: int = 0
    k_heads: tuple[int, ...] = ()
    v_heads: tuple[int, ...] = ()
    groups: tuple[HeadGroup, ...] = ()
    tails: tuple[tuple[TailPart, int, str], ...] = ()
    reads: tuple[Source, ...] = ()
    exports: tuple[Source, ...] = ()
    acts: tuple[tuple[Stage, str], ...] = ()
    all_layers: tuple[LayerPlan, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def vanilla(cls, index: int, heads: int) -> LayerPlan:
        """A layer that attends to its own keys and values and stores all of them."""
        everything = tuple(range(heads))
        groups = (HeadGroup(0, heads, index, index),)
        return cls(index, (Attends(index, index),) * heads, k_heads=everything, v_heads=everything, groups=groups)

    def attending(self, heads: Iterable[int], k: int | None = None, v: int | None = None) -> LayerPlan:
        """Let `heads` attend to the keys of layer `k` and the values of layer `v`; None: as before."""
        chosen = set(heads)
        return replace(
            self,
            attends=tuple(
                Attends(old.k if k is None else k, old.v if v is None else v) if head in chosen else old
                for head, old in enumerate(self.attends)
            ),
        )

    def reading_keys(self) -> LayerPlan:
        """Let heads that attend to this layer's values read its keys instead."""
        return replace(self, value_part="k")

    def caching_latent(self, heads: int) -> LayerPlan:
        """Let this layer cache a latent as wide as `heads` heads in place of its keys, before RoPE, and with RoPE the
        positions of tokens in place of its values. A mechanism at `Stage.ATTENDED_KV` makes keys and values of them."""
        return replace(self, value_part="position", latent_heads=heads)

    def reading(self, *sources: Source) -> LayerPlan:
        """Return this plan with `sources` added to `reads`. Raises `HeadwaterError` for one that no layer has."""
        for source in sources:
            check_known(f"Layer {self.index} cannot read a source of kind", source.kind, get_args(SourceKind))
            if not -1 <= source.layer <= self.index:
                raise HeadwaterError(
                    f"Layer {self.index} cannot read {source.part!r} of layer {source.layer}; name an earlier layer, "
                    "or -1 for the embedding."
                )
        new = tuple(s for s in dict.fromkeys(sources) if s not in self.reads)
        return replace(self, reads=self.reads + new)

    def acting(
        self, mechanism: Any, method: Callable[..., Any], tails: Iterable[tuple[TailPart, int]] = ()
    ) -> LayerPlan:
        """Return this plan with a mechanism acting at the stage of `method`, as in `plan.acting(cls,
        cls.transform_qkv)`.

        tails: the raw tokens that the cache must keep for it, as (part, tokens).
        Raises `HeadwaterError` for a part that a cache cannot keep.
        """
        stage, name = Stage.of(method), mechanism.registered_name()
        for part, _ in tails:
            check_known(f"Mechanism {name!r}: a cache keeps no tail", part, get_args(TailPart))
        letter: TailPart | None = "input" if stage is Stage.ATTENTION_INPUT else None
        new_tails = tuple((letter or part, tokens, name) for part, tokens in tails)
        return replace(self, acts=(*self.acts, (stage, name)), tails=(*self.tails, *new_tails))

    def within(self, stages: Iterable[Stage]) -> LayerPlan:
        """Return this plan with only the mechanisms that act at some stages."""
        chosen = set(stages)
        return replace(self, acts=tuple((stage, name) for stage, name in self.acts if stage in chosen))

    def at(self, *stages: Stage) -> tuple[str, ...]:
        """The mechanisms that act at any of `stages`, in order of application."""
        return tuple(dict.fromkeys(name for stage, name in self.acts if stage in stages))

    def slot(self, source: Source) -> int:
        """Position at which the layer's modules find a tensor: first what the layer reads, then `LAYER_TENSORS`.

        Numbers relative to the layer, so that layers of one kind share a compiled graph. Raises `KeyError` for others.
        """
        if source in self.reads:
            return self.reads.index(source)
        if source.layer == self.index and source[:2] in LAYER_TENSORS:
            return len(self.reads) + LAYER_TENSORS.index(source[:2])
        raise KeyError(f"Layer {self.index} does not read {source}; add it to the plan with `reading`.")

    @property
    def inputs(self) -> tuple[Part, ...]:
        """The projections with a separate input: ("q",), one input for all, unless a mechanism acts at
        `Stage.ATTENTION_INPUTS`; then also "k" and "v", if the layer projects any."""
        if not self.at(Stage.ATTENTION_INPUTS):
            return ("q",)
        heads: tuple[tuple[Part, tuple[int, ...]], ...] = (("k", self.k_heads), ("v", self.v_heads))
        return ("q", *(letter for letter, stored in heads if stored))

    @property
    def stored_values(self) -> tuple[int, ...]:
        """The heads that this layer stores of what is read as its values."""
        return self.k_heads if self.value_part == "k" else self.v_heads

    @property
    def has_keys(self) -> bool:
        """Whether the layer projects keys, or makes them from a latent."""
        return bool(self.k_heads or self.latent_heads)

    def stores_positions(self, config: Any) -> bool:
        """Whether this layer stores positions beside a latent: of keys that get RoPE when they are made from it."""
        return bool(self.latent_heads and self.k_heads) and config.position == "rope"

    @property
    def lookback(self) -> int:
        """The most tokens that a mechanism of this layer looks back."""
        return max((length for _, length, _ in self.tails), default=0)

    @property
    def leaves_nothing(self) -> bool:
        """True if later tokens need nothing that this layer computes for a token: no keys, values or raw tokens."""
        return not (self.k_heads or self.v_heads or self.tails)

    @property
    def is_ordinary(self) -> bool:
        """True if this layer caches the usual K and V, so that any cache implementation works."""
        everything = tuple(range(len(self.attends)))
        return self.k_heads == everything and self.v_heads == everything and not self.tails


def choose_heads(heads: Sequence[int], stored: Sequence[int]) -> Heads:
    """Index of `heads` among the `stored` ones; None for all of them, in order.

    Raises `ValueError` if one of them is missing.
    """
    indices = [stored.index(head) for head in heads]
    if indices == list(range(len(stored))):
        return None
    in_a_row = bool(indices) and indices == list(range(indices[0], indices[0] + len(indices)))
    return slice(indices[0], indices[-1] + 1) if in_a_row else indices
