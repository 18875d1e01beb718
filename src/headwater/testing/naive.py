"""Reference implementations, written from the equations with loops over rows, heads and positions.

Nothing here is fast, caches anything, or calls headwater. A vector is a 1-d tensor; `heads` is a list over heads of
lists over positions of vectors. A whole model is run on one document at a time. A mechanism from outside is a subclass
of `Reference` that adds to `knows` and says at its stage what its equation says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

HeadRows = list[list[Tensor]]

# The square of a length that is taken for zero.
ZERO = 1e-24
# What pattention's options call the places of linear layers.
PLACES = dict(q_proj="query", k_proj="key", v_proj="value", o_proj="output", mlp="feed_forward")


# Mechanisms


def kv_shift(x: Tensor, weight: Tensor, starts: AbstractSet[tuple[int, int]] = frozenset()) -> Tensor:
    """y_t = Σ_s w_s·x_{t-s}. x: [B, K, T, d], weight: [window, K]; `starts`: (row, slot) of each document's start."""
    rows = [
        unheads(shift_heads(heads(row), weight, {slot for owner, slot in starts if owner == b}))
        for b, row in enumerate(x)
    ]
    return torch.stack(rows)


def shift_heads(x: HeadRows, weight: Tensor, starts: set[int]) -> HeadRows:
    """The same for one row."""
    y: HeadRows = []
    for h, row in enumerate(x):
        y.append([])
        for t, current in enumerate(row):
            mixed = weight[0, h] * current
            for back in range(1, len(weight)):
                # Nothing from before the row, nor from before a document's start on the way back.
                if t - back < 0 or any(t - step in starts for step in range(back)):
                    break
                mixed = mixed + weight[back, h] * row[t - back]
            y[h].append(mixed)
    return y


def weighted(vectors: list[HeadRows], weights: Any) -> HeadRows:
    """Σ_i weights[i]·vectors[i], vector by vector."""
    return [
        [
            sum(weight * vector for weight, vector in zip(weights, place, strict=True))
            for place in zip(*rows, strict=True)
        ]
        for rows in zip(*vectors, strict=True)
    ]


def value_residual(first: HeadRows, own: HeadRows, weights: Any) -> HeadRows:
    """V' = λ1·V_0 + λ2·V."""
    return weighted([first, own], weights)


def pattention(
    x: Tensor,
    key: Tensor,
    value: Tensor,
    tau: Any,
    score: str = "l2_norm_gelu",
    form: str = "erf",
    top_k: int | None = None,
    product_heads: int = 0,
) -> Tensor:
    """Θ(x·K_Pᵀ)·V_P of one vector; of the `top_k` pairs with the largest scores; of each head's product keys, added."""
    if product_heads:
        sides = key.unflatten(0, (product_heads, 2, -1))
        sums = [torch.stack([one + other for one in first for other in second]) for first, second in sides]
        return sum((pattention(x, each, value, tau, score, form, top_k) for each in sums), torch.zeros_like(value[0]))
    scores = key @ x
    if top_k is not None:
        numbers = scores.tolist()
        chosen = sorted(range(len(key)), key=lambda i: (-numbers[i], i))[:top_k]
        scores, value = scores[chosen], value[chosen]

    def gelu(a: Tensor) -> Tensor:
        return ACTIVATIONS["gelu_new" if form == "tanh" else "gelu"](a)

    def l2(a: Tensor) -> Tensor:
        square = (a**2).sum()
        return tau * a / square.sqrt() if square > ZERO else 0 * a

    def l1(a: Tensor) -> Tensor:
        return tau * a / a.abs().sum()

    weights = {
        "l2_norm_gelu": lambda: gelu(l2(scores)),
        "gelu_l2_norm": lambda: l2(gelu(scores)),
        "l1_norm_gelu": lambda: gelu(l1(scores)),
        "gelu_l1_norm": lambda: l1(gelu(scores)),
        "exp_l1_norm": lambda: l1(scores.exp()),
        "softmax": lambda: (scores / math.sqrt(len(x))).exp() / (scores / math.sqrt(len(x))).exp().sum(),
    }[score]()
    return weights @ value


def heads(x: Tensor) -> HeadRows:
    """[K, T, d] -> K lists of T vectors."""
    return [list(row) for row in x]


def unheads(x: HeadRows) -> Tensor:
    return torch.stack([torch.stack(row) if row else torch.zeros(0) for row in x])


