"""The registry over a real store and authority, without links: permission to link, persistence, and calls of
placement."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.backup.generation_fence import GenerationFence, SupersededMark
from coordinator.cluster import member_transitions
from coordinator.cluster.assembly import assemble_pool, create_links
from coordinator.cluster.links.link_admission import CoordinatorIdentity
from coordinator.joining.join_approvals import ApprovalQueue
from coordinator.joining.join_tokens import JoinTokens
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from coordinator.state.store_errors import StoreError
from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import new_request
from router.placement.cluster_view import ClusterView, NodeView
from tests.support.cluster.cluster_port import a_report
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.capacity.batches import BatchGroup
from wire.certificate import read_certificate
from wire.enforcer_report import Enforcement
from wire.frames import (
    CertificateRenewed,
    Denied,
    Finished,
    Frame,
    Goodbye,
    Hello,
    MemberQuery,
    RenewCertificate,
    Welcome,
)
from wire.identity import OLDEST_PROTOCOL, PROTOCOL, NodeId, PeerIdentity
from wire.node_state import EngineStage, NodeState
from wire.report import EngineState, Hardware, MemoryLevel
from wire.state_machine import IllegalEventCounts, IllegalEventError
from wire.units import GIB

HARDWARE = Hardware("M4 Max", 128 * GIB, 16, "macOS 26.1", "3.11")
WALL = 1_700_000_000.0


class Placed:
    """Records the calls of placement, in order."""

    def __init__(self) -> None:
        self.views: list[ClusterView] = []
        self.frames: list[tuple[NodeId, Frame]] = []
        self.gone: list[tuple[NodeId, str]] = []
        self.forgotten: list[NodeId] = []

    def set_view(self, view: ClusterView) -> None:
        self.views.append(view)

    @property
    def receivers(self) -> dict[type[Frame], Callable[[NodeId, Frame], None]]:
        return {Finished: lambda node, frame: self.frames.append((node, frame))}

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        self.gone.append((node, reason))

    def remove_node(self, node: NodeId) -> None:
        self.forgotten.append(node)


class Coordinator:
    """One run of a coordinator over a state folder, with every member of the store."""

    def __init__(self, folder: Path) -> None:
        self.store = Database(folder)
        self.closed = False
        self.authority = ClusterCa(folder / "authority", time.time)
        self.store.create_cluster(self.authority.cluster, "home")
        tokens, approvals = JoinTokens(self.store, self.authority.ca, time.time), ApprovalQueue()
        self.epoch = self.store.increment_epoch()
        self.illegal_events = IllegalEventCounts()
        self.placed, self.superseded = Placed(), list[SupersededMark]()
        self.nodes = assemble_pool(
            self.store,
            GenerationFence(self.authority, self.store.meta.generation),
            CoordinatorIdentity("home", "1.2.3", self.epoch),
            tokens,
            approvals,
            create_links(),
            self.placed,
            self.illegal_events,
            wall=lambda: WALL,
            on_superseded=self.superseded.append,
        )
        self.registry = self.nodes.registry

    async def stop(self) -> None:
        """End this run, with all state on the disk."""
        await self.store.flush()
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.registry.close()
            self.store.close()

    def join(self, name: str, **fields: Any) -> NodeId:
        """Make a member with a certificate."""
        node, request = NodeId(f"id-{name}"), new_request(name)
        serial = read_certificate(self.authority.sign_request(request.csr, node, name)).serial
        row = MemberRow(node, name, f"machine of {name}", HARDWARE, serial, WALL, **fields)
        self.store.members.put(row)
        self.registry.add_member(row)
        return node

    def hello(self, node: NodeId, **changes: Any) -> Hello:
        row = self.store.members[node]
        made = Hello(PROTOCOL, node, row.name, f"instance of {row.name}", row.machine, "1.2.3", HARDWARE)
        return replace(made, **changes)

    def greet(self, node: NodeId, **changes: Any) -> Welcome | Denied:
        """Return the answer to a Hello with the node's own certificate."""
        peer = PeerIdentity(self.authority.cluster, changes.pop("certificate", node))
        return self.nodes.admission.authorize(peer, self.store.members[node].serial, self.hello(node, **changes))

    def link(self, node: NodeId, *, report: bool = True, **changes: Any) -> int:
        """Link a node; return the link's number."""
        number = self.registry.on_link_up(node, self.hello(node, **changes))
        if report:
            self.registry.handle_frame(node, number, a_report())
        return number

    def state(self, node: NodeId) -> str:
        return self.registry.pool.members[node].state.value

    def seen(self, node: NodeId) -> NodeView:
        """Return the last view of the node that placement got."""
        found = self.placed.views[-1].find_node(node)
        assert found is not None
        return found


