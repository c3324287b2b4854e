"""The Ray of this Mac from the agent's side; a real one runs in tests/e2e/video/test_ray.py."""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from node.settings import WorkerSettings
from node.video.ray import local_ray
from node.video.ray.local_ray import LocalRay

DOCS = Path(__file__).parents[5] / "docs" / "video.md"


def test_the_ports_are_sixty_in_a_row_on_loopback_and_no_secret_is_a_word():
    words = local_ray.build_command(6480, Path("/tmp/mp"), 96)
    said = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    ports = [int(value) for name, value in said.items() if name.endswith("port")]
    assert min(ports) == WorkerSettings().ray_ports == 6480
    assert max(ports) == 6480 + local_ray.PORTS - 1
    assert len(set(ports)) == len(ports) == 9
    assert json.loads(said["resources"]) == {"video_lease_gib": 96}
    assert said["node-ip-address"] == "127.0.0.1"
    assert "--head" in words
    assert "token" not in " ".join(words)
    assert f"{local_ray.PORTS} ports from `worker.ray_ports` (6480)" in DOCS.read_text()


class ObservedRay(LocalRay):
    """Ray of this Mac that sets `news` when it changes."""

    def __init__(self, folder: Path) -> None:
        self.news = asyncio.Event()
        super().__init__(
            WorkerSettings(ray_folder=str(folder / "ray")),
            folder / "files",
            folder / "log",
            1,
            changed=self.news.set,
            failed=lambda lease, why: None,
        )


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObservedRay:
    program = """import os, sys
os.chmod(sys.argv[1], 0o777)  # as Ray does
print("Ray runtime started", flush=True)
sys.stdin.read()"""
    monkeypatch.setattr(local_ray, "build_command", lambda _, own, __: [sys.executable, "-c", program, str(own)])

    def no_driver(self: local_ray.DriverProcess, address: str, variables: Mapping[str, str]) -> None:
        return

    monkeypatch.setattr(local_ray.DriverProcess, "start", no_driver)
    return ObservedRay(tmp_path)


async def changed(one: ObservedRay, than: str | None) -> str:
    """Wait until the node id of this Ray differs from `than` (None: until there is one)."""
    async with asyncio.timeout(20):
        while one.node == than or (than is None and not one.node):
            one.news.clear()
            await one.news.wait()
    return one.node


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_nothing_runs_before_a_node_offers_video_and_is_allowed_to(one: ObservedRay):
    one.set_offered(wanted=True)
    await turns()
    assert (one.pid, one.node, one.active) == (None, "", False)
    one.set_offered(wanted=False)
    one.set_allowed(on=True)
    await turns()
    assert (one.pid, one.node, one.active) == (None, "", False)
    one.set_offered(wanted=True)
    first = await changed(one, None)
    one.set_allowed(on=False)
    assert await changed(one, first) == ""
    await one.stop()


@pytest.mark.slow
async def test_a_job_keeps_the_ray_that_started_it_until_it_is_over(one: ObservedRay):
    one.set_offered(wanted=True)
    one.set_allowed(on=True)
    first = await changed(one, None)
    one.set_has_lease(on=True)
    one.set_allowed(on=False)
    await turns()
    assert one.node == first, "its actor holds the worker"
    one.set_has_lease(on=False)
    assert await changed(one, first) == ""
    one.set_allowed(on=True)
    second = await changed(one, "")
    one.set_has_lease(on=True)
    one.set_has_lease(on=False)
    await turns()
    assert one.node == second, "the end of a job alone replaces nothing"
    await one.stop()


@pytest.mark.slow
async def test_each_start_has_a_new_token_in_a_private_file(one: ObservedRay, tmp_path: Path):
    one.set_offered(wanted=True)
    one.set_allowed(on=True)
    node = await changed(one, None)
    token = tmp_path / "files" / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ray").stat().st_mode & 0o777 == 0o700
    first = token.read_text()
    one.set_allowed(on=False)
    await changed(one, node)
    one.set_allowed(on=True)
    await changed(one, "")
    assert (len(first), first != token.read_text()) == (64, True)
    await one.stop()


async def test_orders_without_a_driver_are_sent_to_the_next_one(tmp_path: Path):
    failed: list[tuple[str, str]] = []
    driver = local_ray.DriverProcess(tmp_path, lambda lease, why: failed.append((lease, why)))
    for lease in ("a", "b", "c"):
        driver.create_actor(local_ray.CreateActor(lease, 1, "/f", 1.0, 9.0))
    driver.kill_actor("c")
    sent: list[bytes] = []

    class Writer:
        def write(self, data: bytes) -> None:
            sent.append(data)

    writer: asyncio.StreamWriter = Writer()  # pyright: ignore[reportAssignmentType]
    driver.handle_message(local_ray.DriverConnected(), writer)
    assert len(sent) == 2
    driver.handle_message(local_ray.ActorCreated("a"), writer)
    driver.handle_message(local_ray.ActorNotCreated("b", "no room"), writer)
    driver.handle_message(local_ray.ActorNotCreated("c", "late"), writer)
    assert (driver.pending, failed) == (set(), [("b", "no room")])
