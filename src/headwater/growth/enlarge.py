"""Make a model deeper and wider: from a `Larger` to its config, its tensors and its optimizer's state.

Along each axis of a parameter (`mechanisms.enlarging.Dim`) a new entry is a copy of an old one, zero, or as in a fresh
model of the new size; all the ways of `methods` differ in this alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.config.capabilities import replaces_linear
from headwater.config.plan import EMBEDDING, LayerPlan, Source, Stage
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.growth.methods import GrowthOptions, make_larger
from headwater.growth.parameter_tokens import Model
from headwater.mechanisms.capabilities import GrowsOptions, PassesThrough, axes_of
from headwater.mechanisms.enlarging import READS, SAME, WRITES, Dim, Larger
from headwater.nn.norm import RMSNorm
from headwater.nn.stages import find_owner
from headwater.plugins.registry import MECHANISMS, resolve
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator

QUERIES, KEYS, VALUES, UNITS, NORM, OUTPUT_NORM = (
    Dim(kind) for kind in ("q", "k", "v", "units", "norm", "output norm")
)
# Axes of the parameters of the model's own modules. A linear layer's outputs come before its inputs.
AXES: dict[str, tuple[Dim, ...]] = {
    "self_attn.q_proj": (QUERIES, READS),
    "self_attn.k_proj": (KEYS, READS),
    "self_attn.v_proj": (VALUES, READS),
    "self_attn.o_proj": (WRITES, QUERIES._replace(reads=True)),
    "mlp": (WRITES, READS),
    "mlp.gate_proj": (UNITS, READS),
    "mlp.up_proj": (UNITS, READS),
    "mlp.down_proj": (WRITES, UNITS._replace(reads=True)),
    "embed_patches": (WRITES, SAME),
    **dict.fromkeys(("embed_tokens", "embed_positions", "class_token", "registers"), (SAME, WRITES)),
    **dict.fromkeys(("lm_head", "classifier"), (SAME, READS)),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), (NORM,)),
    **dict.fromkeys(("attention_output_norm", "feed_forward_output_norm", "embedding_norm"), (OUTPUT_NORM,)),
    **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (SAME,)),
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj", "mlp")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.*)")


def split_name(name: str) -> tuple[int | None, str]:
    """Split a parameter's name: its layer, and its module within the layer, or in the model without a layer."""
    match = LAYER.search(name)
    layer, inner = (None, name) if match is None else (int(match[1]), match[2])
    return layer, inner.rpartition(".")[0]


def plan_growth(config: HeadwaterConfig, options: GrowthOptions) -> tuple[Larger, HeadwaterConfig]:
    """Plan what each part of the larger model is made from, and its config.

    Raises `HeadwaterError` for sizes or mechanisms that the method does not fit.
    """
    differ = not {"rope_parameters"}.issuperset(config.sliding_fields or {})
    if differ and options.sizes.keys() - {"num_hidden_layers"}:
        raise HeadwaterError("A model whose layers have different heads (sliding_fields) can become deeper only.")
    if all(size == getattr(config, name) for name, size in options.sizes.items()):
        raise HeadwaterError(
            "Nothing would grow: give more layers (num_hidden_layers), a larger hidden_size or intermediate_size, more "
            "heads (num_attention_heads), or more pairs of a model with parameter tokens."
        )
    growth = make_larger(config, options)
    if growth.extends("units"):
        _check_units(config)
    new = copy.deepcopy(config)
    new.num_hidden_layers, new.hidden_size = len(growth.layers), len(growth.stream)
    new.num_attention_heads, new.num_key_value_heads = len(growth.q), len(growth.kv)
    new.intermediate_size = len(growth.units)
    if config.sliding_layers is not None:
        new.sliding_layers = growth.list_copies(config.sliding_layers)
    if growth.fill != "any":
        new.norm_eps *= growth.mean_square_ratio
        if not config.final_norm_weight and isinstance(new.logit_scale, float | int):
            new.logit_scale /= copies_read(config, growth)
    new.mechanisms = {
        name: _grow_options(name, of_mechanism, config, growth) for name, of_mechanism in config.mechanisms.items()
    }
    new.complete_fields()
    plans = plan_layers(config), plan_layers(new)
    if growth.keeps:
        _check_plans(*plans, growth)
    return growth, new


