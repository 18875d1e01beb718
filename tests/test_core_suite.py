"""CORE: made tasks in llm-foundry's format, scored against prompts, rankings and averages written out here."""

import json
import lzma
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaForCausalLM

from conftest import teach_llama
from headwater import HeadwaterError
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.evaluation import core_suite, evaluate
from headwater_lab.evaluation.core_suite import TASKS
from headwater_lab.evaluation.paired_differences import Items, average_items, compare_items

pytest.importorskip("lm_eval")
WORDS = ("red", "blue", "green", "white")
# A file of each kind: choices, contexts to choose from, and exact continuations, by category.
CHOICES = [
    {"query": f"Question: {i} is \n", "choices": [f" {WORDS[i % 4]}", "red red red red red", "é"], "gold": i % 3}
    for i in range(14)
]
SCHEMA = [
    {
        "context_options": [f"The {a} met", f"A {a} and a {WORDS[i % 3]} met"],
        "continuation": f"a {a} cat.",
        "gold": i % 2,
    }
    for i, a in enumerate(WORDS * 2)
]
EXACT = [
    {"context": f"{word}: {word} {word} ", "continuation": word, "category": "ab"[i % 3 == 0]}
    for i, word in enumerate(WORDS * 4)
]
KINDS = {"piqa": CHOICES, "winograd": SCHEMA, "jeopardy": EXACT}


def write_tasks(folder: Path, names=tuple(TASKS)) -> Path:
    """Files of the tasks, each of the kind that its name has in CORE."""
    folder.mkdir()
    for name in names:
        task = TASKS[name]
        rows = SCHEMA if "wino" in name else CHOICES if task.baseline else EXACT
        lines = "".join(json.dumps(row) + "\n" for row in rows[: 12 + len(name) % 3])
        (folder / f"{task.file}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models that learned the made items for a few steps, so that some answers are right."""
    folder = tmp_path_factory.mktemp("models")
    text = json.dumps([CHOICES, SCHEMA, [f"{w}: {w} {w} {w}\n" for w in WORDS * 20]])
    for seed, name in enumerate("ab"):
        teach_llama(text, positions=512, steps=60, stride=300, seed=seed).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return [str(folder / "a"), str(folder / "b")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("core") / "files", tuple(KINDS))


def find_items(result, label, metric, model="a"):
    [row] = [row for row in result.rows if (row.task, row.metric) == (label, metric)]
    return row.figures[model].items


def log_likelihoods(model, prompt: str, answer: str) -> tuple[list[float], bool]:
    """log p of each byte of the answer, and whether each is the likeliest."""
    ids, start = list((prompt + answer).encode()), len(prompt.encode())
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    logp = [scores[i - 1, ids[i]].item() for i in range(start, len(ids))]
    return logp, all(scores[i - 1].argmax().item() == ids[i] for i in range(start, len(ids)))


def score_naively(model, rows, delimiter, shots, seed, rank=np.mean) -> tuple[list[float], list[float]]:
    """Right or wrong, and bits per byte of the right answer, of each item."""

    def spell(row, context=None, answer=None):
        if context is None:
            context = (
                row["context_options"][row["gold"]]
                if "context_options" in row
                else row.get("query", row.get("context"))
            )
        if answer is None:
            answer = row["choices"][row["gold"]] if "choices" in row else row["continuation"]
        return context.strip() + delimiter, " " + answer.strip()

    right, bits = [], []
    for index, row in enumerate(rows):
        others = rows[:index] + rows[index + 1 :]
        head = "".join("".join(spell(other)) + "\n" for other in Random(f"{seed}:{index}").sample(others, shots))
        if "choices" in row:
            pairs = [spell(row, None, choice) for choice in row["choices"]]
        else:
            pairs = [spell(row, context) for context in row.get("context_options", [row.get("context")])]
        scores = [log_likelihoods(model, head + prompt, answer) for prompt, answer in pairs]
        if len(pairs) == 1:
            right.append(float(scores[0][1]))
        else:
            right.append(float(np.argmax([rank(logp) for logp, _ in scores]) == row["gold"]))
        gold = row.get("gold", 0)
        bits.append(-sum(scores[gold][0]) / math.log(2) / len(pairs[gold][1][1:].encode()))
    return right, bits


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_scored_as_by_hand(name, models, files, monkeypatch):
    monkeypatch.setattr(core_suite, "CHUNK", 5)
    task, rows = TASKS[name], KINDS[name][: 12 + len(name) % 3]
    model = LlamaForCausalLM.from_pretrained(models[0]).double()
    result = evaluate(models[:1], [f"core/{name}"], task_files=files, dtype="float64", seed=5)
    right, bits = score_naively(model, rows, task.delimiter, task.shots, 5)
    assert 0 < sum(right) < len(right)
    if name == "piqa":  # another ranking would give other answers
        assert score_naively(model, rows, task.delimiter, task.shots, 5, rank=sum)[0] != right
    acc, per_byte = find_items(result, f"core/{name}", "acc"), find_items(result, f"core/{name}", "bits per byte")
    if name == "jeopardy":  # the mean of two categories of different sizes
        groups = [[k for k, row in enumerate(rows) if row["category"] == category] for category in "ba"]
        order, expected = (
            [k for group in groups for k in group],
            np.mean([np.mean([right[k] for k in group]) for group in groups]),
        )
        error = math.sqrt(sum(np.var([bits[k] for k in group], ddof=1) / len(group) for group in groups)) / 2
        assert per_byte.stderr == pytest.approx(error, rel=1e-5)
        scales = np.array([len(rows) / 2 / len(group) for group in groups for _ in group])
    else:
        order, expected, scales = range(len(rows)), np.mean(right), 1
        assert acc.stderr == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(rows)))
    assert acc.figure == pytest.approx(expected)
    assert acc.values == pytest.approx(np.array([right[k] for k in order]) * scales)
    assert per_byte.values == pytest.approx(np.array([bits[k] for k in order]) * scales, rel=1e-5)


