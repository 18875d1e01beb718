"""Short convolutions: each channel mixed with itself at the last few tokens. Canon layers, arXiv 2512.17351; Inkling.

    y_t = x_t + Σ_{s<w} a_s ⊙ x_{t-s}        x_t = 0 before the document; a_s: one number per channel

on queries, keys and values as projected, before `qk_norm`; on what goes into attention and feed-forward, after the
norm, and comes out of them, before it is added to the residual stream; and on what goes into the feed-forward's
activation, gate and up. w = 4.

    Canon-A, B, C, D   attention_input; queries, keys, values; feed_forward_input; feed_forward_hidden
    Inkling            keys, values, attention_output, feed_forward_output (k_sconv, v_sconv, attn_sconv, mlp_sconv)

With dynamic taps, as in the full-attention layers of Inkling 2 on keys and values, a linear map of attention's normed
input h adds one number per head and token to each tap:

    y_t = (x_t + Σ_{s<w} (a_s + (W·h_t)_s) ⊙ x_{t-s}) / √(2w + 1)

Taps are computed in fp32, as in transformers' `inkling` and `inkling2`. KV shift is the case of one number per head,
without x_t.

Departures: "before" is before in the same document. Taps start as PyTorch's Conv1d does, uniform within ±1/√w, dynamic
ones with a = 0 and W like other linear layers; as the identity they start so that y = x. The value of another layer
that is mixed in (value residual) is the convolved one.
"""

from collections.abc import Sequence
from math import isqrt
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn

from headwater.config.layers import layer_config
from headwater.config.plan import LayerPlan, Source, Stage, TailPart
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import QKV, Context, Cost, Hidden, Mechanism, OptionValues, Reach, Tail
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import READS, SAME, Dim
from headwater.mechanisms.shared_options import check_layers, check_least, grow_layers, is_chosen
from headwater.mechanisms.shift import dynamic_shift, read_tail, shift
from headwater.util.errors import HeadwaterError, check_known

Site = Literal[
    "queries",
    "keys",
    "values",
    "attention_input",
    "attention_output",
    "feed_forward_input",
    "feed_forward_hidden",
    "feed_forward_output",
]
# Tensors inside attention. Other sites are the stages of the same name.
PARTS: dict[str, TailPart] = {"queries": "q", "keys": "k", "values": "v"}
# The tensors of feed_forward_hidden.
HIDDEN: dict[str, TailPart] = {"gate": "gate", "up": "up"}


def stage_of(name: str) -> Stage:
    """Find the stage at which a tensor is convolved."""
    if name in PARTS:
        return Stage.PROJECTIONS
    return Stage.FEED_FORWARD_HIDDEN if name in HIDDEN else Stage[name.upper()]


