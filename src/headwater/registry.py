"""The mechanisms headwater knows: name in the config -> "module:Class".

A new mechanism is one file in `mechanisms/` and one line here; config, plan, attention and the contract tests
reach it through this table and know no mechanism by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwater.errors import HeadwaterError, nearest

if TYPE_CHECKING:
    from headwater.mechanisms.base import Mechanism

REGISTRY: dict[str, str] = {
    "pattention": "headwater.mechanisms.pattention:Pattention",
    "kv_shift": "headwater.mechanisms.kv_shift:KVShift",
    "value_residual": "headwater.mechanisms.value_residual:ValueResidual",
    "svformer": "headwater.mechanisms.svformer:SVFormer",
    "skip_layer": "headwater.mechanisms.skip_layer:SkipLayer",
    "neutreno": "headwater.mechanisms.neutreno:NeuTRENO",
    "dense_former": "headwater.mechanisms.dense_former:DenseFormer",
}


def resolve(name: str) -> type[Mechanism]:
    """The class behind a mechanism's name. Raises `HeadwaterError` for an unknown one."""
    if name not in REGISTRY:
        raise HeadwaterError(f"There is no mechanism named {name!r}; {nearest(name, REGISTRY)}")
    module, _, attribute = REGISTRY[name].partition(":")
    # The package is given so that the exported single-folder form of this code, where names are relative, works too.
    return getattr(import_module(module, __package__), attribute)


def as_mapping(given: Any) -> Any:
    """Mechanisms as name -> options, also of a list of names, or of such mappings: [kv_shift, {skip_layer: {}}].

    What is neither goes through as it is. Raises `HeadwaterError` for a name that is given twice.
    """
    if not isinstance(given, list | tuple):
        return given
    found: dict[str, Any] = {}
    for one in given:
        if not isinstance(one, str | dict):
            raise HeadwaterError(f"mechanisms lists names, or name: options, not {one!r}.")
        for name, options in ({one: {}} if isinstance(one, str) else one).items():
            if name in found:
                raise HeadwaterError(f"mechanisms names {name!r} twice; name it once.")
            found[name] = options
    return found
