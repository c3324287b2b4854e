"""The text engine: requests in tokens to answers, on MLX, every forward asked of the gate first.

    Prepared ─► preflight, commit ─► prefill, chunk by chunk ─► join ─► decode, all rows at once ─► Finished
        └ (its model is not loaded: waits for the load)  └ Refusal   └ Refusal    └ Failed

One turn (`step`): a decode step of every batch, one piece of a load, one chunk of one prefill.

Rules
- The gate is asked before every prefill forward, before every join (whose constructor runs one) and before a row
  grows over its promise. A refusal takes back all that the request took; nobody else notices.
- While anything decodes, a chunk is sized by time: CHUNK_STEPS of a decode step, so that the gap between two tokens
  stays below 3 times the quiet one. Alone it takes at most LONE_CHUNK, so that a cancel is heard.
- Prefills take turns: the shortest, then the oldest. A huge prompt holds nobody back and is never starved.
- Every native call is published before it begins (`call`, and the recorder for the agent).
- An exception out of a decode batch costs the batch object, not its rows: they are written anew from their ids. The
  second time it fails a row for good.
- Each request ends in exactly one Finished, Refusal or Failed, unless it was cancelled: then nothing more is said.
"""

import gc
import os
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from node.engine import preflight
from node.engine.batch import DecodeBatch, Guard, Joining, Token
from node.engine.cache import Layers, new_cache
from node.engine.door import Door
from node.engine.footprint import Footprint, clear_pool, give_back
from node.engine.found import Found
from node.engine.gate import Gate, Site
from node.engine.kinds import Call, Doing, Recording, Work
from node.engine.loading import Loaded, Outcome, Shelf
from node.engine.logprobs import logprob_of
from node.engine.prompt import Prepared
from node.engine.resident import FIRST_SPEED, LOAD_SPEED, TICK, Resident
from node.engine.sampling import processors_of, sampler_of, sampling_of
from node.engine.sequence import Row, Sequence
from node.library import Library
from node.memory.sensor import open_machine
from node.settings import NodeSettings
from wire.frames import (
    Admitted,
    Cancel,
    Delta,
    Deltas,
    EngineReport,
    Failed,
    Finished,
    Frame,
    Generate,
    Limits,
    Load,
    Ping,
    Refusal,
    Restore,
    Timings,
    Unload,
)
from wire.refusals import Code, Refused
from wire.report import Counts, Memory, Model
from wire.verdict import row_bytes

CHUNK_STEPS = 1.6
"""Decode steps that a prefill chunk may take while others decode: 1 + 1.6 leaves room below 3 for noise."""
LONE_CHUNK = 1.0
"""Seconds that a chunk may take when nobody decodes."""
LEAST_CHUNK = 32
"""Tokens below which a chunk costs nearly as much as a longer one: the weights are read once either way."""
GROWTH = 64
"""Tokens promised at a time to an answer that outgrows what was expected."""
GATHERING = 0.5
"""Seconds for which tokens of a request that is not streamed are gathered."""
REMEMBERED = 1024
"""Cancelled requests that are remembered until their Generate comes."""
MOST_REBUILDS = 1
FEATURES = ("logprobs", "sampling", "tools")
LOAD_EXPECTED = 10.0
"""Seconds that a piece of a load may take: building the model, compiling kernels."""

log = structlog.get_logger("engine.text")


@dataclass(slots=True, eq=False)
class Prefill:
    """Rows whose shared past is being written: `ids` are known, all but the last have to be in the cache."""

    resident: Resident
    sequence: Sequence
    rows: list[Row]
    ids: list[int]
    cache: Layers | None = None
    written: int = 0

    @property
    def left(self) -> int:
        """Tokens still to write."""
        return len(self.ids) - 1 - self.written


@dataclass(slots=True)
class Out:
    """What one turn has to say: deltas of all batches in one frame, then the ends."""

    deltas: list[Delta] = field(default_factory=list[Delta])
    ends: list[Frame] = field(default_factory=list[Frame])

    def frames(self) -> list[Frame]:
        """Give it in the order in which it must be heard."""
        return [Deltas(tuple(self.deltas)), *self.ends] if self.deltas else self.ends


