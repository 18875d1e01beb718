"""`headwater bench …`: interleaved pairs, ratios of times."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from headwater.util.errors import HeadwaterError
from headwater_lab.bench.shapes import Benchmark, DecodeShape, StepShape
from headwater_lab.cli.arguments import check_writable, device_of, mechanisms_of, say, tell
from headwater_lab.cli.options import LOOK, DeviceName, FolderPath, PositiveInt, Values, add_group, command, refuse
from headwater_lab.cli.progress import ProgressReport
from headwater_lab.util.endings import Interrupted
from headwater_lab.util.terminal import lined

if TYPE_CHECKING:
    from headwater_lab.bench.paired import Show

Mechanisms = Annotated[
    Sequence[str], Values(help='NAME, "NAME={option: value}", or several joined by " + "; default every mechanism.')
]
AnyPrecision = Annotated[Literal["32-true", "bf16-true", "bf16-mixed", "bf16-stream"], Values(help="As in recipes.")]
TruePrecision = Annotated[Literal["32-true", "bf16-true"], Values(help="As in recipes.")]
Pairs = Annotated[int, Values(min=2, help="Timed steps of each model.")]
Memory = Annotated[bool, Values(help="Measure bytes stored for the backward pass, on the CPU, instead of times.")]

bench = add_group(LOOK, "bench", "Time models in alternation, and report ratios.")


@command(bench, "bench train --base gpt2 --precision bf16-mixed")
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
    from headwater.util.precision import Precision
    from headwater_lab.bench.training_speed import bench_steps, image_pair, text_pair

    if precision == "bf16-stream" and base != "llama":
        raise HeadwaterError(
            "transformers' GPT-2 and ViT have layers of their own that cannot run in bf16-stream; use --base llama or "
            "--precision bf16-mixed."
        )
    if base == "vit":
        refuse("without --base llama or --base gpt2", "--context", "--vocab-size", "--documents")
        pair = image_pair(shape, attention)
        title = f"layers {shape.layers}, width {shape.width}, batch size {shape.batch_size}, attention {attention}"
    else:
        pair = text_pair(base, shape, attention, documents)
        title = f"{shape}, attention {attention}" + ("" if documents is None else f", documents {documents}")
    name, device = {"llama": "Llama", "gpt2": "GPT-2", "vit": "ViT"}[base], _device_of(device, memory)
    settings = name, title, Precision(precision), pairs, memory, device
    _print_benchmark(lambda show: bench_steps([("headwater", pair)], *settings, show))


@command(bench, "bench mechanisms NAME")
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
    from headwater.util.precision import Precision
    from headwater_lab.bench.training_speed import bench_steps, mechanism_pair

    settings = Precision(precision), pairs, memory, _device_of(device, memory)
    compared = ((label, mechanism_pair(options, shape)) for label, options in _read_mechanisms(mechanism).items())
    _print_benchmark(lambda show: bench_steps(compared, "without", str(shape), *settings, show))


def _device_of(device: str, memory: bool) -> str:
    """Find the device of training steps. Raises `HeadwaterError` for any device except the CPU with --memory."""
    if not memory:
        return device_of(device)
    if device not in ("auto", "cpu"):
        raise HeadwaterError("--memory is measured on the CPU, and is the same on every device; leave out --device.")
    return "cpu"


@command(bench, "bench decode NAME --context 1024")
def bench_decode(
    mechanism: Mechanisms = (),
    *,
    shape: DecodeShape,
    precision: TruePrecision = "32-true",
    device: DeviceName = "auto",
) -> None:
    """Time the first token and later ones: transformers' Llama, headwater without mechanisms, and with each."""
    from headwater.util.precision import Precision
    from headwater_lab.bench import decoding_speed as decoding

    settings = _read_mechanisms(mechanism), shape, Precision(precision), device_of(device)
    _print_benchmark(lambda show: decoding.bench_decode(*settings, show))


