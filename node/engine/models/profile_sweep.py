"""Profile sweeps on order: measure one model at a time, one forward per iteration, while other rows continue to decode.

    Profile ─► queued ─► model loaded ─► forward by forward ─► check of the longest row ─► Finished, with measurements
                 └ the load fails: Refusal      └ memory is needed for requests: Refusal └ no length passes: Refusal

The forwards of a sweep use only free memory: the gate runs before each of them, and no cache is evicted. Only the check
of the longest row at the end may evict caches. No such check runs if a request uses the model or another is loaded.
The row of a sweep is released before any request is refused for memory.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.context_search import ContextSearchResult, describe_failed_search
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.memory_probe import CheckGate, MemoryProbe
from node.engine.models.model_stats import ModelHold
from node.engine.models.profiler import Profiler
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.process.interface import NativeCallKind
from wire.frames import Failed, Finished, Frame, Refusal
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import Model

EXPECTED_STEP_SECONDS = 10.0
"""Expected seconds of a step in addition to its forwards: to compile kernels."""
GIVEN_UP = "measuring {} was stopped, because requests need the memory: repeat it when the node is idle"
"""Message of the refusal of an order whose sweep was stopped, with the name of the model."""

log = structlog.get_logger("engine.sweeps")


SweepSteps = Generator[None, None, ContextSearchResult | None]


@dataclass(frozen=True, slots=True, eq=False)
class ProfileSweep:
    """Sweep that is in progress, for one `ProfileModel` order."""

    number: int
    """Number of the order, which its answer repeats."""
    loaded_model: LoadedModel
    """Model to measure."""
    probe: MemoryProbe
    """Probe that measures the model."""
    hold: ModelHold
    """Hold on the model until the end of the sweep."""
    steps: SweepSteps
    """Remaining steps. The generator returns the result of the search for the longest row; None without a search."""


class RunningSweep:
    """Sweep in progress, if any, and the answers to orders whose sweeps have ended. Implements `ReclaimableMemory`, so
    that the row of the sweep is released before any request is refused."""

    def __init__(self) -> None:
        self._sweep: ProfileSweep | None = None
        self._stepping = False
        self._ends: list[Frame] = []

    @property
    def current(self) -> ProfileSweep | None:
        """Sweep in progress; None if there is none."""
        return self._sweep

    @property
    def has_ends(self) -> bool:
        """Whether there are answers to send."""
        return bool(self._ends)

    @property
    def nbytes(self) -> int:
        """Bytes that `release` would free: the row of the sweep, 0 during one of its forwards."""
        return 0 if self._sweep is None or self._stepping else self._sweep.probe.row_bytes

    def begin(self, sweep: ProfileSweep) -> None:
        """Start a sweep. No other sweep may be in progress."""
        self._sweep = sweep

    @contextmanager
    def mark_stepping(self) -> Generator[None]:
        """Keep the sweep in progress while one of its forwards runs: `release` does nothing in the context."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def close(self) -> None:
        """End the sweep in progress without an answer, and release its memory."""
        sweep, self._sweep = self._sweep, None
        if sweep is None:
            return
        sweep.hold.release()
        if not self._stepping:
            sweep.steps.close()

    def release(self) -> None:
        """Stop the sweep in progress and release its memory, because requests need that memory. Refuse its order.

        Do nothing without a sweep, or during one of its forwards.
        """
        sweep = self._sweep
        if sweep is not None and not self._stepping:
            self.close()
            refused = Refused(RefusalCode.NO_ROOM, GIVEN_UP.format(sweep.loaded_model.name))
            self._ends.append(Refusal(sweep.number, refused))

    def add_ends(self, ends: Iterable[Frame]) -> None:
        """Add answers of orders that have ended."""
        self._ends += ends

    def take_ends(self) -> list[Frame]:
        """Return the answers that were added since the last call."""
        ends, self._ends = self._ends, []
        return ends


