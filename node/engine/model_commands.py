"""Execution of orders to load, unload, profile and restore models, of queued loads, and of unloads of idle models.

The end of a load answers the orders for it and the requests that waited for the model.
"""

import time
from collections.abc import Callable

from node.engine.admission_rules import build_refusal, refuse_unknown_model, refuse_unloadable_model
from node.engine.memory.gated_forward import MIN_LOAD_BYTES_PER_SECOND, GatedForwards
from node.engine.models.load_blocks import LoadBlocks
from node.engine.models.loaded_model import BYTES_BETWEEN_STEPS
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_manager import LoadFailed, LoadSucceeded, ModelManager, Outcome
from node.engine.models.model_table import ModelTable
from node.engine.models.model_unloader import ModelUnloader
from node.engine.models.model_wiring import ModelWiring
from node.engine.models.profile_sweep import SweepQueue
from node.engine.process.interface import NativeCallKind
from node.engine.request_admission import RequestAdmission
from node.engine.requests.waiting_requests import WaitingRequests
from node.engine.scheduling.scheduler import Scheduler
from node.models.catalogue import ModelCatalogue
from wire.capacity.batches import compute_waste_bytes
from wire.frames import Finished, Frame, LoadModel, ProfileModel, Refusal, RestoreModels, UnloadModel
from wire.refusals import RefusalCode, Refused

LOAD_STEP_EXPECTED_SECONDS = 10.0
"""Expected seconds of one piece of a load in addition to reading its weights, for example to compile kernels."""


