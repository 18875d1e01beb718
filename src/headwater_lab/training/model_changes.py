"""Change a trained model: grow it, convert it, fit it to data; and measure the change of its function."""

import copy
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion.add import select_stored_heads
from headwater.conversion.alignment import align_layers, choose_sources, measure_similarity
from headwater.conversion.calibration import fit_outputs
from headwater.conversion.convert import (
    blend_config,
    blend_model,
    finish_config,
    finish_model,
    pool_tensors,
    pooled_config,
)
from headwater.conversion.latent import make_latent
from headwater.cost.counts import cache_bytes_per_token
from headwater.growth import grow
from headwater.growth.grown_parameters import ParameterGrower, split_name
from headwater.growth.methods import GrowthOptions, map_growth
from headwater.growth.parameter_tokens import Model
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.image_classification import HeadwaterForImageClassification
from headwater.nn.patches import resize_positions
from headwater.util.errors import HeadwaterError, shown
from headwater_lab.data.base import Data
from headwater_lab.data.images import ImageData
from headwater_lab.data.tokenizer import has_all_tokens
from headwater_lab.recipe.start_section import CacheConversion, Change
from headwater_lab.training.records import Event
from headwater_lab.training.trained_models import Trained
from headwater_lab.util.model_kinds import is_of_images

POSITIONS, CLASSIFIER = "model.embed_positions.weight", "classifier."
# The arguments of growth by parameter tokens.
PAIR_OPTIONS = ("attention_pairs", "ffn_pairs", "key_init", "tau", "freeze")


def change_model(trained: Trained, change: Change, rows: Tensor | None = None) -> Trained:
    """Apply a recipe's `grow:`, `convert:` or `finish_conversion:` to a trained model; return it unchanged if there is
    none. rows: tokens [B, T] on which a conversion measures how similar keys and values are."""
    if (width := change.latent_width) is not None:
        return _make_latent(trained, width, rows)
    if change.convert is not None or change.finish_conversion:
        return convert_model(trained, change, rows)
    if change.grow is None:
        return trained
    arguments = change.grow.model_dump()
    options = GrowthOptions(**arguments)
    model = grow(trained.model, **arguments)
    learns = all(parameter.requires_grad for version in (trained.model, model) for parameter in version.parameters())
    state = carry_state(trained.state, trained.model, model, options) if trained.state and learns else {}
    adds_pairs = options.attention_pairs is not None or options.ffn_pairs is not None or not options.sizes
    details = {
        name: value
        for name, value in arguments.items()
        if value is not None and (adds_pairs if name in PAIR_OPTIONS else options.sizes)
    }
    details["parameters"] = {"from": trained.model.num_parameters(), "to": model.num_parameters()}
    return trained.after("grown", details, model=model, state=state)


def convert_model(trained: Trained, change: Change, rows: Tensor | None) -> Trained:
    """Apply a recipe's `convert:` or `finish_conversion:`. Parameters that keep their meaning keep optimizer state."""
    original, goal = trained.model, change.convert
    if goal is None:
        model = finish_model(original)
        state = finish_state(trained.state, original, model)
        # The event that began the conversion names the cache that it ends with.
        return trained.after("converted", {"finished": True}, model=model, state=state)
    if not isinstance(original, HeadwaterForCausalLM):
        raise HeadwaterError("An image model has no cache to make smaller; leave out start.convert.")
    element, trained.original = original.dtype.itemsize, None
    old_bytes, heads = cache_bytes_per_token(original.config, element), goal.num_key_value_heads
    mechanisms, transformed = _prepare_layers(original, goal, rows)
    aligned = transformed or (goal.align and not goal.anneal)
    if aligned and trained.state and change.optimizer_state == "keep":
        raise HeadwaterError(
            "Aligning keys and values changes their weights, so that the optimizer's state no longer fits; set "
            "convert.align=false, or leave out optimizer_state: keep."
        )
    trained.model = model = blend_model(original, mechanisms, heads, 0.0 if goal.anneal else 1.0)
    new_bytes = cache_bytes_per_token(finish_config(model.config), element)  # in the precision of the source
    details = {
        "cache_bytes_per_token": {"from": old_bytes, "to": new_bytes},
        "mechanisms": mechanisms,
        "num_key_value_heads": heads,
        "annealed": goal.anneal,
        "aligned_tokens": cast(Tensor, rows).numel() if aligned else 0,
    }
    state = {} if aligned else trained.state
    if not goal.anneal:
        blend, model = model, finish_model(model)
        state = finish_state(state, blend, model)
        if goal.align:
            fit_outputs(model, original, cast(Tensor, rows))
    return trained.after("converted", details, model=model, state=state)


