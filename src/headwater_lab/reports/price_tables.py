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


def price_rows(comparison: Comparison, prices: Prices) -> list[dict[str, str]]:
    """Make a row for each arm with a price: column -> cell."""
    costs = _list_costs(prices, of_images=comparison.trained_on == "images")
    arms = [summary.arm for summary in comparison.summaries]
    differences = zip(arms, difference_columns(comparison), strict=True)
    return [{"": arm} | difference | costs[arm] for arm, difference in differences if arm in costs]


def _list_costs(prices: Prices, *, of_images: bool) -> dict[str, dict[str, str]]:
    """List each arm's costs: column -> cell. Times are ratios to the baseline's, with quartiles; its own are 1."""
    unit = "image" if of_images else "token"
    rows = {}
    for arm, price in prices.arms.items():
        times = [price.training, price.decoding]
        training, decoding = ["×1", "×1"] if arm == prices.baseline else map(_write_ratio, times)
        rows[arm] = {
            "parameters": f"{price.parameters:,}",
            f"FLOPs/{unit}": f"{price.flops:.3g}",
            f"training time/{unit}": training,
        }
        if not of_images:
            rows[arm] |= {"cache B/token": f"{price.cache:,}", "decoding time/token": decoding}
    return rows


def _write_ratio(time: TimeRatio | None) -> str:
    return "" if time is None else f"×{time.ratio:.2f} [{time.quartiles[0]:.2f}, {time.quartiles[1]:.2f}]"


def terminal_prices(prices: Prices) -> Table:
    """Make the table of prices for a terminal, without the page's differences and quartiles."""
    costs = _list_costs(prices, of_images=all(price.decoding is None for price in prices.arms.values()))
    rows = [[arm, *(cell.partition(" [")[0] for cell in row.values())] for arm, row in costs.items()]
    return lined("", *costs[prices.baseline], rows=rows, caption=f"What each arm costs. {where_measured(prices)}")
