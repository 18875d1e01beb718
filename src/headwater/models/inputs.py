"""Everything that is computed before the blocks run: masks, positions, and how far back mechanisms may look.

`prepare_inputs` serves all callers, whether they decode with a cache, pack documents, compile, export or
serve. Its result, `ModelInputs`, is what the blocks read in addition to the residual stream.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor
from transformers import Cache, DynamicCache

from headwater.config.layers import layer_config
from headwater.config.plan import LayerPlan
from headwater.config.planner import output_only_from
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Ancestors
from headwater.models.cache import HeadwaterQuantizedCache
from headwater.models.input_checks import (
    CachedLayer,
    check_cache,
    check_cached_heads,
    check_document_starts,
    check_gaps,
    check_learned_positions,
    check_mask_size,
    check_position_count,
)
from headwater.nn.ancestors import find_ancestors
from headwater.nn.cache_name import CACHE, is_paged
from headwater.nn.documents import (
    Positions,
    check_documents,
    count_positions,
    restarted_positions,
    takes_documents,
)
from headwater.nn.engine import Engine
from headwater.nn.lookback import LookbackLimits, count_reach, find_gaps, find_reach, find_tail
from headwater.nn.masks import (
    LayerKind,
    NewTokens,
    find_new_tokens,
    find_seen,
    is_kernel_mask,
    keep_last_rows,
    make_mask,
)
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError

# Keys of the mapping that `prepare_generation` returns: the mask, by whether a layer has the sliding window; the reach.
MASK = {False: "headwater_mask", True: "headwater_sliding_mask"}
REACH = "headwater_reach"
# In place of the reach where padding lies between tokens: which tokens see which, [B, 1, T, S].
SEEN = "headwater_seen"
# The argument of `forward` by which some engines with paged attention are recognized: their attention layers.
# transformers' own is recognized by its cache, and others, such as vLLM from 0.32 on, by the attention function they
# install.
INSTANCES = "attention_instances"
# The borders of documents, as transformers names them.
BORDERS = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"


class InputSpec(NamedTuple):
    """Properties of the model that its inputs depend on.

    kinds: keyed by whether a layer has the sliding window. layers: the cache of each layer. output_only_from: as in the
    planner. id_readers: mechanisms that read tokens by their ids.
    """

    config: HeadwaterConfig
    kinds: dict[bool, LayerKind]
    layers: list[CachedLayer]
    lookback: LookbackLimits
    output_only_from: int
    id_readers: list[str]

    @classmethod
    def from_config(cls, config: HeadwaterConfig, plans: Sequence[LayerPlan]) -> Self:
        kinds = {slides: LayerKind(layer, layer_config(config, layer)) for slides, layer in config.kinds.items()}
        layers = []
        for plan in plans:
            k_heads, v_heads = (plan.attends, plan.attends) if config.materialise else (plan.k_heads, plan.v_heads)
            window = config.sliding_window if config.slides(plan.index) else None
            positions = plan.stores_positions(config) and not config.materialise
            layers.append(CachedLayer(len(k_heads), len(v_heads) + positions, window))
        id_readers = [name for name in config.mechanisms if resolve(name).needs_input_ids]
        return cls(config, kinds, layers, LookbackLimits.from_plans(plans), output_only_from(config, plans), id_readers)

    def follow_kernel(self) -> None:
        """Give the config of each kind of layer the model's attention kernel, which may have been changed."""
        for kind in self.kinds.values():
            if kind.config is not self.config:
                kind.config._attn_implementation_internal = self.config._attn_implementation_internal


class ForwardArguments(NamedTuple):
    """Arguments of `HeadwaterModel.forward`; kwargs: what goes on to the blocks and the attention kernel."""

    input_ids: Tensor | None
    inputs_embeds: Tensor
    attention_mask: Any
    position_ids: Tensor | None
    past_key_values: Any
    document_starts: Tensor | None
    kwargs: dict[str, Any]


