"""Gate and record of every forward: check a fresh reading, then record the native call before it begins.

Only `GatedForwards` asks the gate about forwards of requests, and runs them in `run_native`. A probe asks the gate
about its own forwards (`node.engine.models.memory_probe`). Checks, forwards and steps are counted. A test can therefore
verify that no forward ran.

macOS unwires Metal memory that is not used, and may page it out. The first call for a model after its load or after a
pause may therefore have to read all weights again. The expected seconds of such a call include this time.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import structlog

from host.sleep_watch import system_clocks
from node.engine.memory.footprint import MlxPeakTracker, clear_buffers
from node.engine.memory.gate import GateSite
from node.engine.memory.memory_reader import MemoryReader
from node.engine.process.device_errors import DeviceLost, raise_if_device_lost
from node.engine.process.interface import CallRecording, Halted, NativeCall, NativeCallKind
from wire.capacity.arithmetic import build_shed_refusal, compute_excess
from wire.refusals import RefusalCode, Refused
from wire.report import EngineCounters, Memory
from wire.units import MIB, show_size

UNWIRE_AFTER_SECONDS = 1.0
"""Seconds without GPU work after which macOS unwires the memory of a process. Measured: llama.cpp#10119 on macOS 15 (a
pause of 1.2 s made the next step five times slower), llama.cpp#17766 on macOS 26."""

SETTLE_SECONDS = 0.5
"""Maximum seconds to wait for freed memory to leave the footprint. The engine generates no token during this wait."""
MIN_LOAD_BYTES_PER_SECOND = 200 * MIB
"""Lowest load speed to expect, in bytes per second: that of an external disk. Until a load was measured, loads are
expected to have this speed."""

_FORWARDS = frozenset({NativeCallKind.PREFILL, NativeCallKind.JOIN, NativeCallKind.EMBED})
"""Calls that are counted as forwards."""

log = structlog.get_logger("engine.forwards")


