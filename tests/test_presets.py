"""Presets are the papers' models, in size and in what their layers read."""

import functools
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from headwater import (
    HeadwaterConfig,
    HeadwaterError,
    HeadwaterForCausalLM,
    HeadwaterForImageClassification,
    HeadwaterVisionConfig,
)
from headwater.config.plan import Stage
from headwater.config.planner import plan_layers
from headwater.config.presets import PRESETS, preset
from headwater.cost.counts import parameters
from headwater.mechanisms import Mechanism
from headwater_lab.recipe.model_section import MODEL_FIELDS
from headwater_lab.recipe.overrides import read_yaml
from headwater_lab.training.initialization import measure_initialization, sample_tokens

ROOT = Path(__file__).parents[1]

GPT2 = ["gpt2-124m", "gpt2-medium-350m", "gpt2-large-774m"]
KV_SHIFTING = [f"kv-shifting-{size}" for size in ("1.5b", "2.9b", "6.7b", "13b", "19b")]
RESFORMER = (
    ["resformer-82m", "svformer-82m"]
    + [f"resformer-82m-{form}" for form in ("vanilla", "identity", "constant", "sparse", "learnable-plus", "dense")]
    + [f"resformer-82m-{form}" for form in ("neutreno", "identity-neutreno", "denseformer")]
    + [f"resformer-82m-{place}" for place in ("query", "key", "attention", "hidden")]
)
GROWTH = ("124m", "354m", "757m", "1.4b")
TOKENFORMER = [f"tokenformer-{size}" for size in (*GROWTH, "150m", "450m", "900m", "1.5b")]
MAXTEXT = [f"tokenformer-maxtext-{size}" for size in GROWTH]
MAXTEXT_BASELINE = "tokenformer-maxtext-124m-vanilla"
VIT = ["vit-b-16", "vit-l-16"]
RELEASED = [f"llama-canon-{size}" for size in ("1b", "3b", "8b")]
RELEASED += ["muddformer-2.8b", *(f"nanochat-d{depth}" for depth in (12, 20, 26))]
OWN = ["headwater-base", "headwater-base-vanilla"]
VISION = [*VIT, *(f"tokenformer-{name}{ending}" for name in VIT for ending in ("", "-matched"))]
NAMES = [
    *GPT2,
    *(f"{name}-sla" for name in GPT2),
    *KV_SHIFTING,
    *(f"{name}-vanilla" for name in KV_SHIFTING),
    "kv-shifting-19b-qkv",
    *RESFORMER,
    *TOKENFORMER,
    *MAXTEXT,
    MAXTEXT_BASELINE,
    *VISION,
    *RELEASED,
    *OWN,
]

# Where the paper's figure is not met: what comes out in its digits, and why.
CUT_OFF = "the paper's figure is cut off, not rounded"
TWO_DIGITS = "the paper's figure is rounded to two digits"
UNREAD = "the paper's figure is the baseline's; keys and values that no head attends to are not built"
TABLE = "the pairs of the paper's Table 8 do not give its figure"
EXCEPTIONS = {
    "gpt2-medium-350m": ("355M", "nanoGPT's round figure"),
    "gpt2-medium-350m-sla": ("345M", UNREAD),
    "gpt2-124m-sla": ("122M", UNREAD),
    "gpt2-large-774m-sla": ("752M", UNREAD),
    "kv-shifting-1.5b": ("1.6B", CUT_OFF),
    "kv-shifting-1.5b-vanilla": ("1.6B", CUT_OFF),
    "kv-shifting-6.7b": ("6.8B", CUT_OFF),
    "kv-shifting-6.7b-vanilla": ("6.8B", CUT_OFF),
    "svformer-82m": ("80M", "the paper's figure is the baseline's; values are projected once"),
    "tokenformer-757m": ("754M", TABLE),
    "tokenformer-1.4b": ("1.3B", TABLE),
    "tokenformer-maxtext-757m": ("754M", TABLE),
    "tokenformer-maxtext-1.4b": ("1.3B", TABLE),
    "tokenformer-150m": ("152M", TWO_DIGITS),
    "tokenformer-450m": ("454M", TWO_DIGITS),
    "tokenformer-900m": ("903M", TWO_DIGITS),
    "tokenformer-1.5b": ("1.6B", CUT_OFF),
    "vit-b-16": ("87M", CUT_OFF),
    "vit-l-16": ("304M", "the figure of the paper that introduced it is more than its sizes give"),
    "tokenformer-vit-b-16": ("115M", TABLE),
    "tokenformer-vit-l-16": ("405M", "the paper adds to the figure above"),
    "tokenformer-vit-l-16-matched": ("304M", "the figure of the model it is matched to"),
}


