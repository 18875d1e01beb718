"""A section of users' YAML: typed, closed and frozen."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from headwater.util.errors import HeadwaterError, unusable
from headwater.util.files import check_local

# Fields that hold a path, several paths, or the name of something that may be on the hub.
PATHS = ("source", "tokenizer", "checkpoint", "teacher", "held_out", "held_out_domains")


class Settings(BaseModel):
    """A section of a recipe: typed, closed and frozen.

    Strict: text is not a number, true is not 1, and no number may be infinite or beyond 64 bits.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _usable(cls, values: Any) -> Any:
        if (found := unusable(values)) is not None:
            raise PydanticCustomError("unusable", "{why}.", {"why": found[1], "path": found[0]})
        for name in PATHS if isinstance(values, dict) else ():
            for path in _texts(values.get(name)):
                try:
                    check_local(path)
                except HeadwaterError as error:
                    raise PydanticCustomError("unusable", "{why}", {"why": str(error), "path": (name,)}) from error
        return values


def _texts(value: Any) -> list[str]:
    """The texts in a field: its value, or the keys and values of a mapping."""
    several = [*value, *value.values()] if isinstance(value, dict) else [value]
    return [text for text in several if isinstance(text, str)]
