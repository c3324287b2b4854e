"""The peers that a node accepts as its coordinator."""

import asyncio
import ssl
import time
from pathlib import Path
from typing import cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from structlog.testing import capture_logs

from coordinator.tls.cluster_ca import ClusterCa
from node.agent.connection import UNREACHED_ROUNDS, CoordinatorLink, DialFailures, NotTheCoordinator, dial
from node.agent.identity import create_authority_context
from tests.support.cluster.recorded_link import RecordedTransport
from wire.codec import encode
from wire.frames import Ping
from wire.identity import NodeId, build_coordinator_uri, build_node_uri


def posing(folder: Path, authority: ClusterCa, uri: str) -> ssl.SSLContext:
    """Make a server with a server certificate of the cluster's CA, with this URI as its name."""
    content = (folder / "authority.pem").read_bytes()
    key = serialization.load_pem_private_key(content, None)
    own = x509.load_pem_x509_certificate((folder / "coordinator.pem").read_bytes())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    leaf = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder(own.issuer, own.subject, leaf.public_key(), x509.random_serial_number())
        .not_valid_before(own.not_valid_before_utc)
        .not_valid_after(own.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    for kept in (x509.AuthorityKeyIdentifier, x509.BasicConstraints, x509.KeyUsage):
        found = own.extensions.get_extension_for_class(kept)
        builder = builder.add_extension(found.value, critical=found.critical)
    file = folder / "posing.pem"
    file.write_bytes(
        leaf.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


async def reached(
    folder: Path,
    uri: str,
    links: list[CoordinatorLink] | None = None,
    reasons: asyncio.Queue[str] | None = None,
) -> CoordinatorLink:
    """Connect to a server of this name as a node of the cluster. Append the link to `links`, and put the reason of its
    end into `reasons`."""
    authority = ClusterCa(folder, time.time)
    uri = uri.replace("CLUSTER", authority.cluster)
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=posing(folder, authority, uri)
    )
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

        def create(address: str) -> CoordinatorLink:
            link = CoordinatorLink(
                address,
                authority.cluster,
                lambda *_: None,
                lambda _, reason: None if reasons is None else reasons.put_nowait(reason),
            )
            if links is not None:
                links.append(link)
            return link

        return await dial(address, create_authority_context(authority.ca), create)


@pytest.mark.parametrize(
    "uri", [build_node_uri("CLUSTER", NodeId("n1")), build_coordinator_uri("another"), "https://coordinator.example"]
)
async def test_only_a_certificate_of_the_coordinator_is_accepted(tmp_path: Path, uri: str) -> None:
    with pytest.raises(NotTheCoordinator):
        await reached(tmp_path, uri)


async def test_the_connection_to_another_server_is_aborted(tmp_path: Path) -> None:
    links: list[CoordinatorLink] = []
    reasons: asyncio.Queue[str] = asyncio.Queue()
    with pytest.raises(NotTheCoordinator):
        await reached(tmp_path, build_coordinator_uri("another"), links, reasons)
    (link,) = links
    assert not link.verified
    assert await asyncio.wait_for(reasons.get(), 10) == "the server is not the coordinator of this cluster"


async def test_a_link_without_tls_is_no_link_to_the_coordinator() -> None:
    link = CoordinatorLink("127.0.0.1:1", "cluster", lambda *_: None, lambda *_: None)
    with pytest.raises(NotTheCoordinator):
        link.verify()
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        plain = cast("asyncio.Protocol", link)
        await asyncio.get_running_loop().create_connection(lambda: plain, *server.sockets[0].getsockname())
        with pytest.raises(NotTheCoordinator):
            link.verify()
    assert not link.verified


async def test_the_coordinator_is_verified(tmp_path: Path) -> None:
    assert (await reached(tmp_path, build_coordinator_uri("CLUSTER"))).verified


def test_a_coordinator_that_is_not_reached_is_warned_of_once_with_the_last_cause() -> None:
    failures, error = DialFailures(), ssl.SSLCertVerificationError("certificate verify failed")
    error.verify_message = "self-signed certificate"
    with capture_logs() as logs:
        for number in range(UNREACHED_ROUNDS + 2):
            failures.record(f"host:{number}", error)
            failures.end_round()
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["address"] == f"host:{UNREACHED_ROUNDS - 1}"
    assert warning["error"].startswith("self-signed certificate")


async def test_bytes_of_a_peer_that_is_not_proven_are_discarded():
    received = list[int]()
    link = CoordinatorLink("mac:8081", "c", lambda link, tag, body: received.append(tag), lambda *_: None)
    transport = RecordedTransport()
    link.connection_made(transport)
    link.data_received(encode(Ping(1)))
    assert received == []
    with pytest.raises(NotTheCoordinator):
        link.verify()
    link.data_received(encode(Ping(2)))
    assert (received, transport.is_closing()) == ([], True)
