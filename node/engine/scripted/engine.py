"""Scripted engine: real frames, real admission and real pace with a simulated model.

The model computes nothing; all other behaviour is real. Rows are committed in the ledger before they start, and every
prefill, join and growth passes the gate. A decode step serves all rows at once. Steps have absolute deadlines, and
delays therefore never add up. The engine has no clock and no socket; `loop` drives it.

    Generate ─► preflight ─► waiting ─► prefill, join ─► rows in decode ─► Finished
                   └ Refusal      └ Refusal                 └ Failed (no room to grow)

Every request ends in exactly one of the three frames. A cancelled request gets no frame. A `Cancel` that overtakes its
`Generate` is remembered, and the `Generate` is ignored.

A prefill takes no time and returns no token; the first token comes with the row's first decode step. A row that has
used its commitment requests `KV_GROWTH_TOKENS` more tokens; if the gate refuses, that request ends.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from node.engine.kv.commitments import Commitment, CommitmentLedger
from node.engine.memory.gate import GateSite, MemoryGate, MlxCounters
from node.engine.process.interface import (
    FLUSH_INTERVAL_SECONDS,
    MAX_CANCELLED_REMEMBERED,
    CallRecording,
    NativeCall,
    Work,
)
from node.engine.requests import preflight
from node.engine.requests.preflight import RequestShape
from node.engine.scripted import answers
from node.engine.text.stop_strings import StopStrings
from node.memory.reading import MemoryReading, RecentPeak
from node.settings import NodeSettings, ScriptedSettings
from wire.capacity.arithmetic import KV_GROWTH_TOKENS, shed
from wire.capacity.fairness import WaitingRequest, service_order
from wire.frames import (
    Admitted,
    Cancel,
    Channel,
    CountTokens,
    Delta,
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
    Timings,
    UnloadModel,
    delta_frames,
)
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import EngineCounters, KvParameters, Memory, MemoryLevel, Model
from wire.units import GIB, parse_size

MAX_LATE_SECONDS = 1.0
"""Delay in seconds after which missed steps are not made up for, because the machine slept."""
PREFILL_SPEED = 100_000.0
"""Tokens per second reported for prefills, which take no time: the router divides by this number."""


@dataclass(slots=True, eq=False)
class ScriptedRow:
    """One choice of an admitted request."""

    choice: int
    """Index of the choice in its request."""
    commitment: Commitment
    """Memory commitment of the row."""
    stops: StopStrings
    """Stop strings of the answer."""
    token_source: answers.TokenSource
    """Source of its tokens."""
    produced: int = 0
    """Number of generated tokens."""
    reason: str = ""
    """Reason of its end; empty while it is running."""
    gathered: list[Delta] = field(default_factory=list[Delta])
    """Deltas not sent yet."""
    resumed_tokens: int = 0
    """Number of first tokens that another node generated and sent."""

    def gather(self) -> Delta:
        """Return the deltas that were not sent yet as one, and mark them as sent. There must be at least one."""
        gathered, self.gathered = self.gathered, []
        ids = tuple(token for delta in gathered for token in delta.ids)
        text = "".join(text for delta in gathered for _, text in delta.pieces)
        return Delta(gathered[0].request, self.choice, ids, ((Channel.CONTENT, text),) if text else ())


@dataclass(slots=True, eq=False)
class ScriptedSequence:
    """Admitted request in the scripted engine. Times are monotonic seconds."""

    request: Generate
    """The request."""
    shape: RequestShape
    """Its size."""
    ends: int
    """Number of tokens of its scripted answers. It is above the limit if only the limit ends them."""
    crashes: bool
    """Whether its first decode step ends the process."""
    arrived: float
    """Time of arrival."""
    rows: list[ScriptedRow] = field(default_factory=list[ScriptedRow])
    """Its choices."""
    begun: float = 0.0
    """Start of its decode; 0.0 before."""
    last_token_at: float = 0.0
    """Time at which output was last sent."""

    @property
    def number(self) -> int:
        """The coordinator's number of the request."""
        return self.request.request

    def active_rows(self) -> Iterator[ScriptedRow]:
        """Return an iterator over the rows that have not ended."""
        return (row for row in self.rows if not row.reason)


