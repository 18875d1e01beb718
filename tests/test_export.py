"""An exported folder is loaded by plain transformers, in a process where headwater cannot be imported."""

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.dynamic_module_utils import get_relative_import_files

from apart import apart
from conftest import build, config, tokens
from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM, HeadwaterModel
from headwater.config import auto_map
from headwater.conversion.export import export
from headwater.models import flat_code
from headwater.plugins.mechanisms import MECHANISMS

BOTH = {"kv_shift": {}, "value_residual": {"mode": "learnable"}}
MANY = {"pattention": {}, **BOTH, "skip_layer": {}, "neutreno": {}, "dense_former": {}}
MODELS = {
    # A dot in a folder's name is one transformers has to replace.
    "gpt.2": dict(mechanisms=dict(reversed(BOTH.items())), gpt2=True, position="alibi", sliding_window=5),
    "many": dict(mechanisms=MANY),
}
PROMPT = tokens(2, 9)
GENERATE = [
    dict(use_cache=True),
    dict(use_cache=False),
    dict(num_beams=3),
    dict(cache_implementation="static", disable_compile=True),
]
PREAMBLE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
def generate(model, **options):
    return model.generate(torch.tensor(prompt), max_new_tokens=8, do_sample=False, **options).tolist()
from transformers import dynamic_module_utils
root, prompt, options = Path(arguments[0]), *map(json.loads, arguments[1:])
dynamic_module_utils.HF_MODULES_CACHE = str(root / "home")  # what is imported is not that of another run
trust = dict(trust_remote_code=True)
"""


def run(script: str, root: Path) -> dict:
    """What `script` leaves in `answer`, run in a process of its own with its own copies of remote code."""
    arguments = [str(root), *map(json.dumps, (PROMPT.tolist(), GENERATE))]
    ((ended, printed, stderr),) = apart([f"arguments = {arguments!r}\n{script}\nprint(json.dumps(answer))"], "models")
    assert ended == 0, stderr[-4000:]
    return json.loads(printed.splitlines()[-1])


def generate(model: HeadwaterForCausalLM, **options) -> list:
    return model.generate(PROMPT, max_new_tokens=8, do_sample=False, **options).tolist()


def files(folder: Path) -> dict[str, bytes]:
    """Without the card, which only an export has."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> set[type]:
    monkeypatch.setattr(auto_map, "_registered", set())
    return auto_map._registered


@pytest.fixture
def model() -> HeadwaterForCausalLM:
    return build(BOTH).float()


@pytest.mark.slow
def test_loads_and_generates_without_headwater(tmp_path: Path) -> None:
    models = {name: build(**changes).float() for name, changes in MODELS.items()}
    for name, model in models.items():
        export(model, tmp_path / name)
    script = """
sys.modules["headwater"] = None  # importing it, or anything in it, now raises
answer = {}
for name in sorted(path.name for path in root.iterdir() if (path / "config.json").exists()):
    folder = root / name
    config = AutoConfig.from_pretrained(folder, **trust)
    model = AutoModelForCausalLM.from_pretrained(folder, **trust)
    base = AutoModel.from_pretrained(folder, **trust)
    answer[name] = dict(
        config=config.mechanisms,
        modules=[type(x).__module__ for x in (config, model, base)],
        one_copy=type(model.config) is model.config_class is type(config) is base.config_class,
        tokens=[generate(model, **more) for more in options],
        logits=model(torch.tensor(prompt)).logits.tolist(),
        hidden=base(torch.tensor(prompt)).last_hidden_state.tolist(),
    )
# Saved again as it is, without another word, and loaded from there.
model.save_pretrained(root / "again")
again = AutoModelForCausalLM.from_pretrained(root / "again", **trust)
answer[name]["again"] = generate(again)
"""
    answer = run(PREAMBLE + script, tmp_path)
    assert answer.keys() == models.keys()
    for name, model in sorted(models.items()):
        there = answer[name]
        assert list(there["config"].items()) == list(model.config.mechanisms.items())
        assert all(module.startswith("transformers_modules.") for module in there["modules"])
        assert there["one_copy"]
        assert there["tokens"] == [generate(model, **options) for options in GENERATE]
        torch.testing.assert_close(torch.tensor(there["logits"]), model(PROMPT).logits)
        torch.testing.assert_close(torch.tensor(there["hidden"]), model.model(PROMPT).last_hidden_state)
    assert there["again"] == there["tokens"][0]
    first, again = files(tmp_path / name), files(tmp_path / "again")
    assert first.keys() == again.keys()
    assert all(first[file] == again[file] for file in first if file.endswith(".py"))


