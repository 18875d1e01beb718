"""Conversion of separate keys and values to one latent for both, with one shared key for RoPE (mechanism `mla`).

For each pair of channels that RoPE rotates, the K key heads are K complex numbers, which RoPE multiplies by the same
phase. A unitary mixing of the heads therefore commutes with RoPE. The mixing used here has the pair's principal
component first, weighted by how much the queries read it:

    rotated   the first component of each pair, which keeps RoPE: one key for all heads
    latent    everything else, that is the other components, which lose RoPE, channels without it, and the values, as
              B·c; c = A·x has `width` channels and is the best estimate of that rank on sample tokens, with values
              weighted by what the output projection reads

Mixing and B become the maps of `mla` between the heads, whose projections stay, and what they attend to. The idea is
that of TransMLA (arXiv 2502.07864), which mixes heads by a real rotation, and keeps a latent of keys and of values
apart until it balances them.
"""

import copy
import math

import torch
from torch import Tensor

from headwater.config.text import HeadwaterConfig
from headwater.conversion.convert import has_linear_attention, sample_inputs
from headwater.conversion.families import assemble_model, own_tensors
from headwater.mechanisms.mla import MLA
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.position import RotaryEmbedding
from headwater.util.errors import HeadwaterError

MECHANISM = MLA.registered_name()
# Share of the inputs' mean square that is added to each channel's; and the least relative weight of a value.
DAMPING, LEAST = 1e-6, 1e-5


def latent_config(config: HeadwaterConfig, width: int) -> HeadwaterConfig:
    """The config of `make_latent`. Raises `HeadwaterError` for a model that cannot be converted."""
    reasons = {
        "mechanisms": config.mechanisms,
        "qk_norm": config.qk_norm,
        "qkv_bias": config.qkv_bias,
        "output_bias": config.output_bias,
        "sliding_fields": config.sliding_fields,
        f"position {config.position!r}": config.position != "rope",
    }
    if found := [name for name, present in reasons.items() if present]:
        raise HeadwaterError(
            f"Keys and values become one latent only in a plain model with RoPE; this one has {found[0]}. Let layers "
            "share, or use fewer heads."
        )
    d = int(config.head_dim or 0)
    most = 2 * int(config.num_key_value_heads or 0) * d - config.rotary_dim - 1
    if not 1 <= width <= most:
        raise HeadwaterError(
            f"latent_width must be from 1 to {most}, so that {config.rotary_dim} channels with RoPE and the latent are "
            f"fewer than a layer's keys and values, not {width}."
        )
    latent = copy.deepcopy(config)
    latent.attention_scale = config.attention_scale or d**-0.5
    latent.head_dim = config.rotary_dim + width
    latent.num_key_value_heads = 1
    latent.rope_parameters = dict(config.rope_parameters or {}) | {
        "partial_rotary_factor": math.nextafter(config.rotary_dim / latent.head_dim, 1)  # rounded down when it is used
    }
    latent.mechanisms = {MECHANISM: {"head_width": d}}
    latent.complete_fields()
    return latent


