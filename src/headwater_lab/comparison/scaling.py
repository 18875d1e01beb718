"""Loss against size: scaling laws fitted to saved trials, and the size of the baseline that equals an arm.

    L(N) = E + A / N^a        (Hoffmann et al., arXiv 2203.15556, eq. 2, one of its two terms)

N: parameters without embeddings, or training tokens, whichever differ between the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from scipy import optimize, special

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.statistics import INCONCLUSIVE, arm_of, is_too_wide
from headwater_lab.training.records import RunRecord, same_tokens

Axis = Literal["parameters", "tokens"]
CONFIDENCE = 0.95
# At least as many sizes as the law has constants: E, log A and a.
LEAST_SIZES = 3


@dataclass(frozen=True)
class Estimate:
    """A number and its interval (95 %, see `fit_scaling`); None with one seed, and if a number is not finite.

    error: the standard error of its logarithm; freedom: degrees of freedom of its t.
    """

    value: float
    interval: tuple[float, float] | None
    error: float | None = None
    freedom: int = 0


@dataclass(frozen=True)
class Law:
    """A fitted law; error: root mean square of the residuals, None for as many sizes as constants."""

    arm: str
    e: float
    a: float
    exponent: float
    error: float | None


@dataclass(frozen=True)
class Equal:
    """The additional N that the baseline needs, by its own law, to reach an arm's loss at one size; 0.1 is 10 % more.

    More than the arm's N, or if N is tokens, than the baseline's at this size. These differ where arms cost the same
    time, or FLOPs; as the baseline's tokens go with its time, `more` is then also how much longer it has to train.
    more: its error is the error of log(1 + more).
    inside: whether that N is within the trained sizes; otherwise it is extrapolated.
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
    sizes: Sequence[str] = ()

    def sentences(self) -> list[str]:
        """Describe the size of the baseline that equals each arm: "equals a baseline with x % more parameters"."""
        unit = "parameters (embeddings aside)" if self.axis == "parameters" else f"training {self.unit}"
        return [f"{equal.arm}, {equal.size}: {self._describe(equal, unit)}." for equal in self.equals]

    def _describe(self, equal: Equal, unit: str) -> str:
        estimate = equal.more
        if math.isnan(estimate.value):
            return f"the losses of {self.baseline} do not fall with its size"
        if not math.isfinite(estimate.value):
            return f"no {self.baseline} of any size reaches its loss, by the fitted law"
        if is_too_wide(estimate.interval, shift=1):
            return f"the {unit} of a {self.baseline} with its loss are {INCONCLUSIVE}"
        percent = f"{abs(estimate.value):.1%} {'more' if estimate.value >= 0 else 'fewer'}"
        interval = "" if estimate.interval is None else " [{:+.1%}, {:+.1%}]".format(*estimate.interval)
        extrapolated = "" if equal.inside else "; beyond the sizes trained"
        return f"equals a {self.baseline} with {percent} {unit}{interval}{extrapolated}"


def fit_scaling(records: Sequence[RunRecord]) -> Scaling | None:
    """Fit every arm's losses against its size, from finished trials.

    The law is fitted to the mean over seeds at each size (least squares; each size counts alike). Intervals of equal
    sizes: each seed is left out in turn, at all sizes and in all arms, and everything is fitted again (the jackknife of
    the logarithm), with Student's t for that number of seeds. They cover the seeds, not the law's form: with as many
    sizes as constants it passes through all points.

    Sizes are the baseline's; arms that lack one are left out, and so are seeds that are missing for any arm or
    size. None if there are fewer sizes than constants, or no seed is left.

    Laws are fitted to the loss in nats per token, or to bits per byte where tokenizers differ.

    Raises `HeadwaterError` where too few sizes differ in parameters or tokens, or runs have no loss.
    """
    runs = [run for run in records if run.status == "finished" and run.held_out and _size_of(run)]
    baseline = runs[0].experiment.baseline if runs and runs[0].experiment else ""
    of_baseline = [run for run in runs if arm_of(run) == baseline]
    sizes = list(dict.fromkeys(map(_size_of, of_baseline)))
    if len(sizes) < LEAST_SIZES:
        return None
    axis, metric = _find_axis(of_baseline), _choose_metric(runs)
    arms, n, losses = _stack_losses(runs, sizes, axis, metric)
    if baseline not in arms or not losses.size:
        return None
    base = arms.index(baseline)
    _check_sizes(n.mean(2)[base], axis)
    fits = _fit_samples(base, n, n if axis == "parameters" else np.broadcast_to(n[base], n.shape), losses)
    laws = fits[0].describe_laws(arms)
    sizes_and_losses = zip(fits[0].n.tolist(), fits[0].losses.tolist(), strict=True)
    points = {arm: list(zip(*row, strict=True)) for arm, row in zip(arms, sizes_and_losses, strict=True)}
    return Scaling(axis, metric, baseline, points, laws, _estimate_equals(arms, sizes, base, fits), runs[0].unit, sizes)


