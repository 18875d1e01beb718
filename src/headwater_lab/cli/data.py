"""`headwater data …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from headwater.util.errors import HeadwaterError
from headwater.util.terminal import Table
from headwater_lab.cli.common import check_writable, out, quiet
from headwater_lab.cli.progress import ProgressReport

if TYPE_CHECKING:
    from headwater_lab.data.shards import Skipped

data = typer.Typer(help="Prepare corpora for training: tokens on disk, and tokenizers.", no_args_is_help=True)

SourceArgument = Annotated[
    str,
    typer.Argument(
        help="A file, folder or glob of text, JSONL, CSV or parquet files; a dataset on the hub; or a named corpus: "
        "openwebtext, pile, slimpajama, fineweb, fineweb-edu, wikitext, enwik8."
    ),
]
TextColumnOption = Annotated[
    str, typer.Option(help="Column or JSON field with the text or the messages, dotted if nested.")
]
Local = Annotated[str | None, typer.Option(help="Read a named corpus from these files.", show_default=False)]
Config = Annotated[str | None, typer.Option(help="Configuration of the dataset on the hub.", show_default=False)]
Split = Annotated[str | None, typer.Option(help="Split of the dataset; default: train.", show_default=False)]
Separator = Annotated[
    str | None, typer.Option(help="Line that separates the documents of a text file.", show_default=False)
]


@data.command("prepare")
def prepare(
    source: SourceArgument,
    folder: Annotated[Path, typer.Option("--out", help="A new folder.", show_default=False)],
    tokenizer: Annotated[
        str, typer.Option(help='"bytes", or the folder, tokenizer.json or hub name of a tokenizer.')
    ] = "bytes",
    text_column: TextColumnOption = "text",
    config: Config = None,
    split: Split = None,
    separator: Separator = None,
    by: Annotated[
        str | None,
        typer.Option(help="Column to split by: each value gets its own folder; dotted if nested.", show_default=False),
    ] = None,
    local: Local = None,
    held_out: Annotated[float, typer.Option(help="Share of the documents to hold out, chosen by hash.")] = 0.01,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Tokenizer threads; default: one per core, up to 16.", show_default=False),
    ] = None,
) -> None:
    """Tokenize a corpus into memory-mapped shards."""
    from headwater_lab.data.prepare import Options
    from headwater_lab.data.prepare import prepare as run
    from headwater_lab.data.shards import DOMAINS, MANIFEST, Skipped, read_manifest
    from headwater_lab.data.stream import TextSource

    quiet()
    check_writable(folder, folder=True)
    is_finished = any((folder / name).exists() for name in (DOMAINS, MANIFEST))
    with _Bar("tokens") as bar:
        folders = run(
            TextSource(source, text_column, config, split, separator, by=by),
            folder,
            tokenizer,
            Options(held_out),
            local=local,
            workers=workers,
            on_progress=bar,
        )
    if is_finished:
        _say(f"{folder} is already finished")
    out.print(_table(folders))
    skipped = read_manifest(folders[0]).skipped
    if skipped != Skipped():
        _say(_skipped(skipped))


@data.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="A prepared folder.")],
    check: Annotated[bool, typer.Option("--check", help="Read all files and compare their checksums.")] = False,
) -> None:
    """Show what a prepared folder contains."""
    from headwater_lab.data import shards

    prepared = shards.open_all(folder)
    out.print(_table([one.folder for one in prepared]))
    first = prepared[0].manifest
    _say(
        f"{first.source}, tokenizer {first.tokenizer.name} ({first.tokenizer.vocab_size:,} tokens), {first.dtype}, "
        f"made by headwater {first.headwater}"
    )
    skipped = first.skipped
    _say(_skipped(skipped))
    if check:
        shards.check_all(prepared)
        _say("all checksums match")


@data.command("tokenizer")
def tokenizer(
    source: SourceArgument,
    folder: Annotated[Path, typer.Option("--out", help="A new folder.", show_default=False)],
    vocab_size: Annotated[
        int, typer.Option(min=257, help="Vocabulary size, including the end-of-text token.")
    ] = 32_000,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of text to train on, from the beginning of the source.")
    ] = 10**9,
    text_column: TextColumnOption = "text",
    config: Config = None,
    split: Split = None,
    separator: Separator = None,
    local: Local = None,
) -> None:
    """Train a byte-level BPE tokenizer on a corpus."""
    from headwater.util.files import staged
    from headwater_lab.data.chat import contents
    from headwater_lab.data.known import resolve
    from headwater_lab.data.reading import check_name
    from headwater_lab.data.stream import Stream, TextSource
    from headwater_lab.data.tokenizer import train_tokenizer

    quiet()
    check_name(folder.absolute())
    check_writable(folder, folder=True)
    documents = size = 0
    with staged(folder) as new:
        with _Bar("") as bar:

            def texts():
                nonlocal documents, size
                for part in Stream(resolve(TextSource(source, text_column, config, split, separator), local)):
                    yield contents(part.text) if part.is_chat else part.text
                    documents, size = documents + part.last, size + len(part.data)
                    bar(documents, size, 0)
                    if size >= max_bytes:
                        return

            trained = train_tokenizer(texts(), vocab_size)
        if not size:
            raise HeadwaterError(f"{source!r} contains no text; name a file or folder with text.")
        trained.save_pretrained(new)
    _say(f"{len(trained):,} tokens learned from {size / 1e6:,.1f} MB in {documents:,} documents, written to {folder}")


def _skipped(skipped: Skipped) -> str:
    """What of the source is not in the shards."""
    return (
        f"skipped: {skipped.empty:,} empty documents, {skipped.none:,} rows without text, {skipped.files:,} files "
        "that are not UTF-8 text" + (f": {', '.join(skipped.names)}" if skipped.names else "")
    )


def _say(text: str) -> None:
    """Print a line that contains names, without markup."""
    from headwater_lab.data.reading import printable

    out.print(printable(text), soft_wrap=True, highlight=False, markup=False)


class _Bar:
    """Progress on stderr: documents, MB of text, tokens per second. A stream has no known end."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.progress = ProgressReport(
            SpinnerColumn(), TextColumn("{task.fields[info]}", markup=False), TimeElapsedColumn()
        )
        self.task = self.progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, documents: int, size: int, tokens: int) -> None:
        self.progress.start()  # at the first call, so that an earlier error leaves no bar behind
        seconds = self.progress.tasks[0].elapsed or 0
        info = f"{documents:,} documents, {size / 1e6:,.1f} MB"
        if self.unit and seconds:
            info += f", {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
        self.progress.update(self.task, info=info)


def _table(folders: list[Path]) -> Table:
    from headwater_lab.data.reading import printable
    from headwater_lab.data.shards import read_manifest

    table = Table()
    for name in ("folder", "split", "documents", "MB of text", "tokens", "bytes/token", "shards"):
        table.add_column(name, justify="left" if name in ("folder", "split") else "right", overflow="fold")
    for folder in folders:
        manifest = read_manifest(folder)
        for name, facts in (("train", manifest.train), ("held out", manifest.held_out)):
            table.add_row(
                printable(str(folder)) if name == "train" else "",
                name,
                f"{facts.documents:,}",
                f"{facts.bytes / 1e6:,.2f}",
                f"{facts.tokens:,}" + ("" if facts.answer_tokens is None else f" ({facts.answer_tokens:,} of answers)"),
                f"{facts.bytes / facts.counted_tokens:.2f}" if facts.counted_tokens else "",
                str(len(facts.shards)),
            )
        kept = manifest.evaluation
        table.add_row("", "evaluation text", f"{kept.documents:,}", f"{kept.bytes / 1e6:,.2f}")
    return table
