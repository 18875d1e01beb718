"""Image models against the equations, in fp64: positions, pooling, every mechanism alone and in random combinations."""

import json
import random
import typing
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from images import image_model, images, vision_config

from conftest import assert_near
from headwater import HeadwaterError
from headwater.plugins.mechanisms import MECHANISMS, resolve
from references import reference

POSITIONS = ("learned", "sincos", "rope", "none")
POOLING = ("token", "mean")
SHIFT = {"kv_shift": {"window": 3, "queries": True}}
# Options whose values are no choice among a few.
MORE = {
    "kv_shift": [{"window": 3}, {"window": 4, "queries": True}],
    "value_residual": [
        *(
            {"mode": mode, "target": target}
            for mode in ("constant", "learnable")
            for target in ("queries", "keys", "hidden")
        ),
        {"mode": "learnable", "target": "probabilities"},
        {"mode": "sparse", "layers": [2]},
    ],
    "svformer": [{"source": 1}, {"share": "both"}],
    "skip_layer": [{"layers": 1}, {"layers": 1, "source": "alias"}],
    "pattention": [
        {"attention_pairs": 7, "ffn_pairs": 11},
        {"ffn_pairs": 36, "top_k": 5, "product_keys": ["feed_forward"]},
    ],
    "neutreno": [{"weight": 0.2}],
    "depth_attention": [{"queries": 3, "block": 2}],
    "dense_former": [{"dilation": 2}, {"period": 2}],
}


def choices(name: str) -> list[dict]:
    """Options of a mechanism that a model of images accepts: the defaults, and each value of every option."""
    options = resolve(name).Options
    hints = typing.get_type_hints(options)
    found: list[dict] = [{}, *MORE.get(name, [])]
    for field in fields(options):
        members = (hints[field.name], *typing.get_args(hints[field.name]))
        values = [v for m in members if typing.get_origin(m) is typing.Literal for v in typing.get_args(m)]
        values = [not field.default] if hints[field.name] is bool else values
        found += [{field.name: value} for value in values if value != field.default]
    return [one for one in found if accepted({name: one})]


def accepted(mechanisms: dict, **changes) -> bool:
    try:
        vision_config(mechanisms, **changes)
    except (HeadwaterError, StrictDataclassError):
        return False
    return True


ALONE = [{name: options} for name in MECHANISMS.built_in for options in choices(name)]
OF_IMAGES = [name for name in MECHANISMS.built_in if not resolve(name).needs_input_ids]


def drawn(number: int) -> tuple[dict, dict, tuple[int, int]]:
    """Random mechanisms with random options, in a random base, and the size of the images it is given."""
    draw = random.Random(number)
    while True:
        names = draw.sample(OF_IMAGES, draw.randint(2, 5))
        mechanisms = {name: draw.choice(choices(name)) for name in names}
        patch = [draw.randint(1, 4), draw.randint(1, 4)]
        grids = [[draw.randint(1, 4), draw.randint(1, 4)] for _ in range(2)]
        shapes = [[rows * patch[0], columns * patch[1]] for rows, columns in grids]
        base = dict(
            image_size=shapes[0],
            patch_size=patch,
            num_channels=draw.choice([1, 3]),
            position=draw.choice(POSITIONS),
            pooling=draw.choice(POOLING),
            register_tokens=draw.choice([0, 0, 2]),
            stop_at_rows=draw.random() < 0.5,
            parallel_residual=draw.random() < 0.2,
            qk_norm=draw.random() < 0.2,
            norm=draw.choice(["layer_norm", "rms_norm"]),
            feed_forward=draw.choice(["plain", "gated"]),
            hidden_act=draw.choice(["gelu", "silu"]),
            num_key_value_heads=draw.choice([1, 2, 4]),
            attn_implementation=draw.choice([None, "eager"]),
        )
        if accepted(mechanisms, **base):
            return mechanisms, base, draw.choice(shapes)


def check(mechanisms: dict, size: tuple[int, int] | None = None, **changes) -> None:
    """Logits and the gradients of all parameters equal those of the equations."""
    model = image_model(mechanisms, **changes)
    height, width = size or model.config.image_shape
    pixels = images(1, height, width, model.config.num_channels)
    weigh = images(1, 1, 5, 1).flatten()
    logits = model(pixels, interpolate_pos_encoding=True).logits
    naive = reference(model, differentiable=True)
    expected = torch.stack([naive(image) for image in pixels])
    assert_near(logits, expected)
    parameters = list(model.parameters())
    found, wanted = (
        torch.autograd.grad((x @ weigh).sum(), parameters, allow_unused=True, materialize_grads=True)
        for x in (logits, expected)
    )
    for (name, _), one, other in zip(model.named_parameters(), found, wanted, strict=True):
        try:
            assert_near(one, other)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pooling", POOLING)
@pytest.mark.parametrize("position", POSITIONS)
def test_positions_and_pooling(position, pooling):
    check({}, position=position, pooling=pooling)


@pytest.mark.parametrize("pooling", POOLING)
def test_registers(pooling):
    check(SHIFT, size=[6, 20], pooling=pooling, register_tokens=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [[3, 4], [6, 20], [12, 12]], ids=str)
@pytest.mark.parametrize("position", POSITIONS)
def test_images_of_another_size_than_trained_on(position, size):
    check({}, size=size, position=position)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pooling", POOLING)
@pytest.mark.parametrize("rows", [False, True], ids=["raster", "rows"])
def test_a_shift_sees_the_patches_before(rows, pooling):
    check(SHIFT, stop_at_rows=rows, pooling=pooling)


@pytest.mark.sampled(19)
@pytest.mark.parametrize("mechanisms", ALONE, ids=json.dumps)
def test_every_mechanism(mechanisms):
    check(mechanisms)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("number", range(120))
def test_random_combinations(number):
    mechanisms, base, size = drawn(number)
    try:
        image_model(mechanisms, **base)
    except HeadwaterError as error:
        pytest.skip(f"the mechanisms do not go together: {error}")
    check(mechanisms, size, **base)


def test_a_shift_never_looks_at_the_class_token_nor_it_at_patches():
    model = image_model({"kv_shift": {}}).model
    grid, cpu = model.config.grid, torch.device("cpu")
    assert model.prepare_reach(grid, cpu).tolist() == [[0, 0, *[1] * 11]]
    model.config.stop_at_rows, model.config.register_tokens = True, 1
    assert model.prepare_reach(grid, cpu).tolist() == [[0, 0, *[0, 1, 1, 1] * 3]]


def test_keys_made_from_a_latent_have_no_rope_of_images():
    with pytest.raises(HeadwaterError, match="no RoPE of images; set position to learned"):
        vision_config({"low_rank_kv": {}}, position="rope")
    assert image_model({"low_rank_kv": {}})(images(2)).logits.isfinite().all()
