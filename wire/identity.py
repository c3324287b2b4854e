"""Protocol version, valid names and ids, and cluster URIs.

The identity of a peer is the URI in the SAN of its certificate: `cluster://<cluster>/node/<node>` or
`cluster://<cluster>/coordinator`. It is never an address or a host name.
"""

import re
from dataclasses import dataclass
from typing import NewType

PROTOCOL = 1
"""Version of the protocol. History: 1 (2026-11-20), the first."""
OLDEST_PROTOCOL = 1
"""Oldest protocol version of a node that the coordinator accepts."""

SERVICE_TYPE = "_macpool._tcp.local."
"""Bonjour service type of Macpool."""

NodeId = NewType("NodeId", str)
"""Id of a node."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,61}[A-Za-z0-9._-])?")
_MODEL = re.compile(r"\w[\w ._:/@+()-]{0,199}")
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_URI = re.compile(r"cluster://([A-Za-z0-9-]{1,64})/(coordinator|node/([A-Za-z0-9-]{1,64}))")


def is_valid_name(name: str) -> bool:
    """Return whether a display name is safe in terminals, labels and DNS.

    Such a name has 1 to 63 ASCII letters, digits, spaces and ._-. The first character is a letter or digit, and the
    last one is not a space.
    """
    return _NAME.fullmatch(name) is not None


def is_valid_model(name: str) -> bool:
    """Return whether a model name has 1 to 200 letters, digits, spaces and ._:/@+()-.

    The first character is a letter, a digit or an underscore.
    """
    return _MODEL.fullmatch(name) is not None


def is_valid_id(text: str) -> bool:
    """Return whether a text is a valid cluster, node or machine id: 1 to 64 ASCII letters, digits and hyphens."""
    return _ID.fullmatch(text) is not None


def is_valid_request_id(text: str) -> bool:
    """Return whether a client's `x-request-id` can be used as request id: 1 to 64 ASCII letters, digits and ._-."""
    return _REQUEST_ID.fullmatch(text) is not None


def build_node_uri(cluster: str, node: NodeId) -> str:
    """Return the URI of a node for the SAN of its certificate. `cluster` is the id of the cluster."""
    return f"cluster://{cluster}/node/{node}"


def build_coordinator_uri(cluster: str) -> str:
    """Return the URI of the coordinator for the SAN of its certificate. `cluster` is the id of the cluster."""
    return f"cluster://{cluster}/coordinator"


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Identity of a peer, from its verified certificate."""

    cluster: str
    """Id of the cluster."""
    node: NodeId | None
    """Id of the node; None for the coordinator."""


def parse_uri(uri: str) -> PeerIdentity | None:
    """Parse a URI of a SAN. Return None for a URI that is not of a node or a coordinator."""
    match = _URI.fullmatch(uri)
    return PeerIdentity(match[1], NodeId(match[3]) if match[3] else None) if match else None
