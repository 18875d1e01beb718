"""The fields of requests in the OpenAI form: their valid values, and those that the server refuses.

A field is honoured or refused by name, never ignored. A field that is listed with a single value is accepted only with
that value, because it changes nothing. `null` is the same as leaving a field out.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from headwater.util.errors import HeadwaterError, shown

# Maximum bytes of a request's body, and maximum numbers of prompts and of stop texts.
MOST_BYTES, MOST_PROMPTS, MOST_STOPS = 2**22, 128, 16


class RequestError(HeadwaterError):
    """A request that the server refuses. field: the wrong field. status: the HTTP status."""

    def __init__(self, field: str | None, message: str, status: int = 400) -> None:
        super().__init__(message if field is None else f"{field}: {message}")
        self.field, self.status = field, status


def error_body(message: str, field: str | None = None, status: int = 400) -> dict[str, Any]:
    """Write an error in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = "model_not_found" if field == "model" and status == 404 else None
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _not_almost_greedy(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise ValueError("below 0.01, sampling is almost greedy; use 0 for greedy decoding")
    return temperature


def _stop_texts(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise ValueError("should be a text, or a list of texts, none of them empty")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"should have at most {MOST_STOPS} texts")
    return stops


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _check_prompts(prompt: Any) -> list[str | list[int]]:
    prompts = [prompt] if isinstance(prompt, str) or _token_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("should be a text, a list of token ids, or a list of these that is not empty")
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"should have at most {MOST_PROMPTS} texts")
    if not (all(isinstance(prompt, str) for prompt in prompts) or all(map(_token_ids, prompts))):
        raise ValueError("should have texts alone, or lists of token ids alone, none of them empty")
    return prompts


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None}


Zero = Annotated[float, Field(ge=0, le=0)] | None


class StreamOptions(_Fields):
    include_usage: bool = False


class Sampling(_Fields):
    """Fields of completions and chats. top_k, min_p and repetition_penalty are as in transformers' `generate`."""

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_not_almost_greedy)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None  # a label for the client's own records, like metadata
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    n: Literal[1] | None = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    stop: Annotated[Any, AfterValidator(_stop_texts)] = None
    stream_options: StreamOptions | None = None


class Completion(Sampling):
    prompt: Annotated[Any, AfterValidator(_check_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None


class TextFormat(_Fields):
    type: Literal["text"]


class TextPart(_Fields):
    type: Literal["text", "input_text", "output_text"]
    text: str


def _check_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("should be a text, or a list of parts of type text")
    return "\n".join(TextPart.model_validate(item).text for item in content)  # as vLLM joins them


class Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Any, AfterValidator(_check_content)]
    # OpenAI's clients send these back with earlier answers.
    type: Literal["message"] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Chat(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None  # without tools there is none
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: TextFormat | None = None


# Each route's field for the number of new tokens, and its field for the text.
LENGTHS = ("max_completion_tokens", "max_tokens")
TEXTS = ("prompt", "messages")


def read_json(body: bytes) -> dict[str, Any]:
    """Read the fields of a request. Raises `RequestError` for a body that is not a JSON object of valid text."""
    if len(body) > MOST_BYTES:
        raise RequestError(None, f"The request's body has {len(body):,} bytes; at most {MOST_BYTES:,} are read.")
    try:
        content = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(None, f"The request's body is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise RequestError(None, "The request's body should be a JSON object of fields.")
    for name, value in content.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(ascii(name)[1:-1], "has a lone surrogate, which is not valid text") from error
        except RecursionError as error:
            raise RequestError(name, "has too many lists or objects inside each other") from error
    return content


def read_fields(fields: type[Sampling], content: dict[str, Any]) -> dict[str, Any]:
    """Check a request's fields, and leave out those that are null. Raises `RequestError`, which names the field."""
    try:
        request = fields.model_validate(content).model_dump(exclude_none=True)
    except ValidationError as error:
        raise _describe_refusal(error) from error
    if "stream_options" in request and not request["stream"]:
        raise RequestError("stream_options", "applies to streams; leave it out, or set stream to true")
    if request["stream"] and len(request.get("prompt", ())) > 1:
        raise RequestError("prompt", "a stream has one answer; send one prompt, or leave out stream")
    if "max_tokens" in request and "max_completion_tokens" in request:
        raise RequestError("max_tokens", "is the old name of max_completion_tokens; leave one of them out")
    return request


def _describe_refusal(error: ValidationError) -> RequestError:
    """Describe the first wrong field in a sentence."""
    detail = error.errors(include_url=False)[0]
    field = ".".join(str(step) for step in detail["loc"]) or None
    kind, values = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        message = "is not a field that this server reads; leave it out"
    elif kind == "literal_error":
        message = f"only {values['expected']} is supported by this server"
    elif kind == "missing":
        message = "is missing"
    elif kind == "value_error":
        message = str(values["error"])
        message = message if "validation error" not in message else "should be a list of parts of type text"
    else:
        message = detail["msg"].replace("Input should", "should")
    return RequestError(field, f"{message}, not {shown(detail['input'])}" if kind.endswith("equal") else message)
