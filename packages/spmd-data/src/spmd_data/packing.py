"""Packs tokenised documents into sequences of one length, with little padding.

Every token of every document is in exactly one sequence. A document that does not fit is cut into
pieces. Nothing crosses from one piece to another: positions restart, document ids tell pieces
apart (`spmd.document_attention` takes them), and no token is to be predicted from another document.

Legend: T tokens in a sequence.
"""

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from spmd_core.arguments import checked, require_int, require_kind
from spmd_core.errors import DataError

NO_TARGET = -100  # ignored by torch's cross entropy (`ignore_index`)
_MOST_TOKENS = 2**24
PADDING_ID = -1  # the document id of padding


class Documents(Protocol):
    """Tokenised documents."""

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document: integers of shape (documents,)."""
        ...

    def tokens(self, document: int) -> np.ndarray:
        """The tokens of a document: integers of shape (length,)."""
        ...


class Packing(enum.StrEnum):
    """How documents are packed into sequences.

    `STREAM` concatenates them and cuts at every T tokens: only the last sequence has padding, and
    documents are cut wherever a sequence ends. `FIRST_FIT` puts each document into the first
    sequence with space for it, so only documents longer than T are cut, at multiples of T.
    """

    STREAM = "stream"
    FIRST_FIT = "first_fit"


@dataclass(frozen=True)
class PackedLayout:
    """The positions of the pieces of documents: int64 arrays with one entry for each piece.

    Pieces are in the order of the sequences, and within one in the order of their tokens.

    Attributes:
        documents: the number of the piece's document.
        begins: the position of its first token in the document.
        lengths: its number of tokens, at least 1.
        first: for each sequence its first piece, and the number of all pieces: shape
            (sequences + 1,).
    """

    documents: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray
    first: np.ndarray

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.first) - 1


def layout(
    lengths: Sequence[int] | np.ndarray, seq: int, packing: Packing | str = Packing.FIRST_FIT
) -> PackedLayout:
    """Assigns the pieces of documents to sequences, from their lengths alone.

    Args:
        lengths: tokens of each document; a document without tokens has no piece.
        seq: tokens of a sequence (T), from 1 to 2**24.
        packing: a `Packing` or its value.

    Raises:
        DataError: an argument breaks a rule above.

    Example:
        >>> found = layout([3, 6, 1], seq=4)
        >>> found.documents.tolist(), found.lengths.tolist(), found.first.tolist()
        ([0, 2, 1, 1], [3, 1, 4, 2], [0, 2, 3, 4])
    """
    try:
        packing = Packing(packing)
    except ValueError:
        choices = ", ".join(repr(each.value) for each in Packing)
        raise DataError(
            f"packing must be one of {choices}; got {packing!r}. Pass one of them."
        ) from None
    sizes = np.asarray(lengths, np.int64)
    seq = require_int("seq", seq)
    if not 1 <= seq <= _MOST_TOKENS or (sizes < 0).any():
        raise DataError(
            f"a sequence has from 1 to {_MOST_TOKENS} tokens and a document at least 0; got "
            f"seq={seq} and a least length of {sizes.min() if sizes.size else 0}. Correct them."
        )
    # In longer ones all documents are in the first sequence, and need no more room.
    seq = min(seq, max(int(sizes.sum()), 1))
    return _stream(sizes, seq) if packing is Packing.STREAM else _first_fit(sizes, seq)


class PackedSequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset of packed sequences: a dict of tensors of shape (T,) for each.

    - `input_ids`, int64: the tokens; `padding_token` at the end of a sequence that is not full.
    - `targets`, int64: for each token the next one of its document, also where that lies in another
      sequence. `NO_TARGET` (-100), which torch's cross entropy ignores, after the last one.
    - `position_ids`, int64: from 0 on in each piece of a document; 0 for padding.
    - `document_ids`, int32: from 0 on, one for each piece of the sequence; -1 for padding.

    Args:
        documents: the tokens, which are read when a sequence is asked for.
        seq: tokens in a sequence (T).
        packing: a `Packing` or its value.
        padding_token: the token used as padding; any token will do, as nothing reads it.

    Attributes:
        layout: which piece of which document is in which sequence.

    Raises:
        DataError: see `layout`.
    """

    @checked()
    def __init__(
        self,
        documents: Documents,
        seq: int,
        *,
        packing: Packing | str = Packing.FIRST_FIT,
        padding_token: int = 0,
    ) -> None:
        if not hasattr(documents, "lengths") or not hasattr(documents, "tokens"):
            raise TypeError(
                "documents have lengths and tokens, as a TokenStream and a TokenCache; "
                f"got {type(documents).__name__}. Write TokenStream or cached_tokens."
            )
        self._documents, self._seq = documents, seq
        self._padding_token = require_int(
            "padding_token", padding_token, least=-(2**63), most=2**63 - 1
        )
        self.layout = layout(documents.lengths, seq, packing)

    @property
    def num_padding(self) -> int:
        """The number of positions, over all sequences, without a token."""
        return self._seq * len(self) - int(self.layout.lengths.sum())

    def __len__(self) -> int:
        return self.layout.num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} sequences")
        first, last = self.layout.first[index % len(self) :][:2]
        inputs = np.full(self._seq, self._padding_token, np.int64)
        targets = np.full(self._seq, NO_TARGET, np.int64)
        positions = np.zeros(self._seq, np.int64)
        ids = np.full(self._seq, PADDING_ID, np.int32)
        column = 0
        for number, piece in enumerate(range(first, last)):
            tokens = self._documents.tokens(int(self.layout.documents[piece]))
            begin, length = self.layout.begins[piece], self.layout.lengths[piece]
            place = slice(column, column + length)
            inputs[place] = tokens[begin : begin + length]
            following = tokens[begin + 1 : begin + 1 + length]
            targets[column : column + len(following)] = following
            positions[place] = np.arange(length)
            ids[place] = number
            column += length
        return {
            "input_ids": torch.from_numpy(inputs),
            "targets": torch.from_numpy(targets),
            "position_ids": torch.from_numpy(positions),
            "document_ids": torch.from_numpy(ids),
        }


