"""The port for nodes: its relay of model files, and its limits of connections without a certificate."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from coordinator.cluster.links import link_server
from node.agent.identity import NodeIdentity, create_authority_context
from tests.support.cluster.cluster_port import Line, Port, hello, opened
from wire.frames import Denied, JoinRelay, Ping, RelayJoined
from wire.identity import PROTOCOL, NodeId

SECONDS = 5.0


@pytest.fixture
async def port(tmp_path: Path) -> AsyncGenerator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def join(port: Port, who: NodeIdentity, *, serves: bool) -> Line:
    line = await port.dial(who)
    line.send(JoinRelay(PROTOCOL, who.node, who.machine, "token", serves=serves))
    return line


async def test_relayed_connections_are_joined_do_not_count_and_end_with_the_server(port: Port):
    nodes, giver, taker = port.application.nodes, port.member("giver"), port.member("taker")
    nodes.links.transfers.open("token", NodeId(giver.node), frozenset({NodeId(taker.node)}))
    served = await join(port, giver, serves=True)
    fetched = await join(port, taker, serves=False)
    for line in (served, fetched):
        assert isinstance(await line.next(SECONDS), RelayJoined)
    assert nodes.server.count_unlinked() == 0
    served.writer.write(b"a model")
    assert await asyncio.wait_for(fetched.reader.readexactly(7), SECONDS) == b"a model"
    await nodes.server.close()
    for line in (served, fetched):
        assert await asyncio.wait_for(line.reader.read(), SECONDS) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
async def test_connections_without_a_certificate_are_limited_over_all_addresses(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_server, "MAX_UNLINKED", 4)
    context = create_authority_context(port.application.authority.ca)
    lines = list[Line]()
    for number in range(1, 6):
        connected = await asyncio.open_connection(
            "127.0.0.1", port.number, ssl=context, local_addr=(f"127.0.0.{number}", 0)
        )
        lines.append(Line(*connected))
        port.lines.append(lines[-1])
        if number < 5:
            await port.until(lambda number=number: port.application.nodes.server.count_unlinked() == number)
    assert await lines[4].ended(SECONDS) == []
    assert port.said("5 strangers are connected, 1 from this address")
    assert not any(line.reader.at_eof() for line in lines[:4])


async def test_the_end_of_an_older_link_leaves_the_newest_one(port: Port):
    table, who = port.application.nodes.links.table, port.member("studio")
    older, newest = await port.link(who), await port.link(who, takeover=True)
    older.close()
    await port.until(lambda: table.retired == 0)
    assert (len(table), table.send(NodeId(who.node), Ping(99))) == (1, True)
    while await newest.until(Ping, SECONDS) != Ping(99):
        pass  # the coordinator pings as well
    assert table.get_hello(NodeId(who.node)) == hello(who, takeover=True)


async def test_all_links_of_a_removed_node_get_the_reason_and_end(port: Port):
    table, who = port.application.nodes.links.table, port.member("studio")
    lines = [await port.link(who), await port.link(who, takeover=True)]
    await port.until(lambda: table.retired == 1)
    table.disconnect_node(NodeId(who.node), "removed", Denied("removed", "it was removed"))
    for line in lines:
        assert [frame.reason for frame in await line.ended(SECONDS) if isinstance(frame, Denied)] == ["removed"]
    await port.until(lambda: (len(table), table.retired) == (0, 0))
