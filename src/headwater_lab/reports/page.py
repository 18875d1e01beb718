"""The page: one file that needs no network, with everything about the comparisons under a folder."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader

from headwater.util.errors import HeadwaterError
from headwater.util.layout import top_package
from headwater_lab.comparison.scaling import LEAST_SIZES, fit_scaling
from headwater_lab.reports import words
from headwater_lab.reports.comparison import Comparison, arm_of, group_by_experiment, read_comparisons
from headwater_lab.reports.pictures import Picture, curves_picture, differences_picture, scaling_picture
from headwater_lab.reports.price_tables import find_prices, prices_table, where_measured
from headwater_lab.reports.recipes import find_changes, flatten_settings
from headwater_lab.training.records import RunRecord, list_recordings
from headwater_lab.util.names import file_name
from headwater_lab.util.outputs import check_replaceable, save_figure, write_text
from headwater_lab.util.terminal import counted

REPORT = "report.html"
# A cell: its text, or (text, class): better, worse or soft.
PageCell = str | tuple[str, str]


@dataclass(frozen=True)
class PageTable:
    """A table of the page. rows: the first cell of each is its heading. text: left-align the words in it."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[PageCell]]
    text: bool = False


@dataclass(frozen=True)
class Section:
    """A section of an experiment, with its contents in display order."""

    id: str
    title: str
    paragraphs: Sequence[str] = ()
    picture: Picture | None = None
    tables: Sequence[PageTable] = ()
    code: tuple[str, str] | None = None
    """A file's name and its text."""
    items: Sequence[str] = ()


@dataclass(frozen=True)
class Story:
    """One experiment."""

    id: str
    title: str
    question: str
    answers: Sequence[str]
    parts: Sequence[Section]


def write_report(folder: Path) -> Path:
    """Write the page of the comparisons under `folder`, and a picture NAME-curves.png of each next to it.

    Returns the page's path, `folder`/report.html. Raises `HeadwaterError` if an experiment has no finished run.
    """
    target, results = folder / REPORT, read_comparisons(folder)
    curves = {_name_file(result): curves_picture(result) for result in results}
    files = {folder / f"{name}-curves.png": picture.figure for name, picture in curves.items()}
    for path in (target, *files):
        check_replaceable(path)
    for path, figure in files.items():
        save_figure(figure, path, dpi=160)
    write_text(target, render_page([tell_story(sizes, curves) for sizes in group_by_experiment(results)]))
    return target


def _name_file(comparison: Comparison) -> str:
    """Name a comparison in file names; an experiment's own name is kept if it is a valid file name."""
    return file_name(comparison.name if comparison.size is None else f"{comparison.name}-{_make_id(comparison.size)}")


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


def tell_story(sizes: Sequence[Comparison], curves: Mapping[str, Picture] | None = None) -> Story:
    """Collect everything about one experiment, at one or more sizes. curves: existing pictures, by file name."""
    comparison = sizes[0]
    name = _make_id(comparison.name)
    several = len(sizes) > 1

    def titled(text: str, size: Comparison) -> str:
        return f"{text}, {size.size}" if several else text

    def at(text: str, size: Comparison) -> str:
        return f"{name}-{text}" + (f"-{_make_id(size.size or '')}" if several else "")

    sections = []
    for size in sizes:
        picture = curves[_name_file(size)] if curves else curves_picture(size)
        sections.append(Section(at("curves", size), titled("Curves", size), picture=picture))
        further = [PageTable(caption, *columns) for caption, columns in words.further_tables(size)]
        tables = [results_table(size), *further]
        sections.append(Section(at("results", size), titled("Results", size), tables=tables))
        if differences := differences_picture(size):
            caption = f"Paired differences to {size.baseline}. {words.describe_columns(size)}"
            tables = [PageTable(caption, *words.differences_table(size))]
            sections.append(
                Section(at("differences", size), titled("Differences", size), picture=differences, tables=tables)
            )
        if (prices := prices_part(size, at("prices", size), titled("Prices", size))) is not None:
            sections.append(prices)
    if comparison.tuning:
        rates, edges = rates_table(sizes)
        sections.append(Section(f"{name}-rates", "Learning rates", paragraphs=edges, tables=[rates]))
    if (scaling := scaling_part(sizes, f"{name}-scaling")) is not None:
        sections.append(scaling)
    sections.append(commands_part(sizes, f"{name}-commands"))
    sections.append(changes_part(sizes, f"{name}-changes"))
    environment = [data_table(comparison), machines_table(sizes)]
    sections.append(Section(f"{name}-environment", "Data and environment", tables=environment))
    if warnings := list_warnings(sizes):
        sections.append(Section(f"{name}-warnings", f"Warnings ({len(warnings)})", items=warnings))
    return Story(
        id=name,
        title=comparison.title,
        question=words.state_question(sizes),
        answers=[(f"{size.size}: " if several else "") + words.state_answer(size) for size in sizes],
        parts=sections,
    )


