"""Placement in a large cluster: rank all nodes with arrays, then apply the exact rule to the leader.

Theory. `place.place` examines every node at 5 us each: acceptable for a household, 5 ms for a thousand machines. Here a
table per model keeps the inputs of that rule as columns; a report or a reservation rewrites one row. A request ranks
all rows at once, approximately: its need is a linear function of its length. The exact rule then examines the leader. A
feasible leader is taken, and no request goes to a node that `place` would not allow. Otherwise the next leader is
examined, MAX_LEADERS times in all. After that, or where no row seems to fit, `place` decides. Arrays therefore only
save time: no request is refused by an approximation.

A small noise with a random offset separates equal nodes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from router.placement.cluster_view import ClusterView, NodeView
from router.placement.place import (
    ANSWER_WEIGHT,
    FIRST,
    HEADROOM_SATURATION,
    MIN_LOAD_LEFT_SHARE,
    POLICIES,
    PREFILL_SLOWDOWN_WHILE_DECODING,
    PREFIX_HIT_SHARE,
    ROW_WEIGHT,
    TTFT_STEP_SECONDS,
    AttemptHistory,
    Candidate,
    HeadroomCorrection,
    NoPlacement,
    Placement,
    Policy,
    ResourceDemand,
    consider,
    place,
    unavailable_reason,
)
from router.placement.prefix_affinity import NOWHERE
from router.placement.reservations import ReservationLedger
from wire.capacity.arithmetic import headroom, occupied, request_need
from wire.identity import NodeId
from wire.report import ROW_COST, Model

MAX_LEADERS = 8
"""Leaders to examine before `place` examines all nodes."""
_SHORT, _LONG, _ANSWER = 256, 4096, 64
"""Prompt lengths and answer length between which a need is linear, in tokens."""

_MARK, _STEP, _KNOWN, _FRACTION = 1e10, 1e4, 5e3, 1e3
"""Weights of the ranking criteria, each above all that follow it.

