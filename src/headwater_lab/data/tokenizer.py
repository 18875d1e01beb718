"""Tokenizers: the built-in byte tokenizer, or any Hugging Face one."""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, islice, pairwise
from operator import itemgetter
from typing import cast

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headwater.util.errors import HeadwaterError, shown
from headwater.util.hub import check_reachable
from headwater_lab.data.chat import ChatEncoder, Encoded, copy_backend
from headwater_lab.data.corpus import Document
from headwater_lab.data.reading import local_path
from headwater_lab.data.tokenizer_files import has_tokenizer, open_tokenizer
from headwater_lab.util.deadline import SECONDS, within

logger = logging.getLogger(__name__)

END_OF_TEXT, UNKNOWN = "<|endoftext|>", "<|unknown|>"
# Maximum number of tokens, since memory for all is allocated at once. The largest models have a fraction of this.
LARGEST_VOCABULARY = 2**22
# Texts to encode under one limit of time.
GROUP = 256
# Characters that a long document is tokenized at a time: at least PART, at most LONGEST.
PART = 2**18
LONGEST = 2 * PART


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a plain Hugging Face tokenizer whose token i is byte i of the UTF-8 text; 256 is the end of text."""
    # ByteLevel writes byte b as a printable stand-in character; the same table orders the vocabulary.
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=dict(sorted(vocab.items(), key=itemgetter(1))), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_end(tokenizer)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE with GPT-2's way of splitting text into words; token 0 is the end of text.

    vocab_size: tokens, including the end of text; fewer if the texts have too few pairs to merge. Raises
    `HeadwaterError` below 257 tokens (all bytes and the end of text) and above `LARGEST_VOCABULARY`.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise HeadwaterError(f"A vocabulary of {vocab_size} has no room for 256 bytes and the end of text.")
    if vocab_size > LARGEST_VOCABULARY:
        raise HeadwaterError(f"A vocabulary of {vocab_size:,} is too large; use at most {LARGEST_VOCABULARY:,}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_end(tokenizer)


def character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the characters in texts, numbered in their order as nanoGPT's.

    Behind them are a token for all other characters, and the end of text.
    """
    tokens = [*sorted(set().union(*texts)), UNKNOWN]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_end(tokenizer, unk_token=UNKNOWN)


