"""Preparing a corpus against `datasets.Dataset.map`, with the same tokenizer and text."""

from __future__ import annotations

import functools
import json
import os
import queue
import shutil
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headwater.util.errors import HeadwaterError
from headwater.util.workers import Answer, Worker
from headwater_lab.bench.paired import PairedTimes, interleave
from headwater_lab.data.corpus import STDLIB
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.shards import open_prepared
from headwater_lab.data.stream import Stream, TextSource
from headwater_lab.data.tokenizer import train_tokenizer

# Text a tokenizer is trained on.
LEARNT = 20_000_000


@dataclass(frozen=True)
class Preparation:
    """Both ways over the same text."""

    paired: PairedTimes
    documents: int
    bytes: int
    tokens: int
    """Tokens of the text; headwater writes one more for each document, its separator."""
    peaks: tuple[int, int]
    """Peak memory of each way's process and its children, in bytes."""


def bench_data(source: str | None, megabytes: int, pairs: int, workers: int, vocab_size: int) -> Preparation:
    """`headwater data prepare` (A) and `Dataset.map(batched=True, num_proc=workers)` (B), in turn.

    A reads JSONL, tokenizes, writes shards, hashes them and splits. B has read the same JSONL before; it tokenizes and
    writes Arrow files. Each runs in a separate process, started before timing begins.
    source: default the Python files of this installation.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents, size = _write_text(source, megabytes * 10**6, folder / "text.jsonl")
        with (folder / "text.jsonl").open() as lines:
            texts = (json.loads(line)["text"] for line in lines)
            train_tokenizer(_up_to(texts, LEARNT), vocab_size).save_pretrained(folder / "tokenizer")
        with closing(_Arm("_prepare", folder, workers)) as ours, closing(_Arm("_map", folder, workers)) as theirs:
            paired = interleave(ours, theirs, pairs, warmup=1)
        if ours.tokens - documents != theirs.tokens:
            raise HeadwaterError(f"The two ways gave {ours.tokens - documents} and {theirs.tokens} tokens.")
        return Preparation(paired, documents, size, theirs.tokens, (ours.peak, theirs.peak))


class _Arm:
    """Call a function in a separate process, and watch the memory of that process and its children."""

    def __init__(self, function: str, folder: Path, workers: int) -> None:
        self.said: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.worker = Worker(f"{__name__}:{function}", lambda _, answer: self.said.put(answer))
        self.arguments = {"folder": str(folder), "workers": workers}
        self.tokens = self.peak = 0
        self.answer()  # it is ready

    def close(self) -> None:
        self.worker.end()

    def answer(self) -> Any:
        """The next thing it says."""
        said = self.said.get()
        if said is None:
            raise HeadwaterError(f"The process that prepares the text has ended ({self.worker.ending}).")
        if "error" in said:
            raise HeadwaterError(f"The text could not be prepared: {': '.join(said['error'])}")
        return said.get("result")

    def __call__(self) -> None:
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=[done])
        watch.start()
        try:
            self.worker.call(**self.arguments)
            self.tokens = self.answer()
        finally:
            done.set()
            watch.join()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(0.05):
            self.peak = max(self.peak, tree_memory(self.worker.process.pid))


def tree_memory(process: int) -> int:
    """Memory of a process and all its children in bytes, counting shared pages each time; 0 without /proc."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        children = " ".join(path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children"))
    except OSError:  # it has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(tree_memory(int(child)) for child in children.split())


def _prepare(folder: str, workers: int) -> int:
    out = Path(folder) / "prepared"
    shutil.rmtree(out, ignore_errors=True)
    prepare(TextSource(f"{folder}/text.jsonl"), out, f"{folder}/tokenizer", Options(held_out=0.1), workers=workers)
    manifest = open_prepared(out).manifest
    return manifest.train.tokens + manifest.held_out.tokens


def _map(folder: str, workers: int) -> int:
    rows, tokenizer = _loaded(Path(folder))
    tokens = rows.map(
        lambda batch: tokenizer(
            batch["text"], add_special_tokens=False, split_special_tokens=True, return_attention_mask=False
        ),
        batched=True,
        num_proc=workers,
        remove_columns=["text"],
        load_from_cache_file=False,
        cache_file_name=f"{folder}/mapped.arrow",
    )
    return sum(len(value) for batch in tokens.data.column("input_ids").chunks for value in [batch.flatten()])


@functools.cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    rows = load_dataset("json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=str(folder / "cache"))
    return rows, AutoTokenizer.from_pretrained(folder / "tokenizer")


def _write_text(source: str | None, size: int, file: Path) -> tuple[int, int]:
    """Documents and bytes written, up to about `size` bytes."""
    sources = [source] if source else [STDLIB, f"{sysconfig.get_path('purelib')}/**/*.py"]
    documents = written = 0
    with file.open("w") as lines:
        for part in (part for one in sources for part in Stream(TextSource(one))):
            lines.write(json.dumps({"text": part.text}) + "\n")
            documents, written = documents + 1, written + len(part.data)
            if written >= size:
                break
    return documents, written


def _up_to(texts: Iterator[str], size: int) -> Iterator[str]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return
