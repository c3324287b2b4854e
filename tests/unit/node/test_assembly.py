"""The parts of a node together: its own folder of models, and the states in which the node works."""

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import NodeIdentity, new_request, store_identity
from node.assembly import Node, add_own_folder, assemble
from node.memory.limits import LeaseHolder, Limiter
from node.memory.sensor import open_machine
from node.settings import NodeSettings, resolve_settings
from tests.support.cluster.enrolment import HARDWARE
from wire.frames import EngineReport
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
async def node(tmp_path: Path, settings: NodeSettings, identity: NodeIdentity, limiter: Limiter) -> Node:
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
