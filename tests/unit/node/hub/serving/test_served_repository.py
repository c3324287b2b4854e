"""Files of the cache as a mirror reads them: complete, in a snapshot, or while a download writes them."""

import hashlib
import random
from pathlib import Path

import psutil
import pytest

from node.hub.cache_layout import RepositoryFolder
from node.hub.download.part_file import PartFile
from node.hub.serving.served_repository import CacheRepository, ServedFile
from wire.models.files import ModelFile, ModelManifest

PIECE = 1000
CONTENT = random.Random(3).randbytes(3500)
FILE = ModelFile("sub/model.safetensors", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
MANIFEST = ModelManifest("a/b", "c" * 40, (FILE,))


@pytest.fixture
def folder(tmp_path: Path) -> RepositoryFolder:
    made = RepositoryFolder(tmp_path / "hub", "a/b")
    made.prepare()
    return made


@pytest.fixture
def opened(folder: RepositoryFolder) -> ServedFile:
    return CacheRepository(folder.hub, MANIFEST).open(FILE)


def write(part: PartFile, *pieces: int) -> None:
    for piece in pieces:
        start, end = part.get_extent(piece)
        part.write_piece(piece, CONTENT[start:end])


def read_rest(opened: ServedFile, start: int) -> bytes:
    return opened.read(start, opened.count_available(start))


def test_find_returns_the_repository_at_its_commit_and_main(folder: RepositoryFolder):
    repository = CacheRepository(folder.hub, MANIFEST)
    assert [repository.find("a/b", revision) for revision in (MANIFEST.commit, "main")] == [repository] * 2
    for repo, revision in (("a/b", "d" * 40), ("a/b", ""), ("a/c", "main"), ("a/c", MANIFEST.commit)):
        assert repository.find(repo, revision) is None


def test_a_snapshot_with_files_in_place_of_links_is_served(folder: RepositoryFolder, opened: ServedFile):
    path = folder.get_snapshot(MANIFEST.commit) / FILE.path
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert read_rest(opened, 500) == CONTENT[500:]
    opened.close()


@pytest.mark.parametrize("size", [0, 3499, 3501])
def test_a_file_of_another_size_is_not_served(folder: RepositoryFolder, opened: ServedFile, size: int):
    folder.get_blob(FILE.etag).write_bytes(bytes(size))
    assert (opened.count_available(0), opened.read(0, 100)) == (0, b"")


def test_only_bytes_up_to_the_first_gap_are_available(folder: RepositoryFolder, opened: ServedFile):
    assert opened.count_available(0) == 0
    part = PartFile(folder, FILE, PIECE)
    part.open()
    write(part, 0, 1, 3)
    found = {start: opened.count_available(start) for start in (0, 500, 999, 1000, 1999, 2000, 2500, 3000, 3499)}
    assert found == {0: 2000, 500: 1500, 999: 1001, 1000: 1000, 1999: 1, 2000: 0, 2500: 0, 3000: 500, 3499: 1}
    assert opened.read(500, 1500) == CONTENT[500:2000]
    write(part, 2)
    assert read_rest(opened, 1500) == CONTENT[1500:]
    part.close()
    opened.close()


def test_a_file_that_becomes_complete_is_read_to_its_end(folder: RepositoryFolder, opened: ServedFile):
    part = PartFile(folder, FILE, PIECE)
    part.open()
    write(part, 0)
    assert opened.count_available(0) == PIECE
    write(part, 1, 2, 3)
    part.finish()
    assert [opened.count_available(start) for start in (0, 3499, 3500, 4000)] == [3500, 1, 0, 0]
    assert opened.read(3000, 500) == CONTENT[3000:]
    opened.close()
    assert opened.read(0, 100) == b"", "a closed file has no bytes"


def test_close_releases_the_descriptors_of_each_state(folder: RepositoryFolder):
    repository, process = CacheRepository(folder.hub, MANIFEST), psutil.Process()
    before = process.num_fds()
    for _ in range(3):
        opened = repository.open(FILE)
        part = PartFile(folder, FILE, PIECE)
        part.open()
        write(part, 0)
        assert opened.count_available(0) == PIECE
        part.discard()
        assert opened.count_available(0) == 0, "the download has begun again"
        write(part, 0, 1, 2, 3)
        assert opened.count_available(0) == 3500
        part.finish()
        assert opened.count_available(0) == 3500
        opened.close()
        opened.close()
        folder.get_blob(FILE.etag).unlink()
    assert process.num_fds() == before
