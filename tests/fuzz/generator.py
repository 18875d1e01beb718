"""Hostile command lines, recipes and files, drawn from a seed: the same number is always the same case."""

from __future__ import annotations

import copy
import json
import random
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
import yaml

from headwater_lab.cli import app
from headwater_lab.recipe.comparison_section import Compare
from headwater_lab.recipe.model_section import MODEL_FIELDS
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.start_section import Growth, Start, TrainingStage
from headwater_lab.recipe.training_section import Reporting, Training

# Command lines that work, quickly. @name is a path of the world; {out} is new in each case.
COMMANDS = {
    "train": ["train", "@task.yaml", "--out", "{out}"],
    "train stages": ["train", "@stages.yaml", "--out", "{out}"],
    "train arm": ["train", "@compare.yaml", "--arm", "vanilla", "--out", "{out}"],
    "train text": ["train", "@text.yaml", "--out", "{out}"],
    "train from": ["train", "@text.yaml", "start.checkpoint=@run", "--out", "{out}"],
    "plan": ["plan", "@task.yaml", "--vocab-size", "8"],
    "plan preset": ["plan", "resformer-82m-sparse", "num_hidden_layers=2", "--hardware", "H100", "--tokens", "1B"],
    "plan run": ["plan", "@run", "--context", "8", "--out", "{out}.png"],
    "list": ["list", "recipes", "--json"],
    "runs": ["runs", "@run"],
    "report": ["report", "@reported"],
    "generate": ["generate", "@run", "The", "--max-new-tokens", "2", "--device", "cpu"],
    "generate jsonl": ["generate", "@run", "--jsonl", "@prompts", "--max-new-tokens", "2", "--stop", "x"],
    "export": ["export", "@run", "--out", "{out}"],
    "export family": ["export", "@llama", "--out", "{out}", "--family", "llama"],
    "evaluate": ["evaluate", "@run", "--text", "@text", "--limit", "1", "--context", "16", "--out", "{out}.json"],
    "inspect": ["inspect", "@run", "--rows", "4", "--context", "16"],
    "inspect scalars": ["inspect", "@run", "@run", "--scalars"],
    "grow": ["grow", "@tokens", "ffn_pairs=40", "--out", "{out}"],
    "grow width": ["grow", "@run", "intermediate_size=80", "--out", "{out}"],
    "shrink": ["shrink", "@tokens", "--ffn-pairs", "8", "--text", "@text", "--rows", "4", "--out", "{out}"],
    "retrofit": ["retrofit", "@llama", "--mechanism", "kv_shift", "--out", "{out}"],
    "retrofit layout": ["retrofit", "@resformer", "--layout", "resformer", "--set", "norm_eps=1e-6", "--out", "{out}"],
    "retrofit add": ["retrofit", "@run", "--mechanism", "value_residual", "--text", "@text", "--out", "{out}"],
    "data show": ["data", "show", "@prepared", "--check"],
    "data prepare": ["data", "prepare", "@corpus", "--out", "{out}", "--held-out", "0.2"],
    "data tokenizer": ["data", "tokenizer", "@corpus", "--out", "{out}", "--vocab-size", "260"],
}
# These start processes or measure for a while when nothing is wrong: they end in a place that cannot be written, which
# is found out last, or get an option that there is not.
ONLY_WRONG = {
    "compare": ["compare", "@compare.yaml", "--out", "/proc/x"],
    "reproduce": ["reproduce", "kv-shifting/figure-1a", "--out", "/proc/x"],
    "serve": ["serve", "@run"],
    "bench train": ["bench", "train", "--pairs", "2", "--layers", "1", "--width", "64"],
    "bench mechanisms": ["bench", "mechanisms", "kv_shift", "--pairs", "2", "--layers", "1", "--width", "64"],
    "bench decode": ["bench", "decode", "kv_shift", "--turns", "2", "--layers", "1", "--width", "64"],
    "verify": ["verify", "@run"],
}
SMALL = ["--layers", "1", "--width", "64", "--context", "8", "--vocab-size", "64"]
MEASURING = {
    "compare": ["compare", "@compare.yaml", "--out", "{out}", "--workers", "1"],
    "bench train": ["bench", "train", "--pairs", "2", "--batch-size", "1", "--precision", "32-true", *SMALL],
    "bench mechanisms": ["bench", "mechanisms", "kv_shift", "--pairs", "2", "--precision", "32-true", *SMALL],
    "bench decode": ["bench", "decode", "kv_shift", "--turns", "2", "--tokens", "3", *SMALL],
    "verify": ["verify", "@run"],
}
# The user's own folder, and places that are none.
PLACES = [
    "@user", "@user/start", "@user/metrics.jsonl", "@missing", "@missing/deeper", "@pipe", "@folder", "@empty",
    "@bytes", "@text", "@json", "@run", "@tokens", "@llama", "@prepared", "@text.yaml", "@run/checkpoints",
    "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/proc", "/", ".", "..", "~", "~nobody/x", "a[/b]",
    "a\nb", "a" * 300, "a/" * 3000, "\u202egnp.exe", "é\u0301", "", " ", "-", "--", "-x", "*", "con.yaml",
    "https://example.invalid/x", "hf://x", "file:///etc/passwd", "C:\\x", "$HOME", "${HOME}", "%s", "{0}", "\\",
]  # fmt: skip
NUMBERS = [
    "-1", "0", "-0", "1e-9", "-1e9", "0.5", "1.5", "nan", "-nan", "inf", "-inf", "1e999", "NaN", ".inf", ".nan",
    "2147483648", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" * 40, "1" * 5000, "1e18",
    "0x10", "010", "1_0", "1:30", "٣", "１", "½", "²", "1,000", "1 000", " 1", "1 ", "+1", "--1", "1e", "true", "None",
    "null", "~",
]  # fmt: skip
TEXTS = [
    "", " ", "x", "[/b]", "[bold]", "[red]x[/red]", "{}", "[]", "{a: 1}", "[1", "${5", "${oc.env:HOME}", "???",
    "!!set", "!!python/object/apply:os.getcwd []", "&a [*a]", "*a", "a: b", "a #b", "- a", "'", '"', "`", "\t", "\n",
    "a\nb", "\r", "\x07", "\x1b[31m", "\udcff", "\ufeff", "\u2028", "𝕩", "a" * 2000, "[" * 3000, "{a: " * 200, "%s",
    "{0}", "../x", "kv_shift", "kv_shift={}", "kv_shift={window: 2}", "kv_shift={window: .inf}", "kv_shift={nope: 1}",
    "pattention", "svformer", "nope", "nope={}", "=", "=1", "a=", "a=b=c", "llama", "auto", "cuda", "cuda:99", "meta",
    "cpu:x", "mps", "float32", "int8", "32-true", "bytes", "gpt2", "0,1", "0,,1", "-1,9",
]  # fmt: skip
SCALARS: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), 2**31, 2**63,
    -(2**63) - 1, 10**40, "", "x", "[/b]", "1", "true", "\u2028", "../x", "/etc/passwd", "${x}", [], {}, [[]], [1, 2],
    ["a"], {"a": 1}, {"": 1}, {"a": {"b": {"c": []}}}, "a" * 500,
]  # fmt: skip