def results_table(comparison: Comparison) -> PageTable:
    classes = {"better": "better", "worse": "worse", "diverged": "worse"}
    rows = words.result_rows(comparison)
    cells: list[list[PageCell]] = []
    for row, summary in zip(rows, comparison.summaries, strict=True):
        marked = (row["verdict"], classes.get(summary.verdict(comparison.lower_is_better), ""))
        cells.append([marked if name == "verdict" else cell for name, cell in row.items()])
    return PageTable(f"Held-out {comparison.unit} at the end. {words.describe_test(comparison)}", list(rows[0]), cells)


def rates_table(sizes: Sequence[Comparison]) -> tuple[PageTable, list[str]]:
    """Make the table of learning rates, with a note if a chosen one is at the edge and may not be the best."""
    comparison = sizes[0]
    trials: dict[str, dict[float, list[RunRecord]]] = {}
    for record in comparison.tuning:
        rate = float(record.recipe["training"]["learning_rate"])
        trials.setdefault(arm_of(record), {}).setdefault(rate, []).append(record)
    rates = sorted({rate for by_rate in trials.values() for rate in by_rate})
    chosen = {summary.arm: summary.learning_rate for comparison in sizes for summary in comparison.summaries}
    order = {arm: index for index, arm in enumerate(comparison.arms)}
    arms = sorted(trials, key=lambda arm: order.get(arm, len(order)))
    rows: list[list[PageCell]] = [
        [arm, *(_rate_cell(trials[arm].get(rate, []), rate == chosen.get(arm)) for rate in rates)] for arm in arms
    ]
    edges = [note for arm in arms if (note := _edge_note(arm, sorted(trials[arm]), chosen.get(arm)))]
    seeds = sorted({record.seed for record in comparison.tuning})
    caption = (
        f"Mean held-out {comparison.unit} of every arm at every learning rate, over "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, which are not part of the "
        "comparison; each arm was then trained at its own best rate."
    )
    return PageTable(caption, ["", *(f"{rate:g}" for rate in rates)], rows), edges


def _edge_note(arm: str, rates: list[float], chosen: float | None) -> str:
    if len(rates) < 2 or chosen not in (rates[0], rates[-1]):
        return ""
    edge, beyond = ("smallest", "smaller") if chosen == rates[0] else ("largest", "larger")
    return f"{arm}: {chosen:g} is the {edge} rate tried; a {beyond} one may be better."


def _rate_cell(records: Sequence[RunRecord], chosen: bool) -> PageCell:
    results = [record.result for record in records if record.status == "finished" and record.result is not None]
    diverged = sum(record.status == "diverged" for record in records)
    mean = f"{sum(results) / len(results):.3f}" if results else ""
    text = ", ".join(filter(None, (mean, f"diverged {diverged} of {len(records)}" if diverged else "")))
    return (f"{text} chosen", "better") if chosen else text


