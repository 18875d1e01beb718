"""Mechanisms added to a model that is there: it starts as the model it was, and the new parameters learn."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from conftest import build, config, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.conversion import add_mechanisms
from headwater.mechanisms.capabilities import AddsToTrainedModel
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater_lab.training.model_changes import measure_change

# Every way to add a mechanism that leaves the function as it is, by what the user says.
IDENTITIES = {
    "kv_shift": [{}, {"window": 4}, {"variant": "clamped"}, {"queries": True, "keys": False}],
    "value_residual": [
        {},
        {"mode": "dense"},
        {"source": 1},
        *({"target": target} for target in ("queries", "keys", "probabilities", "hidden")),
    ],
    "short_conv": [
        {},
        {"sites": ["queries", "attention_input", "feed_forward_hidden"]},
        {"residual": False, "window": 2},
        {"dynamic": ["keys"]},
    ],
    "value_embedding": [{}, {"tables": 2}, {"rank": 4, "gate": "scalar"}, {"tables": 1, "rank": 3, "layers": [0, 2]}],
    "ngram_memory": [{}, {"target": "values", "gate": "scalar"}, {"gate": "match", "rank": 8, "layers": [0, 2]}],
    "neutreno": [{}, {"weight": 0}, {"learnable": True}],
    "exclusive": [{}, {"learnable": True, "layers": [1]}],
    "output_gate": [{}, {"granularity": "channel"}, {"channels": 3, "init": "zero"}],
    "smear": [{}, {"weight": 0}],
    "embedding_residual": [{}, {"weight": 0, "layers": [0, 1]}],
    "backout": [{}, {"weight": 0, "layer": 0}],
    "mudd": [{}],
    "dense_former": [{}, {"dilation": 2}, {"period": 2}],
}
# What changes the function.
CHANGES = {
    "kv_shift": [{"variant": "gate"}, {"init": "random"}, {"variant": "half_heads"}],
    "value_residual": [
        *({"mode": mode} for mode in ("identity", "constant", "sparse", "learnable_plus")),
        {"target": "hidden", "weight": 0.5, "mode": "constant"},
        {"init": "half"},
    ],
    "neutreno": [{"weight": 0.4}, {"learnable": False}],
    "exclusive": [{"learnable": False}],
    "output_gate": [{"scale": 1.0}, {"init": "random"}],
    "persistent_memory": [{}],
    "depth_attention": [{}],
    "value_embedding": [{"init": "random"}],
    "smear": [{"weight": 0.1}, {"norm": "before"}],
    "ngram_memory": [{"init": "random"}],
    "embedding_residual": [{"weight": 0.1}],
    "backout": [{"weight": 0.1}],
    "short_conv": [{"init": "random"}, {"dynamic": ["keys"], "window": 3}],
    "svformer": [{}, {"share": "both"}],
    "kv_source": [{}, {"keys": "own"}],
    "skip_layer": [{}, {"layers": 1, "heads": 4}],
}
ALL = {name: {} for name in IDENTITIES}


def singles(table: dict[str, list[dict]]) -> list:
    cases = [{name: options} for name, given in table.items() for options in given]
    return [pytest.param(case, id=str(case)) for case in cases]


def is_new(name: str) -> bool:
    return "mechanisms" in name


def test_every_mechanism_says_whether_it_has_an_identity_start():
    for name in MECHANISMS.built_in:
        mechanism = resolve(name)
        adds = isinstance(mechanism, AddsToTrainedModel) and mechanism.find_identity_options({}) is not None
        assert adds == (name in IDENTITIES)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("mechanisms", [*singles(IDENTITIES), pytest.param(ALL, id="all")])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("base", [{}, {"gpt2": True, "num_key_value_heads": 4}], ids=["llama", "gpt2"])
def test_the_function_stays(mechanisms, dtype, tolerance, base, tmp_path):
    before = build(**base).to(dtype)
    kept = copy.deepcopy(before.state_dict())
    after = add_mechanisms(before, mechanisms)
    assert before.config.mechanisms == {}
    assert after.dtype == dtype
    change = measure_change(before, after, tokens(2, 20))
    assert change["logits"] <= tolerance
    assert abs(change["kl"]) <= tolerance
    assert change["loss_before"] == pytest.approx(change["loss_after"], abs=10 * tolerance)

    new = after.state_dict()
    assert all(torch.equal(tensor, new[name]) for name, tensor in kept.items())
    assert {name for name in new if is_new(name)} == new.keys() - kept.keys() != set()
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in before.state_dict().items())


@pytest.mark.parametrize("mechanisms", [*singles(IDENTITIES), pytest.param(ALL, id="all")])
@pytest.mark.sampled(6)
def test_the_new_parameters_learn(mechanisms):
    after = add_mechanisms(build(), mechanisms).train()
    ids, optimizer = tokens(2, 12), torch.optim.SGD(after.parameters(), lr=0.1)
    learning = set()
    for _ in range(2):  # of two factors, one of which is zero, the other learns from the second step on
        after.zero_grad()
        after(ids, labels=ids).loss.backward()
        optimizer.step()
        learning |= {name for name, parameter in after.named_parameters() if parameter.grad.abs().max() > 0}
    assert learning == {name for name, _ in after.named_parameters()}


@pytest.mark.slow
def test_saved_loaded_and_generating(tmp_path):
    before = build(attn_implementation="sdpa").float()
    before.generation_config.repetition_penalty = 1.5
    after = add_mechanisms(before, ALL)
    assert after.generation_config.repetition_penalty == 1.5
    after.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.mechanisms == after.config.mechanisms
    assert measure_change(before, loaded, tokens(2, 20))["logits"] <= 1e-6
    made = [
        model.generate(tokens(2, 6), max_new_tokens=12, do_sample=False, use_cache=cached)
        for model, cached in ((before, True), (loaded, True), (loaded, False))
    ]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.parametrize("tied", [True, False])
def test_scalars_stay_in_fp32_in_a_bf16_model(tied):
    before = build(tie_word_embeddings=tied).bfloat16()
    after = add_mechanisms(before, ALL)
    for name, parameter in after.named_parameters():
        scalar = is_new(name) and not name.endswith(".weight")  # a linear layer's
        assert parameter.dtype == (torch.float32 if scalar else torch.bfloat16), name
    assert (after.lm_head.weight is after.model.embed_tokens.weight) == tied
    assert measure_change(before, after, tokens(2, 20))["logits"] == 0


def test_new_parameters_start_as_in_a_model_made_with_them():
    """Those of a mechanism added with a change: its usual start, from the model's seed."""
    before = HeadwaterForCausalLM(config(initializer_seed=3))
    made = HeadwaterForCausalLM(config({"kv_shift": {}, "dense_former": {}}, initializer_seed=3))
    after = add_mechanisms(before, {"kv_shift": {"init": "random"}, "dense_former": {}}, allow_change=True)
    assert after.state_dict().keys() == made.state_dict().keys()
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in after.state_dict().items())


