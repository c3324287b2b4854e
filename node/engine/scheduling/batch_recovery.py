"""Recovery and ends of rows: rebuild rows of a broken batch, and clean up when a request ends.

After an exception in a decode batch, the batch object is discarded, and its rows are prefilled again from their ids. At
the second exception, the request of a row fails.

All ends of a scheduled request pass through `BatchRecovery`, which removes its rows from prefills, batches and ledger.
A broken batch can end more requests, and the end of a request can break a batch. Both are therefore in one class.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

import structlog

from node.engine.memory.footprint import release_free_memory
from node.engine.memory.gated_forward import GatedForwards
from node.engine.models.loaded_model import LoadedModel
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.batch_table import BatchTable
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from node.engine.scheduling.request_table import RequestTable
from node.engine.scheduling.rules.row_state import RowEvent
from node.engine.scheduling.step_output import StepOutput, build_finished
from wire.frames import Failed, Refusal
from wire.refusals import FailureCode, Refused
from wire.state_machine import IllegalEventError

MAX_REBUILDS = 1
"""Maximum number of rebuilds of a row. If a batch of the row breaks once more, its request fails."""

log = structlog.get_logger("engine.generation")


class BatchRecovery:
    """Recovery of rows of broken batches, and ends of requests. `loaded_models()` returns the loaded models by name."""

    def __init__(
        self,
        requests: RequestTable,
        batches: BatchTable,
        output: StepOutput,
        forwards: GatedForwards,
        prefixes: PrefixCacheManager,
        loaded_models: Callable[[], Mapping[str, LoadedModel]],
    ) -> None:
        self._requests = requests
        self._batches = batches
        self._output = output
        self._forwards = forwards
        self._prefixes = prefixes
        self._loaded_models = loaded_models
        self._leaving = set[int]()
        """Ids of the rows that `drop_rows` removes now."""

    def get_model(self, sequence: Sequence) -> LoadedModel:
        """Return the loaded model of a live request."""
        return self._loaded_models()[sequence.request.model]

    def queue_prefill(
        self, loaded_model: LoadedModel, sequence: Sequence, rows: list[Row], ids: list[int], *, first: bool = False
    ) -> None:
        """Find the cached prefix of the token ids `ids`, and queue the prefill of these ids for `rows`. `first`: at the
        start of the queue, otherwise at the end. Count the ids if the request has joined a batch before
        (`GatedForwards.count_returned`)."""
        prefill = Prefill(loaded_model, sequence, rows, ids, is_return=bool(sequence.joined))
        if prefill.is_return:
            self._forwards.count_returned(len(ids))
        self._prefixes.begin_lookup(prefill)
        self._requests.enqueue(prefill, first=first)

    @contextmanager
    def fail_on_illegal_event(self, sequence: Sequence) -> Generator[None]:
        """End a request as failed with `FailureCode.ENGINE_ERROR` if an event in the context is illegal for one of its
        rows. Such an event is an error of this program."""
        try:
            yield
        except IllegalEventError as error:
            log.exception(
                "illegal event",
                request=sequence.number,
                request_id=sequence.request.request_id,
                error=str(error),
            )
            self.fail_request(sequence, FailureCode.ENGINE_ERROR, f"the engine has an error: {error}")

    def store_rows(self, loaded_model: LoadedModel, rows: Iterable[Row]) -> None:
        """Store the caches of rows (`PrefixCacheManager.store_row`), before they leave their batches. Skip rows that do
        not decode.

        If a store raises, the row's batch is rebuilt, which can fail requests of that batch. Later rows of a failed
        request are skipped, because their commitments are released.
        """
        for row in rows:
            if row.sequence not in self._requests:
                continue
            number = loaded_model.ledger.get_batch_number(row.commitment)
            batch = self._batches.get(loaded_model, number)
            if batch is None:
                continue
            try:
                self._prefixes.store_row(loaded_model, row, batch)
            except Exception as error:
                raise_if_device_lost(error)
                self.rebuild_batch(loaded_model, number, error)

    def rebuild_batch(
        self, loaded_model: LoadedModel, number: int, error: Exception, failing: Iterable[Row] = ()
    ) -> None:
        """Discard a batch whose object raised `error`, and queue the prefill of its rows from their ids.

        Rows in `failing` are left out, because the caller ends them. Rows that have ended or are being dropped are left
        out as well. The request of a row that was already rebuilt fails. All prefixes of the model in memory are
        evicted, because the fault may be in one of them. The memory of the batch is released, even if callers still
        refer to the batch. Do nothing if the batch was already discarded.
        """
        batch = self._batches.pop(loaded_model, number)
        if batch is None:
            return
        self._prefixes.invalidate(loaded_model.name)
        known = self._leaving | {id(row) for row in failing}
        rows = [row for row in batch.list_rows() if id(row) not in known and not row.reason]
        log.warning("rebuild", model=loaded_model.name, rows=len(rows), error=format_error(error))
        for row in rows:
            if row.reason:  # its request failed by an earlier row of this loop
                continue
            with self.fail_on_illegal_event(row.sequence):
                self._rebuild_row(loaded_model, row, error)
        batch.clear()
        release_free_memory()

    def _rebuild_row(self, loaded_model: LoadedModel, row: Row, error: Exception) -> None:
        row.apply(RowEvent.BATCH_BROKEN)
        row.commitment.reset()
        if row.count_rebuild() > MAX_REBUILDS:
            self.fail_request(
                row.sequence,
                FailureCode.ENGINE_ERROR,
                f"the engine failed twice on this request: {format_error(error)}",
            )
            return
        row.apply(RowEvent.REQUEUED)
        self.queue_prefill(loaded_model, row.sequence, [row], row.list_token_ids(), first=True)

    def drop_rows(self, loaded_model: LoadedModel, rows: list[Row]) -> None:
        """Remove rows from their batches and from the ledger. If a removal raises, the other rows of that batch are
        rebuilt, which can fail their requests and break more batches (`rebuild_batch`)."""
        self._batches.invalidate_step()
        leaving = {id(row) for row in rows}
        self._leaving |= leaving
        for number in {loaded_model.ledger.get_batch_number(row.commitment) for row in rows}:
            batch = self._batches.get(loaded_model, number)
            if batch is not None:
                self._drop_from(loaded_model, number, batch, rows)
        self._leaving -= leaving
        for row in rows:
            loaded_model.ledger.release(row.commitment)

    def _drop_from(self, loaded_model: LoadedModel, number: int, batch: DecodeBatch[Row], rows: list[Row]) -> None:
        try:
            batch.drop_rows(rows)
        except Exception as error:
            raise_if_device_lost(error)
            self.rebuild_batch(loaded_model, number, error)
            return
        if not len(batch):
            self._batches.pop(loaded_model, number)

    def end_rows(self, loaded_model: LoadedModel, rows: Iterable[Row], now: float) -> None:
        """Store the caches of those `rows` that have ended (`store_rows`), then remove these rows from their batches.
        Output `Finished` for each request whose last row has ended. `now` is the monotonic time.

        A request can fail between the end of one of its rows and this call. Such a row is removed, but not stored.
        """
        ended = [row for row in rows if row.reason and loaded_model.ledger.is_committed(row.commitment)]
        if not ended:
            return
        self.store_rows(loaded_model, ended)
        self.drop_rows(loaded_model, ended)
        for sequence in {id(row.sequence): row.sequence for row in ended}.values():
            # A batch that broke while its ended rows were copied or dropped may have ended the whole request.
            if sequence in self._requests and not any(sequence.iterate_active_rows()):
                self._requests.remove(loaded_model, sequence)
                self._output.add_end(build_finished(sequence, now))

    def release_request(self, sequence: Sequence) -> None:
        """Remove a live request in any state and release all its memory, without a frame for its end."""
        loaded_model = self.get_model(sequence)
        writing = list(sequence.iterate_active_rows())
        self._requests.clear_prefills(sequence)
        if not self._requests.end_preemption(sequence):
            self.drop_rows(loaded_model, writing)
        for row in writing:
            row.release()
        self._requests.remove(loaded_model, sequence)
        release_free_memory()

    def end_for_memory(self, sequence: Sequence, refused: Refused, code: str) -> None:
        """End a request for lack of memory. Output the refusal `refused` if none of its tokens was delivered, otherwise
        `Failed` with `code`, a `FailureCode`."""
        delivered = sequence.delivered
        self.release_request(sequence)
        log.warning(
            "ended",
            request=sequence.number,
            request_id=sequence.request.request_id,
            code=code,
            left=len(self._requests.live),
        )
        if delivered:
            self._output.add_end(Failed(sequence.number, code, refused.message))
        else:
            self._output.add_end(Refusal(sequence.number, refused, sequence.shape.prompt))

    def fail_request(self, sequence: Sequence, code: str, message: str) -> None:
        """End a request with a `Failed` frame. Count the failure, unless the client's grammar is its cause. `code` is a
        `FailureCode`.

        Do nothing if the request has already ended, because one fault may be reported twice for a request.
        """
        if sequence not in self._requests:
            return
        self.release_request(sequence)
        self._forwards.count_failure(by_engine=code != FailureCode.GRAMMAR_FAILED)
        self._output.add_end(Failed(sequence.number, code, message))


def format_error(error: Exception) -> str:
    """Render an exception as one line: its type, and at most 200 characters of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
