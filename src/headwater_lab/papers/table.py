"""A paper's table or figure as data (tables/PAPER/TABLE.yaml): its figures, claims, and recipes at each scale."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from headwater.util.errors import HeadwaterError, nearest
from headwater_lab.util.settings import Settings

TABLES = Path(__file__).parent / "tables"
# How many claims of each table this version's own runs decide, and how; tests/golden/make.py counts them.
VERDICTS = TABLES.with_name("verdicts.json")
ScaleName = Literal["cpu", "gpu", "paper"]
SCALES: tuple[ScaleName, ...] = ("cpu", "gpu", "paper")

# What a column or claim measures. "result" is the recipe's deciding metric, "perplexity" is e^loss, "steps" those to
# the threshold; any other name is one of the held-out metrics (loss, bits_per_byte, accuracy, accuracy/k=3, …), a fact
# about the run (parameters, tokens, flops, tokens_per_second, cache), "census:…" (see `headwater inspect`), "task:NAME"
# or "task:NAME:METRIC" (see `headwater evaluate`). In addition:
# "total_flops" with all earlier stages, "stage_flops" of the last stage only;
# "easier", "harder": the means of the first and the second half of the measures accuracy/…, which go from easy to hard,
# and "hardest": the last of these; "diverged": the number of seeds that diverged, as the table's claim defines it;
# "saved": by the law over sizes, the share of the size that an arm saves at the baseline's loss, 1 - N/N';
# "census:FIELD" or "census:FIELD+FIELD", the sum of fields of `inspection.scalars.Census`;
# "scalar:SYMBOL:FROM-TO": mean of a scalar (`inspection.scalars.Scalars.symbol`) over these layers, ends included;
# "similarity:FROM-TO": mean cosine between a row's tokens, going into these layers (`inspection.watch.Read.hidden`);
# "task:GROUP:mean": mean over the tasks of one of `evaluation.tasks.GROUPS`, perplexities left out.
Measure = str
# "ARM"; "ARM @ SIZE" if a recipe has sizes; and "RECIPE: ARM", with the recipe's name, if several recipes have an arm
# of that name. If a recipe has stages and no arms, its stages are the arms.
ReferenceText = str


class Column(Settings):
    """One column of the paper's table."""

    name: str
    """Its head, as printed."""
    measure: Measure = "result"
    """The measure of our runs."""
    digits: int = 3
    """Digits of ours after the point."""
    times: float = 1.0
    """Factor on our figures: 100 if the paper prints per cent."""


class TableCell(Settings):
    """One cell: the paper's figure, and ours."""

    paper: Annotated[str, BeforeValidator(str)] | None = None
    """As printed, in quotes if it ends in 0; null if the paper has a curve without numbers."""
    arm: ReferenceText | None = None
    """The arm whose measure is shown; null if there is none."""
    minus: ReferenceText | None = None
    """The arm whose measure is subtracted."""
    over: ReferenceText | None = None
    """The increase over this arm, as a share of it."""
    measure: Measure | None = None
    """A measure other than the column's."""


class Row(Settings):
    label: str
    cells: list[TableCell]


class Pair(Settings):
    """A claim about one arm against another, seed by seed, by a measure.

    better: `arm` is better than `against`; in "steps", it reaches the recipe's threshold sooner. alike: they differ by
    at most `margin`. no better: `arm` is not better by more than `margin`, and may be worse.
    """

    test: Literal["better", "alike", "no better"]
    says: str
    arm: ReferenceText
    against: ReferenceText
    measure: Measure = "result"
    than: dict[Literal["arm", "against", "measure"], str] | None = None
    """Makes it a claim about a difference of differences: `arm` and `against`, minus this pair, whose missing fields
    are the claim's."""
    margin: float | None = Field(default=None, gt=0)

    @property
    def pairs(self) -> list[tuple[ReferenceText, ReferenceText, Measure]]:
        """List (arm, against, measure) of the claim, and of its second pair."""
        pairs: list[Any] = [{}, *([] if self.than is None else [self.than])]
        names = ("arm", "against", "measure")
        return [tuple(pair.get(name, getattr(self, name)) for name in names) for pair in pairs]

    @model_validator(mode="after")
    def _check_pair(self) -> Pair:
        if (self.margin is None) != (self.test == "better"):
            raise ValueError("`alike` and `no better` need a `margin`, and `better` has none")
        if self.than is not None and len(set(self.pairs)) == 1:
            raise ValueError("`than` must differ from the claim in arm, against or measure")
        if self.than is not None and "steps" in {measure for *_, measure in self.pairs}:
            raise ValueError("`than` does not work for steps: runs that never get there cannot be compared")
        return self


class Reaches(Settings):
    """Most seeds of `arm` reach the recipe's threshold, or never do."""

    test: Literal["reaches", "never"]
    says: str
    arm: ReferenceText


class Diverges(Settings):
    """Most seeds of `arm` diverge: not finite, or at the end no better than `unlearned`."""

    test: Literal["diverges", "stays"]
    says: str
    arm: ReferenceText
    unlearned: float
    """The deciding metric of a model that has learned nothing."""


