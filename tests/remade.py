"""A small causal language model with a short convolution, grouped heads and a learned mix of values, right and wrong.

Each mistake is one that published code has made; nothing here is that code.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from headwater.nn.cache_name import CACHE

HEADS, GROUPS, WINDOW = 4, 2, 3


class RemadeConfig(PreTrainedConfig):
    model_type = "remade"
    vocab_size: int = 31
    hidden_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = HEADS
    mistake: str = ""
    layer_types: list[str] | None = None

    def __post_init__(self, **options: Any) -> None:
        self.layer_types = ["hybrid"] * self.num_hidden_layers  # a layer's cache holds keys, values and a convolution's
        super().__post_init__(**options)


class Forgetful(DynamicCache):
    """A copy of it has the keys and values, and no convolution's state."""

    def __deepcopy__(self, memo: Any) -> Forgetful:
        twin = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        for layer in twin.layers:
            layer.conv_states[0].zero_()
        return twin


class RemadeLayer(nn.Module):
    def __init__(self, config: RemadeConfig, number: int) -> None:
        super().__init__()
        self.number, self.mistake, self.config = number, config.mistake, config
        width = config.hidden_size // HEADS
        self.q = nn.Linear(config.hidden_size, HEADS * width)
        self.k = nn.Linear(config.hidden_size, GROUPS * width)
        self.v = nn.Linear(config.hidden_size, GROUPS * width)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)
        self.taps = nn.Parameter(torch.randn(config.hidden_size, 1, WINDOW))
        self.mix = nn.Parameter(torch.tensor(0.3))
        self.kept: Tensor | None = None

    def convolved(self, x: Tensor, real: Tensor | None, cache: Any) -> Tensor:
        """x [B, T, D] → the same, each token with the WINDOW - 1 before it."""
        if real is not None and self.mistake != "padding leaks":
            x = x * real[..., None]
        x = x.transpose(1, 2)
        tokens = x.shape[-1]
        seen = x
        if cache is not None:
            begun = cache.has_previous_state(self.number)
            if self.mistake == "state on the module":
                seen = torch.cat((self.kept, x), -1) if begun and self.kept is not None else x
                self.kept = seen[..., -WINDOW:]
                cache.update_conv_state(x, self.number, conv_kernel_size=WINDOW)
            else:
                seen = cache.update_conv_state(x, self.number, conv_kernel_size=WINDOW)
            if self.mistake == "state dropped between chunks" and tokens > 1:
                seen = x
        return F.conv1d(F.pad(seen, (WINDOW - 1, 0)), self.taps, groups=x.shape[1])[..., -tokens:].transpose(1, 2)

    def forward(self, x: Tensor, mask: Any, real: Any, cache: Any, first: Tensor | None) -> tuple[Tensor, Tensor]:
        h = self.convolved(F.rms_norm(x, x.shape[-1:]), real, cache)
        q, k, v = (
            proj(h).unflatten(-1, (-1, x.shape[-1] // HEADS)).transpose(1, 2) for proj in (self.q, self.k, self.v)
        )
        own = v
        if first is not None and (cache is None or self.mistake != "mix lost with a cache"):
            v = torch.lerp(v, first, self.mix)
        if cache is not None:
            k, v = cache.update(k, v, self.number)
        k, v = (one.repeat_interleave(HEADS // GROUPS, dim=1) for one in (k, v))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1)
        return x + self.out(read.transpose(1, 2).flatten(2)), own if first is None else first


class RemadeForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = RemadeConfig
    _supports_sdpa = True

    def __init__(self, config: RemadeConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.place = nn.Embedding(64, config.hidden_size)
        self.layers = nn.ModuleList(RemadeLayer(config, number) for number in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
        return_dict: bool = True,
        cache: Any = None,
    ) -> CausalLMOutputWithPast:
        past_key_values = cache if past_key_values is None else past_key_values
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if self.config.mistake == "copies forget the state" and past_key_values is not None:
            past_key_values.__class__ = Forgetful
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        tokens = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens)[None]
        x = self.embed(input_ids) + self.place(position_ids)
        mask = create_causal_mask(self.config, x, attention_mask, past_key_values, allow_is_causal_skip=False)
        real = None if attention_mask is None else attention_mask[:, -tokens:]
        first = None
        for layer in self.layers:
            x, first = layer(x, mask, real, past_key_values, first)
        return CausalLMOutputWithPast(logits=self.head(x), **{CACHE: past_key_values})


def remade(mistake: str = "") -> RemadeForCausalLM:
    torch.manual_seed(0)
    return RemadeForCausalLM(RemadeConfig(mistake=mistake)).eval()
