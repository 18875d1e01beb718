"""Ask the Hugging Face hub, and upload to it, without minutes of silent retries if there is no network."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, ModelInfo, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash

from headwater.util.errors import HeadwaterError, first_line
from headwater.util.files import explain_absence, sha256_of

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
        HfApi().repo_info(name, repo_type="dataset" if kind == "dataset" else "model", timeout=SECONDS)
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


def find_repository(name: str, private: bool = False) -> ModelInfo | None:
    """Find the repository of a model to upload to; None if it does not exist yet.

    Raises `HeadwaterError`, before there is work to lose, for a name that is not USER/NAME, without a token, without
    network, and for a public repository where a private one is wanted.
    """
    try:
        validate_repo_id(name)
        valid = name.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise HeadwaterError(
            f"{name!r} is not a repository's name; write USER/NAME, in letters, digits, '-', '_' and '.', which do not "
            "follow each other."
        )
    if constants.HF_HUB_OFFLINE:
        raise HeadwaterError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it.")
    if get_token() is None:
        raise HeadwaterError(
            "There is no token for the Hugging Face hub; log in with `hf auth login`, or set HF_TOKEN to a token that "
            "may write."
        )
    with _explain_refusals(name):
        try:
            info = HfApi().model_info(name, timeout=SECONDS, files_metadata=True)
        except HfHubHTTPError as error:
            if error.response.status_code == 401:
                raise HeadwaterError(
                    "The Hugging Face hub does not accept this token; log in again with `hf auth login`, or correct "
                    "HF_TOKEN."
                ) from error
            if not isinstance(error, RepositoryNotFoundError):
                raise
            return None
    if private and not info.private:
        raise HeadwaterError(
            f"{name!r} exists and is public; leave out --private (in Python: private), or choose another name."
        )
    return info


def push_folder(folder: Path, name: str, private: bool = False, message: str = "", overwrite: bool = False) -> str:
    """Upload the files of a folder to a repository USER/NAME in one commit, and return its address.

    The repository is created if it does not exist. message: of the commit; default: "Upload model". overwrite: replace
    files with other content, which the repository's history keeps. Its further files stay.
    Raises `HeadwaterError` as `find_repository`; if there are files to replace, and `overwrite` is not set; and if the
    hub refuses the upload.
    """
    info = find_repository(name, private)
    if info is not None and not overwrite and (replaced := _list_replaced(folder, info)):
        shown = ", ".join(replaced[:5]) + (", …" if len(replaced) > 5 else "")
        raise HeadwaterError(
            f"{name!r} already has other content in {shown}; add --overwrite (in Python: overwrite=True) to replace "
            f"{len(replaced)} files there, or choose another name."
        )
    with _explain_refusals(name):
        api = HfApi()
        if info is None:
            api.create_repo(name, private=private or None)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=message or "Upload model",
            parent_commit=None if info is None else info.sha,  # the hub refuses if somebody has changed it since
        )
    return f"{api.endpoint}/{name}"


def _list_replaced(folder: Path, info: ModelInfo) -> list[str]:
    """List the files of a repository whose content an upload would replace."""
    replaced = []
    for sibling in info.siblings or ():
        file = folder / sibling.rfilename
        if not file.is_file():
            continue
        if sibling.lfs is not None:
            is_same = sibling.lfs.sha256 == sha256_of(file)
        else:
            is_same = sibling.blob_id == git_hash(file.read_bytes())
        if not is_same:
            replaced.append(sibling.rfilename)
    return replaced


@contextmanager
def _explain_refusals(name: str) -> Iterator[None]:
    """Turn the errors of a request to the hub into a `HeadwaterError`."""
    try:
        yield
    except HeadwaterError:
        raise
    except Exception as error:  # any HTTP client's errors
        answer = next((cause for cause in (error, error.__cause__) if isinstance(cause, HfHubHTTPError)), None)
        if answer is None:
            raise HeadwaterError(
                f"The Hugging Face hub could not be reached to upload {name!r}: {first_line(error)}; check the network "
                "and HF_ENDPOINT."
            ) from error
        reason = (answer.server_message or first_line(answer)).strip().rstrip(".")
        raise HeadwaterError(
            f"The Hugging Face hub answered {answer.response.status_code} for {name!r}: {reason}; use a token that may "
            "write there, or another name."
        ) from error
