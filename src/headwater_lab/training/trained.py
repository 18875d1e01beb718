"""Open trained models to make new ones from them: the contents of a checkpoint's folder, and its history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from transformers import AutoImageProcessor, BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion import from_transformers, load_transformers, read_foreign
from headwater.conversion.convert import (
    align,
    blended,
    blended_config,
    chosen,
    finished,
    finished_state,
    similarity,
)
from headwater.cost.counts import cache_bytes_per_token
from headwater.growth import grow
from headwater.growth.enlarge import carried
from headwater.growth.enlarge import enlarged as enlarged_model
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.kinds import MODEL_TYPES, AnyModel, is_of_images
from headwater.models.load import check_regular, check_vocabulary, model_type, open_tokenizer, read_tokenizer, reading
from headwater.models.quantization import check_full_precision
from headwater.plugins.outside import check_paths
from headwater.util.errors import HeadwaterError
from headwater.util.files import local
from headwater_lab.data.base import LABELS, Data, main_input
from headwater_lab.data.chat import contents
from headwater_lab.data.corpus import TOPICS, read_documents, topics
from headwater_lab.data.reading import PACKED, table_kind
from headwater_lab.data.tokenizer import encode_plainly
from headwater_lab.recipe.overrides import MOST_TEXT, read_text
from headwater_lab.recipe.schema import AnyData, Change, untrusted_in
from headwater_lab.training.checkpoint import check, history_of, load_model, optimizer_state
from headwater_lab.training.diagnostics import sample_images
from headwater_lab.training.places import newest_checkpoint
from headwater_lab.training.records import Event

PROCESSOR = "preprocessor_config.json"
# The arguments of growth by parameter tokens.
OF_PAIRS = ("attention_pairs", "ffn_pairs", "key_init", "tau", "freeze")


@dataclass
class Trained:
    """A trained model and what belongs to it.

    source: where it was read from. tokenizer: of an image model, its image processor. state: the optimizer's, by
    name. foreign: whether that was anything but a headwater checkpoint; original: the transformers model that it was
    converted from.
    """

    source: str
    model: AnyModel
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None
    history: list[Event]
    state: dict[str, Tensor]
    foreign: bool = False
    original: PreTrainedModel | None = None


def open_trained(path: Path, with_state: bool = False) -> Trained:
    """Open a checkpoint, or a run's newest. Raises `HeadwaterError` if it is damaged, quantized or not a checkpoint."""
    path = newest_checkpoint(path)
    check(path)
    model = load_model(path).eval()
    check_full_precision(model)
    state = optimizer_state(path) if with_state else {}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, tensor in state.items():
        if tensor.shape not in ((1,), shapes.get(name.removeprefix("optimizer.").rpartition(".")[0])):
            raise HeadwaterError(
                f"The optimizer's state in {str(path)!r} cannot be carried along, because {name} has another shape "
                "than its parameter; begin with a fresh optimizer."
            )
    return Trained(str(path), model, preparer_of(path, model), history_of(path), state)


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
    headwater checkpoint. Raises `HeadwaterError` for what cannot be read.
    """
    path = local(source)
    if layout is None and path.is_dir() and model_type(newest_checkpoint(path)) in MODEL_TYPES:
        if family is not None:
            raise HeadwaterError(f"{source!r} is headwater's own model, of no other family; leave out --family.")
        return open_trained(path, with_state)
    if layout is not None or path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        read = read_foreign(source, layout, **(settings or {}))
        event = Event(kind="retrofitted", details={"source": source, "layout": layout})
        return Trained(source, read, tokenizer_of(path, read.config.vocab_size), [event], {}, foreign=True)
    original = load_transformers(source, family)
    event = Event(kind="retrofitted", details={"source": source, "family": family or original.config.model_type})
    model = from_transformers(original, family).eval()
    preparer = preparer_of(path if path.is_dir() else source, model)
    return Trained(source, model, preparer, [event], {}, foreign=True, original=original.eval())


def preparer_of(source: Path | str, model: AnyModel) -> PreTrainedTokenizerBase | BaseImageProcessor | None:
    """The tokenizer or the image processor of a checkpoint or of a name on the hub; None if it has none."""
    if is_of_images(model.config):
        return image_processor_of(source)
    return tokenizer_of(source, model.config.vocab_size)


def image_processor_of(source: Path | str) -> BaseImageProcessor | None:
    """The image processor of a folder or of a name on the hub; None if it has none. Raises `HeadwaterError`."""
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


def tokenizer_of(source: Path | str, vocab_size: int | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint or of a name on the hub; None if it has none. See `reading.read_tokenizer`."""
    if isinstance(source, Path):
        return read_tokenizer(source, vocab_size) if source.is_dir() else None
    try:
        tokenizer = open_tokenizer(source)
    except Exception:  # a model on the hub need not have one
        return None
    check_vocabulary(tokenizer, vocab_size, f"The tokenizer of {source!r}")
    return tokenizer


