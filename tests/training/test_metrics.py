"""What a run's folder keeps when its files are damaged, and what is said of it."""

import json
import os

import pytest
from trials import train_until

from headwater.util.errors import HeadwaterError
from headwater_lab.training.journal import Metrics, list_runs
from headwater_lab.training.loop import train
from headwater_lab.training.records import CurvePoint, HeldOutPoint, Notice, SpeedPoint, read_record, write_record
from test_report import record

POINTS = [
    point
    for step in range(1, 13)
    for point in (
        CurvePoint(
            step=step, tokens=100 * step, loss=1 / step, learning_rate=1e-3, gradient_norm=1.0, flops=1e6 * step
        ),
        HeldOutPoint(step=step, tokens=100 * step, metrics={"bits_per_byte": 2 / step, "loss": float("nan")}),
        SpeedPoint(step=step, tokens_per_second=1e4, data_wait_fraction=0.01),
        Notice(step=step, message="Schritt „ü“\n\u2028 [keys] \udcff"),
    )
]


def written(folder):
    folder.mkdir(exist_ok=True)
    metrics = Metrics(folder, 100, "bits_per_byte")
    for point in POINTS:
        metrics.add_point(point)
    return folder / "metrics.jsonl"


def read(folder, step=100):
    return Metrics(folder, step, "bits_per_byte", writes=False)


def same(one, other):
    return repr(one) == repr(other)  # a NaN is not equal to itself


def test_points_come_back_and_a_reader_needs_nothing_but_json(tmp_path):
    file = written(tmp_path)
    found = read(tmp_path)
    assert same(found.points, POINTS)
    assert found.damage is None
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines[:4]] == ["curve", "held_out", "speed", "notice"]
    assert len(lines) == len(POINTS)
    # Written again with other spaces, as tools do, it says the same.
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    assert same(read(tmp_path).points, POINTS)


def test_zeroed_pages_and_cut_ends(tmp_path):
    file = written(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:500] + bytes(600) + whole[1100:])
    assert len(read(tmp_path).points) > len(POINTS) - 12
    assert "damaged" in read(tmp_path).damage
    file.write_bytes(whole[:-7])  # a process that was killed as it wrote
    found = read(tmp_path)
    assert same(found.points, POINTS[:-1])
    assert found.damage is None
    file.write_bytes(whole)
    file.write_text(file.read_text().replace("bits_per_byte", "bits_per_bite", 1))
    assert len(read(tmp_path).points) == len(POINTS) - 1
    # A last line that is whole but for its newline counts among the lines.
    file.write_text(file.read_text().splitlines(keepends=True)[1].rstrip("\n"))
    assert read(tmp_path).damage == "metrics.jsonl is damaged: line 1 of 1 is left out"


@pytest.mark.parametrize(
    "line",
    [b"5", b"[]", b"{}", b'{"kind": []}', b'{"kind": "curve"}', b"\xff\xfe", b"[" * 100_000,
     b'{"kind": "notice", "step": ' + b"9" * 5000 + b', "message": ""}'],
)  # fmt: skip
def test_whatever_stands_in_a_line_the_others_are_read(tmp_path, line):
    file = written(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:5], line + b"\n", *lines[5:]]))
    found = read(tmp_path)
    assert same(found.points, POINTS)
    assert "line 6 of" in found.damage


def test_a_damaged_log_is_gone_on_with_and_told(recipe, tmp_path):
    values = recipe(training={"steps": 4}, reporting={"log_every": 1, "save_every": 2})
    train_until(2, values, tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0].replace(b"loss", b"lotz"), *lines[1:]])
    file.write_bytes(damaged)
    told = []
    made = train(values, tmp_path / "run", resume=True, on_event=lambda step, point: told.append(point))
    assert [point.step for point in made.curve] == [2, 3, 4]
    assert any("metrics.jsonl is damaged: line 1" in notice.message for notice in made.notices)
    assert any(isinstance(point, Notice) and "damaged" in point.message for point in told)
    assert read(tmp_path / "run").damage is None


def hurt(values, *keys, to):
    *path, last = keys
    inner = values
    for key in path:
        inner = inner[key]
    inner[last] = to
    return json.dumps(values).encode()


DAMAGES = {
    "empty": lambda v: b"",
    "cut": lambda v: json.dumps(v).encode()[:300],
    "no JSON": lambda v: b"\x00" * 4096,
    "no UTF-8": lambda v: json.dumps(v).encode().replace(b"base", b"ba\xff\xfe"),
    "a list": lambda v: b"[]",
    "nested": lambda v: b'{"name": ' + b"[" * 100_000,
    "nested recipe": lambda v: hurt(v, "recipe", to={}).replace(b'"recipe": {}', b'"recipe": ' + b'{"a":' * 5000),
    "an integer of 5,000 digits": lambda v: json.dumps(v).encode().replace(b'"seed": 0', b'"seed": ' + b"9" * 5000),
    "an integer beyond any count": lambda v: hurt(v, "tokens", to=10**30),
    "NaN steps": lambda v: hurt(v, "recipe", "training", "steps", to=float("nan")),
    "text for a number": lambda v: hurt(v, "seconds", to="long"),
    "no recipe": lambda v: hurt(v, "recipe", to={}),
    "a recipe's section as text": lambda v: hurt(v, "recipe", "training", to="steps"),
    "another metric": lambda v: hurt(v, "metric", to="beauty"),
    "another schema": lambda v: hurt(v, "schema_version", to=1),
    "an unknown field": lambda v: hurt(v, "surprise", to=1),
    "negative tokens": lambda v: hurt(v, "tokens", to=-1),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_record_is_one_sentence_and_hides_no_other_run(tmp_path, what, run):
    for name in ("whole", "other"):
        (tmp_path / name).mkdir()
        write_record(record("base", 0, 3.0), tmp_path / name)
    file = tmp_path / "other" / "record.json"
    file.write_bytes(DAMAGES[what](json.loads(file.read_bytes())))
    with pytest.raises(HeadwaterError, match=r"other/record\.json") as caught:
        read_record(tmp_path / "other")
    assert "\n" not in str(caught.value)
    code, out, err = run("runs", tmp_path)
    assert code == 0
    assert "whole" in out
    assert "other/record.json" in err
    assert run("report", tmp_path)[0] == 2


def test_folders_in_the_places_of_files_and_what_cannot_be_read(tmp_path, run):
    for name in ("whole", "log", "bytes"):
        (tmp_path / name).mkdir()
        write_record(record("base", 0, float("nan")), tmp_path / name)
    (tmp_path / "place" / "record.json").mkdir(parents=True)
    (tmp_path / "log" / "metrics.jsonl").mkdir()
    (tmp_path / "bytes" / "metrics.jsonl").write_bytes(b"\xff\n")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "record.json").symlink_to("record.json")
    told = []
    found = list_runs(tmp_path, told.append)
    assert {one.folder.name for one in found} == {"whole", "log", "bytes"}
    assert [sum(name in line for line in told) for name in ("/place/", "/log/", "/bytes", "/loop/")] == [1, 1, 1, 1]
    code, out, _ = run("runs", tmp_path)
    assert code == 0
    assert out.count("nan") == 6


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_folder_that_may_not_be_read_is_told(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    told = []
    assert list_runs(tmp_path, told.append) == []
    assert "closed" in told[0]
