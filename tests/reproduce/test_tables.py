"""The papers' tables: their arms are in their recipes, their measures exist, their numbers are the papers'."""

import contextlib
import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.cost import counts as cost
from headwater.util.errors import HeadwaterError
from headwater.util.precision import Precision
from headwater_lab.cli.reproduce import reproduce_table
from headwater_lab.comparison.trials import make_trial
from headwater_lab.data.corpus import DOCS, STDLIB, TOPICS
from headwater_lab.evaluation.tasks import GROUPS, parse_tasks
from headwater_lab.inspection.scalars import Census
from headwater_lab.papers.arms import SizedArm, find_arm, list_references
from headwater_lab.papers.estimate import estimate_cost
from headwater_lab.papers.table import SCALES, Pair, PaperTable, counts_steps, find_table, read_tables
from headwater_lab.papers.work import prepare_work
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import load_recipe, recipes_folder
from headwater_lab.util.machine_speed import find_hardware

NAMES = {
    "skip-layer": {"table-1", "table-2", "table-3"},
    "tokenformer": {f"figure-{n}" for n in (3, 4, 5, 6, 7)}
    | {f"table-{n}" for n in (1, 2, 3, 4, "4-text", 5, "5-text", 6, 7, 9)},
    "value-residual": {"main", "ablation", "scaling", "data", "svformer", "sources", "layers", "learned-weights"}
    | {"weights", "learning-rates", "over-smoothing"},
    "kv-shifting": {f"figure-{n}" for n in ("1a", "1b", 2, 3, 4, "5a", "5b", "5c", 6, "7a", "7b", 8, 9, 10)}
    | {f"table-{n}" for n in (2, 3, 4, 7)}
    | {"theorems"},
}
NAMES["ledger"] = {
    "recommended", "recommended-bigrams",
    "first-values", "start", "previous-tokens", "tables", "after-reading", "stream", "together", "code",
    "parameters", "other-layers", "induction", "recall", "hop", "ngram",
}  # fmt: skip
COMPUTED = {"tokenformer/table-3", "tokenformer/figure-5", "kv-shifting/figure-2", "kv-shifting/theorems"}
TRAINED = [
    (name, scale)
    for name, one in read_tables().items()
    for scale in SCALES
    if one.scales and not one.scales[scale].nothing
]
# A core's FLOP/s in models of width 64, as measured; what two of them do in an hour.
# Tasks whose rows are drawn, and corpora that come with Python.
OFFLINE = {"induction", "ngram", "hop", "recall", "arithmetic", "glyphs"}
PLAIN = {"result", "perplexity", "steps", "easier", "harder", "hardest", "diverged", "saved"}
HELD_OUT = {"loss", "bits_per_byte", "accuracy"}
FACTS = {"parameters", "tokens", "flops", "total_flops", "stage_flops", "tokens_per_second", "cache"}


@functools.cache
def recipes(name: str, scale: str) -> list[tuple[Path, Recipe]]:
    files = [recipes_folder() / path for path in find_table(name).scales[scale].recipes]
    return [(file, load_recipe(file, find_table(name).scales[scale].overrides)) for file in files]


def at(name: str, scale: str, reference: str) -> SizedArm | None:
    """What an arm's name in a table stands for at a scale; None: not trained there."""
    return find_arm(find_table(name), scale, recipes(name, scale), reference)


def arms(name: str, scale: str) -> list[SizedArm]:
    """All the arms that a table names at a scale, where they are trained."""
    table, read = find_table(name), recipes(name, scale)
    return list(filter(None, (find_arm(table, scale, read, reference) for reference in list_references(table))))


def estimated(name: str, scale: str) -> tuple[float, float]:
    return estimate_cost(arms(name, scale), scale)


def test_there_is_a_file_for_each_table_that_reports_an_experiment():
    assert set(read_tables()) == {f"{paper}/{name}" for paper, names in NAMES.items() for name in names}
    assert {name for name, one in read_tables().items() if one.computed} == COMPUTED
    with pytest.raises(HeadwaterError, match="did you mean 'skip-layer/table-1'"):
        find_table("skip-layer/tabel-1")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "scale"), TRAINED)
def test_every_arm_is_in_the_recipes(name, scale):
    used = list_references(find_table(name))
    trained = [reference for reference in used if at(name, scale, reference) is not None]
    assert len(trained) >= 1
    assert set(find_table(name).scales[scale].arms) <= set(used)
    # Something of the table is tested at each scale.
    claims = [find_table(name).model_copy(update={"rows": [], "claims": [claim]}) for claim in find_table(name).claims]
    assert any(all(at(name, scale, arm) for arm in list_references(claim)) for claim in claims)


