"""Answer the coordinator's fetch requests with the node's log, its measurements, or artifacts of video jobs."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from node.agent.connection import CoordinatorLink
from node.engine_process.supervisor import Supervisor
from node.memory.sensor import measure_footprint
from node.video.lease_manager import LeaseManager
from node.video.lease_store import PREFIX
from wire.frames import FetchChunk, FetchRequest
from wire.histogram import GateMeasures, NodeMeasures

MAX_LINE_BYTES = 1024 * 1024
"""Maximum bytes of a partial first line of a log that are skipped."""
ANSWER_CHUNK_BYTES = 32 * 1024


class FetchAnswers:
    """Sender of this node's answers to fetch requests. `log_file` is the log of the node."""

    def __init__(self, log_file: Path, supervisor: Supervisor, lease_manager: LeaseManager) -> None:
        self._log_file = log_file
        self._supervisor = supervisor
        self._lease_manager = lease_manager

    def answer(self, link: CoordinatorLink, request: FetchRequest) -> None:
        """Send the answer to a fetch request on its link; an error chunk if this node cannot provide the object.

        The requested window of a log or an artifact is sent in the background, and read while it is sent
        (`read_chunks`). Measurements are sent at once, in one chunk.
        """
        if request.source == "logs":
            link.send_background(read_chunks(request, self._log_file, lines=True))
        elif request.source == "metrics":
            link.send(FetchChunk(request.number, msgspec.msgpack.encode(self._read_measures()), last=True))
        elif request.source.startswith(PREFIX) and (artifact := self._lease_manager.find_artifact(request.source)):
            link.send_background(read_chunks(request, artifact))
        else:
            link.send(FetchChunk(request.number, b"", last=True, error=f"this node cannot provide {request.source!r}"))

    def _read_measures(self) -> NodeMeasures:
        report = self._supervisor.reports.latest
        gate = report.measures if report else GateMeasures()
        return NodeMeasures(gate, time.process_time(), measure_footprint((os.getpid(),)) or 0)


def _find_line_start(file: BinaryIO, position: int) -> int:
    """Return the first start of a line at or after `position` of a log.

    Return `position` if no line begins within `MAX_LINE_BYTES` after it.
    """
    if position <= 0:
        return 0
    file.seek(position - 1)
    line = file.readline(MAX_LINE_BYTES)
    start = file.tell()
    return start if line.endswith(b"\n") and file.read(1) else position


def _has_rotated_offset(path: Path, rotated: Path, offset: int) -> bool:
    """Return whether an offset of a log is in its latest rotated file.

    The log itself is then shorter, or is missing during the rotation.
    """
    sizes = [file.stat().st_size if file.exists() else 0 for file in (path, rotated)]
    return sizes[0] < offset <= sizes[1]


def read_chunks(request: FetchRequest, path: Path, *, lines: bool = False) -> Iterator[FetchChunk]:
    """Yield the requested window of a file in chunks, read while they are sent.

    A read error ends the window with an error chunk. The offset and the limit of the request are in bytes. A negative
    offset counts from the end; with `lines`, such a window begins with a whole line. If the offset is beyond the end of
    the file, the window starts at 0. With `lines`, it is instead the rest of the rotated file, if the log was rotated
    since the offset was valid.

    The last chunk has `end`, the offset in bytes after the window, and `next`, the same offset if the file has more
    bytes, else 0. After the rest of a rotated file, `end` is 0.
    """
    try:
        rotated = path.with_name(f"{path.name}.1")
        is_rotated = lines and _has_rotated_offset(path, rotated, request.offset)
        with (rotated if is_rotated else path).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + request.offset) if request.offset < 0 else request.offset
            if lines and request.offset < 0:
                start = _find_line_start(file, start)
            start = 0 if start > size else start
            end = min(size, start + request.limit)
            file.seek(start)
            while start < end and (piece := file.read(min(ANSWER_CHUNK_BYTES, end - start))):
                start += len(piece)
                yield FetchChunk(request.number, piece)
        following = 0 if is_rotated and start == size else start
        yield FetchChunk(request.number, b"", last=True, next=start if start < size else 0, end=following)
    except OSError as error:
        yield FetchChunk(request.number, b"", last=True, error=str(error))
