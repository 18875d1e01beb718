"""Read a mechanism's options from a config, with clear errors."""

from dataclasses import asdict, fields
from math import isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints

from huggingface_hub.errors import StrictDataclassError

from headwater.config.capabilities import CompletesOptions
from headwater.util.errors import HeadwaterError, either, nearest


def parse_options(mechanism: type[Any], options: dict[str, Any] | None) -> dict[str, Any]:
    """Fill in the defaults of `options`. Raises `HeadwaterError` for an unknown name or a wrong type."""
    name, kind = mechanism.registered_name(), mechanism.Options
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise HeadwaterError(
            f"The options of mechanism {name!r} must be a mapping, not {options!r}; write {{}} for none."
        )
    names = [field.name for field in fields(kind)]
    for key, value in options.items():
        if key not in names:
            raise HeadwaterError(
                f"Mechanism {name!r} has no option {key!r}; {nearest(key, names) if names else 'it has none.'}"
            )
        try:
            kind(**{key: value})
        except StrictDataclassError as error:
            expected = describe_type(get_type_hints(kind)[key])
            raise HeadwaterError(f"Mechanism {name!r}: {key} must be {expected}, not {value!r}.") from error
        if isinstance(value, float) and not isfinite(value):
            raise HeadwaterError(f"Mechanism {name!r}: {key} must be a finite number, not {value}.")
    return asdict(kind(**options))


def complete_options(mechanism: type[Any], options: dict[str, Any] | None, config: Any) -> dict[str, Any]:
    """Fill in all defaults of `options`, those that follow from the config too. Raises `HeadwaterError`."""
    parsed = parse_options(mechanism, options)
    return mechanism.complete_options(parsed, config) if isinstance(mechanism, CompletesOptions) else parsed


def describe_type(hint: Any) -> str:
    """Describe a type in words, for error messages: "a whole number", "'free', 'gate' or 'clamped'", …"""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "nothing"}
    if get_origin(hint) is Literal:
        descriptions = [repr(value) for value in get_args(hint)]
    elif get_origin(hint) is list:
        descriptions = [f"a list, each {describe_type(get_args(hint)[0])}"]
    elif members := get_args(hint):
        choices = [repr(value) for member in members if get_origin(member) is Literal for value in get_args(member)]
        types = [member for member in members if get_origin(member) is not Literal]
        descriptions = choices + [describe_type(member) for member in types if not (member is int and float in members)]
    else:
        descriptions = [words.get(hint, str(hint))]
    return either(descriptions)
