"""Export of plain Llamas as GGUF, the one-file format of llama.cpp.

Weights keep their precision, norms and biases are float32, as llama.cpp expects. The format is that of docs/gguf.md in
github.com/ggml-org/ggml. Names, the order of rows and the names of tokenizers are those of llama.cpp's
convert_hf_to_gguf.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from headwater.conversion.latent import expand_latent
from headwater.conversion.transformers_models import to_transformers
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater.util.files import replace_file

_CONVERTER = "export it with --family, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
_TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
# RoPE whose angles are fixed, so that factors of its frequencies describe it.
_ROPE_TYPES = ("default", "linear", "llama3")
_LLAMA3_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# How a tokenizer splits text into words -> llama.cpp's name for it.
_SPLITS = {
    ("words",): "gpt-2",
    ("digits", "words"): "smollm",
    (_LLAMA3_WORDS,): "llama-bpe",
    (_LLAMA3_WORDS.replace("{1,3}", ""),): "qwen2",
}


def write_gguf(model: HeadwaterForCausalLM, file: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write `model` with its tokenizer as a GGUF file, which appears only when complete.

    Keys and values that are made from a latent (`low_rank_kv`) become ordinary ones.
    Raises `HeadwaterError` for what llama.cpp's Llama lacks: mechanisms, other families' features, RoPE whose angles
    follow the length, and tokenizers that split text in other ways than GPT-2's, SmolLM's, Llama 3's and Qwen's.
    """
    llama = to_transformers(expand_latent(model), "llama")
    if llama.dtype not in _TYPES:
        raise HeadwaterError(
            f"A GGUF file has no {llama.dtype} weights; convert the model to float32 or bfloat16 first."
        )
    if llama.config.hidden_act not in ("silu", "swish"):
        raise HeadwaterError(
            f"llama.cpp's Llama has SiLU, not hidden_act={llama.config.hidden_act!r}; export a folder."
        )
    writer = gguf.GGUFWriter(None, "llama")
    _add_sizes(writer, llama.config, file.stem)
    writer.add_file_type(_TYPES[llama.dtype][1])
    _add_tokenizer(writer, tokenizer, llama.config.vocab_size)
    for name, tensor in _name_tensors(llama):
        data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=_TYPES[tensor.dtype][0])
    with replace_file(file) as staging:
        writer.write_header_to_file(staging)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: LlamaConfig, name: str) -> None:
    writer.add_name(name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _name_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a Llama under llama.cpp's names, as it wants them."""
    config: LlamaConfig = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".q_proj." in key or ".k_proj." in key:  # llama.cpp rotates neighbours, transformers the halves of a head
            tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        module, _, kind = key.rpartition(".")
        yield f"{names[module]}.{kind}", tensor if tensor.ndim > 1 else tensor.float()
    if (factors := _rope_factors(model)) is not None:
        yield "rope_freqs.weight", factors


def _rope_factors(model: PreTrainedModel) -> Tensor | None:
    """Return the factors [d/2] by which RoPE's frequencies are divided; None: they are not scaled."""
    rope = model.config.rope_parameters
    if (kind := rope.get("rope_type", "default")) not in _ROPE_TYPES:
        raise HeadwaterError(f"RoPE of the type {kind!r} cannot be written as GGUF; {_CONVERTER}.")
    if kind == "default":
        return None
    d = model.config.head_dim
    plain = rope["rope_theta"] ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    return (plain / model.model.rotary_emb.inv_freq.double().cpu()).float()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
    """Add a byte-level BPE tokenizer: its tokens, merges, special tokens and chat template."""
    if tokenizer is None:
        raise HeadwaterError("A GGUF file needs a tokenizer, but this checkpoint has none; put its files next to it.")
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(tokens) >= vocab_size:
        raise HeadwaterError(f"The tokenizer has token {max(tokens)}, but the model only {vocab_size} tokens.")
    with TemporaryDirectory(prefix="headwater-") as folder:
        tokenizer.save_pretrained(folder)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    if not special.merges:
        raise HeadwaterError(
            "llama.cpp needs a BPE tokenizer with merges, and this one has none; train the model with another."
        )
    ids, plain = (tokenizer("a", add_special_tokens=adds).input_ids for adds in (True, False))
    if ids[0] != plain[0]:
        special.special_token_ids["bos"] = ids[0]
    special.add_special_token |= {"bos": ids[0] != plain[0], "eos": ids[-1] != plain[-1]}
    kinds = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for index, token in tokenizer.added_tokens_decoder.items():
        kinds[index] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_name_split(tokenizer))
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types([kinds.get(index, gguf.TokenType.UNUSED) for index in range(vocab_size)])
    special.add_to_gguf(writer, quiet=True)


def _name_split(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return llama.cpp's name for the way in which a tokenizer splits text into words."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    model, step = state["model"], state.get("pre_tokenizer") or {}
    steps = tuple(_describe_split(part) for part in step.get("pretokenizers", [step]))
    name = _SPLITS.get(tuple(filter(None, steps)))
    normalizer = {"type": "NFC"} if name == "qwen2" else None  # llama.cpp leaves it out for all models
    odd = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if (
        name is None
        or model.get("type") != "BPE"
        or any(model.get(field) for field in odd)
        or bool(model.get("ignore_merges")) != (name == "llama-bpe")
        or state.get("normalizer") not in (None, normalizer)
    ):
        raise HeadwaterError(f"headwater cannot write this model's tokenizer as GGUF; {_CONVERTER}.")
    return name


def _describe_split(step: dict[str, Any]) -> str:
    """Describe a step of a tokenizer's splitting: what it splits at, or "" if it only spells bytes."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": has_words}:
            return "words" if has_words else ""
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return str(regex)
    return "other"
