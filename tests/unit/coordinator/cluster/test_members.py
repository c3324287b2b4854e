"""Members over the real cluster port: decisions of administrators persist, and a removed member stays out."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.cluster.links.link_admission import ALIVE_REPORT_AGE_SECONDS
from coordinator.observe.load_sampler import read_load
from coordinator.state import store_writer
from coordinator.state.store_errors import StoreError
from node.agent.identity import NodeIdentity, install_certificate, new_csr
from router.placement.candidate import NoPlacement, Placement, ResourceDemand
from tests.support.cluster.cluster_port import Port, a_report, hello, opened, the_no
from tests.support.cluster.enrolment import HARDWARE
from wire.certificate import LEAF_VALIDITY_SECONDS, read_certificate
from wire.frames import CertificateRenewed, Goodbye, PauseNode, RenewCertificate, Welcome
from wire.identity import NodeId
from wire.report import Sharing


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def ready(port: Port, who: NodeIdentity) -> None:
    await port.link(who)
    await port.until(lambda: port.state(who) == "ready")


def placed(port: Port) -> Placement | NoPlacement:
    return port.application.dispatcher.placer.preview(ResourceDemand("tiny", 100))


# Persistence


async def test_a_cordoned_node_stays_cordoned_after_a_restart_until_it_is_uncordoned(tmp_path: Path):
    async with opened(tmp_path) as port:
        one, two = port.member("one"), port.member("two")
        port.application.nodes.administration.set_cordoned(one.node, on=True)
        await port.application.store.flush()
    async with opened(tmp_path) as port:
        nodes = port.application.nodes
        assert {node.id: node.cordoned for node in nodes.registry.build_view().nodes} == {
            one.node: True,
            two.node: False,
        }
        row = (await port.get(f"/api/v1/nodes/{one.node}"))["node"]
        assert (row["headroom"], row["heard_seconds"]) == (None, None), "it has not reported"
        await ready(port, one)
        assert isinstance(placed(port), NoPlacement), "it is linked and ready, and gets nothing"
        row = (await port.get(f"/api/v1/nodes/{one.node}"))["node"]
        assert (row["cordoned"], row["headroom"]) == (True, a_report().memory.headroom)
        assert 0 <= row["heard_seconds"] < 60
        nodes.administration.set_cordoned(one.node, on=False)
        assert isinstance(placed(port), Placement)
        await port.application.store.flush()
    async with opened(tmp_path) as port:
        assert not any(node.cordoned for node in port.application.registry.build_view().nodes)


async def test_labels_and_the_permission_for_videos_last_and_are_seen_at_once(tmp_path: Path):
    async with opened(tmp_path) as port:
        who, nodes = port.member("one"), port.application.nodes
        for labels, allowed in ((("lab", "fast"), True), (("slow",), False), (("slow",), True)):
            nodes.administration.set_labels(who.node, labels)
            seen = port.application.dispatcher.view.find_node(who.node)
            assert seen is not None
            assert seen.labels == frozenset(labels)
            nodes.administration.set_video_allowed(who.node, on=allowed)
            seen = port.application.dispatcher.view.find_node(who.node)
            assert seen is not None
            assert seen.video_allowed is allowed
    async with opened(tmp_path) as port:
        nodes = port.application.nodes
        seen = nodes.registry.build_view().find_node(who.node)
        assert seen is not None
        assert (seen.labels, seen.video_allowed) == (frozenset({"slow"}), True)
        nodes.administration.set_video_allowed(who.node, on=False)
        seen = nodes.registry.build_view().find_node(who.node)
        assert seen is not None
        assert not seen.video_allowed
    async with opened(tmp_path) as port:
        assert not port.application.store.members[who.node].video


async def test_a_removed_nodes_link_ends_with_the_reason_and_it_stays_out_after_a_restart(tmp_path: Path):
    async with opened(tmp_path) as port:
        who, other = port.member("one"), port.member("two")
        line, kept = await port.link(who), await port.link(other)
        await port.until(lambda: port.state(who) == port.state(other) == "ready")
        port.application.nodes.administration.remove_node(who.node)
        denied = the_no(await line.ended())
        assert (denied.reason, denied.final) == ("removed", True)
        assert "removed from the cluster by an administrator" in denied.message
        await port.until(lambda: len(port.application.nodes.links.table) == 1)
        kept.send(a_report(2))
        assert port.state(other) == "ready"
        assert port.application.store.members[who.node].removed == pytest.approx(time.time(), abs=60)
        again = await port.dial(who)
        again.send(hello(who))
        assert the_no(await again.ended()).reason == "removed"
        await port.application.store.flush()
    async with opened(tmp_path) as port:
        assert [node.id for node in port.application.registry.build_view().nodes] == [other.node]
        assert port.application.store.deny_list.is_denied(who.node, "")
        late = await port.dial(who)
        late.send(hello(who))
        assert the_no(await late.ended()).reason == "removed"


async def test_decisions_are_whole_while_the_disk_takes_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_writer, "RETRY_SECONDS", 3600.0)
    async with opened(tmp_path) as port:
        removed, kept = port.member("one"), port.member("two")
        store, administration = port.application.store, port.application.nodes.administration
        await store.flush()
        with closing(sqlite3.connect(tmp_path / "state" / "cluster.db")) as other:
            other.execute("ALTER TABLE audit RENAME TO away")
        with suppress(StoreError):  # its second statement is refused if the first one has failed by then
            store.audit.add(1.0, "person", "create keys", "laptop")
        with pytest.raises(StoreError):
            await store.flush()
        for decide, field, value in (
            (lambda: administration.set_labels(kept.node, ("fast",)), "labels", frozenset({"fast"})),
            (lambda: administration.set_video_allowed(kept.node, on=False), "video_allowed", False),
            (lambda: administration.remove_node(removed.node), "labels", frozenset({"fast"})),
        ):
            with pytest.raises(StoreError):
                decide()
            seen = port.application.dispatcher.view.find_node(kept.node)
            assert getattr(seen, field) == value, "it is seen at once"
        before = store.members[kept.node].serial
        with pytest.raises(StoreError):
            administration.authentication.renew_certificate(NodeId(kept.node), new_csr(kept))
        assert store.members[kept.node].serial == before, "a certificate that is not sent is not recorded"
        view = port.application.dispatcher.placer.view.find_node(kept.node)
        assert view is not None
        assert (view.labels, view.video_allowed) == (frozenset({"fast"}), False)
        with closing(sqlite3.connect(tmp_path / "state" / "cluster.db")) as other:
            other.execute("ALTER TABLE away RENAME TO audit")
    async with opened(tmp_path) as port:
        store = port.application.store
        assert (store.members[kept.node].labels, store.members[kept.node].video) == (("fast",), False)
        assert store.members[removed.node].removed
        assert store.deny_list.is_denied(removed.node, "")


async def test_goodbye_of_a_leaving_node_ends_its_membership(port: Port):
    leaves, sleeps, stops = (port.member(name) for name in ("leaves", "sleeps", "stops"))
    for who, reason, state in ((leaves, "leave", "left"), (sleeps, "asleep", "asleep"), (stops, "stopping", "lost")):
        line = await port.link(who)
        await port.until(lambda who=who: port.state(who) == "ready")
        line.send(Goodbye(reason))
        await port.until(lambda who=who, state=state: port.state(who) == state)
    load = read_load(port.application.registry, port.application.dispatcher, 0.0)
    assert list(load.nodes) == [sleeps.node, stops.node], "a node that left has no load"
    store = port.application.store
    assert [store.deny_list.is_denied(who.node, "") for who in (leaves, sleeps, stops)] == [True, False, False]
    assert store.members[leaves.node].removed is not None
    assert [store.members[who.node].removed for who in (sleeps, stops)] == [None, None]
    await ready(port, sleeps)
    await ready(port, stops)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "cordon", None),
        ("POST", "uncordon", None),
        ("POST", "drain", {}),
        ("POST", "pause", {}),
        ("PUT", "labels", {"labels": ["fast"]}),
        ("DELETE", "", None),
    ],
)
async def test_a_command_for_a_node_that_left_is_refused(
    port: Port, method: str, path: str, body: dict[str, object] | None
):
    who = port.member("studio")
    line = await port.link(who)
    line.send(Goodbye("leave"))
    await port.until(lambda: port.state(who) == "left")
    before = port.application.store.members[who.node]
    async with port.client("admin") as client:
        answer = await client.request(method, f"/api/v1/nodes/{who.node}/{path}".rstrip("/"), json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "node_left")
    assert error["message"] == "studio has left the cluster: it stays listed for 10 minutes"
    assert port.application.store.members[who.node] == before


# greeting


async def test_welcome_has_cluster_epoch_generation_and_addresses(port: Port):
    nodes, who = port.application.nodes, port.member("one")
    addresses = ("10.0.0.5:8081", "studio.local:8081")
    nodes.admission.set_address_source(lambda: addresses)
    line = await port.dial(who)
    line.send(hello(who))
    welcome = await line.until(Welcome)
    authority = port.application.authority
    assert (welcome.epoch, welcome.cluster, welcome.cluster_name) == (1, authority.cluster, "home")
    assert (welcome.version, welcome.addresses) == ("0", addresses)
    assert abs(welcome.time - time.time()) < 60
    assert welcome.generation == 0
    assert authority.is_sealed(0, welcome.seal)


async def test_hello_has_hardware_version_and_protocol(port: Port):
    who = port.member("one")
    new = replace(HARDWARE, chip="M9 Ultra", memory=1 << 40)
    line = await port.link(who, hardware=new, version="9.8.7")
    await port.until(lambda: port.state(who) == "ready")
    assert port.application.store.members[who.node].hardware == new
    row = (await port.get(f"/api/v1/nodes/{who.node}"))["node"]
    assert (row["chip"], row["memory"], row["version"]) == ("M9 Ultra", 1 << 40, "9.8.7")
    assert 0 <= row["heard_seconds"] < 30
    assert row["protocol"] == hello(who).protocol
    line.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"machine": "another"}, "cloned"), ({"node": "node-2"}, "identity"), ({"protocol": 0}, "protocol")],
)
async def test_a_hello_that_does_not_fit_its_certificate_is_denied_for_good(
    port: Port, changes: dict[str, object], reason: str
):
    who, _ = port.member("one"), port.member("two")
    line = await port.dial(who)
    line.send(hello(who, **changes))
    denied = the_no(await line.ended())
    assert (denied.reason, denied.final) == (reason, True)
    assert len(port.application.nodes.links.table) == 0


async def test_a_second_process_waits_as_long_as_the_first_one_reports(port: Port):
    who = port.member("one")
    await ready(port, who)
    copy = await port.dial(who)
    copy.send(hello(who, instance="of a copied disk"))
    denied = the_no(await copy.ended())
    assert (denied.reason, denied.final, denied.retry_after) == ("linked_elsewhere", False, ALIVE_REPORT_AGE_SECONDS)
    assert "one is linked now by another process, from 127.0.0.1" in denied.message
    assert port.state(who) == "ready"
    same = await port.dial(who)
    same.send(hello(who))
    assert isinstance(await same.until(Welcome), Welcome), "a process that lost its link makes another"


async def test_a_second_process_may_link_once_the_first_one_reports_no_more(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    who = port.member("one")
    await ready(port, who)
    monkeypatch.setattr("coordinator.cluster.links.link_admission.ALIVE_REPORT_AGE_SECONDS", 0.0)
    other = await port.dial(who)
    other.send(hello(who, instance="restarted"))
    assert isinstance(await other.until(Welcome), Welcome)


# renewal


async def test_a_renewed_certificate_is_for_the_same_node_the_new_key_and_a_whole_life(port: Port):
    who = port.member("one")
    line = await port.link(who)
    line.send(RenewCertificate(new_csr(who)))
    renewed = await line.until(CertificateRenewed)
    made = read_certificate(renewed.certificate)
    assert (made.uri, made.name) == (read_certificate(who.certificate).uri, "one")
    assert abs(made.expires - time.time() - LEAF_VALIDITY_SECONDS) < 120
    assert port.application.store.members[who.node].serial == made.serial
    assert made.serial != read_certificate(who.certificate).serial
    after = install_certificate(who, renewed.certificate)
    second = await port.dial(after)
    second.send(hello(after, takeover=True))
    assert (await second.until(Welcome)).cluster == port.application.authority.cluster


async def test_a_renewal_that_cannot_be_signed_ends_that_link_and_keeps_the_certificate(port: Port):
    who = port.member("one")
    serial = port.application.store.members[who.node].serial
    line = await port.link(who)
    line.send(RenewCertificate(b"junk"))
    assert the_no(await line.ended()).reason == "bad_request"
    assert port.application.store.members[who.node].serial == serial
    await ready(port, who)


# Queries by users


async def test_a_member_is_found_by_id_and_by_name_and_the_one_that_is_here_first(port: Port):
    nodes = port.application.nodes
    old = port.member("studio")
    nodes.administration.remove_node(old.node)
    new = port.member("studio")
    assert nodes.directory.find_member("studio") == new.node
    assert nodes.directory.find_member(str(old.node)) == old.node
    assert nodes.directory.find_member(str(new.node)) == new.node
    assert nodes.directory.find_member("nothing") is None
    names = [nodes.directory.get_name(NodeId(str(node))) for node in (old.node, new.node, "nothing")]
    assert names == ["studio", "studio", "nothing"], "a removed node keeps its name in the audit log"
    row = nodes.directory.build_node_row(new.node, 3)
    assert (row["name"], row["in_flight"], row["heard_seconds"]) == ("studio", 3, None)


async def test_a_pause_is_sent_to_its_node_and_answered_by_its_report(port: Port, monkeypatch: pytest.MonkeyPatch):
    nodes, who = port.application.nodes, port.member("one")
    with pytest.raises(LookupError, match="it has not reported yet"):
        await nodes.administration.pause_node(who.node, 60.0, "boss")
    line = await port.link(who, a_report(sharing=Sharing("always")))
    await port.until(lambda: port.state(who) == "ready")
    pausing = asyncio.create_task(nodes.administration.pause_node(who.node, 60.0, "boss"))
    assert await line.until(PauseNode) == PauseNode(60.0, "boss")
    paused = Sharing("always", paused=True, why="paused by boss", until=time.time() + 60, by_hand=True)
    line.send(a_report(2, sharing=paused, draining=True))
    assert await pausing == paused
    await port.until(lambda: port.state(who) == "paused")
    assert isinstance(placed(port), NoPlacement)
    for number, seconds, until in ((3, 7200.0, time.time() + 7200), (5, None, None)):
        pausing = asyncio.create_task(nodes.administration.pause_node(who.node, seconds, "boss"))
        assert await line.until(PauseNode) == PauseNode(seconds, "boss")
        line.send(a_report(number, sharing=paused, draining=True))
        paused = replace(paused, until=until)
        line.send(a_report(number + 1, sharing=paused, draining=True))
        assert await pausing == paused, "a report with the end of the earlier pause confirms nothing"
    assert await nodes.administration.pause_node(who.node, None, "boss") == paused
    resuming = asyncio.create_task(nodes.administration.pause_node(who.node, 0.0, "boss"))
    assert await line.until(PauseNode) == PauseNode(None, "boss")
    assert await line.until(PauseNode) == PauseNode(0.0, "boss")
    line.send(a_report(7, sharing=Sharing("always")))
    assert await resuming == Sharing("always")
    await port.until(lambda: port.state(who) == "ready")
    assert isinstance(placed(port), Placement)
    monkeypatch.setattr("coordinator.cluster.node_administration.PAUSE_TIMEOUT_SECONDS", 0.05)
    assert await nodes.administration.pause_node(who.node, None, "boss") is None, (
        "the node's report does not confirm the pause"
    )
    assert await nodes.administration.pause_node(who.node, 0.0, "boss") == Sharing("always")
    line.close()
    await port.until(lambda: port.state(who) == "lost")
    with pytest.raises(LookupError, match="it is not linked"):
        await nodes.administration.pause_node(who.node, 60.0, "boss")


async def test_warnings_name_their_node_and_a_silent_half_of_the_pool(port: Port):
    nodes = port.application.nodes
    lines = {name: await port.link(port.member(name)) for name in ("a", "b", "c", "d")}
    await port.until(lambda: nodes.directory.count_states()["ready"] == 4)
    assert nodes.directory.list_warnings() == []
    hung = a_report(2)
    lines["a"].send(replace(hung, engine=replace(hung.engine, state="hung", cause="no step for 60 s")))
    await port.until(nodes.directory.list_warnings)
    assert nodes.directory.list_warnings() == ["a: its engine is hung: no step for 60 s"]
    assert nodes.directory.list_dangers() == []
    off = replace(hung.memory, guard=False)
    lines["b"].send(a_report(2, memory=off))
    await port.until(nodes.directory.list_dangers)
    assert nodes.directory.list_dangers() == ["b: memory.guard is off: its memory can exceed the cap"]
    for name in ("a", "b"):
        lines[name].close()
    await port.until(lambda: nodes.directory.count_states()["lost"] == 2)
    silent = "half of the nodes fell silent at once: look at this machine's own network first"
    assert nodes.directory.list_warnings() == [silent]
    assert nodes.directory.list_dangers() == []
    lines["c"].send(a_report(2, memory=off, engine=replace(hung.engine, state="hung", cause="no step for 60 s")))
    await port.until(nodes.directory.list_dangers)
    assert nodes.directory.list_warnings() == [
        "c: memory.guard is off: its memory can exceed the cap",
        silent,
        "c: its engine is hung: no step for 60 s",
    ], "dangers, the network, then faults"
