"""Random numbers by name: every draw has a generator of its own, and depends on nothing else that was drawn."""

from __future__ import annotations

import hashlib

import torch


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by a hash of `key`.

    Not by arithmetic on seeds: PyTorch's CPU generator looks at the lowest 32 bits only, so that seeds made by shifting
    one number beside another would fall together.
    """
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
