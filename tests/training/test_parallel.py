"""Several processes: what they train is what one process trains."""

import json
import os
import shutil
import signal
import socket

import pytest
import torch
import worker
from safetensors import safe_open
from safetensors.torch import load_file
from trials import same_end

import processes
from headwater.util.errors import HeadwaterError
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.checkpoints import find_damage, list_checkpoints, load_model
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record

STEPS = 12


def recipe(folder, strategy="auto", **changes):
    """Plain values of a recipe with dropout, accumulation, and more steps than an epoch has."""
    values = {
        "data": {
            "kind": "text",
            "source": str(folder / "corpus"),
            "context": 32,
        },
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mechanisms": {"kv_shift": {}, "value_residual": {"mode": "learnable"}},
        },
        "training": {
            "steps": STEPS,
            "batch_size": 4,
            "gradient_accumulation_steps": 2,
            "warmup_steps": 2,
            "threads": 1,
            "strategy": strategy,
            "z_loss": 1e-3,
            "loss_chunk_tokens": 24,
        },
        "reporting": {
            "log_every": 1,
            "save_every": 4,
            "evaluate_every": 6,
            "tensorboard": False,
            "keep_checkpoints": 99,
        },
    }
    for section, fields in changes.items():
        values[section] = values[section] | fields
    return values


