"""`headwater bench …`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwater.util.errors import HeadwaterError, shown
from headwater.util.terminal import Table, counted
from headwater_lab.cli.common import (
    Device,
    Positive,
    check_writable,
    device_of,
    err,
    out,
    quiet,
    recipe_of,
    refuse_unread,
    tell,
)

if TYPE_CHECKING:
    from headwater_lab.bench.paired import PairedTimes
    from headwater_lab.bench.training import ModelPair
    from headwater_lab.comparison.calibration import Rate

bench = typer.Typer(help="Benchmarks: interleaved pairs, ratios of times.", no_args_is_help=True)

Mechanisms = Annotated[
    list[str] | None,
    typer.Argument(help='Names, or JSON as in a config: {"NAME": {"OPTION": …}, …}; default every mechanism.'),
]
AnyPrecision = Annotated[Literal["32-true", "bf16-true", "bf16-mixed"], typer.Option(help="As in recipes.")]
TruePrecision = Annotated[Literal["32-true", "bf16-true"], typer.Option(help="As in recipes.")]
Width = Annotated[int, typer.Option(min=64, help="Width of the model, whose heads have 64 channels.")]
PairCount = Annotated[int, typer.Option(min=2, help="Timed steps of each model.")]
Turns = Annotated[int, typer.Option(min=2, help="Runs of each model.")]
PromptLength = Annotated[int, typer.Option(min=1, help="Prompt tokens.")]
Memory = Annotated[
    bool, typer.Option("--memory", help="Measure bytes stored for the backward pass, on the CPU, instead of times.")
]


@bench.command("train")
def bench_train(
    base: Annotated[
        Literal["llama", "gpt2", "vit"],
        typer.Option(help="Model to compare with: LlamaForCausalLM, GPT2LMHeadModel or ViTForImageClassification."),
    ] = "llama",
    attention: Annotated[
        str, typer.Option(help="headwater's attn_implementation: sdpa, eager, matmul or varlen.")
    ] = "sdpa",
    documents: Annotated[
        int | None, typer.Option(min=1, help="Pack rows with documents of about this many tokens. Default: one each.")
    ] = None,
    precision: AnyPrecision = "32-true",
    layers: Positive = 8,
    width: Width = 256,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per row.", show_default="256")] = None,
    batch_size: Positive = 8,
    vocab_size: Annotated[int | None, typer.Option(min=1, show_default="512")] = None,
    pairs: PairCount = 30,
    memory: Memory = False,
    device: Device = "auto",
) -> None:
    """Time a training step without mechanisms against transformers' model of the same shape."""
    from headwater_lab.bench.training import image_pair, text_pair

    quiet()
    text_options: dict[str, object] = {"--context": context, "--vocab-size": vocab_size, "--documents": documents}
    refuse_unread(text_options, base != "vit", "--base llama or --base gpt2")
    shape: dict[str, Any] = dict(layers=layers, width=width, batch_size=batch_size)
    if base == "vit":
        pair = image_pair(**shape, attention=attention)
    else:
        shape |= dict(context=context or 256, vocab_size=vocab_size or 512)
        pair = text_pair(base, **shape, attention=attention, documents=documents)
    shape |= dict(attention=attention) | ({} if documents is None else dict(documents=documents))
    names = {"llama": "Llama", "gpt2": "GPT-2", "vit": "ViT"}
    _print_steps({"headwater": pair}, names[base], shape, precision, pairs, memory, device)


@bench.command("mechanisms")
def bench_mechanisms(
    mechanism: Mechanisms = None,
    precision: AnyPrecision = "32-true",
    layers: Positive = 8,
    width: Width = 256,
    context: Positive = 256,
    batch_size: Positive = 8,
    vocab_size: Positive = 512,
    pairs: PairCount = 30,
    memory: Memory = False,
    device: Device = "auto",
) -> None:
    """Time a training step with each mechanism against the same model without it."""
    from headwater_lab.bench.training import mechanism_pair

    shape = dict(layers=layers, width=width, context=context, batch_size=batch_size, vocab_size=vocab_size)
    compared = {label: mechanism_pair(given, **shape) for label, given in _mechanisms(mechanism).items()}
    _print_steps(compared, "without", shape, precision, pairs, memory, device)


