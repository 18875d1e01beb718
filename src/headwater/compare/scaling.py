"""Loss against size: scaling laws fitted to saved trials, and what size of the baseline equals an arm.

    L(N) = E + A / N^a        (Hoffmann et al., arXiv 2203.15556, eq. 2, one of its two terms)
    L(N) = (C / N)^a          (Kaplan et al., arXiv 2001.08361, eq. 1.1: the same with E = 0)

N: parameters without embeddings (as Kaplan counts them), or training tokens, whichever the sizes differ in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize

from headwater.errors import HeadwaterError
from headwater.records import RunRecord
from headwater.seeding import number

Form = Literal["offset", "kaplan"]
Axis = Literal["parameters", "tokens"]
RESAMPLES = 1000
CONFIDENCE = 0.95
# What is fitted, by its form: E, log A, a.
FREE = {"offset": 3, "kaplan": 2}


@dataclass(frozen=True)
class Estimate:
    """A number and the interval that resampling seeds gives it (95 %, percentiles); None with one seed a size."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Law:
    """A fitted law: `e` is 0 in Kaplan's form, where C = A^(1/a). error: root mean square of what it misses."""

    arm: str
    form: Form
    e: Estimate
    a: Estimate
    exponent: Estimate
    error: float


@dataclass(frozen=True)
class Equal:
    """At one size: how much more of N the baseline needs, by its own law, to have the arm's loss; 0.1 is 10 % more.

    inside: whether that N is within the sizes that were trained; else it is an extrapolation.
    """

    arm: str
    size: str
    n: float
    loss: float
    more: Estimate
    inside: bool


@dataclass(frozen=True)
class Scaling:
    axis: Axis
    measure: str
    baseline: str
    points: dict[str, list[tuple[float, float]]]
    """By arm: (N, mean loss) at each size."""
    laws: list[Law]
    equals: list[Equal]

    def sentences(self) -> list[str]:
        """Equals a baseline with x % more parameters or tokens, in words."""
        what = "parameters (embeddings aside)" if self.axis == "parameters" else "training tokens"
        lines = []
        for one in self.equals:
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


