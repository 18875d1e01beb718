"""headwater's own models: small ones of each mechanism, and a further way of decoding for them."""

import copy
from collections.abc import Collection

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache, PreTrainedModel

from headwater.config.planner import plan_layers
from headwater.config.text import HeadwaterConfig
from headwater.cost import counts as cost
from headwater.models.cache import cache_bytes
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.util.errors import HeadwaterError, check_known
from headwater.verification.subject import Subject
from headwater.verification.verdicts import EXACT, Verified, verify_twice
from headwater.verification.ways import LONGEST, PROMPT, WAYS, Feed, Probe, Way, read_packed

# Largest fp64 difference without a bug. These models create no constants in fp32.
OWN_EXACT = 1e-9


def build_tiny(mechanisms: dict[str, dict], layers: int = 4, seed: int = 0) -> HeadwaterForCausalLM | None:
    """Build a small fp64 model with perturbed parameters (zeros and ones hide bugs); None for an invalid config."""
    sizes = dict(vocab_size=97, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2)
    try:
        config = HeadwaterConfig(**sizes, initializer_seed=seed, mechanisms=mechanisms)
        plan_layers(config)
    except (HeadwaterError, StrictDataclassError):
        return None
    model = HeadwaterForCausalLM(config).requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return model.double().eval()


def _decode_materialised(probe: Probe) -> None:
    """Decode with ordinary keys and values in every layer and a cache independent of this library."""
    model = probe.subject.model
    config = copy.deepcopy(model.config)
    config.materialise = True
    ordinary = HeadwaterForCausalLM._from_config(config, attn_implementation=model.config._attn_implementation)
    ordinary.to(model.dtype).load_state_dict(model.state_dict())
    probe.subject = Subject(ordinary.eval())
    feed = Feed(probe, cache=DynamicCache())
    for tokens in (7, 1, 4):
        feed.read_tokens(tokens)
    feed.read_tokens()


def _compare_bytes(probe: Probe) -> None:
    feed = Feed(probe)
    feed.read_tokens(PROMPT)
    model = probe.subject.model
    planned = cost.cache_bytes(model.config, PROMPT, len(feed.rows), model.dtype.itemsize)
    probe.record_error(0, PROMPT - 1, abs(cache_bytes(feed.cache) - planned) / planned)


OWN_WAYS = [Way("materialised", _decode_materialised), Way("cache bytes", _compare_bytes)]


def ways_of(model: PreTrainedModel) -> list[Way]:
    """List the ways of decoding that apply to a class of models."""
    if not isinstance(model, HeadwaterForCausalLM):
        return WAYS
    packing = Way("packing", read_packed, promised=True)
    return [*(packing if way.name == packing.name else way for way in WAYS), *OWN_WAYS]


def verify(model: PreTrainedModel, seed: int = 0, ways: Collection[str] | None = None) -> list[Verified]:
    """Compare every way of decoding with one uncached forward pass of the same tokens.

    Differences are tried again with other texts, and count only if they recur.

    model: any causal language model with transformers' interface, on the CPU; it is not changed. It runs in fp64, where
    only a mistake exceeds 1e-6, if it can; in fp32; and in bf16. ways: the names of those to run; default: all that
    apply.
    Raises `HeadwaterError` for unknown ways, for an encoder-decoder, for a model with too few learned positions or
    whose logits are all 0, and for one that cannot read ids alone.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise HeadwaterError("This model is an encoder-decoder; only causal language models can be verified.")
    positions = getattr(config, "max_position_embeddings", LONGEST)
    if getattr(config, "position", None) == "learned" and positions < LONGEST:
        raise HeadwaterError(f"Verifying needs {LONGEST} positions, but this model has only {positions} learned ones.")
    ways = [ways] if isinstance(ways, str) else ways
    for name in ways or ():
        check_known("There is no way of decoding", name, [way.name for way in (*WAYS, *OWN_WAYS)])
    chosen = [way for way in ways_of(model) if ways is None or way.name in ways]
    exact_to = OWN_EXACT if isinstance(model, HeadwaterForCausalLM) else EXACT
    return verify_twice(model, seed, chosen, exact_to)
