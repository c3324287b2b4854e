"""The downloader as a process, against a hub with faults."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from msgspec.structs import replace

from node.hub.cache_layout import RepositoryFolder
from node.hub.digests import DigestStore, find_content
from node.hub.download.piece_journal import parse_journal
from node.hub.download.source_client import MAX_REDIRECTS
from node.hub.serving.server import PENDING
from tests.effort import thin_cases
from tests.support.hub.downloads import PIECE, Child, download, download_order, hub_source
from tests.support.hub.hub import Answer, Hub, running_hub
from tests.support.processes import environment, until
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile, ModelManifest, ModelSource, SourceKind
from wire.units import GIB

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
SIZE = 40 * PIECE + 123
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "1_Pooling/config.json": b"{}",
    "empty.txt": b"",
    WEIGHTS: random.Random(27).randbytes(SIZE),
}
TOTAL = sum(map(len, FILES.values()))
KILLS = 6


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as made:
        yield made


def snapshot(folder: Path, manifest: ModelManifest) -> dict[str, bytes]:
    """Return the content of a downloaded snapshot."""
    root = RepositoryFolder(folder / "hub", manifest.repo).get_snapshot(manifest.commit)
    return {file.path: (root / file.path).read_bytes() for file in manifest.files}


def is_published(folder: Path, manifest: ModelManifest) -> bool:
    repository = RepositoryFolder(folder / "hub", manifest.repo)
    return repository.get_snapshot(manifest.commit).exists() or (repository.refs / "main").exists()


def list_blobs(folder: Path, manifest: ModelManifest) -> set[str]:
    return {path.name for path in RepositoryFolder(folder / "hub", manifest.repo).blobs.iterdir()}


def test_a_download_fills_the_cache_of_other_tools(hub: Hub, tmp_path: Path):
    manifest = replace(hub.add("tests/tiny", FILES), revision="v1/x")
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert (end.code, end.message, end.fetched) == (ModelOrderCode.COMPLETED, "", TOTAL)
    assert hub.count_bytes() == TOTAL
    assert snapshot(tmp_path, manifest) == FILES
    assert list_blobs(tmp_path, manifest) == {file.etag for file in manifest.files}
    refs = RepositoryFolder(tmp_path / "hub", manifest.repo).refs
    assert (refs / "main").read_text() == (refs / "v1" / "x").read_text() == manifest.commit
    found = RepositoryFolder(tmp_path / "hub", manifest.repo).get_snapshot(manifest.commit)
    assert end.content == find_content(found, DigestStore(tmp_path / "state" / "digests.json")) != ""
    script = "import sys, huggingface_hub as h; print(h.snapshot_download(sys.argv[1], local_files_only=True))"
    client = subprocess.run(
        [sys.executable, "-c", script, "tests/tiny"],
        env=environment(HF_HUB_CACHE=str(tmp_path / "hub")),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert client.stdout.strip() == str(found)


def test_a_second_download_fetches_nothing(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    first = download(tmp_path, manifest, [hub_source(hub.url)])
    hub.requests.clear()
    assert download(tmp_path, manifest, [hub_source(hub.url)]) == replace(first, fetched=0)
    assert hub.requests == []


def test_pieces_that_are_recorded_before_a_kill_are_not_fetched_again(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.05
    order = download_order(tmp_path, manifest, [hub_source(hub.url)])
    journal = RepositoryFolder(tmp_path / "hub", "tests/tiny").get_journal(manifest.files[-1].etag)

    def count_received() -> int:
        parsed = parse_journal(journal.read_bytes()) if journal.exists() else None
        return len(parsed.pieces) * PIECE if parsed is not None else 0

    draw = random.Random()
    for kill in range(KILLS):
        hub.requests.clear()
        child = Child("node.hub.downloader", order, tmp_path / "log")
        until(lambda child=child: hub.requests or child.popen.poll() is not None, what="a request")
        if kill == KILLS - 1:
            until(count_received, what="a recorded piece")
        else:
            time.sleep(draw.uniform(0, 0.08))
        child.close()
        assert not is_published(tmp_path, manifest) or snapshot(tmp_path, manifest) == FILES
    received = count_received()
    hub.faults.chunk_seconds = 0.0
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert end.code == ModelOrderCode.COMPLETED
    assert received > 0
    assert end.fetched <= TOTAL - received + PIECE
    assert snapshot(tmp_path, manifest) == FILES
    assert list_blobs(tmp_path, manifest) == {file.etag for file in manifest.files}


def test_sigterm_ends_a_download_and_its_pieces_stay(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.02
    child = Child("node.hub.downloader", download_order(tmp_path, manifest, [hub_source(hub.url)]), tmp_path / "log")
    while not (message := child.read()) or message.fetched < 4 * PIECE:
        pass
    child.popen.send_signal(signal.SIGTERM)
    end = child.wait_end()
    assert (end.code, child.popen.wait(10)) == (ModelOrderCode.CANCELLED, 0)
    child.close()
    hub.faults.chunk_seconds = 0.0
    assert not is_published(tmp_path, manifest)
    again = download(tmp_path, manifest, [hub_source(hub.url)])
    assert again.code == ModelOrderCode.COMPLETED
    assert end.fetched + again.fetched <= TOTAL + 4 * PIECE


def test_the_end_of_the_agent_ends_the_download(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.5
    child = Child("node.hub.downloader", download_order(tmp_path, manifest, [hub_source(hub.url)]), tmp_path / "log")
    until(lambda: hub.requests, what="a request")
    child.end_agent()
    assert child.popen.wait(10) == 0
    child.close()


def test_a_flipped_bit_is_never_published(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.flipped = {WEIGHTS}
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    weights = manifest.files[-1]
    assert end.code == ModelOrderCode.CONTENT_MISMATCH
    assert WEIGHTS in end.message
    assert weights.sha256 in end.message
    assert not is_published(tmp_path, manifest)
    assert weights.etag not in list_blobs(tmp_path, manifest)


def test_the_next_source_replaces_wrong_content(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.flipped = {WEIGHTS}
    with running_hub() as second:
        second.add("tests/tiny", FILES)
        end = download(tmp_path, manifest, [hub_source(hub.url), hub_source(second.url)])
    assert end.code == ModelOrderCode.COMPLETED
    assert snapshot(tmp_path, manifest) == FILES
    assert {request.path.rpartition("/")[2] for request in second.requests} == {WEIGHTS}


def interrupt_with_wrong_piece(hub: Hub, folder: Path, manifest: ModelManifest) -> None:
    """Kill a download of flipped weights once it has recorded the wrong piece."""
    hub.faults.flipped, hub.faults.chunk_seconds = {WEIGHTS}, 0.3
    wrong = SIZE // 2 // PIECE
    journal = RepositoryFolder(folder / "hub", manifest.repo).get_journal(manifest.files[-1].etag)

    def is_recorded() -> bool:
        parsed = parse_journal(journal.read_bytes()) if journal.exists() else None
        return parsed is not None and wrong in parsed.pieces

    child = Child("node.hub.downloader", download_order(folder, manifest, [hub_source(hub.url)]), folder / "log")
    until(is_recorded, what="the wrong piece")
    child.close()
    assert is_recorded(), "the download ended before it was killed"
    hub.faults.chunk_seconds = 0.0


def test_a_wrong_piece_of_an_earlier_download_is_not_blamed_on_the_source(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    interrupt_with_wrong_piece(hub, tmp_path, manifest)
    hub.faults.flipped = set()
    assert download(tmp_path, manifest, [hub_source(hub.url)]).code == ModelOrderCode.COMPLETED
    assert snapshot(tmp_path, manifest) == FILES


def test_a_source_that_stays_wrong_ends_a_resumed_download(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    interrupt_with_wrong_piece(hub, tmp_path, manifest)
    assert download(tmp_path, manifest, [hub_source(hub.url)]).code == ModelOrderCode.CONTENT_MISMATCH
    assert not is_published(tmp_path, manifest)


def test_cut_bodies_continue_where_they_ended(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.cut = {WEIGHTS: 5}
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL)
    assert hub.faults.cut == {WEIGHTS: 0}


def test_answers_without_ranges_are_used(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.ignores_ranges = True
    assert download(tmp_path, manifest, [hub_source(hub.url)]).code == ModelOrderCode.COMPLETED
    assert snapshot(tmp_path, manifest) == FILES


ABSURD = (
    {"content-range": "bytes 0-99/99999999999999999999999999"},
    {"content-range": "nonsense"},
    {"content-range": f"bytes 7-{SIZE}/{SIZE}"},
    {"content-range": f"bytes 0-99/{SIZE + 1}"},
)


@pytest.mark.parametrize("headers", thin_cases(ABSURD, 2, kept=2))
def test_absurd_ranges_end_the_source(hub: Hub, tmp_path: Path, headers: dict[str, str]):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.headers = {WEIGHTS: headers}
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert end.code == ModelOrderCode.CONTENT_MISMATCH
    assert WEIGHTS in end.message
    assert not is_published(tmp_path, manifest)


def test_a_shorter_file_at_the_source_is_named(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [Answer(WEIGHTS, 416, times=99)]
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert (end.code, "shorter" in end.message) == (ModelOrderCode.CONTENT_MISMATCH, True)


@pytest.mark.parametrize("value", ["1", "date"])
def test_rate_limits_are_waited_for(hub: Hub, tmp_path: Path, value: str):
    manifest = hub.add("tests/tiny", FILES)
    sent = formatdate(time.time() + 2, usegmt=True) if value == "date" else value
    hub.faults.answers = [Answer("resolve", 429, {"retry-after": sent})]
    began = time.monotonic()
    assert download(tmp_path, manifest, [hub_source(hub.url)]).code == ModelOrderCode.COMPLETED
    assert time.monotonic() - began >= 0.9


def test_a_long_rate_limit_ends_the_download_with_its_time(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [Answer("resolve", 429, {"ratelimit": '"resolvers";r=0;t=900'}, times=99)]
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert (end.code, end.retry_after) == (ModelOrderCode.RATE_LIMITED, 900.0)
    assert "900 s" in end.message


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (Answer("resolve", 403, {"x-error-code": "GatedRepo"}, 99), ModelOrderCode.GATED, "accept its terms"),
        (Answer("resolve", 404, {"x-error-code": "EntryNotFound"}, 99), ModelOrderCode.NOT_FOUND, "does not exist"),
        (Answer("resolve", 500, {}, 999), ModelOrderCode.SOURCE_LOST, "answered 500"),
    ],
)
def test_refusals_end_with_one_sentence(hub: Hub, tmp_path: Path, answer: Answer, code: str, text: str):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [answer]
    end = download(tmp_path, manifest, [hub_source(hub.url, "hf_secretsecretsecretsecret")])
    assert end.code == code
    assert text in end.message
    assert "secret" not in end.message + (tmp_path / "downloader.log").read_text()


def test_passing_faults_are_retried(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [Answer("resolve", 502, times=3), Answer("resolve", 503, times=2)]
    order = {"source_timeout_seconds": 30.0}
    assert download(tmp_path, manifest, [hub_source(hub.url)], **order).code == ModelOrderCode.COMPLETED


def test_a_source_that_still_downloads_is_awaited_beyond_the_timeout(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [Answer("resolve", 503, {"x-error-code": PENDING, "retry-after": "1"}, times=16)]
    began = time.monotonic()
    end = download(tmp_path, manifest, [hub_source(hub.url)], source_timeout_seconds=1.0)
    assert end.code == ModelOrderCode.COMPLETED, end.message
    assert time.monotonic() - began > 2.0, "no source was that long without progress"


def test_a_lost_source_is_replaced_by_the_next(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    sources = [hub_source("http://127.0.0.1:9"), hub_source(hub.url)]
    assert download(tmp_path, manifest, sources).code == ModelOrderCode.COMPLETED


def test_without_any_source_the_download_ends(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    end = download(tmp_path, manifest, [hub_source("http://127.0.0.1:9"), hub_source("http://127.0.0.1:9")])
    assert (end.code, "all sources are lost" in end.message) == (ModelOrderCode.SOURCE_LOST, True)


UNUSABLE = (
    (ModelSource("future", "https://127.0.0.1:9"), "names none"),
    (ModelSource(SourceKind.MIRROR, "http://127.0.0.1:9", "token", "n1"), "must begin with https"),
    (ModelSource(SourceKind.HUB, "no address"), "a hub cannot be used"),
    (ModelSource(SourceKind.HUB, "http://[::1"), "address is invalid"),
    (ModelSource(SourceKind.MIRROR, "https://127.0.0.1:9", "token", "n1"), "a mirror cannot be used"),
)


@pytest.mark.parametrize(("source", "reason"), thin_cases(UNUSABLE, 3, kept=2))
def test_sources_that_cannot_be_used_are_named(hub: Hub, tmp_path: Path, source: ModelSource, reason: str):
    manifest = hub.add("tests/tiny", FILES)
    end = download(tmp_path, manifest, [source])
    assert (end.code, reason in end.message) == (ModelOrderCode.SOURCE_LOST, True)
    assert download(tmp_path, manifest, [source, hub_source(hub.url)]).code == ModelOrderCode.COMPLETED


def test_the_token_does_not_follow_a_redirect_to_another_host(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    with running_hub() as store:
        store.add("tests/tiny", FILES)
        path = f"/tests/tiny/resolve/{manifest.commit}/{WEIGHTS}"
        hub.faults.answers = [Answer(WEIGHTS, 302, {"location": f"{store.url}{path}?signature=x"}, times=999)]
        end = download(tmp_path, manifest, [hub_source(hub.url, "secret")])
        assert end.code == ModelOrderCode.COMPLETED
        assert {request.authorization for request in store.requests} == {""}
        assert {request.authorization for request in hub.requests} == {"Bearer secret"}


def test_a_refusal_of_the_storage_behind_the_hub_is_no_fault_of_the_repository(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    with running_hub() as store:
        store.add("tests/tiny", FILES)
        store.faults.answers = [Answer(WEIGHTS, 403, times=2)]  # the signature of its address has expired
        path = f"/tests/tiny/resolve/{manifest.commit}/{WEIGHTS}"
        hub.faults.answers = [Answer(WEIGHTS, 302, {"location": f"{store.url}{path}?signature=x"}, times=999)]
        assert download(tmp_path, manifest, [hub_source(hub.url)]).code == ModelOrderCode.COMPLETED
    assert snapshot(tmp_path, manifest) == FILES


@pytest.mark.parametrize("location", ["file:///etc/passwd", "", "ftp://127.0.0.1/x"])
def test_redirects_to_other_schemes_are_refused(hub: Hub, tmp_path: Path, location: str):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.answers = [Answer(WEIGHTS, 302, {"location": location}, times=99)]
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert (end.code, "redirects" in end.message) == (ModelOrderCode.FAILED, True)


def test_only_so_many_redirects_are_followed(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    itself = {"location": f"/tests/tiny/resolve/{manifest.commit}/{WEIGHTS}"}
    hub.faults.answers = [Answer(WEIGHTS, 302, itself, times=999)]
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert (end.code, f"more than {MAX_REDIRECTS} times" in end.message) == (ModelOrderCode.FAILED, True)
    hub.faults.answers = [Answer(WEIGHTS, 302, itself, times=MAX_REDIRECTS)]
    assert download(tmp_path, manifest, [hub_source(hub.url)]).code == ModelOrderCode.COMPLETED


def test_blobs_of_other_tools_are_verified_by_content(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    folder = RepositoryFolder(tmp_path / "hub", "tests/tiny")
    folder.prepare()
    config, weights = manifest.files[0], manifest.files[-1]
    folder.get_blob(config.etag).write_bytes(FILES["config.json"])
    folder.get_blob(weights.etag).write_bytes(bytes(SIZE))
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL - config.size)
    assert snapshot(tmp_path, manifest) == FILES


@pytest.mark.parametrize("right", [True, False])
def test_blobs_that_are_links_are_verified_and_never_written_through(hub: Hub, tmp_path: Path, right: bool):
    manifest = hub.add("tests/tiny", FILES)
    folder = RepositoryFolder(tmp_path / "hub", "tests/tiny")
    folder.prepare()
    shared = tmp_path / "hub" / "blobs" / "xx"
    shared.parent.mkdir()
    content = FILES[WEIGHTS] if right else bytes(SIZE)
    shared.write_bytes(content)
    folder.get_blob(manifest.files[-1].etag).symlink_to(shared)
    end = download(tmp_path, manifest, [hub_source(hub.url)])
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL - (SIZE if right else 0))
    assert snapshot(tmp_path, manifest) == FILES
    assert shared.read_bytes() == content


@pytest.mark.parametrize("path", ["../../escape", "/tmp/escape", "a/../../b"])
def test_unsafe_names_are_refused_before_anything_is_written(hub: Hub, tmp_path: Path, path: str):
    manifest = hub.add("tests/tiny", FILES)
    unsafe = replace(manifest, files=(*manifest.files, ModelFile(path, 1, "a" * 64)))
    end = download(tmp_path, unsafe, [hub_source(hub.url)])
    assert end.code == ModelOrderCode.INVALID
    assert not (tmp_path / "hub").exists()


def test_a_second_download_of_a_repository_is_refused(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.5
    first = Child("node.hub.downloader", download_order(tmp_path, manifest, [hub_source(hub.url)]), tmp_path / "log")
    until(lambda: hub.requests, what="a request")
    assert download(tmp_path, manifest, [hub_source(hub.url)]).code == ModelOrderCode.IN_USE
    hub.faults.chunk_seconds = 0.0
    assert first.wait_end().code == ModelOrderCode.COMPLETED
    first.close()


def test_a_new_commit_during_the_download_changes_nothing(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.add("tests/tiny", {**FILES, WEIGHTS: bytes(SIZE)})
    assert download(tmp_path, manifest, [hub_source(hub.url)]).code == ModelOrderCode.COMPLETED
    assert snapshot(tmp_path, manifest) == FILES


def test_too_little_free_disk_is_refused_with_numbers(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    end = download(tmp_path, manifest, [hub_source(hub.url)], reserve_bytes=1 << 60)
    assert end.code == ModelOrderCode.DISK_FULL
    assert "GiB free" in end.message
    assert hub.requests == []


def test_the_reserve_of_the_disk_is_kept_while_pieces_arrive(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.1
    free = shutil.disk_usage(tmp_path).free
    if free < 6 * GIB or not hasattr(os, "posix_fallocate"):
        pytest.skip("the disk of the tests cannot be filled at once")
    reserve = free - GIB  # other processes use this disk as well
    order = download_order(tmp_path, manifest, [hub_source(hub.url)], reserve_bytes=reserve)
    child = Child("node.hub.downloader", order, tmp_path / "log")
    until(lambda: hub.requests, what="a request")
    with (tmp_path / "other").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, 3 * GIB)
    end = child.wait_end()
    child.close()
    assert end.code == ModelOrderCode.DISK_FULL
    assert end.fetched < TOTAL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_fills_up_ends_the_download_and_its_pieces_stay(hub: Hub, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this system mounts no small disk")
    try:
        (disk / "other").write_bytes(bytes(1024 * 1024))
        hub.faults.chunk_seconds = 0.02
        child = Child("node.hub.downloader", download_order(disk, manifest, [hub_source(hub.url)]), tmp_path / "log")
        until(lambda: hub.requests, what="a request")
        (disk / "more").write_bytes(bytes(2 * 1024 * 1024))
        end = child.wait_end()
        child.close()
        assert (end.code, "free and keeps" in end.message) == (ModelOrderCode.DISK_FULL, True)
        assert not is_published(disk, manifest)
        for name in ("other", "more"):
            (disk / name).unlink()
        again = download(disk, manifest, [hub_source(hub.url)])
        assert again.code == ModelOrderCode.COMPLETED
        assert again.fetched < TOTAL
    finally:
        subprocess.run(["umount", str(disk)], check=True)
