"""Model manager: load one model at a time in pieces, unload idle models for it, and ban models that crash the engine.

A model must be loadable, because requests, not models, are refused for lack of memory. A load is therefore judged
without the run-time margin (`wire.capacity.arithmetic.judge_load`). It first unloads idle models, least recently used
first, but no preloaded and no used one. It then checks the gate for all of the weights; weights still to load count as
reserved. The gate runs again before each piece, on a fresh reading. The engine calls `tick` while `busy`, and decodes
between the ticks.

A load is aborted before any answer is. The reasons: the gate refuses its next piece, a running request needs room, or
the engine is over its cap. A lease aborts a load while no request waits for the model. An order to unload the model
aborts it as well. Loaded pieces are released at once, and the outcome is appended to `ended`.

A model that has been unused for `max_idle_seconds` is unloaded (`idle_unload_at`, `unload_idle`). A model whose
files were replaced on disk is unloaded as soon as it is idle, and loaded again if it is preloaded. Until then it
answers under its old fingerprint. A load whose files change before its end is aborted, and the next request tries
again.

    asked ─► queued ─► (gate) ─► loading, piece by piece, each through the gate ─► loaded
               └ never fits / not now   └ aborted: no room, an order      └ broken files: `cause`, until they change
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Protocol, cast

import structlog

from node.engine.memory.footprint import clear_pool, release_free_memory
from node.engine.memory.gate import GateSite, MemoryGate
from node.engine.memory.leak_check import LeakCheck
from node.engine.models.loaded_model import LoadedModel, LoadStep, load
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.models.catalogue import ModelCatalogue
from wire.capacity.arithmetic import Fits, exceeds_headroom, excess, hard_line, judge, judge_load, most_weights
from wire.frames import ModelBan
from wire.refusals import RefusalCode, Refused
from wire.report import Memory
from wire.units import MIB, show_size

MIN_LOAD_TRANSIENT_BYTES, MAX_LOAD_TRANSIENT_BYTES = 16 * MIB, 64 * MIB
"""Bounds of a load's transient bytes in addition to its weights: buffers of the file (half of a small model), the
warm-up."""

log = structlog.get_logger("engine.loading")


@dataclass(slots=True, eq=False)
class LoadInProgress:
    """State of the load that is in progress; sizes in bytes."""

    found: ModelDescriptor
    """Model to load."""
    pieces: Iterator[LoadStep | LoadedModel]
    """Remaining pieces."""
    total: int
    """All weights; exact once the model is built."""
    left: int
    """Weights still to load."""
    begun: float
    """Monotonic time of its start."""
    step: LoadStep = field(default_factory=LoadStep)
    """Cost of the next piece."""


class FilesChangedError(Exception):
    """Error of a load during which the files of the model changed."""


@dataclass(frozen=True, slots=True)
class LoadSucceeded:
    """Outcome of a load: the loaded model."""

    loaded_model: LoadedModel


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Outcome of a load that was refused, was aborted or failed."""

    model: str
    """Name of the model."""
    refused: Refused
    """Refusal for the requests and orders that waited for the load."""


Outcome = LoadSucceeded | LoadFailed


class ReclaimableMemory(Protocol):
    """Spare memory, which is released before any memory that a request could reuse. Examples: the emergency reserve,
    the row of a sweep."""

    @property
    def nbytes(self) -> int:
        """Bytes that `release` would free."""
        ...

    def release(self) -> None:
        """Release the memory now."""
        ...


