"""`headwater convert`: a trained model with a smaller cache, healed and measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.util.errors import HeadwaterError
from headwater.util.files import replace_text
from headwater.util.terminal import lined
from headwater_lab.cli.common import mechanisms_of, new_folder, say, stdout, tell, tell_model
from headwater_lab.cli.options import FolderPath
from headwater_lab.cli.progress import measure_with_progress
from headwater_lab.cli.training import trained_with_bar

if TYPE_CHECKING:
    import torch

    from headwater_lab.training.estimate import ConversionPrice
    from headwater_lab.training.records import RunRecord


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
    from headwater_lab.api.converting import prepare_conversion
    from headwater_lab.data.corpus import local_files
    from headwater_lab.training.checkpoints import publish_model, write_model
    from headwater_lab.training.models import changed_text, open_source
    from headwater_lab.training.processes import connected
    from headwater_lab.training.run_folder import mark
    from headwater_lab.training.stages import write_recipe
    from headwater_lab.util.output_folder import occupied

    mechanisms = mechanisms_of(mechanism)
    if not mechanisms and num_key_value_heads is None:
        raise HeadwaterError(
            "Say how the cache becomes smaller: --mechanism NAME by which layers share, or --num-key-value-heads N."
        )
    if text is not None:
        local_files(text)  # is an error if there are none, also with --plan
    target = new_folder(out, source, "converted", may_exist=plan)
    conversion = prepare_conversion(
        source,
        target,
        mechanisms=mechanisms,
        num_key_value_heads=num_key_value_heads,
        choose_layers=choose_layers,
        heal=heal,
        text=text,
        anneal=not no_anneal,
        overrides=overrides,
        tell=tell,
    )
    recipe, trained = conversion.recipe, conversion.trained
    dtype = trained.model.dtype
    _show_price(conversion.price, conversion.teacher)
    if plan:
        return
    with connected(recipe, target) as fabric:  # which says if the device cannot be used
        device = fabric.device
    with occupied(target, empty=True):
        mark(target)
        write_recipe(recipe, target)
        if conversion.is_copied:
            write_model(conversion.checkpoint, trained.model, trained.tokenizer, trained.history)
        built = recipe.data.build()
        if text is None and (warning := changed_text(trained, built)):
            tell(f"{warning} Pass another text with --text.")
        before = measure_with_progress("measuring the original", trained.model.to(device), built)
        del trained, conversion.trained
        tell("making the smaller model")
        record = trained_with_bar(recipe, target)
        result = _written(target, record, dtype)
        publish_model(result, target)
        after = measure_with_progress("measuring the result", open_source(str(result)).model.to(device), built)
        _tell(target, record, conversion.price, (before, after), source)


def _written(target: Path, record: RunRecord, dtype: torch.dtype) -> Path:
    """The checkpoint of the result in the source's dtype: what training wrote, or a copy of it in OUT/checkpoints."""
    from headwater_lab.training.checkpoints import FOLDER, newest_checkpoint, write_model
    from headwater_lab.training.models import open_trained

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
    for title, name in (("cache, bytes a token", "cache_bytes_per_token"), ("parameters", "parameters")):
        table.add_row(title, f"{before[name]:,}", f"{after[name]:,}")
    table.add_row("cache of a row", f"{si(before['cache_bytes'])}B", f"{si(after['cache_bytes'])}B")
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
    from headwater_lab.training.stages import curve_of

    before, after = measures
    curve = curve_of(record)
    result = {"source": source, "price": asdict(priced), "before": before, "after": after, "curve": curve}
    replace_text(target / "conversion.json", json.dumps(result, indent=1) + "\n")
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
