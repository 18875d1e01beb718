"""Recipes: one YAML file defines the model, data, training and comparison."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, SerializeAsAny, ValidationError, model_validator

from headwater.config.presets import PRESETS, preset
from headwater.config.text import HeadwaterConfig
from headwater.cost.counts import embedding_parameters, parameters
from headwater.util.errors import HeadwaterError, NotTrusted
from headwater_lab.data.base import DATA, Data, DataSettings, DataShape
from headwater_lab.data.images.image_data import ImageSettings
from headwater_lab.data.language import LanguageSettings
from headwater_lab.optimization.laws import LAWS, Hyperparameters
from headwater_lab.optimization.schedules import find_decay_start
from headwater_lab.recipe.comparison_section import Compare
from headwater_lab.recipe.messages import Sections, build_refusal, find_untrusted, list_problems
from headwater_lab.recipe.model_section import (
    IMAGE_FIELDS,
    MODEL_FIELDS,
    ModelFields,
    image_config,
    map_mechanisms,
    text_config,
    wrong_fields,
)
from headwater_lab.recipe.overrides import merge_values
from headwater_lab.recipe.start_section import Start, TrainingStage, changed_config
from headwater_lab.recipe.training_section import Reporting, Training
from headwater_lab.util.names import file_name, is_file_name
from headwater_lab.util.settings import Seed, Settings

# Increase this if a default changes: fields at their defaults are not part of the identity, so records of runs with the
# old default would otherwise count as runs with the new one.
IDENTITY_VERSION = 2
# Fields that do not affect the result.
NOT_DECISIVE: Any = {
    "name": True,
    "title": True,
    "reporting": True,
    "compare": True,
    "training": {"timeout_minutes"},
    "data": {"workers"},
}


# Fields of `training:` that matter only once the rate of the schedule wsd decays.
DECAY_FIELDS = ("steps", "decay_fraction", "decay_form", "min_learning_rate_ratio")


def _check_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(
            f"the name {name!r} cannot be a folder's: use up to 200 letters, digits, spaces, dots and dashes, "
            f"without a slash or a leading dot; to choose the run's folder, use --out"
        )
    return name


def find_data_class(values: Any) -> type[DataSettings]:
    """Find the class that reads `data:`, by its kind. Raises `ValueError` without a known kind."""
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or not (":" in kind or kind in DATA.names):
        raise ValueError(f"data.kind must be one of: {', '.join(sorted(DATA.names))}.")
    return DATA.resolve(kind)


def read_data(values: Any) -> DataSettings:
    """Read `data:` by its kind. Raises `ValueError`, pydantic's `ValidationError` included."""
    return values if isinstance(values, DataSettings) else find_data_class(values).model_validate(values)


