"""`headwater bench gpu` on a CPU, at tiny sizes: it is alive, loses nothing, continues, and says what is wrong."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headwater.config.planner import plan_layers
from headwater.cost.hardware import KNOWN, sheet_of
from headwater.util.errors import HeadwaterError
from headwater_lab.api import gpu_quality
from headwater_lab.api.gpu_quality import TRAINED_ON
from headwater_lab.bench import gpu, gpu_queue
from headwater_lab.data.tokenizer import train_tokenizer
from headwater_lab.evaluation.core_suite import parse_name


def read_rows(report) -> list[dict]:
    return [line["row"] | line["result"] for line in gpu_queue.list_rows(gpu_queue.read_lines(report))]


def make_phase(tmp_path, name="environment", seconds=600.0) -> gpu.Phase:
    return gpu.Phase(name, tmp_path / "gpu.jsonl", "cpu", seconds)


def rows_of(name, tmp_path) -> list[dict]:
    gpu.MEASUREMENTS[name](make_phase(tmp_path, name))
    assert gpu_queue.find_problems(gpu_queue.read_lines(tmp_path / "gpu.jsonl")) == []
    rows = read_rows(tmp_path / "gpu.jsonl")
    assert rows
    return rows


@pytest.fixture
def few(monkeypatch):
    both = {"kv_shift": {}, "value_residual": {}}
    monkeypatch.setattr(gpu, "combine_mechanisms", lambda: {"together": both})
    monkeypatch.setattr(gpu, "MECHANISMS", SimpleNamespace(built_in=["kv_shift"]))


@pytest.mark.slow  # it compiles; that a wrong result is seen, `test_a_wrong_result_is_seen` shows
def test_correctness(few, tmp_path):
    rows = rows_of("correctness", tmp_path)
    assert [row["outcome"] for row in rows] == ["ok"] * 8
    assert [row["graphs"] for row in rows if "graphs" in row] == [2, 2, 2]


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
    phase = make_phase(tmp_path, "correctness")
    phase.attempt(lambda: gpu._check_model(phase, {"kv_shift": {}}), mechanisms="kv_shift")
    lines = gpu_queue.read_lines(tmp_path / "gpu.jsonl")
    assert gpu_queue.find_problems(lines) == ["correctness, kv_shift: WRONG"]


def test_the_preset_is_measured_first(tmp_path, monkeypatch):
    """And what compiles nothing before what does, the longest last: time may run out at any row."""
    tried = []
    monkeypatch.setattr(gpu.Phase, "attempt", lambda self, measure, **names: tried.append(names))
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1.0)
    phase = make_phase(tmp_path)
    phase.sizes = gpu.ON_GPU
    gpu.mechanisms(phase)
    named = [names["mechanism"] for names in tried]
    assert named[0] == gpu.RECOMMENDED
    assert sorted(named) == sorted((*gpu.MECHANISMS.built_in, gpu.RECOMMENDED))
    assert named[-1] == "dense_former"  # a graph for each of twelve layers
    tried.clear()
    gpu.decoding(phase)
    assert tried[0] == {"model": "1.5B", "batch": 1, "step": "compiled"}
    assert len({tuple(names.values()) for names in tried}) == len(tried) == 18
    tried.clear()
    gpu.correctness(phase)
    brief = [names.pop("least", None) == 0 for names in tried]
    assert brief == sorted(brief, reverse=True)
    assert {value for names in tried[-3:] for value in names.values()} == {
        "together, joined products",
        "together",
        "together, compiled",
    }
    assert [names["replayed"] for names in tried if "replayed" in names] == ["none", "together"]
    assert {names["compiled"] for names in tried if "compiled" in names} == {
        *("none", "none, joined products", "together", "together, joined products"),
        *gpu.PRESETS[gpu.RECOMMENDED].fields["mechanisms"],
    }
    assert [names["mechanisms"] for names in tried if "mechanisms" in names] == list(gpu.combine_mechanisms())


def test_what_fails_leaves_the_rest(tmp_path):
    phase = make_phase(tmp_path)
    phase.attempt(lambda: 1 / 0, part="fails")
    phase.attempt(lambda: {"seconds": 1.0}, part="works")
    make_phase(tmp_path, seconds=-1).attempt(lambda: {"seconds": 1.0}, part="late")
    scarce = make_phase(tmp_path, seconds=gpu.ON_GPU.least - 1)
    scarce.sizes = gpu.ON_GPU
    scarce.attempt(lambda: {"seconds": 1.0}, least=0, part="brief")
    scarce.attempt(lambda: {"seconds": 1.0}, part="scarce")
    rows = {row["part"]: row for row in read_rows(tmp_path / "gpu.jsonl")}
    assert "ZeroDivisionError" in rows["fails"]["outcome"]
    assert rows["works"] == {"part": "works", "seconds": 1.0}
    assert rows["brief"] == {"part": "brief", "seconds": 1.0}
    assert rows["late"]["outcome"] == rows["scarce"]["outcome"] == gpu_queue.LATE
    again = make_phase(tmp_path)  # measures what has no result, and nothing else
    for part in rows:
        again.attempt(lambda: {"seconds": 2.0}, part=part)
    seconds = {row["part"]: row["seconds"] for row in read_rows(tmp_path / "gpu.jsonl")}
    assert seconds == {"fails": 2.0, "works": 1.0, "late": 2.0, "brief": 1.0, "scarce": 2.0}


def end_process():
    raise SystemExit  # as the end of the process at the deadline, it leaves no result


def end_phase(tmp_path, **row):
    """Begin the phase environment, and end its process in the middle of a row."""
    gpu_queue.append_line(tmp_path / "gpu.jsonl", {"phase": "environment", "inputs": {}})
    with pytest.raises(SystemExit):
        make_phase(tmp_path).attempt(end_process, **row)


def test_a_row_that_never_ends_is_tried_twice(tmp_path):
    for _ in range(2):
        end_phase(tmp_path, part="hangs")
        gpu_queue.append_line(tmp_path / "gpu.jsonl", {"phase": "environment", "status": "cut"})
        assert read_rows(tmp_path / "gpu.jsonl") == [{"part": "hangs", "outcome": "cut"}]
    make_phase(tmp_path).attempt(end_process, part="hangs")
    (row,) = read_rows(tmp_path / "gpu.jsonl")
    assert "twice" in row["outcome"]
    assert not gpu_queue.is_open(gpu_queue.list_rows(gpu_queue.read_lines(tmp_path / "gpu.jsonl"))[0])


def test_only_a_missed_deadline_counts(tmp_path):
    """Ctrl-C twice in one row dropped it for good."""
    for _ in range(3):
        end_phase(tmp_path, part="long")
    gpu_queue.append_line(tmp_path / "gpu.jsonl", {"phase": "environment", "status": "cut"})
    assert make_phase(tmp_path).cuts == [{"part": "long"}]
    end_phase(tmp_path, part="long")
    gpu_queue.append_line(tmp_path / "gpu.jsonl", {"phase": "environment", "status": "failed", "error": "killed"})
    make_phase(tmp_path).attempt(lambda: {"seconds": 1.0}, part="long")
    assert read_rows(tmp_path / "gpu.jsonl") == [{"part": "long", "seconds": 1.0}]


def test_ctrl_c_is_no_missed_deadline(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(SLOW_PHASE.replace('"s": 1.0', '"outcome": "cut"'))
    monkeypatch.setattr(gpu_queue, "RUN", [str(tmp_path / "slow.py")])

    def interrupt(report, shown, tell):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_queue, "_tell_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpu_queue.bench_gpu(tmp_path / "out", device="cpu", only=["environment"])
    lines = gpu_queue.read_lines(tmp_path / "out" / "gpu.jsonl")
    assert [line["phase"] for line in lines if "inputs" in line] == ["environment"]
    assert not any("status" in line for line in lines)


def test_a_mechanism_that_does_not_fit_is_a_row_and_the_rest_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu, "make_twins", lambda options, shape: gpu.HeadwaterConfig(num_hidden_layers=2, mechanisms=options)
    )
    phase = make_phase(tmp_path)
    phase.sizes = phase.sizes._replace(mechanisms=(2, 64, 2))  # with two layers, backout's middle layer is the last
    monkeypatch.setattr(gpu, "MECHANISMS", SimpleNamespace(built_in=["backout", "svformer"]))
    gpu.mechanisms(phase)
    rows = {row["mechanism"]: row for row in read_rows(tmp_path / "gpu.jsonl")}
    assert set(rows) == {"svformer", gpu.RECOMMENDED, "backout"}
    assert "change layer, or num_hidden_layers" in str(rows["backout"])


def test_all_mechanisms_fit_the_tiny_model():
    layers = gpu.ON_CPU.mechanisms[0]
    for name in gpu.MECHANISMS.built_in:
        assert plan_layers(gpu.HeadwaterConfig(num_hidden_layers=layers, mechanisms={name: {}}))


def test_models_of_the_mechanisms_phase_are_drawn_on_the_device(tmp_path, monkeypatch):
    """Drawing 124M parameters on a CPU takes longer than the steps that are timed."""
    made, steps, twins = [], [], gpu.make_twins

    def seen(*arguments, **shape):
        made.extend(found := twins(*arguments, **shape))
        assert {parameter.device.type for model in found for parameter in model.parameters()} == {"meta"}
        return found

    monkeypatch.setattr(gpu, "make_twins", seen)
    monkeypatch.setattr(gpu, "_make_steps", lambda phase, model, ids: steps.append(model(ids).logits) or (lambda: None))
    phase = make_phase(tmp_path)
    monkeypatch.setattr(gpu, "MECHANISMS", SimpleNamespace(built_in=["pattention", "kv_shift"]))
    gpu.mechanisms(phase)
    assert gpu_queue.find_problems(gpu_queue.read_lines(tmp_path / "gpu.jsonl")) == []
    assert len(made) == len(steps) == 6  # with the preset's
    assert all(bool(logits.isfinite().all()) for logits in steps)


DIES = "from headwater_lab.util.workers import die_with_parent\ndie_with_parent()\n"
SLOW_PHASE = """
import json, sys, time
with open(sys.argv[2], "a") as report:
    print(json.dumps({"phase": sys.argv[1], "row": {"part": "quick"}, "result": {"s": 1.0}}), file=report, flush=True)
    report.write('{"phase": "environ')
    report.flush()
    time.sleep(600)