def _make_latent(trained: Trained, width: int, rows: Tensor | None) -> Trained:
    """Replace keys and values by a latent, fitted to rows of tokens [B, T]."""
    original, trained.original = trained.model, None
    if rows is None:
        raise HeadwaterError("A latent is fitted to rows of the recipe's text; use data of text.")
    element = original.dtype.itemsize
    model = make_latent(original.to(torch.promote_types(original.dtype, torch.float32)), rows, width)
    fit_outputs(model, original, rows)
    cache = {
        name: cache_bytes_per_token(config, element)
        for name, config in (("from", original.config), ("to", model.config))
    }
    details = {"cache_bytes_per_token": cache, "latent_width": width, "aligned_tokens": rows.numel()}
    return trained.after("converted", details, model=model, state={})


def _prepare_layers(
    original: HeadwaterForCausalLM, goal: CacheConversion, rows: Tensor | None
) -> tuple[dict[str, Any] | None, bool]:
    """Choose the layers that share, and align their keys and values in place. Returns the mechanisms, and whether
    weights changed. Raises `HeadwaterError` for a conversion that needs rows of tokens to measure on."""
    mechanisms, heads = goal.mechanisms, goal.num_key_value_heads
    blend_config(original.config, mechanisms, heads)  # raises before the model runs
    # Convert in fp32 or wider: rounding multiplied or mixed weights to bf16 would change the function.
    original.to(torch.promote_types(original.dtype, torch.float32))
    if rows is None:
        if goal.align or goal.choose:
            raise HeadwaterError(
                "A conversion measures keys and values on rows of the recipe's text; use data of text, or set "
                "convert.align and convert.choose to false."
            )
        return mechanisms, False
    if goal.choose:
        mechanisms = choose_sources(original.config, mechanisms, measure_similarity(original, rows))
    return mechanisms, goal.align and align_layers(original, rows, mechanisms, heads)


def list_refits(
    config: HeadwaterConfig,
    data: Data,
    change: Change,
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None = None,
) -> dict[str, Any]:
    """List the fields of a model's config that the data change: vocab_size of a text model, or image_size and id2label.

    tokenizer: the model's. The data's may add tokens to it.
    Classes that only have numbers in the model take the data's names. Other names are an error in `check_classes`,
    unless `change` requests a new classifier.
    """
    if not isinstance(config, HeadwaterVisionConfig) or not isinstance(data, ImageData):
        grows = data.tokenizer is not None and not is_of_images(config) and data.vocab_size > config.vocab_size
        return {"vocab_size": data.vocab_size} if grows and has_all_tokens(data.tokenizer, tokenizer) else {}
    fields: dict[str, Any] = {}
    if config.image_shape != data.settings.size:
        fields["image_size"] = list(data.settings.size)
    names = _list_classes(config)
    unnamed = names == [f"LABEL_{number}" for number in range(len(names))]
    if change.new_classifier:
        fields["id2label"] = dict(enumerate(data.classes))
    elif unnamed and len(data.classes) <= len(names):
        fields["id2label"] = dict(enumerate([*data.classes, *names[len(data.classes) :]]))
    return fields


def refit_model(trained: Trained, data: Data, change: Change) -> Trained:
    """Fit the model to the data by `list_refits`; return it unchanged if that is empty. Raises `HeadwaterError`."""
    model = trained.model
    fields = list_refits(model.config, data, change, trained.tokenizer)
    if "vocab_size" in fields:
        return _add_tokens(trained, data)
    if not fields or not isinstance(model, HeadwaterForImageClassification):
        return trained
    config, grid = _refit_config(model.config, fields), model.config.grid
    refitted = HeadwaterForImageClassification(config).to(model.dtype)
    weights = model.state_dict()
    if POSITIONS in weights:
        weights[POSITIONS] = resize_positions(weights[POSITIONS].float(), grid, config.grid)
    if change.new_classifier:
        weights |= {name: tensor for name, tensor in refitted.state_dict().items() if name.startswith(CLASSIFIER)}
    refitted.load_state_dict(weights)
    interpolated = POSITIONS in weights and config.grid != grid
    if trained.state and (change.new_classifier or interpolated):
        raise HeadwaterError(
            "start.optimizer_state=keep has no state for a new classifier or for interpolated positions; use "
            "start.optimizer_state=fresh, or data of the checkpoint's classes and size."
        )
    details: dict[str, Any] = {
        name: {"image_size": list(version.image_shape), "classes": version.num_labels}
        for name, version in (("from", model.config), ("to", config))
    }
    details |= {"new_classifier": change.new_classifier, "interpolated": interpolated}
    return trained.after("refitted", details, model=refitted.eval())


