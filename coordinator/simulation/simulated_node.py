"""Simulated Mac: receives the frames of the link and answers with the same frames, in virtual time.

Modelled after the engine: memory for complete prompts and expected answers is committed before they begin. Prefills
take turns (the shortest; the oldest, or fairly) and leave decode its share. All rows decode in one step, which is
slower with each row and with the size of their caches. An answer that outgrows its commitment requests
`KV_GROWTH_TOKENS` tokens at a time. Without room, the newest request is preempted. Models load one at a time, and idle
models are unloaded for them. Ended chats stay in a prefix cache, which is evicted before a request is refused.
`wire.capacity.arithmetic` makes every decision.

Not modelled: single tokens, because between two events all rates are constant and progress is linear. Nor the transient
of a forward beyond the model's one number, chunks, preflight on a second thread, and other programs on the Mac.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.simulation.hardware import BASE, CHIPS, cap_of, prefill_speed, step_seconds
from coordinator.simulation.scenario import ModelSpec, NodeSpec
from coordinator.simulation.simulated_kv import SimulatedRow, SimulatedRows
from coordinator.simulation.workload import ConversationTurn
from wire.capacity.arithmetic import (
    KV_GROWTH_TOKENS,
    Fits,
    can_ever_fit,
    current,
    default_margin,
    headroom,
    judge,
    request_need,
)
from wire.capacity.batches import row_bytes, waste_bytes
from wire.capacity.fairness import PrefillFairness, WaitingRequest, WeightedKey, service_order
from wire.frames import Admitted, Cancel, Channel, Delta, Deltas, Failed, Finished, Frame, Generate, Refusal, Report
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import CacheState, EngineCounters, EngineState, Memory, Model
from wire.units import parse_size

PREFILL_STEPS = 1.6
"""Duration of a prefill chunk while rows decode, in decode steps."""
CACHE_SHARE = 0.15
"""Share of the cap without weights that is used for ended chats."""
MAX_EVICTIONS_REPORTED = 64
RETRY_SECONDS = 0.5
"""Seconds between two attempts to resume a preempted request."""
_EPSILON = 1e-6


@dataclass(slots=True, eq=False)
class SimulatedModel:
    """Model in the catalogue of a simulated node, and its state there. Times are virtual, in seconds."""

    spec: ModelSpec
    model: Model
    """Constant part of the model in reports."""
    rows: SimulatedRows
    """KV caches of the model's requests."""
    speed: float
    """Prefill speed, in tokens per second."""
    loaded: bool = False
    used: float = 0.0
    """Time of the last use."""
    ready_at: float = 0.0
    """Time at which the running load ends; 0 if no load runs."""
    loading: bool = False
    """Whether the model is being loaded, or waits for its turn to load."""


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """Admitted request on a simulated node."""

    request: int
    """Number of the request."""
    owner: WeightedKey
    """API key of the request."""
    turn: ConversationTurn
    model: SimulatedModel
    row: SimulatedRow
    age: int
    """Number of the admission; lower is older."""
    left: float
    """Prompt tokens that are not prefilled yet."""
    cached: int
    """Prompt tokens from the prefix cache."""
    known: int = 0
    """Tokens that were generated before a resume on this node, or before the last preemption."""
    sent_tokens: int = 0
    """Generated tokens that were sent to the router."""
    decoding: bool = False
    """Whether the prefill is complete."""

    def produced(self, steps: float) -> float:
        """Return the number of generated tokens after `steps` decode steps of the node."""
        return self.known + (steps - self.row.start if self.decoding else 0.0)


