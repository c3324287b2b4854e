"""Rows from prompt to last token: written chunk by chunk, joined, decoded together, rebuilt when a batch breaks.

    begin ─► prefill, chunk by chunk ─► join ─► decode, all rows at once ─► Finished
                └──── waits ◄─────────────┘        │
                          ▲ └ gives way: Refusal   │ gives way
                          └────── preempted ◄──────┘

Rules
- The gate is asked before every prefill forward, before every join (which copies a batch) and before a row grows over
  its promise. A chunk is made smaller before it is refused.
- What does not fit waits as long as somebody else may end, and keeps newcomers out meanwhile (`wanted`). When all wait
  for each other the newest request gives way; when a row has to grow, one that waits for its turn, else the newest, of
  the owner who has most. It is refused if nothing of it was heard (the router places it anew), else preempted: its
  memory is given back, and it is written anew from its ids once there is room. Alone and still without room it fails,
  with the numbers.
- Rows are shared fairly between keys (`wire.capacity.fairness`). Where none is free, and where memory is short at
  admission, requests of the key that holds most are preempted for one that holds less. They come back in turn with all
  others.
- Short prompts that wait are read in one forward, asked of the gate as a whole (`together`). What could not be used of
  it, for want of room or for a fault, is read again one by one.
- After every forward the engine looks whether the forecast held. Over its cap, that request gives way at once.
- An exception out of a decode batch costs the batch object, not its rows: they are written anew from their ids. The
  second time it fails a row for good.
- A request leaves by one door, `release` (or `_gone` when its last row ended): prefills, batches, ledger and all.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import structlog
from msgspec.structs import replace

from node.engine.grammar.matcher import GrammarFailed
from node.engine.kv.commitments import Commitment
from node.engine.kv.kv_cache import Layers, extent_of, room_of, row_of, stretch, widen
from node.engine.memory.footprint import give_back
from node.engine.memory.gate import Site
from node.engine.memory.gated_forward import Forwards
from node.engine.models.loaded_model import FIRST_SPEED, Resident, forward
from node.engine.process.interface import Doing
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.chunk_policy import budget, next_prefill, shared_budget, shrunk
from node.engine.scheduling.decode_batch import DecodeBatch, Joining, Newcomers, Token
from node.engine.scheduling.invariants import violations
from node.engine.scheduling.packed_prefill import Together
from node.engine.scheduling.prefill import Prefill, by_batch, by_past, guard_of
from node.engine.scheduling.prefix_cache import Reuse
from node.engine.text.logprobs import logprob_of
from wire.capacity.arithmetic import row_bytes
from wire.capacity.fairness import Holding, Owner, Reading, Waiting, giving_way, in_turn
from wire.frames import Delta, Failed, Finished, Frame, Refusal, Timings, delta_frames
from wire.refusals import GRAMMAR_FAILED, Code, Refused

GROWTH = 64
"""Tokens promised at a time to an answer that outgrows what was expected."""
GATHERING = 0.5
"""Seconds for which tokens of a request that is not streamed are gathered."""
MOST_REBUILDS = 1
ODD = 4
"""Times the estimate above which a single step is not believed: what rows that ended left behind is freed late. What a
step really takes shows in the next one, too."""
RETRY = 0.1
"""Seconds until the gate is asked again for what waits for memory."""
LINGER, MOST_LINGER, CROWD = 0.01, 0.03, 30.0
"""Seconds for which prompts wait for another one to be read with, again after each that comes, at most in all, and for
how long that is worth it after there were several here at once: those who ask in waves come within moments."""
JOIN_EXPECTED = 10.0
"""Seconds that a first join may take: kernels are compiled."""

log = structlog.get_logger("engine.generation")


@dataclass(slots=True)
class Out:
    """What one turn has to say: deltas of all batches in one frame, then the ends."""

    deltas: list[Delta] = field(default_factory=list[Delta])
    ends: list[Frame] = field(default_factory=list[Frame])

    def frames(self) -> list[Frame]:
        """Give it in the order in which it must be heard."""
        return [*delta_frames(self.deltas), *self.ends]


class Generation:
    """All rows of all models. `batch`: most rows that decode at once, `chunk`: most tokens of a forward, `floor`: those
    of the smallest into which the gate may shrink one."""

    def __init__(
        self,
        forwards: Forwards,
        residents: Callable[[], Mapping[str, Resident]],
        reuse: Reuse,
        batch: int,
        chunk: int,
        floor: int,
    ) -> None:
        self._forwards = forwards
        self._reuse = reuse
        self._residents = residents
        self._batch = batch
        self._chunk_most = chunk
        self._floor = min(floor, chunk)
        self._together = Together(forwards, reuse, chunk)
        self._live: dict[int, Sequence] = {}
        self._prefills: list[Prefill] = []
        self._preempted: list[Sequence] = []
        self._return_at = 0.0
        self._odd = False
        self._sample, self._grew = 0, False
        """The mark of the last decode step, while nothing but it has taken or given back memory since, else 0; and
        whether its caches grew."""
        self._turn = 0
        self._reading = Reading()
        self._crowded = -math.inf
        """When there last were several."""
        self._out = Out()

    # what the engine asks

    @property
    def live(self) -> Mapping[int, Sequence]:
        """Requests that have not ended, by number."""
        return self._live

    @property
    def prefills(self) -> tuple[Prefill, ...]:
        """Prefills that have not joined their batch."""
        return tuple(self._prefills)

    @property
    def preempted(self) -> tuple[Sequence, ...]:
        """Requests without memory that return once there is room."""
        return tuple(self._preempted)

    def begin(self, resident: Resident, sequence: Sequence) -> None:
        """Take in an admitted request, whose rows are promised their memory. Rows of which the same is known, the
        prompt alone most often, are written as one."""
        resident.users += 1
        self._live[sequence.number] = sequence
        for ids, rows in by_past(sequence.writing()).items():
            self._prefills.append(self._prefill_of(resident, sequence, rows, [*sequence.prompt, *ids]))

    def _prefill_of(self, resident: Resident, sequence: Sequence, rows: list[Row], ids: list[int]) -> Prefill:
        """Return a prefill of `ids` that has looked into the prefix cache."""
        prefill = Prefill(resident, sequence, rows, ids)
        self._reuse.begin(prefill)
        return prefill

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

    def close(self) -> None:
        """Give back what prompts hold that are being written: the process ends."""
        for sequence in self._live.values():
            self._leave(sequence)
        self._live.clear()

    def shed(self, refused: Refused) -> bool:
        """End the newest request that holds memory, for this reason; whether there was one. What waits holds none."""
        newest = self._newest()
        if newest is None:
            return False
        self._forwards.sheds += 1
        self._end(newest, refused, "memory_pressure")
        return True

    def due(self, now: float) -> float | None:
        """Say when the next step is due: at once while there is something to do or to say, later while all that is
        left waits for memory, else never."""
        if self._decoding() or self._out.ends:
            return now
        choices = self._choices(now)
        if choices:
            return max(now, self._lingers(choices))
        waiting = [one.retry_at for one in self._prefills]
        return min([*waiting, self._return_at] if self._preempted else waiting, default=None)

    def wanted(self, key: str | None = None) -> int:
        """Return the bytes that waiting requests need first, before a new one of `key` is admitted: not those that were
        preempted for another key."""
        waiting = [
            one.resident.estimator.chunk(self._floor, len(one.ids)) for one in self._prefills if one.retry_at > 0
        ]
        first = [one for one in self._preempted if key in (None, one.request.owner.name) or not one.yielded]
        oldest = min(first, key=_age, default=None)
        return max(waiting, default=0) + (0 if oldest is None else self._returning(oldest))

    def said(self) -> list[Frame]:
        """Give what there is to say since the last time."""
        out, self._out = self._out, Out()
        return out.frames()

    def load(self) -> tuple[int, int, int]:
        """Count the rows that decode, the prefills, and the prompt tokens that these have still to write."""
        waiting = len(self._prefills) + len(self._preempted)
        return self._rows(), waiting, sum(prefill.left for prefill in self._prefills)

    def decode(self) -> None:
        """Give every row of every batch one token."""
        for resident in list(self._residents().values()):
            for number in list(resident.batches):
                # A row that grew in an earlier batch, or a forward over the cap, may have preempted this batch's last.
                if number in resident.batches:
                    self._decode(resident, number)

    def prefill(self) -> None:
        """Write one chunk of one prompt, or several short ones at once; after the last chunk, let them join."""
        now = time.monotonic()
        if self._preempted and now >= self._return_at:
            self._return_next(now)
        self._share_rows()
        waiting = self._choices(now)
        if waiting and now >= self._lingers(waiting):
            self._turn += 1
            shown = [(one.left, one.sequence.arrived, one.owner) for one in waiting]
            first = waiting[next_prefill(shown, self._turn, self._reading)]
            members = self._company(first, waiting)
            lefts = [one.left for one in members]
            if len(members) < 2 or not self._advance_together(members):
                self._advance(first)
            for one, left in zip(members, lefts, strict=True):
                self._reading.has_read(one.owner, max(0, left - one.left))

    def check(self) -> list[str]:
        """Return the broken rules of the bookkeeping (`node.engine.scheduling.invariants`); empty when all hold."""
        return violations(self._live, self._prefills, self._preempted, self._residents())

    def still(self) -> None:
        """Wait for the steps launched before, so that what follows is measured by itself."""
        self._wait()

    # prefill

    def _choices(self, now: float) -> list[Prefill]:
        """List the prefills that may go on: those begun, and of the others those whose turn it is, while the batch has
        room; who needs much room is not passed over for ever. Those that wait for memory may not yet."""
        found = [one for one in self._prefills if one.cache is not None]
        room = self._batch - self._rows() - sum(len(one.rows) for one in found)
        if room > 0 and len(found) < len(self._prefills):
            for one in self._unbegun():
                room -= len(one.rows)
                if room < 0:
                    break
                found.append(one)
        return [one for one in found if one.retry_at <= now]

    def _free_rows(self) -> int:
        """Return how many rows may still begin beside those that decode or are prefilling."""
        return self._batch - self._rows() - sum(len(one.rows) for one in self._prefills if one.cache is not None)

    def _share_rows(self) -> None:
        """Preempt requests of the key that holds most rows for the next one of a key that holds fewer."""
        alone = len({one.request.owner.name for one in self._live.values()}) < 2
        if alone or all(one.cache is not None for one in self._prefills):
            return
        first = next(self._unbegun())
        if first.retry_at:
            return
        begun = Counter(id(one.sequence) for one in self._prefills if one.cache is not None for _ in one.rows)
        holding = [
            (one, begun[id(one)] + sum(row.commitment.joined for row in one.writing()))
            for one in sorted(self._live.values(), key=_age) if one not in self._preempted
        ]  # fmt: skip
        holding = [(one, size) for one, size in holding if size]
        needed = len(first.rows)
        places = giving_way(
            first.owner, needed, needed - self._free_rows(),
            [Holding(one.request.owner, size) for one, size in holding],
        )  # fmt: skip
        for sequence in [holding[place][0] for place in places]:
            self._yield(sequence, keep=True)

    def make_way(self, owner: Owner, need: int, lacking: int) -> bool:
        """Preempt requests of the keys that hold most memory, so that a request of another key which will hold `need`
        bytes gets the `lacking` ones; False where the shares do not allow for so much, and nothing was done."""
        live = [one for one in sorted(self._live.values(), key=_age) if one not in self._preempted]
        places = giving_way(owner, need, lacking, [Holding(one.request.owner, self._promised(one)) for one in live])
        for place in places:
            self._yield(live[place], keep=False)
        return bool(places)

    def _promised(self, sequence: Sequence) -> int:
        kv = self._residents()[sequence.request.model].kv
        return sum(row_bytes(kv, row.commitment.promised) for row in sequence.writing())

    def _yield(self, sequence: Sequence, *, keep: bool) -> None:
        """Preempt a request for another key. Where that needs rows and no memory, what it has written is kept for its
        return, and free buffers are not given back, which takes 70 ms."""
        if keep:
            joined = [row for row in sequence.writing() if row.commitment.joined]
            self._keep(self._residents()[sequence.request.model], joined)
        if sequence.number in self._live:  # a batch that broke meanwhile may have ended it
            sequence.yielded = True
            self.preempt(sequence)
            if not keep:
                give_back()

    def _unbegun(self) -> Iterator[Prefill]:
        """Give the prefills that hold nothing yet in the order in which they get rows."""
        taken = Counter(
            row.sequence.request.owner.name
            for one in self._residents().values() for batch in one.batches.values() for row in batch.rows()
        )  # fmt: skip
        for one in self._prefills:
            if one.cache is not None:
                taken[one.owner.name] += len(one.rows)
        unbegun = [one for one in self._prefills if one.cache is None]
        for place in in_turn([Waiting(one.owner, len(one.rows), one.answered) for one in unbegun], taken):
            yield unbegun[place]

    def _lingers(self, waiting: list[Prefill]) -> float:
        """Say until when prompts wait for company: where nobody decodes meanwhile, and several were here lately."""
        if self._decoding() or any(one.cache is not None or not one.resident.plain for one in waiting):
            return 0.0
        if sum(len(one.rows) for one in waiting) >= self._batch:
            return 0.0
        arrived = [one.sequence.arrived for one in waiting]
        first, last = min(arrived), max(arrived)
        return min(first + MOST_LINGER, last + LINGER) if first < self._crowded + CROWD else 0.0

    def _company(self, first: Prefill, waiting: list[Prefill]) -> list[Prefill]:
        """Choose who is read with the first, if there is time for all of that at once."""
        if self._affordable(first) < first.left:
            return [first]
        seconds = shared_budget(self._step_seconds(), len(waiting), self._rows())
        return self._together.company(first, waiting, first.resident.pace.tokens(seconds, 0, self._chunk_most))

    def _advance_together(self, members: list[Prefill]) -> bool:
        """Read prompts in one forward and let them join at once; False: no two of them have room for that. What could
        not be used is read again, one by one."""
        self._wait()
        members = self._together.fitting([one for one in members if one in self._prefills])
        if not members:
            return False
        resident, now = members[0].resident, time.monotonic()
        for one in members:
            one.sequence.begun = one.sequence.begun or now
        try:
            joined = self._join_together(members, self._together.read(members))
        except Exception as error:
            log.exception("together", model=resident.name, rows=len(members), error=text_of(error))
            self._reuse.distrust(resident.name)
            joined = False
        if not joined:
            for one in members:
                one.again()
        self._look_over()
        return True

    def _join_together(self, members: list[Prefill], cache: Layers) -> bool:
        """Let rows join that were read together; False where the gate refuses."""
        resident = members[0].resident
        longest = max(members, key=lambda one: one.written).rows[0].commitment
        grown, layers = resident.ledger.joining(longest, len(members)), len(cache)
        copied = resident.estimator.join(grown, layers)
        rows = resident.ledger.joined_rows(longest) + len(members)
        if self._forwards.ask(Site.JOIN, resident.estimator.widened_join(grown, layers, rows)) is not None:
            return False
        for place, one in enumerate(members):
            self._reuse.read_together(one, row_of(cache, place, len(one.ids) - 1), copied)
        number = resident.ledger.batch_of(longest)
        batch = resident.batches.get(number) or DecodeBatch(resident.model)
        joining = [Joining(one.rows[0], guard_of(one.sequence, one.rows[0])) for one in members]
        with self._forwards.native(Doing.JOIN, resident.name, 0, JOIN_EXPECTED):
            newcomers = batch.ready(joining, [one.ids for one in members], cache)
            self._admit(resident, number, batch, newcomers)
        now = time.monotonic()
        for one in members:
            self._prefills.remove(one)
            commitment, sequence = one.rows[0].commitment, one.sequence
            commitment.joined, commitment.room = True, 0
            sequence.joined, sequence.told = sequence.joined or now, now
        return True

    def _admit(self, resident: Resident, number: int, batch: DecodeBatch[Row], newcomers: Newcomers[Row]) -> None:
        try:
            batch.admit(newcomers)
        except Exception as error:
            self._rebuild(resident, number, error)
            raise
        resident.batches[number] = batch

    def _look_over(self) -> None:
        """After a forward, or a step: over its cap, the newest gives way at once."""
        over, newest = self._forwards.over(), self._newest()
        if over is not None and newest is not None:
            self._give_way(newest, over)

    def _advance(self, prefill: Prefill) -> None:
        """Write one chunk; after the last, join."""
        sequence = prefill.sequence
        if not sequence.begun:
            sequence.begun = time.monotonic()
        try:
            refused: Refused | None = None
            if prefill.left:
                refused = self._chunk(prefill)
            else:  # its join had no room
                self._wait()
            if refused is None and prefill.logits is not None and prefill in self._prefills:
                refused = self._join(prefill, prefill.logits)
                if prefill not in self._prefills:  # a row that had joined failed, and its request with it
                    refused = None
        except Exception as error:
            log.exception("prefill", request=sequence.number, request_id=sequence.request.request_id)
            self._reuse.distrust(prefill.resident.name)
            self.fail(sequence, "engine_error", f"its prompt could not be processed: {text_of(error)}")
            return
        over = self._forwards.over() if refused is None else None
        if refused is not None:
            self._held_up(prefill, refused)
        elif over is not None and sequence.number in self._live:
            self._give_way(sequence, over)

    def _held_up(self, prefill: Prefill, refused: Refused) -> None:
        """Let a prefill wait that does not fit now, unless all wait for each other: then the newest gives way."""
        now = time.monotonic()
        prefill.retry_at = now + RETRY
        if refused.code is Code.NO_ROOM and (self._moving(now) or self._forwards.falls_at() is not None):
            return
        waiting = (one.sequence for one in self._prefills if one.retry_at > now)
        self._give_way(max(waiting, key=_age), refused)

    def _moving(self, now: float) -> bool:
        """Whether anybody goes on, who will end and give its memory back."""
        return self._decoding() or bool(self._choices(now))

    def _chunk(self, prefill: Prefill) -> Refused | None:
        resident = prefill.resident
        self._reuse.find(prefill)
        count = self._reuse.until(prefill, self._chunk_tokens(prefill))
        self._wait()
        if prefill not in self._prefills:  # another of its rows was in a batch that just broke
            return None
        count = self._forwards.ask_shrinking(
            Site.PREFILL, shrunk(count, self._floor),
            lambda tokens: resident.estimator.chunk(tokens, prefill.written, last=tokens == prefill.left),
        )  # fmt: skip
        if isinstance(count, Refused):
            return count
        prefill.retry_at, last = 0.0, count == prefill.left
        fresh = prefill.cache is not None or not prefill.written
        if prefill.cache is None and not self._reuse.restore(prefill):
            return self._chunk(prefill)
        assert prefill.cache is not None  # noqa: S101  it was just given one
        piece = prefill.ids[prefill.written : prefill.written + count]
        speed = resident.reads.late or FIRST_SPEED
        before = extent_of(prefill.cache)
        stretch(prefill.cache, count, len(prefill.ids))
        with self._forwards.native(Doing.PREFILL, resident.name, prefill.sequence.number, count / speed) as call:
            widened = self._decoding() and widen(prefill.cache, count, len(prefill.ids))
            prefill.logits = forward(resident.model, piece, prefill.cache, last=last)
        resident.prefilled(count, time.monotonic() - call.since, prefill.written + count / 2)
        after = extent_of(prefill.cache)
        taken = self._forwards.height.above() - (after.size - before.size)
        # The first write into a cache that is shared copies it, which the promise of its row covers.
        if fresh and not widened:
            resident.estimator.observe(count, prefill.written, taken, last=last, grew=after.room > before.room)
        prefill.written += count
        commitment = prefill.rows[0].commitment
        commitment.written, commitment.room = prefill.written, room_of(prefill.cache)
        self._reuse.reached(prefill)
        return None

    def _chunk_tokens(self, prefill: Prefill) -> int:
        """Size a chunk by time. The last one gives logits, so it has at most `tail` tokens, or is the last alone."""
        count = min(self._affordable(prefill), prefill.left)
        return count - 1 if count == prefill.left > prefill.resident.tail else count

    def _affordable(self, prefill: Prefill) -> int:
        """Give the tokens that the next chunk of a prompt has time for."""
        pace = prefill.resident.pace
        seconds = budget(self._step_seconds(), pace.seconds(prefill.left, prefill.written))
        return pace.tokens(seconds, prefill.written, self._chunk_most)

    def _step_seconds(self) -> float:
        """Give what a step of all batches takes, 0 where nobody decodes."""
        return sum(one.step_seconds * len(one.batches) for one in self._residents().values())

    def _wait(self) -> None:
        """Wait for the steps launched before. MLX does one thing after the other, so nothing is lost by it, and both
        their time and the chunk's are known."""
        alone = sum(len(one.batches) for one in self._residents().values()) == 1
        for resident in self._residents().values():
            for number, batch in list(resident.batches.items()):
                begun = time.monotonic()
                try:
                    with self._forwards.waits(Doing.DECODE, resident.name, resident.step_seconds):
                        batch.wait()
                except Exception as error:
                    log.exception("decode", rows=len(batch))
                    self._rebuild(resident, number, error)
                    continue
                if batch.called is not None:  # else it was waited for already
                    resident.stepped(batch.called + time.monotonic() - begun, len(batch))
                    if alone and self._sample == self._forwards.height.marks:
                        self._measure(resident, batch)
                    batch.called = None

    def _measure(self, resident: Resident, batch: DecodeBatch[Row]) -> None:
        """Learn from a step that has just ended, and that no other batch's step overlapped. One in which caches grew
        says little of the others: what it copies follows from its size."""
        if self._grew:
            return
        longest = max((row.commitment.written for row in batch.rows()), default=0)
        taken = self._forwards.height.sunk()
        odd = taken > ODD * resident.estimator.step(len(batch), longest, grows=False)
        if not odd or self._odd:
            resident.estimator.observe_step(len(batch), longest, taken)
        self._odd = odd

    def _join(self, prefill: Prefill, logits: mx.array) -> Refused | None:
        """Let the rows join their decode batches, each asked of the gate: a batch is copied layer by layer. Rows that
        have no room join later."""
        resident, sequence, tokens = prefill.resident, prefill.sequence, list[Token[Row]]()
        refused = self._join_batches(prefill, logits, tokens)
        if tokens and not sequence.joined:
            sequence.joined = sequence.told = time.monotonic()
        if refused is None:
            prefill.retry_at = 0.0
            self._prefills.remove(prefill)
        self._take(resident, tokens)
        return refused

    def _join_batches(self, prefill: Prefill, logits: mx.array, tokens: list[Token[Row]]) -> Refused | None:
        """Let rows join batch by batch as long as there is room; their first tokens are added to `tokens`."""
        resident, cache, written = prefill.resident, prefill.cache, len(prefill.ids)
        assert cache is not None  # noqa: S101  logits come from a forward, which has one
        parts = by_batch(resident, prefill.rows)
        for rows in parts:
            rows[0].commitment.written = written
            grown, layers = resident.ledger.joining(rows[0].commitment, len(rows)), len(cache)
            width = resident.ledger.joined_rows(rows[0].commitment) + len(rows)
            refused = self._forwards.ask(Site.JOIN, resident.estimator.widened_join(grown, layers, width))
            if refused is not None:
                return refused
            self._reuse.prompt_written(prefill, grown // max(1, layers))
            held = mx.get_active_memory()
            tokens += self._join_batch(prefill, rows, cache if rows is parts[-1] else cache.copy(), logits)
            above = self._forwards.height.above() - max(0, mx.get_active_memory() - held)
            resident.estimator.observe_join(width, above - resident.estimator.join(grown, layers))
            for row in rows:
                row.commitment.written, row.commitment.joined, row.commitment.room = written, True, 0
            prefill.rows = [row for row in prefill.rows if not row.commitment.joined]
        return None

    def _join_batch(self, prefill: Prefill, rows: list[Row], cache: Layers, logits: mx.array) -> list[Token[Row]]:
        resident, sequence = prefill.resident, prefill.sequence
        number = resident.ledger.batch_of(rows[0].commitment)
        batch = resident.batches.setdefault(number, DecodeBatch(resident.model))
        joining = [Joining(row, guard_of(sequence, row)) for row in rows]
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
        if resident.batches.get(number) is not batch:
            return
        held = batch.nbytes()
        try:
            with self._forwards.native(Doing.DECODE, resident.name, 0, resident.step_seconds) as call:
                tokens = batch.last() if all(_ends_next(row) for row in batch.rows()) else batch.step()
        except Exception as error:
            log.exception("decode", rows=len(batch))
            self._rebuild(resident, number, error)
            return
        now = time.monotonic()
        if batch.called is not None:
            resident.stepped(batch.called, len(batch))
        batch.called = now - call.since
        self._sample, self._grew = self._forwards.height.marks, batch.nbytes() > held
        self._take(resident, tokens)
        self._look_over()

    def _take(self, resident: Resident, tokens: list[Token[Row]]) -> None:
        """Take tokens into their rows' texts, and out the rows that failed or ended by them."""
        for batch in list(resident.batches.values()):
            for row, error in batch.errors():
                self.fail(row.sequence, *_failing(error))
        now = time.monotonic()
        for token in tokens:
            if not token.row.reason:
                self._token(token, now)
        self._end_rows(resident, [token.row for token in tokens], now)

    def _grow(self, resident: Resident, batch: DecodeBatch[Row]) -> None:
        """Promise GROWTH tokens more to each row that has written all that it had."""
        for row in batch.rows():
            commitment, shape = row.commitment, row.sequence.shape
            if commitment.written >= commitment.promised:
                self._extend(resident, row, max(1, min(GROWTH, shape.prompt + shape.limit - commitment.promised)))

    def _extend(self, resident: Resident, row: Row, more: int) -> None:
        """Promise `more` tokens to a row. Until they fit, others give way, or its own request does."""
        while row.commitment.joined and not row.reason:
            length = row.commitment.promised + more
            step = resident.estimator.widened_step(self._rows(), length)
            refused = self._forwards.ask(Site.GROW, resident.ledger.extension(row.commitment, more) + step)
            if refused is None or refused.code is Code.UNREADABLE:
                # Nothing new is started on a memory that cannot be read; what runs goes on, and `over` looks after it.
                resident.ledger.extend(row.commitment, more)
                return
            message = f"the answer outgrew what was expected: {refused.message}"
            self._give_way(self._least_loss() or row.sequence, replace(refused, message=message))

    def _token(self, token: Token[Row], now: float) -> None:
        """Take one token into its row's text."""
        row, sequence = token.row, token.row.sequence
        row.commitment.written += 1
        row.ids.append(token.token)
        row.new.append(token.token)
        try:
            self._read(row, token)
        except Exception as error:
            log.exception("text", request=sequence.number, request_id=sequence.request.request_id)
            self.fail(sequence, "engine_error", f"its text could not be read: {type(error).__name__}")
            return
        if sequence.request.stream or row.reason or now - sequence.told >= GATHERING:
            self._out.deltas += row.gathered()
            sequence.told = now

    def _read(self, row: Row, token: Token[Row]) -> None:
        prepared, params = row.sequence.prepared, row.sequence.request.params
        if params.logprobs and token.token not in prepared.eos:
            row.logprobs.append(logprob_of(token.logprobs, token.token, params.top_logprobs, prepared.token_bytes))
        row.read(token.token)

    def _end_rows(self, resident: Resident, rows: list[Row], now: float) -> None:
        """Take out the rows that ended, and tell of the requests whose last row it was."""
        ended = [row for row in rows if row.reason and row.sequence.number in self._live]
        if not ended:
            return
        self._sample = 0
        self._keep(resident, ended)
        self._drop(resident, ended)
        for sequence in {id(row.sequence): row.sequence for row in ended}.values():
            # A batch that broke while its ended rows were copied or dropped may have ended the whole request.
            if sequence.number in self._live and not any(sequence.writing()):
                self._gone(resident, sequence)
                self._out.ends.append(finished(sequence, now))

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
            if row.reason:  # its request failed by an earlier row of this loop
                continue
            row.commitment.joined, row.commitment.written = False, 0
            row.rebuilt += 1
            if row.rebuilt > MOST_REBUILDS:
                self.fail(row.sequence, "engine_error", f"the engine failed twice on it: {text_of(error)}")
            else:
                self._prefills.insert(0, self._prefill_of(resident, row.sequence, [row], row.known()))
        give_back()

    # giving way

    def _newest(self) -> Sequence | None:
        """Give the newest of the requests that hold memory."""
        holding = (one for one in self._live.values() if any(row.commitment.written for row in one.writing()))
        return max(holding, key=_age, default=None)

    def _least_loss(self) -> Sequence | None:
        """Give a request whose promise others may have: one that waits, of which nothing would be lost, or else one
        that holds memory; of these the newest of the owner who has most for his weight."""
        live = [one for one in self._live.values() if one not in self._preempted]
        rows, waiting, holding = Counter[str](), list[Sequence](), list[Sequence]()
        for one in live:
            rows[one.request.owner.name] += sum(1 for _ in one.writing())
            holds = any(row.commitment.written for row in one.writing())
            (holding if holds else waiting).append(one)
        waiting = [one for one in waiting if not one.delivered]

        def loss(one: Sequence) -> tuple[float, float, int]:
            owner = one.request.owner
            return owner.load(rows[owner.name]), *_age(one)

        return max(waiting or holding, key=loss, default=None)

    def _give_way(self, sequence: Sequence, refused: Refused) -> None:
        """Give a request's memory back: the router places it again, or it comes back here."""
        unknown = refused.code is Code.UNREADABLE
        if sequence.delivered and (unknown or len(self._live) > 1 or self._forwards.falls_at() is not None):
            self.preempt(sequence)
            give_back()
        else:
            self._end(sequence, refused, "no_headroom")

    def _end(self, sequence: Sequence, refused: Refused, code: str) -> None:
        """End a request for want of memory: refused, if nothing of it was heard."""
        delivered = sequence.delivered
        self._release(sequence)
        log.warning("ended", request=sequence.number, request_id=sequence.request.request_id, code=code,
                    left=len(self._live))  # fmt: skip
        if delivered:
            self._out.ends.append(Failed(sequence.number, code, refused.message))
        else:
            self._out.ends.append(Refusal(sequence.number, refused, sequence.shape.prompt))

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a request: release its memory. Its tokens are prefilled again when memory is available."""
        rows = list(sequence.writing())
        self._leave(sequence)
        self._drop(self._residents()[sequence.request.model], rows)
        for row in rows:
            row.commitment = Commitment(0)
        self._preempted.append(sequence)
        self._forwards.preemptions += 1
        log.warning("preempted", request=sequence.number, request_id=sequence.request.request_id,
                    left=len(self._live))  # fmt: skip

    def _return_next(self, now: float) -> None:
        """Bring back the oldest preempted request; one that was preempted for another key when rows are free again."""
        free = self._free_rows() - sum(len(one.rows) for one in self._prefills if one.cache is None)
        ready = [one for one in self._preempted if not one.yielded or free >= sum(1 for _ in one.writing())]
        self._return_at = now + RETRY
        if ready:
            self._return(min(ready, key=_age), now)

    def _return(self, sequence: Sequence, now: float) -> None:
        """Write a preempted request anew, if there is room by now; fail it if there never will be."""
        self._return_at = now + RETRY
        resident = self._residents()[sequence.request.model]
        refused = self._forwards.ask(Site.PREFLIGHT, self._returning(sequence))
        if refused is None:
            self._preempted.remove(sequence)
            for row in sequence.writing():
                (row.commitment,) = resident.ledger.commit(self._length(row), 1)
                self._prefills.append(self._prefill_of(resident, sequence, [row], row.known()))
        elif refused.code is not Code.UNREADABLE and not (
            len(self._live) > len(self._preempted) or self._forwards.falls_at() is not None
        ):
            self._end(sequence, refused, "no_headroom")

    def _returning(self, sequence: Sequence) -> int:
        """Give the bytes that a preempted request takes when it comes back: each row by itself, and a forward."""
        resident = self._residents()[sequence.request.model]
        lengths = [self._length(row) for row in sequence.writing()]
        forward = max(resident.estimator.chunk(self._floor, length) for length in lengths)
        return sum(resident.ledger.cost(length, 1) for length in lengths) + forward

    def _length(self, row: Row) -> int:
        shape, known = row.sequence.shape, len(row.known())
        return max(known, min(known + GROWTH, shape.prompt + shape.limit))

    # the way out

    def _release(self, sequence: Sequence) -> None:
        """Take a request out of wherever it is, and give back all that it had."""
        resident = self._residents()[sequence.request.model]
        writing = list(sequence.writing())
        self._leave(sequence)
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self._drop(resident, writing)
        for row in writing:
            row.reason = "released"
        self._gone(resident, sequence)
        give_back()

    def _leave(self, sequence: Sequence) -> None:
        """Take a request's prompts out. Who still holds one of them holds no memory with it: what is let go of after
        the pool has been emptied would stay there."""
        for prefill in [one for one in self._prefills if one.sequence is sequence]:
            prefill.cache = prefill.logits = None
            self._prefills.remove(prefill)

    def _gone(self, resident: Resident, sequence: Sequence) -> None:
        del self._live[sequence.number]
        if self._live:
            self._crowded = time.monotonic()
        resident.users -= 1
        resident.used_at = time.monotonic()

    def _drop(self, resident: Resident, rows: list[Row]) -> None:
        """Take rows out of their batches and of the ledger."""
        self._sample = 0
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

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """End a request as broken, unless it has ended already: one fault may reach it by two ways."""
        if sequence.number not in self._live:
            return
        self._release(sequence)
        self._forwards.failures += code != GRAMMAR_FAILED
        self._out.ends.append(Failed(sequence.number, code, message))


def _age(sequence: Sequence) -> tuple[float, int]:
    """Order requests, the newest last."""
    return sequence.arrived, sequence.number


def finished(sequence: Sequence, now: float) -> Finished:
    """Say how a request ended, with its exact usage."""
    timings = Timings(sequence.begun - sequence.arrived, sequence.joined - sequence.begun, now - sequence.joined)
    stops = tuple(row.pipeline.stop for row in sequence.rows)
    return Finished(
        sequence.number, tuple(row.reason for row in sequence.rows), sequence.shape.prompt,
        sum(len(row.ids) for row in sequence.rows), sequence.prompt_cached, timings,
        stops=stops if any(stops) else (), thought=sum(row.pipeline.thought for row in sequence.rows),
    )  # fmt: skip


def _ends_next(row: Row) -> bool:
    """Whether the next token is a row's last, whatever it is."""
    return len(row.ids) + 1 >= row.sequence.shape.limit


def _failing(error: Exception) -> tuple[str, str]:
    """Return the code and the message of what ended a row: its grammar, which the client sent, or its sampling."""
    if isinstance(error, GrammarFailed):
        return GRAMMAR_FAILED, f"the grammar of the request failed: {error}; make it smaller, or its patterns simpler"
    return "engine_error", f"its sampling failed: {text_of(error)}"


def text_of(error: Exception) -> str:
    """Put an exception into one bounded line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
