"""Conversion to a smaller cache: its training, cost and savings."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater.util.files import replace_text
from headwater_lab.api.common import measure_held_out, quiet
from headwater_lab.api.observer import SILENT, Observer
from headwater_lab.api.training import watch_training
from headwater_lab.recipe.recipe_files import change_recipe
from headwater_lab.training.checkpoints import FOLDER, newest_checkpoint
from headwater_lab.training.model_estimates import ConversionPrice, price_conversion, read_count
from headwater_lab.training.processes import connect_processes
from headwater_lab.training.records import RunRecord
from headwater_lab.training.run_folder import mark_folder
from headwater_lab.training.saving import how_to_load, publish_model, write_model
from headwater_lab.training.stages import (
    build_conversion,
    list_healing,
    list_stages,
    train_stages,
    uses_processes,
    write_recipe,
)
from headwater_lab.training.start import MAY_DIFFER
from headwater_lab.training.trained_models import Trained, data_settings, open_source, open_trained, warn_changed_data
from headwater_lab.util.output_folder import occupy_folder
from headwater_lab.util.terminal import lined, si

# Tokens in a row, if the model has positions for as many, and rows in a step.
CONTEXT, ROWS = 512, 8


@quiet()
def convert(
    source: str,
    out: Path,
    *,
    mechanisms: Mapping[str, Any],
    num_key_value_heads: int | None = None,
    choose: bool = False,
    heal: str = "10M",
    text: str | None = None,
    anneal: bool = True,
    overrides: Sequence[str] = (),
    only_plan: bool = False,
    watch: Observer = SILENT,
) -> RunRecord | None:
    """Make the cache of a trained model smaller, heal it and measure it, like `headwater convert`.

    out: the new folder. heal: tokens of healing. text: text to heal and measure on; default: the model's training
    data. only_plan: report the cost, and stop. Raises `HeadwaterError`.
    """
    path = Path(source)
    if path.is_dir():
        checkpoint = newest_checkpoint(path).resolve()
    else:  # from the hub, or a file of tensors: the runs start from a copy
        checkpoint = out.resolve() / "source"
    trained = open_source(source)
    trained.original = None  # frees a second copy of the model
    if not isinstance(trained.model, HeadwaterForCausalLM):
        raise HeadwaterError(f"{source!r} is an image model, which has no cache; convert is for language models.")
    data = _data_of(source, text, trained, checkpoint)
    # The length of synthetic rows follows from several settings, and overrides may change any of them.
    sizes = [
        override
        for override in overrides
        if override.startswith(("data.", "training.batch_size=", "training.gradient_accumulation_steps="))
    ]
    _check_overrides(overrides)
    # The data settings come from the model's history, which somebody else may have written.
    batches = {"name": out.name, "data": data, "training": {"batch_size": ROWS}}
    sized = change_recipe(batches, sizes, "the recipe")
    if text is not None:
        _check_context(
            getattr(sized.data, "context", CONTEXT), trained.model.config.max_position_embeddings, watch.tell
        )
    options = {
        "mechanisms": mechanisms or None,
        "num_key_value_heads": num_key_value_heads,
        "choose": choose,
        "anneal": anneal,
    }
    values = build_conversion(
        out.name,
        str(checkpoint),
        data,
        options,
        tokens=read_count(heal, "heal"),
        context=int(getattr(sized.data, "context", CONTEXT)),
        batch_size=sized.training.batch_size,
        gradient_accumulation_steps=sized.training.gradient_accumulation_steps,
    )
    recipe = change_recipe(values, overrides, "the recipe")
    if any(uses_processes(run) for run, _ in list_stages(recipe, out)):
        raise HeadwaterError(
            "headwater convert uses one device; for several, train the stages of its recipe one by one with "
            "`headwater train RECIPE --stage NAME` (docs/convert.md)."
        )
    price = price_conversion(recipe, trained.model.config, trained.model.dtype.itemsize)
    distillation = recipe.training.distillation
    teacher = "the original" if distillation is None or distillation.teacher is None else "the teacher"
    dtype = trained.model.dtype
    _say_price(price, teacher, watch)
    if only_plan:
        return None
    with connect_processes(recipe, out) as fabric:  # raises if the device cannot be used
        device = fabric.device
    with occupy_folder(out, empty=True):
        mark_folder(out)
        write_recipe(recipe, out)
        if not path.is_dir():
            write_model(checkpoint, trained.model, trained.tokenizer, trained.history)
        built = recipe.data.build()
        if text is None and (warning := warn_changed_data(trained, built)):
            watch.tell(f"{warning} Pass another text with --text.")
        original = measure_held_out("measuring the original", trained.model.to(device), built, watch)
        del trained
        watch.tell("making the smaller model")
        record = train_stages(recipe, out, on_event=watch_training(recipe, list_stages(recipe, out), watch))
        result = _write_start(out, record, dtype)
        publish_model(result, out)
        converted = measure_held_out("measuring the result", open_source(str(result)).model.to(device), built, watch)
        _report_conversion(out, record, price, (original, converted), source, watch)
    return record


def _data_of(source: str, text: str | None, trained: Trained, checkpoint: Path) -> dict[str, Any]:
    """Find the data to heal on, as a recipe's section: a text, or the model's latest training data."""
    if text is None:
        settings = data_settings(trained.history)
        if settings is None:
            raise HeadwaterError(f"{source!r} does not record what it was trained on; pass similar text with --text.")
        return dict(settings)
    if trained.tokenizer is None:
        raise HeadwaterError(f"{source!r} has no tokenizer, so it cannot read a text; save one next to the model.")
    most = trained.model.config.max_position_embeddings
    return {"kind": "text", "source": text, "tokenizer": str(checkpoint), "context": min(CONTEXT, most)}


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise `HeadwaterError` for an override of something that SOURCE or an option sets."""
    for field in (override.partition("=")[0] for override in overrides):
        if field in ("start.checkpoint", "start"):
            raise HeadwaterError("The model to convert is SOURCE; leave out start.checkpoint.")
        if field.partition(".")[0] == "model" and field.removeprefix("model.") not in MAY_DIFFER:
            raise HeadwaterError(f"The model is SOURCE, and a conversion does not change {field}; leave it out.")
        if field == "start.convert.anneal":
            raise HeadwaterError("The stages depend on start.convert.anneal; leave it out, or use --no-anneal.")


