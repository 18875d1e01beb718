"""Text that is read and tokenized at the start of a run, for corpora that fit in memory."""

from typing import Literal

from pydantic import Field

from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import register_kind
from headwater_lab.data.corpus import Document, check_column_is_read, too_short
from headwater_lab.data.language import LanguageData, LanguageSettings
from headwater_lab.data.reading import local_path
from headwater_lab.data.rows import TokenArray
from headwater_lab.data.shards import prepared_folder
from headwater_lab.data.stream import read_corpus
from headwater_lab.data.tokenizer import Encoder, load_tokenizer


@register_kind
class TextSettings(LanguageSettings):
    """`data:` of a recipe, with `kind: text`."""

    kind: Literal["text"] = "text"
    source: str
    """Text, JSONL, CSV or parquet (path, folder or glob), a Hugging Face dataset, "python-stdlib", "python-topics" or
    "python-docs"."""
    text_column: str = "text"
    """Column or JSON field that holds the text, dotted if nested, or conversations: lists of messages."""
    tokenizer: str = "bytes"
    """"bytes", a local folder or tokenizer.json, or a tokenizer's name on the Hugging Face hub."""
    context: int = Field(default=256, ge=2, le=2**24)
    """Tokens per row."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the documents to hold out, chosen by hash."""

    def build(self) -> LanguageData:
        """Read the corpus and tokenize it. Raises `HeadwaterError` if it is too small."""
        if (folder := prepared_folder(local_path(self.source))) is not None:
            raise HeadwaterError(f"{str(folder)!r} is prepared; set data.kind=prepared and data.source={folder}.")
        if (local_path(self.source) / "train.bin").is_file():
            raise HeadwaterError(
                f"{self.source!r} holds token files; take them with `headwater data prepare {self.source} --tokens "
                "nanogpt --tokenizer NAME --out FOLDER`, and set data.source=FOLDER."
            )
        check_column_is_read(self.text_column, [self.source], "data.text_column")
        corpus = read_corpus(self.source, self.text_column)
        tokenizer = load_tokenizer(self.tokenizer)
        ordered = sorted(corpus.documents, key=Document.hash_fraction)
        if len(ordered) < 2:
            raise too_short(self.source, f"one document of {len(ordered[0].data)} bytes")
        count = sum(document.hash_fraction() < self.held_out for document in ordered)
        count = min(max(count, 1), len(ordered) - 1)  # one on each side, whatever the hashes
        held_out, train = ordered[:count], ordered[count:]
        train.sort(key=lambda document: document.id)
        tokens = TokenArray(Encoder(tokenizer).encode_documents(train))
        description = corpus.facts | {"tokenizer": self.tokenizer, "train_documents": len(train)}
        return LanguageData(self, {self.source: (tokens, 1.0)}, {self.source: held_out}, tokenizer, description)
