"""Whether a run may be resumed with a recipe, and from what progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.util.errors import HeadwaterError
from headwater_lab.recipe.schema import Recipe
from headwater_lab.training.checkpoint import Progress, read_progress

# Fields that may change when a run is resumed: how long it runs and on which hardware, not the model or its data.
MAY_CHANGE = {
    ("training", name)
    for name in (
        "steps",
        "device",
        "devices",
        "nodes",
        "strategy",
        "replicas",
        "threads",
        "attn_implementation",
        "compile",
        "gradient_checkpointing",
        "loss_chunk_tokens",
        "max_skipped_steps",
        "timeout_minutes",
    )
} | {("start", "checkpoint"), ("data", "workers")}  # it may have been moved


def progress_of(checkpoint: Path, recipe: Recipe, data: dict[str, Any]) -> Progress:
    """A run's progress, if this recipe may resume it. Raises `HeadwaterError` if not.

    data: the facts about the data as they are now.
    """
    progress = read_progress(checkpoint)
    old, new = progress.recipe, recipe.model_dump(mode="json")
    for section in ("model", "data", "seed", "training", "start"):
        before, now = old.get(section), new[section]
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            changed = [key for key in changed if (section, key) not in MAY_CHANGE]
            if not changed:
                continue
            key = changed[0]
            what, was, now = f"{section}.{key}", before.get(key), now.get(key)
        else:
            what, was = section, before
        raise HeadwaterError(
            f"This run was started with {what}={was!r} and cannot be resumed with {now!r}; restore it, or start a new "
            "run with another --out."
        )
    if progress.step > recipe.training.steps:
        raise HeadwaterError(
            f"The run is already at step {progress.step}, past training.steps={recipe.training.steps}."
        )
    for fact in ("sha256", "train_tokens", "held_out_sha256"):
        if progress.data.get(fact) != data.get(fact):
            raise HeadwaterError(
                f"The data have changed since this run was started ({fact} {progress.data.get(fact)!r}, now "
                f"{data.get(fact)!r}); restore them, or start a new run with another --out."
            )
    progress.recipe = new
    return progress
