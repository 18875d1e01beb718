"""The page: one file that needs no network, with everything about the comparisons under a folder."""

import base64
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader

from headwater.util.errors import HeadwaterError, nearest
from headwater.util.files import explain_disk_errors
from headwater.util.layout import top_package
from headwater_lab.comparison.scaling import LEAST_SIZES, PINNED_E, Scaling, fit_scaling, group_sizes
from headwater_lab.comparison.speedup import CONSTANTS, measure_speedups
from headwater_lab.comparison.tuning import describe_edge, find_best_rate
from headwater_lab.reports import words
from headwater_lab.reports.comparison import Comparison, group_by_experiment, name_unit, read_comparisons
from headwater_lab.reports.cost_tables import arm_cost_rows, find_arm_costs, where_measured
from headwater_lab.reports.numbers import (
    list_arms,
    list_evaluations,
    list_laws,
    list_predictions,
    list_runs,
    list_speedups,
)
from headwater_lab.reports.pictures import (
    Picture,
    curves_picture,
    differences_picture,
    scaling_picture,
    speedup_picture,
)
from headwater_lab.reports.recipes import find_changes, flatten_settings
from headwater_lab.reports.table_formats import TABLE_FORMATS, PageCell, PageTable, write_csv
from headwater_lab.training.records import RunRecord, list_recordings
from headwater_lab.util.figures import Figure
from headwater_lab.util.names import file_name
from headwater_lab.util.outputs import check_replaceable, save_figure, write_text
from headwater_lab.util.terminal import counted

REPORT = "report.html"
FIGURE_FORMATS = ("pdf", "svg", "png")
FORMATS = (*TABLE_FORMATS, *FIGURE_FORMATS)
# Files next to the page, and what lists the rows of each comparison.
NUMBERS = (("results.csv", list_arms), ("runs.csv", list_runs), ("evaluations.csv", list_evaluations))


@dataclass(frozen=True)
class Section:
    """A section of an experiment, with its contents in display order. file: the name of its files, without suffix."""

    file: str
    title: str
    paragraphs: Sequence[str] = ()
    picture: Picture | None = None
    tables: Sequence[PageTable] = ()
    code: tuple[str, str] | None = None
    """A file's name and its text."""
    items: Sequence[str] = ()

    @property
    def id(self) -> str:
        return _make_id(self.file)


@dataclass(frozen=True)
class Story:
    """One experiment."""

    id: str
    title: str
    question: str
    answers: Sequence[str]
    sections: Sequence[Section]


def write_report(folder: Path, formats: Collection[str] = FORMATS) -> Path:
    """Write the page of the comparisons under `folder`, their numbers, and their tables and figures in these formats.

    Returns the page's path, `folder`/report.html. Next to it are results.csv, runs.csv and evaluations.csv, and the
    folders tables and figures. Raises `HeadwaterError` for an unknown format, if an experiment has no finished run, and
    before anything is written if a file to replace is not headwater's.
    """
    if unknown := sorted({*formats} - {*FORMATS}):
        raise HeadwaterError(f"There is no format {unknown[0]!r}; {nearest(unknown[0], FORMATS)}")
    comparisons = read_comparisons(folder)
    stories = [tell_story(sizes) for sizes in group_by_experiment(comparisons)]
    sections = [section for story in stories for section in story.sections]
    if len({section.file for section in sections}) < len(sections):
        raise HeadwaterError("Two comparisons would have the same file names; report their folders separately.")
    texts = {folder / name: write_csv([row for size in comparisons for row in rows(size)]) for name, rows in NUMBERS}
    texts |= _write_tables(sections, folder / "tables", formats)
    figures = _list_figures(sections, folder / "figures", formats)
    texts[target := folder / REPORT] = render_page(stories)
    for path in (*texts, *figures):
        check_replaceable(path)
    for path in (*texts, *figures):
        _create_folder(path.parent)
    for path, figure in figures.items():
        save_figure(figure, path, dpi=160)
    for path, text in texts.items():
        write_text(path, text)
    return target


def _write_tables(sections: Sequence[Section], folder: Path, formats: Collection[str]) -> dict[Path, str]:
    """Write the sections' tables as texts, by their files."""
    tables = {"-".join(filter(None, (s.file, table.name))): table for s in sections for table in s.tables}
    return {
        folder / f"{name}{suffix}": write(table, name)
        for kind, (suffix, write) in TABLE_FORMATS.items()
        for name, table in tables.items()
        if kind in formats
    }


