"""What a search will cost, said before it starts, against what it does."""

import pytest

from headwater.compare import compare, jobs_of
from headwater.compare.tuning import _ask
from headwater.recipe import Halving, parse
from headwater.reproduce.price import budget, halving_rungs

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


@pytest.mark.parametrize("arms", [2, 3, 5, 8, 9, 10, 27, 31])
@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("first", [None, 10])
def test_rungs_are_those_that_halving_asks_for(arms, factor, first):
    if arms < factor:
        pytest.skip("nothing is given up")
    names, known, steps = [f"{i:02}" for i in range(arms)], {}, 300
    while missing := _ask(names, [0], steps, Halving(factor=factor, steps=first), known):
        now = min(rung for *_, rung in missing)
        known |= {one: -float(one[0]) for one in missing if one[-1] == now}
    highest = max(rung for *_, rung in known)
    furthest = [max(rung for name, _, rung in known if name == arm) for arm in names]
    # Who gets to the last rung goes to the end.
    real = sorted((steps if rung == highest else rung for rung in furthest), reverse=True)
    assert halving_rungs(arms, factor, first, steps) == real


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
