"""Model manager: load one model at a time in pieces, unload idle models for it, and record the reasons of failures.

A load is judged without the margin (`wire.capacity.arithmetic.judge_load`): if memory is short, requests are refused
rather than the model. If there is no room, cached prefixes and idle models are released first (`model_unloader`). The
gate checks all weights before the start, and each piece on a fresh reading; weights still to load count as reserved.
The engine calls `tick` while `busy`, and decodes between the ticks.

If memory is short, a load is aborted before a running request ends. The reasons: the gate refuses its next piece, a
running request needs room, or the engine is over its cap. A lease aborts a load for whose model no request waits. An
order to unload the model, or a change of its files, aborts the load as well. Loaded pieces are released at once, and
`take_ended` returns the outcome. After a change of the files, the next request loads the model again.

The phases of a load and their legal events are in `load_state`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import structlog

from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gate import GateSite, MemoryGate
from node.engine.memory.memory_reader import MemoryReader
from node.engine.models.load_blocks import READ_RETRY_SECONDS, LoadBlocks, may_pass
from node.engine.models.load_state import (
    LoadAborted,
    LoadBegan,
    LoadBroke,
    LoadEvent,
    LoadFinished,
    LoadPhase,
    LoadRefused,
    LoadStep,
    ModelLoad,
    PieceDue,
    step,
)
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_table import ModelTable
from node.engine.models.model_unloader import ModelUnloader, fits
from node.engine.process.device_errors import raise_if_device_lost
from node.models.catalogue import ModelCatalogue
from wire.capacity.arithmetic import compute_excess, compute_most_weights
from wire.refusals import RefusalCode, Refused
from wire.report import Memory
from wire.state_machine import IllegalEventError
from wire.units import MIB, show_size

MIN_LOAD_TRANSIENT_BYTES, MAX_LOAD_TRANSIENT_BYTES = 16 * MIB, 64 * MIB
"""Bounds of a load's transient bytes in addition to its weights, for buffers of the files and the warm-up. Between the
bounds, half of the weights is assumed."""
RUNNING_SITES = (GateSite.PREFILL, GateSite.JOIN, GateSite.GROW)
"""Work of running requests, for which a load in progress is aborted if memory is short."""

log = structlog.get_logger("engine.loading")


class FilesChangedError(Exception):
    """Error: the files of a model changed during its load."""


@dataclass(frozen=True, slots=True)
class LoadSucceeded:
    """Outcome of a load: the loaded model."""

    loaded_model: LoadedModel
    """Model in memory."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Outcome of a load that was refused, was aborted or failed."""

    model: str
    """Name of the model."""
    refused: Refused
    """Refusal for the requests and orders that waited for the load."""


Outcome = LoadSucceeded | LoadFailed