@dataclass(frozen=True)
class TokenStream:
    """Documents in one array of tokens, one after the other.

    Attributes:
        stream: the tokens, integers of shape (tokens,).
        starts: the position of each document's first token, ascending: shape (documents,). Tokens
            before the first one belong to no document.

    Raises:
        TypeError, DataError: one of these is no such array.
    """

    stream: np.ndarray
    starts: np.ndarray

    def __post_init__(self) -> None:
        for name, value in (("stream", self.stream), ("starts", self.starts)):
            write = f"numpy.asarray({name})"
            require_kind(name, value, np.ndarray, write=write)
            if value.ndim != 1 or (len(value) and value.dtype.kind not in "iu"):
                raise DataError(
                    f"{name} has integers along one dim; got an array of shape {value.shape} and "
                    f"dtype {value.dtype}. Pass for instance {name}.ravel().astype('int64')."
                )
        starts = np.concatenate([[0], self.starts.astype(np.int64), [len(self.stream)]])
        if (starts[1:] < starts[:-1]).any():
            raise DataError(
                f"starts are ascending positions in a stream of {len(self.stream)} tokens; got "
                f"{self.starts.tolist()[:8]}. Sort them, and leave out what lies outside."
            )

    @classmethod
    @checked()
    def separated(cls, stream: np.ndarray, separator: int) -> "TokenStream":
        """Documents that each begin with the token `separator`."""
        return cls(stream, np.flatnonzero(stream == separator))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts, append=len(self.stream))

    def tokens(self, document: int) -> np.ndarray:
        """The tokens of a document: a view."""
        if not 0 <= document < len(self.starts):
            raise IndexError(
                f"document {document} is out of range for {len(self.starts)} documents"
            )
        end = self.starts[document + 1] if document + 1 < len(self.starts) else len(self.stream)
        return self.stream[self.starts[document] : end]


# ---- The two ways of packing ---------------------------------------------------------------------


def _stream(sizes: np.ndarray, seq: int) -> PackedLayout:
    """Pieces end where a document or a sequence ends."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.append(np.arange(seq, total, seq), total)).astype(np.int64)
    cuts = cuts[cuts > 0]
    starts = np.concatenate([[0], cuts[:-1]]).astype(np.int64) if len(cuts) else cuts
    # The first document that ends after the piece's start; those without tokens end before it.
    documents = np.searchsorted(ends, starts, side="right")
    num_sequences = -(-total // seq)
    first = np.searchsorted(starts, np.arange(num_sequences) * seq)
    return PackedLayout(
        documents.astype(np.int64),
        starts - (ends - sizes)[documents],
        cuts - starts,
        np.append(first, len(cuts)).astype(np.int64),
    )


def _first_fit(sizes: np.ndarray, seq: int) -> PackedLayout:
    # The open sequences by the number of tokens that still fit, and the first one for each number.
    # A document goes to the first sequence in which it fits.
    open_of_room: list[list[int]] = [[] for _ in range(seq + 1)]
    num_sequences = 0
    nowhere = np.iinfo(np.int64).max
    first_of_room = np.full(seq + 1, nowhere)
    sequences: list[int] = []
    pieces: list[tuple[int, int, int]] = []

    def put(document: int, begin: int, length: int) -> None:
        nonlocal num_sequences
        room = length + int(np.argmin(first_of_room[length:]))
        if first_of_room[room] == nowhere:
            number, room, num_sequences = num_sequences, seq, num_sequences + 1
        else:
            number = heapq.heappop(open_of_room[room])
            first_of_room[room] = open_of_room[room][0] if open_of_room[room] else nowhere
        sequences.append(number)
        pieces.append((document, begin, length))
        if room > length:
            heapq.heappush(open_of_room[room - length], number)
            first_of_room[room - length] = open_of_room[room - length][0]

    for document, size in enumerate(sizes.tolist()):
        for begin in range(0, size, seq):
            put(document, begin, min(seq, size - begin))
    # A stable sort: within a sequence, pieces keep their order.
    order = np.argsort(np.array(sequences, np.int64), kind="stable")
    found = np.array(pieces, np.int64).reshape(-1, 3)[order]
    counts = np.bincount(np.array(sequences, np.int64), minlength=num_sequences)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return PackedLayout(found[:, 0], found[:, 1], found[:, 2], first)
