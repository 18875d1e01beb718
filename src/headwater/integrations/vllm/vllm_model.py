"""The class that vLLM builds for a headwater checkpoint: the model itself, and vLLM's cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.utils import WeightsMapper

from headwater.engines.split import split_model
from headwater.integrations.vllm.option_checks import check_options, list_portions
from headwater.integrations.vllm.vllm_engine import Blocks
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.linear import model_linears
from headwater.util.errors import HeadwaterError


class Ranks:
    """The processes of vLLM's tensor parallelism (`Processes`)."""

    def add_up(self, x: Tensor) -> Tensor:
        return tensor_model_parallel_all_reduce(x.contiguous())

    def concatenate(self, x: Tensor) -> Tensor:
        return tensor_model_parallel_all_gather(x.contiguous())


HEAD = "lm_head"


class ServedModel(nn.Module, SupportsLoRA):
    """A model of headwater as vLLM calls it."""

    # Maps the parameter names in a LoRA adapter.
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"": "language."})

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        check_options(vllm_config)
        self.config = vllm_config.model_config.hf_config
        with no_init_weights():
            self.language = HeadwaterForCausalLM(self.config).eval()
        if vllm_config.lora_config is not None and not any(name != HEAD for name, _ in model_linears(self.language)):
            raise HeadwaterError("This model's layers have no linear layers for LoRA adapters to change.")
        self.is_loaded = False
        # vLLM requires a layer number in every name.
        shares = list_portions(self.config, vllm_config.parallel_config)
        self.share = shares[get_tensor_model_parallel_rank()]
        name = "layers.0.blocks"
        self.blocks = Blocks(vllm_config, f"{prefix}.{name}" if prefix else name, self.share, shares)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.language.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The hidden states [N, D] of the batch's new tokens. intermediate_tensors: of vLLM's pipelines, unused."""
        assert input_ids is not None
        assert inputs_embeds is None
        self.blocks.step(len(input_ids))
        return self.language.model.serve_tokens(input_ids, positions, self.blocks.engine)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.language.logits(self.language.scale_hidden(hidden_states))

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights. Raises `HeadwaterError` if they do not belong to this model."""
        if self.is_loaded:
            raise HeadwaterError("headwater's plugin loads weights once; start vLLM again with the new checkpoint.")
        self.is_loaded = True
        state, missing = self.language.state_dict(), set(self.language.state_dict())
        for name, tensor in weights:
            if name not in state or state[name].shape != tensor.shape:
                expected = list(state[name].shape) if name in state else "no such tensor"
                raise HeadwaterError(
                    f"The checkpoint has {name!r} {list(tensor.shape)}, but its config describes a model with "
                    f"{expected}."
                )
            state[name].copy_(tensor)
            missing.discard(name)
        if self.config.tie_word_embeddings:
            self.language.tie_weights()
            missing.discard("lm_head.weight")
        if missing:
            raise HeadwaterError(f"The checkpoint has no weights for {', '.join(sorted(missing))}.")
        split_model(self.language, self.share, Ranks())
        self.take_kernels()
        return {name for name, _ in self.named_parameters()}

    def take_kernels(self) -> None:
        """Give linear layers vLLM's kernel for CPUs, which keeps their weights in its own order.

        With few tokens a step, PyTorch's takes twice as long. Those of attention and feed-forward become vLLM's own
        layers, which adapters can change. A mechanism's may be called for other tokens than the batch's, and no adapter
        can change them. The output head's weights are also left unchanged, because they may be the embedding's.
        """
        for name, layer in list(model_linears(self.language)):
            if name != HEAD:
                self.language.set_submodule(name, _of_vllm(layer, name))
        for name, layer in self.language.named_modules():
            if isinstance(layer, nn.Linear) and layer.weight.device.type == "cpu":
                dispatch_cpu_unquantized_gemm(layer, remove_weight=name != HEAD)
                layer.forward = partial(_through_vllm, layer)  # type: ignore[method-assign]


class ContiguousLinear(ReplicatedLinear):
    """vLLM's linear layer for inputs with any strides."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.contiguous())


def _of_vllm(layer: nn.Linear, name: str) -> ReplicatedLinear:
    """Convert a linear layer to vLLM's, with the same weights. It takes its kernel after loading."""
    bias = layer.bias is not None
    with torch.device("meta"):
        linear = ContiguousLinear(
            layer.in_features, layer.out_features, bias, prefix=name, return_bias=False, disable_tp=True
        )
    linear.weight, linear.bias = layer.weight.requires_grad_(False), layer.bias
    return linear


def _through_vllm(layer: Any, x: Tensor) -> Tensor:
    # vLLM's bfloat16 kernels read some inputs as if they were contiguous, ignoring their strides.
    return layer.cpu_linear(x.contiguous(), layer.weight, layer.bias)