def _refit_config(config: HeadwaterVisionConfig, fields: dict[str, Any]) -> HeadwaterVisionConfig:
    config = copy.deepcopy(config)
    if (labels := fields.get("id2label")) is not None:
        config.num_labels, config.id2label = len(labels), labels
        config.label2id = {name: number for number, name in labels.items()}
    if "image_size" in fields:
        config.image_size = fields["image_size"]
        config.complete_fields()
    return config


def _add_tokens(trained: Trained, data: Data) -> Trained:
    """Give a text model the data's tokenizer. Raises `HeadwaterError` if the optimizer's state must be kept."""
    if trained.state:
        raise HeadwaterError(
            "start.optimizer_state=keep has no state for new tokens; use start.optimizer_state=fresh, or data with the "
            "checkpoint's tokenizer."
        )
    model = trained.model
    details = {"from": {"vocab_size": model.config.vocab_size}, "to": {"vocab_size": data.vocab_size}}
    with torch.random.fork_rng(devices=[]):  # transformers initializes the embedding's new rows randomly
        torch.manual_seed(model.config.initializer_seed)
        model.resize_token_embeddings(data.vocab_size)
    return trained.after("refitted", details, tokenizer=data.tokenizer)


def describe_refit(event: Event) -> str:
    """Describe in a sentence what `refit_model` has done."""
    old, new = event.details["from"], event.details["to"]
    changes = [f"{name} {new[name]} instead of {old[name]}" for name in new if new[name] != old[name]]
    changes += ["learned positions interpolated"] if event.details.get("interpolated") else []
    changes += ["a new classifier"] if event.details.get("new_classifier") else []
    return f"The model was fitted to the data: {', '.join(changes) or 'its classes have their names'}."


def check_classes(config: HeadwaterVisionConfig, data: ImageData) -> None:
    """Raise `HeadwaterError` unless the model's first classes have the names of the data's."""
    names = _list_classes(config)
    if names[: len(data.classes)] == data.classes:
        return
    names += ["none"] * (len(data.classes) - len(names))
    number = next(number for number, label in enumerate(data.classes) if names[number] != label)
    raise HeadwaterError(
        f"The checkpoint has {config.num_labels} classes and the data {len(data.classes)}, and they differ: class "
        f"{number} is {shown(names[number])} in the checkpoint and {shown(data.classes[number])} in the data; set "
        "start.new_classifier=true to train a new classifier for the data's."
    )


def _list_classes(config: HeadwaterVisionConfig) -> list[str]:
    return [str(config.id2label[number]) for number in range(config.num_labels)]


@torch.no_grad()
def measure_change(original: PreTrainedModel, changed: PreTrainedModel, input_ids: Tensor) -> dict[str, float]:
    """Measure how much two models differ on `input_ids` [B, T], T ≥ 2, or on images [B, C, H, W], without dropout.

    logits: the largest difference of logits, relative to the largest logit of `original`. kl: the mean over tokens or
    images of the Kullback-Leibler divergence of `changed`'s distribution from `original`'s, in nats. Of text also
    loss_before, loss_after: the mean loss of predicting the next token, in nats.

    Raises `HeadwaterError` for rows of one token, and for models of different vocabularies or classes.
    """
    of_images = input_ids.is_floating_point()
    if not of_images and input_ids.shape[1] < 2:
        raise HeadwaterError("Rows of one token have no next one to predict; pass rows of two or more.")
    modes = {model: model.training for model in (original, changed)}
    try:
        rows = [_compare_logits(original.eval(), changed.eval(), row[None]) for row in input_ids]
    finally:
        for model, mode in modes.items():
            model.train(mode)
    differences, logits, *means = zip(*rows, strict=True)
    difference, largest = max(differences), max(logits)
    relative = difference / largest if largest else math.inf if difference else 0.0
    names = ("logits", "kl") if of_images else ("logits", "kl", "loss_before", "loss_after")
    return dict(zip(names, (relative, *(sum(values) / len(rows) for values in means)), strict=True))


