"""The theorems of the KV shifting paper as code, checked. arXiv 2411.19574, section 3, appendices A to C.

    Theorem 2   one layer and head with KV shifting is the induction-head machine, exactly (eq. 9)
    Theorem 1   two vanilla layers approximate it, with an error of order e^-p, p the first layer's ALiBi slope (eq. 8)
    Theorem 3   training α1, α2, β1, β2 alone: the loss in closed form and its gradient flow (eq. 10, figure 2)

T tokens, d width, positions t, s from 1. Theorems 2 and 3 run headwater's own attention and mechanism; Theorem 1 is
plain torch, because the library's slopes follow from the number of heads, and the theorem needs a free one.
"""

import math
from typing import cast

import torch
from matplotlib.figure import Figure
from torch import Tensor

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.nn.attention import Attention
from headwater.nn.masks import LayerKind, find_new_tokens, make_mask
from headwater.nn.position import alibi_slopes
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.util.errors import HeadwaterError
from headwater_lab.util.figures import ShownFigure

PAPER = "2411.19574"
SLOPE = float(alibi_slopes(1))  # for a model with one head: 2^-8
LENGTHS = (4, 12, 102)  # T of the three panels
STREAM, MARK = "#0072B2", "#D55E00"
ROUNDING = 1e-12  # allowed for rounding in fp64


# Definition 1: the machine


def induction_head(x: Tensor, sharpness: float = 1.0, match: Tensor | None = None, slope: float = SLOPE) -> Tensor:
    """The induction-head machine at every position: x [..., T, d] -> [..., T, d]. Definition 1, eq. 7.

        IH(x)_t = Σ_{s=1..t} softmax_s(sharpness·x_tᵀ·match·x_{s-1} - slope·(t - s))·x_s,      x_0 = 0

    It looks for earlier tokens that match x_t, and reads what followed them. match: [d, d], default the identity;
    sharpness: the inverse temperature.

    Borders. As in causal attention s = t takes part, and s = 1 with the zero key x_0, so with score 0: with these slots
    eq. 9 is an equality. Without them (t ≥ 3) the output changes by at most 2·max|x_s| times their weight, which
    vanishes with growing sharpness where another slot matches.
    """
    keys = torch.nn.functional.pad(x, (0, 0, 1, 0))[..., :-1, :]
    queries = sharpness * (x if match is None else x @ match)
    return (queries @ keys.transpose(-1, -2) + _alibi_bias(x, slope, diagonal=0)).softmax(-1) @ x


def _alibi_bias(x: Tensor, slope: float, diagonal: int) -> Tensor:
    """-slope·(t - s) where s ≤ t + diagonal, -inf elsewhere: [T, T]."""
    position = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
    distance = position[:, None] - position
    return (-slope * distance).masked_fill(distance < -diagonal, -math.inf)


# Theorem 2: one layer with KV shifting


def shifted_head(
    scalars: tuple[float, ...], width: int, sharpness: float = 1.0, match: Tensor | None = None, position: str = "alibi"
) -> Attention:
    """headwater's attention with KV shifting, one layer, one head, weights set by hand, fp64. Appendix B.

        (α1, α2, β1, β2) = scalars,   W_Q = sqrt(d)·sharpness·matchᵀ,   W_K = W_V = W_O = I

    sqrt(d) cancels the attention's own 1/sqrt(d). With scalars (0, 1, 1, 0) slot s has key x_{s-1} and value x_s.
    """
    name = shift_name()
    config = HeadwaterConfig(
        hidden_size=width, num_hidden_layers=1, num_attention_heads=1, position=position, mechanisms={name: {}}
    )
    config._attn_implementation = "eager"
    attention = Attention(config, plan_layers(config)[0]).double()
    eye = torch.eye(width, dtype=torch.float64)
    alpha, beta = torch.tensor(scalars, dtype=torch.float64).view(2, 2, 1)
    weights = {"q_proj.weight": math.sqrt(width) * sharpness * (eye if match is None else match.T)}
    weights |= {f"{letter}_proj.weight": eye for letter in "kvo"}
    attention.load_state_dict(weights | {f"mechanisms.{name}.alpha": alpha, f"mechanisms.{name}.beta": beta})
    return attention


