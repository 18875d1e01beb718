"""Quantizers of others: they reach linear layers and parameter tokens, or are refused in a sentence."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config, TorchAoConfig
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from conftest import assert_near, build, config, decode, disturb, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.conversion import add_mechanisms
from headwater.models.quantization import MAPS, check_quantized, torchao_config
from headwater.nn.linear import model_linears
from headwater_lab import grow

try:
    import torchao.quantization as torchao
except ImportError:
    torchao = None
needs_torchao = pytest.mark.skipif(torchao is None, reason="torchao is not installed")

MODELS: list[dict] = [
    {},
    {"pattention": {}},
    {"pattention": {"score": "softmax"}, "kv_shift": {}, "svformer": {}},
    {"pattention": {"frozen": {"query": 4, "feed_forward": 7}}},
    {"pattention": {"ffn_pairs": 64, "top_k": 8, "product_keys": ["feed_forward"]}},
]
every_model = pytest.mark.parametrize("mechanisms", MODELS, ids=lambda m: "+".join(m) + str(len(str(m))))


def made(mechanisms: dict) -> HeadwaterForCausalLM:
    return build(mechanisms).float()


def maps(model: HeadwaterForCausalLM) -> dict[str, torch.Tensor]:
    """What a linear map or a mechanism in its place multiplies with, in the blocks."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.ndim == 2 and ".mechanisms." not in name
    }


def dequantized(model: HeadwaterForCausalLM) -> HeadwaterForCausalLM:
    plain = HeadwaterForCausalLM(copy.deepcopy(model.config)).eval()
    weights = {name: w.dequantize() if name in maps(model) else w for name, w in model.state_dict().items()}
    plain.load_state_dict(weights)
    return plain


def check(model: HeadwaterForCausalLM, original: HeadwaterForCausalLM) -> None:
    ids = tokens(2, 9)
    assert maps(model).keys() == maps(original).keys()
    assert {type(weight) for weight in maps(model).values()} == {torchao.Int8Tensor}
    logits = model(ids, use_cache=False).logits
    assert_near(logits, dequantized(model)(ids, use_cache=False).logits, 1e-4)
    assert (logits - original(ids, use_cache=False).logits).abs().max() > 1e-4
    greedy = dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(ids, **greedy), model.generate(ids, use_cache=False, **greedy))


@needs_torchao
@every_model
def test_a_model_that_is_there(mechanisms):
    original = made(mechanisms)
    model = copy.deepcopy(original)
    torchao.quantize_(model, torchao_config(torchao.Int8WeightOnlyConfig()), filter_fn=None)
    check(model, original)


@needs_torchao
@every_model
def test_loading_saving_and_loading(mechanisms, tmp_path):
    original = made(mechanisms)
    original.save_pretrained(tmp_path / "whole")
    asked = TorchAoConfig(torchao_config(torchao.Int8WeightOnlyConfig()))
    model = HeadwaterForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=asked)
    check(model, original)
    model.save_pretrained(tmp_path / "quantized")
    again = HeadwaterForCausalLM.from_pretrained(tmp_path / "quantized")
    ids = tokens(2, 9)
    assert torch.equal(again(ids).logits, model(ids).logits)


@needs_torchao
def test_a_config_that_would_leave_the_pairs_is_refused(tmp_path):
    made({"pattention": {}}).save_pretrained(tmp_path)
    linear_only = torchao.Int8WeightOnlyConfig()
    with pytest.raises(HeadwaterError, match=r"would leave 30 matrices .*torchao_config"):
        HeadwaterForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(linear_only))
    names = ["mlp", "q_proj", "k_proj", "v_proj", "o_proj"]
    asked = TorchAoConfig(linear_only, modules_to_not_convert=names)
    model = HeadwaterForCausalLM.from_pretrained(tmp_path, quantization_config=asked)
    assert not any(isinstance(weight, torchao.Int8Tensor) for weight in maps(model).values())
    check_quantized(HeadwaterForCausalLM(config()), model.hf_quantizer)  # which has none


class LinearOnly(HfQuantizer):
    """Any quantiser that looks for linear layers, as most do; what it would do to their weights is left out."""

    def __init__(self, *spared: str) -> None:
        self.modules_to_not_convert = spared

    def param_needs_quantization(self, model, param_name, **kwargs):
        return isinstance(get_module_from_name(model, param_name)[0], torch.nn.Linear)

    def is_serializable(self):
        return True

    @property
    def is_trainable(self):
        return False


def test_whatever_a_quantizer_passes_by_is_told():
    model = HeadwaterForCausalLM(config({"pattention": {}, "kv_shift": {}}))
    with pytest.raises(HeadwaterError, match="would leave 30 matrices"):
        check_quantized(model, LinearOnly())
    with pytest.raises(HeadwaterError, match="would leave 6 matrices"):
        check_quantized(model, LinearOnly("q_proj", "k_proj", "v_proj", "o_proj"))
    check_quantized(model, LinearOnly("model.layers"))
    check_quantized(HeadwaterForCausalLM(config({"kv_shift": {}})), LinearOnly())
    check_quantized(model, None)


