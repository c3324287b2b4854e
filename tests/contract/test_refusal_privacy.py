"""Text of one client reaches no other client: a refusal that quotes a request goes only to the client of that
request."""

import json

import pytest

from router.dispatch.decision_log import MAX_INVALID_KEPT, DecisionLog
from router.errors import build_invalid
from tests.support.cluster.loopback_cluster import LoopbackNode
from tests.support.cluster.whole_pool import Served, served, status
from wire.refusals import RefusalCode, Refused

WRITTEN = "zebra canary"


def ask(pool: Served, method: str, path: str, key: str, body: object = None) -> tuple[int, str]:
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {pool.keys[key]}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    (answer,) = pool.ask(head.encode() + content)
    return status(answer), answer.partition(b"\r\n\r\n")[2].decode()


@pytest.mark.parametrize("code", [RefusalCode.INVALID, RefusalCode.UNSUPPORTED, RefusalCode.TEMPLATE])
def test_refusal_with_request_text_is_sent_to_its_client_only(code: RefusalCode):
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
        assert "the response to the client has the details" in story["message"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [{"role": WRITTEN, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": WRITTEN}]}]}, "messages[0].content[0].type '…'"),
        ({"tools": [{"type": "function", "function": {"name": WRITTEN}}]}, "tools[0].function.name"),
        ({"logit_bias": {WRITTEN: 1}}, "logit_bias.…"),
        ({"chat_template_kwargs": {"template_" + WRITTEN: 1}}, "chat_template_kwargs.…"),
        ({"functions": [WRITTEN]}, "functions is not supported"),
        ({"temprature": 1}, "unknown field 'temprature': did you mean temperature?"),
        ({"max_tokens": 0}, "max_tokens: "),
    ],
)
def test_a_body_that_is_refused_is_found_with_its_reason_and_not_quoted(fields: dict[str, object], reason: str):
    with served(LoopbackNode("a")) as pool:
        body = {"model": "tiny", "messages": [{"role": "user", "content": WRITTEN}], **fields}
        told, answer = ask(pool, "POST", "/v1/chat/completions", "infer", body)
        assert told == 400
        name = json.loads(answer)["error"]["request_id"]
        (story,) = json.loads(ask(pool, "GET", f"/api/v1/requests/{name}", "metrics")[1])["requests"]
        assert (story["outcome"], story["model"]) == (json.loads(answer)["error"]["code"], "")
        assert reason in story["message"]
        others = ask(pool, "GET", "/api/v1/requests", "metrics")[1]
        assert [one["request_id"] for one in json.loads(others)["requests"]] == [name]
        assert WRITTEN not in others


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny"}),
        ("/v1/responses", {"model": "tiny"}),
        ("/v1/messages", {"model": "tiny"}),
        ("/v1/messages/count_tokens", {"model": "tiny"}),
        ("/api/chat", {"model": "tiny", "messages": "x"}),
        ("/api/generate", {}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "x" * 9_000_000}]}),
        ("/v1/chat/completions", {"model": "nowhere", "messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_every_route_keeps_why_it_refused(path: str, body: object):
    with served(LoopbackNode("a")) as pool:
        told, answer = ask(pool, "POST", path, "infer", body)
        assert told in (400, 404, 413)
        (story,) = json.loads(ask(pool, "GET", "/api/v1/requests", "metrics")[1])["requests"]
        assert story["message"] in answer or json.dumps(story["message"])[1:-1] in answer


def test_a_client_that_is_refused_again_and_again_evicts_no_other_request():
    history = DecisionLog()
    with served(LoopbackNode("a")) as pool:
        good = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        assert ask(pool, "POST", "/v1/chat/completions", "infer", good)[0] == 200
        for _ in range(3):
            ask(pool, "POST", "/v1/chat/completions", "infer", {})
        rows = json.loads(ask(pool, "GET", "/api/v1/requests", "metrics")[1])["requests"]
        assert [row["outcome"] for row in rows] == ["ok", *["invalid_request"] * 3]
    for number in range(MAX_INVALID_KEPT + 1):
        history.record_invalid(float(number), f"r{number}", "k", build_invalid("no", "x"))
    assert (len(history.refusals), len(history.records)) == (MAX_INVALID_KEPT, 0)
