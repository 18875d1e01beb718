"""Evaluation: lm-eval's tasks and sliding windows against computations by hand, and paired statistics."""

import dataclasses
import json
import math
import runpy
import shutil
import sys
from functools import wraps
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoXConfig,
    MambaConfig,
    OPTConfig,
    PhiConfig,
    PhiForCausalLM,
    QuantizedCache,
    RwkvConfig,
    T5Config,
)

from conftest import assert_near, build, teach_llama
from headwater import HeadwaterError
from headwater.conversion import from_transformers
from headwater.conversion.latent import make_latent
from headwater.models.cache import HeadwaterQuantizedCache
from headwater_lab.data.tokenizer import begin_texts, byte_tokenizer, train_tokenizer
from headwater_lab.evaluation import build_tables, evaluate, to_json
from headwater_lab.evaluation import tasks as tasks_module
from headwater_lab.evaluation.candidates import find_candidates, same_tokenizer, unique_names
from headwater_lab.evaluation.paired_differences import Items, compare_items
from headwater_lab.evaluation.quantized_reading import read_quantized
from headwater_lab.evaluation.tasks import GROUPS, RunOptions, parse_tasks, wrap_model
from headwater_lab.evaluation.text_likelihood import list_windows, sum_log_likelihoods
from headwater_lab.training.records import Event
from headwater_lab.training.saving import write_model

pytest.importorskip("lm_eval")
TASKS = Path(__file__).parents[1] / "examples" / "tasks"
LETTERS = "the cat sat on the mat. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama that a few steps have taught some Python, its retrofitted twin, and some text."""
    folder = tmp_path_factory.mktemp("models")
    text = "".join(file.read_text() for file in sorted(TASKS.glob("*.jsonl")))
    llama = teach_llama(text, positions=96, steps=40, stride=700)
    llama.save_pretrained(folder / "llama")
    byte_tokenizer().save_pretrained(folder / "llama")
    history = [Event(kind="retrofitted", details={"family": "llama"})]
    write_model(folder / "twin", from_transformers(llama), byte_tokenizer(), history, None)
    (folder / "texts").mkdir()
    for index, length in enumerate((1, 40, 97, 200)):
        (folder / "texts" / f"{index}.txt").write_text((LETTERS * 20)[index : index + length] + "é")
    return folder


def loglikelihoods(model, ids: list[int], begin: int) -> list[float]:
    """log p of each token after all before it, from one forward over everything."""
    with torch.no_grad():
        logp = model(torch.tensor([[begin, *ids]])).logits[0].double().log_softmax(-1)
    return [logp[i, token].item() for i, token in enumerate(ids)]


# Text


@pytest.mark.parametrize(("targets", "context", "stride"), [(1, 8, 4), (8, 8, 4), (9, 8, 4), (30, 8, 3), (30, 8, 8)])
def test_windows_score_every_token_once_with_the_history_they_promise(targets, context, stride):
    scored = []
    for start, end, count in list_windows(targets, context, stride):
        assert end - start <= context
        for target in range(
            end - count + 1, end + 1
        ):  # predicted from tokens start … target-1, the first being `begin`
            assert target - start > context - stride or start == 0
            scored.append(target)
    assert scored == list(range(1, targets + 1))


def test_text_is_scored_as_by_hand():
    model, tokenizer = build(vocab_size=257), byte_tokenizer()
    ids = [tokenizer(text).input_ids for text in ("ab", LETTERS * 2, LETTERS[:7])]
    found = sum_log_likelihoods(model, [np.array(row) for row in ids], 256, context=16, stride=5, batch_size=3)
    for row, total in zip(ids, found, strict=True):
        full = [256, *row]
        expected = 0.0
        for target in range(1, len(full)):
            done = target - 1 if target <= 16 else 16 + (target - 17) // 5 * 5  # tokens scored before its window
            end = min(16, len(row)) if target <= 16 else min(done + 5, len(row))
            with torch.no_grad():
                logits = model(torch.tensor([full[max(0, end - 16) : target]])).logits[0, -1]
            expected += logits.log_softmax(-1)[full[target]].item()
        assert total == pytest.approx(expected, rel=1e-9)
    with pytest.raises(HeadwaterError, match="gives id 300, but the model has embeddings for only 257"):
        sum_log_likelihoods(model, [np.array([300])], 256, context=16, stride=5, batch_size=1)


