"""Comparisons that others ran, as a file: what is missing or changed is seen, and verdicts are computed anew."""

import json
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from conftest import forking
from headwater import HeadwaterError
from headwater_lab.papers.kept import KeptRun, read_runs, write_run, write_runs
from headwater_lab.papers.shared_records import compute_comparisons, find_missing, find_problems
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.records import read_record

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The lines of a packed comparison of two arms with three seeds, as plain JSON."""
    from headwater_lab import compare
    from headwater_lab.papers.shared_records import pack_records

    folder = tmp_path_factory.mktemp("shared")
    changes = ["training.steps=4", "training.warmup_steps=1", "reporting.log_every=2", "compare.seeds=[0,1,2]"]
    with forking():
        compare("demo/induction", folder / "runs", overrides=changes, arms=["1 layer + KV shift"], workers=1)
    write_runs(folder / "shared.jsonl", pack_records(folder / "runs", "Ada"))
    lines = [json.loads(line) for line in (folder / "shared.jsonl").read_text().splitlines()]
    for line in lines:
        line["record"]["recorded"]["commit"] = "0123456789ab"  # that of a clone without changes
    return lines


def parse_lines(lines) -> list[KeptRun]:
    return [KeptRun.model_validate_json(json.dumps(line)) for line in lines]


def list_missing(lines) -> list[str]:
    return [missing for comparison in compute_comparisons(parse_lines(lines)) for missing in find_missing(comparison)]


def test_a_whole_comparison_passes(packed):
    runs = parse_lines(packed)
    assert len(runs) == 6
    assert not any("documents" in line["record"] for line in packed)
    assert find_problems(runs) == list_missing(packed) == []
    (comparison,) = compute_comparisons(runs)
    shift = next(summary for summary in comparison.summaries if summary.arm == "1 layer + KV shift")
    results = {
        (line["record"]["experiment"]["arm"], line["record"]["seed"]): line["record"]["held_out"][-1]["metrics"][
            "accuracy"
        ]
        for line in packed
    }
    differences = [results["1 layer + KV shift", seed] - results["1 layer", seed] for seed in range(3)]
    assert shift.difference == pytest.approx(sum(differences) / 3)


def _set(path, value):
    def change(line):
        *parents, last = path.split(".")
        for name in parents:
            line = line[int(name) if name.lstrip("-").isdigit() else name]
        line[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_set("by", " "), "nobody is named"),
        (_set("record.recipe.training.learning_rate", 0.5), "does not have its identity"),
        (_set("record.recipe.training.unknown", 1), "unknown"),
        (_set("record.identity", "0" * 64), "does not have its identity"),
        (_set("record.environment.device_name", None), "hardware has no name"),
        (_set("record.recorded.commit", "0123456789ab-dirty"), "changes that are in no commit"),
        (_set("record.recorded", None), "names no commit"),
        (_set("record.curve", []), "no training curve"),
        (_set("record.curve.0.step", 99), "do not increase"),
        (_set("record.held_out.-1.step", 3), "no evaluation at its last step, 4"),
        (_set("record.held_out.-1.tokens", 7), "was after 7 tokens, but it has seen"),
        (_set("record.recorded.commit", "zzz"), "names no commit"),
        (_set("record.seed", 3), "its seed is 3, but its recipe's is"),
        (_set("record.parameters", 1000), "parameters are not those"),
        (_set("record.flops", 1e9), "FLOPs do not follow"),
        (_set("record.cache_bytes_per_token", 1), "cache's bytes do not follow"),
        (_set("record.curve.-1.step", 5), "up to its last step"),
        (_set("record.held_out.-1.metrics.accuracy", float("nan")), "not finite"),
    ],
)
def test_what_is_missing_or_changed_in_a_run_is_seen(packed, change, problem):
    lines = deepcopy(packed)
    change(lines[0])
    problems = find_problems(parse_lines(lines))
    assert len(problems) == 1
    assert problem in problems[0]
    assert problems[0].startswith(lines[0]["run"])


def test_a_copied_run_is_seen(packed):
    lines = deepcopy(packed)
    lines[1]["record"]["curve"] = lines[0]["record"]["curve"]
    (problem,) = find_problems(parse_lines(lines))
    assert problem == f"{lines[1]['run']}: its curve is that of {lines[0]['run']}."


def test_what_a_recipe_of_text_says_is_compared_with_the_record(packed):
    lines = deepcopy(packed)
    of_text = {"kind": "prepared", "context": 64, "source": "/home/ada/prose", "metric": "bits_per_byte"}
    record = lines[0]["record"]
    record["recipe"]["data"] = of_text
    record["identity"] = parse(record["recipe"], "a recipe").identity
    problems = find_problems(parse_lines(lines))
    for problem in ("no sha256", "metric is not that", "path of a machine", "but its recipe makes"):
        assert any(problem in line for line in problems), problem


def test_arms_of_a_seed_read_the_same_rows(packed):
    lines = deepcopy(packed)
    lines[-1]["record"]["data_order"] = "0" * 64
    (problem,) = find_problems(parse_lines(lines))
    assert problem == f"{lines[-1]['run']}: it did not read the same rows as the other runs of its seed."


def test_tasks_of_other_settings_need_not_have_the_same_rows(packed):
    lines = deepcopy(packed)
    other = lines[0] | {"run": "other/run"}
    other["record"] = deepcopy(other["record"]) | {"data_order": "0" * 64}
    other["record"]["recipe"]["data"]["length"] += 1
    problems = find_problems(parse_lines([*lines, other]))
    assert problems
    assert not any("the same rows" in problem for problem in problems)


def test_bits_per_byte_follow_from_the_loss(packed):
    lines = deepcopy(packed)
    for number, line in enumerate(lines):
        for point in line["record"]["held_out"]:
            loss = point["metrics"]["loss"]
            point["metrics"]["bits_per_byte"] = loss / 3 - 0.01 * (number == 5 and point["step"] == 4)
    (problem,) = find_problems(parse_lines(lines))
    assert problem == f"{lines[5]['run']}: its bits per byte at step 4 do not follow from its loss."


def test_a_loss_that_is_missing_or_zero_is_seen(packed):
    for loss in (0.0, None):
        lines = deepcopy(packed)
        metrics = lines[0]["record"]["held_out"][-1]["metrics"]
        metrics |= {"bits_per_byte": 1.0} | ({} if loss is None else {"loss": loss})
        if loss is None:
            del metrics["loss"]
        assert find_problems(parse_lines(lines)) == [f"{lines[0]['run']}: it has bits per byte at step 4, but no loss."]


def test_honest_runs_pass(packed):
    """One run in two comparisons, a mean over domains, and steps that continue over stages."""
    lines = deepcopy(packed)
    lines.append(deepcopy(lines[0]) | {"run": "another/run"})
    assert find_problems(parse_lines(lines)) == []
    lines = deepcopy(packed)
    for number, line in enumerate(lines):
        metrics = line["record"]["held_out"][-1]["metrics"]
        metrics |= {"loss/a": 2.0 + number, "bits_per_byte/a": 1.0 + number / 2, "loss/b": 3.0, "bits_per_byte/b": 1.0}
        metrics |= {"loss": (5.0 + number) / 2, "bits_per_byte": (2.0 + number / 2) / 2}
    assert find_problems(parse_lines(lines)) == []
    lines = deepcopy(packed)
    numbers = ("parameters", "tokens", "flops", "seconds", "total_tokens", "total_flops", "result")
    stage = dict.fromkeys(numbers, 1)
    lines[0]["record"]["stages"] = [stage | {"name": n, "folder": f"stages/{n}", "steps": 4} for n in "ab"]
    lines[0]["record"]["held_out"][-1]["step"] = 8
    assert find_problems(parse_lines(lines)) == []


def test_by_a_plan_a_decided_arm_has_fewer_seeds(packed):
    lines = deepcopy(packed)
    arms = ["1 layer", "1 layer + KV shift", "decided"]
    extra = [deepcopy(line) for line in lines if line["record"]["seed"] == 2]
    for line in extra:
        line["run"] += "-more"
        line["record"]["seed"] = 3
    lines += [*extra, *(deepcopy(line) for line in lines if line["record"]["experiment"]["arm"] == arms[1])]
    for line in lines[-3:]:
        line["run"] += "-decided"
        line["record"]["experiment"]["arm"] = arms[2]
    assert len(list_missing(lines)) == 1  # without a plan, arms have equal seeds
    plan = {"seeds": [*range(6)], "min_seeds": 3, "margin": 0.1, "arms": arms[1:], "baseline": arms[0]}
    for line in lines:
        line["record"]["experiment"]["seed_plan"] = plan
    assert list_missing(lines) == []
    for line in lines:
        line["record"] |= {"seed": line["record"]["seed"] + (line in lines[-3:]), "data_order": ""}
    assert list_missing(lines) == ["the seeds of decided are not the first ones of its plan."]


@pytest.mark.parametrize("name", ["", ".", "./x", "x/", "x//y", "a\0b", "../x", "/x", "x/record.json", "x/.restored"])
def test_a_run_has_the_plain_name_of_a_folder(packed, tmp_path, name):
    with pytest.raises(ValueError, match="folder"):
        parse_lines([packed[0] | {"run": name}])


def test_an_entry_has_three_seeds_of_each_arm_and_the_same(packed):
    by_arm = {
        arm: [line for line in packed if line["record"]["experiment"]["arm"] == arm]
        for arm in ("1 layer", "1 layer + KV shift")
    }
    assert list_missing(by_arm["1 layer"] + by_arm["1 layer + KV shift"][:2]) == [
        "1 layer + KV shift has 2 seeds; an entry has at least 3."
    ]
    moved = deepcopy(by_arm["1 layer + KV shift"])
    moved[2]["record"]["seed"] = 9
    assert list_missing(by_arm["1 layer"] + moved) == ["1 layer + KV shift and 1 layer differ in the seeds 2, 9."]
    assert "its baseline, 1 layer, has no run" in list_missing(by_arm["1 layer + KV shift"])[0]


def test_the_commands(packed, run, tmp_path):
    file = tmp_path / "shared.jsonl"
    write_runs(file, parse_lines(packed))
    code, out, err = run("records", "check", file)
    assert (code, err) == (0, "")
    assert "run by Ada on" in out
    assert "6 runs: nothing is missing" in out
    write_runs(file, parse_lines(packed[:-1]))
    code, out, err = run("records", "check", file)
    assert code == 2
    assert "has 2 seeds; an entry has at least 3" in err
    code, _, err = run("records", "pack", tmp_path, "--out", tmp_path / "new.jsonl", "--by", "Ada")
    assert code == 2
    assert "no finished runs of a comparison" in err
    assert not (tmp_path / "new.jsonl").exists()
    code, _, err = run("records", "pack", tmp_path, "--out", file, "--by", "Ada")
    assert code == 2
    assert "already exists" in err
    assert len(read_runs(file)) == 5
    assert "There is no file" in run("records", "check", tmp_path / "new.jsonl")[2]
    for line in packed:
        folder = tmp_path / "runs" / line["run"]
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(line["record"]))
    code, out, _ = run("records", "check", tmp_path / "runs")  # before packing
    assert code == 0
    assert "6 runs: nothing is missing" in out


def test_an_unpacked_comparison_is_continued(packed, run, tmp_path):
    from headwater_lab import compare

    file, folder = tmp_path / "ada.jsonl", tmp_path / "runs"
    write_runs(file, parse_lines([line for line in packed if line["record"]["seed"] != 2]))
    assert "4 runs unpacked" in run("records", "unpack", file, "--out", folder)[1]
    changes = ["training.steps=4", "training.warmup_steps=1", "reporting.log_every=2", "compare.seeds=[0,1,2]"]
    with forking():
        compared = compare("demo/induction", folder, overrides=changes, arms=["1 layer + KV shift"], workers=1)
    assert len(compared.comparisons[0].records) == 6
    code, _, err = run("records", "pack", folder, "--out", tmp_path / "both.jsonl", "--by", "Grace")
    assert (code, err) == (0, "")
    both = read_runs(tmp_path / "both.jsonl")
    assert {line.record.seed: line.by for line in both} == {0: "Ada", 1: "Ada", 2: "Grace"}
    results = {line["run"]: line["record"]["held_out"][-1] for line in packed}
    assert {line.run: json.loads(line.record.model_dump_json())["held_out"][-1] for line in both} == results
    # A run that is there is left, and another in its place is not replaced.
    assert "0 runs unpacked" in run("records", "unpack", file, "--out", folder)[1]
    code, _, err = run("records", "unpack", tmp_path / "both.jsonl", "--out", folder)
    assert (code, err) == (0, "")
    changed = deepcopy(packed)
    changed[0]["record"]["tokens"] = 7
    write_runs(tmp_path / "changed.jsonl", parse_lines(changed))
    code, _, err = run("records", "unpack", tmp_path / "changed.jsonl", "--out", folder)
    assert code == 2
    assert "is not that run of the file" in err


def test_a_killed_unpacking_is_repeated(packed, run, tmp_path):
    file, runs = tmp_path / "ada.jsonl", parse_lines(packed)
    write_runs(file, runs)
    write_run(runs[0], tmp_path / "runs")
    (tmp_path / "runs" / runs[0].run / "record.json").unlink()
    code, stdout, _ = run("records", "unpack", file, "--out", tmp_path / "runs")
    assert (code, stdout.split()[0]) == (0, "6")
    assert read_record(tmp_path / "runs" / runs[0].run / "record.json").identity == runs[0].record.identity


def test_unpacked_runs_are_not_continued_on_other_data(packed, run, tmp_path):
    """The same settings may name other texts on another machine; this is said before anything is trained."""
    recipe = {
        "name": "texts",
        "data": {"kind": "text", "source": str(tmp_path / "text.txt"), "context": 16, "held_out": 0.3},
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "training": {"steps": 2, "batch_size": 2, "warmup_steps": 0, "threads": 1},
        "compare": {"baseline": "a", "seeds": [0], "arms": {"a": {}}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = ("compare", tmp_path / "recipe.yaml", "--out", tmp_path / "runs", "--workers", 1)
    (tmp_path / "text.txt").write_text("Some text that a model reads.\n\n" * 100)
    with forking():
        assert run(*command)[0] == 0
        packing = ("records", "pack", tmp_path / "runs", "--out", tmp_path / "a.jsonl", "--by", "Ada")
        assert run(*packing)[0] == 0
        shutil.rmtree(tmp_path / "runs")
        assert run("records", "unpack", tmp_path / "a.jsonl", "--out", tmp_path / "runs")[0] == 0
        (tmp_path / "text.txt").write_text("Other text that a model reads.\n\n" * 100)
        assert run(*command)[0] == 0  # nothing is trained
        code, _, err = run(*command, "compare.seeds=[0,1]")
    assert code == 2
    assert "holds a run trained on other data" in err
    assert not (tmp_path / "runs/texts/a-1").exists()


def test_a_file_names_no_folder_of_a_machine(packed, run, tmp_path):
    """And unpacked over the runs that it was made of, it changes nothing."""
    record = deepcopy(packed[0]["record"])
    record["data"]["tokenizer"] = str(tmp_path / "private" / "bpe")
    (folder := tmp_path / "runs" / packed[0]["run"]).mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))
    assert run("records", "pack", tmp_path / "runs", "--out", tmp_path / "a.jsonl", "--by", "Ada")[0] == 0
    assert "private" not in (tmp_path / "a.jsonl").read_text()
    assert read_runs(tmp_path / "a.jsonl")[0].record.data["tokenizer"] == "bpe"
    code, stdout, _ = run("records", "unpack", tmp_path / "a.jsonl", "--out", tmp_path / "runs")
    assert (code, stdout.split()[0]) == (0, "0")


def test_runs_with_stages_are_not_unpacked(packed, run, tmp_path):
    """`compare` looks for the runs of their stages, which are not in the file, and would train all again."""
    lines = deepcopy(packed)
    stage = dict.fromkeys(("parameters", "tokens", "flops", "seconds", "total_tokens", "total_flops", "result"), 1)
    lines[0]["record"]["stages"] = [stage | {"name": "a", "folder": "stages/a", "steps": 4}]
    write_runs(tmp_path / "a.jsonl", parse_lines(lines))
    code, _, err = run("records", "unpack", tmp_path / "a.jsonl", "--out", tmp_path / "runs")
    assert code == 2
    assert f"{lines[0]['run']} has stages" in err
    assert not list((tmp_path / "runs").glob("**/record.json"))
    assert list_missing(lines) == []


def test_the_page_of_the_site(packed, tmp_path):
    sys.path.insert(0, str(ROOT / "docs" / "build"))
    from result_pages import pages

    assert "There is none yet" in pages.write_shared_page(tmp_path)
    write_runs(tmp_path / "ada.jsonl", parse_lines(packed))
    page = pages.write_shared_page(tmp_path)
    assert "Run by Ada" in page
    assert "1 layer + KV shift" in page
    assert pages.write_shared_page()  # every file in the repository passes
    write_runs(tmp_path / "ada.jsonl", parse_lines(packed[:-1]))
    with pytest.raises(HeadwaterError, match="has 2 seeds"):
        pages.write_shared_page(tmp_path)
