"""Random numbers by name: every draw has a generator of its own, and depends on nothing else that was drawn."""

import hashlib

import torch


def number(*key: int | str) -> int:
    """32 bits that depend on `key` alone.

    A hash, and no arithmetic on seeds: PyTorch's CPU generator looks at the lowest 32 bits only, so that seeds made by
    shifting one number beside another would fall together.
    """
    return int.from_bytes(hashlib.sha256(":".join(map(str, key)).encode()).digest()[:4], "big")


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by `number(*key)`."""
    return torch.Generator().manual_seed(number(*key))
