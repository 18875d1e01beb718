"""Checkpoints that cannot be written, or whose process ends meanwhile."""

import errno

import pytest

from headwater.util.errors import HeadwaterError
from headwater_lab.training import checkpoints as saving
from headwater_lab.training.checkpoints import checkpoints, step_of
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record


@pytest.fixture
def fails_at(monkeypatch):
    """The checkpoint of a step ends with an error after its files are written."""
    original = saving.write_parts

    def fail(step, error):
        def write(folder, *args):
            original(folder, *args)
            if int(folder.name.split("-")[2]) == step:
                raise error

        monkeypatch.setattr(saving, "write_parts", write)

    return fail


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(recipe, tmp_path, fails_at):
    fails_at(8, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(HeadwaterError, match=r"of step 8 could not be saved .*disk is full.*step 4.*--resume"):
        train(recipe(), tmp_path / "run")
    assert read_record(tmp_path / "run").status == "failed"
    assert [step_of(path) for path in (tmp_path / "run" / "checkpoints").iterdir()] == [4]


def test_an_end_at_once_leaves_no_part_of_a_checkpoint(recipe, tmp_path, fails_at):
    fails_at(4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), tmp_path / "cut")
    assert not checkpoints(tmp_path / "cut")
    assert not list((tmp_path / "cut" / "checkpoints").glob("*"))
