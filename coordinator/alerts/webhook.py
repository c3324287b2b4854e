"""Webhook for conditions: a POST with JSON at each start and end, with bounded retries.

HTTPS is allowed to any address except unspecified, multicast and reserved ones. HTTPS is also refused to
`METADATA_NETWORKS`, where clouds serve the secrets of a machine. Plain HTTP is allowed to loopback only. The URL has no
user name and no unusual characters, because two parsers could read them differently.

The host name is resolved once per attempt. Every address must be allowed, and the connection uses a checked address.
Redirects are not followed. The path of a webhook is often a secret: only the host is logged. A message contains
only the condition.

The receiver may be slow: one message is sent at a time, with `MAX_ATTEMPTS` attempts. At most `MAX_QUEUED_MESSAGES` are
queued. Beyond that the oldest is discarded.
"""

import asyncio
import errno
import http.client
import ipaddress
import json
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog

from coordinator.alerts.evaluator import Condition

TIMEOUT_SECONDS = 5.0
"""Timeout of the connection, and of each read and write on it, in seconds."""
MAX_ATTEMPTS = 4
"""Maximum attempts to send a message."""
FIRST_RETRY_SECONDS = 2.0
"""Seconds before the second attempt; doubled for each further attempt."""
MAX_QUEUED_MESSAGES = 64
"""Maximum queued messages; the message that is being sent is not counted."""
_PLAIN = re.compile(r"[!-\[\]-~]+")
"""Allowed characters of a URL: printable ASCII without space and backslash."""

METADATA_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",
            "100.100.100.200/32",
            "168.63.129.16/32",
            "192.0.0.0/24",
            "fd00:ec2::/32",
            "fd20:ce::/32",
            "fe80::/10",
        ),
    )
)
"""Networks where clouds serve a machine's secrets, and the link-local network of IPv6.

In order: AWS, Azure, Google and other clouds; Alibaba; the host of Azure; Oracle; AWS over IPv6; Google over IPv6; IPv6
link-local.
"""
NAT64_NETWORKS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48")))
"""NAT64 (RFC 6052, RFC 8215): the last 32 bits are the destination's IPv4 address."""
ISATAP = 0x5EFE
"""Third 32-bit word of an ISATAP address (RFC 5214), without the universal bit. The last word is the IPv4 address."""

log = structlog.get_logger("coordinator.webhook")
Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]
"""Function that returns the IP addresses of a host for a port."""


class WebhookError(ValueError):
    """Raised if a webhook URL or an address is refused. The text has the reason, without the path of the URL."""


@dataclass(frozen=True, slots=True)
class WebhookAddress:
    """Destination of messages, parsed from the webhook URL.

    `tls` is whether to use HTTPS. `path` includes the query.
    """

    tls: bool
    host: str
    port: int
    path: str


def parse_webhook_url(url: str) -> WebhookAddress:
    """Parse the setting `alerts.webhook_url`. Raise `WebhookError` if the URL is invalid or not allowed.

    The host is not resolved: `select_address` checks its IP addresses when a message is sent.
    """
    if not _PLAIN.fullmatch(url):
        raise WebhookError("alerts.webhook_url contains characters that are not valid in a URL")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise WebhookError("alerts.webhook_url is not a valid URL") from None
    host = parts.hostname
    if parts.scheme not in ("https", "http") or not host or "@" in parts.netloc:
        raise WebhookError("alerts.webhook_url must have the form https://HOST/PATH, without a user name")
    if parts.scheme == "http" and not _is_literal_loopback(host):
        raise WebhookError("alerts.webhook_url must be HTTPS: plain HTTP is allowed to 127.0.0.1 only")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookAddress(parts.scheme == "https", host, port or (443 if parts.scheme == "https" else 80), path)


