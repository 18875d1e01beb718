"""Loss against size: scaling laws fitted to saved trials, what they predict, and the baseline that equals an arm.

    L(N) = E + A / N^a        (Hoffmann et al., arXiv 2203.15556, eq. 2, one of its two terms)

N: parameters without embeddings, or training tokens, whichever differ between the sizes; training FLOPs where both do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from scipy import optimize

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.sequential import LEVEL
from headwater_lab.comparison.statistics import INCONCLUSIVE, is_too_wide, t_interval
from headwater_lab.training.records import RunRecord, same_tokens

Axis = Literal["parameters", "tokens", "flops"]
CONFIDENCE = 1 - LEVEL
# At least as many sizes as the law has constants: E, log A and a.
LEAST_SIZES = 3
# marin's E, in nats per token, which its laws over FLOPs share, so that only A and a are fitted.
PINNED_E = 1.6
# Fewest bytes of a token for which it is used. marin's tokenizer (Llama 3) has 4 to 5.
PINNED_BYTES = 3.0
# The exponents among which the best one is searched.
EXPONENTS = (1e-3, 4.0)
# Budgets whose tokens per parameter differ by less are the same, since steps are whole numbers. A ladder's differ by
# more: `ladder_section.LEAST_RATIO`.
SAME_BUDGET = 1.1


@dataclass(frozen=True)
class Estimate:
    """A number and its interval (95 %, see `fit_scaling`).

    interval: None with one seed, and if no sample has a finite number; (0, ∞) if some have and others not. error: the
    standard error of its logarithm. freedom: degrees of freedom of its t.
    """

    value: float
    interval: tuple[float, float] | None
    error: float | None = None
    freedom: int = 0

    def map_values(self, function: Callable[[float], float]) -> Estimate:
        """Apply an increasing function to the number and its interval."""
        interval = self.interval and (function(self.interval[0]), function(self.interval[1]))
        return replace(self, value=function(self.value), interval=interval)


@dataclass(frozen=True)
class Law:
    """A fitted law; error: root mean square of the residuals, None for as many sizes as constants."""

    arm: str
    e: float
    a: float
    exponent: float
    error: float | None


@dataclass(frozen=True)
class Prediction:
    """The loss of an arm at N, by its law; pinned: by the law whose E is `PINNED_E`.

    measured: the mean loss there, which is not in the fit, or None. Its own spread is then in the interval.
    """

    arm: str
    n: float
    pinned: bool
    loss: Estimate
    measured: float | None = None


@dataclass(frozen=True)
class EquivalentSize:
    """The additional N that the baseline needs, by its own law, to reach an arm's loss at one size; 0.1 is 10 % more.

    More than the arm's N, or if N is tokens, than the baseline's at this size. These differ where arms cost the same
    time, or FLOPs; as the baseline's tokens go with its time, `extra` is then also how much longer it has to train.
    extra: its error is the error of log(1 + extra).
    inside: whether that N is within the trained sizes; otherwise it is extrapolated.
    """

    arm: str
    size: str
    extra: Estimate
    inside: bool


@dataclass(frozen=True)
class Scaling:
    axis: Axis
    metric: str
    baseline: str
    points: dict[str, list[tuple[float, float]]]
    """By arm: (N, mean loss) at each size."""
    laws: list[Law]
    equivalent_sizes: list[EquivalentSize]
    unit: str = "tokens"
    """What the models were trained on, tokens or images."""
    sizes: Sequence[str] = ()
    seeds: int = 0
    """How many seeds all arms have at all sizes; other runs are left out."""
    pinned_laws: Sequence[Law] = ()
    """Laws over FLOPs with E = `PINNED_E`; none where `unpinned` says why."""
    unpinned: str = ""
    predictions: Sequence[Prediction] = ()
    """Of each law the largest size, which is left out of the fit if enough others remain, then the `projections`."""
    diverged: Sequence[str] = ()
    """Arms without a law, because a run diverged."""

    @property
    def size_unit(self) -> str:
        """What N counts."""
        units = {"parameters": "parameters (embeddings aside)", "flops": "training FLOPs"}
        return units.get(self.axis, f"training {self.unit}")

    def sentences(self) -> list[str]:
        """Describe the size of the baseline that equals each arm: "equals a baseline with x % more parameters"."""
        lines = [f"{size.arm}, {size.size}: {self._describe(size)}." for size in self.equivalent_sizes]
        return lines + [f"{arm} has no law, because a run diverged." for arm in self.diverged]

    def _describe(self, size: EquivalentSize) -> str:
        estimate, unit = size.extra, self.size_unit
        if math.isnan(estimate.value):
            return f"the losses of {self.baseline} do not fall with its size"
        if is_too_wide(estimate.interval, shift=1):
            return f"the {unit} of a {self.baseline} with its loss are {INCONCLUSIVE}"
        if not math.isfinite(estimate.value):
            return f"no {self.baseline} of any size reaches its loss, by the fitted law"
        percent = f"{abs(estimate.value):.1%} {'more' if estimate.value >= 0 else 'fewer'}"
        interval = "" if estimate.interval is None else " [{:+.1%}, {:+.1%}]".format(*estimate.interval)
        extrapolated = "" if size.inside else "; beyond the sizes trained"
        return f"equals a {self.baseline} with {percent} {unit}{interval}{extrapolated}"


class LawSizes(NamedTuple):
    """Sizes to which one law can be fitted. label: what they share, if it is not all sizes."""

    label: str
    sizes: list[str]


def group_sizes(records: Sequence[RunRecord]) -> list[LawSizes]:
    """Group the sizes of a ladder by tokens per parameter of the baseline, then by its parameters.

    All sizes are one group if they do not differ in both. A group may have too few sizes for a law.
    """
    runs = _choose_baseline_runs([run for run in records if run.status == "finished" and run.size])
    points = {run.size: (count_n(run, "parameters"), count_n(run, "tokens")) for run in runs}
    points = dict(sorted(points.items(), key=lambda item: item[1]))
    if any(len(set(column)) < 2 for column in zip(*points.values(), strict=True)):
        return [LawSizes("", list(points))]
    ratios = {size: tokens / max(n, 1.0) for size, (n, tokens) in points.items()}
    by_ratio = [sorted(sizes, key=[*points].index) for sizes in _split_by_ratio(ratios)]
    groups = [LawSizes(f"{float(f'{ratios[sizes[-1]]:.2g}'):g} tokens per parameter", sizes) for sizes in by_ratio]
    for n in sorted({n for n, _ in points.values()}):
        groups.append(LawSizes(f"{int(n):,} parameters", [size for size in points if points[size][0] == n]))
    return groups


def _choose_baseline_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Choose the runs of the baseline, at all sizes."""
    baseline = runs[0].experiment.baseline if runs and runs[0].experiment else ""
    return [run for run in runs if run.arm == baseline]


