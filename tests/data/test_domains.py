"""Held-out domains: each is measured by itself, and the loss is the plain mean of theirs."""

import hashlib
import json
import math

import pytest
import torch

from conftest import disturb
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.trials import list_trials
from headwater_lab.data.base import DataShape
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.prepared import PreparedSettings
from headwater_lab.data.stream import TextSource
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record
from headwater_lab.training.trained_models import measure_model

LINES = {
    "wiki": "The river {i} rises in the hills and ends in the sea after {i} miles.\n",
    "code": "def f{i}(x):\n    return x + {i}\n",
    "books": "“{i},” she said, “is a number.” Nobody answered for a while.\n",
}
CONTEXT, SHARE = 16, 0.3


@pytest.fixture
def texts(tmp_path):
    """A folder for each domain below one, the first the smallest."""
    for place, (name, line) in enumerate(LINES.items()):
        (tmp_path / "all" / name).mkdir(parents=True)
        for i in range(30):
            lines = (line.format(i=i + j) for j in range(3 + place * i // 2))
            (tmp_path / "all" / name / f"{i}.txt").write_text("".join(lines))
    return tmp_path / "all"


@pytest.fixture
def prepared(texts, tmp_path):
    """Makes the settings of data trained on `wiki`, with domains: name -> prepared folder; default all."""
    folders = {}
    for name in LINES:
        prepare(TextSource(str(texts / name)), tmp_path / name, "bytes", Options(held_out=SHARE))
        folders[name] = str(tmp_path / name)

    def make(domains=LINES, **settings):
        values = {"context": CONTEXT, "held_out_bytes": None} | settings
        named = {name: folders[name] for name in domains}
        return PreparedSettings(source=folders["wiki"], held_out_domains=named, **values)

    return make


@pytest.fixture
def model(recipe):
    shape = DataShape(257, CONTEXT)
    return disturb(HeadwaterForCausalLM(recipe().config_for(shape))).eval()


def held_out(folder, root):
    """The texts below `folder` whose names, from `root` on, have a hash in the lowest part."""
    for file in sorted(folder.rglob("*.txt")):
        digest = hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()
        if int.from_bytes(digest[:8], "big") / 2**64 < SHARE:
            yield file.read_text()


@torch.no_grad()
def naive(model, domains):
    """The measures of domains, name -> texts, from the logits of one text after another."""
    found = {}
    for name, several in domains.items():
        nats = size = 0
        for text in several:
            ids = torch.tensor([256, *text.encode()])
            count = len(ids) - 1
            rows = torch.nn.functional.pad(ids[:-1], (0, -count % CONTEXT)).view(-1, CONTEXT)
            scores = model(rows).logits.double().log_softmax(-1).flatten(0, 1)
            nats -= float(scores[range(count), ids[1:]].sum())
            size += count
        found |= {f"loss/{name}": nats / size, f"bits_per_byte/{name}": nats / math.log(2) / size}
    for kind in ("loss", "bits_per_byte"):
        found[kind] = sum(found[f"{kind}/{name}"] for name in domains) / len(domains)
    return found


def test_domains_are_measured_on_their_evaluation_text(prepared, texts, model):
    """The loss is the plain mean of the domains' losses."""
    measured = measure_model(model, prepared().build())
    by_domain = {name: list(held_out(texts / name, texts / name)) for name in LINES}
    assert measured == pytest.approx(naive(model, by_domain), rel=1e-5)


def test_the_order_in_which_domains_are_written_changes_no_bit(prepared, model):
    """A recipe's digest does not tell of it."""
    data = [prepared(names).build() for names in (list(LINES), list(LINES)[::-1])]
    assert data[0].description == data[1].description
    results = [each.evaluate(lambda batch: model(**batch).logits.detach()) for each in data]
    assert results[0] == results[1]


def test_the_budget_is_of_each_domain(prepared):
    sizes = prepared(("code", "books"), held_out_bytes=500).build().description["held_out_domains"]
    assert all(450 < size["bytes"] <= 500 for size in sizes.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out_domains": {}}, "held_out_domains is empty"),
        ({"held_out_domains": {"a/b": "x"}}, "'a/b' is not a plain name"),
        ({"held_out_domains": {".a": "x"}}, "not a plain name"),
        ({"held_out_domains": {"": "x"}}, "not a plain name"),
        ({"held_out_domains": {"a\nb": "x"}}, "not a plain name"),
        ({"held_out_domains": {"x" * 300: "x"}}, "not a plain name"),
        ({"held_out_domains": {"a": "x", "b": "./x/"}}, "'a' and 'b' are the same folder"),
        ({"held_out_domains": {"a": 3}}, r"data\.held_out_domains\.a: .*string"),
        ({"held_out_domains": ["a"]}, r"data\.held_out_domains: .*dict"),
        ({"metric": "loss/a"}, "no metric 'loss/a'; "),
        ({"held_out_domains": {"wiki": "x"}, "metric": "loss/wikki"}, "did you mean 'loss/wiki'"),
        ({"held_out_domains": {"wiki": "x"}, "metric": "accuracy"}, "no metric 'accuracy'"),
    ],
)
def test_settings_that_cannot_be_meant_get_one_sentence(settings, message):
    with pytest.raises(HeadwaterError, match=message) as error:
        parse({"data": {"kind": "prepared", "source": "x"} | settings}, "test")
    assert "\n" not in str(error.value)


def test_domains_that_cannot_be_measured_get_one_sentence(texts, tmp_path):
    def refused(message, data):
        with pytest.raises(HeadwaterError, match=message) as error:
            data.build()
        assert "\n" not in str(error.value)

    prepare(TextSource(str(texts)), tmp_path / "less", "bytes", Options(held_out=0.1))
    prepare(TextSource(str(texts)), tmp_path / "more", "bytes", Options(held_out=0.5))

    def settings(source, domain, **fields):
        return PreparedSettings(source=str(source), context=CONTEXT, held_out_domains={"a": str(domain)}, **fields)

    refused(
        "'a' has 7 held-out tokens, fewer than one row",
        settings(tmp_path / "less", tmp_path / "less", held_out_bytes=9),
    )
    refused("'a' is the corpus of .*held-out share", settings(tmp_path / "less", tmp_path / "more"))
    assert settings(tmp_path / "more", tmp_path / "less").build().held_out
    refused("There is no folder", settings(tmp_path / "less", tmp_path / "nowhere"))


COMPARED = {
    "name": "domains",
    "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    "training": {"steps": 6, "batch_size": 4, "threads": 1, "warmup_steps": 2},
    "reporting": {"save_every": None, "tensorboard": False},
    "compare": {
        "baseline": "base",
        "seeds": [0, 1],
        "arms": {"base": {}, "shift": {"model": {"mechanisms": {"kv_shift": {}}}}},
    },
}


@pytest.mark.slow
def test_a_domain_decides_a_comparison_and_all_are_reported(prepared, tmp_path, run):
    data = prepared(metric="loss/code").model_dump(mode="json")
    runs = tmp_path / "runs"
    records = {}
    for trial in list_trials(parse(COMPARED | {"data": data}, "test"), runs):
        record = train(trial.recipe, trial.folder, experiment=trial.experiment)
        assert record == read_record(trial.folder)
        assert record.result == record.held_out[-1].metrics["loss/code"]
        records[trial.experiment.arm, record.seed] = record.held_out[-1].metrics
    code, printed, stderr = run("report", runs)
    assert code == 0, stderr
    assert "nats per token of code" in printed
    page = (runs / "report.html").read_text()
    for name in LINES:
        own = [[records[arm, seed][f"loss/{name}"] for seed in (0, 1)] for arm in ("base", "shift")]
        difference = sum(b - a for a, b in zip(*own, strict=True)) / 2
        assert f"{sum(own[0]) / 2:.3f}" in printed
        assert f"{sum(own[1]) / 2:.3f} ({difference:+.3f})" in page
    assert "loss/code" in run("runs", runs)[1]


def test_arms_and_stages_are_measured_alike(prepared):
    data = prepared().model_dump(mode="json")
    for other in ({"metric": "loss"}, {"held_out_domains": {"b": "data/code"}}, {"held_out_domains": None}):
        compare = COMPARED["compare"] | {"arms": {"base": {}, "other": {"data": other}}}
        with pytest.raises(HeadwaterError, match="one metric over the same domains"):
            parse(COMPARED | {"data": data, "compare": compare}, "test")
        staged = {"data": data, "stages": [{"name": "more", "data": other}]}
        with pytest.raises(HeadwaterError, match="one metric over the same domains"):
            parse(staged, "test")


def test_train_says_what_each_domain_has(prepared, tmp_path, run):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"data: {json.dumps(prepared(metric='loss').model_dump(mode='json'))}\n"
        "model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}\n"
        "training: {steps: 2, batch_size: 2, threads: 1}\nreporting: {tensorboard: false}\n"
    )
    code, printed, stderr = run("train", recipe, "--out", tmp_path / "run")
    assert code == 0, stderr
    measures = read_record(tmp_path / "run").held_out[-1].metrics
    lines = printed.splitlines()
    assert lines[0].endswith(f"loss {measures['loss']:.4f}, bits per byte {measures['bits_per_byte']:.4f}")
    for name, line in zip(sorted(LINES), lines[1:], strict=False):
        assert f"{name}: loss {measures[f'loss/{name}']:.4f}" in line
