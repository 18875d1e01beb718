"""Devices and threads that are not there are one sentence."""

import threading

import pytest
import torch

from headwater.util.errors import HeadwaterError
from headwater_lab.util.machine import set_threads, usable_device


@pytest.mark.parametrize("name", ["meta", "nope", "cuda:99", "cpu:x", 5])
def test_a_device_that_cannot_compute_is_refused(name):
    with pytest.raises(HeadwaterError, match="PyTorch cannot use the device"):
        usable_device(name)


def test_threads_that_cannot_be_started_are_refused(monkeypatch):
    """The libraries below PyTorch would end the process."""
    start, before = threading.Thread.start, torch.get_num_threads()

    def limited(thread):
        if threading.active_count() > alive + 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    alive = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(HeadwaterError, match=r"Only 4 of 100 threads can be started here; set training\.threads lower"):
        set_threads(100)
    assert torch.get_num_threads() == before
    set_threads(before)
    assert threading.active_count() == alive