async def until(true: Callable[[], object]) -> None:
    """Wait for an effect of the registry's own clock."""
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110  placement has no event for tests
            await asyncio.sleep(0.005)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[[], Coordinator]]:
    made: list[Coordinator] = []

    def begin() -> Coordinator:
        made.append(Coordinator(tmp_path))
        return made[-1]

    yield begin
    for one in made:
        one.close()


async def test_a_cordon_labels_and_the_permission_for_video_survive_a_restart(start: Callable[[], Coordinator]):
    first = start()
    studio, mini = first.join("studio"), first.join("mini")
    first.link(studio)
    first.nodes.administration.set_cordoned(studio, on=True)
    first.nodes.administration.set_labels(studio, ("lab", "big"))
    first.nodes.administration.set_video_allowed(studio, on=True)
    await first.stop()
    second = start()
    assert second.epoch == first.epoch + 1
    assert [second.registry.pool.members[node].cordoned for node in (studio, mini)] == [True, False]
    assert second.registry.pool.members[studio].reason == "not seen since the coordinator started"
    for report in (False, True):
        view = next(one for one in second.registry.build_view().nodes if one.id == studio)
        assert (view.cordoned, view.labels, view.video_allowed) == (True, frozenset({"lab", "big"}), True)
        assert view.state == ("ready" if report else "lost")
        second.link(studio)
    assert second.seen(studio).cordoned, "a node that links again stays cordoned"
    second.nodes.administration.set_cordoned(studio, on=False)
    second.nodes.administration.set_labels(studio, ())
    second.nodes.administration.set_video_allowed(studio, on=False)
    assert (second.seen(studio).cordoned, second.seen(studio).labels, second.seen(studio).video_allowed) == (
        False,
        frozenset(),
        False,
    )
    await second.stop()
    third = start()
    row = third.store.members[studio]
    assert (row.cordoned, row.labels, row.video) == (False, (), False)
    assert not third.registry.pool.members[studio].cordoned


async def test_a_cordon_that_is_refused_is_not_stored(start: Callable[[], Coordinator]):
    first = start()
    studio = first.join("studio")
    first.nodes.administration.set_cordoned(studio, on=True)
    first.nodes.administration.remove_node(studio)
    before = first.store.members[studio]
    for on in (True, False):
        with pytest.raises(IllegalEventError, match="cannot happen"):
            first.nodes.administration.set_cordoned(studio, on=on)
    assert first.store.members[studio] == before
    assert first.illegal_events == IllegalEventCounts() | {"membership": 2}
    await first.stop()
    assert start().store.members[studio] == before


async def test_models_of_members_are_awaited_for_a_while_after_a_start(
    start: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
):
    first = start()
    nodes = studio, mini, air = [first.join(name) for name in ("studio", "mini", "air")]
    first.link(studio)
    assert not any(first.seen(node).awaited for node in nodes), "they were no members at the start"
    assert [first.registry.get_node_view(node) for node in nodes] == [first.seen(node) for node in nodes]
    await first.stop()
    second = start()
    number = second.link(studio, report=False)
    second.registry.handle_frame(studio, number, a_report(engine=EngineState("mlx", "starting"), models=()))
    second.link(mini)
    assert [second.seen(node).awaited for node in nodes] == [True, False, True]
    assert [second.registry.get_node_view(node) for node in nodes] == [second.seen(node) for node in nodes]
    second.registry.handle_frame(studio, number, a_report())
    assert [second.seen(node).awaited for node in nodes] == [False, False, True]
    second.nodes.administration.remove_node(air)
    assert not any(second.seen(node).awaited for node in nodes)
    await second.stop()
    monkeypatch.setattr("coordinator.cluster.registry.START_SECONDS", 0.0)
    third = start()
    third.link(mini)
    assert not any(third.seen(node).awaited for node in (studio, mini))


