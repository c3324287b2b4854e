"""Hosts and origins of requests, by their headers alone."""

import msgspec
import pytest

from coordinator.http.origin_check import Message, OriginCheck, PrivateResponses, Receive, Scope, Send
from coordinator.state.settings import HttpSettings


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    message: Message = {"type": "http.response.start", "status": 200}
    await send(message)


def find_status(method: str, *headers: tuple[str, str], hosts: str = "", local: bool = True) -> int:
    """Return the status of the problem of a request with these headers, 0 for an accepted request."""
    check = OriginCheck(answer, hosts, local=local)
    problem = check.find_problem(method, [(name.encode(), value.encode()) for name, value in headers])
    return 0 if problem is None else problem.status


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "10.0.0.7",
        "10.0.0.7:8080",
        "[fd00::7]",
        "[fd00::7]:8080",
        "studio.local",
        "studio.local:8080",
        "pool.example",
        "OTHER.example:443",
    ],
)
def test_a_known_name_or_an_address_is_accepted(host: str):
    assert find_status("GET", ("host", host), hosts="pool.example, Other.Example,") == 0


@pytest.mark.parametrize(
    "host",
    ["", "example.com", "example.com:8080", "localhost:http", "localhost:", "a.studio.local", "studio.locale", "[x]"],
)
def test_an_unknown_name_is_refused(host: str):
    assert find_status("GET", ("host", host), hosts="pool.example") == 421


def test_local_names_are_unknown_where_no_key_is_needed():
    assert find_status("GET", ("host", "studio.local"), local=False) == 421
    assert find_status("GET", ("host", "studio.local"), hosts="studio.local", local=False) == 0


def test_a_request_has_one_host():
    assert find_status("GET", ("accept", "localhost")) == 421
    assert find_status("GET", ("host", "localhost"), ("host", "localhost")) == 421
    assert find_status("GET", ("host", "example.com"), ("origin", "localhost"), ("sec-fetch-site", "localhost")) == 421


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ([], False),
        ([("origin", "https://localhost:8080")], False),
        ([("origin", "http://localhost:8080"), ("sec-fetch-site", "same-origin")], False),
        ([("sec-fetch-site", "none")], False),
        ([("sec-fetch-site", "same-site")], True),
        ([("sec-fetch-site", "cross-site")], True),
        ([("origin", "https://example.com")], True),
        ([("origin", "https://localhost")], True),
        ([("origin", "null")], True),
        ([("origin", "http://localhost:8080"), ("sec-fetch-site", "cross-site")], True),
        ([("origin", "http://example.com"), ("sec-fetch-site", "same-origin")], True),
        ([("referer", "https://example.com")], False),
    ],
)
def test_only_requests_that_change_nothing_may_come_from_another_site(
    method: str, headers: list[tuple[str, str]], is_foreign: bool
):
    changes = method in ("POST", "DELETE")
    assert find_status(method, ("host", "localhost:8080"), *headers) == (403 if changes and is_foreign else 0)


APP = "app://obsidian.md"


async def ask(method: str, path: str, origin: str, *more: tuple[bytes, bytes], host: bytes = b"localhost") -> Message:
    """Send a request with an origin through the check; return the start of the answer, with its headers by name."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    headers = [(b"host", host), (b"origin", origin.encode()), (b"sec-fetch-site", b"cross-site"), *more]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    await OriginCheck(answer, origins=f"http://localhost:3000, {APP}")(scope, receive, send)
    return {"status": sent[0]["status"], "headers": dict(sent[0].get("headers", ()))}


async def test_a_page_of_a_listed_origin_may_use_the_models():
    for path in ("/v1/chat/completions", "/v2/rerank", "/api/chat"):
        found = await ask("POST", path, APP)
        assert (found["status"], found["headers"][b"access-control-allow-origin"]) == (200, APP.encode())
        assert found["headers"][b"vary"] == b"origin"


async def test_a_preflight_request_needs_no_key_and_allows_the_headers_of_its_client():
    asked = (b"access-control-request-headers", b"authorization,x-stainless-os")
    preflight = (b"access-control-request-method", b"POST"), asked
    network = (b"access-control-request-private-network", b"true")
    found = await ask("OPTIONS", "/v1/chat/completions", APP.upper(), *preflight, network)
    assert found["status"] == 204
    assert found["headers"][b"access-control-allow-headers"] == asked[1]
    assert b"POST" in found["headers"][b"access-control-allow-methods"]
    assert found["headers"][b"access-control-allow-private-network"] == b"true"
    plain = await ask("OPTIONS", "/v1/chat/completions", APP, *preflight)
    assert b"access-control-allow-private-network" not in plain["headers"]
    assert (await ask("OPTIONS", "/v1/chat/completions", APP))["status"] == 200


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("/api/v1/keys", APP),
        ("/", APP),
        ("/v1/chat/completions", "https://example.com"),
        ("/v1/chat/completions", "http://localhost:30001"),
        ("/v1/chat/completions", "null"),
    ],
)
async def test_no_other_page_may(path: str, origin: str):
    asked = (b"access-control-request-method", b"POST")
    for method, status, more in (("POST", 403, ()), ("GET", 200, ()), ("OPTIONS", 200, (asked,))):
        found = await ask(method, path, origin, *more)
        assert found["status"] == status
        assert b"access-control-allow-origin" not in found["headers"]


async def test_a_listed_origin_needs_a_known_host():
    assert (await ask("POST", "/v1/chat/completions", APP, host=b"example.com"))["status"] == 421


def test_the_fast_path_leaves_requests_of_pages_to_the_app():
    """`FastPath` answers only requests without a problem, and writes no headers of CORS."""
    headers = [(b"host", b"localhost"), (b"origin", APP.encode())]
    problem = OriginCheck(answer, origins=APP).find_problem("POST", headers)
    assert problem is not None
    assert "http.allowed_origins" in problem.message


@pytest.mark.parametrize("origins", ["", APP, "https://a.example:8443, chrome-extension://abc"])
def test_origins_are_read_from_the_settings(origins: str):
    assert msgspec.convert({"allowed_origins": origins}, HttpSettings).allowed_origins == origins


@pytest.mark.parametrize("origins", ["*", "example.com", "https://example.com/page", "https://*.example", "null", ","])
def test_texts_that_are_no_origins_are_refused(origins: str):
    with pytest.raises(msgspec.ValidationError, match="regex"):
        msgspec.convert({"allowed_origins": origins}, HttpSettings)


async def test_every_private_response_forbids_caches_and_sniffing():
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"Cache-Control", b"public"), (b"x-own", b"1")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"hi"})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await PrivateResponses(app)({"type": "http"}, receive, send)
    marks = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
    assert sent == [
        {"type": "http.response.start", "status": 201, "headers": [(b"x-own", b"1"), *marks]},
        {"type": "http.response.body", "body": b"hi"},
    ]
