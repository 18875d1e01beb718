"""What a conversion to a smaller cache trains, and what that costs and saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater_lab.recipe.schema import Recipe, changed_recipe
from headwater_lab.training.checkpoints import newest_checkpoint
from headwater_lab.training.estimate import ConversionPrice, count_of, price_of
from headwater_lab.training.models import Trained, data_settings, open_source
from headwater_lab.training.stages import chain, conversion_recipe, on_several
from headwater_lab.training.start import MAY_DIFFER

# Tokens in a row, if the model has positions for as many, and rows in a step.
CONTEXT, ROWS = 512, 8


@dataclass
class PreparedConversion:
    """A conversion before it is trained.

    teacher: what the price calls the model that is imitated. checkpoint: what the runs start from. is_copied: the
    checkpoint is a copy of the source, and is not written yet.
    """

    recipe: Recipe
    trained: Trained
    price: ConversionPrice
    teacher: str
    checkpoint: Path
    is_copied: bool


def prepare_conversion(
    source: str,
    target: Path,
    *,
    mechanisms: Mapping[str, Any],
    num_key_value_heads: int | None = None,
    choose_layers: bool = False,
    heal: str = "10M",
    text: str | None = None,
    anneal: bool = True,
    overrides: Sequence[str] = (),
    tell: Callable[[str], object] = lambda message: None,
) -> PreparedConversion:
    """Prepare the conversion of a trained model into a folder, like `headwater convert`, and price it.

    text: what to heal and measure on; default: what the model was trained on. tell: receives notices.
    Raises `HeadwaterError`.
    """
    path = Path(source)
    if path.is_dir():
        checkpoint = newest_checkpoint(path).resolve()
    else:  # from the hub, or a file of tensors: the runs start from a copy
        checkpoint = target.resolve() / "source"
    trained = open_source(source)
    trained.original = None  # a second copy
    if not isinstance(trained.model, HeadwaterForCausalLM):
        raise HeadwaterError(f"{source!r} is an image model, which has no cache; convert is for language models.")
    data = _data_of(source, text, trained, checkpoint)
    # Rows of synthetic data are as long as their settings make them, and the command line may change either.
    sizes = [
        override
        for override in overrides
        if override.startswith(("data.", "training.batch_size=", "training.gradient_accumulation_steps="))
    ]
    _check_overrides(overrides)
    # The data are what the model's history says, which may be anyone's.
    batches = {"name": target.name, "data": data, "training": {"batch_size": ROWS}}
    sized = changed_recipe(batches, sizes, "the recipe")
    if text is not None:
        _check_context(getattr(sized.data, "context", CONTEXT), trained.model.config.max_position_embeddings, tell)
    options = {
        "mechanisms": mechanisms or None,
        "num_key_value_heads": num_key_value_heads,
        "choose_layers": choose_layers,
        "anneal": anneal,
    }
    values = conversion_recipe(
        target.name,
        str(checkpoint),
        data,
        options,
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
    price = price_of(recipe, trained.model.config, trained.model.dtype.itemsize)
    distillation = recipe.training.distillation
    teacher = "the original" if distillation is None or distillation.teacher is None else "the teacher"
    return PreparedConversion(recipe, trained, price, teacher, checkpoint, not path.is_dir())


def _data_of(source: str, text: str | None, trained: Trained, checkpoint: Path) -> dict[str, Any]:
    """The data to heal on, as a recipe's section: a text, or what the model was last trained on."""
    if text is None:
        settings = data_settings(trained.history)
        if settings is None:
            raise HeadwaterError(
                f"{source!r} does not say what it was trained on; pass a text of that kind with --text."
            )
        return dict(settings)
    if trained.tokenizer is None:
        raise HeadwaterError(f"{source!r} has no tokenizer, so it cannot read a text; save it beside the model.")
    most = trained.model.config.max_position_embeddings
    return {"kind": "text", "source": text, "tokenizer": str(checkpoint), "context": min(CONTEXT, most)}


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise `HeadwaterError` for an override of what SOURCE or an option decides."""
    for field in (one.partition("=")[0] for one in overrides):
        if field in ("start.checkpoint", "start"):
            raise HeadwaterError("The model to convert is SOURCE; leave out start.checkpoint.")
        if field.partition(".")[0] == "model" and field.removeprefix("model.") not in MAY_DIFFER:
            raise HeadwaterError(f"The model is SOURCE's, whose {field} does not change; leave it out.")
        if field == "start.convert.anneal":
            raise HeadwaterError("Its stages depend on start.convert.anneal; leave it out, or use --no-anneal.")


def _check_context(context: int, most: int, tell: Callable[[str], object]) -> None:
    """Raise `HeadwaterError` for rows of a text that are longer than the model has positions for."""
    if context > most:
        raise HeadwaterError(f"The model has {most} positions, and data.context is {context}; set {most} or less.")
    if context == most < CONTEXT:
        tell(f"Rows of {most} tokens, because the model has no more positions.")
