"""Start of the coordinator: opens the state folder with store, authority and log, and loads tokens and keys."""

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path

from coordinator.backup.generation_fence import GenerationFence
from coordinator.joining.join_approvals import Approvals
from coordinator.joining.join_tokens import JoinTokens
from coordinator.observe.event_log import EventLog
from coordinator.state.access_admin import AccessAdmin, load_pepper
from coordinator.state.database import Database
from coordinator.state.settings import ClusterSettings, HttpSettings
from coordinator.tls.cluster_ca import ClusterCa
from coordinator.tls.https_config import check_http
from host.log_setup import open_journal
from host.private_files import private_folder
from router.admission.api_keys import KeyRing, anonymous_key

DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """Open state folder of the coordinator."""

    state: Path
    log_file: Path
    events: EventLog
    store: Database
    authority: ClusterCa
    fence: GenerationFence
    first: bool
    """Whether the cluster is new."""
    epoch: int
    """Number of starts of the coordinator."""
    version: str


def open_state(folder: Path, cluster: ClusterSettings, stack: AsyncExitStack) -> CoordinatorState:
    """Open the state folder and its log. Raise `SupersededError` if another coordinator of this cluster has a newer
    generation."""
    state = private_folder(folder)
    log_file, events = state / "logs" / "coordinator.log", EventLog()
    open_journal(log_file, "info", events.add)
    store = Database(state)
    stack.callback(store.close)
    first = store.meta.cluster == ""
    authority = ClusterCa(state / "authority", time.time, cluster.certificate_days * DAY_SECONDS)
    if first:
        store.found(authority.cluster, cluster.name)
    guard = GenerationFence(authority, store.meta.generation)
    guard.check(state)
    return CoordinatorState(
        state, log_file, events, store, authority, guard, first, store.next_epoch(), installed("macpool")
    )


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials: join tokens and codes for machines, API keys for programs."""

    tokens: JoinTokens
    approvals: Approvals
    pepper: bytes
    ring: KeyRing
    admin: AccessAdmin


def open_access(state: CoordinatorState, http: HttpSettings, listen: str) -> Credentials:
    """Load the credentials for an endpoint at `listen`. Raise `AuthorityError` if the settings admit every client."""
    check_http(http, listen)
    tokens, approvals, pepper = (
        JoinTokens(state.store, state.authority.ca, time.time),
        Approvals(),
        load_pepper(state.state),
    )
    ring = KeyRing(pepper)
    if http.anonymous:
        ring.anonymous = anonymous_key(time.time())
    admin = AccessAdmin(state.store, tokens, ring, pepper, time.time)
    admin.load()
    return Credentials(tokens, approvals, pepper, ring, admin)
