"""Runner of prefills: one chunk of a prompt, or several short prompts in one forward, each through the gate."""

import time

import structlog

from node.engine.kv.kv_cache import compute_mean_capacity, grow_cache, grow_caches, measure_extent
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import run_forward
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.process.interface import NativeCallKind
from node.engine.scheduling.batch_recovery import BatchRecovery, format_error
from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.decode_loop import DecodeLoop
from node.engine.scheduling.packed_prefill import PackedPrefill
from node.engine.scheduling.preemptor import Preemptor
from node.engine.scheduling.prefill import Prefill, PrefixState
from node.engine.scheduling.prefill_queue import PrefillQueue
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.row_join import RowJoin
from node.engine.scheduling.rules.chunk_policy import generate_chunk_sizes
from node.engine.scheduling.rules.commitment_length import GATE_RETRY_SECONDS
from wire.refusals import FailureCode, RefusalCode, Refused

log = structlog.get_logger("engine.generation")


class PrefillRunner:
    """Runner of the prefills of chosen prompts, whose rows join their decode batches after the last chunk. `floor`:
    tokens of the smallest chunk."""

    def __init__(
        self,
        requests: RequestTable,
        batches: BatchTable,
        recovery: BatchRecovery,
        preemptor: Preemptor,
        decode_loop: DecodeLoop,
        queue: PrefillQueue,
        packed: PackedPrefill,
        join: RowJoin,
        forwards: GatedForwards,
        prefixes: PrefixCacheManager,
        floor: int,
    ) -> None:
        self._requests = requests
        self._batches = batches
        self._recovery = recovery
        self._preemptor = preemptor
        self._decode_loop = decode_loop
        self._queue = queue
        self._packed = packed
        self._join = join
        self._forwards = forwards
        self._prefixes = prefixes
        self._floor = floor

    def run(self, members: list[Prefill], now: float) -> None:
        """Prefill as many of `members` as fit in one forward. If no two prompts fit, or with a single prompt, prefill
        one chunk of the first prompt, or restore its next part from the disk.

        A prompt without room waits. The newest waiting request is preempted or ended if no request can continue and the
        recent peak will not fall. This also happens if the memory cannot be read. A request whose chunk takes the
        engine over its cap is preempted or ended as well. A request whose chunk raises fails; packed prompts whose
        forward raises are prefilled one by one. `now` is the monotonic time at which the turn began. Raise `Halted` if
        the engine was halted.
        """
        if len(members) < 2 or not self._run_packed(members, now):
            self._run_chunk(members[0], now)

    def _run_packed(self, members: list[Prefill], now: float) -> bool:
        """Prefill packed prompts in one forward and join them at once; return False if no two of them fit. If the
        result cannot be used, the prompts are prefilled again one by one."""
        self._decode_loop.wait()
        members = self._packed.select_fitting([prefill for prefill in members if prefill in self._requests.prefills])
        if not members:
            return False
        loaded_model = members[0].loaded_model
        for prefill in members:
            prefill.sequence.mark_begun(now)
        try:
            joined = self._join.join_packed(members, self._packed.prefill_members(members))
        except Exception as error:
            raise_if_device_lost(error)
            log.exception("packed prefill", model=loaded_model.name, rows=len(members), error=format_error(error))
            self._prefixes.invalidate(loaded_model.name)
            joined = False
        for prefill in members:
            if joined:
                self._queue.count_prefilled(prefill, len(prefill.ids))
            else:
                with self._recovery.fail_on_illegal_event(prefill.sequence):
                    prefill.reset_alone()
        self._preemptor.release_over_cap()
        return True

    def _run_chunk(self, prefill: Prefill, now: float) -> None:
        """Prefill one chunk, and join after the last chunk. Delay the prefill if the gate refuses (`_delay`). Fail the
        request after an exception. Preempt or end the request if the forward took the engine above the cap."""
        sequence = prefill.sequence
        sequence.mark_begun(now)
        try:
            refused: Refused | None = None
            if prefill.left:
                refused = self._prefill_chunk(prefill)
            else:  # its join had no room
                self._decode_loop.wait()
            if refused is None and prefill.logits is not None and prefill in self._requests.prefills:
                refused = self._join.join_prefill(prefill, prefill.logits)
                if prefill not in self._requests.prefills:  # a joined row failed, and its request with it
                    refused = None
        except Exception as error:
            raise_if_device_lost(error)
            log.exception("prefill", request=sequence.number, request_id=sequence.request.request_id)
            self._prefixes.invalidate(prefill.loaded_model.name)
            self._prefixes.disk.remove_restored(prefill)
            self._recovery.fail_request(
                sequence, FailureCode.ENGINE_ERROR, f"the prefill of its prompt failed: {format_error(error)}"
            )
            return
        over = self._forwards.check_cap() if refused is None else None
        if refused is not None:
            self._delay(prefill, refused, now)
        elif over is not None and sequence in self._requests:
            self._preemptor.release_memory(sequence, over, over_cap=True)

    def _delay(self, prefill: Prefill, refused: Refused, now: float) -> None:
        """Delay a prefill that does not fit now. If all requests wait for each other, release the newest instead."""
        prefill.delay(now + GATE_RETRY_SECONDS)
        if refused.code is RefusalCode.NO_ROOM and (
            self._can_any_continue(now) or self._forwards.find_peak_expiry() is not None
        ):
            return
        waiting = (prefill.sequence for prefill in self._requests.prefills if prefill.retry_at > now)
        self._preemptor.release_memory(max(waiting, key=lambda prefill: prefill.age), refused)

    def _can_any_continue(self, now: float) -> bool:
        """Return whether any request can continue and will release its memory at its end."""
        return bool(self._batches) or bool(self._queue.list_choices(now))

    def _prefill_chunk(self, prefill: Prefill) -> Refused | None:
        """Prefill the next chunk through the gate, or restore the next part of a prefix from the disk. Return the
        refusal if not even the smallest chunk, or the part, fits."""
        estimator = prefill.loaded_model.estimator
        self._prefixes.find_prefix(prefill)
        if prefill.past is not None and prefill.past.plan is not None:
            return self._restore_part(prefill, prefill.past)
        wanted = prefill.bound_chunk(self._queue.compute_chunk_tokens(prefill))
        self._decode_loop.wait()
        if prefill not in self._requests.prefills:  # another row of its request was in a batch that broke in `wait`
            return None
        count = self._forwards.check_shrinking(
            GateSite.PREFILL,
            generate_chunk_sizes(wanted, self._floor),
            lambda tokens: estimator.estimate_chunk(tokens, prefill.stored_tokens, last=tokens == prefill.left),
        )
        if isinstance(count, Refused):
            return count
        prefill.end_delay()
        fresh = prefill.cache is not None or not prefill.stored_tokens
        if prefill.cache is None and not self._prefixes.restore(prefill):
            return self._prefill_chunk(prefill)
        self._run_forward(prefill, count, fresh=fresh)
        self._queue.count_prefilled(prefill, count)
        self._prefixes.record_chunk(prefill, count)
        return None

    def _restore_part(self, prefill: Prefill, past: PrefixState) -> Refused | None:
        """Read the next part of a prompt's cache from the disk, through the gate; return the refusal if it does not
        fit."""
        self._decode_loop.wait()
        if prefill not in self._requests.prefills:
            return None
        refused = self._forwards.check(GateSite.RESTORE, self._prefixes.disk.estimate_part_bytes(past))
        if refused is None:
            prefill.end_delay()
            self._prefixes.disk.restore_part(prefill, past)
        return refused

    def _run_forward(self, prefill: Prefill, count: int, *, fresh: bool) -> None:
        """Run the forward of a chunk of `count` tokens that the gate has passed. `fresh`: the cache is not a copy of a
        cached prefix."""
        loaded_model, cache, last = prefill.loaded_model, prefill.cache, count == prefill.left
        assert cache is not None  # noqa: S101 `restore` has set it
        piece = prefill.ids[prefill.stored_tokens : prefill.stored_tokens + count]
        if prefill.is_return:
            self._forwards.count_recomputed(count)
        prefill.begin_chunk()
        before = measure_extent(cache)
        grow_caches(cache, count, len(prefill.ids))
        with self._forwards.run_native(
            NativeCallKind.PREFILL,
            loaded_model.name,
            prefill.sequence.number,
            loaded_model.stats.estimate_prefill_seconds(count),
            prefill_tokens=count,
        ) as call:
            widened = bool(self._batches) and grow_cache(cache, count, len(prefill.ids))
            logits = run_forward(loaded_model.model, piece, cache, last=last)
        loaded_model.stats.record_prefill(count, time.monotonic() - call.since, prefill.stored_tokens + count / 2)
        after = measure_extent(cache)
        taken = self._forwards.peak_tracker.measure_peak_above_mark() - (after.size - before.size)
        # The first write into a shared cache copies it; the commitment of its row covers the copy.
        if fresh and not widened:
            loaded_model.estimator.observe_prefill(
                count, prefill.stored_tokens, taken, last=last, grew=after.capacity > before.capacity
            )
        prefill.end_chunk(count, compute_mean_capacity(cache), logits)