@pytest.mark.parametrize("name", sorted(set(read_tables()) - COMPUTED))
def test_claims_and_measures(name):
    one = find_table(name)
    assert 1 <= len(one.claims) <= (13 if name.startswith("ledger/") else 8)
    assert all(claim.says.endswith(".") for claim in one.claims)
    assert len({claim.says for claim in one.claims}) == len(one.claims)
    for row in one.rows:
        for column, cell in zip(one.columns, row.cells, strict=True):
            if cell.arm is not None:
                check_measure(one, cell.measure or column.measure)
            assert cell.arm is not None or (cell.minus is None and cell.over is None and cell.measure is None)
    for claim in one.claims:
        of = [measure for *_, measure in claim.pairs] if isinstance(claim, Pair) else []
        for measure in (*of, *filter(None, (getattr(claim, field, None) for field in ("first", "second")))):
            check_measure(one, measure)
    asked = {
        cell.measure or column.measure
        for row in one.rows
        for column, cell in zip(one.columns, row.cells, strict=True)
        if cell.arm is not None
    }
    for scale in SCALES:
        if one.scales[scale].nothing:
            continue
        there = [at(name, scale, arm) for arm in list_references(one)]
        assert not counts_steps(one) or all(one.threshold is not None for one in there if one)
        if any(measure.startswith("task:") for measure in asked):
            assert scale != "cpu"
        for claim in one.claims:
            law = at(name, scale, f"{claim.arm} @ {claim.size}") if claim.test == "gains" else None
            assert law is None or (len(law.recipe.compare.sizes) >= 3 and law.arm != law.recipe.compare.baseline)


@pytest.mark.parametrize("threshold", ["null", "baseline"])
def test_a_table_that_counts_steps_needs_a_number_to_reach(tmp_path, threshold):
    with pytest.raises(HeadwaterError, match=r"counts the steps to compare.threshold, which must be a number"):
        prepare_work("ledger/hop", "cpu", tmp_path, [f"compare.threshold={threshold}"])
    prepare_work("ledger/start", "cpu", tmp_path, [f"compare.threshold={threshold}"])


@pytest.mark.parametrize(
    "name", ["kv-shifting/figure-5c", "kv-shifting/table-4", "skip-layer/table-1", "skip-layer/table-2"]
)
def test_miniatures_that_cannot_show_it_say_why(name):
    scales = find_table(name).scales
    assert scales["cpu"].cannot_show.endswith(".")
    assert not scales["cpu"].remarks
    assert not any(scales[scale].cannot_show for scale in ("gpu", "paper"))


def check_measure(one: PaperTable, measure: str) -> None:
    kind, _, rest = measure.partition(":")
    if kind == "census":
        assert set(rest.split("+")) <= {field.name for field in dataclasses.fields(Census)}
    elif kind == "scalar":
        symbol, _, layers = rest.partition(":")
        first, last = map(int, layers.split("-"))
        assert symbol in {"α1", "α2", "β1", "β2", "λ1", "λ2"}
        assert 0 <= first <= last
    elif kind == "similarity":
        first, last = map(int, rest.split("-"))
        assert 0 <= first <= last
    elif kind == "task":
        task, _, metric = rest.rpartition(":")
        groups = [asked for group in GROUPS for asked in parse_tasks(group)]
        if task in GROUPS:
            assert metric == "mean"
        else:
            (wanted,) = parse_tasks(task)
            assert any((a.name, a.shots) == (wanted.name, wanted.shots) and metric in a.metrics for a in groups)
    else:
        assert measure in PLAIN | HELD_OUT | FACTS
        if measure == "saved":
            assert any(claim.test == "gains" for claim in one.claims)
        if measure == "diverged":
            assert any(claim.test in ("diverges", "stays") for claim in one.claims)


def test_an_unknown_measure_is_noticed():
    for measure in ("lost", "census:keys", "task:mmlu@3:acc", "task:nothing:acc", "scalar:x:1-2"):
        with pytest.raises(AssertionError):
            check_measure(find_table("skip-layer/table-1"), measure)


def number(cell):
    """The paper's figure, if it is one; otherwise its text."""
    with contextlib.suppress(TypeError, ValueError):
        return float(cell.paper)
    return cell.paper


def numbers(name: str) -> list[list]:
    return [[number(cell) for cell in row.cells] for row in find_table(name).rows]


