"""Connections that break: each is a clear error with its exit code, also after the first bytes of a body."""

import errno
import json
import socket
import ssl
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from coordinator.client.api_client import ApiSession
from coordinator.client.connection import (
    CoordinatorAddress,
    convert_connection_errors,
    explain_connection_error,
    parse_base_url,
    send_request,
    split_lines,
)
from coordinator.client.errors import PIN, TIMED_OUT, UNREACHABLE, CommandError


@contextmanager
def serve(response: bytes, folder: Path) -> Generator[ApiSession]:
    """Answer one request with these bytes, and yield a session for it.

    After bytes that end with `wait` the connection stays open.
    """
    key = folder / "key"
    key.write_text("mp_key")
    answered = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(response)
                if response.endswith(b"wait"):
                    answered.wait(30)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield ApiSession(folder, f"http://127.0.0.1:{listening.getsockname()[1]}", key, "text")
        finally:
            answered.set()
            thread.join()


@pytest.mark.parametrize(
    ("response", "code", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", 3, "before its answer was complete"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", 3, "does not answer with JSON"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", 3, "does not answer as HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{} wait", 7, "did not answer within"),
    ],
)
def test_a_response_that_breaks_off_is_a_clear_error(tmp_path: Path, response: bytes, code: int, words: str):
    with serve(response, tmp_path) as session, pytest.raises(CommandError, match=words) as caught:
        session.request_json("GET", "/api/v1/keys", timeout=0.5)
    assert caught.value.exit_code == code


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"Content-Length: 9\r\n\r\none\ntwo", 3, "before its answer was complete"),
        (b"Transfer-Encoding: chunked\r\n\r\n7\r\none\ntwo\r\n", 3, "before its answer was complete"),
        (b"Transfer-Encoding: chunked\r\n\r\n9\r\none\ntwo", 3, "before its answer was complete"),
        (b"Content-Length: 20\r\n\r\none\ntwo wait", 7, "did not answer within"),
    ],
)
def test_a_stream_that_breaks_off_is_a_clear_error_after_its_beginning(
    tmp_path: Path, body: bytes, code: int, words: str
):
    found = b""
    with serve(b"HTTP/1.1 200 OK\r\n" + body, tmp_path) as session:
        pieces = session.stream("/api/v1/logs", timeout=0.5)

        def read() -> None:
            nonlocal found
            for piece in pieces:
                found += piece

        with pytest.raises(CommandError, match=words) as caught:
            read()
    assert caught.value.exit_code == code
    assert found.startswith(b"one\ntwo")


def test_a_stream_is_read_to_its_end(tmp_path: Path):
    with serve(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\none\ntwo\n!", tmp_path) as session:
        assert list(split_lines(session.stream("/api/v1/events"))) == [b"one", b"two", b"!"]


def test_a_stream_with_an_error_status_raises_its_message(tmp_path: Path):
    response = b'HTTP/1.1 404 Not Found\r\nContent-Length: 37\r\n\r\n{"error": {"message": "no such node"}}'
    with serve(response, tmp_path) as session, pytest.raises(CommandError, match="no such node") as caught:
        list(session.stream("/api/v1/nodes/x/logs"))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("https://studio.local:8080/v1", "https://studio.local:8080"),
        ("studio.local:8080", "https://studio.local:8080"),
        ("http://127.0.0.1", "http://127.0.0.1"),
        ("HTTP://user:word@10.0.0.1:80/x?y", "http://10.0.0.1:80"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("https://[fe80::1]", "https://[fe80::1]"),
    ],
)
def test_a_base_url_is_scheme_host_and_port(text: str, base: str):
    assert parse_base_url(text) == base


@pytest.mark.parametrize("text", ["http://Mac Studio:8080", "http://a\x7fb", "http://:8080", "ftp://a:1", "//a:1"])
def test_a_text_that_is_no_url_of_a_coordinator_is_refused(text: str):
    with pytest.raises(click.UsageError, match="is not the URL of a coordinator"):
        parse_base_url(text)


@pytest.mark.parametrize("text", ["macpool://studio.local:8081", "cluster://10.0.0.1:8081"])
def test_the_address_for_nodes_is_refused_with_the_next_step(text: str):
    with pytest.raises(
        click.UsageError, match=f"{text} is the address for nodes; the URL of the API is the `endpoint`"
    ):
        parse_base_url(text)


def test_a_damaged_authority_is_a_clear_error():
    with pytest.raises(CommandError, match="the stored authority of the coordinator is damaged") as caught:
        send_request(CoordinatorAddress("https://127.0.0.1:1", "k", "no certificate"), "GET", "/")
    assert caught.value.exit_code == PIN


