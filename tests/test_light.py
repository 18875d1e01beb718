"""What is imported when: a model needs torch and transformers, and the command line nothing but itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import processes
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.extras import MODULES
from headwater.reproduce import costs

PLOTS = ("plotly", "matplotlib", "sklearn")
FRAMES = ("lightning_fabric", "datasets", "tensorboard", "pandas")
COMMAND = "import sys; sys.argv[1:] = {arguments}; from headwater.cli import main\ntry: main()\nexcept SystemExit: pass"
FOLDER = "AutoModelForCausalLM.from_pretrained(sys.argv[1])"
TELL = "\nimport json, sys; print(json.dumps([name for name, module in sys.modules.items() if module]))"


def after(code: str, *arguments: str, blocked: tuple[str, ...] = ()) -> tuple[set[str], str]:
    """The modules that a fresh process has imported after some code, and what it printed."""
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    found = subprocess.run(
        [sys.executable, "-c", f"import sys\n{block}{code}{TELL}", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert found.returncode == 0, found.stderr
    *printed, last = found.stdout.splitlines()
    return set(json.loads(last)), "\n".join(printed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    HeadwaterForCausalLM(HeadwaterConfig(**sizes)).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["data", "prepare", "--help"], ["reproduce", "--list"]], ids=str
)
def test_help_and_lists_import_no_library_of_models(arguments):
    loaded, printed = after(COMMAND.format(arguments=arguments))
    assert printed
    assert not loaded & {"torch", "transformers", "scipy", "numpy", *PLOTS, *FRAMES}


def test_importing_headwater_imports_neither_torch_nor_transformers():
    loaded, _ = after("import headwater")
    assert not loaded & {"torch", "transformers", "numpy", "pydantic"}


BUILT = """
from headwater import HeadwaterConfig, HeadwaterForCausalLM
sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
HeadwaterForCausalLM(HeadwaterConfig(**sizes, mechanisms=["kv_shift", "pattention"]))
"""


def test_nothing_imports_more_than_it_needs():
    """A model comes without what trains and reports, a price without models, training without plots."""
    models = {"transformers.modeling_utils", "headwater.models.causal_lm"}
    needless = {
        BUILT: {"typer", "rich", "pydantic", *PLOTS, *FRAMES},
        COMMAND.format(arguments=["plan", "gpt2-124m"]): {*models, *PLOTS, *FRAMES},
        COMMAND.format(arguments=["plan", "tokenformer-124m"]): {*models, *PLOTS, *FRAMES},
        "import headwater.training.stages, headwater.compare": {*PLOTS, "jinja2.loaders.PackageLoader"},
    }
    made = processes.apart([code + TELL for code in needless], ["torch"])
    for code, (ended, printed, said) in zip(needless, made, strict=True):
        assert ended == 0, said
        *shown, last = printed.splitlines()
        assert not set(json.loads(last)) & needless[code], code
        assert "plan" not in code or "parameters" in "".join(shown)
        assert "training" not in code or "lightning_fabric" in json.loads(last)


ORDERS = {
    "headwater first": f"import headwater\nfrom transformers import AutoModelForCausalLM\nmodel = {FOLDER}",
    "Auto classes first": f"from transformers import AutoModelForCausalLM\nimport headwater\nmodel = {FOLDER}",
    "transformers first": f"import transformers, headwater\nmodel = transformers.{FOLDER}",
    # Half-way through importing Llama transformers imports its Auto classes.
    "within another import": "import headwater\nfrom transformers import LlamaForCausalLM, AutoModelForCausalLM\n"
    f"model = {FOLDER}",
    "config first": "from headwater import HeadwaterConfig\nconfig = HeadwaterConfig.from_pretrained(sys.argv[1])\n"
    "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_config(config)",
}


def test_auto_classes_know_the_models_in_any_order_of_imports(folder):
    before = f"import os, sys\nsys.argv[1:] = [{str(folder)!r}]\nos.environ['HF_HUB_OFFLINE'] = '1'\n"
    codes = [f"{before}{code}\nprint(type(model).__name__)" for code in ORDERS.values()]
    for order, (ended, printed, said) in zip(ORDERS, processes.apart(codes, ["torch"]), strict=True):
        assert (ended, printed.split()[-1:]) == (0, ["HeadwaterForCausalLM"]), (order, said)


EXTRAS = {
    ("train", "shakespeare"): "train",
    ("compare", "demo/induction"): "train",
    ("theory",): "report",
    ("report", "runs"): "report",
}


def test_a_missing_extra_is_a_sentence_with_the_command(tmp_path):
    codes = []
    for arguments, extra in EXTRAS.items():
        # Not what torch brings too.
        absent = {"scipy", "matplotlib", "plotly"} | ({"lightning_fabric", "datasets"} if extra == "train" else set())
        code = f"import os, sys; os.chdir({str(tmp_path)!r})\nfor name in {absent}: sys.modules[name] = None\n"
        codes.append(code + f"sys.argv[1:] = {list(arguments)}\nfrom headwater.cli import main\nmain()")
    for extra, (ended, _, said) in zip(EXTRAS.values(), processes.apart(codes, ["torch"]), strict=True):
        assert ended == 2, said
        assert f"pip install 'headwater[{extra}]'" in said.splitlines()[-1]
        assert "Traceback" not in said
    assert not list(tmp_path.rglob("*.safetensors"))


def test_every_module_of_an_extra_is_in_the_metadata():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert {*MODULES, "all", "compare", "serve", "docs", "dev"} == set(project["optional-dependencies"])


@pytest.mark.slow
def test_the_costs_that_are_stored_are_those_of_the_plans():
    """To renew them: python -m headwater.reproduce.costs."""
    found = costs.all_worked_out()
    assert found.keys() == costs._read().keys()
    for name, cost in found.items():
        stored = costs._read()[name]
        assert (stored.runs, stored.of) == (cost.runs, cost.of), name
        assert stored.hours == pytest.approx(cost.hours), name


def test_the_stored_cost_of_a_table_is_that_of_its_plans(tmp_path, monkeypatch):
    from headwater.reproduce import prepare

    for scale in ("cpu", "gpu", "paper"):
        stored = costs.known("kv-shifting/figure-1a", scale)
        assert stored is not None, "a recipe or table has changed: python -m headwater.reproduce.costs"
        assert costs.worked_out(prepare("kv-shifting/figure-1a", scale, tmp_path)) == stored
    monkeypatch.setattr(costs, "_digest", lambda name, scale: "of changed files")
    assert costs.known("kv-shifting/figure-1a", "cpu") is None
