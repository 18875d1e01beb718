"""The commands as functions."""

import ast
import inspect
import json
import linecache
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headwater
import headwater.mechanisms
import headwater_lab as lab
from conftest import forking
from headwater.util.errors import HeadwaterError
from headwater_lab.api.common import make_frame, write_html
from headwater_lab.api.comparing import Compared
from headwater_lab.comparison.pool import Outcome
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
    run = lab.train(TINY, str(tmp_path / "run"), overrides=["seed=3"], on_event=lambda *event: heard.append(event))
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
    estimates = lab.plan("shakespeare", "kv-shifting", "gpt2-124m", vocab_size=500, context=64).estimates
    assert len(estimates) > 3
    assert {estimate.shape["vocab_size"] for estimate in estimates} == {500}
    (row,) = lab.plan("gpt2-124m", hardware="H100", tokens="300B", overrides=["num_hidden_layers=2"]).table()
    (same,) = lab.plan(headwater.preset("gpt2-124m", num_hidden_layers=2), hardware="H100", tokens=3e11).table()
    assert row["days"] > 0
    assert row | {"model": ""} == same | {"model": ""}


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        (["gpt2-124"], {}, "did you mean 'gpt2-124m'"),
        (["nowhere.yaml"], {}, "no recipe"),
        (["nowhere"], {}, r"'nowhere'; `headwater list presets` and `headwater list recipes` list those shipped\.$"),
        ([3], {}, "not 3"),
        ([TINY | {"modle": {}}], {}, "did you mean 'model'"),
        (["gpt2-124m"], {"tokens": "many"}, "tokens="),
        (["gpt2-124m"], {"batch": "3"}, "batch must be a whole number"),
        (["gpt2-124m"], {"context": "64"}, "context must be a whole number"),
        (["gpt2-124m"], {"context": 0}, "context must be a whole number"),
        (["gpt2-124m"], {"mfu": "high"}, "mfu must be a number"),
        (["gpt2-124m"], {"hardware": 100}, "such as 'H100'"),
        (["gpt2-124m"], {"overrides": ["hiden_size=3"]}, "did you mean 'hidden_size'"),
        (["gpt2-124m"], {"overrides": "hidden_size=3"}, "takes a list of texts"),
        (["gpt2-124m"], {"contxt": 64}, "did you mean 'context'"),
    ],
)
def test_mistakes_in_plan_get_one_sentence(models, options, message):
    with pytest.raises(HeadwaterError, match=message):
        lab.plan(*models, **options)


def test_a_single_text_is_no_list_of_overrides(tmp_path):
    with pytest.raises(HeadwaterError, match=r"write overrides=\['training.steps=3'\]"):
        lab.train(TINY, tmp_path, overrides="training.steps=3")


def test_grow_suggests_the_field_for_a_wrong_name(tmp_path):
    with pytest.raises(HeadwaterError, match="grow has no field 'n_layer'; did you mean 'num_hidden_layers'"):
        lab.grow(tmp_path, n_layer=4)


def test_plan_reads_the_vocabulary_of_prepared_folders(tmp_path):
    from headwater_lab.data.prepare import Options, prepare
    from headwater_lab.data.stream import TextSource

    (tmp_path / "notes.txt").write_text("".join(f"{i}: a line\n" for i in range(3000)))
    prepare(TextSource(str(tmp_path / "notes.txt")), tmp_path / "tokens", "bytes", Options(held_out=0.2))
    for source in (str(tmp_path / "tokens"), {str(tmp_path / "tokens"): 1.0}):
        (estimate,) = lab.plan(TINY | {"data": {"kind": "prepared", "source": source, "context": 8}}).estimates
        assert estimate.shape["vocab_size"] == 257


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
    text = "".join(capfd.readouterr())
    assert "Writing" not in text
    assert "Loading" not in text
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


NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def run_cell(code: str, names: dict) -> object:
    """Run the code of a cell; what its last line gives is what a notebook shows."""
    *statements, last = ast.parse(code).body
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The names of the shipped notebook after its run, and what its cells show, by their last line."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch, forking():
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        shown = {cell["source"][-1].strip(): run_cell("".join(cell["source"]), names) for cell in cells}
        yield names, shown


def test_the_notebook_runs_and_shows_pictures(shown):
    _, shown = shown
    pictures = [shown[f"{result}.picture()"] for result in ("run", "compared")]
    assert all(picture._repr_png_().startswith(b"\x89PNG") for picture in pictures)
    assert shown["compared.report()"].is_file()
    for result in ("plan", "run", "compared"):
        assert len(repr(shown[result]).splitlines()) <= 3
        assert len(repr(shown[result])) < 400
        assert pickle.loads(pickle.dumps(shown[result])).table() == shown[result].table()
        table = shown[result]._repr_html_()
        assert table.count("<table>") == 1
        assert "color" not in table  # which a dark or a light theme has


def test_frames_have_numbers(shown):
    names, _ = shown
    frame = names["compared"].to_pandas()
    texts = {"comparison", "size", "metric", "arm", "verdict"}
    assert set(frame.select_dtypes(exclude="number")) == texts
    results = {
        "seeds",
        "diverged",
        "mean",
        "sd",
        "difference",
        "low",
        "high",
        "level",
        "p",
        "more_seeds",
        "learning_rate",
    }
    costs = {"parameters", "tokens", "flops", "seconds", "tokens_per_second", "cache_bytes_per_token"}
    assert set(frame) == texts | results | costs
    base, shift = (frame[frame["arm"] == arm].iloc[0] for arm in ("vanilla", "shift"))
    assert base["mean"] == names["compared"].means()["vanilla"]
    assert shift["mean"] - base["mean"] == pytest.approx(shift["difference"])
    assert shift["low"] < shift["difference"] < shift["high"]
    assert shift["level"] == pytest.approx(0.95)
    assert shift["verdict"] == "better"
    assert names["compared"].text_table()[1]["arm"] == "shift"
    runs, looks = (names["compared"].to_pandas(by) for by in ("run", "evaluation"))
    assert set(zip(runs["arm"], runs["seed"], strict=True)) == {
        (arm, n) for arm in ("vanilla", "shift") for n in (0, 1, 2)
    }
    assert runs.groupby("arm")["accuracy"].mean().to_dict() == pytest.approx(names["compared"].means())
    assert (
        looks.groupby(["arm", "seed"])["accuracy"].last().tolist()
        == runs.sort_values(["arm", "seed"])["accuracy"].tolist()
    )
    assert names["plan"].to_pandas()["training_flops_per_token"].dtype.kind in "if"
    assert make_frame([{"sd": None, "low": None}, {"sd": None, "low": 1}]).dtypes.map(str).tolist() == ["float64"] * 2
    with pytest.raises(HeadwaterError, match="arm, run or evaluation"):
        names["compared"].table("arms")


def test_results_are_loaded_from_their_folder(shown):
    names, _ = shown
    for result in ("run", "compared"):
        loaded = lab.load_results(names[result].folder)
        assert repr(loaded) == repr(names[result])
        assert loaded.table() == names[result].table()


def test_names_are_text_in_html():
    html = write_html("<i>", [{"<b>": "</td><script>"}], "a < b")
    assert "&lt;i&gt;" in html
    assert "<th>&lt;b&gt;</th>" in html
    assert "<td>&lt;/td&gt;&lt;script&gt;</td>" in html
    assert "a &lt; b" in html


def test_a_comparison_without_a_finished_run_says_why(tmp_path):
    compared = Compared(tmp_path, ["x"], [Outcome("a · seed 0", None, "no <memory>")])
    assert "1 trial failed (.failed), the first: a · seed 0: no <memory>" in repr(compared)
    assert "no &lt;memory&gt;" in compared._repr_html_()


