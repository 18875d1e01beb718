"""The papers' recipes: every arm parses, its tokens and parameters are the paper's, and it trains at a reduced size.

Two steps are trained of each, with everything kept that makes an arm what it is: see `reduced`. Arms that are the same
at the reduced size but for seed, learning rate or budget are trained once.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.config.presets import PRESETS, preset
from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.cost import estimate_model
from headwater.growth import grown_config
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.recipe.recipe_files import load_recipe
from headwater_lab.training.loop import train
from headwater_lab.util.machine_speed import find_hardware

ROOT = Path(__file__).parents[1] / "recipes"
FOLDERS = ("skip-layer", "tokenformer", "value-residual", "kv-shifting")
# Not runs of a paper.
OURS = {"value-residual/plus-init"}
# Recipes with stages have tests of their own below.
STAGED = {"tokenformer/grown", "tokenformer/maxtext-grown"}

# file -> tokens a step, optimiser steps, tokens in all, as the papers say or as their figures multiply out. Written by
# hand; an arm of its own stands under "file: arm".
SKIP_LAYER = (524_288, 18_000, 9_437_184_000)
RESFORMER = (2_097_152, 10_000, 20_971_520_000)
KV_10B = (1_048_576, 9_537, 10_000_269_312)
BUDGETS = {
    "skip-layer/124m-4096": SKIP_LAYER,
    "skip-layer/124m-8192": SKIP_LAYER,
    "skip-layer/124m-16384": SKIP_LAYER,
    "skip-layer/350m-4096": SKIP_LAYER,
    "skip-layer/350m-8192": SKIP_LAYER,
    "skip-layer/774m-4096": SKIP_LAYER,
    "skip-layer/layers": SKIP_LAYER,
    "skip-layer/heads": SKIP_LAYER,
    "tokenformer/124m: TokenFormer 60B": (524_288, 120_000, 62_914_560_000),
    "tokenformer/124m: TokenFormer 300B": (524_288, 600_000, 314_572_800_000),
    "tokenformer/124m: Transformer 300B": (524_288, 600_000, 314_572_800_000),
    "tokenformer/transformers: 354M on 300B": (524_288, 600_000, 314_572_800_000),
    "tokenformer/transformers: 757M on 300B": (524_288, 600_000, 314_572_800_000),
    "tokenformer/transformers: 1.4B on 300B": (524_288, 600_000, 314_572_800_000),
    "tokenformer/transformers: 354M on 30B": (524_288, 60_000, 31_457_280_000),
    "tokenformer/transformers: 757M on 30B": (524_288, 60_000, 31_457_280_000),
    "tokenformer/transformers: 1.4B on 30B": (524_288, 60_000, 31_457_280_000),
    "tokenformer/maxtext-124m": (524_288, 600_000, 314_572_800_000),
    "tokenformer/pile": (2_097_152, 143_000, 299_892_736_000),
    "tokenformer/enwik8": (13_312, 2_204, 29_339_648),
    "value-residual/forms": RESFORMER,
    "value-residual/places": RESFORMER,
    "value-residual/sources": RESFORMER,
    "value-residual/layers": RESFORMER,
    "value-residual/weights": RESFORMER,
    "value-residual/svformer": RESFORMER,
    "kv-shifting/1.5b": KV_10B,
    "kv-shifting/2.9b": (16_777_216, 29_803, 500_011_368_448),
    "kv-shifting/6.7b": KV_10B,
    "kv-shifting/13b": (2_097_152, 4_769, 10_001_317_888),
    "kv-shifting/19b": (3_145_728, 63_579, 200_002_240_512),
    "kv-shifting/19b: QKV shift": (3_145_728, 57_221, 180_001_701_888),
    "kv-shifting/seeds": KV_10B,
    "kv-shifting/learning-rates": KV_10B,
    "kv-shifting/variants": KV_10B,
    "kv-shifting/induction": (2_097_152, 4_000, 8_388_608_000),
    "kv-shifting/induction-narrow": (2_097_152, 4_000, 8_388_608_000),
}
# file -> peak learning rate, schedule, warm-up, where the cosine ends, context; an arm may differ in the first.
SETTINGS = {
    "skip-layer/124m-4096": (1.5e-4, "cosine", 2000, 0.1, 4096),
    "skip-layer/124m-8192": (1.5e-4, "cosine", 2000, 0.1, 8192),
    "skip-layer/124m-16384": (1.5e-4, "cosine", 2000, 0.1, 16384),
    "skip-layer/350m-4096": (1.5e-4, "cosine", 2000, 0.1, 4096),
    "skip-layer/350m-8192": (1.5e-4, "cosine", 2000, 0.1, 8192),
    "skip-layer/774m-4096": (1.5e-4, "cosine", 2000, 0.1, 4096),
    "skip-layer/layers": (1.5e-4, "cosine", 2000, 0.1, 16384),
    "skip-layer/heads": (1.5e-4, "cosine", 2000, 0.1, 16384),
    "tokenformer/124m": (6e-4, "cosine", 2000, 0, 1024),
    "tokenformer/transformers": (6e-4, "cosine", 2000, 0, 1024),
    "tokenformer/maxtext-124m": (6e-4, "cosine", 6000, 0.1, 1024),
    "tokenformer/pile": (6e-4, "cosine", 1430, 0.1, 2048),
    "tokenformer/enwik8": (6e-4, "constant", 0, 0, 1024),
    "value-residual/forms": (6e-4, "cosine", 1200, 0.1, 2048),
    "value-residual/places": (6e-4, "cosine", 1200, 0.1, 2048),
    "value-residual/sources": (6e-4, "cosine", 1200, 0.1, 2048),
    "value-residual/layers": (6e-4, "cosine", 1200, 0.1, 2048),
    "value-residual/weights": (6e-4, "cosine", 1200, 0.1, 2048),
    "value-residual/svformer": (6e-4, "cosine", 1200, 0.1, 2048),
    "kv-shifting/1.5b": (2e-4, "constant", 1000, 0, 2048),
    "kv-shifting/2.9b": (8e-4, "constant", 600, 0, 4096),
    "kv-shifting/6.7b": (2e-4, "constant", 1000, 0, 2048),
    "kv-shifting/13b": (2e-4, "constant", 1000, 0, 2048),
    "kv-shifting/19b": (2e-4, "constant", 3000, 0, 12288),
    "kv-shifting/seeds": (2e-4, "constant", 1000, 0, 2048),
    "kv-shifting/variants": (2e-4, "constant", 1000, 0, 2048),
    "kv-shifting/learning-rates": (None, "constant", 1000, 0, 2048),
    "kv-shifting/induction": (3e-4, "constant", 1000, 0, 512),
    "kv-shifting/induction-narrow": (5e-3, "constant", 1000, 0, 512),
}
# file -> the parameters that the paper prints, of all arms or of those whose names begin so; the least and the most
# millions that they are rounded or cut off from. GPT-2's sizes are those with 1024 positions.
PARAMETERS = {
    "skip-layer/124m-4096": (123.5, 124.5),
    "skip-layer/124m-8192": (123.5, 124.5),
    "skip-layer/124m-16384": (123.5, 124.5),
    "skip-layer/350m-4096": (345, 355),
    "skip-layer/350m-8192": (345, 355),
    "skip-layer/774m-4096": (773.5, 774.5),
    "skip-layer/layers": (123.5, 124.5),
    "skip-layer/heads": (123.5, 124.5),
    "tokenformer/124m": (123.5, 124.5),
    "tokenformer/transformers: 354M": (353.5, 354.5),
    "tokenformer/transformers: 757M": (756.5, 757.5),
    "tokenformer/transformers: 1.4B": (1309, 1312),  # as many as TokenFormer's 1.4B
    "tokenformer/maxtext-124m": (123.5, 124.5),
    "tokenformer/pile: 150M": (150, 155),
    "tokenformer/pile: 450M": (445, 455),
    "tokenformer/pile: 900M": (895, 905),
    "tokenformer/pile: 1.5B": (1500, 1600),
    "tokenformer/enwik8": (753.5, 757.5),
    "value-residual/forms": (79.5, 82.5),
    "value-residual/places": (81.5, 82.5),
    "value-residual/sources": (81.5, 82.5),
    "value-residual/layers": (81.5, 82.5),
    "value-residual/weights": (81.5, 82.5),
    "value-residual/svformer": (78, 82.5),
    "kv-shifting/1.5b": (1500, 1600),
    "kv-shifting/2.9b": (2850, 2950),
    "kv-shifting/6.7b": (6700, 6800),
    "kv-shifting/13b": (12500, 13500),
    "kv-shifting/19b": (18500, 19500),
    "kv-shifting/seeds": (1500, 1600),
    "kv-shifting/learning-rates": (1500, 1600),
    "kv-shifting/variants": (1500, 1600),
}


def residual(mode: str, **options) -> dict:
    return {"value_residual": {"mode": mode} | options}


# file -> arm -> mechanisms, as the papers describe them; files without an entry have the two or three that their arms'
# names say.
V_0 = residual("identity")
MECHANISMS: dict[str, dict[str, dict]] = {
    "skip-layer/layers": {"vanilla": {}, "1 layer": {"skip_layer": {"layers": 1, "heads": 6}}}
    | {f"{n} layers": {"skip_layer": {"layers": n, "heads": 6}} for n in (3, 6, 9, 11)},
    "skip-layer/heads": {"vanilla": {}}
    | {f"{n} heads": {"skip_layer": {"layers": 9, "heads": n}} for n in (3, 6, 9, 12)},
    "value-residual/forms": {
        "vanilla": {},
        "identity": V_0,
        "constant": residual("constant"),
        "sparse": residual("sparse"),
        "learnable": residual("learnable"),
        "learnable-plus": residual("learnable_plus"),
        "dense": residual("dense"),
        "neutreno": {"neutreno": {"weight": 0.4}},
        "identity-neutreno": V_0 | {"neutreno": {"weight": 0.1}},
        "denseformer": {"dense_former": {}},
        "SVFormer": {"svformer": {}},
    },
    "value-residual/places": {
        "vanilla": {},
        "values": V_0,
        "hidden": residual("constant", target="hidden", weight=1.0),
        "query": residual("identity", target="queries"),
        "key": residual("identity", target="keys"),
        "attention": residual("identity", target="probabilities"),
    },
    "value-residual/sources": {
        "vanilla": {},
        "vanilla cut": {},
        "V_0 cut": V_0,
        "V_1 cut": residual("identity", source=1),
    }
    | {f"V_{n}": residual("identity", source=n) for n in range(7)},
    "value-residual/layers": {"vanilla": {}}
    | {f"layer {n}": residual("sparse", layers=[n]) for n in range(1, 8)}
    | {f"layers {n} to 7": residual("sparse", layers=list(range(n, 8))) for n in range(1, 7)},
    "value-residual/weights": {"vanilla": {}}
    | {f"constant {weight}": residual("constant", weight=weight) for weight in (0.5, 1.0, 2.0, 3.0, 5.0)}
    | {f"sparse {weight}": residual("sparse", weight=weight) for weight in (1.0, 2.0, 5.0, 10.0)},
    "value-residual/svformer": {
        "vanilla": {},
        "SVFormer": {"svformer": {}},
        "keys shared": {"svformer": {"share": "keys"}},
        "both shared": {"svformer": {"share": "both"}},
        "GQA 4": {},
        "GQA 2": {},
        "SVFormer + GQA 4": {"svformer": {}},
        "SVFormer + GQA 2": {"svformer": {}},
    },
    "kv-shifting/variants": {
        "vanilla": {},
        "KV shift": {"kv_shift": {}},
        "gate": {"kv_shift": {"variant": "gate"}},
        "clamped": {"kv_shift": {"variant": "clamped"}},
        "keys only": {"kv_shift": {"values": False}},
        "values only": {"kv_shift": {"keys": False}},
        "shift 2": {"kv_shift": {"window": 3}},
        "shift 3": {"kv_shift": {"window": 4}},
    },
}
# Elsewhere: what the beginning or end of an arm's name stands for.
NAMED = {
    "vanilla": {},
    "Transformer": {},
    "SLA": {"skip_layer": {}},
    "KV shift": {"kv_shift": {}},
    "QKV shift": {"kv_shift": {"queries": True}},
    "layer": {},
    "layers": {},
}

NAMES = sorted(
    name
    for folder in FOLDERS
    for path in (ROOT / folder).glob("*.yaml")
    if (name := f"{folder}/{path.stem}") not in OURS | STAGED
)


def trials(name: str) -> dict[str, Recipe]:
    """Arm -> its recipe, with the first seed; a recipe without a comparison has one arm, without a name."""
    recipe = load_recipe(ROOT / f"{name}.yaml")
    if recipe.compare is None:
        return {"": recipe}
    return {arm: recipe.arm(arm, recipe.compare.seeds[0]) for arm in recipe.compare.arms}


LOADED = {name: trials(name) for name in NAMES}


def context(recipe: Recipe) -> int:
    return recipe.data.length if recipe.data.kind == "induction" else recipe.data.context


def tokens_a_step(recipe: Recipe) -> int:
    return recipe.training.batch_size * recipe.training.gradient_accumulation_steps * context(recipe)


def config(recipe: Recipe) -> HeadwaterConfig:
    """The model at full size; its data are not read."""
    size = recipe.model.get("vocab_size") or recipe.data.vocab_size
    return recipe.config_for(SimpleNamespace(vocab_size=size, context=context(recipe), tokenizer=None))


def of(table: dict, name: str, arm: str):
    """The entry for an arm: its own, one whose name it begins with, or the file's."""
    own = [key for key in table if key.startswith(f"{name}: ") and arm.startswith(key.removeprefix(f"{name}: "))]
    return table[max(own, key=len) if own else name]


