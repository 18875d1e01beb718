"""The contract of a mechanism: subclass `Mechanism` to change where a Transformer's keys and values come from.

A mechanism answers five questions, in this order. Override only the methods that yours needs.

1. What are its options?      `Options`, `validate`
2. Where does it act?         `share`, `plan`: pure Python, before any module exists
3. What are its modules?      `build`: one per layer; `map`: in place of a linear layer; `shared`: one per model
4. What does it compute?      the stages, `embedded` to `leave`
5. What does it cost?         `cost`, `map_cost`, `shared_cost`

The rest is optional: how parameters are initialized and trained, what `headwater retrofit`, `bench` and `inspect` ask.
`headwater new mechanism NAME` writes a working example, and `headwater.testing` checks it. docs/extending.md is the
guide.

In shapes: B batch, T new tokens, S all tokens including cached ones, D model width, H query heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from headwater.config.plan import STAGES, LayerPlan, Part, Source
from headwater.mechanisms.enlarging import Dim, Larger
from headwater.plugins.registry import MECHANISMS
from headwater.util.errors import HeadwaterError, either, nearest

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig

# The linear layers of a block that a mechanism may replace; "feed_forward" is the whole feed-forward.
Map = Literal["query", "key", "value", "output", "feed_forward"]
# The optimizer's parameter groups (training/optim.py).
Group = Literal["matrices", "tensors", "embeddings", "vectors", "scalars"]


def describe(hint: Any) -> str:
    """A type in words, for error messages: "a whole number", "'free', 'gate' or 'clamped'", …"""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "nothing"}
    if get_origin(hint) is Literal:
        parts = [repr(value) for value in get_args(hint)]
    elif get_origin(hint) is list:
        parts = [f"a list, each {describe(get_args(hint)[0])}"]
    elif members := get_args(hint):
        choices = [repr(value) for member in members if get_origin(member) is Literal for value in get_args(member)]
        others = [member for member in members if get_origin(member) is not Literal]
        parts = choices + [describe(member) for member in others if not (member is int and float in members)]
    else:
        parts = [words.get(hint, str(hint))]
    return either(parts)


class KV(NamedTuple):
    """Keys and values of the new tokens, each [B, heads, T, d]; heads: those the layer stores, possibly none."""

    k: Tensor
    v: Tensor


class AttentionInputs(NamedTuple):
    """What a block's queries, keys and values are projected from, and its residual stream; each [B, T, D].

    k, v: None in layers that project no keys or values.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    stream: Tensor

    def parts(self) -> list[Tensor]:
        """Of queries, keys and values, in this order, those that the layer projects."""
        return [part for part in (self.q, self.k, self.v) if part is not None]

    def having(self, parts: Sequence[Tensor]) -> AttentionInputs:
        """The same with other `parts`."""
        q, *others = parts
        k = None if self.k is None else others[0]
        return self._replace(q=q, k=k, v=None if self.v is None else others[-1])


class Hidden(NamedTuple):
    """What goes into the activation of a feed-forward, each [B, T, F]: act(gate)·up; without a gate, act(up)."""

    gate: Tensor | None
    up: Tensor


class Cost(NamedTuple):
    """What a mechanism adds to a layer.

    parameters: trainable numbers.
    flops: matmul FLOPs of the forward pass per token, 2 per multiply-add; elementwise operations are not counted.
    saved: numbers per token that autograd keeps for the backward pass.
    looked_up: how many of the parameters a token leaves unread, in tables of which it reads one row or a few.
    """

    parameters: int = 0
    flops: int = 0
    saved: int = 0
    looked_up: int = 0


class Shown(NamedTuple):
    """Scalars of a mechanism in one layer, as its forward pass uses them.

    values: [n].
    by: what the n values belong to: "kv head"; "query head"; "layer", the layer a summand comes from (-1: the
        embedding); or "" for a single number.
    at: the indices of these heads or layers, [n].
    """

    values: Tensor
    by: Literal["", "kv head", "query head", "layer"] = ""
    at: tuple[int, ...] = ()


class Step(NamedTuple):
    """A training step, as a mechanism's hooks see it.

    number: counts from 0. steps: how many the run has. warmup: how many of them warm up the learning rate.
    start: the recipe's `start:` section, with `tau` resolved; empty for a run from scratch.
    """

    number: int
    steps: int
    warmup: int
    start: Mapping[str, Any]