class ModelInputs(NamedTuple):
    """Everything that the blocks read in addition to the residual stream.

    attention_mask: in the form of the kernel, by kind of layer. position_ids: [B or 1, T]. reach: see `Context`.
    past_key_values: the cache, or a server's engine. position_embeddings: the angles of RoPE, by kind of layer, as
    `rotate` takes them. token_ids: [B, T], if a mechanism reads them. left_out: tokens before these that blocks are not
    called with. kwargs: further arguments of every block. has_borders: the kernel finds the borders of documents or
    sequences itself, so its mask does not contain them.
    """

    attention_mask: dict[bool, Any]
    position_ids: Tensor | None = None
    reach: Tensor | Ancestors | None = None
    past_key_values: Cache | Engine | None = None
    position_embeddings: dict[bool, Any] = {}
    token_ids: Tensor | None = None
    left_out: int = 0
    kwargs: dict[str, Any] = {}
    has_borders: bool = False

    @property
    def cache(self) -> Cache | None:
        """The continued cache, which `forward` returns."""
        return self.past_key_values if isinstance(self.past_key_values, Cache) else None

    def arguments(self) -> dict[bool, dict[str, Any]]:
        """The keyword arguments of a block, by kind of layer."""
        name = "cache" if is_paged(self.past_key_values) else CACHE
        common = {
            **self.kwargs,
            "reach": self.reach,
            "position_ids": self.position_ids,
            "token_ids": self.token_ids,
            "left_out": self.left_out,
            name: self.past_key_values,
        }
        return {
            slides: {**common, "position_embeddings": self.position_embeddings.get(slides), "attention_mask": mask}
            for slides, mask in self.attention_mask.items()
        }


def make_cache(config: HeadwaterConfig, past_key_values: Any, use_cache: bool) -> Any:
    """Return the cache to continue: a new one if there is none and one is to be returned."""
    return DynamicCache(config=config) if use_cache and past_key_values is None else past_key_values


def is_served(arguments: ForwardArguments) -> bool:
    """Whether an engine with paged attention calls the model: it does its own masking, and knows the borders."""
    return is_paged(arguments.past_key_values) or arguments.kwargs.get(INSTANCES) is not None


def prepare_inputs(spec: InputSpec, arguments: ForwardArguments) -> ModelInputs:
    """Prepare everything that the blocks read except RoPE's angles. Raises `HeadwaterError` for contradictory ones."""
    spec.follow_kernel()
    cache = None if is_paged(arguments.past_key_values) else arguments.past_key_values
    check_position_count(arguments.position_ids, arguments.inputs_embeds.shape[1])
    check_cache(spec.layers, cache, arguments.inputs_embeds)
    tokens = find_new_tokens(arguments.inputs_embeds, cache)
    check_cached_heads(spec.layers, cache)
    masks = split_masks(spec, arguments.attention_mask)
    # A mask that says which tokens are real, or what they see, whatever the kind of layer.
    attention_mask = None if is_prepared(arguments.attention_mask) else next(iter(masks.values()))
    if isinstance(cache, HeadwaterQuantizedCache):
        cache.set_starts(attention_mask)
    check_gaps(attention_mask, arguments.input_ids, True in spec.kinds)
    served = is_served(arguments)
    cu_seq_lens = None if served else arguments.kwargs.get("cu_seq_lens_q")
    position_ids = find_document_positions(cu_seq_lens, tokens, attention_mask, arguments.position_ids)
    by_document = cu_seq_lens is not None and runs_by_document(spec, arguments)
    has_borders = served or by_document
    if not (has_borders or is_prepared(arguments.attention_mask)):
        masks = make_masks(spec, tokens, masks, position_ids)
    positions = find_positions(tokens, attention_mask, position_ids)
    reach = prepare_reach(spec, arguments, tokens, attention_mask, positions)
    check_learned_positions(spec.config, tokens, positions)
    return ModelInputs(
        masks,
        positions.ids,
        reach,
        arguments.past_key_values,
        token_ids=arguments.input_ids if spec.id_readers else None,
        kwargs={**arguments.kwargs, **choose_borders(arguments.kwargs, cu_seq_lens, tokens.length, by_document)},
        has_borders=has_borders,
    )


# Masks


def is_prepared(attention_mask: Any) -> bool:
    """Whether `generate` made these masks with `prepare_generation`."""
    return isinstance(attention_mask, dict) and any(name in attention_mask for name in MASK.values())


