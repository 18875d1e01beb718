"""Models whose keys and values are made from one latent, against equations written plainly."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, Qwen2Config, Qwen3Config

from conftest import assert_near, build, decode, disturb, tokens
from headwater import HeadwaterError
from headwater.conversion import from_transformers, to_transformers
from headwater.conversion.calibration import compute_input_grams, fit_outputs
from headwater.conversion.families import find_fitting_family
from headwater.conversion.latent import (
    convert_layer,
    expand_config,
    expand_latent,
    fit_latent,
    latent_config,
    make_latent,
    measure_squares,
    weigh_keys,
)
from headwater.models.cache import cache_bytes

PARTIAL = dict(rope_parameters=dict(rope_theta=10_000.0, partial_rotary_factor=0.5))


NORMED = dict(qk_norm=True, unit_offset_norm=True)
LAYER_NORMED = dict(qk_norm=True, norm="layer_norm")
TWO_KINDS = dict(sliding_window=40, sliding_layers=[1], sliding_fields=dict(rope_parameters=dict(rope_theta=500.0)))


@pytest.mark.parametrize(
    "fields",
    [{}, PARTIAL, dict(position="alibi"), dict(output_bias=True), dict(qkv_bias=True), NORMED, LAYER_NORMED, TWO_KINDS],
    ids=str,
)
def test_a_latent_that_is_wide_enough_loses_nothing(fields):
    """Keys and values of rank 8, of 32 channels, in a latent of as many."""
    model = build(**fields)
    for layer in model.model.layers:
        keys, values = layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight
        torch.manual_seed(0)
        inputs = torch.randn(8, keys.shape[1], dtype=keys.dtype) / 5
        with torch.no_grad():
            for weight in (keys, values):
                weight.copy_(torch.randn(len(weight), 8, dtype=weight.dtype) @ inputs)
    latent = make_latent(model, tokens(4, 40), 8)
    ids = tokens(2, 30, seed=1)
    assert_near(latent(ids).logits, model(ids).logits, 1e-6)
    cache = DynamicCache(config=latent.config)
    assert_near(decode(latent, ids, [7, 1, 22], cache=cache), latent(ids).logits)
    per_token = 8 * latent.config.head_dim + 4 * (latent.config.position == "rope")  # fp64, and the position
    assert cache_bytes(cache) == ids.numel() * latent.config.num_hidden_layers * per_token


def test_half_of_the_cache_of_a_model_without_shared_heads_loses_nothing():
    """Keys and values are maps of an input that is as wide as either."""
    model, ids = build(num_key_value_heads=4), tokens(2, 30, seed=1)
    assert_near(make_latent(model, tokens(4, 40), 32)(ids).logits, model(ids).logits, 1e-6)


def test_what_a_layer_norm_takes_away_changes_no_latent():
    """What all channels of a head have in common."""
    latents = []
    for common in (0, 3):
        model = build(**LAYER_NORMED)
        with torch.no_grad():
            keys = model.model.layers[0].self_attn.k_proj.weight
            keys[:8] += common * keys[8]
        latents.append(make_latent(model, tokens(4, 40), 8)(tokens(2, 30, seed=1)).logits)
    assert_near(latents[1], latents[0], 1e-6)


def test_sizes_that_a_norm_takes_away_change_no_latent():
    """Of a head's keys and queries, which are normed: the latent is chosen by what remains."""
    latents = []
    for key_size, query_size in ((1, 1), (30, 1), (1, 30)):
        model = build(qk_norm=True)
        with torch.no_grad():
            attention = model.model.layers[0].self_attn
            attention.k_proj.weight[:8] *= key_size
            attention.q_proj.weight[8:16] *= query_size
            attention.k_norm.weight[:] = torch.linspace(0.2, 3, 8)
        latents.append(make_latent(model, tokens(4, 40), 8)(tokens(2, 30, seed=1)).logits)
    assert_near(latents[1], latents[0], 1e-3)
    assert_near(latents[2], latents[0], 1e-3)


def test_biases_take_the_mean_of_keys_and_values():
    """Of inputs that differ from their mean in 8 directions, a latent of 8 channels loses nothing."""
    attention = build(qkv_bias=True).model.layers[1].self_attn
    weights = {name: weight.double() for name, weight in attention.state_dict().items()}
    torch.manual_seed(0)
    x = 5 * torch.randn(32).double() + torch.randn(200, 8).double() @ torch.randn(8, 32).double()
    y = torch.nn.functional.pad(x, (0, 1), value=1.0)
    converted = convert_layer(weights, y.T @ y / 200, attention.config, 8)
    for letter, name in (("k", "keys"), ("v", "values")):
        maps, bias = converted[f"mechanisms.low_rank_kv.{name}"], converted[f"mechanisms.low_rank_kv.{name}_bias"]
        made = x @ converted["k_proj.weight"].T @ maps.flatten(0, 1).T + bias.flatten()
        assert_near(made, x @ weights[f"{letter}_proj.weight"].T + weights[f"{letter}_proj.bias"], 1e-4)


def test_channels_of_a_latent_are_as_large_so_that_few_bits_lose_little():
    """Also where few channels of the keys and values hold nearly everything."""
    torch.manual_seed(0)
    maps, x = torch.randn(256, 32, dtype=torch.double), torch.randn(200, 32, dtype=torch.double)
    maps[:3] *= 100
    keys, values = maps.split(128)
    down, _ = fit_latent(
        keys, values, torch.ones(128, dtype=x.dtype), torch.eye(128, dtype=x.dtype), x.T @ x / len(x), 32
    )
    sizes = (x @ down.T).square().mean(0)
    assert sizes.max() < 8 * sizes.mean(), "of 32 channels, unrotated ones are up to 32 times the mean"


