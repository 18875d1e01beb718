"""Losses without logits: nothing of size [B, T, V] leaves the graph, and chunks change no number."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import assert_near
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.kernels.fused_loss import SoftTargets
from headwater.kernels.scratch import saved_bytes
from headwater.models.compiling import compile_model
from headwater.nn.loss import classification_loss
from headwater.util.errors import HeadwaterError
from headwater.util.precision import Precision
from headwater_lab.training.loop import smooth_labels

V, D = 89, 16


def model(**changes) -> HeadwaterForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, hidden_size=D, num_hidden_layers=1, num_attention_heads=2, logit_scale=0.5)
    return HeadwaterForCausalLM(HeadwaterConfig(**sizes | changes)).double()


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(V, (2, 2, 13), generator=generator)
    labels[0, :4] = labels[1, -2:] = -100
    return ids, labels


def gradients(made: HeadwaterForCausalLM, value: Tensor) -> Tensor:
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(value, list(made.parameters()))])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("given", ["labels", "shift_labels", "number"])
@pytest.mark.parametrize("chunk", [None, 1, 7, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_z_loss_written_out(chunk, given, tied):
    made = model(tie_word_embeddings=tied)
    ids, labels = rows()
    logits = made(ids).logits
    targets = labels if given != "labels" else torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    real = logits[targets != -100]
    count = 11 if given == "number" else len(real)
    losses = torch.nn.functional.cross_entropy(real, targets[targets != -100], reduction="sum") / count
    squares = real.logsumexp(-1).square().sum() / count

    arguments = {} if given == "labels" else {"shift_labels": labels}
    if given == "number":
        arguments["num_items_in_batch"] = torch.tensor(11)
    out = made(ids, labels=labels, skip_logits=True, z_loss_weight=0.3, loss_chunk_tokens=chunk, **arguments)
    assert out.logits is None
    tolerance = 1e-6 if chunk is None else 1e-12  # transformers' loss is in fp32
    objective = losses + 0.3 * squares
    assert_near(out.loss, objective, tolerance)
    assert_near(out.z_loss, squares, 1e-12)
    assert not out.z_loss.requires_grad
    assert_near(gradients(made, 2 * out.loss), gradients(made, 2 * objective), tolerance)


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("classes", [5, 7])
def test_smoothed_labels_give_the_loss_of_pytorch(share, classes):
    logits, labels = torch.randn(4, classes, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 4, 2, 2])
    wanted = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=share)
    assert_near(classification_loss(logits, smooth_labels(labels, share, classes)), wanted, 1e-6)
    # Probabilities of the data's classes, of which a model may have more.
    mixed = 0.25 * torch.nn.functional.one_hot(labels, 5) + 0.75 * torch.nn.functional.one_hot(labels.flip(0), 5)
    wanted = 0.25 * wanted + 0.75 * torch.nn.functional.cross_entropy(logits, labels.flip(0), label_smoothing=share)
    assert_near(classification_loss(logits, smooth_labels(mixed, share, classes)), wanted, 1e-6)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("precision", list(Precision))
def test_chunks_change_no_gradient(precision, cap):
    """The loss of logits in fp64 beside it: of the hidden states and weights as the precision rounds them."""
    made, (ids, labels) = model(logit_softcap=cap, initializer_range=0.4), rows()
    made = precision.cast_activations(made.to(precision.weights))
    fields = dict(labels=labels, shift_labels=labels, skip_logits=True, z_loss_weight=0.01, use_cache=False)
    found = {}
    for chunk in (5, None):
        with precision.autocast("cpu"):
            out = made(ids, loss_chunk_tokens=chunk, **fields)
        found[chunk] = out.loss.detach(), *(g.double() for g in torch.autograd.grad(out.loss, made.parameters()))
    with precision.autocast("cpu"):
        hidden = 0.5 * made.model(ids, use_cache=False).last_hidden_state
    wide = [x.detach().to(precision.compute).double().requires_grad_() for x in (hidden, made.lm_head.weight)]
    logits = (wide[0] @ wide[1].T)[labels != -100]
    logits = logits if cap is None else cap * (logits / cap).tanh()
    targets = labels[labels != -100]
    exact = torch.nn.functional.cross_entropy(logits, targets) + 0.01 * logits.logsumexp(-1).square().mean()
    resolution = torch.finfo(precision.compute).eps
    assert float(found[5][0]) == pytest.approx(float(exact.detach()), rel=4 * resolution)
    (head,) = torch.autograd.grad(exact, wide[1:])
    assert (found[5][-1] - head).norm() < 2 * resolution * head.norm()
    for a, b in zip(found[5], found[None], strict=True):
        assert (a - b).norm() <= 8 * max(resolution, 1e-7) * b.norm()  # transformers' loss is in fp32


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_loss_with_a_teacher_written_out(temperature, chunk):
    """(1 - w)·(loss + z-loss) + w·T²·KL(p ‖ q), of a teacher of another width with a softcap of its own."""
    made, (ids, labels) = model(logit_softcap=1.5, initializer_range=0.4), rows()
    teacher = model(hidden_size=2 * D, logit_softcap=2.0, initializer_range=0.3, logit_scale=1.0)
    q, p = (x(ids).logits[labels != -100] for x in (made, teacher))
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (q, p.detach()))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    cross_entropy = torch.nn.functional.cross_entropy(q, labels[labels != -100])
    z_loss = q.logsumexp(-1).square().mean()
    objective = 0.7 * (cross_entropy + 0.1 * z_loss) + 0.3 * temperature**2 * divergence

    hidden = teacher.model(ids).last_hidden_state.detach()
    soft = SoftTargets(hidden, teacher.lm_head.weight, 2.0, share=0.3, temperature=temperature)
    fields = dict(labels=labels, shift_labels=labels, skip_logits=True, z_loss_weight=0.1)
    out = made(ids, loss_chunk_tokens=chunk, soft_targets=soft, **fields)
    assert_near(out.loss, objective, 1e-12)
    assert_near(out.cross_entropy, cross_entropy, 1e-12)
    assert_near(out.z_loss, z_loss, 1e-12)
    assert_near(gradients(made, 2 * out.loss), gradients(made, 2 * objective), 1e-12)
    assert teacher.lm_head.weight.grad is None


@pytest.mark.parametrize("precision", list(Precision))
def test_a_teacher_computes_its_logits_in_its_own_precision(precision):
    made, teacher, (ids, labels) = model(), model(hidden_size=2 * D, initializer_range=0.3), rows()
    made, teacher = (precision.cast_activations(x.to(precision.weights)) for x in (made, teacher))
    with precision.autocast("cpu"), torch.no_grad():
        soft = SoftTargets(teacher.model(ids).last_hidden_state, teacher.lm_head.weight, None, 1.0, 1.0)
        p = teacher.lm_head(soft.hidden).double().log_softmax(-1)[labels != -100]
        out = made(ids, labels=labels, shift_labels=labels, skip_logits=True, soft_targets=soft)
        q = made(ids).logits.double().log_softmax(-1)[labels != -100]
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert float(out.loss) == pytest.approx(expected, rel=8 * max(torch.finfo(precision.compute).eps, 1e-7))


def test_soft_targets_need_labels_and_no_logits():
    made, (ids, labels) = model(), rows()
    soft = SoftTargets(torch.zeros(2, 13, D), torch.zeros(V, D), None, 0.5, 1.0)
    for fields in ({"labels": labels}, {"skip_logits": True}):
        with pytest.raises(HeadwaterError, match="soft_targets needs labels, and skip_logits=True"):
            made(ids, soft_targets=soft, **fields)


def test_chunks_are_added_up_over_steps_that_accumulate():
    """As a run does: each batch's loss is divided by the labels of all."""
    made, (ids, labels) = model(), rows()
    number = (labels != -100).sum()
    fields = dict(skip_logits=True, loss_chunk_tokens=5, num_items_in_batch=number)
    whole = gradients(made, made(ids, labels=labels, shift_labels=labels, **fields).loss)
    parts = [
        made(i[None], labels=t[None], shift_labels=t[None], **fields).loss for i, t in zip(ids, labels, strict=True)
    ]
    assert_near(gradients(made, parts[0] + parts[1]), whole, 1e-12)


