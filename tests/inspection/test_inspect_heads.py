"""Attention, similarity, induction and shares on models with hand-set weights, and naive loops beside them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from conftest import assert_near, build, tokens
from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM
from headwater_lab.inspection.inspection import inspect_model
from headwater_lab.inspection.sample import Sample, repeat_random_tokens
from headwater_lab.inspection.scores import effective_weights, induction_attention, token_similarity
from headwater_lab.inspection.watch import hook_model, induction_scores, read_sample
from headwater_lab.papers.theory import shifted_head
from headwater_lab.training.trained_models import Trained

LENGTH = 12


def hand(mechanisms=None, width=LENGTH, layers=1, **changes):
    """One head; all weights of the blocks zero, norms one; positions are learned: one-hot, and tokens nothing."""
    sizes = dict(vocab_size=width, hidden_size=width, num_hidden_layers=layers, num_attention_heads=1)
    config = HeadwaterConfig(**sizes | dict(position="learned", max_position_embeddings=LENGTH) | changes)
    config.mechanisms = mechanisms or {}
    model = HeadwaterForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.zero_()
        if model.model.embed_positions is not None:
            model.model.embed_positions.weight.copy_(torch.eye(LENGTH, width))
    return model


def of(ids, **more):
    return Sample({"input_ids": ids, **more}, ids.shape[1])


def attend_back(model, back, layer=0):
    """One-hot attention to the token `back` before: position t asks for position t - back."""
    attention = model.model.layers[layer].self_attn
    with torch.no_grad():
        attention.k_proj.weight.copy_(torch.eye(LENGTH))
        attention.q_proj.weight.copy_(1e3 * torch.diag(torch.ones(LENGTH - back), back))


def test_uniform_attention():
    found = read_sample(hand(), of(tokens(3, LENGTH) % LENGTH))
    seen = range(1, LENGTH + 1)
    assert found.entropy[0] == pytest.approx([sum(map(math.log, seen)) / LENGTH])
    assert found.normalized_entropy[0] == pytest.approx([1.0])
    assert found.first_token[0] == pytest.approx([sum(1 / t for t in seen) / LENGTH])
    assert found.previous_token[0] == pytest.approx([sum(1 / t for t in seen if t > 1) / (LENGTH - 1)])
    assert found.previous_token_effective == found.previous_token


def test_attention_to_learned_pairs():
    model = hand({"persistent_memory": {"pairs": 3, "layers": [1]}}, layers=2)
    found = read_sample(model, of(tokens(3, LENGTH) % LENGTH))
    seen = range(1, LENGTH + 1)
    assert found.beside == [[0.0], pytest.approx([sum(3 / (t + 3) for t in seen) / LENGTH])]
    assert found.first_token[1] == pytest.approx([sum(1 / (t + 3) for t in seen) / LENGTH])
    assert read_sample(hand(), of(tokens(3, LENGTH) % LENGTH)).beside is None


def test_attention_to_the_previous_token():
    model = hand()
    attend_back(model, 1)
    found = read_sample(model, of(torch.zeros(2, LENGTH, dtype=torch.long)))
    assert found.previous_token[0] == pytest.approx([1.0])
    assert found.entropy[0] == pytest.approx([0.0])
    assert found.first_token[0] == pytest.approx([2 / LENGTH])


@pytest.mark.parametrize(("beta", "there"), [((0.0, 1.0), 1.0), ((0.3, -0.2), -0.2), ((1.0, 0.0), 0.0)])
def test_a_head_that_looks_at_itself_reads_what_its_values_were_mixed_of(beta, there):
    model = hand({"kv_shift": {"keys": False}})
    attend_back(model, 0)
    with torch.no_grad():
        model.model.layers[0].self_attn.mechanisms["kv_shift"].beta.copy_(torch.tensor(beta)[:, None])
    found = read_sample(model, of(torch.zeros(2, LENGTH, dtype=torch.long)))
    assert found.previous_token[0] == pytest.approx([0.0])
    assert found.previous_token_effective[0] == pytest.approx([there], abs=1e-7)


def test_packed_rows_stop_at_documents():
    """Two documents of 6 tokens: attention and taps do not cross; contiguous rows: attention does, taps do not."""
    half = LENGTH // 2
    model = hand({"kv_shift": {"keys": False}}, position="none")
    with torch.no_grad():
        model.model.layers[0].self_attn.mechanisms["kv_shift"].beta.copy_(torch.tensor([[0.5], [2.0]]))
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    packed = read_sample(model, of(ids, position_ids=torch.arange(half).repeat(2, 2)))
    assert packed.entropy[0] == pytest.approx([sum(math.log(t) for t in range(1, half + 1)) / half])
    assert packed.first_token[0] == pytest.approx([sum(1 / t for t in range(1, half + 1)) / half])
    wanted = sum((0.5 + 2.0) / t for t in range(2, half + 1)) / (half - 1)
    assert packed.previous_token_effective[0] == pytest.approx([wanted])
    starts = (torch.arange(LENGTH) % half == 0).expand(2, LENGTH)
    crossing = read_sample(model, of(ids, document_starts=starts))
    assert crossing.entropy[0] == pytest.approx([sum(math.log(t) for t in range(1, LENGTH + 1)) / LENGTH])
    after = [t for t in range(2, LENGTH + 1) if t != half + 1]
    assert crossing.previous_token_effective[0] == pytest.approx([sum(2.5 / t for t in after) / len(after)])


def test_a_sliding_window_bounds_what_is_seen():
    found = read_sample(hand(sliding_window=4), of(torch.zeros(2, LENGTH, dtype=torch.long)))
    seen = [min(t, 4) for t in range(1, LENGTH + 1)]
    assert found.entropy[0] == pytest.approx([sum(map(math.log, seen)) / LENGTH])
    assert found.normalized_entropy[0] == pytest.approx([1.0])


def test_only_some_layers_have_a_window():
    model = hand(layers=2, sliding_window=4, sliding_layers=[1])
    found = read_sample(model, of(torch.zeros(2, LENGTH, dtype=torch.long)))
    assert [row[0] for row in found.normalized_entropy] == pytest.approx([1.0, 1.0])
    assert found.entropy[0][0] > found.entropy[1][0]


# Induction


def machine(scalars):
    """A model of one layer around the paper's induction head: orthonormal embeddings, one head with KV shifting."""
    model = hand({"kv_shift": {}}, width=64, position="alibi", max_position_embeddings=128)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.model.layers[0].self_attn.load_state_dict(shifted_head(scalars, 64, sharpness=20.0).state_dict())
    return model


