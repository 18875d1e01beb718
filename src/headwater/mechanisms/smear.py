"""Smear: to each token's embedding, a little of the previous token's. From nanochat and modded-nanogpt; no arXiv paper.

    x_0[t] := x_0[t] + λ·σ(W·x_0[t][:n])·x_0[t-1]

once, on the embedding, for all that reads it. W reads the first n channels and gives one number. In nanochat
(github.com/karpathy/nanochat) n = 24 and the embedding is normed before, without learned weights; in modded-nanogpt
(github.com/KellerJordan/modded-nanogpt) n = 12 and it is normed after. Both start with λ = 0.

Departures: the previous token is that of the same document; both take the one before it in the row. W starts like other
linear layers (theirs uniform in [0, 0.02), and at zero). Without `norm` the embedding is not normed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from headwater.config.plan import LayerPlan, Source
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import Ancestors, Context, Cost, Mechanism, Tail
from headwater.mechanisms.enlarging import SAME, Dim, Larger
from headwater.mechanisms.precision import KeepsPrecision, fp32_parameter
from headwater.mechanisms.receivers import check_channels
from headwater.mechanisms.shift import earlier
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig


class Smear(KeepsPrecision, Mechanism):
    """Adds the previous token's embedding, through a gate that the token's own opens.

        x_t := x_t + λ·σ(W·x_t[:n])·x_{t-1}

    As in nanochat and modded-nanogpt; departures at the head of this file.

    Args
        channels: n, how many channels the gate reads, the first ones.
        norm: whether x is divided by its root mean square, and when.
        weight: the init of λ.
        width: of the pieces in which a cache keeps x; default all of it.

    Parameters: `strength` [1], λ; `gate.weight` [1, channels].

        >>> import torch
        >>> from headwater.mechanisms import Smear
        >>> smear = Smear(channels=12, weight=0.5)
        >>> smear(torch.randn(3, 16, 64)).shape
        torch.Size([3, 16, 64])
    """

    @strict
    @dataclass
    class Options:
        channels: int = 12
        norm: Literal["none", "before", "after"] = "none"
        weight: float | int = 0.0

    def __init__(
        self,
        channels: int = 12,
        norm: Literal["none", "before", "after"] = "none",
        weight: float = 0.0,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.norm, self.initial, self.width = channels, norm, weight, width
        self.tail = f"{self.registered_name()}.x"
        self.strength = fp32_parameter(1)
        self.gate = nn.Linear(channels, 1, bias=False)
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        return torch.full((1,), float(self.initial)) if parameter == "strength" else None

    def choose_group(self, parameter: str) -> Literal["vectors"] | None:
        return "vectors" if parameter == "gate.weight" else None  # one row

    def forward(self, x: Tensor, reach: Tensor | Ancestors | None = None, tail: Tail | None = None) -> Tensor:
        """x [B, T, D] -> same.

        reach: [B, T], how many tokens of the same document precede each; default: all. `Ancestors` where the token
            before is not in the slot before.
        tail: holds the raw tokens before these; default: there are none.
        """
        x = self.normed(x, "before")
        pieces = x.unflatten(2, (-1, self.width or x.shape[2])).transpose(1, 2)
        branches = isinstance(reach, Ancestors)
        before = None if tail is None else tail.before(self.tail, pieces, 1, everything=branches)
        last = earlier(pieces, 1, reach, before).transpose(1, 2).flatten(2)
        gate = self.strength * self.gate(x[..., : self.channels]).sigmoid()
        return self.normed(torch.addcmul(x, last, gate.to(x.dtype)), "after")

    def normed(self, x: Tensor, when: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:]) if self.norm == when else x

    # In a headwater model

    @classmethod
    def describe_source(cls, options: dict[str, Any]) -> str:
        return "the previous token's embedding"

    @classmethod
    def validate_options(cls, options: dict[str, Any], config: "HeadwaterConfig") -> None:
        check_channels(cls.registered_name(), options["channels"], config)

    @classmethod
    def find_identity_options(cls, options: dict[str, Any]) -> dict[str, Any] | None:
        if options.get("weight") or options.get("norm", "none") != "none":
            return None
        return options | {"weight": 0.0}

    @classmethod
    def plan_stages(cls, options: dict[str, Any], config: "HeadwaterConfig", plans: list[LayerPlan]) -> list[LayerPlan]:
        return [plans[0].acting(cls, cls.transform_embedding, [("x", 1)]), *plans[1:]]

    @classmethod
    def count_cost(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> Cost:
        channels, norms = options["channels"], options["norm"] != "none"
        # Autograd keeps the embedding and the one before; what a norm is given; and the gate.
        saved = (2 + norms) * config.hidden_size + 2
        return Cost(parameters=channels + 1, flops=2 * channels, saved=saved)

    @classmethod
    def grow_options(cls, options: dict[str, Any], config: "HeadwaterConfig", growth: Larger) -> dict[str, Any]:
        if growth.pads and options["norm"] != "none" and growth.fill != "any":
            raise HeadwaterError(
                "Mechanism 'smear' divides the embedding by its root mean square, which new channels change; multiply "
                "hidden_size (hypercloning), or grow other sizes."
            )
        return options

    def describe_axes(self, parameter: str, place: tuple[Dim, Dim] | None = None) -> tuple[Dim, ...]:
        return (SAME,) if parameter == "strength" else (SAME, SAME)

    @classmethod
    def build_module(cls, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> Self:
        width = config.head_dim if config.hidden_size % config.head_dim == 0 else None
        return cls(options["channels"], options["norm"], options["weight"], width)

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {"λ": Shown(self.strength)}

    def transform_embedding(self, x: Tensor, context: Context) -> Tensor:
        return self(x, context.reach, context.tail)
