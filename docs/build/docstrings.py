"""A griffe extension: docstrings list arguments as `name: text` lines, which become Markdown lists."""

import re
from typing import Any

import griffe

HEADING = re.compile(r"([A-Z][a-z]+):?")
ITEM = re.compile(r"( *)([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")


def as_markdown(text: str) -> str:
    """`Args` and the like in bold, their lines as a list; equations and examples stay the code blocks they are."""
    lines, out, depth, inside = text.splitlines(), [], None, False
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        indent = len(line) - len(line.lstrip())
        if HEADING.fullmatch(line) and ITEM.match(following) and following.startswith("    "):
            out += ["", f"**{line.rstrip(':')}**", ""]
            depth, inside = 4, False
        elif (entry := ITEM.fullmatch(line)) and indent == (depth or 0) and "`" not in entry[2]:
            if not inside and depth is None:
                out.append("")
            names = ", ".join(f"`{name}`" for name in entry[2].split(", "))
            out.append(f"- {names}: {entry[3]}")
            inside = True
        elif inside and line and indent > (depth or 0):
            out.append(f"    {line.strip()}")
        else:
            if inside and line:
                out.append("")
            if not line or indent < (depth or 0):
                depth = None if line or not following.startswith("    ") else depth
            inside = False
            out.append(line)
    return "\n".join(out)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
