"""HTTP client of one source of model files: the hub, or the mirror of another node.

Rules
- The client sends the token to the scheme, host and port of the source only, not to the target of a redirect elsewhere.
- Redirects from `https` must lead to `https`. A source with `http` may redirect to both.
- A mirror never opens its port again. After a refused connection, the mirror therefore counts as lost at once.
- The certificate of a mirror must be signed by the CA of the cluster and have the URI of the mirror's node. The client
  verifies that before it sends a request. The address is not checked, because addresses change. A mirror must not
  redirect.
- A relay reaches the mirror of a node through the coordinator. TLS ends at the coordinator, which verifies both nodes.
- Errors never contain a token or the query of a URL, which can be a signature.
"""

import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import quote

import httpx2

from node.hub.child_messages import ClusterFiles
from node.hub.download.connection_errors import describe_connection_error, find_cause
from node.hub.download.relay_transport import RelayTransport
from node.hub.download.retry_rules import compute_retry_after, find_range_fault
from node.hub.download.source_errors import SourceError, SourceFault, SourceLimited, SourcePending, SourceRefusal
from node.hub.errors import describe_refusal
from node.hub.relay_join import RelayRefusedError
from node.hub.serving.node_tls import NodeClientContext
from node.hub.serving.server import PENDING, RETRY_SECONDS
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile, ModelManifest, ModelSource, SourceKind

CONNECT_TIMEOUT_SECONDS = 10.0
READ_TIMEOUT_SECONDS = 30.0
MAX_REDIRECTS = 5
"""Maximum redirects that are followed for one range."""
USER_AGENT = "macpool"
RELAY_BASE = "http://relay"
"""Base URL of requests through the coordinator, whose connection has TLS of its own."""
_PORTS = {"http": 80, "https": 443}


