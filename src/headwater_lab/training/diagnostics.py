"""A model's initial state: what each sub-layer writes to the residual stream, compared with the stream itself.

A sub-layer whose output is much larger than the residual stream drowns the token before training begins. Pattention
does that if the embedding is initialized small, since the size of its output does not depend on that of its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.config.vision import HeadwaterVisionConfig
from headwater.models.compiling import is_compiled
from headwater.models.kinds import AnyModel, is_of_images
from headwater.nn.block import Block
from headwater.util.seeding import generator

# Warn about a sub-layer that writes more than this many times the residual stream.
DROWNS = 10.0


@dataclass(frozen=True)
class SubLayerInit:
    """One sub-layer of a model that has not been trained, over a sample of tokens.

    output: root mean square of what it adds to the residual stream. stream: of the residual stream before it.
    cosine: mean cosine of its input with the embedding (token and position) of the same token.
    constant: share of its output that is one vector, the same for all tokens, ‖mean‖² / mean ‖·‖².
    """

    layer: int
    name: str
    output: float
    stream: float
    cosine: float
    constant: float

    @property
    def ratio(self) -> float:
        """Output over residual stream; infinite if the stream is zero."""
        return self.output / self.stream if self.stream else float("inf")


def sample_tokens(vocabulary: int, context: int, rows: int = 8) -> Tensor:
    """Tokens drawn uniformly, [rows, at most 128]: the same ones in every call."""
    draw = generator(0, "init diagnostics")
    return torch.randint(0, vocabulary, (rows, min(context, 128)), generator=draw)


def sample_images(config: HeadwaterVisionConfig, images: int = 8) -> Tensor:
    """Normalized pixels of noise, [images, C, H, W]: the same ones in every call."""
    return torch.randn(images, config.num_channels, *config.image_shape, generator=generator(0, "init diagnostics"))


@torch.no_grad()
def init_diagnostics(model: AnyModel, input_ids: Tensor | None = None) -> list[SubLayerInit]:
    """Both sub-layers of every block, in order, from one forward pass.

    input_ids: [B, T], or pixels [B, C, H, W]; default: 8 rows of 128 random tokens, or 8 images of noise, so the result
        depends only on the model.
    """
    sample: dict[str, Any]
    if is_of_images(model.config):
        sample = {"pixel_values": sample_images(model.config) if input_ids is None else input_ids}
    else:
        if input_ids is None:
            input_ids = sample_tokens(model.config.vocab_size, model.config.max_position_embeddings)
        sample = {"input_ids": input_ids, "use_cache": False}
    sample = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in sample.items()}
    found: list[SubLayerInit] = []
    state: dict[str, Tensor] = {}
    was_training = model.training
    with ExitStack() as stack:
        stack.callback(model.train, was_training)
        model.eval()
        if is_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # no graph can hold these hooks
        for layer, block in enumerate(cast(Sequence[Block], model.model.layers)):
            for handle in _hooks(layer, block, state, found):
                stack.callback(handle.remove)
        model.model(**sample)
    return found


def _hooks(layer: int, block: Block, state: dict[str, Tensor], found: list[SubLayerInit]) -> Iterator[Any]:
    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        state["block"] = inputs[0]
        state.setdefault("embedding", inputs[0])

    def attended(module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        state["attended"] = output[0]

    def between(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        state["between"] = inputs[0]

    def fed(module: nn.Module, inputs: Any, output: Tensor) -> None:
        first = state["block"] if block.residual else torch.zeros_like(state["block"])
        found.append(_measured(layer, "attention", state["attended"], first, state["block"], state["embedding"]))
        stream = first if block.parallel else state["between"]
        found.append(_measured(layer, "feed-forward", output, stream, state["between"], state["embedding"]))

    yield block.register_forward_pre_hook(enter)
    yield block.self_attn.register_forward_hook(attended)
    yield block.post_attention_layernorm.register_forward_pre_hook(between)
    yield block.mlp.register_forward_hook(fed)


def _measured(layer: int, name: str, output: Tensor, stream: Tensor, read: Tensor, embedding: Tensor) -> SubLayerInit:
    rows = output.double().flatten(0, -2)
    energy = rows.square().sum(-1).mean()
    cosine = nn.functional.cosine_similarity(read.double(), embedding.double(), dim=-1).mean()
    return SubLayerInit(
        layer=layer,
        name=name,
        output=float(rows.square().mean().sqrt()),
        stream=float(stream.double().square().mean().sqrt()),
        cosine=float(cosine),
        constant=float(rows.mean(0).square().sum() / energy) if energy else 0.0,
    )


def drowning(found: Sequence[SubLayerInit]) -> str | None:
    """A warning about the first sub-layer that drowns the residual stream; None if none does."""
    bad = [one for one in found if DROWNS < one.ratio < float("inf")]
    if not bad:
        return None
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return (
        f"At initialization, the {bad[0].name} of layer {bad[0].layer}{more} writes {bad[0].ratio:.0f} times the "
        "residual stream, which drowns the tokens; raise model.embedding_range, or initialize its linear layers "
        "smaller."
    )
