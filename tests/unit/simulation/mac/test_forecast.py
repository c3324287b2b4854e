"""Forecast of the clairvoyant router: room with the complete answer, and the time to the first token."""

import pytest

from node.engine.scheduling.rules.chunk_policy import CHUNK_PER_STEP
from node.engine.scripted.sequence import ScriptedSequence
from node.engine.scripted.table import ScriptedTable
from simulation.mac.ended_chats import EndedChat, EndedChats
from simulation.mac.forecast import NodeForecast, compute_prefill_end
from simulation.mac.hardware import CHIPS, ChipCosts, compute_default_cap
from simulation.mac.node_memory import NodeMemory
from simulation.mac.node_models import NodeModels
from simulation.scenario import ModelSpec
from simulation.workload import ConversationTurn
from wire.capacity.arithmetic import estimate_request_need
from wire.units import GIB, MIB

DECODING = (1 + CHUNK_PER_STEP) / CHUNK_PER_STEP
"""Factor on the time of prefills while rows decode."""


@pytest.mark.parametrize(
    ("lefts", "seconds"),
    [
        ([3.0], 3.0),
        ([5.0, 2.0], 4.0),
        ([2.0, 5.0], 7.0),
        ([9.0, 4.0, 2.0], 4.0),
        ([9.0, 2.0, 4.0], 12.0),
        ([1.0, 1.0, 6.0], 8.0),
        ([4.0, 1.0, 6.0], 11.0),
    ],
)
def test_prefills_alternate_between_the_shortest_and_the_oldest(lefts: list[float], seconds: float):
    assert compute_prefill_end(lefts, decoding=False) == pytest.approx(seconds)
    assert compute_prefill_end(lefts, decoding=True) == pytest.approx(seconds * DECODING)


def ask(prompt: int, output: int = 10, session: str = "", model: str = "a") -> ConversationTurn:
    return ConversationTurn("r", "k", model, prompt, output, prompt * 4, None, 0.0, session)


class Node:
    """Two models of 4 GiB, of which `loaded` are in memory, on a disk that reads 1 GiB per second."""

    def __init__(self, loaded: str = "a") -> None:
        total = 24 * GIB
        self.models = NodeModels(CHIPS["M4"], GIB, compute_default_cap(total))
        for name in "ab":
            spec = ModelSpec(name=name, weights="4GiB", kv_per_token="1MiB", active=8.0)
            self.models.add(spec, loaded=name in loaded)
        self.chats, costs = EndedChats(), ChipCosts(CHIPS["M4"], self.models.list_costs())
        self.memory = NodeMemory(total, self.models, self.chats)
        self.each = costs.get_pace("a").each
        queued = list[ScriptedSequence]()
        self.forecast = NodeForecast(self.models, self.memory, self.chats, costs, ScriptedTable(4), lambda: queued)

    def find_longest(self, model: str = "a") -> int:
        """Return the tokens of the longest prompt that fits."""
        return max(tokens for tokens in range(0, 20_000, 16) if self.forecast.fits(ask(tokens, model=model), 0.0))


def test_the_first_token_follows_the_load_and_the_tokens_that_are_not_cached():
    node = Node()
    assert node.forecast.estimate_first_token(ask(1000), 0.0) == pytest.approx(1000 * node.each)
    node.chats.put("talk", EndedChat("a", 400, MIB))
    assert node.forecast.estimate_first_token(ask(1000, session="talk"), 0.0) == pytest.approx(600 * node.each)
    assert node.forecast.estimate_first_token(ask(1000, model="b"), 0.0) == pytest.approx(4.0 + 1000 * node.each)
    node.models.load(node.models["b"], 0.0)
    assert node.forecast.estimate_first_token(ask(1000, model="b"), 1.0) == pytest.approx(3.0 + 1000 * node.each)


def test_chats_and_idle_models_make_room_and_the_weights_of_a_load_count_once():
    longest = Node().find_longest()
    node = Node()
    node.chats.put("talk", EndedChat("a", 400, 2 * GIB))
    assert node.find_longest() == longest
    both = Node("ab")
    assert both.find_longest() == longest, "the other model is idle"
    both.models["b"].add_request(0.0)
    assert both.find_longest() == pytest.approx(longest - 4096, abs=300)
    loading = Node("")
    unloaded = loading.find_longest()
    loading.models.load(loading.models["a"], 0.0)
    assert loading.find_longest() == unloaded
    assert not node.forecast.fits(ask(10, model="c"), 0.0)


def test_a_request_that_the_idle_node_can_hold_is_no_request_for_ever():
    node, empty = Node("ab"), Node()
    need = estimate_request_need(empty.models["a"].to_report(0.0), 4000, 10)
    assert node.memory.change_lease((node.memory.read(0.0).headroom or 0) + 4 * GIB - need // 2, 0.0)
    assert not node.forecast.fits(ask(4000), 0.0)
    assert node.forecast.can_ever_hold(ask(4000), 0.0)
    assert not node.forecast.can_ever_hold(ask(40_000), 0.0)
    assert not node.forecast.can_ever_hold(ask(10, model="c"), 0.0)
