"""The commands as functions, which `headwater_lab` provides: see docs/python.md.

A recipe is a dict, the path of a file, or the name of a shipped one. Results have `table()`, a list of rows as dicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from headwater.plugins import outside
from headwater.util import extras
from headwater.util.errors import HeadwaterError, either, shown
from headwater.util.files import local

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwater.config.text import HeadwaterConfig
    from headwater.cost import ImagePrice, Price
    from headwater.cost.hardware import Hardware
    from headwater.models.kinds import AnyModel
    from headwater_lab.comparison import OnChange, Outcome
    from headwater_lab.papers.result import Reproduction
    from headwater_lab.recipe.schema import Recipe
    from headwater_lab.reports import Comparison
    from headwater_lab.training.loop import OnEvent
    from headwater_lab.training.records import RunRecord

PathLike = str | Path


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars for weights; afterwards they are as the caller had them."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    shows, hub_shows = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()
            if not hub_shows:
                disable_progress_bars()


@dataclass(frozen=True)
class Run:
    """A run: its folder, and its record (docs/records.md)."""

    folder: Path
    record: RunRecord

    def table(self) -> list[dict[str, Any]]:
        """A row per evaluation: the step, and every measure."""
        return [{"step": point.step, **point.metrics} for point in self.record.held_out]

    @quiet()
    def model(self) -> AnyModel:
        """The trained model."""
        from headwater_lab.training.checkpoint import load_model
        from headwater_lab.training.places import newest_checkpoint

        return load_model(newest_checkpoint(self.folder))


@dataclass(frozen=True)
class Compared:
    """Comparisons, one for each size; `failed`: the trials that failed."""

    folder: Path
    comparisons: list[Comparison]
    failed: list[Outcome]

    def table(self) -> list[dict[str, Any]]:
        """A row per arm (and size), as text, with the columns of the report's table."""
        from headwater_lab.reports import cells, columns

        return [
            ({"size": one.size} if one.size is not None else {})
            | dict(zip(["arm", *columns(one)[1:]], cells(summary, one), strict=True))
            for one in self.comparisons
            for summary in one.summaries
        ]

    def evidence(self) -> list[dict[str, Any]]:
        """With `sequential: true`, a row per arm, size and look: arm, seeds, difference, low, high; else no rows."""
        return [
            ({"size": one.size} if one.size is not None else {})
            | {"arm": summary.arm, "seeds": look.pairs, "difference": look.mean}
            | dict(zip(("low", "high"), look.interval or (None, None), strict=True))
            for one in self.comparisons
            for summary in one.summaries
            for look in (summary.paired.looks if summary.paired is not None else ())
        ]

    def means(self) -> dict[str, float | None]:
        """The mean of the deciding metric of each arm, at the last size."""
        return {summary.arm: summary.mean for summary in self.comparisons[-1].summaries}

    def report(self) -> Path:
        """Write the HTML page of the folder, with its pictures, and return its path."""
        from headwater_lab.reports import write_report

        return write_report(self.folder)


@dataclass(frozen=True)
class Plan:
    """Prices of models, of text or of images."""

    prices: list[Price] | list[ImagePrice]
    configs: dict[str, HeadwaterConfig]

    def table(self) -> list[dict[str, Any]]:
        """A row per model and context, or size of images."""
        from headwater.cost import ImagePrice

        return [
            {
                "model": price.name,
                "image_size": at.image_size,
                "parameters": sum(price.parameters.values()),
                "training_flops_per_image": at.training,
                "activation_bytes": at.activation_bytes,
                "days": at.limits and at.limits.days,
            }
            if isinstance(price, ImagePrice)
            else {
                "model": price.name,
                "context": at.context,
                "parameters": sum(price.parameters.values()),
                "training_flops_per_token": at.training_causal,
                "cache_bytes_per_token": price.cache_bytes_per_token,
                "cache_bytes": at.cache_bytes,
                "activation_bytes": at.activation_bytes,
                "days": at.limits and at.limits.days,
            }
            for price in self.prices
            for at in cast(list[Any], price.at)
        ]

    def picture(self, contexts: Sequence[int] = (1024, 4096, 16384, 32768)) -> Figure:
        """Forward FLOPs per token against context. Raises `HeadwaterError` for image models."""
        from headwater.cost import figure

        return figure(self.configs, contexts)


@dataclass(frozen=True)
class Reproduced:
    """A paper's table: its figures and ours, and its claims; `failed`: the trials that failed and are not in it."""

    result: Reproduction
    folder: Path
    failed: list[Outcome] = field(default_factory=list)

    def table(self) -> list[dict[str, Any]]:
        """A row for each of the paper's rows: its label, and for each column the paper's figure and ours, as text."""
        from headwater_lab.papers.result import columns_of, texts

        names = ["", *(name for _, name, _ in columns_of(self.result))]
        return [dict(zip(names, row, strict=False)) for row in texts(self.result)]

    def claims(self) -> list[tuple[str, str]]:
        """The paper's claims, and the verdicts."""
        return [(one.says if isinstance(one.says, str) else str(one.says), one.verdict) for one in self.result.claims]

    def report(self) -> Path:
        """Write the table's page, and return its path."""
        from headwater_lab.papers.result import write

        return write(self.result, self.folder)


