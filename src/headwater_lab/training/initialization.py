"""Measure the output of each sub-layer of an untrained model to the residual stream."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.config.vision import HeadwaterVisionConfig
from headwater.models.compiling import is_compiled
from headwater.nn.block import Block
from headwater.util.seeding import generator
from headwater_lab.util.model_kinds import AnyModel, is_of_images

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
    """Draw tokens uniformly, [rows, at most 128]: the same ones in every call."""
    draw = generator(0, "init diagnostics")
    return torch.randint(0, vocabulary, (rows, min(context, 128)), generator=draw)


def sample_images(config: HeadwaterVisionConfig) -> Tensor:
    """Draw normalized pixels of noise, [8, C, H, W]: the same ones in every call."""
    return torch.randn(8, config.num_channels, *config.image_shape, generator=generator(0, "init diagnostics"))


@torch.no_grad()
def measure_initialization(model: AnyModel, input_ids: Tensor | None = None) -> list[SubLayerInit]:
    """Measure both sub-layers of every block, in order, in one forward pass.

    A sub-layer whose output is much larger than the residual stream drowns the token before training begins. Pattention
    does that if the embedding is initialized small, because the size of its output does not depend on the size of its
    input.

    input_ids: [B, T], or pixels [B, C, H, W]; default: 8 rows of 128 random tokens, or 8 images of noise, so the result
        depends only on the model.
    """
    of_images = is_of_images(model.config)
    if input_ids is None and of_images:
        input_ids = sample_images(model.config)
    elif input_ids is None:
        input_ids = sample_tokens(model.config.vocab_size, model.config.max_position_embeddings)
    x = input_ids.to(model.device)
    sample: dict[str, Any] = {"pixel_values": x} if of_images else {"input_ids": x, "use_cache": False}
    captured: dict[str, Any] = {}
    rows: list[SubLayerInit] = []

    def capture(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: captured.update({name: (inputs, output)})

    def measure_block(layer: int, block: Block, inputs: tuple[Tensor, ...], output: Any) -> None:
        embedding = captured.setdefault("embedding", inputs[0])
        (attended, *_), ((middle,), _), (_, written) = captured["attention"][1], captured["norm"], captured["mlp"]
        stream = inputs[0] if block.residual else torch.zeros_like(inputs[0])
        rows.append(_measure_output(layer, "attention", attended, stream, inputs[0], embedding))
        rows.append(
            _measure_output(layer, "feed-forward", written, stream if block.parallel else middle, middle, embedding)
        )

    was_training = model.training
    with ExitStack() as stack:
        stack.callback(model.train, was_training)
        model.eval()
        if is_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # these hooks would break graphs
        for layer, block in enumerate(cast(Sequence[Block], model.model.layers)):
            for handle in (
                block.self_attn.register_forward_hook(capture("attention")),
                block.post_attention_layernorm.register_forward_hook(capture("norm")),
                block.mlp.register_forward_hook(capture("mlp")),
                block.register_forward_hook(partial(measure_block, layer)),
            ):
                stack.callback(handle.remove)
        model.model(**sample)
    return rows


def _measure_output(
    layer: int, name: str, output: Tensor, stream: Tensor, entered: Tensor, embedding: Tensor
) -> SubLayerInit:
    rows = output.double().flatten(0, -2)
    energy = rows.square().sum(-1).mean()
    cosine = nn.functional.cosine_similarity(entered.double(), embedding.double(), dim=-1).mean()
    return SubLayerInit(
        layer=layer,
        name=name,
        output=float(rows.square().mean().sqrt()),
        stream=float(stream.double().square().mean().sqrt()),
        cosine=float(cosine),
        constant=float(rows.mean(0).square().sum() / energy) if energy else 0.0,
    )


def warn_drowning(rows: Sequence[SubLayerInit]) -> str | None:
    """Warn about the first sub-layer that drowns the residual stream; None if none does."""
    drowning = [row for row in rows if DROWNS < row.ratio < float("inf")]
    if not drowning:
        return None
    row, count = drowning[0], f" (and {len(drowning) - 1} more)" if len(drowning) > 1 else ""
    return (
        f"At initialization, the {row.name} of layer {row.layer}{count} writes {row.ratio:.0f} times the residual "
        "stream, which drowns the tokens; raise model.embedding_range, or initialize its linear layers smaller."
    )
