"""The config of image models, drop path, and what is refused in one sentence."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from images import image_model, images, vision_config

from headwater import HeadwaterError, HeadwaterForImageClassification, HeadwaterVisionConfig
from headwater.mechanisms import Mechanism
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import sentence
from headwater.util.precision import Precision


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(vocab_size=97), "vocab_size is a field of language models"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings"),
        (dict(sliding_window=4), "sliding_window"),
        (dict(max_position_embeddings=64), "max_position_embeddings"),
        (dict(logit_scale=2.0), "logit_scale"),
        (dict(use_cache=True), "use_cache"),
        (dict(image_size=10), "not divisible into patches"),
        (dict(image_size=2), "smaller than a patch"),
        (dict(image_size=0), "image_size must be at least 1"),
        (dict(image_size=[9, 16, 3]), "height, width"),
        (dict(patch_size=-1), "patch_size"),
        (dict(num_channels=0), "num_channels"),
        (dict(num_labels=0), "num_labels"),
        (dict(drop_path=1.0), "drop_path"),
        (dict(drop_path=-0.1), "drop_path"),
        (dict(register_tokens=-1), "register_tokens"),
        (dict(image_sise=9), "did you mean 'image_size'"),
        (dict(position="alibi"), "position"),
        (dict(pooling="max"), "pooling"),
        (dict(position="sincos", hidden_size=36, num_attention_heads=6, num_key_value_heads=2), ""),
        (dict(position="sincos", hidden_size=34, num_attention_heads=2, num_key_value_heads=2), "divisible by 4"),
        (dict(position="rope", hidden_size=24), "multiple of 4"),
        (dict(position="rope", rope_parameters=dict(rope_type="linear", factor=2.0)), "only 'default'"),
        (dict(position="learned", rope_parameters=dict(rope_theta=5.0)), "leave them out"),
        (dict(mechanisms={"pattention": {}}), "qkv_bias"),
    ],
)
def test_fields_that_cannot_be(changes, word):
    if not word:
        vision_config(**changes)
        return
    if "mechanisms" in changes:
        changes = changes | dict(qkv_bias=True, mlp_bias=False, output_bias=False)
    with pytest.raises((HeadwaterError, StrictDataclassError)) as error:
        vision_config(**changes)
    assert word in sentence(error.value)
    assert "\n" not in sentence(error.value)


@pytest.mark.parametrize(
    ("pixels", "labels", "word"),
    [
        (images(2, 9, 14), None, "not divisible"),
        (images(2, 2, 16), None, "smaller than a patch"),
        (images(2, channels=1), None, "3 channels"),
        (images(2)[0], None, "3 channels"),
        (None, None, "not none"),
        (images(0), None, "1 or more images"),
        (images(2).long(), None, "normalized"),
        (images(2, 12, 16), None, "interpolate_pos_encoding=True"),
        (images(2), torch.tensor([0, 5]), "out of range"),
        (images(2), torch.tensor([0, -1]), "out of range"),
        (images(2), torch.tensor([0, -100]), "out of range"),
        (images(2), torch.tensor([0.0, 1.0]), "labels must be"),
        (images(2), torch.tensor([0]), "labels must be"),
        (images(2), torch.ones(2, 5), "add up to 1"),
        (images(2), torch.tensor([[2.0, -1, 0, 0, 0]] * 2), "add up to 1"),
    ],
)
def test_inputs_that_cannot_be(pixels, labels, word):
    with pytest.raises(HeadwaterError, match=word) as error:
        image_model()(pixels, labels=labels)
    assert "\n" not in str(error.value)


def test_a_mask_is_refused():
    model, pixels = image_model(), images(2)
    with pytest.raises(HeadwaterError, match="takes no attention_mask"):
        model(pixels, attention_mask=torch.ones(2, 13))
    assert torch.equal(model(pixels, attention_mask=None).logits, model(pixels).logits)


def test_labels_are_classes_or_probabilities():
    model, pixels = image_model(), images(3)
    labels = torch.tensor([0, 4, 2])
    exact = model(pixels, labels=labels).loss
    assert torch.equal(exact, model(pixels, labels=labels.int()).loss)
    one_hot = torch.nn.functional.one_hot(labels, 5)
    assert model(pixels, labels=one_hot.double()).loss.item() == pytest.approx(exact.item())
    mixed = 0.7 * one_hot + 0.3 * one_hot.roll(1, 0)
    wanted = 0.7 * exact + 0.3 * model(pixels, labels=labels.roll(1)).loss
    assert model(pixels, labels=mixed.half()).loss.item() == pytest.approx(wanted.item(), rel=1e-3)


def test_drop_path_drops_whole_branches_of_some_images():
    model = image_model(drop_path=0.5, num_hidden_layers=3).train()
    assert [block.drop_path for block in model.model.layers] == [0.0, 0.25, 0.5]
    block = model.model.layers[2]
    dropped = block.drop_output(torch.ones(2000, 4, 8, dtype=torch.float64))
    rows = dropped.flatten(1)
    assert set(rows.unique().tolist()) == {0.0, 2.0}  # what remains is scaled
    assert bool((rows == rows[:, :1]).all())  # an image as a whole
    assert rows[:, 0].mean().item() == pytest.approx(1, abs=0.1)
    pixels = images(2)
    assert not torch.equal(model(pixels).logits, model(pixels).logits)
    model.eval()
    assert torch.equal(model(pixels).logits, model(pixels).logits)


def test_language_models_drop_no_branches_and_are_causal():
    from conftest import build

    model = build()
    assert [block.drop_path for block in model.model.layers] == [0.0] * 3
    assert all(block.self_attn.is_causal for block in model.model.layers)
    assert not any(block.self_attn.is_causal for block in image_model().model.layers)


class ByIds(Mechanism):
    needs_input_ids = True

    class Options:
        pass


def test_a_mechanism_that_reads_ids_is_refused(monkeypatch):
    monkeypatch.setitem(MECHANISMS.added, "by_ids", ByIds)
    with pytest.raises(HeadwaterError, match="images have none"):
        vision_config({"by_ids": {}})


def test_sizes_as_a_pair_and_as_a_number():
    config = HeadwaterVisionConfig(image_size=(32, 64), patch_size=16)
    assert (config.image_size, config.grid, config.tokens, config.first_patch) == ([32, 64], (2, 4), 9, 1)
    config = HeadwaterVisionConfig(image_size=32, patch_size=16, pooling="mean", register_tokens=2)
    assert (config.image_shape, config.tokens, config.first_patch) == ((32, 32), 6, 2)
    again = HeadwaterVisionConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = image_model({"kv_shift": {}, "value_residual": {}}, position="sincos")
    exact = model(images(2)).logits
    found = model.to(dtype)(images(2)).logits
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= 0.05 * exact.abs().max()
    assert isinstance(model, HeadwaterForImageClassification)


@pytest.mark.parametrize("options", [["--memory"], ["--pairs", 2]], ids=["memory", "time"])
def test_bench_train_of_images(run, options):
    code, out, _ = run("bench", "train", "--base", "vit", "--layers", 1, "--width", 64, "--batch-size", 1, *options)
    assert code == 0
    assert "ViT" in out
    code, _, err = run("bench", "train", "--base", "vit", "--context", 8)
    assert (code, "--context has no effect" in err) == (2, True)


def test_less_is_stored_than_by_transformers():
    from headwater_lab.bench.shapes import StepShape
    from headwater_lab.bench.training_speed import image_pair, stored_by_pair

    pair = image_pair(StepShape(layers=2, width=128, batch_size=2), image_size=32, patch_size=4)
    ours, theirs = stored_by_pair(pair, Precision.FP32)
    assert ours <= 0.85 * theirs
