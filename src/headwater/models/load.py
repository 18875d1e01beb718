"""Read users' files: JSON, tensors, configs, models. Any problem in a file raises one `HeadwaterError`.

Files are found by name, never by listing a folder. No code stored in a file is run.
"""

import dataclasses
import json
import os
import pickle
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import CHAT_TEMPLATE_DIR

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.models.weights import check_dtypes, list_dtypes, strip_wrappers
from headwater.plugins.trust import check_link
from headwater.util.errors import HeadwaterError, sentence, shown
from headwater.util.files import explain_absence, read_bytes

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
PICKLED = "pytorch_model.bin"
# Shards, one per process of a run.
SHARDS = "shard-*.safetensors"
_LAYERS = ("num_hidden_layers", "n_layer")
# Fields that a config.json may set although its config class does not declare them.
_SETTABLE = {
    *("model_type", "name_or_path", "num_labels", "output_attentions", "per_layer_config", "rope_scaling"),
    *("torch_dtype", "use_return_dict"),
}
_KERNEL = "_attn_implementation"
# Names under which transformers looks for configs of a model's parts.
_COMPOSITE = ("decoder", "generator", "text_config", "text_encoder", "attn_implementation")
_LONGEST = 200
_MOST_LABELS = 10**6
# Names of files that some library reads as part of a model or tokenizer.
OPENED = re.compile(r".*\.(safetensors|json|bin|pth?|ckpt|model|jinja|py)|vocab\.txt|merges\.txt|" + CHAT_TEMPLATE_DIR)


@contextmanager
def reading(name: str, advice: str = "use an intact one") -> Iterator[None]:
    """Turn any error of the libraries that read files into one sentence: "`name` cannot be read: …"."""
    try:
        yield
    except HeadwaterError:
        raise
    except BaseException as error:
        # Panics of Rust libraries are not Exceptions.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ImportError):  # a package that transformers asks for
            advice = "install it"
        raise HeadwaterError(f"{name} cannot be read: {describe_reason(error)}; {advice}.") from error


def describe_reason(error: BaseException) -> str:
    """Reason why something could not be read: an error's message in one line, without its full stop."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return "it contains more than tensors, and reading it would run code"
    if isinstance(error, KeyError):
        name = error.args[0] if error.args else None
        return f"it has no {name!r}" if isinstance(name, str) else "it is damaged, or another kind of file"
    message = (sentence(error) or type(error).__name__).rstrip(".:;")
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]} …"


def read_text(file: Path) -> str:
    """Read a UTF-8 text file. Raises `HeadwaterError` if there is none."""
    if not file.is_file():
        raise HeadwaterError(f"{explain_absence(file, 'file')}; use an intact checkpoint.")
    with reading(repr(str(file))):
        return read_bytes(file).decode("utf-8-sig")


def check_regular(folder: Path) -> None:
    """Raise `HeadwaterError` if what libraries open in a folder is a pipe, a device, or a link that leads nowhere: they
    would wait or read for ever. The same for a link to a file that the user does not trust, because its content would
    be copied.
    """
    with reading(repr(str(folder))):
        paths = sorted(path for path in folder.iterdir() if OPENED.fullmatch(path.name))
        paths += sorted((folder / CHAT_TEMPLATE_DIR).glob("*.jinja"))
        for path in paths:
            if not path.is_file() and not path.is_dir():
                raise HeadwaterError(f"{str(path)!r} is not a file; use an intact checkpoint.")
            check_link(path, path.parent)


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises `HeadwaterError`."""
    with reading(repr(str(file))):
        return json.loads(read_text(file))


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `HeadwaterError` for any other content."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise HeadwaterError(f"{str(file)!r} does not contain a JSON object; use an intact checkpoint.")
    return content


def model_type(folder: Path) -> str | None:
    """The model_type in a folder's config.json; None if there is none. Raises `HeadwaterError`."""
    if not os.path.lexists(folder / CONFIG):
        return None
    kind = read_object(folder / CONFIG).get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise HeadwaterError(f"The model_type in {str(folder / CONFIG)!r} is not a name; use an intact checkpoint.")
    return kind


def read_config(folder: Path) -> HeadwaterConfig:
    """The config of a headwater checkpoint, of text or images. Raises `HeadwaterError`."""
    of_images = model_type(folder) == HeadwaterVisionConfig.model_type
    return config_from(HeadwaterVisionConfig if of_images else HeadwaterConfig, folder)