class ScriptedEngine:
    """Engine with a simulated model, for tests and demonstrations (see the module's docstring).

    A request with the word `settings.crash` ends the process.
    """

    def __init__(self, settings: ScriptedSettings, recorder: CallRecording) -> None:
        self.gate = MemoryGate()
        self._settings = settings
        self._recorder = recorder
        self._step = settings.step_ms / 1000
        self._total = parse_size(settings.memory)
        self._weights = parse_size(settings.weights)
        self._metal = parse_size(settings.metal)
        self._ledger = CommitmentLedger(KvParameters(settings.kv_per_token))
        self._recent = RecentPeak()
        self._waiting: list[ScriptedSequence] = []
        self._running: list[ScriptedSequence] = []
        self._rows = self._wanted = 0
        self._deadline = 0.0
        self._acked = self._enforced = self._sheds = self._forwards = self._steps = self._freed_order = 0
        self._cancelled: dict[int, None] = {}

    def prepare(self, frame: Frame) -> Work | None:
        """Return the frame unchanged, because all work is fast; None for a `Ping`."""
        return None if isinstance(frame, Ping) else frame

    def handle(self, work: Work, now: float) -> list[Frame]:
        """Process one frame; return the immediate answers."""
        if isinstance(work, Generate):
            return self._generate(work, now)
        if isinstance(work, Cancel):
            self._cancel(work.request, now)
        elif isinstance(work, MemoryLimits):
            self.gate.hold(work)
        elif isinstance(work, ReduceMemory):
            return self._enforce(work, now)
        elif isinstance(work, ReclaimMemory):
            self._freed_order = work.number  # nothing here could be freed
        elif isinstance(work, LoadModel | UnloadModel | ProfileModel):
            return [self._ordered(work)]
        elif isinstance(work, CountTokens):
            return [self._counted(work)]
        return []

    def step(self, now: float) -> list[Frame]:
        """Decode one token of every row if a step is due, then prefill the next request if the batch has room. Return
        the frames to send."""
        frames: list[Frame] = []
        if self._running and now >= self._deadline:
            frames = self._decode(now)
            missed = now - self._deadline > MAX_LATE_SECONDS
            self._deadline = (now if missed else self._deadline) + self._step
        following = self._next()
        if following is not None:
            self._leave(following)
            frames += self._prefill(following, now)
        self._observe(now)
        return frames

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time of the next step, or of the fall of the recent peak; None if only a frame can bring
        work."""
        if self._next() is not None:
            return now
        if self._running:
            return self._deadline
        return self._recent.peak_expires_at(self._active(), now)

    def running_call(self) -> NativeCall | None:
        """Return None, because there are no native calls."""
        return None

    def report(self, now: float) -> EngineReport:
        """Return the state of the engine at the monotonic time `now`."""
        return EngineReport(
            self._memory(now),
            (self._model(),),
            len(self._running),
            len(self._waiting),
            sum(sequence.shape.prompt for sequence in self._waiting),
            self._acked,
            EngineCounters(
                self.gate.checks.total(), self.gate.refusals.total(), self._forwards, self._steps, sheds=self._sheds
            ),
            limits_number=self.gate.limits_number,
            enforced=self._enforced,
            measures=self.gate.measures(),
            freed_order=self._freed_order,
            metal_limit=self._metal,
        )

    def halt(self) -> None:
        """Do nothing, because there are no native calls to forbid."""

    def close(self) -> None:
        """Do nothing, because no resource is held."""

    # requests

    def _ordered(self, order: LoadModel | UnloadModel | ProfileModel) -> Frame:
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

    def _counted(self, request: CountTokens) -> Frame:
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
        if any(sequence.number == number for sequence in (*self._waiting, *self._running)):
            return []
        prompt = answers.prompt_tokens(request)
        pieces = self._pieces(request, prompt)
        shape = preflight.shape_of(request, prompt, len(pieces) or self._settings.tokens, self._settings.max_context)
        refused = self._refused(request, shape, now)
        if refused is not None:
            return [Refusal(number, refused, prompt)]
        sequence = self._sequence(request, shape, pieces, now)
        if not any(sequence.active_rows()):  # the whole answer was sent by another node, and only its end is missing
            sequence.begun = now
            return [Admitted(number, prompt), self._finished(sequence, now)]
        self._waiting.append(sequence)
        self._wanted += len(sequence.rows)
        return [Admitted(number, prompt)]

    def _pieces(self, request: Generate, prompt: int) -> list[str]:
        """Return the tokens of an echo; empty in the other modes, and for a prompt that will be refused."""
        echo = self._settings.text == "echo" and prompt < self._settings.max_context
        return answers.echo_pieces(answers.message_texts(request)) if echo else []

    def _refused(self, request: Generate, shape: RequestShape, now: float) -> Refused | None:
        model, memory = self._model(), self._memory(now)
        refused = self.gate.not_ready_refusal() or preflight.never_fits(
            request, shape, model, self._settings.max_batch_size
        )
        if refused is not None:
            return refused
        cost = self._ledger.cost(shape.length, shape.choices)
        if self._must_refuse(request):
            answer = self.gate.check(GateSite.PREFLIGHT, memory, max(cost, (memory.headroom or 0) + GIB))
            return answer if isinstance(answer, Refused) else None
        return preflight.admit(shape, memory, model, cost, self.gate)

    def _must_refuse(self, request: Generate) -> bool:
        word = self._settings.refuse
        return word == "*" or (bool(word) and answers.mentions(answers.message_texts(request), word))

    def _sequence(self, request: Generate, shape: RequestShape, pieces: list[str], now: float) -> ScriptedSequence:
        word = self._settings.crash
        crashes = bool(word) and answers.mentions(answers.message_texts(request), word)
        rows = [
            ScriptedRow(choice, commitment, StopStrings(request.params.stop), self._token_source(pieces, choice))
            for choice, commitment in enumerate(self._ledger.commit(shape.length, shape.choices))
        ]
        unlimited = request.params.max_tokens is None
        ends = len(pieces) or (self._settings.tokens if unlimited else shape.limit + 1)
        sequence = ScriptedSequence(request, shape, ends, crashes, now, rows)
        for row in rows:
            self._replay(sequence, row, now)
        return sequence

    def _replay(self, sequence: ScriptedSequence, row: ScriptedRow, now: float) -> None:
        """Restore a row after the ids that another node has sent: their text is not sent again."""
        for _ in sequence.request.known(row.choice):
            self._token(sequence, row, now)
            if row.reason:
                self._ledger.release(row.commitment)
                break
        row.resumed_tokens, row.commitment.written = row.produced, 0

    def _token_source(self, pieces: list[str], choice: int) -> answers.TokenSource:
        if pieces:
            return answers.echo_tokens(pieces)
        return answers.clock_tokens if self._settings.text == "clock" else answers.fixed_words(choice)

    def _cancel(self, number: int, now: float) -> None:
        for sequence in (*self._waiting, *self._running):
            if sequence.number == number:
                self._drop(sequence)
                self._observe(now)
                return
        self._cancelled[number] = None
        while len(self._cancelled) > MAX_CANCELLED_REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]

    def _drop(self, sequence: ScriptedSequence) -> None:
        """Remove a request and release its commitments."""
        for row in sequence.active_rows():
            self._ledger.release(row.commitment)
        if sequence in self._running:
            self._running.remove(sequence)
            self._rows -= sum(1 for _ in sequence.active_rows())
        elif sequence in self._waiting:
            self._leave(sequence)

    def _enforce(self, order: ReduceMemory, now: float) -> list[Frame]:
        """End the newest running request on order of the agent, because no other memory can be freed."""
        self._enforced = order.poll
        if order.level < MemoryLevel.OVER_HARD or not self._running:
            return []
        newest = max(self._running, key=lambda sequence: (sequence.arrived, sequence.number))
        refused = shed(self._memory(now), order.excess)
        delivered = any(row.produced > len(row.gathered) + row.resumed_tokens for row in newest.rows)
        self._drop(newest)
        self._recent = RecentPeak().with_reading(self._active(), now)
        self._sheds += 1
        if delivered:
            return [Failed(newest.number, FailureCode.MEMORY_PRESSURE, refused.message)]
        return [Refusal(newest.number, refused, newest.shape.prompt)]

    # prefill and decode

    def _leave(self, sequence: ScriptedSequence) -> None:
        self._waiting.remove(sequence)
        self._wanted -= len(sequence.rows)

    def _next(self) -> ScriptedSequence | None:
        """Return the next request in turn, if the batch has room for it."""
        if not self._waiting or self._rows >= self._settings.max_batch_size:
            return None
        if self._rows + self._wanted <= self._settings.max_batch_size:  # there is room for all
            return self._waiting[0]
        taken = Counter(one.request.owner.name for one in self._running for _ in one.active_rows())
        waiting = [WaitingRequest(one.request.owner, len(one.rows), bool(one.request.resume)) for one in self._waiting]
        following = self._waiting[next(service_order(waiting, taken))]
        return following if self._rows + len(following.rows) <= self._settings.max_batch_size else None

    def _prefill(self, sequence: ScriptedSequence, now: float) -> list[Frame]:
        """Prefill the prompt and join the decode batch. Both pass the gate; after a refusal all memory is released."""
        refused = self._checked(GateSite.PREFILL, now)
        if refused is None:
            self._forwards += 1
            for row in sequence.active_rows():
                row.commitment.written, row.commitment.joined = sequence.shape.prompt + row.resumed_tokens, True
            refused = self._checked(GateSite.JOIN, now)
        if refused is not None:
            self._drop(sequence)
            return [Refusal(sequence.number, refused, sequence.shape.prompt)]
        self._forwards += 1
        if not self._running:
            self._deadline = now + self._step
        sequence.begun = sequence.last_token_at = now
        self._running.append(sequence)
        self._rows += sum(1 for _ in sequence.active_rows())
        return []

    def _checked(self, site: GateSite, now: float) -> Refused | None:
        """Check the gate for rows with commitments: the ledger already contains their estimate."""
        answer = self.gate.check(site, self._memory(now), 0)
        return answer if isinstance(answer, Refused) else None

    def _decode(self, now: float) -> list[Frame]:
        """Decode one token for every row: deltas of all rows first, then the ends."""
        deltas: list[Delta] = []
        ends: list[Frame] = []
        self._steps += 1
        for sequence in self._running.copy():
            if sequence.crashes:
                self._recorder.crash(self._settings.model, sequence.number)
            end = self._decode_sequence(sequence, deltas, now)
            if end is not None:
                ends.append(end)
        return [*delta_frames(deltas), *ends]

    def _decode_sequence(self, sequence: ScriptedSequence, deltas: list[Delta], now: float) -> Frame | None:
        for row in list(sequence.active_rows()):
            refused = self._grow(sequence, row, now)
            if refused is not None:
                self._drop(sequence)
                return Failed(
                    sequence.number,
                    FailureCode.NO_HEADROOM,
                    f"the answer became longer than expected: {refused.message}",
                )
            row.gathered.append(self._token(sequence, row, now))
            if sequence.request.stream or row.reason or now - sequence.last_token_at >= FLUSH_INTERVAL_SECONDS:
                deltas.append(row.gather())
                sequence.last_token_at = now
            if row.reason:
                self._ledger.release(row.commitment)
                self._rows -= 1
        if any(sequence.active_rows()):
            return None
        self._running.remove(sequence)
        return self._finished(sequence, now)

    def _grow(self, sequence: ScriptedSequence, row: ScriptedRow, now: float) -> Refused | None:
        """Commit the next `KV_GROWTH_TOKENS` tokens for a row that has used its commitment; return the refusal if there
        is no room. While the memory is unreadable rows continue to grow, because only new work is refused for that."""
        commitment = row.commitment
        if commitment.written < commitment.promised:
            return None
        more = min(KV_GROWTH_TOKENS, sequence.shape.limit - row.produced)
        answer = self.gate.check(GateSite.GROW, self._memory(now), self._ledger.extension(commitment, more))
        if isinstance(answer, Refused) and answer.code is not RefusalCode.UNREADABLE:
            return answer
        self._ledger.extend(commitment, more)
        return None

    def _token(self, sequence: ScriptedSequence, row: ScriptedRow, now: float) -> Delta:
        token, text = row.token_source(row.produced, now)
        row.produced += 1
        row.commitment.written += 1
        shown, stopped = row.stops.feed(text)
        if stopped:
            row.reason = "stop"
        elif row.produced >= min(sequence.ends, sequence.shape.limit):
            row.reason = "stop" if row.produced == sequence.ends else "length"
            shown += row.stops.flush()
        return Delta(sequence.number, row.choice, (token,), ((Channel.CONTENT, shown),) if shown else ())

    def _finished(self, sequence: ScriptedSequence, now: float) -> Finished:
        stops = tuple(row.stops.found for row in sequence.rows)
        return Finished(
            sequence.number,
            tuple(row.reason for row in sequence.rows),
            sequence.shape.prompt,
            sum(row.produced for row in sequence.rows),
            timings=Timings(sequence.begun - sequence.arrived, 0.0, now - sequence.begun),
            stops=stops if any(stops) else (),
        )

    # memory

    def _active(self) -> int:
        return self._weights + self._ledger.written_bytes()

    def _observe(self, now: float) -> None:
        self._recent = self._recent.with_reading(self._active(), now)

    def _memory(self, now: float) -> Memory:
        active = self._active()
        use = MlxCounters(active, self._recent.highest(now), self._ledger.reserved_bytes())
        return self.gate.memory(use, MemoryReading(active, "scripted", now), self._total, now)

    def _model(self) -> Model:
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
            groups=self._ledger.groups(),
            expected_output=settings.tokens,
            features=("tools",) if settings.tools else (),
        )


def build(settings: NodeSettings, recorder: CallRecording) -> ScriptedEngine:
    """Return the scripted engine for these settings. Raise `ValueError` if one of its sizes is invalid."""
    return ScriptedEngine(settings.engine.scripted, recorder)
