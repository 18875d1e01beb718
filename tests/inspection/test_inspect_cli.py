"""`headwater inspect` as a user meets it; what is drawn is what is in the JSON."""

import json
import shutil

import numpy as np
import pytest
import torch

from conftest import build
from headwater.util.files import replace_text
from headwater_lab.data.tokenizer import load_tokenizer
from headwater_lab.inspection import inspect_model, to_json
from headwater_lab.inspection.inspection_pictures import draw_pictures, heads_picture, scalars_picture
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.loop import train
from headwater_lab.training.saving import write_model
from headwater_lab.training.trained_models import Trained, open_trained

SHIFT = {"kv_shift": {}, "value_residual": {}}
PAIRS = {"pattention": {"attention_pairs": 7, "ffn_pairs": 13}, "skip_layer": {"layers": 1, "heads": 2}}
BYTES = dict(vocab_size=257)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bytes")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(f"{i} squared is {i * i}." for i in range(60)))
    return file


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    """Makes checkpoints: mechanisms, name, fields of the config -> folder."""

    def make(mechanisms=None, name="model", tokens=True, **changes):
        return write_model(tmp_path / name, build(mechanisms, **BYTES | changes), tokenizer if tokens else None)

    return make


@pytest.fixture(scope="module")
def inspected(tmp_path_factory, tokenizer):
    """Two different models that have read a text."""
    file = tmp_path_factory.mktemp("text") / "numbers.txt"
    file.write_text(" ".join(f"{i} squared is {i * i}." for i in range(60)))
    sizes = [dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1), {}]
    return [
        inspect_model(Trained(name, build(mechanisms, **BYTES | changes), tokenizer, [], {}), name, file, rows=4)
        for name, mechanisms, changes in zip(("shift", "pairs"), (SHIFT, PAIRS), sizes, strict=True)
    ]


@pytest.mark.slow
def test_two_side_by_side(run, checkpoint, text, tmp_path):
    first, second = checkpoint(SHIFT, "shift", num_hidden_layers=2), checkpoint(PAIRS, "pairs")
    code, out, err = run("inspect", first, second, "--text", text, "--rows", 4, "--out", tmp_path / "out")
    assert code == 0
    for words in ("shift", "pairs", "α1 (kv_shift)", "induction", "share of heads that", "o_proj"):
        assert words in out
    assert "inspect.json" in err
    content = json.loads((tmp_path / "out" / "inspect.json").read_text())
    assert content["schema_version"] == 2
    assert [one["name"] for one in content["models"]] == ["shift", "pairs"]
    assert [one["layers"] for one in content["models"]] == [2, 3]
    pictures = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert pictures == ["inspect-heads.png", "inspect-scalars.png", "inspect.json"]
    again = [inspect_model(open_trained(path), path.name, text, rows=4) for path in (first, second)]
    assert json.loads(json.dumps(to_json(again))) == content


@pytest.mark.slow
def test_by_default_what_it_was_trained_on(run, recipe, finished, tmp_path, corpus):
    finished(recipe(training={"steps": 2}), tmp_path / "run")
    code, out, _ = run("inspect", tmp_path / "run", "--rows", 4, "--out", tmp_path / "out", "--trust", corpus)
    assert code == 0
    (one,) = json.loads((tmp_path / "out" / "inspect.json").read_text())["models"]
    assert one["sample"] == {"rows": 4, "tokens": 32, "patches": None}
    assert "entropy" in out


@pytest.mark.slow
def test_scalars_need_no_text_and_no_tokenizer(run, checkpoint, tmp_path):
    code, out, _ = run("inspect", checkpoint(SHIFT, tokens=False), "--scalars", "--out", tmp_path / "out")
    assert code == 0
    assert "entropy" not in out
    (one,) = json.loads((tmp_path / "out" / "inspect.json").read_text())["models"]
    assert one["read"] is one["sample"] is one["induction"] is None
    assert one["census"]["heads"] == 6
    assert (tmp_path / "out" / "inspect-scalars.png").is_file()