@pytest.mark.slow
def test_order_is_the_registrys_and_what_is_there_keeps_its_own():
    def order(present: list[str], *added: str) -> list[str]:
        return list(
            add_mechanisms(build({name: {} for name in present}), {name: {} for name in added}).config.mechanisms
        )

    assert order([], "dense_former", "value_residual", "kv_shift") == ["kv_shift", "value_residual", "dense_former"]
    assert order(["dense_former", "kv_shift"], "value_residual") == ["value_residual", "dense_former", "kv_shift"]
    assert order(["kv_shift", "dense_former"], "value_residual") == ["kv_shift", "value_residual", "dense_former"]
    assert order(["pattention"], "neutreno") == ["pattention", "neutreno"]


@pytest.mark.parametrize("present", [{"dense_former": {}, "kv_shift": {}}, {"pattention": {}}, {"skip_layer": {}}])
def test_the_function_stays_beside_what_is_there(present):
    before = build(present)
    after = add_mechanisms(before, {"value_residual": {}, "neutreno": {}})
    assert measure_change(before, after, tokens(2, 20))["logits"] <= 1e-12


# With a change


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mechanisms", singles(CHANGES))
def test_a_change_is_to_be_allowed(mechanisms):
    before = build()
    with pytest.raises(HeadwaterError, match=rf"'{next(iter(mechanisms))}'.*--allow-change") as error:
        add_mechanisms(before, mechanisms)
    assert str(error.value).endswith(".")
    after = add_mechanisms(before, mechanisms, allow_change=True)
    change = measure_change(before, after, tokens(2, 20))
    assert change["logits"] > 1e-6
    assert change["kl"] > 0
    built = build(mechanisms)
    assert {name: x.shape for name, x in after.state_dict().items()} == {
        name: x.shape for name, x in built.state_dict().items()
    }