@dataclass
class Case:
    """Arguments; files to write into the case's folder first; whether exit code 0 would be wrong for certain."""

    arguments: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    refused: bool = False
    # A folder of the world to copy, one of its files, what it becomes, and whether sums of files stay.
    damage: tuple[str, str, bytes | None, bool] | None = None


def _parameters(arguments: list[str]) -> list[Any]:
    command: Any = typer.main.get_command(app)
    for word in arguments:
        if not (below := getattr(command, "commands", {})) or word not in below:
            break
        command = below[word]
    # Completion is installed into the user's shell when it is asked for.
    return [one for one in command.params if "--install-completion" not in one.opts]


def command_lines(draw: random.Random) -> Case:
    """A command line that works, with one to three options, values or arguments that may not."""
    table = ONLY_WRONG if (only_wrong := draw.random() < 0.2) else COMMANDS
    line = list(table[draw.choice(sorted(table))])
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        kind = draw.choice(["value", "value", "option", "option", "drop", "place"])
        options = [i for i, word in enumerate(line[:-1]) if word.startswith("--") and not line[i + 1].startswith("--")]
        value = draw.choice(draw.choice([PLACES, NUMBERS, TEXTS]))
        if kind == "value" and options:
            line[draw.choice(options) + 1] = value
        elif kind == "place" and (places := [i for i, word in enumerate(line) if word.startswith("@")]):
            line[draw.choice(places)] = draw.choice(PLACES)
        elif kind == "option" and (
            named := [name for one in _parameters(line) for name in one.opts if name.startswith("--")]
        ):
            option = draw.choice(sorted(named))
            flags = [name for one in _parameters(line) if getattr(one, "is_flag", False) for name in one.opts]
            line += [option] if option in flags else [option, value]
        elif kind == "drop" and len(line) > 1:
            line.pop(draw.randrange(1, len(line)))
    if line[0] == "serve":  # which hands on what it does not know
        line = ["serve", draw.choice(["@missing", "@empty", "@user", "@json", "/dev/null", "a[/b]"])]
    elif only_wrong and line[0] in ("compare", "reproduce") and draw.random() < 0.8:
        line += ["--out", "/proc/x"]
        only_wrong = line[-3] not in ("--out", "--help") and "--list" not in line
    elif only_wrong or draw.random() < 0.1:
        line.append(draw.choice(["--no-such-option", "--outt=x", "-z"]))
        only_wrong = "--" not in line and not line[-2].startswith("-")
    return Case(line, refused=only_wrong)


