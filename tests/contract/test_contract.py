"""What every mechanism, alone and combined with others, must keep on every base. Built from the registry alone."""

import copy
import itertools
import json
import shutil
import typing
from dataclasses import dataclass, fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from conftest import assert_near, build, config, decode, disturb, document_positions, shared, tokens
from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM, cost
from headwater.models.cache import cache_bytes
from headwater.registry import REGISTRY, resolve
from naive import reference

pytestmark = pytest.mark.sampled(13)
BASES: dict[str, dict] = {
    "llama": {},
    "partial_rope": dict(rope_parameters=dict(rope_theta=10_000.0, partial_rotary_factor=0.5), qk_norm=True),
    "gpt2": dict(gpt2=True, num_key_value_heads=4),
    "sliding": dict(sliding_window=5),
    "parallel": dict(parallel_residual=True),
    "alibi": dict(position="alibi", feed_forward="plain", hidden_act="gelu_new", first_residual=False),
    # Non-parametric norms, no biases, tied embeddings.
    "tokenformer": dict(
        norm="layer_norm",
        norm_weight=False,
        norm_bias=False,
        final_norm_weight=True,
        final_norm_bias=True,
        tie_word_embeddings=True,
        position="learned",
    ),
}

# Options with other values than a few named ones, which `variants` cannot find by itself.
MORE_VARIANTS: dict[str, list[dict]] = {
    "kv_shift": [{"window": 3}, {"window": 4, "queries": True}, {"queries": True, "keys": False, "values": False}],
    "value_residual": [
        {"source": 1},
        {"layers": [2]},
        {"mode": "constant", "weight": 0.7},
        {"mode": "sparse", "of": "keys", "layers": [1]},
        {"mode": "learnable", "of": "probabilities"},
        {"mode": "learnable", "of": "hidden", "source": 1},
        {"mode": "dense", "recursive": True},
        *({"mode": "learnable_plus", "plus_start": start} for start in ("uniform", "depth")),
    ],
    "svformer": [{"source": 1}, {"layers": [1]}, {"share": "both", "layers": [2]}],
    "skip_layer": [
        {"layers": 1},
        {"layers": 1, "heads": 4},
        {"layers": 1, "source": "alias"},
        {"layers": [1, 2], "heads": 4},
    ],
    "pattention": [
        {"attention_pairs": 24, "ffn_pairs": [40, 50, 60], "value_pairs": 9},
    ],
    "neutreno": [{"weight": 0.2}],
    "dense_former": [{"dilation": 2}, {"period": 2}],
}


@dataclass(frozen=True)
class Case:
    base: str
    mechanisms: str  # JSON, since the order counts and a case is a key

    @property
    def model(self) -> HeadwaterForCausalLM:
        """Shared by all tests of a process: copy before changing it."""
        return shared(json.loads(self.mechanisms), **BASES[self.base])

    @property
    def copy(self) -> HeadwaterForCausalLM:
        return copy.deepcopy(self.model)

    @property
    def is_refused(self) -> bool:
        try:
            config(json.loads(self.mechanisms), **BASES[self.base])
        except (HeadwaterError, StrictDataclassError):
            return True
        return False

    def __str__(self) -> str:
        names = [
            name + "".join(f"({key}={value})" for key, value in options.items())
            for name, options in json.loads(self.mechanisms).items()
        ]
        return f"{self.base}-{'+'.join(names) or 'vanilla'}"


def variants(name: str) -> list[dict]:
    """Options of a mechanism: the defaults, then each other choice of every option that is one of a few values."""
    options = resolve(name).Options
    hints = typing.get_type_hints(options)
    found: list[dict] = [{}]
    for field in fields(options):
        hint = hints[field.name]
        union = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
        choices = [
            c for member in union if typing.get_origin(member) is typing.Literal for c in typing.get_args(member)
        ]
        choices = [False, True] if hint is bool else choices
        found += [{field.name: choice} for choice in choices if choice != field.default]
    return [
        options
        for options in found + MORE_VARIANTS.get(name, [])
        if not Case("llama", json.dumps({name: options})).is_refused
    ]


