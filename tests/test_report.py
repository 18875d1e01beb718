"""The report: which records belong together, what is said of them, and the page as a real browser shows it."""

import asyncio
import base64
import contextlib
import math
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.trials import list_trials
from headwater_lab.reports import PageTable, read_comparisons, write_report
from headwater_lab.reports.curves import make_arm_curves
from headwater_lab.reports.page import (
    Section,
    Story,
    data_table,
    list_warnings,
    rates_table,
    render_page,
    scaling_part,
    tell_story,
)
from headwater_lab.reports.pictures import choose_styles, curves_picture, differences_picture
from headwater_lab.reports.words import describe_test, difference_rows, result_table, state_answer
from headwater_lab.training.records import (
    CurvePoint,
    Experiment,
    HeldOutPoint,
    Notice,
    RunRecord,
    read_environment,
    write_record,
)

HOSTILE = "<script>alert('x')</script> %{y} & </script> $x$"


def record(arm, seed, result, *, steps=4, status="finished", metric="bits_per_byte", phase="comparison", **fields):
    """A run whose held-out curve goes from result + 1 to the result, and its training loss alike."""
    name, size = fields.pop("name", "e"), fields.pop("size", None)
    values = [result + 1 - i / steps for i in range(1, steps + 1)]
    values[-1] = result
    points = [(10 * i, 100 * i, 1e6 * i * fields.get("parameters", 10)) for i in range(1, steps + 1)]
    return RunRecord(
        name=f"{arm}-{seed}",
        experiment=Experiment(name=name, title=f"Title of {name}", arm=arm, baseline="base", size=size, phase=phase),
        seed=seed,
        status=status,
        metric=metric,
        lower_is_better=metric != "accuracy",
        curve=[
            CurvePoint(step=s, tokens=t, flops=f, loss=v, learning_rate=0.1, gradient_norm=1.0)
            for (s, t, f), v in zip(points, values, strict=True)
        ],
        held_out=[
            HeldOutPoint(step=s, tokens=t, flops=f, metrics={metric: v, "loss": v})
            for (s, t, f), v in zip(points, values, strict=True)
        ],
        environment=read_environment("cpu"),
        **{
            "recipe": {"model": {}, "data": {}, "training": {"steps": 10 * steps, "learning_rate": 0.1}},
            "identity": "", "data": {"source": "a corpus"}, "parameters": 10, "cache_bytes_per_token": 4,
            "tokens": 100 * steps, "flops": points[-1][2], "seconds": 2.0,
        } | fields,
    )  # fmt: skip


def saved(folder, records):
    for i, one in enumerate(records):
        (folder / f"{i}").mkdir(parents=True, exist_ok=True)
        write_record(one, folder / f"{i}")
    return folder


def three(arm, results, **fields):
    return [record(arm, seed, result, **fields) for seed, result in enumerate(results)]


BASE, GOOD, UNCLEAR = [3.0, 3.1, 2.9], [2.5, 2.61, 2.4], [2.9, 3.3, 2.8]


def text_of(html):
    """What a reader sees of a page."""
    html = re.sub(r"(?s)<(script|style)\b.*?</\1>", " ", html)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).replace("\xa0", " ").split())


