"""What a config costs, from its plan alone: parameters, FLOPs, cache bytes, memory. Nothing is built.

Matmul FLOPs count 2 per multiply-add; elementwise work (norms, RoPE, activations, the mechanisms' mixes) is left out,
as is usual. Each mechanism states its own cost in its file; here it is added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headwater.config.capabilities import Map, ReplacesLinear
from headwater.config.layers import layer_config
from headwater.config.plan import Cost, Kept, LayerPlan, Stage
from headwater.config.planner import output_only_from, plan_layers
from headwater.config.vision import HeadwaterVisionConfig
from headwater.cost.hardware import memory_of
from headwater.mechanisms.capabilities import HasSharedModule
from headwater.plugins.registry import resolve
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig


# Activations for which `kernels.activation` stores only the input, and nothing of the product.
MADE_AGAIN = {
    "silu", "swish", "gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_accurate"
}  # fmt: skip
# For the others: numbers that PyTorch stores per output number, besides the result; by default 1, the input.
KEPT_BY_ACTIVATION = {"relu": 0, "sigmoid": 0, "tanh": 0, "quick_gelu": 2, "gelu_fast": 7}

# Bytes per number in matmuls and their weights, and in what stays fp32 under autocast: the residual stream, norms.
BYTES = {"64-true": (8, 8), "32-true": (4, 4), "bf16-mixed": (2, 4), "bf16-true": (2, 2)}
# Bytes of a token's id.
ID = 8


def map_cost(config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int, bias: bool = False) -> Cost:
    """One linear layer: a mechanism's replacement if there is one, else weights, bias and their matmul."""
    if d_out == 0:
        return Cost()
    linear = Cost(parameters=d_in * d_out + bias * d_out, flops=2 * d_in * d_out)
    return _own_map_cost(config, layer, name, d_in, d_out) or linear


def _own_map_cost(config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int) -> Cost | None:
    for mechanism, options in config.mechanisms.items():
        kind = resolve(mechanism)
        if isinstance(kind, ReplacesLinear):
            own = kind.count_linear_cost(options, config, layer, name, d_in, d_out)
            if own is not None:
                return own
    return None


def _feed_forward_cost(config: HeadwaterConfig, layer: int) -> Cost:
    width, inner = config.hidden_size, config.intermediate_size
    own = _own_map_cost(config, layer, "feed_forward", width, width)
    if own is not None:
        return own
    gated = config.feed_forward == "gated"
    maps = 3 if gated else 2
    biases = config.mlp_bias * (width + (maps - 1) * inner)
    # Stored: what the activation stores, its output, and if gated the other factor and the product.
    saved = (KEPT_BY_ACTIVATION.get(config.hidden_act, 1) + (3 if gated else 1)) * inner
    if config.hidden_act in MADE_AGAIN:
        saved = (2 if gated else 1) * inner
    return Cost(maps * width * inner + biases, 2 * maps * width * inner, saved)


def _attention_cost(config: HeadwaterConfig, plan: LayerPlan) -> Cost:
    """The four projections; autograd stores q, the attended keys and values, and the heads' output."""
    config = layer_config(config, plan.index)
    width, q_width = config.hidden_size, config.num_attention_heads * config.head_dim
    k_width, v_width = len(plan.k_heads) * config.head_dim, len(plan.v_heads) * config.head_dim
    maps = (
        map_cost(config, plan.index, "query", width, q_width, config.qkv_bias),
        map_cost(config, plan.index, "key", width, k_width, config.qkv_bias),
        map_cost(config, plan.index, "value", width, v_width, config.qkv_bias),
        map_cost(config, plan.index, "output", q_width, width, config.output_bias),
    )
    norms = config.qk_norm * _norm_parameters(config, config.head_dim) * (2 if plan.k_heads else 1)
    saved = sum(cost.saved for cost in maps) + 2 * q_width + k_width + v_width
    saved += config.qk_norm * (q_width + k_width)  # the norms' inputs
    saved += q_width * (len(plan.groups) > 1)  # inputs of several kernel calls, joined
    return Cost(
        parameters=sum(cost.parameters for cost in maps) + norms,
        flops=sum(cost.flops for cost in maps),
        saved=saved,
        looked_up=sum(cost.looked_up for cost in maps),
    )


