"""Compiling a model block by block, where layers of one kind share a graph however deep the model is, or as a whole."""

import warnings

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.linear import JoinsLinears

# Graphs that a layer may need: training and evaluation, and packed rows with more documents than expected.
GRAPHS = 16


def expect_layers(count: int) -> None:
    """Set up PyTorch's compiler for this many blocks, each a separate graph: it allows eight by default.

    DDP would split each block's graph where it sends gradients; between blocks it can send them anyway. Graphs with
    autograd functions are cached on the disk like others: the shift's depends on nothing but its arguments. What reads
    five tensors and is used twice is computed twice, not stored: so the shift of packed rows is part of RoPE's kernel.
    """
    settings = torch._dynamo.config
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    settings.recompile_limit = max(settings.recompile_limit, GRAPHS * count)
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, GRAPHS * count)
    settings.optimize_ddp = False
    torch._inductor.config.realize_reads_threshold = 5
    silence_tf32_advice()


def silence_tf32_advice() -> None:
    """Ignore the advice of PyTorch's compiler to round matmuls in fp32 to TF32 on a GPU, which changes tokens."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")


def compile_blocks(blocks: nn.ModuleList, backend: str = "inductor", join: bool = False) -> None:
    """Compile each block as one graph. Raises, when a block first runs, for an operation that would break the graph.

    join: in training, multiply once for queries, keys and values, and once for gate and up. On a CPU that is slower.
    """
    expect_layers(len(blocks))
    join_products(blocks, join)
    for block in blocks:
        block.compile(fullgraph=True, dynamic=False, backend=backend)


def join_products(model: nn.Module, join: bool) -> None:
    """Let layers with the same input multiply once in compiled training, or not."""
    for module in model.modules():
        if isinstance(module, JoinsLinears):
            module.joins = join


def is_compiled(model: HeadwaterForCausalLM) -> bool:
    return any(module._compiled_call_impl is not None for module in (model, *model.model.layers))


def compile_model(
    model: HeadwaterForCausalLM,
    backend: str = "inductor",
    *,
    whole: bool = False,
    join: bool = False,
    cuda_graphs: bool = False,
) -> None:
    """Compile a model for training: its blocks, and the output head with the loss, so that no logits leave a graph.

    whole: as one graph instead, which fuses across blocks and takes longer to compile. It allows no sharding.
    cuda_graphs: with `whole`, replay the forward and the backward pass as CUDA graphs. What they return, gradients
        too, is overwritten in the next forward pass.
    join: see `compile_blocks`. Sharding and recomputation may be applied before or after. Forgets what was compiled
    before in this process.
    """
    torch._dynamo.reset()
    if whole:
        join_products(model, join)
        expect_layers(1)
        mode = "reduce-overhead" if cuda_graphs else None
        model.compile(fullgraph=True, dynamic=False, backend=backend, mode=mode)
        return
    compile_blocks(model.model.layers, backend, join)
    # One graph per chunk of tokens: of a graph of all chunks the compiler could keep the logits of several of them.
    for name in ("whole_losses", "differentiate_loss"):
        if hasattr(model, name):
            setattr(model, name, torch.compile(getattr(model, name), dynamic=False, backend=backend))
