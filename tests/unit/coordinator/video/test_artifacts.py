"""Files of finished video jobs: the files that are fetched from a node, and the limits of their sizes."""

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.video import artifacts
from coordinator.video.artifacts import (
    MAX_FILES,
    SLACK_BYTES,
    THUMBNAIL,
    VIDEO,
    ArtifactFolder,
    FetchInterrupted,
    compute_max_bytes,
    get_kind,
    get_media_type,
)
from coordinator.video.state.jobs import JobFault, RequestedClip, StoredFile, VideoJob
from wire.identity import NodeId
from wire.video import Artifact

WANTED = RequestedClip("wan", "a cat", 64, 64, 5, 16, 4, 100)
JOB = VideoJob("video_1", 1, "key", 0.0, WANTED, 2**30, node="n1", lease="l1")
CLIP = b"a clip"


def an_artifact(name: str, content: bytes = CLIP) -> Artifact:
    return Artifact(name, len(content), hashlib.sha256(content).digest())


class Node:
    """A node that has a file of the content `CLIP` under every name."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    async def fetch(self, node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the content, as the node of the job does."""
        assert node == "n1"
        self.fetched.append(source)
        yield CLIP


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def folder(tmp_path: Path, node: Node) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "videos", node.fetch)


async def fetch_names(folder: ArtifactFolder, *artifacts: Artifact) -> list[str]:
    """Fetch files of the job, and return the names of the stored ones."""
    files = await folder.fetch_files(JOB, artifacts)
    assert not isinstance(files, JobFault), files
    assert all(file == StoredFile(file.name, len(CLIP), hashlib.sha256(CLIP).hexdigest()) for file in files)
    return [file.name for file in files]


async def test_fetch_files_stores_all_files_of_a_known_kind(
    folder: ArtifactFolder, node: Node, monkeypatch: pytest.MonkeyPatch
):
    synced = list[Path]()
    monkeypatch.setattr(artifacts, "sync_path", synced.append)
    names = ["clip.mp4", "A-1_b.webp", "thumb.jpg"]
    assert await fetch_names(folder, *map(an_artifact, names)) == names
    assert node.fetched == [f"artifact:l1/{name}" for name in names]
    stored = sorted(folder.get_folder(JOB.id).iterdir())
    assert [path.name for path in stored] == sorted(names)
    assert synced == [folder.get_folder(JOB.id)] * 3, "the names outlast a loss of power"
    assert [path.read_bytes() for path in stored] == [CLIP] * 3
    folders = [stored[0].parent, stored[0].parent.parent]
    assert [path.stat().st_mode & 0o777 for path in (*stored, *folders)] == [0o600] * 3 + [0o700] * 2


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "no space"), "storage_full", "the disk of the coordinator is full"),
        (OSError(errno.EDQUOT, "quota"), "storage_full", "the disk of the coordinator is full"),
        (OSError(errno.EROFS, "read-only"), "storage_failed", "the coordinator cannot write: read-only"),
    ],
)
async def test_a_file_that_cannot_be_written_is_a_fault_of_the_coordinator_and_leaves_nothing(
    folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch, error: OSError, code: str, words: str
):
    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(artifacts, "sync_descriptor", fail)
    fault = await folder.fetch_files(JOB, (an_artifact("clip.mp4"),))
    assert fault == JobFault(code, f"clip.mp4 could not be stored: {words}")
    assert not folder.get_folder(JOB.id).exists()


