"""Partial files: after an interruption only pieces with the right checksum count."""

import errno
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from host import private_files
from node.hub.cache_layout import RepositoryFolder
from node.hub.download import part_file
from node.hub.download.part_file import PartFile
from wire.models.files import ModelFile

PIECE = 1000
CONTENT = random.Random(5).randbytes(3500)
FILE = ModelFile("model.safetensors", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def folder(tmp_path: Path) -> RepositoryFolder:
    made = RepositoryFolder(tmp_path / "hub", "a/b")
    made.prepare()
    return made


def open_part(folder: RepositoryFolder, piece_bytes: int = PIECE) -> PartFile:
    part = PartFile(folder, FILE, piece_bytes)
    part.open()
    return part


def write(part: PartFile, *pieces: int) -> None:
    for piece in pieces:
        start, end = part.get_extent(piece)
        part.write_piece(piece, CONTENT[start:end])


def list_pieces(part: PartFile) -> list[int]:
    return [piece for piece in range(part.count_pieces()) if part.has_piece(piece)]


def test_received_pieces_survive_the_process(folder: RepositoryFolder):
    write(open_part(folder), 3, 1)
    part = open_part(folder)
    assert list_pieces(part) == [1, 3]
    assert part.received_bytes == 1500
    assert part.read_piece(3) == CONTENT[3000:]
    write(part, 0, 2, 0)
    assert part.received_bytes == FILE.size, "a piece that is written twice counts once"
    part.finish()
    assert folder.get_blob(FILE.etag).read_bytes() == CONTENT
    assert [path.name for path in folder.blobs.iterdir()] == [FILE.etag]


def test_pieces_that_were_lost_are_fetched_again(folder: RepositoryFolder):
    write(open_part(folder), 0, 1, 2)
    with folder.get_part(FILE.etag).open("r+b") as file:
        file.seek(1500)
        file.write(bytes(10))
    assert list_pieces(open_part(folder)) == [0, 2]


def test_pieces_beyond_the_end_of_a_shortened_file_are_fetched_again(folder: RepositoryFolder):
    write(open_part(folder), 0, 1, 3)
    with folder.get_part(FILE.etag).open("r+b") as file:
        file.truncate(1999)
    assert list_pieces(open_part(folder)) == [0]


@pytest.mark.parametrize("content", [b"", b"garbage of another program"])
def test_a_damaged_journal_begins_again(folder: RepositoryFolder, content: bytes):
    write(open_part(folder), 0)
    folder.get_journal(FILE.etag).write_bytes(content)
    part = open_part(folder)
    assert list_pieces(part) == []
    write(part, 2)
    assert list_pieces(open_part(folder)) == [2]


def test_pieces_of_another_size_begin_again(folder: RepositoryFolder):
    write(open_part(folder), 0, 1)
    assert list_pieces(open_part(folder, 500)) == []


def test_open_never_writes_through_a_link(folder: RepositoryFolder, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    folder.get_part(FILE.etag).symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        open_part(folder)
    assert outside.read_text() == "kept"


def test_finish_replaces_a_blob_that_is_a_link(folder: RepositoryFolder, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.write_text("wrong content")
    folder.get_blob(FILE.etag).symlink_to(shared)
    part = open_part(folder)
    write(part, 0, 1, 2, 3)
    part.finish()
    assert not folder.get_blob(FILE.etag).is_symlink()
    assert folder.get_blob(FILE.etag).read_bytes() == CONTENT
    assert shared.read_text() == "wrong content"


def test_discard_begins_with_an_empty_file(folder: RepositoryFolder):
    part = open_part(folder)
    write(part, 0, 1, 2, 3)
    part.discard()
    assert (list_pieces(part), part.received_bytes) == ([], 0)
    assert list_pieces(open_part(folder)) == []


def test_pieces_survive_several_interruptions(folder: RepositoryFolder):
    write(open_part(folder), 3, 1)
    write(open_part(folder), 0)
    part = open_part(folder)
    assert (list_pieces(part), part.received_bytes) == ([0, 1, 3], 2500)


def test_pieces_of_a_smaller_size_begin_again(folder: RepositoryFolder):
    write(open_part(folder, 500), 0, 6)
    part = open_part(folder, 3000)
    assert (list_pieces(part), part.received_bytes) == ([], 0)


def test_read_piece_returns_each_piece_alone(folder: RepositoryFolder):
    part = open_part(folder)
    write(part, 0, 1, 2, 3)
    assert [part.read_piece(piece) for piece in range(4)] == [CONTENT[at : at + PIECE] for at in range(0, 3500, PIECE)]


def test_every_end_releases_the_descriptors(folder: RepositoryFolder):
    process = psutil.Process()
    before = process.num_fds()
    part = open_part(folder)
    part.discard()
    part.close()
    part.close()
    assert process.num_fds() == before
    part = open_part(folder)
    write(part, 0, 1, 2, 3)
    part.finish()
    assert process.num_fds() == before


def replace_call(monkeypatch: pytest.MonkeyPatch, module: object, name: str, call: Callable[..., object]) -> None:
    """Replace a function of `os` for one module."""
    monkeypatch.setattr(module, "os", SimpleNamespace(**{**vars(os), name: call}))


def test_a_disk_that_writes_a_part_of_a_piece_gets_the_rest(folder: RepositoryFolder, monkeypatch: pytest.MonkeyPatch):
    part = open_part(folder)
    replace_call(
        monkeypatch, part_file, "pwrite", lambda number, data, start: os.pwrite(number, bytes(data)[:300], start)
    )
    write(part, 0, 1, 2, 3)
    assert b"".join(map(part.read_piece, range(4))) == CONTENT


@pytest.mark.parametrize("name", ["pwrite", "write"])
def test_a_piece_that_cannot_be_recorded_is_missing(
    folder: RepositoryFolder, monkeypatch: pytest.MonkeyPatch, name: str
):
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    part = open_part(folder)
    with monkeypatch.context() as full:
        replace_call(full, part_file, name, fail)
        with pytest.raises(OSError, match="No space left"):
            write(part, 1)
    assert (list_pieces(part), part.received_bytes) == ([], 0)
    write(part, 1)
    assert list_pieces(open_part(folder)) == [1]


def test_a_file_is_on_the_disk_before_it_gets_its_name(folder: RepositoryFolder, monkeypatch: pytest.MonkeyPatch):
    synced = list[tuple[int, bool]]()
    replace_call(
        monkeypatch,
        private_files,
        "fsync",
        lambda number: synced.append((os.fstat(number).st_size, folder.get_blob(FILE.etag).exists())),
    )
    monkeypatch.setattr(private_files, "FULL_SYNC", None)
    part = open_part(folder)
    write(part, 0, 1, 2, 3)
    part.finish()
    assert synced == [(FILE.size, False)]
    assert folder.get_blob(FILE.etag).read_bytes() == CONTENT


def test_bytes_behind_the_end_of_the_file_are_cut(folder: RepositoryFolder):
    folder.get_part(FILE.etag).write_bytes(CONTENT + b"rest of another program")
    part = open_part(folder)
    write(part, 0, 1, 2, 3)
    part.finish()
    assert folder.get_blob(FILE.etag).read_bytes() == CONTENT
