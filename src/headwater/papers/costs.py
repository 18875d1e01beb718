"""What each table trains at each scale and what that costs, precomputed: `--list` shows all, and each takes seconds.

`costs.json` has it, with a digest of the files that determine it. If these have changed, it is computed again; a test
checks that the code still finds the same. `python -m headwater.papers.costs` rewrites the file.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.papers.pages import held, short
from headwater.papers.table import SCALES, Gains, ScaleName, file_of, table, tables
from headwater.shipped import recipes_folder

if TYPE_CHECKING:
    from headwater.papers.claims import ClaimVerdict
    from headwater.papers.work import Work

RECORD = "record.json"  # as in `headwater.records`, which imports PyTorch
FILE = Path(__file__).with_name("costs.json")


@dataclass(frozen=True)
class TableCost:
    """What `--list` says of a table at a scale.

    of: digest of its files. hours: of all its runs, on the hardware of its scale. trials, page: folders below that of
    the scale. runs: folder below `trials` -> the beginning of the digest of its settings, "" if a tuned learning rate
    decides it. claims: `short` of what each says and of the number that it rests on. settings: `settings_of`.
    """

    of: str
    hours: float
    trials: str
    page: str
    runs: dict[str, str]
    claims: list[list[str]]
    settings: str

    def existing(self, folder: Path) -> int | None:
        """How many of its runs exist below the folder of the scale; None if only the recipes can tell."""
        if not (folder / self.trials).is_dir():
            return 0
        there = 0
        for name, settings in self.runs.items():
            if not (file := folder / self.trials / name / RECORD).is_file():
                continue
            if not settings:
                return None
            try:
                record = json.loads(file.read_bytes())
                ended = record["status"] in ("finished", "diverged")
                there += ended and record["config_hash"].startswith(settings)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # any content
                continue
        return there

    def verdicts(self, folder: Path) -> list[tuple[ClaimVerdict, str]] | None:
        """What its page below the folder of the scale found; None if there is no such page, or it is out of date."""
        claims = [(says, number) for says, number in self.claims]
        return held(folder / self.page, claims, folder / self.trials, self.settings)


def known(name: str, scale: ScaleName) -> TableCost | None:
    """The cost of a table at a scale; None if it is not known for the current files."""
    found = _read().get(f"{name} {scale}")
    return found if found is not None and found.of == _digest(name, scale) else None


def worked_out(work: Work) -> TableCost:
    """The same, computed from the recipes and the plans of the models."""
    from headwater.papers.claims import number_of
    from headwater.papers.price import price
    from headwater.papers.result import wordings

    runs = {}
    for place in work.trained:
        tuned = place.recipe.compare is not None and place.recipe.compare.learning_rates
        for seed in place.seeds:
            recipe, folder = place.run(seed, work.trials)
            runs[folder.relative_to(work.trials).as_posix()] = "" if tuned else recipe.digest()[:8]
    claims = zip(wordings(work), work.table.claims, strict=False)
    return TableCost(
        of=_digest(work.name, work.scale),
        hours=price(work.trained, work.scale).hours,
        trials=work.trials.name,
        page=work.folder.name,
        runs=runs,
        claims=[[short(text), short(number_of(claim, work.places))] for text, claim in claims],
        settings=settings_of(work),
    )


def settings_of(work: Work) -> str:
    """A digest of what a table's verdicts depend on, but for the seeds: its claims, and the settings of their runs."""
    from headwater.papers.places import SizedArm, named, of_law
    from headwater.papers.work import in_numbers

    known: dict[str, list[Any]] = {}  # claims share arms

    def settings(place: SizedArm) -> list[Any]:
        if place.name not in known:
            section = place.recipe.compare
            recipe, folder = place.run(place.seeds[0], Path())
            aside = () if section is None else (section.learning_rates, section.tuning_seeds, section.threshold)
            known[place.name] = [folder.as_posix(), recipe.digest(), *aside]
        return known[place.name]

    claims = []
    for claim in work.table.claims:
        places = [place for name in named(claim) if (place := work.places[name]) is not None]
        runs = [one for place in places for one in of_law(place)] if isinstance(claim, Gains) else places
        claims.append([in_numbers(claim), *map(settings, runs)])
    return short(json.dumps(claims))


def current(name: str, scale: ScaleName) -> str:
    """`settings_of` a table as its files are now."""
    from headwater.papers.work import prepare

    there = known(name, scale)
    return settings_of(prepare(name, scale, Path())) if there is None else there.settings


def trained() -> list[tuple[str, ScaleName]]:
    """Every table with every scale that it trains at."""
    return [
        (name, scale)
        for name, of in tables().items()
        for scale in SCALES
        if not of.computed and not of.scales[scale].nothing
    ]


def all_worked_out() -> dict[str, TableCost]:
    """The costs of `trained`, by "PAPER/TABLE SCALE"."""
    from headwater.papers.work import prepare

    return {f"{name} {scale}": worked_out(prepare(name, scale, Path())) for name, scale in trained()}


@functools.cache
def _read() -> dict[str, TableCost]:
    return {name: TableCost(**one) for name, one in json.loads(FILE.read_text()).items()}


def _digest(name: str, scale: ScaleName) -> str:
    folder = recipes_folder()
    files = [file_of(name), *(folder / recipe for recipe in table(name).scales[scale].recipes)]
    return hashlib.sha256(b"\0".join(map(Path.read_bytes, files))).hexdigest()[:16]


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(one))}" for name, one in all_worked_out().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
