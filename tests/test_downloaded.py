"""A downloaded folder, hostile in many ways: no command runs code from it or starts a program for it, and none reads a
file that its content names elsewhere."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import headwater
import processes
from headwater.plugins.trust import VARIABLE
from headwater_lab.training.checkpoints import newest_checkpoint

PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn")
# A module that Python, headwater's packages or a file in the folder could ask for.
MODULES = (
    "wcwidth", "torch", "numpy", "tabulate", "sitecustomize", "usercustomize", "transformers", "conftest", "setup",
    "headwater", "yaml", "colorama", "typing", "contextlib", "signal", "socket", "pkgutil", "evil", "planted",
)  # fmt: skip
PLANTED = """
import os

open(os.environ["FLAG"], "a").write(__name__ + " ran\\n")
from headwater.mechanisms import Mechanism
from headwater_lab.util.settings import Settings

class Evil(Mechanism): pass
class Data(Settings): kind: str = "planted:Data"
class C: pass
def make(*given, **named): pass
"""


class _Runs:
    """A pickle that starts a program."""

    def __reduce__(self):
        return os.system, ("touch $FLAG",)


def _watched(folder: str, flag: str, secret: str, *arguments: str) -> None:
    """Run a command in a folder, and write into `flag` what it should not do."""
    os.chdir(folder)
    log = os.open(flag, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def look(event: str, values: tuple) -> None:
        if event in PROGRAMS and values[0] != "uname":  # which Python's platform starts
            os.write(log, f"{event}: {values[:2]}\n".encode())
        elif event == "exec":
            if str(getattr(values[0], "co_filename", "")).startswith(folder):
                os.write(log, f"{event}: {values[0].co_filename}\n".encode())
        elif event == "import":
            if values[2] is not None and not {"", ".", folder}.isdisjoint(values[2]):
                os.write(log, f"{event}: {values[0]} may be in the folder\n".encode())
        elif event == "open" and isinstance(values[0], str) and values[0].startswith(secret):
            os.write(log, f"{event}: {values[0]}\n".encode())

    sys.addaudithook(look)
    processes._command(*arguments)


@pytest.fixture(scope="module")
def trained(finished, recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    finished(recipe(), folder)
    return folder


class Download:
    """A folder with a run `run`, its newest checkpoint `model`, and whatever is planted in it."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.folder, self.flag, self.secret = folder / "download", folder / "flag", folder / "secret"
        self.model, self.run = self.folder / "model", self.folder / "run"
        shutil.copytree(run, self.run)
        shutil.copytree(newest_checkpoint(run), self.model)
        for place in (self.model, *self.run.rglob("step-*")):
            (place / "SHA256SUMS").unlink(missing_ok=True)
        self.secret.mkdir()
        shutil.copytree(self.model, self.secret / "model")
        (self.secret / "text.txt").write_text("nobody's business " * 1000)
        shutil.copy(self.model / "tokenizer.json", self.secret / "tokenizer.json")
        (folder / "text.txt").write_text("".join(f"line {i} says {i * i}.\n" for i in range(300)))
        for place in (self.folder, self.model, self.run):
            (place / "planted.py").write_text(PLANTED)

    def change(self, name: str, **fields: object) -> None:
        """Change fields of a JSON file of the checkpoint."""
        file = self.model / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | fields))

    def change_history(self, change: Callable[[dict], object]) -> None:
        content = json.loads((self.model / "history.json").read_text())
        for event in content:
            change(event["details"])
        (self.model / "history.json").write_text(json.dumps(content))

    def change_records(self, change: Callable[[dict], object], differ: bool) -> None:
        """Make a comparison of the run, with a change to the recipe of all records. differ: and another to half."""
        for number, (arm, seed) in enumerate((arm, seed) for arm in "ab" for seed in range(4)):
            place = self.folder / "compared" / f"{arm}-{seed}"
            shutil.copytree(self.run, place)
            record = json.loads((place / "record.json").read_text())
            record |= {"seed": seed, "experiment": {"name": "e", "title": "E", "arm": arm, "baseline": "a"}}
            record["recipe"]["seed"] = seed
            if differ and number % 2:
                record["recipe"]["training"]["nonsense"] = 1  # settings that are compared field by field differ
            change(record["recipe"])
            (place / "record.json").write_text(json.dumps(record))
        if differ:  # else there is more to do, without prices that are wrong
            (self.folder / "compared" / "prices.json").write_text("{}")

    def run_command(self, *arguments: object) -> tuple[int, str]:
        """Exit code, and what was said on stderr. Fails if the command did what it should not do."""
        environment = os.environ | {"FLAG": str(self.flag), VARIABLE: ""}
        words = [str(self.folder), str(self.flag), str(self.secret), *map(str, arguments)]
        code, _, stderr = processes.run(*words, call=_watched, env=environment)
        done = self.flag.read_text() if self.flag.exists() else ""
        assert not done, (arguments, done)
        assert "Traceback" not in stderr, stderr
        return code, stderr


