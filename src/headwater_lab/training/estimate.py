"""What `headwater plan` and `lab.plan` price: models as users name them, and the options in their units."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headwater.config.planner import plan_layers
from headwater.config.presets import PRESETS, preset
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion import config_of
from headwater.cost import ImagePrice, Price, price
from headwater.cost.hardware import Hardware
from headwater.cost.hardware import hardware as named_hardware
from headwater.cost.schedule import ToTrain
from headwater.models.load import check_names, read_json, reading
from headwater.util.errors import HeadwaterError, nearest, sentence, shown
from headwater.util.files import absence, is_address
from headwater_lab.data.base import DataShape
from headwater_lab.data.tokenizer import local_size
from headwater_lab.recipe.overrides import merged
from headwater_lab.recipe.schema import MODEL_FIELDS, Recipe, Training, changed_config, parse, read_recipe, values_of
from headwater_lab.recipe.shipped import shipped_recipes
from headwater_lab.training.attention import kernel_for
from headwater_lab.training.checkpoint import history_of
from headwater_lab.training.places import newest_checkpoint

_WHAT = "name a preset, a recipe, a config.json or a checkpoint"
# Kernels that packed rows need no mask in memory for.
_UNMASKED = ("varlen", "flash_attention", "flex_attention")
_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


class Planned(NamedTuple):
    """A model to price, and how it is trained: by its recipe, or as overrides say; None for neither.

    recipe: whether it has one; otherwise only fields that overrides set count. packed: whether its rows hold several
    documents. length: tokens per row of its data. before: FLOPs of the checkpoint that it begins with. stage: its
    schedule's name, and its own. teacher: the model that it is distilled from.
    """

    config: HeadwaterConfig
    training: Training | None = None
    recipe: bool = False
    packed: bool = False
    length: int = 1
    before: float = 0.0
    stage: tuple[str, str] = ("", "")
    teacher: HeadwaterConfig | None = None

    def budget(self, context: int) -> float | None:
        """The recipe's training budget: tokens in rows of `context`; with context 1, images."""
        training = self.training if self.recipe else None
        return (
            None
            if training is None
            else training.steps * training.batch_size * training.gradient_accumulation_steps * context
        )

    def shared(self) -> dict[str, Any]:
        """Settings that all columns of a table share: of the first model."""
        if (training := self.training) is None:
            return {}
        devices = training.devices * training.nodes
        found = {"precision": training.precision, "devices": devices, "batch": max(1, training.batch_size // devices)}
        of = {"precision": ["precision"], "devices": ["devices", "nodes"], "batch": ["batch_size"]}
        said = training.model_fields_set
        return {name: value for name, value in found.items() if self.recipe or said.intersection(of[name])}

    def own(self, context: int, precision: str) -> dict[str, Any]:
        """Settings of this column."""
        if (training := self.training) is None:
            return {}
        found = {
            "gradient_checkpointing": training.gradient_checkpointing,
            "averages": training.ema_decay is not None,
        }
        if isinstance(self.config, HeadwaterVisionConfig):
            return found
        return found | {
            "loss_chunk_tokens": training.loss_chunk_tokens,
            "masked": self.packed and self.masked(context, precision),
        }

    def masked(self, context: int, precision: str) -> bool:
        """Whether packed rows get a mask in memory, on a GPU, or on the CPU if the recipe names it."""
        assert self.training is not None
        device = "cpu" if self.training.device == "cpu" else "cuda"
        training = self.training.model_copy(update={"precision": precision})
        return not (kernel_for(self.config, training, device, context) or "sdpa").startswith(_UNMASKED)


def planned(
    models: Iterable[HeadwaterConfig | Recipe | Mapping[str, Any] | str | Path],
    overrides: Sequence[str] = (),
    vocabulary: int | None = None,
    schedule: bool = False,
) -> dict[str, Planned]:
    """Models by name, of recipes one for each arm and stage; a repeated name gets a number.

    models: configs; recipes; presets, shipped recipes, YAML files, config.json files, checkpoints and runs by name.
    overrides: "field=value" for all of them, "training.field=value" for how they are trained. vocabulary: same as the
    override vocab_size. schedule: also at each of its recipe's sizes, and with the teacher. Raises `HeadwaterError`.
    """
    overrides = [*overrides, *([] if vocabulary is None else [f"vocab_size={vocabulary}"])]
    of_training = [text for text in overrides if text.startswith("training.")]
    changes = _changes(fields := [text for text in overrides if text not in of_training])
    found: dict[str, Planned] = {}
    for model in models:
        for name, one in _planned(model, fields, changes, of_training, schedule).items():
            found[name if name not in found else f"{name} ({len(found) + 1})"] = one
    if not found:
        raise HeadwaterError("Name at least one preset, recipe, config.json or checkpoint.")
    return found


def prices(
    found: Mapping[str, Planned],
    *,
    context: Sequence[int] | int | None = None,
    tokens: str | float | None = None,
    images: str | float | None = None,
    hardware: str | Hardware | None = None,
    **settings: Any,
) -> list[Price] | list[ImagePrice]:
    """Prices of models by name, all of text or all of images.

    context: of text; default: the first model's own, as far as learned positions of the others reach. tokens, images:
    a number, or as in "300B". hardware: a device, also by name or "this". settings: batch, devices, precision and mfu,
    as in `headwater.cost.price`; what is None or missing, and the budget, default to how the first model is trained.
    Raises `HeadwaterError`.
    """
    if not isinstance(mfu := settings.get("mfu", 0.4), int | float):
        raise HeadwaterError(f"mfu must be a number, not {shown(mfu)}.")
    if not isinstance(hardware, str | Hardware | None):
        raise HeadwaterError(f"hardware is a device's name, such as 'H100', not {shown(hardware)}.")
    device = named_hardware(hardware) if isinstance(hardware, str) else hardware
    models = list(found.values())
    first, *others = (one.config for one in models)
    of_images = isinstance(first, HeadwaterVisionConfig)
    if any(isinstance(config, HeadwaterVisionConfig) != of_images for config in others):
        raise HeadwaterError("Models of text and of images have no common measure; name models of one kind.")
    contexts, longest = context if context or context == 0 else None, 1
    if not of_images:
        tables = [config.max_position_embeddings for config in others if config.position == "learned"]
        contexts = min([first.max_position_embeddings, *tables]) if contexts is None else contexts
        longest = max(contexts) if isinstance(contexts, Sequence) else contexts
    budgets = {"tokens": tokens, "images": images}
    budget: dict[str, Any] = {what: count_of(given, what) for what, given in budgets.items() if given is not None}
    if not budget and (known := models[0].budget(longest)) is not None:
        budget = {"images" if of_images else "tokens": known}
    settings = models[0].shared() | {name: value for name, value in settings.items() if value is not None}
    precision = settings.setdefault("precision", "bf16-mixed")
    return [
        price(
            one.config,
            name=name,
            context=contexts,
            hardware=device,
            **budget,
            **settings,
            **one.own(longest, precision),
        )
        for name, one in found.items()
    ]


def schedules(models: Iterable[Any], overrides: Sequence[str] = (), vocabulary: int | None = None) -> list[ToTrain]:
    """The stages of recipes, arm by arm and size by size, as `price.schedule` prices them.

    Raises `HeadwaterError` for a model that is no recipe.
    """
    found = []
    for model in models:
        if not _is_recipe(model):
            raise HeadwaterError(f"{str(model)!r} is no recipe, so it has no schedule to price; leave out --grow.")
        for one in planned([model], overrides, vocabulary, schedule=True).values():
            assert one.training is not None
            length = None if isinstance(one.config, HeadwaterVisionConfig) else one.length
            rows = one.training.batch_size * one.training.gradient_accumulation_steps
            how = one.training
            devices = how.devices * how.nodes
            found.append(
                ToTrain(
                    *one.stage, one.config, how.steps, rows, length, one.before, how.precision, devices, one.teacher
                )
            )
    return found


def _planned(
    model: Any, overrides: list[str], changes: dict[str, Any], of_training: list[str], schedule: bool
) -> dict[str, Planned]:
    """Models by name for one argument."""
    if not _is_recipe(model):
        training = _training(of_training)
        return {name: Planned(config, training) for name, config in _configs(model, changes).items()}
    what = repr(str(model)) if isinstance(model, str | Path) else "the recipe"
    return _of_recipe(model, what, overrides, of_training, changes.get("vocab_size"), schedule)


def _training(overrides: list[str]) -> Training | None:
    """How a model that comes without a recipe is trained, by "training.field=value". Raises `HeadwaterError`."""
    if not overrides:
        return None
    return parse({"name": "plan", "data": {"kind": "induction"}, **values_of(overrides)}, "plan").training


def _is_recipe(model: Any) -> bool:
    """Whether it is a recipe, or names one."""
    if isinstance(model, HeadwaterConfig):
        return False
    if not isinstance(model, str | Path):
        return True
    argument, path = str(model), Path(model)
    if argument in PRESETS:
        return False
    if path.suffix in (".yaml", ".yml"):
        return True
    return not path.exists() and argument in _shipped()


def _shipped() -> list[str]:
    """The names of shipped recipes, also without their folders."""
    return [known for name in shipped_recipes() for known in (name, name.rpartition("/")[2])]


def _configs(model: HeadwaterConfig | str | Path, changes: dict[str, Any]) -> dict[str, HeadwaterConfig]:
    """Configs by name for one model that is no recipe."""
    if isinstance(model, HeadwaterConfig):
        _check_fields(changes, type(model))
        return {"model": type(model).from_dict(merged(model.to_dict(), changes)) if changes else model}
    argument, path = str(model), Path(model)
    if argument in PRESETS:
        return {argument: preset(argument, **changes)}
    if not path.exists():
        if os.path.lexists(path) or is_address(path):
            raise HeadwaterError(f"{absence(path)}.")
        if len(path.parts) > 1 or path.suffix:
            raise HeadwaterError(f"There is no file {argument!r}; {_WHAT}.")
        raise HeadwaterError(
            f"There is no preset, recipe or file {argument!r}; {nearest(argument, [*PRESETS, *shipped_recipes()])}"
        )
    name = path.name if path.is_dir() else path.resolve().parent.name if path.name == "config.json" else path.stem
    file = newest_checkpoint(path) / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise HeadwaterError(f"{argument!r} has no config.json; {_WHAT}.")
    content = read_json(file)
    kind = content.get("model_type") if isinstance(content, dict) else None
    made = {one.model_type: one for one in (HeadwaterConfig, HeadwaterVisionConfig)}.get(str(kind))
    if made is None and path.is_dir():
        config = config_of(file.parent)
        made, content = type(config), config.to_dict()
    elif made is None:
        raise HeadwaterError(
            f"{argument!r} is not the config of a headwater model (model_type {kind!r}); name the model's folder."
        )
    try:
        with reading("its config", "correct it"):
            # Not from_pretrained, which applies overrides to a config that was checked without them.
            _check_fields(changes, made)
            check_names(made, content, file)
            config = made.from_dict(merged(content, changes))
            plan_layers(config)
            return {name: config}
    except HeadwaterError as error:
        raise HeadwaterError(f"{argument!r}: {sentence(error)}") from error


def _changes(overrides: list[str]) -> dict[str, Any]:
    """The model fields that "field=value" overrides change, by name. Raises `HeadwaterError` for an unknown one."""
    if not overrides:
        return {}
    changes, known = values_of(overrides), (MODEL_FIELDS - {"base"}) | {*IMAGE_FIELDS}
    for field in changes:
        if field not in known:
            raise HeadwaterError(f"A model has no field {field!r}; {nearest(field, known)}")
    return changes


IMAGE_FIELDS = {"num_labels", *HeadwaterVisionConfig.field_names()} - {"layer_types", "initializer_seed"}


def _check_fields(changes: Mapping[str, Any], kind: type[HeadwaterConfig]) -> None:
    """Raise `HeadwaterError` for fields that only text models have, or only image models."""
    for field in changes:
        if field != "num_labels" and field not in kind.field_names():
            raise HeadwaterError(f"{field} is not a field of {kind.__name__}; leave it out.")


def _of_recipe(
    given: Recipe | Mapping[str, Any] | str | Path,
    what: str,
    overrides: list[str],
    of_training: list[str],
    vocabulary: int | None,
    schedule: bool,
) -> dict[str, Planned]:
    """Models of a recipe by name, one for each arm of its comparison, each size if asked for, and each stage. The data
    is not read, and of tokenizers only local ones."""
    given = Path(given) if isinstance(given, str) else given
    loaded = read_recipe(given, [*(f"model.{override}" for override in overrides), *of_training])
    if loaded.compare is None:
        recipes = {loaded.name: loaded}
    else:
        seed = loaded.compare.seeds[0]
        recipes = {
            name if size is None else f"{name}, {size}": loaded.arm(name, seed, size)
            for size in (loaded.compare.sizes if schedule else None) or [None]
            for name in loaded.compare.arms
        }
    result: dict[str, Planned] = {}
    for name, recipe in recipes.items():
        size = vocabulary or recipe.known_size or local_size(getattr(recipe.data, "tokenizer", None))
        if size is None and recipe.unit == "images":
            raise HeadwaterError(
                f"The classes of {what} come from its data, which plan does not load; set their number with "
                "num_labels=."
            )
        if size is None:
            raise HeadwaterError(
                f"The vocabulary of {what} comes from its tokenizer, which is not on this machine, and plan downloads "
                f"nothing; pass its size with --vocabulary (vocabulary=)."
            )
        data = DataShape(size, recipe.row_length)
        sized = {} if recipe.unit == "images" else {"vocab_size": size}
        config = recipe.model_copy(update={"model": recipe.model | sized}).config_for(data)
        rows = _stages(name, recipe, config, schedule)
        if both := rows.keys() & result.keys():
            raise HeadwaterError(
                f"An arm of {what} and a stage of another one would both be called {min(both)!r}; rename one."
            )
        result |= rows
    return result


def _stages(name: str, recipe: Recipe, config: HeadwaterConfig, schedule: bool) -> dict[str, Planned]:
    """The models of a recipe's stages by name, of which this is the first."""
    runs = [run for run, _ in recipe.chain(lambda name, _: Path(name))]
    config, before = _started(name, recipe, config)
    configs = [config, *(later for _, later in recipe.stage_configs(config))]
    before_each = zip(runs, [None, *configs], strict=False)
    teachers = [_teacher(name, run, last) if schedule else None for run, last in before_each]
    return {
        name if stage == "start" else f"{name}, {stage}": Planned(
            each,
            run.training,
            True,
            getattr(run.data, "row_layout", "") == "packed",
            run.row_length,
            before,
            (name, stage),
            teacher,
        )
        for stage, each, run, teacher in zip(recipe.stage_names, configs, runs, teachers, strict=True)
    }


def _started(name: str, recipe: Recipe, config: HeadwaterConfig) -> tuple[HeadwaterConfig, float]:
    """The config that a recipe's first stage trains, by default `config`, the recipe's own; and the FLOPs of the
    checkpoint that it begins with. Raises `HeadwaterError` if that is not there."""
    if recipe.start is None:
        return config, 0.0
    path = _there(name, "begins with", recipe.start.checkpoint)
    return changed_config(config_of(path), recipe.start), sum(event.flops for event in history_of(path))


def _teacher(name: str, run: Recipe, last: HeadwaterConfig | None) -> HeadwaterConfig | None:
    """The config of the model that a run is distilled from; None if there is none. last: of the stage before."""
    if (settings := run.training.distillation) is None:
        return None
    if settings.teacher is None and last is not None:
        return last
    source = settings.teacher or (run.start.checkpoint if run.start is not None else "")
    return config_of(_there(name, "learns from", source))


def _there(name: str, does: str, checkpoint: str) -> Path:
    """The folder of a checkpoint, or of a run's newest. Raises `HeadwaterError` if there is none."""
    if not Path(checkpoint).is_dir():
        raise HeadwaterError(f"{name!r} {does} the checkpoint {checkpoint!r}, which is not there; make it first.")
    return newest_checkpoint(Path(checkpoint))


def count_of(given: str | float, what: str) -> float:
    """A number of tokens or images: 3e11, or as text 300B, 1.5T or 2e10. Raises `HeadwaterError` for anything else."""
    text = str(given)
    factor = _FACTORS.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text)
    except ValueError:
        value = float("nan")
    if not 0 < value * factor < float("inf"):
        raise HeadwaterError(f"--{what} ({what}=) takes a number such as 300B or 2e10, not {shown(given)}.")
    return value * factor
