"""`headwater data …`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import check_writable, say
from headwater_lab.cli.options import TRAIN, NaturalInt, PositiveInt, Values, add_group, command, exclude, need, refuse
from headwater_lab.cli.progress import ProgressReport
from headwater_lab.util.terminal import Table, lined

if TYPE_CHECKING:
    from headwater_lab.data.shards import Skipped

TextField = Annotated[str, Values(help="Column or JSON field with the text or the messages, dotted if nested.")]
Config = Annotated[str | None, Values(help="Configuration of the dataset on the hub.")]
Split = Annotated[str | None, Values(help="Split of the dataset; default: train.")]
Separator = Annotated[str | None, Values(help="Line that separates the documents of a text file.")]
Begins = Annotated[str | None, Values(help="Regular expression for a line, or a table's row, that begins a document.")]

data = add_group(TRAIN, "data", "Prepare corpora for training: tokens on disk, and tokenizers.")


@command(data, "data prepare 'texts/*.txt' --out data/texts")
def prepare_corpus(
    source: str,
    *,
    out: Path,
    tokenizer: str = "bytes",
    text_column: TextField = "text",
    config: Config = None,
    split: Split = None,
    separator: Separator = None,
    begins: Begins = None,
    by: str | None = None,
    held_out: float = 0.01,
    tokens: str | None = None,
    border: NaturalInt | None = None,
    held_out_source: str | None = None,
    workers: PositiveInt | None = None,
) -> None:
    """Tokenize a corpus into memory-mapped shards, or take the tokens of another program.

    source: A file, folder or glob of text, JSONL, CSV or parquet files; or a dataset on the hub; or token files.
    out: A new folder.
    tokenizer: "bytes", or the folder, tokenizer.json or hub name of a tokenizer.
    by: Column to split by: each value gets its own folder; dotted if nested.
    held_out: Share of the documents to hold out, chosen by hash.
    tokens: Format of token files: llm.c (and modded-nanogpt), nanogpt, megatron or olmo; --tokenizer made them.
    border: Id of the token between the documents of token files; default: the tokenizer's end of text.
    held_out_source: Token files to hold out; default: those named val or validation, or else a share.
    workers: Tokenizer threads; default: one per core, up to 16.
    """
    from headwater_lab.data.prepare import Options, prepare
    from headwater_lab.data.shards import DOMAINS, MANIFEST, Skipped, read_manifest
    from headwater_lab.data.stream import TextSource
    from headwater_lab.data.token_files import TokenSource

    need("--tokens", "--border", "--held-out-source")
    exclude("--tokens", "--text-column", "--config", "--split", "--separator", "--begins", "--by")
    exclude("--held-out-source", "--held-out")
    check_writable(out, folder=True)
    is_finished = any((out / name).exists() for name in (DOMAINS, MANIFEST))
    corpus: TextSource | TokenSource = TextSource(source, text_column, config, split, separator, begins, by)
    if tokens is not None:
        corpus = TokenSource(source, tokens, held_out_source, border)
        if held_out_files := corpus.list_held_out():
            refuse(f"beside the held-out file {min(held_out_files.values())!r}", "--held-out")
    with ProgressReport() as report:
        bar = partial(_show_progress, report, time.monotonic())
        folders = prepare(corpus, out, tokenizer, Options(held_out), workers=workers, on_progress=bar)
    if is_finished:
        say(f"{out} is already finished")
    say(_make_table(folders))
    manifest = read_manifest(folders[0])
    if manifest.skipped != Skipped():
        say(_describe_skipped(manifest.skipped))
    if special := manifest.evaluation.special:
        say(f"Evaluation reads the text of held-out documents, without their {special:,} special tokens.")


@command(data, "data show data/texts --check")
def show_prepared(folder: Path, *, check: bool = False) -> None:
    """Show what a prepared folder contains.

    folder: A prepared folder.
    check: Read all files and compare their checksums.
    """
    from headwater_lab.data import shards

    prepared = shards.open_all(folder)
    say(_make_table([member.folder for member in prepared]))
    manifest = prepared[0].manifest
    say(
        f"{manifest.source}, tokenizer {manifest.tokenizer.name} ({manifest.tokenizer.vocab_size:,} tokens), "
        f"{manifest.dtype}, made by headwater {manifest.headwater}"
    )
    say(_describe_skipped(manifest.skipped))
    if check:
        shards.check_all(prepared)
        say("all checksums match")


@command(data, "data tokenizer 'texts/*.txt' --out data/bpe --vocab-size 8000")
def train_tokenizer(
    source: str,
    *,
    out: Path,
    vocab_size: Annotated[int, Values(min=257)] = 32_000,
    max_bytes: PositiveInt = 10**9,
    text_column: TextField = "text",
    config: Config = None,
    split: Split = None,
    separator: Separator = None,
    begins: Begins = None,
    characters: bool = False,
) -> None:
    """Train a byte-level BPE tokenizer on a corpus, or number its characters.

    source: Same sources as data prepare.
    out: A new folder.
    vocab_size: Vocabulary size, including the end-of-text token.
    max_bytes: Bytes of text to train on, from the beginning of the source.
    characters: Make a token of each character instead, numbered in their order, as nanoGPT does.
    """
    from headwater.util.files import stage_folder
    from headwater_lab.data.chat import read_contents
    from headwater_lab.data.reading import check_name
    from headwater_lab.data.stream import Stream, TextSource
    from headwater_lab.data.tokenizer import character_tokenizer
    from headwater_lab.data.tokenizer import train_tokenizer as learn_tokens

    exclude("--characters", "--vocab-size")
    check_name(out.absolute())
    check_writable(out, folder=True)
    documents, size, begun = 0, 0, time.monotonic()
    with stage_folder(out) as new:
        with ProgressReport() as report:

            def texts():
                nonlocal documents, size
                for document in Stream(TextSource(source, text_column, config, split, separator, begins)):
                    yield read_contents(document.text) if document.is_chat else document.text
                    documents, size = documents + 1, size + len(document.data)
                    _show_progress(report, begun, documents, size)
                    if size >= max_bytes:
                        return

            trained = character_tokenizer(texts()) if characters else learn_tokens(texts(), vocab_size)
        if not size:
            raise HeadwaterError(f"{source!r} contains no text; name a file or folder with text.")
        trained.save_pretrained(new)
    say(f"{len(trained):,} tokens learned from {size / 1e6:,.1f} MB in {documents:,} documents, written to {out}")


def _describe_skipped(skipped: Skipped) -> str:
    """List what was left out of the shards."""
    return (
        f"skipped: {skipped.empty:,} empty documents, {skipped.none:,} rows without text, {skipped.files:,} files "
        "that are not UTF-8 text" + (f": {', '.join(skipped.names)}" if skipped.names else "")
    )


def _show_progress(report: ProgressReport, begun: float, documents: int, size: int, tokens: int = 0) -> None:
    """Show how much of a source has been read; a stream has no known end."""
    info = f"{size / 1e6:,.1f} MB"
    if tokens:
        info += f", {tokens:,} tokens, {tokens / (time.monotonic() - begun):,.0f} tokens/s"
    report.show("reading", documents, unit="document", info=info)


def _make_table(folders: list[Path]) -> Table:
    from headwater_lab.data.shards import read_manifest

    columns = ("folder", "split", "documents", "MB of text", "tokens", "bytes/token", "shards")
    table = lined(*columns, left=columns[:2])
    for folder in folders:
        manifest = read_manifest(folder)
        for name, facts in (("train", manifest.train), ("held out", manifest.held_out)):
            table.add_row(
                str(folder) if name == "train" else "",
                name,
                f"{facts.documents:,}",
                f"{facts.bytes / 1e6:,.2f}",
                f"{facts.tokens:,}" + ("" if facts.answer_tokens is None else f" ({facts.answer_tokens:,} of answers)"),
                f"{facts.bytes / facts.counted_tokens:.2f}" if facts.counted_tokens else "",
                str(len(facts.shards)),
            )
        evaluation = manifest.evaluation
        table.add_row("", "evaluation text", f"{evaluation.documents:,}", f"{evaluation.bytes / 1e6:,.2f}")
    return table
