"""Conversion to a smaller cache: its training, cost and savings."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from headwater.cost.counts import forward_flops
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.load import read_config, read_object
from headwater.util.errors import HeadwaterError
from headwater.util.files import check_free, replace_text, sha256_of
from headwater_lab.api.common import describe_written, measure_held_out, quiet
from headwater_lab.api.observer import SILENT, Observer
from headwater_lab.api.training import watch_training
from headwater_lab.comparison.arm_costs import choose_device
from headwater_lab.data.base import Data
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import change_recipe, load_recipe
from headwater_lab.training.checkpoints import FOLDER, newest_checkpoint, read_history
from headwater_lab.training.model_estimates import ConversionEstimate, estimate_conversion, read_count
from headwater_lab.training.processes import autocast_forward, connect_processes
from headwater_lab.training.records import CONTROL, CONVERSION, RunRecord
from headwater_lab.training.run_folder import check_ours, mark_folder
from headwater_lab.training.saving import publish_model, write_model
from headwater_lab.training.stages import (
    RECIPE,
    build_control,
    build_conversion,
    list_healing,
    list_stages,
    train_stages,
    uses_processes,
    write_recipe,
)
from headwater_lab.training.start import MAY_DIFFER, check_tokenizer
from headwater_lab.training.trained_models import Trained, data_settings, open_source, open_trained, warn_changed_data
from headwater_lab.util.machine import KEPT_BYTES, PROGRAM_BYTES, usable_device
from headwater_lab.util.output_folder import keep_contents, occupy_folder
from headwater_lab.util.terminal import lined, si

# Tokens in a row, if the model has positions for as many, and rows in a step.
CONTEXT, ROWS = 512, 8
# Passes over a text up to which repeated text is about as good as new text (arXiv 2305.16264).
PASSES = 4
# What tells whether the model or the text has changed since a conversion was started.
MODEL_FILES = (".json", ".safetensors", ".bin")
DATA_FACTS = ("sha256", "train_tokens", "held_out_sha256", "held_out_bytes")


@quiet()
def convert(
    source: str,
    out: Path,
    *,
    mechanisms: Mapping[str, Any],
    num_key_value_heads: int | None = None,
    latent_width: int | None = None,
    choose: bool = False,
    heal: str = "10M",
    text: str | None = None,
    anneal: bool = True,
    control: bool = False,
    overrides: Sequence[str] = (),
    only_plan: bool = False,
    resume: bool = False,
    watch: Observer = SILENT,
) -> RunRecord | None:
    """Make the cache of a trained model smaller, heal it and measure it, like `headwater convert`.

    The parameters are that command's options. only_plan: report the cost, and stop. Raises `HeadwaterError`.
    """
    _check_out(out, resume, only_plan)
    path = Path(source)
    if path.is_dir():
        checkpoint = newest_checkpoint(path).resolve()
    else:  # from the hub, or a file of tensors: the runs start from a copy
        checkpoint = out.resolve() / "source"
    trained = open_source(source)
    trained.original = None  # frees a second copy of the model
    if not isinstance(trained.model, HeadwaterForCausalLM):
        raise HeadwaterError(f"{source!r} is an image model, which has no cache; convert is for language models.")
    options = dict(
        mechanisms=mechanisms or None,
        num_key_value_heads=num_key_value_heads,
        latent_width=latent_width,
        choose=choose,
        anneal=anneal and latent_width is None,
    )
    recipe = _make_recipe(
        trained, checkpoint, out.resolve().name, text, options, read_count(heal, "heal"), overrides, watch.tell
    )
    dtype = trained.model.dtype
    element, config = dtype.itemsize, trained.model.config
    estimate_conversion(recipe, config, element)  # raises before the text is read
    built = _build_data(recipe, checkpoint, source, text)
    check_tokenizer(source, config, trained.tokenizer, built)
    rows = getattr(built, "held_out_rows", 0)
    estimate = estimate_conversion(recipe, config, element, rows, build_control(recipe) if control else None)
    _say_estimate(estimate, recipe, watch)
    _tell_passes(estimate, built, watch)
    if only_plan:
        watch.say(_write_time(estimate, recipe, trained.model, built.context))
        return None
    if estimate.rows < rows:
        watch.tell(f"Measuring on the way uses {estimate.rows:,} of {rows:,} held-out rows.")
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"held_out_rows": estimate.rows})})
    runs = [(recipe, out), *([(build_control(recipe), out / CONTROL)] if control else [])]
    with connect_processes(recipe, out) as fabric:  # raises if the device cannot be used
        device = fabric.device
    with occupy_folder(out, empty=not resume):
        _begin_folders(runs, resume)
        _copy_source(checkpoint, trained)
        if text is None and (warning := warn_changed_data(trained, built)):
            watch.tell(f"{warning} Pass another text with --text.")
        content = _describe_origin(source, checkpoint, built) | {"price": asdict(estimate)}
        measures = _read_measures(out, content)
        if not measures:
            original = trained.model.to(device)
            measures["before"] = measure_held_out("measuring the original", original, built, watch)
            _write_content(out, content | measures)
            watch.tell(_write_time(estimate, recipe, original, built.context))
            del original
        keep_contents(out)  # an interrupted conversion continues from here
        del trained
        watch.tell("making the smaller model")
        records: list[RunRecord] = []
        notices: list[str] = []
        for name, title, (run, folder) in zip(("after", CONTROL), ("result", CONTROL), runs, strict=False):
            on_event = watch_training(run, list_stages(run, folder), watch, notices)
            records.append(train_stages(run, folder, resume=resume, on_event=on_event))
            notices += [notice.message for notice in records[-1].notices]
            result = _write_start(folder, records[-1], dtype)
            publish_model(result, folder)
            if name not in measures:  # else measured before an interruption
                label = f"measuring the {title}"
                measures[name] = measure_held_out(label, open_trained(result).model.to(device), built, watch)
                _write_content(out, content | measures)
        curve = list_healing(records[0])
        _write_content(out, content | measures | {"curve": curve})
        _report_conversion(out, records[0], estimate, measures, curve, watch)
    return records[0]


def _build_data(recipe: Recipe, checkpoint: Path, source: str, text: str | None) -> Data:
    """Build the data to heal on; before the checkpoint exists, with the tokenizer of the source."""
    is_copied = text is None or checkpoint.is_dir()
    return (recipe.data if is_copied else recipe.data.model_copy(update={"tokenizer": source})).build()


def _make_recipe(
    trained: Trained,
    checkpoint: Path,
    name: str,
    text: str | None,
    options: dict[str, Any],
    tokens: float,
    overrides: Sequence[str],
    tell: Callable[[str], object],
) -> Recipe:
    """Make the recipe of a conversion with these `options` of `convert:`, which heals on this many tokens."""
    data = _data_of(text, trained, checkpoint)
    # The length of synthetic rows follows from several settings, and overrides may change any of them.
    sizes = [
        override
        for override in overrides
        if override.startswith(("data.", "training.batch_size=", "training.gradient_accumulation_steps="))
    ]
    _check_overrides(overrides)
    # The data settings come from the model's history, which somebody else may have written.
    batches = {"name": name, "data": data, "training": {"batch_size": ROWS}}
    sized = change_recipe(batches, sizes, "the recipe")
    context = int(getattr(sized.data, "context", CONTEXT))
    if text is not None:
        _check_context(context, trained.model.config.max_position_embeddings, tell)
    values = build_conversion(
        name,
        str(checkpoint),
        data,
        options,
        tokens=tokens,
        context=context,
        batch_size=sized.training.batch_size,
        gradient_accumulation_steps=sized.training.gradient_accumulation_steps,
    )
    recipe = change_recipe(values, overrides, "the recipe")
    if any(uses_processes(run) for run, _ in list_stages(recipe, Path())):
        raise HeadwaterError(
            "headwater convert uses one device; leave out training.devices, training.nodes and training.strategy."
        )
    return recipe


def _copy_source(checkpoint: Path, trained: Trained) -> None:
    """Write a source from elsewhere where the runs start from it, unless it is there."""
    if not checkpoint.is_dir():
        write_model(checkpoint, trained.model, trained.tokenizer, trained.history)


def _check_out(out: Path, resume: bool, only_plan: bool) -> None:
    """Raise `HeadwaterError` if the folder of a new conversion is not empty."""
    if resume or only_plan:
        return
    if (out / CONVERSION).is_file():
        raise HeadwaterError(f"{str(out)!r} holds a conversion; continue it with --resume, or choose another --out.")
    check_free(out)


def _begin_folders(runs: Sequence[tuple[Recipe, Path]], resume: bool) -> None:
    """Write the recipes of a conversion and its control to their folders, for `headwater train`.

    resume: raise `HeadwaterError` if a folder holds another recipe, or anything but a run.
    """
    for recipe, folder in runs:
        if resume:
            check_ours(folder)
        folder.mkdir(exist_ok=True)
        if (folder / RECIPE).is_file() and load_recipe(folder / RECIPE).identity != recipe.identity:
            raise HeadwaterError(
                f"{str(folder)!r} holds a conversion with other options; pass the same ones, or choose another --out."
            )
        mark_folder(folder)
        write_recipe(recipe, folder)


def _describe_origin(source: str, checkpoint: Path, data: Data) -> dict[str, Any]:
    """Describe what must not change until a conversion ends: the source, its files, and facts of the data."""
    files = {file.name: sha256_of(file) for file in sorted(checkpoint.iterdir()) if file.suffix in MODEL_FILES}
    return {"source": source, "files": files, "data": {name: data.description.get(name) for name in DATA_FACTS}}


def _read_measures(out: Path, content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Read what a conversion measured before it was interrupted; empty if it measured nothing.

    content: what it would write now. Raises `HeadwaterError` if it was of another model or text.
    """
    if not (out / CONVERSION).is_file():
        return {}
    measured, source = read_object(out / CONVERSION), content["source"]
    if Path(measured["source"]) != Path(source):
        raise HeadwaterError(
            f"{str(out)!r} holds a conversion of {measured['source']!r}, not of {source!r}; choose another --out."
        )
    for field, what in (("files", f"{source!r} has"), ("data", "The text has")):
        if measured[field] != content[field]:
            raise HeadwaterError(
                f"{what} changed since the conversion in {str(out)!r} was started; restore it, or choose another --out."
            )
    return {name: measured[name] for name in ("before", "after", CONTROL) if name in measured}


