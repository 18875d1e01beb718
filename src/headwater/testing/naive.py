"""Reference implementations, written from the equations with loops over rows, heads and positions.

Nothing here is fast, caches anything, or takes more from headwater than names. A vector is a 1-d tensor;
`heads` is a list over heads of lists over positions of vectors. A whole model is run on one document at a time. A
mechanism from outside is a subclass of `Reference` that adds to `knows` and says at its stage what its equation says.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from headwater.config.layers import layer_config
from headwater.config.plan import Stage
from headwater.plugins.registry import REGISTRY

HeadRows = list[list[Tensor]]
# Attention weights by head and position, of each slot that it sees.
AttentionWeights = list[list[dict[int, Tensor]]]

# The square of a length that is taken for zero.
ZERO = 1e-24
# What pattention's options call the places of linear layers.
PLACES = dict(q_proj="query", k_proj="key", v_proj="value", o_proj="output", mlp="feed_forward")


# Mechanisms


def mix(weights: Any, vectors: Sequence[Tensor]) -> Tensor:
    """Σ_i weights[i]·vectors[i]."""
    terms = (weight * vector for weight, vector in zip(weights, vectors, strict=True))
    return sum(terms, torch.zeros_like(vectors[0]))


def mix_rows(weights: Any, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The same, position by position."""
    return [mix(weights, vectors) for vectors in zip(*rows, strict=True)]


def shift(row: Sequence[Tensor], taps: Sequence[Any], starts: AbstractSet[int]) -> list[Tensor]:
    """y_t = Σ_s taps[t][s]·x_{t-s}, without what is before the row or the document. starts: those of documents."""
    y = []
    for t in range(len(row)):
        back = 0
        while back < len(taps[t]) - 1 and t - back > 0 and t - back not in starts:
            back += 1
        y.append(mix(taps[t][: back + 1], [row[t - s] for s in range(back + 1)]))
    return y


def kv_shift(x: Tensor, weight: Tensor, starts: AbstractSet[tuple[int, int]] = frozenset()) -> Tensor:
    """y_t = Σ_s w_s·x_{t-s}. x: [B, K, T, d], weight: [window, K]; `starts`: (row, slot) of each document's start."""
    y = torch.zeros_like(x)
    for b, rows in enumerate(x):
        for h, row in enumerate(rows):
            shifted = shift(row, [weight[:, h]] * len(row), {slot for owner, slot in starts if owner == b})
            y[b, h] = torch.stack(shifted)
    return y


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

    def l2(a: Tensor) -> Tensor:
        square = (a**2).sum()
        return tau * a / square.sqrt() if square > ZERO else 0 * a

    steps = {
        "gelu": ACTIVATIONS["gelu_new" if form == "tanh" else "gelu"],
        "l2": l2,
        "l1": lambda a: tau * a / a.abs().sum(),
        "exp": torch.exp,
        "softmax": lambda a: (a / math.sqrt(len(x))).softmax(0),
    }
    for step in score.replace("_norm", "").split("_"):
        scores = steps[step](scores)
    return scores @ value


