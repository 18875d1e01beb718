"""Trained models, to make new ones from them: opened, changed, fitted to data, measured; the attention kernel that
computes them; and what each sub-layer of a new one writes to the residual stream.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from transformers import AutoImageProcessor, BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from headwater import kernels
from headwater.config.layers import layer_config
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion import from_transformers, load_transformers, read_foreign
from headwater.conversion.convert import align, blended, blended_config, finished, finished_state
from headwater.cost.counts import cache_bytes_per_token
from headwater.growth import grow
from headwater.growth.enlarge import carried
from headwater.kernels.varlen import FROM, VARLEN, find_refusal
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.compiling import is_compiled
from headwater.models.image_classification import HeadwaterForImageClassification
from headwater.models.load import check_regular, model_type, reading
from headwater.models.quantization import check_full_precision
from headwater.nn.attention_kernel import supported_kernels
from headwater.nn.block import Block
from headwater.nn.documents import takes_documents
from headwater.nn.patches import resized
from headwater.plugins.outside import check_paths
from headwater.util.errors import HeadwaterError, sentence, shown
from headwater.util.files import local
from headwater.util.seeding import generator
from headwater_lab.data.base import LABELS, Data, main_input
from headwater_lab.data.chat import read_contents
from headwater_lab.data.corpus import TOPICS, read_topics
from headwater_lab.data.images import ImageData
from headwater_lab.data.reading import PACKED, table_kind
from headwater_lab.data.stream import read_documents
from headwater_lab.data.tokenizer import encode_plainly, has_all_tokens
from headwater_lab.data.tokenizer_files import check_vocabulary, find_tokenizer, open_tokenizer
from headwater_lab.recipe.change import Change
from headwater_lab.recipe.data import AnyData
from headwater_lab.recipe.messages import untrusted_in
from headwater_lab.recipe.overrides import MOST_TEXT, read_text
from headwater_lab.recipe.training import Training
from headwater_lab.training.checkpoints import check, history_of, load_model, newest_checkpoint, optimizer_state
from headwater_lab.training.records import Event
from headwater_lab.util.model_kinds import MODEL_TYPES, AnyModel, is_of_images

PROCESSOR = "preprocessor_config.json"
POSITIONS, CLASSIFIER = "model.embed_positions.weight", "classifier."
# Warn about a sub-layer that writes more than this many times the residual stream.
DROWNS = 10.0
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

    def after(self, kind: Any, details: dict[str, Any], **changes: Any) -> Trained:
        """With these changes, and an event of this kind in its history."""
        event = Event(kind=kind, details=details)
        return replace(self, history=[*self.history, event], original=None, **changes)


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
    """The tokenizer of a checkpoint or of a name on the hub; None if it has none. See `find_tokenizer`."""
    if isinstance(source, Path):
        return find_tokenizer(source, vocab_size) if source.is_dir() else None
    try:
        tokenizer = open_tokenizer(source)
    except Exception:  # a model on the hub need not have one
        return None
    check_vocabulary(tokenizer, vocab_size, f"The tokenizer of {source!r}")
    return tokenizer


def changed(trained: Trained, change: Change, rows: Tensor | None = None) -> Trained:
    """Apply a recipe's `grow:`, `convert:` or `finish_conversion:` to a trained model; return it unchanged if there is
    none. rows: of tokens [B, T], on which a conversion measures how alike keys and values are."""
    if change.convert is not None or change.finish_conversion:
        return converted(trained, change, rows)
    if change.grow is None:
        return trained
    arguments, options = change.grow.model_dump(), change.grow.options
    model = grow(trained.model, **arguments)
    learns = all(parameter.requires_grad for version in (trained.model, model) for parameter in version.parameters())
    state = carried(trained.state, trained.model, model, options) if trained.state and learns else {}
    adds_pairs = options.attention_pairs is not None or options.ffn_pairs is not None or not options.sizes
    details = {
        name: value
        for name, value in arguments.items()
        if value is not None and (adds_pairs if name in OF_PAIRS else options.sizes)
    }
    counts = {"from": trained.model.num_parameters(), "to": model.num_parameters()}
    details |= {"parameters": counts}
    return trained.after("grown", details, model=model, state=state)


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
        if goal.align and rows is None:
            raise HeadwaterError(
                "A conversion measures keys and values on rows of the recipe's text; use data of text, or set "
                "convert.align to false."
            )
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
    return trained.after("converted", details | {"cache_bytes_per_token": bytes_}, model=model, state=state)


def data_of(history: list[Event]) -> Data | None:
    """The data a model was last trained on; None if its history names none. Raises `HeadwaterError`, also for data
    that the user does not trust.
    """
    named = data_settings(history)
    if named is None:
        return None
    try:
        settings = TypeAdapter(AnyData).validate_python(named)
    except ValidationError as error:
        if (refused := untrusted_in(error)) is not None:
            raise refused from error
        raise HeadwaterError("The model's history names data that this version does not know; pass --text.") from error
    return settings.build()


def data_settings(history: list[Event]) -> dict[str, Any] | None:
    """The settings of these data, whose paths the user must trust."""
    last = last_training(history)
    data = last.details.get("data") if last is not None else None
    settings = data.get("settings") if isinstance(data, dict) else None
    check_paths(settings)
    return settings if isinstance(settings, dict) else None


def last_training(history: list[Event]) -> Event | None:
    return next((event for event in reversed(history) if event.kind == "trained"), None)


def changed_text(trained: Trained, data: Data) -> str:
    """A warning if the data that a model was last trained on are others now; "" if not, or if that is not known."""
    last = last_training(trained.history)
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
    documents, _ = read_documents(str(text), "text", None)
    return "\n".join(read_contents(one.text) if one.is_chat else one.text for one in documents)


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
            text = "\n".join(document.text for document in islice(read_topics(), 40))
            ids = _rows_of(trained, text, TOPICS, 4, min(128, config.max_position_embeddings))
            if int(ids.max()) < config.vocab_size:
                return ids, f"{ids.numel()} tokens of Python's language reference"
    length = min(64, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    return ids, f"{ids.numel()} random tokens"


def changes_for(
    config: HeadwaterConfig,
    data: Data,
    change: Change,
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None = None,
) -> dict[str, Any]:
    """The fields of a model's config that the data change: vocab_size of a text model, or image_size and id2label.

    tokenizer: the model's. The data's may add tokens to it.

    Classes that only have numbers in the model take the data's
    names. Other names are an error in `check_classes`, unless `change` asks for a new classifier.
    """
    if not isinstance(config, HeadwaterVisionConfig) or not isinstance(data, ImageData):
        grows = data.tokenizer is not None and not is_of_images(config) and data.vocab_size > config.vocab_size
        return {"vocab_size": data.vocab_size} if grows and has_all_tokens(data.tokenizer, tokenizer) else {}
    found: dict[str, Any] = {}
    if config.image_shape != data.settings.size:
        found["image_size"] = list(data.settings.size)
    names = names_of(config)
    unnamed = names == [f"LABEL_{number}" for number in range(len(names))]
    if change.new_classifier:
        found["id2label"] = dict(enumerate(data.classes))
    elif unnamed and len(data.classes) <= len(names):
        found["id2label"] = dict(enumerate([*data.classes, *names[len(data.classes) :]]))
    return found


def refitted(trained: Trained, data: Data, change: Change) -> Trained:
    """The model with what `changes_for` says; unchanged if that is nothing. Raises `HeadwaterError`."""
    model = trained.model
    changes = changes_for(model.config, data, change, trained.tokenizer)
    if "vocab_size" in changes:
        return with_more_tokens(trained, data)
    if not changes or not isinstance(model, HeadwaterForImageClassification):
        return trained
    config, old = _refitted_config(model.config, changes), model.config.grid
    made = HeadwaterForImageClassification(config).to(model.dtype)
    weights = model.state_dict()
    if POSITIONS in weights:
        weights[POSITIONS] = resized(weights[POSITIONS].float(), old, config.grid)
    if change.new_classifier:
        weights |= {name: tensor for name, tensor in made.state_dict().items() if name.startswith(CLASSIFIER)}
    made.load_state_dict(weights)
    interpolated = POSITIONS in weights and config.grid != old
    if trained.state and (change.new_classifier or interpolated):
        raise HeadwaterError(
            "start.optimizer_state=keep has no state for a new classifier or for interpolated positions; use "
            "start.optimizer_state=fresh, or data of the checkpoint's classes and size."
        )
    details: dict[str, Any] = {
        name: {"image_size": list(each.image_shape), "classes": each.num_labels}
        for name, each in (("from", model.config), ("to", config))
    }
    details |= {"new_classifier": change.new_classifier, "interpolated": interpolated}
    return trained.after("refitted", details, model=made.eval())


def _refitted_config(old: HeadwaterVisionConfig, changes: dict[str, Any]) -> HeadwaterVisionConfig:
    config = copy.deepcopy(old)
    if (labels := changes.get("id2label")) is not None:
        config.num_labels, config.id2label = len(labels), labels
        config.label2id = {name: number for number, name in labels.items()}
    if "image_size" in changes:
        config.image_size = changes["image_size"]
        config.complete_fields()
    return config


def with_more_tokens(trained: Trained, data: Data) -> Trained:
    """A text model with the data's tokenizer. Raises `HeadwaterError` if the optimizer's state is to be kept."""
    if trained.state:
        raise HeadwaterError(
            "start.optimizer_state=keep has no state for new tokens; use start.optimizer_state=fresh, or data with the "
            "checkpoint's tokenizer."
        )
    model, old = trained.model, trained.model.config.vocab_size
    with torch.random.fork_rng(devices=[]):  # transformers draws the embedding's new rows
        torch.manual_seed(model.config.initializer_seed)
        model.resize_token_embeddings(data.vocab_size)
    details = {"from": {"vocab_size": old}, "to": {"vocab_size": data.vocab_size}}
    return trained.after("refitted", details, tokenizer=data.tokenizer)


def refitting(event: Event) -> str:
    """What `refitted` has done, in a sentence."""
    old, new = event.details["from"], event.details["to"]
    said = [f"{name} {new[name]} in place of {old[name]}" for name in new if new[name] != old[name]]
    said += ["learned positions interpolated"] if event.details.get("interpolated") else []
    said += ["a new classifier"] if event.details.get("new_classifier") else []
    return f"The model was fitted to the data: {', '.join(said) or 'its classes have their names'}."


def check_classes(config: HeadwaterVisionConfig, data: ImageData) -> None:
    """Raises `HeadwaterError` unless the model's first classes are the data's, by name."""
    names = names_of(config)
    if names[: len(data.classes)] == data.classes:
        return
    pairs = zip(names, data.classes, strict=False)
    number = next((number for number, (one, other) in enumerate(pairs) if one != other), len(names))
    model = names[number] if number < len(names) else "none"
    own = data.classes[number]
    raise HeadwaterError(
        f"The checkpoint has {len(names)} classes and the data {len(data.classes)}, and they differ: class {number} is "
        f"{shown(model)} in the checkpoint and {shown(own)} in the data; set start.new_classifier=true to train a new "
        "classifier for the data's."
    )


def names_of(config: HeadwaterVisionConfig) -> list[str]:
    """The names of the model's classes, in order."""
    return [str(config.id2label[number]) for number in range(config.num_labels)]