def _grow_options(name: str, options: dict[str, Any], config: HeadwaterConfig, growth: Larger) -> dict[str, Any]:
    mechanism = resolve(name)
    if not isinstance(mechanism, GrowsOptions):
        raise HeadwaterError(
            f"Mechanism {name!r} does not define how it grows, so a model with it cannot get more layers or larger "
            "widths; remove it, or give its class grow_options() and describe_axes()."
        )
    return mechanism.grow_options(options, config, growth)


def copies_read(config: HeadwaterConfig, growth: Larger) -> int:
    """Count the copies of each channel that a tied output head reads, whose weights cannot share the old one."""
    tied = config.tie_word_embeddings and isinstance(config.logit_scale, float | int)
    return growth.stream.count(0) if tied and growth.fill != "any" else 1


def enlarge_model(model: Model, options: GrowthOptions) -> Model:
    """A deeper or wider model, in the dtype, on the device and in the mode of the old one, which does not change.

    What is new starts as in a fresh model of the new size, or at zero. Raises `HeadwaterError` as `plan_growth`.
    """
    growth, config = plan_growth(model.config, options)
    parameter_of_model = next(model.parameters())
    large = type(model)(config).to(parameter_of_model.device, parameter_of_model.dtype)
    moves = Moves(model, large, growth)
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            moved = moves.make_tensor(name, parameter)
            if moved is not None:
                parameter.copy_(moved)
        buffers = dict(model.named_buffers())
        for name in large.state_dict().keys() & dict(large.named_buffers()).keys():  # buffers such as τ
            if (old := buffers.get(moves.old_name(name))) is not None:
                large.get_buffer(name).copy_(old)
    if growth.keeps and (unplaced := moves.names.keys() - moves.used_names):
        raise HeadwaterError(
            f"{min(unplaced)} of this model has no counterpart in the larger one; remove its mechanism, or use another "
            "method."
        )
    if model.can_generate():
        large.generation_config = copy.deepcopy(model.generation_config)
    if growth.keeps:
        _check_function(model, large)
    return large.train(model.training)


