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
cache keeps the raw last token beside the shifted history. The paper's inference listing keeps the shifted one, which
makes the first decoded token wrong. A document's first token has zeros in the delayed half, which modded-nanogpt leaves
as it is, and Zaya fills with its projection's bias if there is one.
"""

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from headwater.config.layers import layer_config
from headwater.config.plan import LayerPlan, Part, Source
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import KV, Ancestors, Context, Cost, Mechanism, Tail
from headwater.mechanisms.enlarging import SAME, Dim, Larger
from headwater.mechanisms.precision import KeepsPrecision, fp32_parameter
from headwater.mechanisms.shift import earlier, shift
from headwater.util.errors import HeadwaterError, nearest

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig

ShiftVariant = Literal["free", "gate", "clamped", "half_heads", "half_channels"]
HALVES = "half_heads", "half_channels"


class KVShift(KeepsPrecision, Mechanism):
    """Learned mix of each key and value (and query) with those of the previous tokens.

        K'_t = α1·K_t + α2·K_{t-1}        V'_t = β1·V_t + β2·V_{t-1}

    or, with longer windows, Σ_s α_s·K_{t-s}; per head, with zeros before the document's start. KV shifting attention,
    arXiv 2411.19574, equations 4-5; departures at the head of this file.

    Args
        key_heads, value_heads, query_heads: how many heads of each are shifted; 0: none. value_heads defaults to
            key_heads.
        window: number of taps; 2 is the paper's main form, 3 and 4 its "shift 2" and "shift 3".
        variant: "free": the taps are the parameters. "gate": w_0 = sigmoid(a), w_1 = 1 - w_0. "clamped":
            w_0 = min(max(a, 0), 1), w_1 = 1 - w_0. "half_heads", "half_channels": the second half of the heads, or of
            the channels of each, is the previous token's, and nothing is learned. All but "free" require window=2.
        init: how taps are initialized. "random": w_0 uniform in [0, 1) and w_1 = 1 - w_0; with longer windows all taps
            uniform, then divided by their sum. "identity": w_0 = 1, for adding the shift to a trained model; not for
            "gate", which cannot reach 1, nor for halves.
        current: how many heads of keys, values and queries come first and stay the token's own ("half_heads"); default
            half of them.

    Parameters: `alpha` (keys), `beta` (values), `gamma` (queries), each [window, heads], where row s weighs the token s
    back; [heads] for "gate" and "clamped"; none for halves.

        >>> import torch
        >>> from headwater.mechanisms import KVShift
        >>> shift = KVShift(key_heads=4)
        >>> k, v = torch.randn(2, 3, 4, 16, 64)  # batch 3, 4 heads, 16 tokens, head width 64
        >>> k, v = shift(k, v)
        >>> k.shape
        torch.Size([3, 4, 16, 64])

    To decode token by token, keep the raw k and v of the last window - 1 tokens, prepend them to the new ones, and drop
    them from the result.
    """

    paper = "2411.19574"
    per_head = per_token = True

    @strict
    @dataclass
    class Options:
        keys: bool = True
        values: bool = True
        queries: bool = False
        window: int = 2
        variant: ShiftVariant = "free"
        init: Literal["random", "identity"] = "random"

    def __init__(
        self,
        key_heads: int,
        value_heads: int | None = None,
        query_heads: int = 0,
        *,
        window: int = 2,
        variant: ShiftVariant = "free",
        init: Literal["random", "identity"] = "random",
        current: dict[Part, int] | None = None,
    ) -> None:
        super().__init__()
        check(window, variant, init)
        self.window, self.variant, self.init_mode = window, variant, init
        values = key_heads if value_heads is None else value_heads
        self.sizes: dict[Part, int] = {"k": key_heads, "v": values, "q": query_heads}
        self.current = {part: heads // 2 for part, heads in self.sizes.items()} if current is None else current
        self.tails = {part: f"{self.registered_name()}.{part}" for part in "kvq"}

        def taps(heads: int) -> nn.Parameter | None:
            shape = (window, heads) if variant == "free" else (heads,)
            return fp32_parameter(*shape) if heads and variant not in HALVES else None

        self.alpha, self.beta, self.gamma = taps(key_heads), taps(values), taps(query_heads)
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

    def taps(self, parameter: Tensor) -> Tensor:
        """The weights [window, heads] that a parameter stands for."""
        if self.variant == "free":
            return parameter
        current = parameter.sigmoid() if self.variant == "gate" else parameter.clamp(0, 1)
        return torch.stack((current, 1 - current))

    def forward(
        self,
        k: Tensor,
        v: Tensor,
        q: Tensor | None = None,
        reach: Tensor | Ancestors | None = None,
        tail: Tail | None = None,
    ) -> tuple[Tensor, ...]:
        """k, v and, if given, q, each [B, heads, T, d] -> the same, shifted.

        reach: [B, T], how many tokens of the same document precede each; default: all. `Ancestors` where the previous
            token is not in the previous slot.
        tail: holds the raw tokens before these; default: there are none.
        """

        def shifted(part: Part, x: Tensor, parameter: Tensor | None) -> Tensor:
            if not self.sizes[part]:
                return x
            branches = isinstance(reach, Ancestors)
            before = None if tail is None else tail.before(self.tails[part], x, self.window - 1, everything=branches)
            if parameter is not None:
                return shift(x, self.taps(parameter), reach, before)
            dim, own = (1, self.current[part]) if self.variant == "half_heads" else (3, (x.shape[3] + 1) // 2)
            late, held = (y if y is None else y.narrow(dim, own, x.shape[dim] - own) for y in (x, before))
            halves = x.narrow(dim, 0, own), earlier(late, 1, reach, held)
            # Joined in the memory layout of projections, which what heads read takes over from queries.
            return torch.cat([y.transpose(1, 2) for y in halves], 2 if dim == 1 else 3).transpose(1, 2)

        k, v = shifted("k", k, self.alpha), shifted("v", v, self.beta)
        return (k, v) if q is None else (k, v, shifted("q", q, self.gamma))

    # In a headwater model

    @classmethod
    def describe_source(cls, options: dict[str, Any]) -> str:
        return "the previous token" if options["window"] == 2 else f"the {options['window'] - 1} previous tokens"

    @classmethod
    def validate_options(cls, options: dict[str, Any], config: "HeadwaterConfig") -> None:
        if not (options["keys"] or options["values"] or options["queries"]):
            raise HeadwaterError(
                "Mechanism 'kv_shift' shifts nothing; set one of its options keys, values, queries to true."
            )
        check(options["window"], options["variant"], options["init"])
        if options["variant"] == "half_heads":
            wanted = options["keys"] or options["values"], options["queries"]
            for layer, (name, asked) in product(
                config.kinds.values(), zip(("num_key_value_heads", "num_attention_heads"), wanted, strict=True)
            ):
                if asked and (heads := getattr(layer_config(config, layer), name)) % 2:
                    raise HeadwaterError(
                        f"Mechanism 'kv_shift': variant 'half_heads' needs an even number of heads, and {name} of "
                        f"layer {layer} is {heads}; use 'half_channels'."
                    )

    @classmethod
    def find_identity_options(cls, options: dict[str, Any]) -> dict[str, Any] | None:
        if options.get("variant") in ("gate", *HALVES) or options.get("init") == "random":
            return None
        return options | {"init": "identity"}

    @classmethod
    def splits_heads(cls, options: dict[str, Any]) -> bool:
        return options["variant"] != "half_heads"  # of all heads: a process with a part does not know which it has

    @classmethod
    def shifted(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> dict[Part, int]:
        """What is shifted in a layer ("k", "v", "q"), and in how many heads. config: as the layer sees it."""
        heads: dict[Part, int] = {}
        if options["keys"]:
            heads["k"] = len(plan.k_heads)
        if options["values"]:
            heads["v"] = len(plan.v_heads)
        if options["queries"]:
            heads["q"] = config.num_attention_heads
        if options["variant"] == "half_heads":  # nothing to do where no head of the second half is stored
            current = cls.first_half(config, plan)
            heads = {part: count for part, count in heads.items() if count > current[part]}
        return {part: count for part, count in heads.items() if count}

    @classmethod
    def first_half(cls, config: "HeadwaterConfig", plan: LayerPlan) -> dict[Part, int]:
        """How many of the heads that a layer stores are in the first half of all its heads."""
        half = config.num_key_value_heads // 2
        return {
            "k": sum(head < half for head in plan.k_heads),
            "v": sum(head < half for head in plan.v_heads),
            "q": config.num_attention_heads // 2,
        }

    @classmethod
    def plan_stages(cls, options: dict[str, Any], config: "HeadwaterConfig", plans: list[LayerPlan]) -> list[LayerPlan]:
        def amend(plan: LayerPlan) -> LayerPlan:
            shifted = cls.shifted(options, layer_config(config, plan.index), plan)
            tails = [(part, options["window"] - 1) for part in shifted]
            return plan.acting(cls, cls.transform_qkv, tails) if tails else plan

        return [amend(plan) for plan in plans]

    @classmethod
    def count_cost(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> Cost:
        if options["variant"] in HALVES:
            return Cost()
        heads = sum(cls.shifted(options, config, plan).values())
        # Autograd keeps the raw keys and values for the gradient of the taps.
        return Cost(
            parameters=heads * (options["window"] if options["variant"] == "free" else 1), saved=heads * config.head_dim
        )

    @classmethod
    def grow_options(cls, options: dict[str, Any], config: "HeadwaterConfig", growth: Larger) -> dict[str, Any]:
        if options["variant"] == "half_heads":
            asked = options["keys"] or options["values"], options["queries"]
            for heads, is_asked in zip((growth.kv, growth.q), asked, strict=True):
                new, old = len(heads), max(heads) + 1
                if is_asked and any(at >= 0 and (2 * at < old) != (2 * i < new) for i, at in enumerate(heads)):
                    raise HeadwaterError(
                        "Mechanism 'kv_shift' shifts the second half of the heads, which new heads move; multiply the "
                        "heads (hypercloning), or grow other sizes."
                    )
        return options

    def describe_axes(self, parameter: str, place: tuple[Dim, Dim] | None = None) -> tuple[Dim, ...]:
        heads = Dim({"alpha": "k", "beta": "v", "gamma": "q"}[parameter])  # type: ignore[arg-type]
        return (SAME, heads) if self.variant == "free" else (heads,)

    @classmethod
    def build_module(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> Self:
        heads = cls.shifted(options, config, plan)
        return cls(
            heads.get("k", 0),
            heads.get("v", 0),
            heads.get("q", 0),
            window=options["window"],
            variant=options["variant"],
            init=options["init"],
            current=cls.first_half(config, plan),
        )

    def show_windows(self) -> dict[str, Tensor]:
        """Of half_channels: the mean over a head's channels."""
        if self.variant in HALVES:
            return {part: self.fixed(part) for part, heads in self.sizes.items() if heads}
        found = {"k": self.alpha, "v": self.beta, "q": self.gamma}
        return {part: self.taps(parameter) for part, parameter in found.items() if parameter is not None}

    def fixed(self, part: Part) -> Tensor:
        """The weights [2, heads] that a variant without scalars stands for."""
        own = torch.full((self.sizes[part],), 0.5)
        if self.variant == "half_heads":
            own = (torch.arange(self.sizes[part]) < self.current[part]).float()
        return torch.stack((own, 1 - own))

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        queries = tuple(range(self.sizes["q"]))
        heads = {"k": plan.k_heads, "v": plan.v_heads, "q": queries}
        return {
            f"{dict(k='α', v='β', q='γ')[part]}{back}": Shown(
                weights, "query head" if part == "q" else "kv head", heads[part]
            )
            for part, window in self.show_windows().items()
            for back, weights in enumerate(window, 1)
        }

    def transform_qkv(self, q: Tensor, kv: KV, context: Context) -> tuple[Tensor, KV]:
        # Through __call__, where accelerate's hooks load offloaded parameters.
        k, v, q = self(kv.k, kv.v, q, context.reach, context.tail)
        return q, KV(k, v)


def check(window: int, variant: str, init: str) -> None:
    """Raise `HeadwaterError` for options that are unknown or contradict each other."""
    for name, given, known in (("variant", variant, get_args(ShiftVariant)), ("init", init, ("random", "identity"))):
        if given not in known:
            raise HeadwaterError(f"KV shift has no {name} {given!r}; {nearest(str(given), known)}")
    if window < 2:
        raise HeadwaterError(f"KV shift's window must be at least 2, not {window}.")
    if variant != "free" and window != 2:
        raise HeadwaterError(f"KV shift's variant {variant!r} has two taps; set window to 2, or variant to 'free'.")
    if variant in HALVES and init == "identity":
        raise HeadwaterError(
            f"KV shift's variant {variant!r} cannot start as the identity: half is always the previous "
            "token's; use 'free'."
        )
    if variant == "gate" and init == "identity":
        raise HeadwaterError(
            "KV shift's variant 'gate' cannot start as the identity: a sigmoid never reaches 1; use 'clamped' "
            "or 'free'."
        )
