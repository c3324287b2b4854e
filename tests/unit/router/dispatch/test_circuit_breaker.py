"""The breaker: only real faults open it, only a probe closes it, and it never stays open without end."""

from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.circuit_breaker import (
    FAULT_WINDOW_SECONDS,
    MAX_FAULTS,
    MAX_OPEN_SECONDS,
    MIN_OPEN_SECONDS,
    PROBE_SUCCESS_SECONDS,
    SAME_FAULT_SECONDS,
    BreakerState,
    CircuitBreakers,
)

NODE = "a"


def failing(times: int = MAX_FAULTS, begin: float = 0.0) -> tuple[CircuitBreakers[str], float]:
    breakers: CircuitBreakers[str] = CircuitBreakers()
    now = begin
    for request in range(times):
        breakers.record_attempt(NODE, request, now)
        breakers.record_fault(NODE, request, now)
        now += 2 * SAME_FAULT_SECONDS
    return breakers, now - 2 * SAME_FAULT_SECONDS


def test_faults_in_a_row_open_it_for_a_while():
    breakers, now = failing(MAX_FAULTS - 1)
    assert breakers.list_barred_nodes(now) == []
    breakers, now = failing()
    assert breakers.list_barred_nodes(now + MIN_OPEN_SECONDS - 0.1) == [NODE]
    assert breakers.list_barred_nodes(now + MIN_OPEN_SECONDS) == []
    assert breakers.opened == 1


def test_breaker_state_has_its_reason():
    breakers: CircuitBreakers[str] = CircuitBreakers()
    assert breakers.get_state(NODE, 0.0) is None
    for at in range(MAX_FAULTS):
        breakers.record_fault(NODE, at, 2.0 * at * SAME_FAULT_SECONDS, f"signal {at}")
        assert (breakers.get_state(NODE, 2.0 * at * SAME_FAULT_SECONDS) is None) == (at < MAX_FAULTS - 1)
    last = 2.0 * (MAX_FAULTS - 1) * SAME_FAULT_SECONDS
    until = last + MIN_OPEN_SECONDS
    assert breakers.get_state(NODE, last) == BreakerState("open", f"signal {MAX_FAULTS - 1}", until, 1)
    assert breakers.get_state(NODE, until) == BreakerState("half open", f"signal {MAX_FAULTS - 1}", until, 1)
    assert breakers.get_state(NODE, until + 10 * PROBE_SUCCESS_SECONDS) == BreakerState(
        "half open", f"signal {MAX_FAULTS - 1}", until, 1
    )
    breakers.record_attempt(NODE, 9, until)
    assert breakers.get_state(NODE, until) == BreakerState("probing", f"signal {MAX_FAULTS - 1}", until, 1)
    breakers.record_fault(NODE, 9, until + 1, "signal 9")
    assert breakers.get_state(NODE, until + 1) == BreakerState("open", "signal 9", until + 1 + 2 * MIN_OPEN_SECONDS, 2)
    breakers.record_attempt(NODE, 10, until + 1 + 2 * MIN_OPEN_SECONDS)
    breakers.record_success(NODE, 10)
    assert breakers.get_state(NODE, until + 1 + 2 * MIN_OPEN_SECONDS) is None


def test_a_dead_engine_fails_all_that_it_had_at_once():
    breakers: CircuitBreakers[str] = CircuitBreakers()
    for request in range(100):
        breakers.record_fault(NODE, request, 5.0 + request * SAME_FAULT_SECONDS / 200)
    assert breakers.list_barred_nodes(6.0) == []


def test_a_good_answer_or_a_quiet_period_resets_the_count():
    breakers, now = failing(MAX_FAULTS - 1)
    breakers.record_success(NODE, 77)
    breakers.record_fault(NODE, 78, now + 10)
    assert breakers.list_barred_nodes(now + 10) == []
    breakers, now = failing(MAX_FAULTS - 1)
    breakers.record_fault(NODE, 78, now + FAULT_WINDOW_SECONDS + 1)
    assert breakers.list_barred_nodes(now + FAULT_WINDOW_SECONDS + 1) == []


def test_one_probe_at_a_time_closes_it_or_opens_it_for_longer():
    breakers, now = failing()
    now += MIN_OPEN_SECONDS
    assert breakers.list_barred_nodes(now) == []
    breakers.record_attempt(NODE, 50, now)
    assert breakers.list_barred_nodes(now) == [NODE]
    breakers.record_fault(NODE, 2, now)
    breakers.record_success(NODE, 1)
    assert breakers.list_barred_nodes(now) == [NODE], "a request sent before the failure proves nothing"
    breakers.record_fault(NODE, 50, now)
    assert breakers.list_barred_nodes(now + 2 * MIN_OPEN_SECONDS - 0.1) == [NODE]
    now += 2 * MIN_OPEN_SECONDS
    breakers.record_attempt(NODE, 51, now)
    breakers.record_success(NODE, 51)
    breakers.record_fault(NODE, 52, now)
    assert breakers.list_barred_nodes(now) == []


