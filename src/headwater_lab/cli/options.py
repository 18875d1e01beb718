"""Commands from functions: options from signatures and docstrings, and errors for options that have no effect."""

import inspect
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.padding import Padding
from rich.text import Text
from typer import rich_utils
from typer.core import TyperCommand, TyperGroup

from headwater.util.errors import HeadwaterError, find_unusable, shown
from headwater.util.files import check_local
from headwater_lab.cli.arguments import quiet, tell, warn_untested


@dataclass(frozen=True)
class Values:
    """The constraints on an option's or argument's values in its annotation, in Typer's terms."""

    min: float | None = None
    max: float | None = None
    file_okay: bool = True
    dir_okay: bool = True
    metavar: str | None = None
    help: str | None = None


PositiveInt = Annotated[int, Values(min=1)]
NaturalInt = Annotated[int, Values(min=0)]
CheckpointPath = Annotated[Path, Values(help="A checkpoint's folder, or a run's (its newest checkpoint).")]
FilePath = Annotated[Path, Values(dir_okay=False)]
FolderPath = Annotated[Path, Values(file_okay=False)]
DeviceName = Annotated[str, Values(help="cpu, cuda, cuda:1, …; auto is a GPU if there is one.")]
WorkerCount = Annotated[int, Values(min=1, max=1024, help="Trials at a time; default: one per GPU or core.")]
AsJson = Annotated[bool, Values(help="Print JSON.")]
TrustRemoteCode = Annotated[bool, Values(help="Run code that comes with a model. Use it only for models you trust.")]
TrustedNames = Annotated[
    Sequence[str],
    Values(
        metavar="NAME",
        help="Trust code (package.module or package.module:Class) or data (a path) that files name; repeatable.",
    ),
]
# The option --trust. It is handled here and not passed to the command's function.
TRUST = inspect.Parameter("trust", inspect.Parameter.KEYWORD_ONLY, default=(), annotation=TrustedNames)
# Columns of a terminal on which the names, types and texts of options do not fit beside each other.
NARROW = 72
# A command's row in --help has its name, its text, and whether it is deprecated; an option's has more.
MOST_CELLS_OF_A_COMMAND = 3
# Headings that group the commands in --help.
HEADINGS = TRAIN, USE, MAKE, LOOK = "Train and compare", "Use a model", "Change a trained model", "Plan and inspect"
# Options that count a corpus's bytes or tokens and so allow larger numbers.
BYTES = ("max_bytes",)
# Options whose text may begin like an address although it is not a path.
FREE_TEXT = ("prompt", "stop", "separator")


class _FoldingHighlighter(rich_utils.OptionHighlighter):
    """A highlighter that folds names wider than their column of --help, where Typer cuts them."""

    def highlight(self, text: Text) -> None:
        text.overflow = "fold"
        super().highlight(text)


class _HelpTable(rich_utils.Table):
    """A table of --help without the type of flags, on a narrow terminal with the text of an option below its name."""

    def add_row(self, *cells: Any, **settings: Any) -> None:
        cells = tuple("" if str(cell) == "<bool>" else cell for cell in cells)
        if len(cells) > MOST_CELLS_OF_A_COMMAND and shutil.get_terminal_size().columns < NARROW:
            *names, text = cells
            super().add_row(Text(" ").join(Text.assemble(name) for name in names if name))
            cells = (Padding(text, (0, 0, 0, 4)),)
        super().add_row(*cells, **settings)


rich_utils.highlighter = _FoldingHighlighter()
vars(rich_utils)["Table"] = _HelpTable


