"""The breaker: only real faults open it, only a probe closes it, and it never stays open without end."""

from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.circuit_breaker import FAULTS, LONG, LONGEST, SHORTEST, TOGETHER, WITHIN, Breakers, Standing

NODE = "a"


def failing(times: int = FAULTS, begin: float = 0.0) -> tuple[Breakers[str], float]:
    breakers: Breakers[str] = Breakers()
    now = begin
    for request in range(times):
        breakers.tried(NODE, request, now)
        breakers.fault(NODE, request, now)
        now += 2 * TOGETHER
    return breakers, now - 2 * TOGETHER


def test_faults_in_a_row_open_it_for_a_while():
    breakers, now = failing(FAULTS - 1)
    assert breakers.barred(now) == []
    breakers, now = failing()
    assert breakers.barred(now + SHORTEST - 0.1) == [NODE]
    assert breakers.barred(now + SHORTEST) == []
    assert breakers.opened == 1


def test_it_says_how_it_stands_and_why():
    breakers: Breakers[str] = Breakers()
    assert breakers.standing(NODE, 0.0) is None
    for at in range(FAULTS):
        breakers.fault(NODE, at, 2.0 * at * TOGETHER, f"signal {at}")
        assert (breakers.standing(NODE, 2.0 * at * TOGETHER) is None) == (at < FAULTS - 1)
    last = 2.0 * (FAULTS - 1) * TOGETHER
    until = last + SHORTEST
    assert breakers.standing(NODE, last) == Standing("open", f"signal {FAULTS - 1}", until, 1)
    assert breakers.standing(NODE, until) == Standing("half open", f"signal {FAULTS - 1}", until, 1)
    assert breakers.standing(NODE, until + 10 * LONG) == Standing("half open", f"signal {FAULTS - 1}", until, 1)
    breakers.tried(NODE, 9, until)
    assert breakers.standing(NODE, until) == Standing("probing", f"signal {FAULTS - 1}", until, 1)
    breakers.fault(NODE, 9, until + 1, "signal 9")
    assert breakers.standing(NODE, until + 1) == Standing("open", "signal 9", until + 1 + 2 * SHORTEST, 2)
    breakers.tried(NODE, 10, until + 1 + 2 * SHORTEST)
    breakers.good(NODE, 10)
    assert breakers.standing(NODE, until + 1 + 2 * SHORTEST) is None


def test_a_dead_engine_fails_all_that_it_had_at_once():
    breakers: Breakers[str] = Breakers()
    for request in range(100):
        breakers.fault(NODE, request, 5.0 + request * TOGETHER / 200)
    assert breakers.barred(6.0) == []


def test_a_good_answer_or_a_time_of_peace_begins_anew():
    breakers, now = failing(FAULTS - 1)
    breakers.good(NODE, 77)
    breakers.fault(NODE, 78, now + 10)
    assert breakers.barred(now + 10) == []
    breakers, now = failing(FAULTS - 1)
    breakers.fault(NODE, 78, now + WITHIN + 1)
    assert breakers.barred(now + WITHIN + 1) == []


def test_one_probe_at_a_time_closes_it_or_opens_it_for_longer():
    breakers, now = failing()
    now += SHORTEST
    assert breakers.barred(now) == []
    breakers.tried(NODE, 50, now)
    assert breakers.barred(now) == [NODE]
    breakers.fault(NODE, 2, now)
    breakers.good(NODE, 1)
    assert breakers.barred(now) == [NODE], "what was begun before says nothing"
    breakers.fault(NODE, 50, now)
    assert breakers.barred(now + 2 * SHORTEST - 0.1) == [NODE]
    now += 2 * SHORTEST
    breakers.tried(NODE, 51, now)
    breakers.good(NODE, 51)
    breakers.fault(NODE, 52, now)
    assert breakers.barred(now) == []


def test_a_probe_that_shows_nothing_leaves_it_to_the_next_and_a_long_one_is_well():
    breakers, now = failing()
    now += SHORTEST
    breakers.tried(NODE, 50, now)
    breakers.let_go(NODE, 50)
    assert breakers.barred(now) == []
    breakers.tried(NODE, 51, now)
    assert breakers.barred(now + LONG - 0.1) == [NODE]
    assert breakers.barred(now + LONG) == []


