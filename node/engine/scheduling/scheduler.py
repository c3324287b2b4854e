"""Scheduler of rows from prompt to last token: prefill in chunks, join, decode in batches, rebuild after faults.

    begin ─► prefill, chunk by chunk ─► join ─► decode, all rows at once ─► Finished
                └──── waits ◄─────────────┘        │
                          ▲ └ no memory: Refusal   │ no memory
                          └────── preempted ◄──────┘

Rules
- Gate: The gate runs before every prefill forward, before every join (which copies a batch) and before a row exceeds
  its commitment. A chunk is made smaller before it is refused.
- Waiting: Work that does not fit waits as long as another request may end, and blocks new requests meanwhile
  (`required_bytes`). When all requests wait for memory, the newest loses its memory. When a row must grow, the request
  to lose its memory is a waiting one, else the newest. It belongs to the key that holds most.
- Outcome: Such a request is refused if none of its tokens was delivered; the router then places it again. Otherwise it
  is preempted: its memory is released, and its tokens are prefilled again once there is room. A lone request without
  room fails, with the numbers.
- Fairness: Rows are shared fairly between keys (`wire.capacity.fairness`). A key that
  holds less preempts requests of the key that holds most, if no row is free or memory is short at admission. Preempted
  requests return in turn with all other requests.
- Packing: Short waiting prompts are prefilled in one forward, which the gate checks as a whole (`packed_prefill`). Rows
  that cannot use its result, for lack of room or after a fault, are prefilled again one by one.
- Cap: After every forward the engine compares its memory with its cap. Over the cap, the request of a chunk loses its
  memory at once; after other forwards, the newest request does.
- Faults: An exception in a decode batch discards the batch object, not its rows: they are prefilled again from their
  ids. The second exception fails a row for good.
- End: All ends of a request pass through `_release` (or `_gone` when its last row ended), which cleans prefills,
  batches and ledger.
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
from node.engine.kv.kv_cache import Layers, capacity_of, extent_of, grow_cache, grow_caches, row_of
from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import FIRST_PREFILL_TOKENS_PER_SECOND, LoadedModel, forward
from node.engine.process.interface import FLUSH_INTERVAL_SECONDS, NativeCallKind
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.chunk_policy import budget, chunk_sizes, next_prefill, shared_budget
from node.engine.scheduling.decode_batch import DecodeBatch, JoiningRow, NextToken, PendingRows
from node.engine.scheduling.invariants import violations
from node.engine.scheduling.packed_prefill import PackedPrefill
from node.engine.scheduling.prefill import Prefill, by_batch, by_past, guard_of
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.text.logprobs import logprob_of
from wire.capacity.arithmetic import KV_GROWTH_TOKENS, row_bytes
from wire.capacity.fairness import (
    PrefillFairness,
    RunningRequest,
    WaitingRequest,
    WeightedKey,
    preemption_order,
    service_order,
)
from wire.frames import Delta, Failed, Finished, Frame, Refusal, Timings, delta_frames
from wire.refusals import FailureCode, RefusalCode, Refused

MAX_REBUILDS = 1
"""Rebuilds of a row before its request fails."""
OUTLIER_FACTOR = 4
"""Factor above the estimate from which a single step is ignored. Memory of ended rows is freed late, and a real
increase shows in the next step as well."""
GATE_RETRY_SECONDS = 0.1
"""Seconds until the gate is tried again for work that waits for memory."""
COALESCE_SECONDS, MAX_COALESCE_SECONDS, AFTER_BURST_SECONDS = 0.01, 0.03, 30.0
"""Seconds for packing prompts while no row decodes. `COALESCE_SECONDS`: wait after each arrival for the next prompt.
`MAX_COALESCE_SECONDS`: longest wait in all. `AFTER_BURST_SECONDS`: time after several concurrent requests during which
waiting is worthwhile, because such clients send in bursts."""
FIRST_JOIN_SECONDS = 10.0
"""Seconds that a first join may take, because kernels are compiled."""

log = structlog.get_logger("engine.generation")


@dataclass(slots=True)
class StepOutput:
    """Output of one iteration: deltas of all batches in one frame, then the ends of requests."""

    deltas: list[Delta] = field(default_factory=list[Delta])
    ends: list[Frame] = field(default_factory=list[Frame])

    def frames(self) -> list[Frame]:
        """Return the frames in the order in which they must be sent."""
        return [*delta_frames(self.deltas), *self.ends]


class Scheduler:
    """Scheduler of all rows of all models (see the module's docstring).

    `loaded_models()` returns the loaded models by name. `batch`: maximum rows that decode at once. `chunk`: maximum
    tokens of a forward. `floor`: tokens of the smallest chunk to which the gate may shrink one.
    """

    def __init__(
        self,
        forwards: GatedForwards,
        loaded_models: Callable[[], Mapping[str, LoadedModel]],
        reuse: PrefixCacheManager,
        batch: int,
        chunk: int,
        floor: int,
    ) -> None:
        self._forwards = forwards
        self._reuse = reuse
        self._loaded_models = loaded_models
        self._batch = batch
        self._chunk_most = chunk
        self._floor = min(floor, chunk)
        self._together = PackedPrefill(forwards, reuse, chunk)
        self._live: dict[int, Sequence] = {}
        self._prefills: list[Prefill] = []
        self._preempted: list[Sequence] = []
        self._return_at = 0.0
        self._odd = False
        self._sample, self._grew = 0, False
        """Mark of the last decode step while no other call has allocated or freed memory since, else 0; and whether its
        caches grew."""
        self._turn = 0
        self._reading = PrefillFairness()
        self._crowded = -math.inf
        """Time at which several requests were last live."""
        self._out = StepOutput()

    # for the engine

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

    def begin(self, loaded_model: LoadedModel, sequence: Sequence) -> None:
        """Start an admitted request whose rows have commitments. Rows with the same known tokens (mostly the prompt
        alone) share a prefill."""
        loaded_model.users += 1
        self._live[sequence.number] = sequence
        for ids, rows in by_past(sequence.active_rows()).items():
            self._prefills.append(self._prefill_of(loaded_model, sequence, rows, [*sequence.prompt, *ids]))

    def _prefill_of(self, loaded_model: LoadedModel, sequence: Sequence, rows: list[Row], ids: list[int]) -> Prefill:
        """Return a prefill of `ids` after its lookup in the prefix cache."""
        prefill = Prefill(loaded_model, sequence, rows, ids)
        self._reuse.begin(prefill)
        return prefill

    def holds(self, number: int) -> bool:
        """Return whether a request was started and has not ended."""
        return number in self._live

    def cancel(self, number: int) -> bool:
        """Cancel a request in any state without a further frame. Return False if it has ended or is unknown."""
        sequence = self._live.get(number)
        if sequence is not None:
            for prefill in self._prefills:
                if prefill.sequence is sequence:
                    self._reuse.put_back(prefill)
            self._release(sequence)
        return sequence is not None

    def close(self) -> None:
        """Release the memory of all prefills, because the process ends."""
        for sequence in self._live.values():
            self._leave(sequence)
        self._live.clear()

    def evict_newest(self, refused: Refused) -> bool:
        """End the newest request that holds memory; return whether there was one. Requests without written tokens hold
        none.

        The request is refused with `refused`, or fails if some of its tokens were delivered.
        """
        newest = self._newest()
        if newest is None:
            return False
        self._forwards.sheds += 1
        self._end(newest, refused, FailureCode.MEMORY_PRESSURE)
        return True

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time of the next step: `now` if there is work or output, later while all work waits.
        Return None without any work."""
        if self._decoding() or self._out.ends:
            return now
        choices = self._choices(now)
        if choices:
            return max(now, self._lingers(choices))
        waiting = [one.retry_at for one in self._prefills]
        return min([*waiting, self._return_at] if self._preempted else waiting, default=None)

    def required_bytes(self, key: str | None = None) -> int:
        """Return the bytes that waiting requests need before a new request of `key` is admitted; None: of any key.

        Requests that were preempted for another key count only for a new request of their own key, or with None.
        """
        waiting = [
            one.loaded_model.estimator.chunk(self._floor, len(one.ids)) for one in self._prefills if one.retry_at > 0
        ]
        first = [one for one in self._preempted if key in (None, one.request.owner.name) or not one.yielded]
        oldest = min(first, key=_age, default=None)
        return max(waiting, default=0) + (0 if oldest is None else self._returning(oldest))

    def drain_output(self) -> list[Frame]:
        """Return the frames to send since the last call: deltas, then the ends of requests."""
        out, self._out = self._out, StepOutput()
        return out.frames()

    def load(self) -> tuple[int, int, int]:
        """Return the number of decoding rows, of prefills and preempted requests together, and of the tokens that the
        prefills have still to process."""
        waiting = len(self._prefills) + len(self._preempted)
        return self._rows(), waiting, sum(prefill.left for prefill in self._prefills)

    def decode(self) -> None:
        """Decode one token for every row of every batch. Raise `Halted` if the engine was halted."""
        for loaded_model in list(self._loaded_models().values()):
            for number in list(loaded_model.batches):
                # An earlier batch's growth, or a forward over the cap, may have preempted this batch's last row.
                if number in loaded_model.batches:
                    self._decode(loaded_model, number)

    def prefill(self) -> None:
        """Prefill one chunk of one prompt, or several short prompts at once. Join the rows after the last chunk.

        Do nothing if no prompt may continue now. Raise `Halted` if the engine was halted.
        """
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
        """Return one sentence for each violated invariant (`node.engine.scheduling.invariants`); an empty list if all
        hold."""
        return violations(self._live, self._prefills, self._preempted, self._loaded_models())

    def synchronize(self) -> None:
        """Wait for launched decode steps, so that the next call is measured without them."""
        self._wait()

    # prefill

    def _choices(self, now: float) -> list[Prefill]:
        """Return the prefills that may continue: those with a cache, and of the rest the next in turn while the batch
        has room. A prefill that needs many rows is not overtaken. Prefills that wait for memory are left out."""
        found = [one for one in self._prefills if one.cache is not None]
        free_rows = self._batch - self._rows() - sum(len(one.rows) for one in found)
        if free_rows > 0 and len(found) < len(self._prefills):
            for one in self._unbegun():
                free_rows -= len(one.rows)
                if free_rows < 0:
                    break
                found.append(one)
        return [one for one in found if one.retry_at <= now]

    def _free_rows(self) -> int:
        """Return how many more rows may start in addition to decoding and prefilling ones."""
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
            (one, begun[id(one)] + sum(row.commitment.joined for row in one.active_rows()))
            for one in sorted(self._live.values(), key=_age)
            if one not in self._preempted
        ]
        holding = [(one, size) for one, size in holding if size]
        needed = len(first.rows)
        places = preemption_order(
            first.owner,
            needed,
            needed - self._free_rows(),
            [RunningRequest(one.request.owner, size) for one, size in holding],
        )
        for sequence in [holding[place][0] for place in places]:
            self._yield(sequence, keep=True)

    def make_way(self, owner: WeightedKey, need: int, missing_bytes: int) -> bool:
        """Preempt requests of the keys that hold most memory for a request of the key `owner`; return whether any was.

        `need` is the memory of that request in bytes, `missing_bytes` the part without room. No request is preempted if
        fair shares do not allow enough preemptions.
        """
        live = [one for one in sorted(self._live.values(), key=_age) if one not in self._preempted]
        places = preemption_order(
            owner, need, missing_bytes, [RunningRequest(one.request.owner, self._promised(one)) for one in live]
        )
        for place in places:
            self._yield(live[place], keep=False)
        return bool(places)

    def _promised(self, sequence: Sequence) -> int:
        kv = self._loaded_models()[sequence.request.model].kv
        return sum(row_bytes(kv, row.commitment.promised) for row in sequence.active_rows())

    def _yield(self, sequence: Sequence, *, keep: bool) -> None:
        """Preempt a request for another key. With `keep` only rows are needed: its tokens are stored for its return.
        Free buffers are then not returned, which would take 70 ms."""
        if keep:
            joined = [row for row in sequence.active_rows() if row.commitment.joined]
            self._keep(self._loaded_models()[sequence.request.model], joined)
        if sequence.number in self._live:  # a broken batch may have ended it meanwhile
            sequence.yielded = True
            self.preempt(sequence)
            if not keep:
                release_free_memory()

    def _unbegun(self) -> Iterator[Prefill]:
        """Yield the prefills without a cache in the order in which they get rows."""
        taken = Counter(
            row.sequence.request.owner.name
            for one in self._loaded_models().values()
            for batch in one.batches.values()
            for row in batch.rows()
        )
        for one in self._prefills:
            if one.cache is not None:
                taken[one.owner.name] += len(one.rows)
        unbegun = [one for one in self._prefills if one.cache is None]
        for place in service_order([WaitingRequest(one.owner, len(one.rows), one.answered) for one in unbegun], taken):
            yield unbegun[place]

    def _lingers(self, waiting: list[Prefill]) -> float:
        """Return the time until which prompts wait for packing; 0.0 without a wait. They wait if no row decodes and
        several requests were live recently."""
        if self._decoding() or any(one.cache is not None or not one.loaded_model.plain for one in waiting):
            return 0.0
        if sum(len(one.rows) for one in waiting) >= self._batch:
            return 0.0
        arrived = [one.sequence.arrived for one in waiting]
        first, last = min(arrived), max(arrived)
        return (
            min(first + MAX_COALESCE_SECONDS, last + COALESCE_SECONDS)
            if first < self._crowded + AFTER_BURST_SECONDS
            else 0.0
        )

    def _company(self, first: Prefill, waiting: list[Prefill]) -> list[Prefill]:
        """Choose the prompts to pack with `first`, if there is time for all of them at once."""
        if self._affordable(first) < first.left:
            return [first]
        seconds = shared_budget(self._step_seconds(), len(waiting), self._rows())
        return self._together.select_batch(first, waiting, first.loaded_model.pace.tokens(seconds, 0, self._chunk_most))

    def _advance_together(self, members: list[Prefill]) -> bool:
        """Prefill packed prompts in one forward and join them at once; return False if no two of them fit. Prompts that
        cannot use the result are prefilled again one by one."""
        self._wait()
        members = self._together.fitting([one for one in members if one in self._prefills])
        if not members:
            return False
        loaded_model, now = members[0].loaded_model, time.monotonic()
        for one in members:
            one.sequence.begun = one.sequence.begun or now
        try:
            joined = self._join_together(members, self._together.read(members))
        except Exception as error:
            log.exception("packed prefill", model=loaded_model.name, rows=len(members), error=text_of(error))
            self._reuse.invalidate(loaded_model.name)
            joined = False
        if not joined:
            for one in members:
                one.reset_alone()
        self._look_over()
        return True

    def _join_together(self, members: list[Prefill], cache: Layers) -> bool:
        """Join packed rows; return False if the gate refuses."""
        loaded_model = members[0].loaded_model
        longest = max(members, key=lambda one: one.written).rows[0].commitment
        grown, layers = loaded_model.ledger.joining(longest, len(members)), len(cache)
        copied = loaded_model.estimator.join(grown, layers)
        rows = loaded_model.ledger.joined_rows(longest) + len(members)
        if self._forwards.check(GateSite.JOIN, loaded_model.estimator.widened_join(grown, layers, rows)) is not None:
            return False
        for place, one in enumerate(members):
            self._reuse.read_together(one, row_of(cache, place, len(one.ids) - 1), copied)
        number = loaded_model.ledger.batch_of(longest)
        batch = loaded_model.batches.get(number) or DecodeBatch(loaded_model.model)
        joining = [JoiningRow(one.rows[0], guard_of(one.sequence, one.rows[0])) for one in members]
        with self._forwards.native(NativeCallKind.JOIN, loaded_model.name, 0, FIRST_JOIN_SECONDS):
            newcomers = batch.ready(joining, [one.ids for one in members], cache)
            self._admit(loaded_model, number, batch, newcomers)
        now = time.monotonic()
        for one in members:
            self._prefills.remove(one)
            commitment, sequence = one.rows[0].commitment, one.sequence
            commitment.joined, commitment.capacity_tokens = True, 0
            sequence.joined, sequence.last_token_at = sequence.joined or now, now
        return True

    def _admit(
        self, loaded_model: LoadedModel, number: int, batch: DecodeBatch[Row], newcomers: PendingRows[Row]
    ) -> None:
        try:
            batch.admit(newcomers)
        except Exception as error:
            self._rebuild(loaded_model, number, error)
            raise
        loaded_model.batches[number] = batch

    def _look_over(self) -> None:
        """Release the newest request's memory if the engine is over its cap after a forward or a step."""
        over, newest = self._forwards.over(), self._newest()
        if over is not None and newest is not None:
            self._give_way(newest, over)

    def _advance(self, prefill: Prefill) -> None:
        """Prefill one chunk; join after the last."""
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
                if prefill not in self._prefills:  # a joined row failed, and its request with it
                    refused = None
        except Exception as error:
            log.exception("prefill", request=sequence.number, request_id=sequence.request.request_id)
            self._reuse.invalidate(prefill.loaded_model.name)
            self.fail(sequence, FailureCode.ENGINE_ERROR, f"the prefill of its prompt failed: {text_of(error)}")
            return
        over = self._forwards.over() if refused is None else None
        if refused is not None:
            self._delay(prefill, refused)
        elif over is not None and sequence.number in self._live:
            self._give_way(sequence, over)

    def _delay(self, prefill: Prefill, refused: Refused) -> None:
        """Delay a prefill that does not fit now. If all requests wait for each other, release the newest instead."""
        now = time.monotonic()
        prefill.retry_at = now + GATE_RETRY_SECONDS
        if refused.code is RefusalCode.NO_ROOM and (self._moving(now) or self._forwards.peak_expires_at() is not None):
            return
        waiting = (one.sequence for one in self._prefills if one.retry_at > now)
        self._give_way(max(waiting, key=_age), refused)

    def _moving(self, now: float) -> bool:
        """Return whether any request can continue and will release its memory at its end."""
        return self._decoding() or bool(self._choices(now))

    def _chunk(self, prefill: Prefill) -> Refused | None:
        loaded_model = prefill.loaded_model
        self._reuse.find(prefill)
        count = self._reuse.chunk_end(prefill, self._chunk_tokens(prefill))
        self._wait()
        if prefill not in self._prefills:  # another of its rows was in a batch that just broke
            return None
        count = self._forwards.check_shrinking(
            GateSite.PREFILL,
            chunk_sizes(count, self._floor),
            lambda tokens: loaded_model.estimator.chunk(tokens, prefill.written, last=tokens == prefill.left),
        )
        if isinstance(count, Refused):
            return count
        prefill.retry_at, last = 0.0, count == prefill.left
        fresh = prefill.cache is not None or not prefill.written
        if prefill.cache is None and not self._reuse.restore(prefill):
            return self._chunk(prefill)
        assert prefill.cache is not None  # noqa: S101 `restore` has set it
        piece = prefill.ids[prefill.written : prefill.written + count]
        speed = loaded_model.reads.late or FIRST_PREFILL_TOKENS_PER_SECOND
        before = extent_of(prefill.cache)
        grow_caches(prefill.cache, count, len(prefill.ids))
        with self._forwards.native(
            NativeCallKind.PREFILL, loaded_model.name, prefill.sequence.number, count / speed
        ) as call:
            widened = self._decoding() and grow_cache(prefill.cache, count, len(prefill.ids))
            prefill.logits = forward(loaded_model.model, piece, prefill.cache, last=last)
        loaded_model.record_prefill(count, time.monotonic() - call.since, prefill.written + count / 2)
        after = extent_of(prefill.cache)
        taken = self._forwards.height.peak_above_mark() - (after.size - before.size)
        # The first write into a shared cache copies it; the commitment of its row covers the copy.
        if fresh and not widened:
            loaded_model.estimator.observe(
                count, prefill.written, taken, last=last, grew=after.capacity > before.capacity
            )
        prefill.written += count
        commitment = prefill.rows[0].commitment
        commitment.written, commitment.capacity_tokens = prefill.written, capacity_of(prefill.cache)
        self._reuse.take_snapshot(prefill)
        return None

    def _chunk_tokens(self, prefill: Prefill) -> int:
        """Return the tokens of the next chunk, sized by time. The last chunk returns logits: it has at most `tail`
        tokens, or is split so that its last token is a chunk of its own."""
        count = min(self._affordable(prefill), prefill.left)
        return count - 1 if count == prefill.left > prefill.loaded_model.tail else count

    def _affordable(self, prefill: Prefill) -> int:
        """Return the tokens of a prompt that fit into the time of the next chunk."""
        pace = prefill.loaded_model.pace
        seconds = budget(self._step_seconds(), pace.seconds(prefill.left, prefill.written))
        return pace.tokens(seconds, prefill.written, self._chunk_most)

    def _step_seconds(self) -> float:
        """Return the seconds of a step of all batches; 0 while no row decodes."""
        return sum(one.step_seconds * len(one.batches) for one in self._loaded_models().values())

    def _wait(self) -> None:
        """Wait for launched steps. MLX runs calls one after the other: the wait costs no time, and it separates the
        times of step and chunk."""
        alone = sum(len(one.batches) for one in self._loaded_models().values()) == 1
        for loaded_model in self._loaded_models().values():
            for number, batch in list(loaded_model.batches.items()):
                begun = time.monotonic()
                try:
                    with self._forwards.publish_wait(
                        NativeCallKind.DECODE, loaded_model.name, loaded_model.step_seconds
                    ):
                        batch.wait()
                except Exception as error:
                    log.exception("decode", rows=len(batch))
                    self._rebuild(loaded_model, number, error)
                    continue
                if batch.called is not None:  # else it was awaited already
                    loaded_model.record_step(batch.called + time.monotonic() - begun, len(batch))
                    if alone and self._sample == self._forwards.height.marks:
                        self._measure(loaded_model, batch)
                    batch.called = None

    def _measure(self, loaded_model: LoadedModel, batch: DecodeBatch[Row]) -> None:
        """Record the memory of a step that has just ended and that no other batch's step overlapped. Steps in which
        caches grew are left out, because their copies follow from the batch size."""
        if self._grew:
            return
        longest = max((row.commitment.written for row in batch.rows()), default=0)
        taken = self._forwards.height.peak_drop()
        odd = taken > OUTLIER_FACTOR * loaded_model.estimator.step(len(batch), longest, grows=False)
        if not odd or self._odd:
            loaded_model.estimator.observe_step(len(batch), longest, taken)
        self._odd = odd

    def _join(self, prefill: Prefill, logits: mx.array) -> Refused | None:
        """Join the rows to their decode batches. Each join passes the gate, because it copies a batch layer by layer.
        Rows without room join later."""
        loaded_model, sequence, tokens = prefill.loaded_model, prefill.sequence, list[NextToken[Row]]()
        refused = self._join_batches(prefill, logits, tokens)
        if tokens and not sequence.joined:
            sequence.joined = sequence.last_token_at = time.monotonic()
        if refused is None:
            prefill.retry_at = 0.0
            self._prefills.remove(prefill)
        self._take(loaded_model, tokens)
        return refused

    def _join_batches(self, prefill: Prefill, logits: mx.array, tokens: list[NextToken[Row]]) -> Refused | None:
        """Join rows batch by batch while there is room; add their first tokens to `tokens`."""
        loaded_model, cache, written = prefill.loaded_model, prefill.cache, len(prefill.ids)
        assert cache is not None  # noqa: S101 logits come from a forward, which has one
        parts = by_batch(loaded_model, prefill.rows)
        for rows in parts:
            rows[0].commitment.written = written
            grown, layers = loaded_model.ledger.joining(rows[0].commitment, len(rows)), len(cache)
            width = loaded_model.ledger.joined_rows(rows[0].commitment) + len(rows)
            refused = self._forwards.check(GateSite.JOIN, loaded_model.estimator.widened_join(grown, layers, width))
            if refused is not None:
                return refused
            self._reuse.store_prompt(prefill, grown // max(1, layers))
            active_bytes = mx.get_active_memory()
            tokens += self._join_batch(prefill, rows, cache if rows is parts[-1] else cache.copy(), logits)
            above = self._forwards.height.peak_above_mark() - max(0, mx.get_active_memory() - active_bytes)
            loaded_model.estimator.observe_join(width, above - loaded_model.estimator.join(grown, layers))
            for row in rows:
                row.commitment.written, row.commitment.joined, row.commitment.capacity_tokens = written, True, 0
            prefill.rows = [row for row in prefill.rows if not row.commitment.joined]
        return None

    def _join_batch(self, prefill: Prefill, rows: list[Row], cache: Layers, logits: mx.array) -> list[NextToken[Row]]:
        loaded_model, sequence = prefill.loaded_model, prefill.sequence
        number = loaded_model.ledger.batch_of(rows[0].commitment)
        batch = loaded_model.batches.setdefault(number, DecodeBatch(loaded_model.model))
        joining = [JoiningRow(row, guard_of(sequence, row)) for row in rows]
        try:
            with self._forwards.native(NativeCallKind.JOIN, loaded_model.name, sequence.number, FIRST_JOIN_SECONDS):
                return batch.join(joining, prefill.ids, cache, logits)
        except Exception as error:
            self._rebuild(loaded_model, number, error, failing=rows)
            raise

    # decode

    def _rows(self) -> int:
        return sum(one.rows() for one in self._loaded_models().values())

    def _decoding(self) -> bool:
        return any(one.batches for one in self._loaded_models().values())

    def _decode(self, loaded_model: LoadedModel, number: int) -> None:
        """Decode one token for every row of a batch."""
        batch = loaded_model.batches[number]
        self._grow(loaded_model, batch)
        if loaded_model.batches.get(number) is not batch:
            return
        batch_bytes = batch.nbytes()
        try:
            with self._forwards.native(NativeCallKind.DECODE, loaded_model.name, 0, loaded_model.step_seconds) as call:
                tokens = batch.last() if all(_ends_next(row) for row in batch.rows()) else batch.step()
        except Exception as error:
            log.exception("decode", rows=len(batch))
            self._rebuild(loaded_model, number, error)
            return
        now = time.monotonic()
        if batch.called is not None:
            loaded_model.record_step(batch.called, len(batch))
        batch.called = now - call.since
        self._sample, self._grew = self._forwards.height.marks, batch.nbytes() > batch_bytes
        self._take(loaded_model, tokens)
        self._look_over()

    def _take(self, loaded_model: LoadedModel, tokens: list[NextToken[Row]]) -> None:
        """Add tokens to their rows' texts; remove rows that failed or ended."""
        for batch in list(loaded_model.batches.values()):
            for row, error in batch.errors():
                self.fail(row.sequence, *_failing(error))
        now = time.monotonic()
        for token in tokens:
            if not token.row.reason:
                self._token(token, now)
        self._end_rows(loaded_model, [token.row for token in tokens], now)

    def _grow(self, loaded_model: LoadedModel, batch: DecodeBatch[Row]) -> None:
        """Extend the commitment by at most `KV_GROWTH_TOKENS` tokens for each row that has used all of it."""
        for row in batch.rows():
            commitment, shape = row.commitment, row.sequence.shape
            if commitment.written >= commitment.promised:
                self._extend(
                    loaded_model, row, max(1, min(KV_GROWTH_TOKENS, shape.prompt + shape.limit - commitment.promised))
                )

    def _extend(self, loaded_model: LoadedModel, row: Row, more: int) -> None:
        """Extend a row's commitment by `more` tokens. Until they fit, other requests lose their memory, or its own
        request does."""
        while row.commitment.joined and not row.reason:
            length = row.commitment.promised + more
            step = loaded_model.estimator.widened_step(self._rows(), length)
            refused = self._forwards.check(GateSite.GROW, loaded_model.ledger.extension(row.commitment, more) + step)
            if refused is None or refused.code is RefusalCode.UNREADABLE:
                # No new work starts while the memory is unreadable. Running rows continue, and `over` checks them.
                loaded_model.ledger.extend(row.commitment, more)
                return
            message = f"the answer became longer than expected: {refused.message}"
            self._give_way(self._least_loss() or row.sequence, replace(refused, message=message))

    def _token(self, token: NextToken[Row], now: float) -> None:
        """Add one token to its row's text."""
        row, sequence = token.row, token.row.sequence
        row.commitment.written += 1
        row.ids.append(token.token)
        row.new.append(token.token)
        try:
            self._read(row, token)
        except Exception as error:
            log.exception("text", request=sequence.number, request_id=sequence.request.request_id)
            self.fail(
                sequence, FailureCode.ENGINE_ERROR, f"its tokens could not be decoded to text: {type(error).__name__}"
            )
            return
        if sequence.request.stream or row.reason or now - sequence.last_token_at >= FLUSH_INTERVAL_SECONDS:
            self._out.deltas += row.drain_deltas()
            sequence.last_token_at = now

    def _read(self, row: Row, token: NextToken[Row]) -> None:
        prepared, params = row.sequence.prepared, row.sequence.request.params
        if params.logprobs and token.token not in prepared.eos:
            row.logprobs.append(logprob_of(token.logprobs, token.token, params.top_logprobs, prepared.token_bytes))
        row.read(token.token)

    def _end_rows(self, loaded_model: LoadedModel, rows: list[Row], now: float) -> None:
        """Remove ended rows, and report the requests whose last row ended."""
        ended = [row for row in rows if row.reason and row.sequence.number in self._live]
        if not ended:
            return
        self._sample = 0
        self._keep(loaded_model, ended)
        self._drop(loaded_model, ended)
        for sequence in {id(row.sequence): row.sequence for row in ended}.values():
            # A batch that broke while its ended rows were copied or dropped may have ended the whole request.
            if sequence.number in self._live and not any(sequence.active_rows()):
                self._gone(loaded_model, sequence)
                self._out.ends.append(finished(sequence, now))

    def _keep(self, loaded_model: LoadedModel, rows: list[Row]) -> None:
        """Store the tokens of ended rows in the prefix cache."""
        for row in rows:
            number = loaded_model.ledger.batch_of(row.commitment)
            batch = loaded_model.batches.get(number)
            if batch is None:
                continue
            try:
                self._reuse.store_row(loaded_model, row, batch)
            except Exception as error:
                self._rebuild(loaded_model, number, error)

    def _rebuild(self, loaded_model: LoadedModel, number: int, error: Exception, failing: Iterable[Row] = ()) -> None:
        """Discard a batch whose object raised; prefill its rows again from their ids."""
        batch = loaded_model.batches.pop(number, None)
        if batch is None:
            return
        self._reuse.invalidate(loaded_model.name)
        known = {id(row) for row in failing}
        rows = [row for row in batch.rows() if id(row) not in known and not row.reason]
        log.warning("rebuild", model=loaded_model.name, rows=len(rows), error=text_of(error))
        for row in rows:
            if row.reason:  # its request failed by an earlier row of this loop
                continue
            row.commitment.joined, row.commitment.written = False, 0
            row.rebuilt += 1
            if row.rebuilt > MAX_REBUILDS:
                self.fail(
                    row.sequence, FailureCode.ENGINE_ERROR, f"the engine failed twice on this request: {text_of(error)}"
                )
            else:
                self._prefills.insert(0, self._prefill_of(loaded_model, row.sequence, [row], row.token_ids()))
        release_free_memory()

    # lack of memory

    def _newest(self) -> Sequence | None:
        """Return the newest request that holds memory."""
        holding = (one for one in self._live.values() if any(row.commitment.written for row in one.active_rows()))
        return max(holding, key=_age, default=None)

    def _least_loss(self) -> Sequence | None:
        """Return the request whose commitment is released for another row. A waiting request loses no work and is
        preferred, else one that holds memory. Of these it is the newest of the key with the highest load."""
        live = [one for one in self._live.values() if one not in self._preempted]
        rows, waiting, holding = Counter[str](), list[Sequence](), list[Sequence]()
        for one in live:
            rows[one.request.owner.name] += sum(1 for _ in one.active_rows())
            holds = any(row.commitment.written for row in one.active_rows())
            (holding if holds else waiting).append(one)
        waiting = [one for one in waiting if not one.delivered]

        def loss(one: Sequence) -> tuple[float, float, int]:
            owner = one.request.owner
            return owner.load(rows[owner.name]), *_age(one)

        return max(waiting or holding, key=loss, default=None)

    def _give_way(self, sequence: Sequence, refused: Refused) -> None:
        """Release a request's memory: the router places it again, or it returns here later."""
        unknown = refused.code is RefusalCode.UNREADABLE
        if sequence.delivered and (unknown or len(self._live) > 1 or self._forwards.peak_expires_at() is not None):
            self.preempt(sequence)
            release_free_memory()
        else:
            self._end(sequence, refused, FailureCode.NO_HEADROOM)

    def _end(self, sequence: Sequence, refused: Refused, code: str) -> None:
        """End a request for lack of memory, with a refusal if none of its tokens was delivered."""
        delivered = sequence.delivered
        self._release(sequence)
        log.warning(
            "ended", request=sequence.number, request_id=sequence.request.request_id, code=code, left=len(self._live)
        )
        if delivered:
            self._out.ends.append(Failed(sequence.number, code, refused.message))
        else:
            self._out.ends.append(Refusal(sequence.number, refused, sequence.shape.prompt))

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a request: release its memory. Its tokens are prefilled again when memory is available."""
        rows = list(sequence.active_rows())
        self._leave(sequence)
        self._drop(self._loaded_models()[sequence.request.model], rows)
        for row in rows:
            row.commitment = Commitment(0)
        self._preempted.append(sequence)
        self._forwards.preemptions += 1
        log.warning("preempted", request=sequence.number, request_id=sequence.request.request_id, left=len(self._live))

    def _return_next(self, now: float) -> None:
        """Return the oldest preempted request to the queue; one preempted for another key only while rows are free."""
        free = self._free_rows() - sum(len(one.rows) for one in self._prefills if one.cache is None)
        ready = [one for one in self._preempted if not one.yielded or free >= sum(1 for _ in one.active_rows())]
        self._return_at = now + GATE_RETRY_SECONDS
        if ready:
            self._return(min(ready, key=_age), now)

    def _return(self, sequence: Sequence, now: float) -> None:
        """Prefill a preempted request again if there is room; fail it if there never will be."""
        self._return_at = now + GATE_RETRY_SECONDS
        loaded_model = self._loaded_models()[sequence.request.model]
        refused = self._forwards.check(GateSite.PREFLIGHT, self._returning(sequence))
        if refused is None:
            self._preempted.remove(sequence)
            for row in sequence.active_rows():
                (row.commitment,) = loaded_model.ledger.commit(self._length(row), 1)
                self._prefills.append(self._prefill_of(loaded_model, sequence, [row], row.token_ids()))
        elif refused.code is not RefusalCode.UNREADABLE and not (
            len(self._live) > len(self._preempted) or self._forwards.peak_expires_at() is not None
        ):
            self._end(sequence, refused, FailureCode.NO_HEADROOM)

    def _returning(self, sequence: Sequence) -> int:
        """Return the bytes that a preempted request needs to return: each row alone, and a forward."""
        loaded_model = self._loaded_models()[sequence.request.model]
        lengths = [self._length(row) for row in sequence.active_rows()]
        forward = max(loaded_model.estimator.chunk(self._floor, length) for length in lengths)
        return sum(loaded_model.ledger.cost(length, 1) for length in lengths) + forward

    def _length(self, row: Row) -> int:
        shape, known = row.sequence.shape, len(row.token_ids())
        return max(known, min(known + KV_GROWTH_TOKENS, shape.prompt + shape.limit))

    # end of a request

    def _release(self, sequence: Sequence) -> None:
        """Remove a request in any state and release all its memory."""
        loaded_model = self._loaded_models()[sequence.request.model]
        writing = list(sequence.active_rows())
        self._leave(sequence)
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self._drop(loaded_model, writing)
        for row in writing:
            row.reason = "released"
        self._gone(loaded_model, sequence)
        release_free_memory()

    def _leave(self, sequence: Sequence) -> None:
        """Remove a request's prefills and clear their arrays. Memory released after the pool is emptied would stay in
        the pool; a leftover reference to a prefill therefore holds none."""
        for prefill in [one for one in self._prefills if one.sequence is sequence]:
            prefill.cache = prefill.logits = None
            self._prefills.remove(prefill)

    def _gone(self, loaded_model: LoadedModel, sequence: Sequence) -> None:
        del self._live[sequence.number]
        if self._live:
            self._crowded = time.monotonic()
        loaded_model.users -= 1
        loaded_model.used_at = time.monotonic()

    def _drop(self, loaded_model: LoadedModel, rows: list[Row]) -> None:
        """Remove rows from their batches and from the ledger."""
        self._sample = 0
        for number in {loaded_model.ledger.batch_of(row.commitment) for row in rows}:
            batch = loaded_model.batches.get(number)
            if batch is not None:
                self._dropped(loaded_model, number, batch, rows)
        for row in rows:
            loaded_model.ledger.release(row.commitment)

    def _dropped(self, loaded_model: LoadedModel, number: int, batch: DecodeBatch[Row], rows: list[Row]) -> None:
        try:
            batch.drop(rows)
        except Exception as error:
            self._rebuild(loaded_model, number, error, failing=rows)
            return
        if not len(batch):
            del loaded_model.batches[number]

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """End a request with a `Failed` frame, unless it has ended: one fault may reach a request twice."""
        if sequence.number not in self._live:
            return
        self._release(sequence)
        self._forwards.failures += code != FailureCode.GRAMMAR_FAILED
        self._out.ends.append(Failed(sequence.number, code, message))


def _age(sequence: Sequence) -> tuple[float, int]:
    """Return the sort key of a request's age, the newest last."""
    return sequence.arrived, sequence.number


def finished(sequence: Sequence, now: float) -> Finished:
    """Return the `Finished` frame of a request that ends at the monotonic time `now`: reasons, token counts and
    durations."""
    timings = Timings(sequence.begun - sequence.arrived, sequence.joined - sequence.begun, now - sequence.joined)
    stops = tuple(row.pipeline.stop for row in sequence.rows)
    return Finished(
        sequence.number,
        tuple(row.reason for row in sequence.rows),
        sequence.shape.prompt,
        sum(len(row.ids) for row in sequence.rows),
        sequence.prompt_cached,
        timings,
        stops=stops if any(stops) else (),
        reasoning_tokens=sum(row.pipeline.reasoning_tokens for row in sequence.rows),
    )


def _ends_next(row: Row) -> bool:
    """Return whether the next token is certainly a row's last."""
    return len(row.ids) + 1 >= row.sequence.shape.limit


def _failing(error: Exception) -> tuple[str, str]:
    """Return the code and the message for a row's exception: its grammar, which the client sent, or its sampling."""
    if isinstance(error, GrammarFailed):
        return (
            FailureCode.GRAMMAR_FAILED,
            f"the grammar of the request failed: {error}; simplify it or its patterns",
        )
    return FailureCode.ENGINE_ERROR, f"its sampling failed: {text_of(error)}"


def text_of(error: Exception) -> str:
    """Render an exception as one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
