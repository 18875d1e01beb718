"""The contract suite passes a mechanism from outside that keeps the contract, and fails it when it is broken."""

import json
import sys
import textwrap

import pytest
import torch

from headwater.config import options as config_options
from headwater.config.options import parse_options
from headwater.testing import Case, Contract, Reference
from headwater.testing.naive import look_back
from references import run_check

MINE = '''

import torch
from torch import nn

from headwater.mechanisms import QKV, Ancestors, Context, Cost, Mechanism


class Mine(Mechanism):
    """v_t + w·v_{t-1}, and a row of a table by token id, through a convolution."""

    needs_input_ids = True

    class Options:
        back: int = 1

    def __init__(self, heads, width, vocabulary, back=1):
        super().__init__()
        self.back = back
        self.weight = nn.Parameter(torch.empty(heads))
        self.table = nn.Embedding(vocabulary, heads * width)
        self.mix = nn.Conv1d(heads * width, heads * width, 1, groups=heads * width, bias=False)
        self.reset_parameters()

    def initial_value(self, parameter, generator=None):
        return torch.rand(self.weight.shape, generator=generator) if parameter == "weight" else None

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [p.acting(cls, cls.transform_qkv, [("v", options["back"])]) if p.v_heads else p for p in plans]

    @classmethod
    def build_module(cls, options, config, plan):
        return cls(len(plan.v_heads), config.head_dim, config.vocab_size, options["back"])

    @classmethod
    def count_cost(cls, options, config, plan):
        width = len(plan.v_heads) * config.head_dim
        table = config.vocab_size * width
        return Cost(
            parameters=len(plan.v_heads) + table + width, flops=2 * width, saved=2 * width, unread_parameters=table
        )

    def count_token_tables(self, parameter):
        return int(parameter == "table.weight")

    def transform_qkv(self, x, context):
        v, length, before, name = x.v, x.v.shape[2], None, f"{self.registered_name()}.v"
        branches = isinstance(context.reach, Ancestors)
        if context.tail is not None:
            before = context.tail.update_tail(name, v, self.back, everything=branches)
        if branches:
            past = context.reach.look_back(v, before, self.back)
        else:
            before = v.new_zeros(*v.shape[:2], self.back, v.shape[3]) if before is None else before
            past = torch.cat((before, v), dim=2)[:, :, :length]
            if context.reach is not None:
                past = past * (context.reach >= self.back)[:, None, :, None]
        rows = self.mix(self.table(context.ids).mT).mT.unflatten(2, (v.shape[1], -1)).transpose(1, 2)
        return QKV(x.q, x.k, v + self.weight[:, None, None].to(v.dtype) * past + rows.to(v.dtype))
'''
# What is broken, and the tests that are to see it.
BROKEN = {
    "tail": (
        "context.tail.update_tail(name, v, self.back, everything=branches)",
        "None",
        "test_cached_equals_uncached",
    ),
    "branch": ("if branches:", "if False:", "test_branching_rows"),
    "old branch": (", everything=branches", "", "test_branching_rows"),
    "saved": ("saved=2 * width", "saved=width", "test_saved_is_what_autograd_keeps"),
    "loop": (
        "self.mix(self.table(context.ids).mT).mT",
        "torch.cat([self.mix(self.table(ids).mT).mT for ids in context.ids.split(1, 1)], 1)",
        "test_work_grows_with_the_tokens_alone",
    ),
    "square": (
        "return QKV(x.q, x.k, v +",
        "return QKV(x.q, x.k, v + 0 * (v @ v.mT @ v) +",
        "test_work_grows_with_the_tokens_alone",
    ),
    "leak": ("(context.reach >= self.back)", "(context.reach >= 0)", "test_packed_documents_equal_separate"),
    "cost": ("parameters=len(plan.v_heads) +", "parameters=", "test_parameters_are_counted"),
    "flops": ("flops=2 * width", "flops=width", "test_work_grows_with_the_tokens_alone"),
    "looked up": (", unread_parameters=table", "", "test_tables_are_looked_up"),
    "training": ("x.k, v + self", "x.k, (1 + self.training) * v + self", "test_training_computes"),
    "start": (", generator=generator) if", ") if", "test_starts_are_drawn_by_name"),
    "gradient": (
        "self.weight[:, None, None].to",
        "self.weight.detach()[:, None, None].to",
        "test_every_parameter_gets",
    ),
}


