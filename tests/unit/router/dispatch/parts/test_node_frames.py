"""Frames of nodes about requests: refusals and complete answers."""

import pytest

from router.dispatch.accounting import MESSAGE_TOKENS, TEMPLATE_TOKENS
from router.dispatch.circuit_breaker import MAX_FAULTS, SAME_FAULT_SECONDS
from tests.support.cluster.manual_pool import A, Cluster
from wire.frames import Failed, Finished, Refusal
from wire.refusals import FailureCode, MemoryNumbers, RefusalCode, Refused


async def test_only_a_refusal_for_lack_of_room_corrects_the_headroom(two: Cluster) -> None:
    for code in (RefusalCode.TOO_LARGE, RefusalCode.CONTEXT, RefusalCode.UNSUPPORTED):
        two.submit(prompt_tokens=4000)
        two.say(lambda number, code=code: Refusal(number, Refused(code, "no", MemoryNumbers(headroom=0)), 4000))
        preview = two.dispatcher.placer.preview(two.dispatcher.history.decisions[-1].demand)
        assert all(candidate.feasible for candidate in preview.candidates), code
    two.dispatcher.shutdown()


@pytest.mark.parametrize(
    "code", [RefusalCode.TOO_LARGE, RefusalCode.CONTEXT, RefusalCode.NO_MODEL, RefusalCode.LOAD_FAILED]
)
async def test_a_refusal_that_is_final_on_one_node_is_followed_by_the_next_node(
    two: Cluster, code: RefusalCode
) -> None:
    request = two.submit()
    first, _ = two.last()
    two.refuse(code)
    assert request.node not in (None, first)
    two.finish()
    assert isinstance(request.outcome, Finished)


async def test_a_refusal_counts_no_more_tokens_than_the_prompt_can_have(two: Cluster) -> None:
    request = two.submit()
    two.refuse(tokens=10**6)
    assert request.demand.prompt_tokens == 100 + TEMPLATE_TOKENS + MESSAGE_TOKENS
    two.dispatcher.close(request)


async def test_a_complete_answer_clears_the_faults_of_its_node(one: Cluster) -> None:
    def fail() -> None:
        one.submit()
        one.say(lambda number: Failed(number, FailureCode.ENGINE_ERROR, "the forward raised"))
        one.now += 2 * SAME_FAULT_SECONDS
        one.report()

    for _ in range(2):
        for _ in range(MAX_FAULTS - 1):
            fail()
        assert one.submit().node == A
        one.finish()
    for _ in range(MAX_FAULTS):
        fail()
    assert one.dispatcher.breakers.list_barred_nodes(one.now) == [A]
