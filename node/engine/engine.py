"""Text engine, the engine kind `mlx`: admission of requests, model loading and reports. The `scheduler` runs the rows.

    Prepared ─► preflight, commit ─► scheduler
        │           └ Refusal
        └ its model is not loaded: waits for the load

One iteration (`step`): a decode step of every batch, one piece of a load, one chunk of one prefill or of several. Each
request ends in exactly one `Finished`, `Refusal` or `Failed`. A cancelled request gets no frame.
"""

import gc
import os
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TypedDict

import structlog
from msgspec.structs import replace

from node.engine.kv.commitments import Commitment
from node.engine.kv.prefix_store import PrefixCache
from node.engine.memory.footprint import (
    EngineMemory,
    MetalMemory,
    WiredLimit,
    clear_pool,
    limit_pool,
    open_metal,
    release_free_memory,
)
from node.engine.memory.gate import GateSite, MemoryGate
from node.engine.memory.gated_forward import MIN_LOAD_BYTES_PER_SECOND, GatedForwards
from node.engine.memory.reserve import EmergencyReserve
from node.engine.memory.wired_limit import WireMode
from node.engine.models.load_times import LoadTimes
from node.engine.models.loaded_model import BYTES_BETWEEN_STEPS, LoadedModel, LoadStep, load
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_manager import FilesChangedError, LoadSucceeded, ModelManager, Outcome
from node.engine.models.model_stats import ModelHold
from node.engine.models.profile import MemoryProfileStore
from node.engine.models.profile_sweep import SweepQueue
from node.engine.models.profiler import ForwardPeak, Profiler
from node.engine.process.interface import MAX_CANCELLED_REMEMBERED, CallRecording, NativeCall, NativeCallKind, Work
from node.engine.requests import preflight
from node.engine.requests.prepared import PreparedRequest
from node.engine.requests.preparer import RequestPreparer
from node.engine.requests.sequence import Row, Sequence
from node.engine.requests.tokenize_admission import TokenizeResult, UntokenizedPrompt, too_long
from node.engine.scheduling.prefix_cache import PrefixCacheManager, limit_of
from node.engine.scheduling.sampling import sampling_of
from node.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from node.engine.scheduling.step_output import finished
from node.engine.text.tokenizer_trial import TokenizerTrials
from node.engine_process.environment import PROFILES
from node.memory.sensor import open_machine
from node.models.catalogue import ModelCatalogue
from node.settings import NodeSettings
from wire.capacity.arithmetic import (
    Fits,
    excess,
    level,
    max_batch,
    max_context,
    prefill_transient,
    request_transient,
    row_bytes,
    shed,
    waste_bytes,
)
from wire.capacity.fairness import WeightedKey
from wire.frames import (
    Admitted,
    Cancel,
    CountTokens,
    EngineReport,
    Finished,
    Frame,
    Generate,
    LoadModel,
    MemoryLimits,
    Ping,
    ProfileModel,
    ReclaimMemory,
    ReduceMemory,
    Refusal,
    RestoreModels,
    UnloadModel,
)
from wire.refusals import RefusalCode, Refused
from wire.report import Hardware, Memory, MemoryLevel, Model, TransientModel
from wire.units import show_size

PREEMPTION_INTERVAL_SECONDS = 1.0
"""Seconds between two preemptions at admission. Memory may be returned with a delay; without the pause more requests
than needed would be preempted."""
MAX_VIOLATIONS_LOGGED = 10
"""Maximum number of violated invariants in one line of the log."""
LOAD_STEP_EXPECTED_SECONDS = 10.0
"""Seconds that a piece of a load may take: building the model, compiling kernels."""

log = structlog.get_logger("engine.text")


class TextEngine:
    """Engine that serves the text models of a node with mlx-lm (see the module's docstring).

    `profiles` is the folder of measurements; None: they are not stored. Other modules and tests may read the
    attributes. Only the engine calls methods that change them.
    """

    def __init__(
        self,
        settings: NodeSettings,
        library: ModelCatalogue,
        recorder: CallRecording,
        hardware: Hardware,
        profiles: Path | None,
        metal: Callable[[], MetalMemory] = open_metal,
        gate: type[MemoryGate] = MemoryGate,
    ) -> None:
        self._settings = settings.engine.mlx
        self.catalogue = library
        self.trials = TokenizerTrials(profiles)
        self.preparer = RequestPreparer(
            library,
            self._context,
            recorder=recorder,
            trials=self.trials if settings.models.trial else None,
            barred=lambda found: self._cause(found, time.monotonic()),
        )
        self.footprint = EngineMemory(hardware.memory, self._known_bytes)
        self.forwards = GatedForwards(
            recorder,
            self.footprint,
            self._reserved,
            self._free_memory,
            self._give_up_load,
            self._residual,
            read=self._weights,
            gate=gate,
        )
        self.gate = self.forwards.gate
        self.prefix_cache = PrefixCacheManager(PrefixCache(), self._memory, self._kept_most, self.footprint.forget)
        self.times = LoadTimes(profiles)
        pinned = frozenset(settings.models.preload)
        self.profiler = Profiler(
            MemoryProfileStore(profiles),
            hardware,
            self._probe_fits,
            ForwardPeak(self.forwards.height, self.footprint.sensor),
            self._longest,
            self.gate.narrowed_bytes,
            chunk=self._settings.prefill_step_size,
            batch=self._settings.max_batch_size,
            context=self._settings.max_context,
            on=settings.models.profile == "auto",
        )
        self._wiring = WiredLimit(WireMode(settings.memory.wire), metal)
        self.model_manager = ModelManager(
            self.gate,
            self._memory,
            self._released,
            pinned,
            self.prefix_cache,
            library,
            self._pieces,
            settings.models.idle_unload_seconds,
        )
        self.scheduler = Scheduler(
            self.forwards,
            lambda: self.model_manager.loaded,
            self.prefix_cache,
            SchedulerLimits(
                self._settings.max_batch_size, self._settings.prefill_step_size, self._settings.min_prefill_step
            ),
        )
        self.sweeps = SweepQueue(
            self.profiler,
            self.forwards,
            lambda: self.model_manager.loaded,
            self.model_manager.loading,
            self._alone,
            self.scheduler.synchronize,
            lambda resident: self._reported(resident.found, self._memory(), time.monotonic()),
        )
        self.emergency_reserve = EmergencyReserve(settings.memory.reserve, self._memory)
        self.model_manager.spares += [self.emergency_reserve, self.sweeps]
        self._pending: dict[int, tuple[PreparedRequest, float]] = {}
        self._unread: dict[int, tuple[int, ModelHold | None]] = {}
        self._orders: dict[int, str] = {}
        self._acked = self._cap = self._coming = self._enforced = self._freed_order = 0
        self._cancelled: dict[int, None] = {}
        self._way_at = 0.0
        for name in settings.models.preload:
            found = library.find(name)
            if found is None:
                log.error("preload", model=name, cause="no such model in the folders")
            else:
                self.model_manager.request_load(found)

    # for the threads

    def prepare(self, frame: Frame) -> Work | None:
        """Convert a frame into work, on the I/O thread. Tokenize or count a short prompt at once.

        For a `Ping`, search for new models; return None if the models have not changed.
        """
        if isinstance(frame, Generate | CountTokens):
            if self.preparer.inline(frame):
                return self._read(frame).work
            return UntokenizedPrompt(frame, self.preparer.need(frame), partial(self._read, frame))
        if isinstance(frame, LoadModel | ProfileModel):
            self.catalogue.find_fresh(frame.model)
        if isinstance(frame, Ping):
            return frame if self.catalogue.refresh() else None
        return frame

    def running_call(self) -> NativeCall | None:
        """Return the running native call; None if none runs."""
        return self.forwards.call

    def handle(self, work: Work, now: float) -> Collection[Frame | UntokenizedPrompt]:
        """Process one piece of work. Return immediate answers, and prompts that may now be tokenized."""
        match work:
            case UntokenizedPrompt():
                return self._weigh(work)
            case TokenizeResult():
                self._put_by(work.request)
                return self.handle(work.work, now)
            case PreparedRequest():
                return self._generate(work, now)
            case Cancel():
                self._cancel(work.request, now)
            case MemoryLimits():
                self._hold(work)
            case ReduceMemory():
                return self._enforce(work, now)
            case ReclaimMemory():
                self._freed_order = work.number
                self.model_manager.free_memory(work.size, over_load=not self._waited_for(self.model_manager.reading))
                return self._ended_loads()
            case LoadModel():
                return self._load(work, now)
            case UnloadModel():
                return self._unload(work)
            case ProfileModel():
                return self._profile(work, now)
            case RestoreModels():
                self._restore(work, now)
            case Finished() | Refusal():
                return [work]
            case _:
                pass
        return []

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time of the next step: `now` if work is due, later for retries and for memory or idle
        checks. Return None if only a frame can bring work."""
        works = self.scheduler.next_step_at(now)
        if (works is not None and works <= now) or self.model_manager.ended:
            return now
        if self._may_load() or (self.sweeps.busy and self.gate.not_ready_refusal() is None):
            return now
        manager, footprint = self.model_manager, self.footprint
        times = (
            works,
            footprint.peak_expires_at(now),
            manager.idle_unload_at(),
            manager.looks_at,
            self.emergency_reserve.next_check_at(),
        )
        return min((when for when in times if when is not None), default=None)

    def step(self, now: float) -> Iterator[Frame]:
        """Decode, load a piece of a model, prefill one chunk. Yield the frames of each part before the next part
        starts: no token waits for a chunk.

        Raise `Halted` if a native call is due after `halt`.
        """
        self.scheduler.decode(now)
        yield from self.scheduler.drain_output()
        if self._may_load():
            self._tick()
        yield from self._ended_loads()
        self.scheduler.prefill(now)
        yield from self.scheduler.drain_output()
        yield from self._ended_loads()
        if self.sweeps.busy:
            yield from self.sweeps.step()
        self.model_manager.unload_idle(now)
        if (looks_at := self.model_manager.looks_at) is not None and looks_at <= now:
            self._look_back()
        if self.scheduler.next_step_at(now) is None:
            if broken := self.scheduler.check():
                log.error("invariants violated", broken=broken[:MAX_VIOLATIONS_LOGGED], count=len(broken))
            clear_pool()
            self.emergency_reserve.maintain(now)

    def report(self, now: float) -> EngineReport:
        """Return the state of the engine at the monotonic time `now`, with a fresh memory reading."""
        running, waiting, queued = self.scheduler.load()
        queued += sum(prepared.tokens for prepared, _ in self._pending.values())
        memory = replace(
            self._offered(now),
            reusable=self.prefix_cache.reusable + self.emergency_reserve.nbytes,
            reserve=self.emergency_reserve.nbytes,
        )
        models = tuple(self._reported(found, memory, now) for found in self.catalogue.known().values())
        manager = self.model_manager
        counts = replace(self.forwards.counts(), evictions=manager.evictions, departures=manager.departures)
        return EngineReport(
            memory,
            models,
            running,
            waiting + len(self._pending) + len(self._unread),
            queued,
            self._acked,
            counts,
            self.prefix_cache.state(),
            self.gate.limits_number,
            self._enforced,
            manager.returns.unreturned,
            self.gate.measures(),
            self._freed_order,
            metal_limit=self._wiring.metal.limit,
            wired=self._wiring.wired,
        )

    def halt(self) -> None:
        """Forbid further native calls. Any thread may call this."""
        self.forwards.halt()

    def close(self) -> None:
        """Wait for work on the device. Then release rows, cached prefixes, models and free buffers."""
        try:
            self.scheduler.synchronize()
        finally:
            self.scheduler.close()
            self.model_manager.close()

    def _cause(self, found: ModelDescriptor, now: float) -> str:
        """Return why a model cannot be used now; empty when it can."""
        return self.model_manager.cause(found, now) or self.trials.cause(found.fingerprint)

    def _look_back(self) -> None:
        release_free_memory()
        memory, returns = self._memory(), self.model_manager.returns
        weights = returns.weights
        if missing := returns.check(memory.phys, memory.base):
            log.warning(
                "memory not returned",
                bytes=show_size(missing),
                base=show_size(memory.base),
                unloaded=show_size(weights),
            )

    def _hold(self, limits: MemoryLimits) -> None:
        """Apply new limits. The wired limit does not depend on them."""
        self.gate.hold(limits)
        self.emergency_reserve.hold(limits.cap)
        self.model_manager.release_spare(lambda: level(self._memory()) <= MemoryLevel.OK)
        self.prefix_cache.evict_until(lambda: level(self._memory()) <= MemoryLevel.OK)
        if limits.cap != self._cap:
            self._cap = limits.cap
            limit_pool(limits.cap)
            for loaded_model in self.model_manager.loaded.values():
                loaded_model.ledger.bound_waste(waste_bytes(limits.cap))

    def _enforce(self, order: ReduceMemory, now: float) -> list[Frame]:
        """Free memory on order of the agent, judged between forwards: first caches, spare memory and idle models. If
        that is not enough, abort the load, then end the newest request."""
        self._enforced = order.poll
        if order.level < MemoryLevel.OVER_HARD:
            # The recent peak is no reason to free memory, because it has passed.
            self.model_manager.reclaim(lambda: level(replace(self._memory(), recent=0)) <= MemoryLevel.OK)
            return []
        before = excess(self._memory())

        def enough() -> bool:
            return before - excess(self._memory()) >= order.excess

        self.model_manager.reclaim(enough)
        if not enough():
            self.model_manager.abort_load(shed(self._memory(), order.excess))
        if not enough():
            self.scheduler.evict_newest(shed(self._memory(), order.excess), now)
            self.footprint.forget()
        return [*self._ended_loads(), *self.scheduler.drain_output()]

    # requests

    def _read(self, frame: Generate | CountTokens) -> TokenizeResult:
        """Tokenize a prompt, or only count its tokens."""
        counts = isinstance(frame, CountTokens)
        return TokenizeResult(frame.request, self.preparer.count(frame) if counts else self.preparer.prepare(frame))

    def _weigh(self, unread: UntokenizedPrompt) -> Collection[Frame | UntokenizedPrompt]:
        """Admit a long prompt to tokenization if there is room for it, and reserve that memory. Its model is not
        unloaded meanwhile."""
        number = unread.frame.request
        if number in self._cancelled:
            del self._cancelled[number]
            return []
        if self.scheduler.holds(number) or number in self._pending or number in self._unread:
            return []
        refused = self.gate.not_ready_refusal() or too_long(unread.frame, unread.need, self._memory())
        if refused is not None:
            return [Refusal(number, refused)]
        loaded_model = self.model_manager.loaded.get(unread.frame.model)
        hold = None if loaded_model is None else loaded_model.usage.hold()
        self._unread[number] = (0, hold)
        refused = self.forwards.check(GateSite.PREFLIGHT, unread.need) if unread.need else None
        if refused is not None:
            self._put_by(number)
            return [Refusal(number, refused)]
        self._unread[number] = (unread.need, hold)
        return [unread]

    def _put_by(self, number: int) -> None:
        """Release the reservation of a prompt after its tokenization."""
        _, hold = self._unread.pop(number, (0, None))
        if hold is not None:
            hold.release()

    def _generate(self, prepared: PreparedRequest, now: float) -> list[Frame]:
        request = prepared.request
        self._acked = max(self._acked, request.seq)
        if request.request in self._cancelled:
            del self._cancelled[request.request]
            return []
        if self.scheduler.holds(request.request) or request.request in self._pending:
            return []
        refused = self.gate.not_ready_refusal() or prepared.refused or self._unlike(request)
        if refused is not None:
            return [Refusal(request.request, refused)]
        loaded_model = self.model_manager.loaded.get(request.model)
        if loaded_model is not None:
            return self._admit(loaded_model, prepared, now, now)
        return self._await_model(prepared, now)

    def _unlike(self, request: Generate) -> Refused | None:
        """Refuse to resume an answer that another model of this name started, because the router knows only the last
        report."""
        found = self.catalogue.find(request.model)
        if not request.fingerprint or found is None or found.fingerprint == request.fingerprint:
            return None
        return Refused(
            RefusalCode.NOT_READY, f"the model {request.model} of this node differs from the one that began the answer"
        )

    def _await_model(self, prepared: PreparedRequest, now: float) -> list[Frame]:
        """Queue a request until its model is loaded; refuse it if the model cannot be loaded."""
        request = prepared.request
        found = self.catalogue.find(request.model)
        if found is None:
            return [Refusal(request.request, Refused(RefusalCode.NO_MODEL, f"this node has no model {request.model}"))]
        shape = self._shape(prepared, found)
        cause = self._cause(found, now)
        refused = preflight.never_fits(request, shape, self._model(found, now), self._settings.max_batch_size)
        if cause:
            refused = Refused(RefusalCode.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}")
        if refused is None:
            refused = preflight.too_large(shape, self.forwards.memory(now), self._model(found, now))
        if refused is not None:
            return [Refusal(request.request, refused, prepared.tokens)]
        self._pending[request.request] = (prepared, now)
        self.model_manager.request_load(found)
        return []

    def _shape(self, prepared: PreparedRequest, found: ModelDescriptor) -> preflight.RequestShape:
        context = self._context(found)
        return preflight.shape_of(prepared.request, prepared.tokens, self._settings.max_tokens, context)

    def _context(self, found: ModelDescriptor) -> int:
        """Return the most tokens of a row: the model's context, or fewer by setting."""
        return min(found.context, self._settings.max_context or found.context)

    def _admit(self, loaded_model: LoadedModel, prepared: PreparedRequest, arrived: float, now: float) -> list[Frame]:
        """Check a request against the memory now, commit its memory, and start it; or refuse it."""
        request = prepared.request
        shape = self._shape(prepared, loaded_model.found)
        refused = self._improper(loaded_model, prepared, shape, now)
        if refused is not None:
            return [Refusal(request.request, refused, shape.prompt)]
        sequence = self._sequence(loaded_model, prepared, shape, arrived)
        writing = list(sequence.active_rows())
        if not writing:  # the whole answer was sent by another node, and only its end is missing
            sequence.begin(now)
            sequence.join(now)
            return [Admitted(request.request, shape.prompt), finished(sequence, now)]
        refused = self._crowded(loaded_model, shape.of(len(writing)), now, request.owner)
        if refused is not None:
            return [Refusal(request.request, refused, shape.prompt)]
        for row, commitment in zip(writing, loaded_model.ledger.commit(shape.length, len(writing)), strict=True):
            row.commit(commitment)
        text = sum(len(message.content.encode()) for message in request.messages) + len(request.text.encode())
        loaded_model.stats.record_text(text, len(prepared.ids))
        self.scheduler.begin(loaded_model, sequence)
        return [Admitted(request.request, shape.prompt, sequence.prompt_cached, sequence.prompt_hash)]

    def _sequence(
        self, loaded_model: LoadedModel, prepared: PreparedRequest, shape: preflight.RequestShape, arrived: float
    ) -> Sequence:
        """Create a request's rows, without commitments; resumed rows contain their known tokens."""
        request = prepared.request
        assert prepared.pipeline_of is not None  # noqa: S101 only a refused request has none
        seed = _seed() if request.params.seed is None else request.params.seed
        sequence = Sequence(request, prepared, shape, sampling_of(request.params, loaded_model.defaults), seed, arrived)
        for choice in range(shape.choices):
            row = Row(sequence, choice, Commitment(0), prepared.pipeline_of(choice))
            row.replay(request.known(choice))
            sequence.rows.append(row)
        return sequence

    def _improper(
        self, loaded_model: LoadedModel, prepared: PreparedRequest, shape: preflight.RequestShape, now: float
    ) -> Refused | None:
        """Return the refusal of a request that no state of the memory would allow; None if one might."""
        model = self._model(loaded_model.found, now)
        refused = preflight.never_fits(prepared.request, shape, model, self._settings.max_batch_size)
        if refused is not None:
            return refused
        request = prepared.request
        resumed = (token for ids in request.resume for token in ids)
        biased = (token for token, _ in request.params.logit_bias)
        for token in (max(prepared.ids), *biased, *resumed):
            if not 0 <= token < loaded_model.vocabulary:
                return Refused(RefusalCode.INVALID, f"token id {token} is outside of 0..{loaded_model.vocabulary - 1}")
        return None

    def _crowded(
        self, loaded_model: LoadedModel, shape: preflight.RequestShape, now: float, owner: WeightedKey
    ) -> Refused | None:
        """Return the refusal if there is no room for a request of this key now; None if there is. Before a refusal,
        caches and idle models are evicted. After those, requests of keys that hold more memory are preempted."""
        model = self._model(loaded_model.found, now)
        row_cost, key = loaded_model.ledger.cost(shape.length, shape.choices), owner.name
        cost = row_cost + request_transient(model, shape.prompt, shape.promised, shape.choices)
        answer = preflight.admit(shape, self._offered(now, key), model, cost, self.gate)
        wanted = cost + self.scheduler.required_bytes(key)
        if answer is None or answer.code is not RefusalCode.NO_ROOM:
            return answer
        if self.model_manager.free_memory(wanted) or self._make_way(owner, row_cost, cost, now):
            return preflight.admit(shape, self._offered(now, key), model, cost, self.gate)
        return answer

    def _make_way(self, owner: WeightedKey, row_cost: int, cost: int, now: float) -> bool:
        """Preempt requests of keys that hold more memory than this key would with its request; return whether any was.
        The request will hold `row_cost` bytes and costs `cost` at its admission."""
        headroom = self._offered(now, owner.name).headroom
        if headroom is None or now < self._way_at or not self.scheduler.make_way(owner, row_cost, cost - headroom):
            return False
        self._way_at = now + PREEMPTION_INTERVAL_SECONDS
        self._released()
        return True

    def _cancel(self, number: int, now: float) -> None:
        known = self._pending.pop(number, None) is not None or self.sweeps.cancel(number)
        if known or self.scheduler.cancel(number, now):
            return
        self._cancelled[number] = None
        while len(self._cancelled) > MAX_CANCELLED_REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]

    # loading

    def _load(self, order: LoadModel, now: float) -> list[Frame]:
        if order.model in self.model_manager.loaded:
            return [Finished(order.request, (), 0, 0)]
        refused = self._ordered(order.model, now)
        if refused is not None:
            return [Refusal(order.request, refused)]
        self._orders[order.request] = order.model
        return []

    def _profile(self, order: ProfileModel, now: float) -> list[Frame]:
        refused = None if order.model in self.model_manager.loaded else self._ordered(order.model, now)
        if refused is not None:
            return [Refusal(order.request, refused)]
        self.sweeps.request_sweep(order.request, order.model)
        return []

    def _ordered(self, name: str, now: float) -> Refused | None:
        """Queue the load of a model ordered by name; return the refusal if it cannot be loaded."""
        found = self.catalogue.find(name)
        if found is None:
            return Refused(RefusalCode.NO_MODEL, f"this node has no model {name}")
        self.model_manager.clear_failure(name)
        cause = self._cause(found, now)
        if cause:
            return Refused(RefusalCode.LOAD_FAILED, f"{name} cannot be loaded: {cause}")
        self.model_manager.request_load(found)
        return None

    def _unload(self, order: UnloadModel) -> list[Frame]:
        cancelled = Refused(
            RefusalCode.NOT_READY, f"the load of {order.model} was cancelled by `cluster model unload`", None, 1.0
        )
        if self.model_manager.loading(order.model) and self.model_manager.abort_load(cancelled, order.model):
            return [*self._ended_loads(), Finished(order.request, (), 0, 0)]
        loaded_model = self.model_manager.loaded.get(order.model)
        if loaded_model is None:
            return [Refusal(order.request, Refused(RefusalCode.NO_MODEL, f"{order.model} is not loaded on this node"))]
        if users := loaded_model.usage.users:
            message = f"{order.model} has {users} open requests here: wait for their end, or cordon the node first"
            return [Refusal(order.request, Refused(RefusalCode.IN_USE, message))]
        del loaded_model
        self.model_manager.drop(order.model)
        return [Finished(order.request, (), 0, 0)]

    def _may_load(self) -> bool:
        return self.model_manager.busy and self.gate.not_ready_refusal() is None

    def _restore(self, restore: RestoreModels, now: float) -> None:
        self.model_manager.ban(restore.bans, now)
        for name in restore.models:
            found = self.catalogue.find(name)
            if found is not None and not self._cause(found, now):
                self.model_manager.request_load(found)

    def _waited_for(self, model: str) -> bool:
        """Return whether a request waits for this model."""
        return any(prepared.request.model == model for prepared, _ in self._pending.values())

    def _free_memory(self, site: GateSite, need: int) -> bool:
        """Free memory for a forward. For a running request, a load in progress is aborted."""
        return self.model_manager.free_memory(need, over_load=site in (GateSite.PREFILL, GateSite.JOIN, GateSite.GROW))

    def _give_up_load(self, why: Refused) -> bool:
        return self.model_manager.abort_load(why)

    def _tick(self) -> None:
        name = self.model_manager.reading
        first = next((number for number, (prepared, _) in self._pending.items() if prepared.request.model == name), 0)
        self.scheduler.synchronize()
        with self.forwards.native(
            NativeCallKind.LOAD,
            name,
            first,
            LOAD_STEP_EXPECTED_SECONDS + BYTES_BETWEEN_STEPS / MIN_LOAD_BYTES_PER_SECOND,
        ):
            self.model_manager.tick()

    def _ended_loads(self) -> list[Frame]:
        """Return the answers for all requests and orders whose load has ended."""
        ended, self.model_manager.ended = self.model_manager.ended, []
        return [frame for outcome in ended for frame in self._loaded(outcome)]

    def _loaded(self, outcome: Outcome) -> list[Frame]:
        """Admit the requests that waited for a load, or refuse them with the reason of its failure. Answer the orders
        to load."""
        self._rewire()
        if isinstance(outcome, LoadSucceeded):
            outcome.loaded_model.ledger.bound_waste(waste_bytes(self._cap))
        name = outcome.loaded_model.name if isinstance(outcome, LoadSucceeded) else outcome.model
        if not isinstance(outcome, LoadSucceeded):
            self.sweeps.failed(name, outcome.refused)
        frames: list[Frame] = []
        for number in [number for number, model in self._orders.items() if model == name]:
            del self._orders[number]
            ended = isinstance(outcome, LoadSucceeded)
            frames.append(Finished(number, (), 0, 0) if ended else Refusal(number, outcome.refused))
        for prepared, arrived in [one for one in self._pending.values() if one[0].request.model == name]:
            number = prepared.request.request
            del self._pending[number]
            if isinstance(outcome, LoadSucceeded):
                frames += self._admit(outcome.loaded_model, prepared, arrived, time.monotonic())
            else:
                frames.append(Refusal(number, outcome.refused, prepared.tokens))
        return frames

    # memory

    def _kept_most(self, cap: int) -> int:
        weights = sum(loaded_model.weights for loaded_model in self.model_manager.loaded.values())
        return limit_of(self._settings.prefix_cache_size, cap, weights)

    def _memory(self) -> Memory:
        return self.forwards.memory(time.monotonic())

    def _offered(self, now: float, key: str | None = None) -> Memory:
        """Read the memory as it is for a new request of `key`: waiting requests come first."""
        memory, wanted = self.forwards.memory(now), self.scheduler.required_bytes(key)
        left = None if memory.headroom is None else memory.headroom - wanted
        return replace(memory, reserved=memory.reserved + wanted, headroom=left)

    def _released(self) -> None:
        """Reset the recent peak after memory was freed, possibly that of a model."""
        self.footprint.forget()
        self._rewire()

    def _weighed(self, weights: int) -> None:
        """Wire a model whose weights (bytes) are all in memory, before its first forward."""
        self._coming = weights
        self._rewire()

    def _rewire(self) -> None:
        """Set the wired limit for the weights in memory."""
        self._wiring.apply(self._coming + sum(one.weights for one in self.model_manager.loaded.values()))

    def _known_bytes(self) -> int:
        """Return the known bytes in memory: weights as far as they are loaded, rows and cached prefixes."""
        rows = sum(one.weights + one.ledger.written_bytes() for one in self.model_manager.loaded.values())
        return rows + self.model_manager.read + self.prefix_cache.nbytes

    def _weights(self, model: str) -> int:
        """Return the bytes of a model's weights that are in memory."""
        return self.model_manager.weights(model)

    def _reserved(self) -> int:
        """Return the committed bytes: rows, weights still to load, rows that wait for them, and prompts in
        tokenization."""
        reserved = self.model_manager.left + sum(
            one.ledger.reserved_bytes() for one in self.model_manager.loaded.values()
        )
        reserved += sum(need for need, _ in self._unread.values())
        for prepared, _ in self._pending.values():
            found = self.catalogue.find(prepared.request.model)
            if found is not None:
                shape = self._shape(prepared, found)
                reserved += row_bytes(found.kv, shape.length) * shape.choices
        return reserved

    def _model(self, found: ModelDescriptor, now: float) -> Model:
        loaded_model, weights = self.model_manager.loaded.get(found.name), self.model_manager.size_of(found)
        if loaded_model is None:
            return Model(
                found.name,
                found.fingerprint,
                False,
                weights,
                found.kv.per_token,
                context=self._context(found),
                load_seconds=self.times.expected(found.fingerprint, weights, self.profiler.seconds(found.fingerprint)),
                features=self.preparer.features(found),
                kv_step=found.kv.step,
                kv_fixed=found.kv.fixed,
                kv_window=found.kv.window,
                kv_window_per_token=found.kv.window_per_token,
                kv_waste=waste_bytes(self._cap),
                loading=self.model_manager.loading(found.name),
                cause=self._cause(found, now),
                progress=self.model_manager.progress(found.name),
                pinned=found.name in self.model_manager.pinned,
                **self._transients(found.forward),
            )
        kv, rested = loaded_model.kv, loaded_model.usage.idle_seconds(now)
        return Model(
            found.name,
            found.fingerprint,
            True,
            loaded_model.weights,
            kv.per_token,
            context=self._context(found),
            load_seconds=loaded_model.stats.load_seconds,
            prefill_speed=loaded_model.stats.reads.after(rested),
            decode_speed=loaded_model.stats.writes.after(rested),
            bytes_per_token=loaded_model.stats.bytes_per_token or 4.0,
            features=self.preparer.features(found),
            groups=loaded_model.ledger.groups(),
            kv_step=kv.step,
            kv_fixed=kv.fixed,
            kv_window=kv.window,
            kv_window_per_token=kv.window_per_token,
            kv_waste=kv.waste,
            covered_rows=loaded_model.estimator.rows,
            uncovered=self.gate.narrowed_bytes() if loaded_model.estimator.rows else 0,
            pinned=found.name in self.model_manager.pinned,
            **self._transients(loaded_model.estimator.transient),
        )

    def _reported(self, found: ModelDescriptor, memory: Memory, now: float) -> Model:
        loaded_model, model = self.model_manager.loaded.get(found.name), self._model(found, now)
        return model if loaded_model is None else self._measured(model, loaded_model, memory)

    def _measured(self, model: Model, loaded_model: LoadedModel, memory: Memory) -> Model:
        """Add the results of measurements under the cap in force."""
        profile = loaded_model.stats.profile
        return replace(
            model,
            profiled=profile is not None,
            observed=loaded_model.estimator.highest,
            max_context=int(max_context(memory, model) * (1.0 if profile is None else profile.share)),
            max_batch=max_batch(memory, model, self._settings.max_batch_size),
            residual=0 if profile is None else max(profile.residual, loaded_model.estimator.residual),
            covered=0 if profile is None else profile.chunk,
        )

    def _longest(self, loaded_model: LoadedModel) -> int:
        """Return the longest row that the measured costs of a model allow, in tokens."""
        model = replace(
            self._model(loaded_model.found, 0.0), groups=(), **self._transients(loaded_model.estimator.transient)
        )
        return max_context(self._memory(), replace(model, loaded=True, weights=loaded_model.weights))

    def _alone(self, loaded_model: LoadedModel) -> bool:
        """Return whether a model is the only loaded one, used only by a sweep."""
        return list(self.model_manager.loaded.values()) == [loaded_model] and loaded_model.usage.users == 1

    def _pieces(self, found: ModelDescriptor) -> Iterator[LoadStep | LoadedModel]:
        """Load a model and measure its profile, piece by piece, with the seconds of each part."""
        begun = read = time.monotonic()
        try:
            for piece in load(found, self._weighed):
                if isinstance(piece, LoadStep):
                    read = time.monotonic()
                else:
                    warm, first = time.monotonic(), self.profiler.seconds(found.fingerprint) > 0
                    if not self.catalogue.unchanged(found):
                        raise FilesChangedError(f"the files of {found.name} changed during the load: retry")
                    yield from (LoadStep() for _ in self.profiler.probe(piece, alone=not self.model_manager.loaded))
                    probe = time.monotonic() - warm if first else 0.0
                    self.times.record(found.fingerprint, piece.weights, read - begun, warm - read, probe)
                yield piece
        finally:
            self._coming = 0

    def _probe_fits(self, need: int) -> bool:
        return isinstance(self.gate.check(GateSite.PROBE, self._memory(), need), Fits)

    def _residual(self) -> int | None:
        """Return the worst residual of all loaded models, from their profiles or seen since. None if no model is
        loaded, or if one was not measured up to the smallest chunk of this engine."""
        loaded_models = self.model_manager.loaded.values()
        profiles = [one.stats.profile for one in loaded_models]
        floor = min(self._settings.prefill_step_size, self._settings.min_prefill_step)
        measured = [one.residual for one in profiles if one is not None and one.chunk >= floor]
        seen = [one.estimator.residual for one in loaded_models]
        return None if not profiles or len(measured) < len(profiles) else max(*measured, *seen)

    def _transients(self, transient: TransientModel) -> "_Transients":
        """Return the transients of a model's forwards, with the smallest chunk of this engine."""
        floor = min(self._settings.prefill_step_size, self._settings.min_prefill_step)
        return {"forward": replace(transient, floor=floor), "transient": prefill_transient(transient, floor, 0)}


class _Transients(TypedDict):
    transient: int
    forward: TransientModel


def _seed() -> int:
    return int.from_bytes(os.urandom(8), "big")


def build(settings: NodeSettings, recorder: CallRecording) -> TextEngine:
    """Return the text engine for these settings, after a scan of the model folders. The environment variable
    `MACPOOL_PROFILES` names the folder of measurements."""
    library = ModelCatalogue(settings.models)
    library.scan()
    gc.freeze()
    folder = os.environ.get(PROFILES)
    return TextEngine(settings, library, recorder, open_machine(settings).hardware, Path(folder) if folder else None)
