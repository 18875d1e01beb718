"""Trained models: open them from any source, with data and text to measure them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import AutoImageProcessor, BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion import from_transformers, load_transformers, read_foreign
from headwater.models.card import CARD
from headwater.models.load import check_regular, model_type, reading
from headwater.models.quantization import check_full_precision
from headwater.plugins.trust import check_paths
from headwater.util.errors import HeadwaterError
from headwater.util.files import local
from headwater_lab.data.base import LABELS, Data, main_input
from headwater_lab.data.chat import read_contents
from headwater_lab.data.corpus import TOPICS, read_topics
from headwater_lab.data.reading import PACKED, table_kind
from headwater_lab.data.stream import read_documents
from headwater_lab.data.tokenizer import encode_texts
from headwater_lab.data.tokenizer_files import check_vocabulary, find_tokenizer, open_tokenizer
from headwater_lab.recipe.messages import find_untrusted
from headwater_lab.recipe.overrides import MOST_TEXT, read_text
from headwater_lab.recipe.recipe import read_data
from headwater_lab.training.checkpoints import (
    check_sums,
    load_model,
    newest_checkpoint,
    read_history,
    read_optimizer_state,
)
from headwater_lab.training.initialization import sample_images
from headwater_lab.training.records import Event
from headwater_lab.util.model_kinds import MODEL_TYPES, AnyModel, is_of_images

PROCESSOR = "preprocessor_config.json"


@dataclass
class Trained:
    """A trained model and what belongs to it.

    source: where it was read from. tokenizer: of an image model, its image processor. state: the optimizer's, by
    name. foreign: whether the source was not a headwater checkpoint; original: the transformers model that it was
    converted from.
    """

    source: str
    model: AnyModel
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None
    history: list[Event]
    state: dict[str, Tensor]
    foreign: bool = False
    original: PreTrainedModel | None = None

    def after(self, kind: Any, details: dict[str, Any], **changes: Any) -> Trained:
        """Return the model with these changes, and an event of this kind in its history."""
        event = Event(kind=kind, details=details)
        return replace(self, history=[*self.history, event], original=None, **changes)


def is_foreign(path: Path) -> bool:
    """Whether a folder is a model of transformers, not a headwater checkpoint or run."""
    return model_type(newest_checkpoint(path)) not in (None, *MODEL_TYPES)


def open_trained(path: Path, with_state: bool = False) -> Trained:
    """Open a checkpoint, or a run's newest. Raises `HeadwaterError` if it is damaged, quantized or not a checkpoint."""
    path = newest_checkpoint(path)
    check_sums(path)
    model = load_model(path).eval()
    check_full_precision(model)
    state = read_optimizer_state(path) if with_state else {}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, tensor in state.items():
        if tensor.shape not in ((1,), shapes.get(name.removeprefix("optimizer.").rpartition(".")[0])):
            raise HeadwaterError(
                f"The optimizer's state in {str(path)!r} cannot be kept, because {name} has another shape "
                "than its parameter; begin with a fresh optimizer."
            )
    return Trained(str(path), model, open_preparer(path, model), read_history(path), state)