def _split_by_ratio(ratios: Mapping[str, float]) -> list[list[str]]:
    """Split sizes where the next larger tokens per parameter are another budget."""
    clusters: list[list[str]] = []
    for size in sorted(ratios, key=lambda size: ratios[size]):
        if clusters and ratios[size] <= SAME_BUDGET * ratios[clusters[-1][0]]:
            clusters[-1].append(size)
        else:
            clusters.append([size])
    return clusters


def fit_scaling(records: Sequence[RunRecord], projections: Sequence[float] = ()) -> Scaling | None:
    """Fit every arm's losses against its size, from finished trials.

    The law is fitted to the mean over seeds at each size (least squares; each size counts alike). Intervals of equal
    sizes: each seed is left out in turn, at all sizes and in all arms, and everything is fitted again (the jackknife of
    the logarithm), with Student's t for that number of seeds. They cover the seeds, not the law's form: with as many
    sizes as constants it passes through all points.

    projections: FLOPs at which laws over FLOPs predict the losses.

    Sizes are the baseline's; arms that lack one, or diverged in a run, are left out, and so are seeds that are missing
    for any arm or size. None if there are fewer sizes than constants.

    Laws are fitted to the loss in nats per token, or to bits per byte where tokenizers differ.

    Raises `HeadwaterError` where too few sizes differ in parameters or tokens, no seed is left, runs have no loss, or
    one of the baseline diverged.
    """
    runs, diverged = _split_diverged(records)
    of_baseline = _choose_baseline_runs(runs)
    sizes = list(dict.fromkeys(record.size for record in of_baseline))
    if len(sizes) < LEAST_SIZES:
        return None
    axis, metric = find_axis(of_baseline), choose_metric(runs)
    arms, n, losses = _stack_losses(runs, sizes, axis, metric)
    baseline = of_baseline[0].arm
    if baseline not in arms or not losses.size:
        raise HeadwaterError("No law can be fitted: no seed has finished with all arms and sizes.")
    base = arms.index(baseline)
    _check_sizes(n.mean(2)[base], axis)
    seeds = losses.shape[2]
    n, losses = average_samples(n, 2), average_samples(losses, 2)
    over = np.broadcast_to(n[:, [base]], n.shape) if axis == "tokens" else n
    sizes_and_losses = zip(n[0].tolist(), losses[0].tolist(), strict=True)
    points = {arm: list(zip(*row, strict=True)) for arm, row in zip(arms, sizes_and_losses, strict=True)}
    unpinned = explain_unpinned(runs, metric)
    projections = projections if axis == "flops" else ()
    is_pinned = axis == "flops" and not unpinned
    predictions = _predict_losses(arms, n, losses, projections, None)
    if is_pinned:
        predictions += _predict_losses(arms, n, losses, projections, PINNED_E)
    return Scaling(
        axis,
        metric,
        baseline,
        points,
        laws=_describe_laws(arms, n[0], losses[0], None),
        equivalent_sizes=_estimate_equivalent_sizes(arms, sizes, base, n, over, losses),
        unit=runs[0].unit,
        sizes=sizes,
        seeds=seeds,
        pinned_laws=_describe_laws(arms, n[0], losses[0], PINNED_E) if is_pinned else [],
        unpinned=unpinned,
        predictions=predictions,
        diverged=diverged,
    )


