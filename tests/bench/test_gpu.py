"""`headwater bench gpu` on a CPU, at tiny sizes: it is alive, keeps what it has, and says what is wrong."""

import json
from types import SimpleNamespace

import pytest
import torch

from headwater.config.planner import plan_layers
from headwater.cost.hardware import KNOWN, sheet_of
from headwater.util.errors import HeadwaterError
from headwater_lab.bench import gpu


def rows_of(name, tmp_path) -> list[dict]:
    path = tmp_path / "rows"
    gpu.PHASES[name](gpu.Phase(path, "cpu", 600))
    rows = gpu._read_rows(path)
    assert rows
    found = {"device": "cpu", "phases": {name: {"status": "done", "seconds": 1.0, "rows": rows}}}
    assert gpu.find_problems(found) == []
    return rows


@pytest.fixture
def few(monkeypatch):
    both = {"kv_shift": {}, "value_residual": {}}
    monkeypatch.setattr(gpu, "combine_mechanisms", lambda: {"together": both})
    monkeypatch.setattr(gpu, "MECHANISMS", SimpleNamespace(built_in=["kv_shift"]))


@pytest.mark.slow  # it compiles; that a wrong result is seen, `test_a_wrong_result_is_seen` shows
def test_correctness(few, tmp_path):
    rows = rows_of("correctness", tmp_path)
    assert [row["outcome"] for row in rows] == ["ok"] * 5
    assert [row["graphs"] for row in rows if "graphs" in row] == [2]


@pytest.mark.slow
def test_decoding(tmp_path):
    assert all(row["ms a token"] > 0 and 0 < row["of the copy bandwidth"] < 1 for row in rows_of("decoding", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["environment", "training", "mechanisms"])
def test_phase(name, few, tmp_path):
    rows = rows_of(name, tmp_path)
    if name == "training":
        assert all(row["MFU"] > 0 and row["breaks"] == 0 for row in rows if "MFU" in row)


def test_a_wrong_result_is_seen(few, tmp_path, monkeypatch):
    """A mechanism whose cached decoding differs."""
    from headwater.mechanisms.kv_shift import KVShift

    forward = KVShift.forward
    monkeypatch.setattr(
        KVShift, "forward", lambda self, k, v, q=None, reach=None, tail=None: forward(self, k, v, q, reach)
    )
    phase = gpu.Phase(tmp_path / "rows", "cpu", 600)
    phase.attempt(lambda: gpu._check_model(phase, {"kv_shift": {}}), mechanisms="kv_shift")
    found = {"device": "cpu", "phases": {"correctness": {"status": "done", "rows": gpu._read_rows(tmp_path / "rows")}}}
    assert gpu.find_problems(found) == ["correctness, kv_shift: WRONG"]


def test_the_preset_is_measured_first(tmp_path, monkeypatch):
    """And what compiles nothing before what does, the longest last: time may run out at any row."""
    tried = []
    monkeypatch.setattr(gpu.Phase, "attempt", lambda self, measure, **names: tried.append(names))
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1.0)
    phase = gpu.Phase(tmp_path / "rows", "cpu", 600)
    phase.sizes = gpu.ON_GPU
    gpu.mechanisms(phase)
    named = [names["mechanism"] for names in tried]
    assert named[0] == gpu.RECOMMENDED
    assert sorted(named) == sorted((*gpu.MECHANISMS.built_in, gpu.RECOMMENDED))
    assert named[-1] == "dense_former"  # a graph for each of twelve layers
    tried.clear()
    gpu.decoding(phase)
    assert tried[0] == {"model": "1.5B", "batch": 1, "step": "compiled"}
    assert len({tuple(names.values()) for names in tried}) == len(tried) == 8
    tried.clear()
    gpu.correctness(phase)
    brief = [names.pop("brief", False) for names in tried]
    assert brief == sorted(brief, reverse=True)
    assert {value for names in tried[-2:] for value in names.values()} == {"together", "together, compiled"}
    assert {names["compiled"] for names in tried if "compiled" in names} == {
        "none",
        "together",
        *gpu.PRESETS[gpu.RECOMMENDED].fields["mechanisms"],
    }
    assert [names["mechanisms"] for names in tried if "mechanisms" in names] == list(gpu.combine_mechanisms())


def test_what_fails_leaves_the_rest(tmp_path):
    phase = gpu.Phase(tmp_path / "rows", "cpu", 600)
    phase.attempt(lambda: 1 / 0, part="one")
    phase.attempt(lambda: {"seconds": 1.0}, part="two")
    late = gpu.Phase(tmp_path / "rows", "cpu", -1)
    late.attempt(lambda: {"seconds": 1.0}, part="three")
    scarce = gpu.Phase(tmp_path / "rows", "cpu", gpu.ON_GPU.least - 1)
    scarce.sizes = gpu.ON_GPU
    scarce.attempt(lambda: {"seconds": 1.0}, brief=True, part="four")
    scarce.attempt(lambda: {"seconds": 1.0}, part="five")
    first, second, third, fourth, fifth = gpu._read_rows(tmp_path / "rows")
    assert "ZeroDivisionError" in first["outcome"]
    assert second == {"part": "two", "seconds": 1.0}
    assert fourth == {"part": "four", "seconds": 1.0}
    assert all("skipped" in row["outcome"] for row in (third, fifth))


