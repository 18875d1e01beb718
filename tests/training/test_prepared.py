"""Training from prepared folders: rows, mixtures, and a run that is stopped on the way."""

import shutil

import pytest
from trials import PowerCut, cut_at, same_end

from headwater.util.errors import HeadwaterError
from headwater_lab.data.prepare import Options, prepare
from headwater_lab.data.prepared import PreparedSettings
from headwater_lab.data.stream import TextSource
from headwater_lab.data.text import TextSettings
from headwater_lab.training.loop import train


@pytest.fixture
def folders(tmp_path):
    """Two prepared folders, of different texts."""
    made = {}
    for name, word in (("web", "alpha"), ("code", "omega")):
        source = tmp_path / f"{name}-text"
        source.mkdir()
        for i in range(40):
            (source / f"{i:02}.txt").write_text(f"{word} {i} " * (5 + i % 7))
        prepare(TextSource(str(source)), tmp_path / name, "bytes", Options(held_out=0.2))
        made[name] = tmp_path / name
    return made


def test_prepared_rows_are_those_of_the_text(folders, tmp_path):
    """The same documents, split and tokens; prepared ones stand in the order of the source, by name here too."""
    prepared = PreparedSettings(source=str(folders["web"]), context=16, held_out_bytes=None).build()
    text = TextSettings(source=str(tmp_path / "web-text"), context=16, held_out=0.2, held_out_bytes=None).build()
    a, b = prepared.train.streams[0], text.train.streams[0]
    assert a.read(0, a.tokens).tolist() == b.read(0, b.tokens).tolist()
    assert a.starts(0, a.tokens).tolist() == b.starts(0, b.tokens).tolist()
    assert {(one.id, one.bytes) for one in prepared.held_out} == {(one.id, one.bytes) for one in text.held_out}
    for layout in ("packed", "contiguous"):
        x = PreparedSettings(source=str(folders["web"]), context=16, row_layout=layout).build()
        y = TextSettings(source=str(tmp_path / "web-text"), context=16, held_out=0.2, row_layout=layout).build()
        one, other = next(x.batches(0, 4, 7)), next(y.batches(0, 4, 7))
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_a_mixture_is_trained_on_and_measured_by_part(folders, recipe, tmp_path):
    weights = {str(folders["web"]): 3.0, str(folders["code"]): 1.0}
    made = recipe(data={"kind": "prepared", "source": weights, "context": 32}, training={"steps": 30})
    batches = made.data.build().batches(0, 100, 0)
    text = bytes(token for token in next(batches)["input_ids"].flatten().tolist() if token < 256)
    counts = [text.count(word) for word in (b"alpha", b"omega")]
    assert counts[0] / sum(counts) == pytest.approx(0.75, abs=0.12)
    record = train(made, tmp_path / "whole")
    last = record.held_out[-1].metrics
    assert set(last) == {"bits_per_byte", "loss", *(f"bits_per_byte/{name}" for name in weights)}
    assert min(last.values()) < last["bits_per_byte"] < max(v for name, v in last.items() if name != "loss")
    with pytest.raises(PowerCut):
        train(made, tmp_path / "cut", on_event=cut_at(17))
    train(made, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_a_run_with_domains_is_cut_and_goes_on_to_the_last_bit(folders, recipe, tmp_path):
    """Also in a domain that is not trained on; other text of that domain is other data."""
    domains = {"trained": str(folders["web"]), "apart": str(folders["code"])}
    data = {"kind": "prepared", "source": str(folders["web"]), "context": 32, "held_out_domains": domains}
    made = recipe(data=data | {"metric": "loss/apart"}, training={"steps": 30})
    record = train(made, tmp_path / "whole")
    last = record.held_out[-1].metrics
    assert record.result == last["loss/apart"] != last["loss"]
    assert record.data["held_out_domains"].keys() == domains.keys()
    assert {one.id.partition(":")[0] for one in record.documents} == domains.keys()
    with pytest.raises(PowerCut):
        train(made, tmp_path / "cut", on_event=cut_at(17))
    (tmp_path / "code").rename(tmp_path / "kept")
    (tmp_path / "code-text" / "00.txt").write_text("another text, of another hash")
    prepare(TextSource(str(tmp_path / "code-text")), tmp_path / "code", "bytes", Options(held_out=0.9))
    with pytest.raises(HeadwaterError, match=r"data have changed.*held_out_sha256"):
        train(made, tmp_path / "cut", resume=True)
    shutil.rmtree(tmp_path / "code")
    (tmp_path / "kept").rename(tmp_path / "code")
    train(made, tmp_path / "cut", resume=True)
    same_end(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_domains_change_nothing_but_what_is_measured(folders, recipe, tmp_path):
    data = {"kind": "prepared", "source": str(folders["web"]), "context": 32}
    plain = train(recipe(data=data), tmp_path / "plain")
    domains = {"held_out_domains": {"code": str(folders["code"])}}
    named = train(recipe(data=data | domains), tmp_path / "named")
    assert (named.curve, named.data_order) == (plain.curve, plain.data_order)
    assert not {"held_out_domains", "held_out_sha256"} & plain.data.keys()
    assert named.identity != plain.identity


def test_what_does_not_fit_together_is_refused(folders, tmp_path):
    with pytest.raises(HeadwaterError, match="nowhere"):
        PreparedSettings(source=str(tmp_path / "nowhere")).build()
    with pytest.raises(HeadwaterError, match=r"data\.source is empty"):
        PreparedSettings(source={}).build()
    with pytest.raises(HeadwaterError, match=r"fewer than one row of data\.context=100000"):
        PreparedSettings(source=str(folders["web"]), context=100_000).build()
    from headwater_lab.data.tokenizer import train_tokenizer

    train_tokenizer(["alpha omega " * 9], 300).save_pretrained(tmp_path / "bpe")
    prepare(TextSource(str(tmp_path / "web-text")), tmp_path / "other", str(tmp_path / "bpe"), Options(held_out=0.2))
    with pytest.raises(HeadwaterError, match="prepared with different tokenizers"):
        PreparedSettings(source={str(folders["web"]): 1.0, str(tmp_path / "other"): 1.0}).build()