def ngram_factors(count: int, vocabulary: int, seed: int) -> list[int]:
    """Odd numbers whose products with ids stay below 2^63, by SplitMix64."""
    drawn = []
    for i in range(1, count + 1):
        z = (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z = ((z ^ (z >> shift)) * factor) % 2**64
        drawn.append(2 * (z % ((2**63 - 1) // vocabulary // 2)) + 1)
    return drawn


def primes(first: int, count: int) -> list[int]:
    """The first `count` primes from a number on."""
    found: list[int] = []
    while len(found) < count:
        if first > 1 and all(first % i for i in range(2, first)):
            found.append(first)
        first += 1
    return found


# Parts


def rms_norm(x: Tensor, weight: Any, eps: float) -> Tensor:
    return x / ((x**2).sum() / len(x) + eps).sqrt() * weight


def layer_norm(x: Tensor, weight: Any, bias: Tensor | None, eps: float) -> Tensor:
    centered = x - x.mean()
    normed = centered / ((centered**2).mean() + eps).sqrt() * weight
    return normed if bias is None else normed + bias


def rotate(x: Tensor, angles: list[float]) -> Tensor:
    """Turn channel i against channel i + n by the i-th of n angles."""
    n = len(angles)
    cos, sin = (x.new_tensor([f(angle) for angle in angles]) for f in (math.cos, math.sin))
    first, second = x[:n], x[n : 2 * n]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[2 * n :]))


def alibi_slope(head: int, heads: int) -> float:
    """arXiv 2108.12409: 2^(-8/n), 2^(-16/n), …; for n no power of two, the rest from every other slope of 2n's."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if head < power:
        return 2 ** (-8 * (head + 1) / power)
    return 2 ** (-8 * (2 * (head - power) + 1) / (2 * power))


ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu_new": lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
}


# Where keys and values come from


def attended(config: Any, layer: int, head: int) -> tuple[int, int]:
    """The layers whose keys and whose values key/value head `head` of layer `layer` attends to."""
    return origin(config, layer, head, 0), origin(config, layer, head, 1)


def origin(config: Any, layer: int, head: int, part: int, without: str = "") -> int:
    """The layer whose keys (part 0) or values (part 1) a head attends to: those of its source, if it has one, and of
    the source's source; without: a mechanism that is left out of account in this layer."""
    for name in reversed(config.mechanisms):
        source = source_of(config, name, layer, head, part)
        if name != without and source != layer:
            projected = name == "skip_layer" and config.mechanisms[name]["source"] == "projection"
            return origin(config, source, head, part, without=name if projected else "")
    return layer


def source_of(config: Any, name: str, layer: int, head: int, part: int) -> int:
    """The layer from which a mechanism lets a head of `layer` take its keys (part 0) or values (part 1)."""
    depth, options = config.num_hidden_layers, config.mechanisms[name]
    what = ("keys", "values")[part]
    if name == "skip_layer":
        groups = config.num_attention_heads // config.num_key_value_heads
        distance = options["layers"] if options["layers"] is not None else 3 * depth // 4
        skipping = (3 * config.num_attention_heads // 4 if options["heads"] is None else options["heads"]) // groups
        skips = head >= config.num_key_value_heads - skipping and distance <= layer
        return layer - distance if skips else layer
    if name == "svformer":
        receivers = range(options["source"] + 1, depth) if options["layers"] is None else options["layers"]
        return options["source"] if layer in receivers and options["share"] in (what, "both") else layer
    return layer_map(options, options[what], depth)[layer] if name == "kv_source" else layer


def layer_map(options: dict[str, Any], given: Any, depth: int) -> list[int]:
    """The source of each layer in a map of layers."""
    if isinstance(given, list):
        return given
    last = depth // 2 if options["num_shared_layers"] is None else options["num_shared_layers"]
    kinds = options["layer_types"] or ["alike"] * depth

    def of_its_kind(layer: int) -> int:
        """The layer itself, or going down from the last layer of its own, the first of its kind."""
        source = layer if layer < depth - last else depth - last - 1
        while kinds[source] != kinds[layer]:
            source -= 1
        return source

    return [
        {
            "cross_layer": i // options["group_size"] * options["group_size"],
            "yoco": depth // 2 if i > depth // 2 else i,
            "last": of_its_kind(i) if given == "last" else i,
            "own": i,
        }[given]
        for i in range(depth)
    ]


# The whole model


class Reference:
    """The model with the given config and weights (by their names in the state dict), on one row at a time.

    knows: the mechanisms it has the equations of, by their names in the config; raises `NotImplementedError` for
        others. A subclass for one more adds its name, and overrides the method of its stage, which has the name of the
        mechanism's, or `outer` (other stages of the block), `linear` or `attended`. What there is to read:
        `config`, and `own` as the layer that is being computed sees it; `weights`; the row's tokens `ids`, their
        `position`, which are `real`; `inputs` of attention's queries by layer and position; `raw` q, k, v by layer,
        part, head and position; `stream`, what blocks gave.
    """

    knows: tuple[str, ...] = (*REGISTRY, "blend")

    def __init__(self, config: Any, weights: dict[str, Tensor]) -> None:
        if unknown := set(config.mechanisms) - set(self.knows):
            raise NotImplementedError(f"There is no naive reference for {', '.join(sorted(unknown))}; write one.")
        self.config = self.own = config  # own: as the layer sees it that is being computed
        self.weights = weights

    def of(self, name: str, layer: int, parameter: str, block: bool = False) -> Any:
        """A parameter of a mechanism in a layer, or None; block: it acts at the block, not inside attention."""
        place = "" if block else ".self_attn"
        own = name.replace(".", "_").replace(":", "_")
        return self.weights.get(f"model.layers.{layer}{place}.mechanisms.{own}.{parameter}")

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
        x = [c.embedding_scale * self.weights["model.embed_tokens.weight"][token] for token in ids]
        if c.position == "learned":
            x = [a + self.weights["model.embed_positions.weight"][p] for a, p in zip(x, self.position, strict=True)]
        if c.embedding_norm:
            x = [self.norm("model.embedding_norm", a) for a in x]
        x = self.blocks(x)
        head = self.weights["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
        logits = torch.stack([head @ self.norm("model.norm", a) for a in x])
        cap = c.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def blocks(self, x: list[Tensor]) -> list[Tensor]:
        """The stream by position, after all blocks."""
        c = self.config
        # By layer: attention's input; q, k, v as projected; v after mechanisms; what is attended to; weights; stream.
        self.raw: list[dict[str, Any]] = []
        self.inputs: list[list[Tensor]] = []
        self.final_v: list[dict[int, list[Tensor]]] = []
        self.bank: list[tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]] = []
        self.probabilities: list[AttentionWeights] = []
        x = self.around(Stage.EMBEDDING, 0, x)
        self.stream = [x]
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}"
            x, inputs = self.attention_inputs(layer, self.around(Stage.RESIDUAL, layer, x))
            attended_to = self.attention(layer, inputs)
            if c.output_norms:
                attended_to = [self.norm(f"{name}.attention_output_norm", a) for a in attended_to]
            attended_to = self.around(Stage.ATTENTION_OUTPUT, layer, attended_to)
            before, residual = x, float(c.first_residual or layer > 0)
            x = mix_rows((residual, 1.0), (x, attended_to))
            inner = [self.norm(f"{name}.post_attention_layernorm", a) for a in (before if c.parallel_residual else x)]
            inner = self.feed_forward(layer, self.around(Stage.FEED_FORWARD_INPUT, layer, inner))
            if c.output_norms:
                inner = [self.norm(f"{name}.feed_forward_output_norm", a) for a in inner]
            x = mix_rows((1.0, 1.0), (x, self.around(Stage.FEED_FORWARD_OUTPUT, layer, inner)))
            self.stream.append(x)
            for mechanism in c.mechanisms:
                x = self.transform_block_output(mechanism, layer, x)
        return x

    def attention_inputs(self, layer: int, x: list[Tensor]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The stream, and what queries, keys and values are projected from."""
        entered = x
        for mechanism in self.config.mechanisms:
            entered = self.transform_block_input(mechanism, layer, entered)
        inputs = {"q": entered, "k": entered, "v": entered, "stream": x}
        for mechanism in self.config.mechanisms:
            inputs = self.split_attention_inputs(mechanism, layer, inputs)
        x, norm = inputs.pop("stream"), f"model.layers.{layer}.input_layernorm"
        normed = {part: [self.norm(norm, a) for a in row] for part, row in inputs.items()}
        return x, {part: self.around(Stage.ATTENTION_INPUT, layer, row) for part, row in normed.items()}

    def attention(self, layer: int, inputs: dict[str, list[Tensor]]) -> list[Tensor]:
        self.own = layer_config(self.config, layer)
        c, name = self.own, f"model.layers.{layer}.self_attn"
        heads = {"q": range(c.num_attention_heads), "k": self.stored(layer, 0), "v": self.stored(layer, 1)}
        self.inputs.append(inputs["q"])
        q, k, v = (self.project(name, part, inputs[part], heads[part]) for part in "qkv")
        for mechanism in c.mechanisms:
            q, k, v = self.transform_projections(mechanism, layer, q, k, v)
        if c.qk_norm:
            q, k = self.normed(f"{name}.q_norm", q), self.normed(f"{name}.k_norm", k)
        self.raw.append({"q": q, "k": k, "v": v})
        for mechanism in c.mechanisms:
            q, k, v = self.transform_qkv(mechanism, layer, q, k, v)
        self.final_v.append(v)
        if c.position == "rope":
            q, k = self.rotated(q), self.rotated(k)
        self.bank.append((k, v))
        pairs = [pair for mechanism in c.mechanisms for pair in self.add_key_values(mechanism, layer)]
        weights = self.mixed_weights(layer, self.own_weights(layer, q, [key for key, _ in pairs]))
        read = self.read_values(layer, weights, [value for _, value in pairs])
        for mechanism in c.mechanisms:
            read = self.transform_head_outputs(mechanism, layer, read)
        rows = range(len(inputs["q"]))
        return [self.linear(f"{name}.o_proj", torch.cat([head[t] for head in read])) for t in rows]

    def rotated(self, heads: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        return {h: [self.rope(a, p) for a, p in zip(row, self.position, strict=True)] for h, row in heads.items()}

    def own_weights(self, layer: int, q: dict[int, list[Tensor]], more: list[Tensor]) -> AttentionWeights:
        """softmax(q·k / √d - slope·distance) over the slots that each sees, which later layers may read.

        more: keys that are no tokens', which have no distance; they are -1, -2, … in the result.
        """
        c = self.own
        groups = c.num_attention_heads // c.num_key_value_heads
        weights: AttentionWeights = []
        for h, row in q.items():
            keys = [*self.attended_to(layer, 0, h // groups), *(key[h // groups] for key in reversed(more))]
            slope = alibi_slope(h, c.num_attention_heads) if c.position == "alibi" else 0.0
            weights.append([])
            for t, query in enumerate(row):
                slots = [*seen, *(-1 - i for i in range(len(more)))] if (seen := self.seen(t)) else []
                scores = []
                for j in slots:
                    score = query @ keys[j]
                    score = score / math.sqrt(len(query)) if c.attention_scale is None else c.attention_scale * score
                    if c.attention_softcap is not None:
                        score = c.attention_softcap * (score / c.attention_softcap).tanh()
                    scores.append(score - slope * (self.position[t] - self.position[j] if j >= 0 else 0))
                weights[-1].append(dict(zip(slots, torch.stack(scores).softmax(0), strict=True)) if slots else {})
        self.probabilities.append(weights)
        return weights

    def mixed_weights(self, layer: int, weights: AttentionWeights) -> AttentionWeights:
        """Attention weights after a value residual of probabilities, whose pairs beside the tokens' stay."""
        options = self.config.mechanisms.get("value_residual", {})
        if options.get("target") != "probabilities" or layer not in self.receivers(options):
            return weights
        first, own = self.two_weights(layer, options)
        source = self.probabilities[options["source"]]
        return [
            [{j: first * source[h][t][j] + own * w if j >= 0 else w for j, w in at.items()} for t, at in enumerate(row)]
            for h, row in enumerate(weights)
        ]

    def read_values(self, layer: int, weights: AttentionWeights, more: list[Tensor]) -> list[list[Tensor]]:
        """What each head reads at each position. more: values beside the tokens'."""
        groups = self.own.num_attention_heads // self.own.num_key_value_heads
        read = []
        for h, row in enumerate(weights):
            values = [*self.attended_to(layer, 1, h // groups), *(value[h // groups] for value in reversed(more))]
            read.append([sum((w * values[j] for j, w in seen.items()), 0 * values[0]) for seen in row])
        return read

    # Mechanisms

    def begins(self) -> set[int]:
        """The slots before which no mechanism may look: the first, and where a document or real tokens start."""
        return {0} | {t for t in range(1, len(self.real)) if not self.real[t - 1]} | set(self.starts)

    def seen(self, t: int) -> list[int]:
        """The slots that slot t attends to: the real ones up to it, of which a window counts slots."""
        window = self.own.sliding_window
        first = 0 if window is None else max(0, t - window + 1)
        return [j for j in range(first, t + 1) if self.real[j]]

    def attended(self, layer: int, head: int) -> tuple[int, int]:
        """The layers whose keys and whose values key/value head `head` of layer `layer` attends to."""
        return attended(self.config, layer, head)

    def attended_to(self, layer: int, part: int, head: int) -> list[Tensor]:
        """The keys (part 0) or values (part 1) that key/value head `head` of `layer` attends to, by position."""
        own = self.bank[self.attended(layer, head)[part]][part][head]
        if "blend" not in self.config.mechanisms:
            return own
        goal, weight, group = self.goal()
        other = self.bank[attended(goal, layer, head // group)[part]][part][head]
        return mix_rows((1 - weight, weight), (own, other))

    def goal(self) -> tuple[Any, float, int]:
        """What a blended model goes over to, how far it has come, and how many of its heads become one."""
        c, options = self.config, self.config.mechanisms["blend"]
        heads = options["num_key_value_heads"] or c.num_key_value_heads
        goal = copy.copy(c)
        goal.num_key_value_heads, goal.mechanisms = heads, options["mechanisms"] or {}
        return goal, options["weight"], c.num_key_value_heads // heads

    def stored(self, layer: int, part: int) -> list[int]:
        """The heads whose keys (part 0) or values (part 1) of `layer` somebody attends to."""
        layers = range(self.config.num_hidden_layers)
        heads = [layer_config(self.config, i).num_key_value_heads for i in layers]
        return [
            h for h in range(heads[layer]) if any(self.attended(i, h)[part] == layer for i in layers if h < heads[i])
        ]

    def transform_block_input(self, name: str, layer: int, x: list[Tensor]) -> list[Tensor]:
        """What goes into a block's attention, by position."""
        if name == "depth_attention" and self.queries(layer, 1):
            (query,) = self.queries(layer, 1)
            return self.depth_attention(layer, query, x)
        options = self.config.mechanisms[name]
        if name == "value_residual" and options["target"] == "hidden" and layer in self.receivers(options):
            return mix_rows(self.two_weights(layer, options), (self.stream[options["source"]], x))
        return x

    def split_attention_inputs(self, name: str, layer: int, inputs: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """What goes into queries "q", keys "k" and values "v", and the residual "stream", each by position."""
        ways = [part for i, part in enumerate("kv") if self.stored(layer, i)]
        if name == "depth_attention":
            queries = dict(zip(["q", *ways], self.queries(layer, 3), strict=False))
            return inputs | {part: self.depth_attention(layer, w, inputs[part]) for part, w in queries.items()}
        if name == "mudd" and layer > 0:
            chosen = ["q", *ways, "stream"]
            made = self.mudd(layer, "", self.stream[:layer], inputs["stream"], [inputs[way] for way in chosen])
            return inputs | dict(zip(chosen, made, strict=True))
        return inputs

    def queries(self, layer: int, count: int) -> list[Tensor]:
        """Those of attention over depth in a layer, if it is set to so many."""
        queries = self.of("depth_attention", layer, "query", block=True)
        return [] if queries is None or self.config.mechanisms["depth_attention"]["queries"] != count else list(queries)

    def depth_attention(self, layer: int, query: Tensor, x: list[Tensor]) -> list[Tensor]:
        """What a query reads of the hidden states of earlier layers and of x, by position."""
        options, scale = self.config.mechanisms["depth_attention"], 1.0
        states = [*self.stream[: layer : options["block"]], x]
        read = []
        for t in range(len(x)):
            h = [state[t] for state in states]
            h = h[:1] + [after - before for before, after in pairwise(h)]
            keys = [rms_norm(a, 1.0, self.config.norm_eps) for a in h]
            if options["variant"] == "inkling_2":
                h, scale = keys, 1 / math.sqrt(len(query))
            scores = [(scale * (query @ key)).exp() for key in keys]
            read.append(mix(scores, h) / sum(scores))
        return read

    def mudd(
        self, layer: int, prefix: str, earlier: list[list[Tensor]], x: list[Tensor], own: list[list[Tensor]]
    ) -> list[list[Tensor]]:
        """For each way, Σ_j a_j(x)·X_j over earlier hidden states and what is its own, by position."""
        names = ("up.weight", "down.weight", "bias")
        up, down, bias = (self.of("mudd", layer, prefix + name, block=True) for name in names)
        made: list[list[Tensor]] = [[] for _ in own]
        for t, state in enumerate(x):
            inner = ACTIVATIONS["gelu"](up @ rms_norm(state, 1.0, self.config.norm_eps))
            weights = (down @ inner).view(bias.shape) + bias
            for s, way in enumerate(own):
                made[s].append(mix(weights[s], [*(old[t] for old in earlier), way[t]]))
        return made

    def add_key_values(self, name: str, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values beside the tokens', each by key/value head: [K, d]."""
        options = self.config.mechanisms[name]
        if name != "persistent_memory" or not self.acts(options, layer):
            return []
        key, value = self.of(name, layer, "key"), self.of(name, layer, "value")
        count, width = key.shape[1:]
        return [(math.sqrt(width) * key[:, i], math.sqrt(count) * value[:, i]) for i in range(count)]

    def around(self, stage: Stage, layer: int, x: list[Tensor]) -> list[Tensor]:
        """`outer` of all mechanisms."""
        for mechanism in self.config.mechanisms:
            x = self.outer(stage, mechanism, layer, x)
        return x

    def outer(self, stage: Stage, name: str, layer: int, x: list[Tensor]) -> list[Tensor]:
        """The stages around attention and feed-forward but for those with a method here, by position."""
        options = self.config.mechanisms[name]
        if name == "embedding_residual" and stage is Stage.RESIDUAL and self.acts(options, layer):
            mu, lambda_ = self.of(name, layer, "lambdas", block=True)
            return mix_rows((lambda_, mu), (x, self.stream[0]))
        if name == "smear" and stage is Stage.EMBEDDING:
            return self.smeared(x)
        if name == "ngram_memory" and stage is Stage.RESIDUAL and layer in self.remembers(options, "stream"):
            return mix_rows((1, 1), (x, self.ngram_memory(layer, x, block=True)))
        if name == "short_conv":
            return self.convolved(layer, stage.name.lower(), x)
        return x

    def smeared(self, x: list[Tensor]) -> list[Tensor]:
        """To each token's embedding, the one before it in the document."""
        options = self.config.mechanisms["smear"]
        strength, gate = (self.of("smear", 0, parameter, block=True)[0] for parameter in ("strength", "gate.weight"))

        def normed(when: str) -> list[Tensor]:
            eps = torch.finfo(x[0].dtype).eps
            return [rms_norm(a, 1.0, eps) for a in x] if options["norm"] == when else x

        x = normed("before")
        x = shift(x, [(1.0, strength * (gate @ a[: len(gate)]).sigmoid()) for a in x], self.begins())
        return normed("after")

    def acts(self, options: dict[str, Any], layer: int) -> bool:
        """Whether the option `layers` names a layer; by default it names all."""
        return options["layers"] is None or layer in options["layers"]

    def transform_block_output(self, name: str, layer: int, x: list[Tensor]) -> list[Tensor]:
        """What the next block is given, by position."""
        options, is_last = self.config.mechanisms[name], layer == self.config.num_hidden_layers - 1
        states = [*self.stream[: layer + 1], x]
        if name == "mudd" and is_last:
            return self.mudd(layer, "last.", states[:-1], x, [x])[0]
        if name == "backout" and is_last:
            middle = (layer + 1) // 2 if options["layer"] is None else options["layer"]
            return mix_rows((1, -self.of(name, layer, "strength", block=True)), (x, states[middle + 1]))
        if name == "dense_former" and (layer + 1) % options["period"] == 0:
            terms = [j for j in range(layer + 2) if (layer + 1 - j) % options["dilation"] == 0]
            alpha = self.of(name, layer, "alpha", block=True)
            return mix_rows(alpha[: len(terms)], [states[j] for j in terms])
        return x

    def transform_head_outputs(self, name: str, layer: int, read: list[list[Tensor]]) -> list[list[Tensor]]:
        """What each query head has read, by head and position."""
        options, groups = self.config.mechanisms[name], self.own.num_attention_heads // self.own.num_key_value_heads
        sources = [self.attended(layer, h // groups)[1] for h in range(len(read))]
        if name == "neutreno" and layer > 0:
            learned = self.of(name, layer, "lambdas")
            factor = options["weight"] if learned is None else learned[0]
            values = [[self.raw[i]["v"][h // groups] for i in (0, source)] for h, source in enumerate(sources)]
            return [mix_rows((1, factor, -factor), (row, *values[h])) for h, row in enumerate(read)]
        if name == "exclusive" and self.acts(options, layer):
            values = [self.final_v[source][h // groups] for h, source in enumerate(sources)]
            return self.exclusive(self.of(name, layer, "alpha"), read, values)
        return self.output_gate(layer, read) if name == "output_gate" and self.acts(options, layer) else read

    def output_gate(self, layer: int, read: list[list[Tensor]]) -> list[list[Tensor]]:
        weight, scale = self.of("output_gate", layer, "gate.weight"), self.config.mechanisms["output_gate"]["scale"]
        gates = [scale * (weight @ x[: weight.shape[1]]).sigmoid() for x in self.inputs[layer]]
        gates = [gate.unflatten(0, (len(read), -1)) for gate in gates]
        return [[gate[h] * y for gate, y in zip(gates, row, strict=True)] for h, row in enumerate(read)]

    def exclusive(self, alpha: Tensor | None, read: list[list[Tensor]], values: list[list[Tensor]]) -> HeadRows:
        """What is left of each head's output without its part along the token's own value."""
        left = []
        for h, row in enumerate(read):
            strength = 1.0 if alpha is None else alpha[h].tanh()
            pairs = zip(row, values[h], strict=True)
            left.append([y - strength * (y @ v) / (v @ v) * v if v @ v > ZERO else y for y, v in pairs])
        return left

    def receivers(self, options: dict[str, Any]) -> list[int]:
        """The layers of a value residual that have something of their own to mix into."""
        depth, part = self.config.num_hidden_layers, {"keys": 0, "values": 1}.get(options["target"])
        layers = range(options["source"] + 1, depth) if options["layers"] is None else options["layers"]
        layers = [layer for layer in layers if part is None or self.stored(layer, part)]
        if options["mode"] == "sparse" and options["layers"] is None:
            return layers[-max(1, 3 * depth // 8) :]
        return layers

    def two_weights(self, layer: int, options: dict[str, Any]) -> tuple[Any, Any]:
        """λ1 and λ2 of a value residual from one source."""
        mode = options["mode"]
        lambdas = self.of("value_residual", layer, "lambdas", block=options["target"] == "hidden")
        if mode == "identity":
            return 0.5, 0.5
        if mode in ("constant", "sparse"):
            given = options["weight"]
            return ({"constant": 2.0, "sparse": 5.0}[mode] if given is None else given), 1.0
        if mode == "learnable":
            return tuple(lambdas)
        share = self.weights["model.mechanisms.value_residual.logits"].softmax(0)
        share = share[self.receivers(options).index(layer)]
        return self.weights["model.mechanisms.value_residual.scale"][0] * share, lambdas[0]

    def transform_projections(self, name: str, layer: int, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values, each by head, before their norms."""
        if name == "blend":
            return q, self.pooled(k), self.pooled(v)
        if name != "short_conv":
            return q, k, v

        def convolved(heads: dict[int, list[Tensor]], place: str) -> dict[int, list[Tensor]]:
            return dict(zip(heads, self.short_conv(layer, place, list(heads.values()), block=False), strict=True))

        return convolved(q, "queries"), convolved(k, "keys"), convolved(v, "values")

    def pooled(self, x: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        """x by head and position, each mixed with the mean of its group."""
        _, weight, group = self.goal()
        if group == 1:
            return x

        pooled = {}
        for h, row in x.items():
            first = h // group * group
            mean = mix_rows([1 / group] * group, [x[i] for i in range(first, first + group)])
            pooled[h] = mix_rows((1 - weight, weight), (row, mean))
        return pooled

    def short_conv(self, layer: int, place: str, x: HeadRows, block: bool = True) -> HeadRows:
        """x by head and position, each channel convolved over the document's last tokens.

        With a map of attention's input, one more number for each tap of a head; then the sum is scaled.
        """
        taps, map_ = (self.of("short_conv", layer, place + name, block) for name in ("_taps", "_map.weight"))
        if taps is None:
            return x
        residual, window, made = float(self.config.mechanisms["short_conv"]["residual"]), len(taps), []
        for h, row in enumerate(x):
            by_position = [taps[:, h]] * len(row)
            if map_ is not None:
                added = map_[h * window : (h + 1) * window]
                by_position = [taps[:, h] + (added @ a)[:, None] for a in self.inputs[-1]]
            y = mix_rows((residual, 1.0), (row, shift(row, by_position, self.begins())))
            made.append(y if map_ is None else [a / math.sqrt(2 * window + 1) for a in y])
        return made

    def convolved(self, layer: int, place: str, x: list[Tensor]) -> list[Tensor]:
        """x by position, outside attention."""
        taps = self.of("short_conv", layer, f"{place}_taps", block=True)
        if taps is None:
            return x
        pieces = [list(row) for row in zip(*(a.split(taps.shape[2]) for a in x), strict=True)]
        return [torch.cat(row) for row in zip(*self.short_conv(layer, place, pieces), strict=True)]

    def transform_qkv(self, name: str, layer: int, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values, each by head, after the mechanism `name`."""
        options = self.config.mechanisms[name]
        if name == "kv_shift":
            return self.kv_shift(layer, q, k, v)
        if name == "value_embedding" and v and self.acts(options, layer):
            return q, k, self.value_embedding(layer, v)
        if name == "ngram_memory" and v and layer in self.remembers(options, "values"):
            added = [a.split(self.own.head_dim) for a in self.ngram_memory(layer, self.inputs[layer], block=False)]
            return q, k, {h: [a + b[i] for a, b in zip(v[h], added, strict=True)] for i, h in enumerate(v)}
        if name == "value_residual" and layer in self.receivers(options):
            return self.value_residual(layer, {"queries": q, "keys": k, "values": v})
        return q, k, v

    def kv_shift(self, layer: int, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        options, total = self.config.mechanisms["kv_shift"], self.own.num_key_value_heads
        if not options["variant"].startswith("half"):
            return self.shifted(layer, q, "gamma"), self.shifted(layer, k, "alpha"), self.shifted(layer, v, "beta")
        return (
            self.halved(q, self.own.num_attention_heads) if options["queries"] else q,
            self.halved(k, total) if options["keys"] else k,
            self.halved(v, total) if options["values"] else v,
        )

    def shifted(self, layer: int, x: dict[int, list[Tensor]], part: str) -> dict[int, list[Tensor]]:
        """Heads whose tokens are mixed with those before them, with the taps `part` of KV shift."""
        taps = self.of("kv_shift", layer, part)
        if taps is None:
            return x
        variant = self.config.mechanisms["kv_shift"]["variant"]
        if variant != "free":
            first = taps.sigmoid() if variant == "gate" else taps.clamp(0, 1)
            taps = torch.stack((first, 1 - first))
        rows = enumerate(x.items())
        return {head: shift(row, [taps[:, i]] * len(row), self.begins()) for i, (head, row) in rows}

    def value_residual(self, layer: int, heads: dict[str, dict[int, list[Tensor]]]) -> tuple[Any, Any, Any]:
        """Queries, keys and values, of which one are mixed with those of earlier layers."""
        options = self.config.mechanisms["value_residual"]
        mixed = heads.get(options["target"])
        if mixed:
            if options["mode"] == "dense":
                sources = [raw["v"] for raw in self.raw[:layer] if raw["v"].keys() >= mixed.keys()]
                weights: Any = self.of("value_residual", layer, "lambdas")
            else:
                sources = [self.raw[options["source"]][options["target"][0]]]
                weights = self.two_weights(layer, options)
            rows = {h: mix_rows(weights, [*(source[h] for source in sources), row]) for h, row in mixed.items()}
            heads = heads | {options["target"]: rows}
        return heads["queries"], heads["keys"], heads["values"]

    def halved(self, x: dict[int, list[Tensor]], total: int) -> dict[int, list[Tensor]]:
        """The second half of all `total` heads, or of the channels of each, from the token before."""
        variant, made = self.config.mechanisms["kv_shift"]["variant"], {}
        for head, row in x.items():
            before = shift(row, [(0.0, 1.0)] * len(row), self.begins())
            half = (len(row[0]) + 1) // 2
            if variant == "half_heads":
                half = 0 if head >= total // 2 else len(row[0])
            made[head] = [torch.cat((a[:half], b[half:])) for a, b in zip(row, before, strict=True)]
        return made

    def value_embedding(self, layer: int, v: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        c, options = self.config, self.config.mechanisms["value_embedding"]
        names = ("up.weight", "gate.weight", "scalar", "table.weight")
        up, gate, scalar, table = (self.of("value_embedding", layer, name) for name in names)
        place, heads = list(v), list(v)
        if options["tables"] is not None:
            layers = range(c.num_hidden_layers) if options["layers"] is None else sorted(set(options["layers"]))
            which = [i for i in layers if self.stored(i, 1)].index(layer) % options["tables"]
            table = self.weights["model.mechanisms.value_embedding.table.weight"].split(c.vocab_size)[which]
            if up is None:
                place = list(range(self.own.num_key_value_heads))
        made: dict[int, list[Tensor]] = {head: [] for head in heads}
        for t, token in enumerate(self.ids):
            row = table[token] if up is None else up @ table[token]
            parts = dict(zip(place, row.split(self.own.head_dim), strict=True))
            for i, head in enumerate(heads):
                opened: Any = 1.0 if scalar is None else scalar[0]
                if gate is not None:
                    opened = options["scale"] * (gate[i] @ self.inputs[layer][t][: gate.shape[1]]).sigmoid()
                made[head].append(v[head][t] + opened * parts[head])
        return made

    def remembers(self, options: dict[str, Any], target: str) -> Sequence[int]:
        """The layers whose stream or values an n-gram memory is added to."""
        if options["target"] != target:
            return ()
        every = range(1 if target == "stream" else self.config.num_hidden_layers)
        return every if options["layers"] is None else sorted(set(options["layers"]))

    def ngram_memory(self, layer: int, x: list[Tensor], block: bool) -> list[Tensor]:
        """What is added at each position. x: what the gate reads."""
        c, options = self.config, self.config.mechanisms["ngram_memory"]
        orders, heads = options["orders"], options["heads"]
        names = ("table.table.weight", "up.weight", "key.weight", "scalar")
        table, up, key, scalar = (self.of("ngram_memory", layer, name, block) for name in names)
        place = self.remembers(options, options["target"]).index(layer)
        first = options["vocab_size"] if options["rows"] is None else options["rows"]
        sizes = primes(first, (place + 1) * len(orders) * heads)[-len(orders) * heads :]
        factors = ngram_factors(max(orders), options["vocab_size"], options["seed"] + 10007 * place)
        added = []
        for t in range(len(self.ids)):
            past = self.ngram_tokens(t)
            rows = []
            for i, order in enumerate(orders):
                mixed = 0
                for factor, token in zip(factors[:order], past[:order], strict=True):
                    mixed ^= (factor * token + 2**63) % 2**64 - 2**63  # as int64
                for head in range(i * heads, (i + 1) * heads):
                    rows.append(table[sum(sizes[:head]) + mixed % sizes[head]])
            row: Any = torch.cat(rows)
            gate: Any = 1.0 if scalar is None else scalar[0]
            if key is not None:
                match = rms_norm(x[t], 1.0, c.norm_eps) @ rms_norm(key @ row, 1.0, c.norm_eps) / math.sqrt(len(x[t]))
                root = match.abs().clamp(min=1e-6).sqrt()
                gate = (root if match > 0 else -root).sigmoid()
            added.append(gate * (row if up is None else up @ row))
        return added

    def ngram_tokens(self, t: int) -> list[int]:
        """The token at t and those before it, as an n-gram memory sees them: `end` beyond a border."""
        options, begins = self.config.mechanisms["ngram_memory"], self.begins()
        end = options["end_of_text"]
        past = [int(self.ids[t])]
        for back in range(1, max(options["orders"])):
            borders = [t - step in begins or int(self.ids[t - step - 1]) == end for step in range(back)]
            past.append((options["vocab_size"] if end is None else end) if any(borders) else int(self.ids[t - back]))
        return past

    # Parts

    def rope(self, x: Tensor, position: int) -> Tensor:
        """Turn channel i against channel i + turned/2 by position·theta^(-2i/turned)."""
        given = self.own.rope_parameters
        turned = int(self.own.head_dim * given.get("partial_rotary_factor", 1.0))
        return rotate(x, [position * given["rope_theta"] ** (-2 * i / turned) for i in range(turned // 2)])

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
        if self.config.unit_offset_norm and f"{name}.weight" in self.weights:
            weight = 1 + weight
        if self.config.norm == "rms_norm":
            return rms_norm(x, weight, self.config.norm_eps)
        return layer_norm(x, weight, self.weights.get(f"{name}.bias"), self.config.norm_eps)

    def project(self, attention: str, part: str, x: list[Tensor], heads: Any) -> dict[int, list[Tensor]]:
        """Queries, keys or values, by head and position."""
        if not heads:
            return {}
        width = self.own.head_dim
        per_position = [self.linear(f"{attention}.{part}_proj", a).split(width) for a in x]
        return dict(zip(heads, map(list, zip(*per_position, strict=True)), strict=True))

    def normed(self, name: str, heads: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        return {head: [self.norm(name, x) for x in row] for head, row in heads.items()}

    def feed_forward(self, layer: int, x: list[Tensor]) -> list[Tensor]:
        name = f"model.layers.{layer}"
        if f"{name}.mlp.key" in self.weights:
            return [self.linear(f"{name}.mlp", a) for a in x]
        act = ACTIVATIONS[self.config.hidden_act]
        sides = ("gate", "up") if self.config.feed_forward == "gated" else ("up",)
        hidden = {side: [self.linear(f"{name}.mlp.{side}_proj", a) for a in x] for side in sides}
        for mechanism in self.config.mechanisms:
            hidden = self.transform_feed_forward_hidden(mechanism, layer, hidden)
        inner = [act(a) for a in hidden[sides[0]]]
        if len(sides) > 1:
            inner = [a * b for a, b in zip(inner, hidden["up"], strict=True)]
        return [self.linear(f"{name}.mlp.down_proj", a) for a in inner]

    def transform_feed_forward_hidden(
        self, name: str, layer: int, hidden: dict[str, list[Tensor]]
    ) -> dict[str, list[Tensor]]:
        """What goes into the feed-forward's activation, "gate" and "up", by position."""
        if name != "short_conv":
            return hidden
        return {side: self.convolved(layer, side, x) for side, x in hidden.items()}


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
            table = self.weights["model.embed_positions.weight"]
            trained = c.image_shape[0] // c.patch_shape[0], c.image_shape[1] // c.patch_shape[1]
            patches = table[len(table) - trained[0] * trained[1] :].T.unflatten(1, trained)
            if grid != trained:
                patches = interpolate(patches[None], size=grid, mode="bicubic", align_corners=False)[0]
            return [table[t] if place is None else patches[:, *place] for t, place in enumerate(self.places)]
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
        given = self.config.rope_parameters
        turned = int(self.config.head_dim * given.get("partial_rotary_factor", 1.0))
        pairs = (divmod(i, turned // 4) for i in range(turned // 2))
        rates = [(axis, given["rope_theta"] ** (-4 * rate / turned)) for axis, rate in pairs]
        return rotate(x, [self.places[position][axis] * rate for axis, rate in rates])


def reference(model: Any, differentiable: bool = False) -> Reference:
    """The reference with `model`'s weights; `differentiable` gives the model's own parameters to autograd."""
    kind = Reference if model.config.is_causal else ImageReference
    return kind(model.config, dict(model.state_dict(keep_vars=differentiable)))
