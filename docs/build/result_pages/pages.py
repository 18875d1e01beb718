"""The generated pages of results, as Markdown: all claims, the papers' tables, and the ledger."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headwater.util.errors import HeadwaterError
from headwater_lab.papers.kept import read_runs
from headwater_lab.papers.result import lay_out_cells, table_caption
from headwater_lab.papers.shared_records import check_runs
from headwater_lab.reports.comparison import Comparison
from headwater_lab.reports.words import result_rows

from . import benchmark_pages, svg
from .benchmark_pages import TRAINING_TIME, read_arm_costs, render_measurements
from .judging import (
    COMPUTED,
    COUNTED_EXACTLY,
    MEASURED,
    RESULTS,
    Claim,
    TableResult,
    describe_hardware,
    describe_recordings,
    judge_everything,
    make_anchor,
    read_said,
)
from .page_tables import GENERATED, Markup, PageTable, Source, render_table, render_text

PAPERS = {
    "kv-shifting": "KV shifting attention",
    "value-residual": "Value residual",
    "tokenformer": "TokenFormer",
    "skip-layer": "Skip-layer attention",
}
LEDGER = "ledger"
NAMES = PAPERS | {LEDGER: "The ledger"}
REPOSITORY = "in the repository"
PROBES = {"ledger-ngram": "3-grams", "ledger-recall": "recall", "ledger-induction": "induction", "ledger-hop": "hops"}
ARMS = {
    "ledger-text": "English, 1.3M parameters",
    "ledger-code": "Source code, 2.9M parameters",
    "recommended-test": "The recommendation: source code, 2.9M parameters, equal training time",
    "recommended-gpu": "The recommendation on a GPU: source code, 26M parameters",
    "recommended-gpu-subwords": "With subwords on a GPU: source code, 34M parameters",
}
RECIPES = {
    "ledger-text": "ledger/text",
    "ledger-code": "ledger/code",
    "ledger-ngram": "ledger/ngram",
    "ledger-recall": "ledger/recall",
    "ledger-induction": "ledger/induction",
    "ledger-hop": "ledger/hop",
    "recommended-test": "recommended/test",
    "recommended-gpu": "recommended/gpu",
    "recommended-gpu-subwords": "recommended/gpu-subwords",
}


# Claims


def count_claims(claims: Sequence[Claim]) -> Counter[tuple[str, str]]:
    """Count claims by kind and verdict."""
    return Counter((claim.kind, claim.verdict) for claim in claims)


def group_of(claim: Claim) -> str:
    """Name the group of a claim in the table of counts."""
    name = NAMES[claim.table.partition("/")[0]]
    return name if claim.scale == "cpu" else f"{name}, {claim.scale.upper()}"


def tabulate_counts(claims: Sequence[Claim]) -> PageTable:
    """Lay out the numbers of claims by paper: measured ones by verdict; counted and computed ones apart."""
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(group_of(claim), []).append(claim)
    rows = [_count_row(name, members) for name, members in groups.items()]
    rows += [_count_row("all", claims)] if len(groups) > 1 else []
    columns = [
        "", "measured claims", "replicate", "fail", "inconclusive", "recomputed here", "counted", "computed",
    ]  # fmt: skip
    return PageTable("Claims by paper", columns, rows)


def _count_row(name: str, claims: Sequence[Claim]) -> list[str]:
    counts = count_claims(claims)
    measured = [claim for claim in claims if claim.kind == MEASURED]
    recorded = sum(claim.recorded for claim in measured)
    numbers = [counts[MEASURED, verdict] for verdict in ("replicates", "fails", "inconclusive")]
    others = [_count_others(counts, kind) for kind in (COUNTED_EXACTLY, COMPUTED)]
    share = f"{recorded} ({recorded / len(measured):.0%})" if measured else ""
    return [name, str(len(measured)), *map(str, numbers), share, *others]


def _count_others(counts: Mapping[tuple[str, str], int], kind: str) -> str:
    holds, fails = counts[kind, "replicates"], counts[kind, "fails"]
    return f"{holds} hold" + (f", {fails} not" if fails else "") if holds or fails else ""


def tabulate_claims(title: str, claims: Sequence[Claim], with_table: bool = True) -> PageTable:
    """Lay out claims with their verdicts and what each rests on."""
    columns = ["claim", "verdict", "seeds", "by"]
    rows: list[list[str]] = []
    for claim in claims:
        seeds = "" if claim.seeds is None else str(claim.seeds)
        rows.append([claim.says, claim.verdict, seeds, claim.evidence])
    if not with_table:
        return PageTable(title, columns, rows, choices=["verdict"])
    columns += ["runs", "recorded", "code", "machine"]
    rows = [
        [*row, _describe_runs(claim), claim.date, claim.code, claim.hardware]
        for row, claim in zip(rows, claims, strict=True)
    ]
    names = [[claim.table if claim.scale == "cpu" else f"{claim.table} --scale {claim.scale}"] for claim in claims]
    rows = [name + row for name, row in zip(names, rows, strict=True)]
    papers = [[group_of(claim)] for claim in claims]
    if len({paper for (paper,) in papers}) > 1:
        rows = [row[:1] + paper + row[1:] for row, paper in zip(rows, papers, strict=True)]
        return PageTable(title, ["table", "paper", *columns], rows, choices=["paper", "verdict", "runs"])
    return PageTable(title, ["table", *columns], rows, choices=["table", "verdict"])


def _describe_runs(claim: Claim) -> str:
    if claim.kind == COMPUTED:
        return "none needed"
    return REPOSITORY if claim.recorded else "not in the repository"


def write_claims_page() -> str:
    """Write the index: how many claims there are, and all of them in one table."""
    claims = judge_everything().claims
    return (
        f"# All claims\n\n{GENERATED}\n"
        "A claim replicates if the interval of its figure lies in the region that the claim states, fails if it lies "
        "outside, and is inconclusive otherwise ([how claims are judged](../reproduce.md#what-a-verdict-means)). "
        "Claims about numbers of parameters, FLOPs or cache bytes are counted, and theorems and cost formulas are "
        "computed, both without chance. *Recomputed here*: the runs are in `results/`, and this build has judged them "
        "again. The other verdicts are those that `headwater reproduce` printed when the runs were made "
        "(`results/verdicts-without-records.json`). *Added in commit*: the runs recorded no commit, so this one added "
        "them to the repository, and the date is its date.\n"
        f"{render_table(tabulate_counts(claims))}{svg.draw_counts(claims, group_of)}"
        "\nThe command of a row is `headwater reproduce TABLE`. It trains the table, or resumes.\n"
        f"{render_table(tabulate_claims('Every claim', claims))}"
    )


# The papers' tables


def write_paper_page(paper: str) -> str:
    """Write the page of a paper: each of its tables beside ours, and the verdicts on its claims."""
    tables = [table for table in judge_everything().tables if table.name.startswith(f"{paper}/")]
    claims = [claim for table in tables for claim in table.claims]
    shown = [table for table in tables if table.claims or table.result is not None]
    absent = [table for table in tables if table not in shown]
    parts = [f"# {NAMES[paper]}: the paper's tables\n\n{GENERATED}", render_table(tabulate_counts(claims))]
    parts += [f"- [{_name_section(table)}](#{make_anchor(table.name)})" for table in shown]
    parts += [write_table_section(table) for table in shown]
    if absent:
        rows = [[table.name, table.table.title, table.reason] for table in absent]
        title = "Tables without results at this size, and why"
        parts += ["\n## Not run\n", render_table(PageTable(title, ["table", "title", "reason"], rows))]
    return "\n".join(parts)


def write_table_section(table: TableResult) -> str:
    """Write the section of a table: the paper's figures beside ours, its claims, and remarks."""
    at = table.table.scales.get(table.scale) if table.table.scales else None
    heading = f"\n## {_name_section(table)} {{ #{make_anchor(table.name)} }}\n"
    lines = [heading, f"{table.table.source}. The paper: {table.table.says}\n"]
    if at is not None:
        lines.append(f"Our setting: {at.setting}\n")
    if table.reason:
        lines.append(f"No verdict at this size: {table.reason}\n")
    lines.append(render_table(_lay_out_figures(table)) if _has_figures(table) else "")
    if table.result is not None and table.result.figure is not None:
        lines.append(svg.render_figure(table.result.figure, table.table.title))
    if table.claims:
        title = f"Claims of {table.name}"
        claims = tabulate_claims(title, table.claims, with_table=False)
        lines.append(
            render_table(PageTable(title, claims.columns, claims.rows, _describe_source(table), claims.choices))
        )
    remarks = [*(at.remarks if at is not None else ()), *table.table.notes]
    lines += [f"- {_plain(remark)}" for remark in remarks]
    return "\n".join(lines)


