"""What a model's card says of its history: how it was made, on what, and what was measured. Unknown facts are left out.

Cards are published. So of a local path only the last part is in it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from headwater.models.card import CARD
from headwater.models.load import read_object
from headwater.util.hub import is_path
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.training.checkpoints import FOLDER, is_from_elsewhere, newest_checkpoint
from headwater_lab.training.records import CONTROL, CONVERSION, RECORD, Event, RunRecord, find_record
from headwater_lab.training.trained_models import Trained, last_training


def read_card(source: Path) -> str | None:
    """Read the card that somebody wrote next to a model; None if there is none."""
    file = source / CARD
    return file.read_text(encoding="utf-8") if file.is_file() else None


def describe_history(trained: Trained) -> dict[str, Any]:
    """Describe how a checkpoint came about, as arguments of `headwater.models.card.make_card`."""
    record = _find_record(trained)
    sections = [("How it was made", "\n".join(f"- {line}" for line in _list_changes(trained.history)))]
    if record is not None:
        sections += [
            ("Training", _describe_training(record, trained)),
            ("Held-out results", _describe_results(record, trained)),
            ("Recipe", _write_recipe(record)),
        ]
    bases = [event.details["source"] for event in trained.history if event.details.get("on_hub")]
    licenses = [event.details["license"] for event in trained.history if "license" in event.details]
    return {
        "sections": sections,
        "license": licenses[-1] if licenses else None,
        "base_model": bases or None,
        "datasets": None if record is None else record.data.get("dataset"),
    }


def _find_record(trained: Trained) -> RunRecord | None:
    """Find the record of the run that trained a checkpoint last; None without one."""
    event, checkpoint = last_training(trained.history), Path(trained.source)
    run = checkpoint.parent.parent if checkpoint.parent.name == FOLDER else checkpoint
    if event is None or event is not trained.history[-1] or not (run / RECORD).is_file():
        return None
    if (record := find_record(run / RECORD)) is None:  # the model does not need it
        return None
    is_same = record.identity == event.details.get("identity") and record.seed == event.details.get("seed")
    return record if is_same or record.stages else None


def _list_changes(history: list[Event]) -> Iterator[str]:
    """Yield a line for each event of a model's history."""
    for event in history:
        details = {name: _hide_paths(value) for name, value in event.details.items() if name != "on_hub"}
        if mechanisms := details.get("mechanisms"):  # the card lists their options
            details["mechanisms"] = [f"`{name}`" for name in mechanisms]
        if event.kind == "trained":
            yield _describe_data(event, details)
        else:
            facts = (
                name.replace("_", " ") + ("" if value is True else f" {_write(value)}")
                for name, value in details.items()
                if value is not None
            )
            yield f"{event.kind.capitalize()}: {'; '.join(facts)}."


def _describe_data(event: Event, details: dict[str, Any]) -> str:
    """Write on what, and for how long, a model was trained."""
    data = (details.get("data") or {}).get("settings") or {}
    unit = "images" if data.get("kind") == "images" else "tokens"
    source = data.get("source") or data.get("kind") or "unknown data"
    names = ", ".join(f"`{name}`" for name in (source if isinstance(source, dict) else [source]))
    count = details.get("steps")
    steps = f", {count:,} step{'' if count == 1 else 's'}" if isinstance(count, int) else ""
    return f"Trained on {names}: {event.tokens:,} {unit}{steps}, {event.flops:.3g} FLOPs."


def _describe_training(record: RunRecord, trained: Trained) -> str:
    """Write the optimization, the data and the hardware of a run."""
    training, environment = record.recipe.get("training", {}), record.environment
    rows = training.get("batch_size", 0) * training.get("gradient_accumulation_steps", 1)
    context = record.recipe.get("data", {}).get("context")
    optimizer = [
        f"{training.get('optimizer')}, learning rate {training.get('learning_rate')}",
        f"{training.get('schedule')} schedule",
        f"{training.get('warmup_steps')} warm-up steps, weight decay {training.get('weight_decay')}",
        f"{rows:,} rows{f' of {context:,} tokens' if context else ''} in a step, precision {training.get('precision')}",
    ]
    data = [
        f"{value:,} {name.replace('_', ' ')}" if isinstance(value, int) else f"{name} `{_hide_paths(value)}`"
        for name, value in record.data.items()
        if name in ("source", "tokenizer", "sha256", "documents", "bytes", "train_tokens")
    ]
    device = environment.device_name or environment.device
    count = f"{environment.world_size} × " if environment.world_size > 1 else ""
    since = " after its source's own training, which is not recorded" if is_from_elsewhere(trained.history) else ""
    lines = [
        f"Recipe: {', '.join(optimizer)}, seed {record.seed}.",
        f"Data: {', '.join(data)}." if data else "",
        f"In all{since}: {record.total_tokens:,} {record.unit}, {record.total_flops:.3g} FLOPs.",
        f"Hardware: {count}{device}, {record.seconds:,.3g} s in training steps.",
        f"Software: headwater {environment.headwater}, PyTorch {environment.torch}, transformers "
        f"{environment.transformers}.",
    ]
    return "\n".join(f"- {line}" for line in lines if line)