"""


def test_a_phase_that_is_cut_keeps_its_rows(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(SLOW_PHASE)
    monkeypatch.setattr(gpu_queue, "RUN", [str(tmp_path / "slow.py")])
    told = []
    rows = gpu_queue.bench_gpu(tmp_path / "out", device="cpu", deadline=6, only=["environment"], tell=told.append)
    assert rows == [{"phase": "environment", "row": {"part": "quick"}, "result": {"s": 1.0}}]
    assert any("part quick, s 1" in line for line in told)
    lines = gpu_queue.read_lines(tmp_path / "out" / "gpu.jsonl")
    assert [line["status"] for line in lines if "status" in line] == ["cut"]
    assert not gpu_queue.is_finished(lines, "environment")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu.jsonl"]


def test_cuts_count_since_the_last_new_result(tmp_path):
    """A row that measures others on its way makes progress, so it is not skipped for being cut twice."""
    row, inner, report = {"cache": "pairs"}, {"cache": "control"}, tmp_path / "gpu.jsonl"
    attempt, result = ((row, gpu_queue.CUT), (inner, "ok"))
    for rows in ([attempt], *[[attempt, result]] * 3):
        for each, outcome in rows:
            gpu_queue.append_line(report, {"phase": "environment", "row": each, "result": {"outcome": outcome}})
        gpu_queue.append_line(report, {"phase": "environment", "status": "cut"})
    phase = gpu.Phase("environment", report, "cpu", 60.0)
    assert phase.cuts == [row] * 2
    assert phase.measured == [inner]


def test_a_killed_command_loses_no_row_and_leaves_no_process(tmp_path):
    """The rows of a phase were in a temporary folder until its end: a machine that was taken away had none of them."""
    (tmp_path / "slow.py").write_text(
        "from headwater_lab.util.workers import die_with_parent\ndie_with_parent()" + SLOW_PHASE
    )
    code = (
        "from headwater_lab.bench import gpu_queue; from pathlib import Path; import sys; "
        f"gpu_queue.RUN = [{str(tmp_path / 'slow.py')!r}]; "
        f"gpu_queue.bench_gpu(Path({str(tmp_path / 'out')!r}), device='cpu', only=['environment'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    report = tmp_path / "out" / "gpu.jsonl"
    started = time.monotonic()
    while not gpu_queue.list_rows(gpu_queue.read_lines(report)) and time.monotonic() - started < 60:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [row["row"] for row in gpu_queue.list_rows(gpu_queue.read_lines(report))] == [{"part": "quick"}]
    started = time.monotonic()
    while _is_running(tmp_path / "slow.py") and time.monotonic() - started < 30:
        time.sleep(0.1)
    assert not _is_running(tmp_path / "slow.py")


def _is_running(script) -> bool:
    done = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True, check=False)
    return any(int(line) != os.getpid() for line in done.stdout.split())


@pytest.mark.parametrize(("device", "seen"), [("cuda", "5,7"), ("cuda:1", "7")])
def test_a_phase_sees_only_the_gpu_that_is_named(device, seen, tmp_path, monkeypatch):
    """Fabric takes the first one that it sees, and a comparison all."""
    (tmp_path / "look.py").write_text(
        "import os, sys\nfrom pathlib import Path\nfrom headwater_lab.bench.gpu_queue import append_line\n"
        "result = {'device': sys.argv[3], 'seen': os.environ['CUDA_VISIBLE_DEVICES']}\n"
        "append_line(Path(sys.argv[2]), {'phase': sys.argv[1], 'row': {}, 'result': result})\n"
    )
    monkeypatch.setattr(gpu_queue, "RUN", [str(tmp_path / "look.py")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda name: f"the GPU {name}")
    (row,) = gpu_queue.bench_gpu(tmp_path / "out", device=device, only=["environment"])
    assert row["result"] == {"device": "cuda", "seen": seen}


def test_an_unknown_phase(tmp_path):
    with pytest.raises(HeadwaterError, match=r"'decode'.*decoding"):
        gpu_queue.bench_gpu(tmp_path, only=["decode"])


def test_rows_of_another_device_are_not_continued(tmp_path):
    gpu_queue.append_line(tmp_path / "gpu.jsonl", {"headwater": "0.2", "device": "NVIDIA H100"})
    with pytest.raises(HeadwaterError, match="rows of another device, NVIDIA H100; choose another --out"):
        gpu_queue.bench_gpu(tmp_path, device="cpu")


@pytest.mark.slow
def test_every_phase_runs_and_a_second_call_measures_only_what_is_missing(tmp_path):
    told = []
    rows = gpu_queue.bench_gpu(tmp_path, device="cpu", deadline=3600, tell=told.append)
    lines = gpu_queue.read_lines(tmp_path / "gpu.jsonl")
    ended = [name for name in gpu_queue.PHASES if gpu_queue.is_finished(lines, name)]
    assert ended == [name for name in gpu_queue.PHASES if name not in gpu_queue.NEEDS]
    assert gpu_queue.find_problems(lines) == []
    size = (tmp_path / "gpu.jsonl").stat().st_size
    told.clear()
    assert gpu_queue.bench_gpu(tmp_path, device="cpu", tell=told.append) == rows
    assert told == [f"{name}: measured before" for name in ended] + [
        "prose: skipped; give --prose and --tokenizer",
        "conversion: skipped; give --prose and --model",
    ]
    assert (tmp_path / "gpu.jsonl").stat().st_size < size + 300  # the line of the call


FEW = """
import sys
from types import SimpleNamespace
from headwater_lab.api import gpu_worker
from headwater_lab.bench import gpu
gpu.combine_mechanisms = lambda: {"together": {"kv_shift": {}, "value_residual": {}}}
gpu.MECHANISMS = SimpleNamespace(built_in=["kv_shift"])
gpu_worker.run_phase(*sys.argv[1:])
"""


@pytest.fixture
def inputs(tmp_path):
    """A text, its tokenizer, a pretrained model with it, and tasks in CORE's format."""
    draw, words = random.Random(0), ("north", "south", "river", "stone", "cloud")
    texts = [" ".join(draw.choices(words, k=60)) for _ in range(80)]
    (tmp_path / "prose.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, num_hidden_layers=6, max_position_embeddings=64, pad_token_id=0, **sizes)
    )
    model.save_pretrained(tmp_path / "model")
    for name in ("model", "tokenizer"):
        train_tokenizer(texts, 300).save_pretrained(tmp_path / name)
    (tmp_path / "task_files").mkdir()
    for number, task in enumerate(gpu_quality.TASKS):
        items = [{"context": f"{word} and", "continuation": word, "category": word} for word in words * 2]
        if number < 2:
            items = [{"query": f"{word} and", "choices": list(words), "gold": words.index(word)} for word in words * 2]
        file = tmp_path / "task_files" / f"{parse_name(task)[0]}.jsonl"
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
    folders = {name: tmp_path / name for name in ("model", "tokenizer", "task_files")}
    return {"prose": tmp_path / "prose.jsonl", **folders}