def _name_section(table: TableResult) -> str:
    return f"{table.name.partition('/')[2]}: {table.table.title}"


def _plain(remark: str) -> str:
    """A remark with names of pages as text: the files are not at these addresses on the site."""
    return " ".join(remark.split()).replace("*", r"\*")


def _has_figures(table: TableResult) -> bool:
    return table.result is not None or any(cell.paper is not None for row in table.table.rows for cell in row.cells)


def _lay_out_figures(table: TableResult) -> PageTable:
    """Lay out the paper's figures beside ours; without runs, the paper's alone."""
    if table.result is not None:
        names, rows = lay_out_cells(table.result)
        return PageTable(
            f"{table.table.title}. {table_caption(table.result)}", _unique(names), rows, _describe_source(table)
        )
    paper = table.table
    shown = [i for i in range(len(paper.columns)) if any(row.cells[i].paper is not None for row in paper.rows)]
    rows = [[row.label, *(row.cells[i].paper or "" for i in shown)] for row in paper.rows]
    return PageTable(f"{paper.title}: the paper's figures", ["", *(paper.columns[i].name for i in shown)], rows)


def _unique(names: Sequence[str]) -> list[str]:
    """Columns called `ours` after the column of the paper that each stands beside."""
    return [f"{names[i - 1].removesuffix(', paper')}, ours" if name == "ours" else name for i, name in enumerate(names)]


