"""Pattention (TokenFormer): parameters as key and value tokens, in place of linear layers. arXiv 2410.23168, section 3.

    Pattention(X; K_P, V_P) = Θ(X·K_Pᵀ)·V_P        Θ(A) = GELU(τ·A / ‖A‖₂), row by row        τ = √n by default

K_P [n, D_in], V_P [n, D_out]: n pairs of parameter tokens. It replaces the query, key, value and output maps and the
whole feed-forward. K_P is initialized normally with standard deviation 0.02, V_P with 2/(L·√D) (the authors' GPU
code); their TPU code initializes both by fan-in, 1/√D_in and 1/√n (`key_init`, `value_init`: fan_in).

The paper's other scores: `exp_l1_norm` (Table 4's first row), `l1_norm_gelu`, `l2_norm_gelu` (the default, above).
`gelu_l2_norm` and `gelu_l1_norm` apply GELU before the norm, as the published code once did. `softmax` is equation 15,
with its 1/√d and no τ.

Of many pairs a token may read a few (`top_k`), as TokenFormer's outlook has it: Θ is then over the k largest scores,
and n above is k, in τ too. With product keys (arXiv 1907.05242) the keys of n = s² pairs are the sums of two of 2·s,
K_(i,j) = C_i + C'_j, so that x·K_(i,j) = x·C_i + x·C'_j, and finding the k best takes 2·s products and not s²:

    y = Σ_h Σ_{(i,j) among the k best of head h} Θ(x·C_hi + x·C'_hj)·V_(i,j)        the heads share the values

Departures: τ is stored with the weights, one number per module, and does not change when pairs are added: with zero
keys for the new pairs the function is then exactly unchanged. The paper's τ = √n of the grown n would change it
(docs/growth.md). Older pairs may be frozen: they are then separate parameters, which no optimizer or weight decay
reaches. GELU is the erf form, as in the GPU code; `gelu: tanh` is the TPU code's. A row of scores with ‖A‖² below 1e-24
counts as zero: its value and its gradient are zero. Unlike an epsilon under a mean over n, this guard does not depend
on n; the TPU code adds 1e-5 to ‖A‖ instead. The product keys' paper scores the halves of a query q = W·x with keys half
as wide, c_i; here W is multiplied into them, C_i = W_1ᵀ·c_i, without q's bias and batch norm. Its Θ is `softmax`,
without 1/√d. If a token reads only a few values, they start larger, so that the output is about as large as with the
default n. Of equal scores the first pair's counts as larger. Gradients reach the chosen pairs alone.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from headwater.config.capabilities import Map
from headwater.config.plan import LayerPlan, Source
from headwater.config.text import HeadwaterConfig
from headwater.kernels import can_fuse
from headwater.kernels.fused_pattention import fused_pattention
from headwater.mechanisms.capabilities import Group, Shown, Step
from headwater.mechanisms.contract import Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.mechanisms.growth_map import LINEAR_IN, LINEAR_OUT, SAME, Dim, GrowthMap
from headwater.mechanisms.product_keys import ProductKeys, find_largest, take_entries, weighted_rows
from headwater.util.errors import HeadwaterError, check_known

ScoreFunction = Literal["l2_norm_gelu", "gelu_l2_norm", "l1_norm_gelu", "gelu_l1_norm", "exp_l1_norm", "softmax"]
Gelu = Literal["erf", "tanh"]

GUARD = 1e-24


class Pattention(Mechanism):
    """Attention to n learned key/value pairs, in place of a linear layer d_in -> d_out.

    Args
        d_in, d_out: widths. pairs: n. score: Θ; see the head of this file.
        gelu: "erf" or "tanh", the form of GELU in Θ; the two scores without GELU take the default only.
        tau: τ; default √n for scores with an L2 norm, n for those with an L1 norm.
        key_std, value_std: standard deviations at init; default 0.02 and 2/√d_out (a model of L layers divides the
            latter by L).
        frozen: how many of the n pairs, the first ones, are not trained.
        top_k: how many pairs a token reads, those with the largest scores; default all.
        product_heads: 0: every pair has a key. h: keys are sums of two, n is a square, and h lists of top_k pairs, each
            with keys of its own, are read and added up.

    Parameters: `key` [n - frozen, d_in], `value` [n - frozen, d_out]; if any are frozen, also `frozen_key`
    [frozen, d_in] and `frozen_value` [frozen, d_out], without gradients. With product keys `key` is [2·h·√n, d_in], C
    and then C' of each head, and the value of (i, j) has number i·√n + j. Buffer: `scale.tau` [1].

        >>> import torch
        >>> from headwater.mechanisms import Pattention
        >>> layer = Pattention(64, 128, pairs=256)
        >>> layer(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 128])
        >>> sparse = Pattention(64, 128, pairs=64**2, top_k=16, product_heads=2)
        >>> sparse(torch.randn(2, 16, 64)).shape, sparse.key.shape
        (torch.Size([2, 16, 128]), torch.Size([256, 64]))
    """

    source = "the parameters, as key/value tokens"
    order = 10
    embedding_range = 0.2  # see docs/fairness.md; the papers' presets use the published 0.02

    class Options:
        attention_pairs: int | None = None  # pairs of each attention map; default: D
        ffn_pairs: int | None = None  # pairs of the feed-forward; default: 4·D
        query_pairs: int | None = None  # pairs of one map; default: attention_pairs
        key_pairs: int | None = None  # the same
        value_pairs: int | None = None  # the same
        output_pairs: int | None = None  # the same
        score: ScoreFunction = "l2_norm_gelu"  # Θ, one of the scores above
        gelu: Gelu = "erf"  # the form of GELU in Θ
        tau: Literal["sqrt_pairs", "pairs"] | None = None  # τ; default: √n with an L2 norm, n with an L1 norm
        # Standard deviations at init: a number, "fan_in", or a mapping from a map's name to one of these.
        key_init: float | int | str | dict[str, Any] | None = None  # of K_P; default: 0.02
        value_init: float | int | str | dict[str, Any] | None = None  # of V_P; default: 2/(L·√D)
        frozen: dict[str, int] | None = None  # map -> number of its first pairs that are not trained
        top_k: int | dict[str, int] | None = None  # number of pairs that a token reads, or map -> number; default: all
        product_keys: list[str] | None = None  # maps whose pairs have product keys; needs top_k
        product_heads: int = 1  # number of lists of top_k pairs that a token reads

    def __init__(
        self,
        d_in: int,
        d_out: int,
        pairs: int,
        *,
        score: ScoreFunction = "l2_norm_gelu",
        gelu: Gelu = "erf",
        tau: float | None = None,
        key_std: float = 0.02,
        value_std: float | None = None,
        frozen: int = 0,
        top_k: int | None = None,
        product_heads: int = 0,
    ) -> None:
        super().__init__()
        check_form(score, gelu, tau)
        if wrong := find_problem(pairs, top_k, product_heads > 0, frozen):
            raise HeadwaterError(f"Pattention: {wrong}.")
        self.score, self.gelu = score, gelu
        self.key_std, self.value_std = key_std, 2 / d_out**0.5 if value_std is None else value_std
        self.top_k, self.product_heads = top_k, product_heads
        self.key = nn.Parameter(torch.empty(2 * product_heads * math.isqrt(pairs) or pairs - frozen, d_in))
        self.value = nn.Parameter(torch.empty(pairs - frozen, d_out))
        self.frozen_key = nn.Parameter(torch.empty(frozen, d_in), requires_grad=False) if frozen else None
        self.frozen_value = nn.Parameter(torch.empty(frozen, d_out), requires_grad=False) if frozen else None
        self.scale = Tau(default_tau(score, top_k or pairs) if tau is None else tau)
        self.product = ProductKeys(math.isqrt(pairs), top_k) if top_k and product_heads else None
        self._is_default = score == "l2_norm_gelu" and top_k is None
        self.annealed: float | None = None  # the share of τ's path that is done, 0 to 1
        self.reset_parameters()

    def initial_value(
        self, parameter: str, generator: torch.Generator | None = None, rows: int | None = None
    ) -> Tensor:
        """Draw as `Mechanism.initial_value`. rows: draw only this many rows."""
        # Each key is the sum of two rows, so a row has half the variance.
        key_std = self.key_std if self.product is None else self.key_std / 2**0.5
        std = {"key": key_std, "value": self.value_std}[parameter.removeprefix("frozen_")]
        count, width = getattr(self, parameter).shape
        return torch.normal(0.0, std, (count if rows is None else rows, width), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_in] -> [..., d_out]."""
        key, value, tau = self.keys.to(x.dtype), self.values, self.scale()
        value = value.to(x.dtype) if self.top_k is None else value  # of a table with many rows few are read
        if self._is_default and can_fuse(x, key, value, needs_grad=False, cpu_only=True):
            return fused_pattention(x, key, value, tau, GELU[self.gelu], GUARD)
        scores_BTN = x @ key.T
        if self.top_k is None:
            return self._theta(scores_BTN, tau).to(x.dtype) @ value
        pairs, weights = self._read_pairs(scores_BTN, tau)
        return weighted_rows(value, pairs, weights.to(value.dtype)).to(scores_BTN.dtype)

    def _read_pairs(self, scores: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs that a token reads, of all heads, and their weights Θ [..., top_k] or [..., heads·top_k]."""
        scores = _wide(scores)
        if self.product is None:
            pairs = find_largest(scores.detach(), self.top_k)
            return pairs, self._theta(take_entries(scores, pairs), tau)
        pairs, chosen = self.product(scores.unflatten(-1, (self.product_heads, 2, -1)))
        return pairs.flatten(-2), self._theta(chosen, tau).flatten(-2)

    def _theta(self, scores: Tensor, tau: Tensor) -> Tensor:
        """Compute Θ of the scores x·K_Pᵀ [..., n], in at least fp32."""
        if "gelu" not in self.score:
            return tau * _wide(scores / self.key.shape[1] ** 0.5 if self.score == "softmax" else scores).softmax(-1)
        a, order, form = _wide(scores), 2 if "l2" in self.score else 1, GELU[self.gelu]
        if self.score.startswith("gelu"):
            return _over_norm(nn.functional.gelu(a, approximate=form), tau, order)
        return nn.functional.gelu(_over_norm(a, tau, order), approximate=form)

    def extra_repr(self) -> str:
        frozen = "" if self.frozen_key is None else f", frozen={len(self.frozen_key)}"
        form = "" if self.gelu == "erf" else f", gelu={self.gelu}"
        reading = "" if self.top_k is None else f", top_k={self.top_k}"
        reading += f", product_heads={self.product_heads}" if self.product_heads else ""
        return f"{self.key.shape[1]}, {self.value.shape[1]}, pairs={self.n}{frozen}, score={self.score}{form}{reading}"

    @property
    def n(self) -> int:
        """The number of pairs, frozen ones included."""
        return len(self.value) + (0 if self.frozen_value is None else len(self.frozen_value))

    @property
    def score_count(self) -> int:
        """The number of scores that Θ is over: n, or `top_k`."""
        return self.top_k or self.n

    @property
    def keys(self) -> Tensor:
        """All keys [n, d_in], the frozen ones first; product keys [2·heads·√n, d_in]."""
        return _join_rows(self.frozen_key, self.key)

    @property
    def values(self) -> Tensor:
        """All values [n, d_out], the frozen ones first."""
        return _join_rows(self.frozen_value, self.value)

    @torch.no_grad()
    def set_pairs(self, keys: Tensor, values: Tensor, frozen: int = 0) -> None:
        """Replace the pairs by these, [n, d_in] and [n, d_out]; the first `frozen` are not trained. τ stays."""

        def parameter(rows: Tensor, learns: bool) -> nn.Parameter | None:
            return nn.Parameter(rows.clone(), requires_grad=learns) if learns or len(rows) else None

        self.key, self.value = parameter(keys[frozen:], True), parameter(values[frozen:], True)
        self.frozen_key, self.frozen_value = parameter(keys[:frozen], False), parameter(values[:frozen], False)

    @torch.no_grad()
    def weights(self, x: Tensor) -> Tensor:
        """Θ(x·K_Pᵀ): x [..., d_in] -> the weight of each pair's value [..., n], in at least fp32; 0 if unread."""
        scores_BTN = x @ self.keys.to(x.dtype).T
        if self.top_k is None:
            return self._theta(scores_BTN, self.scale())
        pairs, weights = self._read_pairs(scores_BTN, self.scale())
        return weights.new_zeros(*x.shape[:-1], self.n).scatter_add_(-1, pairs, weights)

    def find_tau_path(self) -> tuple[float, float] | None:
        """τ's present value and its target; None where they are equal."""
        path = float(self.scale.tau), default_tau(self.score, self.score_count)
        # τ is stored in fp32, which rounds most defaults, so the comparison has a tolerance.
        return None if math.isclose(*path, rel_tol=1e-6) else path

    def anneal(self, path: Sequence[float], done: float) -> None:
        """Move τ along `path` by the fraction `done`, at most 1."""
        done = min(done, 1.0)
        if done != self.annealed:  # no more writes once the target is reached
            self.annealed = done
            self.scale.set_tau(path[0] + (path[1] - path[0]) * done)

    @staticmethod
    def count_annealing_steps(step: Step) -> int:
        """The steps of annealing: the warm-up, or half of all if there is none; it ends before the last step."""
        return max(1, min(step.warmup or step.steps // 2, step.steps - 1))

    @property
    def qconfig(self) -> Any:
        """The attribute that torch.ao.quantization sets in every module; refused, since it would leave the pairs."""
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, config: Any) -> None:
        raise HeadwaterError(
            "torch.ao.quantization reaches linear layers only and would leave Pattention's parameter tokens "
            "unquantized; quantize them with torchao and headwater.models.quantization.torchao_config(…)."
        )

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        cls._validate_maps(options)
        if options["score"] == "softmax" and options["tau"] is not None:
            raise HeadwaterError("Mechanism 'pattention': score 'softmax' has no tau; leave it out.")
        check_form(options["score"], options["gelu"], None)
        product_keys, heads = options["product_keys"] or [], options["product_heads"]
        if heads < 1 or (heads > 1 and not product_keys):
            raise HeadwaterError(
                f"Mechanism 'pattention': product_heads must be at least 1, and 1 without product_keys, not {heads}."
            )
        for name in get_args(Map):
            pairs, frozen = cls.count_pairs(options, config, name), (options["frozen"] or {}).get(name, 0)
            if wrong := find_problem(pairs, cls.top_k_of(options, name), name in product_keys, frozen):
                raise HeadwaterError(f"Mechanism 'pattention': map {name!r}: {wrong}.")
        for name in ("qkv_bias", "output_bias", "mlp_bias"):
            if getattr(config, name):
                raise HeadwaterError(f"Mechanism 'pattention' has no biases; set {name} to false.")

    @staticmethod
    def _validate_maps(options: OptionValues) -> None:
        for name in ("key_init", "value_init", "frozen", "top_k", "product_keys"):
            for map_name in options[name] if isinstance(options[name], dict | list) else ():
                check_known(f"Mechanism 'pattention': {name} has no map", map_name, get_args(Map))
        for name in ("key_init", "value_init"):
            values = options[name].values() if isinstance(options[name], dict) else [options[name]]
            for value in values:
                number = value if isinstance(value, float | int) and not isinstance(value, bool) else -1
                if value not in (None, "fan_in") and not 0 <= number < float("inf"):
                    raise HeadwaterError(
                        f"Mechanism 'pattention': {name} must be a standard deviation or 'fan_in', not {value!r}."
                    )

    @classmethod
    def top_k_of(cls, options: OptionValues, name: Map) -> int | None:
        """Return the number of pairs of a map that a token reads; None: all."""
        top_k = options["top_k"]
        return top_k.get(name) if isinstance(top_k, dict) else top_k

    @classmethod
    def product_heads_of(cls, options: OptionValues, name: Map) -> int:
        """The heads of a map's product keys; 0: it has none."""
        return options["product_heads"] if name in (options["product_keys"] or []) else 0

    @classmethod
    def count_pairs(cls, options: OptionValues, config: HeadwaterConfig, name: Map) -> int:
        """n of one map: its own option, else `attention_pairs`, else the default."""
        if name == "feed_forward":
            pairs = options["ffn_pairs"]
        else:
            own_pairs = options[f"{name}_pairs"]
            pairs = options["attention_pairs"] if own_pairs is None else own_pairs
        return cls.default_pairs(config, name) if pairs is None else pairs

    @classmethod
    def default_pairs(cls, config: HeadwaterConfig, name: Map) -> int:
        """Return the default number of pairs: D, and 4·D for the feed-forward."""
        return (4 if name == "feed_forward" else 1) * config.hidden_size

    @classmethod
    def with_pairs(cls, options: OptionValues, counts: dict[Map, int]) -> OptionValues:
        """The options that give each map counts[map] pairs, in their shortest form: the inverse of `count_pairs`."""
        fields: dict[str, int | None] = {f"{name}_pairs": n for name, n in counts.items() if name != "feed_forward"}
        fields["attention_pairs"] = None
        if len({n for name, n in counts.items() if name != "feed_forward"}) == 1:
            fields = dict.fromkeys(fields) | {"attention_pairs": counts["query"]}
        return options | fields | {"ffn_pairs": counts["feed_forward"]}

    @classmethod
    def find_stds(
        cls, options: OptionValues, config: HeadwaterConfig, name: Map, d_in: int, pairs: int
    ) -> tuple[float, float]:
        """Standard deviations at init of the keys and values of a map from d_in with `pairs` pairs."""
        value_std = 2 / (config.num_hidden_layers * config.hidden_size**0.5)
        if top_k := cls.top_k_of(options, name):
            # The output sums only this many values. Larger values make up for the difference from the default number.
            pairs = top_k * max(1, cls.product_heads_of(options, name))
            value_std *= (cls.default_pairs(config, name) / pairs) ** 0.5
        key_std = _init_std(options["key_init"], name, d_in, config.initializer_range)
        return key_std, _init_std(options["value_init"], name, pairs, value_std)

    @classmethod
    def _sparse_cost(cls, options: OptionValues, name: Map, pairs: int, top_k: int, d_in: int, d_out: int) -> Cost:
        heads = cls.product_heads_of(options, name)
        keys, lists = 2 * heads * math.isqrt(pairs) or pairs, max(1, heads)
        read_pairs = lists * top_k
        # Per pair autograd keeps two indices of 64 bits, or three with product keys, and the weight; also what Θ keeps,
        # and what a sum of rows keeps for each token.
        theta = top_k if options["score"] in ("exp_l1_norm", "softmax") else 2 * top_k + 3
        return Cost(
            parameters=keys * d_in + pairs * d_out,
            flops=2 * keys * d_in,
            saved=read_pairs * (7 if heads else 5) + lists * theta + 6,
            unread_parameters=max(0, pairs - read_pairs) * d_out,
        )

    # Capabilities

    @classmethod
    def build_linear(
        cls, options: OptionValues, config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int
    ) -> Self:
        pairs, top_k = cls.count_pairs(options, config, name), cls.top_k_of(options, name)
        read_pairs = top_k or pairs
        tau = {"sqrt_pairs": read_pairs**0.5, "pairs": float(read_pairs), None: None}[options["tau"]]
        key_std, value_std = cls.find_stds(options, config, name, d_in, pairs)
        form: dict[str, Any] = {"score": options["score"], "gelu": options["gelu"], "tau": tau}
        stds: dict[str, Any] = {"key_std": key_std, "value_std": value_std}
        reading: dict[str, Any] = {"top_k": top_k, "product_heads": cls.product_heads_of(options, name)}
        return cls(d_in, d_out, pairs, frozen=(options["frozen"] or {}).get(name, 0), **form, **stds, **reading)

    @classmethod
    def count_linear_cost(
        cls, options: OptionValues, config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int
    ) -> Cost:
        pairs = cls.count_pairs(options, config, name)
        if top_k := cls.top_k_of(options, name):
            return cls._sparse_cost(options, name, pairs, top_k, d_in, d_out)
        numbers = pairs * (d_in + d_out)
        # For the default score autograd keeps the scores and one number per row, for others what the plain form keeps.
        saved = {"l2_norm_gelu": pairs + 1, "exp_l1_norm": 2 * pairs, "softmax": 2 * pairs}
        return Cost(parameters=numbers, flops=2 * numbers, saved=saved.get(options["score"], 3 * pairs + 3))

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        if growth.preserves_function and options["score"] == "softmax" and (growth.widens or growth.extends("q")):
            raise HeadwaterError(
                "Mechanism 'pattention': score=softmax divides by the square root of its input's width, so with "
                "another width or number of heads it would compute something else; add pairs or layers, or use a "
                "method that does not keep the function."
            )
        return cls.with_pairs(options, {name: cls.count_pairs(options, config, name) for name in get_args(Map)})

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        return SAME, LINEAR_IN if parameter.removeprefix("frozen_") == "key" else LINEAR_OUT

    def prepare_training(self, step: Step) -> tuple[float, float] | None:
        return self.find_tau_path() if step.start.get("tau") == "anneal" else None

    def prepare_step(self, state: Any, step: Step) -> None:
        self.anneal(state, step.number / self.count_annealing_steps(step))

    @classmethod
    def describe_training(cls, modules: int, step: Step) -> str:
        return f"τ of {modules} maps is annealed to √n of their n pairs over {cls.count_annealing_steps(step)} steps."

    def choose_group(self, parameter: str) -> Group | None:
        """Group values that are looked up with embeddings, so that a row that no token reads does not change."""
        return "embeddings" if self.top_k is not None and parameter.endswith("value") else None

    per_head = per_token = True

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {"τ": Shown(self.scale())}

    @torch.no_grad()
    def show_firing(self, x: Tensor, *_: Any) -> Tensor:
        """|Θ|·‖V_P‖: x [..., d_in] -> the norm of each pair's contribution to the output [..., n]."""
        return self.weights(x).abs() * _wide(self.values).norm(dim=-1)

    def build_twin(self) -> nn.Module:
        """Build an MLP with a unit for each pair: linear, GELU, linear. Without `top_k` it has the same matmuls."""
        up = nn.Linear(self.key.shape[1], self.n, bias=False)
        return nn.Sequential(up, nn.GELU(), nn.Linear(self.n, self.value.shape[1], bias=False))


class Tau(KeepsPrecision):
    """τ as a buffer in at least fp32. Checkpoints store it, so that growth does not change it."""

    tau: Tensor

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.value = tau
        self.register_buffer("tau", self.constants()["tau"])

    def forward(self) -> Tensor:
        return self.tau

    def set_tau(self, tau: float) -> None:
        self.value = tau
        self.tau.fill_(tau)

    def constants(self) -> dict[str, Tensor]:
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        return {"tau": torch.tensor([self.value], dtype=wide)}


def default_tau(score: ScoreFunction, pairs: int) -> float:
    """√n for an L2 norm, n for an L1 norm, 1 for equation 15's softmax."""
    return 1.0 if score == "softmax" else float(pairs) if "l1" in score else pairs**0.5


def check_form(score: str, gelu: str, tau: float | None) -> None:
    """Raise `HeadwaterError` for an unknown or contradictory Θ."""
    for name, value, choices in (("score", score, get_args(ScoreFunction)), ("gelu", gelu, GELU)):
        check_known(f"Pattention has no {name}", value, choices)
    if "gelu" not in score and gelu != "erf":
        raise HeadwaterError(f"Pattention's score {score!r} has no GELU; leave gelu out.")
    if tau is not None and not 0 < tau < float("inf"):
        raise HeadwaterError(f"Pattention's tau must be above zero and finite, not {tau}.")


def find_problem(pairs: int, top_k: int | None, product: bool, frozen: int) -> str | None:
    """Say what is wrong with reading `top_k` of this many pairs, and freezing some; None if nothing is."""
    if pairs < 1:
        return f"there must be at least one pair, not {pairs}"
    if not 0 <= frozen < pairs:
        return f"of {pairs} pairs, 0 to {pairs - 1} can be frozen, not {frozen}"
    side = math.isqrt(pairs)
    if top_k is not None and not 1 <= top_k <= pairs:
        return f"top_k must be from 1 to the {pairs} pairs, not {top_k}"
    if product and top_k is None:
        return "product keys need top_k, which says how many pairs a token reads"
    if product and side**2 != pairs:
        return f"product keys need a square number of pairs, such as {side**2} or {(side + 1) ** 2}, not {pairs}"
    if product and frozen:
        return "pairs with product keys share their keys, so none can be frozen"
    return None


def _init_std(option: float | str | dict[str, Any] | None, name: Map, inputs: int, default: float) -> float:
    """Read the standard deviation of one map from an option."""
    value = option.get(name) if isinstance(option, dict) else option
    return default if value is None else inputs**-0.5 if value == "fan_in" else float(value)


def _join_rows(frozen: Tensor | None, trained: Tensor) -> Tensor:
    """Join all rows as an ordinary tensor, where a quantizer has replaced one by its own class."""
    rows = [
        x if type(x).dequantize is Tensor.dequantize else x.dequantize() for x in (frozen, trained) if x is not None
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


# PyTorch's name for each form of GELU.
GELU = {"erf": "none", "tanh": "tanh"}


def _wide(a: Tensor) -> Tensor:
    return a.to(torch.promote_types(a.dtype, torch.float32))


def _over_norm(a: Tensor, tau: Tensor, order: int) -> Tensor:
    """τ·A / ‖A‖; zero, with zero gradient, where ‖A‖² is at most the guard."""
    square = a.square().sum(-1, keepdim=True) if order == 2 else a.abs().sum(-1, keepdim=True).square()
    is_nonzero = square > GUARD
    return a * torch.where(is_nonzero, tau * torch.where(is_nonzero, square, 1.0).rsqrt(), 0.0)
