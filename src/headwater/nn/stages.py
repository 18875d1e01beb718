"""Stages of a block or of attention: the modules of its mechanisms, run in order, and the owners of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from headwater.config.plan import LayerPlan, Part, Source, Stage
from headwater.mechanisms.contract import Context, Mechanism, Tail
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig


class ProjectionTail(NamedTuple):
    """The tails of mechanisms at the input of keys or values alone, where attention's inputs differ."""

    tail: Tail
    part: Part

    def update_tail(self, name: str, x: Tensor, length: int, everything: bool = False) -> Tensor:
        return self.tail.update_tail(f"{name}.{self.part}", x, length, everything)


class MechanismDict(nn.ModuleDict):
    """Modules by mechanism name. In parameter names, the dots and colons of a mechanism's name become _."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.names = {name: name.replace(".", "_").replace(":", "_") for name in modules}
        super().__init__({self.names[name]: module for name, module in modules.items()})

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(self.names.get(name, name))

    def named_mechanisms(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each mechanism's name and its module."""
        return ((name, self[name]) for name in self.names)


class RunsStages:
    """Mixin of a module whose mechanisms act at some stages. stages: a stage's value -> mechanisms in order."""

    mechanisms: MechanismDict
    stages: Mapping[str, Sequence[str]]

    def build_mechanisms(self, config: HeadwaterConfig, plan: LayerPlan, stages: Sequence[Stage]) -> None:
        """Build the modules of the mechanisms that act at some stages of a layer. config: the layer's."""
        acting = plan.within(stages)
        names = acting.at(*stages)
        modules = {name: resolve(name).build_module(config.mechanisms[name], config, acting) for name in names}
        for name, module in modules.items():
            if not isinstance(module, Mechanism):
                raise HeadwaterError(f"Mechanism {name!r}: build_module() returned {module!r}, not its module.")
        self.mechanisms = MechanismDict(modules)
        self.stages = {stage.value: plan.at(stage) for stage in stages}

    def list_acting(self, stage: Stage) -> Sequence[Mechanism]:
        """List the mechanisms that act at a stage, in order of application."""
        names = self.stages[stage.value]
        return [cast(Mechanism, self.mechanisms[name]) for name in names] if names else ()

    def run_stage(self, stage: Stage, x: Any, context: Context) -> Any:
        """Transform x by the mechanisms that act at a stage, each by the method that the stage names."""
        for name in self.stages[stage.value]:
            y = getattr(self.mechanisms[name], stage.value)(x, context)
            check_shapes(name, stage, x, y)
            x = y
        return x


def check_shapes(name: str, stage: Stage, x: Any, y: Any) -> None:
    """Raise `HeadwaterError` if a mechanism's output y at a stage differs in shape from its input x.

    A single head would be broadcast without a word. Compiled code does not check, and a latent becomes keys and values.
    """
    if stage is Stage.ATTENDED_KV or torch.compiler.is_compiling():
        return
    if (returned := list_shapes(y)) != (expected := list_shapes(x)):
        raise HeadwaterError(f"Mechanism {name!r}: {stage.value}() returned shapes {returned}, not {expected}.")


def list_shapes(x: Any) -> list[list[int]]:
    """List the shapes of a tensor, or of those in a tuple."""
    return [list(part.shape) for part in (x if isinstance(x, tuple) else (x,)) if isinstance(part, Tensor)]


def run_shared(
    modules: Iterable[tuple[str, nn.Module]], ids: Tensor | None = None, id_readers: Sequence[str] = ()
) -> dict[Source, Tensor]:
    """Return the outputs of the modules that a model has once, by mechanism. ids: the new tokens [B, T]."""
    return {Source("shared", name, -1): module(ids) if name in id_readers else module() for name, module in modules}


def find_owner(model: nn.Module, qualified: str) -> tuple[Mechanism | None, str]:
    """Find the innermost mechanism that contains a parameter, and its name there; (None, ""): there is none."""
    module: nn.Module | None = model
    segments = qualified.split(".")
    owner: tuple[Mechanism | None, str] = (None, "")
    for depth, segment in enumerate(segments[:-1], 1):
        module = module._modules.get(segment) if module is not None else None
        if isinstance(module, Mechanism):
            owner = module, ".".join(segments[depth:])
    return owner