def test_shots_can_be_chosen_for_one_task(models, files):
    result = evaluate(models[:1], ["core/piqa@0", "core/piqa@3"], task_files=files, dtype="float64")
    model = LlamaForCausalLM.from_pretrained(models[0]).double()
    for shots in (0, 3):
        [row] = [row for row in result.rows if (row.metric, row.shots) == ("bits per byte", shots)]
        _, bits = score_naively(model, KINDS["piqa"][: len(row.figures["a"].items.values)], "\nAnswer:", shots, 1234)
        assert row.figures["a"].items.values == pytest.approx(bits, rel=1e-5)


def test_core_is_the_mean_of_centred_accuracies_over_all_tasks(models, tmp_path):
    result = evaluate(models, ["core"], task_files=write_tasks(tmp_path / "files"), limit=11)
    tables = {"v2": {}, "v1": {"commonsense_qa": 20, "agi_eval_lsat_ar": 20, "bigbench_language_identification": 9.1}}
    for version, earlier in tables.items():
        centred, errors = [], {"a": [], "b − a": []}
        for name, task in TASKS.items():
            base = earlier.get(name, task.baseline) / 100
            acc = {model: find_items(result, f"core/{name}", "acc", model) for model in "ab"}
            centred.append((acc["a"].figure - base) / (1 - base))
            errors["a"].append(acc["a"].stderr / (1 - base))
            errors["b − a"].append(compare_items("b", acc["b"], "a", acc["a"]).stderr / (1 - base))
        [row] = [
            row for row in result.rows if (row.task, row.metric) == ("CORE, 11 items a task", f"centred, {version}")
        ]
        assert row.figures["a"].value == pytest.approx(np.mean(centred))
        for figure, name in ((row.figures["a"], "a"), (row.differences[0], "b − a")):
            assert figure.stderr == pytest.approx(math.sqrt(sum(error**2 for error in errors[name])) / 22)
    [facts] = [facts for facts in result.tasks if facts["task"] == "CORE, 11 items a task"]
    assert facts["missing"] == []


