"""The webhook for conditions: invalid addresses, addresses that are never contacted, order and retries of messages."""

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog

from coordinator.alerts import webhook
from coordinator.alerts.evaluator import Condition
from coordinator.alerts.rules import RULES
from coordinator.alerts.webhook import (
    Webhook,
    WebhookAddress,
    WebhookError,
    parse_webhook_url,
    post_message,
    select_address,
)
from coordinator.tls.https_ca import HttpsCa

SECRET = "canary-path-secret"
GUARD_OFF = Condition(next(rule for rule in RULES if rule.name == "GuardOff"), frozenset({("node", "studio")}), 5.0)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/x",
        "http://192.168.1.5/x",
        "http://localhost/x",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://169.254.169.254/latest",
        "http://[::ffff:10.0.0.1]/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "https://user:pw@example.com/",
        "https://user@example.com/",
        "https://exa\tmple.com/",
        "https://example.com\\@127.0.0.1/",
        "https://example.com/\r\nHost: x",
        "https://example.com/ x",
        "https://",
        "https:///x",
        "//example.com/x",
        "gopher://x/",
        "https://example.com:99999/",
        "https://\u24db.example/",
        "https://[fe80::1/",
        "example.com",
        "\0",
    ],
)
def test_parse_webhook_url_refuses_invalid_urls(url: str):
    with pytest.raises(WebhookError) as refused:
        parse_webhook_url(url)
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://ntfy.sh/topic", WebhookAddress(True, "ntfy.sh", 443, "/topic")),
        ("https://example.com:8443/a?b=c#d", WebhookAddress(True, "example.com", 8443, "/a?b=c")),
        ("http://127.0.0.1:8123/api", WebhookAddress(False, "127.0.0.1", 8123, "/api")),
        ("http://[::1]:80", WebhookAddress(False, "::1", 80, "/")),
        ("http://127.0.0.1", WebhookAddress(False, "127.0.0.1", 80, "/")),
    ],
)
def test_parse_webhook_url_returns_the_address(url: str, address: WebhookAddress):
    assert parse_webhook_url(url) == address


@pytest.mark.parametrize(
    ("tls", "found"),
    [
        (True, ["169.254.169.254"]),
        (True, ["93.184.216.34", "169.254.1.1"]),
        (True, ["fe80::1%eth0"]),
        (True, ["::ffff:169.254.169.254"]),
        (True, ["224.0.0.1"]),
        (True, ["0.0.0.0"]),
        (True, ["2002:a9fe:a9fe::1"]),
        (True, []),
        (False, ["10.0.0.5"]),
        (False, ["127.0.0.1", "93.184.216.34"]),
    ],
)
def test_nothing_is_sent_out_of_bounds(tls: bool, found: list[str]):
    with pytest.raises(WebhookError):
        select_address(WebhookAddress(tls, "example.com", 443, "/"), found)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "169.254.170.2",
        "169.254.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fe80::a9fe:a9fe",
        "::ffff:169.254.169.254",
        "::ffff:100.100.100.200",
        "::169.254.169.254",
        "64:ff9b::169.254.169.254",
        "64:ff9b::100.100.100.200",
        "64:ff9b:1::169.254.169.254",
        "2002:a9fe:a9fe::1",
        "2002:6464:64c8::",
        "2001:0:a9fe:a9fe::1",
        "2001:db8::5efe:169.254.169.254",
        "2001:0:1:1:0:0:5601:5601",
        "2001:db8::200:5efe:169.254.169.254",
        "::",
        "0.0.0.0",
        "ff02::1",
        "240.0.0.1",
    ],
)
def test_no_metadata_address_is_reached_however_it_is_wrapped(host: str):
    with pytest.raises(WebhookError):
        select_address(WebhookAddress(True, "example.com", 443, "/"), ["93.184.216.34", host])


