"""The command line. Each command parses, calls the library, and prints; errors become one sentence and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from headwater.cli import (
    bench,
    comparing,
    data,
    evaluating,
    growing,
    inspecting,
    planning,
    reproducing,
    running,
    training,
)
from headwater.errors import HeadwaterError, Interrupted

app = typer.Typer(
    help="Train, compare and run Transformers whose keys and values come from more places than one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS: list[Callable[..., None]] = [
    training.train,
    training.runs,
    training.replay,
    comparing.compare,
    comparing.search,
    comparing.report,
    reproducing.reproduce,
]
COMMANDS += [growing.grow, growing.widen, growing.shrink, growing.merge, growing.retrofit]
COMMANDS += [running.generate, running.verify, running.serve, running.export]
COMMANDS += [evaluating.evaluate, inspecting.inspect, planning.plan, planning.presets, planning.theory]
for command in COMMANDS:
    # What `serve` does not know goes on to the server.
    more = {"allow_extra_args": True, "ignore_unknown_options": True} if command is running.serve else {}
    app.command(context_settings=more)(command)
app.add_typer(data.data, name="data")
app.add_typer(bench.bench, name="bench")


def main() -> None:
    """Entry point: run a command, turn what the user can put right into one sentence."""
    try:
        app(standalone_mode=True)
    except HeadwaterError as error:
        print(f"headwater: {error}", file=sys.stderr)
        sys.exit(2)
    except UnicodeEncodeError as error:  # a path, where Python's locale is C
        text = ascii(error.object[error.start : error.end])
        print(
            f"headwater: {text} cannot be written in the encoding {error.encoding!r}; set PYTHONUTF8=1, or a locale "
            "with UTF-8 as LANG=C.UTF-8.",
            file=sys.stderr,
        )
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        print(f"headwater: There is not enough memory for this: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.exit(1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"headwater: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as error:
        print(f"headwater: {error}", file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:  # SIGINT or SIGTERM
        sys.exit(130)