class SweepQueue:
    """Queue of ordered sweeps, of which one runs at a time.

    `loaded_models()` returns the loaded models by name. `is_loading(model)` returns whether a model is queued or
    loading. `synchronize()` waits for launched decode steps. `describe(loaded_model)` returns the reported description
    of a model.
    """

    def __init__(
        self,
        running: RunningSweep,
        profiler: Profiler,
        forwards: GatedForwards,
        loaded_models: Callable[[], Mapping[str, LoadedModel]],
        is_loading: Callable[[str], bool],
        synchronize: Callable[[], None],
        describe: Callable[[LoadedModel], Model],
    ) -> None:
        self.running = running
        self._profiler, self._forwards, self._loaded_models = profiler, forwards, loaded_models
        self._is_loading, self._synchronize, self._describe = is_loading, synchronize, describe
        self._queue: deque[tuple[int, str]] = deque()

    @property
    def measuring(self) -> str:
        """Name of the model that is being measured; empty if there is none."""
        sweep = self.running.current
        return "" if sweep is None else sweep.loaded_model.name

    @property
    def busy(self) -> bool:
        """Whether `step` has a forward to run or frames to return."""
        running = self.running
        return (
            running.has_ends or running.current is not None or self._find_next() is not None or bool(self._list_lost())
        )

    def request_sweep(self, number: int, model: str) -> None:
        """Queue the order `number` to measure a model. Its sweep starts in turn, after the model is loaded."""
        self._queue.append((number, model))

    def refuse_queued(self, model: str, refused: Refused) -> None:
        """Refuse the queued orders of a model that cannot be loaded. The next `step` returns the refusals."""
        self.running.add_ends(Refusal(number, refused) for number, name in self._queue if name == model)
        self._queue = deque(order for order in self._queue if order[1] != model)

    def cancel(self, number: int) -> bool:
        """Cancel the order `number`, queued or running, without an answer. Return False if there is no such order."""
        sweep = self.running.current
        if sweep is not None and sweep.number == number:
            self.running.close()
            return True
        is_queued = any(order == number for order, _ in self._queue)
        self._queue = deque(order for order in self._queue if order[0] != number)
        return is_queued

    def step(self) -> list[Frame]:
        """Run one forward of the sweep in progress, or start the next sweep with its first forward. Refuse orders whose
        model was unloaded.

        Return the answers of orders that have ended. Raise `Halted` if the engine was halted.
        """
        for model in self._list_lost():
            self.refuse_queued(model, Refused(RefusalCode.NO_MODEL, f"{model} was unloaded before it was measured"))
        if self.running.current is None:
            self._begin_next()
        if self.running.current is not None:
            self._run_step(self.running.current)
        return self.running.take_ends()

    def _find_next(self) -> tuple[int, str] | None:
        here = self._loaded_models()
        return next((order for order in self._queue if order[1] in here), None)

    def _list_lost(self) -> list[str]:
        """Return the names of ordered models that are neither loaded nor loading."""
        here = self._loaded_models()
        return [name for _, name in self._queue if name not in here and not self._is_loading(name)]

    def _begin_next(self) -> None:
        order = self._find_next()
        if order is None:
            return
        self._queue.remove(order)
        loaded_model = self._loaded_models()[order[1]]
        probe = self._profiler.create_sweep_probe(loaded_model)
        steps = self._run_sweep(loaded_model, probe)
        self.running.begin(ProfileSweep(order[0], loaded_model, probe, loaded_model.usage.hold(), steps))

    def _run_sweep(self, loaded_model: LoadedModel, probe: MemoryProbe) -> SweepSteps:
        yield from probe.run()
        check: CheckGate | None = self._check_gate if self._is_alone(loaded_model) else None
        return (yield from self._profiler.store_sweep(probe, check))

    def _is_alone(self, loaded_model: LoadedModel) -> bool:
        """Return whether a model is the only loaded one, used only by a sweep."""
        return list(self._loaded_models().values()) == [loaded_model] and loaded_model.usage.users == 1

    def _check_gate(self, need: int) -> bool:
        """Return whether the longest row passes the gate. Caches and spare memory are freed for it if necessary."""
        return self._forwards.check(GateSite.PROBE, need) is None

    def _run_step(self, sweep: ProfileSweep) -> None:
        self._synchronize()
        expected = EXPECTED_STEP_SECONDS + sweep.probe.estimate_step_seconds()
        try:
            with (
                self.running.mark_stepping(),
                self._forwards.run_native(NativeCallKind.PREFILL, sweep.loaded_model.name, sweep.number, expected),
            ):
                end = self._step(sweep)
        except Exception as error:
            raise_if_device_lost(error)
            log.exception("sweep", model=sweep.loaded_model.name)
            end = Failed(sweep.number, FailureCode.ENGINE_ERROR, f"measuring failed: {type(error).__name__}: {error}")
        if end is not None:
            self.running.close()
            self.running.add_ends([end])

    def _step(self, sweep: ProfileSweep) -> Frame | None:
        """Run one forward of a sweep; return its answer if that was the last one."""
        try:
            next(sweep.steps)
        except StopIteration as stop:
            return self._build_answer(sweep, stop.value)
        return None

    def _build_answer(self, sweep: ProfileSweep, result: ContextSearchResult | None) -> Frame:
        if not sweep.probe.chunks:
            message = f"there is no headroom for the smallest forward pass of {sweep.loaded_model.name}"
            return Refusal(sweep.number, Refused(RefusalCode.NO_ROOM, message))
        if result is not None and not result.ok:
            message = describe_failed_search(sweep.loaded_model.name, result)
            return Refusal(sweep.number, Refused(RefusalCode.NO_ROOM, message))
        return Finished(sweep.number, (), 0, 0, measured=self._describe(sweep.loaded_model))
