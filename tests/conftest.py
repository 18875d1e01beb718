"""Small models and inputs shared by all tests. Everything is fp64 and seeded, so tolerances can be tight."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.utils import logging

from headwater.cli import main
from headwater.recipe import parse
from headwater.testing.models import (  # noqa: F401  for the tests
    SIZES,
    VOCAB,
    assert_near,
    build,
    config,
    decode,
    disturb,
    document_positions,
    shared,
    tokens,
)

# Which kernels generation runs does not depend on a timing, and nothing is written to the user's cache.
os.environ["HEADWATER_KERNELS"] = "plain"
torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line: arguments -> (exit code, stdout, stderr)."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headwater", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def corpus(tmp_path):
    """A folder of small texts."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(25):
        (folder / f"{i}.txt").write_text(f"Document {i} says {i * i} and {'na' * (i % 5)}. " * 6)
    return folder


@pytest.fixture
def recipe(corpus):
    """Makes recipes of small runs; the arguments are sections to change, e.g. training={"steps": 3}."""

    def make(**changes):
        values = {
            "name": "small",
            "data": {"kind": "text", "source": str(corpus), "context": 32},
            "model": {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "residual_dropout": 0.1,
                "mechanisms": {"kv_shift": {}, "value_residual": {}},
            },
            "training": {"steps": 12, "batch_size": 4, "accumulate": 2, "warmup_steps": 2, "threads": 1},
            "reporting": {"log_every": 3, "save_every": 4, "evaluate_every": 6, "tensorboard": False},
        }
        for section, fields in changes.items():
            values[section] = values.get(section, {}) | fields if isinstance(fields, dict) else fields
        return parse(values, "test")

    return make
