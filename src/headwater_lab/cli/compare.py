"""`headwater compare`, `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import check_writable, mechanisms_of, say, split_overrides
from headwater_lab.cli.options import LOOK, TRAIN, FolderPath, WorkerCount, command, exclude, need
from headwater_lab.cli.progress import ProgressReport
from headwater_lab.util.terminal import Prose

if TYPE_CHECKING:
    from headwater_lab.comparison.pool import Outcome
    from headwater_lab.reports.comparison import Comparison


@command(TRAIN, "compare demo/induction demo/language --out runs/demo")
def compare_arms(
    recipes: Sequence[str],
    *,
    out: FolderPath | None = None,
    workers: WorkerCount | None = None,
    arm: Sequence[str] = (),
    size: Sequence[str] = (),
    search: bool = False,
    mechanism: Sequence[str] = (),
    sequential: bool = False,
) -> None:
    """Train the arms of recipes side by side and write a report. Run it again to resume.

    recipes: Recipes with a compare section, and dotted.key=value overrides.
    out: Output folder; default: runs/<name of the first>.
    arm: Train only this arm and what it is compared with; repeatable. Default: all.
    size: Train only this size; repeatable. Default: all.
    search: Compare all combinations of mechanisms, and test the best on fresh seeds.
    mechanism: With --search: NAME, or "NAME={option: value}"; repeatable.
    sequential: Add seeds until each arm is decided, within compare.margin.
    """
    extras.check_extra("compare")
    from headwater_lab.api.comparing import compare
    from headwater_lab.recipe.recipe_files import read_recipe

    exclude("--search", "--arm", "--size", "--sequential")
    need("--search", "--mechanism")
    names, overrides = split_overrides(recipes)
    overrides += ["compare.sequential=true"] if sequential else []
    if not names:
        raise HeadwaterError("Name at least one recipe.")
    folder = out or Path("runs") / read_recipe(names[0], overrides).name
    check_writable(folder, folder=True)
    with ProgressReport() as report:
        compared = compare(
            names,
            folder,
            overrides=overrides,
            arms=arm,
            sizes=size,
            searches=search,
            mechanisms=mechanisms_of(mechanism) if mechanism else None,
            workers=workers,
            watch=report,
        )
    show_report(compared.folder)
    check_failures(compared.failed)


def check_failures(failed: list[Outcome]) -> None:
    """Raise `HeadwaterError` if any trials failed."""
    if failed:
        raise HeadwaterError(f"{len(failed)} of the trials failed and are not in the tables.")


def show_report(folder: Path, formats: Sequence[str] | None = None) -> None:
    """Print the tables of a folder's comparisons with a sentence each, and write the report. formats: default: all.

    Raises `HeadwaterError` at the end if runs had different data, so that no verdict holds.
    """
    from headwater_lab import reports

    # Written first, since the output pipe may be closed.
    page = reports.write_report(folder, reports.FORMATS if formats is None else formats)
    comparisons = reports.read_comparisons(folder)
    for comparison in comparisons:
        print_comparison(comparison)
    say(f"report: {page}\nAlso there: results.csv, tables and figures")
    if wrong := next((comparison.changed_data for comparison in comparisons if comparison.changed_data), ""):
        raise HeadwaterError(wrong)


def print_comparison(comparison: Comparison) -> None:
    """Print the tables of a comparison and the sentence about it."""
    from headwater_lab.reports import words
    from headwater_lab.reports.cost_tables import find_arm_costs, make_cost_table

    say(*words.result_tables(comparison))
    if costs := find_arm_costs(comparison):
        say(costs if isinstance(costs, str) else make_cost_table(costs))
    say(Prose(words.state_answer(comparison)), *words.list_left_out(comparison), "")


@command(LOOK, "report runs/demo --format latex,pdf")
def write_report(runs: Sequence[Path], *, format: str = "csv,md,latex,pdf,svg,png") -> None:
    """Write the report of comparisons or runs again: page, numbers, tables and figures, in each one's own folder.

    runs: Folders of comparisons or runs; each has a report of its own.
    format: Formats of tables (csv, md, latex) and figures (pdf, svg, png), separated by commas.
    """
    extras.check_extra("report")
    for folder in runs:
        show_report(folder, format.replace(" ", "").split(","))