class Recipe(Settings):
    """A whole recipe file."""

    name: Annotated[str, AfterValidator(_check_name)] = "run"
    """Name of the run, whose folder is runs/<name> unless --out names another."""
    title: str = ""
    """One line for reports."""
    seed: Seed = 0
    """Sets the initial value of every parameter, the order of the data, and dropout."""
    model: ModelFields = Field(default_factory=dict)
    """Fields of HeadwaterConfig, and `base: llama | gpt2 | a preset` for its defaults; for images, fields of
    HeadwaterVisionConfig, and `base: vit | a preset`. The vocabulary, and images' size and classes, are the data's."""
    data: Annotated[DataSettings, PlainValidator(read_data), SerializeAsAny()]
    """`kind:` text, prepared, images, or another (docs/reference/data.md), with the fields of that kind."""
    training: Training = Training()
    """Optimization."""
    reporting: Reporting = Reporting()
    """How often to evaluate, save and log."""
    start: Start | None = None
    """Start from this model; then `model:` is the checkpoint's."""
    stages: list[TrainingStage] = []
    """Stages after the training that the other sections describe: change the model and train on."""
    compare: Compare | None = None
    """Variants to train side by side."""

    @model_validator(mode="after")
    def _has_teacher(self) -> Self:
        distillation = self.training.distillation
        if distillation is not None and distillation.teacher is None and self.start is None:
            raise ValueError("training.distillation needs a model to learn from; give start.checkpoint, or its teacher")
        return self

    @property
    def known_size(self) -> int | None:
        """The vocabulary size or the number of classes, if the recipe determines it without its data."""
        if not isinstance(self.data, ImageSettings):
            return self.model.get("vocab_size") or getattr(self.data, "vocab_size", None)
        base = self.model.get("base")
        of_preset = preset(base).num_labels if base in PRESETS else None
        return self.model.get("num_labels") or self.data.known_classes or of_preset

    @property
    def has_mechanisms(self) -> bool:
        """Whether the model may have mechanisms, as far as the recipe shows: a checkpoint may."""
        base = self.model.get("base")
        of_base = preset(base).mechanisms if base in PRESETS else None
        return self.start is not None or bool(self.model.get("mechanisms", of_base))

    @property
    def row_length(self) -> int:
        """Tokens in a row of the data; 1 for images."""
        return getattr(self.data, "context", None) or getattr(self.data, "length", None) or 1

    @property
    def shape(self) -> DataShape:
        """The shape of the data without reading them; an unknown vocabulary is larger than any."""
        return DataShape(self.known_size or (1 if self.unit == "images" else 2**20), self.row_length)

    @property
    def rows(self) -> int:
        """Rows in all steps of training."""
        return self.training.steps * self.training.batch_size * self.training.gradient_accumulation_steps

    @property
    def tokens(self) -> int:
        """Tokens, or images, in all steps of training."""
        return self.rows * self.row_length

    def config_for(self, data: Data | DataShape) -> HeadwaterConfig:
        """The model's config for this data. Raises `HeadwaterError` if fields contradict each other."""
        if isinstance(self.data, ImageSettings):
            return image_config(self.model, self.seed, self.data, data)
        return text_config(self.model, self.seed, data)

    def chain(self, folder: Callable[[str, Recipe], Path]) -> list[tuple[Recipe, Path]]:
        """List the runs of a recipe with stages, in order: plain recipes, each with its folder.

        folder: the folder of a run, by its stage's name ("start" for the first) and its recipe.
        """
        plain = self.model_copy(update={"stages": [], "compare": None})
        runs = [(plain, folder("start", plain))]
        for stage in self.stages:
            previous, checkpoint = runs[-1]
            change = stage.model_dump(mode="json", exclude={"name", "training", "data"})
            values = plain.model_dump(mode="json")
            values |= {
                "name": file_name(f"{self.name}-{stage.name}"),
                "start": change | {"checkpoint": str(checkpoint), "previous": previous.identity},
            }
            values["training"] |= stage.training
            distillation = values["training"].get("distillation")
            if distillation and distillation.get("teacher") is None and self.start is not None:
                values["training"]["distillation"] = distillation | {"teacher": self.start.checkpoint}
            same_kind = stage.data.get("kind", self.data.kind) == self.data.kind
            values["data"] = values["data"] | stage.data if same_kind else stage.data
            recipe = parse(values, f"stage {stage.name!r}")
            runs.append((recipe, folder(stage.name, recipe)))
        return runs

    @property
    def unit(self) -> Literal["tokens", "images"]:
        """The unit of the model's training: tokens or images."""
        return "images" if isinstance(self.data, ImageSettings) else "tokens"

    @property
    def stage_recipes(self) -> list[Recipe]:
        """The recipes of the runs of `chain`, in order, where their folders do not matter."""
        return [recipe for recipe, _ in self.chain(lambda name, _: Path(name))]

    @property
    def stage_names(self) -> list[str]:
        """The names of the runs of `chain`, in order."""
        return ["start", *(stage.name for stage in self.stages)]

    def configs(self, config: HeadwaterConfig) -> list[HeadwaterConfig]:
        """The configs of the runs of `chain`; config: the first one's. Raises `HeadwaterError`."""
        configs = [config]
        for stage in self.stages:
            try:
                configs.append(changed_config(configs[-1], stage))
            except HeadwaterError as error:
                raise HeadwaterError(f"Stage {stage.name!r}: {error}") from error
        return configs

    def check_stages(self) -> None:
        """Raise `HeadwaterError` for a stage that would fail, before earlier stages are trained."""
        runs = self.stage_recipes
        frozen = self.start is not None and self.start.grow is not None and self.start.grow.freeze
        for stage, previous, run in zip(self.stages, runs, runs[1:], strict=False):
            stage.check_state(previous.training.optimizer, run.training.optimizer, frozen)
            frozen = frozen if stage.grow is None else stage.grow.freeze
        _check_one_metric(runs, "Stages are compared")
        if self.start is None and self.stages:  # otherwise the checkpoint determines the model
            self.configs(self.config_for(self.shape))

    def arm(self, name: str, seed: int, size: str | None = None) -> Recipe:
        """Make the recipe of one trial of `compare`: the size's changes, the arm's, then the arm's at that size."""
        assert self.compare is not None
        values = self.model_dump(mode="json", exclude={"compare"})
        of_size = dict(self.compare.sizes[size]) if size is not None else {}
        of_arm = of_size.pop("arms", {}).get(name, {})
        trial = {"seed": seed, "name": file_name(f"{name}-{seed}" if size is None else f"{name}-{size}-{seed}")}
        where = f"arm {name!r}" if size is None else f"arm {name!r} of size {size!r}"
        changes: list[dict[str, Any]] = [of_size, self.compare.arms[name], of_arm, trial]
        for change in changes:
            if "model" in change:
                change = change | {"model": map_mechanisms(change["model"])}
            mechanisms = values["model"].get("mechanisms")
            if mechanisms and isinstance(change.get("model"), dict) and change["model"].get("mechanisms") == {}:
                raise HeadwaterError(
                    f"{where}: empty mechanisms do not remove {', '.join(mechanisms)}, since an arm is merged into the "
                    f"recipe; write mechanisms: null to remove all."
                )
            values = merge_values(values, change)
        return parse(values, where)

    def trials(self) -> dict[tuple[str, str | None], Recipe]:
        """The recipe of each arm, at each size, with the first seed."""
        assert self.compare is not None
        sizes: list[str | None] = [*self.compare.sizes] or [None]
        return {(arm, size): self.arm(arm, self.compare.seeds[0], size) for arm in self.compare.arms for size in sizes}

    @property
    def identity(self) -> str:
        """Return a version and the SHA-256 of all fields that decide the result. Equal identities mean the same run.

        Fields at their defaults are left out, and a previous stage's checkpoint counts by its identity, not its
        folder.
        """
        content = self.model_dump(mode="json", exclude=NOT_DECISIVE, exclude_defaults=True)
        content["data"]["kind"] = self.data.kind
        if content.get("start", {}).get("previous") is not None:
            del content["start"]["checkpoint"]
        # Keys are sorted, but mechanisms apply in order, and the order of a mixture's sources decides which rows
        # are drawn. So these two keep theirs.
        for section, name in (("model", "mechanisms"), ("data", "source")):
            if isinstance(content.get(section, {}).get(name), dict):
                content[section][name] = list(content[section][name].items())
        content = {name: value for name, value in content.items() if value}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"{IDENTITY_VERSION}:{hashlib.sha256(text.encode()).hexdigest()}"

    @property
    def decay_start(self) -> int | None:
        """The step after which the rate decays, up to which the run can be shared; None if it cannot."""
        return None if self.stages else self.training.decay_start

    @property
    def trunk_settings(self) -> tuple[str, int, int | None] | None:
        """What the run up to the start of its decay depends on, points of the record included; None without a decay."""
        if self.decay_start is None:
            return None
        constant = {name: Training.model_fields[name].default for name in DECAY_FIELDS} | {"schedule": "constant"}
        trunk = self.model_copy(update={"training": self.training.model_copy(update=constant)})
        return trunk.identity, self.reporting.log_every, self.reporting.evaluate_every