def _check_sizes(n: np.ndarray, axis: Axis) -> None:
    """Raise `HeadwaterError` if a law cannot be fitted to the baseline at these N, [sizes]."""
    if (distinct := len(set(n))) < LEAST_SIZES:
        raise HeadwaterError(
            f"A law needs {LEAST_SIZES} sizes with different {axis}, but these have {distinct}; add one."
        )
    if distinct < len(n):
        raise HeadwaterError(
            f"Several of the {len(n)} sizes have equal {axis} and different budgets, so no law in {axis} alone can be "
            "fitted to all."
        )


def _stack_losses(
    runs: Sequence[RunRecord], sizes: Sequence[str], axis: Axis, metric: str
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Stack N and finite losses, [arms, sizes, seeds] each: arms with all sizes, and the seeds that all have."""
    finite = [run for run in runs if math.isfinite(run.held_out[-1].metrics[metric])]
    points = {
        (arm_of(run), _size_of(run), run.seed): (_count_n(run, axis), run.held_out[-1].metrics[metric])
        for run in finite
    }
    pairs = {(arm, size): None for arm, size, _ in points}
    arms = [arm for arm in dict.fromkeys(map(arm_of, finite)) if all((arm, size) in pairs for size in sizes)]
    seeds = sorted({seed for *_, seed in points})
    seeds = [seed for seed in seeds if all((arm, size, seed) in points for arm, size in product(arms, sizes))]
    cells = np.array([[[points[arm, size, seed] for seed in seeds] for size in sizes] for arm in arms])
    n, losses = np.moveaxis(cells.reshape(len(arms), len(sizes), len(seeds), 2), -1, 0)
    return arms, n, losses


def _fit_samples(base: int, *values: np.ndarray) -> list[_FittedLaws]:
    """Fit all laws to all seeds, then without each of them. values: n, over and losses, [arms, sizes, seeds]."""
    seeds = values[0].shape[2]
    samples = [values]
    if seeds > 1:
        samples += [tuple(np.delete(value, left_out, 2) for value in values) for left_out in range(seeds)]
    return [_FittedLaws(base, *(value.mean(2) for value in sample)) for sample in samples]


class _FittedLaws:
    """The laws of all arms, with the baseline at index `base`.

    n, over, losses: [arms, sizes], means over seeds. ratios: [arms, sizes], the N at which the baseline has that loss,
    divided by `over`, see `Equal`.
    """

    def __init__(self, base: int, n: np.ndarray, over: np.ndarray, losses: np.ndarray) -> None:
        self.n, self.over, self.losses = n, over, losses
        self.laws = [fit_law(*row) for row in zip(n, losses, strict=True)]
        self.ratios = np.array([[invert_law(self.laws[base], loss) for loss in row] for row in losses]) / over

    def describe_laws(self, arms: Sequence[str]) -> list[Law]:
        """Describe the law of each arm."""
        laws = []
        for arm, law, n, losses in zip(arms, self.laws, self.n, self.losses, strict=True):
            residuals = evaluate_law(law, n) - losses
            error = float(np.sqrt(np.mean(residuals**2))) if len(n) > LEAST_SIZES else None
            laws.append(Law(arm, float(law[0]), math.exp(law[1]), float(law[2]), error))
        return laws


def _estimate_equals(arms: Sequence[str], sizes: Sequence[str], base: int, fits: Sequence[_FittedLaws]) -> list[Equal]:
    """Estimate the baseline that equals each other arm at each size."""
    equals = []
    for row, column in product(range(len(arms)), range(len(sizes))):
        if row == base:
            continue
        ratio = _jackknife(np.array([fit.ratios[row, column] for fit in fits]))
        interval = ratio.interval and (ratio.interval[0] - 1, ratio.interval[1] - 1)
        needed, trained = ratio.value * fits[0].over[row, column], fits[0].n[base]
        more = Estimate(ratio.value - 1, interval, ratio.error, ratio.freedom)
        equals.append(Equal(arms[row], sizes[column], more, bool(trained.min() <= needed <= trained.max())))
    return equals


def _jackknife(values: np.ndarray) -> Estimate:
    """Estimate a positive number, by its logarithm. values: from all seeds, then with each seed left out."""
    with np.errstate(divide="ignore", over="ignore"):
        center, *again = np.log(values)
        result = float(np.exp(center))
        if len(again) < 2 or not (np.isfinite(center) and np.isfinite(again).all()):
            return Estimate(result, None)
        count = len(again)
        error = math.sqrt((count - 1) / count * float(np.sum((again - np.mean(again)) ** 2)))
        half = float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
        low, high = np.exp([center - half, center + half])
    return Estimate(result, (float(low), float(high)), error, count - 1)


def fit_law(n: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Fit E, log A and a by least squares.

    n, loss: [sizes]. For a given exponent the law is linear in E and A, so only the exponent is searched. If
    losses do not fall with N, A is 0.
    """
    scale = float(np.exp(np.log(n).mean()))

    def solve(exponent: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Solve for exponents [...]: sums of squares, E and A·scale^-a, [...] each."""
        x = (n / scale) ** -np.asarray(exponent)[..., None]
        without = (x @ loss) / (x * x).sum(-1)
        centered = x - x.mean(-1, keepdims=True)
        slope = (centered @ loss) / np.maximum((centered * centered).sum(-1), 1e-300)
        e = loss.mean() - slope * x.mean(-1)
        alone = e < 0  # a loss below 0 is impossible
        e, amount = np.where(alone, 0.0, e), np.where(alone, without, slope)
        e, amount = np.where(amount > 0, e, loss.mean()), np.maximum(amount, 0.0)
        return ((e[..., None] + amount[..., None] * x - loss) ** 2).sum(-1), e, amount

    grid = np.geomspace(1e-3, 4.0, 161)
    start = int(np.argmin(solve(grid)[0]))
    low, high = grid[max(0, start - 1)], grid[min(len(grid) - 1, start + 1)]
    minimum = optimize.minimize_scalar(lambda a: float(solve(a)[0]), bounds=(low, high), options={"xatol": 1e-10})
    exponent = float(minimum.x)
    _, e, amount = solve(exponent)
    with np.errstate(divide="ignore"):
        return np.array([float(e), float(np.log(amount)) + exponent * math.log(scale), exponent])


def evaluate_law(law: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Evaluate a law's loss at N."""
    return law[0] + np.exp(law[1] - law[2] * np.log(n))


def invert_law(law: np.ndarray, loss: float) -> float:
    """Find the N at which the law has this loss; infinity if there is none, nan if the law is constant."""
    if math.isinf(law[1]):
        return math.nan
    return math.exp(min(700.0, (law[1] - math.log(loss - law[0])) / law[2])) if loss > law[0] else math.inf


def _choose_metric(records: Sequence[RunRecord]) -> str:
    """Choose nats per token if all have the same tokens, otherwise their metric. Accuracy has no scaling laws."""
    record = records[0]
    loss = "".join(["loss", *record.metric.partition("/")[1:]])  # the loss of the deciding domain, if there is one
    if same_tokens(records) and all(loss in run.held_out[-1].metrics for run in records):
        return loss
    if not record.lower_is_better:
        raise HeadwaterError(f"A scaling law needs losses, but {record.name!r} was measured only by {record.metric}.")
    return record.metric


def _count_n(record: RunRecord, axis: Axis) -> float:
    return float(record.parameters - record.embedding_parameters if axis == "parameters" else record.tokens)


def _find_axis(runs: Sequence[RunRecord]) -> Axis:
    axes: tuple[Axis, Axis] = ("parameters", "tokens")
    for axis in axes:
        if len({_count_n(run, axis) for run in runs}) > 1:
            return axis
    raise HeadwaterError("The sizes differ neither in parameters nor in tokens, so no law can be fitted.")


def _size_of(record: RunRecord) -> str:
    return (record.experiment.size or "") if record.experiment else ""
