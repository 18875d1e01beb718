"""Pattention (TokenFormer): parameters as key and value tokens, in place of linear maps. arXiv 2410.23168, section 3.

    Pattention(X; K_P, V_P) = Θ(X·K_Pᵀ)·V_P        Θ(A) = GELU(τ·A / ‖A‖₂), row by row        τ = √n by default

K_P [n, D_in], V_P [n, D_out]: n pairs of parameter tokens. It replaces the query, key, value and output maps and the
whole feed-forward. K_P starts normal with standard deviation 0.02, V_P with 2/(L·√D) (the authors' GPU code); their TPU
code starts both by fan-in, 1/√D_in and 1/√n (`key_init`, `value_init`: fan_in).

The other scores of the paper: `exp_l1_norm` (Table 4's first row), `l1_norm_gelu`, `l2_norm_gelu` (the default, above);
`gelu_l2_norm` and `gelu_l1_norm` have GELU before the norm, as in the published code's older form; `softmax` is
equation 15, with its 1/√d and no τ.

Departures: τ is stored beside the weights, one number a map, and stays what it was when pairs are added: with zero keys
for the new pairs the function is then unchanged exactly. The paper's τ = √n for the grown n would move it
(docs/growth.md). The pairs of before may be frozen: they then stand as parameters of their own, so that no optimiser,
decay or loop reaches them. GELU is the erf form, as in the GPU code; `gelu: tanh` is the TPU code's. A row of scores
with ‖A‖² below 1e-24 counts as zero: its value and its gradient are zero. That guard does not depend on n, as an
epsilon under a mean over n would; the TPU code adds 1e-5 to ‖A‖ in its place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from headwater.errors import HeadwaterError, nearest
from headwater.kernels import applies
from headwater.kernels.pattention import fused_pattention
from headwater.mechanisms.base import BenchForm, Cost, Map, Mechanism, Shown, Step
from headwater.plan import LayerPlan, Source
from headwater.precision import KeepsPrecision

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig

Score = Literal["l2_norm_gelu", "gelu_l2_norm", "l1_norm_gelu", "gelu_l1_norm", "exp_l1_norm", "softmax"]
Gelu = Literal["erf", "tanh"]

GUARD = 1e-24
# Where a new model's embeddings start, as found in docs/fairness.md. The papers' presets have the published 0.02.
EMBEDDING = 0.2


class Pattention(Mechanism):
    """Attention to n learned key/value pairs; stands where a linear map d_in -> d_out would.

        y = Θ(x·K_Pᵀ)·V_P        Θ(A) = GELU(τ·A / ‖A‖₂) by default, zero where ‖A‖² < 1e-24

    TokenFormer, arXiv 2410.23168, section 3; departures at the head of this file.

    Args
        d_in, d_out: widths. pairs: n.
        score: Θ, see the file's head.
        gelu: "erf" or "tanh", the form of GELU in Θ; the two scores without GELU take the default alone.
        tau: τ; default √n for scores with an L2 norm, n for those with an L1 norm.
        key_std, value_std: standard deviations of the starts; default 0.02, and 2/√d_out (a model of L layers divides
            that by L).
        frozen: so many of the n pairs, the first, do not learn.

    Parameters: `key` [n - frozen, d_in], `value` [n - frozen, d_out]; without gradient, if there are such,
    `frozen_key` [frozen, d_in], `frozen_value` [frozen, d_out]. Buffer: `scale.tau` [1].

        >>> import torch
        >>> from headwater.mechanisms import Pattention
        >>> layer = Pattention(64, 128, pairs=256)
        >>> layer(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 128])
    """

    matrices = ("key", "value", "frozen_key", "frozen_value")

    @strict
    @dataclass
    class Options:
        attention_pairs: int | list[int] | None = None
        ffn_pairs: int | list[int] | None = None
        query_pairs: int | list[int] | None = None
        key_pairs: int | list[int] | None = None
        value_pairs: int | list[int] | None = None
        output_pairs: int | list[int] | None = None
        score: Score = "l2_norm_gelu"
        gelu: Gelu = "erf"
        tau: Literal["sqrt_pairs", "pairs"] | None = None
        # Standard deviation of keys and values at the start: a number, "fan_in", or one of these for each map by name.
        key_init: float | int | str | dict[str, Any] | None = None
        value_init: float | int | str | dict[str, Any] | None = None
        frozen: list[dict[str, int]] | None = None  # layer by layer, map -> frozen pairs

    def __init__(
        self,
        d_in: int,
        d_out: int,
        pairs: int,
        *,
        score: Score = "l2_norm_gelu",
        gelu: Gelu = "erf",
        tau: float | None = None,
        key_std: float = 0.02,
        value_std: float | None = None,
        frozen: int = 0,
    ) -> None:
        super().__init__()
        if score not in SCORES:
            raise HeadwaterError(f"Pattention has no score {score!r}; {nearest(str(score), SCORES)}")
        if gelu not in GELU:
            raise HeadwaterError(f"Pattention has no gelu {gelu!r}; {nearest(str(gelu), GELU)}")
        if "gelu" not in score and gelu != "erf":
            raise HeadwaterError(f"Pattention's score {score!r} has no GELU; leave gelu out.")
        if tau is not None and not 0 < tau < float("inf"):
            raise HeadwaterError(f"Pattention's tau must be above zero and finite, not {tau}.")
        if pairs < 1:
            raise HeadwaterError(f"Pattention needs at least one pair, not {pairs}.")
        if not 0 <= frozen < pairs:
            raise HeadwaterError(f"Of {pairs} pairs, 0 to {pairs - 1} can be frozen, not {frozen}.")
        self.score, self.gelu = score, gelu
        self.key_std, self.value_std = key_std, 2 / d_out**0.5 if value_std is None else value_std
        self.key = nn.Parameter(torch.empty(pairs - frozen, d_in))
        self.value = nn.Parameter(torch.empty(pairs - frozen, d_out))
        self.frozen_key = nn.Parameter(torch.empty(frozen, d_in), requires_grad=False) if frozen else None
        self.frozen_value = nn.Parameter(torch.empty(frozen, d_out), requires_grad=False) if frozen else None
        self.scale = Scale(default_tau(score, pairs) if tau is None else tau)
        self.annealed: float | None = None  # the part of τ's way that it has gone
        self.reset_parameters()

    def start(self, parameter: str, generator: torch.Generator | None = None, rows: int | None = None) -> Tensor:
        """As in `Mechanism`, or only this many rows of it."""
        std = {"key": self.key_std, "value": self.value_std}[parameter.removeprefix("frozen_")]
        tensor = getattr(self, parameter)
        count = len(tensor) if rows is None else rows
        return torch.normal(0.0, std, (count, tensor.shape[1]), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_in] -> [..., d_out]."""
        key, value, tau = self.keys, self.values, self.scale()
        if self.score == "l2_norm_gelu" and applies(x, key, value, needs_grad=False):
            return fused_pattention(x, key, value, tau, GELU[self.gelu], GUARD)
        return self._theta(x @ key.T, tau).to(x.dtype) @ value

    def _theta(self, scores: Tensor, tau: Tensor) -> Tensor:
        """Θ, as written, of scores x·K_Pᵀ [..., n]; in at least fp32."""
        if self.score == "softmax":
            scores = scores / self.key.shape[1] ** 0.5
        return SCORES[self.score](_wide(scores), tau, GELU[self.gelu])

    def extra_repr(self) -> str:
        frozen = "" if self.frozen_key is None else f", frozen={len(self.frozen_key)}"
        form = "" if self.gelu == "erf" else f", gelu={self.gelu}"
        return f"{self.key.shape[1]}, {self.value.shape[1]}, pairs={self.n}{frozen}, score={self.score}{form}"

    @property
    def n(self) -> int:
        """How many pairs there are, frozen ones included."""
        return len(self.key) + (0 if self.frozen_key is None else len(self.frozen_key))

    @property
    def keys(self) -> Tensor:
        """All keys [n, d_in], the frozen ones first."""
        return _whole(self.key) if self.frozen_key is None else torch.cat((_whole(self.frozen_key), _whole(self.key)))

    @property
    def values(self) -> Tensor:
        """All values [n, d_out], the frozen ones first."""
        frozen = self.frozen_value
        return _whole(self.value) if frozen is None else torch.cat((_whole(frozen), _whole(self.value)))

    @torch.no_grad()
    def put(self, keys: Tensor, values: Tensor, frozen: int = 0) -> None:
        """Take these pairs [n, d_in], [n, d_out] instead, the first `frozen` of them without gradient. τ stays."""

        def parameter(rows: Tensor, learns: bool) -> nn.Parameter | None:
            return nn.Parameter(rows.clone(), requires_grad=learns) if learns or len(rows) else None

        self.key, self.value = parameter(keys[frozen:], True), parameter(values[frozen:], True)
        self.frozen_key, self.frozen_value = parameter(keys[:frozen], False), parameter(values[:frozen], False)

    @torch.no_grad()
    def weights(self, x: Tensor) -> Tensor:
        """Θ(x·K_Pᵀ): x [..., d_in] -> how much each pair's value counts [..., n], in at least fp32."""
        return self._theta(x @ self.keys.T, self.scale())

    @torch.no_grad()
    def firing(self, x: Tensor, *_: Any) -> Tensor:
        """|Θ|·‖V_P‖: x [..., d_in] -> the length of what each pair adds to the output [..., n]."""
        return self.weights(x).abs() * _wide(self.values).norm(dim=-1)

    # τ on its way from what it is to the default of its pairs

    def way(self) -> tuple[float, float] | None:
        """From where to where τ is to go; None where it is at home."""
        way = float(self.scale.tau), default_tau(self.score, self.n)
        # τ is stored in fp32, in which no default but a whole number is exact.
        return None if math.isclose(*way, rel_tol=1e-6) else way

    def anneal(self, way: Sequence[float], done: float) -> None:
        """Set τ to where it is after this part of the way, 0 to 1; beyond 1 it stays there."""
        done = min(done, 1.0)
        if done != self.annealed:  # arrived: a write in every step would be for nothing
            self.annealed = done
            self.scale.put(way[0] + (way[1] - way[0]) * done)

    @staticmethod
    def length(step: Step) -> int:
        """The steps that τ's way takes: told, or the warm-up, or half of all; the last step sees where it goes."""
        wanted = step.start.get("tau_steps") or step.warmup or step.steps // 2
        return max(1, min(wanted, step.steps - 1))

    def begins(self, step: Step) -> tuple[float, float] | None:
        return self.way() if step.start.get("tau") == "annealed" else None

    def before_step(self, kept: Any, step: Step) -> None:
        self.anneal(kept, step.number / self.length(step))

    @classmethod
    def announced(cls, modules: int, step: Step) -> str:
        return f"τ of {modules} maps goes to √n of their pairs in {cls.length(step)} steps."

    # What is measured against

    @classmethod
    def bench_form(cls, heads: int, dtype: torch.dtype) -> BenchForm:
        """One feed-forward of the heads' width."""
        module = cls(64 * heads, 64 * heads, 4 * 64 * heads).to(dtype)
        key, value, tau = module.key, module.value, float(module.scale.tau)

        def plain(x: Tensor) -> Tensor:
            scores = nn.functional.linear(x, key)
            normed = scores / torch.norm(scores, p=2, dim=-1, keepdim=True) * tau
            return nn.functional.gelu(normed) @ value

        return BenchForm("Pattention", module, module, plain)

    def twin(self) -> nn.Module:
        """Linear, GELU, Linear."""
        (d_in, d_out), bias = (self.key.shape[1], self.value.shape[1]), False
        return nn.Sequential(nn.Linear(d_in, self.n, bias=bias), nn.GELU(), nn.Linear(self.n, d_out, bias=bias))

    # In a headwater model

    def shown(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {"τ": Shown(self.scale())}

    @classmethod
    def validate(cls, options: dict[str, Any], config: "HeadwaterConfig") -> None:
        for name in ("attention_pairs", "ffn_pairs", "query_pairs", "key_pairs", "value_pairs", "output_pairs"):
            given = options[name]
            counts = given if isinstance(given, list) else [given]
            if isinstance(given, list) and len(given) != config.num_hidden_layers:
                raise HeadwaterError(
                    f"Mechanism 'pattention': {name} lists {len(given)} numbers for {config.num_hidden_layers} layers; "
                    "give one for each, or one for all."
                )
            if any(count is not None and count < 1 for count in counts):
                raise HeadwaterError(f"Mechanism 'pattention': {name} must be at least 1, not {given}.")
        for layer, frozen in enumerate(options["frozen"] or []):
            for name, count in frozen.items():
                if name not in get_args(Map) or not 0 <= count < cls.pairs(options, config, layer, name):
                    raise HeadwaterError(
                        f"Mechanism 'pattention': frozen must give fewer pairs than map {name!r} of layer {layer} has."
                    )
        for name in ("key_init", "value_init"):
            given = options[name]
            for place, value in given.items() if isinstance(given, dict) else [(None, given)]:
                if place is not None and place not in get_args(Map):
                    raise HeadwaterError(
                        f"Mechanism 'pattention': {name} has no map {place!r}; {nearest(str(place), get_args(Map))}"
                    )
                is_number = isinstance(value, float | int) and not isinstance(value, bool)
                if not (value in (None, "fan_in") or (is_number and 0 <= value < float("inf"))):
                    raise HeadwaterError(
                        f"Mechanism 'pattention': {name} must be a standard deviation or 'fan_in', not {value!r}."
                    )
        if options["score"] == "softmax" and options["tau"] is not None:
            raise HeadwaterError("Mechanism 'pattention': score 'softmax' has no tau; leave it out.")
        if "gelu" not in options["score"] and options["gelu"] != "erf":
            raise HeadwaterError(f"Mechanism 'pattention': score {options['score']!r} has no GELU; leave gelu out.")
        for name in ("qkv_bias", "output_bias", "mlp_bias"):
            if getattr(config, name):
                raise HeadwaterError(f"Mechanism 'pattention' has no biases; set {name} to false.")

    @classmethod
    def embedding_range(cls, options: dict[str, Any], config: "HeadwaterConfig") -> float:
        return EMBEDDING

    @classmethod
    def pairs(cls, options: dict[str, Any], config: "HeadwaterConfig", layer: int, name: Map) -> int:
        """n of one map: its own count, else the attention's; by default D, and 4·D for the feed-forward."""
        if name == "feed_forward":
            given, default = options["ffn_pairs"], 4 * config.hidden_size
        else:
            own = options[f"{name}_pairs"]
            given, default = options["attention_pairs"] if own is None else own, config.hidden_size
        given = given[layer] if isinstance(given, list) else given
        return default if given is None else given

    @classmethod
    def with_pairs(cls, options: dict[str, Any], counts: Sequence[dict[Map, int]]) -> dict[str, Any]:
        """The options with which layer l has counts[l][map] pairs: the reverse of `pairs`, as short as it can be."""
        attention = [name for name in counts[0] if name != "feed_forward"]
        given = {f"{name}_pairs": _short([layer[name] for layer in counts]) for name in attention}
        different = {repr(count) for count in given.values()}
        own = dict.fromkeys(("query_pairs", "key_pairs", "value_pairs", "output_pairs"))
        shared = given[f"{attention[0]}_pairs"] if len(different) == 1 else None
        return (
            options
            | own
            | ({"attention_pairs": shared} if len(different) == 1 else {"attention_pairs": None} | given)
            | {"ffn_pairs": _short([layer["feed_forward"] for layer in counts])}
        )

    @classmethod
    def tunes(cls, options: dict[str, Any]) -> bool:
        return options["frozen"] is not None

    def learns(self, parameter: str) -> bool:
        return self.frozen_key is not None and not parameter.startswith("frozen_")

    @classmethod
    def map(
        cls, options: dict[str, Any], config: "HeadwaterConfig", layer: int, name: Map, d_in: int, d_out: int
    ) -> Self:
        pairs = cls.pairs(options, config, layer, name)
        tau = {"sqrt_pairs": pairs**0.5, "pairs": float(pairs), None: None}[options["tau"]]
        key_std, value_std = cls.stds(options, config, name, d_in, pairs)
        return cls(
            d_in,
            d_out,
            pairs,
            score=options["score"],
            gelu=options["gelu"],
            tau=tau,
            key_std=key_std,
            value_std=value_std,
            frozen=0 if options["frozen"] is None else options["frozen"][layer].get(name, 0),
        )

    @classmethod
    def stds(
        cls, options: dict[str, Any], config: "HeadwaterConfig", name: Map, d_in: int, pairs: int
    ) -> tuple[float, float]:
        """Standard deviations at the start of the keys and values of a map from d_in with so many pairs."""
        value_std = 2 / (config.num_hidden_layers * config.hidden_size**0.5)
        return (
            _init_std(options["key_init"], name, d_in, config.initializer_range),
            _init_std(options["value_init"], name, pairs, value_std),
        )

    @classmethod
    def feed_forward_size(cls, options: dict[str, Any]) -> str:
        return "ffn_pairs"

    @classmethod
    def map_cost(
        cls, options: dict[str, Any], config: "HeadwaterConfig", layer: int, name: Map, d_in: int, d_out: int
    ) -> Cost:
        pairs = cls.pairs(options, config, layer, name)
        numbers = pairs * (d_in + d_out)
        # Kept for the backward pass by the default score: the scores and one number a row; by the others, as written.
        saved = {"l2_norm_gelu": pairs + 1, "exp_l1_norm": 2 * pairs, "softmax": 2 * pairs}
        return Cost(parameters=numbers, flops=2 * numbers, saved=saved.get(options["score"], 3 * pairs + 3))


class Scale(KeepsPrecision):
    """τ: a buffer of at least fp32 in the checkpoint, so that it survives growth."""

    tau: Tensor

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.value = tau
        self.register_buffer("tau", self.constants()["tau"])

    def forward(self) -> Tensor:
        return self.tau

    def put(self, tau: float) -> None:
        self.value = tau
        self.tau.fill_(tau)

    def constants(self) -> dict[str, Tensor]:
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        return {"tau": torch.tensor([self.value], dtype=wide)}


def default_tau(score: Score, pairs: int) -> float:
    """√n for an L2 norm, n for an L1 norm, 1 for equation 15's softmax."""
    return 1.0 if score == "softmax" else float(pairs) if "l1" in score else pairs**0.5


def _init_std(given: float | str | dict[str, Any] | None, name: Map, inputs: int, default: float) -> float:
    """The standard deviation that an option asks for at the start of one map."""
    value = given.get(name) if isinstance(given, dict) else given
    return default if value is None else inputs**-0.5 if value == "fan_in" else float(value)


def _whole(pairs: Tensor) -> Tensor:
    """The pairs as numbers, where a quantiser has put a tensor of its own in their place."""
    return pairs if type(pairs).dequantize is Tensor.dequantize else pairs.dequantize()


def _short(counts: list[int]) -> int | list[int]:
    return counts[0] if len(set(counts)) == 1 else counts


# The forms of GELU, as torch names them.
GELU = {"erf": "none", "tanh": "tanh"}


def _wide(a: Tensor) -> Tensor:
    return a.to(torch.promote_types(a.dtype, torch.float32))


def _over_norm(a: Tensor, tau: Tensor, order: int) -> Tensor:
    """τ·A / ‖A‖, zero with zero gradient where ‖A‖² is below the guard."""
    square = a.square().sum(-1, keepdim=True) if order == 2 else a.abs().sum(-1, keepdim=True).square()
    seen = square > GUARD
    return a * torch.where(seen, tau * torch.where(seen, square, 1.0).rsqrt(), 0.0)


# Θ, as written, for scores a [..., n] in at least fp32.
SCORES = {
    "l2_norm_gelu": lambda a, tau, form: nn.functional.gelu(_over_norm(a, tau, 2), approximate=form),
    "gelu_l2_norm": lambda a, tau, form: _over_norm(nn.functional.gelu(a, approximate=form), tau, 2),
    "l1_norm_gelu": lambda a, tau, form: nn.functional.gelu(_over_norm(a, tau, 1), approximate=form),
    "gelu_l1_norm": lambda a, tau, form: _over_norm(nn.functional.gelu(a, approximate=form), tau, 1),
    "exp_l1_norm": lambda a, tau, form: tau * a.softmax(-1),
    "softmax": lambda a, tau, form: tau * a.softmax(-1),
}
