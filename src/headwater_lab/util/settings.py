"""A section of users' YAML: typed, closed and frozen."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from headwater.util.errors import unusable


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
        return values