@command(bench, "bench gpu --out gpu --deadline 540")
def bench_gpu(
    *,
    out: Path,
    deadline: Annotated[float, Values(min=1)] = 540,
    only: Sequence[str] = (),
    prose: Path | None = None,
    tokenizer: FolderPath | None = None,
    model: FolderPath | None = None,
    task_files: FolderPath | None = None,
    device: DeviceName = "auto",
) -> None:
    """Measure headwater on a GPU: correctness, speed, the recommended recipe on prose, smaller caches of a model.

    Appends each row to gpu.jsonl as soon as it is measured. The same command continues there, on another day too, and
    measures only what is missing. Without a GPU the sizes are tiny, which checks the command but measures nothing.

    out: Folder for gpu.jsonl, and for the records of the phase prose.
    deadline: Seconds for this call.
    only: Run only this phase; repeatable. Default: all, in order.
    prose: For the phases prose and conversion: text, such as JSON Lines with a column "text".
    tokenizer: For the phase prose: a tokenizer's folder.
    model: For the phase conversion: the folder of a pretrained model.
    task_files: For the phase conversion: a folder with CORE's piqa, arc_easy and lambada_openai, to measure these too.
    """
    from headwater_lab.bench import gpu_queue

    check_writable(out, folder=True)
    device = device_of(device)
    if device == "cpu":
        tell("No GPU found: the sizes are tiny, and the figures say nothing about a GPU.")
    inputs = {"prose": prose, "tokenizer": tokenizer, "model": model, "task_files": task_files}
    rows = gpu_queue.bench_gpu(out, device=device, deadline=deadline, only=only, inputs=inputs, tell=tell)
    lines = gpu_queue.read_lines(out / gpu_queue.REPORT)
    for row in rows:
        columns = row["row"] | row["result"]
        if (judged := gpu_queue.judge_row(row["phase"], columns, lines[0]["device"])) is not None:
            (target, figure), cells = judged, ", ".join(map(str, row["row"].values()))
            verdict = "met" if target.is_met(figure) else "missed"
            say(f"{target.key}, {cells}: {figure:.3f} ({target.bound}: {verdict})")
    say(f"written to {out / gpu_queue.REPORT}")
    if problems := gpu_queue.find_problems(lines):
        raise HeadwaterError("; ".join(problems))


@command(bench, "bench prices demo/language --out runs/prices", trusts=True)
def bench_prices(recipe: str, overrides: Sequence[str] = (), *, out: FolderPath | None = None) -> None:
    """Measure the cost of a comparison's arms relative to its baseline, in training and generation.

    Nothing needs to be trained first.

    recipe: The recipe of a comparison.
    overrides: dotted.key=value overrides of the recipe.
    out: The folder of its comparison, run or not; default: runs/NAME, as in compare.
    """
    from headwater_lab.comparison.arm_costs import measure_arm_costs
    from headwater_lab.comparison.budget import match_arms
    from headwater_lab.comparison.trials import find_folder
    from headwater_lab.recipe.recipe_files import read_recipe
    from headwater_lab.reports.cost_tables import make_cost_table

    loaded = match_arms(read_recipe(recipe, overrides))
    out = out or Path("runs") / loaded.name
    check_writable(out, folder=True)
    if (section := loaded.compare) is None:
        raise HeadwaterError(f"{loaded.name!r} has no compare section; name a recipe whose arms can be measured.")
    for size in section.sizes or [None]:
        folder = find_folder(loaded, size, out)
        folder.mkdir(parents=True, exist_ok=True)
        arms = {arm: loaded.arm(arm, section.seeds[0], size) for arm in section.arms}
        say(make_cost_table(measure_arm_costs(arms, section.baseline, folder, tell)))


def _read_mechanisms(arguments: Sequence[str]) -> dict[str, dict[str, dict]]:
    """Read mechanisms by the text that names them; every mechanism by default."""
    from headwater.plugins.mechanisms import MECHANISMS

    return {text: mechanisms_of(text.split(" + ")) for text in arguments or MECHANISMS.names}


def _print_benchmark(run: "Callable[[Show], Benchmark]") -> None:
    """Run a benchmark with its progress on stderr, and print its table and notes.

    Raises `Interrupted` after SIGINT or SIGTERM, below the table of what was measured until then.
    """
    with ProgressReport() as progress:
        benchmark = run(progress.show)
    longest: dict[str, str] = max(benchmark.rows, key=len, default={})
    columns = list(longest)
    table = lined(*columns, left=columns[:1], title=benchmark.title)
    for row in benchmark.rows:
        table.add_row(*(row.get(column, "") for column in columns))
    say(table, *benchmark.notes.splitlines())
    if not benchmark.is_whole:
        raise Interrupted("Stopped; the table has what was measured until then.")
