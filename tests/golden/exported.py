"""Exported folders in a process that cannot import the package: their logits there."""

from __future__ import annotations

import tempfile
from pathlib import Path

from product import PACKAGES, export_model
from safetensors.torch import load_file, save_file
from tiny_models import IMAGES, image_model, pixels, text_model, token_ids
from torch import Tensor

from apart import apart

NAMES = (
    "llama",
    "pattention everywhere",
    "short_conv everywhere",
    "ngram_memory, windows",
    "skip_layer, svformer",
    "mudd",
    "gpt2, all",
    "vit, kv_shift, value_residual",
)
SCRIPT = """
import importlib.abc, sys
from pathlib import Path
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} cannot be imported here")
sys.meta_path.insert(0, Blocked())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, dynamic_module_utils
torch.set_num_threads(1)
root = Path(folder)
dynamic_module_utils.HF_MODULES_CACHE = str(root / "home")
inputs, logits = load_file(root / "inputs.safetensors"), {}
for path in sorted(path for path in root.iterdir() if (path / "config.json").exists()):
    shows = path.name.startswith("image-")
    kind = AutoModelForImageClassification if shows else AutoModelForCausalLM
    model = kind.from_pretrained(path, trust_remote_code=True, dtype=torch.float64)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        logits[path.name] = model(inputs["pixels" if shows else "ids"]).logits
assert not [name for name in sys.modules if name.partition(".")[0] in blocked]
save_file(logits, root / "logits.safetensors")
"""


def exported_logits() -> dict[str, Tensor]:
    """Logits of the models of `NAMES`, exported and loaded by transformers alone."""
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
        root = Path(folder)
        folders = {f"{'image' if name in IMAGES else 'text'}-{n}": name for n, name in enumerate(NAMES)}
        for path, name in folders.items():
            export_model(image_model(name) if name in IMAGES else text_model(name), root / path)
        save_file({"ids": token_ids(), "pixels": pixels()}, root / "inputs.safetensors")
        code = f"folder, blocked = {folder!r}, {PACKAGES!r}\n{SCRIPT}"
        ((ended, _, errors),) = apart([code], "models")
        assert ended == 0, errors[-4000:]
        logits = load_file(root / "logits.safetensors")
    return {folders[path]: tensor for path, tensor in logits.items()}
