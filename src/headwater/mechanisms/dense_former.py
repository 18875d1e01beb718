"""DenseFormer: each block's output is averaged with all before it. arXiv 2402.02622, section 3 (DWA).

    X'_i = Σ_{j ≤ i} α_{i,j}·X_j        after block i, over the embedding X_0 and the outputs X_1 … X_i of the blocks

α is initialized to one on X_i and zero elsewhere. X_j are the blocks' outputs themselves, not the averages. With
dilation k only every k-th X_j counts, back from X_i; with period p only every p-th block is followed by an average.

A baseline of the value-residual paper (arXiv 2410.17897). Departures: none.
"""

from typing import Self

import torch
from torch import Tensor

from headwater.config.plan import LayerPlan, Source
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import Dim, GrowthMap
from headwater.mechanisms.shared_options import check_least, identity_with
from headwater.mechanisms.weighted_sum import weighted_sum
from headwater.util.errors import HeadwaterError


class DenseFormer(KeepsPrecision, Mechanism):
    """A weighted sum of hidden states, initialized to the last one. terms: how many are summed.

    Parameters: `alpha` [terms], in the order the hidden states are given.

        >>> import torch
        >>> from headwater.mechanisms import DenseFormer
        >>> average = DenseFormer(terms=3)
        >>> x = list(torch.randn(3, 2, 16, 64))  # the embedding and two blocks' outputs
        >>> bool(torch.equal(average(*x), x[-1]))
        True
    """

    source = "averages over depth"
    order = 160

    class Options:
        dilation: int = 1  # average over every n-th earlier layer
        period: int = 1  # act after every n-th layer

    def __init__(self, terms: int, reads: tuple[Source, ...] = (), slots: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.reads, self.slots = reads, slots
        self.alpha = fp32_parameter(terms)
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        start = torch.zeros(self.alpha.shape)
        start[-1] = 1
        return start

    def forward(self, *states: Tensor) -> Tensor:
        """`terms` hidden states [B, T, D], the block's own last -> their weighted sum [B, T, D]."""
        return weighted_sum(self.alpha, *states)

    def transform_block_output(self, x: Tensor, context: Context) -> Tensor:
        return self(*(context.sources[slot] for slot in self.slots), x)

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_least(cls, options, dilation=1, period=1)
        if options["period"] > config.num_hidden_layers:
            raise HeadwaterError(
                f"Mechanism 'dense_former': with period {options['period']} no block of "
                f"{config.num_hidden_layers} is followed by an average; lower it."
            )

    @classmethod
    def list_sources(cls, options: OptionValues, layer: int) -> tuple[Source, ...] | None:
        """The earlier hidden states averaged after block `layer`; None: no average follows it."""
        if (layer + 1) % options["period"]:
            return None
        return tuple(Source("stream", "x", j) for j in range(-1, layer) if (layer - j) % options["dilation"] == 0)

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        def amend(plan: LayerPlan) -> LayerPlan:
            sources = cls.list_sources(options, plan.index)
            return plan if sources is None else plan.acting(cls, cls.transform_block_output).reading(*sources)

        return [amend(plan) for plan in plans]

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        sources = cls.list_sources(options, plan.index)
        # Autograd keeps the block's own output. The other layers count the earlier outputs.
        return Cost() if sources is None else Cost(parameters=len(sources) + 1, saved=config.hidden_size)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        sources = cls.list_sources(options, plan.index) or ()
        return cls(len(sources) + 1, sources, tuple(plan.slot(source) for source in sources))

    # Capabilities

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        if growth.deepens and growth.preserves_function and (options["dilation"], options["period"]) != (1, 1):
            raise HeadwaterError(
                "Mechanism 'dense_former' counts layers by its dilation and period, which new layers between them "
                "change; use a method that does not keep the function, or set both to 1."
            )
        return options

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        return (Dim("layers", entries=(*(source.layer for source in self.reads), "own")),)

    def find_neutral_value(self, parameter: str) -> Tensor | None:
        return self.initial_value(parameter)

    find_identity_options = identity_with()

    per_head = per_token = True

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {"α": Shown(self.alpha, "layer", (*(source.layer for source in self.reads), plan.index))}
