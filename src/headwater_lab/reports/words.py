"""A comparison in tables and sentences that claim no more than its intervals support."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headwater_lab.comparison.equivalent_flops import EquivalentFlops
from headwater_lab.comparison.scaling import EXPONENTS, LEAST_SIZES, PINNED_E, Law, Prediction, Scaling
from headwater_lab.comparison.sequential import skewed_error
from headwater_lab.comparison.speedup import MEASURES, PINNED_EXPONENT, Constants, Speedup
from headwater_lab.comparison.statistics import INCONCLUSIVE, PairedTest, Summary, compare_all_pairs, is_too_wide
from headwater_lab.reports.comparison import Comparison, differ_in_cost, name_unit
from headwater_lab.reports.table_formats import PageTable
from headwater_lab.util.terminal import Table, counted, lined

RARE = (
    "If an arm rarely fails at the task, the first seeds may not show it: with one run in ten, a fifth to a half of "
    "the verdicts are wrong, in simulations."
)
TWO_SEEDS = " Caution: two seeds show little of the spread between runs; confirm the verdict with more."
SKEWED = "up to {:.0%} of verdicts are wrong if differences are strongly skewed, in simulations."


def result_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Make a row for each arm: column -> cell, with its name in the column ""."""
    shows_seeds = comparison.plan is not None or len({summary.runs for summary in comparison.summaries}) > 1
    rows = []
    for summary, difference in zip(comparison.summaries, difference_columns(comparison), strict=True):
        row = {"": summary.arm, f"{comparison.unit} ± sd": _write_mean(summary)}
        row |= difference | {"verdict": write_verdict(summary, comparison)}
        if comparison.threshold is not None:
            steps = summary.steps_to_threshold or []
            texts = ["never" if step is None else str(step) for step in steps]
            row[f"steps to {describe_threshold(comparison)}"] = (
                ", ".join(texts) if any(step is not None for step in steps) else "never"
            )
        if shows_seeds:
            row["seeds"] = str(summary.runs)
        row |= {
            "parameters": f"{summary.parameters:,}",
            f"{comparison.trained_on}/s": f"{summary.tokens_per_second:,.0f}",
        }
        if comparison.trained_on != "images":
            row["cache B/token"] = f"{summary.cache_bytes_per_token:,}"
        rows.append(row)
    return rows


def difference_columns(comparison: Comparison) -> list[dict[str, str]]:
    """Make the cells of each arm's difference from the baseline with its interval: column -> cell."""
    summaries = comparison.summaries
    return name_levels(
        f"minus {comparison.baseline}", map(write_difference, summaries), [summary.paired for summary in summaries]
    )


def name_levels(name: str, cells: Iterable[str], tests: Sequence[PairedTest | None]) -> list[dict[str, str]]:
    """Make a column of intervals: column -> cell, for each row.

    Its name has their level; where they differ, they are in a column of their own. Without an interval there is none.
    """
    texts = list(cells)
    levels = [
        _write_confidence(test) if test is not None and "[" in text else ""
        for text, test in zip(texts, tests, strict=True)
    ]
    correction = ", Holm" if sum(test is not None and test.p is not None for test in tests) > 1 else ""
    distinct = sorted({*levels} - {""})
    if len(distinct) > 1:
        return [{name: text, f"level{correction}": level} for text, level in zip(texts, levels, strict=True)]
    return [{f"{name} [{distinct[0]}{correction}]" if distinct else name: text} for text in texts]


def describe_threshold(comparison: Comparison) -> str:
    """Describe the threshold in words; "" without one."""
    threshold = comparison.threshold
    if threshold is None:
        return ""
    return f"the end of {comparison.baseline}" if isinstance(threshold, str) else f"{threshold:g}"


def cost_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Make a row for each arm's cost of reaching the threshold: column -> cell; none where arms cost alike."""
    if comparison.threshold is None or not differ_in_cost(comparison.records):
        return []
    tests = [summary.flops_to_threshold for summary in comparison.summaries]
    factors = name_levels(f"over {comparison.baseline}", map(write_factor, tests), tests)
    rows = []
    for summary, factor in zip(comparison.summaries, factors, strict=True):
        reached = [point for point in summary.reached or [] if point is not None]
        runs = len(summary.reached or []) + summary.diverged
        row = {"": summary.arm, f"seeds that reach {describe_threshold(comparison)}": f"{len(reached)} of {runs}"}
        row["FLOPs, all included"] = f"{np.median([point.flops for point in reached]):.3g}" if reached else ""
        row |= factor
        row["seconds"] = f"{np.median([point.seconds for point in reached]):,.0f}" if reached else ""
        rows.append(row)
    return rows


