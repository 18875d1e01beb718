"""Decoding with a static cache: the same tokens, no waiting for the device, no copies of the history, one graph."""

import itertools
import re

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import StaticCache

from conftest import assert_near, build, config, shared, tokens
from gpu_code import write_code
from headwater import HeadwaterForCausalLM
from headwater.models import input_checks
from headwater.models.decoding import WARM, Arrivals, Decoder, DecodingState
from headwater.nn import lookback, masks
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError
from waits import CountedWaits, NoWaits, no_waits

LEARNING = {"value_residual": {"mode": "learnable"}, "kv_shift": {"window": 3}}
MANY = {"pattention": {}, "kv_shift": {}, "value_residual": {}, "skip_layer": {}, "dense_former": {}}
SHARED = {"kv_shift": {}, "svformer": {}, "skip_layer": {}}
MODELS = {
    "vanilla": {},
    **{name: {name: LEARNING.get(name, {})} for name in sorted(MECHANISMS.built_in)},
    "weights": {"value_residual": {"target": "probabilities"}},
    "many": MANY,
    "shared": SHARED,
}
every = pytest.mark.parametrize("name", MODELS)
positions = pytest.mark.parametrize("position", ["rope", "learned", "alibi", "none"])
ROOM = 64


def quickly(*quick: str) -> list:
    """The models, those not named here slow: each is traced for seconds."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


def left_padded(rows: int, length: int) -> torch.Tensor:
    return (torch.arange(length) >= torch.arange(rows)[:, None] * 2).long()


def steps(device: str = "cpu") -> list[dict]:
    """What a step may be given besides its tokens, of rows with 9 tokens and one more."""
    ones = torch.ones(2, ROOM, dtype=torch.long, device=device)
    return [{}, {"attention_mask": ones[:, :10]}, {"attention_mask": ones}, {"position_ids": 9 * ones[:, :1]}]


class OneDevice(TorchDispatchMode):
    """Refuses operations whose tensors are not all on one device: on a GPU the host would copy, and wait."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in tree_leaves((args, kwargs, out)):
            assert not isinstance(x, torch.Tensor) or x.device.type == self.device, f"{func} uses the {x.device}"
        return out


