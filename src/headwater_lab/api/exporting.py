"""Export of a checkpoint with its card, and its upload to the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from headwater.conversion.export import export, export_family
from headwater.conversion.families import find_family
from headwater.plugins.trust import trust_names
from headwater.util.errors import HeadwaterError
from headwater.util.extras import check_extra
from headwater.util.files import check_free, local
from headwater.util.hub import find_repository, push_folder
from headwater_lab.api.common import PathLike, check_outside, quiet
from headwater_lab.training.model_card import describe_history, read_card
from headwater_lab.training.trained_models import Trained, is_foreign, open_source, open_trained

GGUF = ".gguf"


@quiet()
def export_checkpoint(
    checkpoint: Path, out: Path, *, materialise: bool = False, family: str | None = None, name: str | None = None
) -> None:
    """Export a checkpoint or a run's newest to a new folder or a new NAME.gguf, like `headwater export`.

    A model of transformers is converted first, as by `retrofit` without mechanisms.

    A README.md next to the checkpoint is kept as its card; otherwise the card is made from its history. name: the
    repository that it is for. Raises `HeadwaterError`.
    """
    check_outside(out, checkpoint)
    if out.suffix == GGUF:
        _export_gguf(checkpoint, out, is_plain=not materialise and family in (None, "llama"))
        return
    check_free(out)
    trained = _open_model(checkpoint)
    if family == "source":
        families = [event.details["family"] for event in trained.history if "family" in event.details]
        if not families or not isinstance(families[0], str):
            raise HeadwaterError(f"{str(checkpoint)!r} was not retrofitted from a family; name one with --family.")
        family = families[0]
        find_family(family)
    card = read_card(checkpoint) or describe_history(trained) | {"name": name or out.name}
    if family is None:
        export(trained.model, out, materialise, trained.tokenizer, card)
    else:
        export_family(trained.model, out, family, trained.tokenizer, card)


def _open_model(checkpoint: Path) -> Trained:
    return open_source(str(checkpoint)) if is_foreign(checkpoint) else open_trained(checkpoint)


def _export_gguf(checkpoint: Path, out: Path, is_plain: bool) -> None:
    check_extra("gguf")
    from headwater.conversion.gguf_file import write_gguf

    if not is_plain:
        raise HeadwaterError("A GGUF file holds a plain Llama; leave out --materialise, and any other --family.")
    if out.exists():
        raise HeadwaterError(f"{str(out)!r} already exists; choose another name, or remove it.")
    trained = _open_model(checkpoint)
    write_gguf(trained.model, out, trained.tokenizer)


def push_to_hub(
    checkpoint: PathLike,
    repository: str,
    *,
    private: bool = False,
    message: str = "",
    overwrite: bool = False,
    materialise: bool = False,
    family: str | None = None,
    out: PathLike | None = None,
    trust: Sequence[str] = (),
) -> str:
    """Export a checkpoint or a run's newest, and upload that folder and nothing else to the Hugging Face hub, like
    `headwater export --push`. Returns the address.

    repository: USER/NAME, which is created if it does not exist. private: create it as private. message: of the commit.
    overwrite: replace files there that have other content. materialise, family: as in `headwater export`. out: a new
    folder that keeps the export; default: it is temporary. trust: as in `train`.
    Raises `HeadwaterError`: without a token or network, and for files that would be replaced.
    """
    trust_names(trust)
    if out is not None and local(out).suffix == GGUF:
        raise HeadwaterError("--push uploads a folder; write the GGUF file without it.")
    find_repository(repository, private)
    with TemporaryDirectory(prefix="headwater-") as folder:
        target = Path(folder, "export") if out is None else local(out)
        export_checkpoint(local(checkpoint), target, materialise=materialise, family=family, name=repository)
        return push_folder(target, repository, private, message, overwrite)
