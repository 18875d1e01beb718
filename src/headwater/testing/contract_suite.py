"""The contract of mechanisms as a test class."""

from __future__ import annotations

import copy
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache

from headwater.config.options import parse_options
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.conversion import add_mechanisms
from headwater.cost import counts as cost
from headwater.engines.pages import check_servable
from headwater.growth.grown_model import FunctionChanged, grow
from headwater.mechanisms.capabilities import AddsToTrainedModel, can_split_heads, can_split_tokens
from headwater.mechanisms.contract import Mechanism
from headwater.models.cache import POSITIONS, cache_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.cache_name import cache_of
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.plugins.trust import trust_names_in
from headwater.testing.model_measures import (
    Operations,
    RecordedOptions,
    kept_per_token,
    outside_attention,
    read_halves,
)
from headwater.testing.naive import Reference
from headwater.testing.served import Server, make_prompts
from headwater.testing.small_models import assert_near, config, decode, disturb, document_positions, shared, tokens
from headwater.testing.trees import Tree, batch_trees, slice_tokens
from headwater.util.errors import HeadwaterError
from headwater.util.precision import Precision
from headwater.verification.own import OWN_EXACT
from headwater.verification.subject import Subject
from headwater.verification.ways import (
    SAMPLED,
    STATIC,
    WAYS,
    Probe,
    Way,
    generate_assisted,
    generate_rows,
    search_beams,
    texts_for,
)

# The base models for the tests.
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "partial_rope": dict(rope_parameters=dict(rope_theta=10_000.0, partial_rotary_factor=0.5), qk_norm=True),
    "gpt2": dict(gpt2=True, num_key_value_heads=4),
    "sliding": dict(sliding_window=5),
    "parallel": dict(parallel_residual=True),
    # Two kinds of layers, and further features of Gemma and nanochat.
    "two_kinds": dict(
        sliding_window=5,
        sliding_layers=[0, 1],
        sliding_fields=dict(rope_parameters=dict(rope_theta=500.0)),
        unit_offset_norm=True,
        output_norms=True,
        embedding_norm=True,
        embedding_scale="width",
        attention_scale=0.3,
        attention_softcap=2.0,
        logit_softcap=3.0,
        qk_norm=True,
    ),
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

# Layers of two shapes: what each kind has in place of 4 query heads, 2 key/value heads and 8 channels per head. In the
# other bases all layers are alike.
ODD_LAYERS: dict[str, dict[str, Any]] = {
    name: dict(sliding_window=window, sliding_layers=layers, sliding_fields=fields)
    for name, (window, layers, fields) in {
        "more_heads": (5, [1], dict(num_attention_heads=8, num_key_value_heads=4)),
        "one_head": (5, [0, 2], dict(num_attention_heads=1, num_key_value_heads=1)),
        "one_kv_head": (2, [1], dict(num_key_value_heads=1)),
        "more_query_heads": (5, [0, 2], dict(num_attention_heads=6)),
        "three_kv_heads": (5, [2], dict(num_attention_heads=6, num_key_value_heads=3)),
        "wider_heads": (5, [0], dict(head_dim=12)),
        "narrower_heads": (30, [1, 2], dict(head_dim=4, rope_parameters=dict(rope_theta=100.0))),
        "as_many_numbers": (5, [0, 1], dict(num_key_value_heads=4, head_dim=4)),
        "other_partial_rope": (5, [1], dict(head_dim=6, rope_parameters=dict(partial_rotary_factor=0.7))),
    }.items()
}
ODD_LAYERS["whole_rope"] = ODD_LAYERS["more_heads"] | dict(
    rope_parameters=dict(rope_theta=10_000.0, partial_rotary_factor=0.5),
    sliding_fields=dict(num_key_value_heads=1, rope_parameters=dict(partial_rotary_factor=1.0)),
)
ODD_LAYERS["other_slopes"] = ODD_LAYERS["more_query_heads"] | dict(position="alibi")

T = 17
CHUNKS = {"one_shot": [17], "token_by_token": [1] * 17, "chunked": [5, 1, 6, 5]}

# Lengths of the documents in two rows, several of length 1 and one longer than the sliding window.
DOCUMENTS = [[1, 5, 1, 1, 2, 7], [6, 1, 9, 1]]
BORDERS = {"one_shot": [17], "token_by_token": [1] * 17, "inside": [5, 1, 6, 5], "on_starts": [6, 1, 1, 2, 7]}