@pytest.mark.slow
def test_a_queue_killed_after_every_step_has_the_rows_of_an_undisturbed_one(inputs, tmp_path, monkeypatch):
    (tmp_path / "few.py").write_text(FEW)
    monkeypatch.setattr(gpu_queue, "RUN", [str(tmp_path / "few.py")])
    rows = gpu_queue.bench_gpu(tmp_path / "undisturbed", device="cpu", deadline=3600, inputs=inputs)
    assert gpu_queue.find_problems(gpu_queue.read_lines(tmp_path / "undisturbed" / "gpu.jsonl")) == []
    report = tmp_path / "killed" / "gpu.jsonl"

    def count_steps() -> int:
        """Phases that ended, and rows of the longest."""
        lines = gpu_queue.read_lines(report)
        steps = [row for row in gpu_queue.list_rows(lines) if {"size", "cache"} & row["row"].keys()]
        return sum("status" in line for line in lines) + sum(not gpu_queue.is_open(row) for row in steps)

    code = (
        "from headwater_lab.bench import gpu_queue; from pathlib import Path; import sys; "
        f"gpu_queue.RUN = [{str(tmp_path / 'few.py')!r}]; paths = { ({k: str(v) for k, v in inputs.items()})!r}; "
        f"gpu_queue.bench_gpu(Path({str(report.parent)!r}), device='cpu', deadline=3600, "
        "inputs={name: Path(path) for name, path in paths.items()})"
    )
    kills = 0
    while True:
        done = count_steps()
        process = subprocess.Popen([sys.executable, "-c", code])
        while process.poll() is None and count_steps() == done:
            time.sleep(0.05)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    assert process.returncode == 0
    assert kills >= len(gpu_queue.PHASES) + 3 + 6 - 2  # sizes and caches; a row may follow another too fast
    again = gpu_queue.list_rows(gpu_queue.read_lines(report))
    quality = [{**row["row"], **row["result"]} for row in rows if row["phase"] in gpu_queue.NEEDS]
    assert len(quality) == 2 + 3 * 4 + 3 * 2 + 7  # texts, runs, arms of sizes, caches
    assert {row["rate tuned at"] for row in quality if "arm" in row} == {"small"}
    assert list_results(again) == list_results(rows)
    assert {path.name for path in report.parent.iterdir()} == {"gpu.jsonl", "runs"}
    assert all(path.stat().st_size < 2**20 for path in report.parent.rglob("*"))


