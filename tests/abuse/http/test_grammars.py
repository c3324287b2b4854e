"""Grammars that cannot be followed: an error for the client that sent them, without an effect on other keys."""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from router.dispatch.circuit_breaker import MAX_FAULTS
from tests import models
from tests.support.cluster import whole_pool
from tests.support.cluster.loopback_cluster import LoopbackNode
from tests.support.cluster.whole_pool import Served, answers, status
from tests.support.engine.text_engine import Driver
from wire.frames import Failed, Finished, Generate, GenerationParams, GrammarSpec
from wire.refusals import FailureCode

EOS = json.loads((models.path("llama") / "config.json").read_text())["eos_token_id"]
NESTED = "(((a{1,100}){1,100}){1,100})"
"""A grammar that compiles within the limits of its process and fails during generation."""


def test_nested_counts_end_their_own_request_as_the_clients_fault():
    driver = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256)
    beside = driver.ask("Hello!", GenerationParams(temperature=0.0, max_tokens=60))
    grammar, endless = GrammarSpec("regex", NESTED), ((EOS, -100.0),)
    params = GenerationParams(temperature=1.0, seed=1, max_tokens=60, grammar=grammar, logit_bias=endless)
    number = driver.ask("Hi", params)
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert (end.code, "simplify it" in end.message) == (FailureCode.GRAMMAR_FAILED, True), end
    assert driver.engine.report(0.0).counts.failures == 0, "the engine has done nothing wrong"
    assert isinstance(driver.end(beside), Finished)


@pytest.fixture(scope="module", params=["front", "asgi"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with whole_pool.served(LoopbackNode("a", mute=True), front=request.param == "front") as one:
        yield one


def ask(served: Served, path: str, body: dict[str, object]) -> bytes:
    """Request a grammar that fails at once, or after a first token if the body has `stream`; return the answer."""
    node = next(iter(served.cluster.nodes.values()))
    content = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {served.keys['infer']}\r\n"
    head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    with socket.create_connection(served.address, timeout=20) as dialed:
        before = sum(isinstance(one, Generate) for one in node.heard)
        dialed.sendall(head.encode() + content)
        deadline = time.monotonic() + 10
        while len(sent := [one for one in node.heard if isinstance(one, Generate)]) == before:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        asked = sent[-1]
        if body.get("stream"):
            served.call(lambda: served.cluster.say(node, whole_pool.word(asked)))
        served.call(
            lambda: served.cluster.say(node, Failed(asked.request, FailureCode.GRAMMAR_FAILED, "the grammar failed"))
        )
        return answers(dialed)[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_grammar_that_fails_is_a_400_and_never_touches_the_nodes_breaker(served: Served, path: str):
    dispatcher = served.cluster.dispatcher
    for _ in range(MAX_FAULTS + 2):
        answer = ask(served, path, {"max_tokens": 50})
        assert (status(answer), b"invalid_request_error" in answer) == (400, True), answer
    told = ask(served, path, {"max_tokens": 50, "stream": True})
    assert status(told) == 200
    assert b'"type":"invalid_request_error"' in told.replace(b'": "', b'":"'), told
    assert served.call(lambda: dispatcher.breakers.list_barred_nodes(time.monotonic())) == []
    assert dispatcher.breakers.opened == 0