@dataclass(slots=True, eq=False)
class ModelManager:
    """Manager of the loaded and loading models of an engine (see the module's docstring).

    `memory()` reads the memory now. `released()` is called after memory was freed, because the recent peak must then be
    reset.
    """

    gate: MemoryGate
    """Memory gate."""
    memory: Callable[[], Memory]
    """Reads the memory."""
    released: Callable[[], None]
    """Called after memory was freed."""
    pinned: frozenset[str]
    """Names of preloaded models, which are never unloaded for lack of memory or use."""
    kept: PrefixCacheManager
    """Prefix cache."""
    library: ModelCatalogue
    """Models on disk."""
    pieces: Callable[[ModelDescriptor], Iterator[LoadStep | LoadedModel]] = load
    """Loader of a model."""
    max_idle_seconds: float = 0.0
    """Seconds after which an unused model is unloaded; 0: never."""
    spares: list[ReclaimableMemory] = field(default_factory=list["ReclaimableMemory"])
    """Spare memory in the order of its release."""
    loaded: dict[str, LoadedModel] = field(default_factory=dict[str, LoadedModel])
    """Loaded models by name."""
    causes: dict[str, tuple[str, str]] = field(default_factory=dict[str, "tuple[str, str]"])
    """Fingerprint and error of models whose load failed because of their files, by name."""
    _bans: dict[str, tuple[float, str]] = field(default_factory=dict[str, "tuple[float, str]"])
    """End (monotonic seconds) and cause of bans, by name."""
    evictions: int = 0
    """Idle models that were unloaded to make room."""
    departures: int = 0
    """Models that were unloaded because they were unused."""
    returns: LeakCheck = field(default_factory=LeakCheck)
    """Detection of memory that unloads did not return."""
    ended: list[Outcome] = field(default_factory=list["Outcome"])
    """Loads that ended since the engine last emptied this list."""
    given_up: int = 0
    """Loads that were aborted, for lack of memory or by order."""
    _sizes: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of a model once loaded, by fingerprint, measured in its first load."""
    _queue: deque[ModelDescriptor] = field(default_factory=deque[ModelDescriptor])
    _reading: LoadInProgress | None = None

    @property
    def busy(self) -> bool:
        """Return whether `tick` has work: a load is in progress or queued."""
        return self._reading is not None or bool(self._queue)

    @property
    def empty(self) -> bool:
        """Return whether no model is loaded or loading."""
        return not self.loaded and not self.busy

    @property
    def looks_at(self) -> float | None:
        """Monotonic time of the next check for leaked memory; None while a model is loaded or loading."""
        return self.returns.at if self.empty else None

    @property
    def reading(self) -> str:
        """Name of the model that is loading, or else next in the queue; empty if there is none."""
        if self._reading is not None:
            return self._reading.found.name
        return self._queue[0].name if self._queue else ""

    @property
    def left(self) -> int:
        """Bytes of weights still to load, which count as reserved; 0 without a load in progress."""
        return 0 if self._reading is None else self._reading.left

    @property
    def read(self) -> int:
        """Bytes of weights already in memory of the load in progress; 0 without one."""
        return 0 if self._reading is None else self._reading.total - self._reading.left

    def size_of(self, found: ModelDescriptor) -> int:
        """Return the bytes of a model's weights once loaded: measured in an earlier load, or estimated from its
        files."""
        return self._sizes.get(found.fingerprint, found.weights)

    def weights(self, name: str) -> int:
        """Return the bytes of a model's weights that are in memory, also during its load; 0 if there are none."""
        loaded_model = self.loaded.get(name)
        if loaded_model is not None:
            return loaded_model.weights
        return self.read if self._reading is not None and self._reading.found.name == name else 0

    def loading(self, name: str) -> bool:
        """Return whether the load of a model is in progress or queued."""
        return self.reading == name or any(found.name == name for found in self._queue)

    def progress(self, name: str) -> float:
        """Return the loaded share of a model's weights, 0 to 1; 0.0 if its load is not in progress."""
        reading = self._reading
        if reading is None or reading.found.name != name:
            return 0.0
        return 1.0 - reading.left / max(1, reading.total)

    def request_load(self, found: ModelDescriptor) -> None:
        """Queue the load of a model, unless it is loaded, loading or queued."""
        if found.name not in self.loaded and not self.loading(found.name):
            self._queue.append(found)

    def ban(self, bans: tuple[ModelBan, ...], now: float) -> None:
        """Refuse loads of these models until their bans end. `now` is the monotonic time."""
        self._bans |= {ban.model: (now + ban.seconds, ban.cause) for ban in bans}

    def cause(self, found: ModelDescriptor, now: float) -> str:
        """Return why a model cannot be loaded at the monotonic time `now`: a ban, its files or an earlier failure.
        Return an empty text if it can."""
        until, cause = self._bans.get(found.name, (0.0, ""))
        if now < until:
            return f"{cause}; loading is blocked for another {math.ceil(until - now)} s"
        fingerprint, broken = self.causes.get(found.name, ("", ""))
        return found.cause or (broken if fingerprint == found.fingerprint else "")

    def clear_failure(self, name: str) -> None:
        """Clear the error of a broken model, so that an order to load it tries again."""
        self.causes.pop(name, None)

    def tick(self) -> None:
        """Start the next load, or check and load the next piece of the current one. Append the outcome of a load that
        ends to `ended`. Call this only while `busy`."""
        if self._reading is None:
            self._begin(self._queue.popleft(), time.monotonic())
            return
        reading = self._reading
        refused = self._check_gate(reading.step)
        if refused is not None:
            self.abort_load(refused)
            return
        try:
            piece = next(reading.pieces)
        except FilesChangedError as error:
            self.abort_load(Refused(RefusalCode.NOT_READY, str(error), None, 1.0))
            return
        except Exception as error:
            self._reading = None
            self._broken(reading.found, error)
            return
        if isinstance(piece, LoadStep):
            self._advance(reading, piece)
        else:
            self._finish(reading, piece)

    def _check_gate(self, step: LoadStep) -> Refused | None:
        """Check the gate for the next piece; the remaining weights are reserved already."""
        if not step.left and not step.transient:
            return None
        memory = self.memory()
        answer = self.gate.check(GateSite.LOAD, memory, step.transient, load=True)
        too_full = isinstance(answer, Refused) and answer.code is RefusalCode.NO_ROOM
        if too_full and self.free_memory(step.transient - memory.margin):
            answer = self.gate.check(GateSite.LOAD, self.memory(), step.transient, load=True)
        return answer if isinstance(answer, Refused) else None

    def _advance(self, reading: LoadInProgress, step: LoadStep) -> None:
        """Record the exact sizes of the current load. Over the cap it is aborted at once."""
        if reading.step.left == 0 and step.left:
            reading.total = self._sizes[reading.found.fingerprint] = step.left
        reading.left, reading.step = step.left, step
        memory = self.memory()
        if memory.guard and (over := excess(memory)) > 0:
            text = f"loading {reading.found.name} put the engine {show_size(over)} over its cap"
            self.abort_load(Refused(RefusalCode.NO_ROOM, text))

    def abort_load(self, why: Refused, name: str = "") -> bool:
        """Abort the load in progress and release its pieces. With a `name`, abort only the load of this model, in
        progress or queued.

        `why` is the refusal for its requests. Return whether there was such a load.
        """
        reading = self._reading
        if reading is None or name not in ("", reading.found.name):
            queued = next((found for found in self._queue if found.name == name), None)
            if queued is not None:
                self._queue.remove(queued)
                self.ended.append(LoadFailed(name, why))
            return queued is not None
        read, self._reading, self.given_up = self.read, None, self.given_up + 1
        cast("Generator[LoadStep | LoadedModel]", reading.pieces).close()
        log.warning("load aborted", model=reading.found.name, read=show_size(read), cause=why.message)
        self.returns.on_unload(read, time.monotonic())
        self.ended.append(LoadFailed(reading.found.name, why))
        del reading
        release_free_memory()
        self.released()
        return True

    def _finish(self, reading: LoadInProgress, piece: LoadedModel) -> None:
        self._reading = None
        now = time.monotonic()
        piece.stats.record_load(now - reading.begun)
        piece.usage.mark_used(now)
        self.loaded[piece.name] = piece
        self.library.hold(piece.found)
        release_free_memory()
        log.info(
            "model loaded", model=piece.name, weights=show_size(piece.weights), seconds=round(now - reading.begun, 2)
        )
        self.ended.append(LoadSucceeded(piece))

    def drop(self, name: str) -> None:
        """Unload a loaded model: release its weights and evict its cached prefixes."""
        loaded_model = self.loaded.pop(name)
        self.library.release(name)
        self.kept.drop(name)
        log.info("model unloaded", model=name, weights=show_size(loaded_model.weights))
        self.returns.on_unload(loaded_model.weights, time.monotonic())
        del loaded_model
        release_free_memory()
        self.released()

    def close(self) -> None:
        """Unload all models, used or not, and release all spare memory, because the process ends."""
        self._queue.clear()
        self._reading = None
        for one in self.spares:
            one.release()
        for name in list(self.loaded):
            self.drop(name)

    def free_memory(self, need: int, *, over_load: bool = False) -> bool:
        """Free memory until `need` bytes fit; return whether they fit. If all of it would not suffice, empty only the
        pool.

        The order: the pool, spare memory, the prefix cache, idle models (least recently used first), and with
        `over_load` the current load. For a model load, which is judged without the margin, the caller subtracts the
        margin from `need`.
        """
        clear_pool()
        if _fits(self.memory(), need):
            return True
        idle = self._idle()
        spare = self.kept.nbytes + sum(one.nbytes for one in self.spares)
        spare += sum(self.loaded[name].weights for name in idle)
        if over_load and self._reading is not None:
            spare += self._reading.total
        if not _fits(self.memory(), need - spare):
            return False
        if self.release_spare(lambda: _fits(self.memory(), need)):
            return True
        if self.kept.evict_until_fits(need):
            return True
        for name in idle:
            if not exceeds_headroom(self.memory(), need):
                break
            self._evict(name)
        if over_load and not _fits(self.memory(), need):
            self.abort_load(
                Refused(
                    RefusalCode.NO_ROOM,
                    "the load was aborted, because running requests or a lease need the memory: retry",
                )
            )
        return _fits(self.memory(), need)

    def reclaim(self, enough: Callable[[], bool]) -> None:
        """Free memory until `enough()`: the pool, spare memory, the prefix cache, then idle models.

        A model that is the only one stays if its size alone leaves no headroom: the next request would load it again.
        """
        if not enough():
            clear_pool()
        self.release_spare(enough)
        self.kept.evict_until(enough)
        for name in self._idle():
            if enough() or (len(self.loaded) == 1 and _by_size(self.memory())):
                return
            self._evict(name)

    def idle_unload_at(self) -> float | None:
        """Return the monotonic time of the next unload of an idle model; 0.0 if one was replaced on disk. Return None
        if no unload is due."""
        if self._replaced():
            return 0.0
        idle = self._idle() if self.max_idle_seconds else []
        return self.loaded[idle[0]].usage.used_at + self.max_idle_seconds if idle else None

    def unload_idle(self, now: float) -> None:
        """Unload idle models that were replaced on disk, or unused for `max_idle_seconds` until the monotonic time
        `now`. Queue the load of a replaced model that is preloaded."""
        for found in self._replaced():
            log.info("model replaced on disk", model=found.name)
            self.drop(found.name)
            if found.name in self.pinned:
                self.request_load(found)
        while (due := self.idle_unload_at()) is not None and due <= now:
            self.departures += 1
            self.drop(self._idle()[0])

    def _replaced(self) -> list[ModelDescriptor]:
        """Return the new versions on disk of models that are loaded and idle."""
        found = (self.library.replacement(one.found) for one in self.loaded.values() if not one.usage.users)
        return [one for one in found if one is not None]

    def release_spare(self, enough: Callable[[], bool]) -> bool:
        """Release spare memory, in order, until `enough()`; return its last result."""
        for one in self.spares:
            if one.nbytes and not enough():
                one.release()
                self.released()
        return enough()

    def _idle(self) -> list[str]:
        """Return the names of models without users that are not preloaded, least recently used first."""
        idle = [name for name, one in self.loaded.items() if not one.usage.users and name not in self.pinned]
        return sorted(idle, key=lambda name: self.loaded[name].usage.used_at)

    def _evict(self, name: str) -> None:
        self.evictions += 1
        self.drop(name)

    def _begin(self, found: ModelDescriptor, now: float) -> None:
        cause = self.cause(found, now)
        if cause:
            refused = Refused(RefusalCode.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}")
            self.ended.append(LoadFailed(found.name, refused))
            return
        weights = self.size_of(found)
        need = weights + max(MIN_LOAD_TRANSIENT_BYTES, min(MAX_LOAD_TRANSIENT_BYTES, weights // 2))
        self.free_memory(need - self.memory().margin)
        memory = self.memory()
        answer = self.gate.check(GateSite.LOAD, memory, need, load=True)
        if not isinstance(answer, Refused):
            self._reading = LoadInProgress(found, self.pieces(found), weights, weights, now)
            self.returns.on_load()
            return
        if answer.code is RefusalCode.NO_ROOM and need > most_weights(memory):
            answer = Refused(
                RefusalCode.TOO_LARGE,
                (
                    f"{found.name} needs {show_size(need)} for its weights, this node can give "
                    f"{show_size(max(0, most_weights(memory)))}: use a smaller variant, or raise memory.cap"
                ),
                answer.numbers,
            )
        log.warning("model not loaded", model=found.name, cause=answer.message)
        self.ended.append(LoadFailed(found.name, answer))

    def _broken(self, found: ModelDescriptor, error: Exception) -> None:
        text = " ".join(str(error).split())[:300]
        cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
        self.causes[found.name] = (found.fingerprint, cause)
        release_free_memory()
        log.error("model broken", model=found.name, cause=cause)
        refused = Refused(RefusalCode.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}")
        self.ended.append(LoadFailed(found.name, refused))


def _fits(memory: Memory, need: int) -> bool:
    return isinstance(judge(memory, need), Fits)


def _by_size(memory: Memory) -> bool:
    """Return whether only the margin is missing. All held memory then fits under cap − leases, and no other application
    lowers the ceiling below that."""
    return memory.ceiling >= hard_line(memory) and isinstance(judge_load(memory, 0), Fits)
