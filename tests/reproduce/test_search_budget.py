"""What a search will cost, said before it starts, against what it does."""

import pytest

from headwater.compare import compare, jobs_of
from headwater.compare.tuning import rungs
from headwater.papers.price import budget, halving_rungs
from headwater.recipe import parse

TINY = {
    "name": "tiny",
    "data": {"kind": "induction", "held_out": 4, "length": 8, "vocabulary": 8},
    "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"steps": 9, "batch_size": 2, "accumulate": 3},
    "compare": {
        "arms": {"a": {}, "b": {"model": {"mechanisms": {"kv_shift": {}}}}, "c": {"training": {"batch_size": 4}}},
        "baseline": "a",
        "seeds": [0, 1],
    },
}


# As scikit-learn's HalvingGridSearchCV has them: steps of a rung, arms that get there.
RUNGS = [
    ((2, 2, None, 300), [(150, 2), (300, 1)]),
    ((3, 3, 10, 300), [(10, 3), (30, 1)]),
    ((5, 2, None, 61), [(15, 5), (30, 3), (60, 2)]),
    ((8, 3, 7, 12), [(7, 8)]),
    ((10, 3, None, 300), [(33, 10), (99, 4), (297, 2)]),
    ((27, 3, None, 300), [(11, 27), (33, 9), (99, 3), (297, 1)]),
    ((27, 3, 1, 12), [(1, 27), (3, 9), (9, 3)]),
    ((31, 2, 10, 300), [(10, 31), (20, 16), (40, 8), (80, 4), (160, 2)]),
]


@pytest.mark.parametrize(("settings", "ladder"), RUNGS, ids=str)
def test_rungs_are_those_of_successive_halving(settings, ladder):
    assert rungs(*settings) == ladder
    # Who gets to the last rung goes to the end.
    last, whole = ladder[-1][0], settings[-1]
    reached = [max(steps for steps, count in ladder if arm < count) for arm in range(settings[0])]
    assert halving_rungs(*settings) == [whole if steps == last else steps for steps in reached]


def test_without_halving_it_is_what_the_jobs_are(tmp_path):
    recipe = parse(TINY, "test")
    cost = budget(recipe, workers=2)
    jobs = jobs_of(recipe, tmp_path)
    assert cost.runs == len(jobs) == 6
    assert cost.tokens == sum(
        job.recipe.training.steps * job.recipe.training.batch_size * job.recipe.training.accumulate * 8 for job in jobs
    )
    tuned = parse(TINY | {"compare": TINY["compare"] | {"learning_rates": [1e-3, 1e-2]}}, "test")
    assert budget(tuned).runs == len(jobs_of(tuned, tmp_path)) == 12
    assert budget(recipe, finalists=(2, 4)).runs == 6 + 3 * 4
    assert budget(recipe, workers=1).hours == pytest.approx(2 * cost.hours)


@pytest.mark.slow
def test_flops_are_those_of_the_records(tmp_path, forked_workers):
    recipe = parse(TINY | {"reporting": {"tensorboard": False}}, "test")
    records = [outcome.record for outcome in compare(recipe, tmp_path, workers=1)]
    assert budget(recipe).flops == pytest.approx(sum(record.flops for record in records))
