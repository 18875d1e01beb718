"""Pattention initialized from a trained Transformer's linear layers. TokenFormer, arXiv 2410.23168, section 3.

    Pattention(x) = GELU(τ·A / ‖A‖)·V_P,   A = x·K_Pᵀ

The paper trains its parameter tokens from scratch; here they are derived from trained matrices.

**Directions only.** Dividing by ‖A‖ removes the norm of x: what can be preserved depends on what is known about ‖x‖.

**After a norm ‖x‖ is constant.** A norm's weight w goes into the maps behind it; what it gives is then n, ‖n‖² = D but
for its epsilon. A LayerNorm has mean(n) = 0 besides. Its bias becomes 1 in every channel, so that x = n + 1 has mean 1
and carries every bias: W·(w·n + b) + c = (W·diag(w)·(I - 11ᵀ/D) + (W·b + c)·1ᵀ/D)·x.

- Query, key, value: GELU(z) - GELU(-z) = z for every z, so K_P = ±I, V_P = ±Wᵀ and τ = ‖A‖ give W·x exactly, with 2·D
  pairs.
- Plain feed-forward, down(GELU(up(x))): keys are the F rows U of up, values the columns of down; D more keys E with
  EᵀE = s·I - UᵀU and zero values make ‖A‖² = s·‖x‖² constant. F + D pairs give it exactly for the erf GELU; other
  activations begin there too.

**What stays approximate.** The output map has no norm before it. A gated feed-forward is no sum of GELUs of linear
maps; behind an RMSNorm the part of a Pattention that turns its sign with x is linear but for ‖A‖, and that of
silu(gate)·up is not. Biases behind an RMSNorm find no constant. There, too, keys are chosen as above, and the values
then get what ridge least squares adds on a sample: in fp64, map after map, each with the inputs it gets once those
before it are converted. The report says how close each map and the model came.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.config.capabilities import Map
from headwater.config.text import HeadwaterConfig
from headwater.conversion.add import function_change
from headwater.cost.hardware import memory_of
from headwater.mechanisms import Pattention
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.quantization import check_full_precision
from headwater.nn.block import Block
from headwater.nn.feed_forward import FeedForward
from headwater.nn.norm import LayerNorm, RMSNorm
from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator

PROJECTIONS: dict[str, Map] = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}


@dataclass(frozen=True)
class MapReport:
    """The error of one layer: ‖y - ŷ‖ / ‖y‖ over the rows it was fitted to, and over held-out rows, in fp64.

    Both are for this layer alone: y is the old layer's output for the new one's inputs.
    """

    layer: int
    name: Map
    pairs: int
    fitted: float
    held_out: float


@dataclass(frozen=True)
class Report:
    """How close the new model is to the old one, on held-out rows and in the model's own precision.

    maps: each layer by itself. tokens: how many were fitted to.
    logits: the largest difference of two logits over the largest logit. kl: mean KL(old ‖ new), nats a token.
    loss_before, loss_after: mean loss of the old and the new model, nats a token.
    """

    maps: tuple[MapReport, ...]
    tokens: int
    logits: float
    kl: float
    loss_before: float
    loss_after: float


@torch.no_grad()
def to_parameter_tokens(
    model: HeadwaterForCausalLM,
    input_ids: Tensor,
    *,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    ridge: float = 1e-5,
) -> tuple[HeadwaterForCausalLM, Report]:
    """A new model in which Pattention replaces every linear layer of the blocks, and its errors.

    model: any without Pattention; its other mechanisms stay. It is not changed.
    input_ids: [B, T], rows of text of the kind the model is for; the last quarter (at least one) is held out. With
        fewer tokens in the others than pairs in a map, values are fitted to noise: the report's two errors then differ.
        They go through an fp64 copy of the model at once; a map takes memory for tokens × pairs numbers.
    attention_pairs: pairs of each query, key, value and output map; default twice the width of its input, which makes
        the first three exact. With fewer, the principal directions of the inputs are kept.
    ffn_pairs: pairs of each feed-forward; default F + D for a plain one (and one more for an output bias behind a
        LayerNorm), exact with the erf GELU, and 2·F + D for a gated one. With fewer, those inner channels are kept that
        matter most on the sample. More pairs get random directions, in whole bases; what is left over has zero keys,
        which change nothing and are free to learn.
    ridge: of the least squares, over the mean square of the pairs' weights.

    Returns the new model in the old one's precision, device and mode, and the `Report`. It has more parameters than the
    old one by default: an exact map D -> D takes 4·D² for D². The embedding and the head stay as they are.

    Raises `HeadwaterError` for a model that has Pattention already, and for a sample that cannot be split or fitted to.
    """
    check_full_precision(model)
    config = model.config
    _check_sample(config, input_ids, ridge)
    for option, pairs in (("attention_pairs", attention_pairs), ("ffn_pairs", ffn_pairs)):
        _check_pairs(config, option, pairs, input_ids.numel())
    rows = len(input_ids) - max(1, len(input_ids) // 4)
    sample = FitSample(rows * input_ids.shape[1], ridge, config.initializer_seed, [])
    work = copy.deepcopy(model).double().eval()
    for index, block in enumerate(module for module in work.modules() if isinstance(module, Block)):
        _prepare(block, index, sample, attention_pairs, ffn_pairs)
    work.model(input_ids.to(work.device), use_cache=False)  # each layer is converted when its input arrives
    _put_converted(work)
    new = HeadwaterForCausalLM._from_config(_with_pairs(config, sample.reports), dtype=model.dtype)
    new.load_state_dict(work.state_dict())
    new = new.to(model.device).train(model.training)
    new.generation_config = copy.deepcopy(model.generation_config)
    moved = function_change(model, new, input_ids[rows:])
    return new, Report(tuple(sample.reports), sample.tokens, **moved)


def _put_converted(model: HeadwaterForCausalLM) -> None:
    """Replace each conversion by the map that it made."""
    maps = {module: module.made for module in model.modules() if isinstance(module, Conversion)}
    for module in list(model.modules()):
        for part, child in module.named_children():
            if child in maps:
                setattr(module, part, maps[child])


def _check_sample(config: HeadwaterConfig, input_ids: Tensor, ridge: float) -> None:
    """Raise `HeadwaterError` for a model that has Pattention, a sample that cannot be split, or a wrong ridge."""
    name = Pattention.registered_name()
    if name in (config.mechanisms or {}):
        raise HeadwaterError(f"The model already has mechanism {name!r}; use one with linear layers.")
    if input_ids.ndim != 2 or len(input_ids) < 2 or input_ids.shape[1] < 2:
        raise HeadwaterError(
            f"input_ids must be at least two rows of two tokens, not {list(input_ids.shape)}; one is held out."
        )
    if not 0 < ridge < float("inf"):
        raise HeadwaterError(f"ridge must be above zero and finite, not {ridge}.")


def _check_pairs(config: HeadwaterConfig, option: str, pairs: int | None, tokens: int) -> None:
    """Raise `HeadwaterError` for fewer than two pairs, or more than the memory holds for so many tokens."""
    if pairs is None:
        return
    if pairs < 2:
        raise HeadwaterError(f"{option} must be at least 2, not {pairs}.")
    needs = pairs * (tokens + 2 * config.num_hidden_layers * config.hidden_size) * 8
    if needs > (available := memory_of(torch.device("cpu"))):
        raise HeadwaterError(
            f"{option}={pairs:,} takes {needs / 1e9:,.0f} GB with {tokens:,} tokens, and this machine has "
            f"{available / 1e9:,.0f} GB of memory; give fewer."
        )


@dataclass(frozen=True)
class FitSample:
    """What all maps are fitted with: how many tokens, the first ones, and the ridge; and what came of it."""

    tokens: int
    ridge: float
    seed: int
    reports: list[MapReport]


class Conversion(nn.Module):
    """Replaces a layer until its input arrives, and converts it then; `made` is the result.

    begin: (inputs [N, d_in]) -> keys [n, d_in] and first values [n, d_out].
    """

    made: Pattention

    def __init__(
        self, layer: int, name: Map, old: nn.Module, sample: FitSample, begin: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self.layer, self.name, self.old, self.sample, self.begin = layer, name, old, sample, begin

    def forward(self, x: Tensor) -> Tensor:
        inputs, wanted = x.flatten(0, -2), self.old(x).flatten(0, -2)
        tokens = self.sample.tokens
        keys, values = self.begin(inputs[:tokens])
        tau = (inputs[:tokens] @ keys.T).norm(dim=-1).mean().item()
        made = Pattention(inputs.shape[1], wanted.shape[1], len(keys), tau=tau).to(x)
        made.key.copy_(keys)
        made.value.copy_(values)
        made.scale.tau.fill_(tau)

        # What the pairs weigh: their outputs where every value is a unit vector.
        weights = nn.functional.gelu(tau * nn.functional.normalize(inputs[:tokens] @ keys.T, dim=-1))
        square = weights.T @ weights
        square.diagonal().add_(self.sample.ridge * square.diagonal().mean())
        missing = weights.T @ (wanted[:tokens] - weights @ values)
        made.value.add_(torch.cholesky_solve(missing, torch.linalg.cholesky(square)))

        y = made(inputs)
        errors = [
            ((y[part] - wanted[part]).norm() / wanted[part].norm().clamp_min(1e-300)).item()
            for part in (slice(tokens), slice(tokens, None))
        ]
        self.sample.reports.append(MapReport(self.layer, self.name, len(keys), *errors))
        self.made = made
        return y.view(*x.shape[:-1], -1)


def _prepare(block: Block, index: int, sample: FitSample, attention_pairs: int | None, ffn_pairs: int | None) -> None:
    """Fold the norms' weights and biases into the layers after them, and replace these by `Conversion`s."""
    attention, feed_forward = block.self_attn, block.mlp
    config = attention.config
    projections = {part: getattr(attention, part) for part in PROJECTIONS if getattr(attention, part) is not None}
    linear = all(isinstance(projection, nn.Linear) for projection in projections.values())
    if not linear or not isinstance(feed_forward, FeedForward):
        raise HeadwaterError("A mechanism of the model already replaces its linear layers; use a model that has them.")

    constant = _has_constant(config)
    behind = [projection for part, projection in projections.items() if part != "o_proj"]
    _fold(block.input_layernorm, behind, constant)
    gate = [] if feed_forward.gate_proj is None else [feed_forward.gate_proj]
    _fold(block.post_attention_layernorm, [*gate, feed_forward.up_proj], constant)
    if constant:
        for norm in (attention.q_norm, attention.k_norm):
            if isinstance(norm, LayerNorm) and norm.bias is None:
                norm.bias = nn.Parameter(behind[0].weight.new_zeros(norm.size))

    def begin_linear(old: nn.Linear, draw: torch.Generator) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return lambda inputs: _linear(old.weight, inputs, attention_pairs, draw)

    for part, projection in projections.items():
        draw = generator(sample.seed, f"layers.{index}.self_attn.{part}")
        conversion = Conversion(index, PROJECTIONS[part], projection, sample, begin_linear(projection, draw))
        setattr(attention, part, conversion)
    draw = generator(sample.seed, f"layers.{index}.mlp")
    block.mlp = Conversion(
        index,
        "feed_forward",
        feed_forward,
        sample,
        lambda inputs: _feed_forward(feed_forward, inputs, ffn_pairs, constant, draw),
    )


