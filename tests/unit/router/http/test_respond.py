"""Answers of requests: status and headers, refusals, and clients that leave."""

import asyncio

import pytest

from router.admission.rate_limits import KeyLimits
from router.http.exchange import CLIENT_CLOSED, MAX_INLINE_BYTES
from router.settings import RouterSettings
from tests.support.cluster.asgi_call import CHAT, Call
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_memory
from tests.support.cluster.manual_pool import turn
from wire.frames import Cancel, Generate


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_has_its_node_and_attempts_and_closes_its_request(stream: bool):
    refusing, node = LoopbackNode("mini", refuse=1), LoopbackNode("studio", memory=a_memory(6 * 2**30))
    cluster = LoopbackCluster(refusing, node)
    call = await Call(cluster, CHAT | {"stream": stream}).run()
    assert (call.status, call.headers["x-macpool-node"], call.headers["x-macpool-attempts"]) == (200, "studio", "2")
    assert call.headers["content-type"] == ("text/event-stream; charset=utf-8" if stream else "application/json")
    unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    assert (unbuffered.items() <= call.headers.items()) is stream, "no proxy may collect the events of a stream"
    assert call.body.endswith(b"data: [DONE]\n\n") is stream
    assert cluster.dispatcher.idle
    assert cluster.dispatcher.counters.answers == {200: 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_before_the_first_token_is_a_status_without_a_node(stream: bool):
    cluster = LoopbackCluster(LoopbackNode("studio"))
    call = await Call(cluster, CHAT | {"model": "unknown", "stream": stream}).run()
    assert (call.status, call.error["code"]) == (404, "model_not_found")
    assert call.headers["x-macpool-attempts"] == "0"
    assert "x-macpool-node" not in call.headers
    assert cluster.dispatcher.idle
    assert cluster.dispatcher.counters.answers == {404: 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request_and_gets_no_answer(stream: bool):
    node = LoopbackNode("studio", mute=True)
    cluster = LoopbackCluster(node)
    call = Call(cluster, CHAT | {"stream": stream})
    running = asyncio.create_task(call.run())
    await turn()
    assert [type(frame) for frame in node.heard] == [Generate]
    call.leave()
    await asyncio.wait_for(running, 30)
    assert call.sent == []
    assert sum(isinstance(frame, Cancel) for frame in node.heard) == 1
    assert cluster.dispatcher.idle
    assert cluster.dispatcher.counters.answers == {CLIENT_CLOSED: 1} == {499: 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_request_of_a_client_that_left_before_its_submission_reaches_no_node(stream: bool):
    node = LoopbackNode("studio")
    cluster = LoopbackCluster(node)
    call = Call(cluster, {**CHAT, "messages": [{"role": "user", "content": "x" * MAX_INLINE_BYTES}], "stream": stream})
    call.leave()
    await asyncio.wait_for(call.run(), 30)
    assert call.sent == []
    assert node.heard == []
    assert cluster.dispatcher.idle
    assert cluster.dispatcher.counters.answers == {CLIENT_CLOSED: 1}


async def test_a_stream_is_open_once_its_client_has_the_status():
    node = LoopbackNode("studio", text=("one", "two"), step_seconds=0.01)
    cluster = LoopbackCluster(node)
    call = Call(cluster, CHAT | {"stream": True})
    running = asyncio.create_task(call.run())
    await call.begun.wait()
    (request,) = cluster.dispatcher.list_open_requests()
    assert request.answer.opened
    await running


async def test_headers_name_the_model_of_an_alias_the_rates_and_ignored_fields():
    settings = RouterSettings(aliases={"coder": ("nowhere", "tiny")}, unknown_fields="ignore")
    cluster = LoopbackCluster(LoopbackNode("studio"), settings=settings)
    cluster.limits = lambda _: KeyLimits(requests_per_minute=60)
    call = await Call(cluster, CHAT | {"model": "coder", "unknown_a": 1, "unknown_b": 2}).run()
    assert call.headers["x-macpool-model"] == "tiny"
    assert call.headers["x-macpool-ignored"] == "unknown_a, unknown_b"
    assert (call.headers["x-ratelimit-limit-requests"], call.headers["x-ratelimit-remaining-requests"]) == ("60", "59")
    assert 0 < float(call.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 1
    plain = await Call(LoopbackCluster(LoopbackNode("studio")), CHAT).run()
    assert not [name for name in plain.headers if name.startswith(("x-ratelimit", "x-macpool-model", "x-macpool-ig"))]
