"""Brevo, the ancestors of a node in topological order: arXiv 2512.17351 (Allen-Zhu), reasoning breadth.

A row lists the edges of an acyclic graph in any order, and a node: x_1 y_1 … x_m y_m ? q : a_1 … a_p <end>. The answer
is every node from which q can be reached, each after those that lead to it. Differently: the name of a node is one
token.
"""

import random
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from headwater.util.seeding import generator
from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.task import SyntheticSettings, WrittenData, draw_chance, pack_rows, pad_length

PAD, END, QUERY, ANSWER, NODE = range(5)
Edge = tuple[int, int]


class BrevoSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: brevo`."""

    kind: Literal["brevo"] = "brevo"
    nodes: int = Field(default=8, ge=3, le=2**10)
    """The most nodes of a training graph, from 3 on equally likely; a held-out graph has exactly this many."""
    parents: int = Field(default=4, ge=1, le=2**10)
    """The most edges that end in a node. Of n nodes, 1 to n // 4 + 1 have none."""
    held_out: int = Field(default=128, ge=1, le=2**20)
    """Graphs to evaluate on. The model writes an answer for each, without a cache."""

    @property
    def vocab_size(self) -> int:
        return NODE + self.nodes

    @property
    def context(self) -> int:
        """The length of the longest possible row."""
        edges = sum(min(node, self.parents) for node in range(self.nodes))
        return pad_length(2 * edges + 3 + self.nodes)


@BrevoSettings.register
class BrevoData(WrittenData[BrevoSettings]):
    """One graph per row, padded; labels only on the answer.

    Of the nodes that may come next, a training row takes any, so the loss has a lower bound above 0. Accuracy judges
    the answers that the model writes greedily: any topological order of exactly the ancestors is right.
    """

    mark, end = ANSWER, END

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        chance = draw_chance(draw)
        return self.draw_rows(chance, [chance.randint(3, self.settings.nodes) for _ in range(count)])

    def held_out(self) -> Batch:
        chance = draw_chance(generator(self.settings.kind, "held out"))
        return self.draw_rows(chance, [self.settings.nodes] * self.settings.held_out)

    def draw_rows(self, chance: random.Random, sizes: list[int]) -> Batch:
        """Draw a row for each number of nodes."""
        prompts, answers = [], []
        for size in sizes:
            edges, query = self.draw_graph(chance, size)
            prompts.append([*(node for edge in edges for node in edge), QUERY, query, ANSWER])
            answers.append([*draw_order(chance, edges, query), END])
        return pack_rows(prompts, answers, self.context)

    def draw_graph(self, chance: random.Random, size: int) -> tuple[list[Edge], int]:
        """Draw the edges, in any order, and a node that at least one of them ends in."""
        nodes = chance.sample(range(NODE, self.vocab_size), size)
        first = chance.randint(1, size // 4 + 1)  # the nodes before this have no parents
        edges = [
            (parent, nodes[index])
            for index in range(first, size)
            for parent in chance.sample(nodes[:index], chance.randint(1, min(index, self.settings.parents)))
        ]
        chance.shuffle(edges)
        return edges, chance.choice(nodes[first:])

    def fingerprint_rows(self, batch: Batch) -> Tensor:
        """Return fingerprints that ignore the order of edges and answers."""
        rows = [row[: row.index(ANSWER)] for row in batch["input_ids"].tolist()]
        # The hash of a tuple of numbers is the same in all processes.
        return torch.tensor([hash((frozenset(read_edges(row)), row[-1])) for row in rows])

    def is_right(self, number: int, answer: list[int]) -> bool:
        prompt = self.held_out_prompts[number]
        return answer[-1:] == [END] and is_topological(read_edges(prompt), prompt[-2], answer[:-1])

    def write_token(self, token: int) -> str:
        return ("<pad>", "<end>", "?", ":")[token] if token < NODE else f"n{token - NODE}"


def read_edges(row: list[int]) -> list[Edge]:
    """Read the edges at the beginning of a row."""
    numbers = row[: row.index(QUERY)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def find_ancestors(edges: list[Edge], query: int) -> set[int]:
    """Find the nodes from which a path leads to `query`."""
    ancestors: set[int] = set()
    reached = {query}
    while reached := {parent for parent, child in edges if child in reached} - ancestors:
        ancestors |= reached
    return ancestors


def draw_order(chance: random.Random, edges: list[Edge], query: int) -> list[int]:
    """Draw a topological order of the ancestors, any of the possible nodes next."""
    missing, order = find_ancestors(edges, query), []
    while missing:
        blocked = {child for parent, child in edges if parent in missing}
        order.append(chance.choice(sorted(missing - blocked)))
        missing.remove(order[-1])
    return order


def is_topological(edges: list[Edge], query: int, order: list[int]) -> bool:
    """Whether `order` lists each ancestor of `query` once, and after its parents."""
    position = {node: index for index, node in enumerate(order)}
    return sorted(order) == sorted(find_ancestors(edges, query)) and all(
        position[parent] < position[child] for parent, child in edges if child in position
    )
