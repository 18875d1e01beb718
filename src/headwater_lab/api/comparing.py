"""The functions `lab.compare` and `lab.load_results`, and their result."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from headwater.plugins.mechanisms import MECHANISMS, as_mapping
from headwater.plugins.trust import trust_names
from headwater.util import extras
from headwater.util.errors import HeadwaterError, either, nearest, shown
from headwater.util.files import local
from headwater_lab.api.common import PathLike, Result, make_frame, quiet, write_html
from headwater_lab.api.observer import Observer, choose_observer
from headwater_lab.api.training import Run
from headwater_lab.comparison import running, search
from headwater_lab.comparison.budget import match_arms
from headwater_lab.comparison.pool import OnChange, Outcome
from headwater_lab.comparison.trials import ArmKey, Job, describe_runs, list_trials
from headwater_lab.optimization.laws import READ_FIELDS
from headwater_lab.recipe.comparison_section import Compare
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import read_recipe
from headwater_lab.recipe.unread import find_overruled
from headwater_lab.reports import FORMATS, Comparison, read_comparisons, result_rows, write_report
from headwater_lab.reports.numbers import ROWS
from headwater_lab.reports.words import describe_test, state_answer
from headwater_lab.training.records import RECORD, read_record
from headwater_lab.util.output_folder import occupy_folder
from headwater_lab.util.terminal import counted

if TYPE_CHECKING:
    from pandas import DataFrame

    from headwater_lab.reports.pictures import Picture

RowKind = Literal["arm", "run", "evaluation"]
# Number of comparisons to summarize in the text of a result.
MOST_LINES = 2


@dataclass(frozen=True, repr=False)
class Compared(Result):
    """Comparisons by these names, one for each size; `failed`: the trials that failed."""

    folder: Path
    names: list[str]
    failed: list[Outcome]

    @functools.cached_property
    def comparisons(self) -> list[Comparison]:
        """The comparisons in the folder, read at the first access."""
        return [comparison for comparison in read_comparisons(self.folder) if comparison.name in self.names]

    def table(self, by: RowKind = "arm") -> list[dict[str, Any]]:
        """Return a row per arm (and size): its mean, its difference from the baseline, the verdict, and its cost.

        by: "run": a row per finished or diverged run; "evaluation": a row per evaluation of each.
        """
        if by not in ROWS:
            raise HeadwaterError(f"by must be {either([*ROWS])}, not {shown(by)}.")
        return [row for comparison in self.comparisons for row in ROWS[by](comparison)]

    def text_table(self) -> list[dict[str, str]]:
        """Return the rows of the report's table, as text."""
        return [row for comparison in self.comparisons for row in _list_texts(comparison)]

    def to_pandas(self, by: RowKind = "arm") -> "DataFrame":
        """Return the rows of `table` as a DataFrame, with NaN where there is no number."""
        return make_frame(self.table(by))

    def picture(self) -> "Picture":
        """Draw the curves of the arms, at the last size."""
        from headwater_lab.reports.pictures import curves_picture

        return curves_picture(self.comparisons[-1])

    def __repr__(self) -> str:
        lines = [f"Compared {', '.join(self.names)} in {self.folder}"]
        try:
            lines += map(_summarize, self.comparisons[:MOST_LINES])
        except HeadwaterError as error:  # nothing is finished
            return "\n".join([*lines, str(error), *self._list_failures()])
        if (further := len(self.comparisons) - MOST_LINES) > 0:
            lines.append(f"and {counted(further, 'more comparison')}: .comparisons")
        return "\n".join([*lines, *self._list_failures()])

    def _list_failures(self) -> list[str]:
        if not self.failed:
            return []
        example = self.failed[0]
        return [f"{counted(len(self.failed), 'trial')} failed (.failed), the first: {example.label}: {example.error}"]

    def _repr_html_(self) -> str:
        try:
            tables = [
                write_html(_summarize(comparison), _list_texts(comparison), describe_test(comparison))
                for comparison in self.comparisons
            ]
        except HeadwaterError:  # nothing is finished
            tables = [f"<pre>{escape(repr(self))}</pre>"]
        return "\n".join([*tables, *(f"<p>{escape(line)}</p>" for line in self._list_failures())])

    def means(self) -> dict[str, float | None]:
        """Return the mean of the deciding metric of each arm, at the last size."""
        return {summary.arm: summary.mean for summary in self.comparisons[-1].summaries}

    def report(self, formats: Collection[str] = FORMATS) -> Path:
        """Write the HTML page of the folder, with its tables and figures in these formats, and return its path.

        formats: of csv, md, latex, pdf, svg and png; default: all.
        """
        return write_report(self.folder, formats)


def _list_texts(comparison: Comparison) -> list[dict[str, str]]:
    """List the rows of the report's table, with a column of sizes if there are any."""
    size = {} if comparison.size is None else {"size": comparison.size}
    return [size | {name or "arm": cell for name, cell in row.items()} for row in result_rows(comparison)]


