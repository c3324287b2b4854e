import asyncio
import datetime
import ssl
import stat
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from structlog.testing import capture_logs

from coordinator.tls.cluster_ca import (
    CA_VALIDITY_SECONDS,
    AuthorityError,
    CertificateRequestError,
    ClusterCa,
    create_certificate_builder,
    extract_public_key,
    read_cluster_id,
    read_key_pair,
    write_key_pair,
)
from node.agent.identity import (
    NodeIdentity,
    create_authority_context,
    create_client_context,
    new_request,
    proves_coordinator,
    store_identity,
)
from tests.support.cluster.enrolment import Wall
from wire.certificate import BACKDATED_SECONDS, LEAF_VALIDITY_SECONDS, read_certificate
from wire.identity import NodeId, PeerIdentity, build_coordinator_uri, build_node_uri
from wire.join_token import build_rejoin_text

NODE = NodeId("0f0e0d0c")
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "anything")])


def identity(authority: ClusterCa, folder: Path, node: NodeId = NODE) -> NodeIdentity:
    request = new_request("studio")
    return store_identity(
        folder, request, authority.sign_request(request.csr, node, "studio"), authority.cluster, authority.ca, "m1"
    )


async def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[bytes, ssl.SSLObject, ssl.SSLObject | None]:
    """Connect once. Return the bytes that the client read, and the TLS objects of client and server.

    The server's object is None if its handshake has not ended. Errors of the client propagate.
    """
    seen: list[ssl.SSLObject] = []

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("ssl_object"))
        writer.write(b"hello")
        writer.close()

    listening = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=server)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        tls = writer.get_extra_info("ssl_object")
        try:
            return await reader.read(), tls, seen[0] if seen else None
        finally:
            writer.close()


async def refused(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """Return whether the connection fails. In TLS 1.3 the client is refused after its own handshake, by an error or an
    early end."""
    try:
        greeting, _, _ = await shake(server, client)
    except OSError:
        return True
    return greeting == b""


async def test_link_verifies_both_certificates(tmp_path: Path) -> None:
    authority = ClusterCa(tmp_path / "c", time.time)
    ours = create_client_context(identity(authority, tmp_path / "n"))
    assert ours.verify_flags & authority.get_server_context().verify_flags & ssl.VERIFY_X509_STRICT
    assert not ours.check_hostname
    assert authority.get_server_context().num_tickets == 0, "no link is resumed without a verification"
    greeting, at_node, at_coordinator = await shake(authority.get_server_context(), ours)
    assert greeting == b"hello"
    assert at_node.version() == "TLSv1.3"
    assert proves_coordinator(at_node, authority.cluster)
    assert not proves_coordinator(at_node, "another")
    assert authority.identify_peer(at_coordinator) == PeerIdentity(authority.cluster, NODE)


async def test_a_peer_without_certificate_connects_but_is_no_member(tmp_path: Path) -> None:
    authority = ClusterCa(tmp_path, time.time)
    greeting, _, at_coordinator = await shake(authority.get_server_context(), create_authority_context(authority.ca))
    assert greeting == b"hello"
    assert authority.identify_peer(at_coordinator) is None
    assert authority.identify_peer(None) is None


async def test_a_certificate_of_a_foreign_authority_is_refused(tmp_path: Path) -> None:
    authority, foreign = ClusterCa(tmp_path / "c", time.time), ClusterCa(tmp_path / "f", time.time)
    client = create_authority_context(authority.ca)
    client.load_cert_chain(client_file(identity(foreign, tmp_path / "n")))
    assert await refused(authority.get_server_context(), client)
    with pytest.raises(ssl.SSLCertVerificationError):
        await shake(foreign.get_server_context(), create_authority_context(authority.ca))


async def test_a_node_cannot_pose_as_coordinator_nor_the_coordinator_as_node(tmp_path: Path) -> None:
    authority = ClusterCa(tmp_path / "c", time.time)
    posing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    posing.load_cert_chain(client_file(identity(authority, tmp_path / "n")))
    _, at_client, _ = await shake(posing, create_authority_context(authority.ca))
    assert not proves_coordinator(at_client, authority.cluster)
    client = create_authority_context(authority.ca)
    client.load_cert_chain(tmp_path / "c" / "coordinator.pem")
    assert await refused(authority.get_server_context(), client)


async def test_an_older_tls_is_refused(tmp_path: Path) -> None:
    authority = ClusterCa(tmp_path, time.time)
    client = create_authority_context(authority.ca)
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await refused(authority.get_server_context(), client)


def client_file(identity: NodeIdentity) -> Path:
    return identity.folder / "node.pem"


def test_of_a_request_only_the_key_is_used(tmp_path: Path) -> None:
    authority = ClusterCa(tmp_path, time.time)
    key = ec.generate_private_key(ec.SECP256R1())
    uri = x509.UniformResourceIdentifier(build_coordinator_uri(authority.cluster))
    csr = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=3), critical=True)
        .add_extension(x509.SubjectAlternativeName([uri, x509.DNSName("localhost")]), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )
    made = x509.load_der_x509_certificate(authority.sign_request(csr, NODE))
    assert made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert list(made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value) == [
        x509.UniformResourceIdentifier(build_node_uri(authority.cluster, NODE))
    ]
    assert made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == NODE
    assert made.public_key() == key.public_key()


