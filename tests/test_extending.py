"""docs/extending.md: every example runs, as a user would have it in files of his own."""

import re
import sys
from pathlib import Path

import pytest

from headwater.testing import Contract
from headwater.testing.contract_suite import DECODING
from headwater_lab.recipe.recipe_files import load_recipe
from headwater_lab.training.loop import train
from references import run_check

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
BLOCKS = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's files, in the current folder."""
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield tmp_path
    for name in BLOCKS:
        sys.modules.pop(Path(name).stem, None)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name.endswith(".yaml")])
def test_recipes_train(folder, name):
    recipe = load_recipe(name)
    record = train(recipe, folder / "run")
    assert record.status == "finished"
    assert all(point.loss > 0 for point in record.curve)


def test_schedule_and_optimizer_are_the_page_s(folder):
    from headwater_lab.training.optimizers import learning_rate

    recipe = load_recipe("optimizer.yaml", ["training.steps=11", "training.learning_rate=1.0"])
    rates = [learning_rate(step, recipe.training) for step in range(11)]
    assert rates[:9] == [1.0] * 9
    assert rates[10] == pytest.approx(0.5)


def test_the_mechanism_keeps_its_contract(folder):
    """The page's own test, on a case; tests/contract has the suite's own tests."""
    namespace: dict = {}
    exec(compile(BLOCKS["test_value_mix.py"], "test_value_mix.py", "exec"), namespace)
    suite = namespace["TestValueMix"]()
    assert isinstance(suite, Contract)
    case = suite.cases()[1].values[0]
    assert "rank=3" in str(case)
    for check in (
        suite.test_forward_equals_naive,
        suite.test_gradients_equal_naive,
        suite.test_packed_documents_equal_separate,
        suite.test_every_parameter_gets_a_gradient,
        suite.test_parameters_are_counted,
        suite.test_tables_are_looked_up,
        suite.test_more_tokens,
        suite.test_starts_are_drawn_by_name,
        suite.test_branching_rows,
        suite.test_saved_is_what_autograd_keeps,
        suite.test_work_grows_with_the_tokens_alone,
    ):
        run_check(check, case)
    for way in DECODING:
        run_check(suite.test_cached_equals_uncached, case, way=way)


def test_the_family_reads_a_checkpoint(folder):
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from headwater.conversion import from_transformers

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    theirs = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=1, sliding_window=None)).eval()
    ours = from_transformers(theirs, "plain_mistral:FAMILY").eval()
    ids = torch.arange(20)[None]
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)