def _describe_source(table: TableResult) -> Source:
    claim = next(iter(table.claims), None)
    if table.result is not None and table.result.work is None:
        return Source(command=table.command, note="Computed at each build, without training.")
    seeds = sorted({claim.seeds for claim in table.claims if claim.seeds})
    words = "" if not seeds else f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    if claim is None:
        return Source(command=table.command)
    if not claim.recorded:
        note = "The verdicts are stored ones: not all runs of this table are in the repository."
        file = "results/verdicts-without-records.json"
        return Source(table.command, claim.date, claim.code, seeds=words, file=file, note=note)
    command = f"{table.command}; {table.from_records}"
    return Source(command, claim.date, claim.code, claim.hardware, words)


# The ledger


def _write_time(comparison: Comparison, arm: str) -> str:
    """Write an arm's training time per token over the baseline's, measured in interleaved turns; '' if it was not."""
    costs = read_arm_costs()
    rows = costs.get(comparison.name) or costs.get(f"{comparison.name}/long", {})
    row = rows.get(arm)
    if row is None:
        return ""
    quartiles = row["training time per token, quartiles"]
    ends = f" [{quartiles[0]:.2f}, {quartiles[1]:.2f}]" if quartiles else ""
    return f"×{row[TRAINING_TIME]:.2f}{ends}"


def tabulate_arms(comparison: Comparison, title: str) -> PageTable:
    """Lay out a comparison: means, differences from the baseline, verdicts, and what each arm costs."""
    results = result_rows(comparison)
    names = list(results[0])
    rows, times = [], []
    for summary, cells in zip(comparison.summaries, results, strict=True):
        rate = "" if summary.learning_rate is None else f"{summary.learning_rate:g}"
        steps = [cells[name] for name in names if name.startswith("steps to ")]
        row = [summary.arm, cells[names[1]], cells[names[2]], cells["verdict"], *steps, str(summary.runs), rate]
        rows.append([*row, f"{summary.parameters:,}", f"{summary.cache_bytes_per_token:,}"])
        times.append(_write_time(comparison, summary.arm))
    columns = ["arm", names[1], names[2], "verdict", *(name for name in names if name.startswith("steps to "))]
    columns += ["seeds", "learning rate", "parameters", "cache B/token"]
    if any(times):
        columns.append("training time/token")
        rows = [[*row, time] for row, time in zip(rows, times, strict=True)]
    size = "" if comparison.size is None else f" --size {comparison.size}"
    source = Source(
        f"headwater compare {RECIPES[comparison.name]}{size}",
        *describe_recordings(comparison.records),
        hardware=describe_hardware(comparison.records),
        seeds="seeds " + ", ".join(map(str, comparison.seeds)),
        file="results/ledger.jsonl",
        note=_describe_absent(comparison),
    )
    return PageTable(title, columns, rows, source, choices=["verdict"])


