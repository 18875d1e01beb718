"""`headwater plan`, `init`: estimates before training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

from headwater_lab.api.settings import PlanSettings
from headwater_lab.cli.arguments import (
    check_writable,
    print_result,
    recipe_of,
    split_overrides,
    tell,
)
from headwater_lab.cli.options import LOOK, AsJson, Values, command
from headwater_lab.util.terminal import lined

VocabSize = Annotated[int, Values(min=1, help="Vocabulary size, instead of the configs'.")]


@command(LOOK, "plan gpt2-124m tokenformer-124m --hardware H100 --tokens 300B")
def plan_models(
    configs: Sequence[str],
    *,
    vocab_size: VocabSize | None = None,
    json: AsJson = False,
    out: Path | None = None,
    **settings: Unpack[PlanSettings],
) -> None:
    """Estimate a model's cost before training: parameters, FLOPs, cache, memory, and time on given hardware.

    configs: Presets, recipes (a column per arm), config.json files or checkpoints; field=value changes all of them,
        training.field=value how they are trained.
    out: Draw FLOPs of text models against context to this picture.
    """
    from headwater_lab.api.plans import plan
    from headwater_lab.training.estimate_table import estimate_table
    from headwater_lab.util.outputs import check_replaceable, save_figure

    if out is not None:
        out = out if out.suffix else out.with_suffix(".png")
        check_writable(out)
        check_replaceable(out)
    models, changes = split_overrides(configs)
    planned = plan(*models, overrides=changes, vocab_size=vocab_size, **settings)
    print_result([price.to_json() for price in planned.prices], [estimate_table(planned.prices)], json, indent=2)
    for recipe in [] if json else [name for name in models if name.endswith((".yaml", ".yml"))]:
        from headwater_lab.comparison.trials import describe_runs

        if runs := describe_runs(recipe_of(recipe)):
            tell(runs)
    if out is not None:
        save_figure(planned.picture(), out, dpi=160)
        tell(f"figure: {out}")


@command(LOOK, "init tokenformer-124m num_hidden_layers=2")
def show_initialization(configs: Sequence[str], *, vocab_size: VocabSize | None = None, json: AsJson = False) -> None:
    """Build models and show the output of each sub-layer at initialization, relative to the residual stream.

    configs: Presets, recipes (one model per arm), config.json files or checkpoints; field=value changes all.
    """
    from dataclasses import asdict

    from headwater_lab.training.initialization import measure_initialization, warn_drowning
    from headwater_lab.training.model_estimates import plan_models
    from headwater_lab.util.machine import check_memory
    from headwater_lab.util.model_kinds import model_class

    models, changes = split_overrides(configs)
    by_name = {name: model.config for name, model in plan_models(models, changes, vocab_size).items()}
    for config in by_name.values():
        check_memory(config)
    measured = {name: measure_initialization(model_class(config)(config)) for name, config in by_name.items()}
    contents = {name: [asdict(row) | {"ratio": row.ratio} for row in rows] for name, rows in measured.items()}
    tables: list[Any] = []
    for name, rows in measured.items():
        titles = ("layer", "sub-layer", "output rms", "stream rms", "output/stream", "cosine", "constant")
        table = lined(*titles, left=("sub-layer",), title=f"{name} at initialization")
        for row in rows:
            numbers = (f"{row.output:.3g}", f"{row.stream:.3g}", f"{row.ratio:.2f}", f"{row.cosine:.2f}")
            table.add_row(str(row.layer), row.name, *numbers, f"{row.constant:.0%}")
        tables += filter(None, (table, warn_drowning(rows)))
    tables.append(
        "cosine: between a sub-layer's input and the token's own embedding. constant: share of the output that is "
        "one vector, the same for all tokens. 8 rows of 128 random tokens, or 8 images of noise."
    )
    print_result(contents, tables, json)
