"""The code that PyTorch's compiler writes for a GPU, captured on any machine and never run."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V


def write_code(graph: torch.fx.GraphModule, inputs: Sequence[Any], is_inference: bool) -> tuple[str, int]:
    """Write a graph's code, and count the bytes that its kernels read and write, without those of PyTorch's own.

    Call it in a backend, under `cpu_backend="triton"`.
    """
    with ExitStack() as stack:
        for context in (V.set_fake_mode(torch._guards.detect_fake_mode(inputs)), DebugContext()):
            stack.enter_context(context)
        post_grad_passes(graph, is_inference=is_inference)
        lowered = GraphLowering(graph, example_inputs=inputs, is_inference=is_inference)
        stack.enter_context(V.set_graph_handler(lowered))
        lowered.run(*inputs)
        code = lowered.codegen()[0].value
        nodes = [node for node in lowered.scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
        return code, sum(node.get_read_write_buffers_sizes() for node in nodes)
