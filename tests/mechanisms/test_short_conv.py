"""Convolutions of each channel over the last few tokens."""

import pytest
import torch
from transformers import DynamicCache
from transformers.models.inkling.modeling_inkling import InklingShortConvolution, InklingTextConfig

from conftest import assert_near, build, config, decode, document_positions, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM, kernels
from headwater.config.plan import Stage
from headwater.mechanisms import ShortConv
from headwater.models.cache import HeadwaterLayer
from headwater.nn.cache_name import CACHE
from references import reference

PLACES = [
    "queries",
    "keys",
    "values",
    "attention_input",
    "attention_output",
    "feed_forward_input",
    "feed_forward_hidden",
    "feed_forward_output",
]
EVERYWHERE = {"short_conv": {"sites": PLACES, "window": 3, "dynamic": ["queries", "keys", "values"]}}


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_inklings(dtype):
    """Theirs and ours, at once and in chunks, each with its own cache."""
    theirs = InklingShortConvolution(24, 4, 0, 0)
    their_cache = DynamicCache(config=InklingTextConfig(num_hidden_layers=1))
    ours = ShortConv({"keys": (3, 8)}).to(dtype)
    with torch.no_grad():
        ours.keys_taps.copy_(theirs.conv1d.weight[:, 0].flip(1).T.view(4, 3, 8))
        x = torch.randn(2, 11, 24).to(dtype)
        expected = theirs(x)
        theirs_in_chunks = torch.cat([theirs(part, their_cache) for part in x.split([5, 1, 1, 4], 1)], 1)
        whole, cache = ours(split(x, 3), "keys"), HeadwaterLayer()
        chunks = [ours(split(part, 3), "keys", tail=cache) for part in x.split([5, 1, 1, 4], 1)]
    tolerance = 5e-6 if dtype == torch.float32 else 2**-7
    assert whole.dtype == expected.dtype == dtype
    assert ours.keys_taps.dtype == torch.float32
    assert_near(whole.transpose(1, 2).flatten(2).double(), expected.double(), tolerance)
    assert_near(torch.cat(chunks, 2).double(), whole.double(), tolerance)
    assert_near(torch.cat(chunks, 2).transpose(1, 2).flatten(2).double(), theirs_in_chunks.double(), tolerance)