class Moves:
    """The parameters of a larger model, made from the smaller one's."""

    def __init__(self, model: Model, large: Model, growth: Larger) -> None:
        self.model, self.large, self.growth = model, large, growth
        self.exact = growth.fill != "any"
        self.names = dict(model.named_parameters())
        self.used_names: set[str] = set()
        self.plans = model.plans, large.plans

    def old_name(self, name: str) -> str:
        """Return the smaller model's name of the parameter that this one is made from."""
        layer = split_name(name)[0]
        if layer is None:
            return name
        start, _, inner = name.partition(f"layers.{layer}.")
        return f"{start}layers.{self.growth.layers[layer]}.{inner}"

    def make_tensor(self, name: str, fresh: Tensor, old: Tensor | None = None, power: int = 0) -> Tensor | None:
        """Make a parameter of the larger model; None if it starts as in a fresh one.

        fresh: what new entries are. old: the smaller model's tensor, by default its parameter. power: 1 for a gradient,
        2 for its square.
        """
        counterpart = self.names.get(old_name := self.old_name(name))
        layer = split_name(name)[0]
        owner, inner = find_owner(self.large, name)
        if counterpart is None:
            if self.growth.keeps and layer not in self.growth.silent and owner is not None:
                raise HeadwaterError(
                    f"Mechanism {owner.registered_name()!r} has {inner!r} in layer {layer} of the larger "
                    "model but not in the layer it is copied from; remove it, or use a method that does not "
                    "keep the function."
                )
            return None
        self.used_names.add(old_name)
        adds_nothing = layer in self.growth.silent and not power
        if adds_nothing and owner is not None and isinstance(owner, PassesThrough):
            neutral = owner.find_neutral_value(inner)
            if neutral is not None:
                return neutral
        axes = self.find_axes(old_name, counterpart)
        silenced = adds_nothing and self.is_silenced(name, axes[: counterpart.dim()])
        return self.fill_entries(name, counterpart if old is None else old, fresh, axes, power, silenced)

    def is_silenced(self, name: str, axes: Sequence[Dim]) -> bool:
        """Whether this parameter is the last that scales what a layer adds to the stream, so that zero silences it."""
        layer, module = split_name(name)
        if module in ("attention_output_norm", "feed_forward_output_norm"):
            return True
        norm = self.large.base_model.layers[layer].attention_output_norm
        return getattr(norm, "weight", None) is None and module in WRITERS and WRITES in axes

    def find_axes(self, name: str, tensor: Tensor) -> tuple[Dim, ...]:
        """The axes of a parameter of the smaller model."""
        _, module = split_name(name)
        owner, inner = find_owner(self.model, name)
        if owner is not None:
            if not (axes := axes_of(owner, inner)):
                raise HeadwaterError(
                    f"Mechanism {owner.registered_name()!r} does not describe the axes of its parameter "
                    f"{inner!r} (describe_axes), so it cannot grow; remove it."
                )
            outs, ins = AXES.get(module, (SAME, SAME))
            return tuple({"linear in": ins, "linear out": outs}.get(axis.kind, axis) for axis in axes)
        short = module.removeprefix(f"{self.model.base_model_prefix}.")
        if short in AXES:
            return AXES[short][: tensor.dim()]
        raise HeadwaterError(f"{name} of this model cannot grow; remove what it belongs to.")

    def fill_entries(
        self, name: str, old: Tensor, fresh: Tensor, axes: Sequence[Dim], power: int, silenced: bool
    ) -> Tensor:
        wide, dims = torch.promote_types(old.dtype, torch.float32), len(axes)
        x = old.detach().to(fresh.device, wide).reshape(*old.shape[: dims - 1], -1)
        base = fresh.detach().to(wide).reshape(*fresh.shape[: dims - 1], -1)
        is_copied, zero = torch.ones_like(base, dtype=torch.bool), torch.zeros_like(base, dtype=torch.bool)
        spread = None
        module = self.large.get_submodule(name.rpartition(".")[0])
        offset = float(isinstance(module, RMSNorm) and module.offset and not power)
        x, base = x + offset, base + offset
        for dim, axis in enumerate(axes):
            way = self.choose_copies(name, axis, x.shape[dim], base.shape[dim])
            if way is None:
                continue
            if way.mean:
                x = torch.cat((x, x.mean(dim, keepdim=True)), dim)
            source = torch.tensor(way.source, device=x.device)
            view = _shape_along(dim, dims)
            x = x.index_select(dim, source.clamp(min=0))
            counts = torch.bincount(source[source >= 0])[source.clamp(min=0)]
            if axis.reads and power == 0 and bool((counts > 1).any()):
                spread = (dim, source)
            x = x * _scale_copies(axis, way, counts.to(wide).reciprocal().view(view), power)
            is_copied &= (source >= 0).view(view)
            zero |= ((source < 0) & way.zero).view(view)
        noise = torch.zeros_like(x)
        if spread is not None and self.growth.noise:
            noise = self.draw_noise(name, x, base, *spread)
        if not silenced:
            result = torch.where(is_copied, x + noise, torch.where(zero, 0.0, base))
            return result.reshape(fresh.shape) - offset
        # Where a channel's map is zero, its norm is fresh: with both zero, neither would learn.
        is_norm = axes[-1].kind == "output norm" and isinstance(module, RMSNorm) and self.growth.fill == "zero"
        # All copies have the same output, so this noise sums to zero. Without it they would stay equal forever. It is
        # small to limit rounding in the sum, and enough for Adam, whose updates follow the sign of the gradient.
        return torch.where(is_copied, 0.01 * noise, base if is_norm else 0.0).reshape(fresh.shape) - offset

    def draw_noise(self, name: str, x: Tensor, fresh: Tensor, dim: int, source: Tensor) -> Tensor:
        """Draw the noise between copies' factors, which adds up to zero over the copies."""
        draw = generator(self.model.config.initializer_seed, "grown", name, x.shape[dim])
        drawn = torch.randn(x.shape, generator=draw).to(x) * self.growth.noise
        along = _shape_along(dim, x.dim())
        sources, is_copy = source.clamp(min=0), (source >= 0).to(x)
        counts = torch.bincount(source[source >= 0]).to(x).clamp(min=1)
        sums = x.new_zeros([len(counts) if axis == dim else size for axis, size in enumerate(x.shape)])
        means = sums.index_add(dim, sources, drawn * is_copy.view(along)) / counts.view(along)
        # Subtracting the mean of n numbers shrinks their variance by (n - 1) / n.
        correction = (counts / (counts - 1).clamp(min=1)).sqrt()
        noise = (drawn - means.index_select(dim, sources)) * (correction * (counts > 1))[sources].view(along)
        # In a layer that was added earlier and never trained, the output maps are still zero.
        return noise * (float(x.std()) or float(fresh.std()))

    def choose_copies(self, name: str, axis: Dim, old: int, new: int) -> Copied | None:
        """Choose the origin of the new entries along an axis; None: they are the old ones."""
        growth = self.growth
        if axis.kind == "layers":
            return self.copies_of_layers(name, axis)
        if axis.kind in ("k", "v", "kv", "q"):
            return self.copies_of_heads(name, axis, old, new)
        if old == new:
            return None
        if axis.kind == "same":
            return Copied([index if index < old else -1 for index in range(new)], zero=axis.zero)
        if axis.kind == "units":
            return Copied(list(growth.units), zero=axis.reads and self.exact)
        return self.copies_of_channels(name, axis, old)

    def copies_of_channels(self, name: str, axis: Dim, old: int) -> Copied:
        """Choose the origin of the new channels of the residual stream."""
        growth = self.growth
        mean = growth.fill == "mean" and growth.pads
        if mean and (axis.kind == "outputs" or axis.normed):  # no mean of other channels can be written here
            raise HeadwaterError(
                f"{name} has an entry per channel, and under LayerNorm new channels hold the mean of the others; "
                "multiply hidden_size (hypercloning), grow other sizes, or use the method net2net."
            )
        writes = axis.kind in ("stream", "outputs") and not axis.reads
        source = [old if channel < 0 and mean and writes else channel for channel in growth.stream]
        return Copied(source, zero=writes and self.exact, mean=mean and writes, factor=self.norm_factor(name, axis))

    def norm_factor(self, name: str, axis: Dim) -> float:
        """Return the factor of a norm's old entries, because the stream that it divides by has another size."""
        growth, config = self.growth, self.model.config
        scales = axis.normed or (axis.kind in ("norm", "output norm") and name.endswith("weight"))
        factor = growth.mean_square_ratio**0.5 if self.exact and scales else 1.0
        if name.startswith(f"{self.model.base_model_prefix}.norm.") and config.final_norm_weight:
            factor /= copies_read(config, growth)  # the output head reads the last norm
        return factor

    def copies_of_heads(self, name: str, axis: Dim, old: int, new: int) -> Copied | None:
        heads, count = self.sources_of_heads(name, axis)
        width = old // max(1, count)
        if old == new and (len(heads) * width != new or heads == list(range(count))):
            return None  # the axis is not made of heads, or no head changes
        source = [head * width + entry if head >= 0 else -1 for head in heads for entry in range(width)]
        assert len(source) == new, f"{name}: {len(source)} of {new}"
        return Copied(source, zero=axis.reads and self.exact)

    def sources_of_heads(self, name: str, axis: Dim) -> tuple[list[int], int]:
        """The old head of each new one, -1 for none, and the number of old heads."""
        growth, layer = self.growth, split_name(name)[0]
        if axis.kind in ("q", "kv"):  # where layers differ in heads, none are added
            of_model = growth.q if axis.kind == "q" else growth.kv
            return list(of_model), max(of_model) + 1
        old, new = self.plans[0][growth.layers[layer]], self.plans[1][layer]
        stored, heads = (old.k_heads, new.k_heads) if axis.kind == "k" else (old.v_heads, new.v_heads)
        sources = growth.kv if growth.extends("kv") else range(max(heads, default=0) + 1)
        return [stored.index(sources[head]) if sources[head] in stored else -1 for head in heads], len(stored)

    def copies_of_layers(self, name: str, axis: Dim) -> Copied:
        layer = split_name(name)[0]
        owner, inner = find_owner(self.large, name)
        entries = next(dim for dim in axes_of(owner, inner) if dim.kind == "layers").entries
        if layer is None:  # a module outside the layers
            old = [self.growth.layers[int(entry)] for entry in entries]  # type: ignore[call-overload]
            return Copied([axis.entries.index(entry) if entry in axis.entries else -1 for entry in old], zero=True)
        moved = {self.growth.move_entry(layer, entry): index for index, entry in enumerate(axis.entries)}
        return Copied([moved.get(entry, -1) for entry in entries], zero=True)