def shift_name() -> str:
    """Find the name of the paper's mechanism."""
    return next(name for name in MECHANISMS.built_in if resolve(name).paper == PAPER)


def run_attention(attention: Attention, x: Tensor) -> Tensor:
    """A layer of attention alone, without norm, residual or feed-forward: x [B, T, d] -> [B, T, d]."""
    mask = make_mask(LayerKind(0, attention.config), find_new_tokens(x), None, None)
    return cast(Tensor, attention(x, attention_mask=mask)[0])


# Theorem 1: two vanilla layers


def two_layers(x: Tensor, first_slope: float, sharpness: float = 1.0) -> Tensor:
    """Two layers of ordinary ALiBi attention that approximate the machine: x [..., T, d] -> [..., T, d]. Appendix A.

        layer 1   (x_s, 0) ↦ (x_s, y_s),  y_s = Σ_{r<s} softmax_r(-p·(s - 1 - r))·x_r,  p = first_slope; with residual
        layer 2   Σ_{s≤t} softmax_s(sharpness·x_tᵀ·y_s - SLOPE·(t - s))·x_s;  no residual

    The width is 2d: a token and the copy of the one before it stand side by side, which KV shifting does not need.

    Layer 1 sees earlier tokens only (the first one sees none: y_1 = 0). Under the usual mask, current token included,
    ALiBi weighs that one e^p times more than the previous one: a steep slope would copy the wrong token.
    """
    d = x.shape[-1]
    copied, shifted = torch.eye(2 * d, dtype=x.dtype).split(d, dim=1)  # h @ copied: the half with the token itself
    h = x @ copied.T
    h = h + _attention_head(h, 0 * copied, 0 * copied, copied @ shifted.T, _alibi_bias(x, first_slope, diagonal=-1))
    return _attention_head(h, sharpness * copied, shifted, copied, _alibi_bias(x, SLOPE, diagonal=0))


