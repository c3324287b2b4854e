"""Files of a node's identity."""

import time
from pathlib import Path

from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import delete_identity, load_identity, new_csr, new_request, store_identity
from wire.identity import NodeId


def test_delete_identity_leaves_neither_key_nor_certificate_nor_address(tmp_path: Path):
    authority, folder, request = ClusterCa(tmp_path / "c", time.time), tmp_path / "n", new_request("studio")
    certificate = authority.sign_request(request.csr, NodeId("n-1"), "studio")
    new_csr(store_identity(folder, request, certificate, authority.cluster, authority.ca, "m-1"))
    assert {file.name for file in folder.iterdir()} == {"node.pem", "next.key", "identity.json"}
    delete_identity(folder)
    assert list(folder.iterdir()) == []
    assert load_identity(folder, "m-1") is None
    delete_identity(folder)