class Gains(Settings):
    """A claim by the law fitted over sizes.

    gains: `arm` equals a baseline with more than `more` more of the size. loses: `arm` itself needs more than `more`
    more of it than the baseline that it equals.
    """

    test: Literal["gains", "loses"]
    says: str
    arm: ReferenceText
    size: str
    more: float = 0.0


class Ordered(Settings):
    """`measure` is larger for `first` than for `second` within the same runs of `arm`, seed by seed."""

    test: Literal["larger"]
    says: str
    arm: ReferenceText
    first: Measure
    second: Measure


Claim = Annotated[Pair | Reaches | Diverges | Gains | Ordered, Field(discriminator="test")]


class Scale(Settings):
    """A table's training at one scale: the recipes' arms that its cells and claims name."""

    recipes: list[str] = []
    """Files below recipes/."""
    overrides: list[str] = []
    """dotted.key=value, applied to each recipe."""
    arms: dict[str, ReferenceText | None] = {}
    """The table's name of an arm (in full, with " @ SIZE") -> its name in these recipes, if it differs; null:
    not trained at this scale, so that its cells stay empty and claims about it untested."""
    setting: str = ""
    """How the setting differs from the paper's, in one or two sentences."""
    words: dict[str, str] = {}
    """The paper's name in claims -> its name here: "1.4B" -> "1.33M"."""
    remarks: list[str] = []
    """Remarks on results with these settings, and why a claim may fail there."""
    nothing: str = ""
    """Why the table is meaningless at this scale; then nothing is run."""
    cannot_show: str = ""
    """Why these runs cannot show what the paper claims, whatever the result; shown instead of verdicts, unless
    overrides change the runs."""

    @model_validator(mode="after")
    def _check_recipes(self) -> Scale:
        if bool(self.recipes) == bool(self.nothing):
            raise ValueError("a scale has recipes, or says in `nothing` why it has none")
        if self.nothing and self.cannot_show:
            raise ValueError("`cannot_show` applies to what is run; a scale that runs nothing has `nothing`")
        return self


class PaperTable(Settings):
    """A table as in its file."""

    title: str
    source: str
    """Paper, arXiv number, section, table or figure."""
    says: str
    """What the paper concludes, in a sentence."""
    columns: list[Column] = []
    rows: list[Row] = []
    claims: list[Claim] = []
    computed: Literal["", "tokenformer_costs", "tokenformer_flops", "kv_shifting_dynamics", "kv_shifting_theorems"] = ""
    """For a table without training: the function that computes its rows; then there are no scales."""
    notes: list[str] = []
    """Notes for readers: figures that the paper does not give, our own choices."""
    scales: dict[ScaleName, Scale] = {}

    @model_validator(mode="after")
    def _check_table(self) -> PaperTable:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"row {row.label!r} has {len(row.cells)} cells for {len(self.columns)} columns")
        if bool(self.computed) == bool(self.scales):
            raise ValueError("a table is computed or has scales")
        if self.scales and set(self.scales) != set(SCALES):
            raise ValueError(f"a table has the scales {', '.join(SCALES)}")
        return self


@functools.cache
def read_tables() -> dict[str, PaperTable]:
    """Read all tables, by name, "PAPER/TABLE"."""
    by_name: dict[str, PaperTable] = {}
    for path in sorted(TABLES.rglob("*.yaml")):
        name = path.relative_to(TABLES).with_suffix("").as_posix()
        content: Any = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        try:
            by_name[name] = PaperTable.model_validate(content)
        except ValidationError as error:
            detail = error.errors()[0]
            raise HeadwaterError(f"{name}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}") from error
    return by_name


def find_table(name: str) -> PaperTable:
    """Find the table "PAPER/TABLE". Raises `HeadwaterError` for an unknown name."""
    if name not in read_tables():
        if any(table_name.startswith(f"{name}/") for table_name in read_tables()):
            raise HeadwaterError(f"{name!r} is a paper; name one of its tables: `headwater reproduce --list {name}`.")
        guess = nearest(name, read_tables())
        guess = guess if len(guess) < 80 else "`headwater reproduce --list` lists them."
        raise HeadwaterError(f"There is no table {name!r}; {guess}")
    return read_tables()[name]


def list_measures(table: PaperTable) -> list[Measure]:
    """List the measure of every cell that shows an arm."""
    return [
        cell.measure or column.measure
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
        if cell.arm is not None
    ]


def counts_steps(table: PaperTable) -> bool:
    """Whether the table counts the steps after which runs reach their recipe's threshold."""
    return "steps" in list_measures(table) or any(
        claim.test in ("reaches", "never") or getattr(claim, "measure", "") == "steps" for claim in table.claims
    )


def reads_models(table: PaperTable) -> bool:
    """Whether the table's cells and claims need the models of its runs, and not only their records."""
    return re.search(r'"(?:task|census|scalar|similarity):', table.model_dump_json()) is not None
