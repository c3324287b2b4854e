"""Which models are in memory: loading one at a time in pieces, evicting idle ones for it, keeping out what kills.

A model must be loadable; it is the request that is refused. So a load is judged without the run-time margin
(`wire.capacity.arithmetic.judge_load`). It first evicts idle models (least recently used, never a preloaded one, never
one in use), then asks the gate for all of the weights; weights that are not read yet count as reserved. Before each
piece the gate is asked again, on a reading of that moment. The owner calls `tick` while `busy`, and decodes between the
ticks.

A load is given up before any answer is: when the gate refuses its next piece, when a running request needs room, when
the engine is over its cap, for a lease while no request waits for the model, and when it is unloaded by order. What was
read is released at once, and the outcome stands in `ended`.

A model that has been unused for `patience` seconds is unloaded (`leaves_at`, `leave`). One whose files were replaced on
disk is unloaded as soon as it is idle, and loaded again if it is preloaded; until then it answers under the fingerprint
that it was loaded with. A load whose files change before its end is given up, and the next request tries again.

    asked ─► queued ─► (gate) ─► reading, piece by piece, each asked of the gate ─► resident
               └ never fits / not now   └ given up: no room, an order       └ broken files: `cause`, until they change
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Protocol, cast

import structlog

from node.engine.memory.footprint import clear_pool, give_back
from node.engine.memory.gate import Gate, Site
from node.engine.memory.leak_check import Returns
from node.engine.models.loaded_model import Resident, Step, load
from node.engine.models.model_descriptor import Found
from node.engine.scheduling.prefix_cache import Reuse
from node.models.catalogue import Library
from wire.capacity.arithmetic import Fits, excess, hard_line, judge, judge_load, lacks, most_weights
from wire.frames import Ban
from wire.refusals import Code, Refused
from wire.report import Memory
from wire.units import MIB, show_size

TRANSIENT_LEAST, TRANSIENT_MOST = 16 * MIB, 64 * MIB
"""Bytes beside the weights that a load needs for a moment: buffers of the file (half of a small model), the warm-up."""

log = structlog.get_logger("engine.loading")


@dataclass(slots=True, eq=False)
class Reading:
    """A load under way, in bytes: `left` are not read yet of `total`, which is exact once the model is built. `step` is
    what the next piece takes."""

    found: Found
    pieces: Iterator[Step | Resident]
    total: int
    left: int
    begun: float
    step: Step = field(default_factory=Step)


class FilesChangedError(Exception):
    """The files of a model changed while it was loaded."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load ended well."""

    resident: Resident


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """A load ended, and why."""

    model: str
    refused: Refused


Outcome = Loaded | NotLoaded


class Spare(Protocol):
    """Memory that is given up before any that a request could use again."""

    @property
    def nbytes(self) -> int:
        """Bytes that would be free."""
        ...

    def give(self) -> None:
        """Give it back now."""
        ...


