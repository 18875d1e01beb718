"""A small corpus and recipes for it."""

import pytest

from headwater.recipe import parse


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(25):
        (folder / f"{i}.txt").write_text(f"Document {i} says {i * i} and {'na' * (i % 5)}. " * 6)
    return folder


@pytest.fixture
def recipe(corpus):
    """Makes recipes; the arguments are sections to change, e.g. training={"steps": 3}."""

    def make(**changes):
        values = {
            "name": "small",
            "data": {"kind": "text", "source": str(corpus), "context": 32},
            "model": {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "residual_dropout": 0.1,
                "mechanisms": {"kv_shift": {}, "value_residual": {}},
            },
            "training": {"steps": 12, "batch_size": 4, "accumulate": 2, "warmup_steps": 2, "threads": 1},
            "reporting": {"log_every": 3, "save_every": 4, "evaluate_every": 6, "tensorboard": False},
        }
        for section, fields in changes.items():
            values[section] = values[section] | fields if isinstance(fields, dict) else fields
        return parse(values, "test")

    return make
