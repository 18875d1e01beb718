"""Every command that a page shows runs, in the order of the page, in one folder, at a size of seconds.

A page's commands must have what they read: from the repository, from a command above, from a file that the page shows,
or from `ASSUMED`, which says what all pages take for granted. What cannot run here is in `NOT_RUN` with the reason; it
is still parsed, and its recipe read and estimated. This is slow, but parsing is not: `make test` parses every command.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import headwater_lab as lab
from headwater_lab.cli import app
from headwater_lab.comparison.trials import make_trial
from headwater_lab.data.images import ImageSettings
from headwater_lab.data.language import LanguageSettings
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.papers.estimate import count_stage_costs
from headwater_lab.papers.table import find_table as paper_table
from headwater_lab.papers.work import prepare_work
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.recipe.recipe_files import find_recipe, load_recipe

ROOT = Path(__file__).parents[1]
Run = Callable[..., tuple[int, str, str]]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What cannot run here: a pattern of the command, and why.
NOT_RUN = {
    r"^(torchrun|srun) ": "a launcher starts it, on several machines",
    r" training\.devices=8\b": "eight processes, each of which imports PyTorch",
    r"^headwater serve ": "it answers until it is stopped",
    r"^headwater generate .* --compile\b": "it compiles for minutes",
    r"^headwater generate CHECKPOINT - ": "it reads what is typed",
    r"^headwater generate CHECKPOINT .* --chat\b": "the small model has no chat template",
    r"^headwater bench train --base vit\b": "images have no context to make smaller; tests/vision runs it",
    r"EleutherAI/|HuggingFaceTB/|togethercomputer/| gpt2 ": "it reads models or tokenizers from the hub",
    r"^headwater records check ": "it asks for a commit without changes; tests/reproduce runs it",
}
# What to append to a command, by the beginning of its name, where it has the option: the last one given counts.
SMALL = {
    "": {"--rows": 8, "--workers": 1, "--max-new-tokens": 4, "--max-bytes": 20_000, "--limit": 2},
    "bench": {
        "--layers": 2, "--width": 64, "--vocab-size": 300, "--context": 16, "--batch-size": 1,
        "--precision": "32-true", "--pairs": 2, "--turns": 3, "--comparisons": 10,
    },
    "bench mechanisms": {"--layers": 4},
    "convert": {"--heal": "4k"},
    "bench decode": {"--tokens": 3},
    "bench gpu": {"--only": "environment"},
}  # fmt: skip
STEPS = 4


def smaller(recipe: Recipe) -> Iterator[str]:
    """Overrides that make a recipe small, whatever it trains."""
    for where in ("training", *(f"stages.{stage.name}.training" for stage in recipe.stages)):
        yield f"{where}.steps={STEPS}"
        yield f"{where}.warmup_steps=0"
    yield "training.batch_size=2"
    yield "training.gradient_accumulation_steps=1"
    if isinstance(recipe.data, LanguageSettings):
        yield "data.held_out_bytes=1000"
        if recipe.data.source == "python-stdlib":
            yield "data.source=docs/tutorials/*.md"
    elif isinstance(recipe.data, ImageSettings):
        if recipe.compare is not None:
            yield "compare.learning_rates=[]"
        if recipe.data.augmentation.draws and find_spec("torchvision") is None:
            yield "data.augmentation=null"
    else:
        yield "data.held_out=8"
    if recipe.compare is not None:
        yield f"compare.seeds={recipe.compare.seeds[: 2 if len(recipe.compare.arms) > 1 else 4]}"


RECIPE: dict[str, Any] = {
    "name": "tiny",
    "data": {"kind": "text", "source": "docs/tutorials/*.md", "context": 64, "held_out": 0.3, "held_out_bytes": 1000},
    "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mechanisms": {"kv_shift": {}}},
    "training": {"steps": 20, "batch_size": 2, "warmup_steps": 2, "threads": 1},
    "reporting": {"tensorboard": False},
}


def write_text(path: Path, run: Run) -> None:
    path.write_text("Some lines of text, which a small model reads.\n" * 400)


def write_image(path: Path, run: Run) -> None:
    Image.new("L", (8, 8), 128).save(path)


def write_prompts(path: Path, run: Run) -> None:
    path.write_text('{"prompt": "a"}\n{"prompt": "bc"}\n')


def write_table(path: Path, run: Run) -> None:
    rows = ({"text": f"Document {i}. " * 20, "meta": {"part": ("stdlib", "packages")[i % 2]}} for i in range(400))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_recipe(path: Path, run: Run) -> None:
    path.write_text(json.dumps(RECIPE))


def write_input(path: Path, run: Run) -> None:
    """The text that the shipped recipe shakespeare reads, unless the page has one."""
    if not Path("input.txt").exists():
        write_text(Path("input.txt"), run)


def copy_file(path: Path, run: Run) -> None:
    shutil.copy(ROOT / path, path)


def train_model(path: Path, run: Run) -> None:
    lab.train(RECIPE, path, overrides=list(smaller(parse(RECIPE, "here"))))


def train_trunk(path: Path, run: Run) -> None:
    """A shorter run of the page's recipe, for a longer one to branch off."""
    small = smaller(load_recipe("shift.yaml", []))
    lab.train("shift.yaml", path, overrides=[*small, "training.schedule=wsd", "training.steps=3"])


