"""What a command may write: a folder that no other command writes, and files that are headwater's or new."""

import errno
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import headwater_lab as lab
from headwater.util.errors import HeadwaterError
from headwater.util.files import check_free, explain_absence, replace_file, replace_text
from headwater_lab.util import output_folder, outputs
from headwater_lab.util.output_folder import LOCK, keep_contents, occupy_folder

EVALUATION = {"headwater": "1", "format": 1, "rows": [], "models": {}}


class TestFiles:
    def test_json_of_headwaters_is_replaced(self, tmp_path):
        file = tmp_path / "file.json"
        outputs.write_json(file, EVALUATION)
        outputs.write_json(file, EVALUATION | {"rows": [1]})
        assert json.loads(file.read_text())["rows"] == [1]

    @pytest.mark.parametrize("content", ["notes", "{}", "[1]", "", "# headwater", '{"model_type": "headwater"}'])
    def test_what_is_not_headwaters_stays(self, tmp_path, content):
        (file := tmp_path / "file").write_text(content)
        figure = pytest.importorskip("matplotlib.figure").Figure()
        for write in (
            lambda: outputs.write_json(file, EVALUATION),
            lambda: outputs.write_text(file, "headwater"),
            lambda: outputs.save_figure(figure, file, 50),
        ):
            with pytest.raises(HeadwaterError, match="choose another name"):
                write()
        assert file.read_text() == content
        assert os.listdir(tmp_path) == ["file"]

    @pytest.mark.parametrize("kind", ["png", "svg", "pdf", "eps", "ps"])
    def test_a_picture_of_headwaters_is_replaced_and_anothers_is_not(self, tmp_path, kind):
        figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1))
        file = tmp_path / f"file.{kind}"
        for _ in range(2):
            outputs.save_figure(figure, file, 50)
        figure.savefig(file)
        with pytest.raises(HeadwaterError, match="did not write it"):
            outputs.save_figure(figure, file, 50)

    def test_links_folders_and_devices_are_refused(self, tmp_path):
        outputs.write_json(tmp_path / "ours", EVALUATION)
        (tmp_path / "link").symlink_to("ours")
        (tmp_path / "loop").symlink_to("loop")
        os.mkfifo(tmp_path / "pipe")
        for file in (tmp_path / "link", tmp_path / "loop", tmp_path / "pipe", tmp_path, Path("/dev/null")):
            with pytest.raises(HeadwaterError, match="choose another name"):
                outputs.check_replaceable(file)

    def test_commands_refuse_before_they_work(self, tmp_path, run):
        for name in ("notes.md", "config.json"):
            (file := tmp_path / name).write_text("precious\n")
            code, _, stderr = run("evaluate", tmp_path / "no-model", "--text", file, "--out", file)
            assert (code, "choose another name" in stderr) == (2, True), stderr
            assert file.read_text() == "precious\n"

    def test_a_checkpoint_takes_no_other_files(self, tmp_path, run):
        (tmp_path / "SHA256SUMS").touch()
        code, _, stderr = run("evaluate", "no-model", "--text", "text", "--out", tmp_path / "evaluation.json")
        assert (code, "is a checkpoint" in stderr) == (2, True), stderr

    def test_two_writers_have_temporary_files_of_their_own(self, tmp_path):
        with replace_file(tmp_path / "file") as first, replace_file(tmp_path / "file") as second:
            assert first != second
            first.write_text("a")
            second.write_text("b")
        assert os.listdir(tmp_path) == ["file"]

    def test_a_full_disk_names_the_file_and_loses_nothing(self, tmp_path, monkeypatch):
        replace_text(file := tmp_path / "file", "before")

        def full(self, *_, **__):
            self.touch()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match=str(file)):
            replace_text(file, "after")
        with pytest.raises(HeadwaterError, match=r"x\.json.*disk is full"):
            outputs.write_json(tmp_path / "x.json", EVALUATION)
        monkeypatch.undo()
        assert file.read_text() == "before"
        assert os.listdir(tmp_path) == ["file"]


