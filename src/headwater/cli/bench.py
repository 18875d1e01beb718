"""`headwater bench …`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from headwater.cli.common import Positive, check_device, err, out, quiet
from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    pass

bench = typer.Typer(help="Benchmarks: interleaved pairs, ratios of times.", no_args_is_help=True)

Precisions = Annotated[
    list[str] | None, typer.Option(help="32-true, bf16-true, bf16-mixed; may be given again. Default all three.")
]


@bench.command("train")
def bench_train(
    precision: Precisions = None,
    layers: Positive = 8,
    width: Positive = 256,
    context: Positive = 256,
    batch_size: Positive = 8,
    vocabulary: Positive = 512,
    pairs: Annotated[int, typer.Option(min=2)] = 30,
    device: str = "cpu",
) -> None:
    """A training step without mechanisms against transformers' LlamaForCausalLM of the same shape."""
    from headwater import bench as benchmarks

    quiet()
    check_device(device)
    table = Table(
        title=f"{layers} layers, width {width}, context {context}, batch {batch_size}, {pairs} pairs",
        title_justify="left",
    )
    for name in ("precision", "headwater, s", "Llama, s", "ratio, median", "quartiles"):
        table.add_column(name, justify="right")
    for kind in _precisions(precision):
        paired = benchmarks.bench_train(
            kind,
            layers=layers,
            width=width,
            context=context,
            batch_size=batch_size,
            vocabulary=vocabulary,
            pairs=pairs,
            device=device,
        )
        low, high = paired.quartiles
        ours, theirs = sorted(paired.a)[pairs // 2], sorted(paired.b)[pairs // 2]
        table.add_row(kind, f"{ours:.3f}", f"{theirs:.3f}", f"{paired.ratio:.3f}", f"{low:.3f} – {high:.3f}")
    out.print(table)


@bench.command("mechanisms")
def bench_mechanisms(
    mechanism: Annotated[
        list[str] | None,
        typer.Argument(help='Names, or JSON as in a config: {"NAME": {"OPTION": …}, …}; default each one there is.'),
    ] = None,
    precision: Precisions = None,
    layers: Positive = 8,
    width: Positive = 256,
    context: Positive = 256,
    batch_size: Positive = 8,
    vocabulary: Positive = 512,
    pairs: Annotated[int, typer.Option(min=2)] = 30,
    device: str = "cpu",
    memory: Annotated[
        bool, typer.Option("--memory", help="Bytes kept for the backward pass, instead of times.")
    ] = False,
) -> None:
    """A training step with each mechanism against the same model without it."""
    from headwater import bench as benchmarks
    from headwater.registry import REGISTRY

    quiet()
    check_device(device)
    if memory and device != "cpu":
        raise HeadwaterError("--memory is counted on the CPU, and is the same elsewhere; leave out --device.")
    shape = dict(layers=layers, width=width, context=context, batch_size=batch_size, vocabulary=vocabulary)
    chosen = _mechanisms(mechanism or list(REGISTRY))
    table = Table(
        title=f"{layers} layers, width {width}, context {context}, batch {batch_size}"
        + ("" if memory else f", {pairs} pairs"),
        title_justify="left",
    )
    unit = "MB kept" if memory else "s"
    columns = ("mechanism", "precision", f"with, {unit}", f"without, {unit}", "ratio" if memory else "ratio, median")
    for name in columns if memory else (*columns, "quartiles"):
        table.add_column(name, justify="left" if name == "mechanism" else "right")
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
            ours, other = benchmarks.pattention_memory(kind, rows=batch_size * context, width=width, pairs=4 * width)
            label = "one feed-forward Pattention against its plain form"
            table.add_row(label, kind, f"{ours / 1e6:.1f}", f"{other / 1e6:.1f}", f"{ours / other:.3f}")
    out.print(table)


@bench.command("attention")
def bench_attention(pairs: Annotated[int, typer.Option(min=2)] = 10) -> None:
    """bf16 attention on the CPU: two matmuls against PyTorch's fused kernel, by length."""
    from headwater import bench as benchmarks
    from headwater.nn.kernels import FUSED_FROM

    table = Table(title=f"fused from {FUSED_FROM} keys on", title_justify="left")
    for name in ("tokens", "matmuls / fused"):
        table.add_column(name, justify="right")
    for length in (128, 256, 512, 1024, 2048):
        table.add_row(str(length), f"{benchmarks.bench_attention(length, pairs=pairs).ratio:.2f}")
    out.print(table)


@bench.command("decode")
def bench_decode(
    mechanism: Annotated[
        list[str] | None,
        typer.Argument(help='Names, or JSON as in a config: {"NAME": {"OPTION": …}, …}; default each one there is.'),
    ] = None,
    precision: Annotated[list[str] | None, typer.Option(help="32-true or bf16-true; default both.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; may be given again; default 1, 8.")] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the prompt; may be given again; default 128, 2048.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens to generate.")] = 48,
    turns: Annotated[int, typer.Option(min=2, help="How often each model runs.")] = 7,
    layers: Positive = 12,
    width: Positive = 768,
    vocabulary: Positive = 50304,
    static: Annotated[bool, typer.Option("--static", help="Static caches, compiled for on a GPU.")] = False,
    device: str = "cpu",
) -> None:
    """Time per generated token: Llama of transformers, headwater without mechanisms, and with each."""
    import torch

    from headwater import bench as benchmarks
    from headwater.hardware import read_bandwidth
    from headwater.registry import REGISTRY

    quiet()
    check_device(device)
    kinds = {"32-true": torch.float32, "bf16-true": torch.bfloat16}
    for kind in precision or []:
        if kind not in kinds:
            raise HeadwaterError(f"bench decode has precision 32-true and bf16-true, not {kind!r}.")
    chosen = _mechanisms(mechanism or list(REGISTRY))
    bandwidth = read_bandwidth(device)
    shape = f"{layers} layers, width {width}, {tokens} tokens, {turns} turns"
    table = Table(title=f"{shape}; memory read at {bandwidth / 1e9:.1f} GB/s", title_justify="left")
    for name in ("precision", "batch", "context", "model", "ms/token", "ratio", "quartiles", "cache", "bandwidth"):
        table.add_column(name, justify="left" if name in ("precision", "model") else "right")
    for kind in precision or kinds:
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
                same = "the same tokens as" if found[1].same_tokens else "not all tokens as"
                err.print(f"{kind}, batch {rows}, context {length}: {same} {found[0].arm}", style="dim")
    out.print(table)
    out.print(
        f"ratio: time over {benchmarks.VANILLA}'s, and {benchmarks.VANILLA}'s over that of {benchmarks.LLAMA}; median "
        "over the turns. bandwidth: weights and cache read per second, as a share of what memory gives.",
        highlight=False,
    )


def _mechanisms(given: list[str]) -> dict[str, dict[str, dict]]:
    """Mechanisms by a label, from names and JSON."""
    import json

    try:
        chosen = [json.loads(m) if m.startswith("{") else {m: {}} for m in given]
    except json.JSONDecodeError as error:
        raise HeadwaterError(f"{error.doc!r} is not JSON: {error.msg} at character {error.pos}.") from error
    return {
        " + ".join(name + (f" {json.dumps(options)}" if options else "") for name, options in one.items()): one
        for one in chosen
    }


def _precisions(given: list[str] | None) -> list[str]:
    known = ["32-true", "bf16-true", "bf16-mixed"]
    for kind in given or []:
        if kind not in known:
            raise HeadwaterError(f"precision must be 32-true, bf16-true or bf16-mixed, not {kind!r}.")
    return given or known