class TestWhatIsSaid:
    def test_better_and_inconclusive(self, tmp_path):
        records = three("base", BASE) + three("good", GOOD) + three("unclear", UNCLEAR)
        found = read_comparisons(saved(tmp_path, records))[0]
        assert state_answer(found).startswith("good is better than base by 0.497 bits per byte (97.5 % interval 0.4")
        assert "at Holm's levels for 2 arms" in describe_test(found)

    def test_the_best_of_several_is_tested_against_the_others(self, tmp_path):
        """All pairs of the better arms together, and no winner is named where chance may have made it."""
        near = [2.52, 2.58, 2.4]
        far = [2.8, 2.91, 2.71]
        found = read_comparisons(saved(tmp_path, three("base", BASE) + three("good", GOOD) + three("far", far)))[0]
        assert state_answer(found).endswith("; it is better than far too.")
        saved(tmp_path / "more", three("near", near))
        found = read_comparisons(tmp_path)[0]
        assert [s.verdict(True) for s in found.summaries if s.arm != "base"] == ["better"] * 3
        assert state_answer(found).endswith("; it is better than far too; the comparison with good is inconclusive.")

    def test_more_seeds_are_those_of_the_statistics(self, tmp_path):
        found = read_comparisons(saved(tmp_path, three("base", BASE) + three("close", [2.9, 3.0, 2.87])))[0]
        paired = found.summaries[1].paired
        assert paired.more_pairs is not None
        assert state_answer(found).startswith("The comparison with base is inconclusive after 3 seeds")
        assert difference_rows(found)[0]["more seeds"] == f"{paired.more_pairs:,}"
        assert "Holm" not in describe_test(found), "one arm needs no correction"

    def test_seeds_of_an_answer_are_those_that_both_arms_have(self, tmp_path):
        records = three("base", BASE) + three("close", [2.9, 3.0, 2.87])[:2]
        answer = state_answer(read_comparisons(saved(tmp_path, records))[0])
        assert answer.startswith("The comparison with base is inconclusive after 2 seeds")

    def test_the_same_to_the_last_digit(self, tmp_path):
        found = read_comparisons(saved(tmp_path, three("base", BASE) + three("twin", BASE)))[0]
        assert state_answer(found) == "No arm differs from base in any digit."

    def test_worse_is_not_hidden(self, tmp_path):
        records = three("base", GOOD) + three("bad", BASE) + three("unclear", UNCLEAR)
        found = read_comparisons(saved(tmp_path, records))[0]
        assert state_answer(found).startswith("No arm was found better than base; bad is worse by 0.497")

    def test_one_seed_says_nothing(self, tmp_path):
        found = read_comparisons(saved(tmp_path, [record("base", 0, 3.0), record("other", 0, 1.0)]))[0]
        assert "no test" in describe_test(found)

    def test_diverged_arms_stand_in_the_table_and_interrupted_runs_do_not(self, tmp_path):
        wild = [record("wild", 0, 2.0), record("wild", 1, math.nan, status="diverged", error="step 7: loss is nan")]
        late = [record("late", 0, 2.0), record("late", 1, 2.0, steps=2, status="stopped")]
        found = read_comparisons(saved(tmp_path, [*three("base", BASE), *wild, *late]))[0]
        rows = {cells[0]: cells for cells in rows_of(found)}
        assert rows["wild"][3] == "diverged 1 of 2"
        assert "wild, seed 1: diverged, so the mean of the arm's other seeds is optimistic" in list_warnings([found])[0]
        assert [run.name for run in found.unfinished] == ["late-1"]
        assert "late-1: stopped, not finished" in text_of(render_page([tell_story([found])]))

    def test_sizes_are_apart_and_tuning_is_no_part(self, tmp_path):
        big = three("base", BASE, size="L", parameters=20) + three("good", GOOD, size="L", parameters=20)
        small = three("base", BASE, size="S") + three("good", GOOD, size="S")
        tries = [record("good", 1000, 0.5, size="S", phase="tuning")]
        found = read_comparisons(saved(tmp_path, big + small + tries))
        assert [(one.size, len(one.records), len(one.tuning)) for one in found] == [("S", 6, 1), ("L", 6, 1)]
        assert found[0].summaries[1].mean == pytest.approx(np.mean(GOOD))

    def test_learning_rates_with_the_chosen_one_and_its_edge(self, tmp_path):
        def tried(arm, rate, result, status="finished"):
            recipe = {"training": {"steps": 40, "learning_rate": rate}}
            return record(arm, 1000, result, phase="tuning", recipe=recipe, status=status)

        tries = [tried("base", 0.01, 4.0), tried("base", 0.1, 3.0), tried("base", 1.0, 3.5)]
        tries += [tried("good", 0.1, 3.0), tried("good", 0.01, 3.5), tried("good", 1.0, math.nan, "diverged")]
        runs = three("base", BASE) + three("good", GOOD)
        grid, edges = rates_table(read_comparisons(saved(tmp_path, runs + tries)))
        assert grid.columns == ["", "0.01", "0.1", "1"]
        assert grid.rows[0] == ["base", "4.000", ("3.000 chosen", "better"), "3.500"]
        assert grid.rows[1] == ["good", "3.500", ("3.000 chosen", "better"), "diverged 1 of 1"]
        assert edges == []
        assert grid.caption.endswith("each arm was then trained at its own best rate.")
        worse = [tried("worse", 0.1, 4.0), tried("worse", 0.01, 3.0)]
        runs += three("worse", UNCLEAR) + three("other", GOOD)
        (tmp_path / "more").mkdir()
        grid, _ = rates_table(read_comparisons(saved(tmp_path / "more", runs + tries + worse)))
        assert grid.caption.endswith("own best rate; other at a rate not tried here; worse at another one.")

    @pytest.mark.parametrize(
        ("chosen", "other"), [(0.01, "smallest one tried; add smaller"), (1.0, "largest one tried; add larger")]
    )
    def test_a_rate_at_the_edge_of_those_tried_is_said(self, tmp_path, chosen, other):
        recipe = {"training": {"steps": 40, "learning_rate": chosen}}
        tries = [
            record("base", 9, 3.0, phase="tuning", recipe={"training": {"steps": 4, "learning_rate": r}})
            for r in (0.01, 0.1, 1.0)
        ]
        found = read_comparisons(saved(tmp_path, three("base", BASE, recipe=recipe) + tries))
        (edge,) = rates_table(found)[1]
        assert edge.startswith(f"The best learning rate of base, {chosen:g}, is the {other} ones")

    def test_of_a_ladder_the_rate_of_the_tuned_size_is_chosen(self, tmp_path):
        """At larger sizes the law gives other rates."""

        def with_rate(rate):
            return {"recipe": {"training": {"steps": 40, "learning_rate": rate}}}

        tries = [record("base", 9, 3.0 + r, phase="tuning", size="d1", **with_rate(r)) for r in (0.01, 0.1)]
        runs = three("base", BASE, size="d1", **with_rate(0.01)) + three("base", BASE, size="d2", **with_rate(0.007))
        grid, edges = rates_table(read_comparisons(saved(tmp_path, runs + tries)))
        assert grid.rows == [["base", ("3.010 chosen", "better"), "3.100"]]
        assert edges[0].startswith("The best learning rate of base, 0.01, is the smallest one tried")

    def test_what_is_not_there_is_one_sentence(self, tmp_path):
        with pytest.raises(HeadwaterError, match="no finished runs of a comparison"):
            write_report(tmp_path)


