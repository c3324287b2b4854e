"""HTTP client of one upstream: connections, timeouts, and an error message for every failure.

TLS certificates are verified, redirects are not followed, and the environment sets no proxy and no credentials.
OpenSSL's `SSL_CERT_FILE` and `SSL_CERT_DIR` apply, but `SSLKEYLOGFILE` does not. The API key is sent only in the header
of requests. No log, error or representation of an object contains it.
"""

import asyncio
import os
import ssl
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx2
import msgspec

from host.private_files import resolve_home
from router.http.upstream.events import UpstreamStreamError, parse_object
from router.upstreams import UpstreamSettings

MAX_KEY_BYTES = 4096
MAX_ERROR_BYTES = 64 * 1024
MAX_REASON_CHARS = 300
"""Maximum characters of an upstream's message that are quoted in an error."""
MAX_CONNECTIONS = 64
REST_SECONDS = 1.0
"""Maximum seconds to receive the rest of an upstream's answer after the client has the complete answer."""
ABOUT_REQUEST = frozenset({400, 404, 413, 422})
"""Statuses for a fault of the request, for which the client gets the message of the upstream."""


class UpstreamError(Exception):
    """Raised if an upstream fails or refuses a request. The message names the upstream."""

    def __init__(
        self,
        message: str,
        outcome: str = "failed",
        status: int = 502,
        retry_after: float | None = None,
        *,
        is_fault: bool = True,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.outcome = outcome
        """Outcome for counters, one of `router.dispatch.counters.UPSTREAM_OUTCOMES`."""
        self.status = status
        """HTTP status of the answer to the client."""
        self.retry_after = retry_after
        """Seconds for the header Retry-After; None for no header."""
        self.is_fault = is_fault
        """Whether the circuit breaker of the upstream counts this error as a fault."""


class KeyFileError(Exception):
    """Raised if the file of an API key or of certificate authorities cannot be used. The message names the reason."""


def read_key_file(file: Path) -> str:
    """Return the API key in a file that only its owner can read, without surrounding white space.

    Raise `KeyFileError` if the file cannot be read, is not a regular file, or gives its group or other users a
    permission. Raise it also if the key is empty, is longer than `MAX_KEY_BYTES`, or has a character that is not
    printable ASCII or is a space.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise KeyFileError(f"{file} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise KeyFileError(f"{file} is not a file")
        if status.st_mode & 0o077:
            raise KeyFileError(f"other users may read {file}: run `chmod 600 {file}`")
        key = opened.read(MAX_KEY_BYTES + 1).strip()
    if not key or len(key) > MAX_KEY_BYTES or not all(33 <= byte < 127 for byte in key):
        raise KeyFileError(f"{file} does not have an API key on one line")
    return key.decode()


def create_clients(upstreams: Mapping[str, UpstreamSettings]) -> dict[str, "UpstreamClient"]:
    """Create and return the client of each upstream, by name.

    Raise `KeyFileError`, with the name of the setting, if the file of a key or of an authority cannot be used.
    """
    clients: dict[str, UpstreamClient] = {}
    for name, settings in upstreams.items():
        try:
            key = read_key_file(resolve_home(settings.key_file)) if settings.key_file else ""
            clients[name] = UpstreamClient(name, settings, key)
        except KeyFileError as error:
            raise KeyFileError(f"router.upstreams.{name}.key_file: {error}") from None
        except OSError as error:
            raise KeyFileError(f"router.upstreams.{name}.ca_file cannot be used: {error}") from None
    return clients


def create_tls_context(authority: str | None) -> ssl.SSLContext:
    """Return a TLS context that verifies the certificate of an upstream.

    `authority` is the path of a file with trusted authorities; None trusts those of the system. The context ignores
    `SSLKEYLOGFILE`, because the secrets in that file would decrypt recorded requests with the API key. Raise `OSError`
    if the file cannot be used.
    """
    context = ssl.create_default_context(cafile=authority)
    cast("Any", context).keylog_filename = None
    return context


async def _read_rest(received: AsyncIterator[bytes]) -> None:
    """Receive and discard the rest of an answer, which makes the connection available for another request.

    Stop without an error after `REST_SECONDS` or at a failure of the connection.
    """
    with suppress(TimeoutError, httpx2.HTTPError, httpx2.StreamError):
        async with asyncio.timeout(REST_SECONDS):
            async for _ in received:
                pass


class UpstreamClient:
    """HTTP client of the upstream `name`. `key` is the API key for that server; empty for none.

    The constructor raises `OSError` if `settings.ca_file` cannot be used.
    """

    def __init__(self, name: str, settings: UpstreamSettings, key: str = "") -> None:
        self.name = name
        self.settings = settings
        self._key = key
        headers = {"accept-encoding": "identity", "user-agent": "macpool"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        authority = str(resolve_home(settings.ca_file)) if settings.ca_file else None
        self._client = httpx2.AsyncClient(
            headers=headers,
            verify=create_tls_context(authority),
            proxy=settings.proxy or None,
            trust_env=False,
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=8),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def request(self, path: str, body: bytes, *, stream: bool) -> AsyncGenerator[AsyncIterator[bytes]]:
        """POST a body to a path below the base URL, and yield the bytes of the answer with status 200.

        `stream` selects the type of the answer: events, or one JSON object. At the end of the block, wait at most
        `REST_SECONDS` for bytes that were not read.

        Raise `UpstreamError` for any other status or type, for a compressed answer, and for every failure of the
        connection. Failures include `connect_seconds` without a connection or a free place, and `idle_seconds` without
        bytes. The latter limit is `total_seconds` unless `stream`.
        """
        settings = self.settings
        idle = settings.idle_seconds if stream else settings.total_seconds
        timeout = httpx2.Timeout(idle, connect=settings.connect_seconds, pool=settings.connect_seconds)
        try:
            async with self._client.stream(
                "POST",
                settings.url.rstrip("/") + path,
                content=body,
                headers={"content-type": "application/json"},
                timeout=timeout,
            ) as response:
                await self._check_response(response, stream=stream)
                received = response.aiter_raw()
                yield received
                await _read_rest(received)
        except httpx2.ConnectTimeout:
            text = f"did not accept a connection within {settings.connect_seconds:g} s"
            raise self.build_error(text) from None
        except httpx2.PoolTimeout:
            text = f"already has {MAX_CONNECTIONS} requests of this pool"
            raise self.build_error(text, "limited", 503, 1.0, is_fault=False) from None
        except httpx2.TimeoutException:
            raise self.build_error(f"sent nothing for {idle:g} s") from None
        except httpx2.ConnectError as error:
            raise self.build_error(f"cannot be reached: {self._clean(str(error)) or 'no connection'}") from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            reason = self._clean(str(error))
            raise self.build_error(f"broke the connection{reason and f': {reason}'}") from None

    def build_error(
        self,
        text: str,
        outcome: str = "failed",
        status: int = 502,
        retry_after: float | None = None,
        *,
        is_fault: bool = True,
    ) -> UpstreamError:
        """Return an error about this upstream, whose message is the name of the upstream followed by `text`.

        `outcome` is one of `counters.UPSTREAM_OUTCOMES`. `status` is the HTTP status of the answer to the client.
        `retry_after` is the value of its header Retry-After in seconds; None for no header. `is_fault` tells whether
        the error counts as a fault of the upstream.
        """
        return UpstreamError(f"the upstream {self.name} {text}", outcome, status, retry_after, is_fault=is_fault)

    async def _check_response(self, response: httpx2.Response, *, stream: bool) -> None:
        status = response.status_code
        if status != 200:
            raise await self._build_status_error(response)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        wanted = "text/event-stream" if stream else "application/json"
        if kind != wanted:
            raise self.build_error(f"answered with {self._clean(kind) or 'no content type'}, not {wanted}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise self.build_error("sent a compressed answer, which was not requested")

    async def _build_status_error(self, response: httpx2.Response) -> UpstreamError:
        status = response.status_code
        if status in (401, 403):
            return self.build_error(f"answered {status}: it refuses the key in its key_file")
        if status == 429:
            wait = response.headers.get("retry-after", "")
            seconds = float(wait) if wait.isascii() and wait.isdigit() and len(wait) < 6 else 1.0
            return self.build_error("answered 429: it takes no more requests now", "limited", 503, seconds)
        if 300 <= status < 400:
            return self.build_error(f"answered {status}: redirects are not followed")
        if status in ABOUT_REQUEST:
            reason = await self._read_reason(response)
            text = f"answered {status}{f': {reason}' if reason else ''}"
            return self.build_error(text, "refused", 400, is_fault=False)
        return self.build_error(f"answered {status}")

    async def _read_reason(self, response: httpx2.Response) -> str:
        """Return the message in an error answer of OpenAI's format; empty for an answer of any other format."""
        received = b""
        async for part in response.aiter_raw():
            received += part
            if len(received) > MAX_ERROR_BYTES:
                return ""
        try:
            message = parse_object(msgspec.json.encode(parse_object(received).get("error"))).get("message")
        except UpstreamStreamError:
            return ""
        return self._clean(message) if isinstance(message, str) else ""

    def _clean(self, text: str) -> str:
        """Return a text of the upstream as one printable line without the key, cut after `MAX_REASON_CHARS`."""
        hidden = text.replace(self._key, "(key)") if self._key else text
        line = " ".join(hidden.split())
        return "".join(character for character in line if character.isprintable())[:MAX_REASON_CHARS]
