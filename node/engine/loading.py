"""Which models are in memory: loading one at a time in pieces, evicting idle ones for it, keeping out what kills.

A model must be loadable; it is the request that is refused. So a load first evicts idle models (least recently used,
never a preloaded one, never one in use), then asks the gate once for all of the weights; what is not read yet counts as
reserved. The owner calls `tick` while `busy`, and decodes between the ticks. A model that nobody has used for
`patience` seconds leaves by itself (`leaves_at`, `leave`), so the memory of a Mac is its user's again after work.

    asked ─► queued ─► (gate) ─► reading, piece by piece ─► resident
               └ never fits / not now        └ its files are broken: `cause`, until they change or it is asked for anew
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from node.engine.footprint import clear_pool, give_back
from node.engine.found import Found
from node.engine.gate import Gate, Site
from node.engine.resident import Resident, load
from node.engine.returns import Returns
from node.engine.reuse import Reuse
from wire.frames import Ban
from wire.refusals import Code, Refused
from wire.report import Memory
from wire.units import MIB, show_size
from wire.verdict import Fits, judge, most_bytes

TRANSIENT_LEAST, TRANSIENT_MOST = 16 * MIB, 64 * MIB
"""Bytes beside the weights that a load needs for a moment: buffers of the file (half of a small model), the warm-up."""

log = structlog.get_logger("engine.loading")


@dataclass(slots=True, eq=False)
class Reading:
    """A load under way; `left` bytes are not read yet."""

    found: Found
    pieces: Iterator[int | Resident]
    left: int
    begun: float


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
    pieces: Callable[[Found], Iterator[int | Resident]] = load
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
        return 0 if self._reading is None else self._reading.found.weights - self._reading.left

    def loading(self, name: str) -> bool:
        """Whether a model is on its way."""
        return self.reading == name or any(found.name == name for found in self._queue)

    def progress(self, name: str) -> float:
        """Give the share of a model's weights that its load has read, 0 to 1; 0 where it is not being read."""
        reading = self._reading
        if reading is None or reading.found.name != name:
            return 0.0
        return 1.0 - reading.left / max(1, reading.found.weights)

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

    def tick(self) -> Outcome | None:
        """Begin the next load or read its next piece; an outcome when one ended."""
        if self._reading is None:
            return self._begin(self._queue.popleft(), time.monotonic())
        reading = self._reading
        try:
            piece = next(reading.pieces)
        except Exception as error:
            self._reading = None
            return self._broken(reading.found, error)
        if isinstance(piece, int):
            reading.left = max(0, reading.left - piece)
            return None
        self._reading = None
        now = time.monotonic()
        piece.load_seconds, piece.used_at = now - reading.begun, now
        self.residents[piece.name] = piece
        give_back()
        log.info(
            "model loaded", model=piece.name, weights=show_size(piece.weights), seconds=round(piece.load_seconds, 2)
        )
        return Loaded(piece)

    def drop(self, name: str) -> None:
        """Give a model's memory back."""
        resident = self.residents.pop(name)
        self.kept.drop(name)
        log.info("model unloaded", model=name, weights=show_size(resident.weights))
        self.returns.gone(resident.weights, time.monotonic())
        del resident
        give_back()
        self.released()

    def make_room(self, need: int) -> bool:
        """Empty the pool, then give back what is spare, then the prefix cache, then evict idle models, least recently
        used first, until `need` bytes fit; nothing if all of it would not do. Say whether they fit."""
        clear_pool()
        if _fits(self.memory(), need):
            return True
        idle = self._idle()
        spare = self.kept.nbytes + sum(one.nbytes for one in self.spares)
        if not _fits(self.memory(), need - spare - sum(self.residents[name].weights for name in idle)):
            return False
        if self.give_spare(lambda: _fits(self.memory(), need)):
            return True
        if self.kept.give(need):
            return True
        for name in idle:
            if _fits(self.memory(), need):
                return True
            self._evict(name)
        return _fits(self.memory(), need)

    def relieve(self, enough: Callable[[], bool]) -> None:
        """Give back what can be had again until it is `enough`: the pool, what is spare, the prefix cache, then idle
        models."""
        if not enough():
            clear_pool()
        self.give_spare(enough)
        self.kept.relieve(enough)
        for name in self._idle():
            if enough():
                return
            self._evict(name)

    def leaves_at(self) -> float | None:
        """Say when the next unused model leaves; None when none does by itself."""
        idle = self._idle() if self.patience else []
        return self.residents[idle[0]].used_at + self.patience if idle else None

    def leave(self, now: float) -> None:
        """Give back the models whose time has come."""
        while (due := self.leaves_at()) is not None and due <= now:
            self.departures += 1
            self.drop(self._idle()[0])

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

    def _begin(self, found: Found, now: float) -> Outcome | None:
        cause = self.cause(found, now)
        if cause:
            return NotLoaded(found.name, Refused(Code.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}"))
        need = found.weights + max(TRANSIENT_LEAST, min(TRANSIENT_MOST, found.weights // 2))
        self.make_room(need)
        memory = self.memory()
        answer = self.gate.check(Site.LOAD, memory, need)
        if not isinstance(answer, Refused):
            self._reading = Reading(found, self.pieces(found), found.weights, now)
            self.returns.came()
            return None
        if answer.code is Code.NO_ROOM and need > most_bytes(memory):
            answer = Refused(Code.TOO_LARGE, (
                f"{found.name} needs {show_size(need)} for its weights alone, this node can hold "
                f"{show_size(max(0, most_bytes(memory)))}: use a smaller variant, or raise memory.cap"
            ), answer.numbers)  # fmt: skip
        log.warning("model not loaded", model=found.name, cause=answer.message)
        return NotLoaded(found.name, answer)

    def _broken(self, found: Found, error: Exception) -> NotLoaded:
        text = " ".join(str(error).split())[:300]
        cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
        self.causes[found.name] = (found.fingerprint, cause)
        give_back()
        log.error("model broken", model=found.name, cause=cause)
        return NotLoaded(found.name, Refused(Code.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}"))


def _fits(memory: Memory, need: int) -> bool:
    return isinstance(judge(memory, need), Fits)
