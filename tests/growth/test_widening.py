import pytest
import torch

from conftest import build, shared, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.growth import widen

SIZES = [
    dict(hidden_size=40),
    dict(intermediate_size=77),
    dict(num_attention_heads=6),
    dict(hidden_size=64, intermediate_size=128, num_attention_heads=8),
]


def difference(a, b) -> float:
    with torch.no_grad():
        before, after = (model(tokens(2, 20)).logits for model in (a, b))
    return ((before - after).abs().max() / before.abs().max()).item()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"feed_forward": "plain", "mlp_bias": True}],
    ids=str,
)
def test_the_exact_form_keeps_the_function(sizes, changes, tmp_path):
    model = shared(**changes)
    wide = widen(model, **sizes)
    assert difference(model, wide) < 1e-12
    wide.save_pretrained(tmp_path / "wide")
    assert difference(model, HeadwaterForCausalLM.from_pretrained(tmp_path / "wide").eval()) < 1e-12


@pytest.mark.parametrize("mechanisms", [{"kv_shift": {}}, {"value_residual": {}}, {"dense_former": {}}])
def test_it_does_so_beside_mechanisms(mechanisms):
    model = shared(mechanisms)
    assert difference(model, widen(model, **SIZES[-1])) < 1e-12


def test_every_new_parameter_learns_within_two_steps():
    wide, ids = widen(build(), **SIZES[-1]).train(), tokens(4, 20)
    start = {name: parameter.detach().clone() for name, parameter in wide.named_parameters()}
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        wide(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in wide.named_parameters():
        moved = parameter != start[name]
        used = torch.ones_like(moved)
        if "embed_tokens" in name:
            used = torch.isin(torch.arange(len(moved)), ids[:, :-1])[:, None].expand_as(moved)
        assert moved[used].double().mean() > 0.99, name


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_net2net_keeps_the_old_block_and_not_the_function(sizes):
    model = shared()
    wide = widen(model, **sizes, form="net2net")
    for name, tensor in model.state_dict().items():
        assert torch.equal(wide.state_dict()[name][tuple(map(slice, tensor.shape))], tensor), name
    fresh = HeadwaterForCausalLM(wide.config).state_dict()
    for name, tensor in wide.state_dict().items():
        old = model.state_dict()[name].shape
        new = torch.ones(tensor.shape, dtype=torch.bool)
        new[tuple(map(slice, old))] = False
        assert torch.equal(tensor[new], fresh[name].double()[new]), name
    assert difference(model, wide) > 1e-4


@pytest.mark.parametrize(
    ("changes", "sizes", "said"),
    [
        ({}, dict(hidden_size=16), "would shrink"),
        ({}, dict(hidden_size=32), "Nothing would become wider"),
        ({}, dict(), "Nothing would become wider"),
        ({}, dict(num_attention_heads=8, num_key_value_heads=8), "same factor"),
        ({}, dict(hidden_size=40, form="zero"), "'exact' or 'net2net'"),
        ({"norm": "layer_norm"}, dict(hidden_size=40), "RMSNorm"),
        ({"qk_norm": True}, dict(hidden_size=40), "norm_eps"),
        ({"mechanisms": {"pattention": {}}}, dict(hidden_size=40), "headwater grow"),
    ],
)
def test_what_it_cannot_do_is_refused(changes, sizes, said):
    with pytest.raises(HeadwaterError, match=said):
        widen(shared(**changes), **sizes)


def test_layer_norm_allows_wider_feed_forwards():
    model = shared(norm="layer_norm")
    assert difference(model, widen(model, intermediate_size=100, num_attention_heads=8)) < 1e-12
