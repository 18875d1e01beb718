"""Map from a larger model to the smaller one that it is made from (`GrowthMap`), and a parameter's axes (`Dim`).

`headwater.growth` makes a `GrowthMap`. Mechanisms say how they grow by `GrowsOptions` and `DescribesAxes`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# What one entry along an axis belongs to: a channel of the residual stream; a query head; a head whose keys or values
# the layer stores; a key/value head of the model; a unit of the feed-forward; an earlier layer; an input or output of a
# linear layer that the module replaces; or none of these.
DimKind = Literal[
    "same", "stream", "q", "k", "v", "kv", "units", "layers", "norm", "output norm", "outputs",
    "linear in", "linear out",
]  # fmt: skip
# What channels of the stream without a source hold: zero, the mean of the old ones, or values as in a fresh model.
Padding = Literal["zero", "mean", "fresh"]


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
class GrowthMap:
    """Map from the layers, channels, heads and units of a larger model to those of the smaller one.

    layers: for each new layer, the old one that it copies. identity_layers: new layers that add nothing at first.
    stream, q, kv, units: for each new channel, query head, key/value head and feed-forward unit, the old one that it
        copies; -1: none.
    padding: see `Padding`; with "fresh" nothing new is zero. preserves_function: whether the logits stay the same.
    noise: standard deviation of the noise between copies, over that of the old weights.
    """

    layers: tuple[int, ...]
    identity_layers: frozenset[int]
    stream: tuple[int, ...]
    q: tuple[int, ...]
    kv: tuple[int, ...]
    units: tuple[int, ...]
    padding: Padding
    preserves_function: bool
    noise: float

    @property
    def old_depth(self) -> int:
        return max(self.layers) + 1

    @property
    def deepens(self) -> bool:
        return len(self.layers) > self.old_depth

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
    def zero_init(self) -> bool:
        """Whether what copies nothing starts at zero (or channels at the mean), not as in a fresh model."""
        return self.padding != "fresh"

    @property
    def mean_square_ratio(self) -> float:
        """Ratio of the new stream's mean square to the old one's, if its new channels are zero."""
        return sum(source >= 0 for source in self.stream) / len(self.stream)

    def first_copy(self, layer: int) -> int:
        """Find the first copy of an old layer; -1, the embedding, stays."""
        return next((new for new in self.list_copies([layer]) if new not in self.identity_layers), -1)

    def list_copies(self, layers: Iterable[int]) -> list[int]:
        """List all copies of some old layers."""
        sources = set(layers)
        return [new for new, old in enumerate(self.layers) if old in sources]

    def find_source(self, layer: int, old: int) -> int:
        """Find the copy of layer `old` that `layer` reads where its own source read `old`.

        This is the first copy if the function is preserved, else the nearest one that does not come later.
        """
        if old < 0:
            return -1
        if self.preserves_function:
            return self.first_copy(old)
        return max(new for new in self.list_copies([old]) if new <= layer)

    def map_entry(self, layer: int, entry: Hashable) -> Hashable:
        """Map an entry of `Dim.entries` of the source of `layer` to an entry of `layer`."""
        if isinstance(entry, tuple):
            label, inner = entry
            return label, self.map_entry(layer, inner)
        return self.find_source(layer, entry) if isinstance(entry, int) else entry
