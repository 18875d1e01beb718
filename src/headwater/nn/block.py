"""One Transformer block: attention and feed-forward around the residual stream."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headwater.config.layers import layer_config
from headwater.config.plan import BLOCK_STAGES, EMBEDDING, LayerPlan, Part, Source, Stage
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import AttentionInputs, Context
from headwater.nn.attention import Attention
from headwater.nn.cache_name import CACHE
from headwater.nn.feed_forward import make_feed_forward
from headwater.nn.lookback import find_tail
from headwater.nn.norm import make_norm
from headwater.nn.stages import ProjectionTail, RunsStages

# Older transformers, such as 5.17, checkpoint around a layer's hooks and its compiled graph, which then holds nothing
# of what `gradient_checkpointing` says; newer ones do it inside.
OUTSIDE = "__call__" in vars(GradientCheckpointingLayer)


class Block(RunsStages, GradientCheckpointingLayer):
    """x [B, T, D] and the tensors of earlier layers that it reads -> (x, *tensors that later layers read).

    All are positional: re-entrant checkpointing tracks no other gradients.
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
        self.build_mechanisms(layer_config(config, plan.index), plan, BLOCK_STAGES)
        self.inputs = plan.inputs
        self.exports_stream = Source("stream", "x", plan.index) in plan.exports
        self.exports_embedding = EMBEDDING in plan.exports
        self.embedding = plan.reads.index(EMBEDDING) if EMBEDDING in plan.reads else None  # its index among the sources

    if OUTSIDE:
        __call__ = nn.Module.__call__

    def forward(self, *args: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        if OUTSIDE and self.gradient_checkpointing and self.training:
            kwargs |= {"use_cache": False, CACHE: None}  # the recomputation would write to the cache again
            return cast(
                tuple[Tensor, ...], self._gradient_checkpointing_func(partial(self.run_stages, **kwargs), *args)
            )
        return self.run_stages(*args, **kwargs)

    def run_stages(self, x: Tensor, *sources: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        # Passed under transformers' own name until here, because newer versions remove it while checkpointing.
        cache = kwargs.pop(CACHE, None)
        context = Context([*sources], kwargs.get("reach"), find_tail(self.plan, cache), kwargs.get("token_ids"))
        x = self.run_stage(Stage.EMBEDDING, x, context)
        if self.stages[Stage.EMBEDDING.value] and self.embedding is not None:
            context.sources[self.embedding] = x
        embedding = x
        x = self.run_stage(Stage.RESIDUAL, x, context)

        inputs = self.prepare_attention(x, context)
        attended, _, *exports = self.self_attn(
            inputs.q, *context.sources, past_key_values=cache, key_input=inputs.k, value_input=inputs.v, **kwargs
        )
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        attended = self.drop_output(self.run_stage(Stage.ATTENTION_OUTPUT, attended, context))
        x = inputs.stream + attended if self.residual else attended

        x = x + self.drop_output(self.feed_forward(inputs.stream if self.parallel else x, context))

        exports = [*exports]  # PyTorch 2.11 traces the starred name as a tuple
        # These come last, because the plan's exports are sorted.
        if self.exports_embedding:
            exports.append(embedding)
        if self.exports_stream:
            exports.append(x)
        return self.run_stage(Stage.BLOCK_OUTPUT, x, context), *exports

    def feed_forward(self, x: Tensor, context: Context) -> Tensor:
        """Compute the output of the feed-forward and its norms for the stream x [B, T, D]."""
        x = self.run_stage(Stage.FEED_FORWARD_INPUT, self.post_attention_layernorm(x), context)
        if self.stages[Stage.FEED_FORWARD_HIDDEN.value]:
            x = self.mlp(x, partial(self.run_stage, Stage.FEED_FORWARD_HIDDEN, context=context))
        else:
            x = self.mlp(x)
        if self.feed_forward_output_norm is not None:
            x = self.feed_forward_output_norm(x)
        return self.run_stage(Stage.FEED_FORWARD_OUTPUT, x, context)

    def prepare_attention(self, x: Tensor, context: Context) -> AttentionInputs:
        """Compute the inputs of attention, one for all or one each for q, k and v, and the stream, from x [B, T, D]."""
        entered = self.run_stage(Stage.BLOCK_INPUT, x, context)
        if not self.stages[Stage.ATTENTION_INPUTS.value]:
            return AttentionInputs(self.normalize_input(entered, context), None, None, x)
        k, v = (entered if letter in self.inputs else None for letter in ("k", "v"))
        inputs = self.run_stage(Stage.ATTENTION_INPUTS, AttentionInputs(entered, k, v, x), context)
        k, v = self.normalize_part("k", inputs.k, context), self.normalize_part("v", inputs.v, context)
        return AttentionInputs(self.normalize_input(inputs.q, context), k, v, inputs.stream)

    def normalize_input(self, x: Tensor, context: Context) -> Tensor:
        """Normalize x [B, T, D], and let mechanisms transform the result, the input of attention."""
        return self.run_stage(Stage.ATTENTION_INPUT, self.input_layernorm(x), context)

    def normalize_part(self, letter: Part, x: Tensor | None, context: Context) -> Tensor | None:
        """Apply `normalize_input` to the input of keys or values only, with separate tails; None if there is none."""
        if x is None:
            return None
        tail = None if context.tail is None else ProjectionTail(context.tail, letter)
        return self.normalize_input(x, context._replace(tail=tail))

    def drop_output(self, x: Tensor) -> Tensor:
        """Apply dropout to a branch's output, by element and by row of the whole branch (stochastic depth)."""
        if self.training and self.residual_dropout:
            x = nn.functional.dropout(x, self.residual_dropout)
        if self.training and self.drop_path:
            x = x * nn.functional.dropout(x.new_ones(x.shape[0], 1, 1), self.drop_path)
        return x
