"""Smear: add a little of the previous token's embedding to each token's.

From nanochat and modded-nanogpt; no arXiv paper:

    x_0[t] := x_0[t] + λ·σ(W·x_0[t][:n])·x_0[t-1]

once, on the embedding, for all that reads it. In nanochat (github.com/karpathy/nanochat) n = 24 and the embedding is
normed before, without learned weights; in modded-nanogpt (github.com/KellerJordan/modded-nanogpt) n = 12 and it is
normed after. Both start with λ = 0.

Departures: the previous token is from the same document; both take the one before it in the row. W starts like other
linear layers (theirs uniform in [0, 0.02), and at zero). Without `norm` the embedding is not normed.
"""

from typing import Literal, Self

import torch
from torch import Tensor, nn

from headwater.config.plan import LayerPlan, Source
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import Context, Cost, Mechanism, OptionValues, Reach, Tail
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import SAME, GrowthMap, fixed_axes
from headwater.mechanisms.shared_options import check_channels, identity_with
from headwater.mechanisms.shift import previous_token
from headwater.util.errors import HeadwaterError


class Smear(KeepsPrecision, Mechanism):
    """Adds the previous token's embedding, through a gate computed from the token's own.

    Args
        channels: n, which W reads. weight: the init of λ. norm: whether x is divided by its root mean square, and when.
        width: of the pieces in which a cache keeps x; default all of it.

    Parameters: `strength` [1], λ; `gate.weight` [1, channels].

        >>> import torch
        >>> from headwater.mechanisms import Smear
        >>> Smear(channels=12, weight=0.5)(torch.randn(3, 16, 64)).shape
        torch.Size([3, 16, 64])
    """

    source = "the previous token's embedding"
    order = 170

    class Options:
        channels: int = 12  # n, the number of channels that the gate reads, from the first
        norm: Literal["none", "before", "after"] = "none"  # when x_0 is divided by its root mean square
        weight: float | int = 0.0  # initial λ

    def __init__(self, channels: int = 12, norm: str = "none", weight: float = 0.0, width: int | None = None) -> None:
        super().__init__()
        self.channels, self.norm, self.initial, self.width = channels, norm, weight, width
        self.tail = f"{self.registered_name()}.x"
        self.strength = fp32_parameter(1)
        self.gate = nn.Linear(channels, 1, bias=False)
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        return torch.full((1,), float(self.initial)) if parameter == "strength" else None

    def forward(self, x: Tensor, reach: Reach = None, tail: Tail | None = None) -> Tensor:
        """x [B, T, D] -> same. reach: as in `Context`; default: a row is one document. tail: has the tokens before."""
        x = nn.functional.rms_norm(x, x.shape[-1:]) if self.norm == "before" else x
        x_BHTd = x.unflatten(2, (-1, self.width or x.shape[2])).transpose(1, 2)
        previous_BTD = previous_token(x_BHTd, reach, tail, self.tail).transpose(1, 2).flatten(2)
        gate_BT1 = self.strength * self.gate(x[..., : self.channels]).sigmoid()
        y_BTD = torch.addcmul(x, previous_BTD, gate_BT1.to(x.dtype))
        return nn.functional.rms_norm(y_BTD, y_BTD.shape[-1:]) if self.norm == "after" else y_BTD

    def transform_embedding(self, x: Tensor, context: Context) -> Tensor:
        return self(x, context.reach, context.tail)

    # In a headwater model

    validate_options = classmethod(check_channels)

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        return [plans[0].acting(cls, cls.transform_embedding, [("x", 1)]), *plans[1:]]

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        channels, norms = options["channels"], options["norm"] != "none"
        # Autograd keeps the embedding and its predecessor, the input of a norm, and the gate.
        return Cost(parameters=channels + 1, flops=2 * channels, saved=(2 + norms) * config.hidden_size + 2)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        return cls(**options, width=config.head_dim if config.hidden_size % config.head_dim == 0 else None)

    # Capabilities

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        if growth.pads and options["norm"] != "none" and growth.zero_init:
            raise HeadwaterError(
                "Mechanism 'smear' norms the embedding, which new channels change; multiply hidden_size (hypercloning)."
            )
        return options

    describe_axes = fixed_axes(SAME)

    find_identity_options = identity_with(weight=0.0, norm="none")

    def choose_group(self, parameter: str) -> Literal["vectors"] | None:
        return "vectors" if parameter == "gate.weight" else None  # a matrix of a single row

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {"λ": Shown(self.strength)}
