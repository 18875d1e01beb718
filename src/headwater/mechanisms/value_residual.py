"""Value residual (ResFormer): values from the first layer. arXiv 2410.17897.

    V'_l = λ_{l,1}·V_0 + λ_{l,2}·V_l        l ≥ 1;  V_0: the first layer's value projection

    identity        λ1 = λ2 = 0.5, fixed
    constant        λ1 = 2, λ2 = 1, fixed
    sparse          λ1 = 5, λ2 = 1, fixed, in the last layers only (3 of 8); the others stay plain
    learnable       λ1, λ2 free scalars per layer, init 0.5 (or, for adding it to a trained model, 0 and 1)
    learnable_plus  λ_{l,1} = s·softmax(λ')_l over the receiving layers, init s = L, the depth; λ_{l,2} free, init 0.5
    dense           V'_l = λ_{l,l}·V_l + Σ_{i<l} λ_{l,i}·V_i, all free; init V'_l = V_l; if recursive, over V'_i

V_0 is taken after projection and short convolutions, before any other mechanism, the head split, the cache and RoPE;
gradients flow into it. The paper's ablations put the residual elsewhere (option `target`): on queries, keys (both
before RoPE), attention probabilities, or hidden states (X_0 added to the input of each attention).

Departures: the init 0.5 of the learnable form, λ2 = 1 of the constant form, and the form of learnable_plus follow the
authors' code; the paper does not give them. λ' starts at 0, uniform; the authors' rises with depth, by an amount that
neither gives (`plus_init`, recipes/value-residual/plus-init.yaml). The printed formula of the dense form can be read as
recursive, over V'_i; that is an option. There V'_i are layer i's values after its other mechanisms too.
"""

from collections.abc import Sequence
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from headwater.config.plan import Heads, LayerPlan, Source, choose_heads
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import Shown
from headwater.mechanisms.contract import QKV, Context, Cost, Mechanism, OptionValues
from headwater.mechanisms.fp32 import KeepsPrecision, fp32_parameter
from headwater.mechanisms.growth_map import SAME, Dim, GrowthMap
from headwater.mechanisms.layer_values import join_heads
from headwater.mechanisms.shared_options import check_receivers, grow_receivers, list_acting_layers, list_receivers
from headwater.mechanisms.weighted_sum import weighted_sum
from headwater.util.errors import HeadwaterError, check_known

Mode = Literal["identity", "constant", "sparse", "learnable", "learnable_plus", "dense"]
Target = Literal["values", "queries", "keys", "probabilities", "hidden"]
PlusInit = Literal["uniform", "ramp", "depth"]
LearnableInit = Literal["half", "identity"]

PARTS: dict[str, str] = {"values": "v", "queries": "q", "keys": "k", "probabilities": "a", "hidden": "x"}
SHARED = Source("shared", "value_residual", -1)


