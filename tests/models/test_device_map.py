"""accelerate's placing of parts of a model, as far as a machine with a CPU alone can show it."""

from pathlib import Path

import pytest
import torch

from conftest import build, shared, tokens
from headwater import HeadwaterForCausalLM

accelerate = pytest.importorskip("accelerate")


MECHANISMS = {
    "vanilla": {},
    "svformer": {"svformer": {}},
    "svformer of both": {"svformer": {"share": "both"}},
    "skip_layer": {"skip_layer": {"layers": 1}},
    "value_residual": {"value_residual": {}},
    "dense": {"value_residual": {"mode": "dense"}},
    "learnable_plus": {"value_residual": {"mode": "learnable_plus"}},
    "hidden": {"value_residual": {"target": "hidden", "mode": "learnable"}},
    "dense_former": {"dense_former": {}},
    "neutreno": {"neutreno": {}},
    "pattention": {"pattention": {}},
    "several": {"skip_layer": {"layers": 1}, "value_residual": {"mode": "learnable_plus"}, "dense_former": {}},
    "kv_shift": {"kv_shift": {}},
    "wide kv_shift": {"kv_shift": {"window": 3, "queries": True}},
    "kv_shift and svformer": {"kv_shift": {"variant": "gate"}, "svformer": {}},
}


every_mechanism = pytest.mark.parametrize("mechanisms", MECHANISMS.values(), ids=MECHANISMS)


def device_map(model: HeadwaterForCausalLM, *kept: str) -> dict[str, str]:
    """Everything on disk but the parts whose names start with one of `kept`."""
    parts = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    parts += ["lm_head", *(f"model.layers.{index}" for index in range(len(model.model.layers)))]
    return {name: "cpu" if name.startswith(kept) else "disk" for name in parts}


@torch.no_grad()
def assert_same(actual: HeadwaterForCausalLM, expected: HeadwaterForCausalLM) -> None:
    ids = tokens(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [4]])).long()
    for given in ({}, dict(attention_mask=mask)):
        assert torch.equal(actual(ids, **given).logits, expected(ids, **given).logits)
        options = dict(max_new_tokens=6, do_sample=False, **given)
        assert torch.equal(actual.generate(ids, **options), expected.generate(ids, **options))


def saved(folder: Path, mechanisms: dict, **changes) -> HeadwaterForCausalLM:
    model = build(mechanisms, **changes).float()
    model.save_pretrained(folder)
    return model


@pytest.mark.sampled(9)
@every_mechanism
def test_automatic_map(tmp_path, mechanisms):
    expected = saved(tmp_path, mechanisms)
    assert_same(HeadwaterForCausalLM.from_pretrained(tmp_path, device_map="auto"), expected)


@pytest.mark.sampled(18)
@every_mechanism
@pytest.mark.parametrize("kept", [("model.e", "model.r", "model.layers.0", "lm_head"), ("model.layers.1",)], ids=str)
def test_layers_on_disk(tmp_path, mechanisms, kept):
    expected = saved(tmp_path, mechanisms)
    given = dict(device_map=device_map(expected, *kept), offload_folder=tmp_path / "offloaded")
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path, **given)
    assert all(parameter.is_meta for parameter in loaded.model.layers[2].parameters())
    assert_same(loaded, expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "changes",
    [
        dict(gpt2=True),
        dict(tie_word_embeddings=True),
        dict(qk_norm=True),
        dict(sliding_window=5),
        dict(position="alibi"),
        dict(materialise=True),
        dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), max_position_embeddings=8),
    ],
    ids=str,
)
def test_kinds_of_models_on_disk(tmp_path, changes):
    expected = saved(tmp_path, {"value_residual": {}}, **changes)
    given = dict(device_map=device_map(expected, "model.e"), offload_folder=tmp_path / "offloaded")
    if changes.get("tie_word_embeddings") or changes.get("gpt2"):
        given["device_map"]["lm_head"] = "cpu"
    assert_same(HeadwaterForCausalLM.from_pretrained(tmp_path, **given), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mechanisms", [MECHANISMS["several"], {"pattention": {}}], ids=["several", "pattention"])
def test_scalars_on_disk_stay_wide(tmp_path, mechanisms):
    expected = saved(tmp_path, mechanisms).bfloat16()
    given = dict(device_map=device_map(expected, "model.e"), offload_folder=tmp_path / "offloaded")
    assert_same(HeadwaterForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **given), expected)


def test_automatic_map_under_a_limit(tmp_path):
    """What does not fit goes to disk, block by block."""
    expected = saved(tmp_path, MECHANISMS["several"])
    given = dict(max_memory={"cpu": 60_000}, offload_folder=tmp_path / "offloaded")
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path, device_map="auto", **given)
    places = loaded.hf_device_map
    assert set(map(str, places.values())) == {"cpu", "disk"}
    assert not any(name.startswith("model.layers.") and name.count(".") > 2 for name in places)
    assert_same(loaded, expected)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_model_on_disk_is_saved_whole(tmp_path):
    expected = saved(tmp_path / "first", MECHANISMS["several"])
    given = dict(device_map=device_map(expected, "model.e"), offload_folder=tmp_path / "offloaded")
    HeadwaterForCausalLM.from_pretrained(tmp_path / "first", **given).save_pretrained(tmp_path / "second")
    assert_same(HeadwaterForCausalLM.from_pretrained(tmp_path / "second"), expected)


@pytest.mark.sampled(9)
@every_mechanism
def test_cpu_offload(mechanisms):
    model = accelerate.cpu_offload(build(mechanisms), execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    assert_same(model, shared(mechanisms))


@pytest.mark.sampled(9)
@every_mechanism
@pytest.mark.slow
def test_disk_offload(tmp_path, mechanisms):
    model = accelerate.disk_offload(build(mechanisms), str(tmp_path), execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    assert_same(model, shared(mechanisms))


def test_offload_of_buffers():
    mechanisms = {"pattention": {}}
    model = accelerate.cpu_offload(build(mechanisms), execution_device=torch.device("cpu"), offload_buffers=True)
    assert_same(model, shared(mechanisms))