@pytest.mark.slow  # CORE and healing: ten seconds
def test_differences_are_of_the_items_that_a_killed_call_scored(inputs, tmp_path, monkeypatch):
    """The control's items were read back without their categories: an average's difference had the error of two."""
    pytest.importorskip("lm_eval")
    cache, changes = "one head", {"mechanisms": {}, "num_key_value_heads": 1}
    monkeypatch.setattr(gpu_quality, "list_caches", lambda config: {cache: changes})
    scored, evaluate = [], gpu_quality.evaluate

    def score_or_die(models, *arguments, **options):
        scored.append(models)
        if len(scored) == 3:  # after the original, and the original on the same tokens
            raise KeyboardInterrupt
        return evaluate(models, *arguments, **options)

    monkeypatch.setattr(gpu_quality, "evaluate", score_or_die)
    paths = {name: str(path) for name, path in inputs.items()}
    with pytest.raises(KeyboardInterrupt):
        gpu_quality.conversion(make_phase(tmp_path, "conversion"), paths)
    gpu_quality.conversion(make_phase(tmp_path, "conversion"), paths)
    assert len(scored) == 4
    lines = gpu_queue.read_lines(tmp_path / "gpu.jsonl")
    assert gpu_queue.find_problems(lines) == []
    items = {line["scored"][2]: line["items"] for line in lines if "scored" in line}
    row = next(line["result"] for line in gpu_queue.list_rows(lines) if line["row"].get("cache") == cache)
    for key in [f"{task.partition('@')[0]} bits per byte" for task in gpu_quality.TASKS]:
        values, control = (torch.tensor(items[arm][key][1], dtype=torch.float64) for arm in (cache, TRAINED_ON))
        spread = values - control
        error = spread.std() / len(spread) ** 0.5
        if "lambada" in key:  # the average of five categories of two items
            error = (spread.view(5, 2).var(1) / 2).sum().sqrt() / 5
        assert row[f"{key}, difference"] == pytest.approx(float(spread.mean()), abs=1e-9)
        assert row[f"{key}, difference, ±"] == pytest.approx(float(error), rel=1e-6)


