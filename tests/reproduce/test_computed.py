"""Tables that need no training, against models as they are built and formulas typed from the papers."""

import json
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.config.presets import preset
from headwater_lab.papers import theory
from headwater_lab.papers.computing import CONTEXTS, SERIES, count_map_parameters, make_transformer_like
from headwater_lab.papers.result import compute_table, terminal_tables, write_result
from headwater_lab.papers.table import read_tables


def amount(text: str) -> float:
    """The number that "1,234" or "2.58 G" says."""
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[unit]


def rows(found) -> dict[str, list[str]]:
    return {name: [ours.text for _, ours in row] for name, row in zip(found.rows, found.cells, strict=True)}


def test_parameters_are_those_of_a_built_model():
    config = HeadwaterConfig.gpt2(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=8
    )
    # Four maps of D² and two of 4·D², with their biases.
    assert count_map_parameters(config) == 3 * (12 * 16**2 + 4 * 16 + 4 * 16 + 16)
    model = HeadwaterForCausalLM(config)
    blocks = [p for name, p in model.named_parameters() if ".layers." in name and "norm" not in name]
    assert count_map_parameters(config) == sum(p.numel() for p in blocks)


@pytest.mark.slow
def test_table_3_counts_both_keys_and_values_of_parameter_tokens():
    found = compute_table("tokenformer/table-3")
    assert [one.verdict for one in found.claims] == ["fails", "replicates", "replicates", "replicates"]
    shown = rows(found)
    for name in SERIES:
        config = preset(name)
        (options,) = config.mechanisms.values()
        layers, width = config.num_hidden_layers, config.hidden_size
        tokens = 4 * options["attention_pairs"] + options["ffn_pairs"]
        printed, whole, built, formula, counted, attention = map(amount, shown[name])
        assert built == whole == 2 * layers * width * tokens
        assert printed == layers * width * (tokens + options["ffn_pairs"])
        for value in (formula, counted):
            assert value == pytest.approx(2 * whole + 4 * layers * width * 1024, rel=1e-3)
        assert attention == pytest.approx(4 * 12 * 768 * 1024, rel=1e-3)  # that of the smallest, in all


@pytest.mark.slow
def test_flops_of_figure_5_are_those_pytorch_counts():
    """One layer is enough, the others are alike; a context of its own, since 1024 takes long."""
    found = compute_table("tokenformer/figure-5")
    shown = rows(found)
    grown = preset("tokenformer-354m")
    small = HeadwaterConfig.from_dict(grown.to_dict() | {"num_hidden_layers": 1})
    with torch.device("meta"):
        model = HeadwaterForCausalLM(small)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(torch.zeros(1, CONTEXTS[0], dtype=torch.long), use_cache=False)
    head = 2 * grown.hidden_size * grown.vocab_size
    layer = counter.get_total_flops() / CONTEXTS[0] - head
    assert amount(shown["tokenformer-354m"][0]) == pytest.approx(grown.num_hidden_layers * layer + head, rel=0.01)


@pytest.mark.slow
def test_figure_5_compares_models_as_large():
    for name in SERIES:
        grown, wide = preset(name), make_transformer_like(preset(name))
        assert wide.num_hidden_layers == grown.num_hidden_layers
        assert count_map_parameters(wide) == pytest.approx(count_map_parameters(grown), rel=0.08)
        assert not wide.mechanisms
    found = compute_table("tokenformer/figure-5")
    shown = rows(found)
    for name in SERIES:
        of = name.removeprefix("tokenformer-")
        for index in range(len(CONTEXTS)):
            ratio = amount(shown[f"Transformer of {of}"][index]) / amount(shown[name][index])
            assert float(shown[f"Transformer over {name}"][index]) == pytest.approx(ratio, abs=0.006)
    assert found.claims[0].verdict == "replicates"


@pytest.mark.slow
def test_speeds_of_figure_2_are_those_of_the_flow():
    found = compute_table("kv-shifting/figure-2")
    speeds = []
    for length, (name, cells) in zip(theory.LENGTHS, rows(found).items(), strict=True):
        assert name == f"T = {length}"
        axis = torch.linspace(0, 1, 41, dtype=torch.float64)
        total = 0.0
        for beta in axis:  # a row of starts at a time
            _, u, v = theory.gradient_flow(axis, beta.expand(41), length)
            total += float((u**2 + v**2).sqrt().sum())
        speeds.append(total / 41**2)
        assert float(cells[1]) == pytest.approx(speeds[-1], abs=1e-4)
    assert (found.claims[1].verdict == "replicates") == (speeds == sorted(speeds, reverse=True))
    assert all(float(share) / 100 > 0.99 for share in re.findall(r"(\d+)%", found.claims[0].evidence))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(name for name, one in read_tables().items() if one.computed))
def test_results_of_computed_tables(name, tmp_path, run):
    found = compute_table(name)
    content = json.loads(write_result(found, tmp_path / "result").read_text())
    assert [one["verdict"] for one in content["claims"]] == [one.verdict for one in found.claims]
    assert (tmp_path / "result" / "figure.png").exists() == (found.figure is not None)
    assert len(terminal_tables(found)) == 5 + len(found.table.notes)
    code, out, _ = run("reproduce", name, "--out", tmp_path)
    assert code == 0
    assert found.answer in out
    code, _, complaint = run("reproduce", name, "training.steps=3", "--out", tmp_path)
    assert code == 2
    assert f"training.steps=3 has no effect for {name}, which is computed without training" in complaint
