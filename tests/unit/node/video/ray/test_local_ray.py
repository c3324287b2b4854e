"""The Ray of this Mac from the agent's side; a real one runs in tests/e2e/video/test_ray.py."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from node.settings import WorkerSettings
from node.video.ray import local_ray
from node.video.ray.driver_link import (
    ConnectDriver,
    CreateActor,
    DriverConnected,
    KillActor,
    MessageReader,
    ToDriver,
    encode_message,
)
from node.video.ray.local_ray import LocalRay
from node.video.ray.ray_process import SESSIONS
from tests.support.processes import until
from wire.units import GIB

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


PROGRAM = """#!{python} -SE
import os, socket, sys

module, words = sys.argv[3], sys.argv[4:]
if module == "node.video.ray.ray_child":
    os.chmod({sessions!r}, 0o777)  # as Ray does
    with open({folder!r} + "/words", "w") as file:
        file.write("\\n".join(words))
    print("Ray runtime started", flush=True)
    sys.stdin.read()
else:
    agent = socket.socket(fileno=int(words[0]))
    agent.sendall({connected!r})
    with open({folder!r} + "/orders", "ab", buffering=0) as file:
        while data := agent.recv(65536):
            file.write(data)
"""
"""Interpreter in whose place Ray and its driver run: Ray is up at once, and the driver connects and stores its orders.
"""


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObservedRay:
    program = tmp_path / "python"
    program.write_text(
        PROGRAM.format(
            python=sys.executable,
            sessions=str(tmp_path / "ray" / SESSIONS),
            folder=str(tmp_path),
            connected=encode_message(DriverConnected()),
        )
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
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
    assert (one.allowed, one.news.is_set()) == (True, True), "the node reports it"
    one.news.clear()
    one.set_allowed(on=True)
    await turns()
    assert not one.news.is_set()
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


@pytest.mark.slow
async def test_rests_of_an_earlier_ray_are_removed_and_the_driver_gets_address_and_orders(
    one: ObservedRay, tmp_path: Path
):
    sessions, outside = tmp_path / "ray" / SESSIONS, tmp_path / "outside"
    for folder in (sessions / "session_1" / "logs", sessions / "kept", outside):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (sessions / "session_latest").symlink_to(outside)
    (sessions / "ray_current_cluster").write_text("127.0.0.1:6486")
    one.start_actor("lease_1", 3, "/leases/1", 3 * GIB)
    one.set_offered(wanted=True)
    one.set_allowed(on=True)
    await changed(one, None)
    assert sorted(path.name for path in sessions.iterdir()) == ["kept", "session_latest"]
    assert (outside / "file").exists()
    orders, expected = (
        tmp_path / "orders",
        [
            ConnectDriver("127.0.0.1:6486"),
            CreateActor("lease_1", 3, "/leases/1", 3.0, WorkerSettings().start_timeout_seconds),
        ],
    )
    await asyncio.to_thread(until, lambda: len(read_orders(orders)) == len(expected), 20)
    assert read_orders(orders) == expected
    words = (tmp_path / "words").read_text().splitlines()
    assert {"start", "--block", "--head", "--port=6486", f"--temp-dir={sessions}"} <= set(words)
    one.end_actor("lease_1")
    await asyncio.to_thread(until, lambda: len(read_orders(orders)) == 3, 20)
    assert read_orders(orders)[2:] == [KillActor("lease_1")]
    await one.stop()
    assert (one.pid, one.allowed, one.active) == (None, False, False)


def read_orders(file: Path) -> list[ConnectDriver | CreateActor | KillActor]:
    return MessageReader(ToDriver).feed(file.read_bytes()) if file.exists() else []


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