def test_a_mechanism_that_does_not_fit_is_a_row_and_the_rest_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu, "make_twins", lambda given, shape: gpu.HeadwaterConfig(num_hidden_layers=2, mechanisms=given)
    )
    phase = gpu.Phase(tmp_path / "rows", "cpu", 600)
    phase.sizes = phase.sizes._replace(mechanisms=(2, 64, 2))  # with two layers, backout's middle layer is the last
    monkeypatch.setattr(gpu, "MECHANISMS", SimpleNamespace(built_in=["backout", "svformer"]))
    gpu.mechanisms(phase)
    rows = {row["mechanism"]: row for row in gpu._read_rows(tmp_path / "rows")}
    assert set(rows) == {"svformer", gpu.RECOMMENDED, "backout"}
    assert "change layer, or num_hidden_layers" in str(rows["backout"])


def test_all_mechanisms_fit_the_tiny_model():
    layers = gpu.ON_CPU.mechanisms[0]
    for name in gpu.MECHANISMS.built_in:
        assert plan_layers(gpu.HeadwaterConfig(num_hidden_layers=layers, mechanisms={name: {}}))


def test_models_of_the_mechanisms_phase_are_drawn_on_the_device(tmp_path, monkeypatch):
    """Drawing 124M parameters on a CPU takes longer than the steps that are timed."""
    made, steps, twins = [], [], gpu.make_twins

    def seen(*given, **shape):
        made.extend(found := twins(*given, **shape))
        assert {parameter.device.type for model in found for parameter in model.parameters()} == {"meta"}
        return found

    monkeypatch.setattr(gpu, "make_twins", seen)
    monkeypatch.setattr(gpu, "_make_steps", lambda phase, model, ids: steps.append(model(ids).logits) or (lambda: None))
    phase = gpu.Phase(tmp_path / "rows", "cpu", 600)
    monkeypatch.setattr(gpu, "MECHANISMS", SimpleNamespace(built_in=["pattention", "kv_shift"]))
    gpu.mechanisms(phase)
    assert gpu.find_problems({"phases": {"mechanisms": {"rows": gpu._read_rows(tmp_path / "rows")}}}) == []
    assert len(made) == len(steps) == 6  # with the preset's
    assert all(bool(logits.isfinite().all()) for logits in steps)


@pytest.mark.slow
def test_a_phase_that_is_cut_keeps_its_rows(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(
        "import sys, time\n"
        "with open(sys.argv[2], 'w') as rows:\n    rows.write('{\"a\": 1}\\n{\"b\": ')\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(gpu, "RUN", [str(tmp_path / "slow.py")])
    found = gpu.bench_gpu(tmp_path / "out", device="cpu", budget=8, only=["environment"])
    phase = found["phases"]["environment"]
    assert (phase["status"], phase["rows"]) == ("cut", [{"a": 1}])
    assert json.loads((tmp_path / "out" / "gpu.json").read_text()) == found
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.json"]


def test_an_unknown_phase(tmp_path):
    with pytest.raises(HeadwaterError, match=r"'decode'.*decoding"):
        gpu.bench_gpu(tmp_path, only=["decode"])


@pytest.mark.slow
def test_every_phase_runs_and_a_cut_after_any_keeps_what_came_before(tmp_path):
    """The phases themselves, each in its process; what lies on the disk when one begins is what a cut there leaves."""
    left = []

    def tell(line):
        if "at most" in line:
            left.append(json.loads((tmp_path / "gpu.json").read_text()))

    found = gpu.bench_gpu(tmp_path, device="cpu", budget=3600, tell=tell)
    assert [phase["status"] for phase in found["phases"].values()] == ["done"] * len(gpu.PHASES)
    assert gpu.find_problems(found) == []
    names = list(gpu.PHASES)
    assert [list(kept["phases"]) for kept in left] == [names[:count] for count in range(len(names))]
    for kept in left:
        assert kept["phases"] == {name: found["phases"][name] for name in kept["phases"]}


@pytest.mark.slow
def test_the_command(run, tmp_path):
    code, out, _ = run("bench", "gpu", "--device", "cpu", "--only", "environment", "--out", tmp_path)
    assert code == 0
    assert "gpu.json" in out
    assert list(json.loads((tmp_path / "gpu.json").read_text())["phases"]) == ["environment"]


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


def test_too_little_memory_is_no_error(tmp_path):
    def large():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    phase = gpu.Phase(tmp_path / "rows", "cpu", 600)
    phase.attempt(large, model="350M")
    found = {"phases": {"training": {"rows": gpu._read_rows(tmp_path / "rows")}}}
    assert found["phases"]["training"]["rows"] == [{"model": "350M", "outcome": "skipped: not enough memory"}]
    assert gpu.find_problems(found) == []
