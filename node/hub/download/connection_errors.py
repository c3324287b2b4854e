"""Describe errors of the HTTP library in plain words. Its own texts can quote headers and URLs, and are never used."""

import socket
import ssl
from typing import TypeVar

import httpx2

E = TypeVar("E", bound=BaseException)
_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (httpx2.ConnectTimeout, "no connection in time"),
    (httpx2.TimeoutException, "no data in time"),
    (httpx2.RemoteProtocolError, "it was closed before the end of the answer, or the answer is not HTTP"),
)


def describe_connection_error(error: Exception) -> str:
    """Return why a connection failed: the error of the system or of TLS behind `error`, or else the kind of `error`."""
    certificate = find_cause(error, ssl.SSLCertVerificationError)
    if certificate is not None:
        return f"its certificate is not trusted: {certificate.verify_message}"
    tls = find_cause(error, ssl.SSLError)
    if tls is not None:
        return f"TLS failed: {(tls.reason or 'unknown reason').replace('_', ' ').lower()}"
    if find_cause(error, socket.gaierror) is not None:
        return "the host name cannot be resolved"
    system = find_cause(error, OSError)
    if system is not None and system.strerror:
        return system.strerror
    return next((text for kind, text in _KINDS if isinstance(error, kind)), type(error).__name__)


def find_cause(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the first error of a kind among `error` and the errors behind it; None if there is none."""
    if error is None or isinstance(error, kind):
        return error
    return find_cause(error.__cause__ or error.__context__, kind)