def request_for(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(NAME)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(Encoding.DER)


def test_requests_for_other_keys_are_refused() -> None:
    for key in (
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ):
        with pytest.raises(CertificateRequestError, match="P-256"):
            extract_public_key(request_for(key))


def test_a_request_that_was_changed_is_refused() -> None:
    good = request_for(ec.generate_private_key(ec.SECP256R1()))
    forged = good.replace(b"anything", b"Anything")
    with pytest.raises(CertificateRequestError, match="not signed by its own key"):
        extract_public_key(forged)
    for bad in (b"", b"junk", good[:-1], good + b"x", good * 100):
        with pytest.raises(CertificateRequestError):
            extract_public_key(bad)


def test_certificates_have_the_specified_validity(tmp_path: Path) -> None:
    wall = Wall(1_800_000_000.0)
    authority = ClusterCa(tmp_path, wall)
    told = read_certificate(authority.sign_request(new_request("a").csr, NODE, "a"))
    assert (told.issued, told.expires, told.name) == (wall.now, wall.now + LEAF_VALIDITY_SECONDS, "a")
    assert told.renew_from == wall.now + 60 * 86400
    ca = x509.load_der_x509_certificate(authority.ca)
    assert ca.not_valid_after_utc - ca.not_valid_before_utc == datetime.timedelta(days=3651)


async def test_new_connections_get_the_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    days_ago = [61.0]
    authority = ClusterCa(tmp_path, lambda: time.time() - days_ago[0] * 86400)
    client = create_authority_context(authority.ca)

    async def read_expiry() -> float:
        _, at_client, _ = await shake(authority.get_server_context(), client)
        return read_certificate(at_client.getpeercert(binary_form=True) or b"").expires

    assert await read_expiry() < time.time() + 30 * 86400
    days_ago[0] = 0.0
    assert authority.renew()
    assert await read_expiry() == authority.validity[1] > time.time() + 80 * 86400
    assert not authority.renew()


def test_the_authority_is_the_same_after_a_restart_and_renews_what_is_due(tmp_path: Path) -> None:
    wall = Wall()
    first = ClusterCa(tmp_path, wall)
    own = (tmp_path / "coordinator.pem").read_bytes()
    second = ClusterCa(tmp_path, wall)
    assert (second.ca, second.cluster) == (first.ca, first.cluster)
    assert (tmp_path / "coordinator.pem").read_bytes() == own
    wall.now += 61 * 86400
    third = ClusterCa(tmp_path, wall)
    assert (tmp_path / "coordinator.pem").read_bytes() != own
    assert third.renew_from > wall.now


def test_a_clock_before_the_creation_of_the_cluster_is_a_warning(tmp_path: Path) -> None:
    wall = Wall(time.time())
    authority = ClusterCa(tmp_path, wall)
    for back, warned in ((BACKDATED_SECONDS - 10, []), (BACKDATED_SECONDS + 10, ["warning"])):
        wall.now = time.time() - back
        with capture_logs() as logs:
            authority.renew()
        assert [entry["log_level"] for entry in logs if "correct the clock" in entry["event"]] == warned


def test_a_coordinator_certificate_of_another_authority_is_replaced(tmp_path: Path) -> None:
    first, second = ClusterCa(tmp_path / "a", time.time), ClusterCa(tmp_path / "b", time.time)
    foreign = (tmp_path / "b" / "coordinator.pem").read_bytes()
    (tmp_path / "a" / "coordinator.pem").write_bytes(foreign)
    assert ClusterCa(tmp_path / "a", time.time).cluster == first.cluster != second.cluster
    assert (tmp_path / "a" / "coordinator.pem").read_bytes() != foreign


def test_damaged_files_are_a_clear_error(tmp_path: Path) -> None:
    ClusterCa(tmp_path, time.time)
    (tmp_path / "authority.pem").write_bytes((tmp_path / "coordinator.pem").read_bytes())
    with pytest.raises(AuthorityError, match="not a macpool authority"):
        ClusterCa(tmp_path, time.time)
    (tmp_path / "authority.pem").write_bytes(b"junk")
    with pytest.raises(AuthorityError, match="restore"):
        ClusterCa(tmp_path, time.time)


def test_keys_are_private(tmp_path: Path) -> None:
    ClusterCa(tmp_path / "c", time.time)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in (tmp_path / "c").iterdir())
    assert {file.name for file in (tmp_path / "c").iterdir()} == {"authority.pem", "coordinator.pem"}


