"""Parse users' text into plain values: YAML files and "dotted.key=value" overrides.

YAML often differs from what it seems to say: keys given twice, `010` that is 8, `no` that is false, dates,
tags, aliases that expand without end. This module follows YAML 1.2's core schema, and raises an error for everything
else.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from headwater.util.errors import LARGEST, HeadwaterError, shown

# Far beyond any real recipe; larger input is damaged or malicious.
MOST_BYTES = 2**20
MOST_TEXT = 2**30  # maximum bytes of prompts and samples
MOST_VALUES = 100_000
DEEPEST = 40
# The field whose mapping is one value: the shares of a mixture.
MIXTURE = "source"

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the core schema's plain scalars: YAML 1.1 reads 1e3 as text and 1:30 as 90."""

    yaml_implicit_resolvers: dict = {}


for tag, pattern, begins in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + tag, re.compile(f"^(?:{pattern})$", re.ASCII), begins)


def _refuse(node: Node, problem: str) -> HeadwaterError:
    return HeadwaterError(f"line {node.start_mark.line + 1}: {problem}")


def _read_node(node: Node, depth: int, count: Iterator[int]) -> Any:
    """Read the plain value of a node. count: counts the nodes of the document."""
    if depth > DEEPEST:
        raise HeadwaterError(f"nested deeper than {DEEPEST} levels")
    if next(count) > MOST_VALUES:
        raise HeadwaterError(f"more than {MOST_VALUES:,} values")
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, ScalarNode) and kind in _SCALARS:
        return _read_scalar(node, kind)
    if isinstance(node, SequenceNode) and kind == "seq":
        return [_read_node(entry, depth + 1, count) for entry in node.value]
    if isinstance(node, MappingNode) and kind == "map":
        return _read_mapping(node, depth + 1, count)
    raise _refuse(node, f"the tag {node.tag.replace(_TAG, '!!')!r} is not supported; leave it out")


def _read_scalar(node: ScalarNode, kind: str) -> Any:
    if kind == "str" and "${" in node.value:
        raise _refuse(node, f"{shown(node.value)} contains ${{, but there is no interpolation; write the value out")
    try:
        return _SCALARS[kind](node.value)
    except HeadwaterError:
        raise
    except (ValueError, KeyError):
        raise _refuse(node, f"{shown(node.value)} is not of the type {kind!r}") from None


