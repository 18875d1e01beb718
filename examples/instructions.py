"""Measure whether a model follows instructions that a program can check, and write its answers as texts to heal on:

    python examples/instructions.py write smollm2 --out asked.jsonl
    headwater generate smollm2 --jsonl asked.jsonl --temperature 0 --stop '<|im_end|>' > original.jsonl
    headwater generate smaller --jsonl asked.jsonl --temperature 0 --stop '<|im_end|>' > smaller.jsonl
    python examples/instructions.py check original.jsonl smaller.jsonl

The second file is compared with the first, prompt by prompt. With `--topics healing`, `write` asks about other topics,
half of the time without an instruction; `texts` makes texts of the answers, for `headwater convert --text`.
The instructions are of the kind of IFEval (arXiv 2311.07911).
"""

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from transformers import AutoTokenizer


class Instruction(NamedTuple):
    """What is asked for, with {0} and {1} for its values, how these are drawn, and whether an answer has done it."""

    text: str
    draw: Callable[[random.Random], list[Any]]
    is_followed: Callable[..., bool]


WORDS = "river", "early", "simple", "garden", "money", "friend", "careful", "window", "music", "often", "bread", "light"
ENDINGS = "Thank you for reading.", "I hope this helps.", "That is all for now.", "What do you think?"


def find_words(answer: str) -> list[str]:
    return re.findall(r"[a-z']+", answer.lower())


def is_json(answer: str) -> bool:
    try:
        return isinstance(json.loads(answer.strip().removeprefix("```json").strip("`\n ")), dict)
    except ValueError:
        return False