def test_windows_without_overlap_are_lm_evals_rolling_windows(folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    [one] = find_candidates([str(folder / "twin")])
    model = one.load_model("cpu", "float32")
    lm = HFLM(pretrained=model, tokenizer=one.tokenizer, backend="causal", batch_size=2, max_length=32)
    documents = [LETTERS, LETTERS * 5, "x"]
    requests = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(documents)]
    theirs = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    ids = [np.array(one.tokenizer(text).input_ids) for text in documents]
    ours = sum_log_likelihoods(model, ids, one.begin, context=32, stride=32, batch_size=4)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_rolling_windows_score_no_token_that_begins_a_text(folder):
    """Whether the tokenizer adds it or not."""
    from lm_eval.api.instance import Instance

    [one] = find_candidates([str(folder / "twin")])
    end = one.tokenizer.eos_token_id
    model = one.load_model("cpu", "float32")
    totals = []
    for tokenizer in (byte_tokenizer(), begin_texts(byte_tokenizer())):
        candidate = dataclasses.replace(one, tokenizer=tokenizer, begin=end)
        lm = wrap_model(candidate, model, RunOptions(2, None, 32, 0))
        request = Instance("loglikelihood_rolling", {}, (LETTERS * 3,), 0)
        totals += lm.loglikelihood_rolling([request], disable_tqdm=True)
        assert lm.tok_encode("a") == tokenizer("a").input_ids
    expected = sum_log_likelihoods(model, [np.array([*LETTERS.encode()] * 3)], end, context=32, stride=32, batch_size=4)
    assert totals == pytest.approx([*expected] * 2, rel=1e-5)


def test_measures_of_a_text_are_of_its_nats_tokens_and_bytes(folder):
    result = evaluate([str(folder / "twin")], text=[str(folder / "texts")], context=96, stride=96)
    [one] = find_candidates([str(folder / "twin")])
    model = one.load_model("cpu", "float32")
    documents = [(folder / "texts" / f"{index}.txt").read_text() for index in range(3)]
    items = next(row.figures["twin"].items for row in result.rows if row.metric == "loss")
    for text, likelihood, count in zip(documents, items.values, items.weights, strict=False):
        ids = list(text.encode())
        if len(ids) <= 96:
            assert likelihood == pytest.approx(sum(loglikelihoods(model, ids, 256)), rel=1e-5)
        assert count == len(ids)
    total, size = -items.values.sum(), items.weights.sum()
    figures = {row.metric: row.figures["twin"].value for row in result.rows}
    assert figures == pytest.approx(
        {"bits per byte": total / math.log(2) / size, "loss": total / size, "perplexity": math.exp(total / size)}
    )


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    "mechanisms", [{}, {"mla": {}}, {"low_rank_kv": {}}, {"kv_source": {}}, {"kv_shift": {}, "svformer": {}}], ids=str
)
def test_a_quantized_cache_is_read_as_if_tokens_came_one_by_one(mechanisms, bits):
    pytest.importorskip("optimum.quanto")
    model = build(mechanisms, max_position_embeddings=512).float()
    ids = torch.randint(0, model.config.vocab_size, (2, 300))
    cache = HeadwaterQuantizedCache(model.config, bits)
    with torch.no_grad():
        pieces = ids[:, :128], *ids[:, 128:].split(1, dim=1)
        expected = torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)
        whole = model(ids).logits
        with read_quantized(model, bits) as count:
            logits = model(ids).logits
            model(ids[:, :128])
    assert (count.rows, count.quantized) == (4, 2)
    assert_near(model(ids).logits, whole, 1e-4)
    # The order of sums may move a number across the border between two steps.
    assert (logits - expected).abs().max() < 0.2 * (logits - whole).abs().max()
    assert_near(logits[:, :128], whole[:, :128], 1e-4)
    assert (logits - whole)[:, 128:].abs().max() > 1e-3, "the history is quantized"


