"""The two readers of a request's head: the careful reader reads every head of the quick reader in the same way."""

from typing import Any

import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.http.ambiguous_heads import (
    ENCODED_BODY,
    MALFORMED,
    UNKNOWN_TRANSFER_CODING,
    UNMET_EXPECTATION,
    build_repeated_header_problem,
    find_problem,
    serialize_without_upgrade,
)
from coordinator.http.chat_fast_path import REQUEST_START, FastPath
from coordinator.http.origin_check import OriginCheck
from router.admission.api_keys import extract_key
from router.errors import Header, Problem
from router.http.app import serve_not_found
from router.settings import RouterSettings
from tests.effort import scale_examples
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode

NAMES = st.sampled_from(
    [
        "host",
        "Host",
        "content-length",
        "Content-Length",
        "authorization",
        "x-api-key",
        "origin",
        "transfer-encoding",
        "connection",
        "expect",
        "x-request-id",
        "sec-fetch-site",
        "upgrade",
        "x-session-id",
        " host",
        "host ",
        "",
        "x\0",
        "x:y",
    ]
)
VALUES = st.sampled_from(
    [
        "127.0.0.1",
        "localhost",
        "evil.example",
        "5",
        "05",
        "-5",
        "5 5",
        "+5",
        "5\r",
        "\t5",
        "chunked",
        "keep-alive",
        "close",
        "Bearer k",
        "null",
        "http://127.0.0.1",
        "same-origin",
        "a\0b",
        "a\nb: c",
        "\xff",
        "",
    ]
)
COLONS = st.sampled_from([": ", ":", " : ", ":\t", "="])
LINES = st.lists(st.tuples(NAMES, COLONS, VALUES).map("".join), max_size=6)
GOOD = ["host: 127.0.0.1", "content-length: 5", "authorization: Bearer k"]


class Read:
    """Records the callbacks of httptools for a head."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.whole = True


@settings(max_examples=scale_examples(2000))
@given(LINES, st.permutations(GOOD))
@example(["transfer-encoding: chunked"], GOOD)
@example(["content-length: 6"], GOOD)
@example(["\tfolded: yes"], GOOD)
@example(["origin: http://evil.example"], GOOD)
def test_fast_path_agrees_with_the_complete_parser_on_any_head(lines: list[str], good: list[str]):
    raw = REQUEST_START + "\r\n".join([*good, *lines]).encode("latin-1") + b"\r\n\r\n"
    cluster = LoopbackCluster(LoopbackNode("a"))
    guard = OriginCheck(serve_not_found)
    head: Any = FastPath(cluster.dispatcher, cluster.keys, RouterSettings(), guard).parse_head(raw[:-4])
    if head.length is None:
        return
    read = Read()
    httptools.HttpRequestParser(read).feed_data(raw)
    assert read.whole, "the careful reader waits for more"
    found = dict(read.headers)
    assert len(found) == len(read.headers)
    assert int(found[b"content-length"]) == head.length
    assert b"transfer-encoding" not in found
    assert extract_key(read.headers) == head.key
    assert guard.find_problem("POST", read.headers) is None


@pytest.mark.parametrize(
    ("version", "headers", "found"),
    [
        ("1.1", [(b"host", b"a")], None),
        ("1.0", [], None),
        ("1.0", [(b"host", b"a")], None),
        ("1.1", [], MALFORMED),
        ("1.1", [(b"host", b"a"), (b"accept", b"x"), (b"accept", b"y")], None),
        ("1.1", [(b"host", b"a"), (b"host", b"a")], build_repeated_header_problem(b"host")),
        (
            "1.1",
            [(b"host", b"a"), (b"x-api-key", b"a"), (b"accept", b"x"), (b"x-api-key", b"b")],
            build_repeated_header_problem(b"x-api-key"),
        ),
        ("1.1", [(b"host", b"a"), (b"content-length", b"5")], None),
        ("1.1", [(b"host", b"a"), (b"content-length", b"9" * 16)], MALFORMED),
        ("1.1", [(b"host", b"a"), (b"content-length", b"+5")], MALFORMED),
        ("1.1", [(b"host", b"a"), (b"transfer-encoding", b"Chunked")], None),
        ("1.1", [(b"host", b"a"), (b"transfer-encoding", b"gzip")], UNKNOWN_TRANSFER_CODING),
        ("1.0", [(b"host", b"a"), (b"transfer-encoding", b"chunked")], MALFORMED),
        ("1.1", [(b"host", b"a"), (b"expect", b"100-Continue")], None),
        ("1.1", [(b"host", b"a"), (b"expect", b"200-ok")], UNMET_EXPECTATION),
        ("1.1", [(b"host", b"a"), (b"content-encoding", b"Identity")], None),
        ("1.1", [(b"host", b"a"), (b"content-encoding", b"")], None),
        ("1.1", [(b"host", b"a"), (b"content-encoding", b"gzip")], ENCODED_BODY),
    ],
)
def test_a_head_is_taken_or_refused_with_its_reason(version: str, headers: list[Header], found: Problem | None):
    assert find_problem(version, headers) == found
    if found is not None and found.code == "header_twice":
        assert found.status == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"authorization", b"Bearer x"),
        (b"content-encoding", b"identity"),
        (b"content-length", b"5"),
        (b"content-type", b"application/json"),
        (b"expect", b"100-continue"),
        (b"idempotency-key", b"a"),
        (b"origin", b"https://a"),
        (b"sec-fetch-site", b"none"),
        (b"transfer-encoding", b"chunked"),
        (b"x-request-id", b"a"),
        (b"x-session-id", b"a"),
    ],
)
def test_a_header_that_decides_about_a_request_stands_once(name: bytes, value: bytes):
    head = [(b"host", b"a"), (name, value)]
    assert find_problem("1.1", head) is None
    assert find_problem("1.1", [*head, (name, value)]) == build_repeated_header_problem(name)


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        (
            [
                (b"host", b"a"),
                (b"connection", b"Upgrade, HTTP2-Settings"),
                (b"upgrade", b"h2c"),
                (b"http2-settings", b"AAMA"),
            ],
            b"host: a\r\n",
        ),
        (
            [(b"connection", b"keep-alive, Upgrade,"), (b"host", b"a"), (b"connection", b"x")],
            b"host: a\r\nconnection: keep-alive, x\r\n",
        ),
        ([(b"accept", b"a, upgrade")], b"accept: a, upgrade\r\n"),
    ],
)
def test_a_head_without_its_upgrade_is_otherwise_as_it_was(headers: list[Header], kept: bytes):
    assert serialize_without_upgrade(b"GET", b"/x?y", "1.1", headers) == b"GET /x?y HTTP/1.1\r\n" + kept + b"\r\n"
