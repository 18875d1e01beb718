"""Brevo, the ancestors of a node in topological order: arXiv 2512.17351 (Allen-Zhu), reasoning breadth.

A row lists the edges of an acyclic graph in any order, and its last node: x_1 y_1 … x_m y_m ? q : a_1 … a_p q <end>.
The answer is every node from which q can be reached, each after those that lead to it, and q. Graphs are those of
facebookresearch/PhysicsLM4 at 7580696, Brevo1, in which a node has at most 4 parents and 4 children.
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
    """The most nodes N of a training graph, which has n from 3 on, with a chance in proportion to 1 / (n + √N); a
    held-out graph has N."""
    parents: int = Field(default=4, ge=1, le=2**10)
    """The most edges that end in a node, and that begin in one. Of n nodes, 1 to (n - 1) // 4 + 1 have no parents."""
    held_out: int = Field(default=128, ge=1, le=2**20)
    """Graphs to evaluate on. The model writes an answer for each, without a cache."""

    @property
    def vocab_size(self) -> int:
        return NODE + self.nodes

    @property
    def context(self) -> int:
        """The length of the longest possible row."""
        edges = sum(min(node, self.parents) for node in range(self.nodes))
        return pad_length(2 * edges + 4 + self.nodes)


@BrevoSettings.register
class BrevoData(WrittenData[BrevoSettings]):
    """One graph per row, padded; labels only on the answer.

    Of the nodes that may come next, a training row takes any, so the loss has a lower bound above 0. Accuracy judges
    the answers that the model writes greedily: any topological order of exactly the ancestors is right.
    """

    mark, end = ANSWER, END

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        chance, most = draw_chance(draw), self.settings.nodes
        sizes = range(3, most + 1)
        return self.draw_rows(chance, chance.choices(sizes, [1 / (size + most**0.5) for size in sizes], k=count))

    def held_out(self) -> Batch:
        chance = draw_chance(generator(self.settings.kind, "held out"))
        return self.draw_rows(chance, [self.settings.nodes] * self.settings.held_out)

    def draw_rows(self, chance: random.Random, sizes: list[int]) -> Batch:
        """Draw a row for each number of nodes."""
        prompts, answers = [], []
        for size in sizes:
            edges, query = self.draw_graph(chance, size)
            prompts.append([*(node for edge in edges for node in edge), QUERY, query, ANSWER])
            answers.append([*draw_order(chance, edges, query), query, END])
        return pack_rows(prompts, answers, self.context)

    def draw_graph(self, chance: random.Random, size: int) -> tuple[list[Edge], int]:
        """Draw the edges, in any order, and the last node."""
        nodes, most = chance.sample(range(NODE, self.vocab_size), size), self.settings.parents
        free = dict.fromkeys(nodes, most)  # edges that may still begin in a node
        edges = []
        for index in range(chance.randint(1, (size - 1) // 4 + 1), size):
            possible = [node for node in nodes[:index] if free[node]]
            for parent in chance.sample(possible, chance.randint(1, min(len(possible), most))):
                edges.append((parent, nodes[index]))
                free[parent] -= 1
        chance.shuffle(edges)
        return edges, nodes[-1]

    def fingerprint_rows(self, batch: Batch) -> Tensor:
        """Return fingerprints that ignore the order of edges and answers."""
        rows = [row[: row.index(ANSWER)] for row in batch["input_ids"].tolist()]
        # The hash of a tuple of numbers is the same in all processes.
        return torch.tensor([hash((frozenset(read_edges(row)), row[-1])) for row in rows])

    def is_right(self, number: int, answer: list[int]) -> bool:
        prompt = self.held_out_prompts[number]
        query = prompt[-2]
        return answer[-2:] == [query, END] and is_topological(read_edges(prompt), query, answer[:-2])

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
