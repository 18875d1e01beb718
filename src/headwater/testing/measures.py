"""What a model does, measured: what autograd keeps, how many operations run, what the heads of a layer read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.config.plan import Source
from headwater.config.text import HeadwaterConfig
from headwater.engines.heads import SomeHeads
from headwater.engines.split import SomeOutputs, channels
from headwater.mechanisms.capabilities import axes_of
from headwater.mechanisms.enlarging import of_heads
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.attention import Attention


def saved_bytes(run: Callable[[], Tensor], excluded: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd stores while `run` computes its result, each storage once, without those of `excluded`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    # The tensors are kept, so that no address is used twice.
    stored: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        stored.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # a graph that holds tensors of its own is never freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in stored.items() if address not in known)


def kept_by_autograd(
    config: HeadwaterConfig,
    context: int,
    batch_size: int,
    autocast: bool = False,
    checkpointing: bool = False,
    half: bool = False,
    **given: Any,
) -> int:
    """Bytes that autograd keeps of a forward pass, each storage once, parameters left out. given: further inputs."""
    model = HeadwaterForCausalLM(config).to(torch.bfloat16 if half else torch.get_default_dtype()).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(batch_size, context, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return saved_bytes(lambda: model(ids, labels=ids, **given).loss, (*model.parameters(), *model.buffers()))


def kept_per_token(config: HeadwaterConfig, context: int) -> float:
    """Numbers that autograd keeps of a further token, in fp32; what it keeps once per model does not count."""
    return (kept_by_autograd(config, context, 3) - kept_by_autograd(config, context, 1)) / (2 * context * 4)


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations inside `with`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class HeadsAlone:
    """What each head of every layer reads, [B, T, H, d] before the output projection, and how it came there.

    read: by layer. A subset of the heads can be run again, by `alone`, from what entered the layers.
    """

    def __init__(self, model: HeadwaterForCausalLM, ids: Tensor) -> None:
        self.blocks: list[Any] = list(model.model.layers)
        self.config: Any = model.config
        self.given: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []
        self.read: list[Tensor] = []
        hooks = []
        for block in self.blocks:
            attention = block.self_attn
            hooks.append(attention.register_forward_pre_hook(self._enters, with_kwargs=True))
            hooks.append(attention.o_proj.register_forward_pre_hook(lambda _, given: self.read.append(given[0])))
        with torch.no_grad():
            model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()

    def _enters(self, _: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        self.given.append((given, named))

    def alone(self, heads: range) -> list[tuple[Tensor, Tensor]]:
        """By layer: what the query heads of these key/value heads read in the model, and what they do without the rest.

        Raises `AssertionError` if a mechanism has other parameters then than `describe_axes` says.
        """
        config, size = self.config, self.config.head_dim
        some = SomeHeads(config, heads)
        queries, plans, narrow = some.queries, some.model_plans, some.narrow

        def own(source: Source, x: Tensor) -> Tensor:
            """A tensor of an earlier layer, with these heads' part."""
            if source.kind in ("stream", "shared"):
                return x
            return x[:, some.places(plans[source.layer])[source.part][1]]

        pairs = []
        for block, (given, named), read in zip(self.blocks, self.given, self.read, strict=True):
            mine = Attention(narrow, some.plans[block.plan.index]).to(read.dtype).eval()
            self._narrow(mine, block.self_attn, some.places(block.plan))
            sources = [own(source, x) for source, x in zip(block.plan.reads, given[1:], strict=True)]
            mask = named.get("attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == config.num_attention_heads > 1:
                named = named | {"attention_mask": mask[:, queries.start : queries.stop]}
            with torch.no_grad():
                found = mine(given[0], *sources, **named)[0]
            pairs.append((read.unflatten(2, (-1, size))[:, :, queries.start : queries.stop].flatten(2), found))
        return pairs

    def _narrow(self, mine: Any, whole: Any, heads: dict[str, tuple[int, list[int]]]) -> None:
        """Give a narrow attention the parameters of these heads, and nothing after what they read."""
        mine.q_norm, mine.k_norm, mine.o_proj = whole.q_norm, whole.k_norm, nn.Identity()
        for part, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
            projection, at = getattr(whole, name), heads[part][1]
            some = (
                SomeOutputs(projection, channels(at, self.config.head_dim)) if projection is not None and at else None
            )
            setattr(mine, name, some)
        for name, module in whole.mechanisms.named():
            parameters = dict(mine.mechanisms[name].named_parameters())
            for place, parameter in module.named_parameters():
                value = parameter.detach()
                if (entries := of_heads(axes_of(module, place), value.shape, heads)) is not None:
                    value = value.index_select(entries[0], torch.tensor(entries[1], dtype=torch.long))
                if place not in parameters and value.numel() == 0:
                    continue
                found = parameters.pop(place)
                assert found.shape == value.shape, (
                    f"axes of {name!r}: for a part of the heads {place!r} has shape {list(found.shape)}, "
                    f"not {list(value.shape)}"
                )
                found.data.copy_(value)
            assert not parameters, f"axes of {name!r}: {list(parameters)} exist only for a part of the heads"


def outside_attention(model: HeadwaterForCausalLM, ids: Tensor, other: Tensor) -> Tensor:
    """Logits of `other` tokens, with the outputs that attention has for `ids`."""
    made: list[Any] = []
    blocks: list[Any] = list(model.model.layers)
    layers = [block.self_attn for block in blocks]
    hooks = [one.register_forward_hook(lambda _, given, found: made.append(found)) for one in layers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    hooks = [one.register_forward_hook(lambda _, given, found: made.pop(0)) for one in layers]
    with torch.no_grad():
        logits: Tensor = model(other, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits
