"""Text engine, the engine kind `mlx`: passes frames to its parts and runs their steps.

- Requests: `request_admission` admits them by the rules of `admission_rules`. The `scheduler` runs the rows of chats;
  `embeddings` runs requests for vectors or scores.
- Models: `model_commands` carries out orders; the `model_manager` loads them, the `unloader` removes them.
- Reports: `model_describer` describes the models, with the functions of `model_report`.

`build` composes the parts. One iteration (`step`) is a decode step of every batch, one piece of a load, and one prefill
forward or turn of embeddings. It ends with one forward of a sweep. Each request ends with exactly one `Finished`,
`Refusal` or `Failed`; a cancelled request gets no further frame.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from msgspec.structs import replace

from node.engine.embedding.preparer import EmbeddingPreparer
from node.engine.embedding.request import EmbeddingTable
from node.engine.embedding.scheduler import EmbeddingScheduler
from node.engine.memory.footprint import EngineMemory, clear_buffers, limit_buffers, release_free_memory
from node.engine.memory.gated_forward import GatedForwards
from node.engine.memory.memory_reader import MemoryReader
from node.engine.memory.reserve import EmergencyReserve
from node.engine.model_commands import ModelCommands
from node.engine.model_describer import ModelDescriber
from node.engine.models.load_times import LoadTimes
from node.engine.models.model_manager import ModelManager
from node.engine.models.model_table import ModelTable
from node.engine.models.model_unloader import ModelUnloader
from node.engine.models.model_wiring import ModelWiring
from node.engine.models.profile_sweep import SweepQueue
from node.engine.process.interface import NativeCall, Work
from node.engine.request_admission import RequestAdmission
from node.engine.requests.prepared import PreparedEmbedding, PreparedRequest
from node.engine.requests.preparer import RequestPreparer
from node.engine.requests.tokenize_admission import TokenizeResult, UntokenizedPrompt
from node.engine.requests.waiting_requests import WaitingRequests
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.scheduler import Scheduler
from node.models.catalogue import ModelCatalogue
from wire.capacity.arithmetic import build_shed_refusal, compute_excess, compute_level
from wire.capacity.batches import compute_waste_bytes
from wire.frames import (
    Cancel,
    ClearCache,
    CountTokens,
    Embed,
    EngineReport,
    Failed,
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
    RescanModels,
    RestoreModels,
    UnloadModel,
)
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import MemoryLevel
from wire.units import show_size

MAX_VIOLATIONS_LOGGED = 10
"""Maximum number of violated invariants in one line of the log."""

log = structlog.get_logger("engine.text")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Parts of a text engine. Only the engine and these parts call methods that change them."""

    catalogue: ModelCatalogue
    """Models on disk."""
    preparer: RequestPreparer
    """Preparer of requests on the I/O thread and the prompt threads."""
    footprint: EngineMemory
    """Memory sensor of this process."""
    memory: MemoryReader
    """Reader of the memory that the gate judges."""
    forwards: GatedForwards
    """Runner of native calls, and their memory gate, which checks each forward before it runs."""
    wiring: ModelWiring
    """Setter of the wired limit."""
    prefix_cache: PrefixCacheManager
    """Manager of cached prefixes, in memory and on the disk."""
    emergency_reserve: EmergencyReserve
    """Emergency reserve: memory that is held only to be released before caches and models."""
    models: ModelTable
    """Loaded models, and the load in progress."""
    unloader: ModelUnloader
    """Unloader of models, which also frees memory that requests could reuse."""
    model_manager: ModelManager
    """Manager of loads: queues them and loads one model at a time, in pieces."""
    times: LoadTimes
    """Durations of earlier loads."""
    describer: ModelDescriber
    """Describer of models for reports and for admission."""
    waiting: WaitingRequests
    """Requests in tokenization, and requests that wait for the load of their model."""
    scheduler: Scheduler
    """Scheduler of prefills and of decode batches."""
    admission: RequestAdmission
    """Admission, which starts, queues or refuses prepared requests."""
    commands: ModelCommands
    """Executor of orders about models."""
    sweeps: SweepQueue
    """Queue of ordered profile sweeps, which measure the memory of a model."""
    embedding_preparer: EmbeddingPreparer
    """Preparer of requests for embeddings or scores."""
    embedding_table: EmbeddingTable
    """Live requests for embeddings or scores."""
    embeddings: EmbeddingScheduler
    """Scheduler of requests for embeddings or scores."""


