"""A pool without processes for the reconciler: nodes with disks, memory and loads, and rounds at set times.

Memory follows the arithmetic of a report: loaded weights are in use, a load takes its weights at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.models.action_history import ActionBegan, ActionEnded, ActionHistory, RoundBegan, step
from coordinator.models.reconciler import find_ready_replicas, plan_actions
from coordinator.models.wishes import LoadWish, Plan, PoolState, UnloadWish, Wish, WishAction
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.reservations import ReservationLedger
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.identity import NodeId
from wire.report import EngineState
from wire.units import GIB

MARGIN = 2 * GIB
"""Margin of every node (`a_memory`)."""


@dataclass
class WishNode:
    """One node. `disk` maps its models to their properties, as for `a_model`."""

    name: str
    cap: int = 24 * GIB
    disk: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    loaded: set[str] = field(default_factory=set[str])
    loading: set[str] = field(default_factory=set[str])
    in_use: set[str] = field(default_factory=set[str])
    other: int = 0
    """Bytes that rows and other programs use."""
    reported_at: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the view, such as `cordoned`."""

    @property
    def id(self) -> NodeId:
        return NodeId(self.name)

    def weigh(self, model: str) -> int:
        return self.disk[model].get("weights", GIB)

    @property
    def headroom(self) -> int:
        taken = sum(self.weigh(model) for model in self.loaded | self.loading)
        return self.cap - MARGIN - taken - self.other

    def view(self) -> NodeView:
        models = {
            name: a_model(
                name, **{"loaded": name in self.loaded, "loading": name in self.loading, "load_seconds": 5.0} | facts
            )
            for name, facts in self.disk.items()
        }
        given: dict[str, Any] = {
            "state": "ready",
            "reported_at": self.reported_at,
            "memory": a_memory(self.headroom, self.cap),
            "engine": EngineState("scripted", "ready"),
            "models": models,
        } | self.facts
        return NodeView(self.id, self.name, **given)


class WishPool:
    """Nodes, wishes and the history of the reconciler. `now` is in seconds; a round adds its `seconds`."""

    def __init__(self, nodes: Iterable[WishNode], wishes: Iterable[Wish], now: float = 1000.0) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.wishes = list(wishes)
        self.now = now
        self.ledger = ReservationLedger()
        self.history = ActionHistory(now)
        self.actions: list[WishAction] = []
        self.requested: set[str] = set()
        self.views: dict[NodeId, NodeView] = {}
        self.refresh()

    def refresh(self, *silent: NodeId) -> None:
        """Take a report of every node that is not `silent`."""
        for node in self.nodes.values():
            if node.id not in silent:
                node.reported_at = self.now
                self.views[node.id] = node.view()

    def read(self) -> PoolState:
        return PoolState(
            ClusterView(tuple(self.views.values())),
            self.ledger,
            self.now,
            {node.id: frozenset(node.in_use) for node in self.nodes.values() if node.in_use},
            frozenset(self.requested),
        )

    def plan(self) -> Plan:
        """Return the plan of a round now, without taking its actions."""
        pool = self.read()
        ready = find_ready_replicas(self.wishes, pool, self.history)
        wished = frozenset(wish.model for wish in self.wishes)
        self.history = step(self.history, RoundBegan(pool, wished, ready), self.now)
        self.history.check()
        self.requested.clear()
        return plan_actions(self.wishes, pool, self.history)

    def begin(self, action: WishAction) -> None:
        """Begin an action, as the runner does."""
        self.history = step(self.history, ActionBegan(action), self.now)
        self.actions.append(action)
        if isinstance(action, LoadWish):
            self.nodes[action.node].loading.add(action.model)

    def end(self, action: WishAction, why: str = "", *, for_memory: bool = False) -> None:
        """End an action with a success, or with the text of a refusal; with `for_memory`, of one for lack of memory."""
        node = self.nodes[action.node]
        node.loading.discard(action.model)
        if not why:
            if isinstance(action, LoadWish):
                node.loaded.add(action.model)
            else:
                node.loaded.discard(action.model)
        headroom = self.views[action.node].headroom if for_memory else None
        self.history = step(self.history, ActionEnded(action.node, why, headroom), self.now)

    def round(self, seconds: float = 1.0) -> Plan:
        """Plan, carry out every action with success, and let `seconds` pass."""
        plan = self.plan()
        for action in plan.actions:
            self.begin(action)
        self.now += seconds / 2
        for action in plan.actions:
            self.end(action)
        self.now += seconds / 2
        self.refresh()
        return plan

    def settle(self, rounds: int = 100, seconds: float = 20.0) -> Plan:
        """Repeat rounds until one has no action. Fail if there is none within `rounds`."""
        for _ in range(rounds):
            plan = self.round(seconds)
            if not plan.actions:
                return plan
        raise AssertionError(f"no end after {rounds} rounds: {self.actions[-6:]}")

    def loads(self) -> list[tuple[str, str]]:
        """Return node and model of every load that began."""
        return [(action.name, action.model) for action in self.actions if isinstance(action, LoadWish)]

    def unloads(self) -> list[tuple[str, str]]:
        """Return node and model of every unload that began."""
        return [(action.name, action.model) for action in self.actions if isinstance(action, UnloadWish)]
