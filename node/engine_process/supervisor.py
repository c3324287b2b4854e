"""Supervisor of the engine process: starts, watches, ends and restarts one child.

The engine is a child process because its fatal error (Metal out of memory) cannot be caught. Its frames are forwarded
as bytes. Of a frame about a request only the head is parsed, to know which requests are open. When the child dies, each
open request ends in `Failed`. The request whose prompt or model was in the forward gets `engine_crashed`, because it
may be the cause. All other requests get `engine_lost`. A new child starts after 0.2 s. The delay doubles up to 30 s,
and is reset after a minute of health. The new child loads one by one the models of its predecessor, except quarantined
models.

A child whose models are all unloaded, but whose memory was not returned, is recycled: ended while idle and replaced at
once. A recycled child counts as no death: it delays no restart and blames no model.

While the engine rests (`release_memory`), its owner wants the memory. A child that has loaded any model is recycled. No
child then loads a model unasked, neither of its predecessor nor of the preloaded models. `wake` loads the preloaded
models again.

    starting ─(first report)─► ready ─(end of its socket)─► restarting ─► starting …
                                 └─(hung: ended)─► hung ─► restarting        failed: restarting, at the longest wait

A child counts as hung in two cases. It answers pings, and the inference thread has been in one call for more than
max(10 s, 5 × its expected duration). Or it has answered no ping for 30 s. The child ends when this end of
its socket closes. No process therefore survives the agent, however the agent ends.

A child is ended gracefully. A process that is killed with a large wired model can leave that memory wired until the Mac
restarts (docs/decisions/0018):

    Stop ─(the call in flight may end, then `leave`)─► SIGTERM ─(`leave`)─► SIGKILL

A hung child gets SIGTERM at once, because it will not react to `StopEngine`. Over the cap each wait is `over`. After
each end the machine's wired memory is compared with that before the start (`wired`). After the second leak no engine is
started.
"""

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import structlog
from msgspec.structs import replace

import node
from host.exit_status import describe_exit
from node.engine.process import crash_recorder
from node.engine.process.crash_recorder import CrashRecord
from node.engine.process.interface import NativeCallKind
from node.engine.process.main import settings_message
from node.engine_process.environment import engine_environment
from node.engine_process.quarantine import Quarantine
from node.engine_process.stderr_log import EngineLog
from node.memory.reading import HighWaterMarks, MemoryReading
from node.memory.sensor import Sensor, open_sensor
from node.memory.wired_leak import WiredLeaks, WiredReadings
from node.settings import NodeSettings
from wire.codec import MAX_JOINED_BYTES, Splitter, WireError, decode, encode, head_of
from wire.frames import (
    TAGS,
    Admitted,
    Cancel,
    CountTokens,
    Deltas,
    EngineReport,
    Failed,
    Finished,
    Frame,
    Generate,
    LoadModel,
    MemoryLimits,
    Ping,
    Pong,
    ProfileModel,
    ReclaimMemory,
    ReduceMemory,
    Refusal,
    RestoreModels,
    StopEngine,
    UnloadModel,
)
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import EngineState
from wire.units import MIB, show_size

COMMAND: Final = (sys.executable, "-m", "node.engine.process.main")
MAX_UNSENT_BYTES = 64 * MIB
"""Maximum unreceived bytes in the child's socket buffer. Above that, new requests are refused."""

EXIT_AFTER_CLOSE_SECONDS = 2.0
"""Seconds that a process may live after its socket has closed."""

MAX_WIRED_LEAKS = 2
"""Number of ends that leaked wired memory, after which no engine is started.

Each new engine would have less memory than the one before, and end the same way. oMLX#2184 logged 233 starts two
minutes apart.
"""

MAX_REQUESTS_LOGGED = 20
"""Maximum number of requests named in one log line."""

log = structlog.get_logger("supervise")
_HEADER = struct.Struct(">IB")
_NO_PONG = Pong(0)
_ENDS = (Finished, Refusal, Failed)
_BEGINS = (Generate, LoadModel, UnloadModel, ProfileModel, CountTokens)


