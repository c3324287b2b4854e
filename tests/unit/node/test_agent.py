"""How the agent looks for its coordinator, against servers that misbehave where it was."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator.authority import Authority
from node.agent import Agent
from node.identity import create, new_request, remember
from node.settings import NodeSettings
from tests.support.enrolment import HARDWARE
from wire.identity import NodeId

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ROUNDS = 4
DIALS = 3
"""Most connections in one round: to the last address, to prove what was found, to use it."""
LEAST_PAUSE = 0.25


def agent_of(folder: Path, authority: Authority, address: str) -> Agent:
    """Make the agent of a node that found its coordinator at `address` the last time."""
    request = new_request("studio")
    certificate = authority.sign(request.csr, NodeId("n1"), "studio")
    identity = create(folder / "identity", request, certificate, authority.cluster, authority.ca, "m1")
    return Agent(remember(identity, address), NodeSettings(), "0", HARDWARE, folder / "log")


@asynccontextmanager
async def running(folder: Path, serve: Serve, *, tls: bool) -> AsyncGenerator[tuple[Agent, asyncio.Task[None]]]:
    """Run an agent whose coordinator's address is served by `serve`."""
    authority = Authority(folder / "authority", time.time)
    context: ssl.SSLContext | None = authority.server_context() if tls else None
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    agent = agent_of(folder, authority, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    task = asyncio.create_task(agent.run())
    try:
        yield agent, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


async def test_a_silent_address_does_not_hold_up_the_end(tmp_path: Path) -> None:
    dialled = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.set()
        while await reader.read(4096):
            pass
        writer.close()

    async with running(tmp_path, silent, tls=False) as (agent, task):
        await asyncio.wait_for(dialled.wait(), 5)
        began = time.monotonic()
        await agent.stop(0.0)
        await asyncio.wait_for(task, 5)
        assert time.monotonic() - began < 1


async def test_a_coordinator_that_hangs_up_is_dialled_with_pauses(tmp_path: Path) -> None:
    dialled = list[float]()
    enough = asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(time.monotonic())
        if len(dialled) == ROUNDS * DIALS:
            enough.set()
        writer.close()

    async with running(tmp_path, hang_up, tls=True):
        await asyncio.wait_for(enough.wait(), 20)
    assert dialled[-1] - dialled[0] > (ROUNDS - 1) * LEAST_PAUSE
