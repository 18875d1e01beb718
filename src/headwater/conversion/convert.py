"""Conversion of a trained model to one with a smaller cache: shared layers, or fewer key/value heads.

    blended     the model with `blend`, which mixes its keys and values with those of the smaller model, the goal; at
                weight 0 the function is unchanged
    finished    the goal itself, once the weight is 1: the same function without keys and values that no head attends to
    aligned     before either, the same function in other coordinates, in which what is to be shared or pooled is as
                similar as possible
    fitted      a goal whose output projections are changed so that its attention's output is nearest to the model's
    chosen      before that, the layers that share, by how similar their keys and values are once aligned

A head's values may be multiplied by any invertible matrix R if the output projection is multiplied by its inverse, and
its keys likewise with the queries; under RoPE only within the pairs of channels that RoPE rotates, where R must be a
rotation times a factor, because that commutes with it.

    shared    R = B⁻¹, where v'_t·B is the least-squares estimate of the layer's own values v_t from those v'_t that
              replace them; with keys as complex numbers z the same, one coefficient a pair
    pooled    heads are rotated towards the first of their group by R = U·Wᵀ, where U·S·Wᵀ = Σ_t v_t·v'_tᵀ (orthogonal
              Procrustes), and keys by the angle of Σ_t conj(z_t)·z'_t (for GQA as in arXiv 2412.20677)
"""

import copy
import functools
import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.config.layers import layer_config
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.conversion.add import add_mechanisms, tensors_of
from headwater.conversion.families import assemble_model, own_tensors
from headwater.mechanisms.blend import Blend
from headwater.mechanisms.capabilities import ChoosesSources
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.attention import Attention
from headwater.plugins.registry import as_mapping, resolve
from headwater.util.errors import HeadwaterError

BLEND = Blend.registered_name()


def blend_config(
    config: HeadwaterConfig, mechanisms: Any = None, num_key_value_heads: int | None = None, weight: float = 0.0
) -> HeadwaterConfig:
    """The config of `blend_model`. Raises `HeadwaterError` if the goal contradicts it, or shares nothing."""
    if way_of(config) is not None:
        raise HeadwaterError("The model is already being converted; finish that first (finish_conversion: true).")
    if not isinstance(config, HeadwaterConfig) or not config.is_causal:
        raise HeadwaterError("Only text models have a cache to make smaller; choose a text model.")
    goal = {"mechanisms": as_mapping(mechanisms) or None, "num_key_value_heads": num_key_value_heads}
    result = copy.deepcopy(config)
    result.mechanisms = {BLEND: goal | {"weight": weight}} | config.mechanisms
    result.complete_fields()
    plan_layers(result)
    return result


def way_of(config: HeadwaterConfig) -> dict[str, Any] | None:
    """The options of `blend`, which describe the goal of a conversion; None if the model is not being converted."""
    return config.mechanisms.get(BLEND)