def rows_of(found):
    """The rows of the terminal's table."""
    return [list(map(str, row)) for row in zip(*(column.cells for column in result_table(found).columns), strict=True)]


class TestCurves:
    def test_means_are_over_the_points_that_all_seeds_have(self, tmp_path):
        short = record("other", 1, 2.4, steps=3, status="diverged", error="x", recipe=record("other", 0, 2.0).recipe)
        ragged = [record("other", 0, 2.0, steps=4), short]
        found = read_comparisons(saved(tmp_path, three("base", BASE) + ragged))[0]
        (one, other), mean = make_arm_curves(found).by_arm["other"]
        assert mean.steps == [10, 20, 30]
        assert mean.values == pytest.approx([(a + b) / 2 for a, b in zip(one.values, other.values, strict=False)])

    def test_losses_that_are_no_numbers_leave_gaps(self, tmp_path):
        wild = [record("wild", 0, 2.0), record("wild", 1, math.nan, status="diverged")]
        found = read_comparisons(saved(tmp_path, three("base", BASE) + wild))[0]
        runs, mean = make_arm_curves(found).by_arm["wild"]
        assert np.isnan(runs[1].values).all()
        assert mean.steps == []
        assert "wild has no step at which all its seeds have a value" in curves_picture(found).description

    def test_differences_are_drawn_with_their_seeds_and_whole_intervals(self, tmp_path):
        runs = three("base", BASE) + three("other", UNCLEAR) + [record("other", 3, 1.0)] + three(HOSTILE, GOOD)
        found = read_comparisons(saved(tmp_path, runs))[0]
        picture = differences_picture(found)
        (axes,) = picture.figure.axes
        picture.figure.draw_without_rendering()
        lines = [line.get_xdata() for line in axes.lines]
        for summary in found.summaries[1:]:
            differences = list(summary.paired.differences)
            assert any(list(x) == differences for x in lines)
            assert any(list(x) == list(summary.interval) for x in lines)
            assert axes.get_xlim()[0] < summary.interval[0] < summary.interval[1] < axes.get_xlim()[1]
            assert f"{summary.arm} {summary.paired.mean:+.3f}, [" in picture.description
        assert differences_picture(read_comparisons(saved(tmp_path / "one", three("base", BASE)))[0]) is None

    def test_fourteen_arms_are_told_apart_without_color(self):
        arms = ["base", *(f"arm {i}" for i in range(13))]
        look = choose_styles(arms, "base")
        assert len({(s.marker, s.line) for s in look.values()}) == len(arms)
        assert len({(s.color, s.marker) for s in look.values()}) == len(arms)


