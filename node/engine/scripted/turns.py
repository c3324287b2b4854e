"""Turns of the scripted engine: one decode step of all rows and one prefill each, as a function of time. Pure.

The same turns run under a real clock (`node.engine.process.loop`) and under a virtual clock (`simulation`). A turn
begins with its choices, and its results take effect at its end. Its duration is the sum of the durations of its
forwards (`EngineCosts`). A turn begins at the time at which the last turn was due to end, so that delays do not add up.
After a sleep of the machine (`MAX_LATE_SECONDS`), it begins at once.

With `leap`, equal turns are computed at once: turns in which no row ends or grows, no prompt is complete, and no choice
differs. The results equal the results of single turns, which a property test checks.
"""

import math
from typing import NamedTuple

from node.engine.scripted.batch import ScriptedBatch
from node.engine.scripted.costs import EngineCosts
from node.engine.scripted.preemption import ScriptedPreemptor
from node.engine.scripted.prefills import PrefillChunk, ScriptedPrefills
from node.engine.scripted.sequence import ScriptedSequence
from node.engine.scripted.table import ScriptedTable
from wire.frames import Frame

MAX_LATE_SECONDS = 1.0
"""Delay in seconds above which the next turn begins now instead of at the end of the last turn, because the machine
slept."""


class RunningTurns(NamedTuple):
    """Turn in progress, or with `leap` several equal turns, some of which may already have ended."""

    began: float
    """Monotonic time at which the first turn began."""
    turns: int
    """Number of turns."""
    done: int
    """Number of turns whose results are recorded."""
    decodes: bool
    """Whether rows decode in these turns. This does not follow from `step`, because a decode step may take 0 s."""
    step: float
    """Seconds of a decode step; 0 if no row decodes or steps take no time."""
    chunks: tuple[PrefillChunk, ...]
    """Prefills of the turns, which alternate; empty without a prefill."""

    def compute_seconds(self, turns: int) -> float:
        """Return the duration of the first `turns` turns in seconds."""
        period = len(self.chunks)
        if not period:
            return turns * self.step
        rounds, rest = divmod(turns, period)
        whole = sum(chunk.seconds for chunk in self.chunks)
        return turns * self.step + rounds * whole + sum(chunk.seconds for chunk in self.chunks[:rest])

    def compute_end(self) -> float:
        """Return the monotonic time at which the last turn ends."""
        return self.began + self.compute_seconds(self.turns)

    def count_completed(self, now: float) -> int:
        """Return how many of the turns except the last have ended at the monotonic time `now`; at least `done`. The
        last turn is not counted, because `ScriptedTurns.step` records it."""
        period = max(1, len(self.chunks))
        whole = self.compute_seconds(period)
        turns = period * int((now - self.began) / whole) if whole else 0
        turns = max(self.done, min(turns, self.turns - 1))
        while turns < self.turns - 1 and self.began + self.compute_seconds(turns + 1) <= now:
            turns += 1
        while turns > self.done and self.began + self.compute_seconds(turns) > now:
            turns -= 1
        return turns


