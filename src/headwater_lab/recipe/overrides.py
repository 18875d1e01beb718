"""Parse what users write into plain values: YAML files and "dotted.key=value" overrides.

YAML often means something other than it seems: keys given twice, `010` that is 8, `no` that is false, dates,
tags, aliases that expand without end. Here text follows YAML 1.2's core schema, or raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from headwater.util.errors import LARGEST, HeadwaterError, shown

# Far beyond any real recipe; larger input is damaged or malicious.
MOST_BYTES = 2**20
MOST_TEXT = 2**30  # of prompts and samples
MOST_VALUES = 100_000
DEEPEST = 40

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the core schema's plain scalars; that of YAML 1.1 reads 1e3 as text and 1:30 as 90."""

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


class _Values:
    """Plain values of a YAML document's nodes, with what they must not exceed."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, node: Node, depth: int = 0) -> Any:
        self.count += 1
        if depth > DEEPEST or self.count > MOST_VALUES:
            raise HeadwaterError(
                f"nested deeper than {DEEPEST} levels" if depth > DEEPEST else f"more than {MOST_VALUES:,} values"
            )
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, ScalarNode) and kind in _SCALARS:
            if kind == "str" and "${" in node.value:
                why = "contains ${, but there is no interpolation; write the value out"
                raise HeadwaterError(f"line {_line(node)}: {shown(node.value)} {why}")
            try:
                return _SCALARS[kind](node.value)
            except HeadwaterError:
                raise
            except (ValueError, KeyError):
                raise HeadwaterError(f"line {_line(node)}: {shown(node.value)} is not of the type {kind!r}") from None
        if isinstance(node, SequenceNode) and kind == "seq":
            return [self.of(one, depth + 1) for one in node.value]
        if isinstance(node, MappingNode) and kind == "map":
            return self.mapping(node, depth)
        raise HeadwaterError(
            f"line {_line(node)}: the tag {node.tag.replace(_TAG, '!!')!r} is not supported; leave it out"
        )

    def mapping(self, node: MappingNode, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        inherited: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                several = self.of(value, depth + 1)
                for one in several if isinstance(several, list) else [several]:
                    if not isinstance(one, dict):
                        raise HeadwaterError(f"line {_line(key)}: << takes a mapping")
                    inherited = one | inherited
                continue
            name = self.of(key, depth + 1)
            if not isinstance(name, str):
                raise HeadwaterError(f"line {_line(key)}: the key {shown(name)} is not text; put it in quotes")
            if name in found:
                raise HeadwaterError(f"line {_line(key)}: the key {shown(name)} is given twice; give it once")
            found[name] = self.of(value, depth + 1)
        return inherited | found


def _whole(text: str) -> int:
    if len(text) > 30 or not -LARGEST <= int(text) < LARGEST:
        raise HeadwaterError(f"{shown(text)} is beyond 64 bits")
    return int(text)


def _number(text: str) -> float | int:
    """1e3 is an integer, 1000.0 is not."""
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    whole = re.fullmatch(r"[-+]?[0-9]+[eE]\+?[0-9]+", text) and abs(value) < 2**53
    return int(value) if whole else value


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _whole,
    "float": _number,
}


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def read_text(path: str | Path, what: str = "file", most: int = MOST_BYTES) -> str:
    """The text of a file that a user names. Raises `HeadwaterError` if it is not a file, too large, or not UTF-8.

    A byte order mark at its beginning is left out. Devices and pipes are errors, since reading one may never end.
    """
    path = Path(path)
    if not path.exists():
        raise HeadwaterError(f"There is no {what} {str(path)!r}.")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise HeadwaterError(f"{str(path)!r} is {kind}; pass the path of a {what}.")
    if (size := path.stat().st_size) > most:
        raise HeadwaterError(
            f"{str(path)!r} has {size:,} bytes, but a {what} may have at most {most:,}; choose another file."
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HeadwaterError(f"{str(path)!r} is not UTF-8 text: {error}; pass the path of a {what}.") from error


def plain(text: str, where: str, whole: bool = False) -> Any:
    """The value of a YAML text. Raises `HeadwaterError` that begins with `where`, and says the line.

    whole: the text is a single value, so a comment is an error instead of being skipped.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        if whole and (node is None or text[node.end_mark.index :].strip()):
            raise HeadwaterError("a # begins a comment; put text that contains # in quotes")
        return None if node is None else _Values().of(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise HeadwaterError(f"{where}: not valid YAML: {line}{error.problem or error.context}.") from error
    except yaml.YAMLError as error:  # such as a control character
        raise HeadwaterError(f"{where}: not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError:
        raise HeadwaterError(f"{where}: nested deeper than {DEEPEST} levels.") from None
    except HeadwaterError as error:
        raise HeadwaterError(f"{where}: {error}.") from error


def override(text: str) -> tuple[list[str], Any]:
    """Parse "dotted.key=value": the parts of the key, and the value. Raises `HeadwaterError`."""
    key, separator, value = text.partition("=")
    parts = key.split(".")
    where = f"The override {shown(text)}"
    if not separator or not all(part and part == part.strip() for part in parts):
        raise HeadwaterError(f"{where} is not of the form dotted.key=value.")
    if not value.strip():
        raise HeadwaterError(f"{where} has no value; write {key}=null for none.")
    if value.startswith("="):
        raise HeadwaterError(f"{where} has two = signs; write one.")
    if value.startswith(("*", "&", "!", "%", "@", "`")):  # a file pattern, not YAML that an override needs
        return parts, value
    if "\n" in value.strip():
        raise HeadwaterError(
            f"{where} has a second line; write it on one line, with \\n in double quotes for a line break."
        )
    return parts, plain(value, where, whole=True)


def merged(values: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`change` over `values`: sections field by field, else as a whole."""
    return dict(values) | {
        key: merged(values[key], new) if isinstance(new, dict) and isinstance(values.get(key), dict) else new
        for key, new in change.items()
    }


def overridden(values: dict[str, Any], overrides: Iterable[tuple[str, list[str], Any]]) -> dict[str, Any]:
    """`values` with overrides, each (as it was written, key, value), of which the last counts.

    Raises `HeadwaterError` for a key that passes through anything but sections, and for one that changes nothing.
    """
    for text, parts, value in overrides:
        here: Any = values
        for depth, part in enumerate(parts):
            if here is None:  # an empty section
                break
            if not isinstance(here, dict):
                inside = ".".join(parts[:depth])
                raise HeadwaterError(
                    f"The override {shown(text)} does not fit: {inside} is {shown(here)}, which has no field "
                    f"{part!r}; set all of {inside}."
                )
            if part not in here:
                break
            here = here[part]
        else:
            if value == {} and isinstance(here, dict) and here:
                raise HeadwaterError(
                    f"The override {shown(text)} would change nothing, since sections are merged; write "
                    f"{'.'.join(parts)}=null for none."
                )
        for part in reversed(parts):
            value = {part: value}
        values = merged(values, value)
    return values