def _summarize(comparison: Comparison) -> str:
    """Summarize a comparison in a line."""
    return f"{comparison.heading}: {counted(len(comparison.arms), 'arm')}. {state_answer(comparison)}"


AnyRecipe = Recipe | Mapping[str, Any] | PathLike


@quiet()
def compare(
    recipe: AnyRecipe | Sequence[AnyRecipe],
    out: PathLike | None = None,
    *,
    overrides: Sequence[str] = (),
    arms: Sequence[str] = (),
    sizes: Sequence[str] = (),
    searches: bool = False,
    mechanisms: Mapping[str, dict[str, Any]] | None = None,
    workers: int | None = None,
    watch: Observer | None = None,
    trust: Sequence[str] = (),
) -> Compared:
    """Train the arms of a recipe, or of several, side by side, like `headwater compare`. Call it again to resume.

    Trials run in separate processes that do not import the caller, so a script needs no `__main__` guard.
    arms, sizes: train only these and their baselines. searches: compare all combinations of `mechanisms`
    instead, default all alone and in pairs, and test the best on fresh seeds. watch: receives notices and progress;
    default: shows them in a notebook. trust: as in `train`. Raises `HeadwaterError`.
    """
    trust_names(trust)
    extras.check_extra("compare")
    watch = choose_observer(watch)
    sources = cast("Sequence[AnyRecipe]", recipe if isinstance(recipe, list | tuple) else [recipe])
    recipes = [read_recipe(source, overrides) for source in sources]
    for loaded in recipes:
        _report_overruled(loaded, overrides, watch)
    titles = [loaded.name for loaded in recipes]
    _check_titles(titles, searches)
    selections = [_select_part(loaded, arms, sizes) if arms or sizes else None for loaded in recipes]
    folder = local(out, "out") if out is not None else Path("runs") / titles[0]
    failed: list[Outcome] = []
    with occupy_folder(folder):
        if searches:
            titles, failed = _search_mechanisms(recipes[0], mechanisms, folder, workers, watch)
        else:
            for loaded, selected in zip(recipes, selections, strict=True):
                failed += _train_comparison(loaded, folder, workers, watch, selected)
    return Compared(folder, titles, failed)


def _report_overruled(recipe: Recipe, overrides: Sequence[str], watch: Observer) -> None:
    """Report the overrides, and fields of a recipe with a ladder, that no trial of its comparison uses."""
    if (section := recipe.compare) is None:
        return
    setters = {"seed": "compare.seeds"}
    if section.tried_rates:
        setters["training.learning_rate"] = "compare.ladder" if section.ladder else "compare.learning_rates"
    keys, read_by_law = [text.partition("=")[0] for text in overrides], set()
    if section.ladder is not None:
        keys += [f"training.{name}" for name in sorted(recipe.training.model_fields_set)]
        read_by_law = {f"training.{name}" for name in READ_FIELDS[section.ladder.law]} - _list_set_by_arms(section)
    replaced = [*filter(setters.__contains__, keys), *find_overruled(recipe, recipe.trials().values(), keys)]
    by_law = {f"training.{name}" for size in section.sizes.values() for name in size["training"]} if read_by_law else ()
    for key in dict.fromkeys(replaced):
        if key not in read_by_law:
            setter = setters.get(key, "compare.ladder" if key in by_law else "every arm or size")
            watch.tell(f"{key} has no effect, because {setter} sets it; change it in the recipe's compare section.")


def _list_set_by_arms(section: Compare) -> set[str]:
    """List the fields of `training:` that every arm sets."""
    fields = [{f"training.{name}" for name in arm.get("training") or {}} for arm in section.arms.values()]
    return set.intersection(*fields)


def _check_titles(titles: list[str], searches: bool) -> None:
    """Raise `HeadwaterError` for names of recipes that cannot be compared together."""
    if not titles:
        raise HeadwaterError("Name at least one recipe.")
    if repeated := next((title for title in titles if titles.count(title) > 1), None):
        raise HeadwaterError(
            f"Two of the recipes are named {repeated!r}, and their runs would share a folder; give each its own "
            "`name`, or compare them one by one with --out."
        )
    if searches and len(titles) > 1:
        raise HeadwaterError("--search takes one recipe; search them one by one.")


def _select_part(recipe: Recipe, arms: Sequence[str], sizes: Sequence[str]) -> set[ArmKey] | None:
    """Select arms of a recipe with its baseline and budgets, at these sizes; None without a compare section."""
    section = recipe.compare
    if section is None:
        return None
    for kind, names, possible in (("arm", arms, section.arms), ("size", sizes, section.sizes)):
        for name in names:
            if kind == "size" and not possible:
                raise HeadwaterError(f"{recipe.name!r} compares at one size; leave out --size.")
            if name not in possible:
                raise HeadwaterError(f"{recipe.name!r} has no {kind} {name!r}; {nearest(name, possible)}")
    untested = {section.baseline, *section.budget_arms}
    if section.sequential and arms and untested.issuperset(arms):
        raise HeadwaterError(f"{arms[0]!r} is an arm that others are compared with; name an arm to decide with --arm.")
    chosen = {*untested, *arms} if arms else set(section.arms)
    return {(arm, size) for arm in chosen for size in sizes or section.sizes or [None]}


