"""Tests for any mechanism: the contract as a test class, small models, a naive reference. Needs pytest.

    from headwater.testing import Contract, Reference

    class TestMine(Contract):
        mechanism = "my_package.mine:Mine"
        reference = NaiveMine

docs/extending.md has a full example, and `headwater new mechanism NAME` writes it.
"""

from headwater.testing import _rewritten  # noqa: F401  before what asserts is imported

# isort: split
from headwater.testing.contract_suite import BASES, ODD_LAYERS, Case, Contract
from headwater.testing.naive import Reference
from headwater.testing.small_models import (
    assert_near,
    build,
    config,
    decode,
    disturb,
    document_positions,
    shared,
    tokens,
)

__all__ = [
    "BASES",
    "ODD_LAYERS",
    "Case",
    "Contract",
    "Reference",
    "assert_near",
    "build",
    "config",
    "decode",
    "disturb",
    "document_positions",
    "shared",
    "tokens",
]
