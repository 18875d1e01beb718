"""Small models and inputs shared by all tests. Everything is fp64 and seeded, so tolerances can be tight.

PyTorch is imported with the tests, not here: the process that hands them out to others has no need of it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start


def __getattr__(name: str) -> Any:
    """What tests import from here."""
    if name.startswith(("_", "pytest")):
        raise AttributeError(name)
    from headwater.testing import small_models

    return getattr(small_models, name)


def random(*shape: int) -> Any:
    import torch

    return torch.randn(shape, dtype=torch.float64)


def teach_llama(text: str, *, positions: int, steps: int, stride: int, seed: int = 0) -> Any:
    """A Llama of bytes that a few steps on every `stride` bytes of the text have taught some of it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
    )
    llama = LlamaForCausalLM(config)
    ids = torch.tensor(list(text.encode()))
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-2)
    for step in range(steps):
        rows = torch.stack([ids[start : start + 64] for start in range(step * 7, len(ids) - 64, stride)])
        llama(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return llama.eval()


@pytest.fixture(scope="session", autouse=True)
def one_thread_and_no_chatter() -> None:
    import torch
    from transformers.utils import logging

    import processes
    from headwater import kernels
    from headwater.kernels import autotune

    processes.ignore_busy_cores()
    os.environ.pop("COLUMNS", None)  # readline sets it, and what commands print would be wrapped
    assert not kernels.are_disabled()  # each process reads HEADWATER_KERNELS once
    # Which kernels generation runs does not depend on a timing, and the user's cache is neither read nor written.
    autotune._time_forms, autotune._get_file = (lambda forms: {}), (lambda threads: None)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the run where a test has left a process behind, or something in the folder for temporary files."""
    tmp_path_factory.getbasetemp()  # pytest's own and multiprocessing's lie where they always do
    multiprocessing.util.get_temp_dir()
    mark = f"HEADWATER_TESTS={secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*mark.split("="))
            patch.setenv("TMPDIR", folder)
            patch.setattr(tempfile, "tempdir", folder)
            patch.setattr(os, "fsync", lambda file: None)  # no test cuts the power, and disks are slow
            yield
        gc.collect()
        until = time.monotonic() + 30
        while (left := marked(mark)) and time.monotonic() < until:
            time.sleep(0.2)
        folders = [name for name in os.listdir(folder) if not name.startswith(OF_OTHERS)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"tests have left processes: {list(left.values())}"
    assert not folders, f"tests have left temporary files: {folders}"


# What libraries keep there until they end: PyTorch compiled code, matplotlib its cache where no home can be written to,
# multiprocessing the socket of each process that reads images, also if it is killed, onnxruntime its session's number.
OF_OTHERS = ("torchinductor_", "matplotlib-", "pymp-", ".ses")


def marked(mark: str) -> dict[int, str]:
    """Processes that have a variable in their environment, or are forks of the one that multiprocessing keeps for that.

    But for those that it keeps for all tests.
    """
    server = forkserver._forkserver._forkserver_pid
    kept = {server, resource_tracker._resource_tracker._pid}
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if (parent == server or mark.encode() in (place / "environ").read_bytes()) and int(place.name) not in kept:
                found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
    return found


class Wanted:
    """What of the tests this call runs."""

    slow = False


def wants_slow(expression: str) -> bool:
    """Whether `-m` with this expression runs tests that are slow."""
    return Expression.compile(expression or "slow").evaluate(lambda name, **options: name == "slow")


def pytest_configure(config: pytest.Config) -> None:
    Wanted.slow = wants_slow(config.option.markexpr)


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.disable()  # nothing that is imported and collected goes away
    if hasattr(session.config, "workerinput"):  # of xdist: this process will run a good part of all tests
        import apart

        apart.begin()
        import processes

        processes.begin()


# What its tests share takes a quarter of a minute to make, and would be made twice if two workers divided them.
FIRST = "training/test_parallel.py"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST not in item.nodeid)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


SPARSE = int(os.environ.get("SPARSE", "3"))


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """`sampled(n)`: of a test's cells every n-th is run, the others are slow; each test begins with another one.

    Of those `make test` runs every third, to take less than four minutes, and `make mutations` all.

    A class may give other numbers for tests that it inherits: `SAMPLED`. Cells that are slow are not even made where
    only others are asked for: there are many times as many.
    """
    yield
    cells, test = metafunc._calls, metafunc.definition
    if (mark := test.get_closest_marker("sampled")) and not test.get_closest_marker("slow"):
        those = sorted((cell for cell in cells if not is_slow(cell)), key=lambda cell: cell.id)
        step = SPARSE * getattr(metafunc.cls, "SAMPLED", {}).get(test.originalname, *mark.args)
        first = zlib.crc32(test.nodeid.rpartition("/")[2].encode()) % step
        for place, cell in enumerate(those):
            if place % step != first % len(those):
                cell.marks.append(pytest.mark.slow.mark)
    if not Wanted.slow:
        cells[:] = [cell for cell in cells if not is_slow(cell)] or cells[:1]


def is_slow(cell: Any) -> bool:
    return any(mark.name == "slow" for mark in cell.marks)


@pytest.fixture(autouse=True)
def seed() -> None:
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed looks for accelerators, which takes a millisecond


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line: arguments -> (exit code, stdout, stderr)."""
    from headwater_lab.cli import main

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headwater", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Inside, the workers of comparisons are forks, which start at once, see `processes`."""
    import headwater_lab.util.workers
    import processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headwater_lab.util.workers, "subprocess", subprocess)
        processes.fork_workers()
        yield


@pytest.fixture
def forked_workers() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of small texts, for all tests: not to be changed."""
    folder = tmp_path_factory.mktemp("texts") / "corpus"
    folder.mkdir()
    for i in range(25):
        (folder / f"{i}.txt").write_text(f"Document {i} says {i * i} and {'na' * (i % 5)}. " * 6)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Gives a folder what `train` would: recipe, folder -> record. Runs that many tests begin with are trained once."""
    from headwater_lab.training.loop import train
    from headwater_lab.training.records import read_record

    runs: dict[str, Path] = {}

    def give(recipe, folder):
        made = recipe.model_dump_json()
        if made not in runs:
            train(recipe, place := tmp_path_factory.mktemp("finished") / "run")
            runs[made] = place
        shutil.copytree(runs[made], folder)
        return read_record(folder)

    return give


@pytest.fixture(scope="session")
def recipe(corpus):
    """Makes recipes of small runs; the arguments are sections to change, e.g. training={"steps": 3}."""
    from headwater_lab.recipe.recipe import parse

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
            "training": {"steps": 12, "batch_size": 4, "warmup_steps": 2, "threads": 1},
            "reporting": {"log_every": 3, "save_every": 4, "evaluate_every": 6, "tensorboard": False},
        }
        for section, fields in changes.items():
            values[section] = values.get(section, {}) | fields if isinstance(fields, dict) else fields
        return parse(values, "test")

    return make