def test_a_missing_task_file_is_seen_before_any_model_is_healed(inputs, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "task_files" / "arc_easy.jsonl").unlink()
    with pytest.raises(HeadwaterError, match=r"There is no file arc_easy\.jsonl in"):
        gpu_quality.conversion(make_phase(tmp_path, "conversion"), {name: str(path) for name, path in inputs.items()})
    assert read_rows(tmp_path / "gpu.jsonl") == []


def list_results(rows) -> list[str]:
    """Rows, with the results that do not depend on the machine's speed."""
    results = []
    for row in rows:
        figures = row["result"] if row["phase"] in gpu_queue.NEEDS else {}
        results.append(str((row["row"], {key: figures[key] for key in figures if key not in ("s", "seconds")})))
    return sorted(results)


def test_an_input_that_does_not_exist(tmp_path):
    with pytest.raises(HeadwaterError, match=r"There is no file or folder '.*nowhere'"):
        gpu_queue.bench_gpu(tmp_path, device="cpu", inputs={"prose": tmp_path / "nowhere"})


ONE_ROW = """
import json, sys
from pathlib import Path
from headwater_lab.bench.gpu_queue import append_line
append_line(Path(sys.argv[2]), {"phase": sys.argv[1], "row": {"model": "model"}, "result": json.loads(sys.argv[5])})
"""