class SimulatedNode:
    """Simulated Mac, which answers frames of the router in the virtual time of `loop`.

    `send` sends a frame to the router. `turn_of` returns the turn of a request id, with its true output. `changed` is
    called after a request has ended or memory was released. Without `loads`, no model is in memory at the start.
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
        changed: Callable[[], None] = lambda: None,
        loads: bool = True,
    ) -> None:
        self.name = name
        self.spec = spec
        self._loop = loop
        self._send = send
        self._turn_of = turn_of
        self._changed = changed
        self.chip = CHIPS[spec.chip]
        self._total = parse_size(spec.memory)
        self._cap = cap_of(self._total)
        self._margin = default_margin(self._cap)
        self._disk = parse_size(spec.disk)
        known = [model for model in models if not spec.models or model.name in spec.models]
        self.models = {model.name: self._new_model(model, loads and model.name in spec.loaded) for model in known}
        self.prefills: list[SimulatedSequence] = []
        self._reading = PrefillFairness()
        self.decoding: list[SimulatedSequence] = []
        self._line: deque[SimulatedSequence] = deque()
        self._preempted: list[SimulatedSequence] = []
        self._cache: OrderedDict[str, tuple[str, int, int]] = OrderedDict()
        self._evicted: deque[bytes] = deque(maxlen=MAX_EVICTIONS_REPORTED)
        self._evictions = self._cached = 0
        self.leases = 0
        self.loads = self.preemptions = 0
        self.restarts = 0
        self._steps = 0.0
        self._at = loop.time()
        self._rates: tuple[float, dict[SimulatedSequence, float]] = (0.0, {})
        self._timer: asyncio.TimerHandle | None = None
        self._age = self._acked = self._sequence = 0
        self.dirty = True
        self.highest = 0

    def _new_model(self, spec: ModelSpec, loaded: bool) -> SimulatedModel:
        weights, speed = parse_size(spec.weights), prefill_speed(self.chip, spec.active)
        model = Model(
            spec.name,
            f"sim:{spec.name}",
            weights=weights,
            kv_per_token=parse_size(spec.kv_per_token),
            transient=parse_size(spec.transient),
            context=spec.context,
            load_seconds=weights / self._disk,
            expected_output=spec.usual,
            kv_waste=waste_bytes(self._cap),
        )
        return SimulatedModel(spec, model, SimulatedRows(model.kv), speed, loaded)

    # frames from the router

    def take(self, frame: Frame) -> None:
        """Handle a frame of the router: `Generate` or `Cancel`. Ignore other frames."""
        self._advance()
        if isinstance(frame, Generate):
            self._generate(frame)
        elif isinstance(frame, Cancel):
            self._cancel(frame.request)
        self._settle()

    def _generate(self, frame: Generate) -> None:
        self._acked = max(self._acked, frame.seq)
        self.dirty = True
        turn, model = self._turn_of(frame.request_id), self.models.get(frame.model)
        if model is None:
            text = f"this node does not serve {frame.model}"
            self._send(Refusal(frame.request, Refused(RefusalCode.NO_MODEL, text), turn.prompt))
            return
        limit = frame.params.max_tokens or max(1, model.spec.context - turn.prompt)
        promised = turn.prompt + min(limit, frame.expected)
        refused = self._refused(model, turn.prompt, promised - turn.prompt)
        if refused is not None:
            self._send(Refusal(frame.request, refused, turn.prompt))
            return
        resumed: tuple[tuple[int, ...], ...] = getattr(frame, "resume", ())
        known = len(resumed[0]) if resumed else 0
        sequence = self._admit(frame, turn, model, max(promised, turn.prompt + known + 1), known)
        self._send(Admitted(frame.request, turn.prompt, sequence.cached, turn.session.encode()[-32:]))

    def _refused(self, simulated: SimulatedModel, prompt: int, output: int) -> Refused | None:
        """Check for room after evicting caches and unloading idle models. Return None if there is room, else the
        refusal."""
        model = self._model(simulated)
        need = request_need(model, prompt, output) - (model.weights if simulated.loading else 0)
        answer = judge(self.memory(), need)
        if isinstance(answer, Fits):
            return None
        if not can_ever_fit(self.memory(), model, prompt, output):
            return Refused(RefusalCode.TOO_LARGE, f"{self.name} could not hold this if it were alone", answer.numbers)
        self._free_memory(need, simulated)
        answer = judge(self.memory(), need)
        return None if isinstance(answer, Fits) else answer

    def _admit(
        self, frame: Generate, turn: ConversationTurn, model: SimulatedModel, promised: int, known: int
    ) -> SimulatedSequence:
        kept = self._cache.get(turn.session) if turn.session else None
        cached = 0
        if kept is not None and kept[0] == model.spec.name:
            cached = min(kept[1], turn.prompt - 1)
            self._cache.move_to_end(turn.session)
        row = SimulatedRow(promised, prompt=cached)
        model.rows.add(row)
        self._age += 1
        left = turn.prompt + known - cached
        sequence = SimulatedSequence(
            frame.request, frame.owner, turn, model, row, self._age, float(left), cached, known, known
        )
        model.used = self._loop.time()
        self._line.append(sequence)
        if not model.loaded:
            self._load(model)
        return sequence

    def _cancel(self, request: int) -> None:
        for sequence in self.here():
            if sequence.request == request:
                self._drop(sequence)
                self._changed()
                return

    def here(self) -> list[SimulatedSequence]:
        """Return all requests on this node: in decode, in prefill, queued and preempted."""
        return [*self.decoding, *self.prefills, *self._line, *self._preempted]

    def flush(self) -> None:
        """Send all generated tokens that were not sent yet. A real node sends each token at once."""
        self._advance()
        for sequence in self.decoding:
            self._report_tokens(sequence)

    def forget(self) -> None:
        """Delete all requests without a frame to the router, because the link is lost."""
        self._advance()
        for sequence in self.here():
            self._drop(sequence)
        self._settle()

    def lease(self, size: int) -> bool:
        """Lease `size` bytes to a video, after eviction of caches and idle models. Return False if they do not fit.

        A negative size ends a lease of that size.
        """
        self._advance()
        if size > 0:
            self._free_memory(size, None)
            if not isinstance(judge(self.memory(), size), Fits):
                return False
        self.leases += size
        self.dirty = True
        self._settle()
        return True

    def stop(self) -> None:
        """Cancel the timer of the next event, at the end of this node's life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # memory

    def memory(self, *, reported: bool = False) -> Memory:
        """Return the memory at this moment, as the gate sums it.

        With `reported`, cached tokens count as active memory, as in a report. Without, rows count as reserved only, and
        the sum is the same.
        """
        written = promised = 0
        now = self._loop.time()
        for model in self.models.values():
            promised += model.rows.promised()
            if reported:
                written += model.rows.written(self._steps)
            if model.loaded:
                written += model.model.weights
                promised += model.model.weights
            elif model.loading:
                written += int(model.model.weights * self._progress(model, now))
                promised += model.model.weights
        active = written + self._cached
        ceiling, phys, reserved = max(1, self._cap - self.leases), active + BASE, promised - written
        self.highest = max(self.highest, phys) if reported else self.highest
        return Memory(
            self._cap,
            ceiling,
            self._margin,
            phys,
            active,
            0,
            current(active, phys, 0),
            reserved,
            headroom(ceiling, self._margin, phys, reserved),
            self.leases,
            "metal",
            armed=True,
            source="modelled",
            total=self._total,
            base=BASE,
            reusable=self._cached if reported else 0,
        )

    def _progress(self, model: SimulatedModel, now: float) -> float:
        total = model.model.load_seconds
        return 1.0 if total <= 0 else min(1.0, max(0.0, 1 - (model.ready_at - now) / total))

    def _free_memory(self, need: int, keep: SimulatedModel | None) -> None:
        """Evict ended chats, oldest first, then unload idle models, least recently used first, until `need` bytes fit.

        Release nothing if all of it would not be enough.
        """
        idle = sorted(
            (one for one in self.models.values() if one.loaded and not len(one.rows) and one is not keep),
            key=lambda one: one.used,
        )
        memory = self.memory()
        spare = self._cached + sum(one.model.weights for one in idle)
        if (memory.headroom or 0) + spare < need:
            return
        while self._cache and not isinstance(judge(self.memory(), need), Fits):
            self._evict(next(iter(self._cache)))
        while idle and not isinstance(judge(self.memory(), need), Fits):
            idle.pop(0).loaded = False
        self.dirty = True

    def _evict(self, session: str) -> None:
        _, _, size = self._cache.pop(session)
        self._cached -= size
        self._evictions += 1
        self._evicted.append(session.encode()[-32:])

    def _keep(self, sequence: SimulatedSequence) -> None:
        """Cache an ended chat for its next turn, in place of its last turn."""
        turn, kv = sequence.turn, sequence.model.model.kv
        if not turn.session:
            return
        if turn.session in self._cache:
            self._cached -= self._cache.pop(turn.session)[2]
        tokens = turn.prompt + turn.output
        size, weights = row_bytes(kv, tokens), sum(one.model.weights for one in self.models.values() if one.loaded)
        limit = int((self._cap - weights) * CACHE_SHARE)
        if size > limit:
            return
        while self._cached + size > limit:
            self._evict(next(iter(self._cache)))
        if isinstance(judge(self.memory(), size), Fits):
            self._cache[turn.session] = (turn.model, tokens, size)
            self._cached += size

    # time

    def _advance(self) -> None:
        """Advance all linear progress to this moment."""
        now = self._loop.time()
        seconds, self._at = now - self._at, now
        if seconds <= 0:
            return
        decode, prefill = self._rates
        self._steps += decode * seconds
        for sequence, rate in prefill.items():
            done = min(sequence.left, rate * seconds)
            sequence.left -= done
            self._reading.has_read(sequence.owner, done)
            sequence.row.prompt += int(done)

    def _speeds(self) -> tuple[float, dict[SimulatedSequence, float]]:
        """Return decode steps per second, and tokens per second of every active prefill."""
        step = self.step()
        if not self.prefills:
            return (1 / step if step else 0.0), {}
        share = PREFILL_STEPS / (1 + PREFILL_STEPS) if step else 1.0
        aged = sorted(self.prefills, key=lambda one: one.age)
        picked = {min(self.prefills, key=lambda one: one.left), aged[self._reading.next([one.owner for one in aged])]}
        rates = {one: one.model.speed * share / len(picked) for one in sorted(picked, key=lambda one: one.age)}
        return (1 / (step * (1 + PREFILL_STEPS)) if step else 0.0), rates

    def step(self) -> float:
        """Return the seconds of one decode step of all rows; 0 without rows."""
        if not self.decoding:
            return 0.0
        rows: dict[str, tuple[SimulatedModel, int, int]] = {}
        for sequence in self.decoding:
            name = sequence.turn.model
            _, count, tokens = rows.get(name, (sequence.model, 0, 0))
            rows[name] = (sequence.model, count + 1, tokens + sequence.row.promised)
        return sum(
            step_seconds(self.chip, one.spec.active, count, tokens * one.model.kv_per_token)
            for one, count, tokens in rows.values()
        )

    def _due(self) -> float | None:
        """Return the seconds until the next event; None without one."""
        decode, prefill = self._rates
        due = [sequence.left / rate for sequence, rate in prefill.items()]
        if decode > 0:
            due += [max(0.0, self._stops(sequence) - self._steps) / decode for sequence in self.decoding]
        due += [one.ready_at - self._at for one in self.models.values() if one.loading and one.ready_at > 0]
        if self._preempted:
            due.append(RETRY_SECONDS)
        return min(due, default=None)

    @staticmethod
    def _stops(sequence: SimulatedSequence) -> float:
        """Return the step at which a row reaches the end of its answer or of its reservation."""
        row, turn = sequence.row, sequence.turn
        return row.start + min(turn.output - sequence.known, row.promised - row.prompt)

    def _settle(self) -> None:
        """Process all due events, then set a timer for the next."""
        while self._happen():
            pass
        self._rates = self._speeds()
        due = self._due()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_later(max(due, 0.0), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        if self._preempted:
            self._return()
        self._settle()

    def _happen(self) -> bool:
        """Process one due event. Return False if none is due."""
        for model in self.models.values():
            if model.loading and 0 < model.ready_at <= self._at + _EPSILON:
                self._loaded(model)
                return True
        for sequence in self.decoding:
            if self._stops(sequence) <= self._steps + _EPSILON:
                self._reached(sequence)
                return True
        for sequence in self.prefills:
            if sequence.left <= _EPSILON:
                self._first(sequence)
                return True
        return self._begin()

    def _begin(self) -> bool:
        """Start the next queued request whose model is loaded here, if the batch has a place."""
        if not self._line or len(self.prefills) + len(self.decoding) >= self.spec.batch:
            return False
        able = [sequence for sequence in self._line if sequence.model.loaded]
        taken = Counter(one.owner.name for one in [*self.prefills, *self.decoding])
        for place in service_order([WaitingRequest(one.owner, 1, one.known > 0) for one in able], taken):
            self._line.remove(able[place])
            self.prefills.append(able[place])
            return True
        return False

    # models

    def _load(self, model: SimulatedModel) -> None:
        if not model.loading:
            model.loading = True
            self.loads += 1
            self._next_load()

    def _next_load(self) -> None:
        """Start the next model load. Loads run one at a time, in order of request."""
        loading = [one for one in self.models.values() if one.loading]
        if loading and not any(one.ready_at for one in loading):
            first = min(loading, key=lambda one: min((seq.age for seq in self._line if seq.model is one), default=0))
            first.ready_at = self._loop.time() + max(_EPSILON, first.model.load_seconds)
        self.dirty = True

    def _loaded(self, model: SimulatedModel) -> None:
        model.loading, model.loaded, model.ready_at = False, True, 0.0
        self._next_load()

    # requests

    def _first(self, sequence: SimulatedSequence) -> None:
        """Move a request from prefill to decode. The prefill yields its first token."""
        self.prefills.remove(sequence)
        row = sequence.row
        row.prompt, row.joined, row.start = sequence.turn.prompt + sequence.known, True, self._steps - 1
        sequence.decoding = True
        self.decoding.append(sequence)
        self._report_tokens(sequence)
        self.dirty = True

    def _report_tokens(self, sequence: SimulatedSequence) -> None:
        produced = min(sequence.turn.output, int(sequence.produced(self._steps) + _EPSILON))
        new, sequence.sent_tokens = produced - sequence.sent_tokens, max(produced, sequence.sent_tokens)
        if new > 0:
            pieces = ((Channel.CONTENT, "x" * new),)
            self._send(Deltas((Delta(sequence.request, 0, tuple(range(new)), pieces),)))

    def _reached(self, sequence: SimulatedSequence) -> None:
        """Handle a row at the end of its answer or of its reservation."""
        turn = sequence.turn
        if sequence.produced(self._steps) >= turn.output - _EPSILON:
            self._report_tokens(sequence)
            self._drop(sequence)
            self._keep(sequence)
            self._send(Finished(sequence.request, ("stop",), turn.prompt, turn.output, sequence.cached))
            self._changed()
            return
        more = max(
            1, min(KV_GROWTH_TOKENS, turn.output - sequence.known - (sequence.row.promised - sequence.row.prompt))
        )
        need = sequence.model.rows.extension(sequence.row, more)
        if not isinstance(judge(self.memory(), need), Fits):
            self._free_memory(need, None)
        answer = judge(self.memory(), need)
        if isinstance(answer, Fits):
            sequence.model.rows.extend(sequence.row, more)
        else:
            self._give_way(self._gives_way(), answer)

    def _gives_way(self) -> SimulatedSequence:
        """Choose the request to preempt: the newest of the API key with the most rows for its weight.

        Queued requests without generated tokens come first, then all requests in decode or prefill.
        """
        among = [one for one in self._line if not one.known] or [*self.decoding, *self.prefills]
        rows = Counter(one.owner.name for one in [*self.decoding, *self.prefills, *self._line])
        return max(among, key=lambda one: (one.owner.load(rows[one.owner.name]), one.age))

    def _give_way(self, newest: SimulatedSequence, refused: Refused) -> None:
        alone = len(self.decoding) + len(self.prefills) + len(self._preempted) == 1
        produced = int(newest.produced(self._steps))
        if newest.sent_tokens:
            self._report_tokens(newest)
        self._drop(newest)
        self._changed()
        if not newest.sent_tokens:
            self._send(Refusal(newest.request, refused, newest.turn.prompt))
        elif alone:
            self._send(Failed(newest.request, FailureCode.NO_HEADROOM, refused.message))
        else:
            self.preemptions += 1
            newest.known = produced
            self._preempted.append(newest)

    def _return(self) -> None:
        """Bring the oldest preempted request back, if there is room for it."""
        sequence = min(self._preempted, key=lambda one: one.age)
        turn, model = sequence.turn, sequence.model
        written = turn.prompt + sequence.known
        refused = self._refused(model, written, min(KV_GROWTH_TOKENS, max(1, turn.output - sequence.known)))
        if refused is None:
            self._preempted.remove(sequence)
            sequence.row = SimulatedRow(written + KV_GROWTH_TOKENS)
            sequence.left, sequence.decoding = float(written), False
            model.rows.add(sequence.row)
            self._line.append(sequence)
            if not model.loaded:
                self._load(model)
        elif len(self.here()) == len(self._preempted) == 1:
            self._preempted.remove(sequence)
            self._send(Failed(sequence.request, FailureCode.NO_HEADROOM, refused.message))

    def _drop(self, sequence: SimulatedSequence) -> None:
        """Remove a request from all queues and release its memory."""
        for place in (self.decoding, self.prefills, self._preempted, self._line):
            if sequence in place:
                place.remove(sequence)
                if place is not self._preempted:
                    sequence.model.rows.remove(sequence.row)
        sequence.model.used = self._loop.time()
        self.dirty = True

    # reports

    def report(self) -> Report:
        """Return the node's report at this moment, with the next sequence number."""
        self._advance()
        self._sequence += 1
        self.dirty = bool(self.decoding or self.prefills or self._line or self._preempted)
        waiting = [*self.prefills, *self._line]
        engine = EngineState(
            "modelled",
            "ready",
            restarts=self.restarts,
            running=len(self.decoding),
            waiting=len(waiting),
            queued_tokens=int(sum(sequence.left for sequence in waiting)),
            counts=EngineCounters(preemptions=self.preemptions),
            cache=CacheState(self._cached, len(self._cache), evictions=self._evictions, evicted=tuple(self._evicted)),
            rows=self.spec.batch,
        )
        models = tuple(self._model(model) for model in self.models.values())
        return Report(self._sequence, self.memory(reported=True), engine, models, self._acked)

    def _model(self, model: SimulatedModel) -> Model:
        if not model.loaded:
            now = self._loop.time()
            progress = self._progress(model, now) if model.loading and model.ready_at else 0.0
            return replace(model.model, loading=model.loading, progress=progress, groups=model.rows.groups())
        step = step_seconds(self.chip, model.spec.active, 1, 0.0)
        return replace(
            model.model,
            loaded=True,
            prefill_speed=model.speed,
            decode_speed=1 / step,
            groups=model.rows.groups(),
        )

    # queries of the clairvoyant

    def fits(self, turn: ConversationTurn) -> bool:
        """Return whether a request with its complete answer would fit now, if caches and idle models were evicted."""
        self._advance()
        model = self.models.get(turn.model)
        if model is None:
            return False
        need = request_need(self._model(model), turn.prompt, turn.output)
        if model.loading:
            need -= model.model.weights
        idle = sum(
            one.model.weights for one in self.models.values() if one.loaded and not len(one.rows) and one is not model
        )
        memory = self.memory()
        return isinstance(judge(replace(memory, reusable=self._cached + idle), need), Fits)

    def ever(self, turn: ConversationTurn) -> bool:
        """Return whether a request with its complete answer would fit on this node without any other load."""
        model = self.models.get(turn.model)
        return model is not None and can_ever_fit(self.memory(), model.model, turn.prompt, turn.output)

    def forecast(self, turn: ConversationTurn) -> float:
        """Return the seconds to the first token of a request that arrives now, if no further request arrives.

        The node must have the model of the request.
        """
        model = self.models[turn.model]
        kept = self._cache.get(turn.session) if turn.session else None
        mine = turn.prompt - (min(kept[1], turn.prompt - 1) if kept is not None and kept[0] == turn.model else 0)
        share = PREFILL_STEPS / (1 + PREFILL_STEPS) if self.decoding else 1.0
        lefts = [one.left / one.model.speed for one in [*self.prefills, *self._line]] + [mine / model.speed]
        now, wait = self._loop.time(), 0.0
        if model.loading and model.ready_at:
            wait = model.ready_at - now
        elif not model.loaded:
            wait = model.model.load_seconds + sum(one.model.load_seconds for one in self.models.values() if one.loading)
        return wait + _turns(lefts) / share


def _turns(lefts: list[float]) -> float:
    """Return when the last of these prefills ends, in seconds of prefill. Shortest and oldest alternate."""
    last, spent, oldest, place = len(lefts) - 1, 0.0, 0, 0
    order = sorted(range(len(lefts)), key=lefts.__getitem__)
    done = [False] * len(lefts)
    while not done[last]:
        while done[oldest]:
            oldest += 1
        while done[order[place]]:
            place += 1
        shortest = order[place]
        if lefts[oldest] <= lefts[shortest]:
            spent += lefts[oldest]
            done[oldest] = True
        else:
            spent += 2 * lefts[shortest]
            lefts[oldest] -= lefts[shortest]
            done[shortest] = True
    return spent
