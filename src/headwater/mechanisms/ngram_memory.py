"""N-gram memory: rows of tables, found by hashes of the last tokens' ids, added to the stream or to the values.

    e_t = concat over orders n and heads j of E[o_nj + h_n(t) mod p_nj]        h_n(t) = ⊕_{s<n} a_s·id_{t-s}

    x_t := x_t + g(x_t, e_t)·U·e_t        or        v'_t = v_t + g(x_t, e_t)·U·e_t

⊕ is the bitwise exclusive or of 64-bit integers. Each order and head has its own prime p_nj, the next ones from `rows`
on, and so its own rows of the table E, which begin at o_nj. a_s are odd numbers drawn by SplitMix64 from `seed`, small
enough that a_s times an id is below 2^63. The hash depends on the options and the layer's place among the layers that
have a memory, and on nothing else: it is the same on every machine and in every version. One option, `vocab_size`, is
the number of ids that the hash was made for. It stays when the model's vocabulary is resized, and so do all rows. Ids
beyond it hash like the others, the first of them as a missing token does, and products wrap around as int64.

The hash and the primes are from transformers' `qwen4_exp`. Engram (arXiv 2601.07372)
hashes in the same way, with other multipliers. Both add to the stream before some layers, through g = σ(sign(c)·√|c|),
where c is the product of x_t and K·e_t, both RMS-normed, divided by √D (`gate: match`). modded-nanogpt
(github.com/KellerJordan/modded-nanogpt) has one table of bigrams and a scalar per layer.

Departures: an n-gram ends at the start of the document, where missing tokens have the id `vocab_size`. Qwen's border is
the end-of-text token, which also stands for what is missing: with `end_of_text` ours is both. The norms of the gate
have no weights, its x_t is one stream and not several, and no convolution follows it: `short_conv` is one. Engram maps
ids to normalized ones before it hashes them, and we do not. The layers of modded-nanogpt read one table; each of ours
has its own. The memory of values is our addition.
"""

from collections.abc import Sequence
from math import isqrt
from typing import Literal, Self

import torch
from torch import Tensor, nn

from headwater.config.layers import layer_config
from headwater.config.plan import LayerPlan, Source, TailPart
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import QKV, Context, Cost, Mechanism, OptionValues, Reach, Tail
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import SAME, WRITES, Dim, GrowthMap, fixed_axes
from headwater.mechanisms.layer_values import layers_with_values
from headwater.mechanisms.shared_options import check_layers, check_least, identity_with
from headwater.mechanisms.shift import earlier, read_tail
from headwater.util.errors import HeadwaterError

GateKind = Literal["none", "scalar", "match"]
# Increments and multipliers of SplitMix64 (Steele, Lea and Flood, 2014), and the step between the layers' seeds.
GAMMA, MIX_1, MIX_2, LAYER = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 10007
LARGEST = 2**63 - 1
# The gate clamps |c| here before the square root, whose slope at 0 is infinite.
LEAST = 1e-6


def split_mix(state: int) -> int:
    """The number that SplitMix64 draws in a state, from 0 to 2^64 - 1."""
    z = (state + GAMMA) % 2**64
    z = (z ^ z >> 30) * MIX_1 % 2**64
    z = (z ^ z >> 27) * MIX_2 % 2**64
    return z ^ z >> 31


