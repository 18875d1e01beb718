"""The contract of a mechanism: where it acts, what it needs, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
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
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from headwater.errors import HeadwaterError, either, nearest
from headwater.plan import LayerPlan, Source
from headwater.registry import MECHANISMS

if TYPE_CHECKING:
    from headwater.config import HeadwaterConfig

# The linear maps of a block that a mechanism may replace.
Map = Literal["query", "key", "value", "output", "feed_forward"]
# The groups in which parameters are handed to optimisers (training/optim.py).
Group = Literal["matrices", "tensors", "embeddings", "vectors", "scalars"]


def describe(hint: Any) -> str:
    """A type in words: "a whole number", "'free', 'gate' or 'clamped'", …"""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "nothing"}
    if get_origin(hint) is Literal:
        parts = [repr(value) for value in get_args(hint)]
    elif get_origin(hint) is list:
        parts = [f"a list, each {describe(get_args(hint)[0])}"]
    elif members := get_args(hint):
        parts = [describe(member) for member in members if not (member is int and float in members)]
    else:
        parts = [words.get(hint, str(hint))]
    return either(parts)


class KV(NamedTuple):
    """Keys and values of the new tokens, [B, heads, T, d] each, of the heads the layer stores (possibly none)."""

    k: Tensor
    v: Tensor


class Cost(NamedTuple):
    """What a part of a layer costs.

    parameters: trainable numbers. flops: matmul FLOPs of the forward pass per token, 2 per multiply-add (elementwise
    work is left out, as is usual). saved: numbers per token that autograd keeps for the backward pass.
    """

    parameters: int = 0
    flops: int = 0
    saved: int = 0


class Shown(NamedTuple):
    """Numbers of a mechanism in one layer, as its forward pass uses them: values [n], counted by what `by` says.

    by: "kv head", "query head"; "layer", the layer that a summand is from, -1 for the embedding; "" for one number.
    at: the heads or layers.
    """

    values: Tensor
    by: Literal["", "kv head", "query head", "layer"] = ""
    at: tuple[int, ...] = ()


class Step(NamedTuple):
    """A step of a training run, as the hooks of a mechanism see it.

    number: counted from 0, of `steps`; the first `warmup` of them warm the learning rate up.
    start: the recipe's `start:` section, with what `tau` has been settled to; empty for a run from scratch.
    """

    number: int
    steps: int
    warmup: int
    start: Mapping[str, Any]


class BenchForm(NamedTuple):
    """What training runs in a form of its own, and the same as one would write it down, for `headwater bench forms`.

    Both take x [B, T, D] and give a tensor; module: what holds their parameters.
    """

    label: str
    module: nn.Module
    ours: Callable[[Tensor], Tensor]
    plain: Callable[[Tensor], Tensor]


class Tail(Protocol):
    """Cache layers that keep raw tokens (models/cache.py) implement this."""

    def before(self, name: str, x: Tensor, length: int, everything: bool = False) -> Tensor:
        """The `length` raw tokens before x [B, heads, T, d], zeros at the start; remembers the last ones of x.

        everything: all raw tokens that are kept, which are more while past is recorded.
        """
        ...


class Ancestors(NamedTuple):
    """Which tokens come before each one where rows branch, as trees of candidates and shared prefixes do.

    slots: [window - 1, B or 1, T]; row s - 1 has the slot of the token s back, counted from the first new token: below
        0 in the tail, -1 being its last token, and T where there is none.
    """

    slots: Tensor

    def of(self, x: Tensor, before: Tensor | None, back: int) -> Tensor:
        """The tokens `back` before x [B, heads, T, d], zeros where there are none. before: the tail, all of it."""
        parts = (x, x.new_zeros(*x.shape[:2], 1, x.shape[3]))
        kept = 0 if before is None else before.shape[2]
        slots = (self.slots[back - 1] + kept)[:, None, :, None]
        return torch.cat(parts if before is None else (before, *parts), dim=2).gather(2, slots.expand(x.shape))


class Context(NamedTuple):
    """What a mechanism may look at besides what it is given.

    sources: the tensors the plan reads, then those the layer has made so far, each at its `LayerPlan.slot`.
    reach: [B, T], how many tokens back the same document goes at each position (0 at its first token, and at the
        first real token of a left-padded row); None for rows that are one document from their first slot on. Where a
        mask made for the kernel tells who sees whom, `Ancestors`: the token before need not be in the slot before.
    tail: where raw tokens of earlier calls are kept; None without a cache.
    ids: [B, T], the new tokens, where a mechanism of the model `reads_ids`.
    """

    sources: list[Tensor]
    reach: Tensor | Ancestors | None = None
    tail: Tail | None = None
    ids: Tensor | None = None


class Named(nn.ModuleDict):
    """Modules by the names of mechanisms, whose dots and colons become _ in the names of parameters."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.names = {name: name.replace(".", "_").replace(":", "_") for name in modules}
        super().__init__({self.names[name]: module for name, module in modules.items()})

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(self.names.get(name, name))

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Each mechanism's name, and the module."""
        return ((name, self[name]) for name in self.names)


