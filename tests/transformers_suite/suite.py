"""transformers' own tests of a causal language model, of Llama and of ours: `make test-transformers`.

What Llama passes ours has to pass, configuration by configuration and test by test, but for `EXCEPTIONS`.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch
from sources import mixins
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.testing_utils import _TEXT_MODEL_TESTER_DEFAULTS

from headwater import HeadwaterConfig, HeadwaterForCausalLM, HeadwaterModel
from headwater.plugins.registry import REGISTRY

MIXINS = mixins()
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    **{name: {name: {}} for name in REGISTRY},
    "kv_shift+value_residual+skip_layer": {"kv_shift": {}, "value_residual": {}, "skip_layer": {}},
    "pattention+kv_shift+dense_former": {"pattention": {}, "kv_shift": {}, "dense_former": {}},
}

SMALLER = "the cache holds the heads that the layer itself projects, and transformers expects all of them"
# (mechanism or any, the start of a test's name) -> why ours fails it or is skipped; if it passes, the run fails.
EXCEPTIONS = {
    **{
        (None, name): "there is no plan for tensor parallelism: layers of one model have different heads"
        for name in ("test_tp_plan_matches_params", "test_tied_head_has_a_tp_plan_entry")
    },
    ("skip_layer", "test_eager_matches_sdpa_inference_"): (
        "it sets a sliding window, whose cache forgets what other layers attend to: such a config is refused"
    ),
    **{
        (mechanism, name): SMALLER
        for mechanism in ("skip_layer", "svformer")
        for name in (
            "test_assisted_decoding_",
            "test_beam_search_generate_dict_outputs_use_cache",
            "test_generate_compilation_all_outputs",
            "test_generate_from_inputs_embeds_with_static_cache",
            "test_generate_with_static_cache",
            "test_greedy_generate_dict_outputs_use_cache",
            "test_past_key_values_format",
        )
    },
}


class ModelTester:
    """What the test classes ask about a model: its sizes, and a config and inputs for it."""

    def __init__(self, test: Common) -> None:
        vars(self).update(_TEXT_MODEL_TESTER_DEFAULTS)
        self.test, self.base_model_class, self.causal_lm_class = test, *test.all_model_classes

    def get_config(self) -> Any:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "hidden_act", "max_position_embeddings")
        names += ("pad_token_id", "bos_token_id", "eos_token_id")
        return self.test.config_class(**{name: getattr(self, name) for name in names}, **self.test.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.randint(self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class Common(*(mixin for name, mixin in MIXINS.items() if name != "ConfigTester")):
    config_class: type
    all_model_classes: tuple[type, type]
    options: dict[str, Any] = {}

    @property
    def pipeline_model_mapping(self) -> dict[str, type]:
        return dict(zip(("feature-extraction", "text-generation"), self.all_model_classes, strict=True))

    def setUp(self) -> None:
        self.model_tester = ModelTester(self)
        self.config_tester = MIXINS["ConfigTester"](self, self.config_class, **self.options)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class TestLlama(Common, unittest.TestCase):
    config_class, all_model_classes = LlamaConfig, (LlamaModel, LlamaForCausalLM)


class Ours(Common):
    config_class, all_model_classes = HeadwaterConfig, (HeadwaterModel, HeadwaterForCausalLM)


for configuration, mechanisms in CONFIGURATIONS.items():
    options = {"mechanisms": HeadwaterConfig(mechanisms=mechanisms).mechanisms}  # with the defaults filled in
    globals()[f"Test {configuration}"] = type(f"Test {configuration}", (Ours, unittest.TestCase), {"options": options})
