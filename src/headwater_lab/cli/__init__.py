"""The command line. Each command parses, calls the library, and prints; errors become one sentence and exit code 2."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from headwater.util.errors import HeadwaterError, first_line
from headwater.util.files import disk_problem
from headwater_lab.cli.common import LOOK, MAKE, TRAIN, USE
from headwater_lab.cli.options import add_command, guard_command
from headwater_lab.util.endings import Interrupted
from headwater_lab.util.terminal import literal

# Each command by module and function, with an example, under its heading in --help. A group has no example.
COMMANDS: dict[str, dict[str, str]] = {
    TRAIN: {
        "training:train": "train shakespeare training.steps=200 --out runs/mine",
        "comparing:compare": "compare demo/induction demo/language --out runs/demo",
        "reproducing:reproduce": "reproduce kv-shifting/figure-1a",
        "data:data": "",
    },
    USE: {
        "running:generate": 'generate runs/mine "First Citizen:" --max-new-tokens 100',
        "predicting:predict": "predict runs/digits image.png",
        "evaluating:evaluate": "evaluate runs/a runs/b --text 'texts/*.txt' --out eval.json",
        "inspecting:inspect": "inspect runs/a runs/b --out runs/inside",
        "verifying:verify": "verify runs/mine",
        "running:serve": "serve runs/mine --port 8000",
        "running:export": "export runs/mine --out exported",
    },
    MAKE: {
        "growing:retrofit": "retrofit meta-llama/Llama-3.2-1B --mechanism NAME --out llama-more",
        "converting:convert": "convert runs/llama --num-key-value-heads 1 --text 'texts/*.txt' --out runs/smaller",
        "growing:grow": "grow runs/mine ffn_pairs=1024",
        "growing:shrink": "shrink runs/mine --ffn-pairs 512",
        "growing:merge": "merge runs/base runs/left runs/right",
        "new:new": "",
    },
    LOOK: {
        "planning:plan": "plan gpt2-124m tokenformer-124m --hardware H100 --tokens 300B",
        "planning:init": "init tokenformer-124m num_hidden_layers=2",
        "listing:list": "list presets",
        "training:runs": "runs",
        "comparing:report": "report runs/demo",
        "bench:bench": "",
        "doctor:doctor": "doctor",
    },
}


class _Commands(Mapping[str, Any]):
    """The commands by name, each imported when it is first looked up: to run one, the others are not needed."""

    places = {path.partition(":")[2]: (panel, path) for panel, commands in COMMANDS.items() for path in commands}

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, name: str) -> Any:
        return _command(name, *self.places[name])


@functools.cache
def _command(name: str, panel: str, path: str) -> Any:
    """A command or a group of them, from its module."""
    command = getattr(import_module(f"{__name__}.{path.partition(':')[0]}"), name)
    group = typer.Typer()
    if isinstance(command, typer.Typer):
        group.add_typer(command, name=name, rich_help_panel=panel)
    else:
        # `serve` passes unknown options to the server.
        settings = {"allow_extra_args": True, "ignore_unknown_options": True} if name == "serve" else {}
        example, trusts = COMMANDS[panel][path], name != "list"
        add_command(group, name, command, example, trusts=trusts, context_settings=settings, rich_help_panel=panel)
    return guard_command(typer.main.get_group(group).commands[name])


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # none is ever added


app = typer.Typer(
    cls=_Group,
    help="Train, compare and run Transformers whose keys and values also come from other tokens, layers or parameters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


# The error of a command line that cannot be parsed, in Click's words.
UsageError: Any = typer.BadParameter.__bases__[0]


def _version(wanted: bool) -> None:
    if wanted:
        from headwater import __version__

        print(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def headwater(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train, compare and run Transformers whose keys and values also come from other tokens, layers or parameters."""


def not_encoded(error: UnicodeEncodeError) -> str:
    """What to do about a text that cannot be written: often a path."""
    text = ascii(error.object)
    if any("\ud800" <= letter <= "\udfff" for letter in error.object[error.start : error.end]):
        return f"{text} is not valid text: it has bytes that are not UTF-8, or half of a surrogate pair; rename it."
    return (
        f"{text} cannot be written in the encoding {error.encoding!r}; set PYTHONUTF8=1, or a UTF-8 locale such as "
        "LANG=C.UTF-8."
    )


def main() -> None:
    """Entry point: run a command, turn errors that the user can fix into one sentence."""
    try:
        sys.exit(typer.main.get_command(app)(standalone_mode=False))
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.message, end="")  # the help, if it is not printed yet
            sys.exit(2)
        _end(2, literal(error.format_message().replace("Value error, ", "")))
    except (Interrupted, KeyboardInterrupt) as error:  # SIGINT or SIGTERM
        _end(130, str(error))
    except BrokenPipeError:  # the reader closed the pipe
        _end(1)
    except UnicodeEncodeError as error:
        _end(2, not_encoded(error))
    except HeadwaterError as error:
        _end(2, literal(str(error)))
    except (MemoryError, RuntimeError) as error:
        if "start new thread" in str(error):
            _end(2, "No more threads can be started here; raise the limit (ulimit -u), or use fewer workers.")
        if not isinstance(error, MemoryError) and "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        _end(2, f"Not enough memory: {first_line(error)}")
    except OSError as error:
        path = f" ({error.filename})" if error.filename else ""
        _end(2, literal(f"{disk_problem(error)}{path}"))


def _end(code: int, sentence: str = "") -> NoReturn:
    if sentence:
        print(f"headwater: {sentence}", file=sys.stderr)
    sys.exit(code)