@functools.cache
def built(name: str) -> HeadwaterForCausalLM:
    """A preset's modules without memory.

    Starts are left out: `torch.normal` takes no device, and would draw a TokenFormer's billions of numbers on the CPU.
    """
    with torch.device("meta"), patch.object(Mechanism, "reset_parameters"):
        return (HeadwaterForImageClassification if name in VISION else HeadwaterForCausalLM)(preset(name))


def count(name: str) -> int:
    """Parameters of a preset, tied ones once."""
    return sum(parameter.numel() for parameter in built(name).parameters())


def printed(number: int, figure: str) -> str:
    """`number` in the unit and with the decimals of a printed figure such as 1.56B."""
    decimals = len(figure[:-1].partition(".")[2])
    return f"{number / {'M': 1e6, 'B': 1e9}[figure[-1]]:.{decimals}f}{figure[-1]}"


def test_every_model_of_the_papers_has_its_name():
    assert sorted(PRESETS) == sorted(NAMES)


def test_headwater_base_is_what_the_ledger_tested():
    """Mechanisms and start are those of the recipe; only the size is larger."""
    recipe = ROOT / "recipes" / "recommended" / "test.yaml"
    options = read_yaml(recipe.read_text(), recipe.name)
    arm = options["compare"]["arms"]["recommended"]["model"]["mechanisms"]
    heads = dict(num_attention_heads=2, num_key_value_heads=2)
    sizes = dict(num_hidden_layers=4, hidden_size=64, intermediate_size=96, **heads)
    common = {field: value for field, value in options["model"].items() if field not in sizes}
    for name, mechanisms in zip(OWN, (arm, {}), strict=True):
        tested = HeadwaterConfig(vocab_size=257, **common, **sizes, mechanisms=mechanisms).to_dict()
        assert preset(name, vocab_size=257, **sizes).to_dict() == tested


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [name for name in NAMES if PRESETS[name].reported])
def test_parameters_are_those_the_paper_prints(name):
    figure = PRESETS[name].reported
    expected, _reason = EXCEPTIONS.get(name, (figure, ""))
    assert printed(count(name), figure) == expected
    if name in EXCEPTIONS:
        assert expected != figure, "no exception any more"
        assert PRESETS[name].note


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_counts_the_real_model(name):
    assert sum(parameters(preset(name)).values()) == count(name)


@pytest.mark.slow
def test_counts_that_no_paper_prints():
    # By hand: layers · (attention + feed-forward + biases and norms) + embeddings + final norm.
    block = 4 * 768 * 768 + 2 * 768 * 3072 + (4 + 4 + 1) * 768 + 4 * 768
    assert count("gpt2-124m") == 12 * block + (50304 + 1024) * 768 + 2 * 768
    scalars = {"": 14, "-learnable-plus": 7 + 8, "-dense": sum(range(2, 9)), "-denseformer": sum(range(2, 10))}
    for variant, more in scalars.items():
        assert count(f"resformer-82m{variant}") - count("resformer-82m-vanilla") == more
    assert count("resformer-82m-vanilla") - count("svformer-82m") == 7 * 512 * 512
    for name, heads in zip(KV_SHIFTING, (28 * 16, 32 * 4, 32 * 32, 40 * 40, 48 * 4), strict=True):
        assert count(name) - count(f"{name}-vanilla") == 4 * heads
    assert count("kv-shifting-19b-qkv") - count("kv-shifting-19b") == 2 * 48 * 48
    assert count(MAXTEXT_BASELINE) == 12 * block + 50304 * 768 + 2 * 768
    assert [count(name) for name in MAXTEXT] == [count(name) for name in TOKENFORMER[:4]]


@pytest.mark.parametrize(
    ("size", "depth", "width", "matched"), [("b-16", 12, 768, (576, 2304)), ("l-16", 24, 1024, (768, 3072))]
)
def test_image_models_by_hand(size, depth, width, matched):
    # The patch embedding, the class token, a position for each of 14 · 14 + 1 tokens, the classifier, the last norm.
    rest = (3 * 16 * 16 + 1) * width + width + 197 * width + 1000 * (width + 1) + 2 * width
    assert count(f"vit-{size}") == rest + depth * (12 * width * width + (4 + 4 + 1 + 4) * width)
    for ending, (attention, inner) in {"": (width, 4 * width), "-matched": matched}.items():
        assert count(f"tokenformer-vit-{size}{ending}") == rest + depth * 2 * width * (4 * attention + inner)


