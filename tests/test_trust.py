"""Names from outside: which are found, which a file may name, what is said where something is missing."""

import contextlib
import json
import os
import signal
import sys
import textwrap

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import headwater_lab as lab
from conftest import assert_near, build, config, decode, tokens
from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM
from headwater.config.plan import Source, Stage
from headwater.config.planner import plan_layers
from headwater.conversion.export import export
from headwater.mechanisms import Context, Cost, Mechanism
from headwater.plugins.external_code import hash_code
from headwater.plugins.mechanisms import MECHANISMS, register
from headwater.plugins.trust import VARIABLE, may_read, trust_names
from headwater.util.errors import NotTrusted
from headwater_lab.optimization.registry import OPTIMIZERS
from headwater_lab.recipe.recipe import parse
from headwater_lab.recipe.recipe_files import read_recipe
from headwater_lab.training.optimizers import make_optimizers, parameter_groups

SMALL = '''

import torch
from torch import nn

from headwater import HeadwaterError
from headwater.mechanisms import Cost, Mechanism

open("ran.txt", "a").write("x")


class Twice(Mechanism):
    """out · weight"""

    class Options:
        begin: float = 2.0

    def __init__(self, begin):
        super().__init__()
        self.begin, self.weight = begin, nn.Parameter(torch.empty(1))

    def initial_value(self, parameter, generator=None):
        return torch.full((1,), self.begin)

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [plan.acting(cls, cls.transform_head_outputs) for plan in plans]

    @classmethod
    def build_module(cls, options, config, plan):
        return cls(options["begin"])

    @classmethod
    def count_cost(cls, options, config, plan):
        return Cost(parameters=1)

    def transform_head_outputs(self, out, context):
        return out * self.weight.to(out.dtype)
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder that Python does not look in, where nothing is trusted; no module is left behind."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def forget(*names: str) -> None:
    """Leave the process as a new one is, which has imported nothing and trusts nothing."""
    for name in names:
        sys.modules.pop(name, None)
    os.environ[VARIABLE] = ""


def stored(folder, **mechanisms):
    """A config.json as a checkpoint has it, made without importing anything."""
    folder.mkdir(exist_ok=True)
    content = config().to_dict() | {"mechanisms": mechanisms}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_what_the_user_trusts_is_imported_from_the_current_folder(here):
    (here / "small.py").write_text(SMALL)
    with pytest.raises(NotTrusted, match="or import its module"):
        config({"small:Twice": {}})
    trust_names(["small"])
    made = config({"small:Twice": {"begin": 3.0}})
    assert made.mechanisms == {"small:Twice": {"begin": 3.0}}
    assert [plan.at(Stage.HEAD_OUTPUTS) for plan in plan_layers(made)] == [("small:Twice",)] * 3
    model = HeadwaterForCausalLM(made)
    assert model.state_dict()["model.layers.0.self_attn.mechanisms.small_Twice.weight"] == 3.0


def test_a_checkpoint_has_nothing_imported(here, tmp_path, monkeypatch):
    """Whether the module is beside it, in the current folder or in one of PYTHONPATH."""
    place = tmp_path / "library"
    for folder in (here, here / "model", place):
        folder.mkdir(exist_ok=True)
        (folder / f"{folder.name}_module.py").write_text(SMALL)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", str(place))
    for module in ("here_module", "model_module", "library_module"):
        with pytest.raises(NotTrusted, match=rf"add --trust {module}:Twice \(in Python: trust="):
            HeadwaterConfig.from_pretrained(stored(here / "model", **{f"{module}:Twice": {}}))
    nested = stored(here / "model", blend={"mechanisms": {"here_module:Twice": {}}})
    with pytest.raises(NotTrusted, match="--trust here_module:Twice"):
        HeadwaterConfig.from_pretrained(nested)
    assert not (here / "ran.txt").exists()


def trained_on(settings):
    from headwater_lab.training.records import Event
    from headwater_lab.training.trained_models import build_data

    return build_data(
        [Event(kind="trained", details={"data": {"settings": {"kind": "text", "context": 8} | settings}})]
    )


@pytest.fixture
def private(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"a secret of {i}\n" * 9)
    return folder


ELSEWHERE = {
    "absolute": lambda private: {"source": str(private)},
    "above": lambda private: {"source": "../private"},
    "a pattern": lambda private: {"source": "../private/*.txt"},
    "of the user": lambda private: {"source": "~/.profile"},
    "hidden": lambda private: {"source": ".ssh/key"},
    "a link": lambda private: {"source": "link"},
    "a pattern through a link": lambda private: {"source": "link/*.txt"},
    "a tokenizer": lambda private: {"source": "texts", "tokenizer": str(private)},
    "a domain": lambda private: {"kind": "prepared", "source": "texts", "held_out_domains": {"a": str(private)}},
    "a mixture": lambda private: {"kind": "prepared", "source": {str(private): 1.0}},
}


@pytest.mark.parametrize("which", ELSEWHERE)
def test_a_history_names_no_data_elsewhere(here, private, which):
    (here / "link").symlink_to(private)
    with pytest.raises(NotTrusted, match=r"A file names .*add --trust .* \(in Python: trust="):
        trained_on(ELSEWHERE[which](private))


def test_but_data_below_the_current_folder_and_those_that_the_user_trusts(here, private):
    (here / "texts").symlink_to(private.rename(here / "all"))
    assert trained_on({"source": "texts"}).vocab_size == trained_on({"source": "all/*.txt"}).vocab_size == 257
    # A conversion records absolute paths, and its result is converted again.
    assert trained_on({"source": str(here / "all")}).vocab_size == 257
    for path in (here / ".ssh/key", here / ".." / here.name / "all"):
        assert not may_read(str(path))
    trust_names([str(here)])
    assert may_read(str(here / ".ssh/key"))


def test_data_of_the_users_own_recipe_are_trusted(here, private):
    from headwater_lab.recipe.recipe_files import read_recipe

    read_recipe({"name": "a", "title": "/", "data": {"kind": "text", "source": str(private), "context": 8}})
    assert trained_on({"source": str(private)}).vocab_size == 257
    with pytest.raises(NotTrusted):
        trained_on({"source": "/etc/hosts"})


def test_what_is_neither_a_name_nor_a_path_cannot_be_trusted(here):
    for name in ("a b", "a:b:c", "/a,b", ""):
        with pytest.raises(HeadwaterError, match="cannot be trusted"):
            trust_names([name])


def test_a_link_out_of_a_models_folder_is_not_followed(here, private):
    """Its content would be copied into what is written. The hub's cache consists of links."""
    from headwater.models.load import check_regular

    (here / "model").mkdir()
    (here / "model" / "chat_template.jinja").symlink_to(private / "1.txt")
    with pytest.raises(NotTrusted, match=rf"is a link to '{private}/1.txt', outside its folder.*--trust {private}"):
        check_regular(here / "model")
    trust_names([str(private)])
    check_regular(here / "model")
    forget()
    (here / "model" / "chat_template.jinja").unlink()
    (here / "model" / "additional_chat_templates").mkdir()
    (here / "model" / "additional_chat_templates" / "tool_use.jinja").symlink_to(private / "1.txt")
    with pytest.raises(NotTrusted, match=r"tool_use.jinja' is a link"):
        check_regular(here / "model")
    cached, blobs = here / "models--a" / "snapshots" / "1", here / "models--a" / "blobs"
    cached.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "ab").write_text("{}")
    (cached / "config.json").symlink_to("../../blobs/ab")
    (cached / "tokenizer.json").symlink_to("config.json")
    (cached / "additional_chat_templates").mkdir()
    (cached / "additional_chat_templates" / "tool_use.jinja").symlink_to("../../../blobs/ab")
    check_regular(cached)


def test_a_pipe_in_a_models_folder_is_not_opened(here):
    from headwater.models.load import check_regular

    (here / "model" / "model.safetensors").mkdir(parents=True)  # which libraries refuse by themselves
    check_regular(here / "model")
    os.mkfifo(here / "model" / "tokenizer.json")
    with pytest.raises(HeadwaterError, match=r"tokenizer.json' is not a file; use an intact checkpoint"):
        check_regular(here / "model")


def test_a_link_out_of_a_folder_of_text_is_not_followed(here, private):
    from headwater_lab.data.stream import read_corpus

    texts = here / "texts"
    (texts / "below").mkdir(parents=True)
    for i in range(3):
        (texts / f"{i}.txt").write_text(f"a text of {i}\n" * 9)
    (texts / "below" / "again.txt").symlink_to(texts / "1.txt")
    assert len(read_corpus(str(texts)).documents) == 4
    (texts / "below" / "secret.txt").symlink_to(private / "1.txt")
    with pytest.raises(NotTrusted, match=rf"is a link to '{private}/1.txt', outside its folder"):
        read_corpus(str(texts))
    trust_names([str(private)])
    assert len(read_corpus(str(texts)).documents) == 5


def test_but_it_has_what_the_user_trusts(here):
    (here / "small.py").write_text(SMALL)
    folder = stored(here / "model", **{"small:Twice": {}})
    for names in (["small:Twice"], ["small"], "small"):
        assert HeadwaterConfig.from_pretrained(folder, trust=names).mechanisms == {"small:Twice": {"begin": 2.0}}
        forget("small")
    with pytest.raises(NotTrusted):  # nothing is remembered
        HeadwaterConfig.from_pretrained(folder)
    for wrong in ("small.py:", "./small", "a b", ""):
        with pytest.raises(HeadwaterError, match="cannot be trusted"):
            trust_names([wrong])


def test_and_what_the_program_has_imported(here, monkeypatch):
    """A class of headwater's, not a function, which a file could call with what it likes."""
    (here / "small.py").write_text(f"{SMALL}\nclass Made(type):\n    pass\n")
    monkeypatch.syspath_prepend(here)
    import small  # noqa: F401

    assert HeadwaterConfig.from_pretrained(stored(here / "model", **{"small:Twice": {}})).mechanisms
    for name in ("os:system", "subprocess:Popen", "builtins:exec", "small:nn.Linear", "small:nothing", "small:Made"):
        with pytest.raises(NotTrusted, match=f"--trust {name}"):
            HeadwaterConfig.from_pretrained(stored(here / "model", **{name: {}}))


def test_a_trusted_module_is_not_a_door_to_what_it_imports(here):
    (here / "small.py").write_text("import os\nfrom os import system\n\ndef mine(*given): ...\n")
    trust_names(["small"])
    assert OPTIMIZERS.resolve("small:mine").__name__ == "mine"
    for name in ("small:os.system", "small:system"):
        with pytest.raises(NotTrusted, match=f"--trust {name}"):
            OPTIMIZERS.resolve(name)


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "builtins:exec", "small:Twice"])
@pytest.mark.parametrize("field", ["training.optimizer", "training.schedule", "data.kind", "model.mechanisms"])
def test_a_record_names_nothing_and_a_recipe_what_it_likes(here, recipe, field, name):
    (here / "small.py").write_text(SMALL)
    section, _, key = field.partition(".")
    values = recipe().model_dump(mode="json")
    values[section][key] = {name: {}} if key == "mechanisms" else name

    def made(read):
        loaded = read(values)
        if key == "mechanisms":
            loaded.config_for(loaded.data.build())

    with pytest.raises(HeadwaterError, match=f"--trust {name}"):
        made(lambda values: parse(values, "a record"))
    assert not (here / "ran.txt").exists()
    with contextlib.suppress(HeadwaterError):  # as it is no optimizer
        made(read_recipe)
    assert (here / "ran.txt").exists() == (name == "small:Twice")


def test_the_module_path_is_as_before(here):
    (here / "small.py").write_text(f"import beside\n{SMALL}")
    (here / "beside.py").write_text("")
    (here / "broken.py").write_text("import beside\n1 / 0")
    before = list(sys.path)
    trust_names(["small", "broken"])
    config({"small:Twice": {}})
    with pytest.raises(HeadwaterError, match="ZeroDivisionError"):
        config({"broken:Twice": {}})
    assert sys.path == before
    with pytest.raises(ModuleNotFoundError):
        __import__("wcwidth_of_nobody")


def test_a_config_inside_another_model_s_is_a_file_s(here):
    """transformers makes it by its constructor, as a program would."""
    from transformers import LlavaConfig

    (here / "small.py").write_text(SMALL)
    inner = config().to_dict() | {"mechanisms": {"small:Twice": {}}}
    with pytest.raises(NotTrusted):
        LlavaConfig.from_dict({"text_config": inner})
    assert not (here / "ran.txt").exists()


def test_a_config_names_no_kernel_of_the_hub(here):
    content = config().to_dict()
    for field in ("attn_implementation", "_attn_implementation"):
        with pytest.raises(HeadwaterError, match=f"{field} names the kernel"):
            HeadwaterConfig.from_dict(content | {field: "somebody/kernel"})
    assert HeadwaterConfig.from_dict(content | {"attn_implementation": "sdpa"})


def test_an_absent_module_is_named(here):
    with pytest.raises(HeadwaterError, match=r"'nowhere'.*PYTHONPATH"):
        HeadwaterConfig.from_pretrained(stored(here / "model", **{"nowhere.deep:Mine": {}}), trust=["nowhere.deep"])
    with pytest.raises(HeadwaterError, match=r"no mechanism named 'mine'.*by its package's entry point"):
        HeadwaterConfig.from_pretrained(stored(here / "model", mine={}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("small:Nothing", "no 'Nothing'"),
        ("small:nn", "is not a valid mechanism"),
        ("small:HeadwaterError", "is not a valid mechanism"),
        ("broken:Twice", "cannot be imported: ZeroDivisionError"),
        ("small:", "is not a valid name"),
        ("../small:Twice", "is not a valid name"),
        ("smal:Twice", "No module named 'smal'; .*install its package"),
        ("kv_shfit", "did you mean 'kv_shift'"),
    ],
)
def test_wrong_names_say_what_is_wrong(here, name, message):
    (here / "small.py").write_text(SMALL)
    (here / "broken.py").write_text("1 / 0")
    trust_names(["small", "small:nn", "small:HeadwaterError", "smal", "broken"])
    with pytest.raises(HeadwaterError, match=message):
        config({name: {}})


class Acting(Mechanism):
    """Names no options, and no stage either."""

    @staticmethod
    def change(x):
        return x

    def transform_qkv(self, x, context):
        return self.change(x)

    def transform_qvk(self, x, context):
        return x


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda plans: [plan.acting(Acting, Acting.transform_qvk) for plan in plans], "did you mean 'transform_qkv'"),
        (
            lambda plans: [plan.acting(Acting, Acting.add_key_values) for plan in plans],
            "add_key_values, but its class does not define it",
        ),
        (
            lambda plans: [plan.acting(Acting, Acting.transform_qkv, [("kk", 1)]) for plan in plans],
            "a cache keeps no tail 'kk'",
        ),
        (
            lambda plans: [plan.reading(Source("raw", "v", plan.index + 3)) for plan in plans],
            "Layer 0 cannot read 'v' of layer 3",
        ),
        (lambda plans: [plan.reading(Source("rww", "v", 0)) for plan in plans], "did you mean 'raw'"),
        (lambda plans: None, "must return a list"),
        (lambda plans: plans[:1], "must return a list"),
        (lambda plans: plans, "defines transform_qkv but acts in no layer"),
    ],
)
def test_a_plan_that_leaves_something_out_is_refused(monkeypatch, plan, message):
    monkeypatch.setitem(MECHANISMS.added, "acting", Acting)
    monkeypatch.setattr(Acting, "plan_stages", classmethod(lambda cls, options, config, plans: plan(plans)))
    with pytest.raises(HeadwaterError, match=message):
        _ = plan_layers(config({"acting": {}}))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x._replace(k=x.k[:, :1]), r"transform_qkv\(\) returned shapes .*, not"),
        (lambda x: x[1:], r"transform_qkv\(\) returned shapes"),
        (lambda x: None, r"transform_qkv\(\) returned shapes \[\], not"),
    ],
)
def test_a_stage_that_returns_other_shapes_is_refused(monkeypatch, returned, message):
    monkeypatch.setitem(MECHANISMS.added, "acting", Acting)
    act = classmethod(lambda cls, options, config, plans: [plan.acting(cls, cls.transform_qkv) for plan in plans])
    monkeypatch.setattr(Acting, "plan_stages", act)
    with pytest.raises(HeadwaterError, match="acts in layer 0, and has no build_module"):
        HeadwaterForCausalLM(config({"acting": {}}))
    monkeypatch.setattr(Acting, "build_module", classmethod(lambda cls, options, config, plan: None))
    with pytest.raises(HeadwaterError, match=r"build_module\(\) returned None"):
        HeadwaterForCausalLM(config({"acting": {}}))
    monkeypatch.setattr(Acting, "build_module", classmethod(lambda cls, options, config, plan: cls()))
    monkeypatch.setattr(Acting, "change", staticmethod(returned))
    with pytest.raises(HeadwaterError, match=message):
        HeadwaterForCausalLM(config({"acting": {}}))(tokens(1, 4))


def test_an_option_without_a_type_is_refused():
    with pytest.raises(HeadwaterError, match="Options: give back a type, as in `back: int = 2`"):

        class Untyped(Mechanism):
            class Options:
                back = 2


def test_training_refuses_a_mechanism_that_counts_other_parameters(monkeypatch, recipe, tmp_path):
    """FLOPs, estimates and equal budgets follow from what it states."""
    monkeypatch.setitem(MECHANISMS.added, "sharpened", Sharpened)
    monkeypatch.setattr(Sharpened, "count_cost", classmethod(lambda cls, options, config, plan: Cost(parameters=1)))
    made = recipe().model_dump(mode="json")
    made["model"] = made["model"] | {"mechanisms": {"sharpened": {}}}
    with pytest.raises(HeadwaterError, match=r"are counted; correct count_cost\(\) of sharpened"):
        lab.train(made, tmp_path / "out")


class Sharpened(Mechanism):
    """Attends with the squares of the weights."""

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [plan.acting(cls, cls.transform_attention_weights) for plan in plans]

    @classmethod
    def build_module(cls, options, config, plan):
        return cls()

    @classmethod
    def count_cost(cls, options, config, plan):
        return Cost()

    def transform_attention_weights(self, weights, context):
        return weights.square() / weights.square().sum(-1, keepdim=True)


def test_attention_weights_are_those_of_the_eager_kernel(monkeypatch):
    """Other kernels hide the future themselves, and give no weights."""
    monkeypatch.setitem(MECHANISMS.added, "sharpened", Sharpened)
    model, ids = build({"sharpened": {}}), tokens(2, 6)
    assert model.config._attn_implementation == "eager"
    other = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % model.config.vocab_size], dim=1)
    assert torch.equal(model(ids).logits[:, :-1], model(other).logits[:, :-1])
    with pytest.raises(HeadwaterError, match="'sharpened' with its options"):
        model.set_attn_implementation("sdpa")


def test_a_comparison_refuses_what_its_workers_would_not_know(monkeypatch, recipe, tmp_path):
    monkeypatch.setitem(MECHANISMS.added, "acting", Acting)
    made = recipe().model_dump(mode="json")
    made["compare"] = {"baseline": "plain", "arms": {"plain": {}, "mine": {"model": {"mechanisms": {"acting": {}}}}}}
    with pytest.raises(HeadwaterError, match="'acting' was registered in this process"):
        lab.compare(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def installed(here, tmp_path, monkeypatch):
    """A package with an entry point, as pip installs it."""
    from headwater.plugins import registry

    place = tmp_path / "site"
    (place / "doubling").mkdir(parents=True)
    (place / "doubling" / "__init__.py").write_text("from doubling.core import Twice\n")
    (place / "doubling" / "core.py").write_text(SMALL)
    info = place / "doubling-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[headwater.mechanisms]\ndoubled = doubling:Twice\n")
    monkeypatch.syspath_prepend(place)
    registry._find_entry_points.cache_clear()
    yield place
    registry._find_entry_points.cache_clear()


def test_code_is_hashed_where_it_may_be_imported_and_is_not_ours(installed, here):
    digest = hash_code({"mechanisms": {"doubled": {}, "kv_shift": {}}})
    assert list(digest) == ["doubled"]
    core = installed / "doubling" / "core.py"
    core.write_text("# A comment.\n" + core.read_text())
    assert hash_code("doubled") == digest
    core.write_text(core.read_text() + "\nx = 2\n")
    assert hash_code("doubled") != digest
    core.with_name("template.py").write_text("class @NAME@:\n")
    assert len(hash_code("doubled")) == 1
    (here / "other.py").write_text("x = 1\n")
    assert hash_code(["other:x", "headwater.mechanisms:KV", "no_such.module:x"]) == {}
    trust_names(["other", "headwater", "no_such"])
    assert list(hash_code(["other:x", "headwater.mechanisms:KV", "no_such.module:x"])) == ["other:x"]
    assert not (here / "ran.txt").exists()


def test_an_entry_point_is_a_name_like_any_other(installed, here):
    for name in ("doubled", "doubling:Twice", "doubling.core:Twice"):
        model = build({"kv_shift": {}, name: {}})
        assert list(model.config.mechanisms) == ["kv_shift", "doubled"]
    with pytest.raises(HeadwaterError, match="repeated name"):
        config({"doubled": {}, "doubling:Twice": {}})
    ids = tokens(2, 12)
    assert_near(decode(model, ids, [5, 1, 6]), model(ids, use_cache=False).logits)
    model.float().save_pretrained(here / "model")
    forget("doubling", "doubling.core")
    assert HeadwaterConfig.from_pretrained(stored(here / "other", **{"doubling:Twice": {}})).mechanisms  # installed
    forget("doubling", "doubling.core")
    assert HeadwaterForCausalLM.from_pretrained(here / "model").config.mechanisms["doubled"] == {"begin": 2.0}


@pytest.mark.slow
def test_export_carries_the_package_along(installed, here):
    model = build({"doubled": {}}).float()
    export(model, here / "exported")
    names = {path.name for path in (here / "exported").iterdir()}
    assert "headwater_outside_doubling_core.py" in names
    loaded = AutoModelForCausalLM.from_pretrained(here / "exported", trust_remote_code=True)
    ids = tokens(2, 12)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.slow
def test_what_cannot_come_along_is_refused(here):
    (here / "small.py").write_text(f"from helper import x\n{SMALL}")
    (here / "helper.py").write_text("x = 1\n")
    trust_names(["small"])
    model = build({"small:Twice": {}}).float()
    with pytest.raises(HeadwaterError, match="helper, a neighboring file"):
        export(model, here / "exported")
    assert not (here / "exported").exists()
    model.config.auto_map = {"AutoConfig": "modeling_headwater.HeadwaterConfig"}  # as after register_for_auto_class
    with pytest.raises(HeadwaterError, match="helper, a neighboring file"):
        model.save_pretrained(here / "saved")
    assert not list((here / "saved").glob("*"))


def test_a_notebook_gives_names(here, monkeypatch):
    namespace: dict = {"__name__": "__main__"}
    exec(textwrap.dedent(SMALL), namespace)
    monkeypatch.setattr(MECHANISMS, "added", {})
    assert register("twice")(namespace["Twice"]) is namespace["Twice"]
    model = build({"twice": {}})
    assert model.config.mechanisms == {"twice": {"begin": 2.0}}
    with pytest.raises(HeadwaterError, match="not a file"):
        export(model, here / "exported")
    with pytest.raises(HeadwaterError, match="cannot be named"):
        register("kv_shift", namespace["Twice"])
    with pytest.raises(HeadwaterError, match="is not a valid mechanism"):
        register("other", nn.Linear)


# The contract's other parts


class Convolved(Mechanism):
    """Everything at once: a convolution, a three-dimensional weight, a matrix that does not decay, a hook."""

    class Options:
        silent: bool = False

    needs_input_ids = True

    def __init__(self, width: int, silent: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.bank = nn.Parameter(torch.empty(2, 3, 4))
        self.mix = nn.Parameter(torch.empty(4, 4))
        self.silent, self.seen = silent, []
        self.reset_parameters()

    def initial_value(self, parameter, generator=None):
        if self.silent or "." in parameter:
            return None
        return torch.randn(self.get_parameter(parameter).shape, generator=generator)

    def choose_group(self, parameter):
        return "vectors" if parameter == "mix" else None

    def prepare_training(self, step):
        return [step.steps, step.warmup]

    def prepare_step(self, kept, step):
        self.seen.append((tuple(kept), step.number))

    @classmethod
    def describe_training(cls, modules, step):
        return f"{modules} of them convolve."

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [plan.acting(cls, cls.transform_block_output) for plan in plans]

    @classmethod
    def build_module(cls, options, config, plan):
        return cls(config.hidden_size, options["silent"])

    @classmethod
    def count_cost(cls, options, config, plan):
        return Cost(parameters=6 * config.hidden_size + 40)

    def transform_block_output(self, x, context: Context):
        assert context.ids.shape == x.shape[:2]
        return x + self.norm(x) * (self.bank.sum() + self.mix.sum()) + 0 * self.conv(x.mT)[:, :, :1].mT


@pytest.fixture
def convolved(monkeypatch):
    monkeypatch.setattr(MECHANISMS, "added", {"convolved": Convolved})
    return {"convolved": {}}


def test_children_start_as_they_should_and_by_name(convolved):
    first, second = (HeadwaterForCausalLM(config(m)) for m in (convolved, {"kv_shift": {}, **convolved}))
    own = first.model.layers[1].mechanisms["convolved"]
    assert 0.3 < own.conv.weight.std() < 0.9, "1/√3"
    assert own.conv.weight.unique().numel() > 90
    assert not own.conv.bias.any()
    assert torch.equal(own.norm.weight, torch.ones(32))
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, second.model.layers[1].mechanisms["convolved"].get_parameter(name)), name


def test_what_nobody_says_how_to_start_is_refused(convolved):
    with pytest.raises(HeadwaterError, match=r"convolved\.bank"):
        HeadwaterForCausalLM(config({"convolved": {"silent": True}}))


def test_a_buffer_that_loading_would_leave_undefined_is_refused(convolved, monkeypatch):
    initialize = Convolved.__init__

    def with_positions(self, *args):
        initialize(self, *args)
        self.register_buffer("positions", torch.arange(4), persistent=False)

    monkeypatch.setattr(Convolved, "__init__", with_positions)
    with pytest.raises(HeadwaterError, match="buffer 'positions' of Convolved"):
        HeadwaterForCausalLM(config(convolved))


def test_groups_are_what_the_mechanism_and_the_shapes_say(convolved):
    model = HeadwaterForCausalLM(config(convolved))
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[parameter].partition("convolved.")[2]: (group["name"], group["weight_decay"])
        for group in parameter_groups(model, 0.1)
        for parameter in group["params"]
        if "layers.0.mechanisms" in names[parameter]
    }
    assert found == {
        "conv.weight": ("tensors", 0.1),
        "conv.bias": ("vectors", 0.0),
        "norm.weight": ("vectors", 0.0),
        "norm.bias": ("vectors", 0.0),
        "bank": ("tensors", 0.1),
        "mix": ("vectors", 0.0),
    }
    from headwater_lab.recipe.training_section import Training

    muon, _ = make_optimizers(model, Training(optimizer="muon"))
    assert all(parameter.ndim == 2 for group in muon.param_groups for parameter in group["params"])


def test_three_dimensions_are_no_matrices(convolved, monkeypatch):
    monkeypatch.setattr(Convolved, "choose_group", lambda self, parameter: "matrices" if parameter == "bank" else None)
    with pytest.raises(HeadwaterError, match=r"'bank' \[2, 3, 4\] among the matrices"):
        parameter_groups(HeadwaterForCausalLM(config(convolved)), 0.1)


def test_embeddings_have_no_ids(convolved):
    model, ids = build(convolved), tokens(1, 4)
    with pytest.raises(HeadwaterError, match="convolved reads token ids"):
        model(inputs_embeds=model.model.embed_tokens(ids))


def test_half_precision_loads_children_in_half(convolved, tmp_path):
    HeadwaterForCausalLM(config(convolved | {"kv_shift": {}})).save_pretrained(tmp_path)
    model = HeadwaterForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.model.layers[0].mechanisms["convolved"].conv.weight.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.mechanisms["kv_shift"].alpha.dtype == torch.float32
    model(tokens(1, 5))


def test_a_hook_is_called_before_each_step_and_goes_on_after_a_resume(convolved, recipe, tmp_path, monkeypatch):
    from headwater_lab.training.loop import train
    from headwater_lab.training.records import read_record
    from headwater_lab.util.endings import Interrupted

    seen = []
    monkeypatch.setattr(Convolved, "prepare_step", lambda self, kept, step: seen.append((tuple(kept), step.number)))
    loaded = recipe(model={"mechanisms": convolved}, training={"steps": 4})

    def stop(step, point):
        if point is None and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(loaded, tmp_path / "run", on_event=stop)
    assert any("2 of them convolve." in notice.message for notice in read_record(tmp_path / "run").notices)
    assert seen == [((4, 2), number) for number in range(2) for _ in range(2)]
    seen.clear()
    train(loaded, tmp_path / "run", resume=True)
    assert seen == [((4, 2), number) for number in (2, 3) for _ in range(2)]


FAMILY = """
from dataclasses import replace
from transformers import MistralForCausalLM
from headwater.conversion import FAMILIES
FAMILY = replace(FAMILIES["llama"], model=MistralForCausalLM)
"""


@pytest.fixture(params=["a file of the current folder", "an entry point"])
def brought(request, here, tmp_path, monkeypatch):
    """(mechanism, family) by the names that they have here."""
    from headwater.plugins import registry

    place = here
    if request.param == "an entry point":
        place = tmp_path / "site"
        info = place / "small-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[headwater.mechanisms]\nhalved = small:Twice\n[headwater.families]\nplain_mistral = plain:FAMILY\n"
        )
        monkeypatch.syspath_prepend(place)
    (place / "small.py").write_text(SMALL)
    (place / "plain.py").write_text(FAMILY)
    registry._find_entry_points.cache_clear()
    yield ("small:Twice", "plain:FAMILY") if place is here else ("halved", "plain_mistral")
    registry._find_entry_points.cache_clear()


@pytest.mark.slow
def test_a_retrofit_with_names_from_outside_is_trained_on(brought, here, run):
    from transformers import MistralConfig, MistralForCausalLM

    from headwater_lab import train

    mechanism, family = brought
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8)
    theirs = MistralForCausalLM(MistralConfig(vocab_size=64, num_key_value_heads=1, sliding_window=None, **sizes))
    theirs.save_pretrained(here / "theirs")
    arguments = [f"--mechanism={mechanism}={{begin: 1.0}}", f"--family={family}", "--allow-change", "--out=lifted"]
    code, _, err = run("retrofit", here / "theirs", *arguments)
    assert code == 0, err
    forget("small", "plain")
    done = train(
        {
            "data": {"kind": "induction", "held_out": 4, "length": 8, "vocab_size": 32},
            "start": {"checkpoint": "lifted"},
            "training": {"steps": 2, "batch_size": 2, "threads": 1},
        },
        "run",
        trust=[mechanism] if ":" in mechanism else [],
    )
    assert done.model().config.mechanisms == {mechanism: {"begin": 1.0}}
    assert done.model().model.layers[0].self_attn.mechanisms[mechanism.replace(":", "_")].weight != 1.0


@pytest.mark.slow
def test_a_table_is_trained_with_a_mechanism_from_outside(here, run, forked_workers):
    (here / "small.py").write_text(SMALL)
    mechanism = "small:Twice"
    small = ["training.steps=1", "data.held_out=4", "compare.seeds=[0,1]", "reporting.tensorboard=false"]
    override = f'model.mechanisms={{"{mechanism}": {{begin: 1.0}}}}'
    code, out, err = run("reproduce", "kv-shifting/figure-1a", override, *small, "--out=rep", "--workers=1")
    assert code == 0, err
    assert "result:" in out
    configs = {path.parts[-4]: json.loads(path.read_text()) for path in here.glob("rep/**/checkpoints/*/config.json")}
    assert len(configs) == 8
    assert configs["1-layer-0"]["mechanisms"] == {mechanism: {"begin": 1.0}}


# Everything that a mechanism may do, in one file, and every command

GATED = '''
"""A value table by token id with a gate, through a convolution; upper layers attend to the keys of a lower one."""


