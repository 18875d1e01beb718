"""Reference implementations, written from the equations with loops over rows, heads and positions.

Nothing here is fast, caches anything, or calls headwater. A vector is a 1-d tensor; `heads` is a list over heads of
lists over positions of vectors. A whole model is run on one document at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Heads = list[list[Tensor]]


# Mechanisms


def kv_shift(x: Tensor, weight: Tensor, starts: set[tuple[int, int]] = frozenset()) -> Tensor:
    """y_t = w_0·x_t + w_1·x_{t-1}. x: [B, K, T, d], weight: [2, K]; `starts`: (row, slot) of each document's start."""
    rows = [
        unheads(shift_heads(heads(row), weight, {slot for owner, slot in starts if owner == b}))
        for b, row in enumerate(x)
    ]
    return torch.stack(rows)


def shift_heads(x: Heads, weight: Tensor, starts: set[int]) -> Heads:
    """The same for one row."""
    y: Heads = []
    for h, row in enumerate(x):
        y.append([])
        for t, current in enumerate(row):
            mixed = weight[0, h] * current
            if t > 0 and t not in starts:
                mixed = mixed + weight[1, h] * row[t - 1]
            y[h].append(mixed)
    return y


def value_residual(first: Heads, own: Heads, weights: Any) -> Heads:
    """V' = λ1·V_0 + λ2·V."""
    return [
        [weights[0] * a + weights[1] * b for a, b in zip(*rows, strict=True)] for rows in zip(first, own, strict=True)
    ]


def heads(x: Tensor) -> Heads:
    """[K, T, d] -> K lists of T vectors."""
    return [list(row) for row in x]


def unheads(x: Heads) -> Tensor:
    return torch.stack([torch.stack(row) if row else torch.zeros(0) for row in x])


# Parts


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (sum(value**2 for value in x) / len(x) + eps).sqrt() * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean()
    normed = centred / ((centred**2).mean() + eps).sqrt() * weight
    return normed if bias is None else normed + bias


def rope(x: Tensor, position: int, theta: float, turned: int) -> Tensor:
    """Turn channel i against channel i + turned/2 by position·theta^(-2i/turned)."""
    half = turned // 2
    y = list(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / turned)
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.stack(y)


def attention(q: Heads, k: Heads, v: Heads, real: list[bool], window: int | None = None) -> Heads:
    """softmax(q·k / √d)·v over the real slots up to the query's own, the last `window` of them counted in slots."""
    out: Heads = []
    for h, queries in enumerate(q):
        source = h // (len(q) // len(k))
        out.append([])
        for t, query in enumerate(queries):
            first = 0 if window is None else max(0, t - window + 1)
            seen = [j for j in range(first, t + 1) if real[j]]
            if not seen:
                out[h].append(torch.zeros_like(query))
                continue
            scores = torch.stack([query @ k[source][j] for j in seen]) / math.sqrt(len(query))
            weights = (scores - scores.max()).exp()
            weights = weights / weights.sum()
            out[h].append(sum(weight * v[source][j] for weight, j in zip(weights, seen, strict=True)))
    return out


ACTIVATIONS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu_new": lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
}


# The whole model


class Reference:
    """The model with the given config and weights (by their names in the state dict), on one row at a time."""

    def __init__(self, config: Any, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = weights

    def __call__(self, ids: Tensor, real: list[bool] | None = None) -> Tensor:
        """Logits [T, V] of one document, ids [T]. Slots that are not `real` hold padding that nobody may see."""
        c = self.config
        real = [True] * len(ids) if real is None else real
        position = [max(0, sum(real[: t + 1]) - 1) for t in range(len(ids))]
        x = [self.weights["model.embed_tokens.weight"][token] for token in ids]
        if c.position == "learned":
            x = [a + self.weights["model.embed_positions.weight"][p] for a, p in zip(x, position, strict=True)]

        first_values: Heads | None = None
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}"
            normed = [self.norm(f"{name}.input_layernorm", a) for a in x]
            q, k, v = (self.project(f"{name}.self_attn", part, normed) for part in "qkv")
            first_values = v if first_values is None else first_values
            for mechanism in c.mechanisms:
                k, v = self.mechanism(mechanism, layer, k, v, first_values, real)
            if c.position == "rope":
                theta, turned = c.rope_parameters["rope_theta"], self.turned()
                q, k = (
                    [[rope(a, p, theta, turned) for a, p in zip(row, position, strict=True)] for row in s]
                    for s in (q, k)
                )
            mixed = attention(q, k, v, real, c.sliding_window)
            attended = [
                self.linear(f"{name}.self_attn.o_proj", torch.cat([head[t] for head in mixed])) for t in range(len(ids))
            ]
            if c.parallel_residual:
                x = [a + b + self.feed_forward(name, a) for a, b in zip(x, attended, strict=True)]
            else:
                x = [a + b for a, b in zip(x, attended, strict=True)]
                x = [a + self.feed_forward(name, a) for a in x]

        head = self.weights["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
        return torch.stack([head @ self.norm("model.norm", a) for a in x])

    def turned(self) -> int:
        return int(self.config.head_dim * self.config.rope_parameters.get("partial_rotary_factor", 1.0))

    def mechanism(
        self, name: str, layer: int, k: Heads, v: Heads, first: Heads, real: list[bool]
    ) -> tuple[Heads, Heads]:
        """Keys and values after the mechanism `name`."""
        parameters = f"model.layers.{layer}.self_attn.mechanisms.{name}"
        options = self.config.mechanisms[name]
        if name == "kv_shift":
            starts = {t for t in range(1, len(real)) if not real[t - 1]}
            k = shift_heads(k, self.weights[f"{parameters}.alpha"], starts)
            v = shift_heads(v, self.weights[f"{parameters}.beta"], starts)
        elif name == "value_residual":
            if layer > 0:
                lambdas = {"identity": lambda: (0.5, 0.5), "learnable": lambda: self.weights[f"{parameters}.lambdas"]}
                v = value_residual(first, v, lambdas[options["mode"]]())
        else:
            raise NotImplementedError(f"tests/naive.py has no reference for {name!r}; write one.")
        return k, v

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.weights[f"{name}.weight"] @ x
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.config.norm == "rms_norm":
            return rms_norm(x, weight, self.config.norm_eps)
        return layer_norm(x, weight, self.weights.get(f"{name}.bias"), self.config.norm_eps)

    def project(self, attention: str, part: str, x: list[Tensor]) -> Heads:
        """Queries, keys or values, per head and position."""
        width = self.config.head_dim
        per_position = [self.linear(f"{attention}.{part}_proj", a).split(width) for a in x]
        if self.config.qk_norm and part in "qk":
            per_position = [[self.norm(f"{attention}.{part}_norm", head) for head in row] for row in per_position]
        return [list(row) for row in zip(*per_position, strict=True)]

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.config.hidden_act]
        x = self.norm(f"{name}.post_attention_layernorm", x)
        inner = self.linear(f"{name}.mlp.up_proj", x)
        if self.config.feed_forward == "gated":
            inner = act(self.linear(f"{name}.mlp.gate_proj", x)) * inner
        else:
            inner = act(inner)
        return self.linear(f"{name}.mlp.down_proj", inner)


def reference(model: Any, differentiable: bool = False) -> Reference:
    """The reference with `model`'s weights; `differentiable` gives the model's own parameters to autograd."""
    return Reference(model.config, dict(model.state_dict(keep_vars=differentiable)))
