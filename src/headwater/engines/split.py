"""Tensor parallelism for servers: the part of a model that one of several processes computes.

    attention       Σ_p W_O[:, p]·heads_p(x)                            p: some consecutive heads, and their cache
    feed-forward    Σ_p W_down[:, p]·(act(W_gate[p]·x) ⊙ W_up[p]·x)     p: some units

The residual stream, the embeddings, the output head, and what mechanisms do outside attention are whole in every
process. So is a feed-forward that a mechanism acts inside of, and what replaces a linear layer. Attention is built once
more from the plans of the process's own heads (`engines.heads.narrowed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from headwater.config.plan import ATTENTION_STAGES, LayerPlan, Stage
from headwater.engines.heads import SomeHeads
from headwater.mechanisms.capabilities import Processes, axes_of, can_split_heads
from headwater.mechanisms.contract import Mechanism
from headwater.mechanisms.enlarging import of_heads
from headwater.nn.attention import Attention
from headwater.nn.feed_forward import FeedForward
from headwater.nn.position import alibi_slopes
from headwater.plugins.registry import resolve
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.models.causal_lm import HeadwaterForCausalLM
    from headwater.nn.block import Block


@dataclass(frozen=True)
class Portion(SomeHeads):
    """Raises `HeadwaterError` if the heads or a mechanism cannot be split."""

    def __post_init__(self) -> None:
        if self.size > 1:
            self._check_heads()

    def _check_heads(self) -> None:
        config = self.config
        if config.num_key_value_heads % self.size:
            raise HeadwaterError(
                f"{config.num_key_value_heads} key/value heads cannot be divided among {self.size} processes; set "
                "tensor_parallel_size to a divisor."
            )
        if {"num_attention_heads", "num_key_value_heads", "head_dim"} & (config.sliding_fields or {}).keys():
            raise HeadwaterError(
                "A model whose layers have different heads (sliding_fields) runs in one process; leave out "
                "tensor_parallel_size."
            )
        inside = {name for plan in self.model_plans for name in plan.at(*ATTENTION_STAGES)}
        for name in config.mechanisms:
            if name in inside and not can_split_heads(resolve(name), config.mechanisms[name]):
                raise HeadwaterError(
                    f"Mechanism {name!r} does not say that its heads can be split over processes with these options "
                    "(per_head, docs/extending.md); leave out tensor_parallel_size."
                )

    @property
    def slopes(self) -> Tensor | None:
        """ALiBi's, of each query head that this process has; None if it has all."""
        if self.config.position != "alibi" or self.size == 1:
            return None
        slopes = alibi_slopes(self.config.num_attention_heads, torch.float32)
        return slopes[self.queries.start : self.queries.stop]


@torch.no_grad()
def split(model: HeadwaterForCausalLM, share: Portion, processes: Processes) -> None:
    """Leave of a model what this process computes, in place. It then runs with an `Engine` only."""
    for block in model.model.layers if share.size > 1 else ():
        block = cast("Block", block)
        block.self_attn = own_attention(block, share, processes)
        units = share.config.intermediate_size
        whole = bool(block.stages[Stage.FEED_FORWARD_HIDDEN.value]) or units % share.size != 0
        if isinstance(block.mlp, FeedForward) and not whole:
            own = torch.arange(units).chunk(share.size)[share.rank]
            feed_forward = block.mlp
            for name in ("gate_proj", "up_proj"):
                if (layer := getattr(feed_forward, name)) is not None:
                    setattr(feed_forward, name, rows(layer, own))
            feed_forward.down_proj = SummedLinear(feed_forward.down_proj, own, processes)  # type: ignore[assignment]