@pytest.mark.parametrize(
    "host",
    [
        "93.184.216.34",
        "192.168.1.9",
        "10.0.0.1",
        "100.64.0.7",
        "127.0.0.1",
        "::1",
        "2606:2800:220:1::1",
        "fd12:3456::1",
        "64:ff9b::93.184.216.34",
        "::ffff:192.168.1.9",
    ],
)
def test_addresses_of_homes_and_of_the_internet_are_reached(host: str):
    assert select_address(WebhookAddress(True, "example.com", 443, "/"), [host]) == host


def test_a_name_is_resolved_once_and_redirects_are_not_followed():
    asked: list[str] = []

    def find(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    with receiver(302) as (address, got):
        named = WebhookAddress(False, "localhost", address.port, address.path)
        assert post_message(named, b"{}", find) == 302
    assert (asked, len(got)) == (["localhost"], 1)


def test_the_address_that_was_looked_at_is_the_one_that_is_used():
    assert (
        select_address(WebhookAddress(True, "example.com", 443, "/"), ["192.168.1.9", "93.184.216.34"]) == "192.168.1.9"
    )


# a real server


class Receiver(BaseHTTPRequestHandler):
    statuses: list[int]
    got: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, json.loads(body)))
        status = self.statuses.pop(0) if self.statuses else 204
        self.send_response(status)
        if status == 302:
            self.send_header("location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Suppress the traceback of a client that disconnected."""


@contextmanager
def receiver(
    *statuses: int, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[WebhookAddress, list[tuple[str, dict[str, Any]]]]]:
    got: list[tuple[str, dict[str, Any]]] = []
    kind = type("One", (Receiver,), {"statuses": list(statuses), "got": got})
    server = Server(("127.0.0.1", 0), kind)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield parse_webhook_url(f"http://127.0.0.1:{server.server_address[1]}/{SECRET}"), got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def send_begin_and_end(address: WebhookAddress, count: int, got: list[Any]) -> None:
    one = Webhook(address, "home")
    running = asyncio.create_task(one.run())
    one.enqueue(GUARD_OFF, True)
    one.enqueue(GUARD_OFF, False)
    async with asyncio.timeout(20):
        while len(got) < count:  # noqa: ASYNC110  the server is in another thread
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "FIRST_RETRY_SECONDS", 0.01)


async def test_webhook_sends_begins_and_ends_in_order():
    with receiver() as (address, got):
        await send_begin_and_end(address, 2, got)
    assert [path for path, _ in got] == [f"/{SECRET}"] * 2
    assert [message["event"] for _, message in got] == ["began", "ended"]
    assert got[0][1] == {"schema": 1, "cluster": "home", "event": "began", **GUARD_OFF.to_row()}


async def test_webhook_retries_temporary_failures_only():
    with receiver(503, 429, 204, 400, 204) as (address, got):
        await send_begin_and_end(address, 4, got)
    assert [message["event"] for _, message in got] == ["began", "began", "began", "ended"]


async def test_a_redirect_is_not_followed():
    with receiver(302, 302, 302) as (address, got):
        await send_begin_and_end(address, 2, got)
    assert {path for path, _ in got} == {f"/{SECRET}"}


async def test_attempts_are_bounded_and_the_path_is_in_no_log():
    asked: list[bytes] = []

    def broken(_: WebhookAddress, body: bytes) -> int:
        asked.append(body)
        raise OSError(f"no way to https://example.com/{SECRET}")

    one = Webhook(WebhookAddress(True, "example.com", 443, f"/{SECRET}"), "home", broken)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(one.run())
        one.enqueue(GUARD_OFF, True)
        async with asyncio.timeout(20):
            while not logs:  # noqa: ASYNC110  a log tells nobody
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(asked) == webhook.MAX_ATTEMPTS
    assert SECRET not in repr(logs)
    assert logs[0]["host"] == "example.com"


