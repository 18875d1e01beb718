"""MUDD connections: each input of a block is a separate weighted sum of all hidden states.

MUDDFormer, arXiv 2502.12170:

    x^s = Σ_{j ≤ l} a^s_j(X_l)·X_j        s: queries, keys, values, residual stream
    a(X_l) = GELU(norm(X_l)·W_1)·W_2 + b

X_0 is the embedding, X_j the output of block j, and these four are what the next block starts from; after the last
block there is one, the stream. norm is RMSNorm without weights. W_1 has as many columns as there are weights a; after
the last block four times as many. At first W_2 = 0, and b is 1 for X_l and 0 for the others: a plain Transformer. W_1
starts normal with standard deviation 1/√D.

Departures: one network gives the weights of all four, as in the authors' code; the paper's equations have one for each.
The code rounds inner widths up to multiples of 64. The three inputs of attention share the block's norm, whose weights
the projections can express; released models have three. Feed-forwards of widths that grow with depth, and norms after
each sub-layer, are not built.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from headwater.config.plan import LayerPlan, Source, Stage
from headwater.config.text import HeadwaterConfig
from headwater.kernels.fused_norm import rms_norm
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import AttentionInputs, Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import READS, SAME, Dim
from headwater.mechanisms.shared_options import identity_with, keep_options
from headwater.util.errors import HeadwaterError

# After the last block: the network's inner width divided by the number of weights.
WIDER = 4


class MUDD(KeepsPrecision, Mechanism):
    """Sums of hidden states, several at once, with weights that a small network makes for each token.

    Args
        width: of the hidden states. terms: how many are summed. ways: how many sums.
        wider: the inner width of the network over ways·terms. eps: of its norm.

    Parameters: `bias` [ways, terms], b; `up.weight` [wider·ways·terms, width], W_1; `down.weight` [ways·terms,
    wider·ways·terms], W_2.

        >>> import torch
        >>> from headwater.mechanisms import MUDD
        >>> mudd = MUDD(width=64, terms=3, ways=4)
        >>> *earlier, x = torch.randn(3, 2, 16, 64)  # the embedding and two blocks' outputs
        >>> q, k, v, stream = mudd(x, *earlier)
        >>> bool(torch.equal(q, x))
        True
    """

    source = "sums of all hidden states, one each for q, k, v and the stream"
    order = 150
    paper = "2502.12170"

    def __init__(
        self,
        width: int,
        terms: int,
        ways: int = 4,
        wider: int = 1,
        eps: float = 1e-6,
        *,
        labels: tuple[str, ...] = (),
        slots: tuple[int, ...] = (),
        alike: bool = True,
        final: "MUDD | None" = None,
    ) -> None:
        super().__init__()
        self.ways, self.eps = ways, eps
        self.labels, self.slots, self.alike = labels, slots, alike
        self.up = nn.Linear(width, wider * ways * terms, bias=False)
        self.down = nn.Linear(wider * ways * terms, ways * terms, bias=False)
        self.bias = fp32_parameter(ways, terms)
        self.last = final  # the sum after the last block
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        shape = self.get_parameter(parameter).shape
        if parameter == "up.weight":
            return torch.normal(0.0, shape[1] ** -0.5, shape, generator=generator)
        start = torch.zeros(shape)
        if parameter == "bias":
            start[:, -1] = 1
        return start

    def forward(self, x: Tensor, *earlier: Tensor, summands: Tensor | None = None) -> Tensor:
        """x, the last hidden state, and those before it, in order, [B, T, D] -> the sums, [ways, B, T, D].

        summands: [ways, B, T, D], what each way sums in place of x; default: x itself.
        """
        *weights, own_weight = self.weights(x)
        y_WBTD = own_weight * (x if summands is None else summands)
        for weight, state in zip(weights, earlier, strict=True):
            y_WBTD = torch.addcmul(y_WBTD, weight, state)
        return y_WBTD

    def weights(self, x: Tensor) -> list[Tensor]:
        """x [B, T, D] -> the weight of each term, [ways, B, T, 1]."""
        inner = nn.functional.gelu(self.up(rms_norm(x, None, self.eps)))
        weights_BTWJ = self.down(inner).unflatten(2, (self.ways, -1)) + self.bias
        return list(weights_BTWJ.to(x.dtype).movedim(2, 0).unsqueeze(3).unbind(4))

    def split_attention_inputs(self, x: AttentionInputs, context: Context) -> AttentionInputs:
        summands = None if self.alike else torch.stack([*x.list_inputs(), x.stream])
        *inputs, stream = self(x.stream, *(context.sources[slot] for slot in self.slots), summands=summands).unbind(0)
        return x.replace_inputs(inputs)._replace(stream=stream)

    def transform_block_output(self, x: Tensor, context: Context) -> Tensor:
        return self.last(x, *(context.sources[slot] for slot in self.last.slots))[0]

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        if config.num_hidden_layers == 1:
            raise HeadwaterError(
                "Mechanism 'mudd' connects layers, but the model has only one; add layers, or remove mudd."
            )

    @classmethod
    def list_sources(cls, layer: int) -> tuple[Source, ...]:
        """List the hidden states before the input of block `layer`."""
        return tuple(Source("stream", "x", j) for j in range(-1, layer - 1))

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        new = [
            plan.acting(cls, cls.split_attention_inputs).reading(*cls.list_sources(plan.index)) for plan in plans[1:]
        ]
        new[-1] = new[-1].acting(cls, cls.transform_block_output).reading(*cls.list_sources(len(plans)))
        return [plans[0], *new]

    @classmethod
    def list_sums(cls, plan: LayerPlan) -> list[tuple[int, int, int]]:
        """(terms, ways, wider) of the sums at a block: before it, and after the last one."""
        at_start = (plan.index + 1, len(plan.inputs) + 1, 1)
        is_last = cls.registered_name() in plan.at(Stage.BLOCK_OUTPUT)
        return [at_start, (plan.index + 2, 1, WIDER)] if is_last else [at_start]

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        width, parameters, flops, saved = config.hidden_size, 0, 0, 0
        for terms, ways, wider in cls.list_sums(plan):
            count, inner = ways * terms, wider * ways * terms
            matrices = inner * (width + count)
            parameters, flops = parameters + matrices + count, flops + 2 * matrices
            # Autograd keeps x, its norm and the divisor of that, GELU's input and output, and the weights; before a
            # block also the new stream, which shares memory with attention's inputs.
            saved += (2 + (ways > 1)) * width + 1 + 2 * inner + count
        return Cost(parameters=parameters, flops=flops, saved=saved)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        def build_sum(layer: int, terms: int, ways: int, wider: int, **fields: Any) -> Any:
            slots = tuple(plan.slot(source) for source in cls.list_sources(layer))
            return cls(config.hidden_size, terms, ways, wider, config.norm_eps, slots=slots, **fields)

        at_start, *at_end = cls.list_sums(plan)
        final = build_sum(plan.index + 1, *at_end[0], labels=("out",)) if at_end else None
        alike = plan.at(Stage.ATTENTION_INPUTS)[0] == cls.registered_name() and not plan.at(Stage.BLOCK_INPUT)
        module: Self = build_sum(plan.index, *at_start, labels=(*plan.inputs, "stream"), alike=alike, final=final)
        return module

    # Capabilities

    grow_options = staticmethod(keep_options)

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        states = (*range(-1, self.bias.shape[1] - 2), "own")
        sums = Dim("layers", entries=tuple((label, state) for label in self.labels for state in states))
        return {
            "bias": (sums,),
            "up.weight": (SAME, READS._replace(normed=True)),
            "down.weight": (sums, Dim(zero=True)),
        }[parameter]

    def find_neutral_value(self, parameter: str) -> Tensor | None:
        if self.labels == ("out",):  # the final sum keeps its weights, even in a new layer
            return None
        shape = self.get_parameter(parameter).shape
        return torch.zeros(shape) if parameter == "down.weight" else self.initial_value(parameter)

    find_identity_options = identity_with()

    per_head = per_token = True

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        count = self.bias.shape[1]
        return {
            f"b {label}": Shown(row, "layer", tuple(range(-1, count - 1)))
            for label, row in zip(self.labels, self.bias, strict=True)
        }