class TestRecipe:
    @pytest.fixture
    def trials(self, recipe, tmp_path):
        """Records of a comparison whose arms differ in mechanisms, their order, and settings; and of two sizes."""
        made = recipe(
            name="c",
            compare={
                "baseline": "base",
                "seeds": [0, 3],
                "arms": {
                    # What all have in common must not come first: the order of mechanisms is that of their application.
                    "base": {"model": {"mechanisms": {"value_residual": {}}}},
                    "both": {"model": {"mechanisms": {"kv_shift": {"window": 3}, "value_residual": {}}}},
                    "longer": {
                        "model": {"mechanisms": {"value_residual": {}}},
                        "training": {"steps": 20, "max_grad_norm": None},
                    },
                },
                "sizes": {
                    "S": {},
                    "L": {"model": {"hidden_size": 32}, "arms": {"longer": {"training": {"steps": 24}}}},
                },
            },
            model={"mechanisms": {}},
        )
        return [
            record(t.experiment.arm, t.recipe.seed, 2.0, recipe=t.recipe.model_dump(mode="json"),
                   identity=t.recipe.identity, parameters=t.recipe.model["hidden_size"])
            .model_copy(update={"experiment": t.experiment})
            for t in list_trials(made, tmp_path)
        ]  # fmt: skip

    def test_runs_with_different_data_are_not_compared(self, tmp_path):
        one, other = ({"source": "x", "sha256": {"x": digest}} for digest in "ab")
        text = {"model": {}, "data": {"kind": "text"}, "training": {"steps": 1, "learning_rate": 0.1}}
        same = [record(arm, 0, 3.0, data=one, recipe=text) for arm in ("base", "good")]
        fine = record("mixed", 0, 3.0, data=other, recipe=text | {"data": {"kind": "prepared"}})
        assert not read_comparisons(saved(tmp_path / "one", [*same, fine]))[0].changed_data
        # A seed of both arms on another text is a part of their mean difference.
        later = [record(arm, 1, 3.0, data=other, recipe=text) for arm in ("base", "good")]
        assert (
            "had different data (base-0; base-1)"
            in read_comparisons(saved(tmp_path / "two", [*same, *later]))[0].changed_data
        )
        (found,) = read_comparisons(
            saved(tmp_path / "three", [*same, *(r.model_copy(update={"seed": 1}) for r in same)])
        )
        assert not found.changed_data
        rows = [r.model_copy(update={"data_order": digest}) for r, digest in zip(same, "ab", strict=True)]
        (found,) = read_comparisons(saved(tmp_path / "four", rows))
        assert found.changed_data.startswith("Runs of one seed read different rows (base-0; good-0)")
        held_out = record("worse", 0, 3.0, data=one | {"held_out_sha256": {"y": "b"}}, recipe=text)
        for number, wrong in enumerate([record("worse", 0, 3.0, data=other, recipe=text), held_out]):
            (found,) = read_comparisons(saved(tmp_path / f"{number}", [*same, wrong]))
            assert "had different data (base-0; worse-0), so their results cannot be compared" in found.changed_data
            assert state_answer(found) == found.changed_data
            assert found.changed_data in text_of(render_page([tell_story([found])]))

    def test_only_changed_fields_are_listed(self, trials, tmp_path):
        found = read_comparisons(saved(tmp_path, trials))
        part = next(p for p in tell_story(found).sections if p.title == "Changes")
        small, _, sizes = part.tables
        assert ["longer", "training.steps", "12", "20"] in small.rows
        assert ["longer", "training.max_grad_norm", "1.0", "null"] in small.rows
        assert {row[1].split(".")[0] for row in small.rows} == {"model", "training"}
        assert ["model.hidden_size", "16", "32"] in sizes.rows


