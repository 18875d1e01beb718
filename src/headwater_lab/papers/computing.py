"""Tables and figures without training: TokenFormer's table 3 and figure 5, KV shifting's figure 2 and theorems."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from matplotlib.figure import Figure

from headwater.config.presets import preset
from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater_lab.papers import theory
from headwater_lab.reports.words import write_range
from headwater_lab.util.terminal import si

# TokenFormer's growth series.
SERIES = ("tokenformer-124m", "tokenformer-354m", "tokenformer-757m", "tokenformer-1.4b")
CONTEXT = 1024
CONTEXTS = (1024, 4096, 16384, 32768)
# Relative tolerance, because Table 3 leaves out biases, which are lower-order terms.
ROUGHLY = 0.01


@dataclass(frozen=True)
class Computed:
    """A computed table. columns: the first contains the rows' names. claims: (claim, result, whether it holds)."""

    columns: list[str]
    rows: list[list[str]]
    claims: Sequence[tuple[str, str, bool | np.bool]]
    figure: Figure | None = None


def count_map_parameters(config: HeadwaterConfig) -> int:
    """Count the parameters of a built model, without embedding, output head and norms."""
    with torch.device("meta"):
        model = HeadwaterForCausalLM(config)
    left_out = ("norm", "embed", "lm_head")
    return sum(p.numel() for name, p in model.named_parameters() if not any(word in name for word in left_out))


def make_transformer_like(config: HeadwaterConfig) -> HeadwaterConfig:
    """Make a Transformer of the same depth with nearly as many parameters in linear layers: 12·L·D², heads of 64."""
    layers = config.num_hidden_layers
    width = 64 * round((count_map_parameters(config) / (12 * layers)) ** 0.5 / 64)
    return HeadwaterConfig.gpt2(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        position="rope",
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
    )


def _write_formulas(config: HeadwaterConfig) -> tuple[int, int]:
    """Compute table 3's N: as printed, and with keys and values of TokenFormer's parameter tokens."""
    layers, width = config.num_hidden_layers, config.hidden_size
    if not config.mechanisms:
        return 12 * layers * width**2, 12 * layers * width**2
    (options,) = config.mechanisms.values()
    attention, ffn = options["attention_pairs"], options["ffn_pairs"]
    return layers * width * (4 * attention + 2 * ffn), 2 * layers * width * (4 * attention + ffn)


def compute_tokenformer_costs() -> Computed:
    """Compare table 3's formulas with the parameters of built models and the counts of `headwater plan`."""
    rows, ratios = [], []
    interaction = []
    for name in ("gpt2-124m", *SERIES):
        config = preset(name)
        printed, complete = _write_formulas(config)
        built = count_map_parameters(config)
        flops = cost.forward_flops(config, CONTEXT, causal=False)
        formula = 2 * complete + 4 * config.num_hidden_layers * config.hidden_size * CONTEXT
        flops_per_token = flops["maps"] + flops["attention"]
        rows.append([name, f"{printed:,}", f"{complete:,}", f"{built:,}", si(float(formula)), si(flops_per_token),
                     si(flops["attention"])])  # fmt: skip
        ratios.append((built / printed, built / complete, flops_per_token / formula))
        interaction.append(flops["attention"])
    of_printed, of_complete, of_flops = np.array(ratios).T
    printed_error, complete_error, flops_error = (
        float(np.abs(row_ratios - 1).max()) for row_ratios in (of_printed[1:], of_complete, of_flops)
    )
    return Computed(
        ["", "N as printed", "N with K_P and V_P", "as built", "2·N + 4·L·D·T per token", "as counted", "token-token"],
        rows,
        [
            (
                "A TokenFormer's N is L·D·(n_q + n_k + n_v + n_o + 2·n_ff), as printed.",
                f"built models have {write_range(of_printed[1:], '{:.3f}'.format)} times as many",
                printed_error < ROUGHLY,
            ),
            (
                "N is 12·L·D² in a Transformer; in a TokenFormer 2·L·D·(n_q + n_k + n_v + n_o + n_ff).",
                f"built models differ by {complete_error:.2%} at most",
                complete_error < ROUGHLY,
            ),
            (
                "A forward pass takes 2·N + 4·L·D·T FLOPs per token of T.",
                f"counts differ by {flops_error:.2%} at most",
                flops_error < ROUGHLY,
            ),
            (
                "Token-token attention costs no more as a TokenFormer grows.",
                f"{write_range(interaction[1:], si)} FLOPs per token at {CONTEXT:,} tokens",
                max(interaction[1:]) == min(interaction[1:]),
            ),
        ],
    )