@quiet()
def train(
    recipe: Recipe | Mapping[str, Any] | PathLike,
    out: PathLike | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    on_event: OnEvent | None = None,
    trust: Sequence[str] = (),
) -> Run:
    """Train the model of a recipe, stage by stage if it has stages, like `headwater train`.

    out: the run's folder; default: runs/NAME. resume: continue an interrupted run. on_event: called with (step, None)
    after each step, and with (step, point) for each new point of the record. trust: code from outside that checkpoints
    may name, "package.module" or "package.module:Class". Raises `HeadwaterError`.
    """
    outside.trust(trust)
    from headwater_lab.recipe.schema import read_recipe
    from headwater_lab.training.stages import train_stages

    loaded = read_recipe(recipe, overrides)
    folder = local(out, "out") if out is not None else Path("runs") / loaded.name
    return Run(folder, train_stages(loaded, folder, resume=resume, on_event=on_event))


@quiet()
def compare(
    recipe: Recipe | Mapping[str, Any] | PathLike,
    out: PathLike | None = None,
    *,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    on_change: OnChange | None = None,
    trust: Sequence[str] = (),
) -> Compared:
    """Train the arms of a recipe side by side, like `headwater compare`. Call it again to resume.

    Trials run in separate processes that do not import the caller, so a script needs no `__main__` guard.
    on_change: called with (job, steps done, "running" | "finished" | "failed"). trust: as in `train`.
    Raises `HeadwaterError`.
    """
    outside.trust(trust)
    extras.check("compare")
    import headwater_lab.comparison as comparing
    from headwater.plugins.registry import MECHANISMS, as_mapping
    from headwater.util.output_folder import occupied
    from headwater_lab.recipe.schema import read_recipe
    from headwater_lab.reports import comparisons

    loaded = read_recipe(recipe, overrides)
    if loaded.compare is None:
        raise HeadwaterError(f"The recipe {loaded.name!r} has no compare section; add one.")
    folder = local(out, "out") if out is not None else Path("runs") / loaded.name
    with occupied(folder):
        for trial in comparing.trials_of(loaded, folder):
            if unknown := as_mapping(trial.recipe.model.get("mechanisms") or {}).keys() & MECHANISMS.added.keys():
                raise HeadwaterError(
                    f"Mechanism {min(unknown)!r} was registered in this process, and a comparison trains in others; "
                    "put its class into a module, and name it as module:Class."
                )
        outcomes = comparing.compare(loaded, folder, workers, on_change)
    found = [one for one in comparisons(folder) if one.name == loaded.name]
    return Compared(folder, found, [outcome for outcome in outcomes if outcome.record is None])


def plan(
    *models: HeadwaterConfig | Recipe | Mapping[str, Any] | PathLike,
    overrides: Sequence[str] = (),
    vocabulary: int | None = None,
    context: Sequence[int] | int | None = None,
    tokens: str | float | None = None,
    images: str | float | None = None,
    hardware: str | Hardware | None = None,
    batch: int | None = None,
    devices: int | None = None,
    precision: str | None = None,
    mfu: float = 0.4,
    trust: Sequence[str] = (),
) -> Plan:
    """Estimate the cost of models before training, like `headwater plan`.

    models: configs, recipes, presets by name, config.json files, checkpoints or runs. overrides: "field=value" for all
    models, or "training.field=value" for how they are trained. vocabulary: vocabulary size, instead of the models'.
    context: default: the first model's. tokens, or of image models images: a number, or as in "300B". hardware: a
    device, also by name, or "this". batch, devices, precision, mfu: as in `headwater.cost.price`. If the first model
    is a recipe, tokens or images, batch (rows per device), devices and precision default to its own. trust: as in
    `train`. Raises `HeadwaterError`.
    """
    outside.trust(trust)
    from headwater_lab.training import estimate as priced

    found = priced.planned(models, overrides, vocabulary)
    prices = priced.prices(
        found,
        context=context,
        tokens=tokens,
        images=images,
        hardware=hardware,
        batch=batch,
        devices=devices,
        precision=precision,
        mfu=mfu,
    )
    return Plan(prices, {name: one.config for name, one in found.items()})


@quiet()
def grow(
    model: Any,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    *,
    trust: Sequence[str] = (),
    **arguments: Any,
) -> AnyModel:
    """A larger model from a trained one, like `headwater grow`: by default without changing its function.

    model: a headwater model or one of a family that `retrofit` converts, which is not changed; the folder of a
    checkpoint or run; or a name on the hub. trust: as in `train`. The rest are the fields of
    `headwater.growth.GrowthOptions`.
    Raises `HeadwaterError`.
    """
    outside.trust(trust)
    from headwater import growth

    return growth.grow(_opened("grow", model)[0], attention_pairs, ffn_pairs, **arguments)


