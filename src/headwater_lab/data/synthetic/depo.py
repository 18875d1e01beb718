"""Depo, retrieval over several hops of a permutation: arXiv 2512.17351 (Allen-Zhu), reasoning depth.

A row lists the edges of a cycle in any order, and then asks for successors: x_1 y_1 … x_n y_n k_1 q_1 a_1 k_2 q_2 a_2 …
Differently from facebookresearch/PhysicsLM4 at 7580696: every row has all nodes, the name of a node is one token, and
held-out questions are of 1 to K hops, where the source asks for powers of two. `accuracy/k=K` is the hardest.
"""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.task import SyntheticData, SyntheticSettings, draw_distinct


class DepoSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: depo`."""

    kind: Literal["depo"] = "depo"
    nodes: int = Field(default=12, ge=2, le=2**12)
    """Nodes of the cycle. A row takes two tokens for each."""
    hops: int = Field(default=4, ge=1, le=2**11)
    """Maximum number of hops; each question has 1 to this many. It sets the depth that a model needs, so it is at most
    half the nodes: beyond, the way back along the cycle is shorter."""
    questions: int = Field(default=4, ge=1, le=2**12)
    """Questions in a row, each about another node. A row takes three tokens for each."""

    @model_validator(mode="after")
    def _cycle_is_long_enough(self) -> Self:
        if (least := max(2 * self.hops, self.questions)) > self.nodes:
            raise ValueError(
                f"data.hops={self.hops} and data.questions={self.questions} need data.nodes of {least} or more, not "
                f"{self.nodes}."
            )
        return self

    @property
    def vocab_size(self) -> int:
        """The nodes, and a token for each number of hops."""
        return self.nodes + self.hops

    @property
    def context(self) -> int:
        return 2 * self.nodes + 3 * self.questions


@DepoSettings.register
class DepoData(SyntheticData[DepoSettings]):
    """The edges of a cycle through all nodes, and questions: the node k hops after q, for k from 1 to `hops`.

    Labels stand only on the answers, which the model must find without intermediate steps. Accuracy is also measured
    for each k.
    """

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        nodes, questions = self.settings.nodes, self.settings.questions
        cycle = draw_distinct(draw, count, nodes, nodes)
        edges = draw_distinct(draw, count, nodes, nodes)
        listed = torch.stack([cycle.gather(1, edges), cycle.gather(1, (edges + 1) % nodes)], dim=2)
        hops = torch.randint(1, self.settings.hops + 1, (count, questions), generator=draw)
        queried = draw_distinct(draw, count, nodes, questions)
        answers = cycle.gather(1, (queried + hops) % nodes)
        asked = torch.stack([nodes - 1 + hops, cycle.gather(1, queried), answers], dim=2)
        row = torch.cat([listed.flatten(1), asked.flatten(1)], dim=1)
        labels = torch.full_like(row, -100)
        labels[:, 2 * nodes + 1 :: 3] = answers
        return {"input_ids": row, "shift_labels": labels}

    def fingerprint_rows(self, batch: Batch) -> Tensor:
        """Return fingerprints that ignore the order of edges."""
        rows, nodes = batch["input_ids"], self.settings.nodes
        parents, children = rows[:, : 2 * nodes].unflatten(1, (nodes, 2)).unbind(2)
        ordered = torch.cat([children.gather(1, parents.argsort(1)), rows[:, 2 * nodes :]], dim=1)
        return super().fingerprint_rows({"input_ids": ordered})

    def split_positions(self, batch: Batch) -> dict[str, Tensor]:
        hops = batch["input_ids"].roll(1, 1) - self.settings.nodes + 1
        return {f"k={k}": hops == k for k in range(1, self.settings.hops + 1)}

    def write_token(self, token: int) -> str:
        nodes = self.settings.nodes
        return f"k={token - nodes + 1}" if token >= nodes else f"n{token}"
