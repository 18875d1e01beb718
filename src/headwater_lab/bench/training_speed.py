"""Interleaved timings of training steps, against transformers and by mechanism, and what autograd stores."""

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion import to_transformers
from headwater.kernels.scratch import saved_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.image_classification import HeadwaterForImageClassification
from headwater.nn.documents import make_cu_seq_lens, takes_documents
from headwater.util.precision import Precision
from headwater_lab.bench.paired import (
    PairedTimes,
    Show,
    TurnsInterrupted,
    describe_device,
    ignore_progress,
    random_ids,
    time_interleaved,
)
from headwater_lab.bench.shapes import Benchmark, StepShape
from headwater_lab.util.machine import keep_freed_memory

CLASSES = 1000


class ModelPair(NamedTuple):
    """Two models whose training steps are compared, and the inputs of each, with labels."""

    models: tuple[PreTrainedModel, PreTrainedModel]
    inputs: tuple[dict[str, Any], dict[str, Any]]


def text_pair(
    base: Literal["llama", "gpt2"],
    shape: StepShape,
    attention: str = "sdpa",
    documents: int | None = None,
) -> ModelPair:
    """Make headwater's model without mechanisms, and transformers' of the same shape, on the same tokens.

    Both start from the same weights. attention: headwater's; transformers' model has sdpa.
    documents: rows are packed, with documents of this many tokens on average. Attention varlen then receives their
        borders; the others, and transformers' model, have a mask.
    """
    torch.manual_seed(0)
    sizes = shape.config(shape.context)
    of_gpt2 = HeadwaterConfig.gpt2(**sizes | {"intermediate_size": 4 * shape.width})
    model = HeadwaterForCausalLM(of_gpt2 if base == "gpt2" else HeadwaterConfig(**sizes))
    reference = to_transformers(model, base)
    model.set_attn_implementation(attention)
    inputs, reference_inputs = _draw_tokens(shape), _draw_tokens(shape)
    if documents is not None:
        positions = packed_positions(shape.batch_size, shape.context, documents)
        inputs["position_ids"] = reference_inputs["position_ids"] = positions
        if takes_documents(attention) and (borders := make_cu_seq_lens(positions)) is not None:
            inputs["cu_seq_lens_q"] = borders
    return ModelPair((model, reference), (inputs, reference_inputs))


def image_pair(
    shape: StepShape,
    attention: str = "sdpa",
    image_size: int = 224,
    patch_size: int = 16,
) -> ModelPair:
    """Make an image classifier without mechanisms and transformers' ViT, with the same weights on the same images."""
    config = HeadwaterVisionConfig(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.width // 64),
        num_labels=CLASSES,
    )
    model = HeadwaterForImageClassification(config)
    reference = to_transformers(model, "vit")
    model.set_attn_implementation(attention)
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(shape.batch_size, 3, image_size, image_size, generator=draw)
    inputs = {"pixel_values": pixels, "labels": torch.randint(CLASSES, (shape.batch_size,), generator=draw)}
    return ModelPair((model, reference), (inputs, inputs))


def mechanism_pair(mechanisms: dict[str, dict], shape: StepShape) -> ModelPair:
    """Make a model with `mechanisms` and the one that it is compared with (`make_twins`), on the same tokens."""
    inputs = _draw_tokens(shape)
    return ModelPair(make_twins(mechanisms, shape), (inputs, inputs))


def _draw_tokens(shape: StepShape) -> dict[str, Any]:
    ids = random_ids(shape.vocab_size, shape.batch_size, shape.context)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def bench_steps(
    compared: Iterable[tuple[str, ModelPair]],
    reference: str,
    title: str,
    precision: Precision,
    pairs: int,
    memory: bool,
    device: str,
    show: Show = ignore_progress,
) -> Benchmark:
    """Time training steps of pairs of models, or measure what they store for the backward pass, a row for each pair.

    compared: names and pairs; each pair is needed only while it is measured. reference: the name of the second model of
    each. show: receives (name of a pair, steps of both done, all).
    """
    rows: list[dict[str, str]] = []
    is_whole = True
    try:
        for label, pair in compared:
            if memory:
                a, b = (stored / 1e6 for stored in stored_by_pair(pair, precision))
                cells = {"MB kept": f"{a:.1f}", f"{reference}, MB kept": f"{b:.1f}", "ratio": f"{a / b:.3f}"}
                rows.append({"": label} | cells)
            else:
                paired = time_pair(pair, precision, pairs, device, lambda _, *done, label=label: show(label, *done))
                rows.append({"": label} | _compare_times(paired, reference))
    except KeyboardInterrupt as signal:
        if isinstance(signal, TurnsInterrupted):
            rows.append({"": label} | _compare_times(PairedTimes(**signal.results), reference))
        if not rows:
            raise
        is_whole = False
    settings = "" if memory else f", pairs {pairs}; {describe_device(device)}"
    return Benchmark(f"{title}, precision {precision}{settings}", rows, is_whole=is_whole)


