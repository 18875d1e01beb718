"""Forms of an operation: the clock decides between them, once a machine, and for generation only."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwater import HeadwaterConfig, HeadwaterForCausalLM, kernels
from headwater.kernels import PLAIN, autotune
from headwater.kernels.autotune import allow_autotuning, find_fastest, forbid_autotuning, get_choices
from headwater.util.errors import HeadwaterError

TIME, FILE = autotune._time_forms, autotune._get_file  # for the other tests conftest replaces them


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
    monkeypatch.setattr(autotune, "FLUSH", 1)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    forget(monkeypatch)
    clock.folder = tmp_path / "headwater" / "kernels"
    return clock


def forget(monkeypatch):
    """What a new process knows."""
    monkeypatch.setattr(autotune, "_fastest", {})
    monkeypatch.setattr(autotune, "_time_forms", TIME)
    monkeypatch.setattr(autotune, "_get_file", FILE)


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
    assert find_fastest(("sum", 3), machine.forms(**seconds)) == best


def test_a_timing_is_kept_for_this_process_and_the_next(machine, monkeypatch):
    forms = machine.forms(plain=2e-3, trick=1e-3)
    assert find_fastest(("sum", torch.float32, 3), forms) == "trick"
    ran = len(machine.runs)
    assert find_fastest(("sum", torch.float32, 3), forms) == "trick"
    forget(monkeypatch)
    assert find_fastest(("sum", torch.float32, 3), forms) == "trick"
    assert len(machine.runs) == ran
    (file,) = machine.folder.iterdir()
    kept = json.loads(file.read_text())
    assert kept["torch"] == torch.__version__
    assert kept["cpu"] == autotune.describe_cpu()
    assert kept["fastest"] == {"sum float32 3": "trick"}
    find_fastest(("sum", torch.float32, 4), forms)
    assert len(machine.runs) > ran
    assert list(json.loads(file.read_text())["fastest"]) == ["sum float32 3", "sum float32 4"]


def test_a_disturbed_timing_is_not_kept(machine, monkeypatch):
    find_fastest(("sum",), machine.forms(plain=(1e-3, 9e-3), trick=1e-4))
    assert not machine.folder.exists()
    forget(monkeypatch)
    assert find_fastest(("sum",), machine.forms(plain=1e-3, trick=1e-4)) == "trick"


def test_another_processor_version_or_number_of_threads_is_timed_anew(machine, monkeypatch):
    def times() -> int:
        before = len(machine.runs)
        forget(monkeypatch)
        find_fastest(("sum",), machine.forms(plain=2e-3, trick=1e-3))
        return len(machine.runs) - before

    assert times() > 0
    assert times() == 0
    with monkeypatch.context() as other:
        other.setattr(autotune, "read_processor", lambda: {"model name": "Another"})
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
        b'{"fastest": 3}',
        b'{"fastest": {"sum": 3}}',
        b'{"fastest": {"sum": ["trick"]}}',
        b'{"fastest": {"sum": "removed"}}',
    ],
    ids=lambda damage: damage[:60].decode(errors="replace"),
)
def test_a_damaged_file_is_timed_anew(machine, monkeypatch, damage):
    forms = machine.forms(plain=1e-3, trick=2e-3)
    find_fastest(("sum",), forms)
    (file,) = machine.folder.iterdir()
    file.write_bytes(damage)
    forget(monkeypatch)
    assert find_fastest(("sum",), forms) == PLAIN
    assert json.loads(file.read_text())["fastest"] == {"sum": PLAIN}


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

        monkeypatch.setattr(autotune.Path, "expanduser", no_home)
    forms = machine.forms(plain=2e-3, trick=1e-3)
    assert find_fastest(("sum",), forms) == "trick"
    ran = len(machine.runs)
    assert find_fastest(("sum",), forms) == "trick"
    assert len(machine.runs) == ran


def test_the_file_is_whole_or_absent(machine, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(autotune.Path, "replace", full)
    assert find_fastest(("sum",), machine.forms(plain=2e-3, trick=1e-3)) == "trick"
    assert list(machine.folder.iterdir()) == []


# Who may choose


def may_choose() -> bool:
    return get_choices() is not None


@torch.no_grad()
def test_nobody_chooses_but_generation():
    assert not may_choose()
    with allow_autotuning():
        assert may_choose()
        with torch.enable_grad():
            assert not may_choose()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not may_choose()
        with forbid_autotuning():
            assert not may_choose()
        assert not torch.compile(lambda x: x + may_choose(), backend="eager", fullgraph=True)(torch.zeros(1))
    with forbid_autotuning(), allow_autotuning():
        assert not may_choose()
    with FlopCounterMode(display=False), allow_autotuning():
        assert not may_choose()
    with torch.autograd.forward_ad.dual_level(), allow_autotuning():
        assert not may_choose()
    torch.use_deterministic_algorithms(True)
    with allow_autotuning():
        assert not may_choose()
    torch.use_deterministic_algorithms(False)
    assert not torch.func.vmap(inside)(torch.zeros(1))


def inside(x):
    with allow_autotuning():
        return x + may_choose()


def test_the_variable_switches_it_off_and_knows_its_values(monkeypatch):
    with torch.no_grad():
        for value, allowed in {"plain": False, "measured": True, "": True}.items():
            monkeypatch.setattr(kernels, "_disabled", None)
            monkeypatch.setenv("HEADWATER_KERNELS", value)
            with allow_autotuning():
                assert may_choose() is allowed
    monkeypatch.setattr(kernels, "_disabled", None)
    monkeypatch.setenv("HEADWATER_KERNELS", "fast")
    with pytest.raises(HeadwaterError, match=r"HEADWATER_KERNELS.*plain"), allow_autotuning():
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
    assert autotune._fastest == {}
    expected = generated(ours)
    operations = {operation for _, operation in autotune._fastest}
    assert ("linear", dtype, 256, 256, 1) in operations
    assert any(operation[:2] == ("attention", dtype) for operation in operations) is (dtype is torch.bfloat16)
    again = generated(ours)
    assert torch.equal(again.sequences, expected.sequences)
    assert all(map(torch.equal, again.logits, expected.logits))


@pytest.mark.parametrize("mode", ["plain", "slow"])
def test_generation_is_plain_pytorchs_where_no_trick_wins(mode, machine, monkeypatch):
    ours = model()
    with forbid_autotuning():
        expected = generated(ours)
    monkeypatch.setattr(kernels, "_disabled", mode == "plain")
    from headwater.kernels import fused_linear as linear

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
    from headwater.kernels import fused_linear as linear

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
    assert set(autotune._fastest.values()) == {"onednn"}
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
    auto_map.register_class(type(ours), "AutoModelForCausalLM")
    ours.save_pretrained(folder)
    auto_map._registered.clear()
    env = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
    }
    done = subprocess.run([sys.executable, "-c", EXPORTED, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with forbid_autotuning():
        expected = ours.generate(torch.arange(9)[None], max_new_tokens=3, do_sample=False)
    assert done.stdout.strip() == str(expected.tolist())
    assert {place.name for place in tmp_path.iterdir()} <= {"exported", "headwater", "hf"}
