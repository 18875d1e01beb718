"""Options that several mechanisms have: `source`, `layers` (which receive, or act), `channels` and least values.

Their checks, their values in a larger model, and those with which a mechanism changes nothing.
"""

from collections.abc import Iterable
from typing import Any

from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Mechanism, OptionValues
from headwater.mechanisms.growth_map import GrowthMap
from headwater.util.errors import HeadwaterError


def list_receivers(options: OptionValues, config: HeadwaterConfig) -> list[int]:
    """List the receiving layers: the option `layers`, by default all layers after the option `source` (else 0)."""
    if options["layers"] is None:
        return list(range(options.get("source", 0) + 1, config.num_hidden_layers))
    return sorted(set(options["layers"]))


def check_receivers(mechanism: type[Mechanism], options: OptionValues, config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` unless the source and the receiving layers exist, and come in this order."""
    name, depth = mechanism.registered_name(), config.num_hidden_layers
    source, layers = options.get("source", 0), options["layers"]
    if not 0 <= source < depth:
        raise HeadwaterError(f"Mechanism {name!r}: source must be a layer from 0 to {depth - 1}, not {source}.")
    if layers is not None and not layers:
        raise HeadwaterError(f"Mechanism {name!r}: layers is empty; leave it out for all layers after the source.")
    if layers is None and source == depth - 1:
        raise HeadwaterError(
            f"Mechanism {name!r}: no layer comes after layer {source} to receive from it; add layers to the model, or "
            f"remove {name}."
        )
    for layer in layers or []:
        if not source < layer < depth:
            raise HeadwaterError(
                f"Mechanism {name!r}: layer {layer} cannot receive from layer {source}; layers must be between "
                f"{source + 1} and {depth - 1}."
            )


def is_chosen(layer: int, options: OptionValues) -> bool:
    """Whether the option `layers` of a mechanism that may act in every layer names this one; None names all."""
    return options["layers"] is None or layer in options["layers"]


def check_layers(mechanism: type[Mechanism], options: OptionValues, config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` unless every layer of the option `layers` exists, and there is one."""
    name, depth, layers = mechanism.registered_name(), config.num_hidden_layers, options["layers"]
    if layers is None:
        return
    if not layers:
        raise HeadwaterError(f"Mechanism {name!r}: layers is empty; name a layer, or leave it out.")
    for layer in layers:
        if not 0 <= layer < depth:
            raise HeadwaterError(f"Mechanism {name!r}: layers must be between 0 and {depth - 1}, not {layer}.")


def list_acting_layers(mechanism: type[Mechanism], plans: Iterable[LayerPlan]) -> list[int]:
    """List the layers in which a mechanism acts."""
    return [plan.index for plan in plans if any(name == mechanism.registered_name() for _, name in plan.acts)]


def check_least(mechanism: type[Mechanism], options: OptionValues, **least: int) -> None:
    """Raise `HeadwaterError` where an option that is set is below its least value."""
    for name, number in least.items():
        if options[name] is not None and options[name] < number:
            raise HeadwaterError(
                f"Mechanism {mechanism.registered_name()!r}: {name} must be at least {number}, not {options[name]}."
            )


def check_channels(mechanism: type[Mechanism], options: OptionValues, config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` unless the model has the `channels` that a gate reads, the first ones."""
    name, channels = mechanism.registered_name(), options["channels"]
    if not 1 <= channels <= config.hidden_size:
        raise HeadwaterError(
            f"Mechanism {name!r}: channels must be from 1 to hidden_size {config.hidden_size}, not {channels}."
        )


def keep_options(options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
    """`grow_options` of a mechanism whose options are the same in every larger model."""
    return options


def identity_with(**identity: Any) -> Any:
    """`find_identity_options` of a mechanism that changes nothing with these options."""

    def find_identity_options(options: OptionValues) -> OptionValues | None:
        contradicts = any(options.get(name, value) != value for name, value in identity.items())
        return None if contradicts else options | identity

    return staticmethod(find_identity_options)


def grow_receivers(options: OptionValues, layers: list[int], growth: GrowthMap) -> OptionValues:
    """Move the options `source` and `layers` to a larger model, where all copies of the receiving `layers` receive."""
    source = growth.first_copy(options["source"])
    new = [layer for layer in growth.list_copies(layers) if layer > source]
    everything = new == list(range(source + 1, len(growth.layers)))
    return options | {"source": source, "layers": None if options["layers"] is None and everything else new}


def grow_layers(options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
    """`grow_options` of a mechanism that may act in every layer: it acts in all copies of its `layers`."""
    layers = options["layers"]
    return options | {"layers": None if layers is None else growth.list_copies(layers)}
