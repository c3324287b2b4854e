"""The journal of pieces: torn and damaged records are never trusted."""

import random

import pytest

from node.hub.download.piece_journal import (
    HEADER_BYTES,
    RECORD_BYTES,
    compute_piece_checksum,
    count_pieces,
    encode_header,
    encode_record,
    parse_journal,
)

SIZE, PIECE = 1000, 100


def make_journal(*pieces: int) -> bytes:
    return encode_header(SIZE, PIECE) + b"".join(encode_record(piece, piece * 7) for piece in pieces)


def test_parse_journal_returns_all_records():
    journal = parse_journal(make_journal(3, 0, 9))
    assert journal is not None
    assert (journal.size, journal.piece_bytes, journal.pieces) == (SIZE, PIECE, {3: 21, 0: 0, 9: 63})


def test_parse_journal_ends_at_every_torn_record():
    whole = make_journal(1, 2)
    for end in range(HEADER_BYTES, len(whole) + 1):
        journal = parse_journal(whole[:end])
        assert journal is not None
        assert list(journal.pieces) == [1, 2][: (end - HEADER_BYTES) // RECORD_BYTES]


def test_add_records_continues_where_it_ended():
    whole = make_journal(1, 2, 3)
    journal = parse_journal(whole[:HEADER_BYTES])
    assert journal is not None
    at = HEADER_BYTES
    for end in (*range(HEADER_BYTES, len(whole), 5), len(whole)):
        at += journal.add_records(whole[at:end])
        assert at <= end < at + RECORD_BYTES
    assert list(journal.pieces) == [1, 2, 3]


def test_parse_journal_detects_every_flipped_bit():
    whole = make_journal(1, 2, 3)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << random.randrange(8)
        journal = parse_journal(bytes(damaged))
        if at < HEADER_BYTES:
            assert journal is None
        else:
            assert journal is not None
            assert list(journal.pieces) == [1, 2, 3][: (at - HEADER_BYTES) // RECORD_BYTES]


@pytest.mark.parametrize("content", [b"", b"x" * HEADER_BYTES, encode_header(SIZE, 0)])
def test_parse_journal_refuses_other_content(content: bytes):
    assert parse_journal(content) is None


def test_parse_journal_ends_at_a_piece_beyond_the_file():
    journal = parse_journal(make_journal(1, 10, 2))
    assert journal is not None
    assert list(journal.pieces) == [1]


def test_count_pieces_rounds_up():
    assert [count_pieces(size, PIECE) for size in (0, 1, 100, 101)] == [0, 1, 1, 2]


def test_compute_piece_checksum_differs_for_zeros_of_other_lengths():
    assert compute_piece_checksum(bytes(5)) != compute_piece_checksum(bytes(6))
