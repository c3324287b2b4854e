"""Frames of the enrollment of a node: the only ones that are accepted from a peer without a certificate."""

from wire.bounds import (
    Blob,
    Natural,
    Seconds,
    Text,
    Word,
)
from wire.frames.frame import Frame
from wire.report import (
    Hardware,
)


class EnrollStart(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: request the CA."""

    protocol: Natural
    commitment: Blob = b""
    """Commitment to nonce and certificate request, if a person will compare short codes."""


class EnrollAuthority(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the CA."""

    ca: Blob
    """CA in DER; the node compares it with the pin of its token."""
    cluster: Word
    cluster_name: Word
    nonce: Blob = b""
    """Nonce of the coordinator for the short code."""


class Enroll(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator, over a connection verified with the CA: request a certificate.

    With a token, the frame has `token` and `mac`. Without one, it has `opening`, and a person approves the short code.
    A former member sends `certificate` and `proof`.
    """

    csr: Blob
    """Certificate request in DER."""
    name: Word
    machine: Word
    hardware: Hardware
    token: Text = ""
    mac: Blob = b""
    """`request_mac` of the request under the key of the token."""
    opening: Blob = b""
    """Nonce of the commitment."""
    certificate: Blob = b""
    """Earlier certificate of the machine in DER."""
    proof: Blob = b""
    """Signature of `rejoin_text` by the key of that certificate."""


class EnrollPending(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: wait until a person approves the short code."""

    seconds: Seconds
    """Time after which the request expires."""


class Enrolled(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the certificate."""

    node: Word
    """Id of the node."""
    certificate: Blob
    """Certificate in DER."""
    cluster: Word


ENROLLMENT = frozenset({EnrollStart, Enroll})
"""Frames that a peer without a certificate may send."""
