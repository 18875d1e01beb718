"""Gated attention: a sigmoid of the layer's input scales what each head has read. arXiv 2505.06708, position G1.

    y'_t = y_t ⊙ s·σ(W·x_t)

x_t is the normed input that queries, keys and values are projected from, and y_t what a head has read, before the
output map. W gives one number per query head (`head`) or per channel (`channel`); in the paper it reads all of x and
s = 1. modded-nanogpt reads the first 12 channels, gives one number per head, and starts with W = 0.

Departures: s is an option, since 2·σ(0) = 1 leaves a trained model unchanged. The paper's other positions (on queries,
keys, values, and after the output map) are not built.
"""

from typing import Literal, Self

import torch
from torch import Tensor, nn

from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.growth_map import READS, Dim, GrowthMap, fixed_axes
from headwater.mechanisms.shared_options import check_channels, check_layers, grow_layers, identity_with, is_chosen
from headwater.util.errors import HeadwaterError


class OutputGate(Mechanism):
    """Scales what each head has read by a gate that the layer's input opens and closes.

    Args
        channels: how many channels of x the gate reads, the first ones. scale: s.
        outputs: numbers that it gives: one per head, or one per channel of all heads.
        init: "random": W like other linear layers. "zero": every gate starts at s/2.

    Parameters: `gate.weight` [outputs, channels].

        >>> import torch
        >>> from headwater.mechanisms import OutputGate
        >>> gate = OutputGate(channels=12, outputs=8, scale=2.0, init="zero")
        >>> x, y = torch.randn(3, 16, 512), torch.randn(3, 16, 8, 64)  # what 8 query heads read at 16 tokens
        >>> bool(torch.equal(gate(y, x), y))  # 2·σ(0) = 1
        True
    """

    source = "what a head reads, times a gate computed from the layer's input"
    order = 130
    paper = "2505.06708"

    class Options:
        granularity: Literal["head", "channel"] = "head"  # one number per query head, or per channel
        channels: int | None = None  # how many channels of x_t the gate reads, from the first; default: all
        scale: float | int = 1.0  # s; with 2, W = 0 changes nothing
        init: Literal["random", "zero"] = "random"  # zero: W = 0
        layers: list[int] | None = None  # layers in which it acts; default: all

    def __init__(
        self, channels: int, outputs: int, scale: float = 1.0, init: Literal["random", "zero"] = "random"
    ) -> None:
        super().__init__()
        self.channels, self.scale, self.init_mode = channels, scale, init
        self.gate = nn.Linear(channels, outputs, bias=False)
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        return torch.zeros(self.gate.weight.shape) if self.init_mode == "zero" else None

    def forward(self, out: Tensor, x: Tensor) -> Tensor:
        """out [B, T, H, d], x [B, T, D] -> [B, T, H, d]."""
        gate = self.gate(x[..., : self.channels]).sigmoid()
        if self.scale != 1:
            gate = gate * self.scale
        return out * gate.view(*out.shape[:3], -1)

    def transform_head_outputs(self, out: Tensor, context: Context) -> Tensor:
        return self(out, context.x)

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_layers(cls, options, config)
        if options["channels"] is not None:
            check_channels(cls, options, config)
        if options["scale"] <= 0:
            raise HeadwaterError(f"Mechanism 'output_gate': scale must be above zero, not {options['scale']}.")

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        return [
            plan.acting(cls, cls.transform_head_outputs) if is_chosen(plan.index, options) else plan for plan in plans
        ]

    @classmethod
    def find_sizes(cls, options: OptionValues, config: HeadwaterConfig) -> tuple[int, int]:
        """Return the number of channels of x that a layer's gate reads, and of numbers that it gives."""
        numbers_per_head = config.head_dim if options["granularity"] == "channel" else 1
        return options["channels"] or config.hidden_size, config.num_attention_heads * numbers_per_head

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        channels, outputs = cls.find_sizes(options, config)
        # Autograd keeps the result, for the output projection, and the gate before and after its scale.
        saved = config.num_attention_heads * config.head_dim + outputs * (1 + (options["scale"] != 1))
        return Cost(parameters=channels * outputs, flops=2 * channels * outputs, saved=saved)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        return cls(*cls.find_sizes(options, config), options["scale"], options["init"])

    # Capabilities

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        reads_all = options["channels"] == config.hidden_size
        return grow_layers(options, config, growth) | ({"channels": None} if reads_all else {})

    describe_axes = fixed_axes(Dim("q"), READS)

    find_identity_options = identity_with(scale=2.0, init="zero")

    per_head, per_token = True, False