@dataclass(frozen=True, slots=True)
class SupervisorTimeouts:
    """Delays and timeouts of the supervisor, in seconds."""

    first: float = 0.2
    longest: float = 30.0
    healthy: float = 60.0
    ping_busy: float = 1.0
    ping_idle: float = 5.0
    turn: float = 10.0
    turn_factor: float = 5.0
    silence: float = 30.0
    leave: float = 6.0
    """Time to release the memory and end: 1 s above the engine's own limit (`process.main.EXIT_TIMEOUT_SECONDS`)."""
    over: float = 1.0
    """Each of the two waits over the cap, the call in flight included."""
    stopping: float = 15.0
    """Time to end the engine while the agent stops. Services give the agent 45 s, of which requests have 20 s."""
    settle: float = 10.0
    """Time for the system to count the pages of an ended process as free. "Within seconds" for 424 GiB (oMLX#2184)."""
    look: float = 0.25
    """Interval of the wired-memory readings during `settle`."""

    def delay(self, deaths: int) -> float:
        """Return the delay in seconds before the next start, after `deaths` deaths in a row."""
        return min(self.longest, self.first * 2.0 ** min(deaths - 1, 32))

    def is_hung(self, busy: float, expected: float) -> bool:
        """Return whether a turn that has lasted `busy` seconds, of `expected`, counts as hung."""
        return busy > self._longest(expected)

    def left(self, busy: float, expected: float) -> float:
        """Return the seconds that a turn of `busy` seconds may still last before it counts as hung."""
        return max(0.0, self._longest(expected) - busy)

    def _longest(self, expected: float) -> float:
        return max(self.turn, self.turn_factor * expected)


@dataclass(frozen=True, slots=True)
class ExitTimeouts:
    """Timeouts of a child's end, in seconds."""

    stop_requested: float
    """Time after `StopEngine`."""
    terminated: float
    """Time after SIGTERM."""


@dataclass(frozen=True, slots=True)
class ChildExit:
    """End of a child process."""

    cause: str
    """Reason of the end."""
    last: CrashRecord | None
    """Native call in which the child died."""
    wired: WiredReadings
    """Wired memory before the start."""
    recycled: bool = False
    """Whether the child was recycled instead of having died."""


