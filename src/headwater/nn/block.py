"""One Transformer block: attention and feed-forward around the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headwater.config.plan import BLOCK_STAGES, EMBEDDING, LayerPlan, Part, Source, Stage
from headwater.mechanisms.contract import AttentionInputs, Context, Hidden, Mechanism
from headwater.mechanisms.named import Named, PartTail, build_outer_module
from headwater.nn.attention import Attention, tail_of
from headwater.nn.cache_name import CACHE
from headwater.nn.feed_forward import make_feed_forward
from headwater.nn.norm import make_norm

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig

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
        own, outer = config.at(plan.index), plan.at(*BLOCK_STAGES)
        self.mechanisms = Named({name: build_outer_module(name, config.mechanisms[name], own, plan) for name in outer})
        self.stages = {stage: plan.at(stage) for stage in BLOCK_STAGES}
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
        if self.stages[Stage.EMBEDDING]:
            for mechanism in self.at(Stage.EMBEDDING):
                x = mechanism.transform_embedding(x, context)
            if self.embedding is not None:
                context.sources[self.embedding] = x
                sources = (*context.sources,)
        embedding = x
        for mechanism in self.at(Stage.RESIDUAL):
            x = mechanism.update_residual(x, context)
        entered = x
        for mechanism in self.at(Stage.BLOCK_INPUT):
            entered = mechanism.transform_block_input(entered, context)
        if self.stages[Stage.ATTENTION_INPUTS]:
            entered, others, x = self.separated(entered, x, context)
            kwargs |= others
        else:
            entered = self.normed(entered, context)
        attended, _, *made = self.self_attn(entered, *sources, past_key_values=cache, **kwargs)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        for mechanism in self.at(Stage.ATTENTION_OUTPUT):
            attended = mechanism.transform_attention_output(attended, context)
        made = [*made]  # PyTorch 2.11 traces the starred name as a tuple
        before = x
        x = x + self.dropped(attended) if self.residual else self.dropped(attended)
        inner = self.post_attention_layernorm(before if self.parallel else x)
        for mechanism in self.at(Stage.FEED_FORWARD_INPUT):
            inner = mechanism.transform_feed_forward_input(inner, context)
        if self.stages[Stage.FEED_FORWARD_HIDDEN]:
            inner = self.mlp(inner, partial(self.hidden, context=context))
        else:
            inner = self.mlp(inner)
        if self.feed_forward_output_norm is not None:
            inner = self.feed_forward_output_norm(inner)
        for mechanism in self.at(Stage.FEED_FORWARD_OUTPUT):
            inner = mechanism.transform_feed_forward_output(inner, context)
        x = x + self.dropped(inner)
        # The last of the plan's exports, which are sorted.
        if self.exports_embedding:
            made.append(embedding)
        if self.exports_stream:
            made.append(x)
        for mechanism in self.at(Stage.BLOCK_OUTPUT):
            x = mechanism.transform_block_output(x, context)
        return x, *made

    def normed(self, x: Tensor, context: Context) -> Tensor:
        """What attention is given, from x [B, T, D] before its norm."""
        x = self.input_layernorm(x)
        for mechanism in self.at(Stage.ATTENTION_INPUT):
            x = mechanism.transform_attention_input(x, context)
        return x

    def separated(self, entered: Tensor, x: Tensor, context: Context) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """What attention is given for queries, and for keys and values by name; and the residual stream, formerly x."""
        k, v = (entered if part in self.inputs else None for part in ("k", "v"))
        made = AttentionInputs(entered, k, v, x)
        for mechanism in self.at(Stage.ATTENTION_INPUTS):
            made = mechanism.split_attention_inputs(made, context)

        def normed(part: Part, one: Tensor) -> Tensor:
            tail = None if context.tail is None else PartTail(context.tail, part)
            return self.normed(one, context._replace(tail=tail))

        others = {} if made.k is None else {"key_input": normed("k", made.k)}
        others |= {} if made.v is None else {"value_input": normed("v", made.v)}
        return self.normed(made.q, context), others, made.stream

    def hidden(self, x: Hidden, context: Context) -> Hidden:
        """What goes into the feed-forward's activation, after the mechanisms that act there."""
        for mechanism in self.at(Stage.FEED_FORWARD_HIDDEN):
            x = mechanism.transform_feed_forward_hidden(x, context)
        return x

    def at(self, stage: Stage) -> Sequence[Mechanism]:
        """The mechanisms that act at a stage, in the order of application."""
        names = self.stages[stage]
        return [cast(Mechanism, self.mechanisms[name]) for name in names] if names else ()

    def dropped(self, x: Tensor) -> Tensor:
        """A branch's output after dropout of its numbers, and of the whole branch by row (stochastic depth)."""
        if self.training and self.residual_dropout:
            x = nn.functional.dropout(x, self.residual_dropout)
        if self.training and self.drop_path:
            x = x * nn.functional.dropout(x.new_ones(x.shape[0], 1, 1), self.drop_path)
        return x
