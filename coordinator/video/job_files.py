"""Files of finished jobs: fetched from their nodes and removed in the background."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from coordinator.video.artifacts import ArtifactFolder, FetchInterrupted
from coordinator.video.state.events import FilesFetched, FilesLost
from coordinator.video.state.jobs import JobFault, VideoJob
from wire.video import Artifact

log = structlog.get_logger("coordinator.video")
RETRY_SECONDS = 2.0
"""Seconds before a fetch from a node that did not answer is repeated, and a lease request to an unlinked node."""


class JobFiles:
    """Fetches and removals of files in progress. `on_result` is called with the result of each fetch.

    An interrupted fetch is repeated until `start_removal` cancels it.
    """

    def __init__(
        self,
        artifacts: ArtifactFolder,
        on_result: Callable[[FilesFetched | FilesLost], None],
    ) -> None:
        self._artifacts = artifacts
        self._on_result = on_result
        self._loop = asyncio.get_running_loop()
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._removing: set[asyncio.Task[Any]] = set()

    def start_fetch(self, job: VideoJob, artifacts: tuple[Artifact, ...]) -> None:
        """Start to fetch the files of a job in the background, unless a fetch is in progress."""
        if job.id not in self._fetching:
            task = self._fetching[job.id] = self._loop.create_task(self._fetch(job, artifacts))
            task.add_done_callback(lambda _: self._fetching.pop(job.id, None))

    def start_removal(self, job: str) -> None:
        """Start to remove the files of a job in the background. Cancel their fetch."""
        task = self._loop.create_task(self._remove(job))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def close(self) -> None:
        """Cancel all fetches and removals, and wait until they have ended."""
        tasks = [*self._fetching.values(), *self._removing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, job: VideoJob, artifacts: tuple[Artifact, ...]) -> None:
        while True:
            try:
                result = await self._artifacts.fetch_files(job, artifacts)
                break
            except FetchInterrupted as interrupted:
                log.warning("artifacts interrupted", job=job.id, node=job.node, why=str(interrupted))
            await asyncio.sleep(RETRY_SECONDS)
        if isinstance(result, JobFault):
            self._on_result(FilesLost(job.id, job.generation, result))
        else:
            self._on_result(FilesFetched(job.id, job.generation, result))

    async def _remove(self, job: str) -> None:
        fetching = self._fetching.get(job)
        if fetching is not None and not fetching.done():
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        await self._artifacts.remove_files(job)
