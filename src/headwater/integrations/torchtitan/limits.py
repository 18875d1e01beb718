"""Limits of models under torchtitan's parallelisms, one sentence each."""

from __future__ import annotations

from typing import Any

from headwater.config.plan import Stage
from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import can_split_heads, can_split_tokens
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError

DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")


def check_model(config: HeadwaterConfig, parallelism: Any, length: int) -> None:
    """Raise `HeadwaterError` if a model cannot be trained with these settings.

    parallelism: torchtitan's section of that name. length: tokens in a row.
    """
    _check_options(parallelism)
    _check_fields(config, length)
    if parallelism.pipeline_parallel_degree > 1 and config.tie_word_embeddings:
        raise HeadwaterError(
            "A tied output head needs the embedding, which is in a pipeline's first stage; set "
            "tie_word_embeddings=false, or pipeline_parallel_degree to 1."
        )
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    if tensor * context > 1:
        _check_heads(config, tensor, context)
    if tensor > 1:
        _check_columns(config, tensor)


def _check_options(parallelism: Any) -> None:
    """Raise `HeadwaterError` for ways to split that no headwater model has."""
    tensor, context = parallelism.tensor_parallel_degree > 1, parallelism.context_parallel_degree > 1
    if parallelism.spmd_backend != "partial_dtensor":
        raise HeadwaterError(
            f"headwater models do not support torchtitan's backend {parallelism.spmd_backend!r}; set "
            "parallelism.spmd_backend to partial_dtensor."
        )
    if parallelism.expert_parallel_degree > 1:
        raise HeadwaterError("headwater models have no experts; leave parallelism.expert_parallel_degree at 1.")
    if tensor and parallelism.enable_sequence_parallel:
        raise HeadwaterError(
            "headwater models keep the residual stream whole under tensor parallelism; pass "
            "--parallelism.no-enable-sequence-parallel."
        )
    if context and parallelism.context_parallel_load_balancer is not None:
        raise HeadwaterError(
            "Context parallelism of headwater models splits a row into consecutive parts, which need no balancing; set "
            "parallelism.context_parallel_load_balancer to None."
        )


def _check_fields(config: HeadwaterConfig, length: int) -> None:
    """Raise `HeadwaterError` for models that torchtitan's trainer cannot train, in any number of processes."""
    for name in ("sliding_layers", "embedding_scale", "embedding_norm", "logit_softcap"):
        if getattr(config, name) not in (None, 1, False):
            raise HeadwaterError(
                f"torchtitan's trainer does not support models with {name}; leave it out, or train with headwater."
            )
    if dropping := [name for name in DROPOUTS if getattr(config, name)]:
        raise HeadwaterError(
            f"torchtitan's trainer draws the same random numbers in every process, so {dropping[0]} would drop the "
            "same elements of different rows; set it to 0."
        )
    if config.position == "learned" and length > config.max_position_embeddings:
        raise HeadwaterError(
            f"A row of {length} tokens is longer than the model's {config.max_position_embeddings} learned positions; "
            "lower training.seq_len, or raise max_position_embeddings."
        )


def _check_columns(config: HeadwaterConfig, degree: int) -> None:
    """Raise `HeadwaterError` if a feed-forward or the vocabulary cannot be split over `degree` processes."""
    if inside := [name for plan in plan_layers(config) for name in plan.at(Stage.FEED_FORWARD_HIDDEN)]:
        raise HeadwaterError(
            f"Mechanism {inside[0]!r} acts inside the feed-forward, but under tensor parallelism each process has "
            "only some of its channels; set tensor_parallel_degree to 1."
        )
    for name in ("vocab_size", "intermediate_size"):
        if getattr(config, name) % degree:
            raise HeadwaterError(
                f"{name} {getattr(config, name)} is not divisible by tensor_parallel_degree {degree}; change one of "
                "them."
            )


def _check_heads(config: HeadwaterConfig, tensor: int, context: int) -> None:
    """Raise `HeadwaterError` if the heads of attention cannot be split by these degrees."""
    parallelisms = " and ".join(["tensor"] * (tensor > 1) + ["context"] * (context > 1))
    if config.num_key_value_heads % (tensor * context):
        raise HeadwaterError(
            f"{config.num_key_value_heads} key/value heads cannot be divided among {tensor * context} processes of "
            f"{parallelisms} parallelism; lower its degree."
        )
    for name in config.mechanisms:
        mechanism = resolve(name)
        if not (can_split_tokens(mechanism) and can_split_heads(mechanism, config.mechanisms[name])):
            raise HeadwaterError(
                f"Mechanism {name!r} does not declare that heads and tokens can be split over processes; set per_head "
                f"and per_token in its class (docs/extending.md), or train without {parallelisms} parallelism."
            )
        if context > 1 and mechanism.needs_input_ids:
            raise HeadwaterError(
                f"Mechanism {name!r} reads token ids, but under context parallelism each process has only some of "
                "them; set context_parallel_degree to 1."
            )
