"""The function `lab.compare` and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.plugins import outside
from headwater.plugins.registry import MECHANISMS, as_mapping
from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater.util.files import local
from headwater_lab.api.common import PathLike, Result, quiet
from headwater_lab.comparison import running
from headwater_lab.comparison.pool import OnChange, Outcome
from headwater_lab.comparison.trials import trials_of
from headwater_lab.recipe.schema import Recipe, read_recipe
from headwater_lab.reports import Comparison, cells, columns, comparisons, write_report
from headwater_lab.util.output_folder import occupied


@dataclass(frozen=True)
class Compared(Result):
    """Comparisons, one for each size; `failed`: the trials that failed."""

    folder: Path
    comparisons: list[Comparison] = field(repr=False)
    failed: list[Outcome]

    def table(self) -> list[dict[str, Any]]:
        """A row per arm (and size), as text, with the columns of the report's table."""
        return [
            _size_of(one) | dict(zip(["arm", *columns(one)[1:]], cells(summary, one), strict=True))
            for one in self.comparisons
            for summary in one.summaries
        ]

    def _numbers(self) -> list[dict[str, Any]]:
        """A row per finished or diverged run: its arm, size and seed, its cost, and its last metrics."""
        return [
            _size_of(one)
            | {
                "arm": run.experiment.arm,
                "seed": run.seed,
                "status": run.status,
                "parameters": run.parameters,
                run.unit: run.tokens,
                "flops": run.flops,
                "seconds": run.seconds,
            }
            | (run.held_out[-1].metrics if run.held_out else {})
            for one in self.comparisons
            for run in one.records
            if run.experiment is not None
        ]

    def evidence(self) -> list[dict[str, Any]]:
        """With `sequential: true`, a row per arm, size and look: arm, seeds, difference, low, high; else no rows."""
        return [
            _size_of(one)
            | {"arm": summary.arm, "seeds": look.pairs, "difference": look.mean}
            | dict(zip(("low", "high"), look.interval or (None, None), strict=True))
            for one in self.comparisons
            for summary in one.summaries
            for look in (summary.paired.looks if summary.paired is not None else ())
        ]

    def means(self) -> dict[str, float | None]:
        """The mean of the deciding metric of each arm, at the last size."""
        return {summary.arm: summary.mean for summary in self.comparisons[-1].summaries}

    def report(self) -> Path:
        """Write the HTML page of the folder, and return its path."""
        return write_report(self.folder)


def _size_of(comparison: Comparison) -> dict[str, str]:
    """The column of sizes, if there are any."""
    return {} if comparison.size is None else {"size": comparison.size}


@quiet()
def compare(
    recipe: Recipe | Mapping[str, Any] | PathLike,
    out: PathLike | None = None,
    *,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    on_change: OnChange | None = None,
    trust: Sequence[str] = (),
) -> Compared:
    """Train the arms of a recipe side by side, like `headwater compare`. Call it again to resume.

    Trials run in separate processes that do not import the caller, so a script needs no `__main__` guard.
    on_change: called with (job, steps done, "running" | "finished" | "failed"). trust: as in `train`.
    Raises `HeadwaterError`.
    """
    outside.trust(trust)
    extras.check("compare")
    loaded = read_recipe(recipe, overrides)
    if loaded.compare is None:
        raise HeadwaterError(f"The recipe {loaded.name!r} has no compare section; add one.")
    folder = local(out, "out") if out is not None else Path("runs") / loaded.name
    with occupied(folder):
        for trial in trials_of(loaded, folder):
            if unknown := as_mapping(trial.recipe.model.get("mechanisms") or {}).keys() & MECHANISMS.added.keys():
                raise HeadwaterError(
                    f"Mechanism {min(unknown)!r} was registered in this process, and a comparison trains in others; "
                    "put its class into a module, and name it as module:Class."
                )
        outcomes = running.compare(loaded, folder, workers, on_change)
    found = [one for one in comparisons(folder) if one.name == loaded.name]
    return Compared(folder, found, [outcome for outcome in outcomes if outcome.record is None])
