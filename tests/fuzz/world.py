"""A small world for the fuzzer: one of each thing that commands take, and a folder that is the user's own."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater_lab.data.tokenizer import byte_tokenizer
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.records import Experiment
from headwater_lab.training.saving import write_model
from headwater_lab.training.stages import train_stages

MODEL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
QUICK = {
    "training": {"steps": 1, "batch_size": 1, "threads": 1, "warmup_steps": 0},
    "reporting": {"tensorboard": False, "save_every": None},
}


@dataclass
class World:
    """Paths by name, and the valid recipes by name."""

    paths: dict[str, Path]
    recipes: dict[str, dict]

    def digest(self) -> dict[str, str]:
        """What lies in the user's folder and in all that is only read."""
        found = {}
        for name in ("user", *READ_ONLY):
            root = self.paths[name]
            for path in sorted([root, *root.rglob("*")] if root.is_dir() else [root]):
                # A run's lock file may come and go.
                if path.is_file() and "lock" not in path.name:
                    found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
                elif path.is_dir():
                    found[str(path)] = "folder"
        return found


READ_ONLY = ("run", "tokens", "llama", "resformer", "text", "prompts", "prepared", "corpus")


def make_world(root: Path) -> World:
    """Make it in an empty folder."""
    paths = {"root": root, "missing": root / "missing", "folder": root / "folder", "pipe": root / "pipe"}
    paths["folder"].mkdir()
    os.mkfifo(paths["pipe"])
    paths["text"] = root / "text.txt"
    paths["text"].write_text("".join(f"The {i}th line, of which there are many.\n" for i in range(200)))
    paths["corpus"] = root / "corpus"
    paths["corpus"].mkdir()
    for i in range(25):
        (paths["corpus"] / f"{i}.txt").write_text(f"Document {i} says {i * i} and so on. " * 4)
    paths["prompts"] = root / "prompts.jsonl"
    paths["prompts"].write_text('{"prompt": "The"}\n{"prompt": "Line"}\n')
    paths["json"] = root / "some.json"
    paths["json"].write_text('{"a": [1, {"b": null}]}')
    paths["empty"] = root / "empty"
    paths["empty"].write_text("")
    paths["bytes"] = root / "bytes"
    paths["bytes"].write_bytes(b"\xff\xfe\x00" * 9)

    # What a user may have in a folder, under names that a run has too.
    user = paths["user"] = root / "user"
    for name in ("start", "tensorboard", "checkpoints", "stages", ".writing-mine"):
        (user / name).mkdir(parents=True)
        (user / name / "notes.txt").write_text("mine")
    for name in ("metrics.jsonl", "record.json", "model.safetensors", "report.html", "config.json", ".hidden"):
        (user / name).write_text("mine")

    recipes = {
        "text": {"name": "text", "data": {"kind": "text", "source": str(paths["corpus"]), "context": 16}},
        "task": {"name": "task", "data": {"kind": "induction", "held_out": 4, "length": 8, "vocab_size": 8}},
    }
    recipes = {name: values | {"model": dict(MODEL)} | QUICK for name, values in recipes.items()}
    arms = {"vanilla": {}, "kv [keys]": {"model": {"mechanisms": {"kv_shift": {}}}}}
    recipes["compare"] = recipes["task"] | {"compare": {"arms": arms, "baseline": "vanilla", "seeds": [0]}}
    stage = {"name": "wider", "grow": {"intermediate_size": 96}, "training": {"steps": 1}}
    recipes["stages"] = recipes["task"] | {"stages": [stage]}
    for name, values in recipes.items():
        paths[name + ".yaml"] = root / f"{name}.yaml"
        paths[name + ".yaml"].write_text(yaml.safe_dump(values, sort_keys=False))

    paths["run"] = root / "run"
    trial = Experiment(name="text", title="", arm="kv [keys]", baseline="kv [keys]")
    recipe = parse(recipes["text"] | {"model": MODEL | {"mechanisms": {"kv_shift": {}}}}, "run")
    train_stages(recipe, paths["run"], experiment=trial)
    paths["reported"] = root / "reported"  # written to by headwater report
    shutil.copytree(paths["run"], paths["reported"])
    tokens = HeadwaterConfig(vocab_size=257, intermediate_size=16, mechanisms=["pattention"], **MODEL)
    paths["tokens"] = root / "tokens"
    write_model(paths["tokens"], HeadwaterForCausalLM(tokens), byte_tokenizer(), [], {})
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=257, intermediate_size=16, num_key_value_heads=2, **MODEL))
    paths["llama"] = root / "llama"
    llama.save_pretrained(paths["llama"])
    byte_tokenizer().save_pretrained(paths["llama"])
    paths["resformer"] = root / "resformer"
    llama.save_pretrained(paths["resformer"])
    (paths["resformer"] / "config.json").write_text(json.dumps({"num_attention_heads": 2}))

    from headwater_lab.data.prepare import Options, prepare
    from headwater_lab.data.stream import TextSource

    paths["prepared"] = root / "prepared"
    prepare(TextSource(str(paths["corpus"])), paths["prepared"], "bytes", Options(0.2, 1000, 10_000))
    return World(paths, recipes)