class ScriptedTurns:
    """Turns of one scripted engine (see the module's docstring). All times are monotonic, in seconds."""

    def __init__(
        self,
        table: ScriptedTable,
        batch: ScriptedBatch,
        preemptor: ScriptedPreemptor,
        prefills: ScriptedPrefills,
        costs: EngineCosts,
        *,
        leap: bool,
    ) -> None:
        self._table = table
        self._batch = batch
        self._preemptor = preemptor
        self._prefills = prefills
        self._costs = costs
        self._leap = leap
        self._running: RunningTurns | None = None

    def step(self, now: float) -> list[Frame]:
        """Record the running turns if they have ended, then begin the next turns. Return the frames to send.

        A prefill that takes no time is performed at once, even within a running turn.
        """
        frames: list[Frame] = []
        at = now
        running = self._running
        if running is not None and now >= running.compute_end():
            frames += self._record(running, running.turns - running.done, now)
            self._running = None
            late = now - running.compute_end() > MAX_LATE_SECONDS
            at = now if late else running.compute_end()
        following = self._prefills.next_free(now)
        if following is not None:
            frames += self._prefill_free(following, now)
        if self._running is None:
            frames += self._begin(at)
        return frames

    def next_at(self, now: float) -> float | None:
        """Return the monotonic time at which `step` is next due; None if the next step needs a new request first."""
        if self._prefills.next_free(now) is not None:
            return now
        if self._running is not None:
            return self._running.compute_end()
        choices = [] if self._costs.free_prefill else self._prefills.list_choices(now)
        if choices or self._table.rows:
            return max(now, self._prefills.compute_packing_time(choices)) if choices else now
        waiting = [request.retry_at for request in self._table.queue]
        if self._table.preempted:
            waiting.append(self._preemptor.return_at)
        return max(now, min(waiting)) if waiting else None

    def interrupt(self, now: float) -> list[Frame]:
        """Record the turns that have ended at the monotonic time `now`, and make the turn in progress the last of the
        running turns. Must be called before requests or memory change. Return the frames to send."""
        frames = self.catch_up(now)
        if self._running is not None and self._running.turns > self._running.done + 1:
            self._running = self._running._replace(turns=self._running.done + 1)
        return frames

    def catch_up(self, now: float) -> list[Frame]:
        """Record the turns that have ended at the monotonic time `now`, except the last of the running turns, which
        `step` records. Return the frames to send."""
        running = self._running
        if running is None or running.turns == running.done + 1:
            return []
        turns = running.count_completed(now)
        frames = self._record(running, turns - running.done, now)
        if turns:
            for chunk in running.chunks[1:]:
                chunk.start()
        self._running = running._replace(done=turns)
        return frames

    def _record(self, running: RunningTurns, turns: int, now: float) -> list[Frame]:
        """Record the next `turns` of the running turns."""
        frames: list[Frame] = []
        if not turns:
            return frames
        if running.decodes:
            frames += self._batch.decode(turns, now)
        period = len(running.chunks)
        for place, chunk in enumerate(running.chunks):
            count = len(range((place - running.done) % period, turns, period))
            if count:
                frames += self._batch.end_prefill(chunk, count, now)
        if period:
            self._prefills.count_turns(turns)
        return frames

    def _prefill_free(self, sequence: ScriptedSequence, now: float) -> list[Frame]:
        """Prefill a prompt in no time."""
        chunk = PrefillChunk((sequence,), sequence.left, 0.0)
        if not self._batch.has_room(chunk, now):
            return self._preemptor.drain_ends()
        chunk.start()
        return self._batch.end_prefill(chunk, 1, now)

    def _begin(self, at: float) -> list[Frame]:
        """Make the choices of the next turn, and begin it if there is work."""
        self._preemptor.return_next(at)
        self._share_rows()
        frames = self._batch.grow(at)
        step = self._costs.estimate_step_seconds(self._table.compute_loads()) if self._table.rows else 0.0
        chunks, turns = self._begin_prefill(at, step)
        frames += self._preemptor.drain_ends()
        decodes = bool(self._table.rows)
        if not decodes and not chunks:
            return frames
        running = RunningTurns(at, turns, 0, decodes, step if decodes else 0.0, chunks)
        self._running = running._replace(turns=self._count_equal(running, at) if self._leap else 1)
        return frames

    def _begin_prefill(self, at: float, step: float) -> tuple[tuple[PrefillChunk, ...], int]:
        """Choose the prefills of the next turns. Return them, and the number of turns in which they alternate."""
        if self._costs.free_prefill:
            return (), 1
        choices = self._prefills.list_choices(at)
        if not choices or at < self._prefills.compute_packing_time(choices):
            return (), 1
        chunks, turns = self._prefills.schedule(choices, step, leap=self._leap)
        if not self._batch.has_room(chunks[0], at):
            return (), 1
        chunks[0].start()
        if not all(self._batch.has_room(chunk, at) for chunk in chunks[1:]):
            return (chunks[0],), 1
        return tuple(chunks), turns

    def _share_rows(self) -> None:
        """Preempt requests of the key that holds the most rows for the next request of a key that holds fewer."""
        if (
            len({request.weighted_key.name for request in self._table.queue}) == 0
            or self._table.count_free_rows() >= self._table.most
        ):
            return
        first = self._prefills.next_unstarted()
        if first is not None and not first.retry_at:
            self._preemptor.share_rows(first)

    def _count_equal(self, running: RunningTurns, at: float) -> int:
        """Return the number of equal turns, starting with the turn that begins now."""
        turns = running.turns if running.chunks else math.inf
        if running.decodes:
            turns = min(turns, self._batch.count_steady_steps())
        waits = [request.retry_at for request in self._table.queue if request.retry_at > at]
        if self._table.preempted:
            waits.append(max(at, self._preemptor.return_at))
        if waits:
            turns = min(turns, running._replace(turns=int(turns) + 1).count_completed(min(waits)) + 1)
        return max(1, int(turns))