@torch.no_grad()
def make_latent(model: HeadwaterForCausalLM, rows: Tensor, width: int) -> HeadwaterForCausalLM:
    """Return a copy of `model` that caches one vector per token and layer: its channels with RoPE, and a latent of
    `width` channels, the best on `rows` of tokens [B, T]. Raises `HeadwaterError`."""
    config = latent_config(model.config, width)
    config._attn_implementation = model.config._attn_implementation
    if not has_linear_attention(model):
        raise HeadwaterError("Keys and values become one latent only where all projections are linear.")
    tensors = {name: tensor.detach().clone() for name, tensor in own_tensors(model).items()}
    for layer, gram in enumerate(sample_inputs(model, rows)):
        prefix = f"model.layers.{layer}.self_attn."
        weights = {name: tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkvo"}
        wide = {name: weight.double().cpu() for name, weight in weights.items()}
        keys, queries, values = (
            tensor.to(model.device, model.dtype) for tensor in convert_layer(wide, gram, model.config, width)
        )
        tensors |= {
            f"{prefix}q_proj.linear.weight": weights["q"],
            f"{prefix}q_proj.maps": queries,
            f"{prefix}k_proj.weight": keys,
            f"{prefix}o_proj.linear.weight": weights["o"],
            f"{prefix}o_proj.maps": values,
        }
    return assemble_model(type(model), config, tensors, model)


def convert_layer(
    weights: dict[str, Tensor], gram: Tensor, config: HeadwaterConfig, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert the weights "q", "k", "v" and "o" of one layer, [out, in], to a latent of `width`: the weight of the keys
    [C, D], and the maps of queries [H, C, d] and outputs [H, d, width].

    gram: the mean of x·xᵀ over sample inputs x of attention, [D, D].
    """
    heads, groups, d = config.num_attention_heads, int(config.num_key_value_heads or 0), int(config.head_dim or 0)
    pairs, rotated = config.rotary_dim // 2, config.rotary_dim
    q, k = (weights[name].unflatten(0, (-1, d)) for name in "qk")
    key = as_complex(k, pairs)
    mixing, unmixing = mix_heads(as_complex(q, pairs), key, gram)
    mixed = torch.einsum("pcg,gpi->cpi", mixing, key)  # components, pairs, inputs
    rope_key = as_real(mixed[:1]).flatten(0, 1)
    rest = torch.cat((as_real(mixed[1:]).flatten(0, 1), k[:, rotated:].flatten(0, 1)))
    # The maps from the channels of each head's query to what multiplies these; RoPE's factor no longer reaches the
    # other components.
    channels = torch.eye(d, dtype=q.dtype).expand(heads, d, d)
    query = as_complex(channels, pairs).unflatten(0, (groups, -1))
    query = torch.einsum("pgc,ghpi->ghcpi", unmixing.conj(), query).flatten(0, 1)
    others = RotaryEmbedding(config).attention_scaling ** 2 * as_real(query[:, 1:])
    straight = torch.zeros(heads, groups, d - rotated, d, dtype=q.dtype)
    straight[torch.arange(heads), torch.arange(heads) // (heads // groups)] = channels[:, rotated:]
    query_rest = torch.cat((others.flatten(1, 2), straight.flatten(1, 2)), dim=1)

    output = weights["o"].unflatten(1, (heads, d))
    read = torch.einsum("ohd,ohe->hde", output, output)
    values = weights["v"].unflatten(0, (groups, d)).repeat_interleave(heads // groups, dim=0)
    weight_of_keys = (config.attention_scale or d**-0.5) * weigh_errors(query_rest @ q, read, values, gram)
    read_together = torch.block_diag(*read.unflatten(0, (groups, -1)).sum(1))
    down, up = fit_latent(rest, weights["v"], weight_of_keys, read_together, gram, width)
    up_keys, up_values = up.split([len(rest), len(weights["v"])])
    queries = torch.cat((as_real(query[:, :1]).flatten(1, 2), up_keys.T @ query_rest), dim=1)
    values = up_values.unflatten(0, (groups, d)).repeat_interleave(heads // groups, dim=0)
    keys = torch.cat((rope_key, down))
    scale = balance_channels(keys / k.square().mean().sqrt(), queries, values)
    return keys * scale[:, None], queries / scale[:, None], values / scale[rotated:]


def balance_channels(keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """Find a factor for each channel that makes its keys' weights as large as the maps that read it: an optimizer
    changes all weights by as much.

    keys [C, D], with mean square 1 in the original. queries [H, C, d] and values [H, d, C - the first, pairs of RoPE].
    """
    rotated = len(keys) - values.shape[2]
    read = queries.square().sum(2).mean(0)
    read[rotated:] += values.square().sum(1).mean(0)
    of_channel = torch.stack((keys.square().mean(1), read))
    of_pair = of_channel[:, :rotated].unflatten(1, (2, -1)).mean(1).repeat(1, 2)
    written, read = torch.cat((of_pair, of_channel[:, rotated:]), dim=1).clamp(min=1e-30)
    return (read / written) ** 0.25


def as_complex(x: Tensor, pairs: int) -> Tensor:
    """The channels of x [heads, d, D] that RoPE rotates, as complex numbers [heads, pairs, D]."""
    return torch.complex(x[:, :pairs], x[:, pairs : 2 * pairs])


def as_real(x: Tensor) -> Tensor:
    """Complex numbers [..., pairs, D] as channels [..., 2·pairs, D], in the order of RoPE."""
    return torch.cat((x.real, x.imag), dim=-2)


def mix_heads(q: Tensor, k: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Find for each pair the mixing of the key heads into principal components, and its inverse: [pairs, heads, heads].

    q [H, pairs, D] and k [K, pairs, D] complex; a key head counts by the mean square of the queries that read it.
    """
    gram = gram.to(q.dtype)
    squares = ((q @ gram) * q.conj()).sum(2).real.T
    scale = squares.unflatten(1, (len(k), -1)).sum(2).clamp(min=1e-30).sqrt()  # pairs, heads
    scaled = k.transpose(0, 1) * scale[:, :, None]
    vectors = torch.linalg.eigh(scaled @ gram @ scaled.mH)[1].flip(2)
    return vectors.mH * scale[:, None], vectors / scale[:, :, None]


def weigh_errors(queries: Tensor, read: Tensor, values: Tensor, gram: Tensor) -> Tensor:
    """Find what an error of each key channel costs, [channels]: √(Σ_h E[q_h²]·E‖W_h·v_h‖²), because an error of a score
    changes what the head adds to the stream by as much.

    queries: of each head, [H, channels, D]. read: WᵀW of each head's output weights, [H, d, d]. values: [H, d, D].
    gram: the mean of x·xᵀ.
    """
    added = (read * (values @ gram @ values.mT)).sum((1, 2))
    return (added[:, None] * ((queries @ gram) * queries).sum(2)).sum(0).sqrt()


def fit_latent(
    keys: Tensor, values: Tensor, weight_of_keys: Tensor, read: Tensor, gram: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Find A [width, D] and B [keys + values, width], so that B·A·x is the best estimate of keys and values at x.

    keys, values: their maps [·, D]. weight_of_keys: what an error of each counts. read: RᵀR, where R·v is what an error
    of values counts. gram: mean of x·xᵀ.
    """
    damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    lengths, vectors = torch.linalg.eigh(read)
    root = (vectors * lengths.clamp(min=LEAST * lengths.max()).sqrt()) @ vectors.T
    weight = torch.block_diag(torch.diag(weight_of_keys.clamp(min=LEAST * float(lengths.max()) ** 0.5)), root)
    lower = torch.linalg.cholesky(damped)
    maps = weight @ torch.cat((keys, values))
    vectors = torch.linalg.svd(maps @ lower, full_matrices=False)[0][:, :width]
    return vectors.T @ maps, torch.linalg.solve(weight, vectors)
