"""The reference, made from code and types.

`docs/reference/NAME.md` is the hand-written introduction of a page, to which `docs/build/hooks.py` appends what the
page's function in `PAGES` returns.
"""

import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headwater.config.plan import Stage
from headwater.config.presets import preset
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.cost import estimate_model
from headwater.mechanisms import Mechanism
from headwater.mechanisms.capabilities import CAPABILITIES, members_of
from headwater.plugins.mechanisms import MECHANISMS, has_own
from headwater_lab.api.listing import DESCRIBED
from headwater_lab.cli import app
from headwater_lab.data.base import DATA, DataSettings
from headwater_lab.data.synthetic import SyntheticSettings, list_tasks
from headwater_lab.optimization import laws
from headwater_lab.optimization.registry import OPTIMIZERS, SCHEDULES
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training import records
from headwater_lab.util.settings import Settings

ROOT = Path(__file__).parents[2]


def write_prose(text: str) -> str:
    """A docstring as Markdown: code stays, names with _ are no emphasis, [A] is no link."""
    lines: list[str] = []
    for line in text.splitlines():
        begins_block = not lines or not lines[-1] or lines[-1].startswith("    ")
        is_code = line.startswith("    ") and begins_block
        lines.append(line if is_code else write_line(line.strip()))
    return "\n".join(lines)


