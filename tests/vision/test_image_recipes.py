"""Recipes of images are priced without reading an image."""

from pathlib import Path

import pytest

from headwater.errors import HeadwaterError
from headwater.price import price
from headwater.priced import configs

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("name", "classes"), [("vision/digits", 10), ("cpu/tokenformer-glyphs", 36), ("vision/imagenet-l16", 1000)]
)
def test_a_recipe_of_images_has_the_classes_of_its_data(name, classes):
    found = configs([RECIPES / f"{name}.yaml"])
    assert {config.num_labels for config in found.values()} == {classes}


def test_arms_are_matched_as_the_paper_matches_them():
    found = configs([RECIPES / "cpu/tokenformer-glyphs.yaml"])
    counts = {name: sum(price(config).parameters.values()) for name, config in found.items()}
    assert counts["TokenFormer, matched"] == pytest.approx(counts["ViT"], rel=0.02)


def test_classes_that_only_the_images_know_are_asked_for():
    recipe = {"name": "own", "data": {"kind": "images", "source": "nowhere"}, "model": {"hidden_size": 192}}
    with pytest.raises(HeadwaterError, match="num_labels"):
        configs([recipe])
    assert configs([recipe], ["num_labels=7"])["own"].num_labels == 7
