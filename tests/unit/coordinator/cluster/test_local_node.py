"""The supervisor of the coordinator's own node, with real processes."""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from coordinator.cluster import local_node
from coordinator.cluster.local_node import (
    LocalNode,
    LocalNodeElsewhereError,
    check_node_cluster,
    compute_restart_delay,
)
from coordinator.state.store_errors import StoreError
from tests.support.cluster.cluster_port import opened

IDENTITY = "identity/identity.json"


@pytest.mark.parametrize("error", [OSError("too many open files"), StoreError("the state could not be written")])
async def test_a_restart_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    monkeypatch.setattr(local_node, "RESTART_DELAYS_SECONDS", (0.01, 0.03))
    for name in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(name)
    starts, started_again = list[float](), asyncio.Event()

    def create_token() -> str:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) == 2:
            raise error
        if len(starts) == 3:
            started_again.set()
        return "no token"

    (tmp_path / "node").write_text("")  # the program ends at once, because its folder cannot be created
    node = LocalNode(tmp_path, "127.0.0.1:1", ("--set", "engine.kind=scripted"), create_token)
    with capture_logs() as logs:
        await node.start()
        try:
            async with asyncio.timeout(30):
                await started_again.wait()
            assert not node.given_up.is_set()
        finally:
            await node.close()
    assert [(entry["event"], entry["retry_in"]) for entry in logs[:2]] == [
        ("local node ended", 0.02),
        ("local node not started", 0.03),
    ]
    assert starts[2] - starts[1] >= 0.029, "after the pause"


PROGRAM = """#!{python} -IS
import os, sys
folder = sys.argv[sys.argv.index("--state") + 1]
descriptor = int(sys.argv[sys.argv.index("--token-fd") + 1])
with os.fdopen(descriptor) as file, open(folder + "/starts", "a") as starts:
    starts.write(" ".join([file.read(), *sys.argv[1:]]) + "\\n")
with open(folder + "/starts") as starts, open(folder + "/codes") as codes:
    code = codes.read().split()[len(list(starts)) - 1]
if code == "wait":
    sys.stdin.read()
sys.exit(int(code))
"""
"""Takes the place of a node: notes its token and arguments, and ends with the next exit code."""


@pytest.mark.parametrize(
    ("codes", "files", "words"),
    [
        ("2", [], "`cluster config check`"),
        ("4", [IDENTITY], "the next `cluster up` joins it again"),
        ("1 0", ["left"], "`cluster up --local-node` lets it join again"),
        ("4 0 6", [], "`cluster leave` takes it out of the other cluster"),
    ],
)
async def test_a_node_is_restarted_with_a_new_token_unless_a_restart_is_useless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: str, files: list[str], words: str
):
    program = tmp_path / "program"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o700)
    (tmp_path / "codes").write_text(codes)
    for name in files:
        (tmp_path / "node" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "node" / name).touch()
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(local_node, "RESTART_DELAYS_SECONDS", (0.001, 0.002))
    tokens = itertools.count(1)
    node = LocalNode(tmp_path, "[::1]:1", ("--set", "a=b"), lambda: f"token-{next(tokens)}")
    await node.close()
    before = psutil.Process().num_fds()
    with capture_logs() as logs:
        await node.start()
        await asyncio.wait_for(node.given_up.wait(), 30)
        await node.close()
    assert psutil.Process().num_fds() <= before + 1, "the watch of child processes may have one"
    starts = (tmp_path / "starts").read_text().splitlines()
    assert len(starts) == len(codes.split())
    for number, start in enumerate(starts, 1):
        token, *arguments = start.split()
        assert token == f"token-{number}"
        assert arguments[:3] == ["-P", "-m", "node.run"]
        assert [arguments[arguments.index("--url") + 1], *arguments[-3:]] == [
            "[::1]:1",
            "--lifeline",
            "--set",
            "a=b",
        ]
    assert words in logs[-1]["what"]


async def test_the_wait_for_the_node_ends_with_its_first_answer_or_with_the_wait_for_it(tmp_path: Path):
    async with opened(tmp_path) as port:
        who, file = port.member("studio"), tmp_path / "local" / "node" / IDENTITY
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"node": who.node}))
        for ends in ("given up", "stopped", "late", "ready"):
            node, stop = LocalNode(tmp_path / "local", "127.0.0.1:1", (), lambda: ""), asyncio.Event()
            others = asyncio.all_tasks()
            seconds = 0.01 if ends == "late" else 30.0
            waiting = asyncio.create_task(node.wait_until_ready(port.application.registry, stop, seconds))
            await asyncio.sleep(0)
            assert not waiting.done()
            if ends == "ready":
                await port.link(who)
            elif ends == "given up":
                node.given_up.set()
            elif ends == "stopped":
                stop.set()
            assert await asyncio.wait_for(waiting, 30) is (ends == "ready")
            await asyncio.sleep(0)
            assert asyncio.all_tasks() <= others, "no wait is left"


@pytest.mark.parametrize(
    ("identity", "cluster", "words"),
    [
        (None, "c1", None),
        ('{"cluster": "c1", "addresses": ["10.0.0.1:8081"]}', "c1", None),
        (
            '{"cluster": "c2", "addresses": ["10.0.0.1:8081", "10.0.0.2:8081"]}',
            "c1",
            "another cluster at 10.0.0.1:8081:",
        ),
        ('{"cluster": "c2", "addresses": null}', "c1", "another cluster:"),
        ('{"cluster": "c2"}', "", "another cluster:"),
        ('{"addresses": []}', "c1", None),
        ("[]", "c1", None),
        ("{", "c1", None),
    ],
)
def test_a_node_of_another_cluster_is_not_started(
    tmp_path: Path, identity: str | None, cluster: str, words: str | None
):
    if identity is not None:
        file = tmp_path / "node" / "identity" / "identity.json"
        file.parent.mkdir(parents=True)
        file.write_text(identity)
    if words is None:
        check_node_cluster(tmp_path, cluster)
    else:
        with pytest.raises(LocalNodeElsewhereError, match=words) as raised:
            check_node_cluster(tmp_path, cluster)
        assert "`cluster leave`" in str(raised.value)


def test_the_delay_before_a_restart_doubles_to_its_maximum_and_is_short_after_a_long_run():
    first, longest = local_node.RESTART_DELAYS_SECONDS
    delays = [compute_restart_delay(first, 60.0)]
    while delays[-1] < longest:
        delays.append(compute_restart_delay(delays[-1]))
    assert delays[:-1] == [first * 2**count for count in range(1, len(delays))]
    assert delays[-1] == longest < 2 * delays[-2]
    assert compute_restart_delay(longest, 60.1) == first