def test_the_induction_machine_has_a_score_of_one():
    """Theorem 2 of KV shifting: key of the token before, value of this one."""
    found = induction_scores(*((model := machine((0, 1, 1, 0))), *repeat_random_tokens(model)))
    assert found.period == 50
    assert found.attention[0] == pytest.approx([1.0], abs=1e-9)
    assert found.effective[0] == pytest.approx([1.0], abs=1e-9)


def test_the_machine_without_its_shift_looks_for_the_same_token():
    """Keys and values of this token: attention is split between the token and its earlier occurrence, none beyond."""
    found = induction_scores(*((model := machine((1, 0, 1, 0))), *repeat_random_tokens(model)))
    assert found.attention[0] == pytest.approx([0.0], abs=1e-9)


def test_the_machine_with_its_values_shifted_attends_right_and_reads_the_same_token():
    found = induction_scores(*((model := machine((0, 1, 0, 1))), *repeat_random_tokens(model)))
    assert found.attention[0] == pytest.approx([1.0], abs=1e-9)
    assert found.effective[0] == pytest.approx([0.0], abs=1e-9)


def test_rows_of_random_tokens_repeat():
    model = build({})
    rows, period = repeat_random_tokens(model)
    ids = rows.inputs["input_ids"]
    assert period == 32 == model.config.max_position_embeddings // 2
    assert torch.equal(ids[:, :period], ids[:, period:])
    assert all(len(row[:period].unique()) == period for row in ids)
    assert not torch.equal(ids[0], ids[1])
    with pytest.raises(HeadwaterError, match="one position"):
        repeat_random_tokens(build({}, max_position_embeddings=1))


