"""Wider models from narrower ones with linear layers, the alternative to growing by pairs.

    W_new = [ W_old  W_12 ]
            [ W_21   W_22 ]

net2net    as the TokenFormer paper defines its baseline (arXiv 2410.23168, section 4.3, equation 14): the old block is
           kept, the others are initialized as in a fresh model. The function changes. (The original, arXiv 1511.05641,
           duplicates neurons and keeps it.)
exact      the same, but whatever writes to the residual stream writes nothing new: rows of new channels and columns of
           new heads and units are zero in the output and down maps, and new columns in the embedding. RMSNorms divide
           by the mean over more channels, so their weights and their epsilon are scaled. The function is unchanged, and
           what is zero learns from the first step.
"""

from __future__ import annotations

import copy
from typing import Literal, get_args

import torch
from torch import Tensor

from headwater.config import HeadwaterConfig
from headwater.errors import HeadwaterError
from headwater.growth.pairs import Model, has_pairs
from headwater.nn.norm import RMSNorm

WideningMethod = Literal["exact", "net2net"]

# Layers that write to the residual stream, by the end of their name: only to it, and to it from heads or units.
EMBEDDINGS = ("embed_tokens.weight", "embed_positions.weight", "class_token.weight", "registers.weight")
WRITERS = ("o_proj.weight", "down_proj.weight")


def widen(
    model: Model,
    *,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    form: WideningMethod = "exact",
) -> Model:
    """A wider model with linear layers, of the same depth and head width.

    The sizes are the new ones; None keeps one, and the key/value heads keep their ratio to the query heads. New
    parameters are initialized as in a fresh model of the new size.
    form: "exact" keeps the function; "net2net" is the TokenFormer paper's baseline and does not. See the file's head.

    Raises `HeadwaterError` for a smaller size, for a model of parameter tokens, and if "exact" cannot keep the
    function: a wider residual stream under LayerNorm (whose mean would change), norms without weight or qk_norm,
    and a different ratio of query to key/value heads.
    """
    if form not in get_args(WideningMethod):
        raise HeadwaterError(f"form must be {' or '.join(map(repr, get_args(WideningMethod)))}, not {form!r}.")
    old = model.config
    config = widened_config(
        old,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
    )
    if form == "exact":
        _check_exact(old, config)
    dtype = next(model.parameters()).dtype
    wide = type(model)(config).to(next(model.parameters()).device, dtype)
    given = model.state_dict()
    done: set[int] = set()
    with torch.no_grad():
        for name, tensor in wide.state_dict().items():
            if name not in given or given[name].dim() != tensor.dim():
                raise HeadwaterError(f"{name} of this model has no counterpart in the wider one; remove its mechanism.")
            if tensor.data_ptr() in done:  # tied
                continue
            done.add(tensor.data_ptr())
            if form == "exact":
                _silence(name, tensor, given[name])
            tensor[tuple(slice(0, size) for size in given[name].shape)] = given[name]
        if form == "exact" and config.hidden_size > old.hidden_size:
            _rescale(wide, old.hidden_size / config.hidden_size)
    if model.can_generate():
        wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.train(model.training)


def widened_config(
    old: HeadwaterConfig,
    *,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
) -> HeadwaterConfig:
    """The config that `widen` gives a model with this config, except norm_eps. Raises the same errors."""
    if has_pairs(old):
        raise HeadwaterError("This model has parameter tokens in place of linear maps; grow it with `headwater grow`.")
    if num_attention_heads is not None and num_key_value_heads is None:
        num_key_value_heads = num_attention_heads // _ratio(old)
    asked = dict(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
    )
    sizes = {name: size for name, size in asked.items() if size is not None}
    for name, size in sizes.items():
        if size < getattr(old, name):
            raise HeadwaterError(f"{name} would shrink from {getattr(old, name)} to {size}; give at least as much.")
    if old.sliding_fields and not {"rope_parameters"}.issuperset(old.sliding_fields):
        raise HeadwaterError("A model whose layers have different heads (sliding_fields) cannot be widened.")
    if all(size == getattr(old, name) for name, size in sizes.items()):
        raise HeadwaterError("Nothing would become wider: give a larger hidden_size, intermediate_size or more heads.")
    config = copy.deepcopy(old)
    for name, size in sizes.items():
        setattr(config, name, size)
    config._check_heads()
    config.settle()
    return config


def _ratio(config: HeadwaterConfig) -> int:
    """Query heads for each key/value head."""
    assert config.num_key_value_heads is not None
    return config.num_attention_heads // config.num_key_value_heads


def _check_exact(old: HeadwaterConfig, new: HeadwaterConfig) -> None:
    if new.hidden_size > old.hidden_size and (
        old.norm != "rms_norm" or not (old.norm_weight and old.final_norm_weight)
    ):
        raise HeadwaterError(
            "A wider residual stream keeps the function under RMSNorm with weights only; widen intermediate_size and "
            "the heads alone, or use form net2net, which does not keep it."
        )
    if new.hidden_size > old.hidden_size and old.qk_norm:
        raise HeadwaterError(
            "A wider residual stream needs another norm_eps, which the norms of queries and keys (qk_norm) share; "
            "widen intermediate_size and the heads alone, or use form net2net, which does not keep the function."
        )
    if new.hidden_size > old.hidden_size and old.position == "sincos":
        raise HeadwaterError(
            "Fixed sines and cosines are others in a wider residual stream; widen intermediate_size and the heads "
            "alone, or use form net2net, which does not keep the function."
        )
    if _ratio(new) != _ratio(old):
        raise HeadwaterError(
            "The function is kept only where num_attention_heads and num_key_value_heads grow by the same factor; "
            "change one of them, or use form net2net."
        )


def _silence(name: str, tensor: Tensor, old: Tensor) -> None:
    """Zero everything that would write to the residual stream beyond the old block."""
    if name.endswith(EMBEDDINGS):
        tensor[:, old.shape[1] :] = 0
    elif name.endswith("embed_patches.weight"):
        tensor[old.shape[0] :] = 0
    elif name.endswith(WRITERS):
        tensor.zero_()


def _rescale(model: Model, part: float) -> None:
    """The norms over the residual stream, of whose channels `part` are not zero."""
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm) and not name.endswith(("q_norm", "k_norm")):
            offset = float(module.offset)
            module.weight.add_(offset).mul_(part**0.5).sub_(offset)
            module.eps *= part
    model.config.norm_eps *= part