@quiet()
def retrofit(
    model: Any,
    mechanisms: Mapping[str, Mapping[str, Any]] | Sequence[str] | str = (),
    *,
    allow_change: bool = False,
    family: str | None = None,
    trust: Sequence[str] = (),
) -> AnyModel:
    """Convert a trained model, and add mechanisms without changing its function, like `headwater retrofit`.

    model: a headwater model or one of a supported family, a checkpoint's folder, or a name on the hub; it is not
    changed. mechanisms: names, or name -> options; not needed to convert a model of another family. allow_change: allow
    mechanisms that change the function. family: the family of a model that is not headwater's, "package.module:NAME"
    for an outside one; default: from its config. trust: as in `train`. Raises `HeadwaterError`.
    """
    outside.trust(trust)
    outside.trust_names_in(mechanisms)
    from headwater.conversion import add_mechanisms
    from headwater.plugins.registry import as_mapping

    given = as_mapping([mechanisms] if isinstance(mechanisms, str) else mechanisms)
    if not isinstance(given, Mapping):
        raise HeadwaterError(f"mechanisms must be names, or a mapping name: options, not {shown(given)}.")
    source = repr(str(model)) if isinstance(model, str | Path) else f"A {type(model).__name__}"
    opened, foreign = _opened("retrofit", model, family)
    if not foreign and family is not None:
        raise HeadwaterError(f"{source} is already a headwater model; leave out family={family!r}.")
    if not foreign and not given:
        raise HeadwaterError(f"{source} is already a headwater model; name mechanisms to add.")
    added = {name: dict(options) for name, options in given.items()}
    return add_mechanisms(opened, added, allow_change) if added else opened


def _opened(what: str, model: Any, family: str | None = None) -> tuple[AnyModel, bool]:
    """A headwater model from any model, folder or name, and whether it was another family's. what: for the message."""
    from transformers import PreTrainedModel

    from headwater.conversion import from_transformers
    from headwater.models.kinds import MODEL_TYPES
    from headwater.models.load import model_type
    from headwater.models.pretrained import HeadwaterPreTrainedModel
    from headwater_lab.training.checkpoint import load_model
    from headwater_lab.training.places import newest_checkpoint

    if not isinstance(model, str | Path | PreTrainedModel):
        raise HeadwaterError(f"{what} takes a model, a folder or a name on the hub, not {type(model).__name__!r}.")
    if isinstance(model, str | Path) and local(model).is_dir():
        path = newest_checkpoint(Path(model))
        model = load_model(path) if model_type(path) in MODEL_TYPES else path
    if isinstance(model, HeadwaterPreTrainedModel):
        return cast("AnyModel", model), False
    return from_transformers(model, family), True


@quiet()
def reproduce(
    table: str,
    scale: Literal["cpu", "gpu", "paper"] = "cpu",
    out: PathLike = "runs/reproduce",
    *,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    task_files: PathLike | None = None,
    device: str = "cpu",
    sequential: bool = False,
    max_seeds: int = 30,
    trust: Sequence[str] = (),
) -> Reproduced:
    """Train the models behind a paper's table or figure and judge its claims, like `headwater reproduce`.

    Call it again to resume. task_files: task files to use first; device: where to measure what the records lack.
    sequential: add seeds, up to `max_seeds`, until claims about mean differences are decided. trust: as in `train`.
    Raises `HeadwaterError`, after training the rest, if runs need several devices: it names their commands.
    """
    outside.trust(trust)
    from headwater_lab.comparison.prices import slug
    from headwater_lab.papers.result import computed, reproduction
    from headwater_lab.papers.table import SCALES
    from headwater_lab.papers.table import table as table_of
    from headwater_lab.papers.work import check_not_begun_otherwise, prepare, train_sequentially
    from headwater_lab.papers.work import train as train_work

    folder, files = local(out, "out"), None if task_files is None else local(task_files, "task_files")
    known = table_of(table)
    if scale not in SCALES:
        raise HeadwaterError(f"scale must be {either(SCALES)}, not {shown(scale)}.")
    if known.computed:
        if overrides:
            raise HeadwaterError(
                f"{table} is computed without training, so {overrides[0]!r} has no effect; leave it out."
            )
        return Reproduced(computed(table), folder / slug(table))
    work = prepare(table, scale, folder, overrides)
    work.check_tasks(files)
    trained, until = work, None
    if sequential:
        until = (work, max_seeds)
        outcomes, trained = train_sequentially(
            work, workers, lambda *_: _unheard, lambda *_: _unheard, max_seeds, files, device
        )
    else:
        check_not_begun_otherwise(work)
        outcomes = train_work(work, workers, lambda *_: _unheard, lambda *_: _unheard)
    failed = [outcome for outcome in outcomes if outcome.record is None]
    if commands := work.commands():
        raise HeadwaterError(f"{work.left()} function: run {'; '.join(commands)}, then call it again.")
    if len(work.missing()) == sum(len(place.seeds) for place in work.trained):
        why = f": {failed[0].label} failed: {failed[0].error}" if failed else ""
        raise HeadwaterError(f"No run of {table} is finished{why.rstrip('.')}.")
    return Reproduced(reproduction(trained, files, device, until), work.folder, failed)


def _unheard(*said: Any) -> None:
    pass
