"""The driver's process; it drives a real Ray in tests/e2e/video/test_ray.py."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from node.video.ray.driver_link import (
    ActorCreated,
    ActorNotCreated,
    ConnectDriver,
    CreateActor,
    DriverMessage,
    FromDriver,
    KillActor,
    MessageReader,
    encode_message,
)
from tests.support.processes import ROOT, environment

RAY = """
import sys, threading, types
ray = sys.modules["ray"] = types.ModuleType("ray")
ray.init = lambda **how: (print("connecting", flush=True), threading.Event().wait())
from node.video.ray import driver
driver.main()
"""


@pytest.mark.timeout(60)
def test_a_driver_that_cannot_connect_yet_ends_with_its_agent():
    from node.video.ray.driver import CLOSED

    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", RAY, str(theirs.fileno())],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
    with ours, process:
        try:
            ours.sendall(encode_message(ConnectDriver("127.0.0.1:1")))
            assert process.stdout is not None
            assert process.stdout.readline() == b"connecting\n"
            ours.close()
            assert process.wait(20) == CLOSED
        finally:
            process.kill()


@pytest.mark.timeout(60)
def test_a_driver_that_cannot_connect_ends_with_the_cause():
    from node.video.ray.driver import FAILED

    ours, theirs = socket.socketpair()
    fails = RAY.replace("threading.Event().wait()", "1 / 0")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", fails, str(theirs.fileno())],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
    with ours, process:
        try:
            ours.sendall(encode_message(ConnectDriver("127.0.0.1:1")))
            assert process.wait(20) == FAILED
            assert process.stderr is not None
            assert process.stderr.read() == b"ZeroDivisionError: division by zero\n"
        finally:
            process.kill()


class Sent:
    """Records the messages of a driver, in place of its socket."""

    def __init__(self) -> None:
        self.messages: list[DriverMessage] = []
        self._reader = MessageReader(FromDriver)

    def write(self, data: bytes) -> None:
        self.messages += self._reader.feed(data)


class Scene:
    """A driver that reads the messages of a test, with its own start and end of actors.

    The constructor imports Ray. An import at the top would cost every test worker 0.5 s of CPU.
    """

    def __init__(self, create: Callable[[CreateActor], Coroutine[Any, Any, None]]) -> None:
        from node.video.ray.driver import Driver

        self.sent: Any = Sent()
        self.killed: list[str] = []
        self.driver = Driver(self.sent, create, self._kill)
        self._stream = asyncio.StreamReader()
        self._serving = asyncio.create_task(self.driver.serve(self._stream))

    async def _kill(self, lease: str) -> None:
        self.killed.append(lease)

    def ask(self, *messages: CreateActor | KillActor) -> None:
        for message in messages:
            self._stream.feed_data(encode_message(message))

    async def end(self) -> None:
        self._stream.feed_eof()
        await self._serving


WANTED = CreateActor("lease_1", 1, "/f", 1.0, 30.0)


async def turned(wanted: Callable[[], object]) -> None:
    """Run the loop until a condition holds."""
    async with asyncio.timeout(10):
        while not wanted():  # noqa: ASYNC110  what is sent sets no event
            await asyncio.sleep(0)


async def test_a_started_actor_is_reported_and_a_failed_one_is_ended_with_a_cause():
    async def create(wanted: CreateActor) -> None:
        if wanted.lease == "lease_2":
            raise ValueError("n" * 401)
        if wanted.lease == "lease_3":
            await asyncio.Event().wait()

    scene = Scene(create)
    scene.ask(WANTED, CreateActor("lease_2", 1, "/f", 1.0, 30.0), CreateActor("lease_3", 1, "/f", 1.0, 0.01))
    await turned(lambda: len(scene.sent.messages) == 3)
    await scene.end()
    assert scene.sent.messages == [
        ActorCreated("lease_1"),
        ActorNotCreated("lease_2", f"ValueError: {'n' * 400}"),
        ActorNotCreated("lease_3", "Ray started no actor within 0 s"),
    ]
    assert scene.killed == ["lease_2", "lease_3"]


async def test_a_start_ends_once_its_lease_has_ended():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def create(wanted: CreateActor) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    scene = Scene(create)
    scene.ask(WANTED)
    async with asyncio.timeout(10):
        await begun.wait()
        assert scene.driver.creating == {"lease_1"}
        scene.ask(KillActor("lease_1"))
        await ended.wait()
    await turned(lambda: scene.killed)
    await scene.end()
    assert (scene.sent.messages, scene.driver.creating, scene.killed) == ([], set(), ["lease_1"])
