"""Attention split by heads over processes, and the whole model for servers: the part that each process computes.

    attention       Σ_p W_O[:, p]·heads_p(x)                            p: some consecutive heads, and their cache
    feed-forward    Σ_p W_down[:, p]·(act(W_gate[p]·x) ⊙ W_up[p]·x)     p: some units

Every process computes the whole of the residual stream, the embeddings, the output head and mechanisms outside
attention. The same holds for a feed-forward inside which a mechanism acts, and for what replaces a linear layer.
Attention is built once more from the plans of the process's own heads (`narrow_plans`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from headwater.config.plan import ATTENTION_STAGES, LayerPlan, Stage
from headwater.config.planner import groups_of, plan_layers, with_all_layers
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Processes, axes_of, can_split_heads
from headwater.mechanisms.contract import Mechanism
from headwater.mechanisms.growth_map import select_heads
from headwater.nn.attention import Attention
from headwater.nn.feed_forward import FeedForward
from headwater.nn.position import alibi_slopes
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.models.causal_lm import HeadwaterForCausalLM
    from headwater.nn.block import Block

AnyAttention = TypeVar("AnyAttention", bound=Attention)
# The entries of a parameter that belong to a set of heads: (dimension, indices); None if every head uses all of them.
Entries = tuple[int, list[int]] | None


def narrow_plans(plans: Sequence[LayerPlan], heads: range) -> tuple[LayerPlan, ...]:
    """Make the plans of a process that has only some consecutive key/value heads, counted from zero.

    Reads and exports do not change, so a tensor may have no heads.
    """

    def keep_heads(stored: Sequence[int]) -> tuple[int, ...]:
        return tuple(head - heads.start for head in stored if head in heads)

    narrow = [
        replace(
            plan,
            attends=plan.attends[heads.start : heads.stop],
            k_heads=keep_heads(plan.k_heads),
            v_heads=keep_heads(plan.v_heads),
        )
        for plan in plans
    ]
    return with_all_layers(replace(plan, groups=groups_of(plan, narrow)) for plan in narrow)


@dataclass(frozen=True)
class Portion:
    """The key/value heads of process `rank` of `size`, and the query heads that read them.

    Raises `HeadwaterError` if the heads or a mechanism cannot be split.
    """

    config: HeadwaterConfig
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size == 1:
            return
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
                    f"Mechanism {name!r} does not declare that its heads can be split over processes with these "
                    "options (per_head, docs/extending.md); leave out tensor_parallel_size."
                )

    @cached_property
    def heads(self) -> range:
        """Key/value heads, counted in the whole model."""
        count = self.config.num_key_value_heads // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    @cached_property
    def queries(self) -> range:
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return range(self.heads.start * group, self.heads.stop * group)

    @cached_property
    def model_plans(self) -> tuple[LayerPlan, ...]:
        """The plans of the whole model."""
        return plan_layers(self.config)

    @cached_property
    def plans(self) -> tuple[LayerPlan, ...]:
        """The plans of a model with these heads only. One process has all, and its layers may differ in heads."""
        return self.model_plans if self.size == 1 else narrow_plans(self.model_plans, self.heads)

    @cached_property
    def narrow_config(self) -> HeadwaterConfig:
        """The config of a model with these heads only."""
        narrow = copy.copy(self.config)
        narrow.num_attention_heads, narrow.num_key_value_heads = len(self.queries), len(self.heads)
        return narrow

    @property
    def slopes(self) -> Tensor | None:
        """ALiBi's slopes for the query heads of this process; None if it has all heads."""
        if self.config.position != "alibi" or self.size == 1:
            return None
        slopes = alibi_slopes(self.config.num_attention_heads, torch.float32)
        return slopes[self.queries.start : self.queries.stop]

    def narrow_mask(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of attention with a mask of these heads, if each head has its own."""
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == self.config.num_attention_heads > 1:
            return options | {"attention_mask": mask[:, self.queries.start : self.queries.stop]}
        return options

    def list_positions(self, plan: LayerPlan) -> dict[str, tuple[int, list[int]]]:
        """Map "q", "k", "v" and "a" (attention weights) to a layer's number of heads, and these heads' positions."""
        queries = range(self.config.num_attention_heads)
        heads = {"q": queries, "k": plan.k_heads, "v": plan.v_heads, "a": queries}
        chosen = {"q": self.queries, "k": self.heads, "v": self.heads, "a": self.queries}
        return {
            kind: (len(of_layer), [index for index, head in enumerate(of_layer) if head in chosen[kind]])
            for kind, of_layer in heads.items()
        }

    def build_attention(self, full: Attention, kind: type[AnyAttention]) -> AnyAttention:
        """Build an attention with these heads on the meta device, to replace the `full` one."""
        try:
            with torch.device("meta"):
                return kind(self.narrow_config, self.plans[full.plan.index])
        except KeyError as error:  # this process lacks another layer's tensor that its part of a mechanism reads
            raise _refuse_split(full.plan, list(full.mechanisms.names)) from error

    def divide_parameters(self, full: Mechanism, portion: nn.Module, plan: LayerPlan) -> dict[str, Entries]:
        """Return the entries of each parameter of a mechanism that belong to these heads, by name.

        portion: the mechanism built for these heads. Raises `HeadwaterError` if it has other parameters.
        """
        shapes = {name: parameter.shape for name, parameter in portion.named_parameters()}
        entries: dict[str, Entries] = {}
        for name, parameter in full.named_parameters():
            shape = parameter.shape
            entries[name] = select_heads(axes_of(full, name), shape, self.list_positions(plan))
            if (chosen := entries[name]) is not None:
                shape = torch.Size((*shape[: chosen[0]], len(chosen[1]), *shape[chosen[0] + 1 :]))
            if shapes.pop(name, shape if shape.numel() == 0 else None) != shape:
                raise _refuse_split(plan, [full.registered_name()])
        if shapes:
            raise _refuse_split(plan, [full.registered_name()])
        return entries


def _refuse_split(plan: LayerPlan, names: list[str]) -> HeadwaterError:
    return HeadwaterError(
        f"Layer {plan.index} cannot be split by heads with {', '.join(map(repr, names))} as configured: its "
        "parameters would differ from what describe_axes says; keep its heads in one process."
    )


@torch.no_grad()
def split_model(model: HeadwaterForCausalLM, share: Portion, processes: Processes) -> None:
    """Reduce a model in place to the part that this process computes. It then runs only with an `Engine`."""
    for block in model.model.layers if share.size > 1 else ():
        block = cast("Block", block)
        block.self_attn = split_attention(block.self_attn, share, processes)
        units = share.config.intermediate_size
        is_whole = bool(block.stages[Stage.FEED_FORWARD_HIDDEN.value]) or units % share.size != 0
        if isinstance(block.mlp, FeedForward) and not is_whole:
            chosen = torch.arange(units).chunk(share.size)[share.rank]
            feed_forward = block.mlp
            for name in ("gate_proj", "up_proj"):
                if (layer := getattr(feed_forward, name)) is not None:
                    setattr(feed_forward, name, select_rows(layer, chosen))
            feed_forward.down_proj = SummedLinear(feed_forward.down_proj, chosen, processes)  # type: ignore[assignment]


def split_attention(full: Attention, share: Portion, processes: Processes) -> Attention:
    """Build an attention with only this process's heads."""
    plan = full.plan
    portion = share.build_attention(full, Attention)
    portion.q_norm, portion.k_norm = full.q_norm, full.k_norm if portion.k_proj is not None else None
    for name, module in full.mechanisms.named_mechanisms():
        _fill_parameters(portion.mechanisms[name], cast(Mechanism, module), share, plan)
    for kind, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
        if getattr(portion, name) is not None:
            heads = torch.tensor(share.list_positions(plan)[kind][1], dtype=torch.long)
            channels = (heads[:, None] * portion.head_dim + torch.arange(portion.head_dim)).flatten()
            layer = getattr(full, name)
            is_linear = isinstance(layer, nn.Linear)
            setattr(portion, name, select_rows(layer, channels) if is_linear else SomeOutputs(layer, channels))
    if isinstance(full.o_proj, nn.Linear):
        channels = torch.arange(full.o_proj.in_features).chunk(share.size)[share.rank]
        portion.o_proj = SummedLinear(full.o_proj, channels, processes)
    else:
        portion.o_proj = Joined(full.o_proj, processes)
    return portion.train(full.training)


def _fill_parameters(portion: nn.Module, full: Mechanism, share: Portion, plan: LayerPlan) -> None:
    """Fill the parameters of a mechanism's module for this process's heads."""
    entries = share.divide_parameters(full, portion, plan)
    tensors = dict((*full.named_parameters(), *full.named_buffers()))
    for name, target in [*portion.named_parameters(), *portion.named_buffers()]:
        tensor = tensors[name].detach()
        if (chosen := entries.get(name)) is not None:
            tensor = tensor.index_select(chosen[0], torch.tensor(chosen[1], dtype=torch.long))
        is_parameter = isinstance(target, nn.Parameter)
        owner, _, leaf = name.rpartition(".")
        value = nn.Parameter(tensor.clone(), requires_grad=False) if is_parameter else tensor.clone()
        setattr(portion.get_submodule(owner), leaf, value)


def select_rows(layer: nn.Linear, chosen: Tensor) -> nn.Linear:
    """Return a linear layer with some of its outputs."""
    portion = nn.Linear(layer.in_features, len(chosen), layer.bias is not None, device="meta")
    for name, parameter in layer.named_parameters():
        setattr(portion, name, nn.Parameter(parameter[chosen], requires_grad=False))
    return portion


class SummedLinear(nn.Module):
    """A linear layer whose inputs are split over processes."""

    def __init__(self, layer: nn.Linear, chosen: Tensor, processes: Processes) -> None:
        super().__init__()
        self.linear = nn.Linear(len(chosen), layer.out_features, bias=False, device="meta")
        self.linear.weight = nn.Parameter(layer.weight[:, chosen].contiguous(), requires_grad=False)
        self.bias, self.processes = layer.bias, processes

    def forward(self, x: Tensor) -> Tensor:
        y = self.processes.add_up(self.linear(x))
        return y if self.bias is None else y + self.bias


class SomeOutputs(nn.Module):
    """Wrapper that selects some of a module's outputs."""

    def __init__(self, full: nn.Module, chosen: Tensor) -> None:
        super().__init__()
        self.full, self.chosen = full, chosen

    def forward(self, x: Tensor) -> Tensor:
        return self.full(x)[..., self.chosen]


class Joined(nn.Module):
    """A module that reads all processes' inputs."""

    def __init__(self, full: nn.Module, processes: Processes) -> None:
        super().__init__()
        self.full, self.processes = full, processes

    def forward(self, x: Tensor) -> Tensor:
        return self.full(self.processes.concatenate(x))