@dataclass(slots=True, eq=False)
class Shelf:
    """The models in memory and on their way. `memory()` reads now; `released()` hears that memory was given back on
    purpose, so that the height of a moment ago is no longer held against anybody."""

    gate: Gate
    memory: Callable[[], Memory]
    released: Callable[[], None]
    pinned: frozenset[str]
    kept: Reuse
    library: Library
    pieces: Callable[[Found], Iterator[Step | Resident]] = load
    patience: float = 0.0
    """Seconds after which an unused model leaves; 0: never."""
    spares: list[Spare] = field(default_factory=list["Spare"])
    residents: dict[str, Resident] = field(default_factory=dict[str, Resident])
    causes: dict[str, tuple[str, str]] = field(default_factory=dict[str, "tuple[str, str]"])
    _bans: dict[str, tuple[float, str]] = field(default_factory=dict[str, "tuple[float, str]"])
    evictions: int = 0
    """Idle models that were given back to make room."""
    departures: int = 0
    """Models that left because nobody had used them for long."""
    returns: Returns = field(default_factory=Returns)
    ended: list[Outcome] = field(default_factory=list["Outcome"])
    """Loads that ended since the owner last took them out."""
    given_up: int = 0
    """Loads that were given up for want of memory, or by order."""
    _sizes: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of a model once loaded, by fingerprint, as its first load showed."""
    _queue: deque[Found] = field(default_factory=deque["Found"])
    _reading: Reading | None = None

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        return self._reading is not None or bool(self._queue)

    @property
    def empty(self) -> bool:
        """Whether no model is here or on its way."""
        return not self.residents and not self.busy

    @property
    def looks_at(self) -> float | None:
        """Monotonic time of the next check for leaked memory; None while a model is loaded or loading."""
        return self.returns.at if self.empty else None

    @property
    def reading(self) -> str:
        """The model that is being read, or would be next."""
        if self._reading is not None:
            return self._reading.found.name
        return self._queue[0].name if self._queue else ""

    @property
    def left(self) -> int:
        """Bytes of weights that are promised and not read yet."""
        return 0 if self._reading is None else self._reading.left

    @property
    def read(self) -> int:
        """Bytes of weights that are read of a model that is not here yet."""
        return 0 if self._reading is None else self._reading.total - self._reading.left

    def size_of(self, found: Found) -> int:
        """Return the bytes of a model's weights once loaded: measured, or as its files let one expect."""
        return self._sizes.get(found.fingerprint, found.weights)

    def weights(self, name: str) -> int:
        """Return the bytes of a model's weights that are in memory, loaded or being loaded."""
        resident = self.residents.get(name)
        if resident is not None:
            return resident.weights
        return self.read if self._reading is not None and self._reading.found.name == name else 0

    def loading(self, name: str) -> bool:
        """Whether a model is on its way."""
        return self.reading == name or any(found.name == name for found in self._queue)

    def progress(self, name: str) -> float:
        """Give the share of a model's weights that its load has read, 0 to 1; 0 where it is not being read."""
        reading = self._reading
        if reading is None or reading.found.name != name:
            return 0.0
        return 1.0 - reading.left / max(1, reading.total)

    def ask(self, found: Found) -> None:
        """Load a model when its turn comes; does nothing when it is here or on its way."""
        if found.name not in self.residents and not self.loading(found.name):
            self._queue.append(found)

    def ban(self, bans: tuple[Ban, ...], now: float) -> None:
        """Keep models out for a while."""
        self._bans |= {ban.model: (now + ban.seconds, ban.cause) for ban in bans}

    def cause(self, found: Found, now: float) -> str:
        """Say why a model cannot be loaded now; empty when it can."""
        until, cause = self._bans.get(found.name, (0.0, ""))
        if now < until:
            return f"{cause}; kept out for {math.ceil(until - now)} s more"
        fingerprint, broken = self.causes.get(found.name, ("", ""))
        return found.cause or (broken if fingerprint == found.fingerprint else "")

    def forgive(self, name: str) -> None:
        """Try again what was broken: somebody asked for it by name."""
        self.causes.pop(name, None)

    def tick(self) -> None:
        """Begin the next load, or ask the gate for its next piece and read that."""
        if self._reading is None:
            self._begin(self._queue.popleft(), time.monotonic())
            return
        reading = self._reading
        refused = self._asked(reading.step)
        if refused is not None:
            self.give_up(refused)
            return
        try:
            piece = next(reading.pieces)
        except FilesChangedError as error:
            self.give_up(Refused(Code.NOT_READY, str(error), None, 1.0))
            return
        except Exception as error:
            self._reading = None
            self._broken(reading.found, error)
            return
        if isinstance(piece, Step):
            self._advance(reading, piece)
        else:
            self._finish(reading, piece)

    def _asked(self, step: Step) -> Refused | None:
        """Ask the gate for the next piece: the weights that are left are reserved already."""
        if not step.left and not step.transient:
            return None
        memory = self.memory()
        answer = self.gate.check(Site.LOAD, memory, step.transient, load=True)
        no_room = isinstance(answer, Refused) and answer.code is Code.NO_ROOM
        if no_room and self.make_room(step.transient - memory.margin):
            answer = self.gate.check(Site.LOAD, self.memory(), step.transient, load=True)
        return answer if isinstance(answer, Refused) else None

    def _advance(self, reading: Reading, step: Step) -> None:
        """Take the exact sizes of a load that is under way. Over the cap, it is given up at once."""
        if reading.step.left == 0 and step.left:
            reading.total = self._sizes[reading.found.fingerprint] = step.left
        reading.left, reading.step = step.left, step
        memory = self.memory()
        if memory.guard and (over := excess(memory)) > 0:
            text = f"reading {reading.found.name} took the engine {show_size(over)} over its cap"
            self.give_up(Refused(Code.NO_ROOM, text))

    def give_up(self, why: Refused, name: str = "") -> bool:
        """Abort the load under way, or the named one that is queued, and release what it read. Return whether there was
        one."""
        reading = self._reading
        if reading is None or name not in ("", reading.found.name):
            queued = next((found for found in self._queue if found.name == name), None)
            if queued is not None:
                self._queue.remove(queued)
                self.ended.append(NotLoaded(name, why))
            return queued is not None
        read, self._reading, self.given_up = self.read, None, self.given_up + 1
        cast("Generator[Step | Resident]", reading.pieces).close()
        log.warning("load given up", model=reading.found.name, read=show_size(read), cause=why.message)
        self.returns.gone(read, time.monotonic())
        self.ended.append(NotLoaded(reading.found.name, why))
        del reading
        give_back()
        self.released()
        return True

    def _finish(self, reading: Reading, piece: Resident) -> None:
        self._reading = None
        now = time.monotonic()
        piece.load_seconds, piece.used_at = now - reading.begun, now
        self.residents[piece.name] = piece
        self.library.hold(piece.found)
        give_back()
        log.info(
            "model loaded", model=piece.name, weights=show_size(piece.weights), seconds=round(piece.load_seconds, 2)
        )
        self.ended.append(Loaded(piece))

    def drop(self, name: str) -> None:
        """Give a model's memory back."""
        resident = self.residents.pop(name)
        self.library.release(name)
        self.kept.drop(name)
        log.info("model unloaded", model=name, weights=show_size(resident.weights))
        self.returns.gone(resident.weights, time.monotonic())
        del resident
        give_back()
        self.released()

    def close(self) -> None:
        """Give back all models, and what is kept of them, whoever uses them: the process ends."""
        self._queue.clear()
        self._reading = None
        for one in self.spares:
            one.give()
        for name in list(self.residents):
            self.residents[name].batches.clear()
            self.drop(name)

    def make_room(self, need: int, *, over_load: bool = False) -> bool:
        """Empty the pool, then give back what is spare, then the prefix cache, then evict idle models, least recently
        used first, then give up the load under way if `over_load`, until `need` bytes fit; nothing if all of it would
        not do. Return whether they fit. A load, which is judged without the margin, needs so much less."""
        clear_pool()
        if _fits(self.memory(), need):
            return True
        idle = self._idle()
        spare = self.kept.nbytes + sum(one.nbytes for one in self.spares)
        spare += sum(self.residents[name].weights for name in idle)
        if over_load and self._reading is not None:
            spare += self._reading.total
        if not _fits(self.memory(), need - spare):
            return False
        if self.give_spare(lambda: _fits(self.memory(), need)):
            return True
        if self.kept.give(need):
            return True
        for name in idle:
            if not lacks(self.memory(), need):
                break
            self._evict(name)
        if over_load and not _fits(self.memory(), need):
            self.give_up(Refused(Code.NO_ROOM, "its load was given up: running requests or a lease need the memory"))
        return _fits(self.memory(), need)

    def relieve(self, enough: Callable[[], bool]) -> None:
        """Give back what can be had again until it is `enough`: the pool, what is spare, the prefix cache, then idle
        models. The only model stays where its size alone leaves no headroom: without it nothing would be gained, for
        the next request would load it again."""
        if not enough():
            clear_pool()
        self.give_spare(enough)
        self.kept.relieve(enough)
        for name in self._idle():
            if enough() or (len(self.residents) == 1 and _by_size(self.memory())):
                return
            self._evict(name)

    def leaves_at(self) -> float | None:
        """Return when the next model leaves: an unused one, or an idle one that was replaced on disk. None: none."""
        if self._replaced():
            return 0.0
        idle = self._idle() if self.patience else []
        return self.residents[idle[0]].used_at + self.patience if idle else None

    def leave(self, now: float) -> None:
        """Unload the models whose time has come."""
        for found in self._replaced():
            log.info("model replaced on disk", model=found.name)
            self.drop(found.name)
            if found.name in self.pinned:
                self.ask(found)
        while (due := self.leaves_at()) is not None and due <= now:
            self.departures += 1
            self.drop(self._idle()[0])

    def _replaced(self) -> list[Found]:
        """List what the disk holds in place of the models that are loaded and idle."""
        found = (self.library.replacement(one.found) for one in self.residents.values() if not one.users)
        return [one for one in found if one is not None]

    def give_spare(self, enough: Callable[[], bool]) -> bool:
        """Give back what is spare, in its order, until it is `enough`; say whether it is."""
        for one in self.spares:
            if one.nbytes and not enough():
                one.give()
                self.released()
        return enough()

    def _idle(self) -> list[str]:
        """List the models that nobody uses and nobody pinned, least recently used first."""
        idle = [name for name, one in self.residents.items() if not one.users and name not in self.pinned]
        return sorted(idle, key=lambda name: self.residents[name].used_at)

    def _evict(self, name: str) -> None:
        self.evictions += 1
        self.drop(name)

    def _begin(self, found: Found, now: float) -> None:
        cause = self.cause(found, now)
        if cause:
            refused = Refused(Code.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}")
            self.ended.append(NotLoaded(found.name, refused))
            return
        weights = self.size_of(found)
        need = weights + max(TRANSIENT_LEAST, min(TRANSIENT_MOST, weights // 2))
        self.make_room(need - self.memory().margin)
        memory = self.memory()
        answer = self.gate.check(Site.LOAD, memory, need, load=True)
        if not isinstance(answer, Refused):
            self._reading = Reading(found, self.pieces(found), weights, weights, now)
            self.returns.came()
            return
        if answer.code is Code.NO_ROOM and need > most_weights(memory):
            answer = Refused(Code.TOO_LARGE, (
                f"{found.name} needs {show_size(need)} for its weights alone, this node can hold "
                f"{show_size(max(0, most_weights(memory)))}: use a smaller variant, or raise memory.cap"
            ), answer.numbers)  # fmt: skip
        log.warning("model not loaded", model=found.name, cause=answer.message)
        self.ended.append(NotLoaded(found.name, answer))

    def _broken(self, found: Found, error: Exception) -> None:
        text = " ".join(str(error).split())[:300]
        cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
        self.causes[found.name] = (found.fingerprint, cause)
        give_back()
        log.error("model broken", model=found.name, cause=cause)
        refused = Refused(Code.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}")
        self.ended.append(NotLoaded(found.name, refused))


def _fits(memory: Memory, need: int) -> bool:
    return isinstance(judge(memory, need), Fits)


def _by_size(memory: Memory) -> bool:
    """Return whether only the margin is missing: all that is held fits under cap − leases, and no other application
    lowers the ceiling below that."""
    return memory.ceiling >= hard_line(memory) and isinstance(judge_load(memory, 0), Fits)