def test_heads_that_are_still_built_keep_their_rows():
    before = build(num_key_value_heads=4, qkv_bias=True, mechanisms={"kv_shift": {"window": 3}})
    after = add_mechanisms(before, {"skip_layer": {"layers": 1, "heads": 1}}, allow_change=True)
    last, was = after.model.layers[-1].self_attn, before.model.layers[-1].self_attn
    assert last.plan.k_heads == (0, 1, 2)
    for now, then in ((last.k_proj, was.k_proj), (last.v_proj, was.v_proj)):
        assert torch.equal(now.weight, then.weight[:24])
        assert torch.equal(now.bias, then.bias[:24])
    assert torch.equal(last.mechanisms["kv_shift"].alpha, was.mechanisms["kv_shift"].alpha[:, :3])
    # What is left out would not have been read: with it, the model is the same.
    shared = build(num_key_value_heads=4, qkv_bias=True, mechanisms=dict(after.config.mechanisms))
    assert not shared.load_state_dict(after.state_dict()).missing_keys
    assert measure_change(shared, after, tokens(1, 9))["logits"] == 0


# Refused


@pytest.mark.parametrize(
    ("mechanisms", "message"),
    [
        ({"kv_shft": {}}, "did you mean 'kv_shift'"),
        ({"kv_shift": {"windw": 3}}, "did you mean 'window'"),
        ({"dense_former": {}}, "already has mechanism 'dense_former'"),
        ({"pattention": {}}, "replaces the model's linear layers"),
        ({"value_residual": {"source": 7}}, "source must be a layer"),
        ({"value_residual": {"weight": 0.5, "mode": "learnable"}}, "--allow-change|has no weight"),
    ],
)
@pytest.mark.parametrize("allow_change", [False, True])
def test_refused(mechanisms, message, allow_change):
    with pytest.raises(HeadwaterError, match=message):
        add_mechanisms(build({"dense_former": {}}), mechanisms, allow_change)


def test_contradictions_are_refused():
    with pytest.raises((HeadwaterError, StrictDataclassError), match="value_residual"):
        add_mechanisms(build({"value_residual": {}}), {"svformer": {}}, allow_change=True)
    before = build({"value_residual": {"mode": "dense"}}, num_hidden_layers=4)
    with pytest.raises(HeadwaterError, match=r"lambdas.* would have shape"):
        add_mechanisms(before, {"svformer": {"layers": [1]}}, allow_change=True)


def test_the_kernel_follows_what_is_added():
    before = build(attn_implementation="sdpa")
    after = add_mechanisms(before, {"value_residual": {"target": "probabilities"}})
    assert before.config._attn_implementation == "sdpa"
    assert after.config._attn_implementation == "eager"


# The measure


def test_function_change_measures():
    before, after = build(), build()
    nn.init.zeros_(after.lm_head.weight)  # every token is as likely
    before.train()
    ids = tokens(3, 10)
    change = measure_change(before, after, ids)
    assert before.training
    assert not after.training
    with torch.no_grad():
        logits = before.eval()(ids).logits
    assert change["logits"] == pytest.approx(1.0)
    p = logits.log_softmax(-1)
    assert change["kl"] == pytest.approx((p.exp() * (p + torch.tensor(97.0).log())).sum(-1).mean().item(), rel=1e-6)
    assert change["loss_before"] == pytest.approx(before(ids, labels=ids).loss.item(), rel=1e-6)
    assert change["loss_after"] == pytest.approx(torch.tensor(97.0).log().item(), rel=1e-6)


def test_function_change_refuses_what_cannot_be_compared():
    with pytest.raises(HeadwaterError, match="two or more"):
        measure_change(build(), build(), tokens(1, 1))
    with pytest.raises(HeadwaterError, match="97 and 98 tokens"):
        measure_change(build(), build(vocab_size=98), tokens(1, 4))


def test_a_model_of_zeros_has_changed_or_not():
    silent = build({})
    with torch.no_grad():
        for parameter in silent.parameters():
            parameter.zero_()
    assert measure_change(silent, copy.deepcopy(silent), tokens(2, 20))["logits"] == 0
    assert measure_change(silent, build({}), tokens(2, 20))["logits"] == float("inf")
