"""Conversion of separate keys and values to one cached vector, from which both are made (mechanism `low_rank_kv`).

The keys and values of all heads, before norm and RoPE, are a linear map of attention's input x. It is replaced by
B·A·x, the best estimate of rank `width` on sample tokens. Keys are weighted by how much the queries read them, values
by what the output projection reads. A becomes the key projection, and B the maps of `low_rank_kv`. The idea is that of
Palu (arXiv 2407.21118), which estimates keys and values separately, each in groups of heads.

`expand_latent` goes back: it multiplies A by B, which gives ordinary key and value projections and the same function.
"""

import copy

import torch
from torch import Tensor

from headwater.config.layers import layer_config
from headwater.config.text import HeadwaterConfig
from headwater.conversion.calibration import compute_input_grams, has_linear_attention
from headwater.conversion.transformers_models import assemble_model, untied_state_dict
from headwater.mechanisms.low_rank_kv import LowRankKV
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.position import RotaryEmbedding
from headwater.util.errors import HeadwaterError

MECHANISM = LowRankKV.registered_name()
MAPS = f"mechanisms.{MECHANISM}."
# Share of the inputs' mean square that is added to each channel's; and the least relative weight of a value.
DAMPING, LEAST = 1e-6, 1e-5


def latent_config(config: HeadwaterConfig, width: int) -> HeadwaterConfig:
    """Make the config of `make_latent`. Raises `HeadwaterError` for a model that cannot be converted."""
    if MECHANISM in config.mechanisms:
        raise HeadwaterError(
            "Keys and values are made from a latent already. For another width, export the model with --family, and "
            "convert that."
        )
    differing = (config.sliding_fields or {}).keys() - {"rope_parameters"}
    if config.mechanisms or differing:
        reason = "mechanisms" if config.mechanisms else f"layers that differ in {min(differing)}"
        raise HeadwaterError(
            f"Keys and values become one latent only in a plain model; this one has {reason}. Let layers share, or use "
            "fewer heads."
        )
    d = config.head_dim
    most = min(config.num_key_value_heads, config.hidden_size // d) * d
    if width % d or not d <= width <= most:
        raise HeadwaterError(f"latent_width must be a multiple of head_dim, from {d} to {most}, not {width}.")
    latent = copy.deepcopy(config)
    latent.mechanisms = {MECHANISM: {"heads": width // d}}
    latent.complete_fields()
    return latent


@torch.no_grad()
def make_latent(model: HeadwaterForCausalLM, rows: Tensor, width: int) -> HeadwaterForCausalLM:
    """Return a copy of `model` that caches one vector of `width` channels per token and layer, the best on `rows` of
    tokens [B, T]. Raises `HeadwaterError`."""
    config = latent_config(model.config, width)
    if not has_linear_attention(model):
        raise HeadwaterError("Keys and values become one latent only where all projections are linear.")
    tensors = {name: tensor.detach().clone() for name, tensor in untied_state_dict(model).items()}
    for layer, gram in enumerate(compute_input_grams(model, rows)):
        prefix = f"model.layers.{layer}.self_attn."
        weights = {
            name.removeprefix(prefix): tensor.double().cpu()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        for name in ("k_proj.bias", "v_proj.weight", "v_proj.bias"):
            tensors.pop(f"{prefix}{name}", None)
        for name, tensor in convert_layer(weights, gram, layer_config(model.config, layer), width).items():
            tensors[f"{prefix}{name}"] = tensor.to(model.device, model.dtype)
    return assemble_model(type(model), config, tensors, model)


def expand_config(config: HeadwaterConfig) -> HeadwaterConfig:
    """Make the config of `expand_latent`, or `config` itself if there is nothing to expand."""
    if set(config.mechanisms) != {MECHANISM}:
        return config
    plain = copy.deepcopy(config)
    plain.mechanisms = {}
    plain.complete_fields()
    return plain


@torch.no_grad()
def expand_latent(model: HeadwaterForCausalLM) -> HeadwaterForCausalLM:
    """Return a plain model with the same function, which caches keys and values, or `model` itself if its keys and
    values are not made from a latent."""
    if (config := expand_config(model.config)) is model.config:
        return model
    tensors = untied_state_dict(model)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn."
        down = tensors[f"{prefix}k_proj.weight"]
        wide = torch.promote_types(down.dtype, torch.float32)
        for letter, name in (("k", "keys"), ("v", "values")):
            up = tensors.pop(f"{prefix}{MAPS}{name}").flatten(0, 1)
            tensors[f"{prefix}{letter}_proj.weight"] = (up.to(wide) @ down.to(wide)).to(down.dtype)
            if (bias := tensors.pop(f"{prefix}{MAPS}{name}_bias", None)) is not None:
                tensors[f"{prefix}{letter}_proj.bias"] = bias.flatten()
    return assemble_model(type(model), config, tensors, model)


def convert_layer(weights: dict[str, Tensor], gram: Tensor, config: HeadwaterConfig, width: int) -> dict[str, Tensor]:
    """Convert the weights of one layer's attention, by their names there, to a latent of `width`: A [width, D], and the
    maps from it to keys and values [K, d, width], with biases [K, d] if there are any.

    gram: the mean of y·yᵀ over y = (x, 1) for sample inputs x of attention, [D + 1, D + 1].
    """
    groups, d = config.num_key_value_heads, config.head_dim
    q, k, v = (join_bias(weights, f"{letter}_proj").unflatten(0, (-1, d)) for letter in "qkv")
    if config.qk_norm and config.norm == "layer_norm":  # it takes away what all channels of a head have in common
        q, k = (heads - heads.mean(1, keepdim=True) for heads in (q, k))
    output = weights["o_proj.weight"].unflatten(1, (-1, d))
    read = torch.einsum("ohd,ohe->hde", output, output)
    squares, factors = weigh_norms(weights, q, k, gram, config)
    weight_of_keys = weigh_keys(squares, read, v, gram, config) * factors.flatten()
    read_together = torch.block_diag(*read.unflatten(0, (groups, -1)).sum(1))
    maps, mean = torch.cat((k, v)).flatten(0, 1), gram[:-1, -1]
    # A bias takes the mean, and the latent what differs from it.
    centred = gram[:-1, :-1] - config.qkv_bias * mean.outer(mean)
    keys, values = maps[:, :-1].split(groups * d)
    down, up = fit_latent(keys, values, weight_of_keys, read_together, centred, width)
    bias = maps[:, -1] + (maps[:, :-1] - up @ down) @ mean
    # An optimizer changes all weights by as much: let those that write a channel be as large, relative to the
    # original's, as those that read it.
    size = weights["k_proj.weight"].square().mean()
    scale = (up.square().mean(0) * size / down.square().mean(1)).clamp(min=1e-30) ** 0.25
    keys, values = (up / scale).unflatten(0, (2, groups, d))
    converted = {"k_proj.weight": down * scale[:, None], f"{MAPS}keys": keys, f"{MAPS}values": values}
    if config.qkv_bias:
        converted[f"{MAPS}keys_bias"], converted[f"{MAPS}values_bias"] = bias.unflatten(0, (2, groups, d))
    return converted


def join_bias(weights: dict[str, Tensor], name: str) -> Tensor:
    """Join weight and bias to a linear map of (x, 1), [out, in + 1]."""
    weight = weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias", torch.zeros(len(weight), dtype=weight.dtype))
    return torch.cat((weight, bias[:, None]), dim=1)


def weigh_norms(
    weights: dict[str, Tensor], q: Tensor, k: Tensor, gram: Tensor, config: HeadwaterConfig
) -> tuple[Tensor, Tensor]:
    """Find the mean squares of the queries [H, d], after their norm if there is one, and the factor that the keys' norm
    puts on an error of each channel [K, d], on average. q, k: maps of (x, 1), [heads, d, D + 1]."""
    if not config.qk_norm:
        return measure_squares(q, gram), torch.ones(k.shape[:2], dtype=k.dtype)
    sizes = []
    for letter, maps in (("q", q), ("k", k)):
        squares = measure_squares(maps, gram)
        gain = weights[f"{letter}_norm.weight"] + config.unit_offset_norm if config.norm_weight else 1
        sizes.append((squares, gain / (squares.mean(1, keepdim=True) + config.norm_eps).sqrt()))
    (squares, factors_of_q), (_, factors_of_k) = sizes
    return squares * factors_of_q**2, factors_of_k.abs().expand(k.shape[:2])


def measure_squares(heads: Tensor, gram: Tensor) -> Tensor:
    """Measure the mean square of each channel, [heads, d], of maps [heads, d, D + 1]."""
    return ((heads @ gram) * heads).sum(2)


def weigh_keys(squares: Tensor, read: Tensor, values: Tensor, gram: Tensor, config: HeadwaterConfig) -> Tensor:
    """Find what an error of each channel of the keys costs, [K·d]: √(Σ_h E[q_h²]·E‖W_h·v_h‖²)·scale over the heads h
    that read it, because an error of a score changes what the head adds to the stream by as much.

    squares: E[q_h²], [H, d]. read: WᵀW of each head's output weights, [H, d, d]. values: [K, d, D + 1]. gram: the mean
    of y·yᵀ.
    """
    shared = len(squares) // len(values)
    added = (read * (values @ gram @ values.mT).repeat_interleave(shared, 0)).sum((1, 2))
    scale = config.attention_scale or config.head_dim**-0.5
    if config.position == "rope":
        scale *= RotaryEmbedding(config).attention_scaling ** 2
        rotated = config.rotary_dim  # over all distances, RoPE gives both channels of a pair the mean
        pairs = squares[:, :rotated].unflatten(1, (2, -1)).mean(1)
        squares = torch.cat((pairs, pairs, squares[:, rotated:]), dim=1)
    return (added[:, None] * squares).unflatten(0, (-1, shared)).sum(1).flatten().sqrt() * scale


def fit_latent(
    keys: Tensor, values: Tensor, weight_of_keys: Tensor, read: Tensor, gram: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Find A [width, D] and B [keys + values, width], so that B·A·x is the best estimate of keys and values at x.

    keys, values: their maps [·, D]. weight_of_keys: what an error of each counts. read: RᵀR, where R·v is what an error
    of values counts. gram: mean of x·xᵀ.
    """
    if not read.any():  # a layer that adds nothing, such as growth makes
        read = torch.eye(len(read), dtype=read.dtype)
    damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    lengths, vectors = torch.linalg.eigh(read)
    root = (vectors * lengths.clamp(min=LEAST * lengths.max()).sqrt()) @ vectors.T
    weight = torch.block_diag(torch.diag(weight_of_keys.clamp(min=LEAST * float(lengths.max()) ** 0.5)), root)
    lower = torch.linalg.cholesky(damped)
    maps = weight @ torch.cat((keys, values))
    vectors = torch.linalg.svd(maps @ lower, full_matrices=False)[0][:, :width]
    # In this basis an error costs the same in every channel. After a rotation, all channels have about the same size,
    # so a cache of few bits, whose steps follow the largest of a group, loses least (as with Palu's Hadamard matrices).
    generator = torch.Generator().manual_seed(0)
    vectors = vectors @ torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=vectors.dtype))[0]
    return vectors.T @ maps, torch.linalg.solve(weight, vectors)
