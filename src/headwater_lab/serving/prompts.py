"""Prompts from a file or from standard input."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from headwater.util.errors import HeadwaterError, first_line
from headwater_lab.recipe.overrides import MOST_TEXT, read_text
from headwater_lab.util.deadline import SECONDS, within

# Options of the command that apply to all lines, so that no line of JSONL can set them.
OF_ALL_LINES = {"top_p", "top_k", "seed", "temperature", "max_new_tokens", "max_tokens", "stop"}


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: Any
) -> list[int]:
    """Encode a conversation, and the beginning of its answer, with the tokenizer's chat template.

    options: of the template. Raises `HeadwaterError` if the template refuses the conversation.
    """
    write = partial(tokenizer.apply_chat_template, messages, add_generation_prompt=True, return_dict=True, **options)
    try:
        ids: list[int] = within(SECONDS, lambda: write()["input_ids"], "it takes too long")
    except Exception as error:  # templates can raise anything
        raise HeadwaterError(f"The model's chat template refuses the conversation: {first_line(error)}") from error
    return ids


def read_prompt(file: Path) -> str:
    """Read the text of a file; of standard input for -."""
    try:
        return sys.stdin.read() if str(file) == "-" else read_text(file, "text", MOST_TEXT)
    except UnicodeError as error:
        raise HeadwaterError(f"The prompt is not UTF-8 text: {error}.") from error


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file, each with a "prompt". Its other fields are printed with its completion.

    Raises `HeadwaterError` for an invalid line.
    """
    name, prompts = str(file), []
    for number, line in enumerate(read_prompt(file).split("\n"), 1):
        line = line.removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise HeadwaterError(f"Line {number} of {name!r} has a lone surrogate, which is not valid text.") from error
        except (ValueError, RecursionError) as error:
            raise HeadwaterError(f"Line {number} of {name!r} is not JSON: {error}.") from error
        if not (isinstance(content, dict) and isinstance(content.get("prompt"), str)):
            raise HeadwaterError(f'Line {number} of {name!r} has no text under "prompt".')
        if replaced := sorted(content.keys() & {"completion", "finish_reason"}):
            raise HeadwaterError(
                f'Line {number} of {name!r} has a "{replaced[0]}", which would be replaced; rename it.'
            )
        if unread := sorted(content.keys() & OF_ALL_LINES):
            raise HeadwaterError(
                f"Line {number} of {name!r} has {unread[0]!r}, which is not read from a line; it is an option of the "
                f"command, for all lines."
            )
        prompts.append(content)
    if not prompts:
        raise HeadwaterError(f"{name!r} has no prompts.")
    return prompts
