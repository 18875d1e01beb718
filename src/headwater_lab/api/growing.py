"""Functions that change a model: `lab.grow`, `lab.retrofit` and `shrink`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from headwater import growth
from headwater.conversion import add_mechanisms, from_transformers
from headwater.models.pretrained import HeadwaterPreTrainedModel
from headwater.models.quantization import check_full_precision
from headwater.plugins.mechanisms import as_mapping
from headwater.plugins.trust import trust_names, trust_names_in
from headwater.util.errors import HeadwaterError, shown
from headwater_lab.api.common import describe_written, measure_held_out, quiet
from headwater_lab.api.observer import SILENT, Observer
from headwater_lab.data.base import DataSettings
from headwater_lab.recipe.messages import list_problems
from headwater_lab.recipe.start_section import Change, changed_config
from headwater_lab.training.model_changes import change_model, measure_change
from headwater_lab.training.records import Event
from headwater_lab.training.saving import write_model
from headwater_lab.training.trained_models import (
    Trained,
    build_data,
    default_rows,
    open_source,
    open_trained,
    sample_rows,
    warn_changed_data,
)
from headwater_lab.util.machine import check_memory
from headwater_lab.util.model_kinds import AnyModel

# Rows in a sample of text.
ROWS = 32


@quiet()
def grow(
    model: Any,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    *,
    out: Path | None = None,
    watch: Observer = SILENT,
    trust: Sequence[str] = (),
    **arguments: Any,
) -> AnyModel:
    """Make a larger model from a trained one, like `headwater grow`: by default without changing its function.

    model: a headwater model or one of a family that `retrofit` converts, which is not changed; the folder of a
    checkpoint or run; or a name on the hub. out: also write a checkpoint to this new folder, with the optimizer's
    state. watch: receives the change of the function, which is measured only for it. trust: as in `train`. The rest are
    the fields of `headwater.growth.GrowthOptions`. Raises `HeadwaterError`.
    """
    trust_names(trust)
    pairs = {"attention_pairs": attention_pairs, "ffn_pairs": ffn_pairs}
    try:
        change = Change.model_validate({"grow": pairs | arguments})
    except ValidationError as error:
        raise HeadwaterError(next(list_problems(error, Change, DataSettings, {}))) from error
    try:
        trained = _open_model("grow", model, with_state=out is not None)
    except HeadwaterError as error:
        if out is None:
            raise
        trained = _open_model("grow", model)  # raises every error that is not about the state
        watch.tell(str(error))
    check_full_precision(trained.model)
    check_memory(changed_config(trained.model.config, change))
    ids, where = _tell_converted(trained, watch)
    grown = change_model(trained, change)
    if watch.listens:
        moved = _describe_change(measure_change(trained.model, grown.model, ids))
        old_size, new_size = trained.model.num_parameters(), grown.model.num_parameters()
        watch.say(f"{old_size:,} → {new_size:,} parameters; {moved}, on {where}")
        learning = sum(parameter.numel() for parameter in grown.model.parameters() if parameter.requires_grad)
        if learning < new_size:
            watch.say(f"{learning:,} of them are trained: the new pairs")
    return _write_model(grown, out, watch)


@quiet()
def shrink(
    checkpoint: Path,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    *,
    text: Path | None = None,
    rows: int = ROWS,
    out: Path | None = None,
    watch: Observer = SILENT,
) -> AnyModel:
    """Remove the parameter tokens that matter least in `rows` rows of a text, like `headwater shrink`.

    text: default: the model's training data. out, watch: as in `grow`. Raises `HeadwaterError`.
    """
    trained = open_trained(checkpoint)
    ids = sample_rows(trained, text, rows)
    calibrated = len(ids) if text is None else len(ids) - len(ids) // 4
    weights = growth.importance(trained.model, ({trained.model.main_input_name: row[None]} for row in ids[:calibrated]))
    model = growth.shrink(trained.model, weights, attention_pairs, ffn_pairs)
    if text is None and (data := build_data(trained.history)) is not None:
        if warning := warn_changed_data(trained, data):
            watch.tell(warning)
        old_loss, new_loss = (
            measure_held_out(f"measuring the {which} model", measured_model, data, watch)[data.metric]
            for which, measured_model in (("old", trained.model), ("new", model))
        )
        moved = {"before": old_loss, "after": new_loss}
        says = f"held-out {data.metric.replace('_', ' ')} {old_loss:.4f} → {new_loss:.4f}"
    else:  # continue with the rest of the text
        moved = measure_change(trained.model, model, ids[calibrated:])
        says = f"{_describe_change(moved)} (last quarter)"
    watch.say(f"{trained.model.num_parameters():,} → {model.num_parameters():,} parameters; {says}")
    details = {"attention_pairs": attention_pairs, "ffn_pairs": ffn_pairs} | moved
    return _write_model(trained.after("shrunk", details, model=model), out, watch)


@quiet()
def retrofit(
    model: Any,
    mechanisms: Mapping[str, Mapping[str, Any]] | Sequence[str] | str = (),
    *,
    allow_change: bool = False,
    layout: str | None = None,
    settings: Mapping[str, Any] | None = None,
    family: str | None = None,
    text: Path | None = None,
    rows: int = ROWS,
    out: Path | None = None,
    watch: Observer = SILENT,
    trust: Sequence[str] = (),
) -> AnyModel:
    """Convert a trained model, and add mechanisms without changing its function, like `headwater retrofit`.

    model: a headwater model or one of a supported family, a checkpoint's folder, a file of tensors, or a name on the
    hub; it is not changed. mechanisms: names, or name -> options; not needed to convert a model of another family.
    allow_change: allow mechanisms that change the function. layout: the paper's code that wrote the tensors, whose
    config needs `settings`. family: the family of a model from outside headwater, "package.module:NAME" for an external
    one; default: from its config. text: changes are measured on `rows` rows of it. out, watch: as in `grow`. trust: as
    in `train`. Raises `HeadwaterError`.
    """
    trust_names(trust)
    by_name = _name_mechanisms(mechanisms)
    trained = _open_model("retrofit", model, layout, settings, family)
    if not trained.foreign and not by_name:
        raise HeadwaterError(f"{trained.source!r} is already a headwater model; name mechanisms to add.")
    ids, where = _tell_converted(trained, watch, text, rows)
    details: dict[str, Any] = {}
    result = trained.model
    if by_name:
        options = {name: dict(fields) for name, fields in by_name.items()}
        result = add_mechanisms(trained.model, options, allow_change)
        details["mechanisms"] = {name: (result.config.mechanisms or {})[name] for name in by_name}
        if watch.listens or out is not None:
            details["moved"] = moved = measure_change(trained.model, result, ids)
            new = result.num_parameters() - trained.model.num_parameters()
            watch.say(f"{', '.join(by_name)} added, {new:+,} parameters: {_describe_change(moved)}, on {where}")
    return _write_model(trained.after("retrofitted", details, model=result) if details else trained, out, watch)


def _name_mechanisms(mechanisms: Any) -> Mapping[str, Mapping[str, Any]]:
    """Read mechanisms by name, with their options. Raises `HeadwaterError`."""
    trust_names_in(mechanisms)
    by_name = as_mapping([mechanisms] if isinstance(mechanisms, str) else mechanisms)
    if not isinstance(by_name, Mapping):
        raise HeadwaterError(f"mechanisms must be names, or a mapping name: options, not {shown(by_name)}.")
    return by_name


def _open_model(
    label: str,
    model: Any,
    layout: str | None = None,
    settings: Mapping[str, Any] | None = None,
    family: str | None = None,
    *,
    with_state: bool = False,
) -> Trained:
    """Open a headwater model from any model, folder or name. label: for the message."""
    if isinstance(model, str | Path):
        return open_source(str(model), layout, dict(settings or {}), family, with_state=with_state)
    source = f"A {type(model).__name__}"
    if not isinstance(model, PreTrainedModel):
        raise HeadwaterError(f"{label} takes a model, a folder or a name on the hub, not {type(model).__name__!r}.")
    if isinstance(model, HeadwaterPreTrainedModel):
        if family is not None:
            raise HeadwaterError(f"{source} is already a headwater model; leave out family={family!r}.")
        return Trained(source, cast("AnyModel", model), None, [], {})
    event = Event(kind="retrofitted", details={"source": source, "family": family or model.config.model_type})
    return Trained(source, from_transformers(model, family), None, [event], {}, foreign=True, original=model)


def _tell_converted(
    trained: Trained, watch: Observer, text: Path | None = None, rows: int = ROWS
) -> tuple[Tensor, str]:
    """Find rows to measure changes on, and describe them; report the change from another family's model, if it was one.

    That model is then released.
    """
    if text is None:
        ids, where = default_rows(trained)
    else:
        ids = sample_rows(trained, text, rows)
        where = f"{ids.numel():,} tokens of {text.name}"
    if (dtype := trained.model.dtype).itemsize < 4:
        where += f", in {str(dtype).removeprefix('torch.')}, whose rounding counts as a difference"
    if trained.original is not None and watch.listens:
        moved = measure_change(trained.original, trained.model, ids)
        watch.say(f"{trained.original.config.model_type} → headwater: {_describe_change(moved)}, on {where}")
    trained.original = None
    return ids, where


def _describe_change(moved: dict[str, float]) -> str:
    loss = ""
    if "loss_before" in moved:  # images have no labels here, and so no loss
        loss = f", loss {moved['loss_before']:.4f} → {moved['loss_after']:.4f} nats per token"
    return f"logits differ by {moved['logits']:.1e} relative to the largest, KL {max(moved['kl'], 0.0):.1e}{loss}"


def _write_model(trained: Trained, out: Path | None, watch: Observer) -> AnyModel:
    """Return the model, and write it to a new folder if there is one."""
    if out is not None:
        write_model(out, trained.model, trained.tokenizer, trained.history, trained.state or None)
        lines = describe_written(out, trained.model.config, trained.history)
        if trained.tokenizer is None:
            kind = "image processor" if trained.model.main_input_name == "pixel_values" else "tokenizer"
            lines.append(f"The source has no {kind}, so none is written.")
        watch.say("\n".join(lines))
    return trained.model
