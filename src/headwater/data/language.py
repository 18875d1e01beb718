"""Language-model data: rows of tokens to train on, and bits per byte on held-out documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.data.base import ALONE, Batch, Evaluation, Share
from headwater.data.corpus import Document
from headwater.data.rows import Layout, Rows, Tokens
from headwater.data.tokenizer import Encoder, vocabulary
from headwater.errors import HeadwaterError


class LanguageData:
    """See `headwater.data.base.Data`. Raises `HeadwaterError` where a stream is too short for one row.

    streams: token streams by name, with their weights; each document starts with the tokenizer's separator.
    held_out: documents to measure on, by the name of the stream they were held out of.
    held_out_bytes: measure on about so many bytes of them at most; None for all.
    """

    measure = "bits_per_byte"
    lower_is_better = True

    def __init__(
        self,
        streams: Mapping[str, tuple[Tokens, float]],
        held_out: Mapping[str, Sequence[Document]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        layout: Layout,
        held_out_bytes: int | None,
        description: dict[str, Any],
    ) -> None:
        self.context, self.tokenizer = context, tokenizer
        self.vocab_size = vocabulary(tokenizer)
        for name, (stream, _) in streams.items():
            if stream.tokens <= context:
                raise HeadwaterError(
                    f"{name!r} has {stream.tokens} training tokens, fewer than one row of "
                    f"data.context={context} + 1; give more text or a smaller context."
                )
        self.names = list(streams)
        self.train = Rows(
            [stream for stream, _ in streams.values()], [weight for _, weight in streams.values()], context, layout
        )
        self.encoder = Encoder(tokenizer)
        documents = [(name, document) for name, several in held_out.items() for document in several]
        limits = shares([len(document.text.encode()) for _, document in documents], held_out_bytes)
        self.held_out = [
            HeldOut(name, document.id, *self.excerpt(document, limit))
            for (name, document), limit in zip(documents, limits, strict=True)
            if limit
        ]
        if not self.held_out:
            raise HeadwaterError(f"{', '.join(streams)}: no text was held out to measure on; hold out a larger share.")
        self.description = description | {
            "train_tokens": sum(stream.tokens for stream, _ in streams.values()),
            "held_out_documents": len(self.held_out),
            "held_out_bytes": sum(one.bytes for one in self.held_out),
        }

    def excerpt(self, document: Document, limit: int) -> tuple[int, np.ndarray]:
        """(bytes, token ids) of `limit` bytes of a document, from a place its hash decides, cut between characters.

        Not from the beginning: files begin alike, with licences and imports.
        """
        content = document.text.encode()
        start = int(document.fraction("excerpt") * (len(content) - limit + 1))
        text = content[start : start + limit].decode(errors="ignore")
        return len(text.encode()), self.encoder.documents([text])[0].astype(np.int64)

    def batches(self, seed: int, batch_size: int, start: int, share: Share = ALONE) -> Iterator[Batch]:
        return self.train.batches(seed, batch_size, start, share.rank, share.world)

    def rows(self, seed: int, start: int, count: int) -> list[str]:
        chosen = islice(self.train.order(seed, start), count)
        return [str(row) if len(self.names) == 1 else f"{self.names[stream]}:{row}" for stream, row in chosen]

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        """Bits per byte over the held-out excerpts, cut into rows that do not overlap: context grows along each row."""
        owners, rows = [], []
        for index, one in enumerate(self.held_out):
            for start in range(0, len(one.ids) - 1, self.context):
                owners.append(index)
                row = one.ids[start : start + self.context + 1]
                rows.append(np.pad(row, (0, self.context + 1 - len(row)), constant_values=-100))
        nats = np.zeros(len(self.held_out))
        size = max(1, 16_384 // self.context)
        firsts = range(0, len(rows), size)
        for turn in range(-(-len(firsts) // share.world)):
            number = turn * share.world + share.rank
            first = firsts[min(number, len(firsts) - 1)]  # models in several processes run together or not at all
            batch = torch.from_numpy(np.stack(rows[first : first + size])).long()
            labels = batch[:, 1:].contiguous()
            scores = logits({"input_ids": batch[:, :-1].clamp(min=0)}).float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(scores, labels.to(scores.device).flatten(), reduction="none")
            if number < len(firsts):
                np.add.at(nats, owners[first : first + size], loss.view(labels.shape).double().sum(1).cpu().numpy())
        nats = share.total(torch.from_numpy(nats)).numpy()
        documents = [
            {"id": one.id, "bytes": one.bytes, "tokens": len(one.ids) - 1, "nats": float(n)}
            for one, n in zip(self.held_out, nats, strict=True)
        ]
        measures = {
            "bits_per_byte": float(nats.sum()) / math.log(2) / sum(one.bytes for one in self.held_out),
            "loss": float(nats.sum()) / sum(len(one.ids) - 1 for one in self.held_out),
        }
        if len(self.names) > 1:
            for name in dict.fromkeys(one.stream for one in self.held_out):
                own = [(n, one.bytes) for n, one in zip(nats, self.held_out, strict=True) if one.stream == name]
                total, size = map(sum, zip(*own, strict=True))
                measures[f"bits_per_byte/{name}"] = float(total) / math.log(2) / size
        return Evaluation(measures, documents)


class HeldOut:
    """An excerpt of a held-out document: the stream it was held out of, its id, its bytes and token ids."""

    def __init__(self, stream: str, id: str, bytes: int, ids: np.ndarray) -> None:
        self.stream, self.id, self.bytes, self.ids = stream, id, bytes, ids


def shares(sizes: Sequence[int], budget: int | None) -> list[int]:
    """How much of each counts: equal shares of the budget; what short ones leave goes to others."""
    left = sum(sizes) if budget is None else min(budget, sum(sizes))
    limits = [0] * len(sizes)
    for rank, index in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        limits[index] = min(sizes[index], math.ceil(left / (len(sizes) - rank)))
        left -= limits[index]
    return limits
