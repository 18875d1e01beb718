"""`grow`: larger models from trained ones, in all directions at once."""

from typing import Any

from headwater.config.text import HeadwaterConfig
from headwater.growth.enlarge import enlarge_model, plan_growth
from headwater.growth.methods import GrowthOptions
from headwater.growth.parameter_tokens import Model, add_pairs, added_config, has_pairs
from headwater.models.quantization import check_full_precision


def grow(model: Model, attention_pairs: int | None = None, ffn_pairs: int | None = None, **fields: Any) -> Model:
    """A deeper or wider model, or one with more parameter tokens, made from a trained one.

    fields: the others of `headwater.growth.GrowthOptions`, such as num_hidden_layers, hidden_size and method.

    The result is on the model's device, in its dtype and in its mode; the model does not change. Raises
    `HeadwaterError` for sizes that shrink or that the method cannot give, and for a mechanism that it does not fit.

        >>> from headwater import HeadwaterForCausalLM, preset
        >>> from headwater.growth import grow
        >>> sizes = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=256)
        >>> pattention = {"pattention": {"attention_pairs": 7, "ffn_pairs": 28}}
        >>> model = HeadwaterForCausalLM(preset("tokenformer-124m", **sizes, mechanisms=pattention))
        >>> grown = grow(model, attention_pairs=1000, num_hidden_layers=3)
        >>> grown.config.num_hidden_layers, grown.config.mechanisms["pattention"]["attention_pairs"]
        (3, 1000)
    """
    options = GrowthOptions(attention_pairs, ffn_pairs, **fields)
    check_full_precision(model)
    if adds_pairs(model.config, options):
        model = add_pairs(model, options)
        if not options.sizes:
            return model
    return enlarge_model(model, options)


def adds_pairs(config: HeadwaterConfig, options: GrowthOptions) -> bool:
    """Whether growth begins with parameter tokens. Also true if nothing is to grow, for the error or to unfreeze."""
    has_counts = options.attention_pairs is not None or options.ffn_pairs is not None
    return has_counts or (has_pairs(config) and not options.sizes)


def grown_config(
    config: HeadwaterConfig, attention_pairs: int | None = None, ffn_pairs: int | None = None, **fields: Any
) -> HeadwaterConfig:
    """Plan the config that `grow` gives a model with this config, without a model. Raises the same errors, except those
    that only the model's tensors reveal."""
    options = GrowthOptions(attention_pairs, ffn_pairs, **fields)
    if adds_pairs(config, options):
        config = added_config(config, options)
        if not options.sizes:
            return config
    return plan_growth(config, options)[1]
