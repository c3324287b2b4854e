"""Every process of the chain that makes a video is killed, in one phase of a job after the other.

The printed table is the one of docs/video.md; `python -m tests.bench video` fills all of it.
"""

import ipaddress
import signal
from contextlib import suppress

import psutil
import pytest

from tests.support.processes import Pool, Process, get_ray_ports
from tests.support.video.chain import PHASES, Chain, chain, expected, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PORTS = get_ray_ports(2)
BACK = 2.0 + 3.0
"""Seconds until the memory is back, with a margin for a busy machine; on an idle machine it is below 2 s."""
CELLS = {
    "node": (
        ("raylet", "denoising"),
        ("agent", "saving"),
        ("worker", "loading"),
        ("actor", "loading"),
        ("engine", "acquiring"),
        ("worker", "saving"),
        ("actor", "denoising"),
        ("launcher", "loading"),
        ("actor", "saving"),
        ("agent", "pulling"),
        ("engine", "denoising"),
        ("launcher", "acquiring"),
        ("agent", "queued"),
    ),
    "coordinator": (
        ("driver", "denoising"),
        ("coordinator", "denoising"),
        ("gcs_server", "saving"),
        ("coordinator", "pulling"),
        ("driver", "acquiring"),
        ("coordinator", "acquiring"),
        ("gcs_server", "acquiring"),
    ),
}
"""The cases that take no minutes, for each side.

A process that doubles its wait before each start is not killed twice in a row: Ray, its driver, the engine."""


@pytest.mark.nightly
@pytest.mark.parametrize("side", CELLS)
def test_memory_is_released_for_any_killed_process_at_any_time(
    cluster_pool: Pool, side: str, capsys: pytest.CaptureFixture[str]
):
    """CI has a job from the library to its file in a whole pool, and these tests:

    - `tests/e2e/video/test_ray.py::test_a_job_under_ray_from_its_actor_to_its_clip_and_every_way_to_be_killed`
    - `tests/e2e/video/test_node.py::test_the_lease_is_released_for_any_killed_process_at_any_time`
    - `tests/e2e/video/test_node.py::test_a_killed_agent_takes_the_worker_along_and_its_successor_gives_the_lease_back`
    - `tests/e2e/video/test_link.py::test_a_coordinator_lends_watches_fetches_and_acknowledges_over_the_link`
    - `tests/contract/test_video_controller.py::test_this_process_begins_again_and_finds_its_jobs`
    - `tests/contract/test_video_controller.py::test_returning_node_without_its_job_fails_it`
    - `tests/abuse/link/test_video_member.py::test_the_coordinator_of_a_pool_that_makes_videos_runs_no_ray`
    """
    with chain(cluster_pool, PORTS) as one:
        nobody_else_is_let_in(one)
        outcomes = [one.kill(victim, phase) for victim, phase in CELLS[side]]
        if side == "coordinator":  # as in an upgrade: leases stay, and the job completes
            outcomes.append(one.kill("coordinator", "loading", signal.SIGTERM))
        assert one.chats()
    with capsys.disabled():
        print("\n" + table(outcomes))
    assert {phase for _, phase in CELLS[side]} <= set(PHASES)
    for outcome in outcomes:
        assert outcome.end == expected(outcome.victim, outcome.phase), outcome
        assert outcome.back is None or outcome.back < BACK, outcome


def nobody_else_is_let_in(one: Chain) -> None:
    """Check that Ray listens on loopback alone, at the ports of the manual, and that the coordinator has no Ray."""
    assert one.pool.coordinator is not None
    assert listening(one.pool.coordinator) == set()
    found = listening(one.pool.nodes["a"])
    assert found
    assert all(ipaddress.ip_address(host).is_loopback for host, _ in found), found
    assert all(PORTS <= port < PORTS + 60 for _, port in found)


def listening(process: Process) -> set[tuple[str, int]]:
    """Return the addresses and TCP ports on which the processes below one listen."""
    found = set[tuple[str, int]]()
    for child in process.children():
        with suppress(psutil.Error):
            found |= {
                (one.laddr.ip.removeprefix("::ffff:"), one.laddr.port)
                for one in child.net_connections("tcp")
                if one.status == psutil.CONN_LISTEN
            }
    return found