@pytest.mark.parametrize("name", [name for name in VISION if name not in VIT])
def test_tokenformer_of_images_is_as_published(name):
    model = built(name)
    config, block = model.config, model.model.layers[0]
    assert not list(block.input_layernorm.parameters())
    assert [n for n, _ in model.model.named_parameters() if n.endswith("bias")] == ["embed_patches.bias", "norm.bias"]
    assert (config.image_shape, config.patch_shape, config.num_labels) == ((224, 224), (16, 16), 1000)
    assert config.mechanisms["pattention"]["score"] == "l2_norm_gelu"


@pytest.mark.parametrize("name", GPT2)
def test_skip_layer_attention_takes_three_quarters(name):
    config = preset(f"{name}-sla")
    depth, heads = config.num_hidden_layers, config.num_attention_heads
    back, skipping = 3 * depth // 4, 3 * heads // 4
    for plan in plan_layers(config):
        source = plan.index - back if plan.index >= back else plan.index
        expected = [plan.index] * (heads - skipping) + [source] * skipping
        assert [attended.k for attended in plan.attends] == [attended.v for attended in plan.attends] == expected
    unread = (depth - back) * skipping * config.head_dim
    assert count(name) - count(f"{name}-sla") == 2 * unread * (config.hidden_size + 1)


@pytest.mark.parametrize("name", GPT2)
def test_gpt2_is_nanogpts(name):
    config = preset(name)
    own = HeadwaterConfig.gpt2(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        hidden_act="gelu",
    )
    assert config.to_dict() == own.to_dict()
    assert (config.vocab_size, config.max_position_embeddings) == (50304, 1024)
    assert config.position == "learned"
    assert config.tie_word_embeddings
    assert config.norm_bias
    assert config.qkv_bias


# The last layer's stages, what it reads of which layers, and options that say which form it is.
LAST = {
    "resformer-82m": ([Stage.QKV], {("raw", "v"): [0]}, dict(mode="learnable")),
    "resformer-82m-vanilla": ([], {}, {}),
    "resformer-82m-identity": ([Stage.QKV], {("raw", "v"): [0]}, dict(mode="identity")),
    "resformer-82m-constant": ([Stage.QKV], {("raw", "v"): [0]}, dict(mode="constant")),
    "resformer-82m-sparse": ([Stage.QKV], {("raw", "v"): [0]}, dict(mode="sparse")),
    "resformer-82m-learnable-plus": (
        [Stage.QKV],
        {("raw", "v"): [0], ("shared", "value_residual"): [-1]},
        dict(mode="learnable_plus"),
    ),
    "resformer-82m-dense": ([Stage.QKV], {("raw", "v"): list(range(7))}, dict(mode="dense")),
    "resformer-82m-neutreno": ([Stage.HEAD_OUTPUTS], {("raw", "v"): [0]}, dict(weight=0.4)),
    "resformer-82m-identity-neutreno": (
        [Stage.QKV, Stage.HEAD_OUTPUTS],
        {("raw", "v"): [0]},
        dict(mode="identity", weight=0.1),
    ),
    "resformer-82m-denseformer": (
        [Stage.BLOCK_OUTPUT],
        {("stream", "x"): list(range(-1, 7))},
        dict(dilation=1, period=1),
    ),
    "resformer-82m-query": ([Stage.QKV], {("raw", "q"): [0]}, dict(mode="identity")),
    "resformer-82m-key": ([Stage.QKV], {("raw", "k"): [0]}, dict(mode="identity")),
    "resformer-82m-attention": ([Stage.ATTENTION_WEIGHTS], {("probabilities", "a"): [0]}, dict(mode="identity")),
    "resformer-82m-hidden": ([Stage.BLOCK_INPUT], {("stream", "x"): [-1]}, dict(mode="constant", weight=1.0)),
    "svformer-82m": ([], {("bank", "v"): [0]}, dict(share="values")),
}


@pytest.mark.parametrize("name", RESFORMER)
def test_value_residuals_read_what_they_should(name):
    config = preset(name)
    stages, reads, chosen = LAST[name]
    *_, last = plan_layers(config)
    assert [stage for stage, _ in last.acts] == stages
    found: dict = {}
    for source in last.reads:
        found.setdefault((source.kind, source.part), []).append(source.layer)
    assert found == reads
    options = {
        option: value for own in config.mechanisms.values() for option, value in own.items() if value is not None
    }
    assert options | chosen == options
    receiving = [plan.index for plan in plan_layers(config) if plan.acts or plan.reads]
    first = {"resformer-82m-vanilla": 8, "resformer-82m-sparse": 5, "resformer-82m-denseformer": 0}.get(name, 1)
    assert receiving == list(range(first, 8))


