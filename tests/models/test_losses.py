"""Losses without logits: nothing of size [B, T, V] leaves the graph, and chunks change no number."""

import pytest
import torch
from torch import Tensor

from conftest import assert_near
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.kernels.scratch import saved_bytes
from headwater.models.compiling import compile_model
from headwater.nn.loss import classification_loss
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
    out = made(ids, labels=labels, skip_logits=True, output_z_loss=True, loss_chunk_tokens=chunk, **arguments)
    assert out.logits is None
    assert_near(out.loss, losses, 1e-6)  # transformers' loss is in fp32
    assert_near(out.z_loss, squares, 1e-12 if chunk is None else 1e-6)
    assert_near(gradients(made, out.loss + out.z_loss), gradients(made, losses + squares), 1e-6)


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


def test_chunks_change_no_gradient():
    made, (ids, labels) = model(), rows()
    made.loss_function = in_fp64
    wanted = dict(labels=labels, shift_labels=labels, skip_logits=True, output_z_loss=True)
    whole, parts = (made(ids, loss_chunk_tokens=chunk, **wanted) for chunk in (None, 5))
    assert_near(gradients(made, parts.loss + parts.z_loss), gradients(made, whole.loss + whole.z_loss), 1e-12)


def in_fp64(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **kwargs):
    """The loss without transformers' cast to fp32."""
    chosen = shift_labels != -100
    loss = torch.nn.functional.cross_entropy(logits[chosen], shift_labels[chosen], reduction="sum")
    return loss / (chosen.sum() if num_items_in_batch is None else num_items_in_batch)


def test_chunks_keep_no_logits():
    made, (ids, labels) = model(vocab_size=4096).float(), rows()
    kept = {
        chunk: saved_bytes(lambda chunk=chunk: made(ids, labels=labels, skip_logits=True, loss_chunk_tokens=chunk).loss)
        for chunk in (None, 4)
    }
    assert kept[None] - kept[4] > 0.9 * ids.numel() * 4096 * 4


@pytest.mark.slow
def test_a_compiled_chunk_is_a_graph_of_its_own():
    """A graph of all chunks keeps the logits of several in its backward pass (PyTorch issue 193193)."""
    tokens: list[int] = []

    def look(graph, example_inputs):
        shapes = [tuple(x.shape) for x in example_inputs if isinstance(x, Tensor)]
        if (V, D) in shapes:
            tokens.extend(shape[1] for shape in shapes if len(shape) == 3 and shape[-1] == D)
        return graph.forward

    made, (ids, labels) = model(), rows()
    wanted = {"labels": labels, "skip_logits": True, "loss_chunk_tokens": 8}
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
