"""Attention over depth: learned queries choose among the outputs of all earlier layers. AttnRes, arXiv 2603.15031.

    x^s = Σ_j p^s_j·h_j        p^s = softmax_j(w^s·norm(h_j))        s: queries, keys, values, or one for all

is what a block's attention reads instead of the residual stream. h_0 is the embedding, h_j what the next `block`
layers added to the stream, and the last h_j what those since have added. norm is RMSNorm without weights; w^s is a free
vector, initially zero, so that every h_j counts the same. Inkling 2 (transformers' `inkling2`) divides the scores by √D
and sums norm(h_j); its layers with full attention have three queries, the others one, for blocks of 6 layers.

Departures: in both models feed-forwards and the output head read over depth too, and there is no other stream. Here the
residual stream stays, and what a block adds to it does not change. AttnRes counts attention and feed-forward as two
layers, and norms with weights, which w^s can express; a block of headwater is one layer. Inkling 2 norms the inputs of
queries, keys and values with weights of their own, which the projections can express.
"""

from itertools import pairwise
from typing import Literal, Self

import torch
from torch import Tensor, nn

from headwater.config.plan import LayerPlan, Source, Stage
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import AttentionInputs, Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.growth_map import READS, SAME, GrowthMap, fixed_axes
from headwater.mechanisms.shared_options import check_least, check_receivers, list_receivers
from headwater.util.errors import HeadwaterError

DepthVariant = Literal["attnres", "inkling_2"]


