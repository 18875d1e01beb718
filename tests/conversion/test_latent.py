"""Models whose keys and values become one latent, against equations written plainly."""

import itertools

import pytest
import torch
from transformers import DynamicCache

from conftest import assert_near, build, decode, tokens
from headwater import HeadwaterError
from headwater.conversion.convert import fit_outputs, sample_inputs
from headwater.conversion.latent import (
    as_complex,
    convert_layer,
    fit_latent,
    latent_config,
    make_latent,
    mix_heads,
    weigh_errors,
)
from headwater.models.cache import cache_bytes
from headwater.testing.naive import Reference

PARTIAL = dict(rope_parameters=dict(rope_theta=10_000.0, partial_rotary_factor=0.5))


def make_redundant(rank, **fields):
    """A model with two key heads, the second a multiple of the first for each pair, and values of this rank."""
    model = build(**fields)
    pairs = model.config.rotary_dim // 2
    for layer in model.model.layers:
        attention, d = layer.self_attn, model.config.head_dim
        with torch.no_grad():
            first, second = attention.k_proj.weight.unflatten(0, (2, d))
            phase = torch.polar(torch.rand(pairs, 1) + 0.5, torch.rand(pairs, 1))
            turned = as_complex(first[None], pairs)[0] * phase
            second[: 2 * pairs] = torch.cat((turned.real, turned.imag)).to(second.dtype)
            values = attention.v_proj.weight
            values.copy_(torch.randn(len(values), rank, dtype=values.dtype) @ torch.randn(rank, 32).to(values) / 5)
    return model


@pytest.mark.parametrize(("fields", "width"), [({}, 5), (PARTIAL, 5 + 2 * 4)], ids=["rope", "partial rope"])
def test_a_latent_that_is_wide_enough_loses_nothing(fields, width):
    torch.manual_seed(0)
    model = make_redundant(5, **fields)
    latent = make_latent(model, tokens(4, 40), width)
    ids = tokens(2, 30, seed=1)
    assert_near(latent(ids).logits, model(ids).logits, 1e-6)
    assert latent.config.rotary_dim == model.config.rotary_dim
    assert latent.config.head_dim == model.config.rotary_dim + width
    cache = DynamicCache(config=latent.config)
    assert_near(decode(latent, ids, [7, 1, 22], cache=cache), latent(ids).logits)
    numbers = ids.numel() * latent.config.num_hidden_layers * latent.config.head_dim
    assert cache_bytes(cache) == 8 * numbers, "one vector per token and layer"