@pytest.fixture
def download(tmp_path, trained):
    return Download(tmp_path, trained)


def plant_beside(download: Download) -> None:
    """What tools look for in the current folder, and files that transformers and Trainer write beside a model."""
    for place in (download.folder, download.model):
        for name in MODULES:
            (place / f"{name}.py").write_text(PLANTED)
        (place / "evil.pth").write_text("import planted\n")
        (place / "setup.cfg").write_text("[options.entry_points]\nheadwater.mechanisms =\n  a = planted:Evil\n")
        (place / "pyproject.toml").write_text('[project.entry-points."headwater.mechanisms"]\na = "planted:Evil"\n')
        (place / ".env").write_text(f"{VARIABLE}=planted\nPYTHONPATH=.\n")
        (place / "matplotlibrc").write_text("text.usetex: True\nbackend: module://planted\n")
        for info in ("planted-1.0.dist-info", "planted.egg-info"):
            (place / info).mkdir()
            (place / info / ("METADATA" if "dist" in info else "PKG-INFO")).write_text("Name: planted\nVersion: 1.0\n")
            points = "[headwater.mechanisms]\nplanted = planted:Evil\n[vllm.general_plugins]\nplanted = planted:make\n"
            (place / info / "entry_points.txt").write_text(points)
        (place / "headwater").mkdir()
        (place / "headwater" / "__init__.py").write_text(PLANTED)
        (place / ".git").mkdir()
        (place / ".git" / "config").write_text("[core]\nfsmonitor = touch $FLAG\n")
        for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.bin"):
            (place / name).write_bytes(pickle.dumps(_Runs()))
        (place / "trainer_state.json").write_text('{"best_model_checkpoint": "/etc"}')


def plant_in_tokenizer(download: Download) -> None:
    download.change(
        "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["planted.C", "planted.C"]},
        chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '/etc/passwd' %}",
    )
    (download.model / "chat_template.jinja").write_text(
        "{{ cycler.__init__.__globals__.os.system('touch $FLAG') }}{{ messages[0].content }}"
    )


def plant_in_generation(download: Download) -> None:
    code = download.model / "custom_generate"
    code.mkdir()
    (code / "generate.py").write_text(f"{PLANTED}\ndef generate(model, **named): return 1\n")
    (code / "requirements.txt").write_text("planted\n")
    download.change("generation_config.json", custom_generate=str(download.model))


def plant_in_config(download: Download) -> None:
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoImageProcessor")
    download.change("config.json", auto_map=dict.fromkeys(names, "planted.C"))


def plant_adapter(download: Download) -> None:
    download.change(
        "adapter_config.json",
        base_model_name_or_path=str(download.secret / "model"),
        peft_type="LORA",
        auto_mapping={"base_model_class": "C", "parent_library": "planted"},
    )


IGNORED = [plant_beside, plant_in_tokenizer, plant_in_generation, plant_in_config, plant_adapter]


def test_what_lies_beside_a_model_is_left_alone(download):
    for plant in IGNORED:
        plant(download)
    code, text = download.run_command("generate", "model", "line 1", "--max-new-tokens", 2)
    assert code == 0, text


