import copy
import typing

import pytest
import torch
from torch import nn

from conftest import assert_near, build, decode, disturb, shared, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM, HeadwaterModel
from headwater.growth import grown_config, importance, pairs_of, shrink
from headwater.growth.parameter_tokens import NOT_NEUTRAL, list_pattentions
from headwater.mechanisms.pattention import ScoreFunction, default_tau
from headwater_lab import grow

PAIRS = {"attention_pairs": 7, "ffn_pairs": 13}
SCORES = typing.get_args(ScoreFunction)
NEUTRAL = [score for score in SCORES if score not in NOT_NEUTRAL]


def trained(**options) -> HeadwaterForCausalLM:
    """A model with pairs, away from its start; shared, not to be changed."""
    return shared({"pattention": PAIRS | options})


def difference(a: HeadwaterForCausalLM, b: HeadwaterForCausalLM, ids: torch.Tensor) -> float:
    """The largest difference of logits, relative to the largest logit."""
    with torch.no_grad():
        before, after = a(ids).logits.double(), b(ids).logits.double()
    return ((before - after).abs().max() / before.abs().max()).item()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("score", NEUTRAL)
@pytest.mark.parametrize("sizes", [(8, None), (None, 14), (1000, 333), (7, 1000)])
def test_growing_keeps_the_function_under_every_neutral_score(score, sizes):
    model, ids = trained(score=score), tokens(2, 20)
    grown = grow(model, *sizes)
    assert difference(model, grown, ids) < 1e-12
    assert pairs_of(grown)["query"] == (sizes[0] or 7)
    assert pairs_of(grown)["feed_forward"] == (sizes[1] or 13)


@pytest.mark.parametrize("others", [{"kv_shift": {}}, {"value_residual": {}}, {"skip_layer": {}}, {"svformer": {}}])
def test_growing_keeps_the_function_beside_other_mechanisms(others):
    model, ids = shared({"pattention": PAIRS} | others), tokens(2, 20)
    assert difference(model, grow(model, 20, 30), ids) < 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
def test_the_function_is_kept_after_save_load_and_cached_decoding(dtype, bound, tmp_path):
    model, ids = copy.deepcopy(trained()).to(dtype), tokens(2, 20)
    grow(model, 1000, 31).save_pretrained(tmp_path / "grown")
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path / "grown").eval()
    assert loaded.dtype == dtype
    assert difference(model, loaded, ids) < bound
    with torch.no_grad():
        whole, cached = model(ids).logits, decode(loaded, ids, [7, 1, 12])
    assert_near(cached, whole, 10 * bound)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options), loaded.generate(ids, **options))


@pytest.mark.slow  # the contract compiles pattention
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_function_is_kept_when_compiled(backend):
    model, ids = copy.deepcopy(trained()).float(), tokens(2, 20)
    grown = torch.compile(grow(model, 1000, 31), backend=backend, fullgraph=True)
    with torch.no_grad():
        before, after = model(ids, use_cache=False).logits, grown(ids, use_cache=False).logits
    assert_near(after, before, 1e-5)


def test_in_bf16_it_moves_by_a_rounding_step_at_most():
    model, ids = copy.deepcopy(trained()).to(torch.bfloat16), tokens(16, 20)
    with torch.no_grad():
        before = model(ids).logits
        after = grow(model, 1000, 333)(ids).logits
    assert (after - before).abs().max() <= 2**-7 * before.abs().max()


def test_growing_leaves_the_model_alone_and_shares_nothing_with_it():
    model, ids = copy.deepcopy(trained()), tokens(2, 20)
    model(ids, labels=ids).loss.backward()
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}
    options, grown = copy.deepcopy(model.config.mechanisms), grow(model, 9, 14)
    disturb(grown)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0]), name
        assert torch.equal(parameter.grad, before[name][1]), name
    assert model.config.mechanisms == options
    assert all(parameter.grad is None for parameter in grown.parameters())


def test_new_keys_are_zero_new_values_are_not_and_both_learn_from_the_first_two_steps():
    grown, ids = grow(trained(), 11, 17).train(), tokens(4, 20)
    for *_, module in list_pattentions(grown):
        extra = module.n - (13 if module.n == 17 else 7)
        assert not module.key[-extra:].any()
        assert 0 < module.value[-extra:].std() < 0.5
    grown(ids, labels=ids).loss.backward()
    for *_, module in list_pattentions(grown):
        assert (module.key.grad[7:].abs().sum(1) > 0).all(), "a key of zero has a gradient"
    torch.optim.SGD(grown.parameters(), lr=0.1).step()
    grown.zero_grad()
    grown(ids, labels=ids).loss.backward()
    for *_, module in list_pattentions(grown):
        assert (module.value.grad[13:].abs().sum(1) > 0).all()