def test_value_residuals_of_the_papers_fixed_weights():
    for name, weights in {"identity": (0.5, 0.5), "constant": (2.0, 1.0), "sparse": (5.0, 1.0)}.items():
        assert built(f"resformer-82m-{name}").model.layers[7].self_attn.mechanisms["value_residual"].fixed == weights


@pytest.mark.parametrize("name", RESFORMER)
def test_resformer_is_llama_like(name):
    config = preset(name)
    assert (config.norm, config.feed_forward, config.hidden_act) == ("rms_norm", "gated", "silu")
    assert config.rope_parameters["rope_theta"] == 10_000
    assert not config.tie_word_embeddings
    assert (config.vocab_size, config.max_position_embeddings, config.intermediate_size) == (50277, 2048, 1792)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("kv-shifting")])
def test_kv_shifting_shifts_what_its_name_says(name):
    config = preset(name)
    shifted = {"vanilla": [], "qkv": ["k", "v", "q"]}.get(name.rpartition("-")[2], ["k", "v"])
    for plan in plan_layers(config):
        assert [part for part, tokens, _ in plan.tails if tokens == 1] == shifted
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.rotary_dim == config.head_dim == 128
    assert (config.norm, config.feed_forward, config.tie_word_embeddings) == ("rms_norm", "gated", False)


