"""`headwater grow`, `widen`, `shrink`, `retrofit`, and `export --family`, as a user calls them."""

import functools
import hashlib
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import headwater_lab as lab
import processes
from conftest import VOCAB, build, disturb, shared, tokens
from headwater import HeadwaterForCausalLM
from headwater.growth import pairs_of
from headwater_lab.data.tokenizer import load_tokenizer
from headwater_lab.training.checkpoints import newest_checkpoint, read_history
from headwater_lab.training.loop import train
from headwater_lab.training.records import Event
from headwater_lab.training.saving import write_model

PAIRS = {"pattention": {"attention_pairs": 7, "ffn_pairs": 13}}


def digest(folder: Path) -> str:
    """Of every file's name and content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


@pytest.fixture
def small(tmp_path):
    """A checkpoint with parameter tokens."""
    return write_model(tmp_path / "small", shared(PAIRS))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A Llama of transformers, not to be changed."""
    folder = tmp_path_factory.mktemp("written") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return folder


@pytest.fixture
def llama(written, tmp_path):
    return shutil.copytree(written, tmp_path / "llama")


def logits(folder: Path, vocabulary: int = VOCAB) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(tokens(2, 20) % vocabulary).logits


class TestGrow:
    def test_it_writes_a_larger_model_of_the_same_function_beside_the_source(self, run, small):
        before = digest(small)
        code, out, _ = run("grow", small, "attention_pairs=1000", "ffn_pairs=14")
        target = small.with_name("small-grown")
        assert code == 0
        assert str(target) in out
        assert digest(small) == before
        a, b = logits(small), logits(target)
        assert (a - b).abs().max() < 1e-12 * a.abs().max()
        assert pairs_of(HeadwaterForCausalLM.from_pretrained(target))["key"] == 1000
        (event,) = read_history(target)
        assert (event.kind, event.details["attention_pairs"]) == ("grown", 1000)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["attention_pairs=3"], "at least 7"),
            (["attention_pairs=0"], "greater than or equal to 1"),
            ([], "Nothing would grow"),
            (["num_hidden_layers=4", "method=foo"], "headwater: There is no growth method 'foo'"),
            (["ffn_pairs=20", "key_init=one"], "'zero' or 'random'"),
            (["ffn_pairs=20", "tau=x"], "'keep' or 'recompute'"),
        ],
    )
    def test_what_it_cannot_do_is_one_sentence(self, run, small, arguments, message, tmp_path):
        code, _, err = run("grow", small, *arguments, "--out", tmp_path / "x")
        assert code == 2
        assert message in err
        assert len(err.strip().splitlines()) == 1
        assert not (tmp_path / "x").exists()

    def test_a_model_of_linear_maps_and_a_damaged_one_are_refused(self, run, tmp_path, small):
        write_model(tmp_path / "linear", shared())
        for (command, *to), message in (
            (("grow", "attention_pairs=9"), "no parameter tokens"),
            (("shrink", "--attention-pairs", 9), "does not record what it was trained on"),
        ):
            code, _, err = run(command, tmp_path / "linear", *to)
            assert code == 2
            assert message in err
        file = small / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.0.mlp.key"] = tensors["model.layers.0.mlp.key"][:5]
        save_file(tensors, file)
        code, _, err = run("grow", small, "attention_pairs=9")
        assert code == 2
        assert "changed since it was written" in err
        (small / "SHA256SUMS").unlink()
        code, _, err = run("grow", small, "attention_pairs=9")
        assert code == 2
        assert "mismatched" in err
        assert len(err.strip().splitlines()) == 1

    def test_beside_the_source_is_never_inside_it(self, run, small, monkeypatch):
        before = digest(small)
        monkeypatch.chdir(small)
        assert run("grow", ".", "attention_pairs=9")[0] == 0
        assert digest(small) == before
        assert (small.with_name("small-grown") / "config.json").is_file()

    def test_what_cannot_be_written_or_held_is_said(self, run, small, tmp_path):
        (tmp_path / "file").write_text("x")
        code, _, err = run("grow", small, "attention_pairs=9", "--out", tmp_path / "file" / "x")
        assert code == 2
        assert "cannot be written" in err
        for pairs, message in ((2_000_000_000, "GB of memory"), (99_999_999_999, "less than or equal to")):
            code, _, err = run("grow", small, f"attention_pairs={pairs}", "--out", tmp_path / "x")
            assert code == 2
            assert message in err

    def test_a_folder_that_is_in_use_is_refused_before_any_work(self, run, small):
        target = small.with_name("small-grown")
        target.mkdir()
        (target / "mine").write_text("x")
        code, _, err = run("grow", small, "attention_pairs=9")
        assert code == 2
        assert "already exists" in err
        assert (target / "mine").read_text() == "x"

    def test_a_full_disk_leaves_the_source_as_it_was_and_nothing_behind(self, small, tmp_path):
        before, full = digest(small), functools.partial(processes.small_files, 20_000)
        code, _, err = processes.run("grow", small, "attention_pairs=900", before=full)
        assert code == 2
        assert "could not be written" in err
        assert "Traceback" not in err
        assert digest(small) == before
        assert [path.name for path in tmp_path.iterdir()] == ["small"]

    @pytest.mark.slow
    @pytest.mark.sampled(2)
    def test_killed_while_it_writes_it_leaves_the_source_as_it_was_and_can_be_called_again(self, run, small, tmp_path):
        before = digest(small)
        process = processes.Command("grow", small, "attention_pairs=60000")
        until = time.monotonic() + 90
        while not list(tmp_path.glob(".writing-small-grown-*")) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it was killed in time"
        assert digest(small) == before
        assert not (tmp_path / "small-grown").exists()
        assert run("grow", small, "attention_pairs=9")[0] == 0
        shown = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
        assert shown == ["small", "small-grown"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize(
    ("sizes", "method"), [((5, 64), "identity+hypercloning"), ((3, 48), "lemon"), ((6, 32), "stack")]
)
def test_a_hugging_face_model_grows_in_one_step_and_goes_back(run, tmp_path, family, sizes, method):
    layers, width = sizes
    common = dict(
        vocab_size=257, num_hidden_layers=3, hidden_size=32, num_attention_heads=4, bos_token_id=1, eos_token_id=2
    )
    more = {} if family == "gpt2" else dict(num_key_value_heads=2, intermediate_size=48)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **common, **more, tie_word_embeddings=False))
    disturb(model)
    model.save_pretrained(source := tmp_path / family)
    load_tokenizer("bytes").save_pretrained(source)
    before = digest(source)
    extra = [f"num_hidden_layers={layers}"] if layers != 3 else []
    units = more.get("intermediate_size", 128)
    units = 2 * units if width == 64 else units + 32
    if width != 32:
        extra += [f"hidden_size={width}", f"num_attention_heads={width // 8}", f"intermediate_size={units}"]
    code, out, err = run("grow", source, *extra, f"method={method}")
    assert code == 0, err
    assert f"{family} → headwater" in out
    assert digest(source) == before
    grown = source.with_name(f"{family}-grown")
    assert [event.kind for event in read_history(grown)] == ["retrofitted", "grown"]
    found = AutoModelForCausalLM.from_pretrained(grown)
    assert (found.config.num_hidden_layers, found.config.hidden_size) == sizes
    assert (grown / "tokenizer_config.json").is_file()
    exact = method != "stack"
    assert torch.allclose(logits(grown), logits(source), atol=1e-4) == exact
    python = lab.grow(model, num_hidden_layers=layers, hidden_size=width, method=method) if width == 32 else None
    if python is not None:
        assert all(torch.equal(a, b) for a, b in zip(python.parameters(), found.parameters(), strict=True))
    code, _, err = run("export", grown, "--out", tmp_path / "back", "--family", family)
    assert code == 0, err
    assert torch.allclose(logits(tmp_path / "back"), logits(grown), atol=1e-4)


