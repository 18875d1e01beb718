"""A server for one checkpoint that follows OpenAI's API.

Requests are checked by `requests`, and answered by `generate`, in one thread, one prompt after the other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.decoding import LONGEST
from headwater.util.errors import HeadwaterError, first_line, shown
from headwater_lab.data.tokenizer_files import list_turn_ends
from headwater_lab.serving.generation import encode_prompts, list_ends, load_for_generation
from headwater_lab.serving.prompts import apply_chat_template
from headwater_lab.serving.requests import (
    LENGTHS,
    MOST_BYTES,
    TEXTS,
    Chat,
    Completion,
    RequestError,
    Sampling,
    error_body,
    read_fields,
    read_json,
)
from headwater_lab.serving.stops import UntilStop, before_stop

logger = logging.getLogger(__name__)

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
NO_TEMPLATE = "the model's tokenizer has no chat template"
# Number of new tokens if a request does not specify one.
DEFAULT_LENGTH = 1024
# What generation_config.json and requests set.
PENALTY = "repetition_penalty"
SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", PENALTY)
# Seconds between checks whether the client is still connected.
SECONDS_BETWEEN_LOOKS = 0.2
# Seconds that answers under way have after SIGTERM; service managers kill after 30 or more.
SECONDS_TO_FINISH = 20
# HTTP status for a client that has disconnected. Nobody reads it.
CLIENT_LEFT = 499


def serve_checkpoint(source: Path, host: str, port: int, device: str, dtype: torch.dtype | None) -> None:
    """Serve a checkpoint, named as it is given, until the process is stopped. Raises `HeadwaterError`."""
    try:  # before the model is loaded, and in one sentence
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        problem = str(error.strerror).partition(" (")[0]  # Python adds the address
        raise HeadwaterError(f"Port {port} of {host!r} cannot be used: {problem}; choose another.") from error
    model, tokenizer = load_for_generation(source, follow=SAMPLING)
    model.to(device, dtype)
    if tokenizer.chat_template is None:
        # Not in a run: its checkpoint has check sums, and other copies of the tokenizer are not read.
        remedy = "Use /v1/completions, or add a chat_template.jinja to what headwater export writes, and serve that."
        logger.warning(f"{NO_TEMPLATE}: chats are answered with HTTP 400. {remedy}")
    app = ModelServer(str(source), model, tokenizer).build_app()
    # uvicorn reports how many answers it ends when it stops, and then a traceback of each.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
    )
    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=SECONDS_TO_FINISH)


class ModelServer:
    """A model behind the routes. name: the model's name in requests."""

    def __init__(self, name: str, model: HeadwaterForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.created = int(time.time())
        self.thread = ThreadPoolExecutor(1)

    def build_app(self) -> Starlette:
        chat, completion, models, health = ROUTES
        routes = [
            Route(chat, self.answer_chat, methods=["POST"]),
            Route(completion, self.answer_completion, methods=["POST"]),
            Route(models, self.list_models),
            Route(f"{models}/{{name:path}}", self.show_model),
            Route(health, self.report_health),
        ]
        refused = dict.fromkeys((HeadwaterError, HTTPException, ClientDisconnect), _answer_refusal)
        return Starlette(routes=routes, exception_handlers={**refused, Exception: _answer_failure})

    async def list_models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._describe_model(self.name)]})

    async def show_model(self, request: Request) -> JSONResponse:
        return JSONResponse(self._describe_model(request.path_params["name"]))

    def _describe_model(self, name: str) -> dict[str, Any]:
        """Describe the model. Raises `RequestError` for another name."""
        if name != self.name:
            raise RequestError("model", f"this server has only {self.name!r}, not {name!r}", 404)
        return {"id": name, "object": "model", "created": self.created, "owned_by": "headwater"}

    async def report_health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def answer_completion(self, request: Request) -> Response:
        """Answer one prompt or several, as text or as token ids."""
        fields = await self._read_request(request, Completion)
        prompts = fields["prompt"]
        if isinstance(prompts[0], str):
            prompts = encode_prompts(self.tokenizer, prompts)
        return await self._answer(request, fields, prompts)

    async def answer_chat(self, request: Request) -> Response:
        """Answer a conversation, which needs a chat template."""
        fields = await self._read_request(request, Chat)
        return await self._answer(request, fields, [encode_chat(self.tokenizer, fields)])

    async def _read_request(self, request: Request, kind: type[Sampling]) -> dict[str, Any]:
        """Read the checked fields of a request. Raises `RequestError`."""
        body = b""
        async for chunk in request.stream():  # read all of it: a client that is still sending reads no answer
            if len(body) <= MOST_BYTES:
                body += chunk
        fields = read_fields(kind, read_json(body))
        self._describe_model(fields.get("model", self.name))
        return fields

    async def _answer(self, request: Request, fields: dict[str, Any], prompts: list[list[int]]) -> Response:
        runs = [Continuation(self.model, self.tokenizer, prompt, fields) for prompt in prompts]
        if fields["stream"]:
            return StreamingResponse(self._stream_events(runs[0], fields), media_type="text/event-stream")
        loop = asyncio.get_running_loop()
        work = asyncio.gather(*(loop.run_in_executor(self.thread, run.generate) for run in runs))
        try:
            while not (await asyncio.wait({work}, timeout=SECONDS_BETWEEN_LOOKS))[0]:
                if await request.is_disconnected():
                    return Response(status_code=CLIENT_LEFT)
            await work
        except asyncio.CancelledError:  # from uvicorn, after `SECONDS_TO_FINISH`
            return JSONResponse(error_body("The server is stopping; ask again later.", status=503), 503)
        finally:
            for run in runs:  # if the client has left or a prompt has failed, stop the others
                run.cancel()
        choices = [_make_choice(fields, run.text, run.finish_reason, index) for index, run in enumerate(runs)]
        return JSONResponse(self._describe_answer(fields) | {"choices": choices, "usage": _count_tokens(runs)})

    def _describe_answer(self, fields: dict[str, Any]) -> dict[str, Any]:
        kind = "text_completion" if "prompt" in fields else "chat.completion" + ".chunk" * fields["stream"]
        return {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": self.name}

    async def _stream_events(self, run: Continuation, fields: dict[str, Any]) -> AsyncIterator[str]:
        """Yield events as OpenAI does: errors in its form, usage in a separate event if requested, and a last event."""
        loop, texts = asyncio.get_running_loop(), asyncio.Queue[str | None]()
        facts = self._describe_answer(fields)
        run.pass_on = lambda piece: loop.call_soon_threadsafe(texts.put_nowait, piece)
        work = loop.run_in_executor(self.thread, run.generate)
        work.add_done_callback(lambda _: texts.put_nowait(None))
        try:
            if "messages" in fields:
                yield _make_event(facts | {"choices": [_make_choice(fields, "", begins=True)]})
            while (text := await texts.get()) is not None:
                yield _make_event(facts | {"choices": [_make_choice(fields, text)]})
            await work
            yield _make_event(facts | {"choices": [_make_choice(fields, "", run.finish_reason)]})
            if fields.get("stream_options", {}).get("include_usage"):
                yield _make_event(facts | {"choices": [], "usage": _count_tokens([run])})
            yield "data: [DONE]\n\n"
        except Exception as error:
            logger.error("A stream ended with an error", exc_info=error)
            yield _make_event(error_body(f"{type(error).__name__}: {first_line(error)}", status=500))
        finally:
            run.cancel()  # the client may have left


async def _answer_refusal(request: Request, error: Exception) -> JSONResponse:
    status = getattr(error, "status_code", getattr(error, "status", 400))
    message = str(getattr(error, "detail", error))
    if status == 404 and not isinstance(error, RequestError):
        message = f"{request.url.path} is not offered; this server has {', '.join(ROUTES)}."
    logger.warning(f"HTTP {status}: {message!r:.500}")  # quoted: it may repeat parts of the request
    return JSONResponse(error_body(message, getattr(error, "field", None), status), status)


async def _answer_failure(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(f"{type(error).__name__}; see the server's log", status=500), 500)


def _make_choice(
    fields: dict[str, Any], text: str, finish_reason: str | None = None, index: int = 0, begins: bool = False
) -> dict[str, Any]:
    """Make a choice of an answer, or the next piece of one in a stream. begins: it is the first of a chat's stream."""
    content: dict[str, Any] = {"content": text}
    if "prompt" in fields:
        content = {"text": text}
    elif not fields["stream"]:
        content = {"message": {"role": "assistant"} | content}
    else:  # clients join the texts of all pieces, also of the role
        content = {"delta": {"role": "assistant"} | content if begins else content if text else {}}
    return content | {"index": index, "finish_reason": finish_reason}


def _count_tokens(runs: list[Continuation]) -> dict[str, int]:
    prompt, new = (sum(counts) for counts in zip(*((len(run.prompt), len(run.new)) for run in runs), strict=True))
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _make_event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def encode_chat(tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]) -> list[int]:
    """Encode a conversation as token ids. Raises `RequestError` if the chat template refuses it or an option."""
    template, options = tokenizer.chat_template, fields.get("chat_template_kwargs", {})
    if template is None:
        raise RequestError("messages", f"{NO_TEMPLATE}; use /v1/completions instead")
    text = template if isinstance(template, str) else json.dumps(template)
    for name in options:
        if name not in text or name in ("messages", "tools", "documents", "add_generation_prompt", "chat_template"):
            raise RequestError(f"chat_template_kwargs.{name}", "is not an option of the model's chat template")
    messages = [{name: message[name] for name in ("role", "content")} for message in fields["messages"]]
    try:
        return apply_chat_template(tokenizer, messages, **options)
    except HeadwaterError as error:
        raise RequestError("messages", str(error)) from error