@pytest.mark.parametrize("returns", [True, False])
def test_a_command_that_waits_continues_after_a_restart_of_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: bool
):
    monkeypatch.setattr("coordinator.client.api_client.RESTART_POLL_SECONDS", 0.001)
    (tmp_path / "key").write_text("mp_key")
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        listening.settimeout(20)
        session = ApiSession(tmp_path, f"http://127.0.0.1:{listening.getsockname()[1]}", tmp_path / "key", "text")
        polled = threads.submit(session.poll_json, "/api/v1/pulls/p-1", 60.0 if returns else 0.0)
        for response in (b"", b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"schema": 1}')[: 1 + returns]:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(response)
        if returns:
            assert polled.result() == {"schema": 1}
        else:
            with pytest.raises(CommandError, match="cannot be reached"):
                polled.result()


def test_a_command_that_waits_ends_with_a_refusal(tmp_path: Path):
    response = b'HTTP/1.1 404 Not Found\r\nContent-Length: 37\r\n\r\n{"error": {"message": "no such pull"}}'
    with serve(response, tmp_path) as session, pytest.raises(CommandError, match="no such pull") as caught:
        session.poll_json("/api/v1/pulls/p-1", 60.0)
    assert caught.value.exit_code == 5


def test_a_request_that_meets_a_restart_of_the_coordinator_uses_its_new_key(tmp_path: Path):
    """The request waits in the queue of the port until the new coordinator has written `run.json` and accepts."""
    run, keys = tmp_path / "run.json", list[bytes]()

    def accept(listening: socket.socket, response: bytes) -> None:
        connection, _ = listening.accept()
        with connection:
            keys.append(connection.recv(65_536).partition(b"Bearer ")[2].partition(b"\r")[0])
            run.write_text(json.dumps({"url": url, "secret": "mp_new"}))
            connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        listening.settimeout(20)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        run.write_text(json.dumps({"url": url, "secret": "mp_old"}))
        asked = threads.submit(ApiSession(tmp_path, None, None, "text").request_json, "GET", "/api/v1/keys")
        accept(listening, b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}")
        accept(listening, b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"schema": 1}')
        assert asked.result() == {"schema": 1}
    assert keys == [b"mp_old", b"mp_new"]


@pytest.mark.skipif(sys.platform != "linux", reason="the timers of connections are read from /proc")
def test_system_probes_the_coordinator_while_a_response_is_silent(tmp_path: Path):
    with serve(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{} wait", tmp_path) as session:
        response = send_request(session.select_coordinator(), "GET", "/api/v1/logs")
        port = int(session.get_url_and_key()[0].rpartition(":")[2])
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (timer,) = [row[5] for row in rows if row[3] == "01" and int(row[2].rpartition(":")[2], 16) == port]
        response.close()
    assert timer.startswith("02:"), "2 is the timer of keep-alive probes; the state 1 is an open connection"


def test_connection_that_the_system_ended_is_not_reachable():
    found = pytest.raises(CommandError, match=r"^http://mac:8080 cannot be reached: no route")
    with found as caught, convert_connection_errors("http://mac:8080", 86400.0):
        raise TimeoutError(errno.ETIMEDOUT, "no route")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("verified", "code", "words"),
    [
        (9, UNREACHABLE, "certificate is not yet valid (at "),
        (10, UNREACHABLE, "certificate has expired (at "),
        (19, PIN, "run `cluster trust-ca https://pool`"),
    ],
)
def test_a_certificate_outside_its_validity_is_no_other_certificate(verified: int, code: int, words: str):
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = verified, words.removesuffix(" (at ")
    found, text = explain_connection_error("https://pool", error)
    assert found == code
    assert words in text
    assert ("by the clock of this machine" in text) is (code == UNREACHABLE)


@pytest.mark.parametrize(("platform", "number", "code"), [("darwin", 65, 10), ("darwin", 61, 3), ("linux", 65, 3)])
def test_a_block_by_macos_has_its_own_code(monkeypatch: pytest.MonkeyPatch, platform: str, number: int, code: int):
    monkeypatch.setattr(sys, "platform", platform)
    found, text = explain_connection_error("http://studio:8080", OSError(number, "No route to host"))
    assert (found, "Privacy & Security > Local Network" in text) == (code, code == 10)


def test_a_timeout_names_the_seconds_that_the_command_waited():
    text = r"^http://studio:8080 did not answer within 7 s$"
    with pytest.raises(CommandError, match=text) as caught, convert_connection_errors("http://studio:8080", 7.0):
        raise TimeoutError
    assert caught.value.exit_code == TIMED_OUT