def test_induction_is_the_mean_over_the_second_half():
    a = torch.rand(2, 3, 10, 10, dtype=torch.float64).tril()
    wanted = [sum(a[b, h, t, t - 4].item() for b in range(2) for t in range(5, 10)) / 10 for h in range(3)]
    assert induction_attention(a, 5).tolist() == pytest.approx(wanted)


# Similarity


def test_orthogonal_tokens_are_unlike_and_equal_ones_alike():
    model = hand()
    assert read_sample(model, of(tokens(2, LENGTH) % LENGTH)).hidden == pytest.approx([0.0, 0.0])
    with torch.no_grad():
        model.model.embed_positions.weight.copy_(torch.ones(LENGTH, LENGTH))
        model.model.layers[0].self_attn.v_proj.weight.copy_(torch.eye(LENGTH))
    found = read_sample(model, of(tokens(2, LENGTH) % LENGTH))
    assert found.hidden == pytest.approx([1.0, 1.0])
    assert found.values == pytest.approx([1.0])


def test_similarity_as_loops():
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    x[1, 3] = 0
    for row, found in zip(x, token_similarity(x), strict=True):
        pairs = [(s, t) for s in range(5) for t in range(5) if s != t]
        cosines = [nn.functional.cosine_similarity(row[s], row[t], dim=0).item() for s, t in pairs]
        assert found.item() == pytest.approx(sum(cosines) / len(pairs))


# Shares


@pytest.mark.parametrize(("silenced", "left"), [(slice(16, 32), 0.0), (slice(0, 16), 1.0)])
def test_heads_without_an_output_are_not_used(silenced, left):
    """Two of four heads skip; the output columns of these, or of the others, are zero."""
    model = build({"skip_layer": {"layers": 1, "heads": 2}})
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight[:, silenced] = 0
    one = inspect_model(Trained("here", model, None, [], {}), "model", scalars_only=True)
    assert one.attends[1] == [(1, 1), (1, 1), (0, 0), (0, 0)]
    one = replace(one, read=read_sample(model, of(tokens(4, 24))))
    assert [sum(uses[2:]) for uses in one.read.use] == pytest.approx([left] * 3)
    assert one.skip_use == pytest.approx([0.0, left, left])


MIXED = {"kv_shift": {"window": 3}, "value_residual": {}, "skip_layer": {"layers": 1, "heads": 2}}


@pytest.mark.parametrize("layout", ["plain", "packed", "contiguous"])
def test_every_figure_as_loops(layout):
    model, ids = build(MIXED), tokens(4, 10)
    starts = torch.zeros(4, 10, dtype=torch.bool)
    starts[:, 0] = starts[1, 4] = starts[2, 7] = starts[2, 8] = True
    positions = torch.zeros(4, 10, dtype=torch.long)
    for b in range(4):
        for t in range(1, 10):
            positions[b, t] = 0 if starts[b, t] else positions[b, t - 1] + 1
    plain = torch.arange(10).expand(4, 10)
    more = {"plain": {}, "packed": {"position_ids": positions}, "contiguous": {"document_starts": starts}}[layout]
    sees, inside = {"plain": (plain, plain), "packed": (positions, positions), "contiguous": (plain, positions)}[layout]
    found = read_sample(model, of(ids, **more))
    model.set_attn_implementation("eager")
    weights = model(ids, **more, output_attentions=True).attentions
    betas = [block.self_attn.mechanisms["kv_shift"].beta.tolist() for block in model.model.layers]
    for layer in range(3):
        for head in range(4):
            source, kv = (layer - 1 if head >= 2 and layer else layer), head // 2
            place = model.model.layers[source].self_attn.plan.v_heads.index(kv)
            entropies, normalized, first, raw, read_back = [], [], [], [], []
            for b in range(4):
                for t in range(10):
                    row = weights[layer][b, head, t].tolist()
                    entropies.append(-sum(w * math.log(w) for w in row if w > 0))
                    if sees[b, t] > 0:
                        normalized.append(entropies[-1] / math.log(sees[b, t].item() + 1))
                    first.append(row[t - sees[b, t]])
                    if inside[b, t] > 0:
                        raw.append(row[t - 1])
                        read_back.append(betas[source][0][place] * row[t - 1] + betas[source][1][place] * row[t])
            for figure, values in [
                (found.entropy, entropies),
                (found.normalized_entropy, normalized),
                (found.first_token, first),
                (found.previous_token, raw),
                (found.previous_token_effective, read_back),
            ]:
                assert figure[layer][head] == pytest.approx(sum(values) / len(values))


