"""`headwater bench …`: interleaved pairs, ratios of times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headwater.util.errors import HeadwaterError, shown
from headwater_lab.bench.shapes import DecodeShape, PrefillShape, ServeShape, StepShape
from headwater_lab.cli.common import check_writable, device_of, recipe_of, stderr, stdout, tell
from headwater_lab.cli.options import DeviceName, FolderPath, PositiveInt, Values, group_of, refuse
from headwater_lab.util.terminal import Table, counted

if TYPE_CHECKING:
    from headwater_lab.bench.paired import PairedTimes
    from headwater_lab.bench.training import ModelPair
    from headwater_lab.comparison.calibration import Rate

Mechanisms = Annotated[
    Sequence[str], Values(help='Names, or JSON as in a config: {"NAME": {"OPTION": …}, …}; default every mechanism.')
]
AnyPrecision = Annotated[Literal["32-true", "bf16-true", "bf16-mixed"], Values(help="As in recipes.")]
TruePrecision = Annotated[Literal["32-true", "bf16-true"], Values(help="As in recipes.")]
Pairs = Annotated[int, Values(min=2, help="Timed steps of each model.")]
Memory = Annotated[bool, Values(help="Measure bytes stored for the backward pass, on the CPU, instead of times.")]


def bench_train(
    *,
    base: Literal["llama", "gpt2", "vit"] = "llama",
    attention: str = "sdpa",
    documents: PositiveInt | None = None,
    precision: AnyPrecision = "32-true",
    shape: StepShape,
    pairs: Pairs = 30,
    memory: Memory = False,
    device: DeviceName = "auto",
) -> None:
    """Time a training step without mechanisms against transformers' model of the same shape.

    base: Model to compare with: LlamaForCausalLM, GPT2LMHeadModel or ViTForImageClassification.
    attention: headwater's attn_implementation: sdpa, eager, matmul or varlen.
    documents: Pack rows with documents of about this many tokens. Default: one each.
    """
    from headwater_lab.bench.training import image_pair, text_pair

    if base == "vit":
        refuse("without --base llama or --base gpt2", "--context", "--vocab-size", "--documents")
        pair = image_pair(shape, attention)
        title = f"layers {shape.layers}, width {shape.width}, batch size {shape.batch_size}, attention {attention}"
    else:
        pair = text_pair(base, shape, attention, documents)
        title = f"{shape}, attention {attention}" + ("" if documents is None else f", documents {documents}")
    names = {"llama": "Llama", "gpt2": "GPT-2", "vit": "ViT"}
    _print_steps({"headwater": pair}, names[base], title, precision, pairs, memory, device)


def bench_mechanisms(
    mechanism: Mechanisms = (),
    *,
    precision: AnyPrecision = "32-true",
    shape: StepShape,
    pairs: Pairs = 30,
    memory: Memory = False,
    device: DeviceName = "auto",
) -> None:
    """Time a training step with each mechanism against the same model without it."""
    from headwater_lab.bench.training import mechanism_pair

    compared = {label: mechanism_pair(options, shape) for label, options in _mechanisms(mechanism).items()}
    _print_steps(compared, "without", str(shape), precision, pairs, memory, device)


def _print_steps(
    compared: dict[str, ModelPair],
    other: str,
    title: str,
    precision: str,
    pairs: int,
    memory: bool,
    device: str,
) -> None:
    """Print a table of training steps, a row for each pair of models. other: the name of the second model of each."""
    from headwater_lab.bench.training import stored_by_pair, time_pair

    if memory and device not in ("auto", "cpu"):
        raise HeadwaterError("--memory is measured on the CPU, and is the same elsewhere; leave out --device.")
    title = f"{title}, precision {precision}"
    if memory:
        table = _table(title, "MB kept", f"{other}, MB kept", "ratio")
        for label, pair in compared.items():
            first, second = stored_by_pair(pair, precision)
            table.add_row(label, f"{first / 1e6:.1f}", f"{second / 1e6:.1f}", f"{first / second:.3f}")
    else:
        device = device_of(device)
        table = _table(f"{title}, pairs {pairs}; {_about(device)}", "s", f"{other}, s", "ratio, median", "quartiles")
        for label, pair in compared.items():
            paired = time_pair(pair, precision, pairs, device)
            seconds = [f"{sorted(times)[pairs // 2]:.3f}" for times in (paired.a, paired.b)]
            table.add_row(label, *seconds, *_ratio(paired))
    stdout.print(table)


def bench_decode(
    mechanism: Mechanisms = (),
    *,
    shape: DecodeShape,
    precision: TruePrecision = "32-true",
    device: DeviceName = "auto",
) -> None:
    """Measure time per generated token: transformers' Llama, headwater without mechanisms, and with each."""
    from headwater_lab.bench import decoding
    from headwater_lab.util.machine import read_bandwidth

    chosen, device = _mechanisms(mechanism), device_of(device)
    bandwidth = read_bandwidth(device)
    arms = decoding.bench_decode(chosen, shape, dtype=_dtype(precision), device=device)
    title = f"{shape}, precision {precision}; {_about(device)}; memory read at {bandwidth / 1e9:.1f} GB/s"
    table = _table(title, "ms/token", "ratio", "quartiles", "cache", "bandwidth")
    for arm in arms:
        cache = f"× {arm.cache_bytes / arms[1].cache_bytes:.5f}" if arm.paired else f"{arm.cache_bytes:,} B"
        share = f"{arm.bytes_per_second / bandwidth:.0%}"
        table.add_row(arm.arm, f"{arm.second * 1e3:.2f}", *_ratio(arm.paired), cache, share)
    notes = (
        f"{decoding.AGAIN}: a second copy, which shows how much the place in memory does. bandwidth: weights and cache "
        "read per second, as a share of the memory bandwidth."
    )
    _print_against_llama(table, decoding.LLAMA, notes, arms[1].same_tokens)


