"""`HeadwaterModel` and `HeadwaterForCausalLM`: the Hugging Face models around the stack of blocks."""

# No postponed annotations in this file: other packages read those of `forward` at run time.
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from headwater.config.plan import Source
from headwater.config.planner import output_only_from
from headwater.config.text import HeadwaterConfig
from headwater.kernels.attention import MATMUL
from headwater.kernels.choose import measured
from headwater.kernels.linear import packed
from headwater.kernels.varlen import VARLEN
from headwater.mechanisms.contract import Ancestors
from headwater.models.cache import restart  # the module registers the cache layers, too
from headwater.models.pretrained import HeadwaterPreTrainedModel, shared_modules
from headwater.models.stack import Last, OfKind, Stack
from headwater.nn.attention import Engine, tail_of
from headwater.nn.cache_name import CACHE, cache_of, is_paged, one_cache
from headwater.nn.linear import apply_linear
from headwater.nn.loss import causal_lm_loss, counted, shifted, squared_normalizers
from headwater.nn.masking import (
    MASK,
    REACH,
    ancestors,
    attention_mask_for,
    check_documents,
    decodes,
    is_made,
    last_rows,
    masks_for_generate,
    positions,
    positions_in,
    reach,
    refuse_where,
    takes_documents,
    waits,
)
from headwater.nn.norm import make_norm
from headwater.nn.position import RotaryEmbedding, document_lengths, for_heads
from headwater.plugins.registry import resolve
from headwater.util.errors import HeadwaterError
from headwater.util.layout import IS_EXPORTED

# The argument of `forward` by which some engines with paged attention are recognized: their attention layers.
# transformers' own is recognized by its cache, and others, such as vLLM from 0.32 on, by the attention function they
# install.
INSTANCES = "attention_instances"
OWN_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention", MATMUL, VARLEN)
# The borders of documents, as transformers names them.
BORDERS = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"


