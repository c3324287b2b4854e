import pytest

from node.video.worker import watchdog_policy
from node.video.worker.watchdog_policy import WatchdogState, WorkerBounds, WorkerObservation
from wire.units import GIB

BOUNDS = WorkerBounds(36 * GIB, 300.0, 7200.0)
FINE = WorkerObservation(20 * GIB, "a")


def run(*looks: tuple[float, WorkerObservation], bounds: WorkerBounds = BOUNDS) -> tuple[WatchdogState, list[str]]:
    state, codes = watchdog_policy.create_state(0.0), list[str]()
    for now, seen in looks:
        state, end = watchdog_policy.step(state, seen, bounds, now)
        codes.append(end.code if end is not None else "")
    return state, codes


def test_a_worker_within_its_bounds_is_left_alone():
    state, codes = run(*((float(second), WorkerObservation(20 * GIB + second, second)) for second in range(600)))
    assert set(codes) == {""}
    assert state.peak == 20 * GIB + 599


@pytest.mark.parametrize(("taken", "code"), [(36 * GIB, ""), (36 * GIB + 1, "memory_lease_exceeded")])
def test_one_byte_over_the_lease_is_over_and_leaves_no_time(taken: int, code: str):
    state, end = watchdog_policy.step(watchdog_policy.create_state(0.0), WorkerObservation(taken, "a"), BOUNDS, 1.0)
    assert (end.code if end is not None else "") == code
    assert end is None or end.at_once
    assert state.peak == taken


def test_three_failed_readings_in_a_row_and_no_fewer():
    blind = WorkerObservation(None, "a")
    assert run((1, blind), (2, blind), (3, FINE), (4, blind), (5, blind))[1] == [""] * 5
    assert run((1, blind), (2, blind), (3, blind))[1] == ["", "", "monitor_failed"]


def test_only_what_was_computed_is_progress():
    beats = [(float(second), WorkerObservation(GIB, ("denoise", 4, 17))) for second in range(0, 305, 5)]
    assert run(*beats)[1][-2:] == ["", "worker_stalled"]
    moves = [(float(second), WorkerObservation(GIB, ("denoise", 4, second))) for second in range(0, 1000, 100)]
    assert set(run(*moves)[1]) == {""}


def test_a_job_has_its_time():
    assert run((7199.0, WorkerObservation(GIB, 1)), (7200.0, WorkerObservation(GIB, 2)))[1] == ["", "job_timeout"]


def test_a_missing_worker_has_crashed_unless_its_parent_is_missing_too():
    assert run((1.0, WorkerObservation(None, "a", alive=False)))[1] == ["worker_crashed"]
    assert run((1.0, WorkerObservation(None, "a", alive=False, attended=False)))[1] == ["worker_lost"]
    assert run((1.0, WorkerObservation(GIB, "a", attended=False)))[1] == ["worker_lost"]


def test_a_breach_counts_before_all_else():
    assert run((9999.0, WorkerObservation(40 * GIB, "a", attended=False)))[1] == ["memory_lease_exceeded"]


def test_the_peak_is_the_highest_footprint_of_all_looks():
    assert run((1.0, WorkerObservation(20 * GIB, 1)), (2.0, WorkerObservation(10 * GIB, 2)))[0].peak == 20 * GIB
    assert run((1.0, WorkerObservation(None, 1)))[0].peak == 0


def test_a_job_has_its_time_from_its_start():
    state, end = watchdog_policy.step(watchdog_policy.create_state(100.0), WorkerObservation(GIB, 1), BOUNDS, 7299.0)
    assert end is None
    end = watchdog_policy.step(state, WorkerObservation(GIB, 2), BOUNDS, 7300.0)[1]
    assert end is not None
    assert (end.code, end.at_once) == ("job_timeout", False)


@pytest.mark.parametrize(
    ("seen", "times", "code", "at_once"),
    [
        (WorkerObservation(None, "a"), 3, "monitor_failed", True),
        (WorkerObservation(GIB, "a", attended=False), 1, "worker_lost", True),
        (WorkerObservation(GIB, None), 1, "worker_stalled", False),
    ],
)
def test_only_a_worker_without_a_guard_ends_at_once(seen: WorkerObservation, times: int, code: str, at_once: bool):
    state, end = watchdog_policy.create_state(0.0), None
    for _ in range(times):
        state, end = watchdog_policy.step(state, seen, BOUNDS, 300.0)
    assert end is not None
    assert (end.code, end.at_once) == (code, at_once)