def _attention_head(h: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """softmax(h·query·keyᵀ·hᵀ + bias)·h·value; a row that sees nothing reads zero."""
    weights = ((h @ query) @ (h @ key).transpose(-1, -2) + bias).softmax(-1)
    return weights.masked_fill(bias == -math.inf, 0.0) @ (h @ value)


def two_layer_bound(x: Tensor, first_slope: float, sharpness: float = 1.0) -> float:
    """Bound of eq. 8 for `two_layers` on max_t |IH(x)_t - TF(x)_t| (2-norms).

    With R = max_s |x_s|, ‖A‖ = |sharpness|, q = e^-p:

        |y_s - x_{s-1}| ≤ 2·R·q,        |IH(x)_t - TF(x)_t| ≤ 2·R·tanh(‖A‖·R²·q) ≤ 2·‖A‖·R³·q

    1. The previous token has the weight (1 - q) / (1 - q^(s-1)) ≥ 1 - q, and the tokens that share the rest are each at
       most 2R away from it. For s ≤ 2 the copy is exact.
    2. So no score is off by more than ε = ‖A‖·R·2Rq. The odds of any set of slots then change by a factor within
       e^(±2ε), and by that its weight by at most tanh(ε/2), the most being at odds e^-ε; so |Δweights|_1 ≤ 2·tanh(ε/2).
       (The appendix's Lemma D.1 does the same job; tanh(ε/2) ≤ ε/2 gives the linear form.)
    3. Both read the same values, of norm at most R, with those weights.
    """
    radius = float(x.norm(dim=-1).max())
    return 2 * radius * math.tanh(abs(sharpness) * radius**2 * math.exp(-first_slope))


# Theorem 3: the four scalars in training


def token_logits(scalars: Tensor, length: int) -> Tensor:
    """Logits at the last position: scalars (α1, α2, β1, β2) [..., 4] -> [..., 5]. Appendix C, table 5.

    The setting: T different tokens, then token i once more (2 ≤ i ≤ T - 2), and the next one should be token i+1.
    Embeddings are N(0, 1/D) in each component, and tied; W_Q = W_K = W_V = W_O = I; no scaling, positions, residual,
    norm or MLP. As D → ∞ they are orthonormal. The last token's score is then α1 on slots i and T+1, α2 on slot i+1
    and 0 on T-2 others, and with Z = 2·e^α1 + e^α2 + T - 2 the values β1·e_s + β2·e_{s-1} give

        token i          (2·β1·e^α1 + β2·e^α2) / Z
        token i+1        (β1·e^α2 + β2) / Z             the target
        tokens i-1, T    (β1 + β2·e^α1) / Z             each
        T-4 others       (β1 + β2) / Z                  each
        unseen tokens    0

    Departure: nothing of order 1/T is dropped; the paper writes O(T) for what the other tokens contribute.
    """
    if length < 4:
        raise HeadwaterError(f"Theorem 3 needs a length of at least 4 (2 ≤ i ≤ length - 2), not {length}.")
    alpha1, alpha2, b1, b2 = scalars.unbind(-1)
    x, y = alpha1.exp(), alpha2.exp()
    numerators = torch.stack((2 * x * b1 + y * b2, y * b1 + b2, b1 + x * b2, b1 + b2, torch.zeros_like(b1)), dim=-1)
    return numerators / (2 * x + y + length - 2)[..., None]


def scalar_loss(scalars: Tensor, length: int, vocabulary: int | None = None) -> Tensor:
    """Cross entropy of token i+1 at the last position, eq. 10: [..., 4] -> [...]. vocabulary: T tokens by default."""
    logits = token_logits(scalars, length)
    unseen = 0 if vocabulary is None else vocabulary - length
    counts = torch.tensor([1, 1, 2, length - 4, unseen], dtype=torch.float64)
    return (logits + counts.log()).logsumexp(-1) - logits[..., 1]


def scalar_gradient(scalars: Tensor, length: int, vocabulary: int | None = None) -> Tensor:
    """dL/d(α1, α2, β1, β2) of the closed form: [..., 4] -> [..., 4]."""
    scalars = scalars.detach().requires_grad_()
    return torch.autograd.grad(scalar_loss(scalars, length, vocabulary).sum(), scalars)[0]


def gradient_flow(alpha1: Tensor, beta1: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the gradient flow (dα1/dt, dβ1/dt) in the plane of figure 2: each of the shape of alpha1 and beta1.

    As in the figure α2 = 1 - α1 and β2 = 1 - β1; in it the induction head is (α1, β1) = (0, 1).
    """
    scalars = torch.stack((alpha1, 1 - alpha1, beta1, 1 - beta1), dim=-1)
    g = scalar_gradient(scalars, length)
    return scalar_loss(scalars, length), g[..., 1] - g[..., 0], g[..., 3] - g[..., 2]


def model_loss(scalars: tuple[float, ...], embeddings: Tensor, length: int) -> tuple[float, Tensor]:
    """Loss and gradient [4] of the same task from headwater's attention. embeddings: [vocabulary, D], fp64."""
    middle = length // 2 - 1  # token i, counted from 0
    tokens = torch.cat((torch.arange(length), torch.tensor([middle])))
    attention = shifted_head(scalars, embeddings.shape[1], position="none")
    logits = run_attention(attention, embeddings[tokens][None])[0, -1] @ embeddings.T
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(middle + 1))
    shift = attention.mechanisms[shift_name()]
    taps = cast(tuple[Tensor, Tensor], (shift.alpha, shift.beta))
    return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, taps)])