class HeadwaterModel(HeadwaterPreTrainedModel):
    """Token embeddings, the stack of blocks, and the final norm."""

    def __init__(self, config: HeadwaterConfig) -> None:
        config.settle()  # fields may have been set since it was created
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        # The first layer of each kind, by whether it has the sliding window, and the config as it sees it.
        self.kinds = {slides: (layer, config.at(layer)) for slides, layer in config.kinds.items()}
        given = config.sliding_fields or {}
        differs = config.position == "rope" and ("rope_parameters" in given or "head_dim" in given)
        self.rotary_emb = RotaryEmbedding(config) if config.position == "rope" else None
        self.sliding_rotary_emb = RotaryEmbedding(self.kinds[True][1]) if differs else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = Stack(config)
        self.mechanisms = shared_modules(config)
        self.reads_ids = [name for name in config.mechanisms if resolve(name).needs_input_ids]
        plans = config.layer_plans
        # Heads whose keys and values each layer caches.
        self.cached_heads = [
            (len(p.attends),) * 2 if config.materialise else (len(p.k_heads), len(p.v_heads)) for p in plans
        ]
        self.tail = max(plan.tail for plan in plans)
        # For s = 1, 2, …: the length of the shortest tail that still holds the token s back.
        kept = {length for plan in plans for _, length, _ in plan.tails}
        self.tails = tuple(min(n for n in kept if n >= back) for back in range(1, self.tail + 1))
        self.keeper = next((plan for plan in plans if plan.tails), None)
        self.output_only_from = output_only_from(config)
        self.is_pageable = False
        self.norm = make_norm(config, final=True)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_starts: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]
    ) -> BaseModelOutputWithPast:
        """Run the model.

        input_ids: [B, T], or inputs_embeds: [B, T, D].
        attention_mask: [B, S], 1 for real tokens, cached ones included (with a static cache that has tokens it may be
            as wide as that cache; then later columns are not looked at); or the kernel's mask, [B, 1, T, S], under
            which rows may branch. The previous token of a token at position p is then the one it sees at p - 1; raises
            `HeadwaterError` if a mechanism looks back and there is not exactly one.
        position_ids: [B or 1, T]. A document starts wherever they restart at 0; neither attention nor mechanisms look
            across that boundary. Default: the number of real tokens before each.
        past_key_values, cache: two names of one argument, of which transformers passes the second from 5.24 on. Raises
            `HeadwaterError` if both are given.
        use_cache: return keys and values to continue from; default `config.use_cache`, and False while training.
        document_starts: [B, T], True where a document starts: for rows in which attention crosses from one document to
            the next, but mechanisms that look at earlier tokens do not.
        logits_to_keep: if a number, only the outputs of that many last tokens are needed (0: all); then there may be no
            others. Layers that store nothing for later tokens run for these alone, except in training.
        cu_seq_lens_q: int32 [n + 1], where each document begins among all B·T tokens, and the end
            (`headwater.nn.masking.cu_seq_lens` makes it from position_ids, and it gives the default of position_ids).
            Attention varlen and flash_attention_* take it in place of a mask, where there is neither a cache nor an
            attention_mask. max_length_q: no document is longer; default T.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        elif self.reads_ids:
            raise HeadwaterError(
                f"{' and '.join(self.reads_ids)} reads tokens by their ids, but this model was given embeddings; pass "
                "input_ids."
            )
        if use_cache is None:
            # Training reads no cache, and building one would copy every key and value.
            use_cache = self.config.use_cache and not self.training
        past_key_values = one_cache(past_key_values, cache)
        engine = past_key_values if is_paged(past_key_values) else None
        if engine is not None:
            past_key_values = None
        elif use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        made = attention_mask if isinstance(attention_mask, dict) else {}
        masks: dict[bool, Any] = {}  # by kind of layer, where they were made before
        if any(name in made for name in MASK.values()):
            masks, attention_mask = {slides: made[MASK[slides]] for slides in self.kinds}, None
        elif made:
            masks = {slides: self.mask_among(made, slides) for slides in self.kinds}
            attention_mask = next(iter(masks.values()))
        elif len(self.kinds) > 1 and is_made(attention_mask):
            raise HeadwaterError(
                "This model has a sliding window in some layers only; give a mask for each kind of layer: "
                "{'full_attention': …, 'sliding_attention': …}."
            )

        length, device = inputs_embeds.shape[1], inputs_embeds.device
        if position_ids is not None and not torch.compiler.is_compiling() and position_ids.shape[-1] != length:
            raise HeadwaterError(
                f"position_ids has {position_ids.shape[-1]} positions and the input {length} tokens; give one for each."
            )
        if past_key_values is not None and not torch.compiler.is_compiling():
            self.check_cache(past_key_values, *inputs_embeds.shape[:2])
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        self.check_heads(past_key_values)
        # Such an engine does its own masking and borders.
        paged = engine is not None or kwargs.get(INSTANCES) is not None
        borders = None if paged else kwargs.get("cu_seq_lens_q")
        if borders is not None and attention_mask is None:
            if position_ids is None:
                position_ids = positions_in(borders, inputs_embeds.shape[0], length)
            check_documents(borders, position_ids, inputs_embeds.shape[0], length)
        elif borders is not None and position_ids is None:
            raise HeadwaterError("With an attention_mask, cu_seq_lens_q says too little; give position_ids too.")
        by_document = borders is not None and attention_mask is None and past_key_values is None and not made
        by_document = by_document and takes_documents(self.config._attn_implementation)
        if borders is not None:
            longest = kwargs.get("max_length_q") or length
            used = (borders, borders, longest, longest) if by_document else (None,) * 4
            kwargs.update(zip(BORDERS, used, strict=True))
        if not self.is_pageable and (paged or (past_key_values is None and self.may_be_paged())):
            self.config.check_paged()
            self.is_pageable = True  # checked once: it computes the plans again
        if paged or by_document:
            masks = dict.fromkeys(self.kinds, attention_mask)
        elif not any(name in made for name in MASK.values()):
            masks = {
                slides: attention_mask_for(
                    own, inputs_embeds, masks.get(slides, attention_mask), past_key_values, position_ids, layer
                )
                for slides, (layer, own) in self.kinds.items()
            }
        # In plain rows the previous token is in the previous slot, without looking at positions or a mask. A static
        # cache may have been reset without its raw tokens, as exported programs do.
        plain = position_ids is None and attention_mask is None and document_starts is None
        plain = plain and not isinstance(past, Tensor)
        given = position_ids
        if position_ids is None:
            position_ids = positions(attention_mask, past, length, device)
        if input_ids is None and attention_mask is not None and not is_made(attention_mask):
            self.check_gaps(attention_mask)
        looks_back: Tensor | Ancestors | None = None
        if self.keeper is not None:
            if document_starts is not None and self.tail > 1 and bool(past > 0):
                raise HeadwaterError(
                    "With a window longer than 2, a cache does not record where earlier documents started; pass "
                    "document_starts only without a cache."
                )
            tail: Any = tail_of(self.keeper, past_key_values)
            if is_made(attention_mask):
                known = None if tail is None else tail.positions()
                first = self.first_column(attention_mask, past_key_values, past, length)
                looks_back = ancestors(position_ids, attention_mask, known, first, self.tails, document_starts)
            elif not plain:
                if REACH in made:
                    looks_back = made[REACH][:, 0, :, 0]
                else:
                    looks_back = reach(position_ids, attention_mask, past, self.tail, document_starts)
            if tail is not None:
                tail.put_positions(position_ids, inputs_embeds.shape[0], self.tail)

        if self.embed_positions is not None:
            counts = given is None and attention_mask is None and not isinstance(past, Tensor)
            last = past + length - 1 if counts else None
            self.check_positions(position_ids, last, torch.is_grad_enabled() or decodes(past, length))
        if past_key_values is not None and (isinstance(past, Tensor) or past):
            self.check_frequencies(position_ids, past)
        x, angles = self.placed(inputs_embeds, position_ids)
        of_kind = {
            slides: {"position_embeddings": angles[slides], "attention_mask": masks[slides]} for slides in self.kinds
        }
        passed: dict[str, Any] = dict(
            reach=looks_back,
            position_ids=position_ids,
            use_cache=use_cache,
            **({CACHE: past_key_values} if engine is None else {"cache": engine}),
            **({"token_ids": input_ids} if self.reads_ids else {}),
            **kwargs,
        )
        last = None if paged or by_document else self.last(x, logits_to_keep, passed, of_kind)
        shared = self.shared_tensors(input_ids)
        x = self.layers(self.dropout(x), shared=shared, of_kind=of_kind, last=last, **passed)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE: past_key_values})

    def placed(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, dict[bool, Any]]:
        """What the first block is given, from the embeddings x [B, T, D], and each kind of layer's angles of RoPE."""
        if self.config.embedding_scale != 1:  # rounded to the embedding's precision, as in Gemma
            x = x * torch.full((), float(self.config.embedding_scale), dtype=x.dtype, device=x.device)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x, self.angles(x, position_ids)

    def angles(self, x: Tensor, position_ids: Tensor) -> dict[bool, Any]:
        """Each kind of layer's angles of RoPE, in the dtype of x."""
        angles = dict.fromkeys(
            self.kinds, None if self.rotary_emb is None else for_heads(*self.rotary_emb(x, position_ids))
        )
        if self.sliding_rotary_emb is not None:
            angles[True] = for_heads(*self.sliding_rotary_emb(x, position_ids))
        return angles

    def check_gaps(self, attention_mask: Tensor) -> None:
        """Raise `HeadwaterError` for embeddings with padding between them, as PEFT's prompts before a padded row.

        Windows count such padding, and mechanisms do not look across it, so the row would differ from the row alone.
        """
        if self.keeper is None and True not in self.kinds:
            return
        real = attention_mask.bool()
        refuse_where(
            real[:, 1:] & ~real[:, :-1] & (real.cumsum(-1)[:, :-1] > 0),
            "A model with a sliding window or with mechanisms that look back takes no embeddings with padding between "
            "them, such as PEFT's virtual tokens before a padded row; give it rows of equal length, or one at a time.",
        )

    def frequencies_change(self, before: Tensor, now: Tensor) -> Tensor:
        """Where RoPE turns a sequence of `now` tokens by other frequencies than one of `before` tokens: booleans."""
        changed = torch.zeros_like(now, dtype=torch.bool)
        for rope in (self.rotary_emb, self.sliding_rotary_emb):
            if rope is not None and rope.follows_length:
                changed = changed | (rope.span(before) != rope.span(now))
        return changed

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies of RoPE change with the length of a sequence."""
        ropes = (self.rotary_emb, self.sliding_rotary_emb)
        return any(rope is not None and rope.follows_length for rope in ropes)

    def check_frequencies(self, position_ids: Tensor, past: int | Tensor) -> None:
        """Raise `HeadwaterError` where the new tokens make a sequence so long that its cached keys are out of date.

        Every earlier token would have other keys and values then, and other hidden states.
        """
        if not self.follows_length:
            return
        before = position_ids[:, :1]  # tokens of this document in the cache
        changed = self.frequencies_change(before, document_lengths(position_ids)[:, :1])
        refuse_where(
            changed & (before > 0) & (past > 0),
            "With these tokens the sequence is so long that its RoPE takes other frequencies, which the keys in the "
            "cache do not have; pass all tokens at once with an empty cache or none, as generate does (without "
            "prefill_chunk_size).",
        )

    def served(self, input_ids: Tensor, position_ids: Tensor, engine: Engine, stream: Tensor | None = None) -> Tensor:
        """The hidden states [N, D] of N tokens of any sequences, input_ids and position_ids [N].

        engine: knows which sequences they belong to, and their earlier tokens. Each token is a row of its own. stream:
        [N, D], what earlier blocks have made of them, where another process has these.
        """
        ids, place = input_ids[:, None], position_ids[:, None]
        if stream is None:
            x, angles = self.placed(self.embed_tokens(ids), place)
        else:
            x, angles = stream[:, None], self.angles(stream, place)
        x = self.layers(
            x,
            shared=self.shared_tensors(ids),
            of_kind={slides: {"position_embeddings": turns} for slides, turns in angles.items()},
            reach=place.clamp(max=self.tail) if self.tail else None,
            position_ids=place,
            **{CACHE: engine},
            **({"token_ids": ids} if self.reads_ids else {}),
        )
        return self.norm(x)[:, 0]

    def last(self, x: Tensor, tokens: int | Tensor, given: dict[str, Any], of_kind: OfKind) -> Last | None:
        """How blocks from `output_only_from` on are called if they may run for the last `tokens` of x [B, T, D] alone.

        given, of_kind: arguments for all tokens. None if these blocks run for all tokens: where all are asked for, in
        training, whose dropout draws numbers for all, and with a mask whose last rows cannot be taken.
        """
        length, first = x.shape[1], self.output_only_from
        if first == len(self.layers) or self.training or not isinstance(tokens, int) or not 0 < tokens < length:
            return None
        recorded = (f"output_{name}" for name in self._can_record_outputs)
        if any(given.get(name, getattr(self.config, name, False)) for name in recorded):
            return None
        if isinstance(given["reach"], Ancestors):
            return None
        changed_of_kind = {}
        for slides, (layer, own) in self.kinds.items():
            mask, turns = of_kind[slides]["attention_mask"], of_kind[slides]["position_embeddings"]
            possible, mask = last_rows(own, mask, tokens, length, given.get(CACHE), x.device, layer)
            if not possible:
                return None
            turns = None if turns is None else tuple(part[:, :, -tokens:] for part in turns)
            changed_of_kind[slides] = {"position_embeddings": turns, "attention_mask": mask}
        looks_back, ids = given["reach"], given.get("token_ids")
        changed = dict(
            reach=None if looks_back is None else looks_back[:, -tokens:],
            position_ids=given["position_ids"][:, -tokens:],
            left_out=length - tokens,
            **({} if ids is None else {"token_ids": ids[:, -tokens:]}),
        )
        return Last(first, tokens, given | changed, changed_of_kind)

    def shared_tensors(self, input_ids: Tensor | None) -> dict[Source, Tensor]:
        """The outputs of the modules that the model holds once. input_ids: the new tokens [B, T]."""
        return {
            Source("shared", name, -1): module(input_ids) if name in self.reads_ids else module()
            for name, module in self.mechanisms.named()
        }

    def may_be_paged(self) -> bool:
        """Whether the attention kernel is neither transformers' nor ours, and may manage keys and values itself."""
        name = self.config._attn_implementation or "eager"
        own = name.startswith(OWN_ATTENTION) or ("/" in name and "|" not in name)  # owner/name: a kernel of the hub
        return not own and not self.training

    def mask_among(self, made: dict[str, Any], slides: bool) -> Any:
        """The mask of one kind of layer among those by layer type. Raises `HeadwaterError` if there is none."""
        usual = "sliding_attention" if slides else "full_attention"
        ours = self.config.layer_types[self.kinds[slides][0]], usual
        for name in ours if len(made) > 1 or len(self.kinds) > 1 else made:
            if name in made:
                return made[name]
        raise HeadwaterError(f"Of the attention masks for {', '.join(made)} none is for {' or '.join(ours)}; add it.")

    def first_column(self, mask: Any, past_key_values: Cache | None, past: int | Tensor, length: int) -> int | Tensor:
        """The first new token's column in a kernel's mask. Raises `HeadwaterError` if the mask has the wrong size."""
        layer = next(iter(self.kinds.values()))[0]
        slots, offset = (length, 0) if past_key_values is None else past_key_values.get_mask_sizes(length, layer)
        if tuple(mask.shape[2:]) != (length, slots):
            raise HeadwaterError(
                f"The attention mask is for {mask.shape[2]} new tokens among {mask.shape[3]}, and there are {length} "
                f"among {slots}."
            )
        return past - offset

    def check_heads(self, cache: Cache | None) -> None:
        """Raise `HeadwaterError` for a cache with other heads: another model's, or that of PEFT's prefix tuning."""
        for index, (layer, ours) in enumerate(zip(getattr(cache, "layers", ()), self.cached_heads, strict=False)):
            if layer.is_compileable:  # static, which may have room for more heads than it uses
                continue
            held = [getattr(layer, name, None) for name in ("keys", "values")]
            if any(x is not None and x.ndim == 4 and x.shape[1] != n for x, n in zip(held, ours, strict=True)):
                raise HeadwaterError(
                    f"Layer {index} caches {ours[0]} heads of keys and {ours[1]} of values, and the cache it is given "
                    f"has {held[0].shape[1]} and {held[1].shape[1]}; for prefix tuning, or another model's cache, load "
                    "the model with materialise=True."
                )

    def check_cache(self, cache: Cache, rows: int, length: int) -> None:
        """Raise `HeadwaterError` for a cache made for another model, which would lose what this one attends to, or for
        another number of rows.
        """
        if not isinstance(cache, Cache):
            raise HeadwaterError(
                f"{CACHE} must be a transformers Cache, not {type(cache).__name__}; make it with "
                "DynamicCache(config=model.config)."
            )
        if cache.layer_class_to_replicate is None and len(cache.layers) < len(self.layers):
            raise HeadwaterError(
                f"This cache is for {len(cache.layers)} layers and the model has {len(self.layers)}; make it with "
                f"{type(cache).__name__}(config=model.config)."
            )
        for index, layer in enumerate(cache.layers[: len(self.layers)]):
            keys = getattr(layer, "keys", None)
            if isinstance(keys, Tensor) and keys.ndim == 4 and len(keys) != rows:
                raise HeadwaterError(
                    f"This cache was made for {len(keys)} rows and is given {rows}; make another one with "
                    f"{type(cache).__name__}(config=model.config, …), since reset() keeps the number of rows of a "
                    "static cache."
                )
            if not getattr(layer, "is_sliding", False):
                continue
            window = self.config.sliding_window if self.config.slides(index) else None
            kept = getattr(layer, "sliding_window", None)
            if kept is None:  # static: at most as many slots as the window, which suffice until they are full
                full = getattr(layer, "cumulative_length_int", 0) + length > layer.get_max_length()
                kept = layer.get_max_length() if full else window
            if window is None or kept < window:
                raise HeadwaterError(
                    f"This cache drops tokens that the model still attends to (sliding_window of layer {index} is "
                    f"{window}); make it with {type(cache).__name__}(config=model.config)."
                )

    def check_positions(self, position_ids: Tensor, last: int | None = None, later: bool = False) -> None:
        """Raise `HeadwaterError` for a position that has no embedding: on a GPU the lookup would abort the device.

        last: the largest position where it is known without looking. later: a GPU need not be waited for; there the
        error comes later, as a failed assertion with the same sentence.
        """
        size = self.config.max_position_embeddings
        advice = f"give it at most {size} tokens, or train with a larger max_position_embeddings or position=rope."
        if torch.compiler.is_compiling() or position_ids.is_meta or not position_ids.numel():
            return
        if last is None and later and waits(position_ids):
            torch._assert_async(
                (position_ids < size).all(), f"A position is beyond this model's {size} learned positions; {advice}"
            )
            return
        last = int(position_ids.max()) if last is None else last
        if last >= size:
            raise HeadwaterError(f"Position {last} is beyond this model's {size} learned positions; {advice}")