def mechanisms(recipe: Recipe) -> dict:
    """As the recipe gives them, or its preset."""
    options = PRESETS[base].fields if (base := recipe.model.get("base")) in PRESETS else {}
    return (options | recipe.model).get("mechanisms") or {}


def fewer(pairs: int | list[int]) -> int | list[int]:
    return [max(2, n // 96) for n in pairs] if isinstance(pairs, list) else max(2, pairs // 96)


def reduced(recipe: Recipe, corpus: Path) -> Recipe:
    """The recipe at a size that trains in a moment.

    Changed are: width (8 a head), heads (those up to 12 stay; more become the least with the same number of query heads
    a key/value head, 4 or more), depth (up to 12 stays, so that n_l and receiving layers do; more becomes 4),
    feed-forward width, pairs (a 96th), vocabulary, context, rows, forward passes a step (2 at most), steps, and the
    data, which are bytes of a small text, in rows of the same kind, or short induction sequences. Everything else
    stays: mechanisms and their options, position, norms, biases, tying, activation, optimiser, learning rate, schedule.
    What belongs to hardware is set to this machine's: one device, fp32, not compiled. Warm-up becomes one step.
    """
    values = recipe.model_dump(mode="json", exclude={"compare"})
    values["start"] = None  # the trained model it would begin with is not here
    full = config(recipe)
    group = full.num_attention_heads // full.num_key_value_heads
    heads = full.num_attention_heads if full.num_attention_heads <= 12 else max(4, group)
    smaller = {
        name: {option: fewer(value) if option.endswith("_pairs") else value for option, value in options.items()}
        for name, options in mechanisms(recipe).items()
    }
    values["model"] |= dict(
        hidden_size=8 * heads,
        num_attention_heads=heads,
        num_key_value_heads=heads // group,
        num_hidden_layers=full.num_hidden_layers if full.num_hidden_layers <= 12 else 4,
        intermediate_size=16 * heads,
        mechanisms=smaller,
    )
    for name in ("vocab_size", "max_position_embeddings"):
        values["model"].pop(name, None)
    if recipe.data.kind == "induction":
        values["data"] |= dict(vocab_size=16, length=32, held_out=4)
    else:
        text = dict(kind="text", source=str(corpus), tokenizer="bytes", context=32, held_out_bytes=400)
        values["data"] = text | dict(row_layout=recipe.data.row_layout)
    values["training"] |= dict(
        steps=2,
        batch_size=2,
        gradient_accumulation_steps=min(recipe.training.gradient_accumulation_steps, 2),
        warmup_steps=min(recipe.training.warmup_steps, 1),
        precision="32-true",
        compile=False,
        strategy="auto",
        devices=1,
        nodes=1,
        device="cpu",
        threads=1,
    )
    values["reporting"] |= dict(log_every=1, evaluate_every=None, save_every=None, tensorboard=False)
    return parse(values, "reduced")


def what_runs(recipe: Recipe) -> str:
    """What decides which code an arm runs; arms equal in it need not be trained twice."""
    training = recipe.training
    values = reduced(recipe, Path("corpus")).model_dump(mode="json", exclude={"name", "title", "seed", "compare"})
    values["training"].pop("learning_rate")
    values["model"].pop("base", None)
    return json.dumps([values, training.gradient_checkpointing], sort_keys=True, default=str)


def to_train() -> list:
    seen: set[str] = set()
    found = []
    for name in NAMES:
        for arm, recipe in LOADED[name].items():
            fields = PRESETS[recipe.model["base"]].fields if recipe.model.get("base") in PRESETS else {}
            key = what_runs(recipe) + json.dumps(fields, sort_keys=True, default=str)
            if key in seen:
                continue
            seen.add(key)
            found.append(pytest.param(name, arm, id=f"{name}: {arm}" if arm else name))
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(1200)))
    return path


