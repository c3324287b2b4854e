"""Scheduler of rows from prompt to last token: prefill in chunks, join, decode in batches, rebuild after faults.

    begin ─► prefill, chunk by chunk ─► join ─► decode, all rows at once ─► Finished
                └──── waits ◄─────────────┘        │
                          ▲ └ no memory: Refusal   │ no memory
                          └────── preempted ◄──────┘

Rules
- Gate: The gate runs before every prefill forward, before every join (which copies a batch) and before a row exceeds
  its commitment. A chunk is made smaller before it is refused.
- Waiting: Work that does not fit waits as long as another request may end. The bytes that it needs count as reserved at
  the admission of new requests (`compute_required_bytes`). When all requests wait for memory, or the memory cannot be
  read, the newest waiting request loses its memory. When a row must grow, `preemption` chooses the request ("Victim").
- Outcome: Such a request is refused if none of its tokens was delivered; the router then places it again. Otherwise it
  is preempted: its memory is released, and its tokens are prefilled again when there is room. If no other request or
  recent peak can free memory, the request fails with the numbers.
- Fairness: Rows are shared fairly between keys (`wire.capacity.fairness`). If no row is free or memory is short at
  admission, requests of the key with the most rows or bytes are preempted. `preemption` describes when preempted
  requests return.
- Packing: Short waiting prompts are prefilled in one forward, which the gate checks as a whole (`packed_prefill`). If
  the result cannot be used, for lack of room or after a fault, they are prefilled again one by one.
- Cap: After every forward the engine compares its memory with its cap. Over the cap, the request of a chunk loses its
  memory at once; after other forwards, the newest request does.
- Faults: After an exception in a decode batch, the batch object is discarded, and its rows are prefilled again from
  their ids. At the second exception, the request of a row fails. An error of the GPU ends the process
  (`device_errors`).
- End: All ends of a request pass through `BatchRecovery`, which cleans up prefills, batches and ledger.
- Time: Decisions use the time at which the turn, an iteration of the `EngineLoop`, began. Durations are measured around
  native calls.

Parts
- `row_state`: the states of a row and their legal events.
- `prefill_queue`, `prefill_runner`, `row_join`: which prompts are next; their forwards; the join of their rows.
- `decode_loop`: steps of all batches.
- `preemption`, `preemptor`: the choice of requests that lose memory or rows; their preemption and return.
- `batch_recovery`: rebuilds after faults, and all ends of requests.
- `request_table`, `batch_table`, `step_output`: the state that the parts share. Only its own methods change it.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import structlog

from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import LoadedModel
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.batch_recovery import BatchRecovery
from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.decode_loop import DecodeLoop
from node.engine.scheduling.invariants import find_violations
from node.engine.scheduling.packed_prefill import PackedPrefill
from node.engine.scheduling.preemptor import Preemptor
from node.engine.scheduling.prefill import Prefill, group_by_past
from node.engine.scheduling.prefill_queue import PrefillQueue
from node.engine.scheduling.prefill_runner import PrefillRunner
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.row_join import RowJoin
from node.engine.scheduling.step_output import StepOutput
from wire.capacity.fairness import WeightedKey
from wire.frames import Frame
from wire.refusals import Refused

log = structlog.get_logger("engine.scheduler")


class SchedulerLimits(NamedTuple):
    """Limits of the scheduler, from the settings."""

    batch: int
    """Maximum rows that decode at once."""
    chunk: int
    """Maximum tokens of a forward."""
    floor: int
    """Minimum tokens to which the gate may shrink a prefill chunk."""


class Scheduler:
    """Scheduler of all rows of all models (see the module's docstring).

    `loaded_models()` returns the loaded models by name. `recovery` and `preemptor` are the parts of the scheduler that
    end and preempt requests.
    """

    def __init__(
        self,
        forwards: GatedForwards,
        loaded_models: Callable[[], Mapping[str, LoadedModel]],
        prefixes: PrefixCacheManager,
        limits: SchedulerLimits,
    ) -> None:
        batch, chunk, floor = limits.batch, limits.chunk, min(limits.floor, limits.chunk)
        self._loaded_models = loaded_models
        self._prefixes = prefixes
        self._requests = RequestTable()
        self._batches = BatchTable(loaded_models)
        self._output = StepOutput()
        self.recovery = BatchRecovery(self._requests, self._batches, self._output, forwards, prefixes, loaded_models)
        self.preemptor = Preemptor(self._requests, self.recovery, forwards, floor)
        self._decode = DecodeLoop(self._batches, self.recovery, self.preemptor, self._output, forwards)
        packed = PackedPrefill(forwards, prefixes, chunk)
        self._queue = PrefillQueue(self._requests, self._batches, packed, batch, chunk, floor)
        self._runner = PrefillRunner(
            requests=self._requests,
            batches=self._batches,
            recovery=self.recovery,
            preemptor=self.preemptor,
            decode_loop=self._decode,
            queue=self._queue,
            packed=packed,
            join=RowJoin(self._requests, self._batches, self.recovery, self._decode, forwards, prefixes),
            forwards=forwards,
            prefixes=prefixes,
            floor=floor,
        )

    # state

    @property
    def live(self) -> Mapping[int, Sequence]:
        """Requests that have not ended, by number."""
        return self._requests.live

    @property
    def prefills(self) -> tuple[Prefill, ...]:
        """Prefills with rows that have not joined a decode batch, in the order of the queue."""
        return tuple(self._requests.prefills)

    @property
    def preempted(self) -> tuple[Sequence, ...]:
        """Preempted requests, which hold no memory and are prefilled again when there is room."""
        return tuple(self._requests.preempted)

    def get_batches(self, model: str) -> Mapping[int, DecodeBatch[Row]]:
        """Return the decode batches of a loaded model by batch number. Raise `KeyError` if the model is not loaded."""
        return self._batches.get_batches(self._loaded_models()[model])

    def has_request(self, number: int) -> bool:
        """Return whether the request with this number was started and has not ended."""
        return number in self._requests.live

    def measure_load(self) -> tuple[int, int, int]:
        """Return three numbers: decoding rows; prefills plus preempted requests; tokens that the queued prefills still
        have to process."""
        prefills = self._requests.prefills
        waiting = len(prefills) + len(self._requests.preempted)
        return self._batches.count_rows(), waiting, sum(prefill.left for prefill in prefills)

    def sum_step_seconds(self) -> float:
        """Return the expected seconds of one decode step of every batch in total; 0.0 if no row decodes."""
        return self._batches.sum_step_seconds()

    def can_prefill(self, now: float) -> bool:
        """Return whether a prefill may start or continue at the monotonic time `now`, or a preempted request waits."""
        return bool(self._requests.preempted or self._queue.list_choices(now))

    def compute_required_bytes(self, key: str | None = None) -> int:
        """Return the bytes that must be free for waiting requests before a new request of the API key `key` is
        admitted.

        The result is the sum of two needs. The first is the bytes, without KV, of a chunk of `SchedulerLimits.floor`
        tokens: the maximum over the prefills that wait for memory. The second is all bytes of the oldest preempted
        request. Requests that were preempted for another key count only for a new request of their own key, or with
        `key` None.
        """
        return self._queue.compute_required_bytes() + self.preemptor.compute_required_bytes(key)

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time of the next step: `now` if rows decode, the end of a request must be sent, or a
        prefill may run; later while all work waits. Return None if there is no work."""
        if self._batches or self._output.ends:
            return now
        choices = self._queue.list_choices(now)
        if choices:
            return max(now, self._queue.compute_wait_end(choices))
        # A prompt without a `retry_at` waits for the rows of a prompt that has one.
        waiting = [prefill.retry_at for prefill in self._requests.prefills if prefill.retry_at > now]
        if self._requests.preempted:
            waiting.append(self.preemptor.return_at)
        return min(waiting, default=None)

    def check(self) -> list[str]:
        """Return one sentence for each violated invariant (`node.engine.scheduling.invariants`); an empty list if there
        is none."""
        return find_violations(
            self._requests.live,
            self._requests.prefills,
            self._requests.preempted,
            self._loaded_models(),
            self._batches.get_batches,
        )

    # events

    def begin_request(self, loaded_model: LoadedModel, sequence: Sequence) -> None:
        """Start an admitted request whose rows have commitments. Rows with the same known tokens (usually only the
        prompt) share a prefill."""
        self._requests.add(loaded_model, sequence)
        for ids, rows in group_by_past(sequence.iterate_active_rows()).items():
            self.recovery.queue_prefill(loaded_model, sequence, rows, [*sequence.prompt, *ids])

    def cancel(self, number: int, now: float) -> bool:
        """Cancel a request in any state, and send no further frame for it. Return False if it has ended or is unknown.

        If a waiting prefill of the request took an entry out of the prefix cache, the entry is stored again. Snapshots
        of that prompt are removed. A fault while the entry is stored is logged. `now` is the monotonic time at which
        the turn began.
        """
        sequence = self._requests.live.get(number)
        if sequence is None:
            return False
        for prefill in self._requests.prefills:
            if prefill.sequence is sequence:
                self._put_back_prefix(prefill)
                self._prefixes.remove_snapshots(prefill)
        self.recovery.release_request(sequence)
        self._requests.record_ends(now)
        return True

    def _put_back_prefix(self, prefill: Prefill) -> None:
        try:
            self._prefixes.put_back(prefill)
        except Exception as error:
            raise_if_device_lost(error)
            log.exception("prefix not stored", request=prefill.sequence.number)

    def end_newest(self, refused: Refused, now: float) -> bool:
        """End the newest request that has tokens in a cache. Return False if there is no such request.

        The request is refused with `refused`, or fails if some of its tokens were delivered. `now` is the monotonic
        time at which the turn began.
        """
        ended = self.preemptor.end_newest(refused)
        self._requests.record_ends(now)
        return ended

    def preempt_for_key(self, key: WeightedKey, need: int, missing_bytes: int) -> bool:
        """Preempt requests of the keys that hold the most memory, for a request of `key`. Return whether any
        was preempted.

        `need` is the memory of that request in bytes, and `missing_bytes` the part for which there is no room. No
        request is preempted if fair shares do not allow enough preemptions.
        """
        return self.preemptor.preempt_for_key(key, need, missing_bytes)

    # steps

    def decode(self, now: float) -> None:
        """Decode one token for every row of every batch, and end rows. `drain_output` returns the frames.

        A row that needs more memory, or an engine over its cap, can preempt or end a request. A batch whose step raises
        is rebuilt. Raise `Halted` if the engine was halted. `now` is the monotonic time at which the turn began.
        """
        self._decode.step()
        self._requests.record_ends(now)

    def prefill(self, now: float) -> None:
        """Prefill one chunk of one prompt, or several short prompts at once. Join the rows after the last chunk. First
        let a preempted request return, and preempt requests of keys that hold more than their share of rows.

        Prefill nothing if no prompt may start or continue at `now`, or if all prompts wait for packing. A prompt
        without room waits, and a request may be preempted or fail (`PrefillRunner.run`). Raise `Halted` if the engine
        was halted. `now` is the monotonic time at which the turn began.
        """
        self.preemptor.return_next(now, self._queue.count_unclaimed_rows())
        self._share_rows()
        members = self._queue.schedule_next(now)
        if members:
            self._runner.run(members, now)
        self._requests.record_ends(now)

    def _share_rows(self) -> None:
        """Preempt requests of the key that holds the most rows for the next request of a key that holds fewer."""
        if len({sequence.weighted_key.name for sequence in self._requests.live.values()}) < 2:
            return
        first = self._queue.find_next_unstarted()
        if first is not None and not first.retry_at:
            self.preemptor.share_rows(first, self._queue.count_free_rows())

    def drain_output(self) -> list[Frame]:
        """Return the frames to send that were produced since the last call: deltas, then the ends of requests."""
        return self._output.drain()

    def synchronize(self) -> None:
        """Wait for the launched decode steps of all batches, so that the measurement of the next native call does not
        include them. A batch whose step raises is rebuilt. Raise `DeviceLost` for a failed command buffer."""
        self._decode.wait()

    def close(self) -> None:
        """Release all prefills, batches and holds on models, and remove all requests, because the process ends."""
        self._requests.close()
        self._batches.clear()
