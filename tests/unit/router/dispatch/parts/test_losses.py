"""Requests whose node stops."""

import pytest

from tests.support.cluster.loopback_cluster import a_memory
from tests.support.cluster.manual_pool import A, B, Cluster
from wire.frames import Failed, Finished
from wire.refusals import FailureCode
from wire.units import GIB


@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_does_not_return_to_the_node_that_stops(two: Cluster, begun: bool) -> None:
    request = two.submit()
    stopping, _ = two.last()
    if begun:
        two.speak("hello")
    other = B if stopping == A else A
    two.memory[other] = a_memory(GIB)
    two.report()  # the stopping node still looks ready, and has the most room
    two.say(lambda number: Failed(number, FailureCode.NODE_STOPPING, "the agent stops"))
    assert [node for node, _ in two.generates()] == [stopping, other]
    two.finish()
    assert isinstance(request.outcome, Finished)