def _has_constant(config: HeadwaterConfig) -> bool:
    """Whether the norms of the blocks are to give a constant beside what they norm, because there are biases."""
    return config.norm == "layer_norm" and (config.norm_bias or config.qkv_bias or config.mlp_bias)


def _fold(norm: Any, maps: list[nn.Linear], constant: bool) -> None:
    """Set the norm's weight to 1 and bias to 0 (1 with `constant`), and fold the rest into the layers after it."""
    weight = norm.factor() if isinstance(norm, RMSNorm) else norm.weight
    bias = getattr(norm, "bias", None)
    for linear in maps:
        offset = linear.bias if bias is None else linear.weight @ bias + (0 if linear.bias is None else linear.bias)
        folded = linear.weight if weight is None else linear.weight * weight
        if constant:
            folded = folded - folded.mean(1, keepdim=True)
            folded = folded if offset is None else folded + offset[:, None] / folded.shape[1]
            offset = None
        linear.weight = nn.Parameter(folded)
        linear.register_parameter("bias", None if offset is None else nn.Parameter(offset))
    if weight is not None:
        norm.weight = nn.Parameter(torch.full_like(norm.weight, float(not getattr(norm, "offset", False))))
    if constant:
        norm.bias = nn.Parameter(maps[0].weight.new_ones(norm.size))


