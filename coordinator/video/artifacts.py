"""Files of finished video jobs: fetched from nodes, verified, stored with mode 0600, and removed.

A file is written under a temporary name. It gets its final name once its size and SHA-256 match the values that its
node has reported. The node keeps the file until the coordinator has acknowledged the end of the lease.
"""

import asyncio
import errno
import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from coordinator.video.state.jobs import JobFault, JobFaultCode, StoredFile, VideoJob
from host.private_files import create_private_folder, sync_descriptor, sync_path
from wire.identity import NodeId
from wire.video import Artifact, LeaseEndCode

log = structlog.get_logger("coordinator.video.artifacts")

VIDEO = "video"
THUMBNAIL = "thumbnail"
SUFFIXES = {
    ".mp4": (VIDEO, "video/mp4"),
    ".webp": (THUMBNAIL, "image/webp"),
    ".jpg": (THUMBNAIL, "image/jpeg"),
    ".png": (THUMBNAIL, "image/png"),
}
"""Kind and media type of a file, by its suffix. Files with any other suffix stay on the node."""
MAX_FILES = 4
"""Maximum files of a job. Further files stay on the node."""
SLACK_BYTES = 16 * 2**20
"""Bytes by which a file may exceed its uncompressed frames, for headers, indexes and sound."""
DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errnos of a disk or quota that has no space left."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}\.[a-z0-9]{2,4}")
_JOB = re.compile(r"video_[A-Za-z0-9]{1,64}")

P = ParamSpec("P")
T = TypeVar("T")

FetchFromNode = Callable[[NodeId, str, int], AsyncIterator[bytes]]
"""Function that yields the newest bytes of a node's source. Arguments: node, name of the source, maximum bytes.

It raises `LookupError` if the node is not linked or cannot answer, and `TimeoutError` if the node stops answering.
"""


class FetchInterrupted(Exception):
    """Raised if a node currently does not answer, or does not have a file. A later fetch may succeed."""