def _train_comparison(
    recipe: Recipe,
    folder: Path,
    workers: int | None,
    watch: Observer,
    only: Collection[ArmKey] | None = None,
) -> list[Outcome]:
    """Train a recipe's comparison, or only some arms and sizes; report what diverged, and return what failed."""
    recipe = match_arms(recipe)  # which reads the data
    for trial in list_trials(recipe, folder):
        if unknown := as_mapping(trial.recipe.model.get("mechanisms") or {}).keys() & MECHANISMS.added.keys():
            raise HeadwaterError(
                f"Mechanism {min(unknown)!r} was registered in this process, and a comparison trains in others; "
                "put its class into a module, and name it as module:Class."
            )
    if runs := describe_runs(recipe, None if only is None else len(only)):
        watch.tell(runs)
    steps = sum(job.steps for job in running.list_jobs(recipe, folder, only))
    on_change = watched_trials(recipe.name, steps, watch)
    return tell_failures(running.run_comparison(recipe, folder, workers, on_change, only, watch.tell), watch)


def watched_trials(name: str, steps: int, watch: Observer) -> OnChange:
    """Report the progress of a comparison with this many steps, and of each running trial."""
    done: dict[str, int] = {}
    begun: set[str] = set()

    def on_change(job: Job, step: int, status: str) -> None:
        label, is_running = f"{job.folder}", status == "running"
        is_resumed = label not in done and step > 0
        done[label] = step
        watch.show(name, sum(done.values()), steps, unit="step", done_before=is_resumed)
        if is_running or label in begun:
            begun.add(label)
            total = job.recipe.training.steps
            watch.show(label, step, total, title=f"  {job.label}", unit="step", visible=is_running)

    return on_change


def tell_failures(outcomes: Sequence[Outcome], watch: Observer) -> list[Outcome]:
    """Report the trials' notices, and which diverged or failed, once for each reason; return those that failed."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for message in {notice.message: None for notice in (outcome.record.notices if outcome.record else ())}:
            reasons.setdefault(("noted", message), []).append(outcome.label)
        if outcome.error is not None:
            outcome_kind = "diverged" if outcome.record is not None else "failed"
            reasons.setdefault((outcome_kind, outcome.error), []).append(outcome.label)
    for (outcome_kind, why), labels in reasons.items():
        further = f", and {len(labels) - 1} more," if len(labels) > 1 else ""
        watch.tell(f"{labels[0]}{further} {outcome_kind}: {why}")
    return [outcome for outcome in outcomes if outcome.record is None]


def _search_mechanisms(
    recipe: Recipe,
    mechanisms: Mapping[str, dict[str, Any]] | None,
    folder: Path,
    workers: int | None,
    watch: Observer,
) -> tuple[list[str], list[Outcome]]:
    """Train all combinations of the mechanisms, and then the best on fresh seeds, if no trial failed.

    Returns the names of the comparisons, and the failed trials.
    """
    arms, refused = search.find_candidates(recipe, mechanisms)
    for reason in dict.fromkeys(refused.values()):
        labels = [label for label, why in refused.items() if why == reason]
        further = f", and {len(labels) - 1} more" if len(labels) > 1 else ""
        watch.tell(f"left out: {labels[0]}{further}: {reason}")
    selection = search.make_search(recipe, arms)
    runs = counted((search.FINALISTS + 1) * len(search.FINAL_SEEDS), "run")
    watch.tell(
        f"{len(arms) - 1} combinations and {search.VANILLA}; then a test of the best {search.FINALISTS} in {runs}"
    )
    if failed := _train_comparison(selection, folder, workers, watch):
        return [selection.name], failed
    best = search.choose_best(selection, folder)
    watch.tell(f"chosen: {', '.join(best)}")
    final = search.make_final(selection, folder, best)
    return [selection.name, final.name], _train_comparison(final, folder, workers, watch)


def load_results(folder: PathLike) -> Run | Compared:
    """Load the results of `train` or `compare` from their folder, without training.

    Returns what the function returned, without trials that failed. Raises `HeadwaterError` if the folder has neither a
    run nor a finished run of a comparison.
    """
    extras.check_extra("report")
    path = local(folder, "folder")
    if (path / RECORD).is_file():
        return Run(path, read_record(path), path)
    return Compared(path, list(dict.fromkeys(comparison.name for comparison in read_comparisons(path))), [])