def test_rows_of_other_inputs_are_not_continued(inputs, tmp_path, monkeypatch):
    """A folder of the same name may have another model."""
    (tmp_path / "one.py").write_text(ONE_ROW)
    monkeypatch.setattr(gpu_queue, "RUN", [str(tmp_path / "one.py")])

    def measure(**changes):
        told = []
        options = {name: path for name, path in (inputs | changes).items() if path is not None}
        gpu_queue.bench_gpu(tmp_path / "out", device="cpu", only=["conversion"], inputs=options, tell=told.append)
        return told

    assert measure(task_files=None)[-1].startswith("conversion: done")
    assert measure(task_files=None) == measure(task_files=None, tokenizer=None) == ["conversion: measured before"]
    with pytest.raises(HeadwaterError, match="rows of conversion with another --task-files; choose another"):
        measure()
    config = inputs["model"] / "config.json"
    content = config.read_text()
    config.write_text(content.replace("300", "301"))
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "another"}\n')
    size = (tmp_path / "out" / "gpu.jsonl").stat().st_size
    with pytest.raises(HeadwaterError, match="another --prose and --model; choose another --out"):
        measure(prose=other, task_files=None)
    assert (tmp_path / "out" / "gpu.jsonl").stat().st_size == size
    config.write_text(content)
    lines = [line for line in gpu_queue.read_lines(tmp_path / "out" / "gpu.jsonl") if "inputs" not in line]
    (tmp_path / "out" / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(HeadwaterError, match="another --prose and --model"):
        measure(task_files=None)


@pytest.mark.slow
def test_the_command(run, tmp_path):
    code, out, _ = run("bench", "gpu", "--device", "cpu", "--only", "environment", "--out", tmp_path)
    assert code == 0
    assert "gpu.jsonl" in out
    assert gpu_queue.is_finished(gpu_queue.read_lines(tmp_path / "gpu.jsonl"), "environment")


@pytest.mark.parametrize(
    ("phase", "columns", "device", "expected"),
    [
        ("training", {"model": "124M", "MFU, all pairs": 0.51}, "NVIDIA H200", (0.50, 0.51, True)),
        ("training", {"model": "124M", "MFU, all pairs": 0.45}, "NVIDIA H100 80GB HBM3", (0.46, 0.45, False)),
        ("training", {"model": "124M", "MFU, all pairs": 0.45}, "AMD Instinct MI300X", None),
        ("training", {"model": "124M, transformers' Llama", "MFU, all pairs": 0.45}, "NVIDIA H200", None),
        ("decoding", {"model": "1.5B", "batch": 64, "step": "compiled", "of the copy bandwidth": 0.1}, "any", None),
        ("mechanisms", {"mechanism": "kv_shift", "ratio": 1.06, "FLOPs, ratio": 1.0}, "any", (1.03, 1.06, False)),
        ("mechanisms", {"mechanism": "kv_shift", "ratio": 1.06, "FLOPs, ratio": 1.06}, "any", (1.03, 1.0, True)),
        ("mechanisms", {"mechanism": gpu.RECOMMENDED, "ratio": 1.04}, "any", (1.05, 1.04, True)),
        ("mechanisms", {"mechanism": "kv_shift", "outcome": "cut"}, "any", None),
    ],
)
def test_targets(phase, columns, device, expected):
    judged = gpu_queue.judge_row(phase, columns, device)
    assert (judged is None) == (expected is None)
    if judged is not None:
        target, figure = judged
        assert (target.limit, figure, target.is_met(figure)) == expected


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

    phase = make_phase(tmp_path)
    phase.attempt(large, model="350M")
    assert read_rows(tmp_path / "gpu.jsonl") == [{"model": "350M", "outcome": "skipped: not enough memory"}]
    assert gpu_queue.find_problems(gpu_queue.read_lines(tmp_path / "gpu.jsonl")) == []
