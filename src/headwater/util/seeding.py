"""Random numbers by name: every draw has a separate generator, and does not depend on other draws."""

import hashlib

import torch


def number(*key: int | str) -> int:
    """Return 32 bits that depend only on `key`.

    A hash, not arithmetic on seeds: PyTorch's CPU generator looks at the lowest 32 bits only, so seeds made by
    shifting one number next to another would collide.
    """
    return int.from_bytes(hashlib.sha256(":".join(map(str, key)).encode()).digest()[:4], "big")


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by `number(*key)`."""
    return torch.Generator().manual_seed(number(*key))
