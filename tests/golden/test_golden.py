"""What the code does is what the golden files say. `make.py` says what they are, and makes them."""

import json
import os
from importlib.util import find_spec

import pytest
from exported import exported_logits
from matching import FOLDER, check, read, tensor_differences
from product import DATA_KINDS, MECHANISM_NAMES, SHIPPED
from safetensors.torch import load_file
from served import served
from shipped import estimates, recipe_runs
from tiny_models import TEXTS, models
from tiny_runs import LANGUAGE, PICTURES, SYNTHETIC, comparison, data_runs, picture_runs
from verdicts import count_shipped, verdicts


def test_the_same_recipes_are_the_same_runs():
    check("recipes", recipe_runs())


def test_estimates_of_presets():
    check("estimates", estimates())


def test_logits_and_greedy_tokens():
    check("models", models())


def test_exported_folders_without_the_package():
    golden = load_file(FOLDER / "models.safetensors")
    logits = exported_logits()
    assert not tensor_differences(logits, {name: golden[name] for name in logits})


def test_runs():
    check("runs", data_runs())


@pytest.mark.skipif(not all(map(find_spec, ("sklearn", "PIL"))), reason="the extra vision is not installed")
def test_runs_on_images():
    check("pictures", picture_runs())


def test_comparison(forked_workers):
    check("comparison", comparison())


@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, ("fastapi", "uvicorn", "openai"))), reason="the extra serve is missing")
def test_served_tokens():
    check("served", served())


@pytest.mark.slow
def test_verdicts_of_the_stored_runs():
    check("verdicts", verdicts())


def test_the_list_of_tables_shows_the_verdicts_of_the_stored_runs():
    assert json.loads(SHIPPED.read_text()) == count_shipped(read("verdicts")["tables"])


def test_nothing_is_left_out():
    assert set(MECHANISM_NAMES) <= set(TEXTS)
    assert {data["kind"] for data in (SYNTHETIC | LANGUAGE | PICTURES).values()} == set(DATA_KINDS)
    assert read("models").keys() >= {"greedy"}


def test_files_are_small():
    assert sum(os.path.getsize(path) for path in FOLDER.iterdir() if path.is_file()) < 1_500_000
