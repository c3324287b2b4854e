"""Every route of the OpenAPI document against hostile clients: keys, hosts, other sites, framing, bodies, slow
requests.

Each case runs through the product's protocol class and through the ASGI application alone. `CHECKLIST` names the tests
of every item. The routes come from the document, therefore a new route is tested without a change here. CI tries a
third of the routes each day, except in the test of scopes, which each route declares itself. It also tries a third of
the harmful values, on all routes that ask a model.
"""

import ast
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.body import BODY_TIMEOUT_SECONDS
from coordinator.api.route import MAX_PUBLIC_BODY_BYTES
from coordinator.http.origin_check import OriginCheck
from router.http.app import serve_not_found
from tests.effort import thin_cases
from tests.support.cluster import whole_pool
from tests.support.cluster.whole_pool import OPERATIONS, Served, answers, status
from wire.frames import Generate

HERE = "tests/abuse/http/test_every_route.py"
PORT = "tests/abuse/http/test_http_port.py"
TLS = "tests/abuse/http/test_tls_port.py"
DIALECTS = "tests/contract/dialects/test_bad_clients.py"
CHECKLIST: dict[str, tuple[str, ...]] = {
    "a route without a declared scope": (
        "tests/test_routes.py::test_every_route_is_described_with_one_scope",
        "tests/test_routes.py::test_every_route_of_the_control_application_is_documented",
    ),
    "no key, wrong key, non-ASCII key": (f"{HERE}::test_keys_that_open_nothing",),
    "a key of another scope": (f"{HERE}::test_keys_that_open_something_else",),
    "hosts that are not ours, none, two, with junk": (
        f"{HERE}::test_hosts_that_are_not_ours",
        f"{PORT}::test_names_that_are_not_ours_are_421",
    ),
    "hosts that are ours, however they are written": (f"{HERE}::test_hosts_that_are_ours",),
    "absolute targets, CONNECT, TRACE": (f"{HERE}::test_targets_and_methods_that_are_not_for_us",),
    "posts from other sites, null origin, text/plain": (
        f"{HERE}::test_requests_from_pages_of_other_sites_are_refused",
    ),
    "no page may read an answer, no WebSocket": (f"{HERE}::test_headers_do_not_bypass_the_origin_check",),
    "CL+TE, two CLs, negative CL, folded lines, chunks that overrun": (
        f"{HERE}::test_ambiguous_framing",
        f"{PORT}::test_ambiguous_framing_is_a_400_and_the_connection_ends",
    ),
    "large heads, many headers": (f"{HERE}::test_heads_without_end", f"{PORT}::test_a_head_of_two_mebibytes_is_431"),
    "bad UTF-8, NUL, depth, 1e400, duplicates, NaN": (
        f"{HERE}::test_invalid_bodies_are_rejected",
        f"{DIALECTS}::test_a_bad_body_is_a_400_in_the_shape_of_its_dialect",
    ),
    "long bodies": (f"{HERE}::test_long_bodies_are_not_read", f"{PORT}::test_more_than_eight_mebibytes_are_413"),
    "idle, slow head": (f"{PORT}::test_heads_that_drip_or_never_come_have_ten_seconds",),
    "slow body": (f"{HERE}::test_bodies_that_drip", f"{DIALECTS}::test_a_body_that_arrives_too_slowly_is_given_up"),
    "slow reader": (
        "tests/abuse/http/test_keys.py::test_nothing_runs_on_after_a_hundred_requests",
        "tests/contract/dialects/test_chat.py::test_a_reader_that_does_not_read_loses_its_stream_alone",
    ),
    "disconnect in every phase": (
        f"{HERE}::test_clients_that_leave_at_once",
        f"{DIALECTS}::test_a_client_may_leave_in_every_phase",
        f"{DIALECTS}::test_a_client_that_leaves_within_its_body_costs_nothing",
    ),
    "500 connections": (f"{PORT}::test_five_hundred_connections_do_not_stop_the_service",),
    "requests ahead": (f"{HERE}::test_requests_sent_ahead_are_answered_in_order",),
    "templates, URLs, names and sizes from a body": (f"{HERE}::test_values_that_would_hurt",),
    "the same against TLS": (
        f"{TLS}::test_handshakes_that_stall_are_given_up",
        f"{TLS}::test_connection_without_a_tls_handshake_is_closed",
        f"{TLS}::test_shapes_within_tls",
    ),
}
"""Each item of the checklist, and the tests that show it."""

