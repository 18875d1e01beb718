"""Loss against size: scaling laws fitted to saved trials, and which size of the baseline equals an arm.

    L(N) = E + A / N^a        (Hoffmann et al., arXiv 2203.15556, eq. 2, one of its two terms)

N: parameters without embeddings, or training tokens, whichever differ between the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, special

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.statistics import arm_of
from headwater_lab.training.records import RunRecord, same_tokens

Axis = Literal["parameters", "tokens"]
CONFIDENCE = 0.95
# The fitted constants, E, log A and a, need as many sizes.
LEAST_SIZES = 3


@dataclass(frozen=True)
class Estimate:
    """A number and its interval (95 %, see `scaling_of`); None with one seed, and if a number is not finite.

    error: its standard error, of the logarithm for what cannot be below 0; freedom: degrees of freedom of its t.
    """

    value: float
    interval: tuple[float, float] | None
    error: float | None = None
    freedom: int = 0


@dataclass(frozen=True)
class Law:
    """A fitted law; error: root mean square of the residuals."""

    arm: str
    e: Estimate
    a: Estimate
    exponent: Estimate
    error: float


@dataclass(frozen=True)
class Equal:
    """At one size: how much more of N the baseline needs, by its own law, to have the arm's loss; 0.1 is 10 % more.

    More than the arm's N, or if N is tokens, than the baseline's at this size. These differ where arms cost the same
    time, or FLOPs; as the baseline's tokens go with its time, `more` is then also how much longer it has to train.
    more: its error is that of log(1 + more).
    inside: whether that N is within the sizes that were trained; else it is an extrapolation.
    """

    arm: str
    size: str
    more: Estimate
    inside: bool


@dataclass(frozen=True)
class Scaling:
    axis: Axis
    metric: str
    baseline: str
    points: dict[str, list[tuple[float, float]]]
    """By arm: (N, mean loss) at each size."""
    laws: list[Law]
    equals: list[Equal]
    unit: str = "tokens"
    """What the models were trained on, tokens or images."""

    def sentences(self) -> list[str]:
        """Equals a baseline with x % more parameters or tokens, in words."""
        what = "parameters (embeddings aside)" if self.axis == "parameters" else f"training {self.unit}"
        lines = []
        for one in self.equals:
            if math.isnan(one.more.value):
                lines.append(f"{one.arm}, {one.size}: the losses of {self.baseline} do not fall with its size.")
                continue
            if not math.isfinite(one.more.value):
                lines.append(f"{one.arm}, {one.size}: no {self.baseline} of any size has its loss, by the fitted law.")
                continue
            percent = f"{abs(one.more.value):.1%} {'more' if one.more.value >= 0 else 'fewer'}"
            between = ""
            if one.more.interval is not None:
                low, high = one.more.interval
                between = f" [{low:+.1%}, {high:+.1%}]"
            beyond = "" if one.inside else "; beyond the sizes trained"
            lines.append(f"{one.arm}, {one.size}: equals a {self.baseline} with {percent} {what}{between}{beyond}.")
        return lines


def scaling_of(records: Sequence[RunRecord]) -> Scaling | None:
    """Fit every arm's losses against its size, from finished trials.

    The law is fitted to the mean over seeds at each size (least squares; each size counts alike). Intervals: each seed
    is left out in turn, at all sizes and in all arms, and everything is fitted again (the jackknife), with Student's t
    for that number of seeds; on a logarithmic scale for what cannot be below 0. They cover the
    seeds, not the law's form: with as many sizes as constants it passes through all points.

    Sizes are those of the baseline; arms that lack one are left out, and so are seeds that not all arms have at all
    sizes. None if there are fewer sizes than constants, or no seed is left.

    What is fitted is the loss in nats a token; bits per byte where the arms differ in their tokenizers.

    Raises `HeadwaterError` where too few sizes differ in parameters or tokens, or runs have no loss.
    """
    runs = [r for r in records if r.experiment and r.experiment.size and r.status == "finished" and r.held_out]
    baseline = runs[0].experiment.baseline if runs and runs[0].experiment else ""
    sizes = list(dict.fromkeys(_size(r) for r in runs if arm_of(r) == baseline))
    if len(sizes) < LEAST_SIZES:
        return None
    axis = _axis([r for r in runs if arm_of(r) == baseline])
    table: dict[str, dict[str, dict[int, tuple[float, float]]]] = {}
    metric = _metric(runs)
    for r in runs:
        loss = r.held_out[-1].metrics[metric]
        if _size(r) in sizes and math.isfinite(loss):
            table.setdefault(arm_of(r), {}).setdefault(_size(r), {})[r.seed] = (_n(r, axis), loss)
    table = {arm: by_size for arm, by_size in table.items() if len(by_size) == len(sizes)}
    seeds = sorted(
        set.intersection(*(set(of) for by_size in table.values() for of in by_size.values())) if table else []
    )
    if baseline not in table or not seeds:
        return None
    # [arms, sizes, seeds]
    n, losses = np.moveaxis(np.array([[[table[a][size][x] for x in seeds] for size in sizes] for a in table]), -1, 0)
    if (distinct := len(set(n.mean(2)[list(table).index(baseline)]))) < LEAST_SIZES:
        raise HeadwaterError(
            f"A law needs {LEAST_SIZES} sizes with different {axis}, and these have {distinct}; add one."
        )
    arms = list(table)
    base = arms.index(baseline)
    over = n if axis == "parameters" else np.broadcast_to(n[base], n.shape)
    whole = _Fitted(base, n, over, losses)
    jackknife = range(len(seeds) if len(seeds) > 1 else 0)
    left = [_Fitted(base, *(np.delete(x, i, 2) for x in (n, over, losses))) for i in jackknife]
    laws, equals = [], []
    for i, arm in enumerate(arms):
        law, again = whole.laws[i], np.array([one.laws[i] for one in left]).reshape(-1, 3)
        e, a, exponent = (_estimate(law[k], again[:, k], logarithmic=k == 2, exp=k == 1) for k in range(3))
        if law[0] == 0.0:  # at its bound, which the jackknife cannot handle
            e = Estimate(0.0, None)
        error = float(np.sqrt(np.mean((predict(law, whole.n[i]) - whole.losses[i]) ** 2)))
        laws.append(Law(arm, e, a, exponent, error))
        if arm == baseline:
            continue
        for k, size in enumerate(sizes):
            ratio = _estimate(whole.ratios[i, k], np.array([one.ratios[i, k] for one in left]), logarithmic=True)
            bounds = ratio.interval and (ratio.interval[0] - 1, ratio.interval[1] - 1)
            more = Estimate(ratio.value - 1, bounds, ratio.error, ratio.freedom)
            at, trained = whole.over[i, k], whole.n[base]
            inside = bool(trained.min() <= ratio.value * at <= trained.max())
            equals.append(Equal(arm, size, more, inside))
    points = {arm: list(zip(whole.n[i].tolist(), whole.losses[i].tolist(), strict=True)) for i, arm in enumerate(arms)}
    return Scaling(axis, metric, baseline, points, laws, equals, runs[0].unit)


class _Fitted:
    """The laws of all arms. n, over, losses: [arms, sizes], means of [arms, sizes, seeds]; ratios: [arms, sizes], N of
    the baseline for that loss over `over`."""

    def __init__(self, base: int, n: np.ndarray, over: np.ndarray, losses: np.ndarray) -> None:
        self.n, self.over, self.losses = n.mean(2), over.mean(2), losses.mean(2)
        self.laws = [fit(*of) for of in zip(self.n, self.losses, strict=True)]
        self.ratios = np.array([[invert(self.laws[base], loss) for loss in row] for row in self.losses]) / self.over


def _estimate(value: float, left_out: np.ndarray, logarithmic: bool = False, exp: bool = False) -> Estimate:
    """The jackknife's interval of a value, from those with one seed left out each.

    logarithmic: of a positive number, by its logarithm. exp: the values are logarithms.
    """
    with np.errstate(divide="ignore", over="ignore"):
        whole, parts = (np.log(value), np.log(left_out)) if logarithmic else (value, left_out)
        shown = float(np.exp(whole)) if logarithmic or exp else float(whole)
        if len(parts) < 2 or not (np.isfinite(whole) and np.isfinite(parts).all()):
            return Estimate(shown, None)
        count = len(parts)
        error = math.sqrt((count - 1) / count * float(np.sum((parts - parts.mean()) ** 2)))
        half = float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
        ends = np.array([whole - half, whole + half])
        low, high = np.exp(ends) if logarithmic or exp else ends
    return Estimate(shown, (float(low), float(high)), error, count - 1)


def fit(n: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """E, log A, a of the least-squares law.

    n, loss: [sizes]. For a given exponent the law is linear in E and A, so only the exponent is searched. If
    losses do not fall with N, A is 0.
    """
    scale = float(np.exp(np.log(n).mean()))

    def solve(exponent: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For exponents [...]: sums of squares, E and A·scale^-a, [...] each."""
        x = (n / scale) ** -np.asarray(exponent)[..., None]
        without = (x @ loss) / (x * x).sum(-1)
        centered = x - x.mean(-1, keepdims=True)
        slope = (centered @ loss) / np.maximum((centered * centered).sum(-1), 1e-300)
        e = loss.mean() - slope * x.mean(-1)
        alone = e < 0  # no loss is below 0
        e, amount = np.where(alone, 0.0, e), np.where(alone, without, slope)
        e, amount = np.where(amount > 0, e, loss.mean()), np.maximum(amount, 0.0)
        return ((e[..., None] + amount[..., None] * x - loss) ** 2).sum(-1), e, amount

    grid = np.geomspace(1e-3, 4.0, 161)
    start = int(np.argmin(solve(grid)[0]))
    low, high = grid[max(0, start - 1)], grid[min(len(grid) - 1, start + 1)]
    found = optimize.minimize_scalar(lambda a: float(solve(a)[0]), bounds=(low, high), options={"xatol": 1e-10})
    exponent = float(found.x)
    _, e, amount = solve(exponent)
    with np.errstate(divide="ignore"):
        return np.array([float(e), float(np.log(amount)) + exponent * math.log(scale), exponent])