@contextmanager
def naming_arm(arm: str, size: str | None) -> Iterator[None]:
    """Name an arm of a comparison, at a size, in a `HeadwaterError`."""
    try:
        yield
    except NotTrusted:
        raise
    except HeadwaterError as error:
        raise HeadwaterError(f"Arm {arm!r}{'' if size is None else f' of size {size!r}'}: {error}") from error


def _add_rungs(recipe: Recipe, where: str) -> Recipe:
    """Write the sizes of `compare.ladder` into `compare.sizes`, the smallest first. Raises `HeadwaterError`."""
    section = recipe.compare
    if section is None or (ladder := section.ladder) is None:
        return recipe
    if recipe.start is not None or recipe.stages or recipe.unit == "images":
        raise HeadwaterError(f"{where}: compare.ladder is for whole runs from scratch on text; use compare.sizes.")
    for arm, name in _list_budget_fields(section):
        raise HeadwaterError(
            f"{where}: the arm {arm!r} sets {name}, which compare.ladder sets for all arms; leave it out."
        )
    baseline, sizes = recipe.arm(section.baseline, section.seeds[0]), {}
    for depth, tokens_per_parameter in product(sorted(ladder.depths), sorted(ladder.tokens_per_parameter)):
        shape = ladder.shape(depth)
        model = baseline.model_copy(update={"model": baseline.model | shape})
        config = model.config_for(DataShape(recipe.known_size or 1, recipe.row_length))
        size = sum(parameters(config).values()) - embedding_parameters(config)
        training = _follow_law(ladder.law, size, config.hidden_size, tokens_per_parameter * size, recipe)
        sizes[f"d{depth} ×{tokens_per_parameter:g}"] = {"model": shape, "training": training}
    if section.sizes and section.sizes.keys() != sizes.keys():
        raise HeadwaterError(f"{where}: compare.ladder makes the sizes; leave out compare.sizes.")
    return recipe.model_copy(update={"compare": section.model_copy(update={"sizes": sizes})})


