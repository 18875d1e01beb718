"""Sentences for pydantic's errors, with each field's full name and the nearest valid one."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

from headwater.util.errors import HeadwaterError, NotTrusted, find_misspelt, nearest, shown
from headwater_lab.data.base import DataSettings
from headwater_lab.recipe.synonyms import ANSWERS, SAMPLING, SYNONYMS

# The fields of each section, for names that belong to another; "" is the top level.
Sections = Mapping[str, Collection[str]]


def build_refusal(where: str, problems: Sequence[str]) -> HeadwaterError:
    """Make the error for these problems: one sentence, or a line for each."""
    if len(problems) == 1:
        return HeadwaterError(f"{where}: {problems[0]}")
    return HeadwaterError("\n  ".join([f"{where}: {len(problems)} mistakes:", *problems]))


def describe_unknown_field(name: str, where: str, fields: Iterable[str], sections: Sections) -> str:
    """Write the sentence for a name that is not a field of a section."""
    fields = sorted(fields)
    section, field = SYNONYMS.get(name, ("", ""))
    if not field and not find_misspelt(name, fields):
        section, field = next(((title, name) for title, names in sections.items() if name in names), ("", ""))
    if name in ANSWERS:
        hint = f"{ANSWERS[name]}."
    elif field in fields:
        hint = f"did you mean {field!r}?"
    elif " " in field:
        hint = f"{'it' if where == section else section} has {field}"
    elif field in sections.get(section, ()):
        hint = f"did you mean {'.'.join(filter(None, (section, field)))!r}?"
    else:
        hint = nearest(name, fields)
    return f"{where or 'the recipe'} has no field {name!r}; {hint}"


def describe_unknown_options(words: Sequence[str], sections: Sections) -> str | None:
    """Write the sentence for options that other programs have for fields of a recipe, as --n_layer=4; None without any.

    words: options as they stand on the command line.
    """
    hints: dict[str, str] = {}
    for option, _, value in (word.partition("=") for word in words):
        name = option.removeprefix("--").replace("-", "_")
        owners = ((section, name) for section, fields in sections.items() if name in fields)
        section, field = SYNONYMS.get(name) or next(owners, ("", ""))
        fields = [".".join(filter(None, (section, each))) for each in re.split(", | and ", field) if each]
        hint = ANSWERS.get(name) or " ".join(f"{each}={value or '…'}" for each in fields)
        hints[option] = hint
    return _join_hints(hints, ", since fields of a recipe are written without dashes")


def describe_sampling_options(words: Sequence[str], names: Collection[str]) -> str | None:
    """Write the sentence for options that other programs have for sampling, as --num_samples=5; None without any.

    words: options as they stand on the command line. names: the options of `headwater generate`.
    """
    hints = SAMPLING | {name.removeprefix("--").replace("-", "_"): f"write {name}" for name in names}
    options = [word.partition("=")[0] for word in words]
    return _join_hints({option: hints.get(option.removeprefix("--").replace("-", "_"), "") for option in options})


def _join_hints(hints: Mapping[str, str], reason: str = "") -> str | None:
    """Join hints for options that do not exist to a sentence; None without any. "" is no hint."""
    hints = {option: hint for option, hint in hints.items() if hint}
    if not hints:
        return None
    is_are = "There is no option" if len(hints) == 1 else "There are no options"
    pairs = "; ".join(f"for {option}: {hint}" for option, hint in hints.items())
    return f"{is_are} {', '.join(hints)}{reason}; {pairs}."


def list_problems(error: ValidationError, section: Any, data: type[DataSettings], sections: Sections) -> Iterator[str]:
    """Yield a sentence for each wrong field. section: the class that was read. data: the class that reads `data:`."""
    fields = set()
    for detail in error.errors():
        location = [str(step) for step in detail["loc"]] or [""]
        owner, field = _find_field(section, data, location)
        # Report a field only once, even if several of its types or items are wrong.
        if field not in fields:
            yield _describe_problem(detail, owner, location, sections)
        fields.add(field)


def _find_field(section: Any, data: type[DataSettings], location: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """Find the innermost section of a location, and the location of its field, without positions inside its value."""
    owner = section
    for depth, name in enumerate(location, 1):
        if name.isdigit():  # an index in a list of sections
            continue
        owner, section = section, _read_type(section, name)
        if section is DataSettings:
            section = data
        if not hasattr(section, "model_fields"):
            return owner, tuple(location[:depth])
    return owner, tuple(location)


def _read_type(section: Any, name: str) -> Any:
    """Read the type of a section's field, without "or None"; None if it has no such field."""
    field = section.model_fields.get(name)
    if field is None:
        return None
    members = [member for member in get_args(field.annotation) if member is not type(None)]
    return members[0] if len(members) == 1 and isinstance(members[0], type) else field.annotation


def _describe_problem(detail: Any, owner: Any, location: Sequence[str], sections: Sections) -> str:
    field, message = ".".join(filter(None, location)), detail["msg"]
    if detail["type"] == "extra_forbidden":
        return describe_unknown_field(location[-1], ".".join(location[:-1]), owner.model_fields, sections)
    if detail["type"] == "missing":
        return f"the field {field!r} is missing."
    if detail["type"] == "unusable":
        return f"{'.'.join(filter(None, [field, *detail['ctx']['path']]))}: {message}"
    if detail["type"] == "value_error":
        return message.removeprefix("Value error, ")
    return f"{field}: {message[0].lower()}{message[1:]}, not {shown(detail['input'])}."


def find_untrusted(error: ValueError) -> NotTrusted | None:
    """Find the refusal of an external name: the error itself, or one of those that pydantic has gathered."""
    details = error.errors() if isinstance(error, ValidationError) else []
    causes = [error, *(detail.get("ctx", {}).get("error") for detail in details)]
    return next((cause for cause in causes if isinstance(cause, NotTrusted)), None)