def test_a_certificate_of_another_cluster_names_no_member(tmp_path: Path) -> None:
    ours, other = ClusterCa(tmp_path / "a", time.time), ClusterCa(tmp_path / "b", time.time)
    csr = new_request("a").csr
    assert ours.identify_peer(ours.sign_request(csr, NODE)) == PeerIdentity(ours.cluster, NODE)
    assert ours.identify_peer(other.sign_request(csr, NODE)) is None
    own = x509.load_pem_x509_certificate((tmp_path / "a" / "coordinator.pem").read_bytes())
    assert ours.identify_peer(own.public_bytes(Encoding.DER)) is None


def test_the_authority_signs_leaves_alone_and_each_leaf_is_for_its_purposes(tmp_path: Path) -> None:
    wall = Wall(1_800_000_000.0)
    authority = ClusterCa(tmp_path, wall)
    ca = x509.load_der_x509_certificate(authority.ca)
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (True, True, False)
    node = x509.load_der_x509_certificate(authority.sign_request(new_request("x").csr, NODE, "studio"))
    own = x509.load_pem_x509_certificate((tmp_path / "coordinator.pem").read_bytes())
    for leaf, purposes, uri in (
        (
            node,
            [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
            build_node_uri(authority.cluster, NODE),
        ),
        (own, [ExtendedKeyUsageOID.SERVER_AUTH], build_coordinator_uri(authority.cluster)),
    ):
        assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(
            False, None
        )
        assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == purposes
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert list(names) == [x509.UniformResourceIdentifier(uri)]
        usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
        assert (usage.key_cert_sign, usage.digital_signature) == (False, True)
        begin, end = (moment.timestamp() for moment in (leaf.not_valid_before_utc, leaf.not_valid_after_utc))
        assert (wall.now - begin, end - wall.now) == (24 * 3600.0, 90 * 24 * 3600.0)
    assert (ca.not_valid_after_utc.timestamp() - wall.now) == 3650 * 24 * 3600.0
    short = ClusterCa(tmp_path, wall, node_life=3600.0).sign_request(new_request("x").csr, NODE)
    assert read_certificate(short).expires == wall.now + 3600.0


# proofs


def prove(pem: Path, csr: bytes) -> tuple[bytes, bytes]:
    """Return the certificate of a key pair's file (DER), and the proof by its key for a request."""
    key, certificate = read_key_pair(pem)
    return certificate.public_bytes(Encoding.DER), key.sign(build_rejoin_text(csr), ec.ECDSA(hashes.SHA256()))


def issue(authority: ClusterCa, folder: Path, node: NodeId = NODE) -> Path:
    """Write a key with its certificate as a node."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(NAME).sign(key, hashes.SHA256())
    signed = authority.sign_request(request.public_bytes(Encoding.DER), node, "studio")
    pem = folder / f"{node}.pem"
    write_key_pair(pem, key, x509.load_der_x509_certificate(signed))
    return pem


def test_the_key_of_a_members_certificate_proves_who_joins_again(tmp_path: Path) -> None:
    wall = Wall()
    authority = ClusterCa(tmp_path / "one", wall)
    csr = new_request("studio").csr
    certificate, proof = prove(issue(authority, tmp_path), csr)
    member = (NODE, read_certificate(certificate).serial)
    assert authority.identify_signer(certificate, csr, proof) == member
    wall.now += 2 * LEAF_VALIDITY_SECONDS
    assert authority.identify_signer(certificate, csr, proof) == member, "an expired certificate proves the key"
    assert authority.identify_signer(certificate, new_request("studio").csr, proof) is None
    other_certificate, other_proof = prove(issue(authority, tmp_path, NodeId("0a0b0c0d")), csr)
    assert authority.identify_signer(certificate, csr, other_proof) is None
    assert authority.identify_signer(other_certificate, csr, proof) is None
    for broken in (
        (b"", csr, proof),
        (b"\x30\x00", csr, proof),
        (certificate, csr, b""),
        (certificate, csr, b"x" * 70),
    ):
        assert authority.identify_signer(*broken) is None


def test_certificates_of_no_member_of_this_cluster_prove_nothing(tmp_path: Path) -> None:
    authority, other = ClusterCa(tmp_path / "one", time.time), ClusterCa(tmp_path / "two", time.time)
    csr = new_request("studio").csr
    certificate, proof = prove(issue(other, tmp_path), csr)
    assert other.identify_signer(certificate, csr, proof) is not None
    assert authority.identify_signer(certificate, csr, proof) is None
    certificate, proof = prove(tmp_path / "one" / "coordinator.pem", csr)
    assert authority.identify_signer(certificate, csr, proof) is None, "it names no node"


def test_a_certificate_that_only_names_a_member_proves_nothing(tmp_path: Path) -> None:
    authority, key = ClusterCa(tmp_path, time.time), ec.generate_private_key(ec.SECP256R1())
    csr, issuer = new_request("studio").csr, x509.load_der_x509_certificate(authority.ca).subject
    uri = x509.UniformResourceIdentifier(build_node_uri(authority.cluster, NODE))
    forged = (
        create_certificate_builder("studio", key.public_key(), issuer, time.time(), 1000.0)
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .sign(key, hashes.SHA256())
    )
    proof = key.sign(build_rejoin_text(csr), ec.ECDSA(hashes.SHA256()))
    assert authority.identify_signer(forged.public_bytes(Encoding.DER), csr, proof) is None


def test_a_key_of_another_certificate_is_not_used(tmp_path: Path) -> None:
    ClusterCa(tmp_path, time.time)
    (key, _), (_, certificate) = (read_key_pair(tmp_path / f"{name}.pem") for name in ("coordinator", "authority"))
    write_key_pair(tmp_path / "authority.pem", key, certificate)
    with pytest.raises(AuthorityError, match=r"authority\.pem do not match: restore them from a backup"):
        ClusterCa(tmp_path, time.time)


def test_a_cluster_that_lost_its_authority_gets_no_new_one(tmp_path: Path) -> None:
    with pytest.raises(AuthorityError, match=r"authority\.pem cannot be read .*restore it from a backup"):
        ClusterCa(tmp_path, time.time, is_new_cluster=False)
    assert list(tmp_path.iterdir()) == []


def test_a_generation_is_sealed_by_the_authority_of_its_cluster_alone(tmp_path: Path) -> None:
    authority, other = ClusterCa(tmp_path / "one", time.time), ClusterCa(tmp_path / "two", time.time)
    seal = authority.seal_generation(3)
    assert authority.is_sealed(3, seal)
    assert ClusterCa(tmp_path / "one", time.time).is_sealed(3, seal)
    assert not authority.is_sealed(4, seal)
    assert not other.is_sealed(3, seal)
    assert not authority.is_sealed(3, b"")


def test_validities_of_authority_and_coordinator_are_read_from_their_certificates(tmp_path: Path) -> None:
    wall = Wall()
    authority = ClusterCa(tmp_path, wall)
    issued, expires = authority.ca_validity
    assert issued < wall.now
    assert expires == pytest.approx(wall.now + CA_VALIDITY_SECONDS, abs=1)
    assert authority.validity[1] == pytest.approx(wall.now + LEAF_VALIDITY_SECONDS, abs=1)
    assert wall.now < authority.renew_from < authority.validity[1]


def test_the_cluster_is_read_from_the_file_of_its_authority_only(tmp_path: Path) -> None:
    authority = ClusterCa(tmp_path, time.time)
    assert read_cluster_id(tmp_path / "authority.pem") == authority.cluster
    with pytest.raises(AuthorityError, match=r"coordinator\.pem is not a macpool authority"):
        read_cluster_id(tmp_path / "coordinator.pem")


def test_keys_are_for_signatures_of_certificates_or_of_connections_only(tmp_path: Path) -> None:
    ClusterCa(tmp_path, time.time)
    for name, uses in (("authority", {"key_cert_sign", "crl_sign"}), ("coordinator", {"digital_signature"})):
        pem = tmp_path / f"{name}.pem"
        usage = read_key_pair(pem)[1].extensions.get_extension_for_class(x509.KeyUsage)
        names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        found = {name for name in (*names, "key_cert_sign", "crl_sign") if getattr(usage.value, name)}
        assert (usage.critical, found) == (True, uses)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_certificate_from_the_future_is_replaced_after_the_clock_was_set_back(tmp_path: Path, restarted: bool):
    """Nodes refuse a certificate that is not valid yet, and the clock may have been wrong for one renewal only."""
    wall = Wall()
    authority, now = ClusterCa(tmp_path, wall), wall.now
    wall.now += LEAF_VALIDITY_SECONDS
    assert authority.renew()
    wall.now = now
    if restarted:
        authority = ClusterCa(tmp_path, wall)
    else:
        assert authority.renew()
    assert authority.validity[0] <= now
    assert not authority.renew()