def write_factor(ratio: PairedTest | None) -> str:
    """Write a mean of logarithms of ratios as a factor, with its interval."""
    if ratio is None:
        return ""
    with np.errstate(over="ignore"):
        mean, *ends = np.exp([ratio.mean, *(ratio.interval or ())])
    if ends and is_too_wide((ends[0], ends[1])):
        return INCONCLUSIVE
    return f"×{mean:.2f}" + (" [{:.2f}, {:.2f}]".format(*ends) if ends else "")


def law_rows(laws: Sequence[Law]) -> list[dict[str, str]]:
    """Make a row for each law: column -> cell. An exponent at the bound of the search may not be the best one."""
    rows = []
    for law in laws:
        is_inside = EXPONENTS[0] * 1.01 < law.exponent < EXPONENTS[1] / 1.01
        exponent = f"{law.exponent:.4g}" + ("" if is_inside else ", the bound of the search")
        row = {"": law.arm, "E": f"{law.e:.4g}", "A": f"{law.a:.4g}", "a": exponent}
        rows.append(row if law.error is None else row | {"error": f"{law.error:.2g}"})
    return rows


def write_speedup(speedup: Speedup, measure: str) -> str:
    """Write a cell of a speedup, or why there is none."""
    if speedup.missing:
        return speedup.missing
    estimate = speedup.values.get(measure)
    if estimate is None:
        return "runs on different machines"
    if is_too_wide(estimate.interval):
        return f"inconclusive with {counted(speedup.seeds)}"
    interval = ", one seed" if estimate.interval is None else " [{:.2f}, {:.2f}]".format(*estimate.interval)
    return f"×{estimate.value:.2f}{interval}{'' if speedup.inside else ' *'}"


def speedup_rows(speedups: Sequence[Speedup], sizes: Sequence[str]) -> list[list[str]]:
    """Lay out speedups of one kind of constants: a row for each arm and measure, with a cell by size.

    An arm without any number has one row.
    """
    by_arm: dict[str, dict[str, Speedup]] = {}
    for speedup in speedups:
        by_arm.setdefault(speedup.arm, {})[speedup.size] = speedup
    rows = []
    for arm, by_size in by_arm.items():
        for measure in reversed(MEASURES):
            cells = [by_size.get(size, Speedup(arm, size, "pinned", missing="not trained")) for size in sizes]
            if measure == MEASURES[-1] or any(cell.values for cell in cells):
                rows.append([arm, measure, *(write_speedup(cell, measure) for cell in cells)])
    return rows


def describe_speedups(constants: Constants, baseline: str, *, are_timed: bool) -> str:
    """Describe the table of speedups with one kind of constants."""
    law = {
        "pinned": f"pinned to marin's E = {PINNED_E} and exponent {PINNED_EXPONENT}, of runs with 1e18 to 3e20 FLOPs",
        "fitted": f"fitted to {baseline} at the sizes with as many tokens per parameter, or else parameters",
    }[constants]
    beyond = " * Beyond the sizes trained." if constants == "fitted" else ""
    clock = "timed in alternation, as under Prices" if are_timed else "of the runs, which other work slows down"
    return (
        f"The compute that {baseline} needs for each arm's loss, over what the arm had of tokens, FLOPs or time; "
        f"constants {law}. Effective: FLOPs divided by tokens/s, as marin defines it. Times: {clock}. Intervals: 95 % "
        f"each, jackknife over the seeds.{beyond}"
    )


def prediction_rows(scaling: Scaling) -> list[dict[str, str]]:
    """Make a row for what each arm's laws predict: column -> cell; none without predictions."""
    fitted, pinned = "E fitted", f"E = {PINNED_E}"
    empty = {"largest size": "", f"largest size, {fitted}": f"needs {LEAST_SIZES + 1} sizes"}
    if scaling.axis == "flops":
        empty[f"largest size, {pinned}"] = scaling.unpinned
    rows: dict[str, dict[str, str]] = {}
    for prediction in scaling.predictions:
        row = rows.setdefault(prediction.arm, {"": prediction.arm} | empty)
        if prediction.measured is not None:
            row["largest size"] = f"{prediction.measured:.3f}"
        n = f"{prediction.n:.3g} FLOPs" if prediction.measured is None else "largest size"
        row[f"{n}, {pinned if prediction.pinned else fitted}"] = _write_prediction(prediction)
    return list(rows.values())


