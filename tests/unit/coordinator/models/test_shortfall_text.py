"""Texts of shortfalls: the consequences of an unmet wish, and which nodes, copies or bytes are missing."""

from typing import Any

import pytest

from coordinator.models.replica_search import NodeOption, Obstacle
from coordinator.models.shortfall_text import describe_shortfall
from coordinator.models.wishes import LoadWish, PoolState, UnloadReason, UnloadWish, Wish, WishState
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.reservations import ReservationLedger
from wire.identity import NodeId
from wire.units import GIB

NODES = {name: NodeView(NodeId(name), f"mac-{name}", "ready") for name in "abcdef"}
POOL = PoolState(ClusterView(tuple(NODES.values())), ReservationLedger(), 0.0)
LOAD = LoadWish(NodeId("x"), "x", "m")
UNLOAD = UnloadWish(NodeId("x"), "x", "y", UnloadReason.MEMORY, "m")


def option(name: str, obstacle: Obstacle | None = None, why: str = "", **fields: Any) -> NodeOption:
    return NodeOption(NODES[name], obstacle, why, **fields)


def short(name: str, need: int, obtainable: int) -> NodeOption:
    """Return a node that lacks memory; sizes in GiB."""
    return option(name, Obstacle.MEMORY, need=need * GIB, obtainable=obtainable * GIB)


def describe(wanted: int, options: list[NodeOption], chosen: list[NodeOption] | None = None, **fields: Any) -> str:
    wish = Wish("m", wanted, **{name: fields.pop(name) for name in ("labels", "allow", "deny") if name in fields})
    nodes = {name: tuple(map(NodeId, names)) for name, names in fields.items()}
    return describe_shortfall(WishState(wish, wanted, **nodes), options, chosen or [], POOL)


@pytest.mark.parametrize(
    ("chosen", "fields", "text"),
    [
        ([option("a", action=LOAD)], {}, "mac-a loads it"),
        ([option("a", action=LOAD)], {"coming": "b"}, "mac-a, mac-b load it"),
        ([], {"coming": "bz"}, "mac-b loads it"),
        ([option("a", action=UNLOAD, victims=("y", "z"))], {}, "mac-a unloads y, z for it"),
        (
            [option("a", action=LOAD), option("b", action=UNLOAD, victims=("y",))],
            {"away": "c"},
            "mac-a loads it; mac-b unloads y for it; the return of mac-c is awaited",
        ),
        ([], {"away": "cd"}, "the return of mac-c, mac-d is awaited"),
    ],
)
def test_progress_names_the_loads_the_unloads_and_the_awaited_nodes(
    chosen: list[NodeOption], fields: dict[str, str], text: str
):
    missing = len(chosen) + sum(map(len, fields.values()))
    assert describe(missing, [], chosen, **fields) == text


@pytest.mark.parametrize("fields", [{"labels": ("fast",)}, {"allow": (NodeId("a"),)}, {"deny": (NodeId("b"),)}])
def test_each_limit_of_a_wish_is_named_as_the_reason_for_too_few_nodes(fields: dict[str, Any]):
    assert describe(2, [option("a")], **fields) == ("needs 2 nodes, its labels and node lists allow 1: change the wish")
    assert describe(2, [option("a")]) == "needs 2 nodes, the pool has 1: join another Mac, or want fewer replicas"


@pytest.mark.parametrize(("copies", "have"), [(0, "none have it"), (1, "1 has it"), (2, "2 have it")])
def test_missing_copies_are_counted(copies: int, have: str):
    options = [option(name, None if at < copies else Obstacle.NOT_ON_DISK) for at, name in enumerate("abc")]
    assert describe(3, options) == f"needs 3 nodes with the model on disk, {have}: pull it to another node"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            [short("a", 20, 14), short("b", 20, 15), short("c", 30, 26), short("d", 50, 40)],
            "needs 30.0 GiB, best node mac-c has 26.0 GiB: "
            "unload a model there, raise memory.cap, or want a smaller variant",
        ),
        ([short("a", 20, 14), short("b", 20, 14)], "needs 20.0 GiB, best node mac-b has 14.0 GiB: "),
        ([short("a", 20, -3)], "needs 20.0 GiB, best node mac-a has 0.0 MiB: "),
        ([short("a", 20, 14), option("b", Obstacle.BUSY, "is busy with n")], "needs 1 more node: mac-b is busy with n"),
        ([option("a", Obstacle.UNAVAILABLE, "is asleep")], "needs 1 more node: mac-a is asleep"),
        (
            [option("a", Obstacle.UNAVAILABLE, "is asleep"), option("b", Obstacle.CANNOT_LOAD, "cannot load it")],
            "needs 1 more node: mac-b cannot load it",
        ),
        (
            [
                option("a", Obstacle.OTHER_MODEL, "has another model"),
                option("b", Obstacle.BUSY, "is busy"),
                option("c", Obstacle.BACKOFF, "mac-c: refused; the next try is in 5 s"),
                option("d", Obstacle.SPACED, "swapped"),
            ],
            "needs 1 more node: mac-c: refused; the next try is in 5 s; mac-d swapped; mac-b is busy",
        ),
    ],
)
def test_nodes_with_the_model_are_named_with_the_reason_why_they_do_not_load_it(options: list[NodeOption], text: str):
    found = describe(1, options)
    assert found.startswith(text)
    assert found.count("mac-") <= 3


def test_memory_is_the_reason_while_fewer_nodes_than_are_missing_have_another_one():
    options = [short("a", 20, 14), option("b", Obstacle.BUSY, "is busy"), option("c", Obstacle.BUSY, "is busy")]
    assert describe(3, options).startswith("needs 20.0 GiB, best node mac-a has 14.0 GiB: ")
    away = [option("a", Obstacle.UNAVAILABLE, "is asleep"), option("b", Obstacle.CANNOT_LOAD, "cannot load it")]
    assert describe(2, away) == "needs 2 more nodes: mac-b cannot load it"
    two = [short("a", 20, 14), *options[1:], option("d", Obstacle.HELD)]
    assert describe(3, two, ready="d") == "needs 2 more nodes: mac-b is busy; mac-c is busy"


def test_what_happens_precedes_what_is_missing():
    options = [option("a", action=LOAD), option("b", Obstacle.BUSY, "is busy")]
    assert describe(2, options, options[:1]) == "mac-a loads it; needs 1 more node: mac-b is busy"
    assert describe(1, options, options[:1]) == "mac-a loads it"
