"""Language-model data: documents → tokens → rows, and bits per byte on held-out documents.

All training documents stand in one stream, an end-of-text token before each. A row is `context` tokens of it; where
a document starts inside a row the position ids restart, so that neither attention nor a shift crosses the border.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader

from headwater.data.base import Batch, Evaluation, Settings, shuffled
from headwater.data.corpus import Document, read_corpus
from headwater.data.tokenizer import load_tokenizer, separator
from headwater.errors import HeadwaterError


class TextSettings(Settings):
    """`data:` of a recipe, with `kind: text`."""

    kind: Literal["text"] = "text"
    source: str
    """File, folder or glob of text, JSONL or parquet files; a Hugging Face dataset; or "python-stdlib"."""
    text_column: str = "text"
    """Column or JSON field that holds the text."""
    tokenizer: str = "bytes"
    """"bytes", a local folder, or a tokenizer's name on the Hugging Face hub."""
    context: int = Field(default=256, ge=2)
    """Tokens in a row."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the documents that is held out, by hash."""
    held_out_bytes: int | None = Field(default=1_000_000, ge=1)
    """Evaluate on about so many bytes at most: an equal excerpt of each, where its hash decides; null for all."""

    def build(self) -> TextData:
        return TextData(self)


class TextData:
    """See `headwater.data.base.Data`. Raises `HeadwaterError` where the corpus is too small for one row."""

    measure = "bits_per_byte"
    lower_is_better = True

    def __init__(self, settings: TextSettings) -> None:
        corpus = read_corpus(settings.source, settings.text_column)
        self.context = settings.context
        self.tokenizer = load_tokenizer(settings.tokenizer)
        self.is_bytes = settings.tokenizer == "bytes"
        end = separator(self.tokenizer)
        assert end is not None
        self.separator: int = end
        self.vocab_size = len(self.tokenizer)

        # A corpus of two documents or more always has one on either side, whatever their hashes say.
        ordered = sorted(corpus.documents, key=Document.fraction)
        count = sum(document.fraction() < settings.held_out for document in ordered)
        if len(ordered) < 2:
            raise HeadwaterError(
                f"{settings.source!r} is one document of {len(ordered[0].text.encode())} bytes, too short to hold a "
                "part of it out; give more text."
            )
        count = min(max(count, 1), len(ordered) - 1)
        held_out, train = ordered[:count], ordered[count:]
        train.sort(key=lambda document: document.id)
        self.stream = np.concatenate([self.encode(document.text) for document in train])
        self.rows = (len(self.stream) - 1) // self.context
        if self.rows < 1:
            raise HeadwaterError(
                f"{settings.source!r} has {len(self.stream)} training tokens, fewer than one row of "
                f"data.context={self.context} + 1; give more text or a smaller context."
            )
        self.held_out = [
            (document.id, *self.excerpt(document, limit)) for document, limit in _share(held_out, settings)
        ]
        self.description: dict[str, Any] = corpus.facts | {
            "tokenizer": settings.tokenizer,
            "train_documents": len(train),
            "train_tokens": len(self.stream),
            "held_out_documents": len(self.held_out),
            "held_out_bytes": sum(size for _, size, _ in self.held_out),
        }

    def encode(self, text: str) -> np.ndarray:
        """Token ids of one document, the separator first."""
        if self.is_bytes:
            ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        else:
            ids = np.asarray(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)
        return np.concatenate(([np.int32(self.separator)], ids))

    def excerpt(self, document: Document, limit: int) -> tuple[int, np.ndarray]:
        """(bytes, token ids) of `limit` bytes of a document, from a place its hash decides, cut between characters.

        Not from the beginning: files begin alike, with licences and imports.
        """
        content = document.text.encode()
        start = int(document.fraction("excerpt") * (len(content) - limit + 1))
        text = content[start : start + limit].decode(errors="ignore")
        return len(text.encode()), self.encode(text)

    def batches(self, seed: int, batch_size: int, start: int) -> Iterator[Batch]:
        # The loader reads the order lazily, so that an endless one is fine. Without a generator of its own it would
        # draw from the one that dropout uses, once more in a resumed run than in a whole one.
        yield from DataLoader(
            _Rows(self),
            batch_sampler=_Batches(shuffled(self.rows, seed, start), batch_size),
            collate_fn=self.collate,
            generator=torch.Generator(),
        )

    def collate(self, rows: list[np.ndarray]) -> Batch:
        row = torch.from_numpy(np.stack(rows)).long()
        batch = {"input_ids": row[:, :-1].contiguous(), "shift_labels": row[:, 1:].contiguous()}
        starts = batch["input_ids"] == self.separator
        if bool(starts[:, 1:].any()):
            slot = torch.arange(starts.shape[1])
            batch["position_ids"] = slot - torch.where(starts, slot, 0).cummax(1).values
        return batch

    def evaluate(self, logits: Callable[[Batch], Tensor]) -> Evaluation:
        """Bits per byte over the held-out excerpts, cut into rows that do not overlap: context grows along each row."""
        owners, rows = [], []
        for index, (_, _, ids) in enumerate(self.held_out):
            for start in range(0, len(ids) - 1, self.context):
                owners.append(index)
                row = ids[start : start + self.context + 1]
                rows.append(np.pad(row, (0, self.context + 1 - len(row)), constant_values=-100))
        nats = np.zeros(len(self.held_out))
        size = max(1, 16_384 // self.context)
        for first in range(0, len(rows), size):
            batch = torch.from_numpy(np.stack(rows[first : first + size])).long()
            labels = batch[:, 1:].contiguous()
            scores = logits({"input_ids": batch[:, :-1].clamp(min=0)}).float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(scores, labels.to(scores.device).flatten(), reduction="none")
            np.add.at(nats, owners[first : first + size], loss.view(labels.shape).double().sum(1).cpu().numpy())
        documents = [
            {"id": name, "bytes": size, "tokens": len(ids) - 1, "nats": float(n)}
            for (name, size, ids), n in zip(self.held_out, nats, strict=True)
        ]
        total_bytes = sum(size for _, size, _ in self.held_out)
        tokens = sum(len(ids) - 1 for _, _, ids in self.held_out)
        return Evaluation(
            {"bits_per_byte": float(nats.sum()) / math.log(2) / total_bytes, "loss": float(nats.sum()) / tokens},
            documents,
        )


def _share(documents: list[Document], settings: TextSettings) -> Iterator[tuple[Document, int]]:
    """Each held-out document and how many of its bytes count: equal shares; what short ones leave goes to others."""
    sizes = [len(document.text.encode()) for document in documents]
    left = sum(sizes) if settings.held_out_bytes is None else min(settings.held_out_bytes, sum(sizes))
    limits = dict.fromkeys(range(len(documents)), 0)
    for rank, index in enumerate(sorted(limits, key=lambda i: sizes[i])):
        limits[index] = min(sizes[index], math.ceil(left / (len(documents) - rank)))
        left -= limits[index]
    for index, document in enumerate(documents):
        if limits[index]:
            yield document, limits[index]


class _Rows(torch.utils.data.Dataset):
    def __init__(self, data: TextData) -> None:
        self.data = data

    def __getitem__(self, row: int) -> np.ndarray:
        context = self.data.context
        return self.data.stream[row * context : (row + 1) * context + 1]


class _Batches:
    """Batches of row numbers for a DataLoader."""

    def __init__(self, order: Iterator[int], batch_size: int) -> None:
        self.order, self.batch_size = order, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [next(self.order) for _ in range(self.batch_size)]
