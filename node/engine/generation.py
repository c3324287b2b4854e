"""Rows from prompt to last token: written chunk by chunk, joined, decoded together, rebuilt when a batch breaks.

    begin ─► prefill, chunk by chunk ─► join ─► decode, all rows at once ─► Finished
                └ Refusal                └ Refusal   └ Failed

Rules
- The gate is asked before every prefill forward, before every join (which copies a batch) and before a row grows over
  its promise. A refusal takes back all that the request took; nobody else notices.
- An exception out of a decode batch costs the batch object, not its rows: they are written anew from their ids. The
  second time it fails a row for good.
- A request leaves by one door, `release` (or `_gone` when its last row ended): prefills, batches, ledger and all.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import structlog

from node.engine.batch import DecodeBatch, Guard, Joining, Token
from node.engine.cache import Layers
from node.engine.footprint import give_back
from node.engine.forwards import Forwards
from node.engine.gate import Site
from node.engine.kinds import Doing
from node.engine.logprobs import logprob_of
from node.engine.resident import FIRST_SPEED, Resident, forward
from node.engine.reuse import Past, Reuse
from node.engine.sampling import processors_of, sampler_of
from node.engine.schedule import budget, chunk_tokens, next_prefill
from node.engine.sequence import Row, Sequence
from wire.frames import Delta, Deltas, Failed, Finished, Frame, Refusal, Timings
from wire.refusals import Refused

GROWTH = 64
"""Tokens promised at a time to an answer that outgrows what was expected."""
GATHERING = 0.5
"""Seconds for which tokens of a request that is not streamed are gathered."""
MOST_REBUILDS = 1
JOIN_EXPECTED = 10.0
"""Seconds that a first join may take: kernels are compiled."""

log = structlog.get_logger("engine.generation")


@dataclass(slots=True, eq=False)
class Prefill:
    """Rows whose shared past is being written: all of `ids` have to be in the cache, and `logits` are of the last.
    Before its first chunk `written` is what was found of it in the prefix cache, and without a `past` nothing is."""

    resident: Resident
    sequence: Sequence
    rows: list[Row]
    ids: list[int]
    cache: Layers | None = None
    logits: mx.array | None = None
    written: int = 0
    past: Past | None = None

    @property
    def left(self) -> int:
        """Tokens still to write."""
        return len(self.ids) - self.written


@dataclass(slots=True)
class Out:
    """What one turn has to say: deltas of all batches in one frame, then the ends."""

    deltas: list[Delta] = field(default_factory=list[Delta])
    ends: list[Frame] = field(default_factory=list[Frame])

    def frames(self) -> list[Frame]:
        """Give it in the order in which it must be heard."""
        return [Deltas(tuple(self.deltas)), *self.ends] if self.deltas else self.ends


class Generation:
    """All rows of all models. `batch`: most rows that decode at once, `chunk`: most tokens of a forward."""

    def __init__(
        self,
        forwards: Forwards,
        residents: Callable[[], Mapping[str, Resident]],
        reuse: Reuse,
        batch: int,
        chunk: int,
    ) -> None:
        self._forwards = forwards
        self._reuse = reuse
        self._residents = residents
        self._batch = batch
        self._chunk_most = chunk
        self._live: dict[int, Sequence] = {}
        self._prefills: list[Prefill] = []
        self._turn = 0
        self._out = Out()

    # what the engine asks

    def begin(self, resident: Resident, sequence: Sequence) -> None:
        """Take in an admitted request, whose rows are promised their memory."""
        resident.users += 1
        self._live[sequence.number] = sequence
        prefill = Prefill(resident, sequence, sequence.rows.copy(), list(sequence.prompt))
        self._reuse.begin(prefill)
        self._prefills.append(prefill)

    def holds(self, number: int) -> bool:
        """Whether a request is here."""
        return number in self._live

    def cancel(self, number: int) -> bool:
        """Drop a request in whatever phase it is, saying nothing more of it; whether it was here."""
        sequence = self._live.get(number)
        if sequence is not None:
            for prefill in self._prefills:
                if prefill.sequence is sequence:
                    self._reuse.cancelled(prefill)
            self._release(sequence)
        return sequence is not None

    def shed(self, refused: Refused) -> bool:
        """End the newest request that holds memory, for this reason; whether there was one. What waits holds none."""
        holding = [one for one in self._live.values() if any(row.commitment.written for row in one.writing())]
        if not holding:
            return False
        newest = max(holding, key=lambda one: (one.arrived, one.number))
        self._release(newest)
        self._forwards.sheds += 1
        log.warning("shed", request=newest.number, left=len(self._live))
        if newest.delivered:
            self._out.ends.append(Failed(newest.number, "memory_pressure", refused.message))
        else:
            self._out.ends.append(Refusal(newest.number, refused, newest.shape.prompt))
        return True

    def busy(self) -> bool:
        """Whether a step has something to do or to say."""
        return self._decoding() or bool(self._choices()) or bool(self._out.ends)

    def said(self) -> list[Frame]:
        """Give what there is to say since the last time."""
        out, self._out = self._out, Out()
        return out.frames()

    def load(self) -> tuple[int, int, int]:
        """Count the rows that decode, the prefills, and the prompt tokens that these have still to write."""
        return self._rows(), len(self._prefills), sum(prefill.left for prefill in self._prefills)

    def decode(self) -> None:
        """Give every row of every batch one token."""
        for resident in list(self._residents().values()):
            for number in list(resident.batches):
                self._decode(resident, number)

    def prefill(self) -> None:
        """Write one chunk of one prompt; after its last, let it join."""
        waiting = self._choices()
        if waiting:
            self._turn += 1
            chosen = next_prefill([(one.left, one.sequence.arrived) for one in waiting], self._turn)
            self._advance(waiting[chosen])

    # prefill

    def _choices(self) -> list[Prefill]:
        """List the prefills that may go on: those begun, and of the others the first, while the batch has room; who
        needs much room is not passed over for ever."""
        found = [one for one in self._prefills if one.cache is not None]
        room = self._batch - self._rows() - sum(len(one.rows) for one in found)
        for one in self._prefills:
            if one.cache is None:
                room -= len(one.rows)
                if room < 0:
                    break
                found.append(one)
        return found

    def _advance(self, prefill: Prefill) -> None:
        """Write one chunk; after the last, join."""
        sequence = prefill.sequence
        if not sequence.begun:
            sequence.begun = time.monotonic()
        try:
            refused = self._chunk(prefill)
            if refused is None and prefill.logits is not None:
                refused = self._join(prefill, prefill.logits)
        except Exception as error:
            log.exception("prefill", request=sequence.number)
            self._reuse.distrust(prefill.resident.name)
            self._fail(sequence, "engine_error", f"its prompt could not be processed: {text_of(error)}")
            return
        if refused is not None:
            self._release(sequence)
            if any(row.ids for row in sequence.rows):
                self._out.ends.append(Failed(sequence.number, "no_headroom", refused.message))
            else:
                self._out.ends.append(Refusal(sequence.number, refused, sequence.shape.prompt))

    def _chunk(self, prefill: Prefill) -> Refused | None:
        resident = prefill.resident
        self._reuse.find(prefill)
        count = self._reuse.until(prefill, self._chunk_tokens(prefill))
        last = count == prefill.left
        transient = resident.estimator.chunk(count, prefill.written, last=last)
        refused = self._forwards.ask(Site.PREFILL, transient)
        if refused is not None:
            return refused
        self._wait()
        if prefill.sequence.number not in self._live:  # another of its rows was in a batch that just broke
            return None
        if prefill.cache is None and not self._reuse.restore(prefill):
            return self._chunk(prefill)
        assert prefill.cache is not None  # noqa: S101  it was just given one
        piece = prefill.ids[prefill.written : prefill.written + count]
        speed = resident.prefill_speed or FIRST_SPEED
        with self._forwards.native(Doing.PREFILL, resident.name, prefill.sequence.number, count / speed) as call:
            prefill.logits = forward(resident.model, piece, prefill.cache, last=last)
        resident.prefilled(count, time.monotonic() - call.since)
        prefill.written += count
        prefill.rows[0].commitment.written = prefill.written
        self._reuse.reached(prefill)
        return None

    def _chunk_tokens(self, prefill: Prefill) -> int:
        """Size a chunk by time. The last one gives logits, so it has at most `tail` tokens, or is the last alone."""
        resident = prefill.resident
        step = sum(one.step_seconds * len(one.batches) for one in self._residents().values())
        whole = resident.fixed_seconds + prefill.left * resident.token_seconds
        seconds = budget(step, whole)
        count = chunk_tokens(seconds, resident.fixed_seconds, resident.token_seconds, self._chunk_most)
        count = min(count, prefill.left)
        return count - 1 if count == prefill.left > resident.tail else count

    def _wait(self) -> None:
        """Wait for the steps launched before. MLX does one thing after the other, so nothing is lost by it, and both
        their time and the chunk's are known."""
        for resident in self._residents().values():
            for number, batch in list(resident.batches.items()):
                begun = time.monotonic()
                try:
                    batch.wait()
                except Exception as error:
                    log.exception("decode", rows=len(batch))
                    self._rebuild(resident, number, error)
                else:
                    resident.stepped((batch.called or 0.0) + time.monotonic() - begun)
                    batch.called = None

    def _join(self, prefill: Prefill, logits: mx.array) -> Refused | None:
        """Let the rows join their decode batches, each asked of the gate: a batch is copied layer by layer."""
        resident, sequence = prefill.resident, prefill.sequence
        cache = prefill.cache
        assert cache is not None  # noqa: S101  logits come from a forward, which has one
        tokens: list[Token[Row]] = []
        for rows in _by_batch(resident, prefill.rows):
            written = len(prefill.ids)
            rows[0].commitment.written = written
            grown = resident.ledger.joining(rows[0].commitment, len(rows))
            refused = self._forwards.ask(Site.JOIN, resident.estimator.join(grown, len(cache)))
            if refused is not None:
                return refused
            self._reuse.prompt_written(prefill, grown // max(1, len(cache)))
            last = rows[-1] is prefill.rows[-1]
            tokens += self._join_batch(prefill, rows, cache if last else cache.copy(), logits)
            for row in rows:
                row.commitment.written, row.commitment.joined = written, True
        self._prefills.remove(prefill)
        if not sequence.joined:
            sequence.joined = sequence.told = time.monotonic()
        self._take(resident, tokens)
        return None

    def _join_batch(self, prefill: Prefill, rows: list[Row], cache: Layers, logits: mx.array) -> list[Token[Row]]:
        resident, sequence = prefill.resident, prefill.sequence
        number = resident.ledger.batch_of(rows[0].commitment)
        batch = resident.batches.setdefault(number, DecodeBatch(resident.model))
        joining = [Joining(row, _guard(sequence, row)) for row in rows]
        try:
            with self._forwards.native(Doing.JOIN, resident.name, sequence.number, JOIN_EXPECTED):
                return batch.join(joining, prefill.ids, cache, logits)
        except Exception as error:
            self._rebuild(resident, number, error, guilty=rows)
            raise

    # decode

    def _rows(self) -> int:
        return sum(one.rows() for one in self._residents().values())

    def _decoding(self) -> bool:
        return any(one.batches for one in self._residents().values())

    def _decode(self, resident: Resident, number: int) -> None:
        """Give every row of a batch one token."""
        batch = resident.batches[number]
        self._grow(resident, batch)
        if not len(batch):
            return
        try:
            with self._forwards.native(Doing.DECODE, resident.name, 0, resident.step_seconds) as call:
                tokens = batch.step()
        except Exception as error:
            log.exception("decode", rows=len(batch))
            self._rebuild(resident, number, error)
            return
        now = time.monotonic()
        if batch.called is not None:
            resident.stepped(batch.called)
        batch.called = now - call.since
        self._take(resident, tokens)

    def _take(self, resident: Resident, tokens: list[Token[Row]]) -> None:
        """Take tokens into their rows' texts, and out the rows that failed or ended by them."""
        for batch in list(resident.batches.values()):
            for row, error in batch.errors():
                self._fail(row.sequence, "engine_error", f"its sampling failed: {text_of(error)}")
        now = time.monotonic()
        for token in tokens:
            if not token.row.reason:
                self._token(token, now)
        self._end_rows(resident, [token.row for token in tokens], now)

    def _grow(self, resident: Resident, batch: DecodeBatch[Row]) -> None:
        """Promise GROWTH tokens more to each row that has written all that it had, or end its request."""
        for row in batch.rows():
            commitment, shape = row.commitment, row.sequence.shape
            if commitment.written < commitment.promised or row.reason:
                continue
            more = max(1, min(GROWTH, shape.prompt + shape.limit - commitment.promised))
            refused = self._forwards.ask(Site.GROW, resident.ledger.extension(commitment, more))
            if refused is None:
                resident.ledger.extend(commitment, more)
            else:
                message = f"the answer outgrew what was expected: {refused.message}"
                self._fail(row.sequence, "no_headroom", message)

    def _token(self, token: Token[Row], now: float) -> None:
        """Take one token into its row's text."""
        row, sequence = token.row, token.row.sequence
        row.commitment.written += 1
        row.ids.append(token.token)
        row.new.append(token.token)
        try:
            self._read(row, token)
        except Exception as error:
            log.exception("text", request=sequence.number)
            self._fail(sequence, "engine_error", f"its text could not be read: {text_of(error)}")
            return
        if sequence.request.stream or row.reason or now - sequence.told >= GATHERING:
            self._out.deltas.append(row.gathered())
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

    def _end_rows(self, resident: Resident, rows: list[Row], now: float) -> None:
        """Take out the rows that ended, and tell of the requests whose last row it was."""
        ended = [row for row in rows if row.reason and row.sequence.number in self._live]
        if not ended:
            return
        self._keep(resident, ended)
        self._drop(resident, ended)
        for sequence in {id(row.sequence): row.sequence for row in ended}.values():
            if not any(sequence.writing()):
                self._gone(resident, sequence)
                self._out.ends.append(_finished(sequence, now))

    def _keep(self, resident: Resident, rows: list[Row]) -> None:
        """Leave what ended rows have written to whoever goes on with it."""
        for row in rows:
            number = resident.ledger.batch_of(row.commitment)
            batch = resident.batches.get(number)
            if batch is None:
                continue
            try:
                self._reuse.row_ended(resident, row, batch)
            except Exception as error:
                self._rebuild(resident, number, error)

    def _rebuild(self, resident: Resident, number: int, error: Exception, guilty: Iterable[Row] = ()) -> None:
        """Discard a batch whose object raised, and write its rows anew from their ids."""
        batch = resident.batches.pop(number, None)
        if batch is None:
            return
        self._reuse.distrust(resident.name)
        known = {id(row) for row in guilty}
        rows = [row for row in batch.rows() if id(row) not in known and not row.reason]
        log.warning("rebuild", model=resident.name, rows=len(rows), error=text_of(error))
        for row in rows:
            row.commitment.joined, row.commitment.written = False, 0
            row.rebuilt += 1
            if row.rebuilt > MOST_REBUILDS:
                self._fail(row.sequence, "engine_error", f"the engine failed twice on it: {text_of(error)}")
            else:
                self._prefills.insert(0, Prefill(resident, row.sequence, [row], row.known()))
        give_back()

    # the way out

    def _release(self, sequence: Sequence) -> None:
        """Take a request out of wherever it is, and give back all that it had."""
        resident = self._residents()[sequence.request.model]
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
            self._rebuild(resident, number, error, guilty=rows)
            return
        if not len(batch):
            del resident.batches[number]

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        """End a request as broken, unless it has ended already: one fault may reach it by two ways."""
        if sequence.number not in self._live:
            return
        self._release(sequence)
        self._forwards.failures += 1
        self._out.ends.append(Failed(sequence.number, code, message))


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
        sum(len(row.ids) for row in sequence.rows), sequence.cached, timings,
    )  # fmt: skip


def text_of(error: Exception) -> str:
    """Put an exception into one bounded line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
