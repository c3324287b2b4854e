"""The format of a backup: a written backup is read; a longer, shorter or changed one is refused with its reason."""

import hashlib
import io
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.backup.archive import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    NEEDED,
    ArchiveError,
    ArchiveMember,
    Manifest,
    check_end,
    compute_digest,
    encode_header,
    read_exactly,
    read_manifest,
    read_member,
)

MEMBERS = tuple(ArchiveMember(name, number, "00") for number, name in enumerate(sorted(NEEDED)))
MADE = Manifest(
    format=1, macpool="1", made=1.0, cluster="c", name="n", epoch=1, generation=0, schemas={}, members=MEMBERS
)


class Slow:
    """A source that returns three bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int, /) -> bytes:
        return self._file.read(min(size, 3))


@given(st.binary(max_size=200))
def test_no_bytes_are_a_manifest_by_chance(data: bytes) -> None:
    with pytest.raises(ArchiveError):
        read_manifest(io.BytesIO(data))


def test_a_manifest_is_read_as_it_was_written_also_in_small_pieces() -> None:
    assert read_manifest(io.BytesIO(encode_header(MADE))) == MADE
    assert read_manifest(Slow(encode_header(MADE) + b"what follows")) == MADE


def head(tree: object) -> bytes:
    encoded = msgspec.json.encode(tree)
    return len(encoded).to_bytes(4, "big") + encoded + hashlib.sha256(encoded).digest()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((MAX_MANIFEST_BYTES + 1).to_bytes(4, "big"), f"would have {MAX_MANIFEST_BYTES + 1} bytes"),
        (MAX_MANIFEST_BYTES.to_bytes(4, "big") + b"{}", "it is truncated"),
        (encode_header(MADE)[:-1] + b"x", "its manifest is damaged"),
        (head({"format": 2, "other": 1}), "made by a newer macpool"),
        (head({"format": 1, "other": 1}), "its manifest cannot be read"),
    ],
)
def test_unusable_manifest_is_refused_with_the_reason(data: bytes, words: str) -> None:
    with pytest.raises(ArchiveError, match=words):
        read_manifest(io.BytesIO(data))


def changes() -> Iterator[tuple[str, Manifest, str]]:
    first, *others = MEMBERS
    lacks = "lists a file twice, or lacks a required file"
    yield "twice", msgspec.structs.replace(MADE, members=(*MEMBERS, first)), lacks
    yield "lacks", msgspec.structs.replace(MADE, members=tuple(others)), lacks
    yield "below nothing", msgspec.structs.replace(MADE, members=(ArchiveMember(first.name, -1, "00"), *others)), lacks
    foreign = ArchiveMember("lock", 1, "00")
    yield (
        "foreign",
        msgspec.structs.replace(MADE, members=(*MEMBERS, foreign)),
        "contains 'lock', which does not belong",
    )


@pytest.mark.parametrize(("manifest", "words"), [pytest.param(*one[1:], id=one[0]) for one in changes()])
def test_a_manifest_whose_members_are_no_backups_is_refused(manifest: Manifest, words: str) -> None:
    with pytest.raises(ArchiveError, match=words):
        read_manifest(io.BytesIO(encode_header(manifest)))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_archive_member_is_read_in_chunks_and_matches_its_digest(size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    member = ArchiveMember("pepper", size, hashlib.sha256(data[:size]).hexdigest())
    source = io.BytesIO(data)
    assert [len(piece) for piece in read_member(source, member)] == [CHUNK_BYTES] * (size // CHUNK_BYTES) + [
        size % CHUNK_BYTES
    ] * (size % CHUNK_BYTES > 0)
    assert source.tell() == size
    assert compute_digest(io.BytesIO(data[:size])) == (size, member.sha256)
    with pytest.raises(ArchiveError, match="pepper in it is damaged"):
        list(read_member(io.BytesIO(b"x" * size), ArchiveMember("pepper", size, "00")))


def test_read_exactly_returns_all_bytes_or_reports_a_truncated_file() -> None:
    source = Slow(b"0123456789")
    assert (read_exactly(source, 7), read_exactly(source, 0), read_exactly(source, 3)) == (b"0123456", b"", b"789")
    check_end(source)
    with pytest.raises(ArchiveError, match="it is truncated"):
        read_exactly(Slow(b"0123456789"), 11)
    with pytest.raises(ArchiveError, match="it has data after its last member"):
        check_end(io.BytesIO(b"x"))