SINGLES = [{name: {}} for name in REGISTRY]
VARIANTS = [{name: options} for name in REGISTRY for options in variants(name) if options]
# The registry lists mechanisms in the order in which the papers' models would apply them.
PAIRS = [{name: {} for name in names} for names in itertools.combinations(REGISTRY, 2)]
SWAPPED = [dict(reversed(pair.items())) for pair in PAIRS]
TRIPLES = [{name: {} for name in names} for names in itertools.combinations(REGISTRY, 3)]


def of(mechanisms: list[dict], *bases: str) -> list[Case]:
    every = [Case(base, json.dumps(m)) for m in mechanisms for base in bases]
    return [case for case in every if not case.is_refused]


NORMAL = of([{}, *SINGLES], *BASES) + of(VARIANTS + PAIRS, "llama")
SLOW = (
    of(VARIANTS, "sliding", "alibi", "tokenformer")
    + of(PAIRS, "partial_rope", "alibi")
    + of(SWAPPED, "llama")
    + of(TRIPLES, "llama", "tokenformer")
)
REFUSED = [case for m in PAIRS + TRIPLES if (case := Case("llama", json.dumps(m))).is_refused]


def cases() -> list:
    params = [pytest.param(case, id=str(case)) for case in NORMAL]
    return params + [
        pytest.param(case, id=str(case), marks=pytest.mark.slow)
        for case in dict.fromkeys(SLOW)
        if case not in set(NORMAL)
    ]


@pytest.fixture(params=cases())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


T = 17
CHUNKS = {"one_shot": [17], "token_by_token": [1] * 17, "chunked": [5, 1, 6, 5]}

# Documents of two rows, with several of length 1 and one longer than the sliding window.
DOCUMENTS = [[1, 5, 1, 1, 2, 7], [6, 1, 9, 1]]
BORDERS = {"one_shot": [17], "token_by_token": [1] * 17, "inside": [5, 1, 6, 5], "on_starts": [6, 1, 1, 2, 7]}


def per_document(model: HeadwaterForCausalLM, ids: Tensor, rows: list[list[int]]) -> Tensor:
    """Logits of packed rows, each document run on its own."""
    return torch.cat(
        [
            torch.cat([model(document[None], use_cache=False).logits for document in row.split(lengths)], dim=1)
            for row, lengths in zip(ids, rows, strict=True)
        ]
    )


def generate(model: HeadwaterForCausalLM, ids: Tensor, **kwargs) -> Tensor:
    """The new tokens only."""
    return model.generate(ids, max_new_tokens=10, do_sample=False, **kwargs)[:, ids.shape[1] :]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REGISTRY)
def test_every_registered_mechanism_builds_by_default(name):
    assert name == resolve(name).name()
    assert Case("llama", json.dumps({name: {}})) in NORMAL


def test_refused_combinations_say_so_in_one_sentence():
    assert REFUSED
    for case in REFUSED:
        with pytest.raises((HeadwaterError, StrictDataclassError)) as error:
            config(json.loads(case.mechanisms))
        assert str(error.value).strip().endswith(".")


def test_refused_combinations_are_those_that_contradict_each_other():
    pairs = {frozenset(json.loads(case.mechanisms)) for case in REFUSED if len(json.loads(case.mechanisms)) == 2}
    assert pairs == {frozenset({"value_residual", "svformer"}), frozenset({"svformer", "neutreno"})}


# Against the equations


NAIVE = 1e-12


@pytest.mark.sampled(2)
def test_forward_equals_naive(case):
    model, ids = case.model, tokens(2, 11)
    expected = torch.stack([reference(model)(row) for row in ids])
    assert_near(model(ids, use_cache=False).logits, expected, NAIVE)