def write_line(line: str) -> str:
    """A line of prose, with links in place of the arXiv numbers and the files of docs/ that it names."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"([_*\[|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    line = re.sub(r"\barXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", "`".join(parts))
    return re.sub(
        r"(?<!/)\bdocs/([\w/-]+\.md)(#[\w-]+)?",
        lambda match: f"[{Path(match[1]).stem}](../{match[1]}{match[2] or ''})",
        line,
    )


def join_lines(text: str | None) -> str:
    """A docstring as one line, for the cell of a table."""
    return write_line(" ".join((text or "").split()))


def quote(value: Any) -> str:
    return f"`{value}`" if value != "" else ""


def write_value(value: Any) -> str:
    """A default as a recipe would have it."""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == {}:
        return "`{}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(str(getattr(item, 'value', item)) for item in value)}]`"
    return quote(getattr(value, "value", value))


def write_type(annotation: Any) -> str:
    """A field's type in words: "`a` or `b`", "int", "list of str", …"""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return f"{write_type(arguments[0])} {write_bounds(arguments[1:])}".strip()
    if origin is Literal:
        return ", ".join(map(quote, arguments))
    if origin in (typing.Union, types.UnionType):
        names = [write_type(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(name for name in dict.fromkeys(names) if name != "int" or "float" not in names)
    if origin is list:
        return f"list of {write_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(write_type(argument) for argument in arguments)}]"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and hasattr(annotation, "__members__"):
        return ", ".join(quote(member.value) for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "" if issubclass(annotation, DataSettings) else f"[fields](#{anchor(annotation.__name__)})"
    return "" if annotation is Any else getattr(annotation, "__name__", str(annotation))


def write_bounds(metadata: Iterable[Any]) -> str:
    """The bounds of a number, but the upper ones that no reasonable value comes near."""
    bounds = []
    for entry in metadata:
        if isinstance(entry, FieldInfo):
            bounds.append(write_bounds(entry.metadata))
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
            bound = getattr(entry, name, None)
            if isinstance(bound, int | float) and (sign in ">≥" or bound < 1000):
                bounds.append(f"{sign} {bound:g}")
    return ", ".join(filter(None, bounds))


def anchor(text: str) -> str:
    return re.sub(r"[^\w-]+", "-", text.lower()).strip("-")


def write_field(section: str, name: str, kind: str, default: str, meaning: str) -> str:
    """A row of a table of fields, with an anchor: `#training.steps`."""
    identifier = f"{section}.{name}" if section else name
    first = f"`{name}`{{ #{identifier} }}" + (f"<br><small>{kind}</small>" if kind else "")
    return f"| {first} | {default} | {meaning} |"


def write_heading(level: int, title: str, identifier: str) -> list[str]:
    return ["", f"{'#' * level} {title} {{ #{identifier} }}", ""]


def write_fields(rows: Iterable[str], what: str = "field") -> list[str]:
    """A table of fields, which a phone shows one below the other (site.css)."""
    head = [f"| {what} | default | meaning |", "| --- | --- | --- |"]
    return ['<div class="fields" markdown>', "", *head, *rows, "", "</div>"]


def list_fields(section: str, model: type[BaseModel]) -> list[str]:
    """The table of a pydantic model's fields, from their types, defaults and docstrings."""
    rows = []
    for name, field in model.model_fields.items():
        kind = f"{write_type(field.annotation)} {write_bounds(field.metadata)}".strip()
        default = "required" if field.is_required() else write_value(field.get_default(call_default_factory=True))
        if isinstance(field.default, BaseModel):
            default = ""
        if name != "kind" or model is records.Event:  # in a recipe, the heading says it
            rows.append(write_field(section, name, kind, default, join_lines(field.description)))
    return write_fields(rows)


def find_sections(model: type[BaseModel]) -> Iterator[tuple[str, type[Settings]]]:
    """The sections of a recipe below `model`, each with the name of its field."""
    for name, field in model.model_fields.items():
        for part in list_parts(field.annotation):
            if isinstance(part, type) and issubclass(part, Settings) and not issubclass(part, DataSettings):
                yield name, part


def list_parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from list_parts(argument)


def build_recipe_page() -> str:
    lines = ["## Top level", "", *list_fields("", Recipe), ""]
    done: set[type] = set()

    def add(path: str, section: type[Settings], depth: int) -> None:
        if section in done:
            return
        done.add(section)
        summary = re.sub(r"^(One of )?`\w+:?`:? ?,? ?(of a recipe: )?", "", first_paragraph(section))
        summary = summary[:1].upper() + summary[1:]
        lines.extend([*write_heading(depth, f"`{path}`", anchor(section.__name__)), write_prose(summary), ""])
        lines.extend(list_fields(path, section))
        for name, inner in find_sections(section):
            add(f"{path}.{name}", inner, 3)

    for name, section in find_sections(Recipe):
        add(name, section, 2)
    return "\n".join(lines)


def first_paragraph(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def read_arguments(docstring: str) -> Iterator[tuple[str, list[tuple[list[str], str]]]]:
    """The sections of a docstring and their entries: heading, then (names, text)."""
    heading, entries = "", []
    for line in inspect.cleandoc(docstring).splitlines():
        if match := re.fullmatch(r"    ([a-z_]\w*(?:, [a-z_]\w*)*): (.*)", line):
            entries.append((match[1].split(", "), match[2]))
        elif entries and line.startswith("        "):
            entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line.strip()}")
        elif re.fullmatch(r"[A-Z][a-z]+", line):
            if entries:
                yield heading, entries
            heading, entries = line, []
    if entries:
        yield heading, entries


def list_config_fields(kind: type, section: str) -> Iterator[str]:
    """A table for each section of the docstring of a config."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for heading, entries in read_arguments(kind.__doc__ or ""):
        rows = []
        for names, text in entries:
            for name in names:
                field = fields.get(name)
                default = "" if field is None or field.default is dataclasses.MISSING else write_value(field.default)
                type_text = "" if field is None else write_type(field.type)
                meaning = join_lines(text) if name == names[0] else f"see `{names[0]}`"
                rows.append(write_field(section, name, type_text, default, meaning))
        yield from [*write_heading(3, heading, anchor(f"{section} {heading}")), *write_fields(rows)]


def build_config_page() -> str:
    lines = [*write_heading(2, "Text models", "text"), "`HeadwaterConfig`", *list_config_fields(HeadwaterConfig, "")]
    lines += write_heading(2, "Image models", "images")
    lines += ["`HeadwaterVisionConfig` has the fields above that make sense without text, with ViT-B/16's values, and:"]
    lines += list_config_fields(HeadwaterVisionConfig, "images")
    return "\n".join(lines)


def read_option_texts(mechanism: type) -> dict[str, str]:
    """What options mean: the comment on their line, else what the class says of an argument of the same name."""
    text = " ".join((inspect.getdoc(mechanism) or "").partition(">>>")[0].split())
    parts = re.split(r"(?:^|(?<=[ .;]))((?:[a-z_]\w*, )*[a-z_]\w*): ", text)
    texts = {}
    for names, meaning in zip(parts[1::2], parts[2::2], strict=True):
        for name in names.split(", "):
            texts.setdefault(name, re.split(r" Parameters: | Args ", meaning)[0].strip())
    options = inspect.getsource(mechanism).partition("    class Options:\n")[2].partition("\n\n")[0]
    return texts | dict(re.findall(r"^ +(\w+): .*  # (.*)$", options, re.MULTILINE))


def count_costs(mechanisms: dict[str, Any]) -> tuple[int, float, int]:
    """Parameters, training FLOPs and bytes of the bf16 cache, the last two per token, of the introduction's model."""
    cost = estimate_model(HeadwaterConfig(vocab_size=50304, max_position_embeddings=2048, mechanisms=mechanisms))
    return sum(cost.parameters.values()), cost.at[0].training, cost.cache_bytes_per_token


def write_change(after: float, before: float) -> str:
    change = 100 * (after / before - 1)
    return "0" if after == before else f"{change:+.1f} %" if abs(change) >= 0.05 else "< 0.1 %"


def build_mechanisms_page() -> str:
    vanilla = count_costs({})
    lines = ["## What they cost", "", "| mechanism | reads | parameters | FLOPs | cache |"]
    lines += ["| --- | --- | ---: | ---: | ---: |"]
    for name in MECHANISMS.names:
        costs = count_costs({name: {}})
        changes = [
            f"{costs[0] - vanilla[0]:+,}",
            write_change(costs[1], vanilla[1]),
            write_change(costs[2], vanilla[2]),
        ]
        lines.append(f"| [`{name}`](#{name}) | {MECHANISMS.resolve(name).source or ''} | {' | '.join(changes)} |")
    for name in MECHANISMS.names:
        lines += describe_mechanism(name, MECHANISMS.resolve(name))
    return "\n".join(lines)


def describe_mechanism(name: str, mechanism: Any) -> Iterator[str]:
    """The section of a mechanism: the head of its file, its options, and its class."""
    title, _, rest = (importlib.import_module(mechanism.__module__).__doc__ or "").partition("\n")
    yield from [*write_heading(2, name, name), write_line(title), write_prose(rest), ""]
    texts, rows = read_option_texts(mechanism), []
    for field in dataclasses.fields(mechanism.Options):
        default = write_value(field.default) if field.default is not dataclasses.MISSING else "required"
        rows.append(write_field(name, field.name, write_type(field.type), default, join_lines(texts.get(field.name))))
    yield from write_fields(rows, "option") if rows else ["No options."]
    yield from ["", f"In Python: [`headwater.mechanisms.{mechanism.__name__}`](python.md#{locate(mechanism)})."]


def build_contract_page() -> str:
    kinds = {name: MECHANISMS.resolve(name) for name in MECHANISMS.names}
    lines = [*write_heading(2, "Stages", "stages"), "In the order of the forward pass:", ""]
    for stage in Stage:
        users = [f"[`{name}`](mechanisms.md#{name})" for name, kind in kinds.items() if has_own(kind, stage.value)]
        lines += [
            f"`{stage.value}`{{ #{stage.value} }}",
            "",
            write_prose(inspect.getdoc(getattr(Mechanism, stage.value)) or ""),
        ]
        lines += ["", f"Used by {', '.join(users)}." if users else "", ""]
    lines += write_heading(2, "Capabilities", "capabilities")
    for capability in CAPABILITIES:
        name, text = capability.__name__, inspect.getdoc(capability) or ""
        lines += [*write_heading(3, name, name), write_prose(text), ""]
        lines += [describe_member(capability, member) for member in sorted(members_of(capability))]
    return "\n".join(lines)


def describe_member(capability: type, member: str) -> str:
    method = getattr(capability, member, None)
    if not inspect.isroutine(method):
        return f"- `{member}`"
    names = [name for name in inspect.signature(method).parameters if name != "self"]
    return f"- `{member}({', '.join(names)})` {join_lines(inspect.getdoc(method))}"


def build_presets_page() -> str:
    lines = ["L layers, D width, H query heads, K key/value heads. Tied embeddings count once.", ""]
    lines += ["| preset | L / D / H / K | context | parameters | paper's figure | form |"]
    lines += ["| --- | --- | --- | ---: | ---: | --- |"]
    paper = None
    for row in DESCRIBED["presets"]():
        config = preset(row["name"])
        images = isinstance(config, HeadwaterVisionConfig)
        context = f"{config.tokens} of an image" if images else config.max_position_embeddings
        shape = " / ".join(str(row[key]) for key in ("layers", "width", "heads", "kv_heads"))
        if row["paper"] != paper:
            paper = row["paper"]
            lines.append(f"| **{write_line(paper)}** | | | | | |")
        lines.append(
            f"| `{row['name']}`{{ #{row['name']} }} | {shape} | {context} | {row['parameters']:,} | "
            f"{row['reported'] or ''} | {row['note']} |"
        )
    return "\n".join(lines)


def walk_commands(command: Any, path: str = "headwater") -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield f"{path} {name}", inner
            yield from walk_commands(inner, f"{path} {name}")


def write_parameter(parameter: Any) -> str:
    argument = parameter.param_type_name == "argument"
    names = parameter.metavar or parameter.name.upper()
    if not argument:
        names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    kind = "" if argument or getattr(parameter, "is_flag", False) else describe_click_type(parameter)
    default = parameter.default
    shown = "" if default in (None, False, ()) or callable(default) else write_value(default)
    text = join_lines(getattr(parameter, "help", ""))
    return f"| `{names}`{f'<br><small>{kind}</small>' if kind else ''} | {shown} | {text} |"


def describe_click_type(parameter: Any) -> str:
    descriptor = getattr(parameter, "type_descriptor", None)  # since typer 0.27; before, click's own
    return write_type(descriptor.annotation) if descriptor else str(parameter.type.name).lower()


def build_commands_page() -> str:
    lines: list[str] = []
    for path, command in walk_commands(typer.main.get_command(app)):
        _, *words = path.split()
        group = bool(getattr(command, "commands", None))
        lines += write_heading(1 + len(words), path, "-".join(words))
        lines += [textwrap.dedent(command.help or "").replace("\b\n", "").replace("\f", ""), ""]
        parameters = [] if group else [parameter for parameter in command.params if "--help" not in parameter.opts]
        if parameters:
            lines += write_fields(map(write_parameter, parameters), "argument")
    return "\n".join(lines)


def build_records_page() -> str:
    lines = ["## The record", "", *list_fields("", records.RunRecord)]
    for name, part in vars(records).items():
        public = isinstance(part, type) and issubclass(part, BaseModel) and part.__module__ == records.__name__
        if public and not name.startswith("_") and part is not records.RunRecord:
            lines += [*write_heading(2, name, anchor(name)), first_paragraph(part), ""]
            lines += list_fields(name.lower(), part)
    return "\n".join(lines)


def list_kinds(synthetic: bool) -> Iterator[tuple[str, type[DataSettings]]]:
    for name in reversed(DATA.names):  # text first
        settings = DATA.resolve(name)
        if issubclass(settings, SyntheticSettings) is synthetic:
            yield name, settings


def build_data_page() -> str:
    lines: list[str] = []
    inner: dict[str, type[Settings]] = {}
    for name, settings in list_kinds(synthetic=False):
        module = importlib.import_module(settings.__module__)
        lines += [*write_heading(2, f"kind: {name}", name), first_paragraph(module), ""]
        lines += list_fields(name, settings)
        inner |= dict(find_sections(settings))
    for name, section in inner.items():
        lines += [*write_heading(2, name, anchor(section.__name__)), first_paragraph(section), ""]
        lines += list_fields(name, section)
    return "\n".join(lines)


def build_tasks_page() -> str:
    rows = DESCRIBED["tasks"]()
    described = list(zip(list_tasks(), rows, strict=True))
    lines: list[str] = []
    for name, settings in list_kinds(synthetic=True):
        module = importlib.import_module(settings.__module__)
        data = next(
            kind
            for kind in vars(module).values()
            if inspect.isclass(kind) and kind.__name__ == settings.__name__.replace("Settings", "Data")
        )
        title, _, rest = (module.__doc__ or "").partition("\n")
        lines += [*write_heading(2, f"kind: {name}", name), write_line(title), write_prose(rest), ""]
        lines += [write_prose(inspect.getdoc(data) or ""), "", *list_fields(name, settings), ""]
        for variant, row in described:
            if variant.kind == name:
                form = getattr(variant, "variant", "")
                lines += ["", f"A held-out row{f' of `variant: {form}`' if form else ''}, labels after the arrows. "]
                lines[-1] += f"A guess has {row['metric']} {row['guess']:.3f}."
                lines += ["", *textwrap.indent(textwrap.fill(row["row"], 100), "    ").splitlines()]
    return "\n".join(lines)


def list_keywords(function: Any) -> list[str]:
    """The fields of `training` that an optimizer or a schedule reads: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def build_optimizers_page() -> str:
    lines: list[str] = []
    for title, registry in (("Optimizers", OPTIMIZERS), ("Schedules", SCHEDULES)):
        what = title.lower().removesuffix("s")
        lines += ["", f"## {title}", "", f"| `training.{what}` | what it does | fields of `training` that it reads |"]
        lines += ["| --- | --- | --- |"]
        for name in registry.names:
            thing = registry.resolve(name)
            fields = ", ".join(f"[`{field}`](recipe.md#training.{field})" for field in list_keywords(thing))
            lines.append(f"| `{name}`{{ #{name} }} | {join_lines(inspect.getdoc(thing))} | {fields} |")
    notation = join_lines(inspect.getdoc(laws)).partition(". ")[2]
    lines += ["", "## Laws", "", notation, "", "| `compare.ladder.law` | what it sets |", "| --- | --- |"]
    lines += [f"| `{name}` | {join_lines(inspect.getdoc(law))} |" for name, law in laws.LAWS.items()]
    return "\n".join(lines)


def read_head(path: Path) -> tuple[str, str, str, list[str]]:
    """The head of a recipe: what it shows, what it costs, the command that runs it, and its notes ("Needs: …")."""
    shows, costs, run, *notes = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    joined: list[str] = []
    for line in notes:
        if line.startswith("#   "):
            joined[-1] += line.removeprefix("#  ")
        else:
            joined.append(line.removeprefix("# "))
    return shows.removeprefix("# "), costs.removeprefix("# Costs "), run.removeprefix("# Run: "), joined


def build_recipes_page() -> str:
    lines: list[str] = []
    folder = None
    for recipe in DESCRIBED["recipes"]():
        name, path = recipe["name"], Path(recipe["file"])
        parent = name.rpartition("/")[0]
        if parent != folder:
            folder = parent
            lines += write_heading(2, parent or "Your own text", anchor(parent or "text"))
        shows, costs, run, notes = read_head(path)
        lines += [
            f"**`{name}`**{{ #{anchor(name)} }} {write_line(shows)}",
            "",
            f"- Costs {costs}",
            f"- Run: `{run.partition('   ')[0]}`",
        ]
        lines += [f"- {write_note(note)}" for note in notes] + [""]
    return "\n".join(lines)


def write_note(note: str) -> str:
    """A note of a recipe's head, its commands as code."""
    label, _, text = note.partition(": ")
    if label != "Needs":
        return write_line(note)
    commands = re.compile(r"^(headwater|python|hf|curl|TORCH=)")
    return f"{label}: " + "; ".join(
        f"`{part}`" if commands.match(part) else write_line(part) for part in text.split("; ")
    )


# The modules whose `__all__` is public, with the heading of each.
PUBLIC = {
    "headwater": "Models",
    "headwater_lab": "Experiments",
    "headwater.mechanisms": "Mechanisms",
    "headwater.growth": "Growth",
    "headwater.conversion": "Other families",
    "headwater.verification": "Verification",
    "headwater.testing": "Testing a mechanism",
    "headwater.cost": "Cost",
    "headwater_lab.evaluation": "Evaluation",
    "headwater_lab.inspection": "Inspection",
    "headwater_lab.reports": "Reports",
    "headwater_lab.data.synthetic": "Synthetic tasks",
    "headwater.integrations.torchtitan": "torchtitan",
}


def locate(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def list_public() -> Iterator[tuple[str, list[str]]]:
    """The public objects of each module of `PUBLIC`, by the place where they are defined."""
    listed: set[str] = set()
    for name in PUBLIC:
        module = importlib.import_module(name)
        places = []
        for public in module.__all__:
            thing = getattr(module, public)
            documented = inspect.isclass(thing) or inspect.isroutine(thing)
            if documented and (place := locate(thing)) not in listed:
                places.append(place)
                listed.add(place)
                returned = inspect.signature(thing).return_annotation if name == "headwater_lab" else None
                if isinstance(returned, str) and inspect.isclass(getattr(inspect.getmodule(thing), returned, None)):
                    places.append(f"{thing.__module__}.{returned}")
        yield name, places


def list_used(listed: set[str]) -> list[str]:
    """What hand-written pages import in Python and `__all__` does not list."""
    used: set[str] = set()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for module, names in re.findall(r"^from (headwater[\w.]*) import \(?([\w, \n]+)", block, re.MULTILINE):
                things = (getattr(importlib.import_module(module), name, None) for name in re.findall(r"\w+", names))
                used |= {locate(thing) for thing in things if inspect.isclass(thing) or inspect.isroutine(thing)}
    return sorted(name for name in used - listed if name.startswith("headwater"))


def build_python_page() -> str:
    sections = dict(list_public())
    sections["headwater_lab.data.base"] = ["headwater_lab.data.base.Data"]
    used = list_used({place for places in sections.values() for place in places})
    lines: list[str] = []
    for name, places in sections.items():
        lines += write_heading(2, f"{PUBLIC.get(name, 'Data')}: {name}", name)
        lines += [f"::: {place}\n" for place in places]
    lines += ["", "## Elsewhere", "", "Names that the guides use."]
    return "\n".join([*lines, *(f"\n::: {place}\n    options: {{show_root_full_path: true}}" for place in used)])


# Page -> what makes the part below its introduction.
PAGES: dict[str, Callable[[], str]] = {
    "reference/recipe.md": build_recipe_page,
    "reference/config.md": build_config_page,
    "reference/mechanisms.md": build_mechanisms_page,
    "reference/contract.md": build_contract_page,
    "reference/presets.md": build_presets_page,
    "reference/data.md": build_data_page,
    "reference/tasks.md": build_tasks_page,
    "reference/optimizers.md": build_optimizers_page,
    "reference/recipes.md": build_recipes_page,
    "reference/commands.md": build_commands_page,
    "reference/records.md": build_records_page,
    "reference/python.md": build_python_page,
}


@functools.cache
def build_page(page: str) -> str:
    """The generated part of a page of the reference."""
    return PAGES[page]()
