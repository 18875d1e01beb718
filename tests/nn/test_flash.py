"""FlashAttention 3 from the hub: how models call it, against the mask in fp64, and where it is refused.

Its kernels run on GPUs only. Here functions with their arguments compute the equation with a plain softmax.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.integrations import hub_kernels

from conftest import assert_near, build, config, document_positions, tokens
from headwater.models.compiling import compile_model
from headwater.nn.attention_kernel import supported_kernels
from headwater.nn.documents import FLASH3
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.attention_choice import choose_attention, set_attention
from headwater_lab.training.loop import with_documents

T = 24
ROWS = [[1, 9, 1, 13], [20, 4]]
MODELS = {
    **{name: ({name: {}}, {}) for name in MECHANISMS.built_in},
    "none": ({}, {}),
    "grouped": ({"kv_shift": {}}, {"num_key_value_heads": 2}),
    "window": ({"short_conv": {}}, {"sliding_window": 5}),
    "some windows": ({}, {"sliding_window": 5, "sliding_layers": [0]}),
    "materialised": ({"value_residual": {}, "skip_layer": {}}, {"materialise": True}),
}


def attend(q, k, v, scale, sees):
    """softmax(q·kᵀ·scale)·v over the keys that each query sees: q [B, T, H, d], sees [T, T] -> [B, T, H, d]."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


def find_seen(queries, keys, causal, window):
    """Which keys each query sees; both count from the end, since the last query is that of the last key."""
    distance = queries[:, None] - keys
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance <= window[0]) if window[0] >= 0 else seen


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    keys = torch.arange(k.shape[1])
    return attend(q, k, v, softmax_scale, find_seen(keys[-q.shape[1] :], keys, causal, window_size))


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    assert cu_seqlens_q.dtype == torch.int32
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    queries, keys = (torch.arange(len(x), dtype=torch.int32) for x in (q, k))
    ends = torch.searchsorted(cu_seqlens_q, queries, right=True), torch.searchsorted(cu_seqlens_k, keys, right=True)
    sees = find_seen(queries - cu_seqlens_q[ends[0]], keys - cu_seqlens_k[ends[1]], causal, window_size)
    return attend(q[None], k[None], v[None], softmax_scale, sees & (ends[0][:, None] == ends[1]))[0]


@pytest.fixture
def kernel(monkeypatch):
    """What the package kernels would load; transformers' routing to it is real."""
    functions = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **options: functions)
    yield functions
    modeling_flash_attention_utils._loaded_implementation = None
    AttentionInterface._global_mapping.pop(FLASH3, None)


def run_step(model, packed):
    """Logits and gradients of a step on plain or packed rows."""
    batch = {"input_ids": tokens(2, T)}
    if packed:
        batch["position_ids"] = document_positions(ROWS)
        batch = with_documents(batch)
    model.train().zero_grad()
    out = model(**batch, labels=batch["input_ids"], use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(actual, expected):
    assert_near(actual[0], expected[0], 1e-12)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert_near(actual[1][name], gradient, 1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_the_mask(name, packed, kernel):
    mechanisms, changes = MODELS[name]
    model = build(mechanisms, **changes)
    if supported_kernels(model.config)[0] is not None:
        with pytest.raises(HeadwaterError, match=f"only, not {FLASH3}"):
            model.set_attn_implementation(FLASH3)
        return
    expected = run_step(model, packed)
    model.set_attn_implementation(FLASH3)
    assert_same_step(run_step(model, packed), expected)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph(packed, rows, kernel):
    model, ids = build({"kv_shift": {}}), tokens(rows, T)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    if packed:
        batch = with_documents(batch | {"position_ids": document_positions(ROWS[:rows])})
    expected = model(**batch).loss
    model.set_attn_implementation(FLASH3)
    compile_model(model, "eager", whole=True)  # raises at a break
    assert_near(model(**batch).loss, expected, 1e-12)


def test_heads_are_not_transposed(kernel, monkeypatch):
    """The kernel reads the projections' memory: nothing on the way to it copies a tensor of heads."""
    copies, strides = [], []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_) and args[0].ndim >= 3:
                copies.append(args[0].shape)
            return func(*args, **kwargs or {})

    def record(q, k, v, *borders, **options):
        strides.extend(x.stride() for x in (q, k, v))
        return torch.zeros_like(q)

    model = build({})
    model.set_attn_implementation(FLASH3)
    monkeypatch.setattr(modeling_flash_attention_utils, "_flash_varlen_fn", record)
    batch = with_documents({"input_ids": tokens(2, T), "position_ids": document_positions(ROWS)})
    with Record():
        model.train()(**batch, use_cache=False)
    assert set(strides) == {(32, 8, 1), (16, 8, 1)}  # queries; keys and values
    assert copies == []


def test_generation(kernel):
    model, ids = build({"kv_shift": {}}), tokens(2, 9)
    mask = torch.ones(2, 9).long()
    mask[0, :3] = 0
    options = dict(attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **options)
    model.set_attn_implementation(FLASH3)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("name", [FLASH3, "flash_attention_2"])
def test_packed_rows_without_borders_are_refused(name, kernel):
    """The kernel would attend across documents."""
    model = build({})
    model.config._attn_implementation_internal = name
    with pytest.raises(HeadwaterError, match="pass cu_seq_lens_q"):
        model(tokens(2, T), position_ids=document_positions(ROWS), use_cache=False)


# Where it runs


def choose(device, changes=None, **training):
    fields = {"steps": 1, "attn_implementation": FLASH3, "precision": "bf16-mixed"} | training
    recipe = parse({"data": {"kind": "induction"}, "training": fields}, "test")
    return choose_attention(config(**changes or {}), recipe.training, torch.device(device), 256)


def test_a_gpu_that_this_machine_lacks_may_run_it():
    assert choose("cuda") == FLASH3


@pytest.mark.parametrize(
    ("device", "changes", "training", "words"),
    [
        ("cpu", {}, {}, "capability 9 only"),
        ("cuda", {}, {"precision": "32-true"}, "bfloat16"),
        ("cuda", {"attention_dropout": 0.1}, {}, "no dropout"),
    ],
)
def test_recipes_that_name_it_in_vain(device, changes, training, words):
    with pytest.raises(HeadwaterError, match=f"attn_implementation: {FLASH3} .*{words}.*; leave it out"):
        choose(device, changes, **training)


@pytest.mark.parametrize(("capability", "fits"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_the_gpu_must_fit(capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if fits:
        assert choose("cuda") == FLASH3
    else:
        with pytest.raises(HeadwaterError, match="capability 9 only"):
            choose("cuda")


@pytest.mark.skipif(hub_kernels.is_kernels_available(), reason="the package is installed")
def test_without_the_package():
    with pytest.raises(HeadwaterError, match=r"attn_implementation: `kernels` is .*pip install kernels"):
        set_attention(build({}), FLASH3)


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    pytest.importorskip("kernels")
    batch = with_documents({"input_ids": tokens(2, T), "position_ids": document_positions(ROWS)})
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    model = build({}, head_dim=64).cuda()
    expected = model(**batch, use_cache=False).logits
    set_attention(model.bfloat16(), FLASH3)
    assert_near(model(**batch, use_cache=False).logits.double(), expected, 5e-2)
