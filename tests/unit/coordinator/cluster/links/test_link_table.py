"""Links of a node that opens several: which one gets frames, and which ones end with the node or the coordinator."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from node.agent.identity import NodeIdentity
from tests.support.cluster.cluster_port import Line, Port, hello, opened, the_no
from wire.frames import PauseNode, Welcome


@pytest.fixture
async def port(tmp_path: Path) -> AsyncGenerator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def take_over(port: Port, who: NodeIdentity, **changes: object) -> tuple[Line, Line]:
    """Open two links of a node, the second as a takeover. Return both."""
    older = await port.link(who)
    await port.until(lambda: port.state(who) == "ready")
    newer = await port.dial(who)
    newer.send(hello(who, takeover=True, **changes))
    await newer.until(Welcome)
    return older, newer


def count_links(port: Port) -> tuple[int, int]:
    """Return the numbers of nodes with a link, and of older links."""
    table = port.application.nodes.links.table
    return len(table), table.retired


async def test_every_link_of_a_removed_node_gets_the_reason_and_ends(port: Port):
    who, other = port.member("one"), port.member("two")
    lines = await take_over(port, who)
    kept = await take_over(port, other)
    assert count_links(port) == (2, 2)
    port.application.nodes.administration.remove_node(who.node)
    for line in lines:
        assert the_no(await line.ended()).reason == "removed"
    await port.until(lambda: count_links(port) == (1, 1))
    table = port.application.nodes.links.table
    assert table.send(other.node, PauseNode(1.0, "boss"))
    assert await kept[1].until(PauseNode) == PauseNode(1.0, "boss"), "frames are sent on the newest link"


async def test_the_end_of_an_older_link_keeps_the_newest(port: Port):
    who = port.member("one")
    older, newer = await take_over(port, who)
    older.close()
    await port.until(lambda: count_links(port) == (1, 0))
    assert port.application.nodes.links.table.send(who.node, PauseNode(2.0, "boss"))
    assert await newer.until(PauseNode) == PauseNode(2.0, "boss")
    assert port.state(who) == "ready"


async def test_the_older_link_ends_with_the_newest_because_its_requests_are_resumed(port: Port):
    who = port.member("one")
    older, newer = await take_over(port, who)
    newer.close()
    await older.ended()
    await port.until(lambda: count_links(port) == (0, 0))
    assert port.state(who) == "lost"


async def test_another_process_takes_no_link_over(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coordinator.cluster.links.link_admission.ALIVE_REPORT_AGE_SECONDS", 0.0)
    older, _ = await take_over(port, port.member("one"), instance="another process")
    await older.ended()
    await port.until(lambda: count_links(port) == (1, 0))


async def test_a_stop_ends_older_links_too(port: Port):
    lines = await take_over(port, port.member("one"))
    port.application.nodes.links.table.close("the coordinator stops")
    for line in lines:
        await line.ended()
    await port.until(lambda: count_links(port) == (0, 0))
