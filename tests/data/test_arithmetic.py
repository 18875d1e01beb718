"""Arithmetic problems: what they need, what they come to, and when a written solution counts."""

import random
import re

import pytest
import torch

from headwater.util.seeding import generator
from headwater_lab.data.base import Share
from headwater_lab.data.synthetic.arithmetic import (
    ArithmeticSettings,
    Operation,
    is_solved,
    prompt_of,
    solution_of,
    solve_problem,
)

PROBLEM = "Farm Rope = Bakery Cup × 3 . Bakery Cup = 9 . Museum Lamp = Farm Rope - Bakery Cup . ? Museum Lamp :"
STEPS = (
    "Farm Rope = Bakery Cup × 3 = 9 × 3 = 4 .",
    "Museum Lamp = Farm Rope - Bakery Cup = 4 - 9 = 18 .",
)


def naive(prompt, modulus):
    """(answer, operations it needs) of a problem as text, by Python's own arithmetic on the statements."""
    *statements, question = prompt.split(" . ")
    meaning = dict(statement.split(" = ") for statement in statements)
    asked = re.fullmatch(r"\? (\w+ \w+) :", question)[1]
    needed = set()

    def value(name):
        text = meaning[name]
        if not text.isdecimal():
            needed.add(name)
        for other in re.findall(r"[A-Z]\w+ [A-Z]\w+", text):
            text = text.replace(other, str(value(other)))
        return eval(text.replace("×", "*")) % modulus

    return value(asked), len(needed)


def steps_of(problem):
    return [name for name in solve_problem(problem, 23) if isinstance(problem[0][name], Operation)]


@pytest.mark.parametrize("operations", [1, 2, 3, 6, 12, 24])
def test_a_problem_needs_exactly_so_many_operations_and_its_solution_is_right(operations):
    data = ArithmeticSettings(operations=operations).build()
    chance = random.Random(operations)
    orders = set()
    for _ in range(100):
        problem = data.draw_problem(chance, operations)
        prompt = " ".join(prompt_of(problem))
        answer, needed = naive(prompt, 23)
        assert needed == operations == len(steps_of(problem))
        solution = solution_of(problem, 23)
        *steps, end = " ".join(solution).split(" . ")
        assert end == "<end>"
        assert len(steps) == operations
        assert steps[-1].startswith(" ".join(problem[1]))
        assert steps[-1].endswith(f"= {answer}")
        assert solve_problem(problem, 23)[problem[1]] == answer
        assert is_solved(problem, solution, 23)
        known = {name for name, value in problem[0].items() if isinstance(value, int)}
        for step in steps:  # nothing is used before it is known, and every sum is right
            name, named, numbers, result = step.split(" = ")
            assert {tuple(n.split()) for n in re.findall(r"[A-Z]\w+ [A-Z]\w+", named)} <= known
            assert eval(numbers.replace("×", "*")) % 23 == int(result)
            known.add(tuple(name.split()))
        orders.add(list(problem[0]).index(problem[1]))
    assert len(orders) > 2, "statements come in any order"


def test_training_goes_up_to_the_operations_and_held_out_problems_are_harder_by_so_many():
    data = ArithmeticSettings(operations=3, extra_operations=2, held_out=50).build()
    ids = data.sample(generator("test"), 300)["input_ids"].tolist()
    prompts = (" ".join(data.words[token] for token in row).partition(":")[0] + ":" for row in ids)
    counts = [naive(prompt, 23)[1] for prompt in prompts]
    assert set(counts) == {1, 2, 3}
    assert min(counts.count(n) for n in (1, 2, 3)) > 70
    assert {len(steps_of(problem)) for problem in data.held_out_problems} == {5}


