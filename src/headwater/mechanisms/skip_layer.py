"""Skip-layer attention (SLA): some heads attend to an earlier layer's keys and values. arXiv 2406.11274, section 3.

    head i of layer l,  n_l skip layers, n_h skip heads of H:
    i <  H - n_h             Att(Q_i^l, K_i^l, V_i^l)
    i ≥  H - n_h, l ≥ n_l    Att(Q_i^l, K_i^{l-n_l}, V_i^{l-n_l})
    i ≥  H - n_h, l <  n_l   Att(Q_i^l, K_i^l, V_i^l)

K^{l-n_l} and V^{l-n_l} are that layer's own projections, after its own mechanisms and RoPE, not what its skip heads
attend to. Where another mechanism lets that layer take keys or values from elsewhere, they are those.

Departures: the printed formula has n_l in the head split, the listing n_h; we follow the listing. Keys and values that
no head attends to (those of the skip heads in the last layers) are not built: the same function with fewer parameters,
FLOPs and cache bytes, 13/16 of vanilla's cache at ¾ of 12 layers and heads. Our addition is `source: alias`, where a
skip head attends to whatever the source layer's head attends to, so that only the first n_l layers store skip heads.
"""

from typing import Literal

from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Mechanism, OptionValues
from headwater.mechanisms.growth_map import GrowthMap
from headwater.util.errors import HeadwaterError


class SkipLayer(Mechanism):
    """Takes the last heads of keys and values from an earlier layer, without a module: the plan is enough.

    Attention calls its kernel once for the layer's own heads and once for the skip heads: no cache is concatenated.
    """

    source = "an earlier layer, for some heads"
    order = 90

    class Options:
        layers: int | None = None  # n_l; default: ¾ of L; 0 is off
        heads: int | None = None  # n_h, in query heads; default: ¾ of H
        source: Literal["projection", "alias"] = "projection"  # alias: what the source's skip heads attend to

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        depth, heads = config.num_hidden_layers, config.num_attention_heads
        groups = heads // config.num_key_value_heads
        distance = cls.find_distance(options, config)
        if not 0 <= distance < depth:
            raise HeadwaterError(
                f"Mechanism 'skip_layer': layers must be less than the model's {depth} layers (0 is off), not "
                f"{distance}."
            )
        count = options["heads"]
        if count is not None and not 0 <= count <= heads:
            raise HeadwaterError(f"Mechanism 'skip_layer': heads must be from 0 to the model's {heads}, not {count}.")
        if count is not None and count % groups:
            raise HeadwaterError(
                f"Mechanism 'skip_layer': {groups} query heads share a key/value head, so heads must be a multiple of "
                f"{groups}, not {count}."
            )
        if config.sliding_window is not None and cls.count_skipping(options, config) and distance:
            raise HeadwaterError(
                "Mechanism 'skip_layer' attends to the whole history of another layer, which a sliding window's cache "
                "does not keep; remove sliding_window."
            )

    @classmethod
    def find_distance(cls, options: OptionValues, config: HeadwaterConfig) -> int:
        """Return how many layers back the skip heads attend; by default ¾ of the depth, rounded down."""
        return 3 * config.num_hidden_layers // 4 if options["layers"] is None else options["layers"]

    @classmethod
    def count_skipping(cls, options: OptionValues, config: HeadwaterConfig) -> int:
        """Count the key/value heads that skip; by default ¾ of all heads, rounded down."""
        groups = config.num_attention_heads // config.num_key_value_heads
        heads = options["heads"]
        return (3 * config.num_attention_heads // 4 if heads is None else heads) // groups

    @classmethod
    def _grow_distance(cls, distance: int, growth: GrowthMap) -> int:
        """Find the distance with the same meaning in the larger model. Raises `HeadwaterError` if there is none."""
        copies = [growth.first_copy(layer) for layer in range(growth.old_depth)]
        distances = {copies[layer] - copies[layer - distance] for layer in range(distance, growth.old_depth)}
        if distance and (len(distances) > 1 or copies[distance - 1] >= min(distances)):
            raise HeadwaterError(
                f"Mechanism 'skip_layer' attends {distance} layers back, and added layers would change some of these "
                f"distances; add {growth.old_depth} layers or a multiple, or use the method stack."
            )
        return distances.pop() if distance else 0

    @classmethod
    def stops_redirection(cls, options: OptionValues) -> bool:
        return options["source"] != "alias"

    @classmethod
    def redirect_heads(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        distance = cls.find_distance(options, config)
        total = config.num_key_value_heads
        skipping_heads = range(total - cls.count_skipping(options, config), total)
        new = list(plans)
        for layer in range(distance, len(plans)) if distance else ():
            new[layer] = plans[layer].attending(skipping_heads, layer - distance, layer - distance)
        return new

    # Capabilities

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        skipping, old = cls.count_skipping(options, config), config.num_key_value_heads
        first_skipping = next((new for new, head in enumerate(growth.kv) if head >= old - skipping), len(growth.kv))
        queries = (len(growth.kv) - first_skipping) * (len(growth.q) // len(growth.kv))
        distance = cls.find_distance(options, config)
        layers = cls._grow_distance(distance, growth) if growth.preserves_function else distance
        return options | {"layers": layers, "heads": queries}

    per_head = per_token = True