def _write_merge(folder: Path) -> str:
    """Write the command that merges a PEFT adapter into its base model and saves it, with the tokenizer, beside it."""
    source = read_object(folder / "adapter_config.json").get("base_model_name_or_path") or "BASE MODEL"
    base, adapter, merged = (json.dumps(name, ensure_ascii=False) for name in (source, str(folder), f"{folder}-merged"))
    code = (
        "import headwater, peft, transformers as t; "
        f"m = peft.PeftModel.from_pretrained(t.AutoModelForCausalLM.from_pretrained({base}), {adapter}); "
        f"m.merge_and_unload().save_pretrained({merged}); "
        f"t.AutoTokenizer.from_pretrained({base}).save_pretrained({merged})"
    )
    return f"python -c {shlex.quote(code)}"


def check_config(folder: Path) -> None:
    """Raise `HeadwaterError` for a folder without a config.json."""
    if (folder / "adapter_config.json").is_file() and not (folder / CONFIG).is_file():
        raise HeadwaterError(
            f"{str(folder)!r} is an adapter, not a model; merge the adapter first: {_write_merge(folder)}"
        )
    if not os.path.lexists(folder / CONFIG):
        raise HeadwaterError(f"{str(folder)!r} is not a checkpoint: it has no {CONFIG}.")


def config_from(kind: type[PreTrainedConfig], folder: Path) -> Any:
    """The config.json of a folder as a config of class `kind`. Raises `HeadwaterError`."""
    check_config(folder)
    check_layers(folder)
    file = folder / CONFIG
    content = read_object(file)
    check_names(kind, content, file)
    with reading(f"The {CONFIG} in {str(folder)!r}", "correct it, or use an intact checkpoint"):
        config = kind.from_dict(content)
        if isinstance(config, HeadwaterConfig):
            plan_layers(config)
        config.return_dict = True  # the other fields matter only to direct callers of the model
        return config


def check_names(kind: type[PreTrainedConfig], content: Mapping[str, Any], file: Path) -> None:
    """Raise `HeadwaterError` for a name that would replace a part of the config's class, or name a model's parts."""
    is_own = issubclass(kind, HeadwaterConfig)
    fields = {field.name for field in dataclasses.fields(kind)} | _SETTABLE | (set() if is_own else {_KERNEL})
    for name in content:
        composite = is_own and name in _COMPOSITE
        if composite or (name not in fields and hasattr(kind if is_own else PreTrainedConfig, name)):
            raise HeadwaterError(f"{str(file)!r} sets {shown(name)}, which is not a field of a model; remove it.")


def check_layers(folder: Path) -> None:
    """Raise `HeadwaterError` for more layers than weights, or endless labels: transformers lists both one by one."""
    check_regular(folder)
    content = read_object(folder / CONFIG)
    for name in (_KERNEL, "attn_implementation"):
        if "/" in str(content.get(name)):
            raise HeadwaterError(
                f"{str(folder / CONFIG)!r} names a kernel on the hub, {shown(content[name])}: code that is not run; "
                f"remove {name}."
            )
    if isinstance(labels := content.get("num_labels"), int) and labels > _MOST_LABELS:
        raise HeadwaterError(f"{str(folder / CONFIG)!r} sets num_labels to {labels}; correct it.")
    layers = next((content[name] for name in _LAYERS if name in content), None)
    if isinstance(layers, int) and layers > max(1000, (tensors := sum(map(len, _list_tensor_names(folder))))):
        raise HeadwaterError(
            f"{str(folder / CONFIG)!r} describes {layers} layers, but the weights have only {tensors} tensors; correct "
            "it."
        )


def check_size(skeleton: PreTrainedModel, stored: int, folder: Path) -> None:
    """Raise `HeadwaterError` if a model needs far more numbers than are `stored`."""
    needed = sum(parameter.numel() for parameter in skeleton.parameters())
    if needed > 2 * stored:  # smaller mismatches appear in transformers' own list, by tensor
        raise HeadwaterError(
            f"The weights in {str(folder)!r} do not match its {CONFIG}: it needs {needed:,} numbers, but there are "
            f"at most {stored:,}; use an intact checkpoint with its own config."
        )


# Weights


def weight_files(folder: Path, pickled: bool = False) -> list[Path]:
    """Find the files of a folder's weights: model.safetensors, the shards in its index, or processes' shards.

    pickled: also accept pytorch_model.bin or its index; `read_weights` runs no code from them.
    Raises `HeadwaterError` if there are none, and for an index that names files outside the folder.
    """
    kinds = (WEIGHTS, PICKLED) if pickled else (WEIGHTS,)
    for name in kinds:
        if (folder / name).is_file():
            return [folder / name]
        if os.path.lexists(folder / f"{name}.index.json"):
            return list_shards(folder / f"{name}.index.json")
    if shards := sorted(folder.glob(SHARDS)):
        return shards
    if any(os.path.lexists(folder / f"{PICKLED}{ending}") for ending in ("", ".index.json")):
        raise HeadwaterError(
            f"The weights in {str(folder)!r} are a pickle, {PICKLED}, which only `headwater retrofit` reads; convert "
            f"them with it, or with transformers' save_pretrained."
        )
    raise HeadwaterError(f"{str(folder)!r} has no weights ({WEIGHTS}); use an intact checkpoint.")


