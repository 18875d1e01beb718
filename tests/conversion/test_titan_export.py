"""Checkpoints of torchtitan's trainer, which are read without torchtitan."""

import pytest
import torch
from torch.distributed import checkpoint as dcp

from conftest import build, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.integrations.torchtitan.titan_checkpoints import export, theirs_of


def test_a_checkpoint_is_exported_with_the_config_of_its_model_only(tmp_path):
    model = build({"kv_shift": {}, "value_residual": {}}).float()  # as it is exported
    state = {theirs_of(name): tensor for name, tensor in model.state_dict().items()}
    dcp.save(state | {"optimizer.step": torch.zeros(1)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    loaded = HeadwaterForCausalLM.from_pretrained(export(tmp_path / "step-1", model.config, tmp_path / "right"))
    assert torch.equal(loaded(tokens(1, 5)).logits, model(tokens(1, 5)).logits)
    for other in (build({"kv_shift": {}, "value_residual": {}}, num_hidden_layers=2), build({"kv_shift": {}})):
        with pytest.raises(HeadwaterError, match="has no place in this one; pass the config of that model"):
            export(tmp_path / "step-1", other.config, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
