"""Cutting runs short, and telling whether two ended alike."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from headwater_lab.training.checkpoints import list_checkpoints
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record
from headwater_lab.util.endings import Interrupted


class PowerCut(Exception):
    pass


def cut_at(step):
    def on_event(now, point):
        if now == step:
            raise PowerCut

    return on_event


def train_until(step, recipe, folder, resume=False, trunk=None):
    """Train, and stop after this step, as by a signal."""

    def on_event(now, point):
        if point is None and now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(recipe, folder, resume=resume, on_event=on_event, trunk=trunk)


def same_end(a, b):
    """Equal to the last bit: weights, optimiser, order of the data, and every point of the curves."""
    for name in ("model.safetensors", "training.safetensors"):
        x, y = (load_file(list_checkpoints(run)[-1] / name) for run in (a, b))
        assert x.keys() == y.keys()
        for key in x:
            assert torch.equal(x[key], y[key]), key
    x, y = read_record(a), read_record(b)
    assert x.curve == y.curve
    assert x.held_out == y.held_out
    assert x.documents == y.documents
    assert x.data_order == y.data_order
