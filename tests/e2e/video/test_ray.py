"""A job under a real Ray on its node, and the processes left when Ray, the actor or the driver is killed."""

import asyncio
import ipaddress
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from node.memory.sensor import list_group_members
from node.video.lease_rules import LeasePhase
from tests.support.processes import SHORT_FOLDER, get_ray_ports, gone, until
from tests.support.video.standin import standin
from tests.support.video.studio import LONG, Node, flat
from wire.frames import Frame, LeaseGranted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PORTS = get_ray_ports(1)


def settings(folder: Path, ports: int) -> dict[str, object]:
    return {
        "worker__environments": str(standin(folder).environments),
        "worker__ray_ports": ports,
        "worker__ray_folder": f"{SHORT_FOLDER.name}/ray",
    }


def drivers(node: Node) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if "node.video.ray.driver" in process.cmdline() and str(node.folder) in process.cwd():
                found.append(process)
    return found


async def test_a_job_under_ray_from_its_actor_to_its_clip_and_every_way_to_be_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stand = settings(tmp_path, PORTS)
    node = Node(tmp_path / "node", flat(**stand), attends=False)
    ray = node.studio.ray
    try:
        await node.start()
        assert (ray.node, ray.pid) == ("", None), "no Ray before it is allowed"
        ray.set_allowed(on=True)
        await node.until(lambda: ray.node or ray.cause)
        assert ray.cause == ""
        assert ray.pid is not None
        family = [psutil.Process(ray.pid), *psutil.Process(ray.pid).children(recursive=True)]
        (driver,) = await node.until(lambda: drivers(node))
        mine = sum(one.memory_full_info().uss for one in [*family, driver])
        token = tmp_path / "node" / "node" / "video" / "ray" / "token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.read_text() not in " ".join(word for one in [*family, driver] for word in one.cmdline())

        node.ask()
        assert (await node.ended()).code == "completed"

        times = {}
        for lease, how in (("l-2", "cancelled"), ("l-3", "SIGKILL of the actor"), ("l-4", "SIGKILL of Ray")):
            before = node.ceiling
            node.ask(job=LONG, lease=lease)
            worker = await node.working(LeasePhase.DENOISING, lease)
            nobody_else_reaches_ray([*family, driver])
            began = time.monotonic()
            actor = psutil.Process(worker).parent()
            assert actor is not None
            if how == "cancelled":
                node.release("cancelled", lease)
            elif how == "SIGKILL of the actor":
                actor.kill()
            else:
                os.kill(ray.pid, signal.SIGKILL)
            ended = await node.ended(lease)
            times[how] = time.monotonic() - began
            assert ended.code == ("cancelled" if how == "cancelled" else "worker_lost")
            assert list_group_members(worker) == ()
            assert (node.limiter.leases, node.ceiling) == (0, before)
            until(lambda actor=actor: not actor.is_running(), 20, "the end of the actor")
        await node.until(lambda: ray.node and ray.pid != family[0].pid)
        assert node.supervisor.state.restarts == 0, "the engine never noticed"

        (driver,) = await node.until(lambda: drivers(node))
        node.ask(job=LONG, lease="l-5")
        await node.working(LeasePhase.DENOISING, "l-5")
        driver.kill()
        await node.until(lambda: [one for one in drivers(node) if one.pid != driver.pid])
        assert [one.phase for one in node.lender.list_states() if one.lease == "l-5"] == [LeasePhase.DENOISING]
        node.release("cancelled", "l-5")
        assert (await node.ended("l-5")).code == "cancelled"

        with capsys.disabled():
            print(f"\nRay on a node: {mine >> 20} MiB of its own in {len(family) + 1} processes", end="")
            for how, seconds in times.items():
                print(f"\n{how}: lease back after {seconds:.2f} s", end="")
        last = psutil.Process(ray.pid).children(recursive=True)
        ray.set_allowed(on=False)
        await node.until(lambda: ray.node == "" and ray.pid is None)
        gone(last)
        assert drivers(node) == []
    finally:
        await node.stop()
    assert node.lender.list_states()[0].size == 0


def nobody_else_reaches_ray(family: list[psutil.Process]) -> None:
    """Check that all sockets are on loopback and none answers at an address of the LAN, and that logs and sockets are
    private."""
    sessions = {
        Path(word.partition("=")[2])
        for process in family
        for word in process.cmdline()
        if word.startswith(("--session-dir=", "--session_dir="))
    }
    assert sessions
    assert all(any(not folder.stat().st_mode & 0o077 for folder in session.parents) for session in sessions)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections("tcp"):
                assert ipaddress.ip_address(one.laddr.ip.removeprefix("::ffff:")).is_loopback, (process, one)
    lan = {
        address.address
        for found in psutil.net_if_addrs().values()
        for address in found
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }
    for address in lan:
        with socket.socket() as line:
            line.settimeout(2)
            assert line.connect_ex((address, PORTS + 6)) != 0, address


class NodeWithoutRoomInRay(Node):
    """A node whose Ray cannot start the actor of a granted lease."""

    def _said(self, frame: Frame) -> None:
        super()._said(frame)
        if isinstance(frame, LeaseGranted):
            asyncio.get_running_loop().call_soon(self.lender.handle_failed_start, frame.lease, "Ray has no room")


async def test_an_actor_that_ray_cannot_start_ends_its_lease_at_once(tmp_path: Path):
    stand = {"worker__environments": str(standin(tmp_path).environments)}
    node = NodeWithoutRoomInRay(tmp_path / "node", flat(**stand), attends=False)
    try:
        await node.start()
        node.ask()
        ended = await node.ended()
        assert (ended.code, ended.message) == ("start_failed", "Ray has no room")
        assert node.limiter.leases == 0
    finally:
        await node.stop()


async def test_a_node_without_packages_starts_no_ray_and_one_without_ray_has_a_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    node = Node(tmp_path / "node", flat(models__folders=""))
    ray = node.studio.ray
    try:
        await node.start()
        ray.set_allowed(on=True)
        assert not ray.active, "nothing is even tried"
        assert node.lender.build_video_state().ready is False
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        ray.set_offered(wanted=True)
        await node.until(lambda: ray.cause)
        assert "extra `video`" in ray.cause
        assert ray.pid is None
    finally:
        await node.stop()


@pytest.mark.nightly
async def test_ray_ends_with_its_life_line(tmp_path: Path):
    """CI has these tests:

    - `tests/unit/node/video/ray/test_ray_child.py::test_ray_gets_the_arguments_and_sigterm_at_the_end_of_stdin`
    - `tests/e2e/video/test_ray.py::test_a_job_under_ray_from_its_actor_to_its_clip_and_every_way_to_be_killed`
    """
    stand = settings(tmp_path, PORTS + 200)
    node = Node(tmp_path / "node", flat(**stand), attends=False)
    ray = node.studio.ray
    try:
        await node.start()
        ray.set_allowed(on=True)
        await node.until(lambda: ray.node)
        process = ray._process  # pyright: ignore[reportPrivateUsage]  its life line ends as if the node had died
        assert process is not None
        assert process.stdin is not None
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.stdin.close()
        await process.stdin.wait_closed()
        gone(family)  # this loop is blocked meanwhile, and the node cannot end them
    finally:
        await node.stop()