def test_some_statements_are_not_needed():
    data = ArithmeticSettings(operations=2).build()
    chance = random.Random(0)
    unneeded = []
    for _ in range(200):
        stated, asked = data.draw_problem(chance, 2)
        used = {asked}
        for name in reversed(steps_of((stated, asked))):
            used |= {operand for operand in (stated[name].left, stated[name].right) if isinstance(operand, tuple)}
        unneeded.append(len(set(stated) - used))
    assert {0, 1, 2} <= set(unneeded)


@pytest.mark.parametrize(
    "settings", [{"operations": 24, "extra_operations": 6}, {"operations": 2}, {"operations": 1, "modulus": 2}]
)
def test_rows_fit_the_context_and_the_loss_is_on_the_solution(settings):
    data = ArithmeticSettings(**settings, held_out=100).build()
    batch = data.held_out()
    assert batch["input_ids"].shape[1] <= data.context
    assert int(batch["input_ids"].max()) < data.vocab_size
    for row, labels, problem in zip(
        batch["input_ids"].tolist(), batch["shift_labels"].tolist(), data.held_out_problems, strict=True
    ):
        colon = row.index(data.ids[":"])
        solution = data.encode_words(solution_of(problem, data.settings.modulus))
        assert row[: colon + 1] == data.encode_words(prompt_of(problem))
        assert row[colon + 1 : colon + 1 + len(solution)] == solution
        assert [label for label in labels if label >= 0] == solution
        assert labels[colon : colon + len(solution)] == solution
        assert not any(row[colon + 1 + len(solution) :])


@pytest.mark.parametrize(
    ("written", "solved"),
    [
        (f"{STEPS[0]} {STEPS[1]} <end>", True),
        (STEPS[1], True),  # any step that computes what is asked; no end is needed
        (f"{STEPS[1]} {STEPS[0]} <end>", True),
        (f"Garden Cup = = 3 . 4 4 . {STEPS[1]} Museum Lamp = 3 .", True),
        (f"{STEPS[0]} <end> {STEPS[1]}", False),  # behind the end
        (STEPS[0], False),
        ("", False),
        (STEPS[1].removesuffix(" ."), False),  # not a whole step
        (STEPS[1].replace("18", "17"), False),
        (STEPS[1].replace("4 - 9", "5 - 9"), False),  # what is computed is not what is written
        (STEPS[1].replace("4 - 9", "5 - 9") + " " + STEPS[1], True),  # any step will do
        (STEPS[1].replace("4 - 9", "5 - 10"), True),  # other numbers that come to the same
        (STEPS[1].replace("Museum Lamp =", "Museum Cup ="), False),
        ("Museum Lamp = 18 .", False),  # nothing is computed
        ("Museum Lamp = Farm Rope - Bakery Cup = Farm Rope - Bakery Cup = 18 .", False),
        ("Museum Lamp = Farm Rope - Bakery Cup = 4 - 9 = 18 = 18 .", False),
        ("Museum Lamp = Farm Rope - Bakery Cup = 4 9 - = 18 .", False),
    ],
)
def test_a_solution_counts_if_a_step_computes_what_is_asked_rightly(written, solved):
    cup, rope, lamp = ("Bakery", "Cup"), ("Farm", "Rope"), ("Museum", "Lamp")
    problem = {rope: Operation(cup, "×", 3), cup: 9, lamp: Operation(rope, "-", cup)}, lamp
    assert " ".join(prompt_of(problem)) == PROBLEM
    assert solve_problem(problem, 23)[problem[1]] == (9 * 3 - 9) % 23 == 18
    assert naive(PROBLEM, 23) == (18, 2)
    assert is_solved(problem, written.split(), 23) is solved


@pytest.mark.parametrize("wrong", [lambda v: (v + 1) % 23, lambda v: (v - 1) % 23], ids=["+1", "-1"])
def test_wrong_answers_are_wrong_over_many_problems(wrong):
    data = ArithmeticSettings(operations=4).build()
    chance = random.Random(1)
    for _ in range(200):
        problem = data.draw_problem(chance, 4)
        written = solution_of(problem, 23)
        assert written[-3] == str(solve_problem(problem, 23)[problem[1]])
        written[-3] = str(wrong(solve_problem(problem, 23)[problem[1]]))
        assert not is_solved(problem, written, 23)


