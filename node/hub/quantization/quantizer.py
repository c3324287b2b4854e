"""Quantizer of this node: leases memory for a child process, watches its footprint, and completes its result.

Rules
- One quantization runs at a time. Its memory is leased as for a video job: the ceiling of the engine is lowered first.
- The quantizer kills the child when its footprint exceeds the lease, or cannot be read three times in a row. It also
  kills the child after `STALL_TIMEOUT_SECONDS` without progress, and after `TIMEOUT_SECONDS` in total.
- The memory is returned only after the child has ended.
- The catalogue shows a complete result or none.
- After the Mac has stopped sharing, the quantization continues for a grace period (`sharing.video_grace_seconds`) and
  is then cancelled. It also ends with the agent.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec.structs import replace

from node.engine_process.supervisor import Supervisor
from node.hub.child_messages import ChildEnd, ChildProgress, QuantizeOrder, build_end
from node.hub.errors import ModelFileError
from node.hub.order_child import OrderChild
from node.hub.quantization.plan import QuantizationPlan, plan_quantization
from node.memory.lessor import MemoryLessor
from node.memory.limits import LeaseHolder, Limiter
from node.memory.poll import MemoryPoll
from node.memory.sensor import list_group_members, measure_footprint
from node.models.folders import get_own_folder
from node.settings import NodeSettings
from node.video import lease_rules
from node.video.worker import watchdog_policy
from node.video.worker.watchdog_policy import EndWorker, WatchdogState, WorkerBounds, WorkerObservation
from wire.capacity.arithmetic import compute_most_bytes, judge
from wire.frames import QuantizeModel
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.refusals import Refused
from wire.units import show_size
from wire.video import LeaseEndCode

CONVERTER = "node.engine.conversion.quantizer"
POLL_INTERVAL_SECONDS = 0.2
"""Seconds between two readings of the child's footprint."""
STALL_TIMEOUT_SECONDS = 1800.0
"""Maximum seconds without progress. One tensor of the largest models takes about a minute."""
TIMEOUT_SECONDS = 24 * 3600.0
"""Maximum seconds of a quantization."""
REPEAT_SECONDS = 10.0
"""Seconds after which the last progress is reported again, because a step can take minutes.

After a lost link, the coordinator waits half a minute for a report of the running quantization.
"""
RETRY_SECONDS = 30.0
"""Seconds after which an order may be tried again while another process holds a lease."""

log = structlog.get_logger("node.hub.quantization")


