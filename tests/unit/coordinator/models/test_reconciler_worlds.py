"""The reconciler's rules in random worlds: no illegal plan, and an end with the fewest actions if nothing changes.

The rules are computed here from the view, the wishes and the list of actions, not from the reconciler's own history.
"""

import random
from typing import Any

import pytest

from coordinator.models.action_history import BACKOFF_SECONDS
from coordinator.models.wishes import LoadWish, Plan, UnloadReason, UnloadWish, Wish, WishAction
from router.placement.cluster_view import NodeView
from router.placement.reservations import SwapTurn
from tests.effort import SEED, scale_examples
from tests.support.cluster.wish_pool import WishNode, WishPool
from wire.capacity.arithmetic import Fits, judge
from wire.identity import NodeId
from wire.report import EngineState
from wire.units import GIB

WORLDS = scale_examples(10_000)
PARTS = 4
"""Tests into which the worlds are divided, for tests that run side by side."""
MODELS = tuple("pqrst")
LABELS = ("fast", "big")


def make_world(draw: random.Random) -> WishPool:
    sizes = {model: draw.choice((1, 2, 4, 8, 13, 20)) for model in MODELS}
    return WishPool(
        [make_node(draw, f"n{at}", sizes) for at in range(draw.randint(1, 5))],
        [make_wish(draw, model) for model in draw.sample(MODELS, draw.randint(1, 4))],
    )


def make_node(draw: random.Random, name: str, sizes: dict[str, int]) -> WishNode:
    disk: dict[str, dict[str, Any]] = {
        model: {"weights": sizes[model] * GIB, "load_seconds": draw.choice((1.0, 5.0, 40.0))}
        for model in draw.sample(MODELS, draw.randint(0, len(MODELS)))
    }
    node = WishNode(name, draw.choice((8, 16, 24, 48)) * GIB, disk)
    for model in draw.sample(sorted(disk), len(disk)):
        if draw.random() < 0.5 and node.weigh(model) < node.headroom:
            node.loaded.add(model)
            disk[model]["pinned"] = draw.random() < 0.1
        elif draw.random() < 0.05:
            disk[model]["cause"] = "truncated file"
    node.facts["labels"] = frozenset(label for label in LABELS if draw.random() < 0.7)
    return node


def make_wish(draw: random.Random, model: str) -> Wish:
    names = [NodeId(f"n{at}") for at in range(5)]
    return Wish(
        model,
        draw.choice((1, 1, 2, 3)),
        labels=tuple(label for label in LABELS if draw.random() < 0.15),
        allow=tuple(draw.sample(names, 3)) if draw.random() < 0.2 else (),
        deny=tuple(draw.sample(names, 1)) if draw.random() < 0.2 else (),
        idle_unload_seconds=draw.choice((None, None, 30.0)),
        eviction_cost=draw.choice((1, 10, 10, 20)),
        load_at_boot=draw.random() < 0.8,
    )


AWAY: tuple[dict[str, Any], ...] = (
    {"cordoned": True},
    {"draining": True},
    {"state": "suspect"},
    {"state": "lost"},
    {"state": "asleep"},
    {"state": "paused"},
    {"engine": EngineState("scripted", "restarting")},
)


def disturb(draw: random.Random, pool: WishPool) -> None:
    """Change the world at random, as clients, people and machines do."""
    for node in pool.nodes.values():
        chance = draw.random()
        if chance < 0.1:
            node.facts = {"labels": node.facts["labels"], **draw.choice(AWAY)}
        elif chance < 0.4:
            node.facts = {"labels": node.facts["labels"]}
        node.in_use = {model for model in node.loaded if draw.random() < 0.2}
        node.other = draw.choice((0, 0, 0, 2, 6)) * GIB
        if draw.random() < 0.1 and node.id not in pool.ledger.turns:
            pool.ledger.begin_turn(SwapTurn(node.id, node.name, "p", frozenset(), 1, pool.now), 0)
        elif node.id in pool.ledger.turns and draw.random() < 0.5:
            pool.ledger.end_turn(pool.ledger.turns[node.id])
    pool.requested |= {model for model in MODELS if draw.random() < 0.05}
    if draw.random() < 0.1:
        pool.wishes = [make_wish(draw, model) for model in draw.sample(MODELS, draw.randint(0, 4))]