@torch.no_grad()
def test_dynamic_taps_are_inkling_2s():
    """With their cache on their side and ours on ours, in chunks; and at once."""
    theirs = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    reference = theirs.Inkling2DynamicShortConvolution(24, 20, 3, 4, 0, conv_idx=0)
    ours = ShortConv({"keys": (3, 8)}, dynamic=["keys"], width=20)
    for parameter in reference.parameters():
        parameter.normal_()
    ours.keys_taps.copy_(reference.static_weight.view(4, 3, 8))
    ours.keys_map.weight.copy_(reference.weight_proj.weight)
    x, given = torch.randn(2, 11, 24), torch.randn(2, 11, 20)
    expected = reference(x, given)
    cache = HeadwaterLayer()
    their_cache = DynamicCache(config=theirs.Inkling2TextConfig(num_hidden_layers=1))
    chunks = list(zip(x.split([5, 1, 1, 4], 1), given.split([5, 1, 1, 4], 1), strict=True))
    ours_in_chunks = [ours(split(a, 3), "keys", tail=cache, attention_input=b) for a, b in chunks]
    theirs_in_chunks = [reference(a, b, **{CACHE: their_cache}) for a, b in chunks]
    assert_near(torch.cat(ours_in_chunks, 2).transpose(1, 2).flatten(2), torch.cat(theirs_in_chunks, 1), 5e-6)
    assert_near(ours(split(x, 3), "keys", attention_input=given).transpose(1, 2).flatten(2), expected, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_autograd_function_equals_the_plain_form(dtype):
    conv, x = ShortConv({"values": (2, 6)}, residual=False), torch.randn(2, 2, 9, 6).to(dtype).requires_grad_()
    conv = conv.double() if dtype == torch.float64 else conv
    found = []
    for off in (False, True):
        x.grad = conv.zero_grad()
        with kernels.disable_kernels() if off else torch.enable_grad():
            y = conv(x, "values")
            (y * torch.arange(6)).sum().backward()
        found.append((y.double(), x.grad.double(), conv.values_taps.grad.double()))
    for fused, plain in zip(*found, strict=True):
        assert_near(fused, plain, 1e-12 if dtype == torch.float64 else 2e-2)


def test_a_model_with_it_everywhere_equals_the_equations():
    model, ids = build(EVERYWHERE, qk_norm=True), tokens(1, 7)
    logits = model(ids, use_cache=False).logits
    assert_near(logits[0], reference(model)(ids[0]), 1e-12)
    assert_near(decode(model, ids, [3, 1, 3]), logits)


@pytest.mark.parametrize("residual", [True, False])
def test_one_token_at_a_time(residual):
    model, ids = build({"short_conv": {"sites": ["keys", "feed_forward_input"], "residual": residual}}), tokens(2, 7)
    assert_near(decode(model, ids, [2, 1, 1, 1, 2]), model(ids, use_cache=False).logits)


def test_documents_are_apart():
    model, ids = build(EVERYWHERE), tokens(1, 9)
    packed = model(ids, position_ids=document_positions([[2, 6, 1]]), use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in ids.split([2, 6, 1], 1)]
    assert_near(packed, torch.cat(alone, 1))


def test_dynamic_taps_keep_no_shifted_copy_and_have_their_gradients():
    """The autograd function and the plain form, which a document's start needs no less."""
    conv, found = ShortConv({"values": (2, 6)}, window=3, dynamic=["values"], width=5).double(), []
    x, given = torch.randn(2, 2, 9, 6).double().requires_grad_(), torch.randn(2, 9, 5).double().requires_grad_()
    torch.nn.init.normal_(conv.values_taps)
    reach = document_positions([[4, 5], [2, 7]])
    for off in (False, True):
        x.grad = given.grad = conv.zero_grad()
        with kernels.disable_kernels() if off else torch.enable_grad():
            y = conv(x, "values", reach, attention_input=given)
            (y * torch.arange(6)).sum().backward()
        found.append((y, x.grad, given.grad, *(p.grad.clone() for p in conv.parameters())))
    for fused, plain in zip(*found, strict=True):
        assert_near(fused, plain, 1e-12)


def test_it_is_not_inside_a_feed_forward_that_is_replaced():
    with pytest.raises(HeadwaterError, match="inside the feed-forward of layer 0, which 'pattention' replaces"):
        config({"short_conv": {"sites": ["feed_forward_hidden"]}, "pattention": {}})


def test_parameters_are_where_they_act():
    model = HeadwaterForCausalLM(config({"short_conv": {"sites": ["keys", "feed_forward_output"], "layers": [1]}}))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if "short_conv" in name}
    assert shapes == {
        "model.layers.1.self_attn.mechanisms.short_conv.keys_taps": (4, 2, 8),
        "model.layers.1.mechanisms.short_conv.feed_forward_output_taps": (4, 4, 8),
    }
    plan = model.plans[1]
    assert plan.acts == ((Stage.PROJECTIONS, "short_conv"), (Stage.FEED_FORWARD_OUTPUT, "short_conv"))
    assert [tail[:2] for tail in plan.tails] == [("k", 3), ("x", 3)]


def test_a_stream_that_heads_do_not_divide():
    model, ids = build({"short_conv": {"sites": ["attention_input"]}}, head_dim=12), tokens(2, 8)
    assert model.model.layers[0].mechanisms["short_conv"].attention_input_taps.shape == (4, 1, 32)
    assert_near(decode(model, ids, [3, 1, 4]), model(ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": ["key"]}, "sites cannot contain 'key'; did you mean 'keys'"),
        ({"sites": []}, "sites is empty"),
        ({"dynamic": ["queries"]}, "dynamic cannot contain 'queries'"),
        ({"sites": ["attention_input"], "dynamic": ["attention_input"]}, "list only queries, keys or values"),
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


def test_steps_of_generate_look_for_no_documents():
    """`generate` gives positions; where a token has all that a window reads, no layer masks its taps."""
    model = build({"short_conv": {}})
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, given: seen.append(given["reach"]), with_kwargs=True
    )
    mask = torch.ones(2, 5, dtype=torch.long)
    model.generate(tokens(2, 5), attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert len(seen) == 4
    assert seen[1:] == [None] * 3
    seen.clear()
    mask[0, :3] = 0  # tokens 2, 3 and 4 of row 0 come next, and a window of 4 reads three back
    model.generate(tokens(2, 5), attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [None if reach is None else reach.tolist() for reach in seen[1:]] == [[[2], [3]], None, None]
