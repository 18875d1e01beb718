"""The command line. Each command parses, calls the library, and prints; errors become one sentence and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from headwater.errors import HeadwaterError, Interrupted, nearest, sentence

if TYPE_CHECKING:
    from headwater.compare import Trial
    from headwater.config import HeadwaterConfig

app = typer.Typer(
    help="Train, compare and run Transformers whose keys and values come from more places than one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Benchmarks: interleaved pairs, ratios of times.", no_args_is_help=True)
app.add_typer(bench, name="bench")
# Tables need this much; a narrower terminal wraps lines rather than losing figures.
out = Console(width=max(120, Console().width))
err = Console(stderr=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="dotted.key=value, over the recipe's own.", show_default=False)
]

Positive = Annotated[int, typer.Option(min=1)]
Precisions = Annotated[
    list[str] | None, typer.Option(help="32-true, bf16-true, bf16-mixed; may be given again. Default all three.")
]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/shakespeare.yaml.")],
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/<name>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Train one model as a recipe says."""
    from headwater.recipe import load_recipe
    from headwater.training.loop import train as run_training

    _quiet()
    loaded = load_recipe(recipe, overrides or [])
    folder = run or Path("runs") / loaded.name
    progress = _progress()
    task = progress.add_task(loaded.name, total=loaded.training.steps, info="")

    def show(step: int, point) -> None:
        progress.start()  # at the first step: what is refused before leaves no bar behind
        progress.update(task, completed=step)
        if point is not None:
            progress.update(task, info=f"loss {point.loss:.4f}")

    try:
        record = run_training(loaded, folder, resume=resume, on_point=show)
    finally:
        if progress.live.is_started:
            progress.stop()
    result = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in record.held_out[-1].measures.items())
    out.print(f"{loaded.name}: held-out {result}")
    out.print(
        f"{record.parameters:,} parameters, {record.tokens:,} tokens at {record.tokens_per_second:,.0f} tokens/s, "
        f"{record.flops:.3g} FLOPs"
    )
    out.print(f"written to {folder}", soft_wrap=True)


@app.command()
def compare(
    recipes: Annotated[
        list[str], typer.Argument(help="Recipes with a compare section, and dotted.key=value overrides.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write; default runs/<name of the first>.")
    ] = None,
) -> None:
    """Train the arms of recipes side by side, and report."""
    from headwater import compare as comparing
    from headwater import report as reporting
    from headwater.recipe import load_recipe

    _quiet()
    overrides = [argument for argument in recipes if "=" in argument]
    loaded = [load_recipe(argument, overrides) for argument in recipes if "=" not in argument]
    if not loaded:
        raise HeadwaterError("Name at least one recipe.")
    folder = folder or Path("runs") / loaded[0].name
    failed = []
    for recipe in loaded:
        trials = comparing.trials_of(recipe, folder)
        with _progress() as progress:
            display = _TrialBars(progress, recipe.name, len(trials) * recipe.training.steps)
            outcomes = comparing.run_trials(trials, recipe.compare.workers if recipe.compare else None, display)
        failed += [outcome for outcome in outcomes if outcome.record is None]
    for outcome in failed:
        err.print(f"{outcome.trial.label} failed: {outcome.error}", soft_wrap=True, highlight=False)
    for comparison in reporting.comparisons(folder):
        out.print(reporting.table(comparison))
    page = reporting.write_report(folder)
    out.print(f"report: {page}", soft_wrap=True)
    if failed:
        raise HeadwaterError(f"{len(failed)} of the trials failed and are not in the tables.")


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A folder with run records.")]) -> None:
    """Write the report of a folder again, from its records."""
    from headwater import report as reporting

    for comparison in reporting.comparisons(folder):
        out.print(reporting.table(comparison))
    out.print(f"report: {reporting.write_report(folder)}", soft_wrap=True)


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest checkpoint).")],
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads it from stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text to continue from this file.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(help='Continue all lines of a file, {"prompt": "…"}, in batches; prints JSONL. - is stdin.'),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens with this much mass.")
    ] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from so many likeliest tokens; 0 is no limit.")] = 0,
    seed: Annotated[int, typer.Option(help="Fixes the sample.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of --jsonl that are continued at a time.")] = 16,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64; auto: as in the checkpoint.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: a GPU if there is one.")] = "auto",
) -> None:
    """Continue a prompt, printing the text as it is made; or many prompts, as JSONL."""
    import json

    import torch

    from headwater.generation import continue_prompts, load_for_generation

    _quiet()
    if sum(given is not None for given in (prompt, file, jsonl)) != 1:
        raise HeadwaterError("Give one of: a prompt, - for stdin, --file, --jsonl.")
    if 0 < temperature < 0.01:
        raise HeadwaterError("--temperature below 0.01 is all but greedy; 0 takes the likeliest token each time.")
    if "" in (stop or ()):
        raise HeadwaterError("--stop needs a text to stop at, and got an empty one.")
    try:
        if jsonl is not None:
            rows = _prompts(sys.stdin.read() if str(jsonl) == "-" else jsonl.read_text(), str(jsonl))
        else:
            text = file.read_text() if file is not None else sys.stdin.read() if prompt == "-" else str(prompt)
            rows = [{"prompt": text}]
    except UnicodeDecodeError as error:
        raise HeadwaterError(f"The prompt is not UTF-8 text: {error}.") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_device(device)
    if dtype not in ("auto", "float32", "bfloat16", "float64"):
        raise HeadwaterError(f"--dtype is auto, float32, bfloat16 or float64, not {dtype!r}.")
    model, tokenizer = load_for_generation(checkpoint)
    model.to(device, None if dtype == "auto" else getattr(torch, dtype))
    tokens, seconds = 0, 0.0
    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        made = continue_prompts(
            model,
            tokenizer,
            [row["prompt"] for row in batch],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed + begin,
            stop=stop or (),
            stream=jsonl is None,
        )
        tokens, seconds = tokens + made.tokens, seconds + made.seconds
        if jsonl is not None:
            for row, completion in zip(batch, made.texts, strict=True):
                print(json.dumps(row | {"completion": completion}, ensure_ascii=False), flush=True)
    err.print(
        f"{tokens} tokens, {tokens / seconds:,.0f} tokens/s, cache {made.cache_bytes:,} bytes "
        f"({made.reserved_bytes:,} reserved)",
        style="dim",
    )


