"""Inspection of one checkpoint, as a dataclass and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwater import __version__
from headwater.util.errors import HeadwaterError
from headwater_lab.inspection.sample import repeat_random_tokens, sample_images, sample_tokens
from headwater_lab.inspection.scalars import Census, Scalars, collect_scalars, list_blocks, take_census
from headwater_lab.inspection.watch import Induction, Read, induction_scores, read_sample
from headwater_lab.training.trained_models import Trained
from headwater_lab.util.model_kinds import is_of_images

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class SampleSize:
    """The size of what was read: rows of tokens, or images. patches: rows and columns of an image's; None for text."""

    rows: int
    tokens: int
    patches: tuple[int, int] | None

    def __str__(self) -> str:
        size = f"{self.rows} × {self.tokens}"
        return size if self.patches is None else f"{self.rows} of {self.patches[0]} × {self.patches[1]} patches"


@dataclass(frozen=True)
class Inspection:
    """The inspection of one model. docs/inspect.md defines every figure.

    attends: for each layer and query head, the layers whose keys and whose values a head attends to.
    induction, sample, read: None if only scalars were requested; `induction` also for models of images.
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
    sample: SampleSize | None = None
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
    text: Path | None = None,
    *,
    rows: int | None = None,
    context: int | None = None,
    scalars_only: bool = False,
) -> Inspection:
    """Look inside a trained model without changing it.

    text: a file to read; default: the model's latest training data, or for image models its held-out images.
    rows: rows of the text, default 16; or the number of images, default 64. context: tokens per row; default: the
    data's, or at most 256 for a text. scalars_only: read neither text nor images, only the scalars.
    Raises `HeadwaterError` if there is nothing to read, too little, or data that the model cannot read.
    """
    model = trained.model
    config = model.config
    if is_of_images(config) and (text or context is not None):
        option = "--text" if text else "--context"
        raise HeadwaterError(f"{trained.source!r} is an image model, and {option} is for text; leave it out.")
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
            for block in list_blocks(model)
        ],
        scalars=collect_scalars(model),
        census=take_census(model),
    )
    if scalars_only:
        return Inspection(**facts)
    if is_of_images(config):
        sample = sample_images(trained, rows)
    else:
        sample = sample_tokens(trained, text, rows, context)
        facts["induction"] = induction_scores(model, *repeat_random_tokens(model))
    size = SampleSize(sample.rows, sample.length, sample.patches)
    return Inspection(**facts, sample=size, read=read_sample(model, sample))


def check_same_kind(inspections: Sequence[Inspection]) -> None:
    """Raise `HeadwaterError` if some have read text and others images, whose measurements differ."""
    if len({inspection.sample.patches is None for inspection in inspections if inspection.sample}) > 1:
        raise HeadwaterError(
            "Text models and image models are measured on different data; inspect them separately, or pass --scalars."
        )


def to_json(inspections: Sequence[Inspection]) -> dict[str, Any]:
    """Return the content of inspect.json."""
    models = [
        asdict(inspection) | ({} if inspection.read is None else {"skip_use": inspection.skip_use})
        for inspection in inspections
    ]
    return {"headwater": __version__, "schema_version": SCHEMA_VERSION, "models": models}
