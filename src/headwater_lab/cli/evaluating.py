"""`headwater evaluate`: checkpoints and any other models, on benchmarks and on text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwater.util import extras
from headwater_lab.cli.arguments import check_writable, device_of, say
from headwater_lab.cli.options import USE, DeviceName, NaturalInt, PositiveInt, TrustRemoteCode, command, need
from headwater_lab.cli.progress import ProgressReport
from headwater_lab.util.terminal import counted

if TYPE_CHECKING:
    from headwater_lab.evaluation import EvaluationResult


@command(USE, "evaluate runs/a runs/b --text 'texts/*.txt' --out eval.json")
def evaluate_models(
    checkpoints: Sequence[str],
    *,
    tasks: str = "",
    task_files: Path | None = None,
    shots: NaturalInt | None = None,
    limit: PositiveInt | None = None,
    text: Sequence[str] = (),
    text_column: str = "text",
    context: PositiveInt | None = None,
    stride: PositiveInt | None = None,
    cache_bits: Literal[2, 4] | None = None,
    batch_size: PositiveInt = 8,
    dtype: str = "auto",
    device: DeviceName = "auto",
    seed: NaturalInt = 1234,
    out: Path | None = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Evaluate models side by side on benchmarks (lm-evaluation-harness) and on text, with paired differences.

    checkpoints: Checkpoints, runs, or Hugging Face models by folder or name; the first is the baseline.
    tasks: Tasks of lm-evaluation-harness, NAME or NAME@SHOTS, separated by commas; or tokenformer, kv-shifting,
        mmlu-forms; or core, core/NAME, core/NAME@SHOTS. Default: all of --task-files.
    task_files: Your own task file, or a folder of them; for core, a folder of its JSON Lines.
    shots: Few-shot examples, for tasks that do not set them.
    limit: Use only the first N items or documents; for core, N items of each task, drawn by --seed.
    text: Evaluate on this text: a file, folder, glob or dataset; repeatable.
    text_column: Column of a table with the text, dotted if nested.
    context: Context in tokens. Default: the model's own; for text, at most 2048.
    stride: Tokens between a text's windows. Default: context / 2.
    cache_bits: Read through a quantized cache (backend quanto) of 2 or 4 bits, which is quantized every 128 tokens.
    dtype: float32, bfloat16, float16 or float64; auto: as in the checkpoint.
    seed: Seed for choosing few-shot examples and for sampling.
    out: Also write all results to this JSON file.
    """
    extras.check_extra("evaluate" if tasks else "report", spared=("matplotlib", "jinja2"))
    from headwater_lab import evaluation
    from headwater_lab.util import outputs

    need("--text", "--stride", "--text-column")
    need("--tasks or --task-files", "--shots")
    if out is not None:
        check_writable(out)
        outputs.check_replaceable(out)
    device = device_of(device)
    with ProgressReport() as progress:
        result = evaluation.evaluate(
            checkpoints,
            [name.strip() for name in tasks.split(",") if name.strip()],
            task_files=task_files,
            shots=shots,
            limit=limit,
            text=text,
            text_column=text_column,
            context=context,
            stride=stride,
            cache_bits=cache_bits,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            seed=seed,
            on_progress=lambda name, done, total: progress.show(name, done, total, unit="window" if total else "batch"),
        )
    say(*evaluation.build_tables(result))
    _print_models(result)
    if out is not None:
        outputs.write_json(out, evaluation.to_json(result))
        say(f"written to {out}")


def _print_models(result: EvaluationResult) -> None:
    """Print what is missing, a line for each model, and what its tokenizer cannot represent or its context not hold."""
    for facts in result.tasks:
        if missing := facts.get("missing"):
            say(f"{facts['task']} is not CORE, and comparable only with itself. Missing: {', '.join(missing)}.")
        for name, count in facts.get("cut_prompts", {}).items():
            say(f"{facts['task']}: the context of {name} cuts the beginning of {counted(count, 'prompt')}.")
    for name, facts in result.models.items():
        for kind, count in facts.get("rows", {}).items():
            if kind == "tasks" or count["quantized"] < count["read"]:
                say(
                    f"{name}: at most {count['quantized']:,} of {count['read']:,} rows of {kind} were read from a "
                    "quantized cache; the others are too short for it."
                )
        size = f"{facts['parameters']:,} parameters, {facts['dtype']}, vocabulary {facts['vocab_size']:,}"
        say(f"{name}: {facts['family']}, {size}, documents begin with {facts['begins_with']}")
        for label, counts in facts.get("texts", {}).items():
            if counts["unknown_tokens"]:
                say(
                    f"{name} cannot spell {label}: {counts['unknown_tokens']:,} of {counts['tokens']:,} tokens are "
                    "unknown, so its figures on that text are too optimistic."
                )