INSTRUCTIONS = {
    "lowercase": Instruction(
        "Write your whole answer in lowercase letters, without any capital letter.",
        lambda draw: [],
        lambda answer: answer == answer.lower(),
    ),
    "capitals": Instruction(
        "Write your whole answer in capital letters.", lambda draw: [], lambda answer: answer == answer.upper()
    ),
    "bullets": Instruction(
        "Answer with exactly {0} bullet points, each on a line of its own that begins with '* '.",
        lambda draw: [draw.randint(2, 5)],
        lambda answer, count: len(re.findall(r"^\s*\* ", answer, re.MULTILINE)) == count,
    ),
    "words": Instruction(
        "Use the words '{0}' and '{1}' in your answer.",
        lambda draw: draw.sample(WORDS, 2),
        lambda answer, *words: {*words} <= {*find_words(answer)},
    ),
    "without": Instruction(
        "Do not use the word '{0}' in your answer.",
        lambda draw: [draw.choice(["the", "and", "is", "of"])],
        lambda answer, word: word not in find_words(answer),
    ),
    "commas": Instruction("Do not use any comma in your answer.", lambda draw: [], lambda answer: "," not in answer),
    "ending": Instruction(
        "End your answer with this exact sentence: {0}",
        lambda draw: [draw.choice(ENDINGS)],
        lambda answer, ending: answer.strip().endswith(ending),
    ),
    "quotes": Instruction(
        "Put your whole answer in double quotation marks.",
        lambda draw: [],
        lambda answer: len(answer.strip()) > 2 and answer.strip()[0] + answer.strip()[-1] == '""',
    ),
    "shorter": Instruction(
        "Answer in fewer than {0} words.",
        lambda draw: [draw.choice([15, 25, 40])],
        lambda answer, most: len(find_words(answer)) < most,
    ),
    "longer": Instruction(
        "Answer in at least {0} words.",
        lambda draw: [draw.choice([50, 70, 90])],
        lambda answer, least: len(find_words(answer)) >= least,
    ),
    "postscript": Instruction(
        "At the end of your answer, add a postscript that begins with P.S.",
        lambda draw: [],
        lambda answer: "P.S." in answer[len(answer) // 3 :],
    ),
    "json": Instruction("Write your whole answer as one JSON object.", lambda draw: [], is_json),
}
REQUESTS = (
    "Describe {}.",
    "Write a short story about {}.",
    "Explain {} to a child.",
    "Give some advice about {}.",
    "Write a short letter to a friend about {}.",
    "What should everyone know about {}?",
)
TOPICS = {
    "testing": "a rainy day, the moon, learning to swim, a lost dog, old bridges, making tea, winter, a busy market, "
    "honesty, the color blue, a train journey, growing tomatoes, sleep, a mountain village, paper, small birds, "
    "painting a wall, a birthday party, maps, the sea at night, patience, a broken clock, soup, neighbors",
    "healing": "a quiet library, volcanoes, riding a bicycle, a clever cat, castles, baking bread, spring, an airport, "
    "courage, the color green, a long walk, apple trees, dreams, a fishing village, glass, bees, repairing a chair, "
    "a wedding, letters, the desert, kindness, an old coat, cheese, teachers, rivers, snow, a school play, the stars, "
    "saving money, a violin, horses, a storm, cooking rice, lighthouses, friendship, trains, the heart, shoes, chess, "
    "the news, a picnic, forests, languages, dancing, a hospital, ice, ants, memory, music",
}


def write_prompts(options: argparse.Namespace) -> None:
    """Write prompts in the model's chat format, each with its instruction and values."""
    tokenizer, draw = AutoTokenizer.from_pretrained(options.model), random.Random(f"{options.topics}:{options.seed}")
    topics = TOPICS[options.topics].split(", ")
    with options.out.open("x", encoding="utf-8") as file:
        for number in range(options.items):
            row, content = {}, draw.choice(REQUESTS).format(draw.choice(topics))
            if options.topics == "testing" or draw.random() < 0.5:
                name = [*INSTRUCTIONS][number % len(INSTRUCTIONS)]
                values = INSTRUCTIONS[name].draw(draw)
                row, content = (
                    {"instruction": name, "values": values},
                    f"{content} {INSTRUCTIONS[name].text.format(*values)}",
                )
            chat = [{"role": "user", "content": content}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            file.write(json.dumps({"prompt": prompt} | row) + "\n")


def write_texts(options: argparse.Namespace) -> None:
    """Write each prompt with its answer as a text."""
    with options.out.open("x", encoding="utf-8") as file:
        for row in read_rows(options.answers):
            file.write(json.dumps({"text": row["prompt"] + row["completion"] + options.end}) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_answers(options: argparse.Namespace) -> None:
    """Print how many instructions each file's answers follow, with standard errors."""
    files = {path: read_rows(path) for path in options.answers}
    prompts = [[row["prompt"] for row in rows] for rows in files.values()]
    if any(others != prompts[0] for others in prompts):
        sys.exit("The files answer different prompts; generate them from the same one.")
    scores = {path: [float(check_answer(row)) for row in rows] for path, rows in files.items()}
    first = next(iter(scores.values()))
    for path, followed in scores.items():
        line = f"{path}: {show_mean(followed)} % of {len(followed)} instructions"
        if followed is not first:
            line += f", minus the first {show_mean([a - b for a, b in zip(followed, first, strict=True)])}"
        print(line)
    names = [row["instruction"] for row in next(iter(files.values()))]
    for name in INSTRUCTIONS:
        shares = [fmean(s for s, of in zip(followed, names, strict=True) if of == name) for followed in scores.values()]
        print(f"  {name:10}", *(f"{100 * share:5.0f}" for share in shares))


def check_answer(row: dict[str, Any]) -> bool:
    """Whether an answer follows its instruction; an empty one never does."""
    answer = row["completion"]
    return bool(answer.strip()) and INSTRUCTIONS[row["instruction"]].is_followed(answer, *row["values"])


def show_mean(values: list[float]) -> str:
    return f"{100 * fmean(values):.1f} ± {100 * stdev(values) / math.sqrt(len(values)):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    write = commands.add_parser("write", help=write_prompts.__doc__)
    write.add_argument("model", help="a model with a chat template: a folder or a name on the hub")
    write.add_argument("--topics", choices=[*TOPICS], default="testing")
    write.add_argument("--items", type=int, default=240)
    write.add_argument("--seed", type=int, default=0)
    write.set_defaults(run=write_prompts)
    texts = commands.add_parser("texts", help=write_texts.__doc__)
    texts.add_argument("answers", type=Path)
    texts.add_argument("--end", default="<|im_end|>\n", help="what ends an answer in the chat format")
    texts.set_defaults(run=write_texts)
    for command in (write, texts):
        command.add_argument("--out", type=Path, required=True, help="the new JSONL file")
    check = commands.add_parser("check", help=check_answers.__doc__)
    check.add_argument("answers", type=Path, nargs="+", help="files that headwater generate --jsonl printed")
    check.set_defaults(run=check_answers)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
