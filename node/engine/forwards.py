"""The way to every forward: the gate on readings of this moment, and the call published before it begins.

`ask` is the only way to the gate once a request is admitted, `native` the only way into MLX. What they did is counted,
so that a test, or a person, can see from outside that nothing ran.
"""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import structlog

from node.engine.footprint import Footprint, Height, clear_pool
from node.engine.gate import Gate, Site
from node.engine.kinds import Call, Doing, Recording
from wire.refusals import Code, Refused
from wire.report import Counts, Memory
from wire.units import show_size
from wire.verdict import excess, shed

log = structlog.get_logger("engine.forwards")


class Forwards:
    """`reserved()` gives the bytes promised and not written, `make_room(bytes)` frees what can be freed and says if
    that was enough."""

    def __init__(
        self,
        recorder: Recording,
        footprint: Footprint,
        reserved: Callable[[], int],
        make_room: Callable[[int], bool],
        residual: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.gate = Gate(residual)
        self.call: Call | None = None
        self.failures = self.sheds = self.shrinks = self.preemptions = self.overs = 0
        self.height = Height()
        self._recorder = recorder
        self._footprint = footprint
        self._reserved = reserved
        self._make_room = make_room
        self._forwards = self._steps = 0
        self._asked: tuple[Site, int, Memory] | None = None

    def memory(self, now: float) -> Memory:
        """Read now."""
        return self._footprint.judged(self.gate, self._reserved(), now)

    def ask(self, site: Site, estimate: int) -> Refused | None:
        """Ask the gate on a reading of this moment; before a no, give back what can be given, and ask once more."""
        answer = self._check(site, estimate)
        if answer is not None and answer.code is Code.NO_ROOM and self._make_room(estimate):
            return self._check(site, estimate)
        return answer

    def ask_shrinking(self, site: Site, sizes: Iterable[int], estimate: Callable[[int], int]) -> int | Refused:
        """Give the first of `sizes` whose estimate passes. Before a smaller one is tried only the pool is emptied; for
        the last of them all is given back that can be."""
        *larger, last = sizes
        for size in larger:
            if self.passes(site, estimate(size)):
                return size
            self.shrinks += 1
        return self.ask(site, estimate(last)) or last

    def passes(self, site: Site, estimate: int) -> bool:
        """Ask the gate, for what can be made smaller: nothing that is kept is given back for it, but for the pool."""
        if self._check(site, estimate) is None:
            return True
        clear_pool()
        return self._check(site, estimate) is None

    def _check(self, site: Site, estimate: int) -> Refused | None:
        memory = self.memory(time.monotonic())
        answer = self.gate.check(site, memory, estimate)
        self._asked = (site, estimate, memory)
        return answer if isinstance(answer, Refused) else None

    def over(self) -> Refused | None:
        """After a forward: say by how much the engine is over its cap, if the forecast was wrong; else None."""
        memory = self.memory(time.monotonic())
        if not memory.guard or excess(memory) <= 0:
            return None
        self.overs += 1
        if self._asked is not None:
            site, estimate, before = self._asked
            log.warning(
                "forward over", excess=show_size(excess(memory)), asked=site.name.lower(), estimate=show_size(estimate),
                before=show_size(before.phys), now=show_size(memory.phys), active_before=show_size(before.active),
                active=show_size(memory.active), rose=show_size(self.height.above()),
                reserved=show_size(before.reserved), headroom=show_size(before.headroom), pool=show_size(memory.cache),
            )  # fmt: skip
        return shed(memory, excess(memory))

    def falls_at(self) -> float | None:
        """Say when the recent height falls, if it still stands over the present reading."""
        return self._footprint.falls_at(time.monotonic())

    @contextmanager
    def native(self, doing: Doing, model: str, request: int, expected: float) -> Generator[Call]:
        """Publish a native call for as long as it lasts; `expected` in seconds."""
        call = Call(doing.name.lower(), time.monotonic(), expected)
        self._forwards += doing in (Doing.PREFILL, Doing.JOIN)
        self._steps += doing is Doing.DECODE
        self._recorder.begin(doing, model, request)
        self.height.mark()
        self.call = call
        try:
            yield call
        finally:
            self.call = None
            self._recorder.end()
            if doing in (Doing.PREFILL, Doing.JOIN):
                self.gate.transient.observe(self.height.above())

    def counts(self) -> Counts:
        """Say what was asked, refused and done so far."""
        return Counts(
            self.gate.checks.total(), self.gate.refusals.total(), self._forwards, self._steps, self.failures,
            sheds=self.sheds, shrinks=self.shrinks, preemptions=self.preemptions, overs=self.overs,
        )  # fmt: skip
