"""Named corpora: where they are, and how to separate their documents."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.util.errors import HeadwaterError, first_line
from headwater_lab.data.corpus import kinds_in, local_files
from headwater_lab.data.reading import DEFAULT
from headwater_lab.data.stream import TextSource


@dataclass(frozen=True)
class Known:
    """A dataset on the hub, or a file to download."""

    title: str
    source: str
    """Its name on the hub, or the address of a zip archive."""
    config: str | None = None
    domains: str | None = None
    """The column that names a document's domain, for `--by`."""
    begins: str | None = None
    """See `TextSource.begins`."""


# A level-1 heading. Rows are lines of the original file; headings of lower levels have more signs.
_WIKITEXT = r"^ = [^=\n](?:[^\n]*[^=\n])? = \n?$"
KNOWN = {
    "openwebtext": Known("OpenWebText", "Skylion007/openwebtext"),
    "pile": Known("The Pile, without its copyrighted parts", "monology/pile-uncopyrighted", None, "meta.pile_set_name"),
    "slimpajama": Known("SlimPajama", "cerebras/SlimPajama-627B", None, "meta.redpajama_set_name"),
    "fineweb": Known("FineWeb, sample of 10 billion tokens", "HuggingFaceFW/fineweb", "sample-10BT"),
    "fineweb-edu": Known("FineWeb-Edu, sample of 10 billion tokens", "HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "wikitext": Known("WikiText-103", "Salesforce/wikitext", "wikitext-103-raw-v1", begins=_WIKITEXT),
    "wikitext-2": Known("WikiText-2", "Salesforce/wikitext", "wikitext-2-raw-v1", begins=_WIKITEXT),
    "enwik8": Known("enwik8", "http://mattmahoney.net/dc/enwik8.zip", begins=r"^  <page>\r?$"),
}
KNOWN["wikitext-103"] = KNOWN["wikitext"]


def resolve(source: TextSource, local: str | None = None) -> TextSource:
    """Replace a known name in `source` by its location: `local` if given, else the network.

    Raises `HeadwaterError` where `local` goes with a name that is not known, or there is nothing, and for an option
    that files of this kind leave unread.
    """
    known = KNOWN.get(source.source)
    if known is None:
        if local is not None:
            raise HeadwaterError(
                f"--local needs the name of a corpus ({', '.join(sorted(KNOWN))}), not with {source.source!r}."
            )
        resolved = source
    else:
        if local is not None and local_files(local) is None:
            raise HeadwaterError(f"There is no file or folder {local!r}; --local takes files.")
        location = local or known.source
        location = _unzipped(location) if location.endswith(".zip") else location
        config = source.config or (None if local else known.config)
        resolved = replace(source, begins=source.begins or known.begins, source=location, config=config)
    check_options(source, resolved.source)
    return resolved


def check_options(source: TextSource, location: str) -> None:
    """Raise `HeadwaterError` for an option of `source` that is not read for what lies at `location`."""
    kinds = kinds_in(location)
    options = {
        "--separator": (source.separator, "text files"),
        "--by": (source.by, "tables"),
        "--text-column": (source.text_column if source.text_column != DEFAULT else None, "tables"),
        "--config": (source.config, "datasets on the hub"),
        "--split": (source.split, "datasets on the hub"),
    }
    for option, (value, kind) in options.items():
        if value is not None and kind not in kinds:
            raise HeadwaterError(f"{option} is for {kind}, and {location!r} has none; leave it out.")


def _unzipped(archive: str) -> str:
    """The file in a zip archive, which is downloaded first if it is a URL; both are kept in datasets' cache."""
    from datasets import DownloadConfig, DownloadManager

    try:
        folder = DownloadManager(download_config=DownloadConfig(disable_tqdm=True)).download_and_extract(archive)
    except Exception as error:  # the network can raise anything
        raise HeadwaterError(
            f"{archive!r} could not be downloaded and unpacked ({first_line(error)}); "
            "check the network, or name a copy with --local."
        ) from error
    return str(folder)