def _compare_times(paired: PairedTimes, reference: str) -> dict[str, str]:
    """Write the median times of two models and their ratio as columns."""
    a, b = (statistics.median(times) for times in (paired.a, paired.b))
    return {"s": f"{a:.3f}", f"{reference}, s": f"{b:.3f}"} | paired.write_cells()


def time_pair(pair: ModelPair, precision: Precision, pairs: int, device: str, show: Show) -> PairedTimes:
    """Time whole training steps of the two models in turn. show: see `take_turns`."""
    if device == "cpu":
        keep_freed_memory()  # training does so too

    step_a, step_b = (training_step(model, loss, precision) for model, loss in _make_passes(pair, precision, device))

    def finish(step: Callable[[], None]) -> None:
        step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    return time_interleaved(partial(finish, step_a), partial(finish, step_b), pairs, show=show)


def stored_by_pair(pair: ModelPair, precision: Precision) -> tuple[int, int]:
    """Measure the bytes that autograd stores in a forward pass with its loss, by each model on a CPU.

    The parameters are not counted; their casts to bf16 are.
    """
    sizes = []
    for model, loss in _make_passes(pair, precision, "cpu"):
        model.train()
        with precision.autocast("cpu"):
            sizes.append(saved_bytes(loss, model.parameters()))
    return sizes[0], sizes[1]


def _make_passes(
    pair: ModelPair, precision: Precision, device: str
) -> list[tuple[PreTrainedModel, Callable[[], Tensor]]]:
    """Move each model of a pair to the device, and make its forward pass to the loss."""
    dtype = precision.weights
    passes: list[tuple[PreTrainedModel, Callable[[], Tensor]]] = []
    for model, inputs in zip(pair.models, pair.inputs, strict=True):
        precision.cast_activations(model.to(device, dtype))
        moved = {
            name: value.to(device, dtype if value.is_floating_point() else None) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        passes.append((model, partial(_compute_loss, model, moved)))
    return passes


def _compute_loss(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs).loss


def training_step(model: PreTrainedModel, loss: Callable[[], Tensor], precision: Precision) -> Callable[[], None]:
    """Make a whole step, which does not wait for the device: forward, loss, backward, clipping, fused AdamW."""
    kind = model.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=kind in ("cpu", "cuda"))
    model.train()

    def step() -> None:
        with precision.autocast(kind):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def packed_positions(rows: int, context: int, documents: int) -> Tensor:
    """Draw position ids [rows, context] of documents with `documents` tokens on average, geometrically distributed."""
    starts = torch.rand(rows, context, generator=torch.Generator().manual_seed(0)) < 1 / documents
    slot = torch.arange(context)
    return slot - torch.where(starts, slot, 0).cummax(1).values


def make_twins(mechanisms: dict[str, dict], shape: StepShape) -> tuple[HeadwaterForCausalLM, HeadwaterForCausalLM]:
    """Make a model with `mechanisms` and the one it is compared with, without them.

    If a mechanism replaces linear layers, the other model has its plain twin (`build_twin`), with the same matmuls.
    """
    sizes = shape.config(shape.context)

    def model(mechanisms: dict[str, dict]) -> HeadwaterForCausalLM:
        return HeadwaterForCausalLM(HeadwaterConfig(**sizes, mechanisms=mechanisms))

    with_mechanisms, without = model(mechanisms), model({})
    if any(hasattr(module, "build_twin") for module in with_mechanisms.modules()):
        without = model(mechanisms)
        for parent in list(without.modules()):
            for name, child in parent.named_children():
                if (build := getattr(child, "build_twin", None)) is not None:
                    setattr(parent, name, build())
    return with_mechanisms, without