async def test_a_removed_node_is_no_member_after_a_restart_and_may_not_link(start: Callable[[], Coordinator]):
    first = start()
    studio = first.join("studio")
    number = first.link(studio)
    first.nodes.administration.remove_node(studio)
    assert first.placed.gone == [(studio, "removed")]
    assert first.state(studio) == "left"
    assert first.store.members[studio].removed == WALL
    serial = first.store.members[studio].serial
    assert first.store.deny_list.is_denied(studio, serial)
    first.registry.on_link_down(studio, number, "connection ended")
    assert first.placed.gone == [(studio, "removed")], "its link's end is no second loss"
    await first.stop()
    second = start()
    assert second.registry.pool.members == {}
    assert second.store.deny_list.is_denied(studio, serial), "the list of denied nodes has the certificate, too"
    denied = second.greet(studio)
    assert isinstance(denied, Denied)
    assert (denied.reason, denied.final) == ("removed", True)


async def test_goodbye_removes_only_a_node_that_leaves(start: Callable[[], Coordinator]):
    one = start()
    studio, mini, air = (one.join(name) for name in ("studio", "mini", "air"))
    for node, reason in ((studio, "leave"), (mini, "asleep"), (air, "stopping")):
        one.registry.handle_frame(node, one.link(node), Goodbye(reason))
    assert [one.state(node) for node in (studio, mini, air)] == ["left", "asleep", "lost"]
    assert one.placed.gone == [(studio, "left"), (mini, "asleep"), (air, "stopped")]
    assert isinstance(one.greet(studio), Denied)
    assert isinstance(one.greet(mini), Welcome)
    assert one.nodes.directory.count_states() == {
        state.value: state.value in ("left", "asleep", "lost") for state in NodeState
    }


# greetings


async def test_welcome_identifies_the_coordinator(start: Callable[[], Coordinator]):
    one = start()
    one.nodes.admission.set_address_source(lambda: ("10.0.0.1:8081",))
    welcome = one.greet(one.join("studio"))
    assert isinstance(welcome, Welcome)
    assert (welcome.epoch, welcome.cluster, welcome.cluster_name, welcome.time, welcome.version) == (
        one.epoch,
        one.authority.cluster,
        "home",
        WALL,
        "1.2.3",
    )
    assert (welcome.addresses, welcome.generation) == (("10.0.0.1:8081",), 0)
    assert one.authority.is_sealed(0, welcome.seal)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"protocol": OLDEST_PROTOCOL - 1}, "protocol", "update macpool on the node"),
        ({"protocol": PROTOCOL + 1}, "protocol", "update macpool on the coordinator"),
        ({"certificate": NodeId("id-mini")}, "identity", "not the one of its certificate"),
        ({"machine": "another"}, "cloned", "belongs to another machine (studio)"),
    ],
)
async def test_a_wrong_hello_is_denied_for_good(
    start: Callable[[], Coordinator], changes: dict[str, Any], code: str, words: str
):
    one = start()
    studio = one.join("studio")
    denied = one.greet(studio, **changes)
    assert isinstance(denied, Denied)
    assert (denied.reason, denied.final) == (code, True)
    assert words in denied.message
    assert isinstance(one.greet(studio, protocol=OLDEST_PROTOCOL), Welcome)