async def attempts(answers: list[int | Exception]) -> tuple[int, list[dict[str, Any]]]:
    """Deliver one message to a server with these answers, then an accepting one; return attempts and log."""
    asked, over = list[bytes](), asyncio.Event()
    loop = asyncio.get_running_loop()

    def send(_: WebhookAddress, body: bytes) -> int:
        asked.append(body)
        if json.loads(body)["event"] == "ended":
            loop.call_soon_threadsafe(over.set)
            return 200
        answer = answers[len(asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    one = Webhook(WebhookAddress(True, "example.com", 443, "/"), "home", send)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(one.run())
        one.enqueue(GUARD_OFF, True)
        one.enqueue(GUARD_OFF, False)
        await asyncio.wait_for(over.wait(), 20)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return len(asked) - 1, [dict(line) for line in logs]


@pytest.mark.parametrize(
    ("answers", "tried", "reason"),
    [
        ([200], 1, ""),
        ([299], 1, ""),
        ([300], 1, "status 300"),
        ([199], 1, "status 199"),
        ([499], 1, "status 499"),
        ([500] * 4, 4, "status 500"),
        ([429] * 4, 4, "status 429"),
        ([500, 200], 2, ""),
        ([OSError(SECRET)] * 4, 4, "OSError"),
        ([ConnectionRefusedError(111, "Connection refused")] * 4, 4, "Connection refused"),
        ([TimeoutError(SECRET)] * 4, 4, "no answer within 5 s"),
        ([UnicodeError(SECRET)] * 4, 4, "its host name is invalid"),
        ([WebhookError("it has no address")] * 4, 4, "it has no address"),
    ],
)
async def test_webhook_status_decides_the_retry_and_is_logged(answers: list[int | Exception], tried: int, reason: str):
    count, logs = await attempts(answers)
    failed = {"event": "webhook failed", "log_level": "warning", "host": "example.com", "reason": reason}
    assert (count, logs) == (tried, [failed] if reason else [])


async def test_the_wait_before_each_further_attempt_is_twice_as_long(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    loop, wait = asyncio.get_running_loop(), asyncio.sleep

    async def sleep(seconds: float) -> None:
        """Record a wait on the loop of this test. Servers of other tests wait on the loops of their threads."""
        if asyncio.get_running_loop() is loop:
            waits.append(seconds)
        else:
            await wait(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await attempts([500] * 4)
    assert waits == [0.01, 0.02, 0.04]


async def test_a_flood_is_bounded():
    one = Webhook(WebhookAddress(True, "example.com", 443, "/"), "home", lambda *_: 204)
    for _ in range(1000):
        one.enqueue(GUARD_OFF, True)
    assert one.queued_messages == webhook.MAX_QUEUED_MESSAGES


def test_webhook_without_an_http_answer_fails():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            line, _ = server.accept()
            line.recv(4096)
            line.sendall(b"garbage\r\n\r\n")
            line.close()

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(OSError, match=r"\[Errno \d+\] the answer is not HTTP$"):
            post_message(WebhookAddress(False, "127.0.0.1", server.getsockname()[1], "/"), b"{}")
        thread.join()


def test_a_message_is_sent_over_tls_to_trusted_servers_only(tmp_path: Path):
    endpoint = HttpsCa(tmp_path, (), time.time, lambda: ())
    trust = ssl.create_default_context(cadata=endpoint.ca_pem)
    for given, statuses in ((trust, [200]), (None, [])):
        with receiver(200, tls=endpoint.context) as (address, got):
            secure = WebhookAddress(True, "localhost", address.port, "/")
            if statuses:
                assert post_message(secure, b"{}", lambda *_: ["127.0.0.1"], given) == 200
            else:
                with pytest.raises(ssl.SSLCertVerificationError):
                    post_message(secure, b"{}", lambda *_: ["127.0.0.1"], given)
            other = WebhookAddress(True, "hooks.example.com", address.port, "/")
            with pytest.raises(ssl.SSLCertVerificationError):  # the certificate has the address, but not the name
                post_message(other, b"{}", lambda *_: ["127.0.0.1"], given)
        assert len(got) == len(statuses)