def _list_budget_fields(section: Compare) -> Iterator[tuple[str, str]]:
    """List the arms that set a field by which tokens or the law's rate are set, and the field."""
    for arm, changes in section.arms.items():
        if arm in section.budget_arms:
            continue
        for name in ("steps", "batch_size", "gradient_accumulation_steps", "learning_rate", "warmup_steps", "schedule"):
            if name in (changes.get("training") or {}):
                yield arm, f"training.{name}"
        if "context" in (changes.get("data") or {}):
            yield arm, "data.context"


def _follow_law(law: str, size: int, width: int, tokens: float, recipe: Recipe) -> dict[str, Any]:
    """List the fields of `training:` by a law, for a model of this many parameters without embeddings."""
    base, passes = recipe.training, recipe.training.gradient_accumulation_steps
    unit = recipe.row_length * passes  # tokens of a step for each row in a forward pass
    batch = base.batch_size * unit
    settings = LAWS[law](
        size,
        width,
        tokens,
        Hyperparameters(batch, base.learning_rate, base.warmup_steps * batch, base.decay_fraction, base.weight_decay),
    )
    rows = max(1, round(settings.batch / unit))
    steps, warmup = max(1, round(tokens / (rows * unit))), round(settings.warmup / (rows * unit))
    if (decay := find_decay_start(steps, settings.decay_fraction)) < warmup:
        raise HeadwaterError(
            f"compare.ladder.law={law} sets {steps:,} steps that decay after step {decay:,}, and {warmup:,} steps of "
            f"warm-up, for width {width}; raise compare.ladder.tokens_per_parameter."
        )
    return {
        "steps": steps,
        "batch_size": rows,
        "learning_rate": float(f"{settings.learning_rate:.4g}"),
        "warmup_steps": warmup,
        "schedule": "wsd",
        "decay_fraction": settings.decay_fraction,
        "weight_decay": float(f"{settings.weight_decay:.4g}"),
    }


def _check_one_metric(recipes: Sequence[Recipe], why: str) -> None:
    """Raise `HeadwaterError` if recipes whose results belong together use different metrics."""
    if len({recipe.unit for recipe in recipes}) > 1:
        raise HeadwaterError(f"{why} with data of one sort; use either images or text for all.")
    data = [recipe.data for recipe in recipes if isinstance(recipe.data, LanguageSettings)]
    if len({(settings.metric, *settings.metrics) for settings in data}) > 1:
        raise HeadwaterError(
            f"{why} by one metric over the same domains; set the same data.metric and the same names in "
            f"data.held_out_domains for all."
        )


def list_sections(data: type[DataSettings]) -> Sections:
    """List the fields of each section of a recipe whose `data:` this class reads."""
    return {
        "": Recipe.model_fields,
        "data": data.model_fields,
        "model": IMAGE_FIELDS if issubclass(data, ImageSettings) else MODEL_FIELDS,
        "training": Training.model_fields,
        "reporting": Reporting.model_fields,
        "start": Start.model_fields,
        "compare": Compare.model_fields,
    }


def parse(values: Any, where: str) -> Recipe:
    """Check plain values, which may be a file's, against the fields of a recipe.

    Raises `HeadwaterError`, with a line for each wrong field, and for external names that the user does not trust.
    """
    if not isinstance(values, dict):
        raise HeadwaterError(f"{where}: a recipe is a mapping of sections (data, model, training, …).")
    try:
        data = find_data_class(values.get("data"))
    except ValueError:
        data = DataSettings
    sections = list_sections(data)
    problems = [*wrong_fields(model, sections)] if isinstance(model := values.get("model"), dict) else []
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        if (untrusted := find_untrusted(error)) is not None:
            raise NotTrusted(f"{where}: {untrusted}") from error
        raise build_refusal(where, [*problems, *list_problems(error, Recipe, data, sections)]) from error
    if problems:
        raise build_refusal(where, problems)
    names = [stage.name for stage in recipe.stages]
    if len({*names, "start"}) <= len(names):
        raise HeadwaterError(f"{where}: stages need different names, other than 'start', not {names}.")
    recipe.check_stages()
    recipe = _add_rungs(recipe, where)
    if recipe.compare is not None:
        _check_one_metric([*recipe.trials().values()], f"{where}: arms are compared")
    return recipe
