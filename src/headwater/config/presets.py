"""The papers' models, some released ones and our own, by name: `preset("kv-shifting-1.5b")` is a `HeadwaterConfig`.

    gpt2-124m, gpt2-medium-350m, gpt2-large-774m       nanoGPT's GPT-2; with -sla: skip-layer attention, ¾ of the layers
                                                       and ¾ of the heads
    kv-shifting-1.5b, -2.9b, -6.7b, -13b, -19b         keys and values shifted; with -vanilla: without;
                                                       kv-shifting-19b-qkv: queries too
    resformer-82m                                      value residual in its learnable form; the other forms, the
                                                       baselines and the residuals taken elsewhere are resformer-82m-…
    svformer-82m                                       the first layer's values for all
    tokenformer-124m, -354m, -757m, -1.4b              the growth series: one shape, more and more pairs
    tokenformer-150m, -450m, -900m, -1.5b              the models trained on the Pile
    tokenformer-maxtext-124m, -354m, -757m, -1.4b      the growth series in the authors' second code, for TPUs;
                                                       -124m-vanilla: its Transformer

GPT-2 has learned positions, and their table counts as parameters. It has 1024 here, as in GPT-2 and by nanoGPT's
default: only so is the small model the 124M that the paper calls it. The paper trains at 4096, 8192 and 16384; give
the context for these, `preset("gpt2-124m-sla", max_position_embeddings=16384)`, which adds 11.8M parameters. Biases
are there, as in GPT-2; nanoGPT's `bias=False` is qkv_bias, output_bias, mlp_bias and norm_bias set to False. The other
families turn queries and keys by RoPE, but for tokenformer-maxtext-…, which has no positions, and their context is that
of their training.

    vit-b-16, vit-l-16                                 vision Transformers of 224 x 224 pixels for ImageNet-1k
    tokenformer-vit-b-16, -l-16                        TokenFormer in their place, with as many pairs as there are
                                                       channels; with -matched: with as many parameters as they have

Released models whose keys and values come from elsewhere too, in the shapes of their public configs:

    llama-canon-1b, -3b, -8b                           short convolutions at all four places of Canon layers
    muddformer-2.8b, muddpythia-1.4b, -2.8b            sums of all hidden states, for q, k, v and the stream each
    yoco-3b                                            the upper half reads the keys and values of one layer
    nanochat-d12, -d20, -d26                           value embeddings, the embedding in every layer, smear, windows

headwater's own recommendation, which docs/ledger.md explains:

    headwater-base                                     short convolutions before attention and feed-forward, and the
                                                       first layer's values for all; with -vanilla: without

How the models were trained is no part of a preset.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.util.errors import HeadwaterError, nearest, sentence


@dataclass(frozen=True)
class Preset:
    """One model.

    fields: fields of `HeadwaterConfig`, and `base: gpt2` if the other defaults are those of
        `HeadwaterConfig.gpt2()`, or `base: vit` for fields of `HeadwaterVisionConfig`; as under `model` in a recipe.
    paper: where the model is from.
    note: which form it is, and why its parameters differ from the paper's figure.
    reported: its parameters as the paper prints them; None if it does not.
    reported_exact: its parameters by our own count, to more digits; None if only the paper's figure is known.
    """

    fields: dict[str, Any]
    paper: str
    note: str = ""
    reported: str | None = None
    reported_exact: str | None = None


def preset(name: str, **changes: Any) -> HeadwaterConfig:
    """The config of the preset `name`; `changes` are fields of its class and replace its own.

    `mechanisms`, too, is replaced as a whole. Raises `HeadwaterError` for an unknown name or field, and for changes
    that contradict the rest.

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
    known = CHANGEABLE_OF_IMAGES if base == "vit" else CHANGEABLE
    for field in changes:
        if field not in known:
            raise HeadwaterError(f"A model has no field {field!r}; {nearest(field, known)}")
    if {"num_labels", "id2label"} & changes.keys():
        fields.pop("num_labels", None)
    make: Any = {"gpt2": HeadwaterConfig.gpt2, "vit": HeadwaterVisionConfig}.get(base, HeadwaterConfig)
    try:
        config = make(**(fields | changes))
        plan_layers(config)
        return config
    except (HeadwaterError, StrictDataclassError) as error:
        raise HeadwaterError(f"Preset {name!r}: {sentence(error)}") from error


