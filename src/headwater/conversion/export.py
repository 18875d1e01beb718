"""Export: a checkpoint folder that plain transformers loads, with `trust_remote_code=True` and without headwater."""

import copy
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwater.config.auto_map import EXPORTED, auto_class_of, auto_map_of
from headwater.config.planner import plan_layers
from headwater.conversion import to_transformers
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.input_checks import check_paged
from headwater.util.errors import HeadwaterError
from headwater.util.files import check_free, local, stage_folder


def export(
    model: PreTrainedModel,
    folder: str | Path,
    materialise: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Save `model`'s weights, config and code in a new folder, and a tokenizer if one is given; returns its path.

    It loads with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` or `AutoModelForImageClassification`, with or
    without headwater. The folder appears only when complete. materialise: for engines with their own paged cache (see
    `HeadwaterConfig.materialise`). tokenizer: of an image model, its image processor.

    Raises `HeadwaterError` if the folder is not empty, if the model is not one of headwater's own classes, if the code
    of an external mechanism cannot be included (for example from a notebook), if `materialise` is set and such an
    engine cannot run the model, or if the disk is full. Leaves nothing behind on errors.
    """
    folder = local(folder).absolute()
    if auto_class_of(type(model)) is None:
        class_names = ", ".join(target.partition(":")[2] for _, target in EXPORTED if ".models." in target)
        raise HeadwaterError(
            f"A {type(model).__name__} cannot be exported; pass a model of one of these classes: {class_names}."
        )
    config = model.config  # the classes used by later checkpoints of a training run do not change
    model.config = copy.deepcopy(config)
    model.config.auto_map = auto_map_of(config)  # saving writes the code because of this
    try:
        if materialise and not config.is_causal:
            raise HeadwaterError("materialise is for engines that generate text; leave it out for an image model.")
        if materialise:
            model.config.materialise = True
            check_paged(model.config, plan_layers(model.config))
        _write_folder(model, folder, tokenizer)
    finally:
        model.config = config
    return folder


def export_family(
    model: HeadwaterForCausalLM, folder: str | Path, family: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> Path:
    """Save `model` in the format of one of transformers' own families in a new folder; returns its path.

    Raises `HeadwaterError` if the folder is not empty, for features that the family cannot express (as
    `headwater.conversion.to_transformers` does), or if the disk is full. Leaves nothing behind on errors.
    """
    folder = local(folder).absolute()
    check_free(folder)
    _write_folder(to_transformers(model, family), folder, tokenizer)
    return folder


def _write_folder(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    with stage_folder(folder) as beside:
        model.save_pretrained(beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
