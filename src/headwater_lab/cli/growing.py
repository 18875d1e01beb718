"""`headwater grow`, `shrink`, `merge`, `retrofit`: make a new model from a trained one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headwater.util.errors import HeadwaterError, shown
from headwater.util.terminal import lined
from headwater_lab.cli.common import check_outside, mechanisms_of, new_folder, say, stderr, stdout, tell, tell_model
from headwater_lab.cli.options import CheckpointPath, Values, exclude, need
from headwater_lab.cli.progress import measure_with_progress

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from headwater.models.causal_lm import HeadwaterForCausalLM
    from headwater_lab.recipe.schema import Change
    from headwater_lab.training.models import Trained
    from headwater_lab.training.records import Event

# In a sample of a text.
ROWS = 32

Out = Annotated[Path | None, Values(file_okay=False, help="The new folder. Default: next to the source.")]


def grow(checkpoint: str, fields: Sequence[str] = (), *, out: Out = None) -> None:
    """Make a trained model deeper or wider, or add parameter tokens, by default without changing its function.

    checkpoint: A checkpoint's or a run's folder, or a Hugging Face model: its folder, or its name on the hub.
    fields: What to grow, as `grow:` in a recipe has it: num_hidden_layers=16, hidden_size=512, ffn_pairs=1024,
        method=lemon, …
    """
    from headwater.cost.counts import check_memory
    from headwater_lab.recipe.schema import changed_config
    from headwater_lab.training.models import changed, open_source

    change = _change_of(fields)
    target = new_folder(out, checkpoint, "grown")
    try:
        trained = open_source(checkpoint, with_state=True)
    except HeadwaterError as error:
        trained = open_source(checkpoint)  # which raises what is not about the state
        tell(str(error))
    check_memory(changed_config(trained.model.config, change))
    ids, where = _some_rows(trained)
    _say_converted(trained, ids, where)
    grown = changed(trained, change)
    before, after = trained.model.num_parameters(), grown.model.num_parameters()
    say(f"{before:,} → {after:,} parameters; {_said(_moved(trained.model, grown.model, ids), where)}")
    if any(not parameter.requires_grad for parameter in grown.model.parameters()):
        learning = sum(parameter.numel() for parameter in grown.model.parameters() if parameter.requires_grad)
        say(f"{learning:,} of them learn, the new pairs")
    _write(target, grown, grown.model, None)


def _change_of(fields: Sequence[str]) -> Change:
    """The growth that these fields describe. Raises `HeadwaterError`."""
    from pydantic import ValidationError

    from headwater_lab.recipe.schema import Change, values_of

    try:
        return Change.model_validate({"grow": values_of(fields)})
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise HeadwaterError(str(first["ctx"]["error"])) from error
        message = f"{first['msg'][0].lower()}{first['msg'][1:]}, not {shown(first['input'])}."
        raise HeadwaterError(f"{'.'.join(map(str, first['loc'][1:]))}: {message}") from error


def shrink(
    checkpoint: CheckpointPath,
    *,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    text: Path | None = None,
    rows: Annotated[int, Values(min=4, max=2**16)] = ROWS,
    out: Out = None,
) -> None:
    """Remove the parameter tokens that matter least, by mean |score|·‖V‖ over a sample.

    attention_pairs: Pairs of each attention projection after the change.
    ffn_pairs: Pairs of each feed-forward after the change.
    text: Measure on this text; default: the model's training data.
    rows: Rows in the sample.
    """
    from headwater.growth import importance
    from headwater.growth import shrink as without
    from headwater_lab.training.models import changed_text, data_of, open_trained, sample_rows
    from headwater_lab.training.records import Event

    target = new_folder(out, checkpoint, "shrunk")
    trained = open_trained(checkpoint)
    ids = sample_rows(trained, text, rows)
    seen = len(ids) if text is None else len(ids) - len(ids) // 4
    weights = importance(trained.model, ({trained.model.main_input_name: row[None]} for row in ids[:seen]))
    model = without(trained.model, weights, attention_pairs, ffn_pairs)
    before, after = trained.model.num_parameters(), model.num_parameters()
    if text is None and (data := data_of(trained.history)) is not None:
        if warning := changed_text(trained, data):
            tell(warning)
        name = data.metric
        was, now = (
            measure_with_progress(f"measuring the {which} model", one, data)[name]
            for which, one in (("old", trained.model), ("new", model))
        )
        measured, said = {"before": was, "after": now}, f"held-out {name.replace('_', ' ')} {was:.4f} → {now:.4f}"
    else:  # a text: the rest of it
        measured = _moved(trained.model, model, ids[seen:])
        said = f"{_said(measured)} (last quarter)"
    say(f"{before:,} → {after:,} parameters; {said}")
    details = {"attention_pairs": attention_pairs, "ffn_pairs": ffn_pairs} | measured
    _write(target, trained, model, Event(kind="shrunk", details=details))


def merge(base: Path, grown: Sequence[Path], *, out: Out = None) -> None:
    """Merge grown copies of one model that were trained separately, and measure all of them on each one's data.

    base: The checkpoint that the others were grown from.
    grown: Two or more grown copies of it, trained separately.
    """
    from headwater.growth import merge as joined
    from headwater_lab.training.models import changed_text, data_of, open_trained
    from headwater_lab.training.records import Event

    target = new_folder(out, base, "merged")
    for path in grown:
        check_outside(target, path)
    root, copies = open_trained(base), [open_trained(path) for path in grown]
    sources = []
    for path, copy in zip(grown, copies, strict=True):
        if copy.history[: len(root.history)] != root.history:
            raise HeadwaterError(
                f"{str(path)!r} was not grown from {str(base)!r}, according to its history; name its own base."
            )
        data = data_of(copy.history[len(root.history) :])
        if data is None:
            raise HeadwaterError(f"{str(path)!r} has not been trained since it was grown; train it, then merge.")
        if warning := changed_text(copy, data):
            tell(warning)
        sources.append(data)
    model = joined(root.model, *(copy.model for copy in copies))
    models = {"base": root.model} | dict(zip(map(str, grown), (copy.model for copy in copies), strict=True))
    models["merged"] = model
    table = lined()
    table.add_column("held-out measure", no_wrap=True)
    columns: list[dict[str, float]] = []
    for path, data in zip(grown, sources, strict=True):
        table.add_column(f"{data.metric.replace('_', ' ')} on the data of {path}", justify="right")
        columns.append(
            {name: measure_with_progress(f"measuring {name}", one, data)[data.metric] for name, one in models.items()}
        )
    for name in models:
        table.add_row(name, *(f"{column[name]:.4f}" for column in columns))
    details = {"merged": [str(path) for path in grown], "metrics": columns}
    before = [event for copy in copies for event in copy.history[len(root.history) :]]
    root.history += before
    stdout.print(table)
    _write(target, root, model, Event(kind="merged", details=details))


def retrofit(
    source: str,
    *,
    mechanism: Sequence[str] = (),
    allow_change: bool = False,
    layout: str | None = None,
    family: str | None = None,
    set: Sequence[str] = (),
    text: Path | None = None,
    rows: Annotated[int, Values(min=4, max=2**16)] = ROWS,
    out: Out = None,
) -> None:
    """Convert a trained model to a headwater checkpoint, and add mechanisms without changing its logits.

    source: A folder, a file of tensors, or a name on the Hugging Face hub.
    mechanism: Mechanism to add: NAME, or "NAME={option: value}"; repeatable.
    allow_change: Allow mechanisms that change what the model computes.
    layout: An original checkpoint's layout: tokenformer, resformer, kv-shifting, nanochat.
    family: The model's family; default: from its config.
    set: With --layout: a config field, key=value; repeatable.
    text: Measure on this text; default: Python's language reference.
    rows: Rows in the sample of --text.
    """
    from headwater.conversion import add_mechanisms
    from headwater_lab.recipe.schema import values_of
    from headwater_lab.training.models import open_source
    from headwater_lab.training.records import Event

    need("--layout", "--set")
    need("--text", "--rows")
    need("--mechanism", "--allow-change")
    exclude("--layout", "--family")
    mechanisms = mechanisms_of(mechanism)
    target = new_folder(out, source, "headwater")
    trained = open_source(source, layout, values_of(set), family)
    model, event = trained.model, None
    ids, where = _some_rows(trained, text, rows)
    _say_converted(trained, ids, where)
    if mechanisms:
        added = add_mechanisms(model, mechanisms, allow_change)
        moved = _moved(model, added, ids)
        new = added.num_parameters() - model.num_parameters()
        say(f"{', '.join(mechanisms)} added, {new:+,} parameters: {_said(moved, where)}")
        details = {"mechanisms": {name: (added.config.mechanisms or {})[name] for name in mechanisms}, "moved": moved}
        model, event = added, Event(kind="retrofitted", details=details)
    elif not trained.foreign:
        raise HeadwaterError(f"{source!r} is already a headwater model; add a mechanism with --mechanism NAME.")
    _write(target, trained, model, event)


def _some_rows(trained: Trained, text: Path | None = None, rows: int = ROWS) -> tuple[Tensor, str]:
    """Rows of a text, or of one that is always available, and a description of them."""
    from headwater_lab.training.models import known_rows, sample_rows

    if text is None:
        return known_rows(trained)
    ids = sample_rows(trained, text, rows)
    return ids, f"{ids.numel():,} tokens of {text.name}"


def _moved(before: PreTrainedModel, after: PreTrainedModel, ids: Tensor) -> dict[str, float]:
    from headwater.conversion import function_change

    return function_change(before, after, ids)


def _say_converted(trained: Trained, ids: Tensor, where: str) -> None:
    """What changed when another family's model became headwater's; that model is then let go."""
    if trained.original is not None:
        moved = _moved(trained.original, trained.model, ids)
        say(f"{trained.original.config.model_type} → headwater: {_said(moved, where)}")
        trained.original = None


def _said(moved: dict[str, float], where: str = "") -> str:
    loss = ""
    if "loss_before" in moved:  # not of images, which have no labels here
        loss = f", loss {moved['loss_before']:.4f} → {moved['loss_after']:.4f} nats per token"
    return (
        f"logits differ by {moved['logits']:.1e} relative to the largest, KL {max(moved['kl'], 0.0):.1e}{loss}"
        f"{where and f', on {where}'}"
    )


def _write(target: Path, trained: Trained, model: HeadwaterForCausalLM, event: Event | None) -> None:
    from headwater_lab.training.checkpoints import write_model

    history = trained.history if event is None else [*trained.history, event]
    write_model(target, model, trained.tokenizer, history, trained.state if event is None else None)
    tell_model(target)
    if trained.tokenizer is None:
        what = "image processor" if model.main_input_name == "pixel_values" else "tokenizer"
        stderr.print(f"The source has no {what}, so none is written.", style="dim")