class Written(TorchDispatchMode):
    """Notes operations whose result is new and has at least `size` elements."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.numel() >= self.size and x.untyped_storage()._cdata not in known:
                self.found.append((func, x.shape))
        return out


# One step of the model


@pytest.mark.sampled(167)
@every
@positions
@pytest.mark.parametrize("step", range(4))
@torch.no_grad()
def test_a_step_of_the_model_does_not_wait(name, position, step):
    """On fake tensors, which have no numbers to wait for, as on a GPU."""
    with FakeTensorMode():
        made = config(MODELS[name], position=position)
        model, ids = HeadwaterForCausalLM(made).eval(), torch.zeros(2, 9, dtype=torch.long)
        cache = StaticCache(config=made, max_cache_len=ROOM)
        model(ids, past_key_values=cache)
        for layer in cache.layers:  # a fake tensor remembers its number if it was given one
            layer.cumulative_length = torch.zeros((), dtype=torch.long)
        with pytest.raises(DataDependentOutputException):
            bool(cache.get_seq_length() > 0)
        model(ids[:, :1], past_key_values=cache, **steps()[step])


@pytest.mark.sampled(167)
@every
@positions
@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_a_step_of_the_model_stays_on_its_device(name, position, dtype, step):
    made = config(MODELS[name], position=position)
    model, ids = HeadwaterForCausalLM(made).eval().to("meta", dtype), torch.zeros(2, 9, dtype=torch.long, device="meta")
    cache = StaticCache(config=made, max_cache_len=ROOM)
    model(ids, past_key_values=cache)
    given = steps("meta")[step]
    with OneDevice("meta"):
        model(ids[:, :1], past_key_values=cache, **given)


@pytest.mark.sampled(29)
@every
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "matmul"])
@pytest.mark.parametrize("position", ["rope", "alibi"])
@pytest.mark.parametrize("step", range(4))
@torch.no_grad()
def test_a_step_writes_nothing_as_large_as_a_history(name, kernel, position, step):
    """Of keys or values of one head; four heads share two of them."""
    if name == "weights" and kernel != "eager":
        pytest.skip("attention weights need the eager kernel")
    model, ids, room = shared(MODELS[name], position=position, attn_implementation=kernel), tokens(2, 9), 256
    cache = StaticCache(config=model.config, max_cache_len=room)
    model(ids, past_key_values=cache)
    given = {key: x.repeat(1, 4) if x.shape[1] == ROOM else x for key, x in steps()[step].items()}
    with Written(size=2 * room * model.config.head_dim) as written:
        model(ids[:, :1], past_key_values=cache, **given)
    assert not written.found


@pytest.mark.sampled(19)
@every
@positions
@pytest.mark.parametrize("numbered", [False, True])
@torch.no_grad()
def test_a_mask_may_be_as_wide_as_the_static_cache(name, position, numbered):
    """With padding and holes; later columns are not looked at. numbered: with position ids."""
    model, ids = shared(MODELS[name], position=position), tokens(3, 14)
    mask = left_padded(3, 14)
    if model.model.input_spec.lookback.limit == 0:  # else a static cache may lack the token before a hole
        mask[1, 8] = mask[2, 6:8] = mask[0, 11] = 0
    wide = torch.ones(3, ROOM, dtype=torch.long)
    wide[:, :14] = mask
    given = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if numbered else {}
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    logits = [model(ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache).logits]
    for begin, end in ((9, 10), (10, 11), (11, 14)):
        new = {key: x[:, begin:end] for key, x in given.items()}
        logits.append(model(ids[:, begin:end], attention_mask=wide, past_key_values=cache, **new).logits)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    assert_near(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("name", ["kv_shift", "short_conv"])
@torch.no_grad()
def test_a_static_cache_that_lacks_the_token_before_padding_says_so(name):
    """It has room for the last raw tokens only, whether they are padding or not; a growing cache keeps more."""
    model, ids = shared(MODELS[name]), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, 4] = 0
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
    with pytest.raises(HeadwaterError, match="unclear which token precedes"):
        model(ids[:, 5:], attention_mask=mask, past_key_values=cache)
    with pytest.raises(HeadwaterError, match="pad rows on their left"):
        Decoder(model)(ids, attention_mask=mask, max_new_tokens=2)


def allocated(mechanisms: dict) -> list[int]:
    """Elements of each tensor that the compiled step allocates, as the compiler writes it for a GPU; it never runs."""
    sizes: list[int] = []

    def compiler(graph, inputs):
        code, _ = write_code(graph, inputs, is_inference=True)
        for shape in re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code):
            sizes.append(torch.Size(int(n) for n in shape.split(",") if n.strip()).numel())
        return graph.forward

    backend = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    decoder = Decoder(build(mechanisms).float(), compiled=True, backend=backend)
    with inductor.patch(cpu_backend="triton", compile_threads=1):
        decoder(tokens(2, 300), max_new_tokens=2)
    return sizes


@pytest.mark.parametrize("name", quickly("shared"))
@pytest.mark.slow
def test_a_compiled_step_writes_nothing_as_large_as_a_history(name, monkeypatch):
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "")
    sizes = allocated(MODELS[name])
    assert sizes
    assert max(sizes) < 2 * 300 * 8


# The loop


def plain(model, ids, mask=None, tokens=10, **options):
    given = {"pad_token_id": 0, "do_sample": False, "attention_mask": mask, "max_new_tokens": tokens}
    return model.generate(ids, **(given | options))


@pytest.mark.sampled(17)
@every
@positions
def test_tokens_equal_those_without_a_cache(name, position):
    model, ids, mask = shared(MODELS[name], position=position), tokens(3, 9), left_padded(3, 9)
    decoder = Decoder(model)
    assert torch.equal(decoder(ids, mask, max_new_tokens=10), plain(model, ids, mask, use_cache=False))
    held, other = decoder.state, tokens(3, 7, seed=1)
    assert torch.equal(decoder(other, max_new_tokens=10), plain(model, other, use_cache=False))
    assert decoder.state is held, "its memory is used again"


OTHERS = [{"sliding_window": 5}, {"sliding_window": 11}, {"attn_implementation": "matmul"}]
LOOKING = {"kv_shift": {}, "value_residual": {}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mechanisms", [{}, LOOKING], ids=["vanilla", "looking"])
@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_windows_and_other_kernels(mechanisms, changes, monkeypatch):
    """A window's cache must not depend on what the host counts, which a replayed step would not."""
    model, ids, mask = build(mechanisms, **changes), tokens(3, 9), left_padded(3, 9)
    expected = plain(model, ids, mask, use_cache=False)
    as_on_a_gpu(monkeypatch)
    advance, state = DecodingState.run_step, []

    def stepping(self):
        with NoWaits(), OneDevice("cpu"):
            advance(self)
        layers = self.cache.layers
        state.append([{k: v for k, v in vars(layer).items() if isinstance(v, int | bool | float)} for layer in layers])

    monkeypatch.setattr(DecodingState, "run_step", stepping)
    assert torch.equal(Decoder(model)(ids, mask, max_new_tokens=10), expected)
    assert all(numbers == state[0] for numbers in state)