class Continuation(StoppingCriteria):
    """One call of `generate` with the options of a request. It reads each new token, and ends at a stop text.

    pass_on: receives the text in pieces, in the thread of `generate`. new: the new tokens so far.
    Raises `RequestError` for a prompt that the model cannot read, and for more new tokens than it has positions for.
    """

    def __init__(
        self,
        model: HeadwaterForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        fields: dict[str, Any],
    ) -> None:
        self.model, self.tokenizer, self.prompt, self.fields = model, tokenizer, prompt, fields
        self.config = _make_config(model, fields)
        self.config.max_new_tokens = _choose_length(model.config, prompt, fields)
        self.pass_on: Callable[[str], object] = lambda text: None
        self.stops: list[str] = fields.get("stop", [])
        # Special tokens are not part of the text, so a stop text that is one must be compared as a token.
        ends = [tokenizer.convert_tokens_to_ids(stop) for stop in self.stops if stop in tokenizer.all_special_tokens]
        ends += list_turn_ends(tokenizer) if "messages" in fields else []
        self.ends = {*ends, *list_ends(model)}
        self.config.eos_token_id = sorted(self.ends) or None
        self.until, self.new = UntilStop(self.stops), list[int]()
        # The text of the tokens before `shown` has been passed on. That of the next ones may depend on those from
        # `context` on, such as the space before a word.
        self.context, self.shown = 0, 0
        self.text, self.ended, self.cancelled = "", False, False

    @property
    def finish_reason(self) -> str:
        return "stop" if self.ended else "length"

    def cancel(self) -> None:
        """End before the next token: the client has left."""
        self.cancelled = True

    def generate(self) -> None:
        """Continue the prompt, up to the first stop text."""
        if self.cancelled:
            return
        ids = torch.tensor([self.prompt], device=self.model.device)
        seed, kind = self.fields.get("seed"), self.model.device.type
        devices = [] if kind == "cpu" else [self.model.device]
        with torch.random.fork_rng(devices, seed is not None, device_type=kind if devices else "cuda"):
            if seed is not None:
                torch.manual_seed(seed)
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self.config,
                stopping_criteria=StoppingCriteriaList([self]),
            )
        self._show(end=True)
        self.text = before_stop(self._decode(0), self.stops)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.ended:  # `generate` may notice the end late, and then passes further tokens
            self.new.append(int(input_ids[0, -1]))
            self._show()
            self.ended = self.new[-1] in self.ends or self.until.stopped
        return torch.full((len(input_ids),), self.ended or self.cancelled, device=input_ids.device)

    def _show(self, end: bool = False) -> None:
        """Pass on the text of tokens that have not been shown, unless it ends within a character. end: all of it."""
        before, text = self._decode(self.context, self.shown), self._decode(self.context)
        piece = ""
        if end or not text.endswith("\ufffd"):
            piece, self.context, self.shown = text[len(before) :], self.shown, len(self.new)
        if visible := self.until.feed(piece, end):
            self.pass_on(visible)

    def _decode(self, start: int, stop: int | None = None) -> str:
        return self.tokenizer.decode(self.new[start:stop], skip_special_tokens=True)