def _write_content(out: Path, content: Mapping[str, Any]) -> None:
    replace_text(out / CONVERSION, json.dumps(content, indent=1) + "\n")


def _data_of(text: str | None, trained: Trained, checkpoint: Path) -> dict[str, Any]:
    """Find the data to heal on, as a recipe's section: a text, or the model's latest training data."""
    if text is None:
        settings = data_settings(trained.history)
        if settings is None:
            raise HeadwaterError(
                f"{trained.source!r} does not record what it was trained on; pass similar text with --text."
            )
        return dict(settings)
    if trained.tokenizer is None:
        raise HeadwaterError(
            f"{trained.source!r} has no tokenizer, so it cannot read a text; save one next to the model."
        )
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
    if not checkpoint.is_dir():  # it is there if an interruption came after it
        write_model(checkpoint, trained.model.to(dtype), trained.tokenizer, trained.history)
    return checkpoint


def _say_estimate(estimate: ConversionEstimate, recipe: Recipe, watch: Observer) -> None:
    distillation = recipe.training.distillation
    teacher = "the original" if distillation is None or distillation.teacher is None else "the teacher"
    sides = estimate.before, estimate.after
    rows = [
        ["cache, bytes a token", *(f"{side['cache_bytes_per_token']:,}" for side in sides)],
        ["cache of a row", *(f"{si(side['cache_bytes'])}B" for side in sides)],
        ["FLOPs of generating a token after a row", *(si(side["decoding_flops"]) for side in sides)],
        ["parameters", *(f"{side['parameters']:,}" for side in sides)],
    ]
    watch.say(lined("", "before", "after", rows=rows))
    costs = ", ".join(f"{name} {flops:.3g}" for name, flops in estimate.flops.items())
    teacher_share = f", of which {teacher} {si(estimate.teacher_bytes)}B" if estimate.teacher_bytes else ""
    process = ""
    if choose_device(recipe).type == "cpu":
        most = estimate.step_bytes + min(KEPT_BYTES, estimate.step_bytes // 4) + PROGRAM_BYTES
        process = f"; the process takes up to {si(most)}B"
    watch.say(
        f"healing on {estimate.tokens:,} tokens: {sum(estimate.flops.values()):.3g} FLOPs ({costs}); about "
        f"{si(estimate.step_bytes)}B of memory in a step{teacher_share}{process}"
    )


def _tell_passes(estimate: ConversionEstimate, data: Data, watch: Observer) -> None:
    """Tell that healing repeats the text too often."""
    if (passes := estimate.tokens / (data.description.get("train_tokens") or math.inf)) > PASSES:
        watch.tell(
            f"Healing reads the text {passes:.1f} times; beyond {PASSES}, repeated text is worth little "
            "(arXiv 2305.16264). Pass more text, or a smaller --heal."
        )


def _write_time(estimate: ConversionEstimate, recipe: Recipe, model: HeadwaterForCausalLM, context: int) -> str:
    """Write how long a conversion takes at the speed of a pass through the original in the precision of training."""
    try:
        device = torch.device(usable_device(str(choose_device(recipe))))
    except HeadwaterError:
        return f"How long it takes is not known here, where PyTorch cannot use {recipe.training.device}."
    model = model.to(device, recipe.training.precision.weights)
    ids = torch.arange(2 * context, device=device).reshape(2, context) % model.config.vocab_size
    with torch.inference_mode(), autocast_forward(device, recipe.training):
        for _ in range(2):  # the first one is slower
            started = time.perf_counter()
            float(model(ids, use_cache=False).logits[0, -1, 0])
            seconds = time.perf_counter() - started
    flops = ids.numel() * sum(forward_flops(model.config, context).values())
    duration = timedelta(seconds=round(sum(estimate.flops.values()) / flops * seconds))
    return f"The conversion computes for about {duration} on this machine; fitting and saving come on top."


def _report_conversion(
    target: Path,
    record: RunRecord,
    estimate: ConversionEstimate,
    measures: dict[str, dict[str, float]],
    curve: list[dict[str, float]],
    watch: Observer,
) -> None:
    """Report what the conversion did.

    measures: of the original "before", the result "after", and the "control" if there is one. curve: of healing.
    """
    # The control is the fairer comparison: it has seen the same tokens.
    basis = CONTROL if CONTROL in measures else "before"
    table = lined("", *measures, f"after / {basis}")
    for name, base in measures[basis].items():
        share = f"{measures['after'][name] / base:.4f}" if base else ""
        cells = (f"{values[name]:.4f}" for values in measures.values())
        table.add_row(f"held-out {name.replace('_', ' ')}", *cells, share)
    watch.say(table)
    if CONTROL not in measures:
        watch.say(
            f"The smaller model has seen {record.tokens:,} tokens more than the original; for a fair comparison, train "
            "the original on the same tokens with --control."
        )
    metric = f"{record.metric.replace('_', ' ')} on {estimate.rows:,} held-out rows"
    columns = ("tokens of healing", "cache, bytes a token (fp32)", metric)
    rows = [(f"{p['tokens']:,}", f"{p['cache_bytes_per_token']:,}", f"{p[record.metric]:.4f}") for p in curve]
    watch.say(lined(*columns, rows=rows))
    checkpoint = newest_checkpoint(target)
    watch.say("\n".join(describe_written(target, read_config(checkpoint), read_history(checkpoint))))
