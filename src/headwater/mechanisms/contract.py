"""The contract of a mechanism: subclass `Mechanism` to change where a Transformer's keys and values come from.

Override only the methods that yours needs. In this order they define its options, where it acts, its module, what the
module computes at each stage, and its cost. Methods that only some tools need are in
`headwater.mechanisms.capabilities`. `headwater new mechanism NAME` writes a working example, `headwater.testing` checks
it, and docs/extending.md is the guide.

In shapes: B batch, T new tokens, S all tokens including cached ones, D model width, H query heads, K key/value heads,
d head width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from headwater.config.plan import Cost, LayerPlan
from headwater.mechanisms.capabilities import OptionValues, check_capabilities
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config.text import HeadwaterConfig


class KV(NamedTuple):
    """Keys and values of the new tokens, each [B, heads, T, d]; heads: those the layer stores, possibly none."""

    k: Tensor
    v: Tensor


class QKV(NamedTuple):
    """Queries [B, H, T, d], and keys and values of the new tokens as in `KV`."""

    q: Tensor
    k: Tensor
    v: Tensor


class AttentionInputs(NamedTuple):
    """The inputs of a block's queries, keys and values (None: it has none), and the residual stream: [B, T, D]."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    stream: Tensor

    def list_inputs(self) -> list[Tensor]:
        """List the inputs of the queries, keys and values that the layer projects, in this order."""
        return [x for x in (self.q, self.k, self.v) if x is not None]

    def replace_inputs(self, inputs: Sequence[Tensor]) -> AttentionInputs:
        """Replace what `list_inputs` returns."""
        q, *keys_values = inputs
        k = None if self.k is None else keys_values[0]
        return self._replace(q=q, k=k, v=None if self.v is None else keys_values[-1])


class Hidden(NamedTuple):
    """The inputs of a feed-forward's activation, each [B, T, F]: act(gate)·up; without a gate, act(up)."""

    gate: Tensor | None
    up: Tensor


class Tail(Protocol):
    """A cache layer that keeps raw tokens, for mechanisms that look back (models/cache.py)."""

    def update_tail(self, name: str, x: Tensor, length: int, everything: bool = False) -> Tensor:
        """Return the `length` raw tokens before x [B, heads, T, d], zeros before the first; store the last ones of x.

        name: which tail; two mechanisms that use one name get each other's tokens. everything: return all tokens kept,
            which are more while a cache records its past.
        `headwater.mechanisms.shift.read_tail` is faster with a static cache that is compiled.
        """
        ...


class Ancestors(NamedTuple):
    """The predecessors of each token where rows branch, as in trees of candidates or with shared prefixes.

    slots: [window - 1, B or 1, T]. Row s - 1 holds the slot of the token s back, counted from the first new token:
        negative slots are in the tail (-1 is its last token), and T means that there is none.
    """

    slots: Tensor

    def look_back(self, x: Tensor, previous: Tensor | None, back: int) -> Tensor:
        """Return for each token of x [B, heads, T, d] the one `back` before it, zeros for none. previous: the tail."""
        tensors = (x, x.new_zeros(*x.shape[:2], 1, x.shape[3]))
        count = 0 if previous is None else previous.shape[2]
        slots = (self.slots[back - 1] + count)[:, None, :, None]
        return torch.cat(tensors if previous is None else (previous, *tensors), dim=2).gather(2, slots.expand(x.shape))


# As `Context.reach`: tokens before each one in its document, [B, T]; `Ancestors` in rows that branch; None: no limit.
Reach = Tensor | Ancestors | None


class Context(NamedTuple):
    """Everything that a stage may read in addition to its input.

    sources: tensors of earlier layers that the plan reads, then this layer's own so far. Index it with
        `LayerPlan.slot(source)`.
    reach: [B, T], how many tokens of the same document precede each token (0 at a document's first token, and at the
        first real token of a left-padded row; negative at padding), counted up to the longest tail of any mechanism.
        None: each row is one document, no mechanism keeps a tail, or all tokens have that many before them.
        `Ancestors`: rows branch or have padding between tokens, so that the previous token need not be in the
        previous slot.
    tail: the raw tokens of earlier calls; None without a cache.
    ids: [B, T], the new tokens' ids; None unless a mechanism of the model sets `needs_input_ids`.
    x: [B, T, D], the normed input of attention, from which queries, keys and values are projected (or the queries'
        input where these differ); None at the stages around attention and feed-forward.
    """

    sources: list[Tensor]
    reach: Reach = None
    tail: Tail | None = None
    ids: Tensor | None = None
    x: Tensor | None = None


