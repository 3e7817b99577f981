"""Tests packing: nothing is lost or doubled, and nothing crosses from document to document."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_core.errors import DataError
from spmd_data.packing import NO_TARGET, PADDING_ID, PackedSequences, Packing, TokenStream, layout

packings = st.sampled_from(list(Packing))
all_lengths = st.lists(st.integers(0, 40), max_size=30)


def documents_of(lengths: list[int]) -> TokenStream:
    """Documents whose tokens are all different, from 1 on."""
    starts = np.cumsum([0, *lengths])
    return TokenStream(np.arange(1, starts[-1] + 1), starts[:-1])


@given(all_lengths, st.integers(1, 20), packings)
def test_every_token_is_in_one_place(lengths: list[int], seq: int, packing: Packing) -> None:
    documents = documents_of(lengths)
    packed = PackedSequences(documents, seq, packing=packing)
    rows = [packed[i] for i in range(len(packed))]
    assert all(x.shape == (seq,) for row in rows for x in row.values())
    tokens = [x for row in rows for x in row["input_ids"][row["document_ids"] >= 0].tolist()]
    assert sorted(tokens) == list(range(1, sum(lengths) + 1))
    assert packed.num_padding == seq * len(rows) - sum(lengths)

    # Each pair of neighbours is trained once, and none of two documents.
    pairs = [
        pair
        for row in rows
        for pair in zip(row["input_ids"].tolist(), row["targets"].tolist())
        if pair[1] != NO_TARGET
    ]
    last_ones = {int(end) for end in np.cumsum(lengths)}
    assert sorted(pairs) == [(i, i + 1) for i in range(1, sum(lengths) + 1) if i not in last_ones]

    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for row in rows:
        ids = row["document_ids"].tolist()
        num_pieces = max(ids) + 1
        padding = ids.count(PADDING_ID)
        # Pieces in order, padding at the end.
        assert ids == sorted(ids[: seq - padding]) + [PADDING_ID] * padding
        assert set(ids) - {PADDING_ID} == set(range(num_pieces))
        for piece in range(num_pieces):
            held = row["document_ids"] == piece
            found = row["input_ids"][held]
            assert torch.equal(row["position_ids"][held], torch.arange(len(found)))
            assert torch.equal(found, torch.arange(int(found[0]), int(found[0]) + len(found)))
            assert len(set(document_of[found.numpy() - 1])) == 1
        assert (row["position_ids"][row["document_ids"] < 0] == 0).all()
        assert (row["input_ids"][row["document_ids"] < 0] == 0).all()


@given(all_lengths, st.integers(1, 20))
def test_the_stream_keeps_the_order_and_pads_at_its_end(lengths: list[int], seq: int) -> None:
    packed = PackedSequences(documents_of(lengths), seq, packing="stream")
    tokens = [x for i in range(len(packed)) for x in packed[i]["input_ids"].tolist()]
    assert tokens == list(range(1, sum(lengths) + 1)) + [0] * (-sum(lengths) % seq)


@given(all_lengths, st.integers(1, 20))
def test_first_fit_puts_each_piece_into_the_first_room(lengths: list[int], seq: int) -> None:
    """Against the definition, one piece after the other."""
    room: list[int] = []
    expected: list[list[tuple[int, int, int]]] = []
    for document, length in enumerate(lengths):
        for begin in range(0, length, seq):
            size = min(seq, length - begin)
            fitting = [i for i, left in enumerate(room) if left >= size]
            if not fitting:
                room.append(seq)
                expected.append([])
            at = fitting[0] if fitting else len(room) - 1
            room[at] -= size
            expected[at].append((document, begin, size))
    found = layout(lengths, seq, "first_fit")
    pieces = list(zip(*(x.tolist() for x in (found.documents, found.begins, found.lengths))))
    assert [pieces[a:b] for a, b in zip(found.first, found.first[1:])] == expected


def test_short_documents_are_whole_under_first_fit() -> None:
    lengths = np.random.default_rng(0).integers(1, 257, 3000)
    found = layout(lengths, 256)
    assert len(found.documents) == len(lengths)
    waste = 1 - lengths.sum() / (256 * found.num_sequences)
    assert waste < 0.05


def test_documents_that_begin_with_a_separator() -> None:
    stream = np.array([7, 0, 5, 6, 0, 0, 9], np.int32)
    documents = TokenStream.separated(stream, separator=0)
    assert documents.lengths.tolist() == [3, 1, 2]
    assert [documents.tokens(i).tolist() for i in range(3)] == [[0, 5, 6], [0], [0, 9]]


def test_a_sequence_by_hand() -> None:
    documents = TokenStream(np.array([11, 12, 13, 21, 22, 31]), np.array([0, 3, 5]))
    packed = PackedSequences(documents, 4, packing="stream", padding_token=99)
    assert {name: x.tolist() for name, x in packed[0].items()} == {
        "input_ids": [11, 12, 13, 21],
        "targets": [12, 13, NO_TARGET, 22],
        "position_ids": [0, 1, 2, 0],
        "document_ids": [0, 0, 0, 1],
    }
    assert {name: x.tolist() for name, x in packed[-1].items()} == {
        "input_ids": [22, 31, 99, 99],
        "targets": [NO_TARGET, NO_TARGET, NO_TARGET, NO_TARGET],
        "position_ids": [0, 0, 0, 0],
        "document_ids": [0, 1, PADDING_ID, PADDING_ID],
    }
    with pytest.raises(IndexError, match="out of range for 2 sequences"):
        packed[2]


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
def test_a_sequence_with_room_for_all(packing: str) -> None:
    for lengths in ([3, 0, 5, 1], [], [0], [4]):
        long, short = (layout(lengths, seq, packing) for seq in (2**24, max(sum(lengths), 1)))
        for field in dataclasses.fields(long):
            assert np.array_equal(getattr(long, field.name), getattr(short, field.name))
        assert long.num_sequences == (sum(lengths) > 0)
        assert long.lengths.tolist() == [length for length in lengths if length]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], 4, "best_fit"), r"one of 'stream', 'first_fit'; got 'best_fit'"),
        (([3], 0), r"from 1 to 16777216 tokens and a document at least 0; got seq=0"),
        (([3], 2**24 + 1), r"from 1 to 16777216 tokens .*; got seq=16777217 "),
        (([3, -1], 4), r"a least length of -1"),
    ],
)
def test_what_cannot_be_packed(arguments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        layout(*arguments)
