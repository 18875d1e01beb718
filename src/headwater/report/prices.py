"""What arms cost beside what they gain: which of them another one beats at no higher price.

`headwater.compare.prices` measures; this reads the figures of a comparison, for the table and the pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.compare.prices import Prices, TimeRatio, read_prices
from headwater.compare.statistics import Summary
from headwater.recipe import parse
from headwater.report.comparison import Comparison, arm_of
from headwater.report.words import difference
from headwater.terminal import Table, lined


@dataclass(frozen=True)
class PricedPoint:
    """An arm at one price, as a multiple of the baseline's.

    spread: quartiles of a measured price. front: no other arm is better by its mean and costs no more.
    """

    summary: Summary
    price: float
    spread: tuple[float, float] | None
    front: bool

    @property
    def difference(self) -> float:
        """0 for the baseline."""
        return self.summary.difference or 0.0


@dataclass(frozen=True)
class Panel:
    """Gains against one price."""

    title: str
    points: list[PricedPoint]

    @property
    def front(self) -> list[PricedPoint]:
        """The arms that no other one dominates, by price."""
        return sorted((point for point in self.points if point.front), key=lambda point: point.price)


def prices_of(comparison: Comparison) -> Prices | None:
    """The measured prices of a comparison's arms, as far as they fit its runs; None if there are none."""
    folders = {folder.parent for folder in comparison.folders.values()}
    if len(folders) != 1 or not any((folder / "prices.json").is_file() for folder in folders):
        return None
    recipes = {arm: parse(comparison.runs(arm)[0].recipe, arm) for arm in comparison.arms}
    found = read_prices(folders.pop(), recipes, comparison.baseline)
    return found if found is not None and comparison.baseline in found.arms else None


def panels(comparison: Comparison, prices: Prices) -> list[Panel]:
    """Gains against each price in which arms differ: of arms with a price and a difference, and of the baseline.

    Not of arms that diverged: the mean of the seeds that are left flatters them.
    """
    base = comparison.baseline
    priced = [s for s in comparison.summaries if s.arm in prices.arms]
    shown = [s for s in priced if s.arm == base or (s.paired is not None and not s.diverged)]
    sign = 1 if comparison.lower_is_better else -1
    tokens = {arm: comparison.runs(arm)[0].tokens for arm in comparison.arms}

    def panel(title: str, ratios: dict[str, float], spreads: dict[str, tuple[float, float]] | None = None) -> Panel:
        gains = {s.arm: -sign * (s.difference or 0.0) for s in shown}

        def dominated(arm: str) -> bool:
            return any(
                ratios[one] <= ratios[arm]
                and gains[one] >= gains[arm]
                and (ratios[one], gains[one]) != (ratios[arm], gains[arm])
                for one in gains
            )

        spread = spreads or {}
        return Panel(title, [PricedPoint(s, ratios[s.arm], spread.get(s.arm), not dominated(s.arm)) for s in shown])

    def counted(of: str, whole: bool) -> dict[str, float]:
        def amount(arm: str) -> float:
            return float(getattr(prices.arms[arm], of)) * (tokens[arm] if whole else 1)

        # To 1 %, so that a few scalars more are no higher price.
        return {s.arm: round(amount(s.arm) / max(amount(base), 1e-300), 2) for s in shown}

    def timed(of: str, whole: bool) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        ratios, spreads = {}, {}
        for s in shown:
            one: TimeRatio = getattr(prices.arms[s.arm], of)
            times = tokens[s.arm] / tokens[base] if whole else 1.0
            own = (1.0, (1.0, 1.0)) if s.arm == base else (one.ratio, one.quartiles)
            ratios[s.arm] = times * own[0]
            spreads[s.arm] = times * own[1][0], times * own[1][1]
        return ratios, spreads

    found = [
        panel("parameters", counted("parameters", whole=False)),
        panel("training FLOPs of a run", counted("flops", whole=True)),
        panel("training time of a run, measured", *timed("training", whole=True)),
    ]
    if all(prices.arms[s.arm].decoding is not None for s in shown):
        found.append(panel("cache per token", counted("cache", whole=False)))
        found.append(panel("time per generated token, measured", *timed("decoding", whole=False)))
    return found


