"""Best offline plan of model loads for a recorded sequence of requests, as a bound for the router.

The plan knows all requests in advance. It serves them in order of arrival, each at once where its model is loaded. For
any other request a node unloads a model that no request uses, or waits for the first node without requests. Belady's
rule (the model whose next request is latest leaves) is optimal without durations. With durations the choice also
changes which nodes are free later. All choices are therefore followed, and the `MAX_STATES` with the fewest loads are
kept after each request.
"""

from collections.abc import Sequence
from typing import NamedTuple

MAX_STATES = 300
"""States kept after each request; 3,000 find no better plan for six-models.toml."""


class PlannedRequest(NamedTuple):
    """One request: arrival and service time in seconds, and its model."""

    arrived: float
    model: str
    seconds: float


class _Resident(NamedTuple):
    """Loaded model of a node, the end of its load and of its last request."""

    model: str
    ready_at: float
    busy_until: float


_State = tuple[_Resident, ...]


def count_fewest_loads(requests: Sequence[PlannedRequest], nodes: int, load_seconds: float) -> int:
    """Return the fewest loads with which `nodes` nodes, each with memory for one model, serve the requests."""
    states: dict[_State, int] = {(): 0}
    for request in sorted(requests):
        after: dict[_State, int] = {}
        for state, loads in states.items():
            for new, more in _list_choices(state, request, nodes, load_seconds):
                settled = tuple(sorted(_settle(one, request.arrived) for one in new))
                after[settled] = min(loads + more, after.get(settled, loads + more))
        states = dict(sorted(after.items(), key=lambda one: one[1])[:MAX_STATES])
    return min(states.values())


def _list_choices(state: _State, request: PlannedRequest, nodes: int, load_seconds: float) -> list[tuple[_State, int]]:
    """Return the states after each way to serve a request, with the number of its loads."""
    now = request.arrived
    for one in state:
        if one.model == request.model:
            end = max(one.busy_until, max(now, one.ready_at) + request.seconds)
            return [((*_without(state, one), one._replace(busy_until=end)), 0)]
    free_at = now
    leaving: list[_Resident | None] = [None]
    if len(state) == nodes:
        free_at = max(now, min(one.busy_until for one in state))
        leaving = [one for one in state if one.busy_until <= free_at]
    ready = free_at + load_seconds
    resident = _Resident(request.model, ready, ready + request.seconds)
    return [((*_without(state, one), resident), 1) for one in leaving]


def _without(state: _State, leaving: _Resident | None) -> _State:
    return tuple(one for one in state if one is not leaving)


def _settle(one: _Resident, now: float) -> _Resident:
    return one if one.busy_until > now else _Resident(one.model, 0.0, 0.0)
