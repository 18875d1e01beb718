"""A run that is stopped on purpose and gone on with is the run that never stopped."""

import pytest
from trials import same_end

from headwater_lab.training.checkpoints import list_checkpoints
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("stops", [[6], [3, 9], [1, 2, 6, 6, 12], [5, 3]])
def test_stops_leave_no_trace_in_the_result(recipe, finished, tmp_path, stops):
    finished(recipe(reporting={"save_every": None}), tmp_path / "whole")
    made = recipe(reporting={"save_every": None})
    reached = 0
    for stop in stops:
        record = train(made, tmp_path / "cut", resume=True, until=stop)
        reached = max(stop, reached)  # nobody goes back
        assert record.status == ("finished" if reached == 12 else "stopped")
        assert list_checkpoints(tmp_path / "cut")[-1].name == f"step-{reached:06d}"
        assert record == read_record(tmp_path / "cut")
        assert record.held_out[-1].step == reached
    record = train(made, tmp_path / "cut", resume=True)
    whole = read_record(tmp_path / "whole")
    assert record.status == "finished"
    assert (record.data_order, record.tokens, record.documents) == (whole.data_order, whole.tokens, whole.documents)
    assert record.held_out[-1] == whole.held_out[-1]
    assert {point.step for point in record.held_out} == {6, 12} | set(stops) - {3 if stops == [5, 3] else 0}
    if all(stop % 3 == 0 for stop in stops):  # else the curve has points of the stops, too
        assert record.curve == whole.curve
        same_weights(tmp_path / "whole", tmp_path / "cut")


def same_weights(a, b):
    from safetensors.torch import load_file

    for name in ("model.safetensors", "training.safetensors"):
        one, other = (load_file(list_checkpoints(run)[-1] / name) for run in (a, b))
        assert one.keys() == other.keys()
        assert all((one[key] == other[key]).all() for key in one), name


@pytest.mark.slow
def test_more_than_all_steps_is_all(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "whole")
    record = train(recipe(), tmp_path / "past", until=50)
    assert (record.status, record.held_out[-1].step) == ("finished", 12)
    same_end(tmp_path / "whole", tmp_path / "past")
