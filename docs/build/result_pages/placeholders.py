"""Write docs/results.md: the text of results/summary.md, with its figures (`make results`).

A figure is a placeholder there:

    {{ claim | TABLE | NUMBER }}                    a claim's difference with its interval
    {{ gpu-claim | TABLE | NUMBER }}                the same at the scale of a GPU
    {{ verdict | TABLE | NUMBER }}                  its verdict
    {{ arm | COMPARISON @ SIZE | ARM | WHAT }}      mean, difference, or share of the baseline's parameters or cache
    {{ cell | FILE | TITLE | ROW | COLUMN }}        a cell of FILE.json, by the title's beginning and the first cell
    {{ price | EXPERIMENT | ARM }}                  training time per token, times that of vanilla
    {{ decoding | EXPERIMENT | ARM }}               decoding time per token, times that of vanilla
    {{ gpu | DEVICE | PHASE | FIELD=VALUE | KEY }}  a figure of a GPU benchmark
    {{ minutes | DEVICE | FIELD=VALUE }}            minutes for a billion tokens of training on a GPU
    {{ count | WHAT }}                              a number of claims

In a table of the page, the bars are written `\\|`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from . import benchmark_pages
from .judging import MEASURED, ROOT, judge_everything
from .page_tables import write_value

SUMMARY, PAGE = ROOT / "results" / "summary.md", ROOT / "docs" / "results.md"
PLACEHOLDER = re.compile(r"\{\{ *(.*?) *\}\}", re.DOTALL)


def fill_placeholders(markdown: str) -> str:
    """Fill in the figures of a page. Raises `ValueError` for a placeholder that names nothing."""

    def fill(match: re.Match[str]) -> str:
        kind, *names = (part.strip() for part in " ".join(match[1].split()).replace("\\|", "|").split("|"))
        try:
            return FILLERS[kind](*names)
        except (KeyError, StopIteration, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"nothing is called {{{{ {match[1]} }}}} ({error!r})") from error

    return PLACEHOLDER.sub(fill, markdown)


def fill_claim(table: str, number: str) -> str:
    return _shorten(judge_everything().find_claim(table, int(number)).evidence)


def fill_gpu_claim(table: str, number: str) -> str:
    return _shorten(judge_everything().find_claim(table, int(number), "gpu").evidence)


def _shorten(evidence: str) -> str:
    """The estimate and interval in a claim's evidence. Signs are left out where all of it is positive."""
    match = re.search(r": (\[.*?\](?:, estimate \S+)?|[+-]?[\d.,]+%? \[.*?\])", evidence)
    if match is None:
        raise ValueError(f"no interval in {evidence!r}")
    return _sign(match[1])


def _sign(text: str) -> str:
    return text.replace("-", "−") if "-" in text else text.replace("+", "")


def fill_verdict(table: str, number: str) -> str:
    return judge_everything().find_claim(table, int(number)).verdict


def fill_arm(comparison: str, arm: str, what: str) -> str:
    name, _, size = comparison.partition(" @ ")
    runs = judge_everything().find_comparison(name, size or None)
    summaries = {summary.arm: summary for summary in runs.summaries}
    summary, base = summaries[arm], summaries[runs.baseline]
    if what == "parameters":
        return f"{summary.parameters / base.parameters:.0%}".replace("%", " %")
    if what == "cache":
        return f"{summary.cache_bytes_per_token / base.cache_bytes_per_token:.0%}".replace("%", " %")
    if what == "mean":
        return f"{summary.mean:.3f}"
    low, high = summary.interval
    return _sign(f"{summary.difference:+.3f} [{low:+.3f}, {high:+.3f}]")


def fill_cell(file: str, title: str, row: str, column: str) -> str:
    items = benchmark_pages.read_measurements(f"{file}.json")
    item = next(item for item in items if (item.get("title") or item["setting"]).startswith(title))
    values = next(entry for entry in item["rows"] if row == next(iter(entry.values())))
    text = write_value(values[column])
    return text if "−" in text else text.replace("+", "")


def fill_training_time(experiment: str, arm: str) -> str:
    return f"{benchmark_pages.read_arm_costs()[experiment][arm][benchmark_pages.TRAINING_TIME]:.2f}"


def fill_decoding(experiment: str, arm: str) -> str:
    return f"{benchmark_pages.read_arm_costs()[experiment][arm][benchmark_pages.DECODING_TIME]:.2f}"


def fill_gpu(device: str, phase: str, row: str, key: str) -> str:
    value = _find_gpu_figure(device, phase, row, key)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fill_minutes(device: str, row: str) -> str:
    return f"{1e9 / _find_gpu_figure(device, 'training', row, 'tokens/s') / 60:.0f}"


def _find_gpu_figure(device: str, phase: str, row: str, key: str) -> float:
    fields = {name: int(value) if value.isdigit() else value for name, value in re.findall(r"(\w+)=([^,]+)", row)}
    name = next(run["device"] for run in benchmark_pages.read_gpu_runs()["runs"].values() if device in run["device"])
    figure = benchmark_pages.find_gpu_figure(name, phase, fields, key)
    if figure is None:
        raise KeyError(row)
    return figure[0]


def fill_count(what: str) -> str:
    claims = judge_everything().claims
    measured = [claim for claim in claims if claim.kind == MEASURED]
    counts = {
        "measured": len(measured),
        "recomputed": sum(claim.recorded for claim in measured),
        "counted or computed": len(claims) - len(measured),
        **{
            verdict: sum(claim.verdict == verdict for claim in measured)
            for verdict in ("replicates", "fails", "inconclusive")
        },
    }
    return str(counts[what])


FILLERS: dict[str, Callable[..., str]] = {
    "claim": fill_claim,
    "gpu-claim": fill_gpu_claim,
    "verdict": fill_verdict,
    "arm": fill_arm,
    "cell": fill_cell,
    "price": fill_training_time,
    "decoding": fill_decoding,
    "gpu": fill_gpu,
    "minutes": fill_minutes,
    "count": fill_count,
}

if __name__ == "__main__":
    PAGE.write_text(fill_placeholders(SUMMARY.read_text()))