def split_masks(spec: InputSpec, attention_mask: Any) -> dict[bool, Any]:
    """Return the mask of each kind of layer as passed: one for all, by layer type, or made by `generate`.

    Raises `HeadwaterError` if a kind has none.
    """
    if is_prepared(attention_mask):
        return {slides: attention_mask[MASK[slides]] for slides in spec.kinds}
    if isinstance(attention_mask, dict):
        return {slides: find_mask_of_kind(spec, attention_mask, slides) for slides in spec.kinds}
    if len(spec.kinds) > 1 and is_kernel_mask(attention_mask):
        raise HeadwaterError(
            "This model has a sliding window in some layers only; give a mask for each kind of layer: "
            "{'full_attention': …, 'sliding_attention': …}."
        )
    return dict.fromkeys(spec.kinds, attention_mask)


def find_mask_of_kind(spec: InputSpec, attention_mask: dict[str, Any], slides: bool) -> Any:
    """Find the mask of one kind of layer among masks by layer type. Raises `HeadwaterError` if there is none."""
    usual = "sliding_attention" if slides else "full_attention"
    names = spec.config.layer_types[spec.kinds[slides].layer], usual
    for name in names if len(attention_mask) > 1 or len(spec.kinds) > 1 else attention_mask:
        if name in attention_mask:
            return attention_mask[name]
    raise HeadwaterError(
        f"There are attention masks for {', '.join(attention_mask)}, but none is for {' or '.join(names)}; add it."
    )


def make_masks(
    spec: InputSpec, tokens: NewTokens, masks: dict[bool, Any], position_ids: Tensor | None
) -> dict[bool, Any]:
    """Make the mask of each kind of layer in the form of its attention kernel."""
    return {slides: make_mask(kind, tokens, masks[slides], position_ids) for slides, kind in spec.kinds.items()}


def prepare_generation(
    spec: InputSpec, tokens: NewTokens, attention_mask: Tensor | None, position_ids: Tensor | None
) -> dict[str, Any]:
    """Prepare what `generate` needs outside compiled code: masks, and the reach, which does not follow from them."""
    spec.follow_kernel()
    masks = make_masks(spec, tokens, dict.fromkeys(spec.kinds, attention_mask), position_ids)
    prepared = {MASK[slides]: mask for slides, mask in masks.items()}
    if (seen := prepare_seen(spec, tokens, attention_mask)) is not None:
        prepared[SEEN] = seen
    elif spec.lookback.keeper is not None:
        position_ids = find_positions(tokens, attention_mask, position_ids).ids
        # Shaped like a mask, so that `generate` concatenates it like one.
        prepared[REACH] = count_reach(position_ids, attention_mask, tokens.past)[:, None, :, None]
    return prepared


# Positions and documents


def find_positions(tokens: NewTokens, attention_mask: Any, position_ids: Tensor | None) -> Positions:
    """Find the position ids of the new tokens: by default the number of real tokens before each."""
    if position_ids is not None:
        return Positions(position_ids, False)
    real = None if is_kernel_mask(attention_mask) else attention_mask
    ids = count_positions(real, tokens.past, tokens.length, tokens.inputs_embeds.device)
    return Positions(ids, attention_mask is None and not isinstance(tokens.past, Tensor))


def find_document_positions(
    cu_seq_lens: Tensor | None, tokens: NewTokens, attention_mask: Any, position_ids: Tensor | None
) -> Tensor | None:
    """Find the position ids, by default from the documents between these borders.

    Raises `HeadwaterError` where the two disagree, and where a mask leaves open what the borders mean.
    """
    if cu_seq_lens is None:
        return position_ids
    if attention_mask is not None:
        if position_ids is None:
            raise HeadwaterError("With an attention_mask, cu_seq_lens_q is not enough; pass position_ids too.")
        return position_ids
    shape = tokens.inputs_embeds.shape[0], tokens.length
    if position_ids is None:
        position_ids = restarted_positions(cu_seq_lens, *shape)
    check_documents(cu_seq_lens, position_ids, *shape)
    return position_ids


def runs_by_document(spec: InputSpec, arguments: ForwardArguments) -> bool:
    """Whether the attention kernel takes the borders of documents in place of a mask."""
    without = arguments.attention_mask is None and arguments.past_key_values is None
    return without and takes_documents(spec.config._attn_implementation)


def choose_borders(
    kwargs: dict[str, Any], cu_seq_lens: Tensor | None, length: int, by_document: bool
) -> dict[str, Any]:
    """Choose the borders of documents that the kernel gets: none where a mask replaces them."""
    if cu_seq_lens is None:
        return {}
    longest = kwargs.get("max_length_q") or length
    borders = (cu_seq_lens, cu_seq_lens, longest, longest) if by_document else (None,) * 4
    return dict(zip(BORDERS, borders, strict=True))