def _write_prediction(prediction: Prediction) -> str:
    interval, measured = prediction.loss.interval, prediction.measured
    if interval is None:
        return f"{prediction.loss.value:.3f}, one seed"
    if is_too_wide(interval):
        return INCONCLUSIVE
    outside = measured is not None and not interval[0] <= measured <= interval[1]
    low, high = interval
    return f"{prediction.loss.value:.3f} [{low:.3f}, {high:.3f}]" + (", missed" if outside else "")


COST_NOTE = (
    "Medians over the seeds that reach it. FLOPs and seconds count all stages; for a checkpoint that a run began with, "
    "only the FLOPs. The factor is the geometric mean over seeds that reach it in both, tested like the differences; "
    "missing seeds make the arm look better."
)


def equivalent_flops_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Make a row for what each arm's result would have cost the baseline: column -> cell; none without budgets."""
    gains = comparison.equivalent_flops
    tests = [gain.factor for gain in gains]
    factors = name_levels(f"worth in FLOPs of {comparison.baseline}", map(_write_equivalent_flops, gains), tests)
    diverged = {summary.arm: summary.diverged for summary in comparison.summaries}
    rows = []
    for gain, factor in zip(gains, factors, strict=True):
        lost = diverged.get(gain.arm, 0)
        name = next(iter(factor))
        factor[name] += f", without {counted(lost)} that diverged" if lost else ""
        rows.append({"": gain.arm, "FLOPs, all included": f"{gain.flops:.3g}"} | factor)
    return rows


def _write_equivalent_flops(gain: EquivalentFlops) -> str:
    if gain.below and gain.above:
        return "outside the budgets, on both sides"
    if gain.factor is not None and (gain.below or gain.above):  # an interval would say more than is known
        return f"at {'most' if gain.below else 'least'} ×{math.exp(gain.factor.mean):.2f}"
    return write_factor(gain.factor)


def describe_equivalent_flops(comparison: Comparison) -> str:
    base = comparison.baseline
    return (
        f"The factor: the FLOPs at which {base} reaches the arm's result, divided by the arm's own; above 1 the arm "
        f"saves compute. Between {base} and {', '.join(comparison.budgets)}, linear in log FLOPs, seed by seed; beyond "
        "them it is only a bound. The geometric mean over seeds, tested like the differences."
    )


def result_tables(comparison: Comparison) -> list[Table]:
    """Make a comparison's tables for a terminal: results, then those of `further_tables`."""
    further = [
        lined(*table.columns, rows=table.texts, left=table.columns[:1], caption=table.caption)
        for table in further_tables(comparison)
    ]
    return [result_table(comparison), *further]


def further_tables(comparison: Comparison) -> list[PageTable]:
    """Make the tables of FLOPs to the threshold, equivalent FLOPs and domains, if any."""
    worth = f"What each result is worth. {describe_equivalent_flops(comparison)}"
    tables = [
        (f"What it costs to reach {describe_threshold(comparison)}. {COST_NOTE}", cost_rows(comparison), "costs"),
        (worth, equivalent_flops_rows(comparison), "worth"),
        (domains_note(comparison), domain_rows(comparison), "domains"),
    ]
    return [PageTable.from_rows(caption, rows, name=name) for caption, rows, name in tables if rows]


def count_decimals(scale: float) -> int:
    """Count the decimals that show two digits of an interval or a spread of this size: 3 to 9."""
    return 3 if not 0 < scale < 0.01 else min(9, 1 - math.floor(math.log10(scale)))


def _write_mean(summary: Summary) -> str:
    if summary.mean is None:
        return ""
    decimals = count_decimals(summary.spread or 0.0)
    return f"{summary.mean:.{decimals}f}" + ("" if summary.spread is None else f" ± {summary.spread:.{decimals}f}")


def write_difference(summary: Summary) -> str:
    """Write the difference from the baseline with its interval; "" without one."""
    return "" if summary.paired is None else " ".join(filter(None, split_difference(summary.paired)))


def split_difference(paired: PairedTest) -> tuple[str, str]:
    """Write a mean difference, and its interval, "" without one, in as many decimals."""
    low, high = paired.interval or (0.0, abs(paired.mean))
    decimals = count_decimals(high - low)
    interval = "" if paired.interval is None else f"[{low:+.{decimals}f}, {high:+.{decimals}f}]"
    return f"{paired.mean:+.{decimals}f}", interval