def together(folder, jobs, world=2):
    """Run the jobs, one after another, in `world` processes, as torchrun would start them."""
    file = folder / f"jobs-{len(list(folder.glob('jobs-*')))}.json"
    file.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "test"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    started = [
        processes.Command(
            file, call=worker.main, env=os.environ | size | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(world)
    ]
    for one in started:
        _, err = one.communicate(timeout=300)
        assert one.returncode == 0, err[-4000:]


DROPOUT = {"residual_dropout": 0.5}
HALF = {"precision": "bf16-mixed"}
STREAM = {"precision": "bf16-stream"}
HALF_TRUE = {"precision": "bf16-true"}
PAIRS = {"attention_pairs": 7, "ffn_pairs": 9}
KINDS = {"ddp": {}, "fsdp": {}}


def dropped(folder, kind):
    """With dropout: a whole run, and one that is asked to stop and goes on."""
    made = recipe(folder, kind, model=DROPOUT)
    yield {"recipe": made, "out": str(folder / f"{kind}-whole")}
    stopped = {"recipe": made, "out": str(folder / f"{kind}-cut")}
    yield stopped | {"signal_at": 5, "signal": int(signal.SIGTERM)}
    yield stopped | {"resume": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs that all tests here look at; starting processes takes longer than training."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "corpus").mkdir()
    for i in range(15):
        (folder / "corpus" / f"{i}.txt").write_text(f"Document {i} says {i * i} and {'na' * (i % 5)}. " * 6)
    train(parse(recipe(folder), "test"), folder / "one")
    jobs = []
    jobs += [{"recipe": recipe(folder, kind), "out": str(folder / kind)} for kind in KINDS]
    jobs.append({"recipe": recipe(folder, "ddp"), "out": str(folder / "ddp")})  # there already
    often = recipe(folder, "fsdp", reporting={"save_every": 2})
    jobs.append({"recipe": often, "out": str(folder / "full"), "full_at": 4})
    together(folder, jobs)
    return folder


@pytest.fixture(scope="module")
def further(trained):
    """More of them, for the tests that are slow."""
    folder, jobs = trained, [job for kind in KINDS for job in dropped(trained, kind)]
    for kind in KINDS:
        jobs.append({"recipe": recipe(folder, kind, training=HALF), "out": str(folder / f"{kind}-half")})
        jobs.append({"recipe": recipe(folder, kind, training=STREAM), "out": str(folder / f"{kind}-stream")})
    tied = {"tie_word_embeddings": True, "mechanisms": {"pattention": PAIRS}}
    jobs.append({"recipe": recipe(folder, "fsdp", model=tied), "out": str(folder / "fsdp-tied")})
    plus = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "mechanisms": {"kv_shift": {}, "value_residual": {"mode": "learnable_plus"}},
    }
    plus["mechanisms"]["dense_former"] = {}
    jobs.append({"recipe": recipe(folder, "fsdp", model=plus, training=HALF_TRUE), "out": str(folder / "fsdp-plus")})
    jobs.append({"recipe": recipe(folder, "ddp", model=plus, training=HALF_TRUE), "out": str(folder / "ddp-plus")})
    jobs.append(
        {
            "recipe": recipe(folder, "fsdp", training={"optimizer": "muon"}),
            "out": str(folder / "fsdp-muon"),
        }
    )
    # A model that was trained here, and is grown and trained on by one process and by two.
    small = recipe(folder, model={"mechanisms": {"pattention": PAIRS}})
    train(parse(small, "test"), folder / "small")
    start = {"checkpoint": str(folder / "small"), "grow": {"attention_pairs": 12}, "optimizer_state": "keep"}
    train(parse(small | {"start": start}, "test"), folder / "grown-one")
    for kind in KINDS:
        grown = recipe(folder, kind, model={"mechanisms": {"pattention": PAIRS}}) | {"start": start}
        jobs.append({"recipe": grown, "out": str(folder / f"grown-{kind}")})
    # A model that learns from the one that it goes over from.
    heads = {"num_key_value_heads": 2, "mechanisms": None}
    train(parse(recipe(folder, model=heads), "test"), folder / "wide")
    start = {"checkpoint": str(folder / "wide"), "convert": {"num_key_value_heads": 1, "anneal": True}}
    distilled = {"distillation": {}, "loss_chunk_tokens": None}
    train(parse(recipe(folder, model=heads, training=distilled) | {"start": start}, "test"), folder / "distilled-one")
    for kind in KINDS:
        made = recipe(folder, kind, model=heads, training=distilled) | {"start": start}
        jobs.append({"recipe": made, "out": str(folder / f"distilled-{kind}")})
    together(folder, jobs)
    return folder


def curve(run):
    return [point.loss for point in read_record(run).curve]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_learn_from_a_teacher_as_one(further, kind):
    """Each process holds the teacher whole."""
    assert curve(further / f"distilled-{kind}") == pytest.approx(curve(further / "distilled-one"), rel=1e-5)
    one, two = (load_model(list_checkpoints(further / f"distilled-{run}")[-1]).state_dict() for run in ("one", kind))
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(trained, kind):
    one, two = read_record(trained / "one"), read_record(trained / kind)
    assert len(two.curve) == STEPS
    assert curve(trained / kind) == pytest.approx(curve(trained / "one"), rel=1e-5)
    norms = [[point.gradient_norm for point in record.curve] for record in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert two.held_out[-1].metrics == pytest.approx(one.held_out[-1].metrics, rel=1e-5)
    assert (two.tokens, two.data_order, two.environment.world_size) == (one.tokens, one.data_order, 2)
    a, b = (load_model(list_checkpoints(trained / run)[-1]).state_dict() for run in ("one", kind))
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-5), name


COMPILED = {"alike": {"kv_shift": {}, "value_residual": {}}, "all different": {"kv_shift": {}, "dense_former": {}}}


def compiled_jobs(folder, out, kind, mechanisms, again):
    """The same training, at two depths, compiled, and at the second also without."""
    for layers, compile in ((3, True), (9, True), (9, False)):
        fields = {"compile": compile, "gradient_checkpointing": again, "steps": 3, "loss_chunk_tokens": None}
        made = recipe(folder, kind, model={"num_hidden_layers": layers, "mechanisms": mechanisms}, training=fields)
        made["reporting"] |= {"save_every": None, "evaluate_every": 2}
        yield {"recipe": made, "out": str(out / f"{layers}-{compile}")}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.slow
def test_equal_layers_share_one_graph_in_every_process(trained, tmp_path, kind, name, again):
    together(trained, list(compiled_jobs(trained, tmp_path, kind, COMPILED[name], again)))
    counts = {}
    for layers in (3, 9):
        for rank in (0, 1):
            counts[layers], breaks = json.loads((tmp_path / f"{layers}-True.graphs-{rank}").read_text())
            # Training, on rows of several documents and on whole ones, and evaluation; and the loss.
            assert breaks == 0
            assert counts[layers] <= 3 * (2 if name == "alike" else layers) + 1
    assert name != "alike" or counts[9] == counts[3]
    assert curve(tmp_path / "9-True") == pytest.approx(curve(tmp_path / "9-False"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_four_processes_train_stop_and_go_on(trained, kind, tmp_path):
    """Under FSDP to the last bit; DDP sums in another order in the first step after a resume."""
    made = recipe(trained, kind, model=DROPOUT)
    stopped = {"recipe": made, "out": str(tmp_path / "cut"), "signal_at": 5, "signal": int(signal.SIGTERM)}
    plain = {"recipe": recipe(trained, kind), "out": str(tmp_path / "plain")}
    whole = {"recipe": made, "out": str(tmp_path / "whole")}
    together(trained, [plain, whole, stopped, {"recipe": made, "out": str(tmp_path / "cut"), "resume": True}], world=4)
    assert curve(tmp_path / "plain") == pytest.approx(curve(trained / "one"), rel=1e-5)
    assert read_record(tmp_path / "plain").data_order == read_record(trained / "one").data_order
    assert "is saved; run the same command with --resume" in (tmp_path / "cut.said").read_text()
    assert list_checkpoints(tmp_path / "cut")[1].name == "step-000006"
    bits = kind == "fsdp"
    assert curve(tmp_path / "cut") == (curve(tmp_path / "whole") if bits else pytest.approx(curve(tmp_path / "whole")))
    a, b = (list_checkpoints(tmp_path / how)[-1] for how in ("whole", "cut"))
    assert len(list(a.glob("shard-*"))) == (4 if kind == "fsdp" else 0)
    for file in a.glob("*.safetensors"):
        x, y = load_file(file), load_file(b / file.name)
        assert x.keys() == y.keys()
        for name in x:
            assert torch.equal(x[name], y[name]) if bits else torch.allclose(x[name], y[name], 1e-3, 1e-5), name
    # One process goes on from where four stopped.
    shutil.rmtree(list_checkpoints(tmp_path / "plain")[-1])
    train(parse(recipe(trained), "test"), tmp_path / "plain", resume=True)
    assert curve(tmp_path / "plain") == pytest.approx(curve(trained / "one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_again_is_the_same(further, kind, tmp_path):
    made = recipe(further, kind, model=DROPOUT, training={"gradient_checkpointing": True})
    together(further, [{"recipe": made, "out": str(tmp_path / "run")}])
    assert curve(tmp_path / "run") == pytest.approx(curve(further / f"{kind}-whole"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_begin_with_a_grown_model_as_one_does(further, kind):
    assert not (further / f"grown-{kind}.said").exists()
    assert curve(further / f"grown-{kind}") == pytest.approx(curve(further / "grown-one"), rel=1e-5)
    one, two = read_record(further / "grown-one"), read_record(further / f"grown-{kind}")
    assert two.held_out[0].metrics == pytest.approx(read_record(further / "small").held_out[-1].metrics, rel=1e-5)
    assert (two.origin, two.data_order) == (one.origin, one.data_order)
    a, b = (load_model(list_checkpoints(further / run)[-1]).state_dict() for run in ("grown-one", f"grown-{kind}"))
    assert all(torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-5) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_were_stopped_go_on_to_the_same_end(further, kind):
    text = (further / f"{kind}-cut.said").read_text()
    assert "is saved; run the same command with --resume" in text
    whole, cut = (read_record(further / f"{kind}-{how}") for how in ("whole", "cut"))
    assert cut.curve == whole.curve
    assert cut.held_out == whole.held_out
    assert cut.data_order == whole.data_order
    a, b = (list_checkpoints(further / f"{kind}-{how}")[-1] for how in ("whole", "cut"))
    for file in a.glob("*.safetensors"):
        x, y = load_file(file), load_file(b / file.name)
        assert x.keys() == y.keys()
        assert all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.slow
def test_dropout_differs_between_processes_and_steps(trained):
    assert curve(trained / "ddp-whole") != pytest.approx(curve(trained / "ddp"), rel=1e-4)
    seeds = [json.loads((trained / f"ddp-whole.seeds-{rank}").read_text()) for rank in range(2)]
    assert len(seeds[0]) == len(seeds[1]) == STEPS
    assert len({*seeds[0], *seeds[1]}) == 2 * STEPS
    assert json.loads((trained / "ddp-cut.seeds-1").read_text()) == seeds[1][6:], "the same steps, the same dropout"


def test_a_sharded_checkpoint_is_split_and_holds_no_pickle(trained):
    newest = list_checkpoints(trained / "fsdp")[-1]
    names = {path.name for path in newest.iterdir()}
    shards = [name for name in names if name.startswith("shard-")]
    assert len(shards) == 2
    assert names - set(shards) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.json",
        "history.json", "SHA256SUMS",
    }  # fmt: skip
    rows = []
    for shard in shards:
        with safe_open(newest / shard, "pt") as file:
            rows.append(file.get_slice("lm_head.weight").get_shape()[0])
    assert sum(rows) == 257
    assert all(rows)
    assert find_damage(newest) is None


def test_an_error_of_any_process_ends_all_and_leaves_what_was_saved(trained):
    """Processes that did not end together would wait for each other: the jobs after this one would not run."""
    text = (trained / "full.said").read_text()
    assert "Process 1: The checkpoint of step 4 could not be saved" in text
    assert "the disk is full; the one of step 2 is intact" in text
    assert [path.name for path in (trained / "full" / "checkpoints").iterdir()] == ["step-000002"]
    assert find_damage(list_checkpoints(trained / "full")[-1]) is None
    assert len(curve(trained / "full")) <= 7, "it is told before the next save"


def test_a_lost_shard_is_damage(trained, tmp_path):
    shutil.copytree(trained / "fsdp", tmp_path / "run")
    newest, before = list_checkpoints(tmp_path / "run")[::-1][:2]
    next(newest.glob("shard-00002*")).unlink()
    assert "shard-00002" in find_damage(newest)
    record = train(parse(recipe(trained, training={"steps": STEPS}), "test"), tmp_path / "run", resume=True)
    assert f"{newest.name} is damaged" in record.notices[-1].message
    assert record.status == "finished"
    # The same steps again, in one process instead of two.
    assert before.name == "step-000008"
    assert curve(tmp_path / "run") == pytest.approx(curve(trained / "fsdp"), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_where_two_stopped(trained, tmp_path, kind):
    shutil.copytree(trained / kind, tmp_path / "run")
    for late in list_checkpoints(tmp_path / "run")[2:]:
        shutil.rmtree(late)
    train(parse(recipe(trained), "test"), tmp_path / "run", resume=True)
    assert curve(tmp_path / "run") == pytest.approx(curve(trained / "one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "then"), [("one", "fsdp"), ("one", "ddp"), ("fsdp", "ddp"), ("ddp", "fsdp")])
def test_two_processes_go_on_where_others_stopped(trained, tmp_path, kind, then):
    shutil.copytree(trained / kind, tmp_path / "run")
    for late in list_checkpoints(tmp_path / "run")[2:]:
        shutil.rmtree(late)
    together(tmp_path, [{"recipe": recipe(trained, then), "out": str(tmp_path / "run"), "resume": True}])
    assert curve(tmp_path / "run") == pytest.approx(curve(trained / "one"), rel=1e-5)
    assert read_record(tmp_path / "run").data_order == read_record(trained / "one").data_order


@pytest.mark.slow
def test_scalars_stay_wide_in_half_precision(further):
    """Under FSDP2 too, which casts what it collects; and they are further."""
    start = load_model(list_checkpoints(further / "fsdp-half")[0])
    end = load_model(list_checkpoints(further / "fsdp-half")[-1])
    for name, tensor in end.state_dict().items():
        assert tensor.dtype == torch.float32, name
        if ".mechanisms." in name:
            change = tensor - start.get_parameter(name)
            assert change.abs().max() > 0, name
            assert (tensor.bfloat16().float() != tensor).any(), f"{name} has been rounded"
    assert curve(further / "fsdp-half") == pytest.approx(curve(further / "one"), rel=0.03)
    assert curve(further / "ddp-half") == pytest.approx(curve(further / "one"), rel=0.03)


@pytest.mark.slow
def test_the_stream_is_in_bf16_under_fsdp_anyway(further):
    """It gathers parameters in bf16, so that nothing is left to cast."""
    assert curve(further / "fsdp-stream") == curve(further / "fsdp-half")
    assert curve(further / "ddp-stream") == pytest.approx(curve(further / "one"), rel=0.03)


@pytest.mark.slow
def test_tied_and_odd_sizes_are_split_too(further, tmp_path):
    """Seven pairs over two processes; one table for embedding and output."""
    made = recipe(further, model={"tie_word_embeddings": True, "mechanisms": {"pattention": PAIRS}})
    train(parse(made, "test"), tmp_path / "run")
    assert curve(further / "fsdp-tied") == pytest.approx(curve(tmp_path / "run"), rel=1e-5)
    model = load_model(list_checkpoints(further / "fsdp-tied")[-1])
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_many_mechanisms_in_bf16_true_agree_between_ddp_and_fsdp(further):
    """And their scalars, some of them shared by all layers, stay fp32."""
    ddp, fsdp = (load_model(list_checkpoints(further / f"{kind}-plus")[-1]) for kind in KINDS)
    for name, parameter in fsdp.named_parameters():
        wide = ".mechanisms." in name
        assert parameter.dtype == ddp.get_parameter(name).dtype == (torch.float32 if wide else torch.bfloat16), name
    assert curve(further / "fsdp-plus") == pytest.approx(curve(further / "ddp-plus"), rel=1e-2)


@pytest.mark.slow
def test_muon_works_on_split_matrices(further, tmp_path):
    train(parse(recipe(further, training={"optimizer": "muon"}), "test"), tmp_path / "run")
    # Its iteration runs in bf16, so that the order of sums shows.
    assert curve(further / "fsdp-muon") == pytest.approx(curve(tmp_path / "run"), rel=2e-3)


def test_a_refusal_reaches_all_processes_and_is_said_once(trained):
    assert "already holds a run" in (trained / "ddp.said").read_text()


@pytest.mark.slow
def test_export_makes_one_model_of_shards(trained, tmp_path, run):
    code, out, _ = run("export", trained / "fsdp", "--out", tmp_path / "exported")
    assert code == 0, out
    model = load_model(tmp_path / "exported")
    same = load_model(list_checkpoints(trained / "fsdp")[-1])
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    for name, tensor in same.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_rows_that_do_not_divide_are_refused(tmp_path, trained):
    with pytest.raises(HeadwaterError, match=r"batch_size=4 rows cannot be divided among 3 processes"):
        train(parse(recipe(trained, training={"devices": 3}), "test"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_line_starts_its_own_processes(trained, tmp_path):
    import yaml

    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(trained, training={"devices": 2})))
    code, out, err = processes.run("train", file, "--out", tmp_path / "run")
    assert code == 0, err[-2000:]
    assert out.count("held-out") == 1, "one of them speaks"
    same_end(trained / "ddp", tmp_path / "run")


def test_fsdp_hands_gradients_on_after_each_forward_pass(trained):
    """Kept until the last one they would be whole in every process."""
    kept = json.loads((trained / "fsdp.unsharded-0").read_text())
    assert len(kept) == 2 * STEPS
    assert not any(kept)