async def test_a_sealed_higher_generation_shows_that_another_coordinator_counts(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    marks = one.superseded
    assert isinstance(one.greet(studio, generation=3, seal=b"no seal"), Welcome), "a claim without proof is ignored"
    assert isinstance(one.greet(studio, generation=0, seal=one.authority.seal_generation(0)), Welcome)
    assert marks == []
    seal = one.authority.seal_generation(3)
    denied = one.greet(studio, generation=3, seal=seal)
    assert isinstance(denied, Denied)
    assert (denied.reason, denied.final) == ("superseded", False)
    assert marks == [SupersededMark(3, seal, "studio", WALL)]


async def test_member_queries_return_offered_paths_only(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    one.nodes.queries.offer({"/api/v1/status": lambda: {"name": "home"}})
    peer, row = PeerIdentity(one.authority.cluster, studio), one.store.members[studio]

    def ask(path: str, machine: str = row.machine) -> bytes | Denied:
        return one.nodes.queries.answer(peer, row.serial, MemberQuery(PROTOCOL, studio, machine, path))

    assert ask("/api/v1/status") == b'{"name": "home"}'
    for denied, code in ((ask("/api/v1/keys"), "not_readable"), (ask("/api/v1/status", "another"), "cloned")):
        assert isinstance(denied, Denied)
        assert denied.reason == code


async def test_non_member_is_denied_without_a_change(start: Callable[[], Coordinator]):
    one = start()
    studio, peer = one.join("studio"), PeerIdentity(one.authority.cluster, NodeId("stranger"))
    stranger = one.nodes.admission.authorize(peer, "ab", replace(one.hello(studio), node="stranger"))
    assert isinstance(stranger, Denied)
    assert (stranger.reason, stranger.final) == ("removed", True)
    assert isinstance(one.greet(studio, certificate=NodeId("stranger"), version="9.9"), Denied)
    assert one.nodes.directory.describe_host(studio)[2] == "", "a version is believed with the node's own certificate"
    one.store.deny_list.add_node(studio, WALL, "its certificate was lost")
    denied = one.greet(studio)
    assert isinstance(denied, Denied)
    assert denied.reason == "removed"


async def test_member_query_without_offers_is_refused(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    peer, row = PeerIdentity(one.authority.cluster, studio), one.store.members[studio]
    denied = one.nodes.queries.answer(peer, row.serial, MemberQuery(PROTOCOL, studio, row.machine, "/x"))
    assert denied == Denied("not_readable", "a member may read nothing yet, not /x", final=True)


# links


async def test_each_report_publishes_a_view_with_only_its_node_changed(start: Callable[[], Coordinator]):
    one = start()
    studio, mini = one.join("studio"), one.join("mini")
    number = one.link(studio)
    one.link(mini)
    before, count = one.placed.views[-1], len(one.placed.views)
    began = asyncio.get_running_loop().time()
    one.registry.handle_frame(studio, number, a_report(2))
    assert len(one.placed.views) == count + 1
    after = one.placed.views[-1]
    assert after.find_node(mini) is before.find_node(mini)
    seen = one.seen(studio)
    assert seen is not before.find_node(studio)
    assert (seen.epoch, seen.name) == (number, "studio")
    assert began <= seen.reported_at <= asyncio.get_running_loop().time()
    assert one.registry.build_view().find_node(studio) is seen


@pytest.mark.parametrize("stage", list(EngineStage))
async def test_models_of_a_node_are_known_while_its_engine_starts_again(
    start: Callable[[], Coordinator], stage: EngineStage
):
    run = start()
    node = run.join("studio")
    link = run.link(node, report=False)
    loaded = a_model("one", groups=(BatchGroup(1, 2, 3),)), a_model("two", loaded=False, loading=True)
    for engine in (EngineStage.READY, stage):
        run.registry.handle_frame(node, link, a_report(engine=EngineState("mlx", engine), models=loaded))
    assert run.registry.get_node_view(node).models["one"].loaded, "what it reports itself counts in every stage"
    for report in (a_report(models=loaded), a_report(engine=EngineState("mlx", stage), models=())):
        run.registry.handle_frame(node, link, report)
    models = run.registry.get_node_view(node).models
    assert sorted(models) == ([] if stage is EngineStage.READY else ["one", "two"])
    assert not any(model.loaded or model.loading or model.groups for model in models.values())
    run.registry.handle_frame(node, link, a_report(models=(a_model("two"),)))
    assert list(run.registry.get_node_view(node).models) == ["two"]


async def test_a_nearer_deadline_replaces_the_timer_of_a_later_one(
    start: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
):
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_at = loop.call_at

    def record(when: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        timer = call_at(when, callback, *arguments)
        if callback == run.registry.tick:
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_at", record)
    run = start()
    studio = run.join("studio")
    (later,) = [timer for timer in timers if not timer.cancelled()]
    assert later.when() - loop.time() > member_transitions.SUSPECT_AFTER_SECONDS
    run.link(studio)
    (nearer,) = [timer for timer in timers if not timer.cancelled()]
    assert 0 < nearer.when() - loop.time() <= member_transitions.SUSPECT_AFTER_SECONDS
    run.registry.close()
    assert all(timer.cancelled() for timer in timers), "a registry that is closed changes no member"


async def test_large_cluster_publishes_one_view_for_simultaneous_reports(
    start: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
):
    one = start()
    studio, mini = one.join("studio"), one.join("mini")
    numbers = {node: one.link(node) for node in (studio, mini)}
    monkeypatch.setattr("coordinator.cluster.registry.MAX_IMMEDIATE_MEMBERS", 2)
    count = len(one.placed.views)
    one.registry.handle_frame(studio, numbers[studio], a_report(2))
    assert len(one.placed.views) == count + 1, "two are no large cluster"
    monkeypatch.setattr("coordinator.cluster.registry.MAX_IMMEDIATE_MEMBERS", 1)
    for _ in range(2):
        waiting = asyncio.create_task(one.registry.wait_until_node_answers(lambda: "no answer yet"))
        await asyncio.sleep(0)
        count = len(one.placed.views)
        for sequence in (3, 4):
            for node, number in numbers.items():
                one.registry.handle_frame(node, number, a_report(sequence, draining=sequence == 3))
        assert len(one.placed.views) == count
        await until(lambda before=count: len(one.placed.views) > before)
        assert len(one.placed.views) == count + 1
        assert [one.seen(node).state for node in numbers] == ["ready", "ready"]
        waiting.cancel()
    one.registry.handle_frame(studio, numbers[studio], a_report(5))
    one.registry.close()
    count = len(one.placed.views)
    await asyncio.sleep(0.05)
    assert len(one.placed.views) == count, "a registry that is closed publishes nothing"


async def test_a_node_that_reports_no_more_is_suspect_and_lost(
    start: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(member_transitions, "SUSPECT_AFTER_SECONDS", 0.05)
    one = start()
    studio = one.join("studio")
    number = one.link(studio)
    await until(lambda: one.seen(studio).state == "suspect")
    assert one.placed.gone == []
    monkeypatch.setattr(member_transitions, "LOST_AFTER_SECONDS", 0.1)
    one.registry.handle_frame(studio, number, a_report(2))
    await until(lambda: one.seen(studio).state == "lost")
    assert one.placed.gone == [(studio, "silent for 0.1 s")]


async def test_a_node_that_left_is_forgotten_after_a_while(
    start: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(member_transitions, "DELETE_AFTER_SECONDS", 0.05)
    one = start()
    studio, mini = one.join("studio"), one.join("mini")
    one.link(mini)
    one.greet(studio)
    one.link(studio)
    one.nodes.administration.remove_node(studio)
    await until(lambda: one.placed.forgotten)
    assert one.placed.forgotten == [studio]
    assert [node.id for node in one.placed.views[-1].nodes] == [mini]
    assert one.nodes.directory.find_member("studio") is None
    one.registry.on_link_down(studio, 1, "connection ended")
    assert one.nodes.directory.list_dangers() == []


async def test_a_node_is_ready_with_its_first_report_and_lost_with_its_link(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    number = one.link(studio, report=False)
    assert (one.state(studio), one.seen(studio).models) == ("joining", {})
    one.registry.handle_frame(studio, number, a_report())
    assert (one.state(studio), one.seen(studio).state) == ("ready", "ready")
    assert set(one.seen(studio).models) == {"tiny"}
    assert one.seen(studio).memory == a_report().memory
    finished = Finished(7, ("stop",), 1, 1)
    one.registry.handle_frame(studio, number, finished)
    assert one.placed.frames == [(studio, finished)]
    one.registry.on_link_down(studio, number, "cable")
    assert (one.state(studio), one.placed.gone) == ("lost", [(studio, "cable")])
    again = one.link(studio, report=False)
    assert again > number
    assert one.state(studio) == "joining"


async def test_reports_goodbyes_and_the_end_of_an_older_link_change_nothing(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    older = one.link(studio)
    newer = one.link(studio, report=False, instance="restarted")
    assert one.placed.gone == [(studio, "replaced")], "its requests went with the older link"
    before = one.registry.get_node_view(studio).memory
    one.registry.handle_frame(studio, older, a_report(draining=True, memory=a_memory(cap=99 * GIB)))
    assert one.registry.get_node_view(studio).memory == before
    one.registry.handle_frame(studio, older, Goodbye("leave"))
    one.registry.on_link_down(studio, older, "connection ended")
    assert one.state(studio) == "joining"
    one.registry.handle_frame(studio, newer, a_report())
    assert (one.state(studio), one.store.members[studio].removed) == ("ready", None)
    assert one.placed.gone == [(studio, "replaced")]


async def test_a_second_link_of_the_same_process_takes_over_without_a_loss(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    one.link(studio)
    one.link(studio, takeover=True)
    assert one.state(studio) == "ready"
    assert one.placed.gone == []


async def test_a_draining_or_paused_node_is_shown_as_such(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    number = one.link(studio)
    one.registry.handle_frame(studio, number, a_report(draining=True))
    assert one.state(studio) == "draining"
    one.registry.handle_frame(studio, number, a_report())
    assert one.state(studio) == "ready"


async def test_version_and_hardware_are_those_of_the_newest_hello(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    one.greet(studio, version="1.1.0", protocol=OLDEST_PROTOCOL)
    assert one.nodes.directory.describe_host(studio) == ("M4 Max", "macOS 26.1", "1.1.0")
    described = one.nodes.directory.build_node_row(studio, 0)
    assert (described["version"], described["protocol"], described["heard_seconds"]) == ("1.1.0", OLDEST_PROTOCOL, None)
    assert (described["phys"], described["headroom"], described["engine"]["state"]) == (None, None, ""), "no report yet"
    newer = Hardware("M5", 256 * GIB, 16, "macOS 26.2", "3.12")
    number = one.link(studio, hardware=newer)
    assert one.store.members[studio].hardware == newer
    assert one.nodes.directory.describe_host(studio) == ("M5", "macOS 26.2", "1.1.0")
    one.registry.handle_frame(studio, number, a_report())
    described = one.nodes.directory.build_node_row(studio, 3)
    assert (described["in_flight"], described["joined"], described["memory"]) == (3, WALL, 256 * GIB)
    assert 0 <= described["heard_seconds"] < 5


async def test_a_renewed_certificate_counts_after_a_restart(start: Callable[[], Coordinator]):
    first = start()
    studio = first.join("studio")
    number, before = first.link(studio), first.store.members[studio].serial
    first.registry.handle_frame(studio, number, RenewCertificate(new_request("studio").csr))
    after = first.store.members[studio].serial
    assert after != before
    first.registry.handle_frame(studio, number, RenewCertificate(b"no request"))
    assert first.store.members[studio].serial == after, "a bad request changes nothing"
    await first.stop()
    assert start().store.members[studio].serial == after


async def test_a_renewed_certificate_is_sent_once_its_serial_is_on_the_disk(
    start: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
):
    written, flush, sent = asyncio.Event(), Database.flush, list[tuple[NodeId, Frame]]()

    async def hold(store: Database) -> None:
        await written.wait()
        await flush(store)

    monkeypatch.setattr(Database, "flush", hold)
    one = start()
    studio = one.join("studio")
    monkeypatch.setattr(one.nodes.links.table, "send", lambda node, frame: sent.append((node, frame)))
    one.registry.handle_frame(studio, one.link(studio), RenewCertificate(new_request("studio").csr))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sent == []
    written.set()
    await until(lambda: sent)
    ((node, frame),) = sent
    assert isinstance(frame, CertificateRenewed)
    assert (node, read_certificate(frame.certificate).serial) == (studio, one.store.members[studio].serial)


async def test_a_failed_write_ends_no_link(start: Callable[[], Coordinator], tmp_path: Path):
    one = start()
    studio, mini = one.join("studio"), one.join("mini")
    number = one.link(studio)
    other = sqlite3.connect(tmp_path / "cluster.db")
    other.execute("DROP TABLE audit")
    other.close()
    one.store.audit.add(WALL, "person", "create keys", "laptop")
    with pytest.raises(StoreError):
        await one.store.flush()
    one.link(mini, hardware=replace(HARDWARE, cores=12))
    one.registry.handle_frame(studio, number, RenewCertificate(new_request("studio").csr))
    assert (one.state(studio), one.state(mini)) == ("ready", "ready")
    one.registry.handle_frame(studio, number, Goodbye("leave"))
    assert one.state(studio) == "left"
    assert isinstance(one.greet(studio), Denied)
    with pytest.raises(StoreError):
        one.close()


# for users


async def test_a_member_is_found_by_name_or_id_and_of_two_the_one_that_is_here(start: Callable[[], Coordinator]):
    one = start()
    gone = one.join("studio")
    one.nodes.administration.remove_node(gone)
    here = NodeId("id-2")
    row = MemberRow(here, "studio", "m2", HARDWARE, "ab", WALL)
    one.store.members.put(row)
    one.registry.add_member(row)
    assert one.nodes.directory.find_member("studio") == here
    assert one.nodes.directory.find_member(gone) == gone
    assert one.nodes.directory.find_member("mini") is None


async def test_warnings_are_of_the_nodes_that_are_linked(start: Callable[[], Coordinator]):
    one = start()
    studio, mini = one.join("studio"), one.join("mini")
    number = one.link(studio)
    one.link(mini)
    assert one.nodes.directory.list_warnings() == []
    failed = a_report(engine=EngineState("mlx", "failed", "it has no weights"))
    one.registry.handle_frame(studio, number, failed)
    assert one.nodes.directory.list_warnings() == ["studio: its engine is failed: it has no weights"]
    assert one.nodes.directory.list_dangers() == []
    bare = a_report(memory=replace(a_memory(), margin=0), enforcement=Enforcement(MemoryLevel.OVER_HARD))
    one.registry.handle_frame(studio, number, bare)
    dangers = one.nodes.directory.list_dangers()
    assert dangers == [
        "studio: memory.margin is 0: no memory is kept for short-lived buffers",
        f"studio: it is over its cap of {a_memory().cap // GIB}.0 GiB minus leases",
    ]
    assert one.nodes.directory.list_warnings()[:2] == dangers, "dangers are listed first"
    one.registry.on_link_down(studio, number, "cable")
    assert not [text for text in one.nodes.directory.list_warnings() if text.startswith("studio")]
    assert one.nodes.directory.list_dangers() == []


async def test_an_answer_is_waited_for_until_the_node_can_give_one(start: Callable[[], Coordinator]):
    one = start()
    studio = one.join("studio")
    waiting = asyncio.create_task(one.registry.wait_until_node_answers(lambda: studio))
    number = one.link(studio, report=False)
    one.registry.handle_frame(studio, number, a_report(engine=EngineState("mlx", "starting")))
    await asyncio.sleep(0)
    assert not waiting.done()
    one.registry.handle_frame(studio, number, a_report())
    await asyncio.wait_for(waiting, 30)