OPEN = {"GET /health", "GET /livez", "GET /api/v1/ca.pem", "POST /api/v1/page/visits"}
GUARDED = [operation for operation in OPERATIONS if operation not in OPEN]
TRIED = sorted([*OPEN, *thin_cases(GUARDED, 3)])
"""Operations of the checks that run before any route: a third of them, other ones each day."""
TRIED_GUARDED = [operation for operation in TRIED if operation not in OPEN]
CHANGING = [operation for operation in TRIED if not operation.startswith("GET ")]
WITH_BODY = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "POST /api/chat",
    "POST /api/generate",
    "POST /v1/embeddings",
    "POST /api/embed",
    "POST /api/embeddings",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /api/show",
    "POST /api/v1/nodes/{node}/drain",
    "POST /api/v1/nodes/{node}/pause",
    "PUT /api/v1/nodes/{node}/labels",
    "POST /api/v1/cache/clear",
    "POST /api/v1/models/load",
    "POST /api/v1/models/unload",
    "POST /api/v1/models/profile",
    "POST /api/v1/models/verify",
    "POST /api/v1/models/remove",
    "PUT /api/v1/models/wishes/{model}",
    "POST /api/v1/pulls",
    "POST /api/v1/quantizations",
    "POST /api/v1/benchmarks",
    "POST /api/v1/place",
    "POST /api/v1/tokens",
    "POST /api/v1/keys",
    "PUT /api/v1/keys/{key}/limits",
    "PUT /api/v1/keys/{key}/name",
    "PUT /api/v1/keys/{key}/expiry",
    "POST /api/v1/page/visits",
    "POST /v1/videos",
]
TRIED_BODIES = thin_cases(WITH_BODY, 3)
HELLO = [{"role": "user", "content": "hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": HELLO, "max_tokens": 5},
    "POST /v1/completions": {"prompt": "hello", "max_tokens": 5},
    "POST /v1/messages": {"messages": HELLO, "max_tokens": 5},
    "POST /v1/responses": {"input": "hello", "max_output_tokens": 16},
    "POST /api/chat": {"messages": HELLO, "stream": False},
    "POST /api/generate": {"prompt": "hello", "stream": False},
}