def test_probe_without_a_result_is_replaced_and_a_long_one_succeeds():
    breakers, now = failing()
    now += MIN_OPEN_SECONDS
    breakers.record_attempt(NODE, 50, now)
    breakers.record_departure(NODE, 50)
    assert breakers.list_barred_nodes(now) == []
    breakers.record_attempt(NODE, 51, now)
    assert breakers.list_barred_nodes(now + PROBE_SUCCESS_SECONDS - 0.1) == [NODE]
    assert breakers.list_barred_nodes(now + PROBE_SUCCESS_SECONDS) == []


def test_a_long_probe_closes_it_as_if_there_had_been_no_fault():
    breakers, now = failing()
    breakers.record_attempt(NODE, 50, now + MIN_OPEN_SECONDS)
    now += MIN_OPEN_SECONDS + PROBE_SUCCESS_SECONDS
    assert breakers.list_barred_nodes(now) == []
    for number in range(MAX_FAULTS):
        assert breakers.get_state(NODE, now + number * SAME_FAULT_SECONDS) is None
        breakers.record_fault(NODE, 60 + number, now + number * SAME_FAULT_SECONDS, "again")
    now += (MAX_FAULTS - 1) * SAME_FAULT_SECONDS
    assert breakers.get_state(NODE, now) == BreakerState("open", "again", now + MIN_OPEN_SECONDS, 1)


def test_each_failed_probe_opens_it_for_twice_as_long_up_to_two_minutes():
    breakers, now = failing()
    lasted = list[float]()
    for number in range(7):
        standing = breakers.get_state(NODE, now)
        assert standing is not None
        assert standing.opened == breakers.opened == number + 1
        lasted.append(standing.until - now)
        now = standing.until
        breakers.record_attempt(NODE, 100 + number, now)
        breakers.record_fault(NODE, 100 + number, now)
    assert lasted == [5, 10, 20, 40, 80, 120, 120]


def test_only_the_first_request_is_the_probe():
    breakers, now = failing()
    now += MIN_OPEN_SECONDS
    probing = BreakerState("probing", "", now, 1)
    breakers.record_attempt(NODE, 50, now)
    breakers.record_attempt(NODE, 51, now)
    breakers.record_success(NODE, 51)
    breakers.record_departure(NODE, 51)
    breakers.record_fault(NODE, 51, now)
    assert breakers.get_state(NODE, now) == probing
    breakers.record_success(NODE, 50)
    assert breakers.get_state(NODE, now) is None


def test_fault_without_a_reason_keeps_the_former_reason():
    breakers: CircuitBreakers[str] = CircuitBreakers()
    for at, why in enumerate(("it ended by SIGKILL", "", "")):
        breakers.record_fault(NODE, at, at * SAME_FAULT_SECONDS, why)
    assert breakers.get_state(NODE, 2 * SAME_FAULT_SECONDS) == BreakerState(
        "open", "it ended by SIGKILL", 2 * SAME_FAULT_SECONDS + MIN_OPEN_SECONDS, 1
    )


def test_faults_count_apart_after_a_second_and_in_a_row_up_to_a_minute():
    breakers: CircuitBreakers[str] = CircuitBreakers()
    for at in (0.0, FAULT_WINDOW_SECONDS, FAULT_WINDOW_SECONDS + SAME_FAULT_SECONDS - 0.001):
        breakers.record_fault(NODE, 0, at)
        assert breakers.get_state(NODE, at) is None
    breakers.record_fault(NODE, 0, FAULT_WINDOW_SECONDS + SAME_FAULT_SECONDS)
    assert breakers.get_state(NODE, FAULT_WINDOW_SECONDS + SAME_FAULT_SECONDS) is not None


EVENTS = st.tuples(st.sampled_from(("tried", "fault", "good", "let_go")), st.integers(0, 5), st.floats(0, 20))


@given(st.lists(EVENTS, max_size=80))
def test_breaker_never_stays_open_and_never_opens_without_faults(events: list[tuple[str, int, float]]):
    breakers: CircuitBreakers[str] = CircuitBreakers()
    now, faults = 0.0, 0
    for kind, request, later in events:
        now += later
        barred = breakers.list_barred_nodes(now)
        if kind == "tried":
            if barred:
                continue
            breakers.record_attempt(NODE, request, now)
        elif kind == "fault":
            faults += 1
            breakers.record_fault(NODE, request, now)
        elif kind == "good":
            breakers.record_success(NODE, request)
        else:
            breakers.record_departure(NODE, request)
        assert not breakers.list_barred_nodes(now) or faults >= MAX_FAULTS
        assert breakers.list_barred_nodes(now + MAX_OPEN_SECONDS + PROBE_SUCCESS_SECONDS) == []
    breakers.remove_node(NODE)
    assert breakers.list_barred_nodes(now) == []


@given(
    st.lists(st.tuples(st.sampled_from(("tried", "good", "let_go")), st.integers(0, 5), st.floats(0, 20)), max_size=50)
)
def test_refusals_cancels_and_answers_never_open_it(events: list[tuple[str, int, float]]):
    breakers: CircuitBreakers[str] = CircuitBreakers()
    now = 0.0
    for kind, request, later in events:
        now += later
        if kind == "tried":
            breakers.record_attempt(NODE, request, now)
        elif kind == "good":
            breakers.record_success(NODE, request)
        else:
            breakers.record_departure(NODE, request)
        assert breakers.list_barred_nodes(now) == []