def write_verdict(summary: Summary, comparison: Comparison) -> str:
    if summary.diverged:
        return f"diverged {summary.diverged} of {summary.runs + summary.diverged}"
    return summary.verdict(comparison.lower_is_better)


def result_table(comparison: Comparison) -> Table:
    """The comparison for a terminal."""
    table = PageTable.from_rows(describe_test(comparison), result_rows(comparison))
    return lined(*table.columns, rows=table.texts, title=comparison.heading, caption=table.caption)


def domain_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Make a row for each arm with the deciding kind of metric in every domain, or all metrics of images, if any."""

    def values(arm: str, measure: str) -> dict[int, float]:
        looks = {run.seed: run.held_out[-1].metrics for run in comparison.finished(arm)}
        return {seed: look[measure] for seed, look in looks.items() if measure in look}

    def cell(arm: str, measure: str) -> str:
        of_arm, base = values(arm, measure), values(comparison.baseline, measure)
        differences = [of_arm[seed] - base[seed] for seed in of_arm.keys() & base.keys()]
        beside = f" ({np.mean(differences):+.3f})" if differences and arm != comparison.baseline else ""
        return f"{np.mean(list(of_arm.values())):.3f}{beside}" if of_arm else ""

    metrics = _list_metrics(comparison)
    if not metrics:
        return []
    return [{"": arm} | {name: cell(arm, metrics[name]) for name in metrics} for arm in comparison.arms]


def _list_metrics(comparison: Comparison) -> dict[str, str]:
    """Map each column to its metric."""
    if comparison.trained_on == "images":
        looks = [run.held_out[-1].metrics for arm in comparison.arms for run in comparison.finished(arm)]
        names = {"accuracy": "top-1 accuracy", "loss": f"loss ({name_unit('loss', 'images')})"}
        return {names.get(name, name_unit(name, "images")): name for look in looks for name in look}
    kind = comparison.metric.partition("/")[0]
    return {domain: f"{kind}/{domain}" for domain in comparison.domains}


def domains_note(comparison: Comparison) -> str:
    """Describe the cells of the domains' table."""
    of_domains = f"{name_unit(comparison.metric.partition('/')[0])} of each domain"
    return (
        f"Held-out {'metrics' if comparison.trained_on == 'images' else of_domains} at the end, mean over seeds; in "
        f"brackets the mean difference from {comparison.baseline}, seed by seed, which is not tested."
    )


def count_tested(comparison: Comparison) -> int:
    """Count the arms that are tested together."""
    if comparison.plan is not None:
        return len(comparison.plan.arms)
    return sum(s.paired is not None and s.paired.p is not None for s in comparison.summaries)


def describe_test(comparison: Comparison) -> str:
    """Describe the test."""
    seeds, arms = len(comparison.seeds), count_tested(comparison)
    direction = "lower" if comparison.lower_is_better else "higher"
    cache = "" if comparison.trained_on == "images" else "; cache in fp32"
    if (plan := comparison.plan) is not None:
        together = f" and all {arms} arms" if arms > 1 else ""
        return (
            f"{plan.min_seeds} to {counted(len(plan.seeds))} until decided, paired by seed; {direction} is better; "
            f"interval: repeated confidence interval, 95 % for all looks{together} together; equivalent: inside "
            f"±{plan.margin:g}{cache}."
        )
    test = "interval: paired Student's t, " + (f"at Holm's levels for {arms} arms" if arms > 1 else "95 %")
    return f"{counted(seeds)}, paired by seed; {direction} is better; {test if arms else 'no test'}{cache}."


def state_answer(comparison: Comparison) -> str:
    """State in one sentence the arm with the largest improvement, or that the comparison is inconclusive.

    Whether that arm also beats the others follows from tests of all pairs (Holm).
    """
    if comparison.changed_data:
        return comparison.changed_data
    diverged = [
        f"{summary.arm} in {summary.diverged} of {counted(summary.runs + summary.diverged)}"
        for summary in comparison.summaries
        if summary.diverged
    ]
    left_out = f" Diverged, and left out: {join_names(diverged)}." if diverged else ""
    return _Answer(comparison).sentence() + left_out