_BESIDE = {"attn_implementation", "dtype"}
CHANGEABLE = {*HeadwaterConfig.field_names()} - {"layer_types"} | _BESIDE
CHANGEABLE_OF_IMAGES = {*HeadwaterVisionConfig.field_names()} - {"layer_types"} | _BESIDE
CHANGEABLE_OF_IMAGES |= {"num_labels", "id2label", "label2id"}


def _shape(layers: int, width: int, heads: int) -> dict[str, Any]:
    return dict(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads)


def _rope(base: float, part: float = 1.0) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=base, partial_rotary_factor=part)


# Skip-layer attention: layers, width, heads. GELU is nanoGPT's, the erf form; GPT-2's own is the tanh form.
SKIP_LAYER = "Skip-layer attention, arXiv 2406.11274"
GPT2_SIZES = {
    "gpt2-124m": (12, 768, 12),
    "gpt2-medium-350m": (24, 1024, 16),
    "gpt2-large-774m": (36, 1280, 20),
}


def _gpt2() -> dict[str, Preset]:
    found = {}
    for name, size in GPT2_SIZES.items():
        base = dict(base="gpt2", vocab_size=50304, **_shape(*size), max_position_embeddings=1024, hidden_act="gelu")
        figure = name.rpartition("-")[2].upper()
        rounded = "; 350M is nanoGPT's round figure" if figure == "350M" else ""
        found[name] = Preset(base, SKIP_LAYER, f"baseline{rounded}", figure)
        unread = "keys and values that no head attends to are not built"
        found[f"{name}-sla"] = Preset(base | dict(mechanisms={"skip_layer": {}}), SKIP_LAYER, unread + rounded, figure)
    return found


# KV shifting: layers, width, heads, key/value heads, feed-forward, context, vocabulary; our count.
KV_SHIFTING = "KV shifting, arXiv 2411.19574"
KV_SHIFTING_SIZES = {
    "1.5b": (28, 2048, 16, 16, 5504, 2048, 36000, "1.56B"),
    "2.9b": (32, 2560, 20, 4, 8704, 4096, 48000, "2.89B"),
    "6.7b": (32, 4096, 32, 32, 11008, 2048, 36000, "6.77B"),
    "13b": (40, 5120, 40, 40, 13824, 2048, 36000, "13.06B"),
    "19b": (48, 6144, 48, 4, 16384, 12288, 48000, "19.0B"),
}


def _kv_shifting() -> dict[str, Preset]:
    variants: dict[str, tuple[dict[str, Any], str]] = {
        "": ({"kv_shift": {}}, "keys and values shifted"),
        "-vanilla": ({}, "baseline"),
        "-qkv": ({"kv_shift": {"queries": True}}, "queries shifted too"),
    }
    found = {}
    for size, (layers, width, heads, kv_heads, inner, context, vocabulary, count) in KV_SHIFTING_SIZES.items():
        base = _shape(layers, width, heads) | dict(
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            max_position_embeddings=context,
            vocab_size=vocabulary,
            rope_parameters=_rope(100_000.0),
        )
        cut = f"; the paper's figure is {count}, cut off" if size in ("1.5b", "6.7b") else ""
        for variant, (mechanisms, note) in variants.items():
            if variant != "-qkv" or size == "19b":  # the only size the paper trains it at
                found[f"kv-shifting-{size}{variant}"] = Preset(
                    base | dict(mechanisms=mechanisms), KV_SHIFTING, note + cut, size.upper(), count
                )
    return found