def test_what_all_tokens_share_is_not_quantized():
    """transformers' cache, whose groups are also of 64 numbers, spends its bits on it."""
    pytest.importorskip("optimum.quanto")
    model = build(head_dim=64, max_position_embeddings=512, qkv_bias=True).float()
    for name, bias in model.named_parameters():
        if name.endswith("v_proj.bias"):
            torch.nn.init.normal_(bias, std=5.0)
    ids = torch.randint(0, model.config.vocab_size, (2, 300))
    with torch.no_grad(), read_quantized(model, 4):
        logits = model(ids).logits
    model.config.materialise = True
    model.config.complete_fields()
    cache = QuantizedCache("quanto", model.config, nbits=4)
    with torch.no_grad():
        pieces = ids[:, :128], *ids[:, 128:].split(1, dim=1)
        theirs = torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)
        whole = model(ids, use_cache=False).logits
    assert (logits - whole).square().mean() < 0.1 * (theirs - whole).square().mean()


def test_models_without_a_quantized_cache_are_refused_before_any_is_measured(tmp_path):
    pytest.importorskip("optimum.quanto")
    write_model(
        tmp_path / "model", build(vocab_size=257, max_position_embeddings=512, sliding_window=9), byte_tokenizer()
    )
    text = write(tmp_path / "text" / "a.txt", LETTERS * 30)
    with pytest.raises(HeadwaterError, match=r"model' cannot be read through a quantized cache: "):
        evaluate([str(tmp_path / "model")], text=[str(text)], cache_bits=4)


