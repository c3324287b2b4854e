"""Forecast for one node: whether a request fits, and its time to first token if no further request arrives.

Only the clairvoyant router (`simulation.routers`), which knows every answer's length, uses the forecast.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from node.engine.scheduling.rules.chunk_policy import CHUNK_PER_STEP
from node.engine.scripted.sequence import ScriptedSequence
from node.engine.scripted.table import ScriptedTable
from simulation.mac.ended_chats import EndedChats
from simulation.mac.hardware import ChipCosts
from simulation.mac.node_memory import NodeMemory
from simulation.mac.node_models import NodeModels, sum_weights
from simulation.workload import ConversationTurn
from wire.capacity.arithmetic import Fits, can_ever_fit, estimate_request_need, judge


class NodeForecast:
    """Forecast for one node. Times are virtual, in seconds.

    `table` has the rows of the node's engine. `queued()` returns the node's requests whose prefill has not ended,
    including those that wait for their model.
    """

    def __init__(
        self,
        models: NodeModels,
        memory: NodeMemory,
        chats: EndedChats,
        costs: ChipCosts,
        table: ScriptedTable,
        queued: Callable[[], list[ScriptedSequence]],
    ) -> None:
        self._models = models
        self._memory = memory
        self._chats = chats
        self._costs = costs
        self._table = table
        self._queued = queued

    def fits(self, turn: ConversationTurn, now: float) -> bool:
        """Return whether a request with its complete answer would fit now, after evicting chats and idle models.

        Return False if the node does not have the model.
        """
        model = self._models.get(turn.model)
        if model is None:
            return False
        need = estimate_request_need(model.to_report(now), turn.prompt, turn.output)
        need -= model.model.weights if model.loading else 0
        reusable = self._chats.nbytes + sum_weights(self._models.list_idle(model))
        return isinstance(judge(replace(self._memory.read(now), reusable=reusable), need), Fits)

    def can_ever_hold(self, turn: ConversationTurn, now: float) -> bool:
        """Return whether a request with its complete answer would fit on the idle node, without other models or leases.

        `now` is in virtual seconds. Return False if the node does not have the model.
        """
        model = self._models.get(turn.model)
        return model is not None and can_ever_fit(self._memory.read(now), model.model, turn.prompt, turn.output)

    def estimate_first_token(self, turn: ConversationTurn, now: float) -> float:
        """Return the seconds to the first token of a request that arrives now, including the load of its model.

        Memory is not checked (`fits`). Raise `KeyError` if the node does not have the model.
        """
        model = self._models[turn.model]
        mine = turn.prompt - self._chats.find(turn.session, turn.model, turn.prompt)
        lefts = [request.left * self._costs.get_pace(request.model).each for request in self._queued()]
        wait = self._models.estimate_load_seconds(model, now)
        own = mine * self._costs.get_pace(turn.model).each
        return wait + compute_prefill_end([*lefts, own], decoding=bool(self._table.rows))


def compute_prefill_end(lefts: Sequence[float], *, decoding: bool) -> float:
    """Return the seconds until the newest of several prefills ends. `lefts` are their remaining seconds, oldest first.

    The engine alternates between the shortest and the oldest prefill. `decoding` is whether rows decode, which takes a
    share of the time. `lefts` must not be empty.
    """
    share = CHUNK_PER_STEP / (1 + CHUNK_PER_STEP) if decoding else 1.0
    return _compute_last_end(list(lefts)) / share


def _compute_last_end(lefts: list[float]) -> float:
    last, spent, oldest, place = len(lefts) - 1, 0.0, 0, 0
    order = sorted(range(len(lefts)), key=lefts.__getitem__)
    done = [False] * len(lefts)
    while not done[last]:
        while done[oldest]:
            oldest += 1
        while done[order[place]]:
            place += 1
        shortest = order[place]
        if lefts[oldest] <= lefts[shortest]:
            spent += lefts[oldest]
            done[oldest] = True
        else:
            spent += 2 * lefts[shortest]
            lefts[oldest] -= lefts[shortest]
            done[shortest] = True
    return spent
