"""Cost of a config, from its plan only: parameters, FLOPs, cache bytes, memory. Nothing is built.

Matmul FLOPs count 2 per multiply-add; elementwise work (norms, RoPE, activations, the mechanisms' mixes) is left out,
as is usual. Each mechanism states its cost in its own file.
"""

from collections.abc import Iterable, Sequence

from headwater.config.capabilities import Map, count_replacement_cost
from headwater.config.layers import layer_config
from headwater.config.plan import Cost, LayerPlan, Stage, TailPart
from headwater.config.planner import output_only_from, plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.kernels.fused_loss import DISTILLED_CHUNK
from headwater.mechanisms.capabilities import HasSharedModule
from headwater.plugins.mechanisms import resolve
from headwater.util.precision import Precision

# Activations for which `kernels.activation` stores only the input, and nothing of the product.
MADE_AGAIN = {
    "silu", "swish", "gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_accurate"
}  # fmt: skip
# For other activations: extra numbers that PyTorch stores per output number. Default: 1, the input.
KEPT_BY_ACTIVATION = {"relu": 0, "sigmoid": 0, "tanh": 0, "quick_gelu": 2, "gelu_fast": 7}

# Bytes of a token's id, and of its position.
ID, POSITION = 8, 4


def _count_linear(config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int, bias: bool = False) -> Cost:
    """Count one linear layer: a mechanism's replacement if there is one, else weights, bias and matmul."""
    if d_out == 0:
        return Cost()
    linear = Cost(parameters=d_in * d_out + bias * d_out, flops=2 * d_in * d_out)
    cost = count_replacement_cost(config, layer, name, d_in, d_out)
    return cost or linear


def _add_up(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(sum, zip(Cost(), *costs, strict=True)))


def _count_feed_forward(config: HeadwaterConfig, layer: int) -> Cost:
    width, inner = config.hidden_size, config.intermediate_size
    replacement = count_replacement_cost(config, layer, "feed_forward", width, width)
    if replacement is not None:
        return replacement
    gated = config.feed_forward == "gated"
    maps = 3 if gated else 2
    biases = config.mlp_bias * (width + (maps - 1) * inner)
    # Stored: what the activation stores, its output, and if gated the other factor and the product.
    saved = (KEPT_BY_ACTIVATION.get(config.hidden_act, 1) + (3 if gated else 1)) * inner
    if config.hidden_act in MADE_AGAIN:
        saved = (2 if gated else 1) * inner
    return Cost(maps * width * inner + biases, 2 * maps * width * inner, saved)


def _count_attention(config: HeadwaterConfig, plan: LayerPlan) -> Cost:
    """The four projections; autograd stores q, the attended keys and values, and the heads' output."""
    config = layer_config(config, plan.index)
    width, q_width = config.hidden_size, config.num_attention_heads * config.head_dim
    k_width, v_width = len(plan.k_heads) * config.head_dim, len(plan.v_heads) * config.head_dim
    maps = (
        _count_linear(config, plan.index, "query", width, q_width, config.qkv_bias),
        _count_linear(config, plan.index, "key", width, k_width, config.qkv_bias and not plan.latent_heads),
        _count_linear(config, plan.index, "value", width, v_width, config.qkv_bias),
        _count_linear(config, plan.index, "output", q_width, width, config.output_bias),
    )
    norms = config.qk_norm * _norm_parameters(config, config.head_dim) * (2 if plan.has_keys else 1)
    saved = 2 * q_width + k_width + v_width
    saved += config.qk_norm * (q_width + k_width * (not plan.latent_heads))  # the norms' inputs
    saved += q_width * (len(plan.groups) > 1)  # inputs of several kernel calls, joined
    return _add_up([*maps, Cost(parameters=norms, saved=saved)])


def _norm_parameters(config: HeadwaterConfig, size: int, final: bool = False) -> int:
    weight = config.final_norm_weight if final else config.norm_weight
    bias = config.final_norm_bias if final else config.norm_bias
    return size * (weight + (bias and config.norm == "layer_norm"))


def _count_shared(config: HeadwaterConfig) -> Cost:
    """Cost of the modules that mechanisms share across all layers."""
    return _add_up(
        mechanism.count_shared_cost(options, config)
        for name, options in config.mechanisms.items()
        if isinstance(mechanism := resolve(name), HasSharedModule)
    )