@dataclass(slots=True, eq=False)
class EngineChild(asyncio.Protocol):
    """One engine process and this end of its socket."""

    process: asyncio.subprocess.Process
    sensor: Sensor
    started: float
    on_frame: Callable[[int, bytes], None]
    on_fault: Callable[[str], None]
    page: int
    wired: WiredReadings
    splitter: Splitter = field(default_factory=lambda: Splitter(longest=MAX_JOINED_BYTES))
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    transport: asyncio.Transport | None = None
    ready: bool = False
    nonce: int = 0
    pinged: float | None = None
    pong: Pong = _NO_PONG
    """Last answer to a ping, which came at `ponged`."""
    ponged: float = 0.0
    stop_requested: bool = False
    """Whether the child was asked to end. No frame is written to it any more."""
    ending: asyncio.Task[None] | None = None
    killed_at: float = 0.0
    """Monotonic time at which SIGKILL is due while the child ends."""
    cause: str = ""
    hung: bool = False
    broken: bool = False
    """Whether the child's frames cannot be parsed."""
    recycled: bool = False
    resting: bool = False
    """Whether the child was started without preloaded models, or has no model loaded."""
    seen: set[str] = field(default_factory=set[str])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass on every complete frame. After an invalid frame the child is ended, and its bytes are discarded."""
        if self.broken:
            return
        try:
            for tag, body in self.splitter.feed(data):
                self.on_frame(tag, body)
        except WireError as error:
            self.broken = True
            self.on_fault(f"its frames cannot be read: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the child ends now, or has ended."""
        self.closed.set()

    def write(self, encoded: bytes) -> None:
        """Send bytes, unless the socket is closed or the child was asked to end."""
        if self.transport is not None and not self.stop_requested and not self.transport.is_closing():
            self.transport.write(encoded)

    def unsent(self) -> int:
        """Return the bytes that the child has not read yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def ping(self, now: float) -> None:
        """Send a ping, unless an answer is pending."""
        if self.pinged is None:
            self.nonce += 1
            self.pinged = now
            self.write(encode(Ping(self.nonce)))

    def stop(self, seconds: float) -> None:
        """Ask the process to end within `seconds`, and close the sending side."""
        if self.transport is not None and not self.stop_requested and not self.transport.is_closing():
            self.transport.write(encode(StopEngine(seconds)))
            self.transport.write_eof()
        self.stop_requested = True

    async def wait_exit(self, seconds: float) -> bool:
        """Wait at most `seconds` for the process to end. Returns whether it has ended."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)
        return self.process.returncode is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Supervisor of the engine child, which is always restarted. Every method is called on the loop that called
    `start`.

    `on_frame(tag, encoded, request)` gets every frame for the coordinator as whole encoded bytes. `request` is 0 for
    Deltas, which concern many requests. `on_change()` is called after a new report and after each change of the state.
    `wired()` returns the bytes that the system has wired, None where they cannot be read.
    """

    def __init__(
        self,
        settings: NodeSettings,
        *,
        on_frame: Callable[[int, bytes, int], None],
        on_change: Callable[[], None],
        log_file: Path,
        scratch: Path,
        wired: Callable[[], int | None],
        command: Sequence[str] = COMMAND,
        timeouts: SupervisorTimeouts | None = None,
    ) -> None:
        self._settings = settings
        self._on_frame = on_frame
        self._on_change = on_change
        self._log = EngineLog(log_file)
        self._scratch = scratch
        self._wired = wired
        self._leaks = WiredLeaks()
        self._quarantine = Quarantine()
        self._wanted: set[str] = set()
        self._command = command
        self._timeouts = timeouts or SupervisorTimeouts()
        self._child: EngineChild | None = None
        self._live: set[int] = set()
        self._limits: MemoryLimits | None = None
        self._numbered = self._free_orders = 0
        self._report: EngineReport | None = None
        self._reported_at: float | None = None
        self._state = "starting"
        self._cause = ""
        self._restarts = self._recycles = 0
        self._deaths = 0
        self._resting = False
        self._stopping = asyncio.Event()
        self._busier = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # properties

    @property
    def report(self) -> EngineReport | None:
        """Latest report of the current child; None before its first report."""
        return self._report

    @property
    def reported_at(self) -> float | None:
        """Monotonic time at which that report came."""
        return self._reported_at

    @property
    def state(self) -> EngineState:
        """The state for the report, with the cause of the last death and the number of restarts."""
        report = self._report
        engine = self._settings.engine
        rows = engine.mlx.max_batch_size if engine.kind == "mlx" else engine.scripted.max_batch_size
        state = EngineState(
            engine.kind,
            self._state,
            self._cause,
            self._restarts,
            recycles=self._recycles,
            rows=rows,
            leaked=self._leaks.missing,
        )
        if report is None:
            return state
        return replace(
            state,
            running=report.running,
            waiting=report.waiting,
            queued_tokens=report.queued_tokens,
            counts=report.counts,
            cache=report.cache,
            wired=report.wired,
        )

    @property
    def live(self) -> frozenset[int]:
        """Requests that were sent to the engine and have neither ended nor been cancelled."""
        return frozenset(self._live)

    @property
    def pid(self) -> int | None:
        """Process id of the current child."""
        return self._child.process.pid if self._child else None

    @property
    def child(self) -> EngineChild | None:
        """Current child; None while there is none."""
        return self._child

    @property
    def ready(self) -> int | None:
        """Process id of the current child once it has limits in force; None before that."""
        return self._child.process.pid if self._child is not None and self._child.ready else None

    @property
    def reported_limits_number(self) -> int:
        """Number of the limits that the engine reports to hold; 0 before its first report."""
        return 0 if self._report is None else self._report.limits_number

    @property
    def applied_limits_number(self) -> int:
        """Number of the limits that were put in force last."""
        return self._numbered

    @property
    def freed_order(self) -> int:
        """Number of the last `free_memory` order that the engine reports as done."""
        return 0 if self._report is None else self._report.freed_order

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warning about memory that ended engines leaked, with the remedy; empty without a leak."""
        warning = self._leaks.warning()
        return (warning,) if warning else ()

    @property
    def call_until(self) -> float:
        """Monotonic time until which the native call in flight may last, as of the last pong; 0 without a call."""
        child = self._child
        if child is None or not child.pong.expected:
            return 0.0
        return child.ponged - child.pong.busy + self._timeouts.turn_factor * child.pong.expected

    def highs(self) -> HighWaterMarks:
        """Read the kernel's high-water marks of the child."""
        return HighWaterMarks() if self._child is None else self._child.sensor.highs()

    def phys(self) -> MemoryReading:
        """Read the child's footprint now; unknown while there is no child."""
        if self._child is None:
            return MemoryReading(None, "no engine", time.monotonic())
        return self._child.sensor.phys()

    # orders

    async def start(self) -> None:
        """Start the first child and keep one alive. Raises OSError when the log cannot be opened."""
        os.close(self._log.open())
        self._task = asyncio.create_task(self._keep())

    def send(self, encoded: bytes, kind: type[Frame], request: int) -> None:
        """Forward a frame to the engine. A request that the engine cannot take now is refused at once through
        `on_frame`."""
        child = self._child
        if kind in _BEGINS:
            if child is None or not child.ready or child.unsent() > MAX_UNSENT_BYTES:
                self._deliver(Refusal(request, self._not_ready()), request)
                return
            self._live.add(request)
            self._busier.set()
        elif kind is Cancel:
            self._live.discard(request)
        if child is not None:
            child.write(encoded)

    def set_limits(self, limits: MemoryLimits) -> int:
        """Put limits in force, in this child and in all later children. Returns their number.

        Once `reported_limits_number` has reached that number, the engine judges by these limits, and keeps no more
        wired than they allow.
        """
        self._numbered += 1
        self._limits = replace(limits, number=self._numbered)
        if self._child is not None:
            self._child.write(encode(self._limits))
        return self._numbered

    def ping(self) -> None:
        """Ping the child now: the answer names its current call and the call's duration."""
        if self._child is not None:
            self._child.ping(time.monotonic())

    def enforce(self, order: ReduceMemory) -> None:
        """Notify the engine that its memory is over a watermark."""
        if self._child is not None:
            self._child.write(encode(order))

    def free_memory(self, size: int) -> int:
        """Ask the engine to evict and unload reclaimable memory until `size` bytes fit. Returns the order's number."""
        self._free_orders += 1
        if self._child is not None:
            self._child.write(encode(ReclaimMemory(self._free_orders, size)))
        return self._free_orders

    def end(self, cause: str) -> None:
        """End the current child quickly, because it is over its cap. A new child starts as after any death."""
        if self._child is not None:
            self._let_go(self._child, cause, ExitTimeouts(self._timeouts.over, self._timeouts.over))
            self._become("restarting", cause)

    @property
    def resting(self) -> bool:
        """Whether the engine was asked to hold no memory."""
        return self._resting

    def release_memory(self) -> None:
        """Release all of the engine's memory, and load no model until `wake`. Running requests are lost."""
        self._resting = True
        child = self._child
        if child is None or child.resting:
            return
        if child.seen or self._wanted or self._settings.models.preload:
            self.recycle(child, "replaced by an engine without models, to free memory for the owner")
        child.resting = True

    def wake(self) -> None:
        """Allow models to be loaded again. Preloaded models return with a new child."""
        self._resting = False
        child = self._child
        if child is not None and child.resting and self._settings.models.preload:
            self.recycle(child, "replaced by an engine that loads the preloaded models")

    async def stop(self) -> None:
        """End the child. Open requests end in Failed."""
        self._stopping.set()
        if self._task is None:
            return
        if self._child is not None:
            self._let_go(self._child, "", self._while_stopping(self._child))
        await self._task

    # lifecycle of the child

    async def _keep(self) -> None:
        """Start and serve one child after another until stopped."""
        while not self._stopping.is_set():
            self._become("starting")
            death = await self._live_once()
            self._fail_all(death.cause, death.last)
            if self._stopping.is_set():
                return
            delay = 0.0
            if not death.recycled:
                self._restarts += 1
                delay = self._timeouts.delay(self._deaths)
                log.warning("engine", cause=death.cause, restart_in=delay)
                self._become("restarting" if delay < self._timeouts.longest else "failed", death.cause)
            await self._look_for_leak(death.wired)
            await self._stopped_within(delay)

    async def _look_for_leak(self, wired: WiredReadings) -> None:
        """Compare the wired memory with that before the start of an ended child, within `settle` seconds.

        After too many leaks, wait until the readings disprove the leaks, or until stopped.
        """
        deadline = time.monotonic() + self._timeouts.settle
        while wired.leaked_bytes(after := self._wired()) and time.monotonic() < deadline:
            if await self._stopped_within(self._timeouts.look):
                return
        if missing := self._leaks.add(wired, after):
            log.error(
                "wired memory lost", missing=show_size(missing), leaks=self._leaks.count, warning=self._leaks.warning()
            )
            self._on_change()
        if self._leaks.count >= MAX_WIRED_LEAKS:
            self._become("failed", f"the engine is not restarted: {self._leaks.warning()}")
        while self._leaks.count >= MAX_WIRED_LEAKS and not await self._stopped_within(self._timeouts.ping_idle):
            self._leaks.update(self._wired())

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait `seconds`, or until stopped. Returns whether the supervisor was stopped."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    async def _live_once(self) -> ChildExit:
        """Run one child from start to death."""
        written, wired = self._log.size(), WiredReadings(self._wired())
        try:
            child = await self._spawn(wired)
        except OSError as error:
            self._deaths += 1
            return ChildExit(f"the engine could not be started: {error}", None, wired)
        self._child = child
        if self._stopping.is_set():
            self._let_go(child, "", self._while_stopping(child))
        watch = asyncio.create_task(self._watch(child))
        try:
            await child.closed.wait()
            await self._bury(child)
        finally:
            watch.cancel()
            if child.ending is not None:
                child.ending.cancel()
            self._child, self._report, self._reported_at = None, None, None
            child.sensor.close()
            last = crash_recorder.read(child.page, hung=child.hung)
            os.close(child.page)
        if child.recycled:
            return ChildExit(child.cause, None, wired, recycled=True)
        healthy = time.monotonic() - child.started >= self._timeouts.healthy
        self._deaths = 1 if healthy else self._deaths + 1
        cause = child.cause or _cause(child.process.returncode, self._log.tail(written))
        return ChildExit(cause + self._crash_cause(last), last, wired)

    def _crash_cause(self, last: CrashRecord | None) -> str:
        """Return a text on the work that the engine died in. A model that killed it twice is quarantined."""
        if last is None or self._stopping.is_set():
            return ""
        text = f"; it was in the {last.doing.name.lower()} of {last.model}"
        if self._quarantine.record_crash(last.model, time.monotonic()):
            text += ", for the second time: loading the model is blocked for 10 minutes"
        return text

    async def _spawn(self, wired: WiredReadings) -> EngineChild:
        own_end, child_end = socket.socketpair()
        errors, page = -1, crash_recorder.new_page()
        try:
            errors = self._log.open()
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--page",
                str(page),
                "--socket",
                str(child_end.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(child_end.fileno(), page),
                close_fds=True,
                start_new_session=True,
                cwd=Path(node.__file__).parents[1],
                env=self._environment(),
            )
        except BaseException:
            own_end.close()
            os.close(page)
            raise
        finally:
            child_end.close()
            if errors >= 0:
                os.close(errors)
        now = time.monotonic()
        child = EngineChild(
            process, open_sensor(process.pid), now, self._receive, self._broke, page, wired, resting=self._resting
        )
        own_end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=own_end)
        child.write(settings_message(self._child_settings()))
        self._restore(child)
        if self._limits is not None:
            child.write(encode(self._limits))
        return child

    def _child_settings(self) -> NodeSettings:
        """Return the settings for a new child. At rest it preloads no model."""
        if not self._resting:
            return self._settings
        return replace(self._settings, models=replace(self._settings.models, preload=()))

    def _environment(self) -> dict[str, str]:
        engine = self._settings.engine
        return engine_environment(os.environ, self._scratch, engine.mlx.blas if engine.kind == "mlx" else "bundled")

    def _restore(self, child: EngineChild) -> None:
        """Send a new child the models to load again and the models in quarantine.

        They are sent before the limits, hence before the child loads any model.
        """
        bans = self._quarantine.bans(time.monotonic())
        if self._resting:
            self._wanted.clear()
        self._wanted -= {ban.model for ban in bans}
        if self._wanted or bans:
            child.write(encode(RestoreModels(tuple(sorted(self._wanted)), bans)))

    def _let_go(self, child: EngineChild, cause: str, waits: ExitTimeouts) -> None:
        """End a child gracefully. An end under way is only replaced by an earlier deadline."""
        child.cause, child.ready = child.cause or cause, False
        killed_at = time.monotonic() + waits.stop_requested + waits.terminated
        if child.ending is not None:
            if killed_at >= child.killed_at:
                return
            child.ending.cancel()
        child.killed_at = killed_at
        child.stop(waits.stop_requested + waits.terminated)
        child.ending = asyncio.create_task(_end(child, waits))

    def _in_order(self, child: EngineChild) -> ExitTimeouts:
        """Return timeouts that include the time of the call in flight, by the last pong."""
        busy, timeouts = child.pong.busy, self._timeouts
        if busy:
            busy += time.monotonic() - child.ponged
        return ExitTimeouts(timeouts.left(busy, child.pong.expected) + timeouts.leave, timeouts.leave)

    def _while_stopping(self, child: EngineChild) -> ExitTimeouts:
        """Return the timeouts of `_in_order`, bounded by the time that the agent itself has."""
        waits = self._in_order(child)
        return ExitTimeouts(
            min(waits.stop_requested, max(0.0, self._timeouts.stopping - waits.terminated)), waits.terminated
        )

    def _broke(self, cause: str) -> None:
        """End a child that violated the wire protocol."""
        if self._child is not None:
            self._let_go(self._child, cause, self._in_order(self._child))
            self._become("restarting", cause)

    async def _bury(self, child: EngineChild) -> None:
        """Wait for the end of a process whose socket is closed."""
        if not await child.wait_exit(EXIT_AFTER_CLOSE_SECONDS):
            self._let_go(child, "it closed its socket without exiting", ExitTimeouts(0.0, self._timeouts.leave))
            await child.process.wait()

    async def _watch(self, child: EngineChild) -> None:
        """Ping the child, and end it when it hangs."""
        timeouts = self._timeouts
        while not child.stop_requested:
            now = time.monotonic()
            self._log.bound()
            child.wired.last = self._wired()
            self._leaks.update(child.wired.last)
            if child.pinged is not None and now - child.pinged > timeouts.silence:
                self._hang(child, f"no answer to a ping for {now - child.pinged:.0f} s")
                return
            child.ping(now)
            if self._live:
                await asyncio.sleep(timeouts.ping_busy)
                continue
            self._busier.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._busier.wait(), timeouts.ping_idle)

    def _hang(self, child: EngineChild, cause: str) -> None:
        child.hung = True
        self._let_go(child, f"the engine hung: {cause}", ExitTimeouts(0.0, self._timeouts.leave))
        self._become("hung", cause)

    # frames

    def _receive(self, tag: int, body: bytes) -> None:
        """Handle one frame of the child: process frames for the agent, forward the rest."""
        kind = TAGS.get(tag)
        if kind is Deltas:
            self._on_frame(tag, _HEADER.pack(len(body) + 1, tag) + body, 0)
        elif kind in (Admitted, *_ENDS):
            request = head_of(body)
            if kind is not Admitted:
                self._live.discard(request)
            self._on_frame(tag, _HEADER.pack(len(body) + 1, tag) + body, request)
        else:
            self._note(decode(tag, body))

    def _note(self, frame: Frame) -> None:
        child = self._child
        if isinstance(frame, EngineReport):
            self._report, self._reported_at = frame, time.monotonic()
            self._remember(frame)
            # A report without a cap was made before the limits arrived: its gate is closed.
            if child is not None and not child.ready and not child.stop_requested and frame.memory.cap > 0:
                child.ready = True
                self._become("ready")
            elif child is not None and self._spent(child, frame):
                log.warning(
                    "recycled",
                    unreturned=show_size(frame.unreturned),
                    phys=show_size(frame.memory.phys),
                    base=show_size(frame.memory.base),
                )
                text = f"{show_size(frame.unreturned)} of unloaded models were not freed: the engine was replaced"
                self.recycle(child, text)
            else:
                self._on_change()
        elif isinstance(frame, Pong) and child is not None:
            child.pinged, child.pong, child.ponged = None, frame, time.monotonic()
            if not child.stop_requested and self._timeouts.is_hung(frame.busy, frame.expected):
                self._hang(child, f"one call has taken {frame.busy:.0f} s, expected {frame.expected:.2f} s")

    def _spent(self, child: EngineChild, report: EngineReport) -> bool:
        """Return whether only a new process returns this child's memory, and no client would notice the replacement.

        With preloaded models a client would notice: a new child loads them again, even those that a user had unloaded.
        """
        pinned = self._settings.models.preload and not child.resting
        used = self._live or report.running or report.waiting or pinned
        here = any(model.loaded or model.loading for model in report.models)
        return report.unreturned > 0 and child.ready and bool(child.seen) and not used and not here

    def recycle(self, child: EngineChild, why: str) -> None:
        """End a healthy child to replace it. A child that already ends is replaced without this call."""
        if child.stop_requested:
            return
        self._recycles += 1
        child.recycled = True
        self._let_go(child, why, self._in_order(child))
        self._become("restarting", why)

    def _remember(self, report: EngineReport) -> None:
        """Record the loaded models, and the models that are still to be loaded again."""
        child = self._child
        if child is None:
            return
        here = {model.name for model in report.models if model.loaded}
        coming = {model.name for model in report.models if model.loading}
        broken = {model.name for model in report.models if model.cause}
        child.seen |= here | coming
        child.wired.weights = max(child.wired.weights, _weights(report))
        self._wanted = here | {name for name in self._wanted - broken if name in coming or name not in child.seen}

    def _become(self, state: str, cause: str | None = None) -> None:
        self._state = state
        if cause is not None:
            self._cause = cause
        self._on_change()

    def _fail_all(self, cause: str, last: CrashRecord | None) -> None:
        """End every open request. The request that was in the forward gets its own code."""
        live, self._live = self._live, set()
        failing = last.request if last is not None and last.doing is not NativeCallKind.DECODE else 0
        if live:
            log.warning("requests lost", requests=sorted(live)[:MAX_REQUESTS_LOGGED], count=len(live), guilty=failing)
        for request in sorted(live):
            code = (
                FailureCode.NODE_STOPPING
                if self._stopping.is_set()
                else FailureCode.ENGINE_CRASHED
                if request == failing
                else FailureCode.ENGINE_LOST
            )
            self._deliver(Failed(request, code, cause), request)

    def _deliver(self, frame: Frame, request: int) -> None:
        encoded = encode(frame)
        self._on_frame(encoded[4], encoded, request)

    def _not_ready(self) -> Refused:
        cause = f", it ended: {self._cause}" if self._cause else ""
        wait = self._timeouts.delay(max(1, self._deaths)) + 1.0
        return Refused(RefusalCode.NOT_READY, f"the engine is {self._state}{cause}", None, wait)


def _weights(report: EngineReport) -> int:
    """Return the bytes of weights in an engine, including the loaded part of models that are loading."""
    return sum(model.weights if model.loaded else int(model.weights * model.progress) for model in report.models)


async def _end(child: EngineChild, waits: ExitTimeouts) -> None:
    """Wait for a child that was asked to end. On timeout send SIGTERM, then SIGKILL."""
    if await child.wait_exit(waits.stop_requested):
        return
    log.warning("engine terminated", pid=child.process.pid, waited=waits.stop_requested, cause=child.cause)
    child.send_signal(signal.SIGTERM)
    if await child.wait_exit(waits.terminated):
        return
    log.error("engine killed", pid=child.process.pid, waited=waits.terminated, cause=child.cause)
    child.send_signal(signal.SIGKILL)


def _cause(code: int | None, tail: str) -> str:
    """Describe a death in a sentence: the signal or the exit code, and the last line of the log."""
    text = f"the engine process {describe_exit(code)}"
    return f"{text}: {tail}" if tail else text
