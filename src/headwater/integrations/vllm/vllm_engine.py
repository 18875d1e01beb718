"""vLLM's side: one cache for the whole model, its blocks' slots in each step, and its attention kernel for CPUs.

`flash` has the one for GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as kernels
from vllm import envs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from headwater.config.layers import layer_config
from headwater.config.plan import LayerPlan
from headwater.config.planner import plan_layers
from headwater.engines.gathering import GatheringEngine, needs_gathering
from headwater.engines.paged import FlatBatch, KernelEngine, PagedEngine
from headwater.engines.pages import Page
from headwater.engines.split import Portion
from headwater.integrations.vllm.flash import FlashEngine
from headwater.nn.engine import AttentionLayer
from headwater.util.errors import HeadwaterError


class ScheduledBatch(FlatBatch):
    """A batch of vLLM's, with the arguments of its kernel."""

    def __init__(self, metadata: Any, block_size: int) -> None:
        super().__init__(metadata.query_start_loc, metadata.seq_lens, metadata.block_table_tensor, block_size)
        self.metadata = metadata
        self.slots = self.token_blocks * block_size + self.token_offsets
        self.scheduled: dict[tuple[Any, ...], Tensor] = {}

    def schedule_work(self, q: Tensor, heads: int, window: int, isa: str) -> Tensor:
        """Division of the work among threads, for queries [N, h, d] and this many key/value heads."""
        key = q.shape[1:], heads, window
        if key not in self.scheduled:
            self.scheduled[key] = kernels.cpu_attn_get_scheduler_metadata(
                num_reqs=self.metadata.num_reqs,
                num_heads=q.shape[1],
                num_kv_heads=heads,
                head_dim=q.shape[2],
                seq_lens=self.metadata.seq_lens,
                dtype=q.dtype,
                query_start_loc=self.metadata.query_start_loc,
                causal=True,
                sliding_window_size=window,
                isa=isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            )
        return self.scheduled[key]