def test_what_many_runs_say_is_said_once(tmp_path):
    slow = Notice(step=0, message="The run computes in fp32.")
    runs = [r.model_copy(update={"notices": [slow]}) for r in (*three("base", BASE), *three("good", GOOD))]
    runs[1].notices.append(Notice(step=7, message="the loss jumped"))
    told = list_warnings(read_comparisons(saved(tmp_path, runs)))
    assert [line for line in told if "fp32" in line] == [
        "base, seed 0 and 5 other runs, step 0: The run computes in fp32."
    ]
    assert "base, seed 1, step 7: the loss jumped" in told


class TestPage:
    @pytest.mark.slow
    def test_sections_in_order_and_every_link_has_its_place(self, tmp_path):
        sized = [r for i, size in enumerate("SML") for arm, results in (("base", BASE), ("good", GOOD))
                 for r in three(arm, [x - 0.3 * i for x in results], size=size, parameters=10 * 3**i)]  # fmt: skip
        noted = sized[0].model_copy(update={"skipped_steps": 2, "notices": [Notice(step=7, message="the loss jumped")]})
        tries = [record("base", 9, 3.0, phase="tuning", size="S")]
        found = read_comparisons(saved(tmp_path, [noted, *sized[1:], *tries]))
        one = tell_story(found)
        titles = list(dict.fromkeys(part.title.partition(",")[0] for part in one.sections))
        assert titles == ["Curves", "Results", "Differences", "Learning rates", "Scaling", "Speedup", "Recipe",
                          "Changes", "Data and environment", "Warnings (2)"]  # fmt: skip
        html = render_page([one])
        ids = re.findall(r'<section id="([^"]+)"', html)
        assert len(set(ids)) == len(ids)
        assert set(re.findall(r'href="#([^"]+)"', html)) <= set(ids)
        text = text_of(html)
        assert (
            text.index(one.question) < text.index(one.answers[0]) < text.index("held-out bits per byte at".capitalize())
        )
        assert "2 steps skipped" in text
        assert "step 7: the loss jumped" in text
        assert "good, S: equals a base with" in text
        assert "E + A/N^a" in text
        assert "interval: paired Student's t" in text

    @pytest.mark.slow
    def test_facts_about_several_folders_are_text(self):
        facts = {"train_tokens": 1003, "sha256": {"data/a": "5f", "data/b": "60"}, "held_out_sha256": "0a" * 32}
        table = data_table(SimpleNamespace(records=[record("base", 0, 3.0, data=facts)]))
        assert ["held out sha256", "0a" * 6] in table.rows  # 64 letters are too wide for an article
        assert ["train tokens", "1,003"] in table.rows
        assert ["sha256", "data/a: 5f, data/b: 60"] in table.rows

    def test_numbers_on_the_page_are_those_of_the_statistics(self, tmp_path):
        found = read_comparisons(saved(tmp_path, three("base", BASE) + three("good", GOOD)))[0]
        text = text_of(write_report(tmp_path).read_text())
        for summary in found.summaries:
            assert f"{summary.mean:.3f} ± {summary.spread:.3f}" in text
        good = found.summaries[1]
        assert f"{good.difference:+.3f} [{good.interval[0]:+.3f}, {good.interval[1]:+.3f}]" in text
        assert f"{good.paired.p:.2g}" in text

    @pytest.mark.slow
    def test_names_are_text_and_nothing_else(self, tmp_path):
        html = write_report(saved(tmp_path, three("base", BASE) + three(HOSTILE, GOOD))).read_text()
        page = Tags()
        page.feed(html)
        assert page.counts["script"] == 1, "our own"
        assert "<script>alert" not in html
        assert HOSTILE in text_of(html)

    def test_text_has_contrast_in_light_and_dark(self):
        css = (Path(write_report.__code__.co_filename).parents[1] / "templates" / "report.css").read_text()
        pairs = dict(re.findall(r"--(\w+): light-dark\((#\w{6}, #\w{6})\)", css))
        for scheme in (0, 1):
            colors = {name: rgb(pair.split(", ")[scheme]) for name, pair in pairs.items()}
            for ink in ("ink", "soft", "link", "better", "worse"):
                assert contrast(colors[ink], colors["paper"]) >= 4.5, ink
            assert contrast(colors["ink"], colors["tint"]) >= 4.5
            assert contrast(colors["soft"], colors["tint"]) >= 4.5
            # Links, and the text and border of buttons: pressed or not, on the page or on the tint of code.
            links = re.findall(r"(?:^a|\.anchor) \{ color: var\(--(\w+)\)", css, re.MULTILINE)
            button = css[css.index("button { font") :].partition("}")[0]
            inks = re.findall(r"[ ;]color: var\(--(\w+)\)|border: 1px solid var\(--(\w+)\)", button)
            used = {*links, *(name for pair in inks for name in pair if name)}
            assert used >= {"link", "ink", "soft"}
            assert min(contrast(colors[ink], colors[on]) for ink in used for on in ("paper", "tint")) >= 4.5


