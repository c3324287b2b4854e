"""The agent: this Mac's long-lived loop to the coordinator.

Covers: staying connected for ever (remembered addresses, then Bonjour by cluster id, jittered back-off), reports,
handing requests to the engine and its frames back, certificate renewal by a second link, a clean goodbye.
Does not cover: the engine's process (`supervise`), limits and readings (`memory`), enrolment (`enrol`).

Rules
- A request belongs to the link it came on. When that link ends the request is cancelled, and nothing of it is ever
  sent on another link, so the coordinator may place it elsewhere without hearing two answers.
- The end of a link never unloads a model.
- Of two coordinators of our cluster that of the higher generation counts: we stay with no other once we have seen it.
- While its owner wants the Mac for himself (`sharing`) nothing is taken that begins anything, whoever asks for it.
- A renewed certificate opens a second link that takes over; the first is closed when its last request is done.
"""

import asyncio
import os
import random
import ssl
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog
from msgspec.structs import replace

from node.agent import discovery
from node.agent.connection import Link, dial
from node.agent.identity import Identity, client_context, follow, install, needs_renewal, new_csr, outgrow, remember
from node.engine_process.supervisor import STOPPED, Supervisor
from node.memory.limits import Limiter
from node.memory.poll import Poll
from node.memory.sensor import footprint_of
from node.memory.timer import Alarm
from node.settings import NodeSettings
from node.sharing.controller import Sharer
from node.sharing.policy import Act, Holds, Standing
from node.video.lease_manager import PREFIX, Lender
from node.video.ray.local_ray import LocalRay
from wire.bounds import MAX_MODELS
from wire.codec import MAX_REPORT_BYTES, decode, encode, head_of
from wire.frames import (
    TAGS,
    Admitted,
    AllowVideo,
    Answer,
    Ask,
    Cancel,
    Count,
    Deltas,
    Denied,
    Failed,
    Finished,
    Frame,
    Generate,
    Goodbye,
    Hello,
    Lease,
    Load,
    Pause,
    Ping,
    Profile,
    RayHead,
    Refusal,
    Release,
    Renew,
    Renewed,
    Report,
    Unload,
    Welcome,
)
from wire.histogram import GateMeasures, NodeMeasures
from wire.identity import PROTOCOL
from wire.refusals import Code, Refused
from wire.report import Enforcement, Hardware, Memory, Model, Sharing, System
from wire.video import VideoState

SILENCE = 10.0
"""Seconds without a frame after which the link is given up."""
BACK_OFF = (0.5, 30.0)
"""First and longest wait between two rounds of dialling, in seconds; each is jittered by half."""
SLUMBER_SECONDS = 60.0
"""Seconds awake after which the coordinator is dialled again though nobody told of a wake: the sleep was called off."""
GOODBYE_SECONDS = 0.2
"""For a goodbye to leave this machine before it sleeps."""
CHANGE_GAP = 0.2
"""Least seconds between two reports that are sent because something changed."""
MAX_LINE_BYTES = 1024 * 1024
"""Length up to which a log's first line that is cut is left out."""
ANSWER_PIECE = 32 * 1024
FIND_SECONDS = 3.0
"""How long Bonjour is asked for a coordinator whose address changed."""
OUTGROWN_SECONDS = 30.0
"""For how long an address is left alone at which a coordinator is that the cluster has left behind."""
SUPERSEDED = "superseded"
"""The reason of a coordinator that learned from our Hello that it is not the cluster's any more."""

log = structlog.get_logger("node.agent.agent")


class Expelled(Exception):
    """The coordinator will not have this node; the text says why and what a person can do."""

    def __init__(self, denied: Denied) -> None:
        super().__init__(denied.message)
        self.reason = denied.reason