class SourceClient:
    """Client of a source, which several threads may use at once.

    `connections` is the number of parallel requests; the client opens at most twice as many connections, because
    redirects lead to other hosts. The constructor raises `ValueError` if the address of the source cannot be used,
    `OSError` if the certificates of this node cannot be loaded.
    """

    def __init__(self, source: ModelSource, cluster: ClusterFiles, *, connections: int) -> None:
        self._source = source
        self._is_mirror = source.kind == SourceKind.MIRROR
        self._is_node = self._is_mirror or source.kind == SourceKind.RELAY
        self._relay_address = cluster.coordinator if source.kind == SourceKind.RELAY else ""
        url = RELAY_BASE if self._relay_address else source.url
        self._base = _parse_base(url, ("https",) if self._is_mirror else ("https", "http"))
        self._http = httpx2.Client(
            verify=NodeClientContext.create(cluster, source.node) if self._is_mirror else True,
            transport=RelayTransport(cluster, source.token) if self._relay_address else None,
            trust_env=not self._is_node,
            follow_redirects=False,
            timeout=httpx2.Timeout(READ_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS),
            limits=httpx2.Limits(max_connections=2 * connections, max_keepalive_connections=2 * connections),
        )

    @property
    def url(self) -> str:
        """Address of the source, for people."""
        if self._relay_address:
            return f"relay://{self._relay_address}"
        return f"{self._base.scheme}://{self._base.netloc.decode('ascii', 'replace')}"

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    @contextmanager
    def open_range(self, manifest: ModelManifest, file: ModelFile, start: int, end: int) -> Generator[Iterator[bytes]]:
        """Request the bytes of a file from `start` to before `end`, and yield an iterator over blocks of them.

        The iterator can end early, without an error. This call and the iterator raise `SourceError` for faults and
        refusals.
        """
        path = f"{manifest.repo}/resolve/{manifest.commit}/{quote(file.path)}"
        subject = f"{file.path} of {manifest.repo}"
        with self._convert_errors():
            response = self._send(path, subject, {"range": f"bytes={start}-{end - 1}"})
            try:
                skipped = self._check_answer(response, subject, start, end, file.size)
                yield self._read_blocks(response, subject, skipped, end - start)
            finally:
                response.close()

    def _send(self, path: str, subject: str, headers: Mapping[str, str]) -> httpx2.Response:
        url = self._base.join(path)
        for _ in range(MAX_REDIRECTS + 1):
            request = self._http.build_request("GET", url, headers={**headers, **self._build_headers(url)})
            response = self._http.send(request, stream=True)
            if response.status_code not in (301, 302, 303, 307, 308):
                return response
            response.close()
            url = self._follow(url, response.headers.get("location", ""), subject)
        raise SourceRefusal(ModelOrderCode.FAILED, f"{self.url} redirects {subject} more than {MAX_REDIRECTS} times")

    def _build_headers(self, url: httpx2.URL) -> dict[str, str]:
        headers = {"accept-encoding": "identity", "user-agent": USER_AGENT}
        if self._source.token and _get_origin(url) == _get_origin(self._base):
            headers["authorization"] = f"Bearer {self._source.token}"
        return headers

    def _follow(self, url: httpx2.URL, location: str, subject: str) -> httpx2.URL:
        """Return the address to which a redirect leads. Raise `SourceRefusal` if it must not be followed."""
        try:
            target = url.join(location)
        except (httpx2.InvalidURL, ValueError):
            raise SourceRefusal(
                ModelOrderCode.FAILED, f"{self.url} redirects {subject} to an invalid address"
            ) from None
        if self._is_node or not location or not is_allowed_redirect(url, target):
            raise SourceRefusal(
                ModelOrderCode.FAILED,
                f"{self.url} redirects {subject} to {target.scheme}://{target.host}, which is not allowed",
            )
        return target

    def _check_answer(self, response: httpx2.Response, subject: str, start: int, end: int, size: int) -> int:
        """Return the number of bytes before `start` in the body of an answer.

        Raise `SourceError` if its status is not a success, or its range or size contradicts the manifest.
        """
        status = response.status_code
        if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise self._build_refusal(response, subject, size)
        if status == HTTPStatus.PARTIAL_CONTENT:
            fault = find_range_fault(response.headers.get("content-range", ""), start, end, size)
            if fault:
                raise SourceRefusal(ModelOrderCode.CONTENT_MISMATCH, f"{self.url}: {subject}: {fault}")
            return 0
        sent = response.headers.get("content-length", str(size))
        if sent != str(size):
            raise SourceRefusal(
                ModelOrderCode.CONTENT_MISMATCH,
                f"{self.url}: {subject} has {sent[:20]} bytes there, and {size} in the manifest",
            )
        return start

    def _build_refusal(self, response: httpx2.Response, subject: str, size: int) -> SourceError:
        """Return the error for an answer without content."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return SourceRefusal(
                ModelOrderCode.CONTENT_MISMATCH,
                f"{self.url}: {subject} is shorter there than its {size} bytes in the manifest",
            )
        seconds = compute_retry_after(response.headers, time.time())
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return SourceLimited(f"{self.url} limits the rate of requests for {seconds:.0f} s", seconds)
        if status == HTTPStatus.SERVICE_UNAVAILABLE and code == PENDING:
            return SourcePending(f"{self.url} still downloads {subject}", seconds)
        moved = _get_origin(response.request.url) != _get_origin(self._base)
        refusal = None if moved else describe_refusal(status, code, subject, has_token=bool(self._source.token))
        if refusal is not None:
            return SourceRefusal(refusal.code, refusal.message)
        return SourceFault(f"{self.url} answered {status} for {subject}")

    def _read_blocks(self, response: httpx2.Response, subject: str, skipped: int, wanted: int) -> Iterator[bytes]:
        """Yield the blocks of a body: without its first `skipped` bytes, and at most `wanted` bytes.

        A body that is read to its end leaves its connection open for the next range. A node ends a body after a part
        of it if the node itself waits for the rest.
        """
        with self._convert_errors():
            blocks, size = self._iterate_body(response, subject), skipped + wanted
            for block in blocks:
                if skipped >= len(block):
                    skipped -= len(block)
                    continue
                used, skipped = block[skipped : skipped + wanted], 0
                wanted -= len(used)
                yield used
                if not wanted:
                    if response.headers.get("content-length") == str(size):
                        next(blocks, None)
                    return

    def _iterate_body(self, response: httpx2.Response, subject: str) -> Iterator[bytes]:
        """Yield the body. Raise `SourcePending` if it ends early, after a part of it, and the source is a node."""
        started = False
        try:
            for block in response.iter_raw():
                started = True
                yield block
        except (httpx2.RemoteProtocolError, httpx2.ReadError):
            if not started or not self._is_node:
                raise
            raise SourcePending(f"{self.url} still downloads {subject}", RETRY_SECONDS) from None

    @contextmanager
    def _convert_errors(self) -> Generator[None]:
        """Raise errors of the HTTP library as `SourceError`, without their texts (`describe_connection_error`)."""
        try:
            yield
        except httpx2.InvalidURL:
            raise SourceRefusal(ModelOrderCode.INVALID, "the address of the source is invalid") from None
        except httpx2.RequestError as error:
            refused = _find_certificate_error(error)
            if refused:
                text = f"{self.url} does not prove its identity: {refused}"
                raise SourceRefusal(ModelOrderCode.SOURCE_LOST, text) from None
            if self._is_mirror and find_cause(error, ConnectionRefusedError) is not None:
                raise SourceRefusal(ModelOrderCode.SOURCE_LOST, f"the mirror at {self.url} has ended") from None
            denied = find_cause(error, RelayRefusedError)
            if denied is not None and denied.is_final:
                raise SourceRefusal(ModelOrderCode.SOURCE_LOST, f"{self.url}: {denied}") from None
            why = describe_connection_error(error) if denied is None else str(denied)
            raise SourceFault(f"the connection to {self.url} failed: {why}") from None


def _parse_base(url: str, schemes: tuple[str, ...]) -> httpx2.URL:
    """Parse the address of a source. Raise `ValueError` if it is invalid or has another scheme."""
    try:
        base = httpx2.URL(url.rstrip("/") + "/")
    except httpx2.InvalidURL:
        raise ValueError("its address is invalid") from None
    if base.scheme not in schemes or not base.host:
        raise ValueError(f"its address must begin with {' or '.join(schemes)}")
    return base


def is_allowed_redirect(source: httpx2.URL, target: httpx2.URL) -> bool:
    """Return whether the client may follow a redirect: any redirect to HTTPS, or one from HTTP to HTTP."""
    return target.scheme == "https" or (target.scheme == "http" and source.scheme == "http")


def _get_origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


def _find_certificate_error(error: BaseException | None) -> str:
    """Return the text of the certificate error behind an error; empty if there is none."""
    cause = find_cause(error, ssl.SSLCertVerificationError)
    return "" if cause is None else str(cause)[:200]
