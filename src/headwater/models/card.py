"""The card of a model: what is known of it, in the form that the Hugging Face hub shows (README.md)."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from headwater.config.text import HeadwaterConfig
from headwater.cost.counts import cache_bytes_per_token
from headwater.plugins.registry import resolve

CARD = "README.md"


def make_card(
    model: PreTrainedModel, name: str, sections: Iterable[tuple[str, str]] = (), **metadata: Any
) -> ModelCard:
    """Make the card of a headwater model, or of one of transformers' own. Nothing unknown is in it.

    name: of its repository or folder. sections: (title, Markdown), such as its training. metadata: further fields of
    `ModelCardData`, without those that are None.
    """
    of_images = "Image" in type(model).__name__
    mechanisms = getattr(model.config, "mechanisms", None) or {}
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-classification" if of_images else "text-generation",
        tags=["headwater", *(mechanism.replace("_", "-") for mechanism in mechanisms if ":" not in mechanism)],
        **{field: value for field, value in metadata.items() if value},
    )
    loader = f"AutoModelFor{'ImageClassification' if of_images else 'CausalLM'}"
    arguments = f'"{name}", trust_remote_code=True' if _is_ours(model) else f'"{name}"'
    code = f"from transformers import {loader}\n\nmodel = {loader}.from_pretrained({arguments})"
    parts = [
        ("Load it", f"```python\n{code}\n```"),
        *sections,
        ("Limits", "\n".join(f"- {limit}" for limit in _list_limits(model))),
    ]
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in parts if text)
    kind = "An image classifier" if of_images else "A language model"
    facts = "\n".join(f"- {fact}." for fact in _list_facts(model, mechanisms))
    return ModelCard(f"---\n{data}\n---\n\n# {name}\n\n{kind} written by headwater.\n\n{facts}\n\n{body}\n")


def _is_ours(model: PreTrainedModel) -> bool:
    return isinstance(model.config, HeadwaterConfig)


def _list_facts(model: PreTrainedModel, mechanisms: dict[str, Any]) -> Iterator[str]:
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    yield f"{model.num_parameters():,} parameters, {dtype}"
    if not _is_ours(model):
        return
    heads = f"{config.num_attention_heads} query heads and {config.num_key_value_heads} key/value heads"
    yield f"{config.num_hidden_layers} layers of width {config.hidden_size}, {heads}"
    for mechanism, options in mechanisms.items():
        yield _describe_mechanism(mechanism, options)
    if config.is_causal:
        yield f"Cache: {cache_bytes_per_token(config, model.dtype.itemsize):,} bytes a token in {dtype}"


def _list_limits(model: PreTrainedModel) -> Iterator[str]:
    if _is_ours(model):
        yield "Loading runs the Python files of this repository. Read them first, and pin a `revision`."
    if positions := getattr(model.config, "max_position_embeddings", None):
        yield f"It has positions for {positions:,} tokens."


def replace_template(folder: str | os.PathLike[str], model: PreTrainedModel, name: str) -> None:
    """Write the model's card over the one of transformers' template; a card that somebody wrote stays."""
    file = Path(folder) / CARD
    if file.is_file() and "[More Information Needed]" in file.read_text(encoding="utf-8"):
        file.write_text(str(make_card(model, name)), encoding="utf-8")


def _describe_mechanism(name: str, options: dict[str, Any]) -> str:
    """Say in one line what a mechanism reads, its paper and the options that differ from their defaults."""
    mechanism = resolve(name)
    defaults = vars(mechanism.Options())
    changed = [f"{field} = {value}" for field, value in (options or {}).items() if value != defaults.get(field)]
    paper = f" (arXiv {mechanism.paper})" if mechanism.paper else ""
    return f"`{name}`{paper} reads {mechanism.source}" + (f"; {', '.join(changed)}" if changed else "")
