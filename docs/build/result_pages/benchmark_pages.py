"""Pages of benchmarks and of comparisons whose runs are not in the repository, from the JSON files in results/."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from headwater_lab.bench import gpu_queue

from . import svg
from .judging import RESULTS, describe_code
from .page_tables import GENERATED, PageTable, Source, render_table, tabulate, write_value

TRAINING_TIME = "training time per token, times vanilla's"
DECODING_TIME = "decoding time per token, times vanilla's"


@functools.cache
def read_arm_costs() -> dict[str, dict[str, Mapping[str, Any]]]:
    """Measured costs of arms, by experiment and arm."""
    costs: dict[str, dict[str, Mapping[str, Any]]] = {}
    for measurement in read_measurements("cpu-prices.json"):
        if match := re.match(r"experiment ([\w/-]+), against", measurement["setting"]):
            costs[match[1]] = {row["arm"]: row for row in measurement["rows"]}
    return costs


@functools.cache
def read_measurements(name: str) -> list[dict[str, Any]]:
    """The measurements of a JSON file in results/."""
    return json.loads((RESULTS / name).read_text())["measurements"]


def render_measurements(name: str, topics: Sequence[str]) -> list[str]:
    return [render_table(make_table(name, item)) for item in read_measurements(name) if item["topic"] in topics]


def make_table(name: str, item: Mapping[str, Any]) -> PageTable:
    """Lay out one measurement of a JSON file, with its command, date and machine."""
    columns, rows = tabulate(item["rows"])
    machine = [item.get("cpu"), f"PyTorch {item['torch']}" if item.get("torch") else None]
    machine += [f"{item['threads']} threads"] if (item.get("threads") or 1) > 1 else []
    seeds = item.get("seeds")
    source = Source(
        item["command"] or "",
        item["date"] or "",
        describe_code(item.get("commit") or "", item.get("added", "")),
        ", ".join(filter(None, machine)),
        "" if seeds is None else f"{seeds} seed{'s' * (seeds > 1)}",
        f"results/{name}",
        item.get("note") or "",
    )
    title = item.get("title") or item["topic"]
    title += f": {item['setting']}" if item["setting"] else ""
    return PageTable(title, columns, rows, source)


def write_measurements_page(heading: str, name: str, topics: Mapping[str, str], text: str = "") -> str:
    """Write a page of measurements. topics: the file's topics and their headings, '' for none."""
    parts = [f"# {heading}\n\n{GENERATED}", text]
    for topic, title in topics.items():
        parts += [f"\n## {title}\n"] if title else []
        parts += render_measurements(name, [topic])
    return "\n".join(parts)


def write_speed_page() -> str:
    """Write the page of timings on CPUs."""
    skipped = {"Demo"}  # its page has it
    topics = {
        item["topic"]: item["topic"] for item in read_measurements("cpu-speed.json") if item["topic"] not in skipped
    }
    text = (
        "Compared runs are interleaved, so that changes of the machine's speed affect both. A ratio is a median over "
        "the pairs, with quartiles. Medians vary by 0.02 between runs on an idle machine, in decoding by 0.05. Some "
        "options have other names since, and a few commands are gone.\n"
    )
    return write_measurements_page("Speed on CPUs", "cpu-speed.json", topics, text)


def read_gpu_runs() -> dict[str, Any]:
    """What is known of the GPU benchmarks beside their reports."""
    return yaml.safe_load((RESULTS / "gpu-runs.yaml").read_text())


@functools.cache
def read_gpu_rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    """(phase, row) of a GPU benchmark's report, without the rows for which there was no time."""
    lines = gpu_queue.read_lines(RESULTS / name)
    rows = [(line["phase"], line["row"] | line["result"]) for line in lines if "row" in line]
    return [(phase, row) for phase, row in rows if not str(row.get("outcome")).startswith(("skipped", gpu_queue.CUT))]


def find_gpu_figure(device: str, phase: str, row: Mapping[str, Any], key: str) -> tuple[float, str] | None:
    """A figure of a device's reports, and the report's name: of the last report that has it."""
    for name, run in reversed(read_gpu_runs()["runs"].items()):
        if run["device"] != device:
            continue
        for row_phase, candidate in read_gpu_rows(name):
            if (
                row_phase == phase
                and key in candidate
                and all(candidate.get(field) == value for field, value in row.items())
            ):
                return candidate[key], name
    return None


def tabulate_targets(device: str) -> PageTable:
    """Lay out what was measured on a GPU beside the targets: of each row the last report that has it."""
    rows: dict[str, list[str]] = {}
    for name, run in read_gpu_runs()["runs"].items():
        for phase, columns in read_gpu_rows(name):
            if run["device"] == device and (judged := gpu_queue.judge_row(phase, columns, device)) is not None:
                target, figure = judged
                names = [cell for key, cell in columns.items() if isinstance(cell, str) and key != "quartiles"]
                what = f"{phase}: {', '.join(names)}"
                verdict = "met" if target.is_met(figure) else "missed"
                rows[what] = [what, target.key, target.bound, f"{figure:.3f}", verdict, f"results/{name}"]
    return PageTable(
        f"Targets, {device}", ["row", "figure", "target", "measured", "verdict", "report"], [*rows.values()]
    )