@pytest.mark.slow
def test_harmless_beside_the_installed_package(tmp_path: Path, model: HeadwaterForCausalLM) -> None:
    export(model, tmp_path / "one")
    # Code of another version: in this one the cache layers can do nothing.
    export(model, tmp_path / "other")
    file = tmp_path / "other" / "headwater_models_cache.py"
    digest = next(iter(flat_code._layer_types(ast.parse(file.read_text())))).split("_")[-1]
    for path in (tmp_path / "other").glob("headwater_*.py"):
        path.write_text(path.read_text().replace(digest, "0ther").replace("def before", "def without"))
    script = """
def load(name):
    return AutoModelForCausalLM.from_pretrained(root / name, **trust)
def where(model):
    parts = model, model.config, DynamicCache(config=model.config).layers[0]
    return [type(part).__module__.split(".")[0] for part in parts]
before = load("one")
import headwater
ours = load("one")
# Loaded by name, past the Auto classes' preference for what is installed.
from transformers.dynamic_module_utils import get_class_from_dynamic_module
get_class_from_dynamic_module("modeling_headwater.HeadwaterForCausalLM", root / "other")
models = [before, ours, headwater.HeadwaterForCausalLM.from_pretrained(root / "one"), load("one")]
answer = dict(where=[where(model) for model in models], tokens=[generate(model) for model in models])
"""
    answer = run(PREAMBLE + script, tmp_path)
    assert answer["where"] == [["transformers_modules"] * 3] + [["headwater"] * 3] * 3
    assert answer["tokens"] == [generate(model)] * 4


@pytest.mark.slow
def test_documented_flow_writes_the_same(tmp_path: Path, model: HeadwaterForCausalLM) -> None:
    export(model, tmp_path / "exported")
    model.save_pretrained(tmp_path / "plain")
    HeadwaterConfig.register_for_auto_class()
    HeadwaterForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    model.save_pretrained(tmp_path / "flow")
    assert files(tmp_path / "flow") == files(tmp_path / "exported")
    # Without either, a checkpoint is what it always was: an export leaves no trace in the model.
    assert sorted(files(tmp_path / "plain")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("cls", [HeadwaterModel, HeadwaterForCausalLM])
def test_registering_a_model_alone_is_enough(tmp_path: Path, cls: type, model: HeadwaterForCausalLM) -> None:
    cls.register_for_auto_class({HeadwaterModel: AutoModel, HeadwaterForCausalLM: AutoModelForCausalLM}[cls])
    model.config.auto_map = {
        "AutoTokenizer": ["theirs.Tokenizer", None],
        "AutoModel": "me/elsewhere--modeling_headwater.HeadwaterModel",
    }
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoTokenizer": ["theirs.Tokenizer", None],
        **auto_map.auto_map_of(HeadwaterConfig()),
    }
    assert flat_code.make_code(model.config).keys() < files(tmp_path).keys()


def test_a_config_is_not_saved_without_the_code_that_it_names(tmp_path: Path, model: HeadwaterForCausalLM) -> None:
    HeadwaterConfig.register_for_auto_class()
    with pytest.raises(HeadwaterError, match=r"has no modeling_headwater\.py; save the model there"):
        model.config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)
    before = files(tmp_path)
    model.config.save_pretrained(tmp_path)
    assert files(tmp_path) == before


