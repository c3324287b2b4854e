"""The way to every forward: the gate on readings of this moment, and the call published before it begins.

`ask` is the only way to the gate once a request is admitted, `native` the only way into MLX. What they did is counted,
so that a test, or a person, can see from outside that nothing ran.

The first call for a model after its load or after a rest is expected to take as long as reading the weights again
would, beside its own time: macOS unwires Metal memory that rests and may have paged it out by then.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import structlog

from host.sleep_watch import system_clocks
from node.engine.memory.footprint import Footprint, Height, clear_pool
from node.engine.memory.gate import Gate, Site
from node.engine.process.interface import Call, Doing, Halted, Recording
from wire.capacity.arithmetic import excess, shed
from wire.refusals import Code, Refused
from wire.report import Counts, Memory
from wire.units import MIB, show_size

REST = 1.0
"""Seconds after which macOS unwires the memory of a process whose GPU work rests. Measured: llama.cpp#10119 on macOS 15
(a pause of 1.2 s made the next step five times slower), llama.cpp#17766 on macOS 26."""

LOAD_SPEED = 200 * MIB
"""Bytes per second that a load should reach at least (an external disk)."""

log = structlog.get_logger("engine.forwards")


class Forwards:
    """`reserved()` returns the bytes promised and not written. `make_room(site, bytes)` frees what can be freed and
    returns whether that was enough; `give_up_load(why)` aborts a load under way and returns whether there was one.
    `read(model)` returns the bytes of its weights that are in memory.
    `clock()` returns seconds and also runs while the machine sleeps."""

    def __init__(
        self,
        recorder: Recording,
        footprint: Footprint,
        reserved: Callable[[], int],
        make_room: Callable[[Site, int], bool],
        give_up_load: Callable[[Refused], bool],
        residual: Callable[[], int | None] = lambda: None,
        *,
        read: Callable[[str], int],
        gate: type[Gate] = Gate,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.gate = gate(residual)
        self.call: Call | None = None
        self.failures = self.sheds = self.shrinks = self.preemptions = self.overs = 0
        self.height = Height()
        self._recorder = recorder
        self._footprint = footprint
        self._reserved = reserved
        self._make_room = make_room
        self._give_up_load = give_up_load
        self._forwards = self._steps = 0
        self._asked: tuple[Site, int, Memory] | None = None
        self._read = read
        self._clock = clock or system_clocks()[0]
        self._used: dict[str, float] = {}
        """When each model's last call ended."""
        self._waited: Counter[str] = Counter()
        """Calls since each model's load or rest, up to the one that waited for a forward."""
        self.halted = False
        """Whether no further native call may begin; set by any thread."""

    def memory(self, now: float) -> Memory:
        """Read now."""
        return self._footprint.judged(self.gate, self._reserved(), now)

    def ask(self, site: Site, estimate: int) -> Refused | None:
        """Ask the gate on a reading of this moment; before a no, give back what can be given, and ask once more."""
        answer = self._check(site, estimate)
        if answer is not None and answer.code is Code.NO_ROOM and self._make_room(site, estimate):
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
        """After a forward, return the refusal for the request that has to end because the engine is over its cap; None
        when it is not. A load under way is given up before any request."""
        memory = self.memory(time.monotonic())
        if not memory.guard or excess(memory) <= 0:
            return None
        self.overs += 1
        if self._give_up_load(shed(memory, excess(memory))):
            memory = self.memory(time.monotonic())
            if excess(memory) <= 0:
                return None
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
        """Publish and count a native call for as long as it lasts; `expected` in seconds, of weights that are wired.
        Raises Halted where none may begin."""
        if self.halted:
            raise Halted
        self._forwards += doing in (Doing.PREFILL, Doing.JOIN)
        self._steps += doing is Doing.DECODE
        self._recorder.begin(doing, model, request)
        self.height.mark()
        try:
            with self.waits(doing, model, expected) as call:
                yield call
        finally:
            self._recorder.end()
            # The forward of a prefill has ended by then, that of a decode step is waited for in the call after it.
            self._waited[model] += 2 if doing is Doing.PREFILL else 1
            self._used[model] = 0.0 if doing is Doing.LOAD else self._clock()
            if doing in (Doing.PREFILL, Doing.JOIN):
                self.gate.transient.observe(self.height.above())

    @contextmanager
    def waits(self, doing: Doing, model: str, expected: float) -> Generator[Call]:
        """Publish a call, or the wait for what one has launched, and how long it should last."""
        self.call = call = Call(doing.name.lower(), time.monotonic(), expected + self._rewiring(model))
        try:
            yield call
        finally:
            self.call = None

    def _rewiring(self, model: str) -> float:
        """Return the seconds that it may take to read a model's weights again; 0 once a forward has used them."""
        if self._clock() - self._used.get(model, 0.0) > REST:
            self._waited[model] = 0
        return self._read(model) / LOAD_SPEED if self._waited[model] < 2 else 0.0

    def counts(self) -> Counts:
        """Say what was asked, refused and done so far."""
        return Counts(
            self.gate.checks.total(), self.gate.refusals.total(), self._forwards, self._steps, self.failures,
            sheds=self.sheds, shrinks=self.shrinks, preemptions=self.preemptions, overs=self.overs,
        )  # fmt: skip
