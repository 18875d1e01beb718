"""Image models looked into: attention, and similarity of patches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.nn.patches import raster_positions
from headwater.util.errors import HeadwaterError
from headwater_lab.data.images import image_processor
from headwater_lab.inspection import build_tables, check_same_kind, inspect_model, to_json
from headwater_lab.inspection.inspection import SampleSize
from headwater_lab.inspection.inspection_pictures import heads_picture
from headwater_lab.inspection.sample import Sample
from headwater_lab.inspection.watch import read_sample
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.loop import train
from headwater_lab.training.saving import write_model
from headwater_lab.training.trained_models import open_trained
from vision.images import image_model, images, with_a_processor

GRID = (3, 4)


def sample(count=3, first=1, grid=GRID):
    return Sample({"pixel_values": images(count, 3 * grid[0], 4 * grid[1])}, first + grid[0] * grid[1])


KINDS = [dict(), dict(register_tokens=2), dict(pooling="mean"), dict(pooling="mean", position="rope")]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_and_similarity_are_those_of_the_models_own_outputs(kind):
    model = image_model({"kv_shift": {}}, stop_at_rows=True, **kind)
    first = model.config.first_patch
    seen = sample(first=first)
    found = read_sample(model, seen)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**seen.inputs, output_attentions=True, output_hidden_states=True)
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


@pytest.fixture
def checkpoint(tmp_path):
    """Makes image checkpoints: mechanisms, name, fields of the config -> folder."""

    def make(mechanisms=None, name="model", processor=True, **changes):
        model = image_model(mechanisms, **changes)
        preparer = image_processor((9, 16), model.config.num_channels, [0.5] * 3, [0.5] * 3) if processor else None
        return write_model(tmp_path / name, model, preparer)

    return make


@with_a_processor
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "does not record its training data; pass --scalars"),
        (["model", "--text", "a.txt"], "an image model, and --text is for text"),
        (["model", "--context", "32"], "--context is for text"),
        (["model", "--rows", "0"], "--rows must be at least 1 image"),
    ],
)
def test_mistakes_get_one_sentence(run, checkpoint, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    checkpoint({"kv_shift": {}}, arguments[0])
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


@with_a_processor
def test_by_default_held_out_images(tmp_path):
    data = {"kind": "digits", "channels": 1, "workers": 1}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, patch in (("run", 4), ("patch", 8)):
        model = sizes | {"patch_size": patch, "mechanisms": {"kv_shift": {}}}
        training = {"steps": 1, "batch_size": 8, "learning_rate": 0.01}
        train(parse({"name": name, "model": model, "data": data, "training": training}, "test"), tmp_path / name)
    inspected = inspect_model(open_trained(tmp_path / "run"), "run", rows=20)
    (model,) = to_json([inspected])["models"]
    assert model["induction"] is None
    assert model["sample"] == {"rows": 20, "patches": (2, 2), "tokens": 5}
    assert "first token" in {axes.get_title(loc="left").strip() for axes in heads_picture([inspected]).axes}
    _, table = build_tables([inspected])
    labels = " ".join(str(cell) for cell in table.columns[0].cells)
    assert all(words in labels for words in ("token similarity", "attention to the first token", "previous token"))
    assert "induction" not in labels
    check_same_kind([inspected, inspected])
    with pytest.raises(HeadwaterError, match="inspect them separately"):
        check_same_kind([inspected, replace(inspected, sample=SampleSize(1, 16, None))])
    with pytest.raises(HeadwaterError, match="Images of one patch"):
        inspect_model(open_trained(tmp_path / "patch"), "patch")
