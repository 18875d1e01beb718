"""transformers' server for one checkpoint, with requests checked field by field and answered as OpenAI's API says.

transformers' handlers ignore or misread many fields. Here each request is checked against `requests` first; what it
asks for is then done by `generate` in one thread, one request after the other. `install_checkpoint` puts these classes
in the place of transformers' own before its command starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse
from tokenizers.decoders import DecodeStream
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving import chat_completion, completion, model_manager, server, utils

from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.decoding import LONGEST
from headwater.util.errors import HeadwaterError, first_line
from headwater_lab.data.tokenizer import separator_id
from headwater_lab.serving.requests import (
    LENGTHS,
    MOST_BYTES,
    TEXTS,
    Chat,
    Completion,
    RequestError,
    Sampling,
    check_token_ids,
    error_body,
    read_fields,
    read_json,
)
from headwater_lab.serving.stops import UntilStop, before_stop
from headwater_lab.util.deadline import SECONDS, within

logger = logging.getLogger(__name__)

# The routes for one text model. transformers' server also transcribes, and loads and unloads whatever a client names.
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/openapi.json", "/docs")
# New tokens of a request that does not say how many, as in transformers' server.
DEFAULT_LENGTH = 1024


def install_checkpoint(name: str, source: Path) -> None:
    """Make transformers' `serve` command serve the checkpoint `source` as `name`."""

    class OneModel(model_manager.ModelManager):
        def process_model_name(self, model_id: str) -> str:  # answers also contain this name
            return name if model_id == name else super().process_model_name(model_id)

        def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            model_id = f"{source}@main" if model_id_and_revision == name else model_id_and_revision
            model, tokenizer = super().load_model_and_processor(model_id, *args, **kwargs)
            tokenizer.response_template = None  # answers are text alone
            return model, tokenizer

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            created = int((source / "config.json").stat().st_mtime)
            return [{"id": name, "object": "model", "created": created, "owned_by": "headwater"}]

    build_server = server.build_server

    def build_checked_server(*args: Any, **kwargs: Any) -> Any:
        return _check_request(build_server(*args, **kwargs))

    model_manager.ModelManager = OneModel
    # It looks for a checkpoint's class only among transformers' own.
    model_manager.transformers.HeadwaterForCausalLM = HeadwaterForCausalLM
    utils.GenerateManager = Generation
    chat_completion.ChatCompletionHandler = Chats
    completion.CompletionHandler = Completions
    server.build_server = build_checked_server


def _check_request(app: Any) -> Any:
    """The application with the routes that are offered, OpenAI's form of errors, and checked bodies."""
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    app.add_exception_handler(HeadwaterError, _answer_refusal)
    app.add_exception_handler(HTTPException, _answer_refusal)
    app.add_exception_handler(Exception, _answer_failure)
    app.user_middleware.append(Middleware(ReadBody))  # the innermost, so that its answers have the headers of all
    return app


async def _answer_refusal(request: Any, error: Exception) -> JSONResponse:
    status = getattr(error, "status_code", getattr(error, "status", 400))
    status = 400 if status == 422 else status
    message = str(getattr(error, "detail", error))
    if status == 404 and not isinstance(error, RequestError):
        message = f"{request.url.path} is not offered; this server has {', '.join(ROUTES[:4])}."
    return JSONResponse(error_body(message, getattr(error, "field", None), status), status)


async def _answer_failure(request: Any, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(f"{type(error).__name__}; see the server's log", status=500), 500)


