"""The commands as functions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import headwater
import headwater_lab as lab
from headwater.util.errors import HeadwaterError
from headwater_lab.papers.table import read_tables

ROOT = Path(__file__).parents[1]
TINY = {
    "name": "tiny",
    "data": {"kind": "induction", "held_out": 4, "length": 8, "vocab_size": 8},
    "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"steps": 4, "batch_size": 2},
    "reporting": {"tensorboard": False, "log_every": 1, "evaluate_every": 2},
}
ARMS = {"base": {}, "shift": {"model": {"mechanisms": {"kv_shift": {}}}}, "wide": {"model": {"intermediate_size": 128}}}
COMPARED = TINY | {"compare": {"arms": ARMS, "baseline": "base", "seeds": [0, 1], "workers": 1}}


def test_train_takes_a_mapping_and_gives_table_and_model(tmp_path):
    heard = []
    run = lab.train(TINY, str(tmp_path / "run"), overrides=["seed=3"], on_event=lambda *said: heard.append(said))
    assert run.record.seed == 3
    assert [row["step"] for row in run.table()] == [2, 4]
    assert run.to_pandas()["accuracy"].tolist() == [row["accuracy"] for row in run.table()]
    assert [step for step, point in heard if point is None] == [1, 2, 3, 4]
    assert run.model().num_parameters() == run.record.parameters
    # The same from a file, by its path as text.
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(TINY))
    again = lab.train(str(file), tmp_path / "again", overrides=["seed=3"])
    assert again.table() == run.table()


@pytest.mark.slow  # two processes that import everything
def test_a_script_without_a_guard_compares(tmp_path):
    script = tmp_path / "statistics.py"  # and may be named as a module of Python's
    script.write_text(
        "import headwater_lab as lab\n"
        f"found = lab.compare({COMPARED!r}, 'out', workers=1)\nprint(sorted(found.means()))\n"
    )
    found = subprocess.run([sys.executable, "-P", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["['base', 'shift', 'wide']"]
    assert "Traceback" not in found.stderr


def test_plan_takes_presets_configs_and_checkpoints(tmp_path):
    config = headwater.preset("gpt2-124m", num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    rows = lab.plan("gpt2-124m", config, tmp_path, context=[64, 128], hardware="H100", tokens=1e9).table()
    assert [row["context"] for row in rows] == [64, 128] * 3
    assert rows[2]["parameters"] == rows[4]["parameters"] < rows[0]["parameters"]
    assert rows[0]["days"] > 0
    with pytest.raises(HeadwaterError, match="at least one"):
        lab.plan()


def test_plan_takes_what_the_command_takes(tmp_path, monkeypatch):
    from headwater_lab.recipe.recipe_files import read_recipe

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mechanism.yaml").write_text(json.dumps(COMPARED))
    for recipe in (COMPARED, read_recipe(COMPARED), "mechanism.yaml", tmp_path / "mechanism.yaml"):
        rows = lab.plan(recipe).table()
        assert [row["model"] for row in rows] == ["base", "shift", "wide"]
        assert rows[0]["context"] == 8
    assert "compare" in COMPARED  # the caller's mapping is not changed
    prices = lab.plan("shakespeare", "kv-shifting", "gpt2-124m", vocab_size=500, context=64).prices
    assert len(prices) > 3
    assert {price.shape["vocab_size"] for price in prices} == {500}
    (row,) = lab.plan("gpt2-124m", hardware="H100", tokens="300B", overrides=["num_hidden_layers=2"]).table()
    (same,) = lab.plan(headwater.preset("gpt2-124m", num_hidden_layers=2), hardware="H100", tokens=3e11).table()
    assert row["days"] > 0
    assert row | {"model": ""} == same | {"model": ""}


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        (["gpt2-124"], {}, "did you mean 'gpt2-124m'"),
        (["nowhere.yaml"], {}, "no recipe"),
        ([3], {}, "not 3"),
        ([TINY | {"modle": {}}], {}, "did you mean 'model'"),
        (["gpt2-124m"], {"tokens": "many"}, "tokens="),
        (["gpt2-124m"], {"batch": "3"}, "batch must be a whole number"),
        (["gpt2-124m"], {"context": "64"}, "context must be a whole number"),
        (["gpt2-124m"], {"context": 0}, "context must be a whole number"),
        (["gpt2-124m"], {"mfu": "high"}, "mfu must be a number"),
        (["gpt2-124m"], {"hardware": 100}, "such as 'H100'"),
        (["gpt2-124m"], {"overrides": ["hiden_size=3"]}, "did you mean 'hidden_size'"),
    ],
)
def test_mistakes_in_plan_get_one_sentence(models, options, said):
    with pytest.raises(HeadwaterError, match=said):
        lab.plan(*models, **options)


def test_a_stage_of_a_mapping_is_overridden_by_name():
    from headwater_lab.recipe.recipe_files import read_recipe

    recipe = TINY | {"stages": [{"name": "more", "training": {"steps": 2}}]}
    assert read_recipe(recipe, ["stages.more.training.steps=3"]).stages[0].training["steps"] == 3
    assert recipe["stages"][0]["training"]["steps"] == 2


def test_retrofit_starts_as_the_function_it_was(tmp_path):
    import torch

    run = lab.train(TINY, tmp_path)
    ids = torch.arange(8)[None]
    for source in (run.model(), str(tmp_path), tmp_path):
        model = lab.retrofit(source, ["kv_shift"])
        assert torch.equal(model(ids).logits, run.model()(ids).logits)


def test_retrofit_converts_without_mechanisms_and_takes_a_family(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    assert lab.retrofit(llama).num_parameters() == llama.num_parameters()
    assert lab.retrofit(llama, family="llama").config.mechanisms in (None, {})
    with pytest.raises(HeadwaterError, match="'lama'"):
        lab.retrofit(llama, family="lama")
    ours = lab.retrofit(llama, "kv_shift")
    with pytest.raises(HeadwaterError, match="name mechanisms"):
        lab.retrofit(ours)
    with pytest.raises(HeadwaterError, match="leave out family"):
        lab.retrofit(ours, "value_residual", family="llama")
    with pytest.raises(HeadwaterError, match="not 'dict'"):
        lab.retrofit({"a": 1}, "kv_shift")
    with pytest.raises(HeadwaterError, match="mechanisms must be"):
        lab.retrofit(llama, 3)


def test_grow_takes_a_model_or_its_folder_and_nothing_prints(tmp_path, capfd):
    from transformers.utils import logging

    pairs = {"model": TINY["model"] | {"mechanisms": {"pattention": {"attention_pairs": 4, "ffn_pairs": 8}}}}
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        run = lab.train(TINY | pairs, tmp_path)
        model = run.model()
        for source in (str(tmp_path), tmp_path, model):
            assert lab.grow(source, attention_pairs=6).config.mechanisms["pattention"]["attention_pairs"] == 6
        assert logging.is_progress_bar_enabled()  # as it was
    finally:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    said = "".join(capfd.readouterr())
    assert "Writing" not in said
    assert "Loading" not in said
    for source, error in ((tmp_path / "nowhere", "no local file or folder"), (3, "not 'int'")):
        with pytest.raises(HeadwaterError, match=error):
            lab.grow(source, attention_pairs=6)
    with pytest.raises(HeadwaterError, match=r"--resume \(resume=True\)"):
        lab.train(TINY | pairs, tmp_path)


def test_reproduce_gives_a_table_and_claims(tmp_path):
    name = next(name for name, table in read_tables().items() if table.computed == "tokenformer_flops")
    found = lab.reproduce(name, out=tmp_path)
    assert found.table()
    assert {verdict for _, verdict in found.claims()}
    with pytest.raises(HeadwaterError, match="no effect"):
        lab.reproduce(name, out=tmp_path, overrides=["training.steps=1"])
    with pytest.raises(HeadwaterError, match="cpu, gpu or paper"):
        lab.reproduce(name, "tpu", out=tmp_path)


def test_the_notebook_runs(tmp_path, monkeypatch, forked_workers):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for cell in cells:
        exec(cell, names)
    assert names["found"].means().keys() == {"vanilla", "shift"}
    frame = names["found"].to_pandas()
    assert set(zip(frame["arm"], frame["seed"], strict=True)) == {
        (arm, seed) for arm in ("vanilla", "shift") for seed in (0, 1)
    }
    assert frame.groupby("arm")["accuracy"].mean().to_dict() == pytest.approx(names["found"].means())
    assert names["found"]._repr_html_().count("<tr>") == 3
    assert (tmp_path / "runs" / "shift").is_dir()