def bench_prefill(
    mechanism: Mechanisms = (),
    *,
    shape: PrefillShape,
    precision: TruePrecision = "32-true",
    device: DeviceName = "auto",
) -> None:
    """Measure the time to read a prompt, up to its last token's logits: without mechanisms, and with each."""
    from headwater_lab.bench import prefill

    chosen, device = _mechanisms(mechanism), device_of(device)
    models = prefill.bench_prefill(chosen, shape, dtype=_dtype(precision), device=device)
    table = _table(
        f"{shape}, precision {precision}; {_about(device)}",
        "layers skipped",
        "ms/prompt",
        "ratio",
        "quartiles",
        "planned",
    )
    for model in models:
        ratio = ("", "", "") if model is models[0] else (*_ratio(model.paired), f"{model.planned:.3f}")
        table.add_row(model.model, str(model.layers), f"{model.second * 1e3:.1f}", *ratio)
    stdout.print(table)
    stdout.print(
        "layers skipped: by all tokens but the last. "
        f"ratio: time over {prefill.VANILLA}'s, median over the turns. planned: the same of FLOPs."
    )


def bench_serve(
    mechanism: Sequence[str] = (),
    *,
    shape: ServeShape,
    precision: TruePrecision = "32-true",
    cache_memory: Annotated[float, Values(min=0.001)] | None = None,
) -> None:
    """Measure throughput in vLLM: its own Llama, headwater without mechanisms, and with each.

    mechanism: As in `bench decode`; default none.
    cache_memory: GiB of each engine's cache. Default: as many as vanilla needs for all requests.
    """
    from importlib.util import find_spec

    from headwater.util.extras import MissingExtra
    from headwater_lab.bench.serving import GIB, LLAMA, bench_serving

    if find_spec("vllm") is None:
        raise MissingExtra("vLLM", "vllm")
    memory = None if cache_memory is None else cache_memory * GIB
    dtype = str(_dtype(precision)).removeprefix("torch.")
    models = bench_serving(_mechanisms(mechanism) if mechanism else {}, shape, cache_memory=memory, dtype=dtype)
    table = _table(
        f"{shape}, precision {precision}; {_about('cpu')}",
        "tokens in cache",
        "running",
        "s",
        "ratio",
        "quartiles",
        "ms/step",
        "ratio of steps",
    )
    for model in models:
        step, steps = model.median("step"), model.paired("step")
        table.add_row(
            model.model,
            f"{model.cache_tokens:,}",
            f"{model.median('running'):.1f}",
            f"{model.median('seconds'):.2f}",
            *_ratio(model.paired()),
            "" if math.isnan(step) else f"{step * 1e3:.1f}",
            "" if steps is None or math.isnan(steps.ratio) else f"{steps.ratio:.3f}",
        )
    notes = "running: requests at a time, mean over the steps. ms/step: of steps that continue all requests."
    _print_against_llama(table, LLAMA, notes, models[1].same_tokens)


