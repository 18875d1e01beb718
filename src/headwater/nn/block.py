"""One Transformer block: attention and feed-forward around the residual stream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headwater.config.layers import layer_config
from headwater.config.plan import EMBEDDING, LayerPlan, Outer, Part, Source
from headwater.mechanisms.contract import AttentionInputs, Context, Hidden
from headwater.mechanisms.named import Named, PartTail
from headwater.nn.attention import Attention
from headwater.nn.cache_name import CACHE
from headwater.nn.feed_forward import make_feed_forward
from headwater.nn.lookback import find_tail
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
        own, outer = layer_config(config, plan.index), plan.at(*get_args(Outer))
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
        context = Context([*sources], kwargs.get("reach"), find_tail(self.plan, cache), kwargs.get("token_ids"))
        x = self.run_stage("embedded", x, context)
        if self.stages["embedded"] and self.embedding is not None:
            context.sources[self.embedding] = x
        embedding, x = x, self.run_stage("arrive", x, context)

        inputs = self.separate(self.run_stage("enter", x, context), x, context)
        attended, _, *exports = self.self_attn(
            inputs.q, *context.sources, past_key_values=cache, key_input=inputs.k, value_input=inputs.v, **kwargs
        )
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        attended = self.drop(self.run_stage("attention_output", attended, context))
        x = inputs.stream + attended if self.residual else attended

        hidden = self.post_attention_layernorm(inputs.stream if self.parallel else x)
        hidden = self.run_stage("feed_forward_input", hidden, context)
        if self.stages["feed_forward_hidden"]:
            hidden = self.mlp(hidden, partial(self.run_stage, "feed_forward_hidden", context=context))
        else:
            hidden = self.mlp(hidden)
        if self.feed_forward_output_norm is not None:
            hidden = self.feed_forward_output_norm(hidden)
        x = x + self.drop(self.run_stage("feed_forward_output", hidden, context))

        exports = [*exports]  # PyTorch 2.11 traces the starred name as a tuple
        # The last of the plan's exports, which are sorted.
        if self.exports_embedding:
            exports.append(embedding)
        if self.exports_stream:
            exports.append(x)
        return self.run_stage("leave", x, context), *exports

    def run_stage(self, stage: Outer, x: X, context: Context) -> X:
        """x, [B, T, D] or several tensors, after the mechanisms that act at `stage`."""
        for name in self.stages[stage]:
            x = getattr(self.mechanisms[name], stage)(x, context)
        return x

    def separate(self, entered: Tensor, x: Tensor, context: Context) -> AttentionInputs:
        """What attention is given, alike or for queries, keys and values; and the residual stream, formerly x."""
        if not self.stages["separate"]:
            return AttentionInputs(self.normalize(entered, context), None, None, x)
        k, v = (entered if part in self.inputs else None for part in ("k", "v"))
        inputs = self.run_stage("separate", AttentionInputs(entered, k, v, x), context)
        k, v = (self.normalize_part("k", inputs.k, context), self.normalize_part("v", inputs.v, context))
        return AttentionInputs(self.normalize(inputs.q, context), k, v, inputs.stream)

    def normalize(self, x: Tensor, context: Context) -> Tensor:
        """What attention is given, from x [B, T, D] before its norm."""
        return self.run_stage("attention_input", self.input_layernorm(x), context)

    def normalize_part(self, part: Part, x: Tensor | None, context: Context) -> Tensor | None:
        """`normalize` of the input of keys or values alone, with tails of its own; None if there is none."""
        if x is None:
            return None
        tail = None if context.tail is None else PartTail(context.tail, part)
        return self.normalize(x, context._replace(tail=tail))

    def drop(self, x: Tensor) -> Tensor:
        """A branch's output after dropout of its numbers, and of the whole branch by row (stochastic depth)."""
        if self.training and self.residual_dropout:
            x = nn.functional.dropout(x, self.residual_dropout)
        if self.training and self.drop_path:
            x = x * nn.functional.dropout(x.new_ones(x.shape[0], 1, 1), self.drop_path)
        return x