@pytest.mark.parametrize("name", [*TOKENFORMER, *MAXTEXT])
def test_tokenformer_is_as_published(name):
    model = built(name)
    config = model.config
    block, final = model.model.layers[0], model.model.norm
    assert not list(block.input_layernorm.parameters())
    assert not list(block.post_attention_layernorm.parameters())
    assert (final.weight.shape, final.bias.shape, final.eps) == ((config.hidden_size,), (config.hidden_size,), 1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not [n for n, _ in model.named_parameters() if n.endswith("bias") and n != "model.norm.bias"]
    assert (config.vocab_size, config.initializer_range) == (50304, 0.02)
    assert name in MAXTEXT or 4 * config.rotary_dim == config.head_dim
    assert config.mechanisms["pattention"]["score"] == "l2_norm_gelu"
    own = config.mechanisms["pattention"]
    assert own["ffn_pairs"] == 4 * own["attention_pairs"]
    assert block.mlp.key.shape == (own["ffn_pairs"], config.hidden_size)
    assert block.self_attn.q_proj.key.shape == (own["attention_pairs"], config.hidden_size)


@pytest.mark.parametrize("series", [TOKENFORMER[:4], MAXTEXT])
def test_growth_changes_pairs_alone(series):
    def rest(name: str) -> dict:
        fields = dict(PRESETS[name].fields)
        options = fields.pop("mechanisms")["pattention"]
        return fields | {option: value for option, value in options.items() if not option.endswith("_pairs")}

    assert all(rest(name) == rest(series[0]) for name in series)


def test_the_two_codes_differ_in_these_fields_alone():
    gpu, maxtext = (preset(f"tokenformer-{name}124m").to_dict() for name in ("", "maxtext-"))
    options = [config.pop("mechanisms")["pattention"] for config in (gpu, maxtext)]
    different = {field for field in gpu.keys() | maxtext.keys() if gpu.get(field) != maxtext.get(field)}
    assert different == {"position", "rope_parameters", "embedding_range", "logit_scale"}
    assert {option for option in options[0] if options[0][option] != options[1][option]} == {
        "gelu",
        "key_init",
        "value_init",
    }


def narrow(name: str) -> HeadwaterForCausalLM:
    """A preset at a width whose start is quickly drawn: that of these presets is the same at any."""
    sizes = dict(hidden_size=192, num_attention_heads=3, num_hidden_layers=6, vocab_size=2000)
    if name != MAXTEXT_BASELINE:
        options = PRESETS[name].fields["mechanisms"]["pattention"]
        sizes["mechanisms"] = {"pattention": options | {"attention_pairs": 144, "ffn_pairs": 576}}
    return HeadwaterForCausalLM(preset(name, **sizes)).eval()


@pytest.mark.parametrize("name", [MAXTEXT[0], MAXTEXT_BASELINE])
def test_maxtext_starts_with_what_each_sub_layer_writes_below_the_stream(name):
    model = narrow(name)
    found = measure_initialization(model)
    assert found[0].stream == pytest.approx(1.0, abs=0.02)
    assert all(one.ratio < 1 for one in found)
    assert found[1].cosine > 0.8
    with torch.no_grad():
        logits = model(sample_tokens(2000, 64, rows=2)).logits
    # The embedding is N(0, 1), the last norm's output has rms 1, and logits are divided by √D.
    assert model.config.logit_scale == pytest.approx(192**-0.5)
    assert logits.square().mean().sqrt().item() == pytest.approx(1.0, abs=0.1)


def test_each_pattention_of_maxtext_writes_the_second_moment_of_gelu():
    """Its scores are normed, so that Θ is GELU of N(0, 1) whatever comes in, and values of 1/√n take the mean."""
    z = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    moment = (torch.nn.functional.gelu(z, approximate="tanh").square() * torch.exp(-(z**2) / 2)).sum()
    expected = (moment / torch.exp(-(z**2) / 2).sum()).sqrt().item()
    outputs = [one.output for one in measure_initialization(narrow(MAXTEXT[0]))]
    assert sum(outputs) / len(outputs) == pytest.approx(expected, rel=0.1)
    # What attention writes is mostly one vector, whose size few pairs leave to chance.
    assert all(output == pytest.approx(expected, rel=0.35) for output in outputs)


def test_the_baseline_of_maxtext_is_gpt2_with_silu_and_without_positions():
    model = built(MAXTEXT_BASELINE)
    config = model.config
    assert (config.position, config.feed_forward, config.hidden_act) == ("none", "plain", "silu")
    assert (config.norm, config.norm_bias, config.norm_eps) == ("layer_norm", True, 1e-5)
    assert all((config.qkv_bias, config.output_bias, config.mlp_bias))
    assert not config.scaled_residual_init
    assert model.model.embed_positions is None
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", NAMES)
def test_smaller_versions_run(name):
    changes = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
    changes |= dict(num_labels=50, image_size=32) if name in VISION else dict(vocab_size=50)
    if PRESETS[name].fields.get("sliding_layers"):
        changes |= dict(num_hidden_layers=PRESETS[name].fields["num_hidden_layers"], head_dim=8)
    if "pattention" in PRESETS[name].fields.get("mechanisms", {}):
        options = PRESETS[name].fields["mechanisms"]["pattention"]
        kept = {option: value for option, value in options.items() if not option.endswith("_pairs")}
        changes["mechanisms"] = {"pattention": kept}
    config = preset(name, intermediate_size=48, **changes)
    if name in VISION:
        images = torch.randn(2, 3, 32, 32)
        assert HeadwaterForImageClassification(config)(images, labels=torch.tensor([0, 49])).loss.isfinite()
        return
    model = HeadwaterForCausalLM(config)
    ids = torch.randint(50, (1, 6))
    assert model(ids, labels=ids).loss.isfinite()


def test_changes_replace_fields():
    config = preset("gpt2-124m-sla", max_position_embeddings=16384, residual_dropout=0.1)
    assert (config.max_position_embeddings, config.residual_dropout) == (16384, 0.1)
    assert list(config.mechanisms) == ["skip_layer"]
    assert preset("gpt2-124m-sla", mechanisms={}).mechanisms == {}
    gated = preset("kv-shifting-1.5b", mechanisms={"kv_shift": {"variant": "gate"}})
    assert gated.mechanisms["kv_shift"]["variant"] == "gate"


def test_a_config_does_not_share_a_presets_dicts():
    before = str(PRESETS)
    config = preset("tokenformer-124m")
    config.rope_parameters["rope_theta"] = 1.0
    config.mechanisms["pattention"]["attention_pairs"] = 1
    assert str(PRESETS) == before


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("kv-shiftin-1.5b", {}, "There is no preset named 'kv-shiftin-1.5b'; did you mean 'kv-shifting-1.5b'?"),
        ("GPT2-124M", {}, "There is no preset named 'GPT2-124M'; did you mean 'gpt2-124m'?"),
        ("gpt2-124m", {"hiden_size": 8}, "A model has no field 'hiden_size'; did you mean 'hidden_size'?"),
        (
            "gpt2-124m",
            {"sliding_window": 1},
            "Preset 'gpt2-124m': sliding_window must be at least 2, not 1; leave it out for none.",
        ),
        (
            "resformer-82m",
            {"num_attention_heads": 7},
            "Preset 'resformer-82m': hidden_size 512 is not divisible by num_attention_heads 7; "
            "change one of them, or give head_dim.",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(name, changes, sentence):
    with pytest.raises(HeadwaterError, match=f"^{re.escape(sentence)}$"):
        preset(name, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_fields_can_stand_in_a_recipe(name):
    known = {"base", "num_labels", *HeadwaterVisionConfig.field_names()} if name in VISION else MODEL_FIELDS
    assert PRESETS[name].fields.keys() <= known
