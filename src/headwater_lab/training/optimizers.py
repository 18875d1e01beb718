"""Parameter groups, optimizers, clipping, learning-rate schedules, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from headwater.mechanisms.capabilities import GroupsParameters
from headwater.mechanisms.contract import Mechanism
from headwater.mechanisms.named import Named, owner_of
from headwater.mechanisms.precision import KeepsPrecision
from headwater.plugins.registry import resolve
from headwater.util.errors import HeadwaterError, sentence
from headwater_lab.optimization.registry import OPTIMIZERS, SCHEDULES
from headwater_lab.recipe.training import Training
from headwater_lab.training.processes import local

# The groups in order, and which of them decay under each `weight_decay_on`.
GROUPS = ("matrices", "tensors", "embeddings", "vectors", "scalars")
DECAYED = {
    "matrices": ("matrices", "tensors"),
    "embeddings": ("matrices", "tensors", "embeddings"),
    "all": GROUPS,
}


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decay_on: Literal["matrices", "embeddings", "all"] = "matrices",
) -> list[dict[str, Any]]:
    """Five groups: "matrices", "tensors" (of more than two dimensions, as in convolutions), "embeddings", "vectors"
    (norms, biases), and the mechanisms' "scalars", which stay in fp32, unsharded in every process.

    A mechanism may choose another group for a parameter, also one of its own, which does not decay: a group may then
    have two parts of the same name. Empty ones are left out.
    decay_on: which of them decay, see `DECAYED`. A tied output head is an embedding.
    Raises `HeadwaterError` for a mechanism that puts anything but matrices in "matrices", or gives no usable name.
    """
    found: dict[tuple[str, bool], list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    for place, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            whole = isinstance(module, KeepsPrecision)
            if whole:
                kind = "scalars"
            elif isinstance(module, nn.Embedding):
                kind = "embeddings"
            else:
                kind = ("vectors", "vectors", "matrices")[parameter.ndim] if parameter.ndim < 3 else "tensors"
            owner, inner = owner_of(model, f"{place}.{name}")
            if owner is not None:
                kind = _choose_group(owner, inner, parameter, kind)
            # Sharded and unsharded parameters cannot be stepped together.
            found.setdefault((kind, whole), []).append(parameter)

    def order(key: tuple[str, bool]) -> tuple[Any, ...]:
        kind, whole = key
        return GROUPS.index(kind) if kind in GROUPS else len(GROUPS), kind, not whole

    groups = []
    for kind, whole in sorted(found, key=order):
        decay = weight_decay if kind in DECAYED[decay_on] else 0.0
        groups.append({"name": kind, "params": found[kind, whole], "weight_decay": decay})
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert seen == trainable, "the groups must hold every parameter once"
    return groups


def _choose_group(owner: Mechanism, name: str, parameter: nn.Parameter, kind: str) -> str:
    """The group in which a mechanism puts its parameter, or else `kind`. Raises `HeadwaterError`."""
    chosen = (owner.choose_group(name) if isinstance(owner, GroupsParameters) else None) or kind
    misspelt = chosen not in GROUPS and get_close_matches(str(chosen), GROUPS, cutoff=0.7)
    if not isinstance(chosen, str) or misspelt or (chosen == "matrices" and parameter.ndim != 2):
        raise HeadwaterError(
            f"Mechanism {owner.registered_name()!r} puts {name!r} {list(parameter.shape)} among the {chosen}; its "
            f"choose_group() must give one of {', '.join(GROUPS)}, of which matrices have two dimensions, or a name "
            "unlike these."
        )
    return chosen


def freeze(model: nn.Module, trainable_mechanisms: Collection[str]) -> None:
    """Leave the parameters of these mechanisms trainable, and no others.

    Raises `HeadwaterError` if the model does not have one of them, or one has no parameters.
    """
    chosen: set[nn.Parameter] = set()
    for name in trainable_mechanisms:
        kind = resolve(name)
        named = (one for module in model.modules() if isinstance(module, Named) for one in module.named())
        modules = [module for key, module in named if resolve(key) is kind]
        modules += [module for module in model.modules() if isinstance(module, kind)]
        own = {parameter for module in modules for parameter in module.parameters()}
        if not own:
            raise HeadwaterError(
                f"training.trainable_mechanisms: the model has no parameters of {name!r}; leave it out, or "
                "choose a mechanism that has some."
            )
        chosen |= own
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in chosen)


# Values of `training.optimizer`: functions from the groups of `parameter_groups`, which keep their names, and the
# recipe's section to optimizers that together hold every parameter. Or classes like those of torch.optim.
Groups = list[dict[str, Any]]


def make_optimizers(model: nn.Module, training: Training, device: torch.device) -> list[torch.optim.Optimizer]:
    """The recipe's optimizers, for all trainable parameters. Raises `HeadwaterError` if they cannot be created."""
    groups = parameter_groups(model, training.weight_decay, training.weight_decay_on)
    make = OPTIMIZERS.resolve(training.optimizer)
    if training.optimizer in OPTIMIZERS.own:
        return make(groups, training, device)
    held = {parameter for group in groups for parameter in group["params"]}
    try:
        if isinstance(make, type) and issubclass(make, torch.optim.Optimizer):
            made = cast(Any, make)(groups, lr=training.learning_rate, **training.optimizer_options)
        else:
            made = make(groups, training)
        optimizers = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        given = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
    except Exception as error:  # outside code can raise anything
        raise HeadwaterError(
            f"The optimizer {training.optimizer!r} cannot be created: {type(error).__name__}: {sentence(error)}; see "
            "training.optimizer_options."
        ) from error
    if set(given) != held or len(given) != len(held):
        raise HeadwaterError(
            f"The optimizer {training.optimizer!r} must hold every parameter exactly once, but does not."
        )
    for group in (group for one in optimizers for group in one.param_groups):
        group.setdefault("name", "matrices")
    return optimizers


