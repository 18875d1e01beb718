"""Parameters of a larger model, made from a smaller one's.

Along each axis of a parameter (`mechanisms.growth_map.Dim`) a new entry is a copy of an old one, zero, or as in a
fresh model of the new size. The methods of `methods` differ in this alone.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.config.text import HeadwaterConfig
from headwater.growth.parameter_tokens import Model
from headwater.mechanisms.capabilities import PassesThrough, axes_of
from headwater.mechanisms.growth_map import READS, SAME, WRITES, Dim, GrowthMap
from headwater.nn.norm import RMSNorm
from headwater.nn.stages import find_owner
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


def count_tied_copies(config: HeadwaterConfig, growth: GrowthMap) -> int:
    """Count the copies of each channel that a tied output head reads, whose weights cannot share the old one."""
    tied = config.tie_word_embeddings and isinstance(config.logit_scale, float | int)
    return growth.stream.count(0) if tied and growth.zero_init else 1


class AxisMap(NamedTuple):
    """Map from the new entries along an axis to old ones.

    source: the old entry of each new one; -1: none. zero: entries without a source are zero, not fresh. mean: the mean
    of the old entries is appended to them. factor: of old entries.
    """

    source: list[int]
    zero: bool = False
    mean: bool = False
    factor: float = 1.0


class ParameterGrower:
    """Growth of a model's parameters to those of the larger model `grown`."""

    def __init__(self, model: Model, grown: Model, growth: GrowthMap) -> None:
        self.model, self.grown, self.growth = model, grown, growth
        self.parameters = dict(model.named_parameters())
        self.used_names: set[str] = set()

    def find_source_name(self, name: str) -> str:
        """Find the name of the parameter of the smaller model that this one is made from."""
        layer = split_name(name)[0]
        if layer is None:
            return name
        start, _, inner = name.partition(f"layers.{layer}.")
        return f"{start}layers.{self.growth.layers[layer]}.{inner}"

    def grow_tensor(self, name: str, fresh: Tensor, old: Tensor | None = None, power: int = 0) -> Tensor | None:
        """Make a parameter of the larger model; None if it starts as in a fresh one.

        fresh: values of new entries. old: the smaller model's tensor, by default its parameter. power: 1 if the tensor
        is a mean gradient (Adam's first moment), 2 for a mean square.
        """
        source = self.parameters.get(source_name := self.find_source_name(name))
        layer = split_name(name)[0]
        owner, inner = find_owner(self.grown, name)
        if source is None:
            if self.growth.preserves_function and layer not in self.growth.identity_layers and owner is not None:
                raise HeadwaterError(
                    f"Mechanism {owner.registered_name()!r} has {inner!r} in layer {layer} of the larger "
                    "model but not in the layer it is copied from; remove it, or use a method that does not "
                    "keep the function."
                )
            return None
        self.used_names.add(source_name)
        in_identity_layer = layer in self.growth.identity_layers and not power
        if in_identity_layer and owner is not None and isinstance(owner, PassesThrough):
            neutral = owner.find_neutral_value(inner)
            if neutral is not None:
                return neutral
        axes = self.find_axes(source_name, source)
        zeroed = in_identity_layer and self.is_zeroed(name, axes[: source.dim()])
        return self.fill_entries(name, source if old is None else old, fresh, axes, power, zeroed)

    def is_zeroed(self, name: str, axes: Sequence[Dim]) -> bool:
        """Whether this parameter is the last that scales what a layer adds to the stream."""
        layer, module = split_name(name)
        if module in ("attention_output_norm", "feed_forward_output_norm"):
            return True
        norm = self.grown.base_model.layers[layer].attention_output_norm
        return getattr(norm, "weight", None) is None and module in WRITERS and WRITES in axes

    def find_axes(self, name: str, tensor: Tensor) -> tuple[Dim, ...]:
        """Describe the axes of a parameter of the smaller model."""
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
        self, name: str, old: Tensor, fresh: Tensor, axes: Sequence[Dim], power: int, zeroed: bool
    ) -> Tensor:
        """Copy old entries along each axis; others are zero or `fresh`. zeroed: copies too are zero, but for noise."""
        wide, dims = torch.promote_types(old.dtype, torch.float32), len(axes)
        x = old.detach().to(fresh.device, wide).reshape(*old.shape[: dims - 1], -1)
        base = fresh.detach().to(wide).reshape(*fresh.shape[: dims - 1], -1)
        is_copied, zero = torch.ones_like(base, dtype=torch.bool), torch.zeros_like(base, dtype=torch.bool)
        duplicated = None
        module = self.grown.get_submodule(name.rpartition(".")[0])
        offset = float(isinstance(module, RMSNorm) and module.offset and not power)
        x, base = x + offset, base + offset
        for dim, axis in enumerate(axes):
            if (axis_map := self.map_axis(name, axis, x.shape[dim], base.shape[dim])) is None:
                continue
            if axis_map.mean:
                x = torch.cat((x, x.mean(dim, keepdim=True)), dim)
            source = torch.tensor(axis_map.source, device=x.device)
            view = _shape_along(dim, dims)
            x = x.index_select(dim, source.clamp(min=0))
            counts = torch.bincount(source[source >= 0])[source.clamp(min=0)]
            if axis.reads and power == 0 and bool((counts > 1).any()):
                duplicated = (dim, source)
            x = x * _scale_copies(axis, axis_map, counts.to(wide).reciprocal().view(view), power)
            is_copied &= (source >= 0).view(view)
            zero |= ((source < 0) & axis_map.zero).view(view)
        noise = torch.zeros_like(x)
        if duplicated is not None and self.growth.noise:
            noise = self.draw_noise(name, x, base, *duplicated)
        if not zeroed:
            result = torch.where(is_copied, x + noise, torch.where(zero, 0.0, base))
            return result.reshape(fresh.shape) - offset
        # Where a channel's map is zero, its norm is fresh: with both zero, neither would learn.
        is_norm = axes[-1].kind == "output norm" and isinstance(module, RMSNorm) and self.growth.padding == "zero"
        # All copies have the same output, so this noise sums to zero. Without it they would stay equal forever. It is
        # small to limit rounding in the sum, and enough for Adam, whose updates follow the sign of the gradient.
        return torch.where(is_copied, 0.01 * noise, base if is_norm else 0.0).reshape(fresh.shape) - offset

    def draw_noise(self, name: str, x: Tensor, fresh: Tensor, dim: int, source: Tensor) -> Tensor:
        """Draw noise that tells copies apart along `dim` and adds up to zero over the copies of an entry."""
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

    def map_axis(self, name: str, axis: Dim, old: int, new: int) -> AxisMap | None:
        """Map the entries along an axis to old ones; None: nothing changes."""
        growth = self.growth
        if axis.kind == "layers":
            return self.map_layers(name, axis)
        if axis.kind in ("k", "v", "kv", "q"):
            return self.map_entries_of_heads(name, axis, old, new)
        if old == new:
            return None
        if axis.kind == "same":
            return AxisMap([index if index < old else -1 for index in range(new)], zero=axis.zero)
        if axis.kind == "units":
            return AxisMap(list(growth.units), zero=axis.reads and growth.zero_init)
        return self.map_channels(name, axis, old)

    def map_channels(self, name: str, axis: Dim, old: int) -> AxisMap:
        """Map the channels of the residual stream."""
        growth = self.growth
        mean = growth.padding == "mean" and growth.pads
        if mean and (axis.kind == "outputs" or axis.normed):  # no mean of other channels can be written here
            raise HeadwaterError(
                f"{name} has an entry per channel, and under LayerNorm new channels hold the mean of the others; "
                "multiply hidden_size (hypercloning), grow other sizes, or use the method net2net."
            )
        writes = axis.kind in ("stream", "outputs") and not axis.reads
        source = [old if channel < 0 and mean and writes else channel for channel in growth.stream]
        factor = self.find_norm_factor(name, axis)
        return AxisMap(source, zero=writes and growth.zero_init, mean=mean and writes, factor=factor)

    def find_norm_factor(self, name: str, axis: Dim) -> float:
        """Find the factor that makes up for the mean square of a wider stream in the weights of its norms."""
        growth, config = self.growth, self.model.config
        scales = axis.normed or (axis.kind in ("norm", "output norm") and name.endswith("weight"))
        factor = growth.mean_square_ratio**0.5 if growth.zero_init and scales else 1.0
        if name.startswith(f"{self.model.base_model_prefix}.norm.") and config.final_norm_weight:
            factor /= count_tied_copies(config, growth)  # the output head reads the last norm
        return factor

    def map_entries_of_heads(self, name: str, axis: Dim, old: int, new: int) -> AxisMap | None:
        """Map the entries of heads; None: nothing changes."""
        heads, count = self.map_heads(name, axis)
        width = old // max(1, count)
        if old == new and (len(heads) * width != new or heads == list(range(count))):
            return None  # the axis is not made of heads, or no head changes
        source = [head * width + entry if head >= 0 else -1 for head in heads for entry in range(width)]
        assert len(source) == new, f"{name}: {len(source)} of {new}"
        return AxisMap(source, zero=axis.reads and self.growth.zero_init)

    def map_heads(self, name: str, axis: Dim) -> tuple[list[int], int]:
        """Map each new head to an old one, -1 for none; and count the old heads."""
        growth, layer = self.growth, split_name(name)[0]
        if axis.kind in ("q", "kv"):  # where layers differ in heads, none are added
            heads = growth.q if axis.kind == "q" else growth.kv
            return list(heads), max(heads) + 1
        old, new = self.model.plans[growth.layers[layer]], self.grown.plans[layer]
        stored, heads = (old.k_heads, new.k_heads) if axis.kind == "k" else (old.v_heads, new.v_heads)
        sources = growth.kv if growth.extends("kv") else range(max(heads, default=0) + 1)
        return [stored.index(sources[head]) if sources[head] in stored else -1 for head in heads], len(stored)

    def map_layers(self, name: str, axis: Dim) -> AxisMap:
        """Map entries that belong to earlier layers."""
        layer = split_name(name)[0]
        owner, inner = find_owner(self.grown, name)
        entries = next(new for new in axes_of(owner, inner) if new.kind == "layers").entries
        if layer is None:  # a module outside the layers
            old = [self.growth.layers[int(entry)] for entry in entries]  # type: ignore[call-overload]
            return AxisMap([axis.entries.index(entry) if entry in axis.entries else -1 for entry in old], zero=True)
        indices = {self.growth.map_entry(layer, entry): index for index, entry in enumerate(axis.entries)}
        return AxisMap([indices.get(entry, -1) for entry in entries], zero=True)


def _shape_along(dim: int, dims: int) -> list[int]:
    """Return the shape that broadcasts one number per entry along a dimension."""
    return [-1 if index == dim else 1 for index in range(dims)]


def _scale_copies(axis: Dim, axis_map: AxisMap, shares: Tensor, power: int) -> Tensor:
    """Return the factors of old entries along an axis. shares: 1/copies of each. power: see `grow_tensor`."""
    factor = torch.full_like(shares, axis_map.factor)
    if power == 0:
        return factor * shares if axis.reads else factor
    is_shared = not axis.reads and axis.kind not in ("same", "layers")
    return (shares if is_shared else 1.0) ** power / factor**power
