"""Tables are trained by workers that start at once."""

import pytest

import headwater.workers
import processes


@pytest.fixture(scope="module", autouse=True)
def forked():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headwater.workers, "subprocess", headwater.workers.subprocess)
        processes.fork_workers()
        yield
