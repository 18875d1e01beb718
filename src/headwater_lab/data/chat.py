"""Conversations, from a column of messages: rendered by the tokenizer's chat template; only the answers are trained on.

An answer is what the model writes itself: the content of an assistant's message and the token that ends it. Its
boundaries are those that the template marks ({% generation %} … {% endgeneration %}), else what a message adds to the
conversation before it, with the template's generation prompt.
"""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from headwater.util.errors import HeadwaterError, first_line
from headwater_lab.data.reading import CONVERSATIONS, parse_list
from headwater_lab.data.tokenizer_files import TEXT_ENDS, TURN_ENDS
from headwater_lab.util.deadline import SECONDS, within

ASSISTANT = "assistant"
# Roles for the speakers in `conversations`, whose messages have `from` and `value`.
ROLES = {"human": "user", "gpt": ASSISTANT}
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# Characters that a template may write: a million, and this many times the conversation's.
FREE, MOST_ADDED = 10**6, 100

# transformers marks answers in one text at a time.
_RENDERING = threading.Lock()

ChatMessage = dict[str, Any]
Span = tuple[int, int]
"""The first character, and the one after the last."""


@dataclass(frozen=True)
class Encoded:
    """The token ids of a document. counts: which are trained on; None: all. bytes: UTF-8 bytes of their text."""

    ids: np.ndarray
    counts: np.ndarray | None
    bytes: int


def content_of(value: Any, column: str, where: str, row: int) -> tuple[str, bool] | None:
    """Return (a row's text, or its conversation in JSON; whether it is one); None if there is nothing to train on.

    Raises `HeadwaterError` for anything else.
    """
    if column.rpartition(".")[2] in CONVERSATIONS:
        value = parse_list(value)
    if value is None:
        return None
    if isinstance(value, str):
        return value, False
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise HeadwaterError(
            f"Column {column!r} of {where!r} holds {type(value).__name__}, not text, in row {row}; name another column."
        )
    if not value:
        return "", True
    try:
        messages = [_read_message(message) for message in value]
    except ValueError as error:
        raise HeadwaterError(f"Column {column!r} of {where!r}: {error}, in row {row}; correct it.") from None
    has_answer = any(message["role"] == ASSISTANT for message in messages)
    if not has_answer or any(message["content"] is None for message in messages):
        return None
    return json.dumps(messages, ensure_ascii=False), True


def _read_message(message: dict[Any, Any]) -> ChatMessage:
    """Return a message with its role and its content as text, None without content. Raises `ValueError`."""
    fields = {str(name): value for name, value in message.items() if value is not None}
    role = fields.pop("role", None) or ROLES.get(str(speaker := fields.pop("from", None)), speaker)
    if not isinstance(role, str):
        raise ValueError("a message has no role, such as user or assistant")
    content = fields.pop("content", fields.pop("value", None))
    if isinstance(content, list):
        content = "".join(map(_read_text_part, content))
    if content is None and "tool_calls" in fields:
        content = ""
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of a message is {type(content).__name__}, not text")
    return {"role": role, "content": content, **fields}


def _read_text_part(item: Any) -> str:
    """Return the text of one part of a content. Raises `ValueError`."""
    if isinstance(item, str):
        return item
    if isinstance(item, dict) and isinstance(item.get("text"), str) and item.get("type", "text") == "text":
        return str(item["text"])
    kind = item.get("type") if isinstance(item, dict) else type(item).__name__
    raise ValueError(f"a message has a part of type {kind}, and only text is trained on")


def read_contents(conversation: str) -> str:
    """Return the contents of a conversation in JSON, a line for each message."""
    return "\n".join(message["content"] for message in json.loads(conversation))


def copy_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Copy the backend of a fast tokenizer, without truncation and padding."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


