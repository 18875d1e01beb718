"""`headwater verify`: decoding with a cache against the model without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import say, stderr
from headwater_lab.cli.options import USE, TrustRemoteCode, command
from headwater_lab.cli.progress import ProgressReport
from headwater_lab.util.terminal import Table, lined

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headwater.verification import Verified

MARKS = {True: "✓", False: "✗", None: "–"}


@command(USE, "verify runs/mine")
def verify_models(
    checkpoint: Path | None = None,
    *,
    model: Sequence[str] = (),
    trust_remote_code: TrustRemoteCode = False,
    seed: int = 0,
) -> None:
    """Check every way of decoding against one pass without a cache. Exit code 1: some way silently differs.

    checkpoint: A checkpoint's folder, or a run's, or one of a Hugging Face model; default: small random models of each
        mechanism.
    model: Any causal language model: a folder, or organization/name on the Hugging Face hub; repeatable.
    seed: Seed for prompts and parameters.
    """
    from headwater import verification
    from headwater.models.load import model_type
    from headwater_lab.training.checkpoints import newest_checkpoint
    from headwater_lab.training.trained_models import open_trained
    from headwater_lab.util.model_kinds import MODEL_TYPES

    trained = None
    if checkpoint is not None:
        if model:
            raise HeadwaterError("Verify one of these at a time: a checkpoint, or --model.")
        kind = model_type(newest_checkpoint(checkpoint))
        if kind and kind not in MODEL_TYPES:  # of another library
            model = [str(checkpoint)]
        elif not (trained := open_trained(checkpoint).model).config.is_causal:
            raise HeadwaterError(f"{str(checkpoint)!r} is an image model, which has no cache to verify.")
    results: dict[str, list[Verified]] = {}
    with ProgressReport() as progress:
        for name, verified_model in _list_models(trained, model, trust_remote_code, seed):
            progress.show("verifying", 0, info=name)
            results[name] = verification.verify(verified_model, seed)
    failed = any(way.ok is False for ways in results.values() for way in ways)
    for text in _describe_results(results):
        say(text)
    if failed:
        stderr.print("headwater: Decoding with a cache differs from decoding without one; see ✗ above.")
        raise typer.Exit(1)


def _list_models(
    trained: PreTrainedModel | None, sources: Sequence[str], trust_remote_code: bool, seed: int
) -> Iterator[tuple[str, PreTrainedModel]]:
    """List names and models, each made when its turn comes. Mechanisms that are invalid alone are left out."""
    from headwater.plugins.registry import MECHANISMS
    from headwater.verification.own import build_tiny
    from headwater_lab.training.hub_models import open_model

    if trained is not None:
        yield _write_name(trained.config.mechanisms or {}), trained
    elif sources:
        for source in sources:
            yield source, open_model(source, trust_remote_code)
    else:
        choices: list[dict[str, Any]] = [{}, *({name: {}} for name in MECHANISMS.names)]
        for mechanisms in choices:
            if (model := build_tiny(mechanisms, seed=seed)) is not None:
                yield _write_name(mechanisms), model


def _write_name(mechanisms: dict[str, Any]) -> str:
    return " + ".join(mechanisms) or "none"


def _describe_results(results: dict[str, list[Verified]]) -> Iterator[Table | str]:
    """Make the table, and a line for each way that differs."""
    columns = ("model", "same", "different", "not run", "fp64", "fp32")
    table = lined(*columns, left=("model",), title="Ways of decoding with a cache against without")
    for name, ways in results.items():
        verdicts = [way.ok for way in ways]
        errors = (
            [way.error for way in ways if way.error is not None],
            [way.rounded for way in ways if way.rounded is not None and way.check != "bf16"],
        )
        largest = (f"{max(way_errors):.0e}" if way_errors else "–" for way_errors in errors)
        table.add_row(name, *(str(verdicts.count(ok)) for ok in MARKS), *largest)
    yield table
    yield (
        "not run: raises an error, or does not apply. fp64, fp32: largest difference of logits over the largest logit."
    )
    for name, ways in results.items():
        for way in ways:
            if way.ok is not True or way.only_rounded:
                yield f"{MARKS[way.ok]} {name}: {way.check}: {_describe_way(way)}"


def _describe_way(way: Verified) -> str:
    """Describe where a way differs, or why it does not run."""
    if way.ok is None:
        return way.why or "does not apply"
    error = way.rounded if way.error is None or way.only_rounded else way.error
    if way.only_rounded:
        return f"the same in fp64, but {error:.0e} off in fp32: a rounding error, as in an ill-conditioned model"
    if way.parting is None:
        return f"{error:.0e} off"
    layer = f", first in {way.parting.layer}" if way.parting.layer else ""
    return f"row {way.parting.row}, position {way.parting.position}{layer}; {error:.0e} off"
