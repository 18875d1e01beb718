"""Export: a checkpoint folder that plain transformers loads, with `trust_remote_code=True` and without headwater."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwater.config.auto_map import EXPORTED, auto_class_of
from headwater.conversion import to_transformers
from headwater.conversion.latent import expand_latent
from headwater.models.card import CARD, make_card
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.input_checks import check_paged
from headwater.models.load import CONFIG, read_object
from headwater.util.errors import HeadwaterError
from headwater.util.files import check_free, local, replace_text, stage_folder

_MATERIALISE = "--materialise (in Python: materialise)"


def export(
    model: PreTrainedModel,
    folder: str | Path,
    materialise: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    card: str | Mapping[str, Any] | None = None,
) -> Path:
    """Save `model`'s weights, config, code and card in a new folder, and a tokenizer if one is given; returns its path.

    It loads with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` or `AutoModelForImageClassification`, with or
    without headwater. The folder appears only when complete. materialise: for engines with their own paged cache (see
    `HeadwaterConfig.materialise`). tokenizer: of an image model, its image processor. card: its text, or arguments of
    `headwater.models.card.make_card`; default: what the model shows.

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
    if materialise and not model.config.is_causal:
        raise HeadwaterError(f"{_MATERIALISE} is for engines that generate text; leave it out for an image model.")
    with model.including_code():
        if materialise:
            model.config.materialise = True
            check_paged(model.config, model.plans, f"leave out {_MATERIALISE}, and ")
        _write_folder(model, folder, tokenizer, card)
    return folder


def export_family(
    model: HeadwaterForCausalLM,
    folder: str | Path,
    family: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    card: str | Mapping[str, Any] | None = None,
) -> Path:
    """Save `model` in the format of one of transformers' own families in a new folder; returns its path.

    Keys and values that are made from a latent (`low_rank_kv`) become ordinary ones. tokenizer, card: as in `export`.
    Raises `HeadwaterError` if the folder is not empty, for features that the family cannot express (as
    `headwater.conversion.to_transformers` does), or if the disk is full. Leaves nothing behind on errors.
    """
    folder = local(folder).absolute()
    check_free(folder)
    plain = expand_latent(model)
    _write_folder(to_transformers(plain, family), folder, tokenizer, card, origin=plain)
    return folder


def _add_older_names(folder: Path) -> None:
    """Add the names by which transformers 4 and converters of other engines read RoPE and tokenizers.

    transformers 4 ignores `rope_parameters` without a word, and computes with its default angles.
    """
    config = read_object(folder / CONFIG)
    rope = config.get("rope_parameters") or {}
    scaling = dict(rope.get("full_attention", rope))
    older = {}
    if theta := scaling.pop("rope_theta", None):
        older = {"rope_theta": theta, "rope_scaling": scaling if scaling.get("rope_type") != "default" else None}
        if config["model_type"] == "gpt_neox":  # it has names of its own
            older |= {"rotary_emb_base": theta, "rotary_pct": scaling.get("partial_rotary_factor", 1.0)}
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    replace_text(folder / CONFIG, json.dumps(config | older, indent=2) + "\n")
    if (file := folder / "tokenizer_config.json").exists():
        settings = read_object(file)
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        replace_text(file, json.dumps(settings, indent=2) + "\n")


def _write_folder(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    card: str | Mapping[str, Any] | None,
    origin: PreTrainedModel | None = None,
) -> None:
    with stage_folder(folder) as staging:
        model.save_pretrained(staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        if origin is not None:
            _add_older_names(staging)
        if not isinstance(card, str):
            options = {"name": folder.name} | dict(card or {})
            card = str(make_card(model, has_preparer=tokenizer is not None, origin=origin, **options))
        (staging / CARD).write_text(card, encoding="utf-8")
