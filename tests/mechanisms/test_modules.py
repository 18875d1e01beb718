"""Mechanisms as plain modules: their examples run, and a new one is one file and one line."""

import doctest
import importlib
import json
import sys
import textwrap

import pytest

from conftest import assert_near, build, decode, document_positions, tokens
from headwater.plugins.mechanisms import MECHANISMS, has_own, resolve


@pytest.mark.parametrize("name", MECHANISMS.built_in)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(MECHANISMS.built_in[name].partition(":")[0])
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    tests = [t for t in finder.find(module, globs={}) if t.examples]
    if has_own(resolve(name), "build_module"):
        assert any(t.name.endswith(resolve(name).__name__) for t in tests), "the class has no example"
    for test in tests:
        assert runner.run(test).failed == 0, test.name


def test_a_printed_module_shows_the_shapes_of_its_parameters():
    assert repr(resolve("kv_shift")(4, window=3)) == "KVShift(alpha=[3, 4], beta=[3, 4])"


@pytest.mark.parametrize("name", MECHANISMS.built_in)
def test_docstrings_say_where_it_comes_from(name):
    module = importlib.import_module(MECHANISMS.built_in[name].partition(":")[0])
    assert "arXiv " in module.__doc__
    assert "Departures" in module.__doc__


CROSS_LAYER = '''
"""Cross-layer attention: every second layer attends to the keys and values of the one before. arXiv 2405.12981."""


from headwater.mechanisms.contract import Mechanism


class CrossLayer(Mechanism):
    class Options:
        every: int = 2

    @classmethod
    def redirect_heads(cls, options, config, plans):
        heads = range(config.num_key_value_heads)
        first = [layer - layer % options["every"] for layer in range(len(plans))]
        return [plan.attending(heads, owner, owner) for plan, owner in zip(plans, first)]
'''


def test_a_new_mechanism_is_one_file_and_one_line(tmp_path, monkeypatch):
    """Exact in a cache, in packed rows and beside the others, with half the cache, and nothing else was touched."""
    (tmp_path / "cross_layer.py").write_text(textwrap.dedent(CROSS_LAYER))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(MECHANISMS.built_in, "cross_layer", "cross_layer:CrossLayer")
    monkeypatch.delitem(sys.modules, "cross_layer", raising=False)
    for others in ({}, {"kv_shift": {}}, {"pattention": {}, "value_residual": {"layers": [2]}}, {"dense_former": {}}):
        model, ids = build({"cross_layer": {}, **others}, num_hidden_layers=4), tokens(2, 12)
        assert [len(plan.k_heads) for plan in model.plans] == [2, 0, 2, 0]
        logits = model(ids, use_cache=False).logits
        assert_near(decode(model, ids, [5, 1, 6]), logits)
        packed = model(ids, position_ids=document_positions([[5, 7], [5, 7]]), use_cache=False).logits
        assert_near(packed[:, :5], logits[:, :5])
        assert json.loads(model.config.to_json_string())["mechanisms"]["cross_layer"] == {"every": 2}
        model.train()(ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
