"""Write tasks that ask for a number hidden in a long text, for `headwater evaluate --task-files`:

    python examples/needle.py texts/book.txt runs/llama --tokens 2048 4096 --out needle
    headwater evaluate runs/llama runs/smaller --task-files needle --context 8192

Each item is a stretch of the text with one sentence per city, "The secret number of Lima is 48213.", at random places,
and asks for one of them, in turn near the beginning, in the middle or near the end. An answer is correct if
greedy decoding gives the number. Smaller caches tend to fail here first.
"""

import argparse
import json
import random
from pathlib import Path

from transformers import AutoTokenizer

CITIES = "Lima", "Oslo", "Cairo", "Hanoi", "Quito", "Dakar", "Perth", "Turin"
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {name}.jsonl
test_split: train
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
doc_to_target: "{{{{target}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
metadata:
  version: 1.0
"""


HIDDEN = "The secret number of {0} is"
QUESTION = "\n\nQuestion: What is the secret number of {0}?\nAnswer: " + HIDDEN


def hide_numbers(sentences: list[str], depth: float, sought: int, draw: random.Random, cities: int) -> dict[str, str]:
    """Hide a number for each of some cities between the sentences, the one that is `sought` at `depth` from 0 to 1."""
    names = draw.sample(CITIES, cities)
    numbers = [str(draw.randrange(10_000, 100_000)) for _ in names]
    places = [draw.randrange(len(sentences)) for _ in names]
    places[sought] = round(depth * (len(sentences) - 1))
    hidden = [*sentences]
    for place, name, number in sorted(zip(places, names, numbers, strict=True), reverse=True):
        hidden.insert(place, f"{HIDDEN.format(name)} {number}.")
    return {"text": " ".join(hidden) + QUESTION.format(names[sought]), "target": f" {numbers[sought]}"}


def write_task(folder: Path, name: str, items: list[dict[str, str]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    (folder / f"{name}.yaml").write_text(TASK.format(name=name), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file that the models have not been trained on")
    parser.add_argument("tokenizer", help="a model whose tokens are counted: a folder or a name on the hub")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="length of an item, one task for each")
    parser.add_argument("--items", type=int, default=24, help="items of a task")
    parser.add_argument("--cities", type=int, default=4, choices=range(1, len(CITIES) + 1), help="hidden numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("needle"), help="the new folder")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    longest = max(CITIES, key=len)
    added = f" {HIDDEN.format(longest)} 12345." * options.cities + QUESTION.format(longest) + " 12345"
    room = len(tokenizer(added).input_ids) + 2
    if len(ids) < max(options.tokens):
        parser.error(f"{options.text} has {len(ids):,} tokens; give a text of {max(options.tokens):,} or more.")
    if min(options.tokens) < 2 * room:
        parser.error(f"--tokens must be {2 * room} or more.")
    if options.out.exists():
        parser.error(f"{options.out} exists; choose another --out.")
    options.out.mkdir(parents=True)
    for length in options.tokens:
        draw, items = random.Random(f"{options.seed}:{length}"), []
        for item in range(options.items):
            start = draw.randrange(len(ids) - length + 1)
            sentences = tokenizer.decode(ids[start : start + length - room]).split(". ")
            if len(sentences) < 10:
                parser.error(f"{options.text} needs sentences that end with a period and a space.")
            depth = item % 3 / 2
            items.append(hide_numbers([f"{s}." for s in sentences], depth, item % options.cities, draw, options.cities))
        write_task(options.out, f"needle_{length}", items)


if __name__ == "__main__":
    main()
