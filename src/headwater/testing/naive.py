"""Reference implementations, written from the equations: one row, one head and one mechanism at a time.

Nothing here is fast or caches anything. A row of T tokens is a matrix [T, D]; `ByHead` are matrices [T, d] by the
number of the head. The reference of an external mechanism is a subclass of `Reference`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headwater.config.layers import layer_config
from headwater.config.plan import Stage
from headwater.plugins.mechanisms import MECHANISMS

ByHead = dict[int, Tensor]
QKV = tuple[ByHead, ByHead, ByHead]

# Squared lengths below this count as zero.
ZERO = 1e-24
# Score of a token that is not visible.
UNSEEN = -1e30
LOW_RANK = "low_rank_kv"
# Names of the linear layers in pattention's options.
MAPS = dict(q_proj="query", k_proj="key", v_proj="value", o_proj="output", mlp="feed_forward")


# Mechanisms


def choose_value(option: Any, default: Any) -> Any:
    """Choose an option's value: the default where it is None."""
    return default if option is None else option


def mix(weights: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Σ_i weights[i]·tensors[i]."""
    return sum((w * x for w, x in zip(weights, tensors, strict=True)), torch.zeros_like(tensors[0]))


def look_back(x: Tensor, steps: int, previous: Sequence[int | None]) -> Tensor:
    """Return x_{t-steps} of x [T, d], zero before the document. previous: the slot before each; None: there is none."""
    tokens = []
    for t in range(len(x)):
        slot: int | None = t
        for _ in range(steps):
            slot = None if slot is None else previous[slot]
        tokens.append(torch.zeros_like(x[t]) if slot is None else x[slot])
    return torch.stack(tokens)


def shift(x: Tensor, taps: Any, previous: Sequence[int | None]) -> Tensor:
    """y_t = Σ_s taps[s]·x_{t-s} of x [T, d]; a tap is a number, one for each channel, or one for each token [T, 1]."""
    return mix(taps, [look_back(x, steps, previous) for steps in range(len(taps))])


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
        sums = [torch.stack([a + b for a in rows for b in columns]) for rows, columns in sides]
        return sum((pattention(x, keys, value, tau, score, form, top_k) for keys in sums), torch.zeros_like(value[0]))
    scores = key @ x
    if top_k is not None:
        numbers = scores.tolist()
        chosen = sorted(range(len(key)), key=lambda i: (-numbers[i], i))[:top_k]
        scores, value = scores[chosen], value[chosen]

    def over_norm(a: Tensor, length: Tensor) -> Tensor:
        return tau * a / length if length**2 > ZERO else 0 * a

    steps = {
        "gelu": ACTIVATIONS["gelu_new" if form == "tanh" else "gelu"],
        "l2": lambda a: over_norm(a, (a**2).sum().sqrt()),
        "l1": lambda a: over_norm(a, a.abs().sum()),
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
        for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z = ((z ^ (z >> bits)) * factor) % 2**64
        drawn.append(2 * (z % ((2**63 - 1) // vocabulary // 2)) + 1)
    return drawn


def list_primes(start: int, count: int) -> list[int]:
    """The first `count` primes from a number on."""
    numbers: list[int] = []
    while len(numbers) < count:
        if start > 1 and all(start % i for i in range(2, start)):
            numbers.append(start)
        start += 1
    return numbers


# Parts


def rms_norm(x: Tensor, weight: Any, eps: float) -> Tensor:
    return x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn channel i of x [T, d] against channel i + n by the i-th of n angles [T, n]."""
    n = angles.shape[1]
    cos, sin, a, b = angles.cos(), angles.sin(), x[:, :n], x[:, n : 2 * n]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[:, 2 * n :]), dim=1)


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


# Sources of keys and values. `kv` is 0 for keys, 1 for values.


def find_sources(config: Any, layer: int, head: int) -> tuple[int, int]:
    """Find the layers whose keys and values key/value head `head` of layer `layer` attends to."""
    return find_origin(config, layer, head, 0), find_origin(config, layer, head, 1)


def find_origin(config: Any, layer: int, head: int, kv: int, without: str = "") -> int:
    """Find the layer whose keys or values a head attends to: its source's, if it has one, and so on.

    without: a mechanism that does not count in this layer.
    """
    for name in reversed(config.mechanisms):
        source = source_of(config, name, layer, head, kv)
        if name != without and source != layer:
            projected = name == "skip_layer" and config.mechanisms[name]["source"] == "projection"
            return find_origin(config, source, head, kv, without=name if projected else "")
    return layer


