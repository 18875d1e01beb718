"""Effective speedup: the compute and time that the baseline needs for an arm's loss, over the arm's.

    f = ((L_base - E) / (L_arm - E))^(1/a)

f is how many times the baseline's compute at a size reaches the arm's loss, by a law L = E + A / C^a through the
baseline's point. E and a are fitted to the baseline's sizes, or pinned to marin's, whose parameters and tokens grow
together. So f is of compute, whichever of an arm's costs it is compared with. With tokens D, FLOPs C, tokens/s v:

    equal tokens     f·D_base / D_arm                      equal time   (f·D_base / v_base) / (D_arm / v_arm)
    equal FLOPs      f·C_base / C_arm                      effective    (f·C_base / v_base) / (C_arm / v_arm)

The last is marin's, whose arms have equal FLOPs. It differs from equal time where FLOPs per token do.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from headwater_lab.comparison.scaling import (
    LEAST_SIZES,
    PINNED_E,
    Estimate,
    average_samples,
    choose_metric,
    estimate_ratio,
    explain_unpinned,
    fit_law,
    group_sizes,
)
from headwater_lab.comparison.statistics import finished_runs
from headwater_lab.training.records import RunRecord
from headwater_lab.util.terminal import counted

# marin's exponent of FLOPs: its law is L = 1.6 + A / C^0.0941.
PINNED_EXPONENT = 0.0941

Constants = Literal["pinned", "fitted"]
CONSTANTS: tuple[Constants, ...] = ("pinned", "fitted")
MEASURES = ("equal tokens", "equal FLOPs", "equal time", "effective")
# By seed: loss, tokens, FLOPs and tokens/s of a run.
Points = Mapping[int, np.ndarray]


@dataclass(frozen=True)
class Speedup:
    """The speedup of an arm at a size, from `seeds` seeds, with E and the exponent of `constants`.

    values: by measure, of `MEASURES`; above 1 the arm is faster. No times of runs on different machines.
    inside: whether the compute that the baseline needs is within the sizes that the law is fitted to.
    missing: why there are no values.
    """

    arm: str
    size: str
    constants: Constants
    seeds: int = 0
    values: Mapping[str, Estimate] = field(default_factory=dict)
    inside: bool = True
    missing: str = ""


def measure_speedups(
    records: Sequence[RunRecord], baseline: str, times: Mapping[str, Mapping[str, float]] | None = None
) -> list[Speedup]:
    """Measure the speedup of every arm at every size, with both kinds of constants.

    The fitted constants are of the sizes with as many tokens per parameter, or else with as many parameters.
    Seeds are those that the arm and the baseline share, the latter at all of these sizes. Intervals (95 %, each alone)
    leave out each in turn, as in `fit_scaling`. None where a run of either diverged. times: by size and arm, the time
    per token over the baseline's; without it, from the runs.
    """
    diverged = Counter((run.arm, run.size) for run in records if run.status == "diverged")
    records = [run for run in records if run.status == "finished" and run.held_out]
    if not records:
        return []
    metric = choose_metric(records)
    runs = _group_runs(records)
    points = {key: _list_points(arms.values(), metric) for key, arms in runs.items()}
    ladders = _find_ladders(records, points, baseline)
    speedups = []
    for arm, size in points:
        if arm == baseline or (baseline, size) not in points:
            continue
        pair = points[arm, size], points[baseline, size]
        time = (times or {}).get(size, {}).get(arm) or _check_machines([runs[arm, size], runs[baseline, size]])
        lost = _describe_lost(diverged[arm, size] + diverged[baseline, size])
        missing = lost or explain_unpinned([*runs[arm, size].values(), *runs[baseline, size].values()], metric)
        speedups.append(_fill_in(Speedup(arm, size, "pinned", missing=missing), *pair, [], time))
        ladder = ladders.get(size, [])
        missing = lost or _explain_unfitted(ladder)
        speedups.append(_fill_in(Speedup(arm, size, "fitted", missing=missing), *pair, ladder, time))
    return speedups


def _describe_lost(diverged: int) -> str:
    return f"{counted(diverged, 'run')} diverged" if diverged else ""


def _group_runs(records: Sequence[RunRecord]) -> dict[tuple[str, str], dict[int, RunRecord]]:
    """Group runs by arm and size, then by seed."""
    by_size = {size: [run for run in records if run.size == size] for size in {run.size: None for run in records}}
    return {(arm, size): arms for size in by_size for arm, arms in finished_runs(by_size[size]).items()}


def _list_points(runs: Iterable[RunRecord], metric: str) -> Points:
    ends = [(run, run.held_out[-1].metrics[metric]) for run in runs]
    return {
        run.seed: np.array([loss, run.tokens, run.total_flops, run.tokens_per_second])
        for run, loss in ends
        if math.isfinite(loss)
    }


def _find_ladders(
    records: Sequence[RunRecord], points: Mapping[tuple[str, str], Points], baseline: str
) -> dict[str, list[Points]]:
    """List by size the baseline's points at all sizes that share a law with it."""
    ladders: dict[str, list[Points]] = {}
    for _, sizes in group_sizes(records):
        if len(sizes) >= LEAST_SIZES:
            ladders = {key: [points.get((baseline, size), {}) for size in sizes] for key in sizes} | ladders
    return ladders


