"""The state folder as the coordinator finds it at its start: store, authority, keys and who else may come in."""

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path

from coordinator.backup.generation_fence import Fence
from coordinator.joining.join_approvals import Approvals
from coordinator.joining.join_tokens import Tokens
from coordinator.observe.event_log import Events
from coordinator.state.access_admin import Admin, load_pepper
from coordinator.state.database import Store
from coordinator.state.settings import ClusterSettings, HttpSettings
from coordinator.tls.cluster_ca import Authority
from coordinator.tls.https_config import check_http
from host.log_setup import open_journal
from host.private_files import private_folder
from router.admission.api_keys import KeyRing, nobody_known

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Home:
    """What the state folder holds, and what its log tells. `first`: there was no cluster before; `epoch` counts our
    starts."""

    state: Path
    log_file: Path
    events: Events
    store: Store
    authority: Authority
    fence: Fence
    first: bool
    epoch: int
    version: str


def open_home(folder: Path, cluster: ClusterSettings, stack: AsyncExitStack) -> Home:
    """Open the state folder and its log; SupersededError when another coordinator of this cluster counts."""
    state = private_folder(folder)
    log_file, events = state / "logs" / "coordinator.log", Events()
    open_journal(log_file, "info", events.tell)
    store = Store(state)
    stack.callback(store.close)
    first = store.meta.cluster == ""
    authority = Authority(state / "authority", time.time, cluster.certificate_days * DAY)
    if first:
        store.found(authority.cluster, cluster.name)
    guard = Fence(authority, store.meta.generation)
    guard.check(state)
    return Home(state, log_file, events, store, authority, guard, first, store.next_epoch(), installed("macpool"))


@dataclass(frozen=True, slots=True)
class Access:
    """Who may come in: machines by token or code, programs by key."""

    tokens: Tokens
    approvals: Approvals
    pepper: bytes
    ring: KeyRing
    admin: Admin


def open_access(home: Home, http: HttpSettings, listen: str) -> Access:
    """Read who may come in, by an endpoint that listens there. AuthorityError where its settings admit every client."""
    check_http(http, listen)
    tokens, approvals, pepper = Tokens(home.store, home.authority.ca, time.time), Approvals(), load_pepper(home.state)
    ring = KeyRing(pepper)
    if http.anonymous:
        ring.anonymous = nobody_known(time.time())
    admin = Admin(home.store, tokens, ring, pepper, time.time)
    admin.load()
    return Access(tokens, approvals, pepper, ring, admin)
