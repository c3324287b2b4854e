"""Effects of the sharing rule on a node with a request, a lease and a real engine process."""

from pathlib import Path

import pytest

from node.agent.links import CoordinatorLinks
from node.agent.sharing_effects import SharingEffects
from node.hub.quantization.quantizer import Quantizer
from node.sharing.policy import SHARED, Occupancy, SharingAction, SharingState
from tests.support.video.standin import standin
from tests.support.video.studio import Node
from tests.unit.node.agent.test_links import open_link
from tests.unit.node.video.test_lease_manager import MODEL, settings
from tests.unit.node.video.test_packages import package
from wire.frames import Failed
from wire.refusals import FailureCode

STOPPED = SharingState(shared=False, why="its owner uses it")


async def test_each_action_of_the_sharing_rule_ends_one_use_of_the_mac(tmp_path: Path) -> None:
    package(tmp_path / "packages" / MODEL)
    standin(tmp_path)
    node = Node(tmp_path / "node", settings(tmp_path), attends=False, model=MODEL)
    links, told = CoordinatorLinks(), list[str]()
    quantizer = Quantizer(node.settings, node.folder, node.limiter, node.poll, node.supervisor, {})
    effects = SharingEffects(links, node.supervisor, node.lender, quantizer, told.append)
    effects.changed.subscribe(lambda: told.append("changed"))
    await node.start()
    try:
        _, transport = open_link(links, 3)
        node.chat(3)
        node.ask()
        await node.answer()
        assert effects.read_occupancy() == Occupancy(1, lending=True)
        effects.on_sharing_change(STOPPED)
        assert told == [STOPPED.why, "changed"]
        assert effects.read_occupancy() == Occupancy(1, lending=True), "running work may continue for a while"
        effects.apply_sharing_action(SharingAction.END_REQUESTS, STOPPED)
        await transport.receive(1)
        assert transport.frames == [Failed(3, FailureCode.NODE_STOPPING, f"its Mac stopped sharing: {STOPPED.why}")]
        assert not node.supervisor.live
        assert effects.read_occupancy() == Occupancy(lending=True)
        effects.apply_sharing_action(SharingAction.END_LEASE, STOPPED)
        assert STOPPED.why in (await node.ended()).message
        assert effects.read_occupancy() == Occupancy()
        effects.apply_sharing_action(SharingAction.REST, STOPPED)
        assert effects.read_occupancy() == Occupancy(resting=True)
        effects.on_sharing_change(SHARED)
        effects.apply_sharing_action(SharingAction.WAKE, SHARED)
        assert (told[2:], effects.read_occupancy()) == (["", "changed"], Occupancy())
    finally:
        await node.stop()


async def test_a_quantization_is_paused_counts_as_leased_memory_and_ends_as_a_lease_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "packages" / MODEL)
    standin(tmp_path)
    node = Node(tmp_path / "node", settings(tmp_path), attends=False, model=MODEL)
    links, told = CoordinatorLinks(), list[tuple[str, str]]()
    quantizer = Quantizer(node.settings, node.folder, node.limiter, node.poll, node.supervisor, {})
    monkeypatch.setattr(quantizer, "pause", lambda why: told.append(("pause", why)))
    monkeypatch.setattr(quantizer, "end", lambda why: told.append(("end", why)))
    effects = SharingEffects(links, node.supervisor, node.lender, quantizer, lambda why: told.append(("sharing", why)))
    effects.on_sharing_change(STOPPED)
    effects.apply_sharing_action(SharingAction.END_LEASE, STOPPED)
    effects.on_sharing_change(SharingState(shared=True, why="it is plugged in"))
    assert told == [
        ("sharing", STOPPED.why),
        ("pause", STOPPED.why),
        ("end", STOPPED.why),
        ("sharing", ""),
        ("pause", ""),
    ]
    assert not effects.read_occupancy().lending
    monkeypatch.setattr(Quantizer, "holding", True)
    assert effects.read_occupancy().lending
