"""Results in pages of the documentation, written by `headwater reproduce --write PAGE` between two comments:

    <!-- claims: PAPER/TABLE … -->        a row for each claim of these tables; those without results are open
    <!-- statements: PAPER/TABLE … -->    a row for each claim about which others have said something in public
    <!-- prices: NAME -->                 what the arms of this comparison cost, NAME or NAME/SIZE
    <!-- end -->

Results are those in the folder of `headwater reproduce`. A table without results there keeps its rows on the page, if
it has any, and an arm its prices, so that a page can be renewed table by table.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headwater.compare.prices import PRICES, Told, slug, stored
from headwater.errors import HeadwaterError, shown
from headwater.files import absence
from headwater.outputs import check_replaceable, write_document
from headwater.papers import costs
from headwater.papers.pages import CLASSES, RESULT, short, tally
from headwater.papers.result import here
from headwater.papers.table import Pair, ScaleName, table
from headwater.reading import reading
from headwater.terminal import counted, duration

if TYPE_CHECKING:
    from headwater.papers.claims import ClaimVerdict

REGION = re.compile(r"(<!-- (claims|statements|prices): ([^>]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
OPEN = "open"


class ClaimRow(NamedTuple):
    """A claim on a page: what it says, the verdict ("open" if there is none), from how many seeds, and by what."""

    says: str
    verdict: str
    seeds: str
    by: str


def write(page: Path, folder: Path, scale: ScaleName, tell: Told = lambda line: None) -> None:
    """Renew the results on a page. Raises `HeadwaterError` for a page without a place for any.

    tell: called with a line for each table whose result is not of its runs and claims as they are now.
    """
    check_replaceable(page)
    if not page.is_file():
        raise HeadwaterError(f"{absence(page, 'file')}; name a page, such as docs/ledger.md.")
    with reading(repr(str(page)), "use a UTF-8 text file"):
        text = page.read_text(encoding="utf-8")
    if not REGION.search(text):
        raise HeadwaterError(f"{str(page)!r} has no place for results: a line {shown('<!-- claims: PAPER/TABLE -->')}.")
    write_document(page, renewed(text, folder, scale, functools.cache(tell)))


def renewed(text: str, folder: Path, scale: ScaleName, tell: Told = lambda line: None) -> str:
    """A page's text with the results in `folder`."""
    there = written(text)

    def region(match: re.Match[str]) -> str:
        begins, kind, names, before, ends = match.groups()
        if kind == "prices":
            name, trials = names.strip(), folder / scale / "trials"
            if (trials / name / PRICES).is_file():
                return begins + _prices(trials, name, before) + ends
            return begins + (before or f"\n`{name}`: not measured yet.\n\n") + ends
        rows = {name: rows_of(name, folder, scale, there.get(name, []), tell) for name in names.split()}
        nothing = all(row.verdict == OPEN for found in rows.values() for row in found)
        if kind == "statements" and before and nothing and not there.keys() & rows.keys():
            return match[0]  # a page without claims of these tables has no other place for their rows
        return begins + (_claims(rows, scale) if kind == "claims" else _statements(rows)) + ends

    return REGION.sub(region, text)


def written(text: str) -> dict[str, list[ClaimRow]]:
    """The rows of claims on a page, by table."""
    found: dict[str, list[ClaimRow]] = {}
    name = ""
    for match in REGION.finditer(text):
        for line in match[4].splitlines() if match[2] == "claims" else ():
            parts = [part.strip() for part in re.split(r"(?<!\\)\|", line.strip("|"))]
            name = parts[0].strip("`") or name
            if len(parts) == 5 and parts[2] in [*CLASSES, OPEN]:
                found.setdefault(name, []).append(ClaimRow(*parts[1:]))
    return found


