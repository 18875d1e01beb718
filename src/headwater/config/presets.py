"""The papers' models, some released ones and our own, by name: `preset("kv-shifting-1.5b")` is a `HeadwaterConfig`.

docs/reference/presets.md lists them. A preset does not include how the model was trained.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.util.errors import HeadwaterError, check_known, nearest, sentence


@dataclass(frozen=True)
class Preset:
    """A published model, or one of our own.

    name: as `preset` takes it.
    fields: as under `model` in a recipe, with `base: gpt2` or `base: vit` for other defaults.
    paper: its source. note: which variant it is, and why its parameters differ from the paper's figure.
    reported: its parameters as the paper prints them; None if it prints none.
    """

    name: str
    fields: dict[str, Any]
    paper: str
    note: str
    reported: str | None


def preset(name: str, **changes: Any) -> HeadwaterConfig:
    """Return the config of the preset `name` with some fields replaced; `mechanisms` is replaced as a whole.

    Raises `HeadwaterError` for an unknown name or field, and for fields that contradict each other.

        >>> config = preset("gpt2-124m-sla", max_position_embeddings=4096)
        >>> config.num_hidden_layers, config.max_position_embeddings
        (12, 4096)
    """
    if name not in PRESETS:
        near = nearest(name.lower(), PRESETS)
        raise HeadwaterError(
            f"There is no preset named {name!r}; "
            + (near if near.startswith("did you mean") else "`headwater list presets` lists them.")
        )
    fields = copy.deepcopy(PRESETS[name].fields)
    base = fields.pop("base", "llama")
    kind = HeadwaterVisionConfig if base == "vit" else HeadwaterConfig
    field_names = {*kind.field_names(), "attn_implementation", "dtype"} - {"layer_types"}
    field_names |= {"num_labels", "id2label", "label2id"} if base == "vit" else set()
    for field in changes:
        check_known("A model has no field", field, field_names)
    if {"num_labels", "id2label"} & changes.keys():
        fields.pop("num_labels", None)
    try:
        config = (HeadwaterConfig.gpt2 if base == "gpt2" else kind)(**(fields | changes))
        plan_layers(config)
        return config
    except (HeadwaterError, StrictDataclassError) as error:
        raise HeadwaterError(f"Preset {name!r}: {sentence(error)}") from error


def _make_preset(
    name: str, paper: str, note: str, reported: str | None, *fields: dict[str, Any], **mechanisms: Any
) -> Preset:
    """Make a preset. fields: parts of its config; later ones take precedence."""
    merged = {field: value for of_part in fields for field, value in of_part.items()}
    return Preset(name, merged | {"mechanisms": mechanisms}, paper, note, reported)


def _size_fields(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int | None = None,
    feed_forward: int | None = None,
    context: int = 2048,
    vocabulary: int = 50304,
) -> dict[str, Any]:
    return dict(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        max_position_embeddings=context,
        vocab_size=vocabulary,
    )


def _rope_fields(base: float, fraction: float = 1.0) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type="default", rope_theta=base, partial_rotary_factor=fraction))


def _gpt2_presets() -> Iterator[Preset]:
    paper, unread = "Skip-layer attention, arXiv 2406.11274", "keys and values that no head attends to are not built"
    for name, figure, rounded, size in (
        ("gpt2-124m", "124M", "", (12, 768, 12)),
        ("gpt2-medium-350m", "350M", "; 350M is nanoGPT's round figure", (24, 1024, 16)),
        ("gpt2-large-774m", "774M", "", (36, 1280, 20)),
    ):
        # nanoGPT uses the erf form of GELU. GPT-2's own code uses the tanh form.
        base = dict(base="gpt2", hidden_act="gelu") | _size_fields(*size, context=1024)
        yield _make_preset(name, paper, f"baseline{rounded}", figure, base)
        yield _make_preset(f"{name}-sla", paper, unread + rounded, figure, base, skip_layer={})


def _kv_shifting_presets() -> Iterator[Preset]:
    paper = "KV shifting, arXiv 2411.19574"
    for size, cut, sizes in (
        ("1.5b", "; the paper's figure is 1.56B, cut off", (28, 2048, 16, 16, 5504, 2048, 36000)),
        ("2.9b", "", (32, 2560, 20, 4, 8704, 4096, 48000)),
        ("6.7b", "; the paper's figure is 6.77B, cut off", (32, 4096, 32, 32, 11008, 2048, 36000)),
        ("13b", "", (40, 5120, 40, 40, 13824, 2048, 36000)),
        ("19b", "", (48, 6144, 48, 4, 16384, 12288, 48000)),
    ):
        name, figure, base = f"kv-shifting-{size}", size.upper(), _size_fields(*sizes) | _rope_fields(100_000.0)
        yield _make_preset(name, paper, f"keys and values shifted{cut}", figure, base, kv_shift={})
        yield _make_preset(f"{name}-vanilla", paper, f"baseline{cut}", figure, base)
    yield _make_preset(f"{name}-qkv", paper, "queries shifted too", figure, base, kv_shift={"queries": True})


# The paper's 468M and 1.6B are missing, because their shapes are unknown.
def _value_residual_presets() -> Iterator[Preset]:
    base = _size_fields(8, 512, 8, None, 1792, 2048, 50277) | _rope_fields(10_000.0)
    mixed, target = "value_residual", dict[str, Any](mode="identity")
    mechanisms: dict[str, tuple[dict[str, Any], str]] = {
        "resformer-82m": ({mixed: {"mode": "learnable"}}, "learnable: two free scalars a layer"),
        "resformer-82m-vanilla": ({}, "baseline"),
        "resformer-82m-identity": ({mixed: {"mode": "identity"}}, "λ1 = λ2 = 0.5"),
        "resformer-82m-constant": ({mixed: {"mode": "constant"}}, "λ1 = 2, λ2 = 1"),
        "resformer-82m-sparse": ({mixed: {"mode": "sparse"}}, "λ1 = 5 in the last 3 layers"),
        "resformer-82m-learnable-plus": ({mixed: {"mode": "learnable_plus"}}, "λ1 distributed by a softmax"),
        "resformer-82m-dense": ({mixed: {"mode": "dense"}}, "all earlier layers' values"),
        "resformer-82m-neutreno": ({"neutreno": {"weight": 0.4}}, "NeuTRENO, a baseline, λ = 0.4"),
        "resformer-82m-identity-neutreno": (
            {mixed: {"mode": "identity"}, "neutreno": {"weight": 0.1}},
            "identity, and NeuTRENO with λ = 0.1, which is the authors' 0.2 on the mixed value",
        ),
        "resformer-82m-denseformer": ({"dense_former": {}}, "DenseFormer, a baseline"),
        "resformer-82m-query": ({mixed: target | {"target": "queries"}}, "residual of queries"),
        "resformer-82m-key": ({mixed: target | {"target": "keys"}}, "residual of keys"),
        "resformer-82m-attention": (
            {mixed: target | {"target": "probabilities"}},
            "residual of attention probabilities; eager attention only",
        ),
        "resformer-82m-hidden": (
            {mixed: {"target": "hidden", "mode": "constant", "weight": 1.0}},
            "X_0 added to each attention's input",
        ),
        "svformer-82m": ({"svformer": {}}, "82M is the baseline's size; 7 of 8 layers have no value projection"),
    }
    for name, (options, note) in mechanisms.items():
        yield _make_preset(name, "Value residual, arXiv 2410.17897", note, "82M", base, **options)


TOKENFORMER = "TokenFormer, arXiv 2410.23168"
_BARE_NORMS = dict(norm_weight=False, norm_bias=False, final_norm_weight=True, final_norm_bias=True)


def _pair_options(attention: int, feed_forward: int) -> dict[str, Any]:
    return dict(attention_pairs=attention, ffn_pairs=feed_forward)


def _tokenformer_presets() -> Iterator[Preset]:
    base = dict(norm="layer_norm", tie_word_embeddings=True, embedding_range=0.02) | _BARE_NORMS
    # The authors' second code, for TPUs: github.com/Haiyang-W/TokenFormer, tokenformer-tpu,
    # MaxText/configs/tokenformer.yml and gpt2.yml with the overrides of its README's commands. Those are for 124M and
    # 354M; 757M and 1.4B are the paper's Table 8 in the same code.
    maxtext = dict[str, Any](position="none", embedding_range=1.0, logit_scale="fan_in")
    start = dict(gelu="tanh", key_init="fan_in", value_init="fan_in")
    growth = (
        ("124m", _pair_options(576, 2304), "growth series"),
        ("354m", _pair_options(2140, 8560), "growth series, by the paper's Table 8"),
        ("757m", _pair_options(4850, 19400), "growth series; the pairs of Table 8 give 754M"),
        ("1.4b", _pair_options(8620, 34480), "growth series; the pairs of Table 8 give 1.3B"),
    )
    rounded = "trained on the Pile; the paper rounds to two digits"
    for size, pairs, note, sizes in (
        *((*model, _size_fields(12, 768, 12, context=1024)) for model in growth),
        ("150m", _pair_options(768, 3072), rounded, _size_fields(12, 768, 12)),
        ("450m", _pair_options(1024, 4096), rounded, _size_fields(24, 1024, 16)),
        ("900m", _pair_options(1280, 5120), rounded, _size_fields(32, 1280, 16)),
        (
            "1.5b",
            _pair_options(1536, 6144),
            "trained on the Pile; the paper's figure is 1.58B, cut off",
            _size_fields(40, 1536, 16),
        ),
    ):
        fields = base | sizes | _rope_fields(10_000.0, 0.25)
        yield _make_preset(f"tokenformer-{size}", TOKENFORMER, note, size.upper(), fields, pattention=pairs)
    small = _size_fields(12, 768, 12, context=1024)
    for size, pairs, note in growth:
        name, note, fields = f"tokenformer-maxtext-{size}", f"the MaxText code: {note}", base | small
        yield _make_preset(name, TOKENFORMER, note, size.upper(), fields, maxtext, pattention=pairs | start)
    fields = dict(base="gpt2", hidden_act="silu", linear_init="fan_in", scaled_residual_init=False) | small
    note = "the MaxText code: baseline, with SiLU and biases"
    yield _make_preset("tokenformer-maxtext-124m-vanilla", TOKENFORMER, note, "124M", fields, maxtext)


# Presets ending in -matched have as many parameters as the vision Transformer.
def _vision_presets() -> Iterator[Preset]:
    base = dict(base="vit", num_labels=1000, num_hidden_layers=12, hidden_size=768, num_attention_heads=12)
    large = base | dict(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16)
    tokens = _BARE_NORMS | dict(qkv_bias=False, output_bias=False, mlp_bias=False)
    for name, figure, note, pairs in (
        ("vit-b-16", "86M", "baseline; the figure, cut off, is ViT's own", None),
        ("tokenformer-vit-b-16-matched", "86M", "pairs of Table 8, matched to ViT-B/16", (576, 2304)),
        ("tokenformer-vit-b-16", "109M", "pairs of Table 8, which do not give the 109M of Table 2", (768, 3072)),
        ("vit-l-16", "307M", "baseline; the figure is ViT's own, and 1% above what its sizes give", None),
        (
            "tokenformer-vit-l-16-matched",
            "307M",
            "3072 pairs; the 768 that Table 8 prints would give 191M",
            (768, 3072),
        ),
        ("tokenformer-vit-l-16", "407M", "pairs of Table 8; Table 2 counts 100M more than its 307M", (1024, 4096)),
    ):
        mechanisms = {"pattention": _pair_options(*pairs)} if pairs else {}
        size = large if "-l-" in name else base
        yield _make_preset(name, TOKENFORMER, note, figure, size, tokens if pairs else {}, **mechanisms)


# Released models, in the shapes of their public configs.
def _released_presets() -> Iterator[Preset]:
    # github.com/facebookresearch/PhysicsLM4, canon_llama_recipes
    paper, note = "Canon layers, arXiv 2512.17351", "Canon-A, B, C and D"
    sites = ["attention_input", "queries", "keys", "values", "feed_forward_input", "feed_forward_hidden"]
    for size, normed, rope, sizes in (
        ("1b", True, _rope_fields(1e4, 16 / 64), _size_fields(24, 2048, 32, 32, 5632, 4096, 32000)),
        ("3b", True, _rope_fields(1e4, 32 / 128), _size_fields(26, 3072, 24, 24, 8192, 4096, 32000)),
        ("8b", False, _rope_fields(1e5, 32 / 128), _size_fields(32, 4096, 32, 8, 14336, 4096, 128256)),
    ):
        fields = sizes | rope | {"qk_norm": normed}
        yield _make_preset(f"llama-canon-{size}", paper, note, None, fields, short_conv={"sites": sites})
    # github.com/Caiyun-AI/MUDDFormer, pytorch/*/config*.json
    paper, note = "MUDDFormer, arXiv 2502.12170", "one norm for q, k and v, where the authors' code has three"
    fields = _size_fields(32, 2560, 32, None, 6912, 2048, 50432) | _rope_fields(1e4) | dict(norm_eps=1e-6, qk_norm=True)
    yield _make_preset("muddformer-2.8b", paper, note, "2.8B", fields, mudd={})
    # github.com/karpathy/nanochat at 92d63d4, nanochat/gpt.py and scripts/base_train.py: 64 channels for each layer,
    # heads of 128, and three of four layers with a window of a quarter of the context; the last has none.
    note = (
        "λ, μ and value gates start at 1, 0 and 0; nanochat's at 1.15 − 0.10·l/(L − 1), 0.20 − 0.15·l/(L − 1) and "
        "uniform in [0, 0.02)"
    )
    for depth in (12, 20, 26):
        fields = _size_fields(depth, 64 * depth, depth // 2, None, 256 * depth, 2048, 32768) | _rope_fields(1e5)
        fields |= dict(
            head_dim=128,
            feed_forward="plain",
            hidden_act="relu2",
            norm_eps=1.1920928955078125e-07,
            norm_weight=False,
            embedding_norm=True,
            qk_norm=True,
            attention_scale=1.44 * 128**-0.5,
            sliding_window=513,
            sliding_layers=[layer for layer in range(depth - 1) if layer % 4 != 3],
            logit_softcap=15.0,
        )
        layers = [layer for layer in range(depth) if layer % 2 == (depth - 1) % 2]
        yield _make_preset(
            f"nanochat-d{depth}",
            "nanochat, github.com/karpathy/nanochat",
            note,
            None,
            fields,
            value_embedding={"layers": layers, "channels": 12, "scale": 3.0},
            smear={"channels": 24},
            embedding_residual={},
            backout={},
        )


# The recommendation of the results ledger (recipes/recommended/test.yaml), at the size of the small GPT-2. Both use
# the embedding's standard deviation with which vanilla did better there, and heads of 128, which GPUs compute faster.
def _recommended_presets() -> Iterator[Preset]:
    base, ledger = _size_fields(12, 768, 6) | dict(embedding_range=0.1), "headwater, docs/results.md"
    sites = ["attention_input", "feed_forward_input"]
    note = "Canon-AC + SVFormer, the recommendation; tested with 2.9M to 34M parameters, and not yet at this size"
    yield _make_preset("headwater-base", ledger, note, None, base, short_conv={"sites": sites}, svformer={})
    yield _make_preset("headwater-base-vanilla", ledger, "baseline", None, base)


PRESETS = {
    entry.name: entry
    for entry in chain(
        _gpt2_presets(),
        _kv_shifting_presets(),
        _value_residual_presets(),
        _tokenformer_presets(),
        _vision_presets(),
        _released_presets(),
        _recommended_presets(),
    )
}