The order is: room for one more such request, a step of time, the cached share, the free fraction. A row without room
for one request is therefore behind all rows with room.
"""
_NOTHING = (0.0, 0.0, 1.0, 0.0)

Column = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class RankInputs:
    """Columns by which a policy may rank the nodes of a model, one number per node."""

    need: Column
    """Bytes needed; 1 for a node that gets full marks."""
    headroom: Column
    """Bytes of headroom."""
    time: Column
    """Expected time of the request in seconds, with the weights of `place.Balanced`."""
    fraction: Column
    """Share of the memory that is free, weighted as the last criterion."""
    noise: Column
    """Noise below 1, which separates equal nodes."""


def rank_balanced(rows: RankInputs) -> Column:
    """Return the rank of each node in the order of `place.Balanced`. The smallest rank leads."""
    marks = rows.headroom / rows.need
    np.floor(np.minimum(marks, HEADROOM_SATURATION, out=marks), out=marks)
    marks *= _MARK
    rank = rows.time * (1 / TTFT_STEP_SECONDS)
    np.floor(rank, out=rank)
    rank *= _STEP
    rank -= marks
    rank -= rows.fraction
    rank += rows.noise
    return rank


def rank_most_headroom(rows: RankInputs) -> Column:
    """Return the rank of each node in the order of `place.MostHeadroom`. The smallest rank leads."""
    return rows.noise - rows.headroom


RANKS: Mapping[Policy, Callable[[RankInputs], Column]] = MappingProxyType(
    {POLICIES["balanced"]: rank_balanced, POLICIES["most_headroom"]: rank_most_headroom}
)
"""Array ranking of each policy; for other policies `place` examines every node."""


class _Table:
    """Columns of one model, one row per node."""

    def __init__(self, count: int) -> None:
        self.headroom: Column = np.zeros(count)
        """Bytes of headroom."""
        self.fixed: Column = np.ones(count)
        """Constant part of the bytes needed."""
        self.slope: Column = np.zeros(count)
        """Bytes needed per token."""
        self.wait: Column = np.zeros(count)
        """Seconds before a prompt starts."""
        self.token: Column = np.zeros(count)
        """Seconds per prompt token."""
        self.answer: Column = np.zeros(count)
        """Seconds per generated token."""
        self.fraction: Column = np.zeros(count)
        self.read: list[tuple[float, float, float, float]] = [_NOTHING] * count
        """Room, wait, ceiling and seconds per generated token from the report, without reservations and other rows."""
        self.full: list[tuple[int, float]] = [(0, 0.0)] * count
        """Decode rows, and the seconds between two ends of usual answers when all rows are taken."""
        self.resting = np.zeros(count, dtype=np.bool_)
        """Whether the node has the model loaded and no queued prompt, according to its report."""
        self.idle = np.zeros(count, dtype=np.bool_)
        """Whether the node is resting and has no request of this router."""

    def write(self, row: int, node: NodeView, model: Model) -> None:
        """Apply a report to a row."""
        memory = node.memory
        free_bytes = headroom(memory.ceiling, memory.margin, occupied(memory), memory.reserved)
        self.resting[row] = model.loaded and not node.engine.queued_tokens
        if free_bytes is None or model.cause or unavailable_reason(node, node.reported_at)[0]:
            self.read[row] = _NOTHING
            return
        short = request_need(model, _SHORT, _ANSWER)
        slope = (request_need(model, _LONG, _ANSWER) - short) / (_LONG - _SHORT)
        weights = model.weights if node.is_loading(model) else 0
        self.slope[row], self.fixed[row] = slope, max(1.0, short - weights - slope * (_SHORT + _ANSWER))
        slower = PREFILL_SLOWDOWN_WHILE_DECODING if node.engine.running else 1.0
        self.token[row] = (slower + ROW_WEIGHT * node.engine.running) / model.prefill_speed
        answer = ANSWER_WEIGHT / model.decode_speed if model.decode_speed > 0 else 0.0
        wait = slower * node.engine.queued_tokens / model.prefill_speed
        most = node.engine.rows
        usual = model.expected_output / model.decode_speed if model.decode_speed > 0 else 0.0
        self.full[row] = (most, usual / most) if most else (0, 0.0)
        if not model.loaded:
            read = model.progress or 0.5
            wait += model.load_seconds * (max(MIN_LOAD_LEFT_SHARE, 1.0 - read) if model.loading else 1.0)
        self.read[row] = (
            free_bytes if memory.guard else math.inf,
            wait,
            max(1, memory.ceiling - memory.margin),
            answer,
        )

    def promise(self, row: int, need: int, tokens: int, taken: int) -> None:
        """Subtract the reservations since the report: `need` in bytes, `tokens` of prompt, and `taken` decode rows."""
        headroom, wait, ceiling, answer = self.read[row]
        self.answer[row] = answer * (1.0 + ROW_COST * taken)
        self.headroom[row] = headroom = max(0.0, headroom - need)
        self.idle[row] = self.resting[row] and not taken and not tokens
        most, each = self.full[row]
        if taken >= most > 0:
            wait += (taken + 1 - most) * each * (1.0 + ROW_COST * taken)
        self.wait[row] = wait + tokens * float(self.token[row])
        self.fraction[row] = _FRACTION * min(1.0, headroom / ceiling)


class VectorIndex:
    """Placement index of a large cluster, with one table of columns per model.

    Every new view must pass through `apply_view`.
    """

    def __init__(self, ledger: ReservationLedger) -> None:
        self._ledger = ledger
        self._view = ClusterView()
        self._index: dict[NodeId, int] = {}
        self._tables: dict[str, _Table] = {}
        self._noise: Column = np.zeros(0)

    def place(
        self,
        view: ClusterView,
        request: ResourceDemand,
        *,
        now: float,
        draw: Callable[[], float],
        policy: Policy = POLICIES["balanced"],
        corrections: Mapping[NodeId, HeadroomCorrection] = MappingProxyType({}),
        trials: AttemptHistory = FIRST,
        warm: Mapping[NodeId, float] = NOWHERE,
    ) -> Placement | NoPlacement:
        """Pick a node like `place.place`. The result may hold only the candidates that were examined."""
        ranks = RANKS.get(policy)
        if view is self._view and ranks is not None and request.choices == 1:
            self._settle()
            found = self._lead(request, now, draw, ranks, corrections, trials, warm)
            if found is not None:
                return found
        return place(
            view,
            request,
            self._ledger,
            now=now,
            draw=draw,
            policy=policy,
            corrections=corrections,
            trials=trials,
            warm=warm,
        )

    def _lead(
        self,
        request: ResourceDemand,
        now: float,
        draw: Callable[[], float],
        ranks: Callable[[RankInputs], Column],
        corrections: Mapping[NodeId, HeadroomCorrection],
        trials: AttemptHistory,
        warm: Mapping[NodeId, float],
    ) -> Placement | None:
        table, nodes = self._table(request.model), self._view.nodes
        model = next((one for node in nodes if (one := node.models.get(request.model))), None)
        if model is None:
            return None
        tokens = request.tokens_on(model)
        output = request.output_on(model, tokens)
        need = table.slope * (tokens + output)
        need += table.fixed
        time = table.token * tokens
        time += table.wait
        time += table.answer * output
        need[table.idle & (table.headroom >= need)] = 1.0
        known = {self._index[node]: share for node, share in warm.items() if node in self._index}
        for row, share in known.items():
            time[row] -= share * tokens * table.token[row]
            if share >= PREFIX_HIT_SHARE and table.headroom[row] >= need[row]:
                need[row] = 1.0
        start = int(draw() * len(nodes))
        rank = ranks(RankInputs(need, table.headroom, time, table.fraction, self._noise[start : start + len(nodes)]))
        for row, share in known.items():
            rank[row] -= share * _KNOWN
        seen: list[Candidate] = []
        for _ in range(min(MAX_LEADERS, len(nodes))):
            row = int(rank.argmin())
            candidate = consider(nodes[row], request, self._ledger, now, corrections, trials, warm)
            seen.append(candidate)
            if not candidate.why:
                return Placement(candidate, tuple(reversed(seen)))
            rank[row] = np.inf
        return None

    # updates

    def apply_view(self, view: ClusterView) -> None:
        """Apply a new view: rewrite the rows of the changed nodes, or all tables if the members have changed."""
        old, self._view = self._view, view
        if len(view.nodes) != len(old.nodes):
            self._begin(view)
            return
        for row, node in enumerate(view.nodes):
            before = old.nodes[row]
            if node is before:
                continue
            if node.id != before.id:
                self._begin(view)
                return
            for name, table in self._tables.items():
                self._write(table, name, row, node)

    def _begin(self, view: ClusterView) -> None:
        self._tables.clear()
        self._index = {node.id: row for row, node in enumerate(view.nodes)}
        self._noise = np.random.default_rng(len(view.nodes)).random(2 * len(view.nodes))

    def _settle(self) -> None:
        """Apply the reservations and releases since the last placement."""
        for node in self._ledger.take_touched():
            row = self._index.get(node)
            if row is not None:
                for table in self._tables.values():
                    self._promise(table, row, node)

    def _promise(self, table: _Table, row: int, node: NodeId) -> None:
        ledger = self._ledger
        table.promise(row, ledger.unacknowledged(node), ledger.unacknowledged_tokens(node), ledger.rows(node))

    def _write(self, table: _Table, name: str, row: int, node: NodeView) -> None:
        model = node.models.get(name)
        if model is None:
            table.read[row] = _NOTHING
        else:
            table.write(row, node, model)
        self._promise(table, row, node.id)

    def _table(self, name: str) -> _Table:
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = _Table(len(self._view.nodes))
            for row, node in enumerate(self._view.nodes):
                self._write(table, name, row, node)
        return table