def certain(answers, vocab_size):
    return torch.nn.functional.one_hot(answers, vocab_size) * 100.0


def solver(data, wrong=()):
    """A model that knows the solutions of the held-out problems; those of these numbers are wrong by one."""
    solutions = {}
    for number, problem in enumerate(data.held_out_problems):
        words = solution_of(problem, 23)
        words[-3] = str((int(words[-3]) + (number in wrong)) % 23)
        solutions[tuple(data.encode_words(prompt_of(problem)))] = data.encode_words(words)

    def logits(batch):
        answers = torch.zeros_like(batch["input_ids"])
        for index, row in enumerate(batch["input_ids"].tolist()):
            colon = row.index(data.ids[":"])
            solution = solutions[tuple(row[: colon + 1])][: len(row) - colon]
            answers[index, colon : colon + len(solution)] = torch.tensor(solution)
        return certain(answers, data.vocab_size)

    return logits


def test_the_accuracy_is_that_of_what_the_model_writes():
    data = ArithmeticSettings(operations=2, held_out=20).build()
    assert data.evaluate(solver(data)).metrics["accuracy"] == 1.0
    assert data.evaluate(solver(data, range(5))).metrics["accuracy"] == 0.75
    # A model that only copies the given solution cannot do so when it writes its own.
    copied = data.evaluate(lambda batch: certain(batch["input_ids"].roll(-1, 1), data.vocab_size))
    assert copied.metrics["accuracy"] == 0.0
    assert copied.metrics["loss"] < 1e-6


def test_a_model_that_never_ends_is_stopped_at_the_longest_row():
    data = ArithmeticSettings(operations=1, held_out=3).build()
    lengths = []

    def logits(batch):
        lengths.append(batch["input_ids"].shape[1])
        return torch.zeros(*batch["input_ids"].shape, data.vocab_size + 5).index_fill(2, torch.tensor([50]), 1.0)

    rows = data.write_answers(logits, data.held_out_prompts, Share())
    assert {len(row) for row in rows} == {data.context}
    assert all(length % 32 == 0 and length <= data.context for length in lengths)
    assert not data.is_right(0, rows[0])  # its tokens are no words


def test_problems_are_shared_by_processes_that_call_the_model_equally_often():
    data = ArithmeticSettings(operations=3, held_out=7).build()
    model = solver(data, {0, 1, 5})
    world = 3
    counts = [[] for _ in range(world)]  # what each process adds up at each turn, when it is alone
    for rank in range(world):
        data.evaluate(model, Share(rank, world, lambda tensor, own=counts[rank]: own.append(float(tensor)) or tensor))
    turns = max(len(own) for own in counts) - 1
    alive = [[*own[:-1], *[0.0] * (turns - len(own) + 1)] for own in counts]
    solved = sum(own[-1] for own in counts)
    calls = []
    for rank in range(world):
        step = iter(range(turns + 1))

        def total(tensor, step=step, rank=rank):
            now = next(step)
            if now == turns:
                return torch.tensor([solved], dtype=tensor.dtype)
            assert float(tensor) == alive[rank][now]
            return torch.tensor([sum(own[now] for own in alive)])

        seen = []
        metrics = data.evaluate(
            lambda batch, seen=seen: seen.append(1) or model(batch), Share(rank, world, total)
        ).metrics
        assert metrics["accuracy"] == pytest.approx(4 / 7)
        calls.append(len(seen))
    assert len(set(calls)) == 1, "models in several processes run together or not at all"


def test_a_row_is_readable():
    data = ArithmeticSettings().build()
    text = data.write_row(data.held_out(), 3)
    assert text.split() == [*prompt_of(data.held_out_problems[3]), *solution_of(data.held_out_problems[3], 23)]
