"""Assembly of the coordinator's cluster side: construction and connection of its parts."""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.backup.generation_fence import GenerationFence, SupersededMark
from coordinator.cluster.links.link_admission import CoordinatorIdentity, LinkAdmission
from coordinator.cluster.links.link_server import LinkServer
from coordinator.cluster.links.link_table import LinkTable
from coordinator.cluster.links.member_queries import MemberQueries
from coordinator.cluster.links.node_fetches import NodeFetches
from coordinator.cluster.links.relay import RelayServer, RelayTransfers
from coordinator.cluster.member_authentication import MemberAuthentication
from coordinator.cluster.node_administration import NodeAdministration
from coordinator.cluster.node_directory import NodeDirectory
from coordinator.cluster.node_records import NodeRecords
from coordinator.cluster.registry import Registry, RegistryListener
from coordinator.cluster.store_barrier import StoreBarrier
from coordinator.joining.enrollment import EnrollmentContext, EnrollmentServer
from coordinator.joining.join_approvals import ApprovalQueue
from coordinator.joining.join_tokens import JoinTokens
from coordinator.joining.rate_limit import RateLimit
from coordinator.state.database import Database
from wire.state_machine import IllegalEventCounts


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """Means to reach nodes."""

    table: LinkTable
    """Open links, over which frames are sent."""
    fetches: NodeFetches
    """Fetches of logs, metrics and files from nodes."""
    transfers: RelayTransfers
    """Transfers of model files between nodes that the coordinator relays."""


def create_links() -> NodeLinks:
    """Return the table of links, the fetches and the relayed transfers of a coordinator, all empty."""
    table = LinkTable()
    return NodeLinks(table, NodeFetches(table.send), RelayTransfers())


@dataclass(frozen=True, slots=True)
class NodePool:
    """Members of the cluster with their links, newest reports and administration."""

    links: NodeLinks
    registry: Registry
    directory: NodeDirectory
    administration: NodeAdministration
    admission: LinkAdmission
    queries: MemberQueries
    server: LinkServer


def assemble_pool(
    store: Database,
    fence: GenerationFence,
    identity: CoordinatorIdentity,
    tokens: JoinTokens,
    approvals: ApprovalQueue,
    links: NodeLinks,
    listener: RegistryListener,
    illegal_events: IllegalEventCounts,
    *,
    wall: Callable[[], float],
    on_superseded: Callable[[SupersededMark], None],
    enrollment_limit: RateLimit | None = None,
) -> NodePool:
    """Construct the parts of the pool and connect them, without starting any. Call on a running event loop.

    `wall` returns Unix seconds. `on_superseded` is called when a node proves that another coordinator has a newer
    generation. `enrollment_limit` replaces the default rate limit of enrollments.
    """
    authentication, barrier = MemberAuthentication(store, fence.authority, wall), StoreBarrier(store.flush)
    records, table = NodeRecords(store), links.table
    registry = Registry(store, records, table, authentication, barrier, listener, illegal_events)
    admission = LinkAdmission(identity, fence, authentication, registry, records, table, on_superseded)
    queries = MemberQueries(authentication)
    relay = RelayServer(links.transfers, authentication)
    context = EnrollmentContext(
        identity.name, fence.authority, tokens, store, approvals, wall, registry.add_member, table.get_address
    )
    enrollments = EnrollmentServer(context, enrollment_limit)
    return NodePool(
        links=links,
        registry=registry,
        directory=NodeDirectory(registry, records, store),
        administration=NodeAdministration(store, registry, records, table, authentication),
        admission=admission,
        queries=queries,
        server=LinkServer(table, links.fetches, registry, admission, queries, relay, enrollments, barrier),
    )
