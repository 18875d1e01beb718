"""Attention of packed rows document by document: equal to its equation, to the mask, and to itself when compiled."""

import copy
import math

import pytest
import torch
from torch import _dynamo
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import assert_near, build, config, document_positions, tokens
from headwater.config.capabilities import LimitsKernels
from headwater.config.options import parse_options
from headwater.kernels import varlen
from headwater.nn.documents import make_cu_seq_lens, restarted_positions
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.util.errors import HeadwaterError
from headwater_lab.bench.gpu import combine_mechanisms
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.attention_choice import choose_attention
from headwater_lab.training.loop import with_documents

# Documents of two rows of 150 tokens: some have one token, some a whole row.
T = 150
ROWS = {
    "ragged": [[1, 70, 1, 1, 60, 17], [20, 30, 99, 1]],
    "one": [[T], [T]],
    "single tokens": [[1] * T, [T - 1, 1]],
    "long and short": [[65, 1, 64, 20], [3, 65, 66, 16]],
}


@pytest.fixture(autouse=True)
def _plan_anew():
    varlen._plan_calls.cache_clear()
    yield
    varlen._plan_calls.cache_clear()


def borders_of(rows) -> torch.Tensor:
    return make_cu_seq_lens(document_positions(rows))


def equation(q, k, v, rows, window=None):
    """softmax(q·k/√d) over the tokens of the same document, at most `window` back, -> [B, T, H, d], by loops."""
    heads, width = q.shape[1], q.shape[3]
    out = []
    for b, lengths in enumerate(rows):
        read, first = [], 0
        for length in lengths:
            for i in range(first, first + length):
                seen = slice(max(first, 0 if window is None else i - window + 1), i + 1)
                for h in range(heads):
                    kv = h * k.shape[1] // heads
                    weights = (k[b, kv, seen] @ q[b, h, i] / math.sqrt(width)).softmax(0)
                    read.append(weights @ v[b, kv, seen])
            first += length
        out.append(torch.stack(read).view(first, heads, width))
    return torch.stack(out)


def inputs(dtype=torch.float64, kv_heads=2):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, T, heads, 8, generator=draw).to(dtype) for heads in (4, kv_heads, kv_heads))
    return [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]


def attended(q, k, v, rows, window=None, kernel=varlen._run_by_documents):
    return kernel(q, k, v, borders_of(rows), T, 8**-0.5, window)


def gradients(out, given):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad((out * weight).sum(), given)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_equals_the_equation(rows, window):
    given = inputs()
    expected, actual = equation(*given, rows, window), attended(*given, rows, window)
    assert_near(actual, expected, 1e-12)
    for ours, theirs in zip(gradients(actual, given), gradients(expected, given), strict=True):
        assert_near(ours, theirs, 1e-10)


