"""headwater's models in vLLM: a plugin for the entry point group `vllm.general_plugins`.

With headwater and vLLM installed, `vllm serve CHECKPOINT` and `LLM(model=CHECKPOINT)` serve a model of headwater
with the smaller cache that its plan promises. See docs/serving.md.
"""

import logging

from packaging.version import Version

from headwater.util.versions import TESTED, is_newer

ARCHITECTURE = "HeadwaterForCausalLM"


def describe_older(version: str) -> str | None:
    """Return the sentence that refuses a version of vLLM older than the plugin; None for others."""
    oldest = TESTED["vllm"]
    if Version(version).release[:2] >= Version(oldest).release:
        return None
    return (
        f"headwater's plugin needs vLLM {oldest} or newer, but {version} is installed; upgrade it, or serve with "
        "headwater serve."
    )


def register() -> None:
    """Register the model's class, its config, and the checks before any process starts.

    vLLM calls this in each of its processes, for other models too: so nothing is refused here.
    """
    import vllm
    from vllm import ModelRegistry

    from headwater.models import causal_lm  # noqa: F401  registers the config with transformers

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.vllm_model:ServedModel")
    version, log = vllm.__version__, logging.getLogger("vllm")
    if (warning := describe_older(version)) is not None:
        log.warning(warning)
        return
    if is_newer("vllm", version):
        log.warning(f"headwater's plugin was tested with vLLM {TESTED['vllm']}, not yet with {version}")
    try:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from headwater.integrations.vllm.option_checks import Checks
    except ImportError as error:  # vLLM's modules have moved; models of other libraries must still work
        log.warning(f"headwater's plugin does not fit vLLM {version}, and its models cannot be served: {error}")
        return
    MODELS_CONFIG_MAP[ARCHITECTURE] = Checks
