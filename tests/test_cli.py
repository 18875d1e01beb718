"""The command line as a user meets it: results on stdout, one sentence on stderr, an exit code."""

import io
import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from transformers.utils import is_optimum_quanto_available

import processes
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater_lab import cli


@pytest.fixture
def recipe(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"The {i}th line, of which there are many." for i in range(1500)))
    path = tmp_path / "recipe.yaml"
    values = {
        "name": "tiny",
        "data": {"kind": "text", "source": str(text), "context": 32},
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mechanisms": {"kv_shift": {}}},
        "training": {"steps": 10, "batch_size": 4, "threads": 1},
        "reporting": {"save_every": 5, "tensorboard": False},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def sentence(result, code=2):
    """The one sentence of a failed call."""
    status, _, err = result
    assert status == code
    assert "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("headwater: ")
    return line


@pytest.mark.slow
def test_train_then_generate(run, recipe, tmp_path):
    code, out, _ = run("train", recipe, "--out", tmp_path / "run")
    assert code == 0
    assert "bits per byte" in out
    code, out, err = run("generate", tmp_path / "run", "The ", "--max-new-tokens", 12, "--seed", 3)
    assert code == 0
    assert out.startswith("The ")
    assert len(out.rstrip("\n")) > 4
    assert "12 tokens" in err
    again = run("generate", tmp_path / "run", "The ", "--max-new-tokens", 12, "--seed", 3)
    assert again[1] == out


@pytest.mark.slow
def test_prompts_from_stdin_and_jsonl(run, recipe, tmp_path, monkeypatch):
    run("train", recipe, "training.steps=30", "--out", tmp_path / "run")
    greedy = ("--max-new-tokens", 12, "--temperature", 0)
    prompts = ["The ", "The 7th line, of", "many"]
    single = [run("generate", tmp_path / "run", prompt, *greedy)[1].removesuffix("\n") for prompt in prompts]

    monkeypatch.setattr("sys.stdin", io.StringIO(prompts[1]))
    assert run("generate", tmp_path / "run", "-", *greedy)[1].removesuffix("\n") == single[1]

    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts) + "\n\n"
    (tmp_path / "prompts.jsonl").write_text(lines)
    code, out, err = run("generate", tmp_path / "run", "--jsonl", tmp_path / "prompts.jsonl", *greedy)
    assert code == 0
    assert "36 tokens" in err
    made = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] + row["completion"] for row in made] == single
    assert {row["finish_reason"] for row in made} == {"length"}
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run("generate", tmp_path / "run", "--jsonl", "-", *greedy)[1] == out

    stop = made[0]["completion"][4]
    code, out, _ = run("generate", tmp_path / "run", "--jsonl", tmp_path / "prompts.jsonl", *greedy, "--stop", stop)
    stopped = [json.loads(line) for line in out.splitlines()]
    assert [row["completion"] for row in stopped] == [row["completion"].split(stop)[0] for row in made]
    assert [row["finish_reason"] for row in stopped] == [
        "stop" if stop in row["completion"] else "length" for row in made
    ]
    # A text of several tokens, which streaming must hold back until it is clear that it is not the end.
    for row, begun in zip(made, (slice(3, 6), slice(0, 2), slice(8, 11)), strict=True):
        stop, wrong = row["completion"][begun], row["completion"][begun][:-1] + "\0"
        _, out, _ = run("generate", tmp_path / "run", row["prompt"], *greedy, "--stop", wrong, "--stop", stop)
        assert out.removesuffix("\n") == row["prompt"] + row["completion"].split(stop)[0]

    # With a static cache, too.
    for options in (greedy, (*greedy, "--stop", stop), ("--max-new-tokens", 9, "--seed", 4, "--top-k", 9)):
        for prompts in (("--jsonl", tmp_path / "prompts.jsonl", "--batch-size", 2), (made[1]["prompt"],)):
            growing = run("generate", tmp_path / "run", *prompts, *options)
            assert run("generate", tmp_path / "run", *prompts, *options, "--cache", "static")[:2] == growing[:2]
            assert growing[0] == 0

    if is_optimum_quanto_available():
        dynamic, small = (
            run("generate", tmp_path / "run", made[1]["prompt"] * 40, *greedy, *options)
            for options in ((), ("--cache-bits", 2))
        )
        assert dynamic[0] == small[0] == 0
        assert len(small[1]) > 40 * len(made[1]["prompt"])
        sizes = [
            int(err.partition("cache ")[2].partition(" bytes")[0].replace(",", "")) for *_, err in (dynamic, small)
        ]
        assert sizes[1] < sizes[0] / 2

    strange = json.dumps({"id": 7, "prompt": "a\u2028b"}, ensure_ascii=False)
    (tmp_path / "many.jsonl").write_text("\n".join([strange] * 5))
    code, out, _ = run("generate", tmp_path / "run", "--jsonl", tmp_path / "many.jsonl", *greedy, "--batch-size", 2)
    assert [json.loads(line)["id"] for line in out.split("\n") if line] == [7] * 5

    code, half, _ = run("generate", tmp_path / "run", "many", *greedy, "--dtype", "bfloat16", "--device", "cpu")
    assert code == 0
    assert half.startswith("many")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Pass exactly one of"),
        (["x", "--jsonl", "{folder}/a"], "Pass exactly one of"),
        (["x", "--stop", ""], "--stop needs a text"),
        (["--jsonl", "{folder}/bytes"], "not UTF-8"),
        (["--jsonl", "{folder}/nothing"], "There is no"),
        (["x", "--dtype", "int8"], "'int8' is not one of 'auto'"),
        (["x", "--temperature", "1e-39"], "--temperature below 0.01"),
        (["x", "--device", "nowhere"], "cannot use the device"),
        (["--jsonl", "{folder}/broken"], "Line 2 of"),
        (["--jsonl", "{folder}/other"], "has no text under"),
        (["--jsonl", "{folder}/empty"], "has no prompts"),
        (["--jsonl", "{folder}/surrogate"], "Line 1 of"),
        (["--jsonl", "{folder}/elsewhere"], "lone surrogate"),
        (["--jsonl", "{folder}/nested"], "is not JSON"),
        (["--jsonl", "{folder}/option"], "'seed', which is not read from a line"),
        (["--jsonl", "{folder}/completed"], "would be replaced"),
        (["x", "--batch-size", "2"], "--batch-size has no effect without --jsonl"),
        (["x", "--temperature", "0", "--top-p", "0.5"], "--top-p has no effect"),
        (["x", "--temperature", "0", "--top-k", "0"], "--top-k has no effect"),
        (["x", "--temperature", "0", "--seed", "0"], "--seed has no effect"),
    ],
)
def test_prompts_that_are_none(run, tmp_path, arguments, message):
    for name, text in (
        ("a", "x"),
        ("broken", '{"prompt": "x"}\n{'),
        ("other", '{"text": "x"}'),
        ("empty", ""),
        ("surrogate", r'{"prompt": "\ud800"}'),
        ("elsewhere", r'{"prompt": "x", "id": "\ud800"}'),
        ("nested", '{"prompt": ' + "[" * 100_000),
        ("option", '{"prompt": "x", "seed": 3}'),
        ("completed", '{"prompt": "x", "completion": "y"}'),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00x")
    written = run("generate", tmp_path, *(argument.format(folder=tmp_path) for argument in arguments))
    assert message in sentence(written)


def test_generated_text_is_that_of_the_uncached_model(run, recipe, tmp_path):
    import torch
    from transformers import AutoTokenizer

    run("train", recipe, "training.steps=30", "--out", tmp_path / "run")
    _, out, _ = run("generate", tmp_path / "run", "line", "--max-new-tokens", 20, "--temperature", 0)
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    model, tokenizer = HeadwaterForCausalLM.from_pretrained(newest), AutoTokenizer.from_pretrained(newest)
    ids = torch.tensor([[256, *b"line"]])
    for _ in range(20):
        following = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        if following.item() == 256:
            break
        ids = torch.cat((ids, following), dim=1)
    assert out.rstrip("\n") == tokenizer.decode(ids[0], skip_special_tokens=True).rstrip("\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepz=3", "did you mean 'steps'?"),
        ("model.mechanisms={kv_shfit: {}}", "did you mean 'kv_shift'?"),
        ("model.num_attention_heads=3", "not divisible by num_attention_heads 3"),
        ("data.source=/nowhere/at/all.txt", "no file or folder"),
        ("data.context=100000", "fewer than one row"),
        ("data.tokenizer=/nowhere/tokenizer", "'/nowhere/tokenizer'"),
    ],
)
def test_bad_input_is_one_sentence(run, recipe, tmp_path, override, message):
    assert message in sentence(run("train", recipe, override, "--out", tmp_path / "run"))


