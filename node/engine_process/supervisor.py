"""Keeps one engine process alive, and answers for it where it cannot.

The engine is a child because what kills it (Metal out of memory) cannot be caught. Its frames are forwarded as bytes:
of a frame about a request only the head is read, to know which requests are still open. When the child dies, each of
those ends in `Failed`: the one whose prompt or model was in the forward as `engine_crashed`, for it may be the cause,
the others as `engine_lost`. A new child is started: after 0.2 s, doubling to 30 s, from the beginning again after a
minute of health. It loads again, one by one, what its predecessor had loaded, but for models in quarantine.

A child whose last model is gone, and its memory not, is recycled: closed in good health while nobody uses it, and
replaced at once. That is no death: it counts as none, delays nothing and accuses no model.

While the engine rests (`rest`), its owner wants the memory: a child that has loaded anything is recycled, and none
loads a model by itself, neither what its predecessor had nor what is preloaded. `wake` brings those back.

    starting ─(first report)─► ready ─(end of its socket)─► restarting ─► starting …
                                 └─(hung: ended)─► hung ─► restarting        failed: restarting, at the longest wait

Hung means: its I/O thread answers pings, and its inference thread has been in one turn for more than max(10 s, 5 × what
it expected); or nothing at all has answered for 30 s. The socket is the child's life line: the child ends when this end
closes, so nothing is left behind whichever way the agent ends.

A child is ended softly, because a process that is killed with a large wired model can leave that memory wired until the
Mac restarts (docs/decisions/0018):

    Stop ─(the call in flight may take its time, then `leave`)─► SIGTERM ─(`leave`)─► SIGKILL

Of a hung one nothing is expected any more, so SIGTERM follows at once; over its cap each wait is `over`. After each end
the machine's wired memory is compared with that before the start (`wired`): the second leak is the last start.
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
from node.engine.process import crash_recorder
from node.engine.process.crash_recorder import Last
from node.engine.process.interface import Doing
from node.engine.process.main import settings_message
from node.engine_process.environment import engine_environment
from node.engine_process.quarantine import Quarantine
from node.engine_process.stderr_log import EngineLog
from node.memory.reading import Highs, Reading
from node.memory.sensor import Sensor, open_sensor
from node.memory.wired import Leaks, Wired
from node.settings import NodeSettings
from wire.codec import LONGEST_JOINED, Splitter, WireError, decode, encode, head_of
from wire.frames import (
    TAGS,
    Admitted,
    Cancel,
    Count,
    Deltas,
    Enforce,
    EngineReport,
    Failed,
    Finished,
    Frame,
    Generate,
    Limits,
    Load,
    MakeRoom,
    Ping,
    Pong,
    Profile,
    Refusal,
    Restore,
    Stop,
    Unload,
)
from wire.refusals import Code, Refused
from wire.report import EngineState
from wire.units import MIB, show_size

CRASHED = "engine_crashed"
LOST = "engine_lost"
STOPPED = "node_stopping"
COMMAND: Final = (sys.executable, "-m", "node.engine.process.main")
MOST_UNSENT = 64 * MIB
"""Bytes that may wait for a child that does not read, before new requests are refused."""

BURIED = 2.0
"""Seconds that a process may live on whose socket is closed."""

MOST_LEAKS = 2
"""Ends that left wired memory behind, after which no engine is started any more: each would have less memory than the
one before, and end the same way (oMLX#2184 logged 233 starts two minutes apart)."""

MOST_TOLD = 20
"""Requests that one line of the log names."""

log = structlog.get_logger("supervise")
_HEADER = struct.Struct(">IB")
_NO_PONG = Pong(0)
_ENDS = (Finished, Refusal, Failed)
_BEGINS = (Generate, Load, Unload, Profile, Count)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    first: float = 0.2
    longest: float = 30.0
    healthy: float = 60.0
    ping_busy: float = 1.0
    ping_idle: float = 5.0
    turn: float = 10.0
    turn_factor: float = 5.0
    silence: float = 30.0
    leave: float = 6.0
    """To give the memory back and end: a second more than the engine allows itself (`child.LEAVE_SECONDS`)."""
    over: float = 1.0
    """Each of the two waits over the cap, the call in flight included."""
    stopping: float = 15.0
    """To end the engine while the agent stops. Services give the agent 45 s, of which requests have 20 s."""
    settle: float = 10.0
    """For the system to count the pages of an ended process as free. "Within seconds" for 424 GiB (oMLX#2184)."""
    look: float = 0.25
    """From one look at the wired memory to the next meanwhile."""

    def delay(self, deaths: int) -> float:
        """Give the wait before the next start, after so many deaths in a row."""
        return min(self.longest, self.first * 2.0 ** min(deaths - 1, 32))

    def hung(self, busy: float, expected: float) -> bool:
        """Say whether a turn that lasts `busy` seconds, `expected` of them foreseen, will never end."""
        return busy > self._longest(expected)

    def left(self, busy: float, expected: float) -> float:
        """Return the seconds for which a turn that has lasted `busy` seconds may go on before it counts as hung."""
        return max(0.0, self._longest(expected) - busy)

    def _longest(self, expected: float) -> float:
        return max(self.turn, self.turn_factor * expected)


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a child has after it was asked to end, and after SIGTERM, in seconds."""

    asked: float
    terminated: float


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended: why, the native call that it died in, what was wired, whether it was recycled instead."""

    cause: str
    last: Last | None
    wired: Wired
    recycled: bool = False


@dataclass(slots=True, eq=False)
class Child(asyncio.Protocol):
    """One engine process and this end of its socket."""

    process: asyncio.subprocess.Process
    sensor: Sensor
    started: float
    on_frame: Callable[[int, bytes], None]
    on_fault: Callable[[str], None]
    page: int
    wired: Wired
    splitter: Splitter = field(default_factory=lambda: Splitter(longest=LONGEST_JOINED))
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    transport: asyncio.Transport | None = None
    ready: bool = False
    nonce: int = 0
    pinged: float | None = None
    pong: Pong = _NO_PONG
    """Its last answer, which came at `ponged`."""
    ponged: float = 0.0
    asked: bool = False
    """Whether it was asked to end: nothing is written to it any more."""
    ending: asyncio.Task[None] | None = None
    killed_at: float = 0.0
    """When SIGKILL is due while it ends."""
    blame: str = ""
    hung: bool = False
    broken: bool = False
    """Whether its frames cannot be read."""
    recycled: bool = False
    resting: bool = False
    """Whether it was started without what is preloaded, or has nothing loaded."""
    seen: set[str] = field(default_factory=set[str])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand on every whole frame; a child that breaks the rules of the wire is ended, and not read any more."""
        if self.broken:
            return
        try:
            for tag, body in self.splitter.feed(data):
                self.on_frame(tag, body)
        except WireError as error:
            self.broken = True
            self.on_fault(f"its frames cannot be read: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The child ends now, or has ended."""
        self.closed.set()

    def write(self, encoded: bytes) -> None:
        """Send bytes, unless the line is closed or the child was asked to end."""
        if self.transport is not None and not self.asked and not self.transport.is_closing():
            self.transport.write(encoded)

    def unsent(self) -> int:
        """Count the bytes that the child has not read yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def ping(self, now: float) -> None:
        """Ask for a sign of life, unless one is awaited."""
        if self.pinged is None:
            self.nonce += 1
            self.pinged = now
            self.write(encode(Ping(self.nonce)))

    def stop(self, seconds: float) -> None:
        """Ask the process to end within so many seconds, and write nothing after it."""
        if self.transport is not None and not self.asked and not self.transport.is_closing():
            self.transport.write(encode(Stop(seconds)))
            self.transport.write_eof()
        self.asked = True

    async def gone(self, seconds: float) -> bool:
        """Wait so many seconds for the process to end; return whether it did."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)
        return self.process.returncode is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """The engine child, restarted for ever. Everything is called on the loop that called `start`.

    `on_frame(tag, encoded, request)` gets every frame for the coordinator as whole encoded bytes; `request` is 0 for
    Deltas, which are about many. `on_change()` is called after a new report and after each change of the state.
    `wired()` reads the bytes that the system has wired, None where that cannot be read.
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
        patience: Patience | None = None,
    ) -> None:
        self._settings = settings
        self._on_frame = on_frame
        self._on_change = on_change
        self._log = EngineLog(log_file)
        self._scratch = scratch
        self._wired = wired
        self._leaks = Leaks()
        self._quarantine = Quarantine()
        self._wanted: set[str] = set()
        self._command = command
        self._patience = patience or Patience()
        self._child: Child | None = None
        self._live: set[int] = set()
        self._limits: Limits | None = None
        self._numbered = self._rooms = 0
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

    # what it knows

    @property
    def report(self) -> EngineReport | None:
        """The newest snapshot of the present child; None before its first."""
        return self._report

    @property
    def reported_at(self) -> float | None:
        """When that snapshot came, on the monotonic clock."""
        return self._reported_at

    @property
    def state(self) -> EngineState:
        """The state for the report, with the cause of the last death and the number of restarts."""
        report = self._report
        engine = self._settings.engine
        rows = engine.mlx.batch if engine.kind == "mlx" else engine.scripted.batch
        state = EngineState(
            engine.kind, self._state, self._cause, self._restarts, recycles=self._recycles, rows=rows,
            leaked=self._leaks.missing,
        )  # fmt: skip
        if report is None:
            return state
        return replace(
            state, running=report.running, waiting=report.waiting, queued_tokens=report.queued_tokens,
            counts=report.counts, cache=report.cache, wired=report.wired,
        )  # fmt: skip

    @property
    def live(self) -> frozenset[int]:
        """The requests that were sent to the engine and have neither ended nor been cancelled."""
        return frozenset(self._live)

    @property
    def pid(self) -> int | None:
        """The present child's process id."""
        return self._child.process.pid if self._child else None

    @property
    def child(self) -> Child | None:
        """The present child; None while there is none."""
        return self._child

    @property
    def ready(self) -> int | None:
        """The process id of the present child once it has limits in force; None before that."""
        return self._child.process.pid if self._child is not None and self._child.ready else None

    @property
    def held(self) -> int:
        """The number of the limits that the engine says it holds; 0 before its first word."""
        return 0 if self._report is None else self._report.held

    @property
    def told(self) -> int:
        """The number of the limits that were put in force last."""
        return self._numbered

    @property
    def roomed(self) -> int:
        """The last `make_room` that the engine says it has acted on."""
        return 0 if self._report is None else self._report.roomed

    @property
    def warnings(self) -> tuple[str, ...]:
        """What engines that ended have left behind, and what to do about it; empty as long as that is nothing."""
        warning = self._leaks.warning()
        return (warning,) if warning else ()

    @property
    def call_until(self) -> float:
        """Until when (monotonic seconds) the native call in flight may last, as the child last said; 0 without one."""
        child = self._child
        if child is None or not child.pong.expected:
            return 0.0
        return child.ponged - child.pong.busy + self._patience.turn_factor * child.pong.expected

    def highs(self) -> Highs:
        """Read the kernel's high-water marks of the child."""
        return Highs() if self._child is None else self._child.sensor.highs()

    def phys(self) -> Reading:
        """Read the child's footprint now; unknown while there is no child."""
        if self._child is None:
            return Reading(None, "no engine", time.monotonic())
        return self._child.sensor.phys()

    # what it does

    async def start(self) -> None:
        """Start the first child and keep one alive from now on. OSError when the log cannot be opened."""
        os.close(self._log.open())
        self._task = asyncio.create_task(self._keep())

    def send(self, encoded: bytes, kind: type[Frame], request: int) -> None:
        """Forward a frame to the engine; a request that cannot be taken now is refused at once through `on_frame`."""
        child = self._child
        if kind in _BEGINS:
            if child is None or not child.ready or child.unsent() > MOST_UNSENT:
                self._say(Refusal(request, self._not_ready()), request)
                return
            self._live.add(request)
            self._busier.set()
        elif kind is Cancel:
            self._live.discard(request)
        if child is not None:
            child.write(encoded)

    def set_limits(self, limits: Limits) -> int:
        """Put limits in force, in this child and in all that follow. Give their number: once `held` has reached it, the
        engine judges by them, and keeps no more wired than they allow."""
        self._numbered += 1
        self._limits = replace(limits, number=self._numbered)
        if self._child is not None:
            self._child.write(encode(self._limits))
        return self._numbered

    def ping(self) -> None:
        """Ask the child for a sign of life now: which call it is in, and for how long."""
        if self._child is not None:
            self._child.ping(time.monotonic())

    def enforce(self, order: Enforce) -> None:
        """Tell the engine that it stands over a line."""
        if self._child is not None:
            self._child.write(encode(order))

    def make_room(self, size: int) -> int:
        """Ask the engine to give up what can be had again so that `size` bytes fit; give the order's number."""
        self._rooms += 1
        if self._child is not None:
            self._child.write(encode(MakeRoom(self._rooms, size)))
        return self._rooms

    def end(self, blame: str) -> None:
        """End the present child within little time, because it is over its cap; another is started as after any
        death."""
        if self._child is not None:
            self._let_go(self._child, blame, Waits(self._patience.over, self._patience.over))
            self._become("restarting", blame)

    @property
    def resting(self) -> bool:
        """Whether the engine was told to hold nothing."""
        return self._resting

    def rest(self) -> None:
        """Give all of the engine's memory back, and load nothing until `wake`. What still runs there is lost."""
        self._resting = True
        child = self._child
        if child is None or child.resting:
            return
        if child.seen or self._wanted or self._settings.models.preload:
            self.recycle(child, "its memory is its owner's for now, so it was replaced by one that holds nothing")
        child.resting = True

    def wake(self) -> None:
        """Let models be loaded again; those that are preloaded come back with a new child."""
        self._resting = False
        child = self._child
        if child is not None and child.resting and self._settings.models.preload:
            self.recycle(child, "what is preloaded comes back with another")

    async def stop(self) -> None:
        """End the child; requests that are still open end in Failed."""
        self._stopping.set()
        if self._task is None:
            return
        if self._child is not None:
            self._let_go(self._child, "", self._while_stopping(self._child))
        await self._task

    # the child's life

    async def _keep(self) -> None:
        """Start, serve and bury children until stopped."""
        while not self._stopping.is_set():
            self._become("starting")
            death = await self._live_once()
            self._fail_all(death.cause, death.last)
            if self._stopping.is_set():
                return
            delay = 0.0
            if not death.recycled:
                self._restarts += 1
                delay = self._patience.delay(self._deaths)
                log.warning("engine", cause=death.cause, restart_in=delay)
                self._become("restarting" if delay < self._patience.longest else "failed", death.cause)
            await self._look_for_leak(death.wired)
            await self._stopped_within(delay)

    async def _look_for_leak(self, wired: Wired) -> None:
        """Compare the wired memory with that before the start of a child that has ended, once the system had time to
        count it. After too many leaks wait until they prove to be none, or until stopped."""
        deadline = time.monotonic() + self._patience.settle
        while wired.missing(after := self._wired()) and time.monotonic() < deadline:
            if await self._stopped_within(self._patience.look):
                return
        if missing := self._leaks.add(wired, after):
            log.error("wired memory lost", missing=show_size(missing), leaks=self._leaks.count,
                      warning=self._leaks.warning())  # fmt: skip
            self._on_change()
        if self._leaks.count >= MOST_LEAKS:
            self._become("failed", f"it is not started again: {self._leaks.warning()}")
        while self._leaks.count >= MOST_LEAKS and not await self._stopped_within(self._patience.ping_idle):
            self._leaks.look(self._wired())

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait so long, or until stopped; return whether that is so."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    async def _live_once(self) -> Death:
        """Run one child from start to death."""
        written, wired = self._log.size(), Wired(self._wired())
        try:
            child = await self._spawn(wired)
        except OSError as error:
            self._deaths += 1
            return Death(f"the engine could not be started: {error}", None, wired)
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
            return Death(child.blame, None, wired, recycled=True)
        healthy = time.monotonic() - child.started >= self._patience.healthy
        self._deaths = 1 if healthy else self._deaths + 1
        cause = child.blame or _cause(child.process.returncode, self._log.tail(written))
        return Death(cause + self._accuse(last), last, wired)

    def _accuse(self, last: Last | None) -> str:
        """Put what the engine was doing into words; a model that killed it twice is kept out."""
        if last is None or self._stopping.is_set():
            return ""
        text = f"; it was in the {last.doing.name.lower()} of {last.model}"
        if self._quarantine.died(last.model, time.monotonic()):
            text += ", for the second time: the model is kept out for 10 minutes"
        return text

    async def _spawn(self, wired: Wired) -> Child:
        ours, theirs = socket.socketpair()
        errors, page = -1, crash_recorder.new_page()
        try:
            errors = self._log.open()
            process = await asyncio.create_subprocess_exec(
                *self._command, "--page", str(page), "--socket", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL, stdout=errors, stderr=errors, pass_fds=(theirs.fileno(), page),
                close_fds=True, start_new_session=True, cwd=Path(node.__file__).parents[1], env=self._environment(),
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(page)
            raise
        finally:
            theirs.close()
            if errors >= 0:
                os.close(errors)
        now = time.monotonic()
        child = Child(
            process, open_sensor(process.pid), now, self._receive, self._broke, page, wired, resting=self._resting
        )
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
        child.write(settings_message(self._told()))
        self._restore(child)
        if self._limits is not None:
            child.write(encode(self._limits))
        return child

    def _told(self) -> NodeSettings:
        """Give the settings for a new child: at rest it preloads nothing."""
        if not self._resting:
            return self._settings
        return replace(self._settings, models=replace(self._settings.models, preload=()))

    def _environment(self) -> dict[str, str]:
        engine = self._settings.engine
        return engine_environment(os.environ, self._scratch, engine.mlx.blas if engine.kind == "mlx" else "bundled")

    def _restore(self, child: Child) -> None:
        """Tell a new child what to load again and what to keep out; before its limits, so before it loads anything."""
        bans = self._quarantine.bans(time.monotonic())
        if self._resting:
            self._wanted.clear()
        self._wanted -= {ban.model for ban in bans}
        if self._wanted or bans:
            child.write(encode(Restore(tuple(sorted(self._wanted)), bans)))

    def _let_go(self, child: Child, blame: str, waits: Waits) -> None:
        """End a child softly; where that is under way, only if it is to be sooner."""
        child.blame, child.ready = child.blame or blame, False
        killed_at = time.monotonic() + waits.asked + waits.terminated
        if child.ending is not None:
            if killed_at >= child.killed_at:
                return
            child.ending.cancel()
        child.killed_at = killed_at
        child.stop(waits.asked + waits.terminated)
        child.ending = asyncio.create_task(_end(child, waits))

    def _in_order(self, child: Child) -> Waits:
        """Leave a child the time that its call in flight may take, by what it last said."""
        busy, patience = child.pong.busy, self._patience
        if busy:
            busy += time.monotonic() - child.ponged
        return Waits(patience.left(busy, child.pong.expected) + patience.leave, patience.leave)

    def _while_stopping(self, child: Child) -> Waits:
        """The same, bounded by what the agent itself has."""
        waits = self._in_order(child)
        return Waits(min(waits.asked, max(0.0, self._patience.stopping - waits.terminated)), waits.terminated)

    def _broke(self, blame: str) -> None:
        """End a child that broke the rules of the wire."""
        if self._child is not None:
            self._let_go(self._child, blame, self._in_order(self._child))
            self._become("restarting", blame)

    async def _bury(self, child: Child) -> None:
        """Wait for the end of a process whose socket is closed."""
        if not await child.gone(BURIED):
            self._let_go(child, "it closed its socket and went on", Waits(0.0, self._patience.leave))
            await child.process.wait()

    async def _watch(self, child: Child) -> None:
        """Ping the child, and end it when it hangs."""
        patience = self._patience
        while not child.asked:
            now = time.monotonic()
            self._log.bound()
            child.wired.last = self._wired()
            self._leaks.look(child.wired.last)
            if child.pinged is not None and now - child.pinged > patience.silence:
                self._hang(child, f"it has answered nothing for {now - child.pinged:.0f} s")
                return
            child.ping(now)
            if self._live:
                await asyncio.sleep(patience.ping_busy)
                continue
            self._busier.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._busier.wait(), patience.ping_idle)

    def _hang(self, child: Child, blame: str) -> None:
        child.hung = True
        self._let_go(child, f"the engine hung: {blame}", Waits(0.0, self._patience.leave))
        self._become("hung", blame)

    # frames

    def _receive(self, tag: int, body: bytes) -> None:
        """Take one frame of the child: keep what is for the agent, forward the rest."""
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
            if child is not None and not child.ready and not child.asked and frame.memory.cap > 0:
                child.ready = True
                self._become("ready")
            elif child is not None and self._spent(child, frame):
                log.warning("recycled", unreturned=show_size(frame.unreturned), phys=show_size(frame.memory.phys),
                            base=show_size(frame.memory.base))  # fmt: skip
                text = f"{show_size(frame.unreturned)} of unloaded models did not come back, so it was replaced"
                self.recycle(child, text)
            else:
                self._on_change()
        elif isinstance(frame, Pong) and child is not None:
            child.pinged, child.pong, child.ponged = None, frame, time.monotonic()
            if not child.asked and self._patience.hung(frame.busy, frame.expected):
                self._hang(child, f"one turn has lasted {frame.busy:.0f} s, {frame.expected:.2f} s were expected")

    def _spent(self, child: Child, report: EngineReport) -> bool:
        """Whether only a new process brings this one's memory back, and nobody would notice. With preloaded models one
        would: they would come back with it, though somebody had them unloaded."""
        pinned = self._settings.models.preload and not child.resting
        used = self._live or report.running or report.waiting or pinned
        here = any(model.loaded or model.loading for model in report.models)
        return report.unreturned > 0 and child.ready and bool(child.seen) and not used and not here

    def recycle(self, child: Child, why: str) -> None:
        """End a healthy child, for another to take its place; one that ends already is replaced in any case."""
        if child.asked:
            return
        self._recycles += 1
        child.recycled = True
        self._let_go(child, why, self._in_order(child))
        self._become("restarting", why)

    def _remember(self, report: EngineReport) -> None:
        """Keep in mind what is loaded, and what is on its way to be loaded again."""
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

    def _fail_all(self, cause: str, last: Last | None) -> None:
        """End every open request; the one that was in the forward by a code of its own."""
        live, self._live = self._live, set()
        guilty = last.request if last is not None and last.doing is not Doing.DECODE else 0
        if live:
            log.warning("requests lost", requests=sorted(live)[:MOST_TOLD], count=len(live), guilty=guilty)
        for request in sorted(live):
            code = STOPPED if self._stopping.is_set() else CRASHED if request == guilty else LOST
            self._say(Failed(request, code, cause), request)

    def _say(self, frame: Frame, request: int) -> None:
        encoded = encode(frame)
        self._on_frame(encoded[4], encoded, request)

    def _not_ready(self) -> Refused:
        cause = f", it ended: {self._cause}" if self._cause else ""
        wait = self._patience.delay(max(1, self._deaths)) + 1.0
        return Refused(Code.NOT_READY, f"the engine is {self._state}{cause}", None, wait)


def _weights(report: EngineReport) -> int:
    """Return the bytes of weights that an engine has, as far as they are read."""
    return sum(model.weights if model.loaded else int(model.weights * model.progress) for model in report.models)


async def _end(child: Child, waits: Waits) -> None:
    """Wait for a child that was asked to end; then SIGTERM, then SIGKILL."""
    if await child.gone(waits.asked):
        return
    log.warning("engine terminated", pid=child.process.pid, waited=waits.asked, cause=child.blame)
    child.send_signal(signal.SIGTERM)
    if await child.gone(waits.terminated):
        return
    log.error("engine killed", pid=child.process.pid, waited=waits.terminated, cause=child.blame)
    child.send_signal(signal.SIGKILL)


def _cause(code: int | None, tail: str) -> str:
    """Put a death into a sentence: the signal or the exit code, and the last that was said."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        text = f"the engine process ended by {name}"
    else:
        text = f"the engine process ended with exit code {code}"
    return f"{text}: {tail}" if tail else text
