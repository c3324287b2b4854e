"""Inference thread of an engine: frames arrive through `put` and leave through `send`.

Only this thread calls `handle` and `step` of the engine. The I/O thread, the main thread of the process, tokenizes
short prompts. Two prompt threads tokenize all other prompts, after the engine has found room for them. One of the two
handles only long texts.

When no work is due, the thread waits on a condition without periodic wake-ups. The engine publishes the start and the
expected duration of every native call before the call. The I/O thread puts the elapsed and the expected seconds into
its answers to pings. The agent can therefore distinguish a busy engine from a hung engine.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import structlog

from node.engine.process.crash_recorder import CrashRecord
from node.engine.process.interface import Engine, Halted, Work
from node.engine.requests.tokenize_admission import UntokenizedPrompt
from node.engine.requests.tokenize_queue import TokenizeQueue
from wire.frames import Admitted, Cancel, EngineReport, Failed, Finished, Frame, LoadModel, Refusal, UnloadModel

MIN_REPORT_INTERVAL_SECONDS = 0.1
"""Minimum seconds from the last report to a report because of a frame from the agent. The end of a load or unload is
reported at once."""
STEP_REPORT_INTERVAL_SECONDS = 0.25
"""Minimum seconds between reports while the engine only makes steps, because each report costs CPU in the agent."""
MAX_HELD_SECONDS = 0.02
"""Maximum seconds for which an `Admitted` frame waits for other frames, so that one write sends them all."""

TOKENIZE_EXPECTED_SECONDS = 60.0
"""Expected duration of tokenizing a prompt, in seconds: 8 MB take 9 s on an idle machine."""
TOKENIZE_TIMEOUT_SECONDS = 5 * TOKENIZE_EXPECTED_SECONDS
"""Seconds after which the tokenization of a prompt counts as hung. The factor on the expected seconds is the default of
`node.engine_process.timeouts.SupervisorTimeouts.turn_factor`."""

log = structlog.get_logger("engine")


class EngineLoop:
    """Loop that drives an engine on the thread that calls `run`.

    `send(frames)` sends frames to the agent in one write. `oldest_tokenization()` returns the record of the
    tokenization that has been running for the longest time; None if none is running.
    """

    def __init__(
        self,
        engine: Engine,
        send: Callable[[Sequence[Frame]], None],
        oldest_tokenization: Callable[[], CrashRecord | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._send = send
        self._oldest_tokenization = oldest_tokenization
        self._inbox: deque[Work] = deque()
        self._wake = threading.Condition()
        self._stopped = False
        self._busy_since: float | None = None
        self._published: EngineReport | None = None
        self._publish_at: float | None = 0.0
        self._published_at = 0.0
        self._guard: dict[str, object] = {}
        self._commands: set[int] = set()
        """Requests of open loads and unloads."""
        self._published_loads = 0
        self._held: list[Frame] = []
        """`Admitted` frames that leave with the next other frame, before the next step, or at `_held_until`."""
        self._held_until = 0.0
        self._prompts, self._long_prompts = TokenizeQueue(), TokenizeQueue()

    def put(self, work: Work) -> None:
        """Enqueue work for the inference thread. Any thread may call this."""
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def stop(self) -> None:
        """Halt the engine. `run` returns when the native call in progress has returned. Any thread may call this."""
        self._engine.halt()
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def measure_busy_seconds(self, now: float) -> tuple[float, float]:
        """Return the duration so far and the expected duration of the running native call, in seconds.

        Between native calls, return the duration of the iteration so far and 0; while idle, zeros. If the tokenization
        of a prompt takes more than `TOKENIZE_TIMEOUT_SECONDS`, return its duration and `TOKENIZE_EXPECTED_SECONDS`
        instead. `now` is the monotonic time in seconds. Any thread may call this.
        """
        read = self._oldest_tokenization()
        if read is not None and now - read.since > TOKENIZE_TIMEOUT_SECONDS:
            return now - read.since, TOKENIZE_EXPECTED_SECONDS
        call, turn = self._engine.read_running_call(), self._busy_since
        if call is not None:
            return max(0.0, now - call.since), call.expected
        return (0.0, 0.0) if turn is None else (max(0.0, now - turn), 0.0)

    def run(self) -> None:
        """Handle work and run steps on the calling thread, until `stop`. Exceptions of the engine propagate, except
        `Halted`."""
        while True:
            work = self._wait_for_work()
            if self._stopped:
                return
            self._busy_since = time.monotonic()
            try:
                self._run_iteration(work)
            except Halted:
                return
            self._busy_since = None

    def tokenize_prompts(self) -> None:
        """Tokenize admitted prompts that are not long, one after the other, on the calling thread. Enqueue each result
        for the inference thread. Never return."""
        while True:
            self.put(self._prompts.get().tokenize())

    def tokenize_long_prompts(self) -> None:
        """Tokenize admitted long texts, one after the other, on the calling thread. Never return."""
        while True:
            self.put(self._long_prompts.get().tokenize())

    def _wait_for_work(self) -> Sequence[Work]:
        """Wait until work arrives or is due. Return the work that has arrived."""
        with self._wake:
            while not self._inbox and not self._stopped:
                now = time.monotonic()
                due = self._find_due_time(now)
                if due is not None and due <= now:
                    break
                self._wake.wait(None if due is None else due - now)
            work = list(self._inbox)
            self._inbox.clear()
        return work

    def _find_due_time(self, now: float) -> float | None:
        held_until = self._held_until if self._held else None
        times = (self._engine.next_step_at(now), self._publish_at, held_until)
        return min((when for when in times if when is not None), default=None)

    def _run_iteration(self, work: Sequence[Work]) -> None:
        now = time.monotonic()
        for piece in work:
            self._note_command(piece)
            self._route(self._engine.handle(piece, now))
        due = self._engine.next_step_at(now)
        worked = due is not None and due <= now
        if worked or (self._held and now >= self._held_until):
            self._send_with_held(())
        if worked:
            for frames in self._engine.step(now):
                self._route(frames)
        if work:
            self._publish_by(max(now, self._published_at + MIN_REPORT_INTERVAL_SECONDS))
        elif worked:
            self._publish_by(max(now, self._published_at + STEP_REPORT_INTERVAL_SECONDS))
        if self._publish_at is not None and now >= self._publish_at:
            self._publish(now)

    def _note_command(self, piece: Work) -> None:
        if isinstance(piece, LoadModel | UnloadModel):
            self._commands.add(piece.request)
        elif isinstance(piece, Cancel):
            self._commands.discard(piece.request)

    def _route(self, answers: Iterable[Frame | UntokenizedPrompt]) -> None:
        """Send frames together, and queue prompts for the tokenizers.

        A report precedes the answers after a load, and the end of an unload. A client that has the answer therefore
        sees the new models.
        """
        if self._engine.loads != self._published_loads:
            self._publish(time.monotonic())
        frames: list[Frame] = []
        for answer in answers:
            if isinstance(answer, UntokenizedPrompt):
                (self._long_prompts if answer.is_long else self._prompts).put(answer)
                continue
            if isinstance(answer, Finished | Refusal | Failed) and answer.request in self._commands:
                self._commands.discard(answer.request)
                self._publish(time.monotonic())
            frames.append(answer)
        if all(isinstance(frame, Admitted) for frame in frames):
            self._hold(frames)
        else:
            self._send_with_held(frames)

    def _hold(self, frames: Sequence[Frame]) -> None:
        """Keep frames that are not urgent, because each write wakes the agent, which costs more than the frames."""
        if frames and not self._held:
            self._held_until = time.monotonic() + MAX_HELD_SECONDS
        self._held += frames

    def _send_with_held(self, frames: Sequence[Frame]) -> None:
        """Send the held frames and `frames` together; nothing if there are none."""
        together, self._held = [*self._held, *frames], []
        if together:
            self._send(together)

    def _publish_by(self, due: float) -> None:
        """Schedule a report at `due`, in seconds of the monotonic clock, or earlier if one is scheduled."""
        self._publish_at = due if self._publish_at is None else min(due, self._publish_at)

    def _publish(self, now: float) -> None:
        """Send a report, unless it equals the last one."""
        self._publish_at, self._published_at, self._published_loads = None, now, self._engine.loads
        self._log_guard()
        report = self._engine.report(now)
        if report != self._published:
            self._published = report
            self._send_with_held((report,))

    def _log_guard(self) -> None:
        """Log the guard's resolved settings once per change: after new limits, and when profiles change."""
        guard = self._engine.gate.describe()
        if guard["state"] == "closed" or guard == self._guard:
            return
        self._guard = guard
        if guard["state"] == "on" and guard["margin"]:
            log.info("gate", **guard)
        else:
            log.warning("gate", **guard)
