"""The processor of this machine."""

import platform
from contextlib import suppress
from functools import lru_cache
from pathlib import Path


@lru_cache
def read_processor() -> dict[str, str]:
    """Linux's facts about the first core; empty elsewhere."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


def describe_cpu() -> str:
    """The processor's name, with family and model where known: names alone may be generic."""
    facts = read_processor()
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else name