class TestImages:
    def images(self, arm, results):
        runs = three(arm, results, metric="accuracy", unit="images")
        for run in runs:
            for point in run.held_out:
                point.metrics["accuracy/top-5"] = 0.9
        return runs

    @pytest.mark.slow
    def test_no_word_of_tokens(self, tmp_path):
        """Sizes, curves, tables and sentences speak of images, and nothing of a cache."""
        folder = saved(tmp_path, self.images("base", [0.5, 0.6]) + self.images("good", [0.8, 0.9]))
        html = write_report(folder).read_text()
        text = text_of(html)
        assert "token" not in text
        assert "cache" not in text
        for words in ("400 training images", "images/s", "top-1 accuracy", "top-5 accuracy", "loss (nats per image)"):
            assert words in text
        assert "good 0.850 (+0.300) 0.850 (+0.300) 0.900 (+0.000)" in text
        figure = curves_picture(read_comparisons(folder)[0]).figure
        assert {axes.get_xlabel() for axes in figure.axes} <= {"training images", "training FLOPs"}

    def test_scaling_counts_images(self, tmp_path):
        sizes = [
            record("base", seed, loss + 0.01 * seed, metric="loss", unit="images", size=f"s{n}", tokens=n)
            for n, loss in ((100, 3.0), (200, 2.5), (400, 2.2), (800, 2.1))
            for seed in (0, 1)
        ]
        comparisons = read_comparisons(saved(tmp_path, sizes))
        part = scaling_part(comparisons, "scaling")
        (axes,) = part.picture.figure.axes
        table, predictions = part.tables
        assert [predictions.columns[1:], predictions.rows[0][1]] == [
            ["largest size", "largest size, E fitted"],
            "2.105",
        ]
        assert (table.columns[-1], len(table.rows[0])) == ("error", 5)
        assert "N: training images. Error: root mean square" in table.caption
        # A law passes through as many points as it has constants, which is no merit.
        (table,) = scaling_part(comparisons[:3], "scaling").tables
        assert (table.columns[-1], len(table.rows[0])) == ("a", 4)
        assert "no degrees of freedom left, so it is no evidence for the law's form" in table.caption
        assert "Error" not in table.caption
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("training images", "nats per image")


class Tags(HTMLParser):
    """Counts the elements of a page."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1


def rgb(color):
    return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def contrast(one, other):
    """WCAG 2.2's contrast ratio."""

    def luminance(color):
        linear = np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """A page in headless Chromium, driven by its DevTools protocol, with no name resolved."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
             "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}", "about:blank"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for line in self.process.stderr:
            if found := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
                self.port = found[1]
                break
        self.loop = asyncio.new_event_loop()
        self.number, self.events = 0, []
        self.loop.run_until_complete(self._connect())

    async def _connect(self):
        self.session = aiohttp.ClientSession()
        for _ in range(100):
            async with self.session.get(f"http://127.0.0.1:{self.port}/json") as answer:
                targets = [one for one in await answer.json(content_type=None) if one["type"] == "page"]
            if targets:
                break
            await asyncio.sleep(0.1)
        self.socket = await self.session.ws_connect(targets[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method, **arguments):
        return self.loop.run_until_complete(asyncio.wait_for(self._call(method, arguments), 60))

    async def _call(self, method, arguments):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": arguments})
        while True:
            answer = await self.socket.receive_json()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, page, width, scheme="light"):
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        self.run(
            "new Promise(done => { const wait = () => document.readyState === 'complete' && "
            "document.querySelector('footer') ? setTimeout(done, 300) : setTimeout(wait, 50); wait(); })"
        )

    def complaints(self, page):
        """Errors, dialogs, and requests of anything but the page."""
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Page.javascriptDialogOpening")
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [e for e in self.events if e["method"] in bad] + [
            url for url in urls if not url.startswith((page.as_uri(), "data:", "blob:"))
        ]

    def close(self):
        async def end():
            with contextlib.suppress(Exception):
                await self.socket.send_json({"id": 0, "method": "Browser.close"})
            await self.session.close()

        self.loop.run_until_complete(end())
        self.loop.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    global aiohttp
    aiohttp = pytest.importorskip("aiohttp")
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Fourteen arms, one of them with a hostile name, one diverged, one of other cost, and long names."""
    folder = tmp_path_factory.mktemp("runs")
    arms = [f"a rather long name of the arm number {i}" for i in range(10)]
    runs = three("base", BASE, steps=9) + three(HOSTILE, GOOD, steps=9) + three("dear", UNCLEAR, steps=9, parameters=30)
    runs += [record("wild", 0, math.nan, steps=9, status="diverged", error="step 3")]
    runs += [one for i, arm in enumerate(arms) for one in three(arm, [x + 0.031 * (i + 1) for x in GOOD], steps=9)]
    return write_report(saved(folder, runs))