class _Group(TyperGroup):
    """A group that shows its commands under their headings in order."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        commands: Iterable[Any] = self.commands.values()
        commands = sorted(commands, key=lambda command: (HEADINGS.index(command.rich_help_panel), command.name))
        self.commands = {command.name: command for command in commands}


class _Command(TyperCommand):
    """A command that reports repeated options, and rejects values that no command can use.

    A number that is not finite or beyond 64 bits passes through every range that Typer checks, and an empty path is
    the working directory.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        texts, _, parameters = self.make_parser(ctx).parse_args([*args])
        counts: Counter[Any] = Counter(parameters)
        for parameter, count in counts.items():
            is_option = parameter.param_type_name == "option"
            if count > 1 and is_option and not (parameter.multiple or parameter.is_flag):
                tell(f"Only the last {max(parameter.opts, key=len)} is read; it appears {count} times.")
        remaining = super().parse_args(ctx, args)
        for parameter in counts:
            _check_value(parameter, texts[parameter.name], ctx.params.get(parameter.name))
        return remaining


# The command line. Every module of this folder adds its commands.
app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)


def add_group(heading: str, name: str, text: str) -> typer.Typer:
    """Add a group of commands under a heading of --help."""
    group = typer.Typer(help=text, no_args_is_help=True)
    group.callback()(lambda: None)  # keeps it a group even with one command
    app.add_typer(group, name=name, rich_help_panel=heading)
    return group