def test_every_recipe_of_a_paper_has_its_figures_here():
    for table in (BUDGETS, SETTINGS):
        assert {key.partition(": ")[0] for key in table} == set(NAMES)
    without = {"kv-shifting/induction", "kv-shifting/induction-narrow"}
    assert {key.partition(": ")[0] for key in PARAMETERS} == set(NAMES) - without
    for table in (BUDGETS, PARAMETERS):
        for key in table:
            name, _, arm = key.partition(": ")
            assert any(each.startswith(arm) for each in LOADED[name]), key


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_papers(name):
    for arm, recipe in LOADED[name].items():
        a_step, steps, total = of(BUDGETS, name, arm)
        assert (tokens_a_step(recipe), recipe.training.steps) == (a_step, steps), arm
        assert a_step * steps == total
        assert recipe.training.batch_size % (recipe.training.devices * recipe.training.nodes) == 0, arm


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_papers(name):
    for arm, recipe in LOADED[name].items():
        training = recipe.training
        rate, *rest = SETTINGS[name]
        expected = float(arm.rpartition(" at ")[2]) if rate is None else rate
        assert math.isclose(training.learning_rate, expected), arm
        schedule = [training.schedule, training.warmup_steps, training.min_learning_rate_ratio]
        assert [*schedule, context(recipe)] == rest, arm
        assert (training.betas, training.weight_decay, training.max_grad_norm) == ((0.9, 0.95), 0.1, 1.0), arm
        assert training.optimizer == "adamw", arm


