"""Transfers of files in this process: ranges in parallel, pieces that are there, and content that is wrong."""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import ClusterFiles
from node.hub.digests import record_digest
from node.hub.download.disk_space import DiskSpace
from node.hub.download.part_file import PartFile
from node.hub.download.source_pool import SourcePool
from node.hub.download.transfer import POLL_SECONDS, Transfer
from node.hub.errors import ModelFileError
from tests.support.hub.downloads import hub_source
from tests.support.hub.hub import Answer, Hub, running_hub
from tests.support.processes import until
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile, ModelManifest
from wire.units import show_size

PIECE = 1000
WEIGHTS, CONFIG = "model.safetensors", "config.json"
FILES = {CONFIG: b"{}", "empty.txt": b"", WEIGHTS: random.Random(27).randbytes(80 * PIECE + 123)}
TOTAL = sum(map(len, FILES.values()))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach loopback addresses directly, also where the environment has a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as made:
        yield made


class Place:
    """A repository folder, the sources of its files, and one transfer."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.hub = hub
        self.manifest: ModelManifest = hub.add("tests/tiny", FILES)
        self.folder = RepositoryFolder(folder / "hub", "tests/tiny")
        self.folder.prepare()
        self.stop = threading.Event()
        self.reports = 0

    def get_file(self, name: str) -> ModelFile:
        return next(file for file in self.manifest.files if file.path == name)

    def store_pieces(self, *pieces: int, content: bytes = FILES[WEIGHTS]) -> None:
        """Store pieces of the weights, as an earlier download."""
        part = PartFile(self.folder, self.get_file(WEIGHTS), PIECE)
        part.open()
        for piece in pieces:
            start, end = part.get_extent(piece)
            part.write_piece(piece, content[start:end])
        part.close()

    def open(self, *urls: str, connections: int = 4, reserve: int = 0, timeout: float = 30.0) -> "Run":
        pool = SourcePool.open([hub_source(url) for url in urls or (self.hub.url,)], ClusterFiles(), timeout, 4)
        disk = DiskSpace(self.folder.root, reserve)
        return Run(
            Transfer(
                self.folder,
                self.manifest,
                self.manifest.files,
                pool,
                disk,
                self.stop,
                piece_bytes=PIECE,
                connections=connections,
            ),
            pool,
        )

    def list_ranges(self, name: str = WEIGHTS) -> list[tuple[int, int]]:
        """Return the requested ranges of a file in order, each with its end."""
        sent = [one.range.removeprefix("bytes=").split("-") for one in self.hub.requests if one.path.endswith(name)]
        return sorted((int(first), int(last) + 1) for first, last in sent)

    def has_files(self) -> bool:
        return all(self.folder.get_blob(file.etag).read_bytes() == FILES[file.path] for file in self.manifest.files)


class Run:
    """A transfer with its pool and its reports."""

    def __init__(self, transfer: Transfer, pool: SourcePool) -> None:
        self.transfer, self.pool = transfer, pool
        self.received: list[int] = []
        """Received bytes at each report."""

    def run(self, report: Callable[[], object] = lambda: None) -> bool:
        def note() -> None:
            self.received.append(self.transfer.received_bytes)
            report()

        try:
            return self.transfer.run(note)
        finally:
            self.pool.close()

    def fail(self) -> ModelFileError:
        with pytest.raises(ModelFileError) as caught:
            self.run()
        return caught.value


@pytest.fixture
def place(tmp_path: Path, hub: Hub) -> Place:
    return Place(tmp_path, hub)


def test_a_transfer_stores_every_file_with_its_digest(place: Place):
    before = set(threading.enumerate())
    run = place.open()
    assert run.run()
    assert place.has_files()
    assert (run.transfer.received_bytes, run.pool.fetched, place.hub.count_bytes()) == (TOTAL, TOTAL, TOTAL)
    assert run.transfer.list_digests() == {
        file.etag: record_digest(place.folder.get_blob(file.etag), hashlib.sha256(FILES[file.path]).hexdigest())
        for file in place.manifest.files
    }

    def list_workers() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one not in before and not one.name.startswith("hub-read")]

    until(lambda: not list_workers(), what="the end of the threads")
    assert sorted(path.name for path in place.folder.blobs.iterdir()) == sorted(f.etag for f in place.manifest.files)


def test_only_missing_pieces_are_fetched_each_once(place: Place):
    place.store_pieces(1, 5, 6, 80)
    run = place.open()
    assert run.run()
    assert place.has_files()
    assert run.pool.fetched == TOTAL - 3 * PIECE - 123
    missing = [piece for piece in range(81) if piece not in (1, 5, 6, 80)]
    asked = [piece for start, end in place.list_ranges() for piece in range(start // PIECE, end // PIECE)]
    assert asked == missing


def test_a_file_whose_pieces_are_all_there_is_verified_without_a_request(place: Place):
    place.store_pieces(*range(81))
    run = place.open()
    assert run.run()
    assert place.has_files()
    assert (run.pool.fetched, place.list_ranges()) == (2, [])


@pytest.mark.parametrize("connections", [1, 4])
def test_as_many_ranges_as_connections_are_requested_at_once(place: Place, connections: int):
    place.hub.faults.chunk_seconds = 20.0
    run = place.open(connections=connections)
    runner = threading.Thread(target=run.run)
    runner.start()
    until(lambda: len(place.hub.requests) >= connections, what="the requests")
    time.sleep(3 * POLL_SECONDS)
    asked = len(place.hub.requests)
    place.stop.set()
    runner.join(20)
    assert asked == connections
    ranges = place.list_ranges()
    assert all(end - start <= 32 * PIECE for start, end in ranges), "no connection takes all"
    assert len(ranges) == connections - 1, "the other one fetches the config"


def test_a_stop_ends_the_transfer_and_its_pieces_stay(place: Place):
    place.hub.faults.chunk_seconds = 0.05
    run = place.open()
    assert not run.run(lambda: place.stop.set() if run.transfer.received_bytes > 10 * PIECE else None)
    received = run.transfer.received_bytes
    assert TOTAL > received > 10 * PIECE
    assert not place.folder.get_blob(place.get_file(WEIGHTS).etag).exists()
    assert WEIGHTS not in {file.path for file in place.manifest.files if file.etag in run.transfer.list_digests()}
    place.stop.clear()
    place.hub.faults.chunk_seconds = 0.0
    again = place.open()
    assert again.run()
    assert again.pool.fetched <= TOTAL - received + 8 * PIECE
    assert place.has_files()


def test_reports_come_while_the_transfer_waits(place: Place):
    place.hub.faults.chunk_seconds = 0.25
    run = place.open()
    began = time.monotonic()
    assert run.run()
    seconds = time.monotonic() - began
    threads = 5  # four connections and the verification: the end of each is followed by a report
    assert 2 <= len(run.received) <= seconds / POLL_SECONDS + 1 + threads
    assert run.received == sorted(run.received)


def test_a_body_that_ends_early_is_continued_at_its_next_byte(place: Place):
    place.hub.faults.cut = {WEIGHTS: 3}
    run = place.open(connections=1)
    assert run.run()
    assert place.has_files()
    assert run.pool.fetched == TOTAL
    assert place.hub.faults.cut == {WEIGHTS: 0}


def test_content_that_is_wrong_at_every_source_ends_the_transfer_with_both_digests(place: Place):
    place.hub.faults.flipped = {WEIGHTS}
    content = bytearray(FILES[WEIGHTS])
    content[len(content) // 2] ^= 1
    error = place.open().fail()
    assert error.code == ModelOrderCode.CONTENT_MISMATCH
    assert error.message == (
        f"{WEIGHTS} has the digest {hashlib.sha256(content).hexdigest()} instead of {place.get_file(WEIGHTS).etag}, "
        "from every source: the repository has changed or a source is damaged; pull again"
    )
    assert not place.folder.get_blob(place.get_file(WEIGHTS).etag).exists()


def test_only_the_file_with_wrong_content_comes_from_the_next_source(place: Place):
    place.hub.faults.flipped = {WEIGHTS}
    with running_hub() as second:
        second.add("tests/tiny", FILES)
        run = place.open(place.hub.url, second.url)
        assert run.run()
    assert place.has_files()
    assert {request.path.rpartition("/")[2] for request in second.requests} == {WEIGHTS}
    assert second.count_bytes() == len(FILES[WEIGHTS])
    assert run.pool.fetched == TOTAL + len(FILES[WEIGHTS])


def test_a_wrong_piece_of_an_earlier_transfer_excludes_no_source(place: Place):
    place.store_pieces(40, content=bytes(len(FILES[WEIGHTS])))
    run = place.open()
    assert run.run()
    assert place.has_files()
    assert run.pool.fetched == 2 * TOTAL - PIECE - 2, "the whole file is fetched again, the others once"


def test_a_disk_without_room_names_the_missing_bytes_before_anything_is_fetched(place: Place):
    place.store_pieces(*range(50))
    error = place.open(reserve=1 << 60).fail()
    assert error.code == ModelOrderCode.DISK_FULL
    assert f"the download needs {show_size(TOTAL - 50 * PIECE)} more" in error.message
    assert place.hub.requests == []


def test_a_source_that_is_lost_during_a_file_is_followed_by_the_next(place: Place):
    place.hub.faults.answers = [Answer(WEIGHTS, 500, times=999)]
    with running_hub() as second:
        second.add("tests/tiny", FILES)
        run = place.open(place.hub.url, second.url, timeout=0.5)
        assert run.run()
        assert run.pool.current is not None
        assert run.pool.current.client.url == second.url
    assert place.has_files()
    assert run.pool.sources[0].lost is not None


def test_a_fault_of_the_disk_ends_the_transfer(place: Place):
    place.folder.get_part(place.get_file(WEIGHTS).etag).mkdir()
    with pytest.raises(IsADirectoryError):
        place.open().run()
    assert place.hub.requests == []


def test_a_fault_of_the_disk_at_the_end_of_a_file_ends_the_transfer(place: Place):
    (place.folder.get_blob(place.get_file(WEIGHTS).etag) / "x").mkdir(parents=True)
    with pytest.raises(OSError, match="irectory"):
        place.open().run()
