"""Requests that leave a node while it drains."""

from router.placement.recovery import MAX_LOSSES, MAX_SILENCE_SECONDS
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import A, B, Cluster, full, taken
from wire.capacity.arithmetic import KV_GROWTH_TOKENS
from wire.frames import Delta, Deltas, Finished
from wire.identity import NodeId


async def test_a_request_that_moved_as_often_as_allowed_finishes_where_it_is(two: Cluster) -> None:
    request = two.submit()
    two.speak("hello")
    for _ in range(MAX_LOSSES):
        where, _ = two.last()
        assert await two.dispatcher.wait_drained(where, 0.0) == 0
        two.speak("again")
    where, _ = two.last()
    assert await two.dispatcher.wait_drained(where, 0.0) == 1, "a further move would be one loss too many"
    assert (two.last()[0], request.outcome) == (where, None)
    two.finish()
    assert isinstance(request.outcome, Finished)


async def test_migrate_returns_the_requests_that_stay_without_room(two: Cluster) -> None:
    request = two.submit()
    here, _ = two.last()
    there = B if here == A else A
    full(two, there)
    assert two.dispatcher.migrate_node(here) == 1
    two.memory.clear()
    two.report()
    assert two.dispatcher.migrate_node(here) == 0
    assert (request.node, two.dispatcher.counters.moves) == (there, 1)
    two.finish()


async def test_an_answer_that_cannot_resume_stays_although_its_client_has_nothing_yet(two: Cluster) -> None:
    two.models = (a_model(fingerprint=""),)
    two.report()
    request = two.submit()
    here, _ = two.last()
    two.speak("hello")
    assert two.dispatcher.migrate_node(here) == 1
    assert (request.node, len(two.generates())) == (here, 1)
    two.finish()


async def test_a_migrated_request_knows_its_tokens_and_is_recorded(two: Cluster) -> None:
    request = two.submit()
    here, number = two.last()
    two.say(lambda _: Deltas((Delta(number, 0, tuple(range(100)), ((0, "x"),)),)))
    assert two.dispatcher.migrate_node(here) == 0
    there, frame = two.generates()[-1]
    assert there != here
    assert (frame.resume, frame.expected) == ((tuple(range(100)),), 100 + KV_GROWTH_TOKENS)
    assert request.demand.known_tokens == 100
    assert [(what, node) for _, what, node in request.steps] == [
        ("sent", f"node-{here}"),
        ("first token", f"node-{here}"),
        ("resumed", f"node-{there}"),
        ("migrated", f"node-{here}"),
    ]
    decisions = two.dispatcher.history.find_decisions(request.spec.request_id)
    assert [decision.chosen for decision in decisions] == [here, there]
    assert two.dispatcher.ledger.get_account(there).pending_prefills == {}, "no first token is expected"
    two.finish()


async def test_an_answer_without_ids_that_the_client_has_begun_to_read_stays(two: Cluster) -> None:
    request = two.submit()
    here, number = two.last()
    two.say(lambda _: Deltas((Delta(number, 0, (), ((0, "x"),)),)))
    assert taken(request) == ["x"]
    assert two.dispatcher.migrate_node(here) == 1
    assert request.node == here
    two.finish()


def fall_silent(cluster: Cluster, node: NodeId, seconds: float = MAX_SILENCE_SECONDS) -> None:
    """Advance the clock by `seconds` without a report of a node. The other node reports again."""
    cluster.state[node] = "suspect"
    cluster.report(node)
    cluster.now += seconds
    cluster.report(*(other for other in (A, B) if other != node))


def check(cluster: Cluster) -> None:
    cluster.now += 0.1
    cluster.dispatcher.sweep()


async def test_a_request_leaves_a_silent_node_at_the_second_check(two: Cluster) -> None:
    request = two.submit()
    two.speak()
    here, _ = two.last()
    fall_silent(two, here)
    check(two)
    assert request.node == here, "its reports may wait in the socket"
    check(two)
    assert request.node == (B if here == A else A)
    assert request.life.losses == 1
    two.finish()


async def test_a_node_that_reports_again_is_silent_anew_only_after_two_checks(two: Cluster) -> None:
    request = two.submit()
    two.speak()
    here, _ = two.last()
    for _ in range(3):
        fall_silent(two, here)
        check(two)
        assert request.node == here
        two.state[here] = "ready"
        two.report()
        check(two)
    two.finish()


async def test_a_short_silence_moves_no_request(two: Cluster) -> None:
    request = two.submit()
    two.speak()
    here, _ = two.last()
    fall_silent(two, here, 0.5)
    for _ in range(3):
        check(two)
    assert request.node == here
    two.finish()
