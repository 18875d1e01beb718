"""The server, and transformers' own, answer over HTTP, and say what `generate` says."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import processes
from conftest import build
from headwater import HeadwaterForCausalLM
from headwater.conversion.export import export
from headwater.util.errors import HeadwaterError
from headwater_lab.data.tokenizer import byte_tokenizer

if not all(map(find_spec, ("fastapi", "uvicorn", "openai"))):  # transformers' is_serve_available
    pytest.skip("the server's packages are not installed", allow_module_level=True)

from headwater_lab.serving.server import serve_checkpoint

SHIFT = {"kv_shift": {}, "value_residual": {}, "skip_layer": {}}
PAGED = {"skip_layer": {}, "value_residual": {}}
SHARED = {"svformer": {}}
PROMPTS = ["Hello", "A river rises at its headwater, ", "wörld 水 🌊", "0"]
LENGTH = 24
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
# The server knows classes only as attributes of transformers (cli/serving/model_manager.py, `_load_model`), also with
# --trust-remote-code, and model types only as registered. transformers' own command
# serves a checkpoint with its code once the config says AutoModelForCausalLM (`exported` below).
FREE_PORT = ["--device", "cpu", "--port", "0"]  # any; the log names it
TRANSFORMERS = [sys.executable, "-m", "transformers.cli.transformers"]


def speaker(mechanisms: dict, **fields: Any) -> HeadwaterForCausalLM:
    """A model over bytes that says printable ASCII only: a stream holds back what is not a whole character."""
    ends = dict(bos_token_id=256, eos_token_id=256, pad_token_id=256)
    model = build(mechanisms, vocab_size=257, max_position_embeddings=256, **ends, **fields).float()
    with torch.no_grad():
        model.lm_head.weight[:32] = 0
        model.lm_head.weight[127:] = 0
    return model


def continuation(model: HeadwaterForCausalLM, prompt: str, **options: Any) -> str:
    tokenizer = byte_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=LENGTH, do_sample=False, tokenizer=tokenizer, **options)
    text = tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
    assert options or (len(text) == LENGTH and len(set(text)) > 5), "such a text would hide an error"
    return text


def with_tokenizer(folder: Path) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def exported(model: HeadwaterForCausalLM, folder: Path, materialise: bool = False) -> Path:
    """An export whose config names a class that the server finds; with it, the class comes from the folder."""
    path = export(model, folder, materialise) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["AutoModelForCausalLM"]}))
    return with_tokenizer(folder)


class Server:
    """A running server: `process`, its `log`, and requests to it."""

    def __init__(self, process: subprocess.Popen | processes.Command, log: Path) -> None:
        self.process, self.log, self.opener = process, log, build_opener(ProxyHandler({}))
        self.address = self.wait_for(r"running on (http://(?:127\.0\.0\.1|localhost):\d+)")[1]

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, pattern: str, start: int = 0) -> re.Match[str]:
        """Where `pattern` stands in the log, from character `start` on."""
        end = time.monotonic() + 120
        while (found := re.compile(pattern).search(self.said(), start)) is None:
            assert self.process.poll() is None, self.said()[-4000:]
            assert time.monotonic() < end, self.said()[-4000:]
            time.sleep(0.1)
        return found

    def post(self, path: str, **body: Any) -> str:
        """None leaves a field out."""
        body = {
            name: value for name, value in (dict(max_tokens=LENGTH, temperature=0) | body).items() if value is not None
        }
        request = Request(f"{self.address}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with self.opener.open(request, timeout=60) as answer:
            return answer.read().decode()

    def models(self) -> list[dict[str, Any]]:
        with self.opener.open(f"{self.address}/v1/models", timeout=60) as answer:
            return json.loads(answer.read())["data"]

    def complete(self, prompt: str, **body: Any) -> str:
        return json.loads(self.post("completions", prompt=prompt, **body))["choices"][0]["text"]

    def stream(self, prompt: str, ends: str | None = "length", **body: Any) -> str:
        lines = self.post("completions", prompt=prompt, stream=True, **body).split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line.strip()]
        chunks = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
        assert len(chunks) > LENGTH // 2 or ends != "length", "that was no stream"
        assert chunks[-1]["finish_reason"] == ends or ends is None
        return "".join(chunk["text"] for chunk in chunks)


@contextmanager
def serve(root: Path, *arguments: Any) -> Iterator[Server]:
    """transformers' own."""
    log = root / "server.log"
    environment = os.environ | dict(HF_HOME=str(root / "home"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    options = [*FREE_PORT, "--host", "127.0.0.1"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*TRANSFORMERS, "serve", *map(str, arguments), *options], env=environment, stdout=file, stderr=file
        )
    with stopped(process):
        yield Server(process, log)


@contextmanager
def stopped(process: subprocess.Popen | processes.Command) -> Iterator[None]:
    """At the end the process is."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except (subprocess.TimeoutExpired, TimeoutError):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server with the code from the checkpoint, which continues one prompt after the other."""
    root, model = tmp_path_factory.mktemp("sequential"), speaker(SHIFT)
    with serve(root, exported(model, root / "exported"), "--trust-remote-code") as server:
        expected = {prompt: continuation(model, prompt) for prompt in PROMPTS}
        assert len(set(expected.values())) == len(PROMPTS)
        yield SimpleNamespace(server=server, model=model, expected=expected, home=root / "home")


@pytest.fixture(scope="module")
def continuous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server with continuous batching, which loads whatever a request names. It would fill the memory if let."""
    root = tmp_path_factory.mktemp("continuous")
    little = ["--cb-num-blocks", 64, "--cb-max-batch-tokens", 256]
    with serve(root, "--continuous-batching", *little, "--trust-remote-code") as server:
        yield SimpleNamespace(server=server, root=root)


def at_once(server: Server, **body: Any) -> list[str]:
    """Each prompt twice, whole and as a stream, all together."""
    with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        calls = [pool.submit(ask, prompt, **body) for prompt in PROMPTS for ask in (server.complete, server.stream)]
        return [call.result() for call in calls]


@pytest.mark.slow
def test_completions_are_those_of_generate(sequential):
    for prompt, expected in sequential.expected.items():
        answer = json.loads(sequential.server.post("completions", prompt=prompt))
        assert answer["choices"] == [dict(text=expected, index=0, finish_reason="length")]
        size = len(prompt.encode())
        assert answer["usage"] == dict(prompt_tokens=size, completion_tokens=LENGTH, total_tokens=size + LENGTH)
        assert sequential.server.stream(prompt) == expected
    assert list(sequential.home.rglob("headwater_nn_attention.py")), "not the code from the checkpoint"


@pytest.mark.slow
def test_requests_at_once_do_not_mix(sequential):
    assert at_once(sequential.server) == [text for text in sequential.expected.values() for _ in range(2)]


@pytest.mark.slow
def test_stop_ends_a_completion(sequential):
    stop = sequential.expected["Hello"][9:11]
    expected = continuation(sequential.model, "Hello", stop_strings=[stop])
    assert expected.endswith(stop)
    assert len(expected) < LENGTH
    assert sequential.server.complete("Hello", stop=[stop]) == expected


@pytest.mark.slow
def test_chat_with_a_template(sequential):
    messages = [dict(role="system", content="Be short."), dict(role="user", content="Who?")]
    expected = continuation(sequential.model, "<system>Be short.<user>Who?<assistant>")
    answer = json.loads(sequential.server.post("chat/completions", messages=messages))
    assert answer["choices"][0]["message"]["content"] == expected


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """`headwater serve` of a run, under the name it was given; its newest checkpoint has learned positions."""
    root, model = tmp_path_factory.mktemp("served"), speaker(SHIFT, position="learned")
    checkpoint = root / "run" / "checkpoints" / "step-3"
    model.save_pretrained(checkpoint)
    with_tokenizer(checkpoint)
    name = str(root / "run")
    process = processes.Command("serve", name, *FREE_PORT)
    with process.folder, stopped(process):
        yield SimpleNamespace(server=Server(process, process.files[1]), model=model, name=name)  # uvicorn uses stderr


def refused(server: Server, path: str, status: int = 400, /, **body: Any) -> str:
    """The message of an error in OpenAI's form."""
    with pytest.raises(HTTPError) as failed:
        server.post(path, **body)
    content = json.loads(failed.value.read())
    assert failed.value.code == status, content
    assert set(content["error"]) == {"message", "type", "param", "code"}
    return content["error"]["message"]


def choices(server: Server, **body: Any) -> list[str]:
    return [choice["text"] for choice in json.loads(server.post("completions", **body))["choices"]]


def test_headwater_serve(served):
    server, name, expected = served.server, served.name, continuation(served.model, "Hello")
    assert server.complete("Hello") == server.stream("Hello") == server.complete("Hello", model=name) == expected
    assert [one["id"] for one in server.models()] == [name]
    assert json.loads(server.post("completions", prompt="0"))["model"] == name
    for path in GOOD:
        assert "'another'" in refused(server, path, 404, **GOOD[path], model="another")
    server.wait_for("HTTP 404: .*this server has only .*, not 'another'")


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host"])
def test_an_address_that_cannot_be_used_is_refused_before_the_model_is_loaded(host, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(HeadwaterError, match=f"Port {port} of '{host}' cannot be used: [^(]*; choose another."):
            serve_checkpoint(tmp_path, host, port, "cpu", None)


def test_a_plain_folder_of_transformers_is_served(tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes = dict(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=256)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr("uvicorn.run", lambda app, **options: served.append(app))
    served: list = []
    serve_checkpoint(tmp_path, "127.0.0.1", 0, "cpu", None)
    assert served


CHATS = {"messages": [dict(role="user", content="Who?")]}


def test_temperature_and_seed_sample(served):
    """At 0 the text is greedy; above, it follows the seed alone."""
    server, greedy = served.server, continuation(served.model, "Hello")[:8]
    hot = dict(prompt="Hello", temperature=2, max_tokens=8)
    one, again, other = (server.complete(**hot, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert len({one, other, greedy}) == 3
    assert server.stream(**hot, seed=1, ends=None) == one
    assert server.complete(**hot | {"temperature": None}, seed=1) != greedy, "OpenAI's default is 1"
    assert server.complete(**hot, top_k=1) == server.complete(**hot, top_p=0.0) == greedy
    assert server.complete(**hot) != server.complete(**hot), "a seed outlives its request"
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: server.complete(**hot, seed=1), range(4))) == {one}


def test_a_stop_text_is_not_part_of_the_answer(served):
    """Neither whole nor as a stream, wherever it begins; all characters are tokens of their own here."""
    server, text = served.server, continuation(served.model, "Hello")
    for start, end in ((5, 6), (9, 12), (LENGTH - 3, LENGTH)):
        stop = text[start:end]
        expected = text[: text.index(stop)]
        for stops in (stop, [stop], ["\0", stop]):
            answer = json.loads(server.post("completions", prompt="Hello", stop=stops))
            assert answer["choices"] == [dict(text=expected, index=0, finish_reason="stop")]
        assert server.stream("Hello", stop=stop, ends="stop") == expected
    assert server.stream("Hello", stop=[text[-1] + "\0"]) == text, "what was held back is lost"


def test_several_prompts(served):
    server, model = served.server, served.model
    texts = [continuation(model, prompt) for prompt in PROMPTS[:2]]
    assert choices(server, prompt=PROMPTS[:2]) == texts
    assert choices(server, prompt=[list(prompt.encode()) for prompt in PROMPTS[:2]]) == texts
    assert choices(server, prompt=list(b"Hello")) == texts[:1]
    answer = json.loads(server.post("completions", prompt=["Hello", "0"]))
    assert answer["usage"] == dict(prompt_tokens=6, completion_tokens=2 * LENGTH, total_tokens=6 + 2 * LENGTH)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    start = torch.tensor([[256]])
    expected = model.generate(start, max_new_tokens=LENGTH, do_sample=False)
    assert server.complete("") == byte_tokenizer().decode(expected[0, 1:], skip_special_tokens=True)


def test_a_stream_ends_as_openai_says(served):
    asked = dict(prompt="Hello", stream=True)
    *events, end = (
        served.server.post("completions", **asked, stream_options={"include_usage": True}).strip().split("\n\n")
    )
    assert end == "data: [DONE]"
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == LENGTH
    assert not any("usage" in chunk for chunk in chunks)
    assert "usage" not in served.server.post("completions", **asked)


REFUSED = {
    "completions": [
        *[{"temperature": value} for value in (-1, 1e-9, 3, "1", True, 10**400)],
        *[{"top_p": value} for value in (2, -0.1)],
        *[{"top_k": value} for value in (-1, 2.5)],
        *[{"max_tokens": value} for value in (0, -1, 10**9, 252, 10**30, "8")],
        *[{"prompt": value} for value in (None, 5, [], [[]], [257], [-1], [10**30], ["a", 5], "x" * 300, {})],
        *[{"stop": value} for value in ("", [""], 5, ["a"] * 17)],
        *[{"n": value} for value in (0, 2, 1.5)],
        {"best_of": 3},
        {"echo": True},
        {"logprobs": 2},
        {"suffix": "x"},
        {"seed": 2**63},
        {"frequency_penalty": 1},
        {"generation_config": "{}"},
        {"max_completion_tokens": 5},
        {"nope": 1},
        {"model": 5},
        {"stream_options": {"include_usage": True}},
        {"prompt": ["a", "b"], "stream": True},
    ],
    "chat/completions": [
        *[{"messages": value} for value in (None, [], "x", [5], [{"role": "user"}, {"role": "x"}])],
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"max_completion_tokens": 0, "max_tokens": None},
        {"reasoning_effort": "high"},
        {"prompt": "x"},
    ],
}
GOOD = {
    "completions": {"prompt": "Hello"},
    "chat/completions": CHATS,
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_field_that_cannot_be_honoured_is_named(served, path):
    for fields in REFUSED[path]:
        field = next(iter(fields))
        assert refused(served.server, path, **GOOD[path] | fields).startswith(field), fields
    assert served.server.complete("Hello") == continuation(served.model, "Hello")
    assert "Traceback" not in served.server.said()


@pytest.mark.parametrize("path", REFUSED)
def test_a_body_that_is_no_request_is_refused(served, path):
    bodies = (b"", b"{", b"[]", b"null", b"5", b"\xff", b'{"model":5}', b'{"a":NaN}', b'{"n":1,"n":1}', b"[" * 10**5)
    for body in (*bodies, b'{"prompt":"\\ud800"}', b'{"\\ud800":1}', b"9" * 10**5, b" " * (2**22 + 1)):
        request = Request(f"{served.server.address}/v1/{path}", body)
        with pytest.raises(HTTPError) as failed:
            served.server.opener.open(request, timeout=60)
        assert failed.value.code == 400, body[:20]
        assert json.loads(failed.value.read())["error"]["message"]


def test_a_streams_role_is_sent_once(served):
    *events, _ = served.server.post("chat/completions", **CHATS, stream=True).strip().split("\n\n")
    first, *pieces, last = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert (first, last) == ({"role": "assistant", "content": ""}, {})
    expected = continuation(served.model, "<user>Who?<assistant>")
    assert "".join(piece["content"] for piece in pieces) == expected
    assert not any("role" in piece for piece in pieces)


def test_a_model_is_shown_by_its_name(served):
    with served.server.opener.open(f"{served.server.address}/v1/models/{served.name}", timeout=60) as answer:
        assert json.loads(answer.read()) == served.server.models()[0]


def test_routes_that_are_not_offered(served):
    for path in ("../load_model", "../reset", "audio/transcriptions", "systemone", "nothing"):
        assert "is not offered" in refused(served.server, path, 404, model=served.name)


def test_chat(served):
    """As generate continues the template's text; a stop text, and no stream unless asked for."""
    server = served.server
    expected = continuation(served.model, "<user>Who?<assistant>")
    answer = json.loads(server.post("chat/completions", **CHATS))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [expected]
    parts = [dict(role="user", content=[dict(type="text", text="Who?")])]
    answer = json.loads(server.post("chat/completions", messages=parts, stop=expected[5:7]))
    assert answer["choices"][0]["message"]["content"] == expected[: expected.index(expected[5:7])]


@pytest.mark.slow
def test_openai_client(served):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.server.address}/v1", api_key="none", max_retries=0, timeout=60)
    asked = dict(model=served.name, max_tokens=LENGTH, temperature=0)
    expected = continuation(served.model, "<user>Who?<assistant>")
    answer = client.chat.completions.create(**CHATS, **asked)
    assert answer.choices[0].message.content == expected
    spoken = [*CHATS["messages"], answer.choices[0].message, dict(role="user", content="Why?")]
    assert client.chat.completions.create(messages=spoken, **asked).choices[0].message.content
    options = dict(stream=True, stream_options={"include_usage": True}, stop=["\0"])
    chunks = list(client.chat.completions.create(**CHATS, **asked, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == LENGTH
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.completions.create(prompt="Hello", logprobs=3, **asked)
    with pytest.raises(openai.NotFoundError, match="another"):
        client.completions.create(prompt="Hello", **asked | {"model": "another"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_server(served, stream):
    """The next request need not wait until the first has all its tokens."""
    import socket

    host, port = served.server.address.removeprefix("http://").split(":")
    body = json.dumps(dict(prompt=["Hello"] * (1 if stream else 100), max_tokens=240, stream=stream)).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        time.sleep(0.2)
    begun = time.monotonic()
    assert served.server.complete("Hello", max_tokens=1)
    assert time.monotonic() - begun < 10, "100 answers of 240 tokens take longer"


@pytest.mark.slow  # the answers have 20 seconds
def test_a_server_that_is_stopped_ends_long_answers(tmp_path):
    """An answer under way is refused in OpenAI's form, and neither it nor a client that left writes a traceback."""
    speaker(SHIFT).save_pretrained(tmp_path / "base")
    with_tokenizer(tmp_path / "base")
    process = processes.Command("serve", str(tmp_path / "base"), *FREE_PORT)
    with process.folder, stopped(process), ThreadPoolExecutor(2) as pool:
        server = Server(process, process.files[1])
        long = dict(prompt="Hello", max_tokens=60000, temperature=0)
        with pytest.raises(TimeoutError):
            server.opener.open(f"{server.address}/v1/completions", json.dumps(long).encode(), timeout=1)
        assert server.complete("Hello", max_tokens=1)
        waiter = pool.submit(refused, server, "completions", 503, **long)
        stream = pool.submit(server.post, "completions", stream=True, **long)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert "is stopping" in waiter.result(60)
        assert stream.exception(60) is not None or "[DONE]" not in str(stream.result())
        process.wait(30)
        assert "Traceback" not in (log := server.said()), log
        assert "never retrieved" not in log, log


def test_a_model_without_a_chat_template_says_so(tmp_path):
    from headwater_lab.serving.requests import RequestError
    from headwater_lab.serving.server import encode_chat

    with pytest.raises(RequestError, match=r"messages: .*no chat template"):
        encode_chat(byte_tokenizer(), CHATS)
    speaker(SHIFT).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    process = processes.Command("serve", str(tmp_path / "base"), *FREE_PORT)
    with process.folder, stopped(process):
        server = Server(process, process.files[1])
        assert "no chat template: chats are answered with HTTP 400. Use /v1/completions, or add" in server.said()
        with pytest.raises(HTTPError, match="400") as error:
            server.post("chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert "no chat template; use /v1/completions" in error.value.read().decode()


def test_headwater_serve_refuses_before_it_starts(run, tmp_path):
    assert run("serve", tmp_path / "nothing")[0] == 2
    speaker(SHIFT).save_pretrained(tmp_path / "plain")
    assert "has no tokenizer" in run("serve", tmp_path / "plain")[2]
    with_tokenizer(tmp_path / "plain")
    code, _, err = run("serve", tmp_path / "plain", "--continuous-batching")
    assert code == 2
    assert err.startswith("headwater: There is no option --continuous-batching with --engine transformers")
    assert "--dtype no is not a PyTorch dtype" in run("serve", tmp_path / "plain", "--dtype", "no")[2]


@pytest.mark.slow  # `test_paged.py` has continuous batching without a server
@pytest.mark.parametrize("mechanisms", [PAGED, SHARED], ids=" ".join)
def test_continuous_batching_of_a_materialised_export(continuous, mechanisms):
    model = speaker(mechanisms)
    folder = exported(model, continuous.root / "-".join(mechanisms), materialise=True)
    expected = [continuation(model, prompt) for prompt in PROMPTS]
    assert [continuous.server.complete(prompt, model=str(folder)) for prompt in PROMPTS] == expected
    assert at_once(continuous.server, model=str(folder)) == [text for text in expected for _ in range(2)]
    assert re.search(rf"{re.escape(str(folder))}(@main)?, CB: True", continuous.server.said())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanisms", "reason"),
    [
        (SHIFT, "kv_shift: an engine with paged attention lacks the raw tokens"),
        (PAGED, "load the model with materialise=True"),
    ],
    ids=["kv_shift", "not materialised"],
)
def test_continuous_batching_refuses_what_it_would_answer_wrongly(continuous, mechanisms, reason):
    """transformers tells the client only that it failed; the reason is in the server's log."""
    folder = exported(speaker(mechanisms), continuous.root / f"refused-{'-'.join(mechanisms)}")
    for ask in (continuous.server.complete, continuous.server.stream):
        before = len(continuous.server.said())
        with pytest.raises(HTTPError, match="500"):
            ask("Hello", model=str(folder))
        continuous.server.wait_for(f"HeadwaterError: .*{reason}", before)  # comes after the answer
    assert continuous.server.process.poll() is None