class ModelManager:
    """Manager of the loads of an engine (see the module's docstring).

    `on_released()` is called after memory was freed, because the recent peak must then be reset. `pieces(descriptor)`
    loads a model piece by piece (`ModelLoader.load_pieces`).
    """

    def __init__(
        self,
        table: ModelTable,
        unloader: ModelUnloader,
        blocks: LoadBlocks,
        catalogue: ModelCatalogue,
        gate: MemoryGate,
        memory: MemoryReader,
        on_released: Callable[[], None],
        pieces: Callable[[ModelDescriptor], Generator[LoadStep | LoadedModel]],
    ) -> None:
        self._table = table
        self._unloader = unloader
        self._blocks = blocks
        self._catalogue = catalogue
        self._gate = gate
        self._memory = memory
        self._on_released = on_released
        self._new_pieces = pieces
        self._pieces: Generator[LoadStep | LoadedModel] | None = None
        self._queue: deque[ModelLoad] = deque()
        self._ended: list[Outcome] = []
        self._sizes: dict[str, int] = {}
        """Exact bytes of the weights of models, by fingerprint, known from the first piece of a load on."""
        self.loads = 0
        """Number of loads that have succeeded."""

    # state

    @property
    def busy(self) -> bool:
        """Whether `tick` has work: a load is in progress or queued."""
        return self._table.load is not None or bool(self._queue)

    @property
    def has_ended(self) -> bool:
        """Whether loads have ended since the last `take_ended`."""
        return bool(self._ended)

    @property
    def next_leak_check_at(self) -> float | None:
        """Monotonic time of the next check for leaked memory. None while a model is loaded, loading or queued, and if
        no weights were released since the last check."""
        return None if self._table.loaded or self.busy else self._unloader.leak_check.next_check_at

    @property
    def next_name(self) -> str:
        """Name of the model that is loading, or else next in the queue; empty if there is none."""
        if self._table.load is not None:
            return self._table.load.name
        return self._queue[0].name if self._queue else ""

    def get_size(self, descriptor: ModelDescriptor) -> int:
        """Return the bytes of a model's weights in memory: measured in an earlier load, or estimated from its files."""
        return self._sizes.get(descriptor.fingerprint, descriptor.weights)

    def is_loading(self, name: str) -> bool:
        """Return whether the load of a model is in progress or queued."""
        return self.next_name == name or any(load.name == name for load in self._queue)

    def get_progress(self, name: str) -> float:
        """Return the loaded share of a model's weights, 0 to 1; 0.0 if its load is not in progress."""
        load = self._table.load
        return load.progress if load is not None and load.name == name else 0.0

    def check(self) -> list[str]:
        """Return one sentence for each violated invariant of the loads; an empty list if there is none."""
        loads = [*self._queue, *([] if self._table.load is None else [self._table.load])]
        names = [load.name for load in loads]
        found = [text for load in loads for text in load.check()]
        found += [f"{name} is loading and loaded" for name in names if name in self._table.loaded]
        return found + [f"{name} has several loads" for name in set(names) if names.count(name) > 1]

    # orders

    def request_load(self, descriptor: ModelDescriptor) -> None:
        """Queue the load of a model, unless it is loaded, loading or queued."""
        if descriptor.name not in self._table.loaded and not self.is_loading(descriptor.name):
            self._queue.append(ModelLoad(descriptor))

    def take_ended(self) -> list[Outcome]:
        """Return the outcomes of the loads that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # loads

    def tick(self, now: float) -> None:
        """Start the next queued load, or check the gate and load the next piece of the load in progress. To make room,
        evict cached prefixes and unload idle models. `take_ended` returns the outcome of a load that ended. May only be
        called while `busy`. `now` is the monotonic time. Raise `DeviceLost` if a command buffer of the GPU failed."""
        load, pieces = self._table.load, self._pieces
        if load is None or pieces is None:
            self._begin_load(self._queue.popleft(), now)
            return
        refused = self._check_gate(load.due)
        if refused is not None:
            self.abort_load(refused)
            return
        try:
            piece = next(pieces)
        except FilesChangedError as error:
            event, refused = LoadAborted(), Refused(RefusalCode.NOT_READY, str(error), None, 1.0)
        except Exception as error:
            raise_if_device_lost(error)
            event, refused = LoadBroke(), _record_broken(self._blocks, load.descriptor, error)
        else:
            if isinstance(piece, LoadStep):
                self._advance(load, piece)
            else:
                self._finish(load, piece)
            return
        self._end_early(load, event, refused)  # outside of the handler, whose traceback would keep the pieces in memory

    def _apply(self, load: ModelLoad, event: LoadEvent) -> ModelLoad | None:
        """Change the load in progress by an event, and return it. An illegal event, which is an error of this program,
        ends this load as failed, and None is returned."""
        try:
            after = step(load, event)
        except IllegalEventError as error:
            log.exception("illegal event", model=load.name, error=str(error))
            self._end_current()
            refused = Refused(
                RefusalCode.LOAD_FAILED, f"{load.name} cannot be loaded: the engine has an error: {error}"
            )
            self._ended.append(LoadFailed(load.name, refused))
            return None
        if after.phase is LoadPhase.LOADING:
            self._table.set_load(after)
        else:
            self._end_current()
        return after

    def _end_current(self) -> None:
        """Clear the load in progress and release its pieces."""
        pieces, self._pieces = self._pieces, None
        self._table.set_load(None)
        if pieces is not None:
            pieces.close()

    def _fail(self, load: ModelLoad, event: LoadEvent, refused: Refused) -> None:
        """End a load by this event; its requests and orders are refused."""
        if self._apply(load, event) is not None:
            self._ended.append(LoadFailed(load.name, refused))

    def _begin_load(self, load: ModelLoad, now: float) -> None:
        found = load.descriptor
        cause = self._blocks.find_cause(found, now)
        if cause:
            self._fail(load, LoadRefused(), _refuse_unloadable(found, cause))
            return
        weights = self.get_size(found)
        need = weights + max(MIN_LOAD_TRANSIENT_BYTES, min(MAX_LOAD_TRANSIENT_BYTES, weights // 2))
        _free_for_load(self._unloader, self._memory, need)
        memory = self._memory.read_now()
        answer = self._gate.check(GateSite.LOAD, memory, need, load=True)
        if not isinstance(answer, Refused):
            self._pieces = self._new_pieces(found)
            self._apply(load, LoadBegan(weights, now))
            self._unloader.leak_check.on_load()
            return
        refused = _refuse_too_large(found, need, memory, answer)
        log.warning("model not loaded", model=found.name, cause=refused.message)
        self._fail(load, LoadRefused(), refused)

    def _check_gate(self, due: LoadStep) -> Refused | None:
        """Check the gate for the next piece, and free memory for it if necessary. Return the refusal; None if it
        passes. The remaining weights are reserved already."""
        if not due.bytes_left and not due.transient:
            return None
        memory = self._memory.read_now()
        answer = self._gate.check(GateSite.LOAD, memory, due.transient, load=True)
        too_full = isinstance(answer, Refused) and answer.code is RefusalCode.NO_ROOM
        if too_full and _free_for_load(self._unloader, self._memory, due.transient):
            answer = self._gate.check(GateSite.LOAD, self._memory.read_now(), due.transient, load=True)
        return answer if isinstance(answer, Refused) else None

    def _advance(self, load: ModelLoad, due: LoadStep) -> None:
        """Record the cost of the next piece. Abort the load at once if the engine is over its cap."""
        after = self._apply(load, PieceDue(due))
        if after is not None and due.bytes_left:
            self._sizes[load.descriptor.fingerprint] = after.total
        memory = self._memory.read_now()
        if memory.guard and (over := compute_excess(memory)) > 0:
            text = f"loading {load.name} put the engine {show_size(over)} over its cap"
            self.abort_load(Refused(RefusalCode.NO_ROOM, text))

    def _finish(self, load: ModelLoad, loaded_model: LoadedModel) -> None:
        if self._apply(load, LoadFinished()) is None:
            return
        now = time.monotonic()
        loaded_model.stats.record_load(now - load.begun)
        loaded_model.usage.mark_used(now)
        self._table.put(loaded_model)
        self._catalogue.pin(loaded_model.descriptor)
        release_free_memory()
        weights, seconds = show_size(loaded_model.weights), round(now - load.begun, 2)
        log.info("model loaded", model=loaded_model.name, weights=weights, seconds=seconds)
        self.loads += 1
        self._ended.append(LoadSucceeded(loaded_model))

    def abort_load(self, refused: Refused, name: str = "") -> bool:
        """Abort the load in progress and release its pieces. With a `name`, abort only the load of this model, in
        progress or queued. Return False if there is no load to abort.

        `refused` is the refusal of the requests and orders that wait for the load; `take_ended` returns it.
        """
        load = self._table.load
        if load is None or name not in ("", load.name):
            return self._abort_queued(refused, name)
        self._end_early(load, LoadAborted(), refused)
        return True

    def _end_early(self, load: ModelLoad, event: LoadAborted | LoadBroke, refused: Refused) -> None:
        """End the load in progress by this event, release its pieces, and schedule the check for leaked memory."""
        read = load.loaded_bytes
        self._fail(load, event, refused)
        log.warning("load aborted", model=load.name, read=show_size(read), cause=refused.message)
        self._unloader.leak_check.on_unload(read, time.monotonic())
        release_free_memory()
        self._on_released()

    def _abort_queued(self, refused: Refused, name: str) -> bool:
        queued = next((load for load in self._queue if load.name == name), None)
        if queued is None:
            return False
        step(queued, LoadAborted())
        self._queue.remove(queued)
        self._ended.append(LoadFailed(name, refused))
        return True

    # memory

    def free_memory(self, need: int, *, over_load: bool = False) -> bool:
        """Free memory until `need` bytes fit, and return whether they fit. If all reusable memory together would not
        suffice, free only MLX's buffers.

        The order is: MLX's free buffers, spare memory, the prefix cache, idle models, and with `over_load` the model
        load in progress, whose requests are refused. For a model load, which is judged without the margin, the caller
        subtracts the margin from `need`.
        """
        load = self._table.load if over_load else None
        if not self._unloader.can_free(need, 0 if load is None else load.total):
            return False
        if self._unloader.free_until_fits(need) or load is None:
            return fits(self._memory.read_settled(), need)
        self.abort_load(
            Refused(
                RefusalCode.NO_ROOM,
                "the load was aborted, because running requests or a lease need the memory: retry",
            )
        )
        return fits(self._memory.read_settled(), need)

    def free_for_forward(self, site: GateSite, need: int) -> bool:
        """Free memory for a forward, and return whether `need` bytes fit. At the sites `RUNNING_SITES`, also abort a
        load in progress if necessary. If all of this would not suffice, free only MLX's buffers (`free_memory`)."""
        return self.free_memory(need, over_load=site in RUNNING_SITES)

    def close(self) -> None:
        """Discard all loads without an outcome and unload all models, because the process ends."""
        self._queue.clear()
        self._end_current()
        self._unloader.close()