def check_conversion(config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` if a blended model of this config cannot be finished; no weights are needed."""
    _check_pooling(HeadwaterForCausalLM.make_skeleton(config))
    tensors_of(HeadwaterForCausalLM.make_skeleton(narrow_config(config)), finish_config(config))


def finish_config(config: HeadwaterConfig) -> HeadwaterConfig:
    """The config of `finish_model`. Raises `HeadwaterError` if the model is not being converted."""
    if (options := way_of(config)) is None:
        raise HeadwaterError(
            "The model is not being converted, so there is nothing to finish; leave out finish_conversion."
        )
    return Blend.goal_config(options, config)


def blend_model(
    model: HeadwaterForCausalLM, mechanisms: Any = None, num_key_value_heads: int | None = None, weight: float = 0.0
) -> HeadwaterForCausalLM:
    """Return a copy of `model` whose keys and values are mixed with those of a model with these `mechanisms` and heads.

    weight: progress of the conversion, 0 to 1. At 0 the function is unchanged.
    Raises `HeadwaterError` for mechanisms that contradict the model, share nothing, or cannot be combined with its own.
    """
    config = blend_config(model.config, mechanisms, num_key_value_heads, weight)
    names = {name for name in own_tensors(HeadwaterForCausalLM.make_skeleton(config)) if f".{BLEND}." in name}
    tensors = {name: tensor.detach().clone() for name, tensor in own_tensors(model).items()}
    converted = assemble_model(type(model), config, tensors | {name: torch.full((1,), weight) for name in names}, model)
    _check_pooling(converted)
    return converted


def finish_model(model: HeadwaterForCausalLM) -> HeadwaterForCausalLM:
    """Return the goal of a blended model: the same function as at weight 1, with a smaller cache.

    Raises `HeadwaterError` if the conversion is not complete, or was never begun.
    """
    finish_config(model.config)  # raises if there is no conversion to finish
    weights = {float(module.weight) for module in model.modules() if isinstance(module, Blend)}
    if min(weights, default=1.0) < 1:
        raise HeadwaterError(
            f"The conversion is {min(weights):.0%} complete; continue training until its weight is 1 "
            "(convert: {anneal: true})."
        )
    config = narrow_config(model.config)
    tensors = {name: tensor for name, tensor in own_tensors(model).items() if f".{BLEND}." not in name}
    pooled = assemble_model(type(model), config, pool_tensors(tensors, model.config), model)
    mechanisms = way_of(model.config)["mechanisms"]
    return add_mechanisms(pooled, mechanisms, allow_change=True) if mechanisms else pooled


def narrow_config(config: HeadwaterConfig) -> HeadwaterConfig:
    """The config of a blended model with the heads of its goal, but without sharing between layers."""
    narrow = Blend.remove_blend(config)
    narrow.num_key_value_heads = way_of(config)["num_key_value_heads"] or narrow.num_key_value_heads
    narrow.complete_fields()
    return narrow


def group_of(config: HeadwaterConfig) -> int:
    """Number of key/value heads of a blended model that become one."""
    return Blend.count_group(way_of(config), config)


def pool_tensors(tensors: Mapping[str, Tensor], config: HeadwaterConfig, are_state: bool = False) -> dict[str, Tensor]:
    """Pool the tensors of a blended model, by name: its key and value projections get one head per group.

    are_state: the tensors are Adam's averages; a head's gradient is the gradient of the mean divided by the size of the
    group.
    """
    group, heads = group_of(config), config.num_key_value_heads

    def pooled(name: str, x: Tensor) -> Tensor:
        x = x.detach()
        if group == 1 or not (".k_proj." in name or ".v_proj." in name) or x.ndim == 0 or x.shape[0] % heads:
            return x.clone()
        mean = x.unflatten(0, (heads // group, group, -1)).mean(1)
        power = (2 if name.endswith("exp_avg_sq") else 1) if are_state else 0
        return (mean * float(group) ** power).flatten(0, 1)

    return {name: pooled(name, tensor) for name, tensor in tensors.items()}


def _check_pooling(model: HeadwaterForCausalLM) -> None:
    """Raise `HeadwaterError` if heads to be pooled have parameters other than linear projections."""
    if group_of(model.config) == 1:
        return
    goal = own_tensors(HeadwaterForCausalLM.make_skeleton(narrow_config(model.config)))
    for name, tensor in pool_tensors(own_tensors(model), model.config).items():
        if f".{BLEND}." not in name and (name not in goal or goal[name].shape != tensor.shape):
            raise HeadwaterError(
                f"{name!r} is not a plain linear map to key/value heads, so they cannot be pooled; let layers share "
                "instead, and leave num_key_value_heads out."
            )


# Rotation


def _list_attentions(model: HeadwaterForCausalLM) -> list[Attention]:
    return [cast(Any, block).self_attn for block in model.model.layers]


@torch.no_grad()
def sample_heads(model: HeadwaterForCausalLM, rows: Tensor) -> list[dict[str, Tensor]]:
    """Return the projected keys "k" and values "v" of each layer for rows of tokens, [tokens, heads, d] each."""
    outputs: list[dict[str, list[Tensor]]] = [{"k": [], "v": []} for _ in model.model.layers]
    with ExitStack() as stack:
        stack.callback(model.train, model.training)
        for layer, attention in zip(outputs, _list_attentions(model), strict=True):
            for kind, heads in layer.items():
                if (projection := getattr(attention, f"{kind}_proj")) is not None:
                    hook = functools.partial(_keep_heads, heads, attention.head_dim)
                    stack.enter_context(projection.register_forward_hook(hook))
        for row in rows:
            model.eval()(row[None].to(model.device), use_cache=False)
    return [{kind: torch.cat(heads) for kind, heads in layer.items() if heads} for layer in outputs]


@torch.no_grad()
def sample_inputs(model: HeadwaterForCausalLM, rows: Tensor) -> list[Tensor]:
    """Return the mean of y·yᵀ, [D + 1, D + 1] in fp64, over y = (x, 1) for the inputs x of each layer's attention, for
    rows of tokens."""
    size = model.config.hidden_size + 1
    sums = [torch.zeros(size, size, dtype=torch.float64) for _ in model.plans]
    with ExitStack() as stack:
        stack.callback(model.train, model.training)
        for total, attention in zip(sums, _list_attentions(model), strict=True):
            stack.enter_context(attention.q_proj.register_forward_pre_hook(functools.partial(_add_squares, total)))
        for row in rows:
            model.eval().model(row[None].to(model.device), use_cache=False)
    return [total / rows.numel() for total in sums]


def _add_squares(total: Tensor, module: nn.Module, inputs: tuple[Tensor]) -> None:
    """Forward pre-hook: add Σ y·yᵀ, y = (x, 1), to `total`."""
    x = nn.functional.pad(inputs[0].detach().flatten(0, -2).double().cpu(), (0, 1), value=1.0)
    total += x.T @ x


def _keep_heads(outputs: list[Tensor], width: int, module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Forward hook: append the output of a projection, [tokens, heads, width], to `outputs`."""
    wide = torch.promote_types(output.dtype, torch.float32)
    outputs.append(output.detach().to(wide).flatten(0, -2).unflatten(-1, (-1, width)))


def can_turn(model: HeadwaterForCausalLM) -> dict[str, bool]:
    """Whether keys "k" and values "v" can be rotated without changing the function: with linear projections, and no
    mechanism or norm between them and attention."""
    plain = not (model.config.mechanisms.keys() - {BLEND}) and has_linear_attention(model)
    return {"k": plain and not model.config.qk_norm, "v": plain}


def has_linear_attention(model: HeadwaterForCausalLM) -> bool:
    """Whether all projections of attention are plain linear layers."""
    return all(
        isinstance(getattr(attention, name), nn.Linear)
        for attention in _list_attentions(model)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    )


def _count_spun(model: HeadwaterForCausalLM, kind: str, layer: int) -> int:
    """Number of channels of a head's keys or values that RoPE rotates in this layer."""
    return layer_config(model.config, layer).rotary_dim if kind == "k" and model.config.position == "rope" else 0


def find_rotations(x: Tensor, target: Tensor, spun: int = 0) -> Tensor:
    """The orthogonal matrices R, [heads, d, d], for which x·R is nearest to the target, both [tokens, heads, d].

    spun: how many channels RoPE rotates; of these, only the two of a pair may mix.
    """
    covariance = torch.einsum("thi,thj->hij", x.double(), target.double())
    matrices = torch.zeros_like(covariance)
    if spun:
        half = spun // 2
        even, odd = torch.arange(half), torch.arange(half, spun)
        cos = covariance[:, even, even] + covariance[:, odd, odd]
        sin = covariance[:, even, odd] - covariance[:, odd, even]
        length = (cos.square() + sin.square()).sqrt()
        cos, sin = (torch.where(length > 0, x / length, fill) for x, fill in ((cos, 1.0), (sin, 0.0)))
        matrices[:, even, even], matrices[:, odd, odd] = cos, cos
        matrices[:, even, odd], matrices[:, odd, even] = sin, -sin
    if spun < covariance.shape[-1]:
        u, _, right = torch.linalg.svd(covariance[:, spun:, spun:])
        matrices[:, spun:, spun:] = u @ right
    return matrices


# Smallest singular value of a least-squares map, relative to its largest: it is inverted.
FLOOR = 1e-2


def find_maps(x: Tensor, target: Tensor, spun: int = 0) -> Tensor:
    """The invertible matrices R, [heads, d, d], for which target·R⁻¹ is the least-squares estimate of x, both [tokens,
    heads, d].

    spun: how many channels RoPE rotates; of these, only the two of a pair mix, as a complex number times a coefficient.
    """
    x, target = x.double(), target.double()
    inverse = torch.zeros_like(torch.einsum("thi,thj->hij", x, x))
    if spun:
        half = spun // 2
        even, odd = torch.arange(half), torch.arange(half, spun)
        own, shared = (torch.complex(z[..., :half], z[..., half:spun]) for z in (x, target))
        scale = (shared.conj() * own).sum(0) / shared.abs().square().sum(0).clamp(min=1e-30)
        length = scale.abs()
        least = torch.clamp(FLOOR * length.amax(-1, keepdim=True), min=1e-30)
        scale = torch.where(length > 0, scale / length, 1.0) * torch.maximum(length, least)
        inverse[:, even, even], inverse[:, odd, odd] = scale.real, scale.real
        inverse[:, even, odd], inverse[:, odd, even] = scale.imag, -scale.imag
    if spun < x.shape[-1]:
        own, shared = x[..., spun:].transpose(0, 1), target[..., spun:].transpose(0, 1)
        gram = shared.mT @ shared
        ridge = 1e-9 * gram.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(gram.shape[-1]).to(gram)
        u, lengths, right = torch.linalg.svd(torch.linalg.solve(gram + ridge, shared.mT @ own))
        lengths = torch.maximum(lengths, FLOOR * lengths[:, :1])
        inverse[:, spun:, spun:] = (u * lengths[:, None]) @ right
    return torch.linalg.inv(inverse)


def turn_samples(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each head of x [tokens, heads, d] by its matrix."""
    return torch.einsum("thi,hij->thj", x, matrices.to(x.dtype))


@torch.no_grad()
def align_layers(
    model: HeadwaterForCausalLM, rows: Tensor, mechanisms: Any = None, num_key_value_heads: int | None = None
) -> bool:
    """Bring the model's keys and values as close as possible to those that `blend_model` mixes them with, on `rows` of
    tokens [B, T]; the function stays the same. Returns whether anything could be multiplied."""
    config = blend_config(model.config, mechanisms, num_key_value_heads)
    kinds = [kind for kind, can in can_turn(model).items() if can]
    if not kinds:
        return False
    have = sample_heads(model, rows)
    group, goal = group_of(config), plan_layers(finish_config(config))
    for layer, attention in enumerate(_list_attentions(model)):
        for kind in kinds:
            x = have[layer][kind]
            heads = x.shape[1]
            if group > 1:  # towards the group's first head, which is not rotated
                leaders = torch.arange(heads) // group * group
                matrices = find_rotations(x, x[:, leaders], _count_spun(model, kind, layer))
                x = _turn_heads(attention, kind, x, matrices, torch.arange(heads) != leaders)
            sources = [getattr(goal[layer].attends[head // group], kind) for head in range(heads)]
            if any(source != layer for source in sources):
                targets = torch.stack([_pool_samples(have[s][kind], group)[:, h] for h, s in enumerate(sources)], dim=1)
                matrices = find_maps(_pool_samples(x, group), targets, _count_spun(model, kind, layer))
                x = _turn_heads(attention, kind, x, matrices, torch.tensor([source != layer for source in sources]))
            have[layer][kind] = x
    return True


def _pool_samples(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.unflatten(1, (-1, group)).mean(2).repeat_interleave(group, dim=1)


def _turn_heads(attention: Attention, kind: str, x: Tensor, matrices: Tensor, chosen: Tensor) -> Tensor:
    """Multiply a layer's keys by matrices and its queries by their inverses, or its values and the output projection.

    chosen: the heads to multiply; the others stay. Returns the projection's output x, multiplied.
    """
    same = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    matrices = torch.where(chosen[:, None, None].to(matrices.device), matrices, same)
    of_queries = torch.linalg.inv(matrices).mT.repeat_interleave(attention.num_key_value_groups, dim=0)
    _turn_rows(cast(nn.Linear, getattr(attention, f"{kind}_proj")), matrices)
    if kind == "k":
        _turn_rows(cast(nn.Linear, attention.q_proj), of_queries)
    else:
        weight = cast(nn.Linear, attention.o_proj).weight
        heads = weight.double().unflatten(1, (len(of_queries), -1))
        weight.copy_(torch.einsum("ohi,hij->ohj", heads, of_queries.to(weight.device)).flatten(1))
    return turn_samples(x, matrices)


def _turn_rows(linear: nn.Linear, matrices: Tensor) -> None:
    """Multiply each head of a linear layer's output by its matrix, in place."""
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            heads = parameter.double().unflatten(0, (len(matrices), -1))
            parameter.copy_(torch.einsum("hi...,hij->hj...", heads, matrices.to(parameter.device)).flatten(0, 1))


# Fit of the output projections

# Weight of the present projection in the fit, in units of the inputs' mean square.
RIDGE = 3e-2


@torch.no_grad()
def fit_outputs(model: HeadwaterForCausalLM, original: HeadwaterForCausalLM, rows: Tensor) -> None:
    """Fit output projections of attention, in place: where layers share or have fewer heads than `original`, bring
    their outputs on `rows` of tokens [B, T] as close as possible to the original's, by ridge regression.

    One pass fits from the first layer to the last, so that each corrects what the layers below it have changed.
    """
    pooled = model.config.num_key_value_heads != original.config.num_key_value_heads
    with ExitStack() as stack:
        for plan, attention, source in zip(
            plan_layers(model.config), _list_attentions(model), _list_attentions(original), strict=True
        ):
            shares = any({attends.k, attends.v} != {plan.index} for attends in plan.attends)
            if (pooled or shares or plan.value_part != "v") and isinstance(attention.o_proj, nn.Linear):
                target: list[Tensor] = []
                stack.enter_context(source.o_proj.register_forward_hook(functools.partial(_keep_output, target)))
                stack.enter_context(attention.o_proj.register_forward_pre_hook(functools.partial(_fit_linear, target)))
        for network in (original, model):
            stack.callback(network.train, network.training)
            network.eval().model(rows.to(network.device), use_cache=False)


def _keep_output(outputs: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    outputs.append(output)


def _fit_linear(target: list[Tensor], linear: nn.Linear, inputs: tuple[Tensor]) -> None:
    """Forward pre-hook: add to the weight the W that minimizes Σ‖y - linear(x) - W·x‖² + λ‖W‖², y from `target`."""
    x = inputs[0].flatten(0, -2).double()
    rest = target.pop().flatten(0, -2) - nn.functional.linear(inputs[0], linear.weight, linear.bias).flatten(0, -2)
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    linear.weight += torch.linalg.solve(gram, x.T @ rest.double()).T.to(linear.weight.dtype)


# Choice of the layers that share


def choose_sources(
    config: HeadwaterConfig, mechanisms: Any, alike: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return `mechanisms` with the layers that share chosen by likeness, where their options leave this open.

    alike: see `compare_layers`; None: all layers are equally alike. Raises `HeadwaterError` if nothing is left open.
    """
    depth, requested = config.num_hidden_layers, as_mapping(mechanisms) or {}
    tables = alike or dict.fromkeys(("keys", "values"), torch.zeros(depth, depth))
    chosen = {
        name: kind.choose_sources(options or {}, config, tables)
        if isinstance(kind := resolve(name), ChoosesSources)
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
def compare_layers(model: HeadwaterForCausalLM, rows: Tensor) -> dict[str, Tensor]:
    """Compare the layers' "keys" and "values" on `rows` of tokens [B, T]: their likeness, [layers, layers] each.

    Element [l, s], s < l, is 1 - Σ‖x_l - x_s‖² / Σ(‖x_l‖² + ‖x_s‖²) after x_l was rotated as `align_layers` would, 1 if
    equal; 0 between layers of two kinds.
    """
    samples, turns, config = sample_heads(model, rows), can_turn(model), model.config
    tables = {name: torch.zeros(len(samples), len(samples)) for name in ("keys", "values")}
    for table, kind in zip(tables.values(), "kv", strict=True):
        for layer, source in itertools.combinations(reversed(range(len(samples))), 2):
            if config.slides(layer) == config.slides(source):
                x, y = samples[layer][kind], samples[source][kind]
                if turns[kind]:
                    x = turn_samples(x, find_rotations(x, y, _count_spun(model, kind, layer)))
                table[layer, source] = 1 - (x - y).square().sum() / (x.square().sum() + y.square().sum())
    return tables