def test_a_dataset_name_without_a_network_is_one_sentence_within_seconds(run, recipe, tmp_path, monkeypatch):
    # An address that nothing answers stands for the missing network, wherever the test runs.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    message = sentence(run("train", recipe, "data.source=someone/some-dataset", "--out", tmp_path / "run"))
    assert "could not be reached" in message
    assert time.monotonic() - started < 10


def test_empty_and_binary_corpora_are_one_sentence(run, recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no files" in sentence(run("train", recipe, f"data.source={tmp_path}/empty", "--out", tmp_path / "run"))
    (tmp_path / "empty" / "x.bin").write_bytes(bytes(range(256)) * 100)
    assert "no text" in sentence(run("train", recipe, f"data.source={tmp_path}/empty", "--out", tmp_path / "run"))


@pytest.mark.slow
def test_a_run_is_not_overwritten_but_resumed(run, recipe, tmp_path):
    run("train", recipe, "--out", tmp_path / "run")
    assert "--resume" in sentence(run("train", recipe, "--out", tmp_path / "run"))
    assert run("train", recipe, "training.steps=12", "--out", tmp_path / "run", "--resume")[0] == 0
    changed = run("train", recipe, "model.hidden_size=32", "--out", tmp_path / "run", "--resume")
    assert "hidden_size=16 and cannot be resumed with 32" in sentence(changed)


def test_generate_refuses_what_it_cannot_use(run, recipe, tmp_path):
    assert "no checkpoint folder" in sentence(run("generate", tmp_path / "nothing", "x"))
    assert "not a checkpoint" in sentence(run("generate", tmp_path, "x"))
    assert "is not one of 'dynamic', 'static'" in sentence(run("generate", tmp_path, "x", "--cache", "large"))
    assert "--cache static" in sentence(run("generate", tmp_path, "x", "--compile"))
    assert "--cache-bits" in sentence(run("generate", tmp_path, "x", "--cache", "static", "--cache-bits", 4))
    run("train", recipe, "--out", tmp_path / "run")
    weights = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    assert "damaged" in sentence(run("generate", tmp_path / "run", "x"))


def test_positions_beyond_a_learned_table_are_one_sentence(run, tmp_path):
    from headwater_lab.data.tokenizer import byte_tokenizer

    config = HeadwaterConfig.gpt2(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8
    )
    HeadwaterForCausalLM(config).save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    assert "8 learned positions" in sentence(run("generate", tmp_path / "gpt2", "a longer prompt than that"))


def test_generate_with_a_tokenizer_that_only_begins(run, recipe, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<bos>", "<unk>", "The", "line", "of", "there", "are", "many"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>").save_pretrained(tmp_path / "words")
    assert run("train", recipe, f"data.tokenizer={tmp_path}/words", "--out", tmp_path / "run")[0] == 0
    code, out, _ = run("generate", tmp_path / "run", "The line", "--max-new-tokens", 5)
    assert code == 0
    assert out.startswith("The line")


@pytest.mark.slow
def test_an_exported_run_has_its_tokenizer(run, recipe, tmp_path):
    from transformers import AutoTokenizer

    run("train", recipe, "--out", tmp_path / "run")
    assert run("export", tmp_path / "run", "--out", tmp_path / "exported")[0] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("ab").input_ids == [256, 97, 98]
    assert (tmp_path / "exported" / "modeling_headwater.py").exists()


def test_a_size_is_that_of_an_arm(run, recipe, tmp_path):
    assert "--size has no effect without --arm" in sentence(
        run("train", recipe, "--size", "S", "--out", tmp_path / "run")
    )


@pytest.mark.parametrize("command", ["train", "compare", "inspect", "reproduce"])
def test_an_output_folder_that_is_a_file_is_refused_before_any_work(run, recipe, tmp_path, command):
    (tmp_path / "file").write_text("x")
    code, _, err = run(command, recipe, "--out", tmp_path / "file")
    assert code == 2
    assert "isafile" in "".join(err.replace("│", "").split()), "in a box, wherever its lines break"


def test_a_comparison_needs_a_compare_section(run, recipe, tmp_path):
    assert "no compare section" in sentence(run("compare", recipe, "--out", tmp_path / "c"))


def deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_ctrl_c_ends_cleanly_and_says_how_to_resume(recipe, tmp_path):
    process = processes.Command("train", recipe, "training.steps=100000", "--out", tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "run the same command with --resume" in err
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_an_interrupt_has_an_exit_code_of_its_own(run, recipe, tmp_path, monkeypatch, request):
    class Interrupting(io.StringIO):
        def read(self, *_):
            signal.raise_signal(signal.SIGINT)

        readline = __next__ = read

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests were started deaf to it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    run("train", recipe, "training.steps=1", "--out", tmp_path / "run")
    monkeypatch.setattr("sys.stdin", Interrupting())
    code, _, err = run("generate", tmp_path / "run", "-")
    assert (code, "Traceback" in err) == (130, False)


@pytest.mark.parametrize("when", ["starting", pytest.param("training", marks=pytest.mark.slow), "deaf"])
@pytest.mark.sampled(2)
def test_ctrl_c_ends_a_comparison_cleanly(tmp_path, request, when):
    """And where the shell has made it deaf to Ctrl-C, as in `nohup … &`, SIGTERM does."""
    if when == "starting" and not Path("/proc/self/stat").exists():
        pytest.skip("there is no /proc to see workers in")
    recipe = tmp_path / "recipe.yaml"
    values = {
        "name": "c",
        "data": {"kind": "induction", "vocab_size": 8, "length": 12},
        "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        "training": {"steps": 100000, "batch_size": 2},
        "reporting": {"tensorboard": False},
        "compare": {"baseline": "a", "seeds": [0], "arms": {"a": {}}},
    }
    recipe.write_text(yaml.safe_dump(values))
    # As a terminal does it: the signal goes to the whole group.
    before = deaf if when == "deaf" else None
    process = processes.Command("compare", recipe, "--out", tmp_path / "c", new_session=True, before=before)
    request.addfinalizer(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
    log = tmp_path / "c" / "c" / "a-0" / "metrics.jsonl"

    def points():
        return log.read_bytes().count(b"\n") if log.exists() else 0

    deadline = time.monotonic() + 90
    while not (processes.workers_of(process.pid) if when == "starting" else points()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    if when == "deaf":
        before = points()
        while points() < before + 5:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "same command again" in err


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in ("train", "compare", "generate", "report", "export", "bench"):
        assert command in out


def test_a_lack_of_memory_is_one_sentence_even_without_a_message(monkeypatch, capsys):
    def run(**_):
        raise MemoryError

    monkeypatch.setattr(cli.typer.main, "get_command", lambda app: run)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "headwater: Not enough memory: MemoryError\n"


def test_an_override_that_an_arm_overrules_is_told(run, recipe, tmp_path):
    values = yaml.safe_load(recipe.read_text())
    values["compare"] = {
        "baseline": "a",
        "seeds": [0],
        "arms": {"a": {}, "b": {"training": {"steps": 2}, "model": {"hidden_act": "gelu"}}},
    }
    recipe.write_text(yaml.safe_dump(values))
    section = "model={hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}"  # merged with the arm's
    arguments = (section, "training.steps=1", "training.warmup_steps=0", "compare.seeds=[1]")
    for arm, message in (("a", ""), ("b", "training.steps has no effect, because the arm 'b' sets it")):
        code, _, err = run("train", recipe, "--arm", arm, *arguments, "--out", tmp_path / arm)
        assert code == 0
        assert message in err
        assert err.count("no effect") == bool(message)
