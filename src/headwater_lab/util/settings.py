"""A section of users' YAML: typed, closed and frozen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from headwater.util.errors import find_unusable

Fraction = Annotated[float, Field(ge=0, lt=1)]
# Beyond any real training run, and within the range of tensors and clocks.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Settings(BaseModel):
    """A section of a recipe: typed, closed and frozen.

    Strict: text is not a number, true is not 1, and no number may be infinite or beyond 64 bits.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, values: Any) -> Any:
        if (problem := find_unusable(values)) is not None:
            raise PydanticCustomError("unusable", "{why}.", {"why": problem[1], "path": problem[0]})
        return values


@dataclass(frozen=True)
class ReadIf:
    """Metadata of a field that only some runs read, as in `momentum: Annotated[float, ReadIf(…)]`.

    test: whether the run of a recipe reads it, given the recipe and the field's name. otherwise: what follows "FIELD
    has no effect" if no run does; {0} is the recipe.
    """

    test: Callable[[Any, str], bool]
    otherwise: str
