"""Tables and figures without training: TokenFormer's table 3 and figure 5, KV shifting's figure 2 and theorems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from matplotlib.figure import Figure

from headwater.config.presets import preset
from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater_lab.papers import theory
from headwater_lab.papers.claims import ClaimVerdict
from headwater_lab.reports.words import span
from headwater_lab.training.estimate import draw_flops
from headwater_lab.util.terminal import si

# The growth series of TokenFormer.
SERIES = ("tokenformer-124m", "tokenformer-354m", "tokenformer-757m", "tokenformer-1.4b")
CONTEXT = 1024
CONTEXTS = (1024, 4096, 16384, 32768)
# Table 3 leaves out biases, which are lower-order terms.
ROUGHLY = 0.01


@dataclass(frozen=True)
class Fact:
    """A claim that is computed, so exact. found: the result, in words."""

    says: str
    found: str
    verdict: ClaimVerdict


@dataclass(frozen=True)
class Computed:
    """columns: the first contains the rows' names."""

    columns: list[str]
    rows: list[list[str]]
    facts: list[Fact]
    figure: Figure | None = None


def _fact(says: str, found: str, holds: bool) -> Fact:
    return Fact(says, found, "replicates" if holds else "fails")


def maps_of(config: HeadwaterConfig) -> int:
    """Parameters of a built model, without embedding, output head and norms."""
    with torch.device("meta"):
        model = HeadwaterForCausalLM(config)
    counted = {name: p.numel() for name, p in model.named_parameters() if "norm" not in name}
    return sum(n for name, n in counted.items() if "embed" not in name and "lm_head" not in name)


def transformer_like(config: HeadwaterConfig) -> HeadwaterConfig:
    """A Transformer of the same depth, with nearly as many parameters in its linear layers: 12·L·D², heads of 64."""
    layers = config.num_hidden_layers
    width = 64 * round((maps_of(config) / (12 * layers)) ** 0.5 / 64)
    return HeadwaterConfig.gpt2(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        position="rope",
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
    )


def tokenformer_costs() -> Computed:
    """Table 3's formulas, the parameters of built models, and the counts of `headwater plan`."""
    rows, off, flops_off, printed_off, interaction = [], [], [], [], []
    for name in ("gpt2-124m", *SERIES):
        config = preset(name)
        layers, width = config.num_hidden_layers, config.hidden_size
        settings = next(iter((config.mechanisms or {}).values()), None)
        if settings is None:
            printed = whole = 12 * layers * width**2
        else:
            attention, ffn = settings["attention_pairs"], settings["ffn_pairs"]
            printed = layers * width * (4 * attention + 2 * ffn)
            whole = 2 * layers * width * (4 * attention + ffn)
            printed_off.append(maps_of(config) / printed)
        built = maps_of(config)
        forward = cost.forward_flops(config, CONTEXT, causal=False)
        of_tokens = 4 * layers * width * CONTEXT
        counted = forward["maps"] + forward["attention"]
        rows.append([name, f"{printed:,}", f"{whole:,}", f"{built:,}", si(2.0 * whole + of_tokens), si(counted),
                     si(forward["attention"])])  # fmt: skip
        off.append(abs(built / whole - 1))
        flops_off.append(abs(counted / (2 * whole + of_tokens) - 1))
        if settings is not None:
            interaction.append(forward["attention"])
    return Computed(
        ["", "N as printed", "N with K_P and V_P", "as built", "2·N + 4·L·D·T per token", "as counted", "token-token"],
        rows,
        [
            _fact(
                "A TokenFormer's N is L·D·(n_q + n_k + n_v + n_o + 2·n_ff), as printed.",
                f"built models have {span(printed_off, '{:.3f}'.format)} times as many",
                max(abs(one - 1) for one in printed_off) < ROUGHLY,
            ),
            _fact(
                "N is 12·L·D² in a Transformer; in a TokenFormer 2·L·D·(n_q + n_k + n_v + n_o + n_ff).",
                f"built models differ by {max(off):.2%} at most",
                max(off) < ROUGHLY,
            ),
            _fact(
                "A forward pass takes 2·N + 4·L·D·T FLOPs per token of T.",
                f"counts differ by {max(flops_off):.2%} at most",
                max(flops_off) < ROUGHLY,
            ),
            _fact(
                "Token-token attention costs no more as a TokenFormer grows.",
                f"{span(interaction, si)} FLOPs per token at {CONTEXT:,} tokens",
                max(interaction) == min(interaction),
            ),
        ],
    )


