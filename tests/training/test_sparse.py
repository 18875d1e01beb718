"""Gradients and steps of the rows of tables that a step reads."""

import pytest
import torch
from torch import nn

from conftest import assert_near, build, tokens
from headwater import HeadwaterError
from headwater.recipe import Training, parse
from headwater.training.checkpoint import load_model
from headwater.training.loop import train
from headwater.training.optim import clip, gradient_norm, make_optimizers
from headwater.training.places import checkpoints
from headwater.training.sparse import SparseAdamW, tables

MECHANISMS = {"ngram_memory": {"rows": 40, "rank": 8, "heads": 2}, "value_embedding": {"tables": 1, "rank": 4}}


def steps(table: nn.Embedding, optimizer: torch.optim.Optimizer, reads: list[list[int]]) -> None:
    torch.manual_seed(1)
    for rows in reads:
        optimizer.zero_grad()
        (table(torch.tensor(rows)) * torch.randn(len(rows), 3, dtype=torch.float64)).sum().backward()
        optimizer.step()


def both(reads: list[list[int]], decay: float = 0.0) -> list[tuple[nn.Embedding, dict]]:
    """A table of 5 rows trained by us and by PyTorch: (the table, the optimizer's state)."""
    made = []
    for kind, sparse in ((SparseAdamW, True), (torch.optim.AdamW, False)):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=sparse).double()
        optimizer = kind([{"params": [table.weight]}], lr=0.1, betas=(0.9, 0.95), weight_decay=decay)
        steps(table, optimizer, reads)
        made.append((table, optimizer.state[table.weight]))
    return made


def test_it_is_adamw_where_every_row_is_read():
    ours, theirs = both([[0, 1, 2, 3, 4, 4, 0]] * 6, decay=0.2)
    assert_near(ours[0].weight, theirs[0].weight, 1e-12)


def test_averages_are_adamws_at_every_step_that_reads_a_row():
    reads = [[0, 1, 2], [3, 1, 1], [2], [0, 3], [1], [2, 0, 2]]
    for until in range(1, 7):
        (ours, own), (theirs, other) = both(reads[:until])
        read = torch.tensor(reads[until - 1])
        for name in ("exp_avg", "exp_avg_sq"):
            assert_near(own[name][read], other[name][read], 1e-12)
        assert own["last_read"].tolist() == [
            max([0, *(step for step, rows in enumerate(reads[:until], 1) if row in rows)]) for row in range(5)
        ]
        assert torch.equal(ours.weight[4], theirs.weight[4])
    assert not torch.equal(ours.weight[3], theirs.weight[3])  # which AdamW has moved after it was read last


def test_a_step_that_is_not_finite_changes_nothing():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = SparseAdamW([{"params": [table.weight]}])
    optimizer.found_inf = torch.ones(())
    before = table.weight.detach().clone()
    (table(torch.tensor([1, 2])) * torch.nan).sum().backward()
    optimizer.step()
    assert torch.equal(table.weight, before)
    assert not any(state.any() for state in optimizer.state[table.weight].values())


def test_sparse_gradients_are_the_dense_ones():
    """Their norm and what clipping leaves of them too: rows that are read twice count once, added up."""
    models, ids = [build(MECHANISMS).train() for _ in range(2)], tokens(3, 12)
    held = tables(models[0])
    assert len(held) == 2
    for table in held:
        table.sparse = True
    norms = []
    for model in models:
        model(ids, labels=ids, use_cache=False).loss.backward()
        norms.append(gradient_norm(model.parameters()))
        clip(model.parameters(), norms[-1], 0.01)
    assert_near(norms[0], norms[1], 1e-6)
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert ours.grad.is_sparse == ("table" in name)
        assert_near(ours.grad.to_dense() if ours.grad.is_sparse else ours.grad, theirs.grad, 1e-12)


def test_every_parameter_is_in_one_optimizer():
    model = build(MECHANISMS)
    for table in tables(model):
        table.sparse = True
    for optimizer in ("adamw", "muon"):
        made = make_optimizers(model, Training(optimizer=optimizer, layer_decay=0.5), torch.device("cpu"))
        held = [parameter for one in made for group in one.param_groups for parameter in group["params"]]
        assert len(held) == len(set(held))
        assert set(held) == set(model.parameters())
        assert {one for group in made[-1].param_groups for one in group["params"]} == {t.weight for t in tables(model)}


def recipe(**training):
    values = {
        "data": {"kind": "induction", "vocabulary": 30, "length": 16},
        "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mechanisms": MECHANISMS},
        "training": {"steps": 4, "batch_size": 2, "warmup_steps": 1, "threads": 1, "sparse_tables": True} | training,
        "reporting": {"save_every": 2, "tensorboard": False, "keep": 99},
    }
    return parse(values, "test")


def test_a_run_resumes_to_the_same_bits(tmp_path):
    made = recipe(accumulate=2)
    train(made, tmp_path / "whole")
    train(made, tmp_path / "cut", until=2)
    train(made, tmp_path / "cut", resume=True)
    models = [load_model(checkpoints(tmp_path / name)[-1]) for name in ("whole", "cut")]
    for (name, whole), cut in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(whole, cut), name


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"strategy": "fsdp"}, "use ddp"),
        ({"compile": True}, "no sparse gradients"),
        ({"optimizer": "torch.optim:SGD"}, "adamw and muon"),
    ],
)
def test_what_it_does_not_work_with(training, message):
    with pytest.raises(HeadwaterError, match=message):
        recipe(**training)
