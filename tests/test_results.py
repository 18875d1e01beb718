"""The generated pages of results say what the stored runs say, recomputed here without headwater's statistics."""

import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
import yaml
from scipy import stats

from headwater_lab.papers.kept import KeptRun
from headwater_lab.papers.table import read_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
sys.path.insert(0, str(ROOT / "docs" / "build"))

from result_pages import benchmark_pages, judging, page_tables, pages, placeholders  # noqa: E402  (where mkdocs finds it)


def final_losses(experiment: str, arm: str, file: str = "ledger") -> dict[int, float]:
    """Final held-out loss of each compared seed, as plain JSON has it."""
    losses = {}
    for line in (RESULTS / f"{file}.jsonl").read_text().splitlines():
        if f"/trials/{experiment}/" not in line[:90]:
            continue
        record = json.loads(line)["record"]
        if (record["experiment"]["name"], record["experiment"]["arm"]) != (experiment, arm):
            continue
        if record["experiment"]["phase"] == "comparison":
            losses[record["seed"]] = record["held_out"][-1]["metrics"]["loss"]
    return losses


def read_experiment(file: str, experiment: str) -> list[KeptRun]:
    """The stored runs of one comparison."""
    lines = (RESULTS / f"{file}.jsonl").read_text().splitlines()
    return [KeptRun.model_validate_json(line) for line in lines if f"/trials/{experiment}/" in line[:90]]


def judge_table(name: str, file: str, experiment: str) -> judging.TableResult:
    """A table, judged as the site judges it, by its own runs alone."""
    (result,) = judging.judge_recorded([name], "cpu", read_experiment(file, experiment))
    return judging.describe_table(name, "cpu", read_tables()[name], result)


@pytest.fixture(scope="module")
def code_table():
    """The ledger's table of source code."""
    return judge_table("ledger/code", "ledger", "ledger-code")


def test_claims_have_the_differences_and_intervals_of_the_stored_runs(code_table):
    vanilla = final_losses("ledger-code", "vanilla")
    p_values, means, errors = [], [], []
    for claim in code_table.claims:
        arm, _, baseline = claim.arms.partition(" against ")
        assert baseline == "vanilla"
        losses = final_losses("ledger-code", arm)
        differences = [vanilla[seed] - losses[seed] for seed in sorted(vanilla)]
        means.append(statistics.mean(differences))
        errors.append(statistics.stdev(differences) / math.sqrt(len(differences)))
        p_values.append(float(stats.ttest_1samp(differences, 0).pvalue))
        assert claim.seeds == len(differences) == 4
    ranks = {index: rank for rank, index in enumerate(sorted(range(4), key=p_values.__getitem__))}
    for index, claim in enumerate(code_table.claims):
        level = 0.05 / (4 - ranks[index])  # Holm: all four are rejected, each at its own level
        assert p_values[index] < level
        half = stats.t.ppf(1 - level / 2, 3) * errors[index]
        assert claim.estimate == pytest.approx(means[index])
        assert claim.interval == pytest.approx((means[index] - half, means[index] + half))
        assert claim.verdict == "replicates"
        assert claim.recorded
        assert f"{means[index]:+.4f}" in claim.evidence


def test_the_page_shows_the_means_of_the_stored_runs(code_table):
    page = pages.write_table_section(code_table)
    losses = list(final_losses("ledger-code", "vanilla").values())
    assert f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}" in page
    assert "headwater reproduce ledger/code" in page
    assert "AMD EPYC" in page


def test_a_papers_claims_have_the_differences_of_the_stored_runs():
    rates = {"1e-4": "1e-3", "2e-4": "3e-3", "1e-3": "1e-2", "1e-2": "1e-1"}  # the paper's, and ours
    gains = {}
    for paper, ours in rates.items():
        vanilla = final_losses("cpu-kv-shifting-rates", f"vanilla at {ours}", "papers")
        shift = final_losses("cpu-kv-shifting-rates", f"KV shift at {ours}", "papers")
        gains[paper] = [vanilla[seed] - shift[seed] for seed in sorted(vanilla)]
    expected = [*gains.values(), [a - b for a, b in zip(gains["1e-3"], gains["1e-4"], strict=True)]]
    claims = judge_table("kv-shifting/figure-5b", "papers", "cpu-kv-shifting-rates").claims
    assert len(claims) == len(expected) == 5
    for claim, differences in zip(claims, expected, strict=True):
        middle = statistics.mean(differences)
        assert claim.estimate == pytest.approx(middle)
        assert claim.verdict == ("replicates" if middle > 0 else "fails")
        assert stats.ttest_1samp(differences, 0).pvalue < 0.05
        assert claim.interval[0] * claim.interval[1] > 0
        half = stats.sem(differences) * stats.t.ppf(0.975, len(differences) - 1)  # Holm's is never narrower
        assert claim.interval[1] - claim.interval[0] >= 2 * half * (1 - 1e-9)