class Tail(Protocol):
    """A cache layer that keeps raw tokens, for mechanisms that look back (models/cache.py)."""

    def before(self, name: str, x: Tensor, length: int, everything: bool = False) -> Tensor:
        """The `length` raw tokens before x [B, heads, T, d], zeros before the first; stores the last ones of x.

        name: which tail. everything: return all tokens kept, which are more than `length` while a cache records its
        past (assisted decoding).
        """
        ...


class PartTail(NamedTuple):
    """The tails of mechanisms at the input of keys or values alone, where attention's inputs differ."""

    tail: Tail
    part: Part

    def before(self, name: str, x: Tensor, length: int, everything: bool = False) -> Tensor:
        return self.tail.before(f"{name}.{self.part}", x, length, everything)


class Processes(Protocol):
    """The processes that a model is split over in a server, as one of them sees them."""

    rank: int
    size: int

    def summed(self, x: Tensor) -> Tensor:
        """The sum of the processes' x."""
        ...

    def joined(self, x: Tensor) -> Tensor:
        """The processes' x, one after another in the last dimension."""
        ...


class Ancestors(NamedTuple):
    """The predecessors of each token where rows branch, as in trees of candidates or with shared prefixes.

    slots: [window - 1, B or 1, T]. Row s - 1 holds the slot of the token s back, counted from the first new token:
        negative slots are in the tail (-1 is its last token), and T means that there is none.
    """

    slots: Tensor

    def of(self, x: Tensor, before: Tensor | None, back: int) -> Tensor:
        """The tokens `back` before those of x [B, heads, T, d], zeros where there are none. before: the whole tail."""
        parts = (x, x.new_zeros(*x.shape[:2], 1, x.shape[3]))
        kept = 0 if before is None else before.shape[2]
        slots = (self.slots[back - 1] + kept)[:, None, :, None]
        return torch.cat(parts if before is None else (before, *parts), dim=2).gather(2, slots.expand(x.shape))


class Context(NamedTuple):
    """What a stage may read besides its own input.

    sources: tensors of earlier layers that the plan reads, then this layer's own so far. Index it with
        `LayerPlan.slot(source)`.
    reach: [B, T], how many tokens of the same document precede each token (0 at a document's first token, and at the
        first real token of a left-padded row), counted up to the longest tail of any mechanism. None: each row is one
        document. `Ancestors`: rows branch, so that the previous token need not be in the previous slot.
    tail: the raw tokens of earlier calls; None without a cache.
    ids: [B, T], the new tokens' ids; None unless a mechanism of the model sets `reads_ids`.
    x: [B, T, D], the normed input of attention, from which queries, keys and values are projected (where these have
        different ones, that of the queries); None at the stages around attention and feed-forward.
    """

    sources: list[Tensor]
    reach: Tensor | Ancestors | None = None
    tail: Tail | None = None
    ids: Tensor | None = None
    x: Tensor | None = None


class Named(nn.ModuleDict):
    """Modules by mechanism name. In parameter names, the dots and colons of a mechanism's name become _."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.names = {name: name.replace(".", "_").replace(":", "_") for name in modules}
        super().__init__({self.names[name]: module for name, module in modules.items()})

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(self.names.get(name, name))

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Pairs of a mechanism's name and its module."""
        return ((name, self[name]) for name in self.names)


@strict
@dataclass
class NoOptions:
    """Of a mechanism that names none."""


