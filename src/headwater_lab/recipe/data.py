"""`data:` of a recipe, which the settings of its kind read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import PlainValidator, SerializeAsAny, ValidationError

from headwater_lab.data.base import DATA, DataSettings
from headwater_lab.recipe.messages import WrongSection


def settings_of(values: Any) -> type[DataSettings]:
    """The class that reads `data:`, by its kind. Raises `ValueError` without a known kind."""
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or not (":" in kind or kind in DATA.names):
        raise ValueError(f"data.kind must be one of: {', '.join(sorted(DATA.names))}.")
    return DATA.resolve(kind)


def _by_kind(values: Any) -> DataSettings:
    if isinstance(values, DataSettings):
        return values
    settings = settings_of(values)
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise WrongSection(settings, error) from error


def without_other_kind(values: dict[str, Any], said: Collection[str]) -> dict[str, Any]:
    """`data:` after a change of its kind, without what the new kind does not take. said: fields that stay anyway."""
    try:
        settings_of(values).model_validate(values)
    except ValidationError as error:
        wrong = {detail["loc"][0] for detail in error.errors() if detail["loc"]}.difference(said)
        return {name: value for name, value in values.items() if name not in wrong}
    except ValueError:  # an unknown kind, which parsing refuses
        pass
    return values


AnyData = Annotated[DataSettings, PlainValidator(_by_kind), SerializeAsAny()]