def attention_of(config: HeadwaterConfig, training: Training, device: torch.device, context: int) -> str | None:
    """The kernel that the recipe names; else varlen if packed rows of `context` tokens are faster with it; else None.

    Not decided by timing, since a run's bits depend on it. Raises `HeadwaterError` if varlen is named and cannot run.
    """
    found = kernel_for(config, training, device.type, context)
    if found == VARLEN and training.attn_implementation is None and device.type == "cuda":
        return VARLEN if torch.cuda.get_device_capability(device) >= (8, 0) else None  # FlashAttention needs Ampere
    return found


def kernel_for(config: HeadwaterConfig, training: Training, device: str, context: int) -> str | None:
    """The same for a kind of device, whose capability suffices."""
    named, refusal = training.attn_implementation, _refuse_varlen(config, training, torch.device(device))
    if named == VARLEN and refusal is not None:
        raise HeadwaterError(f"training.attn_implementation: {VARLEN} {refusal}; leave it out.")
    if named is not None or refusal is not None or kernels.are_disabled():
        return named
    possible, _ = supported_kernels(config)
    return VARLEN if (possible is None or VARLEN in possible) and (device != "cpu" or context >= FROM) else None


def _refuse_varlen(config: HeadwaterConfig, training: Training, device: torch.device) -> str | None:
    """Why attention varlen cannot compute the rows of a model; None if it can."""
    if is_of_images(config):
        return "is for rows of documents"
    widths = [layer_config(config, layer).head_dim or 0 for layer in config.kinds.values()]
    dtype, dropout = training.precision.compute, config.attention_dropout
    refusals = (find_refusal(device, dtype, dropout, width) for width in widths)
    return next((refusal for refusal in refusals if refusal is not None), None)


def step_settings(config: HeadwaterConfig, training: Training, data: Any, attention: str | None) -> dict[str, Any]:
    """What the memory of a step depends on besides its rows, as `headwater.cost.price` takes it. data: a recipe's."""
    settings = {"gradient_checkpointing": training.gradient_checkpointing, "averages": training.ema_decay is not None}
    if isinstance(config, HeadwaterVisionConfig):
        return settings
    unmasked = takes_documents(attention) or attention == "flex_attention"
    masked = getattr(data, "row_layout", "") == "packed" and not unmasked
    return settings | {"loss_chunk_tokens": training.loss_chunk_tokens, "masked": masked}


def set_attention(model: AnyModel, name: str) -> None:
    """Raise `HeadwaterError` if the kernel is not installed, or does not support the model."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise HeadwaterError(f"training.attn_implementation: {sentence(error)}") from error


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

    A sub-layer whose output is much larger than the residual stream drowns the token before training begins. Pattention
    does that if the embedding is initialized small, since the size of its output does not depend on that of its input.

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
