"""Scripted engine: real frames, admission and scheduling with a simulated model.

Forwards, weights and memory readings are simulated. Ledger, gate and the rules of admission, scheduling and preemption
are those of the text engine. Rows are committed before they start, and every prefill, join and growth passes the gate.
A decode step serves all rows at once. The next turn begins at the time at which the last turn was due to end, so that
delays do not add up. The engine has no clock and no socket; `loop` drives it.

    Generate ─► preflight ─► waiting ─► prefill, join ─► rows in decode ─► Finished
                   └ Refusal      └ Refusal                 └ Failed (no room to grow)

Every request ends with exactly one of the three frames, unless it is cancelled: it then gets no further frame. If a
`Cancel` arrives before its `Generate`, its number is recorded, and the `Generate` is ignored.

With the default costs (`FixedCosts`), a prefill takes no time and returns no token; a row's first decode step returns
its first token. The commitment of a row that has used all of it is extended by up to `KV_GROWTH_TOKENS` tokens. If the
gate refuses, a request is preempted or ends by the rules of the text engine.

Parts
- `turns`: the turns as a function of time, with the durations of `costs`. The simulation drives the same turns.
- `batch`, `prefills`, `preemption`: the work of a turn. Their rules are those of the text engine.
- `embeddings`: requests for embeddings, which have no rows.
- `table`, `sequence`: the live requests. `memory`: the gate and the commitments.
- `requests`, `answers`: the sizes, answers, refusals and crashes that the settings and the prompts determine.
"""

from msgspec.structs import replace

from node.engine.memory.gate import GateSite, MemoryGate
from node.engine.process.interface import MAX_CANCELLED_REMEMBERED, CallRecording, NativeCall, Work
from node.engine.requests import preflight
from node.engine.requests.preflight import RequestShape
from node.engine.scripted import answers
from node.engine.scripted.build import build_turns
from node.engine.scripted.costs import EngineCosts, FixedCosts
from node.engine.scripted.embeddings import ScriptedEmbeddings
from node.engine.scripted.memory import ScriptedMemory
from node.engine.scripted.requests import ScriptedRequests
from node.settings import NodeSettings, ScriptedSettings
from wire.capacity.arithmetic import build_shed_refusal
from wire.frames import (
    Admitted,
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
    UnloadModel,
)
from wire.models.kind import ModelKind, explain_other_kind, get_kind
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import EngineCounters, Memory, MemoryLevel, Model
from wire.units import GIB, parse_size

PREFILL_SPEED = 100_000.0
"""Tokens per second reported for prefills, which take no time. The number is finite and above 0, because the router
divides by it."""


