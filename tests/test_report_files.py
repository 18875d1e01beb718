"""Numbers, tables and figures beside a report's page, from a small comparison that is trained, and read back."""

import csv
import io
import math
import re
import shutil
import subprocess
from contextlib import suppress

import pytest
from markdown_it import MarkdownIt
from PIL import Image

import headwater_lab as lab
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.trials import list_trials
from headwater_lab.data.tokenizer import train_tokenizer
from headwater_lab.reports import FORMATS, read_comparisons, write_report
from headwater_lab.reports.comparison import group_by_experiment
from headwater_lab.reports.curves import choose_y_limits, make_arm_curves
from headwater_lab.reports.numbers import list_arms, list_evaluations
from headwater_lab.reports.page import scaling_part, tell_story
from headwater_lab.reports.pictures import curves_picture
from headwater_lab.reports.table_formats import PageTable, write_csv_table, write_latex, write_markdown
from headwater_lab.training.loop import train
from headwater_lab.training.records import write_record
from test_report import BASE, GOOD, record, saved, three

PLAIN = "van_illa, 100% & #1|x"
SHIFT = 'kv "shift", $x^2$ \\x ~ {a} -- [b] <i> `c` *d* ' + "'e' ,, [f](g)"
SIGNS = {
    r"\textbackslash{}": "\\", r"\textasciicircum{}": "^", r"\textasciitilde{}": "~", r"\textbar{}": "|",
    r"\textless{}": "<", r"\textgreater{}": ">", r"\textquotesingle{}": "'", r"\textasciigrave{}": "`",
    r"\char34{}": '"', r"$\pm$": "±", r"$\times$": "×", r"\ldots{}": "…", r"$\tau$": "τ", "$-$": "-",
    r"\textendash{}": "–", r"$\lambda$": "λ", r"$\Omega$": "Ω",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(recipe, corpus, tmp_path_factory):
    """Three arms with difficult names, one of which diverges, at three sizes."""
    subwords = tmp_path_factory.mktemp("subwords")
    train_tokenizer([file.read_text() for file in sorted(corpus.iterdir())], 400).save_pretrained(subwords)
    made = recipe(
        name="tiny_1",
        title="50 % of #1 & _all_",
        data={"tokenizer": str(subwords)},
        model={"mechanisms": {}, "num_hidden_layers": 1},
        training={"steps": 12, "batch_size": 4, "warmup_steps": 0},
        reporting={"evaluate_every": 4, "save_every": None},
        compare={
            "baseline": PLAIN,
            "seeds": [0, 1],
            "arms": {
                PLAIN: {},
                SHIFT: {"model": {"mechanisms": {"kv_shift": {}}}},
                "wild": {"training": {"learning_rate": 1e9, "max_grad_norm": None}},
            },
            "sizes": {name: {"model": {"hidden_size": width}} for name, width in (("S", 8), ("M", 16), ("L", 32))},
        },
    )
    folder = tmp_path_factory.mktemp("compared")
    for trial in list_trials(made, folder):
        for job in trial.jobs:
            with suppress(HeadwaterError):  # it diverges
                train(job.recipe, job.folder, experiment=job.experiment)
    write_report(folder)
    return folder


def read_csv(file):
    with open(file, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def list_tables(folder):
    """The tables of a folder's report, by the names of their files."""
    stories = map(tell_story, group_by_experiment(read_comparisons(folder)))
    sections = [section for story in stories for section in story.sections]
    return {"-".join(filter(None, (s.file, table.name))): table for s in sections for table in s.tables}


def texts_of(table):
    cells = [list(table.columns), *([c if isinstance(c, str) else c[0] for c in row] for row in table.rows)]
    return [[" ".join(cell.split()) for cell in row] for row in cells]


def read_markdown(text):
    """The cells of the only table, as a reader of Markdown sees them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    rows = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows:
            assert {child.type for child in token.children} <= {"text", "text_special"}, token.content
            rows[-1].append("".join(child.content for child in token.children))
    return rows


def read_latex(text):
    """The cells of the tabulars, as a reader of LaTeX sees them: lines of cells, escapes, then braces."""
    text = re.sub(r"(?s)\\begin\{tabular\}\[[bt]\]\{@\{\}[lr]@\{\}\}(.*?)\\end\{tabular\}", r"{\1}", text)
    blocks = []
    for body in re.findall(r"(?s)\\begin\{tabular\}\{[lr]+\}\n(.*?)\\end\{tabular\}\}", text):
        lines = [line.removesuffix(r" \\") for line in body.splitlines() if line != r"\hline"]
        blocks.append(
            [[_read_latex_cell(cell) for cell in re.split(r"(?<!\\) ?& ?|(?<=\\\\)&", line)] for line in lines]
        )
    assert all(row[0] == rows[0][0] for rows in zip(*blocks, strict=True) for row in rows)
    return [[rows[0][0], *(cell for row in rows for cell in row[1:])] for rows in zip(*blocks, strict=True)]


def _read_latex_cell(cell):
    """Read a cell letter by letter."""
    text = ""
    while cell:
        cell = cell.removeprefix(r"\\ ")  # before the next line of the cell
        sign = next((sign for sign in SIGNS if cell.startswith(sign)), None)
        if sign is not None:
            text, cell = text + SIGNS[sign], cell.removeprefix(sign)
        elif cell[0] == "\\":
            text, cell = text + cell[1], cell[2:]
            assert text[-1] in "#$%&_{}", cell
        else:
            assert cell[0] not in "#$%&_~^\\", cell
            text, cell = text + cell[0].strip("{}"), cell[1:]
    return text


def test_numbers_are_read_back(folder):
    rows = read_csv(folder / "results.csv")
    expected = [row for comparison in read_comparisons(folder) for row in list_arms(comparison)]
    assert {row["size"] for row in rows} == {"S", "M", "L"}
    assert {row["arm"] for row in rows} == {PLAIN, SHIFT, "wild"}
    for row, arm in zip(rows, expected, strict=True):
        for name, cell in arm.items():
            text = row[name]
            assert text == ("" if cell is None else str(cell))
            assert not isinstance(cell, float) or float(text) == cell
    wild, shift = ([row for row in rows if row["arm"] == arm] for arm in ("wild", SHIFT))
    assert [(row["mean"], row["difference"], row["verdict"], row["diverged"]) for row in wild] == [
        ("", "", "diverged", "2")
    ] * 3
    for row in shift:
        low, difference, high = (float(row[name]) for name in ("low", "difference", "high"))
        assert low < difference < high
        assert float(row["level"]) == pytest.approx(0.95)
        base = next(r for r in rows if (r["arm"], r["size"]) == (PLAIN, row["size"]))
        assert float(row["mean"]) - float(base["mean"]) == pytest.approx(difference)
    assert len(read_csv(folder / "runs.csv")) == 18
    assert {row["status"] for row in read_csv(folder / "runs.csv") if row["arm"] == "wild"} == {"diverged"}
    evaluations = read_csv(folder / "evaluations.csv")
    assert len(evaluations) == sum(len(list_evaluations(c)) for c in read_comparisons(folder))
    assert {row["step"] for row in evaluations if row["arm"] == PLAIN} == {"4", "8", "12"}
    assert any(not math.isfinite(float(row["loss"])) for row in evaluations if row["arm"] == "wild")


def test_tables_are_read_back(folder):
    tables = list_tables(folder)
    assert {"tiny_1-S-results", "tiny_1-S-differences", "tiny_1-scaling", "tiny_1-changes-sizes"} <= tables.keys()
    files = {path.name for path in (folder / "tables").iterdir()}
    assert files == {f"{name}.{suffix}" for name in tables for suffix in ("csv", "md", "tex")}
    for name, table in tables.items():
        file = folder / "tables" / name
        assert read_markdown(file.with_suffix(".md").read_text()) == texts_of(table)
        assert read_latex(file.with_suffix(".tex").read_text()) == texts_of(table)
        rows = read_csv(file.with_suffix(".csv"))
        if not table.numbers:
            assert [row["name"] for row in rows] == [row[0] for row in table.rows]
            assert list(rows[0])[2:] == list(table.columns[1:])


def test_the_points_and_laws_of_the_scaling_figure_are_numbers(folder):
    rows = read_csv(folder / "tables" / "tiny_1-scaling.csv")
    assert [(row["arm"], row["size"]) for row in rows] == [(arm, size) for arm in (PLAIN, SHIFT) for size in "SML"]
    runs = read_csv(folder / "runs.csv")
    for row in rows:
        losses = [float(r["loss"]) for r in runs if (r["arm"], r["size"]) == (row["arm"], row["size"])]
        assert float(row["loss"]) == pytest.approx(sum(losses) / len(losses))
        assert row["error"] == ""  # a law through three sizes leaves nothing to tell its error from
        law = float(row["e"]) + float(row["a"]) / float(row["parameters"]) ** float(row["exponent"])
        assert law == pytest.approx(float(row["loss"]), rel=0.01)
        assert (row["more"] == "") == (row["arm"] == PLAIN)


def test_plain_numbers_of_csv_have_no_signs():
    table = PageTable(
        "", ["", "a", "a"], [["1,000", "61,632", "+0.5"], ["x", "1e+09", "2, 3"], ["y", "[+1, +2]", "-1"]]
    )
    lines = list(csv.reader(io.StringIO(write_csv_table(table, "t"))))
    assert lines == [
        ["table", "name", "a", "a"],
        ["t", "1,000", "61632", "0.5"],
        ["t", "x", "1e+09", "2, 3"],
        ["t", "y", "[+1, +2]", "-1"],
    ]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_latex_compiles(folder, tmp_path):
    odd = PageTable("% \n \\end{x}'", ["", *"abc"], [["[a]", "*", "-1", "§ é"], ["*b*", "\\", "--,,''``", "a\nb\x1b"]])
    wide = PageTable("", [f"the long name of column {i}" for i in range(30)], [["W" * 40, *["W [1, 2]" * 9] * 29]])
    for name, table in {"odd": odd, "wide": wide}.items():
        (tmp_path / f"{name}.tex").write_text(text := write_latex(table, name))
        assert read_latex(text) == texts_of(table) or name == "odd"
    assert text.count("resizebox") > 10, "one would be too small to read"
    assert "% % \\end{x}'" in (tmp_path / "odd.tex").read_text().splitlines()
    inputs = "\n\n".join(f"\\input{{{file}}}" for file in [*sorted((folder / "tables").glob("*.tex")), "odd", "wide"])
    (tmp_path / "all.tex").write_text(
        f"\\documentclass{{article}}\\usepackage{{graphicx}}\n\\begin{{document}}\n{inputs}\n\\end{{document}}\n"
    )
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "all.tex"]
    compiled = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert compiled.returncode == 0, compiled.stdout[-2000:]
    assert "Overfull" not in compiled.stdout
    assert (tmp_path / "all.pdf").read_bytes().startswith(b"%PDF")


def test_markup_and_lines_in_cells_are_text():
    cells = ["a | b \\| c", "<b>&amp;</b>", "[x](http://y)", "![x][y]", "*a* _b_ `c` ~~d~~ $e$", "two\nlines"]
    table = PageTable("<script>\n| a |", cells, [cells])
    text = write_markdown(table, "t")
    assert read_markdown(text) == texts_of(table)
    assert "<script>" not in MarkdownIt().render(text)


def test_other_letters_are_said_to_need_another_latex():
    assert "lualatex" in write_latex(PageTable("", ["", "量"], [["a", "1"]]), "t").partition("\n")[0]
    assert "lualatex" not in write_latex(PageTable("", ["", "é ± τ"], [["λ of Ω", "1"]]), "t")
    assert read_latex(write_latex(PageTable("", ["", "τ"], [["λ of Ω", "1"]]), "t"))[1] == ["λ of Ω", "1"]


def test_figures_are_of_every_format(folder):
    names = [f"tiny_1-{size}-{kind}" for size in "SML" for kind in ("curves", "differences")]
    names += ["tiny_1-scaling", "tiny_1-speedup"]
    figures = folder / "figures"
    assert {path.name for path in figures.iterdir()} == {
        f"{n}.{suffix}" for n in names for suffix in ("pdf", "svg", "png")
    }
    for name in names:
        pdf = (figures / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF-")
        assert pdf.rstrip().endswith(b"%%EOF")
        assert b"/Type3" not in pdf
        assert (figures / f"{name}.svg").read_text().startswith("<?xml")
        with Image.open(figures / f"{name}.png") as picture:
            assert picture.width > 800
            assert len(set(picture.convert("L").tobytes())) > 10


def test_the_axes_of_a_scaling_law_have_plain_numbers(folder):
    figure = scaling_part(read_comparisons(folder), "x").picture.figure
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in axis.get_majorticklabels()]
    assert len(labels) > 5
    assert all(re.fullmatch(r"[\d.]+( [kMG])?", label) for label in labels), labels


def test_the_same_records_give_the_same_bytes(folder):
    def read_all():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.parent.name in ("tables", "figures")}

    first, page = read_all(), (folder / "report.html").read_bytes()
    assert len(first) >= 60
    write_report(folder)
    assert read_all() == first
    assert (folder / "report.html").read_bytes() == page


def test_curves_are_held_out_unless_only_the_end_was_evaluated(tmp_path):
    few, single = (
        saved(tmp_path / f"{n}", three("base", BASE, steps=n) + three("good", GOOD, steps=n)) for n in (2, 1)
    )
    assert make_arm_curves(read_comparisons(few)[0]).kind == "held_out"
    assert "evaluate_every" not in curves_picture(read_comparisons(few)[0]).caption
    picture = curves_picture(read_comparisons(single)[0])
    assert picture.figure.axes[0].get_ylabel() == "training loss (nats per token)"
    assert "Only the end was evaluated; reporting.evaluate_every" in picture.caption


def test_held_out_curves_are_whole_and_rises_before_a_divergence_are_not(tmp_path):
    runs = three("base", BASE, steps=20) + three("good", GOOD, steps=20)
    found = read_comparisons(saved(tmp_path / "calm", runs))[0]
    curves = make_arm_curves(found)
    highest = max(max(run.values) for runs, _ in curves.by_arm.values() for run in runs)
    assert choose_y_limits(curves, True)[1] > highest
    assert "left out" not in curves_picture(found).caption
    wild = record("wild", 0, 1e9, steps=20, status="diverged", error="x")
    wild.held_out[0].metrics["bits_per_byte"] = 4.0
    found = read_comparisons(saved(tmp_path / "wild", [*runs, wild]))[0]
    assert choose_y_limits(make_arm_curves(found), True)[1] < 5
    assert "Points above the axis are left out." in curves_picture(found).caption


def test_only_the_formats_that_are_named(tmp_path, run):
    folder = saved(tmp_path / "runs", three("base", BASE) + three("good", GOOD))
    code, _, stderr = run("report", folder, "--format", "latex, svg")
    assert code == 0, stderr
    suffixes = {path.suffix for path in folder.rglob("*") if path.parent.name in ("tables", "figures")}
    assert suffixes == {".tex", ".svg"}
    assert (folder / "results.csv").is_file()
    before = sorted(folder.rglob("*"))
    for wrong in ("latx", ""):
        code, _, stderr = run("report", folder, "--format", wrong)
        assert (code, f"There is no format {wrong!r}" in stderr) == (2, True), stderr
    assert sorted(folder.rglob("*")) == before
    assert lab.load_results(folder).report(["md"]) == folder / "report.html"
    assert (folder / "tables" / "e-results.md").is_file()


def test_comparisons_whose_files_would_have_the_same_names_are_refused(tmp_path):
    saved(tmp_path, [record("base", 0, 3.0, name="e", size="S"), record("base", 0, 3.0, name="e-S")])
    with pytest.raises(HeadwaterError, match="the same file names; report their folders separately"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_run_alone_and_several_folders(tmp_path, run):
    single = record("alone_%", 0, 2.0).model_copy(update={"experiment": None})
    (tmp_path / "run").mkdir()
    write_record(single, tmp_path / "run")
    compared = saved(tmp_path / "compared", three("base", BASE) + three("good", GOOD))
    code, out, stderr = run("report", tmp_path / "run", compared, "--format", "csv")
    assert code == 0, stderr
    assert "Nothing can be compared with alone_%-0: there is no other arm." in " ".join(out.split())
    assert [row["mean"] for row in read_csv(tmp_path / "run" / "results.csv")] == ["2.0"]
    assert len(read_csv(compared / "results.csv")) == 2
    lab.load_results(tmp_path / "run").report()
    (figure,) = (tmp_path / "run" / "figures").glob("*.pdf")
    assert re.fullmatch(r"[\w.-]+", figure.name), "LaTeX reads % as a comment"
    assert {*FORMATS} == {"csv", "md", "latex", "pdf", "svg", "png"}