@pytest.mark.parametrize("error", [LookupError("it is not linked"), TimeoutError()])
async def test_a_node_that_does_not_answer_interrupts_the_fetch(tmp_path: Path, error: Exception):
    async def fetch(node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        yield CLIP[:2]
        raise error

    with pytest.raises(FetchInterrupted, match=str(error) or "it stopped answering"):
        await ArtifactFolder(tmp_path / "videos", fetch).fetch_files(JOB, (an_artifact("clip.mp4"),))


@pytest.mark.parametrize("pieces", [[CLIP[:-1]], [CLIP, b"x"], [b"A" + CLIP[1:]], []])
async def test_a_file_that_differs_from_its_report_is_broken(tmp_path: Path, pieces: list[bytes]):
    async def fetch(node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        assert max_bytes == len(CLIP)
        for piece in pieces:
            yield piece

    folder = ArtifactFolder(tmp_path / "videos", fetch)
    fault = await folder.fetch_files(JOB, (an_artifact("clip.mp4"),))
    assert isinstance(fault, JobFault)
    assert (fault.code, folder.get_folder(JOB.id).exists()) == ("artifact_broken", False)


@pytest.mark.parametrize("job", ["../video_1", "video_", "video_1/..", "other", ""])
def test_only_the_id_of_a_job_names_a_folder(folder: ArtifactFolder, job: str):
    with pytest.raises(ValueError, match="is no job"):
        folder.get_folder(job)


@pytest.mark.parametrize(
    "unusable",
    [an_artifact(".hidden.mp4"), an_artifact("../other.mp4"), an_artifact("log.txt"), an_artifact("empty.mp4", b"")],
    ids=["hidden", "path", "kind", "empty"],
)
async def test_files_with_unusable_names_or_without_content_stay_on_the_node(
    folder: ArtifactFolder, node: Node, unusable: Artifact
):
    assert await fetch_names(folder, unusable, an_artifact("clip.mp4")) == ["clip.mp4"]
    assert node.fetched == ["artifact:l1/clip.mp4"]
    fault = await folder.fetch_files(JOB, (unusable,))
    assert isinstance(fault, JobFault)
    assert (fault.code, "no video" in fault.message) == ("output_invalid", True)


async def test_a_file_of_one_byte_is_fetched(tmp_path: Path):
    async def fetch(node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        yield b"x"

    files = await ArtifactFolder(tmp_path / "videos", fetch).fetch_files(JOB, (an_artifact("clip.mp4", b"x"),))
    assert files == (StoredFile("clip.mp4", 1, hashlib.sha256(b"x").hexdigest()),)


async def test_files_after_the_first_few_stay_on_the_node(folder: ArtifactFolder):
    names = [f"{number}.mp4" for number in range(MAX_FILES + 1)]
    assert await fetch_names(folder, *map(an_artifact, names)) == names[:MAX_FILES]


async def test_a_thumbnail_alone_is_no_video(folder: ArtifactFolder, node: Node):
    fault = await folder.fetch_files(JOB, (an_artifact("thumb.webp"),))
    assert isinstance(fault, JobFault)
    assert (fault.code, node.fetched) == ("output_invalid", [])


@pytest.mark.parametrize("name", ["clip.mp4", "thumb.webp"])
async def test_a_file_may_have_the_bytes_of_its_frames_without_compression(
    folder: ArtifactFolder, node: Node, name: str
):
    most = compute_max_bytes(JOB, get_kind(name))
    assert most == 64 * 64 * 3 * (5 if name == "clip.mp4" else 1) + SLACK_BYTES
    larger = await folder.fetch_files(JOB, (an_artifact("clip.mp4"), Artifact(name, most + 1, b"x" * 32)))
    assert isinstance(larger, JobFault)
    assert (larger.code, f"{most} at most" in larger.message, node.fetched) == ("output_invalid", True, [])
    largest = await folder.fetch_files(JOB, (an_artifact("clip.mp4"), Artifact(name, most, b"x" * 32)))
    assert isinstance(largest, JobFault)
    assert largest.code == "artifact_broken"
    assert not folder.get_folder(JOB.id).exists()


async def test_files_are_found_by_their_kind_and_unknown_ones_removed(tmp_path: Path):
    folder = ArtifactFolder(tmp_path / "files", Node().fetch)
    files = (StoredFile("thumb.webp", 1, "a"), StoredFile("clip.mp4", 2, "b"), StoredFile("second.mp4", 3, "c"))
    job = replace(JOB, files=files)
    found = folder.find_file(job, VIDEO)
    assert found == (tmp_path / "files" / "video_1" / "clip.mp4", files[1])
    assert (folder.find_file(job, THUMBNAIL) or (None, None))[1] == files[0]
    assert folder.find_file(JOB, VIDEO) is None
    assert (get_media_type("clip.mp4"), get_media_type("thumb.webp")) == ("video/mp4", "image/webp")
    folder.remove_unknown(set())
    for name in ("video_1", "video_2", "other"):
        (tmp_path / "files" / name).mkdir(parents=True)
        (tmp_path / "files" / name / "clip.mp4").touch()
    folder.remove_unknown({"video_1"})
    assert sorted(file.name for file in (tmp_path / "files").iterdir()) == ["other", "video_1"]
    await asyncio.gather(folder.remove_files("video_1"), folder.remove_files("video_9"), folder.remove_files("../x"))
    assert [file.name for file in (tmp_path / "files").iterdir()] == ["other"]


async def test_a_cancelled_fetch_keeps_its_file_open_until_the_write_in_progress_ends(
    folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch
):
    """Another file may get the number of a closed descriptor."""
    loop, writes, may_write = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    part = folder.get_folder(JOB.id) / "clip.mp4.part"
    targets: list[bool] = []

    def write_late(descriptor: int, piece: bytes) -> None:
        loop.call_soon_threadsafe(writes.set)
        assert may_write.wait(30)
        targets.append(os.path.samestat(os.fstat(descriptor), part.stat()))

    monkeypatch.setattr(artifacts, "_write", write_late)
    fetch = asyncio.create_task(folder.fetch_files(JOB, (an_artifact("clip.mp4"),)))
    await asyncio.wait_for(writes.wait(), 30)
    for _ in range(2):  # a second cancellation, as at the end of the process, changes nothing
        fetch.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not fetch.done()
    may_write.set()
    await asyncio.wait([fetch])
    assert (fetch.cancelled(), targets) == (True, [True])


async def test_a_fetch_replaces_a_longer_part_of_an_earlier_one(folder: ArtifactFolder):
    part = folder.get_folder(JOB.id) / "clip.mp4.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(CLIP * 2)
    assert await fetch_names(folder, an_artifact("clip.mp4")) == ["clip.mp4"]
    assert part.with_suffix("").read_bytes() == CLIP


async def test_a_node_that_sends_more_than_it_reported_is_read_no_further(tmp_path: Path):
    sent: list[bytes] = []

    async def fetch(node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        for _ in range(5):
            sent.append(CLIP)
            yield CLIP

    fault = await ArtifactFolder(tmp_path / "videos", fetch).fetch_files(JOB, (an_artifact("clip.mp4"),))
    assert isinstance(fault, JobFault)
    assert (fault.code, sent) == ("artifact_broken", [CLIP] * 2)


async def test_a_disk_may_take_a_piece_in_parts(folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, piece: write(descriptor, piece[:2]))
    assert await fetch_names(folder, an_artifact("clip.mp4")) == ["clip.mp4"]
    assert (folder.get_folder(JOB.id) / "clip.mp4").read_bytes() == CLIP
