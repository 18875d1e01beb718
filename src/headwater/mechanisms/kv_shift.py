"""KV shifting attention: keys and values from the previous token. arXiv 2411.19574, section 2.2, equations 4-5.

    K'_t = α1·K_t + α2·K_{t-1}        V'_t = β1·V_t + β2·V_{t-1}        K_{-1} = V_{-1} = 0

α and β are free scalars per key/value head. α1 and β1 are initialized uniformly in [0, 1), α2 = 1 - α1, β2 = 1 - β1;
nothing ties them afterwards. The shift comes before RoPE and before the cache. The paper's variants are options: keys
only, values only, queries too, longer windows, and two variants in which α1 and α2 stay tied.

Two more variants have no scalars: half of what a token has is the previous token's.

    half_heads       the second half of the heads: Zaya's values, arXiv 2510.04476 (compressed convolutional attention)
    half_channels    the second half of each head's channels: modded-nanogpt's keys, where these have no RoPE

Zaya has two value projections, of x_t and x_{t-1}; one of x_t whose result is shifted is the same.

Departures: "previous token" is the previous token of the same document (the paper has one document per row), and the
cache keeps the raw last token next to the shifted history. The paper's inference listing keeps the shifted one, which
makes the first decoded token wrong. In a document's first token the delayed half is zero. modded-nanogpt does not shift
it there, and Zaya fills it with its projection's bias, if there is one.
"""

from itertools import product
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from headwater.config.layers import layer_config
from headwater.config.plan import LayerPlan, Part, Source
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import QKV, Context, Cost, Mechanism, OptionValues, Reach, Tail
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import SAME, Dim, GrowthMap
from headwater.mechanisms.layer_values import check_own_values
from headwater.mechanisms.shift import read_tail, shift, shift_second
from headwater.util.errors import HeadwaterError, check_known

ShiftVariant = Literal["free", "gate", "clamped", "half_heads", "half_channels"]
HALVES = "half_heads", "half_channels"
# The option, the parameter and the parameter's symbol for queries, keys and values.
OPTIONS: dict[Part, str] = {"k": "keys", "v": "values", "q": "queries"}
TAPS: dict[Part, str] = {"k": "alpha", "v": "beta", "q": "gamma"}
SYMBOLS = {"k": "α", "v": "β", "q": "γ"}
# Reasons why a variant cannot start as the identity.
NEVER_IDENTITY = {
    "gate": "a sigmoid never reaches 1; use 'clamped' or 'free'",
    **dict.fromkeys(HALVES, "half is always the previous token's; use 'free'"),
}