def _check_machines(runs: Sequence[Mapping[int, RunRecord]]) -> float | None:
    """Return nan, for a time that is unknown, if runs were on several machines."""
    environments = [run.environment for by_seed in runs for run in by_seed.values()]
    machines = {(e.device_name, e.threads, e.world_size, e.compiled) for e in environments}
    return math.nan if len(machines) > 1 else None


def _explain_unfitted(ladder: Sequence[Points]) -> str:
    """Explain why no law over FLOPs can be fitted to these sizes of the baseline; "" if it can."""
    sizes = np.array([next(iter(points.values())) for points in ladder if points]).reshape(-1, 4)
    return "" if len({*sizes[:, 2]}) >= LEAST_SIZES else f"needs {LEAST_SIZES} budgets"


def _fill_in(speedup: Speedup, arm: Points, base: Points, ladder: Sequence[Points], time: float | None) -> Speedup:
    """Fill in the values, or why there are none. time: nan if unknown, None for that of the runs."""
    seeds = sorted(set(arm).intersection(base, *ladder))
    if speedup.missing or not seeds:
        return replace(speedup, missing=speedup.missing or "no seed in common")
    runs = np.array([[points[seed] for seed in seeds] for points in (arm, base, *ladder)])
    samples = average_samples(runs, 1)
    rows = np.array([_compare(*sample, time=time) for sample in samples])
    if math.isnan(rows[0][0]):
        return replace(speedup, missing="the baseline's losses do not fall")
    if math.isinf(rows[0][0]):
        return replace(speedup, missing="no baseline reaches its loss")
    columns = dict(zip(MEASURES, rows.T, strict=True))
    values = {name: estimate_ratio(column) for name, column in columns.items() if not np.isnan(column[0])}
    needed, trained = rows[0][1] * samples[0, 0, 2], samples[0, 2:, 2]
    inside = not trained.size or bool(trained.min() <= needed <= trained.max())
    return replace(speedup, seeds=len(seeds), values=values, inside=inside)


def _compare(arm: np.ndarray, base: np.ndarray, *sizes: np.ndarray, time: float | None) -> np.ndarray:
    """Compute the speedup by each of `MEASURES` from means over seeds."""
    factor = _find_factor(arm[0], base[0], np.array(sizes))
    with np.errstate(invalid="ignore"):  # runs without times
        _, tokens, flops, speed = base / arm
    faster = 1 / (speed if time is None else time)
    return factor * np.array([tokens, flops, tokens * faster, flops * faster])


def _find_factor(loss: float, base_loss: float, sizes: np.ndarray) -> float:
    """Find how many times the baseline's compute reaches the arm's loss: infinite if none does, nan without a law.

    sizes: [sizes, point], means of the baseline, whose law is fitted; none for pinned constants.
    """
    e, exponent = PINNED_E, PINNED_EXPONENT
    if len(sizes):
        e, log_a, exponent = fit_law(sizes[:, 2], sizes[:, 0])
        if math.isinf(log_a):
            return math.nan
    if min(loss, base_loss) <= e:
        return math.inf
    return math.exp(min(700.0, math.log((base_loss - e) / (loss - e)) / exponent))