class ReadBody:
    """ASGI middleware: read a POST's body, refuse what is no JSON object, and end the work of a client that left."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        try:
            body = json.dumps(read_json(await _whole_body(receive))).encode()
        except RequestError as error:
            answer = await _answer_refusal(None, error)
            return await answer(scope, receive, send)
        except ConnectionError:
            return None
        headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-type", b"content-length")]
        scope = scope | {"headers": [*headers, (b"content-type", b"application/json")]}
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])
        disconnected = asyncio.Event()
        started = False

        async def read() -> Any:
            if (message := next(messages, None)) is None:
                await disconnected.wait()
                message = {"type": "http.disconnect"}
            return message

        async def write(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            disconnected.set()

        work, watching = asyncio.ensure_future(self.app(scope, read, write)), asyncio.ensure_future(watch())
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                if not started:  # nobody reads it, but the layers around ask for an answer
                    await JSONResponse(None, 499)(scope, receive, send)
                return None
            return work.result()
        finally:
            work.cancel()
            watching.cancel()


async def _whole_body(receive: Any) -> bytes:
    """The body, of which only a little more than the limit is kept. Raises `ConnectionError` if the client leaves."""
    body = b""
    while True:  # to its end: a client that is still sending reads no answer
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left")
        if len(body) <= MOST_BYTES:
            body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


# Handlers


class _Handler(utils.BaseHandler):
    """What the handlers share: fields are checked, and become a config for `generate` that carries them."""

    fields: type[Sampling]

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        body = read_fields(self.fields, body)
        model_id, model, tokenizer = self._resolve_model(body)
        return await self._answer(body, request_id, model_id, model, tokenizer)

    async def _answer(self, body: dict[str, Any], request_id: str, *loaded: Any) -> Any:
        raise NotImplementedError

    def _validate_request(self, body: dict[str, Any]) -> None:
        """Nothing: `read_fields` has."""

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        name = self.model_manager.force_model
        if body.get("model", name) != name:
            raise RequestError("model", f"this server has {name!r} alone, not {body['model']!r}", 404)
        return super()._resolve_model(body)

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        config = super()._build_generation_config({}, model_generation_config, use_cb=use_cb)
        default = (config.temperature or 1.0) if config.do_sample else 1.0  # OpenAI's
        temperature = body.get("temperature", default)
        config.do_sample = temperature > 0
        options = {"temperature": temperature, "top_k": 0} | {
            name: body[name] for name in ("top_p", "top_k", "min_p") if name in body
        }
        for name, value in options.items():
            setattr(config, name, value if config.do_sample else None)  # at 0, all of them leave the likeliest token
        config.repetition_penalty = body.get("repetition_penalty", config.repetition_penalty)
        config.max_new_tokens = next((body[name] for name in LENGTHS if name in body), None)
        config.request = body
        return config


class Completions(_Handler, completion.CompletionHandler):
    """/v1/completions: one prompt or several, as text or as token ids, one answer each."""

    fields = Completion

    async def _answer(self, body: dict[str, Any], request_id: str, *loaded: Any) -> Any:
        model_id, model, tokenizer = loaded
        manager = self.generation_state.get_manager(model_id)
        answers = []
        for ids in [self._ids(prompt, tokenizer, model.config.vocab_size) for prompt in body["prompt"]]:
            config = self._build_generation_config(body, model.generation_config)
            row = torch.tensor([ids], device=model.device)
            inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
            options = (request_id, model, tokenizer, model_id, inputs, config, manager)
            if body["stream"]:
                return _openai_stream(self._streaming(*options), body)
            answers.append(await self._non_streaming(*options))
        return _join_texts(answers)

    @staticmethod
    def _ids(prompt: str | list[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
        """The token ids of a prompt; an empty one begins a document, as in OpenAI's API."""
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        start = separator_id(tokenizer)
        if not ids and start is None:
            raise RequestError("prompt", "is empty, and the tokenizer has no token to begin a document with")
        check_token_ids("prompt", ids, vocab_size)
        return ids or [start]


class Chats(_Handler, chat_completion.ChatCompletionHandler):
    """/v1/chat/completions: conversations, which need a chat template."""

    fields = Chat

    async def _answer(self, body: dict[str, Any], request_id: str, *loaded: Any) -> Any:
        self._check_template(body, loaded[2])
        # The next class of the handler is transformers' own.
        answer = await super(_Handler, self).handle_request(body, request_id)
        return _openai_stream(answer, body) if body["stream"] else answer

    def _check_template(self, body: dict[str, Any], tokenizer: Any) -> None:
        """Raise `RequestError` for a conversation that the tokenizer's template cannot write, or does not read."""
        template = tokenizer.chat_template
        if template is None:
            raise RequestError("messages", "the model's tokenizer has no chat template; ask /v1/completions instead")
        text = template if isinstance(template, str) else json.dumps(template)
        options = body.get("chat_template_kwargs", {})
        for name in options:
            if name not in text or name in ("messages", "tools", "documents", "add_generation_prompt", "chat_template"):
                raise RequestError(f"chat_template_kwargs.{name}", "is no option of the model's chat template")
        try:
            conversation = self.get_processor_inputs_from_messages(body["messages"], utils.Modality.LLM)
            render = functools.partial(
                tokenizer.apply_chat_template, conversation, **self.chat_template_kwargs | options
            )
            within(SECONDS, lambda: render(add_generation_prompt=True, tokenize=False), "it takes too long")
        except Exception as error:  # whatever a template raises
            raise RequestError("messages", f"the model's chat template refuses it: {first_line(error)}") from error


def _join_texts(answers: Sequence[JSONResponse]) -> JSONResponse:
    """One answer to several prompts."""
    contents = [json.loads(bytes(answer.body)) for answer in answers]
    choices = [content["choices"][0] | {"index": index} for index, content in enumerate(contents)]
    usage = {name: sum(content["usage"][name] for content in contents) for name in contents[0]["usage"]}
    return JSONResponse(contents[0] | {"choices": choices, "usage": usage})


