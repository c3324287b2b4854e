import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.scheduling.rules.row_state import TABLE, RowEvent, RowState, step
from tests.effort import scale_examples
from wire.state_machine import IllegalEventError

WAY = (RowEvent.CHUNK, RowEvent.CHUNK, RowEvent.PREFILLED, RowEvent.JOINED, RowEvent.FINISHED)


def after(*events: RowEvent, state: RowState = RowState.WAITING) -> RowState:
    for event in events:
        state = step(state, event)
    return state


def test_a_row_is_prefilled_joins_decodes_and_ends():
    states = [after(*WAY[:count]) for count in range(len(WAY) + 1)]
    assert states == [
        RowState.WAITING,
        RowState.PREFILL,
        RowState.PREFILL,
        RowState.JOIN,
        RowState.DECODE,
        RowState.ENDED,
    ]


def test_a_preempted_and_a_rebuilt_row_wait_again():
    assert after(*WAY[:4], RowEvent.PREEMPTED, RowEvent.RETURNED) is RowState.WAITING
    assert after(*WAY[:4], RowEvent.BATCH_BROKEN, RowEvent.REQUEUED) is RowState.WAITING
    assert after(*WAY[:3], RowEvent.RESTARTED) is RowState.WAITING


def test_an_illegal_event_names_the_state_and_the_event():
    with pytest.raises(IllegalEventError, match="event joined is illegal for a row in the state waiting"):
        step(RowState.WAITING, RowEvent.JOINED)


def test_every_event_and_every_state_is_in_the_table():
    assert set(TABLE) == set(RowEvent)
    assert {state for after in TABLE.values() for state in (*after, *after.values())} == set(RowState)


@pytest.mark.parametrize("state", RowState)
def test_a_request_is_released_in_every_state(state: RowState):
    assert step(state, RowEvent.RELEASED) is RowState.ENDED


@settings(max_examples=scale_examples(5_000))
@given(st.lists(st.sampled_from(RowEvent), max_size=40))
def test_whatever_events_arrive_a_row_decodes_only_prefilled_and_joined_and_never_leaves_its_end(
    events: list[RowEvent],
):
    """Illegal events are refused and change nothing."""
    state, past = RowState.WAITING, list[RowEvent]()
    for event in events:
        if state not in TABLE[event]:
            with pytest.raises(IllegalEventError):
                step(state, event)
            continue
        state = step(state, event)
        if past and (RowEvent.RELEASED in past or RowEvent.FINISHED in past):
            assert state is RowState.ENDED
        past.append(event)
        if state is RowState.DECODE:
            assert past[-2:] == [RowEvent.PREFILLED, RowEvent.JOINED]
        if state is RowState.JOIN:
            assert past[-1] is RowEvent.PREFILLED
            assert RowEvent.CHUNK in past
        if state is RowState.REBUILD:
            assert past[-1] is RowEvent.BATCH_BROKEN
