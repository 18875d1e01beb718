"""SVFormer: all layers share the first layer's values. arXiv 2410.17897.

    U_l = A_l·V_0

Layers l ≥ 1 have no value projection, and the cache stores values once: (L + 1) / 2L of vanilla's bytes. The layers
share layer 0's final values, after its own mechanisms (such as a KV shift).

Departures: none by default. The paper's ablations are options: another source layer, some layers only, keys instead of
values.
"""

from dataclasses import dataclass
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from torch import Tensor

from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Mechanism
from headwater.mechanisms.enlarging import Larger
from headwater.mechanisms.receivers import check_receivers, moved_receivers, receivers
from headwater.util.errors import HeadwaterError


class SVFormer(Mechanism):
    """One layer's values for all layers: a module without parameters that selects keys and values.

        U_l = A_l·V_0        instead of A_l·V_l, for l ≥ 1

    SVFormer, arXiv 2410.17897; no departures by default.

    Args
        share: "values" (the paper's SVFormer), "keys" or "both".

        >>> import torch
        >>> from headwater.mechanisms import SVFormer
        >>> share = SVFormer()
        >>> first_k, first_v = torch.randn(2, 3, 4, 16, 64)
        >>> k, v = share(torch.randn(3, 4, 16, 64), None, first_k, first_v)
        >>> v is first_v
        True

    In a headwater model it needs no module: the plan makes heads attend to the source layer's values, and layers whose
    values no head reads have no value projection.
    """

    source = "the first layer's values, instead of a layer's own"

    @strict
    @dataclass
    class Options:
        share: Literal["values", "keys", "both"] = "values"
        source: int = 0
        layers: list[int] | None = None

    def __init__(self, share: Literal["values", "keys", "both"] = "values") -> None:
        super().__init__()
        if share not in ("values", "keys", "both"):
            raise HeadwaterError(f"SVFormer shares 'values', 'keys' or 'both', not {share!r}.")
        self.parts = share

    def forward(
        self, k: Tensor | None, v: Tensor | None, first_k: Tensor, first_v: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The layer's own k and v, [B, K, S, d], and the first layer's -> what to attend to."""
        return first_k if self.parts != "values" else k, first_v if self.parts != "keys" else v

    # In a headwater model

    @classmethod
    def validate_options(cls, options: dict[str, Any], config: HeadwaterConfig) -> None:
        check_receivers(cls.registered_name(), options, config)

    @classmethod
    def redirect_heads(
        cls, options: dict[str, Any], config: HeadwaterConfig, plans: list[LayerPlan]
    ) -> list[LayerPlan]:
        keys, values = options["share"] != "values", options["share"] != "keys"
        new = list(plans)
        for layer in receivers(options, config):
            source, everything = options["source"], range(len(plans[layer].attends))
            new[layer] = plans[layer].attending(everything, source if keys else None, source if values else None)
        return new

    # Capabilities

    @classmethod
    def grow_options(cls, options: dict[str, Any], config: HeadwaterConfig, growth: Larger) -> dict[str, Any]:
        return moved_receivers(options, receivers(options, config), growth)

    per_head = per_token = True