def _prompts(text: str, name: str) -> list[dict[str, Any]]:
    """The lines of a JSONL file, each with a "prompt". Raises `HeadwaterError` for a line that has none."""
    import json

    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            content = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise HeadwaterError(f"Line {number} of {name!r} is not JSON: {error}.") from error
        if content is not None and not (isinstance(content, dict) and isinstance(content.get("prompt"), str)):
            raise HeadwaterError(f'Line {number} of {name!r} has no text under "prompt".')
        if content is not None:
            prompts.append(content)
    if not prompts:
        raise HeadwaterError(f"{name!r} has no prompts.")
    return prompts


@app.command()
def verify(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="A checkpoint's folder, or a run's; default small random models.", show_default=False),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, max=3, help="1: each mechanism alone (default); 2: also all pairs; 3: also all triples."),
    ] = None,
    requests: Annotated[int, typer.Option(min=0, help="Random greedy requests in random batches afterwards.")] = 0,
    sampled: Annotated[int, typer.Option(min=0, help="The same with sampling, comparing logits.")] = 0,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of a request's prompt at most.")] = 512,
    seed: Annotated[int, typer.Option(help="Fixes prompts and parameters.")] = 0,
) -> None:
    """Check that every way of decoding with a cache makes what the model makes without one, in fp64."""
    from headwater import verify as verifying
    from headwater.generation import newest_checkpoint
    from headwater.training.checkpoint import load_model

    _quiet()
    table = Table(
        title="Decoding with a cache against without", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("mechanisms", no_wrap=True)
    for number in range(1, len(verifying.CHECKS) + 1):
        table.add_column(str(number), justify="right")
    table.add_column("fp64", justify="right")
    table.add_column("fp32", justify="right")
    if checkpoint is not None and size is not None:
        raise HeadwaterError("--size chooses among small random models; leave it out with a checkpoint.")
    given = None if checkpoint is None else load_model(newest_checkpoint(checkpoint)).double().eval()
    wanted = [{}, *(one for number in range(size or 1) for one in verifying.combinations(number + 1))]
    models, refused, failed = [], 0, False
    with _progress() as progress:
        task = progress.add_task("verifying", total=1 if given else len(wanted), info="")
        for mechanisms in wanted if given is None else [given.config.mechanisms]:
            model = verifying.tiny(mechanisms, seed=seed) if given is None else given
            progress.advance(task)
            if model is None:
                refused += 1
                continue
            models.append(model)
            found = verifying.verify(model, seed)
            failed |= any(one.ok is False for one in found)
            exact = [one.error for one in found if one.error is not None and one.check != verifying.FP32]
            table.add_row(
                " + ".join(mechanisms) or "none",
                *("–" if one.ok is None else "✓" if one.ok else "[red]✗" for one in found),
                f"{max(exact):.0e}",
                f"{found[-1].error:.0e}",
            )
    out.print(table)
    legend = ", ".join(f"{number} {name}" for number, name in enumerate(verifying.CHECKS, 1))
    out.print(f"{legend}. ✓ as without a cache, – does not apply; fp64, fp32: largest relative differences of logits.")
    if refused:
        out.print(f"{refused} combinations contradict each other.")
    for count, is_sampled, what in ((requests, False, "greedy"), (sampled, True, "sampled")):
        if count:
            with _progress() as progress:
                task = progress.add_task(f"{what} requests", total=count, info="")
                for served in verifying.serve_requests(models, count, sampled=is_sampled, longest=longest, seed=seed):
                    progress.update(task, completed=served.requests)
            failed |= served.wrong > 0
            out.print(
                f"{served.requests:,} {what} requests in random batches: {served.wrong} not as alone and uncached; "
                f"largest difference of logits {served.error:.0e}, of which generate's rounding to fp32 is 6e-08; "
                f"memory "
                f"{served.early_memory / 1e6:,.0f} MB after a fifth, {served.memory / 1e6:,.0f} MB at the end"
            )
    if failed:
        raise HeadwaterError("Decoding with a cache differs from the model without one; see ✗ above.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest checkpoint).")],
) -> None:
    """Answer OpenAI-style requests over HTTP: `transformers serve`, to which all other options go."""
    import transformers
    from transformers.utils import is_serve_available

    from headwater.config import HeadwaterConfig
    from headwater.generation import newest_checkpoint
    from headwater.models.causal_lm import HeadwaterForCausalLM

    source = newest_checkpoint(checkpoint)
    if not (source / "config.json").is_file():
        raise HeadwaterError(f"{str(source)!r} is not a checkpoint: it has no config.json.")
    if not any(source.glob("*token*")):
        raise HeadwaterError(f"{str(source)!r} has no tokenizer, and so no text to answer.")
    if not is_serve_available():
        raise HeadwaterError("The server's packages are missing; install them with pip install 'headwater[serve]'.")
    if "--continuous-batching" in context.args:
        HeadwaterConfig.from_pretrained(source).check_paged()
    # The server looks for a checkpoint's class among transformers' own, and nowhere else.
    transformers.HeadwaterForCausalLM = HeadwaterForCausalLM
    from transformers.cli.transformers import main as transformers_cli

    sys.argv = ["transformers", "serve", str(source), *context.args]
    transformers_cli()


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest checkpoint).")],
    folder: Annotated[Path, typer.Argument(help="The new folder.")],
    materialise: Annotated[
        bool, typer.Option("--materialise", help="For engines with a paged cache: exact, without the smaller cache.")
    ] = False,
) -> None:
    """Write a checkpoint with its code, which transformers loads without headwater (trust_remote_code=True)."""
    from transformers import AutoTokenizer

    from headwater.export import export as write
    from headwater.generation import newest_checkpoint
    from headwater.training.checkpoint import load_model

    _quiet()
    source = newest_checkpoint(checkpoint)
    written = write(load_model(source), folder, materialise)
    if any(source.glob("*token*")):
        AutoTokenizer.from_pretrained(source).save_pretrained(written)
    out.print(f"written to {written}", soft_wrap=True)


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

    _quiet()
    _check_device(device)
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

    _quiet()
    _check_device(device)
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

    _quiet()
    _check_device(device)
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


