"""Measure how well a model predicts documents: sliding windows, each token scored once.

A document is [begin, t_1, …, t_n], where `begin` is the start token; t_1 … t_n are all scored, and
nothing is shared between documents. A window is `context` tokens of input. The first scores all its targets, and
each later one the next `stride` targets, with at least context − stride tokens before each; the last is as long as
the others, so it overlaps more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from headwater.util.errors import HeadwaterError
from headwater_lab.data.corpus import Document
from headwater_lab.data.stream import read_documents


@dataclass(frozen=True)
class Text:
    """Documents to evaluate on. bytes: UTF-8 bytes of each. skipped: files that are not UTF-8 text."""

    name: str
    documents: list[Document]
    skipped: int

    @property
    def bytes(self) -> np.ndarray:
        return np.array([len(document.data) for document in self.documents], dtype=float)

    @property
    def facts(self) -> dict[str, Any]:
        sizes = {"documents": len(self.documents), "bytes": int(self.bytes.sum())}
        return {"text": self.name, **sizes, "skipped_not_utf8": self.skipped}


def read_text(source: str, limit: int | None = None, column: str = "text") -> Text:
    """Read the first `limit` documents of a source, see `headwater_lab.data.stream.TextSource`; a file is one document.

    column: the column of tables with the text. Raises `HeadwaterError` if there is none, and for conversations, since
    each model would write them with its own template.
    """
    documents, skipped = read_documents(source, column, "--text-column")
    if any(document.is_chat for document in documents):
        raise HeadwaterError(
            f"{source!r} holds conversations, which models are not compared on; name a column of text with "
            "--text-column."
        )
    return Text(Path(source).name or source, documents[:limit], len(skipped))


def list_windows(targets: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """List (start, end, scored): tokens start … end−1 of a document are read, the last `scored` predictions count."""
    done = 0
    while done < targets:
        end = min(done + (stride if done else context), targets)
        yield max(0, end - context), end, end - done
        done = end


@torch.no_grad()
def sum_log_likelihoods(
    model: PreTrainedModel,
    documents: Sequence[np.ndarray],
    begin: int,
    *,
    context: int,
    stride: int,
    batch_size: int,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """Sum the log-likelihood of each document in nats (negative), in fp64; documents: token ids without `begin`.

    on_batch: called with the numbers of finished and of all windows. Raises `HeadwaterError` for ids that the model
    does not have.
    """
    rows = [np.concatenate(([begin], ids)).astype(np.int64) for ids in documents]
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if (largest := max((int(ids.max()) for ids in rows), default=0)) >= vocab_size:
        raise HeadwaterError(
            f"The tokenizer gives id {largest}, but the model has embeddings for only {vocab_size} tokens; use the "
            "tokenizer that it was trained with."
        )
    spans = [
        (index, *window) for index, ids in enumerate(documents) for window in list_windows(len(ids), context, stride)
    ]
    spans.sort(key=lambda span: span[1] - span[2])  # group rows of similar length
    total = np.zeros(len(rows))
    for offset in range(0, len(spans), batch_size):
        batch = spans[offset : offset + batch_size]
        longest = max(end - start for _, start, end, _ in batch)
        inputs = torch.full((len(batch), longest), begin)
        for row, (index, start, end, _) in enumerate(batch):
            inputs[row, : end - start] = torch.from_numpy(rows[index][start:end])
        logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
        for row, (index, start, end, scored) in enumerate(batch):
            targets = torch.from_numpy(rows[index][end - scored + 1 : end + 1]).to(logits.device)
            scores = logits[row, end - start - scored : end - start]
            wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
            loss = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
            total[index] -= loss.double().sum().item()
        on_batch(offset + len(batch), len(spans))
    return total
