"""The induction task against its definition."""

import torch

from headwater.data.synthetic import InductionData, InductionSettings
from headwater.seeding import generator


def make(**settings):
    return InductionData(InductionSettings(**settings))


def test_a_token_seen_before_tells_the_next_one():
    batch = make(vocabulary=12, length=20).sample(generator("test"), 50)
    for row, labels in zip(batch["input_ids"].tolist(), batch["shift_labels"].tolist(), strict=True):
        full = [*row, labels[-1]]  # only ever read where the last label is known
        for i, token in enumerate(row):
            earlier = [j for j in range(i) if row[j] == token]
            assert labels[i] == (full[earlier[0] + 1] if earlier else -100)
            if earlier and i + 1 < len(row):
                assert labels[i] == row[i + 1]


def test_held_out_sequences_are_never_trained_on():
    data = make(vocabulary=1000, length=32)
    held_out = {tuple(row) for row in data.held_out()["input_ids"].tolist()}
    batches = data.batches(seed=0, batch_size=64, start=0)
    assert not held_out & {tuple(row) for _ in range(50) for row in next(batches)["input_ids"].tolist()}


def test_batches_go_on_where_they_stopped():
    data = make()
    whole = data.batches(seed=5, batch_size=8, start=0)
    rows = [next(whole)["input_ids"] for _ in range(4)]
    assert torch.equal(next(data.batches(seed=5, batch_size=8, start=16))["input_ids"], rows[2])
    assert not torch.equal(next(data.batches(seed=6, batch_size=8, start=0))["input_ids"], rows[0])
    assert not torch.equal(rows[0], rows[1])


def test_an_oracle_scores_one_and_chance_scores_low():
    data = make(vocabulary=32, length=24, held_out=200)

    def oracle(batch):
        rows = batch["input_ids"]
        scores = torch.zeros(*rows.shape, 32)
        for b, row in enumerate(rows.tolist()):
            for i, token in enumerate(row):
                if token in row[:i]:
                    scores[b, i, row[row.index(token) + 1]] = 1.0
        return scores

    assert data.evaluate(oracle).measures["accuracy"] == 1.0
    assert data.evaluate(lambda b: torch.zeros(*b["input_ids"].shape, 32)).measures["accuracy"] < 0.1