class KVShift(KeepsPrecision, Mechanism):
    """Learned mix of each key and value (and query) with those of the previous tokens, per head.

    Args
        key_heads, value_heads, query_heads: how many heads of each are shifted; value_heads defaults to key_heads.
        window: number of taps; the paper's "shift 2" and "shift 3" have 3 and 4.
        variant: "free": the taps are the parameters. "gate": w_0 = sigmoid(a), w_1 = 1 - w_0. "clamped":
            w_0 = min(max(a, 0), 1), w_1 = 1 - w_0. "half_heads", "half_channels": the second half of the heads, or of
            the channels of each, is the previous token's, and nothing is learned. All but "free" require window=2.
        init: how taps are initialized. "random": w_0 uniform in [0, 1) and w_1 = 1 - w_0; with longer windows all taps
            uniform, then divided by their sum. "identity": w_0 = 1, for adding the shift to a trained model; not for
            "gate", which cannot reach 1, nor for halves.
        current_heads: how many heads of each come first and stay the token's own ("half_heads"); default half of them.

    Parameters: `alpha` (keys), `beta` (values), `gamma` (queries), each [window, heads], where row s weighs the token s
    back; [heads] for "gate" and "clamped"; none for halves.

        >>> import torch
        >>> from headwater.mechanisms import KVShift
        >>> shift = KVShift(key_heads=4)
        >>> k, v = torch.randn(2, 3, 4, 16, 64)  # batch 3, 4 heads, 16 tokens, head width 64
        >>> k, v = shift(k, v)
        >>> k.shape
        torch.Size([3, 4, 16, 64])
    """

    source = "the previous token"
    order = 20
    paper = "2411.19574"

    class Options:
        keys: bool = True  # shift keys
        values: bool = True  # shift values
        queries: bool = False  # shift queries, with scalars per query head
        window: int = 2  # taps; 3 and 4 are the paper's "shift 2" and "shift 3"
        variant: ShiftVariant = "free"  # gate, clamped: α2 = 1 - α1, α1 in [0, 1]
        init: Literal["random", "identity"] = "random"  # identity: for adding it to a trained model

    def __init__(
        self,
        key_heads: int,
        value_heads: int | None = None,
        query_heads: int = 0,
        *,
        window: int = 2,
        variant: ShiftVariant = "free",
        init: Literal["random", "identity"] = "random",
        current_heads: dict[Part, int] | None = None,
    ) -> None:
        super().__init__()
        check_form(window, variant, init)
        self.window, self.variant, self.init_mode = window, variant, init
        values = key_heads if value_heads is None else value_heads
        self.sizes: dict[Part, int] = {"k": key_heads, "v": values, "q": query_heads}
        self.current_heads = (
            {kind: heads // 2 for kind, heads in self.sizes.items()} if current_heads is None else current_heads
        )
        self.tails = {kind: f"{self.registered_name()}.{kind}" for kind in "kvq"}
        for kind, name in TAPS.items():
            shape = (window, self.sizes[kind]) if variant == "free" else (self.sizes[kind],)
            learned = self.sizes[kind] and variant not in HALVES
            self.register_parameter(name, fp32_parameter(*shape) if learned else None)
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        shape = getattr(self, parameter).shape
        if self.init_mode == "identity":
            return torch.eye(self.window, 1).repeat(1, shape[1]) if self.variant == "free" else torch.ones(shape)
        if self.variant == "free" and self.window > 2:
            taps = torch.rand(shape, generator=generator)
            return taps / taps.sum(0)
        current = torch.rand(shape[-1], generator=generator)
        if self.variant == "gate":
            return torch.logit(current, eps=1e-3)  # so that the gate itself starts uniform
        return torch.stack((current, 1 - current)) if self.variant == "free" else current

    def taps(self, kind: Part) -> Tensor:
        """The weights of keys, values or queries, [window, heads]; of half_channels, their mean over the channels."""
        parameter = getattr(self, TAPS[kind])
        if self.variant == "free":
            return parameter
        if self.variant in HALVES:
            current = torch.full((self.sizes[kind],), 0.5)
            if self.variant == "half_heads":
                current = (torch.arange(len(current)) < self.current_heads[kind]).float()
        else:
            current = parameter.sigmoid() if self.variant == "gate" else parameter.clamp(0, 1)
        return torch.stack((current, 1 - current))

    def forward(
        self, k: Tensor, v: Tensor, q: Tensor | None = None, reach: Reach = None, tail: Tail | None = None
    ) -> tuple[Tensor, ...]:
        """k, v and, if given, q, each [B, heads, T, d] -> the same, shifted.

        reach: as in `Context`; default: each row is one document. tail: has the raw tokens before; default: none.
        """
        k, v = self.shift_heads("k", k, reach, tail), self.shift_heads("v", v, reach, tail)
        return (k, v) if q is None else (k, v, self.shift_heads("q", q, reach, tail))

    def shift_heads(self, kind: Part, x: Tensor, reach: Reach, tail: Tail | None) -> Tensor:
        if not self.sizes[kind]:
            return x
        if x.dim() != 4 or x.shape[1] != self.sizes[kind]:
            raise HeadwaterError(
                f"KV shift takes {OPTIONS[kind]} [batch, {self.sizes[kind]}, tokens, width], not {list(x.shape)}."
            )
        previous = read_tail(tail, self.tails[kind], x, self.window - 1, reach)
        if self.variant == "half_heads":
            return shift_second(x, 1, self.current_heads[kind], reach, previous)
        if self.variant == "half_channels":
            return shift_second(x, 3, (x.shape[3] + 1) // 2, reach, previous)
        return shift(x, self.taps(kind), reach, previous)

    def transform_qkv(self, x: QKV, context: Context) -> QKV:
        k, v, q = self(x.k, x.v, x.q, context.reach, context.tail)  # by __call__, where accelerate's hooks load it
        return QKV(q, k, v)

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        if not (options["keys"] or options["values"] or options["queries"]):
            raise HeadwaterError("Mechanism 'kv_shift' shifts nothing; set keys, values or queries to true.")
        check_form(options["window"], options["variant"], options["init"])
        if options["variant"] == "half_heads":
            names = ["num_key_value_heads"] * (options["keys"] or options["values"])
            names += ["num_attention_heads"] * options["queries"]
            for layer, name in product(config.kinds.values(), names):
                if (heads := getattr(layer_config(config, layer), name)) % 2:
                    raise HeadwaterError(
                        f"Mechanism 'kv_shift': variant 'half_heads' needs an even number of heads, and {name} of "
                        f"layer {layer} is {heads}; use 'half_channels'."
                    )

    @classmethod
    def count_shifted(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> dict[Part, int]:
        """Count the heads that are shifted in a layer, by "k", "v" and "q". config: as the layer sees it."""
        heads: dict[Part, int] = {"k": len(plan.k_heads), "v": len(plan.v_heads), "q": config.num_attention_heads}
        # Where no head of the second half is stored, there is nothing to shift.
        least = cls.first_half(config, plan) if options["variant"] == "half_heads" else dict.fromkeys(heads, 0)
        return {kind: count for kind, count in heads.items() if options[OPTIONS[kind]] and count > least[kind]}

    @classmethod
    def first_half(cls, config: HeadwaterConfig, plan: LayerPlan) -> dict[Part, int]:
        """Count the heads that a layer stores in the first half of all its heads."""
        half = config.num_key_value_heads // 2
        keys, values = (sum(head < half for head in heads) for heads in (plan.k_heads, plan.v_heads))
        return {"k": keys, "v": values, "q": config.num_attention_heads // 2}

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        if not (options["keys"] or options["queries"]):
            check_own_values(cls, plans)

        def amend(plan: LayerPlan) -> LayerPlan:
            shifted = cls.count_shifted(options, layer_config(config, plan.index), plan)
            tails = [(kind, options["window"] - 1) for kind in shifted]
            return plan.acting(cls, cls.transform_qkv, tails) if tails else plan

        return [amend(plan) for plan in plans]

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        if options["variant"] in HALVES:
            return Cost()
        heads = sum(cls.count_shifted(options, config, plan).values())
        # Autograd keeps the raw keys and values for the gradient of the taps.
        taps = options["window"] if options["variant"] == "free" else 1
        return Cost(parameters=heads * taps, saved=heads * config.head_dim)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        heads = cls.count_shifted(options, config, plan)
        form = {name: options[name] for name in ("window", "variant", "init")}
        return cls(*(heads.get(kind, 0) for kind in TAPS), **form, current_heads=cls.first_half(config, plan))

    # Capabilities

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        if options["variant"] == "half_heads":
            for heads in [growth.kv] * (options["keys"] or options["values"]) + [growth.q] * options["queries"]:
                new, old = len(heads), max(heads) + 1
                if any(source >= 0 and (2 * source < old) != (2 * head < new) for head, source in enumerate(heads)):
                    raise HeadwaterError(
                        "Mechanism 'kv_shift' shifts the second half of the heads, which new heads move; multiply the "
                        "heads (hypercloning), or grow other sizes."
                    )
        return options

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        heads = Dim(next(kind for kind, name in TAPS.items() if name == parameter))
        return (SAME, heads) if self.variant == "free" else (heads,)

    @classmethod
    def find_identity_options(cls, options: OptionValues) -> OptionValues | None:
        never = options.get("variant") in NEVER_IDENTITY or options.get("init") == "random"
        return None if never else options | {"init": "identity"}

    per_head = per_token = True

    @classmethod
    def splits_heads(cls, options: OptionValues) -> bool:
        return options["variant"] != "half_heads"  # half of all heads, and a process does not know which ones it has

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        heads = {"k": plan.k_heads, "v": plan.v_heads, "q": tuple(range(self.sizes["q"]))}
        return {
            f"{SYMBOLS[kind]}{back}": Shown(weights, "query head" if kind == "q" else "kv head", heads[kind])
            for kind, window in self.show_windows().items()
            for back, weights in enumerate(window, 1)
        }

    def show_windows(self) -> dict[str, Tensor]:
        return {kind: self.taps(kind) for kind, heads in self.sizes.items() if heads}


def check_form(window: int, variant: str, init: str) -> None:
    """Raise `HeadwaterError` for options that are unknown or contradict each other."""
    for name, value, choices in (("variant", variant, get_args(ShiftVariant)), ("init", init, ("random", "identity"))):
        check_known(f"KV shift has no {name}", value, choices)
    if window < 2:
        raise HeadwaterError(f"KV shift's window must be at least 2, not {window}.")
    if variant != "free" and window != 2:
        raise HeadwaterError(f"KV shift's variant {variant!r} has two taps; set window to 2, or variant to 'free'.")
    if init == "identity" and variant in NEVER_IDENTITY:
        raise HeadwaterError(f"KV shift's variant {variant!r} cannot start as the identity: {NEVER_IDENTITY[variant]}.")