def _compare_logits(original: PreTrainedModel, changed: PreTrainedModel, ids: Tensor) -> tuple[float, ...]:
    """Compare one row: largest difference, largest logit, mean divergence, and of text both losses."""
    if of_images := ids.is_floating_point():
        logits = [model(pixel_values=ids.to(model.device)).logits for model in (original, changed)]
    else:
        logits = [model(ids.to(model.device), use_cache=False).logits[0] for model in (original, changed)]
    old, new = (x.to(logits[0].device, torch.promote_types(x.dtype, torch.float32)) for x in logits)
    if old.shape != new.shape:
        raise HeadwaterError(
            f"The models' vocabularies have {old.shape[-1]} and {new.shape[-1]} tokens, so they cannot be compared; "
            f"use two with the same vocabulary."
            if not of_images
            else f"The models have {old.shape[-1]} and {new.shape[-1]} classes, so they cannot be compared; use two "
            "with the same classes."
        )
    p, q = old.log_softmax(-1), new.log_softmax(-1)
    losses = []
    if not of_images:
        losses = [nn.functional.nll_loss(x[:-1], ids[0, 1:].to(p.device)) for x in (p, q)]
    measured = ((old - new).abs().max(), old.abs().max(), (p.exp() * (p - q)).sum(-1).mean(), *losses)
    return tuple(value.item() for value in measured)


def carry_state(state: dict[str, Tensor], model: Model, large: Model, options: GrowthOptions) -> dict[str, Tensor]:
    """Make the optimizer's state of the larger model, whose averages of gradients change as the gradients do.

    Entries that write copies each get a share of the old gradient, and entries that read copies all of it. New ones
    get an average of zero, and of squares the mean of the old ones: after zeros Adam, which counts steps once per
    tensor, would make large updates. A parameter with no counterpart has been stepped 0 times. state: not empty.
    """
    growth = map_growth(model.config, options)
    grower = ParameterGrower(model, large, growth)
    averages: dict[str, Tensor] = {}
    kinds = {name.rpartition(".")[2] for name in state}
    for name, parameter in large.named_parameters():
        old = grower.find_source_name(name)
        if old not in grower.parameters:
            averages[f"optimizer.{name}.step"] = torch.zeros(1)
        for kind in sorted(kinds):
            tensor = state.get(f"optimizer.{old}.{kind}")
            if tensor is None:
                continue
            key = f"optimizer.{name}.{kind}"
            is_count = kind == "step" or tensor.shape == (1,) != grower.parameters[old].shape
            if is_count or (not options.sizes and tensor.shape == parameter.shape):
                averages[key] = tensor.clone()
                continue
            squares = kind.endswith("exp_avg_sq")  # also matches AMSGrad's maximum
            fresh = torch.full(parameter.shape, float(tensor.mean()) if squares else 0.0, dtype=tensor.dtype)
            grown = grower.grow_tensor(name, fresh, tensor, 2 if squares else 1)
            if grown is not None:
                is_zero = split_name(name)[0] in growth.identity_layers and not squares
                averages[key] = torch.zeros_like(grown) if is_zero else grown.to(tensor.dtype)
    return averages


def finish_state(state: Mapping[str, Tensor], old_model: HeadwaterForCausalLM, new_model: HeadwaterForCausalLM) -> dict:
    """Return the optimizer's state, by name, for `new_model`, which is `old_model` after `finish_model`."""
    config, shapes = old_model.config, {name: parameter.shape for name, parameter in new_model.named_parameters()}
    plans = list(zip(plan_layers(pooled_config(config)), new_model.plans, strict=True))
    carried = {}
    for name, tensor in pool_tensors(state, config, are_moments=True).items():
        parameter = name.removeprefix("optimizer.").rpartition(".")[0]
        if tensor.shape == (1,) and parameter in shapes:
            carried[name] = tensor
        elif parameter in shapes:
            carried[name] = select_stored_heads(parameter, tensor, shapes[parameter], plans)
    return carried
