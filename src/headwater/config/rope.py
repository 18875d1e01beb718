"""The field `rope_parameters`: its defaults and checks. `config` is always a `HeadwaterConfig`."""

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from headwater.util.errors import HeadwaterError, check_known, sentence, shown

# Types whose frequencies change with the length of the sequence.
FOLLOW_LENGTH = "dynamic", "longrope"
# The fields that transformers' RoPE functions read.
_KEYS = sorted({*RopeParameters.__annotations__, "mscale", "mscale_all_dim", "truncate"} - {"mrope_section"})
# Fields that must not be null.
_NEEDED = "rope_type", "rope_theta", "factor", "partial_rotary_factor"
# Types of the fields that are not numbers, with their names in messages.
_TYPES: dict[str, tuple[type, str]] = {
    "rope_type": (str, "a name"),
    "truncate": (bool, "true or false"),
    "short_factor": (list, "a list of numbers"),
    "long_factor": (list, "a list of numbers"),
}


def complete_rope(config: Any) -> None:
    """Fill in the defaults of `rope_parameters`."""
    config.rope_parameters = dict(config.rope_parameters or {})
    if config.rope_parameters.get("rope_theta") is None:
        config.rope_parameters["rope_theta"] = config.default_theta
    config.standardize_rope_params()


def check_rope(config: Any) -> None:
    """Raise `HeadwaterError` for rope_parameters from which transformers cannot compute frequencies."""
    parameters = config.rope_parameters or {}
    kind, fraction = parameters["rope_type"], parameters.get("partial_rotary_factor", 1.0)
    for key, value in parameters.items():
        _check_type(key, value)
    check_known("There is no rope_type", kind, ["default", *ROPE_INIT_FUNCTIONS])
    for name, value in parameters.items():
        if name.startswith("rope_theta") and not 0 < value < float("inf"):
            raise HeadwaterError(f"{name} must be above zero and finite, not {value}.")
    if not 0 < fraction <= 1:
        raise HeadwaterError(
            f"partial_rotary_factor must be a fraction of head_dim, above 0 and at most 1, not {fraction}."
        )
    if config.rotary_dim % 2:
        raise HeadwaterError(
            f"RoPE rotates pairs of channels, but head_dim {config.head_dim} with partial_rotary_factor {fraction} "
            f"gives {config.rotary_dim}; make it even."
        )
    if kind != "default":
        _check_frequencies(config, kind)


def _check_type(key: Any, value: Any) -> None:
    check_known("rope_parameters has no field", key, _KEYS)
    if value is None and key not in _NEEDED:
        return
    types, words = _TYPES.get(key, ((int, float), "a number"))
    is_flag = isinstance(value, bool) and types is not bool  # bool is a subclass of int
    if is_flag or not isinstance(value, types):
        raise HeadwaterError(f"rope_parameters.{key} must be {words}, not {shown(value)}.")


def _check_frequencies(config: Any, kind: str) -> None:
    try:
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config)
        if not frequencies.is_meta and not bool(frequencies.isfinite().all()):
            raise ZeroDivisionError("some are not finite")
    except KeyError as error:
        raise HeadwaterError(f"rope_type {kind!r} needs {error} in rope_parameters.") from error
    except Exception as error:  # transformers' functions fail for zeros and lists of a wrong length
        raise HeadwaterError(
            f"rope_type {kind!r} cannot compute frequencies from these rope_parameters: {sentence(error)}."
        ) from error
