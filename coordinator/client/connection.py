"""Connection of a command to the coordinator: requests, bodies, and errors of the connection."""

import http.client
import json
import re
import socket
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from coordinator.client.errors import BLOCKED, PIN, TIMED_OUT, UNREACHABLE, CommandError

if TYPE_CHECKING:
    import ssl

PIECE_BYTES = 65_536
"""Maximum bytes of a body in one read."""
PROBE_SECONDS, MAX_LOST_PROBES = 15, 3
"""Keep-alive of a connection: seconds of silence before a probe, and unanswered probes that end the connection."""


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """Endpoint of the coordinator that a command uses, with credentials."""

    url: str
    """Base URL without a path."""
    key: str
    """API key, or the secret of `run.json` for a coordinator on this machine."""
    authority: str
    """CA of the endpoint's certificate (PEM), trusted in addition to the system's CAs; empty for only those."""


def parse_base_url(text: str) -> str:
    """Return the base URL of a coordinator: scheme, host and port. The scheme is `https` if the text has none.

    Raise `click.UsageError` if the text is not such a URL.
    """
    wrong = click.UsageError(f"{text!r} is not the URL of a coordinator: write http://HOST:PORT or https://HOST:PORT")
    try:
        parts = urlsplit(text if "//" in text else f"https://{text}")
        port = parts.port
        (parts.hostname or "").encode("idna")  # as a connection does
    except ValueError:
        raise wrong from None
    if parts.scheme in ("macpool", "cluster"):
        raise click.UsageError(f"{text} is the address for nodes; the URL of the API is the `endpoint` of `cluster up`")
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\x00-\x20\x7f]", parts.hostname):
        raise wrong
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


def _create_context(authority: str) -> "ssl.SSLContext":
    """Return a TLS context that trusts the system's authorities and the coordinator's own.

    Raise `CommandError` if `authority` is no certificate.
    """
    import ssl

    context = ssl.create_default_context()
    try:
        if authority:
            context.load_verify_locations(cadata=authority)
    except (ssl.SSLError, ValueError):
        text = "the stored authority of the coordinator is damaged: run `cluster login URL` or `cluster trust-ca` again"
        raise CommandError(PIN, text) from None
    return context


def send_request(
    reached: CoordinatorAddress, method: str, path: str, body: object = None, timeout: float = 30.0
) -> http.client.HTTPResponse:
    """Send a request to a coordinator and return the response, even with an error status.

    `body` is sent as JSON. `timeout` is in seconds, for the connection and each read. Raise `CommandError` if there is
    no response.
    """
    base, parts = reached.url, urlsplit(reached.url)
    if parts.scheme == "https":
        context = _create_context(reached.authority)
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    headers = {"Authorization": f"Bearer {reached.key}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    with convert_connection_errors(base, timeout):
        connection.connect()
        _watch_peer(connection.sock)
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()


def _watch_peer(connected: socket.socket) -> None:
    """Make the system end a connection within a minute after its peer fell silent, such as a machine without power.

    The timeout of a read does not do that for a followed log, which may have no new lines for hours.
    """
    idle = socket.TCP_KEEPALIVE if sys.platform == "darwin" else socket.TCP_KEEPIDLE
    connected.setsockopt(socket.IPPROTO_TCP, idle, PROBE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_LOST_PROBES)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def iterate_body(response: http.client.HTTPResponse, url: str, timeout: float) -> Iterator[bytes]:
    """Yield the body of a response from `url` as it arrives.

    `timeout`, that of the request in seconds, is used in error messages. Raise `CommandError` if the connection ends
    before the body.
    """
    while True:
        with convert_connection_errors(url, timeout):
            piece = response.read1(PIECE_BYTES)
            if not piece and response.length:  # `read1` reports no early end of a body whose length is known
                raise http.client.IncompleteRead(b"", response.length)
        if not piece:
            return
        yield piece


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a body, without line breaks."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


@contextmanager
def convert_connection_errors(base: str, timeout: float) -> Generator[None]:
    """Convert the errors of a connection to the URL `base` to `CommandError`.

    The exit code is `TIMED_OUT` if no answer arrived within `timeout` seconds. It is `UNREACHABLE` if an answer is
    incomplete or not HTTP. Any other error has the exit code of `explain_connection_error`.
    """
    try:
        yield
    except TimeoutError as error:
        if error.errno is not None:  # the system gave up, before the time of this program
            raise CommandError(*explain_connection_error(base, error)) from None
        raise CommandError(TIMED_OUT, f"{base} did not answer within {timeout:.0f} s") from None
    except OSError as error:
        raise CommandError(*explain_connection_error(base, error)) from None
    except http.client.IncompleteRead:
        text = f"{base} ended the connection before its answer was complete: repeat the command"
        raise CommandError(UNREACHABLE, text) from None
    except http.client.HTTPException:
        raise CommandError(UNREACHABLE, f"{base} does not answer as HTTP: use the `endpoint` of `cluster up`") from None


def explain_connection_error(base: str, error: OSError) -> tuple[int, str]:
    """Return the exit code and the message for a failed connection to the URL `base`.

    The code is `BLOCKED` for errno 65 on macOS, which means local network privacy and not a network fault. It is `PIN`
    for a certificate that this machine does not trust. It is `UNREACHABLE` for any other failure, including a
    certificate outside its validity.
    """
    if sys.platform == "darwin" and error.errno == 65:
        return BLOCKED, (
            f"macOS blocks this program from reaching {base} (local network privacy): run it from Terminal, or allow "
            "it under System Settings > Privacy & Security > Local Network"
        )
    if "certificate verify failed" in str(error):
        from wire.certificate import explain_wrong_clock

        if hint := explain_wrong_clock(error, time.time()):
            return UNREACHABLE, f"{base} cannot be reached: {getattr(error, 'verify_message', '')}{hint}"
        return PIN, (
            f"the certificate of {base} is not trusted by this machine: run `cluster trust-ca {base}` and compare the "
            "fingerprint with that of the coordinator"
        )
    return UNREACHABLE, f"{base} cannot be reached: {error.strerror or error}"
