"""Equal budgets: what is promised of an arm's parameters, tokens and FLOPs is so in the model that is built."""

import pytest
from saved import tiny

from headwater import HeadwaterForCausalLM
from headwater.cost.counts import training_flops
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.budget import TOLERANCE, match_arms
from headwater_lab.comparison.trials import list_trials

ARMS = {
    "base": {},
    "shift": {"model": {"mechanisms": {"kv_shift": {}}}},
    "fewer": {"model": {"mechanisms": {"svformer": {}}}},
    "tokens": {"model": {"mechanisms": {"pattention": {"ffn_pairs": 40}}}},
    "both": {"model": {"mechanisms": {"kv_shift": {}, "pattention": {}}}},
    "deeper": {"model": {"num_hidden_layers": 5}},
    "biased": {"model": {"mlp_bias": True, "feed_forward": "plain"}},
    "longer": {"data": {"length": 40}},
    "batch": {"training": {"batch_size": 8, "gradient_accumulation_steps": 3}},
}
MODEL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 150}
SIZES = {
    "S": {},
    "L": {
        "model": {"hidden_size": 64, "intermediate_size": 300},
        "arms": {"shift": {"training": {"weight_decay": 0.2}}},
    },
}


def comparison(match, arms=ARMS, sizes=None, **changes):
    changes["training"] = {"steps": 300} | changes.get("training", {})
    changes["model"] = MODEL | changes.get("model", {})
    return tiny({"arms": arms, "match": match, "sizes": sizes or {}, "seeds": [0]}, **changes)


def test_a_teacher_costs_a_forward_pass_in_equal_flops(tmp_path):
    made = comparison("flops", {"base": {}})
    config = made.config_for(made.data.build())
    HeadwaterForCausalLM(config).save_pretrained(tmp_path / "teacher")
    distilled = {"training": {"distillation": {"teacher": str(tmp_path / "teacher")}}}
    matched = match_arms(comparison("flops", {"base": {}, "distilled": distilled}))
    assert matched.arm("distilled", 0).training.steps == 225  # 3/4


def built(recipe):
    return sum(p.numel() for p in HeadwaterForCausalLM(recipe.config_for(recipe.data.build())).parameters())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("sizes", [{}, SIZES], ids=["one size", "sizes"])
def test_models_really_have_equal_parameters(tmp_path, sizes, position):
    made = comparison("parameters", sizes=sizes, model={"position": position})
    trials = list_trials(made, tmp_path)
    base = {trial.experiment.size: trial.recipe for trial in trials if trial.experiment.arm == "base"}
    assert len(trials) == len(ARMS) * max(1, len(sizes))
    for trial in trials:
        arm, size = trial.experiment.arm, trial.experiment.size
        wanted, plain = built(base[size]), made.arm(arm, 0, size)
        assert abs(built(trial.recipe) - wanted) <= TOLERANCE * wanted, arm
        assert trial.recipe.training == plain.training
        if arm == "base":
            assert trial.recipe == plain
        if arm == "fewer":
            assert built(plain) < 0.99 * wanted
            assert trial.recipe.model["intermediate_size"] > plain.model["intermediate_size"]
        if arm in ("tokens", "both"):  # parameter tokens have pairs in place of a width
            assert trial.recipe.model.get("intermediate_size") == plain.model["intermediate_size"]
            assert list(trial.recipe.model["mechanisms"]) == list(plain.model["mechanisms"])
        if (arm, size) == ("shift", "L"):
            assert "kv_shift" in trial.recipe.model["mechanisms"]
            assert trial.recipe.training.weight_decay == 0.2


def test_the_width_is_the_nearest_there_is():
    made = match_arms(comparison("parameters", {"base": {}, "shift": ARMS["shift"]}))
    arm = made.arm("shift", 0)
    wanted, width = built(made.arm("base", 0)), arm.model["intermediate_size"]

    def missed(width):
        return abs(built(arm.model_copy(update={"model": arm.model | {"intermediate_size": width}})) - wanted)

    assert missed(width) == min(map(missed, range(width - 3, width + 4)))


@pytest.mark.parametrize("match", ["tokens", "flops"])
@pytest.mark.parametrize("sizes", [{}, SIZES], ids=["one size", "sizes"])
def test_steps_are_the_nearest_to_equal_tokens_and_flops(match, sizes):
    plain = comparison(match, sizes=sizes)
    made = match_arms(plain)

    def step(recipe):
        data = recipe.data.build()
        batch = next(data.batches(0, recipe.training.batch_size, 0))
        tokens = batch["input_ids"].numel() * recipe.training.gradient_accumulation_steps
        return tokens * (training_flops(recipe.config_for(data), data.context) if match == "flops" else 1)

    for size in sizes or [None]:
        base = made.arm("base", 0, size)
        assert base == plain.arm("base", 0, size)
        for arm in ARMS:
            recipe = made.arm(arm, 0, size)
            spent = recipe.training.steps * step(recipe)
            assert abs(spent - 300 * step(base)) <= step(recipe) / 2 * (1 + 1e-9), arm
            assert recipe.model == plain.arm(arm, 0, size).model
    assert made.arm("batch", 0, next(iter(sizes), None)).training.steps == 50
    assert (made.arm("deeper", 0, next(iter(sizes), None)).training.steps < 300) == (match == "flops")


def test_made_equal_twice_is_once():
    once = match_arms(comparison("flops"))
    assert once.compare.match is None
    assert match_arms(once) is once
    assert match_arms(tiny({})) == tiny({})


STAGES = {"stages": [{"name": "more"}]}


@pytest.mark.parametrize(
    ("match", "arms", "changes", "message"),
    [
        ("tokens", {"base": {}, "staged": STAGES}, {}, "'tiny' has stages"),
        ("parameters", {"base": {}, "begun": {"start": {"checkpoint": "x"}}}, {}, "a model to start with"),
        ("parameters", {"base": {}, "wide": {"model": {"hidden_size": 256}}}, {}, "No width .* gives the arm 'wide'"),
        (
            "tokens",
            {"base": {}, "large": {"training": {"batch_size": 4000, "warmup_steps": 3}}},
            {},
            "'large' gets 0 steps, no more than its 3 warm-up",
        ),
        ("flops", {"base": {}, "slow": {"training": {"warmup_steps": 300}}}, {}, "equal FLOPs.* 300 warm-up"),
    ],
)
def test_what_cannot_be_made_equal_is_one_sentence(match, arms, changes, message):
    made = comparison(match, arms, **changes)
    with pytest.raises(HeadwaterError, match=message) as error:
        match_arms(made)
    assert "\n" not in str(error.value)


def test_tokens_are_equal_for_models_that_are_there_already():
    begun = {"start": {"checkpoint": "x"}, "training": {"batch_size": 8}}
    assert match_arms(comparison("tokens", {"base": {}, "begun": begun})).arm("begun", 0).training.steps == 150


def test_data_are_read_once(monkeypatch):
    made, times = comparison("flops", sizes=SIZES), []
    kind = type(made.data)
    build = kind.build
    monkeypatch.setattr(kind, "build", lambda self: times.append(self.length) or build(self))
    match_arms(made)
    assert sorted(times) == [12, 40]