def flow_figure() -> Figure:
    """Contours of the loss (dark: high) and streamlines of the flow over (α1, β1), one panel for each T. Figure 2.

    The dot is the induction head.

    Departure: the paper sets its O(T) to 0, 10 and 100. Here T is exact, and T - 2 = 2 (the shortest sequence the
    derivation holds for), 10 and 100 in Z.
    """
    axis = torch.linspace(-1, 2, 61, dtype=torch.float64)
    beta1, alpha1 = torch.meshgrid(axis, axis, indexing="ij")
    figure = ShownFigure(figsize=(2.7 * len(LENGTHS) + 0.3, 3.0), layout="constrained")
    panels = figure.subplots(1, len(LENGTHS), sharey=True)
    for axes, length in zip(panels, LENGTHS, strict=True):
        loss, u, v = (tensor.numpy() for tensor in gradient_flow(alpha1, beta1, length))
        axes.contourf(axis, axis, loss, levels=11, cmap="Greys", alpha=0.55)
        axes.streamplot(axis.numpy(), axis.numpy(), u, v, color=STREAM, density=0.6, linewidth=0.8, arrowsize=0.8)
        axes.plot(0, 1, "o", color=MARK, markersize=7, zorder=5)
        axes.set(title=f"T = {length}, loss {loss.min():.3g} to {loss.max():.3g}", xlabel="α1 = 1 - α2")
        axes.set(xlim=(-1, 2), ylim=(-1, 2), xticks=range(-1, 3), yticks=range(-1, 3))
        axes.title.set_fontsize(9)
    panels[0].set_ylabel("β1 = 1 - β2")
    return figure


def check_theorems() -> tuple[list[list[str]], list[tuple[str, str, bool]]]:
    """Check the theorems in fp64: (rows of what was checked and its result, (claim, result, whether it holds) of each).

    The flow of theorem 3 is figure 2 of the paper.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    exactness = 0.0
    for width, length, sharpness in [(3, 1, 1.0), (8, 2, 0.0), (16, 33, 1.0), (16, 257, 30.0), (64, 128, -2.0)]:
        x, match = normal(2, length, width), normal(width, width)
        machine = induction_head(x, sharpness, match)
        head = shifted_head((0, 1, 1, 0), width, sharpness, match)
        exactness = max(exactness, float((run_attention(head, x) - machine).detach().abs().max() / machine.abs().max()))
    exact_result = f"difference ≤ {exactness:.1e}"
    rows = [["2: one layer with KV shifting and the machine, 5 sizes, all positions", exact_result]]

    tokens = torch.randperm(64, generator=generator).repeat(2)
    one_hot = torch.eye(64, dtype=torch.float64)[tokens]
    guess = run_attention(shifted_head((0, 1, 1, 0), 64, sharpness=20.0), one_hot[None])[0].argmax(-1)
    right = int((guess[64:-1] == tokens[65:]).sum())
    rows.append(["2: 64 tokens in random order, twice: the second time predicted", f"{right} of 63"])

    x = torch.nn.functional.normalize(normal(64, 16), dim=-1)
    machine = induction_head(x, 4.0)
    shares = []
    for first_slope in (SLOPE, 2.0, 4.0, 8.0, 16.0):
        error = float((two_layers(x, first_slope, 4.0) - machine).norm(dim=-1).max())
        bound = two_layer_bound(x, first_slope, 4.0)
        shares.append(error / bound)
        rows.append([f"1: two vanilla layers, first slope {first_slope:.3g}", f"{error:.1e}, bound {bound:.1e}"])

    scalars = (0.3, 0.9, 0.7, 0.4)
    exact = torch.tensor(scalars, dtype=torch.float64)
    loss, gradient = model_loss(scalars, torch.eye(40, dtype=torch.float64), 32)
    difference = abs(loss - float(scalar_loss(exact, 32, 40)))
    difference = max(difference, float((gradient - scalar_gradient(exact, 32, 40)).abs().max()))
    closed_result = f"difference ≤ {difference:.1e}"
    rows.append(["3: loss and gradient of the model, one-hot embeddings", closed_result])
    for width in (64, 256, 1024):
        losses = [model_loss(scalars, normal(40, width) / math.sqrt(width), 32)[0] for _ in range(8)]
        rms = float((torch.tensor(losses, dtype=torch.float64) - scalar_loss(exact, 32, 40)).square().mean().sqrt())
        rows.append([f"3: loss of the model, Gaussian embeddings of width {width}", f"rms difference {rms:.4f}"])
    return rows, [
        ("One layer with KV shifting is the induction-head machine.", exact_result, exactness < ROUNDING),
        (
            "Two vanilla layers approximate the machine, with an error of order e^-p.",
            f"errors are at most {max(shares):.2g} of the bound",
            max(shares) <= 1,
        ),
        ("The loss in the four scalars and its gradient have a closed form.", closed_result, difference < ROUNDING),
    ]
