"""What all commands have in common: shipped recipes by name, outputs that are checked first, numbers and paths that
mean something, help."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

import headwater
from headwater.util.errors import HeadwaterError, nearest
from headwater_lab.cli import app
from headwater_lab.cli.arguments import check_writable
from headwater_lab.recipe.recipe_files import find_recipe, recipes_folder, shipped_recipes

TINY = {
    "name": "tiny",
    "data": {"kind": "induction", "held_out": 4, "length": 8, "vocab_size": 8},
    "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"steps": 1, "batch_size": 2, "threads": 1},
    "reporting": {"tensorboard": False},
}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.mark.slow
def test_shipped_recipes_are_listed_with_a_line_each(run):
    code, out, _ = run("list", "recipes", "--json")
    assert code == 0
    rows = json.loads(out)
    assert {row["name"] for row in rows} == set(shipped_recipes())
    assert all(row["title"] for row in rows)
    code, out, _ = run("list", "recipes")
    assert code == 0
    assert all(name in out for name in shipped_recipes())


@pytest.mark.parametrize("message", ["shakespeare", "recipes/shakespeare.yaml", "shakespeare.yaml"])
def test_a_shipped_recipe_is_found_by_name_wherever_one_is(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(message) == recipes_folder() / "shakespeare.yaml"


def test_of_names_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("progressive") == recipes_folder() / "growth" / "progressive.yaml"
    with pytest.raises(HeadwaterError, match="demo/induction, kv-shifting/induction"):
        find_recipe("induction")
    with pytest.raises(HeadwaterError, match="did you mean 'shakespeare'"):
        find_recipe("shakespere")
    with pytest.raises(HeadwaterError, match="headwater list recipes"):
        find_recipe("qqqq")
    (tmp_path / "shakespeare").write_text("mine")
    assert find_recipe("shakespeare") == Path("shakespeare")  # a file goes first


def test_commands_take_the_name_of_a_shipped_recipe(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("plan", "demo/language")
    assert code == 0
    assert "KV shift" in out
    for command in ("train", "compare"):
        code, _, err = run(command, "demo/language", "no.such=1")
        assert code == 2
        assert "has no field 'no'" in err


@pytest.mark.parametrize("group", [[], ["data"], ["bench"]])
def test_a_group_alone_shows_its_commands(run, group):
    code, out, err = run(*group)
    assert code == 2
    assert "Usage:" in out + err
    assert "--help" in out + err


def test_the_version(run):
    code, out, _ = run("--version")
    assert (code, out.strip()) == (0, f"headwater {headwater.__version__}")


def test_every_command_has_a_heading_and_an_example_that_fits_it():
    for command in leaves(typer.main.get_command(app)):
        example = command.epilog.removeprefix("Example: headwater ").split()
        options = {option for parameter in command.params for option in parameter.opts}
        assert command.name in example[:2]
        assert command.name == "serve" or {word for word in example if word.startswith("--")} <= options, example


def test_completion_is_shown_and_nothing_is_written_unless_asked(tmp_path):
    env = os.environ | {"HOME": str(tmp_path), "_HEADWATER_COMPLETE": "complete_bash", "COMP_WORDS": "headwater gen",
                        "COMP_CWORD": "1"}  # fmt: skip
    command = Path(os.__file__).parents[2] / "bin" / "headwater"
    if not command.is_file():
        pytest.skip("headwater is not installed as a command")
    done = subprocess.run([command], env=env, capture_output=True, text=True, timeout=120)
    assert "generate" in done.stdout.split()
    assert not any(path.name.startswith(".bash") for path in tmp_path.iterdir())


def test_numbers_that_no_option_can_mean_are_refused_by_all(run, tiny):
    for arguments, message in (
        (["generate", ".", "x", "--seed", -(2**64)], "64 bits"),
        (["generate", ".", "x", "--seed", 2**40], "too large"),
        (["plan", "gpt2-124m", "--mfu", "nan"], "finite"),
    ):
        code, _, err = run(*arguments)
        assert code == 2
        assert re.search(rf"--[a-z-]+: .*{message}", err), err


def test_a_repeated_option_of_one_value_is_reported(run):
    code, _, err = run("generate", ".", "x", "--seed", 3, "--top-k", 4, "--seed=4")
    assert (code, err.splitlines()[0]) == (2, "Only the last --seed is read; it appears 2 times.")
    assert len(run("generate", ".", "x", "--stop", "a", "--chat", "--stop", "b", "--chat")[2].splitlines()) == 1


@pytest.mark.parametrize("arguments", [["train", "{}", "--out", ""], ["train", ""], ["inspect", ""], ["runs", ""]])
def test_an_empty_path_is_not_the_working_directory(run, tiny, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*(str(tiny) if word == "{}" else word for word in arguments))
    assert code == 2
    assert "empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize("name", ["\udcff", "a\nb", "\x1b[31m"])
def test_an_output_that_cannot_be_shown_is_refused(run, tiny, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("train", tiny, "--out", name)
    assert (code, "cannot be displayed" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_place_is_tried_before_there_is_work_to_lose(tmp_path):
    (tmp_path / "file").write_text("mine")
    for target, folder, message in (
        (tmp_path / "file" / "x", True, "folder"),
        (tmp_path / "file", True, "folder"),
        (tmp_path / "missing" / "x.json", False, "folder"),
        (Path("/proc/x.json"), False, "cannot be written"),
        (Path("/proc/x/y"), True, "cannot be written"),
    ):
        with pytest.raises(HeadwaterError, match=message):
            check_writable(target, folder)
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new" / "deeper", folder=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "missing", "--text", "missing", "--out", "/proc/x.json"],
        ["inspect", "missing", "--out", "/proc/x"],
        ["reproduce", "kv-shifting/figure-1a", "--out", "/proc/x"],
        ["compare", "{}", "--out", "/proc/x"],
        ["data", "tokenizer", "{}", "--out", "/proc/x"],
        ["data", "prepare", "{}", "--out", "/proc/x"],
        ["export", "missing", "--out", "/proc/x"],
        ["grow", "missing", "--out", "/proc/x", "ffn_pairs=9"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_commands_ask_where_they_write_first(run, tiny, arguments):
    code, out, err = run(*(tiny if word == "{}" else word for word in arguments))
    assert (code, out) == (2, "")
    assert "cannot be written" in err


def test_a_new_folder_is_named_with_out(run):
    for command in (["export", "x"], ["data", "prepare", "x"], ["data", "tokenizer", "x"]):
        code, _, err = run(*command)
        assert (code, "--out" in err) == (2, True)


def test_a_device_is_auto_unless_said(run, tiny, tmp_path):
    code, _, err = run("train", tiny, "training.device=gpu", "--out", tmp_path / "other")
    assert code == 2
    assert "training.device" in err
    for command in typer.main.get_command(app).commands["bench"].commands.values():
        for option in command.params:
            assert "--device" not in option.opts or option.default == "auto"


def test_a_size_of_a_recipe_without_sizes_is_refused(run, tmp_path):
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump(TINY | {"compare": {"arms": {"a": {}}, "baseline": "a"}}))
    code, _, err = run("train", path, "--arm", "a", "--size", "x", "--out", tmp_path / "run")
    assert code == 2
    assert "one size" in err


def leaves(command):
    """The commands below a group, or the command itself."""
    below = getattr(command, "commands", {})
    return [leaf for one in below.values() for leaf in leaves(one)] if below else [command]


def test_the_help_of_options_is_taken_out_of_the_docstring():
    commands = leaves(typer.main.get_command(app))
    assert len(commands) > 25
    for command in commands:
        assert not re.search(r"^[a-z_]+: ", command.help, re.MULTILINE), command.name
    (plan,) = (command for command in commands if command.name == "plan")
    texts = {option.name: option.help for option in plan.params}
    assert texts["images"] == "Training budget in images, for image models, e.g. 384M."
    assert texts["json"] == "Print JSON."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "There is no command trian; did you mean train?"),
        (["train", "shakespeare", "--resum"], "There is no option --resum; did you mean --resume?"),
        (["list", "recipe"], "'recipe' is not one of 'recipes', 'presets', 'mechanisms', 'tasks'"),
        (["train"], "Missing argument 'recipe'"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_one_sentence(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("name", "names", "hint"),
    [
        ("kv_shfit", ["kv_shift", "short_conv"], "did you mean 'kv_shift'?"),
        ("num_heads", ["num_attention_heads", "num_key_value_heads", "head_dim"], "_heads' or 'num_key_value_heads'?"),
        ("optim", ["optimizer", "steps"], "did you mean 'optimizer'?"),
        ("block_size", ["batch_size", "context"], "known names: batch_size, context."),
        ("resformer", ["svformer", "kv_shift"], "known names: kv_shift, svformer."),
        ("figure-11", ["figure-1", "figure-10"], "known names: figure-1, figure-10."),
        ("x", ["a", "y"], "known names: a, y."),
    ],
)
def test_only_near_names_are_suggested(name, names, hint):
    assert nearest(name, names).endswith(hint)


def test_an_unknown_option_names_a_near_one_or_the_help(run):
    assert "There is no option --outt; did you mean --out?" in run("train", "shakespeare", "--outt", "x")[2]
    assert "There is no option --foo; `" in run("train", "shakespeare", "--foo", "1")[2]
    assert "There is no command version; `" in run("version")[2]


def test_nanogpts_options_are_answered_with_our_fields(run):
    """All at once, with their values."""
    code, _, err = run(
        "train",
        "--n_layer",
        4,
        "--bias",
        "x.yaml",
        "--learning-rate=1e-3",
        "--dropout=0.1",
        "--min_lr=1e-4",
        "--resume",
    )
    assert code == 2
    assert err.count("\n") == 1
    assert "There are no options --n_layer, --bias, --learning-rate, --dropout, --min_lr, since" in err
    assert "for --n_layer: model.num_hidden_layers=4; for --bias: model.qkv_bias=… " in err
    assert "for --learning-rate: training.learning_rate=1e-3; " in err
    assert "model.embedding_dropout=0.1 model.attention_dropout=0.1 model.residual_dropout=0.1" in err
    assert "for --min_lr: training.min_learning_rate_ratio is its share of training.learning_rate." in err
    options = (
        "n_head n_embd block_size batch_size max_iters warmup_iters eval_interval bias gradient_accumulation_steps"
    )
    err = run("train", "shakespeare", *(f"--{name}=2" for name in f"{options} dtype compile device".split()))[2]
    assert all(f"for --{name}: " in err for name in f"{options} dtype compile device".split())
    err = run("generate", "--out_dir=x", "--start", "ROMEO:", "--num_samples=5", "--max_new_tokens=100", "--n_layer=4")[
        2
    ]
    assert err == (
        "headwater: There are no options --out_dir, --start, --num_samples, --max_new_tokens; for --out_dir: write the "
        "run's folder before the prompt, without an option; for --start: write the prompt after the checkpoint, "
        "without an option; for --num_samples: write the prompt that often, a line each, into a file for --jsonl; for "
        "--max_new_tokens: write --max-new-tokens.\n"
    )
