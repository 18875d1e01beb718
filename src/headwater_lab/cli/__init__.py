"""The command line. Each command parses, calls the library, and prints; errors become one sentence and exit code 2."""

import pkgutil
import re
import sys
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer

from headwater.util.errors import HeadwaterError, either, find_near, first_line
from headwater.util.files import disk_problem
from headwater_lab.cli.arguments import tell
from headwater_lab.cli.options import app
from headwater_lab.util.endings import Interrupted

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

# Click's error for a command line that cannot be parsed.
UsageError: Any = typer.BadParameter.__bases__[0]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from headwater import __version__

        print(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def set_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train, compare and run Transformers whose keys and values also come from other tokens, layers or parameters."""


def explain_encoding(error: UnicodeEncodeError) -> str:
    """Explain what to do about a text that cannot be written, often a path."""
    text = ascii(error.object)
    if any("\ud800" <= letter <= "\udfff" for letter in error.object[error.start : error.end]):
        return f"{text} is not valid text: it has bytes that are not UTF-8, or half of a surrogate pair; rename it."
    return (
        f"{text} cannot be written in the encoding {error.encoding!r}; set PYTHONUTF8=1, or a UTF-8 locale such as "
        "LANG=C.UTF-8."
    )


def explain_usage(error: Any) -> str:
    """Explain a command line that cannot be parsed, with near names in place of those that Click guesses."""
    if type(error).__name__ == "NoSuchOption":
        unknown, kind = error.option_name, "option"
        names = [name for parameter in error.ctx.command.params for name in parameter.opts if name.startswith("--")]
        words = [
            word if re.search("=|^--|[.]yaml$|^$", after) or "=" in word else f"{word}={after}"
            for word, after in pairwise([*sys.argv, ""])
            if word.startswith("--") and word.partition("=")[0] not in names
        ]
        if sentence := _explain_options(error.ctx.command, words, names):
            return sentence
    elif match := re.match("No such command '(.*?)'", error.message):
        unknown, kind, names = match[1], "command", list(error.ctx.command.commands)
    else:
        return error.format_message().replace("Value error, ", "")
    near = find_near(unknown, names)
    hint = f"did you mean {either(near)}?" if near else f"`{error.ctx.command_path} --help` lists all."
    return f"There is no {kind} {unknown}; {hint}"


def _explain_options(command: Any, words: list[str], names: list[str]) -> str | None:
    """Explain options that other programs have for fields of a recipe, or for sampling; None if none of them has."""
    from headwater_lab.recipe import messages

    if any(parameter.name == "overrides" for parameter in command.params):
        from headwater_lab.data.text import TextSettings
        from headwater_lab.recipe.recipe import list_sections

        return messages.describe_unknown_options(words, list_sections(TextSettings))
    return messages.describe_sampling_options(words, names) if command.name == "generate" else None


def main() -> None:
    """Run a command, and turn errors that the user can fix into one sentence."""
    try:
        sys.exit(typer.main.get_command(app)(standalone_mode=False))
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.message, end="")  # the help text, unless it has been printed
            sys.exit(2)
        _end(2, explain_usage(error))
    except (Interrupted, KeyboardInterrupt) as error:  # SIGINT or SIGTERM
        _end(130, str(error))
    except BrokenPipeError:  # the reader closed the pipe
        _end(1)
    except UnicodeEncodeError as error:
        _end(2, explain_encoding(error))
    except HeadwaterError as error:
        _end(2, str(error))
    except (MemoryError, RuntimeError) as error:
        if "start new thread" in str(error):
            _end(2, "No more threads can be started; raise the limit (ulimit -u), or use fewer workers.")
        if not isinstance(error, MemoryError) and "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        _end(2, f"Not enough memory: {first_line(error)}")
    except OSError as error:
        path = f" ({error.filename})" if error.filename else ""
        _end(2, f"{disk_problem(error)}{path}")


def _end(code: int, sentence: str = "") -> NoReturn:
    if sentence:
        tell(f"headwater: {sentence}")
    sys.exit(code)