def test_every_arm_of_the_ledger_is_shown_with_the_mean_and_the_date_of_its_runs():
    (comparison,) = judging.compute_comparisons(read_experiment("ledger", "recommended-gpu-subwords"))[:1]
    table = pages.tabulate_arms(comparison, "Subwords")
    lines = [json.loads(line) for line in (RESULTS / "ledger.jsonl").read_text().splitlines()]
    records = [line["record"] for line in lines if "/recommended-gpu-subwords/" in line["run"]]
    compared = {"size": comparison.size, "phase": "comparison"}
    records = [record for record in records if compared.items() <= record["experiment"].items()]
    for row in table.rows:
        arm = [record for record in records if record["experiment"]["arm"] == row[0]]
        results = [record["held_out"][-1]["metrics"][record["metric"]] for record in arm]
        mean, spread = map(float, row[1].split(" ")[:3:2])
        assert (mean, spread) == pytest.approx((statistics.mean(results), statistics.stdev(results)), abs=5e-4)
        assert f"{arm[0]['parameters']:,}" in row
    recorded = {(record["recorded"]["date"], record["recorded"]["commit"]) for record in records}
    ((date, commit),) = recorded
    assert (table.source.date, table.source.code) == (date, f"added in commit {commit}")
    assert "H200" in table.source.hardware


def test_all_stored_figures_have_a_date_and_code():
    for file in judging.RECORDS:
        for line in (RESULTS / file).read_text().splitlines():
            recorded = json.loads(line)["record"]["recorded"]
            assert recorded["date"].startswith("20")
            assert len(recorded["commit"]) == 12
    for entry in json.loads((RESULTS / judging.WITHOUT_RECORDS).read_text())["tables"].values():
        assert entry["date"]
        assert entry["added"]


def test_benchmarks_are_shown_as_measured():
    shown = benchmark_pages.write_speed_page()
    for measurement in json.loads((RESULTS / "cpu-speed.json").read_text())["measurements"]:
        if measurement["topic"] == "Training steps":
            for row in measurement["rows"]:
                assert f">{row['ratio, median']:g}</td>" in shown
    rows = [row for _, row in benchmark_pages.read_gpu_rows("gpu-h100.jsonl")]
    (h100,) = (row for row in rows if row.get("mechanism") == "kv_shift")
    device = "NVIDIA H100 80GB HBM3"
    figure = benchmark_pages.find_gpu_figure(device, "mechanisms", {"mechanism": "kv_shift"}, "ratio")
    assert figure == (h100["ratio"], "gpu-h100.jsonl")


def test_figures_of_the_commentary_are_filled_in():
    text, page = placeholders.SUMMARY.read_text(), placeholders.PAGE.read_text()
    pieces = placeholders.PLACEHOLDER.split(text)  # text and placeholders in turn
    figures = re.fullmatch("(.+?)".join(map(re.escape, pieces[::2])), page)
    assert figures, "run `make results`"
    assert {name.split(" ")[0] for name in pieces[1::2]} == placeholders.FILLERS.keys()
    for name, figure in zip(pieces[1::2], figures.groups(), strict=True):
        if name.split(" ")[0] in ("cell", "gpu", "minutes", "price", "decoding"):  # others judge all stored runs first
            assert placeholders.fill_placeholders(f"{{{{ {name} }}}}") == figure
    with pytest.raises(ValueError, match="nothing is called"):
        placeholders.fill_placeholders("{{ price | ledger-text | nothing }}")


@pytest.mark.slow
def test_the_commentary_is_what_the_stored_runs_say():
    assert placeholders.fill_placeholders(placeholders.SUMMARY.read_text()) == placeholders.PAGE.read_text()


def test_what_others_say_is_about_claims_that_there_are():
    known = {
        (name, f"{claim.arm} against {claim.against}")
        for name, table in read_tables().items()
        for claim in table.claims
        if hasattr(claim, "against")
    }
    for table, entries in yaml.safe_load((RESULTS / "said.yaml").read_text()).items():
        for arms, items in entries.items():
            assert (table, arms) in known
            assert all(item["url"].startswith("https://") for item in items)


def test_stored_verdicts_are_those_of_whole_tables():
    stored = json.loads((RESULTS / "verdicts-without-records.json").read_text())["tables"]
    for name, entry in stored.items():
        numbers = [claim["number"] for claim in entry["claims"]]
        assert numbers == list(range(1, len(read_tables()[name].claims) + 1))


def test_tables_are_for_keyboards_and_screen_readers():
    table = page_tables.PageTable("Losses", ["arm", "loss"], [["a <b>", "1.5 ± 0.1"], ["b", ""]], choices=["arm"])
    page = page_tables.render_table(table)
    assert '<th scope="col">arm</th><th scope="col" class="number">loss</th>' in page
    assert '<th scope="row">a &lt;b&gt;</th>' in page
    assert 'tabindex="0"' in page
    assert 'data-choices="0"' in page