def _print_steps(
    compared: dict[str, ModelPair],
    other: str,
    shape: dict[str, Any],
    precision: str,
    pairs: int,
    memory: bool,
    device: str,
) -> None:
    """Print a table of training steps, a row for each pair of models. other: the name of the second model of each."""
    from headwater_lab.bench.training import stored_by_pair, time_pair

    quiet()
    if memory and device not in ("auto", "cpu"):
        raise HeadwaterError("--memory is measured on the CPU, and is the same elsewhere; leave out --device.")
    shape = shape | dict(precision=precision)
    if memory:
        table = _table(_about(shape), "", "MB kept", f"{other}, MB kept", "ratio")
        for label, pair in compared.items():
            first, second = stored_by_pair(pair, precision)
            table.add_row(label, f"{first / 1e6:.1f}", f"{second / 1e6:.1f}", f"{first / second:.3f}")
    else:
        device = device_of(device)
        table = _table(_about(shape | dict(pairs=pairs), device), "", "s", f"{other}, s", "ratio, median", "quartiles")
        for label, pair in compared.items():
            paired = time_pair(pair, precision, pairs, device)
            seconds = [f"{sorted(times)[pairs // 2]:.3f}" for times in (paired.a, paired.b)]
            table.add_row(label, *seconds, *_ratio(paired))
    out.print(table)


@bench.command("decode")
def bench_decode(
    mechanism: Mechanisms = None,
    precision: TruePrecision = "32-true",
    batch_size: Positive = 1,
    context: PromptLength = 512,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens to generate.")] = 48,
    turns: Turns = 7,
    layers: Positive = 12,
    width: Width = 768,
    vocab_size: Positive = 50304,
    device: Device = "auto",
) -> None:
    """Measure time per generated token: transformers' Llama, headwater without mechanisms, and with each."""
    from headwater.cost.hardware import read_bandwidth
    from headwater_lab.bench.decoding import AGAIN, LLAMA
    from headwater_lab.bench.decoding import bench_decode as measure

    quiet()
    chosen, device = _mechanisms(mechanism), device_of(device)
    bandwidth = read_bandwidth(device)
    shape: dict[str, Any] = dict(layers=layers, width=width, batch_size=batch_size, context=context, tokens=tokens)
    shape |= dict(turns=turns, vocab_size=vocab_size)
    arms = measure(chosen, dtype=_dtype(precision), device=device, **shape)
    title = f"{_about(shape | dict(precision=precision), device)}; memory read at {bandwidth / 1e9:.1f} GB/s"
    table = _table(title, "", "ms/token", "ratio", "quartiles", "cache", "bandwidth")
    for arm in arms:
        cache = f"× {arm.cache_bytes / arms[1].cache_bytes:.5f}" if arm.paired else f"{arm.cache_bytes:,} B"
        share = f"{arm.bytes_per_second / bandwidth:.0%}"
        table.add_row(arm.arm, f"{arm.second * 1e3:.2f}", *_ratio(arm.paired), cache, share)
    _print_against_llama(
        table,
        LLAMA,
        f"{AGAIN}: a second copy, which shows how much the place in memory does. bandwidth: weights and cache read per "
        "second, as a share of the memory bandwidth.",
        arms[1].same_tokens,
    )