def list_shards(index: Path) -> list[Path]:
    """List the shards that an index names. Raises `HeadwaterError` unless all are in its folder."""
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise HeadwaterError(f"{str(index)!r} is not an index of shards; use an intact checkpoint.")
    files = []
    for name in sorted(set(shards.values())):
        with reading(repr(str(index))):
            beside = re.search(r"[/\\\0]", name) is None and (index.parent / name).is_file()
        if not beside:
            raise HeadwaterError(
                f"{str(index)!r} names a shard {name!r} that is not in its folder; use an intact checkpoint."
            )
        files.append(index.parent / name)
    return files


def read_weights(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of these files by name. Raises `HeadwaterError`, also for weights that are not finite tensors."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_tensors(file).items():
            if name in tensors:
                raise HeadwaterError(
                    f"Tensor {name!r} is in {str(file)!r} for a second time; use an intact checkpoint."
                )
            tensors[name] = tensor
    return tensors


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file by name, safetensors or what `torch.load(weights_only=True)` reads, alone or under
    "module", "state_dict" or "model". Raises `HeadwaterError`.
    """
    if not file.is_file():
        raise HeadwaterError(f"{explain_absence(file, 'file')}; use an intact checkpoint.")
    with reading(repr(str(file)), "use an intact checkpoint, with its weights as safetensors"):
        with file.open("rb") as stream:
            if stream.read(4) == b"GGUF":
                raise HeadwaterError(
                    f"{str(file)!r} is a GGUF file, which is not supported; use the safetensors it was made from."
                )
        if file.suffix == ".safetensors":
            return load_file(file)
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    for name in ("module", "state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise HeadwaterError(f"{str(file)!r} contains no named tensors; save a state dict.")
    for name, tensor in content.items():
        if not _is_weight(tensor):
            raise HeadwaterError(f"{name!r} in {str(file)!r} is not a weight tensor; save only the weights.")
    return dict(content)


def _is_weight(tensor: Any) -> bool:
    """Whether it is a plain tensor. A tensor that repeats one number may claim terabytes."""
    plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return bool(plain and not tensor.is_quantized and tensor.untyped_storage().nbytes() >= tensor.nbytes)


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise `HeadwaterError` naming the first weight that is not finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            wide = tensor if tensor.itemsize > 1 else tensor.float()  # 8-bit dtypes have no isfinite
            if not bool(wide.isfinite().all()):
                raise HeadwaterError(
                    f"The weights in {where} are not all finite: {name!r} contains NaN or infinity; use an earlier "
                    f"checkpoint."
                )


def build_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, tensors: dict[str, Tensor], folder: Path
) -> tuple[Any, dict[str, Any]]:
    """Build (a model of class `kind` with these tensors, whose memory it may use; transformers' list of mismatches).

    Raises `HeadwaterError`, before allocating memory, for tensors that are not weights, or too few.
    """
    with reading(f"The checkpoint {str(folder)!r}", "use an intact checkpoint"):
        with torch.device("meta"), no_init_weights():
            skeleton = kind(config)
            skeleton.tie_weights()
        tensors = strip_wrappers(tensors, repr(str(folder)), skeleton.state_dict())
        if getattr(config, "quantization_config", None) is None:
            check_dtypes(list_dtypes(tensors), repr(str(folder)), skeleton)
        check_size(skeleton, sum(tensor.numel() for tensor in tensors.values()), folder)
        model, mismatches = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are in the list that this returns
        )
    model.name_or_path = model.config.name_or_path = str(folder)
    read_generation_config(model, folder)
    return model, mismatches


def read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the stop tokens and sampling settings in a folder, if there are any. Raises `HeadwaterError`."""
    if os.path.lexists(file := folder / GENERATION):
        read_object(file)
        with reading(repr(str(file)), "correct it, or remove it"):
            model.generation_config = GenerationConfig.from_pretrained(folder)


def _list_tensor_names(folder: Path) -> Iterator[list[str]]:
    """List the names of the tensors in each file of weights, if they can be found without reading the whole file."""
    for file in weight_files(folder, pickled=True):
        if file.suffix == ".safetensors":
            with reading(repr(str(file)), "use an intact checkpoint"), safe_open(file, framework="pt") as opened:
                yield list(opened.keys())
