"""Plain data of growth: how a larger model comes from a smaller one (`Larger`), and a parameter's axes (`Dim`).

`headwater.growth` makes a `Larger`; each mechanism answers with `GrowsOptions` and `DescribesAxes`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# What one entry of a dimension belongs to: a channel of the residual stream; a query head; a head whose keys or values
# the layer stores; a key/value head of the model; a unit of the feed-forward; an earlier layer; an input or output of a
# linear layer that the module replaces; or none of these.
DimKind = Literal[
    "same", "stream", "q", "k", "v", "kv", "units", "layers", "norm", "output norm", "outputs",
    "linear in", "linear out",
]  # fmt: skip
# What the stream's new channels hold: zero, the mean of the old ones, or any value.
Fill = Literal["zero", "mean", "any"]


class Dim(NamedTuple):
    """One dimension of a parameter, by what its entries belong to.

    Consecutive entries belong to one head if there are several per head. Where a dimension has as many entries in the
    larger model, they are copied in order: for example, they belong to the first channels.

    kind: see `DimKind`. "norm" is the weight or bias of a norm over the stream, "output norm" of one whose result is
        added to the stream, "outputs" a factor on each channel of what is added.
    reads: an input axis (summed over). When an input channel is duplicated, its weight is divided among the copies.
    normed: the input is first divided by its root mean square, without weights.
    entries: of "layers": the layer of each entry, -1 for the embedding; "own" for what the layer itself is given or
        makes; or pairs of anything and one of these.
    zero: new entries of "same" are zero, not as in a fresh model.
    """

    kind: DimKind = "same"
    reads: bool = False
    normed: bool = False
    entries: tuple[Hashable, ...] = ()
    zero: bool = False


SAME = Dim()
WRITES = Dim("stream")
READS = Dim("stream", reads=True)
LINEAR_IN, LINEAR_OUT = Dim("linear in"), Dim("linear out")


def fixed_axes(*axes: Dim) -> Callable[..., tuple[Dim, ...]]:
    """`describe_axes` of a module all of whose parameters have these axes."""
    return lambda module, parameter: axes


def select_heads(
    axes: Sequence[Dim], shape: Sequence[int], heads: Mapping[str, tuple[int, Sequence[int]]]
) -> tuple[int, list[int]] | None:
    """Find the dimension and the entries of some heads in a parameter; None: all of it belongs to each head.

    axes, shape: of the parameter. heads: for "q", "k" and "v", how many there are, and which of them are meant.
    """
    for dim, axis in enumerate(axes):
        count, chosen = heads.get(axis.kind, (0, ()))
        if count and shape[dim] % count == 0:
            size = shape[dim] // count
            return dim, [head * size + entry for head in chosen for entry in range(size)]
    return None


@dataclass(frozen=True)
class Larger:
    """The parts of a larger model in terms of the smaller one's.

    layers: for each new layer, the old one that it is made from. silent: new layers that add nothing at first.
    stream, q, kv, units: for each new channel, query head, key/value head and feed-forward unit, the old one that it
        copies; -1: none.
    fill: what new channels of the stream hold; with "any" nothing new is zero. keeps: whether the function is kept.
    noise: standard deviation of the noise between copies, over that of the old weights.
    """

    layers: tuple[int, ...]
    silent: frozenset[int]
    stream: tuple[int, ...]
    q: tuple[int, ...]
    kv: tuple[int, ...]
    units: tuple[int, ...]
    fill: Fill = "zero"
    keeps: bool = True
    noise: float = 0.0

    @property
    def depth(self) -> int:
        """Layers of the old model."""
        return max(self.layers) + 1

    @property
    def deepens(self) -> bool:
        return len(self.layers) > self.depth

    def extends(self, axis: Literal["stream", "q", "kv", "units"]) -> bool:
        """Whether there are more channels, heads or units than in the old model."""
        return len(getattr(self, axis)) > max(getattr(self, axis)) + 1

    @property
    def widens(self) -> bool:
        """Whether the residual stream gets wider."""
        return self.extends("stream")

    @property
    def pads(self) -> bool:
        """Whether the stream gets channels that copy none."""
        return -1 in self.stream

    @property
    def mean_square_ratio(self) -> float:
        """The ratio of the new stream's mean square to the old one's, if its new channels are zero."""
        return sum(source >= 0 for source in self.stream) / len(self.stream) if self.pads else 1.0

    def first_copy(self, layer: int) -> int:
        """Find an old layer's first copy in the new model. -1, the embedding, stays."""
        return next((new for new, old in enumerate(self.layers) if old == layer and new not in self.silent), -1)

    def list_copies(self, layers: Iterable[int]) -> list[int]:
        """List all new layers made from some old ones."""
        chosen = set(layers)
        return [new for new, old in enumerate(self.layers) if old in chosen]

    def find_source(self, layer: int, old: int) -> int:
        """Find the new layer that gives `layer` what `old` gave the old layer from which `layer` is made.

        Where the function is kept, the old layer itself; else its nearest copy that does not come later.
        """
        if old < 0:
            return -1
        if self.keeps:
            return self.first_copy(old)
        return max(new for new in self.list_copies([old]) if new <= layer)

    def move_entry(self, layer: int, entry: Hashable) -> Hashable:
        """Translate an entry of an old layer's `Dim.entries` for new layer `layer`, which is made from that layer."""
        if isinstance(entry, tuple):
            label, inner = entry
            return label, self.move_entry(layer, inner)
        return self.find_source(layer, entry) if isinstance(entry, int) else entry