def run_uncached(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
    """Return a model's logits without a cache."""
    return model(input_ids, use_cache=False, **inputs).logits


def per_document(model: HeadwaterForCausalLM, ids: Tensor, rows: list[list[int]]) -> Tensor:
    """Compute the logits of packed rows by running each document alone."""
    return torch.cat(
        [
            torch.cat([run_uncached(model, document[None]) for document in row.split(lengths)], dim=1)
            for row, lengths in zip(ids, rows, strict=True)
        ]
    )


# The ways of `headwater verify`, and more calls of `generate` with left-padded rows.
DECODING = [
    *WAYS,
    *(
        Way(f"{name}, padded rows", run, True, padded=True, **options)
        for name, run, options in (
            ("chunked", generate_rows, dict(prefill_chunk_size=4)),
            ("sampling", generate_rows, SAMPLED),
            ("beams", search_beams, {}),
            ("sampled beams", search_beams, dict(do_sample=True, top_k=0)),
            ("static", generate_rows, STATIC),
            ("static, chunked", generate_rows, STATIC | dict(prefill_chunk_size=4)),
        )
    ),
    Way("an assistant that is alike", generate_assisted, True, distance=0.02),
]


@dataclass(frozen=True)
class Case:
    """A test case: a base, and mechanisms with their options as JSON, because their order matters."""

    base: str
    mechanisms: str

    @classmethod
    def combine(cls, mechanisms: Iterable[dict[str, Any]], *bases: str) -> list[Case]:
        """Combine all choices of mechanisms with all bases, without invalid combinations."""
        cases = [cls(base, json.dumps(options)) for options in mechanisms for base in bases]
        return [case for case in cases if not is_refused(case)]

    def config(self, **changes: Any) -> HeadwaterConfig:
        return config(json.loads(self.mechanisms), **self.fields, **changes)

    def plain_config(self) -> HeadwaterConfig:
        """Make the config of the base, without mechanisms."""
        return config(**self.fields)

    @property
    def fields(self) -> dict[str, Any]:
        """The config fields of the base."""
        return (BASES | ODD_LAYERS)[self.base]

    @property
    def model(self) -> HeadwaterForCausalLM:
        """The case's model, shared by all tests of a process: copy it before changing it."""
        return shared(json.loads(self.mechanisms), **self.fields)

    @property
    def copy(self) -> HeadwaterForCausalLM:
        return copy.deepcopy(self.model)

    def __str__(self) -> str:
        names = [
            name + "".join(f"({key}={value})" for key, value in options.items())
            for name, options in json.loads(self.mechanisms).items()
        ]
        return f"{self.base}-{'+'.join(names) or 'vanilla'}"


@functools.cache
def make_cases(cases: Callable[[], list[Any]]) -> list[Any]:
    """Make a suite's cases once for all of its tests, since each config has to be checked."""
    return cases()


@functools.cache
def is_refused(case: Case) -> bool:
    """Whether this case's model is invalid."""
    try:
        case.config()
    except (HeadwaterError, StrictDataclassError):
        return True
    return False


class Contract:
    """The contract that every mechanism must satisfy, alone and with every other, on every base.

    A subclass whose name begins with Test names the mechanism, and pytest runs these tests:

        class TestMine(Contract):
            mechanism = "my_package.mine:Mine"  # or its entry point, or the class
            options = [{"window": 3}]           # to test besides the defaults
            reference = NaiveMine               # a `headwater.testing.Reference` that knows its equation

    The model equals the equations, forward and in gradients, under masks and in packed rows. Decoding with a cache, in
    chunks and by all kinds of generation, equals the model without one. Rows are causal, and padding, neighbors in a
    row and other branches of a tree change nothing. Each parameter's start depends only on its name; it has a gradient.
    Parameters, FLOPs, what autograd keeps and bytes of the cache are as planned, and grow only with tokens. What the
    mechanism claims with `find_identity_options`, `per_head`, `per_token`, `grow_options` and `describe_axes` is true.
    Options are read. Training computes what evaluation does. Gradients in bf16 are as exact as autocast's. Saved models
    load. It compiles as one graph.

    To skip a test that your mechanism need not pass, set it to None in the subclass.
    """

    mechanism: ClassVar[str | type[Mechanism]] = ""
    options: ClassVar[list[dict[str, Any]]] = []
    reference: ClassVar[type[Reference]] = Reference
    # Largest difference from the equations, in fp64.
    tolerance: ClassVar[float] = 1e-12

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        trust_names_in(cls.mechanism)

    @classmethod
    def cases(cls) -> list[Any]:
        """The cases, as pytest's parameters: each set of options alone, the defaults on every base, with layers that
        differ, and after every other mechanism."""
        mechanism = cls.mechanism
        name = mechanism if isinstance(mechanism, str) else MECHANISMS.name_of(mechanism)
        alone: list[dict[str, Any]] = [{name: {}}, *({name: options} for options in cls.options)]
        pairs: list[dict[str, Any]] = [
            {other_name: {}, name: {}} for other_name in MECHANISMS.built_in if other_name != name
        ]
        cases = Case.combine(alone, "llama") + Case.combine([{name: {}}], *BASES, *ODD_LAYERS)
        cases += Case.combine(pairs, "llama")
        if not cases:
            Case("llama", json.dumps({name: {}})).config()  # raises, and says why
        return [pytest.param(case, id=str(case)) for case in dict.fromkeys(cases)]

    @classmethod
    def traced(cls) -> list[Any]:
        """The cases that are compiled, which takes seconds each."""
        return cls.cases()[:1]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name in {"case", "traced"} & set(metafunc.fixturenames):
            metafunc.parametrize(name, make_cases(getattr(self, {"case": "cases"}.get(name, name))))

    @pytest.fixture(autouse=True)
    def set_seed(self) -> None:
        torch.manual_seed(0)

    @pytest.fixture
    def model(self, case: Any) -> HeadwaterForCausalLM:
        """Shared by all tests of a process: take `case.copy` to change it."""
        return case.model

    @pytest.fixture
    def ids(self) -> Tensor:
        """Two rows of tokens, [2, T]."""
        return tokens(2, T)

    def reference_of(self, model: HeadwaterForCausalLM, differentiable: bool = False) -> Reference:
        """The naive reference with a model's weights; `differentiable`: its own parameters, for autograd."""
        return self.reference(model.config, dict(model.state_dict(keep_vars=differentiable)))

    def prepare(self, case: Case, model: HeadwaterForCausalLM) -> float:
        """Change the model so that each parameter has a gradient; return the minimum for its largest entry."""
        return 1e-9

    def assert_equal(
        self, model: HeadwaterForCausalLM, logits: Callable[[HeadwaterForCausalLM], Tensor], expected: Tensor
    ) -> None:
        """Assert that `logits` of the model are as expected, up to rounding.

        Some models magnify rounding, for example those with large scores. Then the difference may be as large as that
        from rounding their weights in the last digit.
        """
        actual, tolerance = logits(model).detach(), self.tolerance
        scale = max(1.0, float(expected.abs().max()))
        if float((actual - expected).abs().max()) > tolerance * scale:
            rounded, random = copy.deepcopy(model), torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in rounded.parameters():
                    signs = 2 * torch.rand(weight.shape, generator=random, dtype=weight.dtype) - 1
                    weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)
            changed = float((logits(rounded).detach() - actual).abs().max()) / scale
            tolerance = max(tolerance, min(2 * changed, 1e-10))
        assert_near(actual, expected, tolerance)

    # Comparison with the equations

    def test_forward_equals_naive(self, model):
        ids = tokens(2, 8)
        expected = torch.stack([self.reference_of(model)(row) for row in ids])
        self.assert_equal(model, lambda m: run_uncached(m, ids), expected)

    def test_gradients_equal_naive(self, case):
        model, ids = case.copy, tokens(1, 6)
        weigh = torch.randn(1, 6, 97, dtype=torch.float64)
        parameters = list(model.parameters())
        actual = torch.autograd.grad((run_uncached(model, ids) * weigh).sum(), parameters)
        naive = self.reference_of(model, differentiable=True)(ids[0])
        expected = torch.autograd.grad((naive * weigh[0]).sum(), parameters)
        for (name, _), a, e in zip(model.named_parameters(), actual, expected, strict=True):
            assert (a - e).abs().max() <= self.tolerance * max(1.0, float(e.abs().max())), name

    def test_attention_mask_equals_naive(self, model):
        """Left padding, a hole in the middle, and both."""
        ids = tokens(3, 9)
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0, 0, 1], [0, 1, 0, 1, 1, 1, 1, 0, 1]])
        real = mask.bool()
        expected = torch.stack([self.reference_of(model)(row, m.tolist()) for row, m in zip(ids, real, strict=True)])
        self.assert_equal(model, lambda m: run_uncached(m, ids, attention_mask=mask)[real], expected[real])

    def test_contiguous_documents_equal_naive(self, model):
        """Attention crosses document boundaries; mechanisms that look back do not."""
        ids = tokens(2, 11)
        starts = torch.zeros(2, 11, dtype=torch.bool)
        starts[0, [0, 4, 5]] = starts[1, [3, 10]] = True
        expected = [
            self.reference_of(model)(row, starts=set(s.nonzero()[:, 0].tolist()))
            for row, s in zip(ids, starts, strict=True)
        ]
        self.assert_equal(model, lambda m: run_uncached(m, ids, document_starts=starts), torch.stack(expected))

    # Visibility

    @pytest.mark.parametrize("changed", [1, 6, T - 1])
    def test_causal(self, model, ids, changed):
        changed_ids = ids.clone()
        changed_ids[:, changed] = (changed_ids[:, changed] + 1) % 97
        logits, changed_logits = (run_uncached(model, x) for x in (ids, changed_ids))
        assert_near(changed_logits[:, :changed], logits[:, :changed], 1e-12)
        assert (changed_logits[:, changed] - logits[:, changed]).abs().max() > 1e-5

    def test_packed_documents_equal_separate(self, model, ids):
        """Position ids of one row, [1, T], stand for all."""
        for rows in (DOCUMENTS, DOCUMENTS[:1]):
            packed = run_uncached(model, ids, position_ids=document_positions(rows))
            assert_near(packed, per_document(model, ids, [rows[0], rows[-1]]))

    @pytest.mark.parametrize("chunks", BORDERS.values(), ids=BORDERS)
    def test_packed_documents_decode(self, model, ids, chunks):
        decoded = decode(model, ids, chunks, position_ids=document_positions(DOCUMENTS))
        assert_near(decoded, per_document(model, ids, DOCUMENTS))

    @pytest.mark.parametrize("chunks", [None, [6, 1, 5, 5, 4], [1] * 21], ids=["uncached", "chunked", "token_by_token"])
    def test_packed_documents_with_padding(self, model, ids, chunks):
        """Padding right of the documents in one row, left of them in the other."""
        pad = 4
        rows = [(ids[i], document_positions(DOCUMENTS)[i], torch.ones(T)) for i in range(2)]
        right_padded = [torch.nn.functional.pad(x, (0, pad)) for x in rows[0]]
        left_padded = [torch.nn.functional.pad(x, (pad, 0)) for x in rows[1]]
        padded, position_ids, mask = (torch.stack(pair).long() for pair in zip(right_padded, left_padded, strict=True))
        if chunks is None:
            actual = run_uncached(model, padded, position_ids=position_ids, attention_mask=mask)
        else:
            actual = decode(model, padded, chunks, attention_mask=mask, position_ids=position_ids)
        assert_near(actual[mask.bool()], per_document(model, ids, DOCUMENTS).flatten(0, 1))

    def test_branching_rows(self, model):
        """Trees of candidates, in one call, after a cached prefix, and grown in a cache that records its past."""
        prefix = 5
        if model.config.position == "alibi" or model.config.sliding_window is not None:
            return  # a mask made for the kernel cannot express distances or windows
        trees = [Tree([-1, 0, 1, 2, 3, 4, 4, 5, 5, 6, 9]), Tree([-1, 0, 1, 2, 3, 4, 5, 4, 7, 6, 8], seed=1)]
        inputs, expected = batch_trees(trees), torch.stack([tree.compute_logits(model) for tree in trees])
        size = expected.shape[1]
        assert_near(run_uncached(model, **inputs), expected)
        for borders, recording in (((prefix, size), False), ((prefix, 7, 9, size), True)):
            cache = DynamicCache(config=model.config)
            model(inputs["input_ids"][:, :prefix], past_key_values=cache)
            if recording:
                cache.activate_past_recording()
            for start, end in pairwise(borders):
                logits = model(**slice_tokens(inputs, start, end), past_key_values=cache).logits
                assert_near(logits, expected[:, start:end])

    # Decoding with a cache

    @pytest.mark.parametrize("way", DECODING, ids=lambda way: way.name)
    def test_cached_equals_uncached(self, model, way):
        subject = Subject(model)
        probe = Probe(subject, texts_for(subject), OWN_EXACT)
        way.run(probe)
        assert probe.parting is None, f"{probe.parting}, where logits differ by {probe.error:.1e} of the largest"

    @pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
    def test_cached_equals_uncached_with_holes_in_the_mask(self, model, chunks):
        ids = tokens(3, T)
        mask = torch.ones(3, T, dtype=torch.long)
        mask[0, 1] = mask[1, 4:6] = mask[1, 11] = mask[2, :3] = mask[2, 9] = 0
        uncached = run_uncached(model, ids, attention_mask=mask)
        assert_near(decode(model, ids, chunks, attention_mask=mask)[mask.bool()], uncached[mask.bool()])

    def test_padding_between_turns_changes_nothing(self, model):
        """Second turns that are padded on their left equal each row alone, with a cache and without one."""
        if model.config.sliding_window is not None:
            return  # windows count the padding
        pads, ids = [0, 2, 5, 6], tokens(4, T)
        mask = torch.ones(4, T, dtype=torch.long)
        for row, pad in zip(mask, pads, strict=True):
            row[6 : 6 + pad] = 0
        alone = [run_uncached(model, row[real][None])[0] for row, real in zip(ids, mask.bool(), strict=True)]
        for logits in (run_uncached(model, ids, attention_mask=mask), decode(model, ids, [6, 7, 1, 1, 2], mask)):
            assert_near(logits[mask.bool()], torch.cat(alone))

    def test_static_cache_of_packed_documents_equals_uncached(self, model, ids):
        positions = document_positions(DOCUMENTS)
        cache = StaticCache(config=model.config, max_cache_len=T + 3)
        decoded = decode(model, ids, [6, 1, 1, 9], cache=cache, position_ids=positions)
        assert_near(decoded, run_uncached(model, ids, position_ids=positions))

    def test_cache_bytes_follow_the_plan(self, model, ids):
        cache = cache_of(model(ids, use_cache=True))
        names = {name for layer in cache.layers for name in getattr(layer, "tails", {})} - {POSITIONS}
        mechanisms = tuple(f"{mechanism}." for mechanism in model.config.mechanisms or {})
        foreign = sorted(name for name in names if not name.startswith(mechanisms))
        assert not foreign, (
            f"The tails {', '.join(map(repr, foreign))} could be another mechanism's too, and then both read wrong "
            'tokens: name them f"{self.registered_name()}.…".'
        )
        measured, stated = cache_bytes(cache), cost.cache_bytes(model.config, T, batch_size=2, element_size=8)
        assert measured == stated, (
            f"The cache of two rows of {T} tokens takes {measured:,} bytes, and the layer plan says {stated:,}: the "
            "stored heads and the tails in plan_stages() are not what the module keeps."
        )

    def test_served_from_a_paged_cache_as_alone(self, case, model):
        """Flat batches as a server runs them: chunks, shared blocks, restarted rows, tokens that are taken back."""
        try:
            check_servable(case.config())
        except HeadwaterError:
            pytest.skip("servers cannot run it")
        rows = make_prompts(case.config().vocab_size)
        with torch.no_grad():
            alone = [run_uncached(model, torch.tensor([row]))[0] for row in rows]
        for row, position, logits in Server(model).run_rows(rows):
            assert_near(logits, alone[row][position])

    def test_materialised_equals_the_same_model(self, case, model, ids):
        """Each layer has all keys and values of its own before the cache, so that any cache works."""
        if model.model.input_spec.lookback.limit:
            with pytest.raises((HeadwaterError, StrictDataclassError), match="without the raw tokens of"):
                case.config(materialise=True)
            return
        ordinary: Any = disturb(HeadwaterForCausalLM(case.config(materialise=True)).double()).eval()
        uncached = run_uncached(model, ids)
        assert_near(run_uncached(ordinary, ids), uncached)
        caches = DynamicCache(config=ordinary.config), None, StaticCache(config=ordinary.config, max_cache_len=T + 3)
        for cache in caches if ordinary.config.sliding_layers else (DynamicCache(), *caches):
            assert_near(decode(ordinary, ids, [6, 1, 1, 9], cache=cache), uncached)
        assert cache_bytes(caches[0]) == cost.cache_bytes(ordinary.config, T, batch_size=2, element_size=8)
        assert set(ordinary.config.layer_types) <= {"full_attention", "sliding_attention"}

    def test_parameters_are_counted(self, model):
        config, measured = model.config, model.num_parameters()
        stated = sum(cost.parameters(config).values())
        assert measured == stated, (
            f"count_cost() is off by {(measured - stated) / config.num_hidden_layers:+,.6g} parameters per layer: the "
            f"model has {measured:,}, and {stated:,} are counted."
        )

    def test_tables_are_looked_up(self, model):
        """`Cost.unread_parameters` covers each embedding table, of which a token reads a row."""
        config, counts = model.config, cost.parameters(model.config)
        head = config.vocab_size * config.hidden_size
        total = sum(counts.values()) - counts["embedding"] - counts["output head"] + head
        stated = total - cost.weights_read(config)
        added = [module for name, module in model.named_modules() if "mechanisms." in name]
        tables = sum(module.weight.numel() for module in added if isinstance(module, torch.nn.Embedding))
        assert tables <= stated <= model.num_parameters(), (
            f"count_cost().unread_parameters is {stated:,} in all layers, but tables have {tables:,} numbers, and "
            f"the model {model.num_parameters():,}."
        )

    def test_saved_is_what_autograd_keeps(self, case):
        """`Cost.saved`, in fp32, uncompiled: the difference from the same model without the mechanism.

        Alone: of two mechanisms, one may keep what the other keeps too, or what attention alone would have kept.
        """
        config, plain, length = case.config(), case.plain_config(), 64
        masked = config.position == "alibi" or config.sliding_window is not None  # CPU kernels then keep more
        if masked or len(config.mechanisms) > 1:
            return
        measured = kept_per_token(config, length) - kept_per_token(plain, length)
        stated = [cost.activation_bytes(c, length)["kept"] / (4 * length) for c in (config, plain)]
        difference = stated[0] - stated[1]
        # Allow a few more numbers per head, such as a softmax's sum.
        room = 0.05 * abs(difference) + config.num_hidden_layers * config.num_attention_heads
        assert abs(measured - difference) <= room, (
            f"count_cost().saved is off by {(measured - difference) / config.num_hidden_layers:+.1f} numbers per layer "
            f"and token: autograd keeps {measured:.1f} in all layers, and {difference:.1f} are counted."
        )

    def test_work_grows_with_the_tokens_alone(self, case):
        """FLOPs per token are as stated in a longer row too, and it takes no more operations: no loop over tokens."""
        config = copy.deepcopy(case.model.config)
        config._attn_implementation = "eager"
        operations = []
        with torch.device("meta"):
            model = HeadwaterForCausalLM(config)
            for length in (T, 3 * T):
                ids = torch.zeros(1, length, dtype=torch.long)
                with FlopCounterMode(display=False) as counter, Operations() as operation_counter, torch.no_grad():
                    model(ids, use_cache=False)
                stated = sum(cost.forward_flops(config, length, causal=False).values()) * length
                measured = counter.get_total_flops()
                assert measured == stated, (
                    f"count_cost() is off by {(measured - stated) / length / config.num_hidden_layers:+,.6g} FLOPs per "
                    f"layer and token, in rows of {length} tokens: the model takes {measured / length:,.6g} per token, "
                    f"and {stated / length:,.6g} are counted."
                )
                operations.append(operation_counter.count)
        assert operations[0] == operations[1], f"operations in rows of {T} and of {3 * T} tokens: {operations}"

    def test_decoding_takes_the_stated_work(self, case):
        """FLOPs of generating a token are as stated, after few cached tokens and after many."""
        config = copy.deepcopy(case.model.config)
        config._attn_implementation = "eager"
        with torch.device("meta"), torch.no_grad():
            model = HeadwaterForCausalLM(config).eval()
            for length in (T, 3 * T):
                ids, cache = torch.zeros(1, length, dtype=torch.long), DynamicCache(config=config)
                model(ids[:, 1:], past_key_values=cache)
                with FlopCounterMode(display=False) as counter:
                    model(ids[:, :1], past_key_values=cache)
                stated, measured = cost.decoding_flops(config, length), counter.get_total_flops()
                assert measured == stated, (
                    f"count_cost() is off by {measured - stated:+,.6g} FLOPs for the token after {length - 1} cached "
                    f"ones: the model takes {measured:,.6g}, and {stated:,.6g} are counted."
                )

    def test_starts_are_drawn_by_name(self, case):
        """Initial parameters depend neither on earlier draws nor on the model's other mechanisms."""
        torch.manual_seed(7)
        parameters = dict(HeadwaterForCausalLM(case.config()).named_parameters())
        torch.manual_seed(8)
        again = dict(HeadwaterForCausalLM(case.config()).named_parameters())
        plain = dict(HeadwaterForCausalLM(case.plain_config()).named_parameters())
        for name, parameter in parameters.items():
            assert torch.equal(parameter, again[name]), f"{name} is initialized differently the second time"
            assert parameter.isfinite().all(), f"{name} is not initialized with finite numbers"
            if name in plain and "embed" not in name and plain[name].shape == parameter.shape:
                assert torch.equal(parameter, plain[name]), f"{name} is initialized differently without the mechanisms"

    # Generation

    def test_generation_after_packed_documents(self, model):
        """Generation continues only the last document of the prompt."""
        ids = tokens(2, 9)
        options = dict(max_new_tokens=10, do_sample=False)
        generated = model.generate(ids, position_ids=document_positions([[4, 5]] * 2), **options)
        assert torch.equal(generated[:, 4:], model.generate(ids[:, 4:], use_cache=False, **options))

    # Training

    def test_training_computes_what_evaluation_does(self, case, model, ids):
        """There is no dropout."""
        assert_near(run_uncached(case.copy.train(), ids), run_uncached(model, ids))

    def test_every_parameter_gets_a_gradient(self, case, ids):
        model = case.copy.train()
        least = self.prepare(case, model)
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            is_shift = model.config.position != "rope" and not model.config.qk_norm
            if is_shift and name.endswith(("k_proj.bias", ".keys_bias")):
                continue  # it adds the same number to all of a query's scores, which softmax cancels
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > least, name

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_gradient_checkpointing(self, case, ids, use_reentrant):
        plain, checkpointed = case.copy.train(), case.copy.train()
        checkpointed.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
        for model in (plain, checkpointed):
            model(ids, labels=ids, position_ids=document_positions(DOCUMENTS)).loss.backward()
        for (name, a), b in zip(checkpointed.named_parameters(), plain.parameters(), strict=True):
            assert a.grad is not None, name
            assert_near(a.grad, b.grad, 1e-12)

    # The mechanism's own claims

    def test_identity_changes_nothing(self, case, ids):
        """The last mechanism, added as `headwater retrofit` would to a trained model that has the others."""
        mechanisms = json.loads(case.mechanisms)
        name, chosen = mechanisms.popitem() if mechanisms else ("", {})
        mechanism = resolve(name) if name else None
        options = mechanism.find_identity_options(chosen) if isinstance(mechanism, AddsToTrainedModel) else None
        if options is None:
            return
        assert chosen.items() <= options.items(), f"the options {options} do not contain those that were passed"
        old = shared(mechanisms, **case.fields)
        new = add_mechanisms(old, {name: chosen}).eval()
        assert_near(run_uncached(new, ids), run_uncached(old, ids))

    def test_growth_keeps_the_function(self, case):
        """By methods that promise it, with more layers, heads and width; `grow` compares the models."""
        if case.base != "llama" or len(json.loads(case.mechanisms)) != 1:
            return
        heads = dict(num_attention_heads=8, num_key_value_heads=4)
        for sizes in (dict(num_hidden_layers=5), heads, heads | dict(method="lemon"), dict(hidden_size=64)):
            try:
                grow(case.model, **sizes)
            except FunctionChanged:
                raise
            except HeadwaterError:
                pass  # the mechanism or the method does not grow so

    def test_heads_and_tokens_are_computed_alone(self, model, ids):
        """If `per_head` holds, halves of the heads read the same alone as in the model. If `per_token` holds, a token
        changes no other as long as attention is the same."""
        names = model.config.mechanisms
        if {"num_attention_heads", "num_key_value_heads", "head_dim"} & (model.config.sliding_fields or {}).keys():
            return  # such models run in one process
        if not all(can_split_heads(resolve(name), options) for name, options in names.items()):
            return
        for together, alone in read_halves(model, ids):
            assert_near(alone, together)
        if not all(can_split_tokens(resolve(name)) for name in names):
            return
        changed_ids = ids.clone()
        changed_ids[:, 6] = (changed_ids[:, 6] + 1) % 97
        logits = outside_attention(model, ids, changed_ids)
        is_unchanged = torch.arange(T) != 6
        assert_near(logits[:, is_unchanged], run_uncached(model, ids)[:, is_unchanged])

    # Other properties

    def test_single_precision_cached_equals_uncached(self, case, ids):
        model = case.copy.float()
        uncached = run_uncached(model, ids)
        for chunks in CHUNKS.values():
            assert_near(decode(model, ids, chunks), uncached, tolerance=1e-4)

    def test_half_precision_equals_full(self, case, ids):
        """Logits in bf16, with and without a cache, are right to its precision."""
        model = case.copy
        expected = run_uncached(model, ids)
        half = model.bfloat16()
        for logits in (run_uncached(half, ids), decode(half, ids, CHUNKS["chunked"])):
            assert logits.dtype == torch.bfloat16
            assert (logits - expected).norm() < 0.3 * expected.norm()

    def test_bf16_stream_is_nearly_as_exact_as_bf16_mixed(self, traced):
        """The median error of the gradient of packed rows is at most 1.5 times as large, or below bf16's resolution."""
        positions = document_positions(DOCUMENTS)

        def gradient(ids: Tensor, precision: Precision) -> Tensor:
            model = precision.cast_activations(traced.copy.to(precision.weights)).train()
            with precision.autocast("cpu"):
                model(ids, labels=ids, position_ids=positions).loss.backward()
            return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

        errors = []
        for seed in range(10):
            ids = tokens(2, T, seed=seed)
            exact = gradient(ids, Precision.FP64)
            halves = [gradient(ids, precision) for precision in (Precision.BF16_MIXED, Precision.BF16_STREAM)]
            assert all(half.dtype == torch.float32 for half in halves)
            errors.append([(half - exact).norm() / exact.norm() for half in halves])
        mixed, stream = torch.tensor(errors).median(0).values
        assert 0 < stream <= max(1.5 * mixed, 2**-7)

    def test_save_and_load(self, case, ids, tmp_path):
        model = case.copy.float()
        model.save_pretrained(tmp_path)
        loaded = HeadwaterForCausalLM.from_pretrained(tmp_path)
        assert list((loaded.config.mechanisms or {}).items()) == list(model.config.mechanisms.items())
        assert loaded.plans == model.plans
        for (name, a), (loaded_name, b) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
            assert name == loaded_name
            assert torch.equal(a, b), name
        for parameter in loaded.parameters():  # rounding depends on how the file aligns them in memory
            parameter.data = parameter.data.clone()
        assert torch.equal(loaded(ids).logits, model(ids).logits)

    def test_options_are_read(self, case):
        """Each option that the case sets is read to build the model: to validate it alone changes nothing."""
        read: dict[str, set[str]] = defaultdict(set)

        def record_reads(mechanism: type[Mechanism], options: dict[str, Any]) -> RecordedOptions:
            parsed = parse_options(mechanism, json.loads(json.dumps(options)))
            return RecordedOptions(parsed, read[mechanism.registered_name()])

        with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
            patch.setattr("headwater.config.options.parse_options", record_reads)
            for mechanism in map(resolve, json.loads(case.mechanisms)):
                patch.setattr(mechanism, "validate_options", lambda options, config: None)
            HeadwaterForCausalLM(case.config())
        for name, options in json.loads(case.mechanisms).items():
            unread = options.keys() - read[resolve(name).registered_name()]
            assert not unread, f"{name} does not read {', '.join(sorted(unread))}"

    def test_more_tokens(self, case, ids):
        """With a larger vocabulary old tokens keep their logits, and new ones have those of the equations."""
        model = case.copy
        old_logits, size = run_uncached(model, ids), model.config.vocab_size
        model.resize_token_embeddings(size + 7)
        assert_near(run_uncached(model, ids)[..., :size], old_logits)
        ids = torch.tensor([[3, size, size + 6, 5, size + 1, size]])
        self.assert_equal(model, lambda m: run_uncached(m, ids), self.reference_of(model)(ids[0])[None])

    def test_config_round_trip(self, model):
        original = model.config
        for restored in (
            HeadwaterConfig.from_dict(original.to_dict()),
            HeadwaterConfig(**original.to_dict()),
            HeadwaterConfig.from_dict(json.loads(original.to_json_string(use_diff=False))),
            HeadwaterConfig.from_dict(json.loads(original.to_json_string())),
            copy.deepcopy(original),
        ):
            restored.layer_types = original.layer_types  # which the model had narrowed according to its plans
            assert restored.to_dict() == original.to_dict()
            assert list(restored.mechanisms or {}) == list(original.mechanisms or {})
            assert plan_layers(restored) == plan_layers(original)

    # Compilation

    def test_compiles_as_one_graph(self, traced):
        """Forward and backward as the compiler captures them, run without generated code, equal eager ones."""
        eager, compiled, ids = traced.copy.train(), traced.copy.train(), tokens(2, T)
        torch._dynamo.reset()
        losses = [
            m(ids, labels=ids).loss for m in (eager, torch.compile(compiled, fullgraph=True, backend="aot_eager"))
        ]
        for loss in losses:
            loss.backward()
        assert_near(losses[1], losses[0], 1e-5)
        for (name, a), b in zip(compiled.named_parameters(), eager.parameters(), strict=True):
            assert a.grad is not None, name
            assert_near(a.grad, b.grad, 1e-5)