def open_source(
    source: str,
    layout: str | None = None,
    settings: dict[str, Any] | None = None,
    family: str | None = None,
    *,
    with_state: bool = False,
) -> Trained:
    """Open a model from any source: a headwater checkpoint or run, a Hugging Face model, or a paper's own checkpoint.

    source: a folder, a file of tensors, or a name on the Hugging Face hub.
    layout: the paper's code that wrote it, see `headwater.conversion.read_foreign`; settings: fields of its config.
    family: the family of a Hugging Face model; default: from its config. with_state: with the optimizer's state, of a
    headwater checkpoint. Raises `HeadwaterError` for a source that cannot be read.
    """
    path = local(source)
    if layout is None and path.is_dir() and model_type(newest_checkpoint(path)) in MODEL_TYPES:
        if family is not None:
            raise HeadwaterError(f"{source!r} is a headwater model, which has no other family; leave out --family.")
        return open_trained(path, with_state)
    if layout is not None or path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        model = read_foreign(source, layout, **(settings or {}))
        event = Event(kind="retrofitted", details={"source": source, "layout": layout})
        return Trained(source, model, read_tokenizer(path, model.config.vocab_size), [event], {}, foreign=True)
    original = load_transformers(source, family)
    details: dict[str, Any] = {"source": source, "family": family or original.config.model_type}
    if not path.is_dir():
        details["on_hub"] = True  # a folder may have such a name too
    location = path if path.is_dir() else source
    if (license := read_license(location)) is not None:
        details["license"] = license
    event = Event(kind="retrofitted", details=details)
    model = from_transformers(original, family).eval()
    preparer = open_preparer(location, model)
    return Trained(source, model, preparer, [event], {}, foreign=True, original=original.eval())


def read_license(source: Path | str) -> str | None:
    """Read the license that the card of a model's folder, or of a name on the hub, states; None if it states none."""
    try:
        card = ModelCard.load(source / CARD if isinstance(source, Path) else source, ignore_metadata_errors=True)
    except Exception:  # a model need not have a card, or be on the hub any longer
        return None
    return card.data.license if isinstance(card.data.license, str) else None


def open_preparer(source: Path | str, model: AnyModel) -> PreTrainedTokenizerBase | BaseImageProcessor | None:
    """Open the tokenizer or the image processor of a checkpoint or of a name on the hub; None if it has none."""
    if is_of_images(model.config):
        return open_image_processor(source)
    return read_tokenizer(source, model.config.vocab_size)


def open_image_processor(source: Path | str) -> BaseImageProcessor | None:
    """Open the image processor of a folder or of a name on the hub; None if it has none. Raises `HeadwaterError`."""
    if isinstance(source, Path):
        if not (source / PROCESSOR).is_file():
            return None
        check_regular(source)
        with reading(f"The {PROCESSOR} in {str(source)!r}", "use an intact checkpoint"):
            return AutoImageProcessor.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    try:
        return AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    except Exception:  # a model on the hub need not have one
        return None


def read_tokenizer(source: Path | str, vocab_size: int | None) -> PreTrainedTokenizerBase | None:
    """Open the tokenizer of a checkpoint or of a name on the hub; None if it has none. See `find_tokenizer`."""
    if isinstance(source, Path):
        return find_tokenizer(source, vocab_size) if source.is_dir() else None
    try:
        tokenizer = open_tokenizer(source)
    except Exception:  # a model on the hub need not have one
        return None
    check_vocabulary(tokenizer, vocab_size, f"The tokenizer of {source!r}")
    return tokenizer


def build_data(history: list[Event]) -> Data | None:
    """Build the data that a model was last trained on; None if its history names none.

    Raises `HeadwaterError`, also for data that the user does not trust.
    """
    if (settings := data_settings(history)) is None:
        return None
    try:
        data = read_data(settings)
    except ValueError as error:
        problem = "The model's history names data that this version does not know; pass --text."
        raise find_untrusted(error) or HeadwaterError(problem) from error
    return data.build()


def data_settings(history: list[Event]) -> dict[str, Any] | None:
    """Read the settings of these data, whose paths the user must trust."""
    settings = _describe_last_data(history).get("settings")
    check_paths(settings)
    return settings if isinstance(settings, dict) else None


def last_training(history: list[Event]) -> Event | None:
    """Find the last training event in a history."""
    return next((event for event in reversed(history) if event.kind == "trained"), None)


def _describe_last_data(history: list[Event]) -> dict[str, Any]:
    """Read the settings and the hash of the data that a model was last trained on; {} if its history has none."""
    event = last_training(history)
    data = None if event is None else event.details.get("data")
    return data if isinstance(data, dict) else {}


