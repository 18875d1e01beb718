"""Image models looked into: attention over patches, their similarity, parameter tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from headwater.nn.patches import raster_positions
from headwater.util.errors import HeadwaterError
from headwater_lab.data.images import image_processor
from headwater_lab.inspection import check_alike, inspect_model, to_json
from headwater_lab.inspection.images import ImageSample
from headwater_lab.inspection.inspection import InspectedText
from headwater_lab.inspection.pictures import attention_picture, heads_picture
from headwater_lab.inspection.watch import SHOWN, read_sample
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.loop import train
from headwater_lab.training.saving import write_model
from headwater_lab.training.trained_models import open_trained
from vision.images import image_model, images, with_a_processor

GRID = (3, 4)
EVERYTHING = {"pattention": {"attention_pairs": 7, "ffn_pairs": 13}, "kv_shift": {}, "neutreno": {}}


def sample(count=3, first=1, grid=GRID):
    return ImageSample(
        {"pixel_values": images(count, 3 * grid[0], 4 * grid[1])},
        names=[f"image {number}" for number in range(count)],
        grid=grid,
        first=first,
        middle=[0.5] * 3,
        spread=[0.5] * 3,
    )


KINDS = [dict(), dict(register_tokens=2), dict(pooling="mean"), dict(pooling="mean", position="rope")]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_maps_and_similarity_are_those_of_the_models_own_outputs(kind):
    model = image_model({"kv_shift": {}}, stop_at_rows=True, **kind)
    first = model.config.first_patch
    seen = sample(first=first)
    found = read_sample(model, seen)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**seen.inputs, output_attentions=True, output_hidden_states=True)
    asks = [0] if kind.get("pooling") != "mean" else range(first, first + 12)
    for number, look in enumerate(found.looks):
        for layer, attention in enumerate(out.attentions):
            a = attention[number]
            heads = [[sum(float(a[h, t, first + s]) for t in asks) / len(asks) for s in range(12)] for h in range(4)]
            assert np.array(look[layer]).ravel() == pytest.approx(np.mean(heads, 0))
        assert np.shape(look) == (3, *GRID)
    # Between patches only; the last hidden state that transformers returns has been normed.
    for layer, x in enumerate(out.hidden_states[:3]):
        unit = torch.nn.functional.normalize(x[:, first:], dim=-1)
        pairs = [float(unit[b, s] @ unit[b, t]) for b in range(3) for s in range(12) for t in range(12) if s != t]
        assert found.hidden[layer] == pytest.approx(np.mean(pairs))
    # Every token sees all, and the previous patch is one of the same row.
    weights = torch.stack(out.attentions)
    entropy = -(weights * weights.log()).sum(-1).mean((1, 3))
    assert torch.tensor(found.entropy) == pytest.approx(entropy)
    assert torch.tensor(found.normalized_entropy) == pytest.approx(entropy / np.log(12 + first))
    has = [first + patch for patch in range(12) if patch % 4]
    before = torch.stack([weights[..., t, t - 1] for t in has]).mean((0, 2))
    assert torch.tensor(found.previous_token) == pytest.approx(before)
    if kind.get("pooling") == "mean":
        assert found.first_token is None
    else:
        assert torch.tensor(found.first_token) == pytest.approx(weights[..., 0].mean((1, 3)))


def test_shifted_values_are_those_of_the_same_row():
    """e[t, t-1] = β1·a[t, t-1] + β2·a[t, t], for every patch but the first of a row."""
    model = image_model({"kv_shift": {"keys": False}}, stop_at_rows=True, num_key_value_heads=4)
    seen = sample()
    found = read_sample(model, seen)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**seen.inputs, output_attentions=True).attentions
    before = raster_positions(GRID, 1, True, torch.device("cpu"))[0]
    has = [t for t in range(13) if before[t] >= 1]
    assert len(has) == 9
    for layer, block in enumerate(model.model.layers):
        beta = block.self_attn.mechanisms["kv_shift"].show_windows()["v"].detach()
        expected = sum(beta[0] * weights[layer][:, :, t, t - 1] + beta[1] * weights[layer][:, :, t, t] for t in has)
        assert found.previous_token_effective[layer] == pytest.approx((expected.mean(0) / len(has)).tolist())


def test_parameter_tokens_name_their_patches():
    model = image_model(EVERYTHING)
    seen = sample(count=3)
    found = read_sample(model, seen)
    contributions = {}
    mlp = model.model.layers[1].mlp
    handle = mlp.register_forward_hook(lambda module, inputs, _: contributions.update(c=module.show_firing(*inputs)))
    with torch.no_grad():
        model(**seen.inputs)
    handle.remove()
    (map,) = [one for one in found.maps if (one.layer, one.place) == (1, "mlp")]
    where = contributions["c"][:, :, map.strongest[0].pair]
    image, place = divmod(int(where.flatten().argmax()), 13)
    best = map.strongest[0].tokens[0]
    assert (best.before, best.after) == ("", "")
    patch = divmod(place - 1, 4)
    assert best.token == f"image {image}: " + (
        f"row {patch[0]}, column {patch[1]}" if place else "token 0 before the patches"
    )


@pytest.fixture
def checkpoint(tmp_path):
    """Makes image checkpoints: mechanisms, name, fields of the config -> folder."""

    def make(mechanisms=None, name="model", processor=True, **changes):
        model = image_model(mechanisms, **changes)
        preparer = image_processor((9, 16), model.config.num_channels, [0.5] * 3, [0.5] * 3) if processor else None
        return write_model(tmp_path / name, model, preparer)

    return make


@pytest.fixture
def files(tmp_path):
    """Two files, one of another size and grey."""
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 255, (9, 16, 3), np.uint8)).save(tmp_path / "a.png")
    Image.fromarray(draw.integers(0, 255, (40, 30), np.uint8)).save(tmp_path / "b.png")
    (tmp_path / "no.png").write_text("no image")
    return [tmp_path / "a.png", tmp_path / "b.png"]


@pytest.mark.slow
def test_files_side_by_side(run, checkpoint, files, tmp_path):
    first, second = checkpoint(EVERYTHING, "first"), checkpoint({"value_residual": {}}, "second", num_hidden_layers=2)
    given = [part for file in files for part in ("--image", file)]
    code, out, _ = run("inspect", first, second, *given, "--out", tmp_path / "out")
    assert code == 0
    for words in ("patch similarity", "attention to the class token", "previous patch", "strongest pairs"):
        assert words in out
    assert "induction" not in out
    content = json.loads((tmp_path / "out" / "inspect.json").read_text())
    one, other = content["models"]
    assert one["text"] is one["induction"] is None
    assert one["images"]["names"] == ["a.png", "b.png"]
    assert one["images"]["patches"] == list(GRID)
    assert np.shape(other["read"]["looks"][1]) == (2, *GRID)
    pictures = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert pictures == ["inspect-attention.png", "inspect-heads.png", "inspect-scalars.png", "inspect.json"]
    again = [inspect_model(open_trained(path), path.name, images=files) for path in (first, second)]
    assert json.loads(json.dumps(to_json(again))) == content


@pytest.mark.slow
def test_drawn_as_in_the_json(checkpoint, files):
    found = [inspect_model(open_trained(checkpoint(EVERYTHING)), "model", images=files)]
    (one,) = to_json(found)["models"]
    drawn = [np.asarray(axes.images[0].get_array()) for axes in attention_picture(found).axes if axes.images]
    maps = [np.array(map) * 13 for look in one["read"]["looks"] for map in look]
    shown = [array for array in drawn if array.shape == GRID]
    assert len(shown) == len(maps)
    assert all(np.allclose(a, b) for a, b in zip(shown, maps, strict=True))
    # A file of another size is drawn as the model gets it.
    assert sum(array.shape == (9, 16, 3) for array in drawn) == 2
    assert "class token" in {axes.get_title(loc="left").strip() for axes in heads_picture(found).axes}


@with_a_processor
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "pass images with --image FILE, or --scalars"),
        (["model", "--text", "a.png"], "a model of images, and --text is for text"),
        (["model", "--image", "a.png", "--context", "32"], "--context is for text"),
        (["model", "--image", "a.png", "--rows", "3"], "--rows is the number of held-out images"),
        (["model", "--image", "none.png"], "none.png cannot be read"),
        (["model", "--image", "no.png"], "no.png is not an image"),
        (["bare", "--image", "a.png"], "has no preprocessor_config.json"),
        (["patch", "--image", "a.png"], "Images of one patch"),
        (["two", "--image", "a.png"], "takes 2"),
    ],
)
def test_mistakes_get_one_sentence(run, checkpoint, files, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    makes = {"bare": dict(processor=False), "patch": dict(patch_size=[9, 16]), "two": dict(num_channels=2)}
    checkpoint({"kv_shift": {}}, arguments[0], **makes.get(arguments[0], {}))
    code, out, err = run("inspect", *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("headwater: ")
    assert message in line


def test_scalars_of_an_image_model_need_no_images(run, checkpoint):
    shared = {"value_residual": {"mode": "learnable_plus"}, "kv_shift": {}}
    code, out, _ = run("inspect", checkpoint(shared, processor=False), "--scalars")
    assert code == 0
    assert "λ1 (value_residual)" in out
    assert "entropy" not in out


def test_images_for_a_model_of_text_are_refused(run, files, tmp_path):
    from conftest import build

    folder = write_model(tmp_path / "text", build())
    code, _, err = run("inspect", folder, "--image", files[0])
    assert code == 2
    assert "a model of text" in err


@with_a_processor
def test_models_of_text_and_of_images_are_not_put_side_by_side(checkpoint, files):
    one = inspect_model(open_trained(checkpoint()), "images", images=files)
    check_alike([one, one])
    with pytest.raises(HeadwaterError, match="inspect them apart"):
        check_alike([one, replace(one, images=None, text=InspectedText(1, 16))])


@with_a_processor
def test_by_default_held_out_images(tmp_path):
    recipe = {
        "name": "digits",
        "model": {"patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {"kind": "digits", "channels": 1, "workers": 1},
        "training": {"steps": 1, "batch_size": 8, "learning_rate": 0.01},
    }
    train(parse(recipe, "test"), tmp_path / "run")
    one = inspect_model(open_trained(tmp_path / "run"), "run", rows=20)
    assert len(set(one.images.names)) == 20
    assert len(one.read.looks) == len(one.images.pictures) == SHOWN
    assert one.images.pictures[0].shape == (8, 8)
    assert 0 <= min(map(np.min, one.images.pictures)) < max(map(np.max, one.images.pictures)) <= 1
