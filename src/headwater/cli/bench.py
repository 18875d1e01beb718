"""`headwater bench …`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwater.cli.common import Device, Positive, check_writable, device_of, err, out, quiet, recipe_of, tell
from headwater.errors import HeadwaterError, either, shown
from headwater.terminal import Table

if TYPE_CHECKING:
    from headwater.compare.calibration import Rate

bench = typer.Typer(help="Benchmarks: interleaved pairs, ratios of times.", no_args_is_help=True)

Width = Annotated[int, typer.Option(min=64, help="Width of the model, whose heads have 64 channels.")]
Precisions = Annotated[
    list[str] | None, typer.Option(help="32-true, bf16-true or bf16-mixed; repeatable. Default: all three.")
]
TruePrecisions = Annotated[list[str] | None, typer.Option(help="32-true or bf16-true; repeatable. Default: both.")]
Mechanisms = Annotated[
    list[str] | None,
    typer.Argument(help='Names, or JSON as in a config: {"NAME": {"OPTION": …}, …}; default every mechanism.'),
]
Memory = Annotated[bool, typer.Option("--memory", help="Measure bytes stored for the backward pass instead of times.")]


def _table(title: str, *columns: str, left: Collection[str] = ("",)) -> Table:
    """left: the columns that are not aligned to the right."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


