"""`headwater data …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headwater.cli.common import GoesOn, check_writable, err, one_folder, out, quiet
from headwater.errors import HeadwaterError
from headwater.terminal import Table

data = typer.Typer(help="Prepare corpora for training: tokens on disk, and tokenizers.", no_args_is_help=True)

SourceArgument = Annotated[
    str,
    typer.Argument(
        help="A file, folder or glob of text, JSONL or parquet files; a dataset on the hub; or a named corpus: "
        "openwebtext, pile, slimpajama, fineweb, fineweb-edu, wikitext, enwik8."
    ),
]
TextColumnOption = Annotated[str, typer.Option(help="Column or JSON field with the text.")]
Local = Annotated[str | None, typer.Option(help="Read a named corpus from these files.", show_default=False)]
Config = Annotated[str | None, typer.Option(help="Configuration of the dataset on the hub.", show_default=False)]
Split = Annotated[str | None, typer.Option(help="Its split; default train.", show_default=False)]
Separator = Annotated[
    str | None, typer.Option(help="The line between two documents of a text file.", show_default=False)
]


@data.command("prepare")
def prepare(
    source: SourceArgument,
    folder_argument: Annotated[Path | None, typer.Argument(metavar="OUT", hidden=True)] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="A new folder, or one to continue.", show_default=False)
    ] = None,
    tokenizer: Annotated[str, typer.Option(help='"bytes", a folder, or a name on the hub.')] = "bytes",
    text_column: TextColumnOption = "text",
    config: Config = None,
    split: Split = None,
    separator: Separator = None,
    by: Annotated[
        str | None,
        typer.Option(help="Column whose values get a folder each; dotted if nested.", show_default=False),
    ] = None,
    local: Local = None,
    held_out: Annotated[float, typer.Option(help="Share of the documents that is held out, by hash.")] = 0.01,
    evaluation_bytes: Annotated[
        int, typer.Option(min=1, help="At most this much held-out text is also kept as text.")
    ] = 10_000_000,
    shard_tokens: Annotated[int, typer.Option(min=1, help="A shard ends after the document that reaches this.")] = 2
    ** 27,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that tokenise; default one per core, 16 at most.", show_default=False),
    ] = None,
    resume: GoesOn = False,
) -> None:
    """Tokenise a corpus into memory-mapped shards. Run it again to continue where it stopped."""
    from headwater.data.prepare import Options
    from headwater.data.prepare import prepare as run
    from headwater.data.shards import DOMAINS, JOURNAL, MANIFEST
    from headwater.data.stream import TextSource

    quiet()
    folder = one_folder(folder_argument, out_folder)
    check_writable(folder, folder=True)
    there = {name for name in (DOMAINS, JOURNAL, MANIFEST) if (folder / name).exists()}
    with _Bar("tokens") as bar:
        folders = run(
            TextSource(source, text_column, config, split, separator, by=by),
            folder,
            tokenizer,
            Options(held_out, evaluation_bytes, shard_tokens),
            local=local,
            workers=workers,
            on_progress=bar,
        )
    if there and JOURNAL not in there:
        _say(f"{folder} is finished already")
    out.print(_table(folders))


@data.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="A prepared folder.")],
    check: Annotated[bool, typer.Option("--check", help="Read all files and compare their checksums.")] = False,
) -> None:
    """What a prepared folder holds."""
    from headwater.data import shards

    prepared = shards.open_all(folder)
    out.print(_table([one.folder for one in prepared]))
    first = prepared[0].manifest
    _say(
        f"{first.source}, tokenizer {first.tokenizer.name} ({first.tokenizer.vocabulary:,} tokens), {first.dtype}, "
        f"made by headwater {first.headwater}"
    )
    skipped = first.skipped
    _say(
        f"left out: {skipped.empty:,} empty documents, {skipped.none:,} rows without text, {skipped.files:,} files "
        "that are not UTF-8 text" + (f": {', '.join(skipped.names)}" if skipped.names else "")
    )
    if check:
        shards.check_all(prepared)
        old = ", as far as format 1 can tell: it has no checksum of the manifest and of tokenizer_config.json"
        _say("all files are as they were written" + ("" if first.tokenizer.files else old))


@data.command("tasks")
def tasks() -> None:
    """The synthetic tasks: a row of each, and what a guess and a solver reach."""
    from headwater.data.synthetic import SyntheticSettings, every_task

    def settings_of(settings: SyntheticSettings) -> str:
        fields = settings.model_dump(exclude={"kind", "held_out"})
        return " ".join([settings.kind, *(f"{name}={value}" for name, value in fields.items())])

    table = Table(caption="guess: knows how often each token is a label; oracle: a solver that reads the row alone")
    for name in ("task", "a held-out row, → the label", "measure", "guess", "oracle"):
        table.add_column(name, justify="right" if name in ("guess", "oracle") else "left", overflow="fold")
    for settings in every_task():
        task = settings.build()
        sanity = task.sanity()
        table.add_row(
            settings_of(settings),
            task.readable(task.held_out(), 0),
            task.measure,
            f"{sanity['guess']:.3f}",
            f"{sanity['oracle']:.3f}",
            end_section=True,
        )
    out.print(table, highlight=False, markup=False)


@data.command("tokenizer")
def tokenizer(
    source: SourceArgument,
    folder_argument: Annotated[Path | None, typer.Argument(metavar="OUT", hidden=True)] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="A new folder.", show_default=False)] = None,
    vocabulary: Annotated[int, typer.Option(min=257, help="Tokens, the end of text included.")] = 32_000,
    max_bytes: Annotated[int, typer.Option(min=1, help="Text to learn from, from the beginning of the source.")] = 10
    ** 9,
    text_column: TextColumnOption = "text",
    config: Config = None,
    split: Split = None,
    separator: Separator = None,
    local: Local = None,
) -> None:
    """Train a byte-level BPE tokenizer on a corpus."""
    from headwater.data.known import resolve
    from headwater.data.reading import check_name
    from headwater.data.stream import Stream, TextSource
    from headwater.data.tokenizer import train_tokenizer
    from headwater.files import staged

    quiet()
    folder = one_folder(folder_argument, out_folder)
    check_name(folder.absolute())
    check_writable(folder, folder=True)
    documents = size = 0
    with staged(folder) as new:
        with _Bar("") as bar:

            def texts():
                nonlocal documents, size
                for part in Stream(resolve(TextSource(source, text_column, config, split, separator), local)):
                    yield part.text
                    documents, size = documents + part.last, size + len(part.data)
                    bar(documents, size, 0)
                    if size >= max_bytes:
                        return

            trained = train_tokenizer(texts(), vocabulary)
        if not size:
            raise HeadwaterError(f"There is no text in {source!r}; give a file or folder with text.")
        trained.save_pretrained(new)
    _say(f"{len(trained):,} tokens learnt from {size / 1e6:,.1f} MB in {documents:,} documents, written to {folder}")


def _say(text: str) -> None:
    """Print a line with names in it, as they are."""
    from headwater.data.reading import printable

    out.print(printable(text), soft_wrap=True, highlight=False, markup=False)


class _Bar:
    """How far it is, on stderr: documents, MB of text, tokens a second. There is no end in sight of a stream."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.fields[info]}", markup=False), TimeElapsedColumn(), console=err
        )
        self.task = self.progress.add_task("", info="")
        # What an earlier run has done does not count as this one's speed.
        self.before: int | None = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress.live.is_started:
            self.progress.stop()

    def __call__(self, documents: int, size: int, tokens: int) -> None:
        self.progress.start()  # at the first call: what is refused before leaves no bar behind
        if self.before is None:
            self.before = tokens
        seconds = self.progress.tasks[0].elapsed or 0
        info = f"{documents:,} documents, {size / 1e6:,.1f} MB"
        if self.unit and seconds:
            info += f", {tokens:,} tokens, {(tokens - self.before) / seconds:,.0f} tokens/s"
        self.progress.update(self.task, info=info)


def _table(folders: list[Path]) -> Table:
    from headwater.data.reading import printable
    from headwater.data.shards import read_manifest

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
                f"{facts.tokens:,}",
                f"{facts.bytes / facts.tokens:.2f}" if facts.tokens else "",
                str(len(facts.shards)),
            )
        kept = manifest.evaluation
        table.add_row("", "evaluation text", f"{kept.documents:,}", f"{kept.bytes / 1e6:,.2f}")
    return table
