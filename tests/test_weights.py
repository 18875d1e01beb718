"""Files of weights: names that wrappers changed, tensors that are no weights, tensors without a place."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from conftest import shared
from headwater import HeadwaterError, HeadwaterForCausalLM, HeadwaterForImageClassification
from headwater.conversion import from_transformers, read_foreign
from headwater.models.weights import map_unwrapped_names
from headwater_lab.evaluation.candidates import Candidate
from headwater_lab.training.checkpoints import begin_with, load_model
from headwater_lab.training.hub_models import open_model
from headwater_lab.training.saving import write_model

KINDS = ["int8", "bool", "complex64", "float8_e4m3fn"]
SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8
)
WRAPPED = {
    "before all": lambda name: f"module._orig_mod.{name}",
    "each block": lambda name: name.replace("layers.0.", "layers.0._orig_mod.").replace(
        "layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module."
    ),
}


def stored(folder, change) -> None:
    """Change the tensors of a folder: {name: tensor} -> {name: tensor}, in each of its files."""
    for file in folder.glob("*.safetensors"):
        save_file(change(load_file(file)), file, {"format": "pt"})


def as_kind(kind: str):
    return lambda tensors: {name: tensor.to(getattr(torch, kind)) for name, tensor in tensors.items()}


@pytest.fixture
def own(tmp_path):
    shared().save_pretrained(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture
def llama(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_no_weights_are_refused_wherever_they_enter(own, llama, kind):
    for folder in (own, llama):
        stored(folder, as_kind(kind))
    theirs = Candidate("llama", str(llama), LlamaConfig(**SMALL), None, 0, False, False)  # type: ignore[arg-type]
    readers = (
        lambda: load_model(own),
        lambda: HeadwaterForCausalLM.from_pretrained(own),
        lambda: AutoModelForCausalLM.from_pretrained(own),
        lambda: AutoModel.from_pretrained(own),
        lambda: begin_with(own, shared(), [], distributed=False),
        lambda: from_transformers(llama),
        lambda: read_foreign(llama, "resformer"),
        lambda: theirs.load_model("cpu", "auto"),
        lambda: open_model(str(llama)),
    )
    for read in readers:
        with pytest.raises(HeadwaterError, match=f"is stored as {kind}"):
            read()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_weights_of_any_real_kind_are_read(own, kind):
    stored(own, as_kind(kind))
    expected = shared().model.norm.weight.to(getattr(torch, kind)).double()
    for model in (HeadwaterForCausalLM.from_pretrained(own), load_model(own)):
        assert torch.equal(model.model.norm.weight.double(), expected)


def test_a_shard_or_a_pickle_of_another_kind_is_refused(tmp_path):
    shared().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    save_file(as_kind("int8")(load_file(shard)), shard, {"format": "pt"})
    for read in (load_model, HeadwaterForCausalLM.from_pretrained):
        with pytest.raises(HeadwaterError, match="is stored as int8"):
            read(tmp_path)
    pickled = tmp_path / "pickled"
    shared().config.save_pretrained(pickled)
    torch.save(as_kind("int8")(shared().state_dict()), pickled / "pytorch_model.bin")
    with pytest.raises(HeadwaterError, match="is stored as int8"):
        HeadwaterForCausalLM.from_pretrained(pickled)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_names_of_wrappers_are_left_out_wherever_they_stand(own, llama, wrap):
    foreign = from_transformers(llama).state_dict()
    for folder in (own, llama):
        stored(folder, lambda tensors: {wrap(name): tensor for name, tensor in tensors.items()})
    begun = shared()
    begin_with(own, begun, [], distributed=False)
    loaded = HeadwaterForCausalLM.from_pretrained(own)
    for state in (loaded.state_dict(), load_model(own).state_dict(), begun.state_dict()):
        assert all(torch.equal(tensor, state[name]) for name, tensor in shared().state_dict().items())
    for model in (from_transformers(llama), read_foreign(llama, "resformer", mechanisms={})):
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in foreign.items())
    loaded.save_pretrained(own / "again")
    assert load_file(own / "again" / "model.safetensors").keys() == loaded.state_dict().keys()


def test_a_module_may_be_called_module_and_no_tensor_is_lost():
    names = ["layers.0.module.weight", "layers.0._orig_mod.norm.weight"]
    plain = map_unwrapped_names(names, "a file", known={"layers.0.module.weight", "layers.0.norm.weight"})
    assert list(plain.values()) == ["layers.0.module.weight", "layers.0.norm.weight"]
    assert map_unwrapped_names(["my_module.weight"], "a file") == {"my_module.weight": "my_module.weight"}
    with pytest.raises(HeadwaterError, match=r"are both 'a\.weight' once"):
        map_unwrapped_names(["a.weight", "a.module.weight"], "a file")


def test_a_tensor_without_a_place_is_refused_by_a_run_that_begins_with_it(tmp_path):
    path = write_model(tmp_path / "own", shared())
    begin_with(path, shared(), [], distributed=False)
    stored(path, lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    with pytest.raises(HeadwaterError, match=r"1 are not in the model, model.layers.0.self_attn.q_proj.bias"):
        begin_with(path, shared(), [], distributed=False)


def test_folders_of_other_models_are_not_loaded_as_ours(tmp_path, own, llama):
    GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    for folder in (llama, tmp_path / "gpt2"):
        for kind in (HeadwaterForCausalLM, HeadwaterForImageClassification):
            with pytest.raises(HeadwaterError, match=r"AutoModelForCausalLM.*headwater retrofit"):
                kind.from_pretrained(folder)
    with pytest.raises(HeadwaterError, match="is a model of type 'headwater'"):
        HeadwaterForImageClassification.from_pretrained(own)
    content = json.loads((own / "config.json").read_text())
    del content["model_type"]
    (own / "config.json").write_text(json.dumps(content))
    HeadwaterForCausalLM.from_pretrained(own)


def test_a_config_that_only_says_that_its_weights_are_quantized_is_refused(tmp_path):
    """bitsandbytes would run on them, and fail far from here."""
    pytest.importorskip("bitsandbytes")
    shared().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadwaterError, match=r"no weight in .* is quantized; remove that field"):
        HeadwaterForCausalLM.from_pretrained(tmp_path)
