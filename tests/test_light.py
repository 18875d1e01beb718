"""What is imported when: a model needs torch and transformers, and the command line nothing but itself."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from apart import apart
from conftest import Wanted
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.util.extras import MODULES
from test_report import BASE, GOOD, saved, three

PLOTS = ("matplotlib", "sklearn")
FRAMES = ("lightning_fabric", "datasets", "tensorboard", "pandas")
COMMAND = (
    "import sys; sys.argv[1:] = {arguments}; from headwater_lab.cli import main\ntry: main()\nexcept SystemExit: pass"
)
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


newer = pytest.mark.skipif(version("transformers").startswith("5.17."), reason="it imports scikit-learn where it is")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    HeadwaterForCausalLM(HeadwaterConfig(**sizes)).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["data", "prepare", "--help"]],
    ids=str,
)
def test_help_imports_no_library_of_models(arguments):
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


@newer
def test_nothing_imports_more_than_it_needs(folder):
    """A model and an estimate come without what trains and reports, and training without plots and reports."""
    trained = {*PLOTS, *FRAMES, "headwater_lab.reports"}
    needless = {
        BUILT: {"typer", "rich", "pydantic", *PLOTS, *FRAMES},
        "import headwater_lab.training.stages, headwater_lab.comparison.running": trained,
    }
    for model in ("tokenformer-124m", str(folder)) if Wanted.slow else (str(folder),):
        reports = {"headwater_lab.comparison", "headwater_lab.reports", "headwater_lab.papers"}
        needless[COMMAND.format(arguments=["plan", model])] = {*reports, *PLOTS, *FRAMES}
    estimated = {code for code in needless if "plan" in code}
    made = {}
    for stage, codes in (("models", needless.keys() - estimated), ("torch", estimated)):
        codes = sorted(codes)
        made |= zip(codes, apart([code + TELL for code in codes], stage), strict=True)
    for code, (ended, printed, stderr) in made.items():
        assert ended == 0, stderr
        *shown, last = printed.splitlines()
        loaded = set(json.loads(last))
        assert not loaded & needless[code], code
        assert "stages" not in code or "headwater_lab.training.loop" in loaded
        if "plan" in code:
            assert "parameters" in "".join(shown)


@newer
def test_training_in_python_needs_neither_statistics_nor_plots():
    code = "import headwater_lab as lab\nprint(lab.train.__name__, lab.plan.__name__, lab.grow.__name__)"
    loaded, printed = after(code, blocked=("scipy", "matplotlib"))
    assert printed == "train plan grow"
    assert not loaded & {"headwater_lab.comparison", "headwater_lab.reports", "headwater_lab.papers"}


ORDERS = {
    # Half-way through importing Llama transformers imports its Auto classes.
    "within another import": "import headwater\nfrom transformers import LlamaForCausalLM, AutoModelForCausalLM\n"
    f"model = {FOLDER}",
    "config first": "from headwater import HeadwaterConfig\nconfig = HeadwaterConfig.from_pretrained(sys.argv[1])\n"
    "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_config(config)",
}
MORE_ORDERS = {
    "Auto classes first": f"from transformers import AutoModelForCausalLM\nimport headwater\nmodel = {FOLDER}",
    "headwater first": f"import headwater\nfrom transformers import AutoModelForCausalLM\nmodel = {FOLDER}",
    "transformers first": f"import transformers, headwater\nmodel = transformers.{FOLDER}",
}


@pytest.mark.slow
def test_auto_classes_know_the_models_in_any_order_of_imports(folder):
    before = f"import os, sys\nsys.argv[1:] = [{str(folder)!r}]\nos.environ['HF_HUB_OFFLINE'] = '1'\n"
    orders = ORDERS | (MORE_ORDERS if Wanted.slow else {})
    codes = [f"{before}{code}\nprint(type(model).__name__)" for code in orders.values()]
    for order, (ended, printed, stderr) in zip(orders, apart(codes, "compiler"), strict=True):
        assert (ended, printed.split()[-1:]) == (0, ["HeadwaterForCausalLM"]), (order, stderr)


@pytest.mark.slow
def test_caches_know_the_layers_of_a_config_alone():
    code = (
        "from headwater import HeadwaterConfig\nfrom transformers import DynamicCache\n"
        "cache = DynamicCache(config=HeadwaterConfig(mechanisms={'kv_shift': {}}))\n"
        "print(type(cache.layers[0]).__name__)"
    )
    (ended, printed, stderr), *_ = apart([code], "compiler")
    assert (ended, printed.split()) == (0, ["HeadwaterLayer"]), stderr


# Takes packages away, as where they were never installed: no finder has them. `hide` says which ones from now on.
HIDE = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in cls.absent else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
def hide(*absent):
    Without.absent = absent
"""
CLONE = Path(__file__).parents[1]
REPORT, TRAIN = {"scipy", "matplotlib"}, {"lightning_fabric", "datasets"}  # not what torch brings too
# In an order in which a package that was hidden once may be found later on.
EXTRAS = {
    ("train", "shakespeare"): ("train", REPORT | TRAIN),
    ("train", "vision/digits"): ("vision", REPORT | TRAIN | {"torchvision", "sklearn"}),
    ("compare", "demo/induction"): ("compare", REPORT),  # before anything is trained
    ("reproduce", "kv-shifting/figure-1a"): ("compare", REPORT),
    ("reproduce", "kv-shifting/theorems"): ("report", REPORT),
    ("report", "runs"): ("report", REPORT),
    ("evaluate", "folder", "--tasks", "arc_easy"): ("evaluate", REPORT),
    ("serve", "folder"): ("serve", {"uvicorn", "starlette"}),
}