def _openai_stream(answer: StreamingResponse, body: dict[str, Any]) -> StreamingResponse:
    """A stream as OpenAI's: errors in their form, usage in an event of its own if asked for, and a last event."""
    with_usage = body.get("stream_options", {}).get("include_usage", False)

    async def events(chunks: Any) -> AsyncIterator[str]:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                for event in filter(None, chunk.split("\n\n")):
                    content = json.loads(event.removeprefix("data: "))
                    if "error" in content:
                        yield _make_event(error_body(content["error"], status=500))
                        return
                    usage = content.pop("usage", None)
                    yield _make_event(content)
                    if usage is not None and with_usage:
                        yield _make_event(content | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    answer.body_iterator = events(answer.body_iterator)
    return answer


def _make_event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


# Generation


class Generation(utils.GenerateManager):
    """`generate` in one thread, one request after the other."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, Continuation]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def pass_on(item: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        continuation = Continuation(model, processor, inputs, gen_config, pass_on)

        def run() -> None:
            try:
                continuation.generate()
            except Exception as error:
                logger.error("A stream ended with an error", exc_info=error)
                # transformers' handlers write it into JSON as it is.
                pass_on(utils._StreamError(json.dumps(f"{type(error).__name__}: {first_line(error)}")[1:-1]))
            else:
                pass_on(None)

        self.submit(run)
        return queue, continuation

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, torch.Tensor]:
        continuation = Continuation(model, processor, inputs, gen_config, lambda item: None)
        try:
            # Shielded, since the thread reports to a future that must still be waiting.
            new = await asyncio.shield(self.async_submit(continuation.generate))
        except asyncio.CancelledError:
            continuation.cancel()
            raise
        text = processor.decode(new, skip_special_tokens=True)
        return before_stop(text, continuation.stops), continuation.prompt_length, new


class Continuation(StoppingCriteria):
    """One call of `generate`, as a request's fields ask for. It reads each new token, and ends at a stop text.

    pass_on: receives the text in pieces, in the thread of `generate`.
    total_tokens: new tokens so far.
    Raises `RequestError` for a prompt that the model cannot read, and for more new tokens than it has positions for.
    """

    def __init__(
        self, model: Any, tokenizer: Any, inputs: Any, config: GenerationConfig, pass_on: Callable[[str], None]
    ) -> None:
        self.model, self.inputs, self.config, self.pass_on = model, dict(inputs), config, pass_on
        self.request: dict[str, Any] = vars(config).pop("request")
        self.prompt_length = _set_length(model.config, self.inputs["input_ids"][0].tolist(), config, self.request)
        self.rust_tokenizer = tokenizer._tokenizer
        self.stops: list[str] = self.request.get("stop", [])
        # Special tokens are not part of the text, so as stop texts they end a row as its end token does.
        ends = [tokenizer.convert_tokens_to_ids(stop) for stop in self.stops if stop in tokenizer.all_special_tokens]
        end = config.eos_token_id
        self.ends = {*ends, *([] if end is None else end if isinstance(end, list) else [end])}
        config.eos_token_id = sorted(self.ends) or None
        self.until = UntilStop(self.stops)
        self.decoding = DecodeStream([], skip_special_tokens=True)
        self.total_tokens, self.ended, self.cancelled = 0, False, False

    def cancel(self) -> None:
        """End before the next token: the client has left."""
        self.cancelled = True

    def generate(self) -> torch.Tensor:
        """The new tokens [T]."""
        if self.cancelled:
            return torch.empty(0, dtype=torch.long)
        with _seed_draws(self.request.get("seed"), self.model.device):
            generated = self.model.generate(
                **self.inputs,
                generation_config=self.config,
                stopping_criteria=StoppingCriteriaList([self]),
            )
        self._show("", end=True)
        if self.ended and self.total_tokens == self.config.max_new_tokens:
            self.config.max_new_tokens += 1  # handlers take as many tokens as asked for as cut off
        return generated[0, self.prompt_length : self.prompt_length + self.total_tokens]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.ended:  # where `generate` looks late, there is a token after the last
            token = int(input_ids[0, -1])
            self.total_tokens += 1
            self._show(self.decoding.step(self.rust_tokenizer, token) or "")
            self.ended = token in self.ends or self.until.stopped
        return torch.full((len(input_ids),), self.ended or self.cancelled, device=input_ids.device)

    def _show(self, text: str, end: bool = False) -> None:
        if visible := self.until.feed(text, end):
            self.pass_on(visible)


def _set_length(config: Any, prompt: list[int], generation: GenerationConfig, request: dict[str, Any]) -> int:
    """Set how many tokens a prompt is continued by, and return its own. Raises `RequestError` where it does not fit."""
    text = next(name for name in TEXTS if name in request)
    if not prompt:
        raise RequestError(text, "has no tokens")
    check_token_ids(text, prompt, config.vocab_size)
    positions = config.max_position_embeddings
    most = positions if config.position == "learned" else max(LONGEST, positions)
    room = most - len(prompt)
    if room < 1:
        raise RequestError(text, f"has {len(prompt):,} tokens; the limit is {most:,} together with the new ones")
    field = next((name for name in LENGTHS if name in request), None)
    if field is not None and request[field] > room:
        raise RequestError(
            field, f"{request[field]} new tokens after a prompt of {len(prompt):,} are more than the limit of {most:,}"
        )
    generation.max_new_tokens = min(DEFAULT_LENGTH, room) if field is None else request[field]
    return len(prompt)


@contextlib.contextmanager
def _seed_draws(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers from a seed in this context, and afterwards as if nothing had been drawn."""
    if seed is None:
        yield
        return
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield
