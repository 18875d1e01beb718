"""What `headwater plan` and `lab.plan` price: models as users name them, and the options in their units."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.config.planner import plan_layers
from headwater.config.presets import PRESETS, preset
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion import config_of
from headwater.conversion.convert import way_of
from headwater.cost import Price, price
from headwater.cost import counts as cost
from headwater.cost.estimate import read_precision
from headwater.cost.hardware import Hardware
from headwater.cost.hardware import hardware as named_hardware
from headwater.models.load import check_names, read_json, reading
from headwater.util.errors import HeadwaterError, nearest, sentence, shown
from headwater.util.files import absence, is_address
from headwater.util.precision import Precision
from headwater_lab.data.base import DataShape
from headwater_lab.data.tokenizer import local_size
from headwater_lab.recipe.messages import build_refusal, describe_unknown_field
from headwater_lab.recipe.model_section import IMAGE_FIELDS, MODEL_FIELDS
from headwater_lab.recipe.overrides import merge_values
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import read_overrides, read_recipe, shipped_recipes
from headwater_lab.recipe.start_section import changed_config
from headwater_lab.recipe.training_section import Training
from headwater_lab.training.attention_choice import choose_kernel, list_step_settings
from headwater_lab.training.checkpoints import newest_checkpoint
from headwater_lab.training.trained_models import open_source
from headwater_lab.util.model_kinds import unit_of
from headwater_lab.util.outputs import COLORS, default_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ConversionPrice:
    """What a conversion costs and saves.

    before, after: the model's parameters, and bytes of its weights and of its cache, in the precision of the weights;
    cache_bytes is of a sequence of the recipe's context. flops: of healing, by stage, with the teacher's. step_bytes:
    memory of a step at its peak; teacher_bytes: of these, the teacher's weights.
    """

    before: dict[str, int]
    after: dict[str, int]
    tokens: int
    flops: dict[str, float]
    step_bytes: int
    teacher_bytes: int


def price_of(recipe: Recipe, config: HeadwaterConfig, element: int) -> ConversionPrice:
    """The price of a recipe that converts a model of this config. element: bytes of its numbers.

    Raises `HeadwaterError` if the model cannot be converted so, or if its teacher, by default itself, cannot be read.
    """
    context, settings, teacher = recipe.row_length, recipe.training.distillation, None
    if settings is not None and settings.teacher is not None:
        path = Path(settings.teacher)
        teacher = config_of(newest_checkpoint(path)) if path.is_dir() else open_source(settings.teacher).model.config
    elif settings is not None:
        teacher = config
    configs = recipe.configs(config if recipe.start is None else changed_config(config, recipe.start))
    if way_of(configs[-1]) is not None or not recipe.stages:
        raise HeadwaterError(
            "The recipe has no stage after which the model is the smaller one, trained; leave its stages as they are."
        )
    teaching = 0.0 if teacher is None else sum(cost.forward_flops(teacher, context).values())
    flops, tokens, peak = {}, 0, 0
    for name, each, (run, _) in zip(recipe.stage_names, configs, recipe.chain(lambda *_: Path()), strict=True):
        how = run.training
        of_stage = how.steps * how.batch_size * how.gradient_accumulation_steps * context
        step = price(each, context=context, batch=how.batch_size, precision=how.precision).at[0]
        tokens, flops[name] = tokens + of_stage, (step.training + teaching) * of_stage
        peak = max(peak, step.step_bytes)

    def side(config: HeadwaterConfig) -> dict[str, int]:
        return {
            "parameters": (count := sum(cost.parameters(config).values())),
            "cache_bytes_per_token": cost.cache_bytes_per_token(config, element),
            "cache_bytes": cost.cache_bytes(config, context, 1, element),
            "weights_bytes": count * element,
        }

    held = 0 if teacher is None else side(teacher)["weights_bytes"]
    return ConversionPrice(side(config), side(configs[-1]), tokens, flops, peak + held, held)


_WHAT = "name a preset, a recipe, a config.json or a checkpoint"
_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


class Planned(NamedTuple):
    """A model to price, and how it is trained: by its recipe, or as overrides say; None for neither.

    run: its recipe; without one, only fields that overrides set count.
    """

    config: HeadwaterConfig
    training: Training | None = None
    run: Recipe | None = None

    def budget(self, context: int) -> dict[str, float]:
        """The recipe's training budget, if there is a recipe: tokens in rows of `context`; with context 1, images."""
        if self.run is None:
            return {}
        training = self.run.training
        rows = training.steps * training.batch_size * training.gradient_accumulation_steps
        return {self.run.unit: rows * context}

    def shared(self) -> dict[str, Any]:
        """Settings that all columns of a table share: of the first model."""
        if (training := self.training) is None:
            return {}
        devices = training.devices * training.nodes
        found = {"precision": training.precision, "devices": devices, "batch": max(1, training.batch_size // devices)}
        of = {"precision": ["precision"], "devices": ["devices", "nodes"], "batch": ["batch_size"]}
        said = training.model_fields_set
        return {name: value for name, value in found.items() if self.run or said.intersection(of[name])}

    def own(self, context: int, precision: Precision) -> dict[str, Any]:
        """Settings of this column."""
        if (training := self.training) is None:
            return {}
        data, attention = None if self.run is None else self.run.data, None
        if getattr(data, "row_layout", "") == "packed":  # on a GPU, or on the CPU if the recipe names it
            computed = training.model_copy(update={"precision": precision})
            attention = choose_kernel(self.config, computed, "cpu" if training.device == "cpu" else "cuda", context)
        return list_step_settings(self.config, training, data, attention)


def planned(
    models: Iterable[HeadwaterConfig | Recipe | Mapping[str, Any] | str | Path],
    overrides: Sequence[str] = (),
    vocab_size: int | None = None,
) -> dict[str, Planned]:
    """Models by name, of recipes one for each arm and stage; a repeated name gets a number.

    models: configs; recipes; presets, shipped recipes, YAML files, config.json files, checkpoints and runs by name.
    overrides: "field=value" for all of them, "training.field=value" for how they are trained. vocab_size: same as the
    override vocab_size. Raises `HeadwaterError`.
    """
    overrides = [*overrides, *([] if vocab_size is None else [f"vocab_size={vocab_size}"])]
    of_training = [text for text in overrides if text.startswith("training.")]
    changes = _changes(fields := [text for text in overrides if text not in of_training])
    found: dict[str, Planned] = {}
    for model in models:
        if _is_recipe(model):
            entries = _of_recipe(model, fields, of_training, changes.get("vocab_size"))
        else:
            training = read_recipe({"data": {"kind": "induction"}}, of_training).training if of_training else None
            entries = {name: Planned(config, training) for name, config in _configs(model, changes).items()}
        for name, one in entries.items():
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
) -> list[Price]:
    """Prices of models by name, all of text or all of images.

    context: of text; default: the first model's own, as far as learned positions of the others reach. tokens, images:
    a number, or as in "300B". hardware: a device, also by name or "this". settings: batch, devices, precision and mfu,
    as in `headwater.cost.price`; what is None or missing, and the budget, default to how the first model is trained.
    Raises `HeadwaterError`.
    """
    device = None if hardware is None else named_hardware(hardware)
    models = list(found.values())
    first = models[0]
    if len({unit_of(model.config) for model in models}) > 1:
        raise HeadwaterError("Models of text and of images have no common measure; name models of one kind.")
    contexts = _choose_contexts([model.config for model in models], context)
    longest = max(contexts) if isinstance(contexts, Sequence) else contexts or 1
    budgets = {"tokens": tokens, "images": images}
    budget = {unit: count_of(count, unit) for unit, count in budgets.items() if count is not None}
    settings = first.shared() | {name: value for name, value in settings.items() if value is not None}
    precision = read_precision(settings.pop("precision", Precision.BF16_MIXED))
    settings |= {"context": contexts, "hardware": device, "precision": precision, **(budget or first.budget(longest))}
    return [
        price(model.config, name=name, **settings, **model.own(longest, precision)) for name, model in found.items()
    ]


def _choose_contexts(configs: Sequence[HeadwaterConfig], context: Sequence[int] | int | None) -> Any:
    """The contexts to price text models at."""
    first, *others = configs
    if context or context == 0:
        return context
    tables = [config.max_position_embeddings for config in others if config.position == "learned"]
    return min([first.max_position_embeddings, *tables]) if unit_of(first) == "tokens" else None


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
    # Shipped recipes are named also without their folders.
    return not path.exists() and any(argument in (name, name.rpartition("/")[2]) for name in shipped_recipes())


def _configs(model: Any, changes: dict[str, Any]) -> dict[str, HeadwaterConfig]:
    """Configs by name for one model that is no recipe."""
    if isinstance(model, HeadwaterConfig):
        _check_fields(changes, type(model))
        return {"model": type(model).from_dict(merge_values(model.to_dict(), changes)) if changes else model}
    argument, path = str(model), Path(model)
    if argument in PRESETS:
        return {argument: preset(argument, **changes)}
    _check_exists(path)
    name = path.name if path.is_dir() else path.resolve().parent.name if path.name == "config.json" else path.stem
    file = newest_checkpoint(path) / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise HeadwaterError(f"{argument!r} has no config.json; {_WHAT}.")
    content = read_json(file)
    model_type = content.get("model_type") if isinstance(content, dict) else None
    kind = {kind.model_type: kind for kind in (HeadwaterConfig, HeadwaterVisionConfig)}.get(str(model_type))
    if kind is None and path.is_dir():
        config = config_of(file.parent)
        kind, content = type(config), config.to_dict()
    elif kind is None:
        raise HeadwaterError(
            f"{argument!r} is not the config of a headwater model (model_type {model_type!r}); name the model's folder."
        )
    try:
        with reading("its config", "correct it"):
            # Not from_pretrained, which applies overrides to a config that was checked without them.
            _check_fields(changes, kind)
            check_names(kind, content, file)
            config = kind.from_dict(merge_values(content, changes))
            plan_layers(config)
            return {name: config}
    except HeadwaterError as error:
        raise HeadwaterError(f"{argument!r}: {sentence(error)}") from error


def _check_exists(path: Path) -> None:
    """Raise `HeadwaterError` if there is no such file, with the nearest preset or recipe if it may name one."""
    if path.exists():
        return
    if os.path.lexists(path) or is_address(path):
        raise HeadwaterError(f"{absence(path)}.")
    if len(path.parts) > 1 or path.suffix:
        raise HeadwaterError(f"There is no file {str(path)!r}; {_WHAT}.")
    guess = nearest(str(path), [*PRESETS, *shipped_recipes()])
    raise HeadwaterError(f"There is no preset, recipe or file {str(path)!r}; {guess}")


def _changes(overrides: list[str]) -> dict[str, Any]:
    """The model fields that "field=value" overrides change, by name. Raises `HeadwaterError` for an unknown one."""
    if not overrides:
        return {}
    changes, known = read_overrides(overrides), (MODEL_FIELDS | IMAGE_FIELDS) - {"base"}
    if problems := [
        describe_unknown_field(field, "model", known, {"model": known}) for field in changes if field not in known
    ]:
        raise build_refusal("plan", problems)
    return changes


def _check_fields(changes: Mapping[str, Any], kind: type[HeadwaterConfig]) -> None:
    """Raise `HeadwaterError` for fields that only text models have, or only image models."""
    for field in changes:
        if field != "num_labels" and field not in kind.field_names():
            raise HeadwaterError(f"{field} is not a field of {kind.__name__}; leave it out.")


def _of_recipe(
    given: Recipe | Mapping[str, Any] | str | Path,
    overrides: list[str],
    of_training: list[str],
    vocab_size: int | None,
) -> dict[str, Planned]:
    """Models of a recipe by name, one for each arm of its comparison and each stage. The data is not read, and of
    tokenizers only local ones."""
    what = repr(str(given)) if isinstance(given, str | Path) else "the recipe"
    given = Path(given) if isinstance(given, str) else given
    loaded = read_recipe(given, [*(f"model.{override}" for override in overrides), *of_training])
    if loaded.compare is None:
        recipes = {loaded.name: loaded}
    else:
        seed = loaded.compare.seeds[0]
        recipes = {name: loaded.arm(name, seed, None) for name in loaded.compare.arms}
    result: dict[str, Planned] = {}
    for name, recipe in recipes.items():
        size = vocab_size or recipe.known_size or local_size(getattr(recipe.data, "tokenizer", None))
        if size is None and recipe.unit == "images":
            raise HeadwaterError(
                f"The classes of {what} come from its data, which plan does not load; set their number with "
                "num_labels=."
            )
        if size is None:
            raise HeadwaterError(
                f"The vocabulary of {what} comes from its tokenizer, which is not on this machine, and plan downloads "
                f"nothing; pass its size with --vocab-size (vocab_size=)."
            )
        data = DataShape(size, recipe.row_length)
        sized = {} if recipe.unit == "images" else {"vocab_size": size}
        config = recipe.model_copy(update={"model": recipe.model | sized}).config_for(data)
        rows = _stages(name, recipe, config)
        if both := rows.keys() & result.keys():
            raise HeadwaterError(
                f"An arm of {what} and a stage of another one would both be called {min(both)!r}; rename one."
            )
        result |= rows
    return result


def _stages(name: str, recipe: Recipe, config: HeadwaterConfig) -> dict[str, Planned]:
    """The models of a recipe's stages by name, of which this is the first unless it begins with a checkpoint."""
    if recipe.start is not None:
        checkpoint = Path(recipe.start.checkpoint)
        if not checkpoint.is_dir():
            raise HeadwaterError(
                f"{name!r} begins with the checkpoint {str(checkpoint)!r}, which is not there; make it first."
            )
        config = changed_config(config_of(newest_checkpoint(checkpoint)), recipe.start)
    runs = [run for run, _ in recipe.chain(lambda name, _: Path(name))]
    return {
        name if stage == "start" else f"{name}, {stage}": Planned(each, run.training, run)
        for stage, each, run in zip(recipe.stage_names, recipe.configs(config), runs, strict=True)
    }


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


def draw_flops(configs: Mapping[str, HeadwaterConfig], contexts: Sequence[int]) -> Figure:
    """Forward FLOPs per token against context, counting full attention as TokenFormer's figure 5 does.

    The slope is the cost of attention between tokens, 4·L·H·d; the height at 0 that of the parameters. Each combination
    of mechanisms has a line style. Raises `HeadwaterError` for image models.
    """
    from matplotlib.figure import Figure

    if any(isinstance(config, HeadwaterVisionConfig) for config in configs.values()):
        raise HeadwaterError("Only text models have a plot of FLOPs against context.")
    with default_style():
        result = Figure(figsize=(8.2, 4.6), layout="constrained")
        axes = result.subplots()
        styles: dict[tuple[str, ...], str] = {}
        for index, (name, config) in enumerate(configs.items()):
            style = styles.setdefault(tuple(config.mechanisms or {}), ("-", "--", ":", "-.")[len(styles) % 4])
            plans = plan_layers(config)
            flops = [sum(cost.forward_flops(config, at, False, plans).values()) / 1e9 for at in contexts]
            axes.plot(contexts, flops, style, color=COLORS[index % len(COLORS)], label=f"\u200a{name}")
        axes.set_xlabel("context (tokens)")
        axes.set_ylabel("forward GFLOPs per token, full attention")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        return result