def write_shared_page(folder: Path = RESULTS / "shared") -> str:
    """Write the page of comparisons that others ran: every file of the folder, each checked, with its verdicts."""
    parts = [
        f"# Shared comparisons\n\n{GENERATED}\n"
        "Each file was packed by `headwater records pack` and passes `headwater records check`. The verdicts below are "
        "computed from its runs. [How to add one](../reproduce.md#share-your-runs).\n",
    ]
    for file in sorted(folder.glob("*.jsonl")):
        runs = read_runs(file)
        comparisons, problems = check_runs(runs)
        if problems:
            raise HeadwaterError(f"{file}: {problems[0]}")
        for comparison in comparisons:
            rows = result_rows(comparison)
            source = Source(
                f"headwater records check results/{folder.name}/{file.name}",
                *describe_recordings(comparison.records),
                hardware=describe_hardware(comparison.records),
                seeds="seeds " + ", ".join(map(str, comparison.seeds)),
                file=f"results/{folder.name}/{file.name}",
                note=f"Run by {', '.join(sorted({run.by for run in runs}))}.",
            )
            columns = ["arm", *list(rows[0])[1:]]
            parts.append(
                render_table(PageTable(comparison.heading, columns, [[*row.values()] for row in rows], source))
            )
    return "\n".join(parts if parts[1:] else [*parts, "There is none yet.\n"])


def _describe_absent(comparison: Comparison) -> str:
    arms = {summary.arm for summary in comparison.summaries}
    absent = [arm for arm in read_arm_costs().get(comparison.name, ()) if arm not in arms]
    if not absent:
        return ""
    return f"Runs of these arms are not in the repository, but their claims are below: {', '.join(absent)}."


def tabulate_probes() -> PageTable:
    """Lay out how many steps each arm takes to the threshold in the four probes."""
    verdicts = judge_everything()
    steps_by_arm: dict[str, dict[str, str]] = {}
    sooner = {
        (claim.table.partition("/")[2], claim.arms.partition(" against ")[0]): claim.verdict
        for claim in verdicts.claims
        if claim.table.startswith("ledger/")
    }
    for name, probe in PROBES.items():
        comparison = verdicts.find_comparison(name)
        for summary in comparison.summaries:
            steps = summary.steps_to_threshold or []
            reached = [step for step in steps if step is not None]
            mean = f"{sum(reached) / len(reached):.0f}" if reached else "never"
            some = f" in {len(reached)} of {len(steps)}" if reached and len(reached) < len(steps) else ""
            verdict = sooner.get((name.removeprefix("ledger-"), summary.arm), "")
            mark = {"replicates": ", sooner", "fails": ", later"}.get(verdict, "")
            steps_by_arm.setdefault(summary.arm, {})[probe] = f"{mean}{some}{mark}"
    columns = ["arm", *PROBES.values()]
    rows = [[arm, *(cells.get(probe, "") for probe in PROBES.values())] for arm, cells in steps_by_arm.items()]
    records = [record for name in PROBES for record in verdicts.find_comparison(name).records]
    source = Source(
        "; ".join(f"headwater compare {RECIPES[name]}" for name in PROBES),
        *describe_recordings(records),
        hardware=describe_hardware(records),
        seeds="five seeds",
        file="results/ledger.jsonl",
        note="*Sooner*, *later*: the claim about this arm and vanilla replicates, or fails.".replace("*", ""),
    )
    return PageTable("Mean steps to an accuracy of 0.9", columns, rows, source)