def _count_layers(config: HeadwaterConfig, plans: Sequence[LayerPlan]) -> dict[str, Cost]:
    """The cost of layers by part."""
    return {
        "attention": _add_up(_count_attention(config, plan) for plan in plans),
        "feed-forward": _add_up(_count_feed_forward(config, plan.index) for plan in plans),
        "mechanisms": _add_up(  # excluding the linear layers that they replace
            resolve(name).count_cost(config.mechanisms[name], layer_config(config, plan.index), plan)
            for plan in plans
            for name in dict.fromkeys(name for _, name in plan.acts)
        ),
    }


def embedding_parameters(config: HeadwaterConfig) -> int:
    """Parameters of the embedding and of an untied output head. An image model has none: it computes with all."""
    return sum(_count_ends(config)) if config.is_causal else 0


def parameters(config: HeadwaterConfig) -> dict[str, int]:
    """Trainable parameters by part; a tied output head is counted once, with the embedding."""
    return _sum_parameters(config, _count_layers(config, plan_layers(config)))


def _sum_parameters(config: HeadwaterConfig, layers: dict[str, Cost]) -> dict[str, int]:
    width = config.hidden_size
    embedding, head = _count_ends(config)
    norms = (4 if config.output_norms else 2) * config.num_hidden_layers + config.embedding_norm
    return {
        "embedding": embedding,
        "attention": layers["attention"].parameters,
        "feed-forward": layers["feed-forward"].parameters,
        "mechanisms": layers["mechanisms"].parameters + _count_shared(config).parameters,
        "norms": norms * _norm_parameters(config, width) + _norm_parameters(config, width, final=True),
        "output head": head,
    }


def _count_ends(config: HeadwaterConfig) -> tuple[int, int]:
    """The parameters before and after the blocks."""
    width = config.hidden_size
    if isinstance(config, HeadwaterVisionConfig):
        vectors = config.first_patch + config.tokens * (config.position == "learned") + config.patch_bias
        return width * (_patch_numbers(config) + vectors), (width + 1) * config.num_labels
    positions = config.max_position_embeddings if config.position == "learned" else 0
    head = 0 if config.tie_word_embeddings else width * config.vocab_size
    return width * (config.vocab_size + positions), head


def _patch_numbers(config: HeadwaterVisionConfig) -> int:
    """Count the pixel values in a patch."""
    high, wide = config.patch_shape
    return config.num_channels * high * wide


def attended_tokens(config: HeadwaterConfig, context: int, causal: bool = True) -> float:
    """Mean number of tokens that a token attends to in a row of `context`, or computes scores for if not `causal`.

    config: as a layer sees it (`headwater.config.layers.layer_config`). Causally (context + 1) / 2, or less under a
    sliding window. Otherwise the whole row, as for kernels that compute and mask the square of scores, and as the
    TokenFormer paper counts. Patches always attend to all.
    """
    if not causal or not config.is_causal:
        return context
    window = min(config.sliding_window or context, context)
    return (window * (window + 1) / 2 + (context - window) * window) / context


def forward_flops(config: HeadwaterConfig, context: int, causal: bool = True) -> dict[str, float]:
    """FLOPs of one forward pass by part: of text, per token of rows of `context` tokens; of images, per image.

    "maps" are all linear layers, or what replaces them; "attention" is between tokens, the only part that depends on
    the context; "output head" is the logits.
    """
    plans, width = plan_layers(config), config.hidden_size
    tokens = config.tokens if isinstance(config, HeadwaterVisionConfig) else context
    configs = [layer_config(config, plan.index) for plan in plans]
    flops = _layer_flops(config, plans, [attended_tokens(layer, tokens, causal) for layer in configs])
    flops["maps"] += _count_shared(config).flops
    if not isinstance(config, HeadwaterVisionConfig):
        return flops | {"output head": 2.0 * width * config.vocab_size}
    return {
        "patch embedding": 2.0 * width * _patch_numbers(config) * (tokens - config.first_patch),
        **{part: tokens * count for part, count in flops.items()},
        "output head": 2.0 * width * config.num_labels,
    }


