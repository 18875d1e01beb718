"""Recipes with stages: train, grow, train, grow, …; each stage is a separate run, and one record sums them up.

runs/NAME/
  record.json                  the sum: points continue from stage to stage, costs add up
  config.json, …               the model of the last stage
  stages/00-start/             the runs
  stages/01-NAME-OF-STAGE/

`headwater convert` trains such a recipe, which `build_conversion` makes.
"""

import hashlib
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from headwater.config.text import HeadwaterConfig
from headwater.conversion import config_of
from headwater.kernels.fused_loss import DISTILLED_CHUNK
from headwater.util.errors import HeadwaterError, nearest
from headwater.util.files import replace_text
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.recipe.start_section import changed_config
from headwater_lab.training.checkpoints import STAGES, list_checkpoints, newest_checkpoint
from headwater_lab.training.journal import OnEvent
from headwater_lab.training.loop import train
from headwater_lab.training.records import Experiment, RunRecord, StageRecord, find_record, read_record, write_record
from headwater_lab.training.run_folder import check_ours, lock_run, mark_folder
from headwater_lab.training.saving import publish_model
from headwater_lab.util.terminal import counted


def list_stages(recipe: Recipe, folder: Path) -> list[tuple[Recipe, Path]]:
    """List the stages of a recipe as plain recipes, each with its folder in the run's."""
    names = recipe.stage_names
    return recipe.chain(lambda name, _: folder / STAGES / f"{names.index(name):02d}-{name}")


def train_stages(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    experiment: Experiment | None = None,
    only: str | None = None,
    on_event: OnEvent | None = None,
    trunk: Path | None = None,
) -> RunRecord:
    """Train the stages of a recipe one after the other; like `train` for a recipe without. Returns the record of all.

    resume: skip finished stages and continue the interrupted one.
    only: train just this stage ("start" is the first) and return its record; the one before it must be finished.
    on_event: as in `train`, with steps counted over all stages. trunk: as in `train`, of a recipe without stages.

    Raises `HeadwaterError` as `train` and `list_configs` do, and if several devices would have to be set up
    once per stage.
    """
    if not recipe.stages and only is None:
        return train(recipe, folder, experiment=experiment, on_event=on_event, resume=resume, trunk=trunk)
    runs, names = list_stages(recipe, folder), recipe.stage_names
    with lock_run(folder, nested=True) if recipe.stages and not uses_processes(recipe) else nullcontext():
        _check_folder(recipe, folder, trunk)
        if not is_finished(*runs[0]):
            list_configs(recipe)
        if only is not None:
            if only not in names:
                raise HeadwaterError(f"{recipe.name!r} has no stage {only!r}; {nearest(only, names)}")
            record = train(*runs[names.index(only)], resume=resume, on_event=on_event)
            if all(is_finished(*run) for run in runs):
                finish_stages(recipe, folder, runs, experiment)
            return record
        if uses_processes(recipe):
            raise HeadwaterError(
                "Train stages separately on several devices, which a process can set up only once: "
                f"{', '.join(f'--stage {name}' for name in names)}."
            )
        mark_folder(folder)
        steps = 0
        for plain, path in runs:
            if not (resume and is_finished(plain, path)):
                train(plain, path, resume=resume, on_event=_shift_steps(on_event, steps))
            steps += plain.training.steps
        return finish_stages(recipe, folder, runs, experiment)


def _check_folder(recipe: Recipe, folder: Path, trunk: Path | None) -> None:
    """Raise `HeadwaterError` for a folder that is not for the stages of this recipe, and for a trunk."""
    if trunk is not None:
        raise HeadwaterError("Only a whole run branches off another, not stages; leave out --trunk (trunk=).")
    if uses_processes(recipe):
        check_ours(folder)
    if recipe.stages and list_checkpoints(folder) and not (folder / STAGES).is_dir():
        raise HeadwaterError(f"{str(folder)!r} already holds a run without stages; choose another --out.")


def finish_stages(
    recipe: Recipe, folder: Path, runs: list[tuple[Recipe, Path]], experiment: Experiment | None
) -> RunRecord:
    """Write the record of finished stages, and the model of the last one, into the folder around them."""
    record = join_records(recipe, folder, runs, experiment)
    publish_model(newest_checkpoint(runs[-1][1]), folder)
    write_record(record, folder)
    return record


def list_configs(recipe: Recipe) -> list[HeadwaterConfig]:
    """List the configs of all stages, without the data: `Recipe.shape` has the size of an unknown vocabulary.

    Raises `HeadwaterError` for a model that cannot be built, and for a stage that cannot follow from the one before.
    """
    if recipe.start is None:
        return recipe.configs(recipe.config_for(recipe.shape))
    return recipe.configs(changed_config(config_of(newest_checkpoint(Path(recipe.start.checkpoint))), recipe.start))


def uses_processes(recipe: Recipe) -> bool:
    """Whether a recipe trains with several processes."""
    return recipe.training.world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def is_finished(recipe: Recipe, folder: Path) -> bool:
    """Whether `folder` holds this recipe's run, finished."""
    record = find_record(folder)
    return record is not None and record.status == "finished" and not record.describe_difference(recipe)


