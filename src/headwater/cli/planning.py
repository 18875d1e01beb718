"""`headwater plan`, `init`: what can be known before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from headwater.cli.common import check_writable, err, out, quiet, recipe_of, tell_runs
from headwater.errors import HeadwaterError
from headwater.terminal import lined

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig
    from headwater.vision_config import HeadwaterVisionConfig


# What each of these options makes `plan` read, beside the models; by parameter.
READS = {
    "grow": {"as_json", "hardware", "peak", "memory", "bandwidth", "devices", "mfu", "precision"},
    "engine": {"as_json", "cache_memory", "context", "precision"},
}


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
    peak: Annotated[float | None, typer.Option(help="Peak of the device in TFLOP/s.", show_default=False)] = None,
    memory: Annotated[float | None, typer.Option(help="Memory of the device in GB.", show_default=False)] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Memory bandwidth of the device in GB/s.", show_default=False)
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
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size, instead of the configs'.", show_default=False)
    ] = None,
    grow: Annotated[
        bool,
        typer.Option("--grow", help="Price the stages of recipes one by one, each with all before it, arm by arm."),
    ] = False,
    engine: Annotated[
        Literal["vllm"] | None,
        typer.Option(help="Show what a server's cache holds instead, and how many sequences fit.", show_default=False),
    ] = None,
    cache_memory: Annotated[
        float | None,
        typer.Option(help="With --engine: memory of the server's cache in GiB. Default: 4.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Draw FLOPs against context, or against image size, to this picture.", show_default=False
        ),
    ] = None,
) -> None:
    """Estimate a model's cost before training: parameters, FLOPs, cache, memory, and time on given hardware."""
    import json

    from headwater import price as pricing
    from headwater import priced
    from headwater.outputs import check_replaceable, save_figure

    quiet()
    if file is not None:
        file = file if file.suffix else file.with_suffix(".png")
        check_writable(file)
        check_replaceable(file)
    refuse_unread_options(command)
    changes = [argument for argument in configs if "=" in argument]
    if grow:
        recipes = [argument for argument in configs if "=" not in argument]
        stages = priced.schedules(recipes, changes, vocabulary)
        device = priced.device_of(hardware, peak, memory, bandwidth)
        schedule = pricing.price_schedule(stages, device, precision, mfu, devices)
        if as_json:
            print(json.dumps([one.to_json() for one in schedule], indent=2))
        else:
            out.print(pricing.schedule_table(schedule, "images" if stages[0].length is None else "tokens"))
        return
    models = priced.planned([argument for argument in configs if "=" not in argument], changes, vocabulary)
    found = {name: one.config for name, one in models.items()}
    if cache_memory is not None and engine is None:
        raise HeadwaterError("--cache-memory needs --engine vllm.")
    if engine is not None:
        return _show_served(found, context, 4.0 if cache_memory is None else cache_memory, precision, as_json)
    prices = priced.prices(
        models,
        context=context,
        tokens=tokens,
        images=images,
        hardware=hardware,
        peak=peak,
        memory=memory,
        bandwidth=bandwidth,
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
        if isinstance(prices[0], pricing.ImagePrice):
            picture = pricing.figure_of_images(cast("dict[str, HeadwaterVisionConfig]", found))
        else:
            longest = max(32768, *(at.context for at in prices[0].at))
            picture = pricing.figure(found, [longest * i // 32 or 1 for i in range(33)])
        save_figure(picture, file, dpi=160)
        err.print(f"figure: {file}", soft_wrap=True)


def refuse_unread_options(command: typer.Context) -> None:
    """Raise `HeadwaterError` for an option on the command line that --engine or --grow leaves unread."""
    options = {option.name: max(option.opts, key=len) for option in command.command.params}
    entered = [
        name for name in options if (source := command.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]
    for mode in (mode for mode in READS if mode in entered):
        read = READS[mode] | {mode, "configs", "vocabulary"}
        if unread := " and ".join(options[name] for name in entered if name not in read):
            raise HeadwaterError(f"{options[mode]} does not read {unread}; leave out {unread}.")


def init(
    configs: Annotated[
        list[str],
        typer.Argument(
            help="Presets, recipes (one model per arm), config.json files or checkpoints; field=value changes all."
        ),
    ],
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size, instead of the configs'.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build models and show what each sub-layer writes at initialization, compared with the residual stream."""
    import json
    from dataclasses import asdict

    import torch

    from headwater import priced
    from headwater.cost import parameters
    from headwater.diagnostics import drowning, init_diagnostics
    from headwater.hardware import memory_of
    from headwater.models.kinds import model_class

    quiet()
    changes = [argument for argument in configs if "=" in argument]
    names = [argument for argument in configs if "=" not in argument]
    found = {name: model.config for name, model in priced.planned(names, changes, vocabulary).items()}
    for name, config in found.items():
        size, free = 4 * sum(parameters(config).values()), memory_of(torch.device("cpu"))
        if size > 0.8 * free:
            raise HeadwaterError(
                f"{name!r} takes {size / 1e9:,.0f} GB, but only {free / 1e9:,.0f} GB are free; use a smaller model."
            )
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


def _show_served(
    found: dict[str, HeadwaterConfig], contexts: list[int] | None, gib: float, precision: str | None, as_json: bool
) -> None:
    """`plan --engine`. Raises `HeadwaterError` for a model that a server cannot run."""
    import json

    from headwater.cost import BYTES
    from headwater.paging.pages import BLOCK_SIZE, Page, check_servable
    from headwater.price.shared import check

    check(precision or "bf16-true", mfu=1.0, sizes=[], budgets={})
    contexts = contexts or [next(iter(found.values())).max_position_embeddings]
    if gib <= 0 or min(contexts) < 1:
        raise HeadwaterError("--cache-memory must be above zero, and --context at least 1.")
    rows: list[dict[str, Any]] = []
    for name, config in found.items():
        check_servable(config)
        page = Page(config, BLOCK_SIZE, BYTES[precision or "bf16-true"][0])
        blocks = int(gib * 2**30 // page.size)
        rows.append(
            {
                "model": name,
                "bytes_per_token": page.per_token,
                "of_them_raw_tokens": page.per_token - page.history / page.block_size,
                "blocks": blocks,
                "tokens": blocks * BLOCK_SIZE,
                "sequences": {context: page.sequences(context, gib * 2**30) for context in contexts},
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    titles = ("model", "bytes a token", "of them raw", "blocks", "tokens")
    lengths = [f"sequences of {context:,}" for context in contexts]
    heading = f"vLLM, {gib:g} GiB of cache in blocks of {BLOCK_SIZE} tokens, {precision or 'bf16-true'}"
    table = lined(*titles, *lengths, left=("model",), title=heading)
    for row in rows:
        counts = [row["blocks"], row["tokens"], *row["sequences"].values()]
        sizes = (f"{row[part]:,.1f}" for part in ("bytes_per_token", "of_them_raw_tokens"))
        table.add_row(row["model"], *sizes, *(f"{count:,}" for count in counts))
    out.print(table, highlight=False)
