"""SVFormer: all layers share the first layer's values. arXiv 2410.17897.

    U_l = A_l·V_0

Layers l ≥ 1 have no value projection, and the cache stores values once: (L + 1) / 2L of vanilla's bytes. The layers
share layer 0's final values, after its own mechanisms (such as a KV shift).

Departures: none by default. The paper's ablations are options: another source layer, some layers only, keys instead of
values.
"""

from typing import Literal

from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Mechanism, OptionValues
from headwater.mechanisms.growth_map import GrowthMap
from headwater.mechanisms.shared_options import check_receivers, grow_receivers, list_receivers


class SVFormer(Mechanism):
    """Gives all layers one layer's values, without a module. Layers whose values no head reads do not project any."""

    source = "the first layer's values, instead of a layer's own"
    order = 70

    class Options:
        share: Literal["values", "keys", "both"] = "values"  # what the layers share
        source: int = 0  # the layer whose values they share
        layers: list[int] | None = None  # layers that share; default: all after the source

    validate_options = classmethod(check_receivers)

    @classmethod
    def redirect_heads(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        keys, values = options["share"] != "values", options["share"] != "keys"
        new = list(plans)
        for layer in list_receivers(options, config):
            source, everything = options["source"], range(len(plans[layer].attends))
            new[layer] = plans[layer].attending(everything, source if keys else None, source if values else None)
        return new

    # Capabilities

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        return grow_receivers(options, list_receivers(options, config), growth)

    per_head = per_token = True
