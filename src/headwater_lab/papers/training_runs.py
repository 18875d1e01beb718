"""Training of what a table needs."""

from collections.abc import Callable

from headwater.util import extras
from headwater_lab.comparison.pool import OnChange, Outcome
from headwater_lab.comparison.running import list_jobs, run_comparison
from headwater_lab.papers.arms import RESTORED, finished_runs
from headwater_lab.papers.table import reads_models
from headwater_lab.papers.work import Work
from headwater_lab.training.records import RECORD

# Called before training with a name and the total steps; returns the function that receives progress.
Comparing = Callable[[str, int], OnChange]


def train_table(work: Work, workers: int | None, comparing: Comparing) -> list[Outcome]:
    """Train what is missing of comparisons on one device, or resume; return the outcomes of all trials.

    Raises `HeadwaterError` as training does, and `Interrupted` after Ctrl-C.
    """
    extras.check_extra("compare")
    outcomes = []
    for arm in work.trained_arms if reads_models(work.table) else []:
        for run in finished_runs(arm, work.trials).values():
            if run.is_restored:  # the table needs the model, which is missing
                (run.folder / RECORD).unlink()
                (run.folder / RESTORED).unlink()
    missing = {arm.recipe.name for arm, _ in work.list_missing()}
    for recipe, only in work.list_comparisons():
        if recipe.name in missing:
            steps = sum(job.steps for job in list_jobs(recipe, work.trials, only))
            outcomes += run_comparison(recipe, work.trials, workers, comparing(recipe.name, steps), only, shared=True)
    return outcomes