def predict(law: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The law's loss at N."""
    return law[0] + np.exp(law[1] - law[2] * np.log(n))


def invert(law: np.ndarray, loss: float) -> float:
    """The N at which the law has this loss; infinity if there is none, nan if the law is constant."""
    if math.isinf(law[1]):
        return math.nan
    return math.exp(min(700.0, (law[1] - math.log(loss - law[0])) / law[2])) if loss > law[0] else math.inf


def _metric(records: Sequence[RunRecord]) -> str:
    """Nats per token if all have the same tokens, else their metric. There are no laws of accuracy."""
    first = records[0]
    loss = "".join(["loss", *first.metric.partition("/")[1:]])  # of the deciding domain, if there is one
    if same_tokens(records) and all(loss in record.held_out[-1].metrics for record in records):
        return loss
    if not first.lower_is_better:
        raise HeadwaterError(f"A scaling law needs losses, but {first.name!r} was measured only by {first.metric}.")
    return first.metric


def _n(record: RunRecord, axis: Axis) -> float:
    return float(record.parameters - record.embedding_parameters if axis == "parameters" else record.tokens)


def _axis(runs: Sequence[RunRecord]) -> Axis:
    axes: tuple[Axis, Axis] = ("parameters", "tokens")
    for axis in axes:
        if len({_n(run, axis) for run in runs}) > 1:
            return axis
    raise HeadwaterError("The sizes differ neither in parameters nor in tokens, so no law can be fitted.")


def _size(record: RunRecord) -> str:
    return (record.experiment.size or "") if record.experiment else ""
