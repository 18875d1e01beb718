"""The contract is small, and what some tools ask beside it is documented, used and complete."""

import inspect
import re
from pathlib import Path

import pytest
from torch import nn

import headwater
from headwater.config.plan import ATTENTION_STAGES, BLOCK_STAGES, Stage
from headwater.mechanisms import Mechanism
from headwater.mechanisms.capabilities import CAPABILITIES, GrowsOptions, SplitsOverProcesses, members_of
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.util.errors import HeadwaterError

SOURCE = Path(headwater.__file__).parents[1]
MOST = 30


def test_the_contract_has_few_members_of_two_words():
    kinds = [kind for kind in Mechanism.__mro__ if kind not in nn.Module.__mro__]
    of_python = {"__module__", "__doc__", "__annotations__"}
    members = {name for kind in kinds for name in vars(kind)} - of_python - {"extra_repr"}  # torch's own
    assert len(members) <= MOST, sorted(members)
    methods = [name for name in members if inspect.isroutine(inspect.getattr_static(Mechanism, name))]
    assert [name for name in methods if "_" not in name.strip("_")] == []


def test_stages_are_methods_in_the_order_of_the_forward_pass():
    names = [name for name in vars(Mechanism) if name in {stage.value for stage in Stage}]
    assert names == [stage.value for stage in Stage]
    assert set(ATTENTION_STAGES) | set(BLOCK_STAGES) == set(Stage)
    assert all(getattr(Mechanism, name).__doc__ for name in names)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: capability.__name__)
def test_each_capability_is_documented_and_used(capability):
    name, files = capability.__name__, [path.read_text() for path in SOURCE.rglob("*.py")]
    assert any(re.search(rf"isinstance\([^\n]*\b{name}\b", text) for text in files)
    assert capability.__doc__
    for member in members_of(capability):
        method = vars(capability).get(member)
        assert method is None or method.__doc__, member


@pytest.mark.parametrize("name", MECHANISMS.built_in)
def test_mechanisms_have_capabilities_with_the_arguments_of_the_protocol(name):
    mechanism = resolve(name)
    for capability in (kind for kind in CAPABILITIES if isinstance(mechanism, kind)):
        for member in members_of(capability) & set(vars(capability)):
            asked, has = (
                [name for name in inspect.signature(getattr(kind, member)).parameters if name not in ("self", "module")]
                for kind in (capability, mechanism)
            )
            assert has == asked or "inputs" in asked, member  # those of its forward


def test_half_a_capability_is_refused():
    with pytest.raises(
        HeadwaterError, match=r"Half defines only part of ActsInTraining .* lacks describe_training and prepare"
    ):

        class Half(Mechanism):
            def prepare_training(self, step):
                return {}


def test_what_is_set_to_none_is_no_capability():
    kind = type("Without", (resolve("kv_shift"),), {"grow_options": None})
    assert not isinstance(kind, GrowsOptions)
    assert isinstance(kind, SplitsOverProcesses)
