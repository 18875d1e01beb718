"""Alignment of a model before its conversion: the same function, with more similar keys and values where layers will
share them or heads will be pooled; and the choice of the layers that share, by similarity once aligned.

A head's values may be multiplied by any invertible matrix R if the output projection is multiplied by its inverse, and
its keys likewise with the queries. RoPE rotates the channels i and i + rotary_dim / 2 as one complex number z. There R
must be a complex factor for each pair, because that commutes with RoPE.

    shared    R = B⁻¹, where v'_t·B is the least-squares estimate of the layer's own values v_t from those v'_t that
              replace them; z likewise, with one complex coefficient a pair
    pooled    heads are rotated towards the first of their group by R = U·Wᵀ, where U·S·Wᵀ = Σ_t v_t·v'_tᵀ (orthogonal
              Procrustes), and z by the angle of Σ_t conj(z_t)·z'_t (for GQA as in arXiv 2412.20677)
"""

import itertools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.config.layers import layer_config
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.conversion.calibration import has_linear_attention, list_attentions, sample_heads
from headwater.conversion.convert import BLEND, blend_config, find_pool_size, finish_config
from headwater.mechanisms.capabilities import ChoosesSources
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.attention import Attention
from headwater.plugins.mechanisms import as_mapping, resolve
from headwater.util.errors import HeadwaterError

# Smallest singular value of a least-squares map, relative to its largest: it is inverted.
MIN_SINGULAR_RATIO = 1e-2


