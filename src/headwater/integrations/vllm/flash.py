"""FlashAttention over headwater's blocks, for GPUs.

Written from the documentation of vLLM's function, and tested with a CPU function that does the same. It has not been
run on a GPU, so the plugin uses it only with `HEADWATER_VLLM_GPU=1` (`option_checks`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwater.engines.paged import KernelEngine
from headwater.nn.engine import AttentionLayer


def kernel(**arguments: Any) -> Tensor:
    """Run vLLM's FlashAttention, in the version that fits the GPU."""
    from vllm.v1.attention.backends import fa_utils

    version = fa_utils.get_flash_attn_version(
        requires_alibi=arguments["alibi_slopes"] is not None, head_size=arguments["q"].shape[2]
    )
    return fa_utils.flash_attn_varlen_func(**arguments, fa_version=version)


class FlashEngine(KernelEngine):
    """vLLM's FlashAttention over blocks, whose keys are [heads, tokens, d], as for CPUs, read by strides."""

    def read_heads(self, attention: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
        batch: Any = self.batch
        metadata = batch.metadata
        window = attention.sliding_window
        slopes = self.slopes_of(attention, first, q.shape[1])
        return kernel(
            q=q.contiguous(),
            k=keys.transpose(1, 2),
            v=values.transpose(1, 2),
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=attention.scaling,
            causal=True,
            window_size=None if window is None else [window - 1, 0],
            softcap=attention.softcap or 0.0,
            alibi_slopes=None if slopes is None else slopes.to(q.device),
            block_table=metadata.block_table_tensor,
        )