OPTIONS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "eos_token_id": [3, 30, 60, 90], "pad_token_id": 5},
    {"eos_token_id": list(range(0, 97, 3)), "pad_token_id": 4},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_draws_and_ends_are_those_of_generate(options, seed):
    model, ids, mask = shared(SHARED), tokens(4, 9, seed=seed), left_padded(4, 9)
    torch.manual_seed(seed)
    sampling = {"do_sample": "temperature" in options, "top_k": 0, "top_p": 1.0} if "temperature" in options else {}
    expected = plain(model, ids, mask, tokens=30, **sampling | options)
    made = Decoder(model)(ids, mask, max_new_tokens=30, seed=seed, **options)
    assert torch.equal(made, expected)
    assert "eos_token_id" not in options or (made[:, 9:] == options["pad_token_id"]).any()


def test_the_watcher_sees_every_token_and_ends_the_generation():
    model, ids, seen = shared(), tokens(2, 5), []
    whole = plain(model, ids)
    made = Decoder(model)(ids, max_new_tokens=10, watch=lambda new: seen.append(new) or len(seen) == 4)
    assert torch.equal(made, whole[:, :9])
    assert torch.equal(torch.stack(seen, 1), whole[:, 5:9])


def test_longer_requests_and_other_options_take_new_memory():
    model, ids = shared(), tokens(1, 5)
    decoder = Decoder(model)
    for rows, new in ((1, 10), (1, 100), (2, 10)):
        given = ids.expand(rows, -1)
        assert torch.equal(decoder(given, max_new_tokens=new), plain(model, given, tokens=new))
    assert decoder.cache.layers[0].keys.shape[0] == 2


def test_the_decoder_refuses_what_it_cannot_replay():
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(HeadwaterError, match="changes its frequencies"):
        Decoder(build(rope_parameters=scaled))
    with pytest.raises(HeadwaterError, match="64 learned positions"):
        Decoder(shared(position="learned"))(tokens(1, 60), max_new_tokens=5)
    padded = torch.cat((torch.zeros(1, 20), torch.ones(1, 40)), 1).long()
    assert Decoder(shared(position="learned"))(tokens(1, 60), padded, max_new_tokens=24).shape == (1, 84)


