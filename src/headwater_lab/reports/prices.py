"""What arms cost beside what they gain, from the figures that `headwater_lab.comparison.prices` measures."""

from __future__ import annotations

from headwater_lab.comparison.prices import Prices, TimeRatio, read_prices
from headwater_lab.recipe.schema import parse
from headwater_lab.reports.comparison import Comparison, arm_of
from headwater_lab.reports.words import difference
from headwater_lab.util.terminal import Table, lined


def prices_of(comparison: Comparison) -> Prices | None:
    """The measured prices of a comparison's arms, as far as they fit its runs; None if there are none."""
    folders = {folder.parent for folder in comparison.folders.values()}
    if len(folders) != 1 or not any((folder / "prices.json").is_file() for folder in folders):
        return None
    recipes = {arm: parse(comparison.runs(arm)[0].recipe, arm) for arm in comparison.arms}
    found = read_prices(folders.pop(), recipes, comparison.baseline)
    return found if found is not None and comparison.baseline in found.arms else None


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
    """Column names, and a row for each arm with a price."""
    columns, costs = prices_by_arm(prices, of_images=comparison.trained_on == "images")
    rows = [[s.arm, difference(s), *costs[s.arm]] for s in comparison.summaries if s.arm in costs]
    return ["", f"minus {comparison.baseline}", *columns], rows


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


def _ratio(one: TimeRatio | None) -> str:
    return "" if one is None else f"×{one.ratio:.2f} [{one.quartiles[0]:.2f}, {one.quartiles[1]:.2f}]"


def terminal_prices(prices: Prices) -> Table:
    """The prices for a terminal, without differences and quartiles, which the page has."""
    names, rows = prices_by_arm(prices, of_images=all(price.decoding is None for price in prices.arms.values()))
    table = lined("", *names, left=("",), fold=True, caption=f"What each arm costs. {where_measured(prices)}")
    for arm, row in rows.items():
        table.add_row(arm, *(cell.partition(" [")[0] for cell in row))
    return table


def unpriced(comparison: Comparison, prices: Prices) -> list[str]:
    """Arms whose prices are missing, or of other settings."""
    return [arm for arm in dict.fromkeys(map(arm_of, comparison.records)) if arm not in prices.arms]