def test_the_function_is_that_of_the_approximated_keys_and_values():
    """q·k and v of each head, from scratch: components that lose RoPE, and one estimate of rank `width`."""
    model = build()
    ids = tokens(2, 30, seed=1)
    latent = make_latent(model, tokens(4, 40), 9)
    assert_near(latent(ids).logits[0], Reference(latent.config, dict(latent.state_dict()))(ids[0]))
    attention, converted = model.model.layers[1].self_attn, latent.model.layers[1].self_attn
    assert converted.q_proj.linear.weight.equal(attention.q_proj.weight), "the heads' own projections stay"
    weights = {name: getattr(attention, f"{name}_proj").weight.double() for name in "qkvo"}
    gram, config = sample_inputs(model, tokens(4, 40))[1], model.config
    d, pairs = config.head_dim, config.rotary_dim // 2
    q, k = (as_complex(weights[name].unflatten(0, (-1, d)), pairs) for name in "qk")
    mixing, unmixing = mix_heads(q, k, gram)
    x, y = torch.randn(2, config.hidden_size, dtype=torch.float64)
    keys, queries, _ = convert_layer(weights, gram, config, 9)
    query, key = torch.stack([queries[head] @ weights["q"][8 * head : 8 * head + 8] @ x for head in range(4)]), keys @ y
    for head, pair_angle in itertools.product(range(4), (0.0, 0.7)):
        phase = torch.polar(torch.ones(pairs), pair_angle * torch.arange(1.0, pairs + 1)).to(torch.complex128)
        at_x, at_y = q[head] @ x.to(q.dtype), torch.einsum("pcg,gp->pc", mixing, k @ y.to(k.dtype))
        score = 0.0
        for pair in range(pairs):
            # The first component keeps its phase.
            score += (at_x[pair].conj() * unmixing[pair, head // 2, 0] * phase[pair] * at_y[pair, 0]).real
        turned = torch.view_as_complex(torch.stack((key[:pairs], key[pairs : 2 * pairs]), -1)) * phase
        own = torch.view_as_complex(torch.stack((query[head, :pairs], query[head, pairs : 2 * pairs]), -1))
        assert_near((own.conj() * turned).sum().real, torch.as_tensor(score))
    assert_near(converted.k_proj.weight.double(), keys)


ROPES = {
    "default": {},
    "partial": PARTIAL,
    "llama3": dict(
        rope_parameters=dict(
            rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
    ),
    "yarn": dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
    ),
    "scale": dict(attention_scale=0.9),
}  # fmt: skip


@pytest.mark.parametrize("fields", ROPES.values(), ids=ROPES)
def test_at_one_position_a_latent_of_full_rank_loses_nothing(fields):
    """There it costs nothing that components lose RoPE: all of them must arrive with their heads and factors."""
    model = build(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **fields)
    ids = tokens(2, 12, seed=1)
    latent = make_latent(model, tokens(8, 40), 16)
    positions = torch.full_like(ids, 5)
    assert_near(latent(ids, position_ids=positions).logits, model(ids, position_ids=positions).logits)


def test_an_error_of_a_key_costs_what_its_scores_and_heads_say():
    torch.manual_seed(0)
    queries, output, values, x = (torch.randn(*shape).double() for shape in ((3, 5, 7), (7, 3, 4), (3, 4, 7), (200, 7)))
    expected = torch.zeros(5, dtype=torch.float64)
    for head in range(3):
        added = torch.stack([output[:, head] @ (values[head] @ row) for row in x]).square().sum(1).mean()
        for channel in range(5):
            expected[channel] += added * torch.stack([queries[head, channel] @ row for row in x]).square().mean()
    read = torch.einsum("ohd,ohe->hde", output, output)
    assert_near(weigh_errors(queries, read, values, x.T @ x / 200), expected.sqrt())


def test_the_latent_is_the_best_of_its_rank():
    """Its error is that of the truncated singular value decomposition, and no other map of that rank has less."""
    torch.manual_seed(0)
    keys, values, x = (torch.randn(n, 20, dtype=torch.float64) for n in (8, 12, 500))
    weight_of_keys, output = torch.rand(8).double() + 0.5, torch.randn(12, 12).double()

    def measure_error(down, up):
        gaps = torch.cat((keys, values)) @ x.T - up @ (down @ x.T)
        return float((weight_of_keys[:, None] * gaps[:8]).square().sum() + (output @ gaps[8:]).square().sum())

    down, up = fit_latent(keys, values, weight_of_keys, output.T @ output, x.T @ x / 500, 5)
    weighted = torch.cat((weight_of_keys[:, None] * keys, output @ values)) @ x.T
    least = measure_error(down, up)
    assert least == pytest.approx(float(torch.linalg.svdvals(weighted)[5:].square().sum()), rel=1e-4)
    for _ in range(20):
        assert measure_error(down + 0.01 * torch.randn_like(down), up) > least
        assert measure_error(down, up + 0.01 * torch.randn_like(up)) > least


def test_what_a_channel_writes_is_as_large_as_what_reads_it():
    """In mean squares, of keys relative to the original's. A pair of RoPE has one size."""
    attention, gram = build().model.layers[1].self_attn, sample_inputs(build(), tokens(4, 40))[1]
    weights = {name: getattr(attention, f"{name}_proj").weight.detach().double() for name in "qkvo"}
    weights |= {"q": 100 * weights["q"], "k": weights["k"] / 100}
    keys, queries, values = convert_layer(weights, gram, build().config, 9)
    for channels in (*([pair, pair + 4] for pair in range(4)), *([channel] for channel in range(8, 17))):
        written = keys[channels].square().mean() / weights["k"].square().mean()
        read = queries[:, channels].square().sum() / 4 / len(channels)
        if channels[0] >= 8:
            read += values[:, :, channels[0] - 8].square().sum() / 4
        assert_near(written, read, 1e-9 * float(read))


def test_fitted_outputs_bring_attention_nearer():
    model, rows = build(), tokens(8, 40)
    latent = make_latent(model, rows, 6)

    def read_attention(network):
        outputs = []
        with network.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *call: outputs.append(call[2])):
            network(rows)
        return outputs[0]

    before = (read_attention(latent) - read_attention(model)).square().mean()
    fit_outputs(latent, model, rows)
    assert (read_attention(latent) - read_attention(model)).square().mean() < 0.9 * before


@pytest.mark.parametrize(
    ("fields", "width", "said"),
    [
        ({}, 0, "from 1 to 23"),
        ({}, 24, "from 1 to 23"),
        (dict(qk_norm=True), 4, "qk_norm"),
        (dict(qkv_bias=True), 4, "qkv_bias"),
        (dict(output_bias=True), 4, "output_bias"),
        (dict(position="alibi"), 4, "position 'alibi'"),
        (dict(mechanisms={"kv_shift": {}}), 4, "mechanisms"),
        (dict(sliding_window=5, sliding_layers=[1], sliding_fields=dict(head_dim=12)), 4, "sliding_fields"),
    ],
    ids=str,
)
def test_what_cannot_become_a_latent_is_refused_in_a_sentence(fields, width, said):
    with pytest.raises(HeadwaterError, match=said) as raised:
        latent_config(build(**fields).config, width)
    assert "\n" not in str(raised.value)
