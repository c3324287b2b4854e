"""First steps of the coordinator's start: open the state folder (database, CA, log), and load tokens and API keys."""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path

from coordinator.backup.generation_fence import GenerationFence
from coordinator.joining.join_approvals import ApprovalQueue
from coordinator.joining.join_tokens import JoinTokens
from coordinator.observe.event_log import EventLog
from coordinator.state.access_admin import AccessAdmin, load_pepper
from coordinator.state.database import Database
from coordinator.state.settings import ClusterSettings, HttpSettings
from coordinator.tls.cluster_ca import ClusterCa
from coordinator.tls.https_config import check_http_settings
from host.log_setup import open_journal
from host.private_files import create_private_folder
from router.admission.api_keys import KeyRing, create_anonymous_key

DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """Open and locked state folder of the coordinator, with the objects that use its files."""

    state: Path
    """State folder of the coordinator."""
    log_file: Path
    events: EventLog
    """Newest events of the log, in memory."""
    store: Database
    authority: ClusterCa
    fence: GenerationFence
    needs_first_key: bool
    """Whether the cluster has never had an API key, so that this start must create and print one."""
    epoch: int
    """Number of this start, higher than the number of every earlier start."""
    version: str
    """Installed version of Macpool."""


def open_state(
    folder: Path, cluster: ClusterSettings, stack: AsyncExitStack, on_death: Callable[[], object]
) -> CoordinatorState:
    """Open the state folder and its log. In an empty folder, create a cluster. `stack` closes the database.

    Increment the epoch. The database's writer thread calls `on_death` if it cannot continue after an unexpected error.
    Raise `SupersededError` if another coordinator of this cluster has a newer generation. Raise `StoreError` if the
    database cannot be used, and `AuthorityError` if the CA cannot be read. Raise `OSError` if a file cannot be written.
    """
    state = create_private_folder(folder)
    log_file, events = state / "logs" / "coordinator.log", EventLog()
    open_journal(log_file, "info", events.add_event)
    store = Database(state, on_death)
    stack.callback(store.close)
    authority = ClusterCa(
        state / "authority",
        time.time,
        cluster.certificate_days * DAY_SECONDS,
        is_new_cluster=not store.meta.cluster,
    )
    if not store.meta.cluster:
        store.create_cluster(authority.cluster, cluster.name)
    guard = GenerationFence(authority, store.meta.generation)
    guard.check(state)
    return CoordinatorState(
        state,
        log_file,
        events,
        store,
        authority,
        guard,
        store.keys.was_empty,
        store.increment_epoch(),
        installed("macpool"),
    )


@dataclass(frozen=True, slots=True)
class Credentials:
    """Objects that check and administer credentials: join tokens and approvals for machines, API keys for programs."""

    tokens: JoinTokens
    approvals: ApprovalQueue
    """Requests to join that wait for a person's approval."""
    pepper: bytes
    """Secret for the digests of API keys."""
    ring: KeyRing
    """Valid API keys."""
    admin: AccessAdmin


def load_credentials(state: CoordinatorState, http: HttpSettings, listen: str) -> Credentials:
    """Load the credentials for an endpoint that listens on the host `listen`.

    Raise `AuthorityError` if the settings contradict each other, admit anonymous clients of other machines, or name
    certificate files that cannot be used. Raise `StoreError` if the pepper is lost, and `OSError` if it cannot be read
    or written.
    """
    check_http_settings(http, listen)
    tokens, approvals, pepper = (
        JoinTokens(state.store, state.authority.ca, time.time),
        ApprovalQueue(),
        load_pepper(state.state, len(state.store.keys)),
    )
    ring = KeyRing(pepper, anonymous=create_anonymous_key(time.time()) if http.anonymous else None)
    admin = AccessAdmin(state.store, tokens, ring, pepper, time.time)
    admin.load_keys()
    return Credentials(tokens, approvals, pepper, ring, admin)
