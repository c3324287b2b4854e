"""The video parts of a node together: when Ray runs, and which orders it gets from leases."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from node.video.ray import local_ray
from node.video.ray.driver_link import CreateActor
from tests.support.video.standin import standin
from tests.support.video.studio import LEASE, Node
from tests.unit.node.video.test_lease_manager import MODEL, settings
from tests.unit.node.video.test_packages import package
from wire.frames import LeaseGranted, LeaseRefused

RAY = """import sys
print("Ray runtime started", flush=True)
sys.stdin.read()"""
"""A program in place of Ray."""


class Orders:
    """Recorded orders to Ray and its driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[int, int]] = []
        """First port and GiB of each start of Ray."""
        self.created: list[CreateActor] = []
        self.killed: list[str] = []

        def build_command(ports: int, folder: Path, gib: int) -> list[str]:
            self.started.append((ports, gib))
            return [sys.executable, "-c", RAY]

        def start(driver: local_ray.DriverProcess, address: str, variables: Mapping[str, str]) -> None:
            return

        monkeypatch.setattr(local_ray, "build_command", build_command)
        monkeypatch.setattr(local_ray.DriverProcess, "start", start)
        monkeypatch.setattr(local_ray.DriverProcess, "create_actor", lambda _, order: self.created.append(order))
        monkeypatch.setattr(local_ray.DriverProcess, "kill_actor", lambda _, lease: self.killed.append(lease))


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Orders:
    return Orders(monkeypatch)


@pytest.fixture
async def node(tmp_path: Path, orders: Orders) -> AsyncIterator[Node]:
    package(tmp_path / "packages" / MODEL)
    standin(tmp_path)
    layer: dict[str, Any] = settings(tmp_path, worker__ray_folder=str(tmp_path / "ray"), worker__ray_ports=31_000)
    made = Node(tmp_path / "node", layer, attends=False, model=MODEL)
    yield made
    await made.stop()


async def test_ray_runs_while_video_is_possible_allowed_and_not_paused(node: Node, orders: Orders) -> None:
    ray = node.studio.ray
    ray.set_allowed(on=True)
    assert not ray.active, "no package was found yet"
    await node.studio.start()
    await node.until(lambda: ray.node)
    assert orders.started == [(31_000, 90)]
    video = node.folder / "node" / "video"
    assert (video / "ray" / "token").is_file()
    assert (video / "leases").is_dir()
    assert (node.folder / "logs" / "ray.log").read_text().startswith("Ray runtime started")
    node.studio.pause("its owner uses it")
    await node.until(lambda: not ray.active)
    assert (ray.pid, ray.node) == (None, "")
    node.studio.pause("")
    await node.until(lambda: ray.node)
    node.studio.offer.set_unready("the environment is gone")
    node.studio.pause("")
    await node.until(lambda: not ray.active)
    assert len(orders.started) == 2


async def test_a_lease_keeps_ray_in_a_pause_and_its_worker_is_an_actor_of_ray(node: Node, orders: Orders) -> None:
    ray = node.studio.ray
    ray.set_allowed(on=True)
    await node.start()
    await node.until(lambda: ray.node)
    node.ask(generation=3)
    granted = await node.frame(LeaseGranted)
    seconds = node.settings.worker.start_timeout_seconds
    assert orders.created == [CreateActor("l-1", 3, granted.folder, LEASE / 2**30, seconds)]
    node.studio.pause("its owner uses it")
    node.ask(lease="l-2")
    assert (await node.frame(LeaseRefused, "l-2")).code == "node_paused"
    assert ray.active
    assert orders.killed == []
    node.studio.pause("")
    pid = ray.pid
    ray.set_allowed(on=False)
    await asyncio.sleep(0.5)
    assert (ray.active, ray.pid) == (True, pid), "the worker of the lease still needs Ray"
    ray.set_allowed(on=True)
    node.studio.pause("its owner uses it")
    node.release("cancelled", generation=3)
    await node.ended()
    assert "l-1" in orders.killed
    await node.until(lambda: not ray.active)
    assert ray.pid is None


async def test_a_stop_ends_the_lease_and_ray(node: Node, orders: Orders) -> None:
    ray = node.studio.ray
    ray.set_allowed(on=True)
    await node.start()
    await node.until(lambda: ray.node)
    node.ask()
    await node.frame(LeaseGranted)
    await node.studio.stop()
    ended = await node.ended()
    assert (ended.code, ray.active, ray.pid, ray.allowed) == ("node_stopping", False, None, False)
    assert orders.killed == ["l-1"]
