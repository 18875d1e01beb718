"""Stored weights before they are loaded: names that wrappers changed, and tensors that are not weights."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwater.util.errors import HeadwaterError

# Path elements that torch.compile, DDP, FSDP and activation checkpointing insert into the names of parameters.
WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
WEIGHT_DTYPES = "float16, bfloat16, float32 or float64"


def map_unwrapped_names(names: Iterable[str], where: str, known: Collection[str] = ()) -> dict[str, str]:
    """Map each name to itself without the path elements in `WRAPPERS`.

    known: names that stay as they are, since a module may really be called "module".
    Raises `HeadwaterError` if two tensors get the same name.
    """
    plain: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name in names:
        path = name.split(".")
        bare = name if name in known else ".".join(element for element in path if element not in WRAPPERS) or name
        if bare in sources:
            raise HeadwaterError(
                f"{sources[bare]!r} and {name!r} in {where} are both {bare!r} once the names of wrappers are removed; "
                "keep one of the two."
            )
        sources[bare], plain[name] = name, bare
    return plain


def strip_wrappers(tensors: Mapping[str, Any], where: str, known: Collection[str] = ()) -> dict[str, Any]:
    """Rename tensors as `map_unwrapped_names` does. Raises `HeadwaterError` as it does."""
    names = map_unwrapped_names(tensors, where, known)
    return {names[name]: tensor for name, tensor in tensors.items()}


def check_dtypes(dtypes: Mapping[str, torch.dtype], where: str, model: nn.Module) -> None:
    """Raise `HeadwaterError` naming the first tensor whose dtype cannot be a weight's (`can_store_weights`).

    dtypes: the stored dtypes by name. model: the model to load; its integer buffers may be stored too, and tensors that
        transformers ignores, such as masks in old checkpoints.
    """
    integers = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for name, dtype in dtypes.items():
        exempt = name in integers or any(pattern.search(name) for pattern in ignored)
        if not exempt and not can_store_weights(dtype):
            raise HeadwaterError(
                f"The weights in {where} cannot be used: {name!r} is stored as {str(dtype).removeprefix('torch.')}, "
                f"and a weight must be {WEIGHT_DTYPES}; save it so, or restore the quantization_config in config.json "
                "if a quantizer wrote it."
            )


def can_store_weights(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be weights: real numbers of at least 16 bits."""
    return dtype.is_floating_point and dtype.itemsize > 1


def list_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """List the dtype of each tensor by name."""
    return {name: tensor.dtype for name, tensor in tensors.items()}


def read_dtypes(files: Iterable[Path | str]) -> dict[str, torch.dtype]:
    """Read the dtype of each tensor in files of weights by name, without running code."""
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                dtypes |= {name: opened.get_tensor(name).dtype for name in opened.keys()}  # noqa: SIM118  no mapping
        else:
            content = torch.load(file, map_location="meta", weights_only=True)
            dtypes |= {name: tensor.dtype for name, tensor in content.items() if isinstance(tensor, Tensor)}
    return dtypes


def check_files(files: Iterable[Path | str], where: str, model: PreTrainedModel) -> None:
    """Raise `HeadwaterError` as `check_dtypes` does, unless `model`'s config says that they are quantized."""
    if getattr(model.config, "quantization_config", None) is None:
        check_dtypes(read_dtypes(files), where, model)
