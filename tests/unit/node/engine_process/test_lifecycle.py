"""State machine of the engine process: each transition, illegal events, and random event orders."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine_process.lifecycle import (
    REST_CAUSE,
    TABLE,
    WAKE_CAUSE,
    CapExceeded,
    ChildExited,
    ChildHung,
    ChildLife,
    ChildReported,
    ChildStarted,
    EndChild,
    EngineLife,
    Event,
    IllegalEventError,
    InvariantError,
    LeaksExceeded,
    ProtocolViolated,
    RestRequested,
    SocketClosed,
    StartDue,
    StateChanged,
    StopRequested,
    WaitForRestart,
    WakeRequested,
    make_report_event,
    refuse_not_ready,
    step,
)
from node.engine_process.timeouts import ExitUrgency, SupervisorTimeouts
from tests.effort import scale_examples
from wire.frames import EngineReport
from wire.node_state import EngineStage
from wire.refusals import RefusalCode, Refused
from wire.report import Memory, Model
from wire.units import GIB

TIMEOUTS = SupervisorTimeouts()
NEW = EngineLife(preloads=False)
MODEL = frozenset({"m"})


def after(*events: Event, life: EngineLife = NEW) -> EngineLife:
    for event in events:
        life, _ = step(life, event, TIMEOUTS)
    return life


STARTED = after(StartDue(), ChildStarted())
READY = after(ChildReported(), life=STARTED)


def test_a_report_names_the_models_and_whether_limits_are_in_force():
    models = Model("a", loaded=True), Model("b", loading=True), Model("c", cause="why")
    assert make_report_event(EngineReport(Memory(cap=1), models, 0, 0, unreturned=5), busy=True) == ChildReported(
        armed=True,
        loaded=frozenset({"a"}),
        loading=frozenset({"b"}),
        broken=frozenset({"c"}),
        unreturned=5,
        busy=True,
    )
    assert make_report_event(EngineReport(Memory(), (), 0, 0), busy=False) == ChildReported(armed=False)


def test_a_child_is_ready_after_its_first_report_with_limits_in_force():
    assert step(NEW, StartDue(), TIMEOUTS) == (NEW, (StateChanged(),))
    assert STARTED.stage is EngineStage.STARTING
    unarmed, actions = step(STARTED, ChildReported(armed=False), TIMEOUTS)
    assert (unarmed, actions) == (STARTED, (StateChanged(),))
    ready, actions = step(unarmed, ChildReported(), TIMEOUTS)
    assert (ready.stage, ready.child, actions) == (EngineStage.READY, ChildLife(ready=True), (StateChanged(),))
    assert after(ChildReported(loaded=MODEL), life=STARTED).child == ChildLife(ready=True, attempted=MODEL)


@pytest.mark.parametrize(
    ("event", "urgency", "stage", "child_cause"),
    [
        (ChildHung("silent"), ExitUrgency.UNRESPONSIVE, EngineStage.HUNG, "the engine hung: silent"),
        (ProtocolViolated("bad frame"), ExitUrgency.GRACEFUL, EngineStage.RESTARTING, "bad frame"),
        (CapExceeded("over"), ExitUrgency.OVER_CAP, EngineStage.RESTARTING, "over"),
    ],
)
def test_a_faulty_child_is_ended_with_its_urgency(
    event: Event, urgency: ExitUrgency, stage: EngineStage, child_cause: str
):
    life, actions = step(READY, event, TIMEOUTS)
    assert actions == (EndChild(urgency), StateChanged())
    assert (life.stage, life.cause, life.child) == (
        stage,
        child_cause.removeprefix("the engine hung: "),
        ChildLife(ending=True, hung=stage is EngineStage.HUNG, cause=child_cause),
    )
    reported, actions = step(life, ChildReported(), TIMEOUTS)
    assert (reported, actions) == (life, (StateChanged(),)), "a child that ends is not ready again"


def test_the_first_cause_of_an_end_is_kept():
    life = after(CapExceeded("over"), ProtocolViolated("bad frame"), life=READY)
    assert life.child is not None
    assert (life.cause, life.child.cause) == ("bad frame", "over")


def test_a_closed_socket_ends_the_process_without_a_change_of_the_stage():
    life, actions = step(READY, SocketClosed(), TIMEOUTS)
    assert actions == (EndChild(ExitUrgency.UNRESPONSIVE),)
    assert life == replace(READY, child=ChildLife(ending=True, cause="it closed its socket without exiting"))


def test_failures_in_a_row_delay_the_restart_until_the_engine_counts_as_failed():
    life, seen = NEW, list[tuple[EngineStage, float]]()
    for _ in range(9):
        life, actions = step(after(StartDue(), life=life), ChildExited("no program"), TIMEOUTS)
        changed, wait = actions
        assert (changed, type(wait)) == (StateChanged(), WaitForRestart)
        seen.append((life.stage, wait.delay if isinstance(wait, WaitForRestart) else 0.0))
    assert seen == [(EngineStage.RESTARTING, 0.2 * 2**n) for n in range(8)] + [(EngineStage.FAILED, 30.0)]
    assert (life.restarts, life.failures, life.cause, life.child) == (9, 9, "no program", None)
    life, actions = step(after(StartDue(), ChildStarted(), life=life), ChildExited("killed", healthy=True), TIMEOUTS)
    assert (life.failures, life.stage, actions[1]) == (1, EngineStage.RESTARTING, WaitForRestart(0.2))


def test_a_new_child_loads_the_models_of_its_predecessor_except_quarantined_and_unloaded_ones():
    life = after(ChildReported(loaded=frozenset("abc")), life=READY)
    assert life.models == frozenset("abc")
    life = after(ChildReported(loaded=frozenset("ab")), life=life)
    assert life.models == frozenset("ab"), "c was unloaded"
    life = after(ChildExited("killed"), StartDue(), ChildStarted(banned=frozenset("b")), life=life)
    assert life.models == frozenset("a")
    life = after(ChildReported(loaded=frozenset(), loading=frozenset()), life=life)
    assert life.models == frozenset("a"), "its load has not begun"
    begun = after(ChildReported(loading=frozenset("a")), life=life)
    assert begun.models == frozenset("a")
    assert after(ChildReported(), life=begun).models == frozenset(), "its load was cancelled"
    assert after(ChildReported(broken=frozenset("a")), life=life).models == frozenset()


@pytest.mark.parametrize(
    "report",
    [
        ChildReported(unreturned=0),
        ChildReported(unreturned=GIB, busy=True),
        ChildReported(unreturned=GIB, loaded=MODEL),
        ChildReported(unreturned=GIB, loading=MODEL),
    ],
)
def test_a_child_in_use_is_not_replaced(report: ChildReported):
    used = after(ChildReported(loaded=MODEL), ChildReported(), life=READY)
    life, actions = step(used, report, TIMEOUTS)
    assert (life.stage, life.recycles, actions) == (EngineStage.READY, 0, (StateChanged(),))


def test_an_idle_child_that_keeps_memory_is_replaced_without_counting_as_a_failure():
    leaking = ChildReported(unreturned=3 * GIB)
    assert after(leaking, life=READY).recycles == 0, "a child that loaded no model cannot have kept one"
    used = after(ChildReported(loaded=MODEL), ChildReported(), life=READY)
    life, actions = step(used, leaking, TIMEOUTS)
    cause = "3.0 GiB of unloaded models were not freed: the engine was replaced"
    assert actions == (EndChild(ExitUrgency.GRACEFUL), StateChanged())
    assert (life.stage, life.cause, life.recycles) == (EngineStage.RESTARTING, cause, 1)
    life, actions = step(life, ChildExited("ended"), TIMEOUTS)
    assert actions == (WaitForRestart(0.0),)
    assert (life.restarts, life.failures, life.stage) == (0, 0, EngineStage.RESTARTING)
    assert after(ChildReported(unreturned=1), life=used).recycles == 1
    preloading = replace(used, preloads=True)
    assert after(leaking, life=preloading).recycles == 0, "a client would notice the load"
    resting = replace(preloading, resting=True, child=ChildLife(ready=True, resting=True, attempted=MODEL))
    assert after(leaking, life=resting).recycles == 1, "the next child loads no model"
    unarmed = after(ChildReported(armed=False, loaded=MODEL), life=STARTED)
    assert after(replace(leaking, armed=False), life=unarmed).recycles == 0


def test_rest_replaces_a_child_with_models_and_the_next_one_loads_none():
    used = after(ChildReported(loaded=MODEL), life=READY)
    life, actions = step(used, RestRequested(), TIMEOUTS)
    assert actions == (EndChild(ExitUrgency.GRACEFUL), StateChanged())
    assert (life.resting, life.cause, life.recycles) == (True, REST_CAUSE, 1)
    assert step(life, RestRequested(), TIMEOUTS) == (life, ()), "rest is requested once"
    life = after(ChildExited("ended"), StartDue(), ChildStarted(), life=life)
    assert (life.models, life.child) == (frozenset(), ChildLife(resting=True))
    awake, actions = step(life, WakeRequested(), TIMEOUTS)
    assert (awake, actions) == (replace(life, resting=False, child=ChildLife()), ()), "there is no model to load"


@pytest.mark.parametrize("before", [(), (ChildReported(loaded=MODEL),)])
def test_each_rest_replaces_a_child_that_has_loaded_a_model_since_the_last_one(before: tuple[Event, ...]):
    """Without a model before the first rest, the same child runs at both rests."""
    life = after(*before, RestRequested(), life=READY)
    if before:
        life = after(ChildExited("ended"), StartDue(), ChildStarted(), ChildReported(), life=life)
    rests = life.recycles
    life = after(WakeRequested(), ChildReported(loaded=MODEL), life=life)
    life, actions = step(life, RestRequested(), TIMEOUTS)
    assert actions == (EndChild(ExitUrgency.GRACEFUL), StateChanged()), "the owner gets the memory back"
    assert (life.resting, life.recycles) == (True, rests + 1)


def test_rest_replaces_a_child_that_has_unloaded_its_models_or_will_load_them():
    unloaded = after(ChildReported(loaded=MODEL), ChildReported(), life=READY)
    assert unloaded.models == frozenset()
    assert after(RestRequested(), life=unloaded).recycles == 1
    killed = after(ChildReported(loaded=MODEL), ChildExited("killed"), life=READY)
    reloading = after(StartDue(), ChildStarted(), life=killed)
    assert reloading.models == MODEL
    assert after(RestRequested(), life=reloading).recycles == 1


def test_requests_of_rest_and_wake_in_the_same_state_change_nothing():
    resting = after(RestRequested(), ChildReported(loaded=MODEL), life=READY)
    assert step(resting, RestRequested(), TIMEOUTS) == (resting, ()), "a request of a user loaded the model"
    awake = replace(READY, preloads=True)
    assert step(awake, WakeRequested(), TIMEOUTS) == (awake, ())


def test_rest_leaves_a_child_without_models_and_wake_loads_the_preloaded_ones():
    life, actions = step(READY, RestRequested(), TIMEOUTS)
    assert actions == ()
    assert life == replace(READY, resting=True, child=ChildLife(ready=True, resting=True))
    preloading = after(RestRequested(), life=replace(READY, preloads=True))
    assert preloading.recycles == 1, "its models may still be loading"
    life = after(ChildExited("ended"), StartDue(), ChildStarted(), ChildReported(), life=preloading)
    life, actions = step(life, WakeRequested(), TIMEOUTS)
    assert actions == (EndChild(ExitUrgency.GRACEFUL), StateChanged())
    assert (life.resting, life.cause, life.recycles) == (False, WAKE_CAUSE, 2)
    assert step(NEW, RestRequested(), TIMEOUTS) == (replace(NEW, resting=True), ())


def test_an_agent_that_stops_ends_the_child_also_one_that_starts_meanwhile():
    life, actions = step(READY, StopRequested(), TIMEOUTS)
    assert (life.stopping, actions) == (True, (EndChild(ExitUrgency.AGENT_STOPS),))
    life, actions = step(life, ChildExited("ended"), TIMEOUTS)
    assert (life.restarts, life.child, actions) == (0, None, ())
    assert step(NEW, StopRequested(), TIMEOUTS) == (replace(NEW, stopping=True), ())
    _, actions = step(after(StopRequested(), StartDue()), ChildStarted(), TIMEOUTS)
    assert actions == (EndChild(ExitUrgency.AGENT_STOPS),)


def test_no_engine_starts_after_too_many_leaks_until_the_memory_returns():
    life, actions = step(after(ChildExited("killed"), life=READY), LeaksExceeded("leaks"), TIMEOUTS)
    assert (life.stage, life.cause, actions) == (EngineStage.FAILED, "leaks", (StateChanged(),))
    assert after(StartDue(), life=life).stage is EngineStage.STARTING


@pytest.mark.parametrize(
    ("life", "event"),
    [
        (READY, StartDue()),
        (READY, ChildStarted()),
        (STARTED, ChildStarted()),
        (NEW, ChildReported()),
        (NEW, SocketClosed()),
        (after(ChildHung("x"), life=READY), ChildHung("x")),
        (after(StopRequested(), life=READY), ChildHung("x")),
        (after(ChildExited("x"), life=READY), CapExceeded("x")),
        (READY, LeaksExceeded("x")),
        (after(ChildExited("x"), life=READY), ChildExited("x")),
    ],
)
def test_an_illegal_event_is_named_with_the_stage(life: EngineLife, event: Event):
    with pytest.raises(IllegalEventError, match=rf"(?s){life.stage.value}|asked to end.*{type(event).__name__}"):
        step(life, event, TIMEOUTS)


def test_the_table_has_every_event_and_contradictions_are_detected():
    assert set(TABLE) == set(get_args(Event))
    for wrong in (
        replace(NEW, stage=EngineStage.READY),
        replace(NEW, child=ChildLife(ready=True)),
        replace(READY, child=ChildLife(ready=True, ending=True)),
        replace(READY, child=ChildLife(hung=True)),
        replace(READY, child=ChildLife(recycled=True)),
        replace(READY, stage=EngineStage.HUNG, child=ChildLife()),
        replace(READY, stage=EngineStage.FAILED, child=ChildLife()),
    ):
        with pytest.raises(InvariantError):
            wrong.check()


def test_a_request_without_a_ready_engine_is_refused_with_the_stage_the_cause_and_the_wait():
    assert refuse_not_ready(NEW, TIMEOUTS) == Refused(RefusalCode.NOT_READY, "the engine is starting", None, 1.2)
    failed = after(
        ChildExited("killed by SIGABRT"), life=after(ChildExited("x"), StartDue(), ChildStarted(), life=READY)
    )
    assert refuse_not_ready(failed, TIMEOUTS) == Refused(
        RefusalCode.NOT_READY, "the engine is restarting, it ended: killed by SIGABRT", None, 1.4
    )
    ready = replace(READY, cause="killed by SIGABRT")
    assert refuse_not_ready(ready, TIMEOUTS).message == "the engine is ready, but does not read its requests: retry"


def test_a_step_out_of_a_contradictory_state_is_detected():
    corrupt = replace(READY, stage=EngineStage.HUNG, preloads=True, child=ChildLife(resting=True))
    with pytest.raises(InvariantError, match=r"hung -> restarting by WakeRequested\(\) is not in the table"):
        step(corrupt, WakeRequested(), TIMEOUTS)
    with pytest.raises(InvariantError, match="hung or replaced, and does not end"):
        step(replace(READY, child=ChildLife(ready=True, hung=True)), ChildReported(), TIMEOUTS)


names = st.frozensets(st.sampled_from("ab"))
events = st.one_of(
    st.just(StartDue()),
    st.builds(ChildStarted, names),
    st.builds(
        ChildReported,
        armed=st.booleans(),
        loaded=names,
        loading=names,
        broken=names,
        unreturned=st.sampled_from([0, GIB]),
        busy=st.booleans(),
    ),
    st.builds(ChildHung, st.just("h")),
    st.builds(ProtocolViolated, st.just("p")),
    st.builds(CapExceeded, st.just("c")),
    st.just(SocketClosed()),
    st.builds(ChildExited, st.just("x"), st.booleans()),
    st.builds(LeaksExceeded, st.just("l")),
    st.sampled_from([RestRequested(), WakeRequested(), StopRequested()]),
)


@settings(max_examples=scale_examples(2000))
@given(st.booleans(), st.lists(events, max_size=30))
def test_in_every_order_of_events_the_invariants_hold_and_requests_reach_only_a_ready_child(
    preloads: bool, sequence: list[Event]
):
    life = EngineLife(preloads=preloads)
    for event in sequence:
        try:
            new, actions = step(life, event, TIMEOUTS)
        except IllegalEventError:
            continue
        new.check()
        ended = [action for action in actions if isinstance(action, EndChild)]
        assert len(ended) <= 1
        if ended:
            assert new.child is not None
            assert new.child.ending
        if new.child is not None and new.child.ready and not (life.child and life.child.ready):
            assert isinstance(event, ChildReported)
            assert event.armed
        assert new.restarts - life.restarts <= 1
        assert not new.stopping or new.restarts == life.restarts
        life = new