class ModelCommands:
    """Executor of orders about models. `now` is in monotonic seconds in all methods.

    `cause(found, now)` returns why a model cannot be used now; empty if it can.
    """

    def __init__(
        self,
        table: ModelTable,
        catalogue: ModelCatalogue,
        manager: ModelManager,
        unloader: ModelUnloader,
        blocks: LoadBlocks,
        cause: Callable[[ModelDescriptor, float], str],
        sweeps: SweepQueue,
        admission: RequestAdmission,
        waiting: WaitingRequests,
        scheduler: Scheduler,
        forwards: GatedForwards,
        wiring: ModelWiring,
    ) -> None:
        self._table = table
        self._catalogue = catalogue
        self._manager = manager
        self._unloader = unloader
        self._blocks = blocks
        self._cause = cause
        self._sweeps = sweeps
        self._admission = admission
        self._waiting = waiting
        self._scheduler = scheduler
        self._forwards = forwards
        self._wiring = wiring
        self._orders: dict[int, str] = {}

    # orders

    def load(self, order: LoadModel, now: float) -> list[Frame]:
        """Queue the load of a model. Return an empty list; the answer follows at the end of the load
        (`take_ended_answers`).

        Return the answer at once if the model is already loaded or cannot be loaded. An earlier failure of the model's
        files does not prevent the load, but a ban or a failed trial of the tokenizer does.
        """
        if order.model in self._table.loaded:
            return [Finished(order.request, (), 0, 0)]
        refused = self._request_load(order.model, now)
        if refused is not None:
            return [Refusal(order.request, refused)]
        self._orders[order.request] = order.model
        return []

    def profile(self, order: ProfileModel, now: float) -> list[Frame]:
        """Queue the sweep that measures the memory of a model, and its load if necessary. Return an empty list; the
        answer follows at the end of the sweep (`SweepQueue.step`).

        Return a `Refusal` at once for an encoder, and for a model that is unknown or cannot be loaded.
        """
        found = self._catalogue.find(order.model)
        if found is not None and found.layout is not None and found.layout.encoder is not None:
            text = f"{order.model} is an encoder: its texts have no cache, so that there is no profile to measure"
            return [Refusal(order.request, Refused(RefusalCode.UNSUPPORTED, text))]
        refused = None if order.model in self._table.loaded else self._request_load(order.model, now)
        if refused is not None:
            return [Refusal(order.request, refused)]
        self._sweeps.request_sweep(order.request, order.model)
        return []

    def _request_load(self, name: str, now: float) -> Refused | None:
        """Queue the load of a model ordered by name; return the refusal if it cannot be loaded."""
        found = self._catalogue.find(name)
        if found is None:
            return refuse_unknown_model(name)
        self._blocks.clear_failure(name)
        cause = self._cause(found, now)
        if cause:
            return refuse_unloadable_model(name, cause)
        self._manager.request_load(found)
        return None

    def unload(self, order: UnloadModel) -> list[Frame]:
        """Unload a model on order, or abort its load, and return the answer: `Finished`, or `Refusal` for a model that
        is in use or not loaded. After an aborted load, return first the refusals of the requests and orders that waited
        for the model.
        """
        cancelled = Refused(
            RefusalCode.NOT_READY, f"the load of {order.model} was cancelled by `cluster model unload`", None, 1.0
        )
        if self._manager.is_loading(order.model) and self._manager.abort_load(cancelled, order.model):
            return [*self.take_ended_answers(), Finished(order.request, (), 0, 0)]
        loaded_model = self._table.loaded.get(order.model)
        if loaded_model is None:
            return [Refusal(order.request, Refused(RefusalCode.NO_MODEL, f"{order.model} is not loaded on this node"))]
        if users := loaded_model.usage.users:
            message = (
                f"{order.model} is used by {users} open requests or profile sweeps here: wait for their end, or cordon "
                "the node first"
            )
            return [Refusal(order.request, Refused(RefusalCode.IN_USE, message))]
        del loaded_model  # the last reference to its weights is the table's
        self._unloader.unload(order.model)
        return [Finished(order.request, (), 0, 0)]

    def restore(self, restore: RestoreModels, now: float) -> None:
        """Ban the models of `restore.bans`, which crashed the engine. Queue the loads of `restore.models`, which were
        loaded in the earlier process.

        Models that are unknown, banned or cannot be loaded for another reason are not queued.
        """
        self._blocks.ban(restore.bans, now)
        for name in restore.models:
            found = self._catalogue.find(name)
            if found is not None and not self._cause(found, now):
                self._manager.request_load(found)

    def unload_idle(self, now: float) -> None:
        """Unload the idle models whose time limit has passed at the monotonic time `now`, or that were replaced on disk
        (`ModelUnloader.unload_idle`). Queue the load of a replaced model if it is preloaded."""
        for found in self._unloader.unload_idle(now):
            self._manager.request_load(found)

    # loads

    def may_load(self) -> bool:
        """Return whether `step_load` may be called: a load is in progress or queued, and the gate is ready
        (`MemoryGate.refuse_unless_ready`)."""
        return self._manager.busy and self._forwards.gate.refuse_unless_ready() is None

    def step_load(self, now: float) -> None:
        """Start the next queued load, or load one piece of the load in progress. May only be called if `may_load()`.

        Wait for the launched decode steps first. To make room, evict cached prefixes and unload idle models. A load
        that fails or is refused ends without an exception. Raise `Halted` if the engine was halted, and `DeviceLost`
        for a failed command buffer.
        """
        name = self._manager.next_name
        self._scheduler.synchronize()
        with self._forwards.run_native(
            NativeCallKind.LOAD,
            name,
            self._waiting.find_first(name),
            LOAD_STEP_EXPECTED_SECONDS + BYTES_BETWEEN_STEPS / MIN_LOAD_BYTES_PER_SECOND,
        ):
            self._manager.tick(now)

    def take_ended_answers(self) -> list[Frame]:
        """Handle the loads that have ended since the last call. Return the answers to their orders and requests.

        After a load, the requests that waited for the model are admitted or refused by the memory that is free now.
        After a failed load, they are refused with the reason of the failure.
        """
        return [frame for outcome in self._manager.take_ended() for frame in self._end_load(outcome)]

    def _end_load(self, outcome: Outcome) -> list[Frame]:
        """Admit the requests that waited for a load, or refuse them with the reason of its failure. Answer the orders
        to load."""
        self._wiring.rewire()
        if not isinstance(outcome, LoadSucceeded):
            return self._end_failed_load(outcome)
        loaded_model = outcome.loaded_model
        loaded_model.ledger.set_waste(compute_waste_bytes(self._forwards.gate.cap))
        frames: list[Frame] = [Finished(number, (), 0, 0) for number in self._take_orders(loaded_model.name)]
        while (waiting := self._waiting.take_next(loaded_model.name)) is not None:
            frames += self._admission.admit(loaded_model, waiting.prepared, waiting.arrived, time.monotonic())
        return frames

    def _end_failed_load(self, outcome: LoadFailed) -> list[Frame]:
        self._sweeps.refuse_queued(outcome.model, outcome.refused)
        frames: list[Frame] = [Refusal(number, outcome.refused) for number in self._take_orders(outcome.model)]
        while (waiting := self._waiting.take_next(outcome.model)) is not None:
            frames.append(build_refusal(waiting.prepared, outcome.refused))
        return frames

    def _take_orders(self, model: str) -> list[int]:
        """Remove and return the orders to load a model."""
        numbers = [number for number, name in self._orders.items() if name == model]
        for number in numbers:
            del self._orders[number]
        return numbers
