"""HTTP over connections through the coordinator, for a node that cannot connect to the mirror of another node."""

import http.client
import select
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import httpx2

from node.hub.child_messages import ClusterFiles
from node.hub.relay_join import open_relay

CONNECT_TIMEOUT_SECONDS = 10.0
READ_TIMEOUT_SECONDS = 30.0
READ_BYTES: Final = 256 * 1024
MAX_HEADER_LINE_BYTES = 16 * 1024


class _RelayConnection(http.client.HTTPConnection):
    """HTTP connection to the node that serves the transfer with this token."""

    def __init__(self, cluster: ClusterFiles, token: str) -> None:
        super().__init__("relay")
        self._cluster = cluster
        self._token = token

    def connect(self) -> None:
        """Open the connection through the coordinator, and set the timeout of its reads to `READ_TIMEOUT_SECONDS`.

        Raise `OSError` if the connection fails, takes more than `CONNECT_TIMEOUT_SECONDS` for one operation, or is
        refused. Raise `ValueError` for an invalid address or certificate.
        """
        self.sock = open_relay(self._cluster, self._token, CONNECT_TIMEOUT_SECONDS)
        self.sock.settimeout(READ_TIMEOUT_SECONDS)

    def is_reusable(self) -> bool:
        """Return whether the connection is open and silent, so that it can carry another request."""
        connection = self.sock
        return connection is not None and not select.select([connection], [], [], 0)[0]


class RelayTransport(httpx2.BaseTransport):
    """Transport of an HTTP client that reaches one node through the coordinator. The transport is thread-safe.

    `token` identifies the transfer. Idle connections are reused, until `close`.
    """

    def __init__(self, cluster: ClusterFiles, token: str) -> None:
        self._cluster = cluster
        self._token = token
        self._idle: list[_RelayConnection] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request without a body, and return the response, whose body is read by the caller.

        Raise `httpx2.ConnectError` or `httpx2.ReadError` if the connection fails.
        """
        connection = self._take()
        try:
            if connection.sock is None:
                connection.connect()
        except (OSError, ValueError) as error:
            raise httpx2.ConnectError(str(error), request=request) from error
        try:
            headers = {name.decode("ascii"): value.decode("ascii") for name, value in request.headers.raw}
            connection.request(request.method, request.url.raw_path.decode("ascii"), headers=headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise httpx2.ReadError(str(error), request=request) from error
        body = _RelayBody(answer, connection, self._idle, request)
        return httpx2.Response(answer.status, headers=answer.getheaders(), stream=body, request=request)

    def _take(self) -> _RelayConnection:
        with suppress(IndexError):  # none is left; another thread may have taken the last one
            while True:
                connection = self._idle.pop()
                if connection.is_reusable():
                    return connection
                connection.close()
        return _RelayConnection(self._cluster, self._token)

    def close(self) -> None:
        """Close the idle connections."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


class _RelayBody(httpx2.SyncByteStream):
    """Body of a response. A connection whose response was read to its end is reused."""

    def __init__(
        self,
        answer: http.client.HTTPResponse,
        connection: _RelayConnection,
        idle: list[_RelayConnection],
        request: httpx2.Request,
    ) -> None:
        self._answer = answer
        self._connection = connection
        self._idle = idle
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        try:
            while block := self._answer.read1(READ_BYTES):
                yield block
        except (OSError, http.client.HTTPException) as error:
            raise httpx2.ReadError(str(error), request=self._request) from error
        if self._answer.length:
            raise httpx2.ReadError(f"{self._answer.length} bytes are missing", request=self._request)

    def close(self) -> None:
        """Keep the connection for another request, or close it if bytes of the body are left."""
        if self._answer.length == 0 and not self._answer.will_close:
            self._answer.close()
            self._idle.append(self._connection)
        else:
            self._answer.close()
            self._connection.close()