# Value residual: mechanisms, note. The paper's 468M and 1.6B are missing, because their shapes are unknown.
VALUE_RESIDUAL = "Value residual, arXiv 2410.17897"
VALUE_RESIDUAL_VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "resformer-82m": ({"value_residual": {"mode": "learnable"}}, "learnable: two free scalars a layer"),
    "resformer-82m-vanilla": ({}, "baseline"),
    "resformer-82m-identity": ({"value_residual": {"mode": "identity"}}, "λ1 = λ2 = 0.5"),
    "resformer-82m-constant": ({"value_residual": {"mode": "constant"}}, "λ1 = 2, λ2 = 1"),
    "resformer-82m-sparse": ({"value_residual": {"mode": "sparse"}}, "λ1 = 5 in the last 3 layers"),
    "resformer-82m-learnable-plus": ({"value_residual": {"mode": "learnable_plus"}}, "λ1 shared out by a softmax"),
    "resformer-82m-dense": ({"value_residual": {"mode": "dense"}}, "all earlier layers' values"),
    "resformer-82m-neutreno": ({"neutreno": {"weight": 0.4}}, "NeuTRENO, a baseline, λ = 0.4"),
    "resformer-82m-identity-neutreno": (
        {"value_residual": {"mode": "identity"}, "neutreno": {"weight": 0.1}},
        "identity, and NeuTRENO with λ = 0.1, which is the authors' 0.2 on the mixed value",
    ),
    "resformer-82m-denseformer": ({"dense_former": {}}, "DenseFormer, a baseline"),
    "resformer-82m-query": ({"value_residual": {"target": "queries", "mode": "identity"}}, "residual of queries"),
    "resformer-82m-key": ({"value_residual": {"target": "keys", "mode": "identity"}}, "residual of keys"),
    "resformer-82m-attention": (
        {"value_residual": {"target": "probabilities", "mode": "identity"}},
        "residual of attention probabilities; eager attention only",
    ),
    "resformer-82m-hidden": (
        {"value_residual": {"target": "hidden", "mode": "constant", "weight": 1.0}},
        "X_0 added to each attention's input",
    ),
    "svformer-82m": ({"svformer": {}}, "82M is the baseline's size; 7 of 8 layers have no value projection"),
}


def _value_residual() -> dict[str, Preset]:
    base = _shape(8, 512, 8) | dict(
        intermediate_size=1792, max_position_embeddings=2048, vocab_size=50277, rope_parameters=_rope(10_000.0)
    )
    return {
        name: Preset(base | dict(mechanisms=mechanisms), VALUE_RESIDUAL, note, "82M")
        for name, (mechanisms, note) in VALUE_RESIDUAL_VARIANTS.items()
    }


# TokenFormer: layers, width, heads, attention pairs, feed-forward pairs, context; our count, note.
TOKENFORMER = "TokenFormer, arXiv 2410.23168"
TOKENFORMER_SIZES = {
    "124m": (12, 768, 12, 576, 2304, 1024, "123.6M", "growth series"),
    "354m": (12, 768, 12, 2140, 8560, 1024, "354.2M", "growth series, by the paper's Table 8"),
    "757m": (12, 768, 12, 4850, 19400, 1024, "753.8M", "growth series; the pairs of Table 8 give 754M"),
    "1.4b": (12, 768, 12, 8620, 34480, 1024, "1309.7M", "growth series; the pairs of Table 8 give 1.3B"),
    "150m": (12, 768, 12, 768, 3072, 2048, "151.9M", "trained on the Pile; the paper rounds to two digits"),
    "450m": (24, 1024, 16, 1024, 4096, 2048, "454.2M", "trained on the Pile; the paper rounds to two digits"),
    "900m": (32, 1280, 16, 1280, 5120, 2048, "903.3M", "trained on the Pile; the paper rounds to two digits"),
    "1.5b": (40, 1536, 16, 1536, 6144, 2048, "1587.2M", "trained on the Pile; the paper's figure is 1.58B, cut off"),
}


def _tokenformer() -> dict[str, Preset]:
    base = dict(
        vocab_size=50304,
        norm="layer_norm",
        norm_eps=1e-5,
        norm_weight=False,
        norm_bias=False,
        final_norm_weight=True,
        final_norm_bias=True,
        rope_parameters=_rope(10_000.0, 0.25),
        tie_word_embeddings=True,
        initializer_range=0.02,
        embedding_range=0.02,
    )
    found = {}
    for size, (layers, width, heads, attention, inner, context, count, note) in TOKENFORMER_SIZES.items():
        own = dict(
            max_position_embeddings=context,
            mechanisms={"pattention": {"attention_pairs": attention, "ffn_pairs": inner}},
        )
        fields = _shape(layers, width, heads) | base | own
        found[f"tokenformer-{size}"] = Preset(fields, TOKENFORMER, note, size.upper(), count)
    return found