def rows_of(
    name: str, folder: Path, scale: ScaleName, before: list[ClaimRow], tell: Told = lambda line: None
) -> list[ClaimRow]:
    """The rows of a table's claims: from its result, else those that the page has, else open ones.

    tell: called with a line if its runs or claims have changed since the result, and its claims are open again.
    """
    of = table(name)
    file = folder / scale / slug(name) / RESULT
    says = [here(claim.says, of.scales[scale].words) for claim in of.claims]
    if file.is_file():
        try:
            result = json.loads(file.read_bytes())
            known = {
                c["says"]: ClaimRow(c["says"], c["verdict"], str(int(c["seeds"])), c["evidence"].replace("|", "\\|"))
                for c in result["claims"]
            }
            if unknown := {row.verdict for row in known.values()}.difference(CLASSES):
                raise ValueError(f"no verdict: {unknown}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # any content
            raise HeadwaterError(
                f"{str(file)!r} is damaged; run `headwater reproduce {name}` again, which trains nothing anew."
            ) from error
        if result.get("settings") != costs.current(name, scale):
            tell(f"{name}: left open: its runs, claims or headwater have changed since it was judged; run it again.")
            known = {}
    else:
        known = {row.says: row for row in before if row.verdict != OPEN}
    return [known.get(one, ClaimRow(one, OPEN, "", "")) for one in says]


def tallied(rows: dict[str, list[ClaimRow]], scale: ScaleName) -> str:
    """A sentence on how many claims of these tables hold, and how many are open."""
    judged: list[tuple[ClaimVerdict, str]] = []
    for name, found in rows.items():
        known = costs.known(name, scale)
        numbers = dict(known.claims) if known is not None else {}
        told = [row for row in found if row.verdict != OPEN]
        judged += [(row.verdict, numbers.get(short(row.says), "")) for row in told]  # type: ignore[misc]
    tables = sum(any(row.verdict != OPEN for row in found) for found in rows.values())
    missing = sum(row.verdict == OPEN for found in rows.values() for row in found)
    says = tally(judged, f" in {counted(tables, 'table')}") if judged else "No claim is judged yet."
    return says + (f" {missing} {'claim is' if missing == 1 else 'claims are'} open." if missing else "")


def _claims(rows: dict[str, list[ClaimRow]], scale: ScaleName) -> str:
    """A table of claims under a sentence on how many hold."""
    lines = ["| table | claim | | seeds | by |", "| --- | --- | --- | ---: | --- |"]
    for name, found in rows.items():
        known = costs.known(name, scale)
        price = "" if known is None else f"{duration(known.hours)} on {hardware(scale)}: `{command(name, scale)}`"
        first = next((row for row in found if row.verdict == OPEN), None)
        for place, row in enumerate(found):
            by = price if row is first else row.by
            lines.append(f"| {f'`{name}`' if place == 0 else ''} | {row.says} | {row.verdict} | {row.seeds} | {by} |")
    return f"\n{tallied(rows, scale)}\n\n" + "\n".join(lines) + "\n\n"


def hardware(scale: ScaleName) -> str:
    """What the times of a scale are for."""
    return "two cores" if scale == "cpu" else "one H100"


def command(name: str, scale: ScaleName) -> str:
    """The command that trains and judges a table."""
    return f"headwater reproduce {name}" + ("" if scale == "cpu" else f" --scale {scale}")


def _statements(rows: dict[str, list[ClaimRow]]) -> str:
    """A table of what others have said beside what was found."""
    lines = ["| claim | said | we find | table |", "| --- | --- | --- | --- |"]
    for name, found in rows.items():
        for claim, row in zip(table(name).claims, found, strict=True):
            if isinstance(claim, Pair) and claim.said:
                finds = row.verdict if row.verdict == OPEN else f"{row.verdict}: {row.by}"
                lines.append(f"| {row.says} | {' '.join(claim.said)} | {finds} | `{name}` |")
    return "\n" + "\n".join(lines) + "\n\n"


def _prices(trials: Path, name: str, before: str) -> str:
    """A table of what arms cost; `name` is that of the comparison, with its size if there are several.

    Arms of the page that have no price there keep their rows, if they were measured on the same kind of machine, and
    against the same baseline.
    """
    from headwater.report import prices_by_arm

    found = stored(trials / name)
    assert found is not None
    names, by_arm = prices_by_arm(found)
    where = f"`{name}` on {found.device_name}, PyTorch {found.torch}:"
    head = f"| arm | {' | '.join(names)} |"
    rows = {arm: f"| {arm} | {' | '.join(row)} |" for arm, row in by_arm.items()}
    old = before.strip().splitlines()
    if where in old and head in old and any("| ×1 |" in row and row in old for row in rows.values()):
        kept = {line.split(" | ")[0].removeprefix("| "): line for line in old[old.index(head) + 2 :]}
        rows = kept | rows
    return "\n" + "\n".join([where, "", head, "| --- |" + " ---: |" * len(names), *rows.values()]) + "\n\n"