# Look-back


def prepare_reach(
    spec: InputSpec, arguments: ForwardArguments, tokens: NewTokens, attention_mask: Any, positions: Positions
) -> Tensor | Ancestors | None:
    """Prepare the number of tokens that each new token may look back, or its predecessors where rows branch; or None.

    The cache notes the positions for the tokens that come next.
    """
    lookback, starts = spec.lookback, arguments.document_starts
    if lookback.keeper is None:
        return None
    check_document_starts(starts, tokens.past, lookback.limit)
    tail: Any = find_tail(lookback.keeper, tokens.cache)
    reach: Tensor | Ancestors | None = None
    column = tokens.past
    if is_kernel_mask(attention_mask):
        seen, column = attention_mask, find_first_column(spec, tokens, attention_mask)
    elif is_prepared(arguments.attention_mask):
        seen = arguments.attention_mask.get(SEEN)
    else:
        seen = prepare_seen(spec, tokens, attention_mask)
    if seen is not None:
        raw = None if tail is None else tail.positions()
        reach = find_ancestors(positions.ids, seen, raw, column, lookback.tail_lengths, starts)
    elif starts is not None or not positions.are_slots:
        reach = find_prepared_reach(arguments.attention_mask)
        if reach is None:
            reach = find_reach(positions.ids, attention_mask, tokens.past, lookback.limit, starts)
    if tail is not None:
        tail.put_positions(positions.ids, tokens.inputs_embeds.shape[0], lookback.limit)
    return reach


def prepare_seen(spec: InputSpec, tokens: NewTokens, attention_mask: Tensor | None) -> Tensor | None:
    """Prepare which token sees which, [B, 1, T, S], if padding lies between tokens that a mechanism looks back over.

    None if it does not. From the first such padding on, the cache records all raw tokens, so that none is lost to it.
    """
    if spec.lookback.limit == 0 or attention_mask is None:
        return None
    are_between, are_new = find_gaps(attention_mask, tokens.past, tokens.length, spec.lookback.limit)
    if are_new and hasattr(tokens.cache, "activate_past_recording"):
        tokens.cache.activate_past_recording()
    return find_seen(tokens, attention_mask) if are_between else None


def find_prepared_reach(attention_mask: Any) -> Tensor | None:
    """Find the reach [B, T] that `generate` has prepared with the masks; None if it has not."""
    prepared = attention_mask.get(REACH) if isinstance(attention_mask, dict) else None
    return None if prepared is None else prepared[:, 0, :, 0]


def find_first_column(spec: InputSpec, tokens: NewTokens, attention_mask: Any) -> int | Tensor:
    """The first new token's column in a kernel's mask. Raises `HeadwaterError` if the mask has the wrong size."""
    layer = next(iter(spec.kinds.values())).layer
    slots, offset = tokens.length, 0
    if tokens.cache is not None:
        slots, offset = tokens.cache.get_mask_sizes(tokens.length, layer)
    check_mask_size(attention_mask, tokens.length, slots)
    return tokens.past - offset


# The last tokens only


def keep_last_tokens(spec: InputSpec, inputs: ModelInputs, x: Tensor, count: int) -> ModelInputs | None:
    """Select the inputs of the last `count` tokens of x [B, T, D]; None where that is not possible."""
    if inputs.has_borders or isinstance(inputs.reach, Ancestors):
        return None
    tokens = find_new_tokens(x, inputs.cache)
    masks = {
        slides: keep_last_rows(kind, tokens, inputs.attention_mask[slides], count)
        for slides, kind in spec.kinds.items()
    }
    if not all(possible for possible, _ in masks.values()):
        return None
    return inputs._replace(
        attention_mask={slides: mask for slides, (_, mask) in masks.items()},
        position_ids=select_last(inputs.position_ids, count),
        reach=select_last(inputs.reach, count),
        position_embeddings={
            slides: tuple(angle[:, :, -count:] for angle in angles)
            for slides, angles in inputs.position_embeddings.items()
        },
        token_ids=select_last(inputs.token_ids, count),
        left_out=tokens.length - count,
    )


def select_last(x: Tensor | None, count: int) -> Tensor | None:
    """The columns of the last `count` tokens in x [B, T]."""
    return None if x is None else x[:, -count:]
