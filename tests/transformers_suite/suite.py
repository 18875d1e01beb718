"""transformers' own tests of a causal language model, of Llama and of ours: `make test-transformers`.

What Llama passes ours has to pass, configuration by configuration and test by test, but for `EXCEPTIONS`.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch
from sources import mixins
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from headwater import HeadwaterConfig, HeadwaterForCausalLM, HeadwaterModel
from headwater.plugins.mechanisms import MECHANISMS

MIXINS = mixins()
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    **{name: {name: {}} for name in MECHANISMS.built_in},
    "kv_shift+value_residual+skip_layer": {"kv_shift": {}, "value_residual": {}, "skip_layer": {}},
    "pattention+kv_shift+dense_former": {"pattention": {}, "kv_shift": {}, "dense_former": {}},
}

SMALLER = "the cache holds the heads that the layer itself projects, and transformers expects all of them"
# (mechanism or any, a test's name, or its start if that ends in _) -> why ours fails it or is skipped; if it passes,
# the run fails.
EXCEPTIONS = {
    **{
        (None, name): "there is no plan for tensor parallelism: layers of one model have different heads"
        for name in ("test_tp_plan_matches_params", "test_tied_head_has_a_tp_plan_entry")
    },
    (None, "test_model_weights_reload_no_missing_tied_weights"): (
        "weights that a checkpoint lacks, or has in another shape, are refused, and not drawn anew"
    ),
    **{
        (mechanism, "test_keep_in_fp32_modules"): "quantizers leave its matrices, which load in the model's precision"
        for mechanism in (
            "value_embedding",
            "ngram_memory",
            "persistent_memory",
            "output_gate",
            "depth_attention",
            "mudd",
            "smear",
        )
    },
    **{
        (mechanism, name): "it reads tokens by their ids"
        for mechanism in ("value_embedding", "ngram_memory")
        for name in ("test_inputs_embeds", "test_inputs_embeds_matches_input_ids")
    },
    ("ngram_memory", "test_model_is_small"): "its tables have a default size",
    ("persistent_memory", "test_can_set_attention_dynamically"): "it says first which kernels it works with",
    ("persistent_memory", "test_retain_grad_hidden_states_attentions"): (
        "the weights that are returned are the tokens', a part of those that values are read by"
    ),
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
OF_SUBTESTS = {"test_keep_in_fp32_modules"}

# A tiny text model and its batch, under the names that the test classes ask for.
SIZES = {
    "batch_size": 5,
    "seq_length": 7,
    "is_training": True,
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "hidden_act": "gelu",
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class ModelTester:
    """What the test classes ask about a model: its sizes, and a config and inputs for it."""

    def __init__(self, test: Common) -> None:
        vars(self).update(SIZES)
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
