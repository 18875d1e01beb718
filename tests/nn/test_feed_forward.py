"""What feed-forwards and norms keep for the backward pass, against the forms as written."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conftest import assert_near, config
from headwater import HeadwaterForCausalLM
from headwater.kernels.scratch import saved_bytes
from headwater.nn.feed_forward import FeedForward
from headwater.nn.norm import RMSNorm
from headwater.util.precision import Precision
from headwater_lab.bench.shapes import StepShape
from headwater_lab.bench.training_speed import stored_by_pair, text_pair

ACTS = ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_accurate", "relu", "relu2"]
KEPT_ONCE = ACTS[:6]


def feed_forward(act: str = "silu", form: str = "gated", dtype: torch.dtype = torch.float64, **changes) -> FeedForward:
    return FeedForward(config(hidden_act=act, feed_forward=form, **changes)).to(dtype)


def as_written(module: FeedForward, x: Tensor) -> Tensor:
    if module.gate_proj is None:
        return module.down_proj(module.act(module.up_proj(x)))
    return module.down_proj(module.act(module.gate_proj(x)) * module.up_proj(x))


def gradients(run, module: nn.Module, x: Tensor, g: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """The value, and the gradients of x and all parameters that want one."""
    x = x.detach().requires_grad_()
    y = run(x)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype) if g is None else g
    return y.detach(), list(torch.autograd.grad(y, wanted, g))


def agree(module: FeedForward, x: Tensor, run=None, tolerance: float = 1e-13) -> None:
    """The same values bit for bit, and the same gradients."""
    y, actual = gradients(run or module, module, x)
    expected_y, expected = gradients(lambda x: as_written(module, x), module, x)
    assert torch.equal(y, expected_y)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert_near(a, e, tolerance)


def x_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return 3 * torch.randn(2, 5, 32, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["gated", "plain"])
@pytest.mark.parametrize("act", ACTS)
def test_values_and_gradients_are_those_of_the_form_as_written(act, form, bias):
    agree(feed_forward(act, form, mlp_bias=bias), x_of())


@pytest.mark.parametrize("form", ["gated", "plain"])
@pytest.mark.parametrize("act", KEPT_ONCE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_are_the_inputs_of_the_activation(act, form, dtype):
    module, x = feed_forward(act, form, dtype), x_of(dtype)
    inner = 2 * 5 * 48 * x.element_size() * (2 if form == "gated" else 1)
    assert saved_bytes(lambda: module(x), [x, *module.parameters()]) == inner


@pytest.mark.parametrize("form", ["gated", "plain"])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new"])
def test_under_autocast(act, form):
    module, x = feed_forward(act, form, torch.float32, mlp_bias=True), x_of(torch.float32)

    def run(form):
        def inner(x):
            with torch.autocast("cpu", torch.bfloat16):
                return form(x * 1)  # of a leaf autocast would remember its cast

        return inner

    y, actual = gradients(run(module), module, x)
    expected_y, expected = gradients(run(lambda x: as_written(module, x)), module, x)
    assert torch.equal(y, expected_y)
    assert y.dtype == torch.bfloat16
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype == torch.float32
        assert_near(a, e, 0.05 if act == "gelu_new" else 1e-2)

    casts = sum(2 * p.numel() for p in module.parameters() if p.ndim == 2)
    rows, maps = 2 * 5, 2 if form == "gated" else 1
    x.requires_grad_()
    kept = saved_bytes(lambda: run(module)(x), [x, *module.parameters()])
    assert kept == casts + rows * 2 * (32 + 48) * maps


class Adapted(nn.Module):
    """As LoRA wraps a map: a frozen base, and beside it two small maps that read the same."""

    def __init__(self, base: nn.Module, dtype: torch.dtype, dropout: bool = False) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(0.5) if dropout else nn.Identity()
        self.down = nn.Linear(48, 2, bias=False, dtype=dtype)
        self.up = nn.Linear(2, 32, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x.to(self.down.weight.dtype)))).to(x.dtype)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("form", ["gated", "plain"])
@pytest.mark.parametrize("adapter", [torch.float64, torch.float32])
def test_a_wrapped_map_after_it(form, adapter, dropout):
    module = feed_forward("silu", form)
    module.down_proj = Adapted(module.down_proj, adapter, dropout)
    x = x_of()

    def seeded(run):
        def inner(x):
            torch.manual_seed(5)
            return run(x)

        return inner

    y, actual = gradients(seeded(module), module, x)
    expected_y, expected = gradients(seeded(lambda x: as_written(module, x)), module, x)
    assert torch.equal(y, expected_y)
    for a, e in zip(actual, expected, strict=True):
        assert_near(a, e, 1e-13 if adapter == torch.float64 else 1e-6)


class Reading(nn.Module):
    """A map in the place of another: `read` of it and what it is given."""

    def __init__(self, base: nn.Module, read) -> None:
        super().__init__()
        self.base, self.read = base, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.base, x)


READS = {
    "changed": lambda f, x: f(x.mul_(2)),
    "changed later": lambda f, x: f(x) + f(x * 2) + f(x.mul(1).add_(1)),
    "half of it": lambda f, x: f(x[:1]) + f(x[1:]),
    "out of order": lambda f, x: f(x.flip(-1)) + f(x.transpose(0, 1)).transpose(0, 1),
    "two rows as one": lambda f, x: f(x.flatten(0, 1)).unflatten(0, (2, 5)),
    "itself": lambda f, x: f(x * x) + f(x) * f(x).square(),
}


@pytest.mark.parametrize("form", ["gated", "plain"])
@pytest.mark.parametrize("read", READS)
def test_whatever_the_map_after_it_does(form, read):
    module = feed_forward("gelu", form)
    module.down_proj = Reading(module.down_proj, READS[read])
    agree(module, x_of())


@pytest.mark.parametrize("form", ["gated", "plain"])
def test_frozen_maps(form):
    for frozen in ("down_proj", "up_proj", "gate_proj"):
        module = feed_forward("silu", form)
        if getattr(module, frozen) is not None:
            getattr(module, frozen).requires_grad_(False)
        agree(module, x_of())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["gated", "plain"])
def test_under_activation_checkpointing(form, reentrant):
    module = feed_forward("silu", form, mlp_bias=True)
    x = x_of().requires_grad_()

    def run(x):
        return checkpoint(module, x, use_reentrant=reentrant)

    assert saved_bytes(lambda: run(x), [x, *module.parameters()]) <= 5056, "the generator's state"
    agree_by_backward(module, x, run)
    module.down_proj = Reading(module.down_proj, READS["itself"])
    agree_by_backward(module, x, run)


def agree_by_backward(module: nn.Module, x: Tensor, run) -> None:
    results = []
    for form in (run, lambda x: as_written(module, x)):
        x = x.detach().requires_grad_()
        module.zero_grad(set_to_none=True)
        y = form(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for a, e in zip(*results, strict=True):
        assert_near(a, e, 1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("gpt2", [False, True])
def test_gradient_checkpointing_of_a_model(gpt2, reentrant):
    model = HeadwaterForCausalLM(config(gpt2=gpt2, hidden_act="gelu" if gpt2 else "silu")).double().train()
    ids = torch.randint(97, (2, 16))
    model(ids, labels=ids).loss.backward()
    expected = [p.grad for p in model.parameters()]
    plain = saved_bytes(lambda: model(ids, labels=ids).loss, model.parameters())
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert saved_bytes(lambda: model(ids, labels=ids).loss, model.parameters()) < plain / 2
    model(ids, labels=ids).loss.backward()
    for a, e in zip(model.parameters(), expected, strict=True):
        assert_near(a.grad, e, 1e-12)


@pytest.mark.parametrize("form", ["gated", "plain"])
def test_hooks_around_it_see_everything_but_the_product(form):
    module, x = feed_forward("silu", form), x_of()
    with torch.autograd.graph.save_on_cpu():
        y, actual = gradients(module, module, x)
    expected_y, expected = gradients(lambda x: as_written(module, x), module, x)
    for a, e in zip([y, *actual], [expected_y, *expected], strict=True):
        assert_near(a, e, 1e-13)

    moved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        moved.append(x)
        return x * 2  # to be undone

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x / 2):
        _, actual = gradients(module, module, x)
    for a, e in zip(actual, expected, strict=True):
        assert_near(a, e, 1e-13)
    maps = 2 if form == "gated" else 1
    assert sum(t.shape[-1] == 48 and t.ndim == 3 for t in moved) == maps, "the inputs of the activation"
    assert not any(t.shape == (10, 48) for t in moved), "not the product"
    assert any(t.shape in ((32, 48), (48, 32)) for t in moved), "the map's weight"


def test_where_hooks_are_forbidden():
    module, x = feed_forward(), x_of()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        agree(module, x)


@pytest.mark.parametrize("form", ["gated", "plain"])
def test_a_graph_that_is_kept_gives_the_same_again(form):
    module, x = feed_forward("silu", form), x_of().requires_grad_()
    loss = module(x).square().sum()
    wanted = [x, *module.parameters()]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    only = torch.autograd.grad(loss, [module.down_proj.weight], retain_graph=True)
    again = torch.autograd.grad(loss, wanted)
    for a, e in zip([*again, *only], [*first, first[-1]], strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("form", ["gated", "plain"])
def test_second_derivatives_are_refused_rather_than_wrong(form):
    module, x = feed_forward("silu", form), x_of().requires_grad_()
    (gx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gx.sum().backward()
    # The gradient of the last map's weights depends on x through the product.
    (gw,) = torch.autograd.grad(module(x).square().sum(), module.down_proj.weight, create_graph=True)
    (e,) = torch.autograd.grad(as_written(module, x).square().sum(), module.down_proj.weight, create_graph=True)
    for_x, expected = (torch.autograd.grad(g.square().sum(), x)[0] for g in (gw, e))
    assert_near(for_x, expected, 1e-12)


@pytest.mark.parametrize("form", ["gated", "plain"])
def test_functional_transforms(form):
    module, x = feed_forward("gelu", form), x_of()
    parameters = dict(module.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    expected = torch.autograd.grad(as_written(module, x).square().sum(), list(parameters.values()))
    grads = torch.func.grad(loss)(parameters, x)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for name, e in zip(parameters, expected, strict=True):
        assert_near(grads[name], e, 1e-12)
        assert_near(each[name].sum(0), e, 1e-12)
    x = x.requires_grad_()
    assert_near(torch.func.vmap(module)(x), module(x), 1e-12)
    x = x.detach()
    with torch.autograd.forward_ad.dual_level():
        y = module(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert_near(tangent, torch.func.jvp(lambda x: as_written(module, x), (x,), (torch.ones_like(x),))[1], 1e-12)


@pytest.mark.slow
def test_under_compile():
    module, x = feed_forward(mlp_bias=True), x_of()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    agree(module, x, lambda x: compiled(x))


@pytest.mark.parametrize("form", ["gated", "plain"])
def test_nothing_outlives_the_graph(form):
    module, x = feed_forward("silu", form), x_of().requires_grad_()
    seen: list[weakref.ref] = []
    for part in (module.up_proj, module.down_proj):
        part.register_forward_hook(lambda _, given, made: seen.extend((weakref.ref(given[0]), weakref.ref(made))))
    gc.collect()
    gc.disable()
    try:
        y = module(x)
        assert seen[2]() is None, "the product"
        y.sum().backward()
        del y
        assert all(ref() is None for ref in seen[1:])
    finally:
        gc.enable()


def test_copies_and_hooks_of_the_maps_are_used():
    module, x = feed_forward(), x_of()
    calls: list[str] = []
    module.down_proj.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.down_proj.register_full_backward_hook(lambda *_: calls.append("backward"))
    twin = copy.deepcopy(module)
    agree(twin, x)
    assert calls == ["before", "backward"] * 2


# Norms


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_rms_norm_keeps_its_input(dtype, weight, autocast):
    norm = RMSNorm(32, 1e-6, weight)
    if weight:
        nn.init.normal_(norm.weight)
    norm = norm if autocast and dtype == torch.bfloat16 else norm.to(dtype)
    x = x_of(dtype)

    def plain(x):
        return nn.functional.rms_norm(x, (32,), norm.weight, 1e-6).to(x.dtype)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast) if autocast else nullcontext():
        y, actual = gradients(norm, norm, x)
        expected_y, expected = gradients(plain, norm, x)
        with torch.no_grad():
            assert torch.equal(norm(x), y)
        assert torch.equal(y, expected_y)
        assert y.dtype == expected_y.dtype
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == e.dtype
            assert_near(a, e, {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype])
        x.requires_grad_()
        assert saved_bytes(lambda: norm(x), [x, *norm.parameters()]) == 10 * max(4, x.element_size())


def test_rms_norm_of_heads_that_lie_apart():
    norm = RMSNorm(8, 1e-6).double()
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64).transpose(1, 2)
    (_, actual), (_, expected) = (
        gradients(run, norm, x) for run in (norm, lambda x: nn.functional.rms_norm(x, (8,), norm.weight, 1e-6))
    )
    for a, e in zip(actual, expected, strict=True):
        assert_near(a, e, 1e-13)


def test_functional_transforms_of_rms_norm():
    norm, x = RMSNorm(32, 1e-6).double(), x_of()

    def plain(x):
        return nn.functional.rms_norm(x, (32,), norm.weight, 1e-6)

    grads = (torch.func.grad(lambda x: f(x).square().sum().sin())(x) for f in (norm, plain))  # noqa: B023
    assert_near(*grads, 1e-12)
    x.requires_grad_()
    assert_near(torch.func.vmap(norm)(x), plain(x), 1e-12)
    with torch.autograd.forward_ad.dual_level():
        y = norm(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.autograd.forward_ad.unpack_dual(y).tangent is not None


# Whole models


@pytest.mark.parametrize(
    ("base", "bound", "precision"),
    [
        *(
            (base, bound, precision)
            for base, bound in (("llama", 0.72), ("gpt2", 0.65))
            for precision in (Precision.FP32, Precision.BF16, Precision.BF16_MIXED)
        ),
        ("llama", 0.62, Precision.BF16_STREAM),
    ],
)
def test_a_model_keeps_less_than_that_of_transformers(base, bound, precision):
    pair = text_pair(base, StepShape(layers=2, width=128, context=64, batch_size=4, vocab_size=97))
    ours, theirs = stored_by_pair(pair, precision)
    assert ours <= bound * theirs


@pytest.mark.parametrize("base", ["llama", "gpt2"])
def test_bench_train(run, base):
    shape = ("--layers", 1, "--width", 64, "--context", 32, "--batch-size", 1, "--precision", "32-true", "--base", base)
    code, text, _ = run("bench", "train", *shape, "--memory")
    assert code == 0
    assert "MB kept" in text
    assert "quartiles" not in text
    code, text, _ = run("bench", "train", *shape, "--pairs", 2)
    assert code == 0
    assert {"llama": "Llama", "gpt2": "GPT-2"}[base] in text
    assert "quartiles" in text
    code, text, error = run("bench", "train", *shape, "--memory", "--precision", "bf16-stream")
    assert (code == 0) is (base == "llama")
    assert "bf16-stream" in text if base == "llama" else "use --base llama" in error
    code, _, text = run("bench", "train", *shape, "--memory", "--device", "cuda")
    assert code != 0
