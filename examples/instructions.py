"""Measure whether a chat model follows instructions that a program can check, and make texts of its answers to heal on:

    headwater retrofit HuggingFaceTB/SmolLM2-135M-Instruct --out original
    python examples/instructions.py write --out asked.jsonl
    headwater generate original --chat --jsonl asked.jsonl --temperature 0 --max-new-tokens 400 > original.jsonl
    headwater generate smaller --chat --jsonl asked.jsonl --temperature 0 --max-new-tokens 400 > smaller.jsonl
    python examples/instructions.py check original.jsonl smaller.jsonl

The second model is compared with the first, prompt by prompt. An answer of fewer than five words follows nothing.
To make texts:

    python examples/instructions.py write --topics healing --items 2000 --out prompts.jsonl
    headwater generate original --chat --jsonl prompts.jsonl --max-new-tokens 400 > answers.jsonl
    python examples/instructions.py texts answers.jsonl --out texts.jsonl
    headwater convert original --latent-width 192 --heal 1M --text texts.jsonl --out smaller

They are about other topics, and half of them have instructions of the same kinds. The kinds are like those of IFEval
(arXiv 2311.07911).
"""

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    """What is asked for, with {0} and {1} for its values, how these are drawn, and whether an answer has done it."""

    text: str
    draw: Callable[[random.Random], list[Any]]
    is_followed: Callable[..., bool]


WORDS = "river", "early", "simple", "garden", "money", "friend", "careful", "window", "music", "often", "bread", "light"
ENDINGS = "Thank you for reading.", "I hope this helps.", "That is all for now.", "What do you think?"


def find_words(answer: str) -> list[str]:
    return re.findall(r"[a-z]+(?:'[a-z]+)*", answer.lower().replace("’", "'"))


def is_json(answer: str) -> bool:
    try:
        return isinstance(json.loads(re.sub(r"^```(json)?|```$", "", answer.strip(), flags=re.IGNORECASE)), dict)
    except (ValueError, RecursionError):
        return False


INSTRUCTIONS = {
    "lowercase": Instruction(
        "Write your whole answer in lowercase letters, without any capital letter.",
        lambda draw: [],
        str.islower,
    ),
    "capitals": Instruction("Write your whole answer in capital letters.", lambda draw: [], str.isupper),
    "bullets": Instruction(
        "Answer with exactly {0} bullet points, each on a line of its own that begins with '* '.",
        lambda draw: [draw.randint(2, 5)],
        lambda answer, count: len(re.findall(r"^\* ", answer, re.MULTILINE)) == count,
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
        lambda answer: re.fullmatch(r'["“][^"“”]+["”]', answer.strip()) is not None,
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
    """Write different prompts, with their instructions."""
    draw = random.Random(f"{options.topics}:{options.seed}")
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(20 * options.items):
        name = [*INSTRUCTIONS][len(rows) % len(INSTRUCTIONS)]
        prompt = draw.choice(REQUESTS).format(draw.choice(TOPICS[options.topics].split(", ")))
        row: dict[str, Any] = {}
        if options.topics == "testing" or draw.random() < 0.5:
            row = {"instruction": name, "values": INSTRUCTIONS[name].draw(draw)}
            prompt += " " + INSTRUCTIONS[name].text.format(*row["values"])
        rows[prompt] = {"prompt": prompt} | row
        if len(rows) == options.items:
            return write_rows(options.out, rows.values())
    sys.exit(f"There are not {options.items:,} different prompts; pass fewer --items.")


def write_texts(options: argparse.Namespace) -> None:
    """Write each request with its answer as a conversation, unless the answer was cut off."""
    rows = [row for row in read_answers(options.answers) if row.get("finish_reason") != "length"]
    pairs = [(("user", row["prompt"]), ("assistant", row["completion"])) for row in rows]
    write_rows(options.out, ({"messages": [{"role": r, "content": c} for r, c in pair]} for pair in pairs))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    if path.exists():
        sys.exit(f"{path} exists; choose another --out.")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_answers(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        sys.exit(f"There is no file {path}.")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except ValueError as error:
        sys.exit(f"{path} is not JSON Lines: {error}.")
    if not all(isinstance(row, dict) and {"prompt", "completion"} <= row.keys() for row in rows):
        sys.exit(f"{path} is not what headwater generate --jsonl prints for the prompts of write.")
    return rows


def check_answers(options: argparse.Namespace) -> None:
    """Print how many instructions each file's answers follow, with standard errors."""
    files = {path: read_answers(path) for path in options.answers}
    first = files[options.answers[0]]
    if any([row["prompt"] for row in rows] != [row["prompt"] for row in first] for rows in files.values()):
        sys.exit("The files answer different prompts; generate them from the same ones.")
    if len(first) < 2 or not all("instruction" in row for row in first):
        sys.exit(f"{options.answers[0]} needs at least two prompts of --topics testing, with an instruction each.")
    scores = {path: [float(is_followed(row)) for row in rows] for path, rows in files.items()}
    for path, followed in scores.items():
        line = f"{path}: {show_mean(followed)} % of {len(followed)} instructions"
        if path != options.answers[0]:
            pairs = zip(followed, scores[options.answers[0]], strict=True)
            line += f", minus the first {show_mean([new - old for new, old in pairs])}"
        cut = sum(row.get("finish_reason") == "length" for row in files[path])
        print(line + (f"; {cut} answers were cut off" if cut else ""))
    names = [row["instruction"] for row in first]
    for name in dict.fromkeys(names):
        shares = [fmean(s for s, of in zip(followed, names, strict=True) if of == name) for followed in scores.values()]
        print(f"  {name:10}", *(f"{100 * share:5.0f}" for share in shares))


def is_followed(row: dict[str, Any]) -> bool:
    """Whether an answer of five words or more follows its instruction."""
    answer = row["completion"]
    return len(find_words(answer)) >= 5 and INSTRUCTIONS[row["instruction"]].is_followed(answer, *row["values"])


def show_mean(values: list[float]) -> str:
    return f"{100 * fmean(values):.1f} ± {100 * stdev(values) / math.sqrt(len(values)):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    write = commands.add_parser("write", help=write_prompts.__doc__)
    write.add_argument("--topics", choices=[*TOPICS], default="testing")
    write.add_argument("--items", type=int, default=240)
    write.add_argument("--seed", type=int, default=0)
    write.set_defaults(run=write_prompts)
    texts = commands.add_parser("texts", help=write_texts.__doc__)
    texts.add_argument("answers", type=Path)
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