def warn_changed_data(trained: Trained, data: Data) -> str:
    """Warn if the data that a model was last trained on have changed; "" if not, or if unknown."""
    old_sum = _describe_last_data(trained.history).get("sha256")
    if old_sum is None or data.description.get("sha256") in (None, old_sum):
        return ""
    return (
        f"The data of {trained.source!r} have changed since it was trained on them, so what is held out now may be "
        "what it has learned, and the loss on it too low."
    )


def measure_model(model: AnyModel, data: Data, on_batch: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Measure a model on the held-out data, in its own precision. on_batch: called after each batch."""
    model.eval()

    @torch.no_grad()
    def compute_logits(batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name not in LABELS}
        result = model(**inputs, **({} if is_of_images(model.config) else {"use_cache": False})).logits
        on_batch()
        return result

    return data.evaluate(compute_logits).metrics


def sample_rows(trained: Trained, text: Path | None, rows: int, context: int | None = None) -> Tensor:
    """Take rows of tokens, [rows, context], from a text, or by default from the data the model was last trained on.
    From the data of an image model, take images [rows, C, H, W].

    context: default the data's, or at most 256 for a text. Raises `HeadwaterError` if there is neither, and for a text
    of less than four rows of 16 tokens.
    """
    of_images = is_of_images(trained.model.config)
    if text is not None:
        if of_images:
            raise HeadwaterError(f"{trained.source!r} is an image model, which reads no text; leave out --text.")
        if trained.tokenizer is None:
            raise HeadwaterError(f"{trained.source!r} has no tokenizer, so it cannot read a text; leave out --text.")
        try:
            if table_kind(text) is None and text.suffix.lower() not in PACKED:
                content = read_text(text, "text", MOST_TEXT)
            else:  # read the text of all rows
                documents, _ = read_documents(str(text), "text", None)
                content = "\n".join(read_contents(row.text) if row.is_chat else row.text for row in documents)
        except OSError as error:
            raise HeadwaterError(f"The text {str(text)[:200]!r} cannot be read: {error.strerror}.") from error
        return _cut_rows(trained, content, str(text), rows, context)
    data = build_data(trained.history)
    if data is None:
        advice = "train it with headwater" if of_images else "pass similar text with --text FILE"
        raise HeadwaterError(f"{trained.source!r} does not record what it was trained on; {advice}.")
    batches: Iterator[dict[str, Tensor]] = data.batches(seed=0, batch_size=rows, start=0)
    sample = main_input(next(batches))
    return sample if of_images else sample[:, :context]


def _cut_rows(trained: Trained, content: str, name: str, rows: int, context: int | None) -> Tensor:
    assert trained.tokenizer is not None
    ids = encode_texts(trained.tokenizer, [content], plain=True)[0]
    length = context or min(256, trained.model.config.max_position_embeddings, len(ids) // 4)
    count = min(rows, len(ids) // max(1, length))
    if length < 16 or count < 4:
        raise HeadwaterError(f"{name!r} has {len(ids)} tokens; pass a text of at least 64.")
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    return torch.tensor([ids[start : start + length] for start in starts])


def default_rows(trained: Trained) -> tuple[Tensor, str]:
    """Take a few rows of tokens, [rows, context], that need no text from the user, and describe them; for an image
    model, noise [images, C, H, W].

    They are from the language reference that comes with Python, or random if the model has no tokenizer or too short a
    context, or if this Python lacks it.
    """
    config = trained.model.config
    if isinstance(config, HeadwaterVisionConfig):
        images = sample_images(config)
        return images, f"{len(images)} images of noise"
    with suppress(HeadwaterError):
        if trained.tokenizer is not None and config.max_position_embeddings >= 16:
            text = "\n".join(document.text for document in islice(read_topics(), 40))
            ids = _cut_rows(trained, text, TOPICS, 4, min(128, config.max_position_embeddings))
            if int(ids.max()) < config.vocab_size:
                return ids, f"{ids.numel()} tokens of Python's language reference"
    length = min(64, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    return ids, f"{ids.numel()} random tokens"