@bench.command("prefill")
def bench_prefill(
    mechanism: Mechanisms = None,
    precision: TruePrecision = "32-true",
    batch_size: Positive = 1,
    context: PromptLength = 1024,
    turns: Turns = 7,
    layers: Positive = 12,
    width: Width = 768,
    vocab_size: Positive = 50304,
    device: Device = "auto",
) -> None:
    """Measure the time to read a prompt, up to its last token's logits: without mechanisms, and with each."""
    from headwater_lab.bench.decoding import VANILLA
    from headwater_lab.bench.prefill import bench_prefill as measure

    quiet()
    chosen, device = _mechanisms(mechanism), device_of(device)
    shape: dict[str, Any] = dict(layers=layers, width=width, batch_size=batch_size, context=context)
    shape |= dict(turns=turns, vocab_size=vocab_size)
    models = measure(chosen, dtype=_dtype(precision), device=device, **shape)
    title = _about(shape | dict(precision=precision), device)
    table = _table(title, "", "layers skipped", "ms/prompt", "ratio", "quartiles", "planned")
    for model in models:
        ratio = ("", "", "") if model is models[0] else (*_ratio(model.paired), f"{model.planned:.3f}")
        table.add_row(model.model, str(model.layers), f"{model.second * 1e3:.1f}", *ratio)
    out.print(table)
    out.print(
        "layers skipped: by all tokens but the last. "
        f"ratio: time over {VANILLA}'s, median over the turns. planned: the same of FLOPs.",
        highlight=False,
    )


@bench.command("serve")
def bench_serve(
    mechanism: Annotated[list[str] | None, typer.Argument(help="As in `bench decode`; default none.")] = None,
    precision: TruePrecision = "32-true",
    requests: Annotated[int, typer.Option(min=1, help="Requests that arrive at once.")] = 8,
    context: PromptLength = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each.")] = 33,
    turns: Turns = 5,
    cache_memory: Annotated[
        float | None,
        typer.Option(min=0.001, help="GiB of each engine's cache. Default: as many as vanilla needs for all requests."),
    ] = None,
    layers: Positive = 12,
    width: Width = 768,
    vocab_size: Positive = 50304,
) -> None:
    """Measure throughput in vLLM: its own Llama, headwater without mechanisms, and with each."""
    from importlib.util import find_spec

    from headwater.util.extras import MissingExtra
    from headwater_lab.bench.serving import GIB, LLAMA, bench_serving

    if find_spec("vllm") is None:
        raise MissingExtra("vLLM", "vllm")
    quiet()
    shape: dict[str, Any] = dict(layers=layers, width=width, requests=requests, context=context, tokens=tokens)
    shape |= dict(turns=turns, vocab_size=vocab_size)
    memory = None if cache_memory is None else cache_memory * GIB
    dtype = str(_dtype(precision)).removeprefix("torch.")
    chosen = _mechanisms(mechanism) if mechanism else {}
    models = bench_serving(chosen, cache_memory=memory, dtype=dtype, **shape)
    title = _about(shape | dict(precision=precision), "cpu")
    table = _table(title, "", "tokens in cache", "running", "s", "ratio", "quartiles", "ms/step", "ratio of steps")
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

    out.print(table)
    out.print(
        f"ratio: time over {VANILLA}'s, and {VANILLA}'s over that of {llama}; median over the turns. {notes}",
        highlight=False,
    )
    err.print(f"{VANILLA}: {'the same' if same_tokens else 'not the same'} tokens as {llama}", style="dim")


@bench.command("gpu")
def bench_gpu(
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for gpu.json.")],
    budget: Annotated[float, typer.Option(min=1, help="Seconds for the whole command.")] = 540,
    only: Annotated[list[str] | None, typer.Option(help="Run only this phase; repeatable. Default: all.")] = None,
    device: Device = "auto",
) -> None:
    """Measure headwater on a GPU: correctness, training speed, packing, mechanisms, decoding. Takes nine minutes.

    Writes gpu.json after every phase, so an interrupted run keeps its results. Without a GPU the sizes are
    tiny, which checks the command but measures nothing.
    """
    from headwater_lab.bench.gpu import bench_gpu as measure
    from headwater_lab.bench.gpu import problems

    check_writable(out_folder, folder=True)
    device = device_of(device)
    if device == "cpu":
        err.print("No GPU found: the sizes are tiny, and the figures say nothing about a GPU.")
    results = measure(out_folder, device=device, budget=budget, only=only, tell=err.print)
    out.print(f"written to {out_folder / 'gpu.json'}")
    if wrong := problems(results):
        raise HeadwaterError("; ".join(wrong))


