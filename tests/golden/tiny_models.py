"""One tiny model a mechanism, of both vanilla bases and of a few combinations: fp64 logits, and greedy tokens."""

from __future__ import annotations

import json
from typing import Any

import torch
from matching import MACHINE, SAME_MACHINE, bits, machine
from product import MECHANISM_NAMES, ImageConfig, ImageModel, TextConfig, TextModel
from torch import Tensor
from variants import VARIANTS

VOCABULARY = 23
NEW_TOKENS = 8
TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    bos_token_id=None,
    eos_token_id=None,
)
IMAGE = dict(
    image_size=8,
    patch_size=2,
    num_labels=5,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
)
WINDOWS: dict[str, Any] = dict(sliding_window=4, sliding_layers=[0, 1])

# Canon-ABCD.
CANON = ["attention_input", "queries", "keys", "values", "feed_forward_input", "feed_forward_hidden"]
EVERYWHERE = {"query_pairs": 12, "key_pairs": 10, "value_pairs": 14, "output_pairs": 20, "ffn_pairs": 36}

# Name -> mechanisms, and changes of the config. A mechanism's own name is the mechanism as it is by default.
TEXTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "gpt2": ({}, {"gpt2": True, "num_key_value_heads": 4}),
    **{name: ({name: {}}, {}) for name in MECHANISM_NAMES},
    "short_conv everywhere": ({"short_conv": {"sites": CANON}}, {}),
    "pattention everywhere": ({"pattention": EVERYWHERE}, {}),
    "windows": ({}, WINDOWS),
    "windows, kv_shift, value_residual": ({"kv_shift": {}, "value_residual": {"mode": "learnable"}}, WINDOWS),
    "kv_shift, value_residual": ({"kv_shift": {}, "value_residual": {}}, {}),
    "ngram_memory, windows": ({"ngram_memory": {"layers": [0, 2], "gate": "match", "rank": 8}}, WINDOWS),
    "skip_layer, svformer": ({"skip_layer": {}, "svformer": {}}, {}),
    "gpt2, all": (
        {"kv_shift": {}, "value_residual": {"mode": "learnable"}, "output_gate": {}, "dense_former": {}},
        {"gpt2": True, "num_key_value_heads": 4},
    ),
    "qk_norm, alibi": ({"exclusive": {}}, {"qk_norm": True, "position": "alibi"}),
}
for _name, _variants in VARIANTS.items():
    TEXTS |= {f"{_name} {json.dumps(options)}": ({_name: options}, {}) for options in _variants}
IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit": ({}, {}),
    "vit, kv_shift, value_residual": ({"kv_shift": {}, "value_residual": {}}, {}),
    "vit, pattention": ({"pattention": EVERYWHERE}, dict(qkv_bias=False, output_bias=False, mlp_bias=False)),
}


def set_weights(model: torch.nn.Module) -> Any:
    """Numbers that are the same on every machine, near the initial value where that is one: fp64, in eval mode.

    Normal numbers are not, to the last bit. So what is drawn from them is drawn here from uniform ones instead.
    """
    model = model.double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
            written = (parameter * 64).frac().any().logical_not() or (parameter == parameter.flatten()[0]).all()
            parameter.copy_((parameter if written else 0) + noise * (0.5 if written else 1.0))
    return model


def text_model(name: str) -> Any:
    mechanisms, changes = TEXTS[name]
    fields = TEXT | changes | {"mechanisms": mechanisms}
    return set_weights(TextModel(TextConfig.gpt2(**fields) if fields.pop("gpt2", False) else TextConfig(**fields)))


def image_model(name: str) -> Any:
    mechanisms, changes = IMAGES[name]
    return set_weights(ImageModel(ImageConfig(**IMAGE, **changes, mechanisms=mechanisms)))


def token_ids() -> Tensor:
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))


def pixels() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand((2, 3, IMAGE["image_size"], IMAGE["image_size"]), generator=generator, dtype=torch.float64)


@torch.no_grad()
def logits_of(name: str) -> Tensor:
    if name in IMAGES:
        return image_model(name)(pixel_values=pixels()).logits
    return text_model(name)(token_ids(), use_cache=False).logits


def greedy_of(name: str) -> dict[str, Any]:
    """New tokens, by plain `generate` with a cache and without one."""
    model, ids = text_model(name), token_ids()
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
    rows = [model.generate(ids, use_cache=cached, **options)[:, ids.shape[1] :].tolist() for cached in (True, False)]
    assert rows[0] == rows[1], f"{name}: with a cache {rows[0]}, without {rows[1]}"
    return rows[0]


def models() -> dict[str, Any]:
    """Logits by model, as tensors, and hashes of them; greedy tokens."""
    logits = {name: logits_of(name) for name in (*TEXTS, *IMAGES)}
    return logits | {
        MACHINE: machine(),
        SAME_MACHINE: {name: bits([tensor]) for name, tensor in logits.items()},
        "greedy": {name: greedy_of(name) for name in TEXTS if "{" not in name},
    }