@app.command()
def plan(
    configs: Annotated[
        list[str],
        typer.Argument(
            help="Presets, recipes (a column per arm), config.json files, checkpoints; and field=value, for all."
        ),
    ],
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens in a row; may be given again. Default the first config's own.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows, or sequences being generated.")] = 1,
    tokens: Annotated[str | None, typer.Option(help="Training budget, as in 300B or 2e10.", show_default=False)] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A device by name, e.g. H100; or this, which is measured.", show_default=False)
    ] = None,
    peak: Annotated[float | None, typer.Option(help="A device's TFLOP/s.", show_default=False)] = None,
    memory: Annotated[float | None, typer.Option(help="A device's memory in GB.", show_default=False)] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="A device's memory bandwidth in GB/s.", show_default=False)
    ] = None,
    devices: Annotated[int, typer.Option(help="How many devices train.")] = 1,
    mfu: Annotated[float, typer.Option(help="Share of the peak that training is taken to reach.")] = 0.4,
    precision: Annotated[str, typer.Option(help="32-true, bf16-mixed or bf16-true.")] = "bf16-mixed",
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the vocabulary, instead of the configs'.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw FLOPs against context into this file.", show_default=False)
    ] = None,
) -> None:
    """Price models before any training: parameters, FLOPs, cache, memory, and time on given hardware."""
    import json

    from headwater import hardware as devices_known
    from headwater import price as pricing

    _quiet()
    found: dict[str, HeadwaterConfig] = {}
    changes = [argument for argument in configs if "=" in argument]
    if len(changes) == len(configs):
        raise HeadwaterError("Name at least one preset, recipe, config.json or checkpoint to change fields of.")
    if vocabulary is not None:
        changes.append(f"vocab_size={vocabulary}")
    for argument in [argument for argument in configs if "=" not in argument]:
        for name, config in _configs(argument, changes).items():
            found[name if name not in found else f"{name} ({len(found) + 1})"] = config
    device = None if hardware is None else devices_known.hardware(hardware)
    if any(given is not None for given in (peak, memory, bandwidth)):
        device = devices_known.custom(device, peak, memory, bandwidth)
    first, *others = found.values()
    tables = [config.max_position_embeddings for config in others if config.position == "learned"]
    contexts = context or [min([first.max_position_embeddings, *tables])]
    prices = [
        pricing.price(
            config,
            name=name,
            context=contexts,
            batch=batch,
            tokens=None if tokens is None else _count(tokens),
            hardware=device,
            devices=devices,
            precision=precision,
            mfu=mfu,
        )
        for name, config in found.items()
    ]
    if as_json:
        print(json.dumps([one.to_json() for one in prices], indent=2))
    else:
        out.print(pricing.table(prices), highlight=False)
    if figure is not None:
        figure = figure if figure.suffix else figure.with_suffix(".png")
        longest = max(32768, *contexts)
        try:
            pricing.figure(found, [longest * i // 32 or 1 for i in range(33)]).savefig(figure, dpi=160)
        except ValueError as error:  # a suffix that no picture has
            raise HeadwaterError(f"{str(figure)!r} cannot be drawn: {error}") from error
        err.print(f"figure: {figure}", soft_wrap=True)


@app.command()
def presets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the papers' models, for `headwater plan` and `headwater.presets.preset`."""
    import json
    from dataclasses import asdict

    from headwater.cost import parameters
    from headwater.presets import PRESETS, preset

    _quiet()
    rows = []
    for name, known in PRESETS.items():
        config = preset(name)
        rows.append(asdict(known) | {"name": name, "parameters": sum(parameters(config).values()), "config": config})
    if as_json:
        shown = [{key: value for key, value in row.items() if key not in ("config", "reported_exact")} for row in rows]
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("name", "L", "D", "H", "K", "parameters", "paper"):
        table.add_column(title, justify="left" if title in ("name", "paper") else "right", no_wrap=title == "name")
    for row in rows:
        config = row["config"]
        shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
        table.add_row(row["name"], *map(str, shape), f"{row['parameters']:,}", row["paper"])
    out.print(table, highlight=False)


def _configs(argument: str, overrides: list[str]) -> dict[str, HeadwaterConfig]:
    """Name -> config for one argument of `plan`, with `overrides` "field=value". Raises `HeadwaterError`."""
    import json

    from huggingface_hub.errors import StrictDataclassError

    from headwater.config import HeadwaterConfig
    from headwater.generation import newest_checkpoint
    from headwater.presets import PRESETS, preset
    from headwater.recipe import MODEL_FIELDS, values_of

    changes = values_of(overrides)
    for field in changes:
        if field not in MODEL_FIELDS - {"base"}:
            raise HeadwaterError(f"A model has no field {field!r}; {nearest(field, MODEL_FIELDS - {'base'})}")
    path = Path(argument)
    if argument in PRESETS or not (path.exists() or path.suffix in (".json", ".yaml", ".yml") or len(path.parts) > 1):
        return {argument: preset(argument, **changes)}
    if path.suffix in (".yaml", ".yml"):
        return _recipe_configs(path, overrides, changes.get("vocab_size"))
    if not path.exists():
        raise HeadwaterError(f"There is no file {argument!r}; give a preset, a recipe, a config.json or a checkpoint.")
    name = path.name if path.is_dir() else path.resolve().parent.name if path.name == "config.json" else path.stem
    file = newest_checkpoint(path) / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise HeadwaterError(
            f"{argument!r} has no config.json; give a preset, a recipe, a config.json or a checkpoint."
        )
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise HeadwaterError(f"{argument!r} is not valid JSON: {error}") from error
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind != HeadwaterConfig.model_type:
        raise HeadwaterError(
            f"{argument!r} is no config of a headwater model (model_type {kind!r}), and only such have a price."
        )
    try:
        return {name: HeadwaterConfig.from_pretrained(file, **changes)}
    except (HeadwaterError, StrictDataclassError) as error:
        raise HeadwaterError(f"{argument!r}: {sentence(error)}") from error


def _recipe_configs(path: Path, overrides: list[str], vocabulary: int | None) -> dict[str, HeadwaterConfig]:
    """Name -> config of a recipe, one for each arm of its comparison. The data is not read."""
    from types import SimpleNamespace

    from headwater.data.tokenizer import byte_tokenizer
    from headwater.recipe import load_recipe

    loaded = load_recipe(path, [f"model.{override}" for override in overrides])
    if loaded.compare is None:
        recipes = {loaded.name: loaded}
    else:
        recipes = {name: loaded.arm(name, loaded.compare.seeds[0]) for name in loaded.compare.arms}
    result = {}
    for name, recipe in recipes.items():
        known = len(byte_tokenizer()) if getattr(recipe.data, "tokenizer", "") == "bytes" else None
        size = vocabulary or recipe.model.get("vocab_size") or getattr(recipe.data, "vocabulary", known)
        if size is None:
            raise HeadwaterError(
                f"The vocabulary of {str(path)!r} comes from its tokenizer, which plan does not load; give it with "
                "--vocabulary."
            )
        length = getattr(recipe.data, "context", None) or getattr(recipe.data, "length", 1)
        data = SimpleNamespace(vocab_size=size, context=length, tokenizer=None)
        result[name] = recipe.model_copy(update={"model": recipe.model | {"vocab_size": size}}).config_for(data)
    return result


def _count(text: str) -> float:
    """A number of tokens, as in 300B, 1.5T or 2e10. Raises `HeadwaterError` for what is none."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text)
    except ValueError:
        value = float("nan")
    if not 0 < value * factor < float("inf"):
        raise HeadwaterError(f"--tokens takes a number such as 300B or 2e10, not {text!r}.")
    return value * factor


def _check_device(name: str) -> None:
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise HeadwaterError(f"PyTorch cannot use the device {name!r} here; leave out --device for the CPU.") from error


def _precisions(given: list[str] | None) -> list[str]:
    known = ["32-true", "bf16-true", "bf16-mixed"]
    for kind in given or []:
        if kind not in known:
            raise HeadwaterError(f"precision must be 32-true, bf16-true or bf16-mixed, not {kind!r}.")
    return given or known


@app.command()
def theory(
    folder: Annotated[Path, typer.Option("--out", help="Where to write the picture.")] = Path("runs/theory"),
) -> None:
    """Check the three theorems of the KV-shifting paper, and draw the flow of the third."""
    from headwater import theory as theorems

    table = Table(title="KV shifting attention, arXiv 2411.19574", title_justify="left")
    for name in ("theorem", "checked", "result"):
        table.add_column(name)
    for row in theorems.run(folder):
        table.add_row(*row)
    out.print(table)
    out.print(f"picture: {folder / 'theory-flow.png'}", soft_wrap=True)


class _TrialBars:
    """One bar for a whole comparison and one for each trial that is running."""

    def __init__(self, progress: Progress, name: str, steps: int) -> None:
        self.progress = progress
        self.whole = progress.add_task(name, total=steps, info="")
        self.done: dict[str, int] = {}
        self.bars: dict[str, TaskID] = {}

    def __call__(self, trial: Trial, step: int, status: str) -> None:
        label = trial.label
        self.done[label] = step
        self.progress.update(self.whole, completed=sum(self.done.values()))
        if status == "running" and label not in self.bars:
            self.bars[label] = self.progress.add_task(f"  {label}", total=trial.recipe.training.steps, info="")
        if label in self.bars:
            self.progress.update(self.bars[label], completed=step, visible=status == "running")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[info]}"),
        TimeRemainingColumn(),
        console=err,
    )


def _quiet() -> None:
    """Our own progress bars say enough."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    """Entry point: run a command, turn what the user can put right into one sentence."""
    try:
        app(standalone_mode=True)
    except HeadwaterError as error:
        print(f"headwater: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"headwater: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as error:
        print(f"headwater: {error}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