class Agent:
    """Owns the links of this node. `run` ends after `stop`, or raises Expelled."""

    def __init__(
        self, identity: Identity, settings: NodeSettings, version: str, hardware: Hardware, log_file: Path
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._version = version
        self._hardware = hardware
        self._log_file = log_file
        self._instance = uuid.uuid4().hex
        self._link: Link | None = None
        self._links: set[Link] = set()
        self._context = client_context(identity)
        self._sequence = 0
        self._ping = 0
        self._reported_at = 0.0
        self._told: tuple[object, ...] = ()
        self._next_report = Alarm(self.report)
        self._models: tuple[Model, ...] = ()
        self._draining = False
        self._outgrown: dict[str, float] = {}
        self._expelled: Denied | None = None
        self._retry_after = 0.0
        self._woken = asyncio.Event()
        self._stopped = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._renewing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.supervisor: Supervisor | None = None
        self.limiter: Limiter | None = None
        self.poll: Poll | None = None
        self.lender: Lender | None = None
        self.ray: LocalRay | None = None
        self.sharer: Sharer | None = None
        self.on_sharing: Callable[[str], None] = lambda why: None
        """Called with the reason when this node stops sharing, and with an empty text when it shares again."""
        self.welcomed = asyncio.Event()
        self.on_ready: Callable[[str], None] = lambda address: None
        """Called with the coordinator's address whenever this node is linked and its engine is up."""

    # -- staying connected ---------------------------------------------------

    async def run(self) -> None:
        """Stay connected until `stop`. Raises Expelled when the coordinator says no for good."""
        wait = BACK_OFF[0]
        while not self._stopped.is_set():
            link = await self._connect_unless_stopped()
            if link is not None:
                wait = BACK_OFF[0]
                await self._until_lost(link)
            if self._expelled is not None:
                raise Expelled(self._expelled)
            if not self._awake.is_set():
                await self._slumber()
                wait = BACK_OFF[0]
                continue
            if not self._stopped.is_set():
                await self._pause(max(self._retry_after, wait * random.uniform(0.5, 1.5)))  # noqa: S311
                wait, self._retry_after = min(wait * 2, BACK_OFF[1]), 0.0

    async def _connect_unless_stopped(self) -> Link | None:
        """Connect; a coordinator that cannot be reached does not hold up `stop`."""
        connecting = asyncio.ensure_future(self._connect(takeover=False))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({connecting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return await connecting if connecting.done() else None
        finally:
            connecting.cancel()
            stopped.cancel()
            await asyncio.gather(connecting, stopped, return_exceptions=True)

    async def _slumber(self) -> None:
        """Dial nobody while the machine sleeps; a sleep that never came ends by itself."""
        stopped, awake = (asyncio.ensure_future(one.wait()) for one in (self._stopped, self._awake))
        try:
            await asyncio.wait({stopped, awake}, timeout=SLUMBER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._awake.set()
            for one in (stopped, awake):
                one.cancel()
            await asyncio.gather(stopped, awake, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next round of dialling; only `stop` cuts it short, for a link may end again and again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _connect(self, *, takeover: bool) -> Link | None:
        now = asyncio.get_running_loop().time()
        besides = {address for address, at in self._outgrown.items() if now - at < OUTGROWN_SECONDS}
        last = next((address for address in self._identity.addresses if address not in besides), None)
        for address in (last, None):
            where = address or await discovery.locate(self._identity, FIND_SECONDS, besides=besides)
            if where is None or self._stopped.is_set():
                return None
            try:
                link = await dial(where, self._context, self._new_link)
            except (OSError, ssl.SSLError, TimeoutError) as error:
                log.info("dial failed", address=where, error=str(error) or type(error).__name__)
                continue
            self._identity = remember(self._identity, where)
            link.address = where
            self._links.add(link)
            link.send(self._hello(takeover))
            return link
        return None

    def _new_link(self) -> Link:
        return Link(self._identity.cluster, self._received, self._lost)

    def _hello(self, takeover: bool) -> Hello:
        identity = self._identity
        return Hello(
            PROTOCOL, identity.node, identity.name, self._instance, identity.machine, self._version, self._hardware,
            takeover, identity.generation, identity.seal,
        )  # fmt: skip

    async def _until_lost(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        while link.open and not self._stopped.is_set():
            silent = loop.time() - link.heard_at
            if silent >= SILENCE:
                link.abort(f"the coordinator was silent for {silent:.0f} s")
                return
            self._woken.clear()
            await self._sleep(SILENCE - silent)
            link = self._link or link
            self._renew_if_due()

    def _lost(self, link: Link, reason: str) -> None:
        self._links.discard(link)
        for request in link.requests:
            self._to_engine(Cancel(request))
        if link is self._link:
            self._link = None
            if self._stopped.is_set():
                log.info("link ended", reason=reason, cancelled=len(link.requests))  # as it should: we said goodbye
            else:
                log.warning("link lost", reason=reason, cancelled=len(link.requests))
        elif self._link is not None:
            for request in link.requests:
                self._link.send(Failed(request, "link_lost", "the older of two links to the node was lost"))
        self._woken.set()

    def fall_asleep(self, said: Callable[[], None]) -> None:
        """Say goodbye because this machine goes to sleep; `said` is called once that is on its way. What runs here goes
        on elsewhere, and nobody is alarmed."""
        self._awake.clear()
        if self._link is not None:
            self._link.send(Goodbye("asleep"))
        for link in tuple(self._links):
            link.close()
        self._woken.set()
        asyncio.get_running_loop().call_later(GOODBYE_SECONDS, said)

    def wake_up(self, slept: float) -> None:
        """Dial at once after so many seconds of sleep: what a link from before it would say is no longer true."""
        for link in tuple(self._links):
            link.abort(f"this machine slept for {slept:.0f} s")
        self._awake.set()
        self._woken.set()

    # -- frames from the coordinator ------------------------------------------

    def _received(self, link: Link, tag: int, body: bytes) -> None:
        kind = TAGS.get(tag)
        if kind in (Generate, Load, Unload, Profile, Count):
            self._take(link, tag, body)
        else:
            self._act(link, decode(tag, body))

    def _take(self, link: Link, tag: int, body: bytes) -> None:
        assert self.supervisor is not None  # noqa: S101  set before the first link
        request = head_of(body)
        if self._paused and TAGS[tag] is not Unload:
            link.send(Refusal(request, self._not_now()))
            return
        link.requests.add(request)
        encoded = (len(body) + 1).to_bytes(4, "big") + bytes((tag,)) + body
        self.supervisor.send(encoded, TAGS[tag], request)

    def _act(self, link: Link, frame: Frame) -> None:
        match frame:
            case Cancel():
                for each in self._links:
                    each.requests.discard(frame.request)
                self._to_engine(frame)
                if self._draining:
                    self._woken.set()
            case Ping():
                self._ping = frame.nonce
                if asyncio.get_running_loop().time() - self._reported_at > self._settings.node.report_idle / 2:
                    self.report()
            case Welcome():
                self._welcomed(link, frame)
            case Denied():
                self._denied(link, frame)
            case Ask():
                self._answer(link, frame)
            case Lease() | Release() | AllowVideo():
                self._lend(frame)
            case RayHead():
                pass
            case Pause():
                self._obey(frame)
            case Renewed():
                self._spawn(self._take_over(frame))
            case _:
                link.abort(f"the coordinator sent {type(frame).__name__}, which only nodes send")

    def _obey(self, order: Pause) -> None:
        if self.sharer is not None:
            self.sharer.obey(order)
            self.report()

    def _lend(self, frame: Lease | Release | AllowVideo) -> None:
        """Hand on what is about video."""
        assert self.lender is not None  # noqa: S101  set before the first link
        assert self.ray is not None  # noqa: S101  set with it
        match frame:
            case Lease():
                self.lender.ask(frame)
            case Release():
                self.lender.release(frame)
            case AllowVideo():
                self.ray.allow(on=frame.allowed)

    def _welcomed(self, link: Link, welcome: Welcome) -> None:
        if welcome.generation < self._identity.generation:
            self._outgrow(link)
            return
        self._identity = follow(self._identity, welcome.generation, welcome.seal)
        older, self._link = self._link, link
        for address in reversed((link.address, *welcome.addresses)):
            self._identity = remember(self._identity, address)
        log.info("linked", cluster=welcome.cluster_name, epoch=welcome.epoch, skew=round(time.time() - welcome.time, 3))
        if older is not None:
            self._retire(older)
        self._renewing = False
        self.welcomed.set()
        self.report()
        if self.lender is not None:
            self.lender.linked()
        self._tell_ready()

    def _retire(self, link: Link) -> None:
        if not link.requests:
            link.close()

    def _outgrow(self, link: Link) -> None:
        """Turn away from a coordinator that the cluster has left behind; another one is looked for."""
        log.warning("coordinator superseded", address=link.address, generation=self._identity.generation)
        self._outgrown[link.address] = asyncio.get_running_loop().time()
        self._identity = outgrow(self._identity, link.address)
        link.close()
        self._woken.set()

    def _denied(self, link: Link, denied: Denied) -> None:
        log.error("denied", reason=denied.reason, message=denied.message)
        if denied.reason == SUPERSEDED:
            self._outgrow(link)
            return
        if denied.final:
            self._expelled = denied
        self._retry_after = denied.retry_after
        self._woken.set()

    # -- frames from the engine -------------------------------------------------

    def from_engine(self, tag: int, encoded: bytes, request: int) -> None:
        """Forward what the engine says of a request to the link that it came on, and a step to the links it is for.
        That it was admitted is good to know, but nobody waits for it."""
        kind = TAGS.get(tag)
        if kind is Deltas:
            self._forward_step(encoded)
            return
        for link in tuple(self._links):
            if request in link.requests:
                if kind is Admitted:
                    link.accompany(encoded)
                    continue
                link.forward(encoded)
                if kind in (Finished, Refusal, Failed):
                    self._end(link, request)

    def _forward_step(self, encoded: bytes) -> None:
        users = [link for link in self._links if link.requests]
        if len(users) == 1:
            users[0].forward(encoded)
            return
        step = decode(encoded[4], encoded[5:])
        assert isinstance(step, Deltas)  # noqa: S101  the tag was read by the caller
        for link in users:
            mine = tuple(delta for delta in step.deltas if delta.request in link.requests)
            if mine:
                link.send(Deltas(mine))

    def _end(self, link: Link, request: int) -> None:
        link.requests.discard(request)
        if link is not self._link:
            self._retire(link)
        if self._draining:
            self._woken.set()
        if self._paused and self.sharer is not None:
            self.sharer.wake()

    def changed(self) -> None:
        """Report soon when a request came or ended or the engine's state changed; bytes written can wait."""
        if self.poll is not None:
            self.poll.changed()
        if self.lender is not None:
            self.lender.engine_changed()
        self._tell_ready()
        self._report_soon()

    def video_changed(self) -> None:
        """Report soon when a lease, an environment, a package or Ray is another than before."""
        self._report_soon()

    def tell(self, frame: Frame) -> None:
        """Send a frame to the coordinator; without a link nobody hears it, and a report says how things stand."""
        if self._link is not None:
            self._link.send(frame)

    def _report_soon(self) -> None:
        if self._link is not None and self._told != self._tellable():
            now = asyncio.get_running_loop().time()
            self._next_report.sooner(max(now, self._reported_at + CHANGE_GAP))

    def _tellable(self) -> tuple[object, ...]:
        """Give what is worth a report of its own."""
        assert self.supervisor is not None  # noqa: S101  it calls us
        state, snapshot = self.supervisor.state, self.supervisor.report
        ceiling = snapshot.memory.ceiling if snapshot else 0
        models = snapshot.models if snapshot else ()
        standing = tuple((one.name, one.loaded, one.loading, bool(one.cause)) for one in models)
        level = self.poll.state.level if self.poll else 0
        acked = snapshot.acked_seq if snapshot else 0
        video = self._video()
        told = self.lender.tellable() if self.lender is not None else ()
        offered = (video.ready, video.cause, video.ray, video.ray_cause, video.allowed, len(video.packages))
        return (state.state, state.running, state.waiting, ceiling, standing, acked, level, told, offered)

    def _video(self) -> VideoState:
        if self.lender is None or self.ray is None:
            return VideoState()
        return replace(self.lender.video(), ray=self.ray.node, ray_cause=self.ray.cause, allowed=self.ray.allowed)

    def _tell_ready(self) -> None:
        if self._link is not None and self.supervisor is not None and self.supervisor.state.state == "ready":
            self.on_ready(self._link.address)

    def _to_engine(self, frame: Cancel) -> None:
        if self.supervisor is not None:
            self.supervisor.send(encode(frame), Cancel, frame.request)

    # -- reports -----------------------------------------------------------------

    def report(self) -> None:
        """Send a report now and plan the next."""
        self._next_report.cancel()
        supervisor, link = self.supervisor, self._link
        if supervisor is None or link is None:
            return
        loop = asyncio.get_running_loop()
        self._sequence += 1
        self._reported_at = loop.time()
        self._told = self._tellable()
        state, snapshot = supervisor.state, supervisor.report
        if snapshot is not None:
            self._models = snapshot.models
        link.send(
            within_bounds(
                Report(
                    self._sequence,
                    self._memory(supervisor),
                    state,
                    snapshot.models if snapshot else self._resting_models(),
                    snapshot.acked_seq if snapshot else 0,
                    self._draining or self._paused,
                    self._ping,
                    self.poll.system() if self.poll else System(),
                    self.poll.enforcement() if self.poll else Enforcement(),
                    self._video(),
                    self.sharer.told() if self.sharer is not None else Sharing(),
                )
            )
        )
        settings = self._settings.node
        # When idle the coordinator's ping sets the beat; this timer only steps in when a ping is late.
        due = settings.report_busy if self.busy() else settings.report_idle * 1.5
        self._next_report.set(loop.time() + due)

    @property
    def settings(self) -> NodeSettings:
        """This node's settings."""
        return self._settings

    def busy(self) -> bool:
        """Say whether anything runs or waits here, or memory is lent to a video."""
        state = self.supervisor.state if self.supervisor is not None else None
        works = state is not None and state.running + state.waiting > 0
        return works or (self.lender is not None and self.lender.holding)

    def _memory(self, supervisor: Supervisor) -> Memory:
        """Give what the engine's gate judges by; without an engine the limits alone, and nothing fits there."""
        snapshot = supervisor.report
        if snapshot is not None and snapshot.memory.cap and supervisor.reported_at is not None:
            return replace(snapshot.memory, age=time.monotonic() - supervisor.reported_at)
        if self.limiter is None:
            return Memory()
        limits = self.limiter.now(0)
        return Memory(
            cap=limits.cap,
            ceiling=limits.ceiling,
            margin=limits.margin,
            bound_by=limits.bound_by,
            guard=limits.guard,
            leases=limits.leases,
            total=self._hardware.memory,
        )

    # -- the owner's memory ----------------------------------------------------------

    @property
    def _paused(self) -> bool:
        return self.sharer is not None and not self.sharer.standing.shared

    def _not_now(self) -> Refused:
        """Say why nothing is begun here now. The code is one that every coordinator knows."""
        assert self.sharer is not None  # noqa: S101  it is what says no
        text = f"this Mac takes nothing new: {self.sharer.standing.why}"
        return Refused(Code.DRAINING, text, None, self.sharer.retry_after(), self._identity.name)

    def _resting_models(self) -> tuple[Model, ...]:
        """Give the models that this Mac could serve while its engine is replaced for the sake of its memory: they are
        not gone, and who asks for one is told to wait and not that nobody has it."""
        if not self._paused:
            return ()
        return tuple(replace(one, loaded=False, loading=False, groups=()) for one in self._models)

    def sharing_changed(self) -> None:
        """Tell everybody whom it concerns whether this Mac takes work."""
        assert self.sharer is not None  # noqa: S101  it calls us
        standing = self.sharer.standing
        self.on_sharing("" if standing.shared else standing.why)
        self.report()

    def holds(self) -> Holds:
        """Say what is still on this Mac."""
        return Holds(
            sum(len(link.requests) for link in self._links),
            self.lender is not None and self.lender.holding,
            self.supervisor is not None and self.supervisor.resting,
        )

    def act(self, act: Act, standing: Standing) -> None:
        """Give the memory back, step by step, or take work again."""
        assert self.supervisor is not None  # noqa: S101  set before the sharer starts
        match act:
            case Act.END_REQUESTS:
                self._let_go(f"its Mac takes no work now: {standing.why}")
            case Act.END_LEASE if self.lender is not None:
                self.lender.end(standing.why)
            case Act.END_LEASE:
                pass
            case Act.REST:
                self.supervisor.rest()
            case Act.WAKE:
                self.supervisor.wake()

    def _let_go(self, why: str) -> None:
        """End what nobody else had room for; the coordinator may still go on with it elsewhere."""
        for link in tuple(self._links):
            for request in tuple(link.requests):
                self._to_engine(Cancel(request))
                link.send(Failed(request, STOPPED, why))
                self._end(link, request)

    # -- questions ---------------------------------------------------------------

    def _answer(self, link: Link, ask: Ask) -> None:
        if ask.what == "logs":
            link.later(pieces(ask, self._log_file, lines=True))
        elif ask.what == "metrics":
            link.send(Answer(ask.ask, msgspec.msgpack.encode(self._measures()), last=True))
        elif ask.what.startswith(PREFIX) and self.lender is not None and (made := self.lender.artifact(ask.what)):
            link.later(pieces(ask, made))
        else:
            link.send(Answer(ask.ask, b"", last=True, error=f"this node does not know how to answer {ask.what!r}"))

    def _measures(self) -> NodeMeasures:
        report = self.supervisor.report if self.supervisor else None
        gate = report.measures if report else GateMeasures()
        return NodeMeasures(gate, time.process_time(), footprint_of((os.getpid(),)) or 0)

    # -- renewal -------------------------------------------------------------------

    def _renew_if_due(self) -> None:
        if self._link is not None and not self._renewing and needs_renewal(self._identity, time.time()):
            self._renewing = True
            self._link.send(Renew(new_csr(self._identity)))

    async def _take_over(self, renewed: Renewed) -> None:
        self._identity = install(self._identity, renewed.certificate)
        self._context = client_context(self._identity)
        log.info("certificate renewed")
        await self._connect(takeover=True)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the end ---------------------------------------------------------------------

    async def stop(self, drain: float, reason: str = "stopping") -> None:
        """Take no more work, let running requests end for at most `drain` seconds, say goodbye and hang up."""
        self._draining = True
        self.report()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain
        while any(link.requests for link in self._links) and (left := deadline - loop.time()) > 0:
            self._woken.clear()
            await self._sleep(left)
        self._stopped.set()
        if self._link is not None:
            self._link.send(Goodbye(reason))
        for link in tuple(self._links):
            link.close()
        self._woken.set()


def within_bounds(report: Report) -> Report:
    """Return a report that the coordinator accepts: at most MAX_MODELS, loaded ones first, in MAX_REPORT_BYTES."""
    if len(report.models) <= MAX_MODELS and len(encode(report)) <= MAX_REPORT_BYTES:
        return report
    models = sorted(report.models, key=lambda model: not model.loaded)[:MAX_MODELS]
    while models and len(encode(replace(report, models=tuple(models)))) > MAX_REPORT_BYTES:
        del models[len(models) * 3 // 4 :]
    log.warning("models not reported", count=len(report.models) - len(models), reported=len(models))
    return replace(report, models=tuple(models))


def _line_start(file: BinaryIO, position: int) -> int:
    """Return the first start of a line at or after a position of a log; the position itself where none begins
    there."""
    if position <= 0:
        return 0
    file.seek(position - 1)
    line = file.readline(MAX_LINE_BYTES)
    start = file.tell()
    return start if line.endswith(b"\n") and file.read(1) else position


def pieces(ask: Ask, path: Path, *, lines: bool = False) -> Iterator[Answer]:
    """Yield a window of a file as answers, read as they are sent; with `lines` its end begins with a whole line."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + ask.offset) if ask.offset < 0 else ask.offset
            if lines and ask.offset < 0:
                start = _line_start(file, start)
            start = 0 if start > size else start  # a new file began, after what was asked for last
            end = min(size, start + ask.limit)
            file.seek(start)
            while start < end and (piece := file.read(min(ANSWER_PIECE, end - start))):
                start += len(piece)
                yield Answer(ask.ask, piece)
        yield Answer(ask.ask, b"", last=True, next=start if start < size else 0, end=start)
    except OSError as error:
        yield Answer(ask.ask, b"", last=True, error=str(error))