def _is_literal_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a host, without duplicates.

    Raise `OSError` if the name cannot be resolved, and `UnicodeError` if the host cannot be a DNS name.
    """
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def select_address(address: WebhookAddress, candidates: Sequence[str]) -> str:
    """Return the first of `candidates`, the IP addresses of the host of `address`, if all are allowed.

    Raise `WebhookError` if there are none, if any is forbidden, or without TLS if any is not loopback. Raise
    `ValueError` if a candidate is not an IP address.
    """
    for text in candidates:
        for destination in find_destinations(text.partition("%")[0]):
            if is_forbidden(destination):
                raise WebhookError(f"{address.host} resolves to {destination}, which is forbidden")
            if not address.tls and not destination.is_loopback:
                raise WebhookError(f"{address.host} resolves to {destination}, which is not this machine")
    if not candidates:
        raise WebhookError(f"{address.host} has no address")
    return candidates[0]


def is_forbidden(address: Ip) -> bool:
    """Return whether messages to an IP address are forbidden.

    Addresses that serve a cloud machine's secrets are forbidden, as are unspecified, multicast and reserved addresses.
    Loopback addresses are allowed.
    """
    if address.is_loopback:
        return False
    bare = address.is_multicast or address.is_unspecified or address.is_reserved
    return bare or any(address in network for network in METADATA_NETWORKS)


def find_destinations(text: str) -> Sequence[Ip]:
    """Return the possible destinations of a packet to an IP address: the address, or IPv4 addresses embedded in it.

    IPv4 addresses can be embedded in an IPv6 address that is mapped, or of 6to4, Teredo, NAT64 or ISATAP. Raise
    `ValueError` if the text is not an IP address.
    """
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return list(address.teredo)
    number = int(address)
    if any(address in network for network in NAT64_NETWORKS) or (number >> 32) & 0xFDFFFFFF == ISATAP:
        return [ipaddress.IPv4Address(number & 0xFFFFFFFF)]
    return [address]


class _ConnectedHttp(http.client.HTTPConnection):
    """HTTP connection over an open socket."""

    def __init__(self, address: WebhookAddress, line: socket.socket) -> None:
        super().__init__(address.host, address.port, timeout=TIMEOUT_SECONDS)
        self.sock = line


def post_message(
    address: WebhookAddress, body: bytes, resolve: Resolve = resolve_host, trust: ssl.SSLContext | None = None
) -> int:
    """Send one message as a POST and return the HTTP status of the answer.

    Block until the answer arrives, at most `TIMEOUT_SECONDS` for the connection and for each read. `resolve` returns
    the host's IP addresses. `trust` replaces the system's CAs; None uses the system's CAs. Raise the errors of
    `select_address`, `OSError` if no valid answer arrives, and `UnicodeError` if the host cannot be a DNS name.
    """
    where = select_address(address, resolve(address.host, address.port))
    line = socket.create_connection((where, address.port), timeout=TIMEOUT_SECONDS)
    try:
        if address.tls:
            line = (trust or ssl.create_default_context()).wrap_socket(line, server_hostname=address.host)
        connection = _ConnectedHttp(address, line)
        headers = {"Content-Type": "application/json", "User-Agent": "macpool", "Connection": "close"}
        connection.request("POST", address.path, body, headers)
        return connection.getresponse().status
    except http.client.HTTPException:
        raise OSError(errno.EPROTO, "the answer is not HTTP") from None
    finally:
        line.close()


class Webhook:
    """Sender of messages about conditions, in order, with a bounded queue and retries.

    `cluster` is the name of the cluster in the messages. `send` sends a body and returns the HTTP status. It raises
    `OSError`, `UnicodeError` or `WebhookError` for a failed attempt.
    """

    def __init__(
        self, address: WebhookAddress, cluster: str, send: Callable[[WebhookAddress, bytes], int] = post_message
    ) -> None:
        self._address = address
        self._cluster = cluster
        self._send = send
        self._queue: deque[bytes] = deque(maxlen=MAX_QUEUED_MESSAGES)
        self._more = asyncio.Event()

    @property
    def queued_messages(self) -> int:
        """Number of queued messages, excluding the message that is being sent."""
        return len(self._queue)

    def enqueue(self, condition: Condition, began: bool) -> None:
        """Enqueue a message about the start (`began`) or the end of a condition.

        If the queue is full, discard the oldest message.
        """
        message = {"schema": 1, "cluster": self._cluster, "event": "began" if began else "ended", **condition.to_row()}
        self._queue.append(json.dumps(message).encode())
        self._more.set()

    async def run(self) -> None:
        """Send queued messages until cancelled. A status of 200 to 299 means that a message was delivered.

        An attempt is repeated after an error, status 429, or a status of at least 500. The first wait is
        `FIRST_RETRY_SECONDS`, and each further wait is twice the last one. A message is logged and discarded after
        `MAX_ATTEMPTS` attempts, or after any other status.
        """
        while True:
            await self._more.wait()
            self._more.clear()
            while self._queue:
                await self._deliver_message(self._queue.popleft())

    async def _deliver_message(self, body: bytes) -> None:
        wait, why = FIRST_RETRY_SECONDS, ""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(wait)
                wait *= 2
            try:
                status = await asyncio.to_thread(self._send, self._address, body)
            except (OSError, UnicodeError, WebhookError) as error:
                why = _describe_error(error)
                continue
            if 200 <= status < 300:
                return
            why = f"status {status}"
            if status < 500 and status != 429:
                break
        log.warning("webhook failed", host=self._address.host, reason=why)


def _describe_error(error: Exception) -> str:
    """Return a description of an error without the URL, whose path may be a secret."""
    if isinstance(error, WebhookError):
        return str(error)
    if isinstance(error, UnicodeError):
        return "its host name is invalid"
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_SECONDS:g} s"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__