# A mechanism that says of itself what it need not.
SAYING = '''

import torch
from torch import nn

from headwater.mechanisms.growth_map import SAME, Dim
from headwater.mechanisms import QKV, Ancestors, Cost, Mechanism


class Mine(Mechanism):
    """k_t - w·k_t + w·k_{t-1}, and v_t·g"""

    per_head = per_token = True

    class Options:
        begin: float = 0.3
        unused: int = 0

    def __init__(self, keys, values, begin):
        super().__init__()
        self.begin, self.taps, self.gain = begin, nn.Parameter(torch.empty(2, keys)), nn.Parameter(torch.empty(values))

    def initial_value(self, parameter, generator=None):
        first = torch.full((self.taps.shape[1],), 1 - self.begin)
        return torch.stack((first, 1 - first)) if parameter == "taps" else torch.ones(self.gain.shape)

    @classmethod
    def find_identity_options(cls, options):
        return None if options.get("begin") else options | {"begin": 0.0}

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [p.acting(cls, cls.transform_qkv, [("k", 1)] * bool(p.k_heads)) for p in plans]

    @classmethod
    def build_module(cls, options, config, plan):
        return cls(len(plan.k_heads), len(plan.v_heads), options["begin"])

    @classmethod
    def grow_options(cls, options, config, growth):
        return options

    def describe_axes(self, parameter):
        return (SAME, Dim("k")) if parameter == "taps" else (Dim("v"),)

    @classmethod
    def count_cost(cls, options, config, plan):
        keys, values = len(plan.k_heads), len(plan.v_heads)
        return Cost(parameters=2 * keys + values, saved=(2 * keys + values) * config.head_dim)

    def transform_block_output(self, x, context):  # not in its plan
        return x + 0.1 * x.roll(1, 1)

    def transform_qkv(self, x, context):
        q, k, v, before, branches = *x, None, isinstance(context.reach, Ancestors)
        if k.shape[1]:
            if context.tail is not None:
                before = context.tail.update_tail(f"{self.registered_name()}.k", k, 1, everything=branches)
            if branches:
                last = context.reach.look_back(k, before, 1)
            else:
                before = k.new_zeros(*k.shape[:2], 1, k.shape[3]) if before is None else before
                last = torch.cat((before, k), dim=2)[:, :, :-1]
                if context.reach is not None:
                    last = last * (context.reach >= 1)[:, None, :, None]
            taps = self.taps[:, :, None, None].to(k.dtype)
            k = taps[0] * k + taps[1] * last
        return QKV(q, k, v * self.gain[:, None, None].to(v.dtype))
'''
UNTRUE = {
    "identity": ('{"begin": 0.0}', '{"begin": 0.01}', "test_identity_changes_nothing"),
    "identity's options": ('options | {"begin": 0.0}', '{"begin": 0.0}', "test_identity_changes_nothing"),
    "mixed heads": ("return QKV(q, k, v *", "return QKV(q, k, v.mean(1, True) + v *", "test_heads_and_tokens"),
    "mixed queries": ("return QKV(q,", "return QKV(q + q.flip(1),", "test_heads_and_tokens"),
    "undeclared": ('(SAME, Dim("k"))', "()", "test_heads_and_tokens"),
    "grown otherwise": ('Dim("v")', "SAME", "test_growth_keeps"),
    "of other heads": ('Dim("v")', 'Dim("q")', "test_heads_and_tokens"),
    "mixed tokens": (
        " * bool(p.k_heads))",
        " * bool(p.k_heads)).acting(cls, cls.transform_block_output)",
        "test_heads_and_tokens",
    ),
    "more saved": ("(2 * keys + values) * config", "(keys + values) * config", "test_saved_is_what"),
    "less saved": ("(2 * keys + values) * config", "(3 * keys + values) * config", "test_saved_is_what"),
}