@pytest.fixture(scope="module", params=["front", "asgi"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with whole_pool.served(front=request.param == "front", queue_timeout_seconds=0.3, body_timeout_seconds=1.0) as one:
        yield one


@pytest.fixture(autouse=True)
def still_serves(served: Served) -> Iterator[None]:
    """Check that the next honest request is answered."""
    yield
    answer = served.ask(request(served, "POST /v1/chat/completions", body=honest("POST /v1/chat/completions")))
    assert [status(one) for one in answer] == [200]


def honest(operation: str) -> bytes:
    return json.dumps({"model": "tiny", **ASKED[operation]}).encode()


def request(
    served: Served,
    operation: str,
    *lines: str,
    body: bytes | None = b"{}",
    host: str | None = "127.0.0.1",
    key: str | None = "admin",
    target: str = "",
) -> bytes:
    """Write a request; `key` is a scope, or the key itself."""
    method, path = operation.split(" ")
    head = [f"{method} {target or re.sub(r'{.*?}', 'x', path)} HTTP/1.1", *lines]
    head += [f"host: {host}"] if host is not None else []
    head += [f"authorization: Bearer {served.keys.get(key, key)}"] if key is not None else []
    if body is not None and method != "GET":
        head += [f"content-length: {len(body)}", "content-type: application/json"]
    return ("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + ((body or b"") if method != "GET" else b"")


def message_of(answer: bytes) -> str:
    """Return the message of an error in any dialect, empty for any other answer."""
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    error = body["error"] if "error" in body else body["message"]
    return error if isinstance(error, str) else error["message"]


def only(served: Served, raw: bytes) -> bytes:
    """Send a request; return its only answer, which must arrive soon."""
    began = time.monotonic()
    found = served.ask(raw)
    assert len(found) == 1, found
    assert time.monotonic() - began < 5
    return found[0]


# the table


def test_every_item_of_the_checklist_has_its_tests():
    root = Path(__file__).parents[3]
    for item, tests in CHECKLIST.items():
        for test in tests:
            file, _, name = test.partition("::")
            names = {
                node.name
                for node in ast.walk(ast.parse((root / file).read_text()))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in names, f"{item}: there is no {test}"


def test_the_routes_are_those_of_the_document(served: Served):
    described = {
        f"{m.upper()} {path}": one for path, item in served.document["paths"].items() for m, one in item.items()
    }
    assert set(described) == set(OPERATIONS)
    assert {name for name, one in described.items() if not one["security"]} == OPEN
    assert {name for name, one in described.items() if "requestBody" in one} == set(WITH_BODY)
    assert {name for name, one in described.items() if "x-scope" not in one} == OPEN


# 1: keys


@pytest.mark.parametrize("operation", TRIED_GUARDED)
def test_keys_that_open_nothing(served: Served, operation: str):
    real = served.keys["admin"]
    for key in (
        "",
        "x",
        "mp__",
        real[:-1],
        real + "x",
        real.upper(),
        "mp_\xe9\xff_\xfc",
        "x" * 8000,
        "mp_" + "a" * 300,
        real.replace("mp_", "pm_"),
        "null",
        "\x80",
    ):
        answer = only(served, request(served, operation, key=key))
        assert status(answer) == 401, key
        assert message_of(answer)
        assert real.encode() not in answer
    for lines in (
        (),
        (f"x-api-key: {real[:-2]}",),
        (f"authorization: Basic {real}",),
        (f"cookie: key={real}",),
        (f"proxy-authorization: Bearer {real}",),
        (f"authorization: {real}",),
    ):
        assert status(only(served, request(served, operation, *lines, key=None))) == 401, lines
    target = re.sub(r"{.*?}", "x", operation.split(" ")[1]) + f"?key={real}&api_key={real}"
    assert status(only(served, request(served, operation, key=None, target=target))) == 401


@pytest.mark.parametrize("operation", GUARDED)
def test_keys_that_open_something_else(served: Served, operation: str):
    wanted = served.about(operation)["x-scope"]
    for scope in served.keys.keys() - {wanted, "admin"}:
        answer = only(served, request(served, operation, key=scope))
        assert status(answer) == 403
        assert wanted in message_of(answer)


# 2: hosts and targets


@pytest.mark.parametrize("operation", TRIED)
def test_hosts_that_are_not_ours(served: Served, operation: str):
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "127.0.0.1:x",
        "localhost.",
        "[::1",
        "",
        "localhost@evil.example",
        "[::1]:80:80",
        "xn--.local.",
        "a.b.local",
        "127.0.0.1/",
        "127.1 ",
    ):
        assert status(only(served, request(served, operation, host=host))) in (421, 400), host
    assert status(only(served, request(served, operation, "host: 127.0.0.1"))) in (421, 400)
    assert status(only(served, request(served, operation, host=None))) in (421, 400)
    forwarded = request(
        served, operation, "x-forwarded-host: localhost", "forwarded: host=localhost", host="evil.example"
    )
    assert status(only(served, forwarded)) == 421


@pytest.mark.parametrize("host", ["LOCALHOST", "LocalHost:8080", "[::1]", "[::1]:8080", "127.0.0.1:1", "studio.local"])
def test_hosts_that_are_ours(served: Served, host: str):
    assert status(only(served, request(served, "GET /v1/models", host=host))) == 200
    answer = only(
        served, request(served, "POST /v1/chat/completions", host=host, body=honest("POST /v1/chat/completions"))
    )
    assert status(answer) == 200


@pytest.mark.parametrize("operation", TRIED)
def test_targets_and_methods_that_are_not_for_us(served: Served, operation: str):
    path = re.sub(r"{.*?}", "x", operation.split(" ")[1])
    for target in (f"http://evil.example{path}", f"http://127.0.0.1{path}", f"https:{path}", "*", "evil.example:443"):
        assert status(only(served, request(served, operation, target=target))) in (400, 404), target
    for target in (f"//evil.example{path}", f"/{path}", path + "/", path + "%00", path + "/..", f"/x/..{path}"):
        listed = (200,) if target == "/v1/models/" else ()
        guessed = (429,) if "/joins/" in target else ()  # earlier tests may have used up the guesses of codes
        answer = status(only(served, request(served, operation, target=target)))
        assert answer in (400, 404, 405, 501, *listed, *guessed), target
    for method in ("TRACE", "PATCH", "OPTIONS", "PROPFIND", "PURGE"):
        answer = only(served, request(served, f"{method} {path}"))
        assert status(answer) in (404, 405), method
        assert b"authorization" not in answer.lower(), "nothing is echoed"
    for line in (
        "CONNECT 127.0.0.1:80 HTTP/1.1",
        f"CONNECT {path} HTTP/1.1",
        f"GET {path}",
        f"GET {path} HTTP/9.9",
        "PRI * HTTP/2.0",
        f"get {path} HTTP/1.1",
        f"G\x00T {path} HTTP/1.1",
        f"BREW {path} HTTP/1.1",
    ):
        assert all(
            400 <= status(one) < 500 for one in served.ask(f"{line}\r\nhost: 127.0.0.1\r\n\r\nSM\r\n\r\n".encode())
        )


# 3: other sites


@pytest.mark.parametrize("operation", CHANGING)
def test_requests_from_pages_of_other_sites_are_refused(served: Served, operation: str):
    for line in (
        "origin: https://evil.example",
        "origin: null",
        "origin: http://127.0.0.1:1",
        "origin: file://",
        "origin: https://127.0.0.1.evil.example",
        "sec-fetch-site: cross-site",
        "sec-fetch-site: same-site",
    ):
        answer = only(served, request(served, operation, line))
        assert (status(answer), b"access-control" in answer.lower()) == (403, False), line
    plain = request(served, operation, "origin: https://evil.example", "content-type: text/plain", key=None)
    assert status(only(served, plain.replace(b"\r\ncontent-type: application/json", b""))) == 403


@pytest.mark.parametrize("operation", TRIED)
def test_headers_do_not_bypass_the_origin_check(served: Served, operation: str):
    path = re.sub(r"{.*?}", "x", operation.split(" ")[1])
    asks = ("origin: https://evil.example", "access-control-request-method: POST", "access-control-request-headers: *")
    for one in (f"OPTIONS {path}", f"GET {path}"):
        assert b"access-control" not in only(served, request(served, one, *asks)).lower()
    upgrade = (
        "connection: Upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-key: AAAA",
        "origin: https://evil.example",
    )
    for answer in served.ask(request(served, f"GET {path}", *upgrade)):
        assert status(answer) != 101


@pytest.mark.parametrize("operation", [one for one in TRIED if " /api/v1/" in one])
def test_answers_of_the_control_api_are_kept_by_no_cache(served: Served, operation: str):
    for key in ("admin", "infer", None):
        answer = only(served, request(served, operation, key=key)) if operation != "GET /api/v1/live" else b""
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert not answer or (head.count(b"cache-control: no-store"), head.count(b"cache-control")) == (1, 1), head
        assert not answer or b"x-content-type-options: nosniff" in head


def test_local_names_are_not_ours_where_no_key_is_needed():
    """Any machine on the network can answer for a name under .local, and its page could then send requests to the
    models."""
    headers = [(b"host", b"studio.local:8080")]
    assert OriginCheck(serve_not_found).find_problem("GET", headers) is None
    for hosts, expected in (("", 421), ("studio.local", None)):
        problem = OriginCheck(serve_not_found, hosts, local=False).find_problem("GET", headers)
        assert (problem and problem.status) == expected
    assert OriginCheck(serve_not_found, local=False).find_problem("GET", [(b"host", b"127.0.0.1:8080")]) is None


# 4: framing and bodies

FRAMING = [
    "content-length: 5\r\ntransfer-encoding: chunked",
    "content-length: 5\r\ncontent-length: 6",
    "content-length: -1",
    "content-length: +5",
    "content-length: 0x5",
    "content-length: 5, 5",
    "content-length: ",
    "content-length: " + "9" * 30,
    "transfer-encoding: identity, chunked, identity",
    "transfer-encoding : chunked",
    "content-length\t: 5",
    "transfer-encoding: chunked\r\n\r\nzz",
    "transfer-encoding: chunked\r\n\r\n-5\r\nhello",
    "transfer-encoding: chunked\r\n\r\n" + "f" * 20 + "\r\nhello",
    "transfer-encoding: chunked\r\n\r\n2\r\n{}x0\r\n",
    "x-a: b\0c",
    "x-a: b\rc",
    "x a: b",
    ": b",
    "x-a\0: b",
]


@pytest.mark.parametrize("operation", TRIED)
def test_ambiguous_framing(served: Served, operation: str):
    """One 4xx at most, then the end of the connection. The bytes behind the body are never read as a request."""
    hidden = request(served, "GET /api/v1/keys")
    for shape in FRAMING:
        raw = request(served, operation, shape.partition("\r\n\r\n")[0], body=None)
        raw = raw[:-4] + b"\r\n\r\n" + shape.partition("\r\n\r\n")[2].encode()
        with socket.create_connection(served.address, timeout=10) as dialed:
            dialed.sendall(raw + b"0\r\n\r\n" + hidden)
            found = answers(dialed)
        assert len(found) <= 1, (shape, found)
        assert not [one for one in found if b'"keys"' in one], shape
        assert all(400 <= status(one) < 500 or status(one) == 501 for one in found), (shape, found)


@pytest.mark.parametrize("operation", TRIED)
def test_heads_without_end(served: Served, operation: str):
    for lines in (["x-long: " + "a" * 40_000], ["x-a: b"] * 10_000, [f"x-{n}: b" for n in range(4000)]):
        for answer in served.ask(request(served, operation, *lines)):
            assert status(answer) == 431
            assert message_of(answer)
    target = operation.split(" ")[1] + "?" + "a" * 40_000
    for answer in served.ask(request(served, operation, target=re.sub(r"{.*?}", "x", target))):
        assert status(answer) in (431, 400)


BAD = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"null",
    b"7",
    b"\xff\xfe",
    b"\x00",
    b"\xef\xbb\xbf{}",
    b"{} {}",
    b"{'a':1}",
    b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"model":-Infinity}',
    b"[" * 10_000,
    b'{"a":' * 10_000,
    b'{"a":1,"a":1}',
    b'{"a":"\\ud800"}',
    b'{"\\ud800":1}',
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"a":"\x00"}',
    b'{"a":"\xc0\xaf"}',
    b'{"a":"\xed\xa0\x80"}',
    b'{"model":1e400}',
    b'{"model":["' + b"x" * 9000 + b'"]}',
    b"<a>1</a>",
    b"a=b",
]


