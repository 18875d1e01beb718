"""What a server says, started by the command, on this machine's own network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import torch
from product import COMMAND, TextConfig, TextModel, byte_tokenizer
from tiny_models import TEXT, set_weights

PROMPTS = ("Hello", "A river rises at its headwater, ", "wörld 水 🌊")
LENGTH = 16


def write_speaker(folder: Path) -> None:
    """A model over bytes that says printable ASCII only."""
    mechanisms = {"kv_shift": {}, "value_residual": {}}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)
    fields = TEXT | ends | dict(vocab_size=257, max_position_embeddings=128, tie_word_embeddings=False)
    model = set_weights(TextModel(TextConfig(**fields, mechanisms=mechanisms))).float()
    with torch.no_grad():
        model.lm_head.weight[:32] = 0
        model.lm_head.weight[127:] = 0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def served() -> dict[str, Any]:
    """The answers of `serve` to /v1/completions, greedy."""
    with tempfile.TemporaryDirectory(prefix="headwater-") as name:
        root = Path(name)
        write_speaker(root / "model")
        environment = os.environ | {"HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *COMMAND, "serve", "model", "--device", "cpu", "--host", "127.0.0.1", "--port", "0"]
        with (root / "log").open("w") as log:
            server = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)
        try:
            address = _address(server, root / "log")
            return {prompt: _complete(address, prompt) for prompt in PROMPTS}
        finally:
            server.terminate()
            server.wait(30)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + 120
    while (match := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text(errors="replace"))) is None:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < end, log.read_text(errors="replace")[-4000:]
        time.sleep(0.1)
    return match[1]


def _complete(address: str, prompt: str) -> dict[str, Any]:
    body = {"model": "model", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0}
    request = Request(f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
        content = json.loads(answer.read())
    choice = content["choices"][0]
    return {"text": choice["text"], "finish_reason": choice["finish_reason"], "usage": content["usage"]}
