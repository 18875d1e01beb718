"""transformers' own tests of a causal language model, of Llama and of ours: `make test-transformers`."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from sources import mixins
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.testing_utils import _TEXT_MODEL_TESTER_DEFAULTS

from headwater import HeadwaterConfig, HeadwaterForCausalLM, HeadwaterModel
from headwater.registry import REGISTRY

MIXINS = mixins()
CONFIGURATIONS = {
    "vanilla": {},
    **{name: {name: {}} for name in REGISTRY},
    "combined": {"kv_shift": {}, "value_residual": {}, "skip_layer": {}},
}


class Tester:
    """What the test classes ask about a model: its sizes, and a config and inputs for it."""

    def __init__(self, test: unittest.TestCase) -> None:
        vars(self).update(_TEXT_MODEL_TESTER_DEFAULTS)
        self.test, self.base_model_class, self.causal_lm_class = test, *test.all_model_classes

    def get_config(self) -> Any:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range")
        names += ("pad_token_id", "bos_token_id", "eos_token_id")
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return self.test.config_class(**given, **self.test.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.randint(self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class Common(*(mixin for name, mixin in MIXINS.items() if name != "ConfigTester")):
    options: dict[str, Any] = {}

    def setUp(self) -> None:
        self.model_tester = Tester(self)
        self.config_tester = MIXINS["ConfigTester"](self, self.config_class, **self.options)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class TestLlama(Common, unittest.TestCase):
    config_class, all_model_classes = LlamaConfig, (LlamaModel, LlamaForCausalLM)
    pipeline_model_mapping = {"feature-extraction": LlamaModel, "text-generation": LlamaForCausalLM}


for name, mechanisms in CONFIGURATIONS.items():
    ours = {
        "config_class": HeadwaterConfig,
        "all_model_classes": (HeadwaterModel, HeadwaterForCausalLM),
        "pipeline_model_mapping": {"feature-extraction": HeadwaterModel, "text-generation": HeadwaterForCausalLM},
        "options": {"mechanisms": mechanisms},
    }
    title = f"TestHeadwater_{name}"
    globals()[title] = type(title, (Common, unittest.TestCase), ours)
