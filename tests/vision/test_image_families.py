"""ViT and DeiT of transformers: the same logits and gradients here, and back again the same tensors."""

import copy

import pytest
import torch
from images import image_model, vision_config
from transformers import (
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTModel,
)

from headwater import HeadwaterError, HeadwaterForImageClassification
from headwater.conversion import FAMILIES, add_mechanisms, from_transformers, to_transformers
from headwater.mechanisms.capabilities import AddsToTrainedModel
from headwater.plugins.mechanisms import resolve
from headwater.testing import disturb

SIZES = dict(
    image_size=24, patch_size=8, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48
)
NAMES = {0: "cat", 1: "dog", 2: "owl"}
CASES: dict[str, PreTrainedConfig] = {
    "vit": ViTConfig(**SIZES, num_labels=5),
    "vit, named": ViTConfig(
        **SIZES | dict(image_size=[16, 40]), id2label=NAMES, label2id={n: i for i, n in NAMES.items()}
    ),
    "vit, otherwise": ViTConfig(
        **SIZES | dict(patch_size=[4, 8]),
        qkv_bias=False,
        num_channels=1,
        layer_norm_eps=1e-3,
        hidden_act="relu",
        hidden_dropout_prob=0.1,
    ),
    "deit": DeiTConfig(**SIZES, num_labels=5),
}


def theirs(config: PreTrainedConfig, kernel: str = "sdpa") -> PreTrainedModel:
    """A model of theirs, of which no weight is at its start."""
    torch.manual_seed(0)
    model = FAMILIES[config.model_type].model._from_config(copy.deepcopy(config), attn_implementation=kernel)
    return disturb(model).eval()


def pixels(config: PreTrainedConfig) -> torch.Tensor:
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(3, config.num_channels, height, width, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CASES)
def case(request) -> PreTrainedConfig:
    return CASES[request.param]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return ((a - b).abs().max() / a.abs().max()).item()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_logits_loss_and_gradients_are_the_same(case, kernel):
    model = theirs(case, kernel)
    ours = from_transformers(model)
    ours.set_attn_implementation(kernel)
    labels = torch.tensor([0, 1, 1])
    found, wanted = (m(pixels(case), labels=labels) for m in (ours, model))
    assert distance(wanted.logits, found.logits) <= 1e-5
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)
    found.loss.backward()
    wanted.loss.backward()
    family = FAMILIES[case.model_type]
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    grads = family.read_tensors(grads, ours.config)
    assert grads.keys() == dict(ours.named_parameters()).keys()
    largest = max(grad.abs().max() for grad in grads.values())
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - grads[name]).abs().max()
        assert error <= 1e-5 * max(grads[name].abs().max(), 1e-2 * largest), name


@torch.no_grad()
def test_images_of_another_size(case):
    model = theirs(case)
    if isinstance(case.image_size, list) or isinstance(case.patch_size, list):
        pytest.skip("transformers interpolates square grids only")
    ours = from_transformers(model)
    larger = torch.randn(2, case.num_channels, 40, 16)
    logits = (m(larger, interpolate_pos_encoding=True).logits for m in (model, ours))
    assert distance(*logits) <= 1e-5


@pytest.mark.sampled(2)
def test_back_again_it_is_the_same(case, tmp_path):
    model = theirs(case)
    model.save_pretrained(tmp_path / "theirs")
    ours = from_transformers(tmp_path / "theirs")
    assert ours.config.id2label == model.config.id2label
    ours.save_pretrained(tmp_path / "ours")
    ours = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    assert type(ours) is HeadwaterForImageClassification
    back = to_transformers(ours, case.model_type).eval()
    assert type(back) is type(model)
    assert list(back.state_dict()) == list(model.state_dict())
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())
    before, after = model.config.to_dict(), back.config.to_dict()
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} <= {
        "dtype",
        "architectures",
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(mechanisms={"kv_shift": {}}), "mechanisms"),
        (dict(position="sincos"), "position"),
        (dict(pooling="mean"), "pooling"),
        (dict(register_tokens=1), "register_tokens"),
        (dict(patch_bias=False), "patch_bias"),
        (dict(norm="rms_norm"), "norm"),
        (dict(num_key_value_heads=2), "num_key_value_heads"),
        (dict(drop_path=0.1), "drop_path"),
    ],
)
def test_what_a_vit_cannot_express(changes, named):
    model = HeadwaterForImageClassification(vision_config(**dict(num_key_value_heads=4) | changes))
    with pytest.raises(HeadwaterError, match=f"cannot have {named} "):
        to_transformers(model, "vit")


def test_other_models_are_refused(tmp_path):
    with pytest.raises(HeadwaterError, match="use a ViTForImageClassification"):
        from_transformers(ViTModel(CASES["vit"]))
    with pytest.raises(HeadwaterError, match="use a DeiTForImageClassification"):
        from_transformers(DeiTForImageClassificationWithTeacher(CASES["deit"]))
    DeiTForImageClassificationWithTeacher(CASES["deit"]).save_pretrained(tmp_path)
    with pytest.raises(HeadwaterError, match="Teacher has no classifier of the class token alone; use a DeiT"):
        from_transformers(tmp_path)
    with pytest.raises(HeadwaterError, match="choose a family of the same kind"):
        to_transformers(image_model(), "llama")


@torch.no_grad()
@pytest.mark.parametrize("name", ["kv_shift", "value_residual", "neutreno", "dense_former"])
def test_mechanisms_are_added_at_identity(name):
    ours = from_transformers(theirs(CASES["vit"]))
    if not isinstance(resolve(name), AddsToTrainedModel) or resolve(name).find_identity_options({}) is None:
        pytest.skip("it has no identity")
    added = add_mechanisms(ours, {name: {}})
    assert type(added) is HeadwaterForImageClassification
    images = pixels(CASES["vit"])
    assert distance(ours(images).logits, added(images).logits) <= 1e-6
