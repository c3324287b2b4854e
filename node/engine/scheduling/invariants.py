"""Invariants of rows, batches, prefills and the ledger between two iterations. Pure.

    a live request's row that has not ended is in exactly one place, and in a state of that place (`row_state`):
        one prefill            its commitment is in the ledger and has not joined
            without a cache        waiting
            with a cache           prefill
            with logits            join
        one decode batch       its commitment is in the ledger, has joined, and names that batch    decode
        a preempted request    its commitment is empty and in no ledger                             preempted
    a row has ended if, and only if, it has a finish reason

A violation means a row that is never served, memory that is never released, or an exception in a later iteration. That
exception would end the engine process with all its requests. Every engine test checks the invariants after each
iteration. A running engine checks them when it is idle, and logs violations.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from node.engine.models.loaded_model import LoadedModel
from node.engine.requests.sequence import Row, Sequence
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.rules.row_state import RowState


def find_violations(
    live: Mapping[int, Sequence],
    prefills: Iterable[Prefill],
    preempted: Iterable[Sequence],
    loaded_models: Mapping[str, LoadedModel],
    batches_of: Callable[[LoadedModel], Mapping[int, DecodeBatch[Row]]],
) -> list[str]:
    """Return one sentence for each violated invariant; an empty list if there is none.

    `live` are the requests that have not ended, by number. `loaded_models` are the loaded models, by name.
    `batches_of(loaded_model)` returns the decode batches of a model by number.
    """
    prefilling = list(prefills)
    waiting = {id(sequence) for sequence in preempted}
    places = Counter[int]()
    faults = [text for prefill in prefilling for text in _check_prefill(prefill, live, places)]
    for loaded_model in loaded_models.values():
        batches = batches_of(loaded_model)
        faults += _check_batches(loaded_model, batches, live, places)
        faults += _check_ledger(loaded_model, batches, prefilling)
    for sequence in live.values():
        faults += _check_sequence(sequence, sequence.request.model in loaded_models, id(sequence) in waiting, places)
    absent = waiting - {id(sequence) for sequence in live.values()}
    return [*faults, f"{len(absent)} preempted requests are not live"] if absent else faults


def _check_prefill(prefill: Prefill, live: Mapping[int, Sequence], places: Counter[int]) -> Iterator[str]:
    number = prefill.sequence.number
    if live.get(number) is not prefill.sequence:
        yield f"a prefill of request {number}, which is not live"
    if not prefill.rows:
        yield f"a prefill of request {number} without rows"
    for row in prefill.rows:
        places[id(row)] += 1
        if row.reason:
            yield f"{_name_row(row)} is in a prefill and has ended: {row.reason}"
        elif row.state is not (wanted := _get_prefill_state(prefill)):
            yield f"{_name_row(row)} is in a prefill and has the state {row.state}, not {wanted}"
        if row.commitment.is_joined:
            yield f"{_name_row(row)} is in a prefill and counts as joined"
        if not prefill.loaded_model.ledger.is_committed(row.commitment):
            yield f"{_name_row(row)} is in a prefill without a commitment"


def _get_prefill_state(prefill: Prefill) -> RowState:
    if prefill.cache is None:
        return RowState.WAITING
    return RowState.PREFILL if prefill.logits is None else RowState.JOIN


def _check_batches(
    loaded_model: LoadedModel,
    batches: Mapping[int, DecodeBatch[Row]],
    live: Mapping[int, Sequence],
    places: Counter[int],
) -> Iterator[str]:
    for number, batch in batches.items():
        if not len(batch):
            yield f"batch {number} of {loaded_model.name} is empty"
        for row in batch.list_rows():
            places[id(row)] += 1
            if live.get(row.sequence.number) is not row.sequence:
                yield f"{_name_row(row)} decodes and is not live"
            elif row.reason:
                yield f"{_name_row(row)} decodes and has ended: {row.reason}"
            elif (
                not loaded_model.ledger.is_committed(row.commitment)
                or loaded_model.ledger.get_batch_number(row.commitment) != number
            ):
                yield f"{_name_row(row)} decodes in batch {number} of {loaded_model.name} without a commitment there"
            elif not row.commitment.is_joined:
                yield f"{_name_row(row)} decodes and does not count as joined"
            elif row.state is not RowState.DECODE:
                yield f"{_name_row(row)} decodes and has the state {row.state}"


def _check_ledger(
    loaded_model: LoadedModel, batches: Mapping[int, DecodeBatch[Row]], prefills: list[Prefill]
) -> Iterator[str]:
    rows = sum(len(prefill.rows) for prefill in prefills if prefill.loaded_model is loaded_model)
    rows += sum(map(len, batches.values()))
    if len(loaded_model.ledger) != rows:
        yield f"{loaded_model.name} has {len(loaded_model.ledger)} commitments and {rows} rows"


def _check_sequence(sequence: Sequence, loaded: bool, preempted: bool, places: Counter[int]) -> Iterator[str]:
    if not loaded:
        yield f"request {sequence.number} is live and its model {sequence.request.model} is not loaded"
    rows = list(sequence.iterate_active_rows())
    if not rows:
        yield f"request {sequence.number} is live and all of its rows have ended"
    for row in sequence.rows:
        if bool(row.reason) != (row.state is RowState.ENDED):
            yield f"{_name_row(row)} has the state {row.state} and the reason {row.reason!r}"
    for row in rows:
        if preempted and row.state is not RowState.PREEMPTED:
            yield f"{_name_row(row)} is preempted and has the state {row.state}"
        if places[id(row)] != (0 if preempted else 1):
            state = "preempted" if preempted else "running"
            yield f"{_name_row(row)} is {state} and in {places[id(row)]} prefills and batches"
        if preempted and row.commitment.committed_tokens:
            yield f"{_name_row(row)} is preempted and holds a commitment of {row.commitment.committed_tokens} tokens"


def _name_row(row: Row) -> str:
    return f"row {row.choice} of request {row.sequence.number}"
