"""Run a model with hooks that measure each layer and keep only sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwater.inspect.pairs import Firing, PairCounter
from headwater.inspect.sample import Sample, batch_size
from headwater.inspect.scalars import blocks, mechanisms, value_taps
from headwater.inspect.scores import effective, entropy, induction, previous, similarity
from headwater.models.causal_lm import HeadwaterForCausalLM

PerHead = list[list[float]]  # [layers][query heads]


@dataclass(frozen=True)
class Terms:
    """A sum over several layers: each term's share of the total length, Σ‖x_i‖ / Σ_j Σ‖x_j‖, own last."""

    layer: int
    mechanism: str
    names: list[str]
    shares: list[float]


@dataclass(frozen=True)
class Read:
    """Measurements over the sample; [layers][query heads] where it says heads.

    hidden: [layers + 1], mean cosine between a row's tokens at each block's input, and at the last one's output.
    values: [layers], the same for the projected values; None if a layer projects none.
    entropy: nats, by heads; normalized_entropy: over the log of how many tokens are seen, where that is above one.
    first_token: attention to the document's first token. largest: of the row's slots the mean attention to the one that
        gets most; largest_at: which slot.
    previous_token: attention to the token before; previous_token_effective: the same to its value, which a mix of
        values may bring elsewhere.
    use: share of a head in the lengths of what the heads add to the residual stream. With an output map that is not
        linear, in the lengths of what they read.
    """

    hidden: list[float]
    values: list[float | None]
    entropy: PerHead
    normalized_entropy: PerHead
    first_token: PerHead
    largest: PerHead
    largest_at: list[list[int]]
    previous_token: PerHead
    previous_token_effective: PerHead
    use: PerHead
    terms: list[Terms]
    maps: list[Firing]


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

    def mean(self, name: str, layer: int) -> Any:
        mean = self.total[name, layer] / max(1, self.count[name, layer])
        return mean.tolist() if isinstance(mean, Tensor) else mean


@contextmanager
def hooked(model: HeadwaterForCausalLM) -> Iterator[Callable[..., None]]:
    """In this context, the model runs with the kernel that returns attention weights, without gradient. It yields a
    function that hooks a module until the end: (module, function of (module, inputs, named inputs, output)).
    """
    before, was_training = model.config._attn_implementation, model.training
    model.set_attn_implementation("eager")
    model.eval()
    with ExitStack() as stack, torch.no_grad():
        stack.callback(model.set_attn_implementation, before)
        stack.callback(model.train, was_training)

        def hook(module: nn.Module, function: Callable[..., None]) -> None:
            stack.callback(module.register_forward_hook(function, with_kwargs=True).remove)

        yield hook


def induction_scores(model: HeadwaterForCausalLM, sample: Sample, period: int) -> Induction:
    """sample: rows of `period` tokens, twice."""
    taps, sums = value_taps(model), Sums()
    length = sample.inputs["input_ids"].shape[1]
    since = torch.arange(length, device=model.device)[None]

    def attention(layer: int, weights: Tensor) -> None:
        sums.add("attention", layer, len(weights) * induction(weights, period), len(weights))
        read = effective(weights, taps[layer], since)
        sums.add("effective", layer, len(weights) * induction(read, period), len(weights))

    with hooked(model) as hook:
        for layer, block in enumerate(blocks(model)):
            hook(block.self_attn, lambda _, __, ___, output, layer=layer: attention(layer, output[1]))
        for batch, _ in sample.batches(batch_size(model, length)):
            _run(model, batch)
    layers = range(len(taps))
    scores = ([sums.mean(name, layer) for layer in layers] for name in ("attention", "effective"))
    return Induction(len(sample.text_of), period, *scores)


def read(model: HeadwaterForCausalLM, sample: Sample) -> Read:
    """Run the model over the sample without changing it."""
    watch = Watch(model, sample)
    with hooked(model) as hook:
        watch.put(hook)
        for batch, first_row in sample.batches(batch_size(model, sample.inputs["input_ids"].shape[1])):
            watch.first_row, watch.since, watch.documents = first_row, *_since(batch, model.device)
            _run(model, batch)
    return watch.result()


def logits(model: HeadwaterForCausalLM, sample: Sample) -> Tensor:
    """Of the first row."""
    with torch.no_grad():
        return _run(model, next(sample.batches(1))[0])


