"""Layers with and without a sliding window: the config of each layer, and its kind of cache.

`config` is always a `HeadwaterConfig`, which imports this file.
"""

import copy
from typing import Any

from headwater.config.rope import complete_rope
from headwater.util.errors import HeadwaterError, check_known, shown

# Far above any real model. Planning lists every key/value head of every layer and would never finish with more.
MOST = {"num_hidden_layers": 4096, "num_attention_heads": 4096, "num_key_value_heads": 4096}
MOST_ANYWHERE = 2**40
# Fields that may differ between layers.
_HEADS = "num_attention_heads", "num_key_value_heads", "head_dim"
_FIELDS = *_HEADS, "rope_parameters"
# Kinds of cache layers, without and with a sliding window. transformers' own hold ordinary keys and values; those in
# models/cache.py hold any set of heads, and raw tokens.
_ORDINARY = "full_attention", "sliding_attention"
_OWN = "headwater_attention", "headwater_sliding_attention"


def layer_config(config: Any, layer: int) -> Any:
    """The config of one layer: a copy with the layer's own fields where layers differ, otherwise `config` itself."""
    if config.sliding_layers is None:
        return config
    fields = (config.sliding_fields or {}) if config.slides(layer) else {"sliding_window": None}
    view = copy.copy(config)
    vars(view).update(fields, sliding_layers=None, sliding_fields=None)
    return view


def cache_types(config: Any, windows_are_ordinary: bool) -> list[str]:
    """List the kind of cache layer that each layer needs, from which transformers builds caches (`layer_types`).

    windows_are_ordinary: the layers with a sliding window all cache the usual keys and values, in transformers' own
    layers. Not in a mixture: layers that attend to each other need the same slots, and transformers' static one rolls.
    """
    is_ordinary = config.materialise, config.materialise or windows_are_ordinary
    kinds = [(_ORDINARY if is_ordinary[slides] else _OWN)[slides] for slides in (False, True)]
    return [kinds[config.slides(layer)] for layer in range(config.num_hidden_layers)]


def complete_sliding(config: Any) -> None:
    """Check `sliding_layers` and `sliding_fields`, and fill in their defaults. Raises `HeadwaterError`."""
    if config.sliding_layers is not None:
        _complete_layers(config, config.sliding_layers)
    if not config.sliding_fields:
        config.sliding_fields = None
        return
    if config.sliding_layers is None:
        raise HeadwaterError(
            "sliding_fields apply only to sliding_layers, which are not set; set sliding_layers, or change the "
            "fields for all layers."
        )
    for name in config.sliding_fields:
        check_known("sliding_fields has no field", name, _FIELDS)
    inside = layer_config(config, config.sliding_layers[0])
    for name in _HEADS:
        size = getattr(inside, name)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST.get(name, MOST_ANYWHERE):
            raise HeadwaterError(f"sliding_fields.{name} must be a whole number above 0, not {shown(size)}.")
    inside.check_heads()
    if inside.rope_parameters is not None and not isinstance(inside.rope_parameters, dict):
        raise HeadwaterError(f"sliding_fields.rope_parameters must be a mapping, not {shown(inside.rope_parameters)}.")
    if config.position == "rope":
        complete_rope(inside)
        if "rope_parameters" in config.sliding_fields:
            config.sliding_fields = config.sliding_fields | {"rope_parameters": inside.rope_parameters}
        inside.check_rope()
    elif "rope_parameters" in config.sliding_fields:
        raise HeadwaterError(f"position {config.position!r} uses no rope_parameters; leave them out of sliding_fields.")


def _complete_layers(config: Any, layers: list[int]) -> None:
    config.sliding_layers = layers = sorted(set(layers))
    if config.sliding_window is None or not layers:
        raise HeadwaterError("sliding_layers names the layers with a sliding_window; set both, or neither.")
    if not 0 <= layers[0] <= layers[-1] < config.num_hidden_layers:
        raise HeadwaterError(f"sliding_layers must be between 0 and {config.num_hidden_layers - 1}, not {layers}.")
    if len(layers) == config.num_hidden_layers:
        config.sliding_layers = None