class Naive(Reference):
    knows = (*Reference.knows, "mine:Mine")

    def transform_qkv(self, name, layer, q, k, v):
        if name != "mine:Mine" or not v:
            return super().transform_qkv(name, layer, q, k, v)
        back, weight = self.config.mechanisms[name]["back"], self.find_parameter(name, layer, "weight")
        table, mix = (
            self.find_parameter(name, layer, "table.weight"),
            self.find_parameter(name, layer, "mix.weight")[:, 0, 0],
        )
        previous = self.list_previous()
        made = {}
        for i, (head, row) in enumerate(v.items()):
            own = slice(i * len(row[0]), (i + 1) * len(row[0]))
            rows = []
            for t, x in enumerate(row):
                rows.append(x + (table[self.ids[t]] * mix)[own])
            made[head] = torch.stack(rows) + weight[i] * look_back(row, back, previous)
        return q, k, made


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes the mechanism, with one thing changed, where it can be imported; its name."""

    def write(old: str = "", new: str = "", text: str = MINE) -> str:
        assert old in text
        (tmp_path / "mine.py").write_text(textwrap.dedent(text.replace(old, new) if old else text))
        return "mine:Mine"

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield write
    sys.modules.pop("mine", None)


@pytest.mark.sampled(4)
class TestOfAnother(Contract):
    """The suite, for the mechanism above on a few bases and beside two others."""

    reference = Naive
    mechanism = "mine:Mine"

    @pytest.fixture(autouse=True)
    def there(self, mine):
        mine()

    @classmethod
    def cases(cls):
        chosen = [("llama", {"kv_shift": {}, "mine:Mine": {"back": 2}}), ("sliding", {"mine:Mine": {}})]
        return [pytest.param(Case(base, json.dumps(m)), id=f"{base}-{'+'.join(m)}") for base, m in chosen]

    @classmethod
    def traced(cls):
        return [pytest.param(*cls.cases()[0].values, marks=pytest.mark.slow)]


QUICK = (
    "cached_equals_uncached",
    "documents_equal",
    "counted",
    "drawn_by_name",
    "gets_a_gradient",
    "are_read",
    "round",
    "save_and",
)
OF_ITSELF = ("branching", "growth", "identity", "alone", "looked_up", "saved_is", "training_computes")


def failures(mechanism: str, options: dict, tmp_path, then=lambda: None, tests=QUICK) -> list[str]:
    """Those of the contract's tests with one of these words in their names that a mechanism fails.

    then: called once the model is built.
    """
    from headwater.testing import contract_suite
    from headwater.testing.small_models import _build_cached

    _build_cached.cache_clear()
    suite, case = type("Suite", (Contract,), {"reference": Naive})(), Case("llama", json.dumps({mechanism: options}))
    assert case.model.training is False
    then()
    failed = []
    for name in dir(suite):
        if not name.startswith("test_") or not any(part in name for part in tests):
            continue
        more = {
            "test_cached_equals_uncached": {"way": next(way for way in contract_suite.DECODING if way.name == "mixed")},
            "test_cached_equals_uncached_with_holes_in_the_mask": {"chunks": contract_suite.CHUNKS["chunked"]},
            "test_save_and_load": {"tmp_path": tmp_path},
        }.get(name, {})
        try:
            run_check(getattr(suite, name), case, **more)
        except Exception:
            failed.append(name)
    _build_cached.cache_clear()
    return failed


@pytest.mark.slow
def test_a_whole_one_passes(mine, tmp_path):
    assert failures(mine(), {"back": 2}, tmp_path, tests=QUICK + OF_ITSELF) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_one_fails(mine, tmp_path, what):
    old, new, seen = BROKEN[what]
    assert failures(mine(old, new), {"back": 2}, tmp_path, tests=[seen])


@pytest.mark.slow
def test_one_that_says_what_is_true_passes(mine, tmp_path):
    assert failures(mine(text=SAYING), {"unused": 1}, tmp_path, tests=OF_ITSELF) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", UNTRUE)
def test_one_that_says_what_is_not_true_fails(mine, tmp_path, what):
    old, new, seen = UNTRUE[what]
    assert failures(mine(old, new, SAYING), {"unused": 1}, tmp_path, tests=[seen])


def test_an_option_that_nothing_reads_fails(mine, tmp_path):
    assert failures(mine(text=SAYING), {"unused": 1}, tmp_path, tests=["are_read"]) == ["test_options_are_read"]


def test_one_that_loses_its_options_on_save_fails(mine, tmp_path, monkeypatch):
    """What the config was made with is kept in memory, and what is read back is something else."""
    name = mine()
    lost = []
    monkeypatch.setattr(config_options, "parse_options", lambda kind, given: parse_options(kind, {} if lost else given))
    failed = failures(name, {"back": 2}, tmp_path, then=lambda: lost.append(True), tests=["round", "save_and"])
    assert set(failed) == {"test_config_round_trip", "test_save_and_load"}
