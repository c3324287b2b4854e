"""Pulls whose processes end without notice: SIGKILL at random points, on isolated hosts.

Each round pulls a new repository and kills one process. The pull must end on all nodes, with at most one piece fetched
twice for each kill. The points differ each day. MACPOOL_KILL_ROUNDS=20 makes 20 rounds.
"""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.effort import SEED
from tests.support.cluster.hosts import Hosts, unsupported
from tests.support.hub.pull_lab import NAMES, PADDING, TINY, PullLab, count_descriptors, kill
from tests.support.processes import Process, pool, until
from wire.models.files import PIECE_BYTES

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = int(os.environ.get("MACPOOL_KILL_ROUNDS") or 8)
DOWNLOADER, MIRROR = "node.hub.downloader", "node.hub.serving.mirror"
VICTIMS = ("downloader", "mirror", "follower", "agent", "coordinator", "hub")
REPOSITORY_BYTES = 16 * 1024 * 1024
QUERY_BYTES = sum(len(TINY[name]) for name in ("config.json", "tokenizer_config.json")) + 128 * 1024
"""Bytes that the query of a repository reads."""
OVERHEAD = 1.05
"""Received bytes of a host with TLS, TCP and IP, for each byte of a file."""
REPORT_BYTES = 3_000_000
"""Bytes that a host receives in a round for reports and requests."""


@pytest.fixture(scope="module")
def lab() -> Iterator[PullLab]:
    reason = unsupported()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="mp-") as name, ExitStack() as stack:
        hosts = stack.enter_context(Hosts(Path(name), 4))
        made = PullLab(hosts, stack.enter_context(pool(Path(name))), stack)
        made.hub.faults.chunk_seconds = 0.01
        made.up()
        made.join(*NAMES)
        yield made


@pytest.mark.nightly
def test_pulls_end_after_kills_and_fetch_at_most_one_piece_twice(lab: PullLab) -> None:
    """CI has these tests:

    - `tests/contract/hub/test_downloader.py::test_pieces_that_are_recorded_before_a_kill_are_not_fetched_again`
    - `tests/contract/hub/test_downloader.py::test_the_end_of_the_agent_ends_the_download`
    - `tests/contract/hub/test_mirror.py::test_a_follower_continues_at_the_hub_when_the_mirror_is_killed`
    - `tests/contract/hub/test_file_orders.py::test_a_killed_process_ends_its_order_as_interrupted`
    - `tests/unit/coordinator/models/test_pull_controller.py::test_a_pull_survives_a_restart_of_the_coordinator`
    - `tests/unit/coordinator/models/test_pull_state.py::test_every_order_of_events_keeps_the_invariants_and_ends`
    """
    chance = random.Random(SEED)
    print(f"seed {SEED}, {ROUNDS} rounds")
    victims = [VICTIMS[(SEED * ROUNDS + number) % len(VICTIMS)] for number in range(ROUNDS)]
    chance.shuffle(victims)
    ports = {name: lab.list_ports(name) for name in NAMES}
    _run_round(lab, "tests/warm", "", 0.0, chance)
    before = _count_all_descriptors(lab)
    for number, victim in enumerate(victims):
        began, point = time.monotonic(), chance.uniform(0.05, 0.9)
        text = _run_round(lab, f"tests/round{number}", victim, point, chance)
        print(f"round {number}: {victim} at {point:.2f}: {text}, {time.monotonic() - began:.1f} s", flush=True)
    until(lambda: {name: lab.list_ports(name) for name in NAMES} == ports, 90, "no mirror listens")
    until(lambda: all(now <= then for now, then in zip(_count_all_descriptors(lab), before, strict=True)), 30, "closed")


def _run_round(lab: PullLab, repo: str, victim: str, point: float, chance: random.Random) -> str:
    files = {**TINY, PADDING: chance.randbytes(REPOSITORY_BYTES)}
    size = sum(map(len, files.values()))
    manifest = lab.hub.add(repo, files)
    received = {name: lab.count_received(name) for name in NAMES}
    sent = lab.hub.sent_bytes
    pull = lab.request("POST", "/api/v1/pulls", {"repo": repo, "all": True})["pull"]["id"]
    if victim:
        until(lambda: _measure_progress(lab, pull) >= point, 60, f"{point:.2f} of the pull")
        _kill(lab, pull, victim)
    ended = until(lambda: _find_end(lab, pull), 120, f"the pull ends after the end of {victim}")
    states = {node["name"]: node["state"] for node in ended["nodes"]}
    assert states == dict.fromkeys(NAMES, "completed"), ended
    for name in NAMES:
        folder = lab.get_repository(name, repo)
        snapshot = folder / "snapshots" / manifest.commit
        assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == files
        assert sorted(path.name for path in folder.iterdir()) == ["blobs", "refs", "snapshots"]
        assert lab.list_unfinished(name) == []
    again = lab.hub.sent_bytes - sent - size - QUERY_BYTES
    excess = {name: lab.count_received(name) - received[name] - size * OVERHEAD - REPORT_BYTES for name in NAMES}
    text = f"hub {again / 2**20:.1f} MiB twice, nodes {max(excess.values()) / 2**20:.1f}"
    assert again <= PIECE_BYTES * bool(victim), text
    assert max(excess.values()) <= PIECE_BYTES * bool(victim), text
    lab.hub.remove(repo)
    return text


def _measure_progress(lab: PullLab, pull: str) -> float:
    """Return the share of the files that the nodes have on average."""
    nodes = lab.request("GET", f"/api/v1/pulls/{pull}")["pull"]["nodes"]
    return sum(node["done"] / (node["total"] or 1) for node in nodes) / len(nodes)


def _find_end(lab: PullLab, pull: str) -> dict[str, Any] | None:
    found = lab.request("GET", f"/api/v1/pulls/{pull}")["pull"]
    return found if found["state"] != "pulling" else None


def _kill(lab: PullLab, pull: str, victim: str) -> None:
    """End a process of a pull without notice, and start it again as a service manager would."""
    nodes = lab.request("GET", f"/api/v1/pulls/{pull}")["pull"]["nodes"]
    sources = {node["name"]: node["source"] for node in nodes}
    holder = next((name for name in NAMES if sources[name] == "hub"), NAMES[0])
    follower = next((name for name in NAMES if sources[name] == "mirror"), NAMES[-1])
    match victim:
        case "downloader" | "follower":
            for child in lab.list_children(holder if victim == "downloader" else follower, DOWNLOADER):
                kill(child)
        case "mirror":
            for name in NAMES:
                for child in lab.list_children(name, MIRROR):
                    kill(child)
        case "agent":
            lab.pool.nodes[holder].kill()
            lab.join(holder)
        case "coordinator":
            coordinator = lab.pool.coordinator
            assert coordinator is not None
            coordinator.kill()
            lab.up()
        case _:
            lab.stop_hub()
            time.sleep(1.0)
            lab.start_hub()


def _list_processes(lab: PullLab) -> list[Process]:
    assert lab.pool.coordinator is not None
    return [lab.pool.coordinator, *(lab.pool.nodes[name] for name in NAMES)]


def _count_all_descriptors(lab: PullLab) -> list[int]:
    return [count_descriptors(process.pid) for process in _list_processes(lab)]
