"""Value embeddings: a row of a table, read by token id, added to the values. From nanochat and modded-nanogpt.

    v'_t = v_t + g(x_t)·E[token_t]        g(x) = s·σ(W·x[:n]), one number per key/value head

x_t is the normed input of attention. In nanochat (github.com/karpathy/nanochat) every second layer, the last included,
has a table of its own; g is 2·σ of the first 32 channels, in later versions 3·σ of the first 12. modded-nanogpt
(github.com/KellerJordan/modded-nanogpt) has a few tables, each read by an early and a late layer; its older versions
have a scalar in place of the gate. There is no paper; nanochat calls it a value residual, after ResFormer
(arXiv 2410.17897), whose values come from a layer and not from a table.

Departures: a table of `rank` numbers per token, of which a linear map of each layer makes values, U·E[token], is our
addition. W starts at 0, which gives g = s/2, as in nanochat's first versions; in those with 3·σ it starts uniform in
[0, 0.02). Tables are initialized normal with standard deviation 1/√D, that of the uniform numbers in nanochat.
"""

from typing import Literal, Self

import torch
from torch import Tensor, nn

from headwater.config.layers import layer_config
from headwater.config.plan import Heads, LayerPlan, Source, choose_heads
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import QKV, Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import SAME, Dim, GrowthMap
from headwater.mechanisms.layer_values import layers_with_values
from headwater.mechanisms.shared_options import (
    check_channels,
    check_layers,
    check_least,
    identity_with,
    is_chosen,
    list_acting_layers,
)
from headwater.util.errors import HeadwaterError

Gate = Literal["sigmoid", "scalar", "none"]
SHARED = Source("shared", "value_embedding", -1)