@pytest.mark.parametrize("operation", TRIED_BODIES)
def test_invalid_bodies_are_rejected(served: Served, operation: str):
    for body in BAD:
        answer = only(served, request(served, operation, body=body))
        long = operation == "POST /api/v1/page/visits" and len(body) > MAX_PUBLIC_BODY_BYTES
        assert status(answer) == (413 if long else 400), (body[:60], answer)
        assert message_of(answer)


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("POST /api/v1/keys", b'{"name":"a","ttl_seconds":1e400}'),
        ("POST /api/v1/keys", b'{"name":"a","ttl_seconds":1e300}'),
        ("POST /api/v1/keys", b'{"name":"a","scopes":["\\ud800"]}'),
        ("POST /api/v1/keys", b'{"name":"a","scopes":["infer"],"scopes":["admin"]}'),
        ("POST /api/v1/keys", b'{"name":"local","scopes":["admin"]}'),
        ("PUT /api/v1/keys/{key}/name", b'{"name":"local"}'),
        ("PUT /api/v1/keys/{key}/name", b'{"name":"a\\u001b[2J"}'),
        ("PUT /api/v1/keys/{key}/expiry", b'{"ttl_seconds":1e300}'),
        ("POST /api/v1/keys", b'{"name":"a\\u001b[2J"}'),
        ("POST /api/v1/keys", b'{"name":"a","limits":{"concurrency":1e400}}'),
        ("POST /api/v1/tokens", b'{"name":"a\\nb"}'),
        ("POST /api/v1/tokens", b'{"ttl_seconds":1e400}'),
    ],
)
def test_values_that_break_a_list_are_a_400(served: Served, operation: str, body: bytes):
    assert status(only(served, request(served, operation, body=body))) == 400
    assert status(only(served, request(served, "GET /api/v1/keys"))) == 200


