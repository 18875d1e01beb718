"""Costs and gains of arms, from the figures that `headwater_lab.comparison.arm_costs` measures."""

from headwater_lab.comparison.arm_costs import ArmCosts, TimeRatio, read_arm_costs
from headwater_lab.recipe.recipe import parse
from headwater_lab.reports.comparison import Comparison
from headwater_lab.reports.words import difference_columns
from headwater_lab.util.terminal import Table, lined


def find_arm_costs(comparison: Comparison) -> ArmCosts | str:
    """Find the measured costs of a comparison's arms; otherwise a sentence if there are others, or ""."""
    folders = {folder.parent for folder in comparison.folders.values()}
    costs = read_arm_costs(folders.pop()) if len(folders) == 1 else None
    if costs is None:
        return ""
    recipes = {arm: parse(comparison.runs(arm)[0].recipe, arm) for arm in comparison.arms}
    outdated = "prices.json holds prices of other arms or settings; `headwater bench prices` measures them."
    return costs if costs.fit(recipes, comparison.baseline) else outdated


def where_measured(costs: ArmCosts) -> str:
    """Describe the device and the versions of the timings."""
    threads = f", {costs.threads} thread{'s' if costs.threads > 1 else ''}" if costs.device == "cpu" else ""
    low, high = costs.arms[costs.baseline].training.quartiles
    return (
        f"Times: medians of paired turns over the baseline's, with quartiles, on {costs.device_name}{threads}, "
        f"PyTorch {costs.torch}. The baseline's times are against a second copy of it ({low:.2f} to {high:.2f} in "
        "training)."
    )


def arm_cost_rows(comparison: Comparison, costs: ArmCosts) -> list[dict[str, str]]:
    """Make a row for each arm with a cost: column -> cell."""
    cells = _list_costs(costs, of_images=comparison.trained_on == "images")
    arms = [summary.arm for summary in comparison.summaries]
    differences = zip(arms, difference_columns(comparison), strict=True)
    return [{"": arm} | difference | cells[arm] for arm, difference in differences if arm in cells]


def _list_costs(costs: ArmCosts, *, of_images: bool) -> dict[str, dict[str, str]]:
    """List each arm's costs: column -> cell. Times are ratios to the baseline's, with quartiles; its own are 1."""
    unit = "image" if of_images else "token"
    rows = {}
    for arm, cost in costs.arms.items():
        times = [cost.training, cost.decoding]
        training, decoding = ["×1", "×1"] if arm == costs.baseline else map(_write_ratio, times)
        rows[arm] = {
            "parameters": f"{cost.parameters:,}",
            f"FLOPs/{unit}": f"{cost.flops:.3g}",
            f"training time/{unit}": training,
        }
        if not of_images:
            rows[arm] |= {"cache B/token": f"{cost.cache:,}", "decoding time/token": decoding}
    return rows


def _write_ratio(time: TimeRatio | None) -> str:
    return "" if time is None else f"×{time.ratio:.2f} [{time.quartiles[0]:.2f}, {time.quartiles[1]:.2f}]"


def make_cost_table(costs: ArmCosts) -> Table:
    """Make the table of costs for a terminal, without the page's differences and quartiles."""
    cells = _list_costs(costs, of_images=all(cost.decoding is None for cost in costs.arms.values()))
    rows = [[arm, *(cell.partition(" [")[0] for cell in row.values())] for arm, row in cells.items()]
    return lined("", *cells[costs.baseline], rows=rows, caption=f"What each arm costs. {where_measured(costs)}")
