"""Requests that leave a node while it drains."""

from router.placement.recovery import MAX_LOSSES
from tests.support.cluster.manual_pool import Cluster
from wire.frames import Finished


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
