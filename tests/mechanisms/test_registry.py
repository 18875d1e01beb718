"""The scan of `headwater/mechanisms` finds every mechanism, however its class is written."""

from importlib import import_module
from pkgutil import iter_modules

import pytest

import headwater.mechanisms
from headwater.mechanisms.contract import Mechanism
from headwater.plugins import mechanisms as mechanism_registry
from headwater.plugins.mechanisms import MECHANISM_CLASSES, MECHANISMS


def list_defined():
    """The mechanisms' classes, by importing every file."""
    names = [module.name for module in iter_modules(headwater.mechanisms.__path__)]
    modules = [import_module(f"headwater.mechanisms.{name}") for name in names]
    return {
        thing
        for module in modules
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Mechanism) and thing.__module__ == module.__name__
    } - {Mechanism}


def test_every_class_is_found_and_every_name_is_its_own():
    defined = list_defined()
    assert {kind.__name__ for kind in defined} == {*MECHANISM_CLASSES, "Blend"}
    ordered = [kind for kind in defined if "order" in vars(kind)]
    assert len({kind.order for kind in ordered}) == len(ordered) == len(MECHANISMS.built_in)
    by_order = sorted(ordered, key=lambda kind: kind.order)
    assert [MECHANISMS.resolve(name) for name in MECHANISMS.built_in] == by_order


@pytest.mark.parametrize(
    "bases", ["Mechanism", "KeepsPrecision, Mechanism", "Mechanism, Splits", "\n    KeepsPrecision,\n    Mechanism,\n"]
)
def test_a_class_is_found_however_its_bases_are_written(bases, tmp_path, monkeypatch):
    (tmp_path / "mechanisms").mkdir()
    source = f"class Table(Mechanism):\n    pass\n\n\nclass Mine({bases}):\n    order = 7\n"
    (tmp_path / "mechanisms" / "mine.py").write_text(source)
    monkeypatch.setattr(mechanism_registry, "__file__", str(tmp_path / "plugins" / "mechanisms.py"))
    classes, mechanisms = mechanism_registry.scan_mechanisms()
    assert mechanisms == {"mine": "headwater.mechanisms.mine:Mine"}
    assert set(classes) == {"Table", "Mine"}