# Typed from the papers' texts by hand, apart from the files.
PRINTED = {
    "skip-layer/table-1": [
        [3.3826, "-"],
        [3.4030, -0.0204],
        [3.2958, 0.0868],
        [3.2853, 0.0973],
        [3.2750, 0.1076],
        [3.3734, 0.0092],
    ],
    "skip-layer/table-2": [[3.3826, "-"], [3.3543, 0.0283], [3.2750, 0.1076], [3.2497, 0.1329], [3.2643, 0.1183]],
    "skip-layer/table-3": [
        [3.1858, 3.1762, 0.0096, -1.69],
        [3.2077, 3.2020, 0.0057, -0.28],
        [3.3826, 3.2497, 0.1329, 0.83],
        [2.9538, 2.9399, 0.0139, -0.76],
        [3.0335, 2.9506, 0.0829, -2.34],
        [2.8271, 2.8156, 0.0115, -1.24],
    ],
    "tokenformer/table-6": [[13.02, 11.99, 11.63], [15.97, 13.78, 13.34], [14.02, 12.59, 11.77]],
    "tokenformer/table-7": [
        ["60B", 16.41, "300B", 17.06],
        ["15B", 14.58, "300B", 13.02],
        ["30B", 14.02, None, None],
        ["60B", 13.59, None, None],
        ["15B", 13.08, "300B", 11.93],
        ["30B", 12.59, None, None],
        ["60B", 12.28, None, None],
        ["15B", 12.14, "300B", 11.63],
        ["30B", 11.77, None, None],
        ["60B", 11.60, None, None],
    ],
    "tokenformer/table-2": [
        [86, 77.9, None],
        [86, 81.8, None],
        [86, 82.3, None],
        [86, 82.1, None],
        [109, 82.5, None],
        [307, 76.5, None],
        [307, 82.6, None],
        [307, 83.0, None],
        [407, 83.1, None],
    ],
    "tokenformer/table-4": [[79.6, None], [81.7, None], [82.5, None], *[[None, None]] * 3],
    "tokenformer/table-4-text": [[79.6], [81.7], [82.5], [None], [None], [None]],
    "tokenformer/table-5": [[82.6, None], [82.5, None], [82.5, None]],
    "tokenformer/table-5-text": [[82.6], [82.5], [82.5]],
    "value-residual/main": [[24.8, 40.6], [24.3, 41.4], [24.0, 40.8], [23.8, 41.3], [23.7, 42.3], [23.2, 42.0]],
    "value-residual/weights": [
        [2.739, None],
        *[[None, None]] * 2,
        [2.7, None],
        *[[None, None]] * 4,
        [2.687, None],
        [None, None],
    ],
    "value-residual/ablation": [[2.739], [2.712], [2.700], [2.687], [2.681], [2.781], [2.742], [2.746], [2.757]],
    "kv-shifting/table-2": [
        [52.92, 52.09, 42.70, 27.45, 25.97, 28.51, 29.43, 0.80, 32.48],
        [52.80, 54.85, 43.68, 28.96, 26.02, 34.77, 30.34, 1.20, 34.08],
        [51.66, 54.06, 44.49, 36.20, 27.90, 38.22, 37.26, 1.80, 36.45],
        [55.44, 53.91, 42.87, 36.74, 30.04, 34.51, 36.20, 2.00, 36.46],
        [51.91, 54.78, 43.83, 36.66, 31.91, 37.24, 34.30, 1.80, 36.55],
        [54.51, 55.33, 44.52, 39.02, 30.89, 40.78, 40.88, 2.60, 38.57],
        [59.93, 48.22, 48.25, 30.34, 24.56, 39.12, 39.22, 1.80, 36.43],
        [58.80, 48.07, 47.78, 31.28, 25.99, 40.80, 39.34, 2.60, 36.83],
        [60.88, 49.01, 47.36, 33.25, 25.78, 42.92, 42.68, 2.60, 38.06],
        [61.93, 48.46, 48.28, 31.25, 25.06, 42.10, 42.87, 2.00, 37.74],
        [60.20, 47.67, 48.16, 32.45, 26.55, 43.38, 40.49, 3.00, 37.74],
        [62.35, 48.38, 48.42, 33.28, 29.32, 42.40, 43.29, 3.20, 38.83],
    ],
    "kv-shifting/table-3": [[30.41, 33.14, 37.26], [32.17, 37.13, 40.88]],
    "kv-shifting/table-4": [[50, 17], [9, 52]],
    "kv-shifting/table-7": [[0.8154, 0.8711], [0.8909, 0.9062]],
}
# Those of the rows that are trained here.
TOKENFORMER_ZERO_SHOT = {
    "150M": [10.45, 16.38, 45.0, 35.5, 64.9, 47.3, 24.9, 50.4, 44.7],
    "450M": [8.28, 7.69, 57.3, 47.5, 69.5, 56.2, 26.7, 54.6, 52.0],
    "900M": [7.38, 5.46, 64.0, 55.3, 72.4, 59.9, 30.6, 56.4, 56.4],
    "1.5B": [6.91, 5.24, 64.7, 60.0, 74.8, 64.8, 32.0, 59.7, 59.3],
}


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_numbers_are_the_papers(name):
    assert numbers(name) == PRINTED[name]


