"""Memory of a simulated node: its readings, evictions for requests, leases, and room for ended chats."""

import pytest

from node.engine.memory.gate import GateSite
from simulation.mac.ended_chats import CACHE_SHARE, EndedChat, EndedChats
from simulation.mac.hardware import BASE, CHIPS, compute_default_cap
from simulation.mac.node_memory import NodeMemory
from simulation.mac.node_models import NodeModels
from simulation.scenario import ModelSpec
from wire.capacity.arithmetic import compute_default_margin
from wire.capacity.batches import compute_row_bytes
from wire.units import GIB

TOTAL = 64 * GIB
CAP = compute_default_cap(TOTAL)
MARGIN = compute_default_margin(CAP)
WEIGHTS = 4 * GIB


class Node:
    """Models of 4 GiB each, of which `loaded` are in memory, on a disk that reads 1 GiB per second."""

    def __init__(self, loaded: str = "c") -> None:
        self.models = NodeModels(CHIPS["M4"], GIB, CAP)
        for name in "abc":
            self.models.add(
                ModelSpec(name=name, weights="4GiB", kv_per_token="1MiB", active=8.0), loaded=name in loaded
            )
        self.chats = EndedChats()
        self.memory = NodeMemory(TOTAL, self.models, self.chats)

    @property
    def headroom(self) -> int:
        room = self.memory.read(0.0).headroom
        assert room is not None
        return room

    def keep(self, session: str, tokens: int) -> None:
        self.memory.keep_chat(session, self.models["c"], tokens, 0.0)


def test_stored_tokens_are_active_in_a_report_and_reserved_otherwise():
    node = Node()
    model = node.models["c"]
    (row,) = model.ledger.commit(1000, 1)
    row.record_prefill(500, 500)
    node.chats.put("a", EndedChat("c", 100, GIB))
    own = node.memory.read(0.0)
    assert node.memory.highest == 0, "only reports count"
    report = node.memory.read(0.0, reported=True)
    committed, stored = model.ledger.compute_committed_bytes(), model.ledger.compute_stored_bytes()
    assert committed > stored > 0
    assert (own.phys, own.active, own.reserved) == (BASE + WEIGHTS + GIB, WEIGHTS + GIB, committed)
    assert report.active == WEIGHTS + GIB + stored
    assert (report.phys, report.reserved) == (BASE + report.active, committed - stored)
    assert own.headroom == report.headroom == CAP - MARGIN - BASE - WEIGHTS - GIB - committed
    assert (own.reusable, report.reusable) == (0, GIB)
    assert node.memory.highest == report.phys
    node.chats.evict_oldest()
    node.memory.read(0.0, reported=True)
    assert node.memory.highest == report.phys


def test_leases_add_up_and_lower_the_ceiling():
    node, before = Node(), Node().headroom
    for size, leased in ((3 * GIB, 3), (2 * GIB, 5), (-3 * GIB, 2)):
        assert node.memory.change_lease(size, 0.0)
        memory = node.memory.read(0.0)
        assert (memory.leases, memory.ceiling, memory.cap) == (leased * GIB, CAP - leased * GIB, CAP)
        assert memory.headroom == before - leased * GIB
    assert not node.memory.change_lease(before + WEIGHTS, 0.0)
    assert node.memory.read(0.0).leases == 2 * GIB
    assert node.models["c"].loaded, "without the idle model, the lease would not fit either"


def test_chats_are_evicted_before_idle_models_and_only_as_many_as_necessary():
    node = Node("abc")
    for name in ("old", "new"):
        node.chats.put(name, EndedChat("c", 100, GIB))
    room = node.headroom
    assert node.memory.check(GateSite.PREFILL, 0.0, room) is None
    assert node.chats.nbytes == 2 * GIB
    assert node.memory.check(GateSite.PREFILL, 0.0, room + GIB) is None
    assert (node.chats.nbytes, node.models.sum_loaded_bytes()) == (GIB, 3 * WEIGHTS)
    node.models["b"].add_request(1.0)
    assert node.memory.check_for(room + 3 * GIB, 0.0, node.models["a"]) is None
    assert (node.chats.nbytes, [model.loaded for model in node.models]) == (0, [True, True, False])


def test_nothing_is_released_for_a_need_that_all_of_it_would_not_cover():
    node = Node("abc")
    node.chats.put("a", EndedChat("c", 100, GIB))
    refused = node.memory.check(GateSite.PREFILL, 0.0, node.headroom + GIB + 3 * WEIGHTS + 1)
    assert refused is not None
    assert (node.chats.nbytes, node.models.sum_loaded_bytes()) == (GIB, 3 * WEIGHTS)


def test_a_later_turn_replaces_the_earlier_one_of_its_chat():
    node = Node()
    kv = node.models["c"].model.kv
    for tokens in (1000, 1500):
        node.keep("a", tokens)
        assert (node.chats.nbytes, node.chats.find("a", "c", 10**6)) == (compute_row_bytes(kv, tokens), tokens)
    node.keep("", 1000)
    assert node.chats.to_report().entries == 1


def test_chats_have_a_share_of_the_cap_without_weights_and_the_oldest_ones_leave():
    node = Node("abc")
    limit = int((CAP - 3 * WEIGHTS) * CACHE_SHARE)
    kv = node.models["c"].model.kv
    most = next(tokens for tokens in range(20_000, 0, -1) if compute_row_bytes(kv, tokens) <= limit)
    node.keep("a", most + 1)
    assert not node.chats, "it is larger than the share"
    node.keep("a", most)
    assert node.chats.nbytes == compute_row_bytes(kv, most)
    node.keep("b", 1000)
    report = node.chats.to_report()
    assert (report.entries, report.evicted) == (1, (b"a",))
    node.keep("b", most + 1)
    assert not node.chats, "the earlier turn is of no use"


@pytest.mark.parametrize(("spare", "kept"), [(0, True), (-1, False)])
def test_a_chat_is_kept_if_memory_has_room(spare: int, kept: bool):
    node = Node()
    size = compute_row_bytes(node.models["c"].model.kv, 1000)
    assert node.memory.change_lease(node.headroom - size - spare, 0.0)
    node.keep("a", 1000)
    assert bool(node.chats) is kept
    assert node.headroom == (0 if kept else size - 1)
