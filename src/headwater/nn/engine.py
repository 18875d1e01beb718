"""`Engine`: the interface for servers with their own cache and attention kernel."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from headwater.config.plan import LayerPlan


class AttentionLayer(Protocol):
    """Attributes of an attention layer that an engine reads."""

    plan: LayerPlan
    layer_idx: int
    num_key_value_groups: int
    scaling: float
    softcap: float | None
    sliding_window: int | None


class Engine(ABC):
    """A server's cache and attention kernel, passed to a model as `past_key_values`."""

    layers: Sequence[Any]  # one object per layer that holds its raw tokens (`Tail`); anything for a layer without any

    @abstractmethod
    def attend(self, attention: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new tokens' k and v, and return what each head of q reads, [B, T, H, d].

        q [B, H, T, d]; k, v [B, heads, T, d] of the heads that the layer stores, after RoPE; a latent is stored before
        it, with positions as v. Whose keys and values each head attends to is in `attention.plan.groups`.
        """
