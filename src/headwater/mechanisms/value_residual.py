"""Value residual (ResFormer): values from the first layer. arXiv 2410.17897, section 3.2, equations 3-5.

    V'_l = λ_{l,1}·V_0 + λ_{l,2}·V_l        l ≥ 1;  V_0: the first layer's value projection

V_0 is taken right after projection, before any other mechanism, head split, cache or RoPE; gradients flow into it.
Departures: none in the two modes here. The start of the learnable form, 0.5, follows the authors' code; the paper
does not give it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from headwater.mechanisms.base import KV, Local, Mechanism
from headwater.plan import LayerPlan, Source

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig

FIRST = Source("raw", "v", 0)


class ValueResidual(Mechanism):
    """Mix of each layer's values with the first layer's.

    Options
        mode: "identity" (λ1 = λ2 = 0.5, fixed) or "learnable" (default; free scalars per layer that start at 0.5).

    Parameters: `lambdas` [2] in learnable mode: λ1 weighs V_0, λ2 the layer's own values.
    """

    @strict
    @dataclass
    class Options:
        mode: Literal["identity", "learnable"] = "learnable"

    def __init__(self, options: dict[str, Any], config: "HeadwaterConfig", plan: LayerPlan) -> None:
        super().__init__(options, config, plan)
        self.lambdas = self.scalars(2) if options["mode"] == "learnable" else None

    @classmethod
    def plan(cls, options: dict[str, Any], plans: list[LayerPlan]) -> list[LayerPlan]:
        first, *rest = plans
        return [first, *(plan.acting(cls.name()).reading(FIRST) if plan.owns_v else plan for plan in rest)]

    def start(self, parameter: str, generator: torch.Generator) -> Tensor:
        return torch.full((2,), 0.5)

    def local(self, q: Tensor, kv: KV, context: Local) -> tuple[Tensor, KV]:
        assert kv.v is not None  # the plan lets it act only where there are values
        first = context.sources[FIRST]
        # 0-d factors do not raise the dtype of what they multiply: bf16 values stay bf16.
        first_weight, own_weight = (0.5, 0.5) if self.lambdas is None else self.lambdas.unbind()
        return q, kv._replace(v=first_weight * first + own_weight * kv.v)