class ChatEncoder:
    """An encoder from conversations, rendered by the chat template, to token ids, for any number of threads.

    Raises `HeadwaterError` if the tokenizer has no template, or one that does not show where answers begin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dtype: np.dtype) -> None:
        self.tokenizer, self.dtype = tokenizer, dtype
        if not tokenizer.chat_template:
            raise HeadwaterError(
                "The text contains conversations, but the tokenizer has no chat template to write them with; set "
                "tokenizer.chat_template and save it to a folder with save_pretrained, or put a chat_template.jinja "
                "next to its tokenizer.json."
            )
        if not getattr(tokenizer, "is_fast", False):
            raise HeadwaterError(f"{type(tokenizer).__name__} has no tokenizer.json, which conversations need.")
        try:
            self.template = tokenizer.get_chat_template()
        except ValueError as error:
            raise HeadwaterError(f"The chat template cannot be used: {first_line(error)}") from error
        self.backend = copy_backend(tokenizer)
        # Other post-processors trim the offsets of tokens that begin with a space.
        self.backend.post_processor = processors.ByteLevel(trim_offsets=False)
        added = tokenizer.added_tokens_decoder
        self.special = {id: token.content for id, token in added.items() if token.special}
        self.ends = {end for end in (*TEXT_ENDS, *TURN_ENDS, tokenizer.eos_token) if end}
        self.marks = re.compile("|".join(map(re.escape, {*self.ends, *self.special.values()})))

    def __call__(self, conversation: str, where: str) -> Encoded:
        """The tokens of a conversation given as JSON. where: its name in errors."""
        messages = json.loads(conversation)
        text, marked = self.render_messages(messages, where, marks=bool(_MARKED.search(self.template)))
        answers = marked or self.find_differences(messages, text, where)
        spans = [span for span in (self.include_end(text, *answer) for answer in answers) if span[0] < span[1]]
        if not spans and any(message["role"] == ASSISTANT and message["content"] for message in messages):
            raise HeadwaterError(f"The chat template leaves out the answers of {where!r}; use another tokenizer.")
        pieces = self.encode_stretches(text, spans)
        counts = np.concatenate([np.full(len(ids), is_answer) for ids, is_answer, _ in pieces])
        counts[:1] = False  # the first token has no predecessor to predict it
        ids = np.concatenate([np.asarray(ids, dtype=self.dtype) for ids, _, _ in pieces])
        size = sum(len(text[start:end].encode()) for start, end in spans)
        return Encoded(ids, counts, size - sum(special for _, _, special in pieces))

    def render_messages(
        self, messages: list[ChatMessage], where: str, marks: bool = False, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return (the text of messages, the answers that the template marks). prompt: add the generation prompt."""
        render = partial(
            render_jinja_template,
            [messages],
            chat_template=self.template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens_map,
        )
        size = len(str(messages))
        try:
            with _RENDERING:
                texts, spans = within(SECONDS, render, f"The chat template needs more than {SECONDS:g} s for {where!r}")
            if len(texts[0]) > FREE + MOST_ADDED * size:
                raise HeadwaterError(
                    f"The chat template writes {len(texts[0]):,} characters for {where!r}, of {size:,}; change it."
                )
        except HeadwaterError:
            raise
        except Exception as error:  # templates can raise anything
            raise HeadwaterError(
                f"The chat template cannot write {where!r}: {first_line(error)}; correct it, or use another template."
            ) from error
        return texts[0], [(start, end) for start, end in spans[0]] if spans else []

    def find_differences(self, messages: list[ChatMessage], text: str, where: str) -> Iterator[Span]:
        """Find the answers in the text of a conversation: what each adds to the messages before it."""
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            try:
                prompt, _ = self.render_messages(messages[:index], where, prompt=True)
                prompted = prompt != self.render_messages(messages[:index], where)[0]
            except HeadwaterError:
                if index:
                    raise
                prompt, prompted = "", False  # many templates look at the first message
            answered, _ = self.render_messages(messages[: index + 1], where)
            if not (text.startswith(answered) and answered.startswith(prompt)):
                raise HeadwaterError(
                    f"The chat template writes the beginning of {where!r} differently from the whole conversation, so "
                    "its answers cannot be found; mark them in the template with {% generation %} and "
                    "{% endgeneration %}."
                )
            start = len(prompt)
            if not prompted:  # the speaker's name may come before the answer
                answer = text.find(message["content"].strip(), start, len(answered))
                start = answer if answer > start and text[start:answer].strip() else start
            yield start, len(answered)

    def include_end(self, text: str, start: int, stop: int) -> Span:
        """Extend an answer to the token that ends it, but not to the template's white space after it."""
        *_, end = (0, *(match.end() for match in self.marks.finditer(text, start, stop)))
        if end and not text[end:stop].strip():
            return start, end
        following = next((end for end in self.ends if text.startswith(end, stop)), "")
        return start, stop + len(following)

    def encode_stretches(self, text: str, spans: list[Span]) -> list[tuple[list[int], bool, int]]:
        """Return (ids, whether they are of an answer, the bytes of its special tokens) for each stretch of a text.

        Where a token would cross a boundary, the stretches are tokenized separately, as when a model answers.
        """
        borders = [0, *(border for span in spans for border in span), len(text)]
        encoding = self.backend.encode(text, add_special_tokens=False)
        starts, ends = np.array(encoding.offsets or [(0, 0)]).T
        # Count the tokens that begin before each border. The last of them may end after it.
        counts = np.searchsorted(starts, borders)
        if (ends[np.maximum(counts, 1) - 1] > borders)[1:].any():
            stretches = (text[start:end] for start, end in pairwise(borders))
            pieces = [self.backend.encode(stretch, add_special_tokens=False).ids for stretch in stretches]
        else:
            pieces = [encoding.ids[start:end] for start, end in pairwise(counts)]
        sizes = [sum(len(self.special[id].encode()) for id in ids if id in self.special) for ids in pieces]
        return [(ids, bool(n % 2), sizes[n] if n % 2 else 0) for n, ids in enumerate(pieces)]