class ShortConv(KeepsPrecision, Mechanism):
    """A causal convolution of each channel over a few tokens, added to the channel.

    Args
        sizes: (heads, channels of a head) of each tensor that is convolved, by name.
        window: w. residual: whether x_t itself is added.
        init: "random": taps uniform within ±1/√w, or zero with a map. "identity": y = x.
        dynamic: the names of those whose taps depend on the token, and on another input of this `width`.

    Parameters: `keys_taps` and so on, each [window, heads, channels], where row s weighs the token s back; for dynamic
    ones also `keys_map.weight` [heads·window, width].

        >>> import torch
        >>> from headwater.mechanisms import ShortConv
        >>> conv = ShortConv({"keys": (4, 64)}, window=4)
        >>> conv(torch.randn(3, 4, 16, 64), "keys").shape
        torch.Size([3, 4, 16, 64])
    """

    source = "the last few tokens, by channel"
    order = 30
    paper = "2512.17351"

    class Options:
        sites: list[str] | None = None  # what is convolved; default: keys and values
        window: int = 4  # w
        residual: bool = True  # whether y includes x_t itself
        dynamic: list[str] | None = None  # queries, keys or values with taps that depend on the token
        init: Literal["random", "identity"] = "random"  # identity: y = x, for adding it to a trained model
        layers: list[int] | None = None  # layers in which it acts; default: all

    def __init__(
        self,
        sizes: dict[str, tuple[int, int]],
        window: int = 4,
        residual: bool = True,
        init: Literal["random", "identity"] = "random",
        dynamic: Sequence[str] = (),
        width: int = 0,
    ) -> None:
        super().__init__()
        self.window, self.residual, self.init_mode, self.dynamic = window, residual, init, tuple(dynamic)
        self.tails = {name: f"{self.registered_name()}.{name}" for name in sizes}
        for name, (heads, channels) in sizes.items():
            self.register_parameter(f"{name}_taps", fp32_parameter(window, heads, channels))
            if name in dynamic:
                setattr(self, f"{name}_map", nn.Linear(width, heads * window, bias=False))
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        name, shape = parameter.removesuffix("_taps"), self.get_parameter(parameter).shape
        if name == parameter:  # a parameter of a map
            return torch.zeros(shape) if self.init_mode == "identity" else None
        if self.init_mode == "random" and name not in self.dynamic:
            return (2 * torch.rand(shape, generator=generator) - 1) * self.window**-0.5
        taps = torch.zeros(shape)
        if self.init_mode == "identity":
            taps[0] = 1 / self.scale(name) - self.residual
        return taps

    def scale(self, name: str) -> float:
        """Return the factor of the sum of all terms."""
        return (2 * self.window + 1) ** -0.5 if name in self.dynamic else 1.0

    def taps(self, name: str) -> Tensor:
        """Return the taps that do not depend on the token, [window, heads, channels]."""
        raw_taps = self.get_parameter(f"{name}_taps")
        taps = torch.cat((raw_taps[:1] + 1, raw_taps[1:])) if self.residual else raw_taps
        return taps * self.scale(name) if name in self.dynamic else taps

    def forward(
        self,
        x: Tensor,
        name: str,
        reach: Reach = None,
        tail: Tail | None = None,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """x [B, heads, T, channels of a head] -> the same, convolved with the taps of `name`.

        attention_input: [B, T, width], what dynamic taps depend on. reach, tail: as in `Context`.
        """
        previous = read_tail(tail, self.tails[name], x, self.window - 1, reach)
        if name not in self.dynamic:
            return shift(x, self.get_parameter(f"{name}_taps"), reach, previous, self.residual)
        taps = self.taps(name)
        token_taps = getattr(self, f"{name}_map")(attention_input).to(taps.dtype) * self.scale(name)
        token_taps = token_taps.unflatten(2, (x.shape[1], -1)).permute(3, 0, 2, 1)[..., None]
        return dynamic_shift(x, taps, token_taps, reach, previous)

    def transform_projections(self, x: QKV, context: Context) -> QKV:
        def convolved(site: str, y: Tensor) -> Tensor:
            return self(y, site, context.reach, context.tail, context.x) if site in self.tails else y

        return QKV(*map(convolved, PARTS, x))

    def of_stream(self, x: Tensor, name: str, context: Context) -> Tensor:
        """x [B, T, channels], convolved with the taps of a name."""
        heads = self.get_parameter(f"{name}_taps").shape[1]
        x_BHTd = x.unflatten(2, (heads, -1)).transpose(1, 2)
        return self(x_BHTd, name, context.reach, context.tail).transpose(1, 2).flatten(2)

    def transform_attention_input(self, x: Tensor, context: Context) -> Tensor:
        return self.of_stream(x, "attention_input", context)

    def transform_attention_output(self, x: Tensor, context: Context) -> Tensor:
        return self.of_stream(x, "attention_output", context)

    def transform_feed_forward_input(self, x: Tensor, context: Context) -> Tensor:
        return self.of_stream(x, "feed_forward_input", context)

    def transform_feed_forward_hidden(self, hidden: Hidden, context: Context) -> Hidden:
        gate, up = hidden
        return Hidden(
            None if gate is None else self.of_stream(gate, "gate", context), self.of_stream(up, "up", context)
        )

    def transform_feed_forward_output(self, x: Tensor, context: Context) -> Tensor:
        return self.of_stream(x, "feed_forward_output", context)

    # In a headwater model

    @classmethod
    def list_sites(cls, options: OptionValues) -> list[str]:
        return ["keys", "values"] if options["sites"] is None else list(dict.fromkeys(options["sites"]))

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_layers(cls, options, config)
        for site in cls.list_sites(options):
            check_known("Mechanism 'short_conv': sites cannot contain", site, get_args(Site))
        if not cls.list_sites(options):
            raise HeadwaterError("Mechanism 'short_conv': sites is empty; leave it out for keys and values.")
        for site in options["dynamic"] or []:
            if site not in PARTS or site not in cls.list_sites(options):
                raise HeadwaterError(
                    f"Mechanism 'short_conv': dynamic cannot contain {site!r}; list only queries, keys or values that "
                    "are also in sites."
                )
        check_least(cls, options, window=2)

    @classmethod
    def sizes_of(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> dict[str, tuple[int, int]]:
        """Return what is convolved in a layer: heads and channels of a head, by name."""
        heads = {"queries": config.num_attention_heads, "keys": len(plan.k_heads), "values": len(plan.v_heads)}
        widths = {}
        for site in cls.list_sites(options):
            if site in heads:
                widths[site] = heads[site] * config.head_dim
            elif site == "feed_forward_hidden":
                gated = config.feed_forward == "gated"
                widths |= {name: config.intermediate_size for name in HIDDEN if gated or name == "up"}
            else:
                widths[site] = config.hidden_size
        # Cut into pieces as wide as a head, so that the cache keeps raw tokens of the same shape as keys.
        wide = config.head_dim
        return {name: (size // wide, wide) if size % wide == 0 else (1, size) for name, size in widths.items() if size}

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        def amend(plan: LayerPlan) -> LayerPlan:
            sizes, back = cls.sizes_of(options, layer_config(config, plan.index), plan), options["window"] - 1
            for stage in dict.fromkeys(map(stage_of, sizes)):
                tails = [((PARTS | HIDDEN).get(name, "x"), back) for name in sizes if stage_of(name) is stage]
                plan = plan.acting(cls, getattr(cls, stage.value), tails)
            return plan

        amended = [amend(plan) if is_chosen(plan.index, options) else plan for plan in plans]
        if amended == plans:
            raise HeadwaterError(
                "Mechanism 'short_conv' is on keys or values that its layers share with others, or on values for which "
                "keys or a latent serve; change sites or layers."
            )
        return amended

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        sizes = cls.sizes_of(options, config, plan)
        channels = sum(heads * width for heads, width in sizes.values())
        numbers = options["window"] * sum(sizes[name][0] for name in options["dynamic"] or [] if name in sizes)
        again = config.hidden_size * (len(plan.inputs) - 1) * ("attention_input" in sizes)
        dynamic = sum(heads * width for name, (heads, width) in sizes.items() if name in (options["dynamic"] or []))
        # Autograd keeps the convolved tensors, for the gradient of the taps, and the taps of each token. For dynamic
        # taps it also keeps a shifted copy and the sum of both kinds of taps, for each tap.
        return Cost(
            parameters=channels * options["window"] + numbers * config.hidden_size,
            flops=2 * numbers * config.hidden_size,
            saved=channels + again + numbers + (2 * options["window"] - 1) * dynamic,
        )

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        stages = [stage for stage, name in plan.acts if name == cls.registered_name()]
        sizes = {name: size for name, size in cls.sizes_of(options, config, plan).items() if stage_of(name) in stages}
        dynamic = [name for name in options["dynamic"] or [] if name in sizes]
        return cls(sizes, options["window"], options["residual"], options["init"], dynamic, config.hidden_size)

    # Capabilities

    grow_options = staticmethod(grow_layers)

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        name, is_map = parameter.removesuffix("_taps"), parameter.endswith("_map.weight")
        kinds = {"gate": "units", "up": "units"} | {**PARTS}
        kinds |= {"attention_output": "outputs", "feed_forward_output": "outputs"}
        axis = Dim(kinds.get(name.removesuffix("_map.weight"), "stream"))  # type: ignore[arg-type]
        return (axis, READS) if is_map else (SAME, axis)

    @classmethod
    def find_identity_options(cls, options: OptionValues) -> OptionValues | None:
        scale = 2 * options.get("window", 4) + 1
        rounded = options.get("dynamic") and isqrt(scale) ** 2 != scale  # then 1/√(2w + 1) has no exact inverse
        return None if rounded or options.get("init") == "random" else options | {"init": "identity"}

    def choose_group(self, parameter: str) -> Literal["vectors"] | None:
        return "vectors" if parameter.endswith("_taps") else None  # one number per channel, whatever the shape

    per_head, per_token = True, False

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        heads = {"k": plan.k_heads, "v": plan.v_heads}
        shown: dict[str, Shown] = {}
        for name in self.tails:
            kind = PARTS.get(name)
            for tap, weights in enumerate(self.taps(name), 1):
                if kind is None:
                    shown[f"mean {name} {tap}"] = Shown(weights.mean().view(1))
                elif kind == "q":
                    shown[f"mean q{tap}"] = Shown(weights.mean(1), "query head", tuple(range(len(weights))))
                else:
                    shown[f"mean {kind}{tap}"] = Shown(weights.mean(1), "kv head", heads[kind])
        return shown