@pytest.mark.parametrize("name", [name for name in NAMES if "induction" not in name])
def test_parameters_are_the_papers(name):
    for arm, recipe in LOADED[name].items():
        full = config(recipe)
        count = sum(cost.parameters(full).values())
        if full.position == "learned":
            count -= (full.max_position_embeddings - 1024) * full.hidden_size
        skip = (full.mechanisms or {}).get("skip_layer")
        if skip is not None:  # plus the maps and biases of the keys and values that nobody reads
            depth, heads = full.num_hidden_layers, full.num_attention_heads
            distance = depth * 3 // 4 if skip["layers"] is None else skip["layers"]
            skipping = heads * 3 // 4 if skip["heads"] is None else skip["heads"]
            unread = sum(layer >= distance and layer + distance >= depth for layer in range(depth))
            count += 2 * unread * skipping * full.head_dim * (full.hidden_size + 1)
        least, most = of(PARAMETERS, name, arm)
        assert least <= count / 1e6 <= most, arm


@pytest.mark.parametrize("name", NAMES)
def test_mechanisms_are_the_papers(name):
    for arm, recipe in LOADED[name].items():
        options = mechanisms(recipe)
        if name in MECHANISMS:
            assert options == MECHANISMS[name][arm], arm
        elif name.startswith("tokenformer/") and not arm.startswith("Transformer") and "transformers" not in name:
            assert list(options) == ["pattention"], arm
        elif name.startswith("tokenformer/"):
            assert options == {}, arm
        else:
            words = [word for word in NAMED if re.search(rf"(^|[ +]){word}( at |$)", arm)]
            assert options == NAMED[words[-1]], arm
    assert name not in MECHANISMS or set(MECHANISMS[name]) == set(LOADED[name])


