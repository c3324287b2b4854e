"""The broker's process; it drives a true Ray in tests/e2e/test_videos.py."""

import asyncio
import socket
import subprocess
import sys
from typing import Any

import pytest

from coordinator.video import broker
from coordinator.video.spoken import Connect, Create, Created, Ear, FromBroker, Kill, NotCreated, Spoken, said
from tests.support.processes import ROOT, environment

RAY = """
import sys, threading, types
ray = sys.modules["ray"] = types.ModuleType("ray")
ray.init = lambda **how: (print("connecting", flush=True), threading.Event().wait())
strategies = sys.modules["ray.util.scheduling_strategies"] = types.ModuleType("s")
sys.modules["ray.util"] = types.ModuleType("u")
strategies.NodeAffinitySchedulingStrategy = object
from coordinator.video import broker
broker.main()
"""


@pytest.mark.timeout(60)
def test_a_broker_that_cannot_connect_yet_ends_with_its_coordinator():
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", RAY, str(theirs.fileno())], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
    with ours, process:
        try:
            ours.sendall(said(Connect("127.0.0.1:1", "127.0.0.1")))
            assert process.stdout is not None
            assert process.stdout.readline() == b"connecting\n"
            ours.close()
            assert process.wait(20) == 3
        finally:
            process.kill()


class Told:
    """What a broker says, in the place of its socket."""

    def __init__(self) -> None:
        self.said: list[Spoken] = []
        self._ear = Ear(FromBroker)

    def write(self, data: bytes) -> None:
        self.said += self._ear.feed(data)


def one_of(monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> tuple[broker.Broker, Told]:
    """Give a broker whose Ray fails so often before it starts an actor."""
    left = list(failures)

    async def made(wanted: Create) -> None:
        if left:
            raise left.pop(0)

    async def killed(self: broker.Broker, lease: str) -> None:
        return

    told: Any = Told()
    monkeypatch.setattr(broker, "_made", made)
    monkeypatch.setattr(broker, "AGAIN", 0.0)
    monkeypatch.setattr(broker.Broker, "_kill", killed)
    return broker.Broker(told), told


WANTED = Create("lease_1", 1, "ray", "/f", 1.0, 30.0)
UNHEARD = broker.ray.exceptions.ActorUnschedulableError("no such node")


async def test_a_node_that_ray_has_not_heard_of_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    one, told = one_of(monkeypatch, UNHEARD, UNHEARD)
    await one._create(WANTED)
    assert told.said == [Created("lease_1")]
    one, told = one_of(monkeypatch, ValueError("no"))
    await one._create(WANTED)
    assert told.said == [NotCreated("lease_1", "ValueError: no")], "what is wrong by itself is not tried again"


async def test_nobody_goes_on_to_ask_for_an_actor_that_nobody_wants(monkeypatch: pytest.MonkeyPatch):
    one, told = one_of(monkeypatch, *[UNHEARD] * 10_000)
    one._spawn(WANTED)
    (creating,) = one._tasks
    await asyncio.sleep(0)
    one._spawn(Kill("lease_1"))
    with pytest.raises(asyncio.CancelledError):
        await creating
    await asyncio.gather(*one._tasks)
    assert (told.said, one._creating) == ([], {})
