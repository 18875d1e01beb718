"""`HeadwaterModel` and `HeadwaterForCausalLM`: the Hugging Face models around the stack of blocks."""

# No postponed annotations in this file: other packages read the annotations of `forward` at run time.
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from headwater.config.plan import Source
from headwater.config.text import HeadwaterConfig
from headwater.kernels.autotune import allow_autotuning
from headwater.kernels.fused_attention import MATMUL
from headwater.kernels.fused_loss import DISTILLED_CHUNK, ChunkedLoss, SoftTargets, differentiate_loss
from headwater.kernels.varlen import VARLEN
from headwater.models.cache import restart_cache  # importing it registers the cache layers
from headwater.models.input_checks import check_paged
from headwater.models.inputs import (
    ForwardArguments,
    InputSpec,
    ModelInputs,
    is_served,
    keep_last_tokens,
    make_cache,
    prepare_generation,
    prepare_inputs,
)
from headwater.models.pretrained import HeadwaterPreTrainedModel, shared_modules
from headwater.models.stack import LastTokens, last_readers, run_blocks
from headwater.nn.block import Block
from headwater.nn.cache_name import CACHE, cache_of, one_cache
from headwater.nn.checks import refuse_where
from headwater.nn.documents import count_positions
from headwater.nn.engine import Engine
from headwater.nn.linear import apply_linear
from headwater.nn.loss import causal_lm_loss, count_targets, shift_targets, squared_normalizers
from headwater.nn.masks import find_new_tokens
from headwater.nn.norm import make_norm
from headwater.nn.position import RotaryEmbedding, document_lengths, for_heads
from headwater.nn.stages import run_shared
from headwater.util.errors import HeadwaterError
from headwater.util.layout import IS_EXPORTED

# Names of transformers' and headwater's attention kernels begin with one of these. Others may belong to an engine.
OWN_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention", MATMUL, VARLEN)


