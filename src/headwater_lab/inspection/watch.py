"""Run a model with hooks that measure each layer and keep only sums."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.config.layers import layer_config
from headwater.config.plan import Stage
from headwater.nn.patches import raster_positions
from headwater_lab.inspection.sample import Sample
from headwater_lab.inspection.scalars import list_blocks, value_taps
from headwater_lab.inspection.scores import (
    attention_entropy,
    effective_weights,
    induction_attention,
    previous_attention,
    token_similarity,
)
from headwater_lab.util.model_kinds import AnyModel, is_of_images

PerHead = list[list[float]]  # [layers][query heads]


@dataclass(frozen=True)
class Read:
    """Measurements over the sample; docs/inspect.md defines them.

    hidden: [layers + 1], at each block's input and the last block's output. values: [layers], None if a layer projects
    none. first_token: None for images without a class token. beside: None if no layer has learned pairs.
    """

    hidden: list[float]
    values: list[float | None]
    entropy: PerHead
    normalized_entropy: PerHead
    first_token: PerHead | None
    previous_token: PerHead
    previous_token_effective: PerHead
    beside: PerHead | None
    use: PerHead


@dataclass(frozen=True)
class Induction:
    """Induction scores by layers and query heads: attention, and the effective weight of the projected values."""

    rows: int
    period: int
    attention: PerHead
    effective: PerHead


@dataclass
class Sums:
    """Sums by measure and layer, and their counts."""

    total: dict[Any, Any] = field(default_factory=lambda: defaultdict(float))
    count: dict[Any, Any] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, layer: int, total: Any, count: Any) -> None:
        self.total[name, layer] += total
        self.count[name, layer] += count

    def list_means(self, name: str, layers: int) -> list[Any]:
        """List a measure's means by layer; None where nothing was added."""
        means = [
            self.total[name, layer] / max(1, self.count[name, layer]) if (name, layer) in self.count else None
            for layer in range(layers)
        ]
        return [mean.tolist() if isinstance(mean, Tensor) else mean for mean in means]


@contextmanager
def hook_model(model: AnyModel) -> Iterator[Callable[..., None]]:
    """Run the model with the kernel that returns attention weights, without gradient, in this context.

    Yields a function that hooks a module until the end: (module, function of (module, inputs, named inputs, output)).
    """
    implementation, was_training = model.config._attn_implementation, model.training
    model.set_attn_implementation("eager")
    model.eval()
    with ExitStack() as stack, torch.no_grad():
        stack.callback(model.set_attn_implementation, implementation)
        stack.callback(model.train, was_training)

        def hook(module: nn.Module, function: Callable[..., None]) -> None:
            stack.callback(module.register_forward_hook(function, with_kwargs=True).remove)

        yield hook


def induction_scores(model: AnyModel, sample: Sample, period: int) -> Induction:
    """Score how much each head copies what followed a token's earlier occurrence.

    sample: rows of `period` tokens, twice.
    """
    taps, sums = value_taps(model), Sums()
    length = sample.length
    since = torch.arange(length, device=model.device)[None]

    def add_scores(layer: int, weights: Tensor) -> None:
        sums.add("attention", layer, len(weights) * induction_attention(weights, period), len(weights))
        weights_of_values = effective_weights(weights, taps[layer], since)
        sums.add("effective", layer, len(weights) * induction_attention(weights_of_values, period), len(weights))

    with hook_model(model) as hook:
        for layer, block in enumerate(list_blocks(model)):
            hook(block.self_attn, lambda _, __, ___, output, layer=layer: add_scores(layer, output[1]))
        for batch in sample.iterate_batches(model):
            _run_model(model, batch)
    scores = (sums.list_means(name, len(taps)) for name in ("attention", "effective"))
    return Induction(sample.rows, period, *scores)


def read_sample(model: AnyModel, sample: Sample) -> Read:
    """Run the model over the sample without changing it."""
    watch = Watch(model)
    with hook_model(model) as hook:
        watch.add_hooks(hook)
        for batch in sample.iterate_batches(model):
            watch.sight = find_sight(model, batch)
            _run_model(model, batch)
    return watch.summarize()


def _run_model(model: AnyModel, batch: dict[str, Tensor]) -> None:
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    model(**inputs, **({} if is_of_images(model.config) else {"use_cache": False}))


class Sight(NamedTuple):
    """The tokens that each token of a batch sees, [B, T] each.

    visible: their number. start: the slot of the first one. since: the number of earlier tokens of its document,
    which limits mechanisms. It differs from `visible - 1` in rows whose attention crosses document
    boundaries. For images, `since` counts patches in raster order.
    """

    visible: Tensor
    start: Tensor
    since: Tensor


