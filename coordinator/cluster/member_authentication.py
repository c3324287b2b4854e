"""Authentication of members by certificate and machine, renewal of certificates, and revocation of members."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from coordinator.tls.cluster_ca import ClusterCa
from wire.certificate import read_certificate
from wire.frames import Denied
from wire.identity import NodeId, PeerIdentity

log = structlog.get_logger("coordinator.cluster.member_authentication")


@dataclass(frozen=True, slots=True)
class MemberAuthentication:
    """Check of members' certificates against the stored members and revocations.

    `wall` returns Unix seconds.
    """

    store: Database
    authority: ClusterCa
    wall: Callable[[], float]

    def authenticate(self, peer: PeerIdentity, serial: str, node: str, machine: str) -> MemberRow | Denied:
        """Return the member with this certificate, or `Denied` with the reason.

        `peer` is the identity in the certificate, and `serial` its serial number in hex. `node` and `machine` are the
        ids that the node sent. Reasons: the certificate is that of another node or is revoked, the node is not a
        member, or the member is on another machine.
        """
        row = self.store.members.get(NodeId(node))
        if peer.node != node:
            return Denied("identity", "the node's name is not the one of its certificate", final=True)
        if row is None or row.removed is not None or self.store.deny_list.is_denied(row.node, serial):
            return Denied("removed", "this node was removed from the cluster: join again with a new token", final=True)
        if row.machine != machine:
            log.warning("cloned identity", node=row.node, name=row.name)
            return Denied(
                "cloned",
                f"this identity belongs to another machine ({row.name}): join again with a new token",
                final=True,
            )
        return row

    def renew_certificate(self, node: NodeId, csr: bytes) -> bytes:
        """Sign a member's request for a new certificate and store its serial number. Return the certificate.

        `csr` is the request in DER. The caller must send the certificate only after the change is on disk. Raise
        `CertificateRequestError` for an invalid request, `KeyError` for an unknown node, and `StoreError` after a
        failed write.
        """
        row = self.store.members[node]
        self.store.raise_failure()
        certificate = self.authority.sign_request(csr, node, row.name)
        self.store.members.put(replace(row, serial=read_certificate(certificate).serial))
        return certificate

    def revoke(self, node: NodeId, why: str) -> None:
        """Revoke a member: its certificates and its membership. `why` is stored with the revocation.

        Raise `KeyError` for an unknown node. Raise `StoreError` after a failed write; the revocation is then in effect,
        and its changes wait for the disk.
        """
        row, now = self.store.members[node], self.wall()
        try:
            self.store.deny_list.add_node(node, now, why)
        finally:
            self.store.members.put(replace(row, removed=now))
