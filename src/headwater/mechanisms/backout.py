"""Backout: a middle layer's output, taken out of the last one's. From nanochat; no arXiv paper.

    x_L := x_L − λ·x_m        after the last block, before the final norm

Later layers have already read the middle layer's output, so the output head need not see it again. In nanochat
(github.com/karpathy/nanochat) x_m is the output of layer m = ⌊L/2⌋, counted from 0, and λ is initially 0.2.

Departures: none.
"""

from typing import Self

import torch
from torch import Tensor

from headwater.config.plan import LayerPlan, Source
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import SAME, GrowthMap, fixed_axes
from headwater.mechanisms.shared_options import identity_with
from headwater.util.errors import HeadwaterError


class Backout(KeepsPrecision, Mechanism):
    """Subtracts a share of a middle layer's output from the last one's. weight: the init of λ.

    Parameters: `strength` [1], λ.

        >>> import torch
        >>> from headwater.mechanisms import Backout
        >>> backout = Backout(weight=0.2)
        >>> x, middle = torch.randn(2, 3, 16, 64)
        >>> bool(torch.allclose(backout(x, middle), x - 0.2 * middle))
        True
    """

    source = "a middle layer's output, taken out at the end"
    order = 190

    class Options:
        weight: float | int = 0.2  # initial λ
        layer: int | None = None  # the layer whose output is taken out; default: the middle one

    def __init__(self, weight: float = 0.2, *, slot: int = 0) -> None:
        super().__init__()
        self.weight, self.slot = weight, slot
        self.strength = fp32_parameter(1)
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        return torch.tensor([float(self.weight)])

    def forward(self, x: Tensor, middle: Tensor) -> Tensor:
        """x and middle [B, T, D] -> x without its share of middle."""
        return (x - self.strength * middle).to(x.dtype)

    def transform_block_output(self, x: Tensor, context: Context) -> Tensor:
        return self(x, context.sources[self.slot])

    # In a headwater model

    @classmethod
    def find_source(cls, options: OptionValues, config: HeadwaterConfig) -> Source:
        layer = config.num_hidden_layers // 2 if options["layer"] is None else options["layer"]
        return Source("stream", "x", layer)

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        last_layer, layer = config.num_hidden_layers - 1, cls.find_source(options, config).layer
        if not 0 <= layer < last_layer:
            raise HeadwaterError(
                f"Mechanism 'backout' subtracts the output of a layer before the last one, {last_layer}, so layer "
                f"cannot be {layer}; change layer, or num_hidden_layers."
            )

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        source = cls.find_source(options, config)
        return [*plans[:-1], plans[-1].acting(cls, cls.transform_block_output).reading(source)]

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        return Cost(parameters=1)  # the middle layer counts its output, which autograd keeps

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        return cls(options["weight"], slot=plan.slot(cls.find_source(options, config)))

    # Capabilities

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        if not growth.deepens or (options["layer"] is None and not growth.preserves_function):
            return options
        return options | {"layer": growth.find_source(len(growth.layers) - 1, cls.find_source(options, config).layer)}

    describe_axes = fixed_axes(SAME)

    find_identity_options = identity_with(weight=0.0)

    per_head = per_token = True

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {"λ": Shown(self.strength)}