@pytest.mark.parametrize(("fields", "name"), [({}, "o"), (NORMED, "q"), (NORMED, "k"), (LAYER_NORMED, "k")], ids=str)
def test_a_layer_that_adds_nothing_is_converted(fields, name):
    model, ids = build(**fields), tokens(2, 30, seed=1)
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, f"{name}_proj").weight.zero_()
    assert make_latent(model, tokens(4, 40), 16)(ids).logits.isfinite().all()


@pytest.mark.parametrize("width", [8, 16])
def test_a_model_with_a_latent_is_a_plain_one_of_low_rank(width):
    latent = make_latent(build(), tokens(4, 40), width)
    plain, ids = expand_latent(latent), tokens(2, 30, seed=1)
    assert plain.config.mechanisms == {}
    assert cache_bytes(plain(ids, use_cache=True).past_key_values) > cache_bytes(latent(ids).past_key_values) * 1.2
    assert_near(plain(ids).logits, latent(ids).logits)
    for layer in plain.model.layers:
        joined = torch.cat((layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight))
        assert torch.linalg.matrix_rank(joined.double(), rtol=1e-6) == width
    assert expand_latent(plain) is plain


SIZES = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
KINDS = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=6)
FOREIGN = [Qwen2Config(**SIZES), Qwen3Config(**SIZES, attention_bias=True), Gemma3TextConfig(**SIZES, **KINDS)]


@pytest.mark.parametrize("described", FOREIGN, ids=lambda described: described.model_type)
def test_models_with_biases_norms_and_windows_return_to_their_family(described):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(described).double()
    disturb(theirs, 0.3)
    model, ids = from_transformers(theirs), tokens(2, 30, seed=1)
    latent = make_latent(model, tokens(4, 40), 8)
    assert_near(decode(latent, ids, [7, 1, 22], cache=DynamicCache(config=latent.config)), latent(ids).logits)
    back = to_transformers(expand_latent(latent), find_fitting_family(expand_config(latent.config)))
    assert_near(back.double().eval()(ids).logits, latent(ids).logits, 1e-5)
    assert type(back) is type(theirs) or described.model_type == "gemma3_text"
    whole = (make_latent(model, tokens(4, 40), 16)(ids).logits - model(ids).logits).abs().mean()
    assert whole < (latent(ids).logits - model(ids).logits).abs().mean(), "a wider latent is nearer"


YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 8**-0.5),
        (PARTIAL, 8**-0.5),
        (dict(attention_scale=0.9), 0.9),
        (dict(rope_parameters=YARN), 8**-0.5 * (0.1 * math.log(4) + 1) ** 2),
    ],
    ids=["default", "partial", "scale", "yarn"],
)
def test_an_error_of_a_key_costs_what_its_scores_and_heads_say(fields, scale):
    """Σ_h E[q_h²]·E‖W_h·v_h‖² over the heads that read a channel; both channels of a pair of RoPE cost the mean."""
    config = build(**fields).config
    half = config.rotary_dim // 2
    torch.manual_seed(0)
    queries, output, values, x = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((4, 8, 7), (9, 4, 8), (2, 8, 7), (200, 7))
    )
    expected = torch.zeros(2, 8, dtype=torch.float64)
    for head in range(4):
        added = torch.stack([output[:, head] @ (values[head // 2] @ row) for row in x]).square().sum(1).mean()
        squares = torch.stack([queries[head] @ row for row in x]).square().mean(0)
        for pair in range(half):
            squares[pair] = squares[pair + half] = (squares[pair] + squares[pair + half]) / 2
        expected[head // 2] += added * squares
    read = torch.einsum("ohd,ohe->hde", output, output)
    gram = x.T @ x / 200
    squares = measure_squares(queries, gram)
    assert_near(weigh_keys(squares, read, values, gram, config), scale * expected.flatten().sqrt())


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
    """In mean squares, of the keys' weights relative to the original's."""
    attention, gram = build().model.layers[1].self_attn, compute_input_grams(build(), tokens(4, 40))[1]
    weights = {name: weight.double() for name, weight in attention.state_dict().items()}
    weights["q_proj.weight"] *= 100
    weights["k_proj.weight"] /= 100
    down, *maps = convert_layer(weights, gram, build().config, 16).values()
    written = down.square().mean(1) / weights["k_proj.weight"].square().mean()
    assert_near(torch.cat([x.flatten(0, 1) for x in maps]).square().mean(0) / written, torch.ones(16).double(), 1e-9)


def test_fitted_outputs_bring_attention_nearer():
    model, rows = build(), tokens(8, 40)
    latent = make_latent(model, rows, 8)

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
        ({}, 0, "multiple of head_dim, from 8 to 16"),
        ({}, 12, "multiple of head_dim, from 8 to 16"),
        ({}, 24, "multiple of head_dim, from 8 to 16"),
        (dict(hidden_size=8, head_dim=8), 16, "multiple of head_dim, from 8 to 8"),
        (dict(mechanisms={"kv_shift": {}}), 8, "mechanisms"),
        (dict(mechanisms={"low_rank_kv": {"heads": 2}}), 8, "export the model with --family, and convert that"),
        (dict(sliding_window=5, sliding_layers=[1], sliding_fields=dict(head_dim=12)), 8, "differ in head_dim"),
        (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), 8, "use another rope_type"),
    ],
    ids=str,
)
def test_what_cannot_become_a_latent_is_refused_in_a_sentence(fields, width, said):
    with pytest.raises(HeadwaterError, match=said) as raised:
        latent_config(build(**fields).config, width)
    assert "\n" not in str(raised.value)