class HeadwaterModel(HeadwaterPreTrainedModel):
    """Token embeddings, the stack of blocks, and the final norm."""

    def __init__(self, config: HeadwaterConfig) -> None:
        super().__init__(config)
        plans = self.plan_layers()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.input_spec = InputSpec.from_config(config, plans)
        fields = config.sliding_fields or {}
        differs = config.position == "rope" and ("rope_parameters" in fields or "head_dim" in fields)
        self.rotary_emb = RotaryEmbedding(config) if config.position == "rope" else None
        self.sliding_rotary_emb = RotaryEmbedding(self.input_spec.kinds[True].config) if differs else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(Block(config, plan) for plan in plans)
        self.last_reader = last_readers(plans)
        self.mechanisms = shared_modules(config)
        self.norm = make_norm(config, final=True)
        self.is_pageable = False
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
        attention_mask: [B, S], 1 for real tokens, cached ones included (with a static cache that has tokens it may
            be as wide as that cache; later columns are then ignored); or the kernel's mask, [B, 1, T, S], under
            which rows may branch. The previous token of a token at position p is then the one it sees at p - 1; raises
            `HeadwaterError` if a mechanism looks back and there is not exactly one.
        position_ids: [B or 1, T]. A document starts wherever they restart at 0; neither attention nor mechanisms look
            across that boundary. Default: the number of real tokens before each.
        past_key_values, cache: two names for the same argument; transformers passes the second from 5.24 on. Raises
            `HeadwaterError` if both are given.
        use_cache: return keys and values to continue from; default `config.use_cache`, and False while training.
        document_starts: [B, T], True where a document starts: for rows in which attention crosses from one document to
            the next, but mechanisms that look at earlier tokens do not.
        logits_to_keep: if a number, only the outputs of that many last tokens are needed (0: all); then there may be no
            others. Layers that store nothing for later tokens run for these alone, except in training.
        cu_seq_lens_q: int32 [n + 1], where each document begins among all B·T tokens, and the end
            (`headwater.nn.documents.make_cu_seq_lens` makes it from position_ids, and it gives the default of
            position_ids). Attention varlen and flash_attention_* take it in place of a mask, where there is neither a
            cache nor an attention_mask. max_length_q: no document is longer; default T.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        elif self.input_spec.id_readers:
            raise HeadwaterError(
                f"{' and '.join(self.input_spec.id_readers)} reads token ids, but this call passes embeddings; pass "
                "input_ids without inputs_embeds."
            )
        if use_cache is None:
            # No cache in training: nothing would read it, and building it would copy every key and value.
            use_cache = self.config.use_cache and not self.training
        past_key_values = make_cache(self.config, one_cache(past_key_values, cache), use_cache)
        kwargs = {"use_cache": use_cache, **kwargs}
        arguments = ForwardArguments(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, document_starts, kwargs
        )
        self.check_engine(arguments)
        inputs = prepare_inputs(self.input_spec, arguments)
        self.check_frequencies(inputs)
        x = self.embed_inputs(inputs_embeds, inputs.position_ids)
        inputs = inputs._replace(position_embeddings=self.compute_angles(x, inputs.position_ids))
        last_tokens = self.find_last(inputs, x, logits_to_keep)
        shared = self.shared_tensors(input_ids)
        x = run_blocks(self.layers, self.last_reader, self.dropout(x), shared, inputs.arguments(), last_tokens)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE: inputs.cache})

    def embed_inputs(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Compute the input of the first block from the tokens' embeddings x [B, T, D]."""
        if self.config.embedding_scale != 1:  # multiplied in the embedding's precision, as in Gemma
            x = x * torch.full((), float(self.config.embedding_scale), dtype=x.dtype, device=x.device)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def compute_angles(self, x: Tensor, position_ids: Tensor) -> dict[bool, Any]:
        """Compute RoPE's angles for each kind of layer, in the dtype of x."""
        if self.rotary_emb is None:
            return {}
        angles = dict.fromkeys(self.input_spec.kinds, for_heads(*self.rotary_emb(x, position_ids)))
        if self.sliding_rotary_emb is not None:
            angles[True] = for_heads(*self.sliding_rotary_emb(x, position_ids))
        return angles

    def frequencies_change(self, old_lengths: Tensor, new_lengths: Tensor) -> Tensor:
        """Mark where RoPE's frequencies differ between sequences of `new_lengths` and `old_lengths`: booleans."""
        changed = torch.zeros_like(new_lengths, dtype=torch.bool)
        for rope in self.ropes_by_length:
            changed = changed | (rope.find_span(old_lengths) != rope.find_span(new_lengths))
        return changed

    @property
    def ropes_by_length(self) -> list[RotaryEmbedding]:
        """List the RoPE modules whose frequencies change with the length of a sequence."""
        return [x for x in (self.rotary_emb, self.sliding_rotary_emb) if x is not None and x.follows_length]

    def check_frequencies(self, inputs: ModelInputs) -> None:
        """Raise `HeadwaterError` where the new tokens make a sequence so long that its cached keys are out of date."""
        if not self.ropes_by_length or inputs.cache is None or inputs.position_ids is None:
            return
        past: Any = inputs.cache.get_seq_length()
        if isinstance(past, int) and past == 0:
            return
        old_lengths = inputs.position_ids[:, :1]  # tokens of this document in the cache
        changed = self.frequencies_change(old_lengths, document_lengths(inputs.position_ids)[:, :1])
        refuse_where(
            changed & (old_lengths > 0) & (past > 0),
            "With these tokens the sequence becomes so long that RoPE uses other frequencies than for the cached "
            "keys; pass all tokens at once, with an empty cache or without one, as generate does (without "
            "prefill_chunk_size).",
        )

    def serve_tokens(self, input_ids: Tensor, position_ids: Tensor, engine: Engine) -> Tensor:
        """Return the hidden states [N, D] of N tokens of any sequences, input_ids and position_ids [N].

        engine: knows their sequences and earlier tokens. Each token is a separate row.
        """
        ids, positions, limit = input_ids[:, None], position_ids[:, None], self.input_spec.lookback.limit
        x = self.embed_inputs(self.embed_tokens(ids), positions)
        inputs = ModelInputs(
            attention_mask=dict.fromkeys(self.input_spec.kinds),
            position_ids=positions,
            reach=positions.clamp(max=limit) if limit else None,
            past_key_values=engine,
            position_embeddings=self.compute_angles(x, positions),
            token_ids=ids if self.input_spec.id_readers else None,
        )
        x = run_blocks(self.layers, self.last_reader, x, self.shared_tensors(ids), inputs.arguments())
        return self.norm(x)[:, 0]

    def find_last(self, inputs: ModelInputs, x: Tensor, tokens: int | Tensor) -> LastTokens | None:
        """Make the arguments of blocks from `output_only_from` on, which run only for the last `tokens` of x [B, T, D].

        None if they run for all: if all are requested, in training, and with a mask whose last rows cannot be selected.
        """
        first_layer = self.input_spec.output_only_from
        if (
            first_layer == len(self.layers)
            or self.training
            or not isinstance(tokens, int)
            or not 0 < tokens < x.shape[1]
        ):
            return None
        recorded = (f"output_{name}" for name in self._can_record_outputs)
        if any(inputs.kwargs.get(name, getattr(self.config, name, False)) for name in recorded):
            return None
        inputs_of_last = keep_last_tokens(self.input_spec, inputs, x, tokens)
        return None if inputs_of_last is None else LastTokens(first_layer, tokens, inputs_of_last.arguments())

    def shared_tensors(self, input_ids: Tensor | None) -> dict[Source, Tensor]:
        """Return the outputs of the modules that exist once per model. input_ids: the new tokens [B, T]."""
        return run_shared(self.mechanisms.named_mechanisms(), input_ids, self.input_spec.id_readers)

    def may_be_paged(self) -> bool:
        """Whether the attention kernel is neither transformers' nor ours, and may manage keys and values itself."""
        name = self.config._attn_implementation or "eager"
        is_own = name.startswith(OWN_ATTENTION) or ("/" in name and "|" not in name)  # owner/name: a kernel of the hub
        return not is_own and not self.training

    def check_engine(self, arguments: ForwardArguments) -> None:
        """Raise `HeadwaterError` if an engine with paged attention calls the model and cannot run it exactly."""
        if self.is_pageable:
            return
        if is_served(arguments) or (arguments.past_key_values is None and self.may_be_paged()):
            check_paged(self.config, self.plans)
            self.is_pageable = True


# What is minimized, and its parts: see `HeadwaterOutput`.
Losses = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass
class HeadwaterOutput(CausalLMOutputWithPast):
    """transformers' output, with the parts of a loss that has several, 0-d and without gradients.

    cross_entropy: in nats, before anything is added. z_loss: mean of logsumexp(logits)², without its weight.
    """

    cross_entropy: Tensor | None = None
    z_loss: Tensor | None = None


class HeadwaterForCausalLM(HeadwaterPreTrainedModel, GenerationMixin):
    """The model with a language-modeling head. `generate` works as for any transformers model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    packs_weights = True
    differentiate_loss = staticmethod(differentiate_loss)

    def __init__(self, config: HeadwaterConfig) -> None:
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
        z_loss_weight: float = 0.0,
        loss_chunk_tokens: int | None = None,
        soft_targets: SoftTargets | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]
    ) -> HeadwaterOutput:
        """Return logits [B, T, V] and, with labels, the mean loss in nats.

        labels: [B, T]; the loss at position t is for labels[t + 1], and -100 counts nothing. `shift_labels` gives
            labels that are shifted already. `num_items_in_batch` divides the summed loss instead of the mean.
        logits_to_keep: compute only this many logits, the last ones (0: all), or those at the given indices.
        skip_logits: with labels, return no logits. A compiled graph that returns them would also write and add a
            gradient of zeros, [B, T, V].
        z_loss_weight: with labels, add this times the mean of logsumexp(logits)² over the same tokens to the loss
            (PaLM, arXiv 2204.02311, section 5), and return that mean as `z_loss`, without a gradient.
        loss_chunk_tokens: with labels and `skip_logits`, the number of tokens whose logits exist at once. Their
            gradients are computed in the forward pass, so that the loss can be differentiated once.
        soft_targets: with labels and `skip_logits`, the predictions of a teacher, to learn from as well. Always in
            chunks, of 1,024 tokens by default.
        The other arguments are the same as for `HeadwaterModel`.
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
        hidden = self.scale_hidden(positions_kept(outputs.last_hidden_state, logits_to_keep))
        if soft_targets is not None:
            loss_chunk_tokens = loss_chunk_tokens or DISTILLED_CHUNK
            if labels is None or not skip_logits:
                raise HeadwaterError("soft_targets needs labels, and skip_logits=True.")
        logits = loss = cross_entropy = z_loss = None
        if labels is None or not skip_logits:
            logits = self.logits(hidden)
        if labels is not None:
            targets = kwargs.pop("shift_labels", None)
            if logits is None and loss_chunk_tokens is not None:
                chunking = loss_chunk_tokens, soft_targets
                losses = self.chunked_losses(hidden, labels, targets, z_loss_weight, *chunking, **kwargs)
            else:
                losses = self.whole_losses(hidden, logits, labels, targets, z_loss_weight, **kwargs)
            loss, cross_entropy, z_loss = losses
        return HeadwaterOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_entropy=cross_entropy,
            z_loss=z_loss,
            **{CACHE: cache_of(outputs)},
        )

    def scale_hidden(self, hidden: Tensor) -> Tensor:
        """Input of the output head."""
        return hidden if self.config.logit_scale == 1 else hidden * float(self.config.logit_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """The output head: hidden [..., D] -> [..., V]."""
        logits, cap = apply_linear(self.lm_head, hidden), self.config.logit_softcap
        return logits if cap is None else float(cap) * (logits / float(cap)).tanh()

    def whole_losses(
        self,
        hidden: Tensor,
        logits: Tensor | None,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        z_weight: float,
        **kwargs: Any,
    ) -> Losses:
        """Return the losses from all logits at once; if None, they are computed from `hidden`."""
        logits = self.logits(hidden) if logits is None else logits
        size = self.config.vocab_size
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, shift_labels=shift_labels, **kwargs)
        if not z_weight:
            return loss, None, None
        targets = shift_targets(labels) if shift_labels is None else shift_labels
        z_loss = squared_normalizers(logits, targets) / count_targets(targets, kwargs.get("num_items_in_batch"))
        return loss + z_weight * z_loss, loss.detach(), z_loss.detach()

    def chunked_losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        shift_labels: Tensor | None,
        z_weight: float,
        size: int,
        soft: SoftTargets | None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Losses:
        """Return what `whole_losses` does, with the logits of `size` tokens at a time. Raises `HeadwaterError` where
        the output head or the loss has been replaced."""
        head = self.lm_head
        if not isinstance(head, nn.Linear) or head.bias is not None or self.loss_function is not causal_lm_loss:
            raise HeadwaterError(
                "loss_chunk_tokens needs the model's own output head, without adapters, and its own loss function; "
                "leave it out."
            )
        targets = (shift_targets(labels) if shift_labels is None else shift_labels).to(hidden.device)
        divisor = torch.as_tensor(count_targets(targets, num_items_in_batch), device=hidden.device)
        wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, head.weight))
        settings = z_weight, divisor, self.config.logit_softcap, wanted
        inputs = hidden.flatten(0, 1), head.weight, targets.flatten(), soft
        objective, parts = ChunkedLoss.apply(*inputs, size, self.differentiate_loss, *settings)
        cross_entropy, z_loss, _ = parts
        return objective, cross_entropy if z_weight or soft is not None else None, z_loss if z_weight else None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method, on a CPU with the kernels that were timed to be fastest (`headwater.kernels.autotune`).

        In bfloat16 a long generation may keep a second copy of the weights meanwhile, unless `packs_weights` is False.
        The cache may be given under either of its names; raises `HeadwaterError` if under both.
        """
        cache = one_cache(kwargs.pop("past_key_values", None), kwargs.pop("cache", None))
        if cache is not None:
            kwargs[CACHE] = cache
        # Refused here, because transformers changes the config for it and does not restore it after an error.
        chosen = kwargs.get("generation_config") or self.generation_config
        if kwargs.get("assistant_early_exit", getattr(chosen, "assistant_early_exit", None)) is not None:
            raise HeadwaterError(
                "assistant_early_exit runs only some of the layers, which headwater models do not support; give an "
                "assistant_model, or prompt_lookup_num_tokens."
            )
        if kwargs.get("cache_implementation", getattr(chosen, "cache_implementation", None)) == "quantized":
            raise HeadwaterError(
                "transformers' quantized cache is for its own models; leave out cache_implementation, and pass "
                "cache=HeadwaterQuantizedCache(model.config, nbits=4), from headwater.models.cache."
            )
        with allow_autotuning(self.packs_weights):
            return super().generate(*args, **kwargs)

    def _prepare_attention_mask_for_generation(self, *args: Any, **kwargs: Any) -> Tensor:
        """transformers' method. For mechanisms that look back, an inferred mask has no gaps.

        A padding id between tokens is a token, such as one that an assistant drafted: what was before it is not kept.
        """
        mask = super()._prepare_attention_mask_for_generation(*args, **kwargs)
        if self.model.input_spec.lookback.limit == 0:
            return mask
        return mask.cummax(1).values & mask.flip(1).cummax(1).values.flip(1)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,  # transformers looks for the name
        **kwargs: Any,
    ) -> dict[str, Any]:
        """transformers' method. Where RoPE's frequencies change with the new tokens, the cache is refilled.

        Wrappers of this method, such as PEFT's prompts, find the cache under both of its names.
        """
        cache = kwargs.get(CACHE)
        if cache is not None and self.is_outgrown(cache, input_ids, attention_mask, kwargs.get("position_ids")):
            restart_cache(cache)
            next_sequence_length = None
        kwargs |= dict(attention_mask=attention_mask, inputs_embeds=inputs_embeds)
        inputs = super().prepare_inputs_for_generation(input_ids, next_sequence_length=next_sequence_length, **kwargs)
        if CACHE in inputs and "prepare_inputs_for_generation" in vars(self):
            inputs |= dict.fromkeys(("past_key_values", "cache"), inputs[CACHE])
        return inputs

    def is_outgrown(
        self, cache: Cache, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> bool:
        """Whether RoPE rotated the cached tokens by other frequencies than all of input_ids [B, T] need."""
        if not self.model.ropes_by_length:
            return False
        past, length = cache.get_seq_length(), input_ids.shape[1]
        if not past or length <= past:
            return False
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            return False
        if attention_mask is None and position_ids is not None and bool(position_ids[:, 0].any()):
            return False
        if position_ids is None or position_ids.shape[-1] != length:
            position_ids = count_positions(attention_mask, 0, length, input_ids.device)
        old_lengths, new_lengths = document_lengths(position_ids[:, :past]), document_lengths(position_ids)[:, :past]
        return bool(self.model.frequencies_change(old_lengths, new_lengths).any())

    def _assisted_decoding(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
    ) -> Any:
        """transformers' method. Raises `HeadwaterError` where candidates may change RoPE's frequencies."""
        if self.model.ropes_by_length:
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
        """transformers' method. Raises `HeadwaterError` where its paged cache could not hold what this model needs."""
        check_paged(self.config, self.plans)
        return super().init_continuous_batching(*args, **kwargs)

    def create_masks_for_generate(
        self,
        config: HeadwaterConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        **unused: Any,
    ) -> dict[str, Any]:
        """transformers' method, outside compiled code; these masks respect documents."""
        tokens = find_new_tokens(inputs_embeds, one_cache(past_key_values, cache))
        return prepare_generation(self.model.input_spec, tokens, attention_mask, position_ids)


def positions_kept(hidden: Tensor, which: int | Tensor) -> Tensor:
    """Select hidden [B, T, D] at the positions whose logits are requested, as transformers' models do.

    which: how many, counted from the end (0: all); indices [n] or [B, n]; or a boolean mask [B, T], giving [kept, D].
    """
    if isinstance(which, int):
        return hidden[:, -which:] if which else hidden
    if which.ndim == 2:
        return hidden[which] if which.dtype == torch.bool else hidden.take_along_dim(which[..., None], dim=1)
    return hidden[:, which]


# transformers infers the kind of a class from these names: its Trainer shifts labels of causal models before smoothing
# them, and its pipelines list the supported models.
MODEL_MAPPING_NAMES[HeadwaterConfig.model_type] = HeadwaterModel.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[HeadwaterConfig.model_type] = HeadwaterForCausalLM.__name__

# Not in an exported copy: transformers would use that copy for every other checkpoint as well.
if not IS_EXPORTED:
    AutoConfig.register(HeadwaterConfig.model_type, HeadwaterConfig)
    AutoModel.register(HeadwaterConfig, HeadwaterModel)
    AutoModelForCausalLM.register(HeadwaterConfig, HeadwaterForCausalLM)
