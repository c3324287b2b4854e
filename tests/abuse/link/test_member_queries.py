"""A member's certificate allows three queries over the cluster port, each a view of the pool, and nothing else."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.api_client import MEMBER_PATHS
from coordinator.client.errors import UNREACHABLE, CommandError
from coordinator.client.member_client import query_coordinator, read_member_identity
from coordinator.cluster.links.link_budgets import QUERIES_BURST
from node.agent.identity import NodeIdentity, store_address
from tests.support.cluster.cluster_port import Ended, Port, a_report, opened
from tests.support.cluster.loopback_cluster import a_model
from wire.codec import encode
from wire.frames import Denied, FetchChunk, MemberQuery
from wire.identity import PROTOCOL


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def ask(port: Port, who: NodeIdentity, path: str, **other: str) -> Any:
    """Send a query; return its JSON, or the reason of its refusal."""
    line = await port.dial(who)
    line.send(MemberQuery(PROTOCOL, other.get("node", who.node), other.get("machine", who.machine), path))
    found = b""
    while True:
        frame = await line.next()
        if isinstance(frame, Denied):
            return frame.reason
        assert isinstance(frame, FetchChunk)
        found += frame.payload
        if frame.last:
            with pytest.raises(Ended):
                await line.next()
            return json.loads(found)


async def test_member_query_returns_command_data_and_keeps_the_link(port: Port):
    who = port.member("studio")
    link = await port.link(who, a_report(models=tuple(a_model(f"m{number}") for number in range(200))))
    await port.until(lambda: port.state(who) == "ready")
    assert port.application.nodes.queries.paths == MEMBER_PATHS
    nodes = await ask(port, who, "/api/v1/nodes")
    assert [node["name"] for node in nodes["nodes"]] == ["studio"]
    assert len((await ask(port, who, "/api/v1/models"))["models"]) == 200
    assert (await ask(port, who, "/api/v1/status"))["nodes"]["ready"] == 1
    assert port.state(who) == "ready"
    assert not link.reader.at_eof()
    await port.until(lambda: port.application.nodes.server.count_unlinked() == 0)


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/keys",
        "/api/v1/audit",
        "/api/v1/logs",
        "/api/v1/tokens",
        "/api/v1/settings",
        "/api/v1/requests",
        "/api/v1/nodes/studio/cordon",
        "/api/v1/status?x",
        "/API/V1/STATUS",
        "status",
        "",
        "\x1b[2J",
        "../api/v1/status",
    ],
)
async def test_a_member_reads_nothing_else(port: Port, path: str):
    assert await ask(port, port.member("studio"), path) == "not_readable"


async def test_non_member_query_is_denied(port: Port):
    who, other = port.member("studio"), port.member("mini")
    assert await ask(port, who, "/api/v1/nodes", node=other.node) == "identity"
    assert await ask(port, who, "/api/v1/nodes", machine="another") == "cloned"
    port.application.nodes.administration.remove_node(who.node)
    assert await ask(port, who, "/api/v1/nodes") == "removed"
    stranger = await port.dial()
    stranger.send(MemberQuery(PROTOCOL, who.node, who.machine, "/api/v1/nodes"))
    frames = await stranger.ended()
    assert not any(isinstance(frame, FetchChunk) for frame in frames)


async def test_queries_have_a_budget_of_their_own(port: Port):
    who = port.member("studio")
    link = await port.link(who)
    loop = asyncio.get_running_loop()
    now = loop.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: now)  # no refill, however slow the machine is
        reasons = [await ask(port, who, "/api/v1/status") for _ in range(int(QUERIES_BURST) + 1)]
    assert [reason == "too_many" for reason in reasons] == [False] * int(QUERIES_BURST) + [True]
    assert not link.reader.at_eof(), "its link has a budget of its own"


async def test_command_queries_the_coordinator_of_the_node(port: Port, tmp_path: Path):
    who = port.member("studio")
    state = tmp_path / "mac"
    (state / "node").mkdir(parents=True)
    who.folder.rename(state / "node" / "identity")
    store_address(replace(who, folder=state / "node" / "identity"), f"127.0.0.1:{port.number}")
    member = read_member_identity(state)
    assert member is not None
    found = await asyncio.to_thread(query_coordinator, member, "/api/v1/nodes")
    assert [node["name"] for node in found["nodes"]] == ["studio"]
    wrong = replace(member, cluster="another")
    with pytest.raises(CommandError, match="is not the coordinator"):
        await asyncio.to_thread(query_coordinator, wrong, "/api/v1/nodes")
    gone = replace(member, addresses=("127.0.0.1:1",))
    with pytest.raises(CommandError, match="cannot be reached"):
        await asyncio.to_thread(query_coordinator, gone, "/api/v1/nodes")
    damaged = replace(member, addresses=("127.0.0.1:port",))
    with pytest.raises(CommandError, match="its address or its answer is invalid"):
        await asyncio.to_thread(query_coordinator, damaged, "/api/v1/nodes")


async def test_a_coordinator_that_stops_during_a_query_is_not_reached_for_now(port: Port, tmp_path: Path):
    """`cluster top` tries again after this exit code, and scripts expect it for a coordinator that restarts."""
    who, state = port.member("studio"), tmp_path / "mac"
    (state / "node").mkdir(parents=True)
    who.folder.rename(state / "node" / "identity")

    async def stop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(encode(FetchChunk(0, b'{"nodes"', last=False)))
        writer.close()

    context = port.application.authority.get_server_context()
    server = await asyncio.start_server(stop, "127.0.0.1", 0, ssl=context)
    store_address(replace(who, folder=state / "node" / "identity"), f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    member = read_member_identity(state)
    assert member is not None
    with pytest.raises(CommandError, match="ended the connection before its answer was complete") as ended:
        await asyncio.to_thread(query_coordinator, member, "/api/v1/nodes")
    assert ended.value.exit_code == UNREACHABLE
    server.close()
