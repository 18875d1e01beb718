"""Working memory that is used again, and the modules that use it."""

import os
import platform
import resource
import subprocess
import sys
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headwater.kernels.scratch import KEEP, get_scratch
from headwater.mechanisms import DenseFormer, KVShift, Pattention, ValueResidual

X = (2, 3, 5, 4)
RUNS = {
    "pattention": (Pattention(4, 4, 9), lambda m, x: m(x)),
    "kv_shift": (KVShift(3), lambda m, x: m(x, x)[0]),
    "value_residual": (ValueResidual(), lambda m, x: m(x, x)),
    "dense_former": (DenseFormer(2), lambda m, x: m(x, x)),
}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr("headwater.kernels.scratch._memory", threading.local())


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_after_inference_mode(name, dtype):
    module, run = RUNS[name]
    x = torch.randn(X).to(dtype)
    if name == "pattention":
        module = Pattention(4, 4, 9).to(dtype)
    with torch.inference_mode():
        before = run(module, x)
    after = run(module, x.requires_grad_())
    after.sum().backward()
    assert torch.equal(before, after)
    assert all(
        parameter.grad is not None
        for parameter in module.parameters()
        if parameter.shape != (2, 3) or name != "kv_shift"
    )


@pytest.mark.parametrize("name", RUNS)
def test_training_after_fake_tensors(name):
    module, run = RUNS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        run(module, torch.randn(X).requires_grad_()).sum().backward()
    module.zero_grad(set_to_none=True)
    run(module, torch.randn(X).requires_grad_()).sum().backward()


def test_a_default_device_is_not_looked_at():
    with torch.device("meta"):
        assert get_scratch(2, (3,), torch.float32, torch.empty(0, device="cpu")).device.type == "cpu"


def test_memory_is_used_again_and_each_thread_has_its_own():
    like = torch.empty(0)
    first = get_scratch(2, (3, 4), torch.float32, like)
    assert first.shape == (2, 3, 4)
    assert get_scratch(1, (5,), torch.float32, like).data_ptr() == first.data_ptr()
    assert get_scratch(1, (5,), torch.float64, like).data_ptr() != first.data_ptr()
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(get_scratch(1, (5,), torch.float32, like).data_ptr()))
    thread.start()
    thread.join()
    assert others != [first.data_ptr()]


def test_more_than_a_little_is_not_kept():
    like = torch.empty(0, device="cpu")
    large = get_scratch(1, (KEEP + 1,), torch.float16, like)
    assert get_scratch(1, (1,), torch.float16, like).data_ptr() != large.data_ptr()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide for themselves")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_TRIM_THRESHOLD_": "100000000"}])
@pytest.mark.slow
def test_what_a_training_step_frees_is_there_for_the_next(environment):
    """In a process of its own, since it is the process that keeps the memory."""
    code = (
        "import torch\n"
        "from headwater_lab.util.machine import keep_freed_memory\n"
        "def step(): return [torch.zeros(2**20) for _ in range(40)] and None\n"
        "def held(): return int(open('/proc/self/statm').read().split()[1])\n"
        "before = held(); keep_freed_memory(); step(); step(); print(held() - before)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    pages = 40 * 2**22 // resource.getpagesize()
    assert (int(ran.stdout) > pages // 2) == (not environment), ran.stderr
