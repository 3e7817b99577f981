"""Packs a text's documents into sequences: those that fit stay in one, and none attends to another.

The documents' tokens are in a file that all processes of a machine share.

Legend: T tokens in a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from examples.training.text import (
    VALIDATION_SHARE,
    GivenTokenizer,
    TextData,
    cached_documents,
    check_vocabulary,
    vocabulary_of,
)
from examples.training.text_sources import TextError, read_texts, source_of
from spmd_data import Documents, PackedSequences


@dataclass(frozen=True)
class PackedText:
    """Packed documents for training and validation.

    Attributes:
        train: sequences of T tokens; see `PackedSequences`.
        validation: the same, of other documents.
        summary: the number of documents and sequences, in one line for the console.
        identity: of the tokens and their packing.
    """

    train: PackedSequences
    validation: PackedSequences
    summary: str
    identity: str


def pack_text(
    text: TextData,
    sources: Sequence[str],
    *,
    seq: int,
    max_mb: float,
    cache_dir: str,
    progress: bool = True,
) -> PackedText:
    """Packs the documents of `sources`; the last ones, with 5% of the tokens, are for validation.

    Args:
        text: the same sources as blocks, for its tokenizer.
        sources, max_mb, cache_dir: as `load_text` got them.
        seq: tokens in a sequence (T).
        progress: whether a bar shows the first run's writing of the tokens.

    Raises:
        TextError: there are fewer than two documents.
    """
    source, given = source_of(sources, max_mb), GivenTokenizer(text.tokenizer, text.separator)
    documents = cached_documents(
        lambda: read_texts(source, max_mb),
        source,
        given,
        max_mb=max_mb,
        cache_dir=cache_dir,
        progress=progress,
    )
    check_vocabulary(np.array(documents.bounds), vocabulary_of(given))
    ends = np.cumsum(documents.lengths)
    if len(ends) < 2:
        raise TextError(
            f"packed documents need one for training and one for validation; got {len(ends)} from "
            f"{', '.join(sources)}. Give more files, or leave out --pack."
        )
    wanted = max(seq + 1, int(VALIDATION_SHARE * ends[-1]))
    first = int(np.clip(np.searchsorted(ends, ends[-1] - wanted, side="right"), 1, len(ends) - 1))
    train, validation = (
        PackedSequences(_Range(documents, *range_), seq, padding_token=text.separator)
        for range_ in ((0, first), (first, len(ends)))
    )
    padding = train.num_padding / (len(train) * seq)
    return PackedText(
        train=train,
        validation=validation,
        summary=f"{source.name()}: {ends[-1]:,} tokens of {len(ends):,} documents, packed into "
        f"{len(train):,} sequences of {seq} with {100 * padding:.1f}% padding",
        identity=f"{text.identity}, packed by documents",
    )


@dataclass(frozen=True)
class _Range:
    """Consecutive documents."""

    documents: Documents
    first: int
    last: int

    @property
    def lengths(self) -> np.ndarray:
        return self.documents.lengths[self.first : self.last]

    def tokens(self, document: int) -> np.ndarray:
        return self.documents.tokens(self.first + document)
