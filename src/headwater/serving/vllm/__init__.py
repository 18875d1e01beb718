"""headwater's models in vLLM: a plugin, of its entry points `vllm.general_plugins`.

With headwater installed beside vLLM, `vllm serve CHECKPOINT` and `LLM(model=CHECKPOINT)` serve a model of headwater
with the smaller cache that its plan promises. See docs/serving.md.
"""

VERSION = "0.32"
ARCHITECTURE = "HeadwaterForCausalLM"


def register() -> None:
    """Tell vLLM of the model's class, its config, and what is checked before any process starts.

    vLLM calls this in each of its processes, for other models too: so nothing is refused here.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from headwater.models import causal_lm  # noqa: F401  registers the config with transformers
    from headwater.serving.vllm.checks import Checks

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:ServedModel")
    MODELS_CONFIG_MAP[ARCHITECTURE] = Checks