@pytest.mark.parametrize(("name", "rows"), [("tokenformer/table-1", 13), ("tokenformer/table-9", 22)])
def test_zero_shot_numbers_are_the_papers(name, rows):
    one = find_table(name)
    assert len(one.rows) == rows
    ours = {row.cells[0].arm: [number(cell) for cell in row.cells] for row in one.rows if row.cells[0].arm}
    assert ours == TOKENFORMER_ZERO_SHOT


def test_a_difference_is_that_of_its_cells():
    """Abs. Impr. is printed too: the arms it is the difference of are those of the row and the baseline."""
    for name in ("skip-layer/table-1", "skip-layer/table-2", "skip-layer/table-3"):
        paper = {cell.arm: number(cell) for row in find_table(name).rows for cell in row.cells[:2] if not cell.minus}
        for row in find_table(name).rows:
            for cell in row.cells:
                if cell.minus is not None:
                    assert number(cell) == pytest.approx(paper[cell.arm] - paper[cell.minus], abs=1e-4)


def cpu_recipes() -> dict[str, Recipe]:
    return {
        path: recipe
        for name, scale in TRAINED
        if scale == "cpu"
        for path, recipe in zip(
            find_table(name).scales["cpu"].recipes, [recipe for _, recipe in recipes(name, "cpu")], strict=True
        )
    }


def test_cpu_recipes_need_no_network_and_one_thread_a_run():
    for path, recipe in cpu_recipes().items():
        folder, _, file = path.removesuffix(".yaml").partition("/")
        assert recipe.name == f"{folder}-{file}"
        data = [recipe.data.model_dump()] + [
            recipe.data.model_dump() | stage["data"]
            for arm in recipe.compare.arms.values()
            for stage in arm.get("stages", [])
            if "data" in stage
        ]
        for section in data:
            corpus = section.get("source") in (STDLIB, TOPICS, DOCS) and section["tokenizer"] == "bytes"
            assert section["kind"] in OFFLINE or (section["kind"] == "text" and corpus), path
        assert recipe.training.threads == 1
        assert not recipe.reporting.tensorboard
        assert recipe.reporting.save_every is None


def test_each_small_recipe_names_a_table_that_trains_it():
    for folder in ("cpu", "gpu", "ledger"):
        used = {
            path: [name for name, s in TRAINED if path in find_table(name).scales[s].recipes] for path in paths(folder)
        }
        for path, names in used.items():
            if path == "cpu/same.yaml":  # no table's
                continue
            match = re.search(r"# Run: headwater reproduce ([\w./-]+)", (recipes_folder() / path).read_text())
            assert match is not None, path
            assert match[1] in names, path


def paths(folder: str) -> list[str]:
    return sorted(path.relative_to(recipes_folder()).as_posix() for path in (recipes_folder() / folder).glob("*.yaml"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(name for name, scale in TRAINED if scale == "cpu"))
def test_cpu_scale_takes_no_longer_than_its_option_says(name):
    found = estimated(name, "cpu")
    assert found[0] > 1e11
    on_images = name in ("tokenformer/table-2", "tokenformer/table-4", "tokenformer/table-5")
    times = r"minutes to ([\d.]+) hours on two cores"
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    (most,), of_page = re.findall(times, str(reproduce_table.__doc__)), re.findall(times, page)
    assert of_page == [most]
    assert found[1] < (float(most) + 0.05 if name.startswith("ledger/") or on_images else 1.25)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(name for name, scale in TRAINED if scale == "gpu"))