def test_new_rows_are_a_function_of_seed_name_and_size():
    one, two = grow(trained(), 20), grow(trained(), 20)
    rows = [module.value[7:] for _, which, module in list_pattentions(one) if which != "feed_forward"]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert len({row.sum().item() for row in rows}) == len(rows), "each map draws its own"
    again = grow(grow(trained(), 20), 33)
    fresh = next(module for *_, module in list_pattentions(again)).value
    assert not torch.equal(fresh[7:20], fresh[20:33]), "a second growth draws others"
    base = grow(trained_base(), 20)
    alone = [module.value for *_, module in list_pattentions(base)]
    whole = [module.value for *_, module in list_pattentions(one)]
    assert all(torch.equal(a[7:], b[7:]) for a, b in zip(alone, whole, strict=True) if len(a) == 20)


def trained_base() -> HeadwaterModel:
    """The same model without its head."""
    return copy.deepcopy(trained()).model


def test_new_rows_start_as_in_a_fresh_model_of_the_new_size():
    """By fan-in a larger map's values start smaller: 1/√n of the new n."""
    grown = grow(
        build({"pattention": PAIRS | {"value_init": "fan_in", "key_init": "fan_in"}}), 400, 900, key_init="random"
    )
    for layer in grown.model.layers:
        for module, old, n in ((layer.self_attn.q_proj, 7, 400), (layer.mlp, 13, 900)):
            assert module.value[old:].std().item() == pytest.approx(n**-0.5, rel=0.05)
            assert module.key[old:].std().item() == pytest.approx(32**-0.5, rel=0.05)


