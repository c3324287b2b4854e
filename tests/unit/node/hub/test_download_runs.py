"""Downloads within this process, from a hub on a thread: fetched and verified files, and ends of downloads."""

import errno
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from host import private_files
from node.hub import downloader
from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import ChildChannel, ChildEnd, ChildMessage, ChildProgress
from node.hub.download import part_file
from node.hub.download.part_file import PartFile
from node.hub.downloader import run_download
from tests.support.hub.downloads import PIECE, download_order, hub_source
from tests.support.hub.hub import Hub, running_hub
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.models.files import ModelFile, ModelManifest
from wire.units import MIB, show_size

WEIGHTS = "model.safetensors"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "empty.txt": b"",
    WEIGHTS: random.Random(27).randbytes(6 * PIECE + 123),
}
TOTAL = sum(map(len, FILES.values()))
SECONDS = 3.0
"""Seconds after which a download is cancelled, so that one without an end fails its test."""


class Channel(ChildChannel):
    """Channel of a download that is cancelled after `SECONDS`. `progress` has the messages that it sends; `on_progress`
    is called with each."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: list[ChildProgress] = []
        self.on_progress: Callable[[ChildProgress], object] = bool
        self.timer = threading.Timer(SECONDS, self.stop.set)
        self.timer.daemon = True
        self.timer.start()

    def send(self, message: ChildMessage) -> None:
        assert isinstance(message, ChildProgress)
        self.progress.append(message)
        self.on_progress(message)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report all progress, wait briefly for pieces and locks, and use no proxy."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(downloader, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr("node.hub.download.transfer.POLL_SECONDS", 0.01)
    monkeypatch.setattr("node.hub.cache_layout.LOCK_TIMEOUT_SECONDS", 0.1)


@pytest.fixture(scope="module")
def running() -> Iterator[Hub]:
    with running_hub() as made:
        yield made


@pytest.fixture
def hub(running: Hub) -> Hub:
    running.reset()
    return running


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel()
    yield made
    made.timer.cancel()


def run(channel: Channel, folder: Path, manifest: ModelManifest, *hubs: Hub, **fields: object) -> ChildEnd:
    order = download_order(folder, manifest, [hub_source(hub.url) for hub in hubs], **{"connections": 2, **fields})
    return run_download(order, channel)


def snapshot(folder: Path, manifest: ModelManifest) -> dict[str, bytes]:
    """Return the content of a downloaded snapshot."""
    root = RepositoryFolder(folder / "hub", manifest.repo).get_snapshot(manifest.commit)
    return {file.path: (root / file.path).read_bytes() for file in manifest.files}


def list_requested(hub: Hub) -> set[str]:
    return {request.path.rpartition("/")[2] for request in hub.requests}


def prepare(folder: Path, manifest: ModelManifest) -> RepositoryFolder:
    made = RepositoryFolder(folder / "hub", manifest.repo)
    made.prepare()
    return made


def test_a_download_fetches_each_file_once_and_the_next_one_needs_no_source(hub: Hub, tmp_path: Path, channel: Channel):
    manifest = hub.add("tests/tiny", FILES)
    end = run(channel, tmp_path / "new" / "folder", manifest, hub)
    assert (end.code, end.message, end.fetched, len(end.content)) == (ModelOrderCode.COMPLETED, "", TOTAL, 64)
    assert snapshot(tmp_path / "new" / "folder", manifest) == FILES
    assert channel.progress[-1].total == TOTAL
    hub.requests.clear()
    assert run(channel, tmp_path / "new" / "folder", manifest) == replace(end, fetched=0)
    assert hub.requests == []


def test_an_unsafe_name_is_refused_before_anything_is_written(hub: Hub, tmp_path: Path, channel: Channel):
    manifest = hub.add("tests/tiny", FILES)
    unsafe = replace(manifest, files=(*manifest.files, ModelFile("../../escape", 1, "a" * 64)))
    assert run(channel, tmp_path, unsafe, hub).code == ModelOrderCode.INVALID
    assert list(tmp_path.iterdir()) == []


def test_a_repository_that_another_process_has_locked_is_refused(hub: Hub, tmp_path: Path, channel: Channel):
    manifest = hub.add("tests/tiny", FILES)
    with prepare(tmp_path, manifest).lock():
        assert run(channel, tmp_path, manifest, hub).code == ModelOrderCode.IN_USE
    assert run(channel, tmp_path, manifest, hub).code == ModelOrderCode.COMPLETED


@pytest.mark.parametrize("content", [bytes(len(FILES[WEIGHTS])), FILES[WEIGHTS][:-1], FILES[WEIGHTS] + b"x"])
def test_a_present_file_with_other_content_is_fetched(hub: Hub, tmp_path: Path, channel: Channel, content: bytes):
    manifest = hub.add("tests/tiny", FILES)
    folder = prepare(tmp_path, manifest)
    folder.get_blob(manifest.files[0].etag).write_bytes(FILES["config.json"])
    folder.get_blob(manifest.files[-1].etag).write_bytes(content)
    end = run(channel, tmp_path, manifest, hub)
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL - manifest.files[0].size)
    assert "config.json" not in list_requested(hub)
    assert snapshot(tmp_path, manifest) == FILES


def test_present_files_count_as_done_while_they_are_verified(hub: Hub, tmp_path: Path, channel: Channel):
    manifest = hub.add("tests/tiny", FILES)
    folder = prepare(tmp_path, manifest)
    config, weights = manifest.files[0], manifest.files[-1]
    for file in (config, weights):
        folder.get_blob(file.etag).write_bytes(FILES[file.path])
    end = run(channel, tmp_path, manifest, hub)
    assert (end.code, len(end.content)) == (ModelOrderCode.COMPLETED, 64)
    checking = [one for one in channel.progress if one.phase == ModelOrderPhase.CHECKING]
    assert [(one.done, one.total) for one in checking] == [(config.size, TOTAL), (config.size + weights.size, TOTAL)]
    assert all(one.done >= TOTAL for one in channel.progress if one not in checking)


def test_a_present_file_that_changes_while_it_is_verified_is_fetched(hub: Hub, tmp_path: Path, channel: Channel):
    manifest = hub.add("tests/tiny", {WEIGHTS: FILES[WEIGHTS]})
    blob = prepare(tmp_path, manifest).get_blob(manifest.files[0].etag)
    blob.write_bytes(FILES[WEIGHTS])
    channel.on_progress = lambda message: os.utime(blob, (1, len(channel.progress)))
    end = run(channel, tmp_path, manifest, hub)
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, len(FILES[WEIGHTS]))


def test_only_files_without_a_known_digest_are_read_again(hub: Hub, tmp_path: Path, channel: Channel):
    manifest = hub.add("tests/tiny", {WEIGHTS: FILES[WEIGHTS]})
    assert run(channel, tmp_path, manifest, hub).code == ModelOrderCode.COMPLETED
    channel.progress.clear()
    channel.stop.set()
    assert run(channel, tmp_path, manifest).code == ModelOrderCode.COMPLETED, "nothing was left to do"
    assert channel.progress == []
    blob = RepositoryFolder(tmp_path / "hub", manifest.repo).get_blob(manifest.files[0].etag)
    blob.write_bytes(FILES[WEIGHTS])
    assert run(channel, tmp_path, manifest).code == ModelOrderCode.CANCELLED, "its time of change is another"


def test_wrong_content_gets_no_name(hub: Hub, tmp_path: Path, channel: Channel):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.flipped = {WEIGHTS}
    end = run(channel, tmp_path, manifest, hub)
    assert end.code == ModelOrderCode.CONTENT_MISMATCH
    assert WEIGHTS in end.message
    assert manifest.files[-1].sha256 in end.message
    assert not RepositoryFolder(tmp_path / "hub", manifest.repo).get_blob(manifest.files[-1].etag).exists()


def test_wrong_content_is_fetched_again_from_the_sources_that_did_not_send_it(
    hub: Hub, tmp_path: Path, channel: Channel
):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.flipped = {WEIGHTS}
    with running_hub() as second:
        second.add("tests/tiny", FILES)
        end = run(channel, tmp_path, manifest, hub, second)
        assert list_requested(second) == {WEIGHTS}
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL + len(FILES[WEIGHTS]))
    assert snapshot(tmp_path, manifest) == FILES


@pytest.mark.parametrize("stays", [False, True])
def test_a_wrong_piece_of_an_earlier_download_is_blamed_on_no_source(
    hub: Hub, tmp_path: Path, channel: Channel, stays: bool
):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.flipped = {WEIGHTS} if stays else set()
    part = PartFile(prepare(tmp_path, manifest), manifest.files[-1], PIECE)
    part.open()
    part.write_piece(2, bytes(PIECE))
    part.close()
    end = run(channel, tmp_path, manifest, hub)
    assert end.code == (ModelOrderCode.CONTENT_MISMATCH if stays else ModelOrderCode.COMPLETED)
    if not stays:
        assert end.fetched == TOTAL - PIECE + len(FILES[WEIGHTS])
        assert snapshot(tmp_path, manifest) == FILES


def limit_disk(monkeypatch: pytest.MonkeyPatch, hub: Hub, free: int, later: int) -> None:
    """Set the free bytes of the disk: `free` before the first request to the hub, `later` after it."""
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=later if hub.requests else free, total=MIB))
    monkeypatch.setattr("node.hub.download.disk_space.shutil", usage)


def test_a_download_that_just_fits_the_disk_begins_and_no_larger_one(
    hub: Hub, tmp_path: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch
):
    manifest = hub.add("tests/tiny", FILES)
    limit_disk(monkeypatch, hub, TOTAL - 1, TOTAL)
    assert run(channel, tmp_path, manifest, hub).code == ModelOrderCode.DISK_FULL
    assert hub.requests == []
    limit_disk(monkeypatch, hub, TOTAL, 0)
    assert run(channel, tmp_path, manifest, hub).code == ModelOrderCode.COMPLETED, "no byte of the reserve is used"
    hub.requests.clear()
    limit_disk(monkeypatch, hub, -1, -1)
    assert run(channel, tmp_path, manifest, hub).code == ModelOrderCode.COMPLETED, "a complete model needs no disk"


def test_a_disk_that_fills_up_meanwhile_ends_the_download(
    hub: Hub, tmp_path: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch
):
    manifest = hub.add("tests/tiny", FILES)
    limit_disk(monkeypatch, hub, TOTAL, -1)
    end = run(channel, tmp_path, manifest, hub)
    assert (end.code, f"needs {show_size(TOTAL)} more" in end.message) == (ModelOrderCode.DISK_FULL, True), end.message


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (errno.ENOSPC, ModelOrderCode.DISK_FULL, "needs 384.1 KiB more"),
        (errno.EDQUOT, ModelOrderCode.DISK_FULL, "needs 384.1 KiB more"),
        (errno.EIO, ModelOrderCode.FAILED, "cannot be used"),
    ],
)
def test_a_piece_that_cannot_be_written_ends_the_download(
    hub: Hub, tmp_path: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch, number: int, code: str, text: str
):
    manifest = hub.add("tests/tiny", FILES)

    def write(descriptor: int, content: bytes) -> int:
        raise OSError(number, "fault of the disk")

    monkeypatch.setattr(part_file, "os", SimpleNamespace(**{**vars(part_file.os), "write": write}))
    end = run(channel, tmp_path, manifest, hub)
    assert (end.code, text in end.message) == (code, True), end.message
    assert shutil.disk_usage(tmp_path).free > MIB


def test_digests_that_cannot_be_stored_end_the_download_with_their_file(
    hub: Hub, tmp_path: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch
):
    manifest = hub.add("tests/tiny", FILES)

    def fchmod(descriptor: int, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(private_files, "os", SimpleNamespace(**{**vars(private_files.os), "fchmod": fchmod}))
        end = run(channel, tmp_path, manifest, hub)
    file = tmp_path / "state" / "digests.json"
    assert (end.code, end.fetched, end.message) == (
        ModelOrderCode.DISK_FULL,
        TOTAL,
        f"the digests of files cannot be written to {file}: No space left on device: free disk space there, then try "
        "again",
    )
    again = run(channel, tmp_path, manifest, hub)
    assert (again.code, again.fetched) == (ModelOrderCode.COMPLETED, 0), "the received files stay"


def test_the_speed_is_that_of_the_last_seconds(
    hub: Hub, tmp_path: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch
):
    """The clock of the reports advances by 1 s at each reading: there are two readings in a report."""
    monkeypatch.setattr(downloader, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    seconds = itertools.count(1)
    manifest = hub.add("tests/tiny", {WEIGHTS: FILES[WEIGHTS]})
    hub.faults.chunk_seconds = 0.02
    assert run(channel, tmp_path, manifest, hub, connections=1).code == ModelOrderCode.COMPLETED
    fetched = [one.fetched for one in channel.progress]
    assert len(fetched) > 5
    assert [one.speed for one in channel.progress] == [
        (now - fetched[max(0, number - 2)]) / (2 * min(number, 2)) if number else 0.0
        for number, now in enumerate(fetched)
    ]


def test_a_cancelled_download_ends_and_its_pieces_stay(hub: Hub, tmp_path: Path, channel: Channel):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.05
    channel.timer.cancel()
    channel.on_progress = lambda progress: channel.stop.set() if progress.fetched else None
    end = run(channel, tmp_path, manifest, hub, connections=1)
    assert end.code == ModelOrderCode.CANCELLED
    assert 0 < end.fetched < TOTAL
    assert not RepositoryFolder(tmp_path / "hub", manifest.repo).get_snapshot(manifest.commit).exists()
    hub.faults.chunk_seconds = 0.0
    again = run(Channel(), tmp_path, manifest, hub)
    assert again.code == ModelOrderCode.COMPLETED
    assert end.fetched + again.fetched <= TOTAL + PIECE
