"""What one client wrote is told to no other: a refusal that quotes its request goes to its client alone."""

import json

import pytest

from tests.support.loopback_cluster import LoopbackNode
from tests.support.whole_pool import Served, served, status
from wire.refusals import Code, Refused

WRITTEN = "zebra canary"


def ask(pool: Served, method: str, path: str, key: str, body: object = None) -> tuple[int, str]:
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {pool.keys[key]}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    (answer,) = pool.ask(head.encode() + content)
    return status(answer), answer.partition(b"\r\n\r\n")[2].decode()


@pytest.mark.parametrize("code", [Code.INVALID, Code.UNSUPPORTED, Code.TEMPLATE])
def test_a_refusal_that_quotes_its_request_is_told_to_its_client_alone(code: Code):
    node = LoopbackNode("a", refuse=1, refusal=Refused(code, f"this is odd: {WRITTEN}"))
    with served(node) as pool:
        body = {"model": "tiny", "messages": [{"role": "user", "content": WRITTEN}]}
        told, answer = ask(pool, "POST", "/v1/chat/completions", "infer", body)
        assert told == 400
        assert WRITTEN in answer
        told, others = ask(pool, "GET", "/api/v1/requests", "metrics")
        assert told == 200
        (story,) = json.loads(others)["requests"]
        assert story["outcome"] == code
        assert WRITTEN not in others