@pytest.mark.sampled(3)
def test_gradients_equal_naive(case):
    model, ids = case.copy, tokens(1, 6)
    weigh = torch.randn(1, 6, 97, dtype=torch.float64)
    parameters = list(model.parameters())
    actual = torch.autograd.grad((model(ids, use_cache=False).logits * weigh).sum(), parameters)
    naive = reference(model, differentiable=True)(ids[0])
    expected = torch.autograd.grad((naive * weigh[0]).sum(), parameters)
    for (name, _), a, e in zip(model.named_parameters(), actual, expected, strict=True):
        assert (a - e).abs().max() <= NAIVE * max(1.0, e.abs().max()), name


@pytest.mark.sampled(4)
def test_attention_mask_equals_naive(case):
    """Left padding, a hole in the middle, and both."""
    model, ids = case.model, tokens(3, 9)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0, 0, 1], [0, 1, 0, 1, 1, 1, 1, 0, 1]])
    expected = torch.stack([reference(model)(row, m.bool().tolist()) for row, m in zip(ids, mask, strict=True)])
    actual = model(ids, attention_mask=mask, use_cache=False).logits
    assert_near(actual[mask.bool()], expected[mask.bool()], NAIVE)


@pytest.mark.sampled(4)
def test_contiguous_documents_equal_naive(case):
    """Attention crosses from one document to the next; what looks back to earlier tokens does not."""
    model, ids = case.model, tokens(2, 11)
    starts = torch.zeros(2, 11, dtype=torch.bool)
    starts[0, [0, 4, 5]] = starts[1, [3, 10]] = True
    expected = [
        reference(model)(row, starts=set(s.nonzero()[:, 0].tolist())) for row, s in zip(ids, starts, strict=True)
    ]
    assert_near(model(ids, document_starts=starts, use_cache=False).logits, torch.stack(expected), NAIVE)


# Who sees whom


@pytest.mark.parametrize("changed", [1, 6, T - 1])
def test_causal(case, changed):
    model, ids = case.model, tokens(2, T)
    other = ids.clone()
    other[:, changed] = (other[:, changed] + 1) % 97
    before, after = (model(x, use_cache=False).logits for x in (ids, other))
    assert_near(after[:, :changed], before[:, :changed], 1e-12)
    assert (after[:, changed] - before[:, changed]).abs().max() > 1e-5


@pytest.mark.sampled(3)
def test_packed_documents_equal_separate(case):
    model, ids = case.model, tokens(2, T)
    packed = model(ids, position_ids=document_positions(DOCUMENTS), use_cache=False).logits
    assert_near(packed, per_document(model, ids, DOCUMENTS))


def test_packed_documents_shared_by_all_rows(case):
    """Position ids of one row, [1, T], stand for all."""
    model, ids = case.model, tokens(2, T)
    packed = model(ids, position_ids=document_positions(DOCUMENTS[:1]), use_cache=False).logits
    assert_near(packed, per_document(model, ids, [DOCUMENTS[0]] * 2))


@pytest.mark.parametrize("chunks", BORDERS.values(), ids=BORDERS)
def test_packed_documents_decode(case, chunks):
    model, ids = case.model, tokens(2, T)
    decoded = decode(model, ids, chunks, position_ids=document_positions(DOCUMENTS))
    assert_near(decoded, per_document(model, ids, DOCUMENTS))


@pytest.mark.parametrize("chunks", [None, [6, 1, 5, 5, 4], [1] * 21], ids=["uncached", "chunked", "token_by_token"])
def test_packed_documents_with_padding(case, chunks):
    """Padding right of the documents in one row, left of them in the other."""
    model, ids = case.model, tokens(2, T)
    pad = 4
    right = [torch.nn.functional.pad(x, (0, pad)) for x in (ids[0], document_positions(DOCUMENTS)[0], torch.ones(T))]
    left = [torch.nn.functional.pad(x, (pad, 0)) for x in (ids[1], document_positions(DOCUMENTS)[1], torch.ones(T))]
    padded, position_ids, mask = (torch.stack(pair).long() for pair in zip(right, left, strict=True))
    if chunks is None:
        actual = model(padded, position_ids=position_ids, attention_mask=mask, use_cache=False).logits
    else:
        actual = decode(model, padded, chunks, attention_mask=mask, position_ids=position_ids)
    assert_near(actual[mask.bool()], per_document(model, ids, DOCUMENTS).flatten(0, 1))


