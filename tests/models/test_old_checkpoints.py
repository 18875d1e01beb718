"""Checkpoints that version 0.1 wrote, with its logits: fields that their configs lack mean what they meant then."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headwater import HeadwaterForCausalLM

FOLDERS = sorted((Path(__file__).parent / "checkpoints_0_1").iterdir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits_are_those_of_0_1(folder):
    expected = load_file(folder / "logits.safetensors")["logits"]
    model = HeadwaterForCausalLM.from_pretrained(folder).double().eval()
    ids = torch.arange(24).view(2, 12) % 31
    with torch.no_grad():
        assert (model(ids).logits - expected).abs().max() < 1e-13 * expected.abs().max()


def test_there_are_such_checkpoints():
    assert len(FOLDERS) == 2
