"""The driver's process; it drives a real Ray in tests/e2e/test_video_ray.py."""

import asyncio
import socket
import subprocess
import sys
from typing import Any

import pytest

from node.video import driver
from node.video.driver_link import (
    Connect,
    Create,
    Created,
    DriverMessage,
    FromDriver,
    Kill,
    MessageReader,
    NotCreated,
    encode,
)
from tests.support.processes import ROOT, environment

RAY = """
import sys, threading, types
ray = sys.modules["ray"] = types.ModuleType("ray")
ray.init = lambda **how: (print("connecting", flush=True), threading.Event().wait())
from node.video import driver
driver.main()
"""


@pytest.mark.timeout(60)
def test_a_driver_that_cannot_connect_yet_ends_with_its_agent():
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", RAY, str(theirs.fileno())], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
    with ours, process:
        try:
            ours.sendall(encode(Connect("127.0.0.1:1")))
            assert process.stdout is not None
            assert process.stdout.readline() == b"connecting\n"
            ours.close()
            assert process.wait(20) == driver.CLOSED
        finally:
            process.kill()


class Sent:
    """What a driver sends, in the place of its socket."""

    def __init__(self) -> None:
        self.messages: list[DriverMessage] = []
        self._reader = MessageReader(FromDriver)

    def write(self, data: bytes) -> None:
        self.messages += self._reader.feed(data)


def one_of(monkeypatch: pytest.MonkeyPatch, create: Any) -> tuple[driver.Driver, Sent, list[str]]:
    """Return a driver with another start of an actor, what it sends, and the leases whose actor it ends."""
    sent: Any = Sent()
    killed: list[str] = []

    async def kill(self: driver.Driver, lease: str) -> None:
        killed.append(lease)

    monkeypatch.setattr(driver, "_create", create)
    monkeypatch.setattr(driver.Driver, "_kill", kill)
    return driver.Driver(sent), sent, killed


WANTED = Create("lease_1", 1, "/f", 1.0, 30.0)


async def test_an_actor_that_starts_is_told_and_one_that_does_not_is_ended_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
):
    async def create(wanted: Create) -> None:
        if wanted.lease == "lease_2":
            raise ValueError("no")
        if wanted.lease == "lease_3":
            await asyncio.Event().wait()

    one, sent, killed = one_of(monkeypatch, create)
    for wanted in (WANTED, Create("lease_2", 1, "/f", 1.0, 30.0), Create("lease_3", 1, "/f", 1.0, 0.01)):
        await one._create(wanted)
    assert sent.messages == [
        Created("lease_1"), NotCreated("lease_2", "ValueError: no"),
        NotCreated("lease_3", "Ray started no actor within 0 s"),
    ]  # fmt: skip
    assert killed == ["lease_2", "lease_3"]


async def test_a_start_ends_once_its_lease_has_ended(monkeypatch: pytest.MonkeyPatch):
    async def create(wanted: Create) -> None:
        await asyncio.Event().wait()

    one, sent, killed = one_of(monkeypatch, create)
    one._spawn(WANTED)
    (creating,) = one._tasks
    await asyncio.sleep(0)
    one._spawn(Kill("lease_1"))
    with pytest.raises(asyncio.CancelledError):
        await creating
    await asyncio.gather(*one._tasks)
    assert (sent.messages, one._creating, killed) == ([], {}, ["lease_1"])
