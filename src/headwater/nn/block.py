"""One Transformer block: attention and feed-forward around the residual stream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headwater.config.plan import EMBEDDING, LayerPlan, Outer, Part, Source
from headwater.mechanisms.contract import AttentionInputs, Context, Hidden
from headwater.mechanisms.named import Named, PartTail
from headwater.nn.attention import Attention, tail_of
from headwater.nn.cache_name import CACHE
from headwater.nn.feed_forward import make_feed_forward
from headwater.nn.norm import make_norm
from headwater.plugins.registry import resolve

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig

X = TypeVar("X", Tensor, AttentionInputs, Hidden)

# Older transformers, such as 5.17, checkpoint around a layer's hooks and its compiled graph, which then holds nothing
# of what `gradient_checkpointing` says; newer ones do it inside.
OUTSIDE = "__call__" in vars(GradientCheckpointingLayer)


class Block(GradientCheckpointingLayer):
    """x [B, T, D] and the tensors of earlier layers that it reads -> (x, *tensors that later layers read).

    Tensors with gradients are passed and returned positionally: re-entrant checkpointing sees no others.
    """

    def __init__(self, config: HeadwaterConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        self.slides = config.slides(plan.index)
        self.parallel = config.parallel_residual
        self.residual = config.first_residual or plan.index > 0
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, plan)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = make_feed_forward(config, plan.index)
        self.attention_output_norm = make_norm(config) if config.output_norms else None
        self.feed_forward_output_norm = make_norm(config) if config.output_norms else None
        self.residual_dropout = config.residual_dropout
        self.drop_path = config.drop_path * plan.index / max(1, config.num_hidden_layers - 1)
        own, outer = config.at(plan.index), plan.at(*get_args(Outer))
        self.mechanisms = Named(
            {name: resolve(name).build_outer_module(config.mechanisms[name], own, plan) for name in outer}
        )
        self.stages = {stage: plan.at(stage) for stage in get_args(Outer)}
        self.inputs = plan.inputs
        self.exports_stream = Source("stream", "x", plan.index) in plan.exports
        self.exports_embedding = EMBEDDING in plan.exports
        self.embedding = plan.reads.index(EMBEDDING) if EMBEDDING in plan.reads else None  # among the sources

    if OUTSIDE:
        __call__ = nn.Module.__call__

    def forward(self, *args: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        if OUTSIDE and self.gradient_checkpointing and self.training:
            kwargs |= {"use_cache": False, CACHE: None}  # the repetition would write a second time
            return cast(tuple[Tensor, ...], self._gradient_checkpointing_func(partial(self.run, **kwargs), *args))
        return self.run(*args, **kwargs)

    def run(self, x: Tensor, *sources: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        # Under transformers' own name until here, since newer versions take it away while they checkpoint.
        cache = kwargs.pop(CACHE, None)
        tail = tail_of(self.plan, cache)
        context = Context([*sources], kwargs.get("reach"), tail, kwargs.get("token_ids"))
        if self.stages["embedded"]:
            x = self.through("embedded", x, context)
            if self.embedding is not None:
                context.sources[self.embedding] = x
                sources = (*context.sources,)
        embedding, x = x, self.through("arrive", x, context)
        entered = self.through("enter", x, context)
        if self.stages["separate"]:
            entered, others, x = self.separated(entered, x, context)
            kwargs |= others
        else:
            entered = self.normed(entered, context)
        attended, _, *made = self.self_attn(entered, *sources, past_key_values=cache, **kwargs)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        attended = self.through("attention_output", attended, context)
        made = [*made]  # PyTorch 2.11 traces the starred name as a tuple
        before = x
        x = x + self.dropped(attended) if self.residual else self.dropped(attended)
        inner = self.post_attention_layernorm(before if self.parallel else x)
        inner = self.through("feed_forward_input", inner, context)
        if self.stages["feed_forward_hidden"]:
            inner = self.mlp(inner, partial(self.through, "feed_forward_hidden", context=context))
        else:
            inner = self.mlp(inner)
        if self.feed_forward_output_norm is not None:
            inner = self.feed_forward_output_norm(inner)
        x = x + self.dropped(self.through("feed_forward_output", inner, context))
        # The last of the plan's exports, which are sorted.
        if self.exports_embedding:
            made.append(embedding)
        if self.exports_stream:
            made.append(x)
        return self.through("leave", x, context), *made

    def normed(self, x: Tensor, context: Context) -> Tensor:
        """What attention is given, from x [B, T, D] before its norm."""
        return self.through("attention_input", self.input_layernorm(x), context)

    def separated(self, entered: Tensor, x: Tensor, context: Context) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """What attention is given for queries, and for keys and values by name; and the residual stream, formerly x."""
        k, v = (entered if part in self.inputs else None for part in ("k", "v"))
        made = self.through("separate", AttentionInputs(entered, k, v, x), context)

        def normed(part: Part, one: Tensor) -> Tensor:
            tail = None if context.tail is None else PartTail(context.tail, part)
            return self.normed(one, context._replace(tail=tail))

        others = {} if made.k is None else {"key_input": normed("k", made.k)}
        others |= {} if made.v is None else {"value_input": normed("v", made.v)}
        return self.normed(made.q, context), others, made.stream

    def through(self, stage: Outer, x: X, context: Context) -> X:
        """x, [B, T, D] or several tensors, after the mechanisms that act at `stage`."""
        for name in self.stages[stage]:
            x = getattr(self.mechanisms[name], stage)(x, context)
        return x

    def dropped(self, x: Tensor) -> Tensor:
        """A branch's output after dropout of its numbers, and of the whole branch by row (stochastic depth)."""
        if self.training and self.residual_dropout:
            x = nn.functional.dropout(x, self.residual_dropout)
        if self.training and self.drop_path:
            x = x * nn.functional.dropout(x.new_ones(x.shape[0], 1, 1), self.drop_path)
        return x