class Mechanism(nn.Module):
    """One mechanism in one layer. Subclasses override what they need; everything passes through by default.

    The classmethods are asked before any module is built: `options` and `validate` by the config, `share` and `plan` by
    the plan, `cost` and `map_cost` by `headwater.cost`. `build` makes the module of one layer. The stage methods are
    called by `nn.attention.Attention` and `nn.block.Block`, in the config's order.

    As a plain `nn.Module`, in anybody's model, a mechanism has a constructor with sizes and a `forward`; its docstring
    says which.
    """

    # A strict dataclass with the mechanism's options and their defaults. Strict dataclasses check a field when it is
    # set, and against its type: not in a frozen one, and not where annotations are postponed to strings.
    Options: ClassVar[type]
    # Parameters that stand where the weight of a linear map would, such as quantisers and the like look for.
    matrices: ClassVar[tuple[str, ...]] = ()
    # Whether it reads tokens by their ids, such as rows of a table: `Context.ids` is then given, the module of `shared`
    # is called with the ids, and a model that is given embeddings in their place refuses.
    reads_ids: ClassVar[bool] = False
    # The arXiv number of the paper it is from.
    paper: ClassVar[str] = ""

    @classmethod
    def options(cls, given: dict[str, Any] | None) -> dict[str, Any]:
        """The options with defaults filled in. Raises `HeadwaterError` for an unknown name or a wrong type."""
        name = cls.name()
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
    def name(cls) -> str:
        """The mechanism's name in the config: headwater's, that of its package's entry point, or "module:Class".

        Not to be overridden.
        """
        return MECHANISMS.name_of(cls)

    # Asked before anything is built

    @classmethod
    def validate(cls, options: dict[str, Any], config: HeadwaterConfig) -> None:
        """Raise `HeadwaterError` where the options contradict the config."""

    @classmethod
    def embedding_range(cls, options: dict[str, Any], config: HeadwaterConfig) -> float | None:
        """Standard deviation of the embeddings that a new model should start with; None where any will do."""
        return None

    @classmethod
    def kernels(cls, options: dict[str, Any]) -> tuple[str, ...] | None:
        """The attention kernels the mechanism can work with; None for all."""
        return None

    @classmethod
    def share(cls, options: dict[str, Any], config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        """Say whose keys and values heads attend to, with `LayerPlan.attending`. The rest is not built."""
        return plans

    @classmethod
    def plan(cls, options: dict[str, Any], config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        """Say where the mechanism acts and what it reads, with `LayerPlan.acting` and `.reading`.

        Raises `HeadwaterError` where another mechanism leaves it nothing to act on.
        """
        return plans

    @classmethod
    def cost(cls, options: dict[str, Any], config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        """What acting in this layer adds."""
        return Cost()

    @classmethod
    def shared_cost(cls, options: dict[str, Any], config: HeadwaterConfig) -> Cost:
        """What the module of `shared` adds, once in a model."""
        return Cost()

    @classmethod
    def map_cost(
        cls, options: dict[str, Any], config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int
    ) -> Cost | None:
        """What the mechanism's own form of a linear map costs; None where it leaves the map alone."""
        return None

    @classmethod
    def feed_forward_size(cls, options: dict[str, Any]) -> str | None:
        """The option that sets the size of the feed-forward; None where the mechanism leaves it alone."""
        return None

    @classmethod
    def tunes(cls, options: dict[str, Any]) -> bool:
        """Whether a model's other parameters stay as they are, and only this mechanism's learn: those it `learns`."""
        return False

    def learns(self, parameter: str) -> bool:
        """Where the mechanism `tunes`: whether this one of the module's own parameters learns."""
        return True

    @classmethod
    def identity(cls, options: dict[str, Any]) -> dict[str, Any] | None:
        """The options with which the mechanism, added to a trained model, leaves its function as it is.

        options: those the user gave, possibly none; they are kept. None if they, or the mechanism itself, have no such
            start.
        """
        return None

    # Building

    @classmethod
    def build(cls, options: dict[str, Any], config: HeadwaterConfig, plan: LayerPlan) -> Self:
        """The module that acts in one layer."""
        raise NotImplementedError

    @classmethod
    def shared(cls, options: dict[str, Any], config: HeadwaterConfig) -> nn.Module | None:
        """A module that stands once in a model; what it returns is read as Source("shared", name, -1).

        It is called without arguments, or with the ids [B, T] of the new tokens where the mechanism `reads_ids`.
        """
        return None

    @classmethod
    def map(
        cls, options: dict[str, Any], config: HeadwaterConfig, layer: int, name: Map, d_in: int, d_out: int
    ) -> nn.Module | None:
        """The mechanism's own form of a linear map d_in -> d_out; None where it leaves the map alone."""
        return None

    @staticmethod
    def scalars(*shape: int) -> nn.Parameter:
        """An empty parameter of at least fp32, whatever the precision the model is built in."""
        return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    def start(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        """The start of a parameter of the module, drawn from `generator` on the CPU; a model must be told its own.

        parameter: its name in the module; one of a child as "conv.weight", for which None leaves it to the model:
            linear maps and embeddings start as all of the model's, other weights of two dimensions or more normal with
            1/√(their inputs), norms at one, biases at zero.
        """
        return None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Put every parameter of the module itself at its start; its children have PyTorch's outside of a model."""
        for name, parameter in self.named_parameters(recurse=False):
            if not parameter.is_meta and (value := self.start(name, generator)) is not None:
                parameter.copy_(value)

    # Training

    def group(self, parameter: str) -> Group | None:
        """The group in which a parameter is handed to the optimiser; None: what its kind and shape say.

        parameter: as in `start`. "matrices" take two dimensions, and Muon has them under `optimizer: muon`.
        """
        return None

    def decays(self, parameter: str) -> bool | None:
        """Whether a parameter decays; None: what the recipe says of its group. parameter: as in `start`."""
        return None

    def begins(self, step: Step) -> Any:
        """Asked when a training run begins, and not when it is resumed: what `before_step` is to have at each step.

        Values that JSON can keep, since checkpoints do; None: there is nothing to do.
        """
        return None

    def before_step(self, kept: Any, step: Step) -> None:
        """Called before each step of a run for which `begins` gave something; kept: that."""

    @classmethod
    def announced(cls, modules: int, step: Step) -> str | None:
        """A sentence for the run's record if so many modules of a model have something to do before each step."""
        return None

    # What `headwater bench` measures

    @classmethod
    def bench_form(cls, heads: int, dtype: torch.dtype) -> BenchForm | None:
        """The mechanism for `heads` heads of width 64, where training runs it in a form of its own."""
        return None

    def twin(self) -> nn.Module | None:
        """Of a module in place of a linear map: one with the same matmuls and no more, to be timed beside it."""
        return None

    # What `headwater inspect` asks of a trained one

    def shown(self, plan: LayerPlan, shared: dict[Source, Tensor]) -> dict[str, Shown]:
        """The mechanism's scalars by symbol, learned or fixed, as they are used in the layer of `plan`.

        shared: what the modules of `shared` return.
        """
        return {}

    def windows(self) -> dict[str, Tensor]:
        """Where queries, keys or values ("q", "k", "v") are mixed with those of earlier tokens: the weights.

        [window, heads] each, row s weighing the token s back; the heads are those the layer has.
        """
        return {}

    def terms(self, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        """Where `forward` is a sum of things from several layers: its terms for these inputs, by name, own last."""
        return {}

    def firing(self, *inputs: Any) -> Tensor | None:
        """Where the mechanism reads parameter tokens: how much each adds to the output, [..., n], not below 0."""
        return None

    # Stages

    def enter(self, x: Tensor, context: Context) -> Tensor:
        """Before a block's attention: its input x [B, T, D], ahead of the norm; the residual path keeps the old one."""
        return x

    def local(self, q: Tensor, kv: KV, context: Context) -> tuple[Tensor, KV]:
        """After projection, before RoPE and cache: q [B, H, T, d], kv [B, heads, T, d] -> same."""
        return q, kv

    def probabilities(self, weights: Tensor, context: Context) -> Tensor:
        """After the softmax: attention weights [B, H, T, S] -> same. The eager kernel alone shows them."""
        return weights

    def heads(self, out: Tensor, context: Context) -> Tensor:
        """Before the output map: what each head read, [B, T, H, d] -> same."""
        return out

    def leave(self, x: Tensor, context: Context) -> Tensor:
        """After the block: its output x [B, T, D] -> what the next block is given."""
        return x


def owner_of(model: nn.Module, qualified: str) -> tuple[Mechanism | None, str]:
    """The mechanism, innermost, inside which a parameter of `model` stands, and its name in there; else (None, "")."""
    module: nn.Module | None = model
    parts = qualified.split(".")
    found: tuple[Mechanism | None, str] = (None, "")
    for depth, part in enumerate(parts[:-1], 1):
        module = module._modules.get(part) if module is not None else None
        if isinstance(module, Mechanism):
            found = module, ".".join(parts[depth:])
    return found