def test_a_model_without_a_head_grows_too():
    base, ids = trained_base(), tokens(2, 20)
    with torch.no_grad():
        assert_near(grow(base, 9)(ids).last_hidden_state, base(ids).last_hidden_state, 1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_recomputed_tau_and_random_keys_change_the_function(score):
    model, ids = trained(score=score), tokens(2, 20)
    grown = grow(model, 20, 30, tau="recompute", key_init="random")
    for *_, module in list_pattentions(grown):
        assert module.scale.tau.item() == pytest.approx(default_tau(score, module.n))
    assert difference(model, grown, ids) > 1e-3
    kept = grow(model, 20, 30, key_init="random")
    assert {m.scale.tau.item() for *_, m in list_pattentions(kept)} == {
        m.scale.tau.item() for *_, m in list_pattentions(model)
    }


@pytest.mark.parametrize("score", NOT_NEUTRAL)
def test_scores_under_which_a_zero_key_counts_are_refused(score):
    with pytest.raises(HeadwaterError, match=r"e\^0 = 1.*random"):
        grow(trained(score=score), 20)


class TestFreezing:
    def test_only_the_new_pairs_learn_under_any_optimiser_and_decay(self):
        model, ids = trained(), tokens(4, 20)
        grown = grow(model, 11, freeze=True).train()
        before = {name: p.detach().clone() for name, p in grown.named_parameters()}
        learning = {name for name, p in grown.named_parameters() if p.requires_grad}
        assert learning == {
            f"model.layers.{layer}.self_attn.{m}_proj.{p}"
            for layer in range(3)
            for m in "qkvo"
            for p in ("key", "value")
        }
        optimizer = torch.optim.AdamW(grown.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            grown(ids, labels=ids).loss.backward()
            optimizer.step()
        for name, parameter in grown.named_parameters():
            assert torch.equal(parameter, before[name]) != (name in learning), name

    def test_it_survives_saving(self, tmp_path):
        model, ids = trained(), tokens(2, 20)
        grown = grow(model, 11, 17, freeze=True)
        grown.save_pretrained(tmp_path / "grown")
        loaded = HeadwaterForCausalLM.from_pretrained(tmp_path / "grown")
        assert difference(model, loaded.eval(), ids) < 1e-12
        flags = {name: parameter.requires_grad for name, parameter in loaded.named_parameters()}
        assert flags == {name: parameter.requires_grad for name, parameter in grown.named_parameters()}
        assert sum(flags.values()) == 2 * 5 * 3

    def test_growing_again_lets_everything_learn_or_freezes_all_of_before(self):
        model, ids = trained(), tokens(2, 20)
        frozen = grow(model, 11, 17, freeze=True)
        free = grow(frozen)
        assert all(parameter.requires_grad for parameter in free.parameters())
        assert free.config.mechanisms["pattention"]["frozen"] is None
        more = grow(frozen, 20, 30, freeze=True)
        assert [len(module.frozen_key) for *_, module in list_pattentions(more)] == [11, 11, 11, 11, 17] * 3
        for other in (free, more):
            assert difference(model, other, ids) < 1e-12


class TestShrinking:
    def test_importance_is_the_mean_of_score_times_the_size_of_the_value(self):
        model, ids = trained(), tokens(3, 20)
        seen: dict[nn.Module, torch.Tensor] = {}
        modules = {module: (layer, which) for layer, which, module in list_pattentions(model)}
        hooks = [m.register_forward_hook(lambda m, x, _: seen.__setitem__(m, x[0])) for m in modules]
        model(ids)
        for hook in hooks:
            hook.remove()
        found = importance(model, [{"input_ids": ids[:1]}, {"input_ids": ids[1:]}])
        for module, (layer, which) in modules.items():
            for pair in range(module.n):
                total = 0.0
                for x in seen[module].flatten(0, -2):
                    scores = module.key @ x
                    z = module.scale.tau * scores / scores.norm()
                    total += nn.functional.gelu(z)[pair].abs().item()
                mean = total / ids.numel() * module.value[pair].norm().item()
                assert found[layer][which][pair].item() == pytest.approx(mean, rel=1e-9)

    def test_taking_away_what_growing_added_gives_the_model_back(self):
        model, ids = trained(), tokens(2, 20)
        grown = grow(model, 20, 30)
        small = shrink(grown, importance(grown, [{"input_ids": ids}]), 7, 13)
        assert difference(model, small, ids) < 1e-12
        for (*_, a), (*_, b) in zip(list_pattentions(model), list_pattentions(small), strict=True):
            assert torch.equal(a.key, b.key), "in their order"
        assert small.config.mechanisms == model.config.mechanisms

    def test_the_least_important_go_first(self):
        model, ids = trained(), tokens(3, 20)
        found = importance(model, [{"input_ids": ids}])
        least = [{which: -each for which, each in layer.items()} for layer in found]
        kept, lost = shrink(model, found, 5, 9), shrink(model, least, 5, 9)
        assert difference(model, kept, ids) < difference(model, lost, ids)

    @pytest.mark.parametrize(("sizes", "said"), [((0, None), "1 to 7"), ((None, 14), "1 to 13"), ((7, 13), "fewer")])
    def test_sizes_it_cannot_have_are_refused(self, sizes, said):
        model = trained()
        with pytest.raises(HeadwaterError, match=said):
            shrink(model, importance(model, [{"input_ids": tokens(1, 5)}]), *sizes)

    def test_weights_of_another_model_and_none_are_refused(self):
        model, rows = trained(), [{"input_ids": tokens(1, 5)}]
        for weights in (importance(grow(model, 9), rows), []):
            with pytest.raises(HeadwaterError, match="belong to other pairs than this model's"):
                shrink(model, weights, 5)
        with pytest.raises(HeadwaterError, match="at least one"):
            importance(model, [])
        with pytest.raises(HeadwaterError, match="no parameter tokens"):
            importance(shared(), rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(attention_pairs=6), "at least 7"),
        (dict(ffn_pairs=1), "at least 13"),
        (dict(), "Nothing would grow"),
        (dict(attention_pairs=7), "Nothing would grow"),
        (dict(attention_pairs=9, key_init="ones"), "'zero' or 'random'"),
        (dict(attention_pairs=9, tau="sqrt"), "'keep' or 'recompute'"),
        (dict(attention_pairs=9.0), "attention_pairs: input should be a valid integer, not 9.0"),
        (dict(num_hidden_layers="12"), "num_hidden_layers: input should be a valid integer, not '12'"),
        (dict(hidden_size=96, method=None), "method: input should be a valid string"),
    ],
)
def test_what_cannot_be_grown_is_refused(arguments, said):
    with pytest.raises(HeadwaterError, match=said):
        grow(trained(), **arguments)


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({"score": "softmax"}, dict(attention_pairs=9), r"weight e\^0 = 1"),
        ({"top_k": 2}, dict(ffn_pairs=15), "a zero key beats negative scores"),
        ({}, dict(attention_pairs=9, method="stack"), "applies only to layers and widths"),
        ({}, dict(attention_pairs=9, method="junk"), "no growth method 'junk'"),
    ],
)
def test_what_cannot_be_grown_is_refused_without_a_model_too(options, arguments, said):
    config = build({"pattention": PAIRS | options}).config
    with pytest.raises(HeadwaterError, match=said):
        grown_config(config, **arguments)


def test_growth_of_a_config_freezes_and_thaws_as_that_of_a_model():
    model = trained()
    frozen = grow(model, 9, freeze=True)
    assert grown_config(model.config, 9, freeze=True).mechanisms == frozen.config.mechanisms
    assert grown_config(frozen.config).mechanisms == grow(frozen).config.mechanisms


def test_a_model_of_linear_maps_is_refused():
    with pytest.raises(HeadwaterError, match="no parameter tokens"):
        grow(shared(), 9)


def test_maps_that_differ_keep_their_own_counts():
    model, ids = shared({"pattention": PAIRS | {"query_pairs": 5, "output_pairs": 4}}), tokens(2, 20)
    grown = grow(model, 9)
    counts = pairs_of(grown)
    assert counts["query"] == counts["output"] == 9
    assert all(module.n == counts[which] for _, which, module in list_pattentions(grown))
    assert difference(model, grown, ids) < 1e-12
