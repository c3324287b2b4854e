"""`cluster pull` on isolated hosts, as a user types it: HTTPS, default ports, one cache for each node."""

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster.engine_pool import GREETING, HELLO
from tests.support.cluster.hosts import Hosts, run, unsupported
from tests.support.hub.pull_lab import NAMES, PADDING, TINY, PullLab
from tests.support.processes import environment, pool, until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(240)]

REPO = "tests/tiny"
PADDING_BYTES = 24_000_000
SIZE = sum(map(len, TINY.values())) + PADDING_BYTES


@pytest.fixture(scope="module")
def lab() -> Iterator[PullLab]:
    reason = unsupported()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="mp-") as name, ExitStack() as stack:
        hosts = stack.enter_context(Hosts(Path(name), 4))
        made = PullLab(hosts, stack.enter_context(pool(Path(name))), stack)
        made.up()
        made.join(*NAMES, engine="mlx")
        yield made


def find_snapshots(lab: PullLab, repo: str) -> dict[str, dict[str, bytes]]:
    """Return the files of a repository on each node, as the hub's library finds them without a network."""
    code = (
        "import json, sys; from huggingface_hub import snapshot_download as find; "
        "print(json.dumps([find(sys.argv[1], cache_dir=one, local_files_only=True) for one in sys.argv[2:]]))"
    )
    caches = [str(lab.get_home(name) / "hub") for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-c", code, repo, *caches], capture_output=True, text=True, env=environment(), check=True
    )
    folders = [Path(folder) for folder in json.loads(done.stdout)]
    return {
        name: {path.name: path.read_bytes() for path in folder.iterdir()}
        for name, folder in zip(NAMES, folders, strict=True)
    }