def measuring(draw: random.Random) -> Case:
    """Commands that take seconds when nothing is wrong, with what may be."""
    line = list(MEASURING[draw.choice(sorted(MEASURING))])
    parameters = [one for one in _parameters(line) if one.opts[0].startswith("--")]
    for one in draw.sample(parameters, min(len(parameters), draw.choice([0, 1, 1, 2]))):
        option = one.opts[0]
        line += (
            [option] if getattr(one, "is_flag", False) else [option, draw.choice(draw.choice([PLACES, NUMBERS, TEXTS]))]
        )
    return Case(line)


def _keys(draw: random.Random) -> str:
    sections = {"training": Training, "reporting": Reporting, "compare": Compare, "start": Start}
    section = draw.choice(["", "model", "data", "stages.wider", "stages.0", *sections])
    if section == "":
        return draw.choice(sorted(Recipe.model_fields))
    if section == "model":
        return f"model.{draw.choice(sorted(MODEL_FIELDS))}"
    if section == "data":
        fields = [
            "kind",
            "source",
            "context",
            "held_out",
            "held_out_domains",
            "metric",
            "length",
            "vocab_size",
            "variant",
        ]
        return f"data.{draw.choice([*fields, 'row_layout'])}"
    if section.startswith("stages"):
        return f"{section}.{draw.choice([*TrainingStage.model_fields, 'grow.' + draw.choice(sorted(Growth.model_fields))])}"
    return f"{section}.{draw.choice(sorted(sections[section].model_fields))}"


def overrides(draw: random.Random) -> Case:
    """A recipe with one or two overrides: odd values under real keys, and odd keys."""
    line = list(COMMANDS[draw.choice(["train", "train stages", "train arm", "train text", "plan"])])
    refused = False
    for _ in range(draw.choice([1, 1, 2])):
        key, value = _keys(draw), draw.choice(draw.choice([NUMBERS, TEXTS]))
        match draw.choice(["value"] * 6 + ["key", "brackets", "prefix", "whole"]):
            case "value" if draw.random() < 0.3:
                value = yaml.safe_dump(draw.choice(SCALARS), default_flow_style=True).removesuffix("\n...\n").strip()
            case "key":
                key, refused = f"{key}.no_such", line[0] == "train"
                refused = refused and not key.startswith(("compare", "model", "stages", "start"))
            case "brackets":
                section, _, name = key.rpartition(".")
                key, refused = f"{section}[{name}]", True
            case "prefix":
                key, refused = draw.choice(["+", "~", " ", ".", "@"]) + key, True
            case "whole":
                value = draw.choice(["{}", "[]", "null", "{no_such: 1}", "x"])
        line.append(f"{key}={value}")
    return Case(line, refused=refused and line[0] == "train")


