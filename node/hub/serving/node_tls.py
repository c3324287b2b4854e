"""TLS contexts for connections between nodes. Both ends present a certificate that the CA of the cluster has signed.

The URI in the SAN identifies a node, and its address does not. The client checks this URI before it sends a request.
"""

import ssl
from pathlib import Path
from typing import Any

from node.hub.child_messages import ClusterFiles
from wire.certificate import read_certificate
from wire.identity import NodeId, build_coordinator_uri, build_node_uri


class _NodeContext(ssl.SSLContext):
    """TLS 1.3 with the certificate of this node. The other end must have a certificate of the cluster's CA."""

    def load(self, files: ClusterFiles) -> None:
        """Load the certificates. Raise `OSError`, `ValueError` or `ssl.SSLError` if they cannot be used."""
        self.minimum_version = ssl.TLSVersion.TLSv1_3
        self.check_hostname = False
        self.verify_mode = ssl.CERT_REQUIRED
        self.verify_flags |= ssl.VERIFY_X509_STRICT
        self.load_verify_locations(cadata=files.ca)
        self.load_cert_chain(Path(files.certificate))


class NodeServerContext(_NodeContext):
    """TLS context of a server that accepts clients with a certificate of the cluster's CA."""

    @classmethod
    def create(cls, files: ClusterFiles) -> "NodeServerContext":
        """Return a context with the certificates of `files`.

        Raise `OSError`, `ValueError` or `ssl.SSLError` if they cannot be used.
        """
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.load(files)
        return context


class NodeClientContext(_NodeContext):
    """TLS context of a client that accepts only one server: a given node, or the coordinator."""

    _uri = ""

    @classmethod
    def create(cls, files: ClusterFiles, node: str) -> "NodeClientContext":
        """Return a context with the certificates of `files` that accepts the node with the id `node`.

        Raise `OSError`, `ValueError` or `ssl.SSLError` if the certificates cannot be used.
        """
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context.load(files)
        context.accept_only(build_node_uri(files.cluster, NodeId(node)))
        return context

    @classmethod
    def create_for_coordinator(cls, files: ClusterFiles) -> "NodeClientContext":
        """Return a context with the certificates of `files` that accepts the coordinator of the cluster.

        Raise `OSError`, `ValueError` or `ssl.SSLError` if the certificates cannot be used.
        """
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context.load(files)
        context.accept_only(build_coordinator_uri(files.cluster))
        return context

    def accept_only(self, uri: str) -> None:
        """Accept only servers whose certificate has this URI."""
        self._uri = uri

    def wrap_socket(self, *args: Any, **named: Any) -> ssl.SSLSocket:
        """Perform the handshake, with the arguments of `ssl.SSLContext.wrap_socket`. Return the connection.

        Raise `ssl.SSLCertVerificationError` if the server is another node, `OSError` if the handshake fails.
        """
        wrapped = super().wrap_socket(*args, **named)
        shown = wrapped.getpeercert(binary_form=True)
        if not shown or not self._uri or read_certificate(shown).uri != self._uri:
            wrapped.close()
            raise ssl.SSLCertVerificationError(f"the certificate is not that of {self._uri}")
        return wrapped
