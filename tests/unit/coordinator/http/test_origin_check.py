"""Hosts and origins of requests, by their headers alone."""

import pytest

from coordinator.http.origin_check import Message, OriginCheck, PrivateResponses, Receive, Scope, Send


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