class Copied(NamedTuple):
    """The origin of the new entries along an axis.

    source: the old entry of each new one; -1: none. zero: the latter are zero, not fresh. mean: the old entries' mean
    comes after them, as one more. factor: of old entries.
    """

    source: list[int]
    zero: bool = False
    mean: bool = False
    factor: float = 1.0


def _shape_along(dim: int, dims: int) -> list[int]:
    """Return the shape that broadcasts one number per entry along a dimension."""
    return [-1 if index == dim else 1 for index in range(dims)]


def _scale_copies(axis: Dim, way: Copied, shares: Tensor, power: int) -> Tensor:
    """Return the factors of old entries along an axis. shares: 1/copies of each. power: as in `Moves.make_tensor`."""
    factor = torch.full_like(shares, way.factor)
    if power == 0:
        return factor * shares if axis.reads else factor
    is_shared = not axis.reads and axis.kind not in ("same", "layers")
    return (shares if is_shared else 1.0) ** power / factor**power


def _check_units(config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` if mechanisms replace all feed-forwards."""
    width = config.hidden_size
    for name, options in config.mechanisms.items():
        layers = range(config.num_hidden_layers)
        mechanism = resolve(name)
        if all(replaces_linear(mechanism, options, config, layer, "feed_forward", width) for layer in layers):
            raise HeadwaterError(
                f"Mechanism {name!r} replaces the feed-forwards, so intermediate_size does nothing; leave it out"
                f"{', and grow ffn_pairs' if 'ffn_pairs' in options else ''}."
            )


def _check_plans(old_plans: Sequence[LayerPlan], new_plans: Sequence[LayerPlan], growth: Larger) -> None:
    """Raise `HeadwaterError` if a layer would attend to, read or end with anything else than its original does."""
    changes = [
        _find_change(old_plans, new_plans, layer, growth)
        for layer in range(len(new_plans))
        if layer not in growth.silent
    ]
    # Mechanisms at the end of the last layer must run after the layers that add nothing, and the others still before.
    at_source, at_end = (
        new_plans[layer].at(Stage.BLOCK_OUTPUT) for layer in (growth.first_copy(growth.depth - 1), len(new_plans) - 1)
    )
    ends = old_plans[-1].at(Stage.BLOCK_OUTPUT)
    if growth.deepens and tuple(dict.fromkeys((*at_source, *at_end))) != ends:
        changes.append(f"After the last layer {' and '.join(ends)} act in an order")
    if change := next(filter(None, changes), None):
        raise HeadwaterError(
            f"{change} that the larger model cannot reproduce; remove the mechanism, or use a method that does not "
            "keep the function."
        )


def _find_change(
    old_plans: Sequence[LayerPlan], new_plans: Sequence[LayerPlan], layer: int, growth: Larger
) -> str | None:
    """Describe what a new layer's original attends to or reads and the new layer does not; None if nothing."""
    source = growth.layers[layer]
    attends = old_plans[source].attends
    # Layers differ in heads only in models whose number of heads cannot grow.
    for head, copied in enumerate(growth.kv if growth.extends("kv") else range(len(attends))):
        if copied >= 0 and tuple(new_plans[layer].attends[head]) != tuple(map(growth.first_copy, attends[copied])):
            layers = " and ".join(map(str, dict.fromkeys(attends[copied])))
            return f"Head {copied} of layer {source} attends to layers {layers} in a way"
    # What runs after the last layer must run after its silent copies.
    alike = [new_plans[new] for new in growth.list_copies([source]) if new == layer or new in growth.silent]
    for source_read in old_plans[source].reads:
        is_read = any(_still_reads(plan, source_read, growth, old_plans) for plan in alike)
        if source_read.kind in ("raw", "local", "probabilities", "stream") and not is_read:
            return f"Layer {source} reads layer {source_read.layer} in a way"
    return None


class FunctionChanged(HeadwaterError):
    """A larger model computes something else than the smaller one although its method keeps the function."""


@torch.no_grad()
def _check_function(old: Model, new: Model) -> None:
    """Raise `FunctionChanged` if two models differ by more than rounding on a few tokens, as no check foresaw."""
    draw, config = generator(0, "grown"), old.config
    if isinstance(config, HeadwaterVisionConfig):
        sample = torch.randn(1, config.num_channels, *config.image_shape, generator=draw)
    else:
        sample = torch.randint(0, config.vocab_size, (1, min(8, config.max_position_embeddings)), generator=draw)
    mode, options = old.training, {} if sample.is_floating_point() else {"use_cache": False}
    try:
        old_logits, new_logits = (
            model.eval()(sample.to(model.device), **options).logits.double() for model in (old, new)
        )
    finally:
        old.train(mode)
    # 1.5e-8 in fp64, 0.03 % in fp32, 20 % in bf16, relative to the largest logit.
    exact = old.dtype.itemsize >= 4
    allowed = torch.finfo(old.dtype).eps ** (1 / 2 if exact else 1 / 3) * float(old_logits.abs().max())
    if old_logits.isfinite().all() and not (moved := float((old_logits - new_logits).abs().max())) <= allowed:
        others = [name for name in config.mechanisms if not MECHANISMS.is_built_in(name)]
        cause = f"Check describe_axes() and grow_options() of {', '.join(others)}, or"
        if not others:
            cause = "This is a bug in headwater: report it with the model's config, and"
        raise FunctionChanged(
            f"The larger model's logits differ by {moved:.1e} although this method should keep them. {cause} use "
            "another method or other sizes."
        )


def _still_reads(plan: LayerPlan, source: Source, growth: Larger, old_plans: Sequence[LayerPlan]) -> bool:
    """Whether a layer reads what an old source has become."""
    if source == EMBEDDING:
        return source in plan.reads
    layer = growth.first_copy(source.layer)
    if source._replace(layer=layer) in plan.reads:
        return True
    if source.kind != "stream" or old_plans[source.layer].at(Stage.BLOCK_OUTPUT):
        return False
    while layer + 1 in growth.silent:  # a layer that adds nothing passes its input on
        layer += 1
        if source._replace(layer=layer) in plan.reads:
            return True
    return False
