"""Convolutions of each channel over the last few tokens."""

import pytest
import torch
from transformers.models.inkling.modeling_inkling import InklingShortConvolution

from conftest import assert_near, build, config, decode, document_positions, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM, kernels
from headwater.mechanisms import ShortConv
from headwater.models.cache import HeadwaterLayer
from headwater.testing.naive import reference

PLACES = [
    "queries",
    "keys",
    "values",
    "attention_input",
    "attention_output",
    "feed_forward_input",
    "feed_forward_output",
]


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_inklings(dtype):
    """Theirs at once, ours at once and in chunks with the raw tokens of a cache."""
    theirs = InklingShortConvolution(24, 4, 0, 0)
    ours = ShortConv({"keys": (3, 8)}).to(dtype)
    with torch.no_grad():
        ours.keys_taps.copy_(theirs.conv1d.weight[:, 0].flip(1).T.view(4, 3, 8))
        x = torch.randn(2, 11, 24).to(dtype)
        expected = theirs(x)
        whole, cache = ours(split(x, 3), "keys"), HeadwaterLayer()
        chunks = [ours(split(part, 3), "keys", tail=cache) for part in x.split([5, 1, 1, 4], 1)]
    tolerance = 5e-6 if dtype == torch.float32 else 2**-7
    assert whole.dtype == expected.dtype == dtype
    assert ours.keys_taps.dtype == torch.float32
    assert_near(whole.transpose(1, 2).flatten(2).double(), expected.double(), tolerance)
    assert_near(torch.cat(chunks, 2).double(), whole.double(), tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_autograd_function_equals_the_plain_form(dtype):
    conv, x = ShortConv({"values": (2, 6)}, residual=False), torch.randn(2, 2, 9, 6).to(dtype).requires_grad_()
    conv = conv.double() if dtype == torch.float64 else conv
    found = []
    for off in (False, True):
        x.grad = conv.zero_grad()
        with kernels.plain() if off else torch.enable_grad():
            y = conv(x, "values")
            (y * torch.arange(6)).sum().backward()
        found.append((y.double(), x.grad.double(), conv.values_taps.grad.double()))
    for fused, plain in zip(*found, strict=True):
        assert_near(fused, plain, 1e-12 if dtype == torch.float64 else 2e-2)


def test_a_model_with_it_everywhere_equals_the_equations():
    model, ids = build({"short_conv": {"on": PLACES, "window": 3}}, qk_norm=True), tokens(1, 7)
    logits = model(ids, use_cache=False).logits
    assert_near(logits[0], reference(model)(ids[0]), 1e-12)
    assert_near(decode(model, ids, [3, 1, 3]), logits)


def test_documents_are_apart():
    model, ids = build({"short_conv": {"on": PLACES}}), tokens(1, 9)
    packed = model(ids, position_ids=document_positions([[2, 6, 1]]), use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in ids.split([2, 6, 1], 1)]
    assert_near(packed, torch.cat(alone, 1))


def test_parameters_are_where_they_act():
    model = HeadwaterForCausalLM(config({"short_conv": {"on": ["keys", "feed_forward_output"], "layers": [1]}}))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if "short_conv" in name}
    assert shapes == {
        "model.layers.1.self_attn.mechanisms.short_conv.keys_taps": (4, 2, 8),
        "model.layers.1.mechanisms.short_conv.feed_forward_output_taps": (4, 4, 8),
    }
    plan = model.config.layer_plans[1]
    assert plan.acts == (("projected", "short_conv"), ("feed_forward_output", "short_conv"))
    assert [tail[:2] for tail in plan.tails] == [("k", 3), ("x", 3)]


def test_a_stream_that_heads_do_not_divide():
    model, ids = build({"short_conv": {"on": ["attention_input"]}}, head_dim=12), tokens(2, 8)
    assert model.model.layers[0].mechanisms["short_conv"].attention_input_taps.shape == (4, 1, 32)
    assert_near(decode(model, ids, [3, 1, 4]), model(ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": ["key"]}, "no place 'key' to be on; did you mean 'keys'"),
        ({"on": []}, "on is empty"),
        ({"window": 1}, "window must be at least 2"),
        ({"layers": [4]}, "between 0 and 2"),
    ],
)
def test_contradictory_options(options, message):
    with pytest.raises(HeadwaterError, match=message):
        config({"short_conv": options})


def test_there_is_something_to_convolve():
    with pytest.raises(HeadwaterError, match="share with others"):
        config({"svformer": {"share": "both"}, "short_conv": {"layers": [1, 2]}})