class Referee:
    """Judges every plan by the observations of the test. It records the ends of actions and the uses of models."""

    def __init__(self, pool: WishPool) -> None:
        self.pool = pool
        self.running: dict[NodeId, WishAction] = {}
        self.ended: dict[NodeId, float] = {}
        self.done: dict[NodeId, WishAction] = {}
        self.used: dict[str, float] = {}
        self.swaps: dict[NodeId, tuple[str, float, float | None]] = {}
        self.refused: dict[tuple[NodeId, str], tuple[float, float]] = {}

    def record_use(self) -> None:
        """Record the models that requests use now. Call it before each plan."""
        for node in self.pool.nodes.values():
            self.used |= dict.fromkeys(node.in_use, self.pool.now)
        self.used |= dict.fromkeys(self.pool.requested, self.pool.now)

    def begin(self, action: WishAction) -> None:
        self.running[action.node] = action
        if isinstance(action, UnloadWish) and action.why is UnloadReason.MEMORY:
            disk = self.pool.nodes[action.node].disk
            cost = disk[action.model]["load_seconds"] + disk[action.wanted]["load_seconds"]
            self.swaps[action.node] = (action.wanted, cost, None)

    def end(self, action: WishAction, refused: bool) -> None:
        del self.running[action.node]
        now = self.ended[action.node] = self.pool.now
        self.done.pop(action.node, None)
        swap = self.swaps.get(action.node)
        if swap and swap[2] is None and isinstance(action, LoadWish) and action.model == swap[0]:
            self.swaps[action.node] = (swap[0], swap[1], now)
        if refused:
            self.refused[action.node, action.model] = (now, self.pool.views[action.node].headroom or 0)
        else:
            self.done[action.node] = action
            self.refused.pop((action.node, action.model), None)

    def judge(self, plan: Plan) -> None:
        acted = [action.node for action in plan.actions]
        assert len(acted) == len(set(acted)), "two actions on one node"
        for action in plan.actions:
            self.judge_node(action)
            if isinstance(action, LoadWish):
                self.judge_load(action)
            else:
                self.judge_unload(action, plan)
        self.judge_counts(plan)

    def judge_node(self, action: WishAction) -> None:
        view = self.pool.views[action.node]
        assert action.node not in self.running, "the node is busy"
        assert not any(model.loading for model in view.models.values()), "the node loads a model"
        assert view.reported_at > self.ended.get(action.node, -1.0), "the numbers are older than the last action"
        assert action.node not in self.pool.ledger.turns, "the node swaps models for a request"
        assert view.state == "ready", "the node takes no requests"
        assert not view.cordoned
        assert not view.draining
        assert view.engine.state == "ready"
        refusal = self.refused.get((action.node, action.model))
        if refusal is not None and self.pool.now - refusal[0] < BACKOFF_SECONDS:
            assert isinstance(action, LoadWish)
            assert (view.headroom or 0) > refusal[1], "a refused load is repeated with the same numbers"

    def judge_load(self, action: LoadWish) -> None:
        view, wish = self.pool.views[action.node], self.find_wish(action.model)
        assert wish is not None, "a load without a wish"
        assert allows(wish, view)
        model = view.models[action.model]
        assert not model.loaded
        assert not model.cause
        assert isinstance(judge(view.memory, model.weights), Fits), "the gate would refuse the load"

    def judge_unload(self, action: UnloadWish, plan: Plan) -> None:
        node, wish = self.pool.nodes[action.node], self.find_wish(action.model)
        assert action.model in node.loaded
        assert action.model not in node.in_use, "a request uses the model"
        assert not node.disk[action.model].get("pinned"), "the model is preloaded"
        if action.why is UnloadReason.IDLE:
            assert wish is not None
            assert wish.idle_unload_seconds is not None
            assert self.pool.now - self.used.get(action.model, -1e9) >= wish.idle_unload_seconds
            return
        assert self.pool.now - self.used.get(action.model, -1e9) >= 60.0, "a request used the model just now"
        wanted = self.find_wish(action.wanted)
        assert wanted is not None, "an unload without a wish"
        assert action.wanted not in node.loaded
        state = next((state for state in plan.states if state.wish.model == action.model), None)
        if state is not None and wish is not None and wish.eviction_cost >= wanted.eviction_cost and state.wanted:
            leaving = {one.node for one in (*plan.actions, *self.list_unreported()) if is_unload(one, action.model)}
            left = len(set(self.list_holders(wish)) - leaving)
            if action.node in self.list_holders(wish):
                assert left >= wish.replicas, "another wish with an equal or higher cost needs the replica"
        swap = self.swaps.get(action.node)
        if swap is not None and swap[2] is not None:
            assert self.pool.now - swap[2] >= swap[1], "a second swap within the cost of the first"

    def judge_counts(self, plan: Plan) -> None:
        for state in plan.states:
            wish = state.wish
            loads = [action for action in plan.actions if isinstance(action, LoadWish) and action.model == wish.model]
            coming = {action.node for action in self.list_unreported() if self.is_coming(action, wish)}
            leaving = {action.node for action in self.list_unreported() if is_unload(action, wish.model)}
            if loads:
                held = (set(self.list_holders(wish)) | coming) - leaving
                assert len(held) + len(loads) <= wish.replicas, "more loads than replicas are missing"
            short = [one for one in plan.shortfalls if one.model == wish.model]
            assert len(short) == (0 if state.met else 1)
            assert all(one.text for one in short)

    def list_unreported(self) -> list[WishAction]:
        """Return the actions that no report shows yet."""
        late = [act for node, act in self.done.items() if self.pool.views[node].reported_at <= self.ended[node]]
        return [*self.running.values(), *late]

    def is_coming(self, action: WishAction, wish: Wish) -> bool:
        view = self.pool.views[action.node]
        return (
            isinstance(action, LoadWish)
            and action.model == wish.model
            and view.state in ("ready", "suspect", "lost")
            and not (view.cordoned or view.draining)
            and allows(wish, view)
        )

    def find_wish(self, model: str) -> Wish | None:
        return next((wish for wish in self.pool.wishes if wish.model == model), None)

    def list_holders(self, wish: Wish) -> list[NodeId]:
        """Return the nodes with a ready replica of a wish, by the view."""
        return [
            view.id
            for view in self.pool.views.values()
            if wish.model in view.models
            and view.models[wish.model].loaded
            and view.state == "ready"
            and not (view.cordoned or view.draining)
            and view.engine.state == "ready"
            and self.pool.now - view.reported_at <= 3.0
            and allows(wish, view)
        ]


