"""The models of finished runs, from their newest checkpoints, if these still exist."""

from __future__ import annotations

from transformers.utils import logging

from headwater.errors import HeadwaterError, NotTrusted
from headwater.models.kinds import AnyModel
from headwater.records import RunRecord
from headwater.report.comparison import Comparison, arm_of
from headwater.training.checkpoint import load_model
from headwater.training.places import checkpoints

# Maximum total parameters of an arm's models to load; use `headwater inspect` for larger ones.
MOST = 300_000_000


def model_of(comparison: Comparison, run: RunRecord) -> AnyModel | None:
    """None without a checkpoint that can be read."""
    folder = comparison.folders[arm_of(run), run.seed]
    saved = checkpoints(folder / run.stages[-1].folder if run.stages else folder)  # those of its last stage
    if not saved:
        return None
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return load_model(saved[-1])
    except NotTrusted:
        raise
    except HeadwaterError:
        return None
    finally:
        if bars:
            logging.enable_progress_bar()
