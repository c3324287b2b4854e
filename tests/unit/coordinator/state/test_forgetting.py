"""A removed node leaves no data in any structure that is kept by node."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from router.placement.cluster_view import ClusterView
from tests.effort import scale_examples
from tests.support.cluster.application import application
from tests.support.cluster.manual_pool import A, B, C, Cluster
from wire.frames import Admitted, Failed, GenerationParams, Message
from wire.identity import NodeId

REMEMBERS = frozenset({"history"})
"""Fields that record the past, by names and ids, and are bounded."""


def found(thing: object, node: NodeId, path: str, seen: set[int]) -> Iterator[str]:
    """Yield every path below `thing` at which a node's id is kept."""
    if id(thing) in seen or callable(thing):
        return
    seen.add(id(thing))
    if thing == node and isinstance(thing, str):
        yield path
        return
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield from found(key, node, f"{path} key", set())
            yield from found(value, node, f"{path}[{key!r}]", seen)
    elif isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        for item in thing:  # pyright: ignore
            yield from found(item, node, f"{path}[]", seen)
    elif type(thing).__module__.partition(".")[0] in ("router", "coordinator", "wire"):
        for name in names(thing):
            if name.lstrip("_") not in REMEMBERS:
                yield from found(getattr(thing, name, None), node, f"{path}.{name}", seen)


def names(thing: Any) -> list[str]:
    if isinstance(thing, msgspec.Struct):
        return list(thing.__struct_fields__)
    slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(thing, "__dict__", {})]


def everywhere(dispatcher: Dispatcher, node: NodeId) -> list[str]:
    return list(found(dispatcher, node, "dispatcher", set()))


STEPS = ["submit", "refuse", "admit", "speak", "fail", "finish", "gone", "silent", "full", "fault", "drop"]


@given(st.lists(st.sampled_from(STEPS), max_size=25))
@settings(max_examples=scale_examples(1000))
async def test_after_any_history_nothing_is_kept_of_a_node_that_was_removed(steps: list[str]):
    pool = Cluster(A, B, C)
    for step in steps:
        happen(pool, step)
        for request in pool.dispatcher.list_open_requests():
            request.check()
    gone = A
    pool.dispatcher.handle_lost_node(gone, "it was removed")
    pool.dispatcher.remove_node(gone)
    pool.nodes = (B, C)
    pool.report()
    assert everywhere(pool.dispatcher, gone) == []
    pool.dispatcher.shutdown()
    pool.settled()


def happen(pool: Cluster, step: str) -> None:
    sent = pool.generates()
    if step == "submit":
        job = RequestSpec(
            ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True, session="s"
        )
        pool.dispatcher.submit(job)
    elif step == "full":
        pool.state = {} if pool.state else {A: "asleep", B: "asleep", C: "asleep"}
        pool.report()
    elif step == "silent":
        pool.state = {A: "suspect"}
        pool.report()
        pool.now += 5.0
        pool.dispatcher.sweep()
    elif step == "fault":
        pool.dispatcher.breakers.record_fault(A, 1, pool.now)
    elif not sent:
        return
    elif step == "refuse":
        pool.refuse()
    elif step == "admit":
        pool.say(lambda number: Admitted(number, 25, 5, b"hash"))
    elif step == "speak":
        pool.speak()
    elif step == "fail":
        pool.say(lambda number: Failed(number, "engine_lost", "it died"))
    elif step == "finish":
        pool.finish()
    elif step == "gone":
        pool.dispatcher.handle_lost_node(sent[-1][0], "cut")
        pool.report()
    elif step == "drop" and pool.dispatcher.list_open_requests():
        pool.dispatcher.close(pool.dispatcher.list_open_requests()[0])


def test_search_finds_state_keyed_by_node():
    breakers: CircuitBreakers[NodeId] = CircuitBreakers()
    breakers.record_fault(A, 1, 0.0)
    assert list(found(breakers, A, "breakers", set())) != []
    assert list(found(ClusterView(()), A, "view", set())) == []


async def test_a_member_that_is_removed_leaves_nothing_in_the_registry(tmp_path: Path):
    from coordinator.state.rows import MemberRow
    from wire.report import Hardware

    async with application(tmp_path) as made:
        row = MemberRow(A, "studio", "m", Hardware(), "", 1.0)
        made.store.members.put(row)
        made.registry.add_member(row)
        assert list(found(made.nodes, A, "nodes", set())) != []
        made.nodes.administration.remove_node(A)
        made.registry.tick(asyncio.get_running_loop().time() + 1e6)
        kept = [path for path in found(made.nodes, A, "nodes", set()) if "store" not in path]
        assert kept == [], "the store keeps a removed node, so that it cannot return"


@pytest.mark.parametrize("what", ["affinity", "breakers", "ledger"])
def test_parts_with_state_by_node_have_remove_node(what: str):
    assert callable(getattr(getattr(Cluster(A).dispatcher, what), "remove_node", None))