class ArtifactFolder:
    """Folder with the files of all finished jobs, one folder for each job.

    The first file creates `folder`. `fetch` yields the bytes of a node's file.
    """

    def __init__(self, folder: Path, fetch: FetchFromNode) -> None:
        self._folder = folder
        self._fetch_from_node = fetch

    async def fetch_files(self, job: VideoJob, artifacts: tuple[Artifact, ...]) -> tuple[StoredFile, ...] | JobFault:
        """Fetch the files of a job from its node and store them. Return their records, or the fault.

        Files after the first `MAX_FILES`, files with unusable names and empty files are ignored. The result is a fault
        if files are invalid or cannot be stored, or if none is a video. Files that are already stored are then removed.
        Raise `FetchInterrupted` if the node currently does not answer, and `ValueError` for an invalid job id.
        """
        wanted = [file for file in artifacts[:MAX_FILES] if self._is_usable(file)]
        for artifact in wanted:
            most = compute_max_bytes(job, get_kind(artifact.name))
            if artifact.size > most:
                return JobFault(
                    LeaseEndCode.OUTPUT_INVALID,
                    f"{artifact.name} has {artifact.size} bytes, this job makes {most} at most",
                )
        if not any(get_kind(file.name) == VIDEO for file in wanted):
            return JobFault(LeaseEndCode.OUTPUT_INVALID, "its node has made no video that can be read here")
        stored: list[StoredFile] = []
        for artifact in wanted:
            fetched = await self._fetch_file(job, artifact)
            if isinstance(fetched, JobFault):
                await self.remove_files(job.id)
                return fetched
            stored.append(fetched)
        return tuple(stored)

    def _is_usable(self, artifact: Artifact) -> bool:
        return bool(_NAME.fullmatch(artifact.name)) and get_kind(artifact.name) != "" and artifact.size > 0

    async def _fetch_file(self, job: VideoJob, artifact: Artifact) -> StoredFile | JobFault:
        folder = self.get_folder(job.id)
        beside = folder / f"{artifact.name}.part"
        try:
            await _call_in_thread(create_private_folder, folder)
            digest, size = await self._download(job, artifact, beside)
            if (digest, size) != (artifact.sha256, artifact.size):
                log.error("artifact broken", job=job.id, name=artifact.name, size=size, reported=artifact.size)
                return JobFault(
                    JobFaultCode.ARTIFACT_BROKEN,
                    f"{artifact.name} came with {size} of {artifact.size} bytes, or a wrong checksum",
                )
            await _call_in_thread(_publish_file, beside, folder / artifact.name)
        except OSError as error:
            log.exception("artifact not stored", job=job.id, name=artifact.name)
            full = error.errno in DISK_FULL_ERRORS
            text = "the disk of the coordinator is full" if full else f"the coordinator cannot write: {error.strerror}"
            return JobFault(
                JobFaultCode.STORAGE_FULL if full else JobFaultCode.STORAGE_FAILED,
                f"{artifact.name} could not be stored: {text}",
            )
        return StoredFile(artifact.name, artifact.size, artifact.sha256.hex())

    async def _download(self, job: VideoJob, artifact: Artifact, beside: Path) -> tuple[bytes, int]:
        digest, size = hashlib.sha256(), 0
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            async for piece in self._fetch_from_node(
                NodeId(job.node), f"artifact:{job.lease}/{artifact.name}", artifact.size
            ):
                size += len(piece)
                if size > artifact.size:
                    break
                digest.update(piece)
                await _call_in_thread(_write, descriptor, piece)
            await _call_in_thread(sync_descriptor, descriptor)
        except (LookupError, TimeoutError) as error:
            raise FetchInterrupted(str(error) or "it stopped answering") from None
        finally:
            os.close(descriptor)
        return digest.digest(), size

    async def remove_files(self, job: str) -> None:
        """Remove all files of a job. Ignore an unknown or invalid id, and files that cannot be removed."""
        if _JOB.fullmatch(job):
            await asyncio.to_thread(shutil.rmtree, self.get_folder(job), ignore_errors=True)

    def get_folder(self, job: str) -> Path:
        """Return the folder of a job's files. Raise `ValueError` for an invalid job id."""
        if not _JOB.fullmatch(job):
            raise ValueError(f"{job!r} is no job")
        return self._folder / job

    def find_file(self, job: VideoJob, kind: str) -> tuple[Path, StoredFile] | None:
        """Return path and record of a job's file of a kind (`VIDEO` or `THUMBNAIL`); None if the job has none.

        Raise `ValueError` for an invalid job id.
        """
        file = next((file for file in job.files if get_kind(file.name) == kind), None)
        return None if file is None else (self.get_folder(job.id) / file.name, file)

    def remove_unknown(self, known: set[str]) -> None:
        """Remove the files of jobs whose ids are not in `known`, because a crash may leave such files.

        An `OSError` is ignored.
        """
        with suppress(OSError):
            for folder in self._folder.iterdir():
                if folder.name not in known and _JOB.fullmatch(folder.name):
                    shutil.rmtree(folder, ignore_errors=True)


def compute_max_bytes(job: VideoJob, kind: str) -> int:
    """Return the maximum size, in bytes, of a job's file of a kind (`VIDEO` or `THUMBNAIL`).

    That is the size of its frames without compression (one frame for a thumbnail), plus `SLACK_BYTES`.
    """
    wanted = job.wanted
    return wanted.width * wanted.height * 3 * (wanted.frames if kind == VIDEO else 1) + SLACK_BYTES


def get_kind(name: str) -> str:
    """Return the kind of a file (`VIDEO` or `THUMBNAIL`) by its suffix; empty for a file that is not kept."""
    return SUFFIXES.get(Path(name).suffix, ("", ""))[0]


def get_media_type(name: str) -> str:
    """Return the media type of a file by its suffix. Raise `KeyError` for a suffix that is not in `SUFFIXES`."""
    return SUFFIXES[Path(name).suffix][1]


async def _call_in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread, and wait for its end also if the caller is cancelled.

    Otherwise the call could write to a closed descriptor, whose number another file has by then.
    """
    call = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([call])
        raise


def _write(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def _publish_file(beside: Path, path: Path) -> None:
    beside.replace(path)
    sync_path(path.parent)
