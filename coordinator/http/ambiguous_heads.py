"""Checks for request heads that are well-formed but ambiguous, or that use unsupported features.

The parser (llhttp) refuses invalid syntax. docs/decisions/0023-limits-at-the-edge.md lists these rules with their
reasons.
"""

import re
from collections.abc import Sequence

from router.errors import Header, Problem

SINGLE_HEADERS = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"idempotency-key",
        b"origin",
        b"sec-fetch-site",
        b"transfer-encoding",
        b"x-api-key",
        b"x-request-id",
        b"x-session-id",
    }
)
"""Headers that may occur at most once. A head that repeats one of them is refused with 400."""
_LENGTH = re.compile(rb"[0-9]{1,15}")
MALFORMED = Problem(400, "malformed_http", "this is not a valid HTTP request")
UNKNOWN_TRANSFER_CODING = Problem(
    501, "transfer_coding_unknown", "the only transfer coding here is chunked: use it, or a Content-Length"
)
UNMET_EXPECTATION = Problem(
    417, "expectation_failed", "the only expectation that is met here is 100-continue: leave Expect out"
)
ENCODED_BODY = Problem(
    415, "content_encoding_unknown", "request bodies are read as they are: send this one without Content-Encoding"
)


def build_repeated_header_problem(name: bytes) -> Problem:
    """Return the problem (400) for a header that occurs twice. `name` is in lower case."""
    return Problem(400, "header_twice", f"the header {name.decode('latin-1')} stands twice: send it once")


def find_problem(version: str, headers: Sequence[Header]) -> Problem | None:
    """Return the problem of a head; None if it is accepted.

    `version` is `1.0` or `1.1`. Header names are in lower case.
    """
    names: set[bytes] = set()
    for name, value in headers:
        if name not in SINGLE_HEADERS:
            continue
        if name in names:
            return build_repeated_header_problem(name)
        names.add(name)
        if name == b"content-length" and not _LENGTH.fullmatch(value):
            return MALFORMED
        if name == b"transfer-encoding" and version == "1.0":
            return MALFORMED
        if name == b"transfer-encoding" and value.lower() != b"chunked":
            return UNKNOWN_TRANSFER_CODING
        if name == b"expect" and value.lower() != b"100-continue":
            return UNMET_EXPECTATION
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            return ENCODED_BODY
    return MALFORMED if b"host" not in names and version != "1.0" else None


def serialize_without_upgrade(method: bytes, target: bytes, version: str, headers: Sequence[Header]) -> bytes:
    """Serialize a head without its offer to change the protocol, which is not supported here (RFC 9110, 7.8).

    Header names are in lower case. `version` is the HTTP version, such as `1.1`. The result includes the
    empty line at the end.
    """
    remaining = [(name, value) for name, value in headers if name not in (b"connection", b"upgrade", b"http2-settings")]
    options = [option.strip() for name, value in headers if name == b"connection" for option in value.split(b",")]
    options = [option for option in options if option.lower() not in (b"upgrade", b"http2-settings", b"")]
    if options:
        remaining.append((b"connection", b", ".join(options)))
    lines = [b"%s %s HTTP/%s" % (method, target, version.encode()), *(b"%s: %s" % header for header in remaining)]
    return b"\r\n".join(lines) + b"\r\n\r\n"
