"""Costs and gains of arms, from the figures that `headwater_lab.comparison.prices` measures."""

from headwater_lab.comparison.prices import Prices, TimeRatio, read_prices
from headwater_lab.recipe.recipe import parse
from headwater_lab.reports.comparison import Comparison
from headwater_lab.reports.words import difference_columns
from headwater_lab.util.terminal import Table, lined


def find_prices(comparison: Comparison) -> Prices | str:
    """Find the measured prices of a comparison's arms; otherwise a sentence if there are others, or ""."""
    folders = {folder.parent for folder in comparison.folders.values()}
    prices = read_prices(folders.pop()) if len(folders) == 1 else None
    if prices is None:
        return ""
    recipes = {arm: parse(comparison.runs(arm)[0].recipe, arm) for arm in comparison.arms}
    outdated = "prices.json holds prices of other arms or settings; `headwater bench prices` measures them."
    return prices if prices.fit(recipes, comparison.baseline) else outdated


def where_measured(prices: Prices) -> str:
    """Describe the device and the versions of the timings."""
    threads = f", {prices.threads} thread{'s' if prices.threads > 1 else ''}" if prices.device == "cpu" else ""
    low, high = prices.arms[prices.baseline].training.quartiles
    return (
        f"Times: medians of paired turns over the baseline's, with quartiles, on {prices.device_name}{threads}, "
        f"PyTorch {prices.torch}. The baseline's times are against a second copy of it ({low:.2f} to {high:.2f} in "
        "training)."
    )


def prices_table(comparison: Comparison, prices: Prices) -> tuple[list[str], list[list[str]]]:
    """Return column names, and a row for each arm with a price."""
    columns, costs = prices_by_arm(prices, of_images=comparison.trained_on == "images")
    differences = difference_columns(comparison)
    rows = [
        [summary.arm, *difference.values(), *costs[summary.arm]]
        for summary, difference in zip(comparison.summaries, differences, strict=True)
        if summary.arm in costs
    ]
    return ["", *differences[0], *columns], rows


def prices_by_arm(prices: Prices, *, of_images: bool = False) -> tuple[list[str], dict[str, list[str]]]:
    """Return the prices' names, and each arm's. Times are ratios to the baseline's, with quartiles; its own are 1."""
    unit = "image" if of_images else "token"
    names = ["parameters", f"FLOPs/{unit}", f"training time/{unit}"]
    names += [] if of_images else ["cache B/token", "decoding time/token"]
    rows = {}
    for arm, price in prices.arms.items():
        times = ["×1"] * 2 if arm == prices.baseline else [_write_ratio(price.training), _write_ratio(price.decoding)]
        row = [f"{price.parameters:,}", f"{price.flops:.3g}", times[0], f"{price.cache:,}", times[1]]
        rows[arm] = row[: len(names)]
    return names, rows


def _write_ratio(time: TimeRatio | None) -> str:
    return "" if time is None else f"×{time.ratio:.2f} [{time.quartiles[0]:.2f}, {time.quartiles[1]:.2f}]"


def terminal_prices(prices: Prices) -> Table:
    """Make the table of prices for a terminal, without the page's differences and quartiles."""
    names, rows = prices_by_arm(prices, of_images=all(price.decoding is None for price in prices.arms.values()))
    cells = [[arm, *(cell.partition(" [")[0] for cell in row)] for arm, row in rows.items()]
    return lined("", *names, rows=cells, caption=f"What each arm costs. {where_measured(prices)}")
