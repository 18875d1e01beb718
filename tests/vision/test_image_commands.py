"""`headwater grow`, `shrink`, `retrofit` and `export` on checkpoints of images."""

import json

import pytest
import torch
from images import image_model, images, with_a_processor
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessor

import headwater_lab as lab
from conftest import assert_near
from headwater import HeadwaterForImageClassification
from headwater.testing import disturb
from headwater_lab.training.checkpoints import load_model
from headwater_lab.training.saving import write_model

PAIRS = {"pattention": {"attention_pairs": 8, "ffn_pairs": 16}}
SIZE = {"height": 9, "width": 16}


@pytest.fixture
def checkpoint(tmp_path):
    """A vision TokenFormer with its image processor."""
    return write_model(tmp_path / "model", image_model(PAIRS).float(), ViTImageProcessor(size=SIZE))


def logits(folder) -> torch.Tensor:
    with torch.no_grad():
        return load_model(folder)(images(2).float()).logits


@pytest.mark.slow
def test_growing_keeps_the_function_and_the_image_processor(run, checkpoint, tmp_path):
    code, out, _ = run("grow", checkpoint, "attention_pairs=12", "ffn_pairs=20", "--out", tmp_path / "grown")
    assert code == 0
    assert "images of noise" in out
    assert_near(logits(tmp_path / "grown"), logits(checkpoint), 1e-5)
    stored = json.loads((tmp_path / "grown" / "preprocessor_config.json").read_text())
    assert stored["size"] == SIZE
    grown = lab.grow(checkpoint, attention_pairs=9)
    assert type(grown) is HeadwaterForImageClassification


@pytest.mark.slow
def test_shrinking_needs_the_data(run, checkpoint, tmp_path):
    for arguments, word in (([], "trained on"), (["--text", "x.txt"], "reads no text")):
        code, _, err = run("shrink", checkpoint, "--attention-pairs", 4, "--out", tmp_path / "small", *arguments)
        assert code == 2
        assert word in err
        assert err.count("\n") == 1


@pytest.mark.slow
def test_a_vit_in_and_back(run, tmp_path):
    config = ViTConfig(
        image_size=24, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    theirs = disturb(ViTForImageClassification(config)).eval()
    theirs.save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "vit")
    code, out, _ = run("retrofit", tmp_path / "vit", "--mechanism", "kv_shift", "--out", tmp_path / "ours")
    assert code == 0
    assert "vit → headwater" in out
    pixels = torch.randn(2, 3, 24, 24)
    ours = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    assert type(ours) is HeadwaterForImageClassification
    assert list(ours.config.mechanisms) == ["kv_shift"]
    with torch.no_grad():
        assert_near(ours(pixels).logits, theirs(pixels).logits, 1e-5)

    assert run("retrofit", tmp_path / "vit", "--out", tmp_path / "plain")[0] == 0
    assert run("export", tmp_path / "plain", "--family", "source", "--out", tmp_path / "back")[0] == 0
    back = AutoModelForImageClassification.from_pretrained(tmp_path / "back")
    assert type(back) is ViTForImageClassification
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in theirs.state_dict().items())
    assert (tmp_path / "back" / "preprocessor_config.json").is_file()


@with_a_processor
def test_commands_of_text_say_so(run, checkpoint):
    for command, word in (("verify", "no cache"), ("generate", "not trained on text")):
        code, _, err = run(command, checkpoint, *["hello"] * (command == "generate"))
        assert code == 2
        assert word in err
        assert err.count("\n") == 1