def test_a_state_of_other_shapes_is_left_out_with_a_sentence(run, tmp_path):
    """Adafactor keeps a mean per row and per column."""
    recipe = {
        "data": {"kind": "induction", "length": 16},
        "model": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
        "training": {
            "steps": 1,
            "batch_size": 2,
            "warmup_steps": 0,
            "optimizer": "torch.optim:Adafactor",
            "threads": 1,
        },
        "reporting": {"tensorboard": False},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert run("train", tmp_path / "recipe.yaml", "--out", tmp_path / "run")[0] == 0
    code, _, stderr = run("grow", tmp_path / "run", "num_hidden_layers=4", "--out", tmp_path / "deeper")
    assert code == 0, stderr
    assert "cannot be kept" in stderr
    assert newest_checkpoint(tmp_path / "deeper").is_dir()


def test_grow_writes_a_wider_model(run, tmp_path):
    write_model(tmp_path / "linear", shared())
    code, out, _ = run("grow", tmp_path / "linear", "hidden_size=48", "num_attention_heads=6")
    assert code == 0
    a, b = logits(tmp_path / "linear"), logits(tmp_path / "linear-grown")
    assert (a - b).abs().max() < 1e-12 * a.abs().max()
    assert "loss" in out
    code, _, err = run("grow", tmp_path / "linear", "hidden_size=4", "--out", tmp_path / "x")
    assert code == 2
    assert "would shrink" in err


@pytest.mark.slow
def test_shrink_takes_pairs_away_and_says_what_it_costs(run, recipe, tmp_path, corpus):
    made, one = recipe(), tmp_path / "one"
    options = {"mechanisms": {"pattention": {"attention_pairs": 8, "ffn_pairs": 9}}, "residual_dropout": 0.0}
    train(made.model_copy(update={"model": made.model | options}), one)
    code, out, err = run("shrink", one, "--attention-pairs", 3, "--ffn-pairs", 4, "--trust", corpus)
    assert code == 0, err
    small = one.with_name("one-shrunk")
    event = read_history(small)[-1]
    assert event.kind == "shrunk"
    assert f"{event.details['before']:.4f} → {event.details['after']:.4f}" in out
    record = json.loads((one / "record.json").read_text())
    assert event.details["before"] == pytest.approx(record["held_out"][-1]["metrics"]["bits_per_byte"])
    assert pairs_of(HeadwaterForCausalLM.from_pretrained(small))["query"] == 3
    text = tmp_path / "text.txt"
    text.write_text("A text of its own. " * 40)
    assert run("shrink", one, "--attention-pairs", 3, "--text", text, "--out", tmp_path / "s")[0] == 0
    for arguments, message in (
        (["--attention-pairs", 0], "1 to 8"),
        (["--ffn-pairs", 10], "1 to 9"),
        ([], "Nothing would shrink"),
        (["--attention-pairs", 3, "--text", tmp_path / "none"], "no text"),
    ):
        code, _, err = run("shrink", one, *arguments, "--out", tmp_path / "x")
        assert code == 2
        assert message in err


class TestRetrofit:
    @pytest.mark.slow
    def test_a_llama_becomes_a_checkpoint_of_the_same_logits_with_mechanisms_that_do_nothing_yet(self, run, llama):
        before = digest(llama)
        code, out, err = run("retrofit", llama, "--mechanism", "kv_shift={window: 3}", "--mechanism", "value_residual")
        assert code == 0, err
        target = llama.with_name("llama-headwater")
        assert digest(llama) == before
        a, b = logits(llama, 257), logits(target, 257)
        assert (a - b).abs().max() < 1e-5 * a.abs().max()
        saved = json.loads((target / "config.json").read_text())
        assert saved["model_type"] == "headwater"
        assert saved["mechanisms"]["kv_shift"]["window"] == 3
        assert [event.details.get("family") for event in read_history(target)] == ["llama", None]
        assert "value_residual added" in out
        assert (target / "tokenizer.json").is_file()

    @pytest.mark.slow
    def test_it_trains_on_with_any_recipe(self, run, llama, recipe, tmp_path):
        run("retrofit", llama, "--mechanism", "kv_shift", "--out", tmp_path / "start")
        record = train(recipe(start={"checkpoint": str(tmp_path / "start")}), tmp_path / "run")
        assert record.held_out[-1].metrics["loss"] < record.held_out[0].metrics["loss"]
        a, b = logits(llama, 257), logits(newest_checkpoint(tmp_path / "run"), 257)
        assert (a - b).abs().max() > 1e-3
        scalars = load_file(newest_checkpoint(tmp_path / "run") / "model.safetensors")
        alpha = scalars["model.layers.0.self_attn.mechanisms.kv_shift.alpha"]
        assert not torch.equal(alpha, torch.tensor([[1.0, 1.0], [0.0, 0.0]])), "it has learned"

    @pytest.mark.slow
    def test_and_goes_back_to_where_it_came_from(self, run, llama, tmp_path):
        assert run("retrofit", llama, "--out", tmp_path / "ours")[0] == 0
        assert run("export", tmp_path / "ours", "--out", tmp_path / "back", "--family", "source")[0] == 0
        a, b = load_file(llama / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama"
        for arguments, message in (
            (["--family", "gpt2"], "gpt2"),
            (["--family", "bert"], "bert"),
            (["--family", "source", "--materialise"], "--materialise"),
        ):
            code, _, err = run("export", tmp_path / "ours", "--out", tmp_path / "x", *arguments)
            assert code == 2
            assert message in err
        write_model(tmp_path / "own", shared())
        code, _, err = run("export", tmp_path / "own", "--out", tmp_path / "x", "--family", "source")
        assert code == 2
        assert "not retrofitted" in err
        assert not (tmp_path / "x").exists()

    def test_a_headwater_checkpoint_gets_more_mechanisms(self, run, tmp_path):
        write_model(tmp_path / "own", build({"kv_shift": {}}))
        assert run("retrofit", tmp_path / "own", "--mechanism", "neutreno")[0] == 0
        a, b = logits(tmp_path / "own"), logits(tmp_path / "own-headwater")
        assert (a - b).abs().max() < 1e-12 * a.abs().max()
        code, _, err = run("retrofit", tmp_path / "own", "--out", tmp_path / "x")
        assert code == 2
        assert "already a headwater model" in err
        code, _, err = run("retrofit", tmp_path / "own", "--family", "llama", "--out", tmp_path / "x")
        assert code == 2
        assert "leave out --family" in err

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--mechanism", "svformer"], "--allow-change"),
            (["--mechanism", "kv_shift={variant: gate}"], "--allow-change"),
            (["--mechanism", "kv_shif"], "did you mean"),
            (["--mechanism", "kv_shift={a"], "not valid YAML"),
            (["--mechanism", "kv_shift=3"], "a mapping"),
            (["--mechanism", "pattention"], "replaces the model's linear layers"),
            (["--layout", "resformer", "--set", "nope=1"], "no field 'nope'"),
            (["--set", "head_dim=8"], "--layout"),
            (["--mechanism", "kv_shift", "--mechanism", "kv_shift={window: 3}"], "twice"),
            (["--mechanism", "kv_shift={windw: 3}"], "window"),
            (["--layout", "tokenformr"], "tokenformer"),
        ],
    )
    def test_what_it_cannot_do_is_one_sentence(self, run, llama, arguments, message, tmp_path):
        code, _, err = run("retrofit", llama, *arguments, "--out", tmp_path / "x")
        assert code == 2
        assert message in " ".join(err.replace("│", " ").split())
        assert len(err.strip().splitlines()) == 1
        assert not (tmp_path / "x").exists()

    def test_no_code_of_a_tokenizer_is_run(self, run, llama, tmp_path):
        (llama / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
        (llama / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
        )
        (llama / "tokenizer.json").unlink()
        code, _, err = run("retrofit", llama)
        assert code == 2
        assert "its own code" in err
        assert not (tmp_path / "ran").exists()

    def test_files_that_are_no_checkpoint_are_one_sentence(self, run, llama, tmp_path):
        (tmp_path / "text.pt").write_text("hello")
        (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
        for name, message in (("text.pt", "cannot be read"), ("model.gguf", "GGUF")):
            code, _, err = run("retrofit", tmp_path / name)
            assert code == 2
            assert message in err
        (llama / "tokenizer.json").write_text("{")
        code, _, err = run("retrofit", llama)
        assert code == 2
        assert "tokenizer" in err
        assert "cannot be read" in err
        (llama / "config.json").write_text("{")
        code, _, err = run("retrofit", llama)
        assert code == 2
        assert "config.json' cannot be read" in err

    def test_a_change_that_is_allowed_is_reported(self, run, llama, tmp_path):
        code, out, _ = run("retrofit", llama, "--mechanism", "svformer", "--allow-change", "--out", tmp_path / "x")
        assert code == 0
        assert "svformer added" in out
        assert read_history(tmp_path / "x")[-1].details["moved"]["logits"] > 0.01

    def test_unknown_families_and_wrong_shapes_are_one_sentence(self, run, llama, tmp_path):
        sizes = dict(vocab_size=9, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=1)
        OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=8)).save_pretrained(tmp_path / "opt")
        code, _, err = run("retrofit", tmp_path / "opt")
        assert code == 2
        assert "'opt' cannot be converted; known names" in err
        tensors = load_file(llama / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(5, 32)
        save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
        code, _, err = run("retrofit", llama)
        assert code == 2
        assert "model.layers.1.mlp.up_proj.weight" in err.splitlines()[-1]
        shutil.rmtree(llama)
        code, _, err = run("retrofit", llama)
        assert code == 2
        assert "no local file or folder" in err


@pytest.mark.slow
def test_history_goes_on_from_folder_to_folder(run, llama, tmp_path):
    run("retrofit", llama, "--out", tmp_path / "a")
    run("retrofit", tmp_path / "a", "--mechanism", "kv_shift", "--out", tmp_path / "b")
    run("grow", tmp_path / "b", "intermediate_size=96", "--out", tmp_path / "c")
    assert [event.kind for event in read_history(tmp_path / "c")] == ["retrofitted", "retrofitted", "grown"]
    assert all(isinstance(event, Event) for event in read_history(tmp_path / "c"))


@pytest.mark.parametrize("place", ["small/inside", "run/inside", "run/checkpoints/step-999999"])
def test_no_command_writes_into_its_source(run, small, tmp_path, place):
    shutil.copytree(small, tmp_path / "run" / "checkpoints" / "step-000001")
    for source in ("small",) if place.startswith("small") else ("run", "run/checkpoints/step-000001"):
        for arguments in (["grow", "attention_pairs=9"], ["retrofit", "--mechanism", "kv_shift"]):
            before = digest(tmp_path)
            command, *rest = arguments
            code, _, err = run(command, tmp_path / source, *rest, "--out", tmp_path / place)
            assert code == 2
            assert "is the source, contains it, or is inside it" in " ".join(err.split())
            assert digest(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mechanism", "kv_shift", "--rows", 4000], "--rows has no effect without --text"),
        (["--layout", "resformer", "--family", "gpt2"], "--family has no effect with --layout"),
        (["--allow-change"], "--allow-change has no effect without --mechanism"),
    ],
)
def test_options_that_would_do_nothing_are_refused(run, written, tmp_path, arguments, message):
    code, _, err = run("retrofit", written, *arguments, "--out", tmp_path / "x")
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "x").exists()
