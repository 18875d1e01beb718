"""Short convolutions: each channel mixed with itself at the last few tokens. Canon layers, arXiv 2512.17351; Inkling.

    y_t = x_t + Σ_{s<w} a_s ⊙ x_{t-s}        x_t = 0 before the document; a_s: one number per channel

on queries, keys and values as projected, before `qk_norm`, and on what goes into attention and feed-forward, after the
norm, and comes out of them, before it is added to the residual stream. w = 4.

    Canon-A, B, C    attention_input; queries, keys, values; feed_forward_input
    Inkling          keys, values, attention_output, feed_forward_output (k_sconv, v_sconv, attn_sconv, mlp_sconv)

Taps are computed in fp32, as in transformers' `inkling`. KV shift is the case of one number per head, without x_t.

Departures: "before" is before in the same document. Taps start as PyTorch's Conv1d does, uniform within ±1/√w; as the
identity they start at zero. Canon-D, inside the feed-forward, and taps that depend on the token (Inkling 2) are not
built. The value of another layer that is mixed in (value residual) is the convolved one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from headwater.errors import HeadwaterError, nearest
from headwater.mechanisms.base import KV, Ancestors, BenchForm, Context, Cost, Mechanism, Shown, Tail
from headwater.mechanisms.receivers import check_layers, is_chosen
from headwater.mechanisms.shift import shift
from headwater.plan import Kept, LayerPlan, Outer, Source
from headwater.precision import KeepsPrecision

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig

Place = Literal[
    "queries", "keys", "values", "attention_input", "attention_output", "feed_forward_input", "feed_forward_output"
]
# Those inside attention; the others are the stages of these names.
PARTS: dict[str, Kept] = {"queries": "q", "keys": "k", "values": "v"}


class ShortConv(KeepsPrecision, Mechanism):
    """A causal convolution of each channel over a few tokens, added to the channel.

        y_t = x_t + Σ_{s<w} a_s ⊙ x_{t-s}

    Canon layers, arXiv 2512.17351, and Inkling; departures at the head of this file.

    Args
        sizes: (heads, channels of a head) of each tensor that is convolved, by name.
        window: w.
        residual: whether x_t itself is added.
        start: "random": taps uniform within ±1/√w. "identity": y = x.

    Parameters: `keys_taps` and so on, each [window, heads, channels], where row s weighs the token s back.

        >>> import torch
        >>> from headwater.mechanisms import ShortConv
        >>> conv = ShortConv({"keys": (4, 64)}, window=4)
        >>> conv(torch.randn(3, 4, 16, 64), "keys").shape
        torch.Size([3, 4, 16, 64])

    To decode token by token, keep the raw tensors of the last window - 1 tokens, prepend them to the new ones, and drop
    them from the result.
    """

    paper = "2512.17351"

    @strict
    @dataclass
    class Options:
        on: list[str] | None = None
        window: int = 4
        residual: bool = True
        start: Literal["random", "identity"] = "random"
        layers: list[int] | None = None

    def __init__(
        self,
        sizes: dict[str, tuple[int, int]],
        window: int = 4,
        residual: bool = True,
        start: Literal["random", "identity"] = "random",
    ) -> None:
        super().__init__()
        self.window, self.residual, self.start = window, residual, start
        self.tails = {name: f"{self.name()}.{name}" for name in sizes}
        for name, (heads, width) in sizes.items():
            self.register_parameter(f"{name}_taps", self.scalars(window, heads, width))
        self.reset_parameters()

    def init(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        shape = self.get_parameter(parameter).shape
        if self.start == "random":
            return (2 * torch.rand(shape, generator=generator) - 1) * self.window**-0.5
        taps = torch.zeros(shape)
        taps[0] = 0.0 if self.residual else 1.0
        return taps

    def taps(self, name: str) -> Tensor:
        """What the token and those before it are multiplied with, [window, heads, channels]."""
        taps = self.get_parameter(f"{name}_taps")
        return torch.cat((taps[:1] + 1, taps[1:])) if self.residual else taps

    def forward(
        self, x: Tensor, name: str, reach: Tensor | Ancestors | None = None, tail: Tail | None = None
    ) -> Tensor:
        """x [B, heads, T, channels of a head] -> the same, convolved with the taps of `name`.

        reach: [B, T], how many tokens of the same document precede each; default: all. `Ancestors` where the token
            before is not in the slot before.
        tail: holds the raw tokens before these; default: there are none.
        """
        branches = isinstance(reach, Ancestors)
        before = None if tail is None else tail.before(self.tails[name], x, self.window - 1, everything=branches)
        return shift(x, self.taps(name), reach, before)

    def group(self, parameter: str) -> Literal["vectors"]:
        return "vectors"  # of each channel, however they are laid out

    @classmethod
    def bench_form(cls, heads: int, dtype: torch.dtype) -> BenchForm:
        conv = cls({"keys": (heads, 64)})

        def split(x: Tensor) -> Tensor:
            return x.unflatten(2, (heads, -1)).transpose(1, 2)

        def plain(x: Tensor) -> Tensor:
            weight = conv.get_parameter("keys_taps").flatten(1).T.unsqueeze(1).flip(2).to(x.dtype)
            padded = nn.functional.pad(x.transpose(1, 2), (conv.window - 1, 0))
            return split(x + nn.functional.conv1d(padded, weight, groups=len(weight)).transpose(1, 2))

        return BenchForm("short convolution", conv, lambda x: conv(split(x), "keys"), plain)

    # In a headwater model

    @classmethod
    def origin(cls, options: dict[str, Any]) -> str:
        return f"the {options['window'] - 1} previous tokens, by channel"

    @classmethod
    def places(cls, options: dict[str, Any]) -> list[str]:
        return ["keys", "values"] if options["on"] is None else list(dict.fromkeys(options["on"]))

    @classmethod
    def validate(cls, options: dict[str, Any], config: "HeadwaterConfig") -> None:
        check_layers(cls.name(), options, config)
        for place in cls.places(options):
            if place not in get_args(Place):
                raise HeadwaterError(
                    f"Mechanism 'short_conv' has no place {place!r} to be on; {nearest(place, get_args(Place))}"
                )
        if not cls.places(options):
            raise HeadwaterError("Mechanism 'short_conv': on is empty; leave it out for keys and values.")
        if options["window"] < 2:
            raise HeadwaterError(f"Mechanism 'short_conv': window must be at least 2, not {options['window']}.")

    @classmethod
    def identity(cls, options: dict[str, Any]) -> dict[str, Any] | None:
        return None if options.get("start") == "random" else options | {"start": "identity"}

    @classmethod
    def sizes(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> dict[str, tuple[int, int]]:
        """What is convolved in a layer: heads and channels of a head, by place."""
        # The stream in pieces as wide as a head, so that a cache keeps its raw tokens like those of keys.
        width = config.head_dim if config.hidden_size % config.head_dim == 0 else config.hidden_size
        heads = {"queries": config.num_attention_heads, "keys": len(plan.k_heads), "values": len(plan.v_heads)}
        found = {
            place: (heads[place], config.head_dim) if place in heads else (config.hidden_size // width, width)
            for place in cls.places(options)
        }
        return {place: size for place, size in found.items() if size[0]}

    @classmethod
    def plan(cls, options: dict[str, Any], config: "HeadwaterConfig", plans: list[LayerPlan]) -> list[LayerPlan]:
        def amend(plan: LayerPlan) -> LayerPlan:
            sizes, back = cls.sizes(options, config, plan), options["window"] - 1
            if inside := [(PARTS[place], back) for place in sizes if place in PARTS]:
                plan = plan.acting("projected", cls.name(), inside)
            for stage in get_args(Outer):
                if stage in sizes:
                    plan = plan.acting(stage, cls.name(), [("x", back)])
            return plan

        amended = [amend(plan) if is_chosen(plan.index, options) else plan for plan in plans]
        if amended == plans:
            raise HeadwaterError(
                "Mechanism 'short_conv' is on keys or values that its layers share with others; change on or layers."
            )
        return amended

    @classmethod
    def cost(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> Cost:
        sizes = cls.sizes(options, config, plan)
        channels = sum(heads * width for heads, width in sizes.values())
        again = config.hidden_size * (len(plan.inputs) - 1) * ("attention_input" in sizes)
        # Autograd keeps what is convolved for the gradient of the taps.
        return Cost(parameters=channels * options["window"], saved=channels + again)

    @classmethod
    def build(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> Self:
        return cls.made(options, {p: size for p, size in cls.sizes(options, config, plan).items() if p in PARTS})

    @classmethod
    def build_outer(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> Self:
        return cls.made(options, {p: size for p, size in cls.sizes(options, config, plan).items() if p not in PARTS})

    @classmethod
    def made(cls, options: dict[str, Any], sizes: dict[str, tuple[int, int]]) -> Self:
        return cls(sizes, options["window"], options["residual"], options["start"])

    def windows(self) -> dict[str, Tensor]:
        """The mean over the channels of a head."""
        return {part: self.taps(place).mean(2) for place, part in PARTS.items() if place in self.tails}

    def shown(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        heads = {"k": plan.k_heads, "v": plan.v_heads}
        return {
            f"mean {part}{back}": Shown(
                weights,
                "query head" if part == "q" else "kv head",
                heads.get(part, tuple(range(len(weights)))),
            )
            for part, window in self.windows().items()
            for back, weights in enumerate(window, 1)
        }

    def projected(self, q: Tensor, kv: KV, context: Context) -> tuple[Tensor, KV]:
        def convolved(place: str, x: Tensor) -> Tensor:
            return self(x, place, context.reach, context.tail) if place in self.tails else x

        return convolved("queries", q), KV(convolved("keys", kv.k), convolved("values", kv.v))

    def of_stream(self, x: Tensor, place: Place, context: Context) -> Tensor:
        """x [B, T, D], convolved with the taps of a place."""
        heads = self.get_parameter(f"{place}_taps").shape[1]
        pieces = x.unflatten(2, (heads, -1)).transpose(1, 2)
        return self(pieces, place, context.reach, context.tail).transpose(1, 2).flatten(2)

    def attention_input(self, x: Tensor, context: Context) -> Tensor:
        return self.of_stream(x, "attention_input", context)

    def attention_output(self, x: Tensor, context: Context) -> Tensor:
        return self.of_stream(x, "attention_output", context)

    def feed_forward_input(self, x: Tensor, context: Context) -> Tensor:
        return self.of_stream(x, "feed_forward_input", context)

    def feed_forward_output(self, x: Tensor, context: Context) -> Tensor:
        return self.of_stream(x, "feed_forward_output", context)