def _print_against_llama(table: Table, llama: str, notes: str, same_tokens: bool) -> None:
    """Print a table of vanilla and of mechanisms, the notes on it, and whether vanilla gave Llama's tokens."""
    from headwater_lab.bench.decoding import VANILLA

    stdout.print(table)
    stdout.print(f"ratio: time over {VANILLA}'s, and {VANILLA}'s over that of {llama}; median over the turns. {notes}")
    stderr.print(f"{VANILLA}: {'the same' if same_tokens else 'not the same'} tokens as {llama}", style="dim")


def bench_gpu(
    *,
    out: Path,
    budget: Annotated[float, Values(min=1)] = 540,
    only: Sequence[str] = (),
    device: DeviceName = "auto",
) -> None:
    """Measure headwater on a GPU: correctness, training speed, packing, mechanisms, decoding. Takes nine minutes.

    Writes gpu.json after every phase, so an interrupted run keeps its results. Without a GPU the sizes are
    tiny, which checks the command but measures nothing.

    out: Folder for gpu.json.
    budget: Seconds for the whole command.
    only: Run only this phase; repeatable. Default: all.
    """
    from headwater_lab.bench.gpu import bench_gpu as measure
    from headwater_lab.bench.gpu import problems

    check_writable(out, folder=True)
    device = device_of(device)
    if device == "cpu":
        stderr.print("No GPU found: the sizes are tiny, and the figures say nothing about a GPU.")
    results = measure(out, device=device, budget=budget, only=list(only) or None, tell=stderr.print)
    stdout.print(f"written to {out / 'gpu.json'}")
    if wrong := problems(results):
        raise HeadwaterError("; ".join(wrong))


