"""The contract of a mechanism: where it acts, what it needs, what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from headwater.errors import HeadwaterError, nearest
from headwater.plan import LayerPlan, Source
from headwater.precision import KeepsPrecision

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig


class KV(NamedTuple):
    """Keys and values [B, K, T, d] of the new tokens; `v` is None in a layer that owns no values."""

    k: Tensor
    v: Tensor | None


class Tail(Protocol):
    """Cache layers that keep raw tokens (models/cache.py) implement this."""

    def with_tail(self, kv: KV, length: int) -> KV:
        """`kv` preceded by the `length` raw tokens before it (zeros at the start); remembers the last ones."""
        ...


@dataclass(frozen=True)
class Local:
    """What a mechanism may look at besides the layer's own projections.

    sources: tensors of earlier layers, by the names the plan gave them.
    reach: [B, T], how many tokens back the same document goes at each position (0 at its first token, and at the
        first real token of a left-padded row); None for rows that are one document from their first slot on.
    tail: where raw tokens of earlier calls are kept; None without a cache.
    """

    sources: dict[Source, Tensor]
    reach: Tensor | None = None
    tail: Tail | None = None


class Mechanism(KeepsPrecision):
    """One mechanism in one layer. Subclasses override what they need; each stage passes through by default.

    The classmethods are asked before any module is built: `options` and `validate` by the config, `plan` by the plan.
    The stage methods are called by `nn.attention.Attention`, in the config's order.

    Parameters of a mechanism are a few scalars per head. They stay in fp32 (or fp64) whatever precision the
    model is cast to: in bf16 an update of 2e-4 to a scalar near 1 is lost.
    """

    # A strict dataclass with the mechanism's options and their defaults. Strict dataclasses check a field when it is
    # set, and against its type: not in a frozen one, and not where annotations are postponed to strings.
    Options: ClassVar[type]

    def __init__(self, options: dict[str, Any], config: HeadwaterConfig, plan: LayerPlan) -> None:
        super().__init__()

    @classmethod
    def options(cls, given: dict[str, Any] | None) -> dict[str, Any]:
        """The options with defaults filled in. Raises `HeadwaterError` for an unknown name or a wrong type."""
        name = cls.name()
        given = given or {}
        if not isinstance(given, dict):
            raise HeadwaterError(
                f"The options of mechanism {name!r} must be a mapping, not {given!r}; write {{}} for none."
            )
        known = [field.name for field in fields(cls.Options)]
        for key in given:
            if key not in known:
                raise HeadwaterError(
                    f"Mechanism {name!r} has no option {key!r}; {nearest(key, known) if known else 'it has none.'}"
                )
        try:
            options = cls.Options(**given)
        except StrictDataclassError as error:
            raise HeadwaterError(f"Mechanism {name!r}: {error.__cause__ or error}") from error
        return asdict(options)

    @classmethod
    def name(cls) -> str:
        """The mechanism's name in the config: the name of the file it stands in."""
        return cls.__module__.removeprefix("headwater.mechanisms.").split(".")[-1].removeprefix("headwater_mechanisms_")

    @staticmethod
    def scalars(*shape: int) -> nn.Parameter:
        """An empty parameter of at least fp32, whatever the precision the model is built in."""
        return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    @classmethod
    def validate(cls, options: dict[str, Any], config: HeadwaterConfig) -> None:
        """Raise `HeadwaterError` where the options contradict the config."""

    @classmethod
    def plan(cls, options: dict[str, Any], plans: list[LayerPlan]) -> list[LayerPlan]:
        """Amend the plans of the layers this mechanism acts in, with `LayerPlan.acting` and `.reading`."""
        raise NotImplementedError

    def start(self, parameter: str, generator: torch.Generator) -> Tensor:
        """The start of one of the module's own parameters, drawn from `generator` on the CPU."""
        raise NotImplementedError

    def local(self, q: Tensor, kv: KV, context: Local) -> tuple[Tensor, KV]:
        """Stage 1, after projection and before RoPE and cache: q [B, H, T, d], kv [B, K, T, d] -> same."""
        return q, kv
