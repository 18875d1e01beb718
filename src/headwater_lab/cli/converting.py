"""`headwater convert`: a trained model with a smaller cache, healed and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.plugins.outside import check_paths
from headwater.util.errors import HeadwaterError
from headwater.util.terminal import lined
from headwater_lab.cli.common import mechanisms_of, new_folder, say, stdout, tell, tell_model
from headwater_lab.cli.options import FolderPath
from headwater_lab.cli.progress import measure_with_progress
from headwater_lab.cli.training import trained_with_bar

if TYPE_CHECKING:
    import torch

    from headwater_lab.training.conversion import ConversionPrice
    from headwater_lab.training.records import RunRecord
    from headwater_lab.training.trained import Trained

# Tokens in a row, if the model has positions for as many, and rows in a step.
CONTEXT, ROWS = 512, 8


def convert(
    source: str,
    overrides: Sequence[str] = (),
    *,
    mechanism: Sequence[str] = (),
    num_key_value_heads: int | None = None,
    choose_layers: bool = False,
    heal: str = "10M",
    text: str | None = None,
    no_anneal: bool = False,
    plan: bool = False,
    out: FolderPath | None = None,
) -> None:
    """Make the cache of a trained model smaller: layers share, or there are fewer heads. Heal and measure it.

    source: A folder, or a name on the Hugging Face hub. It is not changed.
    overrides: Override a field of the recipe that is written: data.context=1024, training.batch_size=16,
        training.learning_rate=1e-4, …
    mechanism: Mechanism by which layers share: NAME, or "NAME={option: value}"; repeatable.
    num_key_value_heads: Number of key/value heads after pooling (GQA).
    choose_layers: Choose which layers share by how alike their keys and values are.
    heal: Tokens of healing, e.g. 20M or 1e9.
    text: Heal and measure on this text (path, folder or glob); default: what the model was trained on.
    no_anneal: The smaller model from the first step, not gradually.
    plan: Say what it costs and saves, and stop.
    out: The new folder. Default: next to the source.
    """
    from headwater.models.causal_lm import HeadwaterForCausalLM
    from headwater.util.output_folder import occupied
    from headwater_lab.data.corpus import local_files
    from headwater_lab.recipe.schema import changed_recipe
    from headwater_lab.training.checkpoint import write_model
    from headwater_lab.training.conversion import conversion_recipe, price_of, write_recipe
    from headwater_lab.training.estimate import count_of
    from headwater_lab.training.model_folder import publish_model
    from headwater_lab.training.parallel import connected
    from headwater_lab.training.places import newest_checkpoint
    from headwater_lab.training.run_folder import mark
    from headwater_lab.training.stages import chain, on_several
    from headwater_lab.training.trained import changed_text, open_source

    mechanisms = mechanisms_of(mechanism)
    if not mechanisms and num_key_value_heads is None:
        raise HeadwaterError(
            "Say how the cache becomes smaller: --mechanism NAME by which layers share, or --num-key-value-heads N."
        )
    if text is not None:
        local_files(text)  # is an error if there are none, also with --plan
    target, path = new_folder(out, source, "converted", may_exist=plan), Path(source)
    if path.is_dir():
        place = newest_checkpoint(path).resolve()
    else:  # from the hub, or a file of tensors: the runs start from a copy
        place = target.resolve() / "source"
    trained = open_source(source)
    trained.original = None  # a second copy
    if not isinstance(trained.model, HeadwaterForCausalLM):
        raise HeadwaterError(f"{source!r} is an image model, which has no cache; convert is for language models.")
    dtype = trained.model.dtype
    data = _settings(trained) if text is None else None
    if data is None and text is None:
        raise HeadwaterError(f"{source!r} does not say what it was trained on; pass a text of that kind with --text.")
    if data is None:
        if trained.tokenizer is None:
            raise HeadwaterError(f"{source!r} has no tokenizer, so it cannot read a text; save it beside the model.")
        most = trained.model.config.max_position_embeddings
        data = {"kind": "text", "source": str(text), "tokenizer": str(place), "context": min(CONTEXT, most)}
    # Rows of synthetic data are as long as their settings make them, and the command line may change either.
    sizes = [
        one
        for one in overrides
        if one.startswith(("data.", "training.batch_size=", "training.gradient_accumulation_steps="))
    ]
    _check_overrides(overrides)
    # The data are what the model's history says, which may be anyone's.
    batches = {"name": target.name, "data": data, "training": {"batch_size": ROWS}}
    sized = changed_recipe(batches, sizes, "the recipe")
    if text is not None:
        _check_context(getattr(sized.data, "context", CONTEXT), trained.model.config.max_position_embeddings)
    given = {
        "mechanisms": mechanisms or None,
        "num_key_value_heads": num_key_value_heads,
        "choose_layers": choose_layers,
    }
    values = conversion_recipe(
        target.name,
        str(place),
        data,
        given | {"anneal": not no_anneal},
        tokens=count_of(heal, "heal"),
        context=int(getattr(sized.data, "context", CONTEXT)),
        batch_size=sized.training.batch_size,
        gradient_accumulation_steps=sized.training.gradient_accumulation_steps,
    )
    recipe = changed_recipe(values, overrides, "the recipe")
    if any(on_several(run) for run, _ in chain(recipe, target)):
        raise HeadwaterError(
            "headwater convert uses one device; for several, train the stages of its recipe one by one with "
            "`headwater train RECIPE --stage NAME` (docs/convert.md)."
        )
    priced = price_of(recipe, trained.model.config, dtype.itemsize)
    own = recipe.training.distillation is None or recipe.training.distillation.teacher is None
    _show_price(priced, "the original" if own else "the teacher")
    if plan:
        return
    with connected(recipe, target) as fabric:  # which says if the device cannot be used
        device = fabric.device
    with occupied(target, empty=True):
        mark(target)
        write_recipe(recipe, target)
        if not path.is_dir():
            write_model(place, trained.model, trained.tokenizer, trained.history)
        built = recipe.data.build()
        if text is None and (warning := changed_text(trained, built)):
            tell(f"{warning} Pass another text with --text.")
        before = measure_with_progress("measuring the original", trained.model.to(device), built)
        del trained
        tell("making the smaller model")
        record = trained_with_bar(recipe, target)
        place = _written(target, record, dtype)
        publish_model(place, target)
        after = measure_with_progress("measuring the result", open_source(str(place)).model.to(device), built)
        _tell(target, record, priced, (before, after), source)


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise `HeadwaterError` for an override of what SOURCE or an option decides."""
    from headwater_lab.training.start import MAY_DIFFER

    for field in (one.partition("=")[0] for one in overrides):
        if field in ("start.checkpoint", "start"):
            raise HeadwaterError("The model to convert is SOURCE; leave out start.checkpoint.")
        if field.partition(".")[0] == "model" and field.removeprefix("model.") not in MAY_DIFFER:
            raise HeadwaterError(f"The model is SOURCE's, whose {field} does not change; leave it out.")
        if field == "start.convert.anneal":
            raise HeadwaterError("Its stages depend on start.convert.anneal; leave it out, or use --no-anneal.")