def draw_multipliers(count: int, vocab_size: int, seed: int = 0, table_index: int = 0) -> list[int]:
    """Draw a_0, a_1, …: odd numbers whose products with ids up to `vocab_size` are below 2^63."""
    half = max(1, LARGEST // vocab_size // 2)
    return [2 * (split_mix((seed + LAYER * table_index + GAMMA * s) % 2**64) % half) + 1 for s in range(1, count + 1)]


def list_primes(start: int, skipped: int, count: int) -> list[int]:
    """List `count` primes, the smallest from `start` on after `skipped` of them."""
    numbers: list[int] = []
    number = max(2, start)
    while len(numbers) < skipped + count:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            numbers.append(number)
        number += 1
    return numbers[skipped:]


class NGramTable(KeepsPrecision, Mechanism):
    """Rows of a table for the n-grams that end at each token.

    Args
        vocab_size: how many ids there are.
        row_width: numbers in a row. orders: the lengths n, increasing. heads: hashes, and so rows, of each.
        rows: each head has at least this many rows, a prime number of them; default the vocabulary's size.
        end_of_text: an id after which n-grams restart, and which replaces missing tokens; default: none does, and
            the id `vocab_size` stands for them.
        seed: of the multipliers. table_index: the table's number among the model's, from 0: each has other multipliers
            and primes. zero: the table starts at zero.

    Parameters: `table.weight` [Σ p_nj, row_width], order after order, and in each head after head. In a
    `PreTrainedModel` of your own, call `restore_constants()` in `_init_weights`.

        >>> import torch
        >>> from headwater.mechanisms import NGramTable
        >>> table = NGramTable(1000, row_width=16, orders=[2, 3], heads=4)
        >>> table(torch.randint(1000, (3, 10))).shape
        torch.Size([3, 10, 128])
    """

    factors: Tensor
    moduli: Tensor
    first_row: Tensor

    def __init__(
        self,
        vocab_size: int,
        row_width: int,
        orders: Sequence[int] = (2, 3),
        heads: int = 4,
        rows: int | None = None,
        end_of_text: int | None = None,
        seed: int = 0,
        table_index: int = 0,
        *,
        zero: bool = False,
    ) -> None:
        super().__init__()
        self.orders, self.heads = tuple(orders), heads
        self.lookback, self.end_of_text = max(orders) - 1, end_of_text
        self.missing_id = vocab_size if end_of_text is None else end_of_text
        self.sizes = self.choose_rows(vocab_size, orders, heads, rows, table_index)
        self.multipliers = draw_multipliers(self.lookback + 1, vocab_size, seed, table_index)
        for name, value in self.constants().items():
            self.register_buffer(name, value, persistent=False)
        self.zero = zero
        self.table = nn.Embedding(sum(self.sizes), row_width)
        self.tail_name = f"{NGramMemory.registered_name()}.id"
        self.reset_parameters()

    @staticmethod
    def choose_rows(
        vocab_size: int, orders: Sequence[int], heads: int, rows: int | None, table_index: int
    ) -> list[int]:
        """Choose p_nj, the number of rows of each order and head."""
        count = len(orders) * heads
        return list_primes(vocab_size if rows is None else rows, table_index * count, count)

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        return torch.zeros(self.table.weight.shape) if self.zero else None

    def constants(self) -> dict[str, Tensor]:
        sizes = torch.tensor(self.sizes).view(len(self.orders), self.heads)
        first_row = torch.tensor([0, *self.sizes[:-1]]).cumsum(0).view_as(sizes)
        return {"factors": torch.tensor(self.multipliers), "moduli": sizes, "first_row": first_row}

    def forward(self, ids: Tensor, reach: Reach = None, tail: Tail | None = None) -> Tensor:
        """ids [B, T] -> [B, T, numbers of the rows]. reach, tail: as in `Context`."""
        return self.table(self.find_rows(self.list_previous_ids(ids, reach, tail))).flatten(2)

    def list_previous_ids(self, ids: Tensor, reach: Reach, tail: Tail | None) -> list[Tensor]:
        """The ids of each token and of those before it, [B, T] each."""
        # Ids are stored plus 1, so that 0 means no token, also in the cache.
        tokens_B1T1 = (ids.long() + 1)[:, None, :, None]
        previous = read_tail(tail, self.tail_name, tokens_B1T1, self.lookback, reach)
        is_known, ids = None, ids.long()
        past = [ids]
        for step in (earlier(tokens_B1T1, back, reach, previous) for back in range(1, self.lookback + 1)):
            ids_BT = step[:, 0, :, 0]
            is_known = ids_BT > 0 if is_known is None else is_known & (ids_BT > 0)
            if self.end_of_text is not None:
                is_known = is_known & (ids_BT != self.end_of_text + 1)
            past.append(torch.where(is_known, ids_BT - 1, self.missing_id))
        return past

    def find_rows(self, past: list[Tensor]) -> Tensor:
        """The rows in the table of the n-grams of ids, [B, T, orders·heads]."""
        mixed_BT, rows = past[0] * self.factors[0], []
        for order in range(2, self.lookback + 2):
            mixed_BT = mixed_BT ^ past[order - 1] * self.factors[order - 1]
            if order in self.orders:
                index = self.orders.index(order)
                rows.append(mixed_BT.unsqueeze(2) % self.moduli[index] + self.first_row[index])
        return torch.cat(rows, dim=2)

    # Capabilities

    describe_axes = fixed_axes(SAME)


class NGramMemory(KeepsPrecision, Mechanism):
    """Adds to each token what tables hold for the n-grams of ids that end there.

    Args
        table: gives e_t for ids. width: of y.
        rank: numbers of e_t, if a linear map makes what is added of them; default: it is added directly.
        gate: "none"; "scalar": one learned number, initially 1; "match": g = σ(sign(c)·√|c|), where c is the product of
            x_t and a linear map of e_t, both normed, divided by √D.
        channels: D, the width of x; for "match" only.
        init: "random"; "zero": at first nothing is added.
        head_dim: of y, if it is values; default: y is the stream.

    Parameters: those of `table`; `up.weight` [width, rank] if there is a rank; `key.weight` [D, numbers of e_t] for
    "match", `scalar` [1] for "scalar".

        >>> import torch
        >>> from headwater.mechanisms import NGramMemory, NGramTable
        >>> memory = NGramMemory(NGramTable(1000, row_width=8), 64, gate="match", channels=64)
        >>> x, ids = torch.randn(3, 10, 64), torch.randint(1000, (3, 10))
        >>> memory(x, x, memory.table(ids)).shape
        torch.Size([3, 10, 64])
    """

    source = "tables read by the last tokens' ids"
    order = 60
    paper = "2601.07372"
    needs_input_ids = True

    class Options:
        target: Literal["stream", "values"] = "stream"  # whether it adds to the residual stream or to values
        orders: list[int] | None = None  # lengths n; default: [2, 3]
        heads: int = 4  # number of hashes, and so of rows read, for each order
        rows: int | None = None  # minimum number of rows for each head; default: vocab_size
        rank: int | None = None  # width of a row, which a linear map widens; default: no map
        gate: GateKind = "none"  # scalar: a learned number; match: by how the row fits x_t
        init: Literal["random", "zero"] = "random"  # zero: for adding it to a trained model
        end_of_text: int | None = None  # id after which n-grams restart
        seed: int = 0  # seed of the hashes
        vocab_size: int | None = None  # number of ids that the hashes are made for; filled in
        layers: list[int] | None = None  # layers with a memory; default: the first, or for values all

        def __post_init__(self) -> None:
            if self.orders is None:
                self.orders = [2, 3]

    def __init__(
        self,
        table: NGramTable,
        width: int,
        rank: int | None = None,
        gate: GateKind = "none",
        channels: int = 0,
        init: Literal["random", "zero"] = "random",
        head_dim: int | None = None,
        *,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.table, self.init_mode, self.head_dim, self.eps = table, init, head_dim, eps
        self.up = nn.Linear(rank, width, bias=False) if rank else None
        self.key = nn.Linear(rank or width, channels, bias=False) if gate == "match" else None
        self.scalar = fp32_parameter(1) if gate == "scalar" else None
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        if parameter == "scalar":
            return torch.ones(1)
        return torch.zeros(self.up.weight.shape) if parameter == "up.weight" and self.init_mode == "zero" else None

    def forward(self, y: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        """y, the stream [B, T, width] or values [B, heads, T, d]; x [B, T, D], for the gate; e_t [B, T, n] -> y."""
        factor = None if self.scalar is None else self.scalar.to(y.dtype)
        if self.key is not None:
            channels = x.shape[-1:]
            normed_BTD = nn.functional.rms_norm(x, channels, eps=self.eps)
            key_BTD = nn.functional.rms_norm(self.key(rows), channels, eps=self.eps)
            match_BT1 = (normed_BTD * key_BTD).sum(-1, keepdim=True) / x.shape[-1] ** 0.5
            factor = (match_BT1.sign() * match_BT1.abs().clamp(min=LEAST).sqrt()).sigmoid().to(y.dtype)
        added = (rows if self.up is None else self.up(rows)).to(y.dtype)
        if self.head_dim is not None:
            added = added.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            factor = factor.unsqueeze(1) if self.key is not None else factor
        return y + added if factor is None else torch.addcmul(y, factor, added)

    def update_residual(self, x: Tensor, context: Context) -> Tensor:
        return self(x, x, self.table(context.ids, context.reach, context.tail))

    def transform_qkv(self, x: QKV, context: Context) -> QKV:
        rows = self.table(context.ids, context.reach, context.tail)
        return x._replace(v=self(x.v, context.x, rows))

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_layers(cls, options, config)
        orders = options["orders"]
        if not orders or orders[0] < 2 or orders != sorted(set(orders)):
            raise HeadwaterError(
                f"Mechanism 'ngram_memory': orders must be increasing numbers from 2 on, such as [2, 3], not {orders}."
            )
        check_least(cls, options, heads=1, rank=1, rows=2, vocab_size=1)
        if options["end_of_text"] is not None and not 0 <= options["end_of_text"] < config.vocab_size:
            raise HeadwaterError(
                f"Mechanism 'ngram_memory': end_of_text must be a token's id, from 0 to {config.vocab_size - 1}, not "
                f"{options['end_of_text']}."
            )

    @classmethod
    def list_layers(cls, options: OptionValues, config: HeadwaterConfig) -> list[int]:
        """The layers that are to have a memory."""
        if options["layers"] is not None:
            return sorted(set(options["layers"]))
        return [0] if options["target"] == "stream" else list(range(config.num_hidden_layers))

    @classmethod
    def count_channels(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> int:
        """The numbers that a layer's memory adds to a token."""
        return config.hidden_size if options["target"] == "stream" else len(plan.v_heads) * config.head_dim

    @classmethod
    def find_row_width(cls, options: OptionValues, width: int) -> int:
        """Count the numbers in a row of the table. Raises `HeadwaterError` if the rows cannot be of one size."""
        width, count = options["rank"] or width, len(options["orders"]) * options["heads"]
        if width % count:
            raise HeadwaterError(
                f"Mechanism 'ngram_memory': {width} numbers cannot be divided among {len(options['orders'])} orders of "
                f"{options['heads']} heads; choose a rank that is a multiple of {count}."
            )
        return width // count

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        chosen = cls.list_layers(options, config)
        tail: tuple[TailPart, int] = "id", max(options["orders"]) - 1
        values = options["target"] == "values"
        new = list(plans)
        for layer in layers_with_values(cls, options, chosen, plans) if values else chosen:
            cls.find_row_width(options, cls.count_channels(options, layer_config(config, layer), plans[layer]))
            new[layer] = plans[layer].acting(cls, cls.transform_qkv if values else cls.update_residual, [tail])
        return new

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        width, match = cls.count_channels(options, config, plan), options["gate"] == "match"
        table_index = cls.list_layers(options, config).index(plan.index)
        form = {name: options[name] for name in ("vocab_size", "orders", "heads", "rows")}
        rows = sum(NGramTable.choose_rows(**form, table_index=table_index))
        table, rank = rows * cls.find_row_width(options, width), options["rank"] or width
        maps = (options["rank"] or 0) * width + match * rank * config.hidden_size
        return Cost(
            parameters=table + maps + (options["gate"] == "scalar"),
            flops=2 * maps,
            # Autograd keeps the row numbers (int64), the inputs of the maps, and what a gate multiplies; for "match"
            # also what is normed, the results, and the numbers between c and g.
            saved=2 * len(options["orders"]) * options["heads"]
            + (options["rank"] or 0)
            + (options["gate"] != "none") * width
            + match * ((3 + (options["target"] == "stream")) * config.hidden_size + 7),
            unread_parameters=table,
        )

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        width = cls.count_channels(options, config, plan)
        table = NGramTable(
            row_width=cls.find_row_width(options, width),
            table_index=cls.list_layers(options, config).index(plan.index),
            zero=options["init"] == "zero" and options["rank"] is None,
            **{name: options[name] for name in ("vocab_size", "orders", "heads", "rows", "end_of_text", "seed")},
        )
        return cls(
            table,
            width,
            options["rank"],
            options["gate"],
            config.hidden_size,
            options["init"],
            config.head_dim if options["target"] == "values" else None,
            eps=config.norm_eps,
        )

    # Capabilities

    @classmethod
    def complete_options(cls, options: OptionValues, config: HeadwaterConfig) -> OptionValues:
        return options if options["vocab_size"] is not None else options | {"vocab_size": config.vocab_size}

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        grows = growth.widens if options["target"] == "stream" else growth.extends("kv")
        if grows and options["rank"] is None:
            raise HeadwaterError(
                "Mechanism 'ngram_memory' has rows as wide as the tensor they are added to, one part per hash; grow "
                "other sizes, or start from a model with a rank."
            )
        if growth.widens and options["gate"] == "match":
            raise HeadwaterError(
                "Mechanism 'ngram_memory' divides its gate by √hidden_size with gate 'match'; grow other sizes."
            )
        if not growth.deepens:
            return options
        # Only the first copies: a layer's hash depends on its index among the layers with a memory.
        return options | {"layers": [growth.first_copy(layer) for layer in cls.list_layers(options, config)]}

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        if parameter == "up.weight":
            return (WRITES if self.head_dim is None else Dim("v"), SAME)
        return (SAME,) if parameter == "scalar" else (SAME, SAME)

    find_identity_options = identity_with(init="zero")

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {} if self.scalar is None else {"g": Shown(self.scalar)}
