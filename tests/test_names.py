"""What users call things, and what files of others call them, is text: no path, no markup, no formula, no command."""

import io

import pytest
import rich.console

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.trials import list_trials, make_slug
from headwater_lab.reports import read_comparisons, write_report
from headwater_lab.reports.pictures import curves_picture
from headwater_lab.reports.words import result_table
from headwater_lab.training.checkpoints import newest_checkpoint
from headwater_lab.training.records import StageRecord, read_record, write_record
from headwater_lab.util.names import file_name, is_file_name
from headwater_lab.util.terminal import Table, Terminal, literal
from test_report import BASE, GOOD, record, saved, three

PATHS = ["../x", "../../x", "/tmp/x", "a/b", "a\\b", "..", ".", ".hidden", "", " ", "x\0y", "x\ny", "x" * 300,
         "é" * 150, "\x1b[31mx", "\udcff"]  # fmt: skip
MARKUP = [
    "kv [keys]",
    "kv [values]",
    "a[/b]",
    "[bold]x",
    "[link=file:///etc]x[/link]",
    ":smile:",
    "[@click=x]y",
    r"a\[b]",
]


@pytest.mark.parametrize("name", PATHS)
def test_a_recipe_is_not_named_by_a_path(recipe, name):
    assert not is_file_name(name)
    with pytest.raises(HeadwaterError, match="name"):
        recipe(name=name)


@pytest.mark.parametrize("name", ["run", "kv-shifting 1.5", "Größe_2", "模型", "a+b (c)"])
def test_names_that_are_names_stay(recipe, name):
    assert recipe(name=name).name == file_name(name) == name


def test_whatever_a_text_is_its_file_is_one_and_its_own():
    names = {file_name(text) for text in [*PATHS, *MARKUP]}
    assert len(names) == len(PATHS) + len(MARKUP)
    assert all(map(is_file_name, names))
    assert all(is_file_name(make_slug(text)) for text in [*PATHS[:-1], *MARKUP])


def test_trials_of_any_arms_and_sizes_lie_below_their_folder(recipe, tmp_path):
    arms = {name: {} for name in ["base", "../x", "/tmp/y", "a/b", "..", "", "z" * 300, "a[/c]"]}
    made = recipe(compare={"baseline": "base", "seeds": [0], "arms": arms, "sizes": {"../../S": {}, "L" * 300: {}}})
    trials = list_trials(made, tmp_path / "out")
    for trial in trials:
        trial.folder.mkdir(parents=True)
        assert trial.folder.resolve().is_relative_to(tmp_path / "out")
        assert is_file_name(trial.recipe.name)
    assert len({trial.folder for trial in trials}) == len(trials) == 2 * len(arms)


@pytest.mark.slow
def test_a_report_writes_into_its_folder_alone(tmp_path):
    """Experiments and sizes of any name, all on one page."""
    folder = tmp_path / "a" / "b"
    runs = [record("base", 0, 3.0, name=name) for name in ("../x", "/tmp/x", "..", "", "x" * 300)]
    runs += [record("base", 0, 3.0, name="e", size=size) for size in ("../../S", "s" * 300)]
    saved(folder, runs)
    write_report(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b"}
    made = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "record.json")
    assert {path.parent for path in made} == {folder, folder / "tables", folder / "figures"}
    assert sum(path.suffix == ".svg" for path in made) == len(runs)


@pytest.mark.parametrize(
    "folder", ["../../x", "/etc", "stages/..", "stages/../../x", "../x", ".", "stages/a/b", "stages/"]
)
def test_a_record_names_no_stage_outside(tmp_path, folder):
    run = tmp_path / "runs" / "run"
    for place in (run, tmp_path / "x", tmp_path / "runs" / "x"):
        place.mkdir(parents=True)
    stage = StageRecord(name="s", folder="stages/00-start", parameters=1, steps=1, tokens=1, flops=1.0, seconds=1.0,
                        total_tokens=1, total_flops=1.0, result=None)  # fmt: skip
    one = record("base", 0, 3.0).model_copy(update={"stages": [stage.model_copy(update={"folder": folder})]})
    write_record(one, run)
    with pytest.raises(HeadwaterError, match="folder"):
        newest_checkpoint(run)
    for allowed in ("stages/01-grown", "../stages/start-0-abcdef12"):
        write_record(one.model_copy(update={"stages": [stage.model_copy(update={"folder": allowed})]}), run)
        assert read_record(run).stages[0].folder == allowed


def printed(console, *things):
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


@pytest.mark.parametrize("name", MARKUP)
def test_markup_is_text_in_tables_on_any_console_and_in_sentences(name):
    made = Table(title=name, caption=name)
    made.add_column(name)
    made.add_row(name)
    for console in (rich.console.Console(file=io.StringIO(), width=100), Terminal(file=io.StringIO(), width=100)):
        assert printed(console, made).count(name) == 4
    assert printed(Terminal(file=io.StringIO(), width=100), f"written to {name}") == f"written to {name}\n"


@pytest.mark.parametrize("sign", ["\x1b]0;title\x07", "\x1b[2J", "\r", "\x9b31m", "\u202e", "\udcff", "\x00", "\x7f"])
def test_no_control_character_reaches_a_terminal(sign):
    made = Table(title=sign)
    made.add_column(sign)
    made.add_row(f"x{sign}y")
    shown = printed(Terminal(file=io.StringIO(), width=100, force_terminal=True, color_system=None), made, f"a{sign}b")
    assert not {one for one in sign if not one.isprintable()} & set(shown)
    assert literal(sign) in shown
    shown.encode()
    widths = {len(line) for line in shown.splitlines() if "│" in line}
    assert len(widths) == 1, "what stands for it has a width"


def test_the_command_line_shows_names_whole(tmp_path, run, monkeypatch):
    names = [*MARKUP, "esc\x1b[31m", "$x$ and $\\frac{", "_hidden"]
    folder = saved(tmp_path / "a[", three("base", BASE) + [one for name in names for one in three(name, GOOD)])
    code, out, _ = run("report", folder)
    assert code == 0
    joined = " ".join(out.split())
    for name in names:
        assert literal(name) in joined
    assert "\x1b" not in out
    assert f"report: {folder}/report.html" in out.replace("\n", "")
    place = tmp_path / "a[/b]"
    place.mkdir()
    write_record(record("base", 0, 3.0), place)
    code, out, _ = run("runs", place)
    assert code == 0
    code, _, err = run("report", tmp_path / "nothing\x1b[31m[/b]")
    assert code == 2
    assert "[/b]" in err
    assert "\x1b" not in err


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["$x$", "$\\frac{$", "a$b$c", "_under", "x\x1by", "line\nend"])
def test_pictures_show_names_as_they_are(tmp_path, name):
    found = read_comparisons(saved(tmp_path, three("base", BASE) + three(name, GOOD)))[0]
    picture = curves_picture(found).figure
    picture.savefig(io.BytesIO(), format="png")
    assert literal(name) in [text.get_text() for text in picture.axes[0].get_legend().get_texts()]


def test_the_table_of_a_report_is_literal_in_the_callers_console(tmp_path):
    records = three("base", BASE) + three("kv [keys]", GOOD) + three("kv [values]", GOOD)
    found = read_comparisons(saved(tmp_path, records))[0]
    shown = printed(rich.console.Console(file=io.StringIO(), width=200), result_table(found))
    assert "kv [keys]" in shown
    assert "kv [values]" in shown