def _list_figures(sections: Sequence[Section], folder: Path, formats: Collection[str]) -> dict[Path, Figure]:
    """List the sections' figures by their files."""
    return {
        folder / f"{section.file}.{suffix}": section.picture.figure
        for section in sections
        for suffix in FIGURE_FORMATS
        if section.picture is not None and suffix in formats
    }


def _create_folder(folder: Path) -> None:
    with explain_disk_errors(lambda problem: f"The folder {str(folder)!r} cannot be created: {problem}."):
        folder.mkdir(exist_ok=True)


def _name_file(*words: str | None) -> str:
    """Name a file by words, if LaTeX and browsers can read them, else by their letters and a checksum."""
    name = "-".join(filter(None, words))
    return file_name(name if re.fullmatch(r"[\w.-]+", name) else f"{name}/")  # no file name has a slash


def _make_id(text: str) -> str:
    return re.sub(r"\W+", "-", text).strip("-").lower() or "x"


def render_page(stories: Sequence[Story]) -> str:
    """Render the page as HTML."""
    loader = PackageLoader(top_package(__name__))
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["bound"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    values: dict[str, Any] = {
        "title": " · ".join(story.title for story in stories),
        "stories": stories,
        "level": 1 if len(stories) == 1 else 2,
        "css": (loader.get_source(environment, "report.css"))[0],
        "js": (loader.get_source(environment, "report.js"))[0],
        "encoded": lambda text: base64.b64encode(text.encode()).decode(),
    }
    return environment.get_template("report.html.j2").render(values)


def tell_story(sizes: Sequence[Comparison]) -> Story:
    """Collect everything about one experiment, at one or more sizes."""
    comparison = sizes[0]
    name = _name_file(comparison.name)
    several = len(sizes) > 1

    def titled(text: str, size: Comparison) -> str:
        return f"{text}, {size.size}" if several else text

    sections = []
    for size in sizes:
        file = _name_file(size.name, size.size)
        sections.append(Section(f"{file}-curves", titled("Curves", size), picture=curves_picture(size)))
        tables = [results_table(size), *words.further_tables(size)]
        sections.append(Section(f"{file}-results", titled("Results", size), tables=tables))
        if picture := differences_picture(size):
            caption = f"Paired differences to {size.baseline}. {words.describe_columns(size)}"
            tables = [PageTable.from_rows(caption, words.difference_rows(size))]
            sections.append(Section(f"{file}-differences", titled("Differences", size), picture=picture, tables=tables))
        if (costs := costs_part(size, f"{file}-prices", titled("Prices", size))) is not None:
            sections.append(costs)
    if comparison.tuning:
        rates, edges = rates_table(sizes)
        sections.append(Section(f"{name}-rates", "Learning rates", paragraphs=edges, tables=[rates]))
    sections += scaling_parts(sizes, f"{name}-scaling")
    if (speedup := speedup_part(sizes, f"{name}-speedup")) is not None:
        sections.append(speedup)
    sections.append(commands_part(sizes, f"{name}-commands"))
    sections.append(changes_part(sizes, f"{name}-changes"))
    environment = [data_table(comparison), machines_table(sizes)]
    sections.append(Section(f"{name}-environment", "Data and environment", tables=environment))
    if warnings := list_warnings(sizes):
        sections.append(Section(f"{name}-warnings", f"Warnings ({len(warnings)})", items=warnings))
    return Story(
        id=_make_id(name),
        title=comparison.title,
        question=words.state_question(sizes),
        answers=[(f"{size.size}: " if several else "") + words.state_answer(size) for size in sizes],
        sections=sections,
    )


def results_table(comparison: Comparison) -> PageTable:
    classes = {"better": "better", "worse": "worse", "diverged": "worse"}
    rows: list[dict[str, PageCell]] = []
    for row, summary in zip(words.result_rows(comparison), comparison.summaries, strict=True):
        css_class = classes.get(summary.verdict(comparison.lower_is_better), "")
        rows.append({**row, "verdict": (row["verdict"], css_class)})
    caption = f"Held-out {comparison.unit} at the end. {words.describe_test(comparison)}"
    return PageTable.from_rows(caption, rows, numbers=list_arms(comparison))


def rates_table(sizes: Sequence[Comparison]) -> tuple[PageTable, list[str]]:
    """Make the table of learning rates, with a note if a chosen one is at the edge and may not be the best."""
    comparison = sizes[0]
    trials: dict[str, dict[float, list[RunRecord]]] = {}
    for record in comparison.tuning:
        rate = float(record.recipe["training"]["learning_rate"])
        trials.setdefault(record.arm, {}).setdefault(rate, []).append(record)
    rates = sorted({rate for by_rate in trials.values() for rate in by_rate})
    chosen = {summary.arm: summary.learning_rate for summary in comparison.summaries}  # of the size that is tuned
    order = {arm: index for index, arm in enumerate(comparison.arms)}
    arms = sorted(trials, key=lambda arm: order.get(arm, len(order)))
    rows: list[list[PageCell]] = [
        [arm, *(_rate_cell(trials[arm].get(rate, []), rate == chosen.get(arm)) for rate in rates)] for arm in arms
    ]
    edges = [note for arm in arms if (note := describe_edge(arm, chosen.get(arm), trials[arm]))]
    seeds = sorted({record.seed for record in comparison.tuning})
    caption = (
        f"Mean held-out {comparison.unit} of every arm at every learning rate, over "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, which are not part of the "
        f"comparison; each arm was then trained at its own best rate{_list_other_rates(comparison, trials)}."
    )
    return PageTable(caption, ["", *(f"{rate:g}" for rate in rates)], rows), edges


def _list_other_rates(comparison: Comparison, trials: Mapping[str, Mapping[float, list[RunRecord]]]) -> str:
    """List the arms that were not trained at the best rate of these trials."""
    rates = {summary.arm: summary.learning_rate for summary in comparison.summaries}
    best = {arm: find_best_rate(by_rate, comparison.threshold) for arm, by_rate in trials.items()}
    untuned = [arm for arm, rate in rates.items() if rate not in trials.get(arm, {})]
    others = [arm for arm, rate in rates.items() if arm not in untuned and rate != best[arm]]
    clauses = {"at a rate not tried here": untuned, "at another one": others}
    return "".join(f"; {', '.join(arms)} {where}" for where, arms in clauses.items() if arms)


def _rate_cell(records: Sequence[RunRecord], chosen: bool) -> PageCell:
    results = [record.result for record in records if record.status == "finished" and record.result is not None]
    diverged = sum(record.status == "diverged" for record in records)
    mean = f"{sum(results) / len(results):.3f}" if results else ""
    text = ", ".join(filter(None, (mean, f"diverged {diverged} of {len(records)}" if diverged else "")))
    return (f"{text} chosen", "better") if chosen else text


def costs_part(comparison: Comparison, name: str, title: str) -> Section | None:
    """Make the part on gains and their costs; None if costs were not measured."""
    costs = find_arm_costs(comparison)
    if isinstance(costs, str):
        return Section(name, title, [costs]) if costs else None
    caption = f"What each arm costs. {where_measured(costs)}"
    return Section(name, title, tables=[PageTable.from_rows(caption, arm_cost_rows(comparison, costs))])


def scaling_parts(sizes: Sequence[Comparison], name: str) -> list[Section]:
    """Make the parts on loss against size: one for each law, and one that says which have too few sizes."""
    sections, short = [], []
    for group in group_sizes([record for size in sizes for record in size.records]):
        members = [size for size in sizes if size.size in group.sizes]
        file = f"{name}-{_make_id(group.label)}" if group.label else name
        if (section := scaling_part(members, file, group.label)) is not None:
            sections.append(section)
        elif group.label and 1 < len(members) < LEAST_SIZES:
            short.append(
                f"{group.label}: no law, which needs {LEAST_SIZES} sizes or budgets; there are {len(members)}."
            )
    return sections + ([Section(f"{name}-missing", "Scaling: too few sizes", items=short)] if short else [])


def scaling_part(sizes: Sequence[Comparison], name: str, label: str = "") -> Section | None:
    """Make the part on loss against size, if there are three or more sizes. label: what they share."""
    if len(sizes) < LEAST_SIZES:
        return None
    records = [record for size in sizes for record in size.records]
    title = f"Scaling, {label}" if label else "Scaling"
    try:
        scaling = fit_scaling(records, sizes[0].projections)
    except HeadwaterError as error:
        return Section(name, title, paragraphs=[str(error)])
    if scaling is None:
        return None
    rows = words.law_rows(scaling.laws)
    quality = (
        "Error: root mean square of the residuals."
        if "error" in rows[0]
        else "With three sizes for three constants, the fit has no degrees of freedom left, so it is no evidence for "
        "the law's form."
    )
    caption = (
        f"Fitted laws, L = E + A/N^a (Hoffmann et al., arXiv 2203.15556), of arms with all sizes. N: "
        f"{scaling.size_unit}. {quality} Intervals of the sizes below: 95 %, by the jackknife over the "
        f"{counted(scaling.seeds)} that all arms have at all sizes."
    )
    tables = [PageTable.from_rows(caption, rows, numbers=list_laws(scaling, sizes[0]))]
    if scaling.pinned_laws:
        rows = [{name: row[name] for name in ("", "A", "a", "error")} for row in words.law_rows(scaling.pinned_laws)]
        tables.append(PageTable.from_rows(f"Laws with E = {PINNED_E}, as marin's.", rows, name="pinned"))
    if scaling.predictions:
        tables.append(predictions_table(scaling, sizes[0]))
    picture = scaling_picture(scaling, sizes[0].title, sizes[0].arms)
    return Section(name, title, picture=picture, tables=tables, items=scaling.sentences())


def predictions_table(scaling: Scaling, comparison: Comparison) -> PageTable:
    caption = (
        f"Predicted {name_unit(scaling.metric, scaling.unit)}. For the largest size, laws are fitted to the others; "
        "missed: the measured loss is outside the interval. Intervals: 95 %, by the jackknife over the seeds. They do "
        "not cover the law's form."
    )
    numbers = list_predictions(scaling, comparison)
    return PageTable.from_rows(caption, words.prediction_rows(scaling), name="predictions", numbers=numbers)


def speedup_part(sizes: Sequence[Comparison], name: str) -> Section | None:
    """Make the part on effective speedups, if there is a size with a number."""
    comparison = sizes[0]
    if comparison.size is None:
        return None
    records, times = [run for size in sizes for run in size.records], _read_times(sizes)
    try:
        speedups = measure_speedups(records, comparison.baseline, times)
    except HeadwaterError:  # no loss was measured
        return None
    if not any(speedup.values for speedup in speedups):
        return None
    names = list(dict.fromkeys(size for group in group_sizes(records) for size in group.sizes))
    tables = []
    for constants in CONSTANTS:
        chosen = [speedup for speedup in speedups if speedup.constants == constants]
        rows = words.speedup_rows(chosen, names)
        caption = words.describe_speedups(constants, comparison.baseline, are_timed=len(times) == len(sizes))
        numbers = list_speedups(chosen, comparison)
        tables.append(PageTable(caption, ["", "", *names], rows, name=constants, numbers=numbers))
    return Section(name, "Speedup", picture=speedup_picture(speedups, names, comparison), tables=tables)


def _read_times(sizes: Sequence[Comparison]) -> dict[str, dict[str, float]]:
    """Read the measured times per token over the baseline's, by size and arm."""
    costs = {str(size.size): find_arm_costs(size) for size in sizes}
    return {
        size: {arm: cost.training.ratio for arm, cost in measured.arms.items()}
        for size, measured in costs.items()
        if not isinstance(measured, str)
    }


def commands_part(sizes: Sequence[Comparison], name: str) -> Section:
    """Show the baseline's recipe, and the command that trains it."""
    record = _baseline_record(sizes[0])
    file = f"{_make_id(sizes[0].name)}.yaml"
    text = (
        f"The recipe of {record.arm}, seed {record.seed}, as recorded; the changes of the other arms follow. "
        f"`headwater train {file}` trains it."
    )
    recipe = yaml.safe_dump(record.recipe, sort_keys=False, allow_unicode=True)
    return Section(name, "Recipe", [text], code=(file, recipe))


def _baseline_record(comparison: Comparison) -> RunRecord:
    return (comparison.runs(comparison.baseline) or comparison.records)[0]


def changes_part(sizes: Sequence[Comparison], name: str) -> Section:
    """List the changes of each arm and each size."""
    tables = [table for comparison in sizes if (table := _arm_changes(comparison)).rows]
    if len(sizes) > 1:
        tables.append(_size_changes(sizes))
    return Section(name, "Changes", () if tables else ["The arms do not differ in their settings."], tables=tables)


def _arm_changes(comparison: Comparison) -> PageTable:
    base = comparison.baseline
    rows = [[arm, *change] for arm, changes in find_changes(comparison).items() for change in changes]
    size = comparison.size or ""
    caption = f"Changes of each arm to {base}" + (f", {size}" if size else "")
    return PageTable(f"{caption}.", ["", "field", base, "here"], rows, text=True, name=size and _name_file(size))


def _size_changes(sizes: Sequence[Comparison]) -> PageTable:
    settings = [flatten_settings(_baseline_record(comparison).recipe) for comparison in sizes]
    rows: list[list[PageCell]] = []
    for key in dict.fromkeys(chain.from_iterable(settings)):
        values = [values_of_size.get(key, "–") for values_of_size in settings]
        if len(set(values)) > 1 and key not in ("name", "seed"):
            rows.append([key, *values])
    columns = ["field", *(str(comparison.size) for comparison in sizes)]
    return PageTable("Changes of each size.", columns, rows, text=True, name="sizes")


def data_table(comparison: Comparison) -> PageTable:
    record = comparison.records[0]
    facts = record.data | {"order of rows, seed " + str(record.seed): record.data_order}
    rows: list[list[PageCell]] = [
        [key.replace("_", " "), _write_fact(value)] for key, value in facts.items() if value != ""
    ]
    return PageTable("Data", ["", "value"], rows, text=True, name="data")


def _write_fact(value: Any) -> str:
    if isinstance(value, dict):  # of several folders, by name
        return ", ".join(f"{name}: {_write_fact(fact)}" for name, fact in value.items())
    text = f"{value:,}" if type(value) is int else str(value)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text  # as commits; the record has all of a hash


def machines_table(sizes: Sequence[Comparison]) -> PageTable:
    """Make the table of the runs' environments, one column each."""
    records = sorted((r for size in sizes for r in size.records), key=lambda r: r.environment.model_dump_json())
    columns = [_describe_environment(list(runs)) for _, runs in groupby(records, key=lambda r: r.environment)]
    names = ["value"] if len(columns) == 1 else [f"{number}" for number in range(1, len(columns) + 1)]
    rows: list[list[PageCell]] = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return PageTable("Environment", ["", *names], rows, text=True, name="machines")


def _describe_environment(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Describe what runs in the same environment have in common."""
    dates, commits = list_recordings(runs)
    facts = runs[0].environment.model_dump() | {"date": ", ".join(dates) or None, "commit": ", ".join(commits) or None}
    texts = {name.replace("_", " "): "not recorded" if fact is None else str(fact) for name, fact in facts.items()}
    return texts | {"runs": str(len(runs)), "hours of training": f"{sum(r.seconds for r in runs) / 3600:.2f}"}


def list_warnings(sizes: Sequence[Comparison]) -> list[str]:
    """List warnings: skipped steps, failures, unfinished runs."""
    warnings = [size.changed_data for size in sizes if size.changed_data]
    for size in sizes:
        messages: dict[tuple[int, str], list[str]] = {}
        for record in size.records:
            run = ", ".join(filter(None, (record.arm, size.size, f"seed {record.seed}")))
            if record.skipped_steps:
                warnings.append(
                    f"{run}: {counted(record.skipped_steps, 'step')} skipped, because the loss or gradient was not "
                    "finite."
                )
            if record.status == "diverged":
                warnings.append(
                    f"{run}: diverged, so the mean of the arm's other seeds is optimistic. {record.error or ''}".strip()
                )
            for notice in record.notices:
                messages.setdefault((notice.step, notice.message), []).append(run)
        for (step, message), those in messages.items():  # show a message once, even if many runs have it
            run = those[0] if len(those) == 1 else f"{those[0]} and {counted(len(those) - 1, 'other run')}"
            warnings.append(f"{run}, step {step}: {message}")
        warnings += words.list_left_out(size)
        if size.beyond:
            warnings.append(f"{counted(size.beyond, 'run')} came after the decision on their arm, and do not count.")
    return warnings