def compute_tokenformer_flops() -> Computed:
    """Compute FLOPs against length: the growth series, and Transformers of the same depth and size, which are wider."""
    grown = {name: preset(name) for name in SERIES}
    wide = {
        f"Transformer of {name.removeprefix('tokenformer-')}": make_transformer_like(config)
        for name, config in grown.items()
    }
    of_grown, of_wide = _count_flops(grown), _count_flops(wide)
    ratios = of_wide / of_grown
    # Only the grown models. The first of the series was trained from scratch.
    advantages, saved = ratios[1:], (of_wide - of_grown)[1:]
    rows = [[name, *map(si, flops)] for name, flops in zip(grown | wide, [*of_grown, *of_wide], strict=True)]
    rows += [[f"Transformer over {name}", *map("{:.2f}".format, row)] for name, row in zip(grown, ratios, strict=True)]
    savings = zip(CONTEXTS, saved[0], saved[-1], strict=True)
    return Computed(
        ["forward FLOPs per token", *(f"{length:,} tokens" for length in CONTEXTS)],
        rows,
        [
            (
                "A grown TokenFormer costs less than a Transformer of its size at every length.",
                f"a Transformer takes {write_range(advantages.ravel(), '{:.2f}'.format)} times as many",
                (advantages > 1).all(),
            ),
            (
                "The longer the text, the greater the advantage.",
                "; ".join(f"{row[0]:.2f} to {row[-1]:.2f}" for row in advantages),
                (np.diff(advantages, axis=1) > 0).all(),
            ),
            (
                "The larger the model, the more FLOPs are saved.",
                "; ".join(f"{length:,} tokens: {si(small)} to {si(large)}" for length, small, large in savings),
                (np.diff(saved, axis=0) > 0).all(),
            ),
        ],
    )


def _count_flops(configs: Mapping[str, HeadwaterConfig]) -> np.ndarray:
    """Count forward FLOPs per token: [models, contexts]."""
    return np.array(
        [
            [sum(cost.forward_flops(config, length, causal=False).values()) for length in CONTEXTS]
            for config in configs.values()
        ]
    )


def compute_kv_shifting_dynamics() -> Computed:
    """Follow the flow of theorem 3's loss in the plane of figure 2, from starting points in [0, 1]²."""
    rows, speeds, returned, arrived = [], [], [], []
    for length in theory.LENGTHS:
        axis = torch.linspace(0, 1, 41, dtype=torch.float64)
        beta1, alpha1 = torch.meshgrid(axis, axis, indexing="ij")
        loss, u, v = theory.gradient_flow(alpha1, beta1, length)
        speeds.append(float(torch.hypot(u, v).mean()))
        back, end = _follow_flow(alpha1, beta1, length)
        returned.append(back)
        arrived.append(end)
        rows.append([f"T = {length}", f"{loss.min():.3g} to {loss.max():.3g}", f"{speeds[-1]:.4f}", f"{back:.0%}",
                     f"{end:.0%}"])  # fmt: skip
    return Computed(
        ["", "loss", "mean speed", "starts that go back on the way", "starts that end as an induction head"],
        rows,
        [
            (
                "Training leads to an induction head: the key of the token before, the token's own value.",
                f"{', '.join(map('{:.0%}'.format, arrived))} of the starts",
                min(arrived) > 0.99,
            ),
            (
                "The longer the sequence, the slower it gets.",
                f"speed {', '.join(map('{:.4f}'.format, speeds))}",
                all(shorter > longer for shorter, longer in pairwise(speeds)),
            ),
            (
                "In short sequences it may go a short way back; in long ones its direction is consistent.",
                f"{', '.join(map('{:.0%}'.format, returned))} of the starts go back in α1 or β1",
                returned[0] > returned[-1],
            ),
        ],
        theory.flow_figure(),
    )


def _follow_flow(alpha1: torch.Tensor, beta1: torch.Tensor, length: int) -> tuple[float, float]:
    """Compute the shares of starts that move back somewhere (α1 rises or β1 falls), and that end at α2 > α1, β1 > β2.

    Each start is followed along its streamline for a length of 6; the flow's border is far from there.
    """
    back, step = torch.zeros_like(alpha1, dtype=torch.bool), 0.02
    for _ in range(round(6 / step)):
        _, u, v = theory.gradient_flow(alpha1, beta1, length)
        back |= (u > 0) | (v < 0)
        speed = torch.hypot(u, v)
        alpha1, beta1 = alpha1 + step * u / speed, beta1 + step * v / speed
    arrived = (alpha1 < 0.5) & (beta1 > 0.5)
    return float(back.double().mean()), float(arrived.double().mean())


COMPUTED: dict[str, Callable[[], Computed]] = {
    "tokenformer_costs": compute_tokenformer_costs,
    "tokenformer_flops": compute_tokenformer_flops,
    "kv_shifting_dynamics": compute_kv_shifting_dynamics,
    "kv_shifting_theorems": lambda: Computed(["", "result"], *theory.check_theorems()),
}
