"""Parameter groups, clipping, the learning rate of a step, and the average of the weights."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.mechanisms.capabilities import GroupsParameters
from headwater.mechanisms.contract import Mechanism
from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.nn.stages import MechanismDict, find_owner
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError, find_misspelt, sentence
from headwater_lab.optimization.registry import OPTIMIZERS, SCHEDULES, values_read
from headwater_lab.optimization.tensors import list_gradients, local_shard
from headwater_lab.recipe.training_section import Training

# The groups in order, and which of them decay under each `weight_decay_on`.
GROUPS = ("matrices", "head", "tensors", "embeddings", "vectors", "scalars")
DECAYED = {
    "matrices": ("matrices", "head", "tensors"),
    "embeddings": ("matrices", "head", "tensors", "embeddings"),
    "all": GROUPS,
}
# The modules that make logits.
HEADS = ("lm_head", "classifier")


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decay_on: Literal["matrices", "embeddings", "all"] = "matrices",
) -> list[dict[str, Any]]:
    """Sort parameters into six groups: "matrices", "head" (the output's matrix, which Muon leaves to AdamW), "tensors"
    (of more than two dimensions, as in convolutions), "embeddings", "vectors" (norms, biases), and the mechanisms'
    "scalars", which stay in fp32, unsharded in every process.

    A mechanism may choose another group for a parameter, also a new one without weight decay: a group may then have
    two parts of the same name. Empty ones are left out.
    decay_on: which of them decay, see `DECAYED`. A tied output head is an embedding.
    Raises `HeadwaterError` for a mechanism that puts anything but matrices in "matrices", or gives no usable name.
    """
    # Sharded and unsharded parameters need separate groups, because they cannot be stepped together.
    by_kind: dict[tuple[str, bool], list[nn.Parameter]] = {}
    sorted_parameters: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in sorted_parameters or not parameter.requires_grad:
                continue
            sorted_parameters.add(parameter)
            unsharded = isinstance(module, KeepsPrecision)
            if unsharded:
                kind = "scalars"
            elif isinstance(module, nn.Embedding):
                kind = "embeddings"
            else:
                matrix = "head" if path in HEADS else "matrices"
                kind = ("vectors", "vectors", matrix)[parameter.ndim] if parameter.ndim < 3 else "tensors"
            owner, inner = find_owner(model, f"{path}.{name}")
            if owner is not None:
                kind = _choose_group(owner, inner, parameter, kind)
            by_kind.setdefault((kind, unsharded), []).append(parameter)
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert sorted_parameters == trainable, "the groups must hold every parameter once"
    order = [*GROUPS, *sorted({kind for kind, _ in by_kind} - {*GROUPS})]
    return [
        {"name": kind, "params": by_kind[kind, unsharded], "weight_decay": weight_decay * (kind in DECAYED[decay_on])}
        for kind, unsharded in sorted(by_kind, key=lambda key: (order.index(key[0]), not key[1]))
    ]


def _choose_group(owner: Mechanism, name: str, parameter: nn.Parameter, kind: str) -> str:
    """Choose the group in which a mechanism puts its parameter, or else `kind`. Raises `HeadwaterError`."""
    chosen = (owner.choose_group(name) if isinstance(owner, GroupsParameters) else None) or kind
    misspelt = chosen not in GROUPS and find_misspelt(str(chosen), GROUPS)
    if not isinstance(chosen, str) or misspelt or (chosen == "matrices" and parameter.ndim != 2):
        raise HeadwaterError(
            f"Mechanism {owner.registered_name()!r} puts {name!r} {list(parameter.shape)} among the {chosen}; its "
            f"choose_group() must return one of {', '.join(GROUPS)}, where matrices must have two dimensions, or "
            "another name."
        )
    return chosen


def freeze_others(model: nn.Module, trainable_mechanisms: Collection[str]) -> None:
    """Freeze all parameters except those of these mechanisms.

    Raises `HeadwaterError` if the model does not have one of them, or one has no parameters.
    """
    trainable: set[nn.Parameter] = set()
    for name in trainable_mechanisms:
        kind = resolve(name)
        entries = (
            entry
            for module in model.modules()
            if isinstance(module, MechanismDict)
            for entry in module.named_mechanisms()
        )
        modules = [module for key, module in entries if resolve(key) is kind]
        modules += [module for module in model.modules() if isinstance(module, kind)]
        parameters = {parameter for module in modules for parameter in module.parameters()}
        if not parameters:
            raise HeadwaterError(
                f"training.trainable_mechanisms: the model has no parameters of {name!r}; leave it out, or "
                "choose a mechanism that has some."
            )
        trainable |= parameters
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trainable)


def make_optimizers(model: nn.Module, training: Training) -> list[torch.optim.Optimizer]:
    """Make the recipe's optimizers, for all trainable parameters. Raises `HeadwaterError` if that fails."""
    groups = parameter_groups(model, training.weight_decay, training.weight_decay_on)
    make = OPTIMIZERS.resolve(training.optimizer)
    parameters = {parameter for group in groups for parameter in group["params"]}
    try:
        if isinstance(make, type):
            result = make(groups, lr=training.learning_rate, **training.optimizer_options)
        else:
            result = make(groups, **values_read(make, training))
        optimizers = [result] if isinstance(result, torch.optim.Optimizer) else list(result)
        stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    except Exception as error:  # outside code can raise anything
        raise HeadwaterError(
            f"The optimizer {training.optimizer!r} cannot be created: {type(error).__name__}: {sentence(error)}; see "
            "training.optimizer_options."
        ) from error
    if set(stepped) != parameters or len(stepped) != len(parameters):
        raise HeadwaterError(
            f"The optimizer {training.optimizer!r} must hold every parameter exactly once, but does not."
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("name", "matrices")
            # A rate that the optimizer has set for a group keeps its ratio to the recipe's.
            is_chosen = group["lr"] != optimizer.defaults.get("lr")
            group["ratio"] = group["lr"] / training.learning_rate if is_chosen else 1.0
            if group["name"] == "scalars":
                group["ratio"] *= training.scalar_learning_rate_multiplier
    return optimizers


def read_group_numbers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    """Read the numbers that optimizers have put into their groups, such as Prodigy's estimate of the rate: by the
    optimizer's and the group's index and their names.
    """
    return {
        f"{index}.{group_index}.{key}": value
        for index, optimizer in enumerate(optimizers)
        for group_index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if type(value) in (int, float)
        and key not in ("lr", "ratio", "weight_decay")
        and value != optimizer.defaults.get(key)
    }


def write_group_numbers(optimizers: Sequence[torch.optim.Optimizer], numbers: Mapping[str, float]) -> None:
    """Put what `read_group_numbers` returned into the optimizers' groups."""
    for name, value in numbers.items():
        index, group_index, key = name.split(".", 2)
        optimizers[int(index)].param_groups[int(group_index)][key] = value


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Compute the norm of the whole gradient, 0-d, the same in every process."""
    grads = list_gradients(parameters)
    # PyTorch's own functions do not accept sharded and unsharded tensors together.
    unsharded = [grad for grad in grads if not isinstance(grad, DTensor)]
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    norms = [nn.utils.get_total_norm(unsharded)] if unsharded else []
    if sharded:
        norms.append(cast(DTensor, nn.utils.get_total_norm(sharded)).full_tensor())
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])) if len(norms) > 1 else norms[0]


@torch.no_grad()
def clip_gradient(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale a gradient of known norm down to `limit` if it is longer (as `clip_grad_norm_` does)."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local_shard(grad) for grad in list_gradients(parameters)], factor)


def learning_rate(step: int, training: Training) -> float:
    """Compute the learning rate of step `step`, counted from 0: linear warm-up, then `training.schedule`.

    Raises `HeadwaterError` if an external schedule fails, or does not return a finite number of 0 or more.
    """
    peak = training.learning_rate
    if step < training.warmup_steps:
        return peak * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    schedule = SCHEDULES.resolve(training.schedule)
    try:
        fraction = schedule(progress, **values_read(schedule, training))
    except Exception as error:  # outside code can raise anything
        raise HeadwaterError(
            f"The schedule {training.schedule!r} fails after {progress:.3g} of the steps: {type(error).__name__}: "
            f"{sentence(error)}."
        ) from error
    if not (isinstance(fraction, float | int) and 0 <= fraction < math.inf):
        raise HeadwaterError(
            f"The schedule {training.schedule!r} returns {fraction!r} after {progress:.3g} of the steps; it must "
            "return a fraction of the learning rate, 0 or more."
        )
    return peak * fraction


class Average:
    """An exponential moving average of a model's trainable parameters, sharded as they are: `training.ema_decay`.

    While it is `in_place`, it is in the model, and the trained weights are here.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.tensors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int, finite: Tensor) -> None:
        """Update the average after optimizer step `step`, counted from 1. finite: whether it was taken, 0-d."""
        weight = (1 - min(self.decay, (1 + step) / (10 + step))) * finite
        means = [local_shard(tensor) for tensor in self.tensors.values()]
        moves = torch._foreach_sub([local_shard(parameter) for parameter in self.parameters.values()], means)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(means, moves)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the model with those here."""
        for name, parameter in self.parameters.items():
            weights, average = local_shard(parameter), local_shard(self.tensors[name])
            trained = weights.clone()
            weights.copy_(average)
            average.copy_(trained)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average into the model, and the trained weights back at the end."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors that are saved with the model, by name."""
        return {f"trained.{name}": tensor for name, tensor in self.tensors.items()}
