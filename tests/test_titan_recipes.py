"""Recipes that torchtitan's trainer would not follow are refused, with or without torchtitan."""

import pytest

from headwater.mechanisms.contract import Mechanism
from headwater.util.errors import HeadwaterError
from headwater_lab.recipe.recipe import parse
from headwater_lab.recipe.training_section import Reporting, Training
from headwater_lab.titan.recipe_limits import CHOICES, FOLLOWED, check_hooks, check_recipe

DATA = {"kind": "induction", "length": 16}
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}


def make(**sections):
    return parse({"name": "small", "data": DATA, "model": SMALL} | sections, "test")


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("training", {"optimizer": "muon"}, "training.optimizer=muon"),
        ("training", {"schedule": "wsd"}, "training.schedule=wsd"),
        ("training", {"z_loss": 0.1}, "training.z_loss=0.1"),
        ("training", {"loss_chunk_tokens": 64}, "training.loss_chunk_tokens=64"),
        ("training", {"precision": "64-true"}, "training.precision=64-true"),
        ("training", {"trainable_mechanisms": ["kv_shift"]}, "training.trainable_mechanisms="),
        ("training", {"ema_decay": 0.9}, "training.ema_decay=0.9"),
        ("training", {"distillation": {"teacher": "gpt2"}}, "training.distillation="),
        ("training", {"max_skipped_steps": 1}, "training.max_skipped_steps=1"),
        ("training", {"compile": "whole"}, "training.compile=whole"),
        ("training", {"device": "cpu"}, "training.device=cpu"),
        ("training", {"strategy": "ddp"}, "training.strategy=ddp"),
        ("reporting", {"evaluate_every": 2}, "reporting.evaluate_every=2"),
    ],
)
def test_a_setting_that_the_trainer_lacks_is_refused(section, values, message):
    with pytest.raises(HeadwaterError, match=f"does not support {message}.*; leave it out, or use `headwater train`"):
        check_recipe(make(**{section: values}))


def test_a_cuda_graph_is_refused_by_itself_too():
    recipe = make()  # the recipe itself demands compile=whole with it
    training = recipe.training.model_copy(update={"cuda_graphs": True})
    with pytest.raises(HeadwaterError, match="cuda_graphs=True"):
        check_recipe(recipe.model_copy(update={"training": training}))


class LaterTraining(Training):
    novelty: int = 1


class LaterReporting(Reporting):
    novelty: int = 1


@pytest.mark.parametrize(("section", "later"), [("training", LaterTraining), ("reporting", LaterReporting)])
def test_a_setting_that_no_list_names_is_refused(section, later):
    recipe = make()
    check_recipe(recipe.model_copy(update={section: later()}))
    with pytest.raises(HeadwaterError, match=f"does not support {section}.novelty=2"):
        check_recipe(recipe.model_copy(update={section: later(novelty=2)}))


def test_a_section_that_the_trainer_lacks_is_refused():
    arms = {"arms": {"a": {}}, "baseline": "a"}
    stage = {"name": "more", "training": {"steps": 5}}
    for section, value in {"compare": arms, "stages": [stage], "start": {"checkpoint": "folder"}}.items():
        with pytest.raises(HeadwaterError, match=f"this recipe has {section}; remove the section"):
            check_recipe(make(**{section: value, "model": {} if section == "start" else SMALL}))


def test_followed_settings_are_accepted():
    check_recipe(make())
    for section, fields in {"training": Training, "reporting": Reporting}.items():
        assert set(FOLLOWED[section]) <= set(fields.model_fields)
    for name, values in CHOICES.items():
        assert name not in FOLLOWED["training"]
        for value in values:
            check_recipe(make(training={name: value}))
    check_recipe(make(training={"threads": 2, "timeout_minutes": 7}, reporting={"wandb": "mine", "save_every": None}))


class Hooked(Mechanism):
    def prepare_training(self, step):
        return {}

    def prepare_step(self, kept, step):
        pass

    @classmethod
    def describe_training(cls, modules, step):
        return None


def test_a_mechanism_with_a_hook_per_step_is_refused():
    recipe = make(model=SMALL | {"mechanisms": {f"{__name__}:Hooked": {}}})
    check_recipe(recipe)
    with pytest.raises(HeadwaterError, match="does not call prepare_step"):
        check_hooks(recipe.config_for(recipe.data.build()))