@pytest.mark.parametrize("operation", TRIED_BODIES)
def test_long_bodies_are_not_read(served: Served, operation: str):
    raw = request(served, operation, "content-length: 99999999", body=None)
    assert status(only(served, raw)) == 413


# 5: patience


def test_bodies_that_drip(served: Served):
    """All run at once, because each has its own deadline."""
    began = time.monotonic()
    with ExitStack() as stack:
        dialed = {
            operation: stack.enter_context(socket.create_connection(served.address, timeout=BODY_TIMEOUT_SECONDS + 10))
            for operation in WITH_BODY
        }
        for operation, one in dialed.items():
            one.sendall(request(served, operation, "content-length: 500", body=None) + b"{")
        for operation, one in dialed.items():
            assert [status(answer) for answer in answers(one)] == [408], operation
    assert time.monotonic() - began < BODY_TIMEOUT_SECONDS + 5


@pytest.mark.parametrize("operation", TRIED)
def test_clients_that_leave_at_once(served: Served, operation: str):
    """They disconnect after a part of the head, after a part of the body, and after all of it, without reading."""
    body = honest(operation) if operation in ASKED else b"{}"
    raw = request(served, operation, body=body)
    for sent in (raw[:30], raw[:-1], raw):
        with socket.create_connection(served.address, timeout=10) as dialed:
            dialed.sendall(sent)
    deadline = time.monotonic() + 10
    while not served.call(lambda: served.cluster.dispatcher.idle and served.cluster.dispatcher.ledger.empty):
        assert time.monotonic() < deadline, "the dispatcher still holds the request"