def prices_part(comparison: Comparison, name: str, title: str) -> Section | None:
    """Make the part on gains and their costs; None if costs were not measured."""
    prices = find_prices(comparison)
    if isinstance(prices, str):
        return Section(name, title, [prices]) if prices else None
    table = PageTable(f"What each arm costs. {where_measured(prices)}", *prices_table(comparison, prices))
    return Section(name, title, tables=[table])


def scaling_part(sizes: Sequence[Comparison], name: str) -> Section | None:
    """Make the part on loss against size, if there are three or more sizes."""
    if len(sizes) < 3:
        return None
    records = [record for size in sizes for record in size.records]
    try:
        scaling = fit_scaling(records)
    except HeadwaterError as error:
        return Section(name, "Scaling", paragraphs=[str(error)])
    if scaling is None:
        return None
    columns = ["", "E", "A", "a", "error"]
    rows = [
        [law.arm, *(f"{constant:.4g}" for constant in (law.e, law.a, law.exponent)), f"{law.error:.2g}"]
        for law in scaling.laws
    ]
    quality = "Error: root mean square of the residuals."
    if len(sizes) == LEAST_SIZES:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
        quality = (
            "With three sizes for three constants the fit has no degrees of freedom left, so it is no evidence for the "
            "law's form."
        )
    caption = (
        f"Fitted laws, L = E + A/N^a (Hoffmann et al., arXiv 2203.15556). {quality} Intervals of the sizes below: "
        "95 %, by the jackknife over the seeds."
    )
    picture = scaling_picture(scaling, sizes[0].title, sizes[0].arms)
    table = PageTable(caption, columns, rows)
    return Section(name, "Scaling", picture=picture, tables=[table], items=scaling.sentences())


def commands_part(sizes: Sequence[Comparison], name: str) -> Section:
    """Show the baseline's recipe, and the command that trains it."""
    record = _baseline_record(sizes[0])
    file = f"{_make_id(sizes[0].name)}.yaml"
    text = (
        f"The recipe of {arm_of(record)}, seed {record.seed}, as recorded; the changes of the other arms follow. "
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
    caption = f"Changes of each arm to {base}" + (f", {comparison.size}" if comparison.size else "")
    return PageTable(f"{caption}.", ["", "field", base, "here"], rows, text=True)


def _size_changes(sizes: Sequence[Comparison]) -> PageTable:
    settings = [flatten_settings(_baseline_record(comparison).recipe) for comparison in sizes]
    rows: list[list[PageCell]] = []
    for key in dict.fromkeys(chain.from_iterable(settings)):
        values = [values_of_size.get(key, "–") for values_of_size in settings]
        if len(set(values)) > 1 and key not in ("name", "seed"):
            rows.append([key, *values])
    columns = ["field", *(str(comparison.size) for comparison in sizes)]
    return PageTable("Changes of each size.", columns, rows, text=True)


def data_table(comparison: Comparison) -> PageTable:
    record = comparison.records[0]
    facts = record.data | {"order of rows, seed " + str(record.seed): record.data_order}
    texts = {key: f"{value:,}" if type(value) is int else str(value) for key, value in facts.items() if value != ""}
    return PageTable("Data", ["", "value"], [[key.replace("_", " "), text] for key, text in texts.items()], text=True)


def machines_table(sizes: Sequence[Comparison]) -> PageTable:
    """Make the table of the runs' environments, one column each."""
    records = sorted((r for size in sizes for r in size.records), key=lambda r: r.environment.model_dump_json())
    columns = [_describe_environment(list(runs)) for _, runs in groupby(records, key=lambda r: r.environment)]
    names = ["value"] if len(columns) == 1 else [f"{number}" for number in range(1, len(columns) + 1)]
    rows: list[list[PageCell]] = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return PageTable("Environment", ["", *names], rows, text=True)


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
            run = ", ".join(filter(None, (arm_of(record), size.size, f"seed {record.seed}")))
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