@torch.no_grad()
def align_layers(
    model: HeadwaterForCausalLM, rows: Tensor, mechanisms: Any = None, num_key_value_heads: int | None = None
) -> bool:
    """Bring the model's keys and values as close as possible to those that `blend_model` mixes them with, on `rows` of
    tokens [B, T]; the function stays the same. Returns whether anything could be multiplied."""
    config = blend_config(model.config, mechanisms, num_key_value_heads)
    if not (letters := list_transformable(model)):
        return False
    samples = sample_heads(model, rows)
    pool_size, goal = find_pool_size(config), plan_layers(finish_config(config))
    for layer, attention in enumerate(list_attentions(model)):
        for letter in letters:
            x, rotary_dim = samples[layer, letter], count_rotated(model, letter, layer)
            heads = torch.arange(x.shape[1])
            if pool_size > 1:  # towards the group's first head, which is not rotated
                targets = heads // pool_size * pool_size
                rotations = find_rotations(x, x[:, targets], rotary_dim)
                x = _transform_layer(attention, letter, x, rotations, heads != targets)
            sources = [getattr(goal[layer].attends[head // pool_size], letter) for head in range(len(heads))]
            if any(source != layer for source in sources):
                pooled = [_pool_samples(samples[source, letter], pool_size) for source in sources]
                target = torch.stack([source[:, head] for head, source in enumerate(pooled)], dim=1)
                maps = find_maps(_pool_samples(x, pool_size), target, rotary_dim)
                x = _transform_layer(attention, letter, x, maps, torch.tensor(sources) != layer)
            samples[layer, letter] = x
    return True


def list_transformable(model: HeadwaterForCausalLM) -> list[str]:
    """List what can be multiplied without changing the function, of "k" and "v": what linear projections make, with no
    mechanism or norm between them and attention."""
    if model.config.mechanisms.keys() - {BLEND} or not has_linear_attention(model):
        return []
    return ["v"] if model.config.qk_norm else ["k", "v"]


def count_rotated(model: HeadwaterForCausalLM, letter: str, layer: int) -> int:
    """Count the channels of a head's keys or values that RoPE rotates in this layer."""
    return layer_config(model.config, layer).rotary_dim if letter == "k" and model.config.position == "rope" else 0


def find_rotations(x: Tensor, target: Tensor, rotary_dim: int = 0) -> Tensor:
    """Find the orthogonal matrices R, [heads, d, d], for which x·R is nearest to the target, both [tokens, heads, d].

    rotary_dim: how many channels RoPE rotates; of these, only the two of a pair mix.
    """
    x, target = x.double(), target.double()
    rotations = x.new_zeros(x.shape[1], x.shape[2], x.shape[2])
    if rotary_dim:
        z, z_target = _pair_channels(x, rotary_dim), _pair_channels(target, rotary_dim)
        _write_pairs(rotations, _find_phases((z.conj() * z_target).sum(0)))
    if rotary_dim < x.shape[2]:
        u, _, right = torch.linalg.svd(torch.einsum("thi,thj->hij", x[..., rotary_dim:], target[..., rotary_dim:]))
        rotations[:, rotary_dim:, rotary_dim:] = u @ right
    return rotations


def find_maps(x: Tensor, target: Tensor, rotary_dim: int = 0) -> Tensor:
    """Find the invertible matrices R, [heads, d, d], for which target·R⁻¹ is the least-squares estimate of x, both
    [tokens, heads, d].

    rotary_dim: how many channels RoPE rotates; of these, only the two of a pair mix.
    """
    x, target = x.double(), target.double()
    inverse = x.new_zeros(x.shape[1], x.shape[2], x.shape[2])
    if rotary_dim:
        z, z_target = _pair_channels(x, rotary_dim), _pair_channels(target, rotary_dim)
        factors = (z_target.conj() * z).sum(0) / z_target.abs().square().sum(0).clamp(min=1e-30)
        _write_pairs(inverse, _find_phases(factors) * _limit_ratios(factors.abs()))
    if rotary_dim < x.shape[2]:
        y, inputs = (samples[..., rotary_dim:].transpose(0, 1) for samples in (x, target))
        gram = inputs.mT @ inputs
        ridge = (1e-9 * gram.diagonal(dim1=1, dim2=2).mean(-1)).clamp(min=1e-30)[:, None, None]
        u, lengths, right = torch.linalg.svd(
            torch.linalg.solve(gram + ridge * torch.eye(gram.shape[-1]).to(gram), inputs.mT @ y)
        )
        inverse[:, rotary_dim:, rotary_dim:] = (u * _limit_ratios(lengths)[:, None]) @ right
    return torch.linalg.inv(inverse)


def _limit_ratios(lengths: Tensor) -> Tensor:
    """Raise singular values [heads, n] to `MIN_SINGULAR_RATIO` of their head's largest; all 0, as of a head that is
    pruned, become 1."""
    largest = lengths.amax(-1, keepdim=True)
    return torch.where(largest > 0, torch.maximum(lengths, MIN_SINGULAR_RATIO * largest), 1.0)


def _pair_channels(x: Tensor, rotary_dim: int) -> Tensor:
    """Return the channels that RoPE rotates as complex numbers, [..., rotary_dim / 2]."""
    first_half, second_half = x[..., :rotary_dim].chunk(2, dim=-1)
    return torch.complex(first_half, second_half)


def _find_phases(factors: Tensor) -> Tensor:
    """Divide complex numbers by their absolute values; 0 becomes 1."""
    lengths = factors.abs()
    return torch.where(lengths > 0, factors / lengths, 1.0)


def _write_pairs(matrices: Tensor, factors: Tensor) -> None:
    """Write the products of pairs with complex factors [heads, n] into matrices [heads, d, d], in place."""
    first_half = torch.arange(factors.shape[1])
    second_half = first_half + len(first_half)
    matrices[:, first_half, first_half] = matrices[:, second_half, second_half] = factors.real
    matrices[:, first_half, second_half], matrices[:, second_half, first_half] = factors.imag, -factors.imag


def _pool_samples(x: Tensor, pool_size: int) -> Tensor:
    return x if pool_size == 1 else x.unflatten(1, (-1, pool_size)).mean(2).repeat_interleave(pool_size, dim=1)


def transform_heads(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each head of x [tokens, heads, d] by its matrix."""
    return torch.einsum("thi,hij->thj", x, matrices.to(x.dtype))


def _transform_layer(attention: Attention, letter: str, x: Tensor, matrices: Tensor, selected: Tensor) -> Tensor:
    """Multiply a layer's keys by matrices and its queries by their inverses, or its values and the output projection.

    selected: the heads to multiply; the others stay. Returns the projection's output x, multiplied.
    """
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    matrices = torch.where(selected[:, None, None].to(matrices.device), matrices, identity)
    inverses = torch.linalg.inv(matrices).mT.repeat_interleave(attention.num_key_value_groups, dim=0)
    _transform_projection(cast(nn.Linear, getattr(attention, f"{letter}_proj")), matrices)
    if letter == "k":
        _transform_projection(cast(nn.Linear, attention.q_proj), inverses)
    else:
        weight = cast(nn.Linear, attention.o_proj).weight
        heads = weight.double().unflatten(1, (len(inverses), -1))
        weight.copy_(torch.einsum("ohi,hij->ohj", heads, inverses.to(weight.device)).flatten(1))
    return transform_heads(x, matrices)


def _transform_projection(linear: nn.Linear, matrices: Tensor) -> None:
    """Multiply each head of a linear layer's output by its matrix, in place."""
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            heads = parameter.double().unflatten(0, (len(matrices), -1))
            parameter.copy_(torch.einsum("hi...,hij->hj...", heads, matrices.to(parameter.device)).flatten(0, 1))


# Choice of the layers that share


def choose_sources(
    config: HeadwaterConfig, mechanisms: Any, similarity: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return `mechanisms` with the layers that share chosen by similarity, where their options leave this open.

    similarity: see `measure_similarity`; None: all layers are equally similar. Raises `HeadwaterError` if nothing is
    left open.
    """
    depth, requested = config.num_hidden_layers, as_mapping(mechanisms) or {}
    similarity = similarity or dict.fromkeys(("keys", "values"), torch.zeros(depth, depth))
    chosen = {
        name: mechanism.choose_sources(options or {}, config, similarity)
        if isinstance(mechanism := resolve(name), ChoosesSources)
        else options
        for name, options in requested.items()
    }
    if chosen == requested:
        raise HeadwaterError(
            "convert.choose (--choose) needs a mechanism that shares by a map of layers and options that leave the map "
            f"open, not {', '.join(requested) or 'fewer heads alone'}; leave it out, or change the mechanism."
        )
    return chosen


@torch.no_grad()
def measure_similarity(model: HeadwaterForCausalLM, rows: Tensor) -> dict[str, Tensor]:
    """Measure how similar the layers' "keys" and "values" are on `rows` of tokens [B, T], [layers, layers] each.

    Element [l, s], s < l, is 1 - Σ‖x_l - x_s‖² / Σ(‖x_l‖² + ‖x_s‖²) after x_l was rotated as `align_layers` would, 1 if
    equal; 0 between layers of two kinds.
    """
    samples, letters, config = sample_heads(model, rows), list_transformable(model), model.config
    depth = config.num_hidden_layers
    tables = {name: torch.zeros(depth, depth) for name in ("keys", "values")}
    for table, letter in zip(tables.values(), "kv", strict=True):
        for layer, source in itertools.combinations(reversed(range(depth)), 2):
            if config.slides(layer) == config.slides(source):
                x, y = samples[layer, letter], samples[source, letter]
                if letter in letters:
                    x = transform_heads(x, find_rotations(x, y, count_rotated(model, letter, layer)))
                table[layer, source] = 1 - (x - y).square().sum() / (x.square().sum() + y.square().sum())
    return tables