def find_sight(model: AnyModel, batch: dict[str, Tensor]) -> Sight:
    config, device = model.config, model.device
    if is_of_images(config):
        pixels = batch["pixel_values"]
        earlier = raster_positions(config.grid_of(*pixels.shape[2:]), config.first_patch, config.stop_at_rows, device)
        earlier = earlier.expand(len(pixels), -1)
        return Sight(torch.full_like(earlier, earlier.shape[1]), torch.zeros_like(earlier), earlier)
    ids = batch["input_ids"]
    slot = torch.arange(ids.shape[1]).expand(ids.shape)
    back = batch.get("position_ids", slot)
    starts = batch.get("document_starts")
    earlier = back if starts is None else torch.minimum(back, slot - torch.where(starts, slot, 0).cummax(1).values)
    return Sight((back + 1).to(device), (slot - back).to(device), earlier.to(device))


class Watch:
    """The sums of `read_sample`: one method per measurement. sight: of the current batch, set before the model runs."""

    def __init__(self, model: AnyModel) -> None:
        self.model, self.blocks, self.sums = model, list_blocks(model), Sums()
        self.taps = value_taps(model)
        self.beside = [bool(block.self_attn.stages[Stage.ADDED_KEY_VALUES.value]) for block in self.blocks]
        self.has_first_token = not is_of_images(model.config) or model.config.pooling == "token"
        self.first_patch = model.config.first_patch if is_of_images(model.config) else 0
        self.sight: Sight

    def add_hooks(self, hook: Callable[..., None]) -> None:
        for layer, block in enumerate(self.blocks):
            hook(block, lambda _, inputs, __, ___, layer=layer: self.add_similarity("hidden", layer, inputs[0]))
            hook(block.self_attn, lambda _, __, ___, output, layer=layer: self.measure_attention(layer, output[1]))
            hook(block.self_attn.o_proj, lambda _, inputs, __, ___, layer=layer: self.measure_heads(layer, inputs[0]))
            if block.self_attn.v_proj is not None:
                hook(block.self_attn.v_proj, lambda _, __, ___, v, layer=layer: self.add_similarity("values", layer, v))
        hook(self.blocks[-1], lambda _, __, ___, output: self.add_similarity("hidden", len(self.blocks), output[0]))

    def add_similarity(self, name: str, layer: int, x: Tensor) -> None:
        self.sums.add(name, layer, float(token_similarity(x[:, self.first_patch :]).sum()), len(x))

    def measure_attention(self, layer: int, weights: Tensor) -> None:
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        rows, _, length, _ = weights.shape

        def add(name: str, by_query: Tensor, count: Any = rows * length) -> None:
            self.sums.add(name, layer, by_query.sum((0, 2), dtype=torch.float64), count)

        window = layer_config(self.model.config, layer).sliding_window
        visible = (self.sight.visible if window is None else self.sight.visible.clamp(max=window))[:, None]
        entropies = attention_entropy(weights)
        add("entropy", entropies)
        several = visible > 1
        add("normalized", torch.where(several, entropies / visible.clamp(min=2).log(), 0.0), int(several.sum()))
        first_slots = self.sight.start[:, None, :, None].expand(*weights.shape[:3], 1)
        add("first", weights.gather(-1, first_slots)[..., 0])
        add("beside", 1 - weights.sum(-1) if self.beside[layer] else torch.zeros_like(entropies))
        of_values = effective_weights(weights, self.taps[layer], self.sight.since)
        for name, a in (("previous", weights), ("effective", of_values)):
            total, count = previous_attention(a, self.sight.since)
            self.sums.add(name, layer, total, int(count))

    def measure_heads(self, layer: int, out: Tensor) -> None:
        """Measure each head's share of the output. out [B, T, H·w]: the input of the output projection."""
        count = layer_config(self.model.config, layer).num_attention_heads
        heads = out.chunk(count, dim=-1)
        output = self.blocks[layer].self_attn.o_proj
        if isinstance(output, nn.Linear):
            heads = tuple(x @ w.T for x, w in zip(heads, output.weight.chunk(count, dim=1), strict=True))
        lengths = torch.stack([head.double().norm(dim=-1) for head in heads], dim=-1)
        shares = lengths / lengths.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        self.sums.add("use", layer, shares.sum((0, 1)), shares.shape[0] * shares.shape[1])

    def summarize(self) -> Read:
        layers = len(self.blocks)

        def by_head(name: str) -> PerHead:
            return self.sums.list_means(name, layers)

        return Read(
            hidden=self.sums.list_means("hidden", layers + 1),
            values=self.sums.list_means("values", layers),
            entropy=by_head("entropy"),
            normalized_entropy=by_head("normalized"),
            first_token=by_head("first") if self.has_first_token else None,
            previous_token=by_head("previous"),
            previous_token_effective=by_head("effective"),
            beside=by_head("beside") if any(self.beside) else None,
            use=by_head("use"),
        )