def test_fewer_tasks_are_never_called_core(models, files, run, tmp_path):
    code, out, err = run("evaluate", *models, "--tasks", "core", "--task-files", files, "--out", tmp_path / "a.json")
    assert code == 0, err
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert "CORE" not in {row["task"] for row in rows}
    averages = {row["metric"]: row for row in rows if row["task"] == "CORE-3 of 22"}
    assert set(averages) == {"acc", "centred, v2", "centred, v1", "bits per byte"}
    assert averages["centred, v2"]["differences"][0]["p"] is not None
    [line] = [line for line in (out + err).splitlines() if line.startswith("CORE-3 of 22 is not CORE")]
    assert "hellaswag_zeroshot, bigbench_qa_wikidata" in line
    assert not any(f" {name}," in line for name in KINDS)


def test_a_limit_draws_the_same_items_for_all_models_from_the_whole_file(models, files):
    every, some = (evaluate(models, ["core/winograd"], task_files=files, limit=limit, seed=3) for limit in (None, 4))
    chosen = sorted(Random(3).sample(range(8), 4))
    assert chosen != [0, 1, 2, 3]
    for model in "ab":
        items = [find_items(result, "core/winograd", "bits per byte", model).values for result in (every, some)]
        assert items[1] == pytest.approx(items[0][chosen], rel=1e-5)


def test_a_part_of_the_items_is_not_called_core_alone(models, files):
    result = evaluate(models[:1], ["core"], task_files=files, limit=3)
    assert {row.task for row in result.rows if "of 22" in row.task} == {f"CORE-{len(KINDS)} of 22, 3 items a task"}
    with pytest.raises(HeadwaterError, match="name core/NAME@0 for a task with others"):
        evaluate(models[:1], ["core"], task_files=files, shots=0)


def test_prompts_that_do_not_fit_are_counted(models, files, run):
    code, out, err = run(
        "evaluate", models[0], "--tasks", "core/piqa,core/winograd", "--task-files", files, "--context", "100"
    )
    assert code == 0, err
    assert "core/piqa: the context of a cuts the beginning of 39 prompts" in (out + err).replace("\n", " ")
    assert "core/winograd: the" not in out + err


def test_packed_files_are_read(models, files, tmp_path):
    plain = (files / "piqa.jsonl").read_bytes()
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "piqa.jsonl.xz"
    file.write_bytes(lzma.compress(plain))
    packed, unpacked = (
        evaluate(models[:1], ["core/piqa@1"], task_files=folder, limit=3) for folder in (tmp_path, files)
    )
    assert find_items(packed, "core/piqa", "bits per byte").values.tolist() == pytest.approx(
        find_items(unpacked, "core/piqa", "bits per byte").values.tolist()
    )
    file.write_bytes(lzma.compress(plain)[:-20])
    with pytest.raises(HeadwaterError, match="truncated"):
        evaluate(models[:1], ["core/piqa"], task_files=tmp_path)
    file.write_bytes(b"no xz")
    with pytest.raises(HeadwaterError, match="cannot be read"):
        evaluate(models[:1], ["core/piqa"], task_files=tmp_path)


ITEM = {"query": "q", "choices": ["a", "b"], "gold": 0}


