"""The inference thread: the one owner of an engine. Frames come in through `put`, go out through `send`.

One turn: drain the inbox, one decode step of every row, at most one gated prefill, publish. When nothing is due it
waits on a condition and does not wake. Before every call into the engine it publishes since when and for how long it
expects to be busy, so that the I/O thread can answer for it: dead, busy and hung are three things.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from node.engine.kinds import Engine
from wire.frames import EngineReport, Frame, Limits

PUBLISH_EVERY = 0.1
"""Seconds between two published snapshots at least."""

log = structlog.get_logger("engine")


class Loop:
    """Runs an engine on the thread that calls `run`."""

    def __init__(self, engine: Engine, send: Callable[[Frame], None]) -> None:
        self._engine = engine
        self._send = send
        self._inbox: deque[Frame] = deque()
        self._wake = threading.Condition()
        self._stopped = False
        self._busy_since: float | None = None
        self._published: EngineReport | None = None
        self._publish_at: float | None = 0.0
        self._published_at = 0.0
        self._guard: dict[str, object] = {}

    def put(self, frame: Frame) -> None:
        """Hand in a frame from another thread."""
        with self._wake:
            self._inbox.append(frame)
            self._wake.notify()

    def stop(self) -> None:
        """Let `run` return after its turn."""
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def busy(self, now: float) -> tuple[float, float]:
        """Give for how many seconds the present turn lasts already (0: resting) and how many were expected."""
        since = self._busy_since
        return (0.0, 0.0) if since is None else (max(0.0, now - since), self._engine.expected())

    def run(self) -> None:
        """Serve until stopped."""
        while not self._stopped:
            frames = self._next()
            self._busy_since = time.monotonic()
            self._turn(frames)
            self._busy_since = None

    def _next(self) -> Sequence[Frame]:
        """Wait until a frame is here or something is due."""
        with self._wake:
            while not self._inbox and not self._stopped:
                now = time.monotonic()
                due = self._due(now)
                if due is not None and due <= now:
                    break
                self._wake.wait(None if due is None else due - now)
            frames = list(self._inbox)
            self._inbox.clear()
        return frames

    def _due(self, now: float) -> float | None:
        times = [when for when in (self._engine.due(now), self._publish_at) if when is not None]
        return min(times, default=None)

    def _turn(self, frames: Sequence[Frame]) -> None:
        now = time.monotonic()
        for frame in frames:
            self._answer(self._engine.take(frame, now))
            if isinstance(frame, Limits):
                self._log_guard()
        due = self._engine.due(now)
        worked = due is not None and due <= now
        if worked:
            self._answer(self._engine.step(now))
        if (frames or worked) and self._publish_at is None:
            self._publish_at = max(now, self._published_at + PUBLISH_EVERY)
        if self._publish_at is not None and now >= self._publish_at:
            self._publish(now)

    def _answer(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self._send(frame)

    def _publish(self, now: float) -> None:
        """Send a snapshot, unless the last one said the same."""
        self._publish_at, self._published_at = None, now
        report = self._engine.report(now)
        if report != self._published:
            self._published = report
            self._send(report)

    def _log_guard(self) -> None:
        """Say what the guard resolved to, once for every change."""
        guard = self._engine.gate.describe()
        if guard == self._guard:
            return
        self._guard = guard
        if guard["state"] == "on" and guard["margin"]:
            log.info("gate", **guard)
        else:
            log.warning("gate", **guard)
