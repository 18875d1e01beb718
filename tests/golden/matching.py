"""Golden files: writing them so that their differences read well, and comparing what the code does now with them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from product import cpu_name
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent
# What a file says of the machine that it was made on, and what holds on such a machine only.
MACHINE, SAME_MACHINE = "machine", "same machine"
# Initial values are drawn in fp32, by functions that round differently on other processors. Verdicts are rounded.
TOLERANCE = {"runs": 1e-5, "pictures": 1e-5, "comparison": 1e-5, "verdicts": 1e-5}
LOGITS = 1e-12


def machine() -> dict[str, str]:
    """Whatever decides the last bits of a computation, beside the code."""
    return {"cpu": cpu_name(), "vectors": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, content: dict[str, Any]) -> None:
    """Write a golden file, and tensors in it to a file beside it."""
    if tensors := {key: value for key, value in content.items() if isinstance(value, Tensor)}:
        save_file(dict(sorted(tensors.items())), FOLDER / f"{name}.safetensors")
    values = {key: value for key, value in content.items() if key not in tensors}
    text = json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def bits(tensors: Iterable[Tensor]) -> str:
    """A hash of the exact numbers of tensors, in their order; of a model's, whatever they are named."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + flat.numpy().tobytes())
    return digest.hexdigest()[:16]


def differences(actual: Any, golden: Any, tolerance: float = 0.0, path: str = "") -> list[str]:
    """Where two JSON values differ, as lines; floats may by `tolerance`, relative to the golden one."""
    if isinstance(actual, Mapping) and isinstance(golden, Mapping):
        lines = [f"{path}.{key}: only in the golden file" for key in golden.keys() - actual.keys()]
        lines += [f"{path}.{key}: not in the golden file" for key in actual.keys() - golden.keys()]
        for key in actual.keys() & golden.keys():
            lines += differences(actual[key], golden[key], tolerance, f"{path}.{key}")
        return sorted(lines)
    if isinstance(actual, list) and isinstance(golden, list) and len(actual) == len(golden):
        pairs = enumerate(zip(actual, golden, strict=True))
        return [line for n, pair in pairs for line in differences(*pair, tolerance, f"{path}[{n}]")]
    if tolerance and isinstance(actual, float) and isinstance(golden, float):
        same = actual == golden or math.isclose(actual, golden, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
        same = same or (math.isnan(actual) and math.isnan(golden))
    else:
        same = type(actual) is type(golden) and actual == golden
    return [] if same else [f"{path}: {actual!r}, in the golden file {golden!r}"]


def check(name: str, content: dict[str, Any]) -> None:
    """Fail if what was computed now is not what a golden file says: with every difference, 20 of them shown."""
    golden = read(name)
    values = {key: value for key, value in content.items() if not isinstance(value, Tensor)}
    if golden.get(MACHINE) != values.get(MACHINE):
        for part in (golden, values):
            part.pop(MACHINE)
            part.pop(SAME_MACHINE)
    values = json.loads(json.dumps(values))
    lines = differences(values, golden, TOLERANCE.get(name, 0.0))
    if tensors := {key: value for key, value in content.items() if isinstance(value, Tensor)}:
        lines += tensor_differences(tensors, load_file(FOLDER / f"{name}.safetensors"))
    assert not lines, "\n".join([f"{len(lines)} differences from {name}:", *lines[:20]])


def tensor_differences(actual: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> list[str]:
    """Where named tensors differ by more than `LOGITS`, relative to the largest golden element (at least 1)."""
    lines = [f"{name}: only in one of them" for name in actual.keys() ^ golden.keys()]
    for name in actual.keys() & golden.keys():
        if actual[name].shape != golden[name].shape:
            lines.append(f"{name}: {tuple(actual[name].shape)}, in the golden file {tuple(golden[name].shape)}")
            continue
        error = (actual[name] - golden[name]).abs().max().item()
        if not error <= LOGITS * max(1.0, golden[name].abs().max().item()):
            lines.append(f"{name}: they differ by {error:.2e}")
    return sorted(lines)
