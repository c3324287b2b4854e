"""Permission to link: protocol, generation of the cluster, certificate, and one process per identity."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from coordinator.backup.generation_fence import GenerationFence, SupersededMark
from coordinator.cluster.links.link_table import LinkTable
from coordinator.cluster.member_authentication import MemberAuthentication
from coordinator.cluster.node_records import NodeRecords
from coordinator.cluster.registry import Registry
from wire.bonjour_record import sanitize_text
from wire.frames import Denied, Hello, Welcome
from wire.identity import OLDEST_PROTOCOL, PROTOCOL, NodeId, PeerIdentity

log = structlog.get_logger("coordinator.cluster.links.link_admission")
ALIVE_REPORT_AGE_SECONDS = 3.0
"""Maximum age of the newest report, in seconds, with which the link of a node counts as alive.

While it is alive, a second process with the identity of that node is refused, and may retry after this time.
"""


@dataclass(frozen=True, slots=True)
class CoordinatorIdentity:
    """Facts about the coordinator that every Welcome contains."""

    name: str
    """Display name of the cluster."""
    version: str
    """Version of Macpool that the coordinator runs."""
    epoch: int
    """Number of this start, higher than the number of every earlier start."""


class LinkAdmission:
    """Check whether a node may link.

    `on_superseded` is called when a node proves that another coordinator of this cluster has a newer generation.
    """

    def __init__(
        self,
        identity: CoordinatorIdentity,
        fence: GenerationFence,
        authentication: MemberAuthentication,
        registry: Registry,
        records: NodeRecords,
        links: LinkTable,
        on_superseded: Callable[[SupersededMark], None],
    ) -> None:
        self._identity = identity
        self._fence = fence
        self._seal = fence.authority.seal_generation(fence.generation)
        self._authentication = authentication
        self._registry = registry
        self._records = records
        self._links = links
        self._on_superseded = on_superseded
        self._loop = asyncio.get_running_loop()
        self._list_addresses: Callable[[], tuple[str, ...]] = tuple

    def set_address_source(self, list_addresses: Callable[[], tuple[str, ...]]) -> None:
        """Set the function that returns the coordinator's addresses (HOST:PORT) for each Welcome."""
        self._list_addresses = list_addresses

    def authorize(self, peer: PeerIdentity, serial: str, hello: Hello) -> Welcome | Denied:
        """Return `Welcome` if the node that sent `hello` may link, else `Denied` with the reason.

        `peer` and `serial` (hex) are identity and serial number of its certificate. If the certificate names the member
        in `hello`, record the member's software. Call `on_superseded` if the Hello proves a newer generation of the
        cluster.
        """
        if peer.node == hello.node and hello.node in self._registry.pool.members:
            self._records.record_software(NodeId(hello.node), hello)
        if not OLDEST_PROTOCOL <= hello.protocol <= PROTOCOL:
            older = "node" if hello.protocol < OLDEST_PROTOCOL else "coordinator"
            return Denied(
                "protocol",
                f"the node speaks protocol {hello.protocol}, the coordinator {OLDEST_PROTOCOL} to {PROTOCOL}: update "
                f"macpool on the {older}",
                final=True,
            )
        wall = self._authentication.wall
        if self._fence.is_newer(hello.generation, hello.seal):
            self._on_superseded(SupersededMark(hello.generation, hello.seal, sanitize_text(hello.name), wall()))
            return Denied(
                "superseded", "this coordinator is not the cluster's any more: a backup was restored elsewhere"
            )
        row = self._authentication.authenticate(peer, serial, hello.node, hello.machine)
        if isinstance(row, Denied):
            return row
        if self._is_linked_by_another(row.node, hello):
            address = self._links.get_address(row.node)
            log.warning("linked twice", node=row.node, name=row.name, address=address)
            return Denied(
                "linked_elsewhere",
                f"{row.name} is linked now by another process, from {address}: if its disk or "
                "state folder was copied, remove STATE/node on the copy, then join there with a new token and "
                "`--set node.machine=NAME`",
                retry_after=ALIVE_REPORT_AGE_SECONDS,
            )
        return Welcome(
            self._identity.epoch,
            self._fence.authority.cluster,
            self._identity.name,
            wall(),
            self._identity.version,
            self._list_addresses(),
            self._fence.generation,
            self._seal,
        )

    def _is_linked_by_another(self, node: NodeId, hello: Hello) -> bool:
        """Return whether another process with this node's identity is linked and reports.

        A restarted node has no link, and a node whose network broke has not reported within `ALIVE_REPORT_AGE_SECONDS`.
        """
        linked = self._links.get_hello(node)
        if linked is None or linked.instance == hello.instance:
            return False
        reported_at = self._records.get_reported_at(node)
        return self._loop.time() - (-math.inf if reported_at is None else reported_at) < ALIVE_REPORT_AGE_SECONDS