def adamw(groups: Groups, training: Training, device: torch.device) -> list[torch.optim.Optimizer]:
    """AdamW, fused if available."""
    if not groups:
        return []
    fused = device.type in ("cpu", "cuda")
    return [
        torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, eps=training.epsilon, fused=fused)
    ]


def muon(groups: Groups, training: Training, device: torch.device) -> list[torch.optim.Optimizer]:
    """Muon, which orthogonalizes a matrix's averaged gradient, for the matrices, and AdamW for the rest."""
    matrices = [group for group in groups if group["name"] == "matrices"]
    others = adamw([group for group in groups if group["name"] != "matrices"], training, device)
    if not matrices:
        return others
    return [Muon(matrices, lr=training.learning_rate, momentum=training.momentum), *others]


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient, 0-d, the same in every process."""
    grads = gradients(parameters)
    # PyTorch's own functions do not accept sharded and unsharded tensors together.
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    split = [grad for grad in grads if isinstance(grad, DTensor)]
    norms = [nn.utils.get_total_norm(whole)] if whole else []
    if split:
        norms.append(cast(DTensor, nn.utils.get_total_norm(split)).full_tensor())
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])) if len(norms) > 1 else norms[0]


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale a gradient of known norm down to `limit` if it is longer (as `clip_grad_norm_` does)."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(grad) for grad in gradients(parameters)], factor)


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def learning_rate(step: int, training: Training) -> float:
    """The learning rate of step `step`, counted from 0: linear warm-up, then `training.schedule`.

    Raises `HeadwaterError` if an outside schedule does not return a finite number of 0 or more.
    """
    peak = training.learning_rate
    if step < training.warmup_steps:
        return peak * (step + 1) / training.warmup_steps
    done = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    part = SCHEDULES.resolve(training.schedule)(done, training)
    if not (isinstance(part, float | int) and 0 <= part < math.inf):
        raise HeadwaterError(
            f"The schedule {training.schedule!r} returns {part!r} after {done:.3g} of the steps; it must return a "
            "fraction of the learning rate, 0 or more."
        )
    return peak * part


# Values of `training.schedule`: functions from the progress after the warm-up, 0 to 1, and the recipe's section to a
# fraction of the peak learning rate.


def cosine(done: float, training: Training) -> float:
    """A half cosine from the peak to `min_learning_rate_ratio`."""
    final = training.min_learning_rate_ratio
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))


def constant(done: float, training: Training) -> float:
    """The peak."""
    return 1.0


# The quintic polynomial that Newton-Schulz applies five times: steep at 0, and near 1 only roughly 1.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS, EPS = 5, 1e-7


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, for matrices; updates have the size of AdamW's, so one learning rate fits both.

    Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); learning rate and weight decay as
    in Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, sections 2.2 and 2.3:

        M ← μM + (1 - μ)G        O = NewtonSchulz5(μM + (1 - μ)G)        W ← W - η(0.2·√max(rows, columns)·O + λW)

    `torch.optim.Muon` takes one matrix after another, and under FSDP2 every process orthogonalizes all of them. Here
    all matrices of one shape are one batched product, and under FSDP2 each process orthogonalizes a share of them,
    unsharded, and sends the rows back to their owners.

    Its state is that of `torch.optim.Muon`: "momentum_buffer" for each parameter. Like a fused optimizer it changes
    nothing if `found_inf`, 0-d, is 1.
    """

    # How GradScaler and our loop tell that an optimizer can skip a step on the device.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(
        self, params: Sequence[dict[str, Any]], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        """params: groups of two-dimensional parameters. Raises `HeadwaterError` for others."""
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.ndim != 2:
                raise HeadwaterError(f"Muon is for matrices, but was given a parameter of {list(parameter.shape)}.")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; closure: recomputes the loss and its gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    split = parameter.device_mesh if isinstance(parameter, DTensor) else None
                    alike.setdefault((parameter.shape, parameter.dtype, parameter.device, split), []).append(parameter)
            for parameters in alike.values():
                self._step_alike(parameters, group["lr"], group["momentum"], group["weight_decay"])
        return loss

    def _step_alike(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        weights = [local(parameter) for parameter in parameters]
        buffers = [local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        grads = [local(grad) for grad in gradients(parameters)]
        taken: Tensor | float = 1.0
        if self.found_inf is not None:
            taken = 1.0 - self.found_inf
            # A gradient that is not finite must not reach the momentum, not even times zero.
            grads = [torch.where(taken > 0, grad, 0) for grad in grads]
        differences = torch._foreach_sub(grads, buffers)
        torch._foreach_mul_(differences, (1 - momentum) * taken)
        torch._foreach_add_(buffers, differences)
        updates = _orthogonalized(parameters[0], torch.stack(torch._foreach_lerp(grads, buffers, momentum)))
        size = 0.2 * max(parameters[0].shape) ** 0.5
        torch._foreach_mul_(weights, 1 - lr * weight_decay * taken)
        torch._foreach_add_(weights, list((updates.to(weights[0].dtype) * (-lr * size * taken)).unbind()))


def newton_schulz(matrices: Tensor) -> Tensor:
    """U·S·Vᵀ -> U·S'·Vᵀ with S' near 1, in bfloat16; matrices [N, rows, columns]."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


def _orthogonalized(like: nn.Parameter, updates: Tensor) -> Tensor:
    """The orthogonalized `updates` [N, rows, columns] of N parameters such as `like`; if sharded, only our rows."""
    if not isinstance(like, DTensor):
        return newton_schulz(updates)
    assert like.placements == (Shard(0),), "FSDP2 splits the rows"
    group = like.device_mesh.get_group()
    world = dist.get_world_size(group)
    count, (rows, columns) = len(updates), like.shape
    each, share = -(-count // world), -(-rows // world)  # matrices per process; rows per process, except the last ones
    # Sent in bfloat16, which the iteration uses, padded with zeros.
    padded = updates.new_zeros(each * world, share, columns, dtype=torch.bfloat16)
    padded[:count, : updates.shape[1]] = updates
    whole = torch.empty_like(padded)
    dist.all_to_all_single(whole, padded, group=group)
    mine = whole.view(world, each, share, columns).transpose(0, 1).reshape(each, world * share, columns)[:, :rows]
    done = padded.new_zeros(each, world * share, columns)
    done[:, :rows] = newton_schulz(mine)
    parts = done.view(each, world, share, columns).transpose(0, 1).reshape(each * world, share, columns).contiguous()
    back = torch.empty_like(parts)
    dist.all_to_all_single(back, parts, group=group)
    return back[:count, : updates.shape[1]]


class Average:
    """An exponential moving average of a model's trainable parameters, sharded as they are: `training.ema_decay`.

    While it is `in_place`, it is in the model, and the trained weights are here.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.tensors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int, taken: Tensor) -> None:
        """After optimizer step `step`, counted from 1. taken: whether it changed the weights, 0-d."""
        weight = (1 - min(self.decay, (1 + step) / (10 + step))) * taken
        means = [local(tensor) for tensor in self.tensors.values()]
        moves = torch._foreach_sub([local(parameter) for parameter in self.parameters.values()], means)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(means, moves)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the model with those here."""
        for name, parameter in self.parameters.items():
            own, other = local(parameter), local(self.tensors[name])
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @property
    def state(self) -> dict[str, Tensor]:
        """What is saved beside the model, by name."""
        return {f"trained.{name}": tensor for name, tensor in self.tensors.items()}