class NothingAtAll(LinearOnly):
    """A quantizer that looks for layers of another class."""

    def param_needs_quantization(self, model, param_name, **kwargs):
        return False


def test_a_quantizer_that_reaches_nothing_is_told():
    model = HeadwaterForCausalLM(config({"kv_shift": {}}))
    with pytest.raises(HeadwaterError, match="has quantized none of the 21 linear layers of the blocks"):
        check_quantized(model, NothingAtAll())
    check_quantized(model, NothingAtAll("model.layers"))
    dequantizes = NothingAtAll()
    dequantizes.quantization_config = FineGrainedFP8Config(dequantize=True)
    check_quantized(model, dequantizes)


# Of a size that the kernels of bitsandbytes take.
SIZES = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2)
BITS: dict[str, dict] = {
    "8 bits": {"load_in_8bit": True},
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
BESIDE_LINEAR: list[dict] = [
    {},
    {"kv_shift": {}, "value_residual": {"mode": "learnable"}, "neutreno": {}},
    {"value_embedding": {"rank": 8}, "output_gate": {"channels": 12}, "smear": {"weight": 0.5}},
    {"ngram_memory": {"rank": 8, "gate": "match"}, "mudd": {}},
    {"short_conv": {"sites": ["keys", "values", "feed_forward_hidden"], "dynamic": ["keys"]}, "persistent_memory": {}},
    {"skip_layer": {}, "depth_attention": {}, "exclusive": {}},
    {"svformer": {}, "dense_former": {}, "embedding_residual": {}},
]


def near(actual: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    return bool((actual - expected).norm() < share * expected.norm())


@torch.no_grad()
@pytest.mark.sampled(4)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mechanisms", BESIDE_LINEAR, ids="+".join)
def test_bitsandbytes_quantizes_linear_layers_and_nothing_else(bits, mechanisms, tmp_path):
    pytest.importorskip("bitsandbytes")
    model, ids = disturb(HeadwaterForCausalLM(config(mechanisms, **SIZES)), 0.05).eval(), tokens(2, 9)
    model.save_pretrained(tmp_path / "full")
    given = BitsAndBytesConfig(**BITS[bits])
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=given, device_map="cpu")
    quantized = {name for name, layer in small.named_modules() if type(layer).__module__.startswith("bitsandbytes")}
    assert quantized == {name for name, _ in model_linears(model) if name != "lm_head"}
    assert small.get_memory_footprint() < model.get_memory_footprint()
    small.save_pretrained(tmp_path / "small")  # before it runs: on a CPU bitsandbytes then packs weights in place
    logits = small(ids, use_cache=False).logits
    assert near(logits, model(ids, use_cache=False).logits, 0.1 if bits == "8 bits" else 0.4)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small", device_map="cpu")
    assert torch.equal(again(ids, use_cache=False).logits, logits)
    assert near(decode(small, ids, [4, 1, 4]), logits, 0.05)
    for change in (lambda: grow(small, num_hidden_layers=4), lambda: add_mechanisms(small, {"backout": {}})):
        with pytest.raises(HeadwaterError, match="This model is quantized"):
            change()


@torch.no_grad()
@pytest.mark.parametrize("mechanisms", BESIDE_LINEAR, ids="+".join)
def test_dynamic_quantization_reaches_every_linear_layer(mechanisms):
    model, ids = disturb(HeadwaterForCausalLM(config(mechanisms, **SIZES)), 0.05).eval(), tokens(2, 9)
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    linear = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
    dynamic = {name for name, layer in small.named_modules() if isinstance(layer, torch.ao.nn.quantized.dynamic.Linear)}
    assert dynamic == linear
    assert near(small(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 0.1)
    assert small.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_dynamic_quantization_of_parameter_tokens_is_refused():
    model, ids = build({"pattention": {}}), tokens(1, 5)
    before = model(ids).logits
    with pytest.raises(HeadwaterError, match=r"would leave Pattention's parameter tokens unquantized; .*torchao"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert torch.equal(model(ids).logits, before)


@torch.no_grad()
def test_fine_grained_fp8_takes_the_layers_of_the_blocks():
    """Which layers become FP8's; to compute with them takes a GPU."""
    with torch.device("meta"):
        model = HeadwaterForCausalLM(config({"value_embedding": {}, "mudd": {}}))
        linear = {name for name, _ in model_linears(model) if name != "lm_head"}
        spared = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        replace_with_fp8_linear(model, spared, FineGrainedFP8Config())
    assert {name for name, layer in model.named_modules() if type(layer).__name__ == "FP8Linear"} == linear


@pytest.mark.skipif(torchao is not None, reason="torchao is installed")
def test_torchao_is_asked_for():
    with pytest.raises(HeadwaterError, match="pip install torchao"):
        torchao_config(None)


def test_the_pattern_names_the_matrices_of_all_blocks():
    names = ["layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight", "layers.1.mlp.frozen_key"]
    others = [
        "lm_head.weight",
        "layers.0.self_attn.mechanisms.low_rank_kv.keys",
        "layers.0.self_attn.mechanisms.smear.gate.weight",
    ]
    pattern = MAPS.removeprefix("re:")
    assert [name for name in names + others if re.fullmatch(pattern, name)] == names
