"""Training: what a run does, and that an interrupted one ends where an undisturbed one does."""

import gc
import itertools
import json
import os
import signal
import subprocess
import time
import weakref
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from functorch.compile import make_boxed_func
from safetensors.torch import load_file
from torch import _dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer
from trials import PowerCut, cut_at, same_end

import processes
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.cost.counts import training_flops
from headwater.models.compiling import compile_model
from headwater.util.errors import HeadwaterError
from headwater.util.processor import describe_cpu
from headwater_lab.recipe.recipe import parse
from headwater_lab.recipe.training_section import Training
from headwater_lab.training import loop
from headwater_lab.training import start as setup
from headwater_lab.training.checkpoints import list_checkpoints, load_model
from headwater_lab.training.loop import Interrupted, train
from headwater_lab.training.records import read_record
from headwater_lab.util.endings import Diverged
from headwater_lab.util.machine import c_compiler


@pytest.mark.slow
def test_a_run_learns_and_records_what_it_did(recipe, tmp_path):
    made = recipe(training={"steps": 60, "learning_rate": 1e-2}, reporting={"evaluate_every": 20})
    record = train(made, tmp_path / "run")
    assert record == read_record(tmp_path / "run")
    assert record.status == "finished"
    assert [p.step for p in record.held_out] == [20, 40, 60]
    assert [p.step for p in record.curve] == list(range(3, 61, 3))
    assert record.curve[-1].loss < 0.8 * record.curve[0].loss
    assert record.held_out[-1].metrics["bits_per_byte"] < 0.9 * record.held_out[0].metrics["bits_per_byte"]
    assert record.tokens == 60 * 4 * 32
    model = load_model(list_checkpoints(tmp_path / "run")[-1])
    assert record.parameters == sum(p.numel() for p in model.parameters())
    assert record.flops == training_flops(model.config, 32) * record.tokens
    assert record.identity == made.identity
    assert sum(d.nats for d in record.documents) > 0


