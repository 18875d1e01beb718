"""Ask the Hugging Face hub, without minutes of silent retries if there is no network."""

import os
from typing import Literal

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from headwater.util.errors import HeadwaterError
from headwater.util.files import explain_absence

SECONDS = 3


def is_path(name: str) -> bool:
    """Whether this can only be a path: a name on the hub is "name" or "owner/name"."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def check_reachable(kind: Literal["dataset", "tokenizer", "model"], name: str) -> None:
    """Raise `HeadwaterError` within seconds if `name` is not on the hub, or the hub cannot be reached.

    With HF_HUB_OFFLINE=1 nothing is checked here; the loader then uses a cached copy.
    """
    missing = explain_absence(name, "local folder" if os.path.isfile(name) else "local file or folder")
    if is_path(name) or os.path.lexists(name):
        raise HeadwaterError(f"{missing}.")
    if constants.HF_HUB_OFFLINE:
        return
    try:
        if kind == "dataset":
            HfApi().dataset_info(name, timeout=SECONDS)
        else:
            HfApi().model_info(name, timeout=SECONDS)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "?")
        raise HeadwaterError(
            f"{missing}, and the Hugging Face hub answered {status} for a {kind} of that name; "
            "check the spelling, or log in if it is private."
        ) from error
    except ValueError as error:  # not a possible repository name
        raise HeadwaterError(f"{missing}, and it cannot be the name of a {kind} on the Hugging Face hub.") from error
    except Exception as error:  # any HTTP client's connection errors
        raise HeadwaterError(
            f"{missing}, and the Hugging Face hub could not be reached to look for a {kind} of that name; check the "
            f"spelling or the network, or set HF_HUB_OFFLINE=1 to use an earlier download."
        ) from error