def _read_conversion(checkpoint: Path) -> tuple[dict[str, dict[str, float]], str]:
    """Read what a conversion measured of its result (or its control) and of the models beside it, and on how many bytes
    of text; its runs measure on fewer rows."""
    names = {"after": "this model", "before": "the original", CONTROL: "the original, trained on the same tokens"}
    for folder in checkpoint.parents[1:5]:
        if (folder / CONVERSION).is_file():
            measures = read_object(folder / CONVERSION)
            for result, run in (("after", folder), (CONTROL, folder / CONTROL)):
                if result in measures and run in checkpoint.parents and newest_checkpoint(run) == checkpoint:
                    beside = {
                        names[name]: measures[name]
                        for name in names
                        if name in measures and name not in (result, "after")
                    }
                    size = measures["data"]["held_out_bytes"]
                    return {"this model": measures[result]} | beside, f"{size:,} bytes of " if size else ""
    return {}, ""


def _describe_results(record: RunRecord, trained: Trained) -> str:
    """Write what was measured at the checkpoint's step, and how; "" if nothing was."""
    step = None if record.stages else trained.history[-1].details.get("steps")
    points = [point for point in record.held_out if step in (None, point.step)]
    if not points:
        return ""
    at = "" if step is None else f" at step {step:,}"  # the last stage's steps are not the model's
    models, size = _read_conversion(Path(trained.source).resolve())
    if models:
        line = f"Measured{at} on {size}data that was held out of training."
    else:
        models = {"value": points[-1].metrics}
        sizes = {name: record.data.get(f"held_out_{name}") for name in ("documents", "bytes")}
        counts = ", ".join(f"{name}: {count:,}" for name, count in sizes.items() if count)
        line = f"Measured{at} on data that was held out of training{counts and f' ({counts})'}."
    metrics = next(iter(models.values()))
    lines = [["metric", *models], ["---"] * (1 + len(models))]
    lines += [[name.replace("_", " "), *(f"{model[name]:.4f}" for model in models.values())] for name in metrics]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    if is_from_elsewhere(trained.history):
        line += " The source may have been trained on it."
    explanation = " ".join([line, *_explain_metrics(metrics, record.recipe.get("data", {}).get("context"))])
    return f"{table}\n\n{explanation}"


def _explain_metrics(metrics: dict[str, float], context: int | None) -> Iterator[str]:
    """Yield sentences on how these metrics are measured; others are explained by their names."""
    if "loss" in metrics and context:
        yield f"Each document is cut into rows of {context:,} tokens that do not overlap."
        yield "A token is scored given those before it in its row."
    if "bits_per_byte" in metrics:
        yield "Bits per byte: nats of a document's tokens after its start token, over ln 2 and its UTF-8 bytes."
    if "loss" in metrics:
        yield "Loss: nats per token."


def _write_recipe(record: RunRecord) -> str:
    """Write the recipe of a run, without what is at its default, and the command that trains it, if it starts alone."""
    try:
        recipe = Recipe.model_validate(record.recipe)
    except ValueError:  # of code that is not trusted here, or of another version
        return ""
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"title", "reporting", "compare"})
    values["data"] = {"kind": recipe.data.kind} | values["data"]
    text = yaml.safe_dump(_hide_paths(values), sort_keys=False, allow_unicode=True)
    command = "`headwater train recipe.yaml` trains it again on the same data, with this `recipe.yaml`:"
    if recipe.start is not None:
        command = "The last run, which starts from a trained model:"
    return f"{command}\n\n```yaml\n{text}```"


def _hide_paths(value: Any) -> Any:
    """Leave of each local path in nested values only its last part."""
    if isinstance(value, dict):
        return {_hide_paths(name): _hide_paths(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_hide_paths(entry) for entry in value]
    if isinstance(value, str) and (is_path(value) or os.path.lexists(value)):
        return Path(value).name
    return value


def _write(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"from", "to"}:
        return f"{_write(value['from'])} → {_write(value['to'])}"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_write(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(_write, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
