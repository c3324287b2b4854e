"""Errors of the HTTP library in plain words, from real connections where a connection can cause them."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import httpx2
import pytest

from node.hub.download.connection_errors import describe_connection_error, find_cause


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], int]]:
    """Yield a function that starts a server and returns its port. The server sends bytes and closes the connection."""
    listeners: list[socket.socket] = []

    def start(sent: bytes) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(sent)

        threading.Thread(target=answer, daemon=True).start()
        return int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.close()


def fail(url: str, timeout: float = 10.0) -> httpx2.RequestError:
    with pytest.raises(httpx2.RequestError) as caught, httpx2.Client(trust_env=False, timeout=timeout) as client:
        client.get(url)
    return caught.value


def test_a_refused_connection_has_the_error_of_the_system():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert describe_connection_error(fail(f"http://127.0.0.1:{port}")) == "Connection refused"


def test_an_unknown_host_name_cannot_be_resolved():
    assert describe_connection_error(fail("http://no-such-host.invalid")) == "the host name cannot be resolved"


def test_a_server_without_tls_has_the_reason_of_tls(serve: Callable[[bytes], int]):
    text = describe_connection_error(fail(f"https://127.0.0.1:{serve(b'HTTP/1.1 400 Bad Request')}"))
    assert text.startswith("TLS failed: ")
    assert text == text[:4] + text[4:].lower(), "no constant of OpenSSL"


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", b"nonsense\r\n\r\n"])
def test_an_answer_that_is_cut_or_not_http_is_named(serve: Callable[[bytes], int], sent: bytes):
    text = describe_connection_error(fail(f"http://127.0.0.1:{serve(sent)}"))
    assert text == "it was closed before the end of the answer, or the answer is not HTTP"


def test_a_server_that_sends_nothing_has_no_data_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = fail(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)
    assert describe_connection_error(error) == "no data in time"


def test_kinds_without_a_cause_and_certificates_are_described():
    assert describe_connection_error(httpx2.ConnectTimeout("x")) == "no connection in time"
    assert describe_connection_error(httpx2.TooManyRedirects("secret")) == "TooManyRedirects"
    untrusted = ssl.SSLCertVerificationError(1, "secret")
    untrusted.verify_message = "self-signed certificate"
    error = httpx2.ConnectError("secret")
    error.__cause__ = untrusted
    assert describe_connection_error(error) == "its certificate is not trusted: self-signed certificate"


def test_find_cause_follows_causes_and_contexts():
    inner, middle, outer = OSError("inner"), ValueError("middle"), RuntimeError("outer")
    middle.__context__, outer.__cause__ = inner, middle
    assert (find_cause(outer, OSError), find_cause(outer, ValueError)) == (inner, middle)
    assert find_cause(outer, KeyError) is None