def prefill_flops(config: HeadwaterConfig, tokens: int, causal: bool = True) -> float:
    """FLOPs of reading a prompt of `tokens` with a cache, and of the logits of its last token.

    Layers that store nothing for later tokens (`headwater.config.planner.output_only_from`) run only for the last
    token.
    """
    plans = plan_layers(config)
    first_layer = output_only_from(config, plans)
    attended = [attended_tokens(layer_config(config, i), tokens, causal) for i in range(first_layer)]
    for_all = sum(_layer_flops(config, plans[:first_layer], attended).values()) + _count_shared(config).flops
    head = 2.0 * config.hidden_size * config.vocab_size
    return tokens * for_all + _last_token_flops(config, plans[first_layer:], tokens) + head


def decoding_flops(config: HeadwaterConfig, tokens: int) -> float:
    """FLOPs of generating the token after `tokens` tokens, of which the last is not in the cache yet."""
    ends = 2.0 * config.hidden_size * config.vocab_size + _count_shared(config).flops
    return ends + _last_token_flops(config, plan_layers(config), tokens)


def _last_token_flops(config: HeadwaterConfig, plans: Sequence[LayerPlan], tokens: int) -> float:
    """FLOPs of some of the blocks for the last of `tokens` tokens, with the others in the cache.

    Mechanisms that make keys and values of what is cached make those of all attended tokens again.
    """
    flops = 0.0
    for plan in plans:
        attended = min(tokens, layer_config(config, plan.index).sliding_window or tokens)
        flops += sum(_layer_flops(config, [plan], [attended]).values()) + _expansion_flops(config, plan, attended - 1)
    return flops


def _expansion_flops(config: HeadwaterConfig, plan: LayerPlan, tokens: float) -> float:
    """FLOPs of making keys and values of what a layer's cache holds for `tokens` tokens."""
    names, layer = () if config.materialise else plan.at(Stage.ATTENDED_KV), layer_config(config, plan.index)
    return tokens * sum(resolve(name).count_cost(config.mechanisms[name], layer, plan).flops for name in names)


def _layer_flops(config: HeadwaterConfig, plans: Sequence[LayerPlan], attended: Sequence[float]) -> dict[str, float]:
    """FLOPs of some of the blocks, per token that attends to `attended` tokens in each."""
    configs = [layer_config(config, plan.index) for plan in plans]
    between = sum(c.num_attention_heads * c.head_dim * count for c, count in zip(configs, attended, strict=True))
    return {"maps": float(_add_up(_count_layers(config, plans).values()).flops), "attention": 4.0 * between}


def training_flops(
    config: HeadwaterConfig, context: int, teacher: HeadwaterConfig | None = None, *, causal: bool = True
) -> float:
    """FLOPs of training on a token in rows of `context` tokens, or on an image: three times the forward pass.

    teacher: the model that training distills from, whose forward pass is added. causal: as in `forward_flops`.
    """
    taught = 0.0 if teacher is None else sum(forward_flops(teacher, context, causal=causal).values())
    return 3 * sum(forward_flops(config, context, causal=causal).values()) + taught


def _cached_bytes(config: HeadwaterConfig, plan: LayerPlan, element_size: int) -> int:
    """Bytes of a token's keys and values in a layer's cache, or of its latent and position."""
    heads = 2 * len(plan.attends) if config.materialise else len(plan.k_heads) + len(plan.v_heads)
    position = POSITION * (plan.stores_positions(config) and not config.materialise)
    return heads * layer_config(config, plan.index).head_dim * element_size + position


def cache_bytes_per_token(config: HeadwaterConfig, element_size: int = 4) -> int:
    """Bytes that each further token adds to the cache of one sequence; `element_size` in bytes, fp32 by default.

    0 for an image model.
    """
    return sum(_cached_bytes(config, plan, element_size) for plan in plan_layers(config)) * config.is_causal


