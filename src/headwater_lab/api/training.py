"""The function `lab.train` and its result."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.plugins.trust import trust_names
from headwater.util.errors import HeadwaterError, nearest
from headwater.util.files import local
from headwater_lab.api.common import PathLike, Result, check_outside, quiet
from headwater_lab.api.observer import Observer, choose_observer
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import read_recipe
from headwater_lab.recipe.unread import find_overruled
from headwater_lab.training.checkpoints import load_model, newest_checkpoint
from headwater_lab.training.journal import Activity, OnEvent, Point
from headwater_lab.training.records import CurvePoint, Experiment, HeldOutPoint, Notice, RunRecord, SpeedPoint
from headwater_lab.training.stages import list_stages, train_stages
from headwater_lab.util.model_kinds import AnyModel

if TYPE_CHECKING:
    from headwater_lab.reports.pictures import Picture


@dataclass(frozen=True, repr=False)
class Run(Result):
    """A run: its folder, its record (docs/reference/records.md), and the folder of its model.

    If only one stage was trained, that is the stage's folder.
    """

    folder: Path
    record: RunRecord
    model_folder: Path

    def table(self) -> list[dict[str, Any]]:
        """Return a row per evaluation: the step, and every measure."""
        return [{"step": point.step, **point.metrics} for point in self.record.held_out]

    def __repr__(self) -> str:
        record = self.record
        counts = f"{record.tokens:,} {record.unit}, {record.flops:.3g} FLOPs, {record.parameters:,} parameters"
        lines = [f"Run {record.name} in {self.folder}: {record.status}", counts]
        lines += [", ".join(f"{name} {cell}" for name, cell in row.items()) for row in self.text_table()[-1:]]
        return "\n".join(lines)

    def picture(self) -> "Picture":
        """Draw the training loss and the deciding metric."""
        from headwater_lab.reports.pictures import run_picture

        return run_picture(self.record)

    def report(self, formats: Collection[str] | None = None) -> Path:
        """Write an HTML page, with its tables and figures in these formats, into the folder, and return its path.

        formats: of csv, md, latex, pdf, svg and png; default: all.
        """
        from headwater_lab.reports import FORMATS, write_report

        return write_report(self.folder, FORMATS if formats is None else formats)

    @quiet()
    def model(self) -> AnyModel:
        """Load the trained model."""
        return load_model(newest_checkpoint(self.model_folder))


@quiet()
def train(
    recipe: Recipe | Mapping[str, Any] | PathLike,
    out: PathLike | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    arm: str | None = None,
    size: str | None = None,
    stage: str | None = None,
    trunk: PathLike | None = None,
    on_event: OnEvent | None = None,
    watch: Observer | None = None,
    trust: Sequence[str] = (),
) -> Run:
    """Train the model of a recipe, stage by stage if it has stages, like `headwater train`.

    out: the run's folder; default: runs/NAME. resume: continue an interrupted run. arm, size: train this arm of the
    recipe's comparison. stage: train only this stage. trunk: the folder of a run with training.schedule=wsd; begin
    where its decay begins, with the same result as from step 0 (docs/compare.md). on_event: called with (step, None)
    after each step, and with (step, point) for each new point of the record; without it, `watch` receives the
    progress, by default shown in a notebook. trust: code from outside that checkpoints may name, "package.module" or
    "package.module:Class". Raises `HeadwaterError`.
    """
    trust_names(trust)
    watch = choose_observer(watch)
    loaded = read_recipe(recipe, overrides)
    folder, experiment = Path("runs") / loaded.name, None
    if arm is not None:
        loaded, folder, experiment = _find_trial(loaded, arm, size, overrides, watch)
    if out is not None:
        folder = local(out, "out")
    if loaded.start is not None and not resume:
        check_outside(folder, loaded.start.checkpoint, around=True)
    runs = list_stages(loaded, folder)
    for run, _ in runs:  # first, because their extra may include the trainer's
        run.data.check_extras()
    on_event = on_event or watch_training(loaded, runs, watch)
    record = train_stages(
        loaded,
        folder,
        resume=resume,
        experiment=experiment,
        only=stage,
        on_event=on_event,
        trunk=None if trunk is None else local(trunk, "trunk"),
    )
    return Run(folder, record, folder if stage is None else runs[loaded.stage_names.index(stage)][1])


def _find_trial(
    recipe: Recipe, arm: str, size: str | None, overrides: Sequence[str], watch: Observer
) -> tuple[Recipe, Path, Experiment]:
    """Find the recipe, the folder and the experiment of an arm; report the overrides that it replaces."""
    # Plain training does not need this package.
    from headwater_lab.comparison.trials import choose_rate, make_trial
    from headwater_lab.comparison.tuning import find_tuned_rate

    if recipe.compare is None or arm not in recipe.compare.arms:
        arms = list(recipe.compare.arms) if recipe.compare else []
        raise HeadwaterError(f"{recipe.name!r} has no arm {arm!r}; {nearest(arm, arms)}")
    trial = make_trial(recipe, arm, recipe.seed, Path("runs") / recipe.name, size)
    setter = f"the arm {arm!r}" if size is None else f"the arm {arm!r} or the size {size!r}"
    for key in find_overruled(recipe, [trial.recipe], overrides):
        watch.tell(f"{key} has no effect, because {setter} sets it; change it in the recipe's compare section.")
    is_chosen = recipe.compare.ladder is None and any(text.startswith("training.learning_rate=") for text in overrides)
    if recipe.compare.tried_rates and not is_chosen:
        if (rate := find_tuned_rate(recipe, arm, Path("runs"))) is None:
            raise HeadwaterError(
                f"The learning rate of {arm!r} is not tuned in {str(Path('runs') / recipe.name)!r}; run `headwater "
                "compare` first, or give one rate as compare.learning_rates (compare.ladder.multipliers)."
            )
        trial = replace(trial, recipe=choose_rate(trial.recipe, recipe.compare, rate))
    return trial.recipe, trial.folder, trial.experiment


def watch_training(
    recipe: Recipe, runs: Sequence[tuple[Recipe, Path]], watch: Observer, notices: Collection[str] = ()
) -> OnEvent:
    """Report the progress of a recipe's runs in turn: steps, loss, speed, MFU; and warnings, except `notices`."""
    steps = sum(run.training.steps for run, _ in runs)
    fields = {"loss": "", "held-out": "", "speed": ""}

    def on_event(step: int, point: Point | Activity | None) -> None:
        activity = None
        match point:
            case Notice():
                if point.message not in notices:
                    watch.tell(f"step {point.step}: {point.message}")
                return
            case CurvePoint():
                fields["loss"] = f"loss {point.loss:.4f}"
            case SpeedPoint():
                mfu = "" if point.mfu is None else f", MFU {point.mfu:.0%}"
                fields["speed"] = f"{point.tokens_per_second:,.0f} {recipe.unit}/s{mfu}"
            case HeldOutPoint():
                metric, value = next(iter(point.metrics.items()))
                fields["held-out"] = f"held-out {metric.replace('_', ' ')} {value:.4f}"
            case Activity():
                activity = {"speed": point.text}
        info = "  ".join(filter(None, (fields | (activity or {})).values()))
        watch.show(recipe.name, step, steps, unit="step", info=info)

    return on_event