def tokenformer_flops() -> Computed:
    """FLOPs against length: the growth series, and Transformers of the same depth and size, which are wider."""
    grown = {name: preset(name) for name in SERIES}
    wide = {f"Transformer of {name.removeprefix('tokenformer-')}": transformer_like(c) for name, c in grown.items()}
    flops = {
        name: [sum(cost.forward_flops(config, length, causal=False).values()) for length in CONTEXTS]
        for name, config in (grown | wide).items()
    }
    rows = [[name, *(si(value) for value in values)] for name, values in flops.items()]
    pairs = [list(zip(flops[x], flops[y], strict=True)) for x, y in zip(wide, grown, strict=True)]
    ratios = [[a / b for a, b in pair] for pair in pairs]
    for name, values in zip(grown, ratios, strict=True):
        rows.append([f"Transformer over {name}", *(f"{value:.2f}" for value in values)])
    later = ratios[1:]  # the grown ones
    saved = [[a - b for a, b in pair] for pair in pairs[1:]]
    return Computed(
        ["forward FLOPs per token", *(f"{length:,} tokens" for length in CONTEXTS)],
        rows,
        [
            _fact(
                "A grown TokenFormer costs less than a Transformer of its size at every length.",
                f"a Transformer takes {span([one for of in later for one in of], '{:.2f}'.format)} times as many",
                all(value > 1 for values in later for value in values),
            ),
            _fact(
                "The longer the text, the greater the advantage.",
                "; ".join(f"{values[0]:.2f} to {values[-1]:.2f}" for values in later),
                all(a < b for values in later for a, b in pairwise(values)),
            ),
            _fact(
                "The larger the model, the more FLOPs are saved.",
                "; ".join(
                    f"{length:,} tokens: {si(saved[0][i])} to {si(saved[-1][i])}" for i, length in enumerate(CONTEXTS)
                ),
                all(a[i] < b[i] for a, b in pairwise(saved) for i in range(len(CONTEXTS))),
            ),
        ],
        draw_flops(grown | wide, [1024 * i for i in range(33)]),
    )


def kv_shifting_dynamics() -> Computed:
    """The flow of theorem 3's loss in the plane of figure 2, from starts in [0, 1]²."""
    rows, speeds, back, ends = [], [], [], []
    for length in theory.LENGTHS:
        axis = torch.linspace(0, 1, 41, dtype=torch.float64)
        beta1, alpha1 = torch.meshgrid(axis, axis, indexing="ij")
        loss, u, v = theory.flow(alpha1, beta1, length)
        speeds.append(float(torch.hypot(u, v).mean()))
        returned, arrived = _followed(alpha1, beta1, length)
        back.append(returned)
        ends.append(arrived)
        rows.append([f"T = {length}", f"{loss.min():.3g} to {loss.max():.3g}", f"{speeds[-1]:.4f}", f"{returned:.0%}",
                     f"{arrived:.0%}"])  # fmt: skip
    slower = all(a > b for a, b in pairwise(speeds))
    return Computed(
        ["", "loss", "mean speed", "starts that go back on the way", "starts that end as an induction head"],
        rows,
        [
            _fact(
                "Training leads to an induction head: the key of the token before, the token's own value.",
                f"{', '.join(f'{one:.0%}' for one in ends)} of the starts",
                min(ends) > 0.99,
            ),
            _fact(
                "The longer the sequence, the slower it gets.",
                f"speed {', '.join(f'{one:.4f}' for one in speeds)}",
                slower,
            ),
            _fact(
                "In short sequences it may go a short way back; in long ones its direction is consistent.",
                f"{', '.join(f'{one:.0%}' for one in back)} of the starts go back in α1 or β1",
                back[0] > back[-1],
            ),
        ],
        theory.flow_figure(),
    )


def kv_shifting_theorems() -> Computed:
    """The theorems' checks, by headwater's own attention and mechanism."""
    rows, claims = theory.checks()
    return Computed(["", "result"], rows, [_fact(*claim) for claim in claims])


def _followed(alpha1: torch.Tensor, beta1: torch.Tensor, length: int, step: float = 0.02) -> tuple[float, float]:
    """Shares of starting points that move back somewhere (α1 rises or β1 falls), and that end with α2 > α1 and β1 > β2.

    Each is followed along its streamline for a length of 6; the flow's border is far from there.
    """
    back = torch.zeros_like(alpha1, dtype=torch.bool)
    for _ in range(round(6 / step)):
        _, u, v = theory.flow(alpha1, beta1, length)
        back |= (u > 0) | (v < 0)
        speed = torch.hypot(u, v)
        alpha1, beta1 = alpha1 + step * u / speed, beta1 + step * v / speed
    arrived = (alpha1 < 0.5) & (beta1 > 0.5)
    return float(back.double().mean()), float(arrived.double().mean())


COMPUTED: dict[str, Callable[[], Computed]] = {
    "tokenformer_costs": tokenformer_costs,
    "tokenformer_flops": tokenformer_flops,
    "kv_shifting_dynamics": kv_shifting_dynamics,
    "kv_shifting_theorems": kv_shifting_theorems,
}
