"""How many claims hold, from pages that were written; imports nothing large, because `--list` reads all pages."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.files import read_bytes
from headwater.terminal import counted

if TYPE_CHECKING:
    from headwater.papers.claims import ClaimVerdict

RESULT = "result.json"
CLASSES = {"holds": "better", "does not hold": "worse", "cannot be told": "soft"}
WORDS: list[tuple[ClaimVerdict, str, str]] = [
    ("holds", "holds", "hold"),
    ("does not hold", "does not hold", "do not hold"),
    ("cannot be told", "cannot be told", "cannot be told"),
]


def tally(claims: Sequence[tuple[ClaimVerdict, str]], where: str = "") -> str:
    """A sentence on how many claims hold, and on how many numbers they rest, if fewer.

    claims: verdict and number (`number_of`) of each.
    """
    total, counts = len(claims), Counter(verdict for verdict, _ in claims)
    if not total:
        return "No claim is judged."
    if total == 1:
        return f"The claim {claims[0][0]}{where}."
    rest = numbers(claims)
    if counts["holds"] == total:
        return f"All {total} claims hold{where}{rest and f', which rest on {rest}'}."
    if counts["cannot be told"] == total:
        return f"None of {total} claims can be told{where}{rest and f', which rest on {rest}'}."
    parts = []
    for verdict, one, more in WORDS:
        if counts[verdict]:
            own = numbers([claim for claim in claims if claim[0] == verdict])
            parts.append(f"{counts[verdict]} {one if counts[verdict] == 1 else more}{own and f' ({own})'}")
    return f"Of {total} claims{where}, {rest and f'which rest on {rest}, '}{', '.join(parts)}."


def numbers(claims: Sequence[tuple[ClaimVerdict, str]]) -> str:
    """The number of numbers that claims rest on; "" if each has its own."""
    found = [number for _, number in claims if number]
    different = len(set(found))
    return counted(different, "number") if different < len(found) else ""


def held(
    page: Path, claims: Sequence[tuple[str, str]], trials: Path, settings: str
) -> list[tuple[ClaimVerdict, str]] | None:
    """Verdict and number of each of a table's claims, from the folder of its page, for `tally`.

    claims: `short` of what each claim says and of the number that it rests on. Numbers of different `trials` differ,
    so several tables can be combined. settings: `costs.settings_of` the table. None if the page does not exist, is
    damaged, or has other claims or settings than these.
    """
    try:
        written = json.loads(read_bytes(page / RESULT))
        if written.get("settings") != settings:
            return None
        found = [(short(one["says"]), one["verdict"]) for one in written["claims"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # any content
        return None
    if [says for says, _ in found] != [says for says, _ in claims] or any(one not in list(CLASSES) for _, one in found):
        return None
    pairs = zip(found, claims, strict=True)
    return [(verdict, f"{trials}: {number}" if number else "") for (_, verdict), (_, number) in pairs]


def short(text: str) -> str:
    """A text's digest, to store in its place; "" for none."""
    return hashlib.sha256(text.encode()).hexdigest()[:8] if text else ""
