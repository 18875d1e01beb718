"""One page of all tables of a paper, or of the ledger: every claim, what arms cost, and the comparisons behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwater.compare.prices import Told
from headwater.errors import HeadwaterError
from headwater.papers import costs
from headwater.papers.document import OPEN, ClaimRow, command, hardware, rows_of, tallied
from headwater.papers.pages import CLASSES
from headwater.papers.result import compared
from headwater.papers.table import ScaleName, table
from headwater.papers.work import prepare
from headwater.report.page import Head, PageCell, PageTable, write_report
from headwater.terminal import duration


def write(page: Path, names: Sequence[str], folder: Path, scale: ScaleName, tell: Told = lambda line: None) -> None:
    """Write the page of these tables from their results in `folder`, that of `headwater reproduce`.

    Claims of tables without a result are open. tell: as in `rows_of`. Raises `HeadwaterError` if none has a result.
    """
    trained = [name for name in names if not table(name).computed and not table(name).scales[scale].nothing]
    found = {name: rows_of(name, folder, scale, [], tell) for name in trained}
    judged = {name: any(row.verdict != OPEN for row in rows) for name, rows in found.items()}
    if not trained:
        raise HeadwaterError(f"None of these tables is trained at {scale} scale; name others, or another --scale.")
    if not any(judged.values()):
        raise HeadwaterError(
            f"None of these tables has a result in {str(folder / scale)!r}; run `headwater reproduce {trained[0]}` "
            f"first."
        )
    rows = {name: found[name] for name in sorted(trained, key=judged.__getitem__, reverse=True)}
    trials = folder / scale / "trials"  # runs with overrides have a folder of their own
    works = [prepare(name, scale, folder) for name in trained if judged[name]]
    comparisons = sorted({name for work in works if work.trials == trials for name in compared(work)})
    elsewhere = [work.name for work in works if work.trials != trials]
    write_report(trials, head=_head(rows, scale, elsewhere), only=comparisons, target=page)


def _head(rows: dict[str, list[ClaimRow]], scale: ScaleName, elsewhere: Sequence[str]) -> Head:
    titles = list(dict.fromkeys(table(name).source for name in rows))
    paragraphs = [
        tallied(rows, scale),
        "The claims of a table are judged together, at 5 %. Below: the complete comparisons behind them, with what "
        "each arm costs where that was measured. They include all arms and seeds trained so far, and test each arm "
        "against one baseline, with their own corrections, which are for seeds that were fixed before: where "
        "--until-decided has added some, the claims are what holds.",
    ]
    if elsewhere:
        paragraphs.append(f"The comparisons of {', '.join(elsewhere)} are on their own pages, beside these runs.")
    one_paper = len({name.partition("/")[0] for name in rows}) == 1  # then names are told without it
    claims: list[Sequence[PageCell]] = []
    for name, found in rows.items():
        for row in found:
            verdict: PageCell = row.verdict if row.verdict == OPEN else (row.verdict, CLASSES[row.verdict])
            where = name.partition("/")[2] if one_paper else name
            claims.append([where, row.says, verdict, row.seeds, row.by.replace("\\|", "|")])
    made: list[Sequence[PageCell]] = []
    for name in rows:
        of, cost = table(name), costs.known(name, scale)
        time = "" if cost is None else duration(cost.hours)
        made.append([name, of.title, of.scales[scale].setting, time, command(name, scale)])
    return Head(
        "; ".join(titles),
        paragraphs,
        [
            PageTable("Every claim.", ["table", "claim", "holds?", "seeds", "by"], claims, text=True),
            PageTable(
                f"The tables. Time: estimated, for all of a table's runs, on {hardware(scale)}.",
                ["table", "title", "setting", "time", "command"],
                made,
                text=True,
            ),
        ],
    )