def own_attention(block: Block, share: Portion, processes: Processes) -> Attention:
    """A block's attention, with this process's heads."""
    plan, whole = block.plan, block.self_attn
    try:
        with torch.device("meta"):
            mine = Attention(share.narrow, share.plans[plan.index])
    except KeyError as error:  # a tensor of another layer that this process's part of a mechanism would read
        raise _unsplittable(plan, list(whole.mechanisms.names)) from error
    mine.q_norm, mine.k_norm = whole.q_norm, whole.k_norm if mine.k_proj is not None else None
    for name, module in whole.mechanisms.named():
        _own_parameters(mine.mechanisms[name], cast(Mechanism, module), share, plan)
    for part, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
        if getattr(mine, name) is not None:
            own = channels(share.places(plan)[part][1], mine.head_dim)
            layer = getattr(whole, name)
            linear = isinstance(layer, nn.Linear)
            setattr(mine, name, rows(layer, own) if linear else SomeOutputs(layer, own))
    if isinstance(whole.o_proj, nn.Linear):
        own = torch.arange(whole.o_proj.in_features).chunk(share.size)[share.rank]
        mine.o_proj = SummedLinear(whole.o_proj, own, processes)
    else:
        mine.o_proj = Joined(whole.o_proj, processes)
    return mine.train(whole.training)


def _own_parameters(mine: nn.Module, whole: Mechanism, share: Portion, plan: LayerPlan) -> None:
    """Fill a mechanism's module of this process's heads. Raises `HeadwaterError` if its axes are not as it says."""
    targets = dict(mine.named_parameters()) | dict(mine.named_buffers())
    parameters = dict(whole.named_parameters())
    for place, known in (parameters | dict(whole.named_buffers())).items():
        tensor = known.detach()
        axes = axes_of(whole, place) if place in parameters else ()
        if (own := of_heads(axes, tensor.shape, share.places(plan))) is not None:
            tensor = tensor.index_select(own[0], torch.tensor(own[1], dtype=torch.long))
        target = targets.pop(place, None)
        if target is None and tensor.numel() == 0:
            continue
        if target is None or target.shape != tensor.shape:
            raise _unsplittable(plan, [whole.registered_name()])
        owner, _, last = place.rpartition(".")
        module = mine.get_submodule(owner)
        if last in module._parameters:
            module._parameters[last] = nn.Parameter(tensor.clone(), requires_grad=False)
        else:
            module._buffers[last] = tensor.clone()
    if targets:
        raise _unsplittable(plan, [whole.registered_name()])


def _unsplittable(plan: LayerPlan, names: list[str]) -> HeadwaterError:
    return HeadwaterError(
        f"Layer {plan.index} cannot be split by heads with {', '.join(map(repr, names))} as configured: it has other "
        "parameters then than describe_axes says; leave out tensor_parallel_size."
    )


def rows(layer: nn.Linear, own: Tensor) -> nn.Linear:
    """A linear layer with some of its outputs."""
    mine = nn.Linear(layer.in_features, len(own), layer.bias is not None, device="meta")
    mine.weight = nn.Parameter(layer.weight[own], requires_grad=False)
    if layer.bias is not None:
        mine.bias = nn.Parameter(layer.bias[own], requires_grad=False)
    return mine


class SummedLinear(nn.Module):
    """A linear layer, of whose inputs each process has some."""

    def __init__(self, layer: nn.Linear, own: Tensor, processes: Processes) -> None:
        super().__init__()
        self.linear = nn.Linear(len(own), layer.out_features, bias=False, device="meta")
        self.linear.weight = nn.Parameter(layer.weight[:, own].contiguous(), requires_grad=False)
        self.bias, self.processes = layer.bias, processes

    def forward(self, x: Tensor) -> Tensor:
        y = self.processes.summed(self.linear(x))
        return y if self.bias is None else y + self.bias


def channels(heads: Sequence[int], width: int) -> Tensor:
    """The channels of heads that have `width` each."""
    return (torch.tensor(heads, dtype=torch.long)[:, None] * width + torch.arange(width)).flatten()


class SomeOutputs(nn.Module):
    """Some of a module's outputs."""

    def __init__(self, whole: nn.Module, own: Tensor) -> None:
        super().__init__()
        self.whole, self.own = whole, own

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self.own]


class Joined(nn.Module):
    """A module that reads all processes' inputs."""

    def __init__(self, whole: nn.Module, processes: Processes) -> None:
        super().__init__()
        self.whole, self.processes = whole, processes

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.processes.joined(x))
