"""Read tokenizers from folders and files, as `headwater.models.load` reads models: without running their code."""

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headwater.models.load import CONFIG, check_regular, read_object, read_text, reading
from headwater.util.errors import HeadwaterError, shown
from headwater_lab.util.deadline import within

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
# The most that a tokenizer may take to be loaded and tried.
SECONDS = 120.0
_TRIED = "A use of a tokenizer, since some errors in its files show only then."


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has any of the files a tokenizer is read from."""
    return any(os.path.lexists(folder / name) for name in FILES)


# Tokens that end a text, and tokens that end a message, which are used if there is none of the former.
TEXT_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|endofsentence|>", "<eos>", "[EOS]")
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|eom_id|>", "<|return|>")


def list_turn_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the tokens that end a message in the tokenizer's chat template."""
    template = str(tokenizer.chat_template or "")
    return [
        id
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.content in TURN_ENDS and token.content in template
    ]


def local_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder or a tokenizer.json, without running its code. Can raise anything if damaged."""
    described = ("tokenizer_config.json", "special_tokens_map.json")
    has_description = any(os.path.lexists(path / name) for name in described)
    is_bare = path.is_file() or ((path / "tokenizer.json").is_file() and not has_description)
    if is_bare and not (path / CONFIG).is_file():
        return bare_tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    if is_bare and tokenizer.eos_token is None and tokenizer.bos_token is None:  # the type of the model names neither
        return bare_tokenizer(path)
    return tokenizer


def bare_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer in a tokenizer.json, or in a folder with one, with the end of text among its special tokens.

    A chat_template.jinja next to it is its chat template. Raises `HeadwaterError` if it cannot be read, and if several
    of its tokens could end a text.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    with reading(f"The tokenizer {str(file)!r}", "name a tokenizer.json, or its folder"):
        read = Tokenizer.from_str(read_text(file))
    special = {token.content for token in read.get_added_tokens_decoder().values() if token.special}
    texts, turns = ([end for end in ends if end in special] for ends in (TEXT_ENDS, TURN_ENDS))
    ends = texts or turns
    if len(ends) > 1:
        raise HeadwaterError(
            f"The tokenizer {str(file)!r} has several tokens that could end a text, {' and '.join(ends)}; say which in "
            f'a tokenizer_config.json next to it: {{"eos_token": "{ends[0]}"}}.'
        )
    unknown = getattr(read.model, "unk_token", None)
    names = {"eos_token": ends[0] if ends else None, "unk_token": unknown}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=read,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in names.items() if token},
    )
    if (template := file.with_name("chat_template.jinja")).is_file():
        tokenizer.chat_template = read_text(template)
    return tokenizer


def find_tokenizer(folder: Path, vocab_size: int | None = None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder; None if there is none.

    vocab_size: the number of tokens that the model knows. Raises `HeadwaterError` if the tokenizer cannot be read,
    needs its own code, or produces tokens that the model does not know.
    """
    if not has_tokenizer(folder):
        return None
    where = f"The tokenizer in {str(folder)!r}"
    with reading(where, "replace or remove its files"):
        try:
            tokenizer = open_tokenizer(folder)
        except ValueError as error:
            if "trust_remote_code" in str(error):
                raise HeadwaterError(
                    f"{where} cannot be read: it needs its own code, which is not run; replace or remove its files."
                ) from error
            raise
        check_vocabulary(tokenizer, vocab_size, where)
    return tokenizer


def open_tokenizer(source: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, of a tokenizer.json, or of a name on the hub, and test it on a sentence.

    Raises `HeadwaterError` for irregular files and a lack of time, and otherwise what the libraries raise.
    """
    if isinstance(source, Path) and source.is_dir():
        check_regular(source)
        _check_names(source / "tokenizer_config.json")

    def load() -> PreTrainedTokenizerBase:
        if isinstance(source, Path):
            tokenizer = local_tokenizer(source)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        tokenizer.decode(tokenizer(_TRIED, add_special_tokens=False).input_ids)
        return tokenizer

    problem = f"The tokenizer in {str(source)!r} needs more than {SECONDS:g} seconds to be loaded and for a sentence"
    return within(SECONDS, load, problem)


def _check_names(file: Path) -> None:
    """Raise `HeadwaterError` if a tokenizer's config refers to a file in another folder."""
    if not file.exists():
        return
    names: Any = read_object(file).get("fast_tokenizer_files")
    with reading(repr(str(file)), "correct it"):
        if any("/" in name or "\\" in name for name in names or ()):
            raise HeadwaterError(f"{str(file)!r} names files outside its folder: {shown(names)}; correct it.")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, where: str) -> None:
    """Raise `HeadwaterError` if a tokenizer produces tokens that a model with this vocabulary does not know."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise HeadwaterError(f"{where} knows no tokens; replace or remove its files.")
    if vocab_size is not None and largest >= vocab_size:
        raise HeadwaterError(
            f"{where} produces tokens up to {largest}, but the model knows only {vocab_size}, from 0; use the "
            "tokenizer it was trained with."
        )