def train_arms(path: Path, run: Run) -> None:
    recipe = {**RECIPE, "compare": {"baseline": "vanilla", "arms": {"vanilla": {"model": {"mechanisms": None}}}}}
    lab.compare(recipe, path, overrides=list(smaller(parse(recipe, "here"))), workers=1)


def train_classifier(path: Path, run: Run) -> None:
    small = smaller(load_recipe(find_recipe("vision/digits"), []))
    assert run("train", "vision/digits", *small, "--out", path)[0] == 0


def train_grown(path: Path, run: Run) -> None:
    """A grown copy of runs/base, trained further."""
    recipe = "recipes/growth/progressive.yaml"
    small = smaller(load_recipe(recipe, ["stages=[]"]))
    more = ["freeze=true", "--out", f"{path}-untrained"]
    assert run("grow", "runs/base", "attention_pairs=48", "ffn_pairs=192", *more)[0] == 0
    assert run("train", recipe, "stages=[]", *small, f"start.checkpoint={path}-untrained", "--out", path)[0] == 0


def save_foreign(config: Any, model: Any, path: Path, run: Run) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = config(vocab_size=257, max_position_embeddings=128, num_key_value_heads=2, **sizes)
    settings.sliding_window = None
    model(settings).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)


# What pages take for granted, by the name of a file or folder that a command reads and nothing above has written.
ASSUMED: dict[str, Callable[[Path, Run], None]] = {
    r"CHECKPOINT|smaller|runs/(mine|a|b|first)|runs/demo/\w+/[\w-]+-\d": train_model,
    r"(runs/)?llama": functools.partial(save_foreign, LlamaConfig, LlamaForCausalLM),
    r"(runs/)?mistral": functools.partial(save_foreign, MistralConfig, MistralForCausalLM),
    r"runs/short": train_trunk,
    r"runs/arms": train_arms,
    r"runs/digits": train_classifier,
    r"runs/(code|prose)": train_grown,
    r"(texts/\*|\w+)\.txt": write_text,
    r"prompts\.jsonl": write_prompts,
    r"web\.jsonl": write_table,
    r"\w+\.png": write_image,
    r"recipe\.yaml": write_recipe,
    r"shakespeare": write_input,
    r"results/[\w-]+\.jsonl": copy_file,
}


def provide(words: Iterable[str], run: Run | None) -> None:
    """Make what a command reads and nothing has written; without `run`, recipes alone."""
    names = {part for word in words for part in (word, word.partition("=")[2]) if not word.startswith("--")}
    for name in sorted(names):
        for pattern, make in ASSUMED.items():
            path = Path(name)
            if re.fullmatch(pattern, name) and not path.exists() and (run is not None or make is write_recipe):
                path.parent.mkdir(parents=True, exist_ok=True)
                make(path, run)


@dataclass(frozen=True)
class Command:
    """line: as shown, whole, from the launcher on. words: after `headwater`. printed: what the page shows below it."""

    line: str
    words: list[str]
    printed: str

    @property
    def not_run(self) -> list[str]:
        return [pattern for pattern in NOT_RUN if re.search(pattern, self.line)]

    @property
    def error(self) -> str:
        """How the error begins that the page shows; "" without one."""
        found = re.search(r"^headwater: \S+ \S+ \S+", self.printed, re.MULTILINE)
        return found[0] if found else ""

    @property
    def written(self) -> list[str]:
        """Folders and files that it says it has written."""
        return re.findall(r"^(?:written to|report:|picture:|figure:) (\S+)$", self.printed, re.MULTILINE)


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class Code:
    text: str


