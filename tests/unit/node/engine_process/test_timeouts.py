"""Delays and timeouts of the engine process."""

import pytest

from node.engine_process.timeouts import ExitTimeouts, ExitUrgency, SupervisorTimeouts


def test_the_restart_delay_doubles_from_the_first_to_the_longest():
    delays = [SupervisorTimeouts().compute_restart_delay(failures) for failures in range(1, 10)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    assert SupervisorTimeouts().compute_restart_delay(10**6) == 30.0
    assert SupervisorTimeouts(longest=1e99).compute_restart_delay(10**6) == 0.2 * 2**32, "no overflow"


def test_a_call_is_hung_after_ten_seconds_and_five_times_its_expected_duration():
    assert not SupervisorTimeouts().is_hung(9.9, 0.02)
    assert SupervisorTimeouts().is_hung(10.1, 0.02)
    assert not SupervisorTimeouts().is_hung(49.0, 10.0)
    assert SupervisorTimeouts().is_hung(51.0, 10.0)
    assert [SupervisorTimeouts().is_hung(busy, expected) for busy, expected in ((10.0, 2.0), (15.0, 3.0))] == [
        False,
        False,
    ]


def test_seconds_until_hung_are_the_rest_of_the_allowed_duration():
    left = [
        SupervisorTimeouts().compute_seconds_until_hung(busy, expected)
        for busy, expected in ((3.0, 0.02), (10.0, 10.0), (12.0, 0.0), (60.0, 10.0))
    ]
    assert left == [7.0, 40.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("urgency", "busy", "expected", "timeouts"),
    [
        (ExitUrgency.UNRESPONSIVE, 3.0, 100.0, ExitTimeouts(0.0, 6.0)),
        (ExitUrgency.OVER_CAP, 3.0, 100.0, ExitTimeouts(1.0, 1.0)),
        (ExitUrgency.GRACEFUL, 0.0, 0.0, ExitTimeouts(16.0, 6.0)),
        (ExitUrgency.GRACEFUL, 3.0, 100.0, ExitTimeouts(503.0, 6.0)),
        (ExitUrgency.AGENT_STOPS, 3.0, 100.0, ExitTimeouts(9.0, 6.0)),
        (ExitUrgency.AGENT_STOPS, 8.0, 0.0, ExitTimeouts(8.0, 6.0)),
    ],
)
def test_a_child_has_time_to_end_by_urgency_and_call(
    urgency: ExitUrgency, busy: float, expected: float, timeouts: ExitTimeouts
):
    assert SupervisorTimeouts().choose_exit_timeouts(urgency, busy, expected) == timeouts
    assert timeouts.total == timeouts.stop_requested + timeouts.terminated


def test_an_agent_without_time_waits_for_the_child_only_after_sigterm():
    timeouts = SupervisorTimeouts(stopping=2.0).choose_exit_timeouts(ExitUrgency.AGENT_STOPS, 0.0, 0.0)
    assert timeouts == ExitTimeouts(0.0, 6.0)
