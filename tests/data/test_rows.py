"""Rows of tokens: what is in them, and that their order depends on the seed alone."""

import itertools

import numpy as np
import pytest
import torch

from headwater_lab.data.base import Share
from headwater_lab.data.chat import Encoded
from headwater_lab.data.rows import BLOCK, Rows, TokenArray
from headwater_lab.data.synthetic.induction import InductionSettings
from headwater_lab.data.text import TextSettings

SEPARATOR = 999


def documents(count, seed=0, first=0):
    """Token ids of documents with different lengths, all different, each after a separator."""
    rng = np.random.default_rng(seed)
    ids = itertools.count(1000 + first)
    return [
        np.array([SEPARATOR, *itertools.islice(ids, int(length))], dtype=np.int32)
        for length in rng.integers(0, 30, count)
    ]


def token_array(documents):
    return TokenArray([Encoded(ids, None, 0) for ids in documents])


def rows(layout="packed", count=60, context=16, streams=1, weights=None):
    arrays = [token_array(documents(count, seed=k, first=100_000 * k)) for k in range(streams)]
    return Rows(arrays, weights or [1.0] * streams, context, layout)


def first(iterator, count):
    return list(itertools.islice(iterator, count))


@pytest.mark.parametrize("layout", ["packed", "contiguous"])
def test_a_row_holds_its_part_of_the_stream_and_the_next_token_as_label(layout):
    made = rows(layout)
    stream = np.concatenate(documents(60))
    batch = made.make_batch([(0, row) for row in range(made.counts[0])])
    assert torch.equal(batch["input_ids"].flatten(), torch.from_numpy(stream[: made.counts[0] * 16]).long())
    assert torch.equal(batch["shift_labels"].flatten(), torch.from_numpy(stream[1 : made.counts[0] * 16 + 1]).long())


def test_packed_positions_restart_and_contiguous_rows_say_where():
    chosen = [(0, row) for row in range(10)]
    packed, contiguous = rows("packed").make_batch(chosen), rows("contiguous").make_batch(chosen)
    starts = packed["input_ids"] == SEPARATOR
    assert torch.equal(contiguous["document_starts"], starts)
    assert "position_ids" not in contiguous
    for row, begins in zip(packed["position_ids"].tolist(), starts.tolist(), strict=True):
        expected = -1
        for position, begin in zip(row, begins, strict=True):
            expected = 0 if begin else expected + 1
            assert position == expected


def test_a_separator_inside_a_document_is_no_border():
    """Borders are known from the documents, not guessed from tokens."""
    array = token_array([np.array([SEPARATOR, 1, SEPARATOR, 2, 3]), np.array([SEPARATOR, 4, 5, 6])])
    batch = Rows([array], [1.0], 8, "contiguous").make_batch([(0, 0)])
    assert batch["document_starts"].tolist() == [[True, False, False, False, False, True, False, False]]


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_share_the_rows_of_one_process(streams, world):
    made = rows(streams=streams, weights=[0.5, 0.3, 0.2][:streams])
    whole = first(made.batches(7, 8, 16), 20)
    parts = [first(made.batches(7, 8, 16, Share(rank, world)), 20) for rank in range(world)]
    for step, batch in enumerate(whole):
        together = torch.cat([part[step]["input_ids"] for part in parts])
        assert torch.equal(together, batch["input_ids"])


@pytest.mark.parametrize("streams", [1, 3])
def test_the_order_goes_on_from_anywhere(streams):
    made = rows(streams=streams, weights=[0.5, 0.3, 0.2][:streams])
    whole = first(made.order_rows(3, 0), BLOCK + 500)
    for start in (0, 1, 777, BLOCK - 1, BLOCK, BLOCK + 99):
        assert first(made.order_rows(3, start), 300) == whole[start : start + 300]
    assert first(made.order_rows(4, 0), 100) != whole[:100]


def test_a_mixture_keeps_its_weights_and_uses_up_each_stream_before_it_repeats():
    made = rows(streams=3, weights=[5.0, 3.0, 2.0])
    drawn = first(made.order_rows(0, 0), 30_000)
    share = np.bincount([stream for stream, _ in drawn]) / len(drawn)
    assert share == pytest.approx([0.5, 0.3, 0.2], abs=4 * 0.5 / 30_000**0.5)
    for stream, count in enumerate(made.counts):
        own = [row for s, row in drawn if s == stream]
        for epoch in range(3):
            assert sorted(own[epoch * count : (epoch + 1) * count]) == list(range(count))
        assert own[:count] != own[count : 2 * count]


def test_streams_of_a_mixture_have_orders_of_their_own():
    same = [token_array(documents(60)) for _ in range(2)]
    drawn = first(Rows(same, [1.0, 1.0], 16, "packed").order_rows(0, 0), 200)
    a, b = ([row for s, row in drawn if s == stream] for stream in (0, 1))
    assert a[:20] != b[:20]


@pytest.mark.parametrize("world", [2, 4])
def test_synthetic_rows_are_shared_too(world):
    data = InductionSettings(vocab_size=16, length=8).build()
    whole = first(data.batches(1, 8, 24), 3)
    parts = [first(data.batches(1, 8, 24, Share(rank, world)), 3) for rank in range(world)]
    for step, batch in enumerate(whole):
        for name, tensor in batch.items():
            assert torch.equal(torch.cat([part[step][name] for part in parts]), tensor)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_measure_held_out_text_together(tmp_path, world):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * (i + 1))
    data = TextSettings(source=str(tmp_path), context=8, held_out=0.4).build()

    def logits(batch):
        calls.append(1)
        scores = torch.zeros(*batch["input_ids"].shape, 257)
        return scores.scatter(2, ((batch["input_ids"] * 7) % 257)[..., None], 2.0)

    calls = []
    alone = data.evaluate(logits)
    collected = []
    for rank in range(world):  # what each would add
        data.evaluate(logits, Share(rank, world, lambda nats: collected.append(nats) or nats))
    counts = []
    for rank in range(world):
        calls = []
        shared = data.evaluate(logits, Share(rank, world, lambda nats: torch.stack(collected).sum(0)))
        counts.append(len(calls))
        assert shared.metrics == pytest.approx(alone.metrics, rel=1e-12)
        assert [d["nats"] for d in shared.documents] == pytest.approx([d["nats"] for d in alone.documents], rel=1e-12)
    assert len(set(counts)) == 1, "models in several processes run together or not at all"
