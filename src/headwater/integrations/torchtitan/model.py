"""A headwater model as torchtitan's trainer sees it: its config, its parts by torchtitan's names, its state dict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import ModuleDict
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from headwater.config.text import HeadwaterConfig
from headwater.cost.counts import training_flops
from headwater.integrations.torchtitan.limits import check_model
from headwater.integrations.torchtitan.titan_checkpoints import EMBEDDING, HEAD, ours_of, theirs_of
from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.stack import last_readers, run_blocks
from headwater.nn.documents import count_positions
from headwater.nn.linear import model_linears
from headwater.nn.lookback import find_reach
from headwater.nn.masks import LayerKind, find_new_tokens, make_mask
from headwater.nn.position import for_heads
from headwater.nn.stages import run_shared
from headwater.util.errors import HeadwaterError

# The prefix that torchtitan's checkpointing wrapper adds to parameter names inside a block.
WRAPPED = "_checkpoint_wrapped_module."


class TitanModel(BaseModel):
    """The parts of a `HeadwaterForCausalLM`, by torchtitan's names: any of them may be missing in a pipeline's stage.

    The parameters keep their shapes, so that a checkpoint is the same whatever it was trained on.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        headwater: HeadwaterConfig
        """The model."""
        linears: Linears
        """Linear layers of the model; a torchtitan converter, such as the float8 one, replaces some of them."""

        @property
        def layers(self) -> range:
            """A range with one number per block, because torchtitan counts them."""
            return range(self.headwater.num_hidden_layers)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Raise `HeadwaterError` for settings of the trainer that the model does not support."""
            check_model(self.headwater, config.parallelism, config.training.seq_len)
            takes = inspect.signature(PipelineScheduleSingle.step).parameters
            if config.parallelism.pipeline_parallel_degree > 1 and "arg_mbs" not in takes:
                raise HeadwaterError(
                    f"torchtitan's trainer runs pipelines in a way that PyTorch {torch.__version__} does not support; "
                    "set parallelism.pipeline_parallel_degree to 1, or install a newer PyTorch."
                )
            if config.parallelism.context_parallel_degree > 1 and hasattr(config.dataloader, "positions"):
                config.dataloader.positions = True  # a process has only part of a row and cannot infer its positions

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """The number of parameters, and the FLOPs of a training step per token of rows of `seq_len` tokens."""
            return sum(p.numel() for p in model.parameters()), int(training_flops(self.headwater, seq_len))

    # Set by the trainer where the loss applies the head itself, a chunk of tokens at a time.
    _skip_lm_head = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        full = HeadwaterForCausalLM(config.headwater)
        self.settings: HeadwaterConfig = full.config  # a copy in which the attention kernel is set
        for qualified, converted in config.linears.list_converted():
            parent, _, name = ours_of(qualified).rpartition(".")
            full.get_submodule(parent).register_module(name, converted.build())
        if self.settings.tie_word_embeddings:
            full.lm_head.weight = full.model.embed_tokens.weight
        model = full.model
        self.tok_embeddings: nn.Embedding | None = model.embed_tokens
        self.embed_positions: nn.Embedding | None = model.embed_positions
        self.rotary_emb: nn.Module | None = model.rotary_emb
        self.dropout: nn.Module | None = model.dropout
        self.layers = ModuleDict({str(number): block for number, block in enumerate(model.layers)})
        self.mechanisms = ModuleDict({key: model.mechanisms[key] for key in model.mechanisms.names.values()})
        self.norm: nn.Module | None = model.norm
        self.lm_head: nn.Module | None = full.lm_head
        self.enable_weight_tying = self.settings.tie_word_embeddings
        self.keys = dict(model.mechanisms.names)
        self.last_reader = last_readers(full.plans)
        self.limit, self.id_readers = model.input_spec.lookback.limit, model.input_spec.id_readers
        # Set where the tokens of a row are split over processes.
        self.context_mesh: DeviceMesh | None = None
        # Called when the parameters are on their device.
        self.after_init: Callable[[nn.Module], None] | None = None

    def verify_module_protocol(self) -> None:
        """Accept any module: blocks contain plain PyTorch modules, which torchtitan's sharding never visits."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None) -> Tensor:
        """tokens: ids [B, T], or the previous stage's output [B, T, D]. positions: [B, T]; a document starts at 0.

        Returns logits [B, T, V]; the last block's output without a head, and normed where the loss applies the head.
        """
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        local_positions, positions = positions, self.gather_positions(positions)
        length = x.shape[1] if positions is None else positions.shape[1]
        counts = count_positions(None, 0, length, x.device) if positions is None else positions
        row = x[:, :1, :0].expand(-1, length, -1)  # dummy with a whole row's shape, dtype and device
        if self.embed_positions is not None:
            x = x + self.embed_positions(counts if local_positions is None else local_positions)
        if self.dropout is not None:
            x = self.dropout(x)
        arguments = dict(
            position_embeddings=None if self.rotary_emb is None else for_heads(*self.rotary_emb(row, counts)),
            attention_mask=make_mask(LayerKind(0, self.settings), find_new_tokens(row), None, positions),
            reach=None if self.limit == 0 or positions is None else find_reach(positions, None, 0, self.limit),
            token_ids=tokens if self.id_readers else None,
            position_ids=counts,
        )
        modules = ((name, self.mechanisms[key]) for name, key in self.keys.items() if key in self.mechanisms)
        shared, by_kind = run_shared(modules, tokens, self.id_readers), dict.fromkeys((False, True), arguments)
        x = run_blocks(self.layers.values(), self.last_reader, x, shared, by_kind)
        return self.compute_logits(x)

    def gather_positions(self, positions: Tensor | None) -> Tensor | None:
        """Gather the positions of whole rows, of which this process may have only a part."""
        if self.context_mesh is None or positions is None:
            return positions
        shards = DTensor.from_local(positions, self.context_mesh, [Shard(1)], run_check=False)
        return shards.redistribute(placements=[Replicate()]).to_local()

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute logits, or what precedes them if this stage has no norm or head, or the loss applies them."""
        if self.norm is None:
            return x
        x = self.norm(x)
        if self.settings.logit_scale != 1:
            x = x * float(self.settings.logit_scale)
        return x if self._skip_lm_head or self.lm_head is None else self.lm_head(x)

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Give every parameter its value in a new `HeadwaterForCausalLM`, independent of the number of processes."""
        if self.enable_weight_tying and self.tok_embeddings is not None and self.lm_head is not None:
            self.lm_head.weight = self.tok_embeddings.weight  # moving them to a device has separated the tied weights
        with torch.device("meta"):
            full = HeadwaterForCausalLM(self.settings)
        for name, parameter in self.named_parameters():
            owner, _, inner = ours_of(name.replace(WRAPPED, "")).rpartition(".")
            value = full.initial_value(full.get_submodule(owner), inner)
            if isinstance(parameter, DTensor):  # each process draws the whole tensor and keeps its shard
                value = value.to(parameter.device)
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)
        for module in self.modules():
            if isinstance(module, KeepsPrecision):
                module.restore_constants()
        if self.after_init is not None:
            self.after_init(self)