@dataclass
class HeadwaterOutput(CausalLMOutputWithPast):
    """transformers' output, with `z_loss`: mean of logsumexp(logits)², 0-d, where it was asked for."""

    z_loss: Tensor | None = None


class HeadwaterForCausalLM(HeadwaterPreTrainedModel, GenerationMixin):
    """The model with a language-modeling head. `generate` works as for any transformers model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    packs_weights = True

    def __init__(self, config: HeadwaterConfig) -> None:
        config.settle()
        super().__init__(config)
        self.model = HeadwaterModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = causal_lm_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False,
        output_z_loss: bool = False,
        loss_chunk_tokens: int | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]
    ) -> HeadwaterOutput:
        """Logits [B, T, V] and, with labels, the mean loss in nats.

        labels: [B, T]; the loss at position t is for labels[t + 1], and -100 counts nothing. `shift_labels` gives
            labels that are shifted already. `num_items_in_batch` divides the summed loss instead of the mean.
        logits_to_keep: compute only this many logits, the last ones (0: all), or those at the given indices.
        skip_logits: with labels, return no logits. A compiled graph that returns them gets a gradient of zeros for
            them, [B, T, V], which it writes and adds.
        output_z_loss: with labels, return `z_loss` too: the mean of logsumexp(logits)² over the same tokens (PaLM,
            arXiv 2204.02311, section 5, without its weight).
        loss_chunk_tokens: with labels and `skip_logits`, the number of tokens whose logits exist at once. They are
            computed again in the backward pass: the output head costs 4/3 of its FLOPs and a part of its memory.
        The other arguments are those of `HeadwaterModel`.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=one_cache(past_key_values, cache),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep if labels is None else 0,
            **kwargs,
        )
        hidden = self.scaled(positions_kept(outputs.last_hidden_state, logits_to_keep))
        logits = loss = z_loss = None
        if labels is None or not skip_logits:
            logits = self.logits(hidden)
        if labels is not None:
            targets = kwargs.pop("shift_labels", None)
            loss, z_loss = self.losses(hidden, logits, labels, targets, loss_chunk_tokens, output_z_loss, **kwargs)
        return HeadwaterOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            z_loss=z_loss,
            **{CACHE: cache_of(outputs)},
        )

    def scaled(self, hidden: Tensor) -> Tensor:
        """What the output head is given."""
        return hidden if self.config.logit_scale == 1 else hidden * float(self.config.logit_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """The output head: hidden [..., D] -> [..., V]."""
        logits, cap = apply_linear(self.lm_head, hidden), self.config.logit_softcap
        return logits if cap is None else float(cap) * (logits / float(cap)).tanh()

    def losses(
        self,
        hidden: Tensor,
        logits: Tensor | None,
        labels: Tensor,
        shift_labels: Tensor | None,
        chunk: int | None,
        with_z: bool,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(loss, z-loss or None). logits: those of `hidden`, computed here if None, `chunk` tokens at a time."""
        if logits is None and chunk is not None:
            return self.chunked_losses(hidden, labels, shift_labels, chunk, with_z, **kwargs)
        return self.whole_losses(hidden, logits, labels, shift_labels, with_z, **kwargs)

    def whole_losses(
        self,
        hidden: Tensor,
        logits: Tensor | None,
        labels: Tensor,
        shift_labels: Tensor | None,
        with_z: bool,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `losses`, with all logits at once."""
        logits = self.logits(hidden) if logits is None else logits
        size = self.config.vocab_size
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, shift_labels=shift_labels, **kwargs)
        if not with_z:
            return loss, None
        targets = shifted(labels) if shift_labels is None else shift_labels
        return loss, squared_normalizers(logits, targets) / counted(targets, kwargs.get("num_items_in_batch"))

    def chunked_losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        shift_labels: Tensor | None,
        size: int,
        with_z: bool,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `losses`, with the logits of `size` tokens at a time, which are recomputed in the backward pass."""
        targets = shifted(labels) if shift_labels is None else shift_labels
        parts = zip(hidden.flatten(0, 1).split(size), targets.flatten().split(size), strict=True)
        # The head draws nothing random, and saving the generators' states would wait for the device.
        recomputed = partial(checkpoint, self.sums, use_reentrant=False, preserve_rng_state=False)
        chunks = [recomputed(rows[None], wanted[None], with_z, **kwargs) for rows, wanted in parts]
        total = torch.stack(chunks).sum(0) / counted(targets, num_items_in_batch)
        return total[0], total[1] if with_z else None

    def sums(self, hidden: Tensor, targets: Tensor, with_z: bool, **kwargs: Any) -> Tensor:
        """The sum of a chunk's losses, and of its z-losses if asked: [1] or [2]."""
        logits = self.logits(hidden)
        loss = self.loss_function(
            logits=logits,
            labels=None,
            vocab_size=self.config.vocab_size,
            num_items_in_batch=1,
            shift_labels=targets,
            **kwargs,
        )
        return torch.stack((loss, squared_normalizers(logits, targets).to(loss.dtype))) if with_z else loss[None]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. On a CPU it runs the kernels that were timed to be fastest on this machine
        (`headwater.kernels.choose`). In bfloat16 a long generation may keep a second copy of the weights meanwhile
        (`headwater.kernels.linear.packed`), unless `packs_weights` is False. The cache may be given under either of its
        names; raises `HeadwaterError` if under both.
        """
        given = one_cache(kwargs.pop("past_key_values", None), kwargs.pop("cache", None))
        if given is not None:
            kwargs[CACHE] = given
        # transformers changes the config for it, and leaves that changed after an error.
        chosen = kwargs.get("generation_config") or self.generation_config
        if kwargs.get("assistant_early_exit", getattr(chosen, "assistant_early_exit", None)) is not None:
            raise HeadwaterError(
                "assistant_early_exit runs a part of the layers, which headwater's models cannot; give an "
                "assistant_model, or prompt_lookup_num_tokens."
            )
        recording = [layer for layer in getattr(given, "layers", ()) if getattr(layer, "record_past", False)]
        with measured(), packed() if self.packs_weights else nullcontext():
            made = super().generate(*args, **kwargs)
        if getattr(kwargs.get("generation_config"), "is_assistant", False):
            return made  # the caller will roll tokens back
        # Assisted decoding makes the cache record its past in order to roll tokens back, and does not end that.
        for layer in getattr(getattr(made, CACHE, given), "layers", ()):
            if hasattr(layer, "end_past_recording") and layer not in recording:
                layer.end_past_recording()
        return made

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,  # transformers looks for the name
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers. Where RoPE's frequencies change with the new tokens, the cache is filled anew.

        What wraps this method, as PEFT's prompts do, finds the cache under both of its names.
        """
        cache = kwargs.get(CACHE)
        if cache is not None and self.is_outgrown(cache, input_ids, attention_mask, kwargs.get("position_ids")):
            restart(cache)
            next_sequence_length = None
        kwargs |= dict(attention_mask=attention_mask, inputs_embeds=inputs_embeds)
        inputs = super().prepare_inputs_for_generation(input_ids, next_sequence_length=next_sequence_length, **kwargs)
        if CACHE in inputs and "prepare_inputs_for_generation" in vars(self):
            inputs |= dict.fromkeys(("past_key_values", "cache"), inputs[CACHE])
        return inputs

    def is_outgrown(
        self, cache: Cache, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> bool:
        """Whether RoPE turned the cached tokens by other frequencies than it will with all of input_ids [B, T].

        False if these are not all tokens: then `forward` raises an error.
        """
        if not self.model.follows_length:
            return False
        past, length = cache.get_seq_length(), input_ids.shape[1]
        if not past or length <= past:
            return False
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            return False
        if attention_mask is None and position_ids is not None and bool(position_ids[:, 0].any()):
            return False
        if position_ids is None or position_ids.shape[-1] != length:
            position_ids = positions(attention_mask, 0, length, input_ids.device)
        before, now = document_lengths(position_ids[:, :past]), document_lengths(position_ids)[:, :past]
        return bool(self.model.frequencies_change(before, now).any())

    def _assisted_decoding(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        """As in transformers. Raises `HeadwaterError` where candidates may be of a length with other frequencies."""
        if self.model.follows_length:
            lengths = torch.tensor([input_ids.shape[1], generation_config.max_length], device=input_ids.device)
            mask = kwargs.get("attention_mask")
            if mask is not None:
                lengths = lengths - (mask.shape[1] - int(mask.sum(-1).min()))
            if bool(self.model.frequencies_change(*lengths)):
                raise HeadwaterError(
                    f"Between {lengths[0]} and {lengths[1]} tokens the frequencies of this model's RoPE change, so "
                    "assisted decoding would choose other tokens than the model alone; generate without an assistant "
                    "and without prompt_lookup_num_tokens, or fewer tokens."
                )
        return super()._assisted_decoding(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Raises `HeadwaterError` where its paged cache could not hold what this model needs."""
        self.config.check_paged()
        return super().init_continuous_batching(*args, **kwargs)

    # `generate` makes masks with this, outside compiled code; ours respects documents.
    create_masks_for_generate = staticmethod(masks_for_generate)


def positions_kept(hidden: Tensor, which: int | Tensor) -> Tensor:
    """hidden [B, T, D] at the positions whose logits are asked for, as transformers' models take them.

    which: how many, counted from the end (0: all); indices [n] or [B, n]; or a boolean mask [B, T], giving [kept, D].
    """
    if isinstance(which, int):
        return hidden[:, -which:] if which else hidden
    if which.ndim == 2:
        return hidden[which] if which.dtype == torch.bool else hidden.take_along_dim(which[..., None], dim=1)
    return hidden[:, which]


# From these names transformers infers what a class is for: its Trainer shifts the labels of causal models before label
# smoothing, and its pipelines list the models they support.
MODEL_MAPPING_NAMES[HeadwaterConfig.model_type] = HeadwaterModel.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[HeadwaterConfig.model_type] = HeadwaterForCausalLM.__name__

# Not in a copy inside a checkpoint: transformers would use that copy for every other checkpoint too.
if not IS_EXPORTED:
    AutoConfig.register(HeadwaterConfig.model_type, HeadwaterConfig)
    AutoModel.register(HeadwaterConfig, HeadwaterModel)
    AutoModelForCausalLM.register(HeadwaterConfig, HeadwaterForCausalLM)
