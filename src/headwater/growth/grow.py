"""`grow`: larger models from trained ones, in all directions at once."""

from __future__ import annotations

from headwater.config.text import HeadwaterConfig
from headwater.growth.enlarge import enlarged, enlarged_config
from headwater.growth.methods import NewSizes, ways
from headwater.growth.pairs import KeyInit, Model, TauPolicy, add_pairs, added_config, has_pairs
from headwater.models.quantization import check_full_precision
from headwater.util.errors import HeadwaterError


def grow(
    model: Model,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    *,
    num_hidden_layers: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    method: str = "exact",
    key_init: KeyInit = "zero",
    tau: TauPolicy = "keep",
    freeze: bool = False,
) -> Model:
    """A deeper or wider model, or one with more parameter tokens, made from a trained one.

    num_hidden_layers, hidden_size, intermediate_size, num_attention_heads, num_key_value_heads: the new sizes; None
        keeps one, and key/value heads keep their ratio to the query heads. The width of a head stays.
    method: how the new parts are made from the old (`headwater.growth.methods`): "exact" (default), "lemon",
        "identity", "stack", "interleave", "hypercloning", "net2net", or two joined by "+", as in "stack+hypercloning".
        "stack", "interleave" and "net2net" change the function.
    attention_pairs, ffn_pairs: pairs of each attention projection and feed-forward of a model with parameter tokens.
    key_init, tau, freeze: of new pairs, as in `headwater.growth.pairs.add_pairs`.

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
    sizes = NewSizes(num_hidden_layers, hidden_size, intermediate_size, num_attention_heads, num_key_value_heads)
    check_full_precision(model)
    check_of_pairs(sizes, method, attention_pairs or ffn_pairs, key_init, tau, freeze)
    if adds_pairs(model.config, sizes, attention_pairs, ffn_pairs):
        model = add_pairs(model, attention_pairs, ffn_pairs, key_init=key_init, tau=tau, freeze=freeze)
        if not sizes.given():
            return model
    return enlarged(model, sizes, method)


def adds_pairs(config: HeadwaterConfig, sizes: NewSizes, attention_pairs: int | None, ffn_pairs: int | None) -> bool:
    """Whether growth begins with parameter tokens: also where nothing is asked for, to say so or to unfreeze."""
    asked = attention_pairs is not None or ffn_pairs is not None
    return asked or (has_pairs(config) and not sizes.given())


def check_of_pairs(
    sizes: NewSizes,
    method: str,
    pairs: int | None,
    key_init: str,
    tau: str,
    freeze: bool,
) -> None:
    """Raise `HeadwaterError` for settings of new pairs where there are none, for frozen ones in other sizes, and for a
    method where only pairs are added."""
    ways(method)
    given = {"key_init": key_init != "zero", "tau": tau != "keep", "freeze": freeze}
    if (unread := [name for name, one in given.items() if one]) and pairs is None:
        raise HeadwaterError(f"{unread[0]} is about new pairs; leave it out, or give attention_pairs or ffn_pairs.")
    if method != "exact" and pairs is not None and not sizes.given():
        raise HeadwaterError(f"The method {method!r} is about layers and widths; leave it out, or give a new size.")
    if freeze and sizes.given():
        raise HeadwaterError("freeze trains the new pairs alone; leave it out, or grow layers and widths separately.")


def grown_config(
    config: HeadwaterConfig,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    method: str = "exact",
    key_init: KeyInit = "zero",
    tau: TauPolicy = "keep",
    freeze: bool = False,
    **sizes: int | None,
) -> HeadwaterConfig:
    """The config that `grow` gives a model with this config, without a model. Raises the same errors, but for those
    that only the model's tensors show."""
    asked = NewSizes(**sizes)
    check_of_pairs(asked, method, attention_pairs or ffn_pairs, key_init, tau, freeze)
    if adds_pairs(config, asked, attention_pairs, ffn_pairs):
        config = added_config(config, attention_pairs, ffn_pairs, key_init, freeze)
        if not asked.given():
            return config
    return enlarged_config(config, asked, method)