@pytest.mark.parametrize(
    ("tasks", "row", "message"),
    [
        ("core@5", ITEM, "core/NAME@SHOTS, not 'core@5'"),
        ("core/piga", ITEM, "did you mean 'piqa'"),
        ("core/piqa@two", ITEM, "core/NAME@SHOTS"),
        ("core/copa", ITEM, r"no file copa\.jsonl"),
        ("core/piqa", ITEM, "1 items; piqa needs more than its 10 examples"),
        ("core", ITEM | {"gold": 2}, "Line 1 of .*index of one of two or more choices, not 2 of 2"),
        ("core", ITEM | {"gold": True}, "not True of 2"),
        ("core", ITEM | {"choices": ["a"]}, "two or more"),
        ("core", ITEM | {"choices": "ab"}, "not a list"),
        ("core", ITEM | {"choices": ["a", " "]}, "missing, empty or not a text"),
        ("core", {"query": "q", "gold": 0}, "missing, empty or not a text"),
        ("core", {"context": None, "continuation": "a"}, "missing, empty or not a text"),
    ],
)
def test_bad_input_is_one_sentence(tasks, row, message, models, tmp_path):
    (tmp_path / "piqa.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(HeadwaterError, match=message) as caught:
        evaluate(models[:1], [tasks], task_files=tmp_path)
    assert "\n" not in str(caught.value)


def test_the_folder_must_have_each_file_once(models, files, tmp_path):
    for folder in (None, tmp_path / "gone", files / "piqa.jsonl"):
        with pytest.raises(HeadwaterError, match="needs --task-files FOLDER"):
            evaluate(models[:1], ["core"], task_files=folder)
    with pytest.raises(HeadwaterError, match="no task of CORE in"):
        evaluate(models[:1], ["core"], task_files=tmp_path)
    for name in ("piqa.jsonl", "piqa.jsonl.gz"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(HeadwaterError, match="piqa has two files"):
        evaluate(models[:1], ["core"], task_files=tmp_path)


def test_averages_have_the_errors_of_repeated_draws():
    draw = np.random.default_rng(0)
    figures, errors, differences = [], [], []
    for _ in range(2000):
        groups = [draw.normal(mean, 1 + mean, size=size) for mean, size in ((0, 8), (3, 30), (9, 100))]
        items = average_items([Items("mean", group, np.ones(len(group))) for group in groups])
        figures.append(items.figure)
        errors.append(items.stderr)
        shifted = average_items([Items("mean", group + 1, np.ones(len(group))) for group in groups])
        differences.append(compare_items("b", shifted, "a", items))
    assert np.mean(figures) == pytest.approx(4, abs=0.05)
    assert math.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(figures), rel=0.05)
    assert differences[0].value == pytest.approx(1)
    assert differences[0].stderr == pytest.approx(0, abs=1e-9)
    single = average_items([Items("mean", np.array(group), np.ones(len(group))) for group in ([1.0], [0.0, 1.0])])
    assert single.stderr is None  # nothing is known of the spread of one item
    nested = average_items([single, Items("mean", np.zeros(3), np.ones(3))])
    assert (nested.figure, nested.strata.tolist()) == (pytest.approx(0.375), [0, 1, 1, 2, 2, 2])


def test_p_of_an_average_is_small_only_for_a_real_difference():
    draw = np.random.default_rng(1)
    a = [draw.normal(size=40) for _ in range(3)]
    b = [group + draw.normal(0.5, 0.5, size=40) for group in a]
    first, second = (average_items([Items("mean", group, np.ones(40)) for group in groups]) for groups in (a, b))
    found = compare_items("b", second, "a", first)
    gaps = [y - x for x, y in zip(a, b, strict=True)]
    error = math.sqrt(sum(np.var(gap, ddof=1) / 40 for gap in gaps)) / 3
    expected = 2 * stats.t.sf(abs(np.mean(gaps)) / error, 119)
    assert found.p == pytest.approx(expected)
    assert found.p < 1e-6


@pytest.mark.parametrize("baseline", [0, 25, 62])
def test_centred_accuracy_is_tested_as_accuracy_is(baseline):
    """Four items of sixty that only one model has right are p = 0.125, however wrong ones are counted."""
    right = np.zeros((2, 60))
    right[0, :30] = right[1, :34] = 1
    task = replace(TASKS["piqa"], baseline=baseline)
    first, second = (task.center_items(Items("mean", row, np.ones(60)), 2) for row in right)
    found = compare_items("b", second, "a", first)
    assert (found.p, found.test) == (pytest.approx(0.125), "McNemar, exact")
