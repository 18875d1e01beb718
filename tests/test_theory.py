"""The three theorems of the KV shifting paper hold in this library, and the checks of them can fail."""

import math

import pytest
import torch
from torch import Tensor

from conftest import assert_near
from headwater.util.errors import HeadwaterError
from headwater_lab.papers import theory

INDUCTION = (0.0, 1.0, 1.0, 0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scalars(count: int, seed: int = 0) -> Tensor:
    """Both inside and outside [0, 1]."""
    return 3 * torch.rand((count, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def machine(x: Tensor, sharpness: float, match: Tensor, slope: float, t: int, slots: range) -> tuple[Tensor, Tensor]:
    """Eq. 7 read aloud, for one position (from 1) and the given slots: the output, and the weight of each slot."""
    token = [torch.zeros(x.shape[1], dtype=x.dtype), *x]
    scores = [sharpness * (token[t] @ match @ token[s - 1]) - slope * (t - s) for s in slots]
    weights = torch.stack(scores).softmax(0)
    return sum(w * token[s] for w, s in zip(weights, slots, strict=True)), weights


# Definition 1


def test_the_machine_is_its_formula():
    x, match = normal(9, 4), normal(4, 4, seed=1)
    out = theory.induction_head(x, 1.5, match, slope=0.3)
    for t in range(1, 10):
        assert_near(out[t - 1], machine(x, 1.5, match, 0.3, t, range(1, t + 1))[0], 1e-12)


def test_the_first_position_reads_itself():
    x = normal(5, 4)
    assert_near(theory.induction_head(x, 7.0)[0], x[0], 1e-12)


def test_the_border_slots_matter_by_their_weight_at_most():
    x, match = normal(12, 4), normal(4, 4, seed=1)
    out = theory.induction_head(x, 0.5, match, slope=0.3)
    for t in range(3, 13):
        _, weights = machine(x, 0.5, match, 0.3, t, range(1, t + 1))
        inner, _ = machine(x, 0.5, match, 0.3, t, range(2, t))
        border = weights[0] + weights[-1]
        assert 0 < (out[t - 1] - inner).norm() <= 2 * x.norm(dim=-1).max() * border


# Theorem 2


@pytest.mark.parametrize("sharpness", [0.0, 1.0, -3.0, 40.0])
@pytest.mark.parametrize(("width", "length"), [(1, 1), (3, 2), (5, 17), (16, 130)])
def test_one_layer_with_kv_shifting_is_the_machine(width, length, sharpness):
    x, match = normal(2, length, width), normal(width, width, seed=1)
    head = theory.shifted_head(INDUCTION, width, sharpness, match)
    assert_near(theory.run_attention(head, x), theory.induction_head(x, sharpness, match), 1e-12)


def test_it_is_the_machine_at_every_length():
    x = normal(1, 20, 6)
    head, out = theory.shifted_head(INDUCTION, 6, 2.0), theory.induction_head(x, 2.0)
    for length in range(1, 21):
        assert_near(theory.run_attention(head, x[:, :length])[:, -1], out[:, length - 1], 1e-12)


@pytest.mark.parametrize("other", [(1, 0, 1, 0), (0, 1, 0, 1), (1, 0, 0, 1), (0.01, 1, 1, 0), (0, 1, 1, 0.01)])
def test_no_other_scalars_are_the_machine(other):
    x = normal(1, 20, 6)
    difference = theory.run_attention(theory.shifted_head(other, 6, 2.0), x) - theory.induction_head(x, 2.0)
    assert difference.abs().max() > 1e-3


def test_the_machine_says_what_came_next_and_vanilla_attention_does_not():
    tokens = torch.randperm(50, generator=torch.Generator().manual_seed(0)).repeat(2)
    x = torch.eye(50, dtype=torch.float64)[tokens][None]

    def right(values: tuple[float, ...]) -> int:
        guess = theory.run_attention(theory.shifted_head(values, 50, sharpness=20.0), x)[0].argmax(-1)
        return int((guess[50:-1] == tokens[51:]).sum())

    assert right(INDUCTION) == 49
    assert right((1, 0, 1, 0)) == 0


# Theorem 1


@pytest.mark.parametrize("sharpness", [0.1, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_two_vanilla_layers_stay_within_the_bound(seed, sharpness):
    x = normal(40, 8, seed=seed) / 3
    exact = theory.induction_head(x, sharpness)
    for first_slope in (theory.SLOPE, 0.5, 1.0, 2.0, 4.0, 8.0):
        error = (theory.two_layers(x, first_slope, sharpness) - exact).norm(dim=-1).max()
        assert 0 < error <= theory.two_layer_bound(x, first_slope, sharpness)


def test_the_error_falls_as_the_slope_says():
    x = normal(40, 8)
    exact = theory.induction_head(x)

    def error(first_slope: float) -> float:
        return (theory.two_layers(x, first_slope) - exact).norm(dim=-1).max().item()

    for first_slope in (8.0, 12.0):
        assert math.log(error(first_slope) / error(first_slope + 4)) == pytest.approx(4, rel=0.01)
    assert error(50.0) < 1e-12


@pytest.mark.parametrize("first_slope", [0.01, 1.0, 5.0])
def test_the_first_layer_copies_the_previous_token_within_the_bound(first_slope):
    x = normal(30, 4)
    bound = 2 * float(x.norm(dim=-1).max()) * math.exp(-first_slope)
    for s in range(2, 31):
        weights = (-first_slope * torch.arange(s - 1, dtype=x.dtype)).softmax(0)  # of x_{s-1}, x_{s-2}, …
        assert (weights @ x[: s - 1].flip(0) - x[s - 2]).norm() <= (bound if s > 2 else 1e-12)


def test_the_lemma_on_softmax_is_tight():
    for seed, size in enumerate((2, 3, 10, 100)):
        scores, shift = 3 * normal(size, seed=seed), 2 * torch.rand(size, dtype=torch.float64) - 1
        for error in (0.01, 0.5, 3.0):
            moved = (scores + error * shift).softmax(0) - scores.softmax(0)
            assert moved.abs().sum() <= 2 * math.tanh(error / 2)
            worst = torch.tensor([error, -error], dtype=torch.float64)
            moved = (worst / 2).softmax(0) - (-worst / 2).softmax(0)  # two slots, each score moved by error
            assert moved.abs().sum().item() == pytest.approx(2 * math.tanh(error / 2))


# Theorem 3


@pytest.mark.parametrize(("length", "vocabulary"), [(4, 4), (5, 9), (12, 12), (30, 40)])
def test_loss_and_gradient_are_those_of_a_model_with_orthonormal_embeddings(length, vocabulary):
    for point in scalars(5):
        loss, gradient = theory.model_loss(
            tuple(point.tolist()), torch.eye(vocabulary, vocabulary + 3, dtype=torch.float64), length
        )
        assert loss == pytest.approx(theory.scalar_loss(point, length, vocabulary).item(), abs=1e-12)
        assert_near(gradient, theory.scalar_gradient(point, length, vocabulary), 1e-12)


@pytest.mark.slow
def test_with_gaussian_embeddings_the_loss_comes_closer_as_one_over_the_root_of_the_width():
    values = (0.3, 0.9, 0.7, 0.4)
    limit = theory.scalar_loss(torch.tensor(values, dtype=torch.float64), 32, 40)

    def rms(width: int) -> float:
        losses = [theory.model_loss(values, normal(40, width, seed=s) / width**0.5, 32)[0] for s in range(8)]
        return (torch.tensor(losses, dtype=torch.float64) - limit).square().mean().sqrt().item()

    errors = {width: rms(width) for width in (64, 256, 1024)}
    assert all(error < 0.5 / math.sqrt(width) for width, error in errors.items()), errors
    assert 2 < errors[64] / errors[1024] < 8, errors  # 4 in the mean


def test_the_flow_goes_down_in_the_plane_of_the_figure():
    alpha1, beta1 = (c.requires_grad_() for c in (2 * torch.rand(2, 30, dtype=torch.float64) - 0.5))
    loss, u, v = theory.gradient_flow(alpha1, beta1, 12)
    down = torch.autograd.grad(-loss.sum(), (alpha1, beta1))
    assert_near(u, down[0], 1e-12)
    assert_near(v, down[1], 1e-12)


@pytest.mark.parametrize("length", theory.LENGTHS)
def test_from_equal_shares_the_flow_leads_to_the_induction_head(length):
    point = torch.tensor([0.5, 0.5], dtype=torch.float64)
    before = math.inf
    for _ in range(20_000):
        loss, *step = theory.gradient_flow(point[0], point[1], length)
        assert loss < before
        before = loss
        point = point + 0.2 * torch.stack(step) / torch.stack(step).norm().clamp(min=0.2)
        if point[0] < 0 and point[1] > 1:
            return
    pytest.fail(f"ended at {point.tolist()}")


def test_a_sequence_too_short_is_refused():
    with pytest.raises(HeadwaterError, match="at least 4"):
        theory.scalar_loss(torch.zeros(4), 3)


# All of it
