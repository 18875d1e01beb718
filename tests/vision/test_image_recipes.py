"""Recipes of images are estimated without reading an image."""

from pathlib import Path

import pytest

from headwater.cost import estimate_model
from headwater.util.errors import HeadwaterError
from headwater_lab.training.model_estimates import plan_models

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("name", "classes"), [("vision/digits", 10), ("cpu/tokenformer-glyphs", 36), ("vision/imagenet-l16", 1000)]
)
def test_a_recipe_of_images_has_the_classes_of_its_data(name, classes):
    found = plan_models([RECIPES / f"{name}.yaml"])
    assert {one.config.num_labels for one in found.values()} == {classes}


def test_arms_are_matched_as_the_paper_matches_them():
    found = plan_models([RECIPES / "cpu/tokenformer-glyphs.yaml"])
    counts = {name: sum(estimate_model(one.config).parameters.values()) for name, one in found.items()}
    assert counts["TokenFormer, matched"] == pytest.approx(counts["ViT"], rel=0.02)


def test_classes_that_only_the_images_know_are_asked_for():
    recipe = {"name": "own", "data": {"kind": "images", "source": "nowhere"}, "model": {"hidden_size": 192}}
    with pytest.raises(HeadwaterError, match="num_labels"):
        plan_models([recipe])
    assert plan_models([recipe], ["num_labels=7"])["own"].config.num_labels == 7
