"""Supervisor of the engine process: starts, watches, ends and restarts one child.

The engine is a child process because its fatal error (Metal out of memory) cannot be caught. When the child dies, each
open request ends in `Failed` (codes: `OpenRequests.fail_all`). A new child loads the models of its predecessor one by
one, except quarantined models. While the engine rests, a new child loads no model.

The rules are in `lifecycle`, as data: stages, restarts, replacement of a healthy child, rest. This module reads clocks,
sockets and the process, passes events to the rules, and performs their actions.

By the limits in `timeouts`, a child counts as hung if it answers no ping. A child that answers pings counts as hung if
one native call, tokenization or iteration takes far longer than expected.

After each end of a child, unless the agent stops, `wired_check` compares the wired memory of the machine with its value
before the start. After the second leak no engine is started until the memory has returned.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import replace

from host.subprocesses import describe_exit
from node.engine.process.crash_recorder import CrashRecord
from node.engine.process.main import encode_settings
from node.engine_process import lifecycle
from node.engine_process.child import EXIT_AFTER_CLOSE_SECONDS, ChildCommand, EngineChild, start_child
from node.engine_process.environment import build_engine_environment
from node.engine_process.lifecycle import EndChild, EngineLife, StateChanged, WaitForRestart
from node.engine_process.memory_orders import EngineOrders, EngineReports
from node.engine_process.open_requests import ENDS, OpenRequests
from node.engine_process.probe import EngineProbe
from node.engine_process.quarantine import Quarantine
from node.engine_process.stderr_log import EngineLog
from node.engine_process.timeouts import SupervisorTimeouts
from node.engine_process.wired_check import WiredCheck, sum_weights
from node.illegal_events import IllegalEvents
from node.memory.wired_leak import WiredReadings
from node.settings import NodeSettings
from wire.codec import decode, encode
from wire.frames import (
    TAGS,
    Admitted,
    Cancel,
    ClearCache,
    CountTokens,
    Deltas,
    Embed,
    EngineReport,
    Frame,
    Generate,
    LoadModel,
    Pong,
    ProfileModel,
    RestoreModels,
    UnloadModel,
    Vectors,
)
from wire.report import EngineState, Memory
from wire.state_machine import IllegalEventError
from wire.units import MIB, show_size

COMMAND: Final = (sys.executable, "-m", "node.engine.process.main")
"""Command that starts an engine."""
MAX_UNSENT_BYTES = 64 * MIB
"""Maximum bytes that wait in the agent because the child has not read them. Above that, new requests are refused."""

log = structlog.get_logger("supervise")
_NO_REPORT = EngineReport(Memory(), (), 0, 0)
_BEGINS = (Generate, Embed, LoadModel, UnloadModel, ProfileModel, ClearCache, CountTokens)


class Supervisor:
    """Supervisor of the engine process. Call every method on the loop that called `start`.

    `on_frame(tag, encoded, request)` is called for every frame for the coordinator, with its encoded bytes including
    the header. `request` is 0 for Deltas, which concern many requests. `on_change()` is called after each report and
    each change of the state. `wired()` returns the wired bytes of the system; None if they cannot be read. `log_file`
    receives the standard error of the engine, `scratch` is the folder for its temporary files, `command` starts it.
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
        illegal_events: IllegalEvents,
        command: Sequence[str] = COMMAND,
        timeouts: SupervisorTimeouts | None = None,
    ) -> None:
        self._settings = settings
        self._on_change = on_change
        self._log = EngineLog(log_file)
        self._scratch = scratch
        self._illegal_events = illegal_events
        self._command = command
        self._timeouts = timeouts or SupervisorTimeouts()
        self._life = EngineLife(preloads=bool(settings.models.preload))
        self._child: EngineChild | None = None
        self._quarantine = Quarantine()
        self._requests = OpenRequests(on_frame)
        self._stopping = asyncio.Event()
        self._wired = WiredCheck(wired, self._timeouts, self._stopping)
        self._restart_delay = 0.0
        self._task: asyncio.Task[None] | None = None
        self.probe = EngineProbe(lambda: self._child, self._timeouts)
        """Readings of the current child."""
        self.reports = EngineReports()
        """Reports of the current child."""
        self.orders = EngineOrders(self._write)
        """Orders to the engine about its memory."""

    @property
    def state(self) -> EngineState:
        """State of the engine for the node's report, with the cause of the last end and the number of restarts."""
        life, engine = self._life, self._settings.engine
        report = self.reports.latest or _NO_REPORT
        return EngineState(
            kind=engine.kind,
            state=life.stage.value,
            cause=life.cause,
            restarts=life.restarts,
            recycles=life.recycles,
            rows=engine.mlx.max_batch_size if engine.kind == "mlx" else engine.scripted.max_batch_size,
            leaked=self._wired.leaked_bytes,
            running=report.running,
            waiting=report.waiting,
            queued_tokens=report.queued_tokens,
            counts=report.counts,
            cache=report.cache,
            wired=report.wired,
        )

    @property
    def live(self) -> frozenset[int]:
        """Numbers of the open requests: sent to the engine, and neither ended nor cancelled."""
        return self._requests.numbers

    @property
    def child(self) -> EngineChild | None:
        """Current child; None while none runs."""
        return self._child

    @property
    def pid(self) -> int | None:
        """Process id of the current child; None without a child."""
        return self._child.process.pid if self._child else None

    @property
    def ready(self) -> int | None:
        """Process id of the current child if it has limits in force and accepts requests, else None."""
        return self.pid if self._life.child is not None and self._life.child.ready else None

    @property
    def resting(self) -> bool:
        """Whether the engine was asked to hold no memory."""
        return self._life.resting

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warning about wired memory that ended engines leaked, with the remedy; empty without a leak."""
        return (self._wired.warning,) if self._wired.warning else ()

    async def start(self) -> None:
        """Start the first child, and keep one running until `stop`. Raise `OSError` if the log cannot be opened."""
        os.close(self._log.open())
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the child within `SupervisorTimeouts.stopping` seconds, and start no other. Fail all open requests."""
        self._stopping.set()
        if self._task is not None:
            self._apply(lifecycle.StopRequested())
            await self._task

    def send(self, encoded: bytes, kind: type[Frame], request: int) -> None:
        """Forward an encoded frame of type `kind` about `request` to the engine.

        A request that the engine cannot accept now is refused at once through `on_frame`. Other frames are discarded
        without an engine.
        """
        child, life = self._child, self._life.child
        if kind in _BEGINS:
            ready = child is not None and life is not None and life.ready
            if child is None or not ready or child.count_unsent_bytes() > MAX_UNSENT_BYTES:
                self._requests.refuse(request, lifecycle.refuse_not_ready(self._life, self._timeouts))
                return
            self._requests.add(request)
        elif kind is Cancel:
            self._requests.remove(request)
        if child is not None:
            child.write(encoded)

    def end(self, cause: str) -> None:
        """End the current child, if any, because it exceeds cap − leases. Another child starts as after a crash."""
        if self._child is not None:
            self._apply(lifecycle.CapExceeded(cause))

    def release_memory(self) -> None:
        """Release all memory of the engine. Until `wake`, a new child preloads and restores no models.

        A child that has loaded a model, or has models to load, is replaced by one without models. Its requests fail.
        """
        self._apply(lifecycle.RestRequested())

    def wake(self) -> None:
        """Allow model loads again after `release_memory`, and replace the child if there are models to preload."""
        self._apply(lifecycle.WakeRequested())

    # lifecycle of the child

    def _apply(self, event: lifecycle.Event) -> None:
        """Apply an event and perform its actions. An illegal event is logged and changes nothing."""
        try:
            self._life, actions = lifecycle.step(self._life, event, self._timeouts)
        except IllegalEventError as error:
            self._illegal_events.record("engine process", error)
            return
        for action in actions:
            match action:
                case EndChild():
                    if self._child is not None and self._life.child is not None:
                        self._child.end(action.urgency, self._timeouts, self._life.child.cause)
                case WaitForRestart():
                    self._restart_delay = action.delay
                case StateChanged():
                    self._on_change()

    async def _run(self) -> None:
        """Start and serve one child after another until stopped."""
        while not self._stopping.is_set():
            self._apply(lifecycle.StartDue())
            wired = self._wired.begin()
            await self._run_child(wired)
            if self._stopping.is_set():
                return
            if await self._wired.compare(wired):
                self._on_change()
            if self._wired.is_exceeded:
                self._apply(lifecycle.LeaksExceeded(f"the engine is not restarted: {self._wired.warning}"))
                await self._wired.wait_returned()
            await self._wired.wait_stopped(self._restart_delay)

    async def _run_child(self, wired: WiredReadings) -> None:
        """Run one child from start to death, and end its open requests."""
        log_size = self._log.measure_size()
        try:
            self._child = child = await self._start_child(wired)
        except OSError as error:
            self._apply_exit(f"the engine could not be started: {error}", None, healthy=False)
            return
        watch = asyncio.create_task(self._watch(child))
        record = None
        try:
            await child.closed.wait()
            if not await child.wait_exit(EXIT_AFTER_CLOSE_SECONDS):
                self._apply(lifecycle.SocketClosed())
                await child.process.wait()
        finally:
            watch.cancel()
            life = self._life.child
            record = child.release(hung=life is not None and life.hung)
            self._child = None
            self.reports.clear()
        if life is not None and life.recycled:
            self._apply_exit(life.cause, None, healthy=True)
            return
        cause = (life.cause if life is not None else "") or _describe_death(
            child.process.returncode, self._log.read_tail(log_size)
        )
        healthy = time.monotonic() - child.started >= self._timeouts.healthy
        if record is not None and not self._stopping.is_set():
            cause += self._quarantine.describe_crash(record.doing.name.lower(), record.model, time.monotonic())
        self._apply_exit(cause, record, healthy=healthy)

    def _apply_exit(self, cause: str, record: CrashRecord | None, *, healthy: bool) -> None:
        """End the open requests of an ended child, and apply its end. `record` is the native call in which it died."""
        self._requests.fail_all(cause, record, stopping=self._stopping.is_set())
        before = self._life.restarts
        self._apply(lifecycle.ChildExited(cause, healthy))
        if self._life.restarts > before:
            log.warning("engine", cause=cause, restart_in=self._restart_delay)

    async def _start_child(self, wired: WiredReadings) -> EngineChild:
        """Start a child. Send it settings, models to load again, quarantined models and limits, in this order.

        The child loads no model before it has limits. Raise `OSError` if the program cannot be started.
        """
        engine = self._settings.engine
        blas = engine.mlx.blas if engine.kind == "mlx" else "bundled"
        child = await start_child(
            ChildCommand(self._command, build_engine_environment(os.environ, self._scratch, blas)),
            self._log,
            wired,
            on_frame=self._receive,
            on_fault=lambda cause: self._apply(lifecycle.ProtocolViolated(cause)),
        )
        self._child = child
        models, bans = self._settings.models, self._quarantine.list_bans(time.monotonic())
        if self._life.resting:  # a rest may have begun or ended during the start
            models = replace(models, preload=())
        child.write(encode_settings(replace(self._settings, models=models)))
        self._apply(lifecycle.ChildStarted(frozenset(ban.model for ban in bans)))
        if self._life.models or bans:
            child.write(encode(RestoreModels(tuple(sorted(self._life.models)), bans)))
        self.orders.resend_limits()
        return child

    async def _watch(self, child: EngineChild) -> None:
        """Ping the child, and end it when it hangs."""
        while not child.stop_requested:
            now = time.monotonic()
            self._log.bound()
            self._wired.observe(child.wired)
            silence = child.measure_silence(now)
            if silence > self._timeouts.silence:
                self._apply(lifecycle.ChildHung(f"no answer to a ping for {silence:.0f} s"))
                return
            child.ping(now)
            if self._requests:
                await asyncio.sleep(self._timeouts.ping_busy)
            else:
                await self._requests.wait_added(self._timeouts.ping_idle)

    def _write(self, encoded: bytes) -> None:
        """Send an encoded frame to the child. Discard the frame if there is no child."""
        if self._child is not None:
            self._child.write(encoded)

    def _receive(self, tag: int, body: bytes) -> None:
        """Process or forward one frame of the child. Raise `WireError` for an invalid frame."""
        kind = TAGS.get(tag)
        if kind is Deltas:
            self._requests.forward_deltas(tag, body)
        elif kind in (Admitted, Vectors, *ENDS):
            self._requests.forward_answer(kind, tag, body)
        else:
            frame = decode(tag, body)
            if isinstance(frame, EngineReport):
                self._receive_report(frame)
            elif isinstance(frame, Pong):
                self._receive_pong(frame)

    def _receive_report(self, report: EngineReport) -> None:
        self.reports.store(report, time.monotonic())
        if self._child is not None:
            self._child.wired.observe_weights(sum_weights(report))
        before = self._life.recycles
        busy = bool(self._requests or report.running or report.waiting)
        self._apply(lifecycle.make_report_event(report, busy=busy))
        if self._life.recycles > before:
            log.warning(
                "recycled",
                unreturned=show_size(report.unreturned),
                phys=show_size(report.memory.phys),
                base=show_size(report.memory.base),
            )

    def _receive_pong(self, pong: Pong) -> None:
        child = self._child
        if child is None:
            return
        child.store_pong(pong, time.monotonic())
        if not child.stop_requested and self._timeouts.is_hung(pong.busy, pong.expected):
            cause = f"one call has taken {pong.busy:.0f} s, expected {pong.expected:.2f} s"
            self._apply(lifecycle.ChildHung(cause))


def _describe_death(code: int | None, tail: str) -> str:
    """Describe a death in a sentence: the signal or the exit code, and `tail`, the last lines of the log."""
    text = f"the engine process {describe_exit(code)}"
    return f"{text}: {tail}" if tail else text
