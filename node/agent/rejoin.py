"""What a node does with an identity that it has already, when somebody runs `cluster join` or `cluster leave` again.

Without a token the identity is used as it is, or its fault is told. With one, a person wants this machine in that
cluster: an identity that is a copy, damaged, or denied by the coordinator at the first word gives way to a new one; one
of another cluster does not, because its node would silently vanish there. A node that was removed while it ran stays
out: the token that it once joined with is no wish to be back.
"""

import hashlib
import hmac
from pathlib import Path

import structlog

from node.agent.identity import Identity, IdentityError, load_identity
from wire.identity import JoinToken

DENIED = frozenset({"removed", "cloned", "identity"})
"""Reasons with which a coordinator denies an identity for good."""
LEAVE_SECONDS = 30.0
"""Longest wait for the coordinator that a node wants to tell that it leaves."""

log = structlog.get_logger("node.agent.rejoin")


class OtherClusterError(Exception):
    """This machine is a node of another cluster than the one that it should join."""


def known(folder: Path, machine: str, token: JoinToken | None) -> Identity | None:
    """Give the identity to go on with; None where there is none, or a new one is to take its place. Raises
    IdentityError for one that cannot be used and no token replaces, OtherClusterError for one of another cluster."""
    try:
        found = load_identity(folder, machine)
    except IdentityError as error:
        if token is None:
            raise
        log.warning("identity given up", why=str(error))
        return None
    if found is not None and token is not None and not _same(found, token):
        raise OtherClusterError(
            f"this machine is a node of another cluster ({found.cluster}): `cluster leave` takes it out of that, then "
            "join again; or name another folder with --state"
        )
    return found


def _same(identity: Identity, token: JoinToken) -> bool:
    return hmac.compare_digest(hashlib.sha256(identity.ca).digest(), token.pin)