def _read_mapping(node: MappingNode, depth: int, count: Iterator[int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    inherited: dict[str, Any] = {}
    for key, value in node.value:
        if key.tag == _TAG + "merge":
            bases = _read_node(value, depth, count)
            for base in bases if isinstance(bases, list) else [bases]:
                if not isinstance(base, dict):
                    raise _refuse(key, "<< takes a mapping")
                inherited = base | inherited
            continue
        name = _read_node(key, depth, count)
        if not isinstance(name, str):
            raise _refuse(key, f"the key {shown(name)} is not text; put it in quotes")
        if name in values:
            raise _refuse(key, f"the key {shown(name)} is given twice; give it once")
        values[name] = _read_node(value, depth, count)
    return inherited | values


def _read_integer(text: str) -> int:
    if len(text) > 30 or not -LARGEST <= int(text) < LARGEST:
        raise HeadwaterError(f"{shown(text)} is beyond 64 bits")
    return int(text)


def _read_float(text: str) -> float | int:
    """Read a number with a point or an exponent. 1e3 is an integer, 1000.0 is not."""
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    is_integer = re.fullmatch(r"[-+]?[0-9]+[eE]\+?[0-9]+", text) and abs(value) < 2**53
    return int(value) if is_integer else value


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _read_integer,
    "float": _read_float,
}


def read_text(path: str | Path, kind: str = "file", most: int = MOST_BYTES) -> str:
    """Read the text of a file that a user names. Raises `HeadwaterError` if it is not a file, too large, or not UTF-8.

    A byte order mark at its beginning is left out. Devices and pipes are errors, since reading one may never end.
    """
    path = Path(path)
    if not path.exists():
        raise HeadwaterError(f"There is no {kind} {str(path)!r}.")
    if not path.is_file():
        problem = "a folder" if path.is_dir() else "not a regular file"
        raise HeadwaterError(f"{str(path)!r} is {problem}; pass the path of a {kind}.")
    if (size := path.stat().st_size) > most:
        raise HeadwaterError(
            f"{str(path)!r} has {size:,} bytes, but a {kind} may have at most {most:,}; choose another file."
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HeadwaterError(f"{str(path)!r} is not UTF-8 text: {error}; pass the path of a {kind}.") from error


def read_yaml(text: str, where: str, single: bool = False) -> Any:
    """Read the value of a YAML text. Raises `HeadwaterError` that begins with `where` and names the line.

    single: the text is a single value, so a comment is an error instead of being skipped.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        if single and (node is None or text[node.end_mark.index :].strip()):
            raise HeadwaterError("a # begins a comment; put text that contains # in quotes")
        return None if node is None else _read_node(node, 0, itertools.count(1))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise HeadwaterError(f"{where}: not valid YAML: {line}{error.problem or error.context}.") from error
    except yaml.YAMLError as error:  # for example a control character
        raise HeadwaterError(f"{where}: not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError:
        raise HeadwaterError(f"{where}: nested deeper than {DEEPEST} levels.") from None
    except HeadwaterError as error:
        raise HeadwaterError(f"{where}: {error}.") from error


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise `HeadwaterError` for a single text, whose letters would be read as overrides."""
    if isinstance(overrides, str):
        raise HeadwaterError(f"overrides takes a list of texts; write overrides=[{shown(overrides)}].")


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parse "dotted.key=value": the names in the key, and the value. Raises `HeadwaterError`."""
    key, separator, value = text.partition("=")
    names = key.split(".")
    where = f"The override {shown(text)}"
    if not separator or not all(name and name == name.strip() for name in names):
        raise HeadwaterError(f"{where} is not of the form dotted.key=value.")
    if not value.strip():
        raise HeadwaterError(f"{where} has no value; write {key}=null for none.")
    if value.startswith("="):
        raise HeadwaterError(f"{where} has two = signs; write one.")
    if value.startswith(("*", "&", "!", "%", "@", "`")):  # a file pattern, not YAML that an override needs
        return names, value
    if "\n" in value.strip():
        raise HeadwaterError(
            f"{where} has a second line; write it on one line, with \\n in double quotes for a line break."
        )
    return names, read_yaml(value, where, single=True)


def merge_values(values: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `change` into `values`: sections field by field, other values, also the shares of `source`, as a whole."""
    return dict(values) | {
        key: merge_values(values[key], new)
        if isinstance(new, dict) and isinstance(values.get(key), dict) and key != MIXTURE
        else new
        for key, new in change.items()
    }


def apply_overrides(values: dict[str, Any], overrides: Iterable[tuple[str, Sequence[Any], Any]]) -> dict[str, Any]:
    """Apply overrides, each (its text, the names in its key, its value); the last one wins.

    Raises `HeadwaterError` for a key that passes through anything but sections, and for one that changes nothing.
    """
    for text, names, value in overrides:
        current: Any = values
        for depth, name in enumerate(names):
            if current is None:  # an empty section
                break
            if not isinstance(current, dict):
                section = ".".join(map(str, names[:depth]))
                raise HeadwaterError(
                    f"The override {shown(text)} does not fit: {section} is {shown(current)}, which has no field "
                    f"{name!r}; set all of {section}."
                )
            if name not in current:
                break
            current = current[name]
        else:
            if value == {} and isinstance(current, dict) and current:
                raise HeadwaterError(
                    f"The override {shown(text)} would change nothing, since sections are merged; write "
                    f"{'.'.join(map(str, names))}=null for none."
                )
        for depth in reversed(range(len(names))):
            value = {names[depth]: value}
            if depth and names[depth - 1] == MIXTURE:  # one share of several
                shares: Any = functools.reduce(lambda section, name: section.get(name) or {}, names[:depth], values)
                value = shares | value
        values = merge_values(values, value)
    return values