def shown(page: str) -> Iterator[Command | File | Code]:
    """What a page has its reader do, in order: save files, run Python and commands.

    In a block with prompts, only lines with a prompt are commands. A synopsis, with […], is none.
    """
    for block in re.finditer(r'^([ \t]*)```(\w*)(?: title="(.*?)")?\n(.*?)^\1```', page, re.DOTALL | re.MULTILINE):
        kind, title, text = block[2], block[3], textwrap.dedent(block[4])
        if name := title or re.match(r"# ([\w-]+\.(?:py|yaml))\n", text):
            yield File(name if isinstance(name, str) else name[1], text)
        elif kind == "python":
            yield Code(text)
        elif kind in ("", "bash", "sh", "console", "shell"):
            yield from _commands(text)


# Variables; the interpreter, or what starts several processes; the command.
LINE = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:python -m |((?:torchrun|srun) (?:-\S+ \S+ )+)(?:-m )?)?headwater(?:_lab)? ([a-z].*)"
)


def _commands(text: str) -> Iterator[Command]:
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    starts = [i for i, line in enumerate(lines) if (line.startswith("$ ") if prompted else LINE.match(line))]
    for start, end in pairwise([*starts, len(lines)]):
        line = lines[start].removeprefix("$ ")
        if (found := LINE.match(line)) is None:
            assert "headwater " not in line, f"{line} is not understood"
        elif not re.search(r"\[-|\[\w+=|…", line.partition("  #")[0]):
            words = shlex.split(found[2], comments=True)
            printed = "\n".join(lines[start + 1 : end])
            yield Command(f"{found[1] or ''}headwater {found[2]}", words[: -1 if words[-1] == "&" else None], printed)


THINGS = {page.relative_to(ROOT).as_posix(): list(shown(page.read_text())) for page in PAGES}
HEADS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "recipes").rglob("*.yaml"))]
WITH_COMMANDS = [name for name, things in THINGS.items() if any(isinstance(one, Command) for one in things)]


def parsed(words: list[str]) -> tuple[str, Any, dict[str, Any]]:
    """A command's name, the command, and its arguments. Raises what the command line does for wrong ones."""
    command, rest, names = typer.main.get_command(app), list(words), []
    while below := getattr(command, "commands", {}):
        names.append(rest.pop(0))
        assert names[-1] in below, f"there is no command {' '.join(names)}"
        command = below[names[-1]]
    return " ".join(names), command, command.make_context(names[-1], rest).params


def recipes_of(name: str, values: dict[str, Any]) -> list[Recipe]:
    """The recipes that a command trains, as the page gives them. Raises `HeadwaterError`."""
    if name == "train":
        recipe = load_recipe(find_recipe(values["recipe"]), values["overrides"] or [])
        if values["arm"]:
            assert recipe.compare is not None
            assert values["arm"] in recipe.compare.arms
            make_trial(recipe, values["arm"], recipe.seed, Path("runs"), values["size"])
        assert values["stage"] in (None, *recipe.stage_names)
        return [recipe]
    arguments = {"compare": "recipes", "reproduce": "arguments"}
    if name not in arguments:
        return []
    words = values[arguments[name]]
    overrides, names = [word for word in words if "=" in word], [word for word in words if "=" not in word]
    if name == "reproduce" and (values["list"] or values["no_train"]):
        return []
    if name == "reproduce":
        table, scale = paper_table(names[0]), values["scale"]
        if table.computed or table.scales[scale].nothing:
            return []
        return [recipe for _, recipe in prepare_work(names[0], scale, Path("runs"), overrides).recipes]
    return [load_recipe(find_recipe(word), overrides) for word in names]


def check(command: Command) -> list[str]:
    """Parse a command and read its recipes; returns what to append to make it small.

    What would be trained is estimated where the command is not run: that builds the plan of every layer.
    """
    name, known, values = parsed(command.words)
    options = {option for parameter in known.params for option in parameter.opts}
    small = [
        str(word)
        for beginning, changes in SMALL.items()
        for option, value in changes.items()
        if name.startswith(beginning)
        and option in options
        # Without a text it has nothing to take rows of, and says so.
        and not (name == "retrofit" and option == "--rows" and "--text" not in command.words)
        # Nothing is trained.
        and not (name == "reproduce" and {"--list", "--no-train"} & {*command.words})
        for word in (option, value)
    ]
    recipes = recipes_of(name, values)
    for recipe in recipes if command.not_run else ():
        arms = recipe.compare.arms if recipe.compare and name != "train" else ()
        sizes = (recipe.compare.sizes if recipe.compare and name != "train" else None) or [None]
        for one in [recipe.arm(arm, recipe.seed, size) for arm in arms for size in sizes] or [recipe]:
            assert all(flops > 0 for _, flops, _ in count_stage_costs(one))
    return small + list(dict.fromkeys(text for recipe in recipes for text in smaller(recipe)))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that looks like a clone of the repository, in which commands may write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)  # the working directory, for modules that a page shows
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_command_shown_is_parsed_and_its_recipe_read(name, place):
    for thing in THINGS[name]:
        if isinstance(thing, File):
            Path(thing.name).write_text(thing.text)
        elif isinstance(thing, Command):
            provide(thing.words, None)
            check(thing)


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_a_recipe_says_what_it_shows_costs_and_runs(name, place):
    shows, costs, run, *_ = (ROOT / name).read_text().splitlines()
    assert re.fullmatch(r"# .*\.", shows)
    assert re.fullmatch(r"# Costs .*\.", costs)
    for line in run.removeprefix("# Run: ").partition("   ")[0].split(" && "):
        words = shlex.split(line)
        assert words[0] == "headwater"
        assert Path(name).stem in line or words[1] in ("reproduce", "bench")
        parsed(words[1:])
        if words[1] != "bench":
            recipes_of(words[1], parsed(words[1:])[2])