def test_models_are_read_through_the_same_quantized_cache(tmp_path, run):
    """A model of transformers, and the same converted, lose the same."""
    pytest.importorskip("optimum.quanto")
    llama = teach_llama(LETTERS * 60, positions=256, steps=20, stride=700)
    llama.save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    code, _, stderr = run("retrofit", tmp_path / "llama", "--out", tmp_path / "converted")
    assert code == 0, stderr
    sources = [str(tmp_path / name) for name in ("llama", "converted")]
    text = [str(write(tmp_path / "text" / "a.txt", LETTERS * 30))]
    result = evaluate(sources, text=text, context=256, cache_bits=2)
    (row,) = [row for row in result.rows if row.metric == "loss"]
    assert row.figures["converted"].value == pytest.approx(row.figures["llama"].value, rel=1e-5)
    whole = evaluate(sources[:1], text=text, context=256)
    assert row.figures["llama"].value != pytest.approx(whole.rows[1].figures["llama"].value, rel=1e-5)
    other = PhiForCausalLM(
        PhiConfig(vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    other.save_pretrained(tmp_path / "phi")
    byte_tokenizer().save_pretrained(tmp_path / "phi")
    with pytest.raises(HeadwaterError, match=r"phi' can only be read through transformers' quantized cache"):
        evaluate([*sources, str(tmp_path / "phi")], text=text, context=256, cache_bits=2)


def test_a_model_that_ignores_the_cache_is_refused():
    pytest.importorskip("optimum.quanto")
    model = build(vocab_size=257, max_position_embeddings=512)
    model.config.model_type = "other"
    plain = model.forward
    model.forward = ignoring = wraps(plain)(lambda input_ids, **options: plain(input_ids, use_cache=False))
    ids = torch.zeros(1, 200, dtype=torch.long)
    for call in (lambda: model(ids), lambda: model.generate(ids, max_new_tokens=2)):
        with pytest.raises(HeadwaterError, match="has no cache of keys and values"), read_quantized(model, 4):
            call()
    assert model.forward is ignoring
    with pytest.raises(HeadwaterError, match="is read without attention_mask"), read_quantized(model, 4):
        model(ids, attention_mask=torch.ones(1, 200))


def test_generation_begins_with_a_quantized_cache():
    pytest.importorskip("optimum.quanto")
    model, options = build(max_position_embeddings=512).float(), {"max_new_tokens": 40, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    ids = torch.randint(0, model.config.vocab_size, (2, 60))  # a prompt is quantized at once, however short it is
    whole = model.generate(ids, **options)
    expected = model.generate(ids, past_key_values=HeadwaterQuantizedCache(model.config, 2), **options)
    with read_quantized(model, 2) as count:
        read = model.generate(ids, **options)
    assert (count.rows, count.quantized) == (2, 2)
    assert torch.equal(torch.stack(read.logits), torch.stack(expected.logits))
    assert not torch.equal(read.logits[1], whole.logits[1])


def run_example(monkeypatch, name, *arguments):
    script = TASKS.parent / name
    monkeypatch.setattr("sys.argv", [str(word) for word in (script, *arguments)])
    return runpy.run_path(str(script), run_name="__main__")


FOLLOWED = {
    "lowercase": ([], "all is well with me, 1.", "12345 67890 - all of it is Well."),
    "capitals": ([], "ALL IS WELL WITH ME.", "ALL IS WELL WITH me."),
    "bullets": ([2], "Two of them:\n* one\n* and two", "* one of them\n  * and two of them"),
    "words": (["river", "bread"], "The 'bread' lies by the River!", "The breads lie by the river."),
    "without": (["is"], "This island wasn't near us.", "It 'IS' near to us."),
    "commas": ([], "One and two and three.", "One, two, three, four, five."),
    "ending": (["I hope this helps."], "Yes. I hope this helps.\n", "I hope this helps. Yes."),
    "quotes": ([], "“Yes, that is all well.”", '"Yes" and "No" and so "on and on"'),
    "shorter": ([6], "It’s one of the words.", "It’s one of the six words."),
    "longer": ([6], "It's one of the six words.", "It’s one of the words."),
    "postscript": ([], "Dear friend, yes, it is.\nP.S. No.", "Dear friend, yes, it is."),
    "json": ([], '```JSON\n{"a": "one two three four"}\n```', '{"a": "one two three four"' + "[" * 5000),
}


def test_each_instruction_is_told_from_its_opposite():
    example = runpy.run_path(str(TASKS.parent / "instructions.py"))
    assert FOLLOWED.keys() == example["INSTRUCTIONS"].keys()
    for name, (values, right, wrong) in FOLLOWED.items():
        rows = [{"instruction": name, "values": values, "completion": answer} for answer in (right, wrong, "x", "")]
        assert [example["is_followed"](row) for row in rows] == [True, False, False, False], name


def test_instructions_are_written_checked_and_made_into_texts(tmp_path, monkeypatch, capsys):
    def use(*words):
        run_example(monkeypatch, "instructions.py", *words)

    for topics in ("testing", "healing"):
        use("write", "--topics", topics, "--items", 24, "--out", tmp_path / topics)
    with pytest.raises(SystemExit, match="exists; choose another --out"):
        use("write", "--items", 24, "--out", tmp_path / "testing")
    with pytest.raises(SystemExit, match="not 100,000 different prompts"):
        use("write", "--topics", "healing", "--items", 100_000, "--out", tmp_path / "more")
    rows = [json.loads(line) for line in (tmp_path / "testing").read_text().splitlines()]
    assert [row["instruction"] for row in rows] == [*FOLLOWED] * 2
    assert len({row["prompt"] for row in rows}) == 24
    assert 0 < (tmp_path / "healing").read_text().count("instruction") < 24

    def answer(name, *answers, rows=rows):
        lines = [json.dumps(row | {"completion": answers[number % len(answers)]}) for number, row in enumerate(rows)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    silent, loud = answer("silent", ""), answer("loud", "", "IT IS ALL ONE,\u2028FOR ALL")
    use("check", silent, loud)
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert "0.0 ± 0.0 % of 24" in first
    # Every second prompt is answered, and of these kinds only capitals.
    assert "8.3 ± 5.8 %" in second
    assert "minus the first 8.3 ± 5.8" in second
    topics = [json.loads(line) for line in (tmp_path / "healing").read_text().splitlines()]
    for files, message in (
        ([tmp_path / "none"], "no file"),
        ([tmp_path / "testing"], "not what headwater generate"),
        ([write(tmp_path / "broken" / "a.jsonl", '{"prompt": 1}\n{') / "a.jsonl"], "is not JSON Lines"),
        ([write(tmp_path / "numbers" / "a.jsonl", "1\n2\n") / "a.jsonl"], "not what headwater generate"),
        ([answer("topics", "x", rows=topics)], "an instruction each"),
        ([silent, answer("fewer", "x", rows=rows[1:])], "different prompts"),
    ):
        with pytest.raises(SystemExit, match=message):
            use("check", *files)
    half = [row | {"finish_reason": ("stop", "length")[number % 2]} for number, row in enumerate(rows)]
    use("texts", answer("half", "A.", "B", rows=half), "--out", tmp_path / "texts.jsonl")
    texts = [json.loads(line)["messages"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [[message["content"] for message in text] for text in texts] == [[row["prompt"], "A."] for row in rows[::2]]
    assert {message["role"] for text in texts for message in text} == {"user", "assistant"}


def test_numbers_hidden_in_a_text_are_asked_for(tmp_path, run, monkeypatch):
    write_model(tmp_path / "model", build(vocab_size=257, max_position_embeddings=512), byte_tokenizer())
    text = write(tmp_path / "text" / "a.txt", "".join(f"Sentence {number} says so. " for number in range(60)))
    arguments = [text / "a.txt", tmp_path / "model", "--tokens", 500, "--items", 6, "--out", tmp_path / "needle"]
    run_example(monkeypatch, "needle.py", *arguments)
    items = [json.loads(line) for line in (tmp_path / "needle" / "needle_500.jsonl").read_text().splitlines()]
    assert len(items) == 6
    for index, item in enumerate(items):
        before, answer, _ = item["text"].partition(f"{item['text'].rpartition('Answer: ')[2]}{item['target']}.")
        assert answer, "the answer stands in the text"
        assert item["text"].count(item["target"]) == 1
        assert item["text"].count("The secret number of") == 4 + 1, "four numbers, and the question"
        middle = len(before) / len(item["text"])
        assert (middle < 0.2, 0.2 < middle < 0.7, middle > 0.4)[index % 3], middle
        assert len(item["text"] + item["target"]) <= 500
    code, printed, stderr = run("evaluate", tmp_path / "model", "--task-files", tmp_path / "needle", "--context", 512)
    assert code == 0, stderr
    assert "needle_500" in printed
    assert "cuts the beginning" not in printed
    code, printed, _ = run("evaluate", tmp_path / "model", "--task-files", tmp_path / "needle", "--context", 300)
    assert "the context of model cuts the beginning of 6 prompts" in " ".join(printed.split())
    pytest.importorskip("optimum.quanto")
    code, printed, stderr = run("evaluate", tmp_path / "model", "--task-files", tmp_path / "needle", "--cache-bits", 2)
    assert code == 0, stderr
    assert "model: at most 6 of 6 rows of tasks were read from a quantized cache" in " ".join(printed.split())
    short = write(tmp_path / "short" / "texts.jsonl", "".join(f'{{"text": "Text {n}."}}\n' for n in range(5)))
    code, printed, stderr = run("evaluate", tmp_path / "model", "--text", short / "texts.jsonl", "--cache-bits", 2)
    assert code == 0, stderr
    assert "model: at most 0 of 5 rows of text were read from a quantized cache" in " ".join(printed.split())
    options = "--task-files", TASKS, "--tasks", "closing", "--cache-bits", 2
    code, printed, stderr = run("evaluate", tmp_path / "model", *options)
    assert code == 0, stderr
    assert "model: at most 0 of " in printed


def test_prompts_that_a_continuation_does_not_fit_behind_are_counted(folder, tmp_path, run):
    rows = "".join(json.dumps({"q": "x" * length, "a": "b"}) + "\n" for length in (8, 70, 80))
    data = write(tmp_path / "data" / "d.jsonl", rows) / "d.jsonl"
    task = f"task: continued\ndataset_path: json\ndataset_kwargs: {{data_files: {data}}}\ntest_split: train\n"
    task += "output_type: generate_until\ngeneration_kwargs: {max_gen_toks: 4}\ndoc_to_text: q\ndoc_to_target: a\n"
    files = write(tmp_path / "tasks" / "a.yaml", task)
    code, printed, stderr = run("evaluate", folder / "twin", "--task-files", files, "--context", 64)
    assert code == 0, stderr
    assert "continued: the context of twin cuts the beginning of 2 prompts" in " ".join(printed.split())


@pytest.mark.parametrize("kind", ["of transformers", "a latent"])
def test_a_quantized_cache_is_measured_by_the_command(kind, tmp_path, run):
    pytest.importorskip("optimum.quanto")
    llama = teach_llama(LETTERS * 60, positions=256, steps=20, stride=700)
    if kind == "a latent":
        ids = torch.tensor([list((LETTERS * 5).encode())])
        write_model(tmp_path / "llama", make_latent(from_transformers(llama), ids, 16), byte_tokenizer())
    else:
        llama.save_pretrained(tmp_path / "llama")
        byte_tokenizer().save_pretrained(tmp_path / "llama")
    text = write(tmp_path / "text" / "a.txt", LETTERS * 30)
    losses = []
    for bits in ([], ["--cache-bits", 4], ["--cache-bits", 2]):
        code, _, stderr = run(
            "evaluate", tmp_path / "llama", "--text", text, "--context", 256, *bits, "--out", tmp_path / "o.json"
        )
        assert code == 0, stderr
        result = json.loads((tmp_path / "o.json").read_text())
        assert result["settings"]["cache_bits"] == (bits[1] if bits else None)
        losses.append(next(row["figures"]["llama"]["value"] for row in result["rows"] if row["metric"] == "loss"))
    assert losses[0] != losses[1] != losses[2]
    assert losses[1] == pytest.approx(losses[0], rel=0.2)


# Tasks


def test_choices_are_scored_as_by_hand(folder):
    result = evaluate([str(folder / "twin")], ["closing"], task_files=TASKS)
    [one] = find_candidates([str(folder / "twin")])
    model = one.load_model("cpu", "float32")
    expected = []
    for line in (TASKS / "closing.jsonl").read_text().splitlines():
        item = json.loads(line)
        code = list(item["code"].encode())
        scores = []
        for choice in item["choices"]:
            ids = [*code, *choice.encode()]
            scores.append(sum(loglikelihoods(model, ids[1:], ids[0])[len(code) - 1 :]))
        expected.append(float(np.argmax(scores) == item["answer"]))
    acc = next(row for row in result.rows if row.metric == "acc")
    assert acc.figures["twin"].items.values.tolist() == expected
    assert acc.figures["twin"].value == np.mean(expected)
    assert acc.figures["twin"].stderr == pytest.approx(np.std(expected, ddof=1) / math.sqrt(len(expected)))


def test_a_llama_and_its_twin_agree(folder):
    models = [str(folder / "llama"), str(folder / "twin")]
    result = evaluate(models, task_files=TASKS, text=[str(folder / "texts")], context=64, dtype="float32")
    assert {row.task for row in result.rows} == {"closing", "last_word", "copying", "snippets", "texts"}
    for row in result.rows:
        ours, theirs = row.figures["twin"], row.figures["llama"]
        assert (ours.value, ours.stderr) == (theirs.value, theirs.stderr), row.metric
    assert result.tasks[0]["hashes"]
    json.dumps(to_json(result), allow_nan=False)
    assert len(build_tables(result)) == 2


@pytest.mark.slow
def test_lm_evals_own_command_gives_the_same(folder, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(TASKS)
    theirs = simple_evaluate(
        "hf",
        {"pretrained": str(folder / "llama")},
        tasks=["closing", "copying"],
        num_fewshot=2,
        batch_size=8,
        device="cpu",
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
    )
    ours = evaluate([str(folder / "llama")], ["closing", "copying"], task_files=TASKS, shots=2)
    for row in ours.rows:
        assert row.figures["llama"].value == theirs["results"][row.task][f"{row.metric},none"]
        assert row.shots == theirs["n-shot"][row.task] == 2


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(hidden_size=32, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64),
        OPTConfig(
            hidden_size=32, num_attention_heads=2, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32
        ),
        GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=2, max_position_embeddings=64, attention_types=[[["global"], 2]]
        ),
        MambaConfig(hidden_size=32, state_size=4),
        RwkvConfig(hidden_size=32, attention_hidden_size=32, context_length=64),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.sampled(2)
def test_other_families_stand_beside(config, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    config.vocab_size, config.num_hidden_layers, config.num_attention_heads = 257, 2, 2
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, 256)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    models = [str(folder / "twin"), str(tmp_path / "other")]
    told = []
    result = evaluate(
        models,
        ["closing", "copying"],
        task_files=TASKS,
        text=[str(folder / "texts")],
        limit=3,
        on_progress=lambda *progress: told.append(progress),
    )
    batches = [done for name, done, total in told if name == "twin: tasks" and total is None]
    assert batches == [*range(1, len(batches) + 1)] != []
    assert [name for name, done, total in told if done == total] == ["twin: texts", "other: texts"]
    for row in result.rows:
        assert set(row.figures) == {"twin", "other"}
        assert all(math.isfinite(figure.value) for figure in row.figures.values())


def test_the_papers_groups_name_tasks_that_lm_eval_has():
    import lm_eval.tasks
    from lm_eval.tasks._index import TaskIndex

    root = Path(lm_eval.tasks.__file__).parent
    places = ("lambada", "hellaswag", "piqa", "arc", "winogrande", "mmlu", "cmmlu", "hendrycks_math")
    known = TaskIndex.build([root / place for place in places])  # the whole index takes five seconds
    for group in GROUPS:
        for one in parse_tasks(group):
            config = known[one.name].cfg
            metrics = config.get("metric_list") or config["aggregate_metric_list"]
            assert set(one.metrics) <= {metric["metric"] for metric in metrics}
            assert one.shots is not None


def test_names_are_short_and_tell_apart():
    assert unique_names(["runs/a", "EleutherAI/pythia-160m"]) == ["a", "pythia-160m"]
    assert unique_names(["x/a", "y/a", "z"]) == ["x/a", "y/a", "z"]
    assert unique_names(["a", "a"]) == ["a", "a (2)"]


# Statistics


def test_differences_are_the_textbooks_tests():
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=30), draw.normal(size=30)
    ones = np.ones(30)
    found = compare_items("a", Items("mean", a, ones), "b", Items("mean", b, ones))
    assert found.value == pytest.approx((a - b).mean())
    assert found.stderr == pytest.approx(stats.sem(a - b))
    assert found.p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    right, left = (draw.random(30) < 0.7).astype(float), (draw.random(30) < 0.4).astype(float)
    found = compare_items("a", Items("mean", right, ones), "b", Items("mean", left, ones))
    only = int(((right == 1) & (left == 0)).sum()), int(((right == 0) & (left == 1)).sum())
    assert found.p == pytest.approx(stats.binomtest(only[0], sum(only)).pvalue)


@pytest.mark.parametrize("form", ["loss", "bits", "perplexity"])
def test_standard_errors_of_ratios_are_the_jackknifes(form):
    draw = np.random.default_rng(1)
    weights = draw.integers(20, 60, size=400).astype(float)
    values = -weights * draw.normal(1.5, 0.1, size=400)
    left_out = [Items(form, np.delete(values, i), np.delete(weights, i)).figure for i in range(len(values))]
    jackknife = math.sqrt((len(values) - 1) * np.var(left_out))
    assert Items(form, values, weights).stderr == pytest.approx(jackknife, rel=0.01)


# Bad input


@pytest.fixture
def other(tmp_path):
    """A model whose tokenizer is another, and whose positions are learned."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=48)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    train_tokenizer([LETTERS * 20], 280).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_different_tokenizers_are_compared_by_bytes_alone(folder, other):
    models, texts = [str(folder / "twin"), str(other)], [str(folder / "texts")]
    assert not same_tokenizer(*find_candidates(models))
    result = evaluate(models, text=texts)
    assert [row.metric for row in result.rows] == ["bits per byte"]
    assert result.settings["window"] == 48  # what both can take
    alone = evaluate([str(other)], text=texts)
    assert [row.metric for row in alone.rows] == ["bits per byte", "loss", "perplexity"]


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "closin", "--task-files", TASKS], "did you mean 'closing'"),
        (["--task-files", "nowhere"], "no task file or folder 'nowhere'"),
        (["--task-files", "{broken}"], "cannot be read"),
        (["--task-files", "{empty}"], "There is no task in"),
        (["--task-files", "{dataless}"], "Unable to find"),
        (["--task-files", "{field}"], "The task 'bad' cannot be run"),
        (["--task-files", "{long}"], "does not fit into the 96 tokens"),
        (["--tasks", "closing@two", "--task-files", TASKS], "NAME@SHOTS"),
        ([], "Choose what to evaluate on"),
        (["--text", "{blank}"], "There is no text in"),
        (["--text", "./nowhere.txt"], "There is no file or folder"),
        (["--text", TASKS, "--context", "8", "--stride", "9"], "use at most 8"),
        (["--text", TASKS, "--dtype", "int8"], "--dtype must be one of"),
        (["--text", TASKS, "--cache-bits", "4"], "with --cache-bits, use a longer --context"),
        (["--text", TASKS, "--out", "nowhere/a.json"], "no folder 'nowhere'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, folder, tmp_path, run, monkeypatch):
    # lm-eval's index of all its tasks takes five seconds: those of one folder stand for them.
    from lm_eval.tasks import manager

    monkeypatch.setattr(manager, "__file__", str(Path(manager.__file__).parent / "piqa" / "manager.py"))
    data = write(tmp_path / "data" / "d.jsonl", '{"q": "a", "a": "b"}\n') / "d.jsonl"
    task = f"task: bad\ndataset_path: json\ndataset_kwargs: {{data_files: {data}}}\ntest_split: train\n"
    places = {
        "broken": write(tmp_path / "broken" / "a.yaml", "task: [unclosed\n"),
        "empty": write(tmp_path / "empty" / "a.txt", "x"),
        "dataless": write(tmp_path / "dataless" / "a.yaml", task.replace("d.jsonl", "gone.jsonl")),
        "field": write(
            tmp_path / "field" / "a.yaml", task + "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_target: none\n"
        ),
        "long": write(
            tmp_path / "long" / "a.yaml", task + "output_type: generate_until\ndoc_to_text: q\ndoc_to_target: a\n"
        ),
        "blank": write(tmp_path / "blank" / "a.txt", ""),
    }
    options = [str(argument).format(**places) for argument in arguments]
    code, _, err = run("evaluate", folder / "twin", *options)
    assert code == 2, err
    assert message in err.strip().splitlines()[-1]
    assert "Traceback" not in err


def test_models_that_cannot_be_evaluated_are_refused(folder, other, tmp_path):
    text = [str(folder / "texts")]
    with pytest.raises(HeadwaterError, match=r"only 48 learned positions, but --context is 49"):
        evaluate([str(other)], text=text, context=49)
    T5Config(vocab_size=257).save_pretrained(tmp_path / "t5")
    byte_tokenizer().save_pretrained(tmp_path / "t5")
    with pytest.raises(HeadwaterError, match="not a causal language model"):
        evaluate([str(tmp_path / "t5")], text=text)
    for file in other.glob("token*"):
        file.unlink()
    with pytest.raises(HeadwaterError, match="has no tokenizer"):
        evaluate([str(other)], text=text)
    with pytest.raises(HeadwaterError, match=r"no config\.json"):
        evaluate([str(folder / "texts")], text=text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**8}, "layers"),
        ({"num_labels": 10**9}, "num_labels"),
        ({"hidden_size": 2**17, "intermediate_size": 2**18}, "at most"),
    ],
)
def test_configs_larger_than_their_weights_are_refused_before_memory_is_taken(changes, message, folder, tmp_path):
    shutil.copytree(folder / "llama", tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(HeadwaterError, match=message):
        find_candidates([str(tmp_path / "llama")])[0].load_model("cpu", "auto")


def test_data_that_are_out_of_reach_are_said_to_be(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write(tmp_path / "a" / "a.yaml", "task: far\ndataset_path: nobody/nothing\ntest_split: test\n")
    with pytest.raises(HeadwaterError, match=r"needs data of the Hugging Face hub.*--task-files"):
        evaluate([str(folder / "twin")], task_files=tmp_path / "a")


def test_without_lm_eval_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    monkeypatch.setattr(tasks_module, "GROUPS", {})
    with pytest.raises(HeadwaterError, match=r"pip install .*\[evaluate\]'"):
        evaluate([str(folder / "twin")], task_files=TASKS)


def test_the_command_writes_what_it_prints(folder, tmp_path, run):
    code, out, _ = run(
        "evaluate", folder / "llama", folder / "twin", "--task-files", TASKS / "closing.yaml", "--out",
        tmp_path / "a.json", "--limit", "4", "--batch-size", "3",
    )  # fmt: skip
    assert code == 0
    record = json.loads((tmp_path / "a.json").read_text())
    [acc, norm] = record["rows"]
    assert (acc["task"], acc["metric"], norm["metric"]) == ("closing", "acc", "acc_norm")
    assert f"{acc['figures']['twin']['value']:.4f} ± {acc['figures']['twin']['stderr']:.4f}" in out
    assert record["versions"]["lm_eval"]
