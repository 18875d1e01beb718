"""Multi-head latent attention: one cached vector is both key and value. arXiv 2405.04434 (DeepSeek-V2), section 2.1.

    k = v = [RoPE(k^R), c]        of one key/value head, `head_dim` channels wide, without projected values
    q_h = U_h·(W^Q_h·x)           out = Σ_h W^O_h·(M_h·o_h), where o_h is what head h reads of c

In the paper the keys and values of all heads are linear maps, W^UK and W^UV, of a latent vector c of few channels, and
one more key, k^R, with RoPE is shared by all heads. At inference it multiplies the queries by W^UK and what the heads
read by W^UV, so that all heads attend to c itself. That is this mechanism in a model with one key/value head, whose
`head_dim` is the width of [k^R, c] and whose `partial_rotary_factor` is the share of its channels with RoPE. It caches
`head_dim` numbers per token and layer. With more key/value heads, each is its own value.

`head_width` is the width of a head outside attention, W^Q_h·x [head_width]: U_h [head_dim, head_width] and M_h
[head_width, width of c] are learned, W^UK and W^UV. If all channels have RoPE, M_h is [head_width, head_dim] and reads
them. Without `head_width` the query and output projections absorb these maps; then heads also read the channels with
RoPE, which the output projection may ignore. Train with it: keys with RoPE are large, and an optimizer that changes
what reads them as values soon does harm.

Departures: the channels of a query with RoPE come from the same `head_width` channels as the others. The latent has no
norm, and the queries of all heads no map in common. `headwater.conversion.latent` converts models with separate keys
and values.
"""

import torch
from torch import Tensor, nn

from headwater.config.capabilities import Map
from headwater.config.plan import Cost, LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Mechanism, OptionValues
from headwater.mechanisms.enlarging import LINEAR_IN, LINEAR_OUT, SAME, Dim
from headwater.mechanisms.receivers import check_least, keep_options
from headwater.util.errors import HeadwaterError


class MLA(Mechanism):
    """Lets heads read the keys as values, so that no layer projects or caches values; and the query or output
    projection of such heads.

    Args
        width: D. heads: H. head_width, head_dim: widths of a head outside and inside attention.
        skipped: how many of the channels that a head reads, the first ones, the output ignores; of queries None.

    Queries are [..., D] -> [..., H·head_dim], outputs [..., H·head_dim] -> [..., D].

    Parameters: `linear.weight`, [H·head_width, D] of queries, [D, H·head_width] of outputs; `maps`, [H, head_dim,
    head_width] of queries, [H, head_width, head_dim - skipped] of outputs, initialized with standard deviation
    1/√fan_in.

        >>> import torch
        >>> from headwater.mechanisms import MLA
        >>> MLA(512, heads=8, head_width=64, head_dim=160)(torch.randn(2, 16, 512)).shape
        torch.Size([2, 16, 1280])
    """

    source = "the current token, through one vector for keys and values"
    order = 85
    paper = "2405.04434"

    class Options:
        head_width: int | None = None  # width of a head outside attention; default: head_dim, without maps in between

    def __init__(self, width: int, heads: int, head_width: int, head_dim: int, skipped: int | None = None) -> None:
        super().__init__()
        self.skipped = skipped
        inner = heads * head_width
        self.linear = nn.Linear(*((width, inner) if skipped is None else (inner, width)), bias=False)
        sizes = (head_dim, head_width) if skipped is None else (head_width, head_dim - skipped)
        self.maps = nn.Parameter(torch.empty(heads, *sizes))
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        if parameter != "maps":
            return None
        return torch.normal(0.0, self.maps.shape[2] ** -0.5, self.maps.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., H·head_dim] of queries, [..., H·head_dim] -> [..., D] of outputs."""
        if self.skipped is None:
            return self.map_heads(self.linear(x).unflatten(-1, (len(self.maps), -1)))
        return self.linear(self.map_heads(x.unflatten(-1, (len(self.maps), -1))[..., self.skipped :]))

    def map_heads(self, x: Tensor) -> Tensor:
        """Multiply each head by its map, [..., H, before] -> [..., H·after]."""
        return torch.einsum("...hi,hoi->...ho", x, self.maps.to(x.dtype)).flatten(-2)

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_least(cls, options, head_width=1)
        for name in ("qkv_bias", "output_bias"):
            if options["head_width"] is not None and getattr(config, name):
                raise HeadwaterError(f"Mechanism 'mla' with head_width has no biases; set {name} to false.")

    @classmethod
    def redirect_heads(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        return [plan.reading_keys() for plan in plans]

    # Capabilities

    @classmethod
    def build_linear(
        cls, options: OptionValues, config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int
    ) -> nn.Module | None:
        if options["head_width"] is None or name not in ("query", "output"):
            return None
        width, attended = (d_in, d_out) if name == "query" else (d_out, d_in)
        heads, skipped = config.num_attention_heads, None if name == "query" else cls.count_skipped(config)
        return cls(width, heads, options["head_width"], attended // heads, skipped)

    @classmethod
    def count_skipped(cls, config: HeadwaterConfig) -> int:
        """Count the channels with RoPE, which outputs ignore if there are others."""
        has_latent = config.position == "rope" and config.rotary_dim < config.head_dim
        return config.rotary_dim if has_latent else 0

    @classmethod
    def count_linear_cost(
        cls, options: OptionValues, config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int
    ) -> Cost | None:
        if options["head_width"] is None or name not in ("query", "output"):
            return None
        width, attended = (d_in, d_out) if name == "query" else (d_out, d_in)
        heads = config.num_attention_heads
        used = attended if name == "query" else attended - heads * cls.count_skipped(config)
        numbers = heads * options["head_width"] * width + used * options["head_width"]
        return Cost(parameters=numbers, flops=2 * numbers, saved=heads * options["head_width"])

    grow_options = staticmethod(keep_options)

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        heads = Dim("q")
        if parameter == "maps":
            return heads, SAME, SAME
        return (heads, LINEAR_IN) if self.skipped is None else (LINEAR_OUT, heads._replace(reads=True))

    per_head = per_token = True
