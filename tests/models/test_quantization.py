"""torchao on models whose maps are Pattention's pairs: reached, or refused in a sentence."""

import copy

import pytest
import torch
from transformers import TorchAoConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from conftest import assert_near, build, config, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.models.quantization import check_quantized, torchao_config

try:
    import torchao.quantization as torchao
except ImportError:
    torchao = None
needs_torchao = pytest.mark.skipif(torchao is None, reason="torchao is not installed")

MODELS: list[dict] = [
    {},
    {"pattention": {}},
    {"pattention": {"score": "softmax"}, "kv_shift": {}, "svformer": {}},
    {"pattention": {"frozen": [{"query": 4, "feed_forward": 7}] * 3}},
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


@pytest.mark.skipif(torchao is not None, reason="torchao is installed")
def test_torchao_is_asked_for():
    with pytest.raises(HeadwaterError, match="pip install torchao"):
        torchao_config(None)
