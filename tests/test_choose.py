"""Forms of an operation: the clock decides between them, once a machine, and for generation only."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwater import HeadwaterConfig, HeadwaterForCausalLM, kernels
from headwater.kernels import PLAIN, choose
from headwater.kernels.choose import measured, remembered, timed, unmeasured
from headwater.util.errors import HeadwaterError

TIME, FILE = choose._time, choose._file  # for the other tests conftest replaces them


class Clock:
    """Time that passes only where a form says so. `runs` counts what ran."""

    def __init__(self) -> None:
        self.now, self.runs = 0.0, []

    def perf_counter(self) -> float:
        return self.now

    def form(self, name, *seconds):
        """A form that takes these times in turn, again and again."""

        def run() -> None:
            self.now += seconds[self.runs.count(name) % len(seconds)]
            self.runs.append(name)

        return run

    def forms(self, **seconds):
        return lambda: {name: self.form(name, *(s if isinstance(s, tuple) else (s,))) for name, s in seconds.items()}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine on which nothing is known, and whose clock is the test's."""
    clock = Clock()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choose, "FLUSH", 1)
    monkeypatch.setattr(choose, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    forget(monkeypatch)
    clock.folder = tmp_path / "headwater" / "kernels"
    return clock


def forget(monkeypatch):
    """What a new process knows."""
    monkeypatch.setattr(choose, "_known", {})
    monkeypatch.setattr(choose, "_time", TIME)
    monkeypatch.setattr(choose, "_file", FILE)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        (dict(plain=1e-3, trick=2e-3), PLAIN),  # as on a machine that the trick was not found on
        (dict(plain=1e-3, trick=0.95e-3), PLAIN),  # no clear win
        (dict(plain=1e-3, trick=0.5e-3), "trick"),
        (dict(plain=1e-3, trick=0.5e-3, other=0.4e-3), "other"),
        (dict(plain=1e-3, trick=0.5e-3, slow=9e-3), "trick"),
        (dict(plain=1e-3), PLAIN),
        (dict(plain=(9e-3, 9e-3, 9e-3, 1e-3), trick=2e-3), PLAIN),  # disturbed: whatever the trick's time
    ],
)
def test_only_a_clear_win_over_plain_is_taken(machine, seconds, best):
    found = timed(("sum", 3), machine.forms(**seconds))
    assert found.best == best
    assert found.seconds.get(best, 0) <= 1.05 * found.seconds.get(PLAIN, math.inf)


def test_a_timing_is_kept_for_this_process_and_the_next(machine, monkeypatch):
    forms = machine.forms(plain=2e-3, trick=1e-3)
    assert timed(("sum", torch.float32, 3), forms).best == "trick"
    ran = len(machine.runs)
    assert timed(("sum", torch.float32, 3), forms).best == "trick"
    forget(monkeypatch)
    assert timed(("sum", torch.float32, 3), forms).seconds == pytest.approx({PLAIN: 2e-3, "trick": 1e-3})
    assert len(machine.runs) == ran
    (file,) = machine.folder.iterdir()
    kept = json.loads(file.read_text())
    assert kept["torch"] == torch.__version__
    assert kept["cpu"] == choose.cpu()
    assert list(kept["seconds"]) == ["sum float32 3"]
    timed(("sum", torch.float32, 4), forms)
    assert len(machine.runs) > ran
    assert list(json.loads(file.read_text())["seconds"]) == ["sum float32 3", "sum float32 4"]


def test_a_disturbed_timing_is_not_kept(machine, monkeypatch):
    timed(("sum",), machine.forms(plain=(1e-3, 9e-3), trick=1e-4))
    assert not machine.folder.exists()
    forget(monkeypatch)
    assert timed(("sum",), machine.forms(plain=1e-3, trick=1e-4)).best == "trick"


def test_another_processor_version_or_number_of_threads_is_timed_anew(machine, monkeypatch):
    def times() -> int:
        before = len(machine.runs)
        forget(monkeypatch)
        timed(("sum",), machine.forms(plain=2e-3, trick=1e-3))
        return len(machine.runs) - before

    assert times() > 0
    assert times() == 0
    with monkeypatch.context() as other:
        other.setattr(choose, "_processor", lambda: {"model name": "Another"})
        assert times() > 0
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "9.9")
        assert times() > 0
    with monkeypatch.context() as other:
        other.setattr(torch, "get_num_threads", lambda: 77)
        assert times() > 0
    with monkeypatch.context() as other:
        other.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert times() > 0
    assert len(list(machine.folder.iterdir())) == 5
    assert times() == 0


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\x00\xff",
        b"[]",
        b"[" * 100_000,
        b'{"seconds": 3}',
        b'{"seconds": {"sum": 3}}',
        b'{"seconds": {"sum": {"plain": "fast", "trick": 1e-9}}}',
        b'{"seconds": {"sum": {"plain": NaN, "trick": -1.0}}}',
        b'{"seconds": {"sum": {"plain": 1.0}}}',
        b'{"seconds": {"sum": {"plain": 1.0, "removed": 0.1}}}',
    ],
    ids=lambda damage: damage[:60].decode(errors="replace"),
)
def test_a_damaged_file_is_timed_anew(machine, monkeypatch, damage):
    forms = machine.forms(plain=1e-3, trick=2e-3)
    timed(("sum",), forms)
    (file,) = machine.folder.iterdir()
    file.write_bytes(damage)
    forget(monkeypatch)
    assert timed(("sum",), forms).seconds == pytest.approx({PLAIN: 1e-3, "trick": 2e-3})
    assert json.loads(file.read_text())["seconds"]["sum"] == pytest.approx({PLAIN: 1e-3, "trick": 2e-3})