def write_gpu_page() -> str:
    """Write the page of GPU benchmarks: targets, then every report's rows by phase."""
    runs = read_gpu_runs()["runs"]
    parts = [f"# Speed and correctness on GPUs\n\n{GENERATED}\nRows for which there was no time are left out.\n"]
    for device in sorted({run["device"] for run in runs.values()}):
        short = device.removeprefix("NVIDIA ").partition(" ")[0]
        reports = {name: run for name, run in runs.items() if run["device"] == device}
        rows = [
            [f"results/{name}", run["command"], str(run["date"]), describe_code("", run["added"]), run.get("note", "")]
            for name, run in reports.items()
        ]
        parts += [f"\n## {short}\n", render_table(tabulate_targets(device))]
        parts.append(render_table(PageTable(f"Reports, {device}", ["report", "command", "date", "code", "note"], rows)))
        for phase in dict.fromkeys(phase for name in reports for phase, _ in read_gpu_rows(name)):
            parts.append(f"\n### {short}: {phase}\n")
            parts += [render_table(table) for name in reports for table in _tabulate_phase(name, phase)]
    return "\n".join(parts)


def _tabulate_phase(name: str, phase: str) -> list[PageTable]:
    """Lay out a phase of a report, a table for each kind of row."""
    run = read_gpu_runs()["runs"][name]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row_phase, row in read_gpu_rows(name):
        if row_phase == phase:
            kinds.setdefault(next(iter(row)), []).append(row)
    source = Source(
        run["command"], str(run["date"]), describe_code("", run["added"]), run["device"], file=f"results/{name}"
    )
    return [PageTable(f"{phase}: {kind}", *tabulate(rows), source) for kind, rows in kinds.items()]


def write_conversion_page() -> str:
    """Write the page of conversions to a smaller cache."""
    page = write_measurements_page("Smaller caches for trained models", "comparisons.json", {"conversion": ""})
    pictures = [
        svg.draw_caches(item["rows"], f"{item['title']}: quality over bytes.")
        for item in read_measurements("comparisons.json")
        if item["topic"] == "conversion" and len({row.get("cache, bytes a token") for row in item["rows"]}) > 3
    ]
    return page + "".join(pictures)


def write_images_page() -> str:
    """Write the page of image classifiers."""
    return write_measurements_page("Images", "comparisons.json", {"images": ""})


def write_initialization_page() -> str:
    """Write the page of initializations."""
    return write_measurements_page("Initialization", "comparisons.json", {"initialization": ""})


def show_images(images: Mapping[str, str]) -> str:
    """Show pictures of docs/, file name -> alternative text."""
    return "".join(f"\n![{text}](../{name})\n" for name, text in images.items())


def write_growth_page() -> str:
    """Write the page of growing models."""
    page = write_measurements_page("Growing models", "comparisons.json", {"growth": ""})
    images = {
        "growth-ledger.png": "Held-out bits per byte at 215k parameters, and differences from the model from scratch",
        "growth-tau-curves.png": "Held-out bits per byte before and after growing, for each treatment of τ",
    }
    return page + show_images(images)


def write_demo_page() -> str:
    """Write the page of the demo's results."""
    page = write_measurements_page("The demo", "comparisons.json", {"demo": ""})
    images = {
        "demo-induction.png": "Induction: one layer with KV shift against one and two without",
        "demo-language.png": "Bits per byte on held-out files, and the paired differences",
    }
    return page + show_images(images)


def write_verified_page() -> str:
    """Write which of transformers' model types decode with a cache as without one."""
    name = "verify-model-types.json"
    report = json.loads((RESULTS / name).read_text())
    rows = [[kind, "same", ""] for kind in report["same"]]
    rows += [
        [kind, "differs", write_value(details["ways"]).replace(" – ", ", ")]
        for kind, details in report["differ"].items()
    ]
    rows += [[kind, "no verdict", why] for kind, why in report["no_verdict"].items()]
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    source = Source("headwater verify --type TYPE", hardware=f"{report['device']}; {versions}", file=f"results/{name}")
    table = PageTable(
        "transformers' model types: decoding with a cache against one pass without",
        ["type", "verdict", "where"],
        sorted(rows),
        source,
        ["verdict"],
    )
    same, differ, no_verdict = (len(report[name]) for name in ("same", "differ", "no_verdict"))
    counts = f"{same} types show no difference, {differ} do, and {no_verdict} give no verdict."
    return f"# Models of transformers, verified\n\n{GENERATED}\n{counts}\n{render_table(table)}"