def _split_diverged(records: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """Return the finished runs of arms in which none diverged, and the other arms.

    Raises `HeadwaterError` if the baseline is one of these.
    """
    diverged = list(dict.fromkeys(run.arm for run in records if run.status == "diverged" and run.size))
    if any(run.arm in diverged for run in _choose_baseline_runs(records)):
        raise HeadwaterError("No law can be fitted: a run of the baseline diverged.")
    finished = [run for run in records if run.status == "finished" and run.held_out and run.size]
    return [run for run in finished if run.arm not in diverged], diverged


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
    points = {(run.arm, run.size, run.seed): (count_n(run, axis), run.held_out[-1].metrics[metric]) for run in finite}
    pairs = {(arm, size): None for arm, size, _ in points}
    tried = dict.fromkeys(map(attrgetter("arm"), finite))
    arms = [arm for arm in tried if all((arm, size) in pairs for size in sizes)]
    seeds = sorted({seed for *_, seed in points})
    seeds = [seed for seed in seeds if all((arm, size, seed) in points for arm, size in product(arms, sizes))]
    cells = np.array([[[points[arm, size, seed] for seed in seeds] for size in sizes] for arm in arms])
    n, losses = np.moveaxis(cells.reshape(len(arms), len(sizes), len(seeds), 2), -1, 0)
    return arms, n, losses


def average_samples(values: np.ndarray, axis: int) -> np.ndarray:
    """Average over seeds, along an axis: over all of them, then without each: [samples, ...]."""
    seeds = values.shape[axis]
    without = [np.delete(values, left_out, axis) for left_out in range(seeds) if seeds > 1]
    return np.array([sample.mean(axis) for sample in (values, *without)])


def _describe_laws(arms: Sequence[str], n: np.ndarray, losses: np.ndarray, pinned_e: float | None) -> list[Law]:
    """Fit and describe the law of each arm. n, losses: [arms, sizes]. pinned_e: E, if it is not fitted."""
    laws = []
    for arm, arm_n, arm_losses in zip(arms, n, losses, strict=True):
        law = fit_law(arm_n, arm_losses, pinned_e)
        residuals = evaluate_law(law, arm_n) - arm_losses
        error = float(np.sqrt(np.mean(residuals**2))) if len(arm_n) > _count_constants(pinned_e) else None
        laws.append(Law(arm, float(law[0]), math.exp(law[1]), float(law[2]), error))
    return laws


def _count_constants(pinned_e: float | None) -> int:
    return LEAST_SIZES - (pinned_e is not None)


def explain_unpinned(runs: Sequence[RunRecord], metric: str) -> str:
    """Explain why marin's constants, of nats for subwords of text, do not hold for these runs; "" if they may."""
    if not metric.startswith("loss") or runs[0].unit != "tokens":
        return "not in nats per token"
    ends = [run.held_out[-1].metrics for run in runs]
    bits = metric.replace("loss", "bits_per_byte")
    if not all(end.get(bits) for end in ends):
        return "not of text"
    if min(end[metric] for end in ends) <= PINNED_E:
        return f"loss below {PINNED_E}"
    length = min(end[metric] / (end[bits] * math.log(2)) for end in ends)
    return f"only {length:.1f} bytes a token" if length < PINNED_BYTES else ""


def _predict_losses(
    arms: Sequence[str], n: np.ndarray, losses: np.ndarray, projections: Sequence[float], pinned_e: float | None
) -> list[Prediction]:
    """Predict each arm's loss at its largest size from the others, if they are enough, and at each projection.

    n, losses: [samples, arms, sizes].
    """
    pinned = pinned_e is not None
    predictions = []
    for row, arm in enumerate(arms):
        arm_n, arm_losses = n[:, row], losses[:, row]
        if arm_n.shape[1] > _count_constants(pinned_e):
            *smaller, largest = np.argsort(arm_n[0])
            laws = [fit_law(*pair, pinned_e) for pair in zip(arm_n[:, smaller], arm_losses[:, smaller], strict=True)]
            values = [evaluate_law(law, size) for law, size in zip(laws, arm_n[:, largest], strict=True)]
            # The interval of the ratio to the measured loss, which has its own spread, placed around the prediction.
            measured = float(arm_losses[0, largest])
            loss = estimate_ratio(np.array(values) / arm_losses[:, largest]).map_values(measured.__mul__)
            predictions.append(Prediction(arm, float(arm_n[0, largest]), pinned, loss, measured))
        for flops in projections:
            laws = [fit_law(*pair, pinned_e) for pair in zip(arm_n, arm_losses, strict=True)]
            loss = estimate_ratio(np.array([evaluate_law(law, flops) for law in laws]))
            predictions.append(Prediction(arm, flops, pinned, loss))
    return predictions


def _estimate_equivalent_sizes(
    arms: Sequence[str], sizes: Sequence[str], base: int, n: np.ndarray, over: np.ndarray, losses: np.ndarray
) -> list[EquivalentSize]:
    """Estimate the baseline that equals each other arm at each size.

    n, over, losses: [samples, arms, sizes]. over: the N that the baseline's is compared with, see `EquivalentSize`.
    """
    laws = [fit_law(*pair) for pair in zip(n[:, base], losses[:, base], strict=True)]
    results = []
    for row, column in product(range(len(arms)), range(len(sizes))):
        if row == base:
            continue
        needed = [invert_law(law, loss) for law, loss in zip(laws, losses[:, row, column], strict=True)]
        ratio = estimate_ratio(np.array(needed) / over[:, row, column])
        is_inside = bool(n[0, base].min() <= ratio.value * over[0, row, column] <= n[0, base].max())
        results.append(EquivalentSize(arms[row], sizes[column], ratio.map_values(lambda value: value - 1), is_inside))
    return results


def estimate_ratio(values: np.ndarray) -> Estimate:
    """Estimate a positive number by the jackknife of its logarithm.

    values: from all seeds, then with each seed left out.
    """
    with np.errstate(divide="ignore", over="ignore"):
        center, *again = np.log(values)
        result = float(np.exp(center))
        if len(again) < 2 or not np.isfinite([center, *again]).any():
            return Estimate(result, None)
        if not np.isfinite([center, *again]).all():
            return Estimate(result, (0.0, math.inf))
        count = len(again)
        error = math.sqrt((count - 1) / count * float(np.sum((again - np.mean(again)) ** 2)))
        low, high = np.exp(t_interval(center, error, count - 1, LEVEL))
    return Estimate(result, (float(low), float(high)), error, count - 1)


def fit_law(n: np.ndarray, loss: np.ndarray, pinned_e: float | None = None) -> np.ndarray:
    """Fit E, log A and a by least squares. pinned_e: E, if it is not fitted.

    n, loss: [sizes]. For a given exponent the law is linear in E and A, so only the exponent is searched. If
    losses do not fall with N, A is 0.
    """
    scale = float(np.exp(np.log(n).mean()))
    lowest = 0.0 if pinned_e is None else pinned_e

    def solve(exponent: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Solve for exponents [...]: sums of squares, E and A·scale^-a, [...] each."""
        x = (n / scale) ** -np.asarray(exponent)[..., None]
        without = (x @ (loss - lowest)) / (x * x).sum(-1)
        centered = x - x.mean(-1, keepdims=True)
        slope = (centered @ loss) / np.maximum((centered * centered).sum(-1), 1e-300)
        e = loss.mean() - slope * x.mean(-1)
        alone = (e < 0) | (pinned_e is not None)  # a loss below 0 is impossible
        e, amount = np.where(alone, lowest, e), np.where(alone, without, slope)
        e, amount = np.where(amount > 0, e, loss.mean()), np.maximum(amount, 0.0)
        return ((e[..., None] + amount[..., None] * x - loss) ** 2).sum(-1), e, amount

    grid = np.geomspace(*EXPONENTS, 161)
    start = int(np.argmin(solve(grid)[0]))
    low, high = grid[max(0, start - 1)], grid[min(len(grid) - 1, start + 1)]
    minimum = optimize.minimize_scalar(lambda a: float(solve(a)[0]), bounds=(low, high), options={"xatol": 1e-10})
    exponent = float(minimum.x)
    _, e, amount = solve(exponent)
    with np.errstate(divide="ignore"):
        return np.array([float(e), float(np.log(amount)) + exponent * math.log(scale), exponent])


def evaluate_law(law: np.ndarray, n: np.ndarray | float) -> np.ndarray:
    """Evaluate a law's loss at N."""
    return law[0] + np.exp(law[1] - law[2] * np.log(n))


def invert_law(law: np.ndarray, loss: float) -> float:
    """Find the N at which the law has this loss; infinity if there is none, nan if the law is constant."""
    if math.isinf(law[1]):
        return math.nan
    return math.exp(min(700.0, (law[1] - math.log(loss - law[0])) / law[2])) if loss > law[0] else math.inf


def choose_metric(records: Sequence[RunRecord]) -> str:
    """Choose nats per token if all have the same tokens, otherwise their metric. Accuracy has no scaling laws."""
    record = records[0]
    loss = "".join(["loss", *record.metric.partition("/")[1:]])  # the loss of the deciding domain, if there is one
    if same_tokens(records) and all(loss in run.held_out[-1].metrics for run in records):
        return loss
    if not record.lower_is_better:
        raise HeadwaterError(f"A scaling law needs losses, but {record.name!r} was measured only by {record.metric}.")
    return record.metric


def count_n(record: RunRecord, axis: Axis) -> float:
    """Count a run's N."""
    if axis == "flops":
        return record.total_flops
    return float(record.parameters - record.embedding_parameters if axis == "parameters" else record.tokens)


def find_axis(runs: Sequence[RunRecord]) -> Axis:
    axes: tuple[Axis, Axis] = ("parameters", "tokens")
    differing = [axis for axis in axes if len({count_n(run, axis) for run in runs}) > 1]
    if not differing:
        raise HeadwaterError("The sizes differ neither in parameters nor in tokens, so no law can be fitted.")
    return differing[0] if len(differing) == 1 else "flops"
