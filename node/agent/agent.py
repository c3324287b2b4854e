"""Agent of a node: keep the node linked to the coordinator, and forward frames to and from the engine.

Covers: reconnecting (remembered addresses, then Bonjour by cluster id, jittered back-off), reports, and forwarding of
frames to and from the engine. It also renews the certificate over a second link and sends a goodbye. Does not cover:
the engine's process (`node.engine_process.supervisor`), limits and readings (`node.memory`), enrollment
(`node.agent.enrollment`).

Rules
- A request belongs to the link that it came on. When that link ends, the agent cancels the request.
- No frame of a request is sent on another link. Clients get one answer.
- Lost links unload no model.
- Of two coordinators of the cluster, the one with the higher generation is valid. Agents leave the other one.
- A paused Mac (`node.sharing.policy`) accepts no work.
- A renewed certificate opens a second link that replaces the first. The first is closed when its last request has
  ended.
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
from node.agent.connection import CoordinatorLink, dial
from node.agent.identity import (
    NodeIdentity,
    adopt_generation,
    client_context,
    forget_address,
    install,
    needs_renewal,
    new_csr,
    remember,
)
from node.engine_process.supervisor import Supervisor
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.memory.sensor import footprint_of
from node.memory.timer import Timer
from node.settings import NodeSettings
from node.sharing.controller import SharingController
from node.sharing.policy import Occupancy, SharingAction, SharingState
from node.video.lease_manager import PREFIX, LeaseManager
from node.video.ray.local_ray import LocalRay
from wire.bounds import MAX_MODELS
from wire.codec import MAX_REPORT_BYTES, decode, encode, head_of
from wire.frames import (
    TAGS,
    Admitted,
    AllowVideo,
    Cancel,
    CertificateRenewed,
    CountTokens,
    Deltas,
    Denied,
    Failed,
    FetchChunk,
    FetchRequest,
    Finished,
    Frame,
    Generate,
    Goodbye,
    Hello,
    LeaseRelease,
    LeaseRequest,
    LoadModel,
    PauseNode,
    Ping,
    ProfileModel,
    RayHead,
    Refusal,
    RenewCertificate,
    Report,
    UnloadModel,
    Welcome,
)
from wire.histogram import GateMeasures, NodeMeasures
from wire.identity import PROTOCOL
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import Enforcement, Hardware, Memory, Model, Sharing, SystemMemory
from wire.video import VideoState

SILENCE_TIMEOUT_SECONDS = 10.0
"""Seconds without a frame after which the link is aborted."""
DIAL_DELAYS_SECONDS = (0.5, 30.0)
"""First and longest wait between two rounds of dialing, in seconds. Each wait is jittered by half."""
NO_WAKE_DIAL_SECONDS = 60.0
"""Seconds awake after which the agent dials again without a wake event, because the sleep was called off."""
GOODBYE_SECONDS = 0.2
"""Seconds for a goodbye to leave this machine before it sleeps."""
MIN_REPORT_GAP_SECONDS = 0.2
"""Minimum seconds between two reports that are sent because of a change."""
MAX_LINE_BYTES = 1024 * 1024
"""Maximum bytes of a partial first line of a log that are skipped."""
ANSWER_CHUNK_BYTES = 32 * 1024
FIND_TIMEOUT_SECONDS = 3.0
"""Timeout in seconds of a Bonjour search for a coordinator whose address changed."""
SUPERSEDED_ADDRESS_SECONDS = 30.0
"""Seconds for which the address of a superseded coordinator is not dialed."""
SUPERSEDED = "superseded"
"""Denial reason of a coordinator that learned from our Hello that it is superseded."""

log = structlog.get_logger("node.agent.agent")


class Expelled(Exception):
    """Error of `Agent.run`: the coordinator denied this node for good. The text names the reason and the next step.

    `reason` is the machine-readable reason.
    """

    def __init__(self, denied: Denied) -> None:
        super().__init__(denied.message)
        self.reason = denied.reason


class Agent:
    """Agent of this node: its links to the coordinator, and its reports.

    `version` is that of Macpool, `log_file` the log of the node, which the coordinator may request. The other parts of
    the node are attributes that `node.run` sets before `run`. `run` ends after `stop`, or raises Expelled.
    """

    def __init__(
        self, identity: NodeIdentity, settings: NodeSettings, version: str, hardware: Hardware, log_file: Path
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._version = version
        self._hardware = hardware
        self._log_file = log_file
        self._instance = uuid.uuid4().hex
        self._link: CoordinatorLink | None = None
        self._links: set[CoordinatorLink] = set()
        self._context = client_context(identity)
        self._sequence = 0
        self._ping = 0
        self._reported_at = 0.0
        self._last_report_key: tuple[object, ...] = ()
        self._next_report = Timer(self.report)
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
        self.poll: MemoryPoll | None = None
        self.lease_manager: LeaseManager | None = None
        self.ray: LocalRay | None = None
        self.sharing_controller: SharingController | None = None
        self.on_sharing: Callable[[str], None] = lambda why: None
        """Called with the reason when this node stops sharing, and with an empty text when it shares again."""
        self.welcomed = asyncio.Event()
        """Set when the coordinator has accepted a link for the first time."""
        self.on_ready: Callable[[str], None] = lambda address: None
        """Called with the coordinator's address (`host:port`), possibly often, when this node is linked and its engine
        is ready."""

    # -- staying connected ---------------------------------------------------

    async def run(self) -> None:
        """Keep the node linked until `stop`: reconnect after every loss. Raise Expelled if the coordinator denies the
        node for good."""
        wait = DIAL_DELAYS_SECONDS[0]
        while not self._stopped.is_set():
            link = await self._connect_unless_stopped()
            if link is not None:
                wait = DIAL_DELAYS_SECONDS[0]
                await self._until_lost(link)
            if self._expelled is not None:
                raise Expelled(self._expelled)
            if not self._awake.is_set():
                await self._wait_for_wake()
                wait = DIAL_DELAYS_SECONDS[0]
                continue
            if not self._stopped.is_set():
                await self._pause(max(self._retry_after, wait * random.uniform(0.5, 1.5)))  # noqa: S311
                wait, self._retry_after = min(wait * 2, DIAL_DELAYS_SECONDS[1]), 0.0

    async def _connect_unless_stopped(self) -> CoordinatorLink | None:
        """Connect, or return None at `stop`. An unreachable coordinator does not delay `stop`."""
        connecting = asyncio.ensure_future(self._connect(takeover=False))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({connecting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return await connecting if connecting.done() else None
        finally:
            connecting.cancel()
            stopped.cancel()
            await asyncio.gather(connecting, stopped, return_exceptions=True)

    async def _wait_for_wake(self) -> None:
        """Wait without dialing until the machine wakes, `stop`, or `NO_WAKE_DIAL_SECONDS` awake."""
        stopped, awake = (asyncio.ensure_future(one.wait()) for one in (self._stopped, self._awake))
        try:
            await asyncio.wait({stopped, awake}, timeout=NO_WAKE_DIAL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._awake.set()
            for one in (stopped, awake):
                one.cancel()
            await asyncio.gather(stopped, awake, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next round of dialing. Only `stop` ends the wait early, because a link may end repeatedly."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _connect(self, *, takeover: bool) -> CoordinatorLink | None:
        now = asyncio.get_running_loop().time()
        besides = {address for address, at in self._outgrown.items() if now - at < SUPERSEDED_ADDRESS_SECONDS}
        last = next((address for address in self._identity.addresses if address not in besides), None)
        for address in (last, None):
            where = address or await discovery.locate(self._identity, FIND_TIMEOUT_SECONDS, besides=besides)
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

    def _new_link(self) -> CoordinatorLink:
        return CoordinatorLink(self._identity.cluster, self._received, self._lost)

    def _hello(self, takeover: bool) -> Hello:
        identity = self._identity
        return Hello(
            PROTOCOL,
            identity.node,
            identity.name,
            self._instance,
            identity.machine,
            self._version,
            self._hardware,
            takeover,
            identity.generation,
            identity.seal,
        )

    async def _until_lost(self, link: CoordinatorLink) -> None:
        loop = asyncio.get_running_loop()
        while link.open and not self._stopped.is_set():
            silent = loop.time() - link.received_at
            if silent >= SILENCE_TIMEOUT_SECONDS:
                link.abort(f"the coordinator was silent for {silent:.0f} s")
                return
            self._woken.clear()
            await self._sleep(SILENCE_TIMEOUT_SECONDS - silent)
            link = self._link or link
            self._renew_if_due()

    def _lost(self, link: CoordinatorLink, reason: str) -> None:
        self._links.discard(link)
        for request in link.requests:
            self._to_engine(Cancel(request))
        if link is self._link:
            self._link = None
            if self._stopped.is_set():
                log.info("link ended", reason=reason, cancelled=len(link.requests))  # expected: we sent a goodbye
            else:
                log.warning("link lost", reason=reason, cancelled=len(link.requests))
        elif self._link is not None:
            for request in link.requests:
                self._link.send(Failed(request, FailureCode.LINK_LOST, "the older of two links to the node was lost"))
        self._woken.set()

    def fall_asleep(self, acknowledge: Callable[[], None]) -> None:
        """Send a goodbye before this machine sleeps, close the links, and call `acknowledge` after `GOODBYE_SECONDS`.

        The coordinator resumes the requests of this node on another node, and raises no alarm.
        """
        self._awake.clear()
        if self._link is not None:
            self._link.send(Goodbye("asleep"))
        for link in tuple(self._links):
            link.close()
        self._woken.set()
        asyncio.get_running_loop().call_later(GOODBYE_SECONDS, acknowledge)

    def wake_up(self, slept: float) -> None:
        """Abort all links after `slept` seconds of sleep and dial at once. Frames from before the sleep are
        outdated."""
        for link in tuple(self._links):
            link.abort(f"this machine slept for {slept:.0f} s")
        self._awake.set()
        self._woken.set()

    # -- frames from the coordinator ------------------------------------------

    def _received(self, link: CoordinatorLink, tag: int, body: bytes) -> None:
        kind = TAGS.get(tag)
        if kind in (Generate, LoadModel, UnloadModel, ProfileModel, CountTokens):
            self._take(link, tag, body)
        else:
            self._act(link, decode(tag, body))

    def _take(self, link: CoordinatorLink, tag: int, body: bytes) -> None:
        assert self.supervisor is not None  # noqa: S101  set before the first link
        request = head_of(body)
        if self._paused and TAGS[tag] is not UnloadModel:
            link.send(Refusal(request, self._not_now()))
            return
        link.requests.add(request)
        encoded = (len(body) + 1).to_bytes(4, "big") + bytes((tag,)) + body
        self.supervisor.send(encoded, TAGS[tag], request)

    def _act(self, link: CoordinatorLink, frame: Frame) -> None:
        match frame:
            case Cancel():
                for each in self._links:
                    each.requests.discard(frame.request)
                self._to_engine(frame)
                if self._draining:
                    self._woken.set()
            case Ping():
                self._ping = frame.nonce
                if asyncio.get_running_loop().time() - self._reported_at > self._settings.node.report_idle_seconds / 2:
                    self.report()
            case Welcome():
                self._welcomed(link, frame)
            case Denied():
                self._denied(link, frame)
            case FetchRequest():
                self._answer(link, frame)
            case LeaseRequest() | LeaseRelease() | AllowVideo():
                self._lend(frame)
            case RayHead():
                pass
            case PauseNode():
                self._obey(frame)
            case CertificateRenewed():
                self._spawn(self._take_over(frame))
            case _:
                link.abort(f"the coordinator sent {type(frame).__name__}, which only nodes send")

    def _obey(self, order: PauseNode) -> None:
        if self.sharing_controller is not None:
            self.sharing_controller.apply_order(order)
            self.report()

    def _lend(self, frame: LeaseRequest | LeaseRelease | AllowVideo) -> None:
        """Forward a frame about video to the lender or to Ray."""
        assert self.lease_manager is not None  # noqa: S101  set before the first link
        assert self.ray is not None  # noqa: S101  set with it
        match frame:
            case LeaseRequest():
                self.lease_manager.handle_request(frame)
            case LeaseRelease():
                self.lease_manager.release(frame)
            case AllowVideo():
                self.ray.allow(on=frame.allowed)

    def _welcomed(self, link: CoordinatorLink, welcome: Welcome) -> None:
        if welcome.generation < self._identity.generation:
            self._outgrow(link)
            return
        self._identity = adopt_generation(self._identity, welcome.generation, welcome.seal)
        older, self._link = self._link, link
        for address in reversed((link.address, *welcome.addresses)):
            self._identity = remember(self._identity, address)
        log.info("linked", cluster=welcome.cluster_name, epoch=welcome.epoch, skew=round(time.time() - welcome.time, 3))
        if older is not None:
            self._retire(older)
        self._renewing = False
        self.welcomed.set()
        self.report()
        if self.lease_manager is not None:
            self.lease_manager.resend_ends()
        self._notify_ready()

    def _retire(self, link: CoordinatorLink) -> None:
        if not link.requests:
            link.close()

    def _outgrow(self, link: CoordinatorLink) -> None:
        """Close the link to a superseded coordinator and search for the current coordinator."""
        log.warning("coordinator superseded", address=link.address, generation=self._identity.generation)
        self._outgrown[link.address] = asyncio.get_running_loop().time()
        self._identity = forget_address(self._identity, link.address)
        link.close()
        self._woken.set()

    def _denied(self, link: CoordinatorLink, denied: Denied) -> None:
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
        """Forward an encoded frame of the engine to the link of its request, and `Deltas` to the links of their
        requests.

        `tag` is the tag of the frame. An `Admitted` frame is not urgent and is sent together with the next frame.
        Frames of requests whose link was lost are discarded.
        """
        kind = TAGS.get(tag)
        if kind is Deltas:
            self._forward_step(encoded)
            return
        for link in tuple(self._links):
            if request in link.requests:
                if kind is Admitted:
                    link.send_with_next(encoded)
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

    def _end(self, link: CoordinatorLink, request: int) -> None:
        link.requests.discard(request)
        if link is not self._link:
            self._retire(link)
        if self._draining:
            self._woken.set()
        if self._paused and self.sharing_controller is not None:
            self.sharing_controller.update_now()

    def schedule_report(self) -> None:
        """Schedule a report and a memory poll, because the supervisor has a new report or state of the engine.

        Without a change that concerns the coordinator, such as after generated tokens, no report is sent.
        """
        if self.poll is not None:
            self.poll.poll_sooner()
        if self.lease_manager is not None:
            self.lease_manager.engine_changed()
        self._notify_ready()
        self._report_soon()

    def video_changed(self) -> None:
        """Schedule a report, because a lease, an environment, a package or Ray changed."""
        self._report_soon()

    def send_frame(self, frame: Frame) -> None:
        """Send a frame to the coordinator. Without a link the frame is discarded, and the next report carries the
        state."""
        if self._link is not None:
            self._link.send(frame)

    def _report_soon(self) -> None:
        if self._link is not None and self._last_report_key != self._report_key():
            now = asyncio.get_running_loop().time()
            self._next_report.move_forward(max(now, self._reported_at + MIN_REPORT_GAP_SECONDS))

    def _report_key(self) -> tuple[object, ...]:
        """Return the values whose change causes a report."""
        assert self.supervisor is not None  # noqa: S101  it calls us
        state, snapshot = self.supervisor.state, self.supervisor.reports.latest
        ceiling = snapshot.memory.ceiling if snapshot else 0
        models = snapshot.models if snapshot else ()
        loaded = tuple((one.name, one.loaded, one.loading, bool(one.cause)) for one in models)
        level = self.poll.state.level if self.poll else 0
        acked = snapshot.acked_seq if snapshot else 0
        video = self._video()
        leases = self.lease_manager.report_key() if self.lease_manager is not None else ()
        offered = (video.ready, video.cause, video.ray, video.ray_cause, video.allowed, len(video.packages))
        return (state.state, state.running, state.waiting, ceiling, loaded, acked, level, leases, offered)

    def _video(self) -> VideoState:
        if self.lease_manager is None or self.ray is None:
            return VideoState()
        return replace(
            self.lease_manager.video(), ray=self.ray.node, ray_cause=self.ray.cause, allowed=self.ray.allowed
        )

    def _notify_ready(self) -> None:
        if self._link is not None and self.supervisor is not None and self.supervisor.state.state == "ready":
            self.on_ready(self._link.address)

    def _to_engine(self, frame: Cancel) -> None:
        if self.supervisor is not None:
            self.supervisor.send(encode(frame), Cancel, frame.request)

    # -- reports -----------------------------------------------------------------

    def report(self) -> None:
        """Send a report now and schedule the next. Do nothing without a link."""
        self._next_report.cancel()
        supervisor, link = self.supervisor, self._link
        if supervisor is None or link is None:
            return
        loop = asyncio.get_running_loop()
        self._sequence += 1
        self._reported_at = loop.time()
        self._last_report_key = self._report_key()
        state, snapshot = supervisor.state, supervisor.reports.latest
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
                    self.poll.system() if self.poll else SystemMemory(),
                    self.poll.enforcement() if self.poll else Enforcement(),
                    self._video(),
                    self.sharing_controller.to_report() if self.sharing_controller is not None else Sharing(),
                )
            )
        )
        settings = self._settings.node
        # When idle the coordinator's ping triggers reports; this timer fires only when a ping is late.
        due = settings.report_busy_seconds if self.busy() else settings.report_idle_seconds * 1.5
        self._next_report.set(loop.time() + due)

    @property
    def settings(self) -> NodeSettings:
        """Settings of this node."""
        return self._settings

    def busy(self) -> bool:
        """Return whether a request runs or is queued here, or memory is leased to a video job."""
        state = self.supervisor.state if self.supervisor is not None else None
        works = state is not None and state.running + state.waiting > 0
        return works or (self.lease_manager is not None and self.lease_manager.holding)

    def _memory(self, supervisor: Supervisor) -> Memory:
        """Return the memory values of the engine's gate.

        Without an engine only the limits are set, and no request fits.
        """
        snapshot = supervisor.reports.latest
        if snapshot is not None and snapshot.memory.cap and supervisor.reports.received_at is not None:
            return replace(snapshot.memory, age=time.monotonic() - supervisor.reports.received_at)
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
        return self.sharing_controller is not None and not self.sharing_controller.sharing_state.shared

    def _not_now(self) -> Refused:
        """Return the refusal of a request while this Mac is paused. Every coordinator knows its code."""
        assert self.sharing_controller is not None  # noqa: S101  the sharer caused the refusal
        text = f"this Mac accepts no requests: {self.sharing_controller.sharing_state.why}"
        return Refused(RefusalCode.DRAINING, text, None, self.sharing_controller.retry_after(), self._identity.name)

    def _resting_models(self) -> tuple[Model, ...]:
        """Return the models that this Mac can serve again after its engine was replaced to release memory.

        A request for such a model is asked to retry later, instead of failing as an unknown model.
        """
        if not self._paused:
            return ()
        return tuple(replace(one, loaded=False, loading=False, groups=()) for one in self._models)

    def sharing_changed(self) -> None:
        """Notify `on_sharing` and the coordinator of a new decision whether this Mac accepts work."""
        assert self.sharing_controller is not None  # noqa: S101  it calls us
        sharing = self.sharing_controller.sharing_state
        self.on_sharing("" if sharing.shared else sharing.why)
        self.report()

    def occupancy(self) -> Occupancy:
        """Return the present use of this node: open requests, leased memory, and whether the engine rests."""
        return Occupancy(
            sum(len(link.requests) for link in self._links),
            self.lease_manager is not None and self.lease_manager.holding,
            self.supervisor is not None and self.supervisor.resting,
        )

    def apply_sharing_action(self, act: SharingAction, sharing: SharingState) -> None:
        """Run an action of the sharing rule: end requests or the lease, release memory, or load models again."""
        assert self.supervisor is not None  # noqa: S101  set before the sharer starts
        match act:
            case SharingAction.END_REQUESTS:
                self._let_go(f"its Mac stopped sharing: {sharing.why}")
            case SharingAction.END_LEASE if self.lease_manager is not None:
                self.lease_manager.end(sharing.why)
            case SharingAction.END_LEASE:
                pass
            case SharingAction.REST:
                self.supervisor.release_memory()
            case SharingAction.WAKE:
                self.supervisor.wake()

    def _let_go(self, why: str) -> None:
        """Cancel the requests that no other node had room for. The coordinator may still resume them on another
        node."""
        for link in tuple(self._links):
            for request in tuple(link.requests):
                self._to_engine(Cancel(request))
                link.send(Failed(request, FailureCode.NODE_STOPPING, why))
                self._end(link, request)

    # -- questions ---------------------------------------------------------------

    def _answer(self, link: CoordinatorLink, request: FetchRequest) -> None:
        if request.what == "logs":
            link.send_background(pieces(request, self._log_file, lines=True))
        elif request.what == "metrics":
            link.send(FetchChunk(request.number, msgspec.msgpack.encode(self._measures()), last=True))
        elif (
            request.what.startswith(PREFIX)
            and self.lease_manager is not None
            and (made := self.lease_manager.artifact(request.what))
        ):
            link.send_background(pieces(request, made))
        else:
            link.send(FetchChunk(request.number, b"", last=True, error=f"this node cannot provide {request.what!r}"))

    def _measures(self) -> NodeMeasures:
        report = self.supervisor.reports.latest if self.supervisor else None
        gate = report.measures if report else GateMeasures()
        return NodeMeasures(gate, time.process_time(), footprint_of((os.getpid(),)) or 0)

    # -- renewal -------------------------------------------------------------------

    def _renew_if_due(self) -> None:
        if self._link is not None and not self._renewing and needs_renewal(self._identity, time.time()):
            self._renewing = True
            self._link.send(RenewCertificate(new_csr(self._identity)))

    async def _take_over(self, renewed: CertificateRenewed) -> None:
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
        """Report draining, wait at most `drain` seconds for running requests, send a goodbye and close the links.

        `reason` is that of the Goodbye: `stopping` or `leave`.
        """
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
    """Return the report, shortened to MAX_MODELS models and MAX_REPORT_BYTES bytes if it is longer.

    Models that are not loaded are removed first.
    """
    if len(report.models) <= MAX_MODELS and len(encode(report)) <= MAX_REPORT_BYTES:
        return report
    models = sorted(report.models, key=lambda model: not model.loaded)[:MAX_MODELS]
    while models and len(encode(replace(report, models=tuple(models)))) > MAX_REPORT_BYTES:
        del models[len(models) * 3 // 4 :]
    log.warning("models not reported", count=len(report.models) - len(models), reported=len(models))
    return replace(report, models=tuple(models))


def _line_start(file: BinaryIO, position: int) -> int:
    """Return the first start of a line at or after `position` of a log, or `position` where no line begins."""
    if position <= 0:
        return 0
    file.seek(position - 1)
    line = file.readline(MAX_LINE_BYTES)
    start = file.tell()
    return start if line.endswith(b"\n") and file.read(1) else position


def pieces(request: FetchRequest, path: Path, *, lines: bool = False) -> Iterator[FetchChunk]:
    """Yield the requested window of a file in chunks, read while they are sent. A read error ends the window with an
    error chunk.

    With `lines`, a window that counts from the end begins with a whole line.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + request.offset) if request.offset < 0 else request.offset
            if lines and request.offset < 0:
                start = _line_start(file, start)
            start = 0 if start > size else start  # the log was rotated since the last request
            end = min(size, start + request.limit)
            file.seek(start)
            while start < end and (piece := file.read(min(ANSWER_CHUNK_BYTES, end - start))):
                start += len(piece)
                yield FetchChunk(request.number, piece)
        yield FetchChunk(request.number, b"", last=True, next=start if start < size else 0, end=start)
    except OSError as error:
        yield FetchChunk(request.number, b"", last=True, error=str(error))
