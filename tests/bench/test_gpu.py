"""`headwater bench gpu` on a CPU, at tiny sizes: it is alive, keeps what it has, and says what is wrong."""

import json

import pytest

from headwater.bench import gpu
from headwater.errors import HeadwaterError
from headwater.hardware import KNOWN, sheet_of
from headwater.kernels.gpu import triton_version


def rows_of(name, tmp_path) -> list[dict]:
    path = tmp_path / "rows"
    gpu.PHASES[name](gpu.Phase(path, "cpu", 600))
    rows = gpu._read(path)
    assert rows
    found = {"device": "cpu", "phases": {name: {"status": "done", "seconds": 1.0, "rows": rows}}}
    assert gpu.problems(found) == []
    page = gpu.as_markdown(found)
    assert all(str(value) in page for row in rows for value in row.values() if isinstance(value, str))
    return rows


@pytest.fixture
def few(monkeypatch):
    both = {"kv_shift": {}, "value_residual": {}}
    monkeypatch.setattr(gpu, "combinations", lambda: {"both": both})
    monkeypatch.setattr(gpu, "REGISTRY", ["kv_shift"])


@pytest.mark.slow  # it compiles; that a wrong result is seen, `test_a_wrong_result_is_seen` shows
def test_correctness(few, tmp_path):
    rows = rows_of("correctness", tmp_path)
    assert [row["outcome"] for row in rows] == ["ok"] * 3
    assert [row["graphs"] for row in rows if "graphs" in row] == [2]


def test_decoding(tmp_path):
    assert all(row["ms a token"] > 0 and 0 < row["of the copy bandwidth"] < 1 for row in rows_of("decoding", tmp_path))


def test_kernels(tmp_path):
    """Without Triton each says so."""
    outcomes = {row["outcome"] for row in rows_of("kernels", tmp_path)}
    assert outcomes <= {"skipped: no triton", "skipped: triton does not run here", "ok"}
    assert (outcomes == {"skipped: no triton"}) == (triton_version() is None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["environment", "training", "packing", "mechanisms"])
def test_phase(name, few, tmp_path):
    rows = rows_of(name, tmp_path)
    if name in ("training", "packing"):
        assert all(row["MFU"] > 0 and row["breaks"] == 0 for row in rows if "MFU" in row)


def test_a_wrong_result_is_seen(few, tmp_path, monkeypatch):
    """A mechanism whose cached decoding differs."""
    from headwater.mechanisms.kv_shift import KVShift

    forward = KVShift.forward
    monkeypatch.setattr(
        KVShift, "forward", lambda self, k, v, q=None, reach=None, tail=None: forward(self, k, v, q, reach)
    )
    phase = gpu.Phase(tmp_path / "rows", "cpu", 600)
    phase.attempt(lambda: gpu._checked(phase, {"kv_shift": {}}), mechanisms="kv_shift")
    found = {"device": "cpu", "phases": {"correctness": {"status": "done", "rows": gpu._read(tmp_path / "rows")}}}
    assert gpu.problems(found) == ["correctness, kv_shift: WRONG"]


def test_what_fails_leaves_the_rest(tmp_path):
    phase = gpu.Phase(tmp_path / "rows", "cpu", 600)
    phase.attempt(lambda: 1 / 0, part="one")
    phase.attempt(lambda: {"seconds": 1.0}, part="two")
    late = gpu.Phase(tmp_path / "rows", "cpu", -1)
    late.attempt(lambda: {"seconds": 1.0}, part="three")
    first, second, third = gpu._read(tmp_path / "rows")
    assert "ZeroDivisionError" in first["outcome"]
    assert second == {"part": "two", "seconds": 1.0}
    assert "skipped" in third["outcome"]


def test_a_phase_that_is_cut_keeps_its_rows(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(
        "import sys, time; open(sys.argv[2], 'w').write('{\"a\": 1}\\n{\"b\": '); time.sleep(600)"
    )
    monkeypatch.setattr(gpu, "RUN", [str(tmp_path / "slow.py")])
    found = gpu.bench_gpu(tmp_path / "out", device="cpu", budget=3, only=["environment"])
    phase = found["phases"]["environment"]
    assert (phase["status"], phase["rows"]) == ("cut", [{"a": 1}])
    assert json.loads((tmp_path / "out" / "gpu.json").read_text()) == found
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.json", "gpu.md"]


def test_an_unknown_phase(tmp_path):
    with pytest.raises(HeadwaterError, match=r"'decode'.*decoding"):
        gpu.bench_gpu(tmp_path, only=["decode"])


@pytest.mark.slow
def test_the_command(run, tmp_path):
    code, out, _ = run("bench", "gpu", "--device", "cpu", "--out", tmp_path)
    assert code == 0
    assert "gpu.md" in out
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [phase["status"] for phase in found["phases"].values()] == ["done"] * len(gpu.PHASES)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla T4", None),
    ],
)
def test_data_sheets_by_the_drivers_names(driver, name):
    assert sheet_of(driver) is (None if name is None else KNOWN[name])
