"""Training of what a table needs."""

from collections.abc import Callable

from headwater.util import extras
from headwater_lab.comparison.pool import OnChange, Outcome
from headwater_lab.comparison.running import list_jobs, run_comparison
from headwater_lab.papers.arms import RESTORED, finished_runs
from headwater_lab.papers.kept import check_restored
from headwater_lab.papers.table import reads_models
from headwater_lab.papers.work import Work
from headwater_lab.training.journal import OnEvent
from headwater_lab.training.records import RECORD
from headwater_lab.training.stages import is_finished, list_stages, train_stages

# Called before training with a name and the total steps; returns the function that receives progress.
Comparing = Callable[[str, int], OnChange]
TrainingCallback = Callable[[str, int], OnEvent]


def train_table(work: Work, workers: int | None, comparing: Comparing, training: TrainingCallback) -> list[Outcome]:
    """Train what is missing, if one device is enough; returns the outcomes of all trials of comparisons.

    Call it again to resume. Raises `HeadwaterError` as training does, and `Interrupted` after Ctrl-C.
    """
    extras.check_extra("compare")
    outcomes = []
    for arm in work.trained_arms if reads_models(work.table) else []:
        for run in finished_runs(arm, work.trials).values():
            if run.is_restored:  # its model is needed, and missing
                (run.folder / RECORD).unlink()
                (run.folder / RESTORED).unlink()
    missing = {arm.recipe.name for arm, _ in work.list_missing()}
    if missing:
        check_restored(work)
    for recipe, only in work.list_comparisons():
        if recipe.name in missing:
            steps = sum(job.steps for job in list_jobs(recipe, work.trials, only))
            outcomes += run_comparison(recipe, work.trials, workers, comparing(recipe.name, steps), only, shared=True)
    for recipe, count in work.list_chains():
        folder = work.trials / recipe.name
        stages = list(zip(recipe.stage_names, list_stages(recipe, folder), strict=True))
        for stage, (plain, stage_folder) in stages[:count]:
            if not is_finished(plain, stage_folder):
                on_event = training(f"{recipe.name}, {stage}", plain.training.steps)
                train_stages(recipe, folder, resume=True, only=stage, on_event=on_event)
    return outcomes
