"""Language-model data: rows of tokens to train on, and loss and bits per byte on held-out documents."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.util.errors import HeadwaterError, nearest, shown
from headwater_lab.data.base import ALONE, Batch, DataSettings, Evaluation, Share
from headwater_lab.data.chat import Encoded
from headwater_lab.data.corpus import Document
from headwater_lab.data.rows import RowLayout, Rows, Tokens
from headwater_lab.data.tokenizer import Encoder, vocabulary_size

# Metrics of held-out text; for a domain, METRIC/NAME.
METRICS = ("bits_per_byte", "loss")


def count_batch_rows(vocab_size: int, context: int) -> int:
    """Count the held-out rows of a batch: of 16,384 tokens at most, and with logits of 1 GB at most in fp32."""
    return max(1, min(16_384, 2**28 // vocab_size) // context)


class LanguageSettings(DataSettings):
    """Fields that `kind: text` and `kind: prepared` share."""

    context: int = Field(default=1024, ge=2, le=2**24)
    """Tokens per row."""
    row_layout: RowLayout = "packed"
    """packed: attention and positions restart with each document; contiguous: across documents, as in nanoGPT."""
    held_out_bytes: int | None = Field(default=1_000_000, ge=1)
    """Evaluate on at most about this many bytes (of each domain): an equal excerpt of each document, at a position set
    by its hash; null for all."""
    held_out_rows: int | None = Field(default=None, ge=1)
    """Evaluate on at most about this many rows of `context` tokens of these, spread over the documents; null for all.
    A run's alone: the model's history does not name it."""
    metric: str = METRICS[0]
    """The deciding metric: bits_per_byte, loss, or one domain's, as loss/NAME."""

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that can decide."""
        return [*METRICS]

    @model_validator(mode="after")
    def _metric_exists(self) -> Self:
        if self.metric not in self.metrics:
            advice = nearest(self.metric, self.metrics)
            raise ValueError(f"data.metric: there is no metric {shown(self.metric)}; {advice}")
        return self


class LanguageData:
    """See `headwater_lab.data.base.Data`. Raises `HeadwaterError` if a stream is too short for one row.

    streams: token streams by name, with their weights; each document starts with the tokenizer's token for that.
    held_out: documents to evaluate on, by the name of their stream, or of their domain.
    domains: whether these are domains, which are measured separately; the overall result is their plain mean.
    """

    lower_is_better = True

    def __init__(
        self,
        settings: LanguageSettings,
        streams: Mapping[str, tuple[Tokens, float]],
        held_out: Mapping[str, Sequence[Document]],
        tokenizer: PreTrainedTokenizerBase,
        description: dict[str, Any],
        domains: bool = False,
    ) -> None:
        self.context, self.tokenizer, self.metric, self.domains = settings.context, tokenizer, settings.metric, domains
        self.vocab_size = vocabulary_size(tokenizer)
        for name, (stream, _) in streams.items():
            if stream.tokens <= self.context:
                raise HeadwaterError(
                    f"{name!r} has {stream.tokens} training tokens, fewer than one row of "
                    f"data.context={self.context} + 1; use more text or a smaller context."
                )
        self.names = list(streams)
        tokens, weights = zip(*streams.values(), strict=True)
        self.train = Rows(tokens, weights, self.context, settings.row_layout)
        self.batches = self.train.batches
        self.encoder = Encoder(tokenizer)
        if self.domains:  # sorted, so that sums are identical to the last bit however the recipe orders them
            held_out = dict(sorted(held_out.items()))
        groups = [[(name, document) for document in several] for name, several in held_out.items()]
        self.held_out: list[HeldOut] = []
        for group in groups if self.domains else [list(chain(*groups))]:
            sizes = choose_limits([document for _, document in group], settings.held_out_bytes)
            excerpts = zip(group, sizes, strict=True)
            self.held_out += [HeldOut(name, d.id, self.cut_excerpt(d, limit)) for (name, d), limit in excerpts if limit]
        self.notices = self._unread_limit(settings, held_out) + self._count_unknown()
        facts = self.describe_domains(held_out) if self.domains else {}
        self.held_out = thin_out(self.held_out, settings.held_out_rows, self.context)
        if not self.held_out:
            raise HeadwaterError(f"{', '.join(streams)}: no text was held out for evaluation; hold out a larger share.")
        self.description = description | {
            "train_tokens": sum(stream.tokens for stream, _ in streams.values()),
            "held_out_documents": len(self.held_out),
            "held_out_bytes": sum(excerpt.bytes for excerpt in self.held_out),
            **facts,
        }

    def _unread_limit(self, settings: LanguageSettings, held_out: Mapping[str, Sequence[Document]]) -> list[str]:
        """Make a notice if the settings' limit of the held-out text exceeds its size."""
        limit = settings.held_out_bytes
        if limit in (None, LanguageSettings.model_fields["held_out_bytes"].default):
            return []
        sizes = [sum(len(document.data) for document in documents) for documents in held_out.values()]
        size = max(sizes) if self.domains else sum(sizes)
        return [f"data.held_out_bytes={limit:,} has no effect: {size:,} bytes are held out."] if limit > size else []

    def _count_unknown(self) -> list[str]:
        """Make a notice if the tokenizer's unknown token stands for held-out text."""
        unknown = self.encoder.tokenizer.unk_token_id
        ids = np.concatenate([excerpt.ids for excerpt in self.held_out] or [np.zeros(0, np.int64)])
        if unknown is None or unknown in chain(*self.encoder.frame) or not (share := float((ids == unknown).mean())):
            return []
        return [
            f"{share:.2%} of the held-out tokens are the tokenizer's {self.encoder.tokenizer.unk_token!r}, which says "
            "less than the text that it stands for: bits per byte are too low."
        ]

    def describe_domains(self, domains: Iterable[str]) -> dict[str, Any]:
        """Describe the domains for the record. Raises `HeadwaterError` if one is too short to evaluate on."""
        sizes, content = {}, hashlib.sha256()
        for name in domains:
            excerpts = [excerpt for excerpt in self.held_out if excerpt.stream == name]
            tokens = sum(excerpt.tokens for excerpt in excerpts)
            if tokens < self.context:
                raise HeadwaterError(
                    f"The domain {name!r} has {tokens} held-out tokens, fewer than one row of "
                    f"data.context={self.context}; use more text, a smaller context, or a larger data.held_out_bytes."
                )
            size = sum(excerpt.bytes for excerpt in excerpts)
            sizes[name] = {"documents": len(excerpts), "bytes": size, "tokens": tokens}
            for excerpt in excerpts:
                content.update(f"{name}\0{excerpt.id}\0{hashlib.sha256(excerpt.ids.tobytes()).hexdigest()}\n".encode())
        return {"held_out_domains": sizes, "held_out_sha256": content.hexdigest()}

    def cut_excerpt(self, document: Document, limit: int) -> Encoded:
        """Cut `limit` bytes out of a document, between characters, at a position set by its hash; a whole chat.

        Not from the beginning, because many files begin alike, with licenses and imports.
        """
        if document.is_chat:
            return self.encoder.encode_documents([document])[0]
        start = int(document.hash_fraction("excerpt") * (len(document.data) - limit + 1))
        text = document.data[start : start + limit].decode(errors="ignore")
        excerpt = self.encoder.encode_documents([Document(document.id, text, document.key)])[0]
        # An end token is no text, and not every tokenizer puts one.
        return replace(excerpt, ids=excerpt.ids[: len(excerpt.ids) - len(self.encoder.frame[1])])

    def evaluate(self, logits: Callable[[Batch], Tensor], share: Share = ALONE) -> Evaluation:
        """Measure bits per byte of the held-out excerpts, in rows that do not overlap: context grows along each row."""
        owners, rows = [], []
        for index, excerpt in enumerate(self.held_out):
            for position in range(0, len(excerpt.ids) - 1, self.context):
                owners.append(index)
                row = np.stack((excerpt.ids[:-1], excerpt.labels))[:, position : position + self.context]
                rows.append(np.pad(row, ((0, 0), (0, self.context - row.shape[1])), constant_values=-100))
        nats = np.zeros(len(self.held_out))
        size = count_batch_rows(self.vocab_size, self.context)
        firsts = range(0, len(rows), size)
        for turn in range(-(-len(firsts) // share.world)):
            number = turn * share.world + share.rank
            start = firsts[min(number, len(firsts) - 1)]  # processes must make equally many calls
            batch = torch.from_numpy(np.stack(rows[start : start + size], axis=1))
            labels = batch[1]
            scores = logits({"input_ids": batch[0].clamp(min=0)}).float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(scores, labels.to(scores.device).flatten(), reduction="none")
            if number < len(firsts):
                np.add.at(nats, owners[start : start + size], loss.view(labels.shape).double().sum(1).cpu().numpy())
        nats = share.total(torch.from_numpy(nats)).numpy()
        documents = [
            {
                "id": f"{excerpt.stream}:{excerpt.id}" if self.domains else excerpt.id,
                "bytes": excerpt.bytes,
                "tokens": excerpt.tokens,
                "nats": float(n),
            }
            for excerpt, n in zip(self.held_out, nats, strict=True)
        ]
        return Evaluation(self.compute_metrics(nats), documents)

    @property
    def held_out_rows(self) -> int:
        """The number of rows that `evaluate` computes."""
        return sum(excerpt.count_rows(self.context) for excerpt in self.held_out)

    def compute_metrics(self, nats: np.ndarray) -> dict[str, float]:
        """Compute the metrics from the losses of the held-out documents, the deciding one first."""
        metrics = _average_losses(float(nats.sum()), self.held_out)
        by_stream: dict[str, list[int]] = {}
        for index, excerpt in enumerate(self.held_out):
            by_stream.setdefault(excerpt.stream, []).append(index)
        for name, indices in by_stream.items() if len(self.names) > 1 or self.domains else ():
            total = float(sum(nats[index] for index in indices))
            averages = _average_losses(total, [self.held_out[index] for index in indices])
            shown = METRICS if self.domains else METRICS[:1]
            metrics |= {f"{metric}/{name}": averages[metric] for metric in shown}
        for metric in METRICS if self.domains else ():
            values = [metrics[f"{metric}/{name}"] for name in by_stream]
            metrics[metric] = sum(values) / len(values)
        return {self.metric: metrics[self.metric]} | metrics


def _average_losses(total: float, excerpts: Sequence[HeldOut]) -> dict[str, float]:
    """Compute bits per byte and loss of excerpts. total: their nats."""
    size, tokens = sum(excerpt.bytes for excerpt in excerpts), sum(excerpt.tokens for excerpt in excerpts)
    return {"bits_per_byte": total / math.log(2) / size, "loss": total / tokens}


class HeldOut:
    """An excerpt of a held-out document: its stream or domain, its id, its token ids, the label of each but the last,
    and how many tokens are scored, with the bytes they stand for.
    """

    def __init__(self, stream: str, id: str, content: Encoded) -> None:
        self.stream, self.id, self.bytes, self.ids = stream, id, content.bytes, content.ids.astype(np.int64)
        self.labels = self.ids[1:] if content.counts is None else np.where(content.counts[1:], self.ids[1:], -100)
        self.tokens = int((self.labels != -100).sum())

    def count_rows(self, context: int) -> int:
        """Count the rows of `context` tokens in which the excerpt is read."""
        return -(-(len(self.ids) - 1) // context)

    def cut(self, tokens: int) -> HeldOut:
        """Return the first `tokens` of the excerpt, with bytes in proportion; all of it if none of these are scored."""
        part = copy.copy(self)
        part.ids, part.labels = self.ids[: tokens + 1], self.labels[:tokens]
        part.tokens = int((part.labels != -100).sum())
        part.bytes = max(1, round(self.bytes * part.tokens / max(1, self.tokens)))
        return part if part.tokens else self


def thin_out(excerpts: list[HeldOut], rows: int | None, context: int) -> list[HeldOut]:
    """Choose excerpts of about `rows` rows together: evenly spaced, as many of each stream, cut short. None: all."""
    if rows is None:
        return excerpts
    streams: dict[str, list[HeldOut]] = {}
    for excerpt in excerpts:
        streams.setdefault(excerpt.stream, []).append(excerpt)
    budget, chosen = max(1, rows // len(streams)), []
    for members in streams.values():
        if sum(excerpt.count_rows(context) for excerpt in members) <= budget:
            chosen += members
            continue
        count = min(budget, len(members))
        spaced = (members[index * len(members) // count] for index in range(count))
        chosen += [excerpt.cut((budget + index) // count * context) for index, excerpt in enumerate(spaced)]
    return chosen


def choose_limits(documents: Sequence[Document], budget: int | None) -> list[int]:
    """Choose how many bytes to use of each: equal shares of texts; whole conversations by their hash, at least one."""
    sizes = [len(document.data) for document in documents]
    if not any(document.is_chat for document in documents):
        return share_budget(sizes, budget)
    chosen, budget_left = [0] * len(documents), sum(sizes) if budget is None else budget
    for turn, index in enumerate(sorted(range(len(documents)), key=lambda i: documents[i].hash_fraction("excerpt"))):
        if not turn or sizes[index] <= budget_left:
            chosen[index] = sizes[index]
            budget_left -= sizes[index]
    return chosen


def share_budget(sizes: Sequence[int], budget: int | None) -> list[int]:
    """Divide a budget of bytes into equal shares; the unused part of short ones goes to the others."""
    budget_left = sum(sizes) if budget is None else min(budget, sum(sizes))
    limits = [0] * len(sizes)
    for rank, index in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        limits[index] = min(sizes[index], math.ceil(budget_left / (len(sizes) - rank)))
        budget_left -= limits[index]
    return limits