@pytest.mark.parametrize("by_matrix_units", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_lower_precisions_round_only(dtype, tolerance, by_matrix_units, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: by_matrix_units)
    given, rows = inputs(dtype), ROWS["ragged"]
    exact = [x.detach().double().requires_grad_() for x in given]
    actual, expected = attended(*given, rows), attended(*exact, rows)
    assert actual.dtype == dtype
    assert_near(actual.double(), expected, tolerance)
    for ours, theirs in zip(gradients(actual, given), gradients(expected, exact), strict=True):
        assert_near(ours.double(), theirs, 2 * tolerance)


@pytest.mark.slow
def test_autograd_agrees_with_differences_and_the_fake_forms_with_the_real_ones():
    q, k, v = (x[:, :, :9].detach().contiguous() for x in inputs(kv_heads=4))
    borders = make_cu_seq_lens(document_positions([[4, 1, 4], [9]]))
    for window in (0, 2):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        checks = "test_schema", "test_autograd_registration", "test_faketensor"
        torch.library.opcheck(varlen._run_forward, (*given, borders, 0.3, window), test_utils=checks)
        assert torch.autograd.gradcheck(lambda *x, w=window: varlen._run_forward(*x, borders, 0.3, w)[0], given)


# Models


def outcome(model, ids, positions, attention, **changes):
    """Logits and gradients."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    given = with_documents({"input_ids": ids, "position_ids": positions}) if attention == "varlen" else {}
    out = model(**{"input_ids": ids, "position_ids": positions} | given, labels=ids, use_cache=False, **changes)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(actual, expected):
    assert_near(actual[0], expected[0], 1e-12)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert_near(actual[1][name], gradient, 1e-10)


def limits_kernels(name):
    mechanism = resolve(name)
    return isinstance(mechanism, LimitsKernels) and mechanism.list_kernels(parse_options(mechanism, {})) is not None


MASKLESS = [name for name in MECHANISMS.built_in if not limits_kernels(name)]
# All of them with grouped queries; the mechanisms as they are by default and in other forms.
MODELS = {
    **{name: (mechanisms, {}) for name, mechanisms in combine_mechanisms(MASKLESS).items()},
    "sliding": ({"kv_shift": {}, "value_residual": {}}, {"sliding_window": 30}),
    "learned positions": ({"kv_shift": {"window": 3}}, {"position": "learned"}),
    "gpt2": ({"value_residual": {"mode": "dense"}}, {"gpt2": True, "num_key_value_heads": 4}),
    "materialised": ({"value_residual": {}, "skip_layer": {}}, {"materialise": True}),
}
QUICK = ("none", "together", "sliding")


@pytest.mark.parametrize("rows", ["ragged", pytest.param("single tokens", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in MODELS])
def test_models_equal_the_mask(name, rows):
    mechanisms, changes = MODELS[name]
    model = build(mechanisms, max_position_embeddings=256, **changes).train()
    ids, positions = tokens(2, T), document_positions(ROWS[rows])
    expected = outcome(model, ids, positions, "sdpa")
    assert_same(outcome(model, ids, positions, "varlen"), expected)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(outcome(model, ids, positions, "varlen"), expected)


def test_documents_alone_say_where_positions_restart():
    model, ids, rows = build({"kv_shift": {}}, max_position_embeddings=256), tokens(2, T), ROWS["ragged"]
    positions = document_positions(rows)
    expected = model(ids, position_ids=positions, use_cache=False).logits
    for attention in ("varlen", "sdpa"):
        model.set_attn_implementation(attention)
        # transformers' collators give all four, and the length as a number.
        given = {"cu_seq_lens_q": borders_of(rows), "cu_seq_lens_k": borders_of(rows)}
        actual = model(ids, use_cache=False, **given, max_length_q=99, max_length_k=99).logits
        assert_near(actual, expected, 1e-12)


def test_masks_caches_and_plain_rows_are_as_under_sdpa():
    model = build({"kv_shift": {}}, max_position_embeddings=256)
    ids, rows = tokens(2, T), ROWS["ragged"]
    positions, borders = document_positions(rows), borders_of(rows)
    mask = torch.ones(2, T).long()
    mask[0, -9:] = 0
    cases = [
        {"use_cache": False},
        {"use_cache": False, "position_ids": positions},
        {"use_cache": False, "position_ids": positions, "attention_mask": mask, "cu_seq_lens_q": borders},
        {"use_cache": True, "position_ids": positions, "cu_seq_lens_q": borders},
    ]
    for given in cases:
        model.set_attn_implementation("sdpa")
        expected = model(ids, **given)
        model.set_attn_implementation("varlen")
        actual = model(ids, **given)
        assert torch.equal(actual.logits, expected.logits)
    assert actual.past_key_values.get_seq_length() == T
    generated = [
        (model.set_attn_implementation(name), model.generate(ids[:, :9], max_new_tokens=4, do_sample=False))[1]
        for name in ("sdpa", "varlen")
    ]
    assert torch.equal(*generated)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_one_graph_whatever_the_documents(whole):
    """Two different layers; documents that change in number and place change no graph, and results are the mask's."""
    _dynamo.reset()
    counter = CompileCounter()
    model = build({"value_residual": {}, "kv_shift": {}}, max_position_embeddings=256, num_hidden_layers=4).train()
    runs = copy.deepcopy(model)
    runs.set_attn_implementation("varlen")
    if whole:
        compiled = torch.compile(runs, backend=counter, fullgraph=True)
    else:
        compiled = runs
        for block in runs.model.layers:
            block.compile(backend=counter, fullgraph=True)
    for rows in ([[T], [9, T - 9]], ROWS["ragged"], [[1] * 60 + [T - 60], [T]]):
        ids, positions = tokens(2, T), document_positions(rows)
        expected = outcome(model, ids, positions, "sdpa")
        runs.zero_grad()
        out = compiled(ids, position_ids=positions, cu_seq_lens_q=borders_of(rows), labels=ids, use_cache=False)
        out.loss.backward()
        assert_same((out.logits, {name: p.grad for name, p in runs.named_parameters()}), expected)
    assert counter.frame_count == (1 if whole else 2)


# Where documents begin


def test_borders_have_one_size_for_one_shape():
    borders = [borders_of(rows) for rows in ([[T], [T]], [[1] * 60 + [T - 60], [T]], [[9] * 16 + [6], [T]])]
    assert len({b.shape for b in borders}) == 1
    for found in borders:
        assert (found.dtype, int(found[0]), int(found[-1])) == (torch.int32, 0, 2 * T)
    more = borders_of([[1] * T, [1] * T])
    assert len(more) > len(borders[0])
    assert torch.equal(restarted_positions(more, 2, T), torch.zeros(2, T).long())


def test_borders_of_padded_and_continued_rows():
    """A padded tail is documents of its own; a row may begin inside a document, and look no further back."""
    tail = torch.cat((document_positions([[5, 3]]), torch.zeros(1, 4).long()), 1)
    assert make_cu_seq_lens(tail)[:7].tolist() == [0, 5, 8, 9, 10, 11, 12]
    continued = torch.tensor([[7, 8, 9, 0, 1]])
    assert make_cu_seq_lens(continued)[:3].tolist() == [0, 3, 5]
    for unlike in ([[0, 1, 2, 1, 2]], [[0, 0, 0, 2, 3]], [[0, 1, 1, 2, 3]]):  # no blocks
        assert make_cu_seq_lens(torch.tensor(unlike)) is None


def test_batches_without_documents_are_left_alone():
    batch = {"input_ids": tokens(2, 5), "shift_labels": tokens(2, 5)}
    assert with_documents(batch) == batch
    odd = batch | {"position_ids": torch.tensor([[0, 1, 2, 1, 2]]).expand(2, -1)}
    assert with_documents(odd) == odd


@pytest.mark.parametrize(
    ("borders", "words"),
    [
        ([0, 3, T + 4, 2 * T], "across rows"),
        ([1, T, 2 * T], "rise from 0"),
        ([0, T, 2 * T - 1], "rise from 0"),
        ([0, T, 9, 2 * T], "rise from 0"),
    ],
)
def test_wrong_borders_are_refused(borders, words):
    with pytest.raises(HeadwaterError, match=words):
        varlen._run_by_documents(*inputs(), torch.tensor(borders, dtype=torch.int32), T, 1.0, None)


def test_borders_that_contradict_positions_are_refused():
    model = build({}, max_position_embeddings=256)
    with pytest.raises(HeadwaterError, match="position_ids too"):
        model(tokens(2, T), attention_mask=torch.ones(2, T), cu_seq_lens_q=borders_of(ROWS["one"]))
    with pytest.raises(HeadwaterError, match="disagree"):
        model(tokens(2, T), position_ids=document_positions(ROWS["ragged"]), cu_seq_lens_q=borders_of(ROWS["one"]))


# Where it runs


def test_what_it_cannot_compute_is_refused():
    model = build({}, max_position_embeddings=256, attention_dropout=0.1).train()
    model.set_attn_implementation("varlen")
    with pytest.raises(HeadwaterError, match="no dropout"):
        model(tokens(2, T), cu_seq_lens_q=borders_of(ROWS["ragged"]))
    with pytest.raises(HeadwaterError, match="softcap"):
        varlen.varlen_attention(model, *inputs(), None, 1.0, cu_seq_lens_q=borders_of(ROWS["one"]), softcap=2.0)
    of_weights = {"value_residual": {"target": "probabilities"}}
    for changes, kernels in (({"position": "alibi"}, "sdpa"), ({"mechanisms": of_weights}, "eager")):
        with pytest.raises(HeadwaterError, match=f"{kernels}.* only, not varlen"):
            build(**changes, attn_implementation="varlen")


@pytest.mark.parametrize(
    ("device", "context", "changes", "training", "expected"),
    [
        ("cpu", 512, {}, {}, "varlen"),
        ("cpu", 512, {}, {"precision": "bf16-mixed"}, "varlen"),
        ("cpu", 511, {}, {}, None),
        ("cpu", 511, {}, {"attn_implementation": "varlen"}, "varlen"),
        ("cpu", 512, {}, {"attn_implementation": "sdpa"}, "sdpa"),
        ("cpu", 512, {"attention_dropout": 0.1}, {}, None),
        ("cpu", 512, {"position": "alibi"}, {}, None),
        ("cpu", 512, {"mechanisms": {"value_residual": {"target": "probabilities"}}}, {}, None),
        ("cuda", 64, {}, {}, None),
        ("cuda", 64, {"head_dim": 12}, {"precision": "bf16-true"}, None),
        ("mps", 256, {}, {"precision": "bf16-true"}, None),
    ],
)
def test_where_it_is_the_default(device, context, changes, training, expected):
    recipe = parse({"data": {"kind": "induction"}, "training": {"steps": 1} | training}, "test")
    assert choose_attention(config(**changes), recipe.training, torch.device(device), context) == expected


@pytest.mark.parametrize(
    ("device", "changes", "words"),
    [("cuda", {}, "not float32"), ("cpu", {"attention_dropout": 0.5}, "dropout"), ("mps", {}, "mps")],
)
def test_a_recipe_that_names_it_in_vain(device, changes, words):
    recipe = parse({"data": {"kind": "induction"}, "training": {"steps": 1, "attn_implementation": "varlen"}}, "test")
    with pytest.raises(HeadwaterError, match=f"attn_implementation: varlen .*{words}"):
        choose_attention(config(**changes), recipe.training, torch.device(device), 256)


def stand_in(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What PyTorch documents of `varlen_attn`, which runs on GPUs only: q [tokens, H, d] -> [tokens, H, d]."""
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k >= int(cu_seq_q.diff().max())
    assert enable_gqa == (q.shape[1] > k.shape[1])
    out = torch.empty_like(q)
    for first, last in zip(cu_seq_q.tolist(), cu_seq_k.tolist()[1:], strict=False):
        for i in range(first, last):
            seen = slice(first if window_size[0] < 0 else max(first, i - window_size[0]), i + window_size[1] + 1)
            for h in range(q.shape[1]):
                kv = h * k.shape[1] // q.shape[1]
                out[i, h] = (k[seen, kv] @ q[i, h] * scale).softmax(0) @ v[seen, kv]
    return out


@torch.no_grad()
@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_what_a_gpu_is_asked_for(window, takes_groups, monkeypatch):
    given, rows = inputs(), ROWS["long and short"]
    monkeypatch.setattr(varlen, "TAKES_GROUPS", takes_groups)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    assert_near(attended(*given, rows, window, varlen._run_flash), equation(*given, rows, window), 1e-12)


def test_a_gpu_runs_pytorchs_kernel_both_ways():
    """On tensors without numbers: where there is no GPU, at least the shapes and the operations."""
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    given = [torch.empty(2, n, T, 8, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]
    with Record():
        out = varlen._run_flash(*given, torch.empty(67, device="meta", dtype=torch.int32), T, 0.1, None)
        found = torch.autograd.grad(out.sum(), given)
    assert out.shape == (2, T, 4, 8)
    assert [x.shape for x in found] == [x.shape for x in given]
    assert [name for name in called if "varlen" in name] == ["_varlen_attn", "_varlen_attn_backward"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    given, rows = [x.detach().cuda().bfloat16().requires_grad_() for x in inputs()], ROWS["ragged"]
    exact = [x.detach().cpu().double().requires_grad_() for x in given]
    actual = varlen._run_flash(*given, borders_of(rows).cuda(), T, 8**-0.5, None)
    expected = attended(*exact, rows)
    assert_near(actual.cpu().double(), expected, 2e-2)
    for ours, theirs in zip(gradients(actual, given), gradients(expected, exact), strict=True):
        assert_near(ours.cpu().double(), theirs, 4e-2)
