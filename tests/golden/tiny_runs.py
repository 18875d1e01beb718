"""One tiny run a data kind, a few other ways to train, and one comparison: figures of the records, and weights."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matching import MACHINE, SAME_MACHINE, bits, machine
from product import byte_tokenizer, compared, figures_of, run_command, train_recipe

MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAINING = {"steps": 4, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 1, "threads": 1, "device": "cpu"}
REPORTING = {"log_every": 1, "evaluate_every": 2, "save_every": None, "tensorboard": False}
WORDS = "river water head key value layer token wing stone light under over first last and the a of"
TURN = "<|{{ message.role }}|>{{ message.content }}\n"
TEMPLATE = "{% for message in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"

SYNTHETIC: dict[str, dict[str, Any]] = {
    "induction": {"kind": "induction", "vocab_size": 12, "length": 16, "held_out": 16},
    "induction periodic": {"kind": "induction", "variant": "periodic", "vocab_size": 12, "length": 16, "held_out": 16},
    "induction scattered": {
        "kind": "induction",
        "variant": "scattered",
        "vocab_size": 32,
        "length": 24,
        "held_out": 16,
    },
    "ngram": {"kind": "ngram", "held_out": 16},
    "hop": {"kind": "hop", "hops": 2, "length": 16, "held_out": 16},
    "recall": {"kind": "recall", "held_out": 16},
    "arithmetic": {"kind": "arithmetic", "operations": 2, "held_out": 16},
    "brevo": {"kind": "brevo", "nodes": 5, "held_out": 16},
    "capo": {"kind": "capo", "people": 20, "held_out": 16},
    "depo": {"kind": "depo", "held_out": 16},
    "lano": {"kind": "lano", "held_out": 16},
    "mano": {"kind": "mano", "held_out": 16},
}
TEXT: dict[str, Any] = {"kind": "text", "source": "text.txt", "context": 32}
ROWS = TEXT | {"source": "rows.jsonl", "text_column": "meta.body"}
CHAT = {"source": "chat.jsonl", "text_column": "messages", "tokenizer": "tokenizer", "context": 64}
LANGUAGE: dict[str, dict[str, Any]] = {
    "text": TEXT,
    "text, jsonl": ROWS,
    "text, jsonl, contiguous": ROWS | {"row_layout": "contiguous"},
    "text, csv": TEXT | {"source": "table.csv", "text_column": "body"},
    "text, chat": TEXT | CHAT,
    "prepared": {"kind": "prepared", "source": "prepared-rows", "context": 32},
    "prepared, mixture": {"kind": "prepared", "source": {"prepared-rows": 0.7, "prepared-other": 0.3}, "context": 32},
}
PICTURES: dict[str, dict[str, Any]] = {
    "images": {"kind": "images", "source": "pictures", "image_size": 8, "workers": 0},
    "digits": {"kind": "digits", "workers": 0},
    "glyphs": {"kind": "glyphs", "image_size": 8, "characters": "AB", "held_out_views": 1, "workers": 0},
}

# Changes of a recipe, by what they try.
PAIRS = {"mechanisms": {"kv_shift": None, "pattention": {"attention_pairs": 16, "ffn_pairs": 32}}}
WAYS: dict[str, dict[str, Any]] = {
    "muon": {"training": {"optimizer": "muon"}},
    "bf16-mixed": {"training": {"precision": "bf16-mixed"}},
    "bf16-true": {"training": {"precision": "bf16-true"}},
    "64-true": {"training": {"precision": "64-true"}},
    "accumulate": {
        "training": {"gradient_accumulation_steps": 2, "z_loss": 1e-3, "schedule": "constant", "ema_decay": 0.9}
    },
    "checkpointing": {"training": {"gradient_checkpointing": True}},
    "loss_chunk_tokens": {"training": {"loss_chunk_tokens": 16}},
    "varlen": {"data": ROWS | {"context": 128}, "training": {"attn_implementation": "varlen"}},
    "matmul": {"training": {"attn_implementation": "matmul", "weight_decay_on": "all", "max_grad_norm": None}},
    "growth": {"model": PAIRS, "stages": [{"name": "more", "grow": {"ffn_pairs": 48}, "training": {"steps": 2}}]},
    "pattention": {"model": PAIRS},
}
# They round to bf16, which magnifies any difference.
ROUGH = ("bf16-mixed", "bf16-true", "muon")


def sentences(count: int, seed: int) -> list[str]:
    """Texts that no library decides."""
    known, texts, state = WORDS.split(), [], seed
    for _ in range(count):
        words = []
        for _ in range(12):
            state = (1103515245 * state + 12345) % 2**31
            words.append(known[(state >> 8) % len(known)])
        texts.append(" ".join(words).capitalize() + ".")
    return texts


@contextlib.contextmanager
def work_folder() -> Iterator[None]:
    """Work in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder, contextlib.chdir(folder):
        yield


