"""Persistent memory: each head also attends to n learned pairs of keys and values. arXiv 1907.01470, section 4.1.

    y_t = Σ_j a_tj·v_j + Σ_i b_ti·v'_i        one softmax over the tokens' scores q_t·k_j / √d and q_t·k'_i / √d

    k'_i = √d·κ_i        v'_i = √n·ν_i        κ initialized normal with standard deviation s/√d, ν with s/√n

The pairs have no position and every token sees them: in all documents, beyond a sliding window, and under ALiBi without
a distance. They belong to the layer that reads them, so a head that attends to another layer's tokens keeps its own.
The cache does not hold them, and a decoding step does not join them to it. With n = 1 they are a learned sink.

Departures: under GQA the query heads of one key/value head share its pairs. The paper removes the feed-forward, which
the pairs replace there; here it stays. Under `qk_norm` k' is not normed. In the paper s is 1. Here it is by default the
standard deviation that tokens' keys and values have at the start: σ·√D for linear layers drawn with σ. At D = 64 that
is 0.16.
"""

from math import inf, sqrt
from typing import Self

import torch
from torch import Tensor, nn

from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import KV, Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.growth_map import SAME, Dim, fixed_axes
from headwater.mechanisms.shared_options import check_layers, check_least, grow_layers, is_chosen
from headwater.util.errors import HeadwaterError


class PersistentMemory(Mechanism):
    """Learned pairs of keys and values that every token may attend to, in addition to the tokens' own.

    heads: how many key/value heads. pairs: n, of each head. width: d. init_stds: s of the keys and of the values.

    Parameters: `key` and `value`, both [heads, pairs, width].

        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention as attend
        >>> from headwater.mechanisms import PersistentMemory
        >>> memory = PersistentMemory(heads=8, pairs=4, width=64)
        >>> q, k, v = torch.randn(3, 2, 8, 16, 64)
        >>> more_k, more_v = (x.expand(2, -1, -1, -1) for x in memory())
        >>> y = attend(q, torch.cat((k, more_k), dim=2), torch.cat((v, more_v), dim=2))
    """

    source = "learned pairs, in addition to the tokens'"
    order = 100
    paper = "1907.01470"

    class Options:
        pairs: int = 4  # n, of each key/value head; 1 is a learned sink
        layers: list[int] | None = None  # layers in which it acts; default: all
        init_std: float | int | None = None  # initial standard deviation; default: that of the tokens' keys and values

    def __init__(self, heads: int, pairs: int, width: int, init_stds: tuple[float, float] = (1.0, 1.0)) -> None:
        super().__init__()
        self.init_stds = dict(zip(("key", "value"), init_stds, strict=True))
        self.key, self.value = (nn.Parameter(torch.empty(heads, pairs, width)) for _ in range(2))
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        std = self.init_stds[parameter] / self.factors[parameter]
        return torch.normal(0.0, std, self.key.shape, generator=generator)

    @property
    def factors(self) -> dict[str, float]:
        """Factors of the parameters, which then learn at a rate that does not depend on d and n."""
        return {"key": sqrt(self.key.shape[2]), "value": sqrt(self.key.shape[1])}

    def forward(self) -> KV:
        """The keys and values, each [heads, pairs, width]."""
        return KV(self.key * self.factors["key"], self.value * self.factors["value"])

    def add_key_values(self, context: Context) -> KV:
        return self()  # through __call__, where accelerate's hooks load offloaded parameters

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_layers(cls, options, config)
        check_least(cls, options, pairs=1)
        if options["init_std"] is not None and not 0 < options["init_std"] < inf:
            raise HeadwaterError(
                f"Mechanism 'persistent_memory': init_std must be greater than 0, not {options['init_std']}; "
                "leave it out for the spread of the tokens' keys and values, or set 1 as in the paper."
            )

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        return [plan.acting(cls, cls.add_key_values) if is_chosen(plan.index, options) else plan for plan in plans]

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        width, q_width = (n * config.head_dim for n in (config.num_key_value_heads, config.num_attention_heads))
        saved = 0
        if config.is_causal:
            # A second copy of what heads read, without the pairs' positions; and those positions, once per row.
            saved = q_width + 2 * options["pairs"] * (width + q_width) // config.max_position_embeddings
        return Cost(parameters=2 * options["pairs"] * width, flops=4 * options["pairs"] * q_width, saved=saved)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        init_std = options["init_std"]
        if init_std is None:  # projections of a normed input, whose mean square is 1
            drawn = config.initializer_range * sqrt(config.hidden_size)
            value = 1.0 if config.linear_init == "fan_in" else drawn
            init_stds = (1.0 if config.qk_norm else value, value)
        else:
            init_stds = (init_std, init_std)
        return cls(config.num_key_value_heads, options["pairs"], config.head_dim, init_stds)

    # Capabilities

    @classmethod
    def list_kernels(cls, options: OptionValues) -> tuple[str, ...]:
        return "sdpa", "eager", "matmul"  # other kernels take no mask for keys without a position in the row

    grow_options = staticmethod(grow_layers)

    describe_axes = fixed_axes(Dim("kv"), SAME)
