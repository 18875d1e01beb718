"""Records of comparisons that anybody ran: packed into a file as `papers.kept` reads, and checked before they count."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headwater.config.text import HeadwaterConfig
from headwater.cost.counts import cache_bytes_per_token, embedding_parameters, parameters, training_flops
from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import DataShape
from headwater_lab.data.language import LanguageSettings
from headwater_lab.papers.kept import KeptRun, dump_record, is_cut_off, read_runner, write_run
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.reports.comparison import Comparison, read_comparisons
from headwater_lab.training.records import ENDED, RunRecord, find_record, list_records, read_record
from headwater_lab.util.terminal import counted

# Seeds of each arm, without which a comparison is no entry.
MIN_SEEDS = 3


def pack_records(folder: Path, by: str) -> list[KeptRun]:
    """Collect the ended runs of comparisons below `folder`.

    by: who ran them, except those of `unpack_runs`, which have their own. Raises `HeadwaterError` if there are none.
    """
    runs = []
    for path in list_records(folder):
        record = read_record(path)
        if record.experiment is not None and record.status in ENDED:
            run = path.parent.relative_to(folder).as_posix()
            shared = record.model_copy(update={"data": _hide_folders(record.data)})
            runs.append(KeptRun(run=run, by=read_runner(path.parent) or by, record=shared))
    if not runs:
        raise HeadwaterError(f"There are no finished runs of a comparison under {str(folder)!r}.")
    return runs


def _hide_folders(data: dict[str, Any]) -> dict[str, Any]:
    """Leave only the name of a tokenizer that lies in a folder of somebody's machine."""
    tokenizer = Path(data.get("tokenizer") or "")
    return data | {"tokenizer": tokenizer.name} if tokenizer.is_absolute() else data


def unpack_runs(runs: Sequence[KeptRun], out: Path) -> int:
    """Write the records of some runs below `out`, and return how many; `headwater compare` then trains what is missing.

    A run that is there is left as it is. Raises `HeadwaterError` if a run's folder has other contents, and for runs
    with stages, each of which `compare` would look for; nothing is written then.
    """
    missing = []
    for run in runs:
        folder = out / run.run
        if run.record.stages:
            raise HeadwaterError(f"{run.run} has stages, whose runs are not in the file, so it cannot be continued.")
        if not folder.exists() or is_cut_off(folder):
            missing.append(run)
        elif (earlier := find_record(folder)) is None or dump_record(earlier) != dump_record(run.record):
            raise HeadwaterError(f"{str(folder)!r} is not that run of the file; choose another --out, or move it away.")
    for run in missing:
        write_run(run, out)
    return len(missing)


def compute_comparisons(runs: Sequence[KeptRun]) -> list[Comparison]:
    """Compute the comparisons of some runs anew from their records. Raises `HeadwaterError` as `read_comparisons`."""
    with TemporaryDirectory() as folder:
        for run in runs:
            write_run(run, Path(folder))
        return read_comparisons(Path(folder))


def check_runs(runs: Sequence[KeptRun]) -> tuple[list[Comparison], list[str]]:
    """Compute the comparisons of some runs, and list what is wrong or missing for entries, in sentences."""
    comparisons = compute_comparisons(runs)
    lacking = [f"{comparison.heading}: {line}" for comparison in comparisons for line in find_missing(comparison)]
    return comparisons, [*find_problems(runs), *lacking]


def find_problems(runs: Sequence[KeptRun]) -> list[str]:
    """List what is wrong with the runs of a file, in sentences: of each run, then of runs together."""
    problems = [f"{line.run}: {problem}" for line in runs for problem in _check_record(line.record, line.by)]
    curves: dict[str, KeptRun] = {}
    orders: dict[Any, str] = {}
    ratios: dict[tuple[str, str], float] = {}
    for line in runs:
        problems += [f"{line.run}: {problem}" for problem in _check_bits(line.record, ratios)]
        if orders.setdefault(line.record.rows_key, line.record.data_order) != line.record.data_order:
            problems.append(f"{line.run}: it did not read the same rows as the other runs of its seed.")
        # Two seeds never give the same losses, so one was copied from the other.
        points = repr([(point.step, point.loss) for point in line.record.curve])
        earlier = curves.setdefault(points, line)
        if line.record.curve and earlier.record.identity != line.record.identity:
            problems.append(f"{line.run}: its curve is that of {earlier.run}.")
    return problems


def _check_bits(record: RunRecord, ratios: dict[tuple[str, str], float]) -> Iterator[str]:
    """List evaluations whose bits per byte are not the loss times the constant of their text.

    ratios: these constants, by data and domain; new ones are added.
    """
    for point in record.held_out:
        for suffix in [f"/{name}" for name in record.domains] or [""]:
            bits, loss = point.metrics.get(f"bits_per_byte{suffix}"), point.metrics.get(f"loss{suffix}")
            if bits is None or not math.isfinite(bits):
                continue
            if not loss:
                yield f"it has bits per byte at step {point.step}, but no loss."
            elif math.isfinite(loss):
                ratio = ratios.setdefault((repr(record.recipe.get("data")), suffix), bits / loss)
                if not math.isclose(bits / loss, ratio, rel_tol=1e-6):
                    yield f"its bits per byte at step {point.step} do not follow from its loss."


