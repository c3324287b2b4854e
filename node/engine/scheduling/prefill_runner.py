"""Runner of prefills: one chunk of a prompt, or several short prompts in one forward, each through the gate."""

import time

import structlog

from node.engine.kv.kv_cache import capacity_of, extent_of, grow_cache, grow_caches
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import forward
from node.engine.process.interface import NativeCallKind
from node.engine.scheduling.batch_recovery import BatchRecovery, text_of
from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.decode_loop import DecodeLoop
from node.engine.scheduling.packed_prefill import PackedPrefill
from node.engine.scheduling.preemptor import Preemptor
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.prefill_queue import PrefillQueue
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.row_join import RowJoin
from node.engine.scheduling.rules.chunk_policy import chunk_sizes
from node.engine.scheduling.rules.commitment_length import GATE_RETRY_SECONDS
from wire.refusals import FailureCode, RefusalCode, Refused

log = structlog.get_logger("engine.generation")


class PrefillRunner:
    """Prefills chosen prompts, and joins their rows after the last chunk. `floor`: tokens of the smallest chunk."""

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
        """Prefill one chunk of the first member, or all members in one forward if there are several and they fit."""
        lefts = [one.left for one in members]
        if len(members) < 2 or not self._run_packed(members, now):
            self._run_chunk(members[0], now)
        for one, left in zip(members, lefts, strict=True):
            self._queue.count_prefilled(one, left - one.left)

    def _run_packed(self, members: list[Prefill], now: float) -> bool:
        """Prefill packed prompts in one forward and join them at once; return False if no two of them fit. Prompts that
        cannot use the result are prefilled again one by one."""
        self._decode_loop.wait()
        members = self._packed.fitting([one for one in members if one in self._requests.prefills])
        if not members:
            return False
        loaded_model = members[0].loaded_model
        for one in members:
            one.sequence.begin(now)
        try:
            joined = self._join.join_packed(members, self._packed.read(members))
        except Exception as error:
            log.exception("packed prefill", model=loaded_model.name, rows=len(members), error=text_of(error))
            self._prefixes.invalidate(loaded_model.name)
            joined = False
        if not joined:
            for one in members:
                with self._recovery.contained(one.sequence):
                    one.reset_alone()
        self._preemptor.release_over_cap()
        return True

    def _run_chunk(self, prefill: Prefill, now: float) -> None:
        """Prefill one chunk; join after the last."""
        sequence = prefill.sequence
        sequence.begin(now)
        try:
            refused: Refused | None = None
            if prefill.left:
                refused = self._chunk(prefill)
            else:  # its join had no room
                self._decode_loop.wait()
            if refused is None and prefill.logits is not None and prefill in self._requests.prefills:
                refused = self._join.join(prefill, prefill.logits)
                if prefill not in self._requests.prefills:  # a joined row failed, and its request with it
                    refused = None
        except Exception as error:
            log.exception("prefill", request=sequence.number, request_id=sequence.request.request_id)
            self._prefixes.invalidate(prefill.loaded_model.name)
            self._recovery.fail(
                sequence, FailureCode.ENGINE_ERROR, f"the prefill of its prompt failed: {text_of(error)}"
            )
            return
        over = self._forwards.over() if refused is None else None
        if refused is not None:
            self._delay(prefill, refused, now)
        elif over is not None and sequence in self._requests:
            self._preemptor.release_memory(sequence, over)

    def _delay(self, prefill: Prefill, refused: Refused, now: float) -> None:
        """Delay a prefill that does not fit now. If all requests wait for each other, release the newest instead."""
        prefill.delay(now + GATE_RETRY_SECONDS)
        if refused.code is RefusalCode.NO_ROOM and (
            self._is_moving(now) or self._forwards.peak_expires_at() is not None
        ):
            return
        waiting = (one.sequence for one in self._requests.prefills if one.retry_at > now)
        self._preemptor.release_memory(max(waiting, key=lambda one: one.age), refused)

    def _is_moving(self, now: float) -> bool:
        """Return whether any request can continue and will release its memory at its end."""
        return bool(self._batches) or bool(self._queue.choices(now))

    def _chunk(self, prefill: Prefill) -> Refused | None:
        """Prefill the next chunk through the gate; return the refusal if not even the smallest one fits."""
        estimator = prefill.loaded_model.estimator
        self._prefixes.find(prefill)
        wanted = prefill.chunk_end(self._queue.chunk_tokens(prefill))
        self._decode_loop.wait()
        if prefill not in self._requests.prefills:  # another of its rows was in a batch that just broke
            return None
        count = self._forwards.check_shrinking(
            GateSite.PREFILL,
            chunk_sizes(wanted, self._floor),
            lambda tokens: estimator.chunk(tokens, prefill.written, last=tokens == prefill.left),
        )
        if isinstance(count, Refused):
            return count
        prefill.end_delay()
        fresh = prefill.cache is not None or not prefill.written
        if prefill.cache is None and not self._prefixes.restore(prefill):
            return self._chunk(prefill)
        self._forward(prefill, count, fresh=fresh)
        self._prefixes.take_snapshot(prefill)
        return None

    def _forward(self, prefill: Prefill, count: int, *, fresh: bool) -> None:
        """Run the forward of a chunk of `count` tokens that the gate has passed. `fresh`: its cache is its own, not a
        copy of a cached prefix."""
        loaded_model, cache, last = prefill.loaded_model, prefill.cache, count == prefill.left
        assert cache is not None  # noqa: S101 `restore` has set it
        piece = prefill.ids[prefill.written : prefill.written + count]
        prefill.begin_chunk()
        before = extent_of(cache)
        grow_caches(cache, count, len(prefill.ids))
        with self._forwards.native(
            NativeCallKind.PREFILL,
            loaded_model.name,
            prefill.sequence.number,
            loaded_model.stats.expected_prefill_seconds(count),
        ) as call:
            widened = bool(self._batches) and grow_cache(cache, count, len(prefill.ids))
            logits = forward(loaded_model.model, piece, cache, last=last)
        loaded_model.stats.record_prefill(count, time.monotonic() - call.since, prefill.written + count / 2)
        after = extent_of(cache)
        taken = self._forwards.height.peak_above_mark() - (after.size - before.size)
        # The first write into a shared cache copies it; the commitment of its row covers the copy.
        if fresh and not widened:
            loaded_model.estimator.observe(
                count, prefill.written, taken, last=last, grew=after.capacity > before.capacity
            )
        prefill.end_chunk(count, capacity_of(cache), logits)
