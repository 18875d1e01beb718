"""Grade-school arithmetic in the manner of iGSM: arXiv 2407.20311 (Ye et al.), section 3; arXiv 2411.19574, appendix I.

A problem and its solution:

    Bakery Cup = 4 . Farm Rope = Bakery Cup × 3 . Museum Lamp = Farm Rope - Bakery Cup . ? Museum Lamp :
    Farm Rope = Bakery Cup × 3 = 4 × 3 = 12 . Museum Lamp = Farm Rope - Bakery Cup = 12 - 4 = 8 . <end>

As in iGSM, quantities are named by two nouns (each Bakery's Cup), statements come in any order, some are not needed,
and numbers are modulo 23. Differently: no quantity is the sum over a category, a step computes one operation, and
statements are not English sentences.
"""

import functools
import itertools
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from headwater.util.seeding import generator
from headwater_lab.data.base import Batch
from headwater_lab.data.synthetic.task import SyntheticSettings, WrittenData, draw_chance, pack_rows, pad_length

PLACES = ("Airport", "Bakery", "Castle", "Farm", "Garden", "Hotel", "Library", "Museum")
THINGS = ("Apple", "Book", "Chair", "Cup", "Lamp", "Pencil", "Rope", "Shelf")
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "×": operator.mul}
MARKS = ("<pad>", "<end>", ".", "=", "?", ":", *OPERATIONS)
NAME = f"(?:{'|'.join(PLACES)}) (?:{'|'.join(THINGS)})"
OPERATION = rf"(\d+|{NAME}) ([-+×]) (\d+|{NAME})"
STEP = re.compile(rf"(?P<name>{NAME}) = {OPERATION} = (?P<left>\d+) (?P<sign>[-+×]) (?P<right>\d+) = (?P<result>\d+)")
MOST_UNNEEDED = 2
# Maximum tokens of a stated number, a stated operation, a question, and a step of the solution.
NUMBER_TOKENS, STATEMENT_TOKENS, QUESTION_TOKENS, STEP_TOKENS = 5, 9, 4, 15

QuantityName = tuple[str, str]
Operand = QuantityName | int


@dataclass(frozen=True)
class Operation:
    """An operation, left sign right, at least one of them a quantity."""

    left: Operand
    sign: str
    right: Operand


Problem = tuple[dict[QuantityName, int | Operation], QuantityName]
"""The statements about quantities, in order, and the quantity in the question."""


class ArithmeticSettings(SyntheticSettings):
    """`data:` of a recipe, with `kind: arithmetic`."""

    kind: Literal["arithmetic"] = "arithmetic"
    operations: int = Field(default=3, ge=1, le=24)
    """The most operations a training problem needs; each number from 1 on is equally likely."""
    extra_operations: int = Field(default=0, ge=0, le=6)
    """A held-out problem needs exactly this many operations more than the hardest training problem."""
    modulus: int = Field(default=23, ge=2, le=100)
    """Numbers are from 0 to modulus - 1."""
    held_out: int = Field(default=128, ge=1, le=2**20)
    """Problems to evaluate on. The model writes a solution for each, without a cache."""

    @property
    def vocab_size(self) -> int:
        return len(MARKS) + len(PLACES) + len(THINGS) + self.modulus

    @property
    def context(self) -> int:
        """The length of the longest possible row: every operation with its own number, and all unneeded statements."""
        return self.count_width(self.operations + self.extra_operations)

    def count_width(self, most: int) -> int:
        """Count the tokens of the longest row with at most this many operations."""
        prompt = (most + MOST_UNNEEDED) * STATEMENT_TOKENS + (most + 1) * NUMBER_TOKENS + QUESTION_TOKENS
        return pad_length(prompt + most * STEP_TOKENS + 1)


