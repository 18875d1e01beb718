"""A model split over processes, here threads that wait for each other, gives what the whole model gives."""

import copy
import threading

import pytest
import torch

from conftest import assert_near, build, config
from headwater import HeadwaterError
from headwater.cost.counts import cache_bytes_per_token
from headwater.engines.pages import Page
from headwater.engines.split import Portion, split_model
from headwater.testing.served import Server, make_prompts


class Threads:
    """The processes, as threads."""

    def __init__(self, size):
        self.size, self.barrier, self.given = size, threading.Barrier(size), [None] * size

    def seen_by(self, rank):
        one = copy.copy(self)
        one.rank = rank
        return one

    def exchanged(self, x):
        self.given[self.rank] = x
        self.barrier.wait(60)
        found = list(self.given)
        self.barrier.wait(60)
        return found

    def add_up(self, x):
        return sum(self.exchanged(x))

    def concatenate(self, x):
        return torch.cat(self.exchanged(x), dim=-1)


GQA = {"num_key_value_heads": 4, "num_attention_heads": 8, "hidden_size": 64}
CASES = [
    ({}, GQA),
    ({}, GQA | dict(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, feed_forward="plain")),
    ({}, GQA | dict(position="alibi")),
    ({"svformer": {}, "kv_shift": {"window": 3, "queries": True}}, GQA | dict(sliding_window=5)),
    ({"skip_layer": {"layers": 2, "heads": 6}, "value_residual": {}}, GQA),
    ({"value_residual": {}, "skip_layer": {}, "kv_shift": {}}, GQA | dict(num_hidden_layers=4)),
    ({"exclusive": {"learnable": True}, "mudd": {}, "dense_former": {}}, GQA),
    ({"kv_source": {"keys": "yoco", "values": "yoco"}, "neutreno": {}}, GQA),
    ({"pattention": {}}, GQA),
    ({"mla": {}}, GQA),
    ({"pattention": {"score": "exp_l1_norm"}}, GQA),
    ({"pattention": {"top_k": 5}, "kv_shift": {}}, GQA),
    ({"short_conv": {"sites": ["attention_input", "feed_forward_hidden"]}, "smear": {"weight": 0.5}}, GQA),
    ({"short_conv": {"sites": ["queries", "keys", "values"], "dynamic": ["keys"]}, "value_embedding": {}}, GQA),
    (
        {
            "output_gate": {"granularity": "channel"},
            "value_embedding": {"rank": 3, "tables": 1},
            "skip_layer": {"heads": 6},
        },
        GQA,
    ),
    ({"output_gate": {"channels": 5}, "value_embedding": {"rank": 3, "gate": "scalar"}}, GQA),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mechanisms", "changes"), CASES, ids=lambda one: "+".join(one))
def test_parts_together_are_the_whole(mechanisms, changes, size):
    model, rows = build(mechanisms, **changes), make_prompts(97)[:5]
    with torch.no_grad():
        alone = [model(torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    threads, found = Threads(size), [None] * size

    def run(rank):
        try:
            part, share = copy.deepcopy(model), Portion(model.config, rank, size)
            split_model(part, share, threads.seen_by(rank))
            found[rank] = list(Server(part, share=share).run_rows(rows))
        except Exception as error:
            found[rank] = error
            threads.barrier.abort()

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    for part in found:
        assert isinstance(part, list), found
        for row, position, logits in part:
            assert_near(logits, alone[row][position])


def test_a_process_has_its_part_of_cache_and_weights():
    model = build({"svformer": {}}, **GQA)
    parts = []
    for rank in range(2):
        part, share = copy.deepcopy(model), Portion(model.config, rank, 2)
        split_model(part, share, Threads(2).seen_by(rank))
        sizes = [sum(parameter.numel() for parameter in one.model.layers.parameters()) for one in (part, model)]
        parts.append((Page(share.narrow_config, share.plans, 16).history, sizes[0] / sizes[1]))
    assert [history for history, _ in parts] == [8 * cache_bytes_per_token(model.config)] * 2
    assert all(0.49 < weights < 0.52 for _, weights in parts)


@pytest.mark.parametrize(
    ("mechanisms", "changes", "message"),
    [
        ({}, GQA | {"num_key_value_heads": 1}, "1 key/value heads cannot be divided among 2 processes"),
        ({"value_embedding": {"tables": 1}}, GQA, "'value_embedding' does not declare that its heads can be split"),
        (
            {},
            GQA | dict(sliding_window=5, sliding_layers=[0], sliding_fields={"num_key_value_heads": 2}),
            "different heads",
        ),
    ],
)
def test_what_cannot_be_split(mechanisms, changes, message):
    with pytest.raises(HeadwaterError, match=message):
        Portion(config(mechanisms, **changes), 0, 2)
