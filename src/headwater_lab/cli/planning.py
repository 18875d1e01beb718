"""`headwater plan`, `init`: what can be known before training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from headwater_lab.cli.common import (
    check_writable,
    print_json,
    recipe_of,
    say,
    split_overrides,
    stdout,
    tell,
)
from headwater_lab.cli.options import AsJson, Values
from headwater_lab.util.terminal import lined

VocabSize = Annotated[int, Values(min=1, help="Vocabulary size, instead of the configs'.")]


def plan(
    configs: Sequence[str],
    *,
    context: Sequence[int] = (),
    batch: int | None = None,
    tokens: str | None = None,
    images: str | None = None,
    hardware: str | None = None,
    devices: int | None = None,
    mfu: float = 0.4,
    precision: str | None = None,
    vocab_size: VocabSize | None = None,
    json: AsJson = False,
    out: Path | None = None,
) -> None:
    """Estimate a model's cost before training: parameters, FLOPs, cache, memory, and time on given hardware.

    configs: Presets, recipes (a column per arm), config.json files or checkpoints; field=value changes all of them,
        training.field=value how they are trained.
    context: Tokens per row; repeatable. Default: the first config's own.
    batch: Rows per batch and device, or sequences to generate at a time. Default: the first recipe's, or 1.
    tokens: Training budget in tokens, e.g. 300B or 2e10. Default: the first recipe's.
    images: The same in images, for image models, e.g. 384M.
    hardware: A device, e.g. H100, or this to measure the current machine.
    devices: Number of training devices. Default: the first recipe's, or 1.
    mfu: Assumed share of the peak that training reaches.
    precision: 64-true, 32-true, bf16-mixed or bf16-true. Default: the first recipe's, or bf16-mixed.
    out: Draw FLOPs of text models against context to this picture.
    """
    from headwater_lab.api.planning import plan as estimate
    from headwater_lab.training.estimate_table import estimate_table
    from headwater_lab.util.outputs import check_replaceable, save_figure

    if out is not None:
        out = out if out.suffix else out.with_suffix(".png")
        check_writable(out)
        check_replaceable(out)
    models, changes = split_overrides(configs)
    planned = estimate(
        *models,
        overrides=changes,
        vocab_size=vocab_size,
        context=context or None,
        tokens=tokens,
        images=images,
        hardware=hardware,
        batch=batch,
        devices=devices,
        precision=precision,
        mfu=mfu,
    )
    if json:
        print_json([price.to_json() for price in planned.prices])
    else:
        stdout.print(estimate_table(planned.prices))
        for recipe in [name for name in models if name.endswith((".yaml", ".yml"))]:
            from headwater_lab.comparison.trials import describe_runs

            if runs := describe_runs(recipe_of(recipe)):
                tell(runs)
    if out is not None:
        save_figure(planned.picture(), out, dpi=160)
        tell(f"figure: {out}")


def init(configs: Sequence[str], *, vocab_size: VocabSize | None = None, json: AsJson = False) -> None:
    """Build models and show what each sub-layer writes at initialization, compared with the residual stream.

    configs: Presets, recipes (one model per arm), config.json files or checkpoints; field=value changes all.
    """
    from dataclasses import asdict

    from headwater.cost.counts import check_memory
    from headwater.models.kinds import model_class
    from headwater_lab.training.estimate import planned
    from headwater_lab.training.models import drowning, init_diagnostics

    models, changes = split_overrides(configs)
    by_name = {name: model.config for name, model in planned(models, changes, vocab_size).items()}
    for config in by_name.values():
        check_memory(config)
    measured = {name: init_diagnostics(model_class(config)(config)) for name, config in by_name.items()}
    if json:
        contents = {name: [asdict(row) | {"ratio": row.ratio} for row in rows] for name, rows in measured.items()}
        print_json(contents, indent=None)
        return
    for name, rows in measured.items():
        titles = ("layer", "sub-layer", "output rms", "stream rms", "output/stream", "cosine", "constant")
        table = lined(*titles, left=("sub-layer",), title=f"{name} at initialization")
        for row in rows:
            numbers = (f"{row.output:.3g}", f"{row.stream:.3g}", f"{row.ratio:.2f}", f"{row.cosine:.2f}")
            table.add_row(str(row.layer), row.name, *numbers, f"{row.constant:.0%}")
        stdout.print(table)
        if (warning := drowning(rows)) is not None:
            say(warning)
    say(
        "cosine: between a sub-layer's input and the token's own embedding. constant: share of the output that is "
        "one vector, the same for all tokens. 8 rows of 128 random tokens, or 8 images of noise."
    )