def _record_broken(blocks: LoadBlocks, descriptor: ModelDescriptor, error: Exception) -> Refused:
    """Record that the files of a model cannot be used, or that it could not be loaded now. Return the refusal."""
    text = " ".join(str(error).split())[:300]
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    ends = time.monotonic() + READ_RETRY_SECONDS if may_pass(error) else math.inf
    blocks.record_failure(descriptor, cause, ends)
    log.error("model broken", model=descriptor.name, cause=cause)
    return _refuse_unloadable(descriptor, cause)


def _refuse_unloadable(descriptor: ModelDescriptor, cause: str) -> Refused:
    return Refused(RefusalCode.LOAD_FAILED, f"{descriptor.name} cannot be loaded: {cause}")


def _free_for_load(unloader: ModelUnloader, memory: MemoryReader, need: int) -> bool:
    """Free memory until `need` bytes fit without the margin, and wait until the footprint has fallen. Return whether
    they fit."""
    done = unloader.free_memory(need - memory.read_now().margin)
    if done:
        memory.wait_until_settled()
    return done


def _refuse_too_large(descriptor: ModelDescriptor, need: int, memory: Memory, answer: Refused) -> Refused:
    """Return the refusal of a load that needs `need` bytes: the gate's answer, or that the model is too large for this
    node."""
    if answer.code is not RefusalCode.NO_ROOM or need <= compute_most_weights(memory):
        return answer
    return Refused(
        RefusalCode.TOO_LARGE,
        (
            f"{descriptor.name} needs {show_size(need)} for its weights, this node can give "
            f"{show_size(max(0, compute_most_weights(memory)))}: use a smaller variant, or raise memory.cap"
        ),
        answer.numbers,
    )
