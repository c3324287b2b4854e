"""Which nodes may link, and which of the links of a node stays open."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.links import link_admission, link_budgets, link_server
from coordinator.cluster.links.link_admission import ALIVE_REPORT_AGE_SECONDS, LinkAdmission
from coordinator.cluster.links.link_budgets import BUDGET_RETRY_SECONDS
from coordinator.cluster.member_transitions import LOST_AFTER_SECONDS, SUSPECT_AFTER_SECONDS
from node.agent.identity import NodeIdentity
from tests.support.cluster.cluster_port import Port, hello, opened, the_no
from wire.certificate import read_certificate
from wire.frames import Denied, Frame, JoinRelay, MemberQuery, Ping, Welcome
from wire.identity import OLDEST_PROTOCOL, PROTOCOL, NodeId, PeerIdentity

SECONDS = 1.0


@pytest.fixture
async def port(tmp_path: Path) -> AsyncGenerator[Port]:
    async with opened(tmp_path) as made:
        yield made


def authorize(port: Port, who: NodeIdentity, peer: str = "", serial: str = "1", **changes: Any) -> Welcome | Denied:
    """Ask whether a node with the certificate of `peer` may link."""
    identity = PeerIdentity(port.application.authority.cluster, NodeId(peer or who.node))
    return admission(port).authorize(identity, serial, hello(who, **changes))


def admission(port: Port) -> LinkAdmission:
    return port.application.nodes.admission


def refuse(port: Port, who: NodeIdentity, **changes: Any) -> Denied:
    answer = authorize(port, who, **changes)
    assert isinstance(answer, Denied), answer
    return answer


async def test_a_member_is_welcomed_with_the_identity_of_the_coordinator(port: Port):
    who, authority = port.member("studio"), port.application.authority
    admission(port).set_address_source(lambda: ("10.0.0.1:1",))
    answer = authorize(port, who)
    assert isinstance(answer, Welcome)
    assert (answer.cluster, answer.addresses) == (authority.cluster, ("10.0.0.1:1",))
    assert authority.is_sealed(answer.generation, answer.seal)


async def test_a_certificate_of_another_node_is_refused_for_good_and_leaves_no_record(port: Port):
    who, other = port.member("studio"), port.member("laptop")
    denied = refuse(port, who, peer=other.node, version="9.9.9")
    assert (denied.reason, denied.final) == ("identity", True)
    records = port.application.nodes.administration.records
    assert records.get_software(NodeId(who.node))[0] != "9.9.9"
    assert isinstance(authorize(port, who, version="9.9.9"), Welcome)
    assert records.get_software(NodeId(who.node)) == ("9.9.9", PROTOCOL)


async def test_a_node_that_is_no_member_any_more_is_refused_for_good(port: Port):
    who, revoked, marked, stays = (port.member(name) for name in ("studio", "laptop", "desk", "mini"))
    port.application.nodes.administration.remove_node(who.node)
    denied = refuse(port, who)
    assert (denied.reason, denied.final) == ("removed", True)
    port.application.store.deny_list.add_node(NodeId(revoked.node), 1.0, "stolen")
    assert (refuse(port, revoked).reason, refuse(port, revoked).final) == ("removed", True)
    members = port.application.store.members
    members.put(dataclasses.replace(members[NodeId(marked.node)], removed=1.0))
    assert refuse(port, marked).reason == "removed"
    denied = refuse(port, stays, node="stranger", peer="stranger")
    assert (denied.reason, denied.final) == ("removed", True)
    assert port.application.nodes.administration.records.get_software(NodeId("stranger")) == ("", 0)
    assert isinstance(authorize(port, stays), Welcome)


async def test_an_identity_on_another_machine_is_refused_for_good(port: Port):
    who = port.member("studio")
    denied = refuse(port, who, machine="another")
    assert (denied.reason, denied.final) == ("cloned", True)
    assert "another machine (studio)" in denied.message
    assert "cloned identity" in [entry["event"] for entry in port.logs]


@pytest.mark.parametrize(("protocol", "older"), [(OLDEST_PROTOCOL - 1, "node"), (PROTOCOL + 1, "coordinator")])
async def test_the_oldest_and_the_own_protocol_are_spoken_and_no_other(port: Port, protocol: int, older: str):
    who = port.member("studio")
    denied = refuse(port, who, protocol=protocol)
    assert (denied.reason, denied.final) == ("protocol", True)
    assert denied.message.endswith(f"update macpool on the {older}")
    for spoken in (OLDEST_PROTOCOL, PROTOCOL):
        assert isinstance(authorize(port, who, protocol=spoken), Welcome)


async def test_a_coordinator_with_a_newer_generation_supersedes_this_one(port: Port):
    who, authority = port.member("studio"), port.application.authority
    assert isinstance(authorize(port, who, generation=7, seal=authority.seal_generation(8)), Welcome)
    assert port.application.superseded == []
    denied = refuse(port, who, generation=7, seal=authority.seal_generation(7), name="stu\x1bdio")
    assert (denied.reason, denied.final) == ("superseded", False)
    ((generation, node),) = [(mark.generation, mark.node) for mark in port.application.superseded]
    assert generation == 7
    assert node.isprintable()


async def test_a_second_process_is_refused_while_the_first_one_reports(port: Port, monkeypatch: pytest.MonkeyPatch):
    who = port.member("studio")
    line = await port.dial(who)
    line.send(hello(who))
    await line.until(Welcome, SECONDS)
    assert isinstance(authorize(port, who, instance="another"), Welcome), "the first one has not reported"
    port.lines.remove(line)
    line.close()
    await port.until(lambda: not len(port.application.nodes.links.table), SECONDS)
    await port.link(who)
    await port.until(lambda: port.state(who) == "ready", SECONDS)
    denied = refuse(port, who, instance="another")
    assert (denied.reason, denied.final, denied.retry_after) == ("linked_elsewhere", False, ALIVE_REPORT_AGE_SECONDS)
    assert "by another process, from 127.0.0.1" in denied.message
    assert isinstance(authorize(port, who), Welcome), "the same process links again"
    monkeypatch.setattr(link_admission, "ALIVE_REPORT_AGE_SECONDS", 0.0)
    assert isinstance(authorize(port, who, instance="another"), Welcome), "its network broke"


async def test_a_link_that_takes_over_leaves_one_older_link_of_its_process_open(port: Port):
    table, who, other = port.application.nodes.links.table, port.member("studio"), port.member("laptop")
    kept = [await port.link(other), await port.link(other, takeover=True)]
    first = await port.link(who)
    second = await port.link(who, takeover=True)
    assert (len(table), table.retired) == (2, 2)
    third = await port.link(who, takeover=True)
    await first.ended(SECONDS)
    await port.until(lambda: table.retired == 2, SECONDS)
    assert not any(line.reader.at_eof() for line in (second, third, *kept))


async def test_a_frame_to_all_and_the_end_of_one_node_concern_the_links_of_the_right_nodes(port: Port):
    table, who, other = port.application.nodes.links.table, port.member("studio"), port.member("laptop")
    lines = [await port.link(who), await port.link(other)]
    kept_older = await port.link(other, takeover=True)
    await port.until(lambda: (len(table), table.retired) == (2, 1))
    certificates = {one.node: read_certificate(one.certificate) for one in (who, other)}
    assert table.get_certificate_validity() == {
        node: (certificate.issued, certificate.expires) for node, certificate in certificates.items()
    }
    table.send_to_all(Ping(7))
    for line in (lines[0], kept_older):
        while await line.until(Ping) != Ping(7):
            pass  # the coordinator pings as well
    table.abort_retired_links(NodeId(who.node), "its requests are resumed")
    table.close_link(NodeId(who.node), 99, "no such link")
    assert (len(table), table.retired) == (2, 1)
    table.disconnect_node(NodeId(who.node), "removed", Denied("removed", "it was removed"))
    assert the_no(await lines[0].ended(SECONDS)).reason == "removed"
    await port.until(lambda: len(table) == 1, SECONDS)
    assert (table.retired, table.send(NodeId(other.node), Ping(8))) == (1, True)
    assert not table.send(NodeId(who.node), Ping(8))
    table.close("the coordinator stops")
    for line in (lines[1], kept_older):
        await line.ended(SECONDS)
    await port.until(lambda: (len(table), table.retired) == (0, 0), SECONDS)


@pytest.mark.parametrize("loss", ["silent", "closed", "replaced"])
async def test_an_older_link_ends_once_the_requests_of_its_node_are_resumed(port: Port, loss: str):
    """A Mac without power closes no connection: without this end, the coordinator would never close the older link."""
    table, who = port.application.nodes.links.table, port.member("studio")
    older = await port.link(who)
    newest = await port.link(who, takeover=True)
    await port.until(lambda: port.state(who) == "ready")
    if loss == "silent":
        registry, now = port.application.registry, asyncio.get_running_loop().time()
        for seconds in (SUSPECT_AFTER_SECONDS, LOST_AFTER_SECONDS):
            registry.tick(now + seconds + 1)
    elif loss == "closed":
        newest.close()
    else:
        await port.link(who)
    await older.ended()
    await port.until(lambda: table.retired == 0)


async def test_a_link_of_another_process_takes_nothing_over(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_admission, "ALIVE_REPORT_AGE_SECONDS", 0.0)
    table, who = port.application.nodes.links.table, port.member("studio")
    first = await port.link(who)
    await port.link(who, takeover=True, instance="another")
    await first.ended(SECONDS)
    assert (len(table), table.retired) == (1, 0)


async def test_links_denials_and_connections_before_a_hello_are_counted(port: Port):
    server, who, removed = port.application.nodes.server, port.member("studio"), port.member("laptop")
    port.application.nodes.administration.remove_node(removed.node)
    await port.link(who)
    waiting, refused = await port.dial(who), await port.dial(removed)
    await port.until(lambda: server.count_unlinked() == 2, SECONDS)
    refused.send(hello(removed))
    assert [frame.reason for frame in await refused.ended(SECONDS) if isinstance(frame, Denied)] == ["removed"]
    await port.until(lambda: server.count_unlinked() == 1, SECONDS)
    assert (server.established, server.denied) == (1, 1)
    assert port.application.nodes.links.table.get_address(NodeId(who.node)) == "127.0.0.1"
    assert port.application.nodes.links.table.get_address(NodeId("unknown")) == ""
    await server.close()
    await waiting.ended(SECONDS)
    with pytest.raises(ConnectionRefusedError):
        await port.dial(who)


async def test_links_are_pinged_with_increasing_numbers_until_the_server_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_server, "PING_INTERVAL_SECONDS", 0.01)
    async with opened(tmp_path) as port:
        line = await port.link(port.member("studio"))
        numbers = [(await line.until(Ping)).nonce for _ in range(3)]
        assert numbers == list(range(numbers[0], numbers[0] + 3))
        sent, table = list[Frame](), port.application.nodes.links.table
        await port.application.nodes.server.close()
        monkeypatch.setattr(table, "send_to_all", sent.append)
        await asyncio.sleep(0.03)  # three intervals
        assert sent == []


async def test_connections_without_a_certificate_are_limited_by_address_and_others_are_not(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_server, "MAX_UNLINKED", 8)
    who, server = port.member("studio"), port.application.nodes.server
    known = [await port.dial(who) for _ in range(3)]
    strangers = [await port.dial() for _ in range(2)]
    await port.until(lambda: server.count_unlinked() == 5)
    assert await (await port.dial()).ended() == []
    assert port.said("3 strangers are connected, 3 from this address")
    assert not any(line.reader.at_eof() for line in (*known, *strangers))


@pytest.mark.parametrize("kind", ["link", "query", "relay"])
async def test_a_node_that_connects_too_often_is_denied_and_may_retry(
    port: Port, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr(link_budgets, "LINKS_BURST", 1.0)
    monkeypatch.setattr(link_budgets, "QUERIES_BURST", 1.0)
    monkeypatch.setattr(link_budgets, "LINKS_PER_SECOND", 0.001)  # a busy machine may take a second for a connection
    monkeypatch.setattr(link_budgets, "QUERIES_PER_SECOND", 0.001)
    who, denials = port.member("studio"), list[Denied]()
    firsts: dict[str, Frame] = {
        "link": hello(who, protocol=OLDEST_PROTOCOL - 1),
        "query": MemberQuery(PROTOCOL, who.node, who.machine, "/none"),
        "relay": JoinRelay(PROTOCOL, who.node, who.machine, "none", serves=False),
    }
    for _ in range(2):
        line = await port.dial(who)
        line.send(firsts[kind])
        denials.append(the_no(await line.ended()))
    reasons = {"link": "protocol", "query": "not_readable", "relay": "no_transfer"}
    assert [denied.reason for denied in denials] == [reasons[kind], "too_many"]
    assert [denied.retry_after for denied in denials] == [0.0, BUDGET_RETRY_SECONDS]
    assert [denied.final for denied in denials] == [True, False]
    assert port.application.nodes.server.denied == (2 if kind == "link" else 0)