def test_left_padded_equals_unpadded(case):
    model, ids = case.model, tokens(2, T)
    padded = torch.nn.functional.pad(ids, (4, 0))
    mask = (torch.arange(T + 4) >= 4).long().expand(2, -1)
    assert_near(
        model(padded, attention_mask=mask, use_cache=False).logits[:, 4:],
        model(ids, use_cache=False).logits,
    )


# With a cache


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_cached_equals_uncached(case, chunks):
    model, ids = case.model, tokens(2, T)
    assert_near(decode(model, ids, chunks), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_cached_equals_uncached_with_holes_in_the_mask(case, chunks):
    model, ids = case.model, tokens(3, T)
    mask = torch.ones(3, T, dtype=torch.long)
    mask[0, 1] = mask[1, 4:6] = mask[1, 11] = mask[2, :3] = mask[2, 9] = 0
    uncached = model(ids, attention_mask=mask, use_cache=False).logits
    assert_near(decode(model, ids, chunks, attention_mask=mask)[mask.bool()], uncached[mask.bool()])


@pytest.mark.parametrize("layout", ["plain", "left_padded", "packed"])
def test_static_cache_equals_uncached(case, layout):
    model, ids = case.model, tokens(2, T)
    given = {}
    if layout == "left_padded":
        given["attention_mask"] = (torch.arange(T) >= torch.tensor([[0], [3]])).long()
    if layout == "packed":
        given["position_ids"] = document_positions(DOCUMENTS)
    real = given.get("attention_mask", torch.ones(2, T)).bool()
    cache = StaticCache(config=model.config, max_cache_len=T + 3)
    decoded = decode(model, ids, [6, 1, 1, 9], cache=cache, **given)
    assert_near(decoded[real], model(ids, use_cache=False, **given).logits[real])


@pytest.mark.sampled(2)
def test_cache_bytes_follow_the_plan(case):
    model, ids = case.model, tokens(2, T)
    cache = model(ids, use_cache=True).past_key_values
    kept = T if model.config.sliding_window is None else model.config.sliding_window - 1
    elements = sum(
        (len(plan.k_heads) + len(plan.v_heads)) * kept
        + sum({"q": 4, "k": len(plan.k_heads), "v": len(plan.v_heads)}[part] * length for part, length, _ in plan.tails)
        for plan in model.config.layer_plans
    )
    assert cache_bytes(cache) == elements * ids.shape[0] * model.config.head_dim * 8
    assert cache_bytes(cache) == cost.cache_bytes(model.config, T, batch_size=2, element_size=8)


def test_materialised_equals_the_same_model(case):
    """Every layer with keys and values of its own before the cache, so that any cache will do."""
    model, ids = case.model, tokens(2, T)
    if model.model.tail:
        with pytest.raises((HeadwaterError, StrictDataclassError), match="keeps raw tokens"):
            config(json.loads(case.mechanisms), **BASES[case.base], materialise=True)
        return
    ordinary = build(json.loads(case.mechanisms), **BASES[case.base], materialise=True)
    uncached = model(ids, use_cache=False).logits
    assert_near(ordinary(ids, use_cache=False).logits, uncached)
    for cache in (DynamicCache(), None, StaticCache(config=ordinary.config, max_cache_len=T + 3)):
        assert_near(decode(ordinary, ids, [6, 1, 1, 9], cache=cache), uncached)
    assert set(ordinary.config.layer_types) <= {"full_attention", "sliding_attention"}


def test_single_precision_cached_equals_uncached(case):
    model, ids = case.copy.float(), tokens(2, T)
    uncached = model(ids, use_cache=False).logits
    for chunks in CHUNKS.values():
        assert_near(decode(model, ids, chunks), uncached, tolerance=1e-4)


@pytest.mark.sampled(1)
def test_parameters_are_counted(case):
    assert sum(cost.parameters(case.model.config).values()) == case.model.num_parameters()


# Generation


def test_greedy_generation(case):
    ids = tokens(2, 9)
    expected = generate(case.model, ids, use_cache=False)
    assert torch.equal(generate(case.model, ids), expected)
    assert torch.equal(generate(case.model, ids, prefill_chunk_size=4), expected)


def test_beam_search(case):
    ids = tokens(2, 9)
    expected = generate(case.model, ids, num_beams=3, use_cache=False)
    assert torch.equal(generate(case.model, ids, num_beams=3), expected)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_left_padded_generation(case, num_beams):
    ids = tokens(2, 9)
    ids[1, :4] = 0
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = dict(num_beams=num_beams)
    generated = generate(case.model, ids, attention_mask=mask, **options)
    assert torch.equal(generated, generate(case.model, ids, attention_mask=mask, use_cache=False, **options))
    assert torch.equal(generated[1:], generate(case.model, ids[1:, 4:], use_cache=False, **options))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_sampled_generation(case, num_beams):
    """With the same random numbers, the same tokens; three continuations of each of two rows of different lengths."""
    model, ids = case.model, tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = dict(do_sample=True, num_beams=num_beams, num_return_sequences=3, top_k=0, max_new_tokens=10)
    made = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        made.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **options))
    assert made[0].shape[0] == 6
    assert torch.equal(*made)