def source_of(config: Any, name: str, layer: int, head: int, kv: int) -> int:
    """Find the layer from which a mechanism lets a head of `layer` take its keys or values."""
    depth, options, option = config.num_hidden_layers, config.mechanisms[name], ("keys", "values")[kv]
    if name == "skip_layer":
        groups = config.num_attention_heads // config.num_key_value_heads
        distance = choose_value(options["layers"], 3 * depth // 4)
        skipping = choose_value(options["heads"], 3 * config.num_attention_heads // 4) // groups
        skips = head >= config.num_key_value_heads - skipping and distance <= layer
        return layer - distance if skips else layer
    if name == "svformer":
        receivers = choose_value(options["layers"], range(options["source"] + 1, depth))
        return options["source"] if layer in receivers and options["share"] in (option, "both") else layer
    return layer_map(options, options[option], config)[layer] if name == "kv_source" else layer


def layer_map(options: dict[str, Any], sources: Any, config: Any) -> list[int]:
    """The source of each layer in a map of layers."""
    depth = config.num_hidden_layers
    if sources == "yoco":
        return [min(i, depth // 2) for i in range(depth)]
    if sources == "cross_layer":  # the first layer of the group, among the layers of its kind
        alike = [[j for j in range(depth) if config.slides(j) == config.slides(i)] for i in range(depth)]
        size = options["group_size"]
        return [alike[i][alike[i].index(i) // size * size] for i in range(depth)]
    if sources == "last":  # of layers that share, the last layer of their kind that does not
        start = depth - choose_value(options["num_shared_layers"], depth // 2)
        kinds = options["layer_types"] or [config.slides(i) for i in range(depth)]
        shared = [max(j for j in range(start) if kinds[j] == kinds[i]) for i in range(start, depth)]
        return [*range(start), *shared]
    return sources if isinstance(sources, list) else [*range(depth)]


# The whole model


class Reference:
    """The model with this config and these weights (named as in the state dict), on one row at a time.

    A subclass adds its mechanism's name to `knows`, and overrides the method of its stage, which has the name of the
    mechanism's, or `transform_stage` (other stages of the block), `linear` or `find_sources`. It can read, for rows
    [T, …]: `config`; `layer_config`, as the current layer sees it; `weights`; the row's tokens `ids`, their `position`,
    and which are `real`; by layer the queries' `inputs`, `raw` q, k and v by kind and head; `stream`, what blocks gave.
    Raises `NotImplementedError` for a mechanism that it does not know.
    """

    knows: tuple[str, ...] = tuple(MECHANISMS.built_in)

    def __init__(self, config: Any, weights: dict[str, Tensor]) -> None:
        if unknown := set(config.mechanisms) - set(self.knows):
            raise NotImplementedError(f"There is no naive reference for {', '.join(sorted(unknown))}; write one.")
        self.config = self.layer_config = config
        self.mechanisms: dict[str, dict[str, Any]] = config.mechanisms
        self.weights = weights

    def find_parameter(self, name: str, layer: int, parameter: str) -> Any:
        """Find a mechanism's parameter in a layer, inside attention or at the block; None without one."""
        inner = f"mechanisms.{name.replace('.', '_').replace(':', '_')}.{parameter}"
        inside = self.weights.get(f"model.layers.{layer}.self_attn.{inner}")
        return self.weights.get(f"model.layers.{layer}.{inner}") if inside is None else inside

    def __call__(
        self, ids: Tensor, real: list[bool] | None = None, starts: frozenset[int] | set[int] = frozenset()
    ) -> Tensor:
        """Logits [T, V] of one row, ids [T]. Slots that are not `real` hold padding that nobody may see.

        starts: slots at which a document starts that attention may look beyond, and a shift may not.
        """
        c = self.config
        self.ids, self.starts = ids, starts
        self.real = choose_value(real, [True] * len(ids))
        self.position = (torch.tensor(self.real).long().cumsum(0) - 1).clamp(min=0)
        x = c.embedding_scale * self.weights["model.embed_tokens.weight"][ids]
        if c.position == "learned":
            x = x + self.weights["model.embed_positions.weight"][self.position]
        x = self.run_blocks(self.norm("model.embedding_norm", x) if c.embedding_norm else x)
        head = self.weights["model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"]
        logits, cap = self.norm("model.norm", x) @ head.T, c.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def run_blocks(self, x: Tensor) -> Tensor:
        """The stream after all blocks."""
        c = self.config
        # Per layer: projected q, k, v; attention's input; v after mechanisms; what heads attend to; weights; stream.
        self.raw: list[dict[str, ByHead]] = []
        self.inputs: list[Tensor] = []
        self.final_v: list[ByHead] = []
        self.bank: list[tuple[ByHead, ByHead]] = []
        self.probabilities: list[list[Tensor]] = []
        x = self.apply_stage(Stage.EMBEDDING, 0, x)
        self.stream = [x]
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}"
            entered, inputs = self.attention_inputs(layer, self.apply_stage(Stage.RESIDUAL, layer, x))
            y = self.run_attention(layer, inputs)
            y = self.norm(f"{name}.attention_output_norm", y) if c.output_norms else y
            y = self.apply_stage(Stage.ATTENTION_OUTPUT, layer, y)
            x = y + entered if c.first_residual or layer > 0 else y
            y = self.norm(f"{name}.post_attention_layernorm", entered if c.parallel_residual else x)
            y = self.feed_forward(layer, self.apply_stage(Stage.FEED_FORWARD_INPUT, layer, y))
            y = self.norm(f"{name}.feed_forward_output_norm", y) if c.output_norms else y
            x = x + self.apply_stage(Stage.FEED_FORWARD_OUTPUT, layer, y)
            self.stream.append(x)
            for mechanism in self.mechanisms:
                x = self.transform_block_output(mechanism, layer, x)
        return x

    def attention_inputs(self, layer: int, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the stream, and what queries, keys and values are projected from."""
        entered = x
        for mechanism in self.mechanisms:
            entered = self.transform_block_input(mechanism, layer, entered)
        inputs = {"q": entered, "k": entered, "v": entered, "stream": x}
        for mechanism in self.mechanisms:
            inputs = self.split_attention_inputs(mechanism, layer, inputs)
        stream, norm = inputs.pop("stream"), f"model.layers.{layer}.input_layernorm"
        return stream, {
            kind: self.apply_stage(Stage.ATTENTION_INPUT, layer, self.norm(norm, x)) for kind, x in inputs.items()
        }

    def run_attention(self, layer: int, inputs: dict[str, Tensor]) -> Tensor:
        self.layer_config = layer_config(self.config, layer)
        c, name = self.layer_config, f"model.layers.{layer}.self_attn"
        heads = {
            "q": range(c.num_attention_heads),
            "k": self.list_stored_heads(layer, 0),
            "v": self.list_stored_heads(layer, 1),
        }
        self.inputs.append(inputs["q"])
        q, k, v = (self.project(f"{name}.{kind}_proj", inputs[kind], heads[kind]) for kind in "qkv")
        for mechanism in self.mechanisms:
            q, k, v = self.transform_projections(mechanism, layer, q, k, v)
        if c.qk_norm:
            q = self.norm_heads(f"{name}.q_norm", q)
            k = k if LOW_RANK in self.mechanisms else self.norm_heads(f"{name}.k_norm", k)
        self.raw.append({"q": q, "k": k, "v": v})
        for mechanism in self.mechanisms:
            q, k, v = self.transform_qkv(mechanism, layer, q, k, v)
        self.final_v.append(v)
        if c.position == "rope":
            q = self.rotate_heads(q)
            k = k if LOW_RANK in self.mechanisms else self.rotate_heads(k)
        self.bank.append((k, k if "mla" in self.mechanisms else v))
        pairs = [pair for mechanism in self.mechanisms for pair in self.add_key_values(mechanism, layer)]
        keys, values = ([self.join_pairs(layer, kv, h, pairs) for h in q] for kv in (0, 1))
        weights = self.mixed_weights(layer, self.attention_weights(q, keys, len(pairs)), len(pairs))
        outputs = [weight @ value for weight, value in zip(weights, values, strict=True)]
        for mechanism in self.mechanisms:
            outputs = self.transform_head_outputs(mechanism, layer, outputs)
        return self.linear(f"{name}.o_proj", torch.cat(outputs, dim=1))

    def norm_heads(self, name: str, x: ByHead) -> ByHead:
        return {head: self.norm(name, row) for head, row in x.items()}

    def rotate_heads(self, x: ByHead) -> ByHead:
        return {head: rotate(row, self.compute_angles()) for head, row in x.items()}

    def join_pairs(self, layer: int, kv: int, head: int, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Join the keys or values that a query head sees: the added ones, then the tokens' [T, d]."""
        head = head * self.layer_config.num_key_value_heads // self.layer_config.num_attention_heads
        return torch.stack([*(pair[kv][head] for pair in pairs), *self.find_attended(layer, kv, head)])

    def attention_weights(self, q: ByHead, keys: list[Tensor], pairs: int) -> list[Tensor]:
        """Compute softmax(q·k / √d - slope·distance) over visible slots. pairs: how many keys are added."""
        c, visible = self.layer_config, self.find_visible()
        visible = torch.cat((visible.any(1, keepdim=True).expand(-1, pairs), visible), dim=1)
        distance = torch.nn.functional.pad(self.position[:, None] - self.position, (pairs, 0))
        weights = []
        for h, query in q.items():
            scale = choose_value(c.attention_scale, 1 / math.sqrt(query.shape[1]))
            scores = scale * (query @ keys[h].T)
            if c.attention_softcap is not None:
                scores = c.attention_softcap * (scores / c.attention_softcap).tanh()
            if c.position == "alibi":
                scores = scores - alibi_slope(h, c.num_attention_heads) * distance
            weights.append(scores.masked_fill(~visible, UNSEEN).softmax(1) * visible)
        self.probabilities.append([weight[:, pairs:] for weight in weights])
        return weights

    def mixed_weights(self, layer: int, weights: list[Tensor], pairs: int) -> list[Tensor]:
        """Mix attention weights by a value residual of probabilities; the weights of added pairs stay."""
        options = self.mechanisms.get("value_residual", {})
        if options.get("target") != "probabilities" or layer not in self.list_receivers(options):
            return weights
        mixed = [
            mix(self.two_weights(layer, options), (source, weight[:, pairs:]))
            for source, weight in zip(self.probabilities[options["source"]], weights, strict=True)
        ]
        return [torch.cat((weight[:, :pairs], x), dim=1) for weight, x in zip(weights, mixed, strict=True)]

    # Mechanisms

    def list_previous(self) -> list[int | None]:
        """List the slot of the token before each slot: the last real one, None where a document starts."""
        previous: list[int | None] = []
        last = None
        for t, is_real in enumerate(self.real):
            previous.append(last := None if t in self.starts else last)
            last = t if is_real else last
        return previous

    def find_visible(self) -> Tensor:
        """Find whether slot t attends to slot j, [T, T]: to the real ones up to it, within the window."""
        slots = torch.arange(len(self.real))
        back = slots[:, None] - slots
        window = choose_value(self.layer_config.sliding_window, len(slots))
        return (back >= 0) & (back < window) & torch.tensor(self.real)

    def find_sources(self, layer: int, head: int) -> tuple[int, int]:
        """Find the layers whose keys and values key/value head `head` of layer `layer` attends to."""
        return find_sources(self.config, layer, head)

    def find_attended(self, layer: int, kv: int, head: int) -> Tensor:
        """Find the keys or values that key/value head `head` of `layer` attends to."""
        if LOW_RANK in self.mechanisms:
            return self.expand_latent(layer, kv, head)
        return self.bank[self.find_sources(layer, head)[kv]][kv][head]

    def expand_latent(self, layer: int, kv: int, head: int) -> Tensor:
        """Make the keys or values of a head from the latents of the layer that it attends to."""
        latents = self.bank[self.find_sources(layer, head)[0]][0]
        attention = f"model.layers.{layer}.self_attn"
        name = f"{attention}.mechanisms.{LOW_RANK}.{('keys', 'values')[kv]}"
        x = torch.cat([latents[part] for part in sorted(latents)], dim=1) @ self.weights[name][head].T
        x = x + self.weights[f"{name}_bias"][head] if self.layer_config.qkv_bias else x
        if kv == 0 and self.layer_config.qk_norm:
            x = self.norm(f"{attention}.k_norm", x)
        return rotate(x, self.compute_angles()) if kv == 0 and self.layer_config.position == "rope" else x

    def list_stored_heads(self, layer: int, kv: int) -> list[int]:
        """List the heads of `layer` whose keys or values some layer attends to, or which make up its latent."""
        layers = range(self.config.num_hidden_layers)
        if LOW_RANK in self.mechanisms:
            count = self.mechanisms[LOW_RANK]["heads"] or layer_config(self.config, layer).num_key_value_heads
            is_read = kv == 0 and any(self.find_sources(i, 0)[0] == layer for i in layers)
            return [*range(count)] if is_read else []
        heads = [layer_config(self.config, i).num_key_value_heads for i in layers]
        parts = ((0, 1), ())[kv] if "mla" in self.mechanisms else (kv,)
        return [
            h
            for h in range(heads[layer])
            if any(self.find_sources(i, h)[part] == layer for i in layers if h < heads[i] for part in parts)
        ]

    def transform_block_input(self, name: str, layer: int, x: Tensor) -> Tensor:
        """Return the input of a block's attention."""
        if name == "depth_attention" and (queries := self.list_queries(layer, 1)):
            return self.depth_attention(layer, queries[0], x)
        options = self.mechanisms[name]
        if name == "value_residual" and options["target"] == "hidden" and layer in self.list_receivers(options):
            return mix(self.two_weights(layer, options), (self.stream[options["source"]], x))
        return x

    def split_attention_inputs(self, name: str, layer: int, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of queries "q", keys "k" and values "v", and the residual "stream"."""
        ways = ["q", *(kind for kv, kind in enumerate("kv") if self.list_stored_heads(layer, kv))]
        if name == "depth_attention":
            queries = zip(ways, self.list_queries(layer, 3), strict=False)
            return inputs | {way: self.depth_attention(layer, query, inputs[way]) for way, query in queries}
        if name == "mudd" and layer > 0:
            sums = self.sum_states(
                layer, "", self.stream[:layer], inputs["stream"], [inputs[way] for way in (*ways, "stream")]
            )
            return inputs | dict(zip((*ways, "stream"), sums, strict=True))
        return inputs

    def list_queries(self, layer: int, count: int) -> list[Tensor]:
        """List the queries of attention over depth in a layer, if it has this many; else none."""
        queries = self.find_parameter("depth_attention", layer, "query")
        return [] if queries is None or self.mechanisms["depth_attention"]["queries"] != count else list(queries)

    def depth_attention(self, layer: int, query: Tensor, x: Tensor) -> Tensor:
        """Return what a query reads of the hidden states of earlier layers and of x."""
        options = self.mechanisms["depth_attention"]
        states = [*self.stream[: layer : options["block"]], x]
        written = [states[0], *(b - a for a, b in pairwise(states))]
        keys, scale = [rms_norm(a, 1.0, self.config.norm_eps) for a in written], 1.0
        if options["variant"] == "inkling_2":
            written, scale = keys, 1 / math.sqrt(len(query))
        weights = [(scale * (key @ query)).exp() for key in keys]
        return mix([(weight / sum(weights))[:, None] for weight in weights], written)

    def sum_states(
        self, layer: int, prefix: str, states: list[Tensor], x: Tensor, summands: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return Σ_j a_j(x)·X_j over earlier hidden states and a summand, for each of the summands."""
        up, down, bias = (
            self.find_parameter("mudd", layer, prefix + name) for name in ("up.weight", "down.weight", "bias")
        )
        inner = ACTIVATIONS["gelu"](rms_norm(x, 1.0, self.config.norm_eps) @ up.T)
        weights = (inner @ down.T).unflatten(1, bias.shape) + bias
        return [mix(weights[:, way].T[..., None], [*states, y]) for way, y in enumerate(summands)]

    def add_key_values(self, name: str, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return added keys and values, each by key/value head: [K, d]."""
        options = self.mechanisms[name]
        if name != "persistent_memory" or not self.acts_in(options, layer):
            return []
        key, value = self.find_parameter(name, layer, "key"), self.find_parameter(name, layer, "value")
        count, width = key.shape[1:]
        return [(math.sqrt(width) * key[:, i], math.sqrt(count) * value[:, i]) for i in range(count)]

    def apply_stage(self, stage: Stage, layer: int, x: Tensor) -> Tensor:
        """Apply `transform_stage` of all mechanisms."""
        for mechanism in self.mechanisms:
            x = self.transform_stage(stage, mechanism, layer, x)
        return x

    def transform_stage(self, stage: Stage, name: str, layer: int, x: Tensor) -> Tensor:
        """Transform x at a stage around attention or feed-forward that has no separate method here."""
        options = self.mechanisms[name]
        if name == "embedding_residual" and stage is Stage.RESIDUAL and self.acts_in(options, layer):
            return mix(self.find_parameter(name, layer, "lambdas"), (self.stream[0], x))
        if name == "smear" and stage is Stage.EMBEDDING:
            return self.smear_embedding(options, x)
        if name == "ngram_memory" and stage is Stage.RESIDUAL and layer in self.list_memories(options, "stream"):
            return x + self.ngram_memory(layer, x)
        return self.convolve_stream(layer, stage.name.lower(), x) if name == "short_conv" else x

    def smear_embedding(self, options: dict[str, Any], x: Tensor) -> Tensor:
        """Add to each token's embedding the one before it in the document."""
        strength, gate = (self.find_parameter("smear", 0, parameter)[0] for parameter in ("strength", "gate.weight"))
        eps = torch.finfo(x.dtype).eps
        x = rms_norm(x, 1.0, eps) if options["norm"] == "before" else x
        x = shift(x, (1.0, strength * (x[:, : len(gate)] @ gate).sigmoid()[:, None]), self.list_previous())
        return rms_norm(x, 1.0, eps) if options["norm"] == "after" else x

    def acts_in(self, options: dict[str, Any], layer: int) -> bool:
        """Whether the option `layers` names a layer; by default it names all."""
        return options["layers"] is None or layer in options["layers"]

    def transform_block_output(self, name: str, layer: int, x: Tensor) -> Tensor:
        """Return the input of the next block."""
        options, is_last = self.mechanisms[name], layer == self.config.num_hidden_layers - 1
        states = [*self.stream[: layer + 1], x]
        if name == "mudd" and is_last:
            return self.sum_states(layer, "last.", states[:-1], x, [x])[0]
        if name == "backout" and is_last:
            middle = choose_value(options["layer"], (layer + 1) // 2)
            return x - self.find_parameter(name, layer, "strength") * states[middle + 1]
        if name == "dense_former" and (layer + 1) % options["period"] == 0:
            terms = [j for j in range(layer + 2) if (layer + 1 - j) % options["dilation"] == 0]
            return mix(self.find_parameter(name, layer, "alpha")[: len(terms)], [states[j] for j in terms])
        return x

    def transform_head_outputs(self, name: str, layer: int, outputs: list[Tensor]) -> list[Tensor]:
        """Return what each query head has read."""
        options, c = self.mechanisms[name], self.layer_config
        groups = c.num_attention_heads // c.num_key_value_heads
        sources = [self.find_sources(layer, h // groups)[1] for h in range(len(outputs))]
        if name == "neutreno" and layer > 0:
            learned = self.find_parameter(name, layer, "lambdas")
            factor = options["weight"] if learned is None else learned[0]
            pairs = [[self.raw[i]["v"][h // groups] for i in (0, source)] for h, source in enumerate(sources)]
            return [x + factor * (v0 - v) for x, (v0, v) in zip(outputs, pairs, strict=True)]
        if name == "exclusive" and self.acts_in(options, layer):
            values = [self.final_v[source][h // groups] for h, source in enumerate(sources)]
            return self.exclude_own_values(self.find_parameter(name, layer, "alpha"), outputs, values)
        return self.output_gate(layer, outputs) if name == "output_gate" and self.acts_in(options, layer) else outputs

    def open_gate(self, name: str, layer: int) -> Tensor:
        """Compute a mechanism's gate from the first channels of attention's input, [T, numbers of the gate]."""
        weight, scale = self.find_parameter(name, layer, "gate.weight"), self.mechanisms[name]["scale"]
        return scale * (self.inputs[layer][:, : weight.shape[1]] @ weight.T).sigmoid()

    def output_gate(self, layer: int, outputs: list[Tensor]) -> list[Tensor]:
        gates = self.open_gate("output_gate", layer).chunk(len(outputs), dim=1)
        return [gate * x for gate, x in zip(gates, outputs, strict=True)]

    def exclude_own_values(self, alpha: Tensor | None, outputs: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        """Remove from each head's output its part along the token's own value."""
        results = []
        for h, (y, v) in enumerate(zip(outputs, values, strict=True)):
            strength, square = 1.0 if alpha is None else alpha[h].tanh(), (v * v).sum(1, keepdim=True)
            along = (y * v).sum(1, keepdim=True) / square.clamp(min=ZERO) * v
            results.append(torch.where(square > ZERO, y - strength * along, y))
        return results

    def list_receivers(self, options: dict[str, Any]) -> list[int]:
        """List the layers of a value residual that have something to mix into."""
        depth, kv = self.config.num_hidden_layers, {"keys": 0, "values": 1}.get(options["target"])
        layers = choose_value(options["layers"], range(options["source"] + 1, depth))
        layers = [layer for layer in layers if kv is None or self.list_stored_heads(layer, kv)]
        if options["mode"] == "sparse" and options["layers"] is None:
            return layers[-max(1, 3 * depth // 8) :]
        return layers

    def two_weights(self, layer: int, options: dict[str, Any]) -> tuple[Any, Any]:
        """Return λ1 and λ2 of a value residual from one source."""
        mode, fixed = options["mode"], {"constant": 2.0, "sparse": 5.0}
        lambdas = self.find_parameter("value_residual", layer, "lambdas")
        if mode == "identity":
            return 0.5, 0.5
        if mode in fixed:
            return choose_value(options["weight"], fixed[mode]), 1.0
        if mode == "learnable":
            return tuple(lambdas)
        share = self.weights["model.mechanisms.value_residual.logits"].softmax(0)
        share = share[self.list_receivers(options).index(layer)]
        return self.weights["model.mechanisms.value_residual.scale"][0] * share, lambdas[0]

    def transform_projections(self, name: str, layer: int, q: ByHead, k: ByHead, v: ByHead) -> QKV:
        """Transform queries, keys and values before their norms."""
        if name != "short_conv":
            return q, k, v
        sites = zip((q, k, v), ("queries", "keys", "values"), strict=True)
        q, k, v = (dict(zip(x, self.short_conv(layer, site, list(x.values())), strict=True)) for x, site in sites)
        return q, k, v

    def short_conv(self, layer: int, site: str, x: Sequence[Tensor]) -> Sequence[Tensor]:
        """Convolve each channel of x, by head, over the document's last tokens.

        With a map of attention's input, one more number for each tap of a head; then the sum is scaled.
        """
        taps, map_ = (self.find_parameter("short_conv", layer, site + name) for name in ("_taps", "_map.weight"))
        if taps is None:
            return x
        residual, window, convolved = float(self.mechanisms["short_conv"]["residual"]), len(taps), []
        for h, row in enumerate(x):
            by_token, scale = taps[:, None, h], 1.0
            if map_ is not None:
                dynamic = self.inputs[-1] @ map_[h * window : (h + 1) * window].T
                by_token, scale = by_token + dynamic.T[:, :, None], 1 / math.sqrt(2 * window + 1)
            convolved.append(scale * (residual * row + shift(row, by_token, self.list_previous())))
        return convolved

    def convolve_stream(self, layer: int, site: str, x: Tensor) -> Tensor:
        """Convolve the tensor x of a site outside attention."""
        taps = self.find_parameter("short_conv", layer, f"{site}_taps")
        return x if taps is None else torch.cat([*self.short_conv(layer, site, x.split(taps.shape[2], dim=1))], dim=1)

    def transform_qkv(self, name: str, layer: int, q: ByHead, k: ByHead, v: ByHead) -> QKV:
        """Transform queries, keys and values by the mechanism `name`."""
        options = self.mechanisms[name]
        if name == "kv_shift":
            return self.kv_shift(layer, q, k, v)
        if name == "value_embedding" and v and self.acts_in(options, layer):
            return q, k, self.value_embedding(layer, v)
        if name == "ngram_memory" and v and layer in self.list_memories(options, "values"):
            added = self.ngram_memory(layer, self.inputs[layer]).split(self.layer_config.head_dim, dim=1)
            return q, k, {h: x + y for (h, x), y in zip(v.items(), added, strict=True)}
        if name == "value_residual" and layer in self.list_receivers(options):
            return self.value_residual(layer, {"queries": q, "keys": k, "values": v})
        return q, k, v

    def kv_shift(self, layer: int, q: ByHead, k: ByHead, v: ByHead) -> QKV:
        options, c = self.mechanisms["kv_shift"], self.layer_config
        if not options["variant"].startswith("half"):
            weights = (q, "gamma"), (k, "alpha"), (v, "beta")
            q, k, v = (self.shift_heads(layer, x, parameter) for x, parameter in weights)
            return q, k, v
        projections = (
            (q, "queries", c.num_attention_heads),
            (k, "keys", c.num_key_value_heads),
            (v, "values", c.num_key_value_heads),
        )
        q, k, v = (self.shift_halves(x, total) if options[name] else x for x, name, total in projections)
        return q, k, v

    def shift_heads(self, layer: int, x: ByHead, parameter: str) -> ByHead:
        """Mix each head's tokens with those before them, with the taps of KV shift that `parameter` holds."""
        taps, variant = self.find_parameter("kv_shift", layer, parameter), self.mechanisms["kv_shift"]["variant"]
        if taps is None:
            return x
        if variant != "free":
            current = taps.sigmoid() if variant == "gate" else taps.clamp(0, 1)
            taps = torch.stack((current, 1 - current))
        return {head: shift(row, taps[:, i], self.list_previous()) for i, (head, row) in enumerate(x.items())}

    def shift_halves(self, x: ByHead, total: int) -> ByHead:
        """Take the second half of all `total` heads, or of the channels of each, from the token before."""
        by_head = self.mechanisms["kv_shift"]["variant"] == "half_heads"
        halved = {}
        for head, row in x.items():
            width = row.shape[1]
            half = (0 if head >= total // 2 else width) if by_head else (width + 1) // 2
            halved[head] = torch.cat((row[:, :half], look_back(row, 1, self.list_previous())[:, half:]), dim=1)
        return halved

    def value_residual(self, layer: int, heads: dict[str, ByHead]) -> QKV:
        """Mix queries, keys or values with those of earlier layers."""
        options = self.mechanisms["value_residual"]
        receiving = heads.get(options["target"])
        if receiving:
            if options["mode"] == "dense":
                earlier = self.final_v if options["recursive"] else [raw["v"] for raw in self.raw]
                sources = [values for values in earlier[:layer] if values.keys() >= receiving.keys()]
                weights: Any = self.find_parameter("value_residual", layer, "lambdas")
            else:
                sources = [self.raw[options["source"]][options["target"][0]]]
                weights = self.two_weights(layer, options)
            mixed = {h: mix(weights, [*(source[h] for source in sources), x]) for h, x in receiving.items()}
            heads = heads | {options["target"]: mixed}
        return heads["queries"], heads["keys"], heads["values"]

    def value_embedding(self, layer: int, v: ByHead) -> ByHead:
        c, options = self.config, self.mechanisms["value_embedding"]
        names = ("up.weight", "scalar", "table.weight")
        up, scalar, table = (self.find_parameter("value_embedding", layer, name) for name in names)
        heads = list(v)
        if options["tables"] is not None:
            layers = sorted({*choose_value(options["layers"], range(c.num_hidden_layers))})
            number = [i for i in layers if self.list_stored_heads(i, 1)].index(layer) % options["tables"]
            table = self.weights["model.mechanisms.value_embedding.table.weight"].split(c.vocab_size)[number]
            heads = list(range(self.layer_config.num_key_value_heads)) if up is None else heads
        rows = table[self.ids] if up is None else table[self.ids] @ up.T
        added = dict(zip(heads, rows.split(self.layer_config.head_dim, dim=1), strict=True))
        opened: Any = [1.0 if scalar is None else scalar[0]] * len(v)
        if self.find_parameter("value_embedding", layer, "gate.weight") is not None:
            opened = self.open_gate("value_embedding", layer).T[:, :, None]
        return {head: x + opened[i] * added[head] for i, (head, x) in enumerate(v.items())}

    def list_memories(self, options: dict[str, Any], target: str) -> Sequence[int]:
        """List the layers to whose stream or values an n-gram memory is added."""
        if options["target"] != target:
            return ()
        default = range(1 if target == "stream" else self.config.num_hidden_layers)
        return sorted({*choose_value(options["layers"], default)})

    def ngram_memory(self, layer: int, x: Tensor) -> Tensor:
        """Return what is added to each token. x: the gate's input."""
        c, options = self.config, self.mechanisms["ngram_memory"]
        orders, heads = options["orders"], options["heads"]
        names = ("table.table.weight", "up.weight", "key.weight", "scalar")
        table, up, key, scalar = (self.find_parameter("ngram_memory", layer, name) for name in names)
        index = self.list_memories(options, options["target"]).index(layer)
        least = choose_value(options["rows"], options["vocab_size"])
        sizes = list_primes(least, (index + 1) * len(orders) * heads)[-len(orders) * heads :]
        factors = ngram_factors(max(orders), options["vocab_size"], options["seed"] + 10007 * index)
        found_rows = []
        for t in range(len(self.ids)):
            past = self.ngram_tokens(t)
            for i, order in enumerate(orders):
                mixed = 0
                for factor, token in zip(factors[:order], past[:order], strict=True):
                    mixed ^= (factor * token + 2**63) % 2**64 - 2**63  # as int64
                for head in range(i * heads, (i + 1) * heads):
                    found_rows.append(sum(sizes[:head]) + mixed % sizes[head])
        rows = table[found_rows].view(len(self.ids), -1)
        gate: Any = 1.0 if scalar is None else scalar[0]
        if key is not None:
            match = rms_norm(x, 1.0, c.norm_eps) * rms_norm(rows @ key.T, 1.0, c.norm_eps)
            match = match.sum(1, keepdim=True) / math.sqrt(x.shape[1])
            root = match.abs().clamp(min=1e-6).sqrt()
            gate = torch.where(match > 0, root, -root).sigmoid()
        return gate * (rows if up is None else rows @ up.T)

    def ngram_tokens(self, t: int) -> list[int]:
        """List the token at t and those before it, as an n-gram memory sees them: `end` beyond a border."""
        options, previous = self.mechanisms["ngram_memory"], self.list_previous()
        end, past = options["end_of_text"], [int(self.ids[t])]
        slot: int | None = t
        for _ in range(1, max(options["orders"])):
            slot = None if slot is None else previous[slot]
            slot = None if slot is None or int(self.ids[slot]) == end else slot
            past.append(choose_value(end, options["vocab_size"]) if slot is None else int(self.ids[slot]))
        return past

    # Parts

    def compute_angles(self) -> Tensor:
        """Compute RoPE's angles [T, turned/2]: position·theta^(-2i/turned) turns channel i against i + turned/2."""
        rope = self.layer_config.rope_parameters
        turned = int(self.layer_config.head_dim * rope.get("partial_rotary_factor", 1.0))
        rates = [rope["rope_theta"] ** (-2 * i / turned) for i in range(turned // 2)]
        return self.position[:, None] * torch.tensor(rates, dtype=torch.float64)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer, or the pattention that replaces it."""
        if f"{name}.key" in self.weights:
            tau, options = self.weights[f"{name}.scale.tau"][0], self.mechanisms["pattention"]
            key, value = self.weights[f"{name}.key"], self.weights[f"{name}.value"]
            map_name = MAPS[name.rpartition(".")[2]]
            top_k = options["top_k"].get(map_name) if isinstance(options["top_k"], dict) else options["top_k"]
            heads = options["product_heads"] if map_name in (options["product_keys"] or []) else 0
            form = options["score"], options["gelu"], top_k, heads
            return torch.stack([pattention(a, key, value, tau, *form) for a in x])
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights.get(f"{name}.weight", 1.0)
        if self.config.unit_offset_norm and f"{name}.weight" in self.weights:
            weight = 1 + weight
        if self.config.norm == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
        return rms_norm(x, weight, self.config.norm_eps) + self.weights.get(f"{name}.bias", 0.0)

    def project(self, name: str, x: Tensor, heads: Sequence[int]) -> ByHead:
        """Project queries, keys or values."""
        width = self.layer_config.head_dim
        return dict(zip(heads, self.linear(name, x).split(width, dim=1), strict=True)) if heads else {}

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        if f"{name}.key" in self.weights:
            return self.linear(name, x)
        sides = ("gate", "up") if self.config.feed_forward == "gated" else ("up",)
        hidden = {side: self.linear(f"{name}.{side}_proj", x) for side in sides}
        for mechanism in self.mechanisms:
            hidden = self.transform_feed_forward_hidden(mechanism, layer, hidden)
        inner = ACTIVATIONS[self.config.hidden_act](hidden[sides[0]])
        return self.linear(f"{name}.down_proj", inner * hidden["up"] if len(sides) > 1 else inner)

    def transform_feed_forward_hidden(self, name: str, layer: int, hidden: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the feed-forward's activation, "gate" and "up"."""
        if name != "short_conv":
            return hidden
        return {side: self.convolve_stream(layer, side, x) for side, x in hidden.items()}