def test_a_run_frees_the_model_of_an_earlier_one(recipe, tmp_path, monkeypatch):
    """Stages, and a conversion's control, follow in one process."""
    models, alive = [], []
    plain = loop.TrainingRun.__init__

    def watch(run, *arguments):
        alive.append(sum(model() is not None for model in models))
        plain(run, *arguments)
        models.append(weakref.ref(run.model))

    monkeypatch.setattr(loop.TrainingRun, "__init__", watch)
    gc.disable()  # as if no collection came by itself
    try:
        for name in ("a", "b"):
            train(recipe(training={"steps": 2}), tmp_path / name)
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_a_start_that_drowns_the_tokens_is_told_of_once(recipe, tmp_path):
    model = {"hidden_size": 32, "mechanisms": {"pattention": {}}, "embedding_range": 0.02}
    drowned = train(recipe(model=model, training={"steps": 3}), tmp_path / "drowned")
    assert [n.step for n in drowned.notices if "drowns" in n.message] == [0]
    fine = train(recipe(model=model | {"embedding_range": 1.0}, training={"steps": 3}), tmp_path / "fine")
    assert not [n for n in fine.notices if "drowns" in n.message]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_another(recipe, finished, tmp_path):
    one = finished(recipe(seed=0), tmp_path / "0")
    train(recipe(seed=0), tmp_path / "1")
    same_end(tmp_path / "0", tmp_path / "1")
    assert one.curve != train(recipe(seed=1), tmp_path / "2").curve


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", [3, 4, pytest.param(7, marks=pytest.mark.slow), 11])
def test_a_cut_run_resumes_to_the_same_end(recipe, finished, tmp_path, step):
    made = recipe(training={"gradient_accumulation_steps": 2})
    finished(made, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(made, tmp_path / "cut", on_event=cut_at(step))
    train(made, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_points_from_after_the_checkpoint_are_made_again_once(recipe, tmp_path):
    often = {"log_every": 1, "save_every": 5, "evaluate_every": 3}
    made = recipe(training={"steps": 10}, reporting=often)
    train(made, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(made, tmp_path / "cut", on_event=cut_at(9))
    train(made, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")
    assert [p.step for p in read_record(tmp_path / "cut").speed] == list(range(1, 11))


def test_only_labels_that_count_weigh_in_loss_and_z_loss(recipe, tmp_path):
    """Rows with -100 in two forward passes, against the loss written out over all their tokens."""
    made = recipe(
        model={"residual_dropout": 0.0},
        training={"steps": 1, "precision": "64-true", "z_loss": 0.1, "gradient_accumulation_steps": 2},
        reporting={"log_every": 1},
    )
    data = {"kind": "induction", "vocab_size": 12, "length": 16, "held_out": 8}
    made = parse(made.model_dump(mode="json") | {"data": data, "seed": 3}, "test")
    record = train(made, tmp_path / "run")
    data = made.data.build()
    model = HeadwaterForCausalLM(made.config_for(data)).double()
    batches = data.batches(made.seed, 4, 0)
    rows = [next(batches) for _ in range(2)]
    assert len({int((batch["shift_labels"] == -100).sum()) for batch in rows}) == 2, "not as many in each"
    ids, labels = (torch.cat([batch[name] for batch in rows]) for name in ("input_ids", "shift_labels"))
    assert 0 < (labels == -100).sum() < labels.numel()
    logits = model(ids).logits[labels != -100]
    loss = torch.nn.functional.cross_entropy(logits, labels[labels != -100])
    (loss + 0.1 * logits.logsumexp(-1).square().mean()).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    assert record.curve[0].loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert record.curve[0].gradient_norm == pytest.approx(float(norm), rel=1e-6)


def test_dropout_is_drawn_anew_in_every_step(recipe, tmp_path, monkeypatch):
    seeds = []
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (seeds.append(seed), manual_seed(seed))[1])
    train(recipe(training={"steps": 3}), tmp_path / "run")
    train(recipe(training={"steps": 3}, seed=1), tmp_path / "other")
    assert len(set(seeds)) == len(seeds) == 6


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-stream", "bf16-true"])
def test_half_precision_trains_resumes_and_keeps_scalars_wide(recipe, tmp_path, precision):
    made = recipe(training={"precision": precision, "steps": 6})
    train(made, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(made, tmp_path / "cut", on_event=cut_at(5))
    train(made, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")
    weights = load_file(list_checkpoints(tmp_path / "whole")[-1] / "model.safetensors")
    for name, tensor in weights.items():
        wide = precision != "bf16-true" or ".mechanisms." in name
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name


def test_sigkill_in_the_middle_then_resume(recipe, tmp_path):
    file = tmp_path / "recipe.yaml"
    # Steps slow enough to be hit, checkpoints at places the kill will not know.
    values = recipe(training={"steps": 40}, reporting={"log_every": 1, "save_every": 7})
    file.write_text(yaml.safe_dump(values.model_dump(mode="json")))
    train(values, tmp_path / "whole")
    process = processes.Command("train", file, "--out", tmp_path / "cut")
    log = tmp_path / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= 12):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert read_record(tmp_path / "cut").status == "running"
    train(values, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_saves_and_says_how_to_go_on(recipe, finished, tmp_path, request, number):
    # In the background of a script SIGINT is ignored, and a run leaves that so.
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, before))

    def ask(step, point):
        if step == 5:
            os.kill(os.getpid(), number)

    finished(recipe(), tmp_path / "whole")
    with pytest.raises(Interrupted, match=r"step 5, which is saved; run .* --resume"):
        train(recipe(), tmp_path / "cut", on_event=ask)
    assert list_checkpoints(tmp_path / "cut")[-1].name == "step-000005"
    train(recipe(), tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_accumulated_steps_equal_one_large_batch(recipe, tmp_path):
    exact = {"precision": "64-true", "steps": 5}
    a = train(
        recipe(model={"residual_dropout": 0.0}, training=exact | {"batch_size": 8, "gradient_accumulation_steps": 1}),
        tmp_path / "a",
    )
    b = train(
        recipe(model={"residual_dropout": 0.0}, training=exact | {"batch_size": 2, "gradient_accumulation_steps": 4}),
        tmp_path / "b",
    )
    for x, y in zip(a.curve, b.curve, strict=True):
        assert x.loss == pytest.approx(y.loss, rel=1e-7)
        assert x.gradient_norm == pytest.approx(y.gradient_norm, rel=1e-6)


def test_gradient_checkpointing_changes_nothing(recipe, finished, tmp_path):
    a = finished(recipe(), tmp_path / "a")
    b = train(recipe(training={"gradient_checkpointing": True}), tmp_path / "b")
    assert [p.loss for p in a.curve] == pytest.approx([p.loss for p in b.curve], rel=1e-5)


def test_checkpoints_are_hugging_face_folders(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    model = AutoModelForCausalLM.from_pretrained(newest)
    assert isinstance(model, HeadwaterForCausalLM)
    assert AutoTokenizer.from_pretrained(newest)("ab").input_ids == [
        256,
        97,
        98,
    ]  # it begins with the start token, as training does
    assert json.loads((newest / "training.json").read_text())["format_version"] == 2


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(recipe, tmp_path):
    constant = {"schedule": "constant"}
    train(recipe(training=constant | {"steps": 8}), tmp_path / "run")
    train(recipe(training=constant | {"steps": 12}), tmp_path / "run", resume=True)
    train(recipe(training=constant | {"steps": 12}), tmp_path / "whole")
    a, b = (load_file(list_checkpoints(tmp_path / n)[-1] / "model.safetensors") for n in ("run", "whole"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_run_is_not_overwritten(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    with pytest.raises(HeadwaterError, match=r"already holds a run .* add --resume"):
        train(recipe(), tmp_path / "run")


def test_a_record_says_when_and_by_which_code_it_was_written(recipe, finished, tmp_path):
    finished(recipe(), tmp_path / "run")
    recorded = read_record(tmp_path / "run").recorded
    assert recorded.source == "run"
    assert datetime.now(UTC) - datetime.fromisoformat(f"{recorded.date}T00:00Z") < timedelta(days=2)
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
        assert head.startswith(recorded.commit.removesuffix("-dirty"))


def test_a_record_says_how_the_model_ran(recipe, finished, tmp_path):
    """Also what the recipe leaves open; a record of before there was that is read all the same."""
    run = tmp_path / "run"
    finished(recipe(), run)
    ran = read_record(run).environment
    assert ran.device == "cpu"
    assert ran.device_name == describe_cpu() != ""
    assert (ran.compiled, ran.attention) == (False, "sdpa")
    content = json.loads((run / "record.json").read_text())
    for name in ("device_name", "compiled", "attention"):
        del content["environment"][name]
    (tmp_path / "record.json").write_text(json.dumps(content))
    old = read_record(tmp_path).environment
    assert (old.device_name, old.compiled, old.attention) == (None, None, None)


def test_two_runs_cannot_share_a_folder(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("headwater_lab.util.output_folder.PATIENCE", 0.2)

    def second(step, point):
        with pytest.raises(HeadwaterError, match="Another command is writing"):
            train(recipe(), tmp_path / "run")
        raise PowerCut

    with pytest.raises(PowerCut):
        train(recipe(), tmp_path / "run", on_event=second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"hidden_size": 32}}, "model.hidden_size=16 and cannot be resumed with 32"),
        ({"model": {"mechanisms": {}}}, r"model\.mechanisms="),
        ({"model": {"hidden_size": 32}, "seed": 5}, "size=16, seed=0 and cannot be resumed with 32, 5; restore them"),
        ({"data": {"context": 16}}, r"data\.context=32"),
        ({"seed": 5}, "seed=0 and cannot be resumed with 5"),
        ({"training": {"batch_size": 8}}, r"training\.batch_size=4"),
        ({"training": {"steps": 3}}, "already at step 12"),
    ],
)
def test_a_resumed_run_must_be_the_same_run(recipe, finished, tmp_path, change, message):
    finished(recipe(), tmp_path / "run")
    with pytest.raises(HeadwaterError, match=message):
        train(recipe(**change), tmp_path / "run", resume=True)


@pytest.mark.parametrize(("schedule", "notices"), [("cosine", 1), ("constant", 0)])
def test_a_run_that_resumes_with_another_number_of_steps_says_that_its_rates_differ(
    recipe, tmp_path, schedule, notices
):
    for steps in (4, 6, 6):
        made = recipe(training={"steps": steps, "warmup_steps": 1, "schedule": schedule})
        record = train(made, tmp_path / "run", resume=steps > 4)
    found = [notice for notice in record.notices if "training.steps was 4 until here and is now 6" in notice.message]
    assert [notice.step for notice in found] == [4] * notices


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_diverging_run_stops_with_a_sentence_and_says_so_in_its_record(recipe, tmp_path, clip):
    wild = {"learning_rate": 1e30, "max_grad_norm": clip, "warmup_steps": 0, "steps": 30}
    with pytest.raises(HeadwaterError, match=r"diverged: at step \d+ .* Lower training\.learning_rate"):
        train(recipe(training=wild), tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert record.status == "diverged"
    assert "diverged" in record.error
    assert record.tokens < 30 * 4 * 32


def test_a_last_step_that_breaks_the_model_is_not_a_finished_run(recipe, tmp_path):
    """The loss of a step is that of the weights before it, so only the evaluation shows what the last one did."""
    wild = {"learning_rate": 1e30, "warmup_steps": 0, "steps": 1}
    with pytest.raises(Diverged, match=r"after step 1 the held-out .* is nan; lower training\.learning_rate"):
        train(recipe(training=wild), tmp_path / "run")
    assert read_record(tmp_path / "run").status == "diverged"
    assert not list_checkpoints(tmp_path / "run")


def test_a_run_killed_before_its_record_is_finished_on_resume(recipe, finished, tmp_path):
    whole = finished(recipe(), tmp_path / "run")
    (tmp_path / "run" / "record.json").unlink()
    again = train(recipe(), tmp_path / "run", resume=True)
    assert (again.curve, again.held_out, again.documents) == (whole.curve, whole.held_out, whole.documents)


def test_a_device_that_is_not_there_is_one_sentence(recipe, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(
        HeadwaterError, match=r"training\.devices=1 needs 1 cuda device, and PyTorch finds 0; set training\.device=cpu"
    ):
        train(recipe(training={"device": "cuda"}), tmp_path / "run")


def test_compile_without_a_compiler_is_one_sentence(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    from torch._inductor import config, cpp_builder

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    cpp_builder.get_cpp_compiler.cache_clear() if hasattr(cpp_builder.get_cpp_compiler, "cache_clear") else None
    with pytest.raises(HeadwaterError, match=r"needs a C\+\+ compiler"):
        train(recipe(training={"compile": True}), tmp_path / "run")


@pytest.mark.parametrize("compile", [True, "whole"])
def test_a_compiled_run_is_the_same(recipe, tmp_path, monkeypatch, compile):
    """With another backend than a run's, which needs a C++ compiler, and minutes."""
    monkeypatch.setattr(setup, "compile_model", partial(compile_model, backend="eager"))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "none is needed")
    _dynamo.reset()
    counters.clear()
    model, training = {"mechanisms": {"kv_shift": {}}}, {"z_loss": 1e-3}
    as_it_is = train(recipe(model=model, training=training), tmp_path / "as it is")
    assert not counters["stats"]
    compiled = train(recipe(model=model, training=training | {"compile": compile}), tmp_path / "compiled")
    assert compiled.environment.compiled
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2 if compile == "whole" else graphs > 1
    assert not counters["graph_break"]
    losses = [[point.loss for point in record.curve] for record in (as_it_is, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def overwrite_memory(graph, inputs, mode):
    """A compiler whose outputs have fixed memory, as those of CUDA graphs: the next pass overwrites them all."""
    assert mode == "reduce-overhead"

    def fix_outputs(graph, inputs):
        memory = {}

        def run(*args):
            for old in memory.values():
                old.fill_(torch.nan) if old.is_floating_point() else old.fill_(0)
            outputs = graph(*args)
            for index, output in enumerate(outputs):
                if isinstance(output, torch.Tensor):
                    memory.setdefault(index, torch.empty_like(output)).copy_(output)
            # New tensors, so that a gradient is this memory and no copy of it.
            return [memory[index].view_as(x) if index in memory else x for index, x in enumerate(outputs)]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=fix_outputs, bw_compiler=fix_outputs)(graph, inputs)


def test_a_run_keeps_nothing_that_cuda_graphs_overwrite(recipe, tmp_path, monkeypatch):
    """Losses, logits and gradients, over steps that change the learning rate, are skipped, logged and evaluated."""
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "none is needed")
    training = {"steps": 8, "max_grad_norm": 1.0, "z_loss": 1e-3, "ema_decay": 0.5, "compile": "whole"}
    often = {"log_every": 1, "evaluate_every": 3}
    norm, steps = loop.gradient_norm, itertools.count(1)
    bad = torch.tensor(torch.nan)
    monkeypatch.setattr(loop, "gradient_norm", lambda options: bad if next(steps) % 8 == 4 else norm(options))
    monkeypatch.setattr(setup, "compile_model", partial(compile_model, backend="aot_eager"))
    expected = train(recipe(training=training, reporting=often), tmp_path / "compiled")
    monkeypatch.setattr(setup, "compile_model", partial(compile_model, backend=overwrite_memory))
    monkeypatch.setattr(setup, "check_cuda_graphs", lambda *unused: None)
    _dynamo.reset()
    counters.clear()
    replayed = train(recipe(training=training | {"cuda_graphs": True}, reporting=often), tmp_path / "replayed")
    assert counters["stats"]["unique_graphs"] == 2  # training and evaluation
    assert replayed.skipped_steps == 1
    assert [(p.step, p.loss) for p in replayed.curve] == [(p.step, p.loss) for p in expected.curve]
    assert [p.metrics for p in replayed.held_out] == [p.metrics for p in expected.held_out]
    assert len({p.learning_rate for p in replayed.curve}) > 4


def test_cuda_graphs_need_a_gpu(recipe, tmp_path):
    with pytest.raises(HeadwaterError, match=r"training\.cuda_graphs needs a single NVIDIA GPU; leave it out"):
        train(recipe(training={"compile": "whole", "cuda_graphs": True}), tmp_path / "run")


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"compile": True},
        {"compile": "whole", "devices": 2},
        {"compile": "whole", "gradient_accumulation_steps": 2},
    ],
)
def test_cuda_graphs_need_one_graph_in_one_process(recipe, training):
    with pytest.raises(HeadwaterError, match=r"training\.cuda_graphs needs training\.compile=whole, a single device"):
        recipe(training={"cuda_graphs": True, "gradient_accumulation_steps": 1} | training)


def test_a_compiled_model_sees_evaluation_in_one_shape(recipe, tmp_path, monkeypatch):
    """Its last batch has fewer rows: compiled for them, each layer would have one more graph."""
    shapes = []
    forward = HeadwaterForCausalLM.forward

    def seen(self, input_ids, **options):
        if not self.training:
            shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, **options)

    monkeypatch.setattr(HeadwaterForCausalLM, "forward", seen)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"Text {number} says {number * number}. " * 60)
    data = {"source": str(texts), "context": 512, "held_out": 0.9}
    found = {}
    for compiled in (False, True):
        monkeypatch.setattr(loop, "is_compiled", lambda model, compiled=compiled: compiled)
        shapes.clear()
        made = recipe(data=data, training={"steps": 1}, reporting={"evaluate_every": None})
        found[compiled] = train(made, tmp_path / f"{compiled}").result, list(shapes)
    assert len(set(found[False][1])) == 2, "the last batch has fewer rows"
    assert len(set(found[True][1])) == 1
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)


@pytest.mark.parametrize("triton", [True, False])
def test_only_a_gpu_compiles_by_default(monkeypatch, triton):
    monkeypatch.setattr(setup, "has_triton", lambda: triton)
    monkeypatch.setattr(setup, "c_compiler", lambda: "/usr/bin/gcc")
    assert setup.is_compiling(Training(), torch.device("cuda")) is triton
    assert not setup.is_compiling(Training(), torch.device("cpu"))
    assert not setup.is_compiling(Training(compile=False), torch.device("cuda"))
    assert setup.warn_uncompiled(Training(), torch.device("cuda")) is None


def test_a_run_says_that_fp32_is_slow_on_a_gpu(recipe, tmp_path, monkeypatch):
    """By default a run is in fp32 everywhere. An H100 computes that at a fifteenth of its speed in bf16."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    has_bf16, name = [True], ["NVIDIA H100 80GB HBM3"]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name[0]))
    notice = setup.warn_fp32(Training(), gpu)
    assert "in bf16, 989 TFLOP/s instead of 67; set training.precision=bf16-mixed" in notice
    name[0] = "unknown"
    assert "in bf16; set training.precision=bf16-mixed" in setup.warn_fp32(Training(), gpu)
    assert setup.warn_fp32(Training(precision="bf16-mixed"), gpu) is setup.warn_fp32(Training(), cpu) is None
    has_bf16[0] = False
    assert setup.warn_fp32(Training(), gpu) is None
    monkeypatch.setattr(setup, "warn_fp32", lambda training, device: notice)
    record = train(recipe(training={"steps": 1, "warmup_steps": 0}), tmp_path / "run")
    assert [told.message for told in record.notices] == [notice]


def test_a_gpu_without_a_c_compiler_trains_uncompiled(recipe, tmp_path, monkeypatch):
    """Triton would end the first step with its own error. A run says so; one that asks to be compiled is refused."""
    gpu = torch.device("cuda")
    for name in ("gcc", "clang", "mycc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(setup, "has_triton", lambda: True)
    for name in ("gcc", "clang"):
        assert c_compiler() == str(tmp_path / name)
        assert setup.is_compiling(Training(), gpu)
        (tmp_path / name).unlink()
    assert not setup.is_compiling(Training(), gpu)
    with pytest.raises(HeadwaterError, match=r"C compiler.*gcc or clang.*training\.compile=false"):
        setup.is_compiling(Training(compile=True), gpu)
    assert setup.warn_uncompiled(Training(compile=False), gpu) is None
    notice = setup.warn_uncompiled(Training(), gpu)
    monkeypatch.setattr(setup, "warn_uncompiled", lambda training, device: notice)
    record = train(recipe(training={"steps": 1, "warmup_steps": 0}), tmp_path / "run")
    assert [notice.message for notice in record.notices if "C compiler" in notice.message] == [
        "The model is not compiled, which is slower: Triton needs a C compiler, but none was found; install gcc or "
        "clang, or set CC."
    ]
    monkeypatch.setenv("CC", "mycc")
    assert setup.is_compiling(Training(), gpu)
    monkeypatch.setenv("CC", "missing")
    assert not setup.is_compiling(Training(), gpu)


@pytest.mark.slow
def test_tensorboard_files_are_written(recipe, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(recipe(reporting={"tensorboard": True}), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [3, 6, 9, 12]
    assert [e.step for e in events.Scalars("held_out/bits_per_byte")] == [6, 12]


def test_the_step_is_the_papers_optimiser(recipe, tmp_path):
    """One step of the loop against AdamW, clipping and the loss written out."""
    settings = {"steps": 1, "gradient_accumulation_steps": 2, "warmup_steps": 0, "precision": "64-true"}
    made = recipe(model={"residual_dropout": 0.0}, training=settings)
    train(made, tmp_path / "run")
    trained = load_model(list_checkpoints(tmp_path / "run")[-1])
    data = made.data.build()
    model = HeadwaterForCausalLM(made.config_for(data)).double()
    batches = data.batches(made.seed, 4, 0)
    rows = [next(batches) for _ in range(2)]
    total = 0.0
    for batch in rows:
        inputs = {k: v for k, v in batch.items() if k != "shift_labels"}
        scores = model(**inputs).logits.log_softmax(-1)
        total = total - scores.gather(2, batch["shift_labels"][..., None]).sum()
    (total / sum(b["shift_labels"].numel() for b in rows)).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    for name, p in model.named_parameters():
        grad = p.grad * min(1.0, 1.0 / float(norm))
        decays = p.ndim >= 2 and "embed" not in name and "mechanisms" not in name
        value = p.data * (1 - 1e-3 * 0.1 if decays else 1)
        expected = value - 1e-3 * grad / (grad.abs() + 1e-8)
        assert torch.allclose(trained.get_parameter(name).data, expected, rtol=0, atol=2e-6), name


def test_the_loop_knows_what_may_change_on_resume(recipe):
    fields = set(recipe().training.model_dump())
    of_training = {name for name in setup.MAY_CHANGE if name.startswith("training.")}
    assert {name.removeprefix("training.") for name in of_training} <= fields


def test_the_mechanisms_scalars_may_learn_faster(recipe, tmp_path):
    """AdamW's first step is as long as the learning rate, whatever the gradient."""

    def first_step(**training) -> dict[str, torch.Tensor]:
        made = recipe(training={"steps": 1, "warmup_steps": 0, "weight_decay": 0.0} | training)
        run = tmp_path / str(training)
        train(made, run)
        after = load_file(list_checkpoints(run)[-1] / "model.safetensors")
        before = HeadwaterForCausalLM(HeadwaterConfig.from_pretrained(list_checkpoints(run)[-1])).state_dict()
        return {name: tensor - before[name] for name, tensor in after.items()}

    slow, fast = first_step(), first_step(scalar_learning_rate_multiplier=10.0)
    for name, moved in slow.items():
        times = 10 if ".mechanisms." in name else 1
        assert torch.allclose(fast[name], times * moved, rtol=1e-3, atol=1e-6), name


def test_only_trainable_mechanisms_are_trained(recipe, tmp_path):
    made = recipe(training={"trainable_mechanisms": ["kv_shift"]})
    with pytest.raises(PowerCut):
        train(made, tmp_path / "run", on_event=cut_at(5))
    train(made, tmp_path / "run", resume=True)
    before, after = (load_model(list_checkpoints(tmp_path / "run")[at]).state_dict() for at in (0, -1))
    assert {name for name in after if not torch.equal(before[name], after[name])} == {
        name for name in after if ".kv_shift." in name
    }


@pytest.mark.parametrize(
    ("names", "message"), [(["svformer"], "no parameters of 'svformer'"), (["value_embedding"], "of 'value_embedding'")]
)
def test_what_has_no_parameters_cannot_be_trained_alone(recipe, tmp_path, names, message):
    with pytest.raises(HeadwaterError, match=message):
        train(
            recipe(model={"mechanisms": {"svformer": {}}}, training={"trainable_mechanisms": names}), tmp_path / "run"
        )
