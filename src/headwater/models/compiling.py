"""Compiling a model block by block: layers of one kind share a graph, however deep the model is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from headwater.models.causal_lm import HeadwaterForCausalLM

# Graphs that a layer may need: training and evaluation, some of them for a second shape.
GRAPHS = 8


def expect_layers(count: int) -> None:
    """Let PyTorch compile one class of layers in this many forms.

    All blocks share one code object, and PyTorch gives up at the ninth graph of one. Layers may all differ: each of
    DenseFormer's reads one more than the layer before.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS * count)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, GRAPHS * count)


def compile_blocks(blocks: nn.ModuleList, backend: str = "inductor") -> None:
    """Compile each block as one graph. Raises, when a block first runs, for an operation that would break it."""
    expect_layers(len(blocks))
    for block in blocks:
        block.compile(fullgraph=True, backend=backend)


def compile_model(model: HeadwaterForCausalLM, backend: str = "inductor") -> None:
    """Compile a model for training: its blocks, and the output head with the loss, so that no logits leave a graph.

    What is around the blocks (embeddings, masks, the final norm) is not compiled. Sharding and recomputation may be
    applied before or after.
    """
    compile_blocks(model.model.layers, backend)
    model.losses = torch.compile(model.losses, backend=backend)  # type: ignore[method-assign]