# Parts


def rms_norm(x: Tensor, weight: Any, eps: float) -> Tensor:
    return x / ((x**2).sum() / len(x) + eps).sqrt() * weight


def layer_norm(x: Tensor, weight: Any, bias: Tensor | None, eps: float) -> Tensor:
    centered = x - x.mean()
    normed = centered / ((centered**2).mean() + eps).sqrt() * weight
    return normed if bias is None else normed + bias


def rope(x: Tensor, position: int, theta: float, turned: int) -> Tensor:
    """Turn channel i against channel i + turned/2 by position·theta^(-2i/turned)."""
    half = turned // 2
    angles = [position * theta ** (-2 * i / turned) for i in range(half)]
    cos, sin = (x.new_tensor([f(angle) for angle in angles]) for f in (math.cos, math.sin))
    first, second = x[:half], x[half:turned]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[turned:]))


def alibi_slope(head: int, heads: int) -> float:
    """arXiv 2108.12409: 2^(-8/n), 2^(-16/n), …; for n no power of two, the rest from every other slope of 2n's."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if head < power:
        return 2 ** (-8 * (head + 1) / power)
    return 2 ** (-8 * (2 * (head - power) + 1) / (2 * power))


def attention_weights(
    query: Tensor,
    keys: list[Tensor],
    t: int,
    seen: list[int],
    position: list[int],
    slope: float,
    pairs: Sequence[Tensor] = (),
) -> dict[int, Tensor]:
    """softmax(q·k / √d - slope·distance) over the slots that slot t has `seen`.

    pairs: keys that are no tokens', which have no distance; they are -1, -2, … in the result.
    """
    if not seen:
        return {}
    of_tokens = [query @ keys[j] / math.sqrt(len(query)) - slope * (position[t] - position[j]) for j in seen]
    scores = torch.stack(of_tokens + [query @ key / math.sqrt(len(query)) for key in pairs])
    weights = (scores - scores.max()).exp()
    return dict(zip([*seen, *(-1 - i for i in range(len(pairs)))], weights / weights.sum(), strict=True))


ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu_new": lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
}


# Where keys and values come from


def attended(config: Any, layer: int, head: int) -> tuple[int, int]:
    """The layers whose keys and whose values key/value head `head` of layer `layer` attends to."""
    depth = config.num_hidden_layers
    table = [(i, i) for i in range(depth)]  # by layer, as each mechanism leaves it
    for name, options in config.mechanisms.items():
        if name == "skip_layer":
            table = skipped(config, options, head, table)
        if name == "svformer":
            source, layers, what = options["source"], options["layers"], options["share"]
            receivers = range(source + 1, depth) if layers is None else layers
            for i in receivers:
                k, v = table[i]
                table[i] = (source if what in ("keys", "both") else k, source if what in ("values", "both") else v)
        if name == "kv_source":
            sources = [layer_map(options, options[part], depth) for part in ("keys", "values")]
            for i, (k, v) in enumerate(zip(*sources, strict=True)):
                table[i] = (table[i][0] if k == i else k, table[i][1] if v == i else v)
    return table[layer]


def skipped(config: Any, options: dict[str, Any], head: int, table: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`table` with the layers that a skip head takes what an earlier one attends to."""
    depth, groups = config.num_hidden_layers, config.num_attention_heads // config.num_key_value_heads
    distances = options["layers"] if options["layers"] is not None else 3 * depth // 4
    distances = distances if isinstance(distances, list) else [distances]
    skipping = (3 * config.num_attention_heads // 4 if options["heads"] is None else options["heads"]) // groups
    place = head - (config.num_key_value_heads - skipping)
    if place < 0:
        return table
    distance = distances[place * len(distances) // skipping]
    new = list(table)
    for i in range(distance, depth) if distance else ():
        new[i] = (new if options["source"] == "alias" else table)[i - distance]
    return new


def layer_map(options: dict[str, Any], given: Any, depth: int) -> list[int]:
    """The source of each layer in a map of layers."""
    if isinstance(given, list):
        return given
    last = depth // 2 if options["last"] is None else options["last"]
    return [
        {
            "cross_layer": i // options["every"] * options["every"],
            "yoco": depth // 2 if i > depth // 2 else i,
            "last": depth - last - 1 if i >= depth - last else i,
            "own": i,
        }[given]
        for i in range(depth)
    ]


def stored(config: Any, layer: int, part: int) -> list[int]:
    """The heads whose keys (part 0) or values (part 1) of `layer` somebody attends to."""
    every = range(config.num_key_value_heads)
    return [h for h in every if any(attended(config, i, h)[part] == layer for i in range(config.num_hidden_layers))]


# The whole model


class Reference:
    """The model with the given config and weights (by their names in the state dict), on one row at a time.

    knows: the mechanisms it has the equations of, by their names in the config; raises `NotImplementedError` for
        others. A subclass for one more adds its name, and overrides the stage at which it acts: `outer`, `enter`,
        `projected`, `local`, `beside`, `heads`, `leave`, `linear` or `attended`. What there is to read: `config`,
        `weights`, the row's tokens `ids`, their `position`, which are `real`; `inputs` of attention by layer and
        position; `raw` q, k, v by layer, part, head and position; `stream`, what blocks gave.
    """

    knows: tuple[str, ...] = (
        "pattention",
        "kv_shift",
        "short_conv",
        "value_residual",
        "value_embedding",
        "svformer",
        "kv_source",
        "skip_layer",
        "persistent_memory",
        "neutreno",
        "exclusive",
        "output_gate",
        "dense_former",
        "embedding_residual",
    )

    def __init__(self, config: Any, weights: dict[str, Tensor]) -> None:
        if unknown := set(config.mechanisms) - set(self.knows):
            raise NotImplementedError(f"There is no naive reference for {', '.join(sorted(unknown))}; write one.")
        self.config = config
        self.weights = weights

    def of(self, name: str, layer: int, parameter: str, block: bool = False) -> Tensor:
        """A parameter of a mechanism in a layer; block: of one that acts at the block, not inside attention."""
        place = "" if block else ".self_attn"
        own = name.replace(".", "_").replace(":", "_")
        return self.weights[f"model.layers.{layer}{place}.mechanisms.{own}.{parameter}"]

    def __call__(
        self, ids: Tensor, real: list[bool] | None = None, starts: frozenset[int] | set[int] = frozenset()
    ) -> Tensor:
        """Logits [T, V] of one row, ids [T]. Slots that are not `real` hold padding that nobody may see.

        starts: slots at which a document starts that attention may look beyond, and a shift may not.
        """
        c = self.config
        self.ids = ids
        self.starts = starts
        slots = range(len(ids))
        self.real = [True] * len(ids) if real is None else real
        self.position = [max(0, sum(self.real[: t + 1]) - 1) for t in slots]
        x = [self.weights["model.embed_tokens.weight"][token] for token in ids]
        if c.position == "learned":
            x = [a + self.weights["model.embed_positions.weight"][p] for a, p in zip(x, self.position, strict=True)]
        x = self.blocks(x)
        head = self.weights["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
        return torch.stack([head @ self.norm("model.norm", a) for a in x])

    def blocks(self, x: list[Tensor]) -> list[Tensor]:
        """The stream by position, after all blocks."""
        c = self.config
        # By layer: attention's input; q, k, v as projected; v after mechanisms; what is attended to; weights; stream.
        self.raw: list[dict[str, Any]] = []
        self.inputs: list[list[Tensor]] = []
        self.final_v: list[dict[int, list[Tensor]]] = []
        self.bank: list[tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]] = []
        self.probabilities: list[list[list[dict[int, Tensor]]]] = []
        self.stream = [x]
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}"
            x = self.around("arrive", layer, x)
            entered = x
            for mechanism in c.mechanisms:
                entered = self.enter(mechanism, layer, entered)
            entered = [self.norm(f"{name}.input_layernorm", a) for a in entered]
            attended_to = self.attention(layer, self.around("attention_input", layer, entered))
            attended_to = self.around("attention_output", layer, attended_to)
            residual = x if c.first_residual or layer > 0 else [torch.zeros_like(a) for a in x]
            before = x
            x = [a + b for a, b in zip(residual, attended_to, strict=True)]
            inner = [self.norm(f"{name}.post_attention_layernorm", a) for a in (before if c.parallel_residual else x)]
            inner = [self.feed_forward(layer, a) for a in self.around("feed_forward_input", layer, inner)]
            x = [a + b for a, b in zip(x, self.around("feed_forward_output", layer, inner), strict=True)]
            self.stream.append(x)
            for mechanism in c.mechanisms:
                x = self.leave(mechanism, layer, x)
        return x

    def attention(self, layer: int, x: list[Tensor]) -> list[Tensor]:
        c, name = self.config, f"model.layers.{layer}.self_attn"
        k_heads, v_heads = self.stored(layer, 0), self.stored(layer, 1)
        self.inputs.append(x)
        q = self.project(name, "q", x, range(c.num_attention_heads))
        k, v = self.project(name, "k", x, k_heads), self.project(name, "v", x, v_heads)
        for mechanism in c.mechanisms:
            q, k, v = self.projected(mechanism, layer, q, k, v)
        if c.qk_norm:
            q, k = (self.normed(f"{name}.{part}_norm", heads) for part, heads in (("q", q), ("k", k)))
        self.raw.append({"q": q, "k": k, "v": v})
        for mechanism in c.mechanisms:
            q, k, v = self.local(mechanism, layer, q, k, v)
        self.final_v.append(v)
        if c.position == "rope":
            q, k = ({h: [self.rope(a, p) for a, p in zip(s[h], self.position, strict=True)] for h in s} for s in (q, k))
        self.bank.append((k, v))

        groups = c.num_attention_heads // c.num_key_value_heads
        sources = [self.attended(layer, h // groups) for h in q]
        pairs = [pair for mechanism in c.mechanisms for pair in self.beside(mechanism, layer)]
        weights = [
            [
                attention_weights(
                    q[h][t],
                    self.bank[sources[h][0]][0][h // groups],
                    t,
                    self.seen(t),
                    self.position,
                    alibi_slope(h, c.num_attention_heads) if c.position == "alibi" else 0.0,
                    [key[h // groups] for key, _ in pairs],
                )
                for t in range(len(x))
            ]
            for h in q
        ]
        self.probabilities.append(weights)
        options = c.mechanisms.get("value_residual", {})
        if options.get("of") == "probabilities" and layer in self.receivers(options):
            first, own = self.two_weights(layer, options)
            source = self.probabilities[options["source"]]
            weights = [
                [
                    {j: first * source[h][t][j] + own * w if j >= 0 else w for j, w in row[t].items()}
                    for t in range(len(x))
                ]
                for h, row in enumerate(weights)
            ]
        read = []
        for h, (_, from_layer) in enumerate(sources):
            values = self.bank[from_layer][1][h // groups]
            zero = torch.zeros_like(values[0])
            more = [value[h // groups] for _, value in pairs]
            read.append(
                [sum((w * (values[j] if j >= 0 else more[-1 - j]) for j, w in row.items()), zero) for row in weights[h]]
            )
        for mechanism in c.mechanisms:
            read = self.heads(mechanism, layer, read)
        return [self.linear(f"{name}.o_proj", torch.cat([head[t] for head in read])) for t in range(len(x))]

    # Mechanisms

    def begins(self) -> set[int]:
        """The slots before which no mechanism may look: the first, and where a document or real tokens start."""
        return {0} | {t for t in range(1, len(self.real)) if not self.real[t - 1]} | set(self.starts)

    def seen(self, t: int) -> list[int]:
        """The slots that slot t attends to: the real ones up to it, of which a window counts slots."""
        window = self.config.sliding_window
        first = 0 if window is None else max(0, t - window + 1)
        return [j for j in range(first, t + 1) if self.real[j]]

    def attended(self, layer: int, head: int) -> tuple[int, int]:
        """The layers whose keys and whose values key/value head `head` of layer `layer` attends to."""
        return attended(self.config, layer, head)

    def stored(self, layer: int, part: int) -> list[int]:
        """The heads whose keys (part 0) or values (part 1) of `layer` somebody attends to."""
        every, layers = range(self.config.num_key_value_heads), range(self.config.num_hidden_layers)
        return [h for h in every if any(self.attended(i, h)[part] == layer for i in layers)]

    def enter(self, name: str, layer: int, x: list[Tensor]) -> list[Tensor]:
        """What goes into a block's attention, by position."""
        return self.hidden_residual(layer, x) if name == "value_residual" else x

    def beside(self, name: str, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values beside the tokens', each by key/value head: [K, d]."""
        options = self.config.mechanisms[name]
        if name != "persistent_memory" or not self.acts(options, layer):
            return []
        key, value = self.of(name, layer, "key"), self.of(name, layer, "value")
        count, width = key.shape[1:]
        return [(math.sqrt(width) * key[:, i], math.sqrt(count) * value[:, i]) for i in range(count)]

    def around(self, stage: str, layer: int, x: list[Tensor]) -> list[Tensor]:
        """`outer` of all mechanisms."""
        for mechanism in self.config.mechanisms:
            x = self.outer(stage, mechanism, layer, x)
        return x

    def outer(self, stage: str, name: str, layer: int, x: list[Tensor]) -> list[Tensor]:
        """The stages around attention and feed-forward but for `enter` and `leave`, by position."""
        options = self.config.mechanisms[name]
        if name == "embedding_residual" and stage == "arrive" and self.acts(options, layer):
            mu, lambda_ = self.of(name, layer, "lambdas", block=True)
            return [lambda_ * a + mu * first for a, first in zip(x, self.stream[0], strict=True)]
        if name == "short_conv":
            taps = self.weights.get(f"model.layers.{layer}.mechanisms.{name}.{stage}_taps")
            if taps is not None:
                pieces = [list(row) for row in zip(*(a.split(taps.shape[2]) for a in x), strict=True)]
                rows = self.short_conv(f"model.layers.{layer}.mechanisms.{name}.{stage}_taps", pieces)
                return [torch.cat(row) for row in zip(*rows, strict=True)]
        return x

    def acts(self, options: dict[str, Any], layer: int) -> bool:
        """Whether the option `layers` names a layer; by default it names all."""
        return options["layers"] is None or layer in options["layers"]

    def leave(self, name: str, layer: int, x: list[Tensor]) -> list[Tensor]:
        """What the next block is given, by position."""
        return self.dense_former(layer, x) if name == "dense_former" else x

    def heads(self, name: str, layer: int, read: list[list[Tensor]]) -> list[list[Tensor]]:
        """What each query head has read, by head and position."""
        if name == "exclusive":
            return self.exclusive(layer, read)
        if name == "output_gate":
            return self.output_gate(layer, read)
        if name != "neutreno" or layer == 0:
            return read
        learned = self.weights.get(f"model.layers.{layer}.self_attn.mechanisms.neutreno.lambdas")
        factor = self.config.mechanisms["neutreno"]["weight"] if learned is None else learned[0]
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        added = []
        for h, row in enumerate(read):
            from_layer = self.attended(layer, h // groups)[1]
            first, own = self.raw[0]["v"][h // groups], self.raw[from_layer]["v"][h // groups]
            added.append([a + factor * (b - d) for a, b, d in zip(row, first, own, strict=True)])
        return added

    def exclusive(self, layer: int, read: list[list[Tensor]]) -> list[list[Tensor]]:
        if not self.acts(self.config.mechanisms["exclusive"], layer):
            return read
        learned = self.weights.get(f"model.layers.{layer}.self_attn.mechanisms.exclusive.alpha")
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        left = []
        for h, row in enumerate(read):
            values = self.final_v[self.attended(layer, h // groups)[1]][h // groups]
            strength = 1.0 if learned is None else learned[h].tanh()
            left.append(
                [y - strength * (y @ v) / (v @ v) * v if v @ v > ZERO else y for y, v in zip(row, values, strict=True)]
            )
        return left

    def output_gate(self, layer: int, read: list[list[Tensor]]) -> list[list[Tensor]]:
        options = self.config.mechanisms["output_gate"]
        if not self.acts(options, layer):
            return read
        weight = self.weights[f"model.layers.{layer}.self_attn.mechanisms.output_gate.gate.weight"]
        opened = []
        for x in self.inputs[layer]:
            gates = options["scale"] / (1 + (-(weight @ x[: weight.shape[1]])).exp())
            opened.append(gates.unflatten(0, (len(read), -1)))
        return [[gate[h] * y for gate, y in zip(opened, row, strict=True)] for h, row in enumerate(read)]

    def receivers(self, options: dict[str, Any]) -> list[int]:
        """The layers of a value residual that have something of their own to mix into."""
        depth, part = self.config.num_hidden_layers, {"keys": 0, "values": 1}.get(options["of"])
        layers = range(options["source"] + 1, depth) if options["layers"] is None else options["layers"]
        layers = [layer for layer in layers if part is None or self.stored(layer, part)]
        if options["mode"] == "sparse" and options["layers"] is None:
            return layers[-max(1, 3 * depth // 8) :]
        return layers

    def two_weights(self, layer: int, options: dict[str, Any]) -> tuple[Any, Any]:
        """λ1 and λ2 of a value residual from one source."""
        mode, site = options["mode"], ".self_attn" if options["of"] != "hidden" else ""
        own = f"model.layers.{layer}{site}.mechanisms.value_residual.lambdas"
        if mode == "identity":
            return 0.5, 0.5
        if mode in ("constant", "sparse"):
            given = options["weight"]
            return ({"constant": 2.0, "sparse": 5.0}[mode] if given is None else given), 1.0
        if mode == "learnable":
            return tuple(self.weights[own])
        logits = self.weights["model.mechanisms.value_residual.logits"].exp()
        share = logits[self.receivers(options).index(layer)] / logits.sum()
        return self.weights["model.mechanisms.value_residual.scale"][0] * share, self.weights[own][0]

    def projected(self, name: str, layer: int, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values, each by head, before their norms."""
        if name != "short_conv":
            return q, k, v

        def convolved(heads: dict[int, list[Tensor]], place: str) -> dict[int, list[Tensor]]:
            rows = self.short_conv(
                f"model.layers.{layer}.self_attn.mechanisms.{name}.{place}_taps", list(heads.values())
            )
            return dict(zip(heads, rows, strict=True))

        return convolved(q, "queries"), convolved(k, "keys"), convolved(v, "values")

    def short_conv(self, parameter: str, x: HeadRows) -> HeadRows:
        """x by head and position, each channel convolved over the document's last tokens."""
        taps = self.weights.get(parameter)
        if taps is None:
            return x
        begins, residual = self.begins(), self.config.mechanisms["short_conv"]["residual"]
        made: HeadRows = []
        for h, row in enumerate(x):
            made.append([])
            for t, current in enumerate(row):
                y = current if residual else 0 * current
                for back in range(len(taps)):
                    if t - back < 0 or any(t - step in begins for step in range(back)):
                        break
                    y = y + taps[back, h] * row[t - back]
                made[h].append(y)
        return made

    def local(self, name: str, layer: int, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values, each by head, after the mechanism `name`."""
        options, parameters = self.config.mechanisms[name], f"model.layers.{layer}.self_attn.mechanisms.{name}"
        if name == "kv_shift":
            starts = self.begins()

            def shifted(x: dict[int, list[Tensor]], part: str) -> dict[int, list[Tensor]]:
                taps = self.weights.get(f"{parameters}.{part}")
                if taps is None:
                    return x
                if options["form"] != "free":
                    first = 1 / (1 + (-taps).exp()) if options["form"] == "gate" else taps.clamp(0, 1)
                    taps = torch.stack((first, 1 - first))
                return dict(zip(x, shift_heads(list(x.values()), taps, starts), strict=True))

            return shifted(q, "gamma"), shifted(k, "alpha"), shifted(v, "beta")
        if name == "value_embedding" and v and self.acts(options, layer):
            return q, k, self.value_embedding(layer, v)
        if name == "value_residual" and layer in self.receivers(options):
            mixed = {"queries": q, "keys": k, "values": v}.get(options["of"])
            if not mixed:
                return q, k, v
            part = options["of"][0]
            if options["mode"] == "dense":
                earlier = self.final_v if options["recursive"] else [raw["v"] for raw in self.raw]
                sources = [x for x in earlier[:layer] if x.keys() >= mixed.keys()]
                weights: Any = self.weights[f"{parameters}.lambdas"]
            else:
                sources = [self.raw[options["source"]][part]]
                weights = self.two_weights(layer, options)
            rows = [[[source[h] for h in mixed] for source in sources], list(mixed.values())]
            mixed = dict(zip(mixed, weighted([*rows[0], rows[1]], weights), strict=True))
            return {"q": (mixed, k, v), "k": (q, mixed, v), "v": (q, k, mixed)}[part]
        return q, k, v

    def value_embedding(self, layer: int, v: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        c, options = self.config, self.config.mechanisms["value_embedding"]
        own = f"model.layers.{layer}.self_attn.mechanisms.value_embedding"
        up, gate, scalar = (self.weights.get(f"{own}.{name}") for name in ("up.weight", "gate.weight", "scalar"))
        place, heads = list(v), list(v)
        if options["tables"] is None:
            table = self.weights[f"{own}.table.weight"]
        else:
            layers = range(c.num_hidden_layers) if options["layers"] is None else sorted(set(options["layers"]))
            which = [i for i in layers if self.stored(i, 1)].index(layer) % options["tables"]
            table = self.weights["model.mechanisms.value_embedding.table.weight"].split(c.vocab_size)[which]
            if up is None:
                place = list(range(c.num_key_value_heads))
        made: dict[int, list[Tensor]] = {head: [] for head in heads}
        for t, token in enumerate(self.ids):
            row = table[token] if up is None else up @ table[token]
            parts = dict(zip(place, row.split(c.head_dim), strict=True))
            for i, head in enumerate(heads):
                opened: Any = 1.0 if scalar is None else scalar[0]
                if gate is not None:
                    x = self.inputs[layer][t][: gate.shape[1]]
                    opened = options["scale"] / (1 + (-(gate[i] @ x)).exp())
                made[head].append(v[head][t] + opened * parts[head])
        return made

    def hidden_residual(self, layer: int, x: list[Tensor]) -> list[Tensor]:
        options = self.config.mechanisms.get("value_residual", {})
        if options.get("of") != "hidden" or layer not in self.receivers(options):
            return x
        first, own = self.two_weights(layer, options)
        return [first * a + own * b for a, b in zip(self.stream[options["source"]], x, strict=True)]

    def dense_former(self, layer: int, x: list[Tensor]) -> list[Tensor]:
        options = self.config.mechanisms.get("dense_former")
        if options is None or (layer + 1) % options["period"]:
            return x
        terms = [j for j in range(layer + 2) if (layer + 1 - j) % options["dilation"] == 0]
        alpha = self.weights[f"model.layers.{layer}.mechanisms.dense_former.alpha"]
        zero = torch.zeros_like(x[0])
        return [sum((alpha[i] * self.stream[j][t] for i, j in enumerate(terms)), zero) for t in range(len(x))]

    # Parts

    def rope(self, x: Tensor, position: int) -> Tensor:
        given = self.config.rope_parameters
        turned = int(self.config.head_dim * given.get("partial_rotary_factor", 1.0))
        return rope(x, position, given["rope_theta"], turned)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A linear layer, or the pattention in its place."""
        if f"{name}.key" in self.weights:
            tau, options = self.weights[f"{name}.scale.tau"][0], self.config.mechanisms["pattention"]
            key, value = self.weights[f"{name}.key"], self.weights[f"{name}.value"]
            place = PLACES[name.rpartition(".")[2]]
            top_k = options["top_k"].get(place) if isinstance(options["top_k"], dict) else options["top_k"]
            heads = options["product_heads"] if place in (options["product_keys"] or []) else 0
            return pattention(x, key, value, tau, options["score"], options["gelu"], top_k, heads)
        y = self.weights[f"{name}.weight"] @ x
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights.get(f"{name}.weight", 1.0)
        if self.config.norm == "rms_norm":
            return rms_norm(x, weight, self.config.norm_eps)
        return layer_norm(x, weight, self.weights.get(f"{name}.bias"), self.config.norm_eps)

    def project(self, attention: str, part: str, x: list[Tensor], heads: Any) -> dict[int, list[Tensor]]:
        """Queries, keys or values, by head and position."""
        if not heads:
            return {}
        width = self.config.head_dim
        per_position = [self.linear(f"{attention}.{part}_proj", a).split(width) for a in x]
        return dict(zip(heads, map(list, zip(*per_position, strict=True)), strict=True))

    def normed(self, name: str, heads: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        return {head: [self.norm(name, x) for x in row] for head, row in heads.items()}

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}"
        if f"{name}.mlp.key" in self.weights:
            return self.linear(f"{name}.mlp", x)
        act = ACTIVATIONS[self.config.hidden_act]
        inner = self.linear(f"{name}.mlp.up_proj", x)
        if self.config.feed_forward == "gated":
            inner = act(self.linear(f"{name}.mlp.gate_proj", x)) * inner
        else:
            inner = act(inner)
        return self.linear(f"{name}.mlp.down_proj", inner)


def cubic(table: dict[Any, Tensor], old: tuple[int, int], new: tuple[int, int]) -> dict[Any, Tensor]:
    """Vectors of a grid `old` for another one: bicubic interpolation between the centers of patches.

    The kernel of Keys (1981) with a = -3/4; beyond the border the nearest vector is repeated.
    """

    def kernel(distance: float) -> float:
        a, x = -0.75, abs(distance)
        if x <= 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0

    def weights(axis: int, at: int) -> list[tuple[int, float]]:
        center = (at + 0.5) * old[axis] / new[axis] - 0.5
        first = math.floor(center) - 1
        return [(min(max(i, 0), old[axis] - 1), kernel(center - i)) for i in range(first, first + 4)]

    return {
        (r, c): torch.stack([a * b * table[i, j] for i, a in weights(0, r) for j, b in weights(1, c)]).sum(0)
        for r in range(new[0])
        for c in range(new[1])
    }


class ImageReference(Reference):
    """`HeadwaterForImageClassification`, on one image at a time.

    A slot is the class token, a register or a patch; `places` holds the row and column of each patch.
    """

    def __call__(self, image: Tensor) -> Tensor:  # type: ignore[override]
        """Logits [classes] of one image [C, H, W]."""
        c = self.config
        high, wide = c.patch_shape
        grid = image.shape[1] // high, image.shape[2] // wide
        cells = [(r, col) for r in range(grid[0]) for col in range(grid[1])]
        x = []
        for r, col in cells:
            patch = image[:, r * high : (r + 1) * high, col * wide : (col + 1) * wide]
            x.append(self.linear("model.embed_patches", patch.flatten()))
        self.places: list[Any] = list(cells)
        for name in ("registers", "class_token"):
            before = list(self.weights.get(f"model.{name}.weight", ()))
            x, self.places = before + x, [None] * len(before) + self.places
        x = [a + b for a, b in zip(x, self.added(grid), strict=True)]
        self.position = list(range(len(x)))
        x = [self.norm("model.norm", a) for a in self.blocks(x)]
        patches = [a for a, place in zip(x, self.places, strict=True) if place is not None]
        pooled = x[0] if c.pooling == "token" else torch.stack(patches).mean(0)
        return self.linear("classifier", pooled)

    def added(self, grid: tuple[int, int]) -> list[Any]:
        """What is added to each slot for its position."""
        c, width = self.config, self.config.hidden_size
        if c.position == "learned":
            table = list(self.weights["model.embed_positions.weight"])
            rows, columns = c.image_shape[0] // c.patch_shape[0], c.image_shape[1] // c.patch_shape[1]
            first = len(table) - rows * columns
            known = {(r, col): table[first + r * columns + col] for r in range(rows) for col in range(columns)}
            known |= cubic(known, (rows, columns), grid) if grid != (rows, columns) else {}
            return [table[t] if place is None else known[place] for t, place in enumerate(self.places)]
        if c.position == "sincos":

            def waves(at: int) -> list[float]:
                angles = [at / 10000 ** (4 * i / width) for i in range(width // 4)]
                return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]

            vectors = [None if place is None else [*waves(place[1]), *waves(place[0])] for place in self.places]
            return [0.0 if vector is None else torch.tensor(vector, dtype=torch.float64) for vector in vectors]
        return [0.0] * len(self.places)

    def seen(self, t: int) -> list[int]:
        return self.position

    def begins(self) -> set[int]:
        """The tokens before the patches, the first patch, and if asked each row's first."""
        by_row = self.config.stop_at_rows
        return {t for t, at in enumerate(self.places) if at is None or at == (0, 0) or (by_row and at[1] == 0)}

    def rope(self, x: Tensor, position: int) -> Tensor:
        """Turn channel i against channel i + n/2: half of these pairs by the row, the others by the column."""
        if self.places[position] is None:
            return x
        given, y = self.config.rope_parameters, list(x)
        turned = int(self.config.head_dim * given.get("partial_rotary_factor", 1.0))
        for i in range(turned // 2):
            axis, rate = divmod(i, turned // 4)
            angle = self.places[position][axis] * given["rope_theta"] ** (-4 * rate / turned)
            a, b = x[i], x[i + turned // 2]
            y[i] = a * math.cos(angle) - b * math.sin(angle)
            y[i + turned // 2] = b * math.cos(angle) + a * math.sin(angle)
        return torch.stack(y)


def reference(model: Any, differentiable: bool = False) -> Reference:
    """The reference with `model`'s weights; `differentiable` gives the model's own parameters to autograd."""
    kind = Reference if model.config.is_causal else ImageReference
    return kind(model.config, dict(model.state_dict(keep_vars=differentiable)))
