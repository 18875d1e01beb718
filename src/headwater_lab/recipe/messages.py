"""Sentences for what pydantic finds wrong, with each field's full name and the nearest right one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError

from headwater.util.errors import HeadwaterError, NotTrusted, nearest, shown
from headwater_lab.recipe.synonyms import SYNONYMS
from headwater_lab.util.settings import Settings

# The fields of each section, for names that belong to another; "" is the top level.
Sections = Mapping[str, Collection[str]]
# More are not worth reading at once.
MOST_LINES = 40


def refusal(where: str, problems: Sequence[str]) -> HeadwaterError:
    """The error for these problems: one sentence, or a line for each."""
    if len(problems) == 1:
        return HeadwaterError(f"{where}: {problems[0]}")
    more = len(problems) - MOST_LINES
    lines = [*problems[:MOST_LINES], *([f"and {more} more"] if more > 0 else [])]
    return HeadwaterError("\n  ".join([f"{where}: {len(problems)} mistakes:", *lines]))


def unknown_field(name: str, where: str, known: Iterable[str], sections: Sections) -> str:
    """The sentence for a name that a section does not have."""
    known = sorted(known)
    section, field = SYNONYMS.get(name, ("", ""))
    if not field and not get_close_matches(name, known, n=1, cutoff=0.8):
        section, field = next(((other, name) for other, names in sections.items() if name in names), ("", ""))
    if field in known:
        hint = f"did you mean {field!r}?"
    elif " " in field:
        hint = f"{'it' if where == section else section} has {field}"
    elif field in sections.get(section, ()):
        hint = f"did you mean {'.'.join(filter(None, (section, field)))!r}?"
    else:
        hint = nearest(name, known)
    return f"{where or 'the recipe'} has no field {name!r}; {hint}"


class WrongSection(ValueError):
    """What is wrong in a section that a class chosen by its values reads."""

    def __init__(self, section: type[Settings], error: ValidationError) -> None:
        super().__init__(str(error))
        self.section, self.error = section, error


def sentences(error: ValidationError, section: Any, sections: Sections, where: Sequence[str] = ()) -> Iterator[str]:
    """A sentence for each of pydantic's errors. section: what was read. where: its place in the recipe."""
    told = set()
    for detail in error.errors():
        cause = _cause(detail)
        if isinstance(cause, WrongSection):
            yield from sentences(cause.error, cause.section, sections, [*where, *map(str, detail["loc"])])
            continue
        field = _field(section, [str(part) for part in detail["loc"]])
        # One sentence is enough for a field, whichever of its types or parts does not fit.
        if field not in told:
            yield _sentence(detail, section, sections, where)
        told.add(field)


def _field(section: Any, location: Sequence[str]) -> tuple[str, ...]:
    """The place of a field in a section, without what is inside the field's value."""
    for depth, part in enumerate(location, 1):
        if not part.isdigit():
            section = _annotation(section, part)
        if not hasattr(section, "model_fields"):
            return tuple(location[:depth])
    return tuple(location)


def _cause(detail: Any) -> Exception | None:
    return detail.get("ctx", {}).get("error")


def _sentence(detail: Any, section: Any, sections: Sections, where: Sequence[str]) -> str:
    *path, last = [str(part) for part in detail["loc"]] or [""]
    names = list(where)
    for part in path:
        if not part.isdigit():  # else in a list, whose element's type `_annotation` gives
            section = _annotation(section, part)
        names.append(part)
    field = ".".join(filter(None, (*names, last)))
    if detail["type"] == "extra_forbidden":
        return unknown_field(last, ".".join(names), getattr(section, "model_fields", {}), sections)
    if detail["type"] == "missing":
        return f"the field {field!r} is missing."
    if detail["type"] == "unusable":
        return f"{'.'.join(filter(None, [field, *detail['ctx']['path']]))}: {detail['msg']}"
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    return f"{field}: {detail['msg'][0].lower()}{detail['msg'][1:]}, not {shown(detail['input'])}."


def untrusted_in(error: ValidationError) -> NotTrusted | None:
    """The refusal of an outside name among pydantic's errors, if there is one."""
    for detail in error.errors():
        cause = _cause(detail)
        if isinstance(cause, WrongSection):
            cause = untrusted_in(cause.error)
        if isinstance(cause, NotTrusted):
            return cause
    return None


def _annotation(section: Any, name: str) -> Any:
    """The type of a section's field, without "or None"."""
    field = getattr(section, "model_fields", {}).get(name)
    if field is None:
        return None
    members = [member for member in get_args(field.annotation) if member is not type(None)]
    return members[0] if len(members) == 1 and isinstance(members[0], type) else field.annotation