class Builder(AttentionMetadataBuilder):
    """Builder of a `ScheduledBatch` from vLLM's metadata of a batch."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ScheduledBatch:
        return ScheduledBatch(common_attn_metadata, self.kv_cache_spec.block_size)


class Backend(CPUAttentionBackend):
    """vLLM's kernel for CPUs, over headwater's blocks."""

    @staticmethod
    def get_name() -> str:
        return "HEADWATER_CPU"

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class Blocks(torch.nn.Module, AttentionLayerBase):
    """The whole model's cache, as one layer of vLLM's, whose block is one `Page`."""

    def __init__(self, vllm_config: Any, name: str, portion: Portion, shares: Sequence[Portion]) -> None:
        """Take the `portion` of the model that this process has, one of `shares`."""
        super().__init__()
        speculation = vllm_config.speculative_config
        size = vllm_config.cache_config.block_size, vllm_config.model_config.dtype.itemsize
        spare = 0 if speculation is None else speculation.num_speculative_tokens
        # vLLM requires equal block sizes in all processes.
        least = max(Page(share.narrow_config, share.plans, *size, spare).size for share in shares)
        self.config, self.num_heads, self.name = portion.config, len(portion.queries), name
        kind = choose_engine(vllm_config.device_config.device_type, portion.plans)
        self.engine = kind(Page(portion.narrow_config, portion.plans, *size, spare, least), portion.slopes)
        self.kv_cache = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[name] = self

    @property
    def kv_cache(self) -> Tensor:
        """Memory that vLLM has allocated, [blocks, 1, 1, bytes]; it sets an empty tensor to free it."""
        return self.allocated

    @kv_cache.setter
    def kv_cache(self, memory: Tensor) -> None:
        self.allocated = memory
        self.engine.release_memory()
        if memory.numel():
            self.engine.bind_memory(memory[:, 0, 0].view(torch.uint8))

    def get_attn_backend(self) -> type[Backend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec | SlidingWindowSpec:
        """One state of this many bytes per block. A window that all layers have lets vLLM free older blocks."""
        page = self.engine.page
        fields = dict(block_size=page.block_size, num_kv_heads=1, head_size=page.size, head_size_v=0, dtype=torch.uint8)
        fields |= dict(tokens_per_state=page.block_size)
        layers = range(self.config.num_hidden_layers)
        windows = {layer_config(self.config, layer).sliding_window or 0 for layer in layers}
        if len(windows) > 1 or 0 in windows:
            return FullAttentionSpec(**fields)
        looks_back = 1 + max(plan.lookback for plan in plan_layers(self.config))
        return SlidingWindowSpec(**fields, sliding_window=max(looks_back, *windows))

    def step(self, tokens: int) -> None:
        """Take the batch of this forward pass, of this many tokens. There is none while vLLM measures memory."""
        metadata = get_forward_context().attn_metadata
        batch = metadata[self.name] if metadata else None
        if batch is not None and batch.count != tokens:
            raise HeadwaterError(f"vLLM gave {tokens} tokens for a batch of {batch.count}; padding is not supported.")
        self.engine.batch = batch


def choose_engine(device: str, plans: Sequence[LayerPlan]) -> type[PagedEngine]:
    """Choose how layers read their blocks on a device."""
    if needs_gathering(plans):
        return GatheringEngine
    return CPUEngine if device == "cpu" else FlashEngine


class CPUEngine(KernelEngine):
    """`KernelEngine` with vLLM's kernel for CPUs."""

    def choose_isa(self, dtype: torch.dtype, width: int) -> str:
        return _get_attn_isa(dtype, self.page.block_size, width, "auto")

    def write_tokens(self, layer: int, k: Tensor, v: Tensor) -> None:
        batch = self.batch
        assert isinstance(batch, ScheduledBatch)
        if k.shape[1] == v.shape[1] > 0:
            keys, values = (self.view_store(layer, kind, k.dtype) for kind in ("k", "v"))
            isa = self.choose_isa(k.dtype, k.shape[2])
            kernels.cpu_attn_reshape_and_cache(k.contiguous(), v.contiguous(), keys, values, batch.slots, isa)
            return
        for kind, x in (("k", k), ("v", v)):
            if x.shape[1]:
                order = find_order(x.dtype, self.page.block_size, x.shape[2])[kind == "v"]
                memory = self.view_store(layer, kind, x.dtype).flatten(2)
                heads = torch.arange(x.shape[1])[:, None]
                memory[batch.token_blocks[:, None, None], heads, order[batch.token_offsets][:, None]] = x

    def read_heads(self, attention: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        batch, q = self.batch, q.contiguous()
        assert isinstance(batch, ScheduledBatch)
        window = -1 if attention.sliding_window is None else attention.sliding_window
        out, metadata = torch.empty_like(q), batch.metadata
        kernels.cpu_attention_with_kv_cache(
            query=q,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            scale=attention.scaling,
            causal=True,
            alibi_slopes=self.slopes_of(attention, start, q.shape[1]),
            sliding_window=window,
            block_table=metadata.block_table_tensor,
            softcap=attention.softcap or 0.0,
            scheduler_metadata=batch.schedule_work(q, keys.shape[1], window, self.choose_isa(q.dtype, q.shape[2])),
            s_aux=None,
        )
        return out


@cache
def find_order(dtype: torch.dtype, size: int, width: int) -> list[Tensor]:
    """Find where the kernel puts each channel of keys and of values in a block of one head, [size, width] each.

    It always writes both, for equally many heads; where a layer stores only one, headwater writes it. The order
    depends on the machine, so it is found by writing numbers and reading them.
    """
    isa = _get_attn_isa(dtype, size, width, "auto")
    slots = torch.arange(size * width).view(size, 1, width)
    numbers = torch.zeros(2, size * width, dtype=torch.long)
    for digit in range(4):  # half precision is exact only up to 256, so write the indices in digits
        digits = (slots >> 6 * digit & 63).to(dtype)
        written = [torch.zeros(1, 1, size, width, dtype=dtype) for _ in range(2)]
        kernels.cpu_attn_reshape_and_cache(digits, digits, *written, torch.arange(size), isa)
        numbers += torch.stack([x.flatten() for x in written]).long() << 6 * digit
    return [x.argsort().view(size, width) for x in numbers]
