"""What a checkpoint costs the training steps."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn

from headwater.config import HeadwaterConfig
from headwater.hardware import seconds
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.training.checkpoint import FOLDER, Progress, optimizer_tensors, prune, size_of
from headwater.training.saving import Saver


@dataclass(frozen=True)
class Saves:
    """step: seconds of a step without a save, median. size: bytes of a checkpoint's tensors.

    Of each save, in seconds: waiting: of a save that is written while training waits. call: until training continues.
    lost: that, and by how much the steps took longer until all was written. first: `call` of the first save, which
    allocates the memory.
    """

    step: float
    size: int
    waiting: list[float]
    call: list[float]
    lost: list[float]
    first: float


def bench_save(
    *,
    layers: int = 8,
    width: int = 512,
    context: int = 256,
    batch_size: int = 8,
    vocabulary: int = 32000,
    turns: int = 5,
    folder: Path | None = None,
) -> Saves:
    """Saves in the middle of training on a CPU, in turns: one that training waits for, and one that it does not.

    folder: where to write; default: a temporary folder.
    """
    torch.manual_seed(0)
    config = HeadwaterConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(1, width // 64)
    )
    model = HeadwaterForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(vocabulary, (batch_size, context))

    def step() -> None:
        model(ids, labels=ids, use_cache=False, skip_logits=True).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    alone = [seconds(step) for _ in range(3)]
    waiting: list[float] = []
    call: list[float] = []
    lost: list[float] = []
    steps = count(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    with tempfile.TemporaryDirectory(dir=folder) as place, Saver(fabric) as saver:

        def save(copy: bool) -> None:
            number = next(steps)
            saver.start(
                Path(place) / FOLDER / f"step-{number:06d}",
                Progress(step=number),
                model,
                None,
                optimizer_tensors(model, [optimizer]),
                then=lambda: prune(Path(place), 1, True),
                copy=copy,
            )
            if not copy:
                saver.finish()

        for _ in range(turns + 1):
            waiting.append(seconds(lambda: save(copy=False)))
            alone.append(seconds(step))
            call.append(seconds(lambda: save(copy=True)))
            during = [seconds(step)]
            while not saver.ready:
                during.append(seconds(step))
            saver.finish()
            alone.append(seconds(step))
            lost.append(call[-1] + sum(during) - len(during) * statistics.median(alone))
    size = size_of(dict(model.named_parameters()) | optimizer_tensors(model, [optimizer]))
    return Saves(statistics.median(alone), size, waiting[1:], call[1:], lost[1:], call[0])
