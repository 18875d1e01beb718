"""Verdicts on a model: whether each way of decoding gives the logits of the model without a cache."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headwater.util.errors import HeadwaterError
from headwater.verification.subject import Subject
from headwater.verification.ways import CAUSAL, WAYS, DoesNotApply, Feed, Parting, Probe, Way, texts_for

# In fp64, a model's own fp32 constants cause more than 1e-9, and only a bug more than `EXACT`. In fp32, the rounding of
# an ill-conditioned model may exceed `ROUNDED`.
EXACT, ROUNDED = 1e-6, 1e-4
BF16 = "bf16"


@dataclass(frozen=True)
class Verified:
    """One way of decoding with one model.

    ok: whether it equals the model without a cache; None if it raised an error, or does not apply: `why`. error:
    largest difference of logits, relative to the largest logit, in fp64, if the model runs in fp64; rounded: in fp32.
    parting: the first token and layer that differ, if any. only_rounded: it differs in fp32, not in fp64.
    """

    check: str
    ok: bool | None
    error: float | None = None
    rounded: float | None = None
    parting: Parting | None = None
    why: str | None = None
    only_rounded: bool = False


def write_error(error: BaseException) -> str:
    """Write an exception as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, DoesNotApply | HeadwaterError):
        return text
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def verify_model(model: PreTrainedModel, seed: int, ways: Sequence[Way], exact_to: float) -> list[Verified]:
    """Compare every way of decoding with one uncached forward pass, in fp64 and fp32, then bf16.

    exact_to: the largest difference in fp64 that is not a mistake.
    `model` is not changed.

    Raises `HeadwaterError` for a model that has no uncached forward pass of ids alone.
    """
    rounded = _Precision(model, torch.float32, seed, ROUNDED)
    exact = _Precision(model, torch.float64, seed, exact_to)
    judge = exact if exact.subject is not None else rounded
    if judge.subject is None:
        raise HeadwaterError(f"{type(model).__name__} cannot read ids alone: {rounded.why}")
    verdicts: list[Verified] = []
    for way in ways:
        verdicts.append(_judge_way(way, exact, rounded))
        if way.name == CAUSAL and verdicts[-1].ok is False:
            why = "logits depend on later tokens even without a cache"
            return verdicts + [Verified(name, None, why=why) for name in [*(way.name for way in ways[1:]), BF16]]
    return [*verdicts, _judge_bf16(model, judge)]


def _judge_way(way: Way, exact: _Precision, rounded: _Precision) -> Verified:
    """The verdict on one way in fp64, if the model runs in it, and the error in fp32."""
    if exact.subject is None:
        verdict = rounded.run_way(way)
        return dataclasses.replace(verdict, error=None, rounded=verdict.error)
    verdict = exact.run_way(way)
    if way.generates or rounded.subject is None:
        return verdict
    in_fp32 = rounded.run_way(way)
    return dataclasses.replace(verdict, rounded=in_fp32.error, only_rounded=bool(verdict.ok) and in_fp32.ok is False)


def verify_twice(model: PreTrainedModel, seed: int, ways: Sequence[Way], exact_to: float = EXACT) -> list[Verified]:
    """Run `verify_model`, and count a difference only if it recurs with other texts: a single one may be a tie."""
    verdicts = verify_model(model, seed, ways, exact_to)
    differing = {verdict.check for verdict in verdicts if verdict.ok is False}
    if not differing:
        return verdicts
    if CAUSAL not in differing:  # if it differs, the other ways are not run
        ways = [way for way in ways if way.name in differing]
    again = {verdict.check: verdict for verdict in verify_model(model, seed + 1, ways, exact_to)}
    chance = {name for name in differing if again[name].ok is not False}
    why = "differs for one seed but not for the next: perhaps a tie, which each way breaks differently"
    return [
        dataclasses.replace(verdict, ok=None, why=why, parting=None)
        if verdict.check in chance
        else again[verdict.check]
        if CAUSAL in chance
        else verdict
        for verdict in verdicts
    ]


class _Precision:
    """A copy of a model in one dtype, its texts, and the tolerance for its own rounding."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, seed: int, tolerance: float) -> None:
        self.subject: Subject | None = None
        self.why, self.tolerance = "its logits are not finite", tolerance
        Subject(model)  # raises for a model without input_ids
        try:
            subject = Subject(copy.deepcopy(model).to(dtype).eval())
            if dtype == torch.float64 and hasattr(subject.model, "set_experts_implementation"):
                subject.model.set_experts_implementation("eager")  # other kernels for experts do not support fp64
            self.texts = texts_for(subject, seed)
        except Exception as error:
            self.why = write_error(error)
            return
        if not self.texts.alone.logits.isfinite().all():
            return
        self.subject = subject
        if subject.positions:  # some models do not count positions from 0
            probe = Probe(subject, self.texts, self.tolerance)
            try:
                Feed(probe).read_tokens(use_cache=False)
                subject.positions = probe.parting is None
            except Exception:
                subject.positions = False
        # The difference between two evaluations without a cache, which should be equal.
        noise = self.run_way(next(way for way in WAYS if way.name == CAUSAL)).error
        if noise is not None and noise <= self.tolerance:
            self.tolerance = max(self.tolerance, 100 * noise)

    def run_way(self, way: Way) -> Verified:
        assert self.subject is not None
        probe = Probe(self.subject, self.texts, self.tolerance)
        try:
            way.run(probe)
        except Exception as error:
            if probe.parting is None:
                return Verified(way.name, None, why=write_error(error))
        return Verified(way.name, probe.parting is None, probe.error, parting=probe.parting)


def _judge_bf16(model: PreTrainedModel, judge: _Precision) -> Verified:
    """Judge a cache in bf16, relative to how far bf16 without a cache is from the same model in full precision."""
    try:
        half = Subject(copy.deepcopy(model).to(torch.bfloat16).eval())
        assert judge.subject is not None
        half.positions = judge.subject.positions
        alone = half(judge.texts.ids, use_cache=False).logits.double()
        feed = Feed(Probe(half, judge.texts, math.inf))
        cached_logits = torch.cat([feed.read_tokens(tokens).logits for tokens in (6, 1, 2, 1, 7, 3)], dim=1).double()
    except Exception as raised:
        return Verified(BF16, None, why=write_error(raised))
    true = judge.texts.alone.logits.double()
    uncached, cached = ((logits - true).square().mean(dim=(0, 2)).sqrt() for logits in (alone, cached_logits))
    size = float(true.square().mean().sqrt())
    error = float(cached.square().mean().sqrt()) / size
    ok = error <= 3 * float(uncached.square().mean().sqrt()) / size + 0.02
    # The token, over all rows, that is worst compared to bf16 without a cache.
    parting = None if ok else Parting(0, int((cached - 3 * uncached).argmax()))
    return Verified(BF16, ok, rounded=error, parting=parting)