def test_a_long_probe_closes_it_as_if_there_had_been_no_fault():
    breakers, now = failing()
    breakers.tried(NODE, 50, now + SHORTEST)
    now += SHORTEST + LONG
    assert breakers.barred(now) == []
    for number in range(FAULTS):
        assert breakers.standing(NODE, now + number * TOGETHER) is None
        breakers.fault(NODE, 60 + number, now + number * TOGETHER, "again")
    now += (FAULTS - 1) * TOGETHER
    assert breakers.standing(NODE, now) == Standing("open", "again", now + SHORTEST, 1)


def test_each_failed_probe_opens_it_for_twice_as_long_up_to_two_minutes():
    breakers, now = failing()
    lasted = list[float]()
    for number in range(7):
        standing = breakers.standing(NODE, now)
        assert standing is not None
        assert standing.opened == breakers.opened == number + 1
        lasted.append(standing.until - now)
        now = standing.until
        breakers.tried(NODE, 100 + number, now)
        breakers.fault(NODE, 100 + number, now)
    assert lasted == [5, 10, 20, 40, 80, 120, 120]


def test_only_the_first_request_sent_is_the_probe_and_no_other_moves_it():
    breakers, now = failing()
    now += SHORTEST
    probing = Standing("probing", "", now, 1)
    breakers.tried(NODE, 50, now)
    breakers.tried(NODE, 51, now)
    breakers.good(NODE, 51)
    breakers.let_go(NODE, 51)
    breakers.fault(NODE, 51, now)
    assert breakers.standing(NODE, now) == probing
    breakers.good(NODE, 50)
    assert breakers.standing(NODE, now) is None


def test_a_fault_that_says_nothing_keeps_what_the_one_before_said():
    breakers: Breakers[str] = Breakers()
    for at, why in enumerate(("it ended by SIGKILL", "", "")):
        breakers.fault(NODE, at, at * TOGETHER, why)
    assert breakers.standing(NODE, 2 * TOGETHER) == Standing("open", "it ended by SIGKILL", 2 * TOGETHER + SHORTEST, 1)


def test_faults_count_apart_after_a_second_and_in_a_row_up_to_a_minute():
    breakers: Breakers[str] = Breakers()
    for at in (0.0, WITHIN, WITHIN + TOGETHER - 0.001):
        breakers.fault(NODE, 0, at)
        assert breakers.standing(NODE, at) is None
    breakers.fault(NODE, 0, WITHIN + TOGETHER)
    assert breakers.standing(NODE, WITHIN + TOGETHER) is not None


EVENTS = st.tuples(st.sampled_from(("tried", "fault", "good", "let_go")), st.integers(0, 5), st.floats(0, 20))


@given(st.lists(EVENTS, max_size=80))
def test_it_never_bars_for_ever_and_never_without_faults(events: list[tuple[str, int, float]]):
    breakers: Breakers[str] = Breakers()
    now, faults = 0.0, 0
    for kind, request, later in events:
        now += later
        barred = breakers.barred(now)
        if kind == "tried":
            if barred:
                continue
            breakers.tried(NODE, request, now)
        elif kind == "fault":
            faults += 1
            breakers.fault(NODE, request, now)
        elif kind == "good":
            breakers.good(NODE, request)
        else:
            breakers.let_go(NODE, request)
        assert not breakers.barred(now) or faults >= FAULTS
        assert breakers.barred(now + LONGEST + LONG) == []
    breakers.forget(NODE)
    assert breakers.barred(now) == []


@given(
    st.lists(st.tuples(st.sampled_from(("tried", "good", "let_go")), st.integers(0, 5), st.floats(0, 20)), max_size=50)
)
def test_refusals_cancels_and_answers_never_open_it(events: list[tuple[str, int, float]]):
    breakers: Breakers[str] = Breakers()
    now = 0.0
    for kind, request, later in events:
        now += later
        if kind == "tried":
            breakers.tried(NODE, request, now)
        elif kind == "good":
            breakers.good(NODE, request)
        else:
            breakers.let_go(NODE, request)
        assert breakers.barred(now) == []