class Mechanism(nn.Module):
    """One mechanism in one layer of a model. By default every method changes nothing.

    The classmethods describe the mechanism before any module exists. They get `options`, the mechanism's validated
    options, and `config`, the model's; where they are about one layer, as that layer sees it. They must be pure
    functions of these. An instance is the module of one layer, made by `build`; its stage methods are called in the
    order in which the config names the mechanisms.

    The class is also a plain `nn.Module` for use in any other model: its constructor takes sizes, and its `forward`
    takes and returns tensors.
    """

    # A `huggingface_hub` strict dataclass: the options with their types and defaults. It checks types only if it is not
    # frozen and its file has no `from __future__ import annotations`. Default: there are none.
    Options: ClassVar[type] = NoOptions
    # The names of the sums whose `terms` are shown, if there are several.
    labels: tuple[str, ...] = ()
    # The module's parameters that act as weight matrices, so that quantizers and adapters find them.
    matrices: ClassVar[tuple[str, ...]] = ()
    # True if it looks up tokens by id. Then `Context.ids` is set, the module of `shared` is called with the ids, and
    # the model raises an error if it is called with `inputs_embeds`.
    needs_input_ids: ClassVar[bool] = False
    # For models that are split over processes (`headwater_lab.serving`, `headwater.integrations.torchtitan`). True if
    # within attention
    # each head is computed from that head and the layer's input; `axes` says which entries of a parameter belong to
    # which.
    per_head: ClassVar[bool] = False
    # True if outside attention each token is computed from that token alone, and within it from no input of the layer.
    per_token: ClassVar[bool] = False
    # The arXiv number of its paper.
    paper: ClassVar[str] = ""

    # Options

    @classmethod
    def options(cls, given: dict[str, Any] | None) -> dict[str, Any]:
        """`given` with defaults filled in. Raises `HeadwaterError` for an unknown name or a wrong type."""
        name = cls.registered_name()
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise HeadwaterError(
                f"The options of mechanism {name!r} must be a mapping, not {given!r}; write {{}} for none."
            )
        known = [field.name for field in fields(cls.Options)]
        for key in given:
            if key not in known:
                raise HeadwaterError(
                    f"Mechanism {name!r} has no option {key!r}; {nearest(key, known) if known else 'it has none.'}"
                )
        for key, value in given.items():
            try:
                cls.Options(**{key: value})
            except StrictDataclassError as error:
                expected = describe(get_type_hints(cls.Options)[key])
                raise HeadwaterError(f"Mechanism {name!r}: {key} must be {expected}, not {value!r}.") from error
            if isinstance(value, float) and not isfinite(value):
                raise HeadwaterError(f"Mechanism {name!r}: {key} must be a finite number, not {value}.")
        return asdict(cls.Options(**given))

    @classmethod
    def complete_options(cls, options: dict[str, Any], config: HeadwaterConfig) -> dict[str, Any]:
        """`options` with what they take from the config, for what must not follow the config's later changes.

        The config stores the result, so a field that is filled in here stays as it is. It is called before `validate`.
        """
        return options

    @classmethod
    def registered_name(cls) -> str:
        """Its name in configs: headwater's own, its package's entry point, or "module:Class". Do not override."""
        return MECHANISMS.name_of(cls)

    @classmethod
    def describe_source(cls, options: dict[str, Any]) -> str:
        """What attention reads through it, in a few words such as "the previous token", for `headwater list`."""
        return cls.registered_name()

    @classmethod
    def validate_options(cls, options: dict[str, Any], config: HeadwaterConfig) -> None:
        """Raise `HeadwaterError` if the options contradict each other or the config."""

    @classmethod
    def choose_embedding_range(cls, options: dict[str, Any], config: HeadwaterConfig) -> float | None:
        """The standard deviation with which new models should initialize embeddings; None: no preference."""
        return None

    @classmethod
    def list_kernels(cls, options: dict[str, Any]) -> tuple[str, ...] | None:
        """The values of `attn_implementation` that it works with; None: all."""
        return None

    @classmethod
    def redirect_heads(
        cls, options: dict[str, Any], config: HeadwaterConfig, plans: list[LayerPlan]
    ) -> list[LayerPlan]:
        """Return the plans with the heads redirected that take keys or values from another layer, by
        `LayerPlan.attending`.

        plans: of layers that share nothing, whatever other mechanisms do. A head attends to what the layer that it
        names itself attends to. Every mechanism's `share` runs before any mechanism's `plan`. Keys and values that no
        head attends to are neither projected nor cached.
        """
        return plans

    @classmethod
    def chains(cls, options: dict[str, Any]) -> bool:
        """Whether what it does in `share` to a head of a layer also counts for those that take from that layer.

        False: these attend to what the layer would attend to without this mechanism.
        """
        return True

    @classmethod
    def plan_stages(cls, options: dict[str, Any], config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        """Return the plans with the stages at which it acts, by `LayerPlan.acting`, and what it reads, by `.reading`.

        A mechanism that looks back also names its tails in `acting`: how many raw tokens the cache must keep for it.
        Raises `HeadwaterError` if another mechanism leaves it nothing to act on.
        """
        return plans

    @classmethod
    def planned(cls, options: dict[str, Any], config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        """What `plan` returns. Raises `HeadwaterError` if it is not one plan a layer, or leaves out what it does."""
        made, name = cls.plan_stages(options, config, plans), cls.registered_name()
        if not isinstance(made, list) or [type(one) for one in made] != [LayerPlan] * len(plans):
            raise HeadwaterError(f"Mechanism {name!r}: plan must return a list with the plan of each layer.")
        acts = [stage for one in made for stage, acting in one.acts if acting == name]
        for stage in acts:
            if stage not in STAGES:
                raise HeadwaterError(f"Mechanism {name!r} acts at no stage {stage!r}; {nearest(stage, STAGES)}")
        defined = [stage for stage in STAGES if getattr(cls, stage) is not getattr(Mechanism, stage)]
        if defined and not acts:
            raise HeadwaterError(
                f"Mechanism {name!r} defines {defined[0]!r} but acts in no layer; in plan, return plans with "
                f"plan.acting({defined[0]!r}, cls.registered_name())."
            )
        return made

    @classmethod
    def count_cost(cls, options: dict[str, Any], config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        """What the module that `build` makes for this layer costs."""
        return Cost()

    @classmethod
    def count_shared_cost(cls, options: dict[str, Any], config: HeadwaterConfig) -> Cost:
        """What the module of `shared` costs, once per model."""
        return Cost()

    @classmethod
    def count_linear_cost(
        cls, options: dict[str, Any], config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int
    ) -> Cost | None:
        """What the module that `map` makes costs, in place of the linear layer; None where `map` returns None."""
        return None

    @classmethod
    def name_size_option(cls, options: dict[str, Any]) -> str | None:
        """The name of the option that sets the feed-forward's size; None if it leaves the feed-forward alone."""
        return None

    @classmethod
    def freezes_model(cls, options: dict[str, Any]) -> bool:
        """Whether all parameters of the model are frozen except those that `learns` names."""
        return False

    @classmethod
    def splits_heads(cls, options: dict[str, Any]) -> bool:
        """Whether heads can be split over processes with these options; by default as `per_head` says."""
        return cls.per_head

    def is_trained(self, parameter: str) -> bool:
        """If the mechanism `tunes`: whether this parameter of the module is trained."""
        return True

    @classmethod
    def find_identity_options(cls, options: dict[str, Any]) -> dict[str, Any] | None:
        """The options with which it can be added to a trained model without changing what that computes.

        options: those the user gave, possibly none, which the result contains. None: it cannot be done with these.
        """
        return None

    # Growth

    @classmethod
    def grow_options(cls, options: dict[str, Any], config: HeadwaterConfig, growth: Larger) -> dict[str, Any]:
        """The options with which it does the same in a larger model. config: the smaller model's.

        Raises `HeadwaterError`, with the reason, for growth under which it cannot, or that would not keep the function
        though `growth.keeps`. By default for all growth.
        """
        raise HeadwaterError(
            f"Mechanism {cls.registered_name()!r} does not say how it grows, so a model with it keeps its layers and widths; "
            "remove it, or give its class grown() and axes()."
        )

    def describe_axes(self, parameter: str, place: tuple[Dim, Dim] | None = None) -> tuple[Dim, ...]:
        """What the entries along each dimension of a parameter belong to; the last covers all that remain, flattened.

        place: the inputs and the outputs of the linear layer that the module replaces.
        """
        return ()

    def count_token_tables(self, parameter: str) -> int:
        """How many tables with a row for each token id a parameter holds, one after the other along its first axis.

        `resize_token_embeddings` gives each as many rows as the embedding. 0: the parameter is no such table.
        """
        return 0

    def find_neutral_value(self, parameter: str) -> Tensor | None:
        """If it changes the residual stream itself: the parameter's value with which it does not, for layers that add
        nothing at first; None: any will do."""
        return None

    @classmethod
    def choose_by_similarity(
        cls, options: dict[str, Any], config: HeadwaterConfig, keys: Tensor, values: Tensor
    ) -> dict[str, Any] | None:
        """`options`, those the user gave, with whose keys and values are shared chosen by how alike they are.

        keys, values: [layers, layers], 1 for alike and 0 for unrelated, as measured in a trained model
        (`headwater.conversion.convert.similarity`). None: nothing is left to choose.
        """
        return None

    # Modules

    @classmethod
    def build_module(cls, options: dict[str, Any], config: HeadwaterConfig, plan: LayerPlan) -> Self:
        """The module of one layer in which the mechanism acts."""
        raise NotImplementedError

    @classmethod
    def build_outer_module(cls, options: dict[str, Any], config: HeadwaterConfig, plan: LayerPlan) -> Self:
        """The module for the stages around attention and feed-forward (`plan.Outer`); `build` makes the one inside
        attention. By default the same: override it in a mechanism that acts at both in one layer."""
        return cls.build_module(options, config, plan)

    @classmethod
    def build_shared_module(cls, options: dict[str, Any], config: HeadwaterConfig) -> nn.Module | None:
        """A module that the model holds once, or None. Layers read its output as `Source("shared", name, -1)`.

        It is called once per forward pass, without arguments, or with the new tokens' ids [B, T] if `reads_ids`.
        """
        return None

    @classmethod
    def build_linear(
        cls, options: dict[str, Any], config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int
    ) -> nn.Module | None:
        """The module that replaces a linear layer, [..., d_in] -> [..., d_out]; None: keep the linear layer."""
        return None

    @staticmethod
    def scalars(*shape: int) -> nn.Parameter:
        """An uninitialized parameter in fp32 (in fp64 models, fp64), whatever precision the model is built in.

        Derive from `headwater.mechanisms.precision.KeepsPrecision` too, so that casting the model does not round it.
        """
        return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    # Initialization

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        """The initial value of a parameter. Draw random numbers on the CPU, from `generator`.

        parameter: its name within the module; a child module's as "conv.weight".

        Every parameter of the module's own needs a value. For those of child modules None means the model's default:
        linear layers and embeddings like all others of the model, other weights of two or more dimensions normal with
        standard deviation 1/√fan_in, norm weights one, biases zero.
        """
        return None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set the module's own parameters to their `init`. Outside a model, child modules keep PyTorch's."""
        for name, parameter in self.named_parameters(recurse=False):
            if not parameter.is_meta and (value := self.initial_value(name, generator)) is not None:
                parameter.copy_(value)

    # Training

    def choose_group(self, parameter: str) -> str | None:
        """The optimizer group of a parameter, named as in `init`; None: by its kind and shape.

        One of `Group`, or another name for a group of its own, which does not decay unless `decays` says so. Only
        parameters of two dimensions can be in "matrices", which Muon trains under `optimizer: muon`.
        """
        return None

    def scale_learning_rate(self, parameter: str) -> float:
        """What the learning rate of a parameter, named as in `init`, is multiplied with; at least 0."""
        return 1.0

    def is_decayed(self, parameter: str) -> bool | None:
        """Whether weight decay applies to a parameter, named as in `init`; None: as the recipe says of its group."""
        return None

    def prepare_training(self, step: Step) -> Any:
        """What `before_step` needs, as JSON values, which checkpoints store; None: it need not be called.

        Called once, when a run begins; not when it is resumed.
        """
        return None

    def prepare_step(self, kept: Any, step: Step) -> None:
        """Called before each training step, if `before_training` returned something; kept: what it returned.

        Keep what it changes in a buffer or a parameter: a checkpoint does not hold other attributes.
        """

    @classmethod
    def describe_training(cls, modules: int, step: Step) -> str | None:
        """A sentence for the run's record about the `modules` modules whose `before_step` is called; None: nothing."""
        return None

    # For `headwater bench`

    def build_twin(self) -> nn.Module | None:
        """If it replaces a linear layer: a module of plain layers with the same matmuls, to be timed against it."""
        return None

    # For `headwater inspect` and reports

    def show_scalars(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        """The scalars of this layer, learned or fixed, by symbol. shared: what the modules of `shared` return."""
        return {}

    def show_windows(self) -> dict[str, Tensor]:
        """If queries, keys or values ("q", "k", "v") are mixed over tokens: the weights of each, [window, heads].

        Row s holds the weights of the token s back; heads: those the layer has.
        """
        return {}

    def show_terms(self, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        """If `forward` sums contributions of several layers: its terms for these inputs, by name, the layer's last.

        Where it makes several sums, `labels` names them, and each term has them as its first dimension.
        """
        return {}

    def show_firing(self, *inputs: Any) -> Tensor | None:
        """If it reads n parameter tokens: how much each contributes to the output, [..., n], at least 0."""
        return None

    def build_part(self, processes: Processes) -> nn.Module:
        """If it replaces a linear layer: a module with this process's part of it, which returns the whole output.

        By default each process computes the whole.
        """
        return self

    # Stages, in the order of the forward pass

    def transform_embedding(self, x: Tensor, context: Context) -> Tensor:
        """In layer 0 only, before all else: the embedding x [B, T, D] -> same, for all that reads it."""
        return x

    def update_residual(self, x: Tensor, context: Context) -> Tensor:
        """At the beginning of a block: the residual stream [B, T, D] -> same, for the block and all that follows."""
        return x

    def transform_block_input(self, x: Tensor, context: Context) -> Tensor:
        """Before the norm and attention of a block: x [B, T, D] -> same. The residual connection keeps the old x."""
        return x

    def split_attention_inputs(self, x: AttentionInputs, context: Context) -> AttentionInputs:
        """After `enter`: what goes into queries, keys and values, which may differ, and the residual stream -> same.

        They come in alike, unless another mechanism has acted here before. The block's one norm and `attention_input`
        then apply to each, and the block adds to the stream given here.
        """
        return x

    def transform_attention_input(self, x: Tensor, context: Context) -> Tensor:
        """After the norm before attention: x [B, T, D] -> same; once for each of `LayerPlan.inputs`."""
        return x

    def transform_projections(self, q: Tensor, kv: KV, context: Context) -> tuple[Tensor, KV]:
        """After projection, before the norms of queries and keys, if there are any: as `local`.

        What other layers read as projected is what this gives. A layer's own tensors are not in `context.sources` yet.
        """
        return q, kv

    def transform_qkv(self, q: Tensor, kv: KV, context: Context) -> tuple[Tensor, KV]:
        """After projection, before RoPE and the cache: q [B, H, T, d], k and v [B, heads, T, d] -> same."""
        return q, kv

    def transform_attended_kv(self, kv: KV, context: Context) -> KV:
        """After RoPE and the cache: what all K heads attend to, k and v [B, K, S, d], the whole history -> same.

        What the cache holds and later layers read stays as it is. All heads then run in one kernel call.
        """
        return kv

    def add_key_values(self, context: Context) -> KV:
        """Keys and values that all tokens attend to beside the tokens': each [K, n, d], for all K key/value heads.

        They share the tokens' softmax, and have no position. Not all kernels can: say so in `kernels`. A decoding step
        does not join them to the cached history, which would copy it.
        """
        raise NotImplementedError

    def transform_attention_weights(self, weights: Tensor, context: Context) -> Tensor:
        """After the softmax: the tokens' attention weights [B, H, T, S] -> same. Only the eager kernel exposes them."""
        return weights

    def transform_head_outputs(self, out: Tensor, context: Context) -> Tensor:
        """Before the output projection: what each head read, [B, T, H, d] -> same."""
        return out

    def transform_attention_output(self, x: Tensor, context: Context) -> Tensor:
        """Before what attention gives is added to the residual stream: x [B, T, D] -> same."""
        return x

    def transform_feed_forward_input(self, x: Tensor, context: Context) -> Tensor:
        """After the norm before the feed-forward: x [B, T, D] -> same."""
        return x

    def transform_feed_forward_hidden(self, hidden: Hidden, context: Context) -> Hidden:
        """Inside the feed-forward, before its activation. Not where another mechanism replaces the feed-forward."""
        return hidden

    def transform_feed_forward_output(self, x: Tensor, context: Context) -> Tensor:
        """Before what the feed-forward gives is added to the residual stream: x [B, T, D] -> same."""
        return x

    def transform_block_output(self, x: Tensor, context: Context) -> Tensor:
        """After the block: its output x [B, T, D] -> the input of the next block."""
        return x


def owner_of(model: nn.Module, qualified: str) -> tuple[Mechanism | None, str]:
    """The innermost mechanism that contains a parameter of `model`, and its name there; (None, "") if none does."""
    module: nn.Module | None = model
    parts = qualified.split(".")
    found: tuple[Mechanism | None, str] = (None, "")
    for depth, part in enumerate(parts[:-1], 1):
        module = module._modules.get(part) if module is not None else None
        if isinstance(module, Mechanism):
            found = module, ".".join(parts[depth:])
    return found