def test_a_frozen_head_and_no_gradient_at_all():
    made, (ids, labels) = model(), rows()
    fields = dict(labels=labels, skip_logits=True, loss_chunk_tokens=5)
    expected = made(ids, **fields).loss
    made.lm_head.requires_grad_(False)
    loss = made(ids, **fields).loss
    loss.backward()
    assert made.lm_head.weight.grad is None
    assert made.model.embed_tokens.weight.grad.abs().max() > 0
    with torch.no_grad():
        assert torch.equal(made(ids, **fields).loss, expected)
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("change", ["head", "loss"])
def test_chunks_of_another_head_or_loss_are_refused(change):
    made, (ids, labels) = model(), rows()
    if change == "head":
        made.lm_head = torch.nn.Sequential(made.lm_head)
    else:
        made.loss_function = lambda **kwargs: 0
    with pytest.raises(HeadwaterError, match="leave it out"):
        made(ids, labels=labels, skip_logits=True, loss_chunk_tokens=5)


class Largest(TorchDispatchMode):
    """The most elements of a new tensor."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.most = max(self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)), 0)
        return out


def test_no_more_logits_than_of_a_chunk_exist():
    made, (ids, labels) = model(vocab_size=4096, tie_word_embeddings=True).float(), rows()
    largest = {}
    for chunk in (None, 4):
        with Largest() as mode:
            made(ids, labels=labels, skip_logits=True, loss_chunk_tokens=chunk, z_loss_weight=0.1).loss.backward()
        largest[chunk] = mode.most
    assert largest[None] == ids.numel() * 4096
    assert largest[4] == 4096 * D  # the head's gradient


def test_chunks_keep_no_logits():
    made, (ids, labels) = model(vocab_size=4096).float(), rows()
    kept = {
        chunk: saved_bytes(lambda chunk=chunk: made(ids, labels=labels, skip_logits=True, loss_chunk_tokens=chunk).loss)
        for chunk in (None, 4)
    }
    # But the gradient of the head.
    assert kept[None] - kept[4] > 0.9 * (ids.numel() - D) * 4096 * 4


@pytest.mark.slow
def test_a_compiled_chunk_is_a_graph_of_its_own():
    """A graph of all chunks keeps the logits of several in its backward pass (PyTorch issue 193193)."""
    tokens: list[int] = []

    def look(graph, example_inputs):
        shapes = [tuple(x.shape) for x in example_inputs if isinstance(x, Tensor)]
        if (V, D) in shapes:
            tokens.extend(shape[0] for shape in shapes if len(shape) == 2 and shape[-1] == D and shape[0] != V)
        return graph.forward

    made, (ids, labels) = model(), rows()
    wanted = {"labels": labels, "skip_logits": True, "loss_chunk_tokens": 8, "z_loss_weight": 0.1}
    eager = gradients(made, made(ids, **wanted).loss)
    compile_model(made, look)
    assert_near(gradients(made, made(ids, **wanted).loss), eager, 1e-12)
    assert tokens == [8, 2], "26 tokens: three chunks of one graph, and the rest"


@pytest.mark.parametrize("chunk", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_no_logits_leave_a_compiled_graph(chunk):
    """Else the backward pass begins with zeros of their size."""
    shapes: list[list[int]] = []

    def look(graph, example_inputs):
        result = graph(*example_inputs)
        shapes.extend(list(x.shape) for x in result if isinstance(x, Tensor))
        return graph.forward

    torch._dynamo.reset()
    made, (ids, labels) = model(), rows()

    def training(ids: Tensor, labels: Tensor, **wanted) -> Tensor:
        return made(ids, labels=labels, use_cache=False, **wanted)

    out = torch.compile(training, backend=look, fullgraph=True)(ids, labels, skip_logits=True, loss_chunk_tokens=chunk)
    assert out.logits is None
    assert shapes == [[]], "the loss alone"
    shapes.clear()
    torch.compile(training, backend=look, fullgraph=True)(ids, labels)
    assert [2, 13, V] in shapes, "with them, this test would see it"
