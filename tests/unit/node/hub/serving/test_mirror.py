"""Ports of a mirror, its addresses for other nodes, and mirrors that cannot begin."""

import socket
import ssl
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.tls.cluster_ca import ClusterCa
from node.hub.child_messages import ChildChannel, ChildEnd, ClusterFiles, MirrorOrder
from node.hub.serving.mirror import format_url, open_ports, run_mirror
from node.hub.serving.node_tls import NodeServerContext
from tests.support.cluster.model_node import get_files, make_identity
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile, ModelManifest

UNUSABLE = "192.0.2.1"
"""Address of no machine."""
MANIFEST = ModelManifest("a/b", "c" * 40, (ModelFile("config.json", 2, "a" * 64),))


def open_all(stack: ExitStack, *hosts: str) -> list[socket.socket]:
    return [stack.enter_context(listener) for listener in open_ports(hosts)]


def test_all_addresses_get_the_same_port_and_unusable_ones_none():
    with ExitStack() as stack:
        first, second = open_all(stack, UNUSABLE, "127.0.0.1", UNUSABLE, "127.0.0.2")
        port = first.getsockname()[1]
        assert [listener.getsockname() for listener in (first, second)] == [("127.0.0.1", port), ("127.0.0.2", port)]
        assert [format_url(listener) for listener in (first, second)] == [
            f"https://127.0.0.1:{port}",
            f"https://127.0.0.2:{port}",
        ]
        for listener in (first, second):
            with socket.create_connection(listener.getsockname(), 5):
                pass


def test_a_second_address_whose_port_is_taken_gets_another_one():
    with ExitStack() as stack:
        listeners = open_all(stack, "127.0.0.1", "127.0.0.1")
        ports = {listener.getsockname()[1] for listener in listeners}
        assert len(ports) == 2, "the port of the first one is taken at this address"


def test_an_address_of_ipv6_is_written_in_brackets():
    with ExitStack() as stack:
        try:
            (listener,) = open_all(stack, "::1")
        except OSError:
            pytest.skip("this system has no IPv6")
        assert format_url(listener) == f"https://[::1]:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("hosts", "text"), [((), "the order names no address"), ((UNUSABLE,), "assign requested")])
def test_a_mirror_without_a_usable_address_cannot_begin(tmp_path: Path, hosts: tuple[str, ...], text: str):
    with pytest.raises(OSError, match=text):
        open_ports(hosts)
    authority = ClusterCa(tmp_path / "authority", time.time)
    end = run(tmp_path, get_files(make_identity(tmp_path, authority, "n1")), hosts)
    assert end.code == ModelOrderCode.FAILED
    assert end.message.startswith("the mirror cannot begin: ")
    assert text in end.message
    assert "Errno" not in end.message


def test_a_mirror_without_certificates_cannot_begin(tmp_path: Path):
    end = run(tmp_path, ClusterFiles(cluster="c1", certificate=str(tmp_path / "missing")), ("127.0.0.1",))
    assert end.code == ModelOrderCode.FAILED
    assert end.message.startswith("the mirror cannot begin: ")


def test_nodes_use_no_older_tls_between_each_other(tmp_path: Path):
    files = get_files(make_identity(tmp_path, ClusterCa(tmp_path / "authority", time.time), "n1"))
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    older.load_cert_chain(files.certificate)
    (server_bytes, client_bytes), server = (ssl.MemoryBIO(), ssl.MemoryBIO()), NodeServerContext.create(files)
    client = older.wrap_bio(server_bytes, client_bytes)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol|version"):
        server.wrap_bio(client_bytes, server_bytes, server_side=True).do_handshake()


def test_a_mirror_ends_without_requests_or_at_a_stop(tmp_path: Path):
    cluster = get_files(make_identity(tmp_path, ClusterCa(tmp_path / "authority", time.time), "n1"))
    assert run(tmp_path, cluster, ("127.0.0.1",), idle_seconds=0.1).code == ModelOrderCode.COMPLETED
    channel = ChildChannel()
    channel.stop.set()
    assert run(tmp_path, cluster, ("127.0.0.1",), channel=channel).code == ModelOrderCode.CANCELLED


def run(
    folder: Path,
    cluster: ClusterFiles,
    hosts: tuple[str, ...],
    *,
    idle_seconds: float = 60.0,
    channel: ChildChannel | None = None,
) -> ChildEnd:
    order = MirrorOrder(
        manifest=MANIFEST,
        hub=str(folder / "hub"),
        token="token",
        cluster=cluster,
        hosts=hosts,
        idle_seconds=idle_seconds,
    )
    return run_mirror(order, channel or ChildChannel())