def _with_end(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        **special,
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load "bytes", a local folder, a tokenizer.json, or a name on the Hugging Face hub, without running its code.

    Raises `HeadwaterError` for any problem with its files, and if it has no token to put between documents.
    """
    if name == "bytes":
        return byte_tokenizer()
    if not (path := local_path(name)).exists():
        check_reachable("tokenizer", name)
    with _one_sentence(f"No tokenizer could be loaded from {name!r}"):
        if path.is_dir() and not has_tokenizer(path):
            raise HeadwaterError(f"The folder {name!r} has no tokenizer: there is no tokenizer.json in it.")
        tokenizer = open_tokenizer(path if path.exists() else name)
        vocabulary_size(tokenizer)  # raises if the vocabulary is damaged
    if separator_id(tokenizer) is None:
        raise HeadwaterError(
            f"The tokenizer {name!r} has neither an end-of-text nor a begin-of-text token to put between documents; "
            'name one of its tokens in a tokenizer_config.json next to its tokenizer.json: {"eos_token": "…"}.'
        )
    return tokenizer


def local_size(name: str | None) -> int | None:
    """Find the vocabulary of a tokenizer named as for `load_tokenizer`, if it is on this machine; otherwise None."""
    if name is None or (name != "bytes" and not local_path(name).exists()):
        return None
    return vocabulary_size(load_tokenizer(name))


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest id. For vocabularies with holes, `len(tokenizer)` is too small."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def has_all_tokens(tokenizer: PreTrainedTokenizerBase | None, base: PreTrainedTokenizerBase | None) -> bool:
    """Whether a tokenizer has all tokens of another one under the same ids, and possibly more."""
    if tokenizer is None or base is None:
        return False
    return base.get_vocab().items() <= tokenizer.get_vocab().items()


@contextmanager
def _one_sentence(problem: str) -> Iterator[None]:
    """Turn anything the tokenizers library raises into a `HeadwaterError`, even panics, which are not `Exception`s."""
    try:
        yield
    except (HeadwaterError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HeadwaterError(f"{problem}: {text[:300].rstrip('.')}; use another, or create it again.") from error


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Find the token between documents."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id


def frame_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Find the tokens before and after a document: `separator_id` before it, which also ends the previous one.

    A tokenizer that itself puts another token before a text, as those of Llama and Gemma do, puts it there;
    `separator_id` then comes after the document.
    """
    separator, first = [cast(int, separator_id(tokenizer))], tokenizer("").input_ids[:1]
    return (first, separator) if first == [tokenizer.bos_token_id] != separator else (separator, [])


def find_begin(tokenizer: PreTrainedTokenizerBase) -> int:
    """Find the token before a document outside of training: what the tokenizer adds, its begin or its end of text."""
    ids = tokenizer("a").input_ids
    if ids[:1] != tokenizer("a", add_special_tokens=False).input_ids[:1]:
        return cast(int, ids[0])
    return cast(int, separator_id(tokenizer) if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


def begin_texts(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Copy a tokenizer so that it begins a text with the token that training puts before a document.

    Engines give prompts the tokens that the tokenizer adds. One that is not of the tokenizers library is not changed.
    """
    [begin], _ = frame_text(tokenizer)
    if not tokenizer.is_fast or tokenizer("a").input_ids == [begin, *encode_texts(tokenizer, ["a"], plain=True)[0]]:
        return tokenizer
    copied, token = copy.deepcopy(tokenizer), tokenizer.convert_ids_to_tokens(begin)
    copied.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B:1", special_tokens=[(token, begin)]
    )
    return copied


def encode_in_time(encode: Callable[[Sequence[str]], list[list[int]]], texts: Sequence[str]) -> list[list[int]]:
    """Call `encode` on texts, `GROUP` at a time, so that a tokenizer without end is noticed early.

    Raises `HeadwaterError` if it fails, or takes more than `SECONDS` for each megabyte of a group.
    """
    results: list[list[int]] = []
    for group in (texts[start : start + GROUP] for start in range(0, len(texts), GROUP)):
        seconds = SECONDS * max(1.0, sum(map(len, group)) / 10**6)
        problem = f"The tokenizer needs more than {seconds:g} seconds for this text"
        with _one_sentence("The tokenizer cannot encode a text"):
            results += within(seconds, partial(encode, group), problem)
    return results


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, plain: bool = False) -> list[list[int]]:
    """Encode each text. plain: without special tokens around it. Raises `HeadwaterError` as `encode_in_time` does."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer(text, add_special_tokens=not plain).input_ids for text in texts]

    return encode_in_time(encode, texts)


def warn_of_unknown(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
    """Log the characters of texts in place of which the tokenizer writes its unknown token."""
    if tokenizer.unk_token_id is None:
        return
    characters = sorted(set().union(*texts))
    rows = encode_texts(tokenizer, characters, plain=True)
    unknown = [text for text, row in zip(characters, rows, strict=True) if tokenizer.unk_token_id in row]
    if unknown:
        logger.warning(
            f"The tokenizer has no {shown(''.join(unknown))}; the model reads {tokenizer.unk_token} instead."
        )


class Encoder:
    """An encoder from texts to token ids, for any number of threads.

    Text that looks like a special token is plain text: otherwise it would start a new document.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        end = separator_id(tokenizer)
        assert end is not None, "load_tokenizer looks for it"
        self.tokenizer, self.separator, self.vocab_size = tokenizer, end, vocabulary_size(tokenizer)
        self.frame = frame_text(tokenizer)
        self.dtype = np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")
        self.is_bytes = tokenizer.get_vocab() == byte_tokenizer().get_vocab()
        self.backend = None
        if getattr(tokenizer, "is_fast", False):
            with _one_sentence("The tokenizer cannot be used"):
                self.backend = copy_backend(tokenizer)
            self.backend.encode_special_tokens = True

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts, without separators."""
        if self.is_bytes:  # equals calling the tokenizer, without its overhead
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]
        return [np.asarray(row, dtype=self.dtype) for row in encode_in_time(self._encode_ids, texts)]

    def _encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        if self.backend is None:
            return self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True).input_ids
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_documents(self, documents: Sequence[Document]) -> list[Encoded]:
        """Encode documents: texts and ids as `frame_text` says, conversations as their template does."""
        texts = [[] if document.is_chat or len(document.ids) else _cut_parts(document.text) for document in documents]
        rows = iter(self(list(chain.from_iterable(texts))))
        head, tail = self.frame
        return [
            self.chat(document.text, document.id)
            if document.is_chat
            else Encoded(
                np.concatenate(
                    (head, *([document.ids] if len(document.ids) else islice(rows, len(pieces))), tail)
                ).astype(self.dtype),
                None,
                len(document.data),
            )
            for document, pieces in zip(documents, texts, strict=True)
        ]

    @cached_property
    def chat(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer, self.dtype)


def _cut_parts(text: str) -> list[str]:
    """Cut a text into parts if it is long."""
    ends = [0]
    while len(text) - ends[-1] > LONGEST:
        ends.append(part_end(text, ends[-1]))
    return [text[start:end] for start, end in pairwise([*ends, len(text)])]


def part_end(text: str, start: int) -> int:
    """Find where to cut a document so that byte-level BPE gives the same tokens: at a line end between two full lines.

    Otherwise at the first line end from PART characters on, or the first space, or after LONGEST characters.
    """
    if match := re.compile(r"(?<=\S)\n(?=\S)").search(text, start + PART, start + LONGEST):
        return match.end()
    if (end := text.find("\n", start + PART, start + LONGEST)) >= 0:
        return end + 1
    if (end := text.find(" ", start + PART, start + LONGEST)) >= 0:
        return end
    return start + LONGEST