class Quantizer:
    """Quantizer of models on this node, one at a time. Call every method on the event loop of the memory poll.

    `state` is the state folder. `environment` are the variables that locate the Hugging Face cache.
    """

    def __init__(
        self,
        settings: NodeSettings,
        state: Path,
        limiter: Limiter,
        poll: MemoryPoll,
        supervisor: Supervisor,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        self._own_folder = get_own_folder(state)
        self._limiter = limiter
        self._poll = poll
        self._supervisor = supervisor
        self._environment = environment
        self._lessor = MemoryLessor(limiter, poll, supervisor, LeaseHolder.QUANTIZATION)
        self._model = ""
        self._paused = ""
        self._child: OrderChild | None = None
        self._watchdog = WatchdogState(0.0, 0.0)
        self._progress: ChildProgress | None = None

    @property
    def holding(self) -> bool:
        """Whether memory is leased to a quantization now."""
        return self._lessor.holding

    def on_engine_change(self) -> None:
        """Handle a new report of the engine: continue a lease that waits for it."""
        self._lessor.on_engine_change()

    def pause(self, why: str) -> None:
        """Refuse new quantizations for the reason `why`; an empty `why` ends the pause. A running process continues.

        A quantization without a process, such as one that waits for its lease, ends as cancelled.
        """
        self._paused = why

    def end(self, why: str) -> None:
        """Cancel the running quantization, and refuse new ones for the reason `why` (`pause`).

        The process gets SIGTERM, and SIGKILL after `order_child.TERMINATE_TIMEOUT_SECONDS`. Do not wait for its end.
        """
        self._paused = why
        if self._child is not None:
            self._child.cancel()

    async def run(
        self,
        order: QuantizeModel,
        run_child: Callable[[OrderChild], Awaitable[ChildEnd]],
        report: Callable[[ChildProgress], None],
    ) -> ChildEnd:
        """Quantize a model as ordered, and return the end of the order.

        `run_child` runs the conversion process and returns its end; it is not called if the node stops sharing first.
        `report` is called with the progress of the order.

        Raise `ModelFileError` if the order cannot be performed, `OSError` if weights cannot be read or the result
        cannot be written. Raise `ValueError` if the weights of a Dense layer are invalid. After an error or a
        cancellation, the memory is returned and the incomplete result is deleted.
        """
        if self._model:
            raise ModelFileError(ModelOrderCode.IN_USE, f"this node quantizes {self._model}: wait, or cancel that")
        self._model = order.model
        self._progress = None
        repeating = asyncio.create_task(self._repeat_progress(report))
        try:
            plan = await asyncio.to_thread(
                plan_quantization, order, self._settings.models, self._own_folder, self._environment
            )
            self._progress = ChildProgress(phase=ModelOrderPhase.LEASING, total=plan.cost.stored)
            report(self._progress)
            try:
                try:
                    await self._reserve_memory(plan)
                    end = await self._convert(plan, run_child, report)
                finally:
                    self._lessor.return_memory()
            except BaseException:
                await asyncio.to_thread(plan.discard)
                raise
            return await asyncio.to_thread(_finish, plan, end)
        finally:
            repeating.cancel()
            self._model = ""

    async def _repeat_progress(self, report: Callable[[ChildProgress], None]) -> None:
        """Report the last progress every `REPEAT_SECONDS`, until the task is cancelled."""
        while True:
            await asyncio.sleep(REPEAT_SECONDS)
            if self._progress is not None:
                report(self._progress)

    # lease

    async def _reserve_memory(self, plan: QuantizationPlan) -> None:
        """Lower the ceiling by the predicted memory. Raise `ModelFileError` if it does not fit."""
        size = plan.cost.memory
        self._check_possible(size)
        if self._find_shortage(size) is not None:
            await self._lessor.make_room(size)
        shortage = self._find_shortage(size)
        if shortage is not None:
            raise ModelFileError(ModelOrderCode.NO_MEMORY, shortage, lease_rules.HEADROOM_RETRY_SECONDS)
        failure = await self._lessor.lower_ceiling(size)
        if failure is not None:
            text = f"{show_size(size)} cannot be leased to the quantization: {failure.message}"
            raise ModelFileError(ModelOrderCode.NO_MEMORY, text, lease_rules.HEADROOM_RETRY_SECONDS)
        log.info("ceiling lowered", model=self._model, size=show_size(size))

    def _check_possible(self, size: int) -> None:
        """Raise `ModelFileError` for reasons other than memory in use."""
        memory = self._poll.read_memory()
        if self._paused:
            raise ModelFileError(
                ModelOrderCode.IN_USE, f"this node stopped sharing: {self._paused}", lease_rules.READY_RETRY_SECONDS
            )
        if not memory.guard:
            text = "memory.guard is off on this node, and no lease can be enforced: set memory.guard = on"
            raise ModelFileError(ModelOrderCode.INVALID, text)
        other = self._lessor.find_other_holder()
        if other:
            raise ModelFileError(ModelOrderCode.IN_USE, other, RETRY_SECONDS)
        most = max(0, compute_most_bytes(memory))
        if memory.cap and size > most:
            text = (
                f"the quantization needs {show_size(size)} and can never fit on this node: the cap of "
                f"{show_size(memory.cap)} leaves {show_size(most)} after margin and engine"
            )
            raise ModelFileError(ModelOrderCode.NO_MEMORY, text)

    def _find_shortage(self, size: int) -> str | None:
        """Return a sentence about the memory that is missing for a lease of `size` bytes; None if the lease fits."""
        memory = self._poll.read_memory()
        answer = judge(memory, size)
        if not isinstance(answer, Refused):
            return None
        headroom = answer.numbers.headroom if answer.numbers is not None else None
        report = self._supervisor.reports.latest
        missing = lease_rules.describe_shortage(
            size,
            headroom,
            memory,
            report.models if report is not None else (),
            frozenset(self._settings.models.preload),
        )
        return f"the quantization needs {show_size(size)} of memory: {answer.message}; it needs {missing}"

    # process

    async def _convert(
        self,
        plan: QuantizationPlan,
        run_child: Callable[[OrderChild], Awaitable[ChildEnd]],
        report: Callable[[ChildProgress], None],
    ) -> ChildEnd:
        """Run the child under its lease, and return its end.

        Without a child, return the end of a quantization whose node stopped sharing meanwhile.
        """

        def on_progress(progress: ChildProgress) -> None:
            self._progress = progress
            report(progress)

        await asyncio.to_thread(plan.prepare)
        if self._paused:
            return self._build_pause_end()
        message = QuantizeOrder(source=str(plan.source), target=str(plan.temporary), bits=plan.bits)
        child = self._child = OrderChild(CONVERTER, message, on_progress)
        self._watchdog = watchdog_policy.create_state(time.monotonic())
        watch = asyncio.ensure_future(self._watch(child, plan.cost.memory))
        try:
            end = await run_child(child)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            self._child = None
        peak = self._watchdog.peak
        log.info("quantized", model=self._model, code=end.code, lease=show_size(plan.cost.memory), peak=show_size(peak))
        if watch.done() and not watch.cancelled():
            reason = watch.result()
            is_memory = reason.code == LeaseEndCode.MEMORY_LEASE_EXCEEDED
            code = ModelOrderCode.NO_MEMORY if is_memory else ModelOrderCode.FAILED
            return replace(build_end(code, f"the quantization was ended: {reason.message}"), peak=peak)
        if end.code == ModelOrderCode.CANCELLED and self._paused:
            return self._build_pause_end()
        return replace(end, peak=peak)

    def _build_pause_end(self) -> ChildEnd:
        return build_end(ModelOrderCode.CANCELLED, f"this node stopped sharing: {self._paused}")

    async def _watch(self, child: OrderChild, lease: int) -> EndWorker:
        """Kill the child when it exceeds its bounds, and return the reason."""
        bounds = WorkerBounds(lease, STALL_TIMEOUT_SECONDS, TIMEOUT_SECONDS)
        try:
            while True:
                end = self._check(child, bounds)
                if end is not None:
                    return end
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        finally:
            child.kill()

    def _check(self, child: OrderChild, bounds: WorkerBounds) -> EndWorker | None:
        """Read the footprint of the child. Return the reason to end it, or None."""
        group = child.pid
        members = () if group is None else list_group_members(group)
        if group is None or not members:
            return None
        self._limiter.set_worker(group)
        observation = WorkerObservation(measure_footprint(members), self._progress)
        self._watchdog, end = watchdog_policy.step(self._watchdog, observation, bounds, time.monotonic())
        return end


def _finish(plan: QuantizationPlan, end: ChildEnd) -> ChildEnd:
    """Rename the result to the target if the child has completed it, else delete it.

    Raise `ModelFileError` or `OSError` if the result cannot be used; it is deleted then.
    """
    try:
        if end.code == ModelOrderCode.COMPLETED:
            plan.complete()
        return end
    finally:
        plan.discard()