def test_reproduced_tables_have_numbers_and_a_picture(tmp_path):
    found = lab.reproduce("kv-shifting/figure-2", out=tmp_path)
    frame = found.to_pandas()
    assert frame[frame["column"] == "mean speed"]["ours"].is_monotonic_decreasing
    assert frame[frame["column"].str.startswith("starts that end")]["ours"].tolist() == [1.0] * 3
    assert found.picture()._repr_png_().startswith(b"\x89PNG")
    assert found._repr_html_().count("<table>") == 2
    assert len(repr(found).splitlines()) <= 3
    with pytest.raises(HeadwaterError, match="has no figure"):
        lab.reproduce("tokenformer/table-3", out=tmp_path).picture()


@pytest.mark.slow  # a kernel, and processes that import everything
def test_the_notebook_runs_in_jupyter(tmp_path):
    """Also what only a notebook has: progress, an error in a sentence, a cell that is stopped and run again."""
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(NOTEBOOK, 4)
    stop = "import os, signal, threading; threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    more = [
        'lab.train("nanogtp")',
        f'{stop}lab.train(recipe, "runs/long", overrides=["training.steps=100000"])',
        'lab.load_results("runs/long")',
    ]
    book.cells += map(nbformat.v4.new_code_cell, more)
    client.NotebookClient(
        book, resources={"metadata": {"path": str(tmp_path)}}, allow_errors=True, timeout=120
    ).execute()
    outputs = {cell.source.splitlines()[-1]: cell.outputs for cell in book.cells if cell.cell_type == "code"}
    for name in ("plan", "run", "compared"):
        assert name == "plan" or outputs[f"{name}.picture()"][-1].data["image/png"]
        assert "<table>" in outputs[name][-1].data["text/html"]
    assert "300/300" in outputs["run"][0].data["text/plain"]
    assert "<progress" in outputs["compared"][0].data["text/html"]
    for name, message in zip(more, ("There is no recipe 'nanogtp'", "Stopped after step", ""), strict=True):
        output = outputs[name.splitlines()[-1]][-1]
        assert output.output_type == ("error" if message else "execute_result")
        if message:
            place, sentence = output.traceback
            assert place.endswith(name.splitlines()[-1])
            assert message in sentence
    assert "runs/long: stopped" in outputs[more[-1]][-1].data["text/plain"]


def test_an_error_in_a_notebook_has_the_lines_of_its_cells():
    code = "import headwater_lab as lab\ndef mine():\n    lab.plan()\nmine()"
    linecache.cache["cell"] = len(code), None, code.splitlines(True), "cell"
    with pytest.raises(HeadwaterError) as caught:
        exec(compile(code, "cell", "exec"), {"__name__": "__main__"})
    *lines, sentence = caught.value._render_traceback_()
    assert lines == ["line 4: mine()", "line 3: lab.plan()"]
    assert sentence == f"HeadwaterError: {caught.value}"


@pytest.mark.parametrize("module", [headwater, headwater.mechanisms, lab])
def test_modules_list_public_names_before_and_after_use(module):
    before = dir(module)
    for name in module.__all__:
        getattr(module, name)
    assert dir(module) == before == sorted(module.__all__)


def test_functions_have_signatures_docstrings_and_types():
    for name in lab.__all__:
        function = getattr(lab, name)
        assert inspect.getdoc(function)
        signature = inspect.signature(function, eval_str=True)
        assert signature.return_annotation not in (inspect.Signature.empty, Any)
        assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())
    assert inspect.signature(lab.compare).return_annotation is Compared


@pytest.mark.parametrize("module", [headwater, headwater.mechanisms, lab])
def test_type_checkers_know_all_public_names(module):
    """What is imported at first use stands in the module for type checkers too."""
    tree = ast.parse(Path(module.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    assert {name for name in module.__all__ if not name.startswith("__")} <= known