def _check_context(context: int, most: int, tell: Callable[[str], object]) -> None:
    """Raise `HeadwaterError` for rows of a text that are longer than the model's positions."""
    if context > most:
        raise HeadwaterError(f"The model has {most} positions, and data.context is {context}; set {most} or less.")
    if context == most < CONTEXT:
        tell(f"Rows of {most} tokens, because the model has no more positions.")


def _write_start(target: Path, record: RunRecord, dtype: torch.dtype) -> Path:
    """Find the result's checkpoint in the source's dtype: what training wrote, or a copy of it in OUT/checkpoints."""
    trained = open_trained(target / record.stages[-1].folder)
    if trained.model.dtype == dtype:
        return newest_checkpoint(target)
    checkpoint = target / FOLDER / f"step-{sum(stage.steps for stage in record.stages):06d}"
    write_model(checkpoint, trained.model.to(dtype), trained.tokenizer, trained.history)
    return checkpoint


def _say_price(priced: ConversionPrice, teacher: str, watch: Observer) -> None:
    sides = priced.before, priced.after
    rows = [
        ["cache, bytes a token", *(f"{side['cache_bytes_per_token']:,}" for side in sides)],
        ["cache of a row", *(f"{si(side['cache_bytes'])}B" for side in sides)],
        ["parameters", *(f"{side['parameters']:,}" for side in sides)],
    ]
    watch.say(lined("", "before", "after", rows=rows))
    costs = ", ".join(f"{name} {flops:.3g}" for name, flops in priced.flops.items())
    teacher_share = f", of which {teacher} {si(priced.teacher_bytes)}B" if priced.teacher_bytes else ""
    watch.say(
        f"healing on {priced.tokens:,} tokens: {sum(priced.flops.values()):.3g} FLOPs ({costs}); about "
        f"{si(priced.step_bytes)}B of memory in a step{teacher_share}"
    )


def _report_conversion(
    target: Path,
    record: RunRecord,
    priced: ConversionPrice,
    measures: tuple[dict[str, float], dict[str, float]],
    source: str,
    watch: Observer,
) -> None:
    """Report what the conversion did, and write it next to the run. measures: of the original and the result."""
    original, converted = measures
    curve = list_healing(record)
    result = {"source": source, "price": asdict(priced), "before": original, "after": converted, "curve": curve}
    replace_text(target / "conversion.json", json.dumps(result, indent=1) + "\n")
    table = lined("", "before", "after", "after / before")
    for name in [name for name in original if name in converted]:
        title = f"held-out {name.replace('_', ' ')}"
        share = f"{converted[name] / original[name]:.4f}" if original[name] else ""
        table.add_row(title, f"{original[name]:.4f}", f"{converted[name]:.4f}", share)
    watch.say(table)
    columns = ("tokens of healing", "cache, bytes a token (fp32)", record.metric.replace("_", " "))
    rows = [(f"{p['tokens']:,}", f"{p['cache_bytes_per_token']:,}", f"{p[record.metric]:.4f}") for p in curve]
    watch.say(lined(*columns, rows=rows))
    watch.say(f"written to {target}\n{how_to_load(target)}")