class TextEngine:
    """Engine that serves the text models of a node with mlx-lm (see the module's docstring).

    `now` is in monotonic seconds in all methods. `gate` is the memory gate of `parts.forwards`.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.gate = parts.forwards.gate
        self._enforced = self._freed_order = 0
        self._embedded = False

    # for the threads

    @property
    def loads(self) -> int:
        """Number of model loads that have succeeded."""
        return self.parts.model_manager.loads

    def prepare(self, frame: Frame) -> Work | None:
        """Convert a frame into work, on the I/O thread. Tokenize or count a short prompt at once. A prompt that is
        long, needs a lock or has a grammar becomes an `UntokenizedPrompt`.

        For `RescanModels`, scan the model folders; for a load or a profile, look for the ordered model's files.
        For a `Ping`, search for new models if that is due. Then return None if the models have not changed, otherwise
        the `Ping`, whose handling causes a new report.
        """
        parts = self.parts
        if isinstance(frame, Generate | CountTokens | Embed):
            if parts.preparer.can_prepare_inline(frame):
                return self._tokenize(frame).work
            return UntokenizedPrompt(frame, parts.preparer.compute_need_bytes(frame), partial(self._tokenize, frame))
        if isinstance(frame, LoadModel | ProfileModel):
            parts.catalogue.find_fresh(frame.model)
        if isinstance(frame, RescanModels):
            parts.catalogue.scan()
        if isinstance(frame, Ping):
            return frame if parts.catalogue.refresh() else None
        return frame

    def _tokenize(self, frame: Generate | CountTokens | Embed) -> TokenizeResult:
        """Tokenize a prompt or texts, or only count the tokens of a prompt."""
        preparer = self.parts.preparer
        if isinstance(frame, Embed):
            return TokenizeResult(frame.request, self.parts.embedding_preparer.prepare(frame))
        work = preparer.count_tokens(frame) if isinstance(frame, CountTokens) else preparer.prepare(frame)
        return TokenizeResult(frame.request, work)

    def read_running_call(self) -> NativeCall | None:
        """Return the running native call; None if none runs."""
        return self.parts.forwards.call

    def handle(self, work: Work, now: float) -> Collection[Frame | UntokenizedPrompt]:
        """Process one piece of work. Return immediate answers, and prompts that may now be tokenized."""
        parts = self.parts
        match work:
            case UntokenizedPrompt():
                return parts.admission.admit_tokenization(work, now)
            case TokenizeResult():
                parts.waiting.end_tokenization(work.request)
                return self.handle(work.work, now)
            case PreparedRequest() | PreparedEmbedding():
                return parts.admission.admit_or_queue(work, now)
            case Cancel():
                if not (parts.sweeps.cancel(work.request) or parts.embeddings.cancel(work.request, now)):
                    parts.admission.cancel(work.request, now)
            case MemoryLimits():
                self._apply_limits(work)
            case ReduceMemory():
                return self._reduce_memory(work, now)
            case ReclaimMemory():
                return self._reclaim_memory(work)
            case LoadModel():
                return parts.commands.load(work, now)
            case UnloadModel():
                return parts.commands.unload(work)
            case ProfileModel():
                return parts.commands.profile(work, now)
            case ClearCache():
                return [self._clear_cache(work)]
            case RestoreModels():
                parts.commands.restore(work, now)
            case Finished() | Refusal():
                return [work]
            case _:
                pass
        return []

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time of the next step: `now` if work is due; later for retries, memory checks, unloads
        of idle models and writes to the disk cache. Return None if the next step needs a frame first."""
        parts = self.parts
        works, embeds = parts.scheduler.next_step_at(now), parts.embeddings.next_step_at(now)
        if embeds is not None:
            works = embeds if works is None else min(works, embeds)
        if (works is not None and works <= now) or parts.model_manager.has_ended:
            return now
        if parts.commands.may_load() or (parts.sweeps.busy and self.gate.refuse_unless_ready() is None):
            return now
        times = (
            works,
            parts.memory.find_peak_expiry(now),
            parts.unloader.find_next_idle_unload(),
            parts.model_manager.next_leak_check_at,
            parts.emergency_reserve.find_next_check() if works is None else None,  # `_maintain_idle`
            parts.prefix_cache.disk.find_next_write(),
        )
        return min((when for when in times if when is not None), default=None)

    def step(self, now: float) -> Iterator[Sequence[Frame]]:
        """Decode, load a piece of a model, then run one prefill forward or one turn of requests for embeddings. Yield
        the frames of each part before the next part starts, because generated tokens must not wait for a chunk.

        Prefills and embeddings take turns if both have work. Then run a forward of a sweep, unload idle models, check
        for leaks and write to the disk cache. If no request has work, check the invariants, free MLX's buffers and
        maintain the reserve. Raise `Halted` if a native call is due after `halt`. `now` is the monotonic start time.
        """
        parts = self.parts
        parts.scheduler.decode(now)
        yield parts.scheduler.drain_output()
        if parts.commands.may_load():
            parts.commands.step_load(now)
        yield parts.commands.take_ended_answers()
        if parts.embeddings.has_work(now) and not (self._embedded and parts.scheduler.can_prefill(now)):
            self._embedded = True
            parts.embeddings.run_turn(now)
        else:
            self._embedded = False
            parts.scheduler.prefill(now)
        yield [
            *parts.scheduler.drain_output(),
            *parts.embeddings.drain_output(),
            *parts.commands.take_ended_answers(),
        ]
        if parts.sweeps.busy:
            yield parts.sweeps.step()
        parts.commands.unload_idle(now)
        if (check_at := parts.model_manager.next_leak_check_at) is not None and check_at <= now:
            self._check_leak()
        busy = parts.scheduler.next_step_at(now) is not None or bool(len(parts.embedding_table))
        parts.prefix_cache.disk.write_next(now, busy=busy)
        if not busy:
            self._maintain_idle(now)

    def _maintain_idle(self, now: float) -> None:
        """Check the invariants, free MLX's buffers and maintain the reserve, because no request has work."""
        parts = self.parts
        if broken := self.check():
            log.error("invariants violated", broken=broken[:MAX_VIOLATIONS_LOGGED], count=len(broken))
        clear_buffers()
        parts.emergency_reserve.maintain(now)

    def check(self) -> list[str]:
        """Return one sentence for each violated invariant of rows and loads; an empty list if there is none."""
        return [*self.parts.scheduler.check(), *self.parts.model_manager.check()]

    def report(self, now: float) -> EngineReport:
        """Return the state of the engine at the monotonic time `now`, with a fresh memory reading."""
        parts = self.parts
        running, waiting, queued = parts.scheduler.measure_load()
        reserve = parts.emergency_reserve.nbytes
        memory = replace(
            parts.admission.read_offered_memory(now),
            reusable=parts.prefix_cache.memory.reusable + reserve,
            reserve=reserve,
        )
        unloader = parts.unloader
        return EngineReport(
            memory=memory,
            models=parts.describer.describe_all(memory, now),
            running=running,
            waiting=waiting + len(parts.waiting) + len(parts.embedding_table),
            queued_tokens=queued + parts.waiting.count_tokens() + parts.embedding_table.count_tokens(),
            acked_seq=parts.admission.acked,
            counts=replace(parts.forwards.get_counts(), evictions=unloader.evictions, departures=unloader.departures),
            cache=parts.prefix_cache.get_state(parts.catalogue.get_fingerprints()),
            limits_number=self.gate.limits_number,
            enforced=self._enforced,
            unreturned=unloader.leak_check.unreturned,
            measures=self.gate.get_measures(),
            freed_order=self._freed_order,
            metal_limit=parts.wiring.limit.metal.limit,
            wired=parts.wiring.limit.wired,
        )

    def halt(self) -> None:
        """Forbid further native calls. Any thread may call this."""
        self.parts.forwards.halt()

    def close(self) -> None:
        """Wait for work on the device. Then release all requests, the models with their cached prefixes, and the disk
        cache. If the wait raises, these are released before the exception propagates."""
        try:
            self.parts.scheduler.synchronize()
        finally:
            self.parts.scheduler.close()
            self.parts.embeddings.close(time.monotonic())
            self.parts.model_manager.close()
            self.parts.prefix_cache.disk.close()

    # memory

    def _check_leak(self) -> None:
        """Compare the footprint with the footprint before the first load, and log a leak. The emergency reserve and
        cached prefixes are not a leak."""
        release_free_memory()
        parts = self.parts
        memory, returns = parts.memory.read_now(), parts.unloader.leak_check
        weights, base = returns.weights, memory.base + parts.emergency_reserve.nbytes + parts.prefix_cache.memory.nbytes
        if missing := returns.check(memory.phys, base):
            sizes = {"bytes": missing, "base": base, "unloaded": weights}
            log.warning("memory not returned", **{name: show_size(size) for name, size in sizes.items()})

    def _apply_limits(self, limits: MemoryLimits) -> None:
        """Apply new limits. If memory is above the level OK under them, release spare memory and cached prefixes. A new
        cap also changes the limit of MLX's free buffers, and the padding that batches may have."""
        parts, cap = self.parts, self.gate.cap
        self.gate.set_limits(limits)
        parts.emergency_reserve.resize(limits.cap)
        parts.unloader.release_spare(self._is_memory_ok)
        parts.prefix_cache.evict_until(self._is_memory_ok)
        if limits.cap != cap:
            limit_buffers(limits.cap)
            for loaded_model in parts.models.loaded.values():
                loaded_model.ledger.set_waste(compute_waste_bytes(limits.cap))

    def _clear_cache(self, order: ClearCache) -> Frame:
        """Delete cached prefixes on order; return the answer. The fingerprint of a model without files is its name."""
        fingerprint = self.parts.catalogue.get_fingerprints().get(order.model) or order.model
        try:
            self.parts.prefix_cache.clear(order.model, fingerprint)
        except BlockingIOError as error:
            return Refusal(order.request, Refused(RefusalCode.NOT_READY, f"{error}: retry after its end", None, 2.0))
        except OSError as error:
            return Failed(order.request, FailureCode.ENGINE_ERROR, f"files of the disk cache remain: {error}")
        self.parts.footprint.reset_peak()
        return Finished(order.request, (), 0, 0)

    def _is_memory_ok(self) -> bool:
        return compute_level(self.parts.memory.read_settled()) <= MemoryLevel.OK

    def _reduce_memory(self, order: ReduceMemory, now: float) -> list[Frame]:
        """Free memory on order of the agent, judged between forwards: caches, spare memory and idle models. If that is
        not enough at the level `OVER_HARD`, abort the load, then end the newest request, embeddings first."""
        parts = self.parts
        read = parts.memory.read_settled
        self._enforced = order.poll
        if order.level < MemoryLevel.OVER_HARD:
            # The recent peak is no reason to free memory, because it has passed.
            parts.unloader.reclaim_memory(lambda: compute_level(replace(read(), recent=0)) <= MemoryLevel.OK)
            return []
        before = compute_excess(read())

        def has_freed_enough() -> bool:
            after = compute_excess(read())
            return before - after >= order.excess or (after <= 0 < compute_excess(parts.memory.read_now()))

        parts.unloader.reclaim_memory(has_freed_enough)
        if not has_freed_enough():
            parts.model_manager.abort_load(build_shed_refusal(read(), order.excess))
        if not has_freed_enough():
            refused = build_shed_refusal(read(), order.excess)
            if not parts.embeddings.end_newest(refused, now):
                parts.scheduler.end_newest(refused, now)
            parts.footprint.reset_peak()
        return [*parts.commands.take_ended_answers(), *parts.scheduler.drain_output(), *parts.embeddings.drain_output()]

    def _reclaim_memory(self, order: ReclaimMemory) -> list[Frame]:
        """Free memory for a lease, and wait for the footprint to show it. A load that no request awaits may end."""
        parts = self.parts
        self._freed_order = order.number
        awaited = parts.waiting.is_awaited(parts.model_manager.next_name)
        parts.model_manager.free_memory(order.size, over_load=not awaited)
        parts.memory.wait_until_settled()
        return parts.commands.take_ended_answers()