def allows(wish: Wish, view: NodeView) -> bool:
    permitted = view.id not in wish.deny and (not wish.allow or view.id in wish.allow)
    return permitted and view.labels >= set(wish.labels)


def is_unload(action: WishAction, model: str) -> bool:
    return isinstance(action, UnloadWish) and action.model == model


@pytest.mark.parametrize("part", range(PARTS))
def test_plans_of_random_worlds_are_legal(part: int):
    for world in range(WORLDS // PARTS):
        draw = random.Random(f"{SEED} {part} {world}")
        pool = make_world(draw)
        referee = Referee(pool)
        for _ in range(8):
            disturb(draw, pool)
            pool.refresh(*(node for node in pool.nodes if draw.random() < 0.1))
            for action in list(referee.running.values()):
                if draw.random() < 0.6:
                    is_refused = draw.random() < 0.2
                    pool.end(action, f"{action.name}: no" if is_refused else "", for_memory=draw.random() < 0.5)
                    referee.end(action, is_refused)
            referee.record_use()
            plan = pool.plan()
            referee.judge(plan)
            for action in plan.actions:
                pool.begin(action)
                referee.begin(action)
            pool.now += draw.choice((0.5, 1.0, 1.0, 5.0, 30.0, 70.0))


@pytest.mark.parametrize("part", range(PARTS))
def test_reconciler_converges_without_surplus_actions(part: int):
    for world in range(WORLDS // PARTS // 5):
        draw = random.Random(f"{SEED} still {part} {world}")
        pool = make_world(draw)
        for wish in list(pool.wishes):
            if wish.idle_unload_seconds is not None:
                pool.wishes.remove(wish)
        before = {(node.name, model) for node in pool.nodes.values() for model in node.loaded}
        plan = pool.settle()
        after = {(node.name, model) for node in pool.nodes.values() for model in node.loaded}
        loads, unloads = pool.loads(), pool.unloads()
        assert len(set(loads)) == len(loads), "a model was loaded twice on a node"
        assert set(loads) == after - before, (
            f"a model was loaded in vain: {world} {pool.wishes} {pool.nodes} {pool.actions}"
        )
        assert set(unloads) == before - after, "a model was unloaded in vain"
        assert {one.model for one in plan.shortfalls} == {one.wish.model for one in plan.states if not one.met}
        for state in plan.states:
            mine = sum(model == state.wish.model for _, model in loads)
            had = len(state.ready) - mine
            assert mine <= max(0, state.wish.replicas - had), "more loads than replicas were missing"