@bench.command("train")
def bench_train(
    precision: Precisions = None,
    layers: Positive = 8,
    width: Width = 256,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per row. Default: 256.")] = None,
    batch_size: Positive = 8,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Default: 512.")] = None,
    pairs: Annotated[int, typer.Option(min=2)] = 30,
    device: Device = "auto",
    vision: Annotated[
        bool, typer.Option("--vision", help="An image classifier against transformers' ViTForImageClassification.")
    ] = False,
    image_size: Annotated[int | None, typer.Option(min=1, help="With --vision: pixels. Default: 224.")] = None,
    patch_size: Annotated[int | None, typer.Option(min=1, help="With --vision: pixels. Default: 16.")] = None,
    base: Annotated[
        Literal["llama", "gpt2"], typer.Option(help="Shape to compare with: LlamaForCausalLM, or GPT2LMHeadModel.")
    ] = "llama",
    memory: Memory = False,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="headwater's attn_implementation: sdpa, eager, matmul or varlen; repeatable. Default: sdpa."),
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help="Pack rows with documents of about this many tokens. Default: one each.")
    ] = None,
) -> None:
    """Time a training step without mechanisms against transformers' model of the same shape."""
    from headwater.bench import training

    quiet()
    of_text = {"--context": context, "--vocabulary": vocabulary, "--documents": documents}
    of_images = {"--image-size": image_size, "--patch-size": patch_size}
    for option, given in (of_text if vision else of_images).items():
        if given is not None:
            what, instead = ("text", "with") if vision else ("images", "without")
            raise HeadwaterError(f"{option} applies only to {what}; leave it out {instead} --vision.")
    if memory and device not in ("auto", "cpu"):
        raise HeadwaterError("--memory is measured on the CPU only; leave out --device.")
    if memory and documents is not None:
        raise HeadwaterError("--memory is measured with one document a row; leave out --documents.")
    device = "cpu" if memory else device_of(device)
    shape = dict(layers=layers, width=width, batch_size=batch_size)
    measure: Any
    stored: Any
    if vision:
        size, patch = image_size or 224, patch_size or 16
        shape |= dict(image_size=size, patch_size=patch)
        measure, stored = training.bench_train_images, training.train_memory_images
        theirs, rows = "ViT", f"images of {size} x {size} in patches of {patch} x {patch}"
    else:
        context, vocabulary = context or 256, vocabulary or 512
        shape |= dict(context=context, vocabulary=vocabulary)
        measure = partial(training.bench_train, base=base, documents=documents)
        stored = partial(training.train_memory, base=base)
        theirs, rows = {"llama": "Llama", "gpt2": "GPT-2"}[base], f"context {context}"
    unit, ratio = ("MB kept", ["ratio"]) if memory else ("s", ["ratio, median", "quartiles"])
    table = _table(
        f"{layers} layers, width {width}, {rows}, batch {batch_size}"
        + ("" if documents is None else f", documents of about {documents} tokens")
        + (f", vocabulary {vocabulary}" if memory and not vision else "")
        + ("" if memory else f", {pairs} pairs; {_cpu() if device == 'cpu' else device}"),
        *("precision", "attention", f"headwater, {unit}", f"{theirs}, {unit}", *ratio),
    )
    for kind in _precisions(precision):
        for ours in attention or ("sdpa",):
            if memory:
                kept, other = stored(kind, attention=ours, **shape)
                table.add_row(kind, ours, f"{kept / 1e6:.1f}", f"{other / 1e6:.1f}", f"{kept / other:.3f}")
                continue
            paired = measure(kind, pairs=pairs, device=device, attention=ours, **shape)
            low, high = paired.quartiles
            a, b = sorted(paired.a)[pairs // 2], sorted(paired.b)[pairs // 2]
            table.add_row(kind, ours, f"{a:.3f}", f"{b:.3f}", f"{paired.ratio:.3f}", f"{low:.3f} – {high:.3f}")
    out.print(table)


@bench.command("mechanisms")
def bench_mechanisms(
    mechanism: Mechanisms = None,
    precision: Precisions = None,
    layers: Positive = 8,
    width: Width = 256,
    context: Positive = 256,
    batch_size: Positive = 8,
    vocabulary: Positive = 512,
    pairs: Annotated[int, typer.Option(min=2)] = 30,
    device: Device = "auto",
    memory: Memory = False,
) -> None:
    """Time a training step with each mechanism against the same model without it."""
    from headwater import bench as benchmarks
    from headwater.registry import MECHANISMS

    quiet()
    if memory and device not in ("auto", "cpu"):
        raise HeadwaterError("--memory is measured on the CPU, and is the same elsewhere; leave out --device.")
    chosen = _mechanisms(mechanism or MECHANISMS.names)
    device = "cpu" if memory else device_of(device)
    shape = dict(layers=layers, width=width, context=context, batch_size=batch_size, vocabulary=vocabulary)
    unit, ratio = ("MB kept", ["ratio"]) if memory else ("s", ["ratio, median", "quartiles"])
    table = _table(
        f"{layers} layers, width {width}, context {context}, batch {batch_size}"
        + ("" if memory else f", {pairs} pairs; {_cpu() if device == 'cpu' else device}"),
        *("mechanism", "precision", f"with, {unit}", f"without, {unit}", *ratio),
        left=["mechanism"],
    )
    for kind in _precisions(precision):
        for label, mechanisms in chosen.items():
            if memory:
                ours, other = benchmarks.step_memory(mechanisms, kind, **shape)
                table.add_row(label, kind, f"{ours / 1e6:.1f}", f"{other / 1e6:.1f}", f"{ours / other:.3f}")
                continue
            paired = benchmarks.bench_mechanism(mechanisms, kind, pairs=pairs, device=device, **shape)
            low, high = paired.quartiles
            seconds = [f"{sorted(times)[pairs // 2]:.3f}" for times in (paired.a, paired.b)]
            table.add_row(label, kind, *seconds, f"{paired.ratio:.3f}", f"{low:.3f} – {high:.3f}")
        if memory:
            found = benchmarks.form_memory(kind, batch_size=batch_size, context=context, heads=width // 64)
            for label, (ours, other) in found.items():
                told = f"one {label} against its plain form"
                table.add_row(told, kind, f"{ours / 1e6:.1f}", f"{other / 1e6:.1f}", f"{ours / other:.3f}")
    out.print(table)


@bench.command("forms")
def bench_forms(
    precision: TruePrecisions = None,
    context: Positive = 256,
    batch_size: Positive = 8,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads, of width 64.")] = 4,
    pairs: Annotated[int, typer.Option(min=2)] = 30,
) -> None:
    """Time training's custom CPU operations, forward and backward, against plain PyTorch."""
    from headwater import bench as benchmarks

    quiet()
    title = f"width {64 * heads}, context {context}, batch {batch_size}, {pairs} pairs; {_cpu()}"
    names = ("form", "precision", "ours, ms", "plain, ms", "ratio, median", "quartiles")
    table = _table(title, *names, left=["form"])
    for kind in _precisions(precision, ["32-true", "bf16-true"]):
        found = benchmarks.bench_forms(kind, context=context, batch_size=batch_size, heads=heads, pairs=pairs)
        for form, paired in found.items():
            low, high = paired.quartiles
            times = [f"{sorted(times)[pairs // 2] * 1e3:.2f}" for times in (paired.a, paired.b)]
            table.add_row(form, kind, *times, f"{paired.ratio:.3f}", f"{low:.3f} – {high:.3f}")
    out.print(table)


@bench.command("decode")
def bench_decode(
    mechanism: Mechanisms = None,
    precision: TruePrecisions = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows per batch; repeatable. Default: 1 and 8.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt tokens; repeatable. Default: 128 and 2048.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens to generate.")] = 48,
    turns: Annotated[int, typer.Option(min=2, help="Number of runs of each model.")] = 7,
    layers: Positive = 12,
    width: Width = 768,
    vocabulary: Positive = 50304,
    static: Annotated[bool, typer.Option("--static", help="Use static caches; on a GPU, compile for them.")] = False,
    device: Device = "auto",
) -> None:
    """Measure time per generated token: transformers' Llama, headwater without mechanisms, and with each."""
    import torch

    from headwater import bench as benchmarks
    from headwater.hardware import read_bandwidth
    from headwater.registry import MECHANISMS

    quiet()
    device = device_of(device)
    kinds = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
    precisions = _precisions(precision, list(kinds))
    chosen = _mechanisms(mechanism or MECHANISMS.names)
    bandwidth = read_bandwidth(device)
    shape = f"{layers} layers, width {width}, {tokens} tokens, {turns} turns; {_cpu() if device == 'cpu' else device}"
    table = _table(
        f"{shape}; memory read at {bandwidth / 1e9:.1f} GB/s",
        *("precision", "batch", "context", "model", "ms/token", "ratio", "quartiles", "cache", "bandwidth"),
        left=["precision", "model"],
    )
    for kind in precisions:
        for rows in batch or [1, 8]:
            for length in context or [128, 2048]:
                found = benchmarks.bench_decode(
                    chosen,
                    dtype=kinds[kind],
                    batch_size=rows,
                    context=length,
                    tokens=tokens,
                    turns=turns,
                    layers=layers,
                    width=width,
                    vocabulary=vocabulary,
                    static=static,
                    device=device,
                )
                table.add_section()
                for one in found:
                    paired = one.paired
                    low, high = (0.0, 0.0) if paired is None else paired.quartiles
                    first = paired is None
                    table.add_row(
                        kind if first else "",
                        str(rows) if first else "",
                        str(length) if first else "",
                        one.arm,
                        f"{one.second * 1e3:.2f}",
                        "" if paired is None else f"{paired.ratio:.3f}",
                        "" if paired is None else f"{low:.3f} – {high:.3f}",
                        f"{one.cache_bytes:,} B" if first else f"× {one.cache_bytes / found[1].cache_bytes:.5f}",
                        f"{one.bytes_per_second / bandwidth:.0%}",
                    )
                same = "the same tokens as" if found[1].same_tokens else "not the same tokens as"
                err.print(f"{kind}, batch {rows}, context {length}: {same} {found[0].arm}", style="dim")
    out.print(table)
    out.print(
        f"ratio: time over {benchmarks.VANILLA}'s, and {benchmarks.VANILLA}'s over that of {benchmarks.LLAMA}; median "
        f"over the turns. {benchmarks.AGAIN}: a second copy, which shows how much the place in memory does. "
        "bandwidth: weights and cache read per second, as a share of the memory bandwidth.",
        highlight=False,
    )
    if device == "cpu":
        _print_choices()


@bench.command("prefill")
def bench_prefill(
    mechanism: Mechanisms = None,
    precision: Annotated[str, typer.Option(help="32-true or bf16-true.")] = "32-true",
    batch_size: Positive = 1,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt tokens; repeatable. Default: 1024.", show_default=False)
    ] = None,
    turns: Annotated[int, typer.Option(min=2, help="Number of runs of each model.")] = 7,
    layers: Positive = 12,
    width: Width = 768,
    vocabulary: Positive = 50304,
    device: Device = "auto",
) -> None:
    """Measure the time to read a prompt, up to its last token's logits: without mechanisms, and with each."""
    import torch

    from headwater import bench as benchmarks
    from headwater.registry import MECHANISMS

    quiet()
    device = device_of(device)
    kinds = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
    (kind,) = _precisions([precision], list(kinds))
    table = _table(
        f"{layers} layers, width {width}, batch {batch_size}, {kind}, {turns} turns; "
        + (_cpu() if device == "cpu" else device),
        *("context", "model", "layers skipped", "ms/prompt", "ratio", "quartiles", "planned"),
        left=["model"],
    )
    for length in context or [1024]:
        found = benchmarks.bench_prefill(
            _mechanisms(mechanism or MECHANISMS.names),
            dtype=kinds[kind],
            batch_size=batch_size,
            context=length,
            turns=turns,
            layers=layers,
            width=width,
            vocabulary=vocabulary,
            device=device,
        )
        table.add_section()
        for one in found:
            first, (low, high) = one is found[0], one.paired.quartiles
            table.add_row(
                str(length) if first else "",
                one.model,
                str(one.layers),
                f"{one.second * 1e3:.1f}",
                "" if first else f"{one.paired.ratio:.3f}",
                "" if first else f"{low:.3f} – {high:.3f}",
                "" if first else f"{one.planned:.3f}",
            )
    out.print(table)
    out.print(
        "layers skipped: by all tokens but the last. "
        f"ratio: time over {benchmarks.VANILLA}'s, median over the turns. planned: the same of FLOPs.",
        highlight=False,
    )


@bench.command("serve")
def bench_serve(
    mechanism: Annotated[
        list[str] | None,
        typer.Argument(help='Names, or JSON as in a config: {"NAME": {"OPTION": …}, …}; default none.'),
    ] = None,
    precision: Annotated[str, typer.Option(help="32-true or bf16-true.")] = "32-true",
    requests: Annotated[int, typer.Option(min=1, help="Requests that arrive at once.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each.")] = 33,
    turns: Annotated[int, typer.Option(min=2, help="Number of runs of each model.")] = 5,
    cache_memory: Annotated[
        float | None,
        typer.Option(min=0.001, help="GiB of each engine's cache. Default: as many as vanilla needs for all requests."),
    ] = None,
    layers: Positive = 12,
    width: Width = 768,
    vocabulary: Positive = 50304,
) -> None:
    """Measure throughput in vLLM: its own Llama, headwater without mechanisms, and with each."""
    from importlib.util import find_spec

    from headwater.bench import serving
    from headwater.extras import MissingExtra

    if find_spec("vllm") is None:
        raise MissingExtra("vLLM", "vllm")
    quiet()
    kinds = {"32-true": "float32", "bf16-true": "bfloat16"}
    (kind,) = _precisions([precision], list(kinds))
    found = serving.bench_serving(
        _mechanisms(mechanism or []),
        requests=requests,
        context=context,
        tokens=tokens,
        turns=turns,
        cache_memory=None if cache_memory is None else cache_memory * serving.GIB,
        dtype=kinds[kind],
        layers=layers,
        width=width,
        vocabulary=vocabulary,
    )
    table = _table(
        f"{layers} layers, width {width}, {kind}, {requests} requests of {context} + {tokens} tokens, {turns} turns; "
        f"{_cpu()}",
        *("model", "tokens in cache", "running", "s", "ratio", "quartiles", "ms/step", "ratio"),
        left=["model"],
    )
    for one in found:
        paired, steps = one.paired(), one.paired("step")
        low, high = (0.0, 0.0) if paired is None else paired.quartiles
        table.add_row(
            one.model,
            f"{one.cache_tokens:,}",
            f"{one.median('running'):.1f}",
            f"{one.median('seconds'):.2f}",
            "" if paired is None else f"{paired.ratio:.3f}",
            "" if paired is None else f"{low:.3f} – {high:.3f}",
            "" if math.isnan(one.median("step")) else f"{one.median('step') * 1e3:.1f}",
            "" if steps is None or math.isnan(steps.ratio) else f"{steps.ratio:.3f}",
        )
    out.print(table)
    out.print(
        "running: requests at a time, mean over the steps. ms/step: of steps that continue all requests. "
        f"ratio: time over {serving.VANILLA}'s, and {serving.VANILLA}'s over that of {serving.LLAMA}; median over the "
        "turns.",
        highlight=False,
    )
    same = "the same tokens as" if found[1].same_tokens else "not the same tokens as"
    err.print(f"{serving.VANILLA}: {same} {serving.LLAMA}", style="dim")


@bench.command("recompute")
def bench_recompute(
    layers: Positive = 8,
    width: Width = 256,
    context: Positive = 256,
    batch_size: Positive = 8,
    vocabulary: Positive = 512,
    turns: Annotated[int, typer.Option(min=1, help="Number of timed steps of each.")] = 7,
) -> None:
    """Measure the memory and time of each choice of training.gradient_checkpointing on the CPU."""
    from headwater.bench.recompute import bench_recompute as measure

    quiet()
    shape = dict(layers=layers, width=width, context=context, batch_size=batch_size, vocabulary=vocabulary)
    table = _table(
        f"{layers} layers, width {width}, context {context}, batch {batch_size}, {turns} turns; {_cpu()}",
        *("gradient_checkpointing", "MB kept", "MB at the peak", "s a step", "ratio"),
        left=["gradient_checkpointing"],
    )
    found = measure(**shape, turns=turns)
    for what, one in found.items():
        ratio = one.second / found[False].second
        megabytes = [f"{size / 1e6:.1f}" for size in (one.kept, one.peak)]
        table.add_row(str(what).lower(), *megabytes, f"{one.second:.3f}", f"{ratio:.3f}")
    out.print(table)


@bench.command("save")
def bench_save(
    layers: Positive = 8,
    width: Width = 512,
    context: Positive = 256,
    batch_size: Positive = 8,
    vocabulary: Positive = 32000,
    turns: Annotated[int, typer.Option(min=1, help="Number of saves of each kind.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Where to write. Default: a temporary folder.")] = None,
) -> None:
    """Time what a checkpoint costs training on the CPU, against a save that training waits for."""
    from statistics import median

    from headwater.bench.saving import bench_save as measure

    quiet()
    shape = dict(layers=layers, width=width, context=context, batch_size=batch_size, vocabulary=vocabulary)
    found = measure(**shape, turns=turns, folder=folder)
    table = _table(
        f"{layers} layers, width {width}, vocabulary {vocabulary}, context {context}, batch {batch_size}; "
        f"{found.size / 1e6:,.0f} MB a save, {found.step:.2f} s a step, {turns} turns; {_cpu()}",
        *("", "training waits, s", "all lost time, s", "share of a waiting save"),
    )
    whole = median(found.waiting)
    table.add_row("written while training waits", f"{whole:.2f}", f"{whole:.2f}", "1.00")
    call, lost = median(found.call), median(found.lost)
    table.add_row("written meanwhile", f"{call:.2f}", f"{lost:.2f}", f"{lost / whole:.2f}")
    out.print(table)
    out.print(f"The first save allocates memory for its copy, and takes {found.first:.2f} s.", highlight=False)


@bench.command("gpu")
def bench_gpu(
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for gpu.json and gpu.md.")],
    budget: Annotated[float, typer.Option(min=1, help="Seconds for the whole command.")] = 540,
    only: Annotated[list[str] | None, typer.Option(help="Run only this phase; repeatable. Default: all.")] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help="Also measure this one: package.module:Class, or its package's entry point; repeatable."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Measure headwater on a GPU: correctness, training speed, packing, mechanisms, decoding. Takes nine minutes.

    Writes gpu.json and gpu.md after every phase, so an interrupted run keeps its results. Without a GPU the sizes are
    tiny, which checks the command but measures nothing.
    """
    from headwater.bench.gpu import bench_gpu as measure
    from headwater.bench.gpu import problems
    from headwater.process import age

    check_writable(out_folder, folder=True)
    chosen = device_of(device)
    if chosen == "cpu":
        err.print("No GPU found: the sizes are tiny, and the figures say nothing about a GPU.")
    found = measure(
        out_folder, device=chosen, budget=budget, only=only, mechanisms=mechanism, age=age(), tell=err.print
    )
    out.print(f"report: {out_folder / 'gpu.md'}")
    if wrong := problems(found):
        raise HeadwaterError("; ".join(wrong))


@bench.command("page")
def bench_page(
    page: Annotated[Path, typer.Argument(help="A Markdown file with blocks that begin with `$ headwater bench …`.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Run only commands that contain this text; repeatable. Default: all.")
    ] = None,
) -> None:
    """Run the benchmarks on a page, such as docs/speed.md, and write their output into it, with the CPU's name.

    Each result is written at once. The command resumes an interrupted run: what this CPU has measured of this code is
    not run again, unless --only names it.
    """
    from headwater.bench.page import bench_page as measure

    check_writable(page)
    if failed := measure(page, cpu=_cpu(), only=only or (), tell=tell):
        raise HeadwaterError(f"These failed, and their results stay as they were: {'; '.join(failed)}.")


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
    vocabulary: Annotated[
        int, typer.Option(min=257, help="Vocabulary of the tokenizer, which is trained on the text.")
    ] = 32_000,
) -> None:
    """Time `headwater data prepare` against Dataset.map of datasets, with the same tokenizer and text."""
    from headwater.bench.data import bench_data as measure

    quiet()
    found = measure(source, megabytes, pairs, workers, vocabulary)
    low, high = found.paired.quartiles
    table = _table(
        f"{found.documents:,} documents, {found.bytes / 1e6:,.1f} MB, {found.tokens:,} tokens, {workers} workers, "
        f"{pairs} pairs",
        *("", "s", "tokens/s", "peak memory, MB"),
    )
    names = ("headwater data prepare", f"Dataset.map, {workers} processes")
    for name, times, peak in zip(names, (found.paired.a, found.paired.b), found.peaks, strict=True):
        seconds = sorted(times)[pairs // 2]
        table.add_row(name, f"{seconds:.2f}", f"{found.tokens / seconds:,.0f}", f"{peak / 1e6:,.0f}")
    out.print(table)
    out.print(f"ratio of times: median {found.paired.ratio:.3f}, quartiles {low:.3f} – {high:.3f}", highlight=False)


def _mechanisms(given: list[str]) -> dict[str, dict[str, dict]]:
    """Mechanisms by a label, from names and JSON."""
    import json

    from headwater.outside import trust_names_in
    from headwater.registry import resolve
    from headwater.written import plain

    chosen = [plain(text, shown(text)) if text.startswith("{") else {text: {}} for text in given]
    trust_names_in(chosen)
    for one in chosen:
        for name, options in one.items():
            resolve(name).options(options)
    return {
        " + ".join(name + (f" {json.dumps(options)}" if options else "") for name, options in one.items()): one
        for one in chosen
    }


def _precisions(
    given: list[str] | None, known: Sequence[str] = ("32-true", "bf16-true", "bf16-mixed")
) -> Sequence[str]:
    for kind in given or []:
        if kind not in known:
            raise HeadwaterError(f"precision must be {either(known)}, not {kind!r}.")
    return given or known


def _print_choices() -> None:
    """The kernels that generation chose on this machine, for the operations that were used."""
    from headwater.kernels import VARIABLE, mode
    from headwater.kernels.choose import found_here

    columns = ("operation", "taken", "ms")
    table = _table("generation kernels timed on this machine", *columns, left=columns)
    for operation, found in sorted(found_here().items()):
        times = ", ".join(f"{form} {second * 1e3:.3f}" for form, second in found.seconds.items())
        table.add_row(operation, found.best, times or found.untimed)
    if table.row_count:
        out.print(table)
    else:
        out.print(f"kernels: plain PyTorch ({VARIABLE}={mode()}, or all operations too small to time)", highlight=False)


def _cpu() -> str:
    import torch

    from headwater.kernels.choose import cpu

    threads = torch.get_num_threads()
    return f"{cpu()}, {threads} thread{'s' if threads > 1 else ''}"


@bench.command("loop")
def bench_loop(
    precision: Annotated[
        list[str] | None, typer.Option(help="32-true or bf16-mixed; repeatable. Default: both.")
    ] = None,
    layers: Positive = 6,
    width: Width = 384,
    context: Positive = 256,
    batch_size: Positive = 8,
    vocabulary: Positive = 512,
    compile: Annotated[bool, typer.Option("--compile", help="Compile both with torch.compile.")] = False,
    turns: Annotated[int, typer.Option(min=2, help="Number of timed steps of each loop.")] = 20,
) -> None:
    """Time the whole training loop against transformers' Llama under its Trainer, and against a bare step."""
    from headwater.bench.loops import bench_loops

    quiet()
    title = f"{layers} layers, width {width}, vocabulary {vocabulary}, context {context}, batch {batch_size}"
    columns = ("precision", "headwater, µs/token", "Llama + Trainer", "ratio, median", "quartiles", "over bare step")
    table = _table(f"{title}, {turns} turns", *columns, "waiting for data")
    for kind in precision or ["32-true", "bf16-mixed"]:
        found = bench_loops(
            kind,
            layers=layers,
            width=width,
            context=context,
            batch_size=batch_size,
            vocabulary=vocabulary,
            compile=compile,
            turns=turns,
        )
        paired = found.against_trainer
        low, high = paired.quartiles
        each = [f"{sorted(times)[turns // 2] / found.tokens * 1e6:.2f}" for times in (found.ours, found.trainer)]
        waiting = found.record.waited / found.record.seconds
        table.add_row(
            kind,
            *each,
            f"{paired.ratio:.3f}",
            f"{low:.3f} – {high:.3f}",
            f"{found.overhead.ratio - 1:+.1%}",
            f"{waiting:.2%}",
        )
    out.print(table)


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
    from headwater.compare import equalized
    from headwater.compare.prices import folder_of, measure, read_prices
    from headwater.recipe import parse_recorded
    from headwater.report import comparisons, prices_of, terminal_prices

    quiet()
    if not Path(source).is_dir():
        recipe = recipe_of(source, overrides or [])
        folder = folder or Path("runs") / recipe.name
        check_writable(folder, folder=True)
        recipe = equalized(recipe, folder, tell)
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
    arm: Annotated[
        str | None, typer.Option(help="Arm whose trials to use; default: the one with the most.", show_default=False)
    ] = None,
    arms: Annotated[int, typer.Option(min=1, max=1000, help="Arms besides the baseline in each comparison.")] = 1,
    seeds: Annotated[
        int, typer.Option(min=2, max=1000, help="Seeds per arm, and the maximum of comparisons until decided.")
    ] = 30,
    comparisons: Annotated[
        int, typer.Option(min=1, max=100_000, help="Comparisons to resample or to simulate.")
    ] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling.")] = 0,
) -> None:
    """Measure how often `compare` is wrong: false alarms between identical arms, and missed differences."""
    from headwater.compare.calibration import SHAPES, calibrate, dealing, planted_effect, results_of

    if arm is not None and folder is None:
        raise HeadwaterError("--arm names an arm of a comparison's folder; name the folder too.")
    sources = SHAPES
    if folder is not None:
        name, results = results_of(folder, arm)
        sources = {f"{len(results)} trials of {name!r}": dealing(results)}
    table = _table(
        f"{comparisons:,} comparisons of {arms + 1} identical arms with {seeds} seeds; the planted difference is "
        f"{planted_effect(arms, seeds):.3g} standard deviations of paired differences",
        *("results", "seeds", "false alarms, at most 0.05 stated", "planted found", "seeds, mean"),
    )
    for source, draw in sources.items():
        fixed, sequential = calibrate(draw, arms, seeds, comparisons, seed)
        for rule, measured in (("fixed", fixed), ("until decided", sequential)):
            if measured is not None:
                rates = map(_rate, (measured.false_alarms, measured.power))
                table.add_row(source, rule, *rates, f"{measured.seeds:.1f}")
    out.print(table)


def _rate(rate: Rate) -> str:
    """A share and its interval."""
    low, high = rate.interval
    return f"{rate.value:.4f} ({low:.4f} – {high:.4f})"
