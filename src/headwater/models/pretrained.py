"""`HeadwaterPreTrainedModel`: what text and image models share."""

# No postponed annotations in this file: other packages read the annotations of models at run time.
import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.initialization import no_init_weights
from transformers.modeling_utils import load_state_dict

from headwater import kernels
from headwater.config import auto_map
from headwater.config.layers import cache_types
from headwater.config.plan import LayerPlan
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import HasSharedModule
from headwater.mechanisms.fp32 import KeepsPrecision
from headwater.models.card import replace_template
from headwater.models.quantization import BESIDE, check_quantized
from headwater.models.remote_code import add_code, is_code
from headwater.models.token_tables import check_resizable, resize_token_tables
from headwater.models.weights import can_store_weights, check_dtypes, list_dtypes, map_unwrapped_names, read_dtypes
from headwater.nn.attention import Attention
from headwater.nn.attention_kernel import supported_kernels
from headwater.nn.block import Block
from headwater.nn.stages import MechanismDict, find_owner
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError, either
from headwater.util.seeding import generator


class HeadwaterPreTrainedModel(PreTrainedModel):
    """Base class of all models: flags for transformers, and the initialization of parameters."""

    config: HeadwaterConfig
    config_class = HeadwaterConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # The modules whose outputs transformers records if a call requests them.
    _can_record_outputs = {"hidden_states": Block, "attentions": Attention}
    # The linear layers outside the blocks that are drawn with 1/√inputs, whatever `linear_init` is.
    fan_in_layers: tuple[str, ...] = ()

    def __init__(self, config: HeadwaterConfig) -> None:
        config.complete_fields()  # fields may have been set after the config was created
        super().__init__(config)

    @classmethod
    def make_skeleton(cls, config: HeadwaterConfig) -> Self:
        """Make a model without memory for its parameters, for their names and shapes."""
        with torch.device("meta"), no_init_weights():
            return cls(config)

    def plan_layers(self) -> tuple[LayerPlan, ...]:
        """The plans from which the layers are built. Also tells transformers what their caches hold."""
        config = self.config
        plans = plan_layers(config)
        config.layer_types = cache_types(config, all(p.is_ordinary for p in plans if config.slides(p.index)))
        return plans

    @property
    def plans(self) -> tuple[LayerPlan, ...]:
        """The plan of each layer: what it projects, stores and reads."""
        return tuple(block.plan for block in self.base_model.layers)

    def post_init(self) -> None:
        """transformers' method; also names the modules, and freezes parameters that a mechanism does not train.

        Loading keeps parameters of `KeepsPrecision` in fp32, by the last two parts of their names.
        """
        self.name_modules()
        wide = {prefix for prefix, module in self.named_modules() if isinstance(module, KeepsPrecision)}
        names = [name.split(".") for name in self.state_dict() if name.rpartition(".")[0] in wide]
        self._keep_in_fp32_modules_strict = sorted({".".join(path[-2:]) for path in names})
        self._keep_in_fp32_modules = [BESIDE] if any(".mechanisms." in f".{name}" for name in self.state_dict()) else []
        kernels.are_disabled()  # reads the environment now, since a later change would cost one compiled graph more
        super().post_init()
        self.freeze_parameters()

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """transformers' method, without `BESIDE`, which only tells quantizers what to skip."""
        return {name: wide_dtype for name, wide_dtype in super()._get_dtype_plan(dtype).items() if name != BESIDE}

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Register the class as `HeadwaterConfig.register_for_auto_class` does."""
        if not auto_map.register_class(cls, auto_class):
            super().register_for_auto_class(auto_class)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """transformers' method, with the code next to the weights if it belongs there (`headwater.config.auto_map`)."""
        with self.including_code() if kwargs.get("push_to_hub") else nullcontext():
            if is_main_process:
                add_code(self.config, save_directory)
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    @contextmanager
    def including_code(self) -> Iterator[None]:
        """Save the model inside with its code, and leave no trace of that in its config."""
        config = self.config
        self.config = copy.deepcopy(config)
        if auto_map.auto_class_of(type(self)) is not None:  # the code has no subclass of somebody's
            self.config.auto_map = auto_map.auto_map_of(config)
        try:
            yield
        finally:
            self.config = config

    def push_to_hub(self, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """transformers' method, with the model's code, so that it loads without headwater, and a card that says so."""
        with self.including_code():
            return super().push_to_hub(repo_id, *args, **kwargs)

    def _upload_modified_files(
        self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' method, which uploads what both ways of pushing have saved."""
        replace_template(working_dir, self, repo_id, kwargs.get("token"))
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _get_files_timestamps(self, working_dir: str | os.PathLike[str]) -> dict[str, float]:
        """transformers' method, which uploads files that change from then on, without the code, written before."""
        return {name: time for name, time in super()._get_files_timestamps(working_dir).items() if not is_code(name)}

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, **kwargs: Any
    ) -> str:
        """transformers' method. Raises `HeadwaterError` for a kernel that does not support the config."""
        possible, reason = supported_kernels(self.config)
        if possible is not None and attn_implementation is None:
            return "sdpa" if "sdpa" in possible else possible[0]
        if possible is not None and attn_implementation.removeprefix("paged|") not in possible:
            raise HeadwaterError(
                f"{reason} works with attn_implementation {either(possible)} only, not {attn_implementation}."
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, is_init_check, **kwargs)

    def name_modules(self) -> None:
        """Store each module's qualified name, without the base model's prefix, so that a model and its base agree."""
        for name, module in self.named_modules():
            module._qualified_name = name.removeprefix(f"{self.base_model_prefix}.")

    def freeze_parameters(self) -> None:
        """Freeze all but the siblings of parameters named "frozen_…", if a mechanism has the option `frozen`."""
        if all(options.get("frozen") is None for options in self.config.mechanisms.values()):
            return
        for module in self.modules():
            parameters = dict(module.named_parameters(recurse=False))
            has_frozen = any(name.startswith("frozen_") for name in parameters)
            for name, parameter in parameters.items():
                parameter.requires_grad_(has_frozen and not name.startswith("frozen_"))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' method. Raises `HeadwaterError` for a quantization_config that would skip linear layers."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_quantized(model, getattr(model, "hf_quantizer", None))
        model.freeze_parameters()  # loading sets requires_grad on everything
        return loaded

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel,
        state_dict: dict[str, Any] | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """transformers' method, through which `from_pretrained` loads all weights; removes the names of wrappers.

        Raises `HeadwaterError` for tensors that are not weights, unless a quantizer wrote them.
        """
        where = repr(str(getattr(load_config, "pretrained_model_name_or_path", None) or "the state dict"))
        dtypes = read_dtypes(checkpoint_files or ()) if state_dict is None else list_dtypes(state_dict)
        names = map_unwrapped_names(dtypes, where, model.state_dict())
        if not getattr(load_config.hf_quantizer, "pre_quantized", False):
            check_dtypes({names[name]: dtype for name, dtype in dtypes.items()}, where, model)
        elif all(map(can_store_weights, dtypes.values())):
            raise HeadwaterError(
                f"The config has a quantization_config, but no weight in {where} is quantized; remove that field, or "
                "use the weights that the quantizer wrote."
            )
        if any(name != bare for name, bare in names.items()):
            if state_dict is None:
                state_dict = {}
                for file in checkpoint_files or ():
                    state_dict |= load_state_dict(file, weights_only=load_config.weights_only)
                checkpoint_files = None
            state_dict = {names[name]: tensor for name, tensor in state_dict.items()}
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """transformers' method, and the tables of mechanisms by token id with it (`resize_token_tables`).

        Raises `HeadwaterError` if a mechanism does not fit the new size, before anything is changed.
        """
        old = len(self.get_input_embeddings().weight)
        new = old if new_num_tokens is None else new_num_tokens
        if isinstance(pad_to_multiple_of, int):  # transformers refuses any other
            new = -(-new // pad_to_multiple_of) * pad_to_multiple_of
        if new != old:
            check_resizable(self, new)
            resize_token_tables(self, new, mean_resizing)
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.name_modules()
        return embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize each parameter, and each buffer that `KeepsPrecision.constants` names.

        Raises `HeadwaterError` for another buffer that checkpoints leave out: loading would leave it undefined.
        """
        for name, parameter in module.named_parameters(recurse=False):
            value = self.initial_value(module, name)
            if isinstance(parameter, DTensor):  # each process draws the whole tensor and keeps its shard
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            init.copy_(parameter, value)
        lost = set(module._non_persistent_buffers_set)
        if isinstance(module, KeepsPrecision):
            module.restore_constants()
            lost -= module.constants().keys()
        if lost:
            raise HeadwaterError(
                f"Loading a checkpoint would leave the buffer {min(lost)!r} of {type(module).__name__} undefined; "
                "register it with persistent=True, or derive from KeepsPrecision and return its value from constants()."
            )

    def initial_value(self, module: nn.Module, name: str) -> Tensor:
        """Return the initial value of `module`'s parameter `name`, from initializer_seed and its full name.

        Inside a mechanism, its `initial_value` decides. Otherwise matrices are normal, biases zero and norms multiply
        by one. Raises `HeadwaterError` for any other parameter.
        """
        # A module that transformers inserts later, such as a resized embedding, has no name in the model yet.
        qualified = f"{getattr(module, '_qualified_name', f'new {type(module).__name__}')}.{name}"
        draw, shape = generator(self.config.initializer_seed, qualified), module.get_parameter(name).shape
        owner, inner = find_owner(self.base_model, qualified)
        if owner is not None and (value := owner.initial_value(inner, draw)) is not None:
            if value.shape != shape:
                raise HeadwaterError(
                    f"Mechanism {owner.registered_name()!r} initializes {inner!r} {list(shape)} with "
                    f"{list(value.shape)}; correct its initial_value()."
                )
            return value
        if module is not owner:
            if name.startswith("bias"):
                return torch.zeros(shape)
            if "norm" in type(module).__name__.lower():
                return torch.full(shape, float(not getattr(module, "offset", False)))
            if not isinstance(module, nn.Linear | nn.Embedding) and len(shape) > 1:
                return torch.normal(0.0, (shape.numel() / shape[0]) ** -0.5, shape, generator=draw)
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise HeadwaterError(
                f"Nothing initializes the parameter {qualified!r} of a {type(module).__name__}; return its initial "
                "value from the mechanism's initial_value()."
            )
        return torch.normal(0.0, self.find_std(module, qualified), shape, generator=draw)

    def find_std(self, module: nn.Linear | nn.Embedding, qualified: str) -> float:
        """Find the standard deviation with which the weight of a linear layer or an embedding starts."""
        config, std = self.config, self.config.initializer_range
        if isinstance(module, nn.Embedding):
            std = std if config.embedding_range is None else config.embedding_range
        elif config.linear_init == "fan_in" or qualified.removesuffix(".weight") in self.fan_in_layers:
            std = module.weight.shape[1] ** -0.5
        if config.scaled_residual_init and qualified.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * config.num_hidden_layers) ** 0.5
        return std


def shared_modules(config: HeadwaterConfig) -> MechanismDict:
    """The modules that a model holds once, by mechanism."""
    modules = {
        name: mechanism.build_shared_module(options, config)
        for name, options in config.mechanisms.items()
        if isinstance(mechanism := resolve(name), HasSharedModule)
    }
    return MechanismDict({name: module for name, module in modules.items() if module is not None})
