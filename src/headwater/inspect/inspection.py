"""The inspection of one checkpoint, as a dataclass and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headwater import __version__
from headwater.files import replace_text
from headwater.inspect.sample import repeated, sample
from headwater.inspect.scalars import Census, Scalars, blocks, census, scalars
from headwater.inspect.watch import Induction, Read, hooked, induction_scores, logits, read
from headwater.training.trained import Trained

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class InspectedText:
    """The text that was read: names, rows and tokens per row.

    logits_moved: how much inspection changes the logits of the first row, over the largest logit.
    """

    texts: list[str]
    rows: int
    context: int
    logits_moved: float


@dataclass(frozen=True)
class Inspection:
    """The inspection of one model. docs/inspect.md defines every figure.

    attends: for each layer and query head, the layers whose keys and whose values a head attends to.
    induction, text, read: None if only scalars were requested.
    """

    name: str
    source: str
    parameters: int
    layers: int
    query_heads: int
    key_value_heads: int
    mechanisms: dict[str, Any]
    attends: list[list[tuple[int, int]]]
    scalars: list[Scalars]
    census: Census | None
    induction: Induction | None = None
    text: InspectedText | None = None
    read: Read | None = None

    @property
    def attends_elsewhere(self) -> bool:
        """Whether a head attends to the keys or values of another layer."""
        return any(pair != (layer, layer) for layer, heads in enumerate(self.attends) for pair in heads)

    @property
    def skip_use(self) -> list[float]:
        """By layer, the share of the heads that attend to another layer's keys or values in `read.use`."""
        assert self.read is not None
        return [
            sum((use for use, pair in zip(uses, heads, strict=True) if pair != (layer, layer)), start=0.0)
            for layer, (uses, heads) in enumerate(zip(self.read.use, self.attends, strict=True))
        ]


def inspect_model(
    trained: Trained,
    name: str,
    texts: Sequence[Path] = (),
    *,
    rows: int = 16,
    context: int | None = None,
    scalars_only: bool = False,
) -> Inspection:
    """Look inside a trained model without changing it.

    texts: files to read; default: the model's latest training data. rows: rows of each. context: tokens per row;
    default: the data's, or at most 256 for a text. scalars_only: read no text, only the scalars. Raises
    `HeadwaterError` if there is nothing to read, or too little.
    """
    model = trained.model
    config = model.config
    facts: dict[str, Any] = dict(
        name=name,
        source=trained.source,
        parameters=model.num_parameters(),
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        mechanisms=dict(config.mechanisms or {}),
        attends=[
            [(pair.k, pair.v) for pair in block.plan.attends for _ in range(block.self_attn.num_key_value_groups)]
            for block in blocks(model)
        ],
        scalars=scalars(model),
        census=census(model),
    )
    if scalars_only:
        return Inspection(**facts)
    rows_read = sample(trained, texts, rows, context)
    before = logits(model, rows_read)
    with hooked(model):
        under = logits(model, rows_read)
    text = InspectedText(
        rows_read.texts,
        len(rows_read.text_of),
        rows_read.inputs["input_ids"].shape[1],
        float((under - before).abs().max() / before.abs().max().clamp(min=torch.finfo(before.dtype).tiny)),
    )
    found = read(model, rows_read)
    return Inspection(**facts, induction=induction_scores(model, *repeated(model)), text=text, read=found)


def to_json(found: Sequence[Inspection]) -> dict[str, Any]:
    """The content of inspect.json: docs/inspect.md has the schema."""
    return {"schema_version": SCHEMA_VERSION, "headwater": __version__, "models": [_json(one) for one in found]}


def _json(one: Inspection) -> dict[str, Any]:
    read = {} if one.read is None else {"skip_use": one.skip_use}
    return asdict(one) | read


def write_json(found: Sequence[Inspection], file: Path) -> None:
    replace_text(file, json.dumps(to_json(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
