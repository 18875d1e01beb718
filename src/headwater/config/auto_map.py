"""The field `auto_map`: which classes transformers' Auto classes open in a checkpoint that is saved with its code.

Models write the code (`headwater.models.remote_code`).
"""

import os
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError, shown

# One entry file for all Auto classes: transformers copies a local folder's code once per entry file, and with two
# the config's class would not be the one that the model expects.
ENTRY = "modeling_headwater"
OF_TEXT = {
    "AutoConfig": "headwater.config.text:HeadwaterConfig",
    "AutoModel": "headwater.models.causal_lm:HeadwaterModel",
    "AutoModelForCausalLM": "headwater.models.causal_lm:HeadwaterForCausalLM",
}
OF_IMAGES = {
    "AutoConfig": "headwater.config.vision:HeadwaterVisionConfig",
    "AutoModel": "headwater.models.image_classification:HeadwaterImageModel",
    "AutoModelForImageClassification": "headwater.models.image_classification:HeadwaterForImageClassification",
}
EXPORTED = [*OF_TEXT.items(), *OF_IMAGES.items()]

_registered: set[type] = set()


def auto_class_of(cls: type) -> str | None:
    """The Auto class for which `cls` is exported; None for classes from outside headwater and for subclasses."""
    for auto, target in EXPORTED:
        module, _, name = target.partition(":")
        if (cls.__module__, cls.__name__) == (resolve_name(module, __package__), name):
            return auto
    return None


def auto_classes_of(config: Any) -> dict[str, str]:
    """The classes of a model with this config: Auto class -> "module:Class"."""
    return OF_TEXT if getattr(config, "is_causal", True) else OF_IMAGES


def auto_map_of(config: Any) -> dict[str, str]:
    """Entries for the Auto classes in an exported checkpoint with this config: Auto class -> "file.Class"."""
    return {auto: f"{ENTRY}.{target.partition(':')[2]}" for auto, target in auto_classes_of(config).items()}


def register_class(cls: type, auto_class: str | type) -> bool:
    """Let models with the config class of `cls` be saved with code; False if it is not ours.

    Raises `HeadwaterError` if `cls` is exported for another Auto class.
    """
    name, class_name = auto_class if isinstance(auto_class, str) else auto_class.__name__, auto_class_of(cls)
    if class_name is None:
        return False
    if name != class_name:
        raise HeadwaterError(
            f"{cls.__name__} is exported for {class_name}, not for {name}; register it for {class_name!r}."
        )
    _registered.add(getattr(cls, "config_class", cls))
    return True


def has_code(config: Any) -> bool:
    """Whether checkpoints with this config contain code: its class is registered, or it was loaded with code."""
    targets = (getattr(config, "auto_map", None) or {}).values()
    return type(config) in _registered or any(str(target).startswith(f"{ENTRY}.") for target in targets)


def complete_auto_map(config: Any) -> None:
    """Point a config whose class is registered to the code in its folder; other people's classes keep their entries."""
    if type(config) in _registered:
        entries = getattr(config, "auto_map", None) or {}
        entries_of_code = auto_map_of(config).items()
        config.auto_map = entries | {
            name: local for name, local in entries_of_code if str(entries.get(name, local)).split("--")[-1] == local
        }


def check_code(config: Any, folder: str | os.PathLike[str]) -> None:
    """Raise `HeadwaterError` if a config would be saved without the code that its `auto_map` names."""
    if has_code(config) and not (Path(folder) / f"{ENTRY}.py").is_file():
        raise HeadwaterError(
            f"This config belongs to a model that is saved with its code, and {shown(str(folder))} has no {ENTRY}.py; "
            "save the model there (model.save_pretrained), which writes code and config."
        )
