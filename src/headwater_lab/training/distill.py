"""Distillation: learn from the predictions of a trained model beside the data. arXiv 1503.02531.

    (1 - w)·loss + w·T²·KL(p_T ‖ q_T) + c·Σ_l ‖h_l - h'_l‖² / ‖h'_l‖² / L        p_T = softmax(teacher's logits / T)

Each is a mean over the tokens that have a label. h_l, h'_l: the residual stream after layer l, the model's and the
teacher's, which is in memory once, in the precision it was saved in, without gradients and without a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.config.text import HeadwaterConfig
from headwater.cost.counts import forward_flops_per_token
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.kinds import is_of_images
from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import LABELS, Batch
from headwater_lab.recipe.schema import Distillation, Recipe
from headwater_lab.training.trained import open_source


class Teacher:
    """The model that a run learns from. Raises `HeadwaterError` if it cannot be read, or predicts other tokens."""

    def __init__(self, recipe: Recipe, config: HeadwaterConfig, context: int, device: torch.device) -> None:
        settings = recipe.training.distillation
        assert settings is not None
        self.settings: Distillation = settings
        source = settings.teacher or (recipe.start.checkpoint if recipe.start is not None else None)
        assert source is not None
        model = open_source(str(Path(source))).model
        theirs = model.config
        if is_of_images(theirs) or theirs.vocab_size != config.vocab_size:
            what = "is an image model" if is_of_images(theirs) else f"has a vocabulary of {theirs.vocab_size} tokens"
            raise HeadwaterError(
                f"training.distillation: the teacher {source!r} {what}, and the model one of {config.vocab_size}; use "
                "a teacher with the same vocabulary."
            )
        alike = (theirs.num_hidden_layers, theirs.hidden_size) == (config.num_hidden_layers, config.hidden_size)
        if settings.hidden_weight and not alike:
            raise HeadwaterError(
                f"training.distillation.hidden_weight compares layer by layer, and the teacher {source!r} has "
                f"{theirs.num_hidden_layers} layers of width {theirs.hidden_size}, the model "
                f"{config.num_hidden_layers} of {config.hidden_size}; leave hidden_weight out."
            )
        if theirs.position == "learned" and theirs.max_position_embeddings < context:
            raise HeadwaterError(
                f"The teacher {source!r} has {theirs.max_position_embeddings} learned positions and data.context is "
                f"{context}; lower data.context."
            )
        assert isinstance(model, HeadwaterForCausalLM)
        self.model = model.to(device).eval().requires_grad_(False)
        self.flops = forward_flops_per_token(theirs, context)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Any:
        """Its logits and, if they are compared, its hidden states."""
        inputs = {name: tensor for name, tensor in batch.items() if name not in LABELS}
        return self.model(**inputs, use_cache=False, output_hidden_states=self.settings.hidden_weight > 0)

    def aim(self, loss: Tensor, out: Any, batch: Batch, counted: Tensor) -> Tensor:
        """The loss to minimize. loss: what it would be without a teacher; out: the model's output for the batch."""
        theirs, settings = self(batch), self.settings
        which = batch["shift_labels"] != -100
        aim = (1 - settings.weight) * loss
        if settings.weight:
            aim = aim + settings.weight * divergence(out.logits, theirs.logits, which, settings.temperature) / counted
        if settings.hidden_weight:
            aim = aim + settings.hidden_weight * distance(out.hidden_states, theirs.hidden_states, which) / counted
        return aim


def divergence(logits: Tensor, teacher: Tensor, which: Tensor, temperature: float = 1.0) -> Tensor:
    """T²·Σ KL(softmax(teacher / T) ‖ softmax(logits / T)) over the tokens `which` [B, T]; logits [B, T, V].

    The other tokens are made equal, and not left out: how many there are is known to the device alone.
    """
    own, theirs = (
        x.masked_fill(~which[..., None], 0.0)
        .to(torch.promote_types(x.dtype, torch.float32))
        .div(temperature)
        .log_softmax(-1)
        for x in (logits, teacher)
    )
    kl = torch.nn.functional.kl_div(own, theirs.to(own.dtype), log_target=True, reduction="sum")
    return temperature**2 * kl


def distance(states: tuple[Tensor, ...], teacher: tuple[Tensor, ...], which: Tensor) -> Tensor:
    """Σ ‖h - h'‖² / ‖h'‖² over the tokens `which` [B, T], mean over layers. The embedding is left out."""
    found = []
    for own, theirs in zip(states[1:], teacher[1:], strict=True):
        own, theirs = (x.masked_fill(~which[..., None], 1.0).float() for x in (own, theirs))
        found.append(((own - theirs).square().sum(-1) / theirs.square().sum(-1)).sum())
    return torch.stack(found).mean()