@ArithmeticSettings.register
class ArithmeticData(WrittenData[ArithmeticSettings]):
    """One problem per row, padded; labels only on the solution.

    The solution contains each needed operation once, after the operations of its operands, the left one first, so the
    problem determines every token. Accuracy judges the solutions that the model writes greedily by `is_solved`; the
    loss is measured on the given solution.
    """

    def __init__(self, settings: ArithmeticSettings) -> None:
        super().__init__(settings)
        numbers = [str(number) for number in range(settings.modulus)]
        self.words = [*MARKS, *PLACES, *THINGS, *numbers]
        self.ids = {word: token for token, word in enumerate(self.words)}
        self.mark, self.end = self.ids[":"], self.ids["<end>"]

    def sample(self, draw: torch.Generator, count: int) -> Batch:
        chance, most = draw_chance(draw), self.settings.operations
        return self.rows_of([self.draw_problem(chance, chance.randint(1, most)) for _ in range(count)], most)

    def held_out(self) -> Batch:
        return self.rows_of(self.held_out_problems)

    @functools.cached_property
    def held_out_problems(self) -> list[Problem]:
        chance = draw_chance(generator(self.settings.kind, "held out"))
        most = self.settings.operations + self.settings.extra_operations
        return [self.draw_problem(chance, most) for _ in range(self.settings.held_out)]

    def draw_problem(self, chance: random.Random, operations: int) -> Problem:
        """Draw a problem whose answer needs exactly `operations` operations."""
        names = [(site, thing) for site in PLACES for thing in THINGS]
        chance.shuffle(names)
        results = [names.pop() for _ in range(operations)]  # each uses only results before it
        slots: list[list[Operand | None]] = [[None, None] for _ in results]
        for needed in range(operations - 2, -1, -1):  # every result but the last, the answer, is used later
            later = range(needed + 1, operations)
            free = [(user, side) for user in later for side in (0, 1) if slots[user][side] is None]
            user, side = chance.choice(free)
            slots[user][side] = results[needed]
        stated: dict[QuantityName, int | Operation] = {}
        for index, name in enumerate(results):
            stated[name] = self.fill_operation(chance, slots[index], results[:index], names, stated)
        for _ in range(chance.randint(0, MOST_UNNEEDED)):
            name = names.pop()
            stated[name] = (
                chance.randrange(self.settings.modulus)
                if chance.random() < 0.5
                else Operation(chance.choice(list(stated)), chance.choice(list(OPERATIONS)), self.draw_number(chance))
            )
        order = list(stated)
        chance.shuffle(order)
        return {name: stated[name] for name in order}, results[-1]

    def fill_operation(
        self,
        chance: random.Random,
        slots: list[Operand | None],
        before: list[QuantityName],
        names: list[QuantityName],
        stated: dict[QuantityName, int | Operation],
    ) -> Operation:
        """Fill the missing operands of two: a new stated number (half the time), a number or a known quantity."""
        operands: list[Operand] = []
        for side, operand in enumerate(slots):
            opposite = operands[0] if side else slots[1]
            kind = chance.random()
            if operand is not None:
                pass
            elif 0.5 <= kind < 0.75 and isinstance(opposite, tuple):  # an operation needs at least one quantity
                operand = self.draw_number(chance)
            elif kind >= 0.75 and (earlier := before + [name for name in stated if isinstance(stated[name], int)]):
                operand = chance.choice(earlier)
            else:
                operand = names.pop()
                stated[operand] = self.draw_number(chance)
            operands.append(operand)
        return Operation(operands[0], chance.choice(list(OPERATIONS)), operands[1])

    def draw_number(self, chance: random.Random) -> int:
        return chance.randrange(self.settings.modulus)

    def rows_of(self, problems: list[Problem], most: int | None = None) -> Batch:
        """Encode problems as rows with the length of the longest, or of the longest with `most` operations."""
        prompts = [self.encode_words(prompt_of(problem)) for problem in problems]
        solutions = [self.encode_words(solution_of(problem, self.settings.modulus)) for problem in problems]
        longest = max((len(p) + len(s) for p, s in zip(prompts, solutions, strict=True)), default=1)
        length = pad_length(longest) if most is None else self.settings.count_width(most)
        return pack_rows(prompts, solutions, length)

    def fingerprint_rows(self, batch: Batch) -> Tensor:
        """Return fingerprints that ignore the order of statements."""
        prints = []
        for row in batch["input_ids"].tolist():
            statements = itertools.groupby(row[: row.index(self.mark)], key=self.ids["."].__ne__)
            # The hash of a tuple of numbers is the same in all processes.
            prints.append(hash(frozenset(tuple(tokens) for _, tokens in statements)))
        return torch.tensor(prints)

    def encode_words(self, words: list[str]) -> list[int]:
        return [self.ids[word] for word in words]

    def write_token(self, token: int) -> str:
        return self.words[token]

    def write_row(self, batch: Batch, row: int) -> str:
        ids = batch["input_ids"][row].tolist()
        return " ".join(self.words[token] for token in ids if token)

    def is_right(self, number: int, answer: list[int]) -> bool:
        words = [self.words[token] if token < len(self.words) else "<pad>" for token in answer]
        return is_solved(self.held_out_problems[number], words, self.settings.modulus)


def words_of(value: Operand | Operation) -> list[str]:
    """Write a number, a name or an operation as words."""
    if isinstance(value, Operation):
        return [*words_of(value.left), value.sign, *words_of(value.right)]
    return [str(value)] if isinstance(value, int) else list(value)


def prompt_of(problem: Problem) -> list[str]:
    stated, question = problem
    words = [word for name, value in stated.items() for word in (*name, "=", *words_of(value), ".")]
    return [*words, "?", *question, ":"]


def solution_of(problem: Problem, modulus: int) -> list[str]:
    values = solve_problem(problem, modulus)
    words = []
    for name in values:
        if isinstance(operation := problem[0][name], Operation):
            operands = (operation.left, operation.right)
            augend, addend = (str(o if isinstance(o, int) else values[o]) for o in operands)
            words += [*name, "=", *words_of(operation), "=", augend, operation.sign, addend]
            words += ["=", str(values[name]), "."]
    return [*words, "<end>"]


def solve_problem(problem: Problem, modulus: int) -> dict[QuantityName, int]:
    """Compute every quantity that the answer needs, in the order of a solution; the answer is the last."""
    stated, question = problem
    values: dict[QuantityName, int] = {}

    def compute_value(operand: Operand) -> int:
        if isinstance(operand, int):
            return operand
        if operand not in values:
            value = stated[operand]
            if isinstance(value, Operation):
                value = OPERATIONS[value.sign](compute_value(value.left), compute_value(value.right)) % modulus
            values[operand] = value
        return values[operand]

    compute_value(question)
    return values


def is_solved(problem: Problem, written: list[str], modulus: int) -> bool:
    """Whether any step correctly computes the answer (the rule of arXiv 2411.19574, appendix I).

    A step is "name = operation = operation on numbers = number .". Its numbers are evaluated: the result must equal
    both the number it states and the true answer. Other text does not matter.
    """
    question = problem[1]
    answer = solve_problem(problem, modulus)[question]
    text = " ".join(itertools.takewhile("<end>".__ne__, written))
    for sentence in re.split(r"(?<!\S)\.(?!\S)", text)[:-1]:  # without the incomplete step after the last full stop
        step = STEP.fullmatch(sentence.strip())
        if step is not None and step["name"] == " ".join(question):
            result = OPERATIONS[step["sign"]](int(step["left"]), int(step["right"])) % modulus
            if result == int(step["result"]) == answer:
                return True
    return False