@pytest.mark.parametrize(
    ("name", "arm", "fields"),
    [
        ("value-residual/sources", "V_1 cut", {"first_residual": False}),
        ("value-residual/sources", "vanilla cut", {"first_residual": False}),
        ("value-residual/svformer", "SVFormer + GQA 2", {"num_key_value_heads": 2}),
        ("value-residual/svformer", "GQA 4", {"num_key_value_heads": 4}),
        ("kv-shifting/induction", "4 layers", {"num_hidden_layers": 4, "hidden_size": 1024}),
        ("kv-shifting/induction-narrow", "2 layers + KV shift", {"num_hidden_layers": 2, "hidden_size": 8}),
        ("kv-shifting/19b", "QKV shift", {"num_key_value_heads": 4, "max_position_embeddings": 12288}),
        ("tokenformer/transformers", "757M on 30B", {"hidden_size": 1536, "num_hidden_layers": 24, "position": "rope"}),
        ("tokenformer/enwik8", "Transformer", {"hidden_size": 1536, "rotary_dim": 16, "tie_word_embeddings": True}),
        ("tokenformer/maxtext-124m", "TokenFormer", {"position": "none", "embedding_range": 1.0}),
        ("tokenformer/maxtext-124m", "Transformer", {"position": "none", "hidden_act": "silu", "mlp_bias": True}),
        ("skip-layer/774m-4096", "SLA", {"hidden_size": 1280, "num_hidden_layers": 36, "qkv_bias": True}),
    ],
)
def test_shapes_are_the_papers(name, arm, fields):
    full = config(LOADED[name][arm])
    assert {field: getattr(full, field) for field in fields} == fields