class _Answer:
    """The arms that were compared with the baseline, by verdict, and the sentence about them."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.base = comparison, comparison.baseline
        self.by_verdict: dict[str, list[Summary]] = defaultdict(list)
        for summary in comparison.summaries:
            if summary.paired is not None:
                self.by_verdict[summary.verdict(comparison.lower_is_better)].append(summary)

    def sentence(self) -> str:
        sentences = {
            "better": self._say_better,
            "worse": self._say_worse,
            "equivalent": self._say_equivalent,
            "inconclusive": self._say_inconclusive,
        }
        for verdict, say in sentences.items():
            if arms := self.by_verdict[verdict]:
                tests = [summary.paired for summary in self.by_verdict["better"] + self.by_verdict["worse"]]
                few = any(paired is not None and len(paired.differences) == 2 for paired in tests)
                return say(max(arms, key=lambda summary: abs(summary.difference or 0.0))) + (TWO_SEEDS if few else "")
        if self.by_verdict["identical"]:
            return f"No arm differs from {self.base} in any digit."
        if self.by_verdict["diverged"]:
            return f"Nothing can be compared with {self.base}."
        reason = "no other arm shares a seed with it"
        if all(arm == self.base for arm in self.comparison.arms):
            reason = "the runs of other arms failed" if self.comparison.failed else "there is no other arm"
        return f"Nothing can be compared with {self.base}: {reason}."

    def _say_better(self, best: Summary) -> str:
        if self.comparison.plan is None:
            not_worse = {summary.arm for verdict in ("better", "inconclusive") for summary in self.by_verdict[verdict]}
            rivals = [arm for arm in self.comparison.arms if arm in not_worse and arm != best.arm]
            verdicts = self._say_rivals(best, rivals)
        else:  # arms stopped after different numbers of seeds, and were not compared with each other
            verdicts = self._list_verdicts(best)
        return f"{best.arm} is better than {self.base} by {_write_effect(best, self.comparison)}{verdicts}."

    def _say_worse(self, worst: Summary) -> str:
        verdicts = self._say_undecided() if self.comparison.plan is None else self._list_verdicts(worst)
        effect = _write_effect(worst, self.comparison)
        return f"No arm was found better than {self.base}; {worst.arm} is worse by {effect}{verdicts}."

    def _say_equivalent(self, widest: Summary) -> str:
        assert widest.paired is not None
        names = join_names([summary.arm for summary in self.by_verdict["equivalent"]])
        margin = f"{widest.paired.margin:g} {self.comparison.unit}"
        return f"{names} and {self.base} are equivalent: they differ by less than {margin}{self._say_undecided()}."

    def _say_inconclusive(self, widest: Summary) -> str:
        assert widest.paired is not None
        return (
            f"The comparison with {self.base} is inconclusive after {counted(len(widest.paired.differences))}: the "
            f"largest difference is {widest.arm}'s, {write_difference(widest)} {self.comparison.unit}."
        )

    def _say_undecided(self) -> str:
        arms = [summary.arm for summary in self.by_verdict["inconclusive"]]
        return f"; {join_names(arms)} {'is' if len(arms) == 1 else 'are'} inconclusive" if arms else ""

    def _list_verdicts(self, but: Summary) -> str:
        """The verdicts on the other arms of a comparison that was run until decided."""
        labels = {"better": "better too", "worse": "worse", "equivalent": "equivalent", "inconclusive": "inconclusive"}
        arms = {verdict: [s.arm for s in self.by_verdict[verdict] if s is not but] for verdict in labels}
        return "".join(f"; {labels[verdict]}: {join_names(names)}" for verdict, names in arms.items() if names)

    def _say_rivals(self, best: Summary, rivals: Sequence[str]) -> str:
        """Whether the best arm also beats its rivals, those that were not found worse than the baseline."""
        if not rivals:
            return ""
        tests = compare_all_pairs(self.comparison.records, [best.arm, *rivals])

        def loses(paired: PairedTest | None) -> bool:
            return paired is not None and paired.is_significant and (paired.mean < 0) == self.comparison.lower_is_better

        beaten = [arm for arm in rivals if loses(tests[best.arm, arm])]
        undecided = [arm for arm in rivals if arm not in beaten]
        than = f"; it is better than {join_names(beaten)} too" if beaten else ""
        return than + (f"; the comparison with {join_names(undecided)} is inconclusive" if undecided else "")


def join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _write_effect(summary: Summary, comparison: Comparison) -> str:
    assert summary.paired is not None
    assert summary.interval is not None
    low, high = sorted(map(abs, summary.interval))
    decimals = count_decimals(high - low)
    return (
        f"{abs(summary.paired.mean):.{decimals}f} {comparison.unit} "
        f"({_write_confidence(summary.paired)} interval {low:.{decimals}f} to {high:.{decimals}f}, "
        f"{counted(len(summary.paired.differences))})"
    )


def _write_confidence(paired: PairedTest) -> str:
    """Write the confidence of one interval: with several arms it exceeds their joint 95 %."""
    return f"{100 * (1 - paired.level):.4g} %"


def list_left_out(comparison: Comparison) -> list[str]:
    """Write a line for each run that is not in the tables because it failed or has not ended."""
    lines = [f"{r.name}: failed, and not in the tables. {r.error or ''}".strip() for r in comparison.failed]
    return lines + [f"{r.name}: {r.status}, not finished, and not in the tables." for r in comparison.unfinished]


def state_question(sizes: Sequence[Comparison]) -> str:
    """State in one line the arms, data, budget and number of seeds of a comparison, at one or more sizes."""
    comparison, records = sizes[0], [of_run for size in sizes for of_run in size.records]
    record = records[0]
    kind = record.recipe.get("data", {}).get("kind")
    data = record.data.get("source") or (f"the task {kind}" if kind else "the recipe's data")
    if comparison.domains and "/" not in comparison.metric:
        data = f"{join_names(comparison.domains)}, the plain mean over {counted(len(comparison.domains), 'domain')}"
    over = counted(len(comparison.seeds)) + (" per arm" if comparison.plan is None else " at most")
    direction = "lower" if comparison.lower_is_better else "higher"
    tokens = write_range([run.tokens for run in records], "{:,}".format)
    flops = write_range([run.flops for run in records], "{:.3g}".format)
    return (
        f"{_ask_question(comparison.arms, comparison.baseline)} Measured in {comparison.unit} ({direction} is better) "
        f"on held-out data of {data}, after {tokens} training {record.unit} and {flops} FLOPs per run, with {over}"
        + (f", at {len(sizes)} sizes." if len(sizes) > 1 else ".")
    )


def _ask_question(arms: Sequence[str], baseline: str) -> str:
    compared = [arm for arm in arms if arm != baseline]
    if len(compared) > 1:
        return f"Which of {join_names(compared)} are better than {baseline}?"
    return f"Is {compared[0]} better than {baseline}?" if compared else f"How good is {baseline}?"


def write_range(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Write one number, or the lowest and the highest."""
    return " to ".join(dict.fromkeys((form(min(values)), form(max(values)))))


