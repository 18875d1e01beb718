"""A free map of layers: layer l attends to the keys and values of layer s(l). arXiv 2405.12981, 2405.05254 and others.

    K_l := K_{s(l)}        V_l := V_{s'(l)}        s(l) ≤ l, and s(s(l)) = s(l); the same for s'

    cross_layer   s(l) = l - l mod m: groups of m layers attend to the first one's (cross-layer attention, CLA, arXiv
                  2405.12981; the sharing of MLKV, arXiv 2406.09297)
    yoco          s(l) = L/2 for l ≥ L/2: one cache for the upper half of the layers (YOCO, arXiv 2405.05254)
    last          s(l) = L - n - 1 for the last n layers (Gemma 3n and Gemma 4)
    [0, 0, 2, …]  any other, such as the kv_source_layers of Mistral Large 4

What is shared is what the source layer itself attends to: after its own mechanisms, norm and RoPE. A layer that shares
has no projections, no scalars of other mechanisms and no cache for it.

Departures: YOCO's lower half has a window or a recurrence, and here the layers are alike; its prefill, which skips the
upper half, is not built. Gemma shares among layers of one kind, with or without a window; `last` is for models of one
kind, and a list of layers for others.
Mistral Large 4 shares the latent of multi-head latent attention, which headwater does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub.dataclasses import strict
from torch import Tensor

from headwater.errors import HeadwaterError
from headwater.mechanisms.base import Mechanism
from headwater.plan import LayerPlan

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig

LayerMap = Literal["cross_layer", "yoco", "last", "own"]


class KVSource(Mechanism):
    """Keys and values of other layers, by a map: a module without parameters.

        K_l := K_{keys[l]}        V_l := V_{values[l]}

    Cross-layer attention, arXiv 2405.12981, and other maps; departures at the head of this file.

    Args
        keys, values: for each layer, the layer whose keys and whose values it attends to.

        >>> import torch
        >>> from headwater.mechanisms import KVSource
        >>> source = KVSource(keys=[0, 0, 2, 2], values=[0, 1, 2, 3])
        >>> ks, vs = list(torch.randn(4, 2, 4, 16, 64)), list(torch.randn(4, 2, 4, 16, 64))  # of 4 layers
        >>> k, v = source(3, ks, vs)
        >>> k is ks[2], v is vs[3]
        (True, True)

    In a headwater model it needs no module: the plan says what each head attends to, and layers project and store only
    keys and values that somebody attends to.
    """

    paper = "2405.12981"
    per_head = {}

    @strict
    @dataclass
    class Options:
        keys: LayerMap | list[int] = "cross_layer"
        values: LayerMap | list[int] = "cross_layer"
        every: int = 2
        last: int | None = None

    def __init__(self, keys: Sequence[int], values: Sequence[int]) -> None:
        super().__init__()
        for part, sources in (("keys", keys), ("values", values)):
            check(part, sources)
        self.keys, self.values = tuple(keys), tuple(values)

    def forward(self, layer: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """keys and values by layer, each [B, K, S, d] -> what `layer` attends to."""
        return keys[self.keys[layer]], values[self.values[layer]]

    # In a headwater model

    @classmethod
    def validate(cls, options: dict[str, Any], config: "HeadwaterConfig") -> None:
        depth = config.num_hidden_layers
        if options["every"] < 1:
            raise HeadwaterError(f"Mechanism 'kv_source': every must be at least 1, not {options['every']}.")
        if options["last"] is not None and not 1 <= options["last"] < depth:
            raise HeadwaterError(
                f"Mechanism 'kv_source': last must be from 1 to {depth - 1}, so that a layer comes before, not "
                f"{options['last']}."
            )
        for part in ("keys", "values"):
            given = options[part]
            if isinstance(given, list) and len(given) != depth:
                raise HeadwaterError(
                    f"Mechanism 'kv_source': {part} names the sources of {len(given)} layers, and the model has "
                    f"{depth}; name one for each, a layer that shares nothing as its own."
                )
            check(part, cls.sources(options, config, part))

    @classmethod
    def sources(cls, options: dict[str, Any], config: "HeadwaterConfig", part: str) -> list[int]:
        """For each layer, the one whose "keys" or "values" it attends to."""
        given, depth = options[part], config.num_hidden_layers
        if isinstance(given, list):
            return given
        last = depth // 2 if options["last"] is None else options["last"]
        shared = {"yoco": depth // 2, "last": max(0, depth - last - 1)}
        if given in shared:
            return [min(layer, shared[given]) for layer in range(depth)]
        return [layer - (layer % options["every"] if given == "cross_layer" else 0) for layer in range(depth)]

    @classmethod
    def share(cls, options: dict[str, Any], config: "HeadwaterConfig", plans: list[LayerPlan]) -> list[LayerPlan]:
        keys, values = (cls.sources(options, config, part) for part in ("keys", "values"))

        def amend(plan: LayerPlan) -> LayerPlan:
            # None: as it is, which may be what another mechanism has made of it.
            k, v = (source if source != plan.index else None for source in (keys[plan.index], values[plan.index]))
            return plan.attending(range(len(plan.attends)), k, v)

        return [amend(plan) for plan in plans]


def check(part: str, sources: Sequence[int]) -> None:
    """Raise `HeadwaterError` unless every layer's source comes before it, or is itself, and has what it gives."""
    for layer, source in enumerate(sources):
        if not 0 <= source <= layer:
            raise HeadwaterError(
                f"Mechanism 'kv_source': layer {layer} cannot have the {part} of layer {source}; name a layer from 0 "
                f"to {layer}."
            )
        if sources[source] != source:
            raise HeadwaterError(
                f"Mechanism 'kv_source': layer {layer} cannot have the {part} of layer {source}, which itself has "
                f"those of layer {sources[source]}; name layer {sources[source]}."
            )
