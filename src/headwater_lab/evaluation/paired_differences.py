"""Figures over items, their standard errors, and the paired difference between two models on the same items.

Every figure here is a function f of a ratio r = Σ values / Σ weights over n items. To first order (the delta method)
item i moves it by f'(r)·(value_i − r·weight_i) / mean(weights), its influence; the figure's standard error is the
standard deviation of the influences over √n, and that of a difference between two models the same of their influences'
differences. For a mean of n scores this is s/√n, and for a difference the paired t-test. In an average of means,
each a stratum, item i's influence is relative to its own stratum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

# Each figure as a function of the ratio r, and its derivative. All but "mean" take log-likelihoods in nats.
FORMS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "mean": (lambda r: r, lambda r: 1.0),
    "loss": (lambda r: -r, lambda r: -1.0),
    "bits": (lambda r: -r / math.log(2), lambda r: -1 / math.log(2)),
    "perplexity": (lambda r: _exp(-r), lambda r: -_exp(-r)),
}


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


@dataclass(frozen=True)
class Items:
    """A model's scores on n items: values [n] over weights [n]. strata: index of each item's stratum [n], or None."""

    form: str
    values: np.ndarray
    weights: np.ndarray
    strata: np.ndarray | None = None

    @property
    def ratio(self) -> float:
        return float(self.values.sum() / self.weights.sum())

    @property
    def figure(self) -> float:
        return FORMS[self.form][0](self.ratio)

    @property
    def of_ratio(self) -> np.ndarray:
        """Compute each item's influence on the ratio, times n; [n]. NaN in a stratum of one item."""
        distances = self.values - self.ratio * self.weights
        if self.strata is not None:
            sizes = np.bincount(self.strata)
            distances -= (np.bincount(self.strata, distances) / sizes)[self.strata]
            with np.errstate(divide="ignore", invalid="ignore"):
                distances *= np.sqrt((1 - 1 / len(distances)) / (1 - 1 / sizes))[self.strata]
        return distances / self.weights.mean()

    @property
    def influences(self) -> np.ndarray:
        """Compute each item's influence on the figure, times n; [n]."""
        return FORMS[self.form][1](self.ratio) * self.of_ratio

    @property
    def stderr(self) -> float | None:
        return standard_error(self.influences)

    def is_binary(self, wrong: float) -> bool:
        """Whether every item is right, which scores 1 in centred accuracies too, or wrong."""
        return self.form == "mean" and bool(np.isin(self.values, (wrong, 1)).all() and (self.weights == 1).all())


def average_items(members: Sequence[Items]) -> Items:
    """Make items whose mean is the average of the members' means, whatever their sizes. Each member is a stratum."""
    if len(members) == 1:
        return members[0]
    size = sum(len(items.values) for items in members)
    strata: list[np.ndarray] = []
    for items in members:
        labels = np.zeros(len(items.values), int) if items.strata is None else items.strata
        strata.append(labels + (strata[-1].max() + 1 if strata else 0))
    values = np.concatenate([items.values * (size / len(members) / len(items.values)) for items in members])
    return Items("mean", values, np.ones(size), np.concatenate(strata))


def standard_error(influences: np.ndarray) -> float | None:
    """Compute the standard error; None for fewer than two items, or if it is not finite."""
    if len(influences) < 2 or not np.isfinite(influences).all():
        return None
    return float(influences.std(ddof=1) / math.sqrt(len(influences)))


@dataclass(frozen=True)
class Difference:
    """model minus baseline on the same items; p: two-sided, for no difference; test: the test that gave p."""

    model: str
    baseline: str
    value: float
    stderr: float | None
    p: float | None
    test: str


def compare_items(model: str, items: Items, baseline: str, reference: Items) -> Difference:
    """Test by McNemar's exact test if items are right or wrong, else by Student's t on their paired influences.

    The test uses the influences on the ratio, so loss and perplexity have the same p.
    """
    value = items.figure - reference.figure
    stderr = standard_error(items.influences - reference.influences)
    p: float | None
    wrong = min(0, items.values.min(), reference.values.min())
    if items.is_binary(wrong) and reference.is_binary(wrong):
        better, worse = int((items.values > reference.values).sum()), int((items.values < reference.values).sum())
        p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
        return Difference(model, baseline, value, stderr, p, "McNemar, exact")
    spread, between = standard_error(items.of_ratio - reference.of_ratio), abs(items.ratio - reference.ratio)
    if spread:
        p = float(2 * stats.t.sf(between / spread, len(items.values) - 1))
    else:
        p = None if spread is None else float(between == 0)
    return Difference(model, baseline, value, stderr, p, "paired t")
