"""transformers' own server answers over HTTP, and says what `generate` says."""

import json
import os
import re
import signal
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

import processes
from conftest import build
from headwater import HeadwaterForCausalLM
from headwater.data.tokenizer import byte_tokenizer
from headwater.export import export

if not all(map(find_spec, ("fastapi", "uvicorn", "openai"))):  # transformers' is_serve_available
    pytest.skip("the server's packages are not installed", allow_module_level=True)

SHIFT = {"kv_shift": {}, "value_residual": {}, "skip_layer": {}}
PAGED = {"skip_layer": {}, "value_residual": {}}
SHARED = {"svformer": {}}
PROMPTS = ["Hello", "A river rises at its headwater, ", "wörld 水 🌊", "0"]
LENGTH = 24
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
# The server knows classes only as attributes of transformers (cli/serving/model_manager.py, `_load_model`), also with
# --trust-remote-code, and model types only as registered. `headwater serve` sees to both; transformers' own command
# serves a checkpoint with its code once the config says AutoModelForCausalLM (`exported` below).
FREE_PORT = ["--device", "cpu", "--port", "0"]  # any; the log names it
TRANSFORMERS = [sys.executable, "-m", "transformers.cli.transformers"]


def speaker(mechanisms: dict) -> HeadwaterForCausalLM:
    """A model over bytes that says printable ASCII only: a stream holds back what is not a whole character."""
    model = build(
        mechanisms, vocab_size=257, max_position_embeddings=256, bos_token_id=256, eos_token_id=256, pad_token_id=256
    ).float()
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
        body = dict(max_tokens=LENGTH, temperature=0) | body
        request = Request(f"{self.address}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with self.opener.open(request, timeout=60) as answer:
            return answer.read().decode()

    def models(self) -> list[dict[str, Any]]:
        with self.opener.open(f"{self.address}/v1/models", timeout=60) as answer:
            return json.loads(answer.read())["data"]

    def complete(self, prompt: str, **body: Any) -> str:
        return json.loads(self.post("completions", prompt=prompt, **body))["choices"][0]["text"]

    def stream(self, prompt: str, **body: Any) -> str:
        lines = self.post("completions", prompt=prompt, stream=True, **body).split("\n\n")
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.strip()]
        assert len(chunks) > LENGTH // 2, "that was no stream"
        assert chunks[-1]["finish_reason"] == "length"
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


def test_headwater_serve(tmp_path):
    """Under the name it was given: here a run, of which the newest checkpoint is served."""
    model = speaker(SHIFT)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    model.save_pretrained(checkpoint)
    with_tokenizer(checkpoint)
    name = str(tmp_path / "run")
    process = processes.Command("serve", name, *FREE_PORT)
    with stopped(process):
        server = Server(process, process.files[1])  # uvicorn writes to stderr
        expected = continuation(model, "Hello")
        assert server.complete("Hello") == server.stream("Hello") == server.complete("Hello", model=name) == expected
        assert [one["id"] for one in server.models()] == [name]
        assert json.loads(server.post("completions", prompt="0"))["model"] == name
        with pytest.raises(HTTPError, match="400"):
            server.complete("Hello", model="another")


def test_headwater_serve_refuses_before_it_starts(run, tmp_path):
    assert run("serve", tmp_path / "nothing")[0] == 2
    speaker(SHIFT).save_pretrained(tmp_path / "plain")
    assert "has no tokenizer" in run("serve", tmp_path / "plain")[2]
    with_tokenizer(tmp_path / "plain")
    code, _, err = run("serve", tmp_path / "plain", "--continuous-batching")
    assert code == 2
    assert err.startswith("headwater: kv_shift looks back to raw tokens")


@pytest.mark.slow  # `test_paged.py` has continuous batching without a server
@pytest.mark.parametrize("mechanisms", [PAGED, SHARED], ids=" ".join)
def test_continuous_batching_of_a_materialised_export(continuous, mechanisms):
    model = speaker(mechanisms)
    folder = exported(model, continuous.root / "-".join(mechanisms), materialise=True)
    expected = [continuation(model, prompt) for prompt in PROMPTS]
    assert [continuous.server.complete(prompt, model=str(folder)) for prompt in PROMPTS] == expected
    assert at_once(continuous.server, model=str(folder)) == [text for text in expected for _ in range(2)]
    assert f"{folder}@main, CB: True" in continuous.server.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanisms", "reason"),
    [(SHIFT, "kv_shift.* looks? back to raw tokens"), (PAGED, "load the model with materialise=True")],
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