def test_gpu_scale_is_a_day_at_most(name):
    """24 hours of an H100 at an MFU of 0.4, and what the setting says."""
    found = estimated(name, "gpu")
    hours = found[0] / (find_hardware("H100").peak(Precision.BF16_MIXED) * 0.4 * 3600)
    assert found[1] == pytest.approx(hours)
    assert hours <= 24
    setting = find_table(name).scales["gpu"].setting
    if "less than an H100-hour" in setting:
        assert hours < 1
    else:
        match = re.search(r"about (\d+) H100-hours", setting)
        assert match is not None
        assert int(match[1]) == pytest.approx(hours, abs=0.6)
    assert all(recipe.training.devices * recipe.training.nodes == 1 for _, recipe in recipes(name, "gpu"))


def test_arms_of_one_growth_are_alike_in_size():
    """At each size of the growth series a TokenFormer and a Transformer have the same number of parameters, to 5 %."""
    for scale in ("cpu", "gpu"):
        for size in ("354M", "757M", "1.4B"):
            counts = [
                parameters(at("tokenformer/table-6", scale, arm))
                for arm in (f"grown {size} 30B", f"Transformer {size} 300B", f"Transformer {size} 30B")
            ]
            assert max(counts) < 1.05 * min(counts), (scale, size, counts)


def parameters(place: SizedArm) -> int:
    run = place.recipe.arm(place.arm, place.seeds[0], place.size)
    vocabulary = run.model.get("vocab_size") or 257
    config = run.config_for(SimpleNamespace(vocab_size=vocabulary, context=run.row_length, tokenizer=None))
    *_, last = run.configs(config)
    return sum(cost.parameters(last).values())


def test_an_estimate_is_that_of_the_matmuls_of_all_seeds():
    """GPT-2's by hand: 12 L D² weights in its maps, D V in its head, and on average half of the context before it."""
    name = "skip-layer/table-1"
    vanilla = at(name, "cpu", "vanilla")
    layers, width, vocabulary, length, tokens = 12, 64, 257, 128, 400 * 16 * 128
    forward = 2 * (12 * layers * width**2 + vocabulary * width) + 4 * layers * width * (length + 1) / 2
    assert estimate_cost([vanilla], "cpu")[0] == pytest.approx(3 * forward * tokens * 8, rel=1e-3)
    other = at(name, "cpu", "9 layers")
    assert estimate_cost([vanilla, other, vanilla], "cpu")[0] == pytest.approx(
        estimate_cost([vanilla], "cpu")[0] + estimate_cost([other], "cpu")[0]
    )


def test_an_estimate_of_images_is_that_of_their_patches():
    """A vision Transformer's by hand: 16 patches, each of which attends to all, and no rows of tokens."""
    vit = at("tokenformer/table-2", "cpu", "ViT-B/16")
    layers, width, patches, classes, images = 4, 64, 16, 36, 1500 * 64
    block = 12 * width**2 * 2 + 4 * width * patches
    forward = patches * (layers * block + 2 * width * 4 * 4) + 2 * width * classes
    runs = 6 + 4  # seeds, and rates
    assert estimate_cost([vit], "cpu")[0] == pytest.approx(3 * forward * images * runs, rel=1e-3)


def test_matched_image_models_are_alike_in_size():
    """TokenFormer's table 2 compares models with as many parameters; its larger one has a third more."""
    for scale in ("cpu", "gpu", "paper"):
        for size in ("B/16", "L/16"):
            places = [at("tokenformer/table-2", scale, f"{arm}-{size}") for arm in ("ViT", "TokenFormer")]
            matched = at("tokenformer/table-2", scale, f"TokenFormer-{size} matched")
            if matched is None:
                assert (size, places) == ("L/16", [None, None])
                continue
            vit, larger = map(parameters, places)
            assert parameters(matched) == pytest.approx(vit, rel=0.02)
            assert 1.25 * vit < larger < 1.4 * vit


def test_stages_that_arms_share_are_paid_for_once():
    name = "tokenformer/table-6"
    smaller, larger = (at(name, "cpu", f"grown {size} 30B") for size in ("354M", "757M"))
    assert 0 < estimate_cost([smaller], "cpu")[0] < estimate_cost([larger], "cpu")[0]
    assert estimate_cost([smaller, larger], "cpu")[0] == estimate_cost([larger], "cpu")[0]


def test_folders_are_those_of_compare(tmp_path):
    for name, scale in (("kv-shifting/figure-7a", "cpu"), ("value-residual/main", "gpu")):
        for one in arms(name, scale):
            seed = one.seeds[-1]
            assert one.folder(seed, tmp_path) == make_trial(one.recipe, one.arm, seed, tmp_path, one.size).folder