class TextEngine:
    """See the module's text. `total` is the machine's RAM in bytes."""

    def __init__(self, settings: NodeSettings, library: Library, recorder: Recording, total: int) -> None:
        self.gate = Gate()
        self._settings = settings.engine.mlx
        self._library = library
        self._door = Door(library)
        self._recorder = recorder
        self._footprint = Footprint(total)
        self._shelf = Shelf(
            self.gate,
            lambda: self._memory(time.monotonic()),
            self._footprint.forget,
            frozenset(settings.models.preload),
        )
        self._prefills: list[Prefill] = []
        self._turn = 0
        self._live: dict[int, Sequence] = {}
        self._pending: dict[int, tuple[Prepared, float]] = {}
        self._orders: dict[int, str] = {}
        self._acked = 0
        self._cancelled: dict[int, None] = {}
        self._call: Call | None = None
        self._forwards = self._steps = self._failures = 0
        for name in settings.models.preload:
            found = library.find(name)
            if found is None:
                log.error("preload", model=name, cause="no such model in the folders")
            else:
                self._shelf.ask(found)

    # what the threads ask

    def prepare(self, frame: Frame) -> Work | None:
        """On the I/O thread: put a prompt into tokens; at a sign of life, look for new models now and then."""
        if isinstance(frame, Generate):
            return self._door.prepare(frame)
        if isinstance(frame, Load):
            self._library.look(frame.model)
        if isinstance(frame, Ping):
            return frame if self._library.refresh() else None
        return frame

    def call(self) -> Call | None:
        """Say which native call is under way."""
        return self._call

    def take(self, work: Work, now: float) -> list[Frame]:
        """Take in one piece of work and give what is answered at once."""
        match work:
            case Prepared():
                return self._generate(work, now)
            case Cancel():
                self._cancel(work.request)
            case Limits():
                self.gate.hold(work)
            case Load():
                return self._load(work, now)
            case Unload():
                return self._unload(work)
            case Restore():
                self._restore(work, now)
            case _:
                pass
        return []

    def due(self, now: float) -> float | None:
        """Say when the next step is due: at once while there is work, else when the recent height falls."""
        if self._decoding() or self._choices() or (self._shelf.busy and self.gate.closed() is None):
            return now
        return self._footprint.falls_at(now)

    def step(self, now: float) -> list[Frame]:
        """Decode, read a piece of a load, write one chunk of a prompt."""
        out = Out()
        for resident in list(self._shelf.residents.values()):
            for number in list(resident.batches):
                self._decode(resident, number, out)
        if self._shelf.busy and self.gate.closed() is None:
            self._tick(out)
        waiting = self._choices()
        if waiting:
            self._turn += 1
            self._advance(min(waiting, key=self._order), out)
        return out.frames()

    def report(self, now: float) -> EngineReport:
        """Give the snapshot."""
        running = sum(one.rows() for one in self._shelf.residents.values())
        queued = sum(prefill.left + 1 for prefill in self._prefills)
        queued += sum(len(prepared.ids) for prepared, _ in self._pending.values())
        models = tuple(self._model(found, now) for found in self._library.known().values())
        counts = Counts(
            self.gate.checks.total(), self.gate.refusals.total(), self._forwards, self._steps, self._failures
        )
        return EngineReport(
            self._memory(now), models, running, len(self._prefills) + len(self._pending), queued, self._acked, counts
        )

    # requests

    def _generate(self, prepared: Prepared, now: float) -> list[Frame]:
        request = prepared.request
        self._acked = max(self._acked, request.seq)
        if request.request in self._cancelled:
            del self._cancelled[request.request]
            return []
        if request.request in self._live or request.request in self._pending:
            return []
        refused = self.gate.closed() or prepared.refused
        if refused is not None:
            return [Refusal(request.request, refused)]
        resident = self._shelf.residents.get(request.model)
        if resident is not None:
            return self._admit(resident, prepared, now, now)
        return self._await_model(prepared, now)

    def _await_model(self, prepared: Prepared, now: float) -> list[Frame]:
        """Let a request wait for its model, unless the model cannot come."""
        request = prepared.request
        found = self._library.find(request.model)
        if found is None:
            return [Refusal(request.request, Refused(Code.NO_MODEL, f"this node has no model {request.model}"))]
        shape = self._shape(prepared, found.context)
        cause = self._shelf.cause(found, now)
        refused = preflight.impossible(request, shape, self._model(found, now), self._settings.batch)
        if cause:
            refused = Refused(Code.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}")
        if refused is None:
            refused = preflight.too_large(shape, self._memory(now), self._model(found, now))
        if refused is not None:
            return [Refusal(request.request, refused, len(prepared.ids))]
        self._pending[request.request] = (prepared, now)
        self._shelf.ask(found)
        return []

    def _shape(self, prepared: Prepared, context: int) -> preflight.Shape:
        return preflight.shape_of(prepared.request, len(prepared.ids), self._settings.max_tokens, context)

    def _admit(self, resident: Resident, prepared: Prepared, arrived: float, now: float) -> list[Frame]:
        """Judge a request against the memory of this moment, promise it what it needs, and line it up."""
        request = prepared.request
        shape = self._shape(prepared, resident.found.context)
        refused = self._refused(resident, prepared, shape, now)
        if refused is not None:
            return [Refusal(request.request, refused, shape.prompt)]
        assert prepared.voice is not None  # noqa: S101  only a refused request has none
        sequence = Sequence(
            request, prepared, shape, sampling_of(request.params, resident.defaults),
            _seed() if request.params.seed is None else request.params.seed, arrived,
        )  # fmt: skip
        sequence.rows = [
            Row(sequence, choice, commitment, prepared.voice(choice))
            for choice, commitment in enumerate(resident.ledger.commit(shape.length, shape.choices))
        ]
        text = sum(len(message.content.encode()) for message in request.messages)
        resident.measured_text(text, shape.prompt)
        resident.users += 1
        self._live[sequence.number] = sequence
        self._prefills.append(Prefill(resident, sequence, sequence.rows.copy(), list(prepared.ids)))
        return [Admitted(request.request, shape.prompt)]

    def _refused(self, resident: Resident, prepared: Prepared, shape: preflight.Shape, now: float) -> Refused | None:
        model = self._model(resident.found, now)
        refused = preflight.impossible(prepared.request, shape, model, self._settings.batch)
        if refused is not None:
            return refused
        wrong = [token for token, _ in prepared.request.params.logit_bias if not 0 <= token < resident.vocabulary]
        if wrong or max(prepared.ids) >= resident.vocabulary:
            token = wrong[0] if wrong else max(prepared.ids)
            return Refused(Code.INVALID, f"token id {token} is not within 0..{resident.vocabulary - 1}")
        cost = resident.ledger.cost(shape.length, shape.choices)
        answer = preflight.admit(shape, self._memory(now), model, cost, self.gate)
        if answer is not None and answer.code is Code.NO_ROOM and self._shelf.make_room(cost):
            return preflight.admit(shape, self._memory(now), model, cost, self.gate)
        return answer

    def _cancel(self, number: int) -> None:
        if self._pending.pop(number, None) is not None:
            return
        sequence = self._live.get(number)
        if sequence is not None:
            self._release(sequence)
            return
        self._cancelled[number] = None
        while len(self._cancelled) > REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]

    def _release(self, sequence: Sequence) -> None:
        """Take a request out of wherever it is, and give back all that it had."""
        resident = self._shelf.residents[sequence.request.model]
        writing = list(sequence.writing())
        self._prefills = [prefill for prefill in self._prefills if prefill.sequence is not sequence]
        self._drop(resident, writing)
        for row in writing:
            row.reason = "released"
        self._gone(resident, sequence)
        give_back()

    def _gone(self, resident: Resident, sequence: Sequence) -> None:
        del self._live[sequence.number]
        resident.users -= 1
        resident.used_at = time.monotonic()

    def _drop(self, resident: Resident, rows: list[Row]) -> None:
        """Take rows out of their batches and of the ledger."""
        for number in {resident.ledger.batch_of(row.commitment) for row in rows}:
            batch = resident.batches.get(number)
            if batch is not None:
                self._dropped(resident, number, batch, rows)
        for row in rows:
            resident.ledger.release(row.commitment)

    def _dropped(self, resident: Resident, number: int, batch: DecodeBatch[Row], rows: list[Row]) -> None:
        try:
            batch.drop(rows)
        except Exception as error:
            self._rebuild(resident, number, error, Out(), guilty=rows)
            return
        if not len(batch):
            del resident.batches[number]

    def _fail(self, sequence: Sequence, code: str, message: str, out: Out) -> None:
        self._release(sequence)
        self._failures += 1
        out.ends.append(Failed(sequence.number, code, message))

    # loading

    def _load(self, order: Load, now: float) -> list[Frame]:
        found = self._library.find(order.model)
        if found is None:
            return [Refusal(order.request, Refused(Code.NO_MODEL, f"this node has no model {order.model}"))]
        if order.model in self._shelf.residents:
            return [Finished(order.request, (), 0, 0)]
        self._shelf.forgive(order.model)
        cause = self._shelf.cause(found, now)
        if cause:
            refused = Refused(Code.LOAD_FAILED, f"{found.name} cannot be loaded: {cause}")
            return [Refusal(order.request, refused)]
        self._orders[order.request] = order.model
        self._shelf.ask(found)
        return []

    def _unload(self, order: Unload) -> list[Frame]:
        resident = self._shelf.residents.get(order.model)
        if resident is None:
            return [Refusal(order.request, Refused(Code.NO_MODEL, f"{order.model} is not loaded here"))]
        if resident.users:
            message = f"{order.model} has {resident.users} requests here: wait for their end, or cordon the node first"
            return [Refusal(order.request, Refused(Code.IN_USE, message))]
        del resident
        self._shelf.drop(order.model)
        return [Finished(order.request, (), 0, 0)]

    def _restore(self, restore: Restore, now: float) -> None:
        self._shelf.ban(restore.bans, now)
        for name in restore.models:
            found = self._library.find(name)
            if found is not None and not self._shelf.cause(found, now):
                self._shelf.ask(found)

    def _tick(self, out: Out) -> None:
        name = self._shelf.reading
        first = next((number for number, (prepared, _) in self._pending.items() if prepared.request.model == name), 0)
        with self._native(Doing.LOAD, name, first, LOAD_EXPECTED + TICK / LOAD_SPEED):
            outcome = self._shelf.tick(time.monotonic())
        if outcome is not None:
            self._loaded(outcome, out)

    def _loaded(self, outcome: Outcome, out: Out) -> None:
        """Go on with those who waited for a load, or tell them why it failed."""
        name = outcome.resident.name if isinstance(outcome, Loaded) else outcome.model
        for number in [number for number, model in self._orders.items() if model == name]:
            del self._orders[number]
            ended = isinstance(outcome, Loaded)
            out.ends.append(Finished(number, (), 0, 0) if ended else Refusal(number, outcome.refused))
        waiting = [one for one in self._pending.values() if one[0].request.model == name]
        for prepared, arrived in waiting:
            number = prepared.request.request
            del self._pending[number]
            if isinstance(outcome, Loaded):
                out.ends += self._admit(outcome.resident, prepared, arrived, time.monotonic())
            else:
                out.ends.append(Refusal(number, outcome.refused, len(prepared.ids)))

    # prefill

    def _choices(self) -> list[Prefill]:
        """List the prefills that may go on: those begun, and as many others as have room in the batch."""
        taken = sum(one.rows() for one in self._shelf.residents.values())
        taken += sum(len(prefill.rows) for prefill in self._prefills if prefill.cache is not None)
        room = self._settings.batch - taken
        return [one for one in self._prefills if one.cache is not None or len(one.rows) <= room]

    def _order(self, prefill: Prefill) -> float:
        """Shortest first, every second turn oldest first."""
        return prefill.left if self._turn % 2 else prefill.sequence.arrived

    def _advance(self, prefill: Prefill, out: Out) -> None:
        """Write one chunk; after the last, join."""
        sequence = prefill.sequence
        if not sequence.begun:
            sequence.begun = time.monotonic()
        try:
            refused = self._chunk(prefill) if prefill.left else None
            if refused is None and not prefill.left:
                refused = self._join(prefill, out)
        except Exception as error:
            log.exception("prefill", request=sequence.number)
            self._fail(sequence, "engine_error", f"its prompt could not be processed: {_text(error)}", out)
            return
        if refused is not None:
            self._release(sequence)
            if any(row.ids for row in sequence.rows):
                out.ends.append(Failed(sequence.number, "no_headroom", refused.message))
            else:
                out.ends.append(Refusal(sequence.number, refused, sequence.shape.prompt))

    def _chunk(self, prefill: Prefill) -> Refused | None:
        resident = prefill.resident
        count = min(prefill.left, self._chunk_tokens(resident))
        refused = self._ask(Site.PREFILL, resident.kv.window_per_token * count)
        if refused is not None:
            return refused
        if prefill.cache is None:
            prefill.cache = new_cache(resident.model)
        piece = prefill.ids[prefill.written : prefill.written + count]
        speed = resident.prefill_speed or FIRST_SPEED
        with self._native(Doing.PREFILL, resident.name, prefill.sequence.number, count / speed) as call:
            resident.forward(piece, prefill.cache)
        resident.prefilled(count, time.monotonic() - call.since)
        prefill.written += count
        prefill.rows[0].commitment.written = prefill.written
        clear_pool()
        return None

    def _chunk_tokens(self, resident: Resident) -> int:
        """Size a chunk by time."""
        budget = LONE_CHUNK
        if self._decoding():
            budget = CHUNK_STEPS * sum(one.step_seconds * len(one.batches) for one in self._shelf.residents.values())
        speed = resident.prefill_speed or FIRST_SPEED
        return max(LEAST_CHUNK, min(self._settings.chunk, int(speed * budget)))

    def _join(self, prefill: Prefill, out: Out) -> Refused | None:
        """Let the rows join their decode batches, each asked of the gate: the first forward of a row is in there."""
        resident, sequence = prefill.resident, prefill.sequence
        cache = prefill.cache if prefill.cache is not None else new_cache(resident.model)
        prefill.cache = cache
        for rows in _by_batch(resident, prefill.rows):
            written = len(prefill.ids)
            rows[0].commitment.written = written
            grown = resident.ledger.joining(rows[0].commitment, len(rows))
            refused = self._ask(Site.JOIN, grown // max(1, len(cache)))
            if refused is not None:
                return refused
            last = rows[-1] is prefill.rows[-1]
            self._join_batch(resident, sequence, rows, prefill.ids, cache if last else cache.copy(), out)
            for row in rows:
                row.commitment.written, row.commitment.joined = written, True
        self._prefills.remove(prefill)
        if not sequence.joined:
            sequence.joined = sequence.told = time.monotonic()
        return None

    def _join_batch(
        self, resident: Resident, sequence: Sequence, rows: list[Row], ids: list[int], cache: Layers, out: Out
    ) -> None:
        number = resident.ledger.batch_of(rows[0].commitment)
        batch = resident.batches.setdefault(number, DecodeBatch(resident.model))
        joining = [Joining(row, _guard(sequence, row)) for row in rows]
        expected = resident.step_seconds or LOAD_EXPECTED
        try:
            with self._native(Doing.JOIN, resident.name, sequence.number, expected):
                batch.join(joining, ids, cache)
        except Exception as error:
            self._rebuild(resident, number, error, out, guilty=rows)
            raise

    # decode

    def _decoding(self) -> bool:
        return any(one.batches for one in self._shelf.residents.values())

    def _decode(self, resident: Resident, number: int, out: Out) -> None:
        """Give every row of a batch one token."""
        batch = resident.batches[number]
        self._grow(resident, batch, out)
        if not len(batch):
            return
        try:
            with self._native(Doing.DECODE, resident.name, 0, resident.step_seconds) as call:
                tokens = batch.step()
        except Exception as error:
            log.exception("decode", rows=len(batch))
            self._rebuild(resident, number, error, out)
            return
        now = time.monotonic()
        resident.stepped(now - call.since)
        for row, error in batch.errors():
            if row.sequence.number in self._live:
                self._fail(row.sequence, "engine_error", f"its sampling failed: {_text(error)}", out)
        for token in tokens:
            if not token.row.reason:
                self._token(token, now, out)
        self._end_rows(resident, [token.row for token in tokens], now, out)

    def _grow(self, resident: Resident, batch: DecodeBatch[Row], out: Out) -> None:
        """Promise GROWTH tokens more to each row that has written all that it had, or end its request."""
        for row in batch.rows():
            commitment, shape = row.commitment, row.sequence.shape
            if commitment.written < commitment.promised or row.reason:
                continue
            more = max(1, min(GROWTH, shape.prompt + shape.limit - commitment.promised))
            refused = self._ask(Site.GROW, resident.ledger.extension(commitment, more))
            if refused is None:
                resident.ledger.extend(commitment, more)
            else:
                message = f"the answer outgrew what was expected: {refused.message}"
                self._fail(row.sequence, "no_headroom", message, out)

    def _token(self, token: Token[Row], now: float, out: Out) -> None:
        """Take one token into its row's text."""
        row, sequence = token.row, token.row.sequence
        row.commitment.written += 1
        row.ids.append(token.token)
        row.new.append(token.token)
        try:
            self._read(row, token)
        except Exception as error:
            log.exception("text", request=sequence.number)
            self._fail(sequence, "engine_error", f"its text could not be read: {_text(error)}", out)
            return
        if sequence.request.stream or row.reason or now - sequence.told >= GATHERING:
            out.deltas.append(row.gathered())
            sequence.told = now

    def _read(self, row: Row, token: Token[Row]) -> None:
        sequence = row.sequence
        params = sequence.request.params
        if token.token in sequence.prepared.eos:
            self._finish_row(row, "stop")
            return
        if params.logprobs:
            row.logprobs.append(
                logprob_of(token.logprobs, token.token, params.top_logprobs, sequence.prepared.token_bytes)
            )
        step = row.pipeline.feed(token.token)
        row.pieces += step.pieces
        if step.stopped:
            row.reason = "stop"
        elif len(row.ids) >= sequence.shape.limit:
            self._finish_row(row, "length")

    def _finish_row(self, row: Row, reason: str) -> None:
        pieces, row.reason = row.pipeline.finish(reason)
        row.pieces += pieces

    def _end_rows(self, resident: Resident, rows: list[Row], now: float, out: Out) -> None:
        """Take out the rows that ended, and tell of the requests whose last row it was."""
        ended = [row for row in rows if row.reason and row.sequence.number in self._live]
        if not ended:
            return
        self._drop(resident, ended)
        for sequence in {id(row.sequence): row.sequence for row in ended}.values():
            if not any(sequence.writing()):
                self._gone(resident, sequence)
                out.ends.append(_finished(sequence, now))
        clear_pool()

    def _rebuild(self, resident: Resident, number: int, error: Exception, out: Out, guilty: Iterable[Row] = ()) -> None:
        """Discard a batch whose object raised, and write its rows anew from their ids."""
        batch = resident.batches.pop(number, None)
        if batch is None:
            return
        known = {id(row) for row in guilty}
        rows = [row for row in batch.rows() if id(row) not in known and not row.reason]
        log.warning("rebuild", model=resident.name, rows=len(rows), error=_text(error))
        for row in rows:
            row.commitment.joined, row.commitment.written = False, 0
            row.rebuilt += 1
            if row.rebuilt > MOST_REBUILDS:
                if row.sequence.number in self._live:
                    self._fail(row.sequence, "engine_error", f"the engine failed twice on it: {_text(error)}", out)
            else:
                self._prefills.insert(0, Prefill(resident, row.sequence, [row], row.known()))
        give_back()

    # memory

    def _ask(self, site: Site, estimate: int) -> Refused | None:
        """Ask the gate on a reading of this moment; before a no, give back what can be given, and ask once more."""
        answer = self.gate.check(site, self._memory(time.monotonic()), estimate)
        if isinstance(answer, Refused) and answer.code is Code.NO_ROOM and self._shelf.make_room(estimate):
            answer = self.gate.check(site, self._memory(time.monotonic()), estimate)
        return answer if isinstance(answer, Refused) else None

    def _memory(self, now: float) -> Memory:
        reserved = self._shelf.left + sum(one.ledger.reserved() for one in self._shelf.residents.values())
        for prepared, _ in self._pending.values():
            found = self._library.find(prepared.request.model)
            if found is not None:
                shape = self._shape(prepared, found.context)
                reserved += row_bytes(found.kv, shape.length) * shape.choices
        return self._footprint.judged(self.gate, reserved, now)

    @contextmanager
    def _native(self, doing: Doing, model: str, request: int, expected: float) -> Generator[Call]:
        """Publish a native call for as long as it lasts."""
        call = Call(doing.name.lower(), time.monotonic(), expected)
        self._forwards += doing in (Doing.PREFILL, Doing.JOIN)
        self._steps += doing is Doing.DECODE
        self._recorder.begin(doing, model, request)
        self._call = call
        try:
            yield call
        finally:
            self._call = None
            self._recorder.end()

    def _model(self, found: Found, now: float) -> Model:
        resident = self._shelf.residents.get(found.name)
        if resident is None:
            return Model(
                found.name, found.fingerprint, False, found.weights, found.kv.per_token, context=found.context,
                load_seconds=found.weights / LOAD_SPEED, features=FEATURES, kv_step=found.kv.step,
                kv_fixed=found.kv.fixed, kv_window=found.kv.window, kv_window_per_token=found.kv.window_per_token,
                loading=self._shelf.loading(found.name), cause=self._shelf.cause(found, now),
            )  # fmt: skip
        kv = resident.kv
        return Model(
            found.name, found.fingerprint, True, resident.weights, kv.per_token, context=found.context,
            load_seconds=resident.load_seconds, prefill_speed=resident.prefill_speed,
            decode_speed=1 / resident.step_seconds if resident.step_seconds else 0.0,
            bytes_per_token=resident.bytes_per_token or 4.0, features=FEATURES, groups=resident.ledger.groups(),
            kv_step=kv.step, kv_fixed=kv.fixed, kv_window=kv.window, kv_window_per_token=kv.window_per_token,
        )  # fmt: skip


def _by_batch(resident: Resident, rows: list[Row]) -> list[list[Row]]:
    """Part rows by the batch that they were promised a place in."""
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(resident.ledger.batch_of(row.commitment), []).append(row)
    return list(parts.values())


def _guard(sequence: Sequence, row: Row) -> Guard:
    return Guard(
        sampler_of(sequence.sampling, sequence.seed, row.choice, len(row.ids)),
        processors_of(sequence.sampling, len(sequence.prompt)),
    )


def _finished(sequence: Sequence, now: float) -> Finished:
    timings = Timings(sequence.begun - sequence.arrived, sequence.joined - sequence.begun, now - sequence.joined)
    return Finished(
        sequence.number, tuple(row.reason for row in sequence.rows), sequence.shape.prompt,
        sum(len(row.ids) for row in sequence.rows), timings=timings,
    )  # fmt: skip


def _seed() -> int:
    return int.from_bytes(os.urandom(8), "big")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def build(settings: NodeSettings, recorder: Recording) -> TextEngine:
    """Make the text engine with the models that the settings let it find."""
    library = Library(settings.models)
    library.scan()
    gc.freeze()
    return TextEngine(settings, library, recorder, open_machine(settings).hardware.memory)
