"""Tokens from `headwater data prepare`: one folder, or several mixed by weight."""

from itertools import combinations, pairwise, product
from os.path import normpath
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.util.errors import HeadwaterError, shown
from headwater_lab.data.base import register_kind
from headwater_lab.data.language import METRICS, LanguageData, LanguageSettings
from headwater_lab.data.reading import local_path
from headwater_lab.data.shards import Prepared, open_prepared
from headwater_lab.util.names import is_file_name


@register_kind
class PreparedSettings(LanguageSettings):
    """`data:` of a recipe, with `kind: prepared`."""

    kind: Literal["prepared"] = "prepared"
    source: str | dict[str, Annotated[float, Field(gt=0)]]
    """A prepared folder, or several with their weights: {data/web: 0.7, data/code: 0.3}."""
    held_out_domains: dict[str, str] | None = None
    """Named domains to evaluate on, name -> prepared folder. Each is measured separately, and loss and bits per byte
    are their plain means; null evaluates the held-out text of `source` as a whole."""

    @property
    def metrics(self) -> list[str]:
        names = sorted(self.held_out_domains or ())
        return [*METRICS, *(f"{metric}/{name}" for name in names for metric in METRICS)]

    @model_validator(mode="after")
    def _domains_differ(self) -> Self:
        domains = self.held_out_domains
        if domains == {}:
            raise ValueError("data.held_out_domains is empty; name domains with their folders, or leave it out")
        for name in domains or ():
            if not is_file_name(name):
                raise ValueError(
                    f"data.held_out_domains: {shown(name)} is not a plain name; use letters, digits, spaces, dots "
                    f"and dashes, without a slash or a leading dot"
                )
        for (name_a, folder_a), (name_b, folder_b) in combinations((domains or {}).items(), 2):
            if normpath(folder_a) == normpath(folder_b):
                raise ValueError(
                    f"data.held_out_domains: {name_a!r} and {name_b!r} are the same folder, {shown(folder_a)}; name "
                    "it once"
                )
        return self

    def build(self) -> LanguageData:
        """Open the folders. Raises `HeadwaterError` if one is not prepared, damaged, or of another tokenizer."""
        weights = {self.source: 1.0} if isinstance(self.source, str) else self.source
        if not weights:
            raise HeadwaterError("data.source is empty; name a prepared folder, or several with their weights.")
        folders = {name: open_prepared(local_path(name)) for name in weights}
        _check_tokenizers(folders)
        domains = {name: open_prepared(local_path(path)) for name, path in (self.held_out_domains or {}).items()}
        for (name, domain), (path, folder) in product(domains.items(), folders.items()):
            if _trained_on(domain, folder):
                raise HeadwaterError(
                    f"The domain {name!r} is the corpus of {path!r} with a larger held-out share, part of which "
                    f"is in the training data; name {path!r} itself."
                )
        example = next(iter(folders.values()))
        return LanguageData(
            self,
            {name: (folder.train, weights[name]) for name, folder in folders.items()},
            {name: folder.read_evaluation() for name, folder in (domains or folders).items()},
            example.tokenizer,
            {
                "source": self.source,
                "tokenizer": example.manifest.tokenizer.name,
                "documents": sum(folder.manifest.documents for folder in folders.values()),
                "bytes": sum(folder.manifest.bytes for folder in folders.values()),
                "sha256": {name: folder.manifest.sha256 for name, folder in folders.items()},
                "train_documents": sum(folder.train.documents for folder in folders.values()),
            },
            domains=bool(domains),
        )


def _check_tokenizers(folders: dict[str, Prepared]) -> None:
    """Raise `HeadwaterError` if folders were prepared with different tokenizers."""
    made_by = {name: (folder.manifest.tokenizer.sha256, folder.manifest.separator) for name, folder in folders.items()}
    for a, b in pairwise(folders):
        if made_by[a] != made_by[b]:
            raise HeadwaterError(f"{a!r} and {b!r} were prepared with different tokenizers; prepare one of them again.")


def _trained_on(domain: Prepared, folder: Prepared) -> bool:
    """Whether documents held out in one preparation of a corpus are training data in the other."""
    shares = [manifest.settings.get("held_out", 0.0) for manifest in (domain.manifest, folder.manifest)]
    return domain.manifest.sha256 == folder.manifest.sha256 and shares[0] > shares[1]
