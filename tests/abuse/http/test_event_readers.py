"""Limits of clients that follow events, and of open pages: the next one gets a refusal with the number."""

import json
import socket
from contextlib import ExitStack

import pytest

from coordinator.observe.event_log import MAX_READERS
from coordinator.ui.live_stream import MAX_VIEWERS
from tests.support.cluster import whole_pool
from tests.support.cluster.whole_pool import Served, status


def build_request(served: Served, method: str, path: str) -> bytes:
    """Return a request with the administrator's key."""
    key = served.keys["admin"]
    return f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("path", "limit", "code", "message"),
    [
        ("/api/v1/events", MAX_READERS, "too_many_readers", "64 clients read the events"),
        ("/api/v1/live", MAX_VIEWERS, "too_many_viewers", "32 pages are open"),
    ],
)
def test_a_stream_above_the_limit_is_refused_with_the_number(path: str, limit: int, code: str, message: str):
    with whole_pool.served() as served, ExitStack() as streams:
        follow = build_request(served, "GET", f"{path}?follow=true")
        for _ in range(limit):
            client = streams.enter_context(socket.create_connection(served.address, timeout=20))
            client.sendall(follow)
            assert client.recv(12) == b"HTTP/1.1 200"
        (answer,) = served.ask(follow)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert status(answer) == 503
        assert b"retry-after: " in head.lower()
        error = json.loads(body)["error"]
        assert error["code"] == code
        assert error["message"].startswith(f"{message}, which is the limit: ")


def test_a_key_without_a_session_of_the_page_ends_none():
    with whole_pool.served() as served:
        (answer,) = served.ask(build_request(served, "DELETE", "/api/v1/page/visit"))
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (status(answer), error["code"]) == (404, "no_session")
        assert error["message"] == "this key belongs to no session of the page: no session was ended"
