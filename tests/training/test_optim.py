"""Parameter groups and the learning-rate schedule."""

import math

import pytest
import torch

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.recipe import Training
from headwater.training.optim import learning_rate, make_optimizer, parameter_groups


@pytest.fixture
def model():
    mechanisms = {"kv_shift": {}, "value_residual": {}}
    shape = dict(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    return HeadwaterForCausalLM(HeadwaterConfig.gpt2(**shape, mechanisms=mechanisms))


def test_only_matrices_decay(model):
    decayed, kept = (set(group["params"]) for group in parameter_groups(model, 0.1))
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p].rsplit(".", 2)[-2] for p in decayed} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert not decayed & kept
    assert decayed | kept == set(model.parameters())


def test_adamw_is_fused_on_this_device(model):
    assert make_optimizer(model, Training(), torch.device("cpu")).defaults["fused"]


def test_cosine_schedule():
    training = Training(steps=110, warmup_steps=10, learning_rate=2.0, final_learning_rate=0.1)
    assert [learning_rate(step, training) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert learning_rate(10, training) == pytest.approx(2.0)
    assert learning_rate(60, training) == pytest.approx(0.2 + 1.8 * 0.5)
    assert learning_rate(109, training) == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 0.99)))


def test_constant_schedule():
    training = Training(steps=100, warmup_steps=0, learning_rate=2.0, schedule="constant")
    assert {learning_rate(step, training) for step in range(100)} == {2.0}
