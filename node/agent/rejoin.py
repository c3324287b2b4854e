"""Decide whether `cluster join` or `cluster leave` uses the identity that a node already has.

Without a token the identity is used, or its error is reported. With a token, an identity that is copied, damaged, or
denied by the coordinator at the first frame is replaced. An identity of another cluster is not replaced, because that
cluster would lose the node without a goodbye. A node that was removed while it runs does not join again with the token
of its first join.
"""

import hashlib
import hmac
from pathlib import Path

import structlog

from node.agent.identity import IdentityError, NodeIdentity, load_identity
from wire.join_token import JoinToken

DENIED = frozenset({"removed", "cloned", "identity"})
"""Reasons for which a coordinator denies an identity for good."""
LEAVE_TIMEOUT_SECONDS = 30.0
"""Maximum seconds that a leaving node waits for the coordinator's Welcome, before it sends its goodbye."""

log = structlog.get_logger("node.agent.rejoin")


class OtherClusterError(Exception):
    """Raised if this machine is already a node of another cluster than the one to join."""


def load_known_identity(folder: Path, machine: str, token: JoinToken | None) -> NodeIdentity | None:
    """Return the identity stored in a folder; None if the machine must join first. `machine` is the machine id.

    With a token, an unusable identity is ignored with a log line. Without a token, raise the `IdentityError` that
    explains why the identity is unusable. Raise `OtherClusterError` if the identity belongs to another cluster than the
    token.
    """
    try:
        identity = load_identity(folder, machine)
    except IdentityError as error:
        if token is None:
            raise
        log.warning("identity discarded", why=str(error))
        return None
    if identity is not None and token is not None and not _is_same_cluster(identity, token):
        raise OtherClusterError(
            f"this machine is a node of another cluster ({identity.cluster}): run `cluster leave` and join "
            "again, or use another folder with --state"
        )
    return identity


def _is_same_cluster(identity: NodeIdentity, token: JoinToken) -> bool:
    return hmac.compare_digest(hashlib.sha256(identity.ca).digest(), token.pin)