class ScriptedEngine:
    """Engine with a simulated model, for tests and demonstrations (see the module's docstring).

    A request with the word `settings.crash` ends the process. `costs` are the durations of forwards; None: the
    durations in the settings. `gate` is the memory gate; None: a new gate. `table` has the live requests. `now` is in
    monotonic seconds in all methods. Raise `ValueError` if a size in the settings is invalid.
    """

    def __init__(
        self,
        settings: ScriptedSettings,
        recorder: CallRecording,
        costs: EngineCosts | None = None,
        gate: MemoryGate | None = None,
    ) -> None:
        self._settings = settings
        self._weights = parse_size(settings.weights)
        self._metal = parse_size(settings.metal)
        self._memory = ScriptedMemory(
            self._weights, parse_size(settings.memory), settings.kv_per_token, gate or MemoryGate()
        )
        self._requests = ScriptedRequests(settings, self._memory.ledger)
        self.table, self._preemptor, self._batch, self._turns = build_turns(
            self._memory,
            costs or FixedCosts(settings.step_ms / 1000),
            settings.max_batch_size,
            leap=False,
            crash=lambda number: recorder.crash(settings.model, number),
        )
        self._embeddings = ScriptedEmbeddings(
            self._memory, settings.model, _get_kind(settings), settings.dimensions, settings.max_context
        )
        self.gate = self._memory.gate
        self._acked = self._enforced = self._sheds = self._freed_order = 0
        self._cancelled: dict[int, None] = {}

    @property
    def loads(self) -> int:
        """Number of model loads: always 0, because the model is always loaded."""
        return 0

    def prepare(self, frame: Frame) -> Work | None:
        """Return the frame unchanged, because all work is fast; None for a `Ping`."""
        return None if isinstance(frame, Ping) else frame

    def handle(self, work: Work, now: float) -> list[Frame]:
        """Process one frame at the monotonic time `now`. Return its immediate answers, such as `Admitted`, `Refusal` or
        the end of an order; an empty list if there is none."""
        if isinstance(work, Generate):
            return self._generate(work, now)
        if isinstance(work, Embed):
            return self._admit_embedding(work, now)
        if isinstance(work, Cancel):
            self._cancel(work.request, now)
        elif isinstance(work, MemoryLimits):
            self.gate.set_limits(work)
        elif isinstance(work, ReduceMemory):
            return self._enforce(work, now)
        elif isinstance(work, ReclaimMemory):
            self._freed_order = work.number  # nothing here could be freed
        elif isinstance(work, LoadModel | UnloadModel | ProfileModel):
            return [self._answer_order(work)]
        elif isinstance(work, ClearCache):
            return [Finished(work.request, (), 0, 0)]  # nothing is cached here
        elif isinstance(work, CountTokens):
            return [self._answer_count(work)]
        return []

    def step(self, now: float) -> list[list[Frame]]:
        """Record the turn that has ended: one token of every row, and a prefill. Begin the next turn, and answer all
        waiting requests for embeddings. Return one list with all frames to send."""
        frames = [*self._turns.step(now), *self._embeddings.step(now)]
        self._memory.observe(now)
        return [frames]

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time of the next step, or without work the time at which the recent peak falls. Return
        None if the next step needs a frame first."""
        if len(self._embeddings):
            return now
        following = self._turns.next_at(now)
        return self._memory.compute_peak_expiry(now) if following is None else following

    def read_running_call(self) -> NativeCall | None:
        """Return None, because there are no native calls."""
        return None

    def report(self, now: float) -> EngineReport:
        """Return the state of the engine for the agent at the monotonic time `now`."""
        batch, table, gate = self._batch, self.table, self.gate
        return EngineReport(
            self._memory.read(now),
            (self._describe_model(),),
            len(table.running),
            len(table.queue) + len(table.preempted) + len(self._embeddings),
            sum(sequence.left for sequence in table.queue),
            self._acked,
            EngineCounters(
                gate.checks.total(),
                gate.refusals.total(),
                batch.forwards + self._embeddings.forwards,
                batch.steps,
                sheds=self._sheds,
                preemptions=self._preemptor.preemptions,
                prefill_tokens=batch.prefill_tokens,
            ),
            limits_number=gate.limits_number,
            enforced=self._enforced,
            measures=gate.get_measures(),
            freed_order=self._freed_order,
            metal_limit=self._metal,
        )

    def halt(self) -> None:
        """Do nothing, because there are no native calls to forbid."""

    def close(self) -> None:
        """Do nothing, because no resource is held."""

    # requests

    def _answer_order(self, order: LoadModel | UnloadModel | ProfileModel) -> Frame:
        """Return the answer to an order about models: there is one model, and it is always loaded."""
        name = self._settings.model
        if order.model != name:
            return Refusal(order.request, Refused(RefusalCode.NO_MODEL, f"this node serves {name}, not {order.model}"))
        if isinstance(order, LoadModel):
            return Finished(order.request, (), 0, 0)
        if isinstance(order, ProfileModel):
            return Refusal(
                order.request, Refused(RefusalCode.UNSUPPORTED, f"{name} is scripted and has nothing to measure")
            )
        return Refusal(order.request, Refused(RefusalCode.IN_USE, f"{name} is scripted and cannot be unloaded"))

    def _answer_count(self, request: CountTokens) -> Frame:
        if request.model != self._settings.model:
            text = f"this node serves {self._settings.model}, not {request.model}"
            return Refusal(request.request, Refused(RefusalCode.NO_MODEL, text))
        return Finished(request.request, (), answers.count_tokens(request.messages, request.tools), 0)

    def _generate(self, request: Generate, now: float) -> list[Frame]:
        self._acked = max(self._acked, request.seq)
        number = request.request
        if number in self._cancelled:
            del self._cancelled[number]
            return []
        if self.table.find(number) is not None:
            return []
        prompt = answers.count_prompt_tokens(request)
        pieces = self._requests.list_pieces(request, prompt)
        shape = self._requests.compute_shape(request, prompt, pieces)
        refused = self._find_refusal(request, shape, now)
        if refused is not None:
            return [Refusal(number, refused, prompt)]
        sequence = self._requests.create_sequence(request, shape, pieces, now)
        if not any(
            sequence.list_active_rows()
        ):  # the whole answer was sent by another node, and only its end is missing
            sequence.begin(now)
            return [Admitted(number, prompt), sequence.build_finished(now)]
        self.table.enqueue(sequence)
        return [Admitted(number, prompt)]

    def _admit_embedding(self, request: Embed, now: float) -> list[Frame]:
        self._acked = max(self._acked, request.seq)
        if request.request in self._cancelled:
            del self._cancelled[request.request]
            return []
        if request.request in self._embeddings:
            return []
        return [self._embeddings.admit(request, now)]

    def _find_refusal(self, request: Generate, shape: RequestShape, now: float) -> Refused | None:
        model, memory = self._describe_model(), self._read_offered_memory(request.weighted_key.name, now)
        if get_kind(model.features) is not ModelKind.CHAT:
            return Refused(RefusalCode.UNSUPPORTED, explain_other_kind(model.name, get_kind(model.features)))
        refused = self.gate.refuse_unless_ready() or preflight.refuse_impossible(
            request, shape, model, self._settings.max_batch_size
        )
        if refused is not None:
            return refused
        cost = self._memory.ledger.compute_cost(shape.length, shape.choices)
        if self._requests.must_refuse(request):
            return self._memory.check(GateSite.PREFLIGHT, now, max(cost, (memory.headroom or 0) + GIB))
        return preflight.refuse_without_room(shape, memory, model, cost, self.gate)

    def _read_offered_memory(self, key: str, now: float) -> Memory:
        """Return a reading of the memory as offered to a new request of an API key. Bytes that a preempted request
        needs first count as reserved."""
        memory, wanted = self._memory.read(now), self._preemptor.compute_required_bytes(key)
        left = None if memory.headroom is None else memory.headroom - wanted
        return replace(memory, reserved=memory.reserved + wanted, headroom=left)

    def _cancel(self, number: int, now: float) -> None:
        sequence = self.table.find(number)
        if sequence is not None:
            self._preemptor.drop(sequence, now)
            self._memory.observe(now)
            return
        if self._embeddings.cancel(number):
            return
        self._cancelled[number] = None
        while len(self._cancelled) > MAX_CANCELLED_REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]

    def _enforce(self, order: ReduceMemory, now: float) -> list[Frame]:
        """Perform an order of the agent to free memory: at the level `OVER_HARD`, end the newest request that has
        tokens in a cache. No other memory can be freed."""
        self._enforced = order.poll
        newest = self._batch.find_newest()
        if order.level < MemoryLevel.OVER_HARD or newest is None:
            return []
        refused, delivered = build_shed_refusal(self._memory.read(now), order.excess), newest.delivered
        self._preemptor.drop(newest, now)
        self._memory.restart_peak(now)
        self._sheds += 1
        if delivered:
            return [Failed(newest.number, FailureCode.MEMORY_PRESSURE, refused.message)]
        return [Refusal(newest.number, refused, newest.shape.prompt)]

    def _describe_model(self) -> Model:
        settings = self._settings
        return Model(
            name=settings.model,
            fingerprint=settings.identity or f"scripted:{settings.model}",
            loaded=True,
            weights=self._weights,
            kv_per_token=settings.kv_per_token,
            context=settings.max_context,
            prefill_speed=PREFILL_SPEED,
            decode_speed=1000 / max(settings.step_ms, 0.001),
            groups=self._memory.ledger.list_groups(),
            expected_output=settings.tokens,
            features=_list_features(settings),
        )


def _list_features(settings: ScriptedSettings) -> tuple[str, ...]:
    kind = _get_kind(settings)
    if kind is not ModelKind.CHAT:
        return (kind.value,)
    return ("tools",) if settings.tools else ()


def _get_kind(settings: ScriptedSettings) -> ModelKind:
    if settings.reranks:
        return ModelKind.RERANK
    return ModelKind.EMBED if settings.dimensions else ModelKind.CHAT


def build(settings: NodeSettings, recorder: CallRecording) -> ScriptedEngine:
    """Return the scripted engine for these settings. Raise `ValueError` if a size in the settings is invalid."""
    return ScriptedEngine(settings.engine.scripted, recorder)