@pytest.mark.slow
class TestBrowser:
    @pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1200, "light")])
    def test_as_it_is_opened_pictures_are_drawn_and_nothing_sticks_out(self, browser, page, width, scheme):
        browser.open(page, width, scheme)
        drawn = browser.run("[...document.querySelectorAll('figure img')].map(i => i.naturalWidth)")
        assert len(drawn) == 2
        assert min(drawn) > 900
        assert browser.run("document.documentElement.scrollWidth") <= width
        widths = browser.run("[...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().width)")
        assert max(widths) <= width
        curves, differences = browser.run("[...document.querySelectorAll('img')].map(i => i.alt)")
        assert "base from 3.889 at 100 to 3.000 at 900" in curves
        assert f"{HOSTILE} -0.497" in differences
        link = browser.run("document.querySelector('a[download]').href")
        recipe = base64.b64decode(link.partition("base64,")[2]).decode()
        assert recipe == browser.run("[...document.querySelectorAll('pre')].at(-1).textContent")
        assert browser.complaints(page) == []

    def test_verdicts_are_not_broken_inside_words_on_a_phone(self, browser, tmp_path):
        words = ["cannot", "be", "told", "does", "not", "hold", "identical"]
        rows = [["a claim of some length that takes its room", (word, "better"), "f" * 64 + " 0.1"] for word in words]
        table = PageTable("Claims", ["claim", "holds?", "by"], rows, text=True)
        story = Story("t", "T", "Is it better?", [], [Section("c", "Claims", tables=[table])])
        (tmp_path / "page.html").write_text(render_page([story]))
        browser.open(tmp_path / "page.html", 390)
        assert browser.run("document.documentElement.scrollWidth") <= 390
        lines = browser.run(
            "[...document.querySelectorAll('td.better')].map(cell => { const all = document.createRange();"
            "all.selectNodeContents(cell); return new Set([...all.getClientRects()].map(r => r.top)).size; })"
        )
        assert lines == [1] * len(words)

    @pytest.mark.slow
    def test_pictures_follow_the_theme(self, browser, page):
        style = "getComputedStyle(document.querySelector('img')).filter"
        for scheme, inverted in (("light", False), ("dark", True)):
            browser.open(page, 800, scheme)
            assert ("invert" in browser.run(style)) == inverted
            browser.run("document.getElementById('theme').click()")
            assert ("invert" in browser.run(style)) != inverted


FILES = ["report.html", "results.csv", *(f"tables/e-results.{suffix}" for suffix in ("csv", "md", "tex"))]
FILES += [f"figures/e-curves.{suffix}" for suffix in ("pdf", "svg", "png")]


@pytest.mark.parametrize("name", FILES)
def test_a_report_beside_a_file_of_the_users_writes_nothing(name, tmp_path):
    saved(tmp_path, [record(arm, seed, 1.0 + seed) for arm in ("base", "good") for seed in range(3)])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(HeadwaterError, match=f"{name}' exists, and headwater did not write it"):
        write_report(tmp_path)
    assert sorted(tmp_path.rglob("*")) == there
    assert (tmp_path / name).read_text() == "mine"


def test_a_file_in_the_way_of_a_reports_folder_is_a_sentence(tmp_path):
    saved(tmp_path, [record("base", 0, 1.0)])
    (tmp_path / "figures").write_text("mine")
    with pytest.raises(HeadwaterError, match=r"figures' cannot be created: File exists"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "figures").read_text() == "mine"
