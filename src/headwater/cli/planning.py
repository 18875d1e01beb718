"""`headwater plan`, `presets`, `theory`: what can be known before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box

from headwater.cli.common import check_writable, err, out, quiet
from headwater.errors import HeadwaterError, nearest, sentence
from headwater.terminal import Table

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


def plan(
    configs: Annotated[
        list[str],
        typer.Argument(
            help="Presets, recipes (a column per arm), config.json files or checkpoints; field=value changes all of "
            "them."
        ),
    ],
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens per row; repeatable. Default: the first config's own.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows per batch, or sequences to generate at a time.")] = 1,
    tokens: Annotated[
        str | None, typer.Option(help="Training budget in tokens, e.g. 300B or 2e10.", show_default=False)
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
    devices: Annotated[int, typer.Option(help="Number of training devices.")] = 1,
    mfu: Annotated[float, typer.Option(help="Assumed share of the peak that training reaches.")] = 0.4,
    precision: Annotated[str, typer.Option(help="32-true, bf16-mixed or bf16-true.")] = "bf16-mixed",
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size, instead of the configs'.", show_default=False)
    ] = None,
    init: Annotated[
        bool,
        typer.Option("--init", help="Build the models and show the scale of each sub-layer at initialization."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    file: Annotated[
        Path | None, typer.Option("--out", help="Draw FLOPs against context to this picture.", show_default=False)
    ] = None,
    figure: Annotated[Path | None, typer.Option("--figure", hidden=True)] = None,
) -> None:
    """Estimate a model's cost before training: parameters, FLOPs, cache, memory, and time on given hardware."""
    import json

    from headwater import hardware as devices_known
    from headwater import price as pricing

    quiet()
    figure = file or figure
    if figure is not None:
        figure = figure if figure.suffix else figure.with_suffix(".png")
        check_writable(figure)
    found: dict[str, HeadwaterConfig] = {}
    changes = [argument for argument in configs if "=" in argument]
    if len(changes) == len(configs):
        raise HeadwaterError("Name at least one preset, recipe, config.json or checkpoint.")
    if vocabulary is not None:
        changes.append(f"vocab_size={vocabulary}")
    for argument in [argument for argument in configs if "=" not in argument]:
        for name, config in _configs(argument, changes).items():
            found[name if name not in found else f"{name} ({len(found) + 1})"] = config
    if init:
        return _show_init(found, as_json)
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
        longest = max(32768, *contexts)
        try:
            pricing.figure(found, [longest * i // 32 or 1 for i in range(33)]).savefig(figure, dpi=160)
        except ValueError as error:  # a suffix that no picture has
            raise HeadwaterError(f"{str(figure)!r} cannot be drawn: {error}") from error
        err.print(f"figure: {figure}", soft_wrap=True)


def _show_init(found: dict[str, HeadwaterConfig], as_json: bool) -> None:
    """`plan --init`. Raises `HeadwaterError` for a model that does not fit in memory."""
    import json
    from dataclasses import asdict

    import torch

    from headwater.cost import parameters
    from headwater.diagnostics import drowning, init_diagnostics
    from headwater.hardware import memory_of
    from headwater.models.causal_lm import HeadwaterForCausalLM

    for name, config in found.items():
        size, free = 4 * sum(parameters(config).values()), memory_of(torch.device("cpu"))
        if size > 0.8 * free:
            raise HeadwaterError(
                f"{name!r} takes {size / 1e9:,.0f} GB, but only {free / 1e9:,.0f} GB are free; use a smaller model "
                f"with --init."
            )
    measured = {name: init_diagnostics(HeadwaterForCausalLM(config)) for name, config in found.items()}
    if as_json:
        print(
            json.dumps({name: [asdict(one) | {"ratio": one.ratio} for one in rows] for name, rows in measured.items()})
        )
        return
    for name, rows in measured.items():
        table = Table(
            title=f"{name} at initialization", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for title in ("layer", "sub-layer", "output rms", "stream rms", "output/stream", "cosine", "constant"):
            table.add_column(title, justify="left" if title == "sub-layer" else "right")
        for one in rows:
            numbers = (f"{one.output:.3g}", f"{one.stream:.3g}", f"{one.ratio:.2f}", f"{one.cosine:.2f}")
            table.add_row(str(one.layer), one.name, *numbers, f"{one.constant:.0%}")
        out.print(table, highlight=False)
        if (warning := drowning(rows)) is not None:
            out.print(warning, highlight=False, soft_wrap=True)
    out.print(
        "cosine: between a sub-layer's input and the token's own embedding. constant: share of the output that is "
        "one vector, the same for all tokens. 8 rows of 128 random tokens.",
        highlight=False,
        soft_wrap=True,
    )


def presets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the papers' models, for `headwater plan` and `headwater.presets.preset`."""
    import json
    from dataclasses import asdict

    from headwater.cost import parameters
    from headwater.presets import PRESETS, preset

    quiet()
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


def theory(
    folder: Annotated[Path, typer.Option("--out", file_okay=False, help="Output folder for the picture.")] = Path(
        "runs/theory"
    ),
) -> None:
    """Check the three theorems of the KV shifting paper, and draw the gradient flow of the third."""
    from headwater.papers import theory as theorems

    check_writable(folder, folder=True)

    table = Table(title="KV shifting attention, arXiv 2411.19574", title_justify="left")
    for name in ("theorem", "checked", "result"):
        table.add_column(name)
    for row in theorems.run(folder):
        table.add_row(*row)
    out.print(table)
    out.print(f"picture: {folder / 'theory-flow.png'}", soft_wrap=True)


def _configs(argument: str, overrides: list[str]) -> dict[str, HeadwaterConfig]:
    """Configs by name for one argument of `plan`, with `overrides` "field=value". Raises `HeadwaterError`."""
    from headwater.config import HeadwaterConfig
    from headwater.presets import PRESETS, preset
    from headwater.reading import read_json, reading
    from headwater.training.places import newest_checkpoint
    from headwater.written import merged

    changes = _changes(overrides)
    path = Path(argument)
    if argument in PRESETS:
        return {argument: preset(argument, **changes)}
    if path.suffix in (".yaml", ".yml") or not path.exists():
        from headwater.recipe import find_recipe
        from headwater.shipped import shipped_recipes

        if path.suffix in (".yaml", ".yml") or argument in shipped_recipes():
            return _recipe_configs(find_recipe(path), overrides, changes.get("vocab_size"))
        if len(path.parts) > 1 or path.suffix:
            raise HeadwaterError(
                f"There is no file {argument!r}; name a preset, a recipe, a config.json or a checkpoint."
            )
        raise HeadwaterError(
            f"There is no preset, recipe or file {argument!r}; {nearest(argument, [*PRESETS, *shipped_recipes()])}"
        )
    name = path.name if path.is_dir() else path.resolve().parent.name if path.name == "config.json" else path.stem
    file = newest_checkpoint(path) / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise HeadwaterError(
            f"{argument!r} has no config.json; name a preset, a recipe, a config.json or a checkpoint."
        )
    content = read_json(file)
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind != HeadwaterConfig.model_type:
        raise HeadwaterError(
            f"{argument!r} is not the config of a headwater model (model_type {kind!r}); plan supports only those."
        )
    try:
        with reading("its config", "correct it"):
            # Not from_pretrained, which applies overrides to a config that was checked without them.
            return {name: HeadwaterConfig.from_dict(merged(content, changes))}
    except HeadwaterError as error:
        raise HeadwaterError(f"{argument!r}: {sentence(error)}") from error


def _changes(overrides: list[str]) -> dict[str, Any]:
    """The model fields that "field=value" arguments change, by name. Raises `HeadwaterError` for an unknown one."""
    if not overrides:
        return {}
    from headwater.recipe import MODEL_FIELDS, values_of

    changes = values_of(overrides)
    for field in changes:
        if field not in MODEL_FIELDS - {"base"}:
            raise HeadwaterError(f"A model has no field {field!r}; {nearest(field, MODEL_FIELDS - {'base'})}")
    return changes


def _recipe_configs(path: Path, overrides: list[str], vocabulary: int | None) -> dict[str, HeadwaterConfig]:
    """Configs of a recipe by name, one for each arm of its comparison and each stage. The data is not read."""
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
                f"The vocabulary of {str(path)!r} comes from its tokenizer, which plan does not load; pass its size "
                f"with --vocabulary."
            )
        length = getattr(recipe.data, "context", None) or getattr(recipe.data, "length", 1)
        data = SimpleNamespace(vocab_size=size, context=length, tokenizer=None)
        config = recipe.model_copy(update={"model": recipe.model | {"vocab_size": size}}).config_for(data)
        result[name] = config
        result |= {f"{name}, {stage}": later for stage, later in recipe.stage_configs(config)}
    return result


def _count(text: str) -> float:
    """A number of tokens, as in 300B, 1.5T or 2e10. Raises `HeadwaterError` for anything else."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text)
    except ValueError:
        value = float("nan")
    if not 0 < value * factor < float("inf"):
        raise HeadwaterError(f"--tokens takes a number such as 300B or 2e10, not {text!r}.")
    return value * factor
