"""Calibration of a conversion: what attention computes on sample tokens, and output projections fitted to it."""

import functools
from collections import defaultdict
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.nn.attention import Attention

# Weight of the penalty on a fitted change, in units of the inputs' mean square.
RIDGE = 3e-2


def list_attentions(model: HeadwaterForCausalLM) -> list[Attention]:
    return [cast(Any, block).self_attn for block in model.model.layers]


def has_linear_attention(model: HeadwaterForCausalLM) -> bool:
    """Whether all projections of attention are plain linear layers."""
    return all(
        isinstance(getattr(attention, f"{letter}_proj"), nn.Linear)
        for attention in list_attentions(model)
        for letter in "qkvo"
    )


@torch.no_grad()
def sample_heads(model: HeadwaterForCausalLM, rows: Tensor) -> dict[tuple[int, str], Tensor]:
    """Return the projected keys and values for rows of tokens, [tokens, heads, d] each, by layer and "k" or "v"."""
    outputs: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    with ExitStack() as stack:
        stack.callback(model.train, model.training)
        for layer, attention in enumerate(list_attentions(model)):
            for letter in "kv":
                if (projection := getattr(attention, f"{letter}_proj")) is not None:
                    hook = functools.partial(_record_heads, outputs[layer, letter], attention.head_dim)
                    stack.enter_context(projection.register_forward_hook(hook))
        for row in rows:
            model.eval().model(row[None].to(model.device), use_cache=False)
    return {key: torch.cat(heads) for key, heads in outputs.items()}


@torch.no_grad()
def compute_input_grams(model: HeadwaterForCausalLM, rows: Tensor) -> list[Tensor]:
    """Return the mean of y·yᵀ, [D + 1, D + 1] in fp64, over y = (x, 1) for the inputs x of each layer's attention, for
    rows of tokens."""
    size = model.config.hidden_size + 1
    grams = [torch.zeros(size, size, dtype=torch.float64) for _ in model.plans]
    with ExitStack() as stack:
        stack.callback(model.train, model.training)
        for gram, attention in zip(grams, list_attentions(model), strict=True):
            stack.enter_context(attention.q_proj.register_forward_pre_hook(functools.partial(_add_to_gram, gram)))
        for row in rows:
            model.eval().model(row[None].to(model.device), use_cache=False)
    return [gram / rows.numel() for gram in grams]


@torch.no_grad()
def fit_outputs(model: HeadwaterForCausalLM, original: HeadwaterForCausalLM, rows: Tensor) -> None:
    """Fit output projections of attention, in place: where layers share or have fewer heads than `original`, bring
    their outputs on `rows` of tokens [B, T] as close as possible to the original's, by ridge regression.

    One pass fits from the first layer to the last, so that each corrects what the layers below it have changed.
    """
    pooled = model.config.num_key_value_heads != original.config.num_key_value_heads
    with ExitStack() as stack:
        for plan, attention, source in zip(model.plans, list_attentions(model), list_attentions(original), strict=True):
            shares = any({attends.k, attends.v} != {plan.index} for attends in plan.attends)
            if (pooled or shares or plan.value_part != "v") and isinstance(attention.o_proj, nn.Linear):
                target: list[Tensor] = []
                stack.enter_context(source.o_proj.register_forward_hook(functools.partial(_record_output, target)))
                stack.enter_context(attention.o_proj.register_forward_pre_hook(functools.partial(_fit_linear, target)))
        for network in (original, model):
            stack.callback(network.train, network.training)
            network.eval().model(rows.to(network.device), use_cache=False)


def _record_heads(outputs: list[Tensor], head_dim: int, module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Forward hook: append the output of a projection, [tokens, heads, head_dim], to `outputs`."""
    wide = torch.promote_types(output.dtype, torch.float32)
    outputs.append(output.detach().to(wide).flatten(0, -2).unflatten(-1, (-1, head_dim)))


def _record_output(outputs: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    outputs.append(output)


def _add_to_gram(gram: Tensor, module: nn.Module, inputs: tuple[Tensor]) -> None:
    """Forward pre-hook: add Σ y·yᵀ, y = (x, 1), to `gram`."""
    x = nn.functional.pad(inputs[0].detach().flatten(0, -2).double().cpu(), (0, 1), value=1.0)
    gram += x.T @ x


def _fit_linear(target: list[Tensor], linear: nn.Linear, inputs: tuple[Tensor]) -> None:
    """Forward pre-hook: add to the weight the W that minimizes Σ‖y - linear(x) - W·x‖² + λ‖W‖², y from `target`."""
    x = inputs[0].flatten(0, -2).double()
    residual = target.pop().flatten(0, -2) - nn.functional.linear(inputs[0], linear.weight, linear.bias).flatten(0, -2)
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    linear.weight += torch.linalg.solve(gram, x.T @ residual.double()).T.to(linear.weight.dtype)