def fields(draw: random.Random) -> Case:
    """Fields of a model, for `plan` and for checkpoints that have no config; and options of mechanisms."""
    value = draw.choice(draw.choice([NUMBERS, TEXTS]))
    if draw.random() < 0.6:
        value = yaml.safe_dump(draw.choice(SCALARS), default_flow_style=True).removesuffix("\n...\n").strip()
    name = draw.choice([*sorted(MODEL_FIELDS), "bos_token_id", "layer_types", "rope_theta", "nope", "a.b", ""])
    if draw.random() < 0.25:
        option = draw.choice(
            ["window", "mode", "layers", "heads", "variant", "target", "weight", "ffn_pairs", "score", "keys"]
        )
        mechanism = draw.choice(["kv_shift", "value_residual", "skip_layer", "pattention", "svformer", "neutreno"])
        name, value = "mechanisms", f"{{{mechanism}: {{{option}: {value}}}}}"
    if draw.random() < 0.15:
        keys = ["rope_type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings"]
        name = f"rope_parameters.{draw.choice(keys)}"
    match draw.choice(["preset", "run", "layout", "recipe", "mechanism", "bench"]):
        case "preset":
            return Case(["plan", "gpt2-124m", "num_hidden_layers=2", f"{name}={value}"])
        case "run":
            return Case(["plan", "@run", f"{name}={value}"])
        case "layout":
            return Case([*COMMANDS["retrofit layout"], "--set", f"{name}={value}"])
        case "recipe":
            return Case([*COMMANDS["train"], f"model.{name}={value}"])
        case "bench":
            return Case(["bench", "mechanisms", json.dumps({name: value}), "--device", "nowhere"])
    mechanism = value.partition(": ")[0].strip("{") if name == "mechanisms" else "kv_shift"
    return Case([*COMMANDS["retrofit"], "--mechanism", f"{mechanism}={{{name}: {value}}}", "--allow-change"])


def recipe_files(draw: random.Random, recipes: dict[str, dict]) -> Case:
    """A recipe with something else in it, as values or as text."""
    values = copy.deepcopy(recipes[draw.choice(sorted(recipes))])
    refused = False
    for _ in range(draw.choice([1, 1, 2])):
        here: Any = values
        while isinstance(here, dict) and here:
            key = draw.choice(sorted(here))
            if not (isinstance(here[key], dict) and here[key]) or draw.random() < 0.3:
                break
            here = here[key]
        if not isinstance(here, dict) or not here:
            continue
        # Without these it is a larger model, and a thousand steps: right, and slow.
        small = key in ("training", "steps", "model", "hidden_size", "num_hidden_layers", "arms")
        match draw.choice(["value", "value", "value", "drop", "rename", "add"]):
            case "value" | "drop" if small:
                here[key] = copy.deepcopy(draw.choice([one for one in SCALARS if one not in ({}, None)]))
            case "value":
                here[key] = copy.deepcopy(draw.choice(SCALARS))
            case "drop":
                del here[key]
            case "rename":
                here[key + "x"] = here.pop(key)
            case "add":
                here[draw.choice(["no_such", "seed", "steps", "kind", "x[/b]", "a.b", " "])] = draw.choice(SCALARS)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if draw.random() < 0.4:
        lines = text.splitlines()
        at = draw.randrange(len(lines))
        match draw.choice(["repeat", "tab", "cut", "insert", "tag", "document", "nest", "key"]):
            case "repeat":
                lines.insert(at, lines[at])
                refused = ":" in lines[at]
            case "tab":
                lines[at] = "\t" + lines[at]
            case "cut":
                lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
            case "insert":
                place = draw.randrange(len(lines[at]) + 1)
                lines[at] = (
                    lines[at][:place] + draw.choice(string.punctuation + "\x00\x07\ufeff\u2028") + lines[at][place:]
                )
            case "tag":
                lines[at] = lines[at].replace(": ", f": {draw.choice(['!!set ', '!!int ', '!x ', '&a ', '*a '])}")
            case "document":
                lines.insert(at, draw.choice(["---", "...", "%YAML 1.1", "# x"]))
            case "nest":
                lines.append(f"title: {'[' * draw.choice([3, 50, 5000])}")
            case "key":
                lines.append(draw.choice(["null: 1", "1: 1", "? [a]\n: 1", "~: 1", "true: 1", "2024-01-01: x", ": 1"]))
                refused = True
        text = "\n".join(lines) + "\n"
    command = draw.choice(["train", "train", "train", "plan"])
    line = [command, "r.yaml"] + (["--out", "{out}"] if command == "train" else [])
    return Case(line, {"r.yaml": text.encode("utf-8", "surrogatepass")}, refused)


