"""The tasks of arXiv 2512.17351: every answer again by another method, and tiny models that learn."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import stats

from headwater.util.seeding import generator
from headwater_lab.data.base import ALONE, Share
from headwater_lab.data.synthetic.brevo import BrevoSettings, is_topological
from headwater_lab.data.synthetic.capo import BITS, VALUES, CapoSettings
from headwater_lab.data.synthetic.depo import DepoSettings
from headwater_lab.data.synthetic.lano import LanoSettings
from headwater_lab.data.synthetic.mano import ManoSettings
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.loop import train


def words_of(settings, count=200):
    """(Words, {position: label}) of rows that are no longer than their last label."""
    data = settings.build()
    batch = data.sample(generator("test"), count)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["shift_labels"].tolist(), strict=True):
        words = [data.write_token(token) for token in ids]
        yield words, {at: data.write_token(label) for at, label in enumerate(labels) if label >= 0}


def test_depo_answers_are_found_by_walking_along_the_edges():
    depths = set()
    for words, labels in words_of(DepoSettings(nodes=9, hops=4, questions=5)):
        successor = dict(zip(words[:18:2], words[1:18:2], strict=True))
        assert successor.keys() == set(successor.values())
        assert len(successor) == 9
        assert sorted(labels) == [19, 22, 25, 28, 31]
        for at, label in labels.items():
            node, hops = words[at], int(words[at - 1].removeprefix("k="))
            depths.add(hops)
            for _ in range(hops):
                node = successor[node]
            assert node == label == words[at + 1]
    assert depths == set(range(1, 5))


def test_depo_rows_are_the_same_however_their_edges_are_listed():
    data = DepoSettings(nodes=6, hops=3, questions=2).build()
    rows = data.sample(generator("test"), 50)["input_ids"]
    turned = torch.cat([rows[:, :12].unflatten(1, (6, 2)).flip(1).flatten(1), rows[:, 12:]], dim=1)
    prints = data.fingerprint_rows({"input_ids": rows})
    assert torch.equal(data.fingerprint_rows({"input_ids": turned}), prints)
    assert len(prints.unique()) == 50
    turned[:, -1] = (turned[:, -1] + 1) % 6
    assert not (data.fingerprint_rows({"input_ids": turned}) == prints).any()


def test_depo_is_measured_for_each_depth():
    data = DepoSettings(nodes=6, hops=3, questions=2, held_out=100).build()

    def follow_edge(batch):
        """Answer k = 1, whatever is asked."""
        ids = batch["input_ids"]
        answers = torch.zeros_like(ids)
        for row, at in itertools.product(range(len(ids)), (13, 16)):
            answers[row, at] = ids[row, 1:12:2][ids[row, :12:2] == ids[row, at]]
        return torch.nn.functional.one_hot(answers, data.vocab_size).float()

    metrics = data.evaluate(follow_edge).metrics
    assert [metrics[f"accuracy/k={k}"] for k in (1, 2, 3)] == [1.0, 0.0, 0.0]


def reaches(edges, node, query):
    """Whether a path leads from `node` to `query`, depth first."""
    return any(child == query or reaches(edges, child, query) for parent, child in edges if parent == node)


def test_brevo_answers_are_the_ancestors_in_a_topological_order():
    sizes, firsts = set(), 0
    for words, labels in words_of(BrevoSettings(nodes=7, parents=3)):
        middle = words.index("?")
        edges = list(zip(words[:middle:2], words[1:middle:2], strict=True))
        assert len(set(edges)) == len(edges)
        sizes.add(len({node for edge in edges for node in edge}))
        for side in (0, 1):  # parents and children of a node
            assert max(sum(edge[side] == node for edge in edges) for node in {edge[side] for edge in edges}) <= 3
        assert not any(reaches(edges, node, node) for node in {parent for parent, _ in edges})
        query, colon, *answer = words[middle + 1 : words.index("<end>") + 1]
        assert colon == ":"
        assert list(labels.items()) == list(enumerate(answer, start=middle + 2))
        assert answer[-2:] == [query, "<end>"]
        assert not any(parent == query for parent, _ in edges)  # it is the last node
        order = answer[:-2]
        assert sorted(order) == sorted({parent for parent, _ in edges if reaches(edges, parent, query)})
        for later, earlier in itertools.combinations(reversed(order), 2):
            assert not reaches(edges, later, earlier)
        firsts += len(order) > 1
    assert sizes == set(range(3, 8))
    assert firsts > 50


def test_brevo_draws_small_graphs_more_often(monkeypatch):
    """A chance in proportion to 1 / (n + √N), as in the source."""
    data, sizes = BrevoSettings(nodes=9).build(), []
    monkeypatch.setattr(data, "draw_rows", lambda chance, drawn: sizes.extend(drawn))
    data.sample(generator("test"), 20_000)
    counts = [sizes.count(size) for size in range(3, 10)]
    expected = np.array([1 / (size + 3) for size in range(3, 10)])
    assert stats.chisquare(counts, expected / expected.sum() * 20_000).pvalue > 0.001


def test_brevo_takes_exactly_the_topological_orders():
    edges = [(1, 3), (2, 3), (3, 4), (1, 4), (4, 5), (2, 6)]
    judged = {
        order: is_topological(edges, 4, list(order))
        for length in range(5)
        for order in itertools.product(range(1, 7), repeat=length)
    }
    assert {order for order, right in judged.items() if right} == {(1, 2, 3), (2, 1, 3)}


def test_brevo_judges_what_the_model_writes():
    data = BrevoSettings(nodes=6, held_out=20).build()
    rows = {tuple(prompt): row for prompt, row in zip(data.held_out_prompts, data.held_out()["input_ids"], strict=True)}

    def remember(batch, rows=rows):
        """Know the rows by heart, as a model that continues its own tokens."""
        scores = torch.zeros(*batch["input_ids"].shape, data.vocab_size)
        for index, row in enumerate(batch["input_ids"].tolist()):
            known = rows.get(tuple(row[: row.index(data.mark) + 1]))
            if known is not None:
                scores[index] = torch.nn.functional.one_hot(known[1 : len(row) + 1], data.vocab_size)[: len(row)]
        return scores * 100

    short = {name: row for name, row in rows.items() if name != tuple(data.held_out_prompts[3])}
    # In a row of full length the last position has no next token.
    padded = {name: torch.cat([row, row.new_zeros(1)]) for name, row in rows.items()}
    assert data.evaluate(functools.partial(remember, rows=padded)).metrics["accuracy"] == 1.0
    less = {name: padded[name] for name in short}
    assert data.evaluate(functools.partial(remember, rows=less)).metrics["accuracy"] == 0.95


def test_brevo_answers_are_written_in_pieces(monkeypatch):
    data, sizes = BrevoSettings(nodes=6, held_out=20).build(), []

    def guess(batch):
        sizes.append(len(batch["input_ids"]))
        return data.guess_logits(batch)

    whole = data.write_answers(guess, data.held_out_prompts, ALONE)
    assert max(sizes) == 20
    sizes.clear()
    monkeypatch.setattr("headwater_lab.data.synthetic.task.LOGITS", 7 * data.context * data.vocab_size)
    assert data.write_answers(guess, data.held_out_prompts, ALONE) == whole
    assert max(sizes) <= 14


def test_brevo_holds_out_its_largest_graphs_however_their_edges_are_listed():
    data = BrevoSettings(nodes=6, held_out=20).build()
    rows, sizes = data.held_out(), set()
    turned = {"input_ids": rows["input_ids"].clone()}
    for number, (prompt, row) in enumerate(zip(data.held_out_prompts, rows["input_ids"].tolist(), strict=True)):
        sizes.add(len(set(prompt[:-3])))
        turned["input_ids"][number, : len(prompt) - 3] = torch.tensor(prompt[:-3]).view(-1, 2).flip(0).flatten()
        answer = row[len(prompt) : row.index(data.end) + 1]
        assert data.is_right(number, answer)
        assert not data.is_right(number, [*answer[:-1], answer[0]])  # it does not end
        assert not data.is_right(number, [*answer[:-2], data.end])  # without the last node
    assert max(sizes) == 6
    assert torch.equal(data.fingerprint_rows(turned), data.fingerprint_rows(rows))


def compute_value(words):
    """(Value without modulus, words behind it) of an expression, by descent."""
    sign, *behind = words
    if sign.isdigit():
        return int(sign), behind
    left, behind = compute_value(behind)
    right, behind = compute_value(behind)
    return {"+": left + right, "-": left - right, "×": left * right}[sign], behind


def test_mano_answers_are_the_values_of_the_expressions():
    lengths = set()
    for words, labels in words_of(ManoSettings(operations=6)):
        length, end = int(words[0][1:-1]), words.index("=")
        value, behind = compute_value(words[1:end])
        assert behind == []
        assert end == 2 * length + 2
        assert labels == {end: str(value % 23)}
        assert words[end + 1] == labels[end]
        lengths.add(length)
    assert lengths == set(range(1, 7))


def test_mano_is_measured_on_its_longest_expressions_of_which_training_shows_none():
    data = ManoSettings(operations=2, modulus=2, held_out=30).build()
    held_out = {tuple(row) for row in data.held_out()["input_ids"].tolist()}
    assert {data.words[row[0]] for row in held_out} == {"<2>"}
    drawn = {tuple(row) for row in data.sample(generator("test"), 2000)["input_ids"].tolist()}
    trained = {tuple(row) for row in next(data.batches(0, 2000, 0))["input_ids"].tolist()}
    assert held_out & drawn, "the test would say nothing"
    assert not held_out & trained
    facts = {row for row in trained if data.words[row[0]] == "<1>"}
    assert len(facts) == 3 * 2**2


def expand(grammar, level, symbol):
    """{Sentence: probability} of a symbol, by writing all of them."""
    if level < 0:
        return {(symbol,): 1.0}
    sentences = {}
    for sequence in grammar[level][symbol]:
        for parts in itertools.product(*(expand(grammar, level - 1, child).items() for child in sequence)):
            sentence = tuple(token for tokens, _ in parts for token in tokens)
            chance = math.prod(probability for _, probability in parts) / len(grammar[level][symbol])
            sentences[sentence] = sentences.get(sentence, 0.0) + chance
    return sentences


@pytest.mark.parametrize("settings", [LanoSettings(levels=2, rules=3), LanoSettings(levels=2, symbols=2, rules=4)])
def test_lano_probabilities_are_those_of_all_sentences_written_out(settings):
    data = settings.build()
    sentences = expand(data.grammar, settings.levels - 1, 0)
    assert sum(sentences.values()) == pytest.approx(1)
    batch = data.sample(generator("test"), 20)
    probabilities = data.next_probabilities(batch["input_ids"])
    for row, labels, predicted in zip(batch["input_ids"], batch["shift_labels"], probabilities, strict=True):
        length = int((labels >= 0).sum())
        sentence = tuple((row[1:length] - 3).tolist())
        assert sentence in sentences
        for at in range(length):
            following = torch.zeros(data.vocab_size, dtype=torch.float64)
            for other, chance in sentences.items():
                if other[:at] == sentence[:at]:
                    following[other[at] + 3 if at < len(other) else 1] += chance
            assert torch.allclose(predicted[at], following / following.sum(), atol=1e-12)
        assert predicted[length:].sum() == 0


@functools.cache
def derives(grammar, level, symbol, tokens):
    """Whether a symbol becomes these tokens, by trying all ways to split them."""
    if level < 0:
        return tokens == (symbol,)
    return any(divide(grammar, level - 1, sequence, tokens) for sequence in grammar[level][symbol])


@functools.cache
def divide(grammar, level, sequence, tokens):
    if not sequence:
        return not tokens
    cuts = range(1, len(tokens) + 1)
    return any(
        derives(grammar, level, sequence[0], tokens[:cut]) and divide(grammar, level, sequence[1:], tokens[cut:])
        for cut in cuts
    )


def test_lano_writes_sentences_of_its_grammar_and_no_wrong_one_may_end():
    data = LanoSettings(levels=3).build()
    grammar = tuple(tuple(tuple(map(tuple, rules)) for rules in level) for level in data.grammar)
    batch = data.sample(generator("test"), 40)
    ended = []
    changed = batch["input_ids"].clone()
    changed[:, 4] = 3 + (changed[:, 4] - 2) % 3
    for rows in (batch["input_ids"], changed):
        for row, predicted in zip(rows.tolist(), data.next_probabilities(rows), strict=True):
            sentence = tuple(token - 3 for token in row[1 : row.index(1)])
            ended.append(bool(predicted[len(sentence), 1] > 0))
            assert ended[-1] == derives(grammar, 2, 0, sentence)
    assert all(ended[:40])
    assert not all(ended[40:])


def test_lano_divergence_is_0_for_the_truth_and_the_loss_is_then_the_entropy():
    data = LanoSettings(levels=2, held_out=40).build()
    truth = data.next_probabilities(data.held_out()["input_ids"])
    metrics = data.evaluate(lambda batch: truth.log()).metrics
    entropy = -torch.special.xlogy(truth, truth).sum(-1)[data.held_out()["shift_labels"] != -100].mean()
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss"] == pytest.approx(float(entropy), rel=0.2)
    uniform = data.evaluate(lambda batch: torch.zeros_like(truth)).metrics
    assert uniform["kl"] == pytest.approx(math.log(6) - float(entropy), rel=1e-6)


def test_lano_refuses_grammars_whose_truth_takes_gigabytes():
    with pytest.raises(ValidationError, match=r"data.levels=6 with data.symbols=64 takes gigabytes"):
        LanoSettings(levels=6, symbols=64)


def test_lano_is_measured_in_pieces_as_at_once(monkeypatch):
    data = LanoSettings(levels=2, held_out=30).build()
    once = data.evaluate(data.guess_logits).metrics
    monkeypatch.setattr("headwater_lab.data.synthetic.task.LOGITS", 7 * data.context * data.vocab_size)
    monkeypatch.setattr("headwater_lab.data.synthetic.lano.CHART", 4 * (data.context * 3) ** 2)
    assert LanoSettings(levels=2, held_out=30).build().evaluate(data.guess_logits).metrics == pytest.approx(once)


def test_capo_rows_say_the_same_of_a_person_wherever_they_say_it():
    told = {}
    values = {}
    for words, labels in words_of(CapoSettings(people=40), 500):
        facts = dict(zip(words[3::2], words[4::2], strict=True))
        assert facts.keys() == VALUES.keys()
        assert labels == {at: words[at + 1] for at in range(3, 17, 2)}
        assert told.setdefault(tuple(words[:3]), facts) == facts
        for attribute, value in facts.items():
            values.setdefault(attribute, set()).add(value)
    assert len(told) == 40
    for (one, ones), (other, others) in itertools.combinations(values.items(), 2):
        assert not ones & others, (one, other)
        assert len(ones) <= VALUES[one]


def test_capo_counts_the_bits_that_a_model_knows():
    settings = CapoSettings(people=60, held_out=200)
    data = settings.build()
    first = data.vocab_size - sum(VALUES.values())
    spans = dict(
        zip(
            VALUES,
            itertools.pairwise([first, *(first + n for n in itertools.accumulate(VALUES.values()))]),
            strict=True,
        )
    )

    def know(*attributes):
        """Know the values of these attributes, and the range of others."""

        def logits(batch):
            scores = torch.full((*batch["input_ids"].shape, data.vocab_size), -1e4)
            for row, at in (batch["shift_labels"] >= 0).nonzero().tolist():
                attribute = data.write_token(int(batch["input_ids"][row, at]))
                begin, end = spans[attribute]
                scores[row, at, begin:end] = 0
                if attribute in attributes:
                    scores[row, at, batch["shift_labels"][row, at]] = 1e4
            return scores

        return data.evaluate(logits)

    assert math.isclose(BITS, 46.59, abs_tol=0.01)
    assert know().metrics["bits"] == pytest.approx(0, abs=0.01)
    assert know("university").metrics["bits"] == pytest.approx(60 * math.log2(300), rel=1e-4)
    everything = know(*VALUES)
    assert everything.metrics["bits"] == pytest.approx(60 * BITS, rel=1e-6) == everything.amounts["bits"]
    assert data.evaluate(data.guess_logits).metrics["bits"] == 0


def test_processes_of_brevo_share_the_graphs():
    data = BrevoSettings(nodes=4, held_out=5).build()
    counts = [data.evaluate(data.guess_logits, Share(rank, 2)).metrics["accuracy"] for rank in range(2)]
    assert sum(counts) == pytest.approx(data.evaluate(data.guess_logits).metrics["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "layers", "steps", "least"),
    [
        ({"kind": "brevo", "nodes": 5, "parents": 2, "held_out": 128}, 3, 250, 0.1),
        ({"kind": "capo", "people": 20, "held_out": 64}, 1, 60, 10 * BITS),
        ({"kind": "depo", "nodes": 6, "hops": 2, "questions": 6, "held_out": 128}, 2, 100, 0.3),
        ({"kind": "lano", "levels": 3, "held_out": 64}, 1, 40, -0.65),
        ({"kind": "mano", "operations": 2, "modulus": 3, "held_out": 96}, 2, 250, 0.5),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_a_tiny_model_learns_more_than_a_guess(data, layers, steps, least, tmp_path):
    """least: what it must reach, the negative of it where less is better; a guess must not."""
    recipe = {
        "name": "tiny",
        "data": data,
        "model": {
            "hidden_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "mechanisms": {"kv_shift": {}},
        },
        "training": {"steps": steps, "batch_size": 64, "learning_rate": 3e-3, "warmup_steps": 20, "threads": 1},
        "reporting": {"tensorboard": False, "save_every": None},
    }
    made = parse(recipe, "test")
    task = made.data.build()
    sign = -1 if task.lower_is_better else 1
    assert sign * task.evaluate(task.guess_logits).metrics[task.metric] < least
    record = train(made, tmp_path / "run")
    metrics = record.held_out[-1].metrics
    assert sign * metrics[task.metric] > least
    if data["kind"] == "capo":
        assert metrics["bits_per_parameter"] == metrics["bits"] / record.parameters