def test_generation_after_packed_documents(case):
    """Only the last document of the prompt counts."""
    ids = tokens(2, 9)
    generated = generate(case.model, ids, position_ids=document_positions([[4, 5]] * 2))
    assert torch.equal(generated, generate(case.model, ids[:, 4:], use_cache=False))


def test_generation_continues_from_a_cache(case):
    """A second turn: the first turn's tokens and three new ones."""
    first = case.model.generate(tokens(2, 9), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    ids = torch.cat((first.sequences, tokens(2, 3, seed=1)), dim=1)
    generated = generate(case.model, ids, past_key_values=first.past_key_values)
    assert torch.equal(generated, generate(case.model, ids, use_cache=False))


def test_generation_with_a_static_cache(case):
    ids = tokens(2, 9)
    expected = generate(case.model, ids, use_cache=False)
    options = dict(cache_implementation="static", disable_compile=True)
    assert torch.equal(generate(case.model, ids, **options), expected)
    assert torch.equal(generate(case.model, ids, prefill_chunk_size=4, **options), expected)


def test_prompt_lookup(case):
    ids = tokens(1, 4).repeat(1, 4)
    generated = generate(case.model, ids, prompt_lookup_num_tokens=3)
    assert torch.equal(generated, generate(case.model, ids, use_cache=False))


@pytest.mark.parametrize("assistant", ["unrelated", "alike"])
def test_assisted_generation(case, assistant):
    """An unrelated assistant is refused at almost every token, one that is alike only at some."""
    ids = tokens(1, 9)
    helper = build(num_hidden_layers=1) if assistant == "unrelated" else disturb(case.copy, 0.02)
    generated = generate(case.model, ids, assistant_model=helper)
    assert torch.equal(generated, generate(case.model, ids, use_cache=False))


# Training


@pytest.mark.sampled(3)
def test_every_parameter_gets_a_gradient(case):
    model, ids = case.copy.train(), tokens(2, T)
    least = 1e-9
    for options in json.loads(case.mechanisms).values():
        if options.get("score") == "softmax":  # its weights are all but equal: tokens, and so keys, hardly differ
            least = 0
        if options.get("form") == "clamped":  # beyond its limits a scalar rightly has no gradient
            for name, parameter in model.named_parameters():
                if ".mechanisms." in name:
                    parameter.data.clamp_(0.1, 0.9)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias") and model.config.position != "rope":
            continue  # adds the same to all scores of a query, which softmax does not see
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > least, name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(case, use_reentrant):
    plain, checkpointed, ids = case.copy.train(), case.copy.train(), tokens(2, T)
    checkpointed.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    for model in (plain, checkpointed):
        model(ids, labels=ids, position_ids=document_positions(DOCUMENTS)).loss.backward()
    for (name, a), b in zip(checkpointed.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None, name
        assert_near(a.grad, b.grad, 1e-12)


# The rest


@pytest.mark.sampled(5)
def test_save_and_load(case, tmp_path):
    model, ids = case.copy.float(), tokens(2, T)
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path)
    assert list(loaded.config.mechanisms.items()) == list(model.config.mechanisms.items())
    assert loaded.config.layer_plans == model.config.layer_plans
    for (name, a), (other, b) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_config_round_trip(case):
    original = case.model.config
    for restored in (
        HeadwaterConfig.from_dict(original.to_dict()),
        HeadwaterConfig(**original.to_dict()),
        HeadwaterConfig.from_dict(json.loads(original.to_json_string(use_diff=False))),
        HeadwaterConfig.from_dict(json.loads(original.to_json_string())),
        copy.deepcopy(original),
    ):
        assert restored.to_dict() == original.to_dict()
        assert list(restored.mechanisms) == list(original.mechanisms)
        assert restored.layer_plans == original.layer_plans


# Compiled

compilers = ("g++", "c++", "clang++")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, compilers)), reason="torch.compile needs a C++ compiler")
MANY = {"pattention": {}, "kv_shift": {}, "value_residual": {}, "skip_layer": {}, "dense_former": {}}
SHARED = {"kv_shift": {}, "svformer": {}, "skip_layer": {}}
vanilla_and_many = pytest.mark.parametrize("mechanisms", [{}, MANY, SHARED], ids=lambda m: "+".join(m) or "vanilla")