import torch
from torch import nn

from headwater.mechanisms import Cost, Mechanism
from headwater.config.plan import Source

GATE = 8  # channels of the stream that the gate reads


class GatedTable(Mechanism):
    needs_input_ids = True

    class Options:
        cool: float = 4.0
        keys_of: int = 0

    def __init__(self, stored, width, gate, slots, cool):
        super().__init__()
        heads = len(stored)
        self.heads, self.slots, self.cool = heads, slots, cool
        # The columns of the table for the heads that the layer stores.
        self.columns = [head * width + at for head in stored for at in range(width)]
        self.gate = nn.Linear(gate, heads, bias=False)
        self.conv = nn.Conv1d(heads * width, heads * width, 1, groups=heads)
        self.strength = nn.Parameter(torch.empty(heads))
        self.register_buffer("heat", torch.ones(1))
        self.reset_parameters()

    def initial_value(self, parameter, generator=None):
        if parameter == "strength":
            return torch.full((self.heads,), 0.5)
        return torch.zeros_like(self.gate.weight) if parameter == "gate.weight" else None

    @classmethod
    def table(cls):
        return Source("shared", cls.registered_name(), -1)

    @classmethod
    def redirect_heads(cls, options, config, plans):
        half = config.num_hidden_layers // 2
        return [
            plan.attending(range(len(plan.attends)), k=options["keys_of"])
            if plan.index >= max(half, options["keys_of"] + 1)
            else plan
            for plan in plans
        ]

    @classmethod
    def plan_stages(cls, options, config, plans):
        return [
            plan.reading(Source("stream", "x", plan.index - 1), cls.table()).acting(cls, cls.transform_qkv)
            if plan.v_heads
            else plan
            for plan in plans
        ]

    @classmethod
    def build_module(cls, options, config, plan):
        slots = plan.slot(Source("stream", "x", plan.index - 1)), plan.slot(cls.table())
        return cls(plan.v_heads, config.head_dim, min(GATE, config.hidden_size), slots, options["cool"])

    @classmethod
    def build_shared_module(cls, options, config):
        return nn.Embedding(config.vocab_size, config.num_key_value_heads * config.head_dim)

    @classmethod
    def count_shared_cost(cls, options, config):
        width = config.num_key_value_heads * config.head_dim
        return Cost(parameters=config.vocab_size * width)

    @classmethod
    def count_cost(cls, options, config, plan):
        heads, d = len(plan.v_heads), config.head_dim
        gate = min(GATE, config.hidden_size)
        return Cost(
            parameters=heads * gate + heads * d * d + heads * d + heads,
            flops=2 * heads * gate + 2 * heads * d * d,
            saved=2 * heads * d + 3 * heads,
        )

    def transform_qkv(self, x, context):
        stream, rows = (context.sources[slot] for slot in self.slots)
        rows = self.conv(rows[..., self.columns].mT).mT.unflatten(2, (self.heads, -1)).transpose(1, 2)
        gate = 2 * torch.sigmoid(self.gate(stream[..., : self.gate.in_features]) / self.heat)
        return x._replace(v=x.v + (gate * self.strength.to(gate.dtype)).mT[..., None] * rows)

    def choose_group(self, parameter):
        return "convolutions" if parameter == "conv.weight" else None

    def prepare_training(self, step):
        return {"from": self.cool}

    def prepare_step(self, kept, step):
        self.heat.fill_(1 + (kept["from"] - 1) * (1 - (step.number + 1) / step.steps))

    @classmethod
    def describe_training(cls, modules, step):
        return f"The gates of {modules} layers cool down to 1 in {step.steps} steps."
