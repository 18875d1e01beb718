"""What image models cost: parameters, FLOPs and memory of the real model, and what `headwater plan` prints of them."""

import json

import pytest
import torch
from images import vision_config
from torch.utils.flop_counter import FlopCounterMode

import headwater_lab as lab
from headwater import HeadwaterForImageClassification
from headwater.cost import counts as cost
from headwater.cost import estimate_model
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.util.precision import Precision
from headwater_lab.util.machine_speed import find_hardware

BASES = {
    "vanilla": {},
    "mean": dict(pooling="mean", position="sincos", patch_bias=False),
    "registers": dict(register_tokens=3, qk_norm=True, norm="rms_norm"),
    "rope": dict(position="rope", feed_forward="gated", hidden_act="silu", num_key_value_heads=4),
    **{name: dict(mechanisms={name: {}}) for name in MECHANISMS.built_in if not resolve(name).needs_input_ids},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BASES)
def test_parameters_and_flops_are_those_of_the_real_model(name):
    config = vision_config(**BASES[name], attn_implementation="eager")
    with torch.device("meta"):
        model = HeadwaterForImageClassification(config)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(torch.zeros(1, 3, 9, 16))
    assert sum(cost.parameters(config).values()) == model.num_parameters()
    assert sum(cost.forward_flops(config, config.tokens).values()) == counter.get_total_flops()
    assert cost.training_flops(config, config.tokens) == 3 * counter.get_total_flops()


def kept(model: HeadwaterForImageClassification, count: int) -> int:
    """Bytes that autograd keeps of a forward pass, each storage once, parameters left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(count, 3, 32, 32), labels=torch.zeros(count, dtype=torch.long)).loss
    total = sum(size for size, _ in seen.values())
    del loss
    return total


@pytest.mark.parametrize("name", ["vanilla", "mean", "rope", "value_residual", "pattention"])
def test_activations_are_those_autograd_keeps(name):
    sizes = dict(image_size=32, patch_size=4, hidden_size=64, intermediate_size=None, num_labels=50)
    config = vision_config(**BASES[name] | sizes)
    model = HeadwaterForImageClassification(config).train()
    planned = cost.activation_bytes(config, config.tokens, 4)["kept"]
    assert planned == pytest.approx(kept(model, 4), rel=0.03)


def test_what_fits_and_how_long_it_takes():
    config, device = vision_config(), find_hardware("H100")
    one = estimate_model(config, batch=2, hardware=device, images=1e9, devices=4, precision="32-true", mfu=0.5)
    (at,) = one.at
    assert (at.image_size, at.context) == ((9, 16), 13)
    assert at.activation_bytes == sum(cost.activation_bytes(config, 13, 2).values())
    ceiling = 4 * device.peak(Precision.FP32) / at.training
    assert at.limits.training_ceiling == pytest.approx(ceiling)
    assert at.limits.days == pytest.approx(1e9 / (ceiling * 0.5) / 86400)
    free = device.memory - 16 * sum(one.parameters.values())
    assert at.limits.largest_batch == int(free // (at.activation_bytes / 2))
    assert json.loads(json.dumps(one.to_json()))["total_parameters"] == sum(one.parameters.values())


def test_plan_prints_images(run):
    code, out, _ = run("plan", "vit-b-16", "tokenformer-vit-b-16", "--hardware", "H100", "--images", "384M")
    assert code == 0
    for message in ("224 x 224", "86.57 M", "114.8 M", "FLOPs per image", "images/s", "days for 384 M images"):
        assert message in out
    for not_said in ("cache", "token ", "tokens", "context", "vocabulary"):
        assert not_said not in out.replace("tokenformer", "")
    code, out, _ = run("plan", "vit-b-16", "image_size=384", "--json")
    (one,) = json.loads(out)
    assert one["at"][0]["image_size"] == [384, 384]
    assert one["at"][0]["context"] == 1 + 24 * 24
    code, out, _ = run("plan", "vision/glyphs", "--json")  # with training.ema_decay
    (one,) = json.loads(out)
    assert one["state_bytes"]["average"] == one["state_bytes"]["weights"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["vit-b-16", "gpt2-124m"], "of one kind"),
        (["vit-b-16", "--tokens", "1B"], "budget in images"),
        (["vit-b-16", "--context", "512"], "image_size"),
        (["gpt2-124m", "--images", "1M"], "budget in tokens"),
        (["gpt2-124m", "image_size=32"], "no field 'image_size'"),
        (["vit-b-16", "image_size=30"], "not divisible into patches"),
        (["vit-b-16", "--vocab-size", "5"], "no field 'vocab_size'"),
        (["vit-b-16", "--images", "many"], "--images"),
    ],
)
def test_mistakes_get_one_sentence(run, arguments, word):
    code, out, err = run("plan", *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert word in line


def test_a_checkpoint_is_priced_and_its_fields_are_its_own(run, tmp_path):
    vision_config().save_pretrained(tmp_path)
    code, out, _ = run("plan", tmp_path, "image_size=[18, 16]", "--json")
    assert code == 0
    assert json.loads(out)[0]["at"][0]["image_size"] == [18, 16]
    code, _, err = run("plan", tmp_path, "sliding_window=7")
    assert code == 2
    assert "sliding_window" in err


def test_the_same_from_python():
    (row,) = lab.plan(vision_config(), images=1e6).table()
    assert row["image_size"] == (9, 16)
