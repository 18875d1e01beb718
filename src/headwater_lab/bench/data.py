"""Preparing a corpus against `datasets.Dataset.map`, with the same tokenizer and text."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import shutil
import statistics
import sysconfig
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headwater.util.errors import HeadwaterError
from headwater_lab.bench.paired import time_interleaved
from headwater_lab.bench.shapes import Benchmark
from headwater_lab.data.corpus import STDLIB
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.shards import open_prepared
from headwater_lab.data.stream import Stream, TextSource
from headwater_lab.data.tokenizer import train_tokenizer

# Documents a tokenizer is trained on.
LEARNT = 2000


def bench_data(source: str | None, megabytes: int, pairs: int, workers: int, vocab_size: int) -> Benchmark:
    """Time `headwater data prepare` (A) and `Dataset.map(batched=True, num_proc=workers)` (B), in turn.

    A reads JSONL, tokenizes, writes shards, hashes them and splits. B has read the same JSONL before; it tokenizes and
    writes Arrow files. Each runs in a separate process, started before timing begins.
    source: default the Python files of this installation.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(1, spawn) as ours,
        ProcessPoolExecutor(1, spawn) as theirs,
    ):
        folder = Path(name)
        documents, size = _write_text(source, megabytes * 10**6, folder / "text.jsonl")
        with (folder / "text.jsonl").open() as lines:
            texts = (json.loads(line)["text"] for line in lines)
            train_tokenizer(itertools.islice(texts, LEARNT), vocab_size).save_pretrained(folder / "tokenizer")
        paired = time_interleaved(
            lambda: ours.submit(_time_prepare, folder, workers).result(),
            lambda: theirs.submit(_time_map, folder, workers).result(),
            pairs,
            warmup=1,
        )
        manifest = open_prepared(folder / "prepared").manifest
        prepared = manifest.train.tokens + manifest.held_out.tokens - documents
        tokens = theirs.submit(_time_map, folder, workers).result()
    if prepared != tokens:
        raise HeadwaterError(f"The two ways gave {prepared} and {tokens} tokens.")
    names = ("headwater data prepare", f"Dataset.map, {workers} processes")
    seconds = [statistics.median(times) for times in (paired.a, paired.b)]
    return Benchmark(
        f"{documents:,} documents, {size / 1e6:,.1f} MB, {tokens:,} tokens, {workers} workers, {pairs} pairs",
        [
            {"": name, "s": f"{second:.2f}", "tokens/s": f"{tokens / second:,.0f}"} | cells
            for name, second, cells in zip(names, seconds, (paired.cells(), {}), strict=True)
        ],
    )


def _time_prepare(folder: Path, workers: int) -> None:
    out = folder / "prepared"
    shutil.rmtree(out, ignore_errors=True)
    prepare(TextSource(f"{folder}/text.jsonl"), out, f"{folder}/tokenizer", Options(held_out=0.1), workers=workers)


def _time_map(folder: Path, workers: int) -> int:
    rows, tokenizer = _load_rows(folder)
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
def _load_rows(folder: Path) -> tuple[Any, Any]:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    rows = load_dataset("json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=str(folder / "cache"))
    return rows, AutoTokenizer.from_pretrained(folder / "tokenizer")


def _write_text(source: str | None, size: int, file: Path) -> tuple[int, int]:
    """Documents and bytes written, up to about `size` bytes."""
    sources = [source] if source else [STDLIB, f"{sysconfig.get_path('purelib')}/**/*.py"]
    documents = written = 0
    with file.open("w") as lines:
        for document in (document for source in sources for document in Stream(TextSource(source))):
            lines.write(json.dumps({"text": document.text}) + "\n")
            documents, written = documents + 1, written + len(document.data)
            if written >= size:
                break
    return documents, written
