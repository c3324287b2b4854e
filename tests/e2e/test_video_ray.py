"""The actor and this node's Ray: a job under a real head, and what is left when either is killed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from node.leases import Phase
from node.memory.sensor import members
from tests.support.processes import gone, until
from tests.support.ray_head import Head, free_ports, ray_head
from tests.support.standin import standin
from tests.support.studio import LONG, Node, flat
from wire.frames import LeaseGranted, RayHead

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with ray_head(tmp_path_factory.mktemp("head")) as running:
        yield running


async def test_a_job_under_ray_from_its_actor_to_its_clip_and_every_way_to_be_killed(
    head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stand = {"worker__environments": str(standin(tmp_path).environments)}
    node = Node(tmp_path / "node", flat(**stand), attends=False)
    raylet, lender = node.studio.raylet, node.lender
    try:
        await node.start()
        assert raylet.node == ""
        raylet.follow(head.frame(free_ports(60)))
        await node.until(lambda: raylet.node or raylet.cause)
        assert raylet.cause == ""
        assert raylet.pid is not None
        family = [psutil.Process(raylet.pid), *psutil.Process(raylet.pid).children(recursive=True)]
        mine = sum(one.memory_full_info().uss for one in family)
        token = (tmp_path / "node" / "node" / "video" / "ray" / "token").stat()
        assert token.st_mode & 0o777 == 0o600
        assert head.token not in " ".join(word for one in family for word in one.cmdline())
        driver = head.driver()

        node.ask()
        granted = await node.answer()
        assert isinstance(granted, LeaseGranted)
        driver.begin(raylet.node, granted)
        assert (await node.ended()).code == "completed"
        assert driver.order("wait", "l-1") == {"why": "exit 0"}
        driver.order("kill", "l-1")

        times = {}
        for lease, how in (("l-2", "ray.kill"), ("l-3", "SIGKILL of the actor"), ("l-4", "SIGKILL of Ray")):
            before = node.ceiling
            node.ask(job=LONG, lease=lease)
            granted = await node.answer(lease)
            assert isinstance(granted, LeaseGranted)
            driver.begin(raylet.node, granted)
            worker = await node.working(Phase.DENOISING, lease)
            began = time.monotonic()
            actor = psutil.Process(worker).parent()
            assert actor is not None
            if how == "ray.kill":
                driver.order("kill", lease)
            elif how == "SIGKILL of the actor":
                actor.kill()
            else:
                os.kill(raylet.pid, signal.SIGKILL)
            ended = await node.ended(lease)
            times[how] = time.monotonic() - began
            assert ended.code == "worker_lost"
            assert members(worker) == ()
            assert (node.limiter.leases, node.ceiling) == (0, before)
        await node.until(lambda: raylet.node and raylet.pid != family[0].pid)
        assert node.supervisor.state.restarts == 0, "the engine never noticed"
        with capsys.disabled():
            print(f"\nRay on a node: {mine >> 20} MiB of its own in {len(family)} processes", end="")
            for how, seconds in times.items():
                print(f"\n{how}: lease back after {seconds:.2f} s", end="")
        last = psutil.Process(raylet.pid).children(recursive=True)
        raylet.follow(RayHead(""))
        await node.until(lambda: raylet.node == "" and raylet.pid is None)
        gone(last)
    finally:
        await node.stop()
    assert lender.states()[0].size == 0


async def test_a_node_without_video_starts_no_ray_and_one_that_cannot_follow_says_why(head: Head, tmp_path: Path):
    node = Node(tmp_path / "node", flat(models__folders=""))
    raylet = node.studio.raylet
    try:
        await node.start()
        raylet.follow(head.frame(free_ports(60)))
        assert raylet._task is None, "nothing is even tried"
        assert node.lender.video().ready is False
        raylet.offer(wanted=True)
        raylet.follow(RayHead(head.address, head.token, "127.0.0.1", version="1.0"))
        await node.until(lambda: raylet.cause)
        assert "they have to be the same" in raylet.cause
        assert raylet.pid is None
    finally:
        await node.stop()


def test_ray_here_ends_with_its_life_line(tmp_path: Path):
    with ray_head(tmp_path) as running:
        launcher = running.processes[0]
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert family
        assert launcher.stdin is not None
        launcher.stdin.close()
        until(lambda: launcher.poll() is not None, what="the end of the launcher")
        gone(family)