def as_on_a_gpu(monkeypatch):
    """The numbers of every tensor would have to be waited for."""
    for module in (input_checks, lookback, masks):
        monkeypatch.setattr(module, "must_wait", lambda tensor: True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, OPTIONS[3]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["vanilla", "many", "shared"])
def test_a_step_of_the_loop_reads_only_the_tokens_of_the_one_before(name, options, monkeypatch):
    as_on_a_gpu(monkeypatch)
    advance, receive, order = DecodingState.run_step, Arrivals.receive_tokens, []

    def stepping(self):
        order.append("step")
        with NoWaits(), OneDevice("cpu"):
            advance(self)

    monkeypatch.setattr(DecodingState, "run_step", stepping)
    monkeypatch.setattr(Arrivals, "receive_tokens", lambda self: order.append("read") or receive(self))
    model, ids = shared(MODELS[name]), tokens(2, 9)
    made = Decoder(model)(ids, left_padded(2, 9), max_new_tokens=8, **options | {"eos_token_id": None})
    assert made.shape == (2, 17)
    assert order == ["step", "read"] * 7 + ["read"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["vanilla", "many", "shared"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_step_of_generate_reads_once(name, position, monkeypatch):
    """transformers' own loop with a static cache, from one call of the model to the next."""
    as_on_a_gpu(monkeypatch)
    model, counts = build(MODELS[name], position=position), []
    with CountedWaits() as waits:
        model.register_forward_pre_hook(lambda *given: counts.append(waits.count))
        plain(model, tokens(2, 9), left_padded(2, 9), cache_implementation="static", disable_compile=True)
    assert {after - before for before, after in itertools.pairwise(counts[1:])} <= {0, 1}
    assert len(counts) == 10


@pytest.mark.parametrize("name", quickly("vanilla", "shared"))
@pytest.mark.slow
def test_the_step_compiles_once(name):
    """As one graph, for all steps and for other prompts."""
    model, ids, mask = build(MODELS[name]), tokens(2, 9), left_padded(2, 9)
    torch._dynamo.reset()
    counters.clear()
    decoder = Decoder(model, compiled=True, backend="eager")
    assert torch.equal(decoder(ids, mask, max_new_tokens=10), plain(model, ids, mask, use_cache=False))
    assert counters["stats"]["unique_graphs"] == 1
    other = tokens(2, 12, seed=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(decoder(other, max_new_tokens=10), plain(model, other, use_cache=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["vanilla", "many"])
def test_no_step_waits_on_a_gpu(name, monkeypatch):
    """Not even those that warm up; CUDA itself refuses."""
    model, ids, mask = build(MODELS[name]).cuda(), tokens(2, 9).cuda(), left_padded(2, 9).cuda()
    advance, steps = DecodingState.run_step, []

    def stepping(self):
        if self.steps == WARM:
            torch.cuda.synchronize()
            advance(self)  # the recording, which waits
        else:
            with no_waits(ids.device):
                advance(self)
        steps.append(self.steps)

    Decoder(model)(ids, mask, max_new_tokens=3)  # loads kernels
    monkeypatch.setattr(DecodingState, "run_step", stepping)
    Decoder(model)(ids, mask, max_new_tokens=10)
    assert len(steps) == 9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@every
def test_a_replayed_graph_gives_the_same_tokens(name, compiled):
    torch._dynamo.reset()
    model, ids, mask = build(MODELS[name]).cuda(), tokens(3, 9).cuda(), left_padded(3, 9).cuda()
    decoder = Decoder(model, compiled)
    for options in ({}, {"eos_token_id": [3, 30, 60]}):
        for _ in range(2):
            expected = plain(model, ids, mask, use_cache=False, **options)
            assert torch.equal(decoder(ids, mask, max_new_tokens=10, **options), expected)


def test_at_least_one_token_is_generated():
    with pytest.raises(HeadwaterError, match="max_new_tokens must be at least 1, not 0"):
        Decoder(build())(tokens(1, 3), max_new_tokens=0)