def _check_context(context: int, most: int) -> None:
    """Raise `HeadwaterError` for rows of a text that are longer than the model has positions for."""
    if context > most:
        raise HeadwaterError(f"The model has {most} positions, and data.context is {context}; set {most} or less.")
    if context == most < CONTEXT:
        tell(f"Rows of {most} tokens, because the model has no more positions.")


def _settings(trained: Trained) -> dict[str, Any] | None:
    """The data that a model was last trained on, as a recipe's section; None if its history names none.

    Raises `HeadwaterError` for data that the user does not trust.
    """
    last = next((event for event in reversed(trained.history) if event.kind == "trained"), None)
    data = last.details.get("data") if last is not None else None
    settings = data.get("settings") if isinstance(data, dict) else None
    if not isinstance(settings, dict):
        return None
    check_paths(settings)
    return dict(settings)


def _written(target: Path, record: RunRecord, dtype: torch.dtype) -> Path:
    """The checkpoint of the result in the source's dtype: what training wrote, or a copy of it in OUT/checkpoints."""
    from headwater_lab.training.checkpoint import write_model
    from headwater_lab.training.places import FOLDER, newest_checkpoint
    from headwater_lab.training.trained import open_trained

    trained = open_trained(target / record.stages[-1].folder)
    if trained.model.dtype == dtype:
        return newest_checkpoint(target)
    place = target / FOLDER / f"step-{sum(stage.steps for stage in record.stages):06d}"
    write_model(place, trained.model.to(dtype), trained.tokenizer, trained.history)
    return place


def _show_price(priced: ConversionPrice, teacher: str) -> None:
    from headwater.cost.estimate import si

    table = lined("", "before", "after")
    before, after = priced.before, priced.after
    table.add_row("cache, bytes a token", f"{before.cache_bytes_per_token:,}", f"{after.cache_bytes_per_token:,}")
    table.add_row("cache of a row", f"{si(before.cache_bytes)}B", f"{si(after.cache_bytes)}B")
    table.add_row("parameters", f"{before.parameters:,}", f"{after.parameters:,}")
    stdout.print(table)
    parts = ", ".join(f"{name} {flops:.3g}" for name, flops in priced.flops.items())
    held = f", of which {teacher} {si(priced.teacher_bytes)}B" if priced.teacher_bytes else ""
    say(
        f"healing on {priced.tokens:,} tokens: {sum(priced.flops.values()):.3g} FLOPs ({parts}); about "
        f"{si(priced.step_bytes)}B of memory in a step{held}"
    )


def _tell(
    target: Path,
    record: RunRecord,
    priced: ConversionPrice,
    measures: tuple[dict[str, float], dict[str, float]],
    source: str,
) -> None:
    """Print what the conversion did, and write it beside the run. measures: of the original and the result."""
    from headwater_lab.training.conversion import curve_of, write_result

    before, after = measures
    curve = curve_of(record)
    write_result(
        target,
        {
            "source": source,
            "price": asdict(priced),
            "before": before,
            "after": after,
            "curve": curve,
        },
    )
    table = lined("", "before", "after", "after / before")
    for name in [name for name in before if name in after]:
        title = f"held-out {name.replace('_', ' ')}"
        share = f"{after[name] / before[name]:.4f}" if before[name] else ""
        table.add_row(title, f"{before[name]:.4f}", f"{after[name]:.4f}", share)
    stdout.print(table)
    shown = lined("tokens of healing", "cache, bytes a token (fp32)", record.metric.replace("_", " "))
    for point in curve:
        shown.add_row(f"{point['tokens']:,}", f"{point['cache_bytes_per_token']:,}", f"{point[record.metric]:.4f}")
    stdout.print(shown)
    tell_model(target)