class Linears:
    """The linear layers of a model as torchtitan's configs, by torchtitan's names, for its converters.

    Linear layers inside mechanisms are excluded, and so are replacements of linear layers, such as parameter tokens.
    """

    def __init__(self, config: HeadwaterConfig) -> None:
        with torch.device("meta"):
            full = HeadwaterForCausalLM(config)
        for name, module in model_linears(full):
            bias = module.bias is not None
            settings = TitanLinear.Config(in_features=module.in_features, out_features=module.out_features, bias=bias)
            vars(self)[theirs_of(name)] = settings

    def traverse(
        self, config_cls: type, *, recurse: bool = False, _prefix: str = ""
    ) -> Iterator[tuple[str, Any, object, str]]:
        """Yield (name, config, the object that holds it, its attribute name), as torchtitan's configs do."""
        for name, settings in list(vars(self).items()):
            if isinstance(settings, config_cls):
                yield name, settings, self, name

    def list_converted(self) -> Iterator[tuple[str, Any]]:
        """The layers that a converter has replaced, by name."""
        return ((name, settings) for name, settings in vars(self).items() if type(settings) is not TitanLinear.Config)

    def to_dict(self) -> dict[str, str]:
        """Return a dict for torchtitan's logs."""
        return {name: type(settings).__qualname__ for name, settings in self.list_converted()}


class TitanAdapter(StateDictAdapter):
    """Translate between torchtitan's names and a headwater checkpoint's. The tensors are the same."""

    def __init__(self, model_config: TitanModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.tied = model_config.headwater.tie_word_embeddings

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A model's state dict, by our names; a tied head is left out."""
        return {ours_of(name): x for name, x in state_dict.items() if not (self.tied and name == HEAD)}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `to_hf`."""
        tensors = {theirs_of(name): x for name, x in hf_state_dict.items()}
        if self.tied and EMBEDDING in tensors:
            tensors[HEAD] = tensors[EMBEDDING]
        return tensors