def test_a_model_without_scalars_draws_no_picture_of_them(run, checkpoint, tmp_path):
    code, _, _ = run("inspect", checkpoint(), "--scalars", "--out", tmp_path / "out")
    assert code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["inspect.json"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["model"], "pass a similar text with --text FILE, or --scalars"),
        (["model", "--text", "short.txt"], "a text of at least 64"),
        (["model", "--text", "none.txt"], "no text"),
        (["model", "--text", "/dev/zero"], "regular file"),
        (["model", "--text", "1" * 5000], "cannot be read"),
        (["plain", "--text", "numbers.txt"], "has no tokenizer"),
        (["model", "--text", "numbers.txt", "--rows", "0"], "--rows must be at least 4, not 0"),
        (["model", "--text", "numbers.txt", "--context", "3"], "--context must be at least 16"),
    ],
)
def test_mistakes_get_one_sentence(run, checkpoint, text, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    checkpoint(SHIFT)
    checkpoint(SHIFT, "plain", tokens=False)
    replace_text(tmp_path / "short.txt", "too short")
    code, out, err = run("inspect", *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("headwater: ")
    assert message in line


@pytest.mark.slow
def test_two_of_one_name(run, checkpoint, tmp_path):
    first = checkpoint(SHIFT)
    shutil.copytree(first, tmp_path / "elsewhere" / "model")
    run("inspect", first, tmp_path / "elsewhere" / "model", "--scalars", "--out", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "inspect.json").read_text())["models"]
    assert [one["name"] for one in found] == ["model", "model (2)"]


# Pictures


def images(figure):
    """Title -> what is drawn there, and its color scale."""
    return {
        axes.get_title(loc="left").replace("\n", " ").strip(): (
            np.asarray(axes.images[0].get_array()),
            axes.images[0].get_clim(),
        )
        for axes in figure.axes
        if axes.images
    }


def test_heads_are_drawn_as_in_the_json(inspected):
    shift, pairs = to_json(inspected)["models"]
    figure = heads_picture(inspected)
    found = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    wanted = [
        one[part][name]
        for name, part in [
            ("normalized_entropy", "read"), ("first_token", "read"), ("previous_token_effective", "read"),
            ("effective", "induction"), ("use", "read"),
        ]
        for one in (shift, pairs)
    ]  # fmt: skip
    for expected in wanted:
        assert any(array.shape == np.shape(expected) and np.allclose(array, expected) for array in found)
    assert len(found) == len(wanted)
    assert len({image[1] for image in images(figure).values()}) == 1
    assert {axes.get_ylim() for axes in figure.axes} == {(2.5, -0.5)}


def test_layers_of_other_heads_are_drawn_beside_each_other(tokenizer, text):
    other = dict(
        sliding_window=5, sliding_layers=[1], sliding_fields=dict(num_attention_heads=6, num_key_value_heads=3)
    )
    model = build({"kv_shift": {}}, **BYTES | other)
    found = [inspect_model(Trained("other heads", model, tokenizer, [], {}), "other heads", text, rows=4)]
    assert [len(row) for row in found[0].read.use] == [4, 6, 4]
    drawn = images(heads_picture(found))["share of output"][0]
    assert np.allclose(drawn[1], found[0].read.use[1])
    assert np.allclose(drawn[0, :4], found[0].read.use[0])
    assert np.isnan(drawn[0, 4:]).all()


def test_scalars_are_drawn_as_in_the_json(inspected):
    figure = scalars_picture(inspected)
    (shift, _) = to_json(inspected)["models"]
    drawn = {title.split()[-1]: array for title, (array, _) in images(figure).items()}
    assert set(drawn) == {"α1", "α2", "β1", "β2"}
    for symbol, array in drawn.items():
        rows = [scalar["values"] for scalar in shift["scalars"] if scalar["symbol"] == symbol]
        assert np.allclose(array, rows)


@pytest.mark.slow
def test_large_models_are_drawn_without_numbers(tmp_path):
    many = build(SHIFT, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=8)
    found = [inspect_model(Trained(name, many, None, [], {}), name, scalars_only=True) for name in "ab"]
    assert not any(axes.texts for axes in scalars_picture(found).axes)
    assert [path.name for path in draw_pictures(found, tmp_path)] == ["inspect-scalars.png"]


def test_a_model_of_numbers_reads_its_task(run, tmp_path, recipe):
    """Rows that are no text: a synthetic task's."""
    model = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mechanisms": {"pattention": {}}}
    task = recipe(training={"steps": 2}, model=model)
    values = task.model_dump(mode="json")
    values["data"] = {"kind": "induction", "vocab_size": 20, "length": 20}
    train(parse(values, "test"), tmp_path / "run")
    one = inspect_model(open_trained(tmp_path / "run"), "run", rows=4)
    assert torch.tensor(one.read.entropy).isfinite().all()


def test_scalars_alone_read_no_rows(run, checkpoint, text):
    code, _, err = run("inspect", checkpoint(SHIFT, "shift"), "--scalars", "--text", text)
    assert (code, "--scalars reads no rows" in err) == (2, True)
