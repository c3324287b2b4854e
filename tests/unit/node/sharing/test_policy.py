"""When a Mac accepts work: the rule, the pause, which comes before the rule, and the steps when the Mac stops
sharing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.sharing.policy import (
    DAY_SECONDS,
    SHARED,
    GracePeriods,
    Occupancy,
    ShareHours,
    ShareWhen,
    SharingAction,
    SharingInputs,
    SharingPause,
    SharingRule,
    SharingState,
    compute_recovery_percent,
    decide_sharing,
    get_pause_in_force,
    is_charge_too_low,
    list_due_actions,
    parse_hours,
)

NIGHT = parse_hours("22:00-07:00")
TIMES = st.integers(0, DAY_SECONDS - 1)
SPANS = st.tuples(TIMES, TIMES).filter(lambda span: span[0] != span[1])
HOURS = st.lists(SPANS, min_size=1, max_size=3).map(lambda spans: ShareHours(tuple(spans)))
FACTS = st.builds(
    SharingInputs,
    pause=st.none() | st.builds(SharingPause, st.none() | st.floats(0, 2e9), st.sampled_from(["", "ann"])),
    plugged=st.none() | st.booleans(),
    idle=st.none() | st.floats(0, 1e6),
    second=TIMES,
    battery=st.none() | st.floats(0, 100),
    low=st.booleans(),
)
RULES = st.builds(SharingRule, st.sampled_from(ShareWhen), st.none() | HOURS, st.floats(1, 86400), st.integers(0, 100))


@pytest.mark.parametrize(
    ("clock", "shared"),
    [("21:59", False), ("22:00", True), ("23:59", True), ("00:00", True), ("06:59", True), ("07:00", False)],
)
def test_a_span_over_midnight(clock: str, shared: bool) -> None:
    hours, minutes = clock.split(":")
    second = int(hours) * 3600 + int(minutes) * 60
    assert NIGHT.contains(second) is shared
    found = decide_sharing(SharingRule(ShareWhen.HOURS, NIGHT), SharingInputs(second=second), 1_000_000.0)
    assert found.shared is shared
    if not shared:
        assert found.until == 1_000_000.0 + (22 * 3600 - second)
        assert "22:00-07:00" in found.why


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "22-7",
        "22:00",
        "22:00-22:00",
        "00:00-24:00",
        "24:00-00:00",
        "22:00-24:01",
        "25:00-07:00",
        "22:60-07:00",
        "22:00-07:00;",
        "-",
    ],
)
def test_what_is_no_span_is_refused_with_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"hours|span|length|time"):
        parse_hours(text)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("22:00-07:00", ((79200, 25200),)),
        ("9:05-24:00", ((32700, 0),)),
        ("24:00-07:00", ((0, 25200),)),
        (" 08:00-12:00 ,, 13:30-17:59", ((28800, 43200), (48600, 64740))),
    ],
)
def test_spans_are_read_in_seconds_since_midnight(text: str, spans: tuple[tuple[int, int], ...]) -> None:
    assert parse_hours(text) == ShareHours(spans)


def test_a_span_begins_with_its_first_second_and_ends_before_its_last() -> None:
    hours = parse_hours("09:00-17:00")
    seconds = (0, 32399, 32400, 61199, 61200, DAY_SECONDS - 1)
    assert [hours.contains(second) for second in seconds] == [False, False, True, True, False, False]
    assert [hours.compute_wait_seconds(second) for second in seconds] == [32400, 1, 0, 0, 57600, 32401]


@given(HOURS)
def test_hours_are_read_as_they_are_written(hours: ShareHours) -> None:
    minutes = ShareHours(tuple((begin // 60 * 60, end // 60 * 60) for begin, end in hours.spans))
    if all(begin != end for begin, end in minutes.spans):
        assert parse_hours(str(minutes)) == minutes


@given(HOURS, TIMES)
def test_the_wait_ends_where_a_span_begins(hours: ShareHours, second: int) -> None:
    wait = hours.compute_wait_seconds(second)
    assert 0 <= wait < DAY_SECONDS
    assert hours.contains((second + wait) % DAY_SECONDS)
    assert (wait == 0) is hours.contains(second)
    assert not any(hours.contains((second + step) % DAY_SECONDS) for step in range(0, int(wait), 997))


@given(RULES, FACTS, st.floats(0, 2e9))
def test_a_paused_node_shares_nothing_and_every_refusal_has_its_reason(
    rule: SharingRule, facts: SharingInputs, now: float
) -> None:
    found = decide_sharing(rule, facts, now)
    assert found.shared is not bool(found.why)
    if get_pause_in_force(facts.pause, now) is not None:
        assert not found.shared
        assert found.by_hand
    if found.until is not None:
        assert found.until >= now - 0.5
    if found == SHARED and rule.when is ShareWhen.PLUGGED_IN:
        assert facts.plugged
    if found == SHARED and rule.when is ShareWhen.IDLE:
        assert facts.idle is not None
        assert facts.idle >= rule.idle
    if found == SHARED and rule.battery and not facts.plugged:
        assert facts.battery is not None
        assert facts.battery >= rule.battery


def test_a_pause_ends_by_itself_and_then_the_rule_holds() -> None:
    facts = SharingInputs(SharingPause(100.0, "ann"), plugged=False)
    assert decide_sharing(SharingRule(), facts, 99.9).until == 100.0
    assert decide_sharing(SharingRule(), facts, 100.0) == SHARED
    after = decide_sharing(SharingRule(ShareWhen.PLUGGED_IN), facts, 100.0)
    assert not after.shared
    assert not after.by_hand


@pytest.mark.parametrize("when", [ShareWhen.PLUGGED_IN, ShareWhen.IDLE])
def test_what_cannot_be_read_is_no_yes(when: ShareWhen) -> None:
    found = decide_sharing(SharingRule(when), SharingInputs(), 0.0)
    assert not found.shared
    assert "cannot be read" in found.why
    assert f'sharing.when = "{when}"' in found.why


BATTERY = SharingState(False, "the Mac is on battery and shares only on mains power")


@pytest.mark.parametrize(
    ("rule", "facts", "found"),
    [
        (SharingRule(ShareWhen.PLUGGED_IN), SharingInputs(plugged=True), SHARED),
        (SharingRule(ShareWhen.PLUGGED_IN), SharingInputs(plugged=False), BATTERY),
        (SharingRule(ShareWhen.IDLE, idle=60), SharingInputs(idle=60), SHARED),
        (
            SharingRule(ShareWhen.IDLE, idle=60),
            SharingInputs(idle=59),
            SharingState(False, "the Mac is in use and shares after 1 min without input"),
        ),
        (
            SharingRule(ShareWhen.IDLE, idle=59),
            SharingInputs(idle=0),
            SharingState(False, "the Mac is in use and shares after 59 s without input"),
        ),
        (
            SharingRule(ShareWhen.IDLE, idle=90),
            SharingInputs(idle=0),
            SharingState(False, "the Mac is in use and shares after 1.5 min without input"),
        ),
    ],
)
def test_the_rule_shares_or_has_a_cause(rule: SharingRule, facts: SharingInputs, found: SharingState) -> None:
    assert decide_sharing(rule, facts, 0.0) == found


@pytest.mark.parametrize(
    ("battery", "facts", "low"),
    [
        (0, SharingInputs(plugged=False, battery=3, low=True), False),
        (50, SharingInputs(plugged=False, battery=None), False),
        (50, SharingInputs(plugged=True, battery=3), False),
        (50, SharingInputs(plugged=False, battery=3), True),
    ],
)
def test_a_charge_is_too_low_only_off_the_mains_where_it_is_read_and_matters(
    battery: int, facts: SharingInputs, low: bool
) -> None:
    assert is_charge_too_low(SharingRule(battery=battery), facts) is low


def charged(charges: list[float], least: int = 50, plugged: bool | None = False) -> list[bool]:
    """Return for each charge, in order, whether the Mac shares."""
    rule, low, found = SharingRule(battery=least), False, list[bool]()
    for charge in charges:
        facts = SharingInputs(plugged=plugged, battery=charge, low=low)
        low = is_charge_too_low(rule, facts)
        found.append(decide_sharing(rule, facts, 0.0).shared)
    return found


def test_on_battery_sharing_ends_at_a_charge_and_begins_at_a_higher_one() -> None:
    assert charged([80, 50, 49, 50, 54, 55, 50, 49]) == [True, True, False, False, False, True, True, False]
    assert charged([99, 98, 99, 100], least=99) == [True, False, False, True]
    assert charged([3, 2, 1], plugged=True) == [True] * 3
    assert charged([3, 80], plugged=None) == [False, True], "an unknown power source counts as battery"
    assert charged([3, 2], least=0) == [True] * 2
    why = decide_sharing(SharingRule(battery=50), SharingInputs(plugged=False, battery=41.6), 0.0).why
    assert (
        why == "the battery is at 42 %, below sharing.min_battery_percent = 50; "
        "the Mac shares again from 55 %, or on mains power"
    )


@given(st.lists(st.floats(0, 100), min_size=2, max_size=20), st.integers(1, 100))
def test_a_charge_that_varies_below_the_recovery_changes_the_answer_once(charges: list[float], least: int) -> None:
    below = [min(charge, compute_recovery_percent(least) - 0.5) for charge in charges]
    found = charged(below, least)
    assert found == sorted(found, reverse=True)


def test_the_battery_only_narrows_the_rule() -> None:
    weak, full = SharingInputs(plugged=False, battery=10, idle=700), SharingInputs(plugged=False, battery=90, idle=700)
    assert not decide_sharing(SharingRule(ShareWhen.IDLE, battery=50), weak, 0.0).shared
    assert decide_sharing(SharingRule(ShareWhen.IDLE, battery=50), full, 0.0).shared
    assert "the Mac is in use" in decide_sharing(SharingRule(ShareWhen.IDLE, idle=900, battery=50), full, 0.0).why
    assert not decide_sharing(SharingRule(ShareWhen.PLUGGED_IN, battery=50), full, 0.0).shared


def test_without_a_battery_its_charge_does_not_matter_and_an_unread_one_is_no_yes() -> None:
    assert decide_sharing(SharingRule(battery=50), SharingInputs(plugged=True), 0.0) == SHARED
    for plugged in (None, False):
        found = decide_sharing(SharingRule(battery=50), SharingInputs(plugged=plugged), 0.0)
        assert not found.shared
        assert "cannot be read, which sharing.min_battery_percent = 50 needs" in found.why


def test_what_is_done_once_nothing_is_taken() -> None:
    grace = GracePeriods(30.0, 300.0)
    busy = Occupancy(requests=2, lending=True)
    assert list_due_actions(False, busy, 29.9, grace) == ()
    assert list_due_actions(False, busy, 30.0, grace) == (SharingAction.END_REQUESTS,)
    assert list_due_actions(False, busy, 300.0, grace) == (SharingAction.END_REQUESTS, SharingAction.END_LEASE)
    assert list_due_actions(False, Occupancy(lending=True), 0.0, grace) == (SharingAction.REST,)
    assert list_due_actions(False, Occupancy(resting=True), 1e9, grace) == ()
    assert list_due_actions(True, Occupancy(requests=2, lending=True), 1e9, grace) == ()
    assert list_due_actions(True, Occupancy(resting=True), 0.0, grace) == (SharingAction.WAKE,)


@given(
    st.booleans(),
    st.builds(Occupancy, st.integers(0, 5), st.booleans(), st.booleans()),
    st.floats(0, 1e6),
    st.builds(GracePeriods, st.floats(0, 1e4), st.floats(0, 1e4)),
)
def test_no_request_is_ended_early_and_a_full_engine_is_never_released(
    shared: bool, holds: Occupancy, waited: float, grace: GracePeriods
) -> None:
    acts = list_due_actions(shared, holds, waited, grace)
    assert SharingAction.END_REQUESTS not in acts or (not shared and waited >= grace.requests)
    assert SharingAction.END_LEASE not in acts or (not shared and waited >= grace.video)
    assert SharingAction.REST not in acts or (not shared and not holds.requests)
    assert SharingAction.WAKE not in acts or shared