def check_annotations(options: type) -> None:
    """Raise `HeadwaterError` for an option without a type, which a dataclass would leave out."""
    for name, value in vars(options).items():
        if not (name.startswith("_") or name in options.__annotations__ or callable(value)):
            raise HeadwaterError(f"{options.__qualname__}: give {name} a type, as in `{name}: int = {value!r}`.")


@torch.compiler.assume_constant_result  # torch.compile cannot trace the look-up
def _find_name(kind: type) -> str:
    return MECHANISMS.name_of(kind)


class Mechanism(nn.Module):
    """One mechanism in one layer of a model. By default every method changes nothing.

    The classmethods describe the mechanism before any module exists. They get `options`, the mechanism's parsed
    options, and `config`, the model's config, or one layer's config where they concern one layer. They must be pure
    functions of these. An instance is the module of one layer, made by `build_module`; its stage methods are called in
    the order in which the config names the mechanisms.

    The class is also a plain `nn.Module` for use in any other model, unless it only redirects heads: its constructor
    takes sizes, and its `forward` takes and returns tensors.
    """

    # The options with their types and defaults; it becomes a strict dataclass of `huggingface_hub`, which checks types
    # only if its file has no `from __future__ import annotations`.
    Options: ClassVar[type] = strict(dataclass(type("Options", (), {})))
    # The arXiv number of its paper; and what attention reads through it, such as "the previous token".
    paper: ClassVar[str] = ""
    source: ClassVar[str] = ""
    # The position of a built-in mechanism in the usual order of application. `plugins.mechanisms` reads it from its
    # file's text.
    order: ClassVar[int]
    # Whether the mechanism looks up tokens by id. Then `Context.ids` is set, its shared module (`HasSharedModule`) gets
    # the ids, and the model raises an error for `inputs_embeds`.
    needs_input_ids: ClassVar[bool] = False
    # Standard deviation of the embeddings in new models with it, unless `embedding_range` is set; None: no preference.
    embedding_range: ClassVar[float | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Options" in vars(cls):
            check_annotations(cls.Options)
            cls.Options = strict(dataclass(cls.Options))
        check_capabilities(cls)

    @classmethod
    def registered_name(cls) -> str:
        """Return the name in configs: a built-in one, the package's entry point, or "module:Class". Do not override."""
        return _find_name(cls)

    # Called before any module exists

    @classmethod
    def validate_options(cls, options: OptionValues, config: HeadwaterConfig) -> None:
        """Raise `HeadwaterError` if the options contradict each other or the config."""

    @classmethod
    def redirect_heads(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        """Redirect the heads that take keys or values from another layer, by `LayerPlan.attending`.

        plans: of layers that share nothing, whatever other mechanisms do. A head attends to what the named layer itself
        attends to. This runs for every mechanism before any `plan_stages`. Keys and values that no head
        attends to are neither projected nor cached.
        """
        return plans

    @classmethod
    def plan_stages(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        """Return the plans with the stages at which it acts, and what it reads of earlier layers, for example
        `plan.acting(cls, cls.transform_qkv, tails=[("k", 1)]).reading(Source("raw", "v", 0))`.

        tails: how many raw tokens the cache must keep for a mechanism that looks back.
        Raises `HeadwaterError` if another mechanism leaves it nothing to act on.
        """
        return plans

    @classmethod
    def build_module(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Self:
        """Build the module of one layer in which the mechanism acts.

        A mechanism with stages both inside and around attention gets two modules in a layer, one for each.
        """
        raise HeadwaterError(f"{cls.__name__} acts in layer {plan.index}, and has no build_module().")

    @classmethod
    def count_cost(cls, options: OptionValues, config: HeadwaterConfig, plan: LayerPlan) -> Cost:
        """Count the cost of that module."""
        return Cost()

    # Parameters

    def extra_repr(self) -> str:
        """torch's method: the shapes of the parameters."""
        return ", ".join(f"{name}={list(x.shape)}" for name, x in self._parameters.items() if x is not None)

    def initial_value(self, parameter: str, generator: torch.Generator | None = None) -> Tensor | None:
        """Return the initial value of a parameter. Draw random numbers on the CPU, from `generator`.

        Every parameter of the module's own needs a value. For a child module's, "conv.weight", None means the model's
        default: linear layers and embeddings like all others of the model, other weights of two or more dimensions
        normal with standard deviation 1/√fan_in, norm weights one, biases zero.
        """
        return None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set the parameters to their initial values. Outside a model, those without one keep PyTorch's."""
        # A mechanism inside this one sets its own.
        inner = tuple(f"{name}." for name, module in self.named_modules() if name and isinstance(module, Mechanism))
        for name, parameter in self.named_parameters():
            if parameter.is_meta or name.startswith(inner):
                continue
            if (value := self.initial_value(name, generator)) is not None:
                parameter.copy_(value)

    # Stages, in the order of the forward pass

    def transform_embedding(self, x: Tensor, context: Context) -> Tensor:
        """Transform the embedding x [B, T, D] -> same, in layer 0 only, for everything that reads it."""
        return x

    def update_residual(self, x: Tensor, context: Context) -> Tensor:
        """Update the residual stream [B, T, D] -> same, at the beginning of a block, for it and all that follow."""
        return x

    def transform_block_input(self, x: Tensor, context: Context) -> Tensor:
        """Transform x [B, T, D] -> same, before a block's norm and attention. The residual stream keeps the old x."""
        return x

    def split_attention_inputs(self, x: AttentionInputs, context: Context) -> AttentionInputs:
        """Give queries, keys and values separate inputs, and change the residual stream.

        The block's one norm and `transform_attention_input` then apply to each; it adds to the stream given here.
        """
        return x

    def transform_attention_input(self, x: Tensor, context: Context) -> Tensor:
        """Transform x [B, T, D] -> same, after the norm before attention, once for each of `LayerPlan.inputs`."""
        return x

    def transform_projections(self, x: QKV, context: Context) -> QKV:
        """Transform projections as `transform_qkv` does, before `qk_norm`: what other layers read as projected.

        A layer's own tensors are not in `context.sources` yet.
        """
        return x

    def transform_qkv(self, x: QKV, context: Context) -> QKV:
        """Transform q [B, H, T, d], k and v [B, heads, T, d] -> same, after projection, before RoPE and the cache."""
        return x

    def transform_attended_kv(self, kv: KV, context: Context) -> KV:
        """Transform what all K heads attend to, k and v [B, K, S, d] -> same, after RoPE and the cache.

        What the cache holds and later layers read does not change. All heads then run in one kernel call. In a layer
        with `LayerPlan.latent_heads` k is the latent, [B, latent_heads, S, d], v its positions or nothing, and the
        keys' norm and RoPE come after this.
        """
        return kv

    def add_key_values(self, context: Context) -> KV:
        """Return keys and values that every token attends to in addition: each [K, n, d], for all K key/value heads.

        They share the tokens' softmax, and have no position. Not all kernels support this: list those that do in
        `LimitsKernels`. A decoding step does not join them to the cached history, which would copy it.
        """
        raise NotImplementedError

    def transform_attention_weights(self, weights: Tensor, context: Context) -> Tensor:
        """Transform the attention weights [B, H, T, S] -> same, after the softmax. Only the eager kernel has them."""
        return weights

    def transform_head_outputs(self, out: Tensor, context: Context) -> Tensor:
        """Transform what each head read, [B, T, H, d] -> same, before the output projection."""
        return out

    def transform_attention_output(self, x: Tensor, context: Context) -> Tensor:
        """Transform attention's output x [B, T, D] -> same, before it is added to the residual stream."""
        return x

    def transform_feed_forward_input(self, x: Tensor, context: Context) -> Tensor:
        """Transform x [B, T, D] -> same, after the norm before the feed-forward."""
        return x

    def transform_feed_forward_hidden(self, hidden: Hidden, context: Context) -> Hidden:
        """Transform the feed-forward's `Hidden` before its activation. Not called where a mechanism replaces it."""
        return hidden

    def transform_feed_forward_output(self, x: Tensor, context: Context) -> Tensor:
        """Transform the feed-forward's output x [B, T, D] -> same, before it is added to the residual stream."""
        return x

    def transform_block_output(self, x: Tensor, context: Context) -> Tensor:
        """Transform a block's output x [B, T, D] -> the input of the next block."""
        return x