def where_measured(prices: Prices) -> str:
    """The device and the versions of the times."""
    threads = f", {prices.threads} thread{'s' if prices.threads > 1 else ''}" if prices.device == "cpu" else ""
    noise = ""
    base = next((one for one in prices.arms.values() if one.settings == one.against), None)
    if base is not None:
        low, high = base.training.quartiles
        noise = f" The baseline's times are against a second copy of it ({low:.2f} to {high:.2f} in training)."
    return (
        f"Times: medians of paired turns over the baseline's, with quartiles, on {prices.device_name}{threads}, "
        f"PyTorch {prices.torch}.{noise}"
    )


def prices_table(comparison: Comparison, prices: Prices) -> tuple[list[str], list[list[str]]]:
    """Column names, and a row for each arm with a price; the last column has the prices at which none dominates it."""
    columns, costs = prices_by_arm(prices, of_images=comparison.trained_on == "images")
    shown = panels(comparison, prices)
    fronts: dict[str, list[str]] = {}
    for one in shown:
        for point in one.front:
            fronts.setdefault(point.summary.arm, []).append(SHORT[one.title])
    rows = []
    for s in comparison.summaries:
        if s.arm in costs:
            on = fronts.get(s.arm, [])
            rows.append([s.arm, difference(s), *costs[s.arm], "all" if len(on) == len(shown) else ", ".join(on) or "–"])
    return ["", f"minus {comparison.baseline}", *columns, "best at its"], rows


def prices_by_arm(prices: Prices, *, of_images: bool = False) -> tuple[list[str], dict[str, list[str]]]:
    """Names of the prices, and each arm's. A time is a ratio to the baseline's, with quartiles; the baseline has 1."""
    unit = "image" if of_images else "token"
    names = ["parameters", f"FLOPs/{unit}", f"training time/{unit}"]
    names += [] if of_images else ["cache B/token", "decoding time/token"]
    found = {}
    for arm, one in prices.arms.items():
        times = ["×1"] * 2 if one.settings == one.against else [_ratio(one.training), _ratio(one.decoding)]
        row = [f"{one.parameters:,}", f"{one.flops:.3g}", times[0], f"{one.cache:,}", times[1]]
        found[arm] = row[: len(names)]
    return names, found


SHORT = {
    "parameters": "parameters",
    "training FLOPs of a run": "FLOPs",
    "training time of a run, measured": "time",
    "cache per token": "cache",
    "time per generated token, measured": "decoding",
}


def _ratio(one: TimeRatio | None) -> str:
    return "" if one is None else f"×{one.ratio:.2f} [{one.quartiles[0]:.2f}, {one.quartiles[1]:.2f}]"


def prices_note(prices: Prices) -> str:
    """What the table and the figure show."""
    return (
        f"What each arm costs. Best at its: the prices at which no other arm costs as little and is as good, by the "
        f"means. {where_measured(prices)}"
    )


def terminal_prices(comparison: Comparison, prices: Prices) -> Table:
    """The prices for a terminal, without differences and quartiles, which the page has."""
    (names, rows), note = prices_table(comparison, prices), prices_note(prices)
    kept = [place for place in range(len(names)) if place != 1]
    return _drawn([names[place] for place in kept], [[row[place] for place in kept] for row in rows], note)


def terminal_prices_alone(prices: Prices) -> Table:
    """The prices for a terminal, without what the arms gain."""
    names, rows = prices_by_arm(prices, of_images=all(one.decoding is None for one in prices.arms.values()))
    return _drawn(["", *names], [[arm, *row] for arm, row in rows.items()], where_measured(prices))


def _drawn(names: list[str], rows: list[list[str]], note: str) -> Table:
    result = lined(*names, left=("", "best at its"), fold=True, caption=note)
    for row in rows:
        result.add_row(*(cell.partition(" [")[0] for cell in row))
    return result


def unpriced(comparison: Comparison, prices: Prices) -> list[str]:
    """Arms whose prices are missing, or of other settings."""
    return [arm for arm in dict.fromkeys(map(arm_of, comparison.records)) if arm not in prices.arms]
