"""A video node from the coordinator's side: a peer on the real link that answers leases by a script.

The peer holds the state of a node: leases with generations, ended leases until they are acknowledged, and files. It
reports that state and answers `FetchRequest` for files in windows, as an agent does. There is no Ray: a granted lease
begins at once, or with `refuses` ends because its actor could not be started.
"""

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from node.agent.identity import NodeIdentity
from tests.support.cluster.cluster_port import Ended, Line, Port, a_report
from tests.support.cluster.loopback_cluster import a_memory
from wire.frames import (
    AllowVideo,
    FetchChunk,
    FetchRequest,
    Frame,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRelease,
    LeaseRequest,
)
from wire.units import GIB
from wire.video import Artifact, LeaseState, VideoPackage, VideoState

WAN = VideoPackage("wan", engine="0.18.14", bits=8, expert=int(14.35 * GIB), weights=40 * GIB)
CLIP = bytes(range(256)) * 5000
PIECE = 32 * 1024
PICTURE = b"RIFF....WEBPVP8 picture"


def artifacts_of(files: dict[str, bytes]) -> tuple[Artifact, ...]:
    return tuple(Artifact(name, len(data), hashlib.sha256(data).digest()) for name, data in files.items())


@dataclass
class VideoPeer:
    """One Mac.

    `permitted`: An administrator allows videos on this node.
    `allowed`: The node has received that permission.
    `refusal`: The answer to requests for leases; None grants them.
    `muted`: Requests for leases get no answer.
    `starts`: A granted lease gets its worker.
    `refuses`: The reason why the actor cannot be started.
    `plays`: The worker finishes.
    `files`: The files of a job.
    `told`: Replaces `files` in the description that the node sends, if set.
    """

    port: Port
    name: str
    plays: bool = True
    muted: bool = False
    starts: bool = True
    refuses: str = ""
    refusal: LeaseRefused | None = None
    room: int = 80 * GIB
    package: VideoPackage = WAN
    files: dict[str, bytes] = field(default_factory=lambda: {"video.mp4": CLIP, "thumbnail.webp": PICTURE})
    told: dict[str, bytes] | None = None
    video: dict[str, Any] = field(default_factory=dict)
    report_changes: dict[str, Any] = field(default_factory=dict)
    leases: dict[str, LeaseState] = field(default_factory=dict)
    ended: dict[str, LeaseEnded] = field(default_factory=dict)
    heard: list[Frame] = field(default_factory=list)
    who: NodeIdentity | None = None
    permitted: bool = True
    allowed: bool = False
    line: Line | None = None
    task: asyncio.Task[None] | None = None

    async def link(self) -> None:
        """Join once, link, and answer from then on."""
        if self.who is None:
            self.who = self.port.member(self.name)
            self.port.application.nodes.administration.set_video_allowed(self.who.node, on=self.permitted)
        self.line = await self.port.link(self.who, self.report())
        for ended in self.ended.values():
            self.line.send(ended)
        self.task = asyncio.create_task(self._serve(self.line))
        who = self.who
        await self.port.until(lambda: self.port.state(who) == "ready")

    async def cut(self) -> None:
        """End the link."""
        assert self.line is not None
        assert self.task is not None
        who = self.who
        assert who is not None
        self.line.close()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.port.until(lambda: self.port.state(who) != "ready")

    def report(self) -> Any:
        video = VideoState(
            True, "", f"ray-{self.name}", (self.package,), tuple(self.leases.values()), allowed=self.allowed
        )
        lent = sum(lease.size for lease in self.leases.values())
        memory = a_memory(self.room - lent, 128 * GIB, leases=lent)
        changes: dict[str, Any] = {"memory": memory, "video": replace(video, **self.video)} | self.report_changes
        return a_report(**changes)

    def say(self, *frames: Frame) -> None:
        assert self.line is not None
        self.line.send(*frames)

    async def _serve(self, line: Line) -> None:
        beating = asyncio.create_task(self._beat(line))
        try:
            while True:
                frame = await line.next(3600)
                self.heard.append(frame)
                self._hear(frame)
        except Ended:
            return
        finally:
            beating.cancel()

    async def _beat(self, line: Line) -> None:
        while True:
            await asyncio.sleep(0.05)
            line.send(self.report())

    def _hear(self, frame: Frame) -> None:
        match frame:
            case LeaseRequest() if not self.muted:
                self._lease(frame)
            case LeaseRelease():
                self._release(frame)
            case FetchRequest():
                self._ask(frame)
            case AllowVideo(allowed):
                self.allowed = allowed
            case _:
                pass

    def _lease(self, frame: LeaseRequest) -> None:
        if self.refusal is not None:
            self.say(replace(self.refusal, lease=frame.lease, generation=frame.generation))
            return
        self.leases[frame.lease] = LeaseState(frame.lease, frame.generation, frame.job, frame.size, "granted")
        self.say(LeaseGranted(frame.lease, frame.generation, "/leases"))
        if self.refuses:
            self.finish(frame.lease, "start_failed", self.refuses)
        elif self.starts:
            self.begin(frame.lease)

    def begin(self, lease: str) -> None:
        """Start the worker of a lease."""
        self.progress(lease, "denoising", 10)
        if self.plays:
            self.finish(lease)

    def progress(self, lease: str, phase: str, progress: int, **more: Any) -> None:
        self.leases[lease] = replace(self.leases[lease], phase=phase, progress=progress, **more)
        self.say(self.report())

    def finish(self, lease: str, code: str = "completed", message: str = "", peak: int = 20 * GIB) -> None:
        """End the worker of a lease and release its memory."""
        state = self.leases[lease] = replace(self.leases[lease], phase="ended", size=0)
        files = artifacts_of(self.told or self.files) if code == "completed" else ()
        ended = self.ended[lease] = LeaseEnded(
            lease, state.generation, code, message, files, peak, 3.0, b'{"frames":49}' if files else b""
        )
        self.say(ended, self.report())

    def _release(self, frame: LeaseRelease) -> None:
        if frame.cause == "acknowledged":
            self.ended.pop(frame.lease, None)
            self.leases.pop(frame.lease, None)
        elif frame.lease in self.leases and frame.lease not in self.ended:
            self.finish(frame.lease, frame.cause)

    def _ask(self, frame: FetchRequest) -> None:
        name = frame.source.rpartition("/")[2]
        data = self.files.get(name)
        if data is None:
            self.say(FetchChunk(frame.number, b"", True, "there is no such file"))
            return
        begin = frame.offset if frame.offset >= 0 else max(0, len(data) + frame.offset)
        end = min(len(data), begin + frame.limit)
        for at in range(begin, end, PIECE):
            self.say(FetchChunk(frame.number, data[at : min(end, at + PIECE)]))
        self.say(FetchChunk(frame.number, b"", True, next=end if end < len(data) else 0))

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the received frames of a kind."""
        return [frame for frame in self.heard if isinstance(frame, kind)]
