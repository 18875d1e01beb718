"""A server in miniature: a model over a paged cache, and the scheduling that reveals bugs in such caches.

Sequences run in chunks of any length, several in a batch. They share the full blocks of equal prefixes, even blocks
that another sequence fills in the same step. Some are dropped and restarted, and some are given tokens that are then
taken back.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from headwater.engines.gathering import GatheringEngine, needs_gathering
from headwater.engines.paged import FlatBatch, KernelEngine
from headwater.engines.pages import Page
from headwater.engines.split import Portion
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.attention_kernel import eager_attention
from headwater.nn.engine import AttentionLayer

# Maximum number of tokens that are tried and taken back.
TAKEN_BACK = 2


class NaiveEngine(KernelEngine):
    """Attention over the blocks of one sequence after another."""

    def read_heads(self, attention: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        batch, out = self.batch, torch.empty_like(q)
        assert batch is not None
        for sequence, end in enumerate(batch.ends.tolist()):
            is_own = batch.sequence == sequence
            blocks = batch.table[sequence, : -(-end // batch.block_size)]
            k, v = (x[blocks].transpose(0, 1).flatten(1, 2)[None, :, :end] for x in (keys, values))
            distance = batch.position[is_own][:, None] - torch.arange(end)
            visible = distance >= 0
            if attention.sliding_window is not None:
                visible &= distance < attention.sliding_window
            mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)[None, None]
            if (slopes := self.slopes_of(attention, start, q.shape[1])) is not None:
                mask = mask - slopes[:, None, None] * distance
            queries, module = q[is_own].transpose(0, 1)[None], cast(nn.Module, attention)
            outputs = eager_attention(module, queries, k, v, mask, attention.scaling, softcap=attention.softcap)
            out[is_own] = outputs[0][0]
        return out


@dataclass
class Request:
    """A sequence that is served: its tokens, how many are done, its blocks."""

    tokens: list[int]
    done: int = 0
    blocks: list[int] = field(default_factory=list)


class Server:
    """Runs rows to their ends without checks: `run_rows` yields each token's logits as they are computed.

    share: the model is this part of one that is split over processes.
    """

    size = 4  # tokens of a block

    def __init__(self, model: HeadwaterForCausalLM, seed: int = 0, share: Portion | None = None) -> None:
        self.model = model
        self.random = random.Random(seed)
        element = next(model.parameters()).element_size()
        share = share or Portion(model.config)
        page = Page(share.narrow_config, share.plans, self.size, element, TAKEN_BACK)
        kind = GatheringEngine if needs_gathering(share.plans) else NaiveEngine
        self.engine = kind(page, share.slopes)
        self.prefix_blocks: dict[tuple[int, ...], int] = {}  # prefix -> its block
        self.block_count = 0

    @torch.no_grad()
    def run_rows(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (row, position, logits [V]) for every token, for some of them several times."""
        live = [Request([*row]) for row in rows]
        # Fill unwritten memory with NaN, so that reading any of it shows in the logits.
        self.engine.bind_memory(torch.full((self.size * 200, self.engine.page.size), 0xFF, dtype=torch.uint8))
        while waiting := [row for row in live if row.done < len(row.tokens)]:
            chosen = self.random.sample(waiting, self.random.randint(1, len(waiting)))
            steps = [self.schedule_tokens(row) for row in chosen]
            logits = self.run_step(chosen, steps)
            for row, tokens, outputs in zip(chosen, steps, logits, strict=True):
                for token, right, output in zip(tokens, row.tokens[row.done :], outputs, strict=False):
                    if token != right:
                        break
                    yield live.index(row), row.done, output
                    row.done += 1
                if self.random.random() < 0.1:
                    row.done, row.blocks = 0, []

    def schedule_tokens(self, row: Request) -> list[int]:
        """Choose the tokens that a row runs next. The last ones may be wrong, to be taken back."""
        if row.done == 0:
            while (len(row.blocks) + 1) * self.size < len(row.tokens):
                prefix = tuple(row.tokens[: (len(row.blocks) + 1) * self.size])
                if prefix not in self.prefix_blocks:
                    break
                row.blocks.append(self.prefix_blocks[prefix])
            row.done = len(row.blocks) * self.size
        end = self.random.randint(row.done + 1, len(row.tokens))
        right = row.tokens[row.done : end]
        tried = [self.random.randrange(50) for _ in range(self.random.randint(0, TAKEN_BACK))]
        for index in range(len(row.blocks), -(-(end + len(tried)) // self.size)):
            row.blocks.append(self.block_count)
            self.block_count += 1
            if (index + 1) * self.size <= end:
                self.prefix_blocks.setdefault(tuple(row.tokens[: (index + 1) * self.size]), row.blocks[index])
        return right + tried

    def run_step(self, rows: Sequence[Request], steps: Sequence[list[int]]) -> Sequence[Tensor]:
        counts = [len(tokens) for tokens in steps]
        starts = torch.tensor([0, *counts]).cumsum(0)
        lengths = torch.tensor([row.done + count for row, count in zip(rows, counts, strict=True)])
        table = pad_sequence([torch.tensor([*row.blocks, 0]) for row in rows], batch_first=True)
        self.engine.batch = batch = FlatBatch(starts, lengths, table, self.size)
        ids = torch.tensor([token for tokens in steps for token in tokens])
        hidden = self.model.model.serve_tokens(ids, batch.position, self.engine)
        return self.model.logits(self.model.scale_hidden(hidden)).split(counts)


def make_prompts(vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Rows with prefixes in common, as short as one token, and equal ones."""
    draw = random.Random(seed)
    prefix = [draw.randrange(vocabulary) for _ in range(11)]
    ends = [(11, 3), (8, 6), (4, 1), (0, 1), (0, 17), (11, 5), (8, 1)]
    rows = [prefix[:shared] + [draw.randrange(vocabulary) for _ in range(length)] for shared, length in ends]
    return [*rows, rows[0]]
