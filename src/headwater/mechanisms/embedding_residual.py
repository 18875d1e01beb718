"""The embedding, mixed into the residual stream at every layer. From nanochat and modded-nanogpt; no arXiv paper.

    x_l := λ_l·x_l + μ_l·x_0        at the beginning of every block, layer 0 included

λ and μ are free scalars per layer, initially 1 and `weight`. In nanochat (github.com/karpathy/nanochat) they are
`resid_lambdas` and `x0_lambdas`; modded-nanogpt (github.com/KellerJordan/modded-nanogpt) had both first. x_0 is the
embedding, with learned positions if the model has them.

Departures: all layers start alike, as they did in nanochat with μ = 0 and later 0.1; since it has smear, its layer l of
L starts at λ = 1.15 - 0.10·l/(L - 1) and μ = 0.20 - 0.15·l/(L - 1). Both norm the embedding first, which headwater's
models do with `embedding_norm`, and add to it that of the token before; here that is mechanism `smear`.
"""

from typing import Self

import torch
from torch import Tensor

from headwater.config.plan import EMBEDDING, LayerPlan, Source
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import SAME, fixed_axes
from headwater.mechanisms.shared_options import check_layers, grow_layers, identity_with, is_chosen
from headwater.mechanisms.weighted_sum import weighted_sum


class EmbeddingResidual(KeepsPrecision, Mechanism):
    """A weighted sum of the residual stream and the embedding. weight: the init of μ.

    Parameters: `lambdas` [2], μ and then λ, initially `weight` and 1.

        >>> import torch
        >>> from headwater.mechanisms import EmbeddingResidual
        >>> mix = EmbeddingResidual(weight=0.1)
        >>> x, embedding = torch.randn(2, 3, 16, 64)
        >>> bool(torch.allclose(mix(x, embedding), x + 0.1 * embedding))
        True
    """

    source = "the embedding, mixed into the stream"
    order = 180

    class Options:
        weight: float | int = 0.0  # initial weight of the embedding
        layers: list[int] | None = None  # layers in which it acts; default: all

    def __init__(self, weight: float = 0.0, *, slot: int = 0) -> None:
        super().__init__()
        self.weight, self.slot = weight, slot
        self.lambdas = fp32_parameter(2)
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        return torch.tensor([float(self.weight), 1.0])

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x and embedding [B, T, D] -> their weighted sum."""
        return weighted_sum(self.lambdas, embedding, x)

    def update_residual(self, x: Tensor, context: Context) -> Tensor:
        return self(x, context.sources[self.slot])

    # In a headwater model

    validate_options = classmethod(check_layers)

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        return [
            plan.acting(cls, cls.update_residual).reading(EMBEDDING) if is_chosen(plan.index, options) else plan
            for plan in plans
        ]

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        return Cost(parameters=2, saved=config.hidden_size)  # autograd keeps what λ is multiplied with

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        return cls(options["weight"], slot=plan.slot(EMBEDDING))

    # Capabilities

    grow_options = staticmethod(grow_layers)
    describe_axes = fixed_axes(SAME)

    def find_neutral_value(self, parameter: str) -> Tensor | None:
        return torch.tensor([0.0, 1.0])

    find_identity_options = identity_with(weight=0.0)

    per_head = per_token = True

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {"μ": Shown(self.lambdas[:1]), "λ": Shown(self.lambdas[1:])}
