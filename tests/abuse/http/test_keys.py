"""The limits of a key against a client that tries to exceed them, and secrets in the pool's output.

After a hundred concurrent requests that end in every way, nothing is left running. No key, token or pepper is in any
file or output of the pool.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from router.admission.rate_limits import KeyLimits
from tests.effort import thin_cases
from tests.support.cluster import whole_pool
from tests.support.cluster.loopback_cluster import PEPPER, LoopbackCluster, LoopbackNode
from tests.support.cluster.whole_pool import Served, answers, status

HELLO = [{"role": "user", "content": "hello"}]
ROUTES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": ["hello", "you"]},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50},
    "/v1/responses": {"input": "hello"},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "hello"},
}
MANY = 100
ENDS = ("success", "disconnect", "no reader", "node lost", "engine", "refused")


@pytest.fixture(scope="module", params=["front", "asgi"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    node = LoopbackNode("a", step_seconds=0.01, text=("word ",) * 12)
    with whole_pool.served(
        node,
        front=request.param == "front",
        queue_timeout_seconds=0.3,
        keepalive_seconds=1.0,
        slow_client_bytes=2000,
        slow_client_seconds=0.4,
    ) as one:
        yield one


def limited(served: Served, **limits: object) -> tuple[str, str]:
    """Make a key with limits; return its id and its text."""
    made = served.call(lambda: served.built.admin.create_key("greedy", ["infer"], None, KeyLimits(**limits)))  # pyright: ignore
    assert isinstance(made, dict)
    return made["id"], made["key"]


def raw(path: str, key: str, body: dict[str, object]) -> bytes:
    content = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\nconnection: close\r\n\r\n" + content


def running(served: Served, key: str) -> object:
    return served.call(lambda: served.cluster.dispatcher.quotas.count_open(key))


def all_gone(served: Served, key: str) -> None:
    deadline = time.monotonic() + 10
    while not served.call(lambda: served.cluster.dispatcher.idle):
        assert time.monotonic() < deadline, "the dispatcher still holds a request"
    assert running(served, key) == 0
    assert served.call(lambda: served.cluster.dispatcher.ledger.empty)
    assert served.call(lambda: len(served.cluster.dispatcher.queue)) == 0


@pytest.mark.parametrize(("path", "end"), thin_cases([(path, end) for path in ROUTES for end in ENDS], 4))
def test_nothing_runs_on_after_a_hundred_requests(served: Served, path: str, end: str):
    """At most two requests run at once, and none after all have ended, for any kind of end."""
    name, key = limited(served, concurrency=2)
    cluster, node = served.cluster, next(iter(served.cluster.nodes.values()))
    stream = path.startswith("/v1/") and end != "success"
    dialed = [socket.create_connection(served.address, timeout=20) for _ in range(MANY)]
    for number, one in enumerate(dialed):
        one.sendall(raw(path, key, {**ROUTES[path], "stream": stream and number % 2 == 0}))
    most = max(int(str(running(served, name))) for _ in range(5))
    if end == "node lost":
        served.call(lambda: cluster.cut(node))
    elif end == "engine":
        served.call(lambda: cluster.fail(node, "bad_row"))
    elif end == "refused":
        served.call(lambda: setattr(node, "refuse", 50))
    if end in ("disconnect", "no reader"):
        for one in dialed:
            if end == "disconnect":
                one.close()
            else:
                one.shutdown(socket.SHUT_WR)
    else:
        told = [status(answer) for one in dialed for answer in answers(one)]
        assert set(told) <= {200, 429, 500, 502, 503}, set(told)
        assert told.count(429) >= MANY // 2
    for one in dialed:
        with suppress(OSError):
            one.close()
    assert most <= 2

    def well() -> None:
        node.up, node.state, node.refuse = True, "ready", 0
        node.reserved.clear()
        cluster.report()

    served.call(well)
    all_gone(served, name)
    assert [status(one) for one in served.ask(raw(path, key, {**ROUTES[path], "stream": False}))] == [200]
    all_gone(served, name)


@pytest.mark.parametrize("path", ROUTES)
def test_tokens_a_minute_are_not_outrun_by_leaving_early(served: Served, path: str):
    """Each client reads the first bytes and disconnects. Their tokens are counted, and stay below the limit of the
    key."""
    name, key = limited(served, tokens_per_minute=2000)
    refused = 0
    for _ in range(40):
        with socket.create_connection(served.address, timeout=20) as dialed:
            dialed.sendall(raw(path, key, {**ROUTES[path], "stream": True}))
            head = dialed.recv(4096)
            refused += head.startswith(b"HTTP/1.1 429")
    all_gone(served, name)
    used = served.call(lambda: served.cluster.dispatcher.usage.drain())
    assert isinstance(used, dict)
    mine = used[name, "tiny"]
    assert mine.requests >= 30 - refused
    assert mine.failed
    assert mine.prompt_tokens >= mine.requests - refused
    assert mine.completion_tokens >= mine.failed // 2, "what was written until they left"


def test_no_secret_is_in_anything_that_is_written(served: Served, capfd: pytest.CaptureFixture[str]):
    """The run has good and bad requests, keys made and revoked, limits, explanations and exports."""
    token = json.loads(whole(ask(served, "POST", "/api/v1/tokens", b'{"name":"t"}')))["token"]
    name, key = limited(served, concurrency=1)
    said: list[bytes] = []
    for path, body in ROUTES.items():
        for content in (body, {**body, "temperature": key}, {**body, "nonsense": token}):
            said += served.ask(raw(path, key, dict(content)))
    wrong = key[:-3] + "aaa"
    for secret in (key, wrong, served.keys["admin"], token):
        for path in (f"/api/v1/keys/{name}", "/api/v1/nothing", "/v1/models/none", "/v1/responses/none", "/livez"):
            said += served.ask(raw(path, secret, {}))
            said.append(ask(served, "GET", path, key=secret))
    for path in (
        "status",
        "version",
        "nodes",
        "models",
        "requests?last=500",
        "decisions",
        "tokens",
        "keys",
        "keys/usage",
        "usage",
        "audit?last=500",
        "joins",
        "openapi.json",
    ):
        said.append(ask(served, "GET", f"/api/v1/{path}"))
        assert status(said[-1]) == 200, path
    for story in json.loads(whole(ask(served, "GET", "/api/v1/requests?last=100")))["requests"]:
        said.append(ask(served, "GET", f"/api/v1/requests/{story['request_id']}"))
    said.append(ask(served, "DELETE", f"/api/v1/keys/{name}"))
    written = "".join(capfd.readouterr())
    digest = served.call(lambda: next(row.digest for row in served.built.store.keys.values() if row.id != name))
    assert isinstance(digest, bytes)
    secrets = [key, wrong, *served.keys.values(), token, PEPPER.decode(), PEPPER.hex(), digest.hex()]
    for secret in secrets:
        for text in (*said, written.encode()):
            assert secret.encode() not in text, (secret[:6], text[:300])
            assert secret[-20:].encode() not in text, (secret[:6], text[:300])


def ask(served: Served, method: str, path: str, body: bytes = b"", key: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key or served.keys['admin']}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    with socket.create_connection(served.address, timeout=20) as dialed:
        dialed.sendall(head.encode() + body)
        got = b""
        with suppress(ConnectionError):
            while data := dialed.recv(65536):
                got += data
    return got


def whole(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def test_connections_above_the_limit_get_a_503(monkeypatch: pytest.MonkeyPatch, served: Served):
    """Open files are kept for the links of the nodes, and existing connections stay."""
    with socket.create_connection(served.address, timeout=10) as first:
        monkeypatch.setattr("coordinator.http.http_protocol.DeadlineProtocol.max_connections", 3)
        others = [socket.create_connection(served.address, timeout=10) for _ in range(10)]
        told = [answers(one) for one in others[5:]]
        assert all([status(answer) for answer in found] == [503] for found in told)
        assert all(b"retry-after: 5" in found[0] for found in told)
        first.sendall(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert [status(one) for one in answers(first)] == [200]
        for one in others:
            one.close()
    monkeypatch.undo()
    deadline = time.monotonic() + 5
    while [status(one) for one in served.ask(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")] != [200]:
        assert time.monotonic() < deadline


def test_the_loop_of_the_pool_is_another_thread(served: Served):
    """Otherwise these tests would block themselves."""
    assert served.call(threading.get_ident) != threading.get_ident()
    assert isinstance(served.cluster, LoopbackCluster)