class ValueEmbedding(KeepsPrecision, Mechanism):
    """Adds to each value a row of a table, by the token's id, through a gate that the layer's input opens.

    Args
        heads, width: of the values.
        vocab_size: rows of the table; 0: the rows are given to `forward`, from a table of several layers.
        rank: numbers per row, of which a linear map makes values; default heads·width, without a map.
        gate: "sigmoid"; "scalar": one learned number, initially 1; "none".
        channels: how many channels of x the sigmoid's gate reads, the first ones.
        scale: s of that gate.
        init: "random": the table is drawn. "zero": at first nothing is added.

    Parameters: `table.weight` [vocab_size, rank]; `up.weight` [heads·width, rank] if there is a rank; `gate.weight`
    [heads, channels], initially zero, or `scalar` [1].

        >>> import torch
        >>> from headwater.mechanisms import ValueEmbedding
        >>> more = ValueEmbedding(heads=4, width=64, vocab_size=1000)
        >>> v, x, ids = torch.randn(3, 4, 16, 64), torch.randn(3, 16, 512), torch.randint(1000, (3, 16))
        >>> more(v, x, ids).shape
        torch.Size([3, 4, 16, 64])
    """

    source = "a table read by token id"
    order = 50
    needs_input_ids = True

    class Options:
        tables: int | None = None  # number of tables, shared by the layers in turn; default: one per layer
        rank: int | None = None  # width of a row, which a map of each layer widens; default: no map
        gate: Gate = "sigmoid"  # sigmoid of the input, a learned scalar, or none
        channels: int = 12  # n, the number of channels that the gate reads
        scale: float | int = 2.0  # s, the largest gate
        init: Literal["random", "zero"] = "random"  # zero: for adding it to a trained model
        layers: list[int] | None = None  # layers in which it acts; default: layers with their own values

    def __init__(
        self,
        heads: int,
        width: int,
        vocab_size: int = 0,
        rank: int | None = None,
        gate: Gate = "sigmoid",
        channels: int = 12,
        scale: float = 2.0,
        init: Literal["random", "zero"] = "random",
        *,
        std: float = 0.02,
        shared: tuple[int, int, Heads] = (0, 0, None),
    ) -> None:
        super().__init__()
        self.width, self.channels, self.scale, self.init_mode, self.spread = width, channels, scale, init, std
        # With a shared table: the slot of its rows, the index of the table, and the heads in a row.
        self.slot, self.index, self.chosen = shared
        self.table = nn.Embedding(vocab_size, rank or heads * width) if vocab_size else None
        self.up = nn.Linear(rank, heads * width, bias=False) if rank else None
        self.gate = nn.Linear(channels, heads, bias=False) if gate == "sigmoid" else None
        self.scalar = fp32_parameter(1) if gate == "scalar" else None
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        shape = self.get_parameter(parameter).shape
        if parameter == "scalar":
            return torch.ones(shape)
        if parameter == "gate.weight" or (self.init_mode == "zero" and parameter == "up.weight"):
            return torch.zeros(shape)
        if parameter == "table.weight":
            # A map after the table starts at zero. If the table did too, its gradients would be zero.
            zero = self.init_mode == "zero" and self.up is None
            return torch.zeros(shape) if zero else torch.normal(0.0, self.spread, shape, generator=generator)
        return None

    def forward(self, v: Tensor, x: Tensor, ids: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """v [B, heads, T, d], x [B, T, D], and ids [B, T] or rows of a table [B, T, rank] -> v [B, heads, T, d]."""
        if rows is None:
            rows = self.table(ids)
        if self.up is not None:
            rows = self.up(rows)
        rows_BKTd = rows.unflatten(2, (-1, self.width)).transpose(1, 2).to(v.dtype)
        if self.gate is not None:
            gate_BTK = self.scale * self.gate(x[..., : self.channels]).sigmoid()
            return torch.addcmul(v, rows_BKTd, gate_BTK.transpose(1, 2).unsqueeze(3).to(v.dtype))
        return v + rows_BKTd if self.scalar is None else torch.addcmul(v, rows_BKTd, self.scalar.to(v.dtype))

    def transform_qkv(self, x: QKV, context: Context) -> QKV:
        if self.table is not None:
            return x._replace(v=self(x.v, context.x, context.ids))
        rows = context.sources[self.slot][self.index]
        if self.chosen is not None:
            rows = rows.unflatten(2, (-1, self.width))[:, :, self.chosen].flatten(2)
        return x._replace(v=self(x.v, context.x, rows=rows))

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_layers(cls, options, config)
        check_least(cls, options, tables=1, rank=1)
        defaults = {name: getattr(cls.Options, name) for name in ("channels", "scale")}
        unread = [name for name, default in defaults.items() if options[name] != default]
        if options["gate"] != "sigmoid" and unread:
            raise HeadwaterError(
                f"Mechanism 'value_embedding': {unread[0]} is for gate 'sigmoid', not {options['gate']!r}; leave it "
                "out."
            )
        if not options["scale"] > 0:
            raise HeadwaterError(f"Mechanism 'value_embedding': scale must be above 0, not {options['scale']}.")
        if options["gate"] == "sigmoid":
            check_channels(cls, options, config)

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        chosen = [plan.index for plan in plans if is_chosen(plan.index, options)]
        receiving = layers_with_values(cls, options, chosen, plans)
        cls._check_tables(options, config, receiving)
        shared = () if options["tables"] is None else (SHARED,)
        new = list(plans)
        for layer in receiving:
            new[layer] = plans[layer].acting(cls, cls.transform_qkv).reading(*shared)
        return new

    @classmethod
    def _check_tables(cls, options: OptionValues, config: HeadwaterConfig, receiving: list[int]) -> None:
        """Raise `HeadwaterError` if tables without a rank are shared by layers whose values are not as wide."""
        if options["tables"] is None or options["rank"] is not None:
            return
        views = {layer: layer_config(config, layer) for layer in receiving}
        widths = {layer: view.num_key_value_heads * view.head_dim for layer, view in views.items()}
        for layer, width in widths.items():
            if width != widths[receiving[0]]:
                raise HeadwaterError(
                    "Mechanism 'value_embedding': a row of the shared tables is as wide as the values, which have "
                    f"{widths[receiving[0]]} numbers in layer {receiving[0]} and {width} in layer {layer}; set rank, "
                    "or name layers of one kind in layers."
                )

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        heads = len(plan.v_heads)
        width, rank = heads * config.head_dim, options["rank"] or 0
        table = 0 if options["tables"] else config.vocab_size * (rank or width)
        gate = {"sigmoid": heads * options["channels"]}.get(options["gate"], 0)
        return Cost(
            parameters=table + rank * width + gate + (options["gate"] == "scalar"),
            flops=2 * (rank * width + gate),
            # Autograd keeps what a gate multiplies, the input of the map before that, and the gate's sigmoid.
            saved=(options["gate"] != "none") * (rank > 0 or table > 0) * width
            + (table > 0) * rank
            + (options["gate"] == "sigmoid") * 2 * heads,
            unread_parameters=table,
        )

    @classmethod
    def shared_row_width(cls, options: OptionValues, config: HeadwaterConfig) -> int:
        """Count the numbers in a row of a shared table: those of the values in each layer that reads it."""
        reader = layer_config(config, list_acting_layers(cls, plan_layers(config))[0])
        return options["rank"] or reader.num_key_value_heads * reader.head_dim

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        tables, all_heads = options["tables"], range(config.num_key_value_heads)
        shared: tuple[int, int, Heads] = (0, 0, None)
        if tables is not None:
            heads = None if options["rank"] else choose_heads(plan.v_heads, all_heads)
            shared = plan.slot(SHARED), list_acting_layers(cls, plan.all_layers).index(plan.index) % tables, heads
        return cls(
            len(plan.v_heads),
            config.head_dim,
            0 if tables else config.vocab_size,
            std=config.hidden_size**-0.5,
            shared=shared,
            **{name: options[name] for name in ("rank", "gate", "channels", "scale", "init")},
        )

    # Capabilities

    @classmethod
    def build_shared_module(cls, options: OptionValues, config: HeadwaterConfig) -> "ValueTables | None":
        if options["tables"] is None:
            return None
        row_width = cls.shared_row_width(options, config)
        zero = options["init"] == "zero" and options["rank"] is None
        std, by_head = 0.0 if zero else config.hidden_size**-0.5, options["rank"] is None
        return ValueTables(options["tables"], config.vocab_size, row_width, std, by_head)

    @classmethod
    def count_shared_cost(cls, options: OptionValues, config: HeadwaterConfig) -> Cost:
        if options["tables"] is None:
            return Cost()
        width = options["tables"] * cls.shared_row_width(options, config)
        table = config.vocab_size * width
        saved = width * (options["gate"] != "none" or options["rank"] is not None)
        return Cost(parameters=table, saved=saved, unread_parameters=table)

    def count_token_tables(self, parameter: str) -> int:
        return int(parameter == "table.weight")

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        # Identity layers get no table. Otherwise shared tables would go to other layers.
        layers = list_acting_layers(cls, plan_layers(config))
        layers = [*map(growth.first_copy, layers)] if growth.identity_layers else growth.list_copies(layers)
        return options | {"layers": layers} if growth.deepens else options

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        values = Dim("v")
        if parameter == "table.weight":
            return (SAME, SAME if self.up is not None else values)
        return (SAME,) if parameter == "scalar" else (values, SAME)

    find_identity_options = identity_with(init="zero")

    per_head, per_token = True, False

    @classmethod
    def splits_heads(cls, options: OptionValues) -> bool:
        # A row of a shared table has the channels of all heads.
        return options["tables"] is None or options["rank"] is not None

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        return {} if self.scalar is None else {"g": Shown(self.scalar)}


class ValueTables(Mechanism):
    """Tables that several layers read: the rows of all of them for the new tokens.

    tables: how many. vocab_size: rows of each. row_width: numbers in a row. std: of the numbers at init.

    Parameters: `table.weight` [tables·vocab_size, row_width], one table after the other.

        >>> import torch
        >>> from headwater.mechanisms import ValueTables
        >>> ValueTables(3, vocab_size=100, row_width=64)(torch.randint(100, (2, 16))).shape
        torch.Size([3, 2, 16, 64])
    """

    def __init__(self, tables: int, vocab_size: int, row_width: int, std: float = 0.02, by_head: bool = True) -> None:
        super().__init__()
        self.tables, self.std, self.by_head = tables, std, by_head
        self.table = nn.Embedding(tables * vocab_size, row_width)

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        return torch.normal(0.0, self.std, self.table.weight.shape, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> [tables, B, T, row_width]."""
        first_row = torch.arange(self.tables, device=ids.device) * (self.table.num_embeddings // self.tables)
        return self.table(ids + first_row[:, None, None])

    # Capabilities

    def count_token_tables(self, parameter: str) -> int:
        return self.tables

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        return SAME, Dim("kv") if self.by_head else SAME
