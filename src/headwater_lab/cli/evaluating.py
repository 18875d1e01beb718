"""`headwater evaluate`: checkpoints and any other models, on benchmarks and on text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.util import extras
from headwater_lab.cli.common import Device, Positive, check_writable, device_of, err, out, quiet, refuse_unread
from headwater_lab.cli.progress import ProgressReport

if TYPE_CHECKING:
    from rich.progress import TaskID


def evaluate(
    checkpoints: Annotated[
        list[str],
        typer.Argument(help="Checkpoints, runs, or Hugging Face models by folder or name; the first is the baseline."),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness, NAME or NAME@SHOTS, separated by commas; or tokenformer, "
            "kv-shifting, mmlu-forms. Default: all of --task-files.",
            show_default=False,
        ),
    ] = None,
    task_files: Annotated[
        Path | None, typer.Option(help="Your own task file, or a folder of them.", show_default=False)
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(min=0, help="Few-shot examples, for tasks that do not set them.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N items or documents.", show_default=False)
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Evaluate on this text: a file, folder, glob or dataset; repeatable.", show_default=False),
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column of a table with the text, dotted if nested.")] = "text",
    context: Annotated[
        int | None, typer.Option(min=1, help="Context in tokens. Default: the model's own; for text, at most 2048.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between a text's windows. Default: context / 2.")
    ] = None,
    batch_size: Positive = 8,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16 or float64; auto: as in the checkpoint.")
    ] = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed for choosing few-shot examples and for sampling.")] = 1234,
    file: Annotated[
        Path | None, typer.Option("--out", help="Also write all results to this JSON file.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that comes with a model. Use it only for models you trust."),
    ] = False,
) -> None:
    """Evaluate models side by side on benchmarks (lm-evaluation-harness) and on text, with paired differences."""
    extras.check("evaluate" if tasks else "report", spared=("matplotlib", "plotly", "jinja2"))
    from headwater.util import outputs
    from headwater_lab import evaluation as evaluating

    quiet()
    column = None if text_column == "text" else text_column
    refuse_unread({"--stride": stride, "--text-column": column}, text, "--text")
    refuse_unread({"--shots": shots}, tasks or task_files, "--tasks")
    if file is not None:
        check_writable(file)
        outputs.check_replaceable(file)
    device = device_of(device)
    with ProgressReport() as progress:
        bars: dict[str, TaskID] = {}

        def on_windows(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total, unit="window")
            progress.update(bars[what], completed=done)

        result = evaluating.evaluate(
            checkpoints,
            [name.strip() for name in (tasks or "").split(",") if name.strip()],
            task_files=task_files,
            shots=shots,
            limit=limit,
            text=text or (),
            text_column=text_column,
            context=context,
            stride=stride,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            seed=seed,
            progress=err.is_terminal,
            on_windows=on_windows,
        )
    for table in evaluating.table(result):
        out.print(table, highlight=False)
    for name, facts in result.models.items():
        size = f"{facts['parameters']:,} parameters, {facts['dtype']}, vocabulary {facts['vocab_size']:,}"
        line = f"{name}: {facts['family']}, {size}, documents begin with {facts['begins_with']}"
        out.print(line, soft_wrap=True, markup=False, highlight=False)
        for what, counts in facts.get("texts", {}).items():
            if counts["unknown_tokens"]:
                out.print(
                    f"{name} cannot spell {what}: {counts['unknown_tokens']:,} of {counts['tokens']:,} tokens are "
                    f"unknown, so its figures there are optimistic.",
                    soft_wrap=True,
                )
    if file is not None:
        outputs.write_json(file, evaluating.to_json(result))
        out.print(f"written to {file}", soft_wrap=True)