# TokenFormer's TPU code, github.com/Haiyang-W/TokenFormer, tokenformer-tpu: MaxText/configs/tokenformer.yml and
# gpt2.yml with the overrides of its README's commands. Those are for 124M and 354M; 757M and 1.4B are the paper's
# Table 8 in the same code.
def _tokenformer_maxtext() -> dict[str, Preset]:
    there = dict(position="none", embedding_range=1.0, logit_scale="fan_in")
    found = {}
    for size in ("124m", "354m", "757m", "1.4b"):
        given = _tokenformer()[f"tokenformer-{size}"]
        fields = {field: value for field, value in given.fields.items() if field != "rope_parameters"} | there
        pairs = given.fields["mechanisms"]["pattention"]
        start = dict(gelu="tanh", key_init="fan_in", value_init="fan_in")
        fields["mechanisms"] = {"pattention": pairs | start}
        note = f"the MaxText code: {given.note}"
        found[f"tokenformer-maxtext-{size}"] = Preset(fields, TOKENFORMER, note, given.reported, given.reported_exact)
    baseline = _shape(12, 768, 12) | dict(base="gpt2", vocab_size=50304, max_position_embeddings=1024) | there
    baseline |= dict(hidden_act="silu", linear_init="fan_in", scaled_residual_init=False)
    note = "the MaxText code: baseline, with SiLU and biases"
    found["tokenformer-maxtext-124m-vanilla"] = Preset(baseline, TOKENFORMER, note, "124M", "123.7M")
    return found


# Vision: layers, width, heads; the pairs of attention and feed-forward with which TokenFormer's parameters are matched.
VISION_SIZES = {"b-16": (12, 768, 12, 576, 2304), "l-16": (24, 1024, 16, 768, 3072)}
# The paper's figure, our count and why they differ; -matched: as many parameters as the vision Transformer.
VISION_FIGURES = {
    "vit-b-16": ("86M", "86.6M", "baseline; the figure, cut off, is ViT's own"),
    "vit-l-16": ("307M", "304.3M", "baseline; the figure is ViT's own, and 1% above what its sizes give"),
    "tokenformer-vit-b-16-matched": ("86M", "86.4M", "pairs of Table 8, matched to ViT-B/16"),
    "tokenformer-vit-b-16": ("109M", "114.8M", "pairs of Table 8, which do not give the 109M of Table 2"),
    "tokenformer-vit-l-16-matched": ("307M", "304.0M", "3072 pairs; the 768 that Table 8 prints would give 191M"),
    "tokenformer-vit-l-16": ("407M", "404.7M", "pairs of Table 8; Table 2 counts 100M more than its 307M"),
}


def _vision() -> dict[str, Preset]:
    found = {}
    no_biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False)
    for size, (layers, width, heads, *matched) in VISION_SIZES.items():
        base = dict(base="vit", num_labels=1000, **_shape(layers, width, heads))
        norms = dict(norm_weight=False, norm_bias=False, final_norm_weight=True, final_norm_bias=True)
        models = {f"vit-{size}": base}
        for ending, (attention, inner) in {"-matched": matched, "": (width, 4 * width)}.items():
            pairs = {"pattention": {"attention_pairs": attention, "ffn_pairs": inner}}
            models[f"tokenformer-vit-{size}{ending}"] = base | no_biases | norms | dict(mechanisms=pairs)
        for name, fields in models.items():
            figure, count, note = VISION_FIGURES[name]
            found[name] = Preset(fields, TOKENFORMER, note, figure, count)
    return found


# github.com/facebookresearch/PhysicsLM4, canon_llama_recipes: layers, width, heads, key/value heads, feed-forward, RoPE
# channels and base, vocabulary, norm of queries and keys.
CANON_SIZES = {
    "1b": (24, 2048, 32, 32, 5632, 16, 1e4, 32000, True),
    "3b": (26, 3072, 24, 24, 8192, 32, 1e4, 32000, True),
    "8b": (32, 4096, 32, 8, 14336, 32, 1e5, 128256, False),
}