class TestFolders:
    def test_what_is_refused_leaves_nothing(self, tmp_path):
        def refused():
            with occupy_folder(tmp_path / "a" / "b"):
                (tmp_path / "a" / "b" / "c").mkdir()
                raise HeadwaterError("no")

        with pytest.raises(HeadwaterError, match="no"):
            refused()
        assert os.listdir(tmp_path) == []

    def test_a_folder_that_was_there_stays_as_it_was(self, tmp_path):
        (tmp_path / "mine").write_text("kept")

        def refused():
            with occupy_folder(tmp_path):
                (tmp_path / "theirs").write_text("new")
                raise HeadwaterError("no")

        with pytest.raises(HeadwaterError, match="no"):
            refused()
        assert os.listdir(tmp_path) == ["mine"]

    def test_what_has_begun_stays_in_all_folders_around_it(self, tmp_path):
        def fails():
            with occupy_folder(tmp_path / "out"):
                with occupy_folder(tmp_path / "out" / "stage"):
                    (tmp_path / "out" / "stage" / "record").touch()
                    keep_contents(tmp_path / "out" / "stage")
                raise KeyError

        with pytest.raises(KeyError):
            fails()
        assert (tmp_path / "out" / "stage" / "record").exists()

    def test_another_process_waits_or_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(output_folder, "PATIENCE", 0)
        script = (
            "import sys; from pathlib import Path; from headwater_lab.util.output_folder import occupy_folder\n"
            "with occupy_folder(Path(sys.argv[1])):\n"
            "    print('in', flush=True); sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "out")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdin is not None
            assert other.stdout.readline() == b"in\n"
            with pytest.raises(HeadwaterError, match="Another command is writing"), occupy_folder(tmp_path / "out"):
                raise AssertionError("not reached")
            assert (tmp_path / "out" / LOCK).exists()
            other.stdin.close()
            monkeypatch.setattr(output_folder, "PATIENCE", 60)
            with occupy_folder(tmp_path / "out"):
                pass
        assert os.listdir(tmp_path / "out") == []

    def test_the_one_that_waited_for_a_refused_one_has_the_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(output_folder, "PATIENCE", 60)
        out, entered, leave = tmp_path / "out", threading.Event(), threading.Event()

        def refused():
            with suppress(HeadwaterError), occupy_folder(out):
                entered.set()
                leave.wait(60)
                raise HeadwaterError("no")

        thread = threading.Thread(target=refused)
        thread.start()
        assert entered.wait(60)
        threading.Timer(0.1, leave.set).start()
        with occupy_folder(out, empty=True):
            thread.join()
            (out / "mine").touch()
        assert os.listdir(out) == ["mine"]

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path, monkeypatch):
        def refuse(lock, timeout):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(output_folder.FileLock, "acquire", refuse)
        with (
            pytest.raises(HeadwaterError, match=r"run' cannot be written: Read-only file system; choose another --out"),
            occupy_folder(tmp_path / "run"),
        ):
            pass

    def test_a_locked_folder_is_locked_in_the_same_thread_too(self, tmp_path, monkeypatch):
        monkeypatch.setattr(output_folder, "PATIENCE", 0)

        def twice():
            with occupy_folder(tmp_path), occupy_folder(tmp_path, nested=True), occupy_folder(tmp_path):
                raise AssertionError("not reached")

        with pytest.raises(HeadwaterError, match="Another"):
            twice()


class TestAddresses:
    @pytest.mark.parametrize("address", ["s3://bucket/run", "gs://b/r", "hf://datasets/a/b", "file:///tmp/x", "S3://b"])
    def test_commands_refuse_them_before_anything_is_written(self, tmp_path, run, monkeypatch, address):
        monkeypatch.chdir(tmp_path)
        for command in (
            ("train", "demo/induction", "--out", address),
            ("train", "demo/induction", f"start.checkpoint={address}"),
            ("train", address),
            ("train", "demo/induction", f"data.source={address}"),
            ("compare", "demo/induction", "--out", address),
            ("data", "prepare", address, "--out", "here"),
            ("data", "prepare", "x.txt", "--out", address),
            ("export", address, "--out", "here"),
            ("evaluate", "no-model", "--text", "text", "--out", address),
            ("retrofit", address),
            ("inspect", address),
        ):
            code, _, stderr = run(*command)
            assert code == 2, stderr
            assert "is an address" in stderr or "no field 'source'" in stderr, stderr
        assert os.listdir(tmp_path) == []

    def test_functions_refuse_them(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        recipe = {"name": "x", "data": {"kind": "induction"}, "model": {}, "training": {"steps": 1}}
        for call in (
            lambda: lab.train(recipe, "s3://b/x"),
            lambda: lab.train(recipe, Path("s3://b/x")),
            lambda: lab.train(recipe | {"start": {"checkpoint": "s3://b/x"}}, "here"),
            lambda: lab.plan("s3://b/x"),
            lambda: lab.grow("s3://b/x", 4),
            lambda: lab.retrofit("hf://b/x", "kv_shift"),
            lambda: lab.reproduce("kv-shifting/figure-1a", out="gs://b/x"),
            lambda: replace_text(Path("s3://b/x"), ""),
            lambda: check_free(Path("s3://b/x")),
        ):
            with pytest.raises(HeadwaterError, match="is an address"):
                call()
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_text_that_cannot_be_a_path_is_a_sentence(tmp_path, name):
    for call in (lambda: check_free(tmp_path / name), lambda: replace_text(tmp_path / name, "")):
        with pytest.raises(HeadwaterError, match="no path can have"):
            call()


def test_a_path_that_exists_is_not_called_missing(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    assert explain_absence(tmp_path / "none").startswith("There is no file or folder")
    assert "is a file, not a folder" in explain_absence(tmp_path / "file", "folder")
    assert "is a link to 'nothing', which does not exist" in explain_absence(tmp_path / "link")
    assert "Too many levels" in explain_absence(tmp_path / "loop")
    assert "not a file" in explain_absence(tmp_path, "file")
    assert "Not a directory" in explain_absence(tmp_path / "file" / "x")


def test_an_output_folder_in_a_loop_of_links_or_around_this_one_is_a_sentence(tmp_path, run, monkeypatch):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "source" / "here").mkdir(parents=True)
    (tmp_path / "source" / "config.json").touch()
    monkeypatch.chdir(tmp_path / "source" / "here")
    for out in (
        tmp_path / "a",
        tmp_path / "a" / "x",
        ".",
        "..",
        "/",
        "x" * 300,
        tmp_path / "source" / "config.json" / "x",
    ):
        for command in ("grow", "export", "shrink"):
            code, _, stderr = run(command, "..", "--out", out)
            assert code == 2, stderr
            assert "Traceback" not in stderr
    assert os.listdir(tmp_path / "source" / "here") == []


def test_text_that_is_no_text_is_not_blamed_on_the_locale():
    from headwater_lab.cli import explain_encoding

    with pytest.raises(UnicodeEncodeError) as error:
        "x\udcff".encode()
    assert "not valid text" in explain_encoding(error.value)
    with pytest.raises(UnicodeEncodeError) as error:
        "é".encode("ascii")
    assert "PYTHONUTF8=1" in explain_encoding(error.value)