'''


@pytest.fixture
def gated(here):
    """A recipe's file with the mechanism, both in the current folder, where each command finds them anew."""
    (here / "gated_table.py").write_text(GATED)
    (here / "texts").mkdir()
    for i in range(9):
        (here / "texts" / f"{i}.txt").write_text(
            "".join(f"line {i} {j} of a text that says {i * j}\n" for j in range(9))
        )
    recipe = {
        "name": "tables",
        "data": {"kind": "text", "source": "texts", "context": 16},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mechanisms": {"gated_table:GatedTable": {"cool": 3.0}},
        },
        "training": {
            "steps": 4,
            "batch_size": 2,
            "warmup_steps": 1,
            "threads": 1,
            "device": "cpu",
            "optimizer": "muon",
        },
        "reporting": {"tensorboard": False, "save_every": 2},
        "compare": {
            "arms": {"plain": {"model": {"mechanisms": None}}, "table": {}},
            "baseline": "plain",
            "seeds": [0, 1],
        },
    }
    (here / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return "gated_table:GatedTable"


@pytest.fixture
def anew(run):
    """Runs a command that must succeed, where no module is imported yet; returns what it prints."""

    def call(*arguments, code=0):
        forget("gated_table")
        found, out, err = run(*arguments)
        assert found == code, err
        return out + err

    return call


def test_every_command_works_with_a_mechanism_from_outside(gated, anew, here):
    assert "gates of 2 layers cool down" in anew("train", "recipe.yaml", "--out", "run")
    weights = {step: load_file(here / f"run/checkpoints/step-00000{step}/model.safetensors") for step in (2, 4)}
    heat = "model.layers.1.self_attn.mechanisms.gated_table_GatedTable.heat"
    assert [float(weights[step][heat]) for step in (2, 4)] == [2.0, 1.0]
    anew("train", "recipe.yaml", "training.steps=5", "--out", "run", "--resume")

    assert "table" in anew("plan", "recipe.yaml")

    def of_folder(*arguments, code=0):
        """The run names the mechanism, so that its folder alone is not enough."""
        assert f"add --trust {gated} (in Python: trust=[{gated!r}])" in anew(*arguments, code=2)
        return anew(*arguments, "--trust", gated, code=code)

    assert "cache bytes" in of_folder("plan", "run")
    assert "share of heads that attend elsewhere" in of_folder("inspect", "run", "--out", "inside")
    assert "✗ gated" not in of_folder("verify", "run")
    assert "4 tokens" in of_folder("generate", "run", "line 1", "--max-new-tokens", 4)
    shape = ["--layers", 2, "--width", 64, "--context", 16, "--batch-size", 1, "--precision", "32-true"]
    assert gated in anew("bench", "mechanisms", gated, "--memory", *shape)
    assert "5 / 5" in anew("runs", here)

    of_folder("export", "run", "--out", "exported")
    forget("gated_table")
    exported = AutoModelForCausalLM.from_pretrained(here / "exported", trust_remote_code=True, trust=[gated])
    model = HeadwaterForCausalLM.from_pretrained(here / "run/checkpoints/step-000005", trust=[gated])
    assert torch.equal(exported(tokens(1, 9)).logits, model(tokens(1, 9)).logits)

    assert "no parameter tokens" in of_folder("grow", "run", "ffn_pairs=64", code=2)
    wide = ["hidden_size=32", "num_attention_heads=4", "--out", "wide"]
    assert "does not define how it grows" in of_folder("grow", "run", *wide, code=2)
    assert "written to" in of_folder("retrofit", "run", "--mechanism=kv_shift", "--out", "more")
    assert list(HeadwaterForCausalLM.from_pretrained(here / "more", trust=[gated]).config.mechanisms) == [
        "kv_shift",
        gated,
    ]


@pytest.mark.slow
def test_comparisons_and_searches_work_with_a_mechanism_from_outside(gated, anew, forked_workers):
    assert "minus plain" in anew("compare", "recipe.yaml", "compare.seeds=[0,1]", "--workers=1", "--out", "compared")
    assert "minus plain" in anew("report", "compared")
    assert "gated_table" not in sys.modules  # a report reads records alone
    arguments = ["--search", f"--mechanism={gated}", "--mechanism=kv_shift", "--workers=1"]
    assert "chosen: " in anew("compare", "recipe.yaml", *arguments, "--out", "searched")
    shape = ["--layers=1", "--width=64", "--context=16", "--precision=32-true"]
    assert gated in anew("bench", "mechanisms", gated, *shape, "--batch-size=1", "--pairs=2")
    assert gated in anew("bench", "decode", gated, *shape, "--vocab-size=50", "--tokens=3", "--turns=2")


def test_a_home_folder_that_there_is_not_is_not_read():
    assert not may_read("~nobody-of-this-name/text.txt")
