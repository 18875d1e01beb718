"""Comparisons as rows of numbers, for data frames and files: None where there is no number."""

from collections.abc import Sequence
from typing import Any

from headwater_lab.comparison.scaling import CONFIDENCE, PINNED_E, Scaling
from headwater_lab.comparison.speedup import Speedup
from headwater_lab.reports.comparison import Comparison
from headwater_lab.training.records import RunRecord


def list_arms(comparison: Comparison) -> list[dict[str, Any]]:
    """List the arms with their results: a row for each, in the order of the report's table.

    metric: the deciding one. seeds: finished runs. mean, sd: of the metric, over them. difference: from the baseline,
    mean over the seeds that both have, with the interval from low to high, which has the confidence `level`; p:
    uncorrected. tokens (or images), flops, seconds: of a run. cache_bytes_per_token: in fp32.
    """
    rows = []
    for summary in comparison.summaries:
        paired = summary.paired
        low, high = (paired and paired.interval) or (None, None)
        finished = comparison.finished(summary.arm)
        rows.append(
            _identify(comparison)
            | {
                "arm": summary.arm,
                "seeds": summary.runs,
                "diverged": summary.diverged,
                "mean": summary.mean,
                "sd": summary.spread,
                "difference": summary.difference,
                "low": low,
                "high": high,
                "level": paired and 1 - paired.level,
                "p": paired and paired.p,
                "verdict": summary.verdict(comparison.lower_is_better),
                "more_seeds": paired and paired.more_pairs,
                "parameters": summary.parameters,
                comparison.trained_on: summary.tokens,
                "flops": summary.flops,
                "seconds": sum(run.seconds for run in finished) / len(finished) if finished else None,
                f"{comparison.trained_on}_per_second": summary.tokens_per_second,
                "cache_bytes_per_token": summary.cache_bytes_per_token,
                "learning_rate": summary.learning_rate,
            }
        )
    return rows


def list_runs(comparison: Comparison) -> list[dict[str, Any]]:
    """List the finished and diverged runs: a row for each, with its cost and its last metrics."""
    return [
        _identify_run(comparison, run)
        | {"status": run.status, "parameters": run.parameters, run.unit: run.tokens, "flops": run.flops}
        | {"seconds": run.seconds}
        | (run.held_out[-1].metrics if run.held_out else {})
        for run in comparison.records
    ]


def list_evaluations(comparison: Comparison) -> list[dict[str, Any]]:
    """List the evaluations of all runs: a row for each, with its step, the cost so far, and its metrics."""
    return [
        _identify_run(comparison, run)
        | {"step": point.step, run.unit: point.tokens, "flops": point.flops}
        | point.metrics
        for run in comparison.records
        for point in run.held_out
    ]


def list_laws(scaling: Scaling, comparison: Comparison) -> list[dict[str, Any]]:
    """List the points of the scaling law's figure: a row for each arm and size.

    Its size N (parameters without embeddings, or tokens) and mean loss, the arm's law e + a / N^exponent, and by how
    much more N the baseline reaches that loss, from low to high with the confidence `level`.
    """
    equivalents = {(equal.arm, equal.size): equal for equal in scaling.equivalent_sizes}
    rows = []
    for law in scaling.laws:
        for size, (n, loss) in zip(scaling.sizes, scaling.points[law.arm], strict=True):
            equal = equivalents.get((law.arm, size))
            low, high = (equal and equal.extra.interval) or (None, None)
            rows.append(
                _identify(comparison)
                | {"size": size, "metric": scaling.metric, "arm": law.arm, scaling.axis: n, "loss": loss}
                | {"e": law.e, "a": law.a, "exponent": law.exponent, "error": law.error}
                | {"more": equal and equal.extra.value, "low": low, "high": high, "level": equal and CONFIDENCE}
            )
    return rows


def list_predictions(scaling: Scaling, comparison: Comparison) -> list[dict[str, Any]]:
    """List what laws predict: a row for each arm and N, which is the largest size where a loss was measured.

    e: "fitted" or its pinned value. loss: the prediction, from low to high with the confidence `level`.
    """
    rows: list[dict[str, Any]] = []
    for prediction in scaling.predictions:
        low, high = prediction.loss.interval or (None, None)
        rows.append(
            {"comparison": comparison.name, "size": "" if prediction.measured is None else "largest"}
            | {"metric": scaling.metric, "arm": prediction.arm}
            | {scaling.axis: prediction.n, "e": PINNED_E if prediction.pinned else "fitted"}
            | {"loss": prediction.loss.value, "low": low, "high": high, "level": CONFIDENCE}
            | {"measured": prediction.measured}
        )
    return rows


def list_speedups(speedups: Sequence[Speedup], comparison: Comparison) -> list[dict[str, Any]]:
    """List speedups: a row for each arm, size, kind of constants and measure, or the reason why there is none."""
    rows: list[dict[str, Any]] = []
    for speedup in speedups:
        row: dict[str, Any] = {"comparison": comparison.name, "size": speedup.size, "arm": speedup.arm}
        row |= {"constants": speedup.constants, "seeds": speedup.seeds}
        for measure, estimate in speedup.values.items():
            low, high = estimate.interval or (None, None)
            rows.append(row | {"measure": measure, "speedup": estimate.value, "low": low, "high": high})
        if speedup.missing:
            rows.append(row | {"missing": speedup.missing})
    return rows


# The rows that a table of results can have, by what each stands for.
ROWS = {"arm": list_arms, "run": list_runs, "evaluation": list_evaluations}


def _identify(comparison: Comparison) -> dict[str, Any]:
    return {"comparison": comparison.name, "size": comparison.size or "", "metric": comparison.metric}


def _identify_run(comparison: Comparison, run: RunRecord) -> dict[str, Any]:
    return _identify(comparison) | {"arm": run.arm, "seed": run.seed}