class ValueResidual(KeepsPrecision, Mechanism):
    """Weighted sum of a layer's own values and those of one or more earlier layers. ResFormer, arXiv 2410.17897.

    Args
        mode: see the head of this file. In "learnable_plus", λ1 comes from `PlusWeights`.
        weight: λ1 of the fixed forms; default 0.5, 2 and 5 for identity, constant and sparse.
        sources: how many earlier layers are mixed in; 1, except in the dense form.
        init: how the learnable form is initialized. "half" (default): λ1 = λ2 = 0.5. "identity": λ1 = 0, λ2 = 1, for
            adding it to a trained model.

    Parameters: `lambdas` [sources + 1], the weights of the sources, then of the layer's own values; in learnable_plus
    only the last, [1]; in the fixed forms none.

        >>> import torch
        >>> from headwater.mechanisms import ValueResidual
        >>> mix = ValueResidual()  # learnable
        >>> first, own = torch.randn(2, 3, 4, 16, 64)
        >>> bool(torch.equal(mix(own, first), 0.5 * first + 0.5 * own))
        True
    """

    source = "a tensor of the first layer (by default its values), mixed in"
    order = 40

    class Options:
        mode: Mode | None = None  # default: learnable; of queries, keys, probabilities identity; of hidden constant
        target: Target = "values"  # the tensor that the residual is added to
        source: int = 0  # the layer whose tensor is mixed in
        layers: list[int] | None = None  # layers that receive; default: all after the source with their own values
        weight: float | int | None = None  # λ1 of a fixed form; default: the paper's
        init: LearnableInit | None = None  # half (default); identity: λ = (0, 1), for a trained model
        plus_init: PlusInit | None = None  # for learnable_plus: uniform (default), ramp or depth
        recursive: bool = False  # dense: mix the mixed values of earlier layers

        def __post_init__(self) -> None:
            if self.mode is None:
                modes: dict[str, Mode] = {"values": "learnable", "hidden": "constant"}
                self.mode = modes.get(self.target, "identity")
            if self.weight is None and self.target == "hidden" and self.mode in ("constant", "sparse"):
                self.weight = 1.0
            if self.init is None and self.mode == "learnable":
                self.init = "half"
            if self.plus_init is None and self.mode == "learnable_plus":
                self.plus_init = "uniform"

    receiver: Tensor

    def __init__(
        self,
        mode: Mode = "learnable",
        weight: float | None = None,
        sources: int = 1,
        *,
        init: LearnableInit | None = None,
        target: Target = "values",
        reads: tuple[Source, ...] = (),
        slots: tuple[tuple[int, Heads], ...] = (),
        plus: int = 0,
        receiver: int = 0,
    ) -> None:
        super().__init__()
        check_form(mode, weight, init=init)
        if sources != 1 and mode != "dense":
            raise HeadwaterError(f"A value residual's mode {mode!r} mixes one source, not {sources}; use 'dense'.")
        self.mode, self.target, self.reads = mode, target, reads
        # For each source its slot, and which of its heads are read. For learnable_plus: the slot of all layers'
        # weights, and this layer's index among them.
        self.slots, self.plus = slots, plus
        self.receiver_index = receiver
        if mode == "learnable_plus":  # a tensor, because each number would compile another graph
            self.register_buffer("receiver", torch.tensor([receiver]), persistent=False)
        self.init_mode = init
        if weight is None:
            weight = {"identity": 0.5, "constant": 2.0, "sparse": 5.0}.get(mode, 0.5)
        self.sources = sources
        self.fixed = (weight, 0.5 if mode == "identity" else 1.0)
        count = {"learnable": 2, "learnable_plus": 1, "dense": sources + 1}.get(mode, 0)
        self.lambdas = fp32_parameter(count) if count else None
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        if self.mode != "dense" and self.init_mode != "identity":
            return torch.full(self.lambdas.shape, 0.5)
        start = torch.zeros(self.lambdas.shape)
        start[-1] = 1
        return start

    def forward(self, x: Tensor, *sources: Tensor, weight: Tensor | None = None) -> Tensor:
        """Sum x and each source, tensors of one shape, by their weights. weight: 0-d, λ1 in learnable_plus."""
        if len(sources) != self.sources:
            raise HeadwaterError(f"This value residual mixes {self.sources} sources; {len(sources)} were given.")
        if (weight is None) == (self.mode == "learnable_plus"):
            raise HeadwaterError("A value residual takes a weight in mode 'learnable_plus', and in no other mode.")
        if self.lambdas is None:
            source_weight, own_weight = self.fixed
            mixed = torch.add(x, *sources, alpha=source_weight / own_weight)
            return mixed if own_weight == 1 else own_weight * mixed
        weights = self.weights(weight)
        return weighted_sum(weights, *sources, x)

    def constants(self) -> dict[str, Tensor]:
        return {"receiver": torch.tensor([self.receiver_index])} if self.mode == "learnable_plus" else {}

    def weights(self, weight: Tensor | None = None) -> Tensor:
        """The weights of the sources, then of the layer's own values, [sources + 1]."""
        if self.lambdas is None:
            return torch.tensor(self.fixed, dtype=torch.float64)
        return self.lambdas if weight is None else torch.cat((weight[None], self.lambdas))

    def mix(self, x: Tensor, context: Context) -> Tensor:
        """Mix x with the sources that the plan gives this layer."""
        sources = [join_heads(context.sources, [slot]) for slot in self.slots]
        plus = self.mode == "learnable_plus"
        weight = context.sources[self.plus].index_select(0, self.receiver)[0] if plus else None
        return self(x, *sources, weight=weight)

    def transform_qkv(self, x: QKV, context: Context) -> QKV:
        part = PARTS[self.target]
        return x._replace(**{part: self.mix(getattr(x, part), context)})

    def transform_attention_weights(self, weights: Tensor, context: Context) -> Tensor:
        return self.mix(weights, context)

    def transform_block_input(self, x: Tensor, context: Context) -> Tensor:
        return self.mix(x, context)

    # In a headwater model

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        check_receivers(cls, options, config)
        mode, target = options["mode"], options["target"]
        check_form(mode, options["weight"], init=options["init"], plus_init=options["plus_init"])
        if mode in ("learnable_plus", "dense") and target != "values":
            raise HeadwaterError(f"Mechanism 'value_residual': mode {mode!r} applies only to values, not to {target}.")
        if options["recursive"] and mode != "dense":
            raise HeadwaterError(f"A value residual's mode {mode!r} has no recursive; leave recursive out.")
        if mode == "dense" and options["source"]:
            raise HeadwaterError(
                "Mechanism 'value_residual': mode 'dense' reads every earlier layer; leave source out."
            )

    @classmethod
    def list_sources(cls, options: OptionValues, layer: int) -> tuple[Source, ...]:
        """The tensors that layer `layer` mixes in."""
        target, source = options["target"], options["source"]
        if target == "hidden":
            return (Source("stream", "x", source - 1),)
        if target == "probabilities":
            return (Source("probabilities", "a", source),)
        if options["mode"] == "dense":
            return tuple(Source("local" if options["recursive"] else "raw", "v", i) for i in range(layer))
        return (Source("raw", PARTS[target], source),)

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        target, mode = options["target"], options["mode"]
        chosen = list_receivers(options, config)
        layers = [layer for layer in chosen if cls.list_own_heads(options, plans[layer])]
        if mode == "sparse" and options["layers"] is None:
            layers = layers[-max(1, 3 * config.num_hidden_layers // 8) :]
        if not layers or (options["layers"] is not None and layers != chosen):
            without = next(layer for layer in chosen if layer not in layers)
            raise HeadwaterError(
                f"Mechanism 'value_residual' mixes into a layer's own {target}, but layer {without} has none, because "
                "it shares another layer's, or its keys or a latent are its values; remove value_residual, or what "
                "does this."
            )
        if mode == "learnable_plus" and len(layers) < 2:
            raise HeadwaterError(
                "Mechanism 'value_residual': mode 'learnable_plus' divides a budget among receiving layers, but there "
                f"is only layer {layers[0]}; use 'learnable'."
            )
        method = {"probabilities": cls.transform_attention_weights, "hidden": cls.transform_block_input}.get(
            target, cls.transform_qkv
        )
        new = list(plans)
        for layer in layers:
            sources = cls.sources_of(options, plans[layer], plans)
            if not sources:
                raise HeadwaterError(
                    f"Mechanism 'value_residual': layer {options['source']} does not make {target} for all heads of "
                    f"layer {layer}, because it shares another layer's or has other heads; choose another source."
                )
            shared = [SHARED] if mode == "learnable_plus" else []
            new[layer] = plans[layer].acting(cls, method).reading(*sources, *shared)
        return new

    @classmethod
    def list_own_heads(cls, options: OptionValues, plan: LayerPlan) -> tuple[int, ...]:
        """List the heads of the target that a layer makes itself; (0,) if the target has no heads."""
        return {"v": plan.v_heads, "k": plan.k_heads}.get(PARTS[options["target"]], (0,))

    @classmethod
    def sources_of(cls, options: OptionValues, plan: LayerPlan, plans: Sequence[LayerPlan]) -> tuple[Source, ...]:
        """List the sources that have all heads they are mixed into. The dense form skips the others."""
        heads = set(cls.list_own_heads(options, plan))
        return tuple(
            source
            for source in cls.list_sources(options, plan.index)
            if source.layer < 0 or heads <= set(cls.list_own_heads(options, plans[source.layer]))
        )

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        sources = len(cls.sources_of(options, plan, plan.all_layers)) if options["mode"] == "dense" else 1
        count = {"learnable": 2, "learnable_plus": 1, "dense": sources + 1}.get(options["mode"], 0)
        # Autograd keeps what learned weights multiply. Earlier layers count their own tensors.
        heads = {"v": len(plan.v_heads), "k": len(plan.k_heads), "q": config.num_attention_heads}
        saved = {kind: number * config.head_dim for kind, number in heads.items()} | {"x": config.hidden_size}
        return Cost(parameters=count, saved=saved.get(PARTS[options["target"]], 0) if count else 0)

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        plans = plan.all_layers
        reads = cls.sources_of(options, plan, plans)
        own_heads = cls.list_own_heads(options, plan)
        return cls(
            options["mode"],
            options["weight"],
            len(reads),
            init=options["init"],
            target=options["target"],
            reads=reads,
            slots=tuple(
                (
                    plan.slot(s),
                    None if s.layer < 0 else choose_heads(own_heads, cls.list_own_heads(options, plans[s.layer])),
                )
                for s in reads
            ),
            plus=plan.slot(SHARED) if options["mode"] == "learnable_plus" else 0,
            receiver=list_acting_layers(cls, plans).index(plan.index),
        )

    # Capabilities

    @classmethod
    def list_kernels(cls, options: OptionValues) -> tuple[str, ...] | None:
        return ("eager",) if options["target"] == "probabilities" else None

    @classmethod
    def build_shared_module(cls, options: OptionValues, config: HeadwaterConfig) -> nn.Module | None:
        if options["mode"] != "learnable_plus":
            return None
        return PlusWeights(list_acting_layers(cls, plan_layers(config)), config.num_hidden_layers, options["plus_init"])

    @classmethod
    def count_shared_cost(cls, options: OptionValues, config: HeadwaterConfig) -> Cost:
        if options["mode"] != "learnable_plus":
            return Cost()
        return Cost(parameters=len(list_acting_layers(cls, plan_layers(config))) + 1)

    @classmethod
    def grow_options(cls, options: OptionValues, config: HeadwaterConfig, growth: GrowthMap) -> OptionValues:
        acting = list_acting_layers(cls, plan_layers(config))
        if options["mode"] == "learnable_plus" and growth.identity_layers:  # leave them out of the budget
            layers = [*map(growth.first_copy, acting)]
            return options | {"source": growth.first_copy(options["source"]), "layers": layers}
        if not growth.deepens:
            return options
        if options["mode"] == "sparse" and options["layers"] is None:  # different layers are the last ones now
            options = options | {"layers": acting}
        return grow_receivers(options, acting, growth)

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        if self.mode != "dense":
            return (SAME,)
        return (Dim("layers", entries=(*(source.layer for source in self.reads), "own")),)

    @classmethod
    def find_identity_options(cls, options: OptionValues) -> OptionValues | None:
        mode = options.get("mode") or "learnable"
        if mode == "dense":
            return dict(options)  # the dense form starts as the identity
        # No fixed weight leaves the function unchanged. Only the learnable form can start as the identity.
        if mode != "learnable" or options.get("weight") is not None or options.get("init") == "half":
            return None
        return options | {"mode": "learnable", "init": "identity"}

    per_head = per_token = True

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        weights = self.weights(shared[SHARED][self.receiver_index] if self.mode == "learnable_plus" else None)
        if self.mode == "dense":
            return {"λ": Shown(weights, "layer", (*(source.layer for source in self.reads), plan.index))}
        return {f"λ{i}": Shown(weight[None]) for i, weight in enumerate(weights, 1)}


def check_form(mode: str, weight: float | None, **inits: str | None) -> None:
    """Raise `HeadwaterError` for a mode or an init that is unknown, or for what the mode does not read."""
    choices = {"mode": get_args(Mode), "init": get_args(LearnableInit), "plus_init": get_args(PlusInit)}
    for name, value in {"mode": mode, **inits}.items():
        if value is not None:
            check_known(f"A value residual has no {name}", value, choices[name])
    readers = {"weight": ("constant", "sparse"), "init": ("learnable",), "plus_init": ("learnable_plus",)}
    for name, option in {"weight": weight, **inits}.items():
        if option is not None and mode not in readers[name]:
            raise HeadwaterError(f"A value residual's mode {mode!r} has no {name}; leave {name} out.")


class PlusWeights(KeepsPrecision, Mechanism):
    """λ_{l,1} = s·softmax(λ')_l for all receiving layers l: the one budget that `learnable_plus` divides among them.

    Args
        layers: the receiving layers. depth: L, the init of s.
        init: the init of λ'. "uniform" (default); "ramp": λ1 proportional to l; "depth": λ'_l = l + 1, which gives the
            last of 8 layers 5, but the last of 40 layers 25.

    Parameters: `logits` [layers], λ'; `scale` [1], s.

        >>> from headwater.mechanisms import PlusWeights
        >>> weights = PlusWeights(range(1, 8), depth=8, init="depth")
        >>> round(weights()[-1].item(), 1)
        5.1
    """

    def __init__(self, layers: Any, depth: int, init: PlusInit = "uniform") -> None:
        super().__init__()
        if min(layers, default=0) < 1:
            raise HeadwaterError("Learnable-plus weights need at least one layer, and layers start at 1.")
        self.layers, self.depth, self.init_mode = list(layers), depth, init
        self.logits = fp32_parameter(len(self.layers))
        self.scale = fp32_parameter(1)
        self.reset_parameters()

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor:
        if parameter == "scale":
            return torch.tensor([float(self.depth)])
        depth = torch.tensor(self.layers, dtype=torch.float32)
        return {"uniform": torch.zeros_like(depth), "ramp": depth.log(), "depth": depth + 1}[self.init_mode]

    def forward(self) -> Tensor:
        """The weights λ1, [layers]."""
        return self.scale * self.logits.softmax(0)

    # Capabilities

    def describe_axes(self, parameter: str) -> tuple[Dim, ...]:
        return (Dim("layers", entries=tuple(self.layers)) if parameter == "logits" else SAME,)
