"""Exclusive self attention (XSA): what a head reads, without the part along the token's own value. arXiv 2603.09078.

    y'_t = y_t - α·(y_t·v̂_t)·v̂_t        v̂_t = v_t / ‖v_t‖

y_t is what a head has read at token t, and v_t the value of the same token that the head attends to: after all other
mechanisms that change values, before the output map. The residual stream already contains the token's own value. In the
paper α = 1. In modded-nanogpt α is the hyperbolic tangent of a free scalar per query head, initially 0: `learnable`.

Departures: where ‖v_t‖ is zero nothing is removed. A head that attends to another layer's values (skip-layer attention,
SVFormer) takes v_t from that layer; under GQA each query head takes its key/value head's.
"""

from typing import Self

import torch
from torch import Tensor

from headwater.config.plan import Heads, LayerPlan, Source
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import Dim, fixed_axes
from headwater.mechanisms.layer_values import check_own_values, find_value_slots, join_heads
from headwater.mechanisms.shared_options import check_layers, grow_layers, identity_with, is_chosen
from headwater.util.errors import HeadwaterError

# The smallest ‖v‖² to divide by.
GUARD = 1e-24


class Exclusive(KeepsPrecision, Mechanism):
    """Removes from what each head has read the part along the token's own value.

    heads: how many query heads have a learned α; 0 (default): α = 1 for all.

    Parameters: none, or `alpha` [heads], whose hyperbolic tangent is α; initially zero, so that nothing is removed.

        >>> import torch
        >>> from headwater.mechanisms import Exclusive
        >>> exclusive = Exclusive()
        >>> v = torch.randn(3, 2, 16, 64)  # the values of 2 key/value heads at 16 tokens
        >>> y = exclusive(torch.randn(3, 16, 8, 64), v)  # what 8 query heads read
        >>> bool((y[:, :, 0] * v[:, 0]).sum(-1).abs().max() < 1e-4)
        True
    """

    source = "what a head reads, without the token's own value"
    order = 120
    paper = "2603.09078"

    class Options:
        learnable: bool = False  # α = tanh of a scalar per query head, at first 0; false: α = 1
        layers: list[int] | None = None  # layers in which it acts; default: all

    def __init__(self, heads: int = 0, *, value_slots: tuple[tuple[int, Heads], ...] = ()) -> None:
        super().__init__()
        # For each source of values: its slot, and which of its heads are attended to.
        self.value_slots = value_slots
        self.alpha = fp32_parameter(heads) if heads else None
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(self.alpha.shape)

    def forward(self, out: Tensor, values: Tensor) -> Tensor:
        """Return out [B, T, H, d] without its part along the tokens' own values [B, K, T, d]."""
        v_BTK1d = values.transpose(1, 2).unsqueeze(3)
        y_BTKGd = out.unflatten(2, (v_BTK1d.shape[2], -1))
        # float16 cannot hold the squares of large values.
        a, b = (y_BTKGd.float(), v_BTK1d.float()) if v_BTK1d.dtype == torch.float16 else (y_BTKGd, v_BTK1d)
        # Do not normalize v first: where a token reads only itself, y = v, nothing may remain, not even rounding.
        square_BTK1 = torch.linalg.vecdot(b, b)
        times_BTKG = torch.linalg.vecdot(a, b) / square_BTK1.clamp(min=GUARD)
        if self.alpha is not None:
            times_BTKG = times_BTKG * self.alpha.tanh().view(y_BTKGd.shape[2:4])
        return torch.addcmul(y_BTKGd, times_BTKG.to(y_BTKGd.dtype).unsqueeze(4), v_BTK1d, value=-1).flatten(2, 3)

    def transform_head_outputs(self, out: Tensor, context: Context) -> Tensor:
        return self(out, join_heads(context.sources, self.value_slots))

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_layers(cls, options, config)
        if not config.first_residual and not options["learnable"] and is_chosen(0, options):
            raise HeadwaterError(
                "Mechanism 'exclusive' removes a token's own value, which is all that a row's first token reads in "
                "layer 0, and with first_residual=False nothing of that token would be left; set first_residual, or "
                "learnable, or leave layer 0 out of layers."
            )

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        check_own_values(cls, plans)

        def amend(plan: LayerPlan) -> LayerPlan:
            sources = (Source("local", "v", group.v) for group in plan.groups if group.v != plan.index)
            return plan.acting(cls, cls.transform_head_outputs).reading(*sources)

        return [amend(plan) if is_chosen(plan.index, options) else plan for plan in plans]

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        # Autograd keeps the result, for the output projection, and the numbers per head.
        heads, learned = config.num_attention_heads, config.num_attention_heads * options["learnable"]
        saved = heads * (config.head_dim + 2) + 2 * config.num_key_value_heads + learned
        return Cost(parameters=learned, saved=saved)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        heads = config.num_attention_heads * options["learnable"]
        return cls(heads, value_slots=find_value_slots(plan, "local"))

    # Capabilities

    grow_options = staticmethod(grow_layers)

    describe_axes = fixed_axes(Dim("q"))

    find_identity_options = identity_with(learnable=True)

    per_head = per_token = True

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        if self.alpha is None:
            return {"α": Shown(torch.ones(1, dtype=torch.float64))}
        return {"α": Shown(self.alpha.tanh(), "query head", tuple(range(len(self.alpha))))}
