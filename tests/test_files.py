"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.util.errors import HeadwaterError
from headwater.util.files import (
    disk_problem,
    open_regular,
    read_bytes,
    replace_text,
    sha256_of,
    stage_folder,
)


def test_a_staged_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    with stage_folder(tmp_path / "new") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "content"
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_what_the_disk_cannot_do_is_a_sentence_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def write() -> None:
        with stage_folder(tmp_path / "new") as folder:
            (folder / "file").write_text("content")
            raise error

    with pytest.raises(HeadwaterError, match="disk is full"):
        write()
    assert os.listdir(tmp_path) == []


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Whether all that a file or folder held when it was renamed was on the disk by then."""
    synced: dict[Path, bytes | set[str]] = {}
    results: dict[Path, bool] = {}
    sync = os.fsync

    def content(path: Path) -> bytes | set[str]:
        return set(os.listdir(path)) if path.is_dir() else path.read_bytes()

    def spy(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path] = content(path)

    def watched(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def call(self: Path, target: Path) -> Path:
            below = [self, *self.rglob("*")]
            results[target] = all(synced.get(path) == content(path) for path in below)
            return rename(self, target)

        return call

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(Path, "rename", watched(Path.rename))
    monkeypatch.setattr(Path, "replace", watched(Path.replace))
    return lambda target: results[target]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc to see files in")
def test_what_is_renamed_is_on_the_disk(tmp_path: Path, renamed: Callable[[Path], bool]) -> None:
    replace_text(tmp_path / "text", "content")
    assert renamed(tmp_path / "text")
    with stage_folder(tmp_path / "new") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("content")
        (folder / "other").write_text("more")
    assert renamed(tmp_path / "new")


def test_other_errors_pass_unchanged_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), stage_folder(tmp_path / "new"):
        raise KeyError("mistake")
    assert os.listdir(tmp_path) == []
    assert disk_problem(KeyError("mistake")) is None


def test_a_target_with_something_in_it_is_refused_before_the_block(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("kept")
    with pytest.raises(HeadwaterError, match="already exists"), stage_folder(tmp_path / "new"):
        raise AssertionError("not reached")
    assert (tmp_path / "new" / "mine").read_text() == "kept"


def test_of_two_writers_the_first_to_finish_wins(tmp_path: Path) -> None:
    def write(name: str, during: Callable[[], None] = lambda: None) -> None:
        with stage_folder(tmp_path / "new") as folder:
            (folder / "file").write_text(name)
            during()

    with pytest.raises(HeadwaterError, match="already exists"):
        write("slow", during=lambda: write("fast"))
    assert (tmp_path / "new" / "file").read_text() == "fast"
    assert os.listdir(tmp_path) == ["new"]


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"content"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "zero", "loop", ".", "missing"):
        with pytest.raises(OSError, match=r"regular file|symbolic links|No such file"):
            open_regular(tmp_path / name)
    with pytest.raises(OSError, match="regular file"):
        sha256_of(tmp_path / "pipe")
