"""Sweeps by order: one model measured anew at a time, one forward a turn, so that whoever decodes goes on meanwhile.

    Profile ─► queued ─► (its model is loaded) ─► forward by forward ─► settled ─► Finished, with what was measured
                 └ the load fails: Refusal              └ memory is needed for requests, nothing passes: Refusal

A sweep takes only what is free: the gate is asked before every forward, nothing is evicted for it, and its row is given
up before any request is refused for memory.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import structlog

from node.engine.memory.gate import Site
from node.engine.memory.gated_forward import Forwards
from node.engine.models.context_search import Settled, diagnosis
from node.engine.models.loaded_model import Resident
from node.engine.models.profiler import Ask, Probe, Profiler
from node.engine.process.interface import Doing
from wire.frames import Failed, Finished, Frame, Refusal
from wire.refusals import Code, Refused
from wire.report import Model

EXPECTED = 10.0
"""Seconds that a step may take: its largest forward, or kernels that are compiled."""
GIVEN_UP = "the memory that measuring {} took was needed for requests: order it again when the node is at rest"

log = structlog.get_logger("engine.sweeps")


@dataclass(slots=True, eq=False)
class Sweep:
    """One under way. `settled`: what the longest row came to, at its end."""

    number: int
    resident: Resident
    probe: Probe
    steps: Generator[None] | None = None
    settled: Settled | None = None


class Sweeps:
    """`residents()` are the loaded models, `loading(model)` says that one is on its way, `alone(resident)` that nothing
    but a sweep of this one uses memory; `still()` waits for steps that decode, `told(resident)` describes a model as
    the node reports it."""

    def __init__(
        self,
        profiler: Profiler,
        forwards: Forwards,
        residents: Callable[[], Mapping[str, Resident]],
        loading: Callable[[str], bool],
        alone: Callable[[Resident], bool],
        still: Callable[[], None],
        told: Callable[[Resident], Model],
    ) -> None:
        self._profiler, self._forwards, self._residents = profiler, forwards, residents
        self._loading, self._alone, self._still, self._told = loading, alone, still, told
        self._queue: deque[tuple[int, str]] = deque()
        self._sweep: Sweep | None = None
        self._stepping = False
        self._ends: list[Frame] = []

    @property
    def nbytes(self) -> int:
        """Bytes that would be given back."""
        return 0 if self._sweep is None or self._stepping else self._sweep.probe.held

    @property
    def measuring(self) -> str:
        """Name of the model that is being measured; empty for none."""
        return "" if self._sweep is None else self._sweep.resident.name

    @property
    def busy(self) -> bool:
        """Whether a step has something to do or to say."""
        return bool(self._ends) or self._sweep is not None or self._next() is not None or bool(self._lost())

    def ask(self, number: int, model: str) -> None:
        """Measure a model when its turn comes and it is loaded."""
        self._queue.append((number, model))

    def failed(self, model: str, refused: Refused) -> None:
        """Hear that a model cannot be loaded."""
        self._ends += [Refusal(number, refused) for number, name in self._queue if name == model]
        self._queue = deque(one for one in self._queue if one[1] != model)

    def cancel(self, number: int) -> bool:
        """Forget an order, whatever has become of it; whether it was here."""
        if self._sweep is not None and self._sweep.number == number:
            self._close(self._sweep)
            return True
        here = any(one == number for one, _ in self._queue)
        self._queue = deque(one for one in self._queue if one[0] != number)
        return here

    def give(self) -> None:
        """Give back what the sweep under way takes: requests need it."""
        sweep = self._sweep
        if sweep is not None and not self._stepping:
            self._close(sweep)
            refused = Refused(Code.NO_ROOM, GIVEN_UP.format(sweep.resident.name))
            self._ends.append(Refusal(sweep.number, refused))

    def step(self) -> list[Frame]:
        """Run one forward of a sweep; give what has ended."""
        for model in self._lost():
            self.failed(model, Refused(Code.NO_MODEL, f"{model} was unloaded before it was measured"))
        if self._sweep is None:
            self._begin()
        if self._sweep is not None:
            self._go_on(self._sweep)
        ends, self._ends = self._ends, []
        return ends

    def _next(self) -> tuple[int, str] | None:
        here = self._residents()
        return next((one for one in self._queue if one[1] in here), None)

    def _lost(self) -> list[str]:
        """List what is neither loaded nor on its way any more."""
        here = self._residents()
        return [name for _, name in self._queue if name not in here and not self._loading(name)]

    def _begin(self) -> None:
        order = self._next()
        if order is None:
            return
        self._queue.remove(order)
        resident = self._residents()[order[1]]
        probe = self._profiler.sweep(resident)
        resident.users += 1
        self._sweep = Sweep(order[0], resident, probe)
        self._sweep.steps = self._run(self._sweep)

    def _run(self, sweep: Sweep) -> Generator[None]:
        yield from sweep.probe.run()
        ask: Ask | None = self._asked if self._alone(sweep.resident) else None
        sweep.settled = yield from self._profiler.swept(sweep.probe, ask)

    def _asked(self, need: int) -> bool:
        """Ask for the longest row: what would be given back for a request counts as free."""
        return self._forwards.ask(Site.PROBE, need) is None

    def _go_on(self, sweep: Sweep) -> None:
        assert sweep.steps is not None  # noqa: S101  it was begun
        self._still()
        self._stepping = True
        try:
            with self._forwards.native(Doing.PREFILL, sweep.resident.name, sweep.number, EXPECTED):
                next(sweep.steps)
        except StopIteration:
            self._close(sweep)
            self._ends.append(self._ended(sweep))
        except Exception as error:
            log.exception("sweep", model=sweep.resident.name)
            self._close(sweep)
            self._ends.append(Failed(sweep.number, "engine_error", f"measuring broke: {type(error).__name__}: {error}"))
        finally:
            self._stepping = False

    def _ended(self, sweep: Sweep) -> Frame:
        if not sweep.probe.taken:
            message = f"there is no room for even the smallest forward of {sweep.resident.name}"
            return Refusal(sweep.number, Refused(Code.NO_ROOM, message))
        if sweep.settled is not None and not sweep.settled.ok:
            message = diagnosis(sweep.resident.name, sweep.settled)
            return Refusal(sweep.number, Refused(Code.NO_ROOM, message))
        return Finished(sweep.number, (), 0, 0, measured=self._told(sweep.resident))

    def _close(self, sweep: Sweep) -> None:
        self._sweep = None
        sweep.resident.users -= 1
        if sweep.steps is not None and not self._stepping:
            sweep.steps.close()