def command(
    parent: str | typer.Typer, example: str, *, trusts: bool | None = None, **shown: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that becomes a command, under a heading of --help or in a group.

    example: begins with the command's name. trusts: the command has the option --trust; default: except in groups.
    shown: Typer's settings.
    """
    if isinstance(parent, str):
        group, name, trusts = app, example.split()[0], trusts is not False
        shown["rich_help_panel"] = parent
    else:
        group, name = parent, example.split()[1]

    def add(function: Callable[..., None]) -> Callable[..., None]:
        text, declared = _declare(function, bool(trusts))
        group.command(name, cls=_Command, help=text, epilog=f"Example: headwater {example}", **shown)(declared)
        return function

    return add


def _declare(function: Callable[..., Any], trusts: bool) -> tuple[str, Callable[..., None]]:
    """Make a command's help, and the function for Typer.

    Keyword-only parameters become options of the same name, as do the fields of one that is a dataclass of integers,
    and of a TypedDict of further ones; the others become arguments. Lines `name: text` at the end of a docstring are
    their help, and the text before them is the command's help.
    """
    signature = inspect.signature(function, eval_str=True)
    types = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    sections = {name: kind for name, kind in types.items() if isinstance(kind, type) and is_dataclass(kind)}
    text, texts = _list_texts(function, signature.parameters)
    parameters = [inspect.Parameter("command_line", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for parameter in [*signature.parameters.values(), *([TRUST] if trusts else [])]:
        if (section := sections.get(parameter.name)) is not None:
            for base in reversed(section.__mro__):
                texts |= _list_texts(base, [field.name for field in fields(section)])[1]
            for field in fields(section):
                values = Values(**field.metadata)
                option = parameter.replace(name=field.name, default=field.default, annotation=Annotated[int, values])
                parameters.append(_declared_values(option, texts))
        elif parameter.kind is parameter.VAR_KEYWORD:
            (settings,) = get_args(parameter.annotation)
            hints = get_type_hints(settings)
            texts |= _list_texts(settings, hints)[1]
            option = parameter.replace(kind=parameter.KEYWORD_ONLY, default=None)
            parameters += [_declared_values(option.replace(name=name, annotation=hints[name]), texts) for name in hints]
        else:
            parameters.append(_declared_values(parameter, texts))

    def command(command_line: typer.Context, trust: Sequence[str] = (), **values: Any) -> None:
        from headwater.plugins.trust import trust_names

        _running.set(command_line)
        trust_names(trust)
        quiet()
        warn_untested()
        for name, section in sections.items():
            values[name] = section(**{field.name: values.pop(field.name) for field in fields(section)})
        function(**values)

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return text, command


def _list_texts(documented: Any, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Split a docstring into the text before its lines `name: text`, and these lines by name."""
    begin = re.compile(rf"^(?=(?:{'|'.join(names) or '$'}): )", re.MULTILINE)
    text, *lines = begin.split(inspect.getdoc(documented) or "")
    return text.strip(), {name: " ".join(words.split()) for name, _, words in (line.partition(": ") for line in lines)}


def _declared_values(parameter: inspect.Parameter, texts: dict[str, str]) -> inspect.Parameter:
    """Turn a function's parameter into Typer's."""
    kind, values = _type_and_values(parameter.annotation)
    settings = vars(values) | {"show_default": parameter.default not in (None, ())}
    if parameter.name in texts:
        settings["help"] = texts[parameter.name]
    if parameter.kind is parameter.KEYWORD_ONLY:
        declared = typer.Option(f"--{parameter.name.replace('_', '-')}", **settings)
    else:
        declared = typer.Argument(**settings)
    return parameter.replace(annotation=Annotated[kind, declared], kind=parameter.KEYWORD_ONLY)


def _type_and_values(annotation: Any) -> tuple[Any, Values]:
    """Find a parameter's type for Typer, and the constraints on its values in the annotation."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _type_and_values(arguments[0])[0], arguments[1]
    if get_origin(annotation) is Sequence:
        kind, values = _type_and_values(arguments[0])
        return list[kind], values  # type: ignore[valid-type]
    if type(None) in arguments:
        kind, values = _type_and_values(arguments[0])
        return kind | None, values
    return annotation, Values()


# Context of the running command.
_running: ContextVar[Any] = ContextVar("running")


def entered(*options: str) -> list[str]:
    """List which of the options are on the command line."""
    sources = {option: _running.get().get_parameter_source(option.strip("-").replace("-", "_")) for option in options}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def refuse(where: str, *options: str, overrides: Sequence[str] = ()) -> None:
    """Raise `HeadwaterError` for options, or overrides of a recipe, that have no effect."""
    if unread := [*overrides, *entered(*options)]:
        has, them = ("has", "it") if len(unread) == 1 else ("have", "them")
        raise HeadwaterError(f"{' and '.join(unread)} {has} no effect {where}; leave {them} out.")


def need(readers: str, *options: str) -> None:
    """Raise `HeadwaterError` if options are on the command line without the option that they belong to.

    readers: such as "--tasks or --task-files".
    """
    if not entered(*readers.split(" or ")):
        refuse(f"without {readers}", *options)


def exclude(option: str, *options: str) -> None:
    """Raise `HeadwaterError` if an option is on the command line together with any of the others."""
    if entered(option):
        refuse(f"with {option}", *options)


def extra_arguments() -> list[str]:
    """List the arguments on the command line that the command does not know, if it takes them."""
    return _running.get().args


def _check_value(parameter: Any, text: Any, value: Any) -> None:
    """Raise `HeadwaterError` for a parameter's value that no command can use. text: the value on the command line."""
    name = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.name.upper()
    if (problem := find_unusable(value)) is not None:
        raise HeadwaterError(f"{name}: {problem[1]}.")
    if isinstance(value, int) and abs(value) >= 2**31 and parameter.name not in BYTES:
        raise HeadwaterError(f"{name}: {value:,} is too large; choose a smaller value.")
    texts, values = (item if isinstance(item, list | tuple) else [item] for item in (text, value))
    for word in texts if parameter.name not in FREE_TEXT else ():
        if isinstance(word, str):
            check_local(word, name)
    for word, path in zip(texts, values, strict=False):
        if isinstance(path, Path):
            _check_path(name, word, path)


def _check_path(name: str, text: Any, path: Path) -> None:
    """Raise `HeadwaterError` for an empty path, and for an output that cannot be displayed."""
    if text == "":
        raise HeadwaterError(f"{name} is empty; give a path, such as . for this folder.")
    if name == "--out" and not str(path).isprintable():
        # This includes bytes that are not UTF-8, which some libraries cannot write.
        raise HeadwaterError(f"{name} {shown(str(path))} has characters that cannot be displayed; rename it.")