@pytest.mark.parametrize("place", ["a file", "not writable", "no home"])
def test_without_a_place_for_the_file_the_process_remembers(machine, tmp_path, monkeypatch, place):
    if place == "a file":
        (tmp_path / "headwater").write_text("")
    elif place == "not writable":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which counts as unset

        def no_home(self):
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(choose.Path, "expanduser", no_home)
    forms = machine.forms(plain=2e-3, trick=1e-3)
    assert timed(("sum",), forms).best == "trick"
    ran = len(machine.runs)
    assert timed(("sum",), forms).best == "trick"
    assert len(machine.runs) == ran


def test_the_file_is_whole_or_absent(machine, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert timed(("sum",), machine.forms(plain=2e-3, trick=1e-3)).best == "trick"
    assert list(machine.folder.iterdir()) == []


# Who may choose


def may_choose() -> bool:
    return remembered() is not None


@torch.no_grad()
def test_nobody_chooses_but_generation():
    assert not may_choose()
    with measured():
        assert may_choose()
        with torch.enable_grad():
            assert not may_choose()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not may_choose()
        with unmeasured():
            assert not may_choose()
        assert not torch.compile(lambda x: x + may_choose(), backend="eager", fullgraph=True)(torch.zeros(1))
    with unmeasured(), measured():
        assert not may_choose()
    with FlopCounterMode(display=False), measured():
        assert not may_choose()
    with torch.autograd.forward_ad.dual_level(), measured():
        assert not may_choose()
    torch.use_deterministic_algorithms(True)
    with measured():
        assert not may_choose()
    torch.use_deterministic_algorithms(False)
    assert not torch.func.vmap(inside)(torch.zeros(1))


def inside(x):
    with measured():
        return x + may_choose()


def test_the_variable_switches_it_off_and_knows_its_values(monkeypatch):
    with torch.no_grad():
        for value, allowed in {"plain": False, "measured": True, "": True}.items():
            monkeypatch.setattr(kernels, "_off", None)
            monkeypatch.setenv("HEADWATER_KERNELS", value)
            with measured():
                assert may_choose() is allowed
    monkeypatch.setattr(kernels, "_off", None)
    monkeypatch.setenv("HEADWATER_KERNELS", "fast")
    with pytest.raises(HeadwaterError, match=r"HEADWATER_KERNELS.*plain"), measured():
        pass


# Whole models


def model(**changes):
    sizes = dict(vocab_size=300, hidden_size=256, num_hidden_layers=2, num_attention_heads=4)
    return HeadwaterForCausalLM(HeadwaterConfig(**sizes | changes)).eval()


def generated(model, tokens=6):
    return model.generate(
        torch.arange(9)[None], max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_generation_times_and_other_calls_do_not(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget(monkeypatch)
    ours, ids = model().to(dtype), torch.arange(9)[None]
    with torch.no_grad():
        ours(ids)
    ours(ids, labels=ids).loss.backward()
    assert choose._known == {}
    expected = generated(ours)
    operations = {operation for _, operation in choose._known}
    assert ("linear", dtype, 256, 256, 1) in operations
    assert any(operation[:2] == ("attention", dtype) for operation in operations) is (dtype is torch.bfloat16)
    again = generated(ours)
    assert torch.equal(again.sequences, expected.sequences)
    assert all(map(torch.equal, again.logits, expected.logits))


@pytest.mark.parametrize("mode", ["plain", "slow"])
def test_generation_is_plain_pytorchs_where_no_trick_wins(mode, machine, monkeypatch):
    ours = model()
    with unmeasured():
        expected = generated(ours)
    monkeypatch.setattr(kernels, "_off", mode == "plain")
    from headwater.kernels import linear

    ran = []

    def slow(x, *args):
        machine.now += 1e-3
        ran.append(x)
        return torch.empty(0)

    monkeypatch.setattr(linear, "_FP32", {PLAIN: linear.linear, "onednn": slow})
    monkeypatch.setattr(linear, "_FP32_ROW", {PLAIN: linear.linear, "onednn": slow, "pieces": slow})
    # On this clock nothing but the tricks takes time.
    made = generated(ours)
    assert bool(ran) is (mode == "slow")
    assert all(map(torch.equal, made.logits, expected.logits))


def test_a_trick_that_wins_is_taken(machine, monkeypatch):
    from headwater.kernels import linear

    def slow(x, weight, bias):
        machine.now += 1e-3
        return torch.nn.functional.linear(x, weight, bias)

    ran = []

    def fast(x, weight, bias):
        machine.now += 1e-4
        ran.append(weight.shape)
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(linear, "_FP32", {PLAIN: slow, "onednn": fast})
    monkeypatch.setattr(linear, "_FP32_ROW", {PLAIN: slow, "onednn": fast, "pieces": slow})
    generated(model())
    counted = len(ran)
    assert {times.best for times in choose._known.values()} == {"onednn"}
    generated(model())
    maps = 2 * 7 + 1
    assert len(ran) - counted == 6 * maps


EXPORTED = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "headwater" not in sys.modules
made = model.generate(torch.arange(9)[None], max_new_tokens=3, do_sample=False)
print(made.tolist())
"""


@pytest.mark.slow
def test_exported_code_chooses_too(tmp_path, monkeypatch):
    from headwater.config import auto_map

    ours, folder = model(), tmp_path / "exported"
    auto_map.register(type(ours), "AutoModelForCausalLM")
    ours.save_pretrained(folder)
    auto_map._registered.clear()
    env = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
    }
    done = subprocess.run([sys.executable, "-c", EXPORTED, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with unmeasured():
        expected = ours.generate(torch.arange(9)[None], max_new_tokens=3, do_sample=False)
    assert done.stdout.strip() == str(expected.tolist())
    assert {place.name for place in tmp_path.iterdir()} <= {"exported", "headwater", "hf"}