def _check_record(record: RunRecord, by: str) -> Iterator[str]:
    """List what is wrong with a record."""
    if not by.strip():
        yield "nobody is named as having run it; pack it with --by."
    if record.experiment is None:
        yield "it belongs to no comparison."
    try:
        yield from _check_recipe(record, parse(record.recipe, "its recipe"))
    except HeadwaterError as error:
        yield f"{error}"
    if not record.environment.device_name:
        yield "its hardware has no name."
    commit = str(record.recorded and record.recorded.commit)
    if not re.fullmatch("[0-9a-f]{7,40}(-dirty)?", commit):
        yield "it names no commit; run it from a clone."
    elif commit.endswith("-dirty"):
        yield f"its code had changes that are in no commit ({commit})."
    yield from _check_points(record)


def _check_recipe(record: RunRecord, recipe: Recipe) -> Iterator[str]:
    """List what does not follow from a record's recipe: its identity, seed, metric, tokens, parameters and FLOPs."""
    if recipe.identity != record.identity:
        yield "its recipe does not have its identity: it was changed, or is of another version of headwater."
    elif recipe.seed != record.seed:
        yield f"its seed is {record.seed}, but its recipe's is {recipe.seed}."
    sources = record.recipe["data"].get("source")
    if isinstance(sources, dict):
        sources = [*sources.values()]
    for source in sources if isinstance(sources, list) else [sources]:
        if isinstance(source, str) and Path(source).is_absolute():
            yield "its data.source is a path of a machine; name it from the working directory."
    if isinstance(recipe.data, LanguageSettings):
        if not record.data.get("sha256"):
            yield "its data have no sha256."
        if (record.metric, record.lower_is_better) != (recipe.data.metric, True):
            yield f"its metric is not that of its recipe, {recipe.data.metric}, of which less is better."
    if record.status == "finished" and not (record.stages or recipe.start or recipe.training.trainable_mechanisms):
        yield from _check_costs(record, recipe)


def _check_costs(record: RunRecord, recipe: Recipe) -> Iterator[str]:
    """List the costs of a whole run that do not follow from its recipe."""
    tokens = recipe.tokens
    if record.tokens != tokens:
        yield f"it has seen {record.tokens:,} {record.unit}, but its recipe makes {tokens:,}."
    elif record.unit == "tokens":
        config = _build_config(record, recipe)
        if sum(parameters(config).values()) != record.parameters:
            yield "its parameters are not those of its recipe's model."
        if not math.isclose(training_flops(config, recipe.row_length) * tokens, record.flops, rel_tol=1e-6):
            yield "its FLOPs do not follow from its recipe."
        if cache_bytes_per_token(config) != record.cache_bytes_per_token:
            yield "its cache's bytes do not follow from its recipe."


def _build_config(record: RunRecord, recipe: Recipe) -> HeadwaterConfig:
    """Build the config of a record's model, whose vocabulary follows from the size of its embedding."""
    one, two = (embedding_parameters(recipe.config_for(DataShape(size, recipe.row_length))) for size in (1, 2))
    return recipe.config_for(DataShape(1 + (record.embedding_parameters - one) // max(1, two - one), recipe.row_length))


def _check_points(record: RunRecord) -> Iterator[str]:
    """List what is wrong with the points of a record's curve and evaluations."""
    steps = sum(stage.steps for stage in record.stages) or record.recipe["training"]["steps"]
    curve, last = record.curve, record.held_out[-1] if record.held_out else None
    if not curve:
        yield "it has no training curve; set reporting.log_every."
    elif any(a.step >= b.step or a.tokens > b.tokens for a, b in pairwise(curve)) or curve[-1].step > steps:
        yield "the steps of its curve do not increase up to its last step."
    if record.status != "finished":
        return
    if last is None or last.step != steps:
        yield f"it has no evaluation at its last step, {steps}."
    elif not all(map(math.isfinite, last.metrics.values())):
        yield "its last evaluation is not finite, but it is called finished."
    elif last.tokens != record.tokens:
        yield f"its last evaluation was after {last.tokens:,} tokens, but it has seen {record.tokens:,}."


def find_missing(comparison: Comparison) -> list[str]:
    """List what a comparison lacks to be an entry: seeds, a baseline, the same data, an interval for each arm."""
    missing = [comparison.changed_data] if comparison.changed_data else []
    if comparison.baseline not in comparison.arms:
        return [*missing, f"its baseline, {comparison.baseline}, has no run."]
    seeds = {arm: {record.seed for record in comparison.runs(arm)} for arm in comparison.arms}
    for arm, of_arm in seeds.items():
        if len(of_arm) < MIN_SEEDS:
            missing.append(f"{arm} has {counted(len(of_arm))}; an entry has at least {MIN_SEEDS}.")
        elif comparison.plan is not None and of_arm != {*comparison.plan.seeds[: len(of_arm)]}:
            missing.append(f"the seeds of {arm} are not the first ones of its plan.")
        else:
            of_baseline = seeds[comparison.baseline]  # by a plan, a decided arm has fewer
            if lacking := sorted(of_arm ^ of_baseline if comparison.plan is None else of_arm - of_baseline):
                missing.append(f"{arm} and {comparison.baseline} differ in the seeds {', '.join(map(str, lacking))}.")
    return missing
