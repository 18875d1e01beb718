"""A free map of layers: layer l attends to the keys and values of layer s(l). arXiv 2405.12981, 2405.05254 and others.

    K_l := K_{s(l)}        V_l := V_{s'(l)}        s(l) ≤ l, and s(s(l)) = s(l); the same for s'

    cross_layer   s(l) = l - l mod m: groups of m layers attend to the first one's (cross-layer attention, CLA, arXiv
                  2405.12981; the sharing of MLKV, arXiv 2406.09297); layers of two kinds are counted within their kind
    yoco          s(l) = L/2 for l ≥ L/2: one cache for the upper half of the layers (YOCO, arXiv 2405.05254)
    last          s(l) = the last layer below L - n of l's kind, for the last n layers (Gemma 3n and Gemma 4); if all
                  are of one kind, L - n - 1
    [0, 0, 2, …]  any other, such as the kv_source_layers of Mistral Large 4

What is shared is what the source layer itself attends to: after its own mechanisms, norm and RoPE. A layer that shares
has no projections, no scalars of other mechanisms and no cache for it. Layers at the end that all share run, in a
prompt, for the last token alone (`headwater.config.planner.output_only_from`).

Departures: YOCO's lower half has a window, which the model's `sliding_layers` give it here, or a recurrence, which is
not built. Its shared keys and values have a separate norm; here they belong to layer L/2 and are made from the same
input as that layer's queries, and prefill skips the layers above it. Gemma's kinds differ in window, heads and RoPE;
here `sliding_layers` and `sliding_fields` say so, and `layer_types` may name other kinds for `last`. Mistral Large 4
shares the latent of multi-head latent attention, as `kv_source` does in a model with `mla`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from headwater.config.options import parse_options
from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Mechanism, OptionValues
from headwater.mechanisms.growth_map import GrowthMap
from headwater.mechanisms.shared_options import check_least
from headwater.util.errors import HeadwaterError

LayerMap = Literal["cross_layer", "yoco", "last", "own"]


class KVSource(Mechanism):
    """Gives layers the keys and values of other layers, by a map, without a module."""

    source = "another layer, by a free map"
    order = 80
    paper = "2405.12981"

    class Options:
        keys: LayerMap | list[int] = "cross_layer"  # cross_layer, yoco, last, own, or a layer for each layer
        values: LayerMap | list[int] = "cross_layer"  # the same
        group_size: int = 2  # layers in a group of cross_layer
        num_shared_layers: int | None = None  # for last: how many of the last layers share; default: half
        layer_types: list[str] | None = None  # for last: share within layers of one name; default: by sliding_layers

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        depth, maps = config.num_hidden_layers, (options["keys"], options["values"])
        check_least(cls, options, group_size=1)
        count = options["num_shared_layers"]
        if count not in (None, *range(1, depth)):
            raise HeadwaterError(
                f"Mechanism 'kv_source': num_shared_layers must be from 1 to {depth - 1}, so that a layer comes "
                f"before, not {count}."
            )
        for name in ("num_shared_layers", "layer_types"):
            if options[name] is not None and "last" not in maps:
                raise HeadwaterError(
                    f"Mechanism 'kv_source': {name} is for the map 'last'; set keys or values to 'last', or leave "
                    f"{name} out."
                )
        for name in ("keys", "values", "layer_types"):
            if isinstance(options[name], list) and len(options[name]) != depth:
                raise HeadwaterError(
                    f"Mechanism 'kv_source': {name} has {len(options[name])} elements, and the model has {depth} "
                    "layers; give one for each layer."
                )
        cls._check_kinds(options, config)
        for kind in ("keys", "values"):
            check_sources(kind, cls.list_sources(options, config, kind))

    @classmethod
    def _check_kinds(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        if "last" not in (options["keys"], options["values"]):
            return
        kinds, start = cls.list_kinds(options, config), cls.find_first(options, config)
        for layer in range(start, config.num_hidden_layers):
            if kinds[layer] not in kinds[:start]:
                raise HeadwaterError(
                    f"Mechanism 'kv_source': layer {layer} is of kind {kinds[layer]!r}, and none of the {start} "
                    "layers below those that share is; lower num_shared_layers, or change layer_types."
                )

    @classmethod
    def list_kinds(cls, options: OptionValues, config: HeadwaterConfig) -> list[str]:
        """List the kind of each layer: its name in layer_types, by default whether it has the sliding window."""
        kinds = ("full", "sliding")
        return options["layer_types"] or [kinds[config.slides(layer)] for layer in range(config.num_hidden_layers)]

    @classmethod
    def find_first(cls, options: OptionValues, config: HeadwaterConfig) -> int:
        """The first layer that shares in the map "last"."""
        depth = config.num_hidden_layers
        return depth - (depth // 2 if options["num_shared_layers"] is None else options["num_shared_layers"])

    @classmethod
    def list_sources(cls, options: OptionValues, config: HeadwaterConfig, kind: str) -> list[int]:
        """List for each layer the one whose "keys" or "values" it attends to."""
        layer_map, layers = options[kind], range(config.num_hidden_layers)
        if isinstance(layer_map, list):
            return layer_map
        if layer_map == "last":
            start, kinds = cls.find_first(options, config), cls.list_kinds(options, config)
            last_of_kind = {kinds[layer]: layer for layer in layers[:start]}  # the last layer of each kind
            return [layer if layer < start else last_of_kind[kinds[layer]] for layer in layers]
        if layer_map == "yoco":
            return [min(layer, len(layers) // 2) for layer in layers]
        if layer_map == "own":
            return [*layers]
        sources: list[int] = []
        for layer in layers:
            earlier = [before for before in layers[:layer] if config.slides(before) == config.slides(layer)]
            position = len(earlier) % options["group_size"]
            sources.append(earlier[-position] if position else layer)
        return sources

    @classmethod
    def redirect_heads(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        keys, values = (cls.list_sources(options, config, kind) for kind in ("keys", "values"))
        return [plan.attending(range(len(plan.attends)), k, v) for plan, k, v in zip(plans, keys, values, strict=True)]

    # Capabilities

    @classmethod
    def complete_options(cls, options: OptionValues, config: HeadwaterConfig) -> OptionValues:
        """Name the source of each layer if there are two kinds, which the config that one layer sees does not tell."""
        if config.sliding_layers is None:
            return options
        cls.validate_options(options, config)
        maps = {name: cls.list_sources(options, config, name) for name in ("keys", "values")}
        return options | maps | {"num_shared_layers": None, "layer_types": None}

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        def map_sources(kind: str) -> list[int]:
            sources = cls.list_sources(options, config, kind)
            return [
                layer if sources[old] == old else growth.find_source(layer, sources[old])
                for layer, old in enumerate(growth.layers)
            ]

        if not growth.deepens:
            return options
        return parse_options(cls, {"keys": map_sources("keys"), "values": map_sources("values")})

    @classmethod
    def choose_sources(
        cls, options: OptionValues, config: HeadwaterConfig, similarity: Mapping[str, Tensor]
    ) -> OptionValues:
        """Choose maps in which as many layers of each kind share as in groups of group_size."""
        group, maps = parse_options(cls, options)["group_size"], {}
        for name in (name for name in similarity if name not in options):
            maps[name] = [*range(config.num_hidden_layers)]
            for slides in config.kinds:
                layers = [layer for layer in range(config.num_hidden_layers) if config.slides(layer) == slides]
                nearest = find_nearest(similarity[name][layers][:, layers].tolist(), -(-len(layers) // group))
                for layer, source in zip(layers, nearest, strict=True):
                    maps[name][layer] = layers[source]
        return options | maps

    per_head = per_token = True


def check_sources(kind: str, sources: Sequence[int]) -> None:
    """Raise `HeadwaterError` unless each layer's source is an earlier layer, or itself, with its own tensors."""
    for layer, source in enumerate(sources):
        if not 0 <= source <= layer:
            raise HeadwaterError(
                f"Mechanism 'kv_source': layer {layer} cannot have the {kind} of layer {source}; name a layer from 0 "
                f"to {layer}."
            )
        if sources[source] != source:
            raise HeadwaterError(
                f"Mechanism 'kv_source': layer {layer} cannot have the {kind} of layer {source}, which itself "
                f"shares layer {sources[source]}'s; name layer {sources[source]}."
            )


def find_nearest(similarity: list[list[float]], count: int) -> list[int]:
    """Find the source of each layer if `count` keep their own: the most similar of these below it.

    similarity: of each layer to each one below. Layers give up their own one at a time, each time the one that costs
    the least similarity.
    """

    def list_nearest(owners: list[int]) -> list[int]:
        below = ([source for source in owners if source < layer] for layer in range(len(similarity)))
        return [
            layer if layer in owners else max(sources, key=lambda source: (similarity[layer][source], source))
            for layer, sources in enumerate(below)
        ]

    def measure_total(owners: list[int]) -> float:
        return sum(similarity[layer][source] for layer, source in enumerate(list_nearest(owners)) if layer != source)

    owners = list(range(len(similarity)))
    while len(owners) > count:
        owners = max(([*owners[:i], *owners[i + 1 :]] for i in range(1, len(owners))), key=measure_total)
    return list_nearest(owners)