def test_pull_all_gets_a_model_once_and_the_same_everywhere(lab: PullLab) -> None:
    files = {**TINY, PADDING: random.Random(27).randbytes(PADDING_BYTES)}
    lab.hub.add(REPO, files)
    ports = {name: lab.list_ports(name) for name in NAMES}
    received = {name: lab.count_received(name) for name in NAMES}
    sent = lab.hub.sent_bytes
    assert lab.type_command("pull", REPO, "--all", "--dry-run").returncode == 0
    queried = lab.hub.sent_bytes - sent
    assert 0 < queried < SIZE / 100
    assert {lab.get_repository(name, REPO).exists() for name in NAMES} == {False}, "a dry run changes nothing"

    done = lab.type_command("pull", REPO, "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    answer, node = lab.chat(REPO, HELLO)
    assert (answer, node in NAMES) == (GREETING, True)
    assert lab.hub.sent_bytes - sent == 2 * queried + SIZE, (
        "each byte of the repository once, and the headers of the query"
    )
    assert done.stdout.count("completed") == len(NAMES)
    copies = lab.list_copies(REPO)
    assert {name: copy["identity"] for name, copy in copies.items()} == dict.fromkeys(NAMES, "content")
    assert find_snapshots(lab, REPO) == dict.fromkeys(NAMES, files)
    assert [lab.list_unfinished(name) for name in NAMES] == [[], [], []]
    until(lambda: {name: lab.list_ports(name) for name in NAMES} == ports, 10, "the mirror's port is closed")
    for name in NAMES:
        assert lab.count_received(name) - received[name] < 1.1 * SIZE + 3_000_000, "the kernel's count, with reports"

    again = lab.type_command("pull", REPO, "--all")
    assert (again.returncode, again.stdout.count("completed, already had the files")) == (0, len(NAMES)), again.stderr
    assert lab.hub.sent_bytes - sent == 3 * queried + SIZE


@pytest.mark.nightly
def test_a_node_that_was_away_gets_the_commit_of_its_pull_although_the_hub_has_a_newer_one(lab: PullLab) -> None:
    """CI has these tests:

    - `tests/unit/coordinator/models/test_pull_state.py::test_a_node_that_links_later_follows_too`
    - `tests/unit/coordinator/models/test_pull_state.py::test_restore_continues_where_the_pull_was`
    """
    repo = "tests/changing"
    commits = [lab.hub.add(repo, {**TINY, PADDING: bytes([number]) * 100_000}).commit for number in range(3)]
    _publish(lab, repo, 0)
    assert lab.type_command("pull", repo, "--all").returncode == 0

    assert lab.pool.nodes["three"].stop() == 0
    _publish(lab, repo, 1)
    started = lab.request("POST", "/api/v1/pulls", {"repo": repo, "all": True})["pull"]
    until(lambda: _count_completed(lab, started["id"]) == 2, 60, "two nodes have the second commit")
    _publish(lab, repo, 2)
    lab.join("three", engine="mlx")
    before = lab.hub.sent_bytes
    until(lambda: _count_completed(lab, started["id"]) == 3, 60, "the node that was away has the second commit")
    assert lab.hub.sent_bytes == before, "from the mirror"
    assert _read_commits(lab, repo) == dict.fromkeys(NAMES, commits[1])
    assert {copy["identity"] for copy in lab.list_copies(repo).values()} == {"content"}

    assert lab.type_command("pull", repo, "--node", "one").returncode == 0
    assert _read_commits(lab, repo) == {"one": commits[2], "two": commits[1], "three": commits[1]}
    copies = until(lambda: _find_difference(lab, repo), 10, "the difference is shown")
    assert "differs" in {copy["identity"] for copy in copies.values()}
    assert "DIFFERS" in lab.type_command("model", "files").stdout


@pytest.mark.nightly
def test_nodes_that_cannot_reach_each_other_get_the_files_through_the_coordinator(lab: PullLab) -> None:
    """CI has these tests:

    - `tests/contract/hub/test_relay.py::test_a_node_gets_all_files_through_the_coordinator`
    - `tests/contract/hub/test_relay.py::test_relay_forwards_both_ways_and_closes_both_connections`
    """
    repo = "tests/apart"
    lab.hub.add(repo, {**TINY, PADDING: random.Random(28).randbytes(12_000_000)})
    size = sum(map(len, TINY.values())) + 12_000_000
    two, three = lab.get_host("two"), lab.get_host("three")
    for host, other in ((two, three), (three, two)):
        run("ip", "-n", host.namespace, "route", "add", "prohibit", f"{other.ip}/32")
    try:
        done = lab.type_command("pull", repo, "--node", "two", "--node", "three")
    finally:
        for host, other in ((two, three), (three, two)):
            run("ip", "-n", host.namespace, "route", "del", "prohibit", f"{other.ip}/32")
    assert done.returncode == 0, done.stdout + done.stderr
    (pull,) = [pull for pull in lab.request("GET", "/api/v1/pulls")["pulls"] if pull["repo"] == repo]
    assert {node["fetched"] for node in pull["nodes"]} == {size}
    assert {node["source"] for node in pull["nodes"]} == {"hub", "mirror"}, "one node downloaded from the hub"
    copies = lab.list_copies(repo)
    assert {name: copy["identity"] for name, copy in copies.items()} == {"two": "content", "three": "content"}


@pytest.mark.nightly
def test_a_loaded_model_is_not_removed(lab: PullLab) -> None:
    """CI has this test:

    - `tests/contract/hub/test_file_orders.py::test_a_loaded_model_is_not_removed`
    """
    repo = "tests/loaded"
    lab.hub.add(repo, TINY)
    assert lab.type_command("pull", repo, "--node", "two").returncode == 0
    assert lab.chat(repo, HELLO) == (GREETING, "two")
    removed = lab.type_command("model", "rm", repo, "--yes")
    assert (removed.returncode, f"two: {repo} is loaded: unload it first" in removed.stderr) == (6, True), (
        removed.stderr
    )
    assert lab.get_repository("two", repo).exists()


@pytest.mark.nightly
def test_a_full_disk_ends_the_pull_on_its_node_only(lab: PullLab) -> None:
    """CI has these tests:

    - `tests/unit/coordinator/models/test_pull_state.py::test_a_full_disk_ends_the_pull_on_that_node_only`
    - `tests/contract/hub/test_downloader.py::test_the_reserve_of_the_disk_is_kept_while_pieces_arrive`
    """
    disk = str(lab.get_home("three"))
    Path(disk).mkdir(exist_ok=True)
    run(*lab.get_host("three").enter(), "mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk)
    try:
        until(lambda: lab.pool.node("three")["disk"]["total"] == 64 * 2**20, 60, "the small disk is reported")
        _pull_to_full_disks(lab, disk)
    finally:
        run(*lab.get_host("three").enter(), "umount", "--lazy", disk)


def _pull_to_full_disks(lab: PullLab, disk: str) -> None:
    lab.hub.add("tests/large", {**TINY, PADDING: bytes(70_000_000)})
    refused = lab.type_command("pull", "tests/large", "--node", "three")
    text = "three: needs 69.3 MiB of disk, has 64.0 MiB free and keeps 3.2 MiB"
    assert (refused.returncode, text in refused.stderr) == (6, True), refused.stderr

    lab.hub.add("tests/filling", {**TINY, PADDING: bytes(30_000_000)})
    lab.hub.faults.chunk_seconds = 0.02
    pull = lab.request("POST", "/api/v1/pulls", {"repo": "tests/filling", "all": True})["pull"]["id"]
    until(lambda: lab.list_children("three", "node.hub.downloader"), 60, "the node with the small disk downloads")
    run(*lab.get_host("three").enter(), "fallocate", "-l", "50M", f"{disk}/other")
    lab.hub.faults.chunk_seconds = 0.0
    ended = lab.type_command("pulls", "wait", pull)
    assert ended.returncode == 6, ended.stdout
    assert re.search(
        r"three: failed: .* MiB free and keeps 3.2 MiB, and the download needs .* more: remove files",
        ended.stdout + ended.stderr,
    ), ended.stdout + ended.stderr
    assert "tests/filling is not on three: see the messages above" in ended.stderr
    assert ended.stdout.count(": completed, ") == 2


def _publish(lab: PullLab, repo: str, number: int) -> None:
    lab.hub.add(repo, {**TINY, PADDING: bytes([number]) * 100_000})


def _count_completed(lab: PullLab, pull: str) -> int:
    nodes = lab.request("GET", f"/api/v1/pulls/{pull}")["pull"]["nodes"]
    return sum(node["state"] == "completed" for node in nodes)


def _read_commits(lab: PullLab, repo: str) -> dict[str, str]:
    return {name: (lab.get_repository(name, repo) / "refs" / "main").read_text() for name in NAMES}


def _find_difference(lab: PullLab, repo: str) -> dict[str, dict[str, object]]:
    copies = lab.list_copies(repo)
    return copies if any(copy["identity"] == "differs" for copy in copies.values()) else {}