def test_induction_models_have_twenty_million_parameters_beside_the_embeddings():
    for recipe in LOADED["kv-shifting/induction"].values():
        parts = cost.parameters(config(recipe))
        rest = sum(parts.values()) - parts["embedding"] - parts["output head"]
        assert 19.5e6 < rest < 20.5e6


def cost_line(name: str) -> str:
    """The second line of a recipe's head."""
    return (ROOT / f"{name}.yaml").read_text().splitlines()[1]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", NAMES)
def test_the_cost_in_the_head_is_what_plan_says(name):
    recipe = load_recipe(ROOT / f"{name}.yaml")
    seeds = len(recipe.compare.seeds) if recipe.compare else 1
    flops = hours = 0.0
    for trial in LOADED[name].values():
        tokens = tokens_a_step(trial) * trial.training.steps
        one = estimate_model(
            config(trial),
            context=context(trial),
            tokens=tokens,
            hardware=find_hardware("H100"),
            precision=trial.training.precision,
        ).at[0]
        assert one.limits is not None
        flops += seeds * one.training * tokens
        hours += seeds * one.limits.device_hours
    found = re.fullmatch(r"# Costs (\S+) FLOPs, ([\d. ]+) H100-hours at an MFU of 0.4.", cost_line(name))
    assert found is not None
    assert float(found[1]) == pytest.approx(flops, rel=0.01)
    assert float(found[2].replace(" ", "")) == pytest.approx(hours, rel=0.05)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_pass_fit_devices_of_80_gb(name):
    for arm, recipe in LOADED[name].items():
        training, full = recipe.training, config(recipe)
        devices = training.devices * training.nodes
        rows = training.batch_size // devices
        state = sum(cost.state_bytes(full, training.precision).values())
        kept = cost.activation_bytes(full, context(recipe), rows, training.precision, training.gradient_checkpointing)
        assert state / (devices if training.strategy == "fsdp" else 1) + sum(kept.values()) < 0.9 * 80e9, arm


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "arm"), [(name, arm) for name in NAMES for arm in LOADED[name]])
def test_reduction_keeps_what_makes_the_arm(name, arm, corpus):
    recipe = LOADED[name][arm]
    small = reduced(recipe, corpus)
    before, after = config(recipe), small.config_for(SimpleNamespace(vocab_size=257, context=32, tokenizer=None))
    sizes = {"hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size"}
    sizes |= {"head_dim", "vocab_size", "max_position_embeddings", "mechanisms", "layer_types", "logit_scale"}
    for field in HeadwaterConfig.__annotations__:
        assert field in sizes or getattr(after, field) == getattr(before, field), field
    assert after.num_attention_heads // after.num_key_value_heads == before.num_attention_heads // (
        before.num_key_value_heads
    )
    assert list(after.mechanisms) == list(before.mechanisms)
    for mechanism, options in before.mechanisms.items():
        for option, value in options.items():
            assert option.endswith("_pairs") or after.mechanisms[mechanism][option] == value
    for field in (
        "learning_rate",
        "schedule",
        "min_learning_rate_ratio",
        "betas",
        "epsilon",
        "weight_decay",
        "max_grad_norm",
    ):
        assert getattr(small.training, field) == getattr(recipe.training, field)
    assert small.training.optimizer == recipe.training.optimizer
    assert small.training.gradient_checkpointing == recipe.training.gradient_checkpointing
    assert recipe.data.kind == "induction" or small.data.row_layout == recipe.data.row_layout