def test_what_was_exported_is_saved_as_an_export(tmp_path: Path, model: HeadwaterForCausalLM) -> None:
    export(model, tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert type(loaded) is HeadwaterForCausalLM
    loaded.save_pretrained(tmp_path / "two")
    assert files(tmp_path / "two") == files(tmp_path / "one")


@pytest.mark.parametrize("mechanisms", [{}, *({name: {}} for name in MECHANISMS.built_in), MANY], ids=str)
def test_the_code_is_what_the_model_needs(tmp_path: Path, mechanisms: dict) -> None:
    code = flat_code.make_code(config(mechanisms))
    for name, text in code.items():
        (tmp_path / name).write_text(text)
    entry = tmp_path / "modeling_headwater.py"
    assert {Path(file).name for file in get_relative_import_files(entry)} | {entry.name} == code.keys()
    modules = {name: MECHANISMS.built_in[name].partition(":")[0].replace(".", "_") for name in MECHANISMS.built_in}
    assert {name for name, module in modules.items() if f"{module}.py" in code} == mechanisms.keys()
    assert (
        not {
            "headwater_plugins_trust.py",
            "headwater_plugins_external_code.py",
            "headwater_models_flat_code.py",
            "headwater_config_vision.py",
        }
        & code.keys()
    )
    imported = {"modeling_headwater", *(f"headwater_{module}" for module in ("models_causal_lm", "config_text"))}
    imported |= {modules[name] for name in mechanisms}
    for name, text in code.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                needed = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                needed = [node.module]
            elif isinstance(node, ast.ImportFrom) and name != entry.name:
                imported |= {node.module} if node.module else {alias.name for alias in node.names}
                continue
            else:
                continue
            for package in (module.split(".")[0] for module in needed):
                known = {"torch", "transformers", "huggingface_hub", "safetensors"} | sys.stdlib_module_names
                assert package in known, f"{name} needs {package}"
    assert {f"{module}.py" for module in imported} == code.keys()


def test_the_code_of_a_conversion_under_way_has_the_mechanisms_of_its_goal(tmp_path: Path) -> None:
    model = build({"blend": {"mechanisms": {"kv_source": {"keys": "yoco", "values": "yoco"}}, "weight": 0.5}}).float()
    export(model, tmp_path / "halfway")
    script = """
sys.modules["headwater"] = None
model = AutoModelForCausalLM.from_pretrained(root / "halfway", **trust)
answer = model(torch.tensor(prompt)).logits.tolist()
"""
    torch.testing.assert_close(torch.tensor(run(PREAMBLE + script, tmp_path)), model(PROMPT).logits)


def test_every_form_of_import_is_rewritten() -> None:
    source = '''
"""Mentions headwater.config.plan: in words only."""
from headwater.models import cache as _cache, stack  # why
from headwater.mechanisms import (
    KV,
    kv_shift,
)
from .. import kernels
from ..models.cache import restart as again; é = 1; from torch import nn
if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig
if not IS_EXPORTED:
    from headwater.plugins import trust
    from headwater.config.text import HeadwaterConfig
else:
    from headwater.nn import loss
def later():
    from headwater.nn import norm
    return "headwater.mechanisms.kv_shift:KVShift", "headwater_attention"
'''
    expected = '''
"""Mentions headwater.config.plan: in words only."""
from . import headwater_models_cache as _cache; from . import headwater_models_stack as stack  # why
from .headwater_mechanisms import KV; from . import headwater_mechanisms_kv_shift as kv_shift
from . import headwater_kernels as kernels
from .headwater_models_cache import restart as again; é = 1; from torch import nn
if TYPE_CHECKING:
    pass
if not IS_EXPORTED:
    pass
else:
    from . import headwater_nn_loss as loss
def later():
    from . import headwater_nn_norm as norm
    return ".headwater_mechanisms_kv_shift:KVShift", "kind"
'''
    rewritten = flat_code._rewrite_source("headwater.models.new", source, {"headwater_attention": "kind"})
    assert rewritten.split("\n", 1)[1] == expected
    edits = flat_code._find_edits("headwater.models.new", ast.parse(source), {})
    assert {module for _, _, modules in edits for module in modules} == {
        "headwater.models.cache",
        "headwater.models.stack",
        "headwater.mechanisms",
        "headwater.mechanisms.kv_shift",
        "headwater.kernels",
        "headwater.nn.loss",
        "headwater.nn.norm",
    }
    with pytest.raises(ValueError, match=r"headwater\.x: write import headwater\.kernels as from"):
        flat_code._rewrite_source("headwater.x", "import headwater.kernels", {})


@pytest.mark.slow
def test_refusals_say_what_to_do(tmp_path: Path, model: HeadwaterForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(HeadwaterError, match="already exists; remove it"):
        export(model, tmp_path)
    with pytest.raises(
        HeadwaterError, match="A Linear cannot be exported; pass a model of one of these classes: Headw"
    ):
        export(torch.nn.Linear(1, 1), tmp_path / "new")
    with pytest.raises(HeadwaterError, match="is exported for AutoModelForCausalLM, not for AutoModel; register"):
        HeadwaterForCausalLM.register_for_auto_class()
    with pytest.raises(HeadwaterError, match="is exported for AutoConfig, not for AutoModelForSeq2SeqLM;"):
        HeadwaterConfig.register_for_auto_class(AutoModelForSeq2SeqLM)
    monkeypatch.setitem(MECHANISMS.built_in, "kv_shift", f"{__name__}:Elsewhere")
    with pytest.raises(HeadwaterError, match=f"{__name__} imports apart, a neighboring file"):
        export(model, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


class Elsewhere:
    """A mechanism outside the package."""


def test_a_failed_export_leaves_nothing(
    tmp_path: Path, model: HeadwaterForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = HeadwaterForCausalLM.save_pretrained

    def fail(self, folder):
        save(self, folder)
        raise OSError("disk full")

    monkeypatch.setattr(HeadwaterForCausalLM, "save_pretrained", fail)
    with pytest.raises(HeadwaterError, match="could not be written: disk full"):
        export(model, tmp_path / "new")
    assert not list(tmp_path.iterdir())
    assert not model.config.auto_map


def test_somebodys_subclass_is_left_to_transformers(tmp_path: Path, registered: set[type]) -> None:
    class Mine(HeadwaterForCausalLM):
        pass

    Mine.register_for_auto_class("AutoModelForCausalLM")
    assert Mine._auto_class == "AutoModelForCausalLM"
    assert not registered
    with pytest.raises(HeadwaterError, match="A Mine cannot be exported"):
        export(Mine(config()), tmp_path)