class DepthAttention(Mechanism):
    """Attention over the outputs of earlier layers, token by token, with learned queries.

    Args
        width: of the hidden states. queries: how many w there are. eps: of the norm.
        variant: "attnres"; "inkling_2": the scores are divided by √width, and norm(h_j) is summed.

    Parameters: `query` [queries, width], initially zero.

        >>> import torch
        >>> from headwater.mechanisms import DepthAttention
        >>> over_depth = DepthAttention(width=64)
        >>> earlier, x = list(torch.randn(3, 2, 16, 64)), torch.randn(2, 16, 64)
        >>> bool(torch.allclose(over_depth(x, *earlier), x / 4, atol=1e-6))
        True
    """

    source = "what earlier layers wrote, chosen by learned queries"
    order = 140
    paper = "2603.15031"

    class Options:
        queries: Literal[1, 3] = 1  # 1: one query a block; 3: one each for q, k and v
        variant: DepthVariant = "attnres"  # inkling_2 divides scores by √D and sums norm(h_j)
        block: int = 1  # number of layers whose sum is one state
        layers: list[int] | None = None  # layers in which it acts; default: all but the first

    def __init__(
        self,
        width: int,
        queries: int = 1,
        variant: DepthVariant = "attnres",
        eps: float = 1e-6,
        *,
        slots: tuple[int, ...] = (),
        is_first: bool = True,
    ) -> None:
        super().__init__()
        self.variant, self.eps = variant, eps
        self.slots, self.is_first = slots, is_first
        self.query = nn.Parameter(torch.empty(queries, width))
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(self.query.shape)

    def forward(self, x: Tensor, *earlier: Tensor) -> Tensor:
        """Attend to x and the earlier hidden states [B, T, D], in order -> [queries, B, T, D]; for one query [B, T, D].

        x: the residual stream [B, T, D], or one input for each query [queries, B, T, D]."""
        states = [*earlier, x]
        written = [states[0], *(new - old for old, new in pairwise(states))]
        width, scores, norms = self.query.shape[1], [], []
        # Always a new tensor: products with a single vector round differently if it is not aligned, as after loading.
        query = (self.query * (width**-0.5 if self.variant == "inkling_2" else 1.0)).to(x.dtype)
        for h in written:
            wide = torch.promote_types(h.dtype, torch.float32)
            # Unlike a cast, vector_norm stores no fp32 copy of h.
            norm_BT = (torch.linalg.vector_norm(h, dim=-1, dtype=wide).square() / width + self.eps).rsqrt()
            if h.ndim == 4:
                score_WBT = torch.einsum("sbtd,sd->sbt", h, query)
            else:
                score_WBT = nn.functional.linear(h, query).movedim(2, 0)
            scores.append(score_WBT * norm_BT)
            norms.append(norm_BT)
        weights: list[Tensor] = list(torch.stack(scores, dim=3).softmax(3).unbind(3))
        if self.variant == "inkling_2":
            weights = [weight * norm_BT for weight, norm_BT in zip(weights, norms, strict=True)]
        weights = [weight.unsqueeze(3).to(x.dtype) for weight in weights]
        y_WBTD = weights[0] * written[0]
        for weight, h in zip(weights[1:], written[1:], strict=True):
            y_WBTD = torch.addcmul(y_WBTD, weight, h)
        return y_WBTD[0] if len(self.query) == 1 else y_WBTD

    def transform_block_input(self, x: Tensor, context: Context) -> Tensor:
        return self(x, *(context.sources[slot] for slot in self.slots))

    def split_attention_inputs(self, x: AttentionInputs, context: Context) -> AttentionInputs:
        state = x.q if self.is_first else torch.stack(x.list_inputs())
        mixed = self(state, *(context.sources[slot] for slot in self.slots))
        return x.replace_inputs(mixed.unbind(0) if len(self.query) > 1 else [mixed])

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_receivers(cls, options, config)
        check_least(cls, options, block=1)

    @classmethod
    def list_sources(cls, options: OptionValues, layer: int) -> tuple[Source, ...]:
        """List the earlier hidden states at the borders of blocks, without the current one."""
        return tuple(Source("stream", "x", j) for j in range(-1, layer - 1, options["block"]))

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        new = list(plans)
        for layer in list_receivers(options, config):
            method = cls.transform_block_input if options["queries"] == 1 else cls.split_attention_inputs
            new[layer] = new[layer].acting(cls, method).reading(*cls.list_sources(options, layer))
        return new

    @classmethod
    def count_queries(cls, options: OptionValues, plan: LayerPlan) -> int:
        return 1 if options["queries"] == 1 else len(plan.inputs)

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        count, width = len(cls.list_sources(options, plan.index)) + 1, config.hidden_size
        numbers = cls.count_queries(options, plan) * width
        # Autograd keeps the summands except earlier layers' hidden states, and for each h_j its norm, the inverse of
        # that, the scores and the weights; in parallel blocks also the stream, which only the feed-forward norms.
        summed = count - 1 + config.parallel_residual
        per_state = 2 + (2 + (options["variant"] == "inkling_2")) * cls.count_queries(options, plan)
        return Cost(parameters=numbers, flops=2 * numbers * count, saved=summed * width + count * per_state)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        return cls(
            config.hidden_size,
            cls.count_queries(options, plan),
            options["variant"],
            config.norm_eps,
            slots=tuple(plan.slot(source) for source in cls.list_sources(options, plan.index)),
            is_first=plan.at(Stage.ATTENTION_INPUTS)[:1] == (cls.registered_name(),),
        )

    # Capabilities

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        if growth.preserves_function and growth.deepens:
            raise HeadwaterError(
                "Mechanism 'depth_attention' weighs what all layers add by a softmax, which every new layer changes; "
                "use a method that does not keep the function, such as stack."
            )
        if growth.preserves_function and growth.widens and options["variant"] == "inkling_2":
            raise HeadwaterError(
                "Mechanism 'depth_attention' divides its scores by √hidden_size in variant inkling_2; grow other sizes."
            )
        layers = [layer for layer in growth.list_copies(list_receivers(options, config)) if layer]
        return options | {"layers": None if options["layers"] is None else layers}

    describe_axes = fixed_axes(SAME, READS._replace(normed=True))

    def choose_group(self, parameter: str) -> Literal["vectors"]:
        return "vectors"

    per_head = per_token = True
