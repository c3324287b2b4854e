"""Ray on the coordinator's side: head and broker while somebody offers videos, and what nodes are told of them.

Nothing runs until a node that is ready has a package that it can use, and everything ends some time after the last one
has gone. Chat never waits for any of it.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from coordinator.video.head import Facts, Head, environment, missing, names
from coordinator.video.ray_tls import LOOPBACK
from coordinator.video.settings import VideoSettings
from coordinator.video.spoken import Connect, Create, Created, Ear, FromBroker, Kill, NotCreated, SpeechError, Up, said
from machine.private import private_folder
from machine.ray_process import BACK_OFF, HEALTHY
from router.view import ClusterView, NodeView
from wire.frames import Frame, RayHead
from wire.identity import NodeId
from wire.units import GIB

log = structlog.get_logger("coordinator.ray")

LINGER = 60.0
"""Seconds that Ray goes on when nobody offers videos any more: a Mac may come back."""
GRACE = 2.0


class Told(Protocol):
    """How nodes are reached."""

    def send(self, node: NodeId, frame: Frame) -> bool:
        """Send a frame; False when the node is not linked."""
        ...

    def address(self, node: NodeId) -> str:
        """Give the address from which a node dialed; empty when it is not linked."""
        ...


class Rays:
    """See the module. `host` gives this machine's address as nodes know it; `failed` hears of a lease whose actor could
    not be started, and why."""

    def __init__(
        self, state: Path, settings: VideoSettings, host: Callable[[], str], links: Told,
        failed: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._head = Head(state, settings, host, self._head_changed)
        self._settings = settings
        self._links = links
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._broker: Broker | None = None
        self._running = False
        self._linger: asyncio.TimerHandle | None = None
        self._told: dict[NodeId, tuple[int, Facts, str]] = {}
        self._view = ClusterView()
        self._ending: asyncio.Task[None] | None = None

    @property
    def cause(self) -> str:
        """Why no actor can be started; empty when one can, or will be able to soon."""
        return missing()

    # -- what is wanted ---------------------------------------------------------------------

    def see(self, view: ClusterView) -> None:
        """Take the newest picture of the cluster."""
        self._view = view
        wanted = [node for node in view.nodes if _offers(node)]
        if wanted and self._settings.enabled and not missing():
            self._begin()
        elif self._running and self._linger is None:
            self._linger = self._loop.call_later(LINGER, self._finish)
        if self._running:
            self._tell(wanted)

    def _begin(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if not self._running and self._ending is None:
            log.info("ray wanted")
            self._running = True
            self._head.start()

    def _finish(self) -> None:
        self._linger = None
        log.info("ray not wanted")
        self._ending = self._loop.create_task(self._ended())

    async def _ended(self) -> None:
        for node in list(self._told):
            self._links.send(node, RayHead(""))
        await self.close()
        self._ending = None

    async def close(self) -> None:
        """End broker and head."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._running = False
        self._told.clear()
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.close()
        await self._head.stop()

    # -- the head ---------------------------------------------------------------------------

    def _head_changed(self) -> None:
        """The head is up, or another one, or gone."""
        facts = self._head.facts
        if facts is None or self._head.cause or not self._running:
            return
        if self._broker is None:
            self._broker = Broker(self._head, self._failed)
            self._broker.start()
        else:
            self._broker.renew()  # it drove through a raylet that went with the head before
        self._tell([node for node in self._view.nodes if _offers(node)])

    def _tell(self, nodes: list[NodeView]) -> None:
        """Tell each node once over each of its links how to take part."""
        facts = self._head.facts
        if facts is None:
            return
        for node in nodes:
            host = self._links.address(node.id)
            host = facts.host if host in LOOPBACK else host
            if host and self._told.get(node.id) != (node.epoch, facts, host):
                self._told[node.id] = (node.epoch, facts, host)
                self._links.send(node.id, self._frame(facts, host))

    def _frame(self, facts: Facts, host: str) -> RayHead:
        authority = self._head.authority
        if authority is None:
            return RayHead(facts.address, facts.token, host, version=facts.version)
        papers = authority.papers(names(host))
        return RayHead(facts.address, facts.token, host, papers.authority, papers.certificate, papers.key,
                       facts.version)  # fmt: skip

    def forget(self, node: NodeId) -> None:
        """A node is no member any more."""
        self._told.pop(node, None)

    # -- actors -----------------------------------------------------------------------------

    def start(self, lease: str, generation: int, ray: str, folder: str, size: int) -> None:
        """Start the actor of a lease on a node of Ray's."""
        if self._broker is None:
            self._failed(lease, "Ray's head is not up")
            return
        self._broker.create(Create(lease, generation, ray, folder, size / GIB, self._settings.start_seconds))

    def stop(self, lease: str) -> None:
        """End the actor of a lease, if there is one."""
        if self._broker is not None:
            self._broker.kill(lease)


def _offers(node: NodeView) -> bool:
    return (
        node.state in ("ready", "draining", "paused")
        and node.video.ready
        and any(not one.cause for one in node.video.packages)
    )


class Broker:
    """The broker's process, kept alive. What was asked and not answered is asked of the next one."""

    def __init__(self, head: Head, failed: Callable[[str, str], None]) -> None:
        self._head = head
        self._failed = failed
        self._writer: asyncio.StreamWriter | None = None
        self._pending: dict[str, Create] = {}
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    def start(self) -> None:
        """Begin to keep it alive."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def renew(self) -> None:
        """Have another one in its place."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def create(self, wanted: Create) -> None:
        """Have an actor started, now or as soon as there is a broker."""
        self._pending[wanted.lease] = wanted
        if self._writer is not None:
            self._writer.write(said(wanted))

    def kill(self, lease: str) -> None:
        """Have an actor ended; without a broker it ends with its lease, by its node."""
        self._pending.pop(lease, None)
        if self._writer is not None:
            self._writer.write(said(Kill(lease)))

    async def _keep(self) -> None:
        wait, loop = BACK_OFF[0], asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                code = await self._live()
            except (OSError, SpeechError) as error:
                code = str(error)
            wait = BACK_OFF[0] if loop.time() - began > HEALTHY else wait
            log.warning("broker ended", code=code, again_in=wait)
            await asyncio.sleep(wait)
            wait = min(2 * wait, BACK_OFF[1])

    async def _live(self) -> int:
        """Run one broker from start to end; give its exit code."""
        facts = self._head.facts
        if facts is None:
            raise OSError("Ray's head is not up")
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "coordinator.video.broker", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                cwd=private_folder(self._head.files / "empty"), start_new_session=True,
                env=environment(self._head.files, os.environ, tls=self._head.authority is not None),
            )  # fmt: skip
        self._process = process
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(said(Connect(facts.address, facts.host)))
            await self._hear(reader, writer)
            async with asyncio.timeout(GRACE):
                return await process.wait()
        except TimeoutError:
            return 0
        finally:
            self._writer = self._process = None
            writer.close()
            await _end(process)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ear = Ear(FromBroker)
        while data := await reader.read(65536):
            for one in ear.feed(data):
                self._take(one, writer)

    def _take(self, one: FromBroker, writer: asyncio.StreamWriter) -> None:
        match one:
            case Up():
                log.info("broker up")
                self._writer = writer
                for wanted in self._pending.values():
                    writer.write(said(wanted))
            case Created(lease):
                self._pending.pop(lease, None)
            case NotCreated(lease, message):
                if self._pending.pop(lease, None) is not None:
                    self._failed(lease, message)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a broker that has not gone by itself when its socket ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