def test_a_command_started_in_the_folder_imports_nothing_from_it(download):
    """Not even of Python's own names, once it runs: `python -m` itself looks into the folder before."""
    plant_beside(download)
    shutil.rmtree(download.folder / "headwater")
    for name in MODULES:  # what `python -m` imports by itself, and what is headwater
        if name in ("contextlib", "typing", "signal", "pkgutil", "headwater"):
            (download.folder / f"{name}.py").unlink()
    source = str(Path(headwater.__file__).parents[1])
    environment = os.environ | {"FLAG": str(download.flag), "PYTHONPATH": source, VARIABLE: ""}
    command = [sys.executable, "-m", "headwater_lab", "list", "recipes"]
    done = subprocess.run(command, cwd=download.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not download.flag.exists(), download.flag.read_text()


# What is refused, or read without doing what it says


def _name_mechanism(name: str, nested: bool = False) -> Callable[[Download], None]:
    def plant(download: Download) -> None:
        mechanisms = {"blend": {"mechanisms": {name: {}}}} if nested else {name: {}}
        download.change("config.json", mechanisms=mechanisms)

    return plant


def _name_in_history(kind: str) -> Callable[[Download], None]:
    def plant(download: Download) -> None:
        download.change_history(lambda details: details.get("data", {}).get("settings", {}).update(kind=kind))

    return plant


def plant_family(download: Download) -> None:
    download.change_history(lambda details: details.update(family="planted:C"))


def plant_model_type(download: Download) -> None:
    download.change("config.json", model_type="planted:C", architectures=["planted.C"])


def plant_inside_another(download: Download) -> None:
    inner = json.loads((download.model / "config.json").read_text()) | {"mechanisms": {"planted:Evil": {}}}
    (download.model / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": inner}))


def plant_pickle(download: Download) -> None:
    (download.model / "model.safetensors").unlink()
    torch.save({"x": _Runs()}, download.model / "pytorch_model.bin")


def plant_index(download: Download) -> None:
    """Weights that lie elsewhere."""
    (download.model / "model.safetensors").unlink()
    elsewhere = "../../secret/model/model.safetensors"
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": elsewhere, "lm_head.weight": elsewhere}}
    (download.model / "model.safetensors.index.json").write_text(json.dumps(index))


def plant_tokenizer_class(download: Download) -> None:
    plant_in_tokenizer(download)
    download.change("tokenizer_config.json", tokenizer_class="planted.C")


def plant_tokenizer_files(download: Download) -> None:
    """A tokenizer whose files lie elsewhere."""
    elsewhere = str(download.secret / "tokenizer.json")
    download.change("tokenizer_config.json", tokenizer_file=elsewhere, vocab_file=elsewhere, merges_file=elsewhere)
    (download.model / "tokenizer.json").unlink()


def plant_quantization(download: Download) -> None:
    download.change("config.json", quantization_config={"quant_method": "planted"})


def plant_attention(download: Download) -> None:
    download.change("config.json", attn_implementation="planted/kernel", _attn_implementation="planted/kernel")


def plant_processor(download: Download) -> None:
    content = {"image_processor_type": "C", "processor_class": "C", "auto_map": {"AutoImageProcessor": "planted.C"}}
    (download.model / "preprocessor_config.json").write_text(json.dumps(content))


REFUSED = {
    "a mechanism of the folder": _name_mechanism("planted:Evil"),
    "a mechanism in a package": _name_mechanism("headwater.planted:Evil"),
    "a mechanism in a mechanism": _name_mechanism("planted:Evil", nested=True),
    "a mechanism that is a function": _name_mechanism("os:system"),
    "a mechanism that is a program": _name_mechanism("subprocess:Popen"),
    "a mechanism that is exec": _name_mechanism("builtins:exec"),
    "a mechanism in a private place": _name_mechanism("headwater.plugins.trust:os.system"),
    "a faked entry point": _name_mechanism("planted"),
    "data of the folder": _name_in_history("planted:Data"),
    "data that are a function": _name_in_history("os:system"),
    "a family": plant_family,
    "a type": plant_model_type,
    "a config inside another": plant_inside_another,
    "a pickle": plant_pickle,
    "an index": plant_index,
    "a tokenizer's class": plant_tokenizer_class,
    "a tokenizer's files": plant_tokenizer_files,
    "quantization": plant_quantization,
    "attention": plant_attention,
    "a processor": plant_processor,
}
OF_CHECKPOINTS = {
    "generate": ["generate", "model", "x", "--max-new-tokens", 1],
    "inspect": ["inspect", "model", "--rows", 4, "--context", 16, "--out", "../inside"],
    "evaluate": ["evaluate", "model", "--text", "../text.txt", "--limit", 1, "--context", 32],
    "plan": ["plan", "model"],
    "verify": ["verify", "model"],
    "export": ["export", "model", "--out", "../exported"],
    "export as its source": ["export", "model", "--family", "source", "--out", "../theirs"],
    "retrofit": ["retrofit", "model", "--mechanism", "smear", "--out", "../more"],
    "convert": ["convert", "model", "--num-key-value-heads", 1, "--heal", 1000, "--plan"],
    "grow": ["grow", "model", "num_hidden_layers=3", "--out", "../grown"],
    "train": ["train", "../recipe.yaml", "start.checkpoint=model", "--out", "../run"],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [*REFUSED, *(plant.__name__ for plant in IGNORED)])
def test_no_command_runs_what_a_checkpoint_says(download, recipe, what):
    (REFUSED | {plant.__name__: plant for plant in IGNORED})[what](download)
    values = recipe(training={"steps": 1, "warmup_steps": 0}).model_dump(mode="json", exclude={"model"})
    (download.folder.parent / "recipe.yaml").write_text(json.dumps(values))
    for command, words in OF_CHECKPOINTS.items():
        code, text = download.run_command(*words)
        print(what, command, code, text.strip()[-150:])
        assert code in (0, 1, 2), (command, text)


def _set(*path: str, to: object) -> Callable[[dict], None]:
    def change(recipe: dict) -> None:
        for name in path[:-1]:
            recipe = recipe.setdefault(name, {}) or {}
        recipe[path[-1]] = to

    return change


IN_RECORDS = {
    "mechanism": _set("model", "mechanisms", to={"planted:Evil": {}}),
    "nested": _set("model", "mechanisms", to={"blend": {"mechanisms": {"planted:Evil": {}}}}),
    "optimizer": _set("training", "optimizer", to="planted:make"),
    "a function as optimizer": _set("training", "optimizer", to="os:system"),
    "schedule": _set("training", "schedule", to="planted:make"),
    "exec as schedule": _set("training", "schedule", to="builtins:exec"),
    "trainable_mechanisms": _set("training", "trainable_mechanisms", to=["planted:Evil"]),
    "data": _set("data", "kind", to="planted:Data"),
    "a program as data": _set("data", "kind", to="subprocess:Popen"),
    "conversion": _set("start", to={"checkpoint": "model", "convert": {"mechanisms": {"planted:Evil": {}}}}),
    "stage": _set("stages", to=[{"name": "x", "training": {"optimizer": "planted:make"}}]),
    "arm": _set("compare", to={"baseline": "a", "arms": {"a": {"training": {"optimizer": "planted:make"}}}}),
}
OF_RECORDS = {
    "report": ["report", "compared"],
    "prices": ["bench", "prices", "compared"],
    "verdicts": ["bench", "verdicts", "compared", "--resamples", 5, "--seeds", 2],
    "runs": ["runs", "."],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", IN_RECORDS)
def test_no_command_runs_what_a_record_says(download, what):
    plant_beside(download)
    download.change_records(IN_RECORDS[what], differ=what in ("optimizer", "schedule", "data"))
    for command, words in OF_RECORDS.items():
        code, text = download.run_command(*words)
        print(what, command, code, text.strip()[-150:])
        assert code in (0, 2), (command, text)


@pytest.mark.slow
def test_what_runs_is_seen(download):
    """So that the tests above would fail if code of the folder ran."""
    _name_mechanism("planted:Evil")(download)
    with pytest.raises(AssertionError, match="planted"):
        download.run_command("plan", "model", "--trust", "planted:Evil")


@pytest.mark.slow
def test_a_recipe_has_no_tags(download):
    """Also one that the user names is data."""
    (download.folder / "recipe.yaml").write_text(
        "name: !!python/object/apply:os.system ['touch $FLAG']\ndata: {kind: induction}\n"
    )
    for words in (["train", "recipe.yaml"], ["plan", "recipe.yaml"], ["compare", "recipe.yaml"]):
        code, text = download.run_command(*words)
        assert code == 2, text


def test_pictures_heed_no_settings_of_the_current_folder(tmp_path, monkeypatch):
    """A matplotlibrc is read as soon as matplotlib is imported, and may ask for LaTeX, which is a program."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from headwater_lab.util.outputs import default_style, save_figure

    def start(*arguments, **named):
        raise AssertionError(arguments)

    monkeypatch.setattr(subprocess, "Popen", start)
    with rc_context({"text.usetex": True}):
        with default_style():
            figure = Figure()
            figure.subplots().plot([8, 16], label="a")
        save_figure(figure, tmp_path / "a.png", 50)
    assert (tmp_path / "a.png").exists()
