"""Rows of the cluster's database: identity, members, join tokens, API keys, usage and audit log."""

from dataclasses import dataclass

from router.admission.rate_limits import KeyLimits
from router.admission.usage import UsageTotals
from wire.identity import NodeId
from wire.report import Hardware


@dataclass(frozen=True, slots=True)
class ClusterMeta:
    """Identity of the coordinator. Of two coordinators of one cluster, the one with the higher generation is valid."""

    cluster: str = ""
    """Id of the cluster; empty before the cluster is created."""
    name: str = ""
    """Display name of the cluster; empty before the cluster is created."""
    epoch: int = 0
    """Number of the coordinator's current start. A restore of a backup adds `restore.RESERVED_EPOCHS`."""
    generation: int = 0
    """Generation of the coordinator. Every restore of a backup raises it to at least the Unix time of the restore."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """Node that has joined the cluster. Times are in Unix seconds."""

    node: NodeId
    name: str
    """Display name of the node."""
    machine: str
    """Id of the machine on which the node runs."""
    hardware: Hardware
    serial: str
    """Serial (hex) of the node's newest certificate."""
    joined: float
    """Unix time in seconds at which the node joined last."""
    cordoned: bool = False
    """Whether an administrator has excluded the node from new requests."""
    removed: float | None = None
    """Unix time in seconds of the removal; None for a member."""
    labels: tuple[str, ...] = ()
    video: bool = False
    """Whether an administrator allows video jobs on the node."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Join token. `key` is the MAC key derived from its secret, and is itself secret. Times are in Unix seconds."""

    id: str
    key: bytes
    created: float
    expires: float
    uses_left: int
    """Number of nodes that can still join with the token."""
    name: str = ""
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class KeyRow:
    """API key without its secret. Times are in Unix seconds."""

    id: str
    name: str
    scopes: tuple[str, ...]
    """Scopes of the key, each of them `infer`, `admin` or `metrics`."""
    digest: bytes
    """Digest of the key's text (`router.admission.api_keys.compute_digest`)."""
    created: float
    expires: float | None = None
    """Unix time in seconds from which the key is not valid; None for a key without expiry."""
    limits: KeyLimits | None = None
    """Limits of the key; None if it has none."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of a model by an API key on one day."""

    key: str
    """Id of the API key."""
    model: str
    day: str
    """Day (UTC), such as `2026-01-31`."""
    used: UsageTotals


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Entry of the audit log: the action of an actor on a subject."""

    number: int
    at: float
    """Time of the action in Unix seconds."""
    actor: str
    """Id of a key; or `local`, `page`, `offline` or `node` (a node that joins)."""
    action: str
    subject: str
    address: str = ""
    """IP address of the actor; empty if unknown, for example for an action on this machine's files."""