def traced() -> list:
    """Tracing takes seconds: by default each mechanism once and two crowds, the rest is slow."""
    normal = of([*SINGLES, MANY, SHARED], "llama") + of([MANY], "alibi")
    rest = [case for case in of(VARIANTS + PAIRS, "llama") + of(SINGLES, *BASES) if case not in normal]
    return [pytest.param(c, id=str(c)) for c in normal] + [
        pytest.param(c, id=str(c), marks=pytest.mark.slow) for c in rest
    ]


@pytest.mark.parametrize("traced", traced())
def test_compiles_as_one_graph(traced):
    """Forward and backward as the compiler captures them, run without generated code, equal eager ones."""
    eager, compiled, ids = traced.copy.train(), traced.copy.train(), tokens(2, T)
    torch._dynamo.reset()
    losses = [m(ids, labels=ids).loss for m in (eager, torch.compile(compiled, fullgraph=True, backend="aot_eager"))]
    for loss in losses:
        loss.backward()
    assert_near(losses[1], losses[0], 1e-5)
    for (name, a), b in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert a.grad is not None, name
        assert_near(a.grad, b.grad, 1e-5)


@pytest.mark.slow
@needs_compiler
@vanilla_and_many
def test_compiled_training_equals_eager(mechanisms):
    eager, compiled, ids = build(mechanisms).train(), build(mechanisms).train(), tokens(2, T)
    torch._dynamo.reset()
    losses = [model(ids, labels=ids).loss for model in (eager, torch.compile(compiled, fullgraph=True))]
    for loss in losses:
        loss.backward()
    assert_near(losses[1], losses[0], 1e-5)  # transformers computes the loss in fp32
    for (name, a), b in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert a.grad is not None, name
        assert_near(a.grad, b.grad, 1e-5)


@pytest.mark.slow
@needs_compiler
@vanilla_and_many
@pytest.mark.parametrize("padding", [0, 3])
def test_compiled_generation_equals_eager(mechanisms, padding):
    model, ids = build(mechanisms), tokens(2, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [padding]])).long()
    torch._dynamo.reset()
    compiling = CompileConfig(fullgraph=True, mode="default")
    compiling._compile_all_devices = True  # transformers would compile on a GPU only
    generated = generate(model, ids, attention_mask=mask, cache_implementation="static", compile_config=compiling)
    assert torch.equal(generated, generate(model, ids, attention_mask=mask, use_cache=False))
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = tokens(2, 9, seed=1)
        generated = generate(model, other, attention_mask=mask, cache_implementation="static", compile_config=compiling)
    assert torch.equal(generated, generate(model, other, attention_mask=mask, use_cache=False))