def changed(trained: Trained, change: Change, rows: Tensor | None = None) -> Trained:
    """Apply a recipe's `grow:`, `convert:` or `finish_conversion:` to a trained model; return it unchanged if there is
    none. rows: of tokens [B, T], on which a conversion measures how alike keys and values are."""
    model, state = trained.model, trained.state
    if change.convert is not None or change.finish_conversion:
        return converted(trained, change, rows)
    if change.grow is None:
        return trained
    arguments, options = change.grow.model_dump(), change.grow.options
    thaws = any(not parameter.requires_grad for parameter in model.parameters())
    of_pairs = {name: arguments.pop(name) for name in OF_PAIRS}
    if any(of_pairs[name] is not None for name in OF_PAIRS[:2]) or not options.sizes:
        model = grow(model, **of_pairs)
        state = enlarged(state, model)
    else:
        of_pairs = {}
    if options.sizes:
        before, model = model, enlarged_model(model, options)
        state = carried(state, before, model, options)
    else:
        arguments = {}
    details = {name: value for name, value in (of_pairs | arguments).items() if value is not None}
    counts = {"from": trained.model.num_parameters(), "to": model.num_parameters()}
    event = Event(kind="grown", details=details | {"parameters": counts})
    state = {} if thaws else state
    return replace(trained, model=model, history=[*trained.history, event], state=state, original=None)


def converted(trained: Trained, change: Change, rows: Tensor | None) -> Trained:
    """Apply a recipe's `convert:` or `finish_conversion:`. The optimizer's state is kept where parameters keep their
    meaning."""
    before, goal = trained.model, change.convert
    if goal is not None and not isinstance(before, HeadwaterForCausalLM):
        raise HeadwaterError("An image model has no cache to make smaller; leave start.convert out.")
    details: dict[str, Any] = {}
    first, trained.original = before.config, None
    if goal is None:
        details["finished"] = True
        model = finished(before)
        state = finished_state(trained.state, before, model)
    else:
        mechanisms, heads = goal.mechanisms, goal.num_key_value_heads
        blended_config(before.config, mechanisms, heads)  # which says what is wrong before the model runs
        # Turned or mixed in bf16, the weights would be rounded, and the function another one.
        before.to(torch.promote_types(before.dtype, torch.float32))
        if goal.choose_layers or goal.align:
            if rows is None:
                raise HeadwaterError(
                    "A conversion measures keys and values on rows of the recipe's text; use data of text, or set "
                    "convert.align to false and leave convert.choose_layers out."
                )
            if goal.choose_layers:
                mechanisms = chosen(before.config, mechanisms, similarity(before, rows))
        turned = goal.align and align(before, cast(Tensor, rows), mechanisms, heads)
        if turned and trained.state and change.optimizer_state == "keep":
            raise HeadwaterError(
                "Aligning keys and values turns their weights, to which the optimizer's state does not belong; set "
                "convert.align=false, or leave out optimizer_state: keep."
            )
        trained.model = model = blended(before, mechanisms, heads, 0.0 if goal.anneal else 1.0)
        del before
        details |= {"mechanisms": mechanisms, "num_key_value_heads": heads, "annealed": goal.anneal}
        details["aligned"] = turned
        state = {} if turned else trained.state
        if not goal.anneal:
            blend, model = model, finished(model)
            state = finished_state(state, blend, model)
    bytes_ = {"from": cache_bytes_per_token(first), "to": cache_bytes_per_token(model.config)}
    event = Event(kind="converted", details=details | {"cache_bytes_per_token": bytes_})
    return replace(trained, model=model, history=[*trained.history, event], state=state, original=None)