class GatedForwards:
    """Gated native calls of the engine.

    `recorder` records each call in memory that outlives a crash of the process. `memory` reads the memory and has the
    gate. `peak_tracker` measures MLX's peak.
    `free_memory(site, bytes)` frees memory and returns whether that was enough. `give_up_load(why)` aborts a load in
    progress and returns whether there was one. `weights(model)` returns the bytes of the model's weights in memory.
    `clock()` returns seconds and also runs while the machine sleeps; None: the clock of this system.

    `call` is the native call that runs, or the launched one that is awaited; None without one. `failures`, `sheds`,
    `shrinks` and `preemptions` are the counts of the `count_…` methods. `overs` counts readings above the cap after a
    forward (`check_cap`).
    """

    def __init__(
        self,
        recorder: CallRecording,
        memory: MemoryReader,
        peak_tracker: MlxPeakTracker,
        free_memory: Callable[[GateSite, int], bool],
        give_up_load: Callable[[Refused], bool],
        weights: Callable[[str], int],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.gate = memory.gate
        self.call: NativeCall | None = None
        self.failures = self.sheds = self.shrinks = self.preemptions = self.overs = 0
        self.peak_tracker = peak_tracker
        self._recorder = recorder
        self._reader = memory
        self._free_memory = free_memory
        self._give_up_load = give_up_load
        self._forwards = self._steps = self._prefill_tokens = 0
        self._returned_tokens = self._recomputed_tokens = 0
        self._last_check: tuple[GateSite, int, Memory] | None = None
        self._weights = weights
        self._clock = clock or system_clocks()[0]
        self._used: dict[str, float] = {}
        """Time by `clock` at which each model's last call ended; 0.0 after a piece of its load."""
        self._waited: Counter[str] = Counter()
        """Count of each model's calls since its load or last pause; a prefill or a forward for embeddings counts twice.
        From 2 on, a call has waited for a forward."""
        self.halted = False
        """Whether no further native call may begin; set by any thread."""

    def read_memory(self, now: float) -> Memory:
        """Read the memory at the monotonic time `now`, and count it in the recent peak (`MemoryReader.read`)."""
        return self._reader.read(now)

    def wait_until_settled(self) -> None:
        """Block for up to `SETTLE_SECONDS` until the footprint no longer contains freed memory."""
        self._reader.wait_until_settled(SETTLE_SECONDS)

    def check(self, site: GateSite, estimate: int) -> Refused | None:
        """Check `estimate` bytes against a fresh reading. Return the refusal; None if the bytes fit.

        Before a refusal for lack of memory, free memory. If that was enough, wait until the footprint has fallen
        (`wait_until_settled`), and check once more.
        """
        answer = self._check(site, estimate)
        if answer is not None and answer.code is RefusalCode.NO_ROOM and self._free_memory(site, estimate):
            self.wait_until_settled()
            return self._check(site, estimate)
        return answer

    def check_shrinking(self, site: GateSite, sizes: Iterable[int], estimate: Callable[[int], int]) -> int | Refused:
        """Return the first of `sizes` (largest first) whose estimate passes the gate, or the refusal of the last size.

        `sizes` must not be empty. `estimate(size)` returns the needed bytes. For a size before the last, only MLX's
        free buffers are freed (`check_optional`), and a refused size is counted (`count_shrink`). For the last size,
        all memory that can be freed is freed (`check`).
        """
        *larger, last = sizes
        for size in larger:
            if self.check_optional(site, estimate(size)):
                return size
            self.count_shrink()
        return self.check(site, estimate(last)) or last

    def check_optional(self, site: GateSite, estimate: int) -> bool:
        """Return whether `estimate` bytes pass the gate, for work that can be made smaller. To make room, free only
        MLX's free buffers, not cached prefixes or idle models."""
        if self._check(site, estimate) is None:
            return True
        clear_buffers()
        return self._check(site, estimate) is None

    def _check(self, site: GateSite, estimate: int) -> Refused | None:
        memory = self.read_memory(time.monotonic())
        answer = self.gate.check(site, memory, estimate)
        self._last_check = (site, estimate, memory)
        return answer if isinstance(answer, Refused) else None

    def check_cap(self) -> Refused | None:
        """Check the memory after a forward. If the engine is above cap − leases, return a refusal for the request that
        the caller then preempts or ends; else None.

        Above that limit, first abort a load in progress and read the memory again. Return None with the guard off, and
        if the engine is above the limit only by freed bytes that are still in the footprint.
        """
        memory = self.read_memory(time.monotonic())
        if not memory.guard or compute_excess(memory) <= 0 or compute_excess(self._reader.read_settled()) <= 0:
            return None
        self.overs += 1
        if self._give_up_load(build_shed_refusal(memory, compute_excess(memory))):
            memory = self.read_memory(time.monotonic())
            if compute_excess(memory) <= 0:
                return None
        if self._last_check is not None:
            site, estimate, before = self._last_check
            log.warning(
                "forward above cap",
                excess=show_size(compute_excess(memory)),
                asked=site.name.lower(),
                estimate=show_size(estimate),
                before=show_size(before.phys),
                now=show_size(memory.phys),
                active_before=show_size(before.active),
                active=show_size(memory.active),
                rose=show_size(self.peak_tracker.measure_peak_above_mark()),
                reserved=show_size(before.reserved),
                headroom=show_size(before.headroom),
                pool=show_size(memory.cache),
            )
        return build_shed_refusal(memory, compute_excess(memory))

    def find_peak_expiry(self) -> float | None:
        """Return the monotonic time at which the memory in use may fall without further work; None if none is known
        (`EngineMemory.find_peak_expiry`)."""
        return self._reader.find_peak_expiry(time.monotonic())

    @contextmanager
    def run_native(
        self, kind: NativeCallKind, model: str, request: int, expected: float, *, prefill_tokens: int = 0
    ) -> Generator[NativeCall]:
        """Run a native call as the context: record it for the case of a crash, set `call`, and measure its peak.

        Yield the call. Prefills, joins and forwards for embeddings count as forwards, and decode steps as steps. Other
        calls are not counted.

        `request` is the number of the request; 0 for several or none. `expected` is the duration in seconds with wired
        weights. `prefill_tokens` is the number of prompt tokens, without padding. Raise `Halted` at once after `halt`.
        Raise `DeviceLost` for a failed command buffer: the record of the call then stays, as after a crash.
        """
        if self.halted:
            raise Halted
        self._forwards += kind in _FORWARDS
        self._steps += kind is NativeCallKind.DECODE
        self._prefill_tokens += prefill_tokens
        self._recorder.begin(kind, model, request)
        self.peak_tracker.mark()
        try:
            with self.publish_wait(kind, model, expected) as call:
                yield call
        except Exception as error:
            raise_if_device_lost(error)
            raise
        finally:
            if not isinstance(sys.exception(), DeviceLost):
                self._recorder.end()
            # By then the forward of a prefill has ended. The forward of a decode step is awaited in the call after it.
            self._waited[model] += 2 if kind in (NativeCallKind.PREFILL, NativeCallKind.EMBED) else 1
            self._used[model] = 0.0 if kind is NativeCallKind.LOAD else self._clock()
            if kind in _FORWARDS:
                self.gate.transient.observe(self.peak_tracker.measure_peak_above_mark())

    @contextmanager
    def publish_wait(self, kind: NativeCallKind, model: str, expected: float) -> Generator[NativeCall]:
        """Set `call` while the context is open: to a native call, or to the wait for a launched call. Yield the call,
        which is not counted. `expected` is its duration in seconds with wired weights.
        """
        self.call = call = NativeCall(
            kind.name.lower(), time.monotonic(), expected + self._estimate_rewiring_seconds(model)
        )
        try:
            yield call
        finally:
            self.call = None

    def _estimate_rewiring_seconds(self, model: str) -> float:
        """Return the seconds that reading a model's weights again may take; 0 if a forward has used the weights since
        the last pause."""
        if self._clock() - self._used.get(model, 0.0) > UNWIRE_AFTER_SECONDS:
            self._waited[model] = 0
        return self._weights(model) / MIN_LOAD_BYTES_PER_SECOND if self._waited[model] < 2 else 0.0

    def halt(self) -> None:
        """Forbid further native calls: `run_native` raises `Halted`. Any thread may call this."""
        self.halted = True

    def count_shed(self) -> None:
        """Count a request that was ended because the engine was over its cap or was ordered to free memory."""
        self.sheds += 1

    def count_shrink(self) -> None:
        """Count a size of a forward that the gate refused, after which a smaller size is tried."""
        self.shrinks += 1

    def count_preemption(self) -> None:
        """Count a request that was preempted."""
        self.preemptions += 1

    def count_returned(self, tokens: int) -> None:
        """Count the tokens of a row that is prefilled again after its first join, because it was preempted or its batch
        broke."""
        self._returned_tokens += tokens

    def count_recomputed(self, tokens: int) -> None:
        """Count the tokens of returning rows (`count_returned`) that a forward computes again, because the prefix cache
        did not have them."""
        self._recomputed_tokens += tokens

    def count_failure(self, *, by_engine: bool) -> None:
        """Count a failed request. Do nothing unless the engine caused the failure (`by_engine`)."""
        self.failures += by_engine

    def get_counts(self) -> EngineCounters:
        """Return the counts since the engine started: checks, refusals, forwards, steps, failures, sheds, shrinks,
        preemptions, overs, and tokens that were prefilled, returned and computed again.

        `evictions` and `departures` are 0, because the model unloader counts them.
        """
        return EngineCounters(
            self.gate.checks.total(),
            self.gate.refusals.total(),
            self._forwards,
            self._steps,
            self.failures,
            sheds=self.sheds,
            shrinks=self.shrinks,
            preemptions=self.preemptions,
            overs=self.overs,
            prefill_tokens=self._prefill_tokens,
            returned_tokens=self._returned_tokens,
            recomputed_tokens=self._recomputed_tokens,
        )
