"""The parts of a node together: its own folder of models, and the states in which the node works."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.tls.cluster_ca import ClusterCa
from node import assembly
from node.agent.identity import NodeIdentity, new_request, store_identity
from node.agent.reporter import Reporter
from node.assembly import Node, add_own_folder, assemble
from node.engine_process.supervisor import Supervisor
from node.memory.limits import LeaseHolder, Limiter
from node.memory.sensor import open_machine
from node.settings import NodeSettings, resolve_settings
from tests.support.cluster.enrolment import HARDWARE
from tests.unit.node.video.test_packages import package
from wire.frames import EngineReport, PauseNode
from wire.identity import NodeId
from wire.report import Memory
from wire.units import GIB


@pytest.fixture
def settings() -> NodeSettings:
    return resolve_settings([("x", {"engine.kind": "scripted", "engine.scripted.memory": "64GiB"})]).value


@pytest.fixture
def identity(tmp_path: Path) -> NodeIdentity:
    authority, request = ClusterCa(tmp_path / "c", time.time), new_request("mini")
    signed = authority.sign_request(request.csr, NodeId("n-1"), "mini")
    return store_identity(tmp_path / "identity", request, signed, authority.cluster, authority.ca, "m1")


@pytest.fixture
def limiter(settings: NodeSettings) -> Limiter:
    return Limiter(settings, open_machine(settings), {})


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the reports that the parts ask for: `now` or `soon`."""
    found: list[str] = []
    monkeypatch.setattr(Reporter, "send", lambda _: found.append("now"))
    monkeypatch.setattr(Reporter, "send_soon", lambda _: found.append("soon"))
    return found


@pytest.fixture
async def node(
    tmp_path: Path, settings: NodeSettings, identity: NodeIdentity, limiter: Limiter, reports: list[str]
) -> Node:
    machine = open_machine(settings)
    return assemble(identity, settings, tmp_path / "state", machine, limiter, HARDWARE, version="1.2")


def test_the_folder_of_own_models_is_searched_last(tmp_path: Path, settings: NodeSettings) -> None:
    given = replace(settings, models=replace(settings.models, folders=("/a", "/b"), preload=("m",)))
    found = add_own_folder(given, tmp_path)
    assert found.models.folders == ("/a", "/b", str(tmp_path / "node" / "models"))
    assert replace(found, models=replace(found.models, folders=given.models.folders)) == given


@pytest.mark.parametrize(("running", "waiting", "works"), [(0, 0, False), (1, 0, True), (0, 1, True)])
async def test_a_node_works_while_a_request_runs_or_is_queued(
    node: Node, running: int, waiting: int, works: bool
) -> None:
    assert not node.is_working()
    node.supervisor.reports.store(EngineReport(Memory(), (), running, waiting), 1.0)
    assert node.is_working() is works
    node.supervisor.reports.clear()
    assert not node.is_working()


async def test_a_node_works_while_memory_is_leased(node: Node, limiter: Limiter) -> None:
    limiter.begin_lease(GIB, LeaseHolder.VIDEO)
    assert node.is_working()
    limiter.end_lease()
    assert not node.is_working()


async def test_a_node_works_while_an_order_about_model_files_runs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.model_orders, "is_working", lambda: True)
    assert node.is_working()


async def test_files_are_hashed_only_while_the_node_is_shared_and_does_not_work(
    tmp_path: Path,
    settings: NodeSettings,
    identity: NodeIdentity,
    limiter: Limiter,
    reports: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Callable[[], bool]] = []

    def keep(*_: object, is_busy: Callable[[], bool], on_change: object) -> None:
        given.append(is_busy)

    monkeypatch.setattr(assembly, "IdleHasher", keep)
    machine = open_machine(settings)
    node = assemble(identity, settings, tmp_path / "state", machine, limiter, HARDWARE, version="1.2")
    (is_busy,) = given
    assert not is_busy()
    node.sharing.apply_order(PauseNode(None, "ann"))
    assert is_busy()
    node.sharing.apply_order(PauseNode(0.0, "ann"))
    assert not is_busy()
    monkeypatch.setattr(node.model_orders, "is_working", lambda: True)
    assert is_busy()


async def test_the_engine_has_its_scratch_folder_and_the_wired_memory_without_a_worker(
    tmp_path: Path,
    settings: NodeSettings,
    identity: NodeIdentity,
    limiter: Limiter,
    reports: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[object, object]] = []

    class Noted(Supervisor):
        def __init__(self, *parts: Any, **named: Any) -> None:
            given.append((named["scratch"], named["wired"]))
            super().__init__(*parts, **named)

    monkeypatch.setattr(assembly, "Supervisor", Noted)
    machine = open_machine(settings)
    assemble(identity, settings, tmp_path / "state", machine, limiter, HARDWARE, version="1.2")
    assert given == [(tmp_path / "state" / "node" / "scratch", limiter.read_wired)]


async def test_changes_of_sharing_and_of_video_are_reported(
    node: Node, monkeypatch: pytest.MonkeyPatch, reports: list[str]
) -> None:
    monkeypatch.setattr(node.video.lease_manager, "pause", lambda why: reports.append(f"pause {why}"))
    node.sharing.apply_order(PauseNode(None, "ann"))
    assert not node.sharing.sharing_state.shared
    why = node.sharing.sharing_state.why
    assert reports == [f"pause {why}", "soon", "now"]
    reports.clear()
    node.sharing.apply_order(PauseNode(0.0, "ann"))
    assert node.sharing.sharing_state.shared
    assert reports == ["pause ", "soon", "now"]
    reports.clear()
    node.video.ray.set_allowed(on=True)
    assert reports == ["soon"]


async def test_models_that_the_node_made_itself_are_found(node: Node, tmp_path: Path) -> None:
    package(tmp_path / "state" / "node" / "models" / "wan")
    node.video.offer.start()
    try:
        async with asyncio.timeout(20):
            await node.video.offer.checked.wait()
        assert list(node.video.offer.packages) == ["wan"]
    finally:
        await node.video.offer.stop()