def _canon() -> dict[str, Preset]:
    places = ["attention_input", "queries", "keys", "values", "feed_forward_input", "feed_forward_hidden"]
    found = {}
    for size, (layers, width, heads, kv_heads, inner, channels, base, vocabulary, normed) in CANON_SIZES.items():
        fields = _shape(layers, width, heads) | dict(
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            max_position_embeddings=4096,
            vocab_size=vocabulary,
            rope_parameters=_rope(base, channels / (width // heads)),
            qk_norm=normed,
            mechanisms={"short_conv": {"sites": places}},
        )
        found[f"llama-canon-{size}"] = Preset(fields, "Canon layers, arXiv 2512.17351", "Canon-A, B, C and D")
    return found


# github.com/Caiyun-AI/MUDDFormer, pytorch/*/config*.json: layers, width, heads, feed-forward.
def _mudd() -> dict[str, Preset]:
    paper, note = "MUDDFormer, arXiv 2502.12170", "one norm for q, k and v, where the authors' code has three"
    common = dict(max_position_embeddings=2048, vocab_size=50432, qk_norm=True, mechanisms={"mudd": {}})
    llama = dict(intermediate_size=6912, norm_eps=1e-6, rope_parameters=_rope(1e4))
    pythia = dict(
        norm="layer_norm",
        feed_forward="plain",
        hidden_act="gelu",
        parallel_residual=True,
        rope_parameters=_rope(1e4, 0.25),
    ) | dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
    return {
        "muddformer-2.8b": Preset(_shape(32, 2560, 32) | common | llama, paper, note, "2.8B"),
        "muddpythia-1.4b": Preset(
            _shape(24, 2048, 16) | common | pythia | dict(intermediate_size=8192), paper, note, "1.4B"
        ),
        "muddpythia-2.8b": Preset(
            _shape(32, 2560, 32) | common | pythia | dict(intermediate_size=10240), paper, note, "2.8B"
        ),
    }


# github.com/microsoft/unilm, YOCO/yoco/models/yoco.py; the vocabulary of cl100k_base, padded to a multiple of 64.
def _yoco() -> dict[str, Preset]:
    fields = _shape(26, 3072, 24) | dict(
        num_key_value_heads=8,
        intermediate_size=8192,
        max_position_embeddings=4096,
        vocab_size=100288,
        rope_parameters=_rope(1e4),
        mechanisms={"kv_source": {"keys": "yoco", "values": "yoco"}},
    )
    note = (
        "full attention in the lower half; YOCO has gated retention there, or a window, for which set `sliding_window` "
        "and `sliding_layers`"
    )
    return {"yoco-3b": Preset(fields, "YOCO, arXiv 2405.05254", note, "3B")}


# github.com/karpathy/nanochat at 92d63d4, nanochat/gpt.py and scripts/base_train.py: 64 channels for each layer, heads
# of 128, and three of four layers with a window of a quarter of the context; the last has none.
def _nanochat() -> dict[str, Preset]:
    note = (
        "λ, μ and value gates start at 1, 0 and 0; nanochat's at 1.15 − 0.10·l/(L − 1), 0.20 − 0.15·l/(L − 1) and "
        "uniform in [0, 0.02)"
    )
    found = {}
    for depth in (12, 20, 26):
        fields = _shape(depth, 64 * depth, depth // 2) | dict(
            head_dim=128,
            intermediate_size=256 * depth,
            max_position_embeddings=2048,
            vocab_size=32768,
            feed_forward="plain",
            hidden_act="relu2",
            norm_eps=1.1920928955078125e-07,
            norm_weight=False,
            embedding_norm=True,
            qk_norm=True,
            attention_scale=1.44 * 128**-0.5,
            rope_parameters=_rope(1e5),
            sliding_window=513,
            sliding_layers=[layer for layer in range(depth - 1) if layer % 4 != 3],
            logit_softcap=15.0,
            mechanisms={
                "value_embedding": {
                    "layers": [layer for layer in range(depth) if layer % 2 == (depth - 1) % 2],
                    "channels": 12,
                    "scale": 3.0,
                },
                "smear": {"channels": 24},
                "embedding_residual": {},
                "backout": {},
            },
        )
        found[f"nanochat-d{depth}"] = Preset(fields, "nanochat, github.com/karpathy/nanochat", note)
    return found


LEDGER = "headwater, docs/ledger.md"


# The ledger's recommendation (recipes/recommended/test.yaml), at the size of the small GPT-2. Both start with the
# embedding with which vanilla was better there.
def _recommended() -> dict[str, Preset]:
    base = _shape(12, 768, 12) | dict(
        intermediate_size=2048, max_position_embeddings=2048, vocab_size=50304, embedding_range=0.1
    )
    chosen = {"short_conv": {"sites": ["attention_input", "feed_forward_input"]}, "svformer": {}}
    tested = "tested with 2.9M to 34M parameters, and not yet at this size"
    return {
        "headwater-base": Preset(
            base | dict(mechanisms=chosen), LEDGER, f"Canon-AC + SVFormer, the recommendation; {tested}"
        ),
        "headwater-base-vanilla": Preset(base, LEDGER, "baseline"),
    }


PRESETS: dict[str, Preset] = (
    _gpt2()
    | _kv_shifting()
    | _value_residual()
    | _tokenformer()
    | _tokenformer_maxtext()
    | _vision()
    | _canon()
    | _mudd()
    | _yoco()
    | _nanochat()
    | _recommended()
)