@pytest.mark.parametrize("operation", TRIED)
def test_requests_sent_ahead_are_answered_in_order(served: Served, operation: str):
    body = honest(operation) if operation in ASKED else b"{}"
    one = request(served, operation, "x-request-id: first", body=body)
    last = request(served, "GET /livez", "connection: close")
    with socket.create_connection(served.address, timeout=10) as dialed:
        dialed.sendall(one * 3 + last)
        got = b""
        while data := dialed.recv(65536):
            got += data
    heads = [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", got)]
    assert len(heads) == 4
    assert heads[-1] == 200
    pause = {429} if "/joins/" in operation else set[int]()  # wrong codes, of these three requests or of earlier ones
    assert len(set(heads[:3]) - pause) <= 1 or operation.startswith("DELETE"), heads


# 7: values

HOSTILE: list[dict[str, Any]] = [
    {"chat_template": "{{ 7 * 7 }}"},
    {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
    {"template": "{{ 7 * 7 }}"},
    {"api_base": "http://evil.example"},
    {"base_url": "http://evil.example"},
    {"model": "../../etc/passwd"},
    {"model": "tiny\n"},
    {"model": "tiny\x00"},
    {"model": "http://evil.example/x"},
    {"model": "x" * 10_000},
    {"n": 10**9},
    {"best_of": 10**9},
    {"max_tokens": 10**12},
    {"max_output_tokens": 10**12},
    {"max_tokens": -2},
    {"options": {"num_predict": 10**12}},
    {"options": {"num_ctx": 10**12}},
    {"stop": ["x"] * 100_000},
    {"stop": "x" * 1_000_000},
    {"stop_sequences": ["x"] * 100_000},
    {"options": {"stop": ["x"] * 100_000}},
    {"logit_bias": {str(n): 1 for n in range(100_000)}},
    {"seed": "x"},
    {"seed": 1.5},
    {"seed": 2**80},
    {"seed": []},
    {"temperature": 1e308},
    {"temperature": "hot"},
    {"top_p": -1},
    {"options": {"seed": "x"}},
    {"options": {"temperature": "hot"}},
    {"top_logprobs": 10**9},
    {"logprobs": 10**9},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(a+)+$" * 1000}}}},
    {"format": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(50_000)}}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "y" * 2_000_000}}}]},
    {"image_url": "http://169.254.169.254/"},
    {"images": ["http://169.254.169.254/"]},
    {"user": "x" * 1_000_000},
    {"trust_remote_code": True},
    {"previous_response_id": "../x"},
    {"keep_alive": "x" * 100_000},
]
LONGEST = 4096
"""Tokens of the model's context."""


@pytest.mark.parametrize("operation", ASKED)
def test_values_that_would_hurt(served: Served, operation: str):
    """They are refused at once or have no effect: no node gets a request beyond the limits of a client."""
    node = next(iter(served.cluster.nodes.values()))
    for fields in thin_cases(HOSTILE, 3):
        body = json.dumps({"model": "tiny", **ASKED[operation], **fields}).encode()
        node.heard.clear()
        began = time.monotonic()
        answer = only(served, request(served, operation, body=body))
        assert time.monotonic() - began < 5, fields.keys()
        assert status(answer) in (200, 400, 403, 404, 413), (str(fields)[:100], answer[:300])
        for asked in (frame for frame in list(node.heard) if isinstance(frame, Generate)):
            assert asked.model == "tiny"
            assert asked.params.n <= 128
            assert "7 * 7" not in asked.template
            assert len(asked.params.stop) <= 64
            assert "evil.example" not in repr(asked)
            assert "169.254" not in repr(asked)