def _linear(weight: Tensor, inputs: Tensor, pairs: int | None, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values of a linear map [d_out, d_in]: GELU(z) - GELU(-z) = z along each direction of a basis."""
    width = weight.shape[1]
    pairs = 2 * width if pairs is None else pairs
    basis = torch.eye(width, dtype=weight.dtype, device=weight.device)
    if pairs < 2 * width:
        basis = torch.linalg.eigh(inputs.T @ inputs).eigenvectors.T.flip(0)[: pairs // 2]
    values = basis @ weight.T
    return _filled(torch.cat((basis, -basis)), torch.cat((values, -values)), pairs, draw)


def _feed_forward(
    old: FeedForward, inputs: Tensor, pairs: int | None, constant: bool, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Keys and values of a feed-forward: its own rows, as many as there is room for, and what makes ‖A‖ constant."""
    up, gate, down = old.up_proj.weight, old.gate_proj, old.down_proj
    inner, width = up.shape
    each = 1 if gate is None else 2
    offset = down.bias if constant else None
    natural = each * inner + width + (offset is not None)
    pairs = natural if pairs is None else pairs
    room = pairs - (offset is not None)
    chosen = torch.arange(inner, device=up.device)
    if pairs < natural:
        # What each inner channel writes, on average over the sample.
        written = old.act(old.up_proj(inputs)) if gate is None else old.act(gate(inputs)) * old.up_proj(inputs)
        matters = written.square().mean(0) * down.weight.square().sum(0)
        kept = (room - width if room >= 2 * width else room) // each
        chosen = matters.argsort(descending=True)[:kept]
    keys = up[chosen] if gate is None else torch.cat((gate.weight[chosen], up[chosen]))
    values = down.weight.T[chosen] if gate is None else torch.zeros_like(keys[:, :1]).expand(-1, len(down.weight))
    if offset is not None:  # mean(x) is 1
        one = torch.ones((), dtype=up.dtype, device=up.device)
        keys = torch.cat((keys, (one / width).expand(1, width)))
        values = torch.cat((values, offset[None] / nn.functional.gelu(one)))
    if len(keys) + width <= pairs:
        eigenvalues, basis = torch.linalg.eigh(keys.T @ keys)
        rest = (eigenvalues[-1] - eigenvalues).clamp_min(0).sqrt()
        keys = torch.cat((keys, basis * rest @ basis.T))
        values = torch.cat((values, values.new_zeros(width, values.shape[1])))
    return _filled(keys, values, pairs, draw)


def _filled(keys: Tensor, values: Tensor, pairs: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Up to `pairs` of them: random bases, whose part of ‖A‖² is ‖x‖² again, then zero keys with values as at a start.

    A zero value beside a zero key would get no gradient, and neither would the key.
    """
    width, d_out = keys.shape[1], values.shape[1]
    scale = keys.square().sum(1).mean().sqrt()
    while pairs - len(keys) >= 2 * width:
        basis = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=draw)).Q.to(keys) * scale
        keys, values = torch.cat((keys, basis, -basis)), torch.cat((values, values.new_zeros(2 * width, d_out)))
    left = pairs - len(keys)
    start = 2 / d_out**0.5 * torch.randn(left, d_out, dtype=torch.float64, generator=draw).to(values)
    return torch.cat((keys, keys.new_zeros(left, width))), torch.cat((values, start))


def _with_pairs(config: HeadwaterConfig, reports: list[MapReport]) -> HeadwaterConfig:
    """The old config with Pattention for linear layers, and with biases where `_fold` has put them."""
    pairs = {report.name: report.pairs for report in reports}
    options: dict[str, Any] = {"ffn_pairs": pairs.pop("feed_forward")}
    options |= {f"{name}_pairs": count for name, count in pairs.items()}
    new = copy.deepcopy(config)
    new.norm_bias = config.norm_bias or _has_constant(config)
    new.qkv_bias = new.output_bias = new.mlp_bias = False
    new.mechanisms = (config.mechanisms or {}) | {Pattention.registered_name(): options}
    return new