def tail_widths(config: HeadwaterConfig, plan: LayerPlan) -> dict[TailPart, int]:
    """Count the numbers per token of each kind of raw tokens that the cache of this layer may keep."""
    layer = layer_config(config, plan.index)
    return {
        "q": layer.num_attention_heads * layer.head_dim,
        "k": len(plan.k_heads) * layer.head_dim,
        "v": len(plan.v_heads) * layer.head_dim,
        "x": layer.hidden_size,
        "input": len(plan.inputs) * layer.hidden_size,
        "gate": layer.intermediate_size,
        "up": layer.intermediate_size,
        "id": 1,
    }


def cache_bytes(config: HeadwaterConfig, tokens: int, batch_size: int = 1, element_size: int = 4) -> int:
    """Bytes of the cache after `tokens` tokens: the history (the window's, if it slides) and the raw tails."""
    total = 0
    for plan in plan_layers(config):
        window = layer_config(config, plan.index).sliding_window
        total += _cached_bytes(config, plan, element_size) * (tokens if window is None else min(tokens, window - 1))
        width = tail_widths(config, plan)
        total += sum(length * width[part] * (ID if part == "id" else element_size) for part, length, _ in plan.tails)
    return batch_size * total


def cache_bytes_read(config: HeadwaterConfig, tokens: int, element_size: int = 4) -> int:
    """Bytes of keys and values that the next token reads in a sequence of `tokens`.

    Each layer reads all that its heads attend to, wherever it is stored: sharing saves storage, not reading. Of a
    latent it reads the latent.
    """
    numbers = 0
    for plan in plan_layers(config):
        layer = layer_config(config, plan.index)
        heads = plan.latent_heads * (not config.materialise) or 2 * layer.num_key_value_heads
        numbers += heads * layer.head_dim * min(tokens, layer.sliding_window or tokens)
    return numbers * element_size


def activation_bytes(
    config: HeadwaterConfig,
    context: int,
    batch_size: int = 1,
    precision: Precision = Precision.FP32,
    gradient_checkpointing: bool = False,
    loss_chunk_tokens: int | None = None,
    masked: bool = False,
    distilled: bool = False,
) -> dict[str, int]:
    """Estimate the memory of a training step over `batch_size` rows of `context` tokens, without the training state.
    For an image model a row is an image, and `context` its tokens.

    "kept" is what autograd stores, with fused attention and norm kernels and no dropout; "loss" is added at the peak:
    two gradients of the logits in fp32. `gradient_checkpointing` and `loss_chunk_tokens` as in recipes; with
    checkpointing it stores each block's input, what later layers read, and one block at a time; with chunks "loss" is
    the logits of one chunk, their softmax and gradient, and the gradient of the output head.
    masked: rows are packed, and attention takes a mask, [B, 1, T, T]. "masks": this mask, each layer's copy of it in
    the dtype of queries, which the fused kernel stores, and the wider copies of layers with learned keys and values.
    distilled: in chunks, of 1,024 tokens by default, with the teacher's logits and both distributions in fp32.
    """
    plans, element = plan_layers(config), precision.compute.itemsize
    loss_chunk_tokens = loss_chunk_tokens or (DISTILLED_CHUNK if distilled else None)
    width = config.hidden_size * precision.stream.itemsize
    blocks = [_block_bytes(config, plan, context, precision) for plan in plans]
    stored = sum(blocks)
    if gradient_checkpointing:
        stored = len(plans) * width + max(blocks)
        for plan in plans:
            numbers = tail_widths(config, plan) | {"a": layer_config(config, plan.index).num_attention_heads * context}
            sizes = {"x": precision.stream.itemsize}
            stored += sum(numbers[source.part] * sizes.get(source.part, element) for source in plan.exports)
    # The norms around the blocks, and modules shared by all layers.
    stored += width if loss_chunk_tokens else config.hidden_size * element  # the gradient of the head's input, or that
    stored += width * (1 + config.embedding_norm) + _count_shared(config).saved * element
    tokens, copies = batch_size * context, 1 if gradient_checkpointing else len(plans)
    patches, widening = 0, sum(bool(plan.at(Stage.ADDED_KEY_VALUES)) for plan in plans)
    logits = tokens * config.vocab_size if config.is_causal else batch_size * config.num_labels
    if isinstance(config, HeadwaterVisionConfig):
        patches, widening = batch_size * (context - config.first_patch) * _patch_numbers(config) * element, 0
    softmax, gradients = 4, 8  # bytes per logit: its log-softmax, and its two gradients
    softmax += element * (config.logit_softcap is not None)  # the softcap keeps its tanh
    kept, loss = tokens * stored + patches + softmax * logits, gradients * logits
    if loss_chunk_tokens:
        # Of a logit: itself, later its gradient; a wider copy; its softmax; and its tanh and that one's square.
        wide = 4 * (element < 4) + 4 + 8 * (config.logit_softcap is not None)
        wide += distilled * (element + 4 * (element < 4) + 12)
        chunk = min(loss_chunk_tokens, tokens) * config.vocab_size * (element + wide)
        head = config.vocab_size * config.hidden_size * precision.weights.itemsize
        kept, loss = kept - softmax * logits, chunk + head
    return {
        "kept": kept,
        "loss": loss,
        # Each layer with learned pairs copies the mask to widen it.
        "masks": tokens * context * (1 + copies * element + min(copies, widening)) if masked else 0,
    }