def test_use_as_loops():
    model, ids = build(MIXED), tokens(4, 10)
    kept = []
    attention = model.model.layers[2].self_attn
    hook = attention.o_proj.register_forward_hook(lambda module, inputs, output: kept.append(inputs[0]))
    model(ids)
    hook.remove()
    shares = [0.0] * 4
    for x in kept[0].flatten(0, 1):
        lengths = [
            (attention.o_proj.weight[:, 8 * h : 8 * h + 8] @ x[8 * h : 8 * h + 8]).norm().item() for h in range(4)
        ]
        shares = [share + length / sum(lengths) / 40 for share, length in zip(shares, lengths, strict=True)]
    assert read_sample(model, of(ids)).use[2] == pytest.approx(shares)


def test_effective_weights_as_loops():
    a, taps = torch.rand(2, 3, 7, 7, dtype=torch.float64).tril(), torch.randn(3, 3, dtype=torch.float64)
    since = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 0, 1]])
    wanted = torch.zeros_like(a)
    for b in range(2):
        for h in range(3):
            for t in range(7):
                for s in range(7):
                    for back in range(3):
                        if since[b, s] >= back:
                            wanted[b, h, t, s - back] += taps[back, h] * a[b, h, t, s]
    assert_near(effective_weights(a, taps, since), wanted)


# The model stays as it was


@pytest.mark.parametrize("mechanisms", [{}, MIXED, {"pattention": {"attention_pairs": 7}}, {"svformer": {}}])
def test_looking_changes_nothing(mechanisms):
    model, rows = build(mechanisms), of(tokens(4, 16))
    model.train()
    before = model.eval()(rows.inputs["input_ids"]).logits
    model.train()
    kernel = model.config._attn_implementation
    read_sample(model, rows)
    assert model.training
    assert model.config._attn_implementation == kernel
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model.eval()(rows.inputs["input_ids"]).logits, before)
    with hook_model(model):
        assert_near(model(rows.inputs["input_ids"]).logits, before)


def test_a_materialised_model_reads_the_same():
    mechanisms = {"value_residual": {}, "skip_layer": {"layers": 1, "heads": 2}}
    plain, other = (read_sample(build(mechanisms, materialise=yes), of(tokens(4, 16))) for yes in (False, True))
    assert [[round(x, 9) for x in row] for row in plain.use] == [[round(x, 9) for x in row] for row in other.use]
    assert [[round(x, 9) for x in row] for row in plain.entropy] == [
        [round(x, 9) for x in row] for row in other.entropy
    ]


def test_half_precision():
    """In bfloat16 weights have two or three digits, sums of them more."""
    found = read_sample(hand().to(torch.bfloat16), of(torch.zeros(2, LENGTH, dtype=torch.long)))
    assert found.entropy[0] == pytest.approx([sum(math.log(t) for t in range(1, LENGTH + 1)) / LENGTH], rel=3e-3)