def bench_data(
    source: str | None = None,
    *,
    megabytes: PositiveInt = 100,
    pairs: Annotated[int, Values(min=2)] = 5,
    workers: PositiveInt = 2,
    vocab_size: Annotated[int, Values(min=257)] = 32_000,
) -> None:
    """Time `headwater data prepare` against Dataset.map of datasets, with the same tokenizer and text.

    source: Same sources as data prepare; default: the Python files of this installation.
    megabytes: Megabytes of text to prepare, from the beginning of the source.
    workers: Threads of headwater, processes of map.
    vocab_size: Vocabulary of the tokenizer, which is trained on the text.
    """
    from headwater_lab.bench.data import bench_data as measure

    result = measure(source, megabytes, pairs, workers, vocab_size)
    title = (
        f"{result.documents:,} documents, {result.bytes / 1e6:,.1f} MB, {result.tokens:,} tokens, {workers} workers, "
        f"{pairs} pairs"
    )
    table = _table(title, "s", "tokens/s", "peak memory, MB")
    names = ("headwater data prepare", f"Dataset.map, {workers} processes")
    for name, times, peak in zip(names, (result.paired.a, result.paired.b), result.peaks, strict=True):
        seconds = sorted(times)[pairs // 2]
        table.add_row(name, f"{seconds:.2f}", f"{result.tokens / seconds:,.0f}", f"{peak / 1e6:,.0f}")
    stdout.print(table)
    ratio, quartiles = _ratio(result.paired)
    stdout.print(f"ratio of times: median {ratio}, quartiles {quartiles}")


def bench_prices(recipe: str, overrides: Sequence[str] = (), *, out: FolderPath | None = None) -> None:
    """Measure what the arms of a comparison cost, against its baseline: training, and generation.

    Nothing needs to be trained first.

    recipe: The recipe of a comparison.
    overrides: dotted.key=value overrides of the recipe.
    out: The folder of its comparison, run or not; default: runs/NAME, as in compare.
    """
    from headwater_lab.comparison.budget import match_arms
    from headwater_lab.comparison.prices import measure
    from headwater_lab.comparison.trials import folder_of
    from headwater_lab.reports.prices import terminal_prices

    loaded = match_arms(recipe_of(recipe, overrides))
    out = out or Path("runs") / loaded.name
    check_writable(out, folder=True)
    if (section := loaded.compare) is None:
        raise HeadwaterError(f"{loaded.name!r} has no compare section; name a recipe whose arms can be measured.")
    for size in section.sizes or [None]:
        folder = folder_of(loaded, size, out)
        folder.mkdir(parents=True, exist_ok=True)
        arms = {arm: loaded.arm(arm, section.seeds[0], size) for arm in section.arms}
        stdout.print(terminal_prices(measure(arms, section.baseline, folder, tell)))


def bench_verdicts(
    folder: Path | None = None,
    *,
    arms: Annotated[int, Values(min=1, max=1000)] = 1,
    seeds: Annotated[int, Values(min=2, max=1000)] = 30,
    comparisons: Annotated[int, Values(min=1, max=100_000)] = 2000,
) -> None:
    """Measure how often `compare` is wrong: false alarms between identical arms, and missed differences.

    folder: A comparison's folder, with many seeds of at least one arm; default: simulated results.
    arms: Arms besides the baseline in each comparison.
    seeds: Seeds per arm, and the maximum of comparisons until decided.
    comparisons: Comparisons to resample or to simulate.
    """
    from headwater_lab.comparison.calibration import SHAPES, calibrate, dealing, planted_effect, results_of

    sources = SHAPES
    if folder is not None:
        name, results = results_of(folder)
        sources = {f"{len(results)} trials of {name!r}": dealing(results)}
    title = (
        f"{comparisons:,} comparisons of {arms + 1} identical arms with {seeds} seeds; the planted difference is "
        f"{planted_effect(arms, seeds):.3g} standard deviations of paired differences"
    )
    columns = ("seeds", "false alarms, at most 0.05 stated", "planted found", "seeds, mean")
    table = _table(title, *columns, first="results")
    for source, draw in sources.items():
        for rule, measured in zip(("fixed", "until decided"), calibrate(draw, arms, seeds, comparisons), strict=True):
            if measured is not None:
                rates = map(_rate, (measured.false_alarms, measured.power))
                table.add_row(source, rule, *rates, f"{measured.seeds:.1f}")
    stdout.print(table)


def _mechanisms(arguments: Sequence[str]) -> dict[str, dict[str, dict]]:
    """Mechanisms by a label, from names and JSON; every mechanism by default."""
    import json

    from headwater.config.options import parse_options
    from headwater.plugins.outside import trust_names_in
    from headwater.plugins.registry import MECHANISMS, resolve
    from headwater_lab.recipe.overrides import plain

    chosen = {}
    for text in arguments or MECHANISMS.names:
        mechanisms = plain(text, shown(text)) if text.startswith("{") else {text: {}}
        trust_names_in([mechanisms])
        for name, options in mechanisms.items():
            parse_options(resolve(name), options)
        labels = (f"{name} {json.dumps(options)}" if options else name for name, options in mechanisms.items())
        chosen[" + ".join(labels)] = mechanisms
    return chosen


def _dtype(precision: str) -> Any:
    import torch

    return torch.float32 if precision == "32-true" else torch.bfloat16


def _about(device: str) -> str:
    """A device in the title of a table; the CPU by its name."""
    if device != "cpu":
        return device
    import torch

    from headwater.util.processor import describe_cpu

    return f"{describe_cpu()}, {counted(torch.get_num_threads(), 'thread')}"


def _table(title: str, *columns: str, first: str = "") -> Table:
    """A table whose first column alone is aligned to the left."""
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _ratio(paired: PairedTimes | None) -> tuple[str, str]:
    """The median ratio and its quartiles; empty for what nothing is compared with."""
    if paired is None:
        return "", ""
    low, high = paired.quartiles
    return f"{paired.ratio:.3f}", f"{low:.3f} – {high:.3f}"


def _rate(rate: Rate) -> str:
    """A share and its interval."""
    low, high = rate.interval
    return f"{rate.value:.4f} ({low:.4f} – {high:.4f})"


bench = group_of(
    "Benchmarks: interleaved pairs, ratios of times.",
    {
        "train": (bench_train, "bench train --base gpt2 --precision bf16-mixed"),
        "mechanisms": (bench_mechanisms, "bench mechanisms NAME"),
        "decode": (bench_decode, "bench decode NAME --context 1024"),
        "prefill": (bench_prefill, "bench prefill NAME --context 4096"),
        "serve": (bench_serve, "bench serve NAME --requests 16"),
        "data": (bench_data, "bench data 'texts/*.txt' --megabytes 20"),
        "gpu": (bench_gpu, "bench gpu --out gpu"),
        "prices": (bench_prices, "bench prices demo/language --out runs/prices"),
        "verdicts": (bench_verdicts, "bench verdicts runs/demo --seeds 10"),
    },
    trusting=("prices", "verdicts"),
)
