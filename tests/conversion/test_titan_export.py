"""Checkpoints of torchtitan's trainer, which are read without torchtitan."""

import pytest
import torch
from torch.distributed import checkpoint as dcp

from conftest import build, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.integrations.torchtitan.titan_checkpoints import export, theirs_of


def save_checkpoint(model, folder):
    state = {theirs_of(name): tensor for name, tensor in model.state_dict().items()}
    dcp.save(state | {"optimizer.step": torch.zeros(1)}, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_checkpoint_is_exported_with_the_config_of_its_model_only(tmp_path):
    model = build({"kv_shift": {}, "value_residual": {}}).float()  # as it is exported
    checkpoint = save_checkpoint(model, tmp_path / "step-1")
    loaded = HeadwaterForCausalLM.from_pretrained(export(checkpoint, model.config, tmp_path / "right"))
    assert torch.equal(loaded(tokens(1, 5)).logits, model(tokens(1, 5)).logits)
    for other in (build({"kv_shift": {}, "value_residual": {}}, num_hidden_layers=2), build({"kv_shift": {}})):
        with pytest.raises(HeadwaterError, match="has no place in this one; pass the config of that model"):
            export(checkpoint, other.config, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_a_head_that_is_not_tied_is_not_exported_as_a_tied_one(tmp_path):
    tied, untied = (build({}, tie_word_embeddings=is_tied).float() for is_tied in (True, False))
    checkpoint = save_checkpoint(tied, tmp_path / "step-1")
    loaded = HeadwaterForCausalLM.from_pretrained(export(checkpoint, tied.config, tmp_path / "tied"))
    assert torch.equal(loaded(tokens(1, 5)).logits, tied(tokens(1, 5)).logits)
    with pytest.raises(HeadwaterError, match="not tied to its embedding; pass a config with tie_word_embeddings=False"):
        export(save_checkpoint(untied, tmp_path / "step-2"), tied.config, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