def join_records(
    recipe: Recipe, folder: Path, runs: list[tuple[Recipe, Path]], experiment: Experiment | None
) -> RunRecord:
    """Join the records of finished stages: the counts of each continue from the end of the previous one.

    The result has both the evaluation at the end of a stage and the one before the next stage's first step: their
    difference is the immediate effect of changing the model.
    """
    records = [read_record(path) for _, path in runs]
    origin = records[0].origin
    summed = ("tokens", "flops", "seconds", "data_wait_seconds", "skipped_steps")
    joined = records[-1].model_copy(
        update={name: sum(getattr(record, name) for record in records) for name in summed}
        | dict(
            name=recipe.name,
            experiment=experiment,
            origin=origin,
            recipe=recipe.model_dump(mode="json", exclude={"compare"}),
            identity=recipe.identity,
            data_order=hashlib.sha256("".join(record.data_order for record in records).encode()).hexdigest(),
        )
    )
    points: dict[str, list] = {"curve": [], "held_out": [], "speed": [], "notices": []}
    counts: dict[str, Any] = {"step": 0, "tokens": 0, "flops": 0.0}
    stages = []
    for name, record, (plain, path) in zip(recipe.stage_names, records, runs, strict=True):
        for kind in points:
            for point in getattr(record, kind):
                shifted = {name: getattr(point, name) + count for name, count in counts.items() if hasattr(point, name)}
                points[kind].append(point.model_copy(update=shifted))
        counts["step"] += plain.training.steps
        counts["tokens"] += record.tokens
        counts["flops"] += record.flops
        stages.append(
            StageRecord(
                name=name,
                folder=Path(os.path.relpath(path, folder)).as_posix(),
                steps=plain.training.steps,
                total_tokens=counts["tokens"] + (origin.tokens if origin else 0),
                total_flops=counts["flops"] + (origin.flops if origin else 0.0),
                result=record.result,
                **record.model_dump(include={"parameters", "tokens", "flops", "seconds", "cache_bytes_per_token"}),
            )
        )
    return joined.model_copy(update=points | {"stages": stages})


def _shift_steps(on_event: OnEvent | None, steps: int) -> OnEvent | None:
    if on_event is None:
        return None
    return lambda step, point: on_event(step + steps, point)


RECIPE = "recipe.yaml"
# One step to convert the model, one at a constant rate, and one at a decaying rate.
LEAST_STEPS = 3


def build_conversion(
    name: str,
    source: str,
    data: dict[str, Any],
    convert: dict[str, Any],
    *,
    tokens: float,
    context: int,
    batch_size: int,
    gradient_accumulation_steps: int,
) -> dict[str, Any]:
    """Make a recipe, as plain values, that converts `source` and heals it on this many tokens.

    Half of the steps are at a constant rate after a warm-up, then the cosine decays. If `convert` has `anneal`, the
    model is converted during the first tenth of all steps; without, it is the smaller model from the first step. Raises
    `HeadwaterError` for too few tokens.
    """
    rows = batch_size * gradient_accumulation_steps
    steps = int(tokens // (rows * context))
    if steps < LEAST_STEPS:
        raise HeadwaterError(
            f"{tokens:,.0f} tokens make {counted(steps, 'step')} of {rows} rows of {context} tokens, and healing "
            f"takes at least {LEAST_STEPS}; pass --heal {LEAST_STEPS * rows * context} or more, or a smaller "
            "training.batch_size."
        )
    constant, decaying = steps - steps // 2, steps // 2
    annealed = max(1, steps // 10) if convert.get("anneal") else constant
    training = {
        "steps": annealed,
        "batch_size": batch_size,
        # A latent is near the original from the start.
        "learning_rate": 3e-4 if convert.get("latent_width") is None else 1e-4,
        "schedule": "constant",
        "warmup_steps": min(50, constant // 4, annealed),
        "distillation": {},
        "loss_chunk_tokens": DISTILLED_CHUNK,
    }
    stages: list[dict[str, Any]] = []
    if annealed < constant:
        finish = {"steps": constant - annealed, "warmup_steps": 0}
        stages.append({"name": "finish", "finish_conversion": True, "optimizer_state": "keep", "training": finish})
    decay = {"steps": decaying, "schedule": "cosine", "warmup_steps": 0}
    stages.append({"name": "heal", "optimizer_state": "keep", "training": decay})
    return {
        "name": name,
        "data": data,
        "start": {"checkpoint": source, "convert": convert},
        "training": training,
        "stages": stages,
        "reporting": {
            "evaluate_every": max(1, constant // 4),
            "log_every": 10,
            "save_every": max(1, min(200, steps // 25)),
            "keep_checkpoints": 1,
            "tensorboard": False,
        },
    }


def build_control(recipe: Recipe) -> Recipe:
    """Make the control of a conversion: the original, trained on the same rows by the same schedule, without a
    teacher."""
    values = recipe.model_dump(mode="json")
    for change in (values["start"], *values["stages"]):
        change |= {"convert": None, "finish_conversion": False}
    values["training"]["distillation"] = None
    return parse(values | {"name": f"{recipe.name}-control"}, "the control")


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write the recipe of a conversion to its folder, for `headwater train`."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    values["data"]["kind"] = recipe.data.kind  # a default that exclude_defaults drops, but that selects the class
    replace_text(folder / RECIPE, json.dumps(values, indent=1) + "\n")


def list_healing(record: RunRecord) -> list[dict[str, float]]:
    """List held-out metrics over the tokens of healing, with the bytes a token adds to the cache of the model then."""
    stages: list[Any] = record.stages or [record]
    stage, end = 0, stages[0].tokens
    rows: list[dict[str, float]] = []
    for point in record.held_out:
        # Two evaluations share the step where stages meet: of the model before and after the change.
        if rows and point.tokens == end == rows[-1]["tokens"] and stage + 1 < len(stages):
            stage += 1
            end += stages[stage].tokens
        row = {"tokens": point.tokens, "cache_bytes_per_token": stages[stage].cache_bytes_per_token, **point.metrics}
        if row not in rows[-1:]:  # equal if only the learning rate changed
            rows.append(row)
    return rows