def tabulate_sources(claims: Sequence[Claim]) -> PageTable:
    """Lay out what public sources say about claims beside our verdicts, a row a source."""
    rows: list[list[str]] = []
    for claim in claims:
        for item in read_said().get(claim.table, {}).get(claim.arms, ()):
            link = Markup(f'<a href="{item["url"]}">{render_text(item["source"])}</a>')
            rows.append([claim.says, item["stance"], link, item["finding"], claim.verdict, claim.evidence])
    columns = ["claim", "the source is", "source", "it finds", "we find", "by"]
    title = "What others have said in public, and what our models say"
    note = "Each verdict is about our small models and refutes nobody's results with others."
    return PageTable(title, columns, rows, Source(file="results/said.yaml", note=note), ["the source is", "we find"])


def write_ledger_page() -> str:
    """Write the ledger: all arms against vanilla, costs, what others say, and every claim."""
    verdicts = judge_everything()
    claims = [claim for claim in verdicts.claims if claim.table.startswith(f"{LEDGER}/")]
    text = verdicts.find_comparison("ledger-text")
    parts = [
        f"# The ledger\n\n{GENERATED}\n"
        "Every source of keys and values against a plain Transformer, *vanilla*, on the same data, each arm at its own "
        "learning rate. The verdicts are about models of this size on this text. The log of [results](../results.md) "
        "says what follows from them, and the recipes are in `recipes/ledger`.\n",
        render_table(tabulate_counts(claims)),
        "\n## Arms\n",
        "[The recommendation](#how-the-recommendation-was-chosen) · [probes](#probes) · "
        "[what others say](#what-others-say) · [what an arm costs](#what-an-arm-costs) · [all claims](#all-claims)\n",
        svg.draw_differences(text, "English, 1.3M parameters: difference from vanilla in bits per byte"),
    ]
    for name, title in ARMS.items():
        sizes = [comparison for comparison in verdicts.comparisons if comparison.name == name]
        for comparison in sizes:
            size = "" if comparison.size is None else f", {_name_budget(comparison)}"
            parts.append(render_table(tabulate_arms(comparison, f"{title}{size}")))
        if name == "recommended-test":
            parts.append(svg.draw_curves(sizes[-1], f"{title}: training loss, mean over the seeds"))
    parts += ["\n## Probes\n", render_table(tabulate_probes())]
    parts += ["\n## What others say\n", render_table(tabulate_sources(claims))]
    parts += ["\n## What an arm costs\n", *render_measurements("cpu-prices.json", ["What each arm costs"])]
    parts += ["\n## How the recommendation was chosen\n"]
    parts += render_measurements("cpu-prices.json", ["How it was chosen", "The recommendation"])
    parts += render_measurements("comparisons.json", ["recommendation"])
    parts += ["\n## All claims\n", render_table(tabulate_claims("Claims of the ledger", claims))]
    runs = [table for table in verdicts.tables if table.name.startswith(f"{LEDGER}/")]
    rows = [
        [table.name, table.table.title, str(len(table.claims)), *_describe_table(table), table.command]
        for table in runs
    ]
    columns = ["table", "title", "claims", "runs", "recorded", "code", "machine", "command"]
    parts.append(render_table(PageTable("The ledger's tables", columns, rows)))
    return "\n".join(parts)


def _name_budget(comparison: Comparison) -> str:
    steps = comparison.records[0].recipe["training"]["steps"]
    return f"{steps:,} of vanilla's steps"


def _describe_table(table: TableResult) -> list[str]:
    claim = table.claims[0]
    return [_describe_runs(claim), claim.date, claim.code, claim.hardware]


PAGES: dict[str, Callable[[], str]] = {
    "results/claims.md": write_claims_page,
    "results/ledger.md": write_ledger_page,
    **{f"results/{paper}.md": functools.partial(write_paper_page, paper) for paper in PAPERS},
    "results/growth.md": benchmark_pages.write_growth_page,
    "results/conversion.md": benchmark_pages.write_conversion_page,
    "results/images.md": benchmark_pages.write_images_page,
    "results/initialization.md": benchmark_pages.write_initialization_page,
    "results/demo.md": benchmark_pages.write_demo_page,
    "results/speed.md": benchmark_pages.write_speed_page,
    "results/gpu.md": benchmark_pages.write_gpu_page,
    "results/verified.md": benchmark_pages.write_verified_page,
    "results/shared.md": write_shared_page,
}