def hiding(code: str, folder: Path) -> tuple[int, str, str]:
    """Run code that hides packages, in a folder and a process of its own: (exit code, stdout, stderr)."""
    (made,) = apart([f"import os; os.chdir({str(folder)!r})\n" + HIDE + code], "compiler")
    return made


@newer
def test_a_missing_extra_is_a_sentence_with_the_command(tmp_path):
    lines = [(list(line), sorted(absent)) for line, (_, absent) in EXTRAS.items()]
    code = f"""
for arguments, absent in {lines}:
    hide(*absent)
    from headwater_lab.cli import main
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as stop:
        print(f"exit code {{stop.code}}", file=sys.stderr)
"""
    _, _, stderr = hiding(code, tmp_path)
    *each, _ = stderr.split("exit code 2\n")
    assert len(each) == len(EXTRAS), stderr
    for (extra, _), words in zip(EXTRAS.values(), each, strict=True):
        assert f"{CLONE}[{extra}]" in words.splitlines()[-1].partition("pip install ")[2]
        assert "Traceback" not in words
    assert not list(tmp_path.rglob("*.safetensors"))


def test_reading_needs_none_of_the_packages_that_train(tmp_path):
    folder = saved(tmp_path / "runs", three("base", BASE) + three("good", GOOD))
    lines = [
        f"runs {folder}",
        f"report {folder} --format csv",
        f"records pack {folder} --by me --out {tmp_path}/packed.jsonl",
        f"reproduce ledger/hop --no-train --records {CLONE}/results/ledger.jsonl",
        "reproduce --list",
    ]
    code = f"""
hide(*{FRAMES})
import headwater_lab as lab
from headwater_lab.cli import main
print(lab.load_results({str(folder)!r}).means())
for line in {lines}:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, line
assert not sys.modules.keys() & {{*{FRAMES}}}
"""
    ended, printed, stderr = hiding(code, tmp_path)
    assert ended == 0, stderr
    assert "{'base': " in printed
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_library_calls_say_the_same_sentence(tmp_path):
    """Also where an extra is asked for late: Weights & Biases, torchtitan, and what lm-eval's models need beside it."""
    code = (
        f"hide('lm_eval', 'accelerate', *{sorted(REPORT | TRAIN)})"
        + """
import pickle
from pathlib import Path
import headwater
import headwater_lab as lab

def print_answer(call):
    try:
        call()
    except headwater.HeadwaterError as error:
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        print(error)

def theorems():
    from headwater_lab.papers import theory

small = {"name": "small", "data": {"kind": "induction", "held_out": 4, "length": 8, "vocab_size": 8},
         "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
         "training": {"steps": 1, "batch_size": 2}}
print_answer(lambda: lab.train(small))
print_answer(lambda: lab.compare(small))
print_answer(theorems)
try:
    import lm_eval  # by others than headwater: Python's own error
except ModuleNotFoundError as error:
    assert not isinstance(error, headwater.HeadwaterError)
from importlib.util import find_spec
assert find_spec("datasets") is None

hide("wandb", "accelerate", "torchtitan", "rendercv_fonts")  # transformers looks for accelerate once
from headwater_lab.evaluation.tasks import prepare_lm_eval
from headwater.integrations.torchtitan import spec
from headwater_lab.training.journal import start_wandb
from headwater_lab.recipe.recipe import parse
recipe = parse(small | {"reporting": {"wandb": "mine"}}, "the recipe")
def titans():
    from headwater.integrations.torchtitan import model
def logging():
    start_wandb(recipe, Path(), "run")
for call in (prepare_lm_eval, logging, lambda: spec(headwater.HeadwaterConfig()), titans):
    print_answer(call)
for kind in ({"kind": "digits"}, {"kind": "glyphs"}, {"kind": "images", "source": "nowhere"}):
    print_answer(parse({"data": kind}, "the recipe").data.build)
"""
    )
    ended, printed, stderr = hiding(code, tmp_path)
    assert ended == 0, stderr
    lines = [line for line in printed.splitlines() if "pip install" in line]
    extras = ("train", "report", "report", "evaluate", "wandb", "titan", "titan", *["vision"] * 3)
    assert [line.partition(f"{CLONE}[")[2].rstrip("'`.") for line in lines] == [f"{extra}]" for extra in extras]
    assert not list(tmp_path.iterdir())


def test_every_module_of_an_extra_is_in_the_metadata():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert {*MODULES, "all", "compare", "docs", "mutations", "dev"} == set(project["optional-dependencies"])


@pytest.mark.slow
def test_benchmarks_run_without_pytest():
    code = "import sys, headwater_lab.bench.training_speed; sys.exit('pytest' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