def _norm_parameters(config: HeadwaterConfig, size: int, final: bool = False) -> int:
    weight = config.final_norm_weight if final else config.norm_weight
    bias = config.final_norm_bias if final else config.norm_bias
    return size * (weight + (bias and config.norm == "layer_norm"))


def _norms(config: HeadwaterConfig) -> int:
    """How many norms of the model's width there are before the last one."""
    return (4 if config.output_norms else 2) * config.num_hidden_layers + config.embedding_norm


def _mechanism_costs(config: HeadwaterConfig, plan: LayerPlan) -> Iterator[Cost]:
    for name in dict.fromkeys(name for _, name in plan.acts):
        yield resolve(name).count_cost(config.mechanisms[name], layer_config(config, plan.index), plan)


def _shared_costs(config: HeadwaterConfig) -> list[Cost]:
    """What the modules cost that mechanisms share across all layers."""
    return [
        mechanism.count_shared_cost(options, config)
        for name, options in config.mechanisms.items()
        if isinstance(mechanism := resolve(name), HasSharedModule)
    ]


def check_memory(config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` for a model that this machine cannot hold in fp32, before it is built."""
    count = sum(parameters(config).values())
    there = memory_of(torch.device("cpu"))
    if count * 4 > there:
        raise HeadwaterError(
            f"The model would have {count:,} parameters, {count * 4 / 1e9:,.0f} GB, but this machine has "
            f"{there / 1e9:,.0f} GB of memory; choose a smaller model."
        )


def embedding_parameters(config: HeadwaterConfig) -> int:
    """Parameters of the embedding and of an untied output head. An image model has none: it computes with all."""
    return sum(_ends(config)) if config.is_causal else 0


def parameters(config: HeadwaterConfig) -> dict[str, int]:
    """Trainable parameters by part; a tied output head is counted once, with the embedding."""
    plans, width = plan_layers(config), config.hidden_size
    embedding, head = _ends(config)
    shared = sum(cost.parameters for cost in _shared_costs(config))
    return {
        "embedding": embedding,
        "attention": sum(_attention_cost(config, plan).parameters for plan in plans),
        "feed-forward": sum(_feed_forward_cost(config, plan.index).parameters for plan in plans),
        "mechanisms": shared + sum(cost.parameters for plan in plans for cost in _mechanism_costs(config, plan)),
        "norms": _norms(config) * _norm_parameters(config, width) + _norm_parameters(config, width, final=True),
        "output head": head,
    }


def _ends(config: HeadwaterConfig) -> tuple[int, int]:
    """The parameters before and after the blocks."""
    width = config.hidden_size
    if isinstance(config, HeadwaterVisionConfig):
        vectors = config.first_patch + config.tokens * (config.position == "learned") + config.patch_bias
        return width * (_patch(config) + vectors), (width + 1) * config.num_labels
    positions = config.max_position_embeddings if config.position == "learned" else 0
    head = 0 if config.tie_word_embeddings else width * config.vocab_size
    return width * (config.vocab_size + positions), head


def _patch(config: HeadwaterVisionConfig) -> int:
    """The numbers of a patch."""
    high, wide = config.patch_shape
    return config.num_channels * high * wide


def attended_tokens(config: HeadwaterConfig, context: int, causal: bool = True) -> float:
    """How many tokens a token attends to on average in a row of `context`, or computes scores for if not `causal`.

    config: as a layer sees it (`headwater.config.layers.layer_config`). Causally (context + 1) / 2, or less under a
    sliding window. Otherwise the whole row, as for kernels that compute and mask the square of scores, and as the
    TokenFormer paper counts.
    """
    if not causal:
        return context
    window = min(config.sliding_window or context, context)
    return (window * (window + 1) / 2 + (context - window) * window) / context


def forward_flops(config: HeadwaterConfig, context: int, causal: bool = True) -> dict[str, float]:
    """FLOPs of one forward pass, per token of rows of `context` tokens, by part.

    "maps" are all linear layers, or what replaces them; "attention" is between tokens, the only part that depends on
    the context; "output head" is the logits.
    """
    layers = range(config.num_hidden_layers)
    return _block_flops(config, [attended_tokens(layer_config(config, i), context, causal) for i in layers]) | {
        "output head": 2.0 * config.hidden_size * config.vocab_size,
    }


def prefill_flops(config: HeadwaterConfig, tokens: int, causal: bool = True) -> float:
    """FLOPs of reading a prompt of `tokens` with a cache, and of the logits of its last token.

    Layers that store nothing for later tokens (`headwater.config.planner.output_only_from`) run for the last token
    alone.
    """
    plans = plan_layers(config)
    first = output_only_from(config, plans)
    own = [layer_config(config, plan.index) for plan in plans]
    # What the last token alone attends to, causally.
    seen = [min(tokens, c.sliding_window or tokens) if causal else tokens for c in own]
    below = _layer_flops(config, plans[:first], [attended_tokens(c, tokens, causal) for c in own[:first]])
    above = _layer_flops(config, plans[first:], seen[first:])
    shared = sum(cost.flops for cost in _shared_costs(config))
    head = 2.0 * config.hidden_size * config.vocab_size
    return tokens * (sum(below.values()) + shared) + sum(above.values()) + head


def _block_flops(config: HeadwaterConfig, attended: Sequence[float]) -> dict[str, float]:
    """FLOPs of all blocks and what they share, per token that attends to `attended` tokens in each."""
    flops = _layer_flops(config, plan_layers(config), attended)
    return flops | {"maps": flops["maps"] + sum(cost.flops for cost in _shared_costs(config))}


def _layer_flops(config: HeadwaterConfig, plans: Sequence[LayerPlan], attended: Sequence[float]) -> dict[str, float]:
    """FLOPs of some of the blocks, per token that attends to `attended` tokens in each."""
    maps = sum(_attention_cost(config, plan).flops + _feed_forward_cost(config, plan.index).flops for plan in plans)
    extra = sum(cost.flops for plan in plans for cost in _mechanism_costs(config, plan))
    own = [layer_config(config, plan.index) for plan in plans]
    between = sum(c.num_attention_heads * c.head_dim * count for c, count in zip(own, attended, strict=True))
    return {"maps": float(maps + extra), "attention": 4.0 * between}


def forward_flops_per_image(config: HeadwaterVisionConfig) -> dict[str, float]:
    """FLOPs of one forward pass over an image of `config.image_size`, by part."""
    width, patches = config.hidden_size, config.tokens - config.first_patch
    blocks = _block_flops(config, [config.tokens] * config.num_hidden_layers)
    return {
        "patch embedding": 2.0 * width * _patch(config) * patches,
        **{part: config.tokens * flops for part, flops in blocks.items()},
        "output head": 2.0 * width * config.num_labels,
    }


def forward_flops_per_token(config: HeadwaterConfig, context: int, causal: bool = True) -> float:
    """FLOPs of one forward pass, per token of rows of `context` tokens, including the output head."""
    return sum(forward_flops(config, context, causal).values())


def training_flops_per_token(config: HeadwaterConfig, context: int, causal: bool = True) -> float:
    """Forward and backward: three times the forward pass."""
    return 3 * forward_flops_per_token(config, context, causal)


def training_flops(config: HeadwaterConfig, context: int) -> float:
    """Training FLOPs of a token in rows of `context` tokens, or of an image."""
    if isinstance(config, HeadwaterVisionConfig):
        return 3 * sum(forward_flops_per_image(config).values())
    return training_flops_per_token(config, context)


def _cached_numbers(config: HeadwaterConfig, plan: LayerPlan) -> int:
    """Numbers of a token's keys and values in a layer's cache."""
    heads = 2 * len(plan.attends) if config.materialise else len(plan.k_heads) + len(plan.v_heads)
    return heads * layer_config(config, plan.index).head_dim


def cache_bytes_per_token(config: HeadwaterConfig, element_size: int = 4) -> int:
    """Bytes that each further token adds to the cache of one sequence; `element_size` in bytes, fp32 by default.

    0 for an image model.
    """
    return sum(_cached_numbers(config, plan) for plan in plan_layers(config)) * element_size * config.is_causal


def kept_numbers(config: HeadwaterConfig, plan: LayerPlan) -> dict[Kept, int]:
    """Of what the cache keeps raw tokens: how many numbers one of them has in this layer."""
    own = layer_config(config, plan.index)
    return {
        "q": own.num_attention_heads * own.head_dim,
        "k": len(plan.k_heads) * own.head_dim,
        "v": len(plan.v_heads) * own.head_dim,
        "x": own.hidden_size,
        "input": len(plan.inputs) * own.hidden_size,
        "gate": own.intermediate_size,
        "up": own.intermediate_size,
        "id": 1,
    }


def cache_bytes(config: HeadwaterConfig, tokens: int, batch_size: int = 1, element_size: int = 4) -> int:
    """Bytes of the cache after `tokens` tokens: the history (the window's, if it slides) and the raw tails."""

    def held(plan: LayerPlan) -> int:
        own = layer_config(config, plan.index)
        stored = tokens if own.sliding_window is None else min(tokens, own.sliding_window - 1)
        width = kept_numbers(config, plan)
        numbers = _cached_numbers(config, plan) * stored
        numbers += sum(width[part] * length for part, length, _ in plan.tails if part != "id")
        return element_size * numbers + ID * sum(length for part, length, _ in plan.tails if part == "id")

    return batch_size * sum(held(plan) for plan in plan_layers(config))


def cache_bytes_read(config: HeadwaterConfig, tokens: int, element_size: int = 4) -> int:
    """Bytes of keys and values that the next token reads in a sequence of `tokens`.

    Each layer reads all that its heads attend to, wherever it is stored: sharing saves storage, not reading.
    """
    own = [layer_config(config, layer) for layer in range(config.num_hidden_layers)]
    numbers = (c.num_key_value_heads * c.head_dim * min(tokens, c.sliding_window or tokens) for c in own)
    return 2 * sum(numbers) * element_size


def activation_bytes(
    config: HeadwaterConfig,
    context: int,
    batch_size: int = 1,
    precision: str = "32-true",
    gradient_checkpointing: bool = False,
    loss_chunk_tokens: int | None = None,
    masked: bool = False,
) -> dict[str, int]:
    """Estimate the memory of a training step over `batch_size` rows of `context` tokens, without the training state.
    For an image model a row is an image, and `context` its tokens.

    "kept" is what autograd stores, with fused attention and norm kernels and no dropout; "loss" is added at
    the peak: two gradients of the logits in fp32. `precision`, `gradient_checkpointing` and `loss_chunk_tokens` as in
    recipes; with checkpointing it stores each block's input, what later layers read, and one block at a time; with
    chunks it computes a chunk's logits again at the peak.
    masked: rows are packed, and attention takes a mask, [B, 1, T, T]. "masks": the mask, and each layer's copy of it in
    the dtype of queries, which the fused kernel stores; and those of layers with keys and values beside the tokens'.
    """
    plans, rows = plan_layers(config), _RowBytes(config, context, BYTES[precision])
    blocks = [rows.block(plan) for plan in plans]
    if gradient_checkpointing:
        carried = sum(rows.source(source.part, plan) for plan in plans for source in plan.exports)
        kept = len(plans) * rows.stream_width + carried + max(blocks)
    else:
        kept = sum(blocks)
    kept += rows.outside_blocks()
    tokens = batch_size * context
    logits = tokens * config.vocab_size if config.is_causal else batch_size * config.num_labels
    softmax, gradients = 4, 8  # bytes of its logarithm, and of two gradients, of a logit
    softmax += rows.element * (config.logit_softcap is not None)  # which keeps its tanh
    at_once = min(loss_chunk_tokens, tokens) * config.vocab_size if loss_chunk_tokens else logits
    return {
        "kept": tokens * kept + batch_size * rows.before() + (0 if loss_chunk_tokens else softmax * logits),
        "loss": at_once * (gradients + (softmax if loss_chunk_tokens else 0)),
        "masks": tokens * rows.masks(1 if gradient_checkpointing else len(plans)) if masked else 0,
    }


@dataclass(frozen=True)
class _RowBytes:
    """Bytes that training stores for a row of `context` tokens; precision: of a number in linear layers and outside."""

    config: HeadwaterConfig
    context: int
    precision: tuple[int, int]

    @property
    def element(self) -> int:
        return self.precision[0]

    @property
    def stream_width(self) -> int:
        """Bytes per token of the residual stream."""
        return self.config.hidden_size * self.precision[1]

    def source(self, part: str, plan: LayerPlan) -> int:
        """Bytes per token of a tensor that a layer passes on."""
        layer = layer_config(self.config, plan.index)
        if part == "x":
            return self.stream_width
        if part == "a":
            return layer.num_attention_heads * self.context * self.element
        heads = {"q": layer.num_attention_heads, "k": len(plan.k_heads), "v": len(plan.v_heads)}
        return heads[part] * layer.head_dim * self.element

    def block(self, plan: LayerPlan) -> int:
        """Bytes per token of what a block stores."""
        config, (element, stream) = self.config, self.precision
        attention, feed_forward = _attention_cost(config, plan), _feed_forward_cost(config, plan.index)
        numbers = attention.saved + feed_forward.saved + sum(cost.saved for cost in _mechanism_costs(config, plan))
        # Two norms, the first of one input or several: each stores its input, and the next linear layers its output;
        # those of outputs store the input.
        more = len(plan.inputs) - 1
        inputs = (1 if config.parallel_residual else 2) + more
        autocast = element < stream  # then each linear layer casts its input to a separate copy
        outputs = (_readers(plan) if autocast else 2 + more) + 2 * config.output_norms
        shown = _shown_weights(config, plan) * layer_config(config, plan.index).num_attention_heads * self.context
        return (inputs * stream + outputs * element) * config.hidden_size + (numbers + shown) * element

    def outside_blocks(self) -> int:
        """Bytes per token of the norms around the blocks, and of what mechanisms share."""
        config = self.config
        norms = config.hidden_size * self.element + self.stream_width * (1 + config.embedding_norm)
        return norms + sum(cost.saved for cost in _shared_costs(config)) * self.element

    def before(self) -> int:
        """Bytes per row of an image's patches."""
        if not isinstance(self.config, HeadwaterVisionConfig):
            return 0
        return (self.context - self.config.first_patch) * _patch(self.config) * self.element

    def masks(self, copies: int) -> int:
        """Bytes per token of the mask of packed rows, and its copies in layers of which so many are stored at once."""
        # With pairs beside the tokens' a layer widens the mask.
        widening = sum(bool(plan.at(Stage.ADDED_KEY_VALUES)) for plan in plan_layers(self.config))
        widened = min(copies, widening) if self.config.is_causal else 0
        return self.context * (1 + copies * self.element + widened)


def _readers(plan: LayerPlan) -> int:
    """How many linear layers read the output of a layer's two norms."""
    # A gated feed-forward's two linear layers share one.
    return 2 + bool(plan.k_heads) + bool(plan.v_heads)


def _shown_weights(config: HeadwaterConfig, plan: LayerPlan) -> int:
    """Sets of attention weights that are stored: none with a fused kernel, else the softmax's and derived ones."""
    acting, capped = bool(plan.at(Stage.ATTENTION_WEIGHTS)), config.attention_softcap is not None  # its tanh is kept
    return acting + capped + (acting or capped or any(source.kind == "probabilities" for source in plan.exports))


def state_bytes(config: HeadwaterConfig, precision: str = "bf16-mixed", averages: bool = False) -> dict[str, int]:
    """Bytes of weights, gradients, AdamW's two averages and autocast's copies. `precision` as in recipes.

    In bf16-true everything is bf16. In bf16-mixed the matrices have copies in bf16 from the forward pass to the end of
    the backward pass. averages: with `training.ema_decay`, which keeps a second copy of the weights.
    """
    element, stream = BYTES[precision]
    parts = parameters(config)
    count = sum(parts.values())
    matrices = parts["attention"] + parts["feed-forward"] - _looked_up_in_maps(config)
    if isinstance(config, HeadwaterVisionConfig):
        matrices += config.hidden_size * (_patch(config) + config.num_labels)
    else:
        matrices += config.vocab_size * config.hidden_size
    return {
        "weights": stream * count,
        "gradients": stream * count,
        "optimiser": 2 * stream * count,
        "copies": element * matrices if element < stream else 0,
        "average": averages * stream * count,
    }


def _looked_up_in_maps(config: HeadwaterConfig) -> int:
    """Parameters of what replaces linear layers, in tables of which a token reads a few rows."""
    return sum(
        _attention_cost(config, plan).looked_up + _feed_forward_cost(config, plan.index).looked_up
        for plan in plan_layers(config)
    )


def weights_read(config: HeadwaterConfig) -> int:
    """Weights read to generate a token: all but the rows of embeddings and other tables that are not looked up."""
    parts = parameters(config)
    tables = _tables(config) + _looked_up_in_maps(config)
    head = config.vocab_size * config.hidden_size
    return sum(parts.values()) - parts["embedding"] - tables - parts["output head"] + head


def _tables(config: HeadwaterConfig) -> int:
    """The parameters in tables in which mechanisms look tokens up."""
    tables = sum(cost.looked_up for plan in plan_layers(config) for cost in _mechanism_costs(config, plan))
    return tables + sum(cost.looked_up for cost in _shared_costs(config))