def _run(model: HeadwaterForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    return model(**{name: tensor.to(model.device) for name, tensor in batch.items()}, use_cache=False).logits


def _since(batch: dict[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, T] each: how many tokens attention may go back, and how many come before each in its document.

    They differ in rows in which attention crosses from one document to the next.
    """
    ids = batch["input_ids"]
    slot = torch.arange(ids.shape[1]).expand(ids.shape)
    sees = batch.get("position_ids", slot)
    starts = batch.get("document_starts")
    documents = sees if starts is None else torch.minimum(sees, slot - torch.where(starts, slot, 0).cummax(1).values)
    return sees.to(device), documents.to(device)


class Watch:
    """The sums of `read`: one method per measurement."""

    def __init__(self, model: HeadwaterForCausalLM, sample: Sample) -> None:
        self.model, self.sample, self.sums = model, sample, Sums()
        self.taps = value_taps(model)
        self.pairs: dict[tuple[int, str], PairCounter] = {}
        self.terms: dict[tuple[int, str], dict[str, float]] = {}
        # For the current batch.
        self.first_row, self.since, self.documents = 0, torch.zeros(0), torch.zeros(0)

    def put(self, hook: Callable[..., None]) -> None:
        everything = blocks(self.model)
        for layer, block in enumerate(everything):
            hook(block, lambda _, inputs, __, ___, layer=layer: self.hidden(layer, inputs[0]))
            hook(block.self_attn, lambda _, __, ___, output, layer=layer: self.attention(layer, output[1]))
            hook(block.self_attn.o_proj, lambda _, inputs, __, ___, layer=layer: self.heads(layer, inputs[0]))
            if block.self_attn.v_proj is not None:
                hook(block.self_attn.v_proj, lambda _, __, ___, output, layer=layer: self.values(layer, output))
            for place, module in mechanisms(block):
                hook(
                    module,
                    lambda module, inputs, named, _, layer=layer, place=place: self.mechanism(
                        layer, place, module, inputs, named
                    ),
                )
        hook(everything[-1], lambda _, __, ___, output: self.hidden(len(everything), output[0]))

    def hidden(self, layer: int, x: Tensor) -> None:
        self.sums.add("hidden", layer, float(similarity(x).sum()), len(x))

    def values(self, layer: int, v: Tensor) -> None:
        self.sums.add("values", layer, float(similarity(v).sum()), len(v))

    def attention(self, layer: int, weights: Tensor) -> None:
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        rows, _, length, _ = weights.shape

        def add(name: str, by_query: Tensor, count: Any = rows * length) -> None:
            self.sums.add(name, layer, by_query.sum((0, 2), dtype=torch.float64), count)

        window = self.model.config.sliding_window
        seen = (self.since + 1).clamp(max=length if window is None else window)[:, None]
        found = entropy(weights)
        add("entropy", found)
        add("normalized", torch.where(seen > 1, found / seen.clamp(min=2).log(), 0.0), int((seen > 1).sum()))
        slot = torch.arange(length, device=weights.device)
        first = (slot - self.since)[:, None, :, None].expand(*weights.shape[:3], 1)
        add("first", weights.gather(-1, first)[..., 0])
        self.sums.add("slots", layer, weights.mean(2, dtype=torch.float64).sum(0), rows)
        for name, a in (("previous", weights), ("effective", effective(weights, self.taps[layer], self.documents))):
            total, count = previous(a, self.documents)
            self.sums.add(name, layer, total, int(count))

    def heads(self, layer: int, out: Tensor) -> None:
        """out [B, T, H·d], the input of the output projection."""
        block, width = blocks(self.model)[layer], self.model.config.head_dim
        parts = out.split(width, dim=-1)
        output = block.self_attn.o_proj
        if isinstance(output, nn.Linear):
            parts = tuple(x @ w.T for x, w in zip(parts, output.weight.split(width, dim=1), strict=True))
        lengths = torch.stack([part.double().norm(dim=-1) for part in parts], dim=-1)
        shares = lengths / lengths.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        self.sums.add("use", layer, shares.sum((0, 1)), shares.shape[0] * shares.shape[1])

    def mechanism(self, layer: int, place: str, module: Any, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        for name, term in module.terms(*inputs, **named).items():
            found = self.terms.setdefault((layer, module.name()), {})
            found[name] = found.get(name, 0.0) + float(term.norm(dim=-1).sum(dtype=torch.float64))
        contributions = module.firing(*inputs)
        if contributions is not None:
            counter = self.pairs.setdefault((layer, place), PairCounter(self.sample))
            counter.add(contributions, self.first_row)

    def result(self) -> Read:
        everything = blocks(self.model)
        layers = range(len(everything))

        def by_head(name: str) -> PerHead:
            return [self.sums.mean(name, layer) for layer in layers]

        slots = [torch.tensor(row, dtype=torch.float64) for row in by_head("slots")]
        return Read(
            hidden=[self.sums.mean("hidden", layer) for layer in range(len(everything) + 1)],
            values=[
                None if block.self_attn.v_proj is None else self.sums.mean("values", layer)
                for layer, block in enumerate(everything)
            ],
            entropy=by_head("entropy"),
            normalized_entropy=by_head("normalized"),
            first_token=by_head("first"),
            largest=[row.amax(-1).tolist() for row in slots],
            largest_at=[row.argmax(-1).tolist() for row in slots],
            previous_token=by_head("previous"),
            previous_token_effective=by_head("effective"),
            use=by_head("use"),
            terms=[
                Terms(
                    layer, mechanism, list(found), [length / (sum(found.values()) or 1.0) for length in found.values()]
                )
                for (layer, mechanism), found in self.terms.items()
            ],
            maps=[counter.result(layer, place) for (layer, place), counter in self.pairs.items()],
        )
