from pathlib import PurePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.models.load_state import (
    TABLE,
    LoadAborted,
    LoadBegan,
    LoadBroke,
    LoadEvent,
    LoadFinished,
    LoadPhase,
    LoadRefused,
    LoadStep,
    ModelLoad,
    PieceDue,
    step,
)
from node.engine.models.model_descriptor import ModelDescriptor
from tests.effort import scale_examples
from wire.state_machine import IllegalEventError

QUEUED = ModelLoad(ModelDescriptor("m", PurePath("m")))
SIZES = st.integers(0, 2**40)
EVENTS = st.one_of(
    st.builds(LoadBegan, SIZES, st.floats(0, 1e6)),
    st.builds(PieceDue, st.builds(LoadStep, SIZES, SIZES)),
    st.sampled_from([LoadFinished(), LoadRefused(), LoadAborted(), LoadBroke()]),
)


def after(*events: LoadEvent, load: ModelLoad = QUEUED) -> ModelLoad:
    for event in events:
        load = step(load, event)
    return load


def test_a_load_reads_its_weights_piece_by_piece():
    began = after(LoadBegan(100, 5.0))
    assert (began.phase, began.bytes_left, began.loaded_bytes, began.progress, began.begun) == (
        LoadPhase.LOADING,
        100,
        0,
        0.0,
        5.0,
    )
    exact = step(began, PieceDue(LoadStep(120, 7)))
    assert (exact.total, exact.bytes_left, exact.loaded_bytes) == (120, 120, 0), "the first piece has the exact size"
    half = step(exact, PieceDue(LoadStep(60, 7)))
    assert (half.total, half.bytes_left, half.loaded_bytes, half.progress) == (120, 60, 60, 0.5)
    done = step(half, LoadFinished())
    assert (done.phase, done.bytes_left, done.loaded_bytes, done.progress) == (LoadPhase.LOADED, 0, 0, 0.0)


def test_a_load_without_weights_to_read_keeps_its_size():
    load = after(LoadBegan(100, 0.0), PieceDue(LoadStep(100)), PieceDue(LoadStep(0, 9)), PieceDue(LoadStep()))
    assert (load.total, load.bytes_left, load.progress) == (100, 0, 1.0)


@pytest.mark.parametrize("event", [LoadRefused(), LoadAborted()])
def test_a_queued_load_is_refused_or_aborted(event: LoadEvent):
    assert after(event).phase is LoadPhase.FAILED


@pytest.mark.parametrize("event", [LoadAborted(), LoadBroke()])
def test_a_load_that_fails_reserves_nothing(event: LoadEvent):
    load = after(LoadBegan(100, 0.0), PieceDue(LoadStep(60)), event)
    assert (load.phase, load.bytes_left, load.loaded_bytes) == (LoadPhase.FAILED, 0, 0)


def test_an_illegal_event_names_the_phase_and_the_event():
    with pytest.raises(IllegalEventError, match="LoadFinished is illegal for a load in the phase queued"):
        step(QUEUED, LoadFinished())


@settings(max_examples=scale_examples(5_000))
@given(st.lists(EVENTS, max_size=20))
def test_whatever_events_arrive_the_numbers_agree_and_an_end_is_final(events: list[LoadEvent]):
    """Illegal events are refused and change nothing."""
    load = QUEUED
    for event in events:
        before = load
        if load.phase not in TABLE[type(event)]:
            with pytest.raises(IllegalEventError):
                step(load, event)
            continue
        load = step(load, event)
        assert load.check() == []
        assert before.phase not in (LoadPhase.LOADED, LoadPhase.FAILED)
        assert (load.bytes_left > 0) <= (load.phase is LoadPhase.LOADING)


def test_a_check_names_numbers_that_contradict_each_other():
    wrong = ModelLoad(QUEUED.descriptor, LoadPhase.LOADING, total=5, bytes_left=9)
    assert wrong.check() == ["load of m: 9 of 5 bytes are left"]
    assert len(ModelLoad(QUEUED.descriptor, total=5, bytes_left=5).check()) == 2
