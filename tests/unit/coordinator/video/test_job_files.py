"""Fetches and removals of the files of finished jobs in the background: results, retries, and their cancellation."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.video import job_files
from coordinator.video.artifacts import ArtifactFolder
from coordinator.video.job_files import JobFiles
from coordinator.video.state.events import FilesFetched, FilesLost
from tests.unit.coordinator.video.test_artifacts import CLIP, JOB, an_artifact
from wire.identity import NodeId

CLIPS = (an_artifact("clip.mp4"),)


class Node:
    """A node that has the clip: it fails `failures` times, and answers only while `answers` is set."""

    def __init__(self) -> None:
        self.failures, self.asked = 0, 0
        self.answers, self.begun = asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def fetch(self, node: NodeId, source: str, max_bytes: int) -> AsyncGenerator[bytes]:
        self.asked += 1
        self.begun.set()
        await self.answers.wait()
        if self.failures:
            self.failures -= 1
            raise LookupError("the node is not linked")
        yield CLIP


class Fetching:
    """Files of jobs, the node that has them, and the results."""

    def __init__(self, folder: Path) -> None:
        self.node, self.results = Node(), asyncio.Queue[FilesFetched | FilesLost]()
        self.artifacts = ArtifactFolder(folder, self.node.fetch)
        self.files = JobFiles(self.artifacts, self.results.put_nowait)

    async def next(self) -> FilesFetched | FilesLost:
        return await asyncio.wait_for(self.results.get(), 20)


@pytest.fixture
async def fetching(tmp_path: Path) -> Fetching:
    return Fetching(tmp_path)


async def test_files_are_fetched_once_for_their_generation_and_again_after_the_end(fetching: Fetching):
    job = replace(JOB, generation=3)
    fetching.node.answers.clear()
    for _ in range(2):
        fetching.files.start_fetch(job, CLIPS)
    await fetching.node.begun.wait()
    fetching.node.answers.set()
    fetched = await fetching.next()
    assert isinstance(fetched, FilesFetched)
    assert (fetched.job, fetched.generation, [file.name for file in fetched.files]) == (JOB.id, 3, ["clip.mp4"])
    assert (fetching.results.empty(), fetching.node.asked) == (True, 1)
    await asyncio.sleep(0)
    fetching.files.start_fetch(job, CLIPS)
    assert await fetching.next() == fetched
    await fetching.files.close()


async def test_an_interrupted_fetch_is_repeated_after_a_pause(fetching: Fetching, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_files, "RETRY_SECONDS", 0.01)
    fetching.node.failures = 2
    began = asyncio.get_running_loop().time()
    fetching.files.start_fetch(JOB, CLIPS)
    assert isinstance(await fetching.next(), FilesFetched)
    assert fetching.node.asked == 3
    assert asyncio.get_running_loop().time() - began >= 0.019


async def test_files_that_cannot_be_used_are_lost_with_the_reason(fetching: Fetching):
    fetching.files.start_fetch(replace(JOB, generation=2), (an_artifact("clip.mp4", b"another clip"),))
    lost = await fetching.next()
    assert isinstance(lost, FilesLost)
    assert (lost.job, lost.generation, lost.fault.code) == (JOB.id, 2, "artifact_broken")
    assert fetching.node.asked == 1


async def test_a_removal_ends_the_fetch_and_deletes_the_files(fetching: Fetching):
    fetching.files.start_fetch(JOB, CLIPS)
    await fetching.next()
    assert fetching.artifacts.get_folder(JOB.id).exists()
    fetching.node.answers.clear()
    fetching.node.begun.clear()
    await asyncio.sleep(0)
    before = asyncio.all_tasks()
    fetching.files.start_fetch(JOB, CLIPS)
    await fetching.node.begun.wait()
    fetching.files.start_removal(JOB.id)
    await asyncio.wait_for(asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True), 20)
    assert not fetching.artifacts.get_folder(JOB.id).exists()
    assert fetching.results.empty()


async def test_close_ends_fetches_and_removals(fetching: Fetching):
    before = asyncio.all_tasks()
    fetching.node.answers.clear()
    fetching.files.start_fetch(JOB, CLIPS)
    await fetching.node.begun.wait()
    fetching.files.start_removal("video_2")
    await asyncio.wait_for(fetching.files.close(), 20)
    assert asyncio.all_tasks() <= before
    assert fetching.results.empty()
