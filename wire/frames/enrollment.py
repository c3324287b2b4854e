"""Frames of the enrollment of a node, which precede its certificate. Counterpart: `node.agent.enrollment`."""

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
    """Node → coordinator: request the certificate of the CA. First frame of an enrollment."""

    protocol: Natural
    """Protocol version of the node."""
    commitment: Blob = b""
    """Commitment to nonce and certificate request, if a person will compare short codes; else empty."""


class EnrollAuthority(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: certificate of the CA, and the cluster that the node would join."""

    ca: Blob
    """Certificate of the CA in DER. The node compares its SHA-256 with the pin of the token."""
    cluster: Word
    """Id of the cluster."""
    cluster_name: Word
    nonce: Blob = b""
    """Nonce of the coordinator for the short code."""


class Enroll(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator, over a connection verified with the CA: request a certificate.

    With a token, the frame has `token` and `mac`. Without a token, it has `opening`, and a person approves the short
    code. A former member sends `certificate` and `proof`.
    """

    csr: Blob
    """Certificate request in DER."""
    name: Word
    """Display name of the node."""
    machine: Word
    """Machine id."""
    hardware: Hardware
    token: Text = ""
    """Id of the join token; empty without one."""
    mac: Blob = b""
    """`wire.join_token.compute_request_mac` of `csr` under the key of the token; empty without a token."""
    opening: Blob = b""
    """Nonce to which `EnrollStart.commitment` committed; empty with a token."""
    certificate: Blob = b""
    """Earlier certificate of the machine in DER; empty without one."""
    proof: Blob = b""
    """Signature of `wire.join_token.build_rejoin_text` by the key of `certificate`; empty without a certificate."""


class EnrollPending(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: wait until a person approves the short code."""

    seconds: Seconds
    """Seconds after which the request expires."""


class Enrolled(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the certificate of the new node. Last frame of an enrollment."""

    node: Word
    """Id of the new node."""
    certificate: Blob
    """Certificate of the new node in DER."""
    cluster: Word
    """Id of the cluster."""


ENROLLMENT = frozenset({EnrollStart, Enroll})
"""Frames that a peer without a certificate may send."""