def walk(things: Iterable[Command | File | Code], run: Run) -> None:
    """Do what a page has its reader do, in the current folder."""
    for one in things:
        if isinstance(one, File):
            Path(one.name).write_text(one.text)
            continue
        if isinstance(one, Code):
            exec(compile(one.text, "page", "exec"), {})
            continue
        written = {after for before, after in pairwise(one.words) if before in ("--out", "--keep")}
        provide([word for word in one.words if word not in written], run)
        small = check(one)
        if one.not_run:
            continue
        changed = {word.partition("=")[0] for word in small if "=" in word}
        words = [word for word in one.words if word.partition("=")[0] not in changed] + small
        code, _, err = run(*words)
        assert code == (2 if one.error else 0), f"{words}: {err}"
        assert one.error in err
        for path in map(Path, one.written):  # `reproduce` adds a digest of what was changed
            there = path.exists() or any(path.parent.parent.glob(f"{path.parent.name}-*/{path.name}"))
            assert there, f"{words} has not written {path}"


QUICK = {"docs/tutorials/own-mechanism.md"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in WITH_COMMANDS]
)
def test_every_command_shown_runs(name, place, run, forked_workers):
    for folder in ("docs", "recipes", "examples"):
        shutil.copytree(ROOT / folder, place / folder)
    (place / "tests").mkdir()
    shutil.copy(__file__, place / "tests")
    things = [one for one in THINGS[name] if "tutorials" in name or not isinstance(one, Code)]  # others: test_docs.py
    walk(things, run)


WRONG = {
    "an option": ("plan gpt2-124m --contexts 64", "--contexts"),
    "a command": ("plant gpt2-124m", "plant"),
    "a recipe": ("train recipes/demo/inductions.yaml", "inductions"),
    "a field": ("train demo/induction training.step=3", "'step'"),
    "a field of the model": ("compare demo/induction model.hidden=3", "hidden"),
    "an arm": ("train demo/induction --arm none", "none"),
    "a table": ("reproduce kv-shifting/figure-99", "figure-99"),
    "what no command above writes": ("runs runs/nothing", "runs/nothing"),
    "what it writes": ("list recipes\nwritten to somewhere", "somewhere"),
    "its error": ("list recipes\nheadwater: There is no recipe.", "recipes"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shows", "word"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_on_a_page_is_noticed(shows, word, place, run):
    with pytest.raises(Exception, match=re.escape(word)):
        walk(shown(f"```\n$ headwater {shows}\n```\n"), run)


def test_commands_are_read_whole():
    page = """
```
$ headwater train \\
    "a b" c=[1]
it says: headwater train
headwater: Nothing was there.
$ ls
```

- In a list:

  ```
  OMP_NUM_THREADS=1 python -m headwater_lab runs   # these, …
  torchrun --nnodes 4 -m headwater_lab runs
  headwater compare RECIPE… [--out FOLDER]
  headwaters run
  ```

```yaml title="a.yaml"
headwater runs
```
"""
    one, *others, file = shown(page)
    assert isinstance(one, Command)
    assert one.words == ["train", "a b", "c=[1]"]
    assert one.error == "headwater: Nothing was there."
    assert [(other.words, bool(other.not_run)) for other in others] == [(["runs"], False), (["runs"], True)]
    assert file == File("a.yaml", "headwater runs\n")


def test_there_are_commands_to_run():
    assert sum(isinstance(thing, Command) for things in THINGS.values() for thing in things) > 40