def _block_bytes(config: HeadwaterConfig, plan: LayerPlan, context: int, precision: Precision) -> int:
    """Bytes per token of what a block stores."""
    element, width = precision.compute.itemsize, config.hidden_size
    numbers = _add_up(_count_layers(config, [plan]).values()).saved
    # Two norms, the first with one or several inputs. Each stores its input, and the next linear layers its output.
    # Norms of outputs store only their input.
    extra_inputs = len(plan.inputs) - 1
    inputs = (1 if config.parallel_residual else 2) + extra_inputs
    outputs = 2 + extra_inputs
    if precision.stream != precision.compute:  # each linear layer casts its input to a separate copy
        replaced = count_replacement_cost(config, plan.index, "feed_forward", width, width)
        outputs = 2 + (replaced is None and config.feed_forward == "gated") + bool(plan.k_heads) + bool(plan.v_heads)
    # Sets of attention weights: none with a fused kernel, else the softmax's and derived ones, and a softcap's tanh.
    acting, capped = bool(plan.at(Stage.ATTENTION_WEIGHTS)), config.attention_softcap is not None
    sets = acting + capped + (acting or capped or any(source.kind == "probabilities" for source in plan.exports))
    weights = sets * layer_config(config, plan.index).num_attention_heads * context
    norms = inputs * precision.stream.itemsize + (outputs + 2 * config.output_norms) * element
    return norms * width + (numbers + weights) * element


def state_bytes(
    config: HeadwaterConfig,
    precision: Precision = Precision.BF16_MIXED,
    averages: bool = False,
    teacher: HeadwaterConfig | None = None,
) -> dict[str, int]:
    """Bytes of weights, gradients, AdamW's two averages and copies of the weights.

    In bf16-mixed and bf16-stream the matrices have copies in bf16 from the forward pass to the end of the backward
    pass. averages: with `training.ema_decay`, which keeps a second copy of the weights. teacher: the model that
    training distills from, whose weights are added.
    """
    layers = _count_layers(config, plan_layers(config))
    counts = _sum_parameters(config, layers)
    weights = precision.weights.itemsize * sum(counts.values())
    matrices = sum(counts[name] - layers[name].unread_parameters for name in ("attention", "feed-forward"))
    if isinstance(config, HeadwaterVisionConfig):
        matrices += config.hidden_size * (_patch_numbers(config) + config.num_labels)
    else:
        matrices += config.vocab_size * config.hidden_size
    state = {
        "weights": weights,
        "gradients": weights,
        "optimiser": 2 * weights,
        "copies": precision.compute.itemsize * matrices if precision.is_mixed else 0,
        "average": averages * weights,
    }
    if teacher is not None:
        state["teacher"] = (teacher.dtype or Precision.FP32.weights).itemsize * sum(parameters(teacher).values())
    return state


def weights_read(config: HeadwaterConfig) -> int:
    """Weights read to generate a token: all but the rows of embeddings and other tables that are not looked up."""
    layers = _count_layers(config, plan_layers(config))
    counts = _sum_parameters(config, layers)
    tables = _add_up(layers.values()).unread_parameters + _count_shared(config).unread_parameters
    head = config.vocab_size * config.hidden_size
    return sum(counts.values()) - counts["embedding"] - tables - counts["output head"] + head
