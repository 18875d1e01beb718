"""What a schedule of growth costs: parameters, tokens and FLOPs of each stage, and of all up to there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.cost.estimate import check, si
from headwater.cost.hardware import Hardware
from headwater.util.terminal import Table, lined


class StagePrice(NamedTuple):
    """One stage of a schedule, or all of one that has no others.

    schedule: the arm or recipe. tokens: or images. flops: of training; total_flops: with those of all stages before and
    of the checkpoint that the first began with. days: of all up to there, at `mfu` of the peak; None without hardware.
    """

    schedule: str
    stage: str
    shape: dict[str, int]
    parameters: int
    steps: int
    tokens: int
    flops: float
    total_flops: float
    days: float | None

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


class ToTrain(NamedTuple):
    """A stage before it is priced.

    length: tokens per row; for images, None. before: FLOPs of the checkpoint that it begins with. teacher: the model
    that it learns from besides, whose forward passes count too. devices: that train it at a time.
    """

    schedule: str
    stage: str
    config: HeadwaterConfig
    steps: int
    rows: int
    length: int | None
    before: float = 0.0
    precision: str = "bf16-mixed"
    devices: int = 1
    teacher: HeadwaterConfig | None = None


def price_schedule(
    stages: Sequence[ToTrain],
    hardware: Hardware | None = None,
    precision: str | None = None,
    mfu: float = 0.4,
    devices: int | None = None,
) -> list[StagePrice]:
    """Prices of the stages of one or several schedules, each schedule's one after the other.

    precision, devices: of all stages; None for each stage's own. What was spent on the checkpoint that a schedule
    begins with is timed as if it were trained like the first stage. Raises `HeadwaterError` for a precision, share of
    the peak or number of devices that there is not.
    """
    for one in stages:
        check(precision or one.precision, mfu, [("devices", one.devices if devices is None else devices)], {})
    prices: list[StagePrice] = []
    total = seconds = 0.0
    for one in stages:
        first = not prices or prices[-1].schedule != one.schedule
        length = one.length or 1
        tokens, each = one.steps * one.rows * length, cost.training_flops(one.config, length)
        if one.teacher is not None:
            each += cost.forward_flops_per_token(one.teacher, length)
        spent = each * tokens + (one.before if first else 0.0)
        total = spent if first else total + spent
        if hardware is not None:
            rate = hardware.peak(precision or one.precision) * mfu * (devices or one.devices)
            seconds = spent / rate if first else seconds + spent / rate
        shape = {
            "layers": one.config.num_hidden_layers,
            "width": one.config.hidden_size,
        }
        parameters = sum(cost.parameters(one.config).values())
        days = None if hardware is None else seconds / 86400
        prices.append(
            StagePrice(one.schedule, one.stage, shape, parameters, one.steps, tokens, each * tokens, total, days)
        )
    return prices


def schedule_table(prices: Sequence[StagePrice], what: str = "tokens") -> Table:
    """The stages as rows, with the total of each schedule."""
    table = lined(
        caption="FLOPs of training, causal, and of what a teacher predicts; those so far, and days, include all stages "
        "before and the checkpoint that the first began with. × is over the first schedule.",
    )
    names = ["", "stage", "layers", "width", "parameters", "steps", what, "FLOPs", "so far", ""]
    timed = any(one.days is not None for one in prices)
    for index, name in enumerate([*names, *(["days"] if timed else [])]):
        table.add_column(name, justify="left" if index < 2 else "right")
    last = {one.schedule: one for one in prices}
    first = last[prices[0].schedule].total_flops
    before = None
    for one in prices:
        if before not in (None, one.schedule):
            table.add_section()
        shape = [str(size) for size in one.shape.values()]
        ends = last[one.schedule] is one and len(last) > 1
        row = ["" if before == one.schedule else one.schedule, one.stage, *shape, f"{one.parameters:,}"]
        row += [f"{one.steps:,}", f"{one.tokens:,}", f"{one.flops:.3g}", f"{one.total_flops:.3g}"]
        row += [f"×{one.total_flops / first:.3f}" if ends else ""]
        table.add_row(*row, *([] if one.days is None else [si(one.days)]))
        before = one.schedule
    return table
