"""The card of a model: what is known of it, in the form that the Hugging Face hub shows (README.md)."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from transformers import PreTrainedModel

from headwater.config.auto_map import auto_class_of
from headwater.config.text import HeadwaterConfig
from headwater.plugins.mechanisms import resolve
from headwater.util.layout import IS_EXPORTED

if not IS_EXPORTED:  # the counts would bring more files into a checkpoint than the line is worth
    from headwater.cost.counts import cache_bytes_per_token

CARD = "README.md"
# Auto class -> the task as the hub names it, and in words.
_TASKS = {
    "AutoModel": ("feature-extraction", "A model without a head"),
    "AutoModelForCausalLM": ("text-generation", "A language model"),
    "AutoModelForImageClassification": ("image-classification", "An image classifier"),
}


def make_card(
    model: PreTrainedModel,
    name: str,
    sections: Iterable[tuple[str, str]] = (),
    tags: Iterable[str] = (),
    has_preparer: bool = False,
    origin: PreTrainedModel | None = None,
    **metadata: Any,
) -> ModelCard:
    """Make the card of a headwater model, or of one of transformers' own. Nothing unknown is in it.

    name: of its repository or folder. sections: (title, Markdown), such as its training. tags: further ones.
    has_preparer: whether its tokenizer or image processor is there too. origin: the headwater model that was written as
    `model`, of another family; its config says more. metadata: further fields of `ModelCardData`,
    without those that are None.
    """
    of_images = model.main_input_name == "pixel_values"
    loader = auto_class_of(type(model)) or f"AutoModelFor{'ImageClassification' if of_images else 'CausalLM'}"
    task, kind = _TASKS[loader]
    mechanisms = getattr(model.config, "mechanisms", None) or {}
    names = (mechanism.replace("_", "-") for mechanism in mechanisms if ":" not in mechanism)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=list(dict.fromkeys(["headwater", *names, *tags])),
        **{field: value for field, value in metadata.items() if value},
    )
    classes = {"model": loader}
    if has_preparer:
        classes |= {"processor": "AutoImageProcessor"} if of_images else {"tokenizer": "AutoTokenizer"}
    parts = [
        ("Load it", _write_loading(model, name, classes)),
        *sections,
        ("Limits", "\n".join(f"- {limit}" for limit in _list_limits(model))),
    ]
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in parts if text)
    facts = "\n".join(f"- {fact}." for fact in _list_facts(origin or model, mechanisms))
    return ModelCard(f"---\n{data}\n---\n\n# {name}\n\n{kind} written by headwater.\n\n{facts}\n\n{body}\n")


def _write_loading(model: PreTrainedModel, name: str, classes: dict[str, str]) -> str:
    """Write the code that loads these variables with these Auto classes."""
    arguments = f'"{name}"' + (", trust_remote_code=True" if _has_code(model) else "")
    calls = "\n".join(f"{variable} = {cls}.from_pretrained({arguments})" for variable, cls in classes.items())
    return f"```python\nfrom transformers import {', '.join(sorted(classes.values()))}\n\n{calls}\n```"


def _has_code(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config, "auto_map", None))


def _list_facts(model: PreTrainedModel, mechanisms: dict[str, Any]) -> Iterator[str]:
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    yield f"{model.num_parameters():,} parameters, {dtype}"
    if not isinstance(config, HeadwaterConfig):
        return
    heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} key/value heads"
    yield f"{config.num_hidden_layers} layers of width {config.hidden_size}, {heads}"
    for mechanism, options in mechanisms.items():
        yield _describe_mechanism(mechanism, options)
    if config.is_causal and not IS_EXPORTED:
        yield f"Cache: {cache_bytes_per_token(config, model.dtype.itemsize):,} bytes a token in {dtype}"


def _list_limits(model: PreTrainedModel) -> Iterator[str]:
    if _has_code(model):
        yield "Loading runs the Python files of this repository. Read them first, and pin a `revision`."
    if positions := getattr(model.config, "max_position_embeddings", None):
        yield f"It has positions for {positions:,} tokens."


def replace_template(
    folder: str | os.PathLike[str], model: PreTrainedModel, name: str, token: bool | str | None = None
) -> None:
    """Write the model's card over transformers' template in a folder, whose tags stay, if it is to be uploaded to a
    repository that has no card yet."""
    file = Path(folder) / CARD
    if not HfApi().file_exists(name, CARD, token=token):
        tags = ModelCard.load(file).data.tags or ()
        file.write_text(str(make_card(model, name, tags=tags)), encoding="utf-8")


def _describe_mechanism(name: str, options: dict[str, Any]) -> str:
    """Say in one line what a mechanism reads, its paper and the options that differ from their defaults."""
    mechanism = resolve(name)
    defaults = vars(mechanism.Options())
    changed = [f"{field} = {value}" for field, value in (options or {}).items() if value != defaults.get(field)]
    paper = f" (arXiv {mechanism.paper})" if mechanism.paper else ""
    return f"`{name}`{paper} reads {mechanism.source}" + (f"; {', '.join(changed)}" if changed else "")
