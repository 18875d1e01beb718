"""Measurements of a model: what autograd keeps, how many operations run, what halves of the heads read."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.config.text import HeadwaterConfig
from headwater.engines.split import Portion, split_attention
from headwater.kernels.scratch import saved_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM


def kept_by_autograd(model: HeadwaterForCausalLM, batch_size: int, context: int, **inputs: Any) -> int:
    """Count the bytes that autograd keeps of a forward pass, each storage once, without parameters."""
    ids = torch.zeros(batch_size, context, dtype=torch.long)
    return saved_bytes(lambda: model(ids, labels=ids, **inputs).loss, (*model.parameters(), *model.buffers()))


def kept_per_token(config: HeadwaterConfig, context: int) -> float:
    """Count the fp32 numbers that autograd keeps per additional token, without what it keeps once per model."""
    model = HeadwaterForCausalLM(config).train()
    return (kept_by_autograd(model, 3, context) - kept_by_autograd(model, 1, context)) / (2 * context * 4)


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations inside `with`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class RecordedOptions(dict[str, Any]):
    """A mechanism's options, which add to `read` the names of those that are read."""

    def __init__(self, options: dict[str, Any], read: set[str]) -> None:
        super().__init__(options.items())  # by `items`, which reads nothing
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:  # without it `**options` reads all of them unseen
        return super().__iter__()

    def __deepcopy__(self, memo: Any) -> "RecordedOptions":
        return RecordedOptions(self, self.read)


class OnlyProcess:
    """The one process that has the whole of a split layer."""

    def add_up(self, x: Tensor) -> Tensor:
        return x

    concatenate = add_up


def read_halves(model: HeadwaterForCausalLM, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what each half of the heads reads in each layer, [B, T, h·d]: in the model, and alone.

    Raises `HeadwaterError` if a mechanism has other parameters then than `describe_axes` says.
    """
    blocks: list[Any] = list(model.model.layers)
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []
    reads: list[Tensor] = []
    with ExitStack() as hooks, torch.no_grad():
        for block in blocks:
            enter = block.self_attn.register_forward_pre_hook(
                lambda _, inputs, options: calls.append((inputs, options)), with_kwargs=True
            )
            hooks.enter_context(enter)
            leave = block.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: reads.append(inputs[0]))
            hooks.enter_context(leave)
        model(ids, use_cache=False)
    for rank in range(2):
        share = Portion(model.config, rank, 2)
        queries = slice(share.queries.start, share.queries.stop)
        for block, ((x, *sources), options), outputs in zip(blocks, calls, reads, strict=True):
            half: Any = split_attention(block.self_attn, share, OnlyProcess())
            half.o_proj = nn.Identity()
            for i, source in enumerate(block.plan.reads):
                if source.kind not in ("stream", "shared"):
                    owner = share.model_plans[source.layer]
                    part = owner.value_part if source[:2] == ("bank", "v") else source.part
                    chosen = share.list_positions(owner)[part][1]
                    sources[i] = sources[i][:, chosen]
            with torch.no_grad():
                alone = half(x, *sources, **share.narrow_mask(options))[0]
            yield outputs.unflatten(2, (-1, half.head_dim))[:, :, queries].flatten(2), alone


def outside_attention(model: HeadwaterForCausalLM, ids: Tensor, changed_ids: Tensor) -> Tensor:
    """Compute the logits of `changed_ids`, with the outputs that attention has for `ids`."""
    outputs: list[Any] = []
    layers: list[Any] = [block.self_attn for block in model.model.layers]
    with torch.no_grad():
        for hook, row in ((lambda *call: outputs.append(call[2]), ids), (lambda *_: outputs.pop(0), changed_ids)):
            with ExitStack() as hooks:
                for layer in layers:
                    hooks.enter_context(layer.register_forward_hook(hook))
                logits: Tensor = model(row, use_cache=False).logits
    return logits
