"""Tells one address of the owner's what began and what ended: a POST of JSON for each, with bounded retries.

Rules
- HTTPS to anywhere but link-local addresses (there live the secrets of cloud machines), plain HTTP to loopback alone.
  No user names in the URL, no odd characters: one parser reads it, and nothing is left for another to read otherwise.
- A name is resolved once for each attempt, every address that it has must be allowed, and the connection goes to the
  one that was looked at. Redirects are not followed.
- The path of a webhook is often its password: only the host is ever logged. Nothing is sent but what a condition says.
- The world may be slow: one message at a time, RETRIES attempts each, at most WAITING that wait; the oldest is dropped.
"""

import asyncio
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

SECONDS = 5.0
"""Longest wait for a connection, and then for an answer."""
RETRIES = 4
FIRST_WAIT = 2.0
"""Seconds before the second attempt; doubled for each further one."""
WAITING = 64
_PLAIN = re.compile(r"[!-\[\]-~]+")
"""What a URL may be written with: printable ASCII without space and backslash."""

METADATA = tuple(map(ipaddress.ip_network, (
    "169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.0/24", "fd00:ec2::/32", "fd20:ce::/32",
    "fe80::/10",
)))  # fmt: skip
"""Where clouds serve a machine's own secrets: AWS, Azure, Google and others, Alibaba, Azure's host, Oracle, and over
IPv6 AWS and Google."""
TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48")))
"""NAT64 (RFC 6052, RFC 8215): the last 32 bits are the IPv4 address that is reached."""
ISATAP = 0x5EFE
"""In the third quarter of an IPv6 address, with or without the global bit: the last 32 bits are an IPv4 address."""

log = structlog.get_logger("coordinator.webhook")
Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]


class WebhookError(ValueError):
    """An address that nothing is sent to; the text says why, without its path."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where messages go."""

    tls: bool
    host: str
    port: int
    path: str


def parse(url: str) -> Address:
    """Read the setting; WebhookError when it is no address that may be told."""
    if not _PLAIN.fullmatch(url):
        raise WebhookError("conditions.webhook has characters that no URL has")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise WebhookError("conditions.webhook is no URL") from None
    host = parts.hostname
    if parts.scheme not in ("https", "http") or not host or "@" in parts.netloc:
        raise WebhookError("conditions.webhook is https://HOST/PATH, without user names")
    if parts.scheme == "http" and not _literal_loopback(host):
        raise WebhookError("conditions.webhook is HTTPS, or plain HTTP to 127.0.0.1: what is told is nobody else's")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme == "https", host, port or (443 if parts.scheme == "https" else 80), path)


def _literal_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the system for the addresses of a host. OSError when it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def allowed(address: Address, found: Sequence[str]) -> str:
    """Give the one of a host's addresses to connect to; WebhookError when any of them is out of bounds."""
    for text in found:
        for one in reached(text.partition("%")[0]):
            if is_forbidden(one):
                raise WebhookError(f"{address.host} is at {one}, to which nothing is sent")
            if not address.tls and not one.is_loopback:
                raise WebhookError(f"{address.host} is at {one}, which is not this machine")
    if not found:
        raise WebhookError(f"{address.host} has no address")
    return found[0]


def is_forbidden(one: Ip) -> bool:
    """Return whether nothing is sent to an address: it serves a cloud machine's secrets, or is no host's, as `::/8`
    with the IPv4 addresses that it once embedded."""
    if one.is_loopback:
        return False
    bare = one.is_multicast or one.is_unspecified or one.is_reserved
    return bare or any(one in network for network in METADATA)


def reached(text: str) -> Sequence[Ip]:
    """Return the addresses that a packet to this one may reach: itself, or the IPv4 ones that it wraps."""
    one = ipaddress.ip_address(text)
    if isinstance(one, ipaddress.IPv4Address):
        return [one]
    if one.ipv4_mapped is not None:
        return [one.ipv4_mapped]
    if one.sixtofour is not None:
        return [one.sixtofour]
    if one.teredo is not None:
        return list(one.teredo)
    number = int(one)
    if any(one in network for network in TRANSLATED) or (number >> 32) & 0xFDFFFFFF == ISATAP:
        return [ipaddress.IPv4Address(number & 0xFFFFFFFF)]
    return [one]


def post(address: Address, body: bytes, find: Resolve = resolve, trust: ssl.SSLContext | None = None) -> int:
    """Send one message; give the status of the answer. OSError or WebhookError when it did not get there."""
    where = allowed(address, find(address.host, address.port))
    connection = http.client.HTTPConnection(address.host, address.port, timeout=SECONDS)
    line = socket.create_connection((where, address.port), timeout=SECONDS)
    try:
        if address.tls:
            line = (trust or ssl.create_default_context()).wrap_socket(line, server_hostname=address.host)
        connection.sock = line
        headers = {"Content-Type": "application/json", "User-Agent": "macpool", "Connection": "close"}
        connection.request("POST", address.path, body, headers)
        return connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(f"its answer is no HTTP: {type(error).__name__}") from None
    finally:
        line.close()


class Webhook:
    """Sends what it is told of, in order. `send` gives a status for a body."""

    def __init__(self, address: Address, cluster: str, send: Callable[[Address, bytes], int] = post) -> None:
        self._address = address
        self._cluster = cluster
        self._send = send
        self._waiting: deque[bytes] = deque(maxlen=WAITING)
        self._more = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Number of messages that were not sent yet."""
        return len(self._waiting)

    def tell(self, condition: Condition, began: bool) -> None:
        """Send this soon."""
        message = {"schema": 1, "cluster": self._cluster, "event": "began" if began else "ended", **condition.row()}
        self._waiting.append(json.dumps(message).encode())
        self._more.set()

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                await self._deliver(self._waiting.popleft())

    async def _deliver(self, body: bytes) -> None:
        wait, why = FIRST_WAIT, ""
        for attempt in range(RETRIES):
            if attempt:
                await asyncio.sleep(wait)
                wait *= 2
            try:
                status = await asyncio.to_thread(self._send, self._address, body)
            except (OSError, WebhookError) as error:
                why = _reason(error)
                continue
            if 200 <= status < 300:
                return
            why = f"status {status}"
            if status < 500 and status != 429:
                break
        log.warning("webhook failed", host=self._address.host, reason=why)


def _reason(error: Exception) -> str:
    """Say what went wrong without what a library may quote of the URL."""
    return str(error) if isinstance(error, WebhookError) else type(error).__name__
