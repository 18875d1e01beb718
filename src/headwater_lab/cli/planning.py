"""`headwater plan`, `init`: what can be known before training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwater.util.errors import HeadwaterError
from headwater.util.terminal import lined
from headwater_lab.cli.common import check_writable, err, out, quiet, recipe_of, tell_runs

# The parameters that `plan --grow` reads.
GROW_READS = {
    "grow", "configs", "vocab_size", "as_json", "hardware", "devices", "mfu", "precision"
}  # fmt: skip


def plan(
    command: typer.Context,
    configs: Annotated[
        list[str],
        typer.Argument(
            help="Presets, recipes (a column per arm), config.json files or checkpoints; field=value changes all of "
            "them, training.field=value how they are trained."
        ),
    ],
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens per row; repeatable. Default: the first config's own.", show_default=False),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Rows per batch and device, or sequences to generate at a time. Default: the first recipe's, or 1.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Training budget in tokens, e.g. 300B or 2e10. Default: the first recipe's.", show_default=False
        ),
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="The same in images, for image models, e.g. 384M.", show_default=False)
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="A device, e.g. H100, or this to measure the current machine.", show_default=False),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="Number of training devices. Default: the first recipe's, or 1.", show_default=False),
    ] = None,
    mfu: Annotated[float, typer.Option(help="Assumed share of the peak that training reaches.")] = 0.4,
    precision: Annotated[
        str | None,
        typer.Option(
            help="64-true, 32-true, bf16-mixed or bf16-true. Default: the first recipe's, or bf16-mixed.",
            show_default=False,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size, instead of the configs'.", show_default=False)
    ] = None,
    grow: Annotated[
        bool,
        typer.Option("--grow", help="Price the stages of recipes one by one, each with all before it, arm by arm."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    file: Annotated[
        Path | None,
        typer.Option("--out", help="Draw FLOPs of text models against context to this picture.", show_default=False),
    ] = None,
) -> None:
    """Estimate a model's cost before training: parameters, FLOPs, cache, memory, and time on given hardware."""
    import json

    from headwater import cost as pricing
    from headwater.cost import hardware as sheets
    from headwater.util.outputs import check_replaceable, save_figure
    from headwater_lab.training import estimate as priced

    quiet()
    if file is not None:
        file = file if file.suffix else file.with_suffix(".png")
        check_writable(file)
        check_replaceable(file)
    changes = [argument for argument in configs if "=" in argument]
    if grow:
        refuse_unread_options(command)
        recipes = [argument for argument in configs if "=" not in argument]
        stages = priced.schedules(recipes, changes, vocab_size)
        device = None if hardware is None else sheets.hardware(hardware)
        schedule = pricing.price_schedule(stages, device, precision, mfu, devices)
        if as_json:
            print(json.dumps([one.to_json() for one in schedule], indent=2))
        else:
            out.print(pricing.schedule_table(schedule, "images" if stages[0].length is None else "tokens"))
        return
    models = priced.planned([argument for argument in configs if "=" not in argument], changes, vocab_size)
    found = {name: one.config for name, one in models.items()}
    prices = priced.prices(
        models,
        context=context,
        tokens=tokens,
        images=images,
        hardware=hardware,
        batch=batch,
        devices=devices,
        precision=precision,
        mfu=mfu,
    )
    if as_json:
        print(json.dumps([one.to_json() for one in prices], indent=2))
    else:
        out.print(pricing.table(prices), highlight=False)
        for argument in configs:
            if argument.endswith((".yaml", ".yml")):
                tell_runs(recipe_of(argument, []))
    if file is not None:
        longest = max(32768, *(getattr(at, "context", 0) for at in prices[0].at))
        save_figure(pricing.figure(found, [longest * i // 32 or 1 for i in range(33)]), file, dpi=160)
        err.print(f"figure: {file}", soft_wrap=True)


def refuse_unread_options(command: typer.Context) -> None:
    """Raise `HeadwaterError` for an option on the command line that --grow leaves unread."""
    entered = [
        max(option.opts, key=len)
        for option in command.command.params
        if (source := command.get_parameter_source(option.name or ""))
        and source.name == "COMMANDLINE"
        and option.name not in GROW_READS
    ]
    if entered:
        unread = " and ".join(entered)
        raise HeadwaterError(f"--grow does not read {unread}; leave out {unread}.")


def init(
    configs: Annotated[
        list[str],
        typer.Argument(
            help="Presets, recipes (one model per arm), config.json files or checkpoints; field=value changes all."
        ),
    ],
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size, instead of the configs'.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build models and show what each sub-layer writes at initialization, compared with the residual stream."""
    import json
    from dataclasses import asdict

    from headwater.cost.counts import check_memory
    from headwater.models.kinds import model_class
    from headwater_lab.training import estimate as priced
    from headwater_lab.training.diagnostics import drowning, init_diagnostics

    quiet()
    changes = [argument for argument in configs if "=" in argument]
    names = [argument for argument in configs if "=" not in argument]
    found = {name: model.config for name, model in priced.planned(names, changes, vocab_size).items()}
    for config in found.values():
        check_memory(config)
    measured = {name: init_diagnostics(model_class(config)(config)) for name, config in found.items()}
    if as_json:
        print(
            json.dumps({name: [asdict(one) | {"ratio": one.ratio} for one in rows] for name, rows in measured.items()})
        )
        return
    for name, rows in measured.items():
        titles = ("layer", "sub-layer", "output rms", "stream rms", "output/stream", "cosine", "constant")
        table = lined(*titles, left=("sub-layer",), title=f"{name} at initialization")
        for one in rows:
            numbers = (f"{one.output:.3g}", f"{one.stream:.3g}", f"{one.ratio:.2f}", f"{one.cosine:.2f}")
            table.add_row(str(one.layer), one.name, *numbers, f"{one.constant:.0%}")
        out.print(table, highlight=False)
        if (warning := drowning(rows)) is not None:
            out.print(warning, highlight=False, soft_wrap=True)
    out.print(
        "cosine: between a sub-layer's input and the token's own embedding. constant: share of the output that is "
        "one vector, the same for all tokens. 8 rows of 128 random tokens, or 8 images of noise.",
        highlight=False,
        soft_wrap=True,
    )