def _make_config(model: HeadwaterForCausalLM, fields: dict[str, Any]) -> GenerationConfig:
    """Make the settings of a request: its own, or else those of the model's generation_config.json, or OpenAI's."""
    stored = {name: value for name in SAMPLING if (value := getattr(model.generation_config, name)) is not None}
    if not stored.pop("do_sample", False):
        stored = {name: value for name, value in stored.items() if name == PENALTY}
    options = {"temperature": 1.0, "top_k": 0} | stored | {name: fields[name] for name in SAMPLING if name in fields}
    if options["temperature"] == 0:  # greedy decoding has no other options
        options = {name: value for name, value in options.items() if name == PENALTY}
    return GenerationConfig(pad_token_id=0, do_sample="temperature" in options, **options)


def _choose_length(config: Any, prompt: list[int], fields: dict[str, Any]) -> int:
    """Choose the number of new tokens. Raises `RequestError` if it does not fit."""
    text = next(name for name in TEXTS if name in fields)
    if not prompt:
        raise RequestError(text, "has no tokens")
    if unknown := [token for token in prompt if not 0 <= token < config.vocab_size]:
        largest = config.vocab_size - 1
        raise RequestError(text, f"has the token id {shown(unknown[0])}; this model's ids are 0 to {largest}")
    positions = config.max_position_embeddings
    most = positions if config.position == "learned" else max(LONGEST, positions)
    room = most - len(prompt)
    if room < 1:
        raise RequestError(text, f"has {len(prompt):,} tokens; the limit is {most:,} together with the new ones")
    field = next((name for name in LENGTHS if name in fields), None)
    if field is not None and fields[field] > room:
        raise RequestError(
            field, f"{fields[field]} new tokens after a prompt of {len(prompt):,} are more than the limit of {most:,}"
        )
    return min(DEFAULT_LENGTH, room) if field is None else fields[field]