def scaling_of(records: Sequence[RunRecord], form: Form = "offset", seed: int = 0) -> Scaling | None:
    """Fit every arm's losses against its size, from finished trials of three sizes or more; None if there are fewer.

    The law is fitted to the mean over seeds at each size (least squares; each size counts alike). Intervals: seeds are
    drawn anew with replacement, the same ones at all sizes and in all arms, and everything is fitted again. With as
    many sizes as constants the law goes through all points, and its intervals say nothing of its form.

    Raises `HeadwaterError` where the sizes differ in neither parameters nor tokens, or form `offset` has two sizes.
    """
    runs = [
        r for r in records if r.experiment and r.experiment.size and r.status == "finished" and r.result is not None
    ]
    sizes = list(dict.fromkeys(_size(r) for r in runs))
    if len(sizes) < FREE[form]:
        return None
    baseline = runs[0].experiment.baseline if runs[0].experiment else ""
    axis = _axis([r for r in runs if _arm(r) == baseline])
    table: dict[str, dict[str, dict[int, tuple[float, float]]]] = {}
    for r in runs:
        n = float(r.parameters - r.embeddings) if axis == "parameters" else float(r.tokens)
        loss = _loss(r)
        table.setdefault(_arm(r), {}).setdefault(_size(r), {})[r.seed] = (n, loss)
    table = {arm: by_size for arm, by_size in table.items() if len(by_size) == len(sizes)}
    if baseline not in table:
        return None
    common = set.intersection(*(set(seeds) for by_size in table.values() for seeds in by_size.values()))
    if not common:
        return None
    seeds = sorted(common)

    def points(arm: str, drawn: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        mean = [np.mean([table[arm][size][s] for s in drawn], axis=0) for size in sizes]
        n, loss = np.array(mean).T
        return n, loss

    def fits(drawn: Sequence[int]) -> dict[str, np.ndarray]:
        return {arm: fit(*points(arm, drawn), form) for arm in table}

    best = fits(seeds)
    random = np.random.default_rng(number("scaling", seed))
    again: list[tuple[dict[str, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]]] = []
    if len(seeds) > 1:
        for _ in range(RESAMPLES):
            drawn = [seeds[i] for i in random.integers(len(seeds), size=len(seeds))]
            again.append((fits(drawn), {arm: points(arm, drawn) for arm in table}))

    def estimate(value: float, of: Callable[[int], float]) -> Estimate:
        values = [of(i) for i in range(len(again))]
        if not values:
            return Estimate(value, None)
        # Infinities are answers too ("no size of the baseline has this loss"): percentiles that do not average them.
        low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
        return Estimate(value, (float(low), float(high)))

    laws = []
    equals = []
    for arm in table:
        at, losses = points(arm, seeds)
        laws.append(
            Law(
                arm,
                form,
                estimate(best[arm][0], lambda i, arm=arm: again[i][0][arm][0]),  # type: ignore[misc]
                estimate(math.exp(best[arm][1]), lambda i, arm=arm: math.exp(again[i][0][arm][1])),  # type: ignore[misc]
                estimate(best[arm][2], lambda i, arm=arm: again[i][0][arm][2]),  # type: ignore[misc]
                float(np.sqrt(np.mean((predict(best[arm], at) - losses) ** 2))),
            )
        )
        if arm == baseline:
            continue
        trained = points(baseline, seeds)[0]
        for place, size in enumerate(sizes):

            def more(i: int, arm: str = arm, place: int = place) -> float:
                law, drawn = again[i]
                return invert(law[baseline], drawn[arm][1][place]) / drawn[arm][0][place] - 1

            needed = invert(best[baseline], losses[place])
            equals.append(
                Equal(
                    arm,
                    size,
                    float(at[place]),
                    float(losses[place]),
                    estimate(needed / at[place] - 1, more),
                    bool(trained.min() <= needed <= trained.max()),
                )
            )
    shown = {arm: list(zip(*(x.tolist() for x in points(arm, seeds)), strict=True)) for arm in table}
    return Scaling(
        axis, "loss" if runs[0].measure == "bits_per_byte" else runs[0].measure, baseline, shown, laws, equals
    )


def fit(n: np.ndarray, loss: np.ndarray, form: Form) -> np.ndarray:
    """E, log A, a of the law that misses the points least, in squares; E = 0 in Kaplan's form.

    For a given exponent the law is linear in E and A, so that one number alone is searched for.
    """
    scale = float(np.exp(np.log(n).mean()))
    x = n / scale

    def solve(exponent: float) -> tuple[float, np.ndarray]:
        terms = np.stack([np.ones_like(x), x**-exponent], axis=1) if form == "offset" else x[:, None] ** -exponent
        found, *_ = np.linalg.lstsq(terms, loss, rcond=None)
        if form == "offset" and found[0] < 0:  # no loss is below nothing
            return solve_without(exponent)
        return float(np.sum((terms @ found - loss) ** 2)), found if form == "offset" else np.array([0.0, *found])

    def solve_without(exponent: float) -> tuple[float, np.ndarray]:
        terms = x[:, None] ** -exponent
        found, *_ = np.linalg.lstsq(terms, loss, rcond=None)
        return float(np.sum((terms @ found - loss) ** 2)), np.array([0.0, *found])

    grid = np.geomspace(1e-3, 4.0, 81)
    start = int(np.argmin([solve(exponent)[0] for exponent in grid]))
    low, high = grid[max(0, start - 1)], grid[min(len(grid) - 1, start + 1)]
    exponent = float(optimize.minimize_scalar(lambda a: solve(a)[0], bounds=(low, high), method="bounded").x)
    e, amount = solve(exponent)[1]
    return np.array([e, math.log(max(amount, 1e-300)) + exponent * math.log(scale), exponent])


def predict(law: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The law's loss at N."""
    return law[0] + np.exp(law[1] - law[2] * np.log(n))


def invert(law: np.ndarray, loss: float) -> float:
    """The N at which the law has this loss; infinity where none has."""
    return math.exp(min(700.0, (law[1] - math.log(loss - law[0])) / law[2])) if loss > law[0] else math.inf


def _loss(record: RunRecord) -> float:
    """Nats a token where there are such: laws of bits per byte are the same, laws of accuracies are none."""
    if not record.lower_is_better and "loss" not in record.held_out[-1].measures:
        raise HeadwaterError(f"A scaling law is of losses, and {record.name!r} was measured by {record.measure} alone.")
    return record.held_out[-1].measures["loss"]


def _axis(runs: Sequence[RunRecord]) -> Axis:
    if len({run.parameters for run in runs}) > 1:
        return "parameters"
    if len({run.tokens for run in runs}) > 1:
        return "tokens"
    raise HeadwaterError("The sizes differ neither in parameters nor in tokens, and a law is of loss against one.")


def _arm(record: RunRecord) -> str:
    return record.experiment.arm if record.experiment else ""


def _size(record: RunRecord) -> str:
    return (record.experiment.size or "") if record.experiment else ""