def enlarged(state: dict[str, Tensor], model: AnyModel) -> dict[str, Tensor]:
    """Optimizer state for a larger model: existing parameters keep theirs, and that of new ones is zero.

    Except Adam's average of squares, which for new elements is the mean of the old ones: Adam counts steps once per
    tensor, so zeros would look like gradients known to be small, and the first updates would be too large.
    Empty if part of the model is frozen, because then no trainable parameter has a past.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if any(not parameter.requires_grad for parameter in model.parameters()):
        return {}
    padded = {}
    for name, tensor in state.items():
        parameter = name.removeprefix("optimizer.").rpartition(".")[0]
        if tensor.shape == (1,):  # how often it was stepped
            padded[name] = tensor
        elif parameter in shapes:
            fill = float(tensor.mean()) if name.endswith("exp_avg_sq") else 0.0
            padded[name] = torch.full(shapes[parameter], fill, dtype=tensor.dtype)
            padded[name][tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded


def data_of(history: list[Event]) -> Data | None:
    """The data a model was last trained on; None if its history names none. Raises `HeadwaterError`, also for data
    that the user does not trust.
    """
    last = _last_training(history)
    if last is None:
        return None
    try:
        named = last.details["data"]["settings"]
        check_paths(named)
        settings = TypeAdapter(AnyData).validate_python(named)
    except (KeyError, TypeError, ValidationError) as error:
        if isinstance(error, ValidationError) and (refused := untrusted_in(error)) is not None:
            raise refused from error
        raise HeadwaterError("The model's history names data that this version does not know; pass --text.") from error
    return settings.build()


def _last_training(history: list[Event]) -> Event | None:
    return next((event for event in reversed(history) if event.kind == "trained"), None)


def changed_text(trained: Trained, data: Data) -> str:
    """A warning if the data that a model was last trained on are others now; "" if not, or if that is not known."""
    last = _last_training(trained.history)
    recorded = last.details.get("data") if last is not None else None
    before = recorded.get("sha256") if isinstance(recorded, dict) else None
    now = data.description.get("sha256")
    if before is None or now is None or before == now:
        return ""
    return (
        f"The data of {trained.source!r} have changed since it was trained on them, so what is held out now may be "
        "what it has learned, and the loss on it too low."
    )


def measure(model: AnyModel, data: Data, on_batch: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Measure a model on the held-out data, in its own precision. on_batch: called after each batch."""
    model.eval()

    @torch.no_grad()
    def logits(batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name not in LABELS}
        result = model(**inputs, **({} if is_of_images(model.config) else {"use_cache": False})).logits
        on_batch()
        return result

    return data.evaluate(logits).metrics


def sample_rows(trained: Trained, text: Path | None, rows: int = 32, context: int | None = None) -> Tensor:
    """Rows of tokens, [rows, context], from a text, or by default from the data the model was last trained on.
    From that of an image model, images [rows, C, H, W].

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
            content = _content(text)
        except OSError as error:
            raise HeadwaterError(f"The text {str(text)[:200]!r} cannot be read: {error.strerror}.") from error
        return _rows_of(trained, content, str(text), rows, context)
    data = data_of(trained.history)
    if data is None:
        advice = "train it with headwater" if of_images else "pass a text of that kind with --text FILE"
        raise HeadwaterError(f"{trained.source!r} does not say what it was trained on; {advice}.")
    batches: Iterator[dict[str, Tensor]] = data.batches(seed=0, batch_size=rows, start=0)
    found = torch.cat([main_input(batch) for batch in islice(batches, 1)])
    return found if of_images else found[:, :context]


def _content(text: Path) -> str:
    """What a file says: its text, or that of all rows of a table."""
    if table_kind(text) is None and text.suffix.lower() not in PACKED:
        return read_text(text, "text", MOST_TEXT)
    documents, _, _ = read_documents(str(text), "text", None)
    return "\n".join(contents(one.text) if one.is_chat else one.text for one in documents)


def _rows_of(trained: Trained, content: str, name: str, rows: int, context: int | None = None) -> Tensor:
    assert trained.tokenizer is not None
    ids = encode_plainly(trained.tokenizer, [content])[0]
    length = context or min(256, trained.model.config.max_position_embeddings, len(ids) // 4)
    count = min(rows, len(ids) // max(1, length))
    if length < 16 or count < 4:
        raise HeadwaterError(f"{name!r} has {len(ids)} tokens; pass a text of at least 64.")
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    return torch.tensor([ids[start : start + length] for start in starts])


def known_rows(trained: Trained) -> tuple[Tensor, str]:
    """A few rows of tokens, [rows, context], that need no text from the user, and a description of them; for a model of
    images, noise [images, C, H, W].

    They are from the language reference that comes with Python, or random if the model has no tokenizer or too short a
    context, or if this Python lacks it.
    """
    config = trained.model.config
    if isinstance(config, HeadwaterVisionConfig):
        images = sample_images(config)
        return images, f"{len(images)} images of noise"
    with suppress(HeadwaterError):
        if trained.tokenizer is not None and config.max_position_embeddings >= 16:
            text = "\n".join(document.text for document in islice(topics(), 40))
            ids = _rows_of(trained, text, TOPICS, 4, min(128, config.max_position_embeddings))
            if int(ids.max()) < config.vocab_size:
                return ids, f"{ids.numel()} tokens of Python's language reference"
    length = min(64, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    return ids, f"{ids.numel()} random tokens"
