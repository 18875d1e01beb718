"""NeuTRENO: the difference to the first layer's values, added to what each head read. arXiv 2312.00751.

    U'_l = A_l·V_l + λ·(V_0 - V_l)        l ≥ 1, λ = 0.4, before the output map

A baseline of the value-residual paper (arXiv 2410.17897); λ is fixed. V_0 and V_l are the values after projection and
short convolutions; no other mechanism changes them. Together with a value residual the authors' code adds
0.2·(V_0 - V'), V' the mixed value. Where V' is 0.5·V_0 + 0.5·V_l, that equals λ = 0.1 here.

Departures: under GQA each query head gets its key/value head's difference. A head that attends to another layer's
values (skip-layer attention) takes V_l from that layer. Our addition: with `learnable`, λ is a free scalar per layer,
so that it can be zero when added to a trained model and then be learned.
"""

from typing import Self

import torch
from torch import Tensor

from headwater.config.plan import Heads, LayerPlan, Source
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import SAME, fixed_axes
from headwater.mechanisms.layer_values import check_own_values, find_value_slots, join_heads
from headwater.mechanisms.shared_options import identity_with, keep_options
from headwater.util.errors import HeadwaterError

FIRST = Source("raw", "v", 0)


class NeuTRENO(KeepsPrecision, Mechanism):
    """The difference to the first layer's values, added to the output of each head.

    weight: λ. learnable: whether λ is a parameter, with `weight` as its init.

    Parameters: none, or `lambdas` [1] if learnable.

        >>> import torch
        >>> from headwater.mechanisms import NeuTRENO
        >>> neutreno = NeuTRENO(0.4)
        >>> out = torch.randn(3, 16, 8, 64)  # what 8 query heads read at 16 tokens
        >>> neutreno(out, torch.randn(3, 2, 16, 64), torch.randn(3, 2, 16, 64)).shape
        torch.Size([3, 16, 8, 64])
    """

    source = "the difference to the first values"
    order = 110

    class Options:
        weight: float | int = 0.4  # λ
        learnable: bool = False  # λ is a scalar per layer, at first `weight`

    def __init__(
        self,
        weight: float = 0.4,
        learnable: bool = False,
        *,
        first_slot: int = 0,
        value_slots: tuple[tuple[int, Heads], ...] = (),
    ) -> None:
        super().__init__()
        self.weight = weight
        # The slot of V_0; and for each source of values its slot, and which of its heads are attended to.
        self.first_slot, self.value_slots = first_slot, value_slots
        self.lambdas = fp32_parameter(1) if learnable else None
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        return torch.full(self.lambdas.shape, float(self.weight))

    def forward(self, out: Tensor, first_values: Tensor, values: Tensor) -> Tensor:
        """Add λ·(first_values - values), V_0 and V_l [B, K, T, d], to out [B, T, H, d]."""
        # A 0-d factor does not promote the dtype of the other one.
        weight = self.weight if self.lambdas is None else self.lambdas[0]
        added = weight * (first_values - values).transpose(1, 2)
        return out + added.repeat_interleave(out.shape[2] // added.shape[2], dim=2)

    def transform_head_outputs(self, out: Tensor, context: Context) -> Tensor:
        return self(out, context.sources[self.first_slot], join_heads(context.sources, self.value_slots))

    # In a headwater model

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        check_own_values(cls, plans)

        def amend(plan: LayerPlan) -> LayerPlan:
            if all(attended.v == 0 for attended in plan.attends):
                return plan  # in layer 0 the difference is zero
            sources = (Source("raw", "v", group.v) for group in plan.groups if group.v != plan.index)
            return plan.acting(cls, cls.transform_head_outputs).reading(FIRST, *sources)

        amended = [amend(plan) for plan in plans]
        if amended == plans:
            raise HeadwaterError(
                "Mechanism 'neutreno' adds V_0 - V_l, and every layer attends to V_0 itself; remove neutreno, or what "
                "shares the values, or add layers."
            )
        return amended

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        # Autograd keeps the sum, for the output projection, and what a free weight is multiplied with.
        heads = config.num_attention_heads + options["learnable"] * config.num_key_value_heads
        return Cost(parameters=int(options["learnable"]), saved=heads * config.head_dim)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        value_slots = find_value_slots(plan, "raw")
        return cls(options["weight"], options["learnable"], first_slot=plan.slot(FIRST), value_slots=value_slots)

    # Capabilities

    grow_options = staticmethod(keep_options)
    describe_axes = fixed_axes(SAME)

    find_identity_options = identity_with(weight=0.0, learnable=True)

    per_head = per_token = True

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        fixed = torch.tensor([self.weight], dtype=torch.float64)
        return {"λ": Shown(fixed if self.lambdas is None else self.lambdas)}