@pytest.mark.sampled(19)
@pytest.mark.parametrize(("name", "arm"), to_train())
def test_two_steps_train(name, arm, corpus, tmp_path):
    recipe = reduced(LOADED[name][arm], corpus)
    record = train(recipe, tmp_path / "run")
    assert record.status == "finished"
    assert record.tokens == 2 * tokens_a_step(recipe)
    assert [point.step for point in record.curve] == [1, 2]
    assert all(math.isfinite(point.loss) and point.gradient_norm > 0 for point in record.curve)
    assert record.curve[-1].learning_rate > 0
    assert all(math.isfinite(value) for value in record.held_out[-1].metrics.values())
    saved = json.loads(next((tmp_path / "run").rglob("config.json")).read_text())
    assert list(saved["mechanisms"] or {}) == list(mechanisms(LOADED[name][arm]))
    built = recipe.config_for(SimpleNamespace(vocab_size=saved["vocab_size"], context=32, tokenizer=None))
    assert record.parameters == sum(cost.parameters(built).values())


@pytest.mark.parametrize(
    ("file", "series", "steps", "warmup", "growth"),
    [
        ("grown", "tokenformer-", 60_000, (2000, 2000), ("zero", "keep")),
        ("maxtext-grown", "tokenformer-maxtext-", 120_000, (6000, 1200), ("random", "recompute")),
    ],
)
def test_the_growth_series_is_the_papers(file, series, steps, warmup, growth):
    recipe = load_recipe(ROOT / f"tokenformer/{file}.yaml")
    runs = dict(zip(["124m", "354m", "757m", "1.4b"], recipe.chain(lambda name, _: Path(name)), strict=True))
    assert [stage.name for stage in recipe.stages] == list(runs)[1:]
    for name, (run, _) in runs.items():
        assert tokens_a_step(run) == 524_288
        assert run.training.steps == (600_000 if name == "124m" else steps)
        assert run.training.learning_rate == 6e-4
        assert run.training.warmup_steps == warmup[name != "124m"]
        pairs = PRESETS[f"{series}{name}"].fields["mechanisms"]["pattention"]
        if run.start is None:
            options = config(run).mechanisms["pattention"]
            assert {option: options[option] for option in pairs} == pairs
        else:
            grow = run.start.grow
            assert (grow.attention_pairs, grow.ffn_pairs) == (pairs["attention_pairs"], pairs["ffn_pairs"])
            assert (grow.key_init, grow.tau) == growth
    first = config(runs["124m"][0])
    for name, (run, _) in list(runs.items())[1:]:
        first = grown_config(first, run.start.grow.attention_pairs, run.start.grow.ffn_pairs)
        assert cost.parameters(first) == cost.parameters(preset(f"{series}{name}"))
    flops = [
        cost.training_flops(preset(f"{series}{name}"), 1024) * tokens_a_step(run) * run.training.steps
        for name, (run, _) in runs.items()
    ]
    match = re.match(r"# Costs (\S+) \+ (\S+) \+ (\S+) \+ (\S+) FLOPs", cost_line(f"tokenformer/{file}"))
    assert match is not None
    assert [float(number) for number in match.groups()] == pytest.approx(flops, rel=0.01)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Sixteen images of two classes, laid out as ImageNet-1k."""
    pytest.importorskip("torchvision")
    from PIL import Image

    root = tmp_path_factory.mktemp("imagenet")
    for split, count in (("train", 8), ("val", 2)):
        for label, name in enumerate(("n01440764", "n01443537")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40 + i, 36), (20 * i, 200 * label, 90)).save(root / split / name / f"{name}_{i}.JPEG")
    return root


IMAGE_ARMS = {
    "imagenet-b16": (93_836, {"ViT-B/16": 86.6, "TokenFormer-B/16 matched": 86.4, "TokenFormer-B/16": 114.8}),
    "imagenet-l16": (62_557, {"ViT-L/16": 304.3, "TokenFormer-L/16 matched": 304.0, "TokenFormer-L/16": 404.7}),
}


@pytest.mark.parametrize("name", IMAGE_ARMS)
def test_recipes_of_images_are_the_papers(name):
    recipe = load_recipe(ROOT / "vision" / f"{name}.yaml")
    steps, millions = IMAGE_ARMS[name]
    epochs = {"imagenet-b16": 300, "imagenet-l16": 200}[name]
    for arm, wanted in millions.items():
        own = recipe.arm(arm, 0)
        training = own.training
        batch = training.batch_size * training.gradient_accumulation_steps
        assert (batch, training.steps) == (4096, steps)
        assert math.ceil(epochs * 1_281_167 / batch) in (steps, steps + 1)
        assert round(20 * 1_281_167 / batch) == training.warmup_steps
        assert training.learning_rate == pytest.approx(1e-4 * batch / 256)
        assert (training.weight_decay, training.betas, training.ema_decay) == (0.3, (0.9, 0.95), 0.9999)
        assert training.label_smoothing == 0.1
        augmentation = own.data.augmentation
        assert (augmentation.rand_augment, augmentation.mixup, augmentation.cutmix) == ((9, 0.5), 0.8, 1.0)
        config = own.config_for(SimpleNamespace(classes=[], vocab_size=1000, tokenizer=None))
        assert (config.image_size, config.num_labels) == (224, 1000)
        assert config.drop_path == {"imagenet-b16": 0.1, "imagenet-l16": 0.2}[name]
        assert sum(cost.parameters(config).values()) / 1e6 == pytest.approx(wanted, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arm"), [(name, arm) for name, (_, arms) in IMAGE_ARMS.items() for arm in arms])
def test_two_steps_of_each_arm_on_images(name, arm, imagenet, tmp_path):
    recipe = load_recipe(ROOT / "vision" / f"{name}.yaml").arm(arm, 0)
    values = recipe.model_dump(mode="json")
    mechanisms = {
        name: {"attention_pairs": 16, "ffn_pairs": 32}
        for name in recipe.config_for(SimpleNamespace(classes=[], vocab_size=1000, tokenizer=None)).mechanisms
    }
    values["data"] |= {"source": str(imagenet), "image_size": 32, "workers": 1}
    values["model"] |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mechanisms": mechanisms}
    values["model"] |= {"intermediate_size": 32}
    values["training"] |= {"steps": 2, "warmup_steps": 1, "batch_size": 4, "devices": 1, "compile": False}
    values["training"] |= {"precision": "32-true"}
    values["reporting"] |= {"tensorboard": False}
    record = train(parse(values, arm), tmp_path / "run")
    assert record.status == "finished"
    assert record.skipped_steps == 0
    assert record.data["classes"] == 2