def write_texts() -> None:
    """Texts, tables, conversations and prepared folders."""
    texts = sentences(200, 1)
    Path("text.txt").write_text("\n".join(texts))
    rows = [{"id": n, "meta": {"body": text}} for n, text in enumerate(texts)]
    write_lines("rows.jsonl", rows)
    write_lines("other.jsonl", [{"text": text} for text in sentences(100, 2)])
    Path("table.csv").write_text("id,body\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts)))
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    write_lines("chat.jsonl", [{"messages": turns[n : n + 4]} for n in range(0, len(turns), 4)])
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("tokenizer")
    for name, column in {"rows": "meta.body", "other": "text"}.items():
        run_command("data", "prepare", f"{name}.jsonl", "--text-column", column, "--out", f"prepared-{name}")


def write_lines(file: str, rows: list[dict[str, Any]]) -> None:
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pictures() -> None:
    """A folder of images, with a folder a class."""
    from PIL import Image

    for split, count in {"train": 8, "val": 4}.items():
        for label in range(3):
            folder = Path("pictures", split, f"class-{label}")
            folder.mkdir(parents=True)
            for n in range(count):
                pixels = np.arange(12 * 12 * 3).reshape(12, 12, 3) * (label + 2) + 31 * n
                Image.fromarray((pixels % 256).astype(np.uint8)).save(folder / f"{n}.png")


def recipe_of(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    model = MODEL | ({"patch_size": 4} if data["kind"] in PICTURES else {"mechanisms": {"kv_shift": {}}})
    sections: dict[str, Any] = {"data": data, "model": model, "training": TRAINING, "reporting": REPORTING}
    for section, values in changes.items():
        sections[section] = sections[section] | values if section in ("model", "training") else values
    return {"name": "tiny", "seed": 3, **sections}


def trained(recipes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A run of each recipe: its figures, and a hash of its weights."""
    figures, exact = {}, {}
    for number, (name, recipe) in enumerate(recipes.items()):
        run = train_recipe(recipe, f"run-{number}")
        exact[name] = {"weights": bits(run.model().state_dict().values())}
        if name in ROUGH:
            exact[name]["figures"] = figures_of(run.record)
        else:
            figures[name] = figures_of(run.record)
    return {MACHINE: machine(), SAME_MACHINE: exact, "figures": figures}


def data_runs() -> dict[str, Any]:
    """A run of each kind of data but images, and runs that train in other ways."""
    with work_folder():
        write_texts()
        kinds = {name: recipe_of(data) for name, data in (SYNTHETIC | LANGUAGE).items()}
        ways = {name: recipe_of(**{"data": SYNTHETIC["induction"]} | changes) for name, changes in WAYS.items()}
        return trained(kinds | ways)


def picture_runs() -> dict[str, Any]:
    """A run of each kind of images."""
    with work_folder():
        write_pictures()
        return trained({name: recipe_of(data) for name, data in PICTURES.items()})


def comparison() -> dict[str, Any]:
    """A comparison of two arms with two seeds each: what is said of it, and its records."""
    arms = {"vanilla": {"model": {"mechanisms": None}}, "KV shift": {}}
    section = {"baseline": "vanilla", "arms": arms, "seeds": [0, 1], "workers": 1}
    with work_folder():
        return compared(recipe_of(SYNTHETIC["induction"], compare=section), "comparison")
