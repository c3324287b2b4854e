"""Downloads of whole repositories in this process: files, progress, references and digests."""

import hashlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import ChildChannel, ChildEnd, ChildMessage, ChildProgress
from node.hub.digests import DigestStore, FileDigest, find_content, record_digest
from node.hub.download.part_file import PartFile
from node.hub.downloader import REPORT_SECONDS, run_download
from tests.support.hub.downloads import PIECE, download_order, hub_source
from tests.support.hub.hub import Answer, Hub, running_hub
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.models.files import ModelManifest

WEIGHTS = "model.safetensors"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "copy.json": b'{"model_type": "llama"}',
    "empty.txt": b"",
    WEIGHTS: random.Random(27).randbytes(10 * PIECE + 123),
}
TOTAL = sum(len(content) for name, content in FILES.items() if name != "copy.json")
"""Bytes of the repository, whose two JSON files are one blob."""


class Cache:
    """A cache with a digest store, and the downloads into it."""

    def __init__(self, folder: Path, hub: Hub, output: pytest.CaptureFixture[bytes]) -> None:
        self.folder, self.hub, self._output = folder, hub, output
        self.channel = ChildChannel()
        self.progress: list[ChildProgress] = []
        self.store = DigestStore(folder / "state" / "digests.json")

    def get_repository(self, manifest: ModelManifest) -> RepositoryFolder:
        return RepositoryFolder(self.folder / "hub", manifest.repo)

    def download(self, manifest: ModelManifest, **fields: Any) -> ChildEnd:
        """Download from the hub, and keep the progress that was reported."""
        fields = {"source_timeout_seconds": 30.0, **fields}
        end = run_download(download_order(self.folder, manifest, [hub_source(self.hub.url)], **fields), self.channel)
        lines = self._output.readouterr().out.splitlines()
        messages = [msgspec.json.decode(line, type=ChildMessage) for line in lines]
        self.progress = [message for message in messages if isinstance(message, ChildProgress)]
        return end

    def read_files(self, manifest: ModelManifest) -> dict[str, bytes]:
        root = self.get_repository(manifest).get_snapshot(manifest.commit)
        return {file.path: (root / file.path).read_bytes() for file in manifest.files}

    def list_references(self, manifest: ModelManifest) -> dict[str, str]:
        refs = self.get_repository(manifest).refs
        return {str(path.relative_to(refs)): path.read_text() for path in refs.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach loopback addresses directly, also where the environment has a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as made:
        yield made


@pytest.fixture
def cache(tmp_path: Path, hub: Hub, capsysbinary: pytest.CaptureFixture[bytes]) -> Cache:
    return Cache(tmp_path, hub, capsysbinary)


def test_files_with_the_same_content_are_fetched_once(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    end = cache.download(manifest)
    found = cache.get_repository(manifest).get_snapshot(manifest.commit)
    assert end == ChildEnd(code=ModelOrderCode.COMPLETED, content=find_content(found, cache.store), fetched=TOTAL), (
        end.message
    )
    assert hub.count_bytes() == TOTAL
    assert cache.read_files(manifest) == FILES
    assert {progress.total for progress in cache.progress} <= {TOTAL}


@pytest.mark.parametrize(
    ("revision", "names"), [("", {"main"}), ("main", {"main"}), ("v1/x", {"main", "v1/x"}), ("commit", {"main"})]
)
def test_references_are_main_and_the_revision_of_the_pull(cache: Cache, hub: Hub, revision: str, names: set[str]):
    manifest = hub.add("tests/tiny", FILES)
    manifest = replace(manifest, revision=manifest.commit if revision == "commit" else revision)
    assert cache.download(manifest).code == ModelOrderCode.COMPLETED
    assert cache.list_references(manifest) == dict.fromkeys(names, manifest.commit)


def test_the_digests_of_all_files_are_stored(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    cache.download(manifest)
    folder = cache.get_repository(manifest)
    for name, content in FILES.items():
        path = folder.get_snapshot(manifest.commit) / name
        assert cache.store.find(path) == hashlib.sha256(content).hexdigest()


def test_digests_of_an_interrupted_download_are_stored_by_the_next(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [Answer(WEIGHTS, 404, {"x-error-code": "EntryNotFound"})]
    end = cache.download(manifest)
    assert (end.code, end.message) == (
        ModelOrderCode.NOT_FOUND,
        f"{WEIGHTS} of tests/tiny does not exist: check its revision and file names",
    )
    assert cache.list_references(manifest) == {}
    end = cache.download(manifest)
    assert (end.code, len(end.content)) == (ModelOrderCode.COMPLETED, 64)


def test_known_digests_are_not_read_again_and_others_are(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    cache.download(manifest)
    blob = cache.get_repository(manifest).get_blob(manifest.files[-1].etag)
    blob.write_bytes(bytes(len(FILES[WEIGHTS])))
    cache.store.add({blob: record_digest(blob, manifest.files[-1].sha256)})
    assert cache.download(manifest).fetched == 0, "the store is trusted as long as the file is the same"
    cache.store.add({blob: FileDigest(0, 0, 0, manifest.files[-1].sha256)})
    assert cache.download(manifest).fetched == len(FILES[WEIGHTS])
    assert cache.read_files(manifest) == FILES


def test_partial_files_of_an_earlier_commit_are_removed_at_the_end(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    folder = cache.get_repository(manifest)
    folder.prepare()
    folder.get_part("a" * 64).write_bytes(b"x")
    cache.download(manifest)
    assert {path.name for path in folder.blobs.iterdir()} == {file.etag for file in manifest.files}


def test_progress_counts_present_and_fetched_bytes(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    folder = cache.get_repository(manifest)
    folder.prepare()
    present = manifest.files[0]
    folder.get_blob(present.etag).write_bytes(FILES["config.json"])
    part = PartFile(folder, manifest.files[-1], PIECE)
    part.open()
    part.write_piece(0, FILES[WEIGHTS][:PIECE])
    part.close()
    hub.faults.chunk_seconds = 0.25
    began = time.monotonic()
    end = cache.download(manifest, connections=1)
    seconds = time.monotonic() - began
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL - present.size - PIECE)
    checking, *transfer = cache.progress
    assert (checking.phase, checking.done, checking.total) == (ModelOrderPhase.CHECKING, present.size, TOTAL)
    assert 2 <= len(transfer) <= seconds / REPORT_SECONDS + 1
    for progress in transfer:
        assert (progress.source, progress.message, progress.total) == (hub.url, "", TOTAL)
        is_received = progress.done == TOTAL
        assert progress.phase == (ModelOrderPhase.VERIFYING if is_received else ModelOrderPhase.DOWNLOADING)
        assert is_received or (progress.done - present.size) % PIECE == 0, "complete pieces"
        assert present.size + PIECE <= progress.done <= present.size + PIECE + progress.fetched
    *_, last = transfer
    assert 0 < last.fetched <= end.fetched
    assert last.speed == pytest.approx(last.fetched / seconds, rel=0.9)
    assert [progress.fetched for progress in transfer] == sorted(progress.fetched for progress in transfer)


def test_progress_names_faults_of_the_sources(cache: Cache, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.hub.downloader.REPORT_SECONDS", 0.0)  # a report follows each poll, after 0.2 s
    monkeypatch.setattr("node.hub.downloader.SPEED_SECONDS", 0.3)
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [Answer(WEIGHTS, 429, {"retry-after": "1"}, times=4)]
    assert cache.download(manifest).code == ModelOrderCode.COMPLETED
    assert f"{hub.url} limits the rate of requests for 1 s" in {progress.message for progress in cache.progress}
    stalled = [progress.speed for progress in cache.progress if progress.message and progress.fetched]
    assert set(stalled[2:]) <= {0.0}, "the other files came before these seconds"


@pytest.mark.parametrize("present", [True, False])
def test_a_cancelled_download_ends_before_anything_is_fetched(cache: Cache, hub: Hub, present: bool):
    manifest = hub.add("tests/tiny", FILES)
    folder = cache.get_repository(manifest)
    if present:
        folder.prepare()
        folder.get_blob(manifest.files[0].etag).write_bytes(FILES["config.json"])
    cache.channel.stop.set()
    end = cache.download(manifest)
    assert end == ChildEnd(code=ModelOrderCode.CANCELLED)
    assert hub.requests == []
    assert not folder.get_snapshot(manifest.commit).exists()


def test_a_cache_that_cannot_be_used_is_named(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    (cache.folder / "hub").touch()
    end = cache.download(manifest)
    assert (end.code, end.fetched) == (ModelOrderCode.FAILED, 0)
    assert end.message == f"the cache {cache.folder / 'hub'} cannot be used: File exists"


def test_a_repository_in_use_ends_the_download_with_its_code(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    with cache.get_repository(manifest).lock():
        end = cache.download(manifest)
    assert (end.code, "another process works on tests/tiny" in end.message) == (ModelOrderCode.IN_USE, True)


def test_a_cache_that_is_a_link_is_filled_at_its_target(cache: Cache, hub: Hub):
    manifest = hub.add("tests/tiny", FILES)
    (cache.folder / "disk").mkdir()
    (cache.folder / "hub").symlink_to(cache.folder / "disk")
    assert cache.download(manifest).code == ModelOrderCode.COMPLETED
    assert os.path.islink(cache.folder / "hub")
    assert cache.read_files(manifest) == FILES
    assert [path.name for path in (cache.folder / "disk").glob("models--*")] == ["models--tests--tiny"]
