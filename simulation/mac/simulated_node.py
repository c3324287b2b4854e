"""Simulated Mac, which receives and sends the frames of a real node, in virtual time.

Its engine is the scripted one (`node.engine.scripted.turns`), with the costs of the chip. This module admits requests
and sends reports. `node_models` loads models. `node_memory` decides about memory by the arithmetic of the gate, and
evicts ended chats and idle models before a request is refused.

The model does not include texts, transients beyond one number for each model, preflight on a second thread, and other
programs.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from node.engine.requests.preflight import RequestShape, compute_shape
from node.engine.scripted.build import TurnParts, build_turns
from node.engine.scripted.sequence import ScriptedRow, ScriptedSequence
from simulation.mac.ended_chats import EndedChats, make_chat_key
from simulation.mac.forecast import NodeForecast
from simulation.mac.hardware import CHIPS, ChipCosts, compute_default_cap
from simulation.mac.node_memory import NodeMemory
from simulation.mac.node_models import NodeModels, SimulatedModel
from simulation.scenario import ModelSpec, NodeSpec
from simulation.workload import ConversationTurn
from wire.capacity.arithmetic import can_ever_fit, estimate_request_need, judge
from wire.frames import Admitted, Cancel, Failed, Finished, Frame, Generate, Refusal, Report, split_deltas
from wire.refusals import RefusalCode, Refused
from wire.report import EngineCounters, EngineState, Memory
from wire.units import parse_size


@dataclass(slots=True, eq=False, frozen=True)
class SimulatedRequest:
    """Admitted request on a simulated node."""

    turn: ConversationTurn
    model: SimulatedModel
    sequence: ScriptedSequence


class SimulatedNode:
    """Simulated Mac, which answers frames of the router in the virtual time of `loop`.

    `send(frame)` sends a frame to the router. `turn_of(request_id)` returns the turn of a request, with its true
    output. `changed()` is called after a request has ended or was preempted, and at the end of a lease. `loads` is
    whether the models in `NodeSpec.loaded` are in memory at the start.
    """

    def __init__(
        self,
        name: str,
        spec: NodeSpec,
        models: tuple[ModelSpec, ...],
        loop: asyncio.AbstractEventLoop,
        *,
        send: Callable[[Frame], None],
        turn_of: Callable[[str], ConversationTurn],
        changed: Callable[[], object] = lambda: None,
        loads: bool = True,
    ) -> None:
        self.name = name
        self._rows = spec.batch
        self._loop = loop
        self._send = send
        self._turn_of = turn_of
        self._changed = changed
        total = parse_size(spec.memory)
        self.models = NodeModels(CHIPS[spec.chip], parse_size(spec.disk), compute_default_cap(total))
        """Models on the disk of the node, with their state."""
        for model in models:
            if not spec.models or model.name in spec.models:
                self.models.add(model, loaded=loads and model.name in spec.loaded)
        self._chats = EndedChats()
        self._memory = NodeMemory(total, self.models, self._chats)
        self._costs = ChipCosts(CHIPS[spec.chip], self.models.list_costs())
        self._engine: TurnParts = build_turns(self._memory, self._costs, spec.batch, leap=True)
        self._requests: dict[int, SimulatedRequest] = {}
        self.forecast = NodeForecast(
            self.models, self._memory, self._chats, self._costs, self._engine.table, self._list_queued
        )
        """Forecast for the clairvoyant router."""
        self._awaiting_model: list[SimulatedRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._acked = self._sequence = 0
        self.dirty = True
        """Whether the state has changed since the newest report. A node with requests is always dirty."""

    @property
    def loads(self) -> int:
        """Number of model loads that were requested; models in memory at the start are not counted."""
        return self.models.loads

    @property
    def preemptions(self) -> int:
        """Number of times that the engine preempted a request."""
        return self._engine.preemptor.preemptions

    @property
    def highest(self) -> int:
        """Highest footprint of all reports, in bytes; 0 before the first."""
        return self._memory.highest

    def read_memory(self) -> Memory:
        """Return the current memory. The KV of running requests counts as `reserved`, not as `active`."""
        return self._memory.read(self._loop.time())

    def _list_queued(self) -> list[ScriptedSequence]:
        """Return the requests whose prefill has not ended, and those that wait for their model."""
        return [*self._engine.table.queue, *(request.sequence for request in self._awaiting_model)]

    def list_sequences(self) -> list[ScriptedSequence]:
        """Return all requests on this node that have not ended, as sequences of the scripted engine."""
        return [request.sequence for request in self._requests.values()]

    # frames from the router

    def take(self, frame: Frame) -> None:
        """Handle a frame of the router: `Generate` or `Cancel`. Ignore other frames."""
        now = self._interrupt()
        if isinstance(frame, Generate):
            self._generate(frame, now)
        elif isinstance(frame, Cancel):
            self._cancel(frame.request, now)
        self._settle(now)

    def _interrupt(self) -> float:
        """End the running turns of the engine early, because requests or memory change. Return the time."""
        now = self._loop.time()
        self._emit(self._engine.turns.interrupt(now), now)
        return now

    def _generate(self, frame: Generate, now: float) -> None:
        self._acked = max(self._acked, frame.seq)
        self.dirty = True
        turn, model = self._turn_of(frame.request_id), self.models.get(frame.model)
        if model is None:
            text = f"this node does not serve {frame.model}"
            self._send(Refusal(frame.request, Refused(RefusalCode.NO_MODEL, text), turn.prompt))
            return
        shape = compute_shape(frame, turn.prompt, model.spec.context, model.spec.context)
        refused = self._find_refusal(model, shape, frame, now)
        if refused is not None:
            self._send(Refusal(frame.request, refused, turn.prompt))
            return
        cached = self._admit(frame, turn, model, shape, now)
        self._send(Admitted(frame.request, turn.prompt, cached, make_chat_key(turn.session)))

    def _find_refusal(
        self, simulated: SimulatedModel, shape: RequestShape, frame: Generate, now: float
    ) -> Refused | None:
        """Check for room after evicting chats and unloading idle models.

        Return None if there is room, else the refusal. Preempted requests come first.
        """
        model = simulated.to_report(now)
        need = estimate_request_need(model, shape.prompt, shape.answer_tokens) - (
            model.weights if simulated.loading else 0
        )
        if not can_ever_fit(self._memory.read(now), model, shape.prompt, shape.answer_tokens):
            answer = judge(self._memory.read(now), need)
            numbers = answer.numbers if isinstance(answer, Refused) else None
            return Refused(RefusalCode.TOO_LARGE, f"{self.name} could not hold this if it were alone", numbers)
        waiting = self._engine.preemptor.compute_required_bytes(frame.weighted_key.name)
        return self._memory.check_for(need + waiting, now, simulated)

    def _admit(
        self, frame: Generate, turn: ConversationTurn, model: SimulatedModel, shape: RequestShape, now: float
    ) -> int:
        """Commit the memory of a request and start it, or let it wait for its model. Return its cached tokens."""
        cached = self._chats.find(turn.session, model.spec.name, turn.prompt)
        self._chats.use(turn.session)
        (commitment,) = model.ledger.commit(shape.length, 1)
        row = ScriptedRow(choice=0, commitment=commitment)
        row.end_replay(len(frame.get_known_ids(0)))
        sequence = ScriptedSequence(
            request=frame,
            shape=shape,
            ledger=model.ledger,
            ends=turn.output,
            arrived=now,
            rows=[row],
            cached=cached,
            warm=cached,
        )
        request = self._requests[frame.request] = SimulatedRequest(turn, model, sequence)
        model.add_request(now)
        if model.loaded:
            self._engine.table.enqueue(sequence)
        else:
            self._awaiting_model.append(request)
            self.models.load(model, now)
        return cached

    def _cancel(self, number: int, now: float) -> None:
        request = self._requests.get(number)
        if request is not None:
            self._engine.preemptor.drop(request.sequence, now)
            self._remove(request, now)
            self._changed()

    def _remove(self, request: SimulatedRequest, now: float) -> None:
        """Remove a request that has ended."""
        del self._requests[request.sequence.number]
        if request in self._awaiting_model:
            self._awaiting_model.remove(request)
        request.model.remove_request(now)
        self.dirty = True

    # frames to the router

    def _emit(self, frames: Iterable[Frame], now: float) -> None:
        """Send the frames of the engine. Tokens that were not sent yet precede the end of their request."""
        for frame in frames:
            if isinstance(frame, Finished | Failed | Refusal):
                self._end(frame, self._requests[frame.request], now)
            else:
                self.dirty = True
                self._send(frame)

    def _end(self, frame: Finished | Failed | Refusal, request: SimulatedRequest, now: float) -> None:
        sequence, turn = request.sequence, request.turn
        unsent = [row.gather(sequence.number) for row in sequence.list_active_rows() if row.produced > row.sent]
        if isinstance(frame, Failed):
            for deltas in split_deltas(unsent):
                self._send(deltas)
        self._remove(request, now)
        if isinstance(frame, Finished):
            self._memory.keep_chat(turn.session, request.model, turn.prompt + turn.output, now)
        self._send(frame)
        self._changed()

    def flush(self) -> None:
        """Send all generated tokens that were not sent yet."""
        now = self._interrupt()
        self._emit(self._engine.batch.flush(), now)

    # time

    def _settle(self, now: float) -> None:
        """Process all due events, then set a timer for the next."""
        due = self._next_at(now)
        while due is not None and due <= now:
            self._process(now)
            due = self._next_at(now)
        if self._timer is not None:
            self._timer.cancel()
        self._due = due or 0.0
        self._timer = None if due is None else self._loop.call_at(due, self._wake)

    def _next_at(self, now: float) -> float | None:
        times = (self._engine.turns.next_at(now), self.models.next_loaded_at())
        return min((time for time in times if time is not None), default=None)

    def _process(self, now: float) -> None:
        loaded = self.models.end_load(now)
        if loaded is not None:
            self.dirty = True
            for request in [waiting for waiting in self._awaiting_model if waiting.model is loaded]:
                self._awaiting_model.remove(request)
                self._engine.table.enqueue(request.sequence)
        before = self.preemptions
        self._emit(self._engine.turns.step(now), now)
        if self.preemptions > before:
            self._changed()

    def _wake(self) -> None:
        self._timer = None
        self._settle(max(self._loop.time(), self._due))

    def drop_requests(self) -> None:
        """Delete all requests, because the link is lost, without sending frames about them."""
        now = self._interrupt()
        for request in list(self._requests.values()):
            self._engine.preemptor.drop(request.sequence, now)
            self._remove(request, now)
        self._settle(now)

    def change_lease(self, size: int) -> bool:
        """Lease `size` bytes to a video. Return False without a lease if they do not fit.

        Evict ended chats and unload idle models if that makes room. A negative size ends a lease of that size.
        """
        now = self._interrupt()
        granted = self._memory.change_lease(size, now)
        self.dirty |= granted
        self._settle(now)
        if size < 0:
            self._changed()
        return granted

    def stop(self) -> None:
        """Stop the node: cancel the timer of its next event. A later frame would start the timer again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # reports

    def report(self) -> Report:
        """Return the current report of the node, with the next sequence number. Send the due frames first."""
        now = self._loop.time()
        self._emit(self._engine.turns.catch_up(now), now)
        self._sequence += 1
        self.dirty = bool(self._requests)
        table = self._engine.table
        queued = self._list_queued()
        engine = EngineState(
            "modelled",
            "ready",
            running=len(table.running),
            waiting=len(queued) + len(table.preempted),
            queued_tokens=sum(request.left for request in queued),
            counts=EngineCounters(preemptions=self.preemptions),
            cache=self._chats.to_report(),
            rows=self._rows,
        )
        models = tuple(model.to_report(now) for model in self.models)
        return Report(self._sequence, self._memory.read(now, reported=True), engine, models, self._acked)