# What reads a folder of each kind.
READERS = {
    "run": [
        "generate",
        "inspect",
        "evaluate",
        "export",
        "grow width",
        "retrofit",
        "runs",
        "report",
        "plan",
        "train",
        "from",
    ],
    "tokens": ["generate", "grow", "shrink", "export"],
    "llama": ["retrofit", "evaluate"],
    "prepared": ["show", "train data"],
}
LINES = {
    "generate": ["generate", "copy", "The", "--max-new-tokens", "1"],
    "inspect": ["inspect", "copy", "--rows", "4", "--context", "16"],
    "evaluate": ["evaluate", "copy", "--text", "@text", "--limit", "1", "--context", "16"],
    "export": ["export", "copy", "--out", "{out}"],
    "grow width": ["grow", "copy", "intermediate_size=80", "--out", "{out}"],
    "grow": ["grow", "copy", "ffn_pairs=40", "--out", "{out}"],
    "shrink": ["shrink", "copy", "--ffn-pairs", "8", "--text", "@text", "--rows", "4", "--out", "{out}"],
    "retrofit": ["retrofit", "copy", "--mechanism", "value_residual", "--out", "{out}"],
    "runs": ["runs", "."],
    "report": ["report", "copy"],
    "plan": ["plan", "copy"],
    "train": ["train", "@text.yaml", "model.mechanisms.kv_shift={}", "--out", "copy", "--resume"],
    "from": ["train", "@text.yaml", "start.checkpoint=copy", "--out", "{out}"],
    "show": ["data", "show", "copy"],
    "train data": ["train", "@task.yaml", "data={kind: prepared, source: copy, context: 16}", "--out", "{out}"],
}


def damaged_files(draw: random.Random, world: dict[str, Path]) -> Case:
    """A folder that headwater or transformers wrote, with one file cut, changed, emptied or gone."""
    kind = draw.choice(sorted(READERS))
    files = sorted(p.relative_to(world[kind]).as_posix() for p in world[kind].rglob("*") if p.is_file())
    name = draw.choice([one for one in files if "lock" not in one])
    content = (world[kind] / name).read_bytes()
    how = draw.choice(["cut", "flip", "empty", "gone", "garbage", "json", "json", "json"])
    new: bytes | None = content
    sums = draw.random() < 0.3  # what reads files without looking at their sums first is reached without sums
    if how == "json":
        try:
            new = json.dumps(_changed(draw, json.loads(content))).encode()
        except ValueError:
            how = "flip"
    if how == "cut":
        new = content[: draw.randrange(len(content) + 1)]
    elif how == "flip" and content:
        at = draw.randrange(len(content))
        new = content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
    elif how == "empty":
        new = b""
    elif how == "gone":
        new = None
    elif how == "garbage":
        new = draw.choice([b"\x00" * 100, b"null", b"[]", b"{}", b"1", b'"x"', b"\xff\xfe", b"[" * 10_000, b"mine"])
    return Case(list(LINES[draw.choice(READERS[kind])]), damage=(kind, name, new, sums))


def _changed(draw: random.Random, value: Any) -> Any:
    """A JSON value with something else somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {name: one for name, one in value.items() if name != key}
        return value | {key: _changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], _changed(draw, value[at]), *value[at + 1 :]]
    return copy.deepcopy(draw.choice(SCALARS))