@bench.command("data")
def bench_data(
    source: Annotated[
        str | None, typer.Argument(help="Same sources as data prepare; default: the Python files of this installation.")
    ] = None,
    megabytes: Annotated[
        int, typer.Option(min=1, help="Megabytes of text to prepare, from the beginning of the source.")
    ] = 100,
    pairs: Annotated[int, typer.Option(min=2)] = 5,
    workers: Annotated[int, typer.Option(min=1, help="Threads of headwater, processes of map.")] = 2,
    vocab_size: Annotated[
        int, typer.Option(min=257, help="Vocabulary of the tokenizer, which is trained on the text.")
    ] = 32_000,
) -> None:
    """Time `headwater data prepare` against Dataset.map of datasets, with the same tokenizer and text."""
    from headwater_lab.bench.data import bench_data as measure

    quiet()
    result = measure(source, megabytes, pairs, workers, vocab_size)
    table = _table(
        f"{result.documents:,} documents, {result.bytes / 1e6:,.1f} MB, {result.tokens:,} tokens, {workers} workers, "
        f"{pairs} pairs",
        *("", "s", "tokens/s", "peak memory, MB"),
    )
    names = ("headwater data prepare", f"Dataset.map, {workers} processes")
    for name, times, peak in zip(names, (result.paired.a, result.paired.b), result.peaks, strict=True):
        seconds = sorted(times)[pairs // 2]
        table.add_row(name, f"{seconds:.2f}", f"{result.tokens / seconds:,.0f}", f"{peak / 1e6:,.0f}")
    out.print(table)
    ratio, quartiles = _ratio(result.paired)
    out.print(f"ratio of times: median {ratio}, quartiles {quartiles}", highlight=False)


@bench.command("prices")
def bench_prices(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER|RECIPE", help="A comparison that has run, or a recipe of one.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="dotted.key=value overrides of the recipe.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            file_okay=False,
            help="Of a recipe: the folder of its comparison, run or not; default: runs/NAME, as in compare.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure what the arms of a comparison cost, against its baseline: training, and generation.

    With a recipe, nothing needs to be trained first.
    """
    from headwater_lab.comparison.budget import match_arms
    from headwater_lab.comparison.prices import folder_of, measure, read_prices
    from headwater_lab.recipe.schema import parse_recorded
    from headwater_lab.reports.comparison import comparisons
    from headwater_lab.reports.prices import prices_of, terminal_prices

    quiet()
    if not Path(source).is_dir():
        recipe = recipe_of(source, overrides or [])
        folder = folder or Path("runs") / recipe.name
        check_writable(folder, folder=True)
        recipe = match_arms(recipe)
        if (section := recipe.compare) is None:
            raise HeadwaterError(f"{source!r} has no compare section; name a recipe whose arms can be measured.")
        folders = {size: folder_of(recipe, size, folder) for size in section.sizes or [None]}
        for size, place in folders.items():
            arms = {arm: recipe.arm(arm, section.seeds[0], size) for arm in section.arms}
            place.mkdir(parents=True, exist_ok=True)
            measure(arms, section.baseline, place, tell, beside=[*folders.values()])
            if (prices := read_prices(place, arms, section.baseline)) is not None:
                out.print(terminal_prices(prices))
        return
    if overrides:
        raise HeadwaterError(f"{source!r} is a folder, whose runs have their settings; name a recipe to change them.")
    if folder is not None:
        raise HeadwaterError(f"{source!r} is a folder, and its prices are written there; leave out --out.")
    check_writable(Path(source), folder=True)
    found = comparisons(Path(source))
    for comparison in found:
        arms = {arm: parse_recorded(comparison.runs(arm)[0].recipe, f"arm {arm!r}") for arm in comparison.arms}
        places = {run.parent for run in comparison.folders.values()}
        if len(places) != 1 or comparison.baseline not in arms:
            raise HeadwaterError(
                f"The runs of {comparison.heading!r} are in {len(places)} folders"
                f"{'' if comparison.baseline in arms else ', without its baseline'}; name the folder of one comparison."
            )
        measure(arms, comparison.baseline, places.pop(), tell)
    for comparison in found:
        if (prices := prices_of(comparison)) is not None:
            out.print(terminal_prices(prices))


@bench.command("verdicts")
def bench_verdicts(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A comparison's folder, with many seeds of at least one arm; default: simulated results.",
            show_default=False,
        ),
    ] = None,
    arms: Annotated[int, typer.Option(min=1, max=1000, help="Arms besides the baseline in each comparison.")] = 1,
    seeds: Annotated[
        int, typer.Option(min=2, max=1000, help="Seeds per arm, and the maximum of comparisons until decided.")
    ] = 30,
    comparisons: Annotated[
        int, typer.Option(min=1, max=100_000, help="Comparisons to resample or to simulate.")
    ] = 2000,
) -> None:
    """Measure how often `compare` is wrong: false alarms between identical arms, and missed differences."""
    from headwater_lab.comparison.calibration import SHAPES, calibrate, dealing, planted_effect, results_of

    sources = SHAPES
    if folder is not None:
        name, results = results_of(folder)
        sources = {f"{len(results)} trials of {name!r}": dealing(results)}
    table = _table(
        f"{comparisons:,} comparisons of {arms + 1} identical arms with {seeds} seeds; the planted difference is "
        f"{planted_effect(arms, seeds):.3g} standard deviations of paired differences",
        *("results", "seeds", "false alarms, at most 0.05 stated", "planted found", "seeds, mean"),
    )
    for source, draw in sources.items():
        fixed, sequential = calibrate(draw, arms, seeds, comparisons)
        for rule, measured in (("fixed", fixed), ("until decided", sequential)):
            if measured is not None:
                rates = map(_rate, (measured.false_alarms, measured.power))
                table.add_row(source, rule, *rates, f"{measured.seeds:.1f}")
    out.print(table)


def _mechanisms(arguments: list[str] | None) -> dict[str, dict[str, dict]]:
    """Mechanisms by a label, from names and JSON; every mechanism by default."""
    import json

    from headwater.plugins.outside import trust_names_in
    from headwater.plugins.registry import MECHANISMS, resolve
    from headwater_lab.recipe.overrides import plain

    chosen = {}
    for text in arguments or MECHANISMS.names:
        mechanisms = plain(text, shown(text)) if text.startswith("{") else {text: {}}
        trust_names_in([mechanisms])
        for name, options in mechanisms.items():
            resolve(name).options(options)
        labels = (f"{name} {json.dumps(options)}" if options else name for name, options in mechanisms.items())
        chosen[" + ".join(labels)] = mechanisms
    return chosen


def _dtype(precision: str) -> Any:
    import torch

    return torch.float32 if precision == "32-true" else torch.bfloat16


def _about(shape: dict[str, Any], device: str | None = None) -> str:
    """A table's title: what was measured, and on what. device: None if it does not matter."""
    title = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shape.items())
    if device == "cpu":
        import torch

        from headwater.util.processor import describe_cpu

        device = f"{describe_cpu()}, {counted(torch.get_num_threads(), 'thread')}"
    return title if device is None else f"{title}; {device}"


def _table(title: str, first: str, *columns: str) -> Table:
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