def difference_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Make a row for the test of each arm: column -> cell."""
    fixed = comparison.plan is None  # sequential comparisons have no p
    rows = []
    for s in comparison.summaries:
        if (p := s.paired) is None:
            continue
        mean, interval = split_difference(p)
        row = {
            "": s.arm,
            f"minus {comparison.baseline}": mean,
            "interval": interval,
            "its level": "" if fixed and p.p is None else _write_confidence(p),
            "p": "" if p.p is None else f"{p.p:.2g}",
            "pairs": str(len(p.differences)),
            "more seeds": "" if p.more_pairs is None else f"{p.more_pairs:,}",
            "detectable": "" if p.detectable is None else f"{p.detectable:.3g}",
        }
        rows.append({name: cell for name, cell in row.items() if fixed or name not in ("p", "detectable")})
    return rows


def describe_columns(comparison: Comparison) -> str:
    """Describe the columns of the differences' table, and the bound on the test's error."""
    apart = " Each size is tested separately." if comparison.size is not None else ""
    power = "with a probability of 80 %"
    if (plan := comparison.plan) is not None:
        skewed = skewed_error(plan)
        return (
            f"An arm is decided when its interval excludes 0 (better, worse) or lies inside ±{plan.margin:g} "
            f"(equivalent, even if it excludes 0); later runs do not count. More seeds: for a decision {power}."
            + (f" With so few seeds, {SKEWED.format(skewed)}" if skewed is not None else "")
            + ("" if comparison.lower_is_better else f" {RARE}")
            + apart
        )
    if not count_tested(comparison):
        return "With fewer than two seeds in common with the baseline, nothing is tested."
    return (
        "At most 5 % of tables call any of several identical arms better or worse (Holm). p is uncorrected; if all "
        f"seeds differ by the same number, p is from the sign test. More seeds: to find such a difference {power}. "
        f"Detectable: the difference that these seeds would find {power}.{apart}"
    )
