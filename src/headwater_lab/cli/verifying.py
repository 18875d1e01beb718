"""`headwater verify`: decoding with a cache against the model without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import say, tell
from headwater_lab.cli.options import USE, TrustRemoteCode, command
from headwater_lab.cli.progress import ProgressReport
from headwater_lab.util.terminal import Table, lined

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headwater.verification import Verified

MARKS = {True: "✓", False: "✗", None: "–"}


@command(USE, "verify runs/mine")
def verify_models(sources: Sequence[str] = (), *, trust_remote_code: TrustRemoteCode = False, seed: int = 0) -> None:
    """Check every way of decoding against one pass without a cache. Exit code 1: some way silently differs.

    sources: Checkpoints, runs, or any causal language models, by folder or by name on the Hugging Face hub; default:
        small random models of each mechanism.
    seed: Seed for prompts and parameters.
    """
    from headwater import verification

    results: dict[str, list[Verified]] = {}
    with ProgressReport() as progress:
        for name, model in _list_models(sources, trust_remote_code, seed):
            progress.show("verifying", 0, info=name)
            results[name] = verification.verify(model, seed)
    say(*_describe_results(results))
    if any(way.ok is False for ways in results.values() for way in ways):
        tell("headwater: Decoding with a cache differs from decoding without one; see ✗ above.")
        raise typer.Exit(1)


def _list_models(sources: Sequence[str], trust_remote_code: bool, seed: int) -> Iterator[tuple[str, PreTrainedModel]]:
    """List names and models, each made when its turn comes. Mechanisms that are invalid alone are left out."""
    from headwater import verification
    from headwater.models.load import model_type
    from headwater.plugins.mechanisms import MECHANISMS
    from headwater.verification.own import build_tiny
    from headwater.verification.windows import WINDOW
    from headwater_lab.training.checkpoints import newest_checkpoint
    from headwater_lab.training.hub_models import open_model
    from headwater_lab.training.trained_models import open_trained
    from headwater_lab.util.model_kinds import MODEL_TYPES

    for source in sources:
        path = Path(source)
        if path.is_dir() and model_type(newest_checkpoint(path)) in (None, *MODEL_TYPES):
            model: PreTrainedModel = open_trained(path).model
            if not model.config.is_causal:
                raise HeadwaterError(f"{source!r} is an image model, which has no cache to verify.")
        else:
            model = open_model(source, trust_remote_code)
        yield source, model
        try:
            shortened = verification.shorten_windows(model)
        except Exception as error:  # code that comes with a model may do anything
            tell(f"headwater: {source}: its sliding window is longer than the texts, and cannot be shortened: {error}")
            continue
        if shortened is not None:
            yield f"{source}, window of {WINDOW}", shortened
    choices: list[dict[str, dict]] = [] if sources else [{}, *({name: {}} for name in MECHANISMS.names)]
    for mechanisms in choices:
        if (tiny := build_tiny(mechanisms, seed=seed)) is not None:
            yield " + ".join(mechanisms) or "none", tiny


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
